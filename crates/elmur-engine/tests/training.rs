//! Whole training programs: they learn, allocate nothing, and give the same bits on any number of threads.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use elmur_engine::{DType, Pool, Program, Store};

/// Counts every allocation of the process.
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

/// One test, because the counter sees all threads of the process: others would disturb it.
#[test]
fn training_allocates_nothing_and_its_bits_do_not_depend_on_threads() {
    let graph = common::policy(DType::F32).unwrap();
    let mut reference: Option<Vec<(String, Vec<u32>)>> = None;
    for threads in [1, 2, 3, 7] {
        let store = Store::new();
        common::fill(&graph, &store).unwrap();
        let mut program = Program::new(&graph, &Pool::new(threads), &[&store]).unwrap();
        common::feed(&mut program).unwrap();
        program.run().unwrap();
        let first = program.get::<f32>("loss").unwrap()[0];

        let before = ALLOCATIONS.load(Ordering::SeqCst);
        for _ in 0..5 {
            program.run().unwrap();
        }
        let after = ALLOCATIONS.load(Ordering::SeqCst);
        assert_eq!(after - before, 0, "allocations in five runs with {threads} threads");

        for _ in 0..60 {
            program.run().unwrap();
        }
        let last = program.get::<f32>("loss").unwrap()[0];
        assert!(last < 0.8 * first, "loss {first} -> {last}: did not learn");

        let mut bits: Vec<(String, Vec<u32>)> = Vec::new();
        for name in store.names() {
            if store.ty(&name).unwrap().dtype == DType::F32 {
                let data = store.get::<f32>(&name).unwrap();
                bits.push((name, data.into_iter().map(f32::to_bits).collect()));
            }
        }
        bits.push((
            "logits".into(),
            program.get::<f32>("logits").unwrap().iter().map(|x| x.to_bits()).collect(),
        ));
        match &reference {
            None => reference = Some(bits),
            Some(reference) => {
                for (a, b) in reference.iter().zip(&bits) {
                    assert!(a == b, "{} differs between 1 and {threads} threads", a.0);
                }
            }
        }
        assert_eq!(store.get::<i64>("rng").unwrap(), [77, 66]);
        assert_eq!(store.get::<i64>("adamw.step").unwrap(), [66]);
    }
}
