//! Acting: a batch of episodes, each with its own memory and time, one step at a time.
//!
//! Inside a segment a step costs one token, whatever the time: keys and values of earlier tokens and of the memory are
//! cached. At a segment's last step the memory is written and the window cleared. Where a cache would not be exact
//! (`compat.newest_first_times`, `compat.absolute_offset`, shared memory) the window is run again at every step.

use elmur_engine::rng::Stream;
use elmur_engine::{DType, Device, Graph, Program, Store, Value};

use crate::config::{Action, MemoryInit, ModelConfig, Observation, Token};
use crate::error::{Error, Result};
use crate::memory::{self, MemoryState};
use crate::net::{Context, LayerMaps, MemoryValue, Net, Times, WriteMask, position_encodings};
use crate::segments::{anchor_state, memory_state, token_times};

/// One observation for every row of a session.
#[derive(Debug, Clone, Copy)]
pub enum Obs<'a> {
    /// Vectors [B, dim] or images [B, C, H, W] with pixels in 0..=1.
    Floats(&'a [f32]),
    /// Categorical components, [B, components].
    Ints(&'a [i32]),
    /// One entry per part of the observation.
    Parts(&'a [Obs<'a>]),
}

/// Actions for every row.
#[derive(Debug, Clone, Copy)]
pub enum Actions<'a> {
    /// Discrete, [B, components].
    Discrete(&'a [i32]),
    /// Continuous, [B, dim].
    Continuous(&'a [f32]),
}

/// What a session did in one step, if asked to record.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// Environment step of every row.
    pub times: Vec<u64>,
    /// Per layer: attention of the observation's token to the memory slots, [B, H, M].
    pub read: Vec<Vec<f32>>,
    /// Set when some rows ended a segment.
    pub write: Option<WriteRecord>,
}

/// A write, if asked to record.
#[derive(Debug, Clone, PartialEq)]
pub struct WriteRecord {
    /// Rows that wrote.
    pub rows: Vec<bool>,
    /// Per memory and write: slots written, [B, W].
    pub slots: Vec<Vec<i32>>,
    /// Per layer: attention of the candidates to the segment's tokens, [B, H, candidates, T].
    pub attention: Vec<Vec<f32>>,
    /// Per memory: vectors after the write, [B, M, d].
    pub memory: Vec<Vec<f32>>,
}

/// A batch of episodes under one policy.
///
/// ```
/// use elmur_model::session::{Obs, Session};
/// use elmur_model::{init, presets};
/// use elmur_engine::Pool;
///
/// let config = presets::model("tmaze-quick").unwrap();
/// let params = init::parameters(&config, 0)?;
///
/// // Two episodes side by side; the second starts anew after 25 steps.
/// let mut session = Session::new(&config, &params, 2, &Pool::new(1))?;
/// session.reset(&[(0, 1), (1, 2)])?;
/// for t in 0..40 {
///     if t == 25 {
///         session.reset(&[(1, 3)])?;
///     }
///     let logits = session.act(Obs::Floats(&[0.0; 8]), None)?;
///     assert_eq!(logits.len(), 2 * 4);
/// }
/// assert_eq!(session.times(), [40, 15]);
/// # Ok::<(), elmur_model::Error>(())
/// ```
#[derive(Debug)]
pub struct Session {
    config: ModelConfig,
    batch: usize,
    params: Store,
    state: Store,
    mode: Mode,
    /// Environment steps since the episode's start, per row.
    times: Vec<u64>,
    /// Waiting for `commit` after `forward`.
    pending: bool,
    outputs: Vec<f32>,
    actions: Vec<i32>,
    observation_names: Vec<String>,
    scratch: Scratch,
    record: Option<Vec<StepRecord>>,
}

/// Buffers that steps reuse.
#[derive(Debug, Default)]
struct Scratch {
    at: Vec<i32>,
    times: Vec<i64>,
    newest: Vec<i64>,
    active: Vec<bool>,
    /// Returns of the open step.
    returns: Vec<f32>,
}

#[derive(Debug)]
enum Mode {
    /// Key/value caches.
    Cached(Box<Cached>),
    /// The whole window at every step.
    Window(Box<Program>),
}

#[derive(Debug)]
struct Cached {
    /// Caches that follow from the memory and the parameters.
    prepare: Program,
    /// Tokens up to the observation.
    before: Program,
    /// Tokens after it, where the format has any.
    after: Option<Program>,
    write: Program,
}

/// Whether a key/value cache gives the model's exact results.
fn cache_is_exact(config: &ModelConfig) -> bool {
    !config.compat.newest_first_times && !config.compat.absolute_offset && !config.memory.shared
}

impl Session {
    /// A session of `batch` rows with the parameters in `params` (shared, not copied). Rows start as after
    /// `reset` with seeds 0, 1, ...
    pub fn new(
        config: &ModelConfig,
        params: &Store,
        batch: usize,
        device: impl Into<Device>,
    ) -> Result<Self> {
        Self::build(config, params, batch, &device.into(), false)
    }

    /// [`Session::new`], recording what every step does: see [`Session::take_records`].
    pub fn recording(
        config: &ModelConfig,
        params: &Store,
        batch: usize,
        device: impl Into<Device>,
    ) -> Result<Self> {
        Self::build(config, params, batch, &device.into(), true)
    }

    fn build(
        config: &ModelConfig,
        params: &Store,
        batch: usize,
        device: &Device,
        record: bool,
    ) -> Result<Self> {
        config.validate()?;
        if batch == 0 {
            return Err(Error::input("session", "at least one row", "0"));
        }
        let state = Store::on(device);
        let compile = |graph: &Graph| -> Result<Program> {
            state.declare_states(graph)?;
            Ok(Program::new(graph, device, &[&state, params])?)
        };
        let mode = if cache_is_exact(config) {
            let tokens = config.tokens.tokens();
            let (before, after) = tokens.split_at(config.tokens.observation_index() + 1);
            Mode::Cached(Box::new(Cached {
                prepare: compile(&prepare_graph(config, batch)?)?,
                before: compile(&step_graph(config, batch, before, true, record)?)?,
                after: if after.is_empty() {
                    None
                } else {
                    Some(compile(&step_graph(config, batch, after, false, false)?)?)
                },
                write: compile(&write_graph(config, batch, record)?)?,
            }))
        } else {
            Mode::Window(Box::new(compile(&window_graph(config, batch, record)?)?))
        };
        let observation_names = match &config.observation {
            Observation::Parts(parts) => (0..parts.len()).map(|i| format!("observation.{i}")).collect(),
            _ => vec!["observation".to_owned()],
        };
        let mut session = Self {
            config: config.clone(),
            batch,
            params: params.clone(),
            state,
            mode,
            times: vec![0; batch],
            pending: false,
            outputs: vec![0.0; batch * config.action.outputs()],
            actions: vec![0; batch * config.action.dim()],
            observation_names,
            scratch: Scratch::default(),
            record: record.then(Vec::new),
        };
        let seeds: Vec<(usize, u64)> = (0..batch).map(|row| (row, row as u64)).collect();
        session.reset(&seeds)?;
        Ok(session)
    }

    /// Rows of the batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Environment steps since each row's episode began.
    pub fn times(&self) -> &[u64] {
        &self.times
    }

    /// Starts new episodes in the given (row, seed) pairs; other rows go on undisturbed. The seed decides the random
    /// initial memory: the same seed gives the same episode.
    pub fn reset(&mut self, rows: &[(usize, u64)]) -> Result<()> {
        if let Some((row, _)) = rows.iter().find(|(row, _)| *row >= self.batch) {
            return Err(Error::input("reset", format!("rows below {}", self.batch), row.to_string()));
        }
        self.refuse_open_step("reset")?;
        let (slots, d) = (self.config.memory.slots, self.config.d_model);
        for i in 0..self.config.memories() {
            let mut vectors = self.state.get::<f32>(&memory_state(i))?;
            let mut anchors = self.state.get::<i64>(&anchor_state(i))?;
            for &(row, seed) in rows {
                anchors[row * slots..(row + 1) * slots].fill(-1);
                let target = &mut vectors[row * slots * d..(row + 1) * slots * d];
                match self.config.memory.init {
                    MemoryInit::Normal { std } => {
                        let mut noise = vec![0.0; slots * d];
                        Stream::new(seed, 0, i as u32).fill_normal(&mut noise, std);
                        target.iter_mut().zip(noise).for_each(|(t, x)| *t = x as f32);
                    }
                    MemoryInit::Learned => {
                        let name = format!("layers.{i}.memory_init");
                        self.params.with::<f32, _>(&name, |learned| target.copy_from_slice(learned))?;
                    }
                }
            }
            self.state.set(&memory_state(i), &vectors)?;
            self.state.set(&anchor_state(i), &anchors)?;
        }
        for &(row, _) in rows {
            self.times[row] = 0;
            self.clear_window(row)?;
        }
        self.scratch.active.clear();
        self.scratch.active.resize(self.batch, false);
        rows.iter().for_each(|(row, _)| self.scratch.active[*row] = true);
        self.prepare()
    }

    /// Forgets the open segment of a row that a window program holds.
    fn clear_window(&mut self, row: usize) -> Result<()> {
        let names = self.window_inputs();
        let Mode::Window(window) = &mut self.mode else { return Ok(()) };
        for name in names {
            let each = window.input_type(&name)?.len() / self.batch;
            match window.input_type(&name)?.dtype {
                DType::I32 => window.input_mut::<i32>(&name)?[row * each..(row + 1) * each].fill(0),
                _ => window.input_mut::<f32>(&name)?[row * each..(row + 1) * each].fill(0.0),
            }
        }
        Ok(())
    }

    fn refuse_open_step(&self, what: &'static str) -> Result<()> {
        if self.pending {
            Err(Error::input(what, "commit after the previous forward", "an open step"))
        } else {
            Ok(())
        }
    }

    /// Recomputes what was cached from the parameters; call after they have changed. Open segments keep their tokens.
    pub fn refresh(&mut self) -> Result<()> {
        self.refuse_open_step("refresh")?;
        self.scratch.active.clear();
        self.scratch.active.resize(self.batch, true);
        self.prepare()
    }

    /// Runs the prepare program for the rows in `scratch.active`; a window needs no caches.
    fn prepare(&mut self) -> Result<()> {
        if let Mode::Cached(cached) = &mut self.mode {
            cached.prepare.set("active", &self.scratch.active)?;
            cached.prepare.run()?;
        }
        Ok(())
    }

    /// Head outputs [B, outputs] for the next observation of every row (logits, or continuous actions). With action tokens
    /// the greedy action is taken as the action; use [`Session::forward`] and [`Session::commit`] to choose another.
    ///
    /// `returns` `[B]` are needed by formats with return tokens.
    pub fn act(&mut self, observation: Obs<'_>, returns: Option<&[f32]>) -> Result<&[f32]> {
        self.forward(observation, returns)?;
        if self.config.tokens.tokens().contains(&Token::Action) {
            let (actions, outputs) = (std::mem::take(&mut self.actions), std::mem::take(&mut self.outputs));
            let chosen = if self.config.action.is_discrete() {
                Actions::Discrete(&actions)
            } else {
                Actions::Continuous(&outputs)
            };
            let result = self.commit(Some(chosen));
            (self.actions, self.outputs) = (actions, outputs);
            result?;
        } else {
            self.commit(None)?;
        }
        Ok(&self.outputs)
    }

    /// Greedy discrete actions [B, components] of the last step; empty meaning for continuous heads.
    pub fn greedy_actions(&self) -> &[i32] {
        &self.actions
    }

    /// Head outputs for the next observation, without ending the step.
    pub fn forward(&mut self, observation: Obs<'_>, returns: Option<&[f32]>) -> Result<&[f32]> {
        self.refuse_open_step("forward")?;
        check_observation(&self.config.observation, observation, self.batch)?;
        let returns = if self.config.tokens.tokens().contains(&Token::Return) {
            let expected = "a return-to-go per row, which this token format reads";
            let returns = returns.ok_or_else(|| Error::input("returns", expected, "none"))?;
            check_floats("returns", returns, self.batch)?;
            returns
        } else {
            &[]
        };
        let (length, per_step) = (self.config.segment_length as u64, self.config.tokens.per_step());
        let index = self.config.tokens.observation_index();
        let scratch = &mut self.scratch;
        scratch.at.clear();
        scratch.times.clear();
        for &time in &self.times {
            scratch.at.push((time % length) as i32 * per_step as i32);
        }
        match &mut self.mode {
            Mode::Cached(cached) => {
                for &time in &self.times {
                    let first = time as i64 * per_step as i64;
                    scratch.times.extend(first..=first + index as i64);
                }
                let program = &mut cached.before;
                set_observation(program, &self.observation_names, observation)?;
                if !returns.is_empty() {
                    program.set("returns", returns)?;
                    scratch.returns.clear();
                    scratch.returns.extend_from_slice(returns);
                }
                program.set("at", &scratch.at)?;
                if self.config.memory.read && self.config.memory.relative_bias {
                    program.set("times", &scratch.times)?;
                }
                program.run()?;
                self.outputs.copy_from_slice(program.get("outputs")?);
            }
            Mode::Window(window) => {
                let tokens = self.config.segment_tokens();
                place_observation(window, &self.observation_names, observation, &self.times, length)?;
                if !returns.is_empty() {
                    place(window, "returns", returns, &self.times, length)?;
                }
                scratch.active.clear();
                scratch.active.resize(self.batch, false);
                let seen = |time: u64| (time % length) as usize * per_step + index + 1;
                set_window(&self.config, window, &self.times, seen, &scratch.active)?;
                window.run()?;
                let outputs = self.config.action.outputs();
                let all = window.get::<f32>("logits")?;
                for (row, target) in self.outputs.chunks_exact_mut(outputs).enumerate() {
                    let position = (self.times[row] % length) as usize;
                    let start = (row * tokens / per_step + position) * outputs;
                    target.copy_from_slice(&all[start..start + outputs]);
                }
            }
        }
        greedy(&self.config.action, &self.outputs, &mut self.actions);
        if let Some(records) = &mut self.record {
            let layers = if self.config.memory.read { self.config.layers } else { 0 };
            let mut read = Vec::new();
            for layer in 0..layers {
                read.push(read_map(&self.mode, &self.config, layer, &self.times, self.batch)?);
            }
            records.push(StepRecord { times: self.times.clone(), read, write: None });
        }
        self.pending = true;
        Ok(&self.outputs)
    }

    /// Ends the step: appends the tokens that follow the observation, advances time, and writes the memory of rows whose
    /// segment is complete. `actions` are needed by formats with action tokens.
    pub fn commit(&mut self, actions: Option<Actions<'_>>) -> Result<()> {
        if !self.pending {
            return Err(Error::input("commit", "forward first", "no step begun"));
        }
        let (length, per_step) = (self.config.segment_length as u64, self.config.tokens.per_step());
        let index = self.config.tokens.observation_index();
        let after = &self.config.tokens.tokens()[index + 1..];
        let scratch = &mut self.scratch;
        scratch.active.clear();
        scratch.active.extend(self.times.iter().map(|time| time % length == length - 1));
        let ends = scratch.active.contains(&true);
        scratch.newest.clear();
        scratch.newest.extend(self.times.iter().map(|t| (*t as i64 + 1) * per_step as i64 - 1));
        if after.contains(&Token::Action) {
            match actions {
                Some(actions) => check_actions(&self.config.action, actions, self.batch)?,
                None => {
                    return Err(Error::input("commit", "actions, which this token format appends", "none"));
                }
            }
        }
        match &mut self.mode {
            Mode::Cached(cached) => {
                if let Some(program) = &mut cached.after {
                    if let Some(actions) = actions.filter(|_| after.contains(&Token::Action)) {
                        set_actions(program, actions)?;
                    }
                    if after.contains(&Token::Return) {
                        program.set("returns", &scratch.returns)?;
                    }
                    scratch.times.clear();
                    scratch.at.clear();
                    for &time in &self.times {
                        scratch.at.push((time % length) as i32 * per_step as i32 + index as i32 + 1);
                        let first = time as i64 * per_step as i64 + index as i64 + 1;
                        scratch.times.extend(first..first + after.len() as i64);
                    }
                    program.set("at", &scratch.at)?;
                    if self.config.memory.read && self.config.memory.relative_bias {
                        program.set("times", &scratch.times)?;
                    }
                    program.run()?;
                }
                if ends {
                    let program = &mut cached.write;
                    program.set("active", &scratch.active)?;
                    program.set("newest", &scratch.newest)?;
                    if self.config.memory.write && self.config.memory.relative_bias {
                        let tokens = (length as usize * per_step) as i64;
                        scratch.times.clear();
                        for newest in &scratch.newest {
                            scratch.times.extend(newest + 1 - tokens..=*newest);
                        }
                        program.set("times", &scratch.times)?;
                    }
                    program.run()?;
                }
            }
            Mode::Window(window) => {
                if let Some(actions) = actions.filter(|_| after.contains(&Token::Action)) {
                    match actions {
                        Actions::Discrete(data) => place(window, "action", data, &self.times, length)?,
                        Actions::Continuous(data) => place(window, "action", data, &self.times, length)?,
                    }
                }
                if ends {
                    let seen = |time: u64| ((time % length) as usize + 1) * per_step;
                    set_window(&self.config, window, &self.times, seen, &scratch.active)?;
                    window.run()?;
                }
            }
        }
        if ends && self.record.is_some() {
            let write = self.write_record()?;
            if let Some(last) = self.record.as_mut().and_then(|r| r.last_mut()) {
                last.write = Some(write);
            }
        }
        self.times.iter_mut().for_each(|t| *t += 1);
        self.pending = false;
        Ok(())
    }

    fn write_record(&self) -> Result<WriteRecord> {
        let program = match &self.mode {
            Mode::Cached(cached) => &cached.write,
            Mode::Window(window) => window,
        };
        let mut record = WriteRecord {
            rows: self.scratch.active.clone(),
            slots: Vec::new(),
            attention: Vec::new(),
            memory: Vec::new(),
        };
        for layer in 0..self.config.layers {
            record.slots.push(program.get::<i32>(&format!("slots.{layer}"))?.to_vec());
            if self.config.memory.write {
                record.attention.push(program.get::<f32>(&format!("write.{layer}"))?.to_vec());
            }
        }
        for i in 0..self.config.memories() {
            record.memory.push(self.state.get::<f32>(&memory_state(i))?);
        }
        Ok(record)
    }

    /// What was recorded since the last call; empty unless the session records.
    pub fn take_records(&mut self) -> Vec<StepRecord> {
        self.record.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Memory vectors [B, M, d] and anchors [B, M] of layer `i`.
    pub fn memory(&self, i: usize) -> Result<(Vec<f32>, Vec<i64>)> {
        Ok((self.state.get(&memory_state(i))?, self.state.get(&anchor_state(i))?))
    }

    /// Everything that the session remembers, as a value: memory, anchors, the open segment and the times.
    pub fn snapshot(&self) -> Result<MemoryState> {
        self.refuse_open_step("snapshot")?;
        let mut tensors = memory::from_store(&self.state, |name| !name.starts_with("projected."))?;
        if let Mode::Window(window) = &self.mode {
            memory::from_window(window, &self.window_inputs(), &mut tensors)?;
        }
        let (per_step, segment_length) =
            (self.config.tokens.per_step() as u64, self.config.segment_length as u64);
        Ok(MemoryState { per_step, segment_length, times: self.times.clone(), tensors })
    }

    /// Goes on from a snapshot of a session of the same model, parameters and batch, bit for bit. (With other parameters,
    /// call [`Session::refresh`] afterwards.) A snapshot that does not fit changes nothing.
    pub fn restore(&mut self, snapshot: &MemoryState) -> Result<()> {
        if snapshot.times.len() != self.batch {
            return Err(Error::input(
                "restore",
                format!("{} rows", self.batch),
                snapshot.times.len().to_string(),
            ));
        }
        let (per_step, segment_length) =
            (self.config.tokens.per_step() as u64, self.config.segment_length as u64);
        if (snapshot.per_step, snapshot.segment_length) != (per_step, segment_length) {
            let form = |a: u64, b: u64| format!("segments of {b} steps of {a} tokens");
            let got = form(snapshot.per_step, snapshot.segment_length);
            return Err(Error::input("restore", form(per_step, segment_length), got));
        }
        let inputs = self.window_inputs();
        let window = match &mut self.mode {
            Mode::Window(window) => Some((&mut **window, inputs.as_slice())),
            Mode::Cached(_) => None,
        };
        memory::restore(&snapshot.tensors, &self.state, |name| !name.starts_with("projected."), window)?;
        self.times.copy_from_slice(&snapshot.times);
        self.pending = false;
        Ok(())
    }

    /// Inputs of a window program that hold the open segment.
    fn window_inputs(&self) -> Vec<String> {
        let mut names = self.observation_names.clone();
        let tokens = self.config.tokens.tokens();
        for (token, name) in [(Token::Action, "action"), (Token::Return, "returns")] {
            if tokens.contains(&token) {
                names.push(name.to_owned());
            }
        }
        names
    }
}

fn set_observation(program: &mut Program, names: &[String], observation: Obs<'_>) -> Result<()> {
    match observation {
        Obs::Floats(data) => program.set(&names[0], data)?,
        Obs::Ints(data) => program.set(&names[0], data)?,
        Obs::Parts(parts) => {
            for (i, part) in parts.iter().enumerate() {
                set_observation(program, &names[i..=i], *part)?;
            }
        }
    }
    Ok(())
}

/// `count` finite numbers.
fn check_floats(what: &'static str, data: &[f32], count: usize) -> Result<()> {
    if data.len() != count {
        return Err(Error::input(what, format!("{count} numbers"), data.len().to_string()));
    }
    match data.iter().position(|x| !x.is_finite()) {
        Some(bad) => Err(Error::input(what, "finite numbers", format!("{} at {bad}", data[bad]))),
        None => Ok(()),
    }
}

/// Integers of `sizes.len()` components for every row, component i in 0..sizes[i] + `more`.
fn check_integers(
    what: &'static str,
    data: &[i32],
    sizes: &[usize],
    batch: usize,
    more: usize,
) -> Result<()> {
    if data.len() != sizes.len() * batch {
        return Err(Error::input(what, format!("{} integers", sizes.len() * batch), data.len().to_string()));
    }
    for (i, &x) in data.iter().enumerate() {
        let limit = sizes[i % sizes.len()] + more;
        if usize::try_from(x).is_ok_and(|x| x < limit) {
            continue;
        }
        return Err(Error::input(
            what,
            format!("0 to {} in component {}", limit - 1, i % sizes.len()),
            x.to_string(),
        ));
    }
    Ok(())
}

/// Everything about an observation that could be wrong, before anything is changed.
fn check_observation(expected: &Observation, observation: Obs<'_>, batch: usize) -> Result<()> {
    const WHAT: &str = "observation";
    match (expected, observation) {
        (Observation::Vector { dim }, Obs::Floats(data)) => check_floats(WHAT, data, batch * dim),
        (Observation::Image { channels, height, width }, Obs::Floats(data)) => {
            check_floats(WHAT, data, batch * channels * height * width)
        }
        (Observation::Categorical { sizes, .. }, Obs::Ints(data)) => {
            check_integers(WHAT, data, sizes, batch, 0)
        }
        (Observation::Parts(expected), Obs::Parts(parts)) if expected.len() == parts.len() => expected
            .iter()
            .zip(parts)
            .try_for_each(|(expected, part)| check_observation(expected, *part, batch)),
        (expected, observation) => {
            let expected = match expected {
                Observation::Vector { .. } | Observation::Image { .. } => "floats".to_owned(),
                Observation::Categorical { .. } => "integers".to_owned(),
                Observation::Parts(parts) => format!("{} parts", parts.len()),
            };
            let got = match observation {
                Obs::Floats(_) => "floats".to_owned(),
                Obs::Ints(_) => "integers".to_owned(),
                Obs::Parts(parts) => format!("{} parts", parts.len()),
            };
            Err(Error::input(WHAT, expected, got))
        }
    }
}

/// Everything about actions that could be wrong. A discrete action equal to its size means none.
fn check_actions(expected: &Action, actions: Actions<'_>, batch: usize) -> Result<()> {
    const WHAT: &str = "action";
    match (expected, actions) {
        (Action::Categorical { count }, Actions::Discrete(data)) => {
            check_integers(WHAT, data, &[*count], batch, 1)
        }
        (Action::MultiCategorical { sizes }, Actions::Discrete(data)) => {
            check_integers(WHAT, data, sizes, batch, 1)
        }
        (Action::Continuous { dim, .. }, Actions::Continuous(data)) => check_floats(WHAT, data, batch * dim),
        (Action::Continuous { .. }, _) => Err(Error::input(WHAT, "continuous actions", "discrete ones")),
        _ => Err(Error::input(WHAT, "discrete actions", "continuous ones")),
    }
}

fn place_observation(
    program: &mut Program,
    names: &[String],
    observation: Obs<'_>,
    times: &[u64],
    length: u64,
) -> Result<()> {
    match observation {
        Obs::Floats(data) => place(program, &names[0], data, times, length),
        Obs::Ints(data) => place(program, &names[0], data, times, length),
        Obs::Parts(parts) => {
            let mut each = parts.iter().enumerate();
            each.try_for_each(|(i, part)| place_observation(program, &names[i..=i], *part, times, length))
        }
    }
}

/// Puts one step's data [B, ...] into a window input [B, L, ...] at each row's position.
fn place<T: elmur_engine::Element>(
    program: &mut Program,
    name: &str,
    data: &[T],
    times: &[u64],
    length: u64,
) -> Result<()> {
    let target = program.input_mut::<T>(name)?;
    let row = target.len() / (times.len() * length as usize);
    if data.len() != row * times.len() {
        let expected = format!("{} elements", row * times.len());
        return Err(Error::input("observation, action or return", expected, data.len().to_string()));
    }
    for (b, source) in data.chunks_exact(row).enumerate() {
        let start = (b * length as usize + (times[b] % length) as usize) * row;
        target[start..start + row].copy_from_slice(source);
    }
    Ok(())
}

/// Fills the inputs of a window program that follow from time: `seen(time)` tokens of each row's segment exist.
fn set_window(
    config: &ModelConfig,
    program: &mut Program,
    times: &[u64],
    seen: impl Fn(u64) -> usize,
    active: &[bool],
) -> Result<()> {
    let (tokens, d) = (config.segment_tokens(), config.d_model);
    let start = |time: u64| time / config.segment_length as u64 * tokens as u64;
    for (b, &time) in times.iter().enumerate() {
        let row = token_times(config, start(time), seen(time));
        let target = &mut program.input_mut::<i64>("times")?[b * tokens..(b + 1) * tokens];
        target.fill(start(time) as i64);
        target[..row.len()].copy_from_slice(&row);
        program.input_mut::<i64>("newest")?[b] = (start(time) + seen(time) as u64) as i64 - 1;
        if config.compat.absolute_offset {
            let table = position_encodings(start(time), tokens, d);
            let target = &mut program.input_mut::<f32>("encodings")?[b * tokens * d..(b + 1) * tokens * d];
            target.iter_mut().zip(table).for_each(|(t, x)| *t = x as f32);
        }
    }
    if config.memory.write {
        let visible = program.input_mut::<bool>("visible")?;
        let per_row = visible.len() / times.len();
        for (row, &time) in visible.chunks_exact_mut(per_row).zip(times) {
            for query in row.chunks_exact_mut(tokens) {
                query.iter_mut().enumerate().for_each(|(i, v)| *v = i < seen(time));
            }
        }
    }
    program.set("active", active)?;
    Ok(())
}

fn set_actions(program: &mut Program, actions: Actions<'_>) -> Result<()> {
    match actions {
        Actions::Discrete(data) => program.set("action", data)?,
        Actions::Continuous(data) => program.set("action", data)?,
    }
    Ok(())
}

/// The largest logit of every component.
fn greedy(action: &Action, outputs: &[f32], actions: &mut [i32]) {
    let one = |logits: &[f32]| -> i32 {
        let mut best = 0;
        for (i, x) in logits.iter().enumerate() {
            if *x > logits[best] {
                best = i;
            }
        }
        best as i32
    };
    match action {
        Action::Categorical { count } => {
            outputs.chunks_exact(*count).zip(actions).for_each(|(logits, action)| *action = one(logits));
        }
        Action::MultiCategorical { sizes } => {
            let total: usize = sizes.iter().sum();
            for (row, actions) in outputs.chunks_exact(total).zip(actions.chunks_exact_mut(sizes.len())) {
                let mut first = 0;
                for (size, action) in sizes.iter().zip(actions) {
                    *action = one(&row[first..first + size]);
                    first += size;
                }
            }
        }
        Action::Continuous { .. } => {}
    }
}

/// Read attention of each row's current observation token, [B, H, M].
fn read_map(
    mode: &Mode,
    config: &ModelConfig,
    layer: usize,
    times: &[u64],
    batch: usize,
) -> Result<Vec<f32>> {
    let (program, per_step) = match mode {
        Mode::Cached(cached) => (&cached.before, config.tokens.observation_index() + 1),
        Mode::Window(window) => (&**window, config.tokens.per_step()),
    };
    let map = program.get::<f32>(&format!("read.{layer}"))?;
    let (heads, slots) = (config.heads, config.memory.slots);
    let tokens = map.len() / (batch * heads * slots);
    let mut rows = Vec::with_capacity(batch * heads * slots);
    for (b, time) in times.iter().enumerate() {
        let step = if tokens == per_step { 0 } else { (time % config.segment_length as u64) as usize };
        let token = step * per_step + config.tokens.observation_index();
        for h in 0..heads {
            rows.extend_from_slice(&map[((b * heads + h) * tokens + token) * slots..][..slots]);
        }
    }
    Ok(rows)
}

// ---- graphs ----

fn cache_state(layer: usize) -> String {
    format!("cache.{layer}")
}

fn hidden_state(layer: usize) -> String {
    format!("hidden.{layer}")
}

fn read_keys_state(layer: usize) -> String {
    format!("read_keys.{layer}")
}

fn projected_state(layer: usize) -> String {
    format!("projected.{layer}")
}

impl Net<'_> {
    fn memory_states(&mut self, layer: usize, batch: usize) -> Result<MemoryValue> {
        let (slots, d) = (self.config.memory.slots, self.config.d_model);
        Ok(MemoryValue {
            vectors: self.g.state(&memory_state(layer), self.dtype, [batch, slots, d])?,
            anchors: self.g.state(&anchor_state(layer), DType::I64, [batch, slots])?,
        })
    }
}

/// Caches that follow from memory and parameters, for the rows in `active`.
fn prepare_graph(config: &ModelConfig, batch: usize) -> Result<Graph> {
    let mut g = Graph::new();
    let active = g.input("active", DType::Bool, [batch])?;
    let (tokens, d, slots) = (config.segment_tokens(), config.d_model, config.memory.slots);
    let mut net = Net::new(&mut g, config, DType::F32, None);
    let encodings = net.float_constant(&position_encodings(0, tokens, d), [tokens, d])?;
    for layer in 0..config.layers {
        let projected = net.g.state(&projected_state(layer), DType::F32, [tokens, d])?;
        let r = net.project_encodings(layer, encodings)?;
        net.g.update(projected, r)?;
        let memory = net.memory_states(layer, batch)?;
        if config.memory.read {
            let keys = net.g.state(&read_keys_state(layer), DType::F32, [batch, slots, 2 * d])?;
            let new = net.read_keys(layer, memory.vectors)?;
            let new = net.g.select(active, new, keys)?;
            net.g.update(keys, new)?;
        }
    }
    Ok(g)
}

/// Some tokens of one step through all layers; `outputs` reads the head at the last of them.
fn step_graph(
    config: &ModelConfig,
    batch: usize,
    tokens: &[Token],
    outputs: bool,
    record: bool,
) -> Result<Graph> {
    let mut g = Graph::new();
    let mut net = Net::new(&mut g, config, DType::F32, None);
    let (all, d, slots) = (config.segment_tokens(), config.d_model, config.memory.slots);
    let at = net.g.input("at", DType::I32, [batch])?;
    let times = net.g.input("times", DType::I64, [batch, tokens.len()])?;
    let sources = net.declare_sources(&[batch, 1])?;
    let mut x = net.embed(tokens, &sources)?;
    for layer in 0..config.layers {
        let cache = net.g.state(&cache_state(layer), DType::F32, [batch, all, 2 * d])?;
        let projected = net.g.state(&projected_state(layer), DType::F32, [all, d])?;
        let (attended, new_cache) = net.attend(layer, x, Context::Cache { cache, projected, at })?;
        x = attended;
        if let Some(new_cache) = new_cache {
            net.g.update(cache, new_cache)?;
        }
        if config.memory.read {
            let keys = net.g.state(&read_keys_state(layer), DType::F32, [batch, slots, 2 * d])?;
            let anchors = net.g.state(&anchor_state(layer), DType::I64, [batch, slots])?;
            let (y, map) = net.read(layer, x, keys, anchors, times)?;
            x = y;
            if record {
                net.g.output(&format!("read.{layer}"), map)?;
            }
        }
        x = net.feed_forward(layer, "token", x)?;
        let hidden = net.g.state(&hidden_state(layer), DType::F32, [batch, all, d])?;
        let filled = net.g.write_rows(hidden, x, at)?;
        net.g.update(hidden, filled)?;
    }
    if outputs {
        let y = net.head(x, tokens.len(), tokens.len() - 1)?;
        net.g.output("outputs", y)?;
    }
    Ok(g)
}

/// The write at the end of a segment, for the rows in `active`.
fn write_graph(config: &ModelConfig, batch: usize, record: bool) -> Result<Graph> {
    let mut g = Graph::new();
    let mut net = Net::new(&mut g, config, DType::F32, None);
    let (all, d, slots) = (config.segment_tokens(), config.d_model, config.memory.slots);
    let active = net.g.input("active", DType::Bool, [batch])?;
    let times = Times {
        tokens: net.g.input("times", DType::I64, [batch, all])?,
        newest: net.g.input("newest", DType::I64, [batch])?,
    };
    for layer in 0..config.layers {
        let memory = net.memory_states(layer, batch)?;
        let hidden = net.g.state(&hidden_state(layer), DType::F32, [batch, all, d])?;
        let mask = WriteMask { visible: None, active: Some(active) };
        let written = net.write(layer, hidden, memory, times, mask)?;
        net.g.update(memory.vectors, written.memory.vectors)?;
        if written.memory.anchors != memory.anchors {
            net.g.update(memory.anchors, written.memory.anchors)?;
        }
        if config.memory.read {
            // Only the written slots have new keys.
            let keys = net.g.state(&read_keys_state(layer), DType::F32, [batch, slots, 2 * d])?;
            let vectors = net.g.gather_slots(written.memory.vectors, written.slots)?;
            let new = net.read_keys(layer, vectors)?;
            let replace = elmur_engine::Blend { lambda: 1.0, empty_slots_too: true, active: Some(active) };
            let (new_keys, _) =
                net.g.lru_blend(keys, memory.anchors, written.slots, new, times.newest, replace)?;
            net.g.update(keys, new_keys)?;
        }
        if record {
            net.g.output(&format!("slots.{layer}"), written.slots)?;
            if let Some(map) = written.weights {
                net.g.output(&format!("write.{layer}"), map)?;
            }
        }
    }
    Ok(g)
}

/// The whole open segment through all layers; memory is kept only for the rows in `active`.
fn window_graph(config: &ModelConfig, batch: usize, record: bool) -> Result<Graph> {
    let mut g = Graph::new();
    let mut net = Net::new(&mut g, config, DType::F32, None);
    let (all, d, m) = (config.segment_tokens(), config.d_model, &config.memory);
    let active = net.g.input("active", DType::Bool, [batch])?;
    let times = Times {
        tokens: net.g.input("times", DType::I64, [batch, all])?,
        newest: net.g.input("newest", DType::I64, [batch])?,
    };
    let encodings = if config.compat.absolute_offset {
        net.g.input("encodings", DType::F32, [batch, all, d])?
    } else {
        net.float_constant(&position_encodings(0, all, d), [all, d])?
    };
    let visible = if m.write {
        let queries = if m.candidates == crate::config::Candidates::All || !m.lru {
            m.slots
        } else {
            m.slots_per_write
        };
        Some(net.g.input("visible", DType::Bool, [batch, queries, all])?)
    } else {
        None
    };
    let sources = net.declare_sources(&[batch, config.segment_length])?;
    let mut states = Vec::new();
    for i in 0..config.memories() {
        states.push(net.memory_states(i, batch)?);
    }
    let mut memories = states.clone();
    let x = net.embed(config.tokens.tokens(), &sources)?;
    let mask = WriteMask { visible, active: None };
    let (hidden, maps): (Value, Vec<LayerMaps>) = net.segment(x, &mut memories, times, encodings, mask)?;
    let logits = net.head(hidden, config.tokens.per_step(), config.tokens.observation_index())?;
    net.g.output("logits", logits)?;
    for (state, memory) in states.iter().zip(&memories) {
        let vectors = net.g.select(active, memory.vectors, state.vectors)?;
        let anchors = net.g.select(active, memory.anchors, state.anchors)?;
        net.g.update(state.vectors, vectors)?;
        net.g.update(state.anchors, anchors)?;
    }
    if record {
        for (layer, map) in maps.iter().enumerate() {
            let named = [("read", map.read), ("write", map.write), ("slots", map.slots)];
            for (name, value) in named.into_iter().filter_map(|(name, value)| Some((name, value?))) {
                net.g.output(&format!("{name}.{layer}"), value)?;
            }
        }
    }
    Ok(g)
}
