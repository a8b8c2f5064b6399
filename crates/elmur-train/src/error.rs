//! The training crate's error type.

/// Result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong in training and evaluation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model, its session or its checkpoint.
    #[error(transparent)]
    Model(#[from] elmur_model::Error),
    /// The environment.
    #[error(transparent)]
    Env(#[from] elmur_envs::Error),
    /// The dataset.
    #[error(transparent)]
    Data(elmur_data::Error),
    /// A setting that makes no run.
    #[error("config `{key}`: expected {expected}, got {got}")]
    Config {
        /// Dotted key.
        key: String,
        /// What would have been accepted.
        expected: String,
        /// What was given.
        got: String,
    },
    /// A `key=value` whose value does not fit.
    #[error("config `{key}`: {problem} (given: {text})")]
    Override {
        /// Dotted key.
        key: String,
        /// What is wrong with the value.
        problem: String,
        /// The override.
        text: String,
    },
    /// A key that does not exist.
    #[error("config `{key}`: no such key{hint}")]
    UnknownKey {
        /// The key as given.
        key: String,
        /// The nearest key or the keys there are.
        hint: String,
    },
    /// Model and data do not belong together.
    #[error("{what}: expected {expected}, got {got}; {remedy}")]
    Mismatch {
        /// What was compared.
        what: &'static str,
        /// What was expected.
        expected: String,
        /// What the data has.
        got: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A file or folder of a run.
    #[error(transparent)]
    Base(#[from] elmur_base::Error),
    /// The loss is no longer a number, or out of all proportion.
    #[error(
        "training diverged at batch {batch}: loss {loss}, gradient norm {gradient_norm}; last good checkpoint: {checkpoint}; \
         try a lower train.lr or train.clip"
    )]
    Diverged {
        /// Batch.
        batch: u64,
        /// Loss of its last optimizer step.
        loss: f64,
        /// Norm of that step's gradient before clipping.
        gradient_norm: f64,
        /// Folder, or "none".
        checkpoint: String,
    },
    /// Stopped on request, in the middle of something that is not kept.
    #[error("stopped")]
    Stopped,
}

impl Error {
    pub(crate) fn config(key: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Self {
        Error::Config { key: key.into(), expected: expected.into(), got: got.to_string() }
    }

    /// A file or folder of a run that could not be read or written.
    pub fn io(path: &std::path::Path, cause: std::io::Error) -> Self {
        elmur_base::Error::io(path, cause).into()
    }

    /// A file or folder of a run that is not what it should be.
    pub fn file(path: &std::path::Path, problem: impl ToString) -> Self {
        elmur_base::Error::file(path, problem).into()
    }
}

impl From<elmur_data::Error> for Error {
    fn from(error: elmur_data::Error) -> Self {
        match error {
            elmur_data::Error::Stopped => Error::Stopped,
            error => Error::Data(error),
        }
    }
}

impl From<elmur_engine::Error> for Error {
    fn from(error: elmur_engine::Error) -> Self {
        Error::Model(error.into())
    }
}
