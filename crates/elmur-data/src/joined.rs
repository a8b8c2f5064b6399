//! A folder of `.elmur` files read as one dataset, and the writer of such a folder: data that travels in pieces.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use elmur_base::{FieldMut, Spaces};

use crate::episode::EpisodeRef;
use crate::error::{Error, Result};
use crate::format::Header;
use crate::indexed::ElmurFile;
use crate::layout::{Layout, Outline, Part};
use crate::native::{Reader, Writer};
use crate::npz;
use crate::source::{Source, check_read};

/// The folder's `.elmur` files, by the number at the end of their names.
pub(crate) fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    npz::list_files(folder, "elmur")
}

/// Opens one `.elmur` file, or several as one dataset: in memory if the numbers of all take at most `memory` bytes
/// there.
pub(crate) fn open_files(place: &Path, files: &[PathBuf], memory: u64) -> Result<Arc<dyn Source>> {
    if let [path] = files
        && let Some(source) = read_small(path, memory)?
    {
        return Ok(source);
    }
    let indexed = files.iter().map(ElmurFile::open).collect::<Result<Vec<_>>>()?;
    let bytes = indexed.iter().fold(0u64, |sum, file| sum.saturating_add(file.plain_bytes()));
    let mut sources: Vec<Arc<dyn Source>> = Vec::new();
    for (path, file) in files.iter().zip(indexed) {
        sources.push(match bytes > memory {
            true => Arc::new(file),
            false => Arc::new(reader(path)?.into_dataset()?),
        });
    }
    match sources.len() {
        1 => Ok(Arc::clone(&sources[0])),
        _ => Ok(Arc::new(Joined::new(place, files, sources)?)),
    }
}

/// A file in memory if it is small and has no pictures, whose size in memory only an index tells.
fn read_small(path: &Path, memory: u64) -> Result<Option<Arc<dyn Source>>> {
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    let size = file.metadata().map_err(|e| Error::io(path, e))?.len();
    let (header, _) = Header::read(&mut BufReader::new(file), path)?;
    if size > memory || header.layout().observations.iter().any(|column| column.frame.is_some()) {
        return Ok(None);
    }
    Ok(Some(Arc::new(reader(path)?.into_dataset()?)))
}

/// A reader of a file that, if the file grows meanwhile, reads it as far as it was when it was opened.
fn reader(path: &Path) -> Result<Reader<impl Read + use<>>> {
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    let size = file.metadata().map_err(|e| Error::io(path, e))?.len();
    Reader::named(BufReader::new(file).take(size), path)
}

/// The episodes of several sources, one source after the other.
#[derive(Debug)]
struct Joined {
    sources: Vec<Arc<dyn Source>>,
    /// Number of episodes up to the end of each source.
    ends: Vec<usize>,
}

impl Joined {
    /// Sources of these files, which must have the same spaces and element types.
    fn new(place: &Path, files: &[PathBuf], sources: Vec<Arc<dyn Source>>) -> Result<Self> {
        let Some(first) = sources.first() else { return Err(Error::Empty { path: place.to_owned() }) };
        for (path, source) in files.iter().zip(&sources) {
            if (source.spaces(), source.layout()) != (first.spaces(), first.layout()) {
                let problem = format!(
                    "episodes of other spaces than {}; keep the files of one dataset only in this folder",
                    files[0].display()
                );
                return Err(Error::file(path, problem));
            }
        }
        let counts = sources.iter().map(|source| source.episodes());
        let ends = counts.scan(0, |end, count| {
            *end += count;
            Some(*end)
        });
        Ok(Self { ends: ends.collect(), sources })
    }

    /// The source of an episode, and the episode's number there.
    fn find(&self, episode: usize) -> (&dyn Source, usize) {
        let i = self.ends.partition_point(|end| *end <= episode);
        let before = if i == 0 { 0 } else { self.ends[i - 1] };
        (&*self.sources[i], episode - before)
    }
}

impl Source for Joined {
    fn spaces(&self) -> &Spaces {
        self.sources[0].spaces()
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        self.sources[0].metadata()
    }

    fn episodes(&self) -> usize {
        self.ends[self.ends.len() - 1]
    }

    fn outline(&self, episode: usize) -> Outline {
        let (source, episode) = self.find(episode);
        source.outline(episode)
    }

    fn layout(&self) -> &Layout {
        self.sources[0].layout()
    }

    fn read(&self, part: Part, episode: usize, rows: Range<usize>, out: FieldMut<'_>) -> Result<()> {
        check_read(self, part, episode, &rows, &out)?;
        let (source, episode) = self.find(episode);
        source.read(part, episode, rows, out)
    }

    fn checksum(&self, episode: usize) -> u32 {
        let (source, episode) = self.find(episode);
        source.checksum(episode)
    }

    fn reading_threads(&self) -> usize {
        self.sources[0].reading_threads()
    }

    fn torn_bytes(&self) -> u64 {
        self.sources.iter().map(|source| source.torn_bytes()).sum()
    }
}

/// Writes a folder of `.elmur` files, `part_0.elmur`, `part_1.elmur`, ..., of at most so many bytes each. Every
/// file is a dataset of its own, and [`crate::open()`] reads the folder as one.
#[derive(Debug)]
pub struct PartsWriter {
    folder: PathBuf,
    most: u64,
    spaces: Spaces,
    metadata: BTreeMap<String, String>,
    /// Files that are complete.
    written: Vec<PathBuf>,
    /// The file that grows, if it has episodes.
    writer: Option<Writer>,
}

impl PartsWriter {
    /// Starts a new folder. A folder that is there already must be empty.
    pub fn create(
        folder: impl Into<PathBuf>,
        spaces: &Spaces,
        metadata: BTreeMap<String, String>,
        most: u64,
    ) -> Result<Self> {
        let folder = folder.into();
        if fs::read_dir(&folder).is_ok_and(|mut entries| entries.next().is_some()) || folder.is_file() {
            return Err(Error::file(&folder, "exists already; choose another name, or an empty folder"));
        }
        fs::create_dir_all(&folder).map_err(|e| Error::io(&folder, e))?;
        Ok(Self { folder, most, spaces: spaces.clone(), metadata, written: Vec::new(), writer: None })
    }

    /// Checks and writes an episode, to the next file if it does not fit into this one. An episode that fits into
    /// no file is an error.
    pub fn push<'a>(&mut self, episode: impl Into<EpisodeRef<'a>>) -> Result<()> {
        let episode = episode.into();
        if let Some(writer) = &mut self.writer
            && writer.push_within(episode.clone(), self.most)?
        {
            return Ok(());
        }
        self.end_part()?;
        let path = self.folder.join(format!("part_{}.elmur", self.written.len()));
        let writer = self.writer.insert(Writer::create(path, &self.spaces, self.metadata.clone())?);
        if writer.push_within(episode, self.most)? {
            return Ok(());
        }
        let problem = format!("an episode of more than {} bytes; allow larger files", self.most);
        Err(Error::file(&self.folder, problem))
    }

    fn end_part(&mut self) -> Result<()> {
        if let Some(writer) = self.writer.take() {
            writer.finish()?;
            self.written.push(self.folder.join(format!("part_{}.elmur", self.written.len())));
        }
        Ok(())
    }

    /// Completes the last file, and says which there are.
    pub fn finish(mut self) -> Result<Vec<PathBuf>> {
        self.end_part()?;
        match self.written.is_empty() {
            true => Err(Error::Empty { path: self.folder }),
            false => Ok(self.written),
        }
    }

    /// Removes what was written.
    pub fn discard(self) {
        if let Some(writer) = self.writer {
            writer.discard();
        }
        self.written.iter().for_each(|path| drop(fs::remove_file(path)));
        let _ = fs::remove_dir(&self.folder);
    }
}
