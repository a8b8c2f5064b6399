//! Locks of stores, and the order in which a program takes those of the stores it uses.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Guards the tensors of one store: programs that change any of them hold it for writing while they run,
/// other readers hold it for reading.
#[derive(Debug, Default)]
pub(crate) struct StoreLock {
    lock: RwLock<()>,
    /// How often it was taken for writing.
    writes: AtomicU64,
}

/// Keeps others from writing a store, or from using it at all.
pub(crate) enum StoreGuard<'a> {
    Read { _guard: RwLockReadGuard<'a, ()> },
    Write { _guard: RwLockWriteGuard<'a, ()> },
}

impl StoreLock {
    /// Waits until nobody writes the store, and excludes writers.
    pub fn read(&self) -> StoreGuard<'_> {
        StoreGuard::Read { _guard: self.lock.read().unwrap_or_else(PoisonError::into_inner) }
    }

    /// Waits until nobody uses the store, and excludes everybody else.
    pub fn write(&self) -> StoreGuard<'_> {
        let _guard = self.lock.write().unwrap_or_else(PoisonError::into_inner);
        self.writes.fetch_add(1, Ordering::Relaxed);
        StoreGuard::Write { _guard }
    }

    /// A number that is another one whenever somebody may have written the store. Who holds the lock for reading sees
    /// all writes before.
    pub fn writes(&self) -> u64 {
        self.writes.load(Ordering::Relaxed)
    }
}

/// Most stores that one program can be bound to.
pub(crate) const MAX_STORES: usize = 8;

/// A store that a program uses, and whether the program changes anything there.
pub(crate) struct StoreUse {
    pub lock: Arc<StoreLock>,
    pub writes: bool,
}

/// All stores that a program uses; at most [`MAX_STORES`].
pub(crate) struct StoreUses(Vec<StoreUse>);

impl StoreUses {
    /// Orders the uses, so that two programs never wait for each other, and joins uses of the same store.
    pub fn new(mut uses: Vec<StoreUse>) -> Self {
        uses.sort_by_key(|u| (Arc::as_ptr(&u.lock).addr(), !u.writes));
        uses.dedup_by(|b, a| Arc::ptr_eq(&a.lock, &b.lock));
        Self(uses)
    }

    /// Calls `f` while all locks are held. Allocates nothing.
    pub fn while_locked<R>(&self, f: impl FnOnce() -> R) -> R {
        let mut guards: [Option<StoreGuard<'_>>; MAX_STORES] = [const { None }; MAX_STORES];
        for (guard, used) in guards.iter_mut().zip(&self.0) {
            *guard = Some(if used.writes { used.lock.write() } else { used.lock.read() });
        }
        f()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_used_twice_is_locked_once_and_for_writing_if_either_writes() {
        let [a, b] = [Arc::<StoreLock>::default(), Arc::default()];
        let used = |lock: &Arc<StoreLock>, writes| StoreUse { lock: Arc::clone(lock), writes };
        let uses = StoreUses::new(vec![used(&a, false), used(&b, false), used(&a, true)]);
        uses.while_locked(|| {
            assert!(a.lock.try_read().is_err());
            assert!(b.lock.try_read().is_ok() && b.lock.try_write().is_err());
        });
        assert!(a.lock.try_write().is_ok() && b.lock.try_write().is_ok());
    }
}
