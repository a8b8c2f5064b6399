//! Columns of pictures packed without loss, as records of `.elmur` files keep them: bytes [rows, channels, height,
//! width].
//!
//! Rows come in pieces of a few frames that are unpacked alone, and the channels of a piece in groups: the three
//! colours of a camera where their number allows. The bytes of a group, frame after frame, are replaced by
//! differences modulo 256, of two kinds the one that packs better, and deflated:
//!
//! - left:   d\[i\] = x\[i\] - x\[i - 1\] within a frame of the group, with x\[-1\] = 0
//! - before: d\[i\] = x\[i\] - x'\[i\], where x' is the frame before; left in the piece's first frame
//!
//! A still camera has hardly any difference to the frame before, a moving one hardly any but to its neighbours.

use zlib_rs::{DeflateConfig, Inflate, InflateFlush, ReturnCode, Strategy};

use crate::layout::{ElementType, Frame};

/// Bytes before the table of a packed column.
pub(crate) const PACKED_HEAD: usize = 8;
/// Most frames of a piece that is written: more pack better, fewer are read faster at random.
const PIECE_ROWS: usize = 16;
/// Most bytes of pixels of a piece of several frames that is written.
const PIECE_BYTES: usize = 1 << 21;
/// Most bytes of pixels of a piece of several frames that is read.
const MAX_PIECE_BYTES: usize = 1 << 24;
/// Most bytes of pixels of a column.
pub(crate) const MAX_COLUMN: u128 = 1 << 32;
/// No deflated byte stands for more bytes than this.
const MAX_RATIO: usize = 1032;
/// Effort of deflate: more takes twice the time for one byte in a hundred.
const LEVEL: i32 = 6;

/// What the differences of a group are taken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Predictor {
    Left,
    Before,
}

/// How a column is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Division {
    frame: Frame,
    rows: usize,
    /// Frames of a piece; the last may have fewer.
    piece: usize,
    /// Channels of a group.
    group: usize,
}

impl Division {
    /// How a column of `rows` frames is divided when it is written.
    fn to_write(frame: Frame, rows: usize) -> Self {
        let piece = (PIECE_BYTES / frame.len().max(1)).clamp(1, PIECE_ROWS);
        let group = if frame.channels.is_multiple_of(3) { 3 } else { frame.channels };
        Self { frame, rows, piece, group }
    }

    /// Decodes the beginning of a packed column of `rows` frames that has at most `left` bytes.
    pub(crate) fn decode(head: &[u8], frame: Frame, rows: usize, left: u64) -> Result<Self, String> {
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i])) as usize;
        let (piece, group) = (number(0), number(4));
        let most = (MAX_PIECE_BYTES / frame.len().max(1)).max(1);
        if !(1..=most).contains(&piece) {
            return Err(format!("pieces of {piece} pictures; expected 1 to {most}"));
        }
        if group == 0 || !frame.channels.is_multiple_of(group) {
            return Err(format!("groups of {group} channels of {}", frame.channels));
        }
        if rows as u128 * frame.len() as u128 > MAX_COLUMN {
            return Err(format!("{rows} packed pictures of {} bytes, too many for a record", frame.len()));
        }
        let division = Self { frame, rows, piece, group };
        if (PACKED_HEAD + 4 * division.entries()) as u64 > left {
            return Err(format!("a record too short for {rows} packed pictures"));
        }
        Ok(division)
    }

    fn groups(&self) -> usize {
        self.frame.channels / self.group
    }

    /// Entries of the table: one per group of a piece, four bytes each.
    pub(crate) fn entries(&self) -> usize {
        self.rows.div_ceil(self.piece) * self.groups()
    }

    /// Bytes of one frame of a group.
    fn group_len(&self) -> usize {
        self.group * self.frame.pixels
    }

    /// Frames of this piece.
    fn frames(&self, piece: usize) -> usize {
        self.piece.min(self.rows - piece * self.piece)
    }
}

/// A packed column whose table has been read and checked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PackedColumn {
    division: Division,
    /// Predictor and length of every group of every piece, as in the file.
    entries: Vec<u32>,
    /// Where the groups begin, in bytes from the beginning of the payload.
    data: u64,
}

/// Bits of an entry that hold the length.
const LENGTH: u32 = (1 << 28) - 1;

fn entry_of(predictor: Predictor, len: usize) -> u32 {
    (if predictor == Predictor::Before { 1 << 28 } else { 0 }) | len as u32
}

fn predictor_of(entry: u32) -> Predictor {
    if entry >> 28 == 1 { Predictor::Before } else { Predictor::Left }
}

fn len_of(entry: u32) -> usize {
    (entry & LENGTH) as usize
}

impl PackedColumn {
    /// A column without entries, whose table follows.
    pub(crate) fn new(division: Division) -> Self {
        Self { division, entries: Vec::new(), data: 0 }
    }

    /// Takes over the next entries of the table, four bytes each.
    pub(crate) fn extend(&mut self, table: &[u8]) -> Result<(), String> {
        for entry in table.as_chunks::<4>().0 {
            let (entry, number) = (u32::from_le_bytes(*entry), self.entries.len());
            let frames = self.division.frames(number / self.division.groups());
            let pixels = frames * self.division.group_len();
            let len = len_of(entry);
            if entry >> 28 > 1 || len == 0 || len > pixels || pixels > len.saturating_mul(MAX_RATIO) {
                return Err(format!("entry {number} of packed pictures: {len} bytes for {pixels} pixels"));
            }
            self.entries.push(entry);
        }
        Ok(())
    }

    /// Says where the groups begin, and gives their length in bytes.
    pub(crate) fn begin_at(&mut self, data: u64) -> u64 {
        self.data = data;
        self.entries.iter().map(|entry| len_of(*entry) as u64).sum()
    }

    /// Unpacks frames `rows` to `out`, [rows, channels, height, width]. `read` gives bytes of the payload from a
    /// place on.
    pub(crate) fn unpack<E>(
        &self,
        rows: std::ops::Range<usize>,
        out: &mut [u8],
        mut read: impl FnMut(u64, &mut [u8]) -> Result<(), E>,
        fail: impl Fn(String) -> E,
    ) -> Result<(), E> {
        if rows.is_empty() {
            return Ok(());
        }
        let (division, row) = (&self.division, self.division.frame.len());
        let (first, last) = (rows.start / division.piece, (rows.end - 1) / division.piece);
        let skipped = &self.entries[..first * division.groups()];
        let mut place = self.data + skipped.iter().map(|entry| len_of(*entry) as u64).sum::<u64>();
        let mut unpacker = Unpacker::default();
        let mut packed = Vec::new();
        for piece in first..=last {
            let start = piece * division.piece;
            let wanted = rows.start.max(start) - start..rows.end.min(start + division.piece) - start;
            let out = &mut out[(start + wanted.start - rows.start) * row..][..wanted.len() * row];
            for group in 0..division.groups() {
                let entry = self.entries[piece * division.groups() + group];
                packed.resize(len_of(entry), 0);
                read(place, &mut packed)?;
                place += packed.len() as u64;
                let problem = unpacker.group(division, (piece, group), entry, &packed, &wanted, out);
                problem.map_err(|problem| fail(format!("packed pictures {start}..: {problem}")))?;
            }
        }
        Ok(())
    }
}

/// Packs a column of frames, [rows, channels, height, width]: head, table and groups.
pub(crate) fn pack(pixels: &[u8], frame: Frame) -> Vec<u8> {
    let division = Division::to_write(frame, pixels.len() / frame.len().max(1));
    let (mut table, mut data) = (Vec::new(), Vec::new());
    let (mut left, mut before) = (Vec::new(), Vec::new());
    for piece in pixels.chunks(division.piece * frame.len()) {
        for group in 0..division.groups() {
            left.clear();
            before.clear();
            let mut last: Option<&[u8]> = None;
            for row in piece.chunks_exact(frame.len()) {
                let x = &row[group * division.group_len()..][..division.group_len()];
                let to_left = x.iter().zip([&0].into_iter().chain(x)).map(|(x, y)| x.wrapping_sub(*y));
                left.extend(to_left);
                match last {
                    Some(last) => before.extend(x.iter().zip(last).map(|(x, y)| x.wrapping_sub(*y))),
                    None => before.extend_from_slice(&left),
                }
                last = Some(x);
            }
            let kinds = [(Predictor::Left, &left), (Predictor::Before, &before)];
            let best = kinds.map(|(predictor, bytes)| (predictor, deflate(bytes)));
            let [a, b] = best;
            let (predictor, packed) = if b.1.len() < a.1.len() { b } else { a };
            table.extend(entry_of(predictor, packed.len()).to_le_bytes());
            data.extend(packed);
        }
    }
    let mut bytes = (division.piece as u32).to_le_bytes().to_vec();
    bytes.extend((division.group as u32).to_le_bytes());
    bytes.extend(table);
    bytes.extend(data);
    bytes
}

/// Bytes deflated without any header, or as they are if that is no shorter.
fn deflate(bytes: &[u8]) -> Vec<u8> {
    let config = DeflateConfig {
        level: LEVEL,
        window_bits: -15,
        mem_level: 9,
        // Differences have short matches by chance only.
        strategy: Strategy::Filtered,
        ..DeflateConfig::default()
    };
    let mut room = vec![0; bytes.len()];
    match zlib_rs::compress_slice(&mut room, bytes, config) {
        (packed, ReturnCode::Ok) if packed.len() < bytes.len() => packed.to_vec(),
        _ => bytes.to_vec(),
    }
}

/// Memory to unpack groups with.
#[derive(Default)]
struct Unpacker {
    inflate: Option<Inflate>,
    /// The frame before the first that is wanted, and differences on the way to it.
    earlier: Vec<u8>,
    difference: Vec<u8>,
}

impl Unpacker {
    /// Writes the `wanted` frames of a group of a piece to their places in `out`, whole frames of all groups.
    fn group(
        &mut self,
        division: &Division,
        (piece, group): (usize, usize),
        entry: u32,
        packed: &[u8],
        wanted: &std::ops::Range<usize>,
        out: &mut [u8],
    ) -> Result<(), String> {
        let (len, row) = (division.group_len(), division.frame.len());
        let stored = packed.len() == division.frames(piece) * len;
        let predictor = predictor_of(entry);
        let inflate = match &mut self.inflate {
            Some(inflate) => {
                inflate.reset(false);
                inflate
            }
            None => self.inflate.insert(Inflate::new(false, 15)),
        };
        let mut at = 0;
        let mut next = |to: &mut [u8]| -> Result<(), String> {
            if stored {
                to.copy_from_slice(&packed[at..at + to.len()]);
                at += to.len();
                return Ok(());
            }
            inflate_to(inflate, packed, to)
        };
        for t in 0..wanted.start {
            self.difference.resize(len, 0);
            next(&mut self.difference)?;
            match (predictor, t) {
                // Frames of their own need not be known.
                (Predictor::Left, _) => {}
                (Predictor::Before, 0) => {
                    add_left(&mut self.difference);
                    std::mem::swap(&mut self.earlier, &mut self.difference);
                }
                (Predictor::Before, _) => add(&mut self.earlier, &self.difference),
            }
        }
        for t in wanted.clone() {
            let place = (t - wanted.start) * row + group * len;
            let (done, rest) = out.split_at_mut(place);
            let frame = &mut rest[..len];
            next(frame)?;
            match predictor {
                Predictor::Before if t > wanted.start => add(frame, &done[place - row..][..len]),
                Predictor::Before if t > 0 => add(frame, &self.earlier),
                _ => add_left(frame),
            }
        }
        Ok(())
    }
}

/// Fills `to` with the next bytes of a stream.
fn inflate_to(inflate: &mut Inflate, packed: &[u8], to: &mut [u8]) -> Result<(), String> {
    let mut filled = 0;
    while filled < to.len() {
        let (read, written) = (inflate.total_in(), inflate.total_out());
        let rest = packed.get(read as usize..).unwrap_or_default();
        inflate
            .decompress(rest, &mut to[filled..], InflateFlush::NoFlush)
            .map_err(|e| format!("not deflated bytes ({})", e.as_str()))?;
        filled += (inflate.total_out() - written) as usize;
        if (inflate.total_in(), inflate.total_out()) == (read, written) {
            return Err("deflated bytes that end too early".to_owned());
        }
    }
    Ok(())
}

/// x\[i\] += y\[i\].
fn add(x: &mut [u8], y: &[u8]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x = x.wrapping_add(*y));
}

/// x\[i\] becomes the sum of x up to i.
fn add_left(x: &mut [u8]) {
    let mut sum = 0u8;
    for x in x {
        sum = sum.wrapping_add(*x);
        *x = sum;
    }
}

/// The frames of a column of bytes that is packed, or none.
pub(crate) fn frame_of(leaf: &elmur_base::Leaf<'_>, element: ElementType) -> Option<Frame> {
    use elmur_base::Leaf;
    let (Leaf::Floats { shape, .. } | Leaf::Bytes { shape }) = leaf else { return None };
    let [channels, height, width] = **shape else { return None };
    // Every byte must be a number of the leaf, so that nothing is left to check when frames are unpacked.
    let any = match leaf {
        Leaf::Floats { low, high, .. } => low.iter().all(|x| *x <= 0.0) && high.iter().all(|x| *x >= 1.0),
        _ => true,
    };
    let picture = channels > 0 && height >= 8 && width >= 8 && element == ElementType::U8;
    (picture && any).then_some(Frame { channels, pixels: height * width })
}

#[cfg(test)]
mod tests {
    use elmur_rng::Rng;

    use super::*;

    fn unpacked(
        bytes: &[u8],
        frame: Frame,
        rows: usize,
        range: std::ops::Range<usize>,
    ) -> Result<Vec<u8>, String> {
        let division = Division::decode(bytes, frame, rows, bytes.len() as u64)?;
        let mut column = PackedColumn::new(division);
        let table = PACKED_HEAD..PACKED_HEAD + 4 * division.entries();
        column.extend(&bytes[table.clone()])?;
        let len = column.begin_at(table.end as u64);
        if table.end as u64 + len != bytes.len() as u64 {
            return Err("another length".to_owned());
        }
        let mut out = vec![0; range.len() * frame.len()];
        let read = |at: u64, to: &mut [u8]| {
            to.copy_from_slice(&bytes[at as usize..at as usize + to.len()]);
            Ok(())
        };
        column.unpack(range, &mut out, read, |problem| problem)?;
        Ok(out)
    }

    /// Frames of a still camera with noise in places, a moving one, random ones, or flat ones.
    fn frames(rng: &mut Rng, kind: u32, frame: Frame, rows: usize) -> Vec<u8> {
        let base: Vec<u8> = (0..frame.len()).map(|_| rng.bits() as u8).collect();
        let mut pixels = Vec::new();
        for t in 0..rows {
            for (i, x) in base.iter().enumerate() {
                pixels.push(match kind {
                    0 if rng.below(50) > 0 => *x,
                    1 => (i / 5 + 3 * t) as u8,
                    2 => 77,
                    _ => rng.bits() as u8,
                });
            }
        }
        pixels
    }

    #[test]
    fn any_range_of_packed_frames_is_what_was_packed() {
        let mut rng = Rng::new(5, 0);
        for _ in 0..150 {
            let frame = Frame { channels: 1 + rng.below(9) as usize, pixels: 64 + rng.below(300) as usize };
            let rows = 1 + rng.below(50) as usize;
            let kind = rng.below(4);
            let pixels = frames(&mut rng, kind, frame, rows);
            let bytes = pack(&pixels, frame);
            for _ in 0..6 {
                let start = rng.below(rows as u32) as usize;
                let end = start + rng.below((rows - start + 1) as u32) as usize;
                let out = unpacked(&bytes, frame, rows, start..end).unwrap();
                assert_eq!(out, pixels[start * frame.len()..end * frame.len()], "{frame:?} {start}..{end}");
            }
        }
    }

    #[test]
    fn a_still_camera_and_a_ramp_pack_well_and_noise_takes_its_own_size() {
        let mut rng = Rng::new(6, 0);
        let frame = Frame { channels: 6, pixels: 1024 };
        let base: Vec<u8> = (0..3072).map(|_| rng.bits() as u8).collect();
        // The first camera sees noise that stands still, the second moves along a slope.
        let mut slope = vec![0u8];
        while slope.len() < 3072 + 32 * 97 {
            slope.push(slope[slope.len() - 1].wrapping_add(rng.below(3) as u8));
        }
        let seen = (0..32).flat_map(|t: usize| base.iter().chain(&slope[97 * t..97 * t + 3072]).copied());
        let packed = pack(&seen.collect::<Vec<u8>>(), frame);
        // Two pieces, of each the first noise frame whole; of the slope what is new in every frame.
        let len = packed.len() - 2 * 3072;
        assert!((3000..8000).contains(&len), "{len}");
        let predictors: Vec<u8> = (0..4).map(|i| packed[PACKED_HEAD + 4 * i + 3] >> 4).collect();
        assert_eq!(predictors, [1, 0, 1, 0]);
        let noise: Vec<u8> = (0..frame.len()).map(|_| rng.bits() as u8).collect();
        assert_eq!(pack(&noise, frame).len(), PACKED_HEAD + 8 + noise.len());
    }

    #[test]
    fn packed_columns_with_random_edits_never_crash() {
        let mut rng = Rng::new(7, 0);
        let frame = Frame { channels: 3, pixels: 64 };
        let (pixels, rows) = (frames(&mut Rng::new(9, 1), 1, frame, 20), 20);
        let bytes = pack(&pixels, frame);
        let (mut failed, mut passed) = (0, 0);
        for _ in 0..20_000 {
            let mut damaged = bytes.clone();
            for _ in 0..1 + rng.below(3) {
                let at = rng.below(damaged.len() as u32) as usize;
                damaged[at] = rng.bits() as u8;
            }
            match unpacked(&damaged, frame, rows, 3..19) {
                Ok(out) => {
                    assert_eq!(out.len(), 16 * frame.len());
                    passed += 1;
                }
                Err(_) => failed += 1,
            }
        }
        assert!(failed > 1000 && passed > 100, "{failed} {passed}");
        // Claims of rows that the bytes cannot hold are refused before memory is taken.
        assert!(unpacked(&bytes, frame, 21, 0..21).unwrap_err().contains("end too early"));
        for rows in [33, 1 << 20, usize::MAX / 2] {
            assert!(unpacked(&bytes, frame, rows, 0..1).is_err());
        }
    }
}
