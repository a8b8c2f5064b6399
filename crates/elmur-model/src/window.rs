//! Programs over whole windows, for any architecture: training (forward, backward, update) and evaluation.
//!
//! Inputs lead with [windows, rows, steps]; [`WindowProgram::fields`] lists those that a dataset fills:
//!
//! | name | type | when |
//! |---|---|---|
//! | `observation` (or `observation.0`, ...) | floats, i32 or bytes by encoder | always |
//! | `targets` | discrete i64 [.., components], continuous [.., dim] | training |
//! | `mask` | bool: steps that are imitated | training, continuous actions |
//! | `weights` | weights of steps | training with [`TrainSettings::weights`] |
//! | `action` | discrete i32 [.., components] (the count means none), continuous [.., dim] | action tokens |
//! | `returns` | [.., 1] | return tokens |
//! | `reward`, `later_rewards`, `known_next`, `terminated`, `next_observation.0`, ... | | where the loss asks for them |
//! | `lr` | scalar | training |
//!
//! What follows from time alone is filled by [`WindowProgram::run`]. Where the data lies on the device
//! ([`TrainSettings::table`]) the fields are states with one row per step of the dataset instead, and one
//! input says which: `steps`, i32 [windows, rows, steps].

use std::collections::{BTreeMap, BTreeSet};

use elmur_base::{Field, StepWeights};
use elmur_engine::{AdamW, DType, Device, Graph, Program, Store, Value};

use crate::architecture::{Architecture, Group};
use crate::error::{Error, Result};
use crate::initial::Init;
use crate::net::{
    Average, Carried, Declared, Feed, Net, OPTIMIZER_STEPS, Pass, Progress, Source, fill_following,
    position_encodings,
};
use crate::statistic::Statistic;
use crate::vision::Augment;

/// How carried states begin in a program's run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// A new crop: every state as at the start of an episode.
    Fresh,
    /// The states that the previous run left.
    Continue,
}

/// Settings of a training program.
#[derive(Debug, Clone)]
pub struct TrainSettings {
    /// Rows of a batch.
    pub batch: usize,
    /// Label smoothing of discrete actions.
    pub label_smoothing: f64,
    /// Whether any accepted choice ([`Field::Accepted`]) is right instead of the target
    /// alone, where the action is one choice of a list.
    pub ties: bool,
    /// Optimizer; one group for all parameters, as in the published code.
    pub optimizer: AdamW,
    /// Global gradient norm above which gradients are scaled down.
    pub clip: f64,
    /// Element type: f32, or f64 for comparison with references.
    pub dtype: DType,
    /// Also output every gradient as `grad.<param>`.
    pub export_gradients: bool,
    /// Drop what the architecture drops in training; without it only random initial states are drawn.
    pub dropout: bool,
    /// Rows of the data's tables where the data lies on the device.
    pub table: Option<usize>,
    /// How pictures are changed; not where `dropout` is off.
    pub augment: Augment,
    /// Leaves of observations that are numbers from 0 to 1 for the policy and come as bytes, b for b / 255.
    pub bytes: Vec<usize>,
    /// Weights of steps in the imitation loss; none: all count alike.
    pub weights: Option<StepWeights>,
}

/// Name of the state that adds up what a batch brought: see [`training_graph`].
pub const REPORT: &str = "report";

/// Name of the input that is the share of a copy that an optimizer step leaves, where it changes from step to
/// step ([`Average::Warming`]).
const DECAY: &str = "decay";

/// Name of the random generator's state.
pub const RNG: &str = "rng";

/// A graph, and what its named tensors are.
#[derive(Debug)]
pub struct Built {
    /// The graph.
    pub graph: Graph,
    /// Parameters and how they start.
    pub params: BTreeMap<String, Init>,
    /// Parameters that are copies: the parameter that each follows, and how.
    pub averages: BTreeMap<String, (String, Average)>,
    /// Parameters that are computed from the training data, and what they hold.
    pub statistics: BTreeMap<String, Statistic>,
    /// States carried per row.
    pub carried: Vec<Carried>,
    /// Tables of data on the device, and the field each holds.
    pub tables: Vec<(String, Field)>,
    pub(crate) feeds: Vec<Feed>,
}

impl Built {
    fn new(net: Net<'_>) -> Result<Self> {
        let (graph, declared) = net.finish()?;
        let Declared { params, averages, statistics, carried, tables, feeds, .. } = declared;
        Ok(Self { graph, params, averages, statistics, carried, tables, feeds })
    }

    /// Names of the states that an optimizer keeps from one run to the next: moments, and the random
    /// generator.
    pub fn optimizer_states(&self) -> Vec<String> {
        let others: BTreeSet<&str> = (self.carried.iter().map(|c| c.name.as_str()))
            .chain(self.tables.iter().map(|(name, _)| name.as_str()))
            .chain([REPORT])
            .collect();
        let states = self.graph.states().map(|(name, _)| name);
        states.filter(|name| !others.contains(name)).map(str::to_owned).collect()
    }

    /// Adds zeros for the states of these names to a store.
    pub fn declare<'n>(&self, store: &Store, names: impl IntoIterator<Item = &'n str>) -> Result<()> {
        for name in names {
            store.insert(name, self.graph.ty(self.graph.value(name)?)?.clone())?;
        }
        Ok(())
    }
}

/// What a net of windows is for.
struct Windows {
    rows: usize,
    count: usize,
    dtype: DType,
    begin: Begin,
    /// In training: with dropout or without.
    training: Option<bool>,
    /// Rows of the data's tables on the device.
    table: Option<usize>,
    /// Only the parameters are looked at.
    only_params: bool,
    /// How pictures are changed in training.
    augment: Augment,
    /// Leaves that come as bytes.
    bytes: Vec<usize>,
}

/// The net of an architecture's windows, its hidden states [windows, rows, steps, width] and head outputs
/// [windows, rows, steps, outputs].
fn windows(architecture: &dyn Architecture, what: Windows) -> Result<(Net<'_>, Value, Value)> {
    let Windows { rows, count, dtype, begin, training, table, only_params, augment, bytes } = what;
    architecture.validate()?;
    let steps = architecture.window().steps;
    let pass = Pass::Windows { count, at: 0, fresh: begin == Begin::Fresh };
    let mut net = Net::new(architecture.ends(), dtype, pass, rows, steps);
    (net.only_params, net.augment, net.bytes) = (only_params, augment, bytes);
    if let Some(dropout) = training {
        net.rng = Some(net.g.rng(RNG)?);
        net.drops = dropout;
    }
    if let Some(table) = table {
        net.table = Some((table, net.g.input("steps", DType::I32, [count, rows, steps])?));
    }
    let (mut all_hidden, mut all_outputs) = (Vec::new(), Vec::new());
    for at in 0..count {
        net.pass = Pass::Windows { count, at, fresh: begin == Begin::Fresh };
        let hidden = architecture.forward(&mut net)?;
        let outputs = architecture.head(&mut net, hidden)?;
        for (value, all) in [(hidden, &mut all_hidden), (outputs, &mut all_outputs)] {
            let shape = [&[1], net.g.shape(value)?].concat();
            all.push(net.g.reshape(value, shape)?);
        }
    }
    let mut joined = |all: Vec<Value>| -> Result<Value> {
        Ok(if let [one] = all[..] { one } else { net.g.concat(&all, 0)? })
    };
    let (hidden, outputs) = (joined(all_hidden)?, joined(all_outputs)?);
    Ok((net, hidden, outputs))
}

/// Forward, backward and one AdamW step over `architecture.window().unroll` windows.
///
/// Outputs: `loss` (with the auxiliary part), `action_loss`, `aux_loss`, `gradient_norm`, `logits` [windows,
/// rows, steps, outputs]. The state [`REPORT`] holds the sums of loss, action loss, gradient norm and correct
/// discrete answers over the runs since the crop began.
pub fn training_graph(
    architecture: &dyn Architecture,
    settings: &TrainSettings,
    begin: Begin,
) -> Result<Built> {
    let count = architecture.window().unroll;
    let what = Windows {
        rows: settings.batch,
        count,
        dtype: settings.dtype,
        begin,
        training: Some(settings.dropout),
        table: settings.table,
        only_params: false,
        augment: settings.augment,
        bytes: settings.bytes.clone(),
    };
    let (mut net, hidden, logits) = windows(architecture, what)?;
    net.label_smoothing = settings.label_smoothing;
    (net.ties, net.weights) = (settings.ties, settings.weights);
    let parts = architecture.loss(&mut net, hidden, logits)?;
    let g = &mut net.g;
    let zero = |g: &mut Graph| g.scalar(settings.dtype, 0.0);
    let aux_loss = match parts.auxiliary {
        Some(value) => value,
        None => zero(g)?,
    };
    let correct = match parts.correct {
        Some(value) => value,
        None => zero(g)?,
    };
    let loss = g.add(parts.action, aux_loss)?;

    let params: Vec<(String, Value)> = g.params().map(|(name, value)| (name.to_owned(), value)).collect();
    let values: Vec<Value> = params.iter().map(|(_, value)| *value).collect();
    let grads = g.gradients(loss, &values)?;
    let mut groups: Vec<(Group, Vec<(Value, Value)>)> = Vec::new();
    for ((name, value), grad) in params.iter().zip(grads) {
        let Some(grad) = grad else { continue };
        let group = architecture.group(name);
        match groups.iter_mut().find(|(known, _)| *known == group) {
            Some((_, pairs)) => pairs.push((*value, grad)),
            None => groups.push((group, vec![(*value, grad)])),
        }
        if settings.export_gradients {
            g.output(&format!("grad.{name}"), grad)?;
        }
    }
    let all: Vec<Value> = groups.iter().flat_map(|(_, pairs)| pairs).map(|(_, grad)| *grad).collect();
    let norm = g.global_norm(&all)?;
    let lr = g.input("lr", settings.dtype, [])?;
    let mut trained: BTreeMap<String, Value> = BTreeMap::new();
    for (Group { lr_scale, decays }, pairs) in &groups {
        let weight_decay = if *decays { settings.optimizer.weight_decay } else { 0.0 };
        let lr_scale = settings.optimizer.lr_scale * lr_scale;
        let optimizer = AdamW { lr_scale, weight_decay, ..settings.optimizer };
        let new = g.adamw(optimizer, lr, Some((norm, settings.clip)), pairs)?;
        let name_of = |value: &Value| params.iter().find(|(_, known)| known == value).map(|(name, _)| name);
        let names = pairs.iter().filter_map(|(value, _)| name_of(value));
        trained.extend(names.cloned().zip(new));
    }
    follow(g, &net.declared.averages, &trained, settings.dtype)?;
    let report = g.state(REPORT, settings.dtype, [4])?;
    let total = (begin == Begin::Continue).then_some(report);
    let sums = g.sum_scalars(&[loss, parts.action, norm, correct], total)?;
    g.update(report, sums)?;
    for (name, value) in [
        ("loss", loss),
        ("action_loss", parts.action),
        ("aux_loss", aux_loss),
        ("gradient_norm", norm),
        ("logits", logits),
    ] {
        g.output(name, value)?;
    }
    Built::new(net)
}

/// Moves copies of parameters towards the parameters as the optimizer leaves them. A parameter that nothing
/// trains stays what it was, and so does its copy.
fn follow(
    g: &mut Graph,
    averages: &BTreeMap<String, (String, Average)>,
    trained: &BTreeMap<String, Value>,
    dtype: DType,
) -> Result<()> {
    let mut kinds: Vec<(Average, Vec<(Value, Value)>)> = Vec::new();
    for (copy, (parameter, average)) in averages {
        let Some(new) = trained.get(parameter) else { continue };
        let pair = (g.value(copy)?, *new);
        match kinds.iter_mut().find(|(known, _)| known == average) {
            Some((_, pairs)) => pairs.push(pair),
            None => kinds.push((*average, vec![pair])),
        }
    }
    for (average, pairs) in kinds {
        let decay = match average {
            Average::Constant(rate) => g.scalar(dtype, 1.0 - rate)?,
            Average::Warming(_) => g.input(DECAY, dtype, [])?,
        };
        g.moving_average(decay, &pairs)?;
    }
    Ok(())
}

/// One window forward, carried states updated: outputs `logits` [1, rows, steps, outputs] and `hidden` [1,
/// rows, steps, width].
pub fn evaluation_graph(
    architecture: &dyn Architecture,
    batch: usize,
    dtype: DType,
    begin: Begin,
) -> Result<Built> {
    let what = Windows {
        rows: batch,
        count: 1,
        dtype,
        begin,
        training: None,
        table: None,
        only_params: false,
        augment: Augment::default(),
        bytes: Vec::new(),
    };
    let (mut net, hidden, logits) = windows(architecture, what)?;
    net.g.output("hidden", hidden)?;
    net.g.output("logits", logits)?;
    Built::new(net)
}

/// A graph that declares every parameter of the architecture, in the given element type.
pub fn parameter_graph(architecture: &dyn Architecture, dtype: DType) -> Result<Built> {
    let (training, begin) = (Some(true), Begin::Fresh);
    // Constants are left out: a hostile file could ask for large ones.
    let what = Windows {
        rows: 1,
        count: 1,
        dtype,
        begin,
        training,
        table: None,
        only_params: true,
        augment: Augment::default(),
        bytes: Vec::new(),
    };
    let (mut net, hidden, outputs) = windows(architecture, what)?;
    // Some parameters belong to the loss alone.
    architecture.loss(&mut net, hidden, outputs)?;
    Built::new(net)
}

/// A compiled program over whole windows.
#[derive(Debug)]
pub struct WindowProgram {
    /// The program, to set inputs and read outputs.
    pub program: Program,
    fields: Vec<(String, Field)>,
    clocks: Vec<Feed>,
    windows: usize,
    tokens: usize,
    /// What decides the input [`DECAY`], if there is one.
    warming: Option<Average>,
    /// The window that the clocks stand at.
    first: Option<u64>,
}

impl WindowProgram {
    /// Compiles a graph of this module for a device, bound to its stores.
    pub fn new(
        built: &Built,
        architecture: &dyn Architecture,
        device: impl Into<Device>,
        stores: &[&Store],
    ) -> Result<Self> {
        let program = Program::new(&built.graph, device, stores)?;
        let (mut fields, mut clocks) = (Vec::new(), Vec::new());
        for feed in &built.feeds {
            match feed.source {
                Source::Field(field) => fields.push((feed.name.clone(), field)),
                _ => clocks.push(feed.clone()),
            }
        }
        let windows = program.output_type("logits")?.shape[0];
        let tokens = architecture.window().steps * architecture.ends().tokens.per_step();
        let mut averages = built.averages.values().map(|(_, average)| *average);
        let warming = averages.find(|average| matches!(average, Average::Warming(_)));
        Ok(Self { program, fields, clocks, windows, tokens, warming, first: None })
    }

    /// Sets what a training program needs beside the data: the learning rate, and the number of optimizer
    /// steps before this one.
    pub fn set_rates(&mut self, lr: f64, step: u64) -> Result<()> {
        let decay = self.warming.map(|average| (DECAY, average.decay(step)));
        let counts = self.program.input_type(OPTIMIZER_STEPS).is_ok();
        let steps = counts.then_some((OPTIMIZER_STEPS, step as f64));
        for (name, x) in [("lr", lr)].into_iter().chain(decay).chain(steps) {
            match self.program.input_type(name)?.dtype {
                DType::F64 => self.program.set(name, &[x])?,
                _ => self.program.set(name, &[x as f32])?,
            }
        }
        Ok(())
    }

    /// The inputs that a dataset fills, each [windows, rows, steps, ...], and the field that each takes.
    pub fn fields(&self) -> &[(String, Field)] {
        &self.fields
    }

    /// Windows that one run computes.
    pub fn windows(&self) -> usize {
        self.windows
    }

    /// Runs windows `first..first + windows` of every row's crop.
    pub fn run(&mut self, first: u64) -> Result<()> {
        if self.first != Some(first) {
            self.set_clocks(first)?;
            self.first = Some(first);
        }
        Ok(self.program.run()?)
    }

    /// Fills the inputs that follow from time alone.
    fn set_clocks(&mut self, first: u64) -> Result<()> {
        let tokens = self.tokens as u64;
        let starts: Vec<u64> = (first..first + self.windows as u64).map(|k| k * tokens).collect();
        for feed in &self.clocks {
            let Feed { name, source } = feed;
            match source {
                &Source::Times { count, newest_first, .. } => {
                    let times = starts.iter().flat_map(|start| token_times(*start, count, newest_first));
                    self.program.set(name, &times.collect::<Vec<i64>>())?;
                }
                Source::Newest => {
                    let newest = self.program.input_mut::<i64>(name)?;
                    let rows = newest.len() / starts.len();
                    for (row, start) in newest.chunks_exact_mut(rows).zip(&starts) {
                        row.fill((start + tokens) as i64 - 1);
                    }
                }
                &Source::Encodings { count, width } => {
                    let table: Vec<f64> =
                        starts.iter().flat_map(|s| position_encodings(*s, count, width)).collect();
                    match self.program.input_type(name)?.dtype {
                        DType::F64 => self.program.set(name, &table)?,
                        _ => self
                            .program
                            .set(name, &table.into_iter().map(|x| x as f32).collect::<Vec<_>>())?,
                    }
                }
                Source::Integers(_) | Source::Floats(_) => {
                    let progress = |i: usize| Progress {
                        window: first + i as u64,
                        first: 0,
                        tokens: self.tokens,
                        seed: 0,
                    };
                    fill_following(&mut self.program, feed, (0..self.windows).map(progress))?;
                }
                _ => return Err(Error::input("window", "inputs of whole windows", format!("`{name}`"))),
            }
        }
        Ok(())
    }
}

/// Times of a window of `count` tokens that starts at `start`, as biases see them.
pub(crate) fn token_times(start: u64, count: usize, newest_first: bool) -> impl Iterator<Item = i64> {
    let (start, count) = (start as i64, count as i64);
    (0..count).map(move |i| if newest_first { start + count - 1 - i } else { start + i })
}
