//! Everything that decides a run, as one tree of settings.

use std::path::PathBuf;

use elmur_data::collect;
use elmur_engine::{Device, Precision};
use elmur_envs::EnvConfig;
use elmur_model::PolicyConfig;
use elmur_model::presets::TrainPreset;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::evaluate::MAX_EPISODES;
use crate::schedule::{Decay, Schedule, Unit};

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// The environment of demonstrations and validation; null for data from elsewhere, without validation.
    pub env: Option<EnvConfig>,
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// A dataset (native file or folder of .npz files); null: the environment's expert plays.
    pub file: Option<PathBuf>,
    /// Number of episodes that the expert plays.
    pub episodes: usize,
    /// Seed of those episodes, below 2^30: the rest is for evaluation.
    pub seed: u32,
    /// Probability of a random action in place of the expert's, which is not imitated but followed by how to
    /// recover.
    #[serde(default)]
    pub noise: f64,
}

/// Optimizer, batch size, schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Seed of weights, order and dropout.
    pub seed: u64,
    /// Rows of a batch.
    pub batch: usize,
    /// Windows (for ELMUR: segments) of a training crop.
    pub segments: usize,
    /// Passes over the data.
    pub epochs: u64,
    /// End after this many batches at most; 0: no such limit.
    pub batches: u64,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning-rate schedule: warm-up, then decay.
    pub schedule: Schedule,
    /// Label smoothing of discrete actions.
    pub label_smoothing: f64,
    /// Clip gradients to this global norm.
    pub clip: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// AdamW's betas.
    pub betas: (f64, f64),
    /// Begin with an encoder fitted to the mean and spread of the data's vector observations.
    #[serde(default)]
    pub standardize: bool,
    /// Batches between checkpoints.
    pub checkpoint_every: u64,
    /// Loss above which training counts as diverged.
    pub max_loss: f64,
    /// CPU threads; 0: one per core. Results do not depend on their number.
    pub threads: usize,
    /// Device that trains: cpu, cuda or cuda:N.
    #[serde(default = "cpu")]
    pub device: String,
    /// Precision of matrix products on a GPU: f32, tf32 or bf16.
    #[serde(default)]
    pub precision: PrecisionName,
}

fn cpu() -> String {
    "cpu".to_owned()
}

/// [`Precision`] in configs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrecisionName {
    /// f32
    F32,
    /// tf32
    #[default]
    Tf32,
    /// bf16
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalConfig {
    /// Batches between evaluations; 0: only at the end.
    pub every: u64,
    /// Episodes of one evaluation.
    pub episodes: usize,
    /// T-Maze: episode length; 0: as in training.
    pub length: u64,
    /// Stop when the mean score (success rate, else return) reaches this in two evaluations running; null:
    /// never.
    pub target: Option<f64>,
    /// Draw actions from the policy's probabilities instead of taking the likeliest.
    pub sample: bool,
    /// Device that acts: cpu, cuda or cuda:N; null: the one that trains. Few long episodes of a small model
    /// are often faster on the CPU.
    #[serde(default)]
    pub device: Option<String>,
}

impl RunConfig {
    /// Checks everything that the types leave open.
    pub fn validate(&self) -> Result<()> {
        self.model.architecture().validate()?;
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
            Device::check_name(name).map_err(|_| Error::config(key, "cpu, cuda or cuda:N", name))?;
        }
        check(t.threads <= 1024, "train.threads", "at most 1024", t.threads.to_string())?;
        let end = t.schedule.end_factor;
        check((0.0..=1.0).contains(&end), "train.schedule.end_factor", "in 0..=1", end.to_string())?;
        check(
            t.segments.is_multiple_of(window.unroll),
            "train.segments",
            &format!("a multiple of the {} windows of one optimizer step", window.unroll),
            t.segments.to_string(),
        )?;
        check(
            t.epochs > 0 || t.batches > 0,
            "train.epochs",
            "at least 1, or train.batches",
            t.epochs.to_string(),
        )?;
        check(t.lr > 0.0 && t.lr.is_finite(), "train.lr", "a positive number", t.lr.to_string())?;
        check(t.clip > 0.0, "train.clip", "a positive number", t.clip.to_string())?;
        check(t.weight_decay >= 0.0, "train.weight_decay", "at least 0", t.weight_decay.to_string())?;
        for (i, beta) in [t.betas.0, t.betas.1].into_iter().enumerate() {
            check((0.0..1.0).contains(&beta), &format!("train.betas.{i}"), "in 0..1", beta.to_string())?;
        }
        let smoothing = t.label_smoothing;
        check((0.0..1.0).contains(&smoothing), "train.label_smoothing", "in 0..1", smoothing.to_string())?;
        check(t.checkpoint_every > 0, "train.checkpoint_every", "at least 1", "0".to_owned())?;
        check(t.max_loss > 0.0, "train.max_loss", "a positive number", t.max_loss.to_string())?;
        check(self.data.seed < 1 << 30, "data.seed", "below 2^30", self.data.seed.to_string())?;
        let noise = self.data.noise;
        check((0.0..1.0).contains(&noise), "data.noise", "in 0..1", noise.to_string())?;
        check(
            self.env.is_some() || self.data.file.is_some(),
            "data.file",
            "a dataset: this preset has no environment here whose expert could play",
            "null".to_owned(),
        )?;
        if let (Some(env), None) = (&self.env, &self.data.file) {
            let most = 1 << 28;
            let count = self.data.episodes;
            check((1..=most).contains(&count), "data.episodes", &format!("1 to {most}"), count.to_string())?;
            collect::spaces(env)?;
        }
        if let Some(env) = self.validation_env() {
            self.model.architecture().ends().check(env.evaluation()?.spaces(), "environment")?;
        }
        Ok(())
    }

    /// Steps of a crop.
    pub fn crop(&self) -> usize {
        self.train.segments * self.model.architecture().window().steps
    }

    /// The environment of evaluations during training.
    pub fn validation_env(&self) -> Option<EnvConfig> {
        self.env.map(|env| EnvConfig {
            length: if self.eval.length == 0 { env.length } else { self.eval.length },
            ..env
        })
    }
}

impl TrainConfig {
    /// The settings of a preset; its warm-up counts `unit`s.
    pub(crate) fn of(train: &TrainPreset, unit: Unit, decay: Decay) -> Self {
        Self {
            seed: 0,
            batch: train.batch,
            segments: train.segments,
            epochs: train.epochs as u64,
            batches: 0,
            lr: train.lr,
            schedule: Schedule {
                unit,
                warmup: train.warmup,
                decay,
                total: 0,
                end_factor: train.lr_end_factor,
            },
            label_smoothing: train.label_smoothing,
            clip: train.clip,
            weight_decay: train.weight_decay,
            betas: train.betas,
            standardize: false,
            checkpoint_every: 100,
            max_loss: 1e4,
            threads: 0,
            device: cpu(),
            precision: PrecisionName::default(),
        }
    }
}
