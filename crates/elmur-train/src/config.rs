//! Everything that decides a run. Every field's documentation is its help text.

use std::path::PathBuf;

use elmur_data::{Dataset, collect};
use elmur_engine::{Device, Precision};
use elmur_envs::{EnvConfig, EnvKind, Leaf, Space, Wrappers};
use elmur_model::ModelConfig;
use elmur_model::config::{Action, Observation, Token};
use elmur_model::presets::{self, Preset, TrainPreset};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::evaluate::MAX_EPISODES;
use crate::popgym;
use crate::run::Stop;
use crate::schedule::{Decay, Schedule, Unit};

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Where the policy acts; null for data from elsewhere, which is then trained on without evaluation.
    pub env: Option<EnvConfig>,
    /// What it learns from.
    pub data: DataConfig,
    /// What it is.
    pub model: ModelConfig,
    /// How it learns.
    pub train: TrainConfig,
    /// How it is judged while it learns.
    pub eval: EvalConfig,
}

/// What a policy learns from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// A dataset (native file or folder of .npz files); null: the environment's expert plays.
    pub file: Option<PathBuf>,
    /// Episodes that the expert plays.
    pub episodes: usize,
    /// Seed of those episodes, below 2^30: the rest is for evaluation.
    pub seed: u32,
    /// Probability of a random action in place of the expert's, which is not imitated but shows how to recover.
    #[serde(default)]
    pub noise: f64,
}

/// How a policy learns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Seed of weights, order and dropout.
    pub seed: u64,
    /// Rows of a batch.
    pub batch: usize,
    /// Segments of a crop.
    pub segments: usize,
    /// Passes over the data.
    pub epochs: u64,
    /// End after this many batches at most; 0: no such limit.
    pub batches: u64,
    /// Peak learning rate.
    pub lr: f64,
    /// Its course.
    pub schedule: Schedule,
    /// Label smoothing of discrete actions.
    pub label_smoothing: f64,
    /// Gradients longer than this are shortened to it.
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
    /// Threads; 0: one per core. Results do not depend on it.
    pub threads: usize,
    /// Where to compute: cpu, cuda or cuda:N.
    #[serde(default = "cpu")]
    pub device: String,
    /// How products are computed on a GPU: f32, tf32 or bf16.
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
        Precision::ALL[name as usize]
    }
}

/// The devices of a run, open.
#[derive(Debug, Clone)]
pub struct Devices {
    /// Where it learns.
    pub train: Device,
    /// Where it is evaluated meanwhile; none: where it learns.
    pub eval: Option<Device>,
}

impl Devices {
    /// Opens the devices that a config names.
    pub fn open(config: &RunConfig) -> Result<Self> {
        let t = &config.train;
        let open = |key: &str, name: &str| match Device::open(name, t.threads, t.precision.into()) {
            // A device that this build or machine lacks is as much a mistake in the config as an unknown name.
            Err(elmur_engine::Error::Device { expected, got }) => Err(Error::config(key, expected, got)),
            opened => Ok(opened?),
        };
        let elsewhere = config.eval.device.as_deref().filter(|name| *name != t.device);
        let eval = elsewhere.map(|name| open("eval.device", name)).transpose()?;
        Ok(Self { train: open("train.device", &t.device)?, eval })
    }

    /// Devices of the same kinds whose work runs beside these'.
    pub fn another(&self) -> Result<Self> {
        let eval = self.eval.as_ref().map(Device::another).transpose()?;
        Ok(Self { train: self.train.another()?, eval })
    }
}

/// How a policy is judged while it learns, on episodes that are never reported.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvalConfig {
    /// Batches between evaluations; 0: only at the end.
    pub every: u64,
    /// Episodes.
    pub episodes: usize,
    /// T-Maze: episode length; 0: as in training.
    pub length: u64,
    /// Stop when the mean score (success rate, else return) reaches this in two evaluations running; null: never.
    pub target: Option<f64>,
    /// Draw actions from the policy's probabilities instead of taking the likeliest.
    pub sample: bool,
    /// Where to act: cpu, cuda or cuda:N; null: where it learns. Few long episodes of a small model are often faster on the CPU.
    #[serde(default)]
    pub device: Option<String>,
}

impl RunConfig {
    /// The run that the paper does with a preset (or ours, for our own presets).
    pub fn preset(name: &str) -> Result<Self> {
        if let Some(run) = popgym::preset(name) {
            return run;
        }
        let Some(Preset { model, train, .. }) = presets::find(name) else {
            return Err(Error::config("preset", Self::expected_preset(name), name));
        };
        let steps = (model.segment_length * train.segments) as u64;
        let (env, episodes) = match name {
            "tmaze" | "tmaze-quick" => (Some(EnvConfig::tmaze(steps)), 4800),
            "cartpole" => (Some(EnvConfig::cartpole()), 500),
            _ => (None, 0),
        };
        let quick = name == "tmaze-quick";
        let schedule = Schedule {
            unit: if train.cosine { Unit::Tokens } else { Unit::Steps },
            warmup: train.warmup,
            decay: if train.cosine { Decay::Cosine } else { Decay::Linear },
            total: 0,
            end_factor: train.lr_end_factor,
        };
        Ok(Self {
            env,
            data: DataConfig { file: None, episodes, seed: 0, noise: 0.0 },
            train: TrainConfig::of(&train, schedule),
            // Retention far beyond the crop comes and goes while the loss stands still, so it is looked at often.
            eval: EvalConfig {
                every: if quick { 100 } else { 50 },
                episodes: 20,
                length: if env.is_some_and(|env| env.name == EnvKind::TMaze) { 9600 } else { 0 },
                target: quick.then_some(1.0),
                sample: false,
                device: None,
            },
            model,
        })
    }

    /// What to say to someone who asked for a preset of this name, which there is not.
    pub fn expected_preset(name: &str) -> String {
        let mut names: Vec<String> = presets::all().iter().map(|p| p.name.to_owned()).collect();
        let own = names.join(", ");
        names.extend(popgym::names());
        let nearest = crate::overrides::nearest(name, names.iter().map(String::as_str));
        let hint = nearest.map(|n| format!(" (did you mean `{n}`?)")).unwrap_or_default();
        format!("one of {own}, or a POPGym task such as popgym-RepeatFirstEasy{hint}")
    }

    /// Checks everything that the types leave open.
    pub fn validate(&self) -> Result<()> {
        self.model.validate()?;
        let t = &self.train;
        let check = |ok: bool, key: &str, expected: &str, got: String| {
            if ok { Ok(()) } else { Err(Error::config(key, expected, got)) }
        };
        let through = self.model.memory.gradient.segments();
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
            t.segments.is_multiple_of(through),
            "train.segments",
            &format!("a multiple of the {through} segments of model.memory.gradient"),
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
            check_spaces(&self.model, env.evaluation()?.spaces(), "environment")?;
        }
        Ok(())
    }

    /// Steps of a crop.
    pub fn crop(&self) -> usize {
        self.train.segments * self.model.segment_length
    }

    /// The environment of evaluations during training.
    pub fn validation_env(&self) -> Option<EnvConfig> {
        self.env.map(|env| EnvConfig {
            length: if self.eval.length == 0 { env.length } else { self.eval.length },
            ..env
        })
    }

    /// The demonstrations: read from `data.file`, or played by the expert.
    pub fn dataset(&self) -> Result<Dataset> {
        self.watched_dataset(&Stop::default(), &mut |_| {})
    }

    /// [`Self::dataset`] for someone who waits: `progress` hears how many episodes the expert has played.
    pub fn watched_dataset(&self, stop: &Stop, progress: &mut dyn FnMut(usize)) -> Result<Dataset> {
        if let Some(file) = &self.data.file {
            return self.read(file);
        }
        let env = self.env.ok_or_else(|| Error::config("data.file", "a dataset", "null"))?;
        let data = &self.data;
        let mut episodes = Vec::with_capacity(data.episodes.min(1 << 20));
        let keep = |episode| {
            episodes.push(episode);
            progress(episodes.len());
            let interrupted = std::io::Error::from(std::io::ErrorKind::Interrupted);
            let path = PathBuf::new();
            if stop.requested() { Err(elmur_data::Error::Io { path, cause: interrupted }) } else { Ok(()) }
        };
        let played = collect::collect(&env, data.episodes, data.seed, data.noise, self.train.threads, keep);
        if stop.requested() {
            return Err(Error::Stopped);
        }
        played?;
        let metadata = collect::metadata(&env, data.seed, data.noise);
        Ok(Dataset::from_episodes(collect::spaces(&env)?, metadata, episodes)?)
    }

    /// A dataset file or folder. Plain data of the environment gets the environment's wrappers.
    fn read(&self, file: &std::path::Path) -> Result<Dataset> {
        let Some(env) = self.env else { return Ok(Dataset::open(file)?) };
        let plain = EnvConfig { wrappers: Wrappers::default(), ..env }.evaluation()?.spaces().clone();
        // Arrays do not tell their spaces: those of the environment are right unless the numbers say otherwise.
        let known = if file.is_dir() { elmur_data::read_npz(file, Some(plain.clone())).ok() } else { None };
        let dataset = known.map_or_else(|| Dataset::open(file), Ok)?;
        if env.wrappers.is_none() || *dataset.spaces() != plain {
            return Ok(dataset);
        }
        Ok(elmur_data::wrap(&dataset, env.wrappers)?)
    }
}

impl TrainConfig {
    /// The settings that go with a model preset.
    pub(crate) fn of(train: &TrainPreset, schedule: Schedule) -> Self {
        Self {
            seed: 0,
            batch: train.batch,
            segments: train.segments,
            epochs: train.epochs as u64,
            batches: 0,
            lr: train.lr,
            schedule,
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

/// Whether a model takes these observations and gives these actions.
pub fn check_spaces(model: &ModelConfig, spaces: &elmur_envs::Spaces, what: &'static str) -> Result<()> {
    let mismatch = |expected: String, got: &Space| {
        let remedy = "choose a model for these spaces, or other data";
        Error::Mismatch { what, expected, got: format!("{got:?}"), remedy }
    };
    let leaves = spaces.observation.leaves();
    let parts = match &model.observation {
        Observation::Parts(parts) => parts.iter().collect(),
        one => vec![one],
    };
    let fits = |(part, leaf): (&&Observation, &Leaf<'_>)| match (part, leaf) {
        (Observation::Vector { dim }, Leaf::Floats { .. }) => *dim == leaf.len(),
        (Observation::Image { channels, height, width }, Leaf::Floats { shape, .. }) => {
            *shape == [*channels, *height, *width]
        }
        (Observation::Categorical { sizes, .. }, Leaf::Ints(have)) => sizes == have,
        _ => false,
    };
    if parts.len() != leaves.len() || !parts.iter().zip(&leaves).all(fits) {
        return Err(mismatch(
            format!("observations for the model's {:?}", model.observation),
            &spaces.observation,
        ));
    }
    let same = match (&model.action, &spaces.action) {
        (Action::Categorical { count }, Space::Discrete { n }) => count == n,
        (Action::Categorical { count }, Space::MultiDiscrete { sizes }) => sizes == &[*count],
        (Action::MultiCategorical { sizes }, Space::MultiDiscrete { sizes: have }) => sizes == have,
        (Action::Continuous { dim, .. }, Space::Box { shape, .. }) => *dim == shape.iter().product::<usize>(),
        _ => false,
    };
    if same {
        Ok(())
    } else {
        Err(mismatch(format!("actions for the model's {:?}", model.action), &spaces.action))
    }
}

/// Whether a model's tokens include this kind.
pub(crate) fn has_token(model: &ModelConfig, token: Token) -> bool {
    model.tokens.tokens().contains(&token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_with_an_environment_are_whole_runs() {
        for name in ["tmaze", "tmaze-quick", "cartpole"] {
            RunConfig::preset(name).unwrap().validate().unwrap();
        }
        let error = RunConfig::preset("remember-color").unwrap().validate().unwrap_err().to_string();
        assert!(error.contains("data.file"), "{error}");
        let error = RunConfig::preset("tmase").unwrap_err().to_string();
        assert!(error.contains("did you mean `tmaze`"), "{error}");
    }

    #[test]
    fn devices_are_known_by_name() {
        for key in ["train.device", "eval.device"] {
            let mut config = RunConfig::preset("tmaze-quick").unwrap();
            let device = if key == "train.device" {
                &mut config.train.device
            } else {
                config.eval.device.insert(String::new())
            };
            *device = "gpu".to_owned();
            let error = config.validate().unwrap_err().to_string();
            assert!(error.contains(key) && error.contains("cpu, cuda or cuda:N"), "{error}");
        }
    }

    #[test]
    fn spaces_must_fit_the_model() {
        let config = RunConfig::preset("tmaze").unwrap();
        let pole = EnvConfig::cartpole().evaluation().unwrap();
        let error = check_spaces(&config.model, pole.spaces(), "dataset").unwrap_err().to_string();
        assert!(error.contains("actions for the model's Categorical { count: 4 }"), "{error}");
        let mut spaces = pole.spaces().clone();
        spaces.observation = Space::Discrete { n: 3 };
        assert!(check_spaces(&config.model, &spaces, "dataset").is_err());
    }
}
