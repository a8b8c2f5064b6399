//! ELMUR: a transformer policy whose every layer owns a small external memory.
//!
//! - [`config`] and [`presets`]: what a model is made of; every column of the paper's table by name.
//! - [`segments`]: training and evaluation of whole segments.
//! - [`session`]: acting step by step, any number of episodes side by side; [`memory`]: what they remember, as a value.
//! - [`checkpoint`]: parameters and config on disk.
//! - [`published`], [`golden`]: weights and traces of the published Python code.
//! - [`theory`]: the paper's retention formulas.

pub mod checkpoint;
pub mod config;
mod error;
pub mod golden;
pub mod init;
pub mod memory;
mod net;
pub mod presets;
pub mod published;
pub mod segments;
pub mod session;
pub mod tensors;
pub mod theory;

pub use checkpoint::Checkpoint;
pub use config::ModelConfig;
pub use error::{Error, Result};
