//! The contract of an op, and what the CPU kernel of an op is given.

use std::fmt::Debug;
use std::sync::Arc;

use crate::autodiff::Backward;
use crate::cpu::gemm::RoundedWeight;
use crate::cpu::pool::Pool;
use crate::error::{Error, Result};
use crate::operand::Operand;
use crate::precision::Precision;
use crate::types::{DType, Element, TensorType};

/// One kind of node. Each op lives in one file under `ops/`: contract, backward rule and kernels.
pub(crate) trait Op: Debug + Send + Sync {
    /// Name of the op, as in its builder method.
    fn name(&self) -> &'static str;

    /// Types of the outputs, or an error that says what is wrong with the inputs.
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>>;

    /// Appends the ops that compute the gradients of the inputs. The default is for ops without gradients.
    fn backward(&self, backward: &mut Backward<'_>) -> Result<()> {
        match backward.first_needed() {
            Some(input) => Err(Error::NoGradient { op: self.name(), input }),
            None => Ok(()),
        }
    }

    /// Whether gradients stop at this op without an error.
    fn stops_gradient(&self) -> bool {
        false
    }

    /// For an op whose output 0 is a window into input 0, and so needs no computation: the byte offset of
    /// that window.
    fn alias(&self, _inputs: &[TensorType]) -> Option<usize> {
        None
    }

    /// Pairs (input, output) that may share a buffer, given the number of inputs. The kernel must read such
    /// an input through [`Io::in_place`] alone.
    fn in_place(&self, _inputs: usize) -> Vec<(usize, usize)> {
        Vec::new()
    }

    /// Whether the kernel writes output `output` even if nobody reads it. Other unread outputs have no
    /// memory.
    fn always_writes(&self, output: usize) -> bool {
        let _ = output;
        false
    }

    /// For an op that can add another tensor to its output 0 at no cost: the op that does so, with that tensor as
    /// an additional last input.
    fn accumulating(&self) -> Option<Arc<dyn Op>> {
        None
    }

    /// For a product of two matrices [rows, columns]: whether the left and the right one are stored transposed. A CPU
    /// computes two products with the same left operand together.
    fn matrix_product(&self) -> Option<[bool; 2]> {
        None
    }

    /// For a linear map whose input 1 is the weight [out, in]: makes the op that has the weight in bf16 instead of that
    /// input, computes output 0 alone, and runs on a CPU.
    fn rounded(&self) -> Option<WithRounded> {
        None
    }

    /// Whether the only output holds the elements of the only input, in another shape or order.
    fn only_rearranges(&self) -> bool {
        false
    }

    /// Bytes of scratch memory that the CPU kernel needs with this many threads.
    fn scratch(&self, _inputs: &[TensorType], _outputs: &[TensorType], _threads: usize) -> usize {
        0
    }

    /// What the CPU kernel can keep of an input that stays the same, so that only the first of several runs computes
    /// it; see [`Io::kept`].
    fn kept(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> Option<Kept> {
        None
    }

    /// Inputs whose elements are indices, and their bounds. Those that a caller fills are checked before a
    /// run changes anything.
    fn indices(&self, _inputs: &[TensorType]) -> Vec<IndexBound> {
        Vec::new()
    }

    /// Computes the outputs on the CPU.
    fn cpu(&self, io: &Io<'_>) -> Result<()>;

    /// Queues the work that computes the outputs on a GPU.
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut crate::cuda::launch::Launch<'_>) -> Result<()>;

    /// Outputs that [`Op::cuda_deferred`] computes, a launch of its own: consumers of the other outputs need
    /// not wait for it.
    #[cfg(feature = "cuda")]
    fn deferred(&self, _outputs: usize) -> std::ops::Range<usize> {
        0..0
    }

    /// Whether [`Op::cuda_deferred`] reads scratch memory whose addresses [`Op::cuda`] left in
    /// `launch.handoff`, and so must run after it.
    #[cfg(feature = "cuda")]
    fn deferred_reads_scratch(&self) -> bool {
        false
    }

    /// Queues the work that computes the outputs of [`Op::deferred`] on a GPU.
    #[cfg(feature = "cuda")]
    fn cuda_deferred(&self, _launch: &mut crate::cuda::launch::Launch<'_>) -> Result<()> {
        Ok(())
    }
}

/// Makes an op of a weight in bf16.
pub(crate) type WithRounded = Box<dyn FnOnce(Arc<RoundedWeight>) -> Arc<dyn Op>>;

/// Something that follows from one input alone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kept {
    pub input: usize,
    pub bytes: usize,
}

/// Every element of input `input` must lie in `0..limit` or equal `ignored`.
#[derive(Debug, Clone)]
pub(crate) struct IndexBound {
    pub input: usize,
    pub what: &'static str,
    pub limit: usize,
    pub ignored: Option<i64>,
}

impl IndexBound {
    pub(crate) fn check<T: Into<i64> + Copy>(&self, op: &'static str, data: &[T]) -> Result<()> {
        let bad = |&v: &T| {
            let v: i64 = v.into();
            (v < 0 || v >= self.limit as i64) && Some(v) != self.ignored
        };
        match data.iter().find(|v| bad(v)) {
            Some(&v) => Err(Error::IndexOutOfRange { op, what: self.what, got: v.into(), limit: self.limit }),
            None => Ok(()),
        }
    }
}

/// What a CPU kernel works on. Slices are sound because the planner gives every live value memory of its own,
/// and an output shares memory with an input only where [`Op::in_place`] allows it.
pub(crate) struct Io<'a> {
    pub inputs: &'a [Operand],
    pub outputs: &'a [Operand],
    pub scratch: *mut u8,
    pub scratch_bytes: usize,
    /// What is kept from run to run: its beginning, its bytes, and whether an earlier run has filled them.
    pub kept: Option<(*mut u8, usize, bool)>,
    pub pool: &'a Pool,
    /// Of matrix products.
    pub precision: Precision,
}

// SAFETY: inputs are only read; kernels that take outputs or scratch inside a task take disjoint parts.
unsafe impl Sync for Io<'_> {}

impl<'a> Io<'a> {
    pub(crate) fn ty(&self, input: usize) -> &'a TensorType {
        &self.inputs[input].ty
    }

    pub(crate) fn out_ty(&self, output: usize) -> &'a TensorType {
        &self.outputs[output].ty
    }

    /// Element type of input 0, on which kernels dispatch.
    pub(crate) fn dtype(&self) -> DType {
        self.inputs[0].ty.dtype
    }

    pub(crate) fn input<T: Element>(&self, i: usize) -> &'a [T] {
        let operand = &self.inputs[i];
        assert_eq!(operand.ty.dtype, T::DTYPE, "kernel reads input {i} as another type");
        // SAFETY: the planner keeps `ty.len()` elements alive here for the run, and nothing writes them
        // meanwhile.
        unsafe { std::slice::from_raw_parts(operand.ptr.cast(), operand.ty.len()) }
    }

    /// Output `i`; none if nobody reads it.
    #[allow(clippy::mut_from_ref)]
    pub(crate) fn output_if_used<T: Element>(&self, i: usize) -> Option<&'a mut [T]> {
        let operand = &self.outputs[i];
        assert_eq!(operand.ty.dtype, T::DTYPE, "kernel writes output {i} as another type");
        if operand.ptr.is_null() {
            return None;
        }
        // SAFETY: the planner gives this output memory of its own, and a kernel takes each output once.
        Some(unsafe { std::slice::from_raw_parts_mut(operand.ptr.cast(), operand.ty.len()) })
    }

    /// Output `i`, for ops with one output: an op runs only if somebody reads an output, so that one exists.
    #[allow(clippy::mut_from_ref)]
    pub(crate) fn output<T: Element>(&self, i: usize) -> &'a mut [T] {
        self.output_if_used(i).unwrap_or_default()
    }

    /// Input `i` as bare bits, for ops that only move elements. `U` must have the size of an element.
    pub(crate) fn input_bits<U: Copy>(&self, i: usize) -> &'a [U] {
        let operand = &self.inputs[i];
        assert_eq!(operand.ty.dtype.size(), size_of::<U>());
        // SAFETY: as for `input`; any bits are a valid unsigned integer.
        unsafe { std::slice::from_raw_parts(operand.ptr.cast(), operand.ty.len()) }
    }

    /// Output `i` as bare bits.
    #[allow(clippy::mut_from_ref)]
    pub(crate) fn output_bits<U: Copy>(&self, i: usize) -> &'a mut [U] {
        let operand = &self.outputs[i];
        assert_eq!(operand.ty.dtype.size(), size_of::<U>());
        // SAFETY: as for `output`; kernels only move valid elements here.
        unsafe { std::slice::from_raw_parts_mut(operand.ptr.cast(), operand.ty.len()) }
    }

    /// Output `output` with the contents of input `input`, copied unless the two share memory.
    pub(crate) fn in_place<T: Element>(&self, input: usize, output: usize) -> &'a mut [T] {
        let shared = self.inputs[input].ptr == self.outputs[output].ptr;
        let out = self.output::<T>(output);
        if !shared {
            out.copy_from_slice(self.input(input));
        }
        out
    }

    /// `len` elements of scratch memory, aligned to cache lines. A kernel asks for scratch once and splits it
    /// itself.
    #[allow(clippy::mut_from_ref)]
    pub(crate) fn scratch<T: Element>(&self, len: usize) -> &'a mut [T] {
        assert!(len * size_of::<T>() <= self.scratch_bytes, "kernel takes more scratch than it declared");
        // SAFETY: the planner provides this much, aligned, and a kernel takes it once. Any bits are valid
        // numbers.
        unsafe { std::slice::from_raw_parts_mut(self.scratch.cast(), len) }
    }

    /// The memory that [`Op::kept`] asked for, `len` elements aligned to cache lines, and whether an earlier run has
    /// filled it from the same input. None if the input may differ in every run. A kernel asks for it once.
    #[allow(clippy::mut_from_ref)]
    pub(crate) fn kept<T: Element>(&self, len: usize) -> Option<(&'a mut [T], bool)> {
        let (start, bytes, filled) = self.kept?;
        assert!(len * size_of::<T>() <= bytes, "kernel keeps more than it declared");
        // SAFETY: the step owns this much, aligned, and a kernel takes it once. Any bits are valid numbers.
        Some((unsafe { std::slice::from_raw_parts_mut(start.cast(), len) }, filled))
    }
}

/// Runs `$body` with `$T` bound to the Rust type of a float [`DType`].
macro_rules! dispatch_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::types::DType::F64 => {
                type $T = f64;
                $body
            }
            _ => {
                type $T = f32;
                $body
            }
        }
    };
}
pub(crate) use dispatch_float;

/// Runs `$body` with `$U` bound to the unsigned integer as wide as an element.
macro_rules! dispatch_bits {
    ($dtype:expr, $U:ident => $body:expr) => {
        match $dtype.size() {
            8 => {
                type $U = u64;
                $body
            }
            4 => {
                type $U = u32;
                $body
            }
            _ => {
                type $U = u8;
                $body
            }
        }
    };
}
pub(crate) use dispatch_bits;

/// An [`Error::Op`] with these texts.
pub(crate) fn mismatch<T>(
    op: &'static str,
    expected: impl Into<String>,
    got: impl Into<String>,
) -> Result<T> {
    Err(Error::Op { op, expected: expected.into(), got: got.into() })
}

/// Fails unless `ty` holds floats.
pub(crate) fn want_float(op: &'static str, what: &str, ty: &TensorType) -> Result<()> {
    if ty.dtype.is_float() { Ok(()) } else { mismatch(op, format!("{what} of f32 or f64"), ty.to_string()) }
}

/// Fails unless `ty` is exactly `dtype` of `shape`.
pub(crate) fn want(
    op: &'static str,
    what: &str,
    ty: &TensorType,
    dtype: DType,
    shape: &[usize],
) -> Result<()> {
    if ty.dtype == dtype && ty.shape == shape {
        Ok(())
    } else {
        mismatch(op, format!("{what} {}", TensorType::new(dtype, shape)), ty.to_string())
    }
}

/// Fails unless `ty` holds i32 or i64.
pub(crate) fn want_index(op: &'static str, what: &str, ty: &TensorType) -> Result<()> {
    match ty.dtype {
        DType::I32 | DType::I64 => Ok(()),
        _ => mismatch(op, format!("{what} of i32 or i64"), ty.to_string()),
    }
}
