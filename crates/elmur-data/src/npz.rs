//! The layout of the published datasets: a folder of `train_data_{i}.npz`, one file per episode, or one such
//! file.
//!
//! | key | shape | meaning |
//! |---|---|---|
//! | `obs` | (T, ...) or (T + 1, ...) | observations; a middle axis of one, (T, 1, k), is dropped |
//! | `rgb` | (T, height, width, channels) bytes | observations if there is no `obs`; channels first in memory |
//! | `action` | (T,) or (T, ...) | actions |
//! | `reward` | (T,) | rewards |
//! | `done` | (T,) | last entry 0: cut off; otherwise, or without the key: terminated |
//! | `counts` | (T,) | ours: 1 where the action is worth imitating, else 0; without the key all are |
//!
//! Every file is read once when the folder is opened. Its episodes stay in memory if all of them fit there;
//! otherwise files are decoded again when they are needed, and the last few are remembered.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use elmur_base::{FieldMut, Space, Spaces};

use crate::dataset::{Dataset, read_episode};
use crate::episode::{Column, Episode};
use crate::error::{Error, Result};
use crate::format::{Header, checksum};
use crate::layout::ElementType;
use crate::layout::{Layout, Outline, Part};
use crate::limits::Limits;
use crate::npy::{Array, Recording};
use crate::source::{Source, check_read};

/// Most integers per step for which a space is inferred.
const MAX_INTS: usize = 1 << 16;

/// Opens a folder of `.npz` files, in the order of the numbers in their names, or a single one.
pub(crate) fn open(path: &Path, known: Option<&Spaces>, limits: &Limits) -> Result<Arc<dyn Source>> {
    let paths = if path.is_dir() { list(path)? } else { vec![path.to_owned()] };
    let Some(first_path) = paths.first() else {
        return Err(Error::file(path, "no .npz files; expected train_data_0.npz, train_data_1.npz, ..."));
    };
    let mut inferred = match known {
        Some(spaces) => {
            spaces.validate()?;
            None
        }
        None => Some(Inferred::from_first(first_path, &recording(first_path, limits)?)?),
    };
    let plain = match (&inferred, known) {
        (None, Some(spaces)) => spaces.clone(),
        (Some(inferred), _) => inferred.widest(),
        (None, None) => return Err(Error::Empty { path: path.to_owned() }),
    };
    let metadata = BTreeMap::from([("source".to_owned(), path.display().to_string())]);
    let mut header = Header::new(plain, metadata).map_err(|problem| Error::file(first_path, problem))?;
    let (mut files, mut kept, mut held) = (Vec::new(), Some(Vec::new()), 0u64);
    for (i, path) in paths.into_iter().enumerate() {
        let before = state(&path)?;
        let recording = recording(&path, limits)?;
        if let Some(inferred) = &mut inferred {
            inferred.include(&path, &recording)?;
        }
        let episode = recording.into_episode(&header.spaces, limits.inflated);
        let episode = episode.map_err(|problem| Error::file(&path, problem))?;
        if i == 0 {
            header.set_types(&episode.view());
        }
        header.check(&episode.view()).map_err(|fault| Error::episode(&path, i, fault))?;
        let checksum = checksum(&episode.view(), &header.spaces);
        let outline = episode.outline(&header.layout());
        held = held.saturating_add(size(&episode));
        match &mut kept {
            Some(episodes) if held <= limits.memory => episodes.push(episode),
            _ => kept = None,
        }
        files.push(NpzFile { path, state: before, outline, checksum });
    }
    let decoded_as = header.spaces.clone();
    if let Some(inferred) = inferred {
        header.spaces = inferred.narrowest();
    }
    if let Some(episodes) = kept {
        let checksums = files.iter().map(|file| file.checksum).collect();
        return Ok(Arc::new(Dataset::checked(header, episodes, checksums, 0)));
    }
    let (layout, limits, cache) = (header.layout(), *limits, Mutex::new(Cache::default()));
    Ok(Arc::new(NpzFiles { layout, header, decoded_as, files, limits, cache }))
}

/// The folder's `.npz` files, by the number at the end of their names.
pub(crate) fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let path = entry.map_err(|e| Error::io(folder, e))?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if path.extension().is_some_and(|e| e == "npz") && !hidden {
            paths.push(path);
        }
    }
    paths.sort_by_cached_key(|path| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let digits = stem.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        (stem[..digits].to_owned(), stem[digits..].parse::<u64>().ok(), stem)
    });
    Ok(paths)
}

/// Reads the arrays of one file.
fn recording(path: &Path, limits: &Limits) -> Result<Recording> {
    let about = fs::metadata(path).map_err(|e| Error::io(path, e))?;
    if !about.is_file() {
        return Err(Error::file(path, "not a file; keep only episodes in this folder"));
    }
    if about.len() > limits.inflated {
        let (size, most) = (about.len(), limits.inflated);
        let problem =
            format!("{size} bytes, too large for one file (at most {most}); save one episode per file");
        return Err(Error::file(path, problem));
    }
    let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
    Recording::parse(&bytes, limits.inflated).map_err(|problem| Error::file(path, problem))
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

/// Files that are decoded when they are needed.
#[derive(Debug)]
struct NpzFiles {
    header: Header,
    layout: Layout,
    /// Spaces that files are decoded with: those of the header, but for inferred sizes.
    decoded_as: Spaces,
    files: Vec<NpzFile>,
    limits: Limits,
    cache: Mutex<Cache>,
}

#[derive(Debug)]
struct NpzFile {
    path: PathBuf,
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

impl NpzFiles {
    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An episode from the cache or from its file, which must be as it was when the folder was opened.
    fn decoded(&self, number: usize) -> Result<Arc<Episode>> {
        if let Some(episode) = self.cache().get(number) {
            return Ok(episode);
        }
        let file = &self.files[number];
        let changed = || {
            let problem =
                "changed while it was in use; leave datasets alone that are being read, and start again";
            Error::file(&file.path, problem)
        };
        if state(&file.path)? != file.state {
            return Err(changed());
        }
        let recording = recording(&file.path, &self.limits)?;
        let episode = recording.into_episode(&self.decoded_as, self.limits.inflated);
        let episode = episode.map_err(|problem| Error::file(&file.path, problem))?;
        let view = episode.view();
        if self.header.check(&view).is_err() || checksum(&view, &self.header.spaces) != file.checksum {
            return Err(changed());
        }
        let episode = Arc::new(episode);
        self.cache().put(number, Arc::clone(&episode), self.limits.memory);
        Ok(episode)
    }
}

impl Source for NpzFiles {
    fn spaces(&self) -> &Spaces {
        &self.header.spaces
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    fn episodes(&self) -> usize {
        self.files.len()
    }

    fn outline(&self, episode: usize) -> Outline {
        self.files[episode].outline
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
        self.files[episode].checksum
    }
}

/// Spaces that the arrays of all files fit in: integers become choices, of as many as the largest value + 1;
/// bytes with three axes pixels; floats an unbounded box.
struct Inferred {
    observation: InferredSpace,
    action: InferredSpace,
}

struct InferredSpace {
    key: &'static str,
    action: bool,
    element: ElementType,
    shape: Vec<usize>,
    /// The largest integer + 1 of each entry of a row; empty where integers are no choices.
    sizes: Vec<usize>,
}

impl Inferred {
    fn from_first(path: &Path, first: &Recording) -> Result<Self> {
        Ok(Self {
            observation: InferredSpace::from_first("obs", path, &first.observation, false)?,
            action: InferredSpace::from_first("action", path, &first.action, true)?,
        })
    }

    fn include(&mut self, path: &Path, recording: &Recording) -> Result<()> {
        self.observation.include(path, &recording.observation)?;
        self.action.include(path, &recording.action)
    }

    /// Spaces that hold any numbers of the first file's types and shapes.
    fn widest(&self) -> Spaces {
        let most = |_: &usize| i32::MAX as usize;
        Spaces { observation: self.observation.space(most), action: self.action.space(most) }
    }

    fn narrowest(&self) -> Spaces {
        Spaces { observation: self.observation.space(|n| *n), action: self.action.space(|n| *n) }
    }
}

impl InferredSpace {
    fn from_first(key: &'static str, path: &Path, array: &Array, action: bool) -> Result<Self> {
        let element = array.numbers.view().element_type();
        let shape = array.row_shape().to_vec();
        let choices = match element {
            ElementType::F32 => 0,
            ElementType::U8 if shape.len() == 3 => 0,
            _ => array.width(),
        };
        if choices > MAX_INTS {
            let problem = format!("`{key}`: {choices} integers per step; save {key}.astype('float32')");
            return Err(Error::file(path, problem));
        }
        Ok(Self { key, action, element, shape, sizes: vec![1; choices] })
    }

    /// Makes room for the numbers of another file, which must be of the same type and shape.
    fn include(&mut self, path: &Path, array: &Array) -> Result<()> {
        let (key, element, shape) = (self.key, array.numbers.view().element_type(), array.row_shape());
        if element != self.element || shape != self.shape {
            let expected = format!("{} {:?} as in the first file", self.element.name(), self.shape);
            let got = format!("{} {shape:?}", element.name());
            let remedy = "keep different datasets in different folders";
            return Err(Error::file(path, format!("`{key}`: expected {expected}, got {got}; {remedy}")));
        }
        if self.sizes.is_empty() {
            return Ok(());
        }
        let mut grow = |entry: usize, x: i32| {
            let Ok(x) = usize::try_from(x) else {
                let problem = format!(
                    "`{key}` holds {x}, and integers are read as choices, which begin at 0: save {key}.astype('float32') \
                     if they are measurements, or {key} - {key}.min() if they are choices"
                );
                return Err(Error::file(path, problem));
            };
            self.sizes[entry] = self.sizes[entry].max(x + 1);
            Ok(())
        };
        let entries = (0..array.width()).cycle();
        match &array.numbers {
            Column::F32(_) => Ok(()),
            Column::I32(x) => entries.zip(x).try_for_each(|(entry, x)| grow(entry, *x)),
            Column::U8(x) => entries.zip(x).try_for_each(|(entry, x)| grow(entry, i32::from(*x))),
        }
    }

    fn space(&self, size: impl Fn(&usize) -> usize) -> Space {
        match (self.element, &self.sizes[..]) {
            (ElementType::F32, _) if self.shape.is_empty() => Space::unbounded([1]),
            (ElementType::F32, _) => Space::unbounded(self.shape.clone()),
            (ElementType::U8, []) => Space::between(0.0, 1.0, self.shape.clone()),
            (_, [n]) if self.action && self.shape.is_empty() => Space::Discrete { n: size(n) },
            (_, sizes) => Space::MultiDiscrete { sizes: sizes.iter().map(size).collect() },
        }
    }
}
