//! `.elmur` files larger than memory: indexed by one pass that checks every byte, then read by range.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use elmur_base::{FieldMut, Leaf, Spaces};

use crate::episode::{ColumnRef, check_rewards, check_steps, misfit_fault};
use crate::error::{Error, Fault, Result};
use crate::format::{Aligned, BAD_MARKS, HEAD, Head, Header, SHAPE, Shape, places};
use crate::layout::ElementType;
use crate::layout::{Frame, Layout, Outline, Part};
use crate::packed::{Division, PACKED_HEAD, PackedColumn};
use crate::source::{Source, check_read};

/// Bytes of a record that are in memory at once while a file is indexed.
const BUFFER: usize = 1 << 18;

/// An `.elmur` file of any size. Only its index is in memory: about 64 bytes per episode, and eight per piece of
/// packed pictures.
///
/// The file may grow or be replaced by renaming meanwhile. A file that is shortened or overwritten in place
/// is found at the next read, which is an error then.
#[derive(Debug)]
pub struct ElmurFile {
    path: PathBuf,
    file: PositionedFile,
    header: Header,
    layout: Layout,
    records: Vec<Record>,
    /// Size and time of the last change when the file was indexed.
    state: (u64, Option<SystemTime>),
    torn_bytes: u64,
}

/// Where an episode lies in a file.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Record {
    /// Byte at which the payload begins.
    payload: u64,
    checksum: u32,
    outline: Outline,
    /// Pictures that are packed, in the order of their columns.
    packed: Box<[PackedColumn]>,
}

impl Record {
    /// Byte at which the record begins.
    pub(crate) fn begin(&self) -> u64 {
        self.payload - HEAD as u64
    }
}

impl ElmurFile {
    /// Reads a file once, checks every checksum and every number, and keeps where its episodes lie. A torn
    /// record at the end is left out and reported by [`Source::torn_bytes`]; any other damage is an error.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let fail = |e| Error::io(path, e);
        let file = File::open(path).map_err(fail)?;
        let state = state(&file.metadata().map_err(fail)?);
        let Indexed { header, records, torn_bytes, .. } =
            index(&mut BufReader::with_capacity(BUFFER, &file).take(state.0), path)?;
        if records.is_empty() {
            return Err(Error::Empty { path: path.to_owned() });
        }
        let (path, file, layout) = (path.to_owned(), PositionedFile::new(file), header.layout());
        let opened = Self { path, file, header, layout, records, state, torn_bytes };
        opened.check_unchanged()?;
        Ok(opened)
    }

    /// Refuses a file that was shortened, or changed without growing, since it was indexed.
    fn check_unchanged(&self) -> Result<()> {
        let now = state(&self.file.metadata().map_err(|e| Error::io(&self.path, e))?);
        if now.0 < self.state.0 || (now.0 == self.state.0 && now.1 != self.state.1) {
            return Err(self.changed());
        }
        Ok(())
    }

    fn changed(&self) -> Error {
        let problem =
            "changed while it was in use; leave datasets alone that are being read, and start again";
        Error::file(&self.path, problem)
    }

    fn read_bytes(&self, out: &mut [u8], offset: u64) -> Result<()> {
        self.file.read_exact_at(out, offset).map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => self.changed(),
            _ => Error::io(&self.path, e),
        })
    }

    /// The packed pictures of leaf `leaf` of the observation, if they are packed.
    fn packed_column<'a>(&self, record: &'a Record, leaf: usize) -> Option<&'a PackedColumn> {
        let columns = &self.layout.observations[..=leaf];
        columns[leaf].frame?;
        record.packed.get(columns.iter().filter(|column| column.frame.is_some()).count() - 1)
    }

    fn read_marks(&self, out: &mut [bool], mut offset: u64) -> Result<()> {
        let mut bytes = [0; 1 << 10];
        for out in out.chunks_mut(bytes.len()) {
            let bytes = &mut bytes[..out.len()];
            self.read_bytes(bytes, offset)?;
            out.iter_mut().zip(bytes).for_each(|(mark, byte)| *mark = *byte == 1);
            offset += out.len() as u64;
        }
        Ok(())
    }
}

impl Source for ElmurFile {
    fn spaces(&self) -> &Spaces {
        &self.header.spaces
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.header.metadata
    }

    fn episodes(&self) -> usize {
        self.records.len()
    }

    fn outline(&self, episode: usize) -> Outline {
        self.records[episode].outline
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, part: Part, episode: usize, rows: Range<usize>, mut out: FieldMut<'_>) -> Result<()> {
        check_read(self, part, episode, &rows, &out)?;
        let record = &self.records[episode];
        if let (Part::Observation(leaf), FieldMut::U8(out)) = (part, &mut out)
            && let Some(column) = self.packed_column(record, leaf)
        {
            self.check_unchanged()?;
            let read = |place: u64, to: &mut [u8]| self.read_bytes(to, record.payload + place);
            let fail = |problem| Error::damaged(&self.path, episode, record.begin(), problem);
            return column.unpack(rows, out, read, fail);
        }
        let places = &mut places(&self.layout, record.outline, !record.packed.is_empty());
        let Some(place) = places.find(|place| place.part == part) else {
            return Ok(());
        };
        self.check_unchanged()?;
        let offset = record.payload + place.start + rows.start as u64 * place.row_bytes as u64;
        match out {
            FieldMut::F32(out) => self.read_bytes(bytemuck::cast_slice_mut(out), offset),
            FieldMut::I32(out) => self.read_bytes(bytemuck::cast_slice_mut(out), offset),
            FieldMut::U8(out) => self.read_bytes(out, offset),
            FieldMut::Bool(out) => self.read_marks(out, offset),
            FieldMut::I64(_) => Ok(()),
        }
    }

    fn checksum(&self, episode: usize) -> u32 {
        self.records[episode].checksum
    }

    fn torn_bytes(&self) -> u64 {
        self.torn_bytes
    }
}

fn state(about: &fs::Metadata) -> (u64, Option<SystemTime>) {
    (about.len(), about.modified().ok())
}

/// What a pass over a whole file finds.
pub(crate) struct Indexed {
    pub(crate) header: Header,
    pub(crate) records: Vec<Record>,
    /// Size of a torn record at the end.
    pub(crate) torn_bytes: u64,
    /// Where the next record would begin.
    pub(crate) end: u64,
}

/// Reads and checks a whole stream. Memory does not depend on the size of episodes.
pub(crate) fn index(source: &mut impl Read, path: &Path) -> Result<Indexed> {
    let (indexed, damage) = index_sound(source, path)?;
    damage.map_or(Ok(indexed), Err)
}

/// [`index`] of the records before the first that is damaged, and what is wrong with that one.
pub(crate) fn index_sound(source: &mut impl Read, path: &Path) -> Result<(Indexed, Option<Error>)> {
    let (header, mut offset) = Header::read(source, path)?;
    let layout = header.layout();
    let mut records: Vec<Record> = Vec::new();
    let mut buffer = Aligned::default();
    let (torn_bytes, damage) = loop {
        let number = records.len();
        let damaged = |problem: String| (0, Some(Error::damaged(path, number, offset, problem)));
        buffer.fill(source, HEAD as u64).map_err(|e| Error::io(path, e))?;
        let head = match Head::decode(&buffer, number) {
            Ok(Some(head)) => head,
            Ok(None) => break (buffer.len() as u64, None),
            Err(problem) => break damaged(problem),
        };
        let scan = Scan { source, left: head.payload_len, hasher: Default::default(), buffer: &mut buffer };
        match scan.payload(head, &header, &layout).map_err(|e| Error::io(path, e))? {
            Scanned::Torn(bytes) => break (HEAD as u64 + bytes, None),
            Scanned::Damaged(problem) => break damaged(problem),
            Scanned::Misfit(fault) => break (0, Some(Error::episode(path, number, fault))),
            Scanned::Whole(shape, packed) => {
                let payload = offset + HEAD as u64;
                let (checksum, outline) = (shape.checksum(head.payload_crc), shape.outline());
                records.push(Record { payload, checksum, outline, packed });
                offset = payload + head.payload_len;
            }
        }
    };
    Ok((Indexed { header, records, torn_bytes, end: offset }, damage))
}

/// What a pass over a payload found.
enum Scanned {
    Whole(Shape, Box<[PackedColumn]>),
    /// The file ends after this many bytes of the payload.
    Torn(u64),
    Damaged(String),
    Misfit(Fault),
}

/// A pass over one payload, a piece at a time.
struct Scan<'a, R> {
    source: &'a mut R,
    /// Bytes of the payload that are still to be read.
    left: u64,
    hasher: crc32fast::Hasher,
    buffer: &'a mut Aligned,
}

impl<R: Read> Scan<'_, R> {
    /// Reads up to `len` bytes into the buffer; true if there were as many.
    fn piece(&mut self, len: u64) -> std::io::Result<bool> {
        let len = len.min(self.left);
        self.buffer.fill(self.source, len)?;
        self.hasher.update(self.buffer);
        self.left -= self.buffer.len() as u64;
        Ok(self.buffer.len() as u64 == len)
    }

    /// Damage is reported before numbers that do not fit: they follow from it.
    fn payload(mut self, head: Head, header: &Header, layout: &Layout) -> std::io::Result<Scanned> {
        let torn = |scan: &Self| Ok(Scanned::Torn(head.payload_len - scan.left));
        if !self.piece(SHAPE as u64)? {
            return torn(&self);
        }
        let shape = Shape::decode(self.buffer, head.payload_len, layout);
        let (mut problem, mut fault, mut packed) = (None, None, Vec::new());
        if let Ok(shape) = &shape {
            let outline = shape.outline();
            fault = check_steps(outline.steps).err();
            for place in places(layout, outline, shape.packed()) {
                let each = (BUFFER / place.row_bytes.max(1)).max(1);
                for first in (0..place.rows).step_by(each) {
                    let rows = each.min(place.rows - first);
                    if !self.piece(rows as u64 * place.row_bytes as u64)? {
                        return torn(&self);
                    }
                    if matches!(place.part, Part::Imitate | Part::Accepted) {
                        let bad = self.buffer.iter().any(|mark| *mark > 1);
                        problem = problem.or(bad.then(|| BAD_MARKS.to_owned()));
                    } else if fault.is_none() {
                        fault = check(place.part, &header.spaces, layout, first, self.buffer).err();
                    }
                }
                let len = place.rows as u64 * place.row_bytes as u64;
                if !self.piece(len.next_multiple_of(8) - len)? {
                    return torn(&self);
                }
            }
            if shape.packed() {
                match self.packed(head.payload_len, outline, layout)? {
                    Pictures::Whole(columns) => packed = columns,
                    Pictures::Torn => return torn(&self),
                    Pictures::Damaged(damage) => problem = problem.or(Some(damage)),
                }
            }
        }
        while self.left > 0 {
            if !self.piece(BUFFER as u64)? {
                return torn(&self);
            }
        }
        if self.hasher.finalize() != head.payload_crc {
            return Ok(Scanned::Damaged("wrong checksum of the record's payload".to_owned()));
        }
        Ok(match (shape, problem, fault) {
            (Err(problem), ..) | (Ok(_), Some(problem), _) => Scanned::Damaged(problem),
            (Ok(_), None, Some(fault)) => Scanned::Misfit(fault),
            (Ok(shape), None, None) => Scanned::Whole(shape, packed.into()),
        })
    }

    /// Reads the tables of packed pictures and passes over the pictures, whose bytes the checksum covers.
    fn packed(&mut self, payload_len: u64, outline: Outline, layout: &Layout) -> std::io::Result<Pictures> {
        let mut columns = Vec::new();
        let frames = layout.observations.iter().enumerate();
        for (i, frame) in frames.filter_map(|(i, column)| Some((i, column.frame?))) {
            match self.packed_column(payload_len, outline.rows(Part::Observation(i)), frame)? {
                Ok(Some(column)) => columns.push(column),
                Ok(None) => return Ok(Pictures::Torn),
                Err(problem) => return Ok(Pictures::Damaged(problem)),
            }
        }
        Ok(match self.left {
            0 => Pictures::Whole(columns),
            more => Pictures::Damaged(format!("{more} bytes behind the packed pictures")),
        })
    }

    /// One packed column; none if the file ends within.
    fn packed_column(
        &mut self,
        payload_len: u64,
        rows: usize,
        frame: Frame,
    ) -> std::io::Result<Result<Option<PackedColumn>, String>> {
        let ends_within = || Ok(Err("a payload that ends within packed pictures".to_owned()));
        let left = self.left;
        if left < PACKED_HEAD as u64 {
            return ends_within();
        }
        if !self.piece(PACKED_HEAD as u64)? {
            return Ok(Ok(None));
        }
        let division = match Division::decode(self.buffer, frame, rows, left) {
            Ok(division) => division,
            Err(problem) => return Ok(Err(problem)),
        };
        let (mut column, mut table) = (PackedColumn::new(division), 4 * division.entries() as u64);
        while table > 0 {
            let len = table.min(BUFFER as u64);
            if !self.piece(len)? {
                return Ok(Ok(None));
            }
            if let Err(problem) = column.extend(self.buffer) {
                return Ok(Err(problem));
            }
            table -= len;
        }
        let len = column.begin_at(payload_len - self.left);
        let end = payload_len - self.left + len;
        let mut rest = len + (end.next_multiple_of(8) - end);
        if rest > self.left {
            return ends_within();
        }
        while rest > 0 {
            let len = rest.min(BUFFER as u64);
            if !self.piece(len)? {
                return Ok(Ok(None));
            }
            rest -= len;
        }
        Ok(Ok(Some(column)))
    }
}

/// What a pass over the packed pictures of a payload found.
enum Pictures {
    Whole(Vec<PackedColumn>),
    Torn,
    Damaged(String),
}

/// Checks the numbers of some rows of a column, the first of which is row `first`.
fn check(part: Part, spaces: &Spaces, layout: &Layout, first: usize, bytes: &[u8]) -> Result<(), Fault> {
    let column = |element: ElementType| match element {
        ElementType::F32 => ColumnRef::F32(bytemuck::cast_slice(bytes)),
        ElementType::I32 => ColumnRef::I32(bytemuck::cast_slice(bytes)),
        ElementType::U8 => ColumnRef::U8(bytes),
    };
    let leaf = |leaves: Vec<Leaf<'_>>, i: usize, element, bounded| match leaves.get(i) {
        Some(leaf) => misfit_fault(&part.to_string(), leaf, column(element), bounded, first),
        None => Ok(()),
    };
    match part {
        Part::Observation(i) => leaf(spaces.observation.leaves(), i, layout.observations[i].element, true),
        Part::Action(i) | Part::Label(i) => leaf(spaces.action.leaves(), i, layout.actions[i].element, false),
        Part::Reward => check_rewards(bytemuck::cast_slice(bytes), first),
        Part::Imitate | Part::Accepted => Ok(()),
    }
}

/// A file that several threads read at positions of their own.
#[derive(Debug)]
struct PositionedFile {
    file: File,
    #[cfg(not(unix))]
    lock: std::sync::Mutex<()>,
}

impl PositionedFile {
    fn new(file: File) -> Self {
        Self {
            file,
            #[cfg(not(unix))]
            lock: std::sync::Mutex::new(()),
        }
    }

    fn metadata(&self) -> std::io::Result<fs::Metadata> {
        self.file.metadata()
    }

    #[cfg(unix)]
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.file, out, offset)
    }

    #[cfg(not(unix))]
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> std::io::Result<()> {
        use std::io::{Seek, SeekFrom};
        let _lock = self.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut file = &self.file;
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(out)
    }
}
