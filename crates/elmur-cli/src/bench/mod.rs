//! `elmur bench`: each figure is printed beside what it is compared with, measured in the same run.

pub mod bank;
pub mod block;
pub mod compare;
pub mod conv;
pub mod data;
pub mod envs;
pub mod policies;
pub mod policy;
pub mod read;

use std::time::{Duration, Instant};

use serde_json::Value;

/// Prints one result, as a JSON line or as `key value` pairs for people.
fn print(json: bool, row: &Value) {
    match row {
        Value::Object(fields) if !json => {
            let pairs: Vec<String> = fields.iter().map(|(key, value)| format!("{key} {value}")).collect();
            crate::say(&pairs.join("  "));
        }
        _ => crate::say(&row.to_string()),
    }
}

/// Sorted times of several tasks that take turns, so that a noisy machine disturbs all of them alike.
fn take_turns<E>(rounds: usize, tasks: &mut [&mut dyn FnMut() -> Result<(), E>]) -> Result<Vec<Times>, E> {
    let mut times = vec![Vec::with_capacity(rounds); tasks.len()];
    for round in 0..rounds + WARM_UP {
        for (task, times) in tasks.iter_mut().zip(&mut times) {
            let start = Instant::now();
            task()?;
            if round >= WARM_UP {
                times.push(start.elapsed());
            }
        }
    }
    times.iter_mut().for_each(|t| t.sort());
    Ok(times.into_iter().map(Times).collect())
}

/// Rounds that are run but not counted.
const WARM_UP: usize = 5;

/// Sorted durations.
struct Times(Vec<Duration>);

impl Times {
    /// The given quantile, in milliseconds; not a number if nothing was measured.
    fn ms(&self, quantile: f64) -> f64 {
        let Some(last) = self.0.len().checked_sub(1) else { return f64::NAN };
        self.0[(last as f64 * quantile).round() as usize].as_secs_f64() * 1e3
    }
}

/// Rounds to four significant digits, for printing.
fn round(x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let scale = 10f64.powf(3.0 - x.abs().log10().floor());
    (x * scale).round() / scale
}
