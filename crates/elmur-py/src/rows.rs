//! Rows of one of our environments, for `elmur.envs`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use elmur::base::Stop;
use elmur::engine::Pool;
use elmur::envs::{AnyVecEnv, Autoreset, EnvSpec, Environment, Purpose, Registry};
use numpy::PyArray1;
use pyo3::prelude::*;

use crate::arrays::{Layout, Leaving, row_numbers};
use crate::background::interruptible;
use crate::{fail, refuse};

/// Most rows of one vector environment.
const MAX_ROWS: usize = 1 << 20;

/// Rows of an environment, stepped together.
#[pyclass(frozen, module = "elmur._elmur")]
pub struct Rows {
    env: Mutex<Box<dyn AnyVecEnv>>,
    observation: Layout,
    action: Layout,
    rows: usize,
    spaces: (String, String),
    /// Ends waiting for other processes, where rows are such.
    stop: Option<Stop>,
}

/// What a step of all rows gives, on its way to Python.
struct Stepped {
    observation: Vec<Leaving>,
    rewards: Vec<f64>,
    terminated: Vec<bool>,
    truncated: Vec<bool>,
    /// Success of the episodes that ended, and of which rows it is known; none if of no row.
    success: Option<(Vec<bool>, Vec<bool>)>,
    /// Whether any episode ended.
    ended: bool,
}

/// Success and of which rows it is known, as arrays.
type Success<'py> = (Bound<'py, PyArray1<bool>>, Bound<'py, PyArray1<bool>>);

/// Observations, rewards, terminated, truncated, success, whether any episode ended.
type StepArrays<'py> = (
    Bound<'py, PyAny>,
    Bound<'py, PyArray1<f64>>,
    Bound<'py, PyArray1<bool>>,
    Bound<'py, PyArray1<bool>>,
    Option<Success<'py>>,
    bool,
);

/// The environment that a spec in JSON names, and the registry it is from. Waiting for other processes ends when `stop`
/// is requested, which signals do meanwhile.
pub fn find(py: Python<'_>, spec: &str, stop: &Stop) -> PyResult<(Environment, Registry)> {
    let spec: EnvSpec =
        serde_json::from_str(spec).map_err(|e| refuse("environment", "a name and settings", e))?;
    let registry = Registry::builtin();
    registry.stop_with(stop);
    let environment = interruptible(py, stop, || registry.find(&spec))?.map_err(fail)?;
    Ok((environment, registry))
}

/// A space as JSON.
pub fn space_json(space: &elmur::base::Space) -> PyResult<String> {
    serde_json::to_string(space).map_err(fail)
}

/// The names of all environments.
#[pyfunction]
pub fn environments() -> Vec<String> {
    Registry::builtin().names()
}

impl Rows {
    fn env(&self) -> MutexGuard<'_, Box<dyn AnyVecEnv>> {
        self.env.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does some work without Python's lock; signals end waiting for other processes.
    fn during<T: Send>(&self, py: Python<'_>, work: impl FnOnce() -> PyResult<T> + Send) -> PyResult<T> {
        match &self.stop {
            Some(stop) => interruptible(py, stop, work)?,
            None => py.detach(work),
        }
    }
}

#[pymethods]
impl Rows {
    /// Makes rows of the environment that `spec` (JSON: name, settings, wrappers) names.
    #[new]
    fn new(
        py: Python<'_>,
        spec: &str,
        rows: usize,
        autoreset: &str,
        purpose: &str,
        threads: usize,
    ) -> PyResult<Self> {
        if !(1..=MAX_ROWS).contains(&rows) {
            return Err(refuse("num_envs", format!("1 to {MAX_ROWS}"), rows));
        }
        let autoreset = match autoreset {
            "NextStep" => Autoreset::NextStep,
            "SameStep" => Autoreset::SameStep,
            "Disabled" => Autoreset::Disabled,
            other => return Err(refuse("autoreset_mode", "NextStep, SameStep or Disabled", other)),
        };
        let purpose = match purpose {
            "evaluate" => Purpose::Evaluate,
            "collect" => Purpose::Collect,
            other => return Err(refuse("purpose", "evaluate or collect", other)),
        };
        let stop = Stop::default();
        let (environment, _) = find(py, spec, &stop)?;
        let spaces = environment.spaces().clone();
        let make = || environment.make_rows(purpose, rows, &Pool::new(threads.max(1)));
        let mut env = interruptible(py, &stop, make)?.map_err(fail)?;
        env.set_autoreset(autoreset);
        Ok(Self {
            env: Mutex::new(env),
            observation: Layout::of(&spaces.observation),
            action: Layout::of(&spaces.action),
            rows,
            spaces: (space_json(&spaces.observation)?, space_json(&spaces.action)?),
            stop: environment.facts().max_rows.is_some().then_some(stop),
        })
    }

    /// Observation space and action space of a row, as JSON.
    fn spaces(&self) -> (String, String) {
        self.spaces.clone()
    }

    /// Starts episodes in `rows` (all for None): with these seeds, or for None the next ones of each row. Returns the
    /// observations of all rows.
    #[pyo3(signature = (seeds, rows=None))]
    fn reset<'py>(
        &self,
        py: Python<'py>,
        seeds: Option<Vec<u64>>,
        rows: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let rows = row_numbers(rows, self.rows)?;
        let seen = self.during(py, || {
            let mut env = self.env();
            match seeds {
                Some(seeds) if seeds.len() != rows.len() => {
                    return Err(refuse("seed", format!("{} seeds", rows.len()), seeds.len()));
                }
                Some(seeds) => {
                    env.reset_rows(&rows.iter().copied().zip(seeds).collect::<Vec<_>>()).map_err(fail)?;
                }
                None => env.next_episodes(&rows).map_err(fail)?,
            }
            Ok(self.observation.copy(env.observations(), self.rows))
        })?;
        self.observation.build(py, seen, Some(self.rows))
    }

    /// Steps all rows. Returns observations, rewards, terminated, truncated, success with the rows of which it is known
    /// (or None), and whether any episode ended.
    fn step<'py>(&self, py: Python<'py>, actions: &Bound<'py, PyAny>) -> PyResult<StepArrays<'py>> {
        let given = self.action.read("actions", actions, Some(self.rows))?;
        let values = given.values();
        let stepped = self.during(py, || {
            let mut env = self.env();
            let step = env.step(values).map_err(fail)?;
            let known = step.success.iter().any(Option::is_some);
            let stepped = Stepped {
                observation: Vec::new(),
                rewards: step.rewards.clone(),
                ended: step.terminated.contains(&true) || step.truncated.contains(&true),
                terminated: step.terminated.clone(),
                truncated: step.truncated.clone(),
                success: known.then(|| {
                    let success = step.success.iter().map(|success| *success == Some(true)).collect();
                    (success, step.success.iter().map(Option::is_some).collect())
                }),
            };
            PyResult::Ok(Stepped {
                observation: self.observation.copy(env.observations(), self.rows),
                ..stepped
            })
        })?;
        let success = stepped
            .success
            .map(|(success, known)| (PyArray1::from_vec(py, success), PyArray1::from_vec(py, known)));
        Ok((
            self.observation.build(py, stepped.observation, Some(self.rows))?,
            PyArray1::from_vec(py, stepped.rewards),
            PyArray1::from_vec(py, stepped.terminated),
            PyArray1::from_vec(py, stepped.truncated),
            success,
            stepped.ended,
        ))
    }

    /// The observations that the latest finished episodes of all rows ended with.
    fn final_observations<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let seen = py.detach(|| self.observation.copy(self.env().final_observations(), self.rows));
        self.observation.build(py, seen, Some(self.rows))
    }
}
