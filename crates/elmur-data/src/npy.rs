//! The arrays of one `.npz` file: a zip archive of `.npy` arrays, stored or deflated. Sizes are believed only
//! as far as the archive, the array's header and its data agree, and never beyond a limit.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;

use elmur_base::{Leaf, Space, Spaces};
use flate2::bufread::DeflateDecoder;
use rawzip::{CompressionMethod, ZipArchive};

use crate::episode::{Column, Episode};
use crate::layout::ElementType;

/// Longest header of an array, in bytes.
const MAX_HEADER: usize = 1 << 16;
const KEYS: [&str; 6] = ["obs", "rgb", "action", "reward", "done", "counts"];

/// The arrays of one file.
pub(crate) struct Recording {
    pub(crate) observation: Array,
    pub(crate) action: Array,
    rewards: Vec<f32>,
    terminated: bool,
    imitate: Option<Vec<bool>>,
}

impl Recording {
    /// Reads the arrays of an archive that inflate to at most `limit` bytes, and take at most as many when
    /// they are decoded.
    pub(crate) fn parse(bytes: &[u8], limit: u64) -> Result<Self, String> {
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
        let sizes = members.values().map(|(place, _)| place.uncompressed_size_hint());
        let claimed = sizes.fold(0u64, u64::saturating_add);
        if claimed > limit {
            return Err(too_large(claimed, limit));
        }
        let left = Cell::new(limit);
        let read = |key: &'static str| -> Result<Option<Array>, String> {
            let Some((place, method)) = members.get(key) else { return Ok(None) };
            let entry = archive.get_entry(*place).map_err(damaged)?;
            let data: Box<dyn Read + '_> = match *method {
                CompressionMethod::STORE => Box::new(entry.data()),
                CompressionMethod::DEFLATE => Box::new(DeflateDecoder::new(entry.data())),
                other => return Err(format!("`{key}` is compressed by {other}; use np.savez_compressed")),
            };
            let claimed = place.uncompressed_size_hint();
            let array = Array::read(&mut entry.verifying_reader(data), claimed, &left);
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

    /// The episode in the columns of given spaces, of which none may take more than `limit` bytes.
    pub(crate) fn into_episode(self, spaces: &Spaces, limit: u64) -> Result<Episode, String> {
        Ok(Episode {
            observations: self.observation.columns("obs", &spaces.observation, limit)?,
            actions: self.action.columns("action", &spaces.action, limit)?,
            rewards: self.rewards,
            terminated: self.terminated,
            truncated: !self.terminated,
            imitate: self.imitate,
            labels: None,
            accepted: None,
        })
    }
}

fn too_large(bytes: u64, limit: u64) -> String {
    format!("inflates to {bytes} bytes, too large for one file (at most {limit}); save one episode per file")
}

/// An array: bytes as [`Column::U8`], other integers as `I32`, floats as `F32`.
pub(crate) struct Array {
    pub(crate) shape: Vec<usize>,
    pub(crate) numbers: Column,
}

impl Array {
    fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Numbers per row.
    pub(crate) fn width(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Reads an `.npy` file of which the archive says that it has `claimed` bytes; after as many, `source`
    /// checks the archive's checksum. What the decoded numbers take is subtracted from what is `left`.
    fn read(source: &mut impl Read, claimed: u64, left: &Cell<u64>) -> Result<Self, String> {
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
        let mut numbers = decode(descr, &[], None)?;
        let size = descr.chars().last().and_then(|size| size.to_digit(10)).map_or(0, u64::from);
        if fortran {
            return Err("Fortran order; save np.ascontiguousarray(x)".to_owned());
        }
        // Without zeros no product of some axes is larger than that of all.
        if shape.is_empty() || shape.contains(&0) {
            return Err(format!("shape {shape:?}; expected at least one step, and numbers in it"));
        }
        let elements = shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n as u64));
        let bytes = elements.and_then(|n| n.checked_mul(size));
        let bytes = bytes.ok_or_else(|| format!("shape {shape:?} is too large; one episode per file"))?;
        let total = ((prefix.len() + len_size + len) as u64).checked_add(bytes);
        if total != Some(claimed) {
            let head = prefix.len() + len_size + len;
            return Err(format!(
                "{shape:?} needs {head} + {bytes} bytes, the archive has {claimed}; copy it again"
            ));
        }
        let held = (bytes / size.max(1)).saturating_mul(numbers.view().element_type().size() as u64);
        let Some(rest) = left.get().checked_sub(held) else {
            return Err(too_large(held, left.get()));
        };
        left.set(rest);
        let mut buffer = vec![0; 1 << 16];
        let mut unread = bytes;
        while unread > 0 {
            let part = &mut buffer[..unread.min(1 << 16) as usize];
            source.read_exact(part).map_err(short)?;
            numbers = decode(descr, part, Some(numbers))?;
            unread -= part.len() as u64;
        }
        Ok(Self { shape, numbers })
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
    pub(crate) fn row_shape(&self) -> &[usize] {
        match &self.shape[1..] {
            [1, k] => std::slice::from_ref(k),
            shape => shape,
        }
    }

    /// The columns of a space's leaves: each row holds their numbers one after the other.
    fn columns(self, key: &str, space: &Space, limit: u64) -> Result<Vec<Column>, String> {
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
        let held = (self.numbers.len() as u64).saturating_mul(4);
        let bytes = self.numbers.view().element_type() == ElementType::U8;
        if bytes && held > limit && leaves.iter().any(|leaf| !stays_bytes(leaf)) {
            return Err(fail(too_large(held, limit)));
        }
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
        (Leaf::Floats { .. }, Column::U8(x)) if stays_bytes(leaf) => Column::U8(x),
        (Leaf::Floats { .. }, numbers) => Column::F32(floats(numbers)),
        (Leaf::Bytes { .. }, numbers) if numbers.view().element_type() != ElementType::U8 => {
            let name = numbers.view().element_type().name();
            return Err(format!("holds {name} where the space has bytes; save x.astype('uint8')"));
        }
        (_, numbers) => numbers,
    })
}

/// Whether bytes are recorded as bytes in this leaf: a camera, or a box of pixels, which ends at 1.
fn stays_bytes(leaf: &Leaf<'_>) -> bool {
    match leaf {
        Leaf::Ints(_) => false,
        Leaf::Floats { high, .. } => high.iter().all(|high| *high <= 1.0),
        Leaf::Bytes { .. } => true,
    }
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

/// Appends the numbers of whole elements to those before.
fn decode(descr: &str, data: &[u8], before: Option<Column>) -> Result<Column, String> {
    fn floats<const N: usize>(data: &[u8], before: Option<Column>, f: impl Fn([u8; N]) -> f32) -> Column {
        let mut all = if let Some(Column::F32(all)) = before { all } else { Vec::new() };
        all.extend(data.as_chunks().0.iter().map(|b| f(*b)));
        Column::F32(all)
    }
    fn ints<const N: usize, T: TryInto<i32>>(
        data: &[u8],
        before: Option<Column>,
        f: impl Fn([u8; N]) -> T,
    ) -> Result<Column, String> {
        let mut all = if let Some(Column::I32(all)) = before { all } else { Vec::new() };
        for bytes in data.as_chunks().0 {
            let number = f(*bytes).try_into();
            all.push(number.map_err(|_| "integers beyond 32 bits; save them as floats".to_owned())?);
        }
        Ok(Column::I32(all))
    }
    match descr.trim_start_matches(['<', '|']) {
        "f4" => Ok(floats(data, before, f32::from_le_bytes)),
        "f8" => Ok(floats(data, before, |b| f64::from_le_bytes(b) as f32)),
        "i1" => ints(data, before, i8::from_le_bytes),
        "i2" => ints(data, before, i16::from_le_bytes),
        "i4" => ints(data, before, i32::from_le_bytes),
        "i8" => ints(data, before, i64::from_le_bytes),
        "u1" => {
            let mut all = if let Some(Column::U8(all)) = before { all } else { Vec::new() };
            all.extend_from_slice(data);
            Ok(Column::U8(all))
        }
        "u2" => ints(data, before, u16::from_le_bytes),
        "u4" => ints(data, before, u32::from_le_bytes),
        "u8" => ints(data, before, u64::from_le_bytes),
        "b1" => ints(data, before, u8::from_le_bytes),
        _ => Err(format!(
            "element type {descr}; expected f4, f8, i1 to i8, u1 to u8 or b1, little endian; save x.astype('f4')"
        )),
    }
}
