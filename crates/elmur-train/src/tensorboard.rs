//! TensorBoard event files: scalars over steps, written without TensorFlow or a protobuf library.
//!
//! A file is a sequence of TFRecords, all numbers little-endian:
//!
//! ```text
//! record  = length: u64, masked crc of length: u32, data: [u8; length], masked crc of data: u32
//! data    = protobuf Event   { 1: wall_time f64, 2: step i64, 3: file_version text | 5: Summary }
//!                   Summary  { 1: Value }
//!                   Value    { 1: tag text, 2: simple_value f32 }
//! masked  = rotate_right(crc32c, 15) + 0xa282ead8
//! ```
//!
//! The first event holds the file version, every later one a single scalar. A resumed run opens another file
//! in the same folder: TensorBoard reads the files of a folder in the order of their names, and those hold
//! the time.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// What TensorBoard expects in the first event of a file.
const FILE_VERSION: &str = "brain.Event:2";

/// Writes one event file. Scalars are buffered; dropping the writer flushes it but cannot report a failure.
#[derive(Debug)]
pub struct EventWriter {
    file: BufWriter<File>,
}

impl EventWriter {
    /// Opens a new event file in `folder`, which is made if it is missing. Existing files are never touched.
    ///
    /// `wall_time` is in seconds since 1970 and becomes part of the file's name.
    pub fn create(folder: &Path, wall_time: f64) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let mut writer = Self { file: BufWriter::new(new_file(folder, wall_time)?) };
        let mut event = Vec::new();
        put_f64(&mut event, 1, wall_time);
        put_bytes(&mut event, 3, FILE_VERSION.as_bytes());
        writer.record(&event)?;
        // A run that is still at its first step should already be a valid file.
        writer.flush()?;
        Ok(writer)
    }

    /// Adds one point to the curve `tag`; a slash in the tag groups curves (`train/loss`).
    ///
    /// `wall_time` is in seconds since 1970. Steps above `i64::MAX` have no place in the format: an error.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f32, wall_time: f64) -> io::Result<()> {
        if i64::try_from(step).is_err() {
            let message = format!("step of `{tag}`: expected at most {}, got {step}", i64::MAX);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        self.record(&scalar_event(tag, step, value, wall_time))
    }

    /// Hands everything written so far to the operating system, where a running TensorBoard sees it.
    pub fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }

    fn record(&mut self, data: &[u8]) -> io::Result<()> {
        self.file.write_all(&framed(data))
    }
}

/// Opens `events.out.tfevents.<seconds>.elmur`, or the first free name with a number behind it.
fn new_file(folder: &Path, wall_time: f64) -> io::Result<File> {
    // The order of names is the order of reading, so numbers have leading zeros. The cast saturates and makes
    // 0 of what is not a time.
    let name = format!("events.out.tfevents.{:010}.elmur", wall_time as u64);
    let mut path = folder.join(&name);
    let mut number = 0_u32;
    loop {
        // Asking first and opening later would let two runs that start together share a file.
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && number < u32::MAX => number += 1,
            result => return result,
        }
        path = folder.join(format!("{name}.{number:03}"));
    }
}

fn scalar_event(tag: &str, step: u64, value: f32, wall_time: f64) -> Vec<u8> {
    // A message is preceded by its length, hence from the inside out.
    let mut point = Vec::with_capacity(tag.len() + 16);
    put_bytes(&mut point, 1, tag.as_bytes());
    put_f32(&mut point, 2, value);
    let mut summary = Vec::with_capacity(point.len() + 16);
    put_bytes(&mut summary, 1, &point);
    let mut event = Vec::with_capacity(summary.len() + 32);
    put_f64(&mut event, 1, wall_time);
    put_u64(&mut event, 2, step);
    put_bytes(&mut event, 5, &summary);
    event
}

// Protobuf: a field is its key, `number << 3 | wire type`, and then its content.

fn put_u64(out: &mut Vec<u8>, field: u64, x: u64) {
    put_varint(out, field << 3);
    put_varint(out, x);
}

fn put_f64(out: &mut Vec<u8>, field: u64, x: f64) {
    put_varint(out, field << 3 | 1);
    out.extend_from_slice(&x.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    put_varint(out, field << 3 | 2);
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn put_f32(out: &mut Vec<u8>, field: u64, x: f32) {
    put_varint(out, field << 3 | 5);
    out.extend_from_slice(&x.to_le_bytes());
}

/// Seven bits a byte, lowest first; the top bit says that more follow.
fn put_varint(out: &mut Vec<u8>, mut x: u64) {
    while x >= 0x80 {
        out.push(x as u8 | 0x80);
        x >>= 7;
    }
    out.push(x as u8);
}

/// `data` as one TFRecord.
fn framed(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(data.len() + 16);
    record.extend_from_slice(&length);
    record.extend_from_slice(&masked_crc(&length).to_le_bytes());
    record.extend_from_slice(data);
    record.extend_from_slice(&masked_crc(data).to_le_bytes());
    record
}

/// The checksum as TFRecords store it: masked, because a checksum over data that holds checksums is weak.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| (crc >> 8) ^ CRC_TABLE[usize::from(crc as u8 ^ byte)])
}

const CRC_TABLE: [u32; 256] = crc_table();

/// What each low byte adds to the remainder, for the Castagnoli polynomial with its bits reversed.
const fn crc_table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut i = 0;
    while i < table.len() {
        let mut crc = i as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A folder of its own for a test, removed at its end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("elmur-events-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Self(path)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).unwrap();
            let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }

        fn read(&self, name: &str) -> Vec<u8> {
            fs::read(self.0.join(name)).unwrap()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn take<'a>(bytes: &mut &'a [u8], n: usize) -> &'a [u8] {
        let (head, tail) = bytes.split_at(n);
        *bytes = tail;
        head
    }

    fn take_varint(bytes: &mut &[u8]) -> u64 {
        let mut x = 0;
        for shift in (0..64).step_by(7) {
            let byte = take(bytes, 1)[0];
            x |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return x;
            }
        }
        panic!("a varint has at most ten bytes");
    }

    /// The data of every record, checksums verified.
    fn records(mut bytes: &[u8]) -> Vec<&[u8]> {
        let mut all = Vec::new();
        while !bytes.is_empty() {
            let length = take(&mut bytes, 8);
            assert_eq!(take(&mut bytes, 4), masked_crc(length).to_le_bytes());
            let data = take(&mut bytes, u64::from_le_bytes(length.try_into().unwrap()) as usize);
            assert_eq!(take(&mut bytes, 4), masked_crc(data).to_le_bytes());
            all.push(data);
        }
        all
    }

    /// The fields of a message as (number, content); a varint is returned as its eight bytes.
    fn fields(mut bytes: &[u8]) -> Vec<(u64, Vec<u8>)> {
        let mut all = Vec::new();
        while !bytes.is_empty() {
            let key = take_varint(&mut bytes);
            let content = match key & 7 {
                0 => take_varint(&mut bytes).to_le_bytes().to_vec(),
                1 => take(&mut bytes, 8).to_vec(),
                2 => {
                    let length = take_varint(&mut bytes) as usize;
                    take(&mut bytes, length).to_vec()
                }
                5 => take(&mut bytes, 4).to_vec(),
                wire => panic!("wire type {wire}"),
            };
            all.push((key >> 3, content));
        }
        all
    }

    #[test]
    fn crc_matches_the_published_vectors() {
        assert_eq!(crc32c(b""), 0);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        // RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    }

    #[test]
    fn bytes_are_those_of_tensorboards_own_writer() {
        let folder = Folder::new("bytes");
        let mut writer = EventWriter::create(&folder.0, 1.5).unwrap();
        writer.scalar("loss", 300, 0.25, 1.5).unwrap();
        writer.flush().unwrap();
        // Made with `Event.SerializeToString` and `masked_crc32c` of TensorBoard 2.21.
        #[rustfmt::skip]
        let expected = [
            0x18, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22, // 24 bytes
            0x09, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f, // wall time 1.5
            0x1a, 13, b'b', b'r', b'a', b'i', b'n', b'.', b'E', b'v', b'e', b'n', b't', b':', b'2',
            0x2a, 0x28, 0x64, 0x6c,
            0x1b, 0, 0, 0, 0, 0, 0, 0, 0x1a, 0x0d, 0x9e, 0x13, // 27 bytes
            0x09, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f, // wall time 1.5
            0x10, 0xac, 0x02, // step 300
            0x2a, 13, 0x0a, 11, // summary, value
            0x0a, 4, b'l', b'o', b's', b's', 0x15, 0, 0, 0x80, 0x3e, // tag, 0.25
            0x99, 0x08, 0xde, 0xed,
        ];
        assert_eq!(folder.read("events.out.tfevents.0000000001.elmur"), expected);
    }

    #[test]
    fn scalars_come_back_bit_for_bit() {
        let points = [
            ("train/loss", 0, 0.0, 1.7e9),
            ("train/loss", 127, -0.0, 1.7e9 + 0.125),
            ("eval/success", 128, f32::NAN, 1.7e9 + 0.25),
            ("größe", u64::from(u32::MAX) + 1, f32::NEG_INFINITY, 0.0),
            ("", i64::MAX as u64, f32::from_bits(1), -1.0),
            // Lengths that need two bytes.
            (&"t".repeat(300), 1 << 40, f32::MAX, 1.0),
        ];
        let folder = Folder::new("points");
        let mut writer = EventWriter::create(&folder.0, 1.7e9).unwrap();
        for (tag, step, value, time) in points {
            writer.scalar(tag, step, value, time).unwrap();
        }
        drop(writer);

        let file = folder.read("events.out.tfevents.1700000000.elmur");
        let events = records(&file);
        let version = vec![(1, 1.7e9_f64.to_le_bytes().to_vec()), (3, b"brain.Event:2".to_vec())];
        assert_eq!(fields(events[0]), version);
        assert_eq!(events.len(), 1 + points.len());
        for (data, (tag, step, value, time)) in events[1..].iter().zip(points) {
            let event = fields(data);
            assert_eq!(event.len(), 3);
            assert_eq!(event[0], (1, time.to_le_bytes().to_vec()));
            assert_eq!(event[1], (2, step.to_le_bytes().to_vec()));
            assert_eq!(event[2].0, 5);
            let summary = fields(&event[2].1);
            assert_eq!((summary.len(), summary[0].0), (1, 1));
            let point = vec![(1, tag.as_bytes().to_vec()), (2, value.to_le_bytes().to_vec())];
            assert_eq!(fields(&summary[0].1), point);
        }
    }

    #[test]
    fn step_beyond_the_format_is_refused_and_writes_nothing() {
        let folder = Folder::new("step");
        let mut writer = EventWriter::create(&folder.0, 5.0).unwrap();
        let error = writer.scalar("loss", 1 << 63, 0.0, 5.0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        writer.flush().unwrap();
        assert_eq!(records(&folder.read("events.out.tfevents.0000000005.elmur")).len(), 1);
    }

    #[test]
    fn same_second_gets_another_file_and_leaves_the_first_alone() {
        let folder = Folder::new("names");
        let mut first = EventWriter::create(&folder.0, 12.25).unwrap();
        first.scalar("loss", 1, 1.0, 12.5).unwrap();
        drop(first);
        let name = "events.out.tfevents.0000000012.elmur";
        let before = folder.read(name);
        for _ in 0..2 {
            EventWriter::create(&folder.0, 12.75).unwrap();
        }
        assert_eq!(folder.names(), [name.to_string(), format!("{name}.001"), format!("{name}.002")]);
        assert_eq!(folder.read(name), before);
    }

    #[test]
    fn new_file_is_valid_before_the_first_flush() {
        let folder = Folder::new("fresh");
        // Not a time, not a reason to fail a run.
        let _writer = EventWriter::create(&folder.0.join("a/b"), f64::NAN).unwrap();
        assert_eq!(records(&folder.read("a/b/events.out.tfevents.0000000000.elmur")).len(), 1);
    }
}
