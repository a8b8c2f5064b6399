//! The index of an MP4 file's video track: where its samples lie and when they are shown.
//!
//! A file is a list of boxes: length, name, content. The box `moov` describes the tracks; of the video
//! track's tables `stsz` has the sizes of samples, `stsc` and `stco` or `co64` where they lie, `stts` and
//! `ctts` when they are decoded and shown, `stss` at which of them decoding can begin. Tables are believed
//! only as far as their boxes go, and samples only as far as the file goes.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// Largest description of tracks, in bytes.
const MAX_MOOV: u64 = 64 << 20;
/// Most samples of a track.
const MAX_SAMPLES: usize = 1 << 22;

/// A video track.
#[derive(Debug)]
pub(crate) struct Track {
    pub(crate) codec: Codec,
    pub(crate) width: usize,
    pub(crate) height: usize,
    /// What the decoder is given before the first sample.
    pub(crate) setup: Vec<u8>,
    /// Samples in the order of decoding.
    pub(crate) samples: Vec<Sample>,
    /// Ticks per second of the times of samples.
    pub(crate) timescale: u32,
}

/// One picture, encoded.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) offset: u64,
    pub(crate) size: u32,
    /// When it is shown, in ticks; the first is shown at 0.
    pub(crate) time: i64,
    /// Whether decoding can begin here.
    pub(crate) is_sync: bool,
}

/// How a track is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codec {
    Av1,
    /// AV1 with more than 8 bits per colour.
    DeepAv1,
    H264,
    Hevc,
    Other([u8; 4]),
}

impl std::fmt::Display for Codec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Codec::Av1 => write!(f, "av1"),
            Codec::DeepAv1 => write!(f, "av1 with more than 8 bits per colour"),
            Codec::H264 => write!(f, "h264"),
            Codec::Hevc => write!(f, "hevc"),
            Codec::Other(name) => write!(f, "{}", String::from_utf8_lossy(name).escape_debug()),
        }
    }
}

type Problem<T> = Result<T, String>;

/// Reads the index of the first video track.
pub(crate) fn read(path: &Path) -> Problem<Track> {
    let fail = |e: std::io::Error| e.to_string();
    let mut file = File::open(path).map_err(fail)?;
    let len = file.metadata().map_err(fail)?.len();
    let mut at = 0;
    while at < len {
        file.seek(SeekFrom::Start(at)).map_err(fail)?;
        let mut head = [0; 16];
        let room = usize::try_from(len - at).unwrap_or(16).min(16);
        file.read_exact(&mut head[..room]).map_err(fail)?;
        let (name, header, size) = box_head(&head[..room], len - at)?;
        if name == *b"moof" {
            return Err("a fragmented MP4 file; expected one with a single index (remux it)".to_owned());
        }
        if name == *b"moov" {
            let content = size - header;
            if content > MAX_MOOV {
                return Err(format!("an index of {content} bytes; expected at most {MAX_MOOV}"));
            }
            file.seek(SeekFrom::Start(at + header)).map_err(fail)?;
            let mut moov = vec![0; content as usize];
            file.read_exact(&mut moov).map_err(fail)?;
            return track(&moov, len);
        }
        at += size;
    }
    Err("no index (box moov): the recording was not finished, or this is no MP4 file".to_owned())
}

/// Name, length of the head, and length with it of a box that begins here and has `room` bytes at most.
fn box_head(bytes: &[u8], room: u64) -> Problem<([u8; 4], u64, u64)> {
    let damaged = || "a damaged box; copy the file again".to_owned();
    let (Some(size), Some(name)) = (u32_at(bytes, 0), bytes.get(4..8).and_then(|name| name.try_into().ok()))
    else {
        return Err(damaged());
    };
    let (header, size) = match size {
        0 => (8, room),
        1 => (16, u64_at(bytes, 8).ok_or_else(damaged)?),
        size => (8, u64::from(size)),
    };
    if size < header || size > room {
        return Err(damaged());
    }
    Ok((name, header, size))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|x| u32::from_be_bytes(*x))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|x| u64::from_be_bytes(*x))
}

/// The boxes within a box.
fn boxes(mut bytes: &[u8]) -> Problem<Vec<([u8; 4], &[u8])>> {
    let mut found = Vec::new();
    while bytes.len() >= 8 {
        let (name, header, size) = box_head(bytes, bytes.len() as u64)?;
        found.push((name, &bytes[header as usize..size as usize]));
        bytes = &bytes[size as usize..];
    }
    Ok(found)
}

fn find<'a>(bytes: &'a [u8], name: &[u8; 4]) -> Problem<Option<&'a [u8]>> {
    Ok(boxes(bytes)?.into_iter().find(|(have, _)| have == name).map(|(_, content)| content))
}

fn need<'a>(bytes: &'a [u8], name: &[u8; 4]) -> Problem<&'a [u8]> {
    find(bytes, name)?.ok_or_else(|| format!("no box {}", String::from_utf8_lossy(name)))
}

/// The first video track of an index.
fn track(moov: &[u8], file_len: u64) -> Problem<Track> {
    for (name, trak) in boxes(moov)? {
        if name != *b"trak" {
            continue;
        }
        let mdia = need(trak, b"mdia")?;
        if need(mdia, b"hdlr")?.get(8..12) != Some(b"vide") {
            continue;
        }
        let mdhd = need(mdia, b"mdhd")?;
        let at = if mdhd.first() == Some(&1) { 20 } else { 12 };
        let timescale = u32_at(mdhd, at).filter(|scale| *scale > 0).ok_or("a track without a time scale")?;
        let stbl = need(need(mdia, b"minf")?, b"stbl")?;
        let (codec, width, height, setup) = described(need(stbl, b"stsd")?)?;
        return Ok(Track { codec, width, height, setup, samples: samples(stbl, file_len)?, timescale });
    }
    Err("no video track".to_owned())
}

/// Codec, size and set-up data of a sample description.
fn described(stsd: &[u8]) -> Problem<(Codec, usize, usize, Vec<u8>)> {
    let short = || "a sample description that ends too early".to_owned();
    let (name, entry) = boxes(stsd.get(8..).ok_or_else(short)?)?.into_iter().next().ok_or_else(short)?;
    let codec = match &name {
        b"av01" => Codec::Av1,
        b"avc1" | b"avc3" => Codec::H264,
        b"hvc1" | b"hev1" => Codec::Hevc,
        other => Codec::Other(*other),
    };
    let size = |at: usize| {
        let bytes = entry.get(at..).and_then(|bytes| bytes.first_chunk());
        bytes.map(|x| usize::from(u16::from_be_bytes(*x))).ok_or_else(short)
    };
    // 78 bytes describe the picture, boxes follow.
    let av1c = match codec {
        Codec::Av1 => find(entry.get(78..).unwrap_or_default(), b"av1C")?,
        _ => None,
    };
    let codec = match av1c.and_then(|av1c| av1c.get(2)) {
        Some(flags) if flags & 0x40 != 0 => Codec::DeepAv1,
        _ => codec,
    };
    let setup = av1c.and_then(|av1c| av1c.get(4..)).unwrap_or_default().to_vec();
    Ok((codec, size(24)?, size(26)?, setup))
}

/// The entries of a table of `width` numbers each, which begin at byte `at` of a box behind their count.
fn table(content: &[u8], at: usize, width: usize) -> Problem<Vec<u32>> {
    let count = u32_at(content, at).ok_or("a table without its length")? as usize;
    let bytes = count.checked_mul(4 * width).and_then(|len| content.get(at + 4..(at + 4).checked_add(len)?));
    let bytes = bytes.ok_or("a table that is longer than its box")?;
    Ok(bytes.as_chunks().0.iter().map(|x| u32::from_be_bytes(*x)).collect())
}

/// The samples of a track's tables.
fn samples(stbl: &[u8], file_len: u64) -> Problem<Vec<Sample>> {
    let stsz = need(stbl, b"stsz")?;
    let (each, count) =
        (u32_at(stsz, 4).ok_or("a short box stsz")?, u32_at(stsz, 8).ok_or("a short box stsz")?);
    let count = count as usize;
    if count > MAX_SAMPLES || u64::from(each).saturating_mul(count as u64) > file_len {
        return Err(format!("{count} samples, more than the file has room for"));
    }
    let sizes = if each == 0 { table(stsz, 8, 1)? } else { vec![each; count] };
    let offsets = offsets(stbl, &sizes)?;
    let mut times = decoding_times(need(stbl, b"stts")?, count)?;
    if let Some(ctts) = find(stbl, b"ctts")? {
        let shifts = table(ctts, 4, 2)?;
        let shifts = shifts.as_chunks::<2>().0.iter().flat_map(|[n, shift]| {
            // Version 1 has negative shifts; version 0 has none that are as large.
            std::iter::repeat_n(i64::from(*shift as i32), *n as usize)
        });
        times.iter_mut().zip(shifts).for_each(|(time, shift)| *time += shift);
    }
    // Where pictures are decoded in another order than shown, times begin later than 0.
    let first = times.iter().min().copied().unwrap_or(0);
    let syncs = match find(stbl, b"stss")? {
        Some(stss) => Some(table(stss, 4, 1)?),
        None => None,
    };
    let mut all = Vec::with_capacity(count);
    for (i, ((offset, size), time)) in offsets.into_iter().zip(sizes).zip(times).enumerate() {
        if offset.checked_add(u64::from(size)).is_none_or(|end| end > file_len) {
            return Err(format!("sample {i} lies beyond the end of the file; copy the file again"));
        }
        let is_sync = syncs.as_ref().is_none_or(|syncs| syncs.binary_search(&(i as u32 + 1)).is_ok());
        all.push(Sample { offset, size, time: time - first, is_sync });
    }
    match all.is_empty() {
        true => Err("a video without pictures".to_owned()),
        false => Ok(all),
    }
}

/// When each of `count` samples is decoded.
fn decoding_times(stts: &[u8], count: usize) -> Problem<Vec<i64>> {
    let (mut times, mut now) = (Vec::with_capacity(count), 0i64);
    for [n, delta] in table(stts, 4, 2)?.as_chunks::<2>().0 {
        for _ in 0..(*n as usize).min(count - times.len()) {
            times.push(now);
            now += i64::from(*delta);
        }
    }
    match times.len() == count {
        true => Ok(times),
        false => Err(format!("times of {} of {count} samples", times.len())),
    }
}

/// Where the samples lie: in chunks, each of which holds some of them one after the other.
fn offsets(stbl: &[u8], sizes: &[u32]) -> Problem<Vec<u64>> {
    let chunks: Vec<u64> = match find(stbl, b"stco")? {
        Some(stco) => table(stco, 4, 1)?.into_iter().map(u64::from).collect(),
        None => {
            let halves = table(need(stbl, b"co64")?, 4, 2)?;
            halves
                .as_chunks::<2>()
                .0
                .iter()
                .map(|[high, low]| u64::from(*high) << 32 | u64::from(*low))
                .collect()
        }
    };
    let runs = table(need(stbl, b"stsc")?, 4, 3)?;
    let runs = runs.as_chunks::<3>().0;
    let mut offsets = Vec::with_capacity(sizes.len());
    for (i, [first, per_chunk, _]) in runs.iter().enumerate() {
        let next = runs.get(i + 1).map_or(chunks.len() as u64 + 1, |[next, ..]| u64::from(*next));
        for chunk in u64::from(*first)..next {
            let chunk = usize::try_from(chunk).ok().and_then(|chunk| chunks.get(chunk.checked_sub(1)?));
            let Some(chunk) = chunk else { return Err("a chunk that no table has".to_owned()) };
            let mut at = *chunk;
            for _ in 0..*per_chunk {
                let Some(size) = sizes.get(offsets.len()) else { return Ok(offsets) };
                offsets.push(at);
                at = at.checked_add(u64::from(*size)).ok_or("a chunk beyond all files")?;
            }
        }
    }
    match offsets.len() == sizes.len() {
        true => Ok(offsets),
        false => Err(format!("places of {} of {} samples", offsets.len(), sizes.len())),
    }
}
