//! Attention on a GPU: sizes of blocks and shared memory, and the arguments of `attention.cu`.

use super::{Dims, Extra, Forward, Gradient, Shape};
use crate::cuda::args::kernel_args;
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::op::mismatch;
use crate::ops::dropout::{DropArgs, DropStream};

/// Bytes of shared memory that a block may use; all recent GPUs have more.
const GPU_SHARED: usize = 96 << 10;

/// Numbers from one staged row to the next, so that rows lie in different banks of shared memory and, if
/// possible, start at multiples of 16 bytes.
fn padded(width: usize) -> usize {
    if width.is_multiple_of(4) { width + 4 } else { width + 1 }
}

/// Logarithm of the number of lanes that share one of `products` products of rows, so that all warps of a
/// block are busy.
fn log_parts(products: usize, warps: usize) -> u32 {
    (32 * warps / products.max(1)).clamp(1, 8).ilog2()
}

kernel_args! {
    /// Extents and options that both passes take.
    struct AttentionShape in "../attention.cu" {
        batch: i32, heads: i32, queries: i32, keys: i32, width: i32, distances: i32, causal: i32,
        relative: i32, zero: i32, next_query: i32, q_stride: i32, k_stride: i32, v_stride: i32, r_batch: i32,
        bias_batch: i32, mask_batch: i32, range_batch: i32, rng_batch: i32, padded: i32, log_parts: i32,
    }
}

kernel_args! {
    /// What attention reads and writes.
    struct AttentionArgs in "../attention.cu" {
        y: u64, weights: u64, q: u64, k: u64, v: u64, u: u64, w: u64, r: u64, bias: u64, start: u64,
        mask: u64, ranges: u64, drop: DropArgs, scale: f32, shape: AttentionShape,
    }
}

kernel_args! {
    /// What the gradient of attention reads and writes.
    struct AttentionGradArgs in "../attention.cu" {
        dq: u64, dk: u64, dv: u64, ds_out: u64, partial: u64, spill: u64, q: u64, k: u64, v: u64,
        u: u64, w: u64, r: u64, weights: u64, dy: u64, start: u64, ranges: u64, drop: DropArgs,
        scale: f32, shape: AttentionShape,
    }
}

kernel_args! {
    /// Sums over the batch of the gradients of u, w and r.
    struct AttentionTablesArgs in "../attention_backward.cu" {
        du: u64, dw: u64, dr: u64, partial: u64, batch: usize, d: usize, columns: usize,
    }
}

/// Arguments for dropout, given the generator among the operands.
fn cuda_drop(launch: &Launch<'_>, extra: &Extra, drop: Option<DropStream>) -> DropArgs {
    drop.map_or(DropArgs::NONE, |drop| drop.cuda(launch.input_if(extra.rng)))
}

/// Factor of the scores: 1 / sqrt(width).
fn cuda_scale(dims: &Dims) -> f32 {
    1.0 / (dims.width as f32).sqrt()
}

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
            distances: dims.distances as i32,
            causal: i32::from(self.causal),
            relative: i32::from(extra.relative.is_some()),
            zero: self.zero as i32,
            next_query: i32::from(self.next_query),
            q_stride: strides[0] as i32,
            k_stride: strides[1] as i32,
            v_stride: strides[2] as i32,
            r_batch: step(table),
            bias_batch: step(extra.bias),
            mask_batch: step(extra.mask),
            range_batch: step(extra.ranges),
            rng_batch: if extra.rng.is_some_and(|i| launch.ty(i).shape.len() == 2) { 2 } else { 0 },
            padded: padded(dims.width) as i32,
            log_parts: log_parts as i32,
        }
    }

    /// Bytes of staged rows for r, u and w.
    fn relative_rows(&self, extra: &Extra, dims: &Dims) -> usize {
        let rows = if extra.relative.is_some() { dims.distances + 2 } else { 0 };
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

/// Kernels of `attention_tiles.cu`, by keys / 32 - 1, by width (16, 32, 64) and by accuracy (tf32, f32).
const TILES: [[[&str; 2]; 3]; 4] = [
    [
        ["attention_tiles_32_16", "attention_tiles_32_16_exact"],
        ["attention_tiles_32_32", "attention_tiles_32_32_exact"],
        ["attention_tiles_32_64", "attention_tiles_32_64_exact"],
    ],
    [
        ["attention_tiles_64_16", "attention_tiles_64_16_exact"],
        ["attention_tiles_64_32", "attention_tiles_64_32_exact"],
        ["attention_tiles_64_64", "attention_tiles_64_64_exact"],
    ],
    [
        ["attention_tiles_96_16", "attention_tiles_96_16_exact"],
        ["attention_tiles_96_32", "attention_tiles_96_32_exact"],
        ["attention_tiles_96_64", "attention_tiles_96_64_exact"],
    ],
    [
        ["attention_tiles_128_16", "attention_tiles_128_16_exact"],
        ["attention_tiles_128_32", "attention_tiles_128_32_exact"],
        ["attention_tiles_128_64", "attention_tiles_128_64_exact"],
    ],
];

/// The same for the gradient.
const TILES_GRAD: [[[&str; 2]; 3]; 4] = [
    [
        ["attention_tiles_grad_32_16", "attention_tiles_grad_32_16_exact"],
        ["attention_tiles_grad_32_32", "attention_tiles_grad_32_32_exact"],
        ["attention_tiles_grad_32_64", "attention_tiles_grad_32_64_exact"],
    ],
    [
        ["attention_tiles_grad_64_16", "attention_tiles_grad_64_16_exact"],
        ["attention_tiles_grad_64_32", "attention_tiles_grad_64_32_exact"],
        ["attention_tiles_grad_64_64", "attention_tiles_grad_64_64_exact"],
    ],
    [
        ["attention_tiles_grad_96_16", "attention_tiles_grad_96_16_exact"],
        ["attention_tiles_grad_96_32", "attention_tiles_grad_96_32_exact"],
        ["attention_tiles_grad_96_64", "attention_tiles_grad_96_64_exact"],
    ],
    [
        ["attention_tiles_grad_128_16", "attention_tiles_grad_128_16_exact"],
        ["attention_tiles_grad_128_32", "attention_tiles_grad_128_32_exact"],
        ["attention_tiles_grad_128_64", "attention_tiles_grad_128_64_exact"],
    ],
];

/// Kernels of `attention_long.cu` by width (16, 32, 64, 128) and by accuracy (tf32, f32).
const LONG: [[&str; 2]; 4] = [
    ["attention_long_16", "attention_long_16_exact"],
    ["attention_long_32", "attention_long_32_exact"],
    ["attention_long_64", "attention_long_64_exact"],
    ["attention_long_128", "attention_long_128_exact"],
];

/// The gradient of queries, by width and accuracy.
const LONG_GRAD: [[&str; 2]; 4] = [
    ["attention_long_grad_16", "attention_long_grad_16_exact"],
    ["attention_long_grad_32", "attention_long_grad_32_exact"],
    ["attention_long_grad_64", "attention_long_grad_64_exact"],
    ["attention_long_grad_128", "attention_long_grad_128_exact"],
];

/// The gradients of keys, values and distances, by width and accuracy.
const LONG_GRAD_KEYS: [[&str; 2]; 4] = [
    ["attention_long_grad_keys_16", "attention_long_grad_keys_16_exact"],
    ["attention_long_grad_keys_32", "attention_long_grad_keys_32_exact"],
    ["attention_long_grad_keys_64", "attention_long_grad_keys_64_exact"],
    ["attention_long_grad_keys_128", "attention_long_grad_keys_128_exact"],
];

/// The place of a head's width in tables of kernels; none for widths without kernels.
fn by_width(width: usize) -> Option<usize> {
    [16, 32, 64, 128].iter().position(|w| *w == width)
}

/// A kernel on tensor cores, and how it is launched.
struct Tiled {
    kernel: &'static str,
    threads: u32,
    shared: usize,
}

impl Shape {
    /// The kernel on tensor cores for these extents, forward or `backward`, if there is one that the GPU has
    /// memory for.
    fn tiled(&self, launch: &Launch<'_>, extra: &Extra, dims: &Dims, backward: bool) -> Option<Tiled> {
        let Dims { queries, keys, width, .. } = *dims;
        let longest = queries.max(keys);
        // Fewer queries or keys are not worth whole tiles.
        if self.next_query || queries.min(keys) < 16 || longest > 128 {
            return None;
        }
        let by_width = by_width(width)?;
        let by_keys = longest.div_ceil(32) - 1;
        let (keys, tiles) = (32 * (by_keys + 1), queries.div_ceil(16));
        let (rows, line, pairs) = (16 * tiles, width + 4, width + 8);
        let (kernels, warps, numbers) = if backward {
            let relative =
                if extra.relative.is_some() { (keys + rows) * line + 2 * tiles * width } else { 0 };
            let scores = 2 * rows * (keys + 3) + 2 * rows;
            (TILES_GRAD, 2 * tiles, keys * (pairs + line) + 2 * rows * line + scores + relative)
        } else {
            let terms = tiles * 16 * (keys + 24);
            let relative = if extra.relative.is_some() { (keys + rows) * pairs + terms } else { 0 };
            (TILES, tiles, keys * (pairs + line) + relative)
        };
        let shared = 4 * numbers;
        let kernel = kernels[by_keys].get(by_width)?[usize::from(launch.is_exact())];
        (shared <= launch.most_shared()).then_some(Tiled { kernel, threads: 32 * warps as u32, shared })
    }

    /// The kernel on tensor cores for any number of keys, forward or `backward`, for what has no tiles of its own:
    /// what does not fit shared memory as a whole (not `staged`), and wide heads.
    fn long(
        &self,
        launch: &Launch<'_>,
        extra: &Extra,
        dims: &Dims,
        staged: bool,
        backward: bool,
    ) -> Option<Tiled> {
        let Dims { queries, width, .. } = *dims;
        // A few queries are not worth a tile; where the other kernels do well, fewer than 16 are not.
        if self.next_query || queries < 8 || staged && (width < 128 || queries < 16) {
            return None;
        }
        let (by_width, is_relative) = (by_width(width)?, extra.relative.is_some());
        // As in `attention_long.cu`.
        let (keys, line, pairs) = (64, width + 4, width + 8);
        let numbers = |warps: usize| {
            if backward {
                let relative = if is_relative { (keys + 16 * warps) * line + 2 * warps * width } else { 0 };
                keys * pairs + warps * 16 * (keys + 3) + relative
            } else {
                let terms = warps * 16 * (keys + 24);
                keys * pairs + if is_relative { (keys + 16 * warps) * pairs + terms } else { 0 }
            }
        };
        let (kernels, most) = if backward { (LONG_GRAD, 8) } else { (LONG, 4) };
        let warps =
            (1..=queries.div_ceil(16).min(most)).rev().find(|w| 4 * numbers(*w) <= launch.most_shared())?;
        let kernel = kernels[by_width][usize::from(launch.is_exact())];
        Some(Tiled { kernel, threads: 32 * warps as u32, shared: 4 * numbers(warps) })
    }
}

impl Forward {
    /// Queues the kernel that computes the outputs.
    pub(super) fn launch(&self, launch: &mut Launch<'_>) -> Result<()> {
        let dims = self.shape.dims(|i| launch.ty(i), &self.extra);
        let Dims { batch, queries, keys, heads, width, .. } = dims;
        let warps = queries.clamp(4, 16);
        let own = warps * keys.next_multiple_of(4) * 4;
        let rows = (2 * keys + queries) * padded(width) * 4 + self.shape.relative_rows(&self.extra, &dims);
        let staged = own + rows <= GPU_SHARED;
        let tiled = self.shape.tiled(launch, &self.extra, &dims, false);
        let long = match &tiled {
            None => self.shape.long(launch, &self.extra, &dims, staged, false),
            Some(_) => None,
        };
        if own > GPU_SHARED && long.is_none() {
            return mismatch("attention", "at most some 3,000 keys on a GPU", keys.to_string());
        }
        let log_parts = log_parts(warps.min(queries) * keys, warps);
        let [q, k, v] = self.shape.cuda_parts(&dims, |operand| launch.input(operand));
        let [u, w, r] = [0, 1, 2].map(|o| launch.input_if(self.extra.relative.map(|i| i + o)));
        let weights = match launch.output(1) {
            // Scores pass through it.
            0 if long.is_some() => launch.scratch(4 * batch * heads * queries * keys)?,
            weights => weights,
        };
        let args = AttentionArgs {
            y: launch.output(0),
            weights,
            q,
            k,
            v,
            u,
            w,
            r,
            bias: launch.input_if(self.extra.bias),
            start: launch.input_if(self.extra.start),
            mask: launch.input_if(self.extra.mask),
            ranges: launch.input_if(self.extra.ranges),
            drop: cuda_drop(launch, &self.extra, self.drop),
            scale: cuda_scale(&dims),
            shape: self.shape.cuda(launch, &self.extra, &dims, log_parts),
        };
        if let Some(Tiled { kernel, threads, shared }) = tiled {
            return launch.kernel(kernel, [heads, batch, 1], threads, shared, args);
        }
        if let Some(Tiled { kernel, threads, shared }) = long {
            let parts = queries.div_ceil(threads as usize / 2);
            return launch.kernel(kernel, [heads, batch, parts], threads, shared, args);
        }
        // Few batch rows and many queries: several blocks share a head's queries.
        let tiles = queries.div_ceil(warps).min((264 / (heads * batch)).max(1));
        let shared = own + if staged { rows } else { 0 };
        let kernel = if staged { "attention" } else { "attention_in_place" };
        launch.kernel(kernel, [heads, batch, tiles], 32 * warps as u32, shared, args)
    }
}

impl Gradient {
    /// Queues the kernel that computes all gradients but those of [`Gradient::launch_tables`].
    pub(super) fn launch(&self, launch: &mut Launch<'_>) -> Result<()> {
        let dims = self.shape.dims(|i| launch.ty(i), &self.extra);
        let Dims { batch, queries, keys, heads, width, distances } = dims;
        let small = (keys + distances).next_multiple_of(4) * 4;
        let cells = (2 * queries * keys).next_multiple_of(4) * 4;
        let rows = 2 * (keys + queries) * padded(width) * 4 + self.shape.relative_rows(&self.extra, &dims);
        let tiled = self.shape.tiled(launch, &self.extra, &dims, true);
        let staged = small + cells + rows <= GPU_SHARED;
        let long = match &tiled {
            None => self.shape.long(launch, &self.extra, &dims, staged, true),
            Some(_) => None,
        };
        let spills = long.is_some() || tiled.is_none() && small + cells > GPU_SHARED;
        let spill = if spills { launch.scratch(batch * heads * 2 * queries * keys * 4)? } else { 0 };
        let base = small + if spills { 0 } else { cells };
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
            ranges: launch.input_if(self.extra.ranges),
            drop: cuda_drop(launch, &self.extra, self.drop),
            scale: cuda_scale(&dims),
            shape: self.shape.cuda(launch, &self.extra, &dims, log_parts),
        };
        let is_long = long.is_some();
        let Tiled { kernel, threads, shared } = tiled.or(long).unwrap_or_else(|| Tiled {
            kernel: if staged { "attention_grad" } else { "attention_grad_in_place" },
            threads: 32 * warps as u32,
            shared: base + if staged { rows } else { 0 },
        });
        launch.kernel(kernel, [heads, batch, 1], threads, shared, args)?;
        if let (true, Some(by_width)) = (is_long, by_width(width)) {
            let kernel = LONG_GRAD_KEYS[by_width][usize::from(launch.is_exact())];
            // Two tiles of 16 lines for each of eight warps.
            let tiles = 2 * keys.div_ceil(16) + if partial != 0 { distances.div_ceil(16) } else { 0 };
            launch.kernel(kernel, [heads, batch, tiles.div_ceil(16)], 256, 0, args)?;
        }
        launch.handoff.push(partial);
        Ok(())
    }

    /// Queues the sums over the batch that are the gradients of u, v and r.
    pub(super) fn launch_tables(&self, launch: &mut Launch<'_>) -> Result<()> {
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
