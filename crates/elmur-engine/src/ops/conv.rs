//! Two-dimensional convolution for small image encoders, as matrix products over unfolded patches.
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
use crate::cuda::launch::{Launch, Product as GpuProduct};
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
        c: i32, h: i32, w: i32, p: i32, q: i32, i: i32, j: i32, stride: i32, padding: i32,
    }
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

    #[cfg(feature = "cuda")]
    fn geometry(&self, conv: Conv2d) -> Geometry {
        Geometry {
            c: self.channels as i32,
            h: self.image.0 as i32,
            w: self.image.1 as i32,
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

    /// Patches of one image.
    fn count(&self) -> usize {
        self.patches.0 * self.patches.1
    }

    fn image_len(&self) -> usize {
        self.channels * self.image.0 * self.image.1
    }

    /// For every (patch, element of the patch): calls `f(index in columns [depth, count], index in the
    /// image)`, or with `None` where the patch hangs over the edge.
    #[inline(always)]
    fn for_each(&self, conv: Conv2d, mut f: impl FnMut(usize, Option<usize>)) {
        let mut at = 0;
        for c in 0..self.channels {
            for p in 0..self.kernel.0 {
                for q in 0..self.kernel.1 {
                    for i in 0..self.patches.0 {
                        let row =
                            (i * conv.stride + p).checked_sub(conv.padding).filter(|r| *r < self.image.0);
                        for j in 0..self.patches.1 {
                            let column =
                                (j * conv.stride + q).checked_sub(conv.padding).filter(|c| *c < self.image.1);
                            let inside =
                                row.zip(column).map(|(r, v)| (c * self.image.0 + r) * self.image.1 + v);
                            f(at, inside);
                            at += 1;
                        }
                    }
                }
            }
        }
    }

    /// Unfolds an image into columns [depth, count].
    fn unfold<T: Float>(&self, conv: Conv2d, image: &[T], columns: &mut [T]) {
        self.for_each(conv, |at, inside| columns[at] = inside.map_or(T::ZERO, |i| image[i]));
    }

    /// Adds columns back into an image.
    fn fold<T: Float>(&self, conv: Conv2d, columns: &[T], image: &mut [T]) {
        image.fill(T::ZERO);
        self.for_each(conv, |at, inside| {
            if let Some(i) = inside {
                image[i] += columns[at];
            }
        });
    }

    /// Elements of scratch of one task: columns of patches, and scratch of a product.
    fn scratch<T: Tiles>(&self, m: usize, n: usize, k: usize) -> usize {
        (self.depth() * self.count()).next_multiple_of(16) + scratch_len::<T>(m, n, k, 1).next_multiple_of(16)
    }
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
            max_tasks(threads) * dims.scratch::<T>(dims.outputs, dims.count(), dims.depth()) * size_of::<T>()
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::new(io.ty(0), io.ty(1), self.conv) else { return Ok(()) };
        let (m, n, k) = (dims.outputs, dims.count(), dims.depth());
        dispatch_float!(io.dtype(), T => {
            let (x, w) = (io.input::<T>(0), io.input::<T>(1));
            let bias = self.bias.then(|| io.input::<T>(2));
            for_each_image(io, &dims, (m, n, k), RowsMut::new(io.output::<T>(0), m * n), |image, y, columns, scratch| {
                dims.unfold(self.conv, &x[image * dims.image_len()..][..dims.image_len()], columns);
                let product = Product { m, n, k, a: Mat::rows(w, k), b: Mat::rows(columns, n), accumulate: false };
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
        let (m, n, k) = (dims.outputs, dims.count(), dims.depth());
        let columns = launch.scratch(4 * dims.batch * k * n)?;
        let args = args![columns, launch.input(0), dims.geometry(self.conv), dims.batch * k * n];
        launch.elements("unfold", dims.batch * k * n, args)?;
        let y = launch.output(0);
        launch.product(&GpuProduct {
            c: y,
            batch: dims.batch,
            strides: [0, k * n, m * n],
            ..GpuProduct::new(m, n, k, (launch.input(1), false), (columns, false))
        })?;
        if self.bias {
            let total = dims.batch * m * n;
            launch.elements("add_channel_bias", total, args![y, launch.input(2), n, m, total])?;
        }
        Ok(())
    }
}

/// Calls `body(image, its row of the output, columns, product scratch)` for every image, on all threads.
fn for_each_image<T: Tiles>(
    io: &Io<'_>,
    dims: &Dims,
    (m, n, k): (usize, usize, usize),
    output: RowsMut<'_, T>,
    body: impl Fn(usize, &mut [T], &mut [T], &mut [T]) + Sync,
) {
    let each = dims.scratch::<T>(m, n, k);
    let scratch = RowsMut::new(io.scratch::<T>(io.pool.max_tasks() * each), each);
    let per_task = io.pool.rows_per_task(dims.batch, m * n * k / 8);
    let columns_len = dims.depth() * dims.count();
    io.pool.blocks(dims.batch, per_task, output, |first, part, task| {
        // SAFETY: one part per task, and there are at most `max_tasks` tasks.
        let scratch = unsafe { scratch.part(task, 1) };
        let (columns, scratch) = scratch.split_at_mut(columns_len.next_multiple_of(16));
        let count = per_task.min(dims.batch - first);
        for (i, row) in part.chunks_exact_mut(part.len() / count).enumerate() {
            body(first + i, row, &mut columns[..columns_len], scratch);
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
            max_tasks(threads) * dims.scratch::<T>(dims.depth(), dims.count(), dims.outputs) * size_of::<T>()
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::new(&self.image, io.ty(1), self.conv) else { return Ok(()) };
        let (m, n, k) = (dims.depth(), dims.count(), dims.outputs);
        dispatch_float!(io.dtype(), T => {
            let (dy, w) = (io.input::<T>(0), io.input::<T>(1));
            let output = RowsMut::new(io.output::<T>(0), dims.image_len());
            for_each_image(io, &dims, (m, n, k), output, |image, dx, columns, scratch| {
                let dy = &dy[image * k * n..][..k * n];
                let product = Product { m, n, k, a: Mat::transposed(w, m), b: Mat::rows(dy, n), accumulate: false };
                gemm(Pool::serial(), scratch, product, columns, n, |_| {});
                dims.fold(self.conv, columns, dx);
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::new(&self.image, launch.ty(1), self.conv) else { return Ok(()) };
        let (m, n, k) = (dims.depth(), dims.count(), dims.outputs);
        let columns = launch.scratch(4 * dims.batch * m * n)?;
        launch.product(&GpuProduct {
            c: columns,
            batch: dims.batch,
            strides: [0, k * n, m * n],
            ..GpuProduct::new(m, n, k, (launch.input(1), true), (launch.input(0), false))
        })?;
        let total = self.image.len();
        launch.elements("fold", total, args![launch.output(0), columns, dims.geometry(self.conv), total])
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
            let each = dims.scratch::<T>(dims.outputs, dims.depth(), dims.count());
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
            let each = dims.scratch::<T>(m, n, k) + padded;
            let scratch = io.scratch::<T>(parts * each);
            io.pool.blocks(parts, 1, RowsMut::new(&mut *scratch, each), |part, scratch, _| {
                let (sum, rest) = scratch.split_at_mut(padded);
                let (columns, scratch) = rest.split_at_mut((n * k).next_multiple_of(16));
                let columns = &mut columns[..n * k];
                for image in part * per_part..dims.batch.min((part + 1) * per_part) {
                    dims.unfold(self.conv, &x[image * dims.image_len()..][..dims.image_len()], columns);
                    let dy = &dy[image * m * k..][..m * k];
                    let accumulate = image > part * per_part;
                    let product = Product { m, n, k, a: Mat::rows(dy, k), b: Mat::transposed(columns, k), accumulate };
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
        let (m, n, k) = (dims.outputs, dims.depth(), dims.count());
        let columns = launch.scratch(4 * dims.batch * n * k)?;
        let args = args![columns, launch.input(1), dims.geometry(self.conv), dims.batch * n * k];
        launch.elements("unfold", dims.batch * n * k, args)?;
        let partial = launch.scratch(4 * dims.batch * m * n)?;
        launch.product(&GpuProduct {
            c: partial,
            batch: dims.batch,
            ..GpuProduct::new(m, n, k, (launch.input(0), false), (columns, true))
        })?;
        let dw = if self.accumulate { launch.in_place(2, 0)? } else { launch.output(0) };
        crate::ops::reduce::cuda_sum_columns(launch, dw, partial, dims.batch, m * n, self.accumulate)
    }
}
