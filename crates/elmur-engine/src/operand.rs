//! Operands of kernels: an address and a type.

use crate::types::TensorType;

/// One operand of a kernel: an address on the device that runs the kernel, and the type of what lies there.
#[derive(Debug, Clone)]
pub(crate) struct Operand {
    /// Null for an output that nobody reads.
    pub ptr: *mut u8,
    pub ty: TensorType,
}
