//! The ground floor: what two or more parts of elmur need and none of them owns.
//!
//! - [`Space`], [`Spaces`], [`Leaf`]: what observations and actions may be. [`Values`], [`ValuesMut`], [`Row`]: their
//!   numbers, lying flat. [`Field`]: one of the things a recorded step consists of; [`FieldMut`]: room for its numbers.
//! - [`files`]: files that are written aside and renamed, and small files that are read whole.
//! - [`Statistics`]: mean, standard error and extremes of some numbers.
//! - [`nearest`]: what a misspelt name may have meant.
//! - [`Stop`]: a request to stop, shared between threads and signal handlers.

mod error;
mod field;
pub mod files;
mod nearest;
mod space;
mod stats;
mod stop;

pub use error::{Error, Result};
pub use field::{Field, FieldMut};
pub use nearest::{did_you_mean, nearest};
pub use space::{Kind, Leaf, Row, Space, Spaces, Values, ValuesMut, Widths, bound_at};
pub use stats::Statistics;
pub use stop::Stop;
