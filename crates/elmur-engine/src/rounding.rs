//! Weights in bf16 for programs that only read them: acting, where a step waits for the weights to come from memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::cpu::gemm::RoundedWeight;
use crate::cpu::pool::Pool;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Graph, Origin, Value};
use crate::program::Program;
use crate::store::Store;

/// Layers with at most so many outputs are routers and heads, whose results are compared with each other: their weights
/// stay f32.
const FEW_OUTPUTS: usize = 16;

/// Rounded copies of the weights of linear layers, by where they come from. Copies are made once and shared by all
/// graphs that [`RoundedWeights::apply`] rewrites; later changes of the parameters are not seen.
#[derive(Debug, Default)]
pub struct RoundedWeights(Mutex<BTreeMap<String, Arc<RoundedWeight>>>);

impl RoundedWeights {
    /// The graph for a CPU with every linear layer whose weight is an f32 parameter, or one with its axes in another
    /// order, reading a copy of that weight in bf16: nearest, eight bits of significand. Sums stay f32, and so do
    /// biases, tables and all other parameters. Layers with at most 16 outputs, layers whose weight the graph updates,
    /// and layers whose backward pass the graph computes are left as they are.
    pub fn apply(&self, graph: &Graph, params: &Store) -> Result<Graph> {
        let mut graph = graph.clone();
        for index in 0..graph.nodes.len() {
            let node = &graph.nodes[index];
            let (Some(&weight), Some(output)) = (node.inputs.get(1), node.outputs.get(1..)) else { continue };
            let Some(rounded) = node.op.rounded() else { continue };
            let Some(source) = Source::of(&graph, weight) else { continue };
            let read = |value: &Value| graph.nodes.iter().any(|node| node.inputs.contains(value));
            let updated = graph.updates.iter().any(|(target, _)| *target == source.parameter);
            if updated || output.iter().any(read) || graph.ty_of(weight).shape[0] <= FEW_OUTPUTS {
                continue;
            }
            let op = rounded(self.copy(&graph, weight, source, params)?);
            let node = &mut graph.nodes[index];
            node.op = op;
            node.inputs.remove(1);
            node.outputs.truncate(1);
        }
        Ok(graph)
    }

    /// The rounded copy of a weight.
    fn copy(
        &self,
        graph: &Graph,
        weight: Value,
        source: Source,
        params: &Store,
    ) -> Result<Arc<RoundedWeight>> {
        let mut copies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copy) = copies.get(&source.description) {
            return Ok(Arc::clone(copy));
        }
        let mut alone = graph.clone();
        (alone.outputs, alone.updates) = (vec![("weight".to_owned(), weight)], Vec::new());
        let mut program = Program::new(&alone, Pool::serial(), &[params])?;
        program.run()?;
        let shape = &graph.ty_of(weight).shape;
        let copy = Arc::new(RoundedWeight::new(program.get::<f32>("weight")?, shape[0], shape[1]));
        copies.insert(source.description, Arc::clone(&copy));
        Ok(copy)
    }
}

/// The parameter that a weight is, and how it is laid out.
struct Source {
    parameter: Value,
    /// The parameter's name and what becomes of it: the same in all graphs.
    description: String,
}

impl Source {
    /// Of an f32 weight that is a parameter, reshaped or with its axes in another order; else none.
    fn of(graph: &Graph, weight: Value) -> Option<Self> {
        let (mut parameter, mut description) = (weight, String::new());
        while let Some(node) = graph.producer(parameter) {
            if !node.op.only_rearranges() {
                return None;
            }
            description = format!(" {:?}{description}", node.op);
            parameter = node.inputs[0];
        }
        let info = &graph.values[parameter.id as usize];
        let name = info
            .name
            .as_ref()
            .filter(|_| matches!(info.origin, Origin::Param) && info.ty.dtype == DType::F32)?;
        Some(Self { parameter, description: name.clone() + &description })
    }
}
