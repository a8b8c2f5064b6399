//! ELMUR: policies with external layer memory, in Rust.
//!
//! This crate is the door: it re-exports the parts and holds the `elmur` command line. The parts so far:
//! [`engine`], static compute graphs with autodiff that run without allocation.

pub use elmur_engine as engine;

/// The README's Rust examples are run as tests.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
