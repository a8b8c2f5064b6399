//! The CPU executor and what CPU kernels are built from: thread pool, vector dispatch, matrix products. The
//! kernels themselves live beside their ops.

pub(crate) mod exec;
pub(crate) mod float;
pub(crate) mod gemm;
pub(crate) mod isa;
pub(crate) mod normal;
pub(crate) mod simd;

pub(crate) use elmur_pool as pool;
