//! A compiled graph: planned once, run many times without allocation.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::allocation::Allocation;
use crate::bind::{Check, Port, bind};
use crate::cpu;
use crate::device::Device;
use crate::error::{Error, Result, nearest};
use crate::graph::Graph;
use crate::lock::StoreUses;
use crate::step::Executor;
use crate::store::Store;
use crate::types::{Element, TensorType};

/// A graph compiled for a device and bound to its stores. See [`Graph`] for an example.
///
/// On the CPU running allocates nothing after the first call, and the bits of every result are the same for
/// any number of threads. On a GPU [`Program::run`] returns at once; reading an output or a store waits for
/// the work it depends on.
pub struct Program {
    // Dropped first: work in flight uses what follows.
    executor: Box<dyn Executor>,
    checks: Vec<Check>,
    inputs: BTreeMap<String, Port>,
    outputs: BTreeMap<String, Port>,
    uses: StoreUses,
    arena_bytes: usize,
    /// Keeps stored tensors and constants alive.
    _storage: Vec<Arc<Allocation>>,
}

// SAFETY: the pointers lead into buffers the program owns or shares; shared ones are guarded by the stores'
// locks.
unsafe impl Send for Program {}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Program({} steps, {} bytes)", self.steps(), self.arena_bytes)
    }
}

/// Time spent in one step of a program.
#[derive(Debug, Clone)]
pub struct StepTime {
    /// The op's name.
    pub op: &'static str,
    /// Types of its outputs.
    pub outputs: Vec<TensorType>,
    /// Median time over the measured runs.
    pub time: Duration,
    /// Whether a run takes longer if this step does: always on the CPU, where steps come one after the other;
    /// on a GPU where the step lies on the critical path through the program.
    pub critical: bool,
}

impl Program {
    /// Compiles `graph` to run on `device` (a [`Pool`](crate::Pool) or a [`Device`]). Parameters and states
    /// are looked up by name in `stores`, first match first; they are used where they lie, so programs bound
    /// to the same store see each other's updates.
    pub fn new(graph: &Graph, device: impl Into<Device>, stores: &[&Store]) -> Result<Self> {
        let device = device.into();
        let bound = bind(graph, &device, stores)?;
        let arena_bytes = bound.work.scratch_offset + bound.work.scratch_bytes;
        let executor: Box<dyn Executor> = match &device {
            Device::Cpu(pool, precision) => Box::new(cpu::exec::Exec::new(pool, *precision, bound.work)),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Box::new(crate::cuda::exec::Exec::new(gpu, bound.work)?),
        };
        Ok(Self {
            executor,
            checks: bound.checks,
            inputs: bound.inputs,
            outputs: bound.outputs,
            uses: bound.uses,
            arena_bytes,
            _storage: bound.storage,
        })
    }

    /// Copies `data` into the input `name`. It stays there for all following runs.
    pub fn set<T: Element>(&mut self, name: &str, data: &[T]) -> Result<()> {
        let target = self.input_mut(name)?;
        if target.len() != data.len() {
            return Err(Error::Length { name: name.to_owned(), expected: target.len(), got: data.len() });
        }
        target.copy_from_slice(data);
        Ok(())
    }

    /// The input `name`, to be filled in place.
    pub fn input_mut<T: Element>(&mut self, name: &str) -> Result<&mut [T]> {
        let port = lookup::<T>(&self.inputs, "input", name)?;
        let data = self.executor.input_mut(port.index);
        // SAFETY: inputs have memory of their own, and `&mut self` excludes a run.
        Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), port.ty.len()) })
    }

    /// The input `name` as it was last set; zeros before that.
    pub fn input_data<T: Element>(&self, name: &str) -> Result<&[T]> {
        let port = lookup::<T>(&self.inputs, "input", name)?;
        let data = self.executor.input(port.index);
        // SAFETY: inputs have memory of their own, and `&self` excludes a run and a write.
        Ok(unsafe { std::slice::from_raw_parts(data.cast(), port.ty.len()) })
    }

    /// The output `name` as of the last run.
    pub fn get<T: Element>(&self, name: &str) -> Result<&[T]> {
        let port = lookup::<T>(&self.outputs, "output", name)?;
        let data = self.executor.output(port.index)?;
        // SAFETY: outputs stay in place until the next run, which needs `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(data.cast(), port.ty.len()) })
    }

    /// Type of the input `name`.
    pub fn input_type(&self, name: &str) -> Result<&TensorType> {
        Ok(&find(&self.inputs, "input", name)?.ty)
    }

    /// Type of the output `name`.
    pub fn output_type(&self, name: &str) -> Result<&TensorType> {
        Ok(&find(&self.outputs, "output", name)?.ty)
    }

    /// Runs every op once and applies the updates.
    ///
    /// Inputs that index something (classes, rows) are checked first: where one is out of range nothing has
    /// changed.
    pub fn run(&mut self) -> Result<()> {
        self.check_inputs()?;
        self.uses.while_locked(|| self.executor.run())
    }

    /// Median time of each step over `runs` runs, in order. The runs are real: updates are applied.
    pub fn profile(&mut self, runs: usize) -> Result<Vec<StepTime>> {
        self.check_inputs()?;
        let measured = self.uses.while_locked(|| self.executor.profile(runs))?;
        let timed = self.executor.steps().iter().zip(measured).map(|(step, (mut times, critical))| {
            times.sort();
            StepTime {
                op: step.op.name(),
                outputs: step.outputs.iter().map(|o| o.ty.clone()).collect(),
                time: times.get(times.len() / 2).copied().unwrap_or_default(),
                critical,
            }
        });
        Ok(timed.collect())
    }

    /// Bytes of the arena, which holds intermediate values, inputs, outputs and scratch memory.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// Number of steps that a run executes.
    pub fn steps(&self) -> usize {
        self.executor.steps().len()
    }

    /// Number of kernels, products and copies that a run queues on a GPU; 0 on the CPU.
    pub fn kernels(&self) -> usize {
        self.executor.kernels()
    }

    /// Fails if an input that indexes something is out of range.
    fn check_inputs(&self) -> Result<()> {
        self.checks.iter().try_for_each(|check| {
            // SAFETY: the input that the check names, which is written only through `&mut self`.
            unsafe { check.run(self.executor.input(check.input)) }
        })
    }
}

fn find<'a>(ports: &'a BTreeMap<String, Port>, kind: &'static str, name: &str) -> Result<&'a Port> {
    ports.get(name).ok_or_else(|| Error::UnknownName {
        kind,
        name: name.to_owned(),
        nearest: nearest(name, ports.keys().map(String::as_str)),
    })
}

/// The port of this name, if it holds elements of type `T`.
fn lookup<'a, T: Element>(
    ports: &'a BTreeMap<String, Port>,
    kind: &'static str,
    name: &str,
) -> Result<&'a Port> {
    let port = find(ports, kind, name)?;
    if port.ty.dtype == T::DTYPE {
        return Ok(port);
    }
    Err(Error::ElementType { name: name.to_owned(), expected: port.ty.dtype, got: T::DTYPE })
}
