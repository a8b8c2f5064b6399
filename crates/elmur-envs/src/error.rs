//! The environment crate's error type.

/// Result with the error type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with an environment.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting that no environment can be made with.
    #[error("environment `{key}`: expected {expected}, got {got}")]
    Config {
        /// Name of the setting.
        key: String,
        /// What was expected.
        expected: String,
        /// What was found.
        got: String,
    },
    /// Numbers that do not belong to a space, or a space that is not valid.
    #[error(transparent)]
    Base(#[from] elmur_base::Error),
    /// A trace file that cannot be read.
    #[error("{}: {cause}; expected a trace of a POPGym task (.json or .json.gz)", path.display())]
    Trace {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong with the file.
        cause: String,
    },
    /// A step of a row whose episode has ended, with [`Autoreset::Disabled`](crate::Autoreset::Disabled).
    #[error("row {row}: its episode has ended; reset the row before stepping it again")]
    Ended {
        /// Number of the row.
        row: usize,
    },
    /// A step without a running episode.
    #[error("step after the end of an episode: call reset first")]
    Finished,
    /// An episode that cannot go on because the process that played it has died or does not answer. Nothing
    /// else is lost: a reset begins the episode anew.
    #[error("the episode was lost: {cause}")]
    Lost {
        /// What happened to the process.
        cause: String,
    },
    /// A worker that cannot be started, refuses what is asked or does not keep to the protocol.
    #[error("{name}: {cause}")]
    Worker {
        /// Name of the environment.
        name: String,
        /// What went wrong, in the worker's own words where it has some.
        cause: String,
    },
    /// An error of an environment that is not part of this crate.
    #[error("{0}")]
    Foreign(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl Error {
    /// An [`Error::Config`].
    pub fn config(key: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Self {
        Error::Config { key: key.into(), expected: expected.into(), got: got.to_string() }
    }

    /// Whether the episode can be begun anew: [`Error::Lost`].
    pub fn is_lost(&self) -> bool {
        matches!(self, Error::Lost { .. })
    }

    /// An [`Error::Foreign`]: any error, or a message, of an environment of your own.
    pub fn foreign(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::Foreign(cause.into())
    }
}
