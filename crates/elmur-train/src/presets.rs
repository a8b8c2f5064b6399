//! Whole runs by name: the paper's, ours, and baselines.

use elmur_envs::{EnvSpec, Registry};
use elmur_model::presets::{self, Preset, TrainPreset};
use serde_json::Map;

use crate::config::{DataConfig, EvalConfig, PrecisionName, RunConfig, TrainConfig, held_out};
use crate::error::{Error, Result};
use crate::popgym;
use crate::schedule::{Decay, Schedule, Unit};

impl RunConfig {
    /// The run that the paper does with a preset (or ours, for our own presets).
    pub fn preset(name: &str) -> Result<Self> {
        if let Some(run) = popgym::preset(name) {
            return run;
        }
        let Some(Preset { model, train, .. }) = presets::find(name) else {
            return Err(Error::config("preset", Self::expected_preset(name), name));
        };
        let steps = (model.architecture().window().steps * train.segments) as u64;
        let maze = name.starts_with("tmaze");
        let (env, episodes) = match name {
            _ if maze => (Some(EnvSpec::new("tmaze").with("length", steps)), 4800),
            "cartpole" => (Some(EnvSpec::new("cartpole")), 500),
            _ => (None, 0),
        };
        let quick = name == "tmaze-quick";
        let decay = if train.cosine { Decay::Cosine } else { Decay::Linear };
        let unit = if train.cosine { Unit::Tokens } else { Unit::Steps };
        let mut run = Self {
            env,
            data: data(episodes),
            train: train_config(&train, unit, decay),
            // Retention far beyond the crop comes and goes while the loss stands still, so it is looked at
            // often.
            eval: EvalConfig {
                every: Some(if quick { 100 } else { 50 }),
                episodes: 20,
                target: quick.then_some(1.0),
                ..validation()
            },
            model,
        };
        // A policy that sees its newest steps only cannot act on what is further back.
        if maze && !run.model.architecture().window().slides {
            run.eval.settings.insert("length".to_owned(), 9600.into());
        }
        let environment = run.environment(&Registry::builtin())?;
        run.env = environment.map(|environment| environment.spec().clone());
        Ok(run)
    }

    /// The names of all presets.
    pub fn preset_names() -> Vec<String> {
        presets::all().iter().map(|preset| preset.name.to_owned()).chain(popgym::names()).collect()
    }

    /// What was expected by someone who asked for a preset of this name, which does not exist.
    pub fn expected_preset(name: &str) -> String {
        let own: Vec<&str> = presets::all().iter().map(|preset| preset.name).collect();
        let (own, names) = (own.join(", "), Self::preset_names());
        let nearest = elmur_base::nearest(name, names.iter().map(String::as_str));
        let hint = nearest.map(|n| format!(" (did you mean `{n}`?)")).unwrap_or_default();
        format!("one of {own}, or a POPGym task such as popgym-RepeatFirstEasy{hint}")
    }
}

/// Demonstrations by the environment's player.
pub(crate) fn data(episodes: usize) -> DataConfig {
    DataConfig { file: None, episodes, seed: 0, noise: 0.0, held_out: held_out() }
}

/// Validation on 100 episodes, every 50 batches, without a target.
pub(crate) fn validation() -> EvalConfig {
    EvalConfig {
        on: None,
        every: Some(50),
        episodes: 100,
        settings: Map::new(),
        metric: None,
        target: None,
        sample: false,
        device: None,
    }
}

/// The training settings of a preset; its warm-up counts `unit`s.
pub(crate) fn train_config(train: &TrainPreset, unit: Unit, decay: Decay) -> TrainConfig {
    TrainConfig {
        seed: 0,
        batch: train.batch,
        segments: train.segments,
        epochs: Some(train.epochs as u64).filter(|epochs| *epochs > 0),
        batches: None,
        lr: train.lr,
        schedule: Schedule {
            unit,
            warmup: train.warmup,
            decay,
            total: None,
            end_factor: train.lr_end_factor,
        },
        label_smoothing: train.label_smoothing,
        clip: train.clip,
        weight_decay: train.weight_decay,
        betas: train.betas,
        standardize: false,
        checkpoint_every: 100,
        max_loss: 1e4,
        threads: None,
        device: "cpu".to_owned(),
        precision: PrecisionName::default(),
    }
}

#[cfg(test)]
mod tests {
    use elmur_base::Space;

    use super::*;

    #[test]
    fn presets_with_an_environment_are_whole_runs() {
        for name in ["tmaze", "tmaze-quick", "cartpole", "tmaze-bc-lstm", "tmaze-dt"] {
            RunConfig::preset(name).unwrap().validate().unwrap();
        }
        let preset = RunConfig::preset("remember-color").unwrap();
        let error = preset.prepare(&Registry::builtin(), false).unwrap_err().to_string();
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
    fn spaces_must_fit_the_policy() {
        let config = RunConfig::preset("tmaze").unwrap();
        let pole = Registry::builtin().find(&EnvSpec::new("cartpole")).unwrap();
        let ends = config.model.architecture().ends();
        let error = ends.check(pole.spaces(), "dataset").unwrap_err().to_string();
        assert!(error.contains("actions for the policy's Categorical { count: 4 }"), "{error}");
        let mut spaces = pole.spaces().clone();
        spaces.observation = Space::Discrete { n: 3 };
        assert!(ends.check(&spaces, "dataset").is_err());
    }
}
