//! Files changed at random, thousands of times: errors or other numbers, never a panic, and never much more
//! memory than the file has bytes.

#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use elmur_base::Values;
use elmur_engine::Pool;
use elmur_engine::rng::Rng;
use elmur_model::session::Session;
use elmur_model::{Checkpoint, PolicyConfig, Snapshot, init, tensors};

struct Watching;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::SeqCst) + layout.size();
        MOST.fetch_max(live, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// One change of a file: flipped bits, a cut, a part moved elsewhere, a number or a digit replaced.
fn mutate(bytes: &mut Vec<u8>, random: &mut impl FnMut(usize) -> usize) {
    let len = bytes.len();
    if len < 16 {
        return;
    }
    match random(6) {
        0 => (0..=random(4)).for_each(|_| bytes[random(len)] ^= 1 << random(8)),
        1 => bytes.truncate(random(len)),
        2 => {
            let (from, to, count) = (random(len), random(len), random(64));
            let part = bytes[from..(from + count).min(len)].to_vec();
            bytes.splice(to..to, part);
        }
        3 => {
            let number = 1u64 << random(64);
            let at = if random(2) == 0 { 0 } else { random(len - 8) };
            bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        4 => {
            let from = random(len);
            bytes.drain(from..(from + random(32)).min(len));
        }
        // A digit of the header becomes another, or several.
        _ => {
            let digits: Vec<usize> = (8..len.min(3000)).filter(|i| bytes[*i].is_ascii_digit()).collect();
            if let Some(at) = digits.get(random(digits.len().max(1))) {
                let new: Vec<u8> = (0..=random(12)).map(|_| b'0' + random(10) as u8).collect();
                bytes.splice(*at..=*at, new);
            }
        }
    }
}

/// The file without its checksum, as earlier versions wrote it: mutations of it come further.
fn without_checksum(bytes: &[u8], note: &str) -> Vec<u8> {
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let (_, notes) = tensors::parse_own(bytes).unwrap();
    header["__metadata__"] = serde_json::json!({ note: notes[note] });
    let header = header.to_string();
    let mut earlier = (header.len() as u64).to_le_bytes().to_vec();
    earlier.extend_from_slice(header.as_bytes());
    earlier.extend_from_slice(&bytes[8 + length..]);
    earlier
}

/// Many mutations of a file; how many of them were believed.
fn try_mutations(bytes: &[u8], count: u64, mut accepts: impl FnMut(&[u8]) -> bool) -> usize {
    let mut rng = Rng::new(bytes.len() as u64, 3);
    let mut random = |below: usize| rng.below(below as u32) as usize;
    let mut believed = 0;
    for _ in 0..count {
        let mut damaged = bytes.to_vec();
        (0..=random(2)).for_each(|_| mutate(&mut damaged, &mut random));
        let before = LIVE.load(Ordering::SeqCst);
        MOST.store(before, Ordering::SeqCst);
        believed += usize::from(accepts(&damaged));
        let taken = MOST.load(Ordering::SeqCst) - before;
        assert!(taken < 16 * bytes.len() + (1 << 20), "{taken} bytes for a file of {}", damaged.len());
    }
    believed
}

/// One test, because the counter sees all threads of the process.
#[test]
fn mutated_files_never_panic_and_never_take_much_memory() {
    let mut config = common::small();
    (config.d_model, config.layers) = (4, 1);
    let params = init::parameters(&config, 1).unwrap();
    let checkpoint = Checkpoint { config: PolicyConfig::from(config.clone()), params };
    let mut session = Session::new(&config, &checkpoint.params, 2, &Pool::new(1)).unwrap();
    session.act(Values::floats(&[0.5; 6])).unwrap();

    let file = checkpoint.to_bytes().unwrap();
    let unchanged = |bytes: &[u8]| bytes == file;
    let read = |bytes: &[u8]| Checkpoint::from_bytes(bytes).is_ok() && !unchanged(bytes);
    assert_eq!(try_mutations(&file, 10_000, read), 0, "a checksum believes nothing");
    let earlier = without_checksum(&file, "config");
    assert!(Checkpoint::from_bytes(&earlier).is_ok());
    try_mutations(&earlier, 10_000, |bytes| Checkpoint::from_bytes(bytes).is_ok());

    let file = session.snapshot(&[0, 1]).unwrap().to_bytes().unwrap();
    let earlier = without_checksum(&file, "time_states");
    let mut restore = |bytes: &[u8]| {
        Snapshot::from_bytes(bytes).is_ok_and(|snapshot| session.restore(&[0, 1], &snapshot).is_ok())
    };
    assert!(restore(&file) && restore(&earlier));
    assert_eq!(try_mutations(&file, 10_000, |bytes| bytes != file && restore(bytes)), 0);
    try_mutations(&earlier, 10_000, restore);
}
