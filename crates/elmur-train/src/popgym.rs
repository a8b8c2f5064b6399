//! Runs for POPGym's tasks: one rule for all 48, and one with the published choices.

use elmur_base::{Leaf, Space, Spaces};
use elmur_data::collect;
use elmur_envs::popgym::{Family, Task, Version};
use elmur_envs::{EnvConfig, Wrappers};
use elmur_model::ModelConfig;
use elmur_model::config::{Action, CategoricalEncoding, Observation};
use elmur_model::presets::{self, TrainPreset};

use crate::config::{DataConfig, EvalConfig, RunConfig, TrainConfig};
use crate::error::{Error, Result};
use crate::schedule::{Decay, Schedule, Unit};

/// Episodes of demonstrations, as in the published datasets.
const EPISODES: usize = 3000;

/// Which of a task's presets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    /// Ours.
    Ours,
    /// The published choices.
    Compat,
}

/// The end of the names of presets with the published choices.
const COMPAT: &str = "-compat";

/// The name of the paper's own preset, and the one of ours that makes it a run.
const PAPER: (&str, &str) = ("popgym-autoencode-easy", "popgym-AutoencodeEasy-compat");

fn parse(name: &str) -> Option<(Task, Variant)> {
    let name = if name == PAPER.0 { PAPER.1 } else { name };
    match name.strip_suffix(COMPAT) {
        Some(id) => Some((Task::find(id)?, Variant::Compat)),
        None => Some((Task::find(name)?, Variant::Ours)),
    }
}

/// The names of all presets here, without the `-v0` that ids may end with.
pub(crate) fn names() -> impl Iterator<Item = String> {
    Task::all().flat_map(|task| [task.name().to_owned(), format!("{}{COMPAT}", task.name())])
}

/// The run of this name, if it is one of these.
pub(crate) fn preset(name: &str) -> Option<Result<RunConfig>> {
    let (task, variant) = parse(name)?;
    Some(match variant {
        Variant::Ours => ours(task),
        Variant::Compat => compat(task),
    })
}

/// Our choices: integers are embedded, numbers standardized, the previous action is shown where nothing else tells it, a board is one choice.
fn ours(task: Task) -> Result<RunConfig> {
    // Boards and bandits do not say where the answer belongs, the cart's positions not which way the last push went. (The pendulum's torque changes its
    // speed little, and those who see it learn to repeat it.)
    let needs_action = matches!(
        task.family,
        Family::Battleship
            | Family::Concentration
            | Family::MineSweeper
            | Family::MultiarmedBandit
            | Family::NoisyPositionOnlyCartPole
            | Family::PositionOnlyCartPole
    );
    let wrappers =
        Wrappers { previous_action: needs_action, flat_action: is_board(task), ..Wrappers::default() };
    let env = EnvConfig { wrappers, ..EnvConfig::popgym(task) };
    let spaces = collect::spaces(&env)?;
    let (observation, action) = model_ends(&spaces)?;
    let (model, train) = presets::puzzle(observation, action, crop(task));
    let schedule = Schedule {
        unit: Unit::Steps,
        warmup: train.warmup,
        decay: Decay::Cosine,
        total: 0,
        end_factor: train.lr_end_factor,
    };
    let mut run = run(env, model, &train, schedule);
    run.train.batches = 3000;
    // Positions of a pole that is held upright differ in the third decimal.
    run.train.standardize = true;
    run.eval.every = 100;
    // Where the best return is certain there is something to reach.
    run.eval.target = (task.good_return() == 1.0).then_some(0.995);
    Ok(run)
}

/// The published choices: numbers as they are through a linear map, no previous action, the older rules, actions drawn from the policy's
/// probabilities unless they are cells of a board.
fn compat(task: Task) -> Result<RunConfig> {
    let wrappers = Wrappers { as_floats: true, flat_action: is_board(task), ..Wrappers::default() };
    let env = EnvConfig { wrappers, version: Version::V106, ..EnvConfig::popgym(task) };
    let spaces = collect::spaces(&env)?;
    let (observation, action) = model_ends(&spaces)?;
    let (model, train) = presets::published_puzzle(observation, action, published_segment(task));
    let schedule = Schedule {
        unit: Unit::Steps,
        warmup: train.warmup,
        decay: Decay::Linear,
        total: 0,
        end_factor: train.lr_end_factor,
    };
    let sample = model.action.is_discrete() && !is_board(task);
    let mut run = run(env, model, &train, schedule);
    run.eval.sample = sample;
    Ok(run)
}

fn run(env: EnvConfig, model: ModelConfig, train: &TrainPreset, schedule: Schedule) -> RunConfig {
    RunConfig {
        env: Some(env),
        data: DataConfig { file: None, episodes: EPISODES, seed: 0, noise: 0.0 },
        train: TrainConfig::of(train, schedule),
        eval: EvalConfig { every: 50, episodes: 100, length: 0, target: None, sample: false, device: None },
        model,
    }
}

fn is_board(task: Task) -> bool {
    matches!(task.family, Family::Battleship | Family::MineSweeper)
}

/// Steps that a training crop covers: all of an episode where its start matters to its end, else what all but the longest episodes of a
/// good player take.
fn crop(task: Task) -> usize {
    let usual = match task.family {
        Family::Battleship => [48, 63, 84],
        Family::LabyrinthEscape => [70, 136, 226],
        Family::LabyrinthExplore => [100, 210, 370],
        Family::NoisyPositionOnlyCartPole => [200, 200, 120],
        _ => [usize::MAX; 3],
    };
    usual[task.difficulty as usize].min(task.max_steps())
}

/// Steps per segment in the published code, which trains on three of them.
fn published_segment(task: Task) -> usize {
    let third = task.max_steps().saturating_add(1).div_ceil(3);
    let by_difficulty = match task.family {
        Family::LabyrinthEscape => [18, 93, 111],
        Family::LabyrinthExplore => [31, 73, 126],
        Family::MineSweeper => [5, 6, 7],
        Family::NoisyPositionOnlyCartPole => [66, 38, 25],
        Family::RepeatFirst => [18, 47, 93],
        Family::VelocityOnlyCartpole => [67, 134, 67],
        _ => [third; 3],
    };
    by_difficulty[task.difficulty as usize]
}

/// The two ends of a model for these spaces: integers embedded, floats through a linear map; one head per choice, or numbers.
fn model_ends(spaces: &Spaces) -> Result<(Observation, Action)> {
    let part = |leaf: &Leaf<'_>| match leaf {
        Leaf::Ints(sizes) => {
            Observation::Categorical { sizes: sizes.to_vec(), encoding: CategoricalEncoding::Embedding }
        }
        Leaf::Floats { .. } | Leaf::Bytes { .. } => Observation::Vector { dim: leaf.len() },
    };
    let mut parts: Vec<Observation> = spaces.observation.leaves().iter().map(part).collect();
    let observation = if parts.len() == 1 { parts.remove(0) } else { Observation::Parts(parts) };
    let action = match &spaces.action {
        Space::Discrete { n } => Action::Categorical { count: *n },
        Space::MultiDiscrete { sizes } => Action::MultiCategorical { sizes: sizes.clone() },
        Space::Box { shape, .. } => Action::Continuous { dim: shape.iter().product(), tanh: false },
        other => return Err(Error::config("env", "an action that is not a tuple", format!("{other:?}"))),
    };
    Ok((observation, action))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tasks_have_whole_runs_of_both_kinds() {
        assert_eq!(names().count(), 96);
        for name in names() {
            let config = RunConfig::preset(&name).unwrap();
            config.validate().unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(config.crop() >= 14, "{name}");
        }
        let short = RunConfig::preset("popgym-RepeatFirstEasy").unwrap();
        assert_eq!(short, RunConfig::preset("popgym-RepeatFirstEasy-v0").unwrap());
        assert_eq!((short.model.segment_length, short.train.segments), (17, 3));
    }

    #[test]
    fn the_published_choice_for_autoencode_is_the_papers_model() {
        let run = RunConfig::preset("popgym-AutoencodeEasy-compat").unwrap();
        assert_eq!(Some(&run.model), presets::model("popgym-autoencode-easy").as_ref());
        assert_eq!(run, RunConfig::preset("popgym-autoencode-easy").unwrap());
        assert!(run.eval.sample && run.env.unwrap().version == Version::V106);
    }

    #[test]
    fn misspelt_tasks_are_answered_with_the_nearest() {
        let error = RunConfig::preset("popgym-RepeatFristEasy").unwrap_err().to_string();
        assert!(error.contains("did you mean `popgym-RepeatFirstEasy`"), "{error}");
    }
}
