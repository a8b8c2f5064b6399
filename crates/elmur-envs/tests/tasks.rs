//! All 48 POPGym tasks through the public interface.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

use elmur_base::{Leaf, Row, Space, Values};
use elmur_envs::popgym::trace::Trace;
use elmur_envs::popgym::{Difficulty, Family, Task, Version};
use elmur_envs::{Encoding, Env, EnvSpec, Purpose, Registry, Wrappers};
use elmur_pool::Pool;
use elmur_rng::Rng;

/// A random value of an action space.
fn draw(space: &Space, rng: &mut Rng, action: &mut Row) {
    let (mut floats, mut ints) = (action.floats.iter_mut(), action.ints.iter_mut());
    for leaf in space.leaves() {
        match leaf {
            Leaf::Ints(sizes) => {
                sizes.iter().zip(&mut ints).for_each(|(n, i)| *i = rng.below(*n as u32) as i32)
            }
            Leaf::Floats { .. } => floats.by_ref().for_each(|x| *x = rng.uniform(-2.5, 2.5) as f32),
            Leaf::Bytes { .. } => {}
        }
    }
}

#[test]
fn every_trace_of_the_python_package_replays() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for (folder, version, expected) in [("popgym", Version::V107, 48), ("popgym-1.0.6", Version::V106, 6)] {
        let mut count = 0;
        for entry in std::fs::read_dir(tests.join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let trace = Trace::read(&path).unwrap();
            assert_eq!(trace.version(), version);
            let report = trace.verify().unwrap();
            assert!(report.exact() && report.episodes == 4, "{}: {report:?}", path.display());
            count += 1;
        }
        assert_eq!(count, expected);
    }
}

#[test]
fn wrapped_observations_are_as_wide_as_the_papers() {
    let widths = |family| match family {
        Family::Autoencode => [12; 3],
        Family::Battleship => [20, 24, 28],
        Family::Concentration => [210, 418, 782],
        Family::CountRecall => [33, 37, 45],
        Family::HigherLower => [17; 3],
        Family::LabyrinthEscape | Family::LabyrinthExplore => [56; 3],
        Family::MineSweeper => [13, 21, 28],
        Family::MultiarmedBandit => [14, 24, 34],
        Family::NoisyPositionOnlyCartPole | Family::PositionOnlyCartPole | Family::VelocityOnlyCartpole => {
            [6; 3]
        }
        Family::NoisyPositionOnlyPendulum | Family::PositionOnlyPendulum => [5; 3],
        Family::RepeatFirst | Family::RepeatPrevious => [10; 3],
    };
    let wrappers = Wrappers {
        previous_action: true,
        first_step: true,
        encoding: Encoding::OneHot,
        ..Wrappers::default()
    };
    for task in Task::all() {
        let env = Registry::builtin()
            .find(&EnvSpec::new(task.id()).with_wrappers(wrappers))
            .unwrap()
            .make(Purpose::Evaluate)
            .unwrap();
        let width = widths(task.family)[task.difficulty as usize];
        assert_eq!(env.spaces().observation.widths().floats, width, "{}", task.id());
    }
}

#[test]
fn episodes_end_in_time_and_stay_within_their_spaces() {
    for version in [Version::V107, Version::V106] {
        for task in Task::all() {
            let mut env = task.make(version);
            let spaces = env.spaces().clone();
            spaces.validate().unwrap();
            let (mut seen, mut action) = (Row::of(&spaces.observation), Row::of(&spaces.action));
            assert!(env.step(action.values(), seen.as_mut()).is_err(), "{}: a step before reset", task.id());
            for seed in 0..3 {
                let mut rng = Rng::new(seed, 9);
                env.reset(seed, seen.as_mut()).unwrap();
                // One step more by the older rules of MineSweeper.
                let most = task.max_steps() + usize::from(version == Version::V106);
                let mut steps = 0;
                loop {
                    spaces.observation.check("observation", seen.values()).unwrap();
                    draw(&spaces.action, &mut rng, &mut action);
                    steps += 1;
                    let step = env.step(action.values(), seen.as_mut()).unwrap();
                    assert!(step.reward.is_finite() && steps <= most, "{}", task.id());
                    if step.done() {
                        break;
                    }
                }
                assert!(
                    env.step(action.values(), seen.as_mut()).is_err(),
                    "{}: a step after the end",
                    task.id()
                );
            }
        }
    }
}

/// Players of expensive tasks are measured beside them; here each plays a little by both rules, and in all
/// difficulties.
#[test]
fn players_give_legal_actions_and_the_same_ones_again() {
    for version in [Version::V107, Version::V106] {
        for task in Task::all() {
            let play = |env: &mut dyn Env, seed| {
                let mut player = task.player(version);
                let spaces = env.spaces().clone();
                let (mut seen, mut action) = (Row::of(&spaces.observation), Row::of(&spaces.action));
                env.reset(seed, seen.as_mut()).unwrap();
                player.reset();
                let mut actions = Vec::new();
                loop {
                    player.act(seen.values(), action.as_mut());
                    actions.push(action.clone());
                    if env.step(action.values(), seen.as_mut()).unwrap().done() {
                        return actions;
                    }
                }
            };
            let mut env = task.make(version);
            let first = play(&mut *env, 7);
            if task.difficulty == Difficulty::Easy {
                assert!(first == play(&mut *env, 7), "{}", task.id());
            }
        }
    }
}

#[test]
fn rows_are_the_same_on_any_number_of_threads() {
    const ROWS: usize = 300;
    for task in Task::all().filter(|task| task.difficulty == Difficulty::Easy) {
        let play = |threads| {
            let mut env = task.make_rows(Version::default(), ROWS, &Pool::new(threads)).unwrap();
            env.reset(&(0..ROWS as u64).collect::<Vec<_>>()).unwrap();
            let space = env.spaces().action.clone();
            let mut rng = Rng::new(1, 1);
            let mut one = Row::of(&space);
            let mut history = Vec::new();
            for _ in 0..60 {
                let (mut floats, mut ints) = (Vec::new(), Vec::new());
                for _ in 0..ROWS {
                    draw(&space, &mut rng, &mut one);
                    floats.extend_from_slice(&one.floats);
                    ints.extend_from_slice(&one.ints);
                }
                let step = env.step(Values { floats: &floats, ints: &ints, bytes: &[] }).unwrap().clone();
                let seen = env.observations();
                history.push((
                    step,
                    seen.ints.to_vec(),
                    seen.floats.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                ));
            }
            history
        };
        assert!(play(1) == play(3), "{}", task.id());
    }
}
