//! One batch after the other. What a trainer is lies in its store and three counters, so saving and resuming are exact.

use std::collections::VecDeque;
use std::path::Path;

use elmur_base::{Field, FieldMut};
use elmur_data::{Dataset, Sampler, Window};
use elmur_engine::{AdamW, DType, Device, Program, Readback, Store};
use elmur_model::config::{Action, Observation, Token};
use elmur_model::segments::{REPORT, SegmentClock, Start, TrainSettings, training_graph};
use elmur_model::tensors::{self, HostTensor, Numbers, Tensors};
use elmur_model::{Checkpoint, init};

use crate::config::{RunConfig, check_spaces, has_token};
use crate::error::{Error, Result};
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

/// Trains one model on one dataset.
#[derive(Debug)]
pub struct Trainer<'a> {
    config: RunConfig,
    dataset: &'a Dataset,
    /// The data on the device, where it lies there.
    resident: Option<Resident>,
    store: Store,
    /// The first run of a crop, and the others.
    programs: [Program; 2],
    sampler: Sampler,
    batches: u64,
    steps: u64,
    tokens: u64,
    /// Batches that are being computed: what is known of them, and what is still to be read.
    waiting: VecDeque<BatchReport>,
    sums: Readback<f32>,
}

/// Names of what a checkpoint's state holds besides the store's.
const COUNTERS: &str = "trainer.counters";

impl<'a> Trainer<'a> {
    /// A model with fresh weights.
    pub fn new(config: &RunConfig, dataset: &'a Dataset, device: impl Into<Device>) -> Result<Self> {
        let device = device.into();
        config.validate()?;
        check_spaces(&config.model, dataset.spaces(), "dataset")?;
        let t = &config.train;
        let settings = TrainSettings {
            batch: t.batch,
            label_smoothing: t.label_smoothing,
            optimizer: AdamW { betas: t.betas, weight_decay: t.weight_decay, ..AdamW::default() },
            clip: t.clip,
            dtype: DType::F32,
            export_gradients: false,
            table: Resident::rows(&config.model, dataset, &device),
        };
        let resident = match settings.table {
            Some(_) => {
                let graph = training_graph(&config.model, &settings, Start::Fresh)?;
                Some(Resident::new(&graph, dataset, &device)?)
            }
            None => None,
        };
        let store = init::parameters(&config.model, t.seed)?;
        if t.standardize {
            standardize(&config.model, dataset, &store)?;
        }
        let store = store.to(&device)?;
        let program = |start: Start| -> Result<Program> {
            let graph = training_graph(&config.model, &settings, start)?;
            // What lies in the data's own store is not declared twice.
            store.declare_params(&graph)?;
            for (name, value) in graph.states() {
                if !name.starts_with(crate::resident::PREFIX) {
                    store.insert(name, graph.ty(value)?.clone())?;
                }
            }
            match &resident {
                Some(resident) => Ok(Program::new(&graph, &device, &[&store, resident.store()])?),
                None => Ok(Program::new(&graph, &device, &[&store])?),
            }
        };
        let programs = [program(Start::Fresh)?, program(Start::Continue)?];
        store.set("rng", &[t.seed as i64, 0])?;
        let sampler = Sampler::new(dataset, config.crop(), t.seed);
        let sums = store.readback(REPORT)?;
        Ok(Self {
            config: config.clone(),
            dataset,
            resident,
            store,
            programs,
            sampler,
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
        let whole = t.epochs.saturating_mul(self.sampler.epoch_len() as u64).div_ceil(t.batch as u64);
        match (t.epochs, t.batches) {
            (0, limit) => limit,
            (_, 0) => whole,
            (_, limit) => whole.min(limit),
        }
    }

    /// Parameters and states; parameters are shared with whoever holds the store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// A checkpoint of the parameters as they are.
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint { config: self.config.model.clone(), params: self.store.clone() }
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        self.store.device()
    }

    /// One batch: all segments of one crop per row, one optimizer step per `model.memory.gradient` segments.
    ///
    /// Where the loss is not a finite number below `train.max_loss` the error says so; the parameters are spoilt then. Reports of batches
    /// from [`Trainer::queue`] must have been taken.
    pub fn step(&mut self) -> Result<BatchReport> {
        self.queue()?;
        self.report()
    }

    /// Begins a batch. On a GPU this returns before it is done, so that the next can be prepared meanwhile; [`Trainer::report`] tells how
    /// it went.
    pub fn queue(&mut self) -> Result<()> {
        let (model, t) = (&self.config.model, &self.config.train);
        let through = model.memory.gradient.segments();
        let crops = self.sampler.next_crops(t.batch);
        let runs = t.segments / through;
        let mut report = BatchReport::default();
        let mut counted = vec![false; t.batch * model.segment_length];
        for run in 0..runs {
            let program = &mut self.programs[usize::from(run > 0)];
            for k in 0..through {
                let offset = (run * through + k) * model.segment_length;
                let window =
                    Window { dataset: self.dataset, crops: &crops, offset, length: model.segment_length };
                window.fill(Field::Imitate, FieldMut::Bool(&mut counted))?;
                report.tokens += counted.iter().filter(|c| **c).count() as u64;
                match &self.resident {
                    Some(resident) => resident.fill(part(program, "steps", k, through)?, window),
                    None => fill(program, model, window, k, through, &counted)?,
                }
            }
            SegmentClock::set(model, program, (run * through) as u64)?;
            self.steps += 1;
            let seen = self.tokens + report.tokens;
            report.lr = t.lr * self.factor(runs as u64, seen);
            let program = &mut self.programs[usize::from(run > 0)];
            program.set("lr", &[report.lr as f32])?;
            program.run()?;
        }
        self.sums.ask()?;
        self.tokens += report.tokens;
        self.batches += 1;
        report.batch = self.batches;
        report.epoch = self.sampler.position() as f64 / self.sampler.epoch_len() as f64;
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
        let (model, t) = (&self.config.model, &self.config.train);
        let runs = (t.segments / model.memory.gradient.segments()) as f64;
        let [loss, action_loss, norm, right] = [0, 1, 2, 3].map(|i| f64::from(sums[i]));
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
        let answers = report.tokens as usize * model.action.dim();
        report.accuracy =
            if model.action.is_discrete() && answers > 0 { right / answers as f64 } else { 0.0 };
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
        self.checkpoint().save(folder)?;
        let counters = [self.batches, self.steps, self.tokens, self.sampler.position()];
        let mut tensors = Tensors::new();
        let counters = Numbers::I64(counters.iter().map(|n| *n as i64).collect());
        tensors.insert(COUNTERS.to_owned(), HostTensor { shape: vec![4], numbers: counters });
        for name in self.state_names()? {
            let ty = self.store.ty(&name)?;
            let numbers = match ty.dtype {
                DType::I64 => Numbers::I64(self.store.get(&name)?),
                _ => Numbers::F32(self.store.get(&name)?),
            };
            tensors.insert(name, HostTensor { shape: ty.shape, numbers });
        }
        let path = folder.join(STATE_FILE);
        let bytes = tensors::serialise(&tensors).map_err(|e| Error::file(&path, e))?;
        Ok(tensors::write_atomic(&path, &bytes)?)
    }

    /// States that must survive: optimizer and generator. Memories start anew with every crop.
    fn state_names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        let graph = elmur_model::segments::parameter_graph(&self.config.model, DType::F32)?;
        let params: std::collections::BTreeSet<&str> = graph.params().map(|(name, _)| name).collect();
        for name in self.store.names() {
            let passing = name.starts_with("memory.") || name.starts_with("anchors.") || name == REPORT;
            if !params.contains(name.as_str()) && !passing {
                names.push(name);
            }
        }
        Ok(names)
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
        let mut tensors = tensors::read(&path)?;
        let missing = |name: &str| {
            Error::file(&path, format!("no `{name}` of the expected type and shape: not a state of this run"))
        };
        let mut states = Vec::new();
        for name in self.state_names()? {
            let ty = self.store.ty(&name)?;
            let fits = |t: &HostTensor| {
                let same = match t.numbers {
                    Numbers::F32(_) => ty.dtype == DType::F32,
                    Numbers::I64(_) => ty.dtype == DType::I64,
                    Numbers::F64(_) => false,
                };
                same && ty.shape == t.shape
            };
            let tensor = tensors.remove(&name).filter(fits);
            states.push((tensor.ok_or_else(|| missing(&name))?, name));
        }
        let counters = match tensors.remove(COUNTERS).map(|t| t.numbers) {
            Some(Numbers::I64(counters)) if counters.len() == 4 && counters.iter().all(|n| *n >= 0) => {
                counters
            }
            _ => return Err(missing(COUNTERS)),
        };
        // Everything has been checked; from here on nothing fails half-way.
        let graph = elmur_model::segments::parameter_graph(&self.config.model, DType::F32)?;
        for (name, _) in graph.params() {
            self.store.set(name, &saved.params.get::<f32>(name)?)?;
        }
        for (tensor, name) in states {
            match tensor.numbers {
                Numbers::F32(data) => self.store.set(&name, &data)?,
                Numbers::I64(data) => self.store.set(&name, &data)?,
                Numbers::F64(_) => return Err(missing(&name)),
            }
        }
        [self.batches, self.steps, self.tokens] = [0, 1, 2].map(|i| counters[i] as u64);
        self.sampler.seek(counters[3] as u64);
        Ok(())
    }
}

/// Name of the file beside the model that holds optimizer, generator and counters.
pub(crate) const STATE_FILE: &str = "state.safetensors";

/// Entry k of an input whose first axis has `count` entries.
fn part<'p, T: elmur_engine::Element>(
    program: &'p mut Program,
    name: &str,
    k: usize,
    count: usize,
) -> Result<&'p mut [T]> {
    let data = program.input_mut::<T>(name)?;
    let each = data.len() / count;
    Ok(&mut data[k * each..(k + 1) * each])
}

/// Fills entry `k` of `count` of the program's inputs from a window of the data, in which the `counted` steps count.
fn fill(
    program: &mut Program,
    model: &elmur_model::ModelConfig,
    window: Window<'_>,
    k: usize,
    count: usize,
    counted: &[bool],
) -> Result<()> {
    let parts = match &model.observation {
        Observation::Parts(parts) => {
            parts.iter().enumerate().map(|(i, part)| (format!("observation.{i}"), part)).collect()
        }
        one => vec![("observation".to_owned(), one)],
    };
    for (leaf, (name, observation)) in parts.into_iter().enumerate() {
        match observation {
            Observation::Categorical { .. } => {
                let out = FieldMut::I32(part(program, &name, k, count)?);
                window.fill(Field::Observation(leaf), out)?;
            }
            _ => window.fill(Field::Observation(leaf), FieldMut::F32(part(program, &name, k, count)?))?,
        }
    }
    match &model.action {
        Action::Continuous { .. } => {
            window.fill(Field::Target, FieldMut::F32(part(program, "targets", k, count)?))?;
            part::<bool>(program, "mask", k, count)?.copy_from_slice(counted);
        }
        _ => window.fill(Field::Target, FieldMut::I64(part(program, "targets", k, count)?))?,
    }
    if has_token(model, Token::Action) {
        match &model.action {
            Action::Continuous { .. } => {
                window.fill(Field::Action, FieldMut::F32(part(program, "action", k, count)?))?;
            }
            _ => window.fill(Field::Action, FieldMut::I32(part(program, "action", k, count)?))?,
        }
    }
    if has_token(model, Token::Return) {
        window.fill(Field::ReturnToGo, FieldMut::F32(part(program, "returns", k, count)?))?;
    }
    Ok(())
}
