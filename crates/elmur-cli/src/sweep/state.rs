//! What has become of a sweep's runs: results in one small file each, failures beside them, and all results in one
//! file that is small enough for a repository.
//!
//! ```text
//! OUT/results.json            results of all runs that are done
//! OUT/runs/RUN/               the run itself, as `elmur train` makes it
//! OUT/runs/RUN.json           result of a run that is done
//! OUT/runs/RUN.trained.json   that a run is trained, with which commit and on which machine
//! OUT/runs/RUN.failed.json    why a run failed
//! OUT/runs/RUN.claim          which worker has the run
//! OUT/runs/RUN.log            what training and evaluation said
//! OUT/runs/RUN.rows           scores, while a run is evaluated
//! ```

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use elmur_base::files::{read_small, write_atomic};
use elmur_train::{Error, Result, RunFolder};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::claim::{Claim, Worker};
use super::file::{Plan, PlannedRun};

/// Largest size of a file of results, in bytes.
const MAX_RESULTS: u64 = 1 << 28;

/// The result of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// Id of the run ([`PlannedRun::id`]).
    pub id: String,
    /// Preset.
    pub task: String,
    /// Policy.
    pub policy: String,
    /// Case, where the sweep has cases.
    pub case: Option<String>,
    /// Seed.
    pub seed: u64,
    /// Settings that differ from the preset's.
    pub settings: Map<String, Value>,
    /// Scores on test episodes, one for each value at which the run was evaluated.
    pub scores: Vec<TestScore>,
    /// Number of batches trained.
    pub batches: u64,
    /// Seconds spent on these batches, without validation.
    pub train_seconds: f64,
    /// Commit of the working folder, or what the user said it is.
    pub commit: Option<String>,
    /// Version of the program.
    pub version: String,
    /// The machine that finished the run.
    pub machine: String,
    /// When the run was finished, in UTC.
    pub finished: String,
}

/// How well a run did on test episodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TestScore {
    /// The setting of the environment that was varied, and its value.
    pub at: Option<(String, Value)>,
    /// What was measured.
    pub measure: String,
    /// Mean over episodes.
    pub score: f64,
    /// Standard error of the mean over episodes.
    pub sem: f64,
    /// Number of episodes.
    pub episodes: u64,
    /// Mean return.
    #[serde(rename = "return")]
    pub returns: f64,
    /// Return of good play, where the environment knows it.
    pub good_return: Option<f64>,
}

/// Results by the ids of their runs.
pub type Results = BTreeMap<String, RunResult>;

/// What has become of a run.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    /// Trained and evaluated; or known from an earlier sweep.
    Done,
    /// A worker has it.
    Running(Worker),
    /// Training or evaluation failed for this reason.
    Failed(String),
    /// Begun, and to be continued by the next worker.
    Interrupted,
    /// Not begun.
    Waiting,
}

/// A file of results: those of `elmur sweep report`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResultsFile {
    sweep: String,
    results: Vec<RunResult>,
}

/// Results of a plan's runs that are done, and of all others that its file `known` has.
pub fn results(plan: &Plan) -> Result<Results> {
    let mut all = known(plan)?;
    for run in &plan.runs {
        if let Some(result) = result_of(plan, run)? {
            all.insert(run.id.clone(), result);
        }
    }
    Ok(all)
}

/// Results of earlier sweeps.
pub fn known(plan: &Plan) -> Result<Results> {
    match &plan.known {
        Some(path) if path.exists() => read_results(path),
        Some(path) => {
            crate::note(&format!("{}: no known results yet", path.display()));
            Ok(Results::new())
        }
        None => Ok(Results::new()),
    }
}

fn read_results(path: &Path) -> Result<Results> {
    let text = read_small(path, MAX_RESULTS)?;
    let file: ResultsFile = serde_json::from_str(&text).map_err(|e| {
        Error::file(
            path,
            format!("not a file of `elmur sweep report`: {e}; remove it, or name another in `known`"),
        )
    })?;
    Ok(file.results.into_iter().map(|result| (result.id.clone(), result)).collect())
}

/// Writes a file of results, one line per run: small changes of a sweep are small changes of the file.
pub fn write_results(path: &Path, plan: &Plan, results: &Results) -> Result<()> {
    let places: HashMap<&str, usize> = plan.runs.iter().enumerate().map(|(i, run)| (&*run.id, i)).collect();
    let mut sorted: Vec<&RunResult> = results.values().collect();
    sorted.sort_by_key(|result| (places.get(&*result.id).copied().unwrap_or(usize::MAX), &result.id));
    let lines: Vec<String> = sorted.iter().map(|result| json!(result).to_string()).collect();
    let text = format!("{{\"sweep\":{},\"results\":[\n{}\n]}}\n", json!(plan.name), lines.join(",\n"));
    Ok(write_atomic(path, text.as_bytes())?)
}

/// Adds results to a file of results; those of other sweeps that it has stay.
pub fn add_results(path: &Path, plan: &Plan, results: &Results) -> Result<()> {
    let mut all = if path.exists() { read_results(path)? } else { Results::new() };
    all.extend(results.iter().map(|(id, result)| (id.clone(), result.clone())));
    write_results(path, plan, &all)
}

/// The result of a run that is done.
pub fn result_of(plan: &Plan, run: &PlannedRun) -> Result<Option<RunResult>> {
    let path = plan.path_of(run, ".json");
    if !path.exists() {
        return Ok(None);
    }
    let result: RunResult = serde_json::from_str(&read_small(&path, MAX_RESULTS)?).map_err(|e| {
        Error::file(&path, format!("not a result: {e}; remove it, and the run is evaluated again"))
    })?;
    Ok(Some(result))
}

/// Writes the result of a run, whole or not at all.
pub fn write_result(plan: &Plan, run: &PlannedRun, result: &RunResult) -> Result<()> {
    let path = plan.path_of(run, ".json");
    let text = serde_json::to_vec_pretty(result).map_err(|e| Error::file(&path, e))?;
    Ok(write_atomic(&path, &text)?)
}

/// The file that says that a run is trained.
fn trained_path(plan: &Plan, run: &PlannedRun) -> PathBuf {
    plan.path_of(run, ".trained.json")
}

/// Whether a run is trained, evaluated or not.
pub fn is_trained(plan: &Plan, run: &PlannedRun) -> bool {
    trained_path(plan, run).exists() && RunFolder::is_run(&plan.path_of(run, ""))
}

/// Notes that a run is trained.
pub fn write_trained(plan: &Plan, run: &PlannedRun, commit: Option<&str>, machine: &str) -> Result<()> {
    let note = json!({"commit": commit, "machine": machine});
    Ok(write_atomic(&trained_path(plan, run), note.to_string().as_bytes())?)
}

/// The commit and the machine that trained a run.
pub fn trained_by(plan: &Plan, run: &PlannedRun) -> (Option<String>, String) {
    let text = read_small(&trained_path(plan, run), MAX_RESULTS).unwrap_or_default();
    let note: Value = serde_json::from_str(&text).unwrap_or_default();
    let word = |key: &str| note[key].as_str().map(str::to_owned);
    (word("commit"), word("machine").unwrap_or_else(|| "unknown".to_owned()))
}

/// Why a run failed, if it did.
pub fn failure_of(plan: &Plan, run: &PlannedRun) -> Option<String> {
    let path = plan.path_of(run, ".failed.json");
    if !path.exists() {
        return None;
    }
    let note = read_small(&path, MAX_RESULTS).ok().and_then(|text| serde_json::from_str::<Value>(&text).ok());
    let reason = note.as_ref().and_then(|note| note["reason"].as_str());
    Some(reason.unwrap_or("no reason was kept").to_owned())
}

/// Notes that a run failed.
pub fn write_failure(plan: &Plan, run: &PlannedRun, reason: &str) -> Result<()> {
    let note = json!({"reason": reason, "at": utc(SystemTime::now()), "log": plan.path_of(run, ".log")});
    Ok(write_atomic(&plan.path_of(run, ".failed.json"), note.to_string().as_bytes())?)
}

/// Forgets that a run failed.
pub fn forget_failure(plan: &Plan, run: &PlannedRun) -> Result<()> {
    let path = plan.path_of(run, ".failed.json");
    match fs::remove_file(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(&path, e)),
        _ => Ok(()),
    }
}

/// What has become of a run, given all results.
pub fn state_of(plan: &Plan, run: &PlannedRun, results: &Results, worker: &Worker) -> State {
    if results.contains_key(&run.id) {
        return State::Done;
    }
    if let Some(holder) = Claim::holder(&plan.path_of(run, ".claim"), worker) {
        return State::Running(holder);
    }
    match failure_of(plan, run) {
        Some(reason) => State::Failed(reason),
        None if RunFolder::is_run(&plan.path_of(run, "")) => State::Interrupted,
        None => State::Waiting,
    }
}

/// The number of batches that a run has done, and the seconds that they took.
pub fn batches_of(plan: &Plan, run: &PlannedRun) -> (u64, f64) {
    let metrics = plan.path_of(run, "").join("metrics.jsonl");
    let text = fs::read_to_string(metrics).unwrap_or_default();
    let rows = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    rows.filter(|row| row["loss"].is_number()).fold((0, 0.0), |(batches, seconds), row| {
        let batch = row["batch"].as_u64().unwrap_or(0);
        (batches.max(batch), seconds + row["seconds"].as_f64().unwrap_or(0.0))
    })
}

/// How far the training of a run is, in a few words.
pub fn progress_of(plan: &Plan, run: &PlannedRun) -> String {
    let (batches, _) = batches_of(plan, run);
    let config = RunFolder::open(&plan.path_of(run, "")).and_then(|folder| folder.config());
    match config.ok().and_then(|config| config.train.batches) {
        Some(planned) => format!("batch {batches} of {planned}"),
        None => format!("batch {batches}"),
    }
}

/// A moment as text: 2026-11-16T09:30:00Z.
pub fn utc(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March: the day of a leap year is their last. Eras of 400 years have 146,097 days.
    let day = days + 719_468;
    let (era, of_era) = (day / 146_097, day % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (year, month) =
        (era * 400 + year + u64::from(month > 9), if month < 10 { month + 3 } else { month - 9 });
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn moments_are_written_as_dates() {
        let at = |seconds| utc(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(at(1_767_225_599), "2025-12-31T23:59:59Z");
        assert_eq!(at(1_794_821_400), "2026-11-16T09:30:00Z");
    }
}
