//! Everything that decides a run, as one tree of settings.

use std::path::PathBuf;

use elmur_base::Describe;
use elmur_engine::{Device, Precision};
use elmur_envs::{EnvSpec, Environment, Metric, Registry};
use elmur_model::PolicyConfig;
use elmur_model::session::Weights;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::none::none_or_positive;
use crate::prepare::AUTO;
use crate::schedule::Schedule;

/// Most episodes of one evaluation: the seeds of the next run begin there.
pub(crate) const MAX_EPISODES: usize = 1 << 24;

/// What a target return must be: policies compute with 32-bit floats.
pub(crate) const TARGET_RETURN: &str = "a finite number within 3.4e38, such as the return of a good episode";

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The environment of demonstrations, validation and evaluation; null for data from elsewhere.
    #[describe(leaf)]
    pub env: Option<EnvSpec>,
    /// The demonstrations to learn from.
    pub data: DataConfig,
    /// The policy: architecture and sizes.
    pub model: PolicyConfig,
    /// Optimizer, batch size, schedule.
    pub train: TrainConfig,
    /// Validation during training.
    pub eval: EvalConfig,
}

/// The demonstrations that a policy learns from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// A dataset (native file, folder of .npz files, LeRobot, Minari, D4RL, robomimic); null: the environment's
    /// player demonstrates.
    pub file: Option<PathBuf>,
    /// Names of the observations of `data.file` to learn from, separated by commas, in this order; null: all of
    /// them.
    #[serde(default)]
    pub keys: Option<String>,
    /// Name of the array of actions in `data.file`, where it has more than one (LeRobot); null: `action`.
    #[serde(default)]
    pub action_key: Option<String>,
    /// Name of the list of episodes of `data.file` to learn from (robomimic's masks); null: all episodes.
    #[serde(default)]
    pub mask: Option<String>,
    /// Number of steps after which episodes of a D4RL file without `timeouts` are cut; null: 1000.
    #[serde(default)]
    pub step_limit: Option<usize>,
    /// Number of episodes that the player demonstrates; with `data.stream` those from which statistics of the data
    /// are taken.
    pub episodes: usize,
    /// Seed of the player's episodes and of the split into training and held-out episodes, below 2^30. Larger
    /// seeds are reserved for validation and test.
    pub seed: u32,
    /// Replace the player's action by a random one with this probability, 0 to 1. Random actions are marked as
    /// not to be imitated; the player's next actions show how to recover.
    #[serde(default)]
    pub noise: f64,
    /// Whether the player goes on to demonstrate: every batch is made of episodes that were not shown before, played
    /// on threads beside training. An epoch then counts as many crops as one of `data.episodes` would have.
    #[serde(default)]
    pub stream: bool,
    /// Share of the stream's episodes that the policy being trained plays itself, 0 to 1, while the player says what
    /// it would have done (DAgger); needs `data.stream`.
    #[serde(default)]
    pub own_share: f64,
    /// Number of batches before the policy plays its first episodes.
    #[serde(default = "own_from")]
    pub own_from: u64,
    /// Number of batches after which the policy that plays is replaced by the one trained by then: at least 1.
    #[serde(default = "own_every")]
    pub own_every: u64,
    /// Whether every choice is right that the player names as equally good, where the policy chooses one of a list of
    /// actions, and demonstrations take one of them at random; needs `data.stream`, whose players are asked.
    #[serde(default)]
    pub ties: bool,
    /// Share of the episodes of `data.file` that are held out for validation where policies are judged on data
    /// (`eval.on`), between 0 and 1.
    #[serde(default = "held_out")]
    pub held_out: f64,
    /// Move pictures by up to this many pixels along both axes in training, all of a crop by the same distance; pixels
    /// at the edge are repeated. 0: not at all.
    #[serde(default)]
    pub shift: usize,
    /// Multiply pixels by a number from 1 - x to 1 + x in training, the same for all pictures of a crop: 0 to 1.
    #[serde(default)]
    pub brightness: f64,
    /// Let red, green and blue of pictures change places in training, in one of their six orders, the same for all
    /// pictures of a crop, so that more arrangements of colours are seen than were recorded. Pictures need threes of
    /// channels.
    #[serde(default)]
    pub colours: bool,
    /// Hide the numbers that an observation has besides pictures, in training, in this share of the crops: they are 0
    /// from the first to the last step. A policy then learns both to use and to do without them; one that shall never see
    /// them can begin with its weights (`train.begin_with`). 0 to 1; observations must be pictures and plain numbers.
    #[serde(default)]
    pub hide: f64,
}

impl DataConfig {
    /// What is read of `data.file`.
    pub fn selection(&self) -> elmur_data::Selection {
        let keys = self.keys.iter().flat_map(|keys| keys.split(',')).map(|key| key.trim().to_owned());
        elmur_data::Selection {
            keys: keys.filter(|key| !key.is_empty()).collect(),
            action_key: self.action_key.clone(),
            mask: self.mask.clone(),
            step_limit: self.step_limit,
        }
    }
}

pub(crate) fn own_from() -> u64 {
    500
}

pub(crate) fn own_every() -> u64 {
    100
}

pub(crate) fn held_out() -> f64 {
    0.1
}

/// Optimizer, batch size, schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Seed of initial weights, order of the data and dropout.
    pub seed: u64,
    /// Begin with the weights of this run (its best checkpoint) or checkpoint, whose policy must have parameters of the
    /// same names and shapes; null: fresh weights. Optimizer and schedule begin anew. A policy that sees one observation
    /// alone (numbers, or pictures through a `residual_image`) may begin with one that sees further numbers, which then
    /// count as 0.
    #[serde(default)]
    pub begin_with: Option<PathBuf>,
    /// Batch size: number of crops that are trained on together.
    pub batch: usize,
    /// Number of windows (for ELMUR: segments) of a training crop.
    pub segments: usize,
    /// Number of passes over the data; null or 0: no such limit.
    #[serde(deserialize_with = "none_or_positive")]
    pub epochs: Option<u64>,
    /// Stop after this many batches; null or 0: no such limit.
    #[serde(deserialize_with = "none_or_positive")]
    pub batches: Option<u64>,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning-rate schedule: warm-up, then decay.
    pub schedule: Schedule,
    /// Label smoothing of the loss on discrete actions, 0 to 1.
    pub label_smoothing: f64,
    /// Weight, in the loss on actions, of the steps after an episode's first success, 0 to 1: an expert that holds still
    /// then would make most targets alike.
    #[serde(default = "one")]
    pub after_success: f64,
    /// Reward from which on a step counts as a success, for `train.after_success`.
    #[serde(default = "one")]
    pub success_reward: f64,
    /// How much more steps count, in the loss on actions, at which the expert's action changes: weights are multiplied
    /// by 1 + this x the change from the step before (root mean square over the action's components; a choice changes
    /// by 0 or 1). 0 or more. Where an arm is seen to move, only the step at which it sets out tells what it goes for.
    #[serde(default)]
    pub changes: f64,
    /// Clip gradients to this global norm.
    pub clip: f64,
    /// Decoupled weight decay of AdamW.
    pub weight_decay: f64,
    /// The two betas of AdamW, each 0 to 1.
    pub betas: (f64, f64),
    /// Standardize vector observations: encoders begin with the mean and standard deviation of the data.
    #[serde(default)]
    pub standardize: bool,
    /// Standardize observations of several integers whose learned vectors are added up: over the first 20,000
    /// observations of the data, these sums begin with mean 0 and standard deviation 1.
    #[serde(default)]
    pub standardize_integers: bool,
    /// Save a checkpoint every this many batches.
    pub checkpoint_every: u64,
    /// Stop as diverged when the loss exceeds this.
    pub max_loss: f64,
    /// Number of CPU threads; null: as many as the machine or its scheduler grants. Results do not depend on
    /// it.
    #[serde(deserialize_with = "none_or_positive")]
    pub threads: Option<usize>,
    /// Device that trains: cpu, cuda or cuda:N.
    #[serde(default = "cpu")]
    pub device: String,
    /// Precision of matrix products on a GPU, and on a CPU with a matrix unit (AMX) while it trains; other CPUs, and
    /// convolutions on every CPU, compute in f32.
    #[serde(default)]
    pub precision: PrecisionName,
}

fn one() -> f64 {
    1.0
}

fn cpu() -> String {
    "cpu".to_owned()
}

/// [`Precision`] in configs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(rename_all = "lowercase")]
pub enum PrecisionName {
    /// Products of 32-bit floats.
    F32,
    /// Products of floats rounded to 10 bits of mantissa, on a CPU to 16 bits, summed in f32.
    #[default]
    Tf32,
    /// Products of floats rounded to bfloat16, on a CPU to 16 bits, summed in f32.
    Bf16,
}

impl From<PrecisionName> for Precision {
    fn from(name: PrecisionName) -> Self {
        match name {
            PrecisionName::F32 => Precision::F32,
            PrecisionName::Tf32 => Precision::Tf32,
            PrecisionName::Bf16 => Precision::Bf16,
        }
    }
}

/// Validation during training, on episodes that are never reported.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(from = "WrittenEval")]
pub struct EvalConfig {
    /// What policies are judged on: `env` or `data`; null: held-out episodes of `data.file` if there is one
    /// that does not say that it was recorded in the environment, else the environment.
    pub on: Option<Judge>,
    /// Validate every this many batches; null: only at the end.
    pub every: Option<u64>,
    /// Number of episodes of one validation.
    pub episodes: usize,
    /// Settings of the environment that differ from training in validation, such as `length` for T-Maze
    /// (`eval.length` is short for `eval.settings.length`).
    #[describe(leaf)]
    pub settings: Map<String, Value>,
    /// What chooses the best checkpoint; null: what the environment is usually judged by.
    pub metric: Option<Metric>,
    /// Stop when the metric reaches this in two validations running; null: never.
    pub target: Option<f64>,
    /// Return that policies with return tokens are asked for, a finite number; null: the best return of the
    /// training data. Each reward is subtracted from it as an episode goes on.
    pub target_return: Option<f64>,
    /// Draw actions from the policy's probabilities instead of taking the likeliest.
    pub sample: bool,
    /// Device that acts: cpu, cuda, cuda:N, or auto for the one that is faster when the run begins; null: the
    /// one that trains. Few long episodes of a small model are often faster on the CPU.
    pub device: Option<String>,
    /// How weights of linear layers are kept while a CPU acts. On a GPU `train.precision` counts instead.
    pub weights: Weights,
}

/// What policies are judged on while they learn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum Judge {
    /// Episodes acted out in the environment.
    Env,
    /// Recorded episodes that were held out from training.
    Data,
}

/// Validation as files have it: earlier ones have `length` in place of `settings`, and 0 for none.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenEval {
    on: Option<Judge>,
    #[serde(deserialize_with = "none_or_positive")]
    every: Option<u64>,
    episodes: usize,
    length: Option<u64>,
    #[serde(default)]
    settings: Map<String, Value>,
    metric: Option<Metric>,
    target: Option<f64>,
    target_return: Option<f64>,
    sample: bool,
    device: Option<String>,
    #[serde(default)]
    weights: Weights,
}

impl From<WrittenEval> for EvalConfig {
    fn from(written: WrittenEval) -> Self {
        let WrittenEval { on, every, episodes, length, mut settings, metric, target, .. } = written;
        let WrittenEval { target_return, sample, device, weights, .. } = written;
        if let Some(length) = length.filter(|length| *length > 0) {
            settings.insert("length".to_owned(), length.into());
        }
        Self { on, every, episodes, settings, metric, target, target_return, sample, device, weights }
    }
}

impl RunConfig {
    /// Checks everything that the types leave open, except what depends on the environment
    /// ([`RunConfig::environment`]) and on the data.
    pub fn validate(&self) -> Result<()> {
        self.model.architecture().validate().map_err(below_model)?;
        let t = &self.train;
        let check = |ok: bool, key: &str, expected: &str, got: String| {
            if ok { Ok(()) } else { Err(Error::config(key, expected, got)) }
        };
        let window = self.model.architecture().window();
        let counts = [
            ("train.batch", t.batch, 1 << 20),
            ("train.segments", t.segments, 1 << 16),
            ("eval.episodes", self.eval.episodes, MAX_EPISODES),
        ];
        for (key, count, most) in counts {
            check((1..=most).contains(&count), key, &format!("1 to {most}"), count.to_string())?;
        }
        for (key, name) in [("train.device", Some(&t.device)), ("eval.device", self.eval.device.as_ref())] {
            let Some(name) = name else { continue };
            let (auto, expected) = match key {
                "eval.device" => (name == AUTO, "cpu, cuda or cuda:N, or auto"),
                _ => (false, "cpu, cuda or cuda:N"),
            };
            if !auto {
                Device::check_name(name).map_err(|_| Error::config(key, expected, name))?;
            }
        }
        let threads = t.threads.unwrap_or(1);
        check((1..=1024).contains(&threads), "train.threads", "1 to 1024, or null", threads.to_string())?;
        let end = t.schedule.end_factor;
        check((0.0..=1.0).contains(&end), "train.schedule.end_factor", "0 to 1", end.to_string())?;
        check(
            t.segments.is_multiple_of(window.unroll),
            "train.segments",
            &format!("a multiple of the {} windows of one optimizer step", window.unroll),
            t.segments.to_string(),
        )?;
        let ends = t.epochs.is_some() || t.batches.is_some();
        check(ends, "train.epochs", "a number of epochs, or train.batches", "neither".to_owned())?;
        check(t.lr > 0.0 && t.lr.is_finite(), "train.lr", "a positive number", t.lr.to_string())?;
        check(t.clip > 0.0, "train.clip", "a positive number", t.clip.to_string())?;
        check(t.weight_decay >= 0.0, "train.weight_decay", "at least 0", t.weight_decay.to_string())?;
        for (i, beta) in [t.betas.0, t.betas.1].into_iter().enumerate() {
            check(
                (0.0..1.0).contains(&beta),
                &format!("train.betas.{i}"),
                "at least 0 and below 1",
                beta.to_string(),
            )?;
        }
        let smoothing = t.label_smoothing;
        check(
            (0.0..1.0).contains(&smoothing),
            "train.label_smoothing",
            "at least 0 and below 1",
            smoothing.to_string(),
        )?;
        let after = t.after_success;
        check((0.0..=1.0).contains(&after), "train.after_success", "0 to 1", after.to_string())?;
        let changes = t.changes;
        check((0.0..=1e6).contains(&changes), "train.changes", "0 to 1e6", changes.to_string())?;
        let reward = t.success_reward;
        check((reward as f32).is_finite(), "train.success_reward", "a finite number", reward.to_string())?;
        check(t.checkpoint_every > 0, "train.checkpoint_every", "at least 1", "0".to_owned())?;
        check(t.max_loss > 0.0, "train.max_loss", "a positive number", t.max_loss.to_string())?;
        let data = &self.data;
        check(data.seed < 1 << 30, "data.seed", "below 2^30", data.seed.to_string())?;
        check(
            (0.0..1.0).contains(&data.noise),
            "data.noise",
            "at least 0 and below 1",
            data.noise.to_string(),
        )?;
        let plays = data.file.is_none() && self.env.is_some();
        let played = "false, or an environment whose player demonstrates (no data.file)";
        check(!data.stream || plays, "data.stream", played, "true".to_owned())?;
        let own = data.own_share;
        check((0.0..=1.0).contains(&own), "data.own_share", "0 to 1", own.to_string())?;
        let plays = "0, or data.stream=true, whose episodes it is a share of";
        check(own == 0.0 || data.stream, "data.own_share", plays, own.to_string())?;
        let asked = "false, or data.stream=true, whose players are asked";
        check(!data.ties || data.stream, "data.ties", asked, "true".to_owned())?;
        check(data.own_every > 0, "data.own_every", "at least 1", "0".to_owned())?;
        let share = data.held_out;
        check(share > 0.0 && share < 1.0, "data.held_out", "between 0 and 1", share.to_string())?;
        let light = data.brightness;
        check((0.0..=1.0).contains(&light), "data.brightness", "0 to 1", light.to_string())?;
        let images = self.model.architecture().ends().observation.iter().filter(|encoder| encoder.is_image());
        let side = images.flat_map(|encoder| encoder.shape()[1..].to_vec()).min().unwrap_or(usize::MAX);
        let expected = format!("less than the {side} pixels of a picture's shorter side");
        check(data.shift < side.min(1 << 16), "data.shift", &expected, data.shift.to_string())?;
        let mut images =
            self.model.architecture().ends().observation.iter().filter(|encoder| encoder.is_image());
        let coloured = !data.colours || images.all(|encoder| encoder.shape()[0].is_multiple_of(3));
        let expected = "false, or pictures of three channels a camera";
        check(coloured, "data.colours", expected, "true".to_owned())?;
        check((0.0..=1.0).contains(&data.hide), "data.hide", "0 to 1", data.hide.to_string())?;
        if data.file.is_none() && self.env.is_some() {
            let (episodes, most) = (data.episodes, 1 << 28);
            let fits = (1..=most).contains(&episodes);
            check(fits, "data.episodes", &format!("1 to {most}"), episodes.to_string())?;
        }
        if let Some(target) = self.eval.target_return {
            check((target as f32).is_finite(), "eval.target_return", TARGET_RETURN, target.to_string())?;
        }
        let judge = self.env.is_some() || self.eval.on != Some(Judge::Env);
        check(judge, "eval.on", "data, or an environment in env", "env".to_owned())
    }

    /// Number of steps of a crop.
    pub fn crop(&self) -> usize {
        self.train.segments * self.model.architecture().window().steps
    }

    /// The environment that the config names, if it names one, with all its settings checked.
    pub fn environment(&self, registry: &Registry) -> Result<Option<Environment>> {
        self.env.as_ref().map(|spec| registry.find(spec).map_err(below_env)).transpose()
    }

    /// The environment of validations, if the config names one: that of training with `eval.settings`.
    pub fn validation_environment(&self, registry: &Registry) -> Result<Option<Environment>> {
        let Some(mut environment) = self.environment(registry)? else { return Ok(None) };
        for (key, value) in &self.eval.settings {
            environment = environment.with(key, value.clone()).map_err(|error| match error {
                elmur_envs::Error::Config { key, expected, got } => {
                    Error::config(format!("eval.settings.{key}"), expected, got)
                }
                error => error.into(),
            })?;
        }
        Ok(Some(environment))
    }
}

/// Names the setting of a model with its place in the config of a run.
pub(crate) fn below_model(error: elmur_model::Error) -> Error {
    match error {
        elmur_model::Error::Config { key, expected, got } => {
            Error::config(format!("model.{key}"), expected, got)
        }
        error => error.into(),
    }
}

/// Names the setting of an environment with its place in the config of a run.
fn below_env(error: elmur_envs::Error) -> Error {
    match error {
        elmur_envs::Error::Config { key, expected, got } => {
            Error::config(format!("env.{key}"), expected, got)
        }
        error => error.into(),
    }
}
