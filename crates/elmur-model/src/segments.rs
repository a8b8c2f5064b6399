//! Whole-segment programs: training (forward, backward, update) and evaluation.
//!
//! Inputs, for k segments of L steps (T tokens) and a batch of B, all leading with k:
//!
//! | name | type | when |
//! |---|---|---|
//! | `observation` (or `observation.0`, ...) | [k, B, L, dim], i32 for categorical, [.., C, H, W] for images | always |
//! | `targets` | discrete i64 [k, B, L, components], continuous [k, B, L, dim] | training |
//! | `mask` | bool [k, B, L]: steps that count | training, continuous actions |
//! | `action` | discrete i32 [k, B, L, components] (the count means none), continuous [k, B, L, dim] | action tokens |
//! | `returns` | [k, B, L, 1] | return tokens |
//! | `times`, `newest` | i64 [k, 1, T] and [k, B]: filled by [`SegmentClock`] | always |
//! | `encodings` | [k, T, d]: filled by [`SegmentClock`] | `compat.absolute_offset` |
//! | `lr` | scalar | training |
//!
//! Where the data lies on the device ([`TrainSettings::table`]) the observations, targets and mask are states `data.<name>` with one row per
//! step of the dataset instead, and one input says which: `steps`, i32 [k, B, L].

use elmur_engine::{AdamW, CrossEntropy, DType, Graph, Program, Value};

use crate::config::{Action, Ffn, ModelConfig, Observation, Token};
use crate::error::{Error, Result};
use crate::net::{MemoryValue, Net, Sources, Times, WriteMask, position_encodings};

/// How the memory starts in a program's run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// A new crop: random or learned memory, empty slots.
    Fresh,
    /// The memory that the previous run left in the states `memory.<i>` and `anchors.<i>`.
    Continue,
}

/// Settings of a training program.
#[derive(Debug, Clone)]
pub struct TrainSettings {
    /// Rows of a batch.
    pub batch: usize,
    /// Label smoothing of discrete actions.
    pub label_smoothing: f64,
    /// Optimizer; one group for all parameters, as in the published code.
    pub optimizer: AdamW,
    /// Global gradient norm above which gradients are scaled down.
    pub clip: f64,
    /// Element type: f32, or f64 for comparison with references.
    pub dtype: DType,
    /// Also output every gradient as `grad.<param>`.
    pub export_gradients: bool,
    /// Rows of the data's tables where the data lies on the device; for models of observation tokens only.
    pub table: Option<usize>,
}

/// Name of the state that adds up what a batch brought: see [`training_graph`].
pub const REPORT: &str = "report";

/// Targets with this value do not count.
pub const IGNORED: i64 = -10;

/// Name of the state that holds layer `i`'s memory vectors, [B, M, d].
pub fn memory_state(i: usize) -> String {
    format!("memory.{i}")
}

/// Name of the state that holds layer `i`'s anchors, i64 [B, M].
pub fn anchor_state(i: usize) -> String {
    format!("anchors.{i}")
}

/// Forward, backward and one AdamW step over `config.memory.gradient` segments.
///
/// Outputs: `loss` (with load balancing), `action_loss`, `aux_loss`, `gradient_norm`, `logits` [k, B, L, outputs]. The state [`REPORT`]
/// holds the sums of loss, action loss, gradient norm and right discrete answers over the runs since the crop began.
pub fn training_graph(config: &ModelConfig, settings: &TrainSettings, start: Start) -> Result<Graph> {
    config.validate()?;
    let mut g = Graph::new();
    let rng = g.rng("rng")?;
    let count = config.memory.gradient.segments();
    let mut net = Net::new(&mut g, config, settings.dtype, Some(rng));
    if let Some(rows) = settings.table {
        if config.tokens.per_step() > 1 {
            let got = format!("{:?}", config.tokens);
            return Err(Error::input("table", "a model whose tokens are observations", got));
        }
        let lead = [count, settings.batch, config.segment_length];
        net.table = Some((rows, net.g.input("steps", DType::I32, lead)?));
    }
    let logits = net.segments(settings.batch, count, start)?;
    let (action_loss, right) = net.action_loss(logits, settings.batch, count, settings.label_smoothing)?;
    let routes = std::mem::take(&mut net.routes);
    let aux_loss = match &config.ffn {
        Ffn::Moe { experts, balance, .. } if !routes.is_empty() => {
            let sum = g.load_balancing_losses(&routes, *experts)?;
            // A mean over segments, like the action loss.
            g.scale(sum, balance / count as f64)?
        }
        _ => g.scalar(settings.dtype, 0.0)?,
    };
    let loss = g.add(action_loss, aux_loss)?;

    let params: Vec<(String, Value)> = g.params().map(|(name, value)| (name.to_owned(), value)).collect();
    let values: Vec<Value> = params.iter().map(|(_, value)| *value).collect();
    let grads = g.gradients(loss, &values)?;
    let mut pairs = Vec::new();
    for ((name, value), grad) in params.iter().zip(grads) {
        if let Some(grad) = grad {
            pairs.push((*value, grad));
            if settings.export_gradients {
                g.output(&format!("grad.{name}"), grad)?;
            }
        }
    }
    let all: Vec<Value> = pairs.iter().map(|(_, grad)| *grad).collect();
    let norm = g.global_norm(&all)?;
    let lr = g.input("lr", settings.dtype, [])?;
    g.adamw(settings.optimizer, lr, Some((norm, settings.clip)), &pairs)?;
    let report = g.state(REPORT, settings.dtype, [4])?;
    let total = (start == Start::Continue).then_some(report);
    let sums = g.sum_scalars(&[loss, action_loss, norm, right], total)?;
    g.update(report, sums)?;
    for (name, value) in [
        ("loss", loss),
        ("action_loss", action_loss),
        ("aux_loss", aux_loss),
        ("gradient_norm", norm),
        ("logits", logits),
    ] {
        g.output(name, value)?;
    }
    Ok(g)
}

/// One segment forward, memory updated: output `logits` [1, B, L, outputs].
pub fn evaluation_graph(config: &ModelConfig, batch: usize, dtype: DType) -> Result<Graph> {
    config.validate()?;
    let mut g = Graph::new();
    let mut net = Net::new(&mut g, config, dtype, None);
    let logits = net.segments(batch, 1, Start::Continue)?;
    g.output("logits", logits)?;
    Ok(g)
}

/// A graph that declares every parameter of the model, in the given element type.
pub fn parameter_graph(config: &ModelConfig, dtype: DType) -> Result<Graph> {
    config.validate()?;
    let mut g = Graph::new();
    let rng = g.rng("rng")?;
    Net::new(&mut g, config, dtype, Some(rng)).segments(1, 1, Start::Fresh)?;
    Ok(g)
}

impl Net<'_> {
    /// `count` segments from the graph's inputs; memory states are updated. Returns logits [count, B, L, outputs].
    fn segments(&mut self, batch: usize, count: usize, start: Start) -> Result<Value> {
        let config = self.config;
        let (length, tokens, d) = (config.segment_length, config.segment_tokens(), config.d_model);
        let sources = self.declare_sources(&[count, batch, length])?;
        let times = self.g.input("times", DType::I64, [count, 1, tokens])?;
        let newest = self.g.input("newest", DType::I64, [count, batch])?;
        let encodings = if config.compat.absolute_offset {
            self.g.input("encodings", self.dtype, [count, tokens, d])?
        } else {
            let table = position_encodings(0, tokens, d);
            self.float_constant(&table, [1, tokens, d])?
        };
        let mut memories = Vec::new();
        let mut states = Vec::new();
        for i in 0..config.memories() {
            let vectors = self.g.state(&memory_state(i), self.dtype, [batch, config.memory.slots, d])?;
            let anchors = self.g.state(&anchor_state(i), DType::I64, [batch, config.memory.slots])?;
            states.push(MemoryValue { vectors, anchors });
            memories.push(match start {
                Start::Continue => MemoryValue { vectors, anchors },
                Start::Fresh => self.initial_memory(i, batch)?,
            });
        }
        let mut logits = Vec::new();
        for k in 0..count {
            let source = self.segment_sources(&sources, k)?;
            let x = self.embed(config.tokens.tokens(), &source)?;
            let segment_times =
                Times { tokens: self.part(times, k, &[1, tokens])?, newest: self.part(newest, k, &[batch])? };
            let row = if config.compat.absolute_offset { k } else { 0 };
            let table = self.part(encodings, row, &[tokens, d])?;
            let (hidden, _) = self.segment(x, &mut memories, segment_times, table, WriteMask::default())?;
            let y = self.head(hidden, config.tokens.per_step(), config.tokens.observation_index())?;
            let outputs = config.action.outputs();
            logits.push(self.g.reshape(y, [1, batch, length, outputs])?);
        }
        for (state, memory) in states.iter().zip(&memories) {
            self.g.update(state.vectors, memory.vectors)?;
            if memory.anchors != state.anchors {
                self.g.update(state.anchors, memory.anchors)?;
            }
        }
        if logits.len() == 1 { Ok(logits[0]) } else { Ok(self.g.concat(&logits, 0)?) }
    }

    pub(crate) fn float_constant(&mut self, data: &[f64], shape: impl Into<Vec<usize>>) -> Result<Value> {
        Ok(match self.dtype {
            DType::F64 => self.g.constant(data, shape)?,
            _ => self.g.constant(&data.iter().map(|x| *x as f32).collect::<Vec<_>>(), shape)?,
        })
    }

    /// Entry `k` of a value along its first axis, in the given shape.
    fn part(&mut self, value: Value, k: usize, shape: &[usize]) -> Result<Value> {
        let part = self.g.slice(value, 0, k..k + 1)?;
        Ok(self.g.reshape(part, shape)?)
    }

    /// Declares the inputs that tokens are made of, with the given leading axes.
    pub(crate) fn declare_sources(&mut self, lead: &[usize]) -> Result<Sources> {
        let config = self.config;
        let shaped = |rest: &[usize]| [lead, rest].concat();
        let declare = |net: &mut Self, name: &str, observation: &Observation| -> Result<Value> {
            let (dtype, each) = match observation {
                Observation::Vector { dim } => (net.dtype, vec![*dim]),
                Observation::Categorical { sizes, .. } => (DType::I32, vec![sizes.len()]),
                Observation::Image { channels, height, width } => {
                    (net.dtype, vec![*channels, *height, *width])
                }
                Observation::Parts(_) => (net.dtype, vec![1]), // refused by `validate`
            };
            net.source(name, dtype, lead, &each)
        };
        let observation = match &config.observation {
            Observation::Parts(parts) => {
                let parts = parts.iter().enumerate();
                parts
                    .map(|(i, part)| declare(self, &format!("observation.{i}"), part))
                    .collect::<Result<Vec<_>>>()?
            }
            one => vec![declare(self, "observation", one)?],
        };
        let tokens = config.tokens.tokens();
        // Unused sources stand in for absent ones.
        let action = if tokens.contains(&Token::Action) {
            let dtype = if config.action.is_discrete() { DType::I32 } else { self.dtype };
            self.g.input("action", dtype, shaped(&[config.action.dim()]))?
        } else {
            observation[0]
        };
        let returns = if tokens.contains(&Token::Return) {
            self.g.input("returns", self.dtype, shaped(&[1]))?
        } else {
            observation[0]
        };
        Ok(Sources { observation, action, returns })
    }

    /// A number or several per step: an input [lead, each], or the rows of a table that the input `steps` names.
    fn source(&mut self, name: &str, dtype: DType, lead: &[usize], each: &[usize]) -> Result<Value> {
        Ok(match self.table {
            Some((rows, steps)) => {
                let table = self.g.state(&format!("data.{name}"), dtype, [&[rows], each].concat())?;
                self.g.gather_rows(table, steps)?
            }
            None => self.g.input(name, dtype, [lead, each].concat())?,
        })
    }

    fn segment_sources(&mut self, sources: &Sources, k: usize) -> Result<Sources> {
        let mut cut = |value: Value| -> Result<Value> {
            let shape = self.g.shape(value)?[1..].to_vec();
            self.part(value, k, &shape)
        };
        let observation = sources.observation.iter().map(|v| cut(*v)).collect::<Result<Vec<_>>>()?;
        Ok(Sources { observation, action: cut(sources.action)?, returns: cut(sources.returns)? })
    }

    /// Mean loss over all steps that count in all segments, and the number of right discrete answers.
    fn action_loss(
        &mut self,
        logits: Value,
        batch: usize,
        count: usize,
        label_smoothing: f64,
    ) -> Result<(Value, Value)> {
        let config = self.config;
        let rows = count * batch * config.segment_length;
        let lead = [count, batch, config.segment_length];
        let settings = CrossEntropy { label_smoothing, ignored: IGNORED };
        match &config.action {
            Action::Continuous { dim, .. } => {
                let targets = self.source("targets", self.dtype, &lead, &[*dim])?;
                let mask = self.source("mask", DType::Bool, &lead, &[])?;
                Ok((self.g.mse(logits, targets, Some(mask))?, self.g.scalar(self.dtype, 0.0)?))
            }
            Action::Categorical { count: actions } => {
                let targets = self.source("targets", DType::I64, &lead, &[1])?;
                let targets = self.g.reshape(targets, [rows])?;
                let logits = self.g.reshape(logits, [rows, *actions])?;
                let right = self.g.count_correct(logits, targets)?;
                Ok((self.g.cross_entropy(logits, targets, settings)?, right))
            }
            Action::MultiCategorical { sizes } => {
                let targets = self.source("targets", DType::I64, &lead, &[sizes.len()])?;
                let logits = self.g.reshape(logits, [rows, sizes.iter().sum()])?;
                let mut total: Option<Value> = None;
                let mut right = self.g.scalar(self.dtype, 0.0)?;
                let mut first = 0;
                for (i, size) in sizes.iter().enumerate() {
                    let component = self.g.slice(targets, 3, i..i + 1)?;
                    let component = self.g.reshape(component, [rows])?;
                    let part = self.g.slice(logits, 1, first..first + size)?;
                    let loss = self.g.cross_entropy(part, component, settings)?;
                    let more = self.g.count_correct(part, component)?;
                    right = self.g.add(right, more)?;
                    total = Some(match total {
                        Some(total) => self.g.add(total, loss)?,
                        None => loss,
                    });
                    first += size;
                }
                let total = total.unwrap_or(logits);
                Ok((self.g.scale(total, 1.0 / sizes.len() as f64)?, right))
            }
        }
    }
}

/// Fills the inputs of a segment program that follow from time alone.
#[derive(Debug, Clone, Copy)]
pub struct SegmentClock;

impl SegmentClock {
    /// Sets `times`, `newest` and `encodings` for segments `first..first + k` of all rows.
    pub fn set(config: &ModelConfig, program: &mut Program, first: u64) -> Result<()> {
        let (tokens, d) = (config.segment_tokens(), config.d_model);
        let count = program.input_type("times")?.shape[0] as u64;
        let starts: Vec<u64> = (first..first + count).map(|k| k * tokens as u64).collect();
        let times = starts.iter().flat_map(|start| token_times(config, *start, tokens));
        program.set("times", &times.collect::<Vec<i64>>())?;
        let newest = program.input_mut::<i64>("newest")?;
        let batch = newest.len() / starts.len();
        for (row, start) in newest.chunks_exact_mut(batch).zip(&starts) {
            row.fill((start + tokens as u64) as i64 - 1);
        }
        if config.compat.absolute_offset {
            let table: Vec<f64> = starts.iter().flat_map(|s| position_encodings(*s, tokens, d)).collect();
            match program.input_type("encodings")?.dtype {
                DType::F64 => program.set("encodings", &table)?,
                _ => program.set("encodings", &table.into_iter().map(|x| x as f32).collect::<Vec<_>>())?,
            }
        }
        Ok(())
    }
}

/// Times of a window of `count` tokens that starts at `start`, as the biases see them.
pub(crate) fn token_times(config: &ModelConfig, start: u64, count: usize) -> Vec<i64> {
    let times = start as i64..start as i64 + count as i64;
    if config.compat.newest_first_times { times.rev().collect() } else { times.collect() }
}
