//! The builder that architectures write their graphs with: declared parameters, carried state, feeds and
//! taps.
//!
//! A net is built for one purpose: windows in training or evaluation, a window that is run again when acting,
//! or one phase of a step. Architectures do not see the difference: [`Net::carried`] is the state of the rows
//! at hand wherever it lies, and [`Net::feed`] the numbers of the steps at hand wherever they come from.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use elmur_base::{Field, Kind, StepWeights};
use elmur_engine::{Activation as Act, DType, Graph, Program, Value};

use crate::ends::Ends;
use crate::error::{Error, Result};
use crate::initial::Init;
use crate::phase::Phase;
use crate::sizes::{MAX_PARAMETERS, MAX_TENSOR};
use crate::statistic::Statistic;
use crate::vision::Augment;

/// Name of the input of training programs that [`Net::optimizer_steps`] is.
pub(crate) const OPTIMIZER_STEPS: &str = "optimizer_steps";

/// What training minimises.
#[derive(Debug, Clone, Copy)]
pub struct Loss {
    /// Loss of the actions, a scalar.
    pub action: Value,
    /// Added to it; a scalar.
    pub auxiliary: Option<Value>,
    /// Number of correct discrete answers, a scalar; none for continuous actions.
    pub correct: Option<Value>,
}

/// How a copy of a parameter follows it: a target network, or averaged weights to act with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Average {
    /// After every optimizer step: copy = (1 - rate) copy + rate parameter.
    Constant(f64),
    /// After optimizer step k = 0, 1, ...: copy = decay copy + (1 - decay) parameter, with a decay of 0 at
    /// first and then min(most, (1 + k) / (10 + k)).
    Warming(f64),
}

impl Average {
    /// Share of the copy that optimizer step `k` = 0, 1, ... leaves.
    pub fn decay(self, k: u64) -> f64 {
        match self {
            Average::Constant(rate) => 1.0 - rate,
            Average::Warming(_) if k == 0 => 0.0,
            Average::Warming(most) => most.min((1.0 + k as f64) / (10.0 + k as f64)),
        }
    }
}

/// How a carried state begins in a new episode.
#[derive(Debug, Clone, PartialEq)]
pub enum Start {
    /// Zeros.
    Zeros,
    /// The state is a time (i64, in tokens since the episode began), -1 for one that has not come.
    Never,
    /// Normal numbers with this standard deviation, drawn anew for every episode.
    Normal(f64),
    /// Numbers from 0 up to, but without, 1, drawn anew for every episode.
    Uniform,
    /// The values of the parameter of this name, [1, shape], which starts as given.
    Learned(String, Init),
}

/// A state that is carried per row from one window or step to the next.
#[derive(Debug, Clone, PartialEq)]
pub struct Carried {
    /// Name of the state.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Axes of one row.
    pub shape: Vec<usize>,
    /// How the state begins in a new episode.
    pub start: Start,
}

/// How far a row's episode is when a program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Windows of the episode that have ended.
    pub window: u64,
    /// Number, in its window, of the first token of the pass.
    pub first: usize,
    /// Tokens of the window that exist, those of the pass included.
    pub tokens: usize,
    /// Seed of the row's episode; 0 in programs over whole windows.
    pub seed: u64,
}

/// Numbers that follow from a row's progress: entry `i` of an input.
#[derive(Clone)]
pub(crate) struct Follows<T>(Arc<dyn Fn(Progress, usize) -> T + Send + Sync>);

impl<T> Follows<T> {
    /// Entry `i` for a row.
    pub fn at(&self, progress: Progress, i: usize) -> T {
        (self.0)(progress, i)
    }
}

impl<T> fmt::Debug for Follows<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Follows")
    }
}

impl<T> PartialEq for Follows<T> {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// What fills an input of a program.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Source {
    /// A field of the data.
    Field(Field),
    /// Times of `count` tokens from token `first` of the window or step on, i64.
    Times { first: usize, count: usize, newest_first: bool },
    /// Time of the newest token, i64 per row.
    Newest,
    /// Position encodings of distances from the window's start on, [count, width].
    Encodings { count: usize, width: usize },
    /// Numbers of the rows at hand, i32.
    Rows,
    /// Position in the window of the phase's first token, i32 per row.
    Position,
    /// Places of the phase's tokens among all rows' windows, each with `before` rows before its tokens: row *
    /// (before + tokens) + before + position, i32.
    Places { count: usize, before: usize },
    /// Integers of a row, i32 or i64.
    Integers(Follows<i64>),
    /// Floats of a row.
    Floats(Follows<f64>),
    /// Whether a token of the window has been seen, bool [rows, queries, tokens].
    Seen,
}

/// An input of a program and what fills it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Feed {
    pub name: String,
    pub source: Source,
}

/// An output to look at, in recording sessions.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tap {
    pub name: String,
    /// Axis 2 runs over tokens: only the current observation's is kept.
    pub by_token: bool,
}

/// Everything that a net declared beside its graph.
#[derive(Debug, Default)]
pub(crate) struct Declared {
    pub params: BTreeMap<String, Init>,
    /// Copies of parameters: the parameter that each follows, and how.
    pub averages: BTreeMap<String, (String, Average)>,
    /// Parameters that are computed from the training data.
    pub statistics: BTreeMap<String, Statistic>,
    pub carried: Vec<Carried>,
    /// States that follow from the parameters alone, shared by all rows.
    pub derived: BTreeSet<String>,
    /// Tables of data on the device.
    pub tables: Vec<(String, Field)>,
    pub feeds: Vec<Feed>,
    pub taps: Vec<Tap>,
}

/// What a net is built for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pass {
    /// `count` windows in a row, the current one being number `at`. `fresh`: carried states begin anew.
    Windows { count: usize, at: usize, fresh: bool },
    /// The window of each row once more, up to the step at hand. `closing`: it ends, and what it leaves behind is kept.
    Rerun { closing: bool },
    /// One phase of a step.
    Step(Phase),
}

/// A graph under construction, and what it declares.
#[derive(Debug)]
pub struct Net<'a> {
    /// The graph. Ops that have no method here are added to it directly.
    pub g: Graph,
    /// Float type of parameters and activations.
    pub dtype: DType,
    /// Encoders, action and token format of the architecture.
    pub ends: Ends<'a>,
    /// Random generator; present in training.
    pub(crate) rng: Option<Value>,
    /// Whether dropout drops anything.
    pub(crate) drops: bool,
    /// Gates and chosen experts of all mixtures so far whose balance counts; filled in training.
    pub routes: Vec<(Value, Value)>,
    pub(crate) label_smoothing: f64,
    /// How pictures are changed in training.
    pub(crate) augment: Augment,
    /// Leaves of observations that are numbers from 0 to 1 for the policy and come as bytes.
    pub(crate) bytes: Vec<usize>,
    /// Weights of steps in the imitation loss; none: all count alike.
    pub(crate) weights: Option<StepWeights>,
    /// Whether any accepted choice is right.
    pub(crate) ties: bool,
    pub(crate) pass: Pass,
    pub(crate) rows: usize,
    /// Environment steps of the pass.
    pub(crate) steps: usize,
    /// Tokens of a whole window.
    pub(crate) window_tokens: usize,
    /// Where carried state lies in more rows than those at hand: how many, and which are at hand.
    pub(crate) bank: Option<(usize, Value)>,
    /// Where the data lies on the device: rows of its tables, and which of them the steps at hand are.
    pub(crate) table: Option<(usize, Value)>,
    pub(crate) recording: bool,
    pub(crate) declared: Declared,
    /// Only parameters are wanted: constants are not computed.
    pub(crate) only_params: bool,
    /// What the names of parameters begin with.
    prefix: String,
    /// Parameters are copies that follow others: what their names begin with, and how they follow.
    averaged: Option<(String, Average)>,
    /// Parameters pass no gradient on.
    frozen: bool,
    /// Standard deviation that linear maps and embeddings start with, whatever their own initialisation says.
    flat: Option<f64>,
    /// Numbers in all parameters so far.
    parameters: u128,
    /// Inputs and constants by name.
    fed: BTreeMap<String, Value>,
    /// Carried states: the stored value, the value that was read, the value to keep.
    states: BTreeMap<String, State>,
}

#[derive(Debug, Clone, Copy)]
struct State {
    stored: Value,
    read: Value,
    kept: Value,
    /// Already updated in its place.
    done: bool,
}

impl<'a> Net<'a> {
    /// An empty net for `rows` rows of `steps` steps.
    pub(crate) fn new(ends: Ends<'a>, dtype: DType, pass: Pass, rows: usize, window_steps: usize) -> Self {
        let steps = if matches!(pass, Pass::Step(_)) { 1 } else { window_steps };
        Self {
            g: Graph::new(),
            dtype,
            ends,
            rng: None,
            drops: true,
            routes: Vec::new(),
            label_smoothing: 0.0,
            augment: Augment::default(),
            bytes: Vec::new(),
            weights: None,
            ties: false,
            pass,
            rows,
            steps,
            window_tokens: window_steps * ends.tokens.per_step(),
            bank: None,
            table: None,
            recording: false,
            declared: Declared::default(),
            only_params: false,
            prefix: String::new(),
            averaged: None,
            frozen: false,
            flat: None,
            parameters: 0,
            fed: BTreeMap::new(),
            states: BTreeMap::new(),
        }
    }

    /// Rows that are computed side by side.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The parameter `name`, declared with how it starts if it is new.
    pub fn param(&mut self, name: &str, shape: impl Into<Vec<usize>>, init: Init) -> Result<Value> {
        let name = format!("{}{name}", self.prefix);
        let value = match self.averaged.clone() {
            Some((prefix, average)) => self.copy_of(&prefix, average, &name, shape.into(), init)?,
            None => self.declare_param(&name, shape.into(), init)?,
        };
        if self.frozen { Ok(self.g.stop_gradient(value)?) } else { Ok(value) }
    }

    fn declare_param(&mut self, name: &str, shape: Vec<usize>, init: Init) -> Result<Value> {
        if let Some(value) = self.g.find(name) {
            return Ok(value);
        }
        // Architectures of this crate have been checked by their settings; this is for users' own.
        let numbers = shape.iter().fold(1, |product: u128, n| product.saturating_mul(*n as u128));
        self.parameters = self.parameters.saturating_add(numbers);
        if numbers > MAX_TENSOR || self.parameters > MAX_PARAMETERS {
            let expected = format!("at most {MAX_TENSOR} numbers, and {MAX_PARAMETERS} in all parameters");
            return Err(Error::input("parameter", expected, format!("`{name}` {shape:?}")));
        }
        self.declared.params.insert(name.to_owned(), init);
        Ok(self.g.param(name, self.dtype, shape)?)
    }

    /// The copy `{prefix}.{name}` of a parameter.
    fn copy_of(
        &mut self,
        prefix: &str,
        average: Average,
        name: &str,
        shape: Vec<usize>,
        init: Init,
    ) -> Result<Value> {
        let copy = format!("{prefix}.{name}");
        let value = self.declare_param(&copy, shape, init)?;
        self.declared.averages.insert(copy, (name.to_owned(), average));
        Ok(value)
    }

    /// The parameter `name` that holds a statistic of the training data, without gradient; its shape follows
    /// from the statistic. Prefixes do not change its name, and copies of networks share it.
    pub fn statistic(&mut self, name: &str, statistic: Statistic) -> Result<Value> {
        statistic.check(self.ends)?;
        let numbers = self.field_type(statistic.field()).1.iter().product();
        let value = self.declare_param(name, statistic.shape(numbers), statistic.init())?;
        self.declared.statistics.insert(name.to_owned(), statistic);
        Ok(self.g.stop_gradient(value)?)
    }

    /// Builds a part of the graph with slowly moving copies of its parameters: inside `part` the parameter
    /// `name` is `{prefix}.{name}`, which starts equal to `name`, has no gradient and follows it after every
    /// optimizer step.
    pub fn averaged<T>(
        &mut self,
        prefix: &str,
        average: Average,
        part: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        let outer = self.averaged.replace((prefix.to_owned(), average));
        let frozen = std::mem::replace(&mut self.frozen, true);
        let built = part(self);
        (self.averaged, self.frozen) = (outer, frozen);
        built
    }

    /// Declares a copy `{prefix}.{name}` of every trained parameter so far, as [`Net::averaged`] would use
    /// them.
    pub fn average_all(&mut self, prefix: &str, average: Average) -> Result<()> {
        let Declared { params, averages, statistics, .. } = &self.declared;
        let trained = |name: &String| !averages.contains_key(name) && !statistics.contains_key(name);
        let own = params.iter().filter(|(name, _)| trained(name));
        for (name, init) in own.map(|(name, init)| (name.clone(), *init)).collect::<Vec<_>>() {
            let shape = self.g.shape(self.g.value(&name)?)?.to_vec();
            self.copy_of(prefix, average, &name, shape, init)?;
        }
        Ok(())
    }

    /// Builds a part of the graph in which the parameter `name` is `{prefix}.{name}`: a second network of the
    /// same form, such as an encoder of its own.
    pub fn named<T>(&mut self, prefix: &str, part: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let longer = format!("{}{prefix}.", self.prefix);
        let outer = std::mem::replace(&mut self.prefix, longer);
        let built = part(self);
        self.prefix = outer;
        built
    }

    /// Builds a part of the graph through which gradients reach its inputs but not its parameters.
    pub fn frozen<T>(&mut self, part: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let outer = std::mem::replace(&mut self.frozen, true);
        let built = part(self);
        self.frozen = outer;
        built
    }

    /// Builds a part of the graph in which the weights of linear maps and embeddings start with normal numbers
    /// of this standard deviation, and the biases of linear maps at zero.
    pub fn flat<T>(&mut self, std: f64, part: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let outer = self.flat.replace(std);
        let built = part(self);
        self.flat = outer;
        built
    }

    /// How the weight of a linear map or an embedding starts that would start as `init`: as [`Net::flat`]
    /// says, if it does.
    pub fn start(&self, init: Init) -> Init {
        self.flat.map_or(init, Init::Normal)
    }

    /// How the bias of a linear map starts that would start as `init`.
    pub fn start_bias(&self, init: Init) -> Init {
        if self.flat.is_some() { Init::Constant(0.0) } else { init }
    }

    /// x Wᵀ with W [outputs, inputs] named `{name}.weight`.
    pub fn linear(&mut self, x: Value, name: &str, outputs: usize, init: Init) -> Result<Value> {
        self.linear_act(x, name, outputs, init, None, Act::Identity)
    }

    /// activation(x Wᵀ + b), with `{name}.weight` [outputs, inputs] and, where it has an initialisation,
    /// `{name}.bias`.
    pub fn linear_act(
        &mut self,
        x: Value,
        name: &str,
        outputs: usize,
        init: Init,
        bias: Option<Init>,
        activation: Act,
    ) -> Result<Value> {
        let inputs = self.g.shape(x)?.last().copied().unwrap_or(1);
        let weight = self.param(&format!("{name}.weight"), [outputs, inputs], self.start(init))?;
        let bias = match bias {
            Some(init) => Some(self.param(&format!("{name}.bias"), [outputs], self.start_bias(init))?),
            None => None,
        };
        Ok(self.g.linear(x, weight, bias, activation)?)
    }

    /// Number of optimizer steps before the one at hand, a scalar: for losses that change in the course of
    /// training.
    pub fn optimizer_steps(&mut self) -> Result<Value> {
        match self.g.find(OPTIMIZER_STEPS) {
            Some(steps) => Ok(steps),
            None => Ok(self.g.input(OPTIMIZER_STEPS, self.dtype, [])?),
        }
    }

    /// Whether parameters alone are wanted, so that large constants need not be computed.
    pub fn only_parameters(&self) -> bool {
        self.only_params
    }

    /// Whether what is tapped is looked at.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// A generator for what is random when acting too: i64 [rows, 2] of each episode's seed and window, or i64
    /// `[2]` of the window's number in whole windows.
    pub fn generator_of_time(&mut self) -> Result<Value> {
        let state = |progress: Progress, i: usize| [progress.seed, progress.window][i] as i64;
        let generator = self.integers("generator", DType::I64, &[2], state)?;
        match self.pass {
            Pass::Windows { .. } => Ok(self.g.reshape(generator, [2])?),
            _ => Ok(generator),
        }
    }

    /// Whether the graph is for training.
    pub fn is_training(&self) -> bool {
        self.rng.is_some()
    }

    /// Dropout in training; x itself otherwise.
    pub fn dropout(&mut self, x: Value, p: f64) -> Result<Value> {
        Ok(match self.drop_with(p) {
            Some((p, rng)) => self.g.dropout(x, p, rng)?,
            None => x,
        })
    }

    /// Probability and generator for ops that drop something themselves, in training.
    pub fn drop_with(&self, p: f64) -> Option<(f64, Value)> {
        self.rng.filter(|_| self.drops).map(|rng| (p, rng))
    }

    /// Constant numbers of the net's float type.
    pub fn float_constant(&mut self, data: &[f64], shape: impl Into<Vec<usize>>) -> Result<Value> {
        Ok(match self.dtype {
            DType::F64 => self.g.constant(data, shape)?,
            _ => self.g.constant(&data.iter().map(|x| *x as f32).collect::<Vec<_>>(), shape)?,
        })
    }

    // ---- what is carried ----

    /// The state `name` of the rows at hand, [rows, shape], as the last window or step left it. Fresh rows
    /// have `start`.
    pub fn carried(&mut self, name: &str, shape: &[usize], start: Start) -> Result<Value> {
        if let Some(state) = self.states.get(name) {
            return Ok(state.kept);
        }
        let dtype = if start == Start::Never { DType::I64 } else { self.dtype };
        let stored = self.declare_carried(name, dtype, shape, &start)?;
        let read = match (self.pass, self.bank) {
            (Pass::Windows { fresh: true, .. }, _) => self.fresh(dtype, shape, &start)?,
            (_, Some((_, rows))) => self.g.gather_rows(stored, rows)?,
            _ => stored,
        };
        self.states.insert(name.to_owned(), State { stored, read, kept: read, done: false });
        Ok(read)
    }

    fn declare_carried(&mut self, name: &str, dtype: DType, shape: &[usize], start: &Start) -> Result<Value> {
        let capacity = self.bank.map_or(self.rows, |(capacity, _)| capacity);
        let stored = self.g.state(name, dtype, [&[capacity], shape].concat())?;
        let (name, shape, start) = (name.to_owned(), shape.to_vec(), start.clone());
        self.declared.carried.push(Carried { name, dtype, shape, start });
        Ok(stored)
    }

    /// The state of new episodes. Evaluation without a generator starts random states at zero.
    fn fresh(&mut self, dtype: DType, shape: &[usize], start: &Start) -> Result<Value> {
        let whole = [&[self.rows], shape].concat();
        Ok(match (start, self.rng) {
            (Start::Never, _) => self.g.full(dtype, whole, -1.0)?,
            (Start::Learned(name, init), _) => {
                let learned = self.param(name, [&[1], shape].concat(), *init)?;
                self.g.broadcast_to(learned, whole)?
            }
            (Start::Normal(std), Some(rng)) => self.g.random_normal(dtype, whole, *std, rng)?,
            (Start::Uniform, Some(rng)) => {
                // As many as a float can tell apart, none of which is rounded to 1.
                let draws = self.g.random_below(1 << 24, whole, rng)?;
                let draws = self.g.cast(draws, dtype)?;
                self.g.scale(draws, 0.5f64.powi(24))?
            }
            _ => self.g.full(dtype, whole, 0.0)?,
        })
    }

    /// The state `name` goes on as `new`, [rows, shape].
    pub fn keep(&mut self, name: &str, new: Value) -> Result<()> {
        match self.states.get_mut(name) {
            Some(state) => {
                state.kept = new;
                Ok(())
            }
            None => Err(Error::input("keep", "a state that is carried", format!("`{name}`"))),
        }
    }

    /// Appends the tokens `new` [rows, tokens, width] of this phase to the window's tokens kept as `name`, at
    /// their positions. Returns those of the whole window, [rows, window tokens, width]; positions not yet
    /// reached hold anything.
    pub fn append(&mut self, name: &str, new: Value) -> Result<Value> {
        self.append_after(name, 0, new)
    }

    /// [`Net::append`] to a state that has `before` rows of another origin in front of the window's tokens,
    /// [rows, before + window tokens, width].
    pub fn append_after(&mut self, name: &str, before: usize, new: Value) -> Result<Value> {
        let shape = self.g.shape(new)?.to_vec();
        let (count, width) = (shape[1], shape[2]);
        let each = before + self.window_tokens;
        let stored = self.declare_carried(name, self.dtype, &[each, width], &Start::Zeros)?;
        let capacity = self.bank.map_or(self.rows, |(capacity, _)| capacity);
        if i32::try_from(capacity.saturating_mul(each)).is_err() {
            let expected = "at most 2^31 - 1 rows in the caches of all episodes";
            return Err(Error::input("session", expected, format!("{capacity} x {each}")));
        }
        let input = if before == 0 { "places".to_owned() } else { format!("places.{before}") };
        let source = Source::Places { count, before };
        let places = self.input(&input, DType::I32, &[self.rows * count], source)?;
        let flat = self.g.reshape(new, [self.rows * count, width])?;
        let written = self.g.scatter_rows(stored, places, flat)?;
        self.g.update(stored, written)?;
        let all = match self.bank {
            Some((_, rows)) => self.g.gather_rows(written, rows)?,
            None => written,
        };
        self.states.insert(name.to_owned(), State { stored, read: all, kept: all, done: true });
        Ok(all)
    }

    /// A state that follows from the parameters alone, the same for all rows; [`Net::derive`] computes it in
    /// [`Phase::Begin`].
    pub fn derived(&mut self, name: &str, shape: impl Into<Vec<usize>>) -> Result<Value> {
        if let Some(value) = self.g.find(name) {
            return Ok(value);
        }
        self.declared.derived.insert(name.to_owned());
        Ok(self.g.state(name, self.dtype, shape)?)
    }

    /// Computes the derived state `name` as `value`.
    pub fn derive(&mut self, name: &str, value: Value) -> Result<()> {
        let shape = self.g.shape(value)?.to_vec();
        let state = self.derived(name, shape)?;
        Ok(self.g.update(state, value)?)
    }

    /// Writes what is kept back to where it lies. Called once, after the architecture is done.
    pub(crate) fn finish(mut self) -> Result<(Graph, Declared)> {
        let fresh = matches!(self.pass, Pass::Windows { fresh: true, .. });
        let looks = matches!(self.pass, Pass::Rerun { closing: false });
        for (_, state) in std::mem::take(&mut self.states) {
            let State { stored, read, kept, done } = state;
            if done || looks || (kept == read && !fresh) {
                continue;
            }
            let new = match self.bank {
                Some((_, rows)) => self.g.scatter_rows(stored, rows, kept)?,
                None => kept,
            };
            self.g.update(stored, new)?;
        }
        Ok((self.g, self.declared))
    }

    // ---- what is fed ----

    /// Declares an input, or finds it again.
    pub(crate) fn input(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        source: Source,
    ) -> Result<Value> {
        if let Some(value) = self.fed.get(name) {
            return Ok(*value);
        }
        let value = self.g.input(name, dtype, shape)?;
        self.fed.insert(name.to_owned(), value);
        self.declared.feeds.push(Feed { name: name.to_owned(), source });
        Ok(value)
    }

    /// Leading axes of what is fed: [windows, rows, steps], or [rows, steps].
    fn lead(&self) -> Vec<usize> {
        match self.pass {
            Pass::Windows { count, .. } => vec![count, self.rows, self.steps],
            _ => vec![self.rows, self.steps],
        }
    }

    /// A field of the steps at hand, [rows, steps, ...].
    pub fn feed(&mut self, field: Field) -> Result<Value> {
        let whole = self.feed_all(field)?;
        self.of_window(whole)
    }

    /// A field of all windows, [windows, rows, steps, ...]; [`Net::feed`] is the current window's part of it.
    pub fn feed_all(&mut self, field: Field) -> Result<Value> {
        let name = self.field_name(field);
        let (dtype, each) = self.field_type(field);
        let Some((rows, steps)) = self.table else {
            let shape = [self.lead(), each].concat();
            return self.input(&name, dtype, &shape, Source::Field(field));
        };
        if let Some(value) = self.fed.get(&name) {
            return Ok(*value);
        }
        let table = format!("data.{name}");
        let stored = self.g.state(&table, dtype, [vec![rows], each].concat())?;
        self.declared.tables.push((table, field));
        let value = self.g.gather_rows(stored, steps)?;
        self.fed.insert(name, value);
        Ok(value)
    }

    /// Element type and axes of a field's numbers at one step.
    fn field_type(&self, field: Field) -> (DType, Vec<usize>) {
        let action = self.ends.action;
        match field {
            Field::Observation(leaf) | Field::NextObservation(leaf) => {
                let encoder = &self.ends.observation[leaf];
                let dtype = match encoder.kind() {
                    Kind::Floats if self.bytes.contains(&leaf) => DType::U8,
                    Kind::Floats => self.dtype,
                    Kind::Ints => DType::I32,
                    Kind::Bytes => DType::U8,
                };
                (dtype, encoder.shape())
            }
            Field::Action if action.is_discrete() => (DType::I32, vec![action.dim()]),
            Field::Target if action.is_discrete() => (DType::I64, vec![action.dim()]),
            Field::Action | Field::Target => (self.dtype, vec![action.dim()]),
            Field::Accepted => (DType::Bool, vec![action.outputs()]),
            Field::Imitate | Field::Exists | Field::Terminated | Field::KnownNext => (DType::Bool, vec![]),
            Field::Reward | Field::CountedReward(_) | Field::LaterRewards(_) | Field::Weight(_) => {
                (self.dtype, vec![])
            }
            Field::ReturnToGo => (self.dtype, vec![1]),
        }
    }

    /// Name of the input that holds a field.
    fn field_name(&self, field: Field) -> String {
        match field {
            Field::Observation(_) if self.ends.observation.len() == 1 => "observation".to_owned(),
            Field::Observation(leaf) => format!("observation.{leaf}"),
            Field::NextObservation(leaf) => format!("next_observation.{leaf}"),
            Field::Action => "action".to_owned(),
            Field::Target => "targets".to_owned(),
            Field::Accepted => "accepted".to_owned(),
            Field::Imitate => "mask".to_owned(),
            Field::Exists => "exists".to_owned(),
            Field::ReturnToGo => "returns".to_owned(),
            Field::Reward => "reward".to_owned(),
            Field::CountedReward(_) => "counted_reward".to_owned(),
            Field::LaterRewards(_) => "later_rewards".to_owned(),
            Field::Terminated => "terminated".to_owned(),
            Field::KnownNext => "known_next".to_owned(),
            Field::Weight(_) => "weights".to_owned(),
        }
    }

    /// The current window's part of a value that leads with windows.
    fn of_window(&mut self, whole: Value) -> Result<Value> {
        let Pass::Windows { at, .. } = self.pass else { return Ok(whole) };
        let shape = self.g.shape(whole)?[1..].to_vec();
        let part = self.g.slice(whole, 0, at..at + 1)?;
        Ok(self.g.reshape(part, shape)?)
    }

    /// Times of all tokens of the pass (a window's, or those of one phase), i64 [rows or 1, tokens]: tokens
    /// since the episode began. `newest_first` counts a window's tokens from its end.
    pub fn token_times(&mut self, tokens: usize, newest_first: bool) -> Result<Value> {
        let source = Source::Times { first: self.first_token(), count: tokens, newest_first };
        let shape = match self.pass {
            Pass::Windows { count, .. } => vec![count, 1, tokens],
            _ => vec![self.rows, tokens],
        };
        let whole = self.input("times", DType::I64, &shape, source)?;
        self.of_window(whole)
    }

    /// Time of the newest token of the pass, i64 `[rows]`.
    pub fn newest_time(&mut self) -> Result<Value> {
        let shape = match self.pass {
            Pass::Windows { count, .. } => vec![count, self.rows],
            _ => vec![self.rows],
        };
        let whole = self.input("newest", DType::I64, &shape, Source::Newest)?;
        self.of_window(whole)
    }

    /// Sinusoidal encodings of distances 0, 1, ..., [count, width], a constant.
    pub fn encodings(&mut self, count: usize, width: usize) -> Result<Value> {
        let name = format!("distances {count} {width}");
        if let Some(value) = self.fed.get(&name) {
            return Ok(*value);
        }
        let value = if self.only_params {
            self.g.full(self.dtype, [count, width], 0.0)?
        } else {
            self.float_constant(&position_encodings(0, count, width), [count, width])?
        };
        self.fed.insert(name, value);
        Ok(value)
    }

    /// Sinusoidal encodings of distances from the window's start on, [tokens, width] (or with rows in front,
    /// when acting).
    pub fn absolute_encodings(&mut self, count: usize, width: usize) -> Result<Value> {
        let shape = match self.pass {
            Pass::Windows { count: windows, .. } => vec![windows, count, width],
            _ => vec![self.rows, count, width],
        };
        let source = Source::Encodings { count, width };
        let whole = self.input("encodings", self.dtype, &shape, source)?;
        self.of_window(whole)
    }

    /// Integers (i32 or i64) that follow from the progress of each row alone: [rows, shape] when acting, [1,
    /// shape] in whole windows, which are all at the same time. Entry i of a row is `of(progress, i)`.
    pub fn integers(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &[usize],
        of: impl Fn(Progress, usize) -> i64 + Send + Sync + 'static,
    ) -> Result<Value> {
        let lead = match self.pass {
            Pass::Windows { count, .. } => vec![count, 1],
            _ => vec![self.rows],
        };
        let source = Source::Integers(Follows(Arc::new(of)));
        let whole = self.input(name, dtype, &[&lead, shape].concat(), source)?;
        self.of_window(whole)
    }

    /// Floats that follow from the progress of each row alone: [rows, shape] when acting, `[shape]` in whole
    /// windows. Entry i of a row is `of(progress, i)`.
    pub fn floats(
        &mut self,
        name: &str,
        shape: &[usize],
        of: impl Fn(Progress, usize) -> f64 + Send + Sync + 'static,
    ) -> Result<Value> {
        let lead = match self.pass {
            Pass::Windows { count, .. } => count,
            _ => self.rows,
        };
        let source = Source::Floats(Follows(Arc::new(of)));
        let whole = self.input(name, self.dtype, &[&[lead], shape].concat(), source)?;
        self.of_window(whole)
    }

    /// Whether gradients come back to the pass from a window that follows, through what the pass keeps.
    pub fn gradients_follow(&self) -> bool {
        self.rng.is_some() && matches!(self.pass, Pass::Windows { count, at, .. } if at + 1 < count)
    }

    /// Whether the pass is a window that is run again when acting.
    pub fn reruns(&self) -> bool {
        matches!(self.pass, Pass::Rerun { .. })
    }

    /// Position in the window of the phase's first token, i32 `[rows]`.
    pub fn position(&mut self) -> Result<Value> {
        self.input("at", DType::I32, &[self.rows], Source::Position)
    }

    /// Where a window is run before it is full: which tokens have been seen, bool [rows, queries, tokens].
    pub fn seen(&mut self, queries: usize) -> Result<Option<Value>> {
        if !self.reruns() {
            return Ok(None);
        }
        let shape = [self.rows, queries, self.window_tokens];
        Ok(Some(self.input("visible", DType::Bool, &shape, Source::Seen)?))
    }

    /// Number, within a step, of the first token of this phase.
    fn first_token(&self) -> usize {
        match self.pass {
            Pass::Step(Phase::Act) => self.ends.tokens.observation_index() + 1,
            _ => 0,
        }
    }

    // ---- what is looked at ----

    /// Something to look at: an output of recording sessions, found by name in their records.
    pub fn tap(&mut self, name: &str, value: Value) -> Result<()> {
        self.tap_as(name, value, false)
    }

    /// [`Net::tap`] for a value whose axis 2 runs over tokens, [rows, heads, tokens, ...]: the entry of the
    /// current observation's token is recorded.
    pub fn tap_by_token(&mut self, name: &str, value: Value) -> Result<()> {
        self.tap_as(name, value, true)
    }

    fn tap_as(&mut self, name: &str, value: Value, by_token: bool) -> Result<()> {
        if self.recording {
            self.declared.taps.push(Tap { name: name.to_owned(), by_token });
            self.g.output(name, value)?;
        }
        Ok(())
    }
}

/// Fills an input [rows, ...] with what follows from the progress of its rows.
pub(crate) fn fill_following(
    program: &mut Program,
    Feed { name, source }: &Feed,
    rows: impl ExactSizeIterator<Item = Progress>,
) -> Result<()> {
    fn fill<T>(
        input: &mut [T],
        rows: impl ExactSizeIterator<Item = Progress>,
        of: impl Fn(Progress, usize) -> T,
    ) {
        let each = input.len() / rows.len().max(1);
        for (input, progress) in input.chunks_exact_mut(each.max(1)).zip(rows) {
            input.iter_mut().enumerate().for_each(|(i, to)| *to = of(progress, i));
        }
    }
    match (source, program.input_type(name)?.dtype) {
        (Source::Integers(x), DType::I64) => fill(program.input_mut(name)?, rows, |row, i| x.at(row, i)),
        (Source::Integers(x), _) => fill(program.input_mut(name)?, rows, |row, i| x.at(row, i) as i32),
        (Source::Floats(x), DType::F64) => fill(program.input_mut(name)?, rows, |row, i| x.at(row, i)),
        (Source::Floats(x), _) => fill(program.input_mut(name)?, rows, |row, i| x.at(row, i) as f32),
        _ => {}
    }
    Ok(())
}

/// PE(delta) for `count` distances from `start` on: sines then cosines, [count, width].
pub fn position_encodings(start: u64, count: usize, width: usize) -> Vec<f64> {
    (start..start + count as u64).flat_map(|distance| position_encoding(distance as f64, width)).collect()
}

/// PE(distance), which may be negative: sines then cosines of distance / 10000^(2c / width), `width` numbers.
pub fn position_encoding(distance: f64, width: usize) -> impl Iterator<Item = f64> {
    let half = width / 2;
    let angle = move |c: usize| distance / 10_000f64.powf(2.0 * c as f64 / width as f64);
    (0..half).map(move |c| angle(c).sin()).chain((0..half).map(move |c| angle(c).cos()))
}
