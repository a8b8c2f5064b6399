//! The model crate's error type.

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
        /// What would have been accepted.
        expected: String,
        /// What was given.
        got: String,
    },
    /// A file that could not be read or written, or whose contents are not what they should be.
    #[error(transparent)]
    Base(#[from] elmur_base::Error),
    /// Data that does not fit its policy.
    #[error("{what}: expected {expected}, got {got}")]
    Input {
        /// The argument in question.
        what: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What was given.
        got: String,
    },
}

impl Error {
    pub(crate) fn io(path: &std::path::Path, cause: std::io::Error) -> Self {
        elmur_base::Error::io(path, cause).into()
    }

    pub(crate) fn file(path: &std::path::Path, problem: impl ToString) -> Self {
        elmur_base::Error::file(path, problem).into()
    }

    pub(crate) fn input(what: &'static str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Error::Input { what, expected: expected.into(), got: got.into() }
    }
}
