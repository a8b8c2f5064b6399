//! Two-dimensional convolution for image encoders, as matrix products over patches that are read where they lie; on a CPU
//! in the type of its numbers, whatever the [`Precision`](crate::Precision).
//!
//! y[b, o, i, j] = f(bias[o] + Σ_{c, p, q} w[o, c, p, q] x[b, c, i s + p - pad, j s + q - pad])

use std::sync::Arc;

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::gemm::{Gathered, Places, Tiles};
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
    fn kernel_len(&self) -> usize {
        self.kernel.0 * self.kernel.1
    }

    /// Patches of one image.
    fn count(&self) -> usize {
        self.patches.0 * self.patches.1
    }

    fn image_len(&self) -> usize {
        self.channels * self.image.0 * self.image.1
    }

    /// Where the numbers of a patch lie in an image in such a frame, counted from the patch's first, in the order of a
    /// weight's.
    fn tap_places(&self, frame: &Frame) -> Places {
        let [plane, row, column] = frame.steps();
        Places { extents: [self.channels, self.kernel.0, self.kernel.1], steps: [plane, row, column] }
    }

    /// Where patches begin in an image in such a frame.
    fn positions(&self, conv: Conv2d, frame: &Frame) -> Places {
        let [_, row, column] = frame.steps();
        let (rows, columns) = self.patches;
        Places { extents: [1, rows, columns], steps: [0, row * conv.stride, column * conv.stride] }
    }

    /// Numbers of scratch of the input's gradient: the weights of all phases, and those of each task.
    fn input_grad_scratch<T: Tiles>(&self, conv: Conv2d) -> (usize, usize) {
        let channels = Gathered::<T>::new(self.channels).padded;
        let pixels = self.most_pixels(conv);
        // With strides, the planes of a phase before they are dealt out.
        let dealt = if conv.stride == 1 { 0 } else { self.channels * pixels };
        let each = lines(self.output_frame(conv).len()) + lines(channels * pixels + dealt);
        (channels * self.outputs * self.kernel.0 * self.kernel.1, each)
    }

    /// Numbers of scratch of each part of the weight's gradient: its sum, the sum in panels, dy in panels, an image.
    fn weight_grad_scratch<T: Tiles>(&self, conv: Conv2d) -> usize {
        let outputs = Gathered::<T>::new(self.outputs).padded;
        let panels = outputs * (self.depth() + self.count());
        lines(self.outputs * self.depth()) + panels + lines(self.image_frame(conv).len())
    }

    /// The frame of images.
    fn image_frame(&self, conv: Conv2d) -> Frame {
        let padded = |n: usize| n + 2 * conv.padding;
        Frame {
            planes: self.channels,
            image: self.image,
            before: (conv.padding, conv.padding),
            size: (padded(self.image.0), padded(self.image.1)),
        }
    }

    /// The frame of an output's gradient, in which every pixel finds all patches that may hold it.
    fn output_frame(&self, conv: Conv2d) -> Frame {
        let along = |image: usize, kernel: usize, patches: usize| {
            let before = kernel.div_ceil(conv.stride) - 1;
            (before, before + patches.max((image + conv.padding).div_ceil(conv.stride)))
        };
        let rows = along(self.image.0, self.kernel.0, self.patches.0);
        let columns = along(self.image.1, self.kernel.1, self.patches.1);
        Frame {
            planes: self.outputs,
            image: self.patches,
            before: (rows.0, columns.0),
            size: (rows.1, columns.1),
        }
    }
}

/// Images with zeros around them, so that patches never reach beyond.
#[derive(Debug, Clone, Copy)]
struct Frame {
    planes: usize,
    image: (usize, usize),
    /// Lines and columns of zeros before the image.
    before: (usize, usize),
    /// Lines and columns with all zeros.
    size: (usize, usize),
}

impl Frame {
    /// Distances of planes, lines and columns.
    fn steps(&self) -> [usize; 3] {
        [self.size.0 * self.size.1, self.size.1, 1]
    }

    /// Numbers of memory that a framed image takes; none where there are no zeros and it is read as it lies.
    fn len(&self) -> usize {
        if self.size == self.image { 0 } else { self.planes * self.size.0 * self.size.1 }
    }

    /// The image in its frame, whose zeros are in `buffer` already.
    fn put<'a, T: Float>(&self, image: &'a [T], buffer: &'a mut [T]) -> &'a [T] {
        if self.len() == 0 {
            return image;
        }
        let ((rows, columns), [plane, row, _]) = (self.image, self.steps());
        let start = self.before.0 * row + self.before.1;
        for (image, buffer) in image.chunks_exact(rows * columns).zip(buffer.chunks_exact_mut(plane)) {
            for (from, to) in image.chunks_exact(columns).zip(buffer[start..].chunks_mut(row)) {
                copy_line(from, &mut to[..columns]);
            }
        }
        buffer
    }
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

/// Whole cache lines of floats.
fn lines(n: usize) -> usize {
    n.next_multiple_of(16)
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
            let outputs = Gathered::<T>::new(dims.outputs).padded;
            let each = lines(dims.image_frame(self.conv).len()) + outputs * dims.count();
            (lines(outputs * dims.depth()) + max_tasks(threads) * each) * size_of::<T>()
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::new(io.ty(0), io.ty(1), self.conv) else { return Ok(()) };
        let (depth, count) = (dims.depth(), dims.count());
        dispatch_float!(io.dtype(), T => {
            let (x, w) = (io.input::<T>(0), io.input::<T>(1));
            let bias = self.bias.then(|| io.input::<T>(2));
            let tiles = Gathered::<T>::new(dims.outputs);
            let outputs = tiles.padded;
            let frame = dims.image_frame(self.conv);
            let places = (dims.positions(self.conv, &frame), dims.tap_places(&frame));
            let packed = lines(outputs * depth);
            let (weights, scratch) = io
                .scratch::<T>(packed + io.pool.max_tasks() * (lines(frame.len()) + outputs * count))
                .split_at_mut(packed);
            let weights = &mut weights[..outputs * depth];
            tiles.pack(w, depth, (depth, dims.outputs), weights);
            let output = RowsMut::new(io.output::<T>(0), dims.outputs * count);
            let work = dims.outputs * depth * count;
            for_each_image(io.pool, dims.batch, work, &frame, scratch, output, |image, y, framed, c| {
                let x = frame.put(&x[image * dims.image_len()..][..dims.image_len()], framed);
                tiles.multiply(x, places, weights, c, false);
                tiles.unpack(c, count, y);
                if let Some(bias) = bias {
                    y.chunks_exact_mut(count).zip(bias).for_each(|(y, b)| y.iter_mut().for_each(|y| *y += *b));
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::new(launch.ty(0), launch.ty(1), self.conv) else { return Ok(()) };
        let (name, rows) = Kernels::FORWARD.choose(launch, self.conv, dims.kernel_len(), dims.outputs);
        let grid = [(dims.batch * dims.count()).div_ceil(COLUMNS), dims.outputs.div_ceil(rows), 1];
        let bias = launch.input_if(self.bias.then_some(2));
        let args = args![launch.output(0), launch.input(0), launch.input(1), bias, dims.geometry(self.conv)];
        launch.kernel(name, grid, THREADS, gather_shared(rows), args)
    }
}

/// Calls `body(image, its row of the output, memory for it in its frame, other scratch)` for every image, on all
/// threads, which divide `scratch`.
fn for_each_image<T: Float>(
    pool: &Pool,
    batch: usize,
    work: usize,
    frame: &Frame,
    scratch: &mut [T],
    output: RowsMut<'_, T>,
    body: impl Fn(usize, &mut [T], &mut [T], &mut [T]) + Sync,
) {
    let each = scratch.len() / pool.max_tasks();
    let scratch = RowsMut::new(scratch, each);
    let per_task = pool.rows_per_task(batch, work / 8);
    pool.blocks(batch, per_task, output, |first, part, task| {
        // SAFETY: one part per task, and there are at most `max_tasks` tasks.
        let scratch = unsafe { scratch.part(task, 1) };
        let (framed, scratch) = scratch.split_at_mut(lines(frame.len()));
        let framed = &mut framed[..frame.len()];
        framed.fill(T::ZERO);
        let count = per_task.min(batch - first);
        for (i, row) in part.chunks_exact_mut(part.len() / count).enumerate() {
            body(first + i, row, framed, scratch);
        }
    });
}

/// dx, from dy and W. Pixels that are as far from the borders of patches, a stride apart, lie at the same numbers of
/// patches: one convolution of dy for each such phase of pixels.
#[derive(Debug)]
struct InputGrad {
    conv: Conv2d,
    image: TensorType,
}

/// Lines or columns of a phase of pixels: pixel `stride u + number - padding` for every u in `from..end`. It lies at
/// numbers `number + stride t` of patches u - t, for t below `taps`.
#[derive(Debug, Clone, Copy)]
struct Phase {
    number: usize,
    from: usize,
    end: usize,
    taps: usize,
    /// The first line or column of dy, in its frame, that its first pixel meets.
    start: usize,
}

impl Phase {
    /// The phases of all pixels along an axis.
    fn all(conv: Conv2d, image: usize, kernel: usize) -> impl Iterator<Item = Self> + Clone {
        let Conv2d { stride, padding } = conv;
        (0..stride).map(move |number| {
            let from = padding.saturating_sub(number).div_ceil(stride);
            let end = (image + padding).saturating_sub(number).div_ceil(stride).max(from);
            let taps = kernel.saturating_sub(number).div_ceil(stride);
            Self { number, from, end, taps, start: from + kernel.div_ceil(stride) - taps }
        })
    }

    fn pixels(&self) -> usize {
        self.end - self.from
    }

    /// The first pixel.
    fn first(&self, conv: Conv2d) -> usize {
        conv.stride * self.from + self.number - conv.padding
    }

    /// The numbers of a patch that its pixels lie at, by the patches from first to last: the largest number first.
    fn numbers(&self, conv: Conv2d) -> impl Iterator<Item = usize> + Clone {
        let number = self.number;
        (0..self.taps).rev().map(move |t| number + conv.stride * t)
    }
}

impl Dims {
    /// Lines and columns of every phase of pixels.
    fn phases(&self, conv: Conv2d) -> impl Iterator<Item = (Phase, Phase)> + Clone {
        let columns = Phase::all(conv, self.image.1, self.kernel.1);
        Phase::all(conv, self.image.0, self.kernel.0)
            .flat_map(move |rows| columns.clone().map(move |columns| (rows, columns)))
    }

    /// Most pixels of a phase.
    fn most_pixels(&self, conv: Conv2d) -> usize {
        self.phases(conv).map(|(rows, columns)| rows.pixels() * columns.pixels()).max().unwrap_or(0)
    }

    /// W as right operands with channels as columns, one for each phase after the other, in panels of `nr` columns.
    fn turn_weights<T: Float>(&self, conv: Conv2d, nr: usize, w: &[T], target: &mut [T]) {
        let (channels, (h, v)) = (self.channels, self.kernel);
        target.fill(T::ZERO);
        let mut rest = target;
        for (rows, columns) in self.phases(conv) {
            let depth = self.outputs * rows.taps * columns.taps;
            let (target, after) = rest.split_at_mut(channels.next_multiple_of(nr) * depth);
            rest = after;
            let numbers = rows.numbers(conv).flat_map(|p| columns.numbers(conv).map(move |q| p * v + q));
            let sources =
                (0..self.outputs).flat_map(|o| numbers.clone().map(move |at| o * channels * h * v + at));
            for (k, source) in sources.enumerate() {
                for c in 0..channels {
                    target[(c / nr * depth + k) * nr + c % nr] = w[source + c * h * v];
                }
            }
        }
    }
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
            let (weights, each) = dims.input_grad_scratch::<T>(self.conv);
            (weights + max_tasks(threads) * each) * size_of::<T>()
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::new(&self.image, io.ty(1), self.conv) else { return Ok(()) };
        let (conv, (height, width)) = (self.conv, dims.image);
        dispatch_float!(io.dtype(), T => {
            let (dy, w) = (io.input::<T>(0), io.input::<T>(1));
            let tiles = Gathered::<T>::new(dims.channels);
            let (channels, frame) = (tiles.padded, dims.output_frame(conv));
            let [plane, row, _] = frame.steps();
            let (packed, each) = dims.input_grad_scratch::<T>(conv);
            let (weights, scratch) =
                io.scratch::<T>(packed + io.pool.max_tasks() * each).split_at_mut(packed);
            dims.turn_weights(conv, tiles.width(), w, weights);
            let output = RowsMut::new(io.output::<T>(0), dims.image_len());
            let (work, dy_len) = (dims.outputs * dims.depth() * dims.count(), dims.outputs * dims.count());
            for_each_image(io.pool, dims.batch, work, &frame, scratch, output, |image, dx, framed, scratch| {
                let dy = frame.put(&dy[image * dy_len..][..dy_len], framed);
                if dims.phases(conv).any(|(rows, columns)| rows.taps * columns.taps == 0) {
                    // Strides leave gaps between patches.
                    dx.fill(T::ZERO);
                }
                let mut weights = &weights[..];
                for (rows, columns) in dims.phases(conv) {
                    let here = (rows.pixels(), columns.pixels());
                    let (m, depth) = (here.0 * here.1, dims.outputs * rows.taps * columns.taps);
                    let (b, after) = weights.split_at(channels * depth);
                    weights = after;
                    if m == 0 || depth == 0 {
                        continue;
                    }
                    let pixels = Places { extents: [1, here.0, here.1], steps: [0, row, 1] };
                    let patches =
                        Places { extents: [dims.outputs, rows.taps, columns.taps], steps: [plane, row, 1] };
                    let (c, planes) = scratch.split_at_mut(channels * m);
                    let dy = &dy[rows.start * row + columns.start..];
                    tiles.multiply(dy, (pixels, patches), b, c, false);
                    if conv.stride == 1 {
                        tiles.unpack(c, m, dx);
                        continue;
                    }
                    let planes = &mut planes[..dims.channels * m];
                    tiles.unpack(c, m, planes);
                    let first = rows.first(conv) * width + columns.first(conv);
                    for (dx, plane) in dx.chunks_exact_mut(height * width).zip(planes.chunks_exact(m)) {
                        let dx = dx[first..].chunks_mut(conv.stride * width);
                        for (dx, line) in dx.zip(plane.chunks_exact(here.1)) {
                            dx.iter_mut().step_by(conv.stride).zip(line).for_each(|(dx, x)| *dx = *x);
                        }
                    }
                }
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

/// dW = Σ over images of dy patchesᵀ, from dy and x, in fixed groups of images.
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
        dispatch_float!(inputs[0].dtype, T => parts * dims.weight_grad_scratch::<T>(self.conv) * size_of::<T>())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::new(io.ty(1), &self.weight, self.conv) else { return Ok(()) };
        let (depth, count) = (dims.depth(), dims.count());
        let per_part = images_per_part(dims.batch);
        let parts = dims.batch.div_ceil(per_part);
        dispatch_float!(io.dtype(), T => {
            let (dy, x) = (io.input::<T>(0), io.input::<T>(1));
            let dw = if self.accumulate { io.in_place::<T>(2, 0) } else { io.output::<T>(0) };
            let tiles = Gathered::<T>::new(dims.outputs);
            let (outputs, frame) = (tiles.padded, dims.image_frame(self.conv));
            let places = (dims.tap_places(&frame), dims.positions(self.conv, &frame));
            let each = dims.weight_grad_scratch::<T>(self.conv);
            let scratch = io.scratch::<T>(parts * each);
            io.pool.blocks(parts, 1, RowsMut::new(&mut *scratch, each), |part, scratch, _| {
                let (sum, rest) = scratch.split_at_mut(lines(dw.len()));
                let (c, rest) = rest.split_at_mut(outputs * depth);
                let (turned, framed) = rest.split_at_mut(outputs * count);
                let framed = &mut framed[..frame.len()];
                framed.fill(T::ZERO);
                let images = part * per_part..dims.batch.min((part + 1) * per_part);
                for image in images.clone() {
                    let x = frame.put(&x[image * dims.image_len()..][..dims.image_len()], framed);
                    let dy = &dy[image * dims.outputs * count..][..dims.outputs * count];
                    tiles.pack(dy, count, (count, dims.outputs), turned);
                    tiles.multiply(x, places, turned, c, image > images.start);
                }
                tiles.unpack(c, depth, &mut sum[..dims.outputs * depth]);
            });
            if !self.accumulate {
                dw.fill(T::ZERO);
            }
            scratch.chunks_exact(each).for_each(|part| add_rows(dw, &part[..dw.len()]));
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::new(launch.ty(1), &self.weight, self.conv) else { return Ok(()) };
        let (name, rows) = Kernels::WEIGHT_GRAD.choose(launch, self.conv, dims.kernel_len(), dims.outputs);
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
