//! Rewriting a graph for the CPU before it is planned: two products Aᵀ B with the same A, as the weight gradients of
//! a recurrent layer are, become one op that packs A once. Results have the same bits.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::graph::{Graph, Origin, Value};
use crate::ops::matmul::MatMulPair;
use crate::plan::live_nodes;

/// The graph with pairs of products joined.
pub(crate) fn fuse(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    // The last product not yet joined, by what the left operand is an alias of.
    let mut open: BTreeMap<u32, usize> = BTreeMap::new();
    for node in live_nodes(&graph) {
        let Some(left) = shared_left(&graph, node) else { continue };
        match open.remove(&left) {
            Some(first) if can_join(&graph, first, node) => join(&mut graph, first, node),
            _ => {
                open.insert(left, node);
            }
        }
    }
    graph
}

/// What the left operand of a product Aᵀ B of plain matrices is an alias of, by number.
fn shared_left(graph: &Graph, node: usize) -> Option<u32> {
    let node = &graph.nodes[node];
    let plain = node.op.matrix_product()? == [true, false] && graph.ty_of(node.outputs[0]).shape.len() == 2;
    plain.then(|| source(graph, node.inputs[0]).id)
}

/// The value whose memory a value uses.
fn source(graph: &Graph, value: Value) -> Value {
    let Some(node) = graph.producer(value) else { return value };
    let types: Vec<_> = node.inputs.iter().map(|v| graph.ty_of(*v).clone()).collect();
    // Aliases of a part are not the same operand: they end here.
    let whole = node.op.alias(&types) == Some(0) && types[0].len() == graph.ty_of(value).len();
    if whole { source(graph, node.inputs[0]) } else { value }
}

/// Whether the left operands have one shape and nothing up to `second` reads what `first` computes.
fn can_join(graph: &Graph, first: usize, second: usize) -> bool {
    let product = graph.nodes[first].outputs[0];
    let left = |node: usize| &graph.ty_of(graph.nodes[node].inputs[0]).shape;
    let reads = |node: usize| graph.nodes[node].inputs.iter().any(|input| source(graph, *input) == product);
    left(first) == left(second) && !(first + 1..=second).any(reads)
}

/// Makes `second` compute both products; `first` is left without outputs, and so never runs.
fn join(graph: &mut Graph, first: usize, second: usize) {
    let (right, product) = (graph.nodes[first].inputs[1], graph.nodes[first].outputs[0]);
    graph.nodes[first].outputs.clear();
    graph.values[product.id as usize].origin = Origin::Node(second);
    let node = &mut graph.nodes[second];
    node.op = Arc::new(MatMulPair);
    node.inputs.insert(1, right);
    node.outputs.insert(0, product);
}
