//! How accurate products on a GPU are.

/// How products of f32 are computed on a GPU. Sums, norms, losses and the optimizer are f32 in all of them,
/// and so are, to its last bits, products of up to 2^22 multiplications and layers with up to 16 outputs
/// (routers and heads): there nothing is gained by rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// In f32, or on tensor cores from two tf32 parts of every number, 22 bits.
    F32,
    /// Operands rounded to tf32 (10 bits of mantissa), sums in f32.
    #[default]
    Tf32,
    /// Operands rounded to bf16 (7 bits of mantissa) where the library multiplies, to tf32 where our own
    /// kernel does; sums in f32.
    Bf16,
}

impl Precision {
    /// All of them.
    pub const ALL: [Precision; 3] = [Precision::F32, Precision::Tf32, Precision::Bf16];

    /// As in configs and on the command line.
    pub fn name(self) -> &'static str {
        ["f32", "tf32", "bf16"][self as usize]
    }
}
