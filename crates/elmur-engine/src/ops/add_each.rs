//! Sums of several tensors each, for many tensors in one op: the gradients of small parameters that are used
//! several times. On a GPU one kernel does what would be a kernel for every `+`.

use crate::autodiff::Backward;
use crate::cpu::simd::add_assign;
#[cfg(feature = "cuda")]
use crate::cuda::args::args;
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, want, want_float};
#[cfg(feature = "cuda")]
use crate::ops::optim::gpu_chunks;
use crate::types::TensorType;

impl Graph {
    /// For each list of values of one shape their sum, added from left to right. All values have one float type.
    pub(crate) fn add_each(&mut self, lists: &[Vec<Value>]) -> Result<Vec<Value>> {
        let counts = lists.iter().map(Vec::len).collect();
        self.push(AddEach { counts }, &lists.concat())
    }
}

/// Inputs are the terms of all sums, one sum after the other; outputs the sums.
#[derive(Debug)]
struct AddEach {
    /// Terms of each sum, at least one.
    counts: Vec<usize>,
}

impl AddEach {
    /// The inputs of each sum.
    fn terms(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.counts.iter().scan(0, |start, count| {
            let first = *start;
            *start += count;
            Some(first..*start)
        })
    }
}

impl Op for AddEach {
    fn name(&self) -> &'static str {
        "add_each"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        self.terms()
            .map(|terms| {
                let first = &inputs[terms.start];
                want_float("add_each", "terms", first)?;
                want("add_each", "one float type:", first, inputs[0].dtype, &first.shape)?;
                inputs[terms]
                    .iter()
                    .try_for_each(|term| want("add_each", "terms", term, first.dtype, &first.shape))?;
                Ok(first.clone())
            })
            .collect()
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        for (sum, terms) in self.terms().enumerate() {
            if let Some(grad) = b.grad(sum) {
                terms.for_each(|term| b.set(term, grad));
            }
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_float!(io.dtype(), T => {
            for (sum, terms) in self.terms().enumerate() {
                if let Some(y) = io.output_if_used::<T>(sum) {
                    y.copy_from_slice(io.input::<T>(terms.start));
                    terms.skip(1).for_each(|term| add_assign(y, io.input::<T>(term)));
                }
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        // Entries of 4 words: the sum, its elements, the number of terms, the place of the first term's address.
        let (mut entries, mut addresses) = (Vec::new(), Vec::new());
        for (sum, terms) in self.terms().enumerate() {
            if launch.output(sum) == 0 {
                continue;
            }
            for (offset, count) in gpu_chunks(launch.out_ty(sum).len()) {
                let first = addresses.len() as u64;
                entries.extend([launch.output(sum) + 4 * offset, count, terms.len() as u64, first]);
                addresses.extend(terms.clone().map(|term| launch.input(term) + 4 * offset));
            }
        }
        let blocks = entries.len() / 4;
        if blocks == 0 {
            return Ok(());
        }
        let (entries, addresses) = (launch.table(&entries)?, launch.table(&addresses)?);
        launch.kernel("add_each", [blocks, 1, 1], 256, 0, args![entries, addresses])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::DType;

    #[test]
    fn terms_of_different_shapes_are_refused() {
        let mut g = Graph::new();
        let a = g.param("a", DType::F32, [2]).unwrap();
        let b = g.param("b", DType::F32, [3]).unwrap();
        let error = g.add_each(&[vec![a, b]]).unwrap_err().to_string();
        assert_eq!(error, "add_each: expected terms f32[2], got f32[3]");
    }
}
