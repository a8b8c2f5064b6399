//! The bytes of an `.elmur` file: a checked header, then one checked record per episode.
//! `docs/dataset-format.md` is the specification.
//!
//! Records are appended and never changed, so that a process that is killed leaves at most one torn record,
//! the last one. Everything else that can happen to a file is found by a CRC-32: of the header, of each
//! record's head, of each payload.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::ops::{Deref, Range};
use std::path::Path;

use elmur_base::{Space, Spaces};
use serde::{Deserialize, Serialize};

use crate::episode::{ColumnRef, ElementType, EpisodeRef, fits};
use crate::error::{Error, Fault, Result};

#[cfg(target_endian = "big")]
compile_error!("elmur-data hands out parts of little-endian files as they lie; this machine is big-endian");

const MAGIC: [u8; 8] = *b"ELMURDAT";
const VERSION: u32 = 1;
const MARKER: [u8; 4] = *b"EPIS";
/// Bytes before the header's JSON.
const PREFIX: usize = 24;
/// Bytes before a record's payload.
pub(crate) const HEAD: usize = 24;
/// Bytes before a payload's columns.
const SHAPE: usize = 16;
/// Largest header, in bytes.
const MAX_HEADER: u64 = 1 << 26;

const TERMINATED: u32 = 1;
const TRUNCATED: u32 = 2;
const FINAL_OBSERVATION: u32 = 4;
const COUNTS: u32 = 8;

/// Bytes that begin at a multiple of eight in memory.
#[derive(Debug, Default)]
pub(crate) struct Aligned {
    words: Vec<u64>,
    len: usize,
}

impl Aligned {
    /// Up to `len` bytes of `source`; memory is taken as they come, not as `len` promises.
    pub(crate) fn read(source: &mut impl Read, len: u64) -> std::io::Result<Self> {
        Self::default().filled(source, len)
    }

    /// The same for a `len` that is known to be true: memory is taken at once.
    pub(crate) fn read_all(source: &mut impl Read, len: usize) -> std::io::Result<Self> {
        Self { words: Vec::with_capacity(len.div_ceil(8)), len: 0 }.filled(source, len as u64)
    }

    fn filled(mut self, source: &mut impl Read, len: u64) -> std::io::Result<Self> {
        while (self.len as u64) < len {
            let room = (len - self.len as u64).min(1 << 20) as usize;
            self.words.resize((self.len + room).div_ceil(8), 0);
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words);
            match source.read(&mut bytes[self.len..self.len + room]) {
                Ok(0) => break,
                Ok(read) => self.len += read,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(self)
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
        let columns = episode.observations.iter().chain(&episode.actions);
        match types.zip(columns).enumerate().find(|(_, (t, column))| **t != column.element_type()) {
            None => Ok(()),
            Some((i, (t, column))) => Fault::new(
                match i.checked_sub(self.observation_types.len()) {
                    None => format!("observation leaf {i}"),
                    Some(i) => format!("action leaf {i}"),
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
        let fail = |problem: &str| Err(Error::file(path, problem));
        let damaged = |problem: &str| {
            Err(Error::file(path, format!("{problem}: a damaged header; restore the file from a copy")))
        };
        let prefix = Aligned::read(source, PREFIX as u64).map_err(|e| Error::io(path, e))?;
        if !prefix.starts_with(&MAGIC[..prefix.len().min(8)]) {
            return fail("not an .elmur file; for .npz files, give the folder that holds them");
        }
        if prefix.len() < PREFIX {
            return fail(&format!("ends within the header, after {} bytes; collect again", prefix.len()));
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
            return fail("ends within the header; collect again, or restore the file from a copy");
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
        Ok((header, PREFIX as u64 + len))
    }

    /// Element type and numbers per row of every column, observations and actions.
    pub(crate) fn layout(&self) -> Layout {
        let columns = |space: &Space, types: &[ElementType]| {
            types.iter().zip(space.leaves()).map(|(t, leaf)| (*t, leaf.len())).collect()
        };
        Layout {
            observations: columns(&self.spaces.observation, &self.observation_types),
            actions: columns(&self.spaces.action, &self.action_types),
        }
    }
}

/// Element type and numbers per row of every column.
#[derive(Debug)]
pub(crate) struct Layout {
    observations: Vec<(ElementType, usize)>,
    actions: Vec<(ElementType, usize)>,
}

/// The head of a record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    payload_crc: u32,
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

/// What a payload holds besides columns that are used as they lie.
#[derive(Debug)]
pub(crate) struct Shape {
    steps: usize,
    flags: u32,
    imitate: Option<Vec<bool>>,
}

impl Shape {
    fn rows(&self) -> usize {
        self.steps + usize::from(self.flags & FINAL_OBSERVATION != 0)
    }

    /// Checks a payload against its head and the layout.
    pub(crate) fn decode(payload: &[u8], head: Head, layout: &Layout) -> Result<Self, String> {
        if crc32fast::hash(payload) != head.payload_crc {
            return Err("wrong checksum of the record's payload".to_owned());
        }
        if payload.len() < SHAPE {
            return Err(format!("a payload of {} bytes, too short for any episode", payload.len()));
        }
        let (steps, flags) = (u64_at(payload, 0), u32_at(payload, 8));
        if flags >= 2 * COUNTS || u32_at(payload, 12) != 0 {
            return Err("flags that version 1 does not know".to_owned());
        }
        // In 128 bits nothing overflows: 2^64 rows of 2^24 numbers of 2^2 bytes.
        let column = |rows: u128, (t, width): (ElementType, usize)| {
            (rows * width as u128 * t.size() as u128).next_multiple_of(8)
        };
        let (steps, mut len) = (u128::from(steps), SHAPE as u128);
        let rows = steps + u128::from(flags & FINAL_OBSERVATION != 0);
        len += layout.observations.iter().map(|c| column(rows, *c)).sum::<u128>();
        len += layout.actions.iter().map(|c| column(steps, *c)).sum::<u128>();
        len += column(steps, (ElementType::F32, 1));
        len += if flags & COUNTS != 0 { column(steps, (ElementType::U8, 1)) } else { 0 };
        if len != payload.len() as u128 {
            return Err(format!("a payload of {} bytes for {steps} steps, which take {len}", payload.len()));
        }
        let mut shape = Self { steps: steps as usize, flags, imitate: None };
        if flags & COUNTS != 0 {
            let start = payload.len() - shape.steps.next_multiple_of(8);
            let counts = &payload[start..start + shape.steps];
            if counts.iter().any(|c| *c > 1) {
                return Err("counts other than 0 and 1".to_owned());
            }
            shape.imitate = Some(counts.iter().map(|c| *c == 1).collect());
        }
        Ok(shape)
    }

    /// The episode of this shape, its numbers borrowed from the payload, which must be the one that was
    /// decoded.
    pub(crate) fn view<'a>(&'a self, payload: &'a [u8], layout: &Layout) -> EpisodeRef<'a> {
        let mut rest = &payload[SHAPE..];
        let mut take = |rows: usize, (t, width): (ElementType, usize)| {
            let len = rows * width * t.size();
            let bytes = &rest[..len];
            rest = &rest[len.next_multiple_of(8)..];
            match t {
                ElementType::F32 => ColumnRef::F32(bytemuck::cast_slice(bytes)),
                ElementType::I32 => ColumnRef::I32(bytemuck::cast_slice(bytes)),
                ElementType::U8 => ColumnRef::U8(bytes),
            }
        };
        EpisodeRef {
            observations: layout.observations.iter().map(|c| take(self.rows(), *c)).collect(),
            actions: layout.actions.iter().map(|c| take(self.steps, *c)).collect(),
            rewards: bytemuck::cast_slice(&rest[..4 * self.steps]),
            terminated: self.flags & TERMINATED != 0,
            truncated: self.flags & TRUNCATED != 0,
            imitate: self.imitate.as_deref(),
        }
    }
}

/// The record of an episode that fits the spaces.
pub(crate) fn encode(episode: &EpisodeRef<'_>, spaces: &Spaces, number: u32) -> Vec<u8> {
    let flag = |on: bool, flag: u32| if on { flag } else { 0 };
    let flags = flag(episode.terminated, TERMINATED)
        | flag(episode.truncated, TRUNCATED)
        | flag(episode.has_final_observation(spaces), FINAL_OBSERVATION)
        | flag(episode.imitate.is_some(), COUNTS);
    let mut bytes = vec![0; HEAD];
    bytes.extend((episode.steps() as u64).to_le_bytes());
    bytes.extend(u64::from(flags).to_le_bytes());
    let mut put = |column: &[u8]| {
        bytes.extend_from_slice(column);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    };
    for column in episode.observations.iter().chain(&episode.actions) {
        match column {
            ColumnRef::F32(x) => put(bytemuck::cast_slice(x)),
            ColumnRef::I32(x) => put(bytemuck::cast_slice(x)),
            ColumnRef::U8(x) => put(x),
        }
    }
    put(bytemuck::cast_slice(episode.rewards));
    if let Some(imitate) = episode.imitate {
        put(&imitate.iter().map(|x| u8::from(*x)).collect::<Vec<_>>());
    }
    let payload = &bytes[HEAD..];
    let head = Head { payload_crc: crc32fast::hash(payload), payload_len: payload.len() as u64 };
    bytes[..HEAD].copy_from_slice(&head.encode(number));
    bytes
}

/// Where the episodes of a file lie.
pub(crate) struct Index {
    pub(crate) header: Header,
    pub(crate) layout: Layout,
    /// Where each payload begins and ends, and what it holds.
    pub(crate) episodes: Vec<(Range<usize>, Shape)>,
    pub(crate) torn_bytes: u64,
}

impl Index {
    /// Finds and checks all episodes of a file. `bytes` must be aligned to eight.
    pub(crate) fn of(bytes: &[u8], path: &Path) -> Result<Self> {
        let (header, start) = Header::read(&mut &*bytes, path)?;
        let layout = header.layout();
        let mut index = Self { header, layout, episodes: Vec::new(), torn_bytes: 0 };
        let mut offset = start as usize;
        while offset < bytes.len() {
            let (rest, number) = (&bytes[offset..], index.episodes.len());
            let damaged = |problem: String| Error::damaged(path, number, offset as u64, problem);
            let head = Head::decode(rest, number).map_err(damaged)?;
            let whole = head.filter(|head| head.payload_len <= (rest.len() - HEAD) as u64);
            let Some(head) = whole else {
                index.torn_bytes = rest.len() as u64;
                break;
            };
            let end = HEAD + head.payload_len as usize;
            let shape = Shape::decode(&rest[HEAD..end], head, &index.layout).map_err(damaged)?;
            index
                .header
                .check(&shape.view(&rest[HEAD..end], &index.layout))
                .map_err(|fault| Error::episode(path, number, fault))?;
            index.episodes.push((offset + HEAD..offset + end, shape));
            offset += end;
        }
        Ok(index)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}
