//! One-dimensional convolution over steps in time, and its transpose, each as one matrix product.
//!
//! ```text
//! conv1d:            y[b, t, o] = f(bias[o] + Σ_{p, c} w[o, p, c] x[b, t stride + p - padding, c])
//! conv_transpose1d:  y[b, u, o] = f(bias[o] + Σ_{t, p, c: t stride + p - padding = u} w[p, o, c] x[b, t, c])
//! ```
//!
//! Channels are the last axis: a window of k steps is then one contiguous row of k C numbers, and the windows
//! of a whole batch are one matrix.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::RowsMut;
use crate::cpu::simd::{add_assign, simd_fn};
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want, want_float};
use crate::ops::activation::Activation;
use crate::types::TensorType;

/// Geometry of [`Graph::conv1d`] and [`Graph::conv_transpose1d`].
#[derive(Debug, Clone, Copy)]
pub struct Conv1d {
    /// Steps from one window to the next.
    pub stride: usize,
    /// Steps of zeros added in front and behind.
    pub padding: usize,
}

impl Graph {
    /// x [B, T, C], weight [O, k, C], bias `[O]` to [B, T', O] with T' = (T + 2 padding - k) / stride + 1.
    pub fn conv1d(
        &mut self,
        x: Value,
        weight: Value,
        bias: Option<Value>,
        conv: Conv1d,
        activation: Activation,
    ) -> Result<Value> {
        let (&[_, steps, channels], &[outputs, kernel, inner]) = (self.shape(x)?, self.shape(weight)?) else {
            return self.wrong_operands("conv1d", "x [B, T, C] and weight [O, k, C]", x, weight);
        };
        if inner != channels || windows(steps, kernel, conv).is_none() {
            let expected = format!(
                "x [B, T, C] and weight [O, k, C], k no longer than the padded steps, stride above 0 ({conv:?})"
            );
            return self.wrong_operands("conv1d", &expected, x, weight);
        }
        // A kernel of one step that visits all steps is a linear layer.
        let plain = kernel == 1 && conv.stride == 1 && conv.padding == 0;
        let rows = if plain { x } else { self.push1(Unfold { kernel, conv }, &[x])? };
        let weight = self.reshape(weight, [outputs, kernel * channels])?;
        self.linear(rows, weight, bias, activation)
    }

    /// x [B, T, C], weight [k, O, C], bias `[O]` to [B, T', O] with T' = (T - 1) stride + k - 2 padding: the
    /// transpose of a [`Graph::conv1d`] from O to C channels.
    pub fn conv_transpose1d(
        &mut self,
        x: Value,
        weight: Value,
        bias: Option<Value>,
        conv: Conv1d,
        activation: Activation,
    ) -> Result<Value> {
        const OP: &str = "conv_transpose1d";
        let (&[_, steps, channels], &[kernel, outputs, inner]) = (self.shape(x)?, self.shape(weight)?) else {
            return self.wrong_operands(OP, "x [B, T, C] and weight [k, O, C]", x, weight);
        };
        let unfolded = (steps - 1).checked_mul(conv.stride).and_then(|n| n.checked_add(kernel));
        let unfolded = unfolded.and_then(|n| n.checked_sub(conv.padding.checked_mul(2)?)).filter(|n| *n > 0);
        let Some(unfolded) = unfolded.filter(|_| inner == channels && conv.stride > 0) else {
            let expected = format!(
                "x [B, T, C] and weight [k, O, C], more steps than are cut off, stride above 0 ({conv:?})"
            );
            return self.wrong_operands(OP, &expected, x, weight);
        };
        let dtype = self.ty(x)?.dtype;
        let weight = self.reshape(weight, [kernel * outputs, channels])?;
        let rows = self.linear(x, weight, None, Activation::Identity)?;
        let mut y = self.push1(Fold { kernel, conv, steps: unfolded }, &[rows])?;
        if let Some(bias) = bias {
            want(OP, "bias", self.ty(bias)?, dtype, &[outputs])?;
            y = self.add(y, bias)?;
        }
        self.activation(y, activation)
    }

    fn wrong_operands(&self, op: &'static str, expected: &str, x: Value, weight: Value) -> Result<Value> {
        mismatch(op, expected, format!("{} and {}", self.ty(x)?, self.ty(weight)?))
    }
}

/// Number of windows of `kernel` steps among `steps` steps and their padding.
fn windows(steps: usize, kernel: usize, conv: Conv1d) -> Option<usize> {
    let room = conv.padding.checked_mul(2)?.checked_add(steps)?.checked_sub(kernel)?;
    Some(room.checked_div(conv.stride)? + 1)
}

/// Step that window `window` begins at, which is negative inside of the padding, and the range of the
/// window's own steps that lie among `steps` steps.
fn span(window: usize, kernel: usize, conv: Conv1d, steps: usize) -> (isize, std::ops::Range<usize>) {
    let first = (window * conv.stride) as isize - conv.padding as isize;
    let inside = |step: isize| (step - first).clamp(0, kernel as isize) as usize;
    (first, inside(0)..inside(steps as isize))
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Extents of steps and windows.
    struct Windows in "conv1d.cu" {
        channels: i32, kernel: i32, steps: i32, windows: i32, stride: i32, padding: i32,
    }
}

/// Extents of an unfolding from [B, steps, channels] to [B, windows, kernel channels].
#[derive(Debug, Clone, Copy)]
struct Extents {
    steps: usize,
    windows: usize,
    channels: usize,
}

impl Extents {
    #[cfg(feature = "cuda")]
    fn args(&self, kernel: usize, conv: Conv1d) -> Windows {
        let [channels, kernel, steps, windows] =
            [self.channels, kernel, self.steps, self.windows].map(|n| n as i32);
        let (stride, padding) = (conv.stride as i32, conv.padding as i32);
        Windows { channels, kernel, steps, windows, stride, padding }
    }
}

/// x [B, T, C] to its windows [B, T', k C].
#[derive(Debug)]
struct Unfold {
    kernel: usize,
    conv: Conv1d,
}

impl Unfold {
    fn extents(&self, x: &TensorType) -> Option<Extents> {
        let &[_, steps, channels] = &x.shape[..] else { return None };
        Some(Extents { steps, windows: windows(steps, self.kernel, self.conv)?, channels })
    }
}

impl Op for Unfold {
    fn name(&self) -> &'static str {
        "unfold_steps"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let x = &inputs[0];
        want_float("conv1d", "x", x)?;
        match self.extents(x) {
            Some(e) => Ok(vec![x.with([x.shape[0], e.windows, self.kernel * e.channels])]),
            None => mismatch("conv1d", "x [B, T, C] of more steps than the kernel", x.to_string()),
        }
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let steps = b.graph.shape(b.inputs[0])?[1];
            let dx = b.graph.push1(Fold { kernel: self.kernel, conv: self.conv, steps }, &[dy])?;
            b.set(0, dx);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(Extents { steps, windows, channels }) = self.extents(io.ty(0)) else { return Ok(()) };
        let width = self.kernel * channels;
        dispatch_float!(io.dtype(), T => {
            let (x, y) = (io.input::<T>(0), io.output::<T>(0));
            io.pool.rows(y.len() / width, width, RowsMut::new(y, width), |first, y| {
                for (i, y) in y.chunks_exact_mut(width).enumerate() {
                    let (row, window) = ((first + i) / windows, (first + i) % windows);
                    let (start, inside) = span(window, self.kernel, self.conv, steps);
                    y[..inside.start * channels].fill(T::ZERO);
                    y[inside.end * channels..].fill(T::ZERO);
                    if !inside.is_empty() {
                        let from = (row * steps).wrapping_add_signed(start + inside.start as isize) * channels;
                        let to = &mut y[inside.start * channels..inside.end * channels];
                        to.copy_from_slice(&x[from..from + to.len()]);
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(extents) = self.extents(launch.ty(0)) else { return Ok(()) };
        let rows = launch.ty(0).shape[0] * extents.windows;
        let args = args![launch.output(0), launch.input(0), extents.args(self.kernel, self.conv)];
        launch.kernel("unfold_steps", [rows, 1, 1], 256, 0, args)
    }
}

/// Windows [B, T', k C] added up to [B, steps, C]: the transpose of [`Unfold`].
#[derive(Debug)]
struct Fold {
    kernel: usize,
    conv: Conv1d,
    steps: usize,
}

impl Fold {
    fn extents(&self, rows: &TensorType) -> Extents {
        Extents { steps: self.steps, windows: rows.shape[1], channels: rows.cols() / self.kernel }
    }
}

impl Op for Fold {
    fn name(&self) -> &'static str {
        "fold_steps"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let rows = &inputs[0];
        Ok(vec![rows.with([rows.shape[0], self.steps, rows.cols() / self.kernel])])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let dx = b.graph.push1(Unfold { kernel: self.kernel, conv: self.conv }, &[dy])?;
            b.set(0, dx);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Extents { steps, windows, channels } = self.extents(io.ty(0));
        let (kernel, conv) = (self.kernel, self.conv);
        dispatch_float!(io.dtype(), T => {
            let (rows, y) = (io.input::<T>(0), io.output::<T>(0));
            io.pool.rows(y.len() / channels, kernel * channels, RowsMut::new(y, channels), |first, y| {
                for (i, y) in y.chunks_exact_mut(channels).enumerate() {
                    let (row, step) = ((first + i) / steps, (first + i) % steps);
                    y.fill(T::ZERO);
                    for p in 0..kernel.min(step + conv.padding + 1) {
                        let ahead = step + conv.padding - p;
                        let window = ahead / conv.stride;
                        if ahead % conv.stride == 0 && window < windows {
                            let from = ((row * windows + window) * kernel + p) * channels;
                            add_row(y, &rows[from..from + channels]);
                        }
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let extents = self.extents(launch.ty(0));
        let rows = launch.ty(0).shape[0] * self.steps;
        let args = args![launch.output(0), launch.input(0), extents.args(self.kernel, self.conv)];
        launch.kernel("fold_steps", [rows, 1, 1], 128, 0, args)
    }
}

simd_fn! {
    fn add_row<T>(y: &mut [T], x: &[T]) {
        add_assign(y, x);
    }
}
