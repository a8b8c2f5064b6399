//! Static compute graphs for small models: built once, differentiated by rewriting, planned into one arena,
//! and run without allocation.
//!
//! - [`Graph`] is the builder: typed values, named parameters, inputs, states and outputs. Shape errors are
//!   found here, with the op's name, what it expected and what it got.
//! - [`Graph::gradients`] appends the backward pass; [`Graph::adamw`] the update.
//! - [`Store`] holds parameters and state; several programs share one without copying.
//! - [`Program`] is a graph compiled for a [`Device`]. On the CPU results have the same bits for any number
//!   of threads.
//! - [`gradcheck`] compares gradients with finite differences, for tests of models.

mod allocation;
mod autodiff;
mod bind;
mod buffer;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod dtype;
mod error;
mod fuse;
pub mod gradcheck;
mod graph;
mod lock;
mod op;
mod operand;
mod ops;
mod plan;
mod precision;
mod program;
mod readback;
mod rounding;
mod rows;
mod step;
mod store;
mod types;

pub use elmur_rng as rng;

pub use cpu::isa::Isa;
pub use cpu::pool::Pool;
#[cfg(feature = "cuda")]
pub use cuda::Gpu;
pub use device::Device;
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use graph::{Graph, Value};
pub use ops::activation::Activation;
pub use ops::attention::{Attention, AttentionMask, Qkv, Relative};
pub use ops::causal_conv1d::CausalConv;
pub use ops::conv::Conv2d;
pub use ops::conv1d::Conv1d;
pub use ops::experts::ExpertGroups;
pub use ops::loss::CrossEntropy;
pub use ops::lru::Blend;
pub use ops::lstm::Lstm;
pub use ops::norm::{Norm, NormKind};
pub use ops::optim::{AdamW, STEP_STATE};
pub use ops::selective_scan::{Scanned, SelectiveScan};
pub use precision::Precision;
pub use program::{Program, StepTime};
pub use readback::Readback;
pub use rounding::RoundedWeights;
pub use store::Store;
pub use types::TensorType;
