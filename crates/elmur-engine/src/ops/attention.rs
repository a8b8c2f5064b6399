//! Multi-head scaled dot-product attention for short and medium sequences, with all options of a memory policy
//! in one op: additive per-head bias, causal, ranged or arbitrary mask, dropout, the Transformer-XL relative
//! form, and a first query position per row, so that the same op steps through a key/value cache.
//!
//! ```text
//! s_ij = [ (q_i + u) . k_j + (q_i + v) . r_(p_i - j) ] / sqrt(dh) + bias_ij      p_i = start + i
//! P    = softmax over the visible j (a row that sees nothing is all zeros)
//! y_i  = Σ_j dropout(P)_ij v_j
//! ```
//!
//! u, v and r belong to the relative form; without it the bracket is q_i . k_j. With the causal mask, key j
//! is visible to query i if j <= p_i; with other masks distances may be negative. The backward pass reads the
//! stored P and draws the dropout mask again.
//!
//! On the CPU few queries or keys are computed row by row (`rows.rs`), longer sequences as matrix products
//! (`blocks.rs`).

mod blocks;
#[cfg(feature = "cuda")]
mod gpu;
mod operands;
mod rows;

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::{Rows as _, RowsMut, max_tasks};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::{Error, Result};
use crate::graph::{Graph, Value};
use crate::op::{IndexBound, Io, Kept, Op, dispatch_float, mismatch, want, want_float};
use crate::ops::dropout::{DropStream, want_rng};
use crate::types::{DType, TensorType};
use operands::Operands;

/// Queries, keys and values: each [B, T, d] with heads side by side in the last axis, or several side by side
/// in one tensor.
#[derive(Debug, Clone, Copy)]
pub enum Qkv {
    /// Three tensors.
    Separate {
        /// [B, Tq, d]
        q: Value,
        /// [B, Tk, d]
        k: Value,
        /// [B, Tk, d]
        v: Value,
    },
    /// One tensor [B, T, 3d]: q, k, v side by side.
    Packed(Value),
    /// Queries apart, keys and values side by side.
    QueryAndPacked {
        /// [B, Tq, d]
        q: Value,
        /// [B, Tk, 2d]
        kv: Value,
    },
}

/// The keys that a query sees.
#[derive(Debug, Clone, Copy, Default)]
pub enum AttentionMask {
    /// Every query sees all keys.
    #[default]
    Full,
    /// A query sees keys up to its own position.
    Causal,
    /// A query sees the keys `from..to` of this i32 tensor [B or 1, Tq, 2], each in 0..=Tk. Keys outside of the
    /// range cost nothing.
    Range(Value),
    /// A query sees the keys where this bool tensor [B or 1, Tq, Tk] holds.
    Custom(Value),
}

/// The Transformer-XL relative form.
#[derive(Debug, Clone, Copy)]
pub struct Relative {
    /// Content bias u, [H, dh].
    pub u: Value,
    /// Position bias v, [H, dh].
    pub v: Value,
    /// Projected position encodings r: [R, d] with row `zero + δ` for distance δ, or [B, R, d], a table per
    /// batch row without gradient. Keys ahead of a query have negative distances; those for which there is no
    /// row have no position term.
    pub r: Value,
    /// Row of r for distance zero.
    pub zero: usize,
    /// Take the position term of keys ahead of a query from the *next* query, (q_(i+1) + v) . r_(p_i - j), as
    /// the shift of Transformer-XL's published code does. The last query then has none for keys ahead.
    pub next_query_ahead: bool,
}

impl Relative {
    /// The form for keys that are never ahead of their query: row δ of r for distance δ.
    pub fn new(u: Value, v: Value, r: Value) -> Self {
        Self { u, v, r, zero: 0, next_query_ahead: false }
    }
}

/// Options of [`Graph::attention`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Attention {
    /// Number of heads; must divide d.
    pub heads: usize,
    /// The keys that a query sees.
    pub mask: AttentionMask,
    /// Added to the scaled scores, [B or 1, H, Tq, Tk].
    pub bias: Option<Value>,
    /// The relative form; none: plain attention.
    pub relative: Option<Relative>,
    /// Position of each row's first query, i32 `[B]`, in 0..=Tk - Tq; zeros if absent. For keys that lie in
    /// front of the queries: a cache.
    pub start: Option<Value>,
    /// Dropout of the attention weights: probability, and a generator as [`Graph::rng`] makes it or i64 [B, 2],
    /// one for every row.
    pub dropout: Option<(f64, Value)>,
}

impl Graph {
    /// Attention output [B, Tq, d] and weights before dropout [B, H, Tq, Tk]. See the formula in
    /// `ops/attention.rs`.
    pub fn attention(&mut self, qkv: Qkv, options: Attention) -> Result<(Value, Value)> {
        let (layout, mut inputs) = match qkv {
            Qkv::Separate { q, k, v } => (Layout::Separate, vec![q, k, v]),
            Qkv::Packed(qkv) => (Layout::Packed, vec![qkv]),
            Qkv::QueryAndPacked { q, kv } => (Layout::QueryAndPacked, vec![q, kv]),
        };
        let mut extra = Extra::default();
        let mut take = |value: Value| {
            inputs.push(value);
            Some(inputs.len() - 1)
        };
        let (mut zero, mut next_query) = (0, false);
        if let Some(Relative { u, v, r, zero: row, next_query_ahead }) = options.relative {
            extra.relative = take(u);
            take(v);
            take(r);
            (zero, next_query) = (row, next_query_ahead);
        }
        if let Some(bias) = options.bias {
            extra.bias = take(bias);
        }
        if let Some(start) = options.start {
            extra.start = take(start);
        }
        match options.mask {
            AttentionMask::Custom(mask) => extra.mask = take(mask),
            AttentionMask::Range(ranges) => extra.ranges = take(ranges),
            AttentionMask::Full | AttentionMask::Causal => {}
        }
        let mut drop = None;
        if let Some((p, rng)) = options.dropout.filter(|(p, _)| *p != 0.0) {
            extra.rng = take(rng);
            drop = Some(self.drop_stream(p)?);
        }
        let causal = matches!(options.mask, AttentionMask::Causal);
        let shape = Shape { heads: options.heads, layout, causal, zero, next_query };
        let outputs = self.push(Forward { shape, extra, drop }, &inputs)?;
        Ok((outputs[0], outputs[1]))
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    Separate,
    Packed,
    QueryAndPacked,
}

impl Layout {
    /// Number of operands that hold q, k, v.
    fn operands(self) -> usize {
        match self {
            Layout::Separate => 3,
            Layout::Packed => 1,
            Layout::QueryAndPacked => 2,
        }
    }

    /// For q, k, v: (operand, column of its first element in units of d).
    fn places(self) -> [(usize, usize); 3] {
        match self {
            Layout::Separate => [(0, 0), (1, 0), (2, 0)],
            Layout::Packed => [(0, 0), (0, 1), (0, 2)],
            Layout::QueryAndPacked => [(0, 0), (1, 0), (1, 1)],
        }
    }

    /// Width of each operand in units of d.
    fn widths(self) -> &'static [usize] {
        match self {
            Layout::Separate => &[1, 1, 1],
            Layout::Packed => &[3],
            Layout::QueryAndPacked => &[1, 2],
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Shape {
    heads: usize,
    layout: Layout,
    causal: bool,
    /// Row of r for distance zero.
    zero: usize,
    /// Keys ahead take their position term from the next query.
    next_query: bool,
}

/// Positions of the optional operands; `relative` is the first of three.
#[derive(Debug, Clone, Copy, Default)]
struct Extra {
    relative: Option<usize>,
    bias: Option<usize>,
    start: Option<usize>,
    mask: Option<usize>,
    ranges: Option<usize>,
    rng: Option<usize>,
}

/// Extents of one attention.
#[derive(Debug, Clone, Copy)]
struct Dims {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    /// Width of one head.
    width: usize,
    /// Rows of r, or of one of its tables.
    distances: usize,
}

impl Dims {
    fn d(&self) -> usize {
        self.heads * self.width
    }
}

impl Shape {
    fn dims<'t>(&self, ty: impl Fn(usize) -> &'t TensorType, extra: &Extra) -> Dims {
        let (q, k) = (ty(0), ty(self.layout.places()[1].0));
        let d = q.cols() / self.layout.widths()[0];
        Dims {
            batch: q.shape[0],
            queries: q.shape[1],
            keys: k.shape[1],
            heads: self.heads,
            width: d / self.heads,
            distances: extra.relative.map_or(0, |i| ty(i + 2).shape[ty(i + 2).shape.len() - 2]),
        }
    }
}

#[derive(Debug)]
struct Forward {
    shape: Shape,
    extra: Extra,
    drop: Option<DropStream>,
}

impl Op for Forward {
    fn name(&self) -> &'static str {
        "attention"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        const OP: &str = "attention";
        let Shape { heads, layout, zero, .. } = self.shape;
        let q = &inputs[0];
        want_float(OP, "q", q)?;
        let rank_3 = inputs[..layout.operands()].iter().all(|ty| ty.shape.len() == 3);
        let d = if rank_3 { q.shape[2] / layout.widths()[0] } else { 0 };
        if heads == 0 || d == 0 || d % heads != 0 || d * layout.widths()[0] != q.shape[2] {
            let expected = format!("[batch, tokens, d] operands with d a multiple of {heads} heads");
            return mismatch(OP, expected, q.to_string());
        }
        let keys = inputs[layout.places()[1].0].shape[1];
        for (ty, width) in inputs[1..layout.operands()].iter().zip(&layout.widths()[1..]) {
            want(OP, "keys and values", ty, q.dtype, &[q.shape[0], keys, width * d])?;
        }
        let (batch, queries, width) = (q.shape[0], q.shape[1], d / heads);
        if let Some(i) = self.extra.relative {
            want(OP, "u", &inputs[i], q.dtype, &[heads, width])?;
            want(OP, "v", &inputs[i + 1], q.dtype, &[heads, width])?;
            let farthest = if self.extra.start.is_some() { keys } else { queries };
            let least = zero.saturating_add(farthest);
            let r = &inputs[i + 2];
            let fits = match r.shape[..] {
                [rows, columns] => rows >= least && columns == d,
                [tables, rows, columns] => tables == batch && rows >= least && columns == d,
                _ => false,
            };
            if r.dtype != q.dtype || !fits {
                return mismatch(OP, format!("r {}[at least {least}, {d}]", q.dtype), r.to_string());
            }
        }
        if let Some(i) = self.extra.bias {
            let rows = if inputs[i].shape.first() == Some(&1) { 1 } else { batch };
            want(OP, "bias", &inputs[i], q.dtype, &[rows, heads, queries, keys])?;
        }
        if let Some(i) = self.extra.mask {
            let rows = if inputs[i].shape.first() == Some(&1) { 1 } else { batch };
            want(OP, "mask", &inputs[i], DType::Bool, &[rows, queries, keys])?;
        }
        if let Some(i) = self.extra.ranges {
            let rows = if inputs[i].shape.first() == Some(&1) { 1 } else { batch };
            want(OP, "ranges", &inputs[i], DType::I32, &[rows, queries, 2])?;
        }
        if let Some(i) = self.extra.start {
            want(OP, "start", &inputs[i], DType::I32, &[batch])?;
            if queries > keys {
                return mismatch(
                    OP,
                    format!("at least {queries} keys with start positions"),
                    keys.to_string(),
                );
            }
        }
        if let Some(i) = self.extra.rng {
            if inputs[i].shape.len() == 2 {
                want(OP, "rng", &inputs[i], DType::I64, &[batch, 2])?;
            } else {
                want_rng(OP, &inputs[i])?;
            }
        }
        Ok(vec![q.with([batch, queries, d]), q.with([batch, heads, queries, keys])])
    }
    fn indices(&self, inputs: &[TensorType]) -> Vec<IndexBound> {
        let dims = self.shape.dims(|i| &inputs[i], &self.extra);
        let bound = |what, limit| move |input| IndexBound { input, what, limit, ignored: None };
        let start = self.extra.start.map(bound("start", (dims.keys + 1).saturating_sub(dims.queries)));
        start.into_iter().chain(self.extra.ranges.map(bound("key", dims.keys + 1))).collect()
    }
    fn always_writes(&self, output: usize) -> bool {
        output == 0
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        // The weights can be read, but not differentiated.
        if let (Some(_), Some(input)) = (b.grad(1), b.first_needed()) {
            return Err(Error::NoGradient { op: "attention weights", input });
        }
        let Some(dy) = b.grad(0) else { return Ok(()) };
        if let Some(i) = self.extra.relative
            && b.graph.shape(b.inputs[i + 2])?.len() == 3
        {
            return Err(Error::NoGradient { op: "attention with a position table per row", input: i + 2 });
        }
        let operands = self.shape.layout.operands();
        let mut inputs = b.inputs.clone();
        inputs.extend([b.outputs[1], dy]);
        let op = Gradient { shape: self.shape, extra: self.extra, drop: self.drop };
        let grads = b.graph.push(op, &inputs)?;
        for (input, grad) in grads[..operands].iter().enumerate() {
            b.set(input, *grad);
        }
        if let Some(i) = self.extra.relative {
            for offset in 0..3 {
                b.set(i + offset, grads[operands + 1 + offset]);
            }
        }
        if let Some(i) = self.extra.bias
            && b.needs(i)
        {
            let shape = b.graph.shape(b.inputs[i])?.to_vec();
            let grad = b.graph.sum_to(grads[operands], shape)?;
            b.set(i, grad);
        }
        Ok(())
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], threads: usize) -> usize {
        let dims = self.shape.dims(|i| &inputs[i], &self.extra);
        let per_row = self.extra.relative.is_some_and(|i| inputs[i + 2].shape.len() == 3);
        let elements = dispatch_float!(inputs[0].dtype, T => match blocks::pays(&dims) {
            true => blocks::forward_scratch::<T>(&dims, self.shape.next_query, per_row, threads),
            false => max_tasks(threads) * rows::forward_scratch(&dims),
        });
        elements * inputs[0].dtype.size()
    }
    fn kept(&self, inputs: &[TensorType], _: &[TensorType]) -> Option<Kept> {
        let table = self.extra.relative? + 2;
        let dims = self.shape.dims(|i| &inputs[i], &self.extra);
        let per_row = inputs[table].shape.len() == 3;
        let len = dispatch_float!(inputs[0].dtype, T => blocks::tables_len::<T>(&dims, per_row));
        let bytes = len * inputs[0].dtype.size();
        (blocks::pays(&dims) && bytes > 0).then_some(Kept { input: table, bytes })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_float!(io.dtype(), T => {
            let operands = Operands::<T>::new(io, &self.shape, &self.extra, self.drop);
            operands.check_indices()?;
            let dims = operands.dims;
            let (y, weights) = (io.output::<T>(0), io.output_if_used::<T>(1));
            if blocks::pays(&dims) {
                let per_row = operands.positions.is_some_and(|positions| positions.table_per_row);
                let threads = io.pool.threads();
                let len = blocks::forward_scratch::<T>(&dims, self.shape.next_query, per_row, threads);
                let tables = blocks::tables_len::<T>(&dims, per_row);
                let tables = if tables > 0 { io.kept::<T>(tables) } else { None };
                blocks::forward(&operands, io.pool, y, weights, tables, io.scratch::<T>(len));
                return Ok(());
            }
            let per_batch = dims.heads * dims.queries * dims.keys;
            let outputs = (
                RowsMut::new(y, dims.queries * dims.d()),
                weights.map(|weights| RowsMut::new(weights, per_batch)),
            );
            let per_task = io.pool.rows_per_task(dims.batch, 4 * per_batch * dims.width);
            let each = rows::forward_scratch(&dims);
            let scratch = RowsMut::new(io.scratch::<T>(io.pool.max_tasks() * each), each);
            io.pool.blocks(dims.batch, per_task, outputs, |first, (y, mut weights), task| {
                // SAFETY: one part per task, and there are at most `max_tasks` tasks.
                let scratch = unsafe { scratch.part(task, 1) };
                for (i, y) in y.chunks_exact_mut(dims.queries * dims.d()).enumerate() {
                    let weights = weights.as_mut().map(|w| &mut w[i * per_batch..][..per_batch]);
                    rows::forward_row(&operands, first + i, y, weights, scratch);
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        self.launch(launch)
    }
}

/// Inputs: those of the forward op, then weights P and dy. Outputs: gradients of the q/k/v operands, ds
/// [B, H, Tq, Tk], and du, dv, dr where relative.
#[derive(Debug)]
struct Gradient {
    shape: Shape,
    extra: Extra,
    drop: Option<DropStream>,
}

/// Batch rows of one partial sum of du, dv, dr: depends on the batch alone, so that sums have the same bits
/// for any number of threads.
fn rows_per_part(batch: usize) -> usize {
    batch.div_ceil(16)
}

impl Gradient {
    /// Scratch elements of row-by-row kernels: per part of the batch the sums of du, dv and dr, then what one
    /// batch row needs.
    fn rows_scratch(dims: &Dims) -> (usize, usize) {
        let sums = ((2 + dims.distances) * dims.d()).next_multiple_of(16);
        (sums, sums + rows::gradient_scratch(dims))
    }
}

impl Op for Gradient {
    fn name(&self) -> &'static str {
        "attention_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let mut outputs = inputs[..self.shape.layout.operands()].to_vec();
        outputs.push(inputs[inputs.len() - 2].clone());
        if let Some(i) = self.extra.relative {
            outputs.extend_from_slice(&inputs[i..i + 3]);
        }
        Ok(outputs)
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], threads: usize) -> usize {
        let dims = self.shape.dims(|i| &inputs[i], &self.extra);
        let elements = dispatch_float!(inputs[0].dtype, T => match blocks::pays(&dims) {
            true => blocks::gradient_scratch::<T>(&dims, self.shape.next_query, threads),
            false => dims.batch.div_ceil(rows_per_part(dims.batch)) * Self::rows_scratch(&dims).1,
        });
        elements * inputs[0].dtype.size()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let layout = self.shape.layout;
        let operand_count = layout.operands();
        dispatch_float!(io.dtype(), T => {
            let operands = Operands::<T>::new(io, &self.shape, &self.extra, self.drop);
            let dims = operands.dims;
            let (weights, dy) = (io.input::<T>(io.inputs.len() - 2), io.input::<T>(io.inputs.len() - 1));
            let grads: [Option<&mut [T]>; 3] =
                std::array::from_fn(|i| if i < operand_count { io.output_if_used::<T>(i) } else { None });
            let ds = io.output_if_used::<T>(operand_count);
            let relative = self.extra.relative.is_some();
            let sums: [Option<&mut [T]>; 3] = std::array::from_fn(|i| {
                if relative { io.output_if_used::<T>(operand_count + 1 + i) } else { None }
            });
            if blocks::pays(&dims) {
                let threads = io.pool.threads();
                let len = blocks::gradient_scratch::<T>(&dims, self.shape.next_query, threads);
                let gradients = blocks::Gradients { weights, dy, grads, ds, sums };
                blocks::gradient(&operands, layout, io.pool, gradients, io.scratch::<T>(len));
                return Ok(());
            }
            let per_batch = dims.heads * dims.queries * dims.keys;
            let row = |i: usize| io.out_ty(i.min(operand_count)).len() / dims.batch;
            let each_row = [row(0), row(1), row(2)];
            let [a, b, c] = grads;
            let outputs = (
                a.map(|grad| RowsMut::new(grad, each_row[0])),
                b.map(|grad| RowsMut::new(grad, each_row[1])),
                c.map(|grad| RowsMut::new(grad, each_row[2])),
                ds.map(|ds| RowsMut::new(ds, per_batch)),
            );
            let per_part = rows_per_part(dims.batch);
            let parts = dims.batch.div_ceil(per_part);
            let (sums_len, each) = Self::rows_scratch(&dims);
            let scratch = io.scratch::<T>(parts * each);
            let scratches = RowsMut::new(&mut *scratch, each);
            io.pool.blocks(dims.batch, per_part, outputs, |first, (mut a, mut b, mut c, mut ds), part| {
                // SAFETY: one part per task.
                let (sums, scratch) = unsafe { scratches.part(part, 1) }.split_at_mut(sums_len);
                sums.fill(T::ZERO);
                for row in first..dims.batch.min(first + per_part) {
                    let i = row - first;
                    let gradients = rows::GradientRow {
                        weights,
                        dy,
                        grads: [cut(&mut a, i, each_row[0]), cut(&mut b, i, each_row[1]), cut(&mut c, i, each_row[2])],
                        ds: cut(&mut ds, i, per_batch),
                        sums: &mut *sums,
                        scratch: &mut *scratch,
                    };
                    rows::gradient_row(&operands, layout, row, gradients);
                }
            });
            let mut start = 0;
            for (grad, len) in sums.into_iter().zip([dims.d(), dims.d(), dims.distances * dims.d()]) {
                if let Some(grad) = grad {
                    grad.fill(T::ZERO);
                    for part in scratch.chunks_exact(each) {
                        crate::ops::reduce::add_rows(grad, &part[start..start + len]);
                    }
                }
                start += len;
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        self.launch(launch)
    }
    #[cfg(feature = "cuda")]
    fn deferred(&self, outputs: usize) -> std::ops::Range<usize> {
        self.shape.layout.operands() + 1..outputs
    }
    #[cfg(feature = "cuda")]
    fn deferred_reads_scratch(&self) -> bool {
        true
    }
    #[cfg(feature = "cuda")]
    fn cuda_deferred(&self, launch: &mut Launch<'_>) -> Result<()> {
        self.launch_tables(launch)
    }
}

/// Batch row `i`, of `row` elements, of a part.
fn cut<'s, T>(part: &'s mut Option<&mut [T]>, i: usize, row: usize) -> Option<&'s mut [T]> {
    part.as_mut().map(|data| &mut data[i * row..(i + 1) * row])
}
