//! A whole run: batches, checkpoints, validation, early stop, in a folder ([`RunFolder`]).

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use elmur_base::Stop;
use elmur_envs::EnvSpec;
use elmur_model::session::Weights;
use serde_json::{Value, json};

use crate::config::RunConfig;
use crate::error::{Error, Result};
use crate::evaluate::{Evaluation, Seeds, evaluate};
use crate::folder::{Progress, RunFolder};
use crate::measure::{Measure, Score};
use crate::metrics::Metrics;
use crate::offline::{OfflineEvaluation, evaluate_offline};
use crate::prepare::{Devices, Prepared};
use crate::trainer::{BatchReport, Trainer};

/// What happens in a run, for whoever watches it.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Something that a user should know, such as a damaged checkpoint that was passed over.
    Note(&'a str),
    /// Training begins or is resumed.
    Started {
        /// Number of batches already trained.
        done: u64,
        /// Number of batches planned for the whole run.
        planned: u64,
    },
    /// A batch is done.
    Batch(&'a BatchReport),
    /// A line was written to `metrics.jsonl`.
    Metrics(&'a Value),
    /// A validation begins or goes on.
    Evaluating {
        /// Number of batches trained before this validation.
        batch: u64,
        /// Share of the validation that is done, 0 to 1.
        share: f64,
    },
    /// A validation is done.
    Evaluated {
        /// Number of batches trained before this validation.
        batch: u64,
        /// What was measured, and its mean and spread.
        score: Score,
    },
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ended {
    /// All batches are done.
    Finished,
    /// The target was reached.
    Target,
    /// Stopped on request; holds the number of the signal (SIGINT is 2, SIGTERM 15).
    Stopped(usize),
}

/// Called with every [`Event`] of a run, from any thread.
pub type Observe<'a> = dyn FnMut(Event<'_>) + Send + 'a;

/// Time between two looks at whether the run's folder is still there.
const LOOK: Duration = Duration::from_secs(1);

/// Trains until the plan is done, the target is reached or `stop` is requested; with `resume`, from the newest
/// whole checkpoint on.
///
/// A checkpoint is saved every `train.checkpoint_every` batches, at every validation and when training ends,
/// also when it is stopped by a signal.
pub fn train(
    folder: &RunFolder,
    prepared: &Prepared,
    resume: bool,
    stop: &Stop,
    observe: &mut Observe<'_>,
) -> Result<Ended> {
    train_on(&Devices::open(&prepared.config)?, folder, prepared, resume, stop, observe)
}

/// [`train`] on devices that are open already, whatever the config names.
pub fn train_on(
    devices: &Devices,
    folder: &RunFolder,
    prepared: &Prepared,
    resume: bool,
    stop: &Stop,
    observe: &mut Observe<'_>,
) -> Result<Ended> {
    let config = &prepared.config;
    let _lock = folder.lock()?;
    let mut trainer = Trainer::of(prepared, &devices.train)?;
    let mut progress = Progress::default();
    if resume {
        check_resumable(&folder.config()?, prepared)?;
    }
    folder.same_data(&*prepared.data, resume)?;
    if resume {
        let (resumed, notes) = folder.resume(&mut trainer)?;
        notes.iter().for_each(|note| observe(Event::Note(note)));
        progress = resumed;
        folder.save_config(config)?;
    }
    if !folder.last().exists() && config.train.begin_with.is_some() {
        let weights = match &prepared.first_weights {
            Some(weights) => Some(weights.clone()),
            None => config.first_weights()?,
        };
        weights.iter().try_for_each(|weights| trainer.begin_with(weights))?;
        // Resumed, it begins with these again, whatever has become of the other run.
        folder.save(&trainer, &progress)?;
    }
    let metrics = Metrics::open(folder)?;
    let planned = trainer.planned_batches();
    observe(Event::Started { done: trainer.batches(), planned });
    let last_good = (trainer.batches() > 0).then_some(trainer.batches());
    let saved = last_good.filter(|_| !trainer.is_within_batch()).map(|batch| (batch, progress.clone()));
    let mut run = Run {
        folder,
        prepared,
        devices,
        stop,
        saved,
        last_good,
        progress,
        metrics,
        observe,
        looked: Instant::now(),
        clock: Instant::now(),
    };
    run.train(&mut trainer, planned)
}

/// A run in progress.
struct Run<'a, 'o> {
    folder: &'a RunFolder,
    prepared: &'a Prepared,
    devices: &'a Devices,
    stop: &'a Stop,
    /// The batch and the progress of the last checkpoint.
    saved: Option<(u64, Progress)>,
    /// The batch of the last checkpoint from which a batch has succeeded.
    last_good: Option<u64>,
    progress: Progress,
    metrics: Metrics,
    observe: &'a mut Observe<'o>,
    /// When the folder was last seen.
    looked: Instant,
    /// When the last batch was done.
    clock: Instant,
}

impl Run<'_, '_> {
    fn train(&mut self, trainer: &mut Trainer, planned: u64) -> Result<Ended> {
        let config = &self.prepared.config;
        // On a GPU the next batch is begun before this one's losses are looked at.
        let ahead = usize::from(!trainer.device().is_cpu());
        loop {
            if self.stop.requested() {
                self.take_reports(trainer, 0)?;
            }
            if trainer.waiting() == 0 {
                if self.progress.evaluation_due && !self.validate(trainer)? {
                    self.save(trainer)?;
                    return Ok(Ended::Stopped(self.stop.signal()));
                }
                if config.eval.target.is_some() && self.progress.reached >= 2 {
                    return Ok(Ended::Target);
                }
                if trainer.batches() >= planned {
                    return Ok(Ended::Finished);
                }
                if self.stop.requested() {
                    self.save(trainer)?;
                    return Ok(Ended::Stopped(self.stop.signal()));
                }
                self.clock = Instant::now();
            }
            if !trainer.queue_until(self.stop)? {
                // Stopped within a batch: it is continued when the run is resumed.
                self.take_reports(trainer, 0)?;
                self.metrics.check_present()?;
                self.folder.save(trainer, &self.progress)?;
                return Ok(Ended::Stopped(self.stop.signal()));
            }
            let batch = trainer.batches();
            let last = batch == planned;
            let due = |every: Option<u64>| every.is_some_and(|every| batch.is_multiple_of(every));
            let evaluates = last || due(config.eval.every);
            let saves = !evaluates && due(Some(config.train.checkpoint_every));
            self.take_reports(trainer, if evaluates || saves { 0 } else { ahead })?;
            if evaluates {
                self.progress.evaluation_due = true;
            } else if saves {
                self.progress.losses = (0.0, 0);
                self.save(trainer)?;
                self.folder.prune(&self.progress)?;
            }
        }
    }

    /// Collects and logs reports until at most `in_flight` batches are unreported.
    fn take_reports(&mut self, trainer: &mut Trainer, in_flight: usize) -> Result<()> {
        while trainer.waiting() > in_flight {
            let report =
                trainer.report().map_err(|error| diverged_with(error, self.folder, self.last_good))?;
            // A batch succeeded after the last checkpoint, so that checkpoint is safe to resume from.
            self.last_good = self.saved.as_ref().map(|(batch, _)| *batch);
            let seconds = self.clock.elapsed().as_secs_f64();
            self.clock = Instant::now();
            let row = batch_row(&report, seconds, trainer.take_waited().as_secs_f64());
            self.metrics.row("train", report.batch, &row)?;
            self.progress.losses.0 += report.loss;
            self.progress.losses.1 += 1;
            (self.observe)(Event::Batch(&report));
            (self.observe)(Event::Metrics(&row));
        }
        if self.looked.elapsed() >= LOOK {
            self.metrics.check_present()?;
            self.looked = Instant::now();
        }
        Ok(())
    }

    /// Saves a checkpoint, unless the newest one is of this very moment.
    fn save(&mut self, trainer: &Trainer) -> Result<()> {
        self.metrics.check_present()?;
        let now = (trainer.batches(), self.progress.clone());
        if self.saved.as_ref() != Some(&now) {
            self.folder.save(trainer, &self.progress)?;
            self.saved = Some(now);
        }
        Ok(())
    }

    /// Judges the policy on validation episodes, saves, points `best` to the checkpoint if it is the best, and
    /// removes checkpoints that are no longer needed. False if asked to stop meanwhile.
    fn validate(&mut self, trainer: &Trainer) -> Result<bool> {
        let batch = trainer.batches();
        (self.observe)(Event::Evaluating { batch, share: 0.0 });
        let (score, row) = match self.judge(trainer, batch) {
            Ok(judged) => judged,
            Err(Error::Stopped) => return Ok(false),
            Err(error) => return Err(error),
        };
        if !score.value.mean.is_finite() {
            let got = format!("{} {}", score.measure.name(), score.value.mean);
            return Err(Error::config("validation", "a finite score", got));
        }
        self.metrics.row("validation", batch, &row)?;
        (self.observe)(Event::Evaluated { batch, score });
        (self.observe)(Event::Metrics(&row));
        let measure = score.measure;
        let value = measure.score(score.value.mean);
        let target = self.prepared.config.eval.target;
        let reached = target.is_some_and(|target| value >= measure.score(target));
        self.progress.reached = if reached { self.progress.reached + 1 } else { 0 };
        self.progress.evaluation_due = false;
        self.progress.losses = (0.0, 0);
        let eval = &self.prepared.config.eval;
        let judged_by = format!(
            "{} with {} by {}",
            measure.key(),
            Value::Object(eval.settings.clone()),
            if eval.sample { "drawn actions" } else { "likeliest actions" }
        );
        let best = self.progress.improves(value, batch, judged_by);
        self.save(trainer)?;
        if best {
            self.folder.link("best", &format!("{batch:08}"))?;
        }
        self.folder.prune(&self.progress)?;
        Ok(true)
    }

    /// The score of the policy as it is, and its row of metrics.
    fn judge(&mut self, trainer: &Trainer, batch: u64) -> Result<(Score, Value)> {
        let Prepared { config, held_out, validation, .. } = self.prepared;
        let elsewhere = match &self.devices.eval {
            Some(device) => Some(trainer.params().to(device)?),
            None => None,
        };
        let params = elsewhere.as_ref().unwrap_or(trainer.params());
        let observe = Mutex::new(&mut self.observe);
        let tell = |share: f64| {
            let mut observe = observe.lock().unwrap_or_else(PoisonError::into_inner);
            (observe)(Event::Evaluating { batch, share });
        };
        let row = |score: &Score| {
            let Score { measure, value } = *score;
            json!({
                "batch": batch, "measure": measure.key(), "score": value.mean, "sem": value.sem,
                measure.key(): value.mean,
            })
        };
        if let Some(data) = held_out {
            let what =
                OfflineEvaluation { policy: &config.model, params, data: &**data, device: params.device() };
            let outcome = evaluate_offline(&what, self.stop, &mut |share| tell(share))?;
            return Ok((outcome.score, row(&outcome.score)));
        }
        let Some(env) = validation else {
            // Nothing to act in and nothing held out: the training loss is all there is.
            let (sum, count) = self.progress.losses;
            let value = elmur_base::Statistics::of([sum / count.max(1) as f64]);
            let score = Score { measure: Measure::Loss, value };
            return Ok((score, row(&score)));
        };
        let evaluation = Evaluation {
            policy: &config.model,
            params,
            env,
            episodes: config.eval.episodes,
            seeds: Seeds::Validation,
            target_return: config.eval.target_return,
            sample: config.eval.sample,
            threads: config.train.threads,
            device: params.device(),
            weights: if params.device().is_cpu() { config.eval.weights } else { Weights::F32 },
        };
        let outcome = evaluate(&evaluation, self.stop, &tell)?;
        let metric = outcome.metric(config.eval.metric.unwrap_or(env.facts().metric));
        let score = Score { measure: metric.into(), value: outcome.score(metric) };
        let mut row = row(&score);
        row["return"] = outcome.returns().mean.into();
        if let Some(rate) = outcome.success_rate() {
            row["success_rate"] = rate.mean.into();
        }
        Ok((score, row))
    }
}

/// Refuses to resume if a setting that must stay the same has changed: kind of policy, seed, batch size, crop
/// length, data or environment. Where the data lie may change (their fingerprint is compared), and so may
/// settings of the environment that change no episode, such as time-outs.
fn check_resumable(old: &RunConfig, prepared: &Prepared) -> Result<()> {
    let new = &prepared.config;
    let settings = prepared.validation.as_ref().map(|env| env.settings()).unwrap_or_default();
    let technical = |key: &str| settings.iter().any(|setting| setting.key == key && !setting.shapes_episodes);
    let (t, u) = (&old.train, &new.train);
    let elsewhere = |config: &RunConfig| crate::config::DataConfig {
        file: config.data.file.is_some().then(Default::default),
        ..config.data.clone()
    };
    let (kind, other) = (old.model.kind(), new.model.kind());
    if kind != other {
        let expected = format!("{kind}, as the run began; begin another run for another policy");
        return Err(Error::config("model.kind", expected, other));
    }
    // Runs of earlier versions have it as it was typed.
    let absolute = |path: &Option<PathBuf>| path.as_ref().and_then(|path| std::path::absolute(path).ok());
    let fixed = [
        ("train.seed", t.seed == u.seed),
        ("train.begin_with", absolute(&t.begin_with) == absolute(&u.begin_with)),
        ("train.batch", t.batch == u.batch),
        ("train.segments", t.segments == u.segments),
        ("data", elsewhere(old) == elsewhere(new)),
        ("env", same_environment(old.env.as_ref(), new.env.as_ref(), &technical)),
        ("eval.on", old.eval.on.is_none() || old.eval.on == new.eval.on),
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

/// Whether two specs mean the same environment. Settings that one of them leaves out have their defaults, and
/// technical ones may differ.
fn same_environment(old: Option<&EnvSpec>, new: Option<&EnvSpec>, technical: &dyn Fn(&str) -> bool) -> bool {
    let (Some(old), Some(new)) = (old, new) else { return old.is_none() == new.is_none() };
    let settings = &old.settings;
    let same = |(key, value): (&String, &Value)| {
        technical(key) || new.settings.get(key).is_none_or(|new| new == value)
    };
    old.name == new.name && old.wrappers == new.wrappers && settings.into_iter().all(same)
}

/// A line of metrics: `seconds` since the batch before, and how many of them the data were waited for.
fn batch_row(report: &BatchReport, seconds: f64, waited: f64) -> Value {
    let mut row = json!({
        "batch": report.batch, "epoch": report.epoch, "loss": report.loss, "action_loss": report.action_loss,
    });
    // Continuous actions have no accuracy: their action loss is the mean squared error.
    if let Some(accuracy) = report.accuracy {
        row["accuracy"] = accuracy.into();
    }
    row["gradient_norm"] = report.gradient_norm.into();
    row["lr"] = report.lr.into();
    row["data_seconds"] = waited.into();
    row["seconds"] = seconds.into();
    row
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
