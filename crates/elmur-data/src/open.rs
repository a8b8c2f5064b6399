//! Opening data of any format: one line per format in [`FORMATS`].

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use elmur_base::Spaces;

use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::format::MAGIC;
use crate::indexed::ElmurFile;
use crate::limits::Limits;
use crate::native::Reader;
use crate::npz;
use crate::source::Source;

/// Opens a path that holds a format, with known spaces or none.
type Open = fn(&Path, Option<&Spaces>, &Limits) -> Result<Arc<dyn Source>>;

/// A format: its name, whether a path holds it, and how it is opened.
struct Format {
    name: &'static str,
    recognise: fn(&Glance) -> bool,
    open: Open,
}

/// All formats, asked in this order.
const FORMATS: [Format; 3] = [
    Format { name: "an .elmur file", recognise: |g| g.starts(&MAGIC), open: open_native },
    Format { name: "a folder of .npz files", recognise: |g| g.folder && g.npz_inside, open: npz::open },
    Format { name: "an .npz file", recognise: |g| g.starts(b"PK\x03\x04"), open: npz::open },
];

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
    let path = path.as_ref();
    let glance = Glance::at(path)?;
    match FORMATS.iter().find(|format| (format.recognise)(&glance)) {
        Some(format) => (format.open)(path, known, limits),
        None => {
            let names = FORMATS.map(|format| format.name).join(", ");
            let problem = format!("{}; expected one of: {names}", glance.describe());
            Err(Error::file(path, problem))
        }
    }
}

/// The spaces of data that [`open`] would open, without reading more than it takes to know them: the beginning
/// of an `.elmur` file, all arrays of `.npz` files.
pub fn spaces_of(path: impl AsRef<Path>) -> Result<Spaces> {
    let path = path.as_ref();
    if Glance::at(path)?.starts(&MAGIC) {
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        return Ok(Reader::named(std::io::BufReader::new(file), path)?.spaces().clone());
    }
    Ok(open(path, None)?.spaces().clone())
}

/// Whether a path holds data of a format that [`open`] knows, as far as its first bytes tell.
pub fn is_data(path: impl AsRef<Path>) -> bool {
    Glance::at(path.as_ref()).is_ok_and(|glance| FORMATS.iter().any(|format| (format.recognise)(&glance)))
}

fn open_native(path: &Path, _: Option<&Spaces>, limits: &Limits) -> Result<Arc<dyn Source>> {
    let file = File::open(path).map_err(|e| Error::io(path, e))?;
    let size = file.metadata().map_err(|e| Error::io(path, e))?.len();
    if size > limits.memory {
        return Ok(Arc::new(ElmurFile::open(path)?));
    }
    // A file that grows meanwhile is read as far as it was when it was opened.
    Ok(Arc::new(Reader::named(std::io::BufReader::new(file).take(size), path)?.into_dataset()?))
}

/// What can be seen of a path without reading all of it.
struct Glance {
    folder: bool,
    /// Whether a folder holds files named `.npz`.
    npz_inside: bool,
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
            let npz_inside = !npz::list(path)?.is_empty();
            return Ok(Self { folder: true, npz_inside, start: Vec::new() });
        }
        // Opening a pipe would wait for a writer; devices have no end.
        if !about.is_file() {
            let problem = "a pipe, device or socket; copy the data to a file and give that";
            return Err(Error::file(path, problem));
        }
        let mut start = Vec::new();
        let file = File::open(path).map_err(|e| Error::io(path, e))?;
        file.take(64).read_to_end(&mut start).map_err(|e| Error::io(path, e))?;
        Ok(Self { folder: false, npz_inside: false, start })
    }

    fn starts(&self, magic: &[u8]) -> bool {
        self.start.starts_with(magic)
    }

    /// What a path that is no data looks like.
    fn describe(&self) -> String {
        const LOOKS: [(&[u8], &str); 10] = [
            (b"\x89HDF", "this looks like HDF5"),
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
            return "a folder without .npz files; expected train_data_0.npz, train_data_1.npz, ..."
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
