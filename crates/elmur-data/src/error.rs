//! The data crate's error type.

use std::path::{Path, PathBuf};

use elmur_base::Field;

use crate::layout::Part;

/// Result with the error type of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with a dataset.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file that could not be read or written, or that is not what it should be.
    #[error(transparent)]
    Base(#[from] elmur_base::Error),
    /// A file that is damaged from some episode on.
    #[error(
        "{path}: episode {episode} at byte {offset}: {problem}; restore the file from a copy, or cut it to \
         {offset} bytes to keep the episodes before",
        path = path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Number of the episode, from 0.
        episode: usize,
        /// Byte at which the record of the episode begins.
        offset: u64,
        /// What is wrong with the record.
        problem: String,
    },
    /// An episode that does not fit the spaces.
    #[error("{path}: episode {episode}: {fault}", path = path.display())]
    Episode {
        /// File that the episode was read from or was to be written to.
        path: PathBuf,
        /// Number of the episode, from 0.
        episode: usize,
        /// What is wrong with the episode.
        fault: Fault,
    },
    /// A field that a dataset does not have, or not in the type or size that was asked for.
    #[error("{field}: expected {expected}, got {got}")]
    Field {
        /// The field.
        field: Field,
        /// What can be had.
        expected: String,
        /// What was asked for.
        got: String,
    },
    /// A column that a source does not have, or not in the rows, type or size that were asked for.
    #[error("{part}: expected {expected}, got {got}")]
    Part {
        /// The column.
        part: Part,
        /// What can be had.
        expected: String,
        /// What was asked for.
        got: String,
    },
    /// A choice of episodes that makes no source.
    #[error("{what}: expected {expected}, got {got}")]
    Choice {
        /// What was chosen.
        what: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What was given.
        got: String,
    },
    /// An error of the environment that demonstrations are collected in.
    #[error(transparent)]
    Env(#[from] elmur_envs::Error),
    /// A collection was stopped on request.
    #[error("stopped")]
    Stopped,
    /// A dataset without a complete episode.
    #[error("{path}: no whole episode; collect at least one", path = path.display())]
    Empty {
        /// File or folder of the dataset.
        path: PathBuf,
    },
}

/// What is wrong with an episode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: expected {expected}, got {got}; {remedy}")]
pub struct Fault {
    /// Which column, step and entry.
    pub what: String,
    /// What was expected.
    pub expected: String,
    /// What was found.
    pub got: String,
    /// What the user can do about it.
    pub remedy: &'static str,
}

impl Fault {
    /// As a result, to be returned at once.
    pub(crate) fn new<T>(
        what: impl Into<String>,
        expected: impl Into<String>,
        got: impl ToString,
        remedy: &'static str,
    ) -> Result<T, Fault> {
        Err(Fault { what: what.into(), expected: expected.into(), got: got.to_string(), remedy })
    }
}

impl Error {
    pub(crate) fn io(path: &Path, cause: std::io::Error) -> Self {
        elmur_base::Error::io(path, cause).into()
    }

    pub(crate) fn file(path: &Path, problem: impl ToString) -> Self {
        elmur_base::Error::file(path, problem).into()
    }

    pub(crate) fn damaged(path: &Path, episode: usize, offset: u64, problem: impl Into<String>) -> Self {
        Error::Damaged { path: path.to_owned(), episode, offset, problem: problem.into() }
    }

    pub(crate) fn field(field: Field, expected: impl ToString, got: impl ToString) -> Self {
        Error::Field { field, expected: expected.to_string(), got: got.to_string() }
    }

    pub(crate) fn episode(path: &Path, episode: usize, fault: Fault) -> Self {
        Error::Episode { path: path.to_owned(), episode, fault }
    }
}
