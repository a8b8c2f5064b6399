//! The one way to read data: [`Source`], which every file format implements.
//!
//! A format tells what it knows from its index ([`Outline`], checksums) and reads ranges of rows of one column
//! ([`Part`]). Padding, shifting and converting are the work of [`crate::Window`], so that a format need not
//! know how training uses it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use elmur_base::{FieldMut, Spaces, Statistics};
use serde::Serialize;

use crate::episode::{Column, Episode, EpisodeRef};
use crate::error::{Error, Result};
use crate::format::{self, Fnv};
use crate::layout::{ColumnType, Layout, Outline, Part};

/// Episodes of the same spaces that can be read a range of steps at a time, from memory or from disk.
///
/// A source is shared by threads that read at once. Everything that it hands out has been checked against its
/// spaces, or is checked while it is read. Episode numbers must be below [`Source::episodes`].
pub trait Source: fmt::Debug + Send + Sync {
    /// Observation and action spaces of the episodes.
    fn spaces(&self) -> &Spaces;

    /// Notes on the data: environment, expert, seed, ...
    fn metadata(&self) -> &BTreeMap<String, String>;

    /// Number of episodes, at least 1.
    fn episodes(&self) -> usize;

    /// What the index knows of an episode without reading its numbers.
    fn outline(&self, episode: usize) -> Outline;

    /// Element type and width of every column, the same for all episodes. Bytes stay bytes.
    fn layout(&self) -> &Layout;

    /// Copies rows of one column of an episode, as recorded, to `out`, which has the type that
    /// [`Source::layout`] says (f32 for rewards, bool for marks) and room for exactly these rows.
    /// [`check_read`] finds callers that ask for more.
    fn read(&self, part: Part, episode: usize, rows: Range<usize>, out: FieldMut<'_>) -> Result<()>;

    /// A checksum of an episode's numbers and flags: the CRC-32 that the `.elmur` format keeps with every
    /// record.
    ///
    /// Unless a source says otherwise, the episode is read each time to compute it, and one that cannot be
    /// read has the checksum 0. Sources that are slow to read keep what [`episode_checksum`] gives when they
    /// are opened.
    fn checksum(&self, episode: usize) -> u32 {
        self.episode(episode).map_or(0, |episode| episode_checksum(&episode, self.spaces()))
    }

    /// Number of threads that are worth reading with: one for data in memory, more where reading waits for a
    /// disk or a decoder.
    fn reading_threads(&self) -> usize {
        4
    }

    /// Size in bytes of a torn record at the end of a file, left by a writer that was killed.
    fn torn_bytes(&self) -> u64 {
        0
    }

    /// Number of steps of an episode, at least 1.
    fn steps(&self, episode: usize) -> usize {
        self.outline(episode).steps
    }

    /// A checksum of all episodes in their order. It covers every number, flag and element type, but neither
    /// bounds of spaces nor metadata, and does not depend on the format that the episodes are kept in.
    fn fingerprint(&self) -> u64 {
        let mut hash = Fnv::default();
        for episode in 0..self.episodes() {
            hash.update(&self.checksum(episode).to_le_bytes());
            hash.update(&(self.steps(episode) as u64).to_le_bytes());
        }
        let Layout { observations, actions, .. } = self.layout();
        observations.iter().chain(actions).for_each(|column| hash.update(column.element.name().as_bytes()));
        hash.finish()
    }

    /// Reads a whole episode into memory, to save, convert or look at it.
    fn episode(&self, episode: usize) -> Result<Episode> {
        let outline = self.outline(episode);
        let columns = |part: fn(usize) -> Part, types: &[ColumnType]| -> Result<Vec<Column>> {
            let column = |(i, column): (usize, &ColumnType)| {
                let rows = outline.rows(part(i));
                let mut data = Column::zeros(column.element, rows.saturating_mul(column.width));
                self.read(part(i), episode, 0..rows, data.as_mut())?;
                Ok(data)
            };
            types.iter().enumerate().map(column).collect()
        };
        let mut rewards = vec![0.0; outline.steps];
        self.read(Part::Reward, episode, 0..outline.steps, FieldMut::F32(&mut rewards))?;
        let mut imitate = outline.marked.then(|| vec![false; outline.steps]);
        if let Some(imitate) = &mut imitate {
            self.read(Part::Imitate, episode, 0..outline.steps, FieldMut::Bool(imitate))?;
        }
        let mut accepted = outline.tied.then(|| vec![false; outline.steps * self.layout().choices]);
        if let Some(accepted) = &mut accepted {
            self.read(Part::Accepted, episode, 0..outline.steps, FieldMut::Bool(accepted))?;
        }
        let labels = match outline.labelled {
            true => Some(columns(Part::Label, &self.layout().actions)?),
            false => None,
        };
        Ok(Episode {
            observations: columns(Part::Observation, &self.layout().observations)?,
            actions: columns(Part::Action, &self.layout().actions)?,
            rewards,
            terminated: outline.terminated,
            truncated: outline.truncated,
            imitate,
            labels,
            accepted,
        })
    }

    /// Bytes that the numbers of all episodes take without packing.
    fn plain_bytes(&self) -> u64 {
        let bytes = |i: usize| format::plain_len(self.layout(), self.outline(i));
        (0..self.episodes()).map(bytes).sum::<u128>().try_into().unwrap_or(u64::MAX)
    }

    /// Computes counts and statistics, reading all rewards and marks a few steps at a time.
    fn summary(&self) -> Result<Summary> {
        let (mut steps, mut imitated, mut terminated, mut truncated) = (0, 0, 0, 0);
        let (mut returns, mut lengths) = (Vec::new(), Vec::new());
        let (mut rewards, mut marks) = (vec![0.0; CHUNK], vec![false; CHUNK]);
        for episode in 0..self.episodes() {
            let outline = self.outline(episode);
            let mut total = 0.0;
            for rows in chunks(outline.steps, 1) {
                let rewards = &mut rewards[..rows.len()];
                self.read(Part::Reward, episode, rows.clone(), FieldMut::F32(rewards))?;
                rewards.iter().for_each(|reward| total += f64::from(*reward));
                let marks = &mut marks[..rows.len()];
                marks.fill(true);
                if outline.marked {
                    self.read(Part::Imitate, episode, rows, FieldMut::Bool(marks))?;
                }
                imitated += marks.iter().filter(|mark| **mark).count();
            }
            steps += outline.steps;
            terminated += usize::from(outline.terminated);
            truncated += usize::from(outline.truncated);
            returns.push(total);
            lengths.push(outline.steps as f64);
        }
        Ok(Summary {
            episodes: self.episodes(),
            steps,
            returns: Statistics::of(returns),
            lengths: Statistics::of(lengths),
            imitated_share: imitated as f64 / steps as f64,
            terminated,
            truncated,
        })
    }
}

/// Counts and statistics of a source of episodes.
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

/// Numbers that are read at once where a whole column might not fit in memory.
pub(crate) const CHUNK: usize = 1 << 16;

/// Rows of a column of `width` numbers per row, in ranges of about 65,536 numbers.
pub fn chunks(rows: usize, width: usize) -> impl Iterator<Item = Range<usize>> {
    let each = (CHUNK / width.max(1)).max(1);
    (0..rows).step_by(each).map(move |start| start..rows.min(start + each))
}

/// Checks a call of [`Source::read`]: that episode, column and rows exist, and that `out` has their type and
/// size. Formats call it first, so that none reads beyond what it has indexed.
pub fn check_read(
    source: &(impl Source + ?Sized),
    part: Part,
    episode: usize,
    rows: &Range<usize>,
    out: &FieldMut<'_>,
) -> Result<()> {
    let fail = |expected: String, got: String| Err(Error::Part { part, expected, got });
    if episode >= source.episodes() {
        return fail(format!("an episode below {}", source.episodes()), episode.to_string());
    }
    let Some((element, width)) = source.layout().column(part) else {
        return fail("a leaf of the spaces".to_owned(), "a number beyond them".to_owned());
    };
    let have = source.outline(episode).rows(part);
    if rows.start > rows.end || rows.end > have {
        return fail(format!("rows among the {have} of episode {episode}"), format!("{rows:?}"));
    }
    if out.type_name() != element {
        return fail(element.to_owned(), out.type_name().to_owned());
    }
    let room = rows.len().saturating_mul(width);
    if out.len() != room {
        return fail(format!("room for {room} numbers, [{}, {width}]", rows.len()), out.len().to_string());
    }
    Ok(())
}

/// The checksum of an [`Episode`] or [`EpisodeRef`] of these spaces that [`Source::checksum`] tells.
pub fn episode_checksum<'a>(episode: impl Into<EpisodeRef<'a>>, spaces: &Spaces) -> u32 {
    format::checksum(&episode.into(), spaces)
}

/// The checksum that runs of earlier versions noted of their data: it reads all of it, so that it is computed
/// only to recognise the data of such a run.
pub fn earlier_fingerprint(source: &dyn Source) -> Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    for i in 0..source.episodes() {
        hasher.update(&format::encode_plain(&source.episode(i)?.view(), source.spaces(), i as u32));
    }
    Ok(hasher.finalize())
}
