//! The family without its simulator: names, settings, spaces, seeds, errors.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use elmur_base::Row;

use super::*;
use crate::registry::{Environment, Registry};

/// A folder that has no simulator, so that tests do not depend on where one is installed.
const NOWHERE: &str = "/nowhere/mikasa";

fn find(spec: EnvSpec) -> Result<Environment> {
    Registry::builtin().find(&spec.with("folder", NOWHERE))
}

fn color3() -> EnvSpec {
    EnvSpec::new("mikasa-RememberColor3")
}

fn message(spec: EnvSpec) -> String {
    find(spec).unwrap_err().to_string()
}

#[test]
fn the_32_tasks_are_known_with_their_lengths() {
    let names = Mikasa::default().names();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), 32);
    assert_eq!(ROBOT_TASKS.iter().map(|task| task.steps).sum::<u64>(), 2970);
    for name in &names {
        let environment = find(EnvSpec::new(name)).unwrap();
        let task = RobotTask::find(name.strip_prefix(PREFIX).unwrap()).unwrap();
        let facts = environment.facts();
        assert_eq!((environment.name(), facts.max_steps), (name.as_str(), Some(task.steps)));
        assert!(facts.metric == Metric::Success && facts.drops_failures && facts.max_rows.is_some());
    }
    assert_eq!(find(color3()).unwrap().name(), "mikasa-RememberColor3-v0");
    let near = message(EnvSpec::new("mikasa-RememberColour3"));
    assert!(near.contains("did you mean `mikasa-RememberColor3`"), "{near}");
}

#[test]
fn spaces_follow_from_settings_without_a_simulator() {
    let seen = |spec: EnvSpec| find(spec).unwrap().spaces().observation.clone();
    let cameras = |size: usize| Space::Bytes { shape: vec![6, size, size] };
    let also = |parts: &[usize]| {
        let added = parts.iter().map(|n| Space::unbounded([*n]));
        Space::Tuple { parts: [cameras(128)].into_iter().chain(added).collect() }
    };
    assert_eq!(seen(color3()), cameras(128));
    assert_eq!(seen(color3().with("size", 64)), cameras(64));
    assert_eq!(seen(color3().with("joints", true)), also(&[25]));
    assert_eq!(seen(color3().with("joints", true).with("cue", true)), also(&[25, 3]));
    assert_eq!(seen(EnvSpec::new("mikasa-RotateStrictPos").with("joints", true)), also(&[25, 1]));
    assert_eq!(seen(EnvSpec::new("mikasa-ChainOfColors7").with("cue", true)), also(&[63]));
    let facts = find(color3().with("cue", true)).unwrap().facts();
    let names: Vec<(&str, bool)> = facts.observations.iter().map(|o| (o.name, o.channels_last)).collect();
    assert_eq!(names, [("rgb", true), ("cue", false)]);
    let thinned = find(color3().with("size", 64).with("render", 128).with("levels", 16)).unwrap();
    assert_eq!(thinned.spaces().observation, cameras(64));
    assert_eq!(thinned.facts().thinning, Thinning { shrink: 2, levels: 16 });
    let make = Choice::of(thinned.spec()).unwrap().make(Purpose::Evaluate);
    assert_eq!((&make["size"], &make["render"], &make["levels"]), (&json!(64), &json!(128), &json!(16)));
    assert!(find(color3()).unwrap().facts().thinning.is_none());
    assert_eq!(find(color3()).unwrap().spaces().action, Space::between(-1.0, 1.0, [8]));
}

#[test]
fn settings_are_checked_and_only_some_tasks_have_blank_steps() {
    for (key, value, expected) in [
        ("size", json!(8), "16 to 512"),
        ("render", json!(200), "a multiple of `size` up to 512, or null"),
        ("render", json!(64), "a multiple of `size` up to 512, or null"),
        ("levels", json!(1), "2 to 256"),
        ("reward", json!("sparse"), "success or dense"),
        ("tail", json!(61), "0 to 60, or null"),
        ("head", json!(0), "1 or more, or null"),
        ("action_noise", json!(2.0), "0 to 1"),
        ("blank_steps", json!(1_000_000), "0 to 100000"),
        ("workers", json!(0), "1 to 256"),
        ("restarts", json!(5000), "0 to 1000"),
        ("timeout", json!(0), "0.001 to 1000000 seconds"),
    ] {
        let error = message(color3().with(key, value));
        assert!(error.contains(key) && error.contains(expected), "{error}");
    }
    let error = message(color3().with("head", 14));
    assert!(error.contains("keep_failures") && error.contains("true where `head` is set"), "{error}");
    assert_eq!(find(color3().with("blank_steps", 105)).unwrap().facts().max_steps, Some(160));
    assert!(find(color3().with("blank_steps", 105).with("tail", 160)).is_ok());
    assert!(
        message(EnvSpec::new("mikasa-TakeItBack").with("blank_steps", 9)).contains("one of the settings")
    );
}

#[test]
fn without_the_simulator_errors_name_the_command_that_installs_it() {
    let environment = find(color3()).unwrap();
    let mut env = environment.make(Purpose::Evaluate).unwrap();
    let mut seen = Row::of(&environment.spaces().observation);
    let errors = [
        environment.available().unwrap_err().to_string(),
        environment.played().err().unwrap().to_string(),
        env.reset(0, seen.as_mut()).unwrap_err().to_string(),
    ];
    for error in errors {
        assert!(error.contains("elmur simulators install mikasa DIR"), "{error}");
        assert!(error.contains(NOWHERE) && error.contains("mikasa-RememberColor3-v0"), "{error}");
    }
}

#[test]
fn demonstrations_are_cut_and_disturbed_but_evaluations_are_not() {
    let spec = find(color3().with("tail", 5).with("action_noise", 0.1).with("joints", true)).unwrap();
    let choice = Choice::of(spec.spec()).unwrap();
    let collect = choice.make(Purpose::Collect);
    assert_eq!((&collect["tail"], &collect["action_noise"]), (&json!(5), &json!(0.1)));
    let evaluate = choice.make(Purpose::Evaluate);
    assert_eq!((evaluate.get("tail"), evaluate.get("action_noise")), (None, None));
    assert_eq!((collect.get("expert"), &evaluate["expert"]), (None, &json!(false)));
    let ends = find(spec.spec().clone().with("end_at_success", true)).unwrap();
    let ends = Choice::of(ends.spec()).unwrap();
    assert_eq!(ends.make(Purpose::Evaluate)["tail"], json!(0));
    assert_eq!(ends.make(Purpose::Collect), collect);
    for (head, steps) in [(14, 14), (100, 60)] {
        let short = find(spec.spec().clone().with("head", head).with("keep_failures", true)).unwrap();
        assert_eq!(short.facts().max_steps, Some(60));
        let short = Choice::of(short.spec()).unwrap();
        assert_eq!(short.make(Purpose::Collect)["max_steps"], json!(steps));
        assert_eq!(short.make(Purpose::Evaluate), evaluate);
    }
    for make in [collect, evaluate] {
        assert_eq!((&make["task"], &make["max_steps"]), (&json!("RememberColor3-v0"), &json!(60)));
        assert_eq!(make["observation"], json!(["rgb", "joints"]));
    }
}

#[test]
fn seeds_are_those_of_the_published_split_and_never_meet() {
    let validation = |i: u64| simulator_seed((1 << 62) + i);
    let test = |run: u64, i: u64| simulator_seed((1 << 63) + (run << 24) + i);
    assert_eq!([simulator_seed(0), simulator_seed(9_999)], [0, 9_999]);
    assert_eq!([validation(0), validation(99)], [10_000, 10_099]);
    assert_eq!([test(0, 0), test(0, 99), test(2, 7)], [20_000, 20_099, 22_007]);
    let collections =
        [0u64, 1, 9].into_iter().flat_map(|c| (0..20_000).map(move |i| simulator_seed((c << 32) + i)));
    let training: BTreeSet<u64> = collections.collect();
    assert_eq!(training.len(), 60_000);
    let checks: BTreeSet<u64> = (0..20_000).map(validation).collect();
    let tests: BTreeSet<u64> =
        [0, 1, 999, 1000].into_iter().flat_map(|run| (0..2_000).map(move |i| test(run, i))).collect();
    assert_eq!((checks.len(), tests.len()), (20_000, 8_000));
    assert!(training.is_disjoint(&checks) && training.is_disjoint(&tests) && checks.is_disjoint(&tests));
    assert!(training.iter().chain(&checks).chain(&tests).all(|seed| *seed < 1 << 31));
}

#[test]
fn a_worker_is_given_its_script_and_its_modules() {
    let whole = find(color3()).unwrap();
    let workers = Mikasa::default().workers(whole.spec(), Purpose::Evaluate).unwrap();
    let arguments = &workers.task().launch.arguments;
    let starts = ["-c", "\"\"\"One MIKASA-Robo", "mikasa_env=\"\"\"MIKASA-Robo", "oracle=\"\"\"Scripted"];
    assert_eq!(arguments.len(), 4);
    for (argument, start) in arguments.iter().zip(starts) {
        assert!(argument.to_string_lossy().starts_with(start), "{start}");
        // Linux takes at most 128 KiB for one argument.
        assert!(argument.len() < 100 << 10, "{start}");
    }
}
