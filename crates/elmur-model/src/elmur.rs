//! ELMUR: a transformer whose every layer owns a small external memory.
//!
//! - [`config`]: what a model is made of. `layers`: one function per sub-layer. `stream`: the architecture
//!   built from them, whole segments and single steps. `validate`, `size`: what is refused.
//! - [`published`]: names and layout of the published Python code's parameters. [`theory`]: the paper's
//!   retention formulas.

pub mod config;
mod layers;
pub mod published;
mod size;
mod stream;
pub mod theory;
mod validate;

pub use config::Elmur;
pub use layers::{anchor_state, memory_state};
