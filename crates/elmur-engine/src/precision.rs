//! Accuracy of matrix products.

/// How matrix products of f32 are computed on a GPU, and on a CPU that has a matrix unit (AMX). Sums, norms, losses and
/// the optimizer always use f32, and so do all products on other CPUs.
///
/// Products of at most 2^22 multiplications and layers of at most 16 outputs (routers and heads) are computed
/// to f32 accuracy in every mode, because reduced precision saves no time there; so are convolutions on a CPU, which
/// do not use its matrix unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// f32 accuracy: in f32, on tensor cores with every operand split into two tf32 numbers, 22 bits together, or on a
    /// CPU's matrix unit with every operand split into three bf16 numbers.
    F32,
    /// Operands are rounded to tf32 (10 bits of mantissa) on a GPU and to two bf16 numbers, 16 bits together, on a
    /// CPU's matrix unit; sums are f32.
    #[default]
    Tf32,
    /// Operands are rounded to bf16 (7 bits of mantissa) in products by cuBLASLt and to tf32 in products by
    /// our own kernel; sums are f32. On a CPU as [`Precision::Tf32`].
    Bf16,
}

impl Precision {
    /// All precisions, from the most to the least accurate.
    pub const ALL: [Precision; 3] = [Precision::F32, Precision::Tf32, Precision::Bf16];

    /// Name of the precision in configs and on the command line.
    pub fn name(self) -> &'static str {
        ["f32", "tf32", "bf16"][self as usize]
    }
}
