//! Runs for POPGym's tasks: one rule for all 48, and one with the published choices.

use elmur_envs::popgym::{Family, Task, Version};
use elmur_envs::{Encoding, EnvSpec, Registry, Wrappers};
use elmur_model::PolicyConfig;
use elmur_model::ends::{Action, Encoder};
use elmur_model::presets as models;

use crate::config::{RunConfig, TrainConfig};
use crate::error::Result;
use crate::presets::{demonstrations, settings, validation};

/// Episodes of demonstrations, as in the published datasets.
const EPISODES: usize = 3000;

/// One of a task's presets: a policy and how it is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    /// Our small ELMUR.
    Small,
    /// The published choices for ELMUR.
    Paper,
    /// The recurrent baseline.
    BcLstm,
    /// Decision Transformer.
    Dt,
}

/// Suffixes of the names of presets; our own ELMUR has none.
const ENDINGS: [(&str, Variant); 3] =
    [("-compat", Variant::Paper), ("-bc-lstm", Variant::BcLstm), ("-dt", Variant::Dt)];

/// The preset of the paper's table, and its name among those of all tasks.
const PAPER: (&str, &str) = ("popgym-autoencode-easy", "popgym-AutoencodeEasy-compat");

fn parse(name: &str) -> Option<(Task, Variant)> {
    let name = if name == PAPER.0 { PAPER.1 } else { name };
    for (ending, variant) in ENDINGS {
        if let Some(id) = name.strip_suffix(ending) {
            return Some((Task::find(id)?, variant));
        }
    }
    Some((Task::find(name)?, Variant::Small))
}

/// The names of all presets here, without the `-v0` that ids may end with.
pub(crate) fn names() -> impl Iterator<Item = String> {
    let endings = || [""].into_iter().chain(ENDINGS.map(|(ending, _)| ending));
    Task::all().flat_map(move |task| endings().map(move |ending| format!("{}{ending}", task.name())))
}

/// The run of this name, if it is one of these.
pub(crate) fn preset(name: &str) -> Option<Result<RunConfig>> {
    let (task, variant) = parse(name)?;
    let with = |policy: &str| small(task)?.with_policy(policy, &Registry::builtin());
    Some(match variant {
        Variant::Small => small(task),
        Variant::Paper => paper(task),
        Variant::BcLstm => with("bc-lstm"),
        Variant::Dt => with("dt"),
    })
}

/// Our environment of a task: a board is one choice, and the previous action is shown where nothing else
/// tells it and the policy's tokens do not either. With it goes a flag at the first step of an episode, which
/// has no previous action: without the flag it looks like a step after action 0.
pub(super) fn env_of(task: Task, has_action_tokens: bool) -> EnvSpec {
    // These tasks do not show the previous action, and without it the observation is ambiguous: which cell or
    // arm the feedback is about, which way the cart was pushed. (The pendulum's torque changes its speed
    // little, and policies that see it learn to repeat it.)
    let ambiguous = matches!(
        task.family,
        Family::Battleship
            | Family::Concentration
            | Family::MineSweeper
            | Family::MultiarmedBandit
            | Family::NoisyPositionOnlyCartPole
            | Family::PositionOnlyCartPole
    );
    let previous_action = ambiguous && !has_action_tokens;
    let (first_step, flat_action) = (previous_action, is_board(task));
    let wrappers = Wrappers { previous_action, first_step, flat_action, ..Wrappers::default() };
    env(task, Version::default(), wrappers)
}

fn env(task: Task, version: Version, wrappers: Wrappers) -> EnvSpec {
    EnvSpec::new(task.id()).with("version", version.name()).with_wrappers(wrappers)
}

/// Encoders and head for an environment's spaces.
fn ends_of(env: &EnvSpec) -> Result<(Vec<Encoder>, Action)> {
    let environment = Registry::builtin().find(env)?;
    let spaces = environment.spaces();
    let encoders = spaces.observation.leaves().iter().map(Encoder::of).collect();
    Ok((encoders, Action::of(&spaces.action)?))
}

/// Our choices: integers are embedded, numbers standardized, gradients flow through all segments of a crop;
/// 3,000 batches, validated every 100.
fn small(task: Task) -> Result<RunConfig> {
    let env = env_of(task, false);
    let (observation, action) = ends_of(&env)?;
    let model = models::popgym_small(observation, action, crop(task));
    let train = settings::small(&model, crop(task));
    let mut run = run(env, model.into(), train);
    (run.train.epochs, run.train.batches) = (None, Some(3000));
    // Positions of a pole that is held upright differ in the third decimal.
    run.train.standardize = true;
    // Of a board that is mostly covered, a token would tell little but that.
    run.train.standardize_integers = true;
    run.eval.every = Some(100);
    // Where the best return is certain there is something to reach.
    run.eval.target = (task.good_return() == 1.0).then_some(0.995);
    Ok(run)
}

/// The published choices: numbers as they are through a linear map, no previous action, the older rules,
/// actions drawn from the policy's probabilities unless they are cells of a board.
fn paper(task: Task) -> Result<RunConfig> {
    let wrappers =
        Wrappers { encoding: Encoding::Floats, flat_action: is_board(task), ..Wrappers::default() };
    let env = env(task, Version::V106, wrappers);
    let (observation, action) = ends_of(&env)?;
    let model = models::popgym_paper(observation, action, published_segment(task));
    let sample = published_sampling(task, &model.action);
    let mut run = run(env, model.into(), settings::popgym_paper());
    run.eval.sample = sample;
    Ok(run)
}

fn run(env: EnvSpec, model: PolicyConfig, train: TrainConfig) -> RunConfig {
    RunConfig { env: Some(env), data: demonstrations(EPISODES), model, train, eval: validation() }
}

/// Whether published policies draw their actions, which they do unless these are numbers or cells of a board.
pub(super) fn published_sampling(task: Task, action: &Action) -> bool {
    action.is_discrete() && !is_board(task)
}

fn is_board(task: Task) -> bool {
    matches!(task.family, Family::Battleship | Family::MineSweeper)
}

/// Steps that a training crop covers: all of an episode where its start matters to its end, else what all but
/// the longest episodes of a good player take.
pub(super) fn crop(task: Task) -> usize {
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
pub(super) fn published_segment(task: Task) -> usize {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tasks_have_whole_runs_of_every_kind() {
        assert_eq!(names().count(), 4 * 48);
        for name in names() {
            let config = RunConfig::preset(&name).unwrap();
            config.validate().unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(config.crop() >= 14, "{name}");
        }
        let short = RunConfig::preset("popgym-RepeatFirstEasy").unwrap();
        assert_eq!(short, RunConfig::preset("popgym-RepeatFirstEasy-v0").unwrap());
        assert_eq!((short.model.architecture().window().steps, short.train.segments), (17, 3));
    }

    #[test]
    fn the_published_choice_for_autoencode_is_the_papers_model() {
        let run = RunConfig::preset("popgym-AutoencodeEasy-compat").unwrap();
        assert_eq!(Some(&run.model), models::model("popgym-autoencode-easy").as_ref());
        assert_eq!(run, RunConfig::preset("popgym-autoencode-easy").unwrap());
        assert!(run.eval.sample && run.env.unwrap().settings["version"] == "1.0.6");
    }

    #[test]
    fn misspelt_tasks_are_answered_with_the_nearest() {
        let error = RunConfig::preset("popgym-RepeatFristEasy").unwrap_err().to_string();
        assert!(error.contains("did you mean `popgym-RepeatFirstEasy`"), "{error}");
    }
}
