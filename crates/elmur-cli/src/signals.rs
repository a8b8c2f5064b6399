//! Signals that ask a command to save and end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use elmur_base::Stop;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

/// Ctrl-C, a terminal that goes away, and what schedulers send before they kill.
const SIGNALS: [(i32, &str); 4] =
    [(SIGINT, "SIGINT"), (SIGTERM, "SIGTERM"), (SIGHUP, "SIGHUP"), (SIGUSR1, "SIGUSR1")];

/// The first signal asks to stop; another, a second or more later, ends the program at once. (Some
/// supervisors signal a process and its group; signals within a second count as one.)
///
/// SIGHUP and SIGINT stay ignored where they were when the program began: under `nohup`, and in the
/// background of a script.
pub fn listen(stop: &Stop) -> std::io::Result<()> {
    let first = Arc::new(AtomicU64::new(0));
    let start = Instant::now();
    let ignored = std::fs::read_to_string("/proc/self/status").map_or(0, |status| ignored_in(&status));
    for (signal, _) in SIGNALS {
        if matches!(signal, SIGHUP | SIGINT) && ignored >> (signal - 1) & 1 == 1 {
            continue;
        }
        let (first, stop) = (first.clone(), stop.clone());
        let hear = move || {
            let now = start.elapsed().as_millis() as u64 + 1;
            match first.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed) {
                Err(first) if now >= first + 1000 => signal_hook::low_level::exit(128 + signal),
                _ => stop.request(signal as usize),
            }
        };
        // SAFETY: the handler reads a clock, writes atomics and exits without unwinding: all allowed in a
        // signal handler.
        unsafe { signal_hook::low_level::register(signal, hear)? };
    }
    Ok(())
}

/// The signals that a process ignores, by its status as Linux tells it: bit n - 1 is signal n. None are known
/// where the status has no such line.
fn ignored_in(status: &str) -> u64 {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Lets signals end the program at once as long as the guard lives: for work that may take long and that
/// nobody would miss, such as checking a large file.
pub struct EndAtOnce(Arc<AtomicBool>);

impl EndAtOnce {
    /// Begins to watch.
    pub fn new(stop: &Stop) -> Self {
        let (alive, stop) = (Arc::new(AtomicBool::new(true)), stop.clone());
        let watched = Arc::clone(&alive);
        let wait = move || {
            while watched.load(Ordering::Acquire) {
                if stop.requested() {
                    // The work may end by itself meanwhile, and in better order.
                    std::thread::sleep(Duration::from_millis(300));
                    if watched.load(Ordering::Acquire) {
                        crate::report("error: stopped");
                        std::process::exit(128 + stop.signal() as i32);
                    }
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        };
        let _ = std::thread::Builder::new().name("elmur-signals".to_owned()).spawn(wait);
        Self(alive)
    }
}

impl Drop for EndAtOnce {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Asks to stop, as SIGTERM does, as soon as the process that started this one has ended: a worker that was
/// killed leaves nobody behind who computes.
#[cfg(unix)]
pub fn stop_with_parent(stop: &Stop) {
    let (parent, stop) = (std::os::unix::process::parent_id(), stop.clone());
    let wait = move || {
        // A process whose parent has ended is given to another.
        while std::os::unix::process::parent_id() == parent {
            std::thread::sleep(Duration::from_millis(200));
        }
        stop.request(SIGTERM as usize);
    };
    let _ = std::thread::Builder::new().name("elmur-parent".to_owned()).spawn(wait);
}

/// Elsewhere processes do not know what became of the one that started them.
#[cfg(not(unix))]
pub fn stop_with_parent(_: &Stop) {}

/// Says that a signal was heard as soon as it was, since what it interrupts may take a while to save.
pub fn acknowledge(stop: &Stop) {
    let stop = stop.clone();
    let wait = move || {
        while !stop.requested() {
            std::thread::sleep(Duration::from_millis(100));
        }
        let name = SIGNALS.iter().find(|(signal, _)| *signal as usize == stop.signal());
        crate::note(&format!(
            "{}: saving after the current step; a second signal ends at once",
            name.map_or("stop", |n| n.1)
        ));
    };
    // Where no thread can be had, the signal is heard all the same.
    let _ = std::thread::Builder::new().name("elmur-signals".to_owned()).spawn(wait);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_status_of_a_process() {
        let status = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001003\nSigCgt:\t0000000000000440\n";
        let ignored = |signal: i32| ignored_in(status) >> (signal - 1) & 1 == 1;
        assert!(ignored(SIGHUP) && ignored(SIGINT) && !ignored(SIGTERM));
        assert_eq!((ignored_in(""), ignored_in("SigIgn:\tx")), (0, 0));
    }
}
