//! Formats whose episodes are decoded whole: [`Recordings`], and the source that is made of them.
//!
//! Everything is decoded and checked once when the data is opened. Episodes stay in memory if all of them fit
//! there; otherwise they are decoded again when they are needed, and the last few are remembered.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use elmur_base::{FieldMut, Leaf, Space, Spaces};

use crate::dataset::{Dataset, read_episode};
use crate::episode::{Column, Episode};
use crate::error::{Error, Result};
use crate::format::{Header, checksum};
use crate::layout::{Layout, Outline, Part};
use crate::limits::Limits;
use crate::source::{Source, check_read};

/// Number of choices of an integer of which only the data tell how many there are.
pub(crate) const INFERRED: usize = i32::MAX as usize;

/// Episodes in files of another program.
pub(crate) trait Recordings: fmt::Debug + Send + Sync {
    /// Spaces of the episodes; integers of [`INFERRED`] choices have as many as the largest number in all
    /// episodes needs.
    fn spaces(&self) -> &Spaces;

    /// Notes on the data.
    fn metadata(&self) -> &BTreeMap<String, String>;

    /// Number of episodes.
    fn episodes(&self) -> usize;

    /// The file that an episode lies in, or the first of its files.
    fn file(&self, episode: usize) -> &Path;

    /// Decodes an episode. Without `pictures`, columns that are slow to decode may be left empty.
    fn load(&self, episode: usize, pictures: bool) -> Result<Episode>;
}

/// Opens recordings for reading: in memory if they fit there, else decoded on demand.
pub(crate) fn open(recordings: Box<dyn Recordings>, limits: &Limits) -> Result<Arc<dyn Source>> {
    let mut header = header(&*recordings)?;
    let (mut index, mut kept, mut held) = (Vec::new(), Some(Vec::new()), 0u64);
    let mut sizes = Sizes::of(&header.spaces);
    for i in 0..recordings.episodes() {
        let path = recordings.file(i);
        let state = state(path)?;
        let episode = recordings.load(i, true)?;
        if i == 0 {
            header.set_types(&episode.view());
        }
        header.check(&episode.view()).map_err(|fault| Error::episode(path, i, fault))?;
        sizes.include(&episode);
        let checksum = checksum(&episode.view(), &header.spaces);
        let outline = episode.outline(&header.layout());
        held = held.saturating_add(size(&episode));
        match &mut kept {
            Some(episodes) if held <= limits.memory => episodes.push(episode),
            _ => kept = None,
        }
        index.push(Indexed { state, outline, checksum });
    }
    header.spaces = sizes.narrowed(&header.spaces);
    if let Some(episodes) = kept {
        let checksums = index.iter().map(|episode| episode.checksum).collect();
        return Ok(Arc::new(Dataset::checked(header, episodes, checksums, 0)));
    }
    let (layout, memory, cache) = (header.layout(), limits.memory, Mutex::new(Cache::default()));
    Ok(Arc::new(Decoded { recordings, header, layout, index, memory, cache }))
}

/// The header of recordings, of which there must be some.
fn header(recordings: &dyn Recordings) -> Result<Header> {
    if recordings.episodes() == 0 {
        return Err(Error::Empty { path: recordings.metadata().get("source").map_or("data", |s| s).into() });
    }
    let (spaces, metadata) = (recordings.spaces().clone(), recordings.metadata().clone());
    Header::new(spaces, metadata).map_err(|problem| Error::file(recordings.file(0), problem))
}

/// The spaces of recordings with all numbers of choices, for which integers are read where they must be, but
/// no pictures.
pub(crate) fn narrowed_spaces(recordings: &dyn Recordings) -> Result<Spaces> {
    let spaces = header(recordings)?.spaces;
    let mut sizes = Sizes::of(&spaces);
    if !sizes.is_empty() {
        (0..recordings.episodes()).try_for_each(|i| recordings.load(i, false).map(|e| sizes.include(&e)))?;
    }
    Ok(sizes.narrowed(&spaces))
}

/// Size of a file and the time of its last change.
type State = (u64, Option<SystemTime>);

fn state(path: &Path) -> Result<State> {
    let about = fs::metadata(path).map_err(|e| Error::io(path, e))?;
    Ok((about.len(), about.modified().ok()))
}

/// Bytes of an episode in memory.
fn size(episode: &Episode) -> u64 {
    let columns = episode.observations.iter().chain(&episode.actions);
    let columns: usize = columns.map(|c| c.len() * c.view().element_type().size()).sum();
    (columns + 4 * episode.steps() + episode.imitate.as_ref().map_or(0, Vec::len)) as u64
}

/// The largest integer + 1 of every entry whose number of choices is inferred.
struct Sizes {
    observations: Vec<Vec<usize>>,
    actions: Vec<Vec<usize>>,
}

impl Sizes {
    fn of(spaces: &Spaces) -> Self {
        let sizes = |space: &Space| {
            let leaf = |leaf: &Leaf<'_>| match leaf {
                Leaf::Ints(sizes) if sizes.contains(&INFERRED) => vec![1; sizes.len()],
                _ => Vec::new(),
            };
            space.leaves().iter().map(leaf).collect()
        };
        Self { observations: sizes(&spaces.observation), actions: sizes(&spaces.action) }
    }

    fn is_empty(&self) -> bool {
        self.observations.iter().chain(&self.actions).all(Vec::is_empty)
    }

    fn include(&mut self, episode: &Episode) {
        let grow = |sizes: &mut [Vec<usize>], columns: &[Column]| {
            for (sizes, column) in sizes.iter_mut().zip(columns).filter(|(sizes, _)| !sizes.is_empty()) {
                let Column::I32(numbers) = column else { continue };
                let width = sizes.len();
                for (i, number) in numbers.iter().enumerate() {
                    let size = &mut sizes[i % width];
                    *size = usize::try_from(*number).map_or(*size, |number| (number + 1).max(*size));
                }
            }
        };
        grow(&mut self.observations, &episode.observations);
        grow(&mut self.actions, &episode.actions);
    }

    fn narrowed(&self, spaces: &Spaces) -> Spaces {
        fn narrow(space: &Space, sizes: &mut std::slice::Iter<'_, Vec<usize>>) -> Space {
            match space {
                Space::Tuple { parts } => {
                    Space::Tuple { parts: parts.iter().map(|part| narrow(part, sizes)).collect() }
                }
                space => match (space, sizes.next()) {
                    (Space::Discrete { n: INFERRED }, Some(found)) if found.len() == 1 => {
                        Space::Discrete { n: found[0] }
                    }
                    (Space::MultiDiscrete { sizes: known }, Some(found)) if found.len() == known.len() => {
                        let size = |(known, found): (&usize, &usize)| match *known {
                            INFERRED => *found,
                            known => known,
                        };
                        Space::MultiDiscrete { sizes: known.iter().zip(found).map(size).collect() }
                    }
                    (space, _) => space.clone(),
                },
            }
        }
        Spaces {
            observation: narrow(&spaces.observation, &mut self.observations.iter()),
            action: narrow(&spaces.action, &mut self.actions.iter()),
        }
    }
}

/// Recordings that are decoded when they are needed.
#[derive(Debug)]
struct Decoded {
    recordings: Box<dyn Recordings>,
    header: Header,
    layout: Layout,
    index: Vec<Indexed>,
    /// Bytes of decoded episodes that are remembered.
    memory: u64,
    cache: Mutex<Cache>,
}

#[derive(Debug)]
struct Indexed {
    state: State,
    outline: Outline,
    checksum: u32,
}

/// The episodes that were read last, the newest at the end.
#[derive(Debug, Default)]
struct Cache {
    episodes: VecDeque<(usize, Arc<Episode>)>,
    bytes: u64,
}

impl Cache {
    fn get(&mut self, number: usize) -> Option<Arc<Episode>> {
        let place = self.episodes.iter().position(|(other, _)| *other == number)?;
        let entry = self.episodes.remove(place)?;
        self.episodes.push_back(entry.clone());
        Some(entry.1)
    }

    fn put(&mut self, number: usize, episode: Arc<Episode>, limit: u64) {
        self.bytes += size(&episode);
        self.episodes.push_back((number, episode));
        while self.bytes > limit
            && let Some((_, oldest)) = self.episodes.pop_front()
        {
            self.bytes -= size(&oldest);
        }
    }
}

impl Decoded {
    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An episode from the cache or from its file, which must be as it was when the data was opened.
    fn decoded(&self, number: usize) -> Result<Arc<Episode>> {
        if let Some(episode) = self.cache().get(number) {
            return Ok(episode);
        }
        let (path, known) = (self.recordings.file(number), &self.index[number]);
        let changed = || {
            let problem =
                "changed while it was in use; leave datasets alone that are being read, and start again";
            Error::file(path, problem)
        };
        if state(path)? != known.state {
            return Err(changed());
        }
        let episode = self.recordings.load(number, true)?;
        let view = episode.view();
        if self.header.check(&view).is_err() || checksum(&view, &self.header.spaces) != known.checksum {
            return Err(changed());
        }
        let episode = Arc::new(episode);
        self.cache().put(number, Arc::clone(&episode), self.memory);
        Ok(episode)
    }
}

impl Source for Decoded {
    fn spaces(&self) -> &Spaces {
        &self.header.spaces
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    fn episodes(&self) -> usize {
        self.index.len()
    }

    fn outline(&self, episode: usize) -> Outline {
        self.index[episode].outline
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, part: Part, episode: usize, rows: Range<usize>, out: FieldMut<'_>) -> Result<()> {
        check_read(self, part, episode, &rows, &out)?;
        read_episode(&*self.decoded(episode)?, &self.layout, part, rows, out);
        Ok(())
    }

    fn checksum(&self, episode: usize) -> u32 {
        self.index[episode].checksum
    }
}
