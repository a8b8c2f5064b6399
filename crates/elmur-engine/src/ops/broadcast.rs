//! Broadcasting: how the axes of a smaller operand step while those of a larger one are walked.

#[cfg(feature = "cuda")]
use crate::cuda::args::kernel_args;
#[cfg(feature = "cuda")]
use crate::types::DType;
use crate::types::MAX_RANK;

/// For each axis of `large`, the step in `small` (0 along broadcast axes); `None` if it does not broadcast.
pub(crate) fn broadcast_steps(small: &[usize], large: &[usize]) -> Option<[usize; MAX_RANK]> {
    let missing = large.len().checked_sub(small.len())?;
    let mut steps = [0; MAX_RANK];
    let mut step = 1;
    for axis in (0..small.len()).rev() {
        if small[axis] != 1 {
            if small[axis] != large[axis + missing] {
                return None;
            }
            steps[axis + missing] = step;
        }
        step *= small[axis];
    }
    Some(steps)
}

/// Offset of row `row` (all axes but the last) under `steps`.
#[inline(always)]
pub(crate) fn row_offset(mut row: usize, shape: &[usize], steps: &[usize; MAX_RANK]) -> usize {
    let mut offset = 0;
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        offset += row % shape[axis] * steps[axis];
        row /= shape[axis];
    }
    offset
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// A shape, and the steps of two operands that broadcast to it.
    pub(crate) struct Steps in "../cuda/prelude.cu" {
        rank: i32, shape: [i32; 6], a: [i32; 6], b: [i32; 6],
    }
}

#[cfg(feature = "cuda")]
impl Steps {
    pub(crate) fn new(shape: &[usize], a: &[usize], b: &[usize]) -> Self {
        // Axes along which an operand repeats have step 0, and so have axes beyond the rank.
        let steps = |operand| broadcast_steps(operand, shape).unwrap_or_default().map(|step| step as i32);
        let mut extents = [0; MAX_RANK];
        extents.iter_mut().zip(shape).for_each(|(to, extent)| *to = *extent as i32);
        Self { rank: shape.len() as i32, shape: extents, a: steps(a), b: steps(b) }
    }
}

/// The variant of a kernel for elements of 1, 4 or 8 bytes.
#[cfg(feature = "cuda")]
pub(crate) fn by_size(dtype: DType, kernels: [&'static str; 3]) -> &'static str {
    kernels[match dtype.size() {
        1 => 0,
        4 => 1,
        _ => 2,
    }]
}
