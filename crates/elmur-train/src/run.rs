//! A whole run in a folder.
//!
//! ```text
//! config.json              everything that decided the run
//! data.json                what the dataset was: a resumed run must have the same
//! .lock                    held by the process that trains
//! metrics.jsonl            a row per batch and per evaluation
//! tensorboard/             the same as event files
//! checkpoints/00000100/    model.safetensors, config.json, state.safetensors, progress.json
//! checkpoints/last, best   links to two of them
//! ```
//!
//! A checkpoint is written into a folder of another name, made durable and renamed; only then `last` points
//! to it. A crash or a full disk leaves the checkpoints that were there.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use elmur_base::files::{read_small, write_atomic};
use elmur_base::{Statistics, Stop};
use elmur_data::{Source, earlier_fingerprint};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::config::RunConfig;
use crate::error::{Error, Result};
use crate::evaluate::{Evaluation, Seeds, evaluate};
use crate::prepare::Devices;
use crate::tensorboard::EventWriter;
use crate::trainer::{BatchReport, STATE_FILE, Trainer};

/// What happens in a run, for whoever watches it.
#[derive(Debug)]
pub enum Event<'a> {
    /// Training begins, or goes on after the given number of batches.
    Started {
        /// Batches behind.
        done: u64,
        /// Batches in all.
        planned: u64,
    },
    /// A batch is done.
    Batch(&'a BatchReport),
    /// An evaluation begins.
    Evaluating {
        /// After this many batches.
        batch: u64,
    },
    /// An evaluation is done.
    Evaluated {
        /// After this many batches.
        batch: u64,
        /// Score of the evaluation.
        score: Statistics,
    },
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ended {
    /// All batches are done.
    Finished,
    /// The target was reached.
    Target,
    /// Someone asked, with this signal.
    Stopped(usize),
}

/// The folder of a run.
#[derive(Debug, Clone)]
pub struct RunFolder(PathBuf);

/// What a run was trained on.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct DataNote {
    episodes: usize,
    fingerprint: Fingerprint,
}

/// A checksum of a run's data.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Fingerprint {
    /// Of earlier versions: [`earlier_fingerprint`].
    Earlier(u32),
    /// [`Source::fingerprint`] in hexadecimal digits.
    Now(String),
}

impl DataNote {
    /// The note of data, in the form of `like` or in today's.
    fn of(source: &dyn Source, like: Option<&DataNote>) -> Result<Self> {
        let fingerprint = match like.map(|note| &note.fingerprint) {
            Some(Fingerprint::Earlier(_)) => Fingerprint::Earlier(earlier_fingerprint(source)?),
            _ => Fingerprint::Now(format!("{:016x}", source.fingerprint())),
        };
        Ok(Self { episodes: source.episodes(), fingerprint })
    }
}

impl std::fmt::Display for DataNote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.fingerprint {
            Fingerprint::Earlier(checksum) => {
                write!(f, "{} episodes with checksum {checksum:08x}", self.episodes)
            }
            Fingerprint::Now(checksum) => write!(f, "{} episodes with checksum {checksum}", self.episodes),
        }
    }
}

/// Kept with each checkpoint so that a resumed run chooses as the whole one would.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Progress {
    /// Best score so far, and its batch.
    best: Option<(f64, u64)>,
    /// Evaluations running that reached the target.
    reached: u32,
    /// Sum and number of losses since the last checkpoint.
    losses: (f64, u64),
    /// The run was stopped before this batch's evaluation was done.
    evaluation_due: bool,
}

impl Progress {
    /// Takes note of a score. Among equals the latest is the best: it has learnt most.
    fn improves(&mut self, score: f64, batch: u64) -> bool {
        let best = self.best.is_none_or(|(best, _)| score >= best);
        if best {
            self.best = Some((score, batch));
        }
        best
    }
}

impl RunFolder {
    /// A new run. A folder that already holds one is refused.
    pub fn create(path: &Path, config: &RunConfig) -> Result<Self> {
        let folder = Self(path.to_owned());
        if folder.config_path().exists() || folder.metrics().exists() {
            return Err(Error::file(
                path,
                "holds a run already; resume it with --resume, or choose another --out",
            ));
        }
        if fs::read_dir(folder.checkpoints()).is_ok_and(|mut all| all.next().is_some()) {
            return Err(Error::file(
                path,
                "has a folder `checkpoints` with something in it; choose another --out",
            ));
        }
        fs::create_dir_all(folder.checkpoints())
            .map_err(|e| Error::file(path, format!("{e}; choose another --out")))?;
        folder.save_config(config)?;
        Ok(folder)
    }

    /// The run in this folder.
    pub fn open(path: &Path) -> Result<Self> {
        let folder = Self(path.to_owned());
        folder.config()?;
        Ok(folder)
    }

    /// Whether a folder holds a run.
    pub fn is_run(path: &Path) -> bool {
        let folder = Self(path.to_owned());
        folder.config_path().is_file() && folder.checkpoints().is_dir()
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn config_path(&self) -> PathBuf {
        self.0.join("config.json")
    }

    /// The folder of the checkpoints.
    pub fn checkpoints(&self) -> PathBuf {
        self.0.join("checkpoints")
    }

    /// The best checkpoint, else the last.
    pub fn best(&self) -> PathBuf {
        let best = self.checkpoints().join("best");
        if best.exists() { best } else { self.checkpoints().join("last") }
    }

    /// The last checkpoint.
    pub fn last(&self) -> PathBuf {
        self.checkpoints().join("last")
    }

    /// The file of metrics, one JSON object per line.
    pub fn metrics(&self) -> PathBuf {
        self.0.join("metrics.jsonl")
    }

    /// The settings of the run.
    pub fn config(&self) -> Result<RunConfig> {
        let path = self.config_path();
        if !path.exists() {
            return Err(Error::file(&path, "no such file; not the folder of a run"));
        }
        let text = read_small(&path, MAX_SMALL)?;
        serde_json::from_str(&text).map_err(|e| Error::file(&path, format!("not a run's config: {e}")))
    }

    fn save_config(&self, config: &RunConfig) -> Result<()> {
        let text = serde_json::to_vec_pretty(config).map_err(|e| Error::file(&self.0, e))?;
        Ok(write_atomic(&self.config_path(), &text)?)
    }

    /// Keeps other processes from training the same run; given back with the file.
    fn lock(&self) -> Result<fs::File> {
        let path = self.0.join(".lock");
        let open = fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        let file = open.map_err(|e| Error::file(&path, e))?;
        match file.try_lock() {
            Err(fs::TryLockError::WouldBlock) => {
                Err(Error::file(&self.0, "another process trains this run; wait until it ends, or stop it"))
            }
            // Where a file system has no locks, runs go without.
            Ok(()) | Err(fs::TryLockError::Error(_)) => Ok(file),
        }
    }

    /// Remembers the run's data, or checks that a resumed run has the same. Where nothing was noted, what it
    /// is given now is.
    fn same_data(&self, source: &dyn Source, resume: bool) -> Result<()> {
        let path = self.0.join("data.json");
        if !resume || !path.exists() {
            let now = DataNote::of(source, None)?;
            let text = serde_json::to_vec_pretty(&now).map_err(|e| Error::file(&path, e))?;
            return Ok(write_atomic(&path, &text)?);
        }
        let then: DataNote =
            serde_json::from_str(&read_small(&path, MAX_SMALL)?).map_err(|e| Error::file(&path, e))?;
        let now = DataNote::of(source, Some(&then))?;
        if then == now {
            return Ok(());
        }
        Err(Error::Mismatch {
            what: "data of the resumed run",
            expected: then.to_string(),
            got: now.to_string(),
            remedy: "give it the data it began with, or begin another run",
        })
    }

    /// Saves a checkpoint and points `last` to it.
    fn save(&self, trainer: &Trainer, progress: &Progress) -> Result<()> {
        let name = format!("{:08}", trainer.batches());
        let (aside, target) =
            (self.checkpoints().join(format!(".{name}.tmp")), self.checkpoints().join(&name));
        let _ = fs::remove_dir_all(&aside);
        let write = || -> Result<()> {
            trainer.save(&aside)?;
            let text = serde_json::to_vec(progress).map_err(|e| Error::file(&aside, e))?;
            write_atomic(&aside.join("progress.json"), &text)?;
            // A checkpoint of this batch is there when a run was stopped before its evaluation; it goes only
            // when the new one has its name, and `resume` gives it back if we die in between.
            let old = self.checkpoints().join(format!(".{name}.old"));
            if target.exists() {
                fs::rename(&target, &old).map_err(|e| Error::file(&target, e))?;
            }
            fs::rename(&aside, &target).map_err(|e| Error::file(&target, e))?;
            let _ = fs::remove_dir_all(&old);
            let _ = fs::File::open(self.checkpoints()).and_then(|folder| folder.sync_all());
            self.link("last", &name)
        };
        write().inspect_err(|_| {
            let _ = fs::remove_dir_all(&aside);
        })
    }

    /// Points a link to a checkpoint, in one step.
    #[cfg(unix)]
    fn link(&self, name: &str, target: &str) -> Result<()> {
        let (aside, link) = (self.checkpoints().join(format!(".{name}.tmp")), self.checkpoints().join(name));
        let _ = fs::remove_file(&aside);
        let point = || {
            std::os::unix::fs::symlink(target, &aside)?;
            fs::rename(&aside, &link)
        };
        point().map_err(|e| Error::file(&link, e))
    }

    /// Without symbolic links: a copy.
    #[cfg(not(unix))]
    fn link(&self, name: &str, target: &str) -> Result<()> {
        let (aside, link) = (self.checkpoints().join(format!(".{name}.tmp")), self.checkpoints().join(name));
        let point = || {
            let _ = fs::remove_dir_all(&aside);
            fs::create_dir_all(&aside)?;
            for file in fs::read_dir(self.checkpoints().join(target))? {
                let file = file?;
                fs::copy(file.path(), aside.join(file.file_name()))?;
            }
            let _ = fs::remove_dir_all(&link);
            fs::rename(&aside, &link)
        };
        point().map_err(|e| Error::file(&link, e))
    }

    /// Removes checkpoints that are neither the best nor among the two newest.
    fn prune(&self, progress: &Progress) -> Result<()> {
        let folder = self.checkpoints();
        let entries = fs::read_dir(&folder).map_err(|e| Error::file(&folder, e))?;
        let numbers = numbered(entries);
        let best = progress.best.map(|(_, batch)| batch);
        let old = &numbers[..numbers.len().saturating_sub(2)];
        for number in old.iter().filter(|n| Some(**n) != best) {
            let path = folder.join(format!("{number:08}"));
            fs::remove_dir_all(&path).map_err(|e| Error::file(&path, e))?;
        }
        Ok(())
    }

    /// Where to resume: the trainer set to the last checkpoint, and what was known then. A run that died
    /// before its first checkpoint starts over.
    fn resume(&self, trainer: &mut Trainer) -> Result<Progress> {
        let folder = self.checkpoints();
        let entries = fs::read_dir(&folder).map_err(|e| Error::file(&folder, e))?;
        for entry in entries.filter_map(|e| e.ok()) {
            let name = entry.file_name().into_string().unwrap_or_default();
            let name = name.strip_prefix('.').and_then(|name| name.strip_suffix(".old"));
            if let Some(target) = name.map(|name| folder.join(name)).filter(|target| !target.exists()) {
                fs::rename(entry.path(), &target).map_err(|e| Error::file(&target, e))?;
            }
        }
        let entries = fs::read_dir(&folder).map_err(|e| Error::file(&folder, e))?;
        let Some(newest) = numbered(entries).pop() else {
            self.forget_metrics_after(0)?;
            return Ok(Progress::default());
        };
        // A process that died before it could move `last` has left a whole checkpoint all the same.
        let name = format!("{newest:08}");
        self.link("last", &name)?;
        let last = folder.join(&name);
        trainer.load(&last)?;
        let path = last.join("progress.json");
        let progress: Progress =
            serde_json::from_str(&read_small(&path, MAX_SMALL)?).map_err(|e| Error::file(&path, e))?;
        if let Some((_, batch)) = progress.best {
            let best = format!("{batch:08}");
            if folder.join(&best).exists() {
                self.link("best", &best)?;
            }
        }
        self.forget_metrics_after(trainer.batches())?;
        Ok(progress)
    }

    /// Drops rows of batches that will be done again.
    fn forget_metrics_after(&self, batch: u64) -> Result<()> {
        let path = self.metrics();
        let Ok(text) = fs::read_to_string(&path) else { return Ok(()) };
        let keep = |line: &&str| {
            let row = serde_json::from_str::<Value>(line);
            row.is_ok_and(|row| row["batch"].as_u64().is_some_and(|b| b <= batch))
        };
        let kept: String = text.lines().filter(keep).flat_map(|line| [line, "\n"]).collect();
        Ok(write_atomic(&path, kept.as_bytes())?)
    }
}

/// Largest size of a run's small files, in bytes.
const MAX_SMALL: u64 = 1 << 20;

/// Numbers of the checkpoints among a folder's entries, in order.
fn numbered(entries: fs::ReadDir) -> Vec<u64> {
    let number = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let number: u64 = name.parse().ok()?;
        (name == format!("{number:08}") && entry.path().join(STATE_FILE).is_file()).then_some(number)
    };
    let mut numbers: Vec<u64> = entries.filter_map(|e| e.ok().and_then(number)).collect();
    numbers.sort_unstable();
    numbers
}

/// Metrics as lines and as event files.
struct Metrics {
    path: PathBuf,
    file: fs::File,
    events: EventWriter,
}

impl Metrics {
    fn open(folder: &RunFolder) -> Result<Self> {
        let path = folder.metrics();
        let file = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|e| Error::file(&path, e))?;
        let tensorboard = folder.path().join("tensorboard");
        let events = EventWriter::create(&tensorboard, now()).map_err(|e| Error::file(&tensorboard, e))?;
        Ok(Self { path, file, events })
    }

    fn row(&mut self, group: &str, batch: u64, row: &Value) -> Result<()> {
        let mut write = || -> std::io::Result<()> {
            writeln!(self.file, "{row}")?;
            for (name, value) in row.as_object().into_iter().flatten() {
                if let Some(value) = value.as_f64().filter(|_| name != "batch") {
                    self.events.scalar(&format!("{group}/{name}"), batch, value as f32, now())?;
                }
            }
            self.events.flush()
        };
        write().map_err(|e| Error::file(&self.path, e))
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64())
}

/// Trains until the plan is done, the target is reached or someone asks to stop; with `resume`, from the last
/// checkpoint on.
///
/// A checkpoint is saved every `train.checkpoint_every` batches, at every evaluation and at the end, however
/// it comes.
pub fn train(
    folder: &RunFolder,
    config: &RunConfig,
    source: &Arc<dyn Source>,
    resume: bool,
    stop: &Stop,
    observe: &mut dyn FnMut(Event<'_>),
) -> Result<Ended> {
    train_on(&Devices::open(config)?, folder, config, source, resume, stop, observe)
}

/// [`train`] on devices that are open already, whatever the config names.
pub fn train_on(
    devices: &Devices,
    folder: &RunFolder,
    config: &RunConfig,
    source: &Arc<dyn Source>,
    resume: bool,
    stop: &Stop,
    observe: &mut dyn FnMut(Event<'_>),
) -> Result<Ended> {
    let _lock = folder.lock()?;
    let mut trainer = Trainer::new(config, source, &devices.train)?;
    let mut progress = Progress::default();
    if resume {
        check_resumable(&folder.config()?, config)?;
    }
    folder.same_data(&**source, resume)?;
    if resume {
        progress = folder.resume(&mut trainer)?;
        folder.save_config(config)?;
    }
    let metrics = Metrics::open(folder)?;
    let planned = trainer.planned_batches();
    observe(Event::Started { done: trainer.batches(), planned });
    let last_good = (trainer.batches() > 0).then_some(trainer.batches());
    let saved = last_good.map(|batch| (batch, progress.clone()));
    let mut run = Run { folder, config, devices, stop, saved, last_good, progress, metrics };
    // On a GPU the next batch is begun before this one's losses are looked at.
    let ahead = usize::from(!trainer.device().is_cpu());
    let mut clock = Instant::now();
    loop {
        if stop.requested() {
            run.take_reports(&mut trainer, 0, &mut clock, observe)?;
        }
        if trainer.waiting() == 0 {
            if run.progress.evaluation_due && !run.validate(&trainer, observe)? {
                run.save(&trainer)?;
                return Ok(Ended::Stopped(stop.signal()));
            }
            if reached_target(config, &run.progress) {
                return Ok(Ended::Target);
            }
            if trainer.batches() >= planned {
                return Ok(Ended::Finished);
            }
            if stop.requested() {
                run.save(&trainer)?;
                return Ok(Ended::Stopped(stop.signal()));
            }
            clock = Instant::now();
        }
        trainer.queue()?;
        let batch = trainer.batches();
        let last = batch == planned;
        let due = |every: u64| every > 0 && batch.is_multiple_of(every);
        let evaluates = config.env.is_some() && (last || due(config.eval.every));
        let saves = !evaluates && (last || due(config.train.checkpoint_every));
        run.take_reports(&mut trainer, if evaluates || saves { 0 } else { ahead }, &mut clock, observe)?;
        if evaluates {
            run.progress.evaluation_due = true;
        } else if saves {
            // Nothing to act in: the lowest mean loss since the last checkpoint is the best there is.
            let (sum, count) = std::mem::take(&mut run.progress.losses);
            let best = config.env.is_none() && run.progress.improves(-sum / count as f64, batch);
            run.save(&trainer)?;
            run.update_best_and_prune(batch, best)?;
        }
    }
}

/// A run in progress.
struct Run<'a> {
    folder: &'a RunFolder,
    config: &'a RunConfig,
    devices: &'a Devices,
    stop: &'a Stop,
    /// The batch and the progress of the last checkpoint.
    saved: Option<(u64, Progress)>,
    /// The batch of the last checkpoint from which a batch has succeeded.
    last_good: Option<u64>,
    progress: Progress,
    metrics: Metrics,
}

impl Run<'_> {
    /// Collects and logs reports until at most `in_flight` batches are unreported.
    fn take_reports(
        &mut self,
        trainer: &mut Trainer,
        in_flight: usize,
        clock: &mut Instant,
        observe: &mut dyn FnMut(Event<'_>),
    ) -> Result<()> {
        while trainer.waiting() > in_flight {
            let report =
                trainer.report().map_err(|error| diverged_with(error, self.folder, self.last_good))?;
            // What was saved before has now proved able to go on.
            self.last_good = self.saved.as_ref().map(|(batch, _)| *batch);
            let seconds = clock.elapsed().as_secs_f64();
            *clock = Instant::now();
            self.metrics.row("train", report.batch, &batch_row(&report, seconds))?;
            self.progress.losses.0 += report.loss;
            self.progress.losses.1 += 1;
            observe(Event::Batch(&report));
        }
        Ok(())
    }

    /// Saves a checkpoint.
    fn save(&mut self, trainer: &Trainer) -> Result<()> {
        let now = (trainer.batches(), self.progress.clone());
        if self.saved.as_ref() != Some(&now) {
            self.folder.save(trainer, &self.progress)?;
            self.saved = Some(now);
        }
        Ok(())
    }

    /// After a checkpoint: points `best` to it if it is, and removes checkpoints that are no longer needed.
    fn update_best_and_prune(&self, batch: u64, best: bool) -> Result<()> {
        if best {
            self.folder.link("best", &format!("{batch:08}"))?;
        }
        self.folder.prune(&self.progress)
    }

    /// Evaluates on validation episodes and saves; false if asked to stop meanwhile.
    fn validate(&mut self, trainer: &Trainer, observe: &mut dyn FnMut(Event<'_>)) -> Result<bool> {
        let (config, batch) = (self.config, trainer.batches());
        if let Some(env) = config.validation_env() {
            let elsewhere = match &self.devices.eval {
                Some(device) => Some(trainer.params().to(device)?),
                None => None,
            };
            let params = elsewhere.as_ref().unwrap_or(trainer.params());
            let evaluation = Evaluation {
                policy: &config.model,
                params,
                env,
                episodes: config.eval.episodes,
                seeds: Seeds::Validation,
                sample: config.eval.sample,
                threads: config.train.threads,
                device: params.device(),
            };
            observe(Event::Evaluating { batch });
            let score = match evaluate(&evaluation, self.stop, &|_| {}) {
                Ok(outcome) => outcome.score(),
                Err(Error::Stopped) => return Ok(false),
                Err(error) => return Err(error),
            };
            self.metrics.row(
                "validation",
                batch,
                &json!({"batch": batch, "score": score.mean, "sem": score.sem}),
            )?;
            observe(Event::Evaluated { batch, score });
            let reached = config.eval.target.is_some_and(|target| score.mean >= target);
            self.progress.reached = if reached { self.progress.reached + 1 } else { 0 };
            self.progress.evaluation_due = false;
            let best = self.progress.improves(score.mean, batch);
            self.save(trainer)?;
            self.update_best_and_prune(batch, best)?;
        }
        Ok(true)
    }
}

/// Refuses to go on with what would make the rest of a run another run.
fn check_resumable(old: &RunConfig, new: &RunConfig) -> Result<()> {
    let (t, u) = (&old.train, &new.train);
    let fixed = [
        ("train.seed", t.seed == u.seed),
        ("train.batch", t.batch == u.batch),
        ("train.segments", t.segments == u.segments),
        ("data", old.data == new.data),
        ("env", old.env == new.env),
    ];
    match fixed.iter().find(|(_, same)| !same) {
        Some((key, _)) => Err(Error::config(
            *key,
            "what the run began with; begin another run to change it",
            "another value",
        )),
        None => Ok(()),
    }
}

fn reached_target(config: &RunConfig, progress: &Progress) -> bool {
    config.eval.target.is_some() && progress.reached >= 2
}

fn batch_row(report: &BatchReport, seconds: f64) -> Value {
    json!({
        "batch": report.batch, "epoch": report.epoch, "loss": report.loss, "action_loss": report.action_loss,
        "accuracy": report.accuracy, "gradient_norm": report.gradient_norm, "lr": report.lr, "seconds": seconds,
    })
}

fn diverged_with(error: Error, folder: &RunFolder, last_good: Option<u64>) -> Error {
    match (error, last_good) {
        (Error::Diverged { batch, loss, gradient_norm, .. }, Some(number)) => {
            let checkpoint = folder.checkpoints().join(format!("{number:08}")).display().to_string();
            Error::Diverged { batch, loss, gradient_norm, checkpoint }
        }
        (error, _) => error,
    }
}
