//! `elmur train`: a run in a folder, watched.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elmur_base::Stop;
use elmur_data::Source;
use elmur_engine::Pool;
use elmur_train::{Devices, Ended, Error, Event, Result, RunConfig, RunFolder, Trainer, overrides};

use crate::progress::Bar;
use crate::{report, say};

/// Options of `elmur train`.
#[derive(clap::Args)]
pub struct Args {
    /// Preset (see `elmur presets`); not with --resume.
    preset: Option<String>,
    /// Changes to the preset's config: KEY=VALUE, such as train.lr=1e-3 (see `elmur inspect PRESET --keys`).
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Folder of the run; default: out/PRESET-SEED.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Go on with the run in this folder, from its last checkpoint.
    #[arg(long, value_name = "RUN", conflicts_with = "out")]
    resume: Option<PathBuf>,
    /// Dataset to learn from (as data.file=FILE).
    #[arg(long)]
    data: Option<PathBuf>,
    /// Seed (as train.seed=N).
    #[arg(long)]
    seed: Option<u64>,
    /// Train this many runs at once, with this seed and the ones after it, each in a folder of its own.
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "resume")]
    seeds: u64,
    /// Where to compute: cpu, cuda or cuda:N (as train.device=D).
    #[arg(long)]
    device: Option<String>,
}

/// Runs `elmur train`; 130 or 143 after a signal.
pub fn run(args: &Args, stop: &Stop) -> Result<ExitCode> {
    let mut changes = args.overrides.clone();
    changes.extend(args.seed.map(|seed| format!("train.seed={seed}")));
    changes.extend(args.device.as_ref().map(|device| format!("train.device={device}")));
    if let Some(data) = &args.data {
        // The run is found again from anywhere, so its data must be too.
        let data = std::path::absolute(data).unwrap_or_else(|_| data.clone());
        changes.push(format!("data.file={}", serde_json::Value::from(data.to_string_lossy().into_owned())));
    }
    if args.seeds != 1 {
        return several(args, &changes, stop);
    }
    let (folder, config, dataset, devices) = match (&args.resume, &args.preset) {
        (Some(path), preset) => {
            // With --resume there is no preset: a word there is one more override.
            let changes: Vec<String> = preset.iter().cloned().chain(changes).collect();
            let folder = RunFolder::open(path)?;
            let config = overrides::apply(&folder.config()?, &changes)?;
            let dataset = dataset(&config, stop)?;
            let devices = Devices::open(&config)?;
            (folder, config, dataset, devices)
        }
        (None, Some(preset)) => {
            let mut config = overrides::apply(&RunConfig::preset(preset)?, &changes)?;
            // Everything that can be wrong is found before anything is written.
            let dataset = dataset(&config, stop)?;
            fit(&mut config, &dataset, &changes)?;
            drop(Trainer::new(&config, &dataset, &Pool::new(1))?);
            let devices = Devices::open(&config)?;
            let path = args.out.clone().unwrap_or_else(|| default_folder(preset, config.train.seed));
            (RunFolder::create(&path, &config)?, config, dataset, devices)
        }
        (None, None) => {
            let expected = "a preset (see `elmur presets`), or --resume RUN".to_owned();
            return Err(Error::Config { key: "train".to_owned(), expected, got: "neither".to_owned() });
        }
    };
    let ended = watch(&devices, &folder, &config, &dataset, args.resume.is_some(), stop)?;
    conclude(&folder, ended)
}

/// Without an environment, encoders and head follow from the dataset, unless an override names them.
fn fit(config: &mut RunConfig, dataset: &Arc<dyn Source>, changes: &[String]) -> Result<()> {
    if config.env.is_none() && !overrides::names_ends(changes) {
        config.model.fit_to(dataset.spaces())?;
    }
    Ok(())
}

fn default_folder(preset: &str, seed: u64) -> PathBuf {
    PathBuf::from("out").join(format!("{preset}-{seed}"))
}

/// Several runs at once on one device, which differ in their seeds alone.
fn several(args: &Args, changes: &[String], stop: &Stop) -> Result<ExitCode> {
    let refuse = |expected: &str, got: String| {
        Err(Error::Config { key: "seeds".to_owned(), expected: expected.to_owned(), got })
    };
    let Some(preset) = &args.preset else { return refuse("a preset", "none".to_owned()) };
    if !(1..=256).contains(&args.seeds) {
        return refuse("1 to 256", args.seeds.to_string());
    }
    let mut first = overrides::apply(&RunConfig::preset(preset)?, changes)?;
    let dataset = dataset(&first, stop)?;
    fit(&mut first, &dataset, changes)?;
    drop(Trainer::new(&first, &dataset, &Pool::new(1))?);
    let devices = Devices::open(&first)?;
    let mut runs = Vec::new();
    for i in 0..args.seeds {
        let mut config = first.clone();
        config.train.seed = first.train.seed.wrapping_add(i);
        let path = match &args.out {
            Some(out) => out.join(format!("seed-{}", config.train.seed)),
            None => default_folder(preset, config.train.seed),
        };
        runs.push((RunFolder::create(&path, &config)?, config));
    }
    let ended: Vec<Result<Ended>> = std::thread::scope(|scope| {
        let threads: Vec<_> = runs
            .iter()
            .map(|(folder, config)| {
                let (devices, dataset) = (&devices, &dataset);
                scope.spawn(move || {
                    let devices = devices.another()?;
                    let seed = config.train.seed;
                    elmur_train::train_on(&devices, folder, config, dataset, false, stop, &mut |event| {
                        if let Event::Evaluated { batch, score } = event {
                            let (mean, sem) = (score.mean, score.sem);
                            report(&format!(
                                "seed {seed}, batch {batch}: validation score {mean:.3} ± {sem:.3}"
                            ));
                        }
                    })
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap_or(Err(Error::Stopped))).collect()
    });
    let mut code = ExitCode::SUCCESS;
    for ((folder, _), ended) in runs.iter().zip(ended) {
        let this = conclude(folder, ended?)?;
        if this != ExitCode::SUCCESS {
            code = this;
        }
    }
    Ok(code)
}

/// The demonstrations, with a progress bar where the expert takes its time.
fn dataset(config: &RunConfig, stop: &Stop) -> Result<Arc<dyn Source>> {
    let start = Instant::now();
    let mut bar = Bar::new("collecting", 0, config.data.episodes as u64);
    let dataset = config.watched_dataset(stop, &mut |done| {
        if start.elapsed() > Duration::from_secs(2) {
            bar.update(done as u64, "episodes", "");
        }
    });
    bar.finish();
    dataset
}

/// Trains with a progress bar.
pub fn watch(
    devices: &Devices,
    folder: &RunFolder,
    config: &RunConfig,
    dataset: &Arc<dyn Source>,
    resume: bool,
    stop: &Stop,
) -> Result<Ended> {
    let mut bar = Bar::new("training", 0, 0);
    let mut smooth: Option<f64> = None;
    let mut score = String::new();
    let ended =
        elmur_train::train_on(devices, folder, config, dataset, resume, stop, &mut |event| match event {
            Event::Started { done, planned } => bar = Bar::new("training", done, planned),
            Event::Batch(batch) => {
                let loss = smooth.map_or(batch.loss, |old| 0.9 * old + 0.1 * batch.loss);
                smooth = Some(loss);
                let note = format!("loss {loss:.4}  accuracy {:.1}%{score}", 100.0 * batch.accuracy);
                bar.update(batch.batch, "batches", &note);
            }
            Event::Evaluating { .. } => {}
            Event::Evaluated { batch, score: found } => {
                bar.finish();
                score = format!("  validation {:.3}", found.mean);
                report(&format!("batch {batch}: validation score {:.3} ± {:.3}", found.mean, found.sem));
            }
        });
    bar.finish();
    ended
}

fn conclude(folder: &RunFolder, ended: Ended) -> Result<ExitCode> {
    let path = folder.path().display();
    match ended {
        Ended::Finished => say(&format!("done: {path}")),
        Ended::Target => say(&format!("target reached: {path}")),
        Ended::Stopped(signal) => {
            say(&format!("stopped and saved: {path}; go on with: elmur train --resume {path}"));
            return Ok(ExitCode::from(128 + signal as u8));
        }
    }
    say(&format!("try it: elmur eval {path}"));
    Ok(ExitCode::SUCCESS)
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
