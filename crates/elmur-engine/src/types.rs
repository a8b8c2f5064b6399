//! Element types, tensor types, and the Rust types behind them.

use std::fmt;

use crate::error::{Error, Result};

/// Element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float, the type of training and inference.
    F32,
    /// 64-bit float, for gradient checks and comparison with float64 references.
    F64,
    /// 32-bit signed integer: slots, experts, classes.
    I32,
    /// 64-bit signed integer: times and counters.
    I64,
    /// One byte, zero or one.
    Bool,
    /// One byte, 0 to 255: pixels. Bytes are moved and converted by `cast`; arithmetic is for other types.
    U8,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::Bool | DType::U8 => 1,
        }
    }

    /// Whether gradients can exist for this type.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::Bool => "bool",
            DType::U8 => "u8",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that can be an element of a tensor.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + PartialEq + fmt::Debug + 'static {
    /// The matching [`DType`].
    const DTYPE: DType;
}

macro_rules! element {
    ($($rust:ty => $dtype:ident),*) => {$(
        impl sealed::Sealed for $rust {}
        impl Element for $rust { const DTYPE: DType = DType::$dtype; }
    )*};
}
element!(f32 => F32, f64 => F64, i32 => I32, i64 => I64, bool => Bool, u8 => U8);

/// Largest tensor the engine accepts, in bytes: far above any real model, far below overflow.
const MAX_BYTES: usize = 1 << 40;

/// Highest rank the engine accepts.
pub(crate) const MAX_RANK: usize = 6;

/// Element type and shape of a tensor, row-major. A scalar has shape `[]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Extent of each axis, slowest first.
    pub shape: Vec<usize>,
}

impl TensorType {
    /// A type from its element type and shape.
    pub fn new(dtype: DType, shape: impl Into<Vec<usize>>) -> Self {
        Self { dtype, shape: shape.into() }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether the tensor has no elements. Types in a valid graph always have some.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the whole tensor.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Extent of the last axis; 1 for a scalar.
    pub(crate) fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Product of all axes but the last.
    pub(crate) fn rows(&self) -> usize {
        self.len() / self.cols().max(1)
    }

    /// The same element type with another shape.
    pub(crate) fn with(&self, shape: impl Into<Vec<usize>>) -> Self {
        Self::new(self.dtype, shape)
    }

    /// Fails, with what a tensor may be, for empty axes, excessive rank and sizes that no machine has.
    pub(crate) fn valid(&self) -> Result<(), String> {
        let bytes = self.shape.iter().try_fold(self.dtype.size(), |n, &axis| n.checked_mul(axis));
        if self.shape.len() > MAX_RANK || self.shape.contains(&0) || bytes.is_none_or(|b| b > MAX_BYTES) {
            return Err(format!("at most {MAX_RANK} axes, none of them 0, and at most {MAX_BYTES} bytes"));
        }
        Ok(())
    }

    /// Fails in the name of `op` unless a tensor can have this type.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        self.valid().map_err(|expected| Error::Op { op, expected, got: self.to_string() })
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_display() {
        let t = TensorType::new(DType::F32, [2, 3, 4]);
        assert_eq!((t.len(), t.bytes(), t.rows(), t.cols()), (24, 96, 6, 4));
        assert_eq!(t.to_string(), "f32[2, 3, 4]");
        assert_eq!(TensorType::new(DType::I64, []).rows(), 1);
    }

    #[test]
    fn impossible_shapes_are_errors() {
        for shape in [vec![0], vec![4, 0, 2], vec![usize::MAX, 2], vec![1 << 39, 1 << 39], vec![1; 7]] {
            assert!(TensorType::new(DType::F32, shape).check("input").is_err());
        }
    }
}
