//! One batch after the other. A trainer's whole state is its parameters, its optimizer's states and four
//! counters (batches, optimizer steps, imitated actions, sampler position), so saving and resuming are exact.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use elmur_base::files::write_atomic;
use elmur_data::{Buffer, Loader, Request, Sampler, Source, Window};
use elmur_engine::{AdamW, DType, Device, Readback, Store};
use elmur_model::checkpoint::FINGERPRINT;
use elmur_model::tensors::{self, HostTensor, Notes, TensorData, Tensors};
use elmur_model::window::{Begin, REPORT, RNG, TrainSettings, WindowProgram, training_graph};
use elmur_model::{Architecture, Checkpoint, Fingerprint, init};

use crate::config::RunConfig;
use crate::error::{Error, Result};
use crate::feed::{fill_inputs, request};
use crate::resident::Resident;
use crate::schedule::Unit;
use crate::standardize::standardize;

/// What a batch brought; means over its optimizer steps.
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
    /// Share of imitated discrete actions that were the likeliest.
    pub accuracy: f64,
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
    /// The first run of a crop and, where there are others, those.
    programs: Vec<WindowProgram>,
    /// Reads the batches that come next.
    loader: Loader,
    request: Request,
    /// Crops in one epoch.
    epoch_len: u64,
    batches: u64,
    steps: u64,
    tokens: u64,
    /// Batches that are being computed: what is known of them, and what is still to be read.
    waiting: VecDeque<BatchReport>,
    sums: Readback<f32>,
}

/// Names of what a checkpoint's state holds besides the store's.
const COUNTERS: &str = "trainer.counters";

impl Trainer {
    /// A policy with fresh weights that learns from `source`.
    pub fn new(config: &RunConfig, source: &Arc<dyn Source>, device: impl Into<Device>) -> Result<Self> {
        let device = device.into();
        config.validate()?;
        let architecture: Arc<dyn Architecture> = (&config.model).into();
        architecture.ends().check(source.spaces(), "dataset")?;
        let t = &config.train;
        let settings = TrainSettings {
            batch: t.batch,
            label_smoothing: t.label_smoothing,
            optimizer: AdamW { betas: t.betas, weight_decay: t.weight_decay, ..AdamW::default() },
            clip: t.clip,
            dtype: DType::F32,
            export_gradients: false,
            dropout: true,
            table: Resident::rows(&*architecture, &**source, &device),
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
        if t.standardize {
            standardize(architecture.ends(), &**source, &params)?;
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
        let sampler = Sampler::new(&**source, config.crop(), t.seed);
        let epoch_len = sampler.epoch_len() as u64;
        let request = request(&programs, t.batch, t.segments, architecture.window().steps)?;
        let loader = Loader::new(source, sampler, request.clone());
        let sums = carried.readback(REPORT)?;
        Ok(Self {
            config: config.clone(),
            architecture: Arc::clone(&architecture),
            source: Arc::clone(source),
            resident,
            params,
            optimizer,
            programs,
            loader,
            request,
            epoch_len,
            batches: 0,
            steps: 0,
            tokens: 0,
            waiting: VecDeque::new(),
            sums,
        })
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
        let whole = t.epochs.saturating_mul(self.epoch_len).div_ceil(t.batch as u64);
        match (t.epochs, t.batches) {
            (0, limit) => limit,
            (_, 0) => whole,
            (_, limit) => whole.min(limit),
        }
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
        let t = &self.config.train;
        let window = self.architecture.window();
        let batch = self.loader.next_batch()?;
        let runs = t.segments / window.unroll;
        let mut report = BatchReport::default();
        for run in 0..runs {
            let program = &mut self.programs[usize::from(run > 0)];
            if let Some(Buffer::Bool(imitated)) = batch.fields.first() {
                let each = imitated.len() / runs;
                let imitated = &imitated[run * each..(run + 1) * each];
                report.tokens += imitated.iter().filter(|imitate| **imitate).count() as u64;
            }
            match &self.resident {
                Some(resident) => {
                    for k in 0..window.unroll {
                        let offset = (run * window.unroll + k) * window.steps;
                        let (source, crops) = (&*self.source, &batch.crops[..]);
                        resident.fill(program, k, Window { source, crops, offset, length: window.steps })?;
                    }
                }
                None => fill_inputs(program, &self.request, &batch.fields, run)?,
            }
            self.steps += 1;
            let seen = self.tokens + report.tokens;
            report.lr = t.lr * self.factor(runs as u64, seen);
            let program = &mut self.programs[usize::from(run > 0)];
            program.program.set("lr", &[report.lr as f32])?;
            program.run((run * window.unroll) as u64)?;
        }
        self.loader.recycle(batch);
        self.sums.ask()?;
        self.tokens += report.tokens;
        self.batches += 1;
        report.batch = self.batches;
        report.epoch = self.loader.position() as f64 / self.epoch_len as f64;
        self.waiting.push_back(report);
        Ok(())
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
        report.accuracy = if action.is_discrete() && answers > 0 { correct / answers as f64 } else { 0.0 };
        Ok(report)
    }

    fn factor(&self, steps_per_batch: u64, tokens: u64) -> f64 {
        let schedule = &self.config.train.schedule;
        let planned = self.planned_batches();
        match schedule.unit {
            Unit::Steps => schedule.factor(self.steps, planned.saturating_mul(steps_per_batch)),
            // Tokens to come are guessed from those that came.
            Unit::Tokens => {
                let per_batch = tokens as f64 / (self.steps as f64 / steps_per_batch as f64);
                schedule.factor(tokens, (per_batch * planned as f64) as u64)
            }
        }
    }

    /// Writes model and state into the folder.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let checkpoint = self.checkpoint();
        checkpoint.save(folder)?;
        let notes = Notes::from([(FINGERPRINT.to_owned(), checkpoint.fingerprint()?.to_string())]);
        let counters = [self.batches, self.steps, self.tokens, self.loader.position()];
        let mut tensors = Tensors::new();
        let counters = TensorData::I64(counters.iter().map(|n| *n as i64).collect());
        tensors.insert(COUNTERS.to_owned(), HostTensor { shape: vec![4], data: counters });
        for name in self.optimizer.names() {
            let ty = self.optimizer.ty(&name)?;
            let data = match ty.dtype {
                DType::I64 => TensorData::I64(self.optimizer.get(&name)?),
                _ => TensorData::F32(self.optimizer.get(&name)?),
            };
            tensors.insert(name, HostTensor { shape: ty.shape, data });
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
            return Err(Error::file(
                folder,
                "this checkpoint's model is not the run's; resume with the run's own config",
            ));
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
        let mut states = Vec::new();
        for name in self.optimizer.names() {
            let ty = self.optimizer.ty(&name)?;
            let fits = |t: &HostTensor| {
                let same = match t.data {
                    TensorData::F32(_) => ty.dtype == DType::F32,
                    TensorData::I64(_) => ty.dtype == DType::I64,
                    TensorData::F64(_) | TensorData::U8(_) => false,
                };
                same && ty.shape == t.shape
            };
            let tensor = tensors.remove(&name).filter(fits);
            states.push((tensor.ok_or_else(|| missing(&name))?, name));
        }
        let counters = match tensors.remove(COUNTERS).map(|t| t.data) {
            Some(TensorData::I64(counters)) if counters.len() == 4 && counters.iter().all(|n| *n >= 0) => {
                counters
            }
            _ => return Err(missing(COUNTERS)),
        };
        // Everything has been checked; from here on nothing fails half-way.
        for name in saved.params.names() {
            self.params.set(&name, &saved.params.get::<f32>(&name)?)?;
        }
        for (tensor, name) in states {
            match tensor.data {
                TensorData::F32(data) => self.optimizer.set(&name, &data)?,
                TensorData::I64(data) => self.optimizer.set(&name, &data)?,
                TensorData::F64(_) | TensorData::U8(_) => return Err(missing(&name)),
            }
        }
        [self.batches, self.steps, self.tokens] = [0, 1, 2].map(|i| counters[i] as u64);
        self.loader.seek(counters[3] as u64);
        Ok(())
    }
}

/// Name of the file beside the model that holds optimizer, generator and counters.
pub(crate) const STATE_FILE: &str = "state.safetensors";
