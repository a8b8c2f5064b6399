//! log Σ e^x over the last axis, with the largest element taken out of the sum.
//!
//! y = m + log Σ e^(x - m), m = max x;   dx = dy e^(x - y)
//!
//! A row of only -inf, which masks can produce, gives -inf and no gradient.

use crate::autodiff::Backward;
use crate::cpu::pool::RowsMut;
use crate::cpu::simd::{max, reduce, simd_fn};
#[cfg(feature = "cuda")]
use crate::cuda::args::args;
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want_float};
use crate::types::TensorType;

impl Graph {
    /// log Σ e^x over the last axis of x [..., n]: the remaining shape.
    pub fn logsumexp(&mut self, x: Value) -> Result<Value> {
        self.push1(LogSumExp, &[x])
    }
}

#[derive(Debug)]
struct LogSumExp;

impl Op for LogSumExp {
    fn name(&self) -> &'static str {
        "logsumexp"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_float("logsumexp", "x", &inputs[0])?;
        match inputs[0].shape.split_last() {
            Some((_, lead)) => Ok(vec![inputs[0].with(lead)]),
            None => mismatch("logsumexp", "x [..., n]", inputs[0].to_string()),
        }
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let dx = b.graph.push1(LogSumExpGrad, &[b.inputs[0], b.outputs[0], dy])?;
            b.set(0, dx);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let n = io.ty(0).cols();
        dispatch_float!(io.dtype(), T => {
            let (x, y) = (io.input::<T>(0), io.output::<T>(0));
            io.pool.rows(y.len(), 8 * n, RowsMut::new(y, 1), |first, y| logsumexp_rows(&x[first * n..][..y.len() * n], y));
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, n) = (launch.ty(0).rows(), launch.ty(0).cols());
        launch.warps("logsumexp", rows, args![launch.output(0), launch.input(0), rows, n])
    }
}

simd_fn! {
    fn logsumexp_rows<T>(x: &[T], y: &mut [T]) {
        let n = x.len() / y.len();
        for (x, y) in x.chunks_exact(n).zip(y) {
            let top = max(x);
            // Infinite differences are not numbers; NaN itself goes through the sum.
            let infinite = top.abs() == -T::NEG_INFINITY && !x.iter().any(|x| x.is_nan());
            *y = if infinite { top } else { top + reduce(x, |x| (x - top).exp()).ln() };
        }
    }
}

/// dx = dy e^(x - y), from x, y and dy.
#[derive(Debug)]
struct LogSumExpGrad;

impl Op for LogSumExpGrad {
    fn name(&self) -> &'static str {
        "logsumexp_grad"
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
            let (dx, y, dy) = (io.in_place::<T>(0, 0), io.input::<T>(1), io.input::<T>(2));
            io.pool.rows(y.len(), 8 * n, RowsMut::new(dx, n), |first, dx| gradient_rows(dx, &y[first..], &dy[first..], n));
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (n, count) = (launch.ty(0).cols(), launch.ty(0).len());
        let [x, y, dy] = [0, 1, 2].map(|i| launch.input(i));
        launch.elements("logsumexp_grad", count, args![launch.output(0), x, y, dy, n, count])
    }
}

simd_fn! {
    /// Writes the gradients over the arguments.
    fn gradient_rows<T>(dx: &mut [T], y: &[T], dy: &[T], n: usize) {
        for ((dx, y), dy) in dx.chunks_exact_mut(n).zip(y).zip(dy) {
            if *y == T::NEG_INFINITY {
                dx.fill(T::ZERO);
            } else {
                dx.iter_mut().for_each(|dx| *dx = *dy * (*dx - *y).exp());
            }
        }
    }
}
