//! `.elmur` files, one episode at a time: a reader for any stream, and a writer that loses at most one
//! episode when it is interrupted.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use elmur_base::{Spaces, files};

use crate::dataset::Dataset;
use crate::episode::{Episode, EpisodeRef};
use crate::error::{Error, Result};
use crate::format::{Aligned, HEAD, Head, Header, MAGIC, decode, encode};
use crate::indexed::{Indexed, index, index_sound};
use crate::layout::Layout;
use crate::source::Source;

/// What is said of episodes that a collection of another kind left.
pub(crate) const INTERRUPTED: &str = "an interrupted collection with other settings, seed or spaces; finish that one, \
                                      choose another name, or drop it with --force";
/// What is said of unfinished episodes where a writer is to begin anew.
pub(crate) const UNFINISHED: &str = "an interrupted writer's episodes; finish that collection with its own command, \
                                     choose another name, or drop them with --force";

/// Reads a stream of the `.elmur` format: an iterator of checked episodes.
#[derive(Debug)]
pub struct Reader<R> {
    source: R,
    path: PathBuf,
    header: Header,
    layout: Layout,
    /// Where the next record begins.
    offset: u64,
    episodes: usize,
    checksums: Vec<u32>,
    torn_bytes: u64,
    finished: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the header. Wrap files in a [`BufReader`].
    pub fn new(source: R) -> Result<Self> {
        Self::named(source, Path::new("stream"))
    }

    /// [`Reader::new`] with the name that errors call the stream by.
    pub(crate) fn named(mut source: R, path: &Path) -> Result<Self> {
        let (header, offset) = Header::read(&mut source, path)?;
        let (path, layout) = (path.to_owned(), header.layout());
        let checksums = Vec::new();
        Ok(Self {
            source,
            path,
            header,
            layout,
            offset,
            episodes: 0,
            checksums,
            torn_bytes: 0,
            finished: false,
        })
    }

    /// Observation and action spaces of the episodes.
    pub fn spaces(&self) -> &Spaces {
        &self.header.spaces
    }

    /// Notes on the dataset: environment, expert, seed, ...
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// After the last episode: size in bytes of a torn record at the end, left by a writer that was killed.
    pub fn torn_bytes(&self) -> u64 {
        self.torn_bytes
    }

    fn read(&mut self) -> Result<Option<Episode>> {
        let (path, number, offset) = (&self.path, self.episodes, self.offset);
        let damaged = |problem: String| Error::damaged(path, number, offset, problem);
        let head_bytes = Aligned::read(&mut self.source, HEAD as u64).map_err(|e| Error::io(path, e))?;
        self.torn_bytes = head_bytes.len() as u64;
        let Some(head) = Head::decode(&head_bytes, number).map_err(damaged)? else { return Ok(None) };
        let payload = Aligned::read(&mut self.source, head.payload_len).map_err(|e| Error::io(path, e))?;
        self.torn_bytes += payload.len() as u64;
        if (payload.len() as u64) < head.payload_len {
            return Ok(None);
        }
        let (episode, checksum) = decode(&payload, head, &self.header, &self.layout).map_err(damaged)?;
        self.header.check(&episode.view()).map_err(|fault| Error::episode(path, number, fault))?;
        self.checksums.push(checksum);
        self.episodes += 1;
        self.offset += self.torn_bytes;
        self.torn_bytes = 0;
        Ok(Some(episode))
    }

    /// All episodes in memory.
    pub(crate) fn into_dataset(mut self) -> Result<Dataset> {
        let episodes = self.by_ref().collect::<Result<Vec<_>>>()?;
        if episodes.is_empty() {
            return Err(Error::Empty { path: self.path });
        }
        Ok(Dataset::checked(self.header, episodes, self.checksums, self.torn_bytes))
    }
}

impl<R: Read> Iterator for Reader<R> {
    type Item = Result<Episode>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finished {
            return None;
        }
        let episode = self.read().transpose();
        self.finished = !matches!(episode, Some(Ok(_)));
        episode
    }
}

/// Writes an `.elmur` file, one episode at a time.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    /// Where a new file is written until it is finished; none when an old one grows in place.
    aside: Option<PathBuf>,
    /// Whether a file that is at `path` already may be replaced.
    replace: bool,
    file: File,
    header: Header,
    /// Where the next record begins; 0 while there is no header either, since the first episode decides what
    /// it says.
    end: u64,
    episodes: usize,
    /// What is wrong with the record that begins at `end`, if that is damaged.
    damage: Option<Error>,
}

impl Writer {
    /// Starts a new file. Episodes are written to `<path>.tmp`, which [`Writer::finish`] renames to `path`. A
    /// file that is there already is an error: see [`Writer::replace`].
    ///
    /// The `.tmp` file of an interrupted writer can be opened like any other and be continued by
    /// [`Writer::resume`]. One that holds episodes is an error here, and so is one that is not an `.elmur` file.
    pub fn create(
        path: impl Into<PathBuf>,
        spaces: &Spaces,
        metadata: BTreeMap<String, String>,
    ) -> Result<Self> {
        let mut writer = Self::aside(path.into(), spaces, metadata, false)?;
        if let Some((_, end)) = writer.begun()?
            && writer.size()? > end
        {
            return Err(Error::file(writer.place(), UNFINISHED));
        }
        writer.emptied()
    }

    /// [`Writer::create`] for a path that may hold a file already; that stays as it is until
    /// [`Writer::finish`] replaces it. A `<path>.tmp` file of an interrupted writer is emptied.
    pub fn replace(
        path: impl Into<PathBuf>,
        spaces: &Spaces,
        metadata: BTreeMap<String, String>,
    ) -> Result<Self> {
        Self::aside(path.into(), spaces, metadata, true)?.emptied()
    }

    /// [`Writer::create`] that continues the `<path>.tmp` file of an interrupted writer if it holds episodes of
    /// the same spaces and metadata; [`Writer::episodes`] says how many. A torn record at its end is cut off, and so
    /// is a damaged one with all that follow it: see [`Writer::damage`]. Where there is no such file, it starts anew.
    /// Episodes of other spaces or metadata and a file that cannot be read are errors, so that nothing is lost: see
    /// [`Writer::resume_replacing`].
    pub fn resume(
        path: impl Into<PathBuf>,
        spaces: &Spaces,
        metadata: BTreeMap<String, String>,
    ) -> Result<Self> {
        Self::aside(path.into(), spaces, metadata, false)?.continued()
    }

    /// [`Writer::resume`] for a path that may hold a file already, as [`Writer::replace`]. A `<path>.tmp` file
    /// of other spaces or metadata, or whose header is damaged, is emptied.
    pub fn resume_replacing(
        path: impl Into<PathBuf>,
        spaces: &Spaces,
        metadata: BTreeMap<String, String>,
    ) -> Result<Self> {
        Self::aside(path.into(), spaces, metadata, true)?.continued()
    }

    /// A writer on the locked file aside, whatever that holds.
    fn aside(
        path: PathBuf,
        spaces: &Spaces,
        metadata: BTreeMap<String, String>,
        replace: bool,
    ) -> Result<Self> {
        let header = Header::new(spaces.clone(), metadata).map_err(|problem| Error::file(&path, problem))?;
        if path.is_dir() {
            return Err(Error::file(&path, "a folder; give the name of a file"));
        }
        refuse_existing(&path, replace)?;
        let mut aside = path.clone().into_os_string();
        aside.push(".tmp");
        let aside = PathBuf::from(aside);
        let file =
            lock_at(&aside, OpenOptions::new().read(true).write(true).create(true).truncate(false), || {
                // A pipe there would make this wait for its other end.
                if fs::metadata(&aside).is_ok_and(|about| !about.is_file()) {
                    return Err(Error::file(&aside, "not a file; remove it, or choose another name"));
                }
                Ok(())
            })?;
        Ok(Self { path, aside: Some(aside), replace, file, header, end: 0, episodes: 0, damage: None })
    }

    fn emptied(mut self) -> Result<Self> {
        self.refuse_foreign()?;
        self.file.set_len(0).map_err(|e| Error::io(&self.path, e))?;
        Ok(self)
    }

    /// Name of the file that is written to.
    fn place(&self) -> &Path {
        self.aside.as_deref().unwrap_or(&self.path)
    }

    fn rewind(&mut self) -> Result<()> {
        self.file.rewind().map_err(|e| Error::io(self.place(), e))
    }

    /// Refuses a file that does not begin as `.elmur` files do.
    fn refuse_foreign(&mut self) -> Result<()> {
        self.rewind()?;
        let mut start = Vec::new();
        (&self.file)
            .take(MAGIC.len() as u64)
            .read_to_end(&mut start)
            .map_err(|e| Error::io(self.place(), e))?;
        if MAGIC.starts_with(&start) {
            return Ok(());
        }
        let problem = "expected an interrupted .elmur file or none, found another file; remove it, or choose \
                       another name";
        Err(Error::file(self.place(), problem))
    }

    fn size(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(|e| Error::io(self.place(), e))?.len())
    }

    /// The header of the file aside, and where its first record begins; none if the file ends before.
    fn begun(&mut self) -> Result<Option<(Header, u64)>> {
        self.refuse_foreign()?;
        self.rewind()?;
        match Header::read_if_whole(&mut BufReader::new(&self.file), self.place()) {
            Err(_) if self.replace => Ok(None),
            found => found,
        }
    }

    fn continued(mut self) -> Result<Self> {
        let Some((header, end)) = self.begun()? else { return self.emptied() };
        if (&header.spaces, &header.metadata) != (&self.header.spaces, &self.header.metadata) {
            if !self.replace && self.size()? > end {
                return Err(Error::file(self.place(), INTERRUPTED));
            }
            return self.emptied();
        }
        self.rewind()?;
        let (found, damage) = index_sound(&mut BufReader::new(&self.file), self.place())?;
        self.damage = damage;
        if found.records.is_empty() {
            return self.emptied();
        }
        self.file.set_len(found.end).map_err(|e| Error::io(self.place(), e))?;
        (self.header, self.end, self.episodes) = (found.header, found.end, found.records.len());
        Ok(self)
    }

    /// What was wrong with a record of the interrupted writer that [`Writer::resume`] goes on from, if one was damaged:
    /// it and what followed it are cut off.
    pub fn damage(&self) -> Option<&Error> {
        self.damage.as_ref()
    }

    /// Removes the last episodes of the file so that at most `episodes` are left. The file is read once to
    /// find where they end.
    pub fn truncate(&mut self, episodes: usize) -> Result<()> {
        if episodes >= self.episodes {
            return Ok(());
        }
        self.rewind()?;
        let found = index(&mut BufReader::new(&self.file).take(self.end), self.place())?;
        let Some(first) = found.records.get(episodes) else { return Ok(()) };
        // Without an episode there is no header either.
        let end = if episodes == 0 { 0 } else { first.begin() };
        self.file.set_len(end).map_err(|e| Error::io(self.place(), e))?;
        (self.end, self.episodes) = (end, episodes);
        Ok(())
    }

    /// Appends to a file in place. All of the file is read and checked, with bounded memory; a torn record at
    /// its end is cut off.
    pub fn append_to(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let file = lock_at(&path, OpenOptions::new().read(true).write(true), || {
            // A pipe would make this wait for its other end.
            if fs::metadata(&path).is_ok_and(|about| !about.is_file()) {
                return Err(Error::file(&path, "not a file; give the name of an .elmur file"));
            }
            Ok(())
        })?;
        let Indexed { header, records, end, .. } = index(&mut BufReader::new(&file), &path)?;
        let episodes = records.len();
        Ok(Self { path, aside: None, replace: false, file, header, end, episodes, damage: None })
    }

    /// Observation and action spaces that episodes must belong to.
    pub fn spaces(&self) -> &Spaces {
        &self.header.spaces
    }

    /// Notes on the dataset: environment, expert, seed, ...
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    /// Number of episodes in the file, those from before [`Writer::append_to`] or [`Writer::resume`]
    /// included.
    pub fn episodes(&self) -> usize {
        self.episodes
    }

    /// Checks and writes an [`Episode`] or [`EpisodeRef`]. After an error the file is as it was before.
    pub fn push<'a>(&mut self, episode: impl Into<EpisodeRef<'a>>) -> Result<()> {
        self.put(episode.into(), None).map(|_| ())
    }

    /// [`Writer::push`], unless the file would have more than `most` bytes then: false, and nothing is written.
    pub fn push_within<'a>(&mut self, episode: impl Into<EpisodeRef<'a>>, most: u64) -> Result<bool> {
        self.put(episode.into(), Some(most))
    }

    fn put(&mut self, episode: EpisodeRef<'_>, most: Option<u64>) -> Result<bool> {
        let mut bytes = Vec::new();
        if self.end == 0 {
            self.header.set_types(&episode);
        }
        self.header.check(&episode).map_err(|fault| Error::episode(&self.path, self.episodes, fault))?;
        if self.end == 0 {
            bytes = self.header.encode().map_err(|problem| Error::file(&self.path, problem))?;
        }
        let number = u32::try_from(self.episodes)
            .map_err(|_| Error::file(&self.path, "2^32 episodes are all a file can hold; begin another"))?;
        bytes.extend(encode(&episode, &self.header.spaces, &self.header.layout(), number));
        if most.is_some_and(|most| self.end + bytes.len() as u64 > most) {
            return Ok(false);
        }
        // What lies behind the last whole episode goes when the next one comes.
        let mut write = || -> std::io::Result<()> {
            self.file.set_len(self.end)?;
            self.file.seek(SeekFrom::Start(self.end))?;
            self.file.write_all(&bytes)
        };
        let written = write();
        if let Err(cause) = written {
            let _ = self.file.set_len(self.end);
            return Err(Error::io(&self.path, cause));
        }
        self.end += bytes.len() as u64;
        self.episodes += 1;
        Ok(true)
    }

    /// Stops writing. A new file is removed, and what was at its path before stays; a file that was appended
    /// to keeps the episodes written so far.
    pub fn discard(self) {
        if let Some(aside) = self.aside {
            let _ = fs::remove_file(aside);
        }
    }

    /// Syncs the file to disk and, if it is new, renames it to its path. A file without episodes is an error.
    pub fn finish(self) -> Result<()> {
        if self.episodes == 0 {
            let path = self.path.clone();
            self.discard();
            return Err(Error::Empty { path });
        }
        if self.aside.is_some() {
            refuse_existing(&self.path, self.replace)?;
        }
        let finish = || -> std::io::Result<()> {
            self.file.set_len(self.end)?;
            self.file.sync_all()?;
            if let Some(aside) = &self.aside {
                files::rename(aside, &self.path)?;
            }
            Ok(())
        };
        finish().map_err(|cause| Error::io(&self.path, cause))
    }
}

fn refuse_existing(path: &Path, replace: bool) -> Result<()> {
    if replace || !path.exists() {
        return Ok(());
    }
    Err(Error::file(path, "exists already; choose another name, or replace it with --force"))
}

impl Dataset {
    /// Reads the bytes of an `.elmur` file.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Reader::named(bytes, Path::new("bytes"))?.into_dataset()
    }

    /// Writes all episodes to a new `.elmur` file: see [`save`].
    pub fn save(&self, path: impl Into<PathBuf>) -> Result<()> {
        save(self, path)
    }
}

/// Writes all episodes of a source to an `.elmur` file, which appears at `path` when it is complete. A file
/// that is there already is an error. One episode is in memory at a time.
pub fn save(source: &dyn Source, path: impl Into<PathBuf>) -> Result<()> {
    let mut writer = Writer::create(path, source.spaces(), source.metadata().clone())?;
    for i in 0..source.episodes() {
        writer.push(&source.episode(i)?)?;
    }
    writer.finish()
}

/// Opens a file and locks it against a second writer, where the file system supports locks. `prepare` runs
/// before each try: a file that was renamed or removed before the lock was held is opened again.
pub(crate) fn lock_at(path: &Path, how: &OpenOptions, prepare: impl Fn() -> Result<()>) -> Result<File> {
    for _ in 0..100 {
        prepare()?;
        let file = how.open(path).map_err(|e| Error::io(path, e))?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            break;
        }
        if is_at(&file, path) {
            return Ok(file);
        }
    }
    Err(Error::file(path, "another process writes this file; wait for it, or choose another name"))
}

/// Whether this open file is the one that the path names now.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

#[cfg(not(unix))]
fn is_at(_: &File, _: &Path) -> bool {
    true
}

#[cfg(all(test, unix))]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Another writer renames its file to its final name between our opening and our locking it.
    #[test]
    fn a_lock_is_held_on_the_file_that_has_the_name_now() {
        let path = std::env::temp_dir().join(format!("elmur-data-lock-{}.tmp", std::process::id()));
        let finished = path.with_extension("elmur");
        let open = || OpenOptions::new().write(true).create(true).truncate(false).open(&path).unwrap();
        let file = open();
        assert!(is_at(&file, &path));
        fs::rename(&path, &finished).unwrap();
        assert!(!is_at(&file, &path));
        drop(open());
        assert!(!is_at(&file, &path));
        let tries = Cell::new(0);
        let prepare = || {
            tries.set(tries.get() + 1);
            Ok(())
        };
        let how = OpenOptions::new().write(true).clone();
        let locked = lock_at(&path, &how, prepare).unwrap();
        assert!(is_at(&locked, &path) && tries.get() == 1);
        assert!(lock_at(&path, &how, prepare).unwrap_err().to_string().contains("another process"));
        fs::remove_file(&path).unwrap();
        fs::remove_file(&finished).unwrap();
    }
}
