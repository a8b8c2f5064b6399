//! From a planned graph to steps with addresses: the arena, stored tensors, constants, and what is checked
//! before a run.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::allocation::Allocation;
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::{Error, Result, nearest};
use crate::fuse::fuse;
use crate::graph::{Graph, Origin, Value};
use crate::lock::{MAX_STORES, StoreLock, StoreUse, StoreUses};
use crate::op::IndexBound;
use crate::operand::Operand;
use crate::plan::{Home, Plan, plan};
use crate::step::{KeptMemory, Step, Work};
use crate::store::{Store, Tensor};
use crate::types::{DType, TensorType};

/// A graph bound to a device and to stores.
pub(crate) struct Bound {
    pub work: Work,
    pub inputs: BTreeMap<String, Port>,
    pub outputs: BTreeMap<String, Port>,
    pub checks: Vec<Check>,
    pub uses: StoreUses,
    /// Stored tensors and constants that the steps use.
    pub storage: Vec<Arc<Allocation>>,
}

/// An input or output.
pub(crate) struct Port {
    /// Number among the inputs or the outputs.
    pub index: usize,
    pub ty: TensorType,
}

/// A (part of an) input whose elements index something.
pub(crate) struct Check {
    op: &'static str,
    bound: IndexBound,
    /// The input's number.
    pub input: usize,
    /// Bytes from its beginning to the part.
    offset: usize,
    ty: TensorType,
}

/// Plans `graph`, and finds or makes memory for everything in it.
pub(crate) fn bind(graph: &Graph, device: &Device, stores: &[&Store]) -> Result<Bound> {
    if stores.len() > MAX_STORES {
        let got = stores.len().to_string();
        return Err(Error::Program { expected: format!("at most {MAX_STORES} stores"), got });
    }
    let fused = device.pool().map(|_| fuse(graph));
    let graph = fused.as_ref().unwrap_or(graph);
    let plan = plan(graph, device.unshared_budget(), device.is_cpu());
    let scratch_offset = plan.arena_bytes;
    // On a GPU ops allocate what they need while they are captured.
    let scratch_bytes = device.pool().map_or(0, |pool| scratch_bytes(graph, &plan, pool.threads()));
    let arena = Allocation::new(device, scratch_offset + scratch_bytes, "a program's arena")?;
    let storage = Storage::new(graph, &plan, device, stores)?;
    let addresses = Addresses { graph, plan: &plan, arena: arena.ptr(), base: &storage.base };

    let inputs: Vec<(&str, Value)> = graph.inputs().collect();
    let outputs: Vec<(&str, Value)> = graph.outputs.iter().map(|(name, value)| (&**name, *value)).collect();
    let operands = |ports: &[(&str, Value)]| ports.iter().map(|port| addresses.operand(port.1)).collect();
    let pair = |pair: &(Value, Value)| (addresses.operand(pair.0), addresses.operand(pair.1));
    let mut steps = addresses.steps();
    if device.is_cpu() {
        addresses.keep(&mut steps, &storage.unchanged)?;
    }
    let work = Work {
        steps,
        copies: plan.copies.iter().map(pair).collect(),
        inputs: operands(&inputs),
        outputs: operands(&outputs),
        arena,
        scratch_offset,
        scratch_bytes,
    };
    let port = |(index, (name, value)): (usize, &(&str, Value))| {
        ((*name).to_owned(), Port { index, ty: graph.ty_of(*value).clone() })
    };
    Ok(Bound {
        inputs: inputs.iter().enumerate().map(port).collect(),
        outputs: outputs.iter().enumerate().map(port).collect(),
        checks: addresses.checks(&inputs),
        work,
        uses: storage.uses,
        storage: storage.kept,
    })
}

/// Scratch of the step that needs most.
fn scratch_bytes(graph: &Graph, plan: &Plan, threads: usize) -> usize {
    let types = |values: &[Value]| values.iter().map(|v| graph.ty_of(*v).clone()).collect::<Vec<_>>();
    let nodes = plan.steps.iter().map(|node| &graph.nodes[*node]);
    nodes.map(|n| n.op.scratch(&types(&n.inputs), &types(&n.outputs), threads)).max().unwrap_or(0)
}

/// Memory outside the arena: stored tensors and constants.
struct Storage {
    kept: Vec<Arc<Allocation>>,
    /// Address of each, by the number of the value.
    base: BTreeMap<u32, *mut u8>,
    uses: StoreUses,
    /// What no run of the program changes, by the number of the value: the lock of the store that has it, or none for a
    /// constant.
    unchanged: BTreeMap<u32, Option<Arc<StoreLock>>>,
}

impl Storage {
    /// Looks up parameters and states by name, first store first, and copies constants to the device.
    fn new(graph: &Graph, plan: &Plan, device: &Device, stores: &[&Store]) -> Result<Self> {
        let (mut kept, mut base) = (Vec::new(), BTreeMap::new());
        // By store: whether it is used, and whether for writing.
        let mut writes: Vec<Option<bool>> = vec![None; stores.len()];
        // By the number of the value: the store that has it, or none for a constant.
        let mut places = Vec::new();
        for place in plan.places.iter().flatten() {
            let (Home::Stored(root) | Home::Constant(root)) = place.home else { continue };
            if base.contains_key(&root.id) {
                continue;
            }
            let allocation = match &graph.values[root.id as usize].origin {
                Origin::Constant(bytes) => {
                    places.push((root.id, None));
                    Arc::new(Allocation::with(device, bytes, "a constant")?)
                }
                _ => {
                    let (store, tensor) = stored(graph, root, device, stores)?;
                    places.push((root.id, Some(store)));
                    let updated = graph.updates.iter().any(|(target, _)| *target == root);
                    writes[store] = Some(updated || writes[store] == Some(true));
                    tensor.buffer
                }
            };
            base.insert(root.id, allocation.ptr());
            kept.push(allocation);
        }
        // Where a program writes anything of a store, nothing there counts as unchanged: runs count as writes.
        let unchanged =
            places.into_iter().filter(|(_, store)| store.is_none_or(|i| writes[i] == Some(false)));
        let unchanged =
            unchanged.map(|(id, store)| (id, store.map(|i| Arc::clone(stores[i].lock())))).collect();
        let used = |(store, writes): (&&Store, Option<bool>)| {
            Some(StoreUse { lock: Arc::clone(store.lock()), writes: writes? })
        };
        let uses = StoreUses::new(stores.iter().zip(writes).filter_map(used).collect());
        Ok(Self { kept, base, uses, unchanged })
    }
}

/// The tensor of a parameter or state, and the number of the store that has it.
fn stored(graph: &Graph, value: Value, device: &Device, stores: &[&Store]) -> Result<(usize, Tensor)> {
    let name = graph.describe(value);
    let found = stores.iter().enumerate().find_map(|(i, store)| Some((i, store.find(&name)?)));
    let Some((index, tensor)) = found else {
        let names: Vec<String> = stores.iter().flat_map(|s| s.names()).collect();
        let nearest = nearest(&name, names.iter().map(String::as_str));
        return Err(Error::UnknownName { kind: "stored tensor", name, nearest });
    };
    let ty = graph.ty_of(value);
    if *tensor.ty != *ty {
        let (expected, got) = (ty.to_string(), tensor.ty.to_string());
        return Err(Error::StoreMismatch { name, expected, got });
    }
    if !tensor.buffer.is_on(device) {
        let got = format!("`{name}` on {:?}", stores[index].device());
        return Err(Error::Program { expected: format!("stores on {device:?}"), got });
    }
    Ok((index, tensor))
}

/// Where every value of a planned graph lies.
struct Addresses<'a> {
    graph: &'a Graph,
    plan: &'a Plan,
    arena: *mut u8,
    /// Of stored tensors and constants.
    base: &'a BTreeMap<u32, *mut u8>,
}

impl Addresses<'_> {
    /// A value as an operand; null if nothing touches it.
    fn operand(&self, value: Value) -> Operand {
        // The planner keeps offsets inside the arena, and aliases inside their root.
        let ptr = match self.plan.places[value.id as usize] {
            Some(place) => match place.home {
                Home::Arena(at) => self.arena.wrapping_add(at + place.offset),
                Home::Stored(root) | Home::Constant(root) => self.base[&root.id].wrapping_add(place.offset),
                Home::Unused => std::ptr::null_mut(),
            },
            None => std::ptr::null_mut(),
        };
        Operand { ptr, ty: self.graph.ty_of(value).clone() }
    }

    fn operands(&self, values: &[Value]) -> Box<[Operand]> {
        values.iter().map(|value| self.operand(*value)).collect()
    }

    /// All ops that run; aliases need no work.
    fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for node in self.plan.steps.iter().map(|node| &self.graph.nodes[*node]) {
            let (inputs, outputs) = (self.operands(&node.inputs), self.operands(&node.outputs));
            let types: Vec<_> = inputs.iter().map(|o| o.ty.clone()).collect();
            if node.op.alias(&types).is_none() {
                steps.push(Step { op: Arc::clone(&node.op), inputs, outputs, kept: None });
            }
        }
        steps
    }

    /// Makes memory for what kernels keep of inputs that no run changes; `steps` are those of [`Addresses::steps`].
    fn keep(&self, steps: &mut [Step], unchanged: &BTreeMap<u32, Option<Arc<StoreLock>>>) -> Result<()> {
        let mut steps = steps.iter_mut();
        for node in self.plan.steps.iter().map(|node| &self.graph.nodes[*node]) {
            let types = |values: &[Value]| values.iter().map(|v| self.graph.ty_of(*v).clone()).collect();
            let (inputs, outputs): (Vec<_>, Vec<_>) = (types(&node.inputs), types(&node.outputs));
            if node.op.alias(&inputs).is_some() {
                continue;
            }
            let (Some(step), Some(kept)) = (steps.next(), node.op.kept(&inputs, &outputs)) else { continue };
            let place = self.plan.places[node.inputs[kept.input].id as usize].map(|place| place.home);
            let Some(Home::Stored(root) | Home::Constant(root)) = place else { continue };
            if let Some(lock) = unchanged.get(&root.id) {
                let memory = Buffer::new(kept.bytes, "what a program keeps")?;
                step.kept = Some(KeptMemory { memory, bytes: kept.bytes, lock: lock.clone(), filled: None });
            }
        }
        Ok(())
    }

    /// Operands that index something and are inputs of the program, possibly seen through aliases.
    fn checks(&self, inputs: &[(&str, Value)]) -> Vec<Check> {
        let mut checks = Vec::new();
        for node in self.plan.steps.iter().map(|node| &self.graph.nodes[*node]) {
            let types: Vec<_> = node.inputs.iter().map(|v| self.graph.ty_of(*v).clone()).collect();
            for bound in node.op.indices(&types) {
                let value = node.inputs[bound.input];
                let Some(input) = input_behind(self.graph, value) else { continue };
                let Some(index) = inputs.iter().position(|(_, v)| *v == input) else { continue };
                let offset = self.operand(value).ptr.addr() - self.operand(input).ptr.addr();
                let ty = self.graph.ty_of(value).clone();
                checks.push(Check { op: node.op.name(), bound, input: index, offset, ty });
            }
        }
        checks
    }
}

impl Check {
    /// Fails if an index is out of range.
    ///
    /// # Safety
    /// `input` must lead to the input that this check is for, and nobody may write there meanwhile.
    pub unsafe fn run(&self, input: *const u8) -> Result<()> {
        let len = self.ty.len();
        // SAFETY: by the contract; the part lies inside the input.
        unsafe {
            let data = input.add(self.offset);
            match self.ty.dtype {
                DType::I32 => self.bound.check(self.op, std::slice::from_raw_parts(data.cast::<i32>(), len)),
                _ => self.bound.check(self.op, std::slice::from_raw_parts(data.cast::<i64>(), len)),
            }
        }
    }
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
