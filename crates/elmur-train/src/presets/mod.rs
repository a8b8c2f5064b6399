//! Whole runs by name: the paper's, POPGym's tasks ([`popgym`]), MIKASA-Robo's ([`mikasa`]) and ours, all with ELMUR ([`settings`] says how
//! it is trained), and what makes of each a run with another policy ([`policies`]).

mod mikasa;
mod policies;
mod popgym;
mod settings;

use elmur_envs::{EnvSpec, Registry};
use elmur_model::ends::{Action, Encoder};
use elmur_model::presets as models;
use elmur_model::session::Weights;
use serde_json::Map;

use crate::config::{DataConfig, EvalConfig, RunConfig, TrainConfig, held_out, own_every, own_from};
use crate::error::{Error, Result};

pub use policies::{Policy, PolicyName};

/// Names and summaries of all presets but those of POPGym's and MIKASA-Robo's tasks.
const NAMED: [(&str, &str); 9] = [
    ("tmaze", "T-Maze as in the paper (but a higher learning rate): 2 layers, 2 slots, segments of 10"),
    ("tmaze-quick", "T-Maze with a small model, for first steps on a laptop (ours)"),
    (
        "small",
        "a small model for your own environment (env=NAME) or data (--data PATH), 60 steps a crop (ours)",
    ),
    ("remember-color", "MIKASA-Robo RememberColor as in the paper: 256 slots, 16 experts, two cameras"),
    ("take-it-back", "MIKASA-Robo TakeItBack as in the paper: 32 slots, segments of 60"),
    ("popgym-autoencode-easy", "POPGym AutoencodeEasy as in the paper: 12 layers, 8 slots, RMSNorm"),
    ("cartpole", "CartPole-v1 as in the paper's table: 4 layers, 16 slots, pre-norm"),
    ("tmaze-bc-lstm", "T-Maze with the recurrent baseline: one LSTM of width 128"),
    ("tmaze-dt", "T-Maze with Decision Transformer: 8 layers over the newest 30 steps"),
];

/// Steps of a crop of the preset `small`.
const SMALL_STEPS: usize = 60;

impl RunConfig {
    /// The run of this name: the paper's, or ours.
    pub fn preset(name: &str) -> Result<Self> {
        if let Some(run) = popgym::preset(name) {
            return run;
        }
        if let Some(run) = mikasa::preset(name) {
            return Ok(run);
        }
        let train = match name {
            "tmaze" => settings::tmaze(),
            "tmaze-quick" => settings::tmaze_quick(),
            "small" => return Ok(small()),
            "remember-color" => settings::remember_color(),
            "take-it-back" => settings::take_it_back(),
            "cartpole" => settings::cartpole(),
            "tmaze-bc-lstm" => return Self::preset("tmaze")?.with_policy("bc-lstm", &Registry::builtin()),
            "tmaze-dt" => return Self::preset("tmaze")?.with_policy("dt", &Registry::builtin()),
            _ => return Err(Error::config("preset", Self::expected_preset(name), name)),
        };
        let model =
            models::model(name).ok_or_else(|| Error::config("preset", Self::expected_preset(name), name))?;
        let steps = (model.architecture().window().steps * train.segments) as u64;
        let mut run = Self { env: None, data: demonstrations(0), model, train, eval: validation() };
        if name.starts_with("tmaze") {
            run.env = Some(EnvSpec::new("tmaze").with("length", steps));
            run.data.episodes = 4800;
            run.eval.episodes = 20;
            // Retention far beyond the crop comes and goes while the loss stands still.
            run.eval.settings.insert("length".to_owned(), 9600.into());
        }
        if name == "cartpole" {
            run.env = Some(EnvSpec::new("cartpole"));
            (run.data.episodes, run.eval.episodes) = (500, 20);
        }
        if name == "tmaze-quick" {
            (run.eval.every, run.eval.target) = (Some(100), Some(1.0));
        }
        let environment = run.environment(&Registry::builtin())?;
        run.env = environment.map(|environment| environment.spec().clone());
        Ok(run)
    }

    /// The names of all presets.
    pub fn preset_names() -> Vec<String> {
        NAMED
            .iter()
            .map(|(name, _)| (*name).to_owned())
            .chain(popgym::names())
            .chain(mikasa::names())
            .collect()
    }

    /// The names of all presets but those of POPGym's and MIKASA-Robo's tasks, each with a line about it.
    pub fn preset_summaries() -> &'static [(&'static str, &'static str)] {
        &NAMED
    }

    /// What was expected by someone who asked for a preset of this name, which does not exist.
    pub fn expected_preset(name: &str) -> String {
        let own: Vec<&str> = NAMED.iter().map(|(name, _)| *name).collect();
        let (own, names) = (own.join(", "), Self::preset_names());
        let nearest = elmur_base::nearest(name, names.iter().map(String::as_str));
        let hint = nearest.map(|n| format!(" (did you mean `{n}`?)")).unwrap_or_default();
        format!(
            "one of {own}, a POPGym task such as popgym-RepeatFirstEasy, or a MIKASA-Robo task such as \
             mikasa-RememberColor3{hint}"
        )
    }
}

/// Our small model before it is known what it sees and does: both follow from the environment or the data.
fn small() -> RunConfig {
    let unknown = (vec![Encoder::Vector { dim: 1, bytes: false }], Action::Categorical { count: 2 });
    let model = models::popgym_small(unknown.0, unknown.1, SMALL_STEPS);
    let train = TrainConfig {
        standardize: true,
        standardize_integers: true,
        batches: Some(3000),
        ..settings::small(&model, SMALL_STEPS)
    };
    let eval = EvalConfig { every: Some(100), ..validation() };
    RunConfig { env: None, data: demonstrations(3000), model: model.into(), train, eval }
}

/// Demonstrations by the environment's player.
fn demonstrations(episodes: usize) -> DataConfig {
    DataConfig {
        file: None,
        keys: None,
        action_key: None,
        mask: None,
        step_limit: None,
        episodes,
        seed: 0,
        noise: 0.0,
        stream: false,
        own_share: 0.0,
        own_from: own_from(),
        own_every: own_every(),
        ties: false,
        held_out: held_out(),
        shift: 0,
        brightness: 0.0,
        colours: false,
        hide: 0.0,
    }
}

/// Validation on 100 episodes, every 50 batches, without a target.
fn validation() -> EvalConfig {
    EvalConfig {
        on: None,
        every: Some(50),
        episodes: 100,
        settings: Map::new(),
        metric: None,
        target: None,
        target_return: None,
        sample: false,
        device: None,
        weights: Weights::F32,
    }
}

#[cfg(test)]
mod tests {
    use elmur_base::Space;

    use super::*;

    #[test]
    fn presets_with_an_environment_are_whole_runs() {
        for (name, _) in NAMED {
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
        assert!(error.contains("actions like the policy's (a choice of 4)"), "{error}");
        let mut spaces = pole.spaces().clone();
        spaces.observation = Space::Discrete { n: 3 };
        assert!(ends.check(&spaces, "dataset").is_err());
    }
}
