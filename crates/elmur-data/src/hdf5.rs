//! HDF5 files as far as datasets need them: members of groups, arrays of numbers by ranges of rows, byte
//! strings, text and attributes. The only file that knows the crate behind it.
//!
//! The crate reads neither flags (an enumeration of FALSE and TRUE over one byte), nor 16-bit floats, nor
//! chunks that h5py compressed with LZF: elements are read as raw bytes and decoded here, and LZF is a filter
//! of ours. Files are read by positioned reads, never mapped: a file that is cut while it is in use must be
//! an error.

use std::cell::Cell;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hdf5_reader::group::Group;
use hdf5_reader::{
    ByteOrder, Dataset, Datatype, FileStorage, FilterRegistry, H5Type, Hdf5File, OpenOptions, SliceInfo,
    SliceInfoElem, VarLenKind,
};

use crate::array::{Array, Element, Numeric, too_large};
use crate::error::{Error, Result};
use crate::limits::Limits;

/// First bytes of a file.
pub(crate) const MAGIC: &[u8] = b"\x89HDF\r\n\x1a\n";
/// Number of the filter that h5py calls "lzf".
const LZF: u16 = 32000;
/// Largest chunk that is unpacked, in bytes.
const MAX_CHUNK: usize = 256 << 20;
/// Bytes of unpacked chunks that are remembered.
const CHUNK_CACHE: usize = 32 << 20;

/// An open file.
pub(crate) struct Hdf5 {
    path: PathBuf,
    file: Hdf5File,
}

impl fmt::Debug for Hdf5 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hdf5").field("path", &self.path).finish()
    }
}

impl Hdf5 {
    pub(crate) fn open(path: &Path, limits: &Limits) -> Result<Self> {
        let limit = usize::try_from(limits.inflated).unwrap_or(usize::MAX);
        let mut filters = FilterRegistry::new();
        filters.register(
            LZF,
            Box::new(|filter, data, _| {
                let size = filter.client_data.get(2).map_or(0, |size| *size as usize);
                lzf(data, size.min(MAX_CHUNK)).map_err(hdf5_reader::error::Error::InvalidData)
            }),
        );
        let options = OpenOptions::default()
            .with_filter_registry(filters)
            .with_chunk_cache_bytes(CHUNK_CACHE)
            .with_max_chunk_bytes(MAX_CHUNK.min(limit))
            .with_max_read_bytes(limit)
            .with_max_object_header_bytes(16 << 20);
        let damaged = |e: hdf5_reader::error::Error| {
            Error::file(path, format!("not a whole HDF5 file ({e}); copy it again"))
        };
        let storage = FileStorage::open(path).map_err(damaged)?;
        let file = Hdf5File::from_storage_with_options(Arc::new(storage), options).map_err(damaged)?;
        // What is missing may be in no array that is read, but this is not the file that was written.
        let have = std::fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
        let expected = file.superblock().eof_address;
        if expected > have && expected != u64::MAX {
            let problem =
                format!("an HDF5 file of {expected} bytes, of which {have} are here; copy it again");
            return Err(Error::file(path, problem));
        }
        Ok(Self { path: path.to_owned(), file })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// An error about this file.
    pub(crate) fn error(&self, problem: impl fmt::Display) -> Error {
        Error::file(&self.path, problem)
    }

    fn damaged(&self, place: &str, e: hdf5_reader::error::Error) -> Error {
        self.error(format!("`{place}`: {e}; the file is damaged or of an unknown kind, copy it again"))
    }

    fn group(&self, group: &str) -> Result<Group> {
        match group.is_empty() {
            true => self.file.root_group(),
            false => self.file.group(group),
        }
        .map_err(|e| self.damaged(group, e))
    }

    /// Names of the groups and of the datasets in a group; the root is "".
    pub(crate) fn members(&self, group: &str) -> Result<(Vec<String>, Vec<String>)> {
        self.group(group)?.member_names().map_err(|e| self.damaged(group, e))
    }

    /// The paths of all datasets in a group and the groups in it, relative to it, sorted.
    pub(crate) fn datasets_below(&self, group: &str) -> Result<Vec<String>> {
        let mut found = Vec::new();
        self.gather(group, "", 8, &mut found)?;
        found.sort();
        Ok(found)
    }

    fn gather(&self, group: &str, prefix: &str, depth: usize, found: &mut Vec<String>) -> Result<()> {
        if depth == 0 || found.len() > 1 << 12 {
            return Err(self.error(format!("`{group}`: too many or too deep groups; choose keys")));
        }
        let (groups, datasets) = self.members(group)?;
        found.extend(datasets.iter().map(|name| format!("{prefix}{name}")));
        groups.iter().try_for_each(|name| {
            self.gather(&format!("{group}/{name}"), &format!("{prefix}{name}/"), depth - 1, found)
        })
    }

    /// The dataset at a path; none if nothing is there.
    pub(crate) fn find(&self, place: &str) -> Result<Option<Data<'_>>> {
        match self.file.dataset(place) {
            Ok(dataset) => Ok(Some(Data { file: self, place: place.to_owned(), dataset })),
            Err(e) if is_missing(&e) => Ok(None),
            Err(e) => Err(self.damaged(place, e)),
        }
    }

    /// The dataset at a path, which must be there.
    pub(crate) fn data(&self, place: &str) -> Result<Data<'_>> {
        self.find(place)?.ok_or_else(|| self.error(format!("no array `{place}`; is this file whole?")))
    }

    /// An attribute of a group as text.
    pub(crate) fn text_attribute(&self, group: &str, name: &str) -> Option<String> {
        self.group(group).ok()?.attribute(name).ok()?.read_string().ok()
    }

    /// An attribute of a group as a number.
    pub(crate) fn number_attribute(&self, group: &str, name: &str) -> Option<f64> {
        self.group(group).ok()?.attribute(name).ok()?.read_as_f64().ok()
    }
}

/// A dataset of a file.
pub(crate) struct Data<'a> {
    file: &'a Hdf5,
    place: String,
    dataset: Dataset,
}

impl Data<'_> {
    fn error(&self, problem: impl fmt::Display) -> Error {
        self.file.error(format!("`{}`: {problem}", self.place))
    }

    /// Length of each axis.
    pub(crate) fn shape(&self) -> Result<Vec<usize>> {
        let axis = |n: &u64| usize::try_from(*n).map_err(|_| self.error("an axis that is too long"));
        self.dataset.shape().iter().map(axis).collect()
    }

    /// Rows of the first axis.
    pub(crate) fn rows(&self) -> Result<usize> {
        let shape = self.shape()?;
        shape.first().copied().ok_or_else(|| self.error("a single number; expected one row per step"))
    }

    /// Element type of an array of numbers; none for text, byte strings and structures.
    pub(crate) fn element(&self) -> Option<Element> {
        match self.dataset.dtype() {
            Datatype::FixedPoint { size, signed, byte_order } => {
                let numeric = if *signed { Numeric::Signed } else { Numeric::Unsigned };
                Element::new(numeric, usize::from(*size), is_big(*byte_order))
            }
            Datatype::FloatingPoint { size, byte_order } => {
                Element::new(Numeric::Float, usize::from(*size), is_big(*byte_order))
            }
            Datatype::Enum { base, members } => {
                let flag = |name: &str, value: u8| {
                    members.iter().any(|member| member.name == name && member.value[..] == [value])
                };
                let byte = matches!(**base, Datatype::FixedPoint { size: 1, .. });
                (byte && members.len() == 2 && flag("FALSE", 0) && flag("TRUE", 1)).then_some(Element {
                    numeric: Numeric::Flag,
                    size: 1,
                    big_endian: false,
                })
            }
            _ => None,
        }
    }

    /// Whether every element is a byte string of its own length.
    pub(crate) fn is_byte_strings(&self) -> bool {
        match self.dataset.dtype() {
            Datatype::VarLen { base, kind, .. } => {
                *kind == VarLenKind::Sequence && matches!(**base, Datatype::FixedPoint { size: 1, .. })
            }
            _ => false,
        }
    }

    /// Some rows of an array of numbers. What their decoded numbers take is subtracted from what is `left`.
    pub(crate) fn read(&self, rows: Range<usize>, left: &Cell<u64>) -> Result<Array> {
        let Some(element) = self.element() else {
            let kind: String = format!("{:?}", self.dataset.dtype()).chars().take(60).collect();
            return Err(self.error(format!("elements of type {kind}; expected numbers or flags")));
        };
        let mut shape = self.shape()?;
        if shape.is_empty() || rows.end > shape[0] || rows.start > rows.end {
            return Err(self.error(format!("expected rows {rows:?}, got shape {shape:?}")));
        }
        shape[0] = rows.len();
        let count = shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n as u64));
        let mut numbers = element.column();
        let held =
            count.and_then(|n| n.checked_mul(numbers.view().element_type().size().max(element.size) as u64));
        let held = held.unwrap_or(u64::MAX);
        let rest = left.get().checked_sub(held);
        left.set(rest.ok_or_else(|| self.error(too_large(held, left.get())))?);
        if held > 0 {
            let mut raw = |bytes: &[u8]| element.append(bytes, &mut numbers).map_err(|e| self.error(e));
            match element.size {
                1 => self.elements::<1>(&rows, &mut raw)?,
                2 => self.elements::<2>(&rows, &mut raw)?,
                4 => self.elements::<4>(&rows, &mut raw)?,
                _ => self.elements::<8>(&rows, &mut raw)?,
            }
        }
        if count != Some(numbers.len() as u64) {
            return Err(self.error(format!("expected {shape:?}, got {} numbers", numbers.len())));
        }
        Ok(Array { shape, numbers })
    }

    /// All rows of an array of numbers.
    pub(crate) fn read_all(&self, left: &Cell<u64>) -> Result<Array> {
        self.read(0..self.rows()?, left)
    }

    /// Hands the raw elements of some rows to `take`.
    fn elements<const N: usize>(
        &self,
        rows: &Range<usize>,
        take: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut chosen = SliceInfo::all(self.dataset.ndim());
        if let Some(first) = chosen.selections.first_mut() {
            *first = SliceInfoElem::Slice { start: rows.start as u64, end: rows.end as u64, step: 1 };
        }
        let array =
            self.dataset.read_slice::<Raw<N>>(&chosen).map_err(|e| self.file.damaged(&self.place, e))?;
        let (elements, offset) = array.into_raw_vec_and_offset();
        if offset.unwrap_or(0) != 0 {
            return Err(self.error("elements in an order that is not understood"));
        }
        take(bytemuck::cast_slice(&elements))
    }

    /// The byte strings of some rows.
    pub(crate) fn byte_strings(&self, rows: Range<usize>, left: &Cell<u64>) -> Result<Vec<Vec<u8>>> {
        let fail = |e| self.file.damaged(&self.place, e);
        if !self.is_byte_strings() || self.dataset.ndim() != 1 || self.dataset.vlen_reference_size() != 16 {
            return Err(self.error("expected one byte string per row"));
        }
        let mut references = Vec::new();
        self.elements::<16>(&rows, &mut |bytes| {
            references.extend_from_slice(bytes);
            Ok(())
        })?;
        let resolve = |reference: &[u8]| {
            let claimed = reference.first_chunk().map_or(0, |len| u64::from(u32::from_le_bytes(*len)));
            let rest = left.get().checked_sub(claimed);
            left.set(rest.ok_or_else(|| self.error(too_large(claimed, left.get())))?);
            self.dataset.resolve_vlen_reference_bytes(reference, 1).map_err(fail)
        };
        references.chunks_exact(16).map(resolve).collect()
    }

    /// The texts of an array of fixed or variable length.
    pub(crate) fn texts(&self) -> Result<Vec<String>> {
        self.dataset.read_strings().map_err(|e| self.file.damaged(&self.place, e))
    }
}

fn is_missing(e: &hdf5_reader::error::Error) -> bool {
    use hdf5_reader::error::Error as Cause;
    match e {
        Cause::DatasetNotFound(_) | Cause::GroupNotFound(_) => true,
        Cause::Context { source, .. } => is_missing(source),
        _ => false,
    }
}

fn is_big(order: ByteOrder) -> bool {
    order == ByteOrder::BigEndian
}

/// An element of N bytes as it lies in the file.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Raw<const N: usize>([u8; N]);

// SAFETY: bytes in an array: any bits are valid, there is no padding, and the layout is that of the array.
unsafe impl<const N: usize> bytemuck::Zeroable for Raw<N> {}
// SAFETY: as above; the type is `Copy` and has no references.
unsafe impl<const N: usize> bytemuck::Pod for Raw<N> {}

impl<const N: usize> H5Type for Raw<N> {
    fn hdf5_type() -> Datatype {
        Datatype::Opaque { size: N as u32, tag: String::new() }
    }

    fn from_bytes(bytes: &[u8], _: &Datatype) -> Result<Self, hdf5_reader::error::Error> {
        let short = || hdf5_reader::error::Error::InvalidData(format!("expected an element of {N} bytes"));
        bytes.first_chunk().map(|bytes| Raw(*bytes)).ok_or_else(short)
    }

    fn element_size(_: &Datatype) -> usize {
        N
    }

    fn native_copy_compatible(_: &Datatype) -> bool {
        true
    }
}

/// Unpacks LZF data of at most `size` bytes.
///
/// A control byte c < 32 is followed by c + 1 literal bytes. Any other begins a back reference: the top 3
/// bits are its length (7: one more byte of length follows), the low 5 bits and the next byte its distance -
/// 1; length + 2 bytes are repeated.
fn lzf(data: &[u8], size: usize) -> Result<Vec<u8>, String> {
    let damaged = || "LZF data that ends too early or goes too far".to_owned();
    let mut out = Vec::new();
    let mut input = data.iter();
    while let Some(control) = input.next() {
        let control = usize::from(*control);
        if control < 32 {
            let run = input.as_slice().get(..=control).ok_or_else(damaged)?;
            out.extend_from_slice(run);
            input = input.as_slice()[control + 1..].iter();
        } else {
            let mut length = control >> 5;
            if length == 7 {
                length += usize::from(*input.next().ok_or_else(damaged)?);
            }
            let back = (control & 31) << 8 | usize::from(*input.next().ok_or_else(damaged)?);
            let start = out.len().checked_sub(back + 1).ok_or_else(damaged)?;
            (start..start + length + 2).for_each(|place| out.push(out[place]));
        }
        if out.len() > size {
            return Err(damaged());
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::array::floats;

    fn fixtures() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/hdf5")
    }

    /// Every dataset that h5py wrote with three bounds on the version of the format, against what h5py reads:
    /// byte orders, 16-bit floats, flags, filters, chunks that grew or were never written, texts and byte
    /// strings.
    #[test]
    fn corner_cases_of_the_format_are_read_as_h5py_reads_them() {
        let expected = std::fs::read_to_string(fixtures().join("corner.expected.json")).unwrap();
        let expected: Value = serde_json::from_str(&expected).unwrap();
        for (version, datasets) in expected.as_object().unwrap() {
            let path = fixtures().join(format!("corner-{version}.hdf5"));
            let file = Hdf5::open(&path, &Limits::default()).unwrap();
            let (groups, _) = file.members("many").unwrap();
            assert_eq!(groups.len(), 40);
            assert_eq!(file.number_attribute("many/episode_7", "id"), Some(7.0));
            assert!(file.text_attribute("", "json").unwrap().starts_with("{\"k\": \"vvv"));
            assert_eq!(file.data("link").unwrap().shape().unwrap(), [50, 3]);
            assert!(file.find("nowhere/else").unwrap().is_none());
            for (name, about) in datasets.as_object().unwrap() {
                let data = file.data(name).unwrap();
                let left = Cell::new(1 << 20);
                if let Some(scalar) = about.get("scalar") {
                    assert!(data.rows().is_err());
                    if scalar.is_string() {
                        assert_eq!(data.texts().unwrap(), [scalar.as_str().unwrap()]);
                    }
                    continue;
                }
                if data.is_byte_strings() {
                    let values: Vec<Vec<u8>> = serde_json::from_value(about["values"].clone()).unwrap();
                    assert_eq!(data.byte_strings(0..3, &left).unwrap(), values);
                    continue;
                }
                if about["values"].as_array().is_some_and(|values| values.iter().any(Value::is_string)) {
                    let values: Vec<String> = serde_json::from_value(about["values"].clone()).unwrap();
                    assert_eq!(data.texts().unwrap(), values, "{name}");
                    continue;
                }
                if name == "contiguous/u8" {
                    assert!(data.read_all(&left).unwrap_err().to_string().contains("beyond 32 bits"));
                    continue;
                }
                let array = data.read_all(&left).unwrap();
                let shape: Vec<usize> = serde_json::from_value(about["shape"].clone()).unwrap();
                assert_eq!(array.shape, shape, "{version} {name}");
                let (width, rows) = (array.width(), array.rows());
                let numbers = floats(array.numbers);
                let sum: f64 = numbers.iter().map(|x| f64::from(*x)).sum();
                assert!((sum - about["sum"].as_f64().unwrap_or(0.0)).abs() < 1e-4, "{version} {name}: {sum}");
                // Rows by themselves are the rows of the whole.
                for row in 0..rows {
                    let one = floats(data.read(row..row + 1, &left).unwrap().numbers);
                    assert_eq!(one, numbers[row * width..(row + 1) * width], "{version} {name}");
                }
            }
        }
    }

    #[test]
    fn files_without_their_last_byte_are_refused_whatever_is_read_of_them() {
        for version in ["earliest", "v110", "latest"] {
            let bytes = std::fs::read(fixtures().join(format!("corner-{version}.hdf5"))).unwrap();
            let name = format!("elmur-hdf5-cut-{version}-{}.hdf5", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
            let problem = Hdf5::open(&path, &Limits::default()).unwrap_err().to_string();
            std::fs::remove_file(&path).unwrap();
            let expected = format!("of {} bytes, of which {} are here", bytes.len(), bytes.len() - 1);
            assert!(problem.contains(&expected), "{version}: {problem}");
        }
    }

    #[test]
    fn arrays_beyond_the_limit_are_refused_before_they_are_read() {
        let file = Hdf5::open(&fixtures().join("corner-latest.hdf5"), &Limits::default()).unwrap();
        let problem = file.data("contiguous/f4").unwrap().read_all(&Cell::new(599)).unwrap_err().to_string();
        assert!(problem.contains("`contiguous/f4`: inflates to 600 bytes, too large"), "{problem}");
        let problem =
            file.data("vlen/u8").unwrap().byte_strings(0..3, &Cell::new(699)).unwrap_err().to_string();
        assert!(problem.contains("too large"), "{problem}");
    }

    #[test]
    fn damaged_lzf_data_are_an_error() {
        assert_eq!(lzf(&[2, b'a', b'b', b'c', 32, 2], 6).unwrap(), b"abcabc");
        assert_eq!(lzf(&[0, b'x', 0xe0, 3, 0], 13).unwrap(), [b'x'; 13]);
        for bad in [&[5, 1][..], &[32], &[32, 0], &[0, b'x', 0xe0, 255, 0]] {
            assert!(lzf(bad, 100).is_err(), "{bad:?}");
        }
    }
}
