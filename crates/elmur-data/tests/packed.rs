//! Pictures packed in `.elmur` files: any range is what was recorded, bit for bit; older files still read; damage
//! and hostile claims are errors.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use elmur_base::{Field, FieldMut, Space, Spaces};
use elmur_data::{
    Buffer, Column, Dataset, ElmurFile, Episode, Limits, Loader, Part, PartsWriter, Request, Sampler, Source,
    Writer, open, open_with,
};
use elmur_rng::Rng;

mod common;
use common::Folder;

const ON_DISK: Limits = Limits { memory: 0, inflated: 1 << 20 };

/// Two cameras, joints and pixels of a box between them; floats to do.
fn spaces(shape: [usize; 3]) -> Spaces {
    let parts = vec![
        Space::Bytes { shape: shape.to_vec() },
        Space::unbounded([2]),
        Space::between(0.0, 1.0, [1, 9, 8]),
        Space::between(0.0, 0.5, [1, 8, 8]),
    ];
    Spaces { observation: Space::Tuple { parts }, action: Space::unbounded([3]) }
}

/// An episode whose first camera moves, whose second stands still, and whose last leaf has bounds that not every
/// byte lies in, so that it is not packed.
fn episode(rng: &mut Rng, shape: [usize; 3], steps: usize, after: bool) -> Episode {
    let (rows, len) = (steps + usize::from(after), shape.iter().product::<usize>());
    let floats = |n: usize| Column::F32((0..n).map(|i| i as f32 * 0.5).collect());
    let joints = floats(2 * rows);
    let actions = floats(3 * steps);
    let base: Vec<u8> = (0..72).map(|_| rng.bits() as u8).collect();
    let still = (0..72 * rows).map(|i| base[i % 72].wrapping_add(u8::from(rng.below(40) == 0)));
    let still = still.collect();
    let moving = (0..len * rows).map(|i| (i / 7 + 5 * (i / len)) as u8 ^ (rng.below(3) as u8)).collect();
    let dark = (0..64 * rows).map(|_| rng.below(100) as u8).collect();
    Episode {
        observations: vec![Column::U8(moving), joints, Column::U8(still), Column::U8(dark)],
        actions: vec![actions],
        rewards: vec![0.25; steps],
        terminated: steps.is_multiple_of(2),
        truncated: false,
        imitate: steps.is_multiple_of(3).then(|| (0..steps).map(|t| t % 2 == 0).collect()),
        labels: None,
        accepted: None,
    }
}

fn dataset(seed: u64, shape: [usize; 3], lengths: &[usize]) -> Dataset {
    let mut rng = Rng::new(seed, 0);
    let after = seed.is_multiple_of(2);
    let episodes = lengths.iter().map(|steps| episode(&mut rng, shape, *steps, after)).collect();
    Dataset::from_episodes(spaces(shape), BTreeMap::new(), episodes).unwrap()
}

/// The record of an episode without packing, as earlier versions wrote it.
fn plain_record(episode: &Episode, number: u32) -> Vec<u8> {
    let flags = u32::from(episode.terminated)
        | if episode.observations[1].len() > 2 * episode.steps() { 4 } else { 0 }
        | if episode.imitate.is_some() { 8 } else { 0 };
    let mut payload = (episode.steps() as u64).to_le_bytes().to_vec();
    payload.extend(u64::from(flags).to_le_bytes());
    let mut put = |bytes: &[u8]| {
        payload.extend(bytes);
        payload.resize(payload.len().next_multiple_of(8), 0);
    };
    let floats = |x: &[f32]| x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    for column in episode.observations.iter().chain(&episode.actions) {
        match column {
            Column::U8(x) => put(x),
            Column::F32(x) => put(&floats(x)),
            Column::I32(_) => panic!("no integers here"),
        }
    }
    put(&floats(&episode.rewards));
    if let Some(marks) = &episode.imitate {
        put(&marks.iter().map(|mark| u8::from(*mark)).collect::<Vec<u8>>());
    }
    record(&payload, number)
}

fn record(payload: &[u8], number: u32) -> Vec<u8> {
    let mut head = number.to_le_bytes().to_vec();
    head.extend(crc32fast::hash(payload).to_le_bytes());
    head.extend((payload.len() as u64).to_le_bytes());
    [b"EPIS", &crc32fast::hash(&head).to_le_bytes()[..], &head, payload].concat()
}

/// Bytes of the header of a file.
fn header(bytes: &[u8]) -> usize {
    24 + u64::from_le_bytes(bytes[16..24].try_into().unwrap()) as usize
}

#[test]
fn ranges_of_any_shape_are_what_was_recorded() {
    let folder = Folder::new("packed-ranges");
    let mut rng = Rng::new(21, 0);
    for round in 0..20 {
        let shape = [1 + rng.below(7) as usize, 8 + rng.below(9) as usize, 8 + rng.below(9) as usize];
        let lengths: Vec<usize> = (0..3).map(|_| 1 + rng.below(40) as usize).collect();
        let data = dataset(round, shape, &lengths);
        let path = folder.join(&format!("{round}.elmur"));
        data.save(&path).unwrap();
        assert!(fs::metadata(&path).unwrap().len() < data.plain_bytes());
        let (whole, ranged) = (open(&path, None).unwrap(), open_with(&path, None, &ON_DISK).unwrap());
        assert!(format!("{ranged:?}").starts_with("ElmurFile"));
        for source in [&whole, &ranged] {
            assert_eq!(source.fingerprint(), data.fingerprint());
            for i in 0..3 {
                assert_eq!(source.episode(i).unwrap(), data.episode(i).to_episode());
            }
        }
        for _ in 0..40 {
            let (i, leaf) = (rng.below(3) as usize, [0, 2, 3][rng.below(3) as usize]);
            let Column::U8(all) = data.episode(i).to_episode().observations[leaf].clone() else { panic!() };
            let width = data.layout().observations[leaf].width;
            let rows = (all.len() / width) as u32;
            let start = rng.below(rows) as usize;
            let end = start + rng.below(rows - start as u32 + 1) as usize;
            let mut out = vec![9; (end - start) * width];
            ranged.read(Part::Observation(leaf), i, start..end, FieldMut::U8(&mut out)).unwrap();
            assert_eq!(out, all[start * width..end * width], "{shape:?} episode {i} {start}..{end}");
        }
    }
}

#[test]
fn files_of_earlier_versions_read_and_grow() {
    let folder = Folder::new("packed-earlier");
    let data = dataset(4, [6, 12, 10], &[5, 20, 33]);
    let (path, old) = (folder.join("new.elmur"), folder.join("old.elmur"));
    data.save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let mut plain = bytes[..header(&bytes)].to_vec();
    (0..3).for_each(|i| plain.extend(plain_record(&data.episode(i).to_episode(), i as u32)));
    assert!(plain.len() > bytes.len());
    fs::write(&old, &plain).unwrap();
    for source in [open(&old, None).unwrap(), open_with(&old, None, &ON_DISK).unwrap()] {
        assert_eq!(source.fingerprint(), data.fingerprint());
        assert_eq!(source.episode(1).unwrap(), data.episode(1).to_episode());
    }
    // What is appended is packed; both kinds stand side by side.
    let mut writer = Writer::append_to(&old).unwrap();
    writer.push(data.episode(2)).unwrap();
    writer.finish().unwrap();
    let grown = open_with(&old, None, &ON_DISK).unwrap();
    for (i, same) in [0, 1, 2, 2].into_iter().enumerate() {
        assert_eq!(grown.episode(i).unwrap(), data.episode(same).to_episode());
        assert_eq!(grown.checksum(i), data.checksum(same));
    }
}

#[test]
fn a_packed_file_cut_anywhere_keeps_its_whole_episodes_and_a_writer_goes_on() {
    let folder = Folder::new("packed-cut");
    let data = dataset(5, [1, 8, 8], &[3, 18]);
    let path = folder.join("a.elmur");
    data.save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let start = header(&bytes);
    let first = start + 24 + u64::from_le_bytes(bytes[start + 16..start + 24].try_into().unwrap()) as usize;
    let cut = folder.join("cut.elmur");
    for len in (start..bytes.len()).step_by(3) {
        let _ = fs::remove_file(&cut);
        fs::write(&cut, &bytes[..len]).unwrap();
        let (whole, ranged) = (Dataset::from_bytes(&bytes[..len]), ElmurFile::open(&cut));
        if len < first {
            assert!(whole.is_err() && ranged.is_err(), "{len}");
            continue;
        }
        let (whole, ranged) = (whole.unwrap(), ranged.unwrap());
        assert_eq!((whole.len(), ranged.episodes()), (1, 1), "{len}");
        assert_eq!((whole.torn_bytes(), ranged.torn_bytes()), ((len - first) as u64, (len - first) as u64));
    }
    let mut writer = Writer::append_to(&cut).unwrap();
    assert_eq!(writer.episodes(), 1);
    writer.push(data.episode(1)).unwrap();
    writer.finish().unwrap();
    assert_eq!(fs::read(&cut).unwrap(), bytes);
}

#[test]
fn flipped_bits_of_packed_records_are_found() {
    let data = dataset(6, [3, 8, 8], &[17]);
    let folder = Folder::new("packed-flips");
    let path = folder.join("a.elmur");
    data.save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let place = folder.join("b.elmur");
    for bit in (8 * header(&bytes)..8 * bytes.len()).step_by(5) {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let whole = Dataset::from_bytes(&damaged).unwrap_err().to_string();
        if bit % 64 == 0 {
            let _ = fs::remove_file(&place);
            fs::write(&place, &damaged).unwrap();
            let ranged = ElmurFile::open(&place).unwrap_err().to_string();
            assert_eq!(ranged, whole.replacen("bytes", &place.display().to_string(), 1));
        }
    }
}

/// Whoever computes checksums can send anything: an error or numbers that fit, in bounded memory, never a crash.
#[test]
fn hostile_payloads_with_valid_checksums_never_crash() {
    let data = dataset(8, [3, 8, 8], &[20]);
    let folder = Folder::new("packed-hostile");
    let path = folder.join("a.elmur");
    data.save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let (start, payload) = bytes.split_at(header(&bytes));
    let payload = &payload[24..];
    let mut rng = Rng::new(31, 0);
    let (mut whole_passed, mut ranged_passed) = (0, 0);
    for round in 0..4000 {
        let mut edited = payload.to_vec();
        for _ in 0..1 + rng.below(3) {
            let at = rng.below(edited.len() as u32) as usize;
            match rng.below(5) {
                0 => edited.truncate(at / 8 * 8 + 8),
                1 => edited[at / 4 * 4..][..4].copy_from_slice(&(rng.bits() | 1 << 31).to_le_bytes()),
                _ => edited[at] = rng.bits() as u8,
            }
        }
        let file = [start, &record(&edited, 0)].concat();
        whole_passed += usize::from(Dataset::from_bytes(&file).is_ok());
        if round % 8 == 0 {
            let place = folder.join("b.elmur");
            let _ = fs::remove_file(&place);
            fs::write(&place, &file).unwrap();
            if let Ok(opened) = ElmurFile::open(&place) {
                ranged_passed += usize::from(opened.episode(0).is_ok());
            }
        }
    }
    // Pictures that were changed have another checksum than the record says.
    assert!(whole_passed < 100 && ranged_passed > 0, "{whole_passed} {ranged_passed}");
    // Steps that would take 2^60 bytes.
    for steps in [21u64, 1 << 40, u64::MAX] {
        let mut edited = payload.to_vec();
        edited[..8].copy_from_slice(&steps.to_le_bytes());
        let file = [start, &record(&edited, 0)].concat();
        assert!(Dataset::from_bytes(&file).is_err());
    }
}

#[test]
fn a_folder_of_native_files_is_one_dataset_and_parts_keep_their_size() {
    let folder = Folder::new("packed-parts");
    let lengths = [9, 30, 4, 22, 17, 28];
    let data = dataset(10, [6, 16, 16], &lengths);
    let out = folder.join("parts");
    let most = 60_000;
    let create = |most| PartsWriter::create(&out, data.spaces(), BTreeMap::new(), most);
    let mut writer = create(most).unwrap();
    (0..6).for_each(|i| writer.push(data.episode(i)).unwrap());
    let files = writer.finish().unwrap();
    assert!(files.len() > 1);
    for path in &files {
        assert!(fs::metadata(path).unwrap().len() <= most);
    }
    fs::write(out.join("part_9.elmur.tmp"), b"torn").unwrap();
    for limits in [Limits::default(), ON_DISK] {
        let joined = open_with(&out, None, &limits).unwrap();
        assert_eq!((joined.episodes(), joined.fingerprint()), (6, data.fingerprint()));
        for i in 0..6 {
            assert_eq!(joined.episode(i).unwrap(), data.episode(i).to_episode());
        }
    }
    assert!(create(most).unwrap_err().to_string().contains("exists already"));
    // An episode larger than a part is refused, and nothing is left of it.
    let other = folder.join("other");
    let mut writer = PartsWriter::create(&other, data.spaces(), BTreeMap::new(), 1000).unwrap();
    assert!(writer.push(data.episode(1)).unwrap_err().to_string().contains("allow larger files"));
    writer.discard();
    assert!(!other.exists());
    // Files of other spaces do not belong together.
    dataset(1, [3, 8, 8], &[3]).save(out.join("part_77.elmur")).unwrap();
    assert!(open(&out, None).unwrap_err().to_string().contains("part_77.elmur"));
}

#[test]
fn loaders_give_the_same_batches_from_memory_and_from_packed_files() {
    let folder = Folder::new("packed-loader");
    let data = dataset(12, [3, 10, 11], &[40, 25, 61]);
    let path = folder.join("a.elmur");
    data.save(&path).unwrap();
    let batches = |source: Arc<dyn Source>| {
        let fields = vec![
            (Field::Observation(0), Buffer::U8(Vec::new()), 330),
            (Field::Observation(2), Buffer::F32(Vec::new()), 72),
            (Field::Target, Buffer::F32(Vec::new()), 3),
        ];
        let request = Request { rows: 3, windows: 2, steps: 10, fields };
        let mut loader = Loader::new(&source, Sampler::new(&*source, 20, 1), request);
        (0..20).map(|_| loader.next_batch().unwrap().fields).collect::<Vec<_>>()
    };
    let packed = batches(open_with(&path, None, &ON_DISK).unwrap());
    assert!(packed == batches(Arc::new(data)));
}
