//! Trajectories to learn from, in memory and on disk.
//!
//! - [`Episode`]: observations, actions and rewards, one column per leaf of a space. [`EpisodeRef`]: the
//!   same, borrowed.
//! - [`Dataset`]: checked episodes of the same spaces, from memory, an `.elmur` file or a folder of `.npz`
//!   files.
//! - [`Writer`], [`Reader`]: `.elmur` files, one episode at a time. `docs/dataset-format.md` specifies the
//!   format: every byte is covered by a checksum, and a writer that is killed loses at most the episode it
//!   was writing.
//! - [`collect`](mod@collect): demonstrations of scripted experts. [`wrap()`]: wrappers applied to a dataset.
//! - [`Sampler`]: which crops a batch is made of. [`Window`]: the numbers of a batch.
//! - [`read_npz`], [`write_npz`]: the layout of the published datasets.
//!
//! ```
//! use std::collections::BTreeMap;
//! use elmur_base::{Space, Spaces};
//! use elmur_data::{Column, Dataset, Episode, Writer};
//!
//! # let folder = std::env::temp_dir().join(format!("elmur-data-example-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder)?;
//! let spaces = Spaces { observation: Space::between(-1.0, 1.0, [2]), action: Space::Discrete { n: 3 } };
//! let metadata = BTreeMap::from([("env".to_owned(), "example".to_owned())]);
//! let path = folder.join("example.elmur");
//!
//! let mut writer = Writer::create(&path, &spaces, metadata)?;
//! writer.push(&Episode {
//!     observations: vec![Column::F32(vec![0.0, 0.5, -0.5, 1.0])], // two steps of two numbers
//!     actions: vec![Column::I32(vec![2, 0])],
//!     rewards: vec![0.0, 1.0],
//!     terminated: true,
//!     truncated: false,
//!     imitate: None,
//! })?;
//! writer.finish()?;
//!
//! let dataset = Dataset::open(&path)?;
//! assert_eq!(dataset.summary().returns.mean, 1.0);
//! assert_eq!(dataset.episode(0).rewards, [0.0, 1.0]);
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod collect;
mod dataset;
mod episode;
mod error;
mod format;
mod native;
mod npz;
mod sampler;
mod window;
mod wrap;

pub use dataset::{Dataset, Summary, read_npz, write_npz};
pub use episode::{Column, ColumnRef, ElementType, Episode, EpisodeRef};
pub use error::{Error, Fault, Result};
pub use native::{Reader, Writer};
pub use sampler::{Crop, Sampler};
pub use window::Window;
pub use wrap::wrap;
