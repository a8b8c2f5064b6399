//! Mixtures of experts: tokens are sorted by expert, each expert's rows go through one matrix product, and
//! the results are summed back by gate. The cost is that of the experts chosen, and no shape depends on the
//! routing.

use std::sync::Arc;

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::gemm::{Mat, Product, gemm, scratch_len};
use crate::cpu::pool::RowsMut;
use crate::cpu::simd::{axpy, dot, simd_fn};
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{IndexBound, Io, Op, dispatch_float, mismatch, want, want_float};
use crate::ops::swiglu::forward_rows;
use crate::types::{DType, TensorType};

/// Assignments sorted by expert, see [`Graph::group_by_expert`].
#[derive(Debug, Clone, Copy)]
pub struct ExpertGroups {
    /// i32 [N k]: the assignment (token * k + slot) in each sorted row.
    pub order: Value,
    /// i32 [N k]: the sorted row of each assignment.
    pub position: Value,
    /// i32 [E + 1]: first sorted row of each expert.
    pub offsets: Value,
}

impl Graph {
    /// Sorts assignments, i32 [N, k], by expert. Assignments of the same expert keep their order.
    pub fn group_by_expert(&mut self, experts: Value, expert_count: usize) -> Result<ExpertGroups> {
        let outputs = self.push(Group { experts: expert_count }, &[experts])?;
        Ok(ExpertGroups { order: outputs[0], position: outputs[1], offsets: outputs[2] })
    }

    /// Tokens x [N, d] in sorted order, once per assignment: [N k, d].
    pub fn gather_by_expert(&mut self, x: Value, groups: ExpertGroups) -> Result<Value> {
        self.push1(Gather, &[x, groups.order, groups.position])
    }

    /// The linear map of each expert, applied to the rows of that expert: `y[r] = x[r] W[e]ᵀ` for x [R, in]
    /// in sorted order and W [E, out, in].
    pub fn grouped_linear(&mut self, x: Value, weight: Value, groups: ExpertGroups) -> Result<Value> {
        self.push1(GroupedLinear { transpose: true }, &[x, weight, groups.offsets])
    }

    /// Sum over each token's experts of gate times result: `out[n] = Σ_s gates[n, s] y[sorted row of (n,
    /// s)]`.
    pub fn combine_experts(&mut self, y: Value, gates: Value, groups: ExpertGroups) -> Result<Value> {
        self.push1(Combine, &[y, gates, groups.order, groups.position])
    }

    /// A mixture of SwiGLU experts: Σ_s gate_s down_e(silu(g) u), [g, u] = gate_up_e x, for x [N, d], gates
    /// and experts of [`Graph::route_top_k`], gate_up [E, 2f, d], down [E, d, f], and dropout of the hidden
    /// units.
    pub fn expert_mixture(
        &mut self,
        x: Value,
        gates: Value,
        experts: Value,
        gate_up: Value,
        down: Value,
        dropout: Option<(f64, Value)>,
    ) -> Result<Value> {
        let expert_count = self.shape(gate_up)?.first().copied().unwrap_or(0);
        if expert_count <= DENSE_EXPERTS && self.shape(gate_up)?.len() == 3 && self.shape(down)?.len() == 3 {
            return self.dense_mixture(x, gates, experts, gate_up, down, dropout);
        }
        let groups = self.group_by_expert(experts, expert_count)?;
        let rows = self.gather_by_expert(x, groups)?;
        let hidden = self.grouped_linear(rows, gate_up, groups)?;
        let mut hidden = self.swiglu(hidden)?;
        if let Some((p, rng)) = dropout {
            hidden = self.dropout(hidden, p, rng)?;
        }
        let y = self.grouped_linear(hidden, down, groups)?;
        self.combine_experts(y, gates, groups)
    }

    /// [`Graph::expert_mixture`] with all experts computed for all tokens and weighed by their gates, zero
    /// for those not chosen: for few experts plain products cost less than sorting.
    fn dense_mixture(
        &mut self,
        x: Value,
        gates: Value,
        experts: Value,
        gate_up: Value,
        down: Value,
        dropout: Option<(f64, Value)>,
    ) -> Result<Value> {
        let (up, out) = (self.shape(gate_up)?.to_vec(), self.shape(down)?.to_vec());
        let (count, f) = (up[0], out[2]);
        let tokens = self.ty(x)?.rows();
        let weight = self.reshape(gate_up, [count * up[1], up[2]])?;
        let hidden = self.linear(x, weight, None, crate::Activation::Identity)?;
        let hidden = self.reshape(hidden, [tokens * count, up[1]])?;
        let hidden = self.push1(GatedSwiGlu { experts: count }, &[hidden, gates, experts])?;
        let mut hidden = self.reshape(hidden, [tokens, count * f])?;
        if let Some((p, rng)) = dropout {
            hidden = self.dropout(hidden, p, rng)?;
        }
        let weight = self.transpose(down, &[1, 0, 2])?;
        let weight = self.reshape(weight, [out[1], count * f])?;
        self.linear(hidden, weight, None, crate::Activation::Identity)
    }
}

/// Up to this many experts are computed for all tokens.
const DENSE_EXPERTS: usize = 4;

#[cfg(feature = "cuda")]
kernel_args! {
    /// y = gate silu(g) u for h = [g, u].
    struct GatedSwigluArgs in "experts.cu" {
        y: u64, h: u64, gates: u64, experts: u64, f: usize, n: usize, k: i32, count: i32,
    }
}

/// SwiGLU of every expert for every token, weighed by gates: from h [N E, 2f], gates [N, k] and experts i32
/// [N, k], y[n E + e] is silu(g) u times the gate of expert e for token n, 0 if it was not chosen.
#[derive(Debug)]
struct GatedSwiGlu {
    experts: usize,
}

/// The gate that weighs row `row` of the rows [token, expert]; none if the expert was not chosen for the
/// token.
fn gate_of(row: usize, experts: &[i32], k: usize, count: usize) -> Option<usize> {
    let (token, expert) = (row / count, (row % count) as i32);
    (token * k..(token + 1) * k).find(|slot| experts[*slot] == expert)
}

impl Op for GatedSwiGlu {
    fn name(&self) -> &'static str {
        "gated_swiglu"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (h, gates) = (&inputs[0], &inputs[1]);
        crate::ops::route::want_routes("expert_mixture", gates, &inputs[2])?;
        let rows = gates.shape[0] * self.experts;
        if h.shape.len() != 2 || h.shape[0] != rows || !h.shape[1].is_multiple_of(2) || h.dtype != gates.dtype
        {
            let expected = format!("gates {}[N, k] for {} tokens", h.dtype, h.rows() / self.experts.max(1));
            return mismatch("expert_mixture", expected, gates.to_string());
        }
        Ok(vec![h.with([rows, h.shape[1] / 2])])
    }
    fn indices(&self, _: &[TensorType]) -> Vec<IndexBound> {
        vec![expert_bound(self.experts)]
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let op = GatedSwiGluGrad { experts: self.experts };
            let grads = b.graph.push(op, &[b.inputs[0], b.inputs[1], b.inputs[2], dy])?;
            b.set(0, grads[0]);
            b.set(1, grads[1]);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (experts, k, f) = (io.input::<i32>(2), io.ty(2).cols(), io.out_ty(0).cols());
        expert_bound(self.experts).check("expert_mixture", experts)?;
        dispatch_float!(io.dtype(), T => {
            let (h, gates, y) = (io.input::<T>(0), io.input::<T>(1), io.output::<T>(0));
            io.pool.rows(y.len() / f, 8 * f, RowsMut::new(y, f), |first, y| {
                for (row, y) in (first..).zip(y.chunks_exact_mut(f)) {
                    match gate_of(row, experts, k, self.experts) {
                        Some(slot) => {
                            forward_rows(&h[row * 2 * f..][..2 * f], f, y);
                            y.iter_mut().for_each(|y| *y *= gates[slot]);
                        }
                        None => y.fill(T::ZERO),
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = launch.out_ty(0).len();
        let args = GatedSwigluArgs {
            y: launch.output(0),
            h: launch.input(0),
            gates: launch.input(1),
            experts: launch.input(2),
            f: launch.out_ty(0).cols(),
            n,
            k: launch.ty(2).cols() as i32,
            count: self.experts as i32,
        };
        launch.elements("gated_swiglu", n, args)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Gradients of h and the gates of a gated SwiGLU.
    struct GatedSwigluGradArgs in "experts.cu" {
        dh: u64, dgates: u64, h: u64, gates: u64, dy: u64, experts: u64, f: usize, rows: usize, k: i32,
        count: i32,
    }
}

/// Inputs h, gates, experts, dy; outputs dh, written over h where it may, and dgates.
#[derive(Debug)]
struct GatedSwiGluGrad {
    experts: usize,
}

impl Op for GatedSwiGluGrad {
    fn name(&self) -> &'static str {
        "gated_swiglu_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].clone(), inputs[1].clone()])
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
    fn always_writes(&self, output: usize) -> bool {
        output == 0
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (experts, k, f) = (io.input::<i32>(2), io.ty(2).cols(), io.ty(3).cols());
        expert_bound(self.experts).check("expert_mixture", experts)?;
        dispatch_float!(io.dtype(), T => {
            let (gates, dy) = (io.input::<T>(1), io.input::<T>(3));
            // This op is usually the last reader of h, and can write the gradient over it.
            let dh = RowsMut::new(io.in_place::<T>(0, 0), self.experts * 2 * f);
            let dgates = io.output_if_used::<T>(1).map(|dgates| RowsMut::new(dgates, k));
            io.pool.rows(io.ty(1).rows(), 16 * self.experts * f, (dh, dgates), |first, (dh, mut dgates)| {
                for (i, dh) in dh.chunks_exact_mut(2 * f).enumerate() {
                    let row = first * self.experts + i;
                    match gate_of(row, experts, k, self.experts) {
                        Some(slot) => {
                            let dgate = gated_gradient(dh, f, &dy[row * f..][..f], gates[slot]);
                            if let Some(dgates) = &mut dgates {
                                dgates[slot - first * k] = dgate;
                            }
                        }
                        None => dh.fill(T::ZERO),
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let rows = launch.ty(3).rows();
        let args = GatedSwigluGradArgs {
            dh: launch.output(0),
            dgates: launch.output(1),
            h: launch.input(0),
            gates: launch.input(1),
            dy: launch.input(3),
            experts: launch.input(2),
            f: launch.ty(3).cols(),
            rows,
            k: launch.ty(2).cols() as i32,
            count: self.experts as i32,
        };
        launch.warps("gated_swiglu_grad", rows, args)
    }
}

simd_fn! {
    /// Gradient of h = [g, u], written over h, for y = gate silu(g) u. Returns the gradient of the gate.
    fn gated_gradient<T>(h: &mut [T], f: usize, dy: &[T], gate: T) -> T {
        let (dg, du) = h.split_at_mut(f);
        let mut dgate = T::ZERO;
        for i in 0..f {
            let (g, u, d) = (dg[i], du[i], gate * dy[i]);
            let s = g.sigmoid();
            let silu = g * s;
            dgate += dy[i] * silu * u;
            dg[i] = d * u * (s + silu * (T::ONE - s));
            du[i] = d * silu;
        }
        dgate
    }
}

fn expert_bound(limit: usize) -> IndexBound {
    IndexBound { input: 2, what: "expert", limit, ignored: None }
}

#[derive(Debug)]
struct Group {
    experts: usize,
}

impl Op for Group {
    fn name(&self) -> &'static str {
        "group_by_expert"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let ty = &inputs[0];
        if ty.dtype != DType::I32
            || ty.shape.len() != 2
            || self.experts == 0
            || self.experts > i32::MAX as usize - 1
        {
            return mismatch("group_by_expert", "experts i32[N, k], and at least one expert", ty.to_string());
        }
        let list = ty.with([ty.len()]);
        Ok(vec![list.clone(), list, ty.with([self.experts + 1])])
    }
    fn indices(&self, _: &[TensorType]) -> Vec<IndexBound> {
        vec![IndexBound { input: 0, what: "expert", limit: self.experts, ignored: None }]
    }
    fn scratch(&self, _: &[TensorType], outputs: &[TensorType], _: usize) -> usize {
        outputs.iter().map(TensorType::bytes).sum()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let experts = io.input::<i32>(0);
        IndexBound { input: 0, what: "expert", limit: self.experts, ignored: None }
            .check("group_by_expert", experts)?;
        // Counting sort. Outputs that nobody reads are computed in scratch memory.
        let scratch = io.scratch::<i32>(2 * experts.len() + self.experts + 1);
        let (order, scratch) = scratch.split_at_mut(experts.len());
        let (position, offsets) = scratch.split_at_mut(experts.len());
        offsets.fill(0);
        experts.iter().for_each(|e| offsets[*e as usize + 1] += 1);
        for e in 0..self.experts {
            offsets[e + 1] += offsets[e];
        }
        for (assignment, e) in experts.iter().enumerate() {
            // Used as cursors, and shifted back below.
            let row = offsets[*e as usize];
            offsets[*e as usize] += 1;
            order[row as usize] = assignment as i32;
            position[assignment] = row;
        }
        offsets.copy_within(0..self.experts, 1);
        offsets[0] = 0;
        for (i, data) in [&*order, &*position, &*offsets].into_iter().enumerate() {
            if let Some(output) = io.output_if_used::<i32>(i) {
                output.copy_from_slice(data);
            }
        }
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = launch.ty(0).len();
        if self.experts > 1024 {
            return mismatch("group_by_expert", "at most 1024 experts on a GPU", self.experts.to_string());
        }
        // As many threads as have room for a counter per expert.
        let threads =
            [256, 128, 64, 32].into_iter().find(|t| t * self.experts * 4 <= 160 << 10).unwrap_or(32);
        let args = args![
            launch.output(0),
            launch.output(1),
            launch.output(2),
            launch.input(0),
            self.experts as i32,
            n,
        ];
        launch.kernel("group_by_expert", [1, 1, 1], threads as u32, 4 * threads * self.experts, args)
    }
}

fn assignment_bound(input: usize, limit: usize) -> IndexBound {
    IndexBound { input, what: "assignment", limit, ignored: None }
}

/// Fails unless offsets cut the rows into consecutive groups.
fn check_offsets(offsets: &[i32], rows: usize) -> Result<()> {
    IndexBound { input: 2, what: "offset", limit: rows + 1, ignored: None }
        .check("grouped_linear", offsets)?;
    let whole = offsets.first() == Some(&0) && offsets.last() == Some(&(rows as i32));
    if whole && offsets.is_sorted() {
        return Ok(());
    }
    mismatch("grouped_linear", format!("ascending offsets from 0 to {rows}"), "others")
}

#[derive(Debug)]
struct Gather;

impl Op for Gather {
    fn name(&self) -> &'static str {
        "gather_by_expert"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let x = &inputs[0];
        want_float("gather_by_expert", "x", x)?;
        let assignments = inputs[1].len();
        want("gather_by_expert", "order", &inputs[1], DType::I32, &[assignments])?;
        want("gather_by_expert", "position", &inputs[2], DType::I32, &[assignments])?;
        if x.shape.len() != 2 || !assignments.is_multiple_of(x.shape[0]) {
            return mismatch(
                "gather_by_expert",
                format!("x [N, d] with N dividing {assignments}"),
                x.to_string(),
            );
        }
        Ok(vec![x.with([assignments, x.shape[1]])])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let tokens = b.graph.shape(b.inputs[0])?[0];
            let dx = b.graph.push1(GatherGrad { tokens }, &[dy, b.inputs[2]])?;
            b.set(0, dx);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (tokens, d) = (io.ty(0).shape[0], io.ty(0).shape[1]);
        let order = io.input::<i32>(1);
        let k = order.len() / tokens;
        assignment_bound(1, order.len()).check("gather_by_expert", order)?;
        dispatch_float!(io.dtype(), T => {
            let (x, y) = (io.input::<T>(0), io.output::<T>(0));
            io.pool.rows(order.len(), d, RowsMut::new(y, d), |first, y| {
                for (y, assignment) in y.chunks_exact_mut(d).zip(&order[first..]) {
                    y.copy_from_slice(&x[*assignment as usize / k * d..][..d]);
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (tokens, d, n) = (launch.ty(0).shape[0], launch.ty(0).shape[1], launch.out_ty(0).len());
        let k = launch.ty(1).len() / tokens;
        let args = args![launch.output(0), launch.input(0), launch.input(1), k as i32, d, n];
        launch.elements("gather_by_expert", n, args)
    }
}

/// dx[n] = Σ_s dy[sorted row of (n, s)].
#[derive(Debug)]
struct GatherGrad {
    tokens: usize,
}

impl Op for GatherGrad {
    fn name(&self) -> &'static str {
        "gather_by_expert_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].with([self.tokens, inputs[0].shape[1]])])
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let d = io.ty(0).shape[1];
        let position = io.input::<i32>(1);
        let k = position.len() / self.tokens;
        assignment_bound(1, position.len()).check("gather_by_expert", position)?;
        dispatch_float!(io.dtype(), T => {
            let (dy, dx) = (io.input::<T>(0), io.output::<T>(0));
            io.pool.rows(self.tokens, k * d, RowsMut::new(dx, d), |first, dx| {
                dx.fill(T::ZERO);
                for (n, dx) in dx.chunks_exact_mut(d).enumerate() {
                    for row in &position[(first + n) * k..][..k] {
                        crate::ops::reduce::add_rows(dx, &dy[*row as usize * d..][..d]);
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (d, n) = (launch.ty(0).shape[1], launch.out_ty(0).len());
        let k = launch.ty(1).len() / self.tokens;
        let args = args![launch.output(0), launch.input(0), launch.input(1), k as i32, d, n];
        launch.elements("gather_by_expert_grad", n, args)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Products of groups of rows, each with the weight of its expert.
    struct GroupedLinearArgs in "experts.cu" {
        y: u64, x: u64, weight: u64, offsets: u64, rows: usize, k: usize, n: usize, experts: i32,
        transpose: i32,
    }
}

/// y[r] = x[r] W[e]ᵀ (`transpose`) or x[r] W[e].
#[derive(Debug)]
struct GroupedLinear {
    transpose: bool,
}

impl Op for GroupedLinear {
    fn name(&self) -> &'static str {
        "grouped_linear"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        const OP: &str = "grouped_linear";
        let (x, w) = (&inputs[0], &inputs[1]);
        want_float(OP, "x", x)?;
        let (&[rows, width], &[experts, out, columns]) = (&x.shape[..], &w.shape[..]) else {
            return mismatch(OP, "x [R, in] and weight [E, out, in]", format!("{x} and {w}"));
        };
        let (inner, outer) = if self.transpose { (columns, out) } else { (out, columns) };
        if inner != width || w.dtype != x.dtype {
            return mismatch(
                OP,
                format!("weight {}[{experts}, out, {width}] for x {x}", x.dtype),
                w.to_string(),
            );
        }
        want(OP, "offsets", &inputs[2], DType::I32, &[experts + 1])?;
        Ok(vec![x.with([rows, outer])])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = b.grad(0) else { return Ok(()) };
        let (x, w, offsets) = (b.inputs[0], b.inputs[1], b.inputs[2]);
        if b.needs(0) {
            let dx = b.graph.push1(GroupedLinear { transpose: !self.transpose }, &[dy, w, offsets])?;
            b.set(0, dx);
        }
        if b.needs(1) {
            // dW[e] = dyᵀ x with W [out, in], xᵀ dy otherwise.
            let operands = if self.transpose { [dy, x, offsets] } else { [x, dy, offsets] };
            let dw = b.graph.push1(GroupedWeightGrad { accumulate: false }, &operands)?;
            b.set(1, dw);
        }
        Ok(())
    }
    fn scratch(&self, inputs: &[TensorType], outputs: &[TensorType], threads: usize) -> usize {
        let (m, n, k) = (inputs[0].rows(), outputs[0].cols(), inputs[0].cols());
        dispatch_float!(inputs[0].dtype, T => scratch_len::<T>(m, n, k, threads) * size_of::<T>())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (rows, k, n) = (io.ty(0).shape[0], io.ty(0).shape[1], io.out_ty(0).shape[1]);
        let offsets = io.input::<i32>(2);
        check_offsets(offsets, rows)?;
        dispatch_float!(io.dtype(), T => {
            let (x, w, y) = (io.input::<T>(0), io.input::<T>(1), io.output::<T>(0));
            let scratch = io.scratch::<T>(scratch_len::<T>(rows, n, k, io.pool.threads()));
            for (e, w) in w.chunks_exact(n * k).enumerate() {
                let group = offsets[e] as usize..offsets[e + 1] as usize;
                let product = Product {
                    m: group.len(), n, k,
                    a: Mat::rows(&x[group.start * k..], k),
                    b: if self.transpose { Mat::transposed(w, k) } else { Mat::rows(w, n) },
                    accumulate: false,
                    precision: io.precision,
                };
                gemm(io.pool, scratch, product, &mut y[group.start * n..group.end * n], n, |_| {});
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, k, n) = (launch.ty(0).shape[0], launch.ty(0).shape[1], launch.out_ty(0).shape[1]);
        let args = GroupedLinearArgs {
            y: launch.output(0),
            x: launch.input(0),
            weight: launch.input(1),
            offsets: launch.input(2),
            rows,
            k,
            n,
            experts: launch.ty(1).shape[0] as i32,
            transpose: i32::from(self.transpose),
        };
        let shared = 2 * k.min(128) * 33 * 4;
        launch.kernel("grouped_linear", [n.div_ceil(32), rows.div_ceil(32), 1], 256, shared, args)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Gradients of the experts' weights, in parts of the rows.
    struct GroupedWeightGradArgs in "experts.cu" {
        partial: u64, a: u64, b: u64, offsets: u64, rows: usize, m: usize, n: usize,
        rows_per_part: usize, experts: i32,
    }
}

/// dW[e] = a_eᵀ b_e over the rows of expert e; zero for an expert without rows.
#[derive(Debug)]
struct GroupedWeightGrad {
    accumulate: bool,
}

impl Op for GroupedWeightGrad {
    fn name(&self) -> &'static str {
        "grouped_linear_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].with([inputs[2].len() - 1, inputs[0].shape[1], inputs[1].shape[1]])])
    }
    fn accumulating(&self) -> Option<Arc<dyn Op>> {
        (!self.accumulate).then(|| Arc::new(Self { accumulate: true }) as Arc<dyn Op>)
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        if self.accumulate { vec![(3, 0)] } else { Vec::new() }
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], threads: usize) -> usize {
        let (m, n, k) = (inputs[0].cols(), inputs[1].cols(), inputs[0].rows());
        dispatch_float!(inputs[0].dtype, T => scratch_len::<T>(m, n, k, threads) * size_of::<T>())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (rows, m, n) = (io.ty(0).shape[0], io.ty(0).shape[1], io.ty(1).shape[1]);
        let offsets = io.input::<i32>(2);
        check_offsets(offsets, rows)?;
        dispatch_float!(io.dtype(), T => {
            let (a, b) = (io.input::<T>(0), io.input::<T>(1));
            let dw = if self.accumulate { io.in_place::<T>(3, 0) } else { io.output::<T>(0) };
            let scratch = io.scratch::<T>(scratch_len::<T>(m, n, rows, io.pool.threads()));
            for (e, dw) in dw.chunks_exact_mut(m * n).enumerate() {
                let group = offsets[e] as usize..offsets[e + 1] as usize;
                if group.is_empty() {
                    if !self.accumulate {
                        dw.fill(T::ZERO);
                    }
                    continue;
                }
                let product = Product {
                    m, n, k: group.len(),
                    a: Mat::transposed(&a[group.start * m..], m),
                    b: Mat::rows(&b[group.start * n..], n),
                    accumulate: self.accumulate,
                    precision: io.precision,
                };
                gemm(io.pool, scratch, product, dw, n, |_| {});
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, m, n) = (launch.ty(0).shape[0], launch.ty(0).shape[1], launch.ty(1).shape[1]);
        let experts = launch.ty(2).len() - 1;
        let each = rows.div_ceil(8).max(128);
        let parts = rows.div_ceil(each);
        let whole = experts * m * n;
        let direct = parts == 1 && !self.accumulate;
        let partial = if direct { launch.output(0) } else { launch.scratch(4 * parts * whole)? };
        let args = GroupedWeightGradArgs {
            partial,
            a: launch.input(0),
            b: launch.input(1),
            offsets: launch.input(2),
            rows,
            m,
            n,
            rows_per_part: each,
            experts: experts as i32,
        };
        let grid = [n.div_ceil(32), m.div_ceil(32), experts * parts];
        launch.kernel("grouped_weight_grad", grid, 256, 0, args)?;
        if direct {
            return Ok(());
        }
        let dw = if self.accumulate { launch.in_place(3, 0)? } else { launch.output(0) };
        crate::ops::reduce::cuda_sum_columns(launch, dw, partial, parts, whole, self.accumulate)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Sums of the experts' rows of each token, weighed by gates.
    struct CombineArgs in "experts.cu" {
        out: u64, y: u64, gates: u64, position: u64, d: usize, n: usize, k: i32,
    }
}

#[derive(Debug)]
struct Combine;

impl Op for Combine {
    fn name(&self) -> &'static str {
        "combine_experts"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        const OP: &str = "combine_experts";
        let (y, gates) = (&inputs[0], &inputs[1]);
        want_float(OP, "y", y)?;
        let agree = y.shape.len() == 2
            && gates.shape.len() == 2
            && gates.len() == y.shape[0]
            && gates.dtype == y.dtype;
        if !agree {
            return mismatch(OP, "y [N k, d] and gates [N, k]", format!("{y} and {gates}"));
        }
        want(OP, "order", &inputs[2], DType::I32, &[gates.len()])?;
        want(OP, "position", &inputs[3], DType::I32, &[gates.len()])?;
        Ok(vec![y.with([gates.shape[0], y.shape[1]])])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(grad) = b.grad(0) {
            let inputs = [grad, b.inputs[0], b.inputs[1], b.inputs[2], b.inputs[3]];
            let grads = b.graph.push(CombineGrad, &inputs)?;
            b.set(0, grads[0]);
            b.set(1, grads[1]);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (tokens, k, d) = (io.ty(1).shape[0], io.ty(1).shape[1], io.ty(0).shape[1]);
        let position = io.input::<i32>(3);
        assignment_bound(3, position.len()).check("combine_experts", position)?;
        dispatch_float!(io.dtype(), T => {
            let (y, gates) = (io.input::<T>(0), io.input::<T>(1));
            io.pool.rows(tokens, k * d, RowsMut::new(io.output::<T>(0), d), |first, out| {
                combine_rows(out, d, y, &gates[first * k..], &position[first * k..], k);
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = launch.out_ty(0).len();
        let args = CombineArgs {
            out: launch.output(0),
            y: launch.input(0),
            gates: launch.input(1),
            position: launch.input(3),
            d: launch.ty(0).shape[1],
            n,
            k: launch.ty(1).shape[1] as i32,
        };
        launch.elements("combine_experts", n, args)
    }
}

simd_fn! {
    fn combine_rows<T>(out: &mut [T], d: usize, y: &[T], gates: &[T], position: &[i32], k: usize) {
        out.fill(T::ZERO);
        for (n, out) in out.chunks_exact_mut(d).enumerate() {
            for s in n * k..(n + 1) * k {
                axpy(out, gates[s], &y[position[s] as usize * d..][..d]);
            }
        }
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Gradients of the experts' rows and the gates.
    struct CombineGradArgs in "experts.cu" {
        dy: u64, dgates: u64, dout: u64, y: u64, gates: u64, position: u64, d: usize,
        assignments: usize, k: i32,
    }
}

/// Inputs dout, y, gates, order, position; outputs dy[r] = gate dout[n] and dgates[n, s] = dout[n] . y[r].
#[derive(Debug)]
struct CombineGrad;

impl Op for CombineGrad {
    fn name(&self) -> &'static str {
        "combine_experts_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[1].clone(), inputs[2].clone()])
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (k, d) = (io.ty(2).shape[1], io.ty(0).shape[1]);
        let (order, position) = (io.input::<i32>(3), io.input::<i32>(4));
        assignment_bound(3, order.len()).check("combine_experts", order)?;
        assignment_bound(4, order.len()).check("combine_experts", position)?;
        dispatch_float!(io.dtype(), T => {
            let (dout, y, gates) = (io.input::<T>(0), io.input::<T>(1), io.input::<T>(2));
            if let Some(dy) = io.output_if_used::<T>(0) {
                io.pool.rows(order.len(), d, RowsMut::new(dy, d), |first, dy| {
                    for (dy, &assignment) in dy.chunks_exact_mut(d).zip(&order[first..]) {
                        let n = assignment as usize / k;
                        scale_row(dy, gates[assignment as usize], &dout[n * d..][..d]);
                    }
                });
            }
            if let Some(dgates) = io.output_if_used::<T>(1) {
                io.pool.rows(dgates.len(), d, RowsMut::new(dgates, 1), |first, dgates| {
                    for (i, dgate) in dgates.iter_mut().enumerate() {
                        let s = first + i;
                        *dgate = dot_row(&dout[s / k * d..][..d], &y[position[s] as usize * d..][..d]);
                    }
                });
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let assignments = launch.ty(3).len();
        let args = CombineGradArgs {
            dy: launch.output(0),
            dgates: launch.output(1),
            dout: launch.input(0),
            y: launch.input(1),
            gates: launch.input(2),
            position: launch.input(4),
            d: launch.ty(0).shape[1],
            assignments,
            k: launch.ty(2).shape[1] as i32,
        };
        launch.warps("combine_experts_grad", assignments, args)
    }
}

simd_fn! {
    fn scale_row<T>(y: &mut [T], a: T, x: &[T]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = a * *x);
    }
}

simd_fn! {
    fn dot_row<T>(x: &[T], y: &[T]) -> T {
        dot(x, y)
    }
}
