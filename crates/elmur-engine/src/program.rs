//! A compiled graph: planned once, run many times without allocation.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::cpu::pool::Pool;
use crate::device::Device;
use crate::error::{Error, Result, nearest};
use crate::graph::{Graph, Origin, Value};
use crate::op::{IndexBound, Io, Op, Operand};
use crate::plan::{Home, plan};
use crate::store::{Buffer, Gate, Memory, Store};
use crate::types::{DType, Element, TensorType};

pub(crate) struct Step {
    pub op: Arc<dyn Op>,
    pub inputs: Box<[Operand]>,
    pub outputs: Box<[Operand]>,
}

/// An input whose elements index something.
struct Check {
    op: &'static str,
    bound: IndexBound,
    operand: Operand,
}

/// A store the program uses, and whether it changes anything there.
struct Use {
    gate: Arc<Gate>,
    writes: bool,
}

/// Held while a program runs.
enum Guard<'a> {
    Read { _guard: std::sync::RwLockReadGuard<'a, ()> },
    Write { _guard: std::sync::RwLockWriteGuard<'a, ()> },
}

/// A graph compiled for a device and bound to its stores. See [`Graph`] for an example.
///
/// On the CPU running allocates nothing after the first call, and the bits of every result are the same for any number of
/// threads. On a GPU [`Program::run`] returns at once; reading an output or a store waits for the work it depends on.
pub struct Program {
    // Dropped first: work in flight uses what follows.
    executor: Executor,
    steps: Vec<Step>,
    checks: Vec<Check>,
    /// As the caller sees them, in the host's memory.
    inputs: BTreeMap<String, Port>,
    outputs: BTreeMap<String, Port>,
    uses: Vec<Use>,
    arena_bytes: usize,
    /// Keeps stored tensors and constants alive.
    _storage: Vec<Arc<Memory>>,
}

/// An input or output.
struct Port {
    /// Its number among its kind.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    index: usize,
    operand: Operand,
}

enum Executor {
    Cpu {
        pool: Pool,
        arena: Buffer,
        scratch_offset: usize,
        copies: Vec<(Operand, Operand)>,
    },
    #[cfg(feature = "cuda")]
    Cuda(Box<crate::cuda::exec::Exec>),
}

// SAFETY: the pointers lead into buffers the program owns or shares; shared ones are guarded by the stores' gates.
unsafe impl Send for Program {}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Program({} steps, {} bytes)", self.steps.len(), self.arena_bytes)
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
    /// Whether a run takes longer if this step does: always on the CPU, where steps come one after the other; on a GPU where it lies on
    /// the longest way through the program.
    pub critical: bool,
}

impl Program {
    /// Compiles `graph` to run on `device` (a [`Pool`] or a [`Device`]). Parameters and states are looked up by name in
    /// `stores`, first match first; they are used where they lie, so programs bound to the same store see each other's
    /// updates.
    pub fn new(graph: &Graph, device: impl Into<Device>, stores: &[&Store]) -> Result<Self> {
        let device = device.into();
        if stores.len() > MAX_STORES {
            let got = stores.len().to_string();
            return Err(Error::Op { op: "program", expected: format!("at most {MAX_STORES} stores"), got });
        }
        let plan = plan(graph, roomy(&device));
        let scratch_bytes = match &device {
            Device::Cpu(pool) => {
                let scratch = plan.steps.iter().map(|&node| {
                    let node = &graph.nodes[node];
                    let types =
                        |values: &[Value]| values.iter().map(|v| graph.ty_of(*v).clone()).collect::<Vec<_>>();
                    node.op.scratch(&types(&node.inputs), &types(&node.outputs), pool.threads())
                });
                scratch.max().unwrap_or(0)
            }
            // Ops take what they need while they are recorded.
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => 0,
        };
        let arena_bytes = plan.arena_bytes + scratch_bytes;
        let arena = Memory::new(&device, arena_bytes, "a program's arena")?;

        let mut storage = Vec::new();
        let mut uses: Vec<Use> =
            stores.iter().map(|s| Use { gate: Arc::clone(s.gate()), writes: false }).collect();
        let mut used = vec![false; stores.len()];
        let updated: Vec<Value> = graph.updates.iter().map(|(target, _)| *target).collect();
        // Base address of every root that is not in the arena.
        let mut base = BTreeMap::new();
        for place in plan.places.iter().flatten() {
            let (Home::Stored(root) | Home::Constant(root)) = place.home else { continue };
            if base.contains_key(&root.id) {
                continue;
            }
            let info = &graph.values[root.id as usize];
            let buffer = if let Origin::Constant(bytes) = &info.origin {
                Arc::new(Memory::with(&device, bytes, "a constant")?)
            } else {
                let name = graph.describe(root);
                let (index, tensor) = find(stores, &name)?;
                if *tensor.ty != info.ty {
                    let (expected, got) = (info.ty.to_string(), tensor.ty.to_string());
                    return Err(Error::StoreMismatch { name, expected, got });
                }
                if !tensor.buffer.is_on(&device) {
                    let expected = format!("stores on {device:?}");
                    return Err(Error::Op { op: "program", expected, got: format!("`{name}` elsewhere") });
                }
                used[index] = true;
                uses[index].writes |= updated.contains(&root);
                tensor.buffer
            };
            base.insert(root.id, buffer.ptr());
            storage.push(buffer);
        }
        let mut keep = used.into_iter();
        uses.retain(|_| keep.next().unwrap_or(false));
        // One order for all programs, so that two of them never wait for each other; the same gate only once.
        uses.sort_by_key(|u| (Arc::as_ptr(&u.gate).addr(), !u.writes));
        uses.dedup_by(|b, a| Arc::ptr_eq(&a.gate, &b.gate));

        let arena_start = arena.ptr();
        let operand = |value: &Value| {
            let ty = graph.ty_of(*value).clone();
            // The planner keeps offsets inside the arena, and aliases inside their root.
            let ptr = match plan.places[value.id as usize] {
                Some(place) => match place.home {
                    Home::Arena(at) => arena_start.wrapping_add(at + place.offset),
                    Home::Stored(root) | Home::Constant(root) => base[&root.id].wrapping_add(place.offset),
                    Home::Unused => std::ptr::null_mut(),
                },
                None => std::ptr::null_mut(),
            };
            Operand { ptr, ty }
        };
        let operands = |values: &[Value]| values.iter().map(operand).collect::<Box<[_]>>();

        let mut steps = Vec::new();
        let mut checked = Vec::new();
        for &node in &plan.steps {
            let node = &graph.nodes[node];
            let (inputs, outputs) = (operands(&node.inputs), operands(&node.outputs));
            let types: Vec<_> = inputs.iter().map(|o| o.ty.clone()).collect();
            for bound in node.op.indices(&types) {
                if let Some(input) = input_behind(graph, node.inputs[bound.input]) {
                    checked.push((node.op.name(), input, inputs[bound.input].clone(), bound));
                }
            }
            if node.op.alias(&types).is_none() {
                steps.push(Step { op: Arc::clone(&node.op), inputs, outputs });
            }
        }
        let port = |(index, (name, value)): (usize, (&str, Value))| {
            (name.to_owned(), Port { index, operand: operand(&value) })
        };
        #[cfg_attr(not(feature = "cuda"), allow(unused_mut))]
        let mut inputs: BTreeMap<String, Port> = graph.inputs().enumerate().map(port).collect();
        let outputs: BTreeMap<String, Port> =
            graph.outputs.iter().map(|(name, value)| (name.as_str(), *value)).enumerate().map(port).collect();
        // Where an input lies in the program, and where the caller writes it: the same place on the CPU.
        let places: BTreeMap<String, *mut u8> =
            inputs.iter().map(|(name, port)| (name.clone(), port.operand.ptr)).collect();
        let copies = plan.copies.iter().map(|(target, new)| (operand(target), operand(new)));
        let executor = match (&device, arena) {
            (Device::Cpu(pool), Memory::Host(arena)) => {
                let copies = copies.collect();
                Executor::Cpu { pool: pool.clone(), arena, scratch_offset: plan.arena_bytes, copies }
            }
            #[cfg(feature = "cuda")]
            (Device::Cuda(gpu), Memory::Cuda(arena)) => {
                let pairs: Vec<_> = copies.map(|(target, new)| (new, target)).collect();
                if !pairs.is_empty() {
                    steps.push(crate::ops::layout::copy_step(pairs));
                }
                let ordered = |ports: &BTreeMap<String, Port>| {
                    let mut all: Vec<&Port> = ports.values().collect();
                    all.sort_by_key(|port| port.index);
                    all.into_iter().map(|port| port.operand.clone()).collect::<Vec<_>>()
                };
                let exec =
                    crate::cuda::exec::Exec::new(gpu, arena, &steps, &ordered(&inputs), &ordered(&outputs))?;
                for port in inputs.values_mut() {
                    port.operand.ptr = exec.inputs[port.index].host.ptr();
                }
                Executor::Cuda(Box::new(exec))
            }
            #[cfg(feature = "cuda")]
            _ => {
                return Err(Error::Op {
                    op: "program",
                    expected: "an arena on the device".to_owned(),
                    got: "none".to_owned(),
                });
            }
        };
        let checks = checked.into_iter().map(|(op, input, mut operand, bound)| {
            // As far into the caller's copy of the input as into the program's.
            let name = graph.describe(input);
            if let (Some(port), Some(place)) = (inputs.get(&name), places.get(&name)) {
                let offset = operand.ptr.addr() - place.addr();
                operand.ptr = port.operand.ptr.wrapping_add(offset);
            }
            Check { op, bound, operand }
        });
        let checks = checks.collect();
        Ok(Self { executor, steps, checks, inputs, outputs, uses, arena_bytes, _storage: storage })
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
        let port = lookup(&self.inputs, "input", name)?;
        let operand = &port.operand;
        check_type::<T>(name, operand)?;
        #[cfg(feature = "cuda")]
        if let Executor::Cuda(exec) = &mut self.executor {
            exec.inputs[port.index].changed = true;
        }
        // SAFETY: inputs have memory of their own, and `&mut self` excludes a run.
        Ok(unsafe { std::slice::from_raw_parts_mut(operand.ptr.cast(), operand.ty.len()) })
    }

    /// The input `name` as it was last set; zeros before that.
    pub fn input_data<T: Element>(&self, name: &str) -> Result<&[T]> {
        let operand = &lookup(&self.inputs, "input", name)?.operand;
        check_type::<T>(name, operand)?;
        // SAFETY: inputs have memory of their own, and `&self` excludes a run and a write.
        Ok(unsafe { std::slice::from_raw_parts(operand.ptr.cast(), operand.ty.len()) })
    }

    /// The output `name` as of the last run.
    pub fn get<T: Element>(&self, name: &str) -> Result<&[T]> {
        let port = lookup(&self.outputs, "output", name)?;
        check_type::<T>(name, &port.operand)?;
        let data = match &self.executor {
            Executor::Cpu { .. } => port.operand.ptr.cast_const(),
            #[cfg(feature = "cuda")]
            Executor::Cuda(exec) => exec.fetch(port.index)?,
        };
        // SAFETY: outputs stay in place until the next run, which needs `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(data.cast(), port.operand.ty.len()) })
    }

    /// Type of the input `name`.
    pub fn input_type(&self, name: &str) -> Result<&TensorType> {
        Ok(&lookup(&self.inputs, "input", name)?.operand.ty)
    }

    /// Type of the output `name`.
    pub fn output_type(&self, name: &str) -> Result<&TensorType> {
        Ok(&lookup(&self.outputs, "output", name)?.operand.ty)
    }

    /// Runs every op once and applies the updates.
    ///
    /// Inputs that index something (classes, rows) are checked first: where one is out of range nothing has changed.
    pub fn run(&mut self) -> Result<()> {
        self.run_with(|_, step| step())
    }

    /// Median time of each step over `runs` runs, in order. The runs are real: updates are applied.
    pub fn profile(&mut self, runs: usize) -> Result<Vec<StepTime>> {
        let mut times = vec![Vec::with_capacity(runs); self.steps.len()];
        #[cfg_attr(not(feature = "cuda"), expect(unused_mut))]
        let mut critical = vec![true; self.steps.len()];
        #[cfg(feature = "cuda")]
        if matches!(self.executor, Executor::Cuda(_)) {
            // Copies changed inputs.
            self.run()?;
        }
        for _ in 0..runs {
            #[cfg(feature = "cuda")]
            if let Executor::Cuda(exec) = &mut self.executor {
                for (i, (time, is_critical)) in exec.profile(&self.steps)?.into_iter().enumerate() {
                    times[i].push(time);
                    critical[i] = is_critical;
                }
                continue;
            }
            self.run_with(|index, step| {
                let start = Instant::now();
                let result = step();
                times[index].push(start.elapsed());
                result
            })?;
        }
        let timed = self.steps.iter().zip(times).zip(critical).map(|((step, mut times), critical)| {
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

    /// Bytes of the arena: every intermediate value, the inputs and outputs, and scratch memory.
    pub fn arena_bytes(&self) -> usize {
        self.arena_bytes
    }

    /// Number of steps that a run executes.
    pub fn steps(&self) -> usize {
        self.steps.len()
    }

    /// Number of kernels, products and copies that a run queues on a GPU; 0 on the CPU.
    pub fn kernels(&self) -> usize {
        match &self.executor {
            Executor::Cpu { .. } => 0,
            #[cfg(feature = "cuda")]
            Executor::Cuda(exec) => exec.queued,
        }
    }

    fn run_with(&mut self, mut run: impl FnMut(usize, &dyn Fn() -> Result<()>) -> Result<()>) -> Result<()> {
        for check in &self.checks {
            check.run()?;
        }
        let mut guards: [Option<Guard<'_>>; MAX_STORES] = [const { None }; MAX_STORES];
        for (guard, used) in guards.iter_mut().zip(&self.uses) {
            *guard = Some(used.lock());
        }
        let (pool, arena, scratch_offset, copies) = match &mut self.executor {
            Executor::Cpu { pool, arena, scratch_offset, copies } => {
                (&*pool, arena, *scratch_offset, &*copies)
            }
            #[cfg(feature = "cuda")]
            Executor::Cuda(exec) => return exec.run(),
        };
        // SAFETY: the scratch region follows the planned part of the arena.
        let scratch = unsafe { arena.ptr().add(scratch_offset) };
        let scratch_bytes = self.arena_bytes - scratch_offset;
        for (index, step) in self.steps.iter().enumerate() {
            let (inputs, outputs) = (&*step.inputs, &*step.outputs);
            let io = Io { inputs, outputs, scratch, scratch_bytes, pool };
            run(index, &|| step.op.cpu(&io))?;
        }
        for (target, source) in copies {
            // SAFETY: types agree (checked by `update`), the source is never the target's own storage, and the gate
            // of the target's store is held for writing.
            unsafe { std::ptr::copy_nonoverlapping(source.ptr, target.ptr, target.ty.bytes()) };
        }
        Ok(())
    }
}

/// Most stores one program can be bound to.
const MAX_STORES: usize = 8;

impl Use {
    fn lock(&self) -> Guard<'_> {
        if self.writes {
            Guard::Write { _guard: self.gate.write().unwrap_or_else(PoisonError::into_inner) }
        } else {
            Guard::Read { _guard: self.gate.read().unwrap_or_else(PoisonError::into_inner) }
        }
    }
}

impl Check {
    fn run(&self) -> Result<()> {
        let len = self.operand.ty.len();
        // SAFETY: the operand is an input of the program: alive, and written only through `&mut Program`.
        unsafe {
            match self.operand.ty.dtype {
                DType::I32 => {
                    self.bound.check(self.op, std::slice::from_raw_parts(self.operand.ptr.cast::<i32>(), len))
                }
                _ => {
                    self.bound.check(self.op, std::slice::from_raw_parts(self.operand.ptr.cast::<i64>(), len))
                }
            }
        }
    }
}

fn find(stores: &[&Store], name: &str) -> Result<(usize, crate::store::Tensor)> {
    let found = stores.iter().enumerate().find_map(|(i, s)| Some((i, s.find(name)?)));
    found.ok_or_else(|| {
        let names: Vec<String> = stores.iter().flat_map(|s| s.names()).collect();
        let nearest = nearest(name, names.iter().map(String::as_str));
        Error::UnknownName { kind: "stored tensor", name: name.to_owned(), nearest }
    })
}

/// The input that a value is, possibly seen through aliases.
fn input_behind(graph: &Graph, value: Value) -> Option<Value> {
    match graph.producer(value) {
        None => matches!(graph.values[value.id as usize].origin, Origin::Input).then_some(value),
        Some(node) => {
            let types: Vec<_> = node.inputs.iter().map(|v| graph.ty_of(*v).clone()).collect();
            node.op.alias(&types).and_then(|_| input_behind(graph, node.inputs[0]))
        }
    }
}

/// Bytes that a program may spend on giving every value memory of its own.
fn roomy(device: &Device) -> usize {
    match device {
        Device::Cpu(_) => 0,
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => 2 << 30,
    }
}

fn lookup<'a>(map: &'a BTreeMap<String, Port>, kind: &'static str, name: &str) -> Result<&'a Port> {
    map.get(name).ok_or_else(|| Error::UnknownName {
        kind,
        name: name.to_owned(),
        nearest: nearest(name, map.keys().map(String::as_str)),
    })
}

fn check_type<T: Element>(name: &str, operand: &Operand) -> Result<()> {
    if operand.ty.dtype == T::DTYPE {
        return Ok(());
    }
    Err(Error::ElementType { name: name.to_owned(), expected: operand.ty.dtype, got: T::DTYPE })
}
