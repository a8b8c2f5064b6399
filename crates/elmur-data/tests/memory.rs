//! Files larger than memory, in small: one test in a process of its own, whose largest size Linux reports.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;

use elmur_base::{Field, Space, Spaces};
use elmur_data::{Buffer, Column, Episode, Limits, Loader, Request, Sampler, Writer, open, open_with};
use elmur_rng::Rng;

mod common;
use common::Folder;

const MIB: usize = 1 << 20;

/// The largest resident memory of this process so far, in bytes.
fn peak() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn large_files_and_archive_bombs_need_little_memory() {
    let folder = Folder::new("memory");
    let spaces =
        Spaces { observation: Space::Bytes { shape: vec![3, 32, 32] }, action: Space::Discrete { n: 4 } };
    // 128 MiB of pictures, of which one episode has half.
    let path = folder.join("pictures.elmur");
    let mut writer = Writer::create(&path, &spaces, BTreeMap::new()).unwrap();
    let (picture, mut rng) = (3 * 32 * 32, Rng::new(1, 0));
    let small = 2 * MIB / picture;
    for _ in 0..32 {
        let pictures = (0..small * picture).map(|_| rng.bits() as u8).collect();
        writer
            .push(&Episode {
                observations: vec![Column::U8(pictures)],
                actions: vec![Column::I32(vec![1; small])],
                rewards: vec![1.0; small],
                terminated: true,
                truncated: false,
                imitate: None,
                labels: None,
                accepted: None,
            })
            .unwrap();
    }
    writer.finish().unwrap();
    // One record of 64 MiB behind them, written without ever holding it.
    let long = 64 * MIB / picture;
    let mut record = Vec::new();
    let mut hasher = crc32fast::Hasher::new();
    let start = [(long as u64).to_le_bytes(), 1u64.to_le_bytes()].concat();
    let chunk = vec![7u8; picture * 64];
    let (chunks, rest) = (long / 64, long % 64 * picture);
    let pad = |len: usize| vec![0u8; len.next_multiple_of(8) - len];
    let tail = [vec![0u8; 4 * long], pad(4 * long), vec![0u8; 4 * long], pad(4 * long)].concat();
    hasher.update(&start);
    (0..chunks).for_each(|_| hasher.update(&chunk));
    hasher.update(&chunk[..rest]);
    hasher.update(&pad(long * picture));
    hasher.update(&tail);
    let len = start.len() + long * picture + pad(long * picture).len() + tail.len();
    record.extend(32u32.to_le_bytes());
    record.extend(hasher.finalize().to_le_bytes());
    record.extend((len as u64).to_le_bytes());
    let crc = crc32fast::hash(&record).to_le_bytes();
    let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(&[b"EPIS", &crc[..], &record, &start].concat()).unwrap();
    (0..chunks).for_each(|_| file.write_all(&chunk).unwrap());
    file.write_all(&chunk[..rest]).unwrap();
    file.write_all(&pad(long * picture)).unwrap();
    file.write_all(&tail).unwrap();
    drop(file);

    let before = peak();
    let limits = Limits { memory: MIB as u64, ..Limits::default() };
    let source = open_with(&path, None, &limits).unwrap();
    assert_eq!((source.episodes(), source.steps(32)), (33, long));
    let fields = vec![
        (Field::Observation(0), Buffer::U8(Vec::new()), picture),
        (Field::Target, Buffer::I64(Vec::new()), 1),
    ];
    let request = Request { rows: 8, windows: 3, steps: 10, fields };
    let mut loader = Loader::new(&source, Sampler::new(&*source, 30, 1), request);
    for _ in 0..100 {
        let batch = loader.next_batch().unwrap();
        loader.recycle(batch);
    }
    source.summary().unwrap();
    let grown = peak().saturating_sub(before);
    assert!(grown < 24 * MIB, "{} MiB to read 128 MiB by ranges", grown / MIB);
    drop((loader, source));

    // 1 MB that inflates to 1 GiB: refused by what it claims. Three of them take no more than one.
    let npz = folder.join("npz");
    fs::create_dir(&npz).unwrap();
    let header = format!("{{'descr': '|u1', 'fortran_order': False, 'shape': (2, {}), }}", 512 * MIB);
    let mut start = b"\x93NUMPY\x01\x00".to_vec();
    start.extend((header.len() as u16).to_le_bytes());
    start.extend(header.as_bytes());
    let mut bomb = Vec::new();
    let mut zip = rawzip::ZipArchiveWriter::new(&mut bomb);
    let file = zip.new_file("obs.npy").compression_method(rawzip::CompressionMethod::DEFLATE);
    let (mut entry, config) = file.start().unwrap();
    let mut writer = config.wrap(flate2::write::DeflateEncoder::new(&mut entry, flate2::Compression::fast()));
    writer.write_all(&start).unwrap();
    let zeros = vec![0; MIB];
    (0..1024).for_each(|_| writer.write_all(&zeros).unwrap());
    let (encoder, descriptor) = writer.finish().unwrap();
    encoder.finish().unwrap();
    entry.finish(descriptor).unwrap();
    zip.finish().unwrap();
    assert!(bomb.len() < 8 * MIB);
    (0..3).for_each(|i| fs::write(npz.join(format!("train_data_{i}.npz")), &bomb).unwrap());
    let before = peak();
    let problem = open(&npz, None).unwrap_err().to_string();
    assert!(problem.contains("too large for one file"), "{problem}");
    let grown = peak().saturating_sub(before);
    assert!(grown < 32 * MIB, "{} MiB for an archive of {} bytes", grown / MIB, bomb.len());
}
