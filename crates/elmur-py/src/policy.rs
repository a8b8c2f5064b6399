//! Policies that act, and what they remember.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use elmur::base::{Row, Widths};
use elmur::engine::{Device, Precision, Store};
use elmur::model::ends::Token;
use elmur::model::session::{Choose, Seen, Session, Weights};
use elmur::model::tensors::TensorData;
use elmur::model::{Checkpoint, Result};
use elmur::train::{RunFolder, memory_seed};
use numpy::{PyArrayDyn, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::arrays::{Given, Layout, Leaving, as_array, flags, floats_per_row, row_numbers, shaped};
use crate::rows::space_json;
use crate::{fail, refuse};

/// A policy with a number of rows, each an episode with a memory of its own.
#[pyclass(frozen, weakref, module = "elmur")]
pub struct Policy {
    checkpoint: Checkpoint,
    /// Parameters where they are computed with.
    params: Store,
    device: Device,
    placement: Placement,
    rows: usize,
    /// What the policy was asked for while it was validated, if it aims at a return.
    target_return: Option<f64>,
    observation: Layout,
    action: Layout,
    action_widths: Widths,
    acting: Mutex<Acting>,
    /// The session of `predict`, whose rows remember nothing from call to call.
    predicting: Mutex<Option<Session>>,
}

/// Where and how a policy is computed, as the caller said.
#[derive(Clone)]
struct Placement {
    device: String,
    threads: usize,
    weights: Weights,
}

impl Placement {
    fn new(device: &str, threads: usize, weights: &str) -> PyResult<Self> {
        let weights = match weights {
            "f32" => Weights::F32,
            "bf16" => Weights::Bf16,
            other => return Err(refuse("weights", "f32 or bf16", other)),
        };
        Ok(Self { device: device.to_owned(), threads, weights })
    }

    /// How weights are kept, by name.
    fn weights_name(&self) -> &'static str {
        match self.weights {
            Weights::F32 => "f32",
            Weights::Bf16 => "bf16",
        }
    }
}

struct Acting {
    session: Session,
    /// Seed of each row's episode.
    seeds: Vec<u64>,
}

impl Acting {
    /// Begins the next episode of some rows.
    fn begin(&mut self, rows: impl Iterator<Item = usize>) -> Result<()> {
        let next: Vec<(usize, u64)> = rows.map(|row| (row, memory_seed(self.seeds[row]))).collect();
        self.reset(&next)
    }

    fn reset(&mut self, rows: &[(usize, u64)]) -> Result<()> {
        self.session.reset(rows)?;
        rows.iter().for_each(|(row, seed)| self.seeds[*row] = *seed);
        Ok(())
    }
}

/// Everything that some rows of a policy remember.
#[pyclass(frozen, weakref, module = "elmur")]
pub struct Snapshot(Arc<elmur::model::Snapshot>);

#[pymethods]
impl Snapshot {
    /// A snapshot from the bytes of `bytes(snapshot)`.
    #[staticmethod]
    fn from_bytes(bytes: &[u8]) -> PyResult<Self> {
        snapshot_from_bytes(bytes)
    }

    /// Environment steps since each row's episode began.
    #[getter]
    fn times(&self) -> Vec<u64> {
        self.0.times().to_vec()
    }

    /// All states by name, [rows, ...].
    fn states<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let states = PyDict::new(py);
        for (name, tensor) in self.0.tensors() {
            states.set_item(name, state_array(py, tensor.data.clone(), &tensor.shape)?)?;
        }
        Ok(states)
    }

    fn __len__(&self) -> usize {
        self.0.times().len()
    }

    fn __bytes__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &py.detach(|| self.0.to_bytes()).map_err(fail)?))
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, PyBytes>,))> {
        let make = py.import("elmur._elmur")?.getattr("snapshot_from_bytes")?;
        Ok((make, (self.__bytes__(py)?,)))
    }

    fn __repr__(&self) -> String {
        format!("Snapshot(rows={}, times={:?})", self.0.times().len(), self.0.times())
    }
}

/// A snapshot from its bytes.
#[pyfunction]
pub fn snapshot_from_bytes(bytes: &[u8]) -> PyResult<Snapshot> {
    Ok(Snapshot(Arc::new(elmur::model::Snapshot::from_bytes(bytes).map_err(fail)?)))
}

/// A policy from what pickling keeps of it.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "what pickling keeps")]
pub fn policy_from_parts(
    py: Python<'_>,
    checkpoint: &[u8],
    rows: usize,
    device: &str,
    threads: usize,
    target_return: Option<f64>,
    snapshot: &[u8],
    weights: &str,
) -> PyResult<Policy> {
    let placement = Placement::new(device, threads, weights)?;
    let checkpoint = py.detach(|| Checkpoint::from_bytes(checkpoint)).map_err(fail)?;
    let policy = Policy::new(py, checkpoint, rows, placement, target_return)?;
    let snapshot = elmur::model::Snapshot::from_bytes(snapshot).map_err(fail)?;
    policy.put(py, &(0..rows).collect::<Vec<_>>(), &snapshot)?;
    Ok(policy)
}

/// A state as an array.
fn state_array<'py>(py: Python<'py>, data: TensorData, shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    match data {
        TensorData::F32(x) => shaped(py, x, shape),
        TensorData::F64(x) => shaped(py, x, shape),
        TensorData::I64(x) => shaped(py, x, shape),
        TensorData::U8(x) => shaped(py, x, shape),
    }
}

/// A snapshot, or the bytes of one.
fn snapshot_of(value: &Bound<'_, PyAny>) -> PyResult<Arc<elmur::model::Snapshot>> {
    if let Ok(snapshot) = value.cast::<Snapshot>() {
        return Ok(Arc::clone(&snapshot.get().0));
    }
    match value.extract::<&[u8]>() {
        Ok(bytes) => Ok(snapshot_from_bytes(bytes)?.0),
        Err(_) => {
            let got = value.get_type().name()?;
            Err(PyTypeError::new_err(format!("state: expected a Snapshot or its bytes, got {got}")))
        }
    }
}

impl Policy {
    fn new(
        py: Python<'_>,
        checkpoint: Checkpoint,
        rows: usize,
        placement: Placement,
        target_return: Option<f64>,
    ) -> PyResult<Self> {
        let made = py.detach(|| -> Result<_> {
            let device = Device::open(&placement.device, placement.threads, Precision::default())?;
            let params = checkpoint.params.to(&device)?;
            Ok((device, params))
        });
        let (device, params) = made.map_err(fail)?;
        Self::on(py, checkpoint, params, device, placement, rows, target_return)
    }

    fn on(
        py: Python<'_>,
        checkpoint: Checkpoint,
        params: Store,
        device: Device,
        placement: Placement,
        rows: usize,
        target_return: Option<f64>,
    ) -> PyResult<Self> {
        let made = py
            .detach(|| Session::with_weights(&checkpoint.config, &params, rows, &device, placement.weights));
        let session = made.map_err(fail)?;
        let mut acting = Acting { session, seeds: vec![0; rows] };
        let seeds: Vec<(usize, u64)> = (0..rows).map(|row| (row, memory_seed(row as u64))).collect();
        py.detach(|| acting.reset(&seeds)).map_err(fail)?;
        let spaces = checkpoint.config.architecture().ends().spaces();
        Ok(Self {
            observation: Layout::of(&spaces.observation),
            action: Layout::of(&spaces.action),
            action_widths: spaces.action.widths(),
            checkpoint,
            params,
            device,
            placement,
            rows,
            target_return,
            acting: Mutex::new(acting),
            predicting: Mutex::new(None),
        })
    }

    fn acting(&self) -> MutexGuard<'_, Acting> {
        self.acting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, py: Python<'_>, rows: &[usize], snapshot: &elmur::model::Snapshot) -> PyResult<()> {
        py.detach(|| -> Result<()> {
            let mut acting = self.acting();
            acting.session.restore(rows, snapshot)?;
            rows.iter().zip(snapshot.seeds()).for_each(|(row, seed)| acting.seeds[*row] = seed);
            Ok(())
        })
        .map_err(fail)
    }

    /// Room for the actions of some rows.
    fn room(&self, rows: usize) -> Row {
        Row::zeros(self.action_widths, rows)
    }

    fn returns(&self, returns: Option<&Bound<'_, PyAny>>, rows: usize) -> PyResult<Option<Vec<f32>>> {
        returns.map(|returns| floats_per_row("returns", returns, rows)).transpose()
    }

    /// Actions as Python gets them: with an axis of rows if the observations had one.
    fn actions<'py>(&self, py: Python<'py>, actions: &Row, given: &Given<'_>) -> PyResult<Bound<'py, PyAny>> {
        let leaving = self.action.copy(actions.values(), given.rows);
        self.action.build(py, leaving, given.batched.then_some(given.rows))
    }

    /// Writes actions to an array of the caller.
    fn write<'py>(&self, out: &Bound<'py, PyAny>, actions: &Row, rows: usize) -> PyResult<Bound<'py, PyAny>> {
        for leaf in self.action.copy(actions.values(), rows) {
            match leaf {
                Leaving::Ints(x) => fill(out, &x, "int64")?,
                Leaving::Floats(x) => fill(out, &x, "float32")?,
                Leaving::Bytes(x) => fill(out, &x, "uint8")?,
            }
        }
        Ok(out.clone())
    }
}

/// Overwrites the numbers of an array.
fn fill<T: numpy::Element + Copy>(out: &Bound<'_, PyAny>, numbers: &[T], dtype: &str) -> PyResult<()> {
    let array = as_array(out)?;
    let wrong = || {
        let expected = format!("a writable C-contiguous array of {} {dtype}", numbers.len());
        refuse("out", expected, format!("{} of shape {:?}", array.dtype(), array.shape()))
    };
    let target = array.cast::<PyArrayDyn<T>>().map_err(|_| wrong())?;
    let mut target = target.try_readwrite().map_err(|_| wrong())?;
    match target.as_slice_mut() {
        Ok(target) if target.len() == numbers.len() => target.copy_from_slice(numbers),
        _ => return Err(wrong()),
    }
    Ok(())
}

#[pymethods]
impl Policy {
    /// Loads the policy in a folder: a run (its best checkpoint) or a checkpoint. A CPU can keep weights as bf16.
    #[staticmethod]
    #[pyo3(signature = (path, device="cpu", rows=1, *, threads=1, weights="f32"))]
    fn load(
        py: Python<'_>,
        path: PathBuf,
        device: &str,
        rows: usize,
        threads: usize,
        weights: &str,
    ) -> PyResult<Self> {
        let placement = Placement::new(device, threads, weights)?;
        let (checkpoint, target_return) = py.detach(|| -> PyResult<_> {
            let run = RunFolder::is_run(&path).then(|| RunFolder::open(&path)).transpose().map_err(fail)?;
            let folder = run.as_ref().map_or(path.clone(), RunFolder::best);
            // A checkpoint lies two folders below its run.
            let run = run.or_else(|| {
                let run = path.parent().and_then(|checkpoints| checkpoints.parent())?;
                RunFolder::is_run(run).then(|| RunFolder::open(run).ok()).flatten()
            });
            let target = run.and_then(|run| run.config().ok()).and_then(|config| config.eval.target_return);
            Ok((Checkpoint::load(&folder).map_err(fail)?, target))
        })?;
        let target_return = target_return.filter(|_| checkpoint.config.architecture().aims_at_return());
        Self::new(py, checkpoint, rows, placement, target_return)
    }

    /// A policy from the bytes of a `model.safetensors`.
    #[staticmethod]
    #[pyo3(signature = (data, device="cpu", rows=1, *, threads=1, weights="f32"))]
    fn from_bytes(
        py: Python<'_>,
        data: &[u8],
        device: &str,
        rows: usize,
        threads: usize,
        weights: &str,
    ) -> PyResult<Self> {
        let placement = Placement::new(device, threads, weights)?;
        let checkpoint = py.detach(|| Checkpoint::from_bytes(data)).map_err(fail)?;
        Self::new(py, checkpoint, rows, placement, None)
    }

    /// The same policy with another number of rows, all of them at the start of an episode. Parameters are shared.
    fn with_rows(&self, py: Python<'_>, rows: usize) -> PyResult<Self> {
        let device = py.detach(|| self.device.another()).map_err(fail)?;
        let (checkpoint, params) = (self.checkpoint.clone(), self.params.clone());
        Self::on(py, checkpoint, params, device, self.placement.clone(), rows, self.target_return)
    }

    /// Writes the policy as a checkpoint folder.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        py.detach(|| self.checkpoint.save(&path)).map_err(fail)
    }

    /// Actions [rows] or [rows, parts] for the next observations [rows, ...]. Rows marked in `episode_start` begin a
    /// new episode first; without it all rows go on.
    #[pyo3(signature = (observation, episode_start=None, *, returns=None, deterministic=true, logits=false, out=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn act<'py>(
        &self,
        py: Python<'py>,
        observation: &Bound<'py, PyAny>,
        episode_start: Option<&Bound<'py, PyAny>>,
        returns: Option<&Bound<'py, PyAny>>,
        deterministic: bool,
        logits: bool,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let rows = self.rows;
        let given = self.observation.read("observation", observation, Some(rows))?;
        let starts = episode_start.map(|starts| flags("episode_start", starts, rows)).transpose()?;
        let returns = self.returns(returns, rows)?;
        let seen = Seen { observation: given.values(), returns: returns.as_deref() };
        let how = if deterministic { Choose::Greedy } else { Choose::Sample };
        if logits && (!deterministic || out.is_some()) {
            return Err(refuse(
                "logits",
                "neither `out` nor deterministic=False beside logits=True",
                "one of them",
            ));
        }
        let mut actions = self.room(rows);
        let outputs = py.detach(|| -> Result<Option<Vec<f32>>> {
            let mut acting = self.acting();
            if let Some(starts) = starts {
                acting.begin((0..rows).filter(|row| starts[*row]))?;
            }
            if logits {
                return Ok(Some(acting.session.act(seen)?.to_vec()));
            }
            let all: Vec<usize> = (0..rows).collect();
            acting.session.select_action(&all, seen, how, actions.as_mut())?;
            Ok(None)
        });
        match (outputs.map_err(fail)?, out) {
            (Some(outputs), _) => {
                let each = outputs.len() / rows;
                let shape = if given.batched { vec![rows, each] } else { vec![each] };
                shaped(py, outputs, &shape)
            }
            (None, Some(out)) => self.write(out, &actions, rows),
            (None, None) => self.actions(py, &actions, &given),
        }
    }

    /// Leaves writing the memory at the end of a segment to `settle`, so that its last action comes as soon as others.
    #[pyo3(signature = (defer=true))]
    fn defer_writes(&self, py: Python<'_>, defer: bool) -> PyResult<()> {
        py.detach(|| self.acting().session.defer_writes(defer)).map_err(fail)
    }

    /// Does the writes that `defer_writes` left, while the environment moves; without it the next step does them first.
    fn settle(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.acting().session.settle()).map_err(fail)
    }

    /// Actions for a batch as LeRobot has it: a dictionary whose keys begin with `observation`, or any observation.
    fn select_action<'py>(&self, py: Python<'py>, batch: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let Ok(batch) = batch.cast::<PyDict>() else {
            return self.act(py, batch, None, None, true, false, None);
        };
        let seen = PyDict::new(py);
        for (key, value) in batch.iter() {
            if key.extract::<&str>().is_ok_and(|key| key.starts_with("observation")) {
                seen.set_item(key, value)?;
            }
        }
        let seen = if seen.is_empty() { batch.clone() } else { seen };
        self.act(py, seen.as_any(), None, None, true, false, None)
    }

    /// Actions and the next state, from observations and a state alone: nothing is remembered in the policy. No state
    /// means fresh rows; rows marked in `episode_start` begin a new episode.
    #[pyo3(signature = (observation, state=None, episode_start=None, deterministic=false, *, returns=None))]
    fn predict<'py>(
        &self,
        py: Python<'py>,
        observation: &Bound<'py, PyAny>,
        state: Option<&Bound<'py, PyAny>>,
        episode_start: Option<&Bound<'py, PyAny>>,
        deterministic: bool,
        returns: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyAny>, Snapshot)> {
        let state = state.map(snapshot_of).transpose()?;
        let rows = state.as_ref().map(|state| state.times().len());
        let given = self.observation.read("observation", observation, rows)?;
        let rows = given.rows;
        let starts = episode_start.map(|starts| flags("episode_start", starts, rows)).transpose()?;
        let returns = self.returns(returns, rows)?;
        let seen = Seen { observation: given.values(), returns: returns.as_deref() };
        let how = if deterministic { Choose::Greedy } else { Choose::Sample };
        let mut actions = self.room(rows);
        let next = py.detach(|| -> Result<_> {
            let mut kept = self.predicting.lock().unwrap_or_else(PoisonError::into_inner);
            let session = match &mut *kept {
                // With as many rows: the last bits of a product may depend on their number.
                Some(session) if session.rows() == rows => session,
                other => {
                    let (config, weights) = (&self.checkpoint.config, self.placement.weights);
                    other.insert(Session::with_weights(config, &self.params, rows, &self.device, weights)?)
                }
            };
            let all: Vec<usize> = (0..rows).collect();
            let fresh = match &state {
                Some(state) => {
                    session.restore(&all, state)?;
                    let starts = starts.unwrap_or_else(|| vec![false; rows]);
                    let seeds = all.iter().copied().zip(state.seeds());
                    seeds
                        .filter(|(row, _)| starts[*row])
                        .map(|(row, seed)| (row, memory_seed(seed)))
                        .collect()
                }
                None => all.iter().map(|row| (*row, memory_seed(*row as u64))).collect::<Vec<_>>(),
            };
            session.reset(&fresh)?;
            session.select_action(&all, seen, how, actions.as_mut())?;
            session.snapshot(&all)
        });
        let next = Snapshot(Arc::new(next.map_err(fail)?));
        Ok((self.actions(py, &actions, &given)?, next))
    }

    /// Begins new episodes in `rows`: all for None, one, several, or a mask. The same seed gives the same initial memory
    /// and the same draws; without seeds each row goes on to its next.
    #[pyo3(signature = (rows=None, seeds=None))]
    fn reset(
        &self,
        py: Python<'_>,
        rows: Option<&Bound<'_, PyAny>>,
        seeds: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let rows = row_numbers(rows, self.rows)?;
        let seeds: Option<Vec<u64>> = match seeds {
            None => None,
            Some(one) if one.extract::<u64>().is_ok() => {
                let first: u64 = one.extract()?;
                Some((0..rows.len() as u64).map(|i| first.wrapping_add(i)).collect())
            }
            Some(all) => {
                let wrong = || refuse("seeds", "an integer from 0 on, or one per row", all);
                Some(all.extract::<Vec<u64>>().map_err(|_| wrong())?)
            }
        };
        if let Some(seeds) = seeds.as_ref().filter(|seeds| seeds.len() != rows.len()) {
            return Err(refuse("seeds", format!("{} seeds, one per row", rows.len()), seeds.len()));
        }
        py.detach(|| match seeds {
            None => self.acting().begin(rows.into_iter()),
            Some(seeds) => {
                let mixed = seeds.into_iter().map(memory_seed);
                self.acting().reset(&rows.into_iter().zip(mixed).collect::<Vec<_>>())
            }
        })
        .map_err(fail)
    }

    /// Everything that `rows` remember (all for None), as a value.
    #[pyo3(signature = (rows=None))]
    fn snapshot(&self, py: Python<'_>, rows: Option<&Bound<'_, PyAny>>) -> PyResult<Snapshot> {
        let rows = row_numbers(rows, self.rows)?;
        let snapshot = py.detach(|| self.acting().session.snapshot(&rows)).map_err(fail)?;
        Ok(Snapshot(Arc::new(snapshot)))
    }

    /// Puts a snapshot, or the bytes of one, into `rows` (all for None), which go on from there bit for bit.
    #[pyo3(signature = (state, rows=None))]
    fn restore(
        &self,
        py: Python<'_>,
        state: &Bound<'_, PyAny>,
        rows: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.put(py, &row_numbers(rows, self.rows)?, &*snapshot_of(state)?)
    }

    /// What a layer of an ELMUR policy remembers, read-only: its slots [rows, slots, width], and for each slot the
    /// number of steps since it was written, -1 if it never was [rows, slots].
    #[pyo3(signature = (layer=0))]
    fn memory<'py>(&self, py: Python<'py>, layer: usize) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let names = (format!("memory.{layer}"), format!("anchors.{layer}"));
        let rows: Vec<usize> = (0..self.rows).collect();
        let per_step = self.checkpoint.config.architecture().ends().tokens.per_step() as i64;
        let (shape, slots, anchors) = py.detach(|| {
            let mut acting = self.acting();
            acting.session.settle().map_err(fail)?;
            let session = &acting.session;
            let Some(state) = session.states().iter().find(|state| state.name == names.0) else {
                let all: Vec<&str> = session.states().iter().map(|state| state.name.as_str()).collect();
                let got = format!("{layer}; the states of this policy: {}", all.join(", "));
                return Err(refuse("layer", "a layer of a policy with external memory", got));
            };
            let shape = [&[rows.len()], &state.shape[..]].concat();
            let slots = session.state(&names.0, &rows).map_err(fail)?;
            let ages = match session.state(&names.1, &rows).map_err(fail)? {
                TensorData::I64(anchors) => {
                    let each = anchors.len() / rows.len();
                    let age = |(i, anchor): (usize, &i64)| match *anchor {
                        anchor if anchor < 0 => -1,
                        anchor => session.times()[i / each] as i64 - anchor / per_step,
                    };
                    anchors.iter().enumerate().map(age).collect()
                }
                _ => Vec::new(),
            };
            Ok((shape, slots, ages))
        })?;
        let slots = state_array(py, slots, &shape)?;
        let ages = shaped(py, anchors, &shape[..2])?;
        for array in [&slots, &ages] {
            array.getattr("flags")?.setattr("writeable", false)?;
        }
        Ok((slots, ages))
    }

    /// All states that the policy carries from step to step, by name, [rows, ...].
    fn states<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.snapshot(py, None)?.states(py)
    }

    /// Seconds that this many steps of all rows take in Rust, for `python/bench/act.py`.
    fn _seconds_in_rust(
        &self,
        py: Python<'_>,
        observation: &Bound<'_, PyAny>,
        calls: usize,
    ) -> PyResult<f64> {
        let given = self.observation.read("observation", observation, Some(self.rows))?;
        let (values, mut actions) = (given.values(), self.room(self.rows));
        py.detach(|| -> Result<f64> {
            let (all, begin) = ((0..self.rows).collect::<Vec<_>>(), Instant::now());
            for _ in 0..calls {
                let session = &mut self.acting().session;
                session.select_action(&all, values.into(), Choose::Greedy, actions.as_mut())?;
            }
            Ok(begin.elapsed().as_secs_f64())
        })
        .map_err(fail)
    }

    /// Environment steps since each row's episode began.
    #[getter]
    fn times(&self, py: Python<'_>) -> Vec<u64> {
        py.detach(|| self.acting().session.times().to_vec())
    }

    /// Number of rows.
    #[getter]
    fn rows(&self) -> usize {
        self.rows
    }

    /// The device that acts.
    #[getter]
    fn device(&self) -> &str {
        &self.placement.device
    }

    /// How weights of linear layers are kept: f32 or bf16.
    #[getter]
    fn weights(&self) -> &'static str {
        self.placement.weights_name()
    }

    /// The return that the policy was asked for in its run's validations; None if it does not aim at one.
    #[getter]
    fn target_return(&self) -> Option<f64> {
        self.target_return
    }

    /// Whether the policy reads a return-to-go at every step (`returns`).
    #[getter]
    fn reads_returns(&self) -> bool {
        self.checkpoint.config.architecture().ends().tokens.has(Token::Return)
    }

    /// Number of parameters.
    #[getter]
    fn parameters(&self, py: Python<'_>) -> PyResult<usize> {
        let names = self.params.names();
        py.detach(|| names.iter().map(|name| Ok(self.params.ty(name)?.len())).sum::<Result<usize>>())
            .map_err(fail)
    }

    /// The configuration as a dictionary.
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let text = serde_json::to_string(&self.checkpoint.config).map_err(fail)?;
        py.import("json")?.call_method1("loads", (text,))
    }

    /// The space of observations of one row, of Gymnasium.
    #[getter]
    fn observation_space<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let space = self.checkpoint.config.architecture().ends().spaces().observation;
        py.import("elmur.spaces")?.call_method1("to_gymnasium", (space_json(&space)?,))
    }

    /// The space of actions of one row, of Gymnasium.
    #[getter]
    fn action_space<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let space = self.checkpoint.config.architecture().ends().spaces().action;
        py.import("elmur.spaces")?.call_method1("to_gymnasium", (space_json(&space)?,))
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let (checkpoint, snapshot) = py
            .detach(|| -> Result<_> {
                let all: Vec<usize> = (0..self.rows).collect();
                Ok((self.checkpoint.to_bytes()?, self.acting().session.snapshot(&all)?.to_bytes()?))
            })
            .map_err(fail)?;
        let make = py.import("elmur._elmur")?.getattr("policy_from_parts")?;
        let parts = (
            PyBytes::new(py, &checkpoint),
            self.rows,
            &self.placement.device,
            self.placement.threads,
            self.target_return,
            PyBytes::new(py, &snapshot),
            self.placement.weights_name(),
        );
        Ok((make, parts.into_bound_py_any(py)?))
    }

    fn __repr__(&self) -> String {
        format!(
            "Policy(kind={:?}, rows={}, device={:?})",
            self.checkpoint.config.kind(),
            self.rows,
            self.placement.device
        )
    }
}
