//! Accuracy of matrix products on a GPU.

/// How matrix products of f32 are computed on a GPU. Sums, norms, losses and the optimizer always use f32.
///
/// Products of at most 2^22 multiplications and layers of at most 16 outputs (routers and heads) are computed
/// to f32 accuracy in every mode, because reduced precision saves no time there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// f32 accuracy: in f32, or on tensor cores with every operand split into two tf32 numbers, 22 bits
    /// together.
    F32,
    /// Operands are rounded to tf32 (10 bits of mantissa), sums are f32.
    #[default]
    Tf32,
    /// Operands are rounded to bf16 (7 bits of mantissa) in products by cuBLASLt and to tf32 in products by
    /// our own kernel; sums are f32.
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
