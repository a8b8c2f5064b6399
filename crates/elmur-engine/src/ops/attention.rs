//! Multi-head scaled dot-product attention for short sequences, with all options of a memory policy in one
//! op: additive per-head bias, causal or arbitrary mask, dropout, the Transformer-XL relative form, and a
//! first query position per row, so that the same op steps through a key/value cache.
//!
//! ```text
//! s_ij = [ (q_i + u) . k_j + (q_i + v) . r_(p_i - j) ] / sqrt(dh) + bias_ij      p_i = start + i
//! P    = softmax over the visible j (a row that sees nothing is all zeros)
//! y_i  = Σ_j dropout(P)_ij v_j
//! ```
//!
//! u, v and r belong to the relative form; without it the bracket is q_i . k_j. With the causal mask, key j
//! is visible to query i if j <= p_i. The backward pass reads the stored P (sequences are short) and draws
//! the dropout mask again.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::gemm::{Rows, SmallProducts, Tiles};
use crate::cpu::pool::{Rows as _, RowsMut, max_tasks};
use crate::cpu::simd::{dot, simd_fn};
#[cfg(feature = "cuda")]
use crate::cuda::args::kernel_args;
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::{Error, Result};
use crate::graph::{Graph, Value};
use crate::op::{IndexBound, Io, Op, dispatch_float, mismatch, want, want_float};
#[cfg(feature = "cuda")]
use crate::ops::dropout::DropArgs;
use crate::ops::dropout::{DropStream, Mask as DropMask, want_rng};
use crate::ops::softmax::softmax_row;
use crate::types::{DType, TensorType};

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
    /// A query sees the keys where this bool tensor [B or 1, Tq, Tk] holds.
    Custom(Value),
}

/// The Transformer-XL relative form; needs the causal mask.
#[derive(Debug, Clone, Copy)]
pub struct Relative {
    /// Content bias u, [H, dh].
    pub u: Value,
    /// Position bias v, [H, dh].
    pub v: Value,
    /// Projected position encodings r: [R, d] with row δ for distance δ, or [B, R, d], a table per batch row
    /// without gradient.
    pub r: Value,
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
    /// Position of each row's first query, i32 `[B]`, in 0..=Tk - Tq; zeros if absent. For stepping with a
    /// cache.
    pub start: Option<Value>,
    /// Dropout of the attention weights: probability and generator.
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
        if let Some(Relative { u, v, r }) = options.relative {
            extra.relative = take(u);
            take(v);
            take(r);
        }
        if let Some(bias) = options.bias {
            extra.bias = take(bias);
        }
        if let Some(start) = options.start {
            extra.start = take(start);
        }
        if let AttentionMask::Custom(mask) = options.mask {
            extra.mask = take(mask);
        }
        let mut drop = None;
        if let Some((p, rng)) = options.dropout.filter(|(p, _)| *p != 0.0) {
            extra.rng = take(rng);
            drop = Some(self.drop_stream(p)?);
        }
        let causal = matches!(options.mask, AttentionMask::Causal);
        let shape = Shape { heads: options.heads, layout, causal };
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
}

/// Positions of the optional operands; `relative` is the first of three.
#[derive(Debug, Clone, Copy, Default)]
struct Extra {
    relative: Option<usize>,
    bias: Option<usize>,
    start: Option<usize>,
    mask: Option<usize>,
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
    /// Rows of r.
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
            distances: extra.relative.map_or(0, |i| ty(i + 2).rows()),
        }
    }
}

/// Bytes of shared memory that a block may use; all recent GPUs have more.
#[cfg(feature = "cuda")]
const GPU_SHARED: usize = 96 << 10;

/// Numbers from one staged row to the next, so that rows lie in different banks of shared memory and, if
/// possible, start at multiples of 16 bytes.
#[cfg(feature = "cuda")]
fn padded(width: usize) -> usize {
    if width.is_multiple_of(4) { width + 4 } else { width + 1 }
}

/// Logarithm of the number of lanes that share one of `products` products of rows, so that all warps of a
/// block are busy.
#[cfg(feature = "cuda")]
fn log_parts(products: usize, warps: usize) -> u32 {
    (32 * warps / products.max(1)).clamp(1, 8).ilog2()
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Extents and options that both passes take.
    struct AttentionShape in "attention.cu" {
        batch: i32, heads: i32, queries: i32, keys: i32, width: i32, distances: i32, causal: i32,
        relative: i32, q_stride: i32, k_stride: i32, v_stride: i32, r_batch: i32, bias_batch: i32,
        mask_batch: i32, padded: i32, log_parts: i32,
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// What attention reads and writes.
    struct AttentionArgs in "attention.cu" {
        y: u64, weights: u64, q: u64, k: u64, v: u64, u: u64, w: u64, r: u64, bias: u64, start: u64,
        mask: u64, drop: DropArgs, scale: f32, shape: AttentionShape,
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// What the gradient of attention reads and writes.
    struct AttentionGradArgs in "attention.cu" {
        dq: u64, dk: u64, dv: u64, ds_out: u64, partial: u64, spill: u64, q: u64, k: u64, v: u64,
        u: u64, w: u64, r: u64, weights: u64, dy: u64, start: u64, drop: DropArgs, scale: f32,
        shape: AttentionShape,
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Sums over the batch of the gradients of u, w and r.
    struct AttentionTablesArgs in "attention_backward.cu" {
        du: u64, dw: u64, dr: u64, partial: u64, batch: usize, d: usize, columns: usize,
    }
}

/// Arguments for dropout, given the generator among the operands.
#[cfg(feature = "cuda")]
fn cuda_drop(launch: &Launch<'_>, extra: &Extra, drop: Option<DropStream>) -> DropArgs {
    drop.map_or(DropArgs::NONE, |drop| drop.cuda(launch.input_if(extra.rng)))
}

/// Factor of the scores: 1 / sqrt(width).
#[cfg(feature = "cuda")]
fn cuda_scale(dims: &Dims) -> f32 {
    1.0 / (dims.width as f32).sqrt()
}

#[cfg(feature = "cuda")]
impl Shape {
    fn cuda(&self, launch: &Launch<'_>, extra: &Extra, dims: &Dims, log_parts: u32) -> AttentionShape {
        let d = dims.d();
        let strides = self.layout.places().map(|(operand, _)| self.layout.widths()[operand] * d);
        // Elements from one batch row to the next of an operand that may have only one.
        let step = |input: Option<usize>| match input.map(|i| launch.ty(i)) {
            Some(ty) if ty.shape[0] == dims.batch && dims.batch > 1 => (ty.len() / dims.batch) as i32,
            _ => 0,
        };
        let table = extra.relative.map(|i| i + 2).filter(|i| launch.ty(*i).shape.len() == 3);
        AttentionShape {
            batch: dims.batch as i32,
            heads: dims.heads as i32,
            queries: dims.queries as i32,
            keys: dims.keys as i32,
            width: dims.width as i32,
            distances: self.distances(launch, extra, dims) as i32,
            causal: i32::from(self.causal),
            relative: i32::from(extra.relative.is_some()),
            q_stride: strides[0] as i32,
            k_stride: strides[1] as i32,
            v_stride: strides[2] as i32,
            r_batch: step(table),
            bias_batch: step(extra.bias),
            mask_batch: step(extra.mask),
            padded: padded(dims.width) as i32,
            log_parts: log_parts as i32,
        }
    }

    /// Rows of r that one batch row sees.
    fn distances(&self, launch: &Launch<'_>, extra: &Extra, dims: &Dims) -> usize {
        let own = extra.relative.is_some_and(|i| launch.ty(i + 2).shape.len() == 3);
        dims.distances / if own { dims.batch } else { 1 }
    }

    /// Bytes of staged rows for r, u and w.
    fn relative_rows(&self, launch: &Launch<'_>, extra: &Extra, dims: &Dims) -> usize {
        let rows = if extra.relative.is_some() { self.distances(launch, extra, dims) + 2 } else { 0 };
        4 * rows * padded(dims.width)
    }

    /// Addresses of q, k, v (or their gradients) in the operands that hold them; 0 if the operand has no
    /// memory.
    fn cuda_parts(&self, dims: &Dims, operand: impl Fn(usize) -> u64) -> [u64; 3] {
        self.layout.places().map(|(at, column)| match operand(at) {
            0 => 0,
            address => address + (4 * column * dims.d()) as u64,
        })
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
        let Shape { heads, layout, causal } = self.shape;
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
            if !causal {
                return mismatch(OP, "the causal mask with relative positions", "another mask");
            }
            want(OP, "u", &inputs[i], q.dtype, &[heads, width])?;
            want(OP, "v", &inputs[i + 1], q.dtype, &[heads, width])?;
            let farthest = if self.extra.start.is_some() { keys } else { queries };
            let r = &inputs[i + 2];
            let fits = match r.shape[..] {
                [rows, columns] => rows >= farthest && columns == d,
                [tables, rows, columns] => tables == batch && rows >= farthest && columns == d,
                _ => false,
            };
            if r.dtype != q.dtype || !fits {
                return mismatch(OP, format!("r {}[at least {farthest}, {d}]", q.dtype), r.to_string());
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
            want_rng(OP, &inputs[i])?;
        }
        Ok(vec![q.with([batch, queries, d]), q.with([batch, heads, queries, keys])])
    }
    fn indices(&self, inputs: &[TensorType]) -> Vec<IndexBound> {
        let dims = self.shape.dims(|i| &inputs[i], &self.extra);
        let bound =
            |input| IndexBound { input, what: "start", limit: dims.keys - dims.queries + 1, ignored: None };
        self.extra.start.into_iter().map(bound).collect()
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
        max_tasks(threads) * forward_scratch(&dims) * inputs[0].dtype.size()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_float!(io.dtype(), T => {
            let operands = Operands::<T>::new(io, &self.shape, &self.extra, self.drop);
            let dims = operands.dims;
            operands.check_start()?;
            let per_batch = dims.heads * dims.queries * dims.keys;
            let outputs = (
                RowsMut::new(io.output::<T>(0), dims.queries * dims.d()),
                io.output_if_used::<T>(1).map(|weights| RowsMut::new(weights, per_batch)),
            );
            let per_task = io.pool.rows_per_task(dims.batch, 4 * per_batch * dims.width);
            let each = forward_scratch(&dims);
            let scratch = RowsMut::new(io.scratch::<T>(io.pool.max_tasks() * each), each);
            io.pool.blocks(dims.batch, per_task, outputs, |first, (y, mut weights), task| {
                // SAFETY: one part per task, and there are at most `max_tasks` tasks.
                let scratch = unsafe { scratch.part(task, 1) };
                for (i, y) in y.chunks_exact_mut(dims.queries * dims.d()).enumerate() {
                    let weights = weights.as_mut().map(|w| &mut w[i * per_batch..][..per_batch]);
                    forward_row(&operands, first + i, y, weights, scratch);
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let dims = self.shape.dims(|i| launch.ty(i), &self.extra);
        let Dims { batch, queries, keys, heads, width, .. } = dims;
        let warps = queries.clamp(4, 16);
        let own = warps * keys.next_multiple_of(4) * 4;
        let rows =
            (2 * keys + queries) * padded(width) * 4 + self.shape.relative_rows(launch, &self.extra, &dims);
        let staged = own + rows <= GPU_SHARED;
        if own > GPU_SHARED {
            return mismatch("attention", "at most some 3,000 keys on a GPU", keys.to_string());
        }
        let log_parts = log_parts(warps.min(queries) * keys, warps);
        let [q, k, v] = self.shape.cuda_parts(&dims, |operand| launch.input(operand));
        let [u, w, r] = [0, 1, 2].map(|o| launch.input_if(self.extra.relative.map(|i| i + o)));
        let args = AttentionArgs {
            y: launch.output(0),
            weights: launch.output(1),
            q,
            k,
            v,
            u,
            w,
            r,
            bias: launch.input_if(self.extra.bias),
            start: launch.input_if(self.extra.start),
            mask: launch.input_if(self.extra.mask),
            drop: cuda_drop(launch, &self.extra, self.drop),
            scale: cuda_scale(&dims),
            shape: self.shape.cuda(launch, &self.extra, &dims, log_parts),
        };
        // Few batch rows and many queries: several blocks share a head's queries.
        let tiles = queries.div_ceil(warps).min((264 / (heads * batch)).max(1));
        let shared = own + if staged { rows } else { 0 };
        let kernel = if staged { "attention" } else { "attention_in_place" };
        launch.kernel(kernel, [heads, batch, tiles], 32 * warps as u32, shared, args)
    }
}

/// Scratch of one forward task: q + u, q + v, scores by distance, weights and dropped weights of one head.
fn forward_scratch(dims: &Dims) -> usize {
    (2 * dims.width + dims.keys + 2 * dims.queries * dims.keys).next_multiple_of(16)
}

/// Everything a kernel reads.
struct Operands<'a, T> {
    dims: Dims,
    causal: bool,
    /// q, k, v: data, elements per token, first column.
    parts: [(&'a [T], usize, usize); 3],
    relative: Option<[&'a [T]; 3]>,
    table_per_row: bool,
    bias: Option<&'a [T]>,
    start: Option<&'a [i32]>,
    mask: Option<&'a [bool]>,
    drop: Option<DropMask>,
    scale: T,
}

impl<'a, T: Float> Operands<'a, T> {
    fn new(io: &Io<'a>, shape: &Shape, extra: &Extra, drop: Option<DropStream>) -> Self {
        let dims = shape.dims(|i| io.ty(i), extra);
        let parts = shape.layout.places().map(|(operand, column)| {
            (io.input::<T>(operand), shape.layout.widths()[operand] * dims.d(), column * dims.d())
        });
        Self {
            dims,
            causal: shape.causal,
            parts,
            relative: extra.relative.map(|i| [io.input(i), io.input(i + 1), io.input(i + 2)]),
            table_per_row: extra.relative.is_some_and(|i| io.ty(i + 2).shape.len() == 3),
            bias: extra.bias.map(|i| io.input(i)),
            start: extra.start.map(|i| io.input(i)),
            mask: extra.mask.map(|i| io.input(i)),
            drop: drop.zip(extra.rng).map(|(drop, i)| drop.mask(io.input(i))),
            scale: T::ONE / T::of(dims.width as f64).sqrt(),
        }
    }

    /// Start positions that the program did not check because an op computed them.
    fn check_start(&self) -> Result<()> {
        let Some(start) = self.start else { return Ok(()) };
        let limit = self.dims.keys - self.dims.queries + 1;
        IndexBound { input: 0, what: "start", limit, ignored: None }.check("attention", start)
    }

    /// Head `h` of token `t` of row `b` of q (0), k (1) or v (2).
    #[inline(always)]
    fn head(&self, part: usize, b: usize, t: usize, h: usize) -> &'a [T] {
        let (data, stride, column) = self.parts[part];
        let tokens = if part == 0 { self.dims.queries } else { self.dims.keys };
        &data[(b * tokens + t) * stride + column + h * self.dims.width..][..self.dims.width]
    }

    /// Rows of head `h` of batch row `b` of q (0), k (1) or v (2), one per token.
    #[inline(always)]
    fn rows(&self, part: usize, b: usize, h: usize) -> Rows<'a, T> {
        let (data, stride, column) = self.parts[part];
        let tokens = if part == 0 { self.dims.queries } else { self.dims.keys };
        Rows { data, start: b * tokens * stride + column + h * self.dims.width, step: stride as isize }
    }

    /// Number of keys from the left that query `i` of row `b` may see.
    #[inline(always)]
    fn reach(&self, b: usize, i: usize) -> usize {
        if self.causal { (self.position(b, i) + 1).min(self.dims.keys) } else { self.dims.keys }
    }

    #[inline(always)]
    fn position(&self, b: usize, i: usize) -> usize {
        self.start.map_or(0, |start| start[b] as usize) + i
    }

    /// Where the position table of batch row `b` begins.
    #[inline(always)]
    fn table_start(&self, b: usize) -> usize {
        if self.table_per_row { b * self.dims.distances / self.dims.batch * self.dims.d() } else { 0 }
    }

    /// Row of the bias or mask for (b, h, i) where the tensor has `rows` batch rows.
    #[inline(always)]
    fn weight_row(&self, b: usize, h: usize, i: usize) -> usize {
        ((b * self.dims.heads + h) * self.dims.queries + i) * self.dims.keys
    }
}

/// One batch row: y [Tq, d] and weights [H, Tq, Tk].
fn forward_row<T: Tiles>(
    operands: &Operands<'_, T>,
    b: usize,
    y: &mut [T],
    mut weights: Option<&mut [T]>,
    scratch: &mut [T],
) {
    let Dims { queries, keys, heads, width, .. } = operands.dims;
    let d = heads * width;
    let products = SmallProducts::<T>::new();
    let (content, rest) = scratch.split_at_mut(width);
    let (distance, rest) = rest.split_at_mut(width);
    let (by_distance, rest) = rest.split_at_mut(keys);
    let (spare, rest) = rest.split_at_mut(queries * keys);
    let dropped = &mut rest[..queries * keys];
    for h in 0..heads {
        let weights = match &mut weights {
            Some(weights) => &mut weights[h * queries * keys..(h + 1) * queries * keys],
            None => &mut *spare,
        };
        for i in 0..queries {
            let q = operands.head(0, b, i, h);
            let reach = operands.reach(b, i);
            let (seen, hidden) = weights[i * keys..(i + 1) * keys].split_at_mut(reach);
            hidden.fill(T::ZERO);
            let k = operands.rows(1, b, h);
            match operands.relative {
                Some([u, v, r]) => {
                    let at = h * width..(h + 1) * width;
                    sum_into(content, q, &u[at.clone()]);
                    sum_into(distance, q, &v[at]);
                    products.dots(content, &k.data[k.start..], k.step as usize, seen);
                    // Distances run from position - reach + 1, the nearest key's, upwards: against the order
                    // of keys.
                    let nearest = operands.position(b, i) + 1 - reach;
                    let r = &r[operands.table_start(b) + nearest * d + h * width..];
                    products.dots(distance, r, d, &mut by_distance[..reach]);
                    for (s, by_distance) in seen.iter_mut().zip(by_distance[..reach].iter().rev()) {
                        *s = (*s + *by_distance) * operands.scale;
                    }
                }
                None => {
                    products.dots(q, &k.data[k.start..], k.step as usize, seen);
                    seen.iter_mut().for_each(|s| *s *= operands.scale);
                }
            }
            if let Some(bias) = operands.bias {
                // One batch row serves all where the bias has only one.
                let bias = &bias[operands.weight_row(b, h, i) % bias.len()..][..reach];
                seen.iter_mut().zip(bias).for_each(|(s, bias)| *s += *bias);
            }
            if let Some(mask) = operands.mask {
                let mask = &mask[(b * queries + i) * keys % mask.len()..][..reach];
                for (s, visible) in seen.iter_mut().zip(mask) {
                    if !visible {
                        *s = T::NEG_INFINITY;
                    }
                }
            }
            normalise(seen);
        }
        let mut used = &*weights;
        if let Some(drop) = operands.drop {
            dropped.copy_from_slice(weights);
            drop_weights(drop, operands.weight_row(b, h, 0), dropped);
            used = &*dropped;
        }
        for i in 0..queries {
            let y = &mut y[i * d + h * width..][..width];
            products.combine((&used[i * keys..], 1), operands.rows(2, b, h), operands.reach(b, i), y, false);
        }
    }
}

/// y = a + b
fn sum_into<T: Float>(y: &mut [T], a: &[T], b: &[T]) {
    y.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y = *a + *b);
}

simd_fn! {
    fn normalise<T>(x: &mut [T]) {
        softmax_row(x);
    }
}

simd_fn! {
    fn drop_weights<T>(mask: DropMask, first: usize, x: &mut [T]) {
        mask.apply(first, x);
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

/// Partial du, dv, dr, then for one head q + u and q + v of all queries, ds and dropped weights, and two rows
/// of a head.
fn gradient_scratch(dims: &Dims) -> usize {
    let partial = (2 + dims.distances) * dims.d();
    let head = 2 * dims.queries * (dims.width + dims.keys);
    (partial + head + 2 * dims.width).next_multiple_of(16)
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
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], _: usize) -> usize {
        let dims = self.shape.dims(|i| &inputs[i], &self.extra);
        let parts = dims.batch.div_ceil(rows_per_part(dims.batch));
        parts * gradient_scratch(&dims) * inputs[0].dtype.size()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let operand_count = self.shape.layout.operands();
        dispatch_float!(io.dtype(), T => {
            let operands = Operands::<T>::new(io, &self.shape, &self.extra, self.drop);
            let dims = operands.dims;
            let (weights, dy) = (io.input::<T>(io.inputs.len() - 2), io.input::<T>(io.inputs.len() - 1));
            let grads: [Option<RowsMut<'_, T>>; 3] = std::array::from_fn(|i| {
                if i >= operand_count {
                    return None;
                }
                let row = io.out_ty(i).len() / dims.batch;
                io.output_if_used::<T>(i).map(|data| RowsMut::new(data, row))
            });
            let ds = io.output_if_used::<T>(operand_count).map(|ds| RowsMut::new(ds, dims.heads * dims.queries * dims.keys));
            let per_part = rows_per_part(dims.batch);
            let parts = dims.batch.div_ceil(per_part);
            let each = gradient_scratch(&dims);
            let scratch = io.scratch::<T>(parts * each);
            let scratches = RowsMut::new(&mut *scratch, each);
            let [first_grad, second_grad, third_grad] = grads;
            let outputs = (first_grad, second_grad, third_grad, ds);
            io.pool.blocks(dims.batch, per_part, outputs, |first, (mut a, mut b, mut c, mut ds), part| {
                // SAFETY: one part per task.
                let scratch = unsafe { scratches.part(part, 1) };
                scratch[..(2 + dims.distances) * dims.d()].fill(T::ZERO);
                for row in first..dims.batch.min(first + per_part) {
                    let i = row - first;
                    let grads = [cut(&mut a, i, io, 0), cut(&mut b, i, io, 1), cut(&mut c, i, io, 2)];
                    let ds = ds.as_mut().map(|ds| {
                        let len = dims.heads * dims.queries * dims.keys;
                        &mut ds[i * len..(i + 1) * len]
                    });
                    gradient_row(&operands, self.shape.layout, row, weights, dy, grads, ds, scratch);
                }
            });
            if self.extra.relative.is_some() {
                let mut start = 0;
                for output in operand_count + 1..operand_count + 4 {
                    let len = io.out_ty(output).len();
                    if let Some(grad) = io.output_if_used::<T>(output) {
                        grad.fill(T::ZERO);
                        for part in scratch.chunks_exact(each) {
                            crate::ops::reduce::add_rows(grad, &part[start..start + len]);
                        }
                    }
                    start += len;
                }
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let dims = self.shape.dims(|i| launch.ty(i), &self.extra);
        let Dims { batch, queries, keys, heads, width, distances } = dims;
        let small = (keys + distances).next_multiple_of(4) * 4;
        let cells = (2 * queries * keys).next_multiple_of(4) * 4;
        let rows =
            2 * (keys + queries) * padded(width) * 4 + self.shape.relative_rows(launch, &self.extra, &dims);
        let spills = small + cells > GPU_SHARED;
        let spill = if spills { launch.scratch(batch * heads * 2 * queries * keys * 4)? } else { 0 };
        let base = small + if spills { 0 } else { cells };
        let staged = !spills && base + rows <= GPU_SHARED;
        let warps = queries.clamp(4, 16);
        let log_parts = log_parts(queries * keys, warps);
        let [q, k, v] = self.shape.cuda_parts(&dims, |operand| launch.input(operand));
        let [dq, dk, dv] = self.shape.cuda_parts(&dims, |operand| launch.output(operand));
        let [u, w, r] = [0, 1, 2].map(|o| launch.input_if(self.extra.relative.map(|i| i + o)));
        let operands = self.shape.layout.operands();
        let columns = (2 + distances) * dims.d();
        let wanted = self.extra.relative.is_some() && (1..4).any(|o| launch.output(operands + o) != 0);
        let partial = if wanted { launch.scratch(4 * batch * columns)? } else { 0 };
        let args = AttentionGradArgs {
            dq,
            dk,
            dv,
            ds_out: launch.output(operands),
            partial,
            spill,
            q,
            k,
            v,
            u,
            w,
            r,
            weights: launch.input(launch.inputs.len() - 2),
            dy: launch.input(launch.inputs.len() - 1),
            start: launch.input_if(self.extra.start),
            drop: cuda_drop(launch, &self.extra, self.drop),
            scale: cuda_scale(&dims),
            shape: self.shape.cuda(launch, &self.extra, &dims, log_parts),
        };
        let shared = base + if staged { rows } else { 0 };
        let kernel = if staged { "attention_grad" } else { "attention_grad_in_place" };
        launch.kernel(kernel, [heads, batch, 1], 32 * warps as u32, shared, args)?;
        launch.handoff.push(partial);
        Ok(())
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
        let operands = self.shape.layout.operands();
        let (Some(&partial), true) = (launch.handoff.first(), launch.outputs.len() > operands + 1) else {
            return Ok(());
        };
        let dims = self.shape.dims(|i| launch.ty(i), &self.extra);
        let columns = (2 + dims.distances) * dims.d();
        let [du, dw, dr] = [1, 2, 3].map(|o| launch.output(operands + o));
        let args = AttentionTablesArgs { du, dw, dr, partial, batch: dims.batch, d: dims.d(), columns };
        launch.kernel("attention_tables", [columns.div_ceil(32), 1, 1], 256, 0, args)
    }
}

/// Batch row `i` of a part of output `output`.
fn cut<'s, T>(part: &'s mut Option<&mut [T]>, i: usize, io: &Io<'_>, output: usize) -> Option<&'s mut [T]> {
    part.as_mut().map(|data| {
        let row = io.out_ty(output).len() / io.ty(0).shape[0];
        &mut data[i * row..(i + 1) * row]
    })
}

/// One batch row of every gradient; partial sums of du, dv, dr at the start of `scratch`.
#[allow(clippy::too_many_arguments)]
fn gradient_row<T: Tiles>(
    operands: &Operands<'_, T>,
    layout: Layout,
    b: usize,
    weights: &[T],
    dy: &[T],
    mut grads: [Option<&mut [T]>; 3],
    mut ds_out: Option<&mut [T]>,
    scratch: &mut [T],
) {
    let Dims { queries, keys, heads, width, distances, .. } = operands.dims;
    let d = heads * width;
    let products = SmallProducts::<T>::new();
    // (gradient, elements per token, first column) of q, k, v, as in `Operands::parts`.
    let place = layout.places().map(|(operand, column)| (operand, layout.widths()[operand] * d, column * d));
    let (du, rest) = scratch.split_at_mut(d);
    let (dv, rest) = rest.split_at_mut(d);
    let (dr, rest) = rest.split_at_mut(distances * d);
    let (content, rest) = rest.split_at_mut(queries * width);
    let (distance, rest) = rest.split_at_mut(queries * width);
    let (ds, rest) = rest.split_at_mut(queries * keys);
    let (dropped, rest) = rest.split_at_mut(queries * keys);
    let (from_content, rest) = rest.split_at_mut(width);
    let from_distance = &mut rest[..width];
    for h in 0..heads {
        let at = h * width..(h + 1) * width;
        let dy = Rows { data: dy, start: b * queries * d + at.start, step: d as isize };
        let v = operands.rows(2, b, h);
        // Factors of dropout for the whole head, to become dropped weights row by row.
        dropped.fill(T::ONE);
        if let Some(drop) = operands.drop {
            drop_weights(drop, operands.weight_row(b, h, 0), dropped);
        }
        for i in 0..queries {
            let q = operands.head(0, b, i, h);
            let reach = operands.reach(b, i);
            let p = &weights[operands.weight_row(b, h, i)..][..reach];
            let own = i * width..(i + 1) * width;
            match operands.relative {
                Some([u, v, _]) => {
                    sum_into(&mut content[own.clone()], q, &u[at.clone()]);
                    sum_into(&mut distance[own], q, &v[at.clone()]);
                }
                None => content[own].copy_from_slice(q),
            }
            let (ds, hidden) = ds[i * keys..(i + 1) * keys].split_at_mut(reach);
            let (dropped, hidden_too) = dropped[i * keys..(i + 1) * keys].split_at_mut(reach);
            hidden.fill(T::ZERO);
            hidden_too.fill(T::ZERO);
            // dP, then dS = P (dP - Σ P dP).
            let dy = &dy.data[dy.start + i * d..][..width];
            products.dots(dy, &v.data[v.start..], v.step as usize, ds);
            softmax_gradient(ds, p, dropped);
            if let Some(out) = &mut ds_out {
                let row = &mut out[(h * queries + i) * keys..][..keys];
                row[..reach].copy_from_slice(ds);
                row[reach..].fill(T::ZERO);
            }
            ds.iter_mut().for_each(|ds| *ds *= operands.scale);
            products.combine((ds, 1), operands.rows(1, b, h), reach, from_content, false);
            if let Some([_, _, r]) = operands.relative {
                // Distances fall as keys rise.
                let start = operands.table_start(b) + operands.position(b, i) * d + at.start;
                let r = Rows { data: r, start, step: -(d as isize) };
                products.combine((ds, 1), r, reach, from_distance, false);
                du[at.clone()].iter_mut().zip(&*from_content).for_each(|(x, g)| *x += *g);
                dv[at.clone()].iter_mut().zip(&*from_distance).for_each(|(x, g)| *x += *g);
                from_content.iter_mut().zip(&*from_distance).for_each(|(x, g)| *x += *g);
            }
            let (operand, stride, column) = place[0];
            if let Some(dq) = &mut grads[operand] {
                dq[i * stride + column + at.start..][..width].copy_from_slice(from_content);
            }
        }
        // Columns of dS and of the dropped weights give keys and values.
        for j in 0..keys {
            let (operand, stride, column) = place[1];
            if let Some(dk) = &mut grads[operand] {
                let dk = &mut dk[j * stride + column + at.start..][..width];
                products.combine(
                    (&ds[j..], keys),
                    Rows { data: &*content, start: 0, step: width as isize },
                    queries,
                    dk,
                    false,
                );
            }
            let (operand, stride, column) = place[2];
            if let Some(dvalue) = &mut grads[operand] {
                let dvalue = &mut dvalue[j * stride + column + at.start..][..width];
                products.combine((&dropped[j..], keys), dy, queries, dvalue, false);
            }
        }
        // Diagonals of dS give distances: query i sees distance δ at key p_i - δ.
        let start = operands.position(b, 0);
        for delta in 0..distances.min(start + queries) {
            let first = delta.saturating_sub(start);
            let key = start + first - delta;
            if key >= keys {
                continue;
            }
            let count = (queries - first).min(keys - key);
            let rows = Rows { data: &*distance, start: first * width, step: width as isize };
            let dr = &mut dr[delta * d + at.start..][..width];
            products.combine((&ds[first * keys + key..], keys + 1), rows, count, dr, true);
        }
    }
}

simd_fn! {
    /// dp = p (dp' - Σ p dp') with dp' = factor dp, and factor = factor p.
    fn softmax_gradient<T>(dp: &mut [T], p: &[T], factor: &mut [T]) {
        for i in 0..dp.len().min(p.len()).min(factor.len()) {
            dp[i] *= factor[i];
            factor[i] *= p[i];
        }
        let mean = dot(p, dp);
        dp.iter_mut().zip(p).for_each(|(dp, p)| *dp = *p * (*dp - mean));
    }
}
