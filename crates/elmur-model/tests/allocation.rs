//! Acting allocates nothing after warm-up.

#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use elmur_base::{Values, ValuesMut};
use elmur_engine::Pool;
use elmur_model::ends::TokenFormat;
use elmur_model::session::{Choose, Seen, Session};
use elmur_model::{Elmur, PolicyConfig, init, presets};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One test, because the counter sees all threads of the process.
#[test]
fn acting_allocates_nothing_after_warm_up() {
    let elmur = presets::model("tmaze").unwrap().elmur("test").unwrap().clone();
    let dmamba = presets::dmamba(elmur.observation.clone(), elmur.action.clone(), 10);
    let formats =
        [TokenFormat::Observation, TokenFormat::ReturnObservationAction, TokenFormat::ObservationReturn];
    let elmurs = formats.map(|tokens| PolicyConfig::from(Elmur { tokens, ..elmur.clone() }));
    for config in elmurs.into_iter().chain([PolicyConfig::DMamba(dmamba)]) {
        let params = init::parameters(config.architecture(), 0).unwrap();
        for (batch, threads) in [(1, 1), (20, 2)] {
            let mut session = Session::new(&config, &params, batch, &Pool::new(threads)).unwrap();
            let observation = vec![0.25f32; 4 * batch];
            let returns = vec![1.0f32; batch];
            // All rows, and in every other step some of them besides.
            let some: Vec<usize> = (0..batch).rev().take(7).collect();
            let mut actions = vec![0; some.len()];
            let mut act = |steps: usize| {
                for t in 0..steps {
                    let observation = Values::floats(&observation);
                    session.act(Seen { observation, returns: Some(&returns) }).unwrap();
                    if t % 2 == 0 {
                        let observation = Values::floats(&observation.floats[..4 * some.len()]);
                        let seen = Seen { observation, returns: Some(&returns[..some.len()]) };
                        let actions = ValuesMut::ints(&mut actions);
                        session.select_action(&some, seen, Choose::Sample, actions).unwrap();
                    }
                }
            };
            act(31); // whole segments, their writes and a step
            let before = ALLOCATIONS.load(Ordering::SeqCst);
            act(45);
            let count = ALLOCATIONS.load(Ordering::SeqCst) - before;
            assert_eq!(count, 0, "{config:?}, batch {batch}, {threads} threads");
        }
    }
}
