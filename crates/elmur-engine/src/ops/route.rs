//! Routing tokens to experts: the best k of E by a router's logits, and the loss that keeps experts evenly
//! used.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{IndexBound, Io, Op, dispatch_float, mismatch, want, want_float};
use crate::types::{DType, TensorType};

impl Graph {
    /// Routes each of N tokens to the `k` experts with the largest logits [..., E] (ties: lowest expert
    /// first). Returns gates [N, k], a softmax over the chosen logits (equal to the softmax over all logits,
    /// renormalised), and experts i32 [N, k]. With k = 1 the gate is constant and the logits get no gradient.
    pub fn route_top_k(&mut self, logits: Value, k: usize) -> Result<(Value, Value)> {
        let outputs = self.push(TopK { k }, &[logits])?;
        Ok((outputs[0], outputs[1]))
    }

    /// E Σ_e f_e g_e with f_e the fraction of assignments that went to expert e and g_e the sum of their
    /// gates over the number of assignments. Gradients reach the gates, not the (discrete) fractions.
    pub fn load_balancing_loss(
        &mut self,
        gates: Value,
        experts: Value,
        expert_count: usize,
    ) -> Result<Value> {
        self.load_balancing_losses(&[(gates, experts)], expert_count)
    }

    /// The sum of [`Graph::load_balancing_loss`] over several routings (gates, experts).
    pub fn load_balancing_losses(&mut self, routes: &[(Value, Value)], expert_count: usize) -> Result<Value> {
        let inputs: Vec<Value> = routes.iter().flat_map(|(gates, experts)| [*gates, *experts]).collect();
        self.push1(Balance { experts: expert_count }, &inputs)
    }
}

#[derive(Debug)]
struct TopK {
    k: usize,
}

impl Op for TopK {
    fn name(&self) -> &'static str {
        "route_top_k"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let logits = &inputs[0];
        want_float("route_top_k", "logits", logits)?;
        if logits.shape.is_empty() || self.k == 0 || self.k > logits.cols() {
            let expected = format!("logits [..., experts] with at least {} experts", self.k.max(1));
            return mismatch("route_top_k", expected, format!("{logits} and k = {}", self.k));
        }
        let shape = [logits.rows(), self.k];
        Ok(vec![logits.with(shape), TensorType::new(DType::I32, shape)])
    }
    fn always_writes(&self, output: usize) -> bool {
        output == 1
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        // A single gate is always 1: no gradient reaches the router.
        if let Some(dgates) = b.grad(0).filter(|_| self.k > 1) {
            let logits = b.graph.ty(b.inputs[0])?.clone();
            let dlogits = b.graph.push1(TopKGrad { logits }, &[dgates, b.outputs[0], b.outputs[1]])?;
            b.set(0, dlogits);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_float!(io.dtype(), T => {
            let logits = io.input::<T>(0).chunks_exact(io.ty(0).cols());
            let experts = io.output::<i32>(1).chunks_exact_mut(self.k);
            match io.output_if_used::<T>(0) {
                Some(gates) => logits.zip(experts).zip(gates.chunks_exact_mut(self.k)).for_each(|((l, e), g)| {
                    choose(l, e);
                    softmax_of(l, e, g);
                }),
                None => logits.zip(experts).for_each(|(l, e)| choose(l, e)),
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, count) = (launch.ty(0).rows(), launch.ty(0).cols());
        let args =
            args![launch.output(0), launch.output(1), launch.input(0), self.k as i32, count as i32, rows];
        launch.elements("route_top_k", rows, args)
    }
}

/// Indices of the largest logits, best first. NaN counts as smallest.
fn choose<T: Float>(logits: &[T], experts: &mut [i32]) {
    for slot in 0..experts.len() {
        let (taken, rest) = experts.split_at_mut(slot);
        let mut best: Option<usize> = None;
        for (e, logit) in logits.iter().enumerate() {
            let better = |b: usize| *logit > logits[b] || (logits[b].is_nan() && !logit.is_nan());
            if !taken.contains(&(e as i32)) && best.is_none_or(better) {
                best = Some(e);
            }
        }
        rest[0] = best.unwrap_or(slot) as i32;
    }
}

fn softmax_of<T: Float>(logits: &[T], experts: &[i32], gates: &mut [T]) {
    let top = logits[experts[0] as usize];
    let mut total = T::ZERO;
    for (gate, &e) in gates.iter_mut().zip(experts) {
        *gate = (logits[e as usize] - top).exp();
        total += *gate;
    }
    gates.iter_mut().for_each(|g| *g /= total);
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Gradient of the logits that tokens were routed by.
    struct RouteGradArgs in "route.cu" {
        dlogits: u64, dgates: u64, gates: u64, experts: u64, rows: usize, k: i32, count: i32,
    }
}

/// dlogit_e = g_e (dg_e - Σ g dg) for the chosen, zero for the others.
#[derive(Debug)]
struct TopKGrad {
    logits: TensorType,
}

impl Op for TopKGrad {
    fn name(&self) -> &'static str {
        "route_top_k_grad"
    }
    fn infer(&self, _: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![self.logits.clone()])
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let k = io.ty(0).cols();
        dispatch_float!(io.dtype(), T => {
            let (dgates, gates, experts) = (io.input::<T>(0), io.input::<T>(1), io.input::<i32>(2));
            for (n, dlogits) in io.output::<T>(0).chunks_exact_mut(self.logits.cols()).enumerate() {
                let at = n * k..(n + 1) * k;
                let (dgates, gates, experts) = (&dgates[at.clone()], &gates[at.clone()], &experts[at]);
                dlogits.fill(T::ZERO);
                let mut mean = T::ZERO;
                gates.iter().zip(dgates).for_each(|(g, dg)| mean += *g * *dg);
                for ((g, dg), &e) in gates.iter().zip(dgates).zip(experts) {
                    dlogits[e as usize] = *g * (*dg - mean);
                }
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let rows = self.logits.rows();
        let args = RouteGradArgs {
            dlogits: launch.output(0),
            dgates: launch.input(0),
            gates: launch.input(1),
            experts: launch.input(2),
            rows,
            k: launch.ty(0).cols() as i32,
            count: self.logits.cols() as i32,
        };
        launch.elements("route_top_k_grad", rows, args)
    }
}

/// Fails unless these are the outputs of `route_top_k`.
pub(crate) fn want_routes(op: &'static str, gates: &TensorType, experts: &TensorType) -> Result<()> {
    want_float(op, "gates", gates)?;
    if gates.shape.len() != 2 || experts.shape != gates.shape || experts.dtype != DType::I32 {
        return mismatch(op, "gates [N, k] and experts i32[N, k]", format!("{gates} and {experts}"));
    }
    Ok(())
}

#[derive(Debug)]
struct Balance {
    experts: usize,
}

impl Balance {
    /// Number of assignments to expert `e`.
    fn count(experts: &[i32], e: usize) -> usize {
        experts.iter().filter(|x| **x == e as i32).count()
    }
}

impl Op for Balance {
    fn name(&self) -> &'static str {
        "load_balancing_loss"
    }
    fn indices(&self, inputs: &[TensorType]) -> Vec<IndexBound> {
        let bound = |input| IndexBound { input, what: "expert", limit: self.experts, ignored: None };
        (1..inputs.len()).step_by(2).map(bound).collect()
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let Some(first) = inputs.first() else {
            return mismatch("load_balancing_loss", "at least one routing", "none");
        };
        for pair in inputs.chunks_exact(2) {
            want_routes("load_balancing_loss", &pair[0], &pair[1])?;
            want("load_balancing_loss", "gates", &pair[0], first.dtype, &pair[0].shape)?;
        }
        if self.experts == 0 {
            return mismatch("load_balancing_loss", "at least one expert", "0");
        }
        Ok(vec![first.with([])])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let Some(grad) = b.grad(0) else { return Ok(()) };
        for input in (0..b.inputs.len()).step_by(2) {
            let inputs = [grad, b.inputs[input], b.inputs[input + 1]];
            let dgates = b.graph.push1(BalanceGrad { experts: self.experts }, &inputs)?;
            b.set(input, dgates);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_float!(io.dtype(), T => {
            let mut loss = 0.0;
            for input in (0..io.inputs.len()).step_by(2) {
                let (gates, experts) = (io.input::<T>(input), io.input::<i32>(input + 1));
                let total = gates.len() as f64;
                for e in 0..self.experts {
                    let chosen = gates.iter().zip(experts).filter(|(_, x)| **x == e as i32);
                    let gate: f64 = chosen.map(|(g, _)| g.to_f64()).sum();
                    loss += Self::count(experts, e) as f64 / total * (gate / total);
                }
            }
            io.output::<T>(0)[0] = T::of(self.experts as f64 * loss);
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let mut table = Vec::new();
        for input in (0..launch.inputs.len()).step_by(2) {
            table.extend([launch.input(input), launch.input(input + 1), launch.ty(input).len() as u64]);
        }
        let routes = table.len() / 3;
        let table = launch.table(&table)?;
        let (partial, counter) = (launch.scratch(8 * routes)?, launch.scratch(4)?);
        let args = args![launch.output(0), partial, counter, table, self.experts as i32];
        launch.kernel("load_balancing_loss", [routes, 1, 1], 1024, 0, args)
    }
}

/// dgate = grad E f_e / assignments.
#[derive(Debug)]
struct BalanceGrad {
    experts: usize,
}

impl Op for BalanceGrad {
    fn name(&self) -> &'static str {
        "load_balancing_loss_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[1].clone()])
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let experts = io.input::<i32>(2);
        dispatch_float!(io.dtype(), T => {
            let grad = io.input::<T>(0)[0].to_f64();
            let dgates = io.output::<T>(0);
            let total = dgates.len() as f64;
            dgates.fill(T::ZERO);
            for e in 0..self.experts {
                let value = T::of(grad * self.experts as f64 * Balance::count(experts, e) as f64 / (total * total));
                let chosen = dgates.iter_mut().zip(experts).filter(|(_, x)| **x == e as i32);
                chosen.for_each(|(g, _)| *g = value);
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = launch.ty(1).len();
        let args = args![launch.output(0), launch.input(0), launch.input(2), self.experts as i32, n];
        launch.kernel("load_balancing_loss_grad", [1, 1, 1], 1024, 4 * self.experts, args)
    }
}
