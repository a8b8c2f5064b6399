//! Two-dimensional convolution for image encoders, as matrix products over patches: unfolded on a CPU, read where they
//! lie on a GPU.
//!
//! y[b, o, i, j] = f(bias[o] + Σ_{c, p, q} w[o, c, p, q] x[b, c, i s + p - pad, j s + q - pad])

use std::sync::Arc;

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::gemm::{Mat, Product, Tiles, gemm, scratch_len};
use crate::cpu::pool::{Pool, Rows, RowsMut, max_tasks};
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want, want_float};
use crate::ops::activation::Activation;
use crate::ops::reduce::add_rows;
use crate::types::TensorType;

/// Geometry of [`Graph::conv2d`].
#[derive(Debug, Clone, Copy)]
pub struct Conv2d {
    /// Step between patches, both axes.
    pub stride: usize,
    /// Zeros added on every side.
    pub padding: usize,
}

impl Graph {
    /// x [B, C, H, W], weight [O, C, h, w], bias `[O]` to [B, O, H', W'] with H' = (H + 2 padding - h) /
    /// stride + 1.
    pub fn conv2d(
        &mut self,
        x: Value,
        weight: Value,
        bias: Option<Value>,
        conv: Conv2d,
        activation: Activation,
    ) -> Result<Value> {
        let mut inputs = vec![x, weight];
        inputs.extend(bias);
        let y = self.push1(Forward { conv, bias: bias.is_some() }, &inputs)?;
        self.activation(y, activation)
    }
}

/// Extents of a convolution.
#[derive(Debug, Clone, Copy)]
struct Dims {
    batch: usize,
    channels: usize,
    image: (usize, usize),
    outputs: usize,
    kernel: (usize, usize),
    patches: (usize, usize),
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Extents of images, kernels and patches.
    struct Geometry in "conv.cu" {
        batch: i32, c: i32, h: i32, w: i32, outputs: i32, p: i32, q: i32, i: i32, j: i32, stride: i32, padding: i32,
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Arguments of the gradient of the weights.
    struct WeightGradArgs in "conv.cu" {
        partial: u64, dy: u64, images: u64, share: usize, g: Geometry,
    }
}

/// Columns of the result that a block of the GPU's kernels computes: positions, or numbers of a patch.
#[cfg(feature = "cuda")]
const COLUMNS: usize = 128;

/// Products that a block of the GPU's kernels adds up at a time.
#[cfg(feature = "cuda")]
const DEPTH: usize = 32;

/// Threads of a block.
#[cfg(feature = "cuda")]
const THREADS: u32 = 128;

/// Blocks that fill a GPU, several on each multiprocessor.
#[cfg(feature = "cuda")]
const FULL: usize = 528;

/// A kernel by the rows of the result that a block computes, and by accuracy.
#[cfg(feature = "cuda")]
struct Kernels {
    /// With 32 and 64 rows, where no patch reaches beyond its image; none if there are no such kernels.
    inside: Option<[&'static str; 2]>,
    /// With 32 and 64 rows, where patches may reach beyond their image, for up to 32 taps of a channel.
    padded: [&'static str; 2],
    /// With 32 rows, to f32 accuracy.
    exact: &'static str,
}

#[cfg(feature = "cuda")]
impl Kernels {
    const FORWARD: Self = Self {
        inside: Some(["conv2d_32", "conv2d_64"]),
        padded: ["conv2d_32_padded", "conv2d_64_padded"],
        exact: "conv2d_32_exact",
    };
    const INPUT_GRAD: Self = Self {
        inside: None,
        padded: ["conv2d_input_grad_32", "conv2d_input_grad_64"],
        exact: "conv2d_input_grad_32_exact",
    };
    const WEIGHT_GRAD: Self = Self {
        inside: Some(["conv2d_weight_grad_32", "conv2d_weight_grad_64"]),
        padded: ["conv2d_weight_grad_32_padded", "conv2d_weight_grad_64_padded"],
        exact: "conv2d_weight_grad_32_exact",
    };

    /// The kernel for a result of so many rows, from so many taps of each channel, and how many rows a block computes.
    fn choose(&self, launch: &Launch<'_>, conv: Conv2d, taps: usize, rows: usize) -> (&'static str, usize) {
        let inside = self.inside.filter(|_| conv.padding == 0);
        if launch.is_exact() || (inside.is_none() && taps > 32) {
            return (self.exact, 32);
        }
        let names = inside.unwrap_or(self.padded);
        if rows > 32 { (names[1], 64) } else { (names[0], 32) }
    }
}

/// Bytes of shared memory of kernels that compute `rows` by [`COLUMNS`] from patches: two stages of both operands.
#[cfg(feature = "cuda")]
fn gather_shared(rows: usize) -> usize {
    2 * 4 * (rows * (DEPTH + 4) + DEPTH * (COLUMNS + 8))
}

impl Dims {
    fn new(x: &TensorType, w: &TensorType, conv: Conv2d) -> Option<Self> {
        let (&[batch, channels, height, width], &[outputs, inner, h, v]) = (&x.shape[..], &w.shape[..])
        else {
            return None;
        };
        let along = |extent: usize, kernel: usize| {
            let room = conv.padding.checked_mul(2)?.checked_add(extent)?.checked_sub(kernel)?;
            Some(room.checked_div(conv.stride)? + 1)
        };
        let patches = (along(height, h)?, along(width, v)?);
        (inner == channels).then_some(Self {
            batch,
            channels,
            image: (height, width),
            outputs,
            kernel: (h, v),
            patches,
        })
    }

    /// Whether strides and extents are such as a GPU's grids and the places of numbers in its kernels allow.
    fn fit_kernels(&self, conv: Conv2d) -> bool {
        let product = |extents: &[usize]| extents.iter().try_fold(1usize, |n, extent| n.checked_mul(*extent));
        let fits = |extents: &[usize]| product(extents).is_some_and(|n| n < 1 << 31);
        let padded = |n: usize| n.saturating_add(conv.padding.saturating_mul(2));
        conv.stride <= 255
            && fits(&[self.channels, padded(self.image.0), padded(self.image.1)])
            && fits(&[self.outputs, self.patches.0, self.patches.1])
            && fits(&[self.outputs, self.channels, self.kernel.0, self.kernel.1])
    }

    #[cfg(feature = "cuda")]
    fn geometry(&self, conv: Conv2d) -> Geometry {
        Geometry {
            batch: self.batch as i32,
            c: self.channels as i32,
            h: self.image.0 as i32,
            w: self.image.1 as i32,
            outputs: self.outputs as i32,
            p: self.kernel.0 as i32,
            q: self.kernel.1 as i32,
            i: self.patches.0 as i32,
            j: self.patches.1 as i32,
            stride: conv.stride as i32,
            padding: conv.padding as i32,
        }
    }

    /// Elements of one patch.
    fn depth(&self) -> usize {
        self.channels * self.kernel.0 * self.kernel.1
    }

    /// Elements of one channel of a patch.
    #[cfg(feature = "cuda")]
    fn taps(&self) -> usize {
        self.kernel.0 * self.kernel.1
    }

    /// Patches of one image.
    fn count(&self) -> usize {
        self.patches.0 * self.patches.1
    }

    fn image_len(&self) -> usize {
        self.channels * self.image.0 * self.image.1
    }

    /// For every line of the columns [depth, count], that is for every (channel, row and column of the kernel, line
    /// of patches): calls `f(begin in the columns, pixels)`, with `None` where all of them lie outside of the image.
    #[inline(always)]
    fn for_each_line(&self, conv: Conv2d, mut f: impl FnMut(usize, Option<Line>)) {
        let (height, width) = self.image;
        let mut at = 0;
        for c in 0..self.channels {
            for p in 0..self.kernel.0 {
                for q in 0..self.kernel.1 {
                    // Patches j with 0 <= j stride + q - padding < width.
                    let first = conv.padding.saturating_sub(q).div_ceil(conv.stride).min(self.patches.1);
                    let end = (width + conv.padding).saturating_sub(q).div_ceil(conv.stride);
                    let end = end.clamp(first, self.patches.1);
                    let column = (first * conv.stride + q).saturating_sub(conv.padding);
                    let (index, phase) = (column / conv.stride, column % conv.stride);
                    for i in 0..self.patches.0 {
                        let row = (i * conv.stride + p).checked_sub(conv.padding).filter(|r| *r < height);
                        let row = row.filter(|_| first < end).map(|row| c * height + row);
                        f(at, row.map(|row| Line { row, column, index, phase, first, end }));
                        at += self.patches.1;
                    }
                }
            }
        }
    }

    /// Elements of an image whose lines of pixels are sorted by phase; none are needed for a stride of 1.
    fn phases_len(&self, conv: Conv2d) -> usize {
        let sorted = self.channels * self.image.0 * conv.stride * self.image.1.div_ceil(conv.stride.max(1));
        if conv.stride > 1 { sorted } else { 0 }
    }

    /// Unfolds an image into columns [depth, count]. Lines of pixels are first sorted by their place in a stride, once
    /// for all kernels, so that every line of patches is a copy.
    fn unfold<T: Float>(&self, conv: Conv2d, image: &[T], phases: &mut [T], columns: &mut [T]) {
        let (count, width) = (self.patches.1, self.image.1);
        let (stride, each) = (conv.stride, width.div_ceil(conv.stride));
        if stride > 1 && width > 0 {
            let lines = image.chunks_exact(width).zip(phases.chunks_exact_mut(stride * each));
            for (line, sorted) in lines {
                for (phase, to) in sorted.chunks_exact_mut(each).enumerate() {
                    let from = line.get(phase..).unwrap_or_default();
                    match stride {
                        // Strides that compilers know make vector instructions of the loop.
                        2 => take_every::<T, 2>(from, to),
                        4 => take_every::<T, 4>(from, to),
                        _ => to.iter_mut().zip(from.iter().step_by(stride)).for_each(|(to, x)| *to = *x),
                    }
                }
            }
        }
        self.for_each_line(conv, |at, line| {
            let to = &mut columns[at..at + count];
            let Some(Line { row, column, index, phase, first, end }) = line else { return to.fill(T::ZERO) };
            to[..first].fill(T::ZERO);
            to[end..].fill(T::ZERO);
            let from = match stride {
                1 => &image[row * width + column..],
                _ => &phases[(row * stride + phase) * each + index..],
            };
            copy_line(&from[..end - first], &mut to[first..end]);
        });
    }

    /// Adds columns back into an image.
    fn fold<T: Float>(&self, conv: Conv2d, columns: &[T], image: &mut [T]) {
        image.fill(T::ZERO);
        self.for_each_line(conv, |at, line| {
            let Some(Line { row, column, first, end, .. }) = line else { return };
            let from = &columns[at + first..at + end];
            let to = &mut image[row * self.image.1 + column..];
            match conv.stride {
                1 => to.iter_mut().zip(from).for_each(|(to, x)| *to += *x),
                stride => to.iter_mut().step_by(stride).zip(from).for_each(|(to, x)| *to += *x),
            }
        });
    }

    /// Elements of scratch of one task: columns of patches, lines sorted by phase, and scratch of a product.
    fn scratch<T: Tiles>(&self, conv: Conv2d, m: usize, n: usize, k: usize) -> usize {
        let unfolded = (self.depth() * self.count()).next_multiple_of(16);
        let sorted = self.phases_len(conv).next_multiple_of(16);
        unfolded + sorted + scratch_len::<T>(m, n, k, 1).next_multiple_of(16)
    }
}

/// The pixels of a line of patches at one place of the kernel, for patches `first..end`: those of the given line of
/// the image from `column` on, a stride apart. `column` is number `index` of the columns with its `phase`.
struct Line {
    row: usize,
    column: usize,
    index: usize,
    phase: usize,
    first: usize,
    end: usize,
}

/// to[j] = from[N j], as far as there is any.
#[inline(always)]
fn take_every<T: Float, const N: usize>(from: &[T], to: &mut [T]) {
    let whole = (from.len() / N).min(to.len());
    let (head, tail) = to.split_at_mut(whole);
    head.iter_mut().zip(from.as_chunks::<N>().0).for_each(|(to, x)| *to = x[0]);
    tail.iter_mut().zip(from[whole * N..].iter().step_by(N)).for_each(|(to, x)| *to = *x);
}

/// Copies a line, without the cost of a call for a short one: in pieces of eight, the last of which may overlap.
#[inline(always)]
fn copy_line<T: Float>(from: &[T], to: &mut [T]) {
    const N: usize = 8;
    let (Some(last_from), Some(last_to)) = (from.last_chunk::<N>(), to.last_chunk_mut::<N>()) else {
        return to.iter_mut().zip(from).for_each(|(to, x)| *to = *x);
    };
    *last_to = *last_from;
    to.as_chunks_mut::<N>().0.iter_mut().zip(from.as_chunks::<N>().0).for_each(|(to, x)| *to = *x);
}

#[derive(Debug)]
struct Forward {
    conv: Conv2d,
    bias: bool,
}

impl Op for Forward {
    fn name(&self) -> &'static str {
        "conv2d"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (x, w) = (&inputs[0], &inputs[1]);
        want_float("conv2d", "x", x)?;
        let dims = Dims::new(x, w, self.conv).filter(|_| x.dtype == w.dtype);
        let Some(dims) = dims else {
            let expected = format!(
                "x [B, C, H, W] and weight [O, C, h, w] no larger than the padded image, stride above 0 ({:?})",
                self.conv
            );
            return mismatch("conv2d", expected, format!("{x} and {w}"));
        };
        if !dims.fit_kernels(self.conv) {
            let expected =
                "a stride of at most 255; images, their results and weights of less than 2^31 numbers";
            return mismatch("conv2d", expected, format!("{x}, {w} and {:?}", self.conv));
        }
        if self.bias {
            want("conv2d", "bias", &inputs[2], x.dtype, &[dims.outputs])?;
        }
        Ok(vec![x.with([dims.batch, dims.outputs, dims.patches.0, dims.patches.1])])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = b.grad(0) else { return Ok(()) };
        if self.bias && b.needs(2) {
            let outputs = b.graph.shape(b.inputs[2])?[0];
            let db = b.graph.sum_to(dy, [1, outputs, 1, 1])?;
            let db = b.graph.reshape(db, [outputs])?;
            b.set(2, db);
        }
        if b.needs(0) {
            let image = b.graph.ty(b.inputs[0])?.clone();
            let dx = b.graph.push1(InputGrad { conv: self.conv, image }, &[dy, b.inputs[1]])?;
            b.set(0, dx);
        }
        if b.needs(1) {
            let weight = b.graph.ty(b.inputs[1])?.clone();
            let dw = b
                .graph
                .push1(WeightGrad { conv: self.conv, weight, accumulate: false }, &[dy, b.inputs[0]])?;
            b.set(1, dw);
        }
        Ok(())
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], threads: usize) -> usize {
        let Some(dims) = Dims::new(&inputs[0], &inputs[1], self.conv) else { return 0 };
        dispatch_float!(inputs[0].dtype, T => {
            max_tasks(threads) * dims.scratch::<T>(self.conv, dims.outputs, dims.count(), dims.depth()) * size_of::<T>()
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::new(io.ty(0), io.ty(1), self.conv) else { return Ok(()) };
        let (m, n, k) = (dims.outputs, dims.count(), dims.depth());
        dispatch_float!(io.dtype(), T => {
            let (x, w) = (io.input::<T>(0), io.input::<T>(1));
            let bias = self.bias.then(|| io.input::<T>(2));
            let output = RowsMut::new(io.output::<T>(0), m * n);
            for_each_image(io, &dims, self.conv, (m, n, k), output, |image, y, columns, phases, scratch| {
                dims.unfold(self.conv, &x[image * dims.image_len()..][..dims.image_len()], phases, columns);
                let (a, b, precision) = (Mat::rows(w, k), Mat::rows(columns, n), io.precision);
                let product = Product { m, n, k, a, b, accumulate: false, precision };
                gemm(Pool::serial(), scratch, product, y, n, |_| {});
                if let Some(bias) = bias {
                    y.chunks_exact_mut(n).zip(bias).for_each(|(y, b)| y.iter_mut().for_each(|y| *y += *b));
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::new(launch.ty(0), launch.ty(1), self.conv) else { return Ok(()) };
        let (name, rows) = Kernels::FORWARD.choose(launch, self.conv, dims.taps(), dims.outputs);
        let grid = [(dims.batch * dims.count()).div_ceil(COLUMNS), dims.outputs.div_ceil(rows), 1];
        let bias = launch.input_if(self.bias.then_some(2));
        let args = args![launch.output(0), launch.input(0), launch.input(1), bias, dims.geometry(self.conv)];
        launch.kernel(name, grid, THREADS, gather_shared(rows), args)
    }
}

/// Calls `body(image, its row of the output, columns, lines sorted by phase, product scratch)` for every image, on all
/// threads.
fn for_each_image<T: Tiles>(
    io: &Io<'_>,
    dims: &Dims,
    conv: Conv2d,
    (m, n, k): (usize, usize, usize),
    output: RowsMut<'_, T>,
    body: impl Fn(usize, &mut [T], &mut [T], &mut [T], &mut [T]) + Sync,
) {
    let each = dims.scratch::<T>(conv, m, n, k);
    let scratch = RowsMut::new(io.scratch::<T>(io.pool.max_tasks() * each), each);
    let per_task = io.pool.rows_per_task(dims.batch, m * n * k / 8);
    let columns_len = dims.depth() * dims.count();
    io.pool.blocks(dims.batch, per_task, output, |first, part, task| {
        // SAFETY: one part per task, and there are at most `max_tasks` tasks.
        let scratch = unsafe { scratch.part(task, 1) };
        let (columns, scratch) = scratch.split_at_mut(columns_len.next_multiple_of(16));
        let (phases, scratch) = scratch.split_at_mut(dims.phases_len(conv).next_multiple_of(16));
        let count = per_task.min(dims.batch - first);
        for (i, row) in part.chunks_exact_mut(part.len() / count).enumerate() {
            body(first + i, row, &mut columns[..columns_len], phases, scratch);
        }
    });
}

/// dx = fold(Wᵀ dy), from dy and W.
#[derive(Debug)]
struct InputGrad {
    conv: Conv2d,
    image: TensorType,
}

impl Op for InputGrad {
    fn name(&self) -> &'static str {
        "conv2d_input_grad"
    }
    fn infer(&self, _: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![self.image.clone()])
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], threads: usize) -> usize {
        let Some(dims) = Dims::new(&self.image, &inputs[1], self.conv) else { return 0 };
        dispatch_float!(inputs[0].dtype, T => {
            max_tasks(threads) * dims.scratch::<T>(self.conv, dims.depth(), dims.count(), dims.outputs) * size_of::<T>()
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::new(&self.image, io.ty(1), self.conv) else { return Ok(()) };
        let (m, n, k) = (dims.depth(), dims.count(), dims.outputs);
        dispatch_float!(io.dtype(), T => {
            let (dy, w) = (io.input::<T>(0), io.input::<T>(1));
            let output = RowsMut::new(io.output::<T>(0), dims.image_len());
            for_each_image(io, &dims, self.conv, (m, n, k), output, |image, dx, columns, _, scratch| {
                let dy = &dy[image * k * n..][..k * n];
                let (a, b, precision) = (Mat::transposed(w, m), Mat::rows(dy, n), io.precision);
                let product = Product { m, n, k, a, b, accumulate: false, precision };
                gemm(Pool::serial(), scratch, product, columns, n, |_| {});
                dims.fold(self.conv, columns, dx);
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::new(&self.image, launch.ty(1), self.conv) else { return Ok(()) };
        // Pixels of one phase at a time: those that are as far from the borders of patches.
        let stride = self.conv.stride;
        let taps = dims.kernel.0.div_ceil(stride) * dims.kernel.1.div_ceil(stride);
        let (name, rows) = Kernels::INPUT_GRAD.choose(launch, self.conv, taps, dims.channels);
        let pitch = (dims.outputs * taps).next_multiple_of(4);
        let (each, geometry) = (dims.channels * pitch, dims.geometry(self.conv));
        let turned = launch.scratch(4 * stride * stride * each)?;
        let args = args![turned, launch.input(1), geometry, pitch as i32];
        launch.kernel("conv2d_turn_weights", [each.div_ceil(256), stride * stride, 1], 256, 0, args)?;
        let pixels = dims.batch * dims.image.0.div_ceil(stride) * dims.image.1.div_ceil(stride);
        let grid = [pixels.div_ceil(COLUMNS), dims.channels.div_ceil(rows), stride * stride];
        let args = args![launch.output(0), launch.input(0), turned, geometry, pitch as i32];
        launch.kernel(name, grid, THREADS, gather_shared(rows), args)
    }
}

/// dW = Σ over images of dy columnsᵀ, from dy and x, in fixed groups of images.
#[derive(Debug, Clone)]
struct WeightGrad {
    conv: Conv2d,
    weight: TensorType,
    accumulate: bool,
}

/// Images of one partial sum: fixed, so that sums have the same bits for any number of threads.
fn images_per_part(batch: usize) -> usize {
    batch.div_ceil(8)
}

impl Op for WeightGrad {
    fn name(&self) -> &'static str {
        "conv2d_weight_grad"
    }
    fn infer(&self, _: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![self.weight.clone()])
    }
    fn accumulating(&self) -> Option<Arc<dyn Op>> {
        (!self.accumulate).then(|| Arc::new(Self { accumulate: true, ..self.clone() }) as Arc<dyn Op>)
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        if self.accumulate { vec![(2, 0)] } else { Vec::new() }
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], _: usize) -> usize {
        let Some(dims) = Dims::new(&inputs[1], &self.weight, self.conv) else { return 0 };
        let parts = dims.batch.div_ceil(images_per_part(dims.batch));
        dispatch_float!(inputs[0].dtype, T => {
            let each = dims.scratch::<T>(self.conv, dims.outputs, dims.depth(), dims.count());
            parts * (each + self.weight.len().next_multiple_of(16)) * size_of::<T>()
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::new(io.ty(1), &self.weight, self.conv) else { return Ok(()) };
        let (m, n, k) = (dims.outputs, dims.depth(), dims.count());
        let per_part = images_per_part(dims.batch);
        let parts = dims.batch.div_ceil(per_part);
        dispatch_float!(io.dtype(), T => {
            let (dy, x) = (io.input::<T>(0), io.input::<T>(1));
            let dw = if self.accumulate { io.in_place::<T>(2, 0) } else { io.output::<T>(0) };
            let padded = (m * n).next_multiple_of(16);
            let each = dims.scratch::<T>(self.conv, m, n, k) + padded;
            let scratch = io.scratch::<T>(parts * each);
            io.pool.blocks(parts, 1, RowsMut::new(&mut *scratch, each), |part, scratch, _| {
                let (sum, rest) = scratch.split_at_mut(padded);
                let (columns, rest) = rest.split_at_mut((n * k).next_multiple_of(16));
                let (phases, scratch) = rest.split_at_mut(dims.phases_len(self.conv).next_multiple_of(16));
                let columns = &mut columns[..n * k];
                for image in part * per_part..dims.batch.min((part + 1) * per_part) {
                    dims.unfold(self.conv, &x[image * dims.image_len()..][..dims.image_len()], phases, columns);
                    let dy = &dy[image * m * k..][..m * k];
                    let accumulate = image > part * per_part;
                    let (a, b, precision) = (Mat::rows(dy, k), Mat::transposed(columns, k), io.precision);
                    let product = Product { m, n, k, a, b, accumulate, precision };
                    gemm(Pool::serial(), scratch, product, &mut sum[..m * n], n, |_| {});
                }
            });
            if !self.accumulate {
                dw.fill(T::ZERO);
            }
            scratch.chunks_exact(each).for_each(|part| add_rows(dw, &part[..m * n]));
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::new(launch.ty(1), &self.weight, self.conv) else { return Ok(()) };
        let (name, rows) = Kernels::WEIGHT_GRAD.choose(launch, self.conv, dims.taps(), dims.outputs);
        let (patches, length) = (dims.batch * dims.count(), dims.outputs * dims.depth());
        // Patches are divided among as many blocks as fill the GPU.
        let tiles = [dims.depth().div_ceil(COLUMNS), dims.outputs.div_ceil(rows)];
        let splits = (FULL / (tiles[0] * tiles[1]).max(1)).clamp(1, patches.div_ceil(8 * DEPTH).max(1));
        let share = patches.div_ceil(splits).next_multiple_of(DEPTH);
        let splits = patches.div_ceil(share.max(1)).max(1);
        let partial = launch.scratch(4 * splits * length)?;
        let dw = if self.accumulate { launch.in_place(2, 0)? } else { launch.output(0) };
        let (dy, images) = (launch.input(0), launch.input(1));
        let args = WeightGradArgs { partial, dy, images, share, g: dims.geometry(self.conv) };
        let shared = 2 * 4 * (rows + COLUMNS) * (DEPTH + 4);
        launch.kernel(name, [tiles[0], tiles[1], splits], THREADS, shared, args)?;
        crate::ops::reduce::cuda_sum_columns(launch, dw, partial, splits, length, self.accumulate)
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    /// Shared memory is reserved here and laid out there.
    #[test]
    fn kernels_have_the_tiles_that_they_are_launched_for() {
        let source = include_str!("conv.cu");
        let warps = COLUMNS / 32;
        for line in [
            format!("constexpr int WARPS = {warps}, COLUMNS = 32 * WARPS, DEPTH = {DEPTH};"),
            "constexpr int ALONG = DEPTH + 4, ACROSS = COLUMNS + 8;".to_owned(),
        ] {
            assert!(source.contains(&line), "conv.cu has no line {line}");
        }
        assert_eq!(THREADS as usize, 32 * warps);
    }
}
