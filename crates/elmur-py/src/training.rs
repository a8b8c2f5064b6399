//! Training, and demonstrations by the players of our environments.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use elmur::base::Stop;
use elmur::data::collect::Demonstrations;
use elmur::data::{self, Source, Writer, wrap};
use elmur::envs::{Environment, Registry};
use elmur::train::{
    Devices, Ended, Error, Event, PolicyName, Prepared, Result, RunConfig, RunFolder, overrides, train_on,
};
use pyo3::prelude::*;
use serde_json::json;

use crate::background::{News, watch};
use crate::dataset::{Dataset, opened};
use crate::rows::find;
use crate::{fail, refuse};

/// The config that a user means: a whole one as JSON, a file, or the name of a preset.
fn config_of(base: &str) -> PyResult<RunConfig> {
    if base.trim_start().starts_with('{') {
        return serde_json::from_str(base).map_err(|e| refuse("config", "a run's config", e));
    }
    let path = Path::new(base);
    if path.is_file() { RunConfig::read(path) } else { RunConfig::preset(base) }.map_err(fail)
}

/// The names of all presets with what they are.
#[pyfunction]
pub fn presets() -> Vec<(String, String)> {
    let about = |name: &String| {
        let known = RunConfig::preset_summaries().iter().find(|(known, _)| known == name);
        known.map_or_else(String::new, |(_, about)| (*about).to_owned())
    };
    RunConfig::preset_names().into_iter().map(|name| (name.clone(), about(&name))).collect()
}

/// The names of all policies with what they are.
#[pyfunction]
pub fn policies() -> Vec<(String, String)> {
    PolicyName::all().map(|policy| (policy.name(), policy.summary().to_owned())).collect()
}

/// A config (JSON, file or preset) with changes, completed and checked, as JSON.
#[pyfunction]
pub fn preset_config(base: &str, changes: Vec<String>) -> PyResult<String> {
    let config = overrides::apply(&config_of(base)?, &changes, &Registry::builtin()).map_err(fail)?;
    serde_json::to_string(&config).map_err(fail)
}

/// Everything that a run is made from.
struct Plan {
    config: RunConfig,
    changes: Vec<String>,
    data: Option<Arc<dyn Source>>,
    out: PathBuf,
    /// The run to go on with.
    resumed: Option<RunFolder>,
    overwrite: bool,
}

impl Plan {
    /// Trains; the word for how it ended.
    fn run(self, stop: &Stop, news: &News) -> Result<&'static str> {
        let registry = Registry::builtin();
        registry.stop_with(stop);
        let ended = self.run_with(&registry, stop, news);
        registry.incidents().into_iter().for_each(|line| news.tell("note", json!({"note": line})));
        ended
    }

    fn run_with(self, registry: &Registry, stop: &Stop, news: &News) -> Result<&'static str> {
        let config = overrides::apply(&self.config, &self.changes, registry)?;
        // A resumed run has the encoders and the head that it began with.
        let keep_ends = self.resumed.is_some() || overrides::names_ends(&self.changes);
        let mut prepared = match self.data {
            Some(data) => Prepared::new(config, data, registry, keep_ends)?,
            None => config.prepare_watched(registry, keep_ends, stop, &mut |episodes| {
                news.mention("collecting", json!({"episodes": episodes}));
            })?,
        };
        if self.resumed.is_none() {
            prepared.read_first_weights()?;
        }
        prepared.notes.iter().for_each(|note| news.tell("note", json!({"note": note})));
        let devices = Devices::open(&prepared.config)?;
        let resume = self.resumed.is_some();
        let folder = match self.resumed {
            Some(folder) => folder,
            None => {
                if self.overwrite {
                    RunFolder::remove(&self.out)?;
                }
                RunFolder::create(&self.out, &prepared.config)?
            }
        };
        let mut observe = |event: Event<'_>| match event {
            Event::Note(note) => news.tell("note", json!({"note": note})),
            Event::Started { done, planned } => {
                news.tell("started", json!({"done": done, "planned": planned}))
            }
            Event::Metrics(row) => news.tell("metrics", row.clone()),
            Event::Evaluating { batch, share } => {
                news.mention("evaluating", json!({"batch": batch, "share": share}));
            }
            _ => {}
        };
        let ended = train_on(&devices, &folder, &prepared, resume, stop, &mut observe)?;
        Ok(match ended {
            Ended::Finished => "finished",
            Ended::Target => "target",
            Ended::Stopped(_) => "stopped",
        })
    }
}

/// Trains a run in the folder `out` and calls `notify(what, news as JSON)` meanwhile. Returns how it ended.
#[pyfunction]
#[pyo3(signature = (base, changes, data, out, resume, overwrite, notify))]
#[expect(clippy::too_many_arguments, reason = "called by elmur.training alone")]
pub fn train(
    py: Python<'_>,
    base: &str,
    changes: Vec<String>,
    data: Option<PyRef<'_, Dataset>>,
    out: PathBuf,
    resume: bool,
    overwrite: bool,
    notify: &Bound<'_, PyAny>,
) -> PyResult<&'static str> {
    let resumed =
        (resume && RunFolder::is_run(&out)).then(|| RunFolder::open(&out)).transpose().map_err(fail)?;
    let config = match &resumed {
        Some(folder) => folder.config().map_err(fail)?,
        None => config_of(base)?,
    };
    let plan = Plan { config, changes, data: data.map(|data| data.source()), out, resumed, overwrite };
    watch(py, notify, move |stop, news| plan.run(stop, news))
}

/// Lets the player of one of our environments demonstrate it, in memory or in a new `.elmur` file.
#[pyfunction]
#[pyo3(signature = (spec, episodes, seed, noise, path, overwrite, notify))]
#[expect(clippy::too_many_arguments, reason = "called by elmur.collect alone")]
pub fn collect_player(
    py: Python<'_>,
    spec: &str,
    episodes: usize,
    seed: u32,
    noise: f64,
    path: Option<PathBuf>,
    overwrite: bool,
    notify: &Bound<'_, PyAny>,
) -> PyResult<Dataset> {
    let (environment, registry) = find(py, spec, &Stop::default())?;
    if episodes == 0 {
        return Err(refuse("episodes", "at least 1", 0));
    }
    if seed >= 1 << 30 || !(0.0..1.0).contains(&noise) {
        return Err(refuse(
            "seed and noise",
            "a seed below 2^30 and a probability below 1",
            format!("{seed}, {noise}"),
        ));
    }
    let wrappers = environment.spec().wrappers;
    let file = path.clone();
    let demonstrate = move |environment: &Environment, stop: &Stop, news: &News| -> Result<_> {
        let demonstrations = Demonstrations {
            environment,
            episodes: 0..episodes,
            seed,
            noise,
            threads: 0,
            stop: stop.clone(),
        };
        let (spaces, metadata) = (environment.plain().spaces().clone(), demonstrations.metadata());
        let mut done = 0;
        let mut tell = || {
            done += 1;
            news.mention("collecting", json!({"episodes": done}));
            if stop.requested() { Err(data::Error::Stopped) } else { Ok(()) }
        };
        let Some(path) = file else {
            let mut all = Vec::new();
            demonstrations.collect(|episode| {
                all.push(episode);
                tell()
            })?;
            let source: Arc<dyn Source> = Arc::new(data::Dataset::from_episodes(spaces, metadata, all)?);
            return Ok(Some(if wrappers.is_none() { source } else { wrap(&source, wrappers)? }));
        };
        if !wrappers.is_none() {
            let expected = "no wrappers where demonstrations are saved; training applies them".to_owned();
            return Err(Error::Config { key: "wrappers".to_owned(), expected, got: "some".to_owned() });
        }
        let make = if overwrite { Writer::replace } else { Writer::create };
        let mut writer = make(path, &spaces, metadata)?;
        let kept = demonstrations.collect(|episode| {
            writer.push(&episode)?;
            tell()
        });
        match kept {
            Ok(()) => writer.finish()?,
            Err(error) => {
                writer.discard();
                return Err(error.into());
            }
        }
        Ok(None)
    };
    let collected = watch(py, notify, move |stop, news| {
        registry.stop_with(stop);
        let collected = demonstrate(&environment, stop, news);
        registry.incidents().into_iter().for_each(|line| news.tell("note", json!({"note": line})));
        collected
    })?;
    match (collected, path) {
        (Some(source), _) => Ok(Dataset::of(source)),
        (None, Some(path)) => py.detach(|| opened(&path)),
        (None, None) => Err(refuse("path", "a file", "none")),
    }
}
