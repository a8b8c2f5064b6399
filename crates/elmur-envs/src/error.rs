//! The environment crate's error type.

/// Result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with an environment.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting that makes no environment.
    #[error("environment `{key}`: expected {expected}, got {got}")]
    Config {
        /// Which setting.
        key: &'static str,
        /// What it may be.
        expected: String,
        /// What it was.
        got: String,
    },
    /// Numbers that do not belong to a space, or a space that makes no sense.
    #[error(transparent)]
    Base(#[from] elmur_base::Error),
    /// A trace that cannot be read.
    #[error("{}: {cause}; expected a trace of a POPGym task (.json or .json.gz)", path.display())]
    Trace {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong.
        cause: String,
    },
    /// A step of a row whose episode has ended, where rows do not begin the next one by themselves.
    #[error("row {row}: its episode has ended; reset the row before stepping it again")]
    Ended {
        /// The row.
        row: usize,
    },
    /// A step without a running episode.
    #[error("step after the end of an episode: call reset first")]
    Finished,
}
