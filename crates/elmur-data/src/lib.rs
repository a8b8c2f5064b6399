//! Trajectories to learn from, in memory and on disk.
//!
//! - [`Episode`]: observations, actions and rewards, one column per leaf of a space. [`EpisodeRef`]: the
//!   same, borrowed.
//! - [`Source`]: the one way to read data, a range of steps at a time. [`Dataset`]: checked episodes in memory.
//!   [`open()`]: files and folders of any format, whatever their size; [`open_selected`]: some of the
//!   observations that they hold ([`Selection`], [`ObservationKey`]). [`EpisodeReader`]: episodes one after the
//!   other, each decoded once. [`Subset`], [`split`]: some of the episodes of a source. [`wrap()`]: wrappers
//!   applied to a source.
//! - [`Writer`], [`Reader`]: `.elmur` files, one episode at a time. `docs/dataset-format.md` specifies the
//!   format: every byte is covered by a checksum, and a writer that is killed loses at most the episode it
//!   was writing. [`PartsWriter`]: a folder of such files that is read as one dataset. [`NpzWriter`], [`write_npz`]: the layout of the published datasets.
//! - [`collect`](mod@collect): demonstrations of scripted experts.
//! - [`Sampler`]: which crops a batch is made of. [`Window`]: the numbers of a batch. [`Loader`]: batches read
//!   ahead on threads.
//!
//! ```
//! use std::collections::BTreeMap;
//! use elmur_base::{Space, Spaces};
//! use elmur_data::{Column, Episode, Source, Writer, open};
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
//!     labels: None,
//!     accepted: None,
//! })?;
//! writer.finish()?;
//!
//! let data = open(&path, None)?;
//! assert_eq!(data.summary()?.returns.mean, 1.0);
//! assert_eq!(data.episode(0)?.rewards, [0.0, 1.0]);
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod array;
pub mod collect;
mod d4rl;
mod dataset;
mod episode;
mod error;
mod fields;
mod format;
mod gymnasium;
mod hdf5;
mod indexed;
mod joined;
mod keys;
mod layout;
mod lerobot;
mod limits;
mod loader;
mod minari;
mod mp4;
mod native;
mod npy;
mod npz;
mod npz_write;
mod open;
mod packed;
mod parquet_file;
mod pictures;
mod recordings;
mod robomimic;
mod sampler;
mod select;
mod source;
mod stream;
mod subset;
mod video;
mod window;
mod wrap;

pub use dataset::Dataset;
pub use episode::{Column, ColumnRef, Episode, EpisodeRef};
pub use error::{Error, Fault, Result};
pub use indexed::ElmurFile;
pub use joined::PartsWriter;
pub use keys::{ObservationKey, Selection};
pub use layout::{ColumnType, ElementType, Layout, Outline, Part};
pub use limits::Limits;
pub use loader::{Batch, Buffer, Loader, Request};
pub use native::{Reader, Writer, save};
pub use npz_write::{NpzWriter, write_npz};
pub use open::{EpisodeReader, is_data, open, open_selected, open_with, spaces_of};
pub use sampler::{Crop, Sampler};
pub use source::{Source, Summary, check_read, chunks, earlier_fingerprint, episode_checksum};
pub use stream::{OwnEpisodes, Stream};
pub use subset::{Subset, split};
pub use window::Window;
pub use wrap::{WrappedSource, wrap};
