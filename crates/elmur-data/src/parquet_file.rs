//! Parquet files as far as LeRobot's datasets need them: ranges of rows of columns of numbers, and byte
//! strings. The only file that knows the crate behind it.
//!
//! A column of lists is stored as its values and two numbers for each: the repetition level, 0 where a row
//! begins, and the definition level, below its maximum where something is missing. Each row must have as many
//! values as expected, and none may be missing. What the file says of its size is checked before memory is
//! taken for it.

use std::cell::Cell;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use parquet::basic::{Compression, ConvertedType, LogicalType, Type};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{
    BoolType, ByteArrayType, DataType, DoubleType, FixedLenByteArrayType, FloatType, Int32Type, Int64Type,
};
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader, RowGroupMetaData};
use parquet::file::reader::{ChunkReader, Length};
use parquet::file::serialized_reader::SerializedPageReader;

use crate::array::{Array, f32_from_f16, too_large};
use crate::episode::Column;
use crate::error::{Error, Result};

/// First and last bytes of a file.
const MAGIC: &[u8] = b"PAR1";
/// Most bytes of a file's description of itself.
const MAX_FOOTER: u64 = 64 << 20;
/// Pages without values that may follow each other.
const MOST_EMPTY_PAGES: usize = 64;

/// An open file.
pub(crate) struct ParquetFile {
    path: PathBuf,
    chunks: Arc<Chunks>,
    about: ParquetMetaData,
    rows: usize,
}

impl fmt::Debug for ParquetFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParquetFile").field("path", &self.path).field("rows", &self.rows).finish()
    }
}

impl ParquetFile {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let io = |e| Error::io(path, e);
        let mut file = File::open(path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len();
        let (mut start, mut end) = ([0; 4], [0; 8]);
        if len < 12 || file.read_exact(&mut start).is_err() || start != *MAGIC {
            return Err(Error::file(path, "not a Parquet file; copy it again"));
        }
        file.seek(SeekFrom::End(-8)).map_err(io)?;
        file.read_exact(&mut end).map_err(io)?;
        if end[4..] != *MAGIC {
            let problem = "a Parquet file without its end: the recording was not finalised (call finalize() on the \
                           LeRobotDataset that wrote it), or the copy is not whole";
            return Err(Error::file(path, problem));
        }
        let footer = u64::from(u32::from_le_bytes([end[0], end[1], end[2], end[3]]));
        if footer > MAX_FOOTER || footer + 12 > len {
            return Err(Error::file(path, format!("a description of {footer} bytes; the file is damaged")));
        }
        let chunks = Arc::new(Chunks { file: Mutex::new(file), len });
        let about = ParquetMetaDataReader::new().parse_and_finish(&*chunks);
        let about = about.map_err(|e| Error::file(path, format!("Parquet: {e}; the file is damaged")))?;
        let mut rows = 0usize;
        for group in about.row_groups() {
            check_group(group, len).map_err(|problem| Error::file(path, problem))?;
            rows = rows.saturating_add(group.num_rows() as usize);
        }
        Ok(Self { path: path.to_owned(), chunks, about, rows })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    fn error(&self, column: &str, problem: impl fmt::Display) -> Error {
        Error::file(&self.path, format!("column `{column}`: {problem}"))
    }

    /// The note of this name that the writer left in the file.
    pub(crate) fn note(&self, name: &str) -> Option<&str> {
        let notes = self.about.file_metadata().key_value_metadata()?;
        notes.iter().find(|note| note.key == name)?.value.as_deref()
    }

    /// Names of the columns at the root, those of groups and lists included.
    pub(crate) fn columns(&self) -> Vec<&str> {
        let fields = self.about.file_metadata().schema_descr().root_schema().get_fields();
        fields.iter().map(|field| field.name()).collect()
    }

    /// The leaf of a column at the root: the column itself, the values of a list, or the member `member` of a
    /// group.
    fn leaf(&self, column: &str, member: Option<&str>) -> Option<usize> {
        let schema = self.about.file_metadata().schema_descr();
        schema.columns().iter().position(|leaf| match (leaf.path().parts(), member) {
            ([name, rest @ ..], None) => {
                name == column && rest.chunks(2).all(|pair| pair.len() == 2 && pair[0] == "list")
            }
            ([name, last], Some(member)) => name == column && last == member,
            _ => false,
        })
    }

    /// Rows of a column of numbers with `width` of them per row, as they lie there. What their decoded
    /// numbers take is subtracted from what is `left`.
    pub(crate) fn numbers(
        &self,
        column: &str,
        rows: Range<usize>,
        width: usize,
        left: &Cell<u64>,
    ) -> Result<Array> {
        let Some(leaf) = self.leaf(column, None) else {
            return Err(self.error(column, "missing; is this a whole dataset?"));
        };
        let count = (rows.len() as u64).saturating_mul(width as u64);
        let descriptor = self.about.file_metadata().schema_descr().column(leaf);
        // Levels, and values of at most eight bytes, or byte strings and their places.
        let each = if descriptor.physical_type() == Type::FIXED_LEN_BYTE_ARRAY { 64 } else { 12 };
        let held = count.saturating_mul(each);
        let rest = left.get().checked_sub(held);
        left.set(rest.ok_or_else(|| self.error(column, too_large(held, left.get())))?);
        let shape = vec![rows.len(), width];
        // Large unsigned integers are stored as negative ones.
        let unsigned =
            [ConvertedType::UINT_32, ConvertedType::UINT_64].contains(&descriptor.converted_type());
        let ints = |numbers: Vec<i64>| {
            let narrow = |x: i64| i32::try_from(x).ok().filter(|x| *x >= 0 || !unsigned);
            let narrow = numbers.into_iter().map(narrow).collect::<Option<Vec<i32>>>();
            narrow.ok_or_else(|| self.error(column, "integers beyond 32 bits; record them as floats"))
        };
        let numbers = match descriptor.physical_type() {
            Type::BOOLEAN => {
                let flags = self.values::<BoolType>(leaf, column, rows, width)?;
                Column::I32(flags.into_iter().map(i32::from).collect())
            }
            Type::INT32 if unsigned => {
                let numbers = self.values::<Int32Type>(leaf, column, rows, width)?;
                Column::I32(ints(numbers.into_iter().map(i64::from).collect())?)
            }
            Type::INT32 => Column::I32(self.values::<Int32Type>(leaf, column, rows, width)?),
            Type::INT64 => Column::I32(ints(self.values::<Int64Type>(leaf, column, rows, width)?)?),
            Type::FLOAT => Column::F32(self.values::<FloatType>(leaf, column, rows, width)?),
            Type::DOUBLE => {
                let numbers = self.values::<DoubleType>(leaf, column, rows, width)?;
                Column::F32(numbers.into_iter().map(|x| x as f32).collect())
            }
            Type::FIXED_LEN_BYTE_ARRAY if descriptor.logical_type_ref() == Some(&LogicalType::Float16) => {
                let halves = self.values::<FixedLenByteArrayType>(leaf, column, rows, width)?;
                let half = |bytes: &[u8]| bytes.first_chunk().map(|x| f32_from_f16(u16::from_le_bytes(*x)));
                let numbers = halves.iter().map(|bytes| half(bytes.data())).collect::<Option<Vec<f32>>>();
                Column::F32(numbers.ok_or_else(|| self.error(column, "expected floats of 16 bits"))?)
            }
            other => return Err(self.error(column, format!("elements of type {other}; expected numbers"))),
        };
        Ok(Array { shape, numbers })
    }

    /// Rows of a column of one 64-bit float per row.
    pub(crate) fn doubles(&self, column: &str, rows: Range<usize>, left: &Cell<u64>) -> Result<Vec<f64>> {
        let leaf = self.leaf(column, None);
        let is_double = |leaf: usize| {
            self.about.file_metadata().schema_descr().column(leaf).physical_type() == Type::DOUBLE
        };
        match leaf.filter(|leaf| is_double(*leaf)) {
            Some(leaf) => self.values::<DoubleType>(leaf, column, rows, 1),
            None => {
                let numbers = self.numbers(column, rows, 1, left)?.numbers;
                Ok(crate::array::floats(numbers).into_iter().map(f64::from).collect())
            }
        }
    }

    /// Rows of a column of one byte string per row, or of the member of a group of columns.
    pub(crate) fn byte_strings(
        &self,
        column: &str,
        member: Option<&str>,
        rows: Range<usize>,
        left: &Cell<u64>,
    ) -> Result<Vec<Vec<u8>>> {
        let leaf = self.leaf(column, member).filter(|leaf| {
            self.about.file_metadata().schema_descr().column(*leaf).physical_type() == Type::BYTE_ARRAY
        });
        let Some(leaf) = leaf else {
            return Err(self.error(column, "missing, or not of bytes; is this a whole dataset?"));
        };
        let strings = self.values::<ByteArrayType>(leaf, column, rows, 1)?;
        let held = strings.iter().map(|string| string.len() as u64).fold(0, u64::saturating_add);
        let rest = left.get().checked_sub(held);
        left.set(rest.ok_or_else(|| self.error(column, too_large(held, left.get())))?);
        Ok(strings.iter().map(|string| string.data().to_vec()).collect())
    }

    /// Rows of a leaf with `width` values each, none of them missing.
    fn values<T: DataType>(
        &self,
        leaf: usize,
        column: &str,
        rows: Range<usize>,
        width: usize,
    ) -> Result<Vec<T::T>> {
        let fail = |e: ParquetError| self.error(column, format!("{e}; the file is damaged"));
        let schema = self.about.file_metadata().schema_descr();
        let descriptor = schema.column(leaf);
        let (max_def, max_rep) = (descriptor.max_def_level(), descriptor.max_rep_level());
        if width != 1 && max_rep == 0 {
            return Err(self.error(column, format!("expected {width} values per row, got one")));
        }
        let (mut all, mut first) = (Vec::new(), 0);
        for group in self.about.row_groups() {
            let group_rows = group.num_rows() as usize;
            let begin = rows.start.clamp(first, first + group_rows) - first;
            let end = rows.end.clamp(first, first + group_rows) - first;
            first += group_rows;
            if begin == end {
                continue;
            }
            let chunk = group.column(leaf);
            if !matches!(chunk.compression(), Compression::UNCOMPRESSED | Compression::SNAPPY) {
                let problem = format!(
                    "compressed by {}; expected SNAPPY, as LeRobot writes, or none",
                    chunk.compression_codec()
                );
                return Err(self.error(column, problem));
            }
            let most = group_rows.saturating_mul(width);
            let inner =
                SerializedPageReader::new(Arc::clone(&self.chunks), chunk, group_rows, None).map_err(fail)?;
            let pages = CheckedPages { inner, width, most: u32::try_from(most).unwrap_or(u32::MAX) };
            let mut reader = ColumnReaderImpl::<T>::new(Arc::clone(&descriptor), Box::new(pages));
            let skipped = reader.skip_records(begin).map_err(fail)?;
            let (mut def, mut rep) = (Vec::new(), Vec::new());
            let (before, wanted) = (all.len(), end - begin);
            let (mut records, mut values, mut levels, mut idle) = (0, 0, 0, 0);
            // A page without values ends a call, but not the column.
            while records < wanted && idle < MOST_EMPTY_PAGES {
                let read = reader
                    .read_records(wanted - records, Some(&mut def), Some(&mut rep), &mut all)
                    .map_err(fail)?;
                (records, values, levels) = (records + read.0, values + read.1, levels + read.2);
                idle = if read.2 == 0 { idle + 1 } else { 0 };
            }
            if (skipped, records) != (begin, wanted) || all.len() - before != values {
                return Err(self.error(column, format!("expected {wanted} rows, got {records}")));
            }
            if max_def > 0 && def.iter().any(|level| *level != max_def) {
                return Err(self.error(column, "empty places (null); expected a value everywhere"));
            }
            let whole = max_rep == 0
                || rep.iter().enumerate().all(|(i, level)| (*level == 0) == i.is_multiple_of(width));
            if !whole || levels != wanted.saturating_mul(width) || values != levels {
                return Err(
                    self.error(column, format!("rows of other sizes; expected {width} values in each"))
                );
            }
        }
        match all.len() == rows.len().saturating_mul(width) {
            true => Ok(all),
            false => Err(self.error(column, format!("expected rows {rows:?}, got {} values", all.len()))),
        }
    }
}

/// Checks that what a group of rows says of its columns can be: the crate takes it for granted.
fn check_group(group: &RowGroupMetaData, len: u64) -> Result<(), String> {
    let damaged = |what: &str| Err(format!("Parquet: {what}; the file is damaged"));
    if !(0..=1 << 40).contains(&group.num_rows()) {
        return damaged("an impossible number of rows");
    }
    for column in group.columns() {
        let starts = [Some(column.data_page_offset()), column.dictionary_page_offset()];
        let inside = |start: i64| {
            let end = start.checked_add(column.compressed_size());
            start >= 0 && column.compressed_size() >= 0 && end.is_some_and(|end| end as u64 <= len)
        };
        if !starts.into_iter().flatten().all(|start| start >= 0 && start as u64 <= len)
            || !inside(column.dictionary_page_offset().unwrap_or(column.data_page_offset()))
            || column.num_values() < 0
        {
            return damaged("a column that lies beyond the end");
        }
    }
    Ok(())
}

/// Pages of a column, none of which may claim more values than there are in its group of rows: levels are
/// stored so densely that a few bytes could fill any memory.
struct CheckedPages {
    inner: SerializedPageReader<Chunks>,
    width: usize,
    most: u32,
}

impl CheckedPages {
    fn checked(&self, page: Option<Page>) -> ParquetResult<Option<Page>> {
        match page {
            Some(page) if page.num_values() > self.most => Err(ParquetError::General(format!(
                "expected {} values in each row, at most {} in a page, got {}",
                self.width,
                self.most,
                page.num_values()
            ))),
            page => Ok(page),
        }
    }
}

impl Iterator for CheckedPages {
    type Item = ParquetResult<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for CheckedPages {
    fn get_next_page(&mut self) -> ParquetResult<Option<Page>> {
        let page = self.inner.get_next_page()?;
        self.checked(page)
    }

    fn peek_next_page(&mut self) -> ParquetResult<Option<PageMetadata>> {
        self.inner.peek_next_page()
    }

    fn skip_next_page(&mut self) -> ParquetResult<()> {
        self.inner.skip_next_page()
    }

    fn supports_deferred_dictionary(&self) -> bool {
        self.inner.supports_deferred_dictionary()
    }

    fn take_deferred_dictionary(&mut self) -> ParquetResult<Option<Page>> {
        let page = self.inner.take_deferred_dictionary()?;
        self.checked(page)
    }

    fn at_record_boundary(&mut self) -> ParquetResult<bool> {
        self.inner.at_record_boundary()
    }
}

/// A file that threads read parts of, none beyond its end.
struct Chunks {
    file: Mutex<File>,
    len: u64,
}

impl Chunks {
    fn read_at(&self, at: u64, to: &mut [u8]) -> std::io::Result<usize> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        file.seek(SeekFrom::Start(at))?;
        file.read(to)
    }
}

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.len
    }
}

impl ChunkReader for Chunks {
    type T = std::io::Cursor<Bytes>;

    /// Page headers are read this way; they have a few hundred bytes.
    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        let rest = self.len.saturating_sub(start);
        self.get_bytes(start.min(self.len), rest.min(MAX_PAGE_HEADER) as usize).map(std::io::Cursor::new)
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        if start.checked_add(length as u64).is_none_or(|end| end > self.len) {
            return Err(ParquetError::EOF(format!("{length} bytes at {start} of {}", self.len)));
        }
        let (mut bytes, mut done) = (vec![0; length], 0);
        while done < length {
            match self.read_at(start + done as u64, &mut bytes[done..]) {
                Ok(0) => return Err(ParquetError::EOF("the file became shorter".to_owned())),
                Ok(read) => done += read,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(bytes.into())
    }
}

/// Most bytes of a page's header.
const MAX_PAGE_HEADER: u64 = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_16_bits_and_without_a_sign_are_read_or_refused() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/parquet/types.parquet");
        let file = ParquetFile::open(&path).unwrap();
        let read = |column: &str, width: usize| file.numbers(column, 0..4, width, &Cell::new(1 << 20));
        let smallest = 2f32.powi(-24);
        assert_eq!(read("half", 1).unwrap().numbers, Column::F32(vec![0.5, -2.0, 65504.0, smallest]));
        let halves = vec![0.5, smallest, -2.0, 65504.0, 65504.0, -2.0, smallest, 0.5];
        assert_eq!(read("halves", 2).unwrap().numbers, Column::F32(halves));
        assert_eq!(read("u32", 1).unwrap().numbers, Column::I32(vec![1, 2, 3, i32::MAX]));
        assert_eq!(read("i32", 1).unwrap().numbers, Column::I32(vec![-1, 2, i32::MIN, 5]));
        for column in ["u32_large", "u64_large"] {
            let problem = read(column, 1).unwrap_err().to_string();
            assert!(problem.contains("integers beyond 32 bits"), "{problem}");
        }
    }
}
