//! Whole runs by name: the paper's, ours, and baselines.

use elmur_envs::{EnvConfig, EnvKind};
use elmur_model::presets::{self, Preset};

use crate::config::{DataConfig, EvalConfig, RunConfig, TrainConfig};
use crate::error::{Error, Result};
use crate::popgym;
use crate::schedule::{Decay, Unit};

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
        let (env, episodes) = match name {
            "tmaze" | "tmaze-quick" | "tmaze-bc-lstm" | "tmaze-dt" => (Some(EnvConfig::tmaze(steps)), 4800),
            "cartpole" => (Some(EnvConfig::cartpole()), 500),
            _ => (None, 0),
        };
        let quick = name == "tmaze-quick";
        let decay = if train.cosine { Decay::Cosine } else { Decay::Linear };
        let unit = if train.cosine { Unit::Tokens } else { Unit::Steps };
        // A policy that sees its newest steps only cannot act on what is further back.
        let far = env.is_some_and(|env| env.name == EnvKind::TMaze) && !model.architecture().window().slides;
        Ok(Self {
            env,
            data: DataConfig { file: None, episodes, seed: 0, noise: 0.0 },
            train: TrainConfig::of(&train, unit, decay),
            // Retention far beyond the crop comes and goes while the loss stands still, so it is looked at
            // often.
            eval: EvalConfig {
                every: if quick { 100 } else { 50 },
                episodes: 20,
                length: if far { 9600 } else { 0 },
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
        let nearest = elmur_base::nearest(name, names.iter().map(String::as_str));
        let hint = nearest.map(|n| format!(" (did you mean `{n}`?)")).unwrap_or_default();
        format!("one of {own}, or a POPGym task such as popgym-RepeatFirstEasy{hint}")
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
    fn spaces_must_fit_the_policy() {
        let config = RunConfig::preset("tmaze").unwrap();
        let pole = EnvConfig::cartpole().evaluation().unwrap();
        let ends = config.model.architecture().ends();
        let error = ends.check(pole.spaces(), "dataset").unwrap_err().to_string();
        assert!(error.contains("actions for the policy's Categorical { count: 4 }"), "{error}");
        let mut spaces = pole.spaces().clone();
        spaces.observation = Space::Discrete { n: 3 };
        assert!(ends.check(&spaces, "dataset").is_err());
    }
}
