//! ELMUR: policies with external layer memory, in Rust.
//!
//! This crate is the door: it re-exports the parts and holds the `elmur` command line. The parts so far:
//! [`engine`], static compute graphs with autodiff that run without allocation, and [`model`], ELMUR itself: model, memory,
//! sessions and checkpoints.

pub use elmur_engine as engine;
pub use elmur_model as model;

/// The README's Rust examples are run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
