//! Batches read or played ahead on threads. Their order is the sampler's or the stream's, whatever thread is
//! faster: a batch is known by its number, and handed out when its turn comes.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use elmur_base::{Field, FieldMut, Stop};
use elmur_pool::granted_threads;

use crate::error::{Error, Result};
use crate::source::Source;
use crate::stream::{Playing, Stream};
use crate::{Crop, Sampler, Window};

/// Most bytes of batches that wait to be used. One batch is read ahead however large it is.
const AHEAD_BYTES: usize = 256 << 20;

/// Numbers of a field in the element type that a learner computes with.
#[derive(Debug, Clone, PartialEq)]
pub enum Buffer {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 32-bit integers.
    I32(Vec<i32>),
    /// 64-bit integers.
    I64(Vec<i64>),
    /// Bytes.
    U8(Vec<u8>),
    /// Flags.
    Bool(Vec<bool>),
}

impl Buffer {
    /// Makes the buffer `len` numbers long.
    fn resize(&mut self, len: usize) {
        match self {
            Buffer::F32(x) => x.resize(len, 0.0),
            Buffer::I32(x) => x.resize(len, 0),
            Buffer::I64(x) => x.resize(len, 0),
            Buffer::U8(x) => x.resize(len, 0),
            Buffer::Bool(x) => x.resize(len, false),
        }
    }

    /// `len` numbers from `start` on.
    fn part(&mut self, start: usize, len: usize) -> FieldMut<'_> {
        match self {
            Buffer::F32(x) => FieldMut::F32(&mut x[start..start + len]),
            Buffer::I32(x) => FieldMut::I32(&mut x[start..start + len]),
            Buffer::I64(x) => FieldMut::I64(&mut x[start..start + len]),
            Buffer::U8(x) => FieldMut::U8(&mut x[start..start + len]),
            Buffer::Bool(x) => FieldMut::Bool(&mut x[start..start + len]),
        }
    }

    /// Bytes per number.
    fn size(&self) -> usize {
        match self {
            Buffer::F32(_) | Buffer::I32(_) => 4,
            Buffer::I64(_) => 8,
            Buffer::U8(_) | Buffer::Bool(_) => 1,
        }
    }
}

/// What every batch consists of: crops cut into windows that follow each other.
#[derive(Debug, Clone)]
pub struct Request {
    /// Crops per batch.
    pub rows: usize,
    /// Windows per crop.
    pub windows: usize,
    /// Steps per window.
    pub steps: usize,
    /// The fields to read, with an empty buffer of the type to read them in and the numbers per step.
    pub fields: Vec<(Field, Buffer, usize)>,
}

/// One batch: the crops of its rows, and the fields that were asked for.
#[derive(Debug)]
pub struct Batch {
    /// One crop per row, of the loader's source or of the batch's own episodes.
    pub crops: Vec<Crop>,
    /// One buffer per field of the [`Request`], [windows, rows, steps, numbers].
    pub fields: Vec<Buffer>,
    /// Number of crops up to the end of this batch: what to save to continue behind it.
    pub position: u64,
}

/// Reads the batches that come next on threads of its own, which start with the first batch that is asked for
/// and end when the loader is dropped.
#[derive(Debug)]
pub struct Loader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    count: usize,
    ahead: u64,
}

/// Where batches come from.
#[derive(Debug)]
enum Supply {
    Recorded(Arc<dyn Source>),
    Fresh(Box<Stream>),
}

/// The order in which batches come.
#[derive(Debug)]
enum Order {
    Sampled(Sampler),
    /// The number of crops before it.
    Counted(u64),
}

impl Order {
    /// The number of crops before the next batch, and these crops, where they are known before it is made.
    fn next(&mut self, rows: usize) -> (u64, Vec<Crop>) {
        match self {
            Order::Sampled(sampler) => (sampler.position(), sampler.next_crops(rows)),
            Order::Counted(position) => {
                *position += rows as u64;
                (*position - rows as u64, Vec::new())
            }
        }
    }

    fn seek(&mut self, to: u64) {
        match self {
            Order::Sampled(sampler) => sampler.seek(to),
            Order::Counted(position) => *position = to,
        }
    }
}

#[derive(Debug)]
struct Shared {
    supply: Supply,
    request: Request,
    state: Mutex<State>,
    changed: Condvar,
    /// Ends what is being played when the loader is dropped.
    halt: Stop,
}

#[derive(Debug)]
struct State {
    order: Order,
    /// Counts calls of [`Loader::seek`]: what was begun before is of no use.
    generation: u64,
    /// Number of the batch that a thread begins next, and of the one that is handed out next.
    begun: u64,
    taken: u64,
    /// Most batches between these two.
    ahead: u64,
    ready: BTreeMap<u64, Result<Batch>>,
    /// Position before the batch that is handed out next.
    position: u64,
    spare: Vec<Vec<Buffer>>,
    stop: bool,
    /// Threads that read.
    alive: usize,
    /// Whether one of them has panicked: the batch that it was reading never comes.
    failed: bool,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// What a thread does: one batch after the other, never too far ahead.
    fn work(&self) {
        let mut playing = None;
        let mut state = self.state();
        while !state.stop {
            if state.begun >= state.taken + state.ahead {
                state = self.wait(state);
                continue;
            }
            let (generation, number) = (state.generation, state.begun);
            let (position, crops) = state.order.next(self.request.rows);
            let buffers = state.spare.pop().unwrap_or_default();
            state.begun += 1;
            drop(state);
            let batch = self.make(&mut playing, position, crops, buffers);
            state = self.state();
            if state.generation == generation {
                state.ready.insert(number, batch);
                self.changed.notify_all();
            }
        }
    }

    /// The batch behind `position` crops.
    fn make(
        &self,
        playing: &mut Option<Playing>,
        position: u64,
        crops: Vec<Crop>,
        buffers: Vec<Buffer>,
    ) -> Result<Batch> {
        let rows = self.request.rows;
        let played;
        let (source, crops) = match &self.supply {
            Supply::Recorded(source) => (source, crops),
            Supply::Fresh(stream) => {
                let playing = match playing {
                    Some(playing) => playing,
                    None => playing.insert(stream.playing()?),
                };
                let crops;
                (played, crops) = stream.batch(playing, position, rows, &self.halt)?;
                (&played, crops)
            }
        };
        let fields = self.read(&**source, &crops, buffers)?;
        Ok(Batch { crops, fields, position: position + rows as u64 })
    }

    fn read(&self, source: &dyn Source, crops: &[Crop], mut buffers: Vec<Buffer>) -> Result<Vec<Buffer>> {
        let Request { rows, windows, steps, fields } = &self.request;
        buffers.resize_with(fields.len(), || Buffer::U8(Vec::new()));
        for ((_, empty, width), buffer) in fields.iter().zip(&mut buffers) {
            if std::mem::discriminant(buffer) != std::mem::discriminant(empty) {
                *buffer = empty.clone();
            }
            buffer.resize(windows * rows * steps * width);
        }
        // Sources that decode whole episodes are asked for all of one before the next.
        let group = if source.reading_threads() > 1 { 1 } else { (*rows).max(1) };
        for (i, crops) in crops.chunks(group).enumerate() {
            for window in 0..*windows {
                let part = Window { source, crops, offset: window * steps, length: *steps };
                for ((field, _, width), buffer) in fields.iter().zip(&mut buffers) {
                    let start = (window * rows + i * group) * steps * width;
                    part.fill(*field, buffer.part(start, crops.len() * steps * width))?;
                }
            }
        }
        Ok(buffers)
    }
}

impl Loader {
    /// Batches that are read or played ahead at most.
    pub const MOST_AHEAD: u64 = 32;

    /// A loader of the batches that `sampler` chooses. Nothing is read before the first is asked for.
    pub fn new(source: &Arc<dyn Source>, sampler: Sampler, request: Request) -> Self {
        let (position, threads) = (sampler.position(), source.reading_threads().min(granted_threads()));
        let supply = Supply::Recorded(Arc::clone(source));
        Self::of(supply, (Order::Sampled(sampler), position), request, threads)
    }

    /// A loader of batches of fresh episodes, from the first on. Nothing is played before the first is asked for.
    pub fn fresh(stream: Stream, request: Request) -> Self {
        let threads = if stream.threads == 0 { granted_threads() } else { stream.threads };
        let threads = threads.min(Self::MOST_AHEAD as usize - 1);
        Self::of(Supply::Fresh(Box::new(stream)), (Order::Counted(0), 0), request, threads)
    }

    fn of(supply: Supply, (order, position): (Order, u64), request: Request, threads: usize) -> Self {
        let per_step: usize = request.fields.iter().map(|(_, buffer, width)| buffer.size() * width).sum();
        let bytes = (request.rows * request.windows * request.steps).saturating_mul(per_step);
        let affordable = (AHEAD_BYTES / bytes.max(1)).max(1);
        let count = threads.min(affordable).max(1);
        let ahead = ((count + 1).min(affordable) as u64).min(Self::MOST_AHEAD);
        let state = State {
            order,
            generation: 0,
            begun: 0,
            taken: 0,
            ahead,
            ready: BTreeMap::new(),
            position,
            spare: Vec::new(),
            stop: false,
            alive: 0,
            failed: false,
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        let shared = Arc::new(Shared { supply, request, state, changed, halt: Stop::default() });
        Self { shared, threads: Vec::new(), count, ahead }
    }

    /// The next batch, as soon as it is read. After an error the same batch is tried again, unless the source
    /// panicked: that is an error from then on.
    pub fn next_batch(&mut self) -> Result<Batch> {
        self.start()?;
        let mut state = self.shared.state();
        loop {
            let number = state.taken;
            match state.ready.remove(&number) {
                Some(Ok(batch)) => {
                    state.taken += 1;
                    state.position = batch.position;
                    self.shared.changed.notify_all();
                    return Ok(batch);
                }
                Some(Err(error)) => {
                    let position = state.position;
                    state.seek(position);
                    self.shared.changed.notify_all();
                    return Err(error);
                }
                None if state.failed || state.alive == 0 => {
                    return Err(thread_error("a thread that ended early, by a panic of the source"));
                }
                None => state = self.shared.wait(state),
            }
        }
    }

    /// Gives back a batch that is no longer needed, so that its memory is used again.
    pub fn recycle(&mut self, batch: Batch) {
        let mut state = self.shared.state();
        if (state.spare.len() as u64) < self.ahead {
            state.spare.push(batch.fields);
        }
    }

    /// Number of crops up to the end of the last batch that was handed out, whatever was read ahead.
    pub fn position(&self) -> u64 {
        self.shared.state().position
    }

    /// Continues from the point where [`Loader::position`] was `position`.
    pub fn seek(&mut self, position: u64) {
        self.shared.state().seek(position);
        self.shared.changed.notify_all();
    }

    fn start(&mut self) -> Result<()> {
        while self.threads.len() < self.count {
            let shared = Arc::clone(&self.shared);
            self.shared.state().alive += 1;
            let thread = std::thread::Builder::new().name("elmur-loader".to_owned()).spawn(move || {
                let _alive = Alive(&shared);
                shared.work();
            });
            match thread {
                Ok(thread) => self.threads.push(thread),
                Err(e) => {
                    self.shared.state().alive -= 1;
                    // Fewer threads than wished will do.
                    if self.threads.is_empty() {
                        return Err(thread_error(&e.to_string()));
                    }
                    self.count = self.threads.len();
                }
            }
        }
        Ok(())
    }
}

fn thread_error(problem: &str) -> Error {
    let (what, expected) = ("data", "a thread to read it".to_owned());
    Error::Choice { what, expected, got: problem.to_owned() }
}

impl State {
    fn seek(&mut self, position: u64) {
        self.generation += 1;
        (self.begun, self.taken, self.position) = (0, 0, position);
        self.ready.clear();
        self.order.seek(position);
    }
}

/// Tells the loader when a thread ends, however that comes.
struct Alive<'a>(&'a Shared);

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.alive -= 1;
        state.failed |= std::thread::panicking();
        drop(state);
        self.0.changed.notify_all();
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.shared.state().stop = true;
        self.shared.halt.request(1);
        self.shared.changed.notify_all();
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use elmur_base::Spaces;

    use super::*;
    use crate::Dataset;
    use crate::layout::{Layout, Outline, Part};
    use crate::window::tests::dataset;

    /// A source that several threads may read, with pauses of its own, and that can be told to fail.
    #[derive(Debug)]
    struct Slow {
        data: Dataset,
        reads: AtomicUsize,
        broken: AtomicBool,
        panics_at: usize,
    }

    impl Source for Slow {
        fn spaces(&self) -> &Spaces {
            self.data.spaces()
        }

        fn metadata(&self) -> &BTreeMap<String, String> {
            self.data.metadata()
        }

        fn episodes(&self) -> usize {
            self.data.len()
        }

        fn outline(&self, episode: usize) -> Outline {
            self.data.outline(episode)
        }

        fn layout(&self) -> &Layout {
            self.data.layout()
        }

        fn read(&self, part: Part, episode: usize, rows: Range<usize>, out: FieldMut<'_>) -> Result<()> {
            let reads = self.reads.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(std::time::Duration::from_micros((reads % 7 * 50) as u64));
            assert!(reads != self.panics_at, "a source that panics once");
            if self.broken.load(Ordering::Relaxed) && episode == 2 {
                return Err(Error::Empty { path: "broken".into() });
            }
            self.data.read(part, episode, rows, out)
        }

        fn checksum(&self, episode: usize) -> u32 {
            self.data.checksum(episode)
        }
    }

    fn request() -> Request {
        let fields = vec![
            (Field::Observation(0), Buffer::F32(Vec::new()), 1),
            (Field::Target, Buffer::I64(Vec::new()), 1),
            (Field::Imitate, Buffer::Bool(Vec::new()), 1),
        ];
        Request { rows: 3, windows: 2, steps: 2, fields }
    }

    fn slow() -> Arc<Slow> {
        let data = dataset(&[5, 12, 3, 10, 1, 7]);
        Arc::new(Slow {
            data,
            reads: AtomicUsize::new(0),
            broken: AtomicBool::new(false),
            panics_at: usize::MAX,
        })
    }

    fn loader(source: Arc<dyn Source>) -> Loader {
        let sampler = Sampler::new(&*source, 4, 9);
        Loader::new(&source, sampler, request())
    }

    #[test]
    fn batches_come_in_the_order_of_the_sampler_whatever_threads_read_them() {
        let (slow, plain) = (slow(), Arc::new(dataset(&[5, 12, 3, 10, 1, 7])));
        let mut sampler = Sampler::new(&*plain, 4, 9);
        let (mut one, mut many) = (loader(plain.clone()), loader(slow));
        for _ in 0..30 {
            let (a, b) = (one.next_batch().unwrap(), many.next_batch().unwrap());
            assert_eq!(a.crops, sampler.next_crops(3));
            assert_eq!((&a.crops, &a.fields, a.position), (&b.crops, &b.fields, b.position));
            assert_eq!((one.position(), many.position()), (sampler.position(), sampler.position()));
            let mut expected = vec![0.0; 6];
            for window in 0..2 {
                let part = Window { source: &*plain, crops: &a.crops, offset: 2 * window, length: 2 };
                part.fill(Field::Observation(0), FieldMut::F32(&mut expected)).unwrap();
                let Buffer::F32(seen) = &a.fields[0] else { panic!("floats") };
                assert_eq!(seen[6 * window..6 * window + 6], expected);
            }
            many.recycle(b);
        }
        // Going back gives the same again, whatever was read ahead.
        many.seek(6);
        sampler.seek(6);
        assert_eq!(many.next_batch().unwrap().crops, sampler.next_crops(3));
    }

    #[test]
    fn errors_come_out_at_their_batch_and_can_be_overcome() {
        let source = slow();
        let mut loader = loader(source.clone());
        let mut sampler = Sampler::new(&*source, 4, 9);
        source.broken.store(true, Ordering::Relaxed);
        for _ in 0..20 {
            let crops = sampler.next_crops(3);
            let bad = crops.iter().any(|crop| crop.episode == 2);
            if bad {
                let before = loader.position();
                assert!(loader.next_batch().unwrap_err().to_string().contains("broken"));
                assert_eq!(loader.position(), before);
                source.broken.store(false, Ordering::Relaxed);
                assert_eq!(loader.next_batch().unwrap().crops, crops);
                source.broken.store(true, Ordering::Relaxed);
                let position = loader.position();
                loader.seek(position);
            } else {
                assert_eq!(loader.next_batch().unwrap().crops, crops);
            }
        }
    }

    #[test]
    fn a_panic_of_the_source_on_one_of_many_threads_is_an_error() {
        let data = dataset(&[5, 12, 3, 10, 1, 7]);
        let (reads, broken) = (AtomicUsize::new(0), AtomicBool::new(false));
        let source = Arc::new(Slow { data, reads, broken, panics_at: 100 });
        let mut loader = loader(source);
        // Several threads, whatever this machine has.
        loader.count = 3;
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let error = (0..100).find_map(|_| loader.next_batch().err());
            let _ = sender.send(error.map(|error| (error.to_string(), loader.next_batch().is_err())));
        });
        let (error, again) = receiver.recv_timeout(std::time::Duration::from_secs(30)).unwrap().unwrap();
        assert!(error.contains("panic") && again, "{error}");
    }

    #[test]
    fn threads_end_with_the_loader_and_read_only_a_little_ahead() {
        let source = slow();
        let mut loader = loader(source.clone());
        loader.next_batch().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(100));
        let reads = source.reads.load(Ordering::Relaxed);
        // Three rows of two windows and three fields per batch; one taken and at most five ahead.
        assert!(reads <= 6 * 3 * 2 * 4, "{reads}");
        drop(loader);
        assert_eq!(Arc::strong_count(&source), 1);
        // A loader that is never asked starts no thread.
        drop(self::loader(source.clone()));
        assert_eq!(Arc::strong_count(&source), 1);
    }
}
