//! Formats behind one interface: the same numbers, errors where files change, writers that can be interrupted.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use elmur_base::{Field, FieldMut, Space, Spaces};
use elmur_data::{
    Buffer, Column, Crop, Dataset, ElmurFile, Episode, Limits, Loader, NpzWriter, Part, Request, Sampler,
    Source, Window, Writer, check_read, open, open_with, save, write_npz,
};

mod common;
use common::{Folder, dataset, episodes, metadata, spaces};

const ON_DISK: Limits = Limits { memory: 0, inflated: 1 << 20 };

/// Ten episodes that every format can hold.
fn plain() -> Dataset {
    let spaces = Spaces {
        observation: Space::between(0.0, 1.0, [3, 2, 2]),
        action: Space::MultiDiscrete { sizes: vec![3, 4] },
    };
    let episode = |i: usize| Episode {
        observations: vec![Column::U8((0..12 * (i + 1)).map(|k| (k * 31 + i) as u8).collect())],
        actions: vec![Column::I32((0..2 * (i + 1)).map(|k| ((k * 7 + i) % 3 + k % 2) as i32).collect())],
        rewards: (0..=i).map(|t| t as f32 - 0.5).collect(),
        terminated: true,
        truncated: false,
        imitate: i.is_multiple_of(3).then(|| (0..=i).map(|t| t % 2 == 0).collect()),
        labels: None,
        accepted: None,
    };
    Dataset::from_episodes(spaces, BTreeMap::new(), (0..10).map(episode).collect()).unwrap()
}

/// The same data behind every reader there is.
fn readers(folder: &Folder) -> Vec<Arc<dyn Source>> {
    let data = plain();
    let (file, npz) = (folder.join("a.elmur"), folder.join("npz"));
    data.save(&file).unwrap();
    write_npz(&npz, &data).unwrap();
    let spaces = data.spaces().clone();
    vec![
        Arc::new(data),
        open(&file, None).unwrap(),
        open_with(&file, None, &ON_DISK).unwrap(),
        open(&npz, None).unwrap(),
        open_with(&npz, None, &ON_DISK).unwrap(),
        open_with(&npz, Some(&spaces), &ON_DISK).unwrap(),
    ]
}

#[test]
fn every_reader_hands_out_the_same_numbers_and_fingerprint() {
    let folder = Folder::new("readers");
    let readers = readers(&folder);
    let first = &readers[0];
    assert!(readers[2..].iter().any(|r| format!("{r:?}").starts_with("ElmurFile")));
    assert!(readers[2..].iter().any(|r| format!("{r:?}").starts_with("Decoded")));
    for reader in &readers {
        assert_eq!((reader.spaces(), reader.layout()), (first.spaces(), first.layout()), "{reader:?}");
        assert_eq!(reader.fingerprint(), first.fingerprint());
        assert_eq!(reader.summary().unwrap(), first.summary().unwrap());
        for i in 0..10 {
            assert_eq!(reader.episode(i).unwrap(), first.episode(i).unwrap());
        }
        let (mut bytes, mut choices, mut rewards, mut marks) = ([0; 24], [0; 4], [0.0; 2], [false; 2]);
        reader.read(Part::Observation(0), 7, 3..5, FieldMut::U8(&mut bytes)).unwrap();
        assert!((0..24).all(|k| bytes[k] == ((36 + k) * 31 + 7) as u8));
        reader.read(Part::Action(0), 7, 3..5, FieldMut::I32(&mut choices)).unwrap();
        assert!((0..4).all(|k| choices[k] == (((k + 6) * 7 + 7) % 3 + k % 2) as i32));
        reader.read(Part::Reward, 7, 3..5, FieldMut::F32(&mut rewards)).unwrap();
        assert_eq!(rewards, [2.5, 3.5]);
        reader.read(Part::Imitate, 6, 1..3, FieldMut::Bool(&mut marks)).unwrap();
        assert_eq!(marks, [false, true]);
        // What is not there is refused by name.
        for (part, episode, rows) in [
            (Part::Observation(1), 0, 0..1),
            (Part::Observation(0), 10, 0..1),
            (Part::Observation(0), 0, 0..2),
            (Part::Imitate, 1, 0..1),
            (Part::Reward, usize::MAX, 0..1),
        ] {
            let mut out = [0; 12];
            assert!(check_read(&**reader, part, episode, &rows, &FieldMut::U8(&mut out)).is_err());
            let error = reader.read(part, episode, rows, FieldMut::U8(&mut out)).unwrap_err().to_string();
            assert!(error.contains(&part.to_string()), "{error}");
        }
        let error = reader.read(Part::Reward, 0, 0..1, FieldMut::U8(&mut [0])).unwrap_err().to_string();
        assert!(error.contains("reward: expected f32, got u8"), "{error}");
    }
}

#[test]
fn every_reader_gives_the_same_batches() {
    let folder = Folder::new("batches");
    let mut batches: Vec<Vec<(Vec<Crop>, Vec<Buffer>)>> = Vec::new();
    for reader in readers(&folder) {
        let fields = vec![
            (Field::Observation(0), Buffer::F32(Vec::new()), 12),
            (Field::Target, Buffer::I64(Vec::new()), 2),
            (Field::Action, Buffer::I32(Vec::new()), 2),
            (Field::ReturnToGo, Buffer::F32(Vec::new()), 1),
        ];
        let request = Request { rows: 3, windows: 2, steps: 2, fields };
        let mut loader = Loader::new(&reader, Sampler::new(&*reader, 4, 1), request);
        let mut batch = || {
            let batch = loader.next_batch().unwrap();
            (batch.crops, batch.fields)
        };
        batches.push((0..20).map(|_| batch()).collect());
    }
    assert!(batches.iter().all(|other| *other == batches[0]));
}

#[test]
fn crops_of_episodes_that_are_not_there_are_refused() {
    let data = plain();
    let crops = [Crop::new(10, 0)];
    let window = Window { source: &data, crops: &crops, offset: 0, length: 1 };
    let error = window.fill(Field::Imitate, FieldMut::Bool(&mut [false])).unwrap_err().to_string();
    assert!(error.contains("an episode below 10, got 10"), "{error}");
    // Far beyond the end everything is padding.
    let crops = [Crop::new(9, usize::MAX - 1)];
    let window = Window { source: &data, crops: &crops, offset: 5, length: 3 };
    let mut returns = [1.0; 3];
    window.fill(Field::ReturnToGo, FieldMut::F32(&mut returns)).unwrap();
    assert_eq!(returns, [0.0; 3]);
}

#[test]
fn a_file_that_changes_while_it_is_read_is_an_error_and_appending_is_not() {
    let folder = Folder::new("changes");
    let path = folder.join("a.elmur");
    dataset(5).save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let opened = ElmurFile::open(&path).unwrap();
    let mut writer = Writer::append_to(&path).unwrap();
    writer.push(&episodes(1)[0]).unwrap();
    writer.finish().unwrap();
    assert_eq!(opened.episode(4).unwrap(), episodes(5)[4]);
    // Replaced by renaming: the old file is read to the end.
    dataset(2).save(folder.join("b.elmur")).unwrap();
    fs::rename(folder.join("b.elmur"), &path).unwrap();
    assert_eq!(opened.episode(4).unwrap(), episodes(5)[4]);

    fs::write(&path, &bytes).unwrap();
    let opened = ElmurFile::open(&path).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes.len() as u64 - 100).unwrap();
    let error = opened.episode(0).unwrap_err().to_string();
    assert!(error.contains("a.elmur: changed while it was in use"), "{error}");

    fs::write(&path, &bytes).unwrap();
    let opened = ElmurFile::open(&path).unwrap();
    let mut other = bytes.clone();
    other[bytes.len() - 9] ^= 1;
    std::thread::sleep(std::time::Duration::from_millis(20));
    fs::write(&path, &other).unwrap();
    assert!(opened.episode(4).unwrap_err().to_string().contains("changed while it was in use"));
}

#[test]
fn an_npz_file_that_changes_while_it_is_read_is_an_error() {
    let folder = Folder::new("npz-changes");
    write_npz(folder.join("npz"), &plain()).unwrap();
    let opened = open_with(folder.join("npz"), None, &ON_DISK).unwrap();
    assert_eq!(opened.episode(1).unwrap(), plain().episode(1).to_episode());
    fs::copy(folder.join("npz/train_data_2.npz"), folder.join("npz/train_data_1.npz")).unwrap();
    let error = opened.episode(1).unwrap_err().to_string();
    assert!(error.contains("train_data_1.npz: changed while it was in use"), "{error}");
    fs::remove_file(folder.join("npz/train_data_3.npz")).unwrap();
    assert!(opened.episode(3).unwrap_err().to_string().contains("train_data_3.npz"));
}

fn npy(descr: &str, shape: &str, data: &[u8]) -> Vec<u8> {
    let header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    bytes
}

/// A deflated archive of `obs` and sound other arrays of two steps.
fn archive(path: &Path, obs: &[u8]) {
    let mut bytes = Vec::new();
    let mut zip = rawzip::ZipArchiveWriter::new(&mut bytes);
    let two = npy("<i4", "(2,)", &[0; 8]);
    for (name, member) in [("obs.npy", obs), ("action.npy", &two), ("reward.npy", &two)] {
        let file = zip.new_file(name).compression_method(rawzip::CompressionMethod::DEFLATE);
        let (mut entry, config) = file.start().unwrap();
        let mut writer =
            config.wrap(flate2::write::DeflateEncoder::new(&mut entry, flate2::Compression::best()));
        writer.write_all(member).unwrap();
        let (encoder, descriptor) = writer.finish().unwrap();
        encoder.finish().unwrap();
        entry.finish(descriptor).unwrap();
    }
    zip.finish().unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn archives_that_inflate_beyond_the_limit_are_refused() {
    let folder = Folder::new("bombs");
    let path = folder.join("train_data_0.npz");
    let limits = |inflated| Limits { memory: 1 << 20, inflated };
    let open = |inflated| open_with(&path, None, &limits(inflated)).map(drop).map_err(|e| e.to_string());
    archive(&path, &npy("|u1", "(2, 3, 100, 100)", &[7; 60_000]));
    assert!(fs::metadata(&path).unwrap().len() < 1000);
    open(70_000).unwrap();
    let problem = open(50_000).unwrap_err();
    assert!(
        problem.contains("too large for one file (at most 50000); save one episode per file"),
        "{problem}"
    );
    // Flags become integers of four bytes: it is their memory that counts.
    archive(&path, &npy("|b1", "(2, 30000)", &[1; 60_000]));
    assert!(open(100_000).unwrap_err().contains("too large"));
    open(300_000).unwrap();
    // Bytes that the spaces have as floats count four times too.
    archive(&path, &npy("|u1", "(2, 30000)", &[1; 60_000]));
    let floats = Spaces { observation: Space::unbounded([30_000]), action: Space::Discrete { n: 1 } };
    assert!(open_with(&path, Some(&floats), &limits(100_000)).unwrap_err().to_string().contains("too large"));
    open_with(&path, Some(&floats), &limits(300_000)).unwrap();
}

#[test]
fn integers_below_zero_are_refused_with_what_a_user_can_do() {
    let folder = Folder::new("negative");
    let path = folder.join("a.npz");
    let numbers: Vec<u8> = [3i32, -1].iter().flat_map(|x| x.to_le_bytes()).collect();
    archive(&path, &npy("<i4", "(2,)", &numbers));
    let problem = open(&path, None).unwrap_err().to_string();
    assert!(problem.contains("`obs` holds -1") && problem.contains("obs.astype('float32')"), "{problem}");
    let boxed = Spaces { observation: Space::unbounded([1]), action: Space::Discrete { n: 1 } };
    assert_eq!(
        open(&path, Some(&boxed)).unwrap().episode(0).unwrap().observations,
        [Column::F32(vec![3.0, -1.0])]
    );
}

#[test]
fn files_that_numpy_wrote_are_read() {
    let files = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/files");
    let choices = open(files.join("choices"), None).unwrap();
    assert_eq!((choices.episodes(), choices.steps(0), choices.steps(1), choices.steps(2)), (3, 7, 12, 1));
    let Column::I32(seen) = &choices.episode(1).unwrap().observations[0] else { panic!("integers") };
    assert_eq!((seen.iter().sum::<i32>(), &seen[..2]), (35, &[2, 0][..]));
    assert!((choices.episode(2).unwrap().rewards[0] - 1.741_649_5).abs() < 1e-6);
    assert!(matches!(choices.spaces().action, Space::Discrete { .. }));
    // One file alone, and pictures with channels last.
    let one = open(files.join("choices/train_data_1.npz"), None).unwrap();
    assert_eq!(one.episode(0).unwrap(), choices.episode(1).unwrap());
    let pictures = open(files.join("pictures"), None).unwrap();
    assert_eq!(pictures.spaces().observation, Space::between(0.0, 1.0, [6, 16, 16]));
    let Column::U8(pixels) = &pictures.episode(0).unwrap().observations[0] else { panic!("bytes") };
    assert_eq!(pixels.iter().map(|x| u64::from(*x)).sum::<u64>(), 192_427);
}

#[test]
fn an_interrupted_writer_is_continued_where_it_was() {
    let folder = Folder::new("resume");
    let (path, aside) = (folder.join("a.elmur"), folder.join("a.elmur.tmp"));
    let resume = || Writer::resume(&path, &spaces(), metadata()).unwrap();
    let mut writer = resume();
    assert_eq!(writer.episodes(), 0);
    episodes(3).iter().for_each(|episode| writer.push(episode).unwrap());
    drop(writer);
    // Killed within the third record.
    let whole = fs::read(&aside).unwrap();
    fs::write(&aside, &whole[..whole.len() - 5]).unwrap();
    let mut writer = resume();
    assert_eq!(writer.episodes(), 2);
    episodes(5)[2..].iter().for_each(|episode| writer.push(episode).unwrap());
    writer.finish().unwrap();
    dataset(5).save(folder.join("b.elmur")).unwrap();
    assert_eq!(fs::read(&path).unwrap(), fs::read(folder.join("b.elmur")).unwrap());
    assert!(!aside.exists());
    // Not over a file that is there, unless told.
    assert!(Writer::resume(&path, &spaces(), metadata()).unwrap_err().to_string().contains("--force"));
    let mut writer = Writer::resume_replacing(&path, &spaces(), metadata()).unwrap();
    writer.push(&episodes(1)[0]).unwrap();
    drop(writer);
    let mut writer = Writer::resume_replacing(&path, &spaces(), metadata()).unwrap();
    assert_eq!(writer.episodes(), 1);
    writer.push(&episodes(2)[1]).unwrap();
    writer.finish().unwrap();
    assert_eq!(open(&path, None).unwrap().episodes(), 2);
    // Damage and no work at all: from the start.
    fs::remove_file(&path).unwrap();
    for (leftover, text) in [(&whole[..40], "cut"), (b"ELM", "cut early"), (b"", "empty")] {
        fs::write(&aside, leftover).unwrap();
        let mut writer = resume();
        assert_eq!(writer.episodes(), 0, "{text}");
        writer.push(&episodes(1)[0]).unwrap();
        writer.discard();
    }
}

#[test]
fn a_damaged_collection_keeps_its_episodes_before_the_damage() {
    let folder = Folder::new("damaged-aside");
    let (path, aside) = (folder.join("a.elmur"), folder.join("a.elmur.tmp"));
    let mut writer = Writer::resume(&path, &spaces(), metadata()).unwrap();
    let mut ends = vec![0];
    for episode in episodes(4) {
        writer.push(&episode).unwrap();
        ends.push(fs::metadata(&aside).unwrap().len() as usize);
    }
    drop(writer);
    let whole = fs::read(&aside).unwrap();
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    // The last record, one in the middle, and what a power cut leaves behind: zeros.
    let zeros = [&whole[..], &[0; 4096]].concat();
    for (bytes, kept) in [(flipped(ends[4] - 30), 3), (flipped(ends[1] + 40), 1), (zeros, 4)] {
        fs::write(&aside, bytes).unwrap();
        let mut writer = Writer::resume(&path, &spaces(), metadata()).unwrap();
        assert_eq!(writer.episodes(), kept);
        let damage = writer.damage().unwrap().to_string();
        assert!(damage.contains(&format!("episode {kept} at byte {}", ends[kept])), "{damage}");
        episodes(5)[kept..].iter().for_each(|episode| writer.push(episode).unwrap());
        drop(writer);
        let writer = Writer::resume(&path, &spaces(), metadata()).unwrap();
        assert!(writer.episodes() == 5 && writer.damage().is_none());
    }
    // A header that cannot be read is an error, unless the file may be replaced.
    for bytes in [flipped(9), flipped(40)] {
        fs::write(&aside, &bytes).unwrap();
        let problem = Writer::resume(&path, &spaces(), metadata()).unwrap_err().to_string();
        assert!(problem.contains("a.elmur.tmp"), "{problem}");
        assert!(Writer::create(&path, &spaces(), metadata()).is_err());
        assert_eq!(fs::read(&aside).unwrap(), bytes);
    }
    assert_eq!(Writer::resume_replacing(&path, &spaces(), metadata()).unwrap().episodes(), 0);
}

#[test]
fn a_folder_of_npz_appears_when_it_is_whole_and_a_retry_starts_over() {
    let folder = Folder::new("npz-aside");
    let (out, aside) = (folder.join("npz"), folder.join("npz.tmp"));
    let data = plain();
    let mut writer = NpzWriter::create(&out, data.spaces()).unwrap();
    (0..7).for_each(|i| writer.push(data.episode(i)).unwrap());
    drop(writer);
    assert!(!out.exists() && aside.join("train_data_6.npz").exists());
    write_npz(&out, &data).unwrap();
    assert!(!aside.exists());
    assert_eq!(open(&out, None).unwrap().fingerprint(), data.fingerprint());
    let refused = NpzWriter::create(&out, data.spaces()).unwrap_err().to_string();
    assert!(refused.contains("holds .npz files already"), "{refused}");
    // A folder of something else is left alone, an empty one is used.
    fs::create_dir(&aside).unwrap();
    fs::write(aside.join("notes.txt"), "mine").unwrap();
    fs::create_dir(folder.join("empty")).unwrap();
    write_npz(folder.join("empty"), &data).unwrap();
    fs::remove_dir_all(&out).unwrap();
    assert!(write_npz(&out, &data).unwrap_err().to_string().contains("not only episodes"));
    assert!(!aside.join(".lock").exists(), "nothing is added to it");
    assert!(aside.join("notes.txt").exists());
    // What cannot be written leaves nothing.
    assert!(write_npz(folder.join("mixed"), &dataset(2)).is_err());
    assert!(!folder.join("mixed.tmp").exists() && !folder.join("mixed").exists());
    assert!(NpzWriter::create(folder.join("none"), data.spaces()).unwrap().finish().is_err());
}

#[test]
fn an_interrupted_folder_of_npz_is_continued() {
    let folder = Folder::new("npz-resume");
    let (out, aside) = (folder.join("npz"), folder.join("npz.tmp"));
    let data = plain();
    let notes = |seed: &str| BTreeMap::from([("seed".to_owned(), seed.to_owned())]);
    let resume = |seed: &str| NpzWriter::resume(&out, data.spaces(), &notes(seed));
    let mut writer = resume("1").unwrap();
    (0..5).for_each(|i| writer.push(data.episode(i)).unwrap());
    drop(writer);
    // Killed while the sixth was written; others' episodes are not lost unasked.
    fs::write(aside.join(".part"), b"half of an ep").unwrap();
    let refused = resume("2").unwrap_err().to_string();
    assert!(refused.contains("interrupted collection with other settings"), "{refused}");
    let mut writer = resume("1").unwrap();
    assert_eq!(writer.episodes(), 5);
    writer.truncate(3).unwrap();
    assert_eq!((writer.episodes(), aside.join("train_data_3.npz").exists()), (3, false));
    (3..data.episodes().len()).for_each(|i| writer.push(data.episode(i)).unwrap());
    writer.finish().unwrap();
    assert_eq!(open(&out, None).unwrap().fingerprint(), data.fingerprint());
    assert!(!aside.exists() && fs::read_dir(&out).unwrap().count() == data.episodes().len());
    // A folder that is there is replaced only when asked, and then other episodes aside are dropped.
    assert!(resume("1").unwrap_err().to_string().contains("already"));
    let replacing = |seed: &str| NpzWriter::resume_replacing(&out, data.spaces(), &notes(seed)).unwrap();
    replacing("3").push(data.episode(2)).unwrap();
    assert_eq!(replacing("3").episodes(), 1);
    assert_eq!(replacing("4").episodes(), 0);
    // Who begins anew drops no episodes that could be continued, unless told.
    let mut writer = replacing("4");
    (0..5).for_each(|i| writer.push(data.episode(i)).unwrap());
    drop(writer);
    fs::remove_dir_all(&out).unwrap();
    let refused = NpzWriter::create(&out, data.spaces()).unwrap_err().to_string();
    assert!(refused.contains("npz.tmp") && refused.contains("--force"), "{refused}");
    assert!(aside.join("train_data_4.npz").exists());
    // What lies behind a gap is written again.
    fs::remove_file(aside.join("train_data_2.npz")).unwrap();
    assert_eq!(resume("4").unwrap().episodes(), 2);
    assert!(!aside.join("train_data_3.npz").exists() && !aside.join("train_data_4.npz").exists());
    drop(NpzWriter::replace(&out, data.spaces()).unwrap());
    // What a writer without notes left is not taken for one's own.
    let mut plain = NpzWriter::create(&out, data.spaces()).unwrap();
    plain.push(data.episode(0)).unwrap();
    drop(plain);
    assert!(resume("4").is_err());
    assert_eq!(NpzWriter::create(&out, data.spaces()).unwrap().episodes(), 0);
}

#[test]
fn converting_keeps_everything_that_both_formats_hold() {
    let folder = Folder::new("convert");
    let data = plain();
    write_npz(folder.join("npz"), &data).unwrap();
    let npz = open_with(folder.join("npz"), None, &ON_DISK).unwrap();
    save(&*npz, folder.join("a.elmur")).unwrap();
    let native = open(folder.join("a.elmur"), None).unwrap();
    assert_eq!(native.fingerprint(), data.fingerprint());
    assert!(save(&*npz, folder.join("a.elmur")).unwrap_err().to_string().contains("exists already"));
}

#[test]
fn a_replaced_folder_of_npz_stays_until_the_new_one_is_whole() {
    let folder = Folder::new("npz-replace");
    let (out, aside, old) = (folder.join("npz"), folder.join("npz.tmp"), folder.join("npz.tmp.old"));
    let data = plain();
    write_npz(&out, &data).unwrap();
    let before = open(&out, None).unwrap();
    let unchanged = || assert_eq!(open(&out, None).unwrap().fingerprint(), before.fingerprint());
    // Interrupted, discarded, and without an episode.
    let mut writer = NpzWriter::replace(&out, data.spaces()).unwrap();
    writer.push(data.episode(3)).unwrap();
    drop(writer);
    unchanged();
    NpzWriter::replace(&out, data.spaces()).unwrap().discard();
    assert!(NpzWriter::replace(&out, data.spaces()).unwrap().finish().is_err());
    unchanged();
    // Killed between the renames: the next writer puts the old folder back.
    fs::rename(&out, &old).unwrap();
    assert!(NpzWriter::create(&out, data.spaces()).unwrap_err().to_string().contains("already"));
    unchanged();
    let mut writer = NpzWriter::replace(&out, data.spaces()).unwrap();
    writer.push(data.episode(3)).unwrap();
    writer.finish().unwrap();
    assert_eq!(open(&out, None).unwrap().episodes(), 1);
    assert_eq!(fs::read_dir(&out).unwrap().count(), 1);
    assert!(!aside.exists() && !old.exists());
    // Never over other files.
    fs::write(out.join("notes.txt"), "mine").unwrap();
    assert!(NpzWriter::replace(&out, data.spaces()).unwrap_err().to_string().contains("notes.txt"));
    fs::write(folder.join("file"), "mine").unwrap();
    assert!(NpzWriter::replace(folder.join("file"), data.spaces()).is_err());
}

#[test]
fn two_writers_of_a_folder_of_npz_do_not_mix_their_episodes() {
    let folder = Folder::new("npz-two");
    let (out, data) = (folder.join("npz"), plain());
    let mut writer = NpzWriter::create(&out, data.spaces()).unwrap();
    (0..3).for_each(|i| writer.push(data.episode(i)).unwrap());
    let busy = NpzWriter::create(&out, data.spaces()).unwrap_err().to_string();
    assert!(busy.contains("another process writes"), "{busy}");
    // Where locks do not work: lost episodes are found.
    fs::remove_file(folder.join("npz.tmp/train_data_1.npz")).unwrap();
    let lost = writer.finish().unwrap_err().to_string();
    assert!(lost.contains("expected the 3 episodes") && lost.contains("found 2"), "{lost}");
    assert!(!out.exists());
}

#[test]
fn npz_files_tell_episodes_that_were_cut_off_from_those_that_ended() {
    let folder = Folder::new("npz-ends");
    let plain = plain();
    let cut = |i: usize, episode: Episode| Episode {
        terminated: i.is_multiple_of(2),
        truncated: i % 2 == 1,
        ..episode
    };
    let episodes = plain.episodes().enumerate().map(|(i, episode)| cut(i, episode.to_episode())).collect();
    let data = Dataset::from_episodes(plain.spaces().clone(), metadata(), episodes).unwrap();
    write_npz(folder.join("npz"), &data).unwrap();
    let npz = open(folder.join("npz"), None).unwrap();
    assert_eq!(npz.summary().unwrap().truncated, data.summary().unwrap().truncated);
    assert_eq!(npz.fingerprint(), data.fingerprint());
}

#[test]
fn what_lies_beside_a_new_file_is_not_lost_unasked() {
    let folder = Folder::new("beside");
    let (path, aside) = (folder.join("a.elmur"), folder.join("a.elmur.tmp"));
    // A file of another kind, whatever is asked.
    fs::write(&aside, "my notes").unwrap();
    for writer in [Writer::create, Writer::replace, Writer::resume, Writer::resume_replacing] {
        let problem = writer(path.clone(), &spaces(), metadata()).unwrap_err().to_string();
        assert!(problem.contains("a.elmur.tmp") && problem.contains("another file"), "{problem}");
        assert_eq!(fs::read(&aside).unwrap(), b"my notes");
    }
    fs::remove_file(&aside).unwrap();
    // An interrupted collection with other settings, unless it may be replaced.
    let mut writer = Writer::create(&path, &spaces(), metadata()).unwrap();
    writer.push(&episodes(1)[0]).unwrap();
    drop(writer);
    let whole = fs::read(&aside).unwrap();
    let other = || BTreeMap::from([("seed".to_owned(), "8".to_owned())]);
    let problem = Writer::resume(&path, &spaces(), other()).unwrap_err().to_string();
    assert!(problem.contains("other settings") && problem.contains("--force"), "{problem}");
    // Who begins anew drops no episodes unasked either, whatever they are of.
    for notes in [metadata(), other()] {
        let problem = Writer::create(&path, &spaces(), notes).unwrap_err().to_string();
        assert!(problem.contains("a.elmur.tmp") && problem.contains("--force"), "{problem}");
    }
    assert_eq!(fs::read(&aside).unwrap(), whole);
    assert_eq!(Writer::resume_replacing(&path, &spaces(), other()).unwrap().episodes(), 0);
}

#[test]
fn a_file_cut_to_fewer_episodes_is_the_file_of_these() {
    let folder = Folder::new("truncate");
    let (path, other) = (folder.join("a.elmur"), folder.join("b.elmur"));
    for keep in [0, 1, 3, 5, 9] {
        let mut writer = Writer::replace(&path, &spaces(), metadata()).unwrap();
        episodes(5).iter().for_each(|episode| writer.push(episode).unwrap());
        drop(writer);
        let mut writer = Writer::resume_replacing(&path, &spaces(), metadata()).unwrap();
        writer.truncate(keep).unwrap();
        assert_eq!(writer.episodes(), keep.min(5));
        episodes(6)[keep.min(5)..].iter().for_each(|episode| writer.push(episode).unwrap());
        writer.truncate(keep.max(1)).unwrap();
        writer.finish().unwrap();
        let _ = fs::remove_file(&other);
        dataset(keep.clamp(1, 6)).save(&other).unwrap();
        assert_eq!(fs::read(&path).unwrap(), fs::read(&other).unwrap(), "{keep}");
    }
}

/// A source that tells no more than a program of its own has to.
#[derive(Debug)]
struct Own(Dataset);

impl Source for Own {
    fn spaces(&self) -> &Spaces {
        self.0.spaces()
    }
    fn metadata(&self) -> &BTreeMap<String, String> {
        self.0.metadata()
    }
    fn episodes(&self) -> usize {
        self.0.len()
    }
    fn outline(&self, episode: usize) -> elmur_data::Outline {
        self.0.outline(episode)
    }
    fn layout(&self) -> &elmur_data::Layout {
        self.0.layout()
    }
    fn read(
        &self,
        part: Part,
        episode: usize,
        rows: std::ops::Range<usize>,
        out: FieldMut<'_>,
    ) -> elmur_data::Result<()> {
        self.0.read(part, episode, rows, out)
    }
}

#[test]
fn a_source_of_ones_own_has_the_fingerprint_of_its_episodes() {
    assert_eq!(Own(dataset(5)).fingerprint(), dataset(5).fingerprint());
    let (data, episodes) = (dataset(5), episodes(5));
    assert_eq!(elmur_data::episode_checksum(&episodes[3], data.spaces()), data.checksum(3));
}
