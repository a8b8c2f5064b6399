//! The Python module `elmur._elmur`: policies, data, environments and training for the Python package `elmur`.
//!
//! What touches Python lies here and nothing else: arrays are converted once on the way in and handed over on the way
//! out (`arrays.rs`), the interpreter is released while Rust works, and work that takes long runs on a thread of its own
//! while the calling thread hears signals and calls back (`background.rs`).

mod arrays;
mod background;
mod dataset;
mod policy;
mod rows;
mod training;

use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

create_exception!(
    elmur,
    ElmurError,
    PyValueError,
    "What the library refuses, with what was expected and what came."
);

/// An error of the library as a Python exception.
fn fail(error: impl std::fmt::Display) -> PyErr {
    ElmurError::new_err(error.to_string())
}

/// An argument that is not what it should be.
fn refuse(argument: &str, expected: impl std::fmt::Display, got: impl std::fmt::Display) -> PyErr {
    ElmurError::new_err(format!("{argument}: expected {expected}, got {got}"))
}

/// The compiled part of the package `elmur`.
#[pymodule(gil_used = false)]
mod _elmur {
    #[pymodule_export]
    use super::ElmurError;
    #[pymodule_export]
    use super::dataset::{Dataset, Episodes, Recorder};
    #[pymodule_export]
    use super::policy::{Policy, Snapshot, policy_from_parts, snapshot_from_bytes};
    #[pymodule_export]
    use super::rows::{Rows, environments};
    #[pymodule_export]
    use super::training::{collect_player, policies, preset_config, presets, train};

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
