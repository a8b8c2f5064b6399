//! The model crate's error type.

use std::path::PathBuf;

/// Result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with a model, a session or a checkpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The engine refused something.
    #[error(transparent)]
    Engine(#[from] elmur_engine::Error),
    /// A config value that makes no model.
    #[error("config `{key}`: expected {expected}, got {got}")]
    Config {
        /// Dotted key.
        key: String,
        /// What it may be.
        expected: String,
        /// What it was.
        got: String,
    },
    /// A file could not be read or written.
    #[error("{path}: {cause}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// A file's contents are not what they should be.
    #[error("{path}: {problem}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it and what to do.
        problem: String,
    },
    /// Data handed to a session that does not fit its model.
    #[error("{what}: expected {expected}, got {got}")]
    Input {
        /// Which argument.
        what: &'static str,
        /// What it may be.
        expected: String,
        /// What it was.
        got: String,
    },
}

impl Error {
    pub(crate) fn io(path: &std::path::Path, cause: std::io::Error) -> Self {
        Error::Io { path: path.to_owned(), cause }
    }

    pub(crate) fn file(path: &std::path::Path, problem: impl Into<String>) -> Self {
        Error::File { path: path.to_owned(), problem: problem.into() }
    }

    pub(crate) fn input(what: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Error::Input { what, expected: expected.into(), got: got.into() }
    }
}
