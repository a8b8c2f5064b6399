//! What families of environments in workers share: their technical settings, and workers that are kept for the
//! next environment with the same settings.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use elmur_base::Stop;
use elmur_pool::granted_threads;
use serde_json::Value;

use super::workers::Workers;
use crate::error::{Error, Result};
use crate::family::{EnvSpec, Setting};

/// Most workers of an environment.
const MOST_WORKERS: usize = 256;

/// The workers of a family, by what they were started for.
#[derive(Debug, Default)]
pub struct FamilyWorkers {
    workers: Mutex<HashMap<String, Arc<Workers>>>,
    stop: Mutex<Stop>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FamilyWorkers {
    /// The workers for what `key` tells; those that `new` makes where there are none yet. `new` is given what
    /// ends waiting.
    pub fn of(&self, key: String, new: impl FnOnce(Stop) -> Result<Workers>) -> Result<Arc<Workers>> {
        let stop = lock(&self.stop).clone();
        let mut all = lock(&self.workers);
        if let Some(known) = all.get(&key) {
            return Ok(Arc::clone(known));
        }
        let workers = Arc::new(new(stop)?);
        all.insert(key, Arc::clone(&workers));
        Ok(workers)
    }

    /// Ends waiting for workers when `stop` is requested: see [`Family::stop_with`](crate::Family::stop_with).
    pub fn stop_with(&self, stop: &Stop) {
        *lock(&self.stop) = stop.clone();
    }

    /// How many workers had to be replaced, a line for each environment where some had.
    pub fn incidents(&self) -> Vec<String> {
        let told = |workers: &Arc<Workers>| match workers.restarts() {
            (0, _) => None,
            (count, last) => {
                let (name, plural) = (&workers.task().name, if count == 1 { "" } else { "s" });
                Some(format!("{name}: {count} worker{plural} had to be replaced; the newest cause: {last}"))
            }
        };
        lock(&self.workers).values().filter_map(told).collect()
    }
}

/// Settings of every environment in workers that do not change what happens in episodes: `workers`, `timeout`,
/// `start_timeout` (with these defaults in seconds), `restarts` and `show_output`.
pub fn technical_settings(timeout: u64, start_timeout: u64) -> Vec<Setting> {
    let settings = [
        Setting::new(
            "workers",
            Value::Null,
            "Processes that an evaluation uses; null: as many as there are threads.",
        ),
        Setting::new("timeout", timeout, "Seconds that a worker has for an answer."),
        Setting::new(
            "start_timeout",
            start_timeout,
            "Seconds that a worker has for each of these: to start, to make the environment, and to begin its first \
             episode.",
        ),
        Setting::new("restarts", 3, "Times that an episode is begun anew when its worker dies."),
        Setting::new("show_output", false, "Show what workers print, instead of only in errors."),
    ];
    settings.into_iter().map(Setting::technical).collect()
}

/// The values of the [`technical_settings`] that a [`Task`](super::Task) needs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Patience {
    /// Time for an answer.
    pub timeout: Duration,
    /// Time for each of these: the start of a worker, the making of its environment, the start of its first episode.
    pub start_timeout: Duration,
    /// Most times that one episode is begun anew.
    pub restarts: u32,
    /// Whether workers write to this process's standard error.
    pub show_output: bool,
}

impl Patience {
    /// Reads the settings of an environment.
    pub fn of(spec: &EnvSpec) -> Result<Self> {
        let restarts: u64 = spec.get("restarts")?;
        let few = u32::try_from(restarts).ok().filter(|restarts| *restarts <= 1000);
        Ok(Self {
            timeout: seconds(spec, "timeout")?,
            start_timeout: seconds(spec, "start_timeout")?,
            restarts: few.ok_or_else(|| Error::config("restarts", "0 to 1000", restarts))?,
            show_output: spec.get("show_output")?,
        })
    }
}

fn seconds(spec: &EnvSpec, key: &str) -> Result<Duration> {
    let time: f64 = spec.get(key)?;
    match time {
        0.001..=1e6 => Ok(Duration::from_secs_f64(time)),
        _ => Err(Error::config(key, "0.001 to 1000000 seconds", time)),
    }
}

/// The setting `workers`: most rows that are worth making.
pub fn max_rows(spec: &EnvSpec) -> Result<usize> {
    match spec.get::<Option<usize>>("workers")? {
        None => Ok(granted_threads().min(MOST_WORKERS)),
        Some(workers @ 1..=MOST_WORKERS) => Ok(workers),
        Some(workers) => Err(Error::config("workers", format!("1 to {MOST_WORKERS}, or null"), workers)),
    }
}
