//! What a worker reads from the processes it starts, and what it notes about program and machine.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

use serde_json::Value;

use super::state::TestScore;

impl TestScore {
    /// The score in a few words.
    pub fn brief(&self) -> String {
        let at = self.at.as_ref().map(|(key, value)| format!(" at {key} {value}")).unwrap_or_default();
        format!("{} {:.3}{at}", self.measure.replace('_', " "), self.score)
    }
}

/// The scores of a run in rows of `elmur eval --json`: one of the checkpoint and one over all runs for each value.
pub fn scores(text: &str, varied: Option<&str>) -> Option<Vec<TestScore>> {
    let rows: Vec<Value> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>().ok()?;
    let score = |pair: &[Value]| {
        let [row, over_all] = pair else { return None };
        Some(TestScore {
            at: varied.map(|key| (key.to_owned(), row[key].clone())),
            measure: row["measure"].as_str()?.to_owned(),
            score: row["score"].as_f64()?,
            sem: row["sem"].as_f64()?,
            episodes: row["episodes"].as_u64()?,
            returns: row["return"].as_f64()?,
            good_return: over_all["good_return"].as_f64(),
        })
    };
    let scores: Vec<TestScore> = rows.chunks(2).map(score).collect::<Option<_>>()?;
    (!scores.is_empty()).then_some(scores)
}

/// Why a process failed: its last words since `from`, else how it ended.
pub fn reason(log: &Path, from: u64, status: ExitStatus) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(text.get(from as usize..).unwrap_or_default()).into_owned();
    let error = text.lines().rev().find_map(|line| line.strip_prefix("error: "));
    match error.or_else(|| text.lines().rev().find(|line| line.contains("panicked"))) {
        Some(words) => words.to_owned(),
        None => format!("{status}; see {}", log.display()),
    }
}

/// The commit of the working folder: what `ELMUR_COMMIT` says, else what git says.
pub fn commit() -> Option<String> {
    if let Ok(commit) = std::env::var("ELMUR_COMMIT") {
        return Some(commit).filter(|commit| !commit.is_empty());
    }
    let git = |args: &[&str]| {
        let output = Command::new("git").args(args).stderr(Stdio::null()).output().ok()?;
        let text = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
        Some(text.trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short", "HEAD"])?;
    let changed =
        git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|text| !text.is_empty());
    Some(if changed { format!("{commit} with changes") } else { commit })
}

/// The machine in a few words.
pub fn machine(device: &str) -> String {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find(|line| line.starts_with("model name")).and_then(|line| line.split_once(':'));
    let model = model.map_or(std::env::consts::ARCH, |(_, name)| name.trim());
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let device = if device == "cpu" { String::new() } else { format!(", {device}") };
    format!("{model}, {cores} cores{device}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_are_read_from_rows_of_an_evaluation() {
        let text = r#"{"checkpoint":"a","episodes":10,"measure":"return","score":0.5,"sem":0.1,"return":0.5,"length":9}
{"env":"tmaze","runs":1,"good_return":1.0,"score":0.5}
{"checkpoint":"a","episodes":10,"measure":"return","score":0.25,"sem":0.0,"return":0.25,"length":90}
{"env":"tmaze","runs":1,"good_return":null,"score":0.25}"#;
        let found = scores(text, Some("length")).unwrap();
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].score, found[0].sem, found[0].good_return), (0.5, 0.1, Some(1.0)));
        assert_eq!(found[1].at, Some(("length".to_owned(), 90.into())));
        assert_eq!(found[1].brief(), "return 0.250 at length 90");
        for damaged in ["", "x", r#"{"checkpoint":"a"}"#, text.lines().next().unwrap()] {
            assert_eq!(scores(damaged, None), None, "{damaged}");
        }
    }
}
