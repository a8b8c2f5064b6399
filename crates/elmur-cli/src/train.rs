//! `elmur train`: a run in a folder, watched.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use elmur_base::Stop;
use elmur_envs::Registry;
use elmur_train::{
    BatchReport, Devices, Ended, Error, Event, PolicyName, Prepared, Result, RunConfig, RunFolder, Score,
    overrides,
};
use serde_json::json;

use crate::progress::Bar;
use crate::{Context, note, report, say, signals};

/// Options of `elmur train`.
#[derive(clap::Args)]
pub struct Args {
    /// Preset (see `elmur presets`) or the config.json of a run; not with --resume.
    #[arg(index = 1)]
    preset: Option<String>,
    /// Another policy (policy=NAME, see `elmur presets`) and changes to the config: KEY=VALUE, such as
    /// train.lr=1e-3 (see `elmur inspect PRESET --keys`).
    #[arg(value_name = "KEY=VALUE", index = 2)]
    overrides: Vec<String>,
    /// Write the run to this folder; default: out/PRESET-SEED, or out/PRESET-POLICY-SEED with policy=POLICY.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Replace a run that is in the folder already.
    #[arg(long, conflicts_with = "resume")]
    force: bool,
    /// Resume the run in this folder from its newest whole checkpoint.
    #[arg(long, value_name = "RUN", conflicts_with = "out")]
    resume: Option<PathBuf>,
    /// Learn from this dataset (as data.file=PATH): any that `elmur convert` reads. With --resume: where
    /// the run's data lie now.
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// Train and validate in this environment (as env=NAME): see `elmur collect --help`.
    #[arg(long, value_name = "NAME", conflicts_with = "resume")]
    env: Option<String>,
    /// Use this seed for weights, data order and dropout (as train.seed=N).
    #[arg(long)]
    seed: Option<u64>,
    /// Train N runs at once, with seeds SEED to SEED + N - 1, each in its own folder.
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "resume",
          value_parser = clap::value_parser!(u64).range(1..=256))]
    seeds: u64,
    /// Use this many CPU threads; 0: as many as are granted (as train.threads=N). Results do not depend on it.
    #[arg(long, value_name = "N", value_parser = crate::threads())]
    threads: Option<usize>,
    /// Compute on this device: cpu, cuda or cuda:N (as train.device=D).
    #[arg(long)]
    device: Option<String>,
    /// Print JSON lines: one object per validation, then one per run.
    #[arg(long)]
    json: bool,
    /// Stop and save when the process that started this one has ended.
    #[arg(long)]
    die_with_parent: bool,
}

/// Runs `elmur train`; 128 + n after signal n.
pub fn run(args: &Args, context: &Context) -> Result<ExitCode> {
    let registry = &context.registry;
    if args.die_with_parent {
        signals::stop_with_parent(&context.stop);
    }
    let (config, folder, changes) = match (&args.resume, &args.preset) {
        (Some(path), preset) => {
            // With --resume there is no preset: a word there is one more override.
            let changes: Vec<String> = preset.iter().cloned().chain(changes(args)).collect();
            let folder = RunFolder::open(path)?;
            let config = folder.config()?;
            if let Some(policy) = overrides::named_policy(&changes) {
                let expected = format!(
                    "the policy that the run began with, of kind {}; begin another run for another",
                    config.model.kind()
                );
                return Err(crate::keys::config("policy", expected, policy));
            }
            (config, Some(folder), changes)
        }
        (None, Some(preset)) => (config_of(preset)?, None, changes(args)),
        (None, None) => {
            let expected = "a preset (see `elmur presets`), a config.json, or --resume RUN".to_owned();
            return Err(Error::Config { key: "train".to_owned(), expected, got: "none".to_owned() });
        }
    };
    let config = overrides::apply(&config, &changes, registry)?;
    // A resumed run has the encoders and the head that it began with.
    let keep_ends = folder.is_some() || overrides::names_ends(&changes);
    // Everything that can be wrong is found before anything is written, and soon where data take their time.
    if folder.is_none() {
        config.first_checkpoint()?;
    }
    let mut prepared = prepare(&config, registry, keep_ends, &context.stop)?;
    if folder.is_none() {
        prepared.read_first_weights()?;
    }
    prepared.notes.iter().for_each(|line| note(line));
    let devices = Devices::open(&prepared.config)?;
    signals::acknowledge(&context.stop);
    if let Some(folder) = folder {
        let ended = watch(&devices, &folder, &prepared, true, &context.stop, args.json)?;
        return conclude(&folder, &prepared, ended, args.json);
    }
    let mut name = name_of(args.preset.as_deref().unwrap_or_default());
    if let Some(policy) = overrides::named_policy(&changes) {
        name = format!("{name}-{}", PolicyName::find(policy)?.name());
    }
    let seed = prepared.config.train.seed;
    if args.seeds > 1 {
        return several(args, &name, &devices, &prepared, &context.stop);
    }
    let path = args.out.clone().unwrap_or_else(|| default_folder(&name, seed));
    let folder = create(&path, &prepared.config, args.force)?;
    let ended = watch(&devices, &folder, &prepared, false, &context.stop, args.json)?;
    conclude(&folder, &prepared, ended, args.json)
}

/// What the options change in the config.
fn changes(args: &Args) -> Vec<String> {
    let mut changes = args.overrides.clone();
    changes.extend(args.env.as_ref().map(|env| format!("env={env}")));
    changes.extend(args.seed.map(|seed| format!("train.seed={seed}")));
    changes.extend(args.threads.map(|threads| format!("train.threads={threads}")));
    changes.extend(args.device.as_ref().map(|device| format!("train.device={device}")));
    if let Some(data) = &args.data {
        // The run is found again from anywhere, so its data must be too.
        let data = std::path::absolute(data).unwrap_or_else(|_| data.clone());
        changes.push(format!("data.file={}", serde_json::Value::from(data.to_string_lossy().into_owned())));
    }
    changes
}

/// The config that a user means by a name: a preset, or a file.
pub fn config_of(name: &str) -> Result<RunConfig> {
    let path = Path::new(name);
    if RunFolder::is_run(path) {
        let problem = "a run; repeat it with its config.json, or go on with --resume";
        return Err(Error::file(path, problem));
    }
    if elmur_data::is_data(path) {
        let problem = format!("a dataset; name a preset too: elmur train tmaze-quick --data {name}");
        return Err(Error::file(path, problem));
    }
    if path.is_file() {
        return crate::inspect::read_run(path);
    }
    if name.contains(std::path::is_separator) || path.extension().is_some_and(|e| e == "json") {
        let problem = if path.is_dir() { "a folder that holds no run" } else { "no such file" };
        let remedy = "name a preset (see `elmur presets`) or the config.json of a run";
        return Err(Error::file(path, format!("{problem}; {remedy}")));
    }
    RunConfig::preset(name)
}

/// A name for the folder of a run: the preset's, or that of the folder that the config lies in.
fn name_of(preset: &str) -> String {
    let path = Path::new(preset);
    if !path.is_file() {
        return preset.to_owned();
    }
    let stem = path.file_stem().filter(|stem| *stem != "config");
    let folder = path.parent().and_then(Path::file_name);
    stem.or(folder).map_or_else(|| "run".to_owned(), |name| name.to_string_lossy().into_owned())
}

fn default_folder(name: &str, seed: u64) -> PathBuf {
    PathBuf::from("out").join(format!("{name}-{seed}"))
}

/// Folders for several runs: all or none. Runs are removed only if all can be, and where a folder cannot be
/// made those that were made before it are removed again.
fn create_all(runs: Vec<(PathBuf, Prepared)>, force: bool) -> Result<Vec<(RunFolder, Prepared)>> {
    if force {
        runs.iter().try_for_each(|(path, _)| check_replaceable(path))?;
    }
    // Folders that are not there yet, the innermost first.
    let missing = |path: &Path| -> Vec<PathBuf> {
        let real = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
        path.ancestors().take_while(real).map(Path::to_owned).collect()
    };
    let (mut made, mut new) = (Vec::new(), Vec::new());
    for (path, prepared) in runs {
        new.push(missing(&path));
        match create(&path, &prepared.config, force) {
            Ok(folder) => made.push((folder, prepared)),
            Err(error) => {
                // Nothing is in them yet. What cannot be removed is left: the error tells what matters.
                for (folder, _) in &made {
                    let _ = RunFolder::remove(folder.path());
                    let _ = std::fs::remove_file(folder.path().join(".lock"));
                }
                new.iter().rev().flatten().for_each(|folder| drop(std::fs::remove_dir(folder)));
                return Err(error);
            }
        }
    }
    Ok(made)
}

/// Refuses a path whose run cannot be replaced: one that another process trains, or a folder with files but
/// no run. (What is there is checked once more when it is removed.)
fn check_replaceable(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    if let Ok(folder) = RunFolder::open(path) {
        return folder.lock().map(drop);
    }
    let mut entries = std::fs::read_dir(path).map_err(|e| Error::io(path, e))?.filter_map(|e| e.ok());
    if path.join("checkpoints").is_dir()
        || path.join("config.json").is_file()
        || entries.all(|entry| entry.file_name() == ".lock")
    {
        return Ok(());
    }
    Err(Error::file(path, "not a run; choose another --out"))
}

fn create(path: &Path, config: &RunConfig, force: bool) -> Result<RunFolder> {
    if force {
        RunFolder::remove(path)?;
    }
    RunFolder::create(path, config)
}

/// Several runs at once on one device, which differ in their seeds alone.
fn several(args: &Args, name: &str, devices: &Devices, first: &Prepared, stop: &Stop) -> Result<ExitCode> {
    let planned = (0..args.seeds).map(|i| {
        let mut prepared = first.clone();
        let seed = first.config.train.seed.wrapping_add(i);
        prepared.config.train.seed = seed;
        let path = match &args.out {
            Some(out) => out.join(format!("seed-{seed}")),
            None => default_folder(name, seed),
        };
        (path, prepared)
    });
    let runs = create_all(planned.collect(), args.force)?;
    // One bar for the batches of all runs.
    let bar = Mutex::new((Bar::new("training", 0, 0), 0, 0));
    let watch = |seed: u64, event: Event<'_>| {
        let Ok(mut all) = bar.lock() else { return };
        let (bar, done, planned) = &mut *all;
        match &event {
            Event::Started { planned: of_run, .. } => {
                *planned += of_run;
                *bar = Bar::new("training", 0, *planned);
            }
            Event::Batch(_) => *done += 1,
            Event::Evaluated { batch, score } => {
                bar.finish();
                tell_validation(args.json, Some(seed), *batch, score);
            }
            Event::Note(text) => note(&format!("seed {seed}: {text}")),
            _ => {}
        }
        if let Some(text) = of_seed(seed, &event) {
            bar.update(*done, "batches", &text);
        }
    };
    let ended: Vec<Result<Ended>> = std::thread::scope(|scope| {
        let start = |(folder, prepared): &'_ (RunFolder, Prepared)| {
            let (folder, prepared) = (folder.clone(), prepared.clone());
            let (devices, watch) = (devices.clone(), &watch);
            std::thread::Builder::new().spawn_scoped(scope, move || {
                let devices = devices.another()?;
                let seed = prepared.config.train.seed;
                let mut observe = |event: Event<'_>| watch(seed, event);
                elmur_train::train_on(&devices, &folder, &prepared, false, stop, &mut observe)
            })
        };
        let threads: Vec<_> = runs.iter().map(start).collect();
        let join = |thread: std::io::Result<std::thread::ScopedJoinHandle<'_, Result<Ended>>>| match thread {
            Ok(thread) => thread.join().unwrap_or(Err(Error::Stopped)),
            Err(cause) => Err(Error::Config {
                key: "seeds".to_owned(),
                expected: "as many threads as the system grants".to_owned(),
                got: cause.to_string(),
            }),
        };
        threads.into_iter().map(join).collect()
    });
    if let Ok(all) = bar.lock() {
        all.0.finish();
    }
    let mut code = ExitCode::SUCCESS;
    for ((folder, prepared), ended) in runs.iter().zip(ended) {
        let this = conclude(folder, prepared, ended?, args.json)?;
        if this != ExitCode::SUCCESS {
            code = this;
        }
    }
    Ok(code)
}

/// Data and environment of a run, with a progress bar where the player takes its time.
fn prepare(config: &RunConfig, registry: &Registry, keep_ends: bool, stop: &Stop) -> Result<Prepared> {
    let start = Instant::now();
    // Nothing is lost by not reading data to its end.
    let _watch = signals::EndAtOnce::new(stop);
    let mut bar = Bar::new("collecting", 0, config.data.episodes as u64);
    let prepared = config.prepare_watched(registry, keep_ends, stop, &mut |done| {
        if start.elapsed() > Duration::from_secs(2) {
            bar.update(done as u64, "episodes", "");
        }
    });
    bar.finish();
    prepared
}

/// A batch in a few words.
fn brief(batch: &BatchReport) -> String {
    match batch.accuracy {
        Some(accuracy) => format!("loss {:.4}  accuracy {:.1}%", batch.loss, 100.0 * accuracy),
        None => format!("loss {:.4}  mean squared error {:.5}", batch.loss, batch.action_loss),
    }
}

/// What one of several runs does, in a few words; none for events that the bar does not show.
fn of_seed(seed: u64, event: &Event<'_>) -> Option<String> {
    match event {
        Event::Batch(batch) => Some(format!("seed {seed}: {}", brief(batch))),
        Event::Evaluating { share, .. } => Some(format!("seed {seed}: {}", validating(*share))),
        _ => None,
    }
}

fn validating(share: f64) -> String {
    format!("validating {:.0}%", 100.0 * share)
}

/// The last validation in a few words, with what was measured.
fn validated(score: &Score) -> String {
    format!("validation {} {:.3}", score.measure.name(), score.value.mean)
}

fn tell_validation(as_json: bool, seed: Option<u64>, batch: u64, score: &Score) {
    if as_json {
        let mut row = json!({
            "event": "validation", "batch": batch, "measure": score.measure.key(), "score": score.value.mean,
            "sem": score.value.sem,
        });
        if let Some(seed) = seed {
            row["seed"] = seed.into();
        }
        return say(&row.to_string());
    }
    let run = seed.map(|seed| format!("seed {seed}, ")).unwrap_or_default();
    note(&format!("{run}batch {batch}: validation {score}"));
}

/// Trains with a progress bar.
pub fn watch(
    devices: &Devices,
    folder: &RunFolder,
    prepared: &Prepared,
    resume: bool,
    stop: &Stop,
    as_json: bool,
) -> Result<Ended> {
    let mut bar = Bar::new("training", 0, 0);
    let mut smooth: Option<f64> = None;
    let (mut done, mut text, mut validation) = (0, String::new(), String::new());
    let mut observe = |event: Event<'_>| match event {
        Event::Note(text) => report(&format!("note: {text}")),
        Event::Started { done: before, planned } => {
            done = before;
            bar = Bar::new("training", before, planned);
        }
        Event::Batch(batch) => {
            let loss = smooth.map_or(batch.loss, |old| 0.9 * old + 0.1 * batch.loss);
            smooth = Some(loss);
            done = batch.batch;
            text = brief(&BatchReport { loss, ..*batch });
            bar.update(batch.batch, "batches", &format!("{text}{validation}"));
        }
        Event::Evaluating { share, .. } => {
            bar.update(done, "batches", &format!("{text}  {}", validating(share)));
        }
        Event::Evaluated { batch, score } => {
            bar.finish();
            validation = format!("  {}", validated(&score));
            tell_validation(as_json, None, batch, &score);
        }
        _ => {}
    };
    let ended = elmur_train::train_on(devices, folder, prepared, resume, stop, &mut observe);
    bar.finish();
    ended
}

fn conclude(folder: &RunFolder, prepared: &Prepared, ended: Ended, as_json: bool) -> Result<ExitCode> {
    let path = folder.path().display();
    let (word, code) = match ended {
        Ended::Finished => ("finished", ExitCode::SUCCESS),
        Ended::Target => ("target", ExitCode::SUCCESS),
        Ended::Stopped(signal) => ("stopped", ExitCode::from(128 + signal as u8)),
    };
    if as_json {
        let row = json!({
            "event": "end", "run": path.to_string(), "ended": word, "seed": prepared.config.train.seed,
            "best": folder.best().display().to_string(), "last": folder.last().display().to_string(),
        });
        say(&row.to_string());
        return Ok(code);
    }
    match ended {
        Ended::Finished => say(&format!("done: {path}")),
        Ended::Target => say(&format!("target reached: {path}")),
        Ended::Stopped(_) => {
            say(&format!("stopped and saved: {path}; go on with: elmur train --resume {path}"));
            return Ok(code);
        }
    }
    let environment = prepared.config.env.as_ref().filter(|_| {
        // A simulator may be on another machine only.
        let found = prepared.config.environment(&Registry::builtin());
        found.is_ok_and(|environment| environment.is_some_and(|environment| environment.available().is_ok()))
    });
    match (environment, &prepared.config.data.file) {
        (Some(_), _) => say(&format!("try it: elmur eval {path}")),
        (None, Some(data)) => say(&format!("try it: elmur eval {path} --data {}", data.display())),
        (None, None) => {}
    }
    Ok(code)
}

/// The checkpoint that a user means by a path, and the run it belongs to: a run's best, or the checkpoint
/// itself.
pub fn checkpoint_of(path: &Path) -> (PathBuf, Option<RunFolder>) {
    if RunFolder::is_run(path)
        && let Ok(folder) = RunFolder::open(path)
    {
        return (folder.best(), Some(folder));
    }
    // A checkpoint lies two folders below its run.
    let run = path.parent().and_then(Path::parent).filter(|run| RunFolder::is_run(run));
    (path.to_owned(), run.and_then(|run| RunFolder::open(run).ok()))
}

#[cfg(test)]
mod tests {
    use elmur_base::Statistics;
    use elmur_train::Measure;

    use super::*;

    #[test]
    fn bars_tell_who_validates_and_what_was_measured() {
        let event = Event::Evaluating { batch: 7, share: 0.4 };
        assert_eq!(of_seed(3, &event).as_deref(), Some("seed 3: validating 40%"));
        let score = Score { measure: Measure::SuccessRate, value: Statistics::of([0.5, 1.0]) };
        assert_eq!(validated(&score), "validation success rate 0.750");
        let event = Event::Evaluated { batch: 7, score };
        assert_eq!(of_seed(3, &event), None);
    }
}
