//! Traces of the Python package: JSON files (gzipped or not) with hidden states, actions, random draws,
//! observations, rewards and flags of some episodes, to be replayed and compared.

use std::io::Read;
use std::path::Path;

use elmur_base::Row;
use serde::Deserialize;
use serde_json::Value;

use super::replay::Replay;
use super::task::{Task, Version};
use crate::error::{Error, Result};

/// A trace file.
#[derive(Debug, Clone, Deserialize)]
pub struct Trace {
    /// Id of the task.
    pub env: String,
    /// Versions of the Python packages that recorded the trace.
    versions: Versions,
    episodes: Vec<Episode>,
}

#[derive(Debug, Clone, Deserialize)]
struct Versions {
    popgym: String,
}

#[derive(Debug, Clone, Deserialize)]
struct Episode {
    hidden: Value,
    reset_obs: Value,
    actions: Vec<Value>,
    obs: Vec<Value>,
    rewards: Vec<f64>,
    #[serde(deserialize_with = "flags")]
    terminated: Vec<bool>,
    #[serde(deserialize_with = "flags")]
    truncated: Vec<bool>,
    draws: Option<Vec<Value>>,
    states: Option<Vec<Vec<f64>>>,
}

/// Flags, written as false and true or as 0 and 1.
fn flags<'de, D: serde::Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<bool>, D::Error> {
    let flag = |value: &Value| {
        value.as_bool().or(match value.as_u64() {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => None,
        })
    };
    let flags: Option<Vec<bool>> = Vec::<Value>::deserialize(deserializer)?.iter().map(flag).collect();
    flags.ok_or_else(|| serde::de::Error::custom("expected flags (0 or 1)"))
}

/// Differences between a trace and its replay.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Report {
    /// Number of episodes.
    pub episodes: usize,
    /// Number of steps of all episodes.
    pub steps: usize,
    /// Number of observations that differ in any number.
    pub wrong_observations: usize,
    /// Number of steps whose `terminated` or `truncated` differs.
    pub wrong_flags: usize,
    /// Largest difference between rewards.
    pub reward_error: f64,
    /// Control tasks: number of steps whose full-precision state differs in any bit.
    pub wrong_states: usize,
}

impl Report {
    /// Whether the replay is exact: all observations, flags and states equal, rewards within 1e-9.
    pub fn exact(&self) -> bool {
        let wrong = self.wrong_observations + self.wrong_flags + self.wrong_states;
        self.steps > 0 && wrong == 0 && self.reward_error <= 1e-9
    }
}

/// Largest file, unpacked.
const MAX_BYTES: u64 = 1 << 28;

impl Trace {
    /// Reads a trace file, gzipped or not.
    pub fn read(path: &Path) -> Result<Self> {
        let fail = |e: &dyn std::fmt::Display| Error::Trace { path: path.to_owned(), cause: e.to_string() };
        let bytes = std::fs::read(path).map_err(|e| fail(&e))?;
        let mut text = Vec::new();
        if bytes.starts_with(&[0x1f, 0x8b]) {
            let mut reader = flate2::read::GzDecoder::new(&bytes[..]).take(MAX_BYTES + 1);
            reader.read_to_end(&mut text).map_err(|e| fail(&e))?;
        } else {
            text = bytes;
        }
        if text.len() as u64 > MAX_BYTES {
            return Err(fail(&"more than 256 MiB"));
        }
        serde_json::from_slice(&text).map_err(|e| fail(&e))
    }

    /// The task that was played.
    pub fn task(&self) -> Result<Task> {
        Task::find(&self.env).ok_or_else(|| Error::Config {
            key: "env".to_owned(),
            expected: "the id of a POPGym task".to_owned(),
            got: self.env.clone(),
        })
    }

    /// The version of the rules that was played.
    pub fn version(&self) -> Version {
        if self.versions.popgym == "1.0.6" { Version::V106 } else { Version::V107 }
    }

    /// Replays all episodes in `env` and compares.
    pub fn replay<E: Replay>(&self, env: &mut E) -> Result<Report> {
        let mut report = Report::default();
        for (index, episode) in self.episodes.iter().enumerate() {
            episode.replay(env, &mut report).map_err(|e| Error::Config {
                key: "trace".to_owned(),
                expected: format!("a legal episode {index} of {}", self.env),
                got: e.to_string(),
            })?;
        }
        Ok(report)
    }
}

impl Episode {
    fn replay<E: Replay>(&self, env: &mut E, report: &mut Report) -> Result<()> {
        let steps = self.actions.len();
        let lengths = [self.obs.len(), self.rewards.len(), self.terminated.len(), self.truncated.len()];
        let lengths = lengths
            .into_iter()
            .chain(self.draws.as_ref().map(Vec::len))
            .chain(self.states.as_ref().map(Vec::len));
        if lengths.into_iter().any(|n| n != steps) {
            return malformed(format!("{steps} entries in every list"), "other lengths");
        }
        let (mut seen, mut action) = (Row::of(&env.spaces().observation), Row::of(&env.spaces().action));
        let hidden = parse::<E::Hidden>(&self.hidden)?;
        env.begin(&hidden, seen.as_mut())?;
        report.episodes += 1;
        report.wrong_observations += usize::from(!equal(&seen, &self.reset_obs)?);
        for t in 0..steps {
            read(&mut action, &self.actions[t])?;
            let draw = match &self.draws {
                Some(draws) => parse::<E::Draw>(&draws[t])?,
                None if size_of::<E::Draw>() == 0 => E::Draw::default(),
                None => return malformed("`draws`", "none"),
            };
            let step = env.advance(action.values(), draw, seen.as_mut())?;
            report.steps += 1;
            report.wrong_observations += usize::from(!equal(&seen, &self.obs[t])?);
            let flags = (step.terminated, step.truncated);
            report.wrong_flags += usize::from(flags != (self.terminated[t], self.truncated[t]));
            report.reward_error = report.reward_error.max((step.reward - self.rewards[t]).abs());
            if let Some(states) = &self.states {
                let same = env.state().iter().map(|x| x.to_bits()).eq(states[t].iter().map(|x| x.to_bits()));
                report.wrong_states += usize::from(!same);
            }
        }
        Ok(())
    }
}

fn malformed<T>(expected: impl Into<String>, got: impl Into<String>) -> Result<T> {
    Err(Error::Config { key: "trace".to_owned(), expected: expected.into(), got: got.into() })
}

fn parse<T: serde::de::DeserializeOwned>(value: &Value) -> Result<T> {
    T::deserialize(value).or_else(|e| malformed("numbers of this task", e.to_string()))
}

/// Whether a value is the one in the trace: numbers in lists, however nested.
fn equal(own: &Row, value: &Value) -> Result<bool> {
    let mut numbers = Vec::new();
    flatten(value, &mut numbers)?;
    let own = own.ints.iter().map(|i| f64::from(*i)).chain(own.floats.iter().map(|x| f64::from(*x)));
    Ok(own.eq(numbers))
}

/// Takes a value over from the trace.
fn read(own: &mut Row, value: &Value) -> Result<()> {
    let mut numbers = Vec::new();
    flatten(value, &mut numbers)?;
    let count = own.ints.len() + own.floats.len();
    if numbers.len() != count {
        return malformed(format!("{count} numbers per action"), numbers.len().to_string());
    }
    let (ints, floats) = numbers.split_at(own.ints.len());
    own.ints.iter_mut().zip(ints).for_each(|(i, x)| *i = *x as i32);
    own.floats.iter_mut().zip(floats).for_each(|(f, x)| *f = *x as f32);
    Ok(())
}

fn flatten(value: &Value, numbers: &mut Vec<f64>) -> Result<()> {
    match value {
        Value::Array(values) => values.iter().try_for_each(|v| flatten(v, numbers)),
        Value::Number(n) => {
            numbers.push(n.as_f64().unwrap_or(f64::NAN));
            Ok(())
        }
        other => malformed("numbers", other.to_string().chars().take(40).collect::<String>()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::env::{Env, Player};
    use crate::popgym::Difficulty;

    fn golden(folder: &str, family: &str, difficulty: Difficulty) -> Trace {
        let name = format!("{folder}/popgym-{family}{}.json.gz", difficulty.name());
        Trace::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)).unwrap()
    }

    /// Replays the golden traces of a family (1.0.7) and asks for exactness.
    pub(crate) fn check_family<E: Replay>(family: &str, make: impl Fn(Difficulty) -> E) {
        for difficulty in Difficulty::ALL {
            let trace = golden("popgym", family, difficulty);
            assert_eq!(trace.version(), Version::V107);
            assert_eq!(trace.task().unwrap().difficulty, difficulty);
            let report = trace.replay(&mut make(difficulty)).unwrap();
            assert!(report.exact() && report.episodes == 4, "{family} {difficulty:?}: {report:?}");
        }
    }

    /// [`check_family`] for the traces of 1.0.6.
    pub(crate) fn check_family_v106<E: Replay>(family: &str, make: impl Fn(Difficulty) -> E) {
        for difficulty in Difficulty::ALL {
            let trace = golden("popgym-1.0.6", family, difficulty);
            assert_eq!(trace.version(), Version::V106);
            let report = trace.replay(&mut make(difficulty)).unwrap();
            assert!(report.exact(), "{family} {difficulty:?}: {report:?}");
        }
    }

    /// Mean return of a player over the episodes of these seeds, and its standard error.
    pub(crate) fn mean_return(
        env: &mut impl Env,
        player: &mut impl Player,
        seeds: std::ops::Range<u64>,
    ) -> (f64, f64) {
        let (mut seen, mut action) = (Row::of(&env.spaces().observation), Row::of(&env.spaces().action));
        let returns: Vec<f64> = seeds
            .map(|seed| {
                env.reset(seed, seen.as_mut()).unwrap();
                player.reset();
                let mut total = 0.0;
                loop {
                    player.act(seen.values(), action.as_mut());
                    let step = env.step(action.values(), seen.as_mut()).unwrap();
                    total += step.reward;
                    if step.done() {
                        return total;
                    }
                }
            })
            .collect();
        let n = returns.len() as f64;
        let mean = returns.iter().sum::<f64>() / n;
        let variance = returns.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
        (mean, (variance / n).sqrt())
    }

    #[test]
    fn a_wrong_environment_is_noticed() {
        let trace = golden("popgym", "RepeatFirst", Difficulty::Easy);
        let mut other = crate::popgym::RepeatPrevious::new(Difficulty::Easy);
        let report = trace.replay(&mut other).unwrap();
        assert!(
            !report.exact() && report.wrong_observations == 0 && report.reward_error > 0.01,
            "{report:?}"
        );
        let mut larger = crate::popgym::RepeatFirst::new(Difficulty::Medium);
        assert!(trace.replay(&mut larger).unwrap_err().to_string().contains("every card from 0 to 415 once"));
    }

    #[test]
    fn files_that_are_no_traces_are_errors() {
        let folder = std::env::temp_dir().join(format!("elmur-trace-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("trace.json.gz");
        let golden =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/popgym/popgym-RepeatFirstEasy.json.gz");
        let bytes = std::fs::read(golden).unwrap();
        for cut in (0..bytes.len()).step_by(7) {
            std::fs::write(&path, &bytes[..cut]).unwrap();
            assert!(Trace::read(&path).is_err(), "{cut} of {} bytes", bytes.len());
        }
        std::fs::write(&path, br#"{"env": "popgym-RepeatFirstEasy-v0", "versions": {"popgym": "1.0.7"}, "episodes":
            [{"hidden": {}, "reset_obs": 0, "actions": [0], "obs": [0], "rewards": [0], "terminated": [false], "truncated": [false]}]}"#)
            .unwrap();
        let trace = Trace::read(&path).unwrap();
        let error =
            trace.replay(&mut crate::popgym::RepeatFirst::new(Difficulty::Easy)).unwrap_err().to_string();
        assert!(error.contains("deal_order"), "{error}");
        assert!(Trace::read(&folder.join("none.json")).unwrap_err().to_string().contains("none.json"));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
