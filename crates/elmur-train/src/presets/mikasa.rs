//! Runs for the 32 tasks of MIKASA-Robo, on recordings (`--data PATH`): our choices, one rule for all of them,
//! and the published ones for the tasks that have any. Policies are judged in the simulator where there is one,
//! else on episodes that are held out.

use elmur_envs::{EnvSpec, ROBOT_TASKS, Registry, RobotTask};
use elmur_model::presets as models;

use crate::config::{DataConfig, EvalConfig, RunConfig, TrainConfig};
use crate::presets::{demonstrations, settings, validation};
use crate::schedule::Schedule;

/// What the names of presets begin with.
const PREFIX: &str = "mikasa-";

/// Number of demonstrations that are played where no recordings are given: as many as in the paper.
const EPISODES: usize = 1000;

/// Suffix of the names of presets with the published choices.
const COMPAT: &str = "-compat";

/// Whether the paper says how ELMUR was trained on a task.
fn is_published(task: &str) -> bool {
    task.starts_with("RememberColor") || task == "TakeItBack"
}

/// The names of all presets here.
pub(crate) fn names() -> impl Iterator<Item = String> {
    let named = |task: &'static RobotTask| {
        let task = task.short_name();
        let compat = is_published(task).then(|| format!("{PREFIX}{task}{COMPAT}"));
        [Some(format!("{PREFIX}{task}")), compat].into_iter().flatten()
    };
    ROBOT_TASKS.iter().flat_map(named)
}

/// The run of this name, if it is one of these. Ids may end with `-v0`.
pub(crate) fn preset(name: &str) -> Option<RunConfig> {
    let task = name.strip_prefix(PREFIX)?;
    let (task, compat) = task.strip_suffix(COMPAT).map_or((task, false), |task| (task, true));
    let found = RobotTask::find(task)?;
    let task = found.short_name();
    if !compat {
        return Some(ours(task, found.steps as usize));
    }
    let (model, train) = match task {
        "TakeItBack" => (models::take_it_back(), settings::take_it_back()),
        _ => (models::remember_color(), settings::remember_color()),
    };
    let env = environment(task, |spec| spec);
    let run =
        RunConfig { env, data: demonstrations(EPISODES), model: model.into(), train, eval: simulated() };
    is_published(task).then_some(run)
}

/// The environment of a task with some settings changed and all others at their defaults; none where there are
/// no simulators.
fn environment(task: &str, change: impl FnOnce(EnvSpec) -> EnvSpec) -> Option<EnvSpec> {
    let spec = change(EnvSpec::new(format!("{PREFIX}{task}")));
    Registry::builtin().find(&spec).ok().map(|environment| environment.spec().clone())
}

/// Validation that is short enough for a simulator, in which an episode takes seconds.
fn simulated() -> EvalConfig {
    EvalConfig { every: Some(1000), episodes: 20, ..validation() }
}

/// Our choices for a task with episodes of `steps` steps: cameras averaged to half their height and width, a
/// residual encoder, gradients through all segments of an episode, pictures moved by a few pixels and made lighter
/// or darker, little weight on what an expert does after success, which is to hold still, and much on steps at which
/// it sets out: an arm that moves shows where it goes, so that only these steps teach what to choose.
fn ours(task: &str, steps: usize) -> RunConfig {
    let model = models::mikasa(steps);
    let small = settings::small(&model, steps);
    let train = TrainConfig {
        batch: (2048 / steps).max(8),
        batches: Some(6000),
        lr: 5e-4,
        schedule: Schedule { warmup: 200, ..small.schedule },
        weight_decay: 0.02,
        after_success: 0.1,
        changes: 30.0,
        ..small
    };
    let data = DataConfig { shift: 2, brightness: 0.1, ..demonstrations(EPISODES) };
    let env = environment(task, |spec| spec.with("size", 64).with("render", 128));
    RunConfig { env, data, model: model.into(), train, eval: simulated() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tasks_have_whole_runs_and_four_of_them_published_ones() {
        assert_eq!(names().count(), 36);
        for name in names() {
            RunConfig::preset(&name).unwrap().validate().unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        for task in &ROBOT_TASKS {
            let (name, steps) = (task.short_name(), task.steps);
            let env = RunConfig::preset(&format!("mikasa-{name}")).unwrap().env;
            if cfg!(unix) {
                let env = env.unwrap();
                let found = Registry::builtin().find(&env).unwrap();
                assert_eq!(found.facts().max_steps, Some(steps), "{name}");
                let settings = (&env.settings["size"], &env.settings["render"]);
                assert_eq!((env.name, settings), (format!("mikasa-{name}-v0"), (&64.into(), &128.into())));
            }
            assert_eq!(
                RunConfig::preset(&format!("mikasa-{name}")).unwrap().crop(),
                steps as usize,
                "{name}"
            );
        }
        let published = RunConfig::preset("mikasa-RememberColor5-compat").unwrap();
        let same_but_judging = |run: &RunConfig, other: &str| {
            let other = RunConfig::preset(other).unwrap();
            assert_eq!((&run.model, &run.train), (&other.model, &other.train));
        };
        same_but_judging(&published, "remember-color");
        let longer = RunConfig::preset("mikasa-TakeItBack-v0-compat").unwrap();
        same_but_judging(&longer, "take-it-back");
        assert_eq!((longer.crop(), longer.train.betas), (180, (0.9, 0.99)));
        for name in ["mikasa-RememberShape3-compat", "mikasa-RememberColor4"] {
            assert!(RunConfig::preset(name).unwrap_err().to_string().contains("expected one of"));
        }
    }
}
