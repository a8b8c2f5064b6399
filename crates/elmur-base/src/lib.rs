//! The ground floor: what two or more parts of elmur need and none of them owns.
//!
//! - [`Space`], [`Spaces`], [`Leaf`]: what observations and actions may be. [`Values`], [`ValuesMut`],
//!   [`Row`]: their numbers in flat slices of floats, integers and bytes.
//! - [`Field`]: one of the things that a recorded step consists of. [`FieldMut`]: a slice to write its
//!   numbers to.
//! - [`files`]: atomic writes, and reads of small files.
//! - [`Statistics`]: mean, standard error and extremes of a list of numbers.
//! - [`nearest`], [`did_you_mean`]: suggestions for misspelt names.
//! - [`Describe`]: what settings do, from the doc comments of their types; [`describe_all`] lists it.
//! - [`Stop`]: a request to stop, shared between threads and signal handlers.

pub mod describe;
mod error;
mod field;
pub mod files;
mod nearest;
mod space;
mod stats;
mod stop;

pub use describe::{Describe, Description, describe_all, description_of};
pub use elmur_derive::Describe;
pub use error::{Error, Result};
pub use field::{Discount, Field, FieldMut, StepWeights};
pub use nearest::{did_you_mean, nearest};
pub use space::{Kind, Leaf, Row, Space, Spaces, Values, ValuesMut, Widths, bound_at};
pub use stats::Statistics;
pub use stop::Stop;
