//! A request to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A request to stop, shared between threads and signal handlers: the number of the signal, 0 for none.
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicUsize>);

impl Stop {
    /// Asks to stop because of this signal.
    pub fn request(&self, signal: usize) {
        self.0.store(signal, Ordering::Relaxed);
    }

    /// Whether a stop was requested.
    pub fn requested(&self) -> bool {
        self.signal() != 0
    }

    /// The signal that requested the stop, or 0.
    pub fn signal(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}
