//! Writing folders of `.npz` files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use elmur_base::{Leaf, Space, Spaces, files};
use flate2::Compression;
use flate2::write::DeflateEncoder;
use rawzip::{CompressionMethod, ZipArchiveWriter};

use crate::episode::{ColumnRef, EpisodeRef};
use crate::error::{Error, Result};
use crate::keys::ObservationKey;
use crate::layout::ElementType;
use crate::native::{INTERRUPTED, UNFINISHED, lock_at};
use crate::npy::{FINAL, SEVERAL};
use crate::npz::list;
use crate::source::Source;

/// What names of MIKASA-Robo's environments begin with.
const ROBOT: &str = "mikasa-";
/// Name of the cameras in the data published for them.
const RGB: &str = "rgb";
/// Name of the file in the folder aside that is locked while a writer is at work. It holds the spaces and metadata of
/// a collection that can be continued.
const LOCK: &str = ".lock";
/// Most bytes that are read of it.
const MOST_NOTES: u64 = 16 << 20;
/// Name of an episode's file in the folder aside while it is written.
const PART: &str = ".part";

/// Writes a folder of `.npz` files, one episode at a time: the layout of the published datasets. It has no
/// place for metadata. An episode that was not terminated is read back as cut off. The observation after the
/// last action, where there is one, is an array of its own, `final_obs`.
///
/// Files are written to the folder `<name>.tmp`, which [`NpzWriter::finish`] renames. What an interrupted
/// writer left there is continued by [`NpzWriter::resume`]; [`NpzWriter::create`] refuses what that could continue and
/// removes what it could not. A second writer at the same time is an error.
#[derive(Debug)]
pub struct NpzWriter {
    folder: PathBuf,
    aside: PathBuf,
    /// Whether a folder of `.npz` files that is there already may be replaced.
    replace: bool,
    /// Held open because it is locked.
    lock: Option<File>,
    spaces: Spaces,
    /// Names and shapes of the observations, if they have names.
    keys: Option<Vec<ObservationKey>>,
    /// Whether the layout is that of the published robot data.
    robot: bool,
    episodes: usize,
}

impl NpzWriter {
    /// Starts a folder of episodes of these spaces. A folder that is there already must be empty: see
    /// [`NpzWriter::replace`].
    pub fn create(folder: impl Into<PathBuf>, spaces: &Spaces) -> Result<Self> {
        Self::aside(folder.into(), spaces, false)
    }

    /// [`NpzWriter::create`] for a folder that may hold `.npz` files already, and nothing else. They stay as
    /// they are until [`NpzWriter::finish`] replaces the folder.
    pub fn replace(folder: impl Into<PathBuf>, spaces: &Spaces) -> Result<Self> {
        Self::aside(folder.into(), spaces, true)
    }

    /// [`NpzWriter::create`] and [`NpzWriter::with_metadata`] that go on after the episodes of an interrupted writer of
    /// the same spaces and metadata, if there are some in `<name>.tmp`; [`NpzWriter::episodes`] says how many. Episodes
    /// of other spaces or metadata are an error, so that they are not lost: see [`NpzWriter::resume_replacing`].
    pub fn resume(
        folder: impl Into<PathBuf>,
        spaces: &Spaces,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self> {
        Self::locked(folder.into(), spaces, false)?.continued(metadata)
    }

    /// [`NpzWriter::resume`] for a folder that may hold `.npz` files already, as [`NpzWriter::replace`]. Episodes of
    /// other spaces or metadata in `<name>.tmp` are removed.
    pub fn resume_replacing(
        folder: impl Into<PathBuf>,
        spaces: &Spaces,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self> {
        Self::locked(folder.into(), spaces, true)?.continued(metadata)
    }

    fn aside(folder: PathBuf, spaces: &Spaces, replace: bool) -> Result<Self> {
        let mut writer = Self::locked(folder, spaces, replace)?;
        if !replace && writer.episodes > 0 && !writer.noted()?.is_empty() {
            return Err(Error::file(&writer.aside, UNFINISHED));
        }
        writer.truncate(0)?;
        writer.note("")?;
        Ok(writer)
    }

    /// A writer on the locked folder aside, whatever episodes that holds.
    fn locked(folder: PathBuf, spaces: &Spaces, replace: bool) -> Result<Self> {
        spaces.validate()?;
        refuse_existing(&folder, replace)?;
        let aside = with_ending(&folder, ".tmp");
        let lock = locked(&aside)?;
        let episodes = list(&aside)?.len();
        let writer = Self {
            folder,
            aside,
            replace,
            lock: Some(lock),
            spaces: spaces.clone(),
            keys: None,
            robot: false,
            episodes,
        };
        if let Err(error) = writer.restore().and_then(|()| refuse_existing(&writer.folder, replace)) {
            if episodes == 0 {
                writer.discard();
            }
            return Err(error);
        }
        Ok(writer)
    }

    /// Goes on after the episodes aside if they are of these spaces and metadata.
    fn continued(mut self, metadata: &BTreeMap<String, String>) -> Result<Self> {
        let notes = serde_json::to_string(&(&self.spaces, metadata))
            .map_err(|e| Error::file(&self.folder, e.to_string()))?;
        if self.noted()? != notes.as_bytes() {
            if !self.replace && self.episodes > 0 {
                return Err(Error::file(&self.aside, INTERRUPTED));
            }
            self.truncate(0)?;
        }
        // Numbers follow each other from 0 on: what lies behind a gap is written again.
        if let Some(gap) = (0..self.episodes).find(|number| !self.file_of(*number).is_file()) {
            self.truncate(gap)?;
        }
        self.note(&notes)?;
        Ok(self.with_metadata(metadata))
    }

    /// What the locked file says of the episodes aside: nothing where they cannot be continued.
    fn noted(&self) -> Result<Vec<u8>> {
        let mut notes = Vec::new();
        if let Some(mut lock) = self.lock.as_ref() {
            let path = self.aside.join(LOCK);
            lock.rewind().map_err(|e| Error::io(&path, e))?;
            lock.take(MOST_NOTES).read_to_end(&mut notes).map_err(|e| Error::io(&path, e))?;
        }
        Ok(notes)
    }

    /// Writes what the folder aside is to hold into the locked file.
    fn note(&mut self, notes: &str) -> Result<()> {
        let path = self.aside.join(LOCK);
        let Some(lock) = &mut self.lock else { return Ok(()) };
        let mut write = || -> std::io::Result<()> {
            lock.set_len(0)?;
            lock.seek(SeekFrom::Start(0))?;
            lock.write_all(notes.as_bytes())?;
            lock.sync_all()
        };
        write().map_err(|e| Error::io(&path, e))
    }

    /// Name of the file aside of an episode.
    fn file_of(&self, number: usize) -> PathBuf {
        self.aside.join(format!("train_data_{number}.npz"))
    }

    /// Removes the last episodes so that at most `episodes` are left.
    pub fn truncate(&mut self, episodes: usize) -> Result<()> {
        if episodes >= self.episodes {
            return Ok(());
        }
        let kept: BTreeSet<PathBuf> = (0..episodes).map(|number| self.file_of(number)).collect();
        for path in list(&self.aside)?.into_iter().filter(|path| !kept.contains(path)) {
            fs::remove_file(&path).map_err(|e| Error::io(&path, e))?;
        }
        self.episodes = episodes;
        Ok(())
    }

    /// Where the folder that is replaced lies while the new one takes its name.
    fn old(&self) -> PathBuf {
        with_ending(&self.aside, ".old")
    }

    /// Ends what a writer began that was killed between the two renames of a replacement, or after them.
    fn restore(&self) -> Result<()> {
        let old = self.old();
        if !old.is_dir() {
            return Ok(());
        }
        if !self.folder.exists() {
            return files::rename(&old, &self.folder).map_err(|e| Error::io(&old, e));
        }
        refuse_existing(&old, true)?;
        fs::remove_dir_all(&old).map_err(|e| Error::io(&old, e))
    }

    /// Writes observations in the shapes that metadata note, a single one as `obs`, several as `obs/NAME`.
    /// Episodes of MIKASA-Robo's environments get the layout of its published data: observations by their plain
    /// names, `success` 1 where the reward is 1, and `done` 1 in the last step of every episode.
    pub fn with_metadata(mut self, metadata: &BTreeMap<String, String>) -> Self {
        if ObservationKey::are_noted(metadata) {
            let keys = ObservationKey::of(metadata, &self.spaces.observation);
            self.robot =
                metadata.get("env").is_some_and(|env| env.starts_with(ROBOT)) && keys.iter().any(is_camera);
            self.keys = (keys.len() == self.spaces.observation.leaves().len()).then_some(keys);
        }
        self
    }

    /// Number of episodes written so far.
    pub fn episodes(&self) -> usize {
        self.episodes
    }

    /// Checks and writes an episode. An array holds numbers of one type: observations that mix integers and
    /// floats are several arrays, and actions that do are an error.
    pub fn push<'a>(&mut self, episode: impl Into<EpisodeRef<'a>>) -> Result<()> {
        let (episode, number) = (episode.into(), self.episodes);
        let path = self.file_of(number);
        episode.check(&self.spaces).map_err(|fault| Error::episode(&path, number, fault))?;
        let bytes = archive(&episode, &self.spaces, self.keys.as_deref(), self.robot)
            .map_err(|problem| Error::file(&path, problem))?;
        let write = || -> std::io::Result<()> {
            let part = self.aside.join(PART);
            let mut file = File::create(&part)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            drop(file);
            fs::rename(&part, &path)
        };
        write().map_err(|e| Error::io(&path, e))?;
        self.episodes += 1;
        Ok(())
    }

    /// Stops writing and removes what was written. A writer that is dropped instead leaves it for
    /// [`NpzWriter::resume`].
    pub fn discard(self) {
        let _ = fs::remove_dir_all(self.aside);
    }

    /// Gives the folder its name. A folder without episodes is an error, and so is one whose files are not
    /// the episodes that were written.
    pub fn finish(mut self) -> Result<()> {
        if self.episodes == 0 {
            let path = self.folder.clone();
            self.discard();
            return Err(Error::Empty { path });
        }
        let (found, written) = (list(&self.aside)?.len(), self.episodes);
        if found != written {
            let problem = format!(
                "expected the {written} episodes that were written, found {found} files; another process \
                 has changed this folder: write to another one"
            );
            return Err(Error::file(&self.aside, problem));
        }
        refuse_existing(&self.folder, self.replace)?;
        if cfg!(windows) {
            // A folder with an open file in it cannot be renamed there.
            self.lock = None;
        }
        self.rename().map_err(|e| Error::io(&self.folder, e))?;
        let lock = self.folder.join(LOCK);
        fs::remove_file(&lock).map_err(|e| Error::io(&lock, e))
    }

    fn rename(&self) -> std::io::Result<()> {
        let is_empty = |folder: &Path| fs::read_dir(folder).map(|mut entries| entries.next().is_none());
        if !self.folder.is_dir() {
            return files::rename(&self.aside, &self.folder);
        }
        if is_empty(&self.folder)? {
            // An empty folder is in the way on some systems.
            fs::remove_dir(&self.folder)?;
            return files::rename(&self.aside, &self.folder);
        }
        let old = self.old();
        files::rename(&self.folder, &old)?;
        if let Err(error) = files::rename(&self.aside, &self.folder) {
            let _ = fs::rename(&old, &self.folder);
            return Err(error);
        }
        fs::remove_dir_all(&old)
    }
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.to_owned().into_os_string();
    name.push(ending);
    PathBuf::from(name)
}

/// Makes the folder aside and locks it against other writers. A folder that holds anything but episodes is left
/// alone.
fn locked(aside: &Path) -> Result<File> {
    let path = aside.join(LOCK);
    let prepare = || {
        fs::create_dir_all(aside).map_err(|e| Error::io(aside, e))?;
        refuse_foreign(aside)
    };
    let lock =
        lock_at(&path, OpenOptions::new().read(true).write(true).create(true).truncate(false), prepare)?;
    match fs::remove_file(aside.join(PART)) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(aside, e)),
        _ => Ok(lock),
    }
}

fn refuse_foreign(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let entry = entry.map_err(|e| Error::io(folder, e))?;
        let episode = entry.path().extension().is_some_and(|extension| extension == "npz");
        let own = entry.file_name() == LOCK || entry.file_name() == PART;
        let known = own || episode && entry.path().is_file();
        if !known {
            let name = entry.file_name();
            let problem = format!(
                "holds {}, not only episodes; remove it, or choose another folder",
                name.to_string_lossy()
            );
            return Err(Error::file(folder, problem));
        }
    }
    Ok(())
}

fn refuse_existing(folder: &Path, replace: bool) -> Result<()> {
    let mut entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(_) if folder.is_file() => {
            return Err(Error::file(folder, "a file; choose another name for the folder"));
        }
        entries => entries.map_err(|e| Error::io(folder, e))?,
    };
    if entries.next().is_none() {
        return Ok(());
    }
    if replace {
        return refuse_foreign(folder);
    }
    let what = if list(folder)?.is_empty() { "other files" } else { ".npz files already" };
    Err(Error::file(folder, format!("holds {what}; choose an empty folder, or replace them (--force)")))
}

/// Writes all episodes of a source as a folder of `.npz` files: see [`NpzWriter`]. Observations have the
/// names and shapes that the source's metadata note.
pub fn write_npz(folder: impl Into<PathBuf>, source: &dyn Source) -> Result<()> {
    let mut writer = NpzWriter::create(folder, source.spaces())?.with_metadata(source.metadata());
    let mut write = || (0..source.episodes()).try_for_each(|i| writer.push(&source.episode(i)?));
    match write() {
        Ok(()) => writer.finish(),
        Err(error) => {
            writer.discard();
            Err(error)
        }
    }
}

/// The archive of an episode that fits the spaces.
fn archive(
    episode: &EpisodeRef<'_>,
    spaces: &Spaces,
    keys: Option<&[ObservationKey]>,
    robot: bool,
) -> Result<Vec<u8>, String> {
    if episode.labels.is_some() || episode.accepted.is_some() {
        return Err(
            "labels or accepted choices, for which .npz has no place: use the native format".to_owned()
        );
    }
    let steps = episode.steps();
    let mut done = vec![0; steps];
    if let Some(last) = done.last_mut() {
        *last = u8::from(episode.terminated || robot);
    }
    let imitate = episode.imitate.map(|imitate| imitate.iter().map(|x| u8::from(*x)).collect::<Vec<_>>());
    let reward = ColumnRef::F32(episode.rewards);
    let mut arrays = observations(episode, &spaces.observation, keys, robot);
    arrays.extend([
        ("action".to_owned(), npy(&episode.actions, &spaces.action, 0..steps, true)?),
        ("reward".to_owned(), npy(&[reward], &Space::unbounded([]), 0..steps, true)?),
    ]);
    if robot {
        // Rewards of these tasks are 1 in the steps that solve them, and less in all others.
        let success: Vec<u8> = episode.rewards.iter().map(|reward| u8::from(*reward >= 1.0)).collect();
        arrays.push(("success".to_owned(), npy_flags(&success)));
        arrays.push(("done".to_owned(), npy_flags(&done)));
    } else {
        arrays.push(("done".to_owned(), npy_bytes("|b1", &[steps], &done)));
    }
    arrays.extend(imitate.map(|imitate| ("counts".to_owned(), npy_bytes("|b1", &[steps], &imitate))));
    zip(&arrays).map_err(|e| format!("cannot be written: {e}"))
}

/// Whether an observation is that of the published robot data's cameras.
fn is_camera(key: &ObservationKey) -> bool {
    key.name == RGB && key.channels_last
}

/// An `.npy` file of flags as 64-bit integers.
fn npy_flags(flags: &[u8]) -> Vec<u8> {
    let wide: Vec<u8> = flags.iter().flat_map(|flag| i64::from(*flag).to_le_bytes()).collect();
    npy_bytes("<i8", &[flags.len()], &wide)
}

/// The arrays of observations and of the one after the last action: one for all leaves if they have no names
/// and the same type, else one for each.
fn observations(
    episode: &EpisodeRef<'_>,
    space: &Space,
    keys: Option<&[ObservationKey]>,
    robot: bool,
) -> Vec<(String, Vec<u8>)> {
    let (columns, leaves, steps) = (&episode.observations, space.leaves(), episode.steps());
    let width = |i: usize| leaves[i].len().max(1);
    let rows = columns.first().map_or(0, |column| column.len() / width(0));
    let ranges = [("", 0..steps), (FINAL, steps..rows)];
    let ranges = ranges.iter().filter(|(_, range)| !range.is_empty());
    let Some(keys) = keys else {
        let together = |(prefix, range): &(&str, Range<usize>)| {
            npy(columns, space, range.clone(), false).map(|npy| (format!("{prefix}obs"), npy))
        };
        let several = || ObservationKey::of(&BTreeMap::new(), space);
        return ranges
            .map(together)
            .collect::<Result<_, _>>()
            .unwrap_or_else(|_| observations(episode, space, Some(&several()), false));
    };
    let name = |key: &ObservationKey| match keys.len() {
        _ if robot => key.name.clone(),
        1 => "obs".to_owned(),
        _ => format!("{SEVERAL}{}", key.name),
    };
    let array = |prefix: &str, i: usize, range: &Range<usize>| {
        let entries = range.start * width(i)..range.end * width(i);
        let mut shape = vec![range.len()];
        shape.extend(&keys[i].shape);
        let data = match columns[i] {
            ColumnRef::U8(x) if keys[i].channels_last => {
                let channels = if keys[i].shape.len() == 3 { keys[i].shape[2] } else { 1 };
                channels_last(&x[entries], width(i), channels)
            }
            column => raw(&column, entries),
        };
        (format!("{prefix}{}", name(&keys[i])), npy_bytes(descr(columns[i].element_type()), &shape, &data))
    };
    ranges
        .flat_map(|(prefix, range)| (0..keys.len()).map(|i| array(prefix, i, range)).collect::<Vec<_>>())
        .collect()
}

/// Pictures [channels, height, width] of `size` bytes each as [height, width, channels].
fn channels_last(pictures: &[u8], size: usize, channels: usize) -> Vec<u8> {
    let plane = size / channels.max(1);
    let picture = |picture: &[u8]| {
        let pixels = (0..plane).flat_map(|i| (0..channels).map(move |channel| channel * plane + i));
        pixels.map(|i| picture[i]).collect::<Vec<_>>()
    };
    pictures.chunks_exact(size).flat_map(picture).collect()
}

/// An `.npy` file of some rows of all columns, side by side.
fn npy(
    columns: &[ColumnRef<'_>],
    space: &Space,
    rows: Range<usize>,
    action: bool,
) -> Result<Vec<u8>, String> {
    let leaves = space.leaves();
    let first = columns[0].element_type();
    if columns.iter().any(|column| column.element_type() != first) {
        return Err(
            "numbers and choices side by side have no place in one array of an .npz; write an .elmur file"
                .to_owned(),
        );
    }
    let mut shape = vec![rows.len()];
    match space {
        Space::Discrete { .. } if action => {}
        Space::Box { shape: axes, .. } | Space::Bytes { shape: axes } => shape.extend(axes),
        _ => shape.push(leaves.iter().map(Leaf::len).sum()),
    }
    let mut data = Vec::new();
    for row in rows {
        for (column, leaf) in columns.iter().zip(&leaves) {
            data.extend(raw(column, row * leaf.len()..(row + 1) * leaf.len()));
        }
    }
    Ok(npy_bytes(descr(first), &shape, &data))
}

/// Some numbers of a column as they lie in an `.npy` file.
fn raw(column: &ColumnRef<'_>, range: Range<usize>) -> Vec<u8> {
    match column {
        ColumnRef::F32(x) => x[range].iter().flat_map(|x| x.to_le_bytes()).collect(),
        ColumnRef::I32(x) => x[range].iter().flat_map(|x| i64::from(*x).to_le_bytes()).collect(),
        ColumnRef::U8(x) => x[range].to_vec(),
    }
}

/// What numpy calls the element type that a column is written in.
fn descr(element: ElementType) -> &'static str {
    match element {
        ElementType::F32 => "<f4",
        ElementType::I32 => "<i8",
        ElementType::U8 => "|u1",
    }
}

/// An `.npy` file, version 1.0: magic, version, length of the header, header up to a multiple of 64 bytes,
/// data.
fn npy_bytes(descr: &str, shape: &[usize], data: &[u8]) -> Vec<u8> {
    let axes: String = shape.iter().map(|n| format!("{n}, ")).collect();
    let mut header =
        format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", axes.trim_end());
    let total = (10 + header.len() + 1).next_multiple_of(64);
    header.extend(std::iter::repeat_n(' ', total - 11 - header.len()));
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn zip(members: &[(String, Vec<u8>)]) -> Result<Vec<u8>, rawzip::Error> {
    let mut bytes = Vec::new();
    let mut archive = ZipArchiveWriter::new(&mut bytes);
    for (name, member) in members {
        let name = format!("{name}.npy");
        let file = archive.new_file(&name).compression_method(CompressionMethod::DEFLATE);
        let (mut entry, config) = file.start()?;
        let mut writer = config.wrap(DeflateEncoder::new(&mut entry, Compression::default()));
        writer.write_all(member)?;
        let (encoder, descriptor) = writer.finish()?;
        encoder.finish()?;
        entry.finish(descriptor)?;
    }
    archive.finish()?;
    Ok(bytes)
}
