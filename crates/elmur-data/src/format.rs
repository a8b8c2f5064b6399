//! The bytes of an `.elmur` file: a checked header, then one checked record per episode.
//! `docs/dataset-format.md` is the specification.
//!
//! Records are appended and never changed, so that a process that is killed leaves at most one torn record,
//! the last one. Everything else that can happen to a file is found by a CRC-32: of the header, of each
//! record's head, of each payload.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::ops::Deref;
use std::path::Path;

use elmur_base::{Space, Spaces};
use serde::{Deserialize, Serialize};

use crate::episode::{Column, ColumnRef, Episode, EpisodeRef, fits};
use crate::error::{Error, Fault, Result};
use crate::layout::{ColumnType, ElementType, Layout, Outline, Part};
use crate::packed::{Division, MAX_COLUMN, PACKED_HEAD, PackedColumn, pack};

#[cfg(target_endian = "big")]
compile_error!("elmur-data reads parts of little-endian files as they lie; this machine is big-endian");

pub(crate) const MAGIC: [u8; 8] = *b"ELMURDAT";
const VERSION: u32 = 1;
const MARKER: [u8; 4] = *b"EPIS";
/// Bytes before the header's JSON.
const PREFIX: usize = 24;
/// Bytes before a record's payload.
pub(crate) const HEAD: usize = 24;
/// Bytes before a payload's columns.
pub(crate) const SHAPE: usize = 16;
/// Largest header, in bytes.
const MAX_HEADER: u64 = 1 << 26;

const TERMINATED: u32 = 1;
const TRUNCATED: u32 = 2;
const FINAL_OBSERVATION: u32 = 4;
const COUNTS: u32 = 8;
const LABELS: u32 = 16;
const ACCEPTED: u32 = 32;
const PACKED: u32 = 64;

/// Bytes that begin at a multiple of eight in memory.
#[derive(Debug, Default)]
pub(crate) struct Aligned {
    words: Vec<u64>,
    len: usize,
}

impl Aligned {
    /// Up to `len` bytes of `source`; memory is taken as they come, not as `len` promises.
    pub(crate) fn read(source: &mut impl Read, len: u64) -> std::io::Result<Self> {
        let mut bytes = Self::default();
        bytes.fill(source, len)?;
        Ok(bytes)
    }

    /// Replaces what is here by up to `len` bytes of `source`.
    pub(crate) fn fill(&mut self, source: &mut impl Read, len: u64) -> std::io::Result<()> {
        self.len = 0;
        while (self.len as u64) < len {
            let room = (len - self.len as u64).min(1 << 20) as usize;
            self.words.resize((self.len + room).div_ceil(8).max(self.words.len()), 0);
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
            match source.read(&mut bytes[self.len..self.len + room]) {
                Ok(0) => break,
                Ok(read) => self.len += read,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

impl Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

/// What a file says about all of its episodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Header {
    pub(crate) spaces: Spaces,
    observation_types: Vec<ElementType>,
    action_types: Vec<ElementType>,
    pub(crate) metadata: BTreeMap<String, String>,
}

impl Header {
    /// A header whose element types the first episode will decide.
    pub(crate) fn new(spaces: Spaces, metadata: BTreeMap<String, String>) -> Result<Self, String> {
        spaces.validate().map_err(|e| format!("{e}; correct the spaces"))?;
        Ok(Self { spaces, observation_types: Vec::new(), action_types: Vec::new(), metadata })
    }

    /// Takes over the element types of the first episode.
    pub(crate) fn set_types(&mut self, first: &EpisodeRef<'_>) {
        let types = |columns: &[ColumnRef<'_>]| columns.iter().map(ColumnRef::element_type).collect();
        (self.observation_types, self.action_types) = (types(&first.observations), types(&first.actions));
    }

    /// Whether an episode fits the spaces and has columns of the types that the others have.
    pub(crate) fn check(&self, episode: &EpisodeRef<'_>) -> Result<(), Fault> {
        episode.check(&self.spaces)?;
        let types = self.observation_types.iter().chain(&self.action_types);
        let types = types.chain(&self.action_types);
        let columns = episode.observations.iter().chain(&episode.actions);
        let columns = columns.chain(episode.labels.iter().flatten());
        match types.zip(columns).enumerate().find(|(_, (t, column))| **t != column.element_type()) {
            None => Ok(()),
            Some((i, (t, column))) => Fault::new(
                match i.checked_sub(self.observation_types.len()) {
                    None => format!("observation leaf {i}"),
                    Some(i) if i < self.action_types.len() => format!("action leaf {i}"),
                    Some(i) => format!("label leaf {}", i - self.action_types.len()),
                },
                format!("{} as in the first episode", t.name()),
                column.element_type().name(),
                "record a leaf in one type throughout",
            ),
        }
    }

    pub(crate) fn encode(&self) -> Result<Vec<u8>, String> {
        let mut json = serde_json::to_vec(self).map_err(|e| e.to_string())?;
        json.resize(json.len().next_multiple_of(8), b' ');
        if json.len() as u64 > MAX_HEADER {
            return Err("a header that is too long; give a box one bound for all its numbers".to_owned());
        }
        if serde_json::from_slice::<Header>(&json).ok().as_ref() != Some(self) {
            return Err("bounds that JSON cannot hold; use f32::MIN and f32::MAX for no bound".to_owned());
        }
        let mut body = (json.len() as u64).to_le_bytes().to_vec();
        body.extend(json);
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(crc32fast::hash(&body).to_le_bytes());
        bytes.extend(body);
        Ok(bytes)
    }

    /// Reads the header at the beginning of `source`, and says where the first record begins.
    pub(crate) fn read(source: &mut impl Read, path: &Path) -> Result<(Self, u64)> {
        Self::read_if_whole(source, path)?.ok_or_else(|| {
            let problem = "ends within the header; collect again, or restore the file from a copy";
            Error::file(path, problem)
        })
    }

    /// [`Header::read`], or none if `source` ends within the header, as a file does whose writer was killed at once.
    pub(crate) fn read_if_whole(source: &mut impl Read, path: &Path) -> Result<Option<(Self, u64)>> {
        let fail = |problem: &str| Err(Error::file(path, problem));
        let damaged = |problem: &str| {
            Err(Error::file(path, format!("{problem}: a damaged header; restore the file from a copy")))
        };
        let prefix = Aligned::read(source, PREFIX as u64).map_err(|e| Error::io(path, e))?;
        if !prefix.starts_with(&MAGIC[..prefix.len().min(8)]) {
            return fail("not an .elmur file; for .npz files, give the folder that holds them");
        }
        if prefix.len() < PREFIX {
            return Ok(None);
        }
        let (version, crc, len) = (u32_at(&prefix, 8), u32_at(&prefix, 12), u64_at(&prefix, 16));
        if version != VERSION {
            let known =
                format!("version {version} of the format, where this program knows version {VERSION}");
            return fail(&format!("{known}; use the program that wrote it, or restore the file from a copy"));
        }
        if len > MAX_HEADER || !len.is_multiple_of(8) {
            return damaged(&format!("{len} bytes"));
        }
        let json = Aligned::read(source, len).map_err(|e| Error::io(path, e))?;
        if (json.len() as u64) < len {
            return Ok(None);
        }
        if crc32fast::hash(&[&prefix[16..], &json].concat()) != crc {
            return damaged("wrong checksum");
        }
        let header: Header = match serde_json::from_slice(&json) {
            Ok(header) => header,
            Err(e) => return damaged(&e.to_string()),
        };
        if let Err(e) = header.spaces.validate() {
            return damaged(&e.to_string());
        }
        let fit = |space: &Space, types: &[ElementType]| {
            let leaves = space.leaves();
            leaves.len() == types.len() && leaves.iter().zip(types).all(|(leaf, t)| fits(leaf, *t))
        };
        if !fit(&header.spaces.observation, &header.observation_types)
            || !fit(&header.spaces.action, &header.action_types)
        {
            return damaged("element types that do not fit the spaces");
        }
        Ok(Some((header, PREFIX as u64 + len)))
    }

    /// Element type and numbers per row of every column, observations and actions.
    pub(crate) fn layout(&self) -> Layout {
        Layout::new(&self.spaces, &self.observation_types, &self.action_types)
    }
}

/// The head of a record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    pub(crate) payload_crc: u32,
    pub(crate) payload_len: u64,
}

impl Head {
    fn encode(self, number: u32) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[..4].copy_from_slice(&MARKER);
        bytes[8..12].copy_from_slice(&number.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.payload_crc.to_le_bytes());
        bytes[16..].copy_from_slice(&self.payload_len.to_le_bytes());
        let crc = crc32fast::hash(&bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The head of episode `number` at the beginning of `bytes`, all that is left of the file; none if the
    /// file ends before.
    pub(crate) fn decode(bytes: &[u8], number: usize) -> Result<Option<Self>, String> {
        if !bytes.starts_with(&MARKER[..bytes.len().min(4)]) {
            return Err("no record begins here".to_owned());
        }
        if bytes.len() < HEAD {
            return Ok(None);
        }
        if crc32fast::hash(&bytes[8..HEAD]) != u32_at(bytes, 4) {
            return Err("wrong checksum of the record's head".to_owned());
        }
        if u32_at(bytes, 8) as usize != number {
            return Err(format!("this is the record of episode {}", u32_at(bytes, 8)));
        }
        Ok(Some(Self { payload_crc: u32_at(bytes, 12), payload_len: u64_at(bytes, 16) }))
    }
}

/// The first bytes of a payload: steps and flags. They decide how long it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) steps: usize,
    flags: u32,
    /// Of packed pictures: the CRC-32 of the payload that has them as they are.
    plain_crc: u32,
}

impl Shape {
    /// Decodes the beginning of a payload of `len` bytes and checks it against that length.
    pub(crate) fn decode(start: &[u8], len: u64, layout: &Layout) -> Result<Self, String> {
        if start.len() < SHAPE {
            return Err(format!("a payload of {len} bytes, too short for any episode"));
        }
        let (steps, flags, plain_crc) = (u64_at(start, 0), u32_at(start, 8), u32_at(start, 12));
        let packed = flags & PACKED != 0;
        if flags >= 2 * PACKED || (plain_crc != 0 && !packed) {
            return Err("flags that version 1 does not know".to_owned());
        }
        if packed && !layout.observations.iter().any(|column| column.frame.is_some()) {
            return Err("packed pictures, where no observation is a picture".to_owned());
        }
        let needed = payload_len(u128::from(steps), flags, layout);
        if needed != u128::from(len) && (!packed || needed > u128::from(len)) {
            let least = if packed { "at least " } else { "" };
            return Err(format!("a payload of {len} bytes for {steps} steps, which take {least}{needed}"));
        }
        let steps =
            usize::try_from(steps).map_err(|_| format!("{steps} steps, too many for this machine"))?;
        Ok(Self { steps, flags, plain_crc })
    }

    /// Whether pictures are packed, behind the other columns.
    pub(crate) fn packed(self) -> bool {
        self.flags & PACKED != 0
    }

    /// The checksum of the episode, whose payload has the given one: that of its payload without packing.
    pub(crate) fn checksum(self, payload_crc: u32) -> u32 {
        if self.packed() { self.plain_crc } else { payload_crc }
    }

    pub(crate) fn outline(self) -> Outline {
        let has = |flag: u32| self.flags & flag != 0;
        Outline {
            steps: self.steps,
            final_observation: has(FINAL_OBSERVATION),
            terminated: has(TERMINATED),
            truncated: has(TRUNCATED),
            marked: has(COUNTS),
            labelled: has(LABELS),
            tied: has(ACCEPTED),
        }
    }
}

/// Whether a column is one of pictures.
fn is_picture(column: &ColumnType) -> bool {
    column.frame.is_some()
}

/// Bytes of a payload, without packed pictures. In 128 bits nothing overflows: 2^64 rows of 2^24 numbers of 2^2
/// bytes.
fn payload_len(steps: u128, flags: u32, layout: &Layout) -> u128 {
    let column = |rows: u128, element: ElementType, width: usize| {
        (rows * width as u128 * element.size() as u128).next_multiple_of(8)
    };
    let rows = steps + u128::from(flags & FINAL_OBSERVATION != 0);
    let mut len = SHAPE as u128;
    let plain = layout.observations.iter().filter(|c| flags & PACKED == 0 || !is_picture(c));
    len += plain.map(|c| column(rows, c.element, c.width)).sum::<u128>();
    let actions = layout.actions.iter().map(|c| column(steps, c.element, c.width)).sum::<u128>();
    len += if flags & LABELS != 0 { 2 * actions } else { actions };
    len += column(steps, ElementType::F32, 1);
    len += if flags & COUNTS != 0 { column(steps, ElementType::U8, 1) } else { 0 };
    len + if flags & ACCEPTED != 0 { column(steps, ElementType::U8, layout.choices) } else { 0 }
}

/// Bytes of a payload that has pictures as they are.
pub(crate) fn plain_len(layout: &Layout, outline: Outline) -> u128 {
    let last = places(layout, outline, false).last();
    last.map_or(0, |place| u128::from(place.start) + place.rows as u128 * place.row_bytes as u128)
}

/// The columns of a payload in their order: the column, its rows, bytes per row, and where it begins. Pictures
/// that are packed are not among them.
pub(crate) fn places(layout: &Layout, outline: Outline, packed: bool) -> impl Iterator<Item = Place> {
    let observations = layout.observations.iter().enumerate();
    let observations = observations.filter(move |(_, c)| !packed || !is_picture(c));
    let observations = observations.map(|(i, c)| (Part::Observation(i), c));
    let actions = layout.actions.iter().enumerate().map(|(i, c)| (Part::Action(i), c));
    let leaves = observations.chain(actions).map(|(part, c)| (part, c.width * c.element.size()));
    let marks = outline.marked.then_some((Part::Imitate, 1));
    let labels = if outline.labelled { &layout.actions[..] } else { &[] };
    let labels = labels.iter().enumerate().map(|(i, c)| (Part::Label(i), c.width * c.element.size()));
    let accepted = outline.tied.then_some((Part::Accepted, layout.choices));
    leaves.chain([(Part::Reward, 4)]).chain(marks).chain(labels).chain(accepted).scan(
        SHAPE as u64,
        move |end, (part, row_bytes)| {
            let rows = outline.rows(part);
            let start = *end;
            *end += (rows as u64 * row_bytes as u64).next_multiple_of(8);
            Some(Place { part, rows, row_bytes, start })
        },
    )
}

/// Where a column lies in a payload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) part: Part,
    pub(crate) rows: usize,
    pub(crate) row_bytes: usize,
    /// Bytes from the beginning of the payload.
    pub(crate) start: u64,
}

/// An episode copied from a whole payload, which begins at a multiple of eight in memory, and its checksum.
pub(crate) fn decode(
    payload: &[u8],
    head: Head,
    header: &Header,
    layout: &Layout,
) -> Result<(Episode, u32), String> {
    if crc32fast::hash(payload) != head.payload_crc {
        return Err("wrong checksum of the record's payload".to_owned());
    }
    let shape = Shape::decode(payload, payload.len() as u64, layout)?;
    let outline = shape.outline();
    let mut episode = Episode {
        observations: layout.observations.iter().map(|column| Column::zeros(column.element, 0)).collect(),
        actions: Vec::new(),
        rewards: Vec::new(),
        terminated: outline.terminated,
        truncated: outline.truncated,
        imitate: None,
        labels: outline.labelled.then(Vec::new),
        accepted: None,
    };
    let column = |element: ElementType, bytes: &[u8]| match element {
        ElementType::F32 => Column::F32(bytemuck::cast_slice(bytes).to_vec()),
        ElementType::I32 => Column::I32(bytemuck::cast_slice(bytes).to_vec()),
        ElementType::U8 => Column::U8(bytes.to_vec()),
    };
    let mut end = SHAPE;
    for place in places(layout, outline, shape.packed()) {
        let start = place.start as usize;
        let bytes = &payload[start..start + place.rows * place.row_bytes];
        end = start + bytes.len().next_multiple_of(8);
        match place.part {
            Part::Observation(i) => {
                episode.observations[i] = column(layout.observations[i].element, bytes);
            }
            Part::Action(i) => episode.actions.push(column(layout.actions[i].element, bytes)),
            Part::Label(i) => {
                let labels = episode.labels.get_or_insert_default();
                labels.push(column(layout.actions[i].element, bytes));
            }
            Part::Reward => episode.rewards = bytemuck::cast_slice(bytes).to_vec(),
            Part::Imitate => {
                if bytes.iter().any(|mark| *mark > 1) {
                    return Err(BAD_MARKS.to_owned());
                }
                episode.imitate = Some(bytes.iter().map(|mark| *mark == 1).collect());
            }
            Part::Accepted => {
                if bytes.iter().any(|mark| *mark > 1) {
                    return Err(BAD_MARKS.to_owned());
                }
                episode.accepted = Some(bytes.iter().map(|mark| *mark == 1).collect());
            }
        }
    }
    let crc = shape.checksum(head.payload_crc);
    if shape.packed() {
        unpack(payload, end, outline, layout, &mut episode)?;
        if checksum(&episode.view(), &header.spaces) != crc {
            return Err("wrong checksum of the unpacked pictures".to_owned());
        }
    }
    Ok((episode, crc))
}

/// Unpacks the pictures of a payload, which begin at byte `at`.
fn unpack(
    payload: &[u8],
    mut at: usize,
    outline: Outline,
    layout: &Layout,
    episode: &mut Episode,
) -> Result<(), String> {
    for (i, column) in layout.observations.iter().enumerate() {
        let Some(frame) = column.frame else { continue };
        let (rows, left) = (outline.rows(Part::Observation(i)), payload.len() - at);
        let head = payload.get(at..at + PACKED_HEAD).ok_or("a payload that ends within packed pictures")?;
        let division = Division::decode(head, frame, rows, left as u64)?;
        let mut packed = PackedColumn::new(division);
        let data = at + PACKED_HEAD + 4 * division.entries();
        packed.extend(&payload[at + PACKED_HEAD..data])?;
        let end = data as u64 + packed.begin_at(data as u64);
        if end.next_multiple_of(8) > payload.len() as u64 {
            return Err("a payload that ends within packed pictures".to_owned());
        }
        at = end.next_multiple_of(8) as usize;
        let mut pixels = vec![0; rows * frame.len()];
        let read = |place: u64, to: &mut [u8]| {
            to.copy_from_slice(&payload[place as usize..place as usize + to.len()]);
            Ok(())
        };
        packed.unpack(0..rows, &mut pixels, read, |problem| problem)?;
        episode.observations[i] = Column::U8(pixels);
    }
    if at != payload.len() {
        return Err(format!("{} bytes behind the packed pictures", payload.len() - at));
    }
    Ok(())
}

/// What is said of marks that are neither 0 nor 1.
pub(crate) const BAD_MARKS: &str = "counts other than 0 and 1";

/// Hands out the payload of an episode that fits the spaces, piece by piece; with pictures packed, if `layout` is
/// given.
fn payload(
    episode: &EpisodeRef<'_>,
    spaces: &Spaces,
    layout: Option<(&Layout, u32)>,
    mut put: impl FnMut(&[u8]),
) {
    let flag = |on: bool, flag: u32| if on { flag } else { 0 };
    let plain_crc = layout.map_or(0, |(_, plain_crc)| plain_crc);
    let frames: Vec<_> = match layout {
        Some((layout, _)) => layout.observations.iter().map(|column| column.frame).collect(),
        None => vec![None; episode.observations.len()],
    };
    let flags = flag(episode.terminated, TERMINATED)
        | flag(layout.is_some(), PACKED)
        | flag(episode.truncated, TRUNCATED)
        | flag(episode.has_final_observation(spaces), FINAL_OBSERVATION)
        | flag(episode.imitate.is_some(), COUNTS)
        | flag(episode.labels.is_some(), LABELS)
        | flag(episode.accepted.is_some(), ACCEPTED);
    put(&(episode.steps() as u64).to_le_bytes());
    put(&flags.to_le_bytes());
    put(&plain_crc.to_le_bytes());
    let mut padded = |column: &[u8]| {
        put(column);
        put(&[0; 8][..column.len().next_multiple_of(8) - column.len()]);
    };
    let rewards = ColumnRef::F32(episode.rewards);
    let seen = episode.observations.iter().zip(&frames);
    let plain = seen.clone().filter(|(_, frame)| frame.is_none()).map(|(column, _)| column);
    for column in plain.chain(&episode.actions).chain([&rewards]) {
        padded(column_bytes(column));
    }
    if let Some(imitate) = episode.imitate {
        padded(bytemuck::cast_slice(imitate));
    }
    for column in episode.labels.iter().flatten() {
        padded(column_bytes(column));
    }
    if let Some(accepted) = episode.accepted {
        padded(bytemuck::cast_slice(accepted));
    }
    for (column, frame) in seen {
        if let Some(frame) = frame {
            padded(&pack(column_bytes(column), *frame));
        }
    }
}

fn column_bytes<'a>(column: &ColumnRef<'a>) -> &'a [u8] {
    match *column {
        ColumnRef::F32(x) => bytemuck::cast_slice(x),
        ColumnRef::I32(x) => bytemuck::cast_slice(x),
        ColumnRef::U8(x) => x,
    }
}

/// The CRC-32 of the payload that an episode would have in a file.
pub(crate) fn checksum(episode: &EpisodeRef<'_>, spaces: &Spaces) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    payload(episode, spaces, None, |bytes| hasher.update(bytes));
    hasher.finalize()
}

/// The record of an episode that fits the spaces, with pictures as they are.
pub(crate) fn encode_plain(episode: &EpisodeRef<'_>, spaces: &Spaces, number: u32) -> Vec<u8> {
    record(episode, spaces, None, number)
}

/// The record of an episode that fits the spaces and has columns of this layout, with pictures packed.
pub(crate) fn encode(episode: &EpisodeRef<'_>, spaces: &Spaces, layout: &Layout, number: u32) -> Vec<u8> {
    let mut columns = layout.observations.iter().zip(&episode.observations);
    let small = columns.all(|(c, column)| !is_picture(c) || column.len() as u128 <= MAX_COLUMN);
    let packs = small && layout.observations.iter().any(is_picture);
    let layout = packs.then(|| (layout, checksum(episode, spaces)));
    record(episode, spaces, layout, number)
}

fn record(episode: &EpisodeRef<'_>, spaces: &Spaces, layout: Option<(&Layout, u32)>, number: u32) -> Vec<u8> {
    let mut bytes = vec![0; HEAD];
    payload(episode, spaces, layout, |part| bytes.extend_from_slice(part));
    let payload = &bytes[HEAD..];
    let head = Head { payload_crc: crc32fast::hash(payload), payload_len: payload.len() as u64 };
    bytes[..HEAD].copy_from_slice(&head.encode(number));
    bytes
}

/// The 64-bit FNV-1a hash: the same on every machine and in every version.
pub(crate) struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    pub(crate) fn finish(self) -> u64 {
        self.0
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}
