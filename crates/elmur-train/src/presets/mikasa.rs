//! Runs for the 32 tasks of MIKASA-Robo, on recordings (`--data PATH`): our choices, one rule for all of them, and the
//! published ones for the tasks that have any.

use elmur_model::presets as models;

use crate::config::{EvalConfig, RunConfig, TrainConfig};
use crate::presets::{demonstrations, settings, validation};

/// What the names of presets begin with.
const PREFIX: &str = "mikasa-";

/// Suffix of the names of presets with the published choices.
const COMPAT: &str = "-compat";

/// Families of tasks: the beginning of their names, the ends, and the steps of an episode.
const FAMILIES: [(&str, &[&str], usize); 11] = [
    ("RememberColor", &["3", "5", "9"], 60),
    ("RememberShape", &["3", "5", "9"], 60),
    ("RememberShapeAndColor", &["3x2", "3x3", "5x3"], 60),
    ("BunchOfColors", &["3", "5", "7"], 120),
    ("SeqOfColors", &["3", "5", "7"], 120),
    ("ChainOfColors", &["3", "5", "7"], 120),
    ("ShellGame", &["Touch", "Push", "Pick"], 90),
    ("Intercept", &["Slow", "Medium", "Fast"], 90),
    ("InterceptGrab", &["Slow", "Medium", "Fast"], 90),
    ("Rotate", &["LenientPos", "LenientPosNeg", "StrictPos", "StrictPosNeg"], 90),
    ("TakeItBack", &[""], 180),
];

/// Names of all tasks, with the steps of their episodes.
fn tasks() -> impl Iterator<Item = (String, usize)> {
    FAMILIES
        .iter()
        .flat_map(|(family, ends, steps)| ends.iter().map(move |end| (format!("{family}{end}"), *steps)))
}

/// Whether the paper says how ELMUR was trained on a task.
fn is_published(task: &str) -> bool {
    task.starts_with("RememberColor") || task == "TakeItBack"
}

/// The names of all presets here.
pub(crate) fn names() -> impl Iterator<Item = String> {
    let named = |task: String| {
        let compat = is_published(&task).then(|| format!("{PREFIX}{task}{COMPAT}"));
        [Some(format!("{PREFIX}{task}")), compat].into_iter().flatten()
    };
    tasks().flat_map(move |(task, _)| named(task))
}

/// The run of this name, if it is one of these. Ids may end with `-v0`.
pub(crate) fn preset(name: &str) -> Option<RunConfig> {
    let task = name.strip_prefix(PREFIX)?;
    let (task, compat) = task.strip_suffix(COMPAT).map_or((task, false), |task| (task, true));
    let task = task.strip_suffix("-v0").unwrap_or(task);
    let (task, steps) = tasks().find(|(known, _)| known == task)?;
    if !compat {
        return Some(ours(steps));
    }
    let (model, train) = match task.as_str() {
        "TakeItBack" => (models::take_it_back(), settings::take_it_back()),
        _ => (models::remember_color(), settings::remember_color()),
    };
    let run =
        RunConfig { env: None, data: demonstrations(0), model: model.into(), train, eval: validation() };
    is_published(&task).then_some(run)
}

/// Our choices for episodes of `steps` steps: a residual encoder, gradients through all segments of an episode,
/// pictures moved by a few pixels, and little weight on what an expert does after success, which is to hold still.
fn ours(steps: usize) -> RunConfig {
    let model = models::mikasa(steps);
    let train = TrainConfig {
        batch: (2048 / steps).max(8),
        batches: Some(6000),
        lr: 5e-4,
        after_success: 0.1,
        ..settings::small(&model, steps)
    };
    let mut data = demonstrations(0);
    data.shift = 4;
    let eval = EvalConfig { every: Some(200), ..validation() };
    RunConfig { env: None, data, model: model.into(), train, eval }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tasks_have_whole_runs_and_four_of_them_published_ones() {
        assert_eq!(tasks().count(), 32);
        assert_eq!(names().count(), 36);
        for name in names() {
            RunConfig::preset(&name).unwrap().validate().unwrap_or_else(|e| panic!("{name}: {e}"));
        }
        for (name, steps) in tasks() {
            assert_eq!(RunConfig::preset(&format!("mikasa-{name}")).unwrap().crop(), steps, "{name}");
        }
        let published = RunConfig::preset("mikasa-RememberColor5-compat").unwrap();
        assert_eq!(published, RunConfig::preset("remember-color").unwrap());
        let longer = RunConfig::preset("mikasa-TakeItBack-v0-compat").unwrap();
        assert_eq!(longer, RunConfig::preset("take-it-back").unwrap());
        assert_eq!((longer.crop(), longer.train.betas), (180, (0.9, 0.99)));
        for name in ["mikasa-RememberShape3-compat", "mikasa-RememberColor4"] {
            assert!(RunConfig::preset(name).unwrap_err().to_string().contains("expected one of"));
        }
    }
}
