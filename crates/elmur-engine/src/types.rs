//! Types of tensors: an element type and a shape.

use std::fmt;

pub(crate) use crate::dtype::{DType, Element};
use crate::error::{Error, Result};

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
