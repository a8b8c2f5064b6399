//! Stepping and resetting rows allocates nothing.

#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use elmur_base::{Row, Values};
use elmur_envs::popgym::{Difficulty, Task, Version};
use elmur_envs::{Autoreset, EnvSpec, Purpose, Registry, VecEnv, Wrappers};
use elmur_pool::Pool;

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as our caller promises.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as our caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Of three tries, since the test harness allocates now and then too.
fn least_allocations(work: &mut dyn FnMut()) -> usize {
    let mut count = || {
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        work();
        ALLOCATIONS.load(Ordering::Relaxed) - before
    };
    (0..3).map(|_| count()).min().unwrap()
}

#[test]
fn rows_step_and_reset_without_allocation() {
    const ROWS: usize = 512;
    let seeds: Vec<u64> = (0..ROWS as u64).collect();
    for pool in [Pool::new(1), Pool::new(2)] {
        for task in Task::all().filter(|task| task.difficulty == Difficulty::Easy) {
            let mut env = task.make_rows(Version::default(), ROWS, &pool).unwrap();
            env.reset(&seeds).unwrap();
            let one = Row::of(&env.spaces().action);
            let (floats, ints) = (vec![0.5; ROWS * one.floats.len()], vec![1; ROWS * one.ints.len()]);
            let actions = Values { floats: &floats, ints: &ints, bytes: &[] };
            (0..60).for_each(|_| assert!(env.step(actions).is_ok()));
            let least = least_allocations(&mut || (0..150).for_each(|_| assert!(env.step(actions).is_ok())));
            assert_eq!(least, 0, "{}", task.id());
        }
    }
    // Some of the rows, on one thread and on several, by every convention for episodes that end.
    let lists = [1, 100, 300, ROWS].map(|size| (0..size).rev().collect::<Vec<usize>>());
    for pool in [Pool::new(1), Pool::new(2)] {
        for autoreset in [Autoreset::SameStep, Autoreset::NextStep, Autoreset::Disabled] {
            let mut env = Task::find("popgym-RepeatFirstEasy")
                .unwrap()
                .make_rows(Version::default(), ROWS, &pool)
                .unwrap();
            env.set_autoreset(autoreset);
            env.reset(&seeds).unwrap();
            let ints = vec![1; ROWS];
            let all: Vec<(usize, u64)> = (0..ROWS).zip(0..).collect();
            // Episodes have 51 steps, and nobody may step beyond an end without autoreset.
            let turns = if autoreset == Autoreset::Disabled { 12 } else { 30 };
            let mut rounds = |count: usize| {
                for _ in 0..count {
                    env.reset_rows(&all).unwrap();
                    for list in (0..turns).flat_map(|_| &lists) {
                        assert!(env.step_rows(list, Values::ints(&ints[..list.len()])).is_ok());
                    }
                }
            };
            rounds(2);
            assert_eq!(least_allocations(&mut || rounds(3)), 0, "{autoreset:?}");
        }
    }
    // Behind wrappers.
    let wrappers = Wrappers::named(&["previous_action", "first_step", "one_hot", "flat_action"]).unwrap();
    let spec = EnvSpec::new("popgym-BattleshipEasy").with_wrappers(wrappers);
    let env = Registry::builtin().find(&spec).unwrap().make(Purpose::Evaluate).unwrap();
    let mut env = VecEnv::new(vec![env]).unwrap();
    env.reset(&[0]).unwrap();
    let action = Values::ints(&[9]);
    assert_eq!(least_allocations(&mut || (0..200).for_each(|_| assert!(env.step(action).is_ok()))), 0);
}
