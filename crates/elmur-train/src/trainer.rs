//! One batch after the other. A trainer's whole state is its parameters, its optimizer's states and four
//! counters (batches, optimizer steps, imitated actions, sampler position), so saving and resuming are exact.
//! Where the policy plays episodes itself, what it was when it did belongs to the state too.
//! Within a batch, what the windows so far carry to the next belongs to it too.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use elmur_base::files::write_atomic;
use elmur_base::{Kind, StepWeights, Stop};
use elmur_data::{Batch, Buffer, ElementType, Loader, Request, Sampler, Source, Stream, Window};
use elmur_engine::{AdamW, DType, Device, Readback, Store};
use elmur_model::checkpoint::FINGERPRINT;
use elmur_model::tensors::{self, HostTensor, Notes, TensorData, Tensors};
use elmur_model::window::{Begin, REPORT, RNG, TrainSettings, WindowProgram, training_graph};
use elmur_model::{Architecture, Augment, Checkpoint, Fingerprint, init};

use crate::config::{RunConfig, TrainConfig};
use crate::error::{Error, Result};
use crate::feed::{fill_inputs, request};
use crate::own::OwnStates;
use crate::prepare::{Prepared, check_hidden};
use crate::resident::Resident;
use crate::schedule::Unit;
use crate::standardize::standardize;
use crate::statistics;

/// Loss, accuracy and gradient norm of one batch, averaged over its optimizer steps.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BatchReport {
    /// Batches so far, this one included.
    pub batch: u64,
    /// Epochs so far, as a fraction.
    pub epoch: f64,
    /// Loss with load balancing.
    pub loss: f64,
    /// Loss of the actions alone.
    pub action_loss: f64,
    /// Share of imitated discrete actions to which the policy gave the highest probability; none for
    /// continuous actions, whose action loss is the mean squared error.
    pub accuracy: Option<f64>,
    /// Norm of the gradient before clipping.
    pub gradient_norm: f64,
    /// Learning rate of the last step.
    pub lr: f64,
    /// Imitated actions of this batch.
    pub tokens: u64,
}

/// Trains one policy on the episodes of one source.
#[derive(Debug)]
pub struct Trainer {
    config: RunConfig,
    architecture: Arc<dyn Architecture>,
    source: Arc<dyn Source>,
    /// The data on the device, where it lies there.
    resident: Option<Resident>,
    params: Store,
    /// Moments and the random generator: what a checkpoint keeps beside the parameters.
    optimizer: Store,
    /// What windows carry to the next, and the sums of the batch's reports.
    carried: Store,
    /// Programs that train one unroll: the first starts a crop, the second (if a crop has several unrolls)
    /// continues it.
    programs: Vec<WindowProgram>,
    /// A batch of which some windows are done.
    within: Option<Within>,
    /// The policy as it was, for episodes that it plays itself.
    own: Option<Arc<OwnStates>>,
    /// Reads or plays the batches that come next.
    loader: Loader,
    /// How long batches were waited for.
    waited: Duration,
    request: Request,
    /// Crops in one epoch.
    epoch_len: u64,
    batches: u64,
    steps: u64,
    tokens: u64,
    /// Queued batches whose losses have not been read back yet.
    waiting: VecDeque<BatchReport>,
    sums: Readback<f32>,
}

/// A batch of which some runs of the programs are done.
#[derive(Debug)]
struct Within {
    batch: Batch,
    /// Number of runs done.
    runs: usize,
    report: BatchReport,
}

/// Names of the counters in the state's file, beside the optimizer's tensors: the whole batches', and those
/// within a batch.
const COUNTERS: &str = "trainer.counters";
const WITHIN: &str = "trainer.within";
/// Beginning of the names of carried states in the state's file.
const CARRIED: &str = "carried/";
/// Beginning of the names of parameters of the policy as it was, followed by a number of batches.
const OWN: &str = "own/";

impl TrainConfig {
    /// The settings of training programs; `table`: rows of the data where they lie on the device.
    pub fn program_settings(&self, table: Option<usize>) -> TrainSettings {
        TrainSettings {
            batch: self.batch,
            label_smoothing: self.label_smoothing,
            optimizer: AdamW { betas: self.betas, weight_decay: self.weight_decay, ..AdamW::default() },
            clip: self.clip,
            dtype: DType::F32,
            export_gradients: false,
            dropout: true,
            ties: false,
            table,
            augment: Augment::default(),
            bytes: Vec::new(),
            weights: (self.after_success != 1.0 || self.changes != 0.0).then(|| {
                StepWeights::new(self.success_reward as f32, self.after_success as f32)
                    .with_changes(self.changes as f32)
            }),
        }
    }
}

/// Pictures that are numbers for the policy and were recorded as bytes: these go to the device, a quarter of the size.
pub(crate) fn recorded_bytes(architecture: &dyn Architecture, source: &dyn Source) -> Vec<usize> {
    let leaves = architecture.ends().observation.iter().zip(&source.layout().observations).enumerate();
    let bytes = leaves.filter(|(_, (encoder, column))| {
        encoder.is_image() && encoder.kind() == Kind::Floats && column.element == ElementType::U8
    });
    bytes.map(|(leaf, _)| leaf).collect()
}

impl Trainer {
    /// A policy with fresh weights that learns from `source`. For `data.stream` see [`Trainer::of`].
    pub fn new(config: &RunConfig, source: &Arc<dyn Source>, device: impl Into<Device>) -> Result<Self> {
        Self::build(config, source, None, device.into())
    }

    /// A policy with fresh weights that learns from what a run has prepared: recorded or fresh episodes.
    pub fn of(prepared: &Prepared, device: impl Into<Device>) -> Result<Self> {
        Self::build(&prepared.config, &prepared.data, prepared.stream.as_ref(), device.into())
    }

    fn build(
        config: &RunConfig,
        source: &Arc<dyn Source>,
        stream: Option<&Stream>,
        device: Device,
    ) -> Result<Self> {
        config.validate()?;
        if config.data.stream != stream.is_some() {
            let expected = "what the run was prepared with";
            return Err(Error::config("data.stream", expected, config.data.stream));
        }
        let architecture: Arc<dyn Architecture> = (&config.model).into();
        architecture.ends().check(source.spaces(), "dataset")?;
        check_hidden(config)?;
        let t = &config.train;
        // Fresh episodes come with their batch.
        let table = match stream {
            Some(_) => None,
            None => Resident::rows(&*architecture, &**source, &device),
        };
        let settings = TrainSettings {
            ties: config.data.ties,
            augment: Augment {
                shift: config.data.shift,
                brightness: config.data.brightness,
                colours: config.data.colours,
                hide: config.data.hide,
            },
            bytes: if stream.is_some() { Vec::new() } else { recorded_bytes(&*architecture, &**source) },
            ..t.program_settings(table)
        };
        let graph = |begin: Begin| training_graph(&*architecture, &settings, begin);
        let mut graphs = vec![graph(Begin::Fresh)?];
        if t.segments > architecture.window().unroll {
            graphs.push(graph(Begin::Continue)?);
        }
        let resident = match settings.table {
            Some(_) => Some(Resident::new(&graphs[0], &**source, &device)?),
            None => None,
        };
        let params = init::parameters(&*architecture, t.seed)?;
        statistics::fill(&graphs[0], &**source, &params)?;
        if t.standardize || t.standardize_integers {
            standardize(t, architecture.ends(), &**source, &params)?;
            init::copy_averages(&graphs[0], &params)?;
        }
        let params = params.to(&device)?;
        let (optimizer, carried) = (Store::on(&device), Store::on(&device));
        for built in &graphs {
            built.declare(&optimizer, built.optimizer_states().iter().map(String::as_str))?;
            built.declare(&carried, built.carried.iter().map(|c| c.name.as_str()).chain([REPORT]))?;
        }
        let empty = Store::on(&device);
        let data = resident.as_ref().map_or(&empty, Resident::store);
        let stores = [&params, &optimizer, &carried, data];
        let compile = |built| WindowProgram::new(built, &*architecture, &device, &stores);
        let programs = graphs.iter().map(compile).collect::<elmur_model::Result<Vec<_>>>()?;
        optimizer.set(RNG, &[t.seed as i64, 0])?;
        let window = architecture.window();
        let sampler = Sampler::new(&**source, config.crop(), t.seed);
        let sampler = sampler.with_lead(window.lead).with_starts(window.anywhere);
        let epoch_len = sampler.epoch_len() as u64;
        let request = request(&programs, t.batch, t.segments, architecture.window().steps)?;
        let mut own = None;
        let loader = match stream {
            Some(stream) => {
                let mut stream = stream.clone();
                if config.data.own_share > 0.0 {
                    let states = Arc::new(OwnStates::new(config, &stream.environment, stream.longest)?);
                    if states.is_due(0) {
                        states.keep(0, &params)?;
                    }
                    stream.own = Some((Arc::<OwnStates>::clone(&states), config.data.own_share));
                    own = Some(states);
                }
                Loader::fresh(stream, request.clone())
            }
            None => Loader::new(source, sampler, request.clone()),
        };
        let sums = carried.readback(REPORT)?;
        Ok(Self {
            config: config.clone(),
            architecture: Arc::clone(&architecture),
            source: Arc::clone(source),
            resident,
            params,
            optimizer,
            carried,
            programs,
            within: None,
            own,
            loader,
            waited: Duration::ZERO,
            request,
            epoch_len,
            batches: 0,
            steps: 0,
            tokens: 0,
            waiting: VecDeque::new(),
            sums,
        })
    }

    /// Takes other weights instead of fresh ones ([`RunConfig::first_weights`]), with what they hold of the data that
    /// they were trained on, such as ranges of actions. Meant for the time before the first batch: optimizer and
    /// counters stay as they are.
    pub fn begin_with(&mut self, weights: &Store) -> Result<()> {
        for name in weights.names() {
            self.params.set(&name, &weights.get::<f32>(&name)?)?;
        }
        if let Some(own) = self.own.as_ref().filter(|own| own.is_due(self.batches)) {
            own.keep(self.batches, &self.params)?;
        }
        Ok(())
    }

    /// The run's config.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Batches so far.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// Batches of the whole training.
    pub fn planned_batches(&self) -> u64 {
        let t = &self.config.train;
        let crops = t.epochs.map(|epochs| epochs.saturating_mul(self.epoch_len));
        let whole = crops.map_or(u64::MAX, |crops| crops.div_ceil(t.batch as u64));
        t.batches.map_or(whole, |limit| whole.min(limit))
    }

    /// The parameters, shared with whoever holds a clone of the store.
    pub fn params(&self) -> &Store {
        &self.params
    }

    /// A checkpoint of the parameters as they are.
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint { config: self.config.model.clone(), params: self.params.clone() }
    }

    /// The device that computes.
    pub fn device(&self) -> &Device {
        self.params.device()
    }

    /// One batch: all windows of one crop per row, one optimizer step per `unroll` windows of the
    /// architecture.
    ///
    /// Where the loss is not a finite number below `train.max_loss` the error says so; the parameters are
    /// spoilt then. Reports of batches from [`Trainer::queue`] must have been taken.
    pub fn step(&mut self) -> Result<BatchReport> {
        self.queue()?;
        self.report()
    }

    /// Begins a batch. On a GPU this returns before the batch is done, so that the next can be prepared
    /// meanwhile; [`Trainer::report`] tells how it went.
    pub fn queue(&mut self) -> Result<()> {
        self.queue_until(&Stop::default()).map(drop)
    }

    /// [`Trainer::queue`] that a request to stop interrupts between two optimizer steps; false if it did. The
    /// batch is then continued by the next call, also after saving and loading; every call makes at least one
    /// step.
    pub fn queue_until(&mut self, stop: &Stop) -> Result<bool> {
        let t = &self.config.train;
        let window = self.architecture.window();
        let runs = t.segments / window.unroll;
        let mut within = match self.within.take() {
            Some(within) => within,
            None => {
                let start = Instant::now();
                let batch = self.loader.next_batch()?;
                self.waited += start.elapsed();
                Within { batch, runs: 0, report: BatchReport::default() }
            }
        };
        let first = within.runs;
        while within.runs < runs {
            if within.runs > first && stop.requested() {
                self.within = Some(within);
                return Ok(false);
            }
            let Within { batch, runs: run, report } = &mut within;
            let before = self.tokens + report.tokens;
            let program = &mut self.programs[usize::from(*run > 0)];
            if let Some(Buffer::Bool(imitated)) = batch.fields.first() {
                let each = imitated.len() / runs;
                let imitated = &imitated[*run * each..(*run + 1) * each];
                report.tokens += imitated.iter().filter(|imitate| **imitate).count() as u64;
            }
            match &self.resident {
                Some(resident) => {
                    for k in 0..window.unroll {
                        let offset = (*run * window.unroll + k) * window.steps;
                        let (source, crops) = (&*self.source, &batch.crops[..]);
                        resident.fill(program, k, Window { source, crops, offset, length: window.steps })?;
                    }
                }
                None => fill_inputs(program, &self.request, &batch.fields, *run)?,
            }
            self.steps += 1;
            report.lr = t.lr * self.factor(runs as u64, [before, self.tokens + report.tokens]);
            let program = &mut self.programs[usize::from(*run > 0)];
            program.set_rates(report.lr, self.steps - 1)?;
            program.run((*run * window.unroll) as u64)?;
            *run += 1;
        }
        let Within { batch, mut report, .. } = within;
        self.loader.recycle(batch);
        self.sums.ask()?;
        self.tokens += report.tokens;
        self.batches += 1;
        if let Some(own) = self.own.as_ref().filter(|own| own.is_due(self.batches)) {
            own.keep(self.batches, &self.params)?;
        }
        report.batch = self.batches;
        report.epoch = self.loader.position() as f64 / self.epoch_len as f64;
        self.waiting.push_back(report);
        Ok(true)
    }

    /// Reads `count` batches and puts them aside, to measure what data cost without training: the number of their
    /// imitated actions. Training goes on behind them.
    pub fn read_batches(&mut self, count: usize) -> Result<u64> {
        let mut imitated = 0;
        for _ in 0..count {
            let batch = self.loader.next_batch()?;
            if let Some(Buffer::Bool(marks)) = batch.fields.first() {
                imitated += marks.iter().filter(|mark| **mark).count() as u64;
            }
            self.loader.recycle(batch);
        }
        Ok(imitated)
    }

    /// How long batches were waited for since this was last asked: next to nothing where data come faster than
    /// they are learnt from.
    pub fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    /// Whether a batch was interrupted ([`Trainer::queue_until`]).
    pub fn is_within_batch(&self) -> bool {
        self.within.is_some()
    }

    /// The number that a checkpoint of this moment has: that of the newest batch, whole or not.
    pub(crate) fn checkpoint_number(&self) -> u64 {
        self.batches + u64::from(self.is_within_batch())
    }

    /// Batches that were begun and not yet reported.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// How the oldest of the batches begun went, as soon as it is done; errors as [`Trainer::step`].
    pub fn report(&mut self) -> Result<BatchReport> {
        let (Some(mut report), Some(sums)) = (self.waiting.pop_front(), self.sums.answer()?) else {
            return Err(Error::config("report", "a batch that was begun", "none"));
        };
        let t = &self.config.train;
        let runs = (t.segments / self.architecture.window().unroll) as f64;
        let [loss, action_loss, norm, correct] = [0, 1, 2, 3].map(|i| f64::from(sums[i]));
        report.loss = loss / runs;
        report.action_loss = action_loss / runs;
        report.gradient_norm = norm / runs;
        if !(loss.is_finite() && norm.is_finite() && report.loss < t.max_loss) {
            return Err(Error::Diverged {
                batch: report.batch,
                loss: report.loss,
                gradient_norm: report.gradient_norm,
                checkpoint: "none".to_owned(),
            });
        }
        let action = self.architecture.ends().action;
        let answers = report.tokens as usize * action.dim();
        report.accuracy = action.is_discrete().then(|| correct / answers.max(1) as f64);
        Ok(report)
    }

    /// The learning rate's factor in the current step, given the imitated actions before and after it.
    fn factor(&self, steps_per_batch: u64, tokens: [u64; 2]) -> f64 {
        let schedule = &self.config.train.schedule;
        let planned = self.planned_batches();
        let counted = |[before, after]: [u64; 2]| if schedule.from_zero { before } else { after };
        match schedule.unit {
            Unit::Steps => {
                let steps = [self.steps - 1, self.steps];
                schedule.factor(counted(steps), planned.saturating_mul(steps_per_batch))
            }
            // The number of imitated actions in the rest of training is extrapolated from the batches so far.
            Unit::Tokens => {
                let per_batch = tokens[1] as f64 / (self.steps as f64 / steps_per_batch as f64);
                schedule.factor(counted(tokens), (per_batch * planned as f64) as u64)
            }
        }
    }

    /// Writes model and state into the folder.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let checkpoint = self.checkpoint();
        checkpoint.save(folder)?;
        let notes = Notes::from([(FINGERPRINT.to_owned(), checkpoint.fingerprint()?.to_string())]);
        let mut tensors = Tensors::new();
        let mut numbers = |name: &str, numbers: &[u64]| {
            let data = TensorData::I64(numbers.iter().map(|n| *n as i64).collect());
            tensors.insert(name.to_owned(), HostTensor { shape: vec![numbers.len()], data });
        };
        let mut position = self.loader.position();
        if let Some(Within { runs, report, .. }) = &self.within {
            // The batch is read again.
            position -= self.config.train.batch as u64;
            numbers(WITHIN, &[*runs as u64, report.tokens]);
        }
        numbers(COUNTERS, &[self.batches, self.steps, self.tokens, position]);
        let carried = self.within.as_ref().map(|_| (&self.carried, CARRIED));
        for (store, prefix) in [(&self.optimizer, "")].into_iter().chain(carried) {
            for name in store.names() {
                let ty = store.ty(&name)?;
                let data = match ty.dtype {
                    DType::I64 => TensorData::I64(store.get(&name)?),
                    _ => TensorData::F32(store.get(&name)?),
                };
                tensors.insert(format!("{prefix}{name}"), HostTensor { shape: ty.shape, data });
            }
        }
        for (number, store) in self.own.iter().flat_map(|own| own.needed(self.batches)) {
            for name in store.names() {
                let (shape, data) = (store.ty(&name)?.shape, TensorData::F32(store.get(&name)?));
                tensors.insert(format!("{OWN}{number}/{name}"), HostTensor { shape, data });
            }
        }
        let path = folder.join(STATE_FILE);
        let bytes = tensors::serialise_with(&tensors, &notes).map_err(|e| Error::file(&path, e))?;
        Ok(write_atomic(&path, &bytes)?)
    }

    /// Goes on from a checkpoint of the same config.
    pub fn load(&mut self, folder: &Path) -> Result<()> {
        let saved = Checkpoint::load(folder)?;
        let path = folder.join(STATE_FILE);
        if saved.config != self.config.model {
            let (kind, own) = (saved.config.kind(), self.config.model.kind());
            let got = if kind == own { "another".to_owned() } else { format!("a policy of kind {own}") };
            return Err(Error::Mismatch {
                what: "model of the resumed run",
                expected: format!("that of {}, a policy of kind {kind}", folder.display()),
                got,
                remedy: "this checkpoint's model is not the run's; resume with the run's own config",
            });
        }
        let (mut tensors, notes) = tensors::read_own(&path)?;
        // States of earlier versions do not say which weights they belong to.
        if let Some(note) = notes.get(FINGERPRINT) {
            let theirs: Fingerprint = note.parse().map_err(|problem: String| Error::file(&path, problem))?;
            let ours = saved.fingerprint()?;
            if !ours.same_parameters(theirs) {
                let problem = format!(
                    "it was saved beside other weights ({theirs}) than the model.safetensors there now \
                     ({ours}); take both from one checkpoint"
                );
                return Err(Error::file(&path, problem));
            }
        }
        let missing = |name: &str| {
            Error::file(&path, format!("no `{name}` of the expected type and shape: not a state of this run"))
        };
        let within = match tensors.remove(WITHIN).map(|t| t.data) {
            Some(TensorData::I64(within)) => Some(within),
            _ => None,
        };
        let mut states = Vec::new();
        let carried = within.as_ref().map(|_| (&self.carried, CARRIED));
        for (store, prefix) in [(&self.optimizer, "")].into_iter().chain(carried) {
            for name in store.names() {
                let ty = store.ty(&name)?;
                let fits = |t: &HostTensor| {
                    let same = match t.data {
                        TensorData::F32(_) => ty.dtype == DType::F32,
                        TensorData::I64(_) => ty.dtype == DType::I64,
                        TensorData::F64(_) | TensorData::U8(_) => false,
                    };
                    same && ty.shape == t.shape
                };
                let tensor = tensors.remove(&format!("{prefix}{name}")).filter(fits);
                states.push((tensor.ok_or_else(|| missing(&name))?, name, store.clone()));
            }
        }
        let runs = self.config.train.segments / self.architecture.window().unroll;
        let within = match within.as_deref() {
            None => None,
            Some(&[run, tokens]) if (1..runs as i64).contains(&run) && tokens >= 0 => {
                Some((run as usize, tokens as u64))
            }
            Some(_) => return Err(missing(WITHIN)),
        };
        let counters = match tensors.remove(COUNTERS).map(|t| t.data) {
            Some(TensorData::I64(counters)) if counters.len() == 4 && counters.iter().all(|n| *n >= 0) => {
                counters
            }
            _ => return Err(missing(COUNTERS)),
        };
        if let Some(own) = &self.own {
            own.restore(self.snapshots(&tensors).ok_or_else(|| missing(OWN))?);
        }
        // The batch is read before anything is changed: reading may fail.
        self.loader.seek(counters[3] as u64);
        let within = match within {
            None => None,
            Some((runs, tokens)) => {
                let report = BatchReport { tokens, ..BatchReport::default() };
                Some(Within { batch: self.loader.next_batch()?, runs, report })
            }
        };
        for name in saved.params.names() {
            self.params.set(&name, &saved.params.get::<f32>(&name)?)?;
        }
        for (tensor, name, store) in states {
            match tensor.data {
                TensorData::F32(data) => store.set(&name, &data)?,
                TensorData::I64(data) => store.set(&name, &data)?,
                TensorData::F64(_) | TensorData::U8(_) => return Err(missing(&name)),
            }
        }
        [self.batches, self.steps, self.tokens] = [0, 1, 2].map(|i| counters[i] as u64);
        self.within = within;
        Ok(())
    }
}

impl Trainer {
    /// The policy as it was, by numbers of batches, from the tensors of a state's file; none if some are missing
    /// or of another shape.
    fn snapshots(&self, tensors: &Tensors) -> Option<BTreeMap<u64, Store>> {
        let numbers = tensors.keys().filter_map(|name| name.strip_prefix(OWN)?.split('/').next());
        let numbers: BTreeSet<&str> = numbers.collect();
        let mut snapshots = BTreeMap::new();
        for number in numbers {
            let store = Store::new();
            for name in self.params.names() {
                let tensor = tensors.get(&format!("{OWN}{number}/{name}"))?;
                let ty = self.params.ty(&name).ok().filter(|ty| ty.shape == tensor.shape)?;
                let TensorData::F32(data) = &tensor.data else { return None };
                store.insert(&name, ty).ok()?;
                store.set(&name, data).ok()?;
            }
            snapshots.insert(number.parse().ok()?, store);
        }
        Some(snapshots)
    }
}

/// Name of the file beside the model that holds optimizer, generator and counters.
pub(crate) const STATE_FILE: &str = "state.safetensors";
