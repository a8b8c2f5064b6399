//! Moving averages of parameters: target networks, weights averaged over training.
//!
//! copy = decay copy + (1 - decay) source, for all pairs in one op.

use crate::cpu::simd::simd_fn;
#[cfg(feature = "cuda")]
use crate::cuda::args::args;
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, want, want_float};
#[cfg(feature = "cuda")]
use crate::ops::optim::gpu_chunks;
use crate::ops::optim::{chunk, chunks};
use crate::types::TensorType;

impl Graph {
    /// At the end of a run every copy takes the value decay copy + (1 - decay) source, in place.
    ///
    /// `decay` is a scalar of the copies' type: 0 makes copies equal to their sources. `pairs` are (copy,
    /// source): a copy is a parameter or state, a source any value of the same shape. Sources that are
    /// parameters are read as they were before the run; to average what [`Graph::adamw`] leaves behind, pass
    /// the values it returns.
    pub fn moving_average(&mut self, decay: Value, pairs: &[(Value, Value)]) -> Result<()> {
        if pairs.is_empty() {
            return Ok(());
        }
        let mut inputs = vec![decay];
        inputs.extend(pairs.iter().flat_map(|(copy, source)| [*copy, *source]));
        let outputs = self.push(MovingAverage, &inputs)?;
        for ((copy, _), new) in pairs.iter().zip(outputs) {
            self.update(*copy, new)?;
        }
        Ok(())
    }
}

/// Inputs decay, then copy and source of every pair; outputs the new copies.
#[derive(Debug)]
struct MovingAverage;

impl Op for MovingAverage {
    fn name(&self) -> &'static str {
        "moving_average"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        const OP: &str = "moving_average";
        let decay = &inputs[0];
        want_float(OP, "decay", decay)?;
        want(OP, "decay", decay, decay.dtype, &[])?;
        let pair = |pair: &[TensorType]| {
            want(OP, "copies of decay's type:", &pair[0], decay.dtype, &pair[0].shape)?;
            want(OP, "source", &pair[1], decay.dtype, &pair[0].shape)?;
            Ok(pair[0].clone())
        };
        inputs[1..].chunks_exact(2).map(pair).collect()
    }
    fn stops_gradient(&self) -> bool {
        true
    }
    fn in_place(&self, inputs: usize) -> Vec<(usize, usize)> {
        (0..inputs / 2).map(|i| (1 + 2 * i, i)).collect()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_float!(io.dtype(), T => {
            let decay = io.input::<T>(0)[0];
            let count = io.outputs.len();
            for i in 0..count {
                io.in_place::<T>(1 + 2 * i, i);
            }
            let len = |i: usize| io.out_ty(i).len();
            io.pool.run((0..count).map(|i| chunks(len(i))).sum(), |task, _| {
                let (i, at) = chunk(task, len);
                let source = &io.input::<T>(2 + 2 * i)[at.clone()];
                // SAFETY: tasks own disjoint chunks of the outputs, which hold the old values by now.
                let copy = unsafe {
                    std::slice::from_raw_parts_mut(io.outputs[i].ptr.cast::<T>().add(at.start), at.len())
                };
                approach(decay, source, copy);
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let mut table = Vec::new();
        for i in 0..launch.outputs.len() {
            let (copy, source, new) = (launch.input(1 + 2 * i), launch.input(2 + 2 * i), launch.output(i));
            for (offset, count) in gpu_chunks(launch.out_ty(i).len()) {
                table.extend([copy, source, new].map(|address| address + 4 * offset));
                table.push(count);
            }
        }
        let blocks = table.len() / 4;
        let table = launch.table(&table)?;
        launch.kernel("moving_average", [blocks, 1, 1], 256, 0, args![table, launch.input(0)])
    }
}

simd_fn! {
    fn approach<T>(decay: T, source: &[T], copy: &mut [T]) {
        // Exact where decay is at least a half, so that an average of equal numbers stays that number.
        let rest = T::ONE - decay;
        copy.iter_mut().zip(source).for_each(|(copy, source)| *copy = decay.mul_add(*copy, rest * *source));
    }
}
