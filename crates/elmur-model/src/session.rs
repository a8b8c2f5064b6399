//! Acting: a bank of rows, each an episode with its own state and time, one step at a time.
//!
//! A session runs any [`Architecture`]. Where the architecture steps exactly, a step costs one token and what
//! is carried lies in states [rows, ...] that programs for a few numbers of rows read and write; where it
//! does not, the newest steps of every row are kept and the window is run again. Policies that plan
//! ([`Planner`](crate::Planner)) are asked for a plan where a row has played the last.

mod check;
mod choose;
mod history;
mod moment;
mod plans;
mod programs;
mod record;

use std::sync::Arc;

use elmur_base::{Describe, Field, Row, Values, ValuesMut, Widths};
use elmur_engine::rng::{Stream, unit};
use elmur_engine::{DType, Device, RoundedWeights, Store};
use serde::{Deserialize, Serialize};

pub use choose::{Choose, Draws};
pub(crate) use history::{History, Shown};
pub(crate) use programs::rows_at_once;
pub use record::{ClosedRecord, StepRecord, Tapped, Taps};

use crate::architecture::Architecture;
use crate::ends::{Action, Encoder, Token, TokenFormat};
use crate::error::{Error, Result};
use crate::fingerprint::Fingerprint;
use crate::net::{Carried, Start, Tap};
use crate::phase::{Phase, Window};
use crate::snapshot::{Clock, MAX_TIME, Snapshot, time_is_possible};
use crate::tensors::{HostTensor, TensorData, Tensors};
use check::{check_actions, check_floats, check_observation, observation_widths};
use choose::choose;
use moment::Moment;
use plans::{PLANS, PLAYED, Plans};
use programs::{Context, Programs, Work, fill_rows, parts};

/// Tensor of a snapshot that says of which rows the states are those of single steps (1) and of which they are
/// not (0), where windows slide. Snapshots from before such windows took single steps have none.
const STEPPED: &str = "stepped";

/// Rows that begin an episode at once; more do so one part after the other, so that a large bank needs no
/// more memory than its states.
const AT_ONCE: usize = 64;

/// What a policy is shown in one step.
#[derive(Debug, Clone, Copy, Default)]
pub struct Seen<'a> {
    /// One observation per row.
    pub observation: Values<'a>,
    /// A return-to-go per row, which formats with return tokens read.
    pub returns: Option<&'a [f32]>,
}

impl<'a> From<Values<'a>> for Seen<'a> {
    fn from(observation: Values<'a>) -> Self {
        Self { observation, returns: None }
    }
}

/// How a session keeps the weights of linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// As they were trained.
    #[default]
    F32,
    /// Rounded to bf16, eight bits of significand, which halves what a step must read from memory; sums stay f32. CPU only.
    Bf16,
}

/// A bank of episodes under one policy.
///
/// ```
/// use elmur_base::{Values, ValuesMut};
/// use elmur_engine::Pool;
/// use elmur_model::session::{Choose, Session};
/// use elmur_model::{init, presets};
///
/// let policy = presets::model("tmaze-quick").unwrap();
/// let params = init::parameters(policy.architecture(), 0)?;
///
/// // Two episodes side by side; the second starts anew after 25 steps, then acts alone.
/// let mut session = Session::new(&policy, &params, 2, &Pool::new(1))?;
/// session.reset(&[(0, 1), (1, 2)])?;
/// let mut actions = [0; 2];
/// for t in 0..40 {
///     if t == 25 {
///         session.reset(&[(1, 3)])?;
///     }
///     let seen = Values::floats(&[0.0; 8]).into();
///     session.select_action(&[0, 1], seen, Choose::Greedy, ValuesMut::ints(&mut actions))?;
/// }
/// let seen = Values::floats(&[0.0; 4]).into();
/// session.select_action(&[1], seen, Choose::Sample, ValuesMut::ints(&mut actions[..1]))?;
/// assert_eq!(session.times(), [40, 16]);
/// # Ok::<(), elmur_model::Error>(())
/// ```
#[derive(Debug)]
pub struct Session {
    context: Context,
    observation: Vec<Encoder>,
    widths: Widths,
    action: Action,
    tokens: TokenFormat,
    window: Window,
    carried: Vec<Carried>,
    mode: Mode,
    /// Environment steps since the episode's start, per row.
    times: Vec<u64>,
    rows: Vec<RowState>,
    /// Return-to-go of the step at hand, per row.
    returns: Vec<f32>,
    /// Head outputs of the rows of the last step.
    outputs: Vec<f32>,
    scratch: Scratch,
    records: Option<Vec<StepRecord>>,
    /// Whether the ends of windows wait for [`Session::settle`].
    deferring: bool,
    due: Due,
    /// Which policy this is, once it was asked for.
    fingerprint: Option<Fingerprint>,
}

/// What a session knows of one row beside its states.
#[derive(Debug, Clone, Copy, Default)]
struct RowState {
    /// Between `forward` and `commit`.
    open: bool,
    /// Listed in the call at hand.
    listed: bool,
    /// Whether the row's window is run again although it does not slide yet: what steps would go on from is not
    /// known.
    unstepped: bool,
    draws: Draws,
}

/// Some of the rows that a call lists, and their numbers in its list.
#[derive(Debug, Default)]
struct Group {
    rows: Vec<usize>,
    entries: Vec<usize>,
}

/// Rows whose window has ended but is not closed yet: those of one commit.
#[derive(Debug, Default)]
struct Due {
    group: Group,
    /// Times of all rows in the step that ended the windows.
    times: Vec<u64>,
}

/// Buffers that steps reuse.
#[derive(Debug, Default)]
struct Scratch {
    /// Rows that take a step, and rows whose window is run again.
    groups: [Group; 2],
    /// All rows in order.
    all: Vec<usize>,
    closing: Group,
    actions: Row,
}

#[derive(Debug)]
enum Mode {
    Phases(Box<Phases>),
    /// The window is run again; with phases, only once it slides.
    Rerun {
        look: Box<Programs>,
        close: Box<Programs>,
        history: History,
        first: Option<Box<Phases>>,
    },
    Plan {
        plans: Box<Plans>,
        history: History,
    },
}

impl Mode {
    /// The newest steps of every row, where they are kept.
    fn history(&self) -> Option<&History> {
        match self {
            Mode::Phases(_) => None,
            Mode::Rerun { history, .. } | Mode::Plan { history, .. } => Some(history),
        }
    }

    /// Whether windows slide and rows take single steps until theirs does.
    fn steps_until_it_slides(&self) -> bool {
        matches!(self, Mode::Rerun { first: Some(_), .. })
    }

    /// The phases of single steps, if there are any.
    fn phases_mut(&mut self) -> Option<&mut Phases> {
        match self {
            Mode::Phases(phases) => Some(phases),
            Mode::Rerun { first, .. } => first.as_deref_mut(),
            Mode::Plan { .. } => None,
        }
    }

    fn history_mut(&mut self) -> Option<&mut History> {
        match self {
            Mode::Phases(_) => None,
            Mode::Rerun { history, .. } | Mode::Plan { history, .. } => Some(history),
        }
    }
}

/// The programs of the four phases, where the architecture has something to compute in them.
#[derive(Debug)]
struct Phases {
    begin: Option<Programs>,
    observe: Programs,
    act: Option<Programs>,
    close: Option<Programs>,
}

impl Session {
    /// A session of `rows` rows with the parameters in `params` (shared, not copied). Rows start as after
    /// `reset` with seeds 0, 1, ... Programs are compiled when they are first needed.
    pub fn new(
        architecture: impl Into<Arc<dyn Architecture>>,
        params: &Store,
        rows: usize,
        device: impl Into<Device>,
    ) -> Result<Self> {
        Self::build(architecture.into(), params, rows, device.into().exact(), Weights::F32, false)
    }

    /// [`Session::new`] with weights kept as `weights` says. Rounded weights are copies, which do not follow later changes
    /// of `params`.
    pub fn with_weights(
        architecture: impl Into<Arc<dyn Architecture>>,
        params: &Store,
        rows: usize,
        device: impl Into<Device>,
        weights: Weights,
    ) -> Result<Self> {
        Self::build(architecture.into(), params, rows, device.into().exact(), weights, false)
    }

    /// [`Session::new`], recording what every step does: see [`Session::take_records`].
    pub fn recording(
        architecture: impl Into<Arc<dyn Architecture>>,
        params: &Store,
        rows: usize,
        device: impl Into<Device>,
    ) -> Result<Self> {
        Self::build(architecture.into(), params, rows, device.into().exact(), Weights::F32, true)
    }

    fn build(
        architecture: Arc<dyn Architecture>,
        params: &Store,
        rows: usize,
        device: Device,
        weights: Weights,
        recording: bool,
    ) -> Result<Self> {
        architecture.validate()?;
        if weights == Weights::Bf16 && !device.is_cpu() {
            let got = "a GPU, whose products have a precision of their own";
            return Err(Error::input("weights", "a CPU for weights of bf16", got));
        }
        if rows == 0 {
            return Err(Error::input("session", "at least one row", "0"));
        }
        if i32::try_from(rows).is_err() {
            return Err(Error::input("session", "at most 2^31 - 1 rows", rows.to_string()));
        }
        let (carried, derived) = (Store::on(&device), Store::on(&device));
        let context = Context {
            architecture: Arc::clone(&architecture),
            device,
            params: params.clone(),
            carried,
            derived,
            capacity: rows,
            recording,
            rounded: (weights == Weights::Bf16).then(RoundedWeights::default),
        };
        let (ends, window) = (architecture.ends(), architecture.window());
        check_window(&*architecture, rows)?;
        let planner = architecture.planner(params, &context.device, rows)?;
        let (carried, mode) = if let Some(planner) = planner {
            let plans = Box::new(Plans::new(planner, rows, ends.action.outputs())?);
            let history = History::new(ends, rows, plans.looks_back())?;
            (Vec::new(), Mode::Plan { plans, history })
        } else {
            let mut all = Vec::new();
            let mut again = None;
            if window.slides || !architecture.steps_exactly() {
                let [look, close] = [false, true].map(|closing| Work::Rerun { closing });
                declare(&context, close, &mut all)?;
                again = Some([look, close].map(|work| Box::new(Programs::new(work))));
            }
            if let (true, Some(state)) = (window.slides, all.first()) {
                let expected = "no carried state beside a sliding window";
                return Err(Error::input("session", expected, state.name.clone()));
            }
            let mut phases = None;
            if architecture.steps_exactly() {
                let begin = declare(&context, Work::Phase(Phase::Begin), &mut all)?;
                let observe = declare(&context, Work::Phase(Phase::Observe), &mut all)?;
                let act = declare(&context, Work::Phase(Phase::Act), &mut all)?;
                let close = match window.slides {
                    true => None,
                    false => declare(&context, Work::Phase(Phase::Close), &mut all)?,
                };
                let observe = observe.unwrap_or(Programs::new(Work::Phase(Phase::Observe)));
                phases = Some(Box::new(Phases { begin, observe, act, close }));
            }
            match (again, phases) {
                (Some([look, close]), first) => {
                    let history = History::new(ends, rows, window.steps)?;
                    (all, Mode::Rerun { look, close, history, first })
                }
                (None, Some(phases)) => (all, Mode::Phases(phases)),
                (None, None) => return Err(Error::input("session", "windows or steps", "neither")),
            }
        };
        let reserved = |c: &&Carried| {
            ["times", "clock", "seeds", "draws", STEPPED, PLANS, PLAYED].contains(&c.name.as_str())
                || c.name.contains(' ')
        };
        if let Some(state) = carried.iter().find(reserved) {
            let expected = "other names of states than those of a snapshot, without blanks";
            return Err(Error::input("session", expected, state.name.clone()));
        }
        let mut session = Self {
            observation: ends.observation.to_vec(),
            widths: observation_widths(ends.observation),
            action: ends.action.clone(),
            tokens: ends.tokens,
            window,
            carried,
            mode,
            times: vec![0; rows],
            rows: vec![RowState::default(); rows],
            returns: vec![0.0; rows],
            outputs: Vec::with_capacity(rows * ends.action.outputs()),
            scratch: Scratch { all: (0..rows).collect(), ..Scratch::default() },
            records: recording.then(Vec::new),
            deferring: false,
            due: Due::default(),
            fingerprint: None,
            context,
        };
        let seeds: Vec<(usize, u64)> = (0..rows).map(|row| (row, row as u64)).collect();
        session.reset(&seeds)?;
        Ok(session)
    }

    /// Rows of the bank.
    pub fn rows(&self) -> usize {
        self.times.len()
    }

    /// The architecture, which is also its configuration.
    pub fn architecture(&self) -> &dyn Architecture {
        &*self.context.architecture
    }

    /// How many floats, integers and bytes one observation has.
    pub fn observation_widths(&self) -> Widths {
        self.widths
    }

    /// How many floats or integers one action has.
    pub fn action_widths(&self) -> Widths {
        let dim = self.action.dim();
        let (floats, ints) = if self.action.is_discrete() { (0, dim) } else { (dim, 0) };
        Widths { floats, ints, bytes: 0 }
    }

    /// Environment steps since each row's episode began.
    pub fn times(&self) -> &[u64] {
        &self.times
    }

    /// The states that the architecture carries from step to step.
    pub fn states(&self) -> &[Carried] {
        &self.carried
    }

    /// The state `name` of the given rows, [rows, ...]. With deferred writes, call [`Session::settle`] first to see the
    /// newest.
    pub fn state(&self, name: &str, rows: &[usize]) -> Result<TensorData> {
        Ok(match self.context.carried.ty(name)?.dtype {
            DType::I64 => TensorData::I64(self.context.carried.get_rows(name, rows)?),
            _ => TensorData::F32(self.context.carried.get_rows(name, rows)?),
        })
    }

    /// Starts new episodes in the given (row, seed) pairs; other rows go on undisturbed. The seed decides a
    /// random initial state and the draws of [`Choose::Sample`]: the same seed gives the same episode. The
    /// cost is that of the rows listed.
    pub fn reset(&mut self, rows: &[(usize, u64)]) -> Result<()> {
        let numbers: Vec<usize> = rows.iter().map(|(row, _)| *row).collect();
        self.check_rows("reset", &numbers, Some(false))?;
        self.prepare_begin(&numbers)?;
        self.settle()?;
        for (some, numbers) in rows.chunks(AT_ONCE).zip(numbers.chunks(AT_ONCE)) {
            self.start_states(some, numbers)?;
            for &(row, seed) in some {
                self.times[row] = 0;
                self.rows[row] = RowState { draws: Draws { seed, next: 0 }, ..RowState::default() };
                if let Some(history) = self.mode.history_mut() {
                    history.clear(row);
                }
                if let Mode::Plan { plans, .. } = &mut self.mode {
                    plans.clear(row);
                }
            }
            self.begin(numbers)?;
        }
        Ok(())
    }

    /// Puts the carried states of rows to how they begin.
    fn start_states(&mut self, rows: &[(usize, u64)], numbers: &[usize]) -> Result<()> {
        let mut streams = 0;
        for state in &self.carried {
            let each: usize = state.shape.iter().product();
            let store = &self.context.carried;
            match &state.start {
                Start::Never => store.set_rows(&state.name, numbers, &vec![-1i64; each * rows.len()])?,
                Start::Zeros => store.set_rows(&state.name, numbers, &vec![0f32; each * rows.len()])?,
                Start::Normal(std) => {
                    let mut noise = vec![0.0; each];
                    let mut data = Vec::with_capacity(each * rows.len());
                    for (_, seed) in rows {
                        Stream::new(*seed, 0, streams).fill_normal(&mut noise, *std);
                        data.extend(noise.iter().map(|x| *x as f32));
                    }
                    store.set_rows(&state.name, numbers, &data)?;
                    streams += 1;
                }
                Start::Uniform => {
                    let draws = |seed: u64| {
                        let stream = Stream::new(seed, 0, streams);
                        (0..each as u64).map(move |i| unit(stream.draw(i)) as f32)
                    };
                    let data: Vec<f32> = rows.iter().flat_map(|(_, seed)| draws(*seed)).collect();
                    store.set_rows(&state.name, numbers, &data)?;
                    streams += 1;
                }
                Start::Learned(parameter, _) => {
                    let learned = self.context.params.get::<f32>(parameter)?;
                    store.set_rows(&state.name, numbers, &learned.repeat(rows.len()))?;
                }
            }
        }
        Ok(())
    }

    /// Recomputes what was cached from the parameters; call after they have changed. Open windows keep their
    /// tokens.
    pub fn refresh(&mut self) -> Result<()> {
        self.settle()?;
        self.fingerprint = None;
        let all = std::mem::take(&mut self.scratch.all);
        let refreshed = self
            .check_rows("refresh", &all, Some(false))
            .and_then(|()| all.chunks(AT_ONCE).try_for_each(|rows| self.begin(rows)));
        self.scratch.all = all;
        refreshed
    }

    /// Compiles what `begin` will need, so that a failure comes before anything is changed.
    fn prepare_begin(&mut self, rows: &[usize]) -> Result<()> {
        let phases = self.mode.phases_mut();
        let Some(programs) = phases.and_then(|phases| phases.begin.as_mut()) else { return Ok(()) };
        rows.chunks(AT_ONCE).try_for_each(|rows| programs.compile(&self.context, rows))
    }

    fn begin(&mut self, rows: &[usize]) -> Result<()> {
        let phases = self.mode.phases_mut();
        let Some(programs) = phases.and_then(|phases| phases.begin.as_mut()) else { return Ok(()) };
        for part in parts(rows, self.context.capacity) {
            let program = programs.of(&self.context, part)?;
            fill_rows(program, rows, part)?;
            program.program.run()?;
        }
        Ok(())
    }

    /// Checks a list of rows: each below the number of rows, none twice, all inside a step (or none, or
    /// either).
    fn check_rows(&mut self, what: &'static str, rows: &[usize], open: Option<bool>) -> Result<()> {
        let count = self.rows.len();
        let mut problem = None;
        for (i, &row) in rows.iter().enumerate() {
            problem = match self.rows.get_mut(row) {
                None => Some((format!("rows below {count}"), row.to_string())),
                Some(state) if state.listed => {
                    Some(("every row once".to_owned(), format!("row {row} twice")))
                }
                Some(state) if state.open && open == Some(false) => {
                    Some(("commit after the previous forward".to_owned(), "an open step".to_owned()))
                }
                Some(state) if !state.open && open == Some(true) => {
                    Some(("forward first".to_owned(), "no step begun".to_owned()))
                }
                Some(state) => {
                    state.listed = true;
                    None
                }
            };
            if problem.is_some() {
                rows[..i].iter().for_each(|row| self.rows[*row].listed = false);
                break;
            }
        }
        match problem {
            Some((expected, got)) => Err(Error::input(what, expected, got)),
            None => {
                rows.iter().for_each(|row| self.rows[*row].listed = false);
                Ok(())
            }
        }
    }

    /// Acts in the listed rows: observations in, actions out, in the order of the list. Other rows keep their
    /// time and state.
    ///
    /// `actions` has room for one action per listed row. With action tokens the chosen action is the one that
    /// goes on; use [`Session::forward`] and [`Session::commit`] to take another.
    pub fn select_action(
        &mut self,
        rows: &[usize],
        seen: Seen<'_>,
        how: Choose,
        mut actions: ValuesMut<'_>,
    ) -> Result<()> {
        let (dim, discrete) = (self.action.dim(), self.action.is_discrete());
        let room = if discrete { actions.ints.len() } else { actions.floats.len() };
        if room != dim * rows.len() {
            let expected = format!("room for {} numbers", dim * rows.len());
            return Err(Error::input("actions", expected, room.to_string()));
        }
        self.forward(rows, seen)?;
        let finite = |x: &f32| x.is_finite();
        if !discrete && !self.outputs.iter().all(finite) {
            rows.iter().for_each(|row| self.rows[*row].open = false);
            return Err(Error::input("policy", "finite actions", "others; reset these rows"));
        }
        let (widths, outputs) = (self.action_widths(), self.action.outputs());
        for (i, row) in rows.iter().enumerate() {
            let outputs = &self.outputs[i * outputs..(i + 1) * outputs];
            choose(&self.action, outputs, how, &mut self.rows[*row].draws, actions.row(widths, i));
        }
        let chosen = if discrete { Values::ints(actions.ints) } else { Values::floats(actions.floats) };
        self.commit(rows, chosen)
    }

    /// Head outputs [rows, outputs] for the next observation of every row (logits, or continuous actions).
    /// With action tokens the greedy action is the one that goes on.
    pub fn act<'s, 'a>(&'s mut self, seen: impl Into<Seen<'a>>) -> Result<&'s [f32]> {
        let all = std::mem::take(&mut self.scratch.all);
        let mut actions = std::mem::take(&mut self.scratch.actions);
        let count = self.action.dim() * all.len();
        actions.clear();
        if self.action.is_discrete() {
            actions.ints.resize(count, 0);
        } else {
            actions.floats.resize(count, 0.0);
        }
        let acted = self.select_action(&all, seen.into(), Choose::Greedy, actions.as_mut());
        (self.scratch.all, self.scratch.actions) = (all, actions);
        acted?;
        Ok(&self.outputs)
    }

    /// Head outputs [listed rows, outputs] for the next observations of the listed rows, without ending their
    /// step.
    pub fn forward(&mut self, rows: &[usize], seen: Seen<'_>) -> Result<&[f32]> {
        self.check_rows("forward", rows, Some(false))?;
        check_observation(&self.observation, self.widths, seen.observation, rows.len())?;
        if let Some(row) = rows.iter().find(|row| self.times[**row] >= MAX_TIME) {
            return Err(Error::input(
                "forward",
                format!("episodes of at most {MAX_TIME} steps"),
                row.to_string(),
            ));
        }
        if self.tokens.has(Token::Return) {
            let expected = "a return-to-go per row, which this token format reads";
            let returns = seen.returns.ok_or_else(|| Error::input("returns", expected, "none"))?;
            check_floats("returns", returns, rows.len())?;
            rows.iter().zip(returns).for_each(|(row, r)| self.returns[*row] = *r);
        }
        self.settle()?;
        let mut groups = std::mem::take(&mut self.scratch.groups);
        self.group(rows, &mut groups);
        let computed = self.compute(rows, seen, &groups);
        self.scratch.groups = groups;
        computed?;
        rows.iter().for_each(|row| self.rows[*row].open = true);
        Ok(&self.outputs)
    }

    /// Divides rows into those that take a step and those whose window is run again.
    fn group(&self, rows: &[usize], groups: &mut [Group; 2]) {
        for Group { rows, entries } in groups.iter_mut() {
            rows.clear();
            entries.clear();
        }
        let steps = self.window.steps as u64;
        for (entry, &row) in rows.iter().enumerate() {
            let steps_now = match &self.mode {
                Mode::Phases(_) => true,
                Mode::Rerun { first, .. } => {
                    first.is_some() && self.times[row] < steps && !self.rows[row].unstepped
                }
                Mode::Plan { .. } => continue,
            };
            let group = &mut groups[usize::from(!steps_now)];
            group.rows.push(row);
            group.entries.push(entry);
        }
    }

    /// Head outputs of the listed rows, in the order of the list.
    fn compute(&mut self, rows: &[usize], seen: Seen<'_>, groups: &[Group; 2]) -> Result<()> {
        let [stepping, again] = groups;
        if let Some(phases) = self.mode.phases_mut() {
            phases.observe.compile(&self.context, &stepping.rows)?;
        }
        if let Mode::Rerun { look, .. } = &mut self.mode {
            look.compile(&self.context, &again.rows)?;
        }
        let outputs = self.action.outputs();
        self.outputs.clear();
        self.outputs.resize(rows.len() * outputs, 0.0);
        let mut record = self.records.is_some().then(|| {
            // In the order in which they are computed.
            let grouped = [&stepping.rows[..], &again.rows].concat();
            let rows = if grouped.is_empty() { rows.to_vec() } else { grouped };
            let times = rows.iter().map(|row| self.times[*row]).collect();
            StepRecord { rows, times, ..StepRecord::default() }
        });
        if let Some(history) = self.mode.history_mut() {
            for (entry, &row) in rows.iter().enumerate() {
                let time = self.times[row];
                history.observe(row, time, seen.observation, self.widths, entry);
                let returns = Values::floats(&self.returns[row..=row]);
                history.keep(Field::ReturnToGo, row, time, returns);
            }
        }
        if let Mode::Plan { plans, history } = &mut self.mode {
            plans.make(rows, &self.times, history, &mut self.rows)?;
            for (target, row) in self.outputs.chunks_exact_mut(outputs).zip(rows) {
                target.copy_from_slice(plans.next(*row));
            }
            if let Some(record) = &mut record {
                let data = rows.iter().flat_map(|row| plans.of(*row)).copied().collect();
                let tapped = Tapped { shape: plans.shape(), data: TensorData::F32(data) };
                record.taps.insert("plan".to_owned(), tapped);
            }
        }
        let moment = |group| Moment {
            phase: Phase::Observe,
            window: self.window,
            tokens: self.tokens,
            observation: &self.observation,
            times: &self.times,
            group,
            returns: &self.returns,
            closing: false,
            states: &self.rows,
        };
        if let Some(phases) = self.mode.phases_mut() {
            let (moment, observation) = (moment(stepping), self.tokens.observation_index());
            for part in parts(&stepping.rows, self.context.capacity) {
                let program = phases.observe.of(&self.context, part)?;
                moment.fill(program, part, seen.observation, self.widths)?;
                program.program.run()?;
                let all = program.program.get::<f32>("outputs")?;
                for (i, from) in all.chunks_exact(outputs).take(part.count).enumerate() {
                    let entry = stepping.entries[part.first + i];
                    self.outputs[entry * outputs..(entry + 1) * outputs].copy_from_slice(from);
                }
                if let Some(record) = &mut record {
                    record::collect(&mut record.taps, program, part.count, |_| observation, |_| true)?;
                }
            }
        }
        if let Mode::Rerun { look, history, .. } = &mut self.mode {
            let moment = moment(again);
            for part in parts(&again.rows, self.context.capacity) {
                let program = look.of(&self.context, part)?;
                moment.fill_window(program, part, history)?;
                program.program.run()?;
                let all = program.program.get::<f32>("outputs")?;
                // Those of all steps, or of the current one alone.
                let steps = all.len() / (program.rows * outputs);
                for i in 0..part.count {
                    let step = (moment.shown(again.rows[part.first + i]).count - 1).min(steps - 1);
                    let (from, entry) = ((i * steps + step) * outputs, again.entries[part.first + i]);
                    self.outputs[entry * outputs..(entry + 1) * outputs]
                        .copy_from_slice(&all[from..from + outputs]);
                }
                if let Some(record) = &mut record {
                    let token = |i: usize| moment.observation_token(again.rows[part.first + i]);
                    let kept = |tap: &Tap| tap.by_token;
                    record::collect(&mut record.taps, program, part.count, token, kept)?;
                }
            }
        }
        if let (Some(records), Some(record)) = (&mut self.records, record) {
            records.push(record);
        }
        Ok(())
    }

    /// Ends the step of the listed rows: appends the tokens that follow the observation, advances time, and
    /// closes the window of rows where it is full. `actions`, one per listed row, are needed by formats with
    /// action tokens; others ignore them.
    pub fn commit(&mut self, rows: &[usize], actions: Values<'_>) -> Result<()> {
        self.check_rows("commit", rows, Some(true))?;
        let has_actions = self.tokens.has(Token::Action);
        if has_actions {
            if actions.ints.is_empty() && actions.floats.is_empty() && !rows.is_empty() {
                return Err(Error::input("commit", "actions, which this token format appends", "none"));
            }
            check_actions(&self.action, actions, rows.len())?;
        }
        self.settle()?;
        let length = self.window.steps as u64;
        let mut closing = std::mem::take(&mut self.scratch.closing);
        closing.rows.clear();
        closing.entries.clear();
        let ends = |row: &usize| !self.window.slides && self.times[*row] % length == length - 1;
        closing.rows.extend(rows.iter().copied().filter(ends));
        closing.entries.extend(0..closing.rows.len());
        let mut groups = std::mem::take(&mut self.scratch.groups);
        self.group(rows, &mut groups);
        let stepping = &groups[0];
        let done = self
            .prepare_finish(&stepping.rows, &closing.rows)
            .and_then(|()| self.finish(rows, stepping, actions, &closing));
        if done.is_ok() && self.defers() && !closing.rows.is_empty() {
            std::mem::swap(&mut self.due.group, &mut closing);
            self.due.times.clone_from(&self.times);
        }
        (self.scratch.closing, self.scratch.groups) = (closing, groups);
        done?;
        for &row in rows {
            self.times[row] += 1;
            self.rows[row].open = false;
        }
        Ok(())
    }

    /// With `defer`, leaves the end of a window to [`Session::settle`]. The end of a window writes the memory; the
    /// action of its last step does not depend on it, and then comes as soon as every other. Policies that run their
    /// window again at every step have no such end, and sessions that record close windows at once.
    pub fn defer_writes(&mut self, defer: bool) -> Result<()> {
        if !defer {
            self.settle()?;
        }
        self.deferring = defer;
        Ok(())
    }

    /// Whether commits leave the ends of windows for later.
    fn defers(&self) -> bool {
        self.deferring
            && self.records.is_none()
            && matches!(&self.mode, Mode::Phases(phases) if phases.close.is_some())
    }

    /// Closes the windows that [`Session::defer_writes`] left open: to be called while the environment moves. Without
    /// that call the next step, reset or snapshot closes them first; results are the same to the bit.
    pub fn settle(&mut self) -> Result<()> {
        if self.due.group.rows.is_empty() {
            return Ok(());
        }
        let Due { group, times } = &self.due;
        let moment = Moment {
            phase: Phase::Close,
            window: self.window,
            tokens: self.tokens,
            observation: &self.observation,
            times,
            group,
            returns: &self.returns,
            closing: true,
            states: &self.rows,
        };
        if let Some(close) = self.mode.phases_mut().and_then(|phases| phases.close.as_mut()) {
            close_windows(close, &self.context, &moment, None)?;
        }
        self.due.group.rows.clear();
        Ok(())
    }

    /// Compiles what `finish` will need, so that a failure comes before anything is changed.
    fn prepare_finish(&mut self, stepping: &[usize], closing: &[usize]) -> Result<()> {
        if let Some(phases) = self.mode.phases_mut() {
            if let Some(act) = &mut phases.act {
                act.compile(&self.context, stepping)?;
            }
            if let Some(close) = &mut phases.close {
                close.compile(&self.context, closing)?;
            }
        }
        match &mut self.mode {
            Mode::Rerun { close, .. } if !self.carried.is_empty() => close.compile(&self.context, closing),
            _ => Ok(()),
        }
    }

    /// The programs of the end of a step.
    fn finish(
        &mut self,
        rows: &[usize],
        stepping: &Group,
        actions: Values<'_>,
        closing: &Group,
    ) -> Result<()> {
        let action_widths = Widths {
            floats: actions.floats.len() / rows.len().max(1),
            ints: actions.ints.len() / rows.len().max(1),
            bytes: 0,
        };
        let deferred = self.defers();
        let mut closed = (self.records.is_some() && !closing.rows.is_empty())
            .then(|| ClosedRecord { rows: closing.rows.clone(), ..ClosedRecord::default() });
        let moment = |phase: Phase, group, closing| Moment {
            phase,
            window: self.window,
            tokens: self.tokens,
            observation: &self.observation,
            times: &self.times,
            group,
            returns: &self.returns,
            closing,
            states: &self.rows,
        };
        if let Some(history) = self.mode.history_mut().filter(|_| self.tokens.has(Token::Action)) {
            for (entry, &row) in rows.iter().enumerate() {
                let action = actions.rows(action_widths, entry, 1);
                history.keep(Field::Action, row, self.times[row], action);
            }
        }
        if let Some(phases) = self.mode.phases_mut() {
            if let Some(act) = &mut phases.act {
                for part in parts(&stepping.rows, self.context.capacity) {
                    let program = act.of(&self.context, part)?;
                    moment(Phase::Act, stepping, false).fill(program, part, actions, action_widths)?;
                    program.program.run()?;
                }
            }
            match &mut phases.close {
                Some(_) if deferred => {}
                Some(close) => {
                    let moment = moment(Phase::Close, closing, true);
                    close_windows(close, &self.context, &moment, closed.as_mut())?;
                }
                None => closed = None,
            }
        }
        match &mut self.mode {
            Mode::Phases(_) => {}
            Mode::Plan { plans, .. } => rows.iter().for_each(|row| plans.advance(*row)),
            Mode::Rerun { close, history, .. } => {
                if self.carried.is_empty() {
                    return Ok(());
                }
                let moment = moment(Phase::Close, closing, true);
                for part in parts(&closing.rows, self.context.capacity) {
                    let program = close.of(&self.context, part)?;
                    moment.fill_window(program, part, history)?;
                    program.program.run()?;
                    if let Some(closed) = &mut closed {
                        let kept = |tap: &Tap| !tap.by_token;
                        record::collect(&mut closed.taps, program, part.count, |_| 0, kept)?;
                    }
                }
            }
        }
        if let (Some(closed), Some(records)) = (closed, &mut self.records) {
            // After the step's record was taken, the end of its window is a record of its own.
            if records.is_empty() {
                records.push(StepRecord::default());
            }
            if let Some(last) = records.last_mut() {
                last.closed.push(closed);
            }
        }
        Ok(())
    }

    /// What was recorded since the last call; empty unless the session records.
    pub fn take_records(&mut self) -> Vec<StepRecord> {
        self.records.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The fingerprint of the session's policy: its configuration and parameters. It is computed when first
    /// needed and again after [`Session::refresh`].
    pub fn fingerprint(&mut self) -> Result<Fingerprint> {
        if let Some(known) = self.fingerprint {
            return Ok(known);
        }
        let computed = Fingerprint::of(&*self.context.architecture, &self.context.params)?;
        Ok(*self.fingerprint.insert(computed))
    }

    /// Everything that the listed rows remember, as a value: carried states, open windows, times, random
    /// streams, and the fingerprint of the policy. The cost is that of the rows listed; the first snapshot of
    /// a session also reads all parameters once.
    pub fn snapshot(&mut self, rows: &[usize]) -> Result<Snapshot> {
        self.check_rows("snapshot", rows, Some(false))?;
        self.settle()?;
        let mut tensors = Tensors::new();
        for state in &self.carried {
            let shape = [&[rows.len()], &state.shape[..]].concat();
            tensors.insert(state.name.clone(), HostTensor { shape, data: self.state(&state.name, rows)? });
        }
        if let Some(history) = self.mode.history() {
            for column in &history.columns {
                let shape = [&[rows.len(), history.steps], &column.shape[..]].concat();
                let data = column.rows(rows, history.steps);
                tensors.insert(format!("window.{}", column.name), HostTensor { shape, data });
            }
        }
        if let Mode::Plan { plans, .. } = &self.mode {
            plans.save(rows, &mut tensors);
        }
        if self.mode.steps_until_it_slides() {
            let stepped = rows.iter().map(|row| i64::from(!self.rows[*row].unstepped)).collect();
            let data = TensorData::I64(stepped);
            tensors.insert(STEPPED.to_owned(), HostTensor { shape: vec![rows.len()], data });
        }
        let times = rows.iter().map(|row| self.times[*row]).collect();
        let draws = rows.iter().map(|row| (self.rows[*row].draws.seed, self.rows[*row].draws.next)).collect();
        let in_time = self.carried.iter().filter(|state| state.start == Start::Never);
        let time_states = in_time.map(|state| state.name.clone()).collect();
        let fingerprint = Some(self.fingerprint()?);
        Ok(Snapshot { clock: self.clock(), times, draws, time_states, tensors, fingerprint })
    }

    /// Puts the rows of a snapshot into the listed rows, which go on from there bit for bit. The snapshot
    /// must come from a policy with the same configuration and parameters. A snapshot that does not fit
    /// changes nothing.
    pub fn restore(&mut self, rows: &[usize], snapshot: &Snapshot) -> Result<()> {
        self.check_rows("restore", rows, None)?;
        self.settle()?;
        if snapshot.times.len() != rows.len() {
            let got = snapshot.times.len().to_string();
            return Err(Error::input("restore", format!("{} rows", rows.len()), got));
        }
        if snapshot.clock != self.clock() {
            return Err(Error::input("restore", self.clock().to_string(), snapshot.clock.to_string()));
        }
        if let Some(theirs) = snapshot.fingerprint {
            let ours = self.fingerprint()?;
            if let Some(difference) = ours.difference(theirs) {
                let expected = format!("a snapshot of the session's policy ({ours})");
                let got = format!("one of a policy with {difference} ({theirs})");
                return Err(Error::input("restore", expected, got));
            }
        }
        let old = self.mode.steps_until_it_slides() && !snapshot.tensors.contains_key(STEPPED);
        let carried = if old { &[][..] } else { &self.carried };
        let mut stepped = vec![i64::from(!old); rows.len()];
        if self.mode.steps_until_it_slides() && !old {
            match snapshot.tensor(STEPPED, &[rows.len()])? {
                TensorData::I64(x) if x.iter().all(|x| [0, 1].contains(x)) => stepped.clone_from(x),
                _ => return Err(Error::input("restore", format!("0 or 1 in `{STEPPED}`"), "others")),
            }
        }
        for state in carried {
            let shape = [&[rows.len()], &state.shape[..]].concat();
            let data = snapshot.tensor(&state.name, &shape)?;
            let fits = match (data, state.dtype) {
                (TensorData::I64(x), DType::I64) => {
                    let each = state.shape.iter().product::<usize>().max(1);
                    x.chunks(each).zip(&snapshot.times).all(|(x, time)| {
                        let possible = |x: &i64| time_is_possible(*x, *time, self.tokens.per_step());
                        state.start != Start::Never || x.iter().all(possible)
                    })
                }
                (TensorData::F32(x), DType::F32) => x.iter().all(|x| x.is_finite()),
                _ => false,
            };
            if !fits {
                let expected = format!("finite {} of possible times in `{}`", state.dtype, state.name);
                return Err(Error::input("restore", expected, "others"));
            }
        }
        if let Mode::Plan { plans, .. } = &mut self.mode {
            let actions = snapshot.tensor(PLANS, &[&[rows.len()], &plans.shape()[..]].concat())?;
            let played = snapshot.tensor(PLAYED, &[rows.len()])?;
            if !plans.takes(actions, played) {
                return Err(Error::input("restore", format!("plans in `{PLANS}` and `{PLAYED}`"), "others"));
            }
        }
        if let Some(history) = self.mode.history_mut() {
            let steps = history.steps;
            for column in &history.columns {
                let shape = [&[rows.len(), steps], &column.shape[..]].concat();
                let name = format!("window.{}", column.name);
                if !column.takes(snapshot.tensor(&name, &shape)?) {
                    return Err(Error::input("restore", format!("finite numbers in `{name}`"), "others"));
                }
            }
            for column in &mut history.columns {
                let shape = [&[rows.len(), steps], &column.shape[..]].concat();
                let data = snapshot.tensor(&format!("window.{}", column.name), &shape)?;
                column.set_rows(rows, steps, data);
            }
        }
        if let Mode::Plan { plans, .. } = &mut self.mode {
            let actions = snapshot.tensor(PLANS, &[&[rows.len()], &plans.shape()[..]].concat())?;
            plans.restore(rows, actions, snapshot.tensor(PLAYED, &[rows.len()])?);
        }
        for state in carried {
            match snapshot.tensors.get(&state.name).map(|tensor| &tensor.data) {
                Some(TensorData::I64(x)) => self.context.carried.set_rows(&state.name, rows, x)?,
                Some(TensorData::F32(x)) => self.context.carried.set_rows(&state.name, rows, x)?,
                _ => {}
            }
        }
        for (i, &row) in rows.iter().enumerate() {
            self.times[row] = snapshot.times[i];
            let (seed, next) = snapshot.draws[i];
            let unstepped = stepped[i] == 0;
            self.rows[row] = RowState { draws: Draws { seed, next }, unstepped, ..RowState::default() };
        }
        Ok(())
    }

    fn clock(&self) -> Clock {
        Clock { per_step: self.tokens.per_step() as u64, steps: self.window.steps as u64 }
    }
}

/// Runs the programs that close the windows of the rows of a moment.
fn close_windows(
    programs: &mut Programs,
    context: &Context,
    moment: &Moment<'_>,
    mut closed: Option<&mut ClosedRecord>,
) -> Result<()> {
    for part in parts(&moment.group.rows, context.capacity) {
        let program = programs.of(context, part)?;
        moment.fill(program, part, Values::default(), Widths::default())?;
        program.program.run()?;
        if let Some(closed) = &mut closed {
            record::collect(&mut closed.taps, program, part.count, |_| 0, |_| true)?;
        }
    }
    Ok(())
}

/// Refuses windows that a session cannot run.
fn check_window(architecture: &dyn Architecture, rows: usize) -> Result<()> {
    let Window { steps, .. } = architecture.window();
    let tokens = steps.saturating_mul(architecture.ends().tokens.per_step());
    let refuse = |expected: &str, got: String| Err(Error::input("session", expected, got));
    if steps == 0 {
        return refuse("windows of at least one step", "0".to_owned());
    }
    if i32::try_from(rows.saturating_mul(tokens)).is_err() {
        return refuse("at most 2^31 - 1 tokens in the windows of all rows", format!("{rows} x {tokens}"));
    }
    Ok(())
}

/// Declares the states of some work, and adds those that are carried to the list; nothing if there is no such
/// work.
fn declare(context: &Context, work: Work, all: &mut Vec<Carried>) -> Result<Option<Programs>> {
    // For one row of the bank: the states are the bank's, whatever the number of rows at hand.
    let (graph, declared) = context.graph(work, 1, true)?;
    let insert = |store: &Store, name: &str| -> Result<()> {
        Ok(store.insert(name, graph.ty(graph.value(name)?)?.clone())?)
    };
    for state in declared.carried {
        insert(&context.carried, &state.name)?;
        if !all.iter().any(|known| known.name == state.name) {
            all.push(state);
        }
    }
    for name in &declared.derived {
        insert(&context.derived, name)?;
    }
    Ok((!graph.is_empty()).then(|| Programs::new(work)))
}
