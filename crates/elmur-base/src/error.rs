//! The base crate's error type.

use std::path::{Path, PathBuf};

/// Result with the error type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with spaces and files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Numbers that do not belong to a space, or a space that is not valid.
    #[error("{what}: expected {expected}, got {got}")]
    Space {
        /// The numbers or the space in question.
        what: &'static str,
        /// What was expected.
        expected: String,
        /// What was found.
        got: String,
    },
    /// A file that could not be read or written.
    #[error("{path}: {cause}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        cause: std::io::Error,
    },
    /// A file with the wrong contents.
    #[error("{path}: {problem}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with the file and what to do about it.
        problem: String,
    },
}

impl Error {
    /// An [`Error::Space`].
    pub fn space(what: &'static str, expected: impl ToString, got: impl ToString) -> Self {
        Error::Space { what, expected: expected.to_string(), got: got.to_string() }
    }

    /// An [`Error::Io`].
    pub fn io(path: &Path, cause: std::io::Error) -> Self {
        Error::Io { path: path.to_owned(), cause }
    }

    /// An [`Error::File`].
    pub fn file(path: &Path, problem: impl ToString) -> Self {
        Error::File { path: path.to_owned(), problem: problem.to_string() }
    }
}
