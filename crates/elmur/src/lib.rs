//! ELMUR: policies with external layer memory, in Rust.
//!
//! This crate is the door: it re-exports the parts. The command line is the crate `elmur-cli`, pictures are
//! `elmur-plot`; neither is needed here.
//!
//! - [`base`]: spaces and values, files, statistics.
//! - [`engine`]: static compute graphs with autodiff that run without allocation.
//! - [`model`]: architectures, sessions that act, checkpoints.
//! - [`envs`]: environments and their experts. [`rng`]: random numbers that are the same everywhere. [`data`]: trajectories, crops and batches, files.
//! - [`train`]: trainer, runs, evaluation.

pub use elmur_base as base;
pub use elmur_data as data;
pub use elmur_engine as engine;
pub use elmur_engine::rng;
pub use elmur_envs as envs;
pub use elmur_model as model;
pub use elmur_train as train;

/// The README's Rust examples are run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
