//! Stepping allocates nothing, resets included.

#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use elmur_base::{Row, Values};
use elmur_envs::popgym::{Difficulty, Task, Version};
use elmur_envs::{EnvConfig, VecEnv, Wrappers};
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
    // Behind wrappers.
    let wrappers = Wrappers::named(&["previous_action", "first_step", "one_hot", "flat_action"]).unwrap();
    let task = Task::find("popgym-BattleshipEasy").unwrap();
    let config = EnvConfig { wrappers, ..EnvConfig::popgym(task) };
    let mut env = VecEnv::new(vec![config.evaluation().unwrap()]).unwrap();
    env.reset(&[0]).unwrap();
    let action = Values::ints(&[9]);
    assert_eq!(least_allocations(&mut || (0..200).for_each(|_| assert!(env.step(action).is_ok()))), 0);
}
