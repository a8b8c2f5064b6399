//! Datasets: episodes of the same spaces, in memory or in a file.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use elmur_base::{Spaces, Statistics};
use memmap2::Mmap;
use serde::Serialize;

use crate::episode::{Episode, EpisodeRef};
use crate::error::{Error, Result};
use crate::format::{Aligned, Header, Index, Layout, Shape, encode};
use crate::native::Writer;
use crate::npz;

/// Files up to this size are read into memory, larger ones are mapped.
const READ_UP_TO: u64 = 1 << 30;

/// One or more episodes of the same spaces, all of them checked.
pub struct Dataset {
    header: Header,
    episodes: Episodes,
    torn_bytes: u64,
}

enum Episodes {
    Memory(Vec<Episode>),
    File { bytes: Bytes, layout: Layout, places: Vec<(Range<usize>, Shape)> },
}

enum Bytes {
    Read(Aligned),
    Mapped(Mmap),
}

impl Dataset {
    /// Opens an `.elmur` file, or a folder of `.npz` files ([`crate::read_npz`], spaces inferred).
    ///
    /// Every checksum and every number is checked once. Files up to 1 GiB are read into memory, larger ones
    /// are mapped: see [`Dataset::map`] for what that asks of other programs. A torn record at the end is
    /// left out and reported by [`Dataset::torn_bytes`]; any other damage is an error.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let about = fs::metadata(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::file(path, "no such dataset; collect one with `elmur collect`, or correct the path")
            }
            _ => Error::io(path, e),
        })?;
        if about.is_dir() {
            return read_npz(path, None);
        }
        if about.len() > READ_UP_TO {
            return Self::map(path);
        }
        let mut file = File::open(path).map_err(|e| Error::io(path, e))?;
        let bytes = Aligned::read_all(&mut file, about.len() as usize).map_err(|e| Error::io(path, e))?;
        Self::new(Bytes::Read(bytes), path)
    }

    /// Opens an `.elmur` file of any size without reading it into memory: the system loads and drops its
    /// pages as needed.
    ///
    /// While the dataset is open no program may shorten or overwrite the file: that would end this process
    /// (SIGBUS) or change numbers that were checked. Appending to the file is safe, and so is replacing it by
    /// renaming another, as [`Writer::create`] does.
    pub fn map(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        // SAFETY: the map is read only, and every byte pattern is a valid u8, i32 and f32, so that even a
        // file that changes against the contract above shows other numbers; flags, lengths and counts are
        // kept apart.
        let bytes = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, e))?;
        Self::new(Bytes::Mapped(bytes), path)
    }

    /// Reads the bytes of an `.elmur` file.
    pub fn from_bytes(mut bytes: &[u8]) -> Result<Self> {
        let (path, len) = (Path::new("bytes"), bytes.len());
        let bytes = Aligned::read_all(&mut bytes, len).map_err(|e| Error::io(path, e))?;
        Self::new(Bytes::Read(bytes), path)
    }

    fn new(bytes: Bytes, path: &Path) -> Result<Self> {
        let Index { header, layout, episodes: places, torn_bytes } = Index::of(bytes.get(), path)?;
        if places.is_empty() {
            return Err(Error::Empty { path: path.to_owned() });
        }
        Ok(Self { header, episodes: Episodes::File { bytes, layout, places }, torn_bytes })
    }

    /// Makes a dataset of episodes in memory. A leaf must have the same element type in all of them.
    pub fn from_episodes(
        spaces: Spaces,
        metadata: BTreeMap<String, String>,
        episodes: Vec<Episode>,
    ) -> Result<Self> {
        Self::from_named(spaces, metadata, episodes, |_| PathBuf::from("memory"))
    }

    /// [`Self::from_episodes`], with the place each came from.
    pub(crate) fn from_named(
        spaces: Spaces,
        metadata: BTreeMap<String, String>,
        episodes: Vec<Episode>,
        path: impl Fn(usize) -> PathBuf,
    ) -> Result<Self> {
        let mut header = Header::new(spaces, metadata).map_err(|problem| Error::file(&path(0), problem))?;
        let Some(first) = episodes.first() else { return Err(Error::Empty { path: path(0) }) };
        header.set_types(&first.view());
        for (i, episode) in episodes.iter().enumerate() {
            header.check(&episode.view()).map_err(|fault| Error::episode(&path(i), i, fault))?;
        }
        Ok(Self { header, episodes: Episodes::Memory(episodes), torn_bytes: 0 })
    }

    /// Writes all episodes to an `.elmur` file, which appears at `path` when it is complete.
    pub fn save(&self, path: impl Into<PathBuf>) -> Result<()> {
        let mut writer = Writer::create(path, self.spaces(), self.metadata().clone())?;
        self.episodes().try_for_each(|episode| writer.push(episode))?;
        writer.finish()
    }

    /// Number of episodes.
    pub fn len(&self) -> usize {
        match &self.episodes {
            Episodes::Memory(episodes) => episodes.len(),
            Episodes::File { places, .. } => places.len(),
        }
    }

    /// Always false: a dataset has at least one episode.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Episode `i`, borrowed; `i` must be below [`Dataset::len`].
    pub fn episode(&self, i: usize) -> EpisodeRef<'_> {
        match &self.episodes {
            Episodes::Memory(episodes) => episodes[i].view(),
            Episodes::File { bytes, layout, places } => {
                let (place, shape) = &places[i];
                shape.view(&bytes.get()[place.clone()], layout)
            }
        }
    }

    /// All episodes in order.
    pub fn episodes(&self) -> impl ExactSizeIterator<Item = EpisodeRef<'_>> + Clone {
        (0..self.len()).map(|i| self.episode(i))
    }

    /// Observation and action spaces of the episodes.
    pub fn spaces(&self) -> &Spaces {
        &self.header.spaces
    }

    /// Notes on the dataset: environment, expert, seed, ...
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Size in bytes of a torn record at the end of the file, left by a writer that was killed.
    pub fn torn_bytes(&self) -> u64 {
        self.torn_bytes
    }

    /// A checksum of all episodes, which does not depend on the file that they are in.
    pub fn fingerprint(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        for (i, episode) in self.episodes().enumerate() {
            hasher.update(&encode(&episode, self.spaces(), i as u32));
        }
        hasher.finalize()
    }

    /// Computes counts and statistics of the episodes.
    pub fn summary(&self) -> Summary {
        let count = |f: fn(&EpisodeRef<'_>) -> bool| self.episodes().filter(|e| f(e)).count();
        let steps: usize = self.episodes().map(|e| e.steps()).sum();
        let imitated: usize = self.episodes().map(|e| e.imitated_steps()).sum();
        Summary {
            episodes: self.len(),
            steps,
            returns: Statistics::of(self.episodes().map(|e| e.episode_return())),
            lengths: Statistics::of(self.episodes().map(|e| e.steps() as f64)),
            imitated_share: imitated as f64 / steps as f64,
            terminated: count(|e| e.terminated),
            truncated: count(|e| e.truncated),
        }
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset").field("header", &self.header).field("episodes", &self.len()).finish()
    }
}

impl Bytes {
    fn get(&self) -> &[u8] {
        match self {
            Bytes::Read(bytes) => bytes,
            Bytes::Mapped(bytes) => bytes,
        }
    }
}

/// Reads a folder of `.npz` files, in the order of the numbers in their names.
///
/// Without `spaces` they are inferred: integer observations become `MultiDiscrete` with the largest value + 1
/// of the folder as sizes, bytes with three axes pixels, floats an unbounded `Box`; integer actions (T,)
/// become `Discrete`, (T, k) `MultiDiscrete`. With `spaces` numbers are converted where nothing is lost;
/// bytes stay bytes in [`elmur_base::Space::Bytes`], are pixels (b / 255) in a box that ends at 1, and plain
/// numbers in others.
pub fn read_npz(folder: impl AsRef<Path>, spaces: Option<Spaces>) -> Result<Dataset> {
    let npz::Recordings { spaces, metadata, episodes, paths } = npz::read(folder.as_ref(), spaces)?;
    Dataset::from_named(spaces, metadata, episodes, |i| paths[i].clone())
}

/// Writes a folder of `.npz` files, without final observations, metadata and the cause of an episode's end,
/// which the layout has no place for. A key holds numbers of one type, so that spaces that mix integers and
/// floats are an error; and so is a folder that holds `.npz` files already. Files are written aside and
/// renamed.
pub fn write_npz(folder: impl AsRef<Path>, dataset: &Dataset) -> Result<()> {
    npz::write(folder.as_ref(), dataset.spaces(), dataset.episodes())
}

/// Counts and statistics of a dataset.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Number of episodes.
    pub episodes: usize,
    /// Number of steps of all episodes.
    pub steps: usize,
    /// Statistics of the returns of episodes.
    pub returns: Statistics,
    /// Statistics of the numbers of steps of episodes.
    pub lengths: Statistics,
    /// Share of steps whose action is worth imitating.
    pub imitated_share: f64,
    /// Number of episodes whose task had ended.
    pub terminated: usize,
    /// Number of episodes that were cut off.
    pub truncated: usize,
}
