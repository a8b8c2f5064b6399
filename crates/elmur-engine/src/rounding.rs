//! Weights in bf16 for programs that only read them: acting, where a step waits for the weights to come from memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::cpu::gemm::RoundedWeight;
use crate::dtype::DType;
use crate::error::Result;
use crate::graph::{Graph, Origin, Value};
use crate::store::Store;

/// Layers with at most so many outputs are routers and heads, whose results are compared with each other: their weights
/// stay f32.
const FEW_OUTPUTS: usize = 16;

/// Rounded copies of the weights of linear layers, by the name of the parameter. Copies are made once and shared by all
/// graphs that [`RoundedWeights::apply`] rewrites; later changes of the parameters are not seen.
#[derive(Debug, Default)]
pub struct RoundedWeights(Mutex<BTreeMap<String, Arc<RoundedWeight>>>);

impl RoundedWeights {
    /// The graph for a CPU with every linear layer whose weight is an f32 parameter reading a copy of that parameter in
    /// bf16: nearest, eight bits of significand. Sums stay f32, and so do biases, tables and all other parameters.
    /// Layers with at most 16 outputs, layers whose weight the graph updates, and layers whose backward pass the graph
    /// computes are left as they are.
    pub fn apply(&self, graph: &Graph, params: &Store) -> Result<Graph> {
        let mut graph = graph.clone();
        for index in 0..graph.nodes.len() {
            let node = &graph.nodes[index];
            let (Some(&weight), Some(output)) = (node.inputs.get(1), node.outputs.get(1..)) else { continue };
            let info = &graph.values[weight.id as usize];
            let (Origin::Param, DType::F32, Some(name)) = (&info.origin, info.ty.dtype, &info.name) else {
                continue;
            };
            let read = |value: &Value| graph.nodes.iter().any(|node| node.inputs.contains(value));
            let updated = graph.updates.iter().any(|(target, _)| *target == weight);
            let Some(rounded) = node.op.rounded() else { continue };
            if updated || output.iter().any(read) || info.ty.shape[0] <= FEW_OUTPUTS {
                continue;
            }
            let op = rounded(self.copy(name, &info.ty.shape, params)?);
            let node = &mut graph.nodes[index];
            node.op = op;
            node.inputs.remove(1);
            node.outputs.truncate(1);
        }
        Ok(graph)
    }

    /// The rounded copy of a parameter.
    fn copy(&self, name: &str, shape: &[usize], params: &Store) -> Result<Arc<RoundedWeight>> {
        let mut copies = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copy) = copies.get(name) {
            return Ok(Arc::clone(copy));
        }
        let copy = Arc::new(RoundedWeight::new(&params.get::<f32>(name)?, shape[0], shape[1]));
        copies.insert(name.to_owned(), Arc::clone(&copy));
        Ok(copy)
    }
}
