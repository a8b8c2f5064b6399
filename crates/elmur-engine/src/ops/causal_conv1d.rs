//! A depthwise causal convolution over time with SiLU, as in Mamba, with a window that is carried from one
//! call to the next.
//!
//! ```text
//! s_t[c] = bias[c] + Σ_k weight[k, c] x_(t - w + 1 + k)[c]        w taps; the last one meets the newest x
//! y_t = s_t σ(s_t)
//! ```
//!
//! x before the first step is the carried window: the last w - 1 steps of what came before, oldest first.
//!
//! Backward, with g_t = dy_t σ(s_t) (1 + s_t (1 - σ(s_t))) and g = 0 outside of the steps:
//!
//! ```text
//! dx_t = Σ_k weight[k] g_(t + w - 1 - k);   dweight[k] = Σ_t g_t x_(t - w + 1 + k);   dbias = Σ_t g_t
//! ```
//!
//! SiLU is part of the op because it costs a pass over the data less in each direction; backward computes s
//! again. Channels lie side by side, so that all loops run over them.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::{Rows, RowsMut};
use crate::cpu::simd::{add_assign, simd_fn};
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::{Launch, THREADS};
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want, want_float};
use crate::ops::reduce::add_rows;
#[cfg(feature = "cuda")]
use crate::ops::reduce::cuda_sum_columns;
use crate::types::TensorType;

/// What [`Graph::causal_conv1d_silu`] returns.
#[derive(Debug, Clone, Copy)]
pub struct CausalConv {
    /// Convolved steps after SiLU, [batch, steps, channels].
    pub y: Value,
    /// The window that the next call carries on with: the newest taps - 1 steps of x, oldest first, [batch,
    /// taps - 1, channels].
    pub window: Value,
}

impl Graph {
    /// SiLU of a depthwise causal convolution over time.
    ///
    /// - `x` [batch, steps, channels];
    /// - `weight` [taps, channels], of which the last tap meets the newest step, and `bias` \[channels\];
    /// - `window` [batch, taps - 1, channels]: the steps before the first one, oldest first; zeros at the
    ///   start of a sequence.
    pub fn causal_conv1d_silu(
        &mut self,
        x: Value,
        weight: Value,
        bias: Value,
        window: Value,
    ) -> Result<CausalConv> {
        let outputs = self.push(Forward, &[x, weight, bias, window])?;
        Ok(CausalConv { y: outputs[0], window: outputs[1] })
    }
}

/// Extents of a convolution.
#[derive(Clone, Copy)]
struct Dims {
    batch: usize,
    steps: usize,
    channels: usize,
    taps: usize,
}

impl Dims {
    fn of(x: &TensorType, weight: &TensorType) -> Option<Self> {
        match (&x.shape[..], &weight.shape[..]) {
            (&[batch, steps, channels], &[taps, _]) if taps > 1 => {
                Some(Self { batch, steps, channels, taps })
            }
            _ => None,
        }
    }

    /// Elements of one row of x.
    fn row(&self) -> usize {
        self.steps * self.channels
    }

    /// Elements of one row of the window.
    fn window(&self) -> usize {
        (self.taps - 1) * self.channels
    }

    /// Batch rows of one partial sum: from the shape alone, so that sums have the same bits for any number of
    /// threads.
    fn rows_per_part(&self) -> usize {
        self.batch.div_ceil(32)
    }

    /// Elements of scratch of one partial sum: dweight, dbias, and s of one step.
    fn part(&self) -> usize {
        (self.taps + 2) * self.channels
    }

    /// What both directions read, of an op whose first inputs are x, weight, bias and window.
    #[cfg(feature = "cuda")]
    fn args(&self, launch: &Launch<'_>) -> ConvArgs {
        ConvArgs {
            x: launch.input(0),
            weight: launch.input(1),
            bias: launch.input(2),
            window: launch.input(3),
            batch: self.batch,
            steps: self.steps,
            channels: self.channels,
            taps: self.taps,
        }
    }
}

/// Inputs x, weight, bias, window; outputs y and the window after the last step.
#[derive(Debug)]
struct Forward;

impl Op for Forward {
    fn name(&self) -> &'static str {
        "causal_conv1d_silu"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (name, x) = (self.name(), &inputs[0]);
        want_float(name, "x", x)?;
        let Some(Dims { batch, channels, taps, .. }) = Dims::of(x, &inputs[1]) else {
            let got = format!("{x} and {}", inputs[1]);
            return mismatch(name, "x [batch, steps, channels] and weight [2 or more taps, channels]", got);
        };
        want(name, "weight", &inputs[1], x.dtype, &[taps, channels])?;
        want(name, "bias", &inputs[2], x.dtype, &[channels])?;
        want(name, "window", &inputs[3], x.dtype, &[batch, taps - 1, channels])?;
        Ok(vec![x.clone(), inputs[3].clone()])
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(3, 1)]
    }
    fn always_writes(&self, output: usize) -> bool {
        output == 0
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let dy = match b.grad(0) {
            Some(dy) => dy,
            None => b.graph.zeros_like(b.outputs[0])?,
        };
        let mut inputs = b.inputs.clone();
        inputs.push(dy);
        inputs.extend(b.grad(1));
        let grads = b.graph.push(Gradient, &inputs)?;
        for (input, grad) in grads.into_iter().enumerate() {
            b.set(input, grad);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::of(io.ty(0), io.ty(1)) else { return Ok(()) };
        dispatch_float!(io.dtype(), T => {
            let (x, weight, bias) = (io.input::<T>(0), io.input::<T>(1), io.input::<T>(2));
            // The window is shifted where it lies, or read where nobody wants the next one.
            let next = (!io.outputs[1].ptr.is_null()).then(|| RowsMut::new(io.in_place::<T>(3, 1), dims.window()));
            let outputs = (RowsMut::new(io.output::<T>(0), dims.row()), next);
            io.pool.rows(dims.batch, (dims.taps + 8) * dims.row(), outputs, |first, (y, mut next)| {
                for (i, y) in y.chunks_exact_mut(dims.row()).enumerate() {
                    let x = &x[(first + i) * dims.row()..][..dims.row()];
                    let at = |row: usize| row * dims.window()..(row + 1) * dims.window();
                    match &mut next {
                        Some(next) => {
                            let window = &mut next[at(i)];
                            forward_row(x, weight, bias, window, y);
                            shift(window, x);
                        }
                        None => forward_row(x, weight, bias, &io.input::<T>(3)[at(first + i)], y),
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::of(launch.ty(0), launch.ty(1)) else { return Ok(()) };
        let args = dims.args(launch);
        let count = dims.batch * dims.row();
        launch.elements("causal_conv1d", count, args![launch.output(0), args])?;
        if launch.output(1) != 0 {
            let count = dims.batch * dims.channels;
            launch.elements("causal_conv1d_window", count, args![launch.output(1), args])?;
        }
        Ok(())
    }
}

/// The window after the steps `x` of one row.
fn shift<T: Copy>(window: &mut [T], x: &[T]) {
    let (kept, len) = (window.len().saturating_sub(x.len()), window.len());
    window.copy_within(len - kept.., 0);
    window[kept..].copy_from_slice(&x[x.len() - (len - kept)..]);
}

/// Step `i` of the carried window and the steps x after it.
#[inline(always)]
fn step_of<'a, T>(window: &'a [T], x: &'a [T], channels: usize, i: usize) -> &'a [T] {
    let at = i * channels;
    match at.checked_sub(window.len()) {
        Some(at) => &x[at..][..channels],
        None => &window[at..][..channels],
    }
}

/// s of step `t`.
#[inline(always)]
fn convolve<T: Float>(s: &mut [T], t: usize, x: &[T], weight: &[T], bias: &[T], window: &[T]) {
    s.copy_from_slice(bias);
    for (k, weight) in weight.chunks_exact(bias.len()).enumerate() {
        let x = step_of(window, x, bias.len(), t + k);
        s.iter_mut().zip(weight).zip(x).for_each(|((s, w), x)| *s = w.mul_add(*x, *s));
    }
}

simd_fn! {
    /// y of one row, from its steps x and the window before them.
    fn forward_row<T>(x: &[T], weight: &[T], bias: &[T], window: &[T], y: &mut [T]) {
        for (t, y) in y.chunks_exact_mut(bias.len()).enumerate() {
            convolve(y, t, x, weight, bias, window);
            y.iter_mut().for_each(|y| *y *= y.sigmoid());
        }
    }
}

/// Inputs x, weight, bias, window, dy, and the gradient of the next window where there is one. Outputs dx,
/// written over dy where it may, dweight, dbias, dwindow.
#[derive(Debug)]
struct Gradient;

impl Op for Gradient {
    fn name(&self) -> &'static str {
        "causal_conv1d_silu_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(inputs[..4].to_vec())
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(4, 0)]
    }
    fn always_writes(&self, output: usize) -> bool {
        output == 0
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], _: usize) -> usize {
        let Some(dims) = Dims::of(&inputs[0], &inputs[1]) else { return 0 };
        dims.batch.div_ceil(dims.rows_per_part()) * dims.part() * inputs[0].dtype.size()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::of(io.ty(0), io.ty(1)) else { return Ok(()) };
        let Dims { batch, channels, taps, .. } = dims;
        let per_part = dims.rows_per_part();
        dispatch_float!(io.dtype(), T => {
            let (x, weight, bias, window) =
                (io.input::<T>(0), io.input::<T>(1), io.input::<T>(2), io.input::<T>(3));
            let dnext = (io.inputs.len() > 5).then(|| io.input::<T>(5));
            let partial = io.scratch::<T>(batch.div_ceil(per_part) * dims.part());
            let partials = RowsMut::new(&mut *partial, dims.part());
            let dwindow = io.output_if_used::<T>(3).map(|dwindow| RowsMut::new(dwindow, dims.window()));
            // dy, which dx takes the place of.
            let outputs = (RowsMut::new(io.in_place::<T>(4, 0), dims.row()), dwindow);
            io.pool.blocks(batch, per_part, outputs, |first, (dx, mut dwindow), part| {
                // SAFETY: one part per task.
                let sums = unsafe { partials.part(part, 1) };
                sums.fill(T::ZERO);
                for (i, dx) in dx.chunks_exact_mut(dims.row()).enumerate() {
                    let at = |row: usize| row * dims.window()..(row + 1) * dims.window();
                    let x = &x[(first + i) * dims.row()..][..dims.row()];
                    let window = &window[at(first + i)];
                    backward_row(x, weight, bias, window, dx, sums);
                    let dwindow = dwindow.as_mut().map(|dwindow| &mut dwindow[at(i)]);
                    let dnext = dnext.map(|dnext| &dnext[at(first + i)]);
                    spread_row(weight, channels, dnext, dx, dwindow);
                }
            });
            let (dweight, dbias) = (io.output_if_used::<T>(1), io.output_if_used::<T>(2));
            for (grad, start) in [(dweight, 0), (dbias, taps * channels)] {
                if let Some(grad) = grad {
                    grad.fill(T::ZERO);
                    partial.chunks_exact(dims.part()).for_each(|p| add_rows(grad, &p[start..][..grad.len()]));
                }
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::of(launch.ty(0), launch.ty(1)) else { return Ok(()) };
        let Dims { batch, steps, channels, taps } = dims;
        let count = batch * dims.row();
        let args = dims.args(launch);
        let g = launch.scratch(4 * count)?;
        launch.elements("causal_conv1d_backward", count, args![g, launch.input(4), args])?;
        let spread = ConvSpread {
            dx: launch.output(0),
            dwindow: launch.output(3),
            g,
            dnext: launch.input_if((launch.inputs.len() > 5).then_some(5)),
            weight: launch.input(1),
            batch,
            steps,
            channels,
            taps,
        };
        launch.elements("causal_conv1d_spread", batch * (dims.row() + dims.window()), spread)?;
        // Sums over rows and steps, of dweight and dbias one after the other.
        let rows = batch * steps;
        let each = rows.div_ceil(64).max(64);
        let (parts, sums) = (rows.div_ceil(each), (taps + 1) * channels);
        let partial = launch.scratch(4 * parts * sums)?;
        let grid = [channels.div_ceil(32), taps + 1, parts];
        launch.kernel("causal_conv1d_sums", grid, THREADS, 0, args![partial, g, args, each])?;
        let (dweight, dbias) = (launch.output(1), launch.output(2));
        let total = launch.scratch(4 * sums)?;
        cuda_sum_columns(launch, total, partial, parts, sums, false)?;
        if dweight != 0 {
            launch.copy(dweight, total, 4 * taps * channels)?;
        }
        if dbias != 0 {
            launch.copy(dbias, total + 4 * (taps * channels) as u64, 4 * channels)?;
        }
        Ok(())
    }
}

simd_fn! {
    /// dy of one row becomes g; its share of dweight and dbias is added to the sums, which end with room for
    /// one step.
    fn backward_row<T>(x: &[T], weight: &[T], bias: &[T], window: &[T], dy: &mut [T], sums: &mut [T]) {
        let channels = bias.len();
        let (dweight, rest) = sums.split_at_mut(weight.len());
        let (dbias, s) = rest.split_at_mut(channels);
        for (t, g) in dy.chunks_exact_mut(channels).enumerate() {
            convolve(s, t, x, weight, bias, window);
            for (g, s) in g.iter_mut().zip(&*s) {
                let sigmoid = s.sigmoid();
                *g *= sigmoid * (T::ONE + *s * (T::ONE - sigmoid));
            }
            add_assign(dbias, g);
            for (k, dweight) in dweight.chunks_exact_mut(channels).enumerate() {
                let x = step_of(window, x, channels, t + k);
                dweight.iter_mut().zip(&*g).zip(x).for_each(|((dw, g), x)| *dw = g.mul_add(*x, *dw));
            }
        }
    }
}

simd_fn! {
    /// From g of one row to the gradients of the steps it was computed from: dwindow, and dx in the place of
    /// g. Steps are visited oldest first: none needs a g that comes before it.
    fn spread_row<T>(
        weight: &[T],
        channels: usize,
        dnext: Option<&[T]>,
        g: &mut [T],
        dwindow: Option<&mut [T]>,
    ) {
        let (taps, steps) = (weight.len() / channels, g.len() / channels);
        let tap = |k: usize| &weight[k * channels..][..channels];
        if let Some(dwindow) = dwindow {
            for (i, dx) in dwindow.chunks_exact_mut(channels).enumerate() {
                dx.fill(T::ZERO);
                for t in 0..steps.min(i + 1) {
                    add_product(dx, tap(i - t), &g[t * channels..][..channels]);
                }
                if let Some(dnext) = dnext && i >= steps {
                    add_assign(dx, &dnext[(i - steps) * channels..][..channels]);
                }
            }
        }
        for t in 0..steps {
            let (dx, later) = g[t * channels..].split_at_mut(channels);
            dx.iter_mut().zip(tap(taps - 1)).for_each(|(dx, w)| *dx *= *w);
            for (k, g) in (0..taps - 1).rev().zip(later.chunks_exact(channels)) {
                add_product(dx, tap(k), g);
            }
            if let Some(dnext) = dnext && t + taps > steps {
                add_assign(dx, &dnext[(t + taps - 1 - steps) * channels..][..channels]);
            }
        }
    }
}

/// y += a b, elementwise.
#[inline(always)]
fn add_product<T: Float>(y: &mut [T], a: &[T], b: &[T]) {
    y.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y = a.mul_add(*b, *y));
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// What a convolution reads.
    struct ConvArgs in "causal_conv1d.cu" {
        x: u64, weight: u64, bias: u64, window: u64, batch: usize, steps: usize, channels: usize, taps: usize,
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Gradients of the steps that a convolution read, from g.
    struct ConvSpread in "causal_conv1d.cu" {
        dx: u64, dwindow: u64, g: u64, dnext: u64, weight: u64,
        batch: usize, steps: usize, channels: usize, taps: usize,
    }
}
