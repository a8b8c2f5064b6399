//! Numbers to the bins that they lie in, each dimension with thresholds of its own.

use crate::cpu::float::Float;
use crate::cpu::pool::RowsMut;
#[cfg(feature = "cuda")]
use crate::cuda::args::args;
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want_float};
use crate::types::{DType, TensorType};

impl Graph {
    /// x [..., n] and rising thresholds [n, N + 1] to bins, i32 [..., n] in 0..N.
    ///
    /// Bin i of a dimension holds the numbers from its threshold i up to, but without, threshold i + 1. Numbers
    /// below the first threshold, and NaN, are in bin 0; numbers from the last threshold on are in bin N - 1.
    /// Gradients stop here.
    pub fn discretize(&mut self, x: Value, thresholds: Value) -> Result<Value> {
        self.push1(Discretize, &[x, thresholds])
    }
}

#[derive(Debug)]
struct Discretize;

impl Op for Discretize {
    fn name(&self) -> &'static str {
        "discretize"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (x, thresholds) = (&inputs[0], &inputs[1]);
        want_float("discretize", "x", x)?;
        let matches = match (x.shape.last(), &thresholds.shape[..]) {
            (Some(n), [rows, ends]) => n == rows && *ends >= 2 && x.dtype == thresholds.dtype,
            _ => false,
        };
        if !matches {
            let expected = "x [..., n] and thresholds [n, bins + 1] of one type, with at least one bin";
            return mismatch("discretize", expected, format!("{x} and {thresholds}"));
        }
        Ok(vec![TensorType::new(DType::I32, x.shape.clone())])
    }
    fn stops_gradient(&self) -> bool {
        true
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (n, ends) = (io.ty(0).cols(), io.ty(1).cols());
        dispatch_float!(io.dtype(), T => {
            let (x, thresholds, y) = (io.input::<T>(0), io.input::<T>(1), io.output::<i32>(0));
            io.pool.rows(x.len() / n, 8 * n, RowsMut::new(y, n), |first, y| {
                for (i, y) in y.iter_mut().enumerate() {
                    *y = bin(x[first * n + i], &thresholds[i % n * ends..][..ends]) as i32;
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (count, n, ends) = (launch.ty(0).len(), launch.ty(0).cols(), launch.ty(1).cols());
        let args = args![launch.output(0), launch.input(0), launch.input(1), n, ends, count];
        launch.elements("discretize", count, args)
    }
}

/// The bin of x among rising thresholds.
fn bin<T: Float>(x: T, thresholds: &[T]) -> usize {
    let reached = thresholds.partition_point(|threshold| *threshold <= x);
    reached.saturating_sub(1).min(thresholds.len() - 2)
}
