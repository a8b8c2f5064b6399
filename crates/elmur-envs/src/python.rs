//! Environments in Python: any Gymnasium environment by its id, or any class with Gymnasium's methods.
//!
//! Every row has a Python process of its own that runs `python/worker.py`, which is part of this library and
//! needs numpy, and Gymnasium for its ids. What is said there is docs/worker-protocol.md.

use std::ffi::OsString;
use std::sync::Arc;

use elmur_base::{Spaces, Stop};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::env::{Env, Player};
use crate::error::{Error, Result};
use crate::family::{EnvSpec, Facts, Family, Metric, Played, Purpose, Setting};
use crate::worker::{
    FamilyWorkers, Interface, Launch, Part, Patience, Task, WorkerEnv, Workers, max_rows, small_seed,
    technical_settings,
};

/// What names of environments in Python begin with.
const PREFIX: &str = "python:";
/// The worker.
const SCRIPT: &str = include_str!("python/worker.py");
/// Names the Python interpreter where the setting `python` does not.
const VARIABLE: &str = "ELMUR_PYTHON";

/// Environments in Python, in the [`Registry`](crate::Registry): `python:module:Class`,
/// `python:file.py:Class` and `python:GYMNASIUM-ID`.
#[derive(Default)]
pub(crate) struct Python(FamilyWorkers);

impl Python {
    /// The workers for an environment; the same for the same settings.
    fn workers(&self, spec: &EnvSpec) -> Result<Arc<Workers>> {
        let task = task(spec)?;
        // How many workers there may be changes none of them.
        let settings: Vec<_> = spec.settings.iter().filter(|(key, _)| *key != "workers").collect();
        self.0.of(format!("{} {settings:?}", spec.name), |stop| Ok(Workers::new(task, stop)))
    }
}

fn task(spec: &EnvSpec) -> Result<Task> {
    let entry = spec.name.strip_prefix(PREFIX).unwrap_or(&spec.name);
    let python = match spec.get::<Option<String>>("python")? {
        Some(python) => OsString::from(python),
        None => std::env::var_os(VARIABLE).unwrap_or_else(|| OsString::from("python3")),
    };
    let kwargs: Map<String, Value> = spec.get("kwargs")?;
    let success: String = spec.get("success")?;
    if !["end", "once"].contains(&success.as_str()) {
        return Err(Error::config("success", "end or once", success));
    }
    let max_steps: Option<u64> = spec.get("max_steps")?;
    if max_steps == Some(0) {
        return Err(Error::config("max_steps", "at least 1, or null", 0));
    }
    let make = json!({
        "entry": entry, "kwargs": kwargs, "expert": spec.get::<Option<String>>("expert")?,
        "max_steps": max_steps,
    });
    let Value::Object(make) = make else { return Err(Error::Finished) };
    if Value::Object(make.clone()).to_string().len() > 1 << 19 {
        return Err(Error::config("kwargs", "at most 500 kB of JSON", "more"));
    }
    let patience = Patience::of(spec)?;
    Ok(Task {
        name: spec.name.clone(),
        launch: Launch {
            program: python,
            arguments: vec!["-c".into(), SCRIPT.into()],
            variables: Vec::new(),
            show_output: patience.show_output,
        },
        hello: "elmur-python",
        make,
        interface,
        seed: small_seed,
        success_once: success == "once",
        timeout: patience.timeout,
        start_timeout: patience.start_timeout,
        restarts: patience.restarts,
        remedy: "the setting `python` or $ELMUR_PYTHON names the interpreter",
    })
}

/// Reads a worker's answer to `make`.
fn interface(answer: &Map<String, Value>) -> Result<Interface, String> {
    #[derive(Deserialize)]
    struct Made {
        spaces: Spaces,
        observation: Vec<Part>,
        action: Vec<Part>,
        max_steps: Option<u64>,
        good_return: Option<f64>,
        expert: bool,
    }
    let made = Made::deserialize(&Value::Object(answer.clone())).map_err(|error| error.to_string())?;
    let Made { spaces, observation, action, max_steps, good_return, expert } = made;
    Ok(Interface { spaces, observation, action, max_steps, good_return, has_expert: expert })
}

impl Family for Python {
    /// None: there are as many as there are Python modules.
    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn resolve(&self, name: &str) -> Option<String> {
        name.strip_prefix(PREFIX).filter(|entry| !entry.is_empty()).map(|_| name.to_owned())
    }

    fn settings(&self, _: &str) -> Vec<Setting> {
        let own = vec![
            Setting::new(
                "kwargs",
                json!({}),
                "Arguments of the environment's constructor, as a JSON object.",
            ),
            Setting::new(
                "expert",
                Value::Null,
                "Who demonstrates: module:function, called with observation and info; null: nobody.",
            ),
            Setting::new(
                "max_steps",
                Value::Null,
                "Truncate episodes after this many steps; null: as the environment does.",
            ),
            Setting::new(
                "success",
                "end",
                "Which steps count for success (info[\"success\"] or info[\"is_success\"]): end or once.",
            ),
            Setting::new(
                "python",
                Value::Null,
                "Python interpreter that has numpy and gymnasium; null: $ELMUR_PYTHON, else python3.",
            )
            .technical(),
        ];
        own.into_iter().chain(technical_settings(30, 120)).collect()
    }

    fn make(&self, spec: &EnvSpec, _: Purpose) -> Result<Box<dyn Env>> {
        max_rows(spec)?;
        Ok(Box::new(WorkerEnv::new(&self.workers(spec)?)?))
    }

    fn make_played(&self, spec: &EnvSpec) -> Result<Option<Played>> {
        let env = WorkerEnv::new(&self.workers(spec)?)?;
        let Some(player) = env.player() else {
            let expected =
                "who demonstrates, as module:function called with observation and info (--set expert=...)";
            return Err(Error::config("expert", expected, "null"));
        };
        Ok(Some((Box::new(env), Box::new(player))))
    }

    fn player(&self, _: &EnvSpec) -> Result<Option<Box<dyn Player>>> {
        Ok(None)
    }

    fn facts(&self, spec: &EnvSpec) -> Facts {
        let known = self.workers(spec).ok().and_then(|workers| workers.known_interface());
        Facts {
            max_steps: known.as_ref().and_then(|known| known.max_steps),
            good_return: known.as_ref().and_then(|known| known.good_return),
            metric: Metric::Success,
            max_rows: max_rows(spec).ok(),
            ..Facts::default()
        }
    }

    fn stop_with(&self, stop: &Stop) {
        self.0.stop_with(stop);
    }

    fn incidents(&self) -> Vec<String> {
        self.0.incidents()
    }
}
