//! Softmax over the last axis. A row of only -inf, which masks can produce, gives zeros.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::RowsMut;
use crate::cpu::simd::{LANES, dot, fold, max, simd_fn, sum};
#[cfg(feature = "cuda")]
use crate::cuda::args::args;
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want_float};
use crate::types::TensorType;

impl Graph {
    /// y = e^x / Σ e^x over the last axis.
    pub fn softmax(&mut self, x: Value) -> Result<Value> {
        self.push1(Softmax, &[x])
    }

    /// Position of the largest element along the last axis (the first of equals), i32 of the remaining shape.
    pub fn argmax(&mut self, x: Value) -> Result<Value> {
        self.push1(ArgMax, &[x])
    }
}

/// e^x for x <= 0, and 0 below e^-69 = 1e-30, those of masked elements among them: results that leave the
/// range of normal numbers take a hundred times as long.
#[inline(always)]
fn exp_or_zero<T: Float>(x: T) -> T {
    let least = T::of(-69.0);
    // NaN is not below.
    let below = x < least;
    let e = if below { least } else { x }.exp_in_range();
    if below { T::ZERO } else { e }
}

/// x = softmax(x); zeros if every element is -inf.
#[inline(always)]
pub(crate) fn softmax_row<T: Float>(x: &mut [T]) {
    let top = max(x);
    // A row of -inf alone gives zeros, but NaN stays NaN: a diverged model must not look like a masked row.
    if top == T::NEG_INFINITY && !x.iter().any(|x| x.is_nan()) {
        return x.fill(T::ZERO);
    }
    x.iter_mut().for_each(|x| *x = exp_or_zero(*x - top));
    let scale = T::ONE / sum(x);
    x.iter_mut().for_each(|x| *x *= scale);
}

/// x = e^(x - top) for whole vectors, none above `top`, and the sum of what they become. Zeros and one if `top`
/// is -inf: so is every element, or NaN, which stays NaN.
#[inline(always)]
pub(crate) fn exp_lanes<T: Float>(x: &mut [T], top: T) -> T {
    let (x, rest) = x.as_chunks_mut::<LANES>();
    debug_assert!(rest.is_empty());
    if top == T::NEG_INFINITY && !x.as_flattened().iter().any(|x| x.is_nan()) {
        x.as_flattened_mut().fill(T::ZERO);
        return T::ONE;
    }
    let mut sums = [T::ZERO; LANES];
    for x in x {
        for l in 0..LANES {
            x[l] = exp_or_zero(x[l] - top);
            sums[l] += x[l];
        }
    }
    fold(sums, |a, b| a + b)
}

#[derive(Debug)]
struct Softmax;

impl Op for Softmax {
    fn name(&self) -> &'static str {
        "softmax"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_float("softmax", "x", &inputs[0])?;
        if inputs[0].shape.is_empty() {
            return mismatch("softmax", "x [..., n]", inputs[0].to_string());
        }
        Ok(inputs.to_vec())
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let dx = b.graph.push1(SoftmaxGrad, &[dy, b.outputs[0]])?;
            b.set(0, dx);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let n = io.ty(0).cols();
        dispatch_float!(io.dtype(), T => {
            let y = io.in_place::<T>(0, 0);
            io.pool.rows(y.len() / n, 8 * n, RowsMut::new(y, n), |_, y| softmax_rows(y, n));
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, n) = (launch.ty(0).rows(), launch.ty(0).cols());
        launch.warps("softmax", rows, args![launch.output(0), launch.input(0), rows, n])
    }
}

simd_fn! {
    fn softmax_rows<T>(x: &mut [T], n: usize) {
        x.chunks_exact_mut(n).for_each(softmax_row);
    }
}

/// dx = y (dy - Σ y dy).
#[derive(Debug)]
struct SoftmaxGrad;

impl Op for SoftmaxGrad {
    fn name(&self) -> &'static str {
        "softmax_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].clone()])
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let n = io.ty(0).cols();
        dispatch_float!(io.dtype(), T => {
            let (dx, y) = (io.in_place::<T>(0, 0), io.input::<T>(1));
            io.pool.rows(y.len() / n, 4 * n, RowsMut::new(dx, n), |first, dx| {
                gradient_rows(dx, &y[first * n..][..dx.len()], n);
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, n) = (launch.ty(0).rows(), launch.ty(0).cols());
        launch.warps("softmax_grad", rows, args![launch.output(0), launch.input(0), launch.input(1), rows, n])
    }
}

simd_fn! {
    fn gradient_rows<T>(dx: &mut [T], y: &[T], n: usize) {
        for (dx, y) in dx.chunks_exact_mut(n).zip(y.chunks_exact(n)) {
            let mean = dot(dx, y);
            dx.iter_mut().zip(y).for_each(|(dx, y)| *dx = *y * (*dx - mean));
        }
    }
}

#[derive(Debug)]
struct ArgMax;

impl Op for ArgMax {
    fn name(&self) -> &'static str {
        "argmax"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_float("argmax", "x", &inputs[0])?;
        let Some((_, lead)) = inputs[0].shape.split_last() else {
            return mismatch("argmax", "x [..., n]", inputs[0].to_string());
        };
        Ok(vec![TensorType::new(crate::types::DType::I32, lead)])
    }
    fn stops_gradient(&self) -> bool {
        true
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let n = io.ty(0).cols();
        dispatch_float!(io.dtype(), T => {
            for (x, best) in io.input::<T>(0).chunks_exact(n).zip(io.output::<i32>(0)) {
                let mut at = 0;
                for i in 1..n {
                    if x[i] > x[at] || (x[at].is_nan() && !x[i].is_nan()) {
                        at = i;
                    }
                }
                *best = at as i32;
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, n) = (launch.ty(0).rows(), launch.ty(0).cols());
        launch.elements("argmax", rows, args![launch.output(0), launch.input(0), rows, n])
    }
}
