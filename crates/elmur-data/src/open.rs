//! Opening data of any format: one line per format in [`FORMATS`].

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use elmur_base::Spaces;

use crate::dataset::Dataset;
use crate::episode::Episode;
use crate::error::{Error, Result};
use crate::format::MAGIC;
use crate::keys::Selection;
use crate::limits::Limits;
use crate::native::Reader;
use crate::npz::{self, NpzFiles};
use crate::recordings::{self, Recordings};
use crate::select::select_keys;
use crate::source::Source;
use crate::{d4rl, hdf5, joined, lerobot, minari, robomimic};

/// What a format is opened with.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    known: Option<&'a Spaces>,
    selection: &'a Selection,
    limits: &'a Limits,
}

/// How a format is opened: as a source at once, or as recordings that are decoded whole.
enum Open {
    Source(fn(&Path, Wanted<'_>) -> Result<Arc<dyn Source>>),
    Recordings(fn(&Path, Wanted<'_>) -> Result<Box<dyn Recordings>>),
}

/// A format: its name, whether a path holds it, and how it is opened.
struct Format {
    name: &'static str,
    recognise: fn(&Glance) -> bool,
    open: Open,
}

/// All formats, asked in this order.
const FORMATS: [Format; 7] = [
    Format { name: "an .elmur file", recognise: |g| g.starts(&MAGIC), open: Open::Source(open_native) },
    Format {
        name: "a folder of .npz files",
        recognise: |g| g.folder && g.npz_inside,
        open: Open::Recordings(open_npz),
    },
    Format {
        name: "a folder of .elmur files",
        recognise: |g| g.folder && g.native_inside,
        open: Open::Source(open_native),
    },
    Format { name: "an .npz file", recognise: |g| g.starts(b"PK\x03\x04"), open: Open::Recordings(open_npz) },
    Format {
        name: "a LeRobot folder",
        recognise: |g| g.lerobot,
        open: Open::Recordings(|path, w| {
            Ok(Box::new(lerobot::LeRobot::open(path, w.known, w.selection, w.limits)?))
        }),
    },
    Format {
        name: "a Minari folder",
        recognise: |g| g.minari,
        open: Open::Recordings(|path, w| {
            Ok(Box::new(minari::Minari::open(path, w.known, w.selection, w.limits)?))
        }),
    },
    Format {
        name: "an HDF5 file of Minari, D4RL or robomimic",
        recognise: |g| g.starts(hdf5::MAGIC),
        open: Open::Recordings(open_hdf5),
    },
];

fn open_npz(path: &Path, w: Wanted<'_>) -> Result<Box<dyn Recordings>> {
    Ok(Box::new(NpzFiles::open(path, w.known, w.selection, w.limits)?))
}

fn open_hdf5(path: &Path, w: Wanted<'_>) -> Result<Box<dyn Recordings>> {
    let file = hdf5::Hdf5::open(path, w.limits)?;
    if robomimic::Robomimic::is_in(&file)? {
        return Ok(Box::new(robomimic::Robomimic::open(file, w.known, w.selection, w.limits)?));
    }
    if d4rl::D4rl::is_in(&file)? {
        return Ok(Box::new(d4rl::D4rl::open(file, w.known, w.selection, w.limits)?));
    }
    if minari::Minari::is_in(&file)? {
        return Ok(Box::new(minari::Minari::open(path, w.known, w.selection, w.limits)?));
    }
    let (groups, datasets) = file.members("")?;
    let have: Vec<&str> = groups.iter().chain(&datasets).map(String::as_str).take(12).collect();
    let problem = format!(
        "an HDF5 file of an unknown layout, with {}; expected D4RL (observations, actions, rewards, terminals), \
         robomimic (data/demo_0) or Minari (episode_0)",
        have.join(", ")
    );
    Err(Error::file(path, problem))
}

/// Opens data of any format for reading. Formats are told apart by their content, not by their names.
///
/// Files that know their spaces are read as they are. Arrays of an `.npz` do not: with `known` spaces numbers
/// are converted to them where nothing is lost, without they are inferred. Everything is checked once; data
/// that fits is kept in memory, and the rest is read when it is needed (see [`Limits`]).
pub fn open(path: impl AsRef<Path>, known: Option<&Spaces>) -> Result<Arc<dyn Source>> {
    open_with(path, known, &Limits::default())
}

impl Dataset {
    /// Reads all episodes of a file or folder, of any format that [`open`] knows, into memory.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::load(&*open(path, None)?)
    }
}

/// [`open`] with other bounds on memory.
pub fn open_with(path: impl AsRef<Path>, known: Option<&Spaces>, limits: &Limits) -> Result<Arc<dyn Source>> {
    open_selected(path, known, &Selection::default(), limits)
}

/// [`open_with`] for some of the observations and episodes that the data hold.
pub fn open_selected(
    path: impl AsRef<Path>,
    known: Option<&Spaces>,
    selection: &Selection,
    limits: &Limits,
) -> Result<Arc<dyn Source>> {
    let path = path.as_ref();
    let wanted = Wanted { known, selection, limits };
    match format_at(path)?.open {
        Open::Source(open) => open(path, wanted),
        Open::Recordings(open) => recordings::open(open(path, wanted)?, limits),
    }
}

/// The format of a path.
fn format_at(path: &Path) -> Result<&'static Format> {
    let glance = Glance::at(path)?;
    FORMATS.iter().find(|format| (format.recognise)(&glance)).ok_or_else(|| {
        let names: Vec<&str> = FORMATS.iter().map(|format| format.name).collect();
        Error::file(path, format!("{}; expected one of: {}", glance.describe(), names.join(", ")))
    })
}

/// Episodes of a file or folder one after the other, each of which is decoded when it is asked for, once:
/// what conversion needs. Neither memory nor time go into those that are not asked for.
#[derive(Debug)]
pub struct EpisodeReader {
    spaces: Spaces,
    episodes: Episodes,
}

#[derive(Debug)]
enum Episodes {
    Source(Arc<dyn Source>),
    Recordings(Box<dyn Recordings>),
}

impl EpisodeReader {
    /// Opens data of any format that [`open`] knows. Where integers have as many choices as the largest one
    /// in all episodes needs, these are read once before.
    pub fn open(
        path: impl AsRef<Path>,
        known: Option<&Spaces>,
        selection: &Selection,
        limits: &Limits,
    ) -> Result<Self> {
        let path = path.as_ref();
        let wanted = Wanted { known, selection, limits };
        Ok(match format_at(path)?.open {
            Open::Source(open) => {
                let source = open(path, wanted)?;
                Self { spaces: source.spaces().clone(), episodes: Episodes::Source(source) }
            }
            Open::Recordings(open) => {
                let recordings = open(path, wanted)?;
                let spaces = recordings::narrowed_spaces(&*recordings)?;
                Self { spaces, episodes: Episodes::Recordings(recordings) }
            }
        })
    }

    /// Observation and action spaces of the episodes.
    pub fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    /// Notes on the data.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        match &self.episodes {
            Episodes::Source(source) => source.metadata(),
            Episodes::Recordings(recordings) => recordings.metadata(),
        }
    }

    /// Number of episodes, at least 1.
    pub fn len(&self) -> usize {
        match &self.episodes {
            Episodes::Source(source) => source.episodes(),
            Episodes::Recordings(recordings) => recordings.episodes(),
        }
    }

    /// Always false: there is at least one episode.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Decodes and checks episode `i`, which must be below [`EpisodeReader::len`].
    pub fn episode(&self, i: usize) -> Result<Episode> {
        match &self.episodes {
            Episodes::Source(source) => source.episode(i),
            Episodes::Recordings(recordings) => {
                let episode = recordings.load(i, true)?;
                let fits = episode.view().check(&self.spaces);
                fits.map_err(|fault| Error::episode(recordings.file(i), i, fault))?;
                Ok(episode)
            }
        }
    }
}

/// The spaces of data that [`open`] would open, without reading more than it takes to know them: the
/// beginning of an `.elmur` file, the integers of formats that do not say how many choices there are.
pub fn spaces_of(path: impl AsRef<Path>) -> Result<Spaces> {
    let path = path.as_ref();
    if Glance::at(path)?.starts(&MAGIC) {
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        return Ok(Reader::named(std::io::BufReader::new(file), path)?.spaces().clone());
    }
    Ok(EpisodeReader::open(path, None, &Selection::default(), &Limits::default())?.spaces)
}

/// Whether a path holds data of a format that [`open`] knows, as far as its first bytes tell.
pub fn is_data(path: impl AsRef<Path>) -> bool {
    Glance::at(path.as_ref()).is_ok_and(|glance| FORMATS.iter().any(|format| (format.recognise)(&glance)))
}

fn open_native(path: &Path, wanted: Wanted<'_>) -> Result<Arc<dyn Source>> {
    wanted.selection.only_keys("an .elmur file").map_err(|problem| Error::file(path, problem))?;
    let files = if path.is_dir() { joined::list(path)? } else { vec![path.to_owned()] };
    let source = joined::open_files(path, &files, wanted.limits.memory)?;
    select_keys(source, &wanted.selection.keys).map_err(|problem| Error::file(path, problem))
}

/// What can be seen of a path without reading all of it.
struct Glance {
    folder: bool,
    /// Whether a folder holds files named `.elmur`.
    native_inside: bool,
    /// Whether a folder holds files named `.npz`.
    npz_inside: bool,
    /// Whether a folder is a dataset of LeRobot.
    lerobot: bool,
    /// Whether a folder is a dataset of Minari.
    minari: bool,
    /// The first bytes of a file.
    start: Vec<u8>,
}

impl Glance {
    fn at(path: &Path) -> Result<Self> {
        let about = fs::metadata(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::file(path, "no such dataset; collect one with `elmur collect`, or correct the path")
            }
            _ => Error::io(path, e),
        })?;
        if about.is_dir() {
            let (native_inside, npz_inside) = (!joined::list(path)?.is_empty(), !npz::list(path)?.is_empty());
            let (lerobot, minari) = (lerobot::is_in(path), minari::is_in(path));
            return Ok(Self { folder: true, native_inside, npz_inside, lerobot, minari, start: Vec::new() });
        }
        // Opening a pipe would wait for a writer; devices have no end.
        if !about.is_file() {
            let problem = "a pipe, device or socket; copy the data to a file and give that";
            return Err(Error::file(path, problem));
        }
        let mut start = Vec::new();
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        file.take(64).read_to_end(&mut start).map_err(|e| Error::io(path, e))?;
        Ok(Self {
            folder: false,
            native_inside: false,
            npz_inside: false,
            lerobot: false,
            minari: false,
            start,
        })
    }

    fn starts(&self, magic: &[u8]) -> bool {
        self.start.starts_with(magic)
    }

    /// What a path that is no data looks like.
    fn describe(&self) -> String {
        const LOOKS: [(&[u8], &str); 9] = [
            (b"PAR1", "this looks like Parquet"),
            (b"\x93NUMPY", "this looks like a single .npy array; save obs, action and reward with np.savez"),
            (b"\x1f\x8b", "this looks like gzip; unpack it first"),
            (b"\x28\xb5\x2f\xfd", "this looks like Zstandard; unpack it first"),
            (b"ARROW1", "this looks like Arrow"),
            (b"\x89PNG", "this looks like a PNG picture"),
            (b"\x80", "this looks like a Python pickle; save its arrays with np.savez"),
            (b"PK", "this looks like an empty or cut archive; copy or collect it again"),
            (b"{", "this looks like JSON"),
        ];
        if self.folder {
            return "a folder without .elmur or .npz files; expected train_data_0.npz, train_data_1.npz, ..."
                .to_owned();
        }
        if self.start.is_empty() {
            return "an empty file; collect again, or restore it from a copy".to_owned();
        }
        if MAGIC.starts_with(&self.start) {
            let len = self.start.len();
            return format!(
                "ends within the header, after {len} bytes; collect again, or restore it from a copy"
            );
        }
        if let Some((_, look)) = LOOKS.iter().find(|(magic, _)| self.starts(magic)) {
            return (*look).to_owned();
        }
        let text = self.start.iter().all(|b| b.is_ascii_graphic() || b" \t\r\n".contains(b));
        let look = if text { "this looks like text" } else { "not data of a known format" };
        format!(
            "{look}, beginning with {:?}",
            String::from_utf8_lossy(&self.start[..self.start.len().min(8)])
        )
    }
}
