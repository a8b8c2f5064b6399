//! A thread pool for kernels of 10 to 1000 microseconds.
//!
//! Idle workers spin for some tens of microseconds before they sleep, because the next kernel of a program
//! usually follows at once; handing out work then costs about a microsecond and never allocates. A worker
//! that the system does not let run in time is not waited for: those that are there take all tasks. Kernels
//! are written so that no bit of a result depends on which thread runs which task, so when the pool is busy
//! with another caller the work simply runs on the calling thread.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::thread::{JoinHandle, Thread};

/// A task: called with (task number, thread number).
type Task<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// Spins before a worker goes to sleep: roughly 50 microseconds.
const SPINS: u32 = 2_000;

/// Mark of a job that no worker may enter.
const CLOSED: usize = 1 << (usize::BITS - 1);

struct Job {
    /// The task with its lifetime erased; valid while the job is open or a worker is inside.
    task: Task<'static>,
    count: usize,
}

struct Shared {
    job: std::cell::UnsafeCell<Option<Job>>,
    /// Incremented for every job; workers wait for it to change.
    epoch: AtomicU32,
    /// The next task to take.
    next: AtomicUsize,
    /// Workers inside the current job, plus [`CLOSED`] when none may enter any more.
    inside: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleeping: AtomicUsize,
    /// Workers that have begun.
    started: AtomicUsize,
}

// SAFETY: `job` is written only by the caller holding `Pool::gate`, while the last job is closed and no
// worker is inside, and read by workers only after they have entered (`inside`, release/acquire).
unsafe impl Sync for Shared {}
// SAFETY: the task reference inside is `Sync`, everything else is atomics.
unsafe impl Send for Shared {}

/// Threads that run the tasks of one kernel after another. Cloning is cheap and shares the threads.
#[derive(Clone)]
pub struct Pool(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    gate: Mutex<()>,
    wake: Vec<Thread>,
    workers: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads)", self.threads())
    }
}

/// Most threads of a pool.
pub const MAX_THREADS: usize = 1024;

/// Number of threads that this process should use when nobody says otherwise: the cores it may run on
/// (affinity and control groups included), and no more than a scheduler or the user has granted through
/// `SLURM_CPUS_PER_TASK` or `OMP_NUM_THREADS`.
pub fn granted_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let granted = ["SLURM_CPUS_PER_TASK", "OMP_NUM_THREADS"].map(|name| std::env::var(name).ok());
    granted_of(cores, granted.iter().flatten())
}

fn granted_of<'a>(cores: usize, limits: impl Iterator<Item = &'a String>) -> usize {
    // OMP_NUM_THREADS may list one number per level of nesting; the first is meant.
    let limit = |text: &'a String| text.split(',').next()?.trim().parse::<usize>().ok().filter(|n| *n > 0);
    limits.filter_map(limit).fold(cores, usize::min).clamp(1, MAX_THREADS)
}

impl Pool {
    /// A pool of `threads` threads including the caller's, [`MAX_THREADS`] at most; 0 means
    /// [`granted_threads`]. Threads that the system refuses to start are done without.
    pub fn new(threads: usize) -> Self {
        let threads = match threads {
            0 => granted_threads(),
            n => n.min(MAX_THREADS),
        };
        let shared = Arc::new(Shared {
            job: std::cell::UnsafeCell::new(None),
            epoch: AtomicU32::new(0),
            next: AtomicUsize::new(0),
            inside: AtomicUsize::new(CLOSED),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleeping: AtomicUsize::new(0),
            started: AtomicUsize::new(0),
        });
        let workers: Vec<JoinHandle<()>> = (1..threads)
            .map_while(|thread| {
                let shared = Arc::clone(&shared);
                let builder = std::thread::Builder::new().name(format!("elmur-{thread}"));
                builder.spawn(move || work(&shared, thread)).ok()
            })
            .collect();
        // What a thread allocates when it begins is not to be seen later.
        while shared.started.load(Ordering::Acquire) < workers.len() {
            std::thread::yield_now();
        }
        let wake = workers.iter().map(|w| w.thread().clone()).collect();
        Pool(Arc::new(Inner { shared, gate: Mutex::new(()), wake, workers }))
    }

    /// A pool without workers, for products inside a task.
    pub fn serial() -> &'static Pool {
        static SERIAL: std::sync::OnceLock<Pool> = std::sync::OnceLock::new();
        SERIAL.get_or_init(|| Pool::new(1))
    }

    /// Number of threads that take part, the caller included.
    pub fn threads(&self) -> usize {
        self.0.workers.len() + 1
    }

    /// Runs `task(i, thread)` for every `i < count`, in any order, on any thread; returns when all are done.
    pub fn run(&self, count: usize, task: impl Fn(usize, usize) + Sync) {
        let inner = &*self.0;
        if count <= 1 || inner.workers.is_empty() {
            return (0..count).for_each(|i| task(i, 0));
        }
        let _gate = match inner.gate.try_lock() {
            Ok(gate) => gate,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..count).for_each(|i| task(i, 0)),
        };
        let shared = &*inner.shared;
        let task: Task<'_> = &task;
        // SAFETY: only the lifetime changes; this function closes the job and waits for every worker inside
        // before it returns or unwinds.
        let task = unsafe { std::mem::transmute::<Task<'_>, Task<'static>>(task) };
        // SAFETY: the gate is held, the last job is closed and no worker is inside.
        unsafe { *shared.job.get() = Some(Job { task, count }) };
        shared.next.store(0, Ordering::Relaxed);
        shared.inside.store(0, Ordering::Release);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if shared.sleeping.load(Ordering::SeqCst) > 0 {
            inner.wake.iter().for_each(Thread::unpark);
        }
        let own = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drain(shared, task, count, 0)));
        shared.inside.fetch_or(CLOSED, Ordering::AcqRel);
        let mut spins = 0u32;
        while shared.inside.load(Ordering::Acquire) != CLOSED {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        let worker_panicked = shared.panicked.swap(false, Ordering::Relaxed);
        if let Err(panic) = own {
            std::panic::resume_unwind(panic);
        }
        if worker_panicked {
            std::panic::resume_unwind(Box::new("a kernel panicked on a worker thread"));
        }
    }

    /// Splits `rows` rows of the given outputs among the threads: `body(first_row, parts)` gets exclusive
    /// slices of the rows it owns. `work` is the cost of one row in elements touched; small jobs stay on the
    /// calling thread.
    pub fn rows<R: Rows>(&self, rows: usize, work: usize, outputs: R, body: impl Fn(usize, R::Part) + Sync) {
        self.blocks(rows, self.rows_per_task(rows, work), outputs, |first, part, _| body(first, part));
    }

    /// How many rows of the given cost one task should take; there are never more than [`Pool::max_tasks`]
    /// tasks.
    pub fn rows_per_task(&self, rows: usize, work: usize) -> usize {
        rows.div_ceil((rows * work / MIN_TASK_WORK).clamp(1, self.max_tasks())).max(1)
    }

    /// Bound on the tasks of [`Pool::rows_per_task`], for scratch memory per task.
    pub fn max_tasks(&self) -> usize {
        max_tasks(self.threads())
    }

    /// Like [`Pool::rows`], with a fixed number of rows per task, and the task's number for partial results.
    pub fn blocks<R: Rows>(
        &self,
        rows: usize,
        per_task: usize,
        outputs: R,
        body: impl Fn(usize, R::Part, usize) + Sync,
    ) {
        outputs.check(rows);
        self.run(rows.div_ceil(per_task), |task, _| {
            let first = task * per_task;
            let count = per_task.min(rows - first);
            // SAFETY: `check` has shown that every row is inside its slice, and tasks own disjoint rows.
            body(first, unsafe { outputs.part(first, count) }, task);
        });
    }

    /// Like [`Pool::blocks`] for rows that are visited again and again: a thread takes the blocks it had
    /// before if it can, whose rows are still in its cache, and others' only when its own are done.
    pub fn sticky_blocks<R: Rows>(
        &self,
        claims: &mut Claims,
        rows: usize,
        per_task: usize,
        outputs: R,
        body: impl Fn(usize, R::Part) + Sync,
    ) {
        outputs.check(rows);
        let blocks = rows.div_ceil(per_task);
        if claims.taken.len() != blocks || claims.round == u32::MAX {
            *claims = Claims { round: 0, taken: (0..blocks).map(|_| AtomicU32::new(0)).collect() };
        }
        claims.round += 1;
        let (round, taken) = (claims.round, &claims.taken);
        let each = blocks.div_ceil(self.threads());
        self.run(blocks, |_, thread| {
            // Own blocks from the first on, then others' from the last on, where their owners come last.
            let own = (thread * each).min(blocks)..((thread + 1) * each).min(blocks);
            let free = |block: &usize| taken[*block].swap(round, Ordering::Relaxed) != round;
            let Some(block) = own.chain((0..blocks).rev()).find(free) else { return };
            let first = block * per_task;
            let count = per_task.min(rows - first);
            // SAFETY: `check` has shown that every row is inside its slice, and a block is free once in a
            // round.
            body(first, unsafe { outputs.part(first, count) });
        });
    }
}

/// Who takes which block of rows, for [`Pool::sticky_blocks`].
#[derive(Debug, Default)]
pub struct Claims {
    round: u32,
    /// The round in which each block was taken last.
    taken: Vec<AtomicU32>,
}

/// Most tasks that [`Pool::rows_per_task`] makes for this many threads: a few each, to even out.
pub fn max_tasks(threads: usize) -> usize {
    if threads == 1 { 1 } else { 4 * threads }
}

/// Work, in elements, below which splitting costs more than it gains.
const MIN_TASK_WORK: usize = 8_192;

fn drain(shared: &Shared, task: Task<'_>, count: usize, thread: usize) {
    loop {
        let i = shared.next.fetch_add(1, Ordering::Relaxed);
        if i >= count {
            return;
        }
        task(i, thread);
    }
}

fn work(shared: &Shared, thread: usize) {
    let mut seen = 0;
    shared.started.fetch_add(1, Ordering::Release);
    loop {
        let mut spins = 0;
        while shared.epoch.load(Ordering::Acquire) == seen {
            spins += 1;
            if spins < SPINS {
                std::hint::spin_loop();
                continue;
            }
            shared.sleeping.fetch_add(1, Ordering::SeqCst);
            if shared.epoch.load(Ordering::SeqCst) == seen {
                std::thread::park();
            }
            shared.sleeping.fetch_sub(1, Ordering::SeqCst);
        }
        seen = shared.epoch.load(Ordering::Acquire);
        if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        let enter = |inside: usize| (inside & CLOSED == 0).then_some(inside + 1);
        if shared.inside.fetch_update(Ordering::AcqRel, Ordering::Acquire, enter).is_err() {
            continue; // too late
        }
        // SAFETY: the job was written before it was opened and stays until all who entered have left.
        if let Some(job) = unsafe { &*shared.job.get() } {
            let run = std::panic::AssertUnwindSafe(|| drain(shared, job.task, job.count, thread));
            if std::panic::catch_unwind(run).is_err() {
                shared.panicked.store(true, Ordering::Relaxed);
            }
        }
        shared.inside.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        self.wake.iter().for_each(Thread::unpark);
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// Outputs that can be split by rows among threads.
///
/// # Safety
/// Where `check(rows)` returns, `part` must be sound for every range within `rows`, and parts of disjoint
/// ranges must not overlap.
pub unsafe trait Rows: Sync {
    /// What one task gets.
    type Part;
    /// Panics unless there are at least `rows` rows: a caller's bug, not data.
    fn check(&self, rows: usize);
    /// # Safety
    /// Rows `first..first + count` must exist and be handed out to one task only.
    unsafe fn part(&self, first: usize, count: usize) -> Self::Part;
}

/// A mutable slice seen as rows of equal length.
#[derive(Debug)]
pub struct RowsMut<'a, T> {
    data: *mut T,
    len: usize,
    row: usize,
    lifetime: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for an exclusive slice whose rows go to different threads.
unsafe impl<T: Send> Sync for RowsMut<'_, T> {}

impl<'a, T> RowsMut<'a, T> {
    /// Rows of `row` elements each.
    pub fn new(data: &'a mut [T], row: usize) -> Self {
        Self { len: data.len(), data: data.as_mut_ptr(), row, lifetime: std::marker::PhantomData }
    }
}

// SAFETY: `check` has shown that the rows lie inside the slice, and rows do not overlap.
unsafe impl<'a, T: Send> Rows for RowsMut<'a, T> {
    type Part = &'a mut [T];
    fn check(&self, rows: usize) {
        let fits = rows.checked_mul(self.row).is_some_and(|count| count <= self.len);
        assert!(fits, "{rows} rows of {} exceed {} elements", self.row, self.len);
    }
    unsafe fn part(&self, first: usize, count: usize) -> &'a mut [T] {
        // SAFETY: the caller guarantees that the rows exist and that nobody else has them.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(first * self.row), count * self.row) }
    }
}

// SAFETY: as sound as what it holds.
unsafe impl<R: Rows> Rows for Option<R> {
    type Part = Option<R::Part>;
    fn check(&self, rows: usize) {
        if let Some(r) = self {
            r.check(rows);
        }
    }
    unsafe fn part(&self, first: usize, count: usize) -> Self::Part {
        // SAFETY: passed on to the caller.
        self.as_ref().map(|r| unsafe { r.part(first, count) })
    }
}

macro_rules! tuple_rows {
    ($($name:ident $index:tt),*) => {
        // SAFETY: as sound as its members.
        unsafe impl<$($name: Rows),*> Rows for ($($name,)*) {
            type Part = ($($name::Part,)*);
            fn check(&self, rows: usize) { $(self.$index.check(rows);)* }
            unsafe fn part(&self, first: usize, count: usize) -> Self::Part {
                // SAFETY: passed on to the caller.
                unsafe { ($(self.$index.part(first, count),)*) }
            }
        }
    };
}
tuple_rows!(A 0, B 1);
tuple_rows!(A 0, B 1, C 2);
tuple_rows!(A 0, B 1, C 2, D 3);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scheduler_limits_the_default_number_of_threads() {
        let of = |limits: &[&str]| {
            let limits: Vec<String> = limits.iter().map(|text| (*text).to_owned()).collect();
            granted_of(8, limits.iter())
        };
        assert_eq!((of(&[]), of(&["2"]), of(&["4", "3"]), of(&["64"])), (8, 2, 3, 8));
        assert_eq!((of(&["2,1"]), of(&["0"]), of(&["many"]), of(&[""])), (2, 8, 8, 8));
        assert!(Pool::new(1_000_000).threads() <= MAX_THREADS);
    }

    #[test]
    fn every_task_runs_exactly_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for count in [0, 1, 2, 7, 100] {
                let hits: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                for _ in 0..200 {
                    pool.run(count, |i, thread| {
                        assert!(thread < threads);
                        hits[i].fetch_add(1, Ordering::Relaxed);
                    });
                }
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 200));
            }
        }
    }

    #[test]
    fn workers_wake_after_sleeping() {
        let pool = Pool::new(3);
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(3));
            let hits = AtomicUsize::new(0);
            pool.run(64, |_, _| {
                hits.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(hits.load(Ordering::Relaxed), 64);
        }
    }

    #[test]
    fn rows_are_split_completely() {
        let pool = Pool::new(3);
        for rows in [1, 5, 1000] {
            let (mut a, mut b) = (vec![0; rows * 7], vec![0; rows]);
            let outputs = (RowsMut::new(&mut a, 7), Some(RowsMut::new(&mut b, 1)));
            pool.rows(rows, 100, outputs, |first, (a, b)| {
                for (i, row) in a.chunks_mut(7).enumerate() {
                    row.fill(first + i);
                }
                b.into_iter().flatten().enumerate().for_each(|(i, v)| *v = first + i);
            });
            assert!(a.iter().enumerate().all(|(i, v)| *v == i / 7));
            assert!(b.iter().enumerate().all(|(i, v)| *v == i));
        }
    }

    #[test]
    fn sticky_blocks_take_every_row_once_in_every_round() {
        for threads in [1, 3] {
            let (pool, mut claims) = (Pool::new(threads), Claims::default());
            let mut hits = vec![0; 1000];
            for round in 1..300 {
                // Other sizes begin anew.
                let per_task = if round % 50 == 0 { 90 } else { 64 };
                pool.sticky_blocks(&mut claims, 1000, per_task, RowsMut::new(&mut hits, 1), |_, part| {
                    part.iter_mut().for_each(|hits| *hits += 1);
                });
                assert!(hits.iter().all(|hits| *hits == round));
            }
        }
    }

    #[test]
    fn a_panicking_task_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(2);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(8, |i, _| assert!(i != 5, "task 5"));
        }));
        assert!(result.is_err());
        let hits = AtomicUsize::new(0);
        pool.run(8, |_, _| {
            hits.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(hits.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn concurrent_callers_share_one_pool() {
        let pool = Pool::new(2);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let hits = AtomicUsize::new(0);
                        pool.run(10, |_, _| {
                            hits.fetch_add(1, Ordering::Relaxed);
                        });
                        assert_eq!(hits.load(Ordering::Relaxed), 10);
                    }
                });
            }
        });
    }
}
