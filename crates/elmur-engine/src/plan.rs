//! The planner: which ops run, and where every value lives.
//!
//! 1. Dead code: only ops that an output or an update depends on are kept, in graph order; where they run one after
//!    the other, those that nothing but updates needs come last, when nobody reads the old value any more.
//! 2. Homes: aliases (reshape, leading slices) live in their source. A parameter or state that is updated
//!    through ops that work in place is updated in its own storage; other in-place ops take over the buffer
//!    of an operand that nobody reads afterwards.
//! 3. Arena: the remaining values get offsets in one arena. Largest first, each at the lowest offset that is
//!    free during its lifetime.

use crate::buffer::ALIGN;
use crate::graph::{Graph, Origin, Value};
use crate::types::DType;

/// The memory that a value lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Home {
    /// Byte offset in the arena.
    Arena(usize),
    /// Storage of this parameter or state.
    Stored(Value),
    /// Memory of this constant.
    Constant(Value),
    /// None: the op that computes the value runs, but nobody reads this output.
    Unused,
}

/// Where a value lies: `offset` bytes into its home.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub home: Home,
    pub offset: usize,
}

#[derive(Debug)]
pub(crate) struct Plan {
    /// Nodes to run, in order.
    pub steps: Vec<usize>,
    /// Places by number of the value; `None` for values that no step touches.
    pub places: Vec<Option<Place>>,
    /// (target, source) to copy after the last step, for updates that could not be made in place.
    pub copies: Vec<(Value, Value)>,
    /// Bytes of the arena, without scratch.
    pub arena_bytes: usize,
}

/// A step number after all others.
const FOREVER: usize = usize::MAX;

struct Planner<'g> {
    graph: &'g Graph,
    steps: Vec<usize>,
    /// By number of a value: its root, the value whose memory it uses, and the byte offset in that memory.
    root: Vec<(Value, usize)>,
    /// By number of a root: the first step that writes the root, and the last step that reads it or an alias
    /// of it.
    first: Vec<usize>,
    last: Vec<usize>,
}

/// Plans a graph. Up to `unshared_budget` bytes may be spent on giving every value memory of its own, which
/// lets independent ops run side by side; where that is not enough, values that are never alive together
/// share memory. `sequential`: ops run one after the other.
pub(crate) fn plan(graph: &Graph, unshared_budget: usize, sequential: bool) -> Plan {
    let mut steps = live_nodes(graph);
    if sequential {
        updates_last(graph, &mut steps);
    }
    let mut planner = Planner::new(graph, steps);
    let copies = planner.place_updates();
    planner.place_in_place();
    planner.assign(copies, unshared_budget)
}

/// Nodes that outputs and updates depend on, in graph order.
pub(crate) fn live_nodes(graph: &Graph) -> Vec<usize> {
    let mut live = vec![false; graph.nodes.len()];
    let mark = |live: &mut Vec<bool>, value: Value| {
        if let Origin::Node(node) = graph.values[value.id as usize].origin {
            live[node] = true;
        }
    };
    graph.outputs.iter().for_each(|(_, value)| mark(&mut live, *value));
    graph.updates.iter().for_each(|(_, value)| mark(&mut live, *value));
    for node in (0..graph.nodes.len()).rev() {
        if live[node] {
            graph.nodes[node].inputs.iter().for_each(|value| mark(&mut live, *value));
        }
    }
    (0..graph.nodes.len()).filter(|node| live[*node]).collect()
}

/// Moves nodes whose outputs no other node reads and no output is to the end.
fn updates_last(graph: &Graph, steps: &mut [usize]) {
    let mut read = vec![false; graph.values.len()];
    let inputs = steps.iter().flat_map(|node| &graph.nodes[*node].inputs);
    inputs
        .chain(graph.outputs.iter().map(|(_, value)| value))
        .for_each(|value| read[value.id as usize] = true);
    steps.sort_by_key(|node| !graph.nodes[*node].outputs.iter().any(|output| read[output.id as usize]));
}

impl<'g> Planner<'g> {
    fn new(graph: &'g Graph, steps: Vec<usize>) -> Self {
        let mut planner = Self {
            graph,
            root: (0..graph.values.len()).map(|id| (graph.value_at(id), 0)).collect(),
            first: vec![FOREVER; graph.values.len()],
            last: vec![0; graph.values.len()],
            steps,
        };
        planner.find_roots();
        planner.find_lifetimes();
        planner
    }

    fn find_roots(&mut self) {
        for (id, info) in self.graph.values.iter().enumerate() {
            let own = self.graph.value_at(id);
            self.root[id] = match info.origin {
                Origin::Node(node) => {
                    let node = &self.graph.nodes[node];
                    let types: Vec<_> = node.inputs.iter().map(|v| self.graph.ty_of(*v).clone()).collect();
                    match node.op.alias(&types) {
                        Some(offset) => {
                            let (root, base) = self.root[node.inputs[0].id as usize];
                            (root, base + offset)
                        }
                        None => (own, 0),
                    }
                }
                _ => (own, 0),
            };
        }
    }

    fn find_lifetimes(&mut self) {
        for (step, &node) in self.steps.iter().enumerate() {
            let node = &self.graph.nodes[node];
            for input in &node.inputs {
                let root = self.root[input.id as usize].0.id as usize;
                self.last[root] = self.last[root].max(step + 1);
            }
            for output in &node.outputs {
                let root = self.root[output.id as usize].0.id as usize;
                self.first[root] = self.first[root].min(step);
                self.last[root] = self.last[root].max(step + 1);
            }
        }
        for (_, value) in &self.graph.outputs {
            self.last[self.root[value.id as usize].0.id as usize] = FOREVER;
        }
    }

    /// The root that step `step` may overwrite, given a pair (input, output) that its op can compute in
    /// place. The input must be the whole of its root, and no other operand may share that root.
    fn overwritten_input(&self, step: usize, pair: (usize, usize)) -> Option<Value> {
        let node = &self.graph.nodes[self.steps[step]];
        let (input, output) = (node.inputs[pair.0], node.outputs[pair.1]);
        let (root, offset) = self.root[input.id as usize];
        let shared = node.inputs.iter().filter(|i| self.root[i.id as usize].0 == root).count() > 1;
        let bytes = self.graph.ty_of(output).bytes();
        let same_size = [root, input].iter().all(|v| self.graph.ty_of(*v).bytes() == bytes);
        (offset == 0 && same_size && !shared).then_some(root)
    }

    /// Places updates: where a chain of in-place ops leads from the old value to the new one, the chain is
    /// computed in the state's own storage. Other updates are returned as copies (target, source).
    fn place_updates(&mut self) -> Vec<(Value, Value)> {
        let mut step_of = vec![usize::MAX; self.graph.nodes.len()];
        self.steps.iter().enumerate().for_each(|(step, &node)| step_of[node] = step);
        let mut copies = Vec::new();
        for &(target, new) in &self.graph.updates {
            match self.chain(&step_of, target, new) {
                Some(chain) => {
                    for value in chain {
                        self.root[value.id as usize] = (target, 0);
                    }
                    self.last[target.id as usize] = FOREVER;
                }
                None => {
                    copies.push((target, new));
                    self.last[self.root[new.id as usize].0.id as usize] = FOREVER;
                }
            }
        }
        // Aliases of values that moved move with them.
        for id in 0..self.root.len() {
            let (root, offset) = self.root[id];
            let (new_root, base) = self.root[root.id as usize];
            if new_root != root {
                self.root[id] = (new_root, base + offset);
            }
        }
        copies
    }

    /// The values from `new` back to `target`, if every link is an in-place op and nobody reads an old
    /// version after it has been overwritten.
    fn chain(&self, step_of: &[usize], target: Value, new: Value) -> Option<Vec<Value>> {
        let mut chain = Vec::new();
        let mut value = new;
        if self.last[new.id as usize] == FOREVER {
            return None; // also an output, which must stay readable when the state changes again
        }
        while value != target {
            let Origin::Node(node) = self.graph.values[value.id as usize].origin else { return None };
            let step = step_of[node];
            let node = &self.graph.nodes[node];
            let output = node.outputs.iter().position(|o| *o == value)?;
            let pair = node.op.in_place(node.inputs.len()).into_iter().find(|(_, o)| *o == output)?;
            let previous = self.overwritten_input(step, pair)?;
            let feeds_another = previous != target
                && self.graph.updates.iter().any(|(_, source)| self.root[source.id as usize].0 == previous);
            let read_later = self.last[previous.id as usize] != step + 1;
            if self.root[value.id as usize].0 != value || read_later || feeds_another {
                return None;
            }
            chain.push(value);
            value = previous;
        }
        Some(chain)
    }

    /// Places the outputs of other in-place ops: an output takes over the buffer of an operand that is used
    /// for the last time.
    fn place_in_place(&mut self) {
        for step in 0..self.steps.len() {
            let node = &self.graph.nodes[self.steps[step]];
            for pair in node.op.in_place(node.inputs.len()) {
                let output = node.outputs[pair.1];
                if self.root[output.id as usize].0 != output {
                    continue;
                }
                let Some(root) = self.overwritten_input(step, pair) else { continue };
                let computed = matches!(self.graph.values[root.id as usize].origin, Origin::Node(_));
                if !computed || self.last[root.id as usize] != step + 1 {
                    continue;
                }
                self.last[root.id as usize] = self.last[output.id as usize];
                for id in output.id as usize..self.root.len() {
                    if self.root[id].0 == output {
                        self.root[id].0 = root;
                    }
                }
            }
        }
    }

    fn assign(self, copies: Vec<(Value, Value)>, unshared_budget: usize) -> Plan {
        let graph = self.graph;
        let mut touched = vec![false; graph.values.len()];
        for &node in &self.steps {
            let node = &graph.nodes[node];
            node.inputs.iter().chain(&node.outputs).for_each(|v| touched[v.id as usize] = true);
        }
        graph.outputs.iter().for_each(|(_, v)| touched[v.id as usize] = true);
        for (id, info) in graph.values.iter().enumerate() {
            touched[id] |= matches!(info.origin, Origin::Input);
        }
        for (target, new) in &graph.updates {
            touched[target.id as usize] = true;
            touched[new.id as usize] = true;
        }

        let mut read = self.read_values();
        for &node in &self.steps {
            let node = &graph.nodes[node];
            let forced = |i: &usize| node.op.always_writes(*i);
            (0..node.outputs.len()).filter(forced).for_each(|i| read[node.outputs[i].id as usize] = true);
        }
        let is_output =
            |id: usize| graph.outputs.iter().any(|(_, v)| self.root[v.id as usize].0.id as usize == id);
        let mut blocks = Vec::new();
        for (id, info) in graph.values.iter().enumerate() {
            let is_root = self.root[id].0.id as usize == id;
            let lifetime = match info.origin {
                Origin::Input => (0, FOREVER),
                // Never shared: a run that fails halfway must not leave other bits than zero and one in a
                // bool.
                Origin::Node(_) if is_root && info.ty.dtype == DType::Bool && is_output(id) => (0, FOREVER),
                Origin::Node(_) if is_root && touched[id] && read[id] => (self.first[id], self.last[id]),
                _ => continue,
            };
            blocks.push(Block { id, bytes: info.ty.bytes().next_multiple_of(ALIGN), lifetime, offset: 0 });
        }
        let apart: usize = blocks.iter().map(|b| b.bytes).sum();
        let arena_bytes = if apart <= unshared_budget { lay_out(&mut blocks) } else { pack(&mut blocks) };
        let mut offsets = vec![None; graph.values.len()];
        blocks.iter().for_each(|b| offsets[b.id] = Some(b.offset));

        let places = (0..graph.values.len()).map(|id| {
            let (root, offset) = self.root[id];
            let home = match graph.values[root.id as usize].origin {
                Origin::Param | Origin::State => Home::Stored(root),
                Origin::Constant(_) => Home::Constant(root),
                _ => offsets[root.id as usize].map_or(Home::Unused, Home::Arena),
            };
            touched[id].then_some(Place { home, offset })
        });
        Plan { places: places.collect(), steps: self.steps, copies, arena_bytes }
    }

    /// By number of a root: whether an op, an output or an update reads it.
    fn read_values(&self) -> Vec<bool> {
        let mut read = vec![false; self.graph.values.len()];
        let mut mark = |value: &Value| {
            read[value.id as usize] = true;
            read[self.root[value.id as usize].0.id as usize] = true;
        };
        for &node in &self.steps {
            self.graph.nodes[node].inputs.iter().for_each(&mut mark);
        }
        self.graph.outputs.iter().for_each(|(_, value)| mark(value));
        self.graph.updates.iter().for_each(|(_, value)| mark(value));
        read
    }
}

struct Block {
    id: usize,
    bytes: usize,
    /// First writing step, counted from 0, and last reading step, counted from 1, both inclusive: a buffer
    /// that step n reads is free for the outputs of step n + 1, not of step n.
    lifetime: (usize, usize),
    offset: usize,
}

/// Puts blocks one after the other, those that live forever (inputs above all) first. Returns the bytes
/// needed.
fn lay_out(blocks: &mut [Block]) -> usize {
    blocks.sort_by_key(|block| block.lifetime.1 != FOREVER);
    let mut total = 0;
    for block in blocks {
        block.offset = total;
        total += block.bytes;
    }
    total
}

/// Assigns offsets so that blocks that live at the same time do not overlap. Returns the bytes needed.
fn pack(blocks: &mut [Block]) -> usize {
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(blocks[i].bytes), blocks[i].lifetime.0, blocks[i].id));
    let mut placed: Vec<usize> = Vec::with_capacity(blocks.len());
    let mut total = 0;
    for &i in &order {
        let (first, last) = blocks[i].lifetime;
        let mut offset = 0;
        // `placed` is kept sorted by offset: walk the gaps between blocks alive at the same time.
        for &j in &placed {
            let other = &blocks[j];
            if other.lifetime.0 >= last || first >= other.lifetime.1 {
                continue;
            }
            if other.offset >= offset + blocks[i].bytes {
                break;
            }
            offset = offset.max(other.offset + other.bytes);
        }
        blocks[i].offset = offset;
        total = total.max(offset + blocks[i].bytes);
        let at = placed.partition_point(|&j| blocks[j].offset < offset);
        placed.insert(at, i);
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(id: usize, bytes: usize, lifetime: (usize, usize)) -> Block {
        Block { id, bytes, lifetime, offset: 0 }
    }

    #[test]
    fn blocks_alive_together_never_overlap_and_dead_ones_are_reused() {
        // A chain a -> b -> c -> d: only two neighbours live at once.
        let mut chain: Vec<_> = (0..4).map(|i| block(i, 64, (i, i + 2))).collect();
        assert_eq!(pack(&mut chain), 128);
        // Random lifetimes: check all pairs, and that the arena is no larger than the sum.
        let stream = crate::rng::Stream::new(3, 0, 0);
        let mut blocks: Vec<_> = (0..200)
            .map(|i| {
                let [a, b, c, _] = stream.block(i);
                let first = (a % 100) as usize;
                block(i as usize, 64 * (1 + (b % 20) as usize), (first, first + 1 + (c % 10) as usize))
            })
            .collect();
        let total = pack(&mut blocks);
        assert!(total < blocks.iter().map(|b| b.bytes).sum::<usize>() / 4);
        for (i, a) in blocks.iter().enumerate() {
            assert!(a.offset + a.bytes <= total);
            for b in &blocks[..i] {
                let together = a.lifetime.0 < b.lifetime.1 && b.lifetime.0 < a.lifetime.1;
                let overlap = a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes;
                assert!(!(together && overlap));
            }
        }
    }
}
