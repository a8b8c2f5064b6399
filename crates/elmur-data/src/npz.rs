//! The layout of the published datasets: a folder of `train_data_{i}.npz`, one file per episode.
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
//! Files are zip archives of `.npy` arrays, stored or deflated. Sizes are believed only as far as the
//! archive, the array's header and its data agree.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::mem::discriminant;
use std::ops::Range;
use std::path::{Path, PathBuf};

use elmur_base::{Leaf, Space, Spaces, files};
use flate2::Compression;
use flate2::bufread::DeflateDecoder;
use flate2::write::DeflateEncoder;
use rawzip::{CompressionMethod, ZipArchive, ZipArchiveWriter};

use crate::episode::{Column, ColumnRef, ElementType, Episode, EpisodeRef};
use crate::error::{Error, Result};

/// Largest file and largest array, in bytes. Episodes of the published datasets take up to 30 MB.
const MAX_BYTES: u64 = 1 << 30;
/// Longest header of an array, in bytes.
const MAX_HEADER: usize = 1 << 16;
/// Most integers per step for which a space is inferred.
const MAX_INTS: usize = 1 << 16;
const KEYS: [&str; 6] = ["obs", "rgb", "action", "reward", "done", "counts"];

/// The episodes of a folder of `.npz` files, and the file of each.
pub(crate) struct Recordings {
    pub spaces: Spaces,
    pub metadata: BTreeMap<String, String>,
    pub episodes: Vec<Episode>,
    pub paths: Vec<PathBuf>,
}

/// Reads a folder of `.npz` files: see [`crate::read_npz`].
pub(crate) fn read(folder: &Path, spaces: Option<Spaces>) -> Result<Recordings> {
    let paths = list(folder)?;
    if paths.is_empty() {
        return Err(Error::file(folder, "no .npz files; expected train_data_0.npz, train_data_1.npz, ..."));
    }
    let mut recordings = Vec::new();
    for path in &paths {
        let size = fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
        if size > MAX_BYTES {
            return Err(Error::file(path, format!("{size} bytes; save one episode per file")));
        }
        let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
        recordings.push(Recording::parse(&bytes).map_err(|problem| Error::file(path, problem))?);
    }
    let spaces = match spaces {
        Some(spaces) => spaces,
        None => Spaces {
            observation: infer(&paths, &recordings, false)?,
            action: infer(&paths, &recordings, true)?,
        },
    };
    spaces.validate().map_err(|e| Error::file(folder, format!("{e}; give other spaces")))?;
    let mut episodes = Vec::new();
    for (path, recording) in paths.iter().zip(recordings) {
        let fail = |problem| Error::file(path, problem);
        episodes.push(Episode {
            observations: recording.observation.columns("obs", &spaces.observation).map_err(fail)?,
            actions: recording.action.columns("action", &spaces.action).map_err(fail)?,
            rewards: recording.rewards,
            terminated: recording.terminated,
            truncated: !recording.terminated,
            imitate: recording.imitate,
        });
    }
    let metadata = BTreeMap::from([("source".to_owned(), folder.display().to_string())]);
    Ok(Recordings { spaces, metadata, episodes, paths })
}

/// The folder's `.npz` files, by the number at the end of their names.
fn list(folder: &Path) -> Result<Vec<PathBuf>> {
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

/// The arrays of one file.
struct Recording {
    observation: Array,
    action: Array,
    rewards: Vec<f32>,
    terminated: bool,
    imitate: Option<Vec<bool>>,
}

impl Recording {
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let damaged = |e: rawzip::Error| format!("not a whole .npz file ({e}); copy or collect it again");
        let archive = ZipArchive::from_slice(bytes).map_err(damaged)?;
        let mut members = BTreeMap::new();
        let mut entries = archive.entries();
        while let Some(entry) = entries.next_entry().map_err(damaged)? {
            let path = entry.file_path();
            let Some(name) = path.as_bytes().strip_suffix(b".npy") else { continue };
            let Some(key) = KEYS.into_iter().find(|key| key.as_bytes() == name) else { continue };
            if members.insert(key, (entry.wayfinder(), entry.compression_method())).is_some() {
                return Err(format!("two arrays `{key}`; save each once"));
            }
        }
        let read = |key: &'static str| -> Result<Option<Array>, String> {
            let Some((place, method)) = members.get(key) else { return Ok(None) };
            let entry = archive.get_entry(*place).map_err(damaged)?;
            let data: Box<dyn Read + '_> = match *method {
                CompressionMethod::STORE => Box::new(entry.data()),
                CompressionMethod::DEFLATE => Box::new(DeflateDecoder::new(entry.data())),
                other => return Err(format!("`{key}` is compressed by {other}; use np.savez_compressed")),
            };
            let array = Array::read(&mut entry.verifying_reader(data), place.uncompressed_size_hint());
            array.map(Some).map_err(|problem| format!("`{key}`: {problem}"))
        };
        let missing = |key: &str| format!("no array `{key}`; expected obs (or rgb), action and reward");
        let action = read("action")?.ok_or_else(|| missing("action"))?;
        let steps = action.rows();
        let observation = match read("obs")? {
            Some(array) => array,
            None => read("rgb")?.ok_or_else(|| missing("obs"))?.channels_first()?,
        };
        if ![steps, steps + 1].contains(&observation.rows()) {
            let rows = observation.rows();
            return Err(format!("{rows} observations for {steps} actions; save as many, or one more"));
        }
        let per_step = |key: &'static str| -> Result<Option<Vec<f32>>, String> {
            let Some(array) = read(key)? else { return Ok(None) };
            match array.numbers.len() == steps {
                true => Ok(Some(floats(array.numbers))),
                false => Err(format!("`{key}` has {} entries for {steps} actions", array.numbers.len())),
            }
        };
        let done = per_step("done")?.and_then(|done| done.last().copied());
        Ok(Self {
            rewards: per_step("reward")?.ok_or_else(|| missing("reward"))?,
            terminated: done != Some(0.0),
            imitate: per_step("counts")?.map(|imitate| imitate.iter().map(|x| *x != 0.0).collect()),
            observation,
            action,
        })
    }
}

/// An array: bytes as [`Column::U8`], other integers as `I32`, floats as `F32`.
struct Array {
    shape: Vec<usize>,
    numbers: Column,
}

impl Array {
    fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Numbers per row.
    fn width(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Reads an `.npy` file of which the archive says that it has `claimed` bytes; after as many, `source`
    /// checks the archive's checksum.
    fn read(source: &mut impl Read, claimed: u64) -> Result<Self, String> {
        let short = |e: std::io::Error| format!("{e}; the file is damaged, copy or collect it again");
        let mut prefix = [0; 8];
        source.read_exact(&mut prefix).map_err(short)?;
        if !prefix.starts_with(b"\x93NUMPY") {
            return Err("not an .npy array; use np.savez".to_owned());
        }
        let mut len = [0; 4];
        let len_size = if prefix[6] == 1 { 2 } else { 4 };
        source.read_exact(&mut len[..len_size]).map_err(short)?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_HEADER {
            return Err(format!("an array header of {len} bytes; use np.savez of plain arrays"));
        }
        let mut header = vec![0; len];
        source.read_exact(&mut header).map_err(short)?;
        let header = String::from_utf8_lossy(&header);
        let (descr, fortran, shape) = parse_header(&header).ok_or_else(|| {
            let start: String = header.chars().take(80).collect();
            format!("an array header that is not understood: {start:?}; use np.savez of plain arrays")
        })?;
        // Before any data: is the type known? If so, its name ends with its size.
        decode(descr, Vec::new())?;
        let size = descr.chars().last().and_then(|size| size.to_digit(10)).map_or(0, u64::from);
        if fortran {
            return Err("Fortran order; save np.ascontiguousarray(x)".to_owned());
        }
        // Without zeros no product of some axes is larger than that of all.
        if shape.is_empty() || shape.contains(&0) {
            return Err(format!("shape {shape:?}; expected at least one step, and numbers in it"));
        }
        let elements = shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n as u64));
        let bytes = elements.and_then(|n| n.checked_mul(size)).filter(|n| *n <= MAX_BYTES);
        let bytes = bytes.ok_or_else(|| format!("shape {shape:?} is too large; one episode per file"))?;
        let total = (prefix.len() + len_size + len) as u64 + bytes;
        if total != claimed {
            return Err(format!("{shape:?} needs {total} bytes, the archive has {claimed}; copy it again"));
        }
        let mut data = Vec::new();
        source.take(bytes).read_to_end(&mut data).map_err(short)?;
        if data.len() as u64 != bytes {
            return Err("less data than the shape says; copy or collect it again".to_owned());
        }
        Ok(Self { shape, numbers: decode(descr, data)? })
    }

    /// Height, width, channels of each row to channels, height, width.
    fn channels_first(self) -> Result<Self, String> {
        let (&[rows, height, width, channels], Column::U8(pixels)) = (&self.shape[..], &self.numbers) else {
            let got = self.shape;
            return Err(format!(
                "`rgb`: expected uint8 (T, height, width, channels), got {got:?}; use `obs`"
            ));
        };
        let mut turned = Vec::with_capacity(pixels.len());
        for image in pixels.chunks_exact((height * width * channels).max(1)) {
            for channel in 0..channels {
                turned.extend(image.iter().skip(channel).step_by(channels));
            }
        }
        Ok(Self { shape: vec![rows, channels, height, width], numbers: Column::U8(turned) })
    }

    /// Axes of one row; of two axes, a first one of length 1 is dropped.
    fn row_shape(&self) -> &[usize] {
        match &self.shape[1..] {
            [1, k] => std::slice::from_ref(k),
            shape => shape,
        }
    }

    /// The columns of a space's leaves: each row holds their numbers one after the other.
    fn columns(self, key: &str, space: &Space) -> Result<Vec<Column>, String> {
        let leaves = space.leaves();
        let width: usize = leaves.iter().map(Leaf::len).sum();
        let axes = |shape: &[usize]| shape.iter().copied().filter(|n| *n != 1).collect::<Vec<_>>();
        let image = match &leaves[..] {
            [Leaf::Floats { shape, .. } | Leaf::Bytes { shape }] if shape.len() > 1 => Some(*shape),
            _ => None,
        };
        if self.width() != width || image.is_some_and(|image| axes(image) != axes(&self.shape[1..])) {
            let expected = image.map_or(format!("{width} numbers"), |image| format!("{image:?}"));
            let got = &self.shape[1..];
            return Err(format!("`{key}`: expected {expected} per step, got {got:?}; give the right spaces"));
        }
        let fail = |problem| format!("`{key}` {problem}");
        if let [leaf] = &leaves[..] {
            return Ok(vec![converted(self.numbers, leaf).map_err(fail)?]);
        }
        let starts = leaves.iter().scan(0, |end, leaf| Some(std::mem::replace(end, *end + leaf.len())));
        let part = |(leaf, start): (&Leaf<'_>, usize)| {
            converted(entries(&self.numbers, width, start..start + leaf.len()), leaf).map_err(fail)
        };
        leaves.iter().zip(starts).map(part).collect()
    }
}

/// Entries `range` of every row.
fn entries(numbers: &Column, width: usize, range: Range<usize>) -> Column {
    fn cut<T: Copy>(x: &[T], width: usize, range: Range<usize>) -> Vec<T> {
        x.chunks_exact(width).flat_map(|row| row[range.clone()].iter().copied()).collect()
    }
    match numbers {
        Column::F32(x) => Column::F32(cut(x, width, range)),
        Column::I32(x) => Column::I32(cut(x, width, range)),
        Column::U8(x) => Column::U8(cut(x, width, range)),
    }
}

/// Converts numbers to an element type that the leaf can be recorded in.
fn converted(numbers: Column, leaf: &Leaf<'_>) -> Result<Column, String> {
    Ok(match (leaf, numbers) {
        (Leaf::Ints(_), Column::U8(x)) => Column::I32(x.into_iter().map(i32::from).collect()),
        (Leaf::Ints(_), Column::F32(x)) => {
            let whole = |x: &f32| x.fract() == 0.0 && (0.0..=16_777_216.0).contains(x);
            if let Some(x) = x.iter().find(|x| !whole(x)) {
                return Err(format!("holds {x} where the space has integers; give the right spaces"));
            }
            Column::I32(x.into_iter().map(|x| x as i32).collect())
        }
        (Leaf::Floats { high, .. }, Column::U8(x)) if high.iter().all(|high| *high <= 1.0) => Column::U8(x),
        (Leaf::Floats { .. }, numbers) => Column::F32(floats(numbers)),
        (Leaf::Bytes { .. }, numbers) if numbers.view().element_type() != ElementType::U8 => {
            let name = numbers.view().element_type().name();
            return Err(format!("holds {name} where the space has bytes; save x.astype('uint8')"));
        }
        (_, numbers) => numbers,
    })
}

fn floats(numbers: Column) -> Vec<f32> {
    match numbers {
        Column::F32(x) => x,
        Column::I32(x) => x.into_iter().map(|x| x as f32).collect(),
        Column::U8(x) => x.into_iter().map(f32::from).collect(),
    }
}

/// Element type, Fortran order and shape of a header such as `{'descr': '<f4', 'fortran_order': False,
/// 'shape': (3, 4), }`.
fn parse_header(header: &str) -> Option<(&str, bool, Vec<usize>)> {
    let value = |key: &str| Some(header.split_once(key)?.1.trim_start().strip_prefix(':')?.trim_start());
    let descr = value("'descr'")?.strip_prefix('\'')?.split_once('\'')?.0;
    let fortran = value("'fortran_order'")?;
    if !fortran.starts_with("True") && !fortran.starts_with("False") {
        return None;
    }
    let axes = value("'shape'")?.strip_prefix('(')?.split_once(')')?.0;
    let axes = axes.split(',').map(str::trim).filter(|n| !n.is_empty());
    let shape = axes.map(|n| n.parse().ok()).collect::<Option<Vec<_>>>()?;
    let plausible = descr.len() <= 16 && shape.len() <= 64;
    plausible.then(|| (descr, fortran.starts_with("True"), shape))
}

fn decode(descr: &str, data: Vec<u8>) -> Result<Column, String> {
    fn floats<const N: usize>(data: &[u8], f: impl Fn([u8; N]) -> f32) -> Column {
        Column::F32(data.as_chunks().0.iter().map(|b| f(*b)).collect())
    }
    fn ints<const N: usize, T: TryInto<i32>>(
        data: &[u8],
        f: impl Fn([u8; N]) -> T,
    ) -> Result<Column, String> {
        let numbers: Result<_, _> = data.as_chunks().0.iter().map(|b| f(*b).try_into()).collect();
        numbers.map(Column::I32).map_err(|_| "integers beyond 32 bits; save them as floats".to_owned())
    }
    match descr.trim_start_matches(['<', '|']) {
        "f4" => Ok(floats(&data, f32::from_le_bytes)),
        "f8" => Ok(floats(&data, |b| f64::from_le_bytes(b) as f32)),
        "i1" => ints(&data, i8::from_le_bytes),
        "i2" => ints(&data, i16::from_le_bytes),
        "i4" => ints(&data, i32::from_le_bytes),
        "i8" => ints(&data, i64::from_le_bytes),
        "u1" => Ok(Column::U8(data)),
        "u2" => ints(&data, u16::from_le_bytes),
        "u4" => ints(&data, u32::from_le_bytes),
        "u8" => ints(&data, u64::from_le_bytes),
        "b1" => ints(&data, u8::from_le_bytes),
        _ => Err(format!(
            "element type {descr}; expected f4, f8, i1 to i8, u1 to u8 or b1, little endian; save x.astype('f4')"
        )),
    }
}

/// The smallest space that holds all observations or all actions.
fn infer(paths: &[PathBuf], recordings: &[Recording], action: bool) -> Result<Space> {
    let key = if action { "action" } else { "obs" };
    let arrays: Vec<_> = recordings.iter().map(|r| if action { &r.action } else { &r.observation }).collect();
    let (first, shape) = (arrays[0], arrays[0].row_shape());
    for (path, array) in paths.iter().zip(&arrays) {
        let alike = discriminant(&array.numbers) == discriminant(&first.numbers);
        if !alike || array.row_shape() != shape {
            let (name, ours) = (array.numbers.view().element_type().name(), array.row_shape());
            let wanted =
                format!("{} {shape:?} as in the first file", first.numbers.view().element_type().name());
            let remedy = "keep different datasets in different folders";
            return Err(Error::file(
                path,
                format!("`{key}`: expected {wanted}, got {name} {ours:?}; {remedy}"),
            ));
        }
    }
    Ok(match &first.numbers {
        Column::F32(_) => Space::unbounded(if shape.is_empty() { &[1] } else { shape }),
        Column::U8(_) if shape.len() == 3 => Space::between(0.0, 1.0, shape),
        _ => {
            let sizes = sizes(key, paths, &arrays)?;
            if action && shape.is_empty() {
                Space::Discrete { n: sizes[0] }
            } else {
                Space::MultiDiscrete { sizes }
            }
        }
    })
}

/// The largest value + 1 of each entry of a row.
fn sizes(key: &str, paths: &[PathBuf], arrays: &[&Array]) -> Result<Vec<usize>> {
    let width = arrays[0].width();
    if width > MAX_INTS {
        return Err(Error::file(
            &paths[0],
            format!("`{key}`: {width} integers per step; save them as floats"),
        ));
    }
    let mut sizes = vec![1; width];
    for (path, array) in paths.iter().zip(arrays) {
        let mut grow = |entry: usize, x: i32| {
            let fail =
                |_| Error::file(path, format!("`{key}` holds {x}; give spaces with a box for such numbers"));
            let x = usize::try_from(x).map_err(fail)?;
            sizes[entry] = sizes[entry].max(x + 1);
            Ok::<(), Error>(())
        };
        let entries = (0..width).cycle();
        match &array.numbers {
            Column::F32(_) => {}
            Column::I32(x) => entries.zip(x).try_for_each(|(entry, x)| grow(entry, *x))?,
            Column::U8(x) => entries.zip(x).try_for_each(|(entry, x)| grow(entry, i32::from(*x)))?,
        }
    }
    Ok(sizes)
}

/// Writes a folder of `.npz` files: see [`crate::write_npz`].
pub(crate) fn write<'a>(
    folder: &Path,
    spaces: &Spaces,
    episodes: impl Iterator<Item = EpisodeRef<'a>>,
) -> Result<()> {
    fs::create_dir_all(folder).map_err(|e| Error::io(folder, e))?;
    if !list(folder)?.is_empty() {
        return Err(Error::file(folder, "holds .npz files already; choose an empty folder"));
    }
    for (i, episode) in episodes.enumerate() {
        let steps = episode.steps();
        let mut done = vec![0; steps];
        done[steps - 1] = 1;
        let imitate = episode.imitate.map(|imitate| imitate.iter().map(|x| u8::from(*x)).collect::<Vec<_>>());
        let reward = ColumnRef::F32(episode.rewards);
        let scalar = Space::unbounded([]);
        let path = folder.join(format!("train_data_{i}.npz"));
        let fail = |problem| Error::file(&path, problem);
        let mut arrays = vec![
            ("obs.npy", npy(&episode.observations, &spaces.observation, steps, false).map_err(fail)?),
            ("action.npy", npy(&episode.actions, &spaces.action, steps, true).map_err(fail)?),
            ("reward.npy", npy(&[reward], &scalar, steps, true).map_err(fail)?),
            ("done.npy", npy_bytes("|b1", &[steps], &done)),
        ];
        arrays.extend(imitate.map(|imitate| ("counts.npy", npy_bytes("|b1", &[steps], &imitate))));
        let bytes = zip(&arrays).map_err(|e| Error::file(&path, format!("cannot be written: {e}")))?;
        files::write_atomic(&path, &bytes)?;
    }
    Ok(())
}

/// An `.npy` file of the first `steps` rows of all columns, side by side.
fn npy(columns: &[ColumnRef<'_>], space: &Space, steps: usize, action: bool) -> Result<Vec<u8>, String> {
    let leaves = space.leaves();
    let first = columns[0].element_type();
    if columns.iter().any(|column| column.element_type() != first) {
        return Err(
            "a space of numbers of several types has no place in an .npz; keep the .elmur file".to_owned()
        );
    }
    let mut shape = vec![steps];
    match space {
        Space::Discrete { .. } if action => {}
        Space::Box { shape: axes, .. } | Space::Bytes { shape: axes } => shape.extend(axes),
        _ => shape.push(leaves.iter().map(Leaf::len).sum()),
    }
    let mut data = Vec::new();
    for step in 0..steps {
        for (column, leaf) in columns.iter().zip(&leaves) {
            let row = step * leaf.len()..(step + 1) * leaf.len();
            match column {
                ColumnRef::F32(x) => data.extend(x[row].iter().flat_map(|x| x.to_le_bytes())),
                ColumnRef::I32(x) => data.extend(x[row].iter().flat_map(|x| i64::from(*x).to_le_bytes())),
                ColumnRef::U8(x) => data.extend_from_slice(&x[row]),
            }
        }
    }
    let descr = match first {
        ElementType::F32 => "<f4",
        ElementType::I32 => "<i8",
        ElementType::U8 => "|u1",
    };
    Ok(npy_bytes(descr, &shape, &data))
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

fn zip(members: &[(&str, Vec<u8>)]) -> Result<Vec<u8>, rawzip::Error> {
    let mut bytes = Vec::new();
    let mut archive = ZipArchiveWriter::new(&mut bytes);
    for (name, member) in members {
        let file = archive.new_file(*name).compression_method(CompressionMethod::DEFLATE);
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
