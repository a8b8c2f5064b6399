//! Datasets: episodes of the same spaces in memory.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use elmur_base::{FieldMut, Spaces};

use crate::episode::{ColumnRef, Episode, EpisodeRef};
use crate::error::{Error, Result};
use crate::format::{Header, checksum};
use crate::layout::{Layout, Outline, Part};
use crate::source::{Source, check_read};

/// One or more episodes of the same spaces in memory, all of them checked. Anything that learns takes it as a
/// [`Source`], without any file.
pub struct Dataset {
    header: Header,
    layout: Layout,
    episodes: Vec<Episode>,
    checksums: Vec<u32>,
    torn_bytes: u64,
}

impl Dataset {
    /// Makes a dataset of episodes in memory. A leaf must have the same element type in all of them.
    pub fn from_episodes(
        spaces: Spaces,
        metadata: BTreeMap<String, String>,
        episodes: Vec<Episode>,
    ) -> Result<Self> {
        let path = Path::new("memory");
        let mut header = Header::new(spaces, metadata).map_err(|problem| Error::file(path, problem))?;
        let Some(first) = episodes.first() else { return Err(Error::Empty { path: path.to_owned() }) };
        header.set_types(&first.view());
        let mut checksums = Vec::with_capacity(episodes.len());
        for (i, episode) in episodes.iter().enumerate() {
            header.check(&episode.view()).map_err(|fault| Error::episode(path, i, fault))?;
            checksums.push(checksum(&episode.view(), &header.spaces));
        }
        Ok(Self::checked(header, episodes, checksums, 0))
    }

    /// A dataset of episodes that were checked against the header, with their checksums.
    pub(crate) fn checked(
        header: Header,
        episodes: Vec<Episode>,
        checksums: Vec<u32>,
        torn_bytes: u64,
    ) -> Self {
        Self { layout: header.layout(), header, episodes, checksums, torn_bytes }
    }

    /// Reads all episodes of a source into memory.
    pub fn load(source: &dyn Source) -> Result<Self> {
        let episodes = (0..source.episodes()).map(|i| source.episode(i)).collect::<Result<_>>()?;
        let loaded = Self::from_episodes(source.spaces().clone(), source.metadata().clone(), episodes)?;
        Ok(Self { torn_bytes: source.torn_bytes(), ..loaded })
    }

    /// Number of episodes.
    pub fn len(&self) -> usize {
        self.episodes.len()
    }

    /// Always false: a dataset has at least one episode.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Episode `i`, borrowed; `i` must be below [`Dataset::len`].
    pub fn episode(&self, i: usize) -> EpisodeRef<'_> {
        self.episodes[i].view()
    }

    /// All episodes in order.
    pub fn episodes(&self) -> impl ExactSizeIterator<Item = EpisodeRef<'_>> + Clone {
        self.episodes.iter().map(Episode::view)
    }

    /// Observation and action spaces of the episodes.
    pub fn spaces(&self) -> &Spaces {
        &self.header.spaces
    }

    /// Notes on the dataset: environment, expert, seed, ...
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }
}

impl Source for Dataset {
    fn spaces(&self) -> &Spaces {
        &self.header.spaces
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    fn episodes(&self) -> usize {
        self.episodes.len()
    }

    fn outline(&self, episode: usize) -> Outline {
        self.episodes[episode].outline(&self.layout)
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, part: Part, episode: usize, rows: Range<usize>, out: FieldMut<'_>) -> Result<()> {
        check_read(self, part, episode, &rows, &out)?;
        read_episode(&self.episodes[episode], &self.layout, part, rows, out);
        Ok(())
    }

    fn checksum(&self, episode: usize) -> u32 {
        self.checksums[episode]
    }

    fn reading_threads(&self) -> usize {
        1
    }

    fn torn_bytes(&self) -> u64 {
        self.torn_bytes
    }
}

/// Copies rows of an episode in memory, for a call that [`check_read`] has passed.
pub(crate) fn read_episode(
    episode: &Episode,
    layout: &Layout,
    part: Part,
    rows: Range<usize>,
    out: FieldMut<'_>,
) {
    let width = layout.column(part).map_or(0, |(_, width)| width);
    let range = rows.start * width..rows.end * width;
    let column = match (part, out) {
        (Part::Observation(i), out) => (episode.observations[i].view(), out),
        (Part::Action(i), out) => (episode.actions[i].view(), out),
        (Part::Label(i), out) => (episode.labels.as_ref().unwrap_or(&episode.actions)[i].view(), out),
        (Part::Reward, out) => (ColumnRef::F32(&episode.rewards), out),
        (Part::Imitate, FieldMut::Bool(out)) => {
            return match &episode.imitate {
                Some(imitate) => out.copy_from_slice(&imitate[range]),
                None => out.fill(true),
            };
        }
        (Part::Accepted, FieldMut::Bool(out)) => {
            return match &episode.accepted {
                Some(accepted) => out.copy_from_slice(&accepted[range]),
                None => out.fill(false),
            };
        }
        (Part::Imitate | Part::Accepted, _) => return,
    };
    match column {
        (ColumnRef::F32(x), FieldMut::F32(out)) => out.copy_from_slice(&x[range]),
        (ColumnRef::I32(x), FieldMut::I32(out)) => out.copy_from_slice(&x[range]),
        (ColumnRef::U8(x), FieldMut::U8(out)) => out.copy_from_slice(&x[range]),
        _ => {}
    }
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset").field("header", &self.header).field("episodes", &self.len()).finish()
    }
}
