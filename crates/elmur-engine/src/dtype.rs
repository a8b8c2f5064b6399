//! Element types and the Rust types behind them.

use std::fmt;

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
