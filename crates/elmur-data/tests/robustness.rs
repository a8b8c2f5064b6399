//! What files go through: copies, interrupted writers, bad disks, hostile senders. Nothing may crash, nothing
//! wrong may pass.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;

use elmur_base::{Space, Spaces};
use elmur_data::{
    Column, Dataset, ElmurFile, Episode, Error, Limits, Reader, Source, Writer, open_with, write_npz,
};
use elmur_rng::Rng;

mod common;
use common::{Folder, dataset, episodes, metadata, spaces};

fn owned(dataset: &Dataset) -> Vec<Episode> {
    dataset.episodes().map(|episode| episode.to_episode()).collect()
}

/// The bytes of a file of `n` episodes, and where its records begin and the last one ends.
fn native(n: usize) -> (Vec<u8>, Vec<usize>) {
    let folder = Folder::new(&format!("native-{n}-{:?}", std::thread::current().id()));
    let path = folder.join("a.elmur");
    let mut ends = Vec::new();
    let mut writer = Writer::create(&path, &spaces(), metadata()).unwrap();
    for episode in &episodes(n) {
        writer.push(episode).unwrap();
        ends.push(fs::metadata(folder.join("a.elmur.tmp")).unwrap().len() as usize);
    }
    writer.finish().unwrap();
    let bytes = fs::read(&path).unwrap();
    let json = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) as usize;
    ends.insert(0, 24 + json);
    (bytes, ends)
}

/// Reads `.npz` files as given or inferred spaces.
fn read_npz(path: impl AsRef<Path>, spaces: Option<Spaces>) -> elmur_data::Result<Dataset> {
    Dataset::load(&*elmur_data::open(path, spaces.as_ref())?)
}

/// Episodes of a file that is read by ranges, and its torn bytes.
fn ranged(bytes: &[u8], path: &Path) -> elmur_data::Result<(Vec<Episode>, u64)> {
    // A new file each time: some systems flush files that are overwritten.
    let _ = fs::remove_file(path);
    fs::write(path, bytes).unwrap();
    let file = ElmurFile::open(path)?;
    let episodes = (0..file.episodes()).map(|i| file.episode(i)).collect::<elmur_data::Result<_>>()?;
    Ok((episodes, file.torn_bytes()))
}

/// Whole file, stream, ranges: what each makes of the bytes. They must agree.
fn open(bytes: &[u8]) -> Result<(Vec<Episode>, u64), String> {
    let whole = Dataset::from_bytes(bytes).map(|d| (owned(&d), d.torn_bytes()));
    let stream = || -> elmur_data::Result<(Vec<Episode>, u64)> {
        let mut reader = Reader::new(bytes)?;
        let episodes = reader.by_ref().collect::<elmur_data::Result<Vec<_>>>();
        assert!(reader.next().is_none(), "nothing follows an error or the end");
        Ok((episodes?, reader.torn_bytes()))
    };
    thread_local!(static PLACE: Folder = Folder::new(&format!("ranged-{:?}", std::thread::current().id())));
    let (ranged, path) = PLACE.with(|folder| {
        let path = folder.join("a.elmur");
        (ranged(bytes, &path).map_err(|e| e.to_string()), path.display().to_string())
    });
    let named = |error: &Error| error.to_string().replacen("bytes", &path, 1);
    match (&whole, &ranged) {
        (Ok(whole), Ok(ranged)) => assert_eq!(whole, ranged),
        (Err(whole), Err(ranged)) => assert_eq!(&named(whole), ranged),
        _ => panic!("{whole:?} but {ranged:?}"),
    }
    match (whole, stream()) {
        (Ok(whole), Ok(stream)) => {
            assert_eq!(whole, stream);
            Ok(whole)
        }
        (Err(Error::Empty { path }), Ok((episodes, _))) => {
            assert!(episodes.is_empty());
            Err(Error::Empty { path }.to_string())
        }
        (Err(whole), Err(stream)) => {
            let (whole, stream) = (whole.to_string(), stream.to_string());
            assert_eq!(whole.replacen("bytes", "stream", 1), stream);
            Err(whole)
        }
        (whole, stream) => panic!("{whole:?} but {stream:?}"),
    }
}

#[test]
fn files_return_what_was_written() {
    let folder = Folder::new("round-trip");
    let (a, b) = (folder.join("a.elmur"), folder.join("b.elmur"));
    dataset(7).save(&a).unwrap();
    let opened = Dataset::open(&a).unwrap();
    assert_eq!((opened.spaces(), opened.metadata(), opened.torn_bytes()), (&spaces(), &metadata(), 0));
    assert_eq!(owned(&opened), episodes(7));
    opened.save(&b).unwrap();
    assert_eq!(fs::read(&a).unwrap(), fs::read(&b).unwrap());
    let ranged = ElmurFile::open(&b).unwrap();
    assert_eq!((0..7).map(|i| ranged.episode(i).unwrap()).collect::<Vec<_>>(), episodes(7));
    assert_eq!(ranged.fingerprint(), opened.fingerprint());
    assert_eq!(open(&fs::read(&a).unwrap()).unwrap(), (episodes(7), 0));
    assert!(!folder.join("a.elmur.tmp").exists());
}

#[test]
fn fingerprints_tell_datasets_apart_but_not_their_files() {
    let print = |episodes: Vec<Episode>| {
        Dataset::from_episodes(spaces(), metadata(), episodes).unwrap().fingerprint()
    };
    let whole = print(episodes(5));
    assert_eq!(Dataset::from_bytes(&native(5).0).unwrap().fingerprint(), whole);
    let mut others = vec![episodes(4), episodes(5), episodes(5), episodes(5)];
    others[1].swap(0, 1);
    others[2][3].rewards[1] += 0.5;
    others[3][0].imitate = None;
    for other in others {
        assert_ne!(print(other), whole);
    }
}

#[test]
fn a_file_cut_anywhere_keeps_exactly_its_whole_episodes() {
    let (bytes, ends) = native(4);
    for len in 0..bytes.len() {
        let whole = ends.iter().skip(1).filter(|end| **end <= len).count();
        match open(&bytes[..len]) {
            Ok((kept, torn)) => {
                assert_eq!(kept, episodes(4)[..whole], "{len}");
                assert_eq!(torn as usize, len - ends[whole], "{len}");
            }
            Err(problem) => {
                assert_eq!(whole, 0, "{len}: {problem}");
                let expected = if len < ends[0] { "ends within the header" } else { "no whole episode" };
                assert!(problem.contains(expected), "{len}: {problem}");
            }
        }
    }
}

#[test]
fn a_flip_of_any_bit_is_found_and_located() {
    let (bytes, ends) = native(3);
    for bit in 0..8 * bytes.len() {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let problem = open(&damaged).expect_err(&format!("bit {bit} of {} went unnoticed", 8 * bytes.len()));
        if let Some(episode) = (0..3).rev().find(|i| ends[*i] <= bit / 8) {
            let place = format!("episode {episode} at byte {}", ends[episode]);
            assert!(problem.contains(&place), "bit {bit}: {problem}");
        }
    }
}

#[test]
fn random_edits_give_an_error_or_the_episodes_before_a_torn_tail() {
    let (bytes, _) = native(4);
    let mut rng = Rng::new(11, 0);
    for _ in 0..20_000 {
        let mut damaged = bytes.clone();
        for _ in 0..1 + rng.below(4) {
            let at = rng.below(damaged.len() as u32) as usize;
            match rng.below(4) {
                _ if damaged.len() < 2 => {}
                0 => damaged[at] = rng.bits() as u8,
                1 => drop(damaged.remove(at)),
                2 => damaged.insert(at, rng.bits() as u8),
                _ => damaged.truncate(at.max(1)),
            }
        }
        if let Ok((kept, torn)) = open(&damaged) {
            assert_eq!(kept, episodes(4)[..kept.len()]);
            // Cut right between two records, a file is a shorter file.
            assert!(torn > 0 || bytes.starts_with(&damaged), "{} episodes passed as a file", kept.len());
        }
    }
}

#[test]
fn records_that_moved_are_found() {
    let (bytes, ends) = native(3);
    let record = |i: usize| &bytes[ends[i]..ends[i + 1]];
    let lost = [&bytes[..ends[0]], record(0), record(2)].concat();
    assert!(open(&lost).unwrap_err().contains("episode 1 at byte"), "a lost record");
    let twice = [&bytes[..], record(2)].concat();
    assert!(open(&twice).unwrap_err().contains("this is the record of episode 2"), "a repeated record");
    let joined = [&bytes[..], &bytes[..]].concat();
    assert!(open(&joined).unwrap_err().contains("no record begins here"), "two files in one");
}

/// Headers are JSON under a checksum, so that only someone who computes it can send another.
#[test]
fn headers_with_random_edits_and_valid_checksums_never_crash() {
    let (bytes, ends) = native(2);
    let json = &bytes[24..ends[0]];
    let words = [
        "\"",
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "0",
        "-1",
        "1e39",
        "99999999999999999999",
        "null",
        "tuple",
        "u8",
    ];
    let mut rng = Rng::new(17, 0);
    let (mut read, mut refused) = (0, 0);
    for _ in 0..20_000 {
        let mut edited = json.to_vec();
        for _ in 0..1 + rng.below(3) {
            let at = rng.below(edited.len() as u32) as usize;
            match rng.below(4) {
                0 => edited[at] = b' ' + rng.below(95) as u8,
                1 => drop(edited.remove(at)),
                2 => {
                    let word = words[rng.below(words.len() as u32) as usize];
                    edited.splice(at..at, word.bytes());
                }
                _ => {
                    // A piece of it once more.
                    let end = (at + 1 + rng.below(40) as usize).min(edited.len());
                    let piece = edited[at..end].to_vec();
                    edited.splice(at..at, piece);
                }
            }
        }
        edited.resize(edited.len().next_multiple_of(8), b' ');
        let mut body = (edited.len() as u64).to_le_bytes().to_vec();
        body.extend(&edited);
        let crc = crc32fast::hash(&body).to_le_bytes();
        let file = [b"ELMURDAT\x01\0\0\0", &crc[..], &body, &bytes[ends[0]..]].concat();
        match open(&file) {
            Ok(_) => read += 1,
            Err(_) => refused += 1,
        }
    }
    assert!(read > 100 && refused > 1000, "{read} read, {refused} refused");
}

/// Checksums protect against accidents, not against senders: numbers are believed no further than the file's
/// end.
#[test]
fn giant_claims_with_valid_checksums_allocate_nothing() {
    let (bytes, ends) = native(2);
    let with_head = |len: u64, payload: &[u8]| {
        let mut head = b"EPIS\0\0\0\0".to_vec();
        head.extend(2u32.to_le_bytes());
        head.extend(crc32fast::hash(payload).to_le_bytes());
        head.extend(len.to_le_bytes());
        let crc = crc32fast::hash(&head[8..]);
        head[4..8].copy_from_slice(&crc.to_le_bytes());
        [&bytes, &head[..], payload].concat()
    };
    for len in [1 << 60, u64::MAX, 1 << 40] {
        // A record that is longer than the file is torn, never more data.
        let (kept, torn) = open(&with_head(len, &[0; 64])).unwrap();
        assert_eq!((kept, torn), (episodes(2), 24 + 64));
    }
    for steps in [1 << 60, u64::MAX, 1 << 61, 0, 100] {
        let payload = [&steps.to_le_bytes()[..], &[0; 56]].concat();
        let problem = open(&with_head(64, &payload)).unwrap_err();
        assert!(problem.contains("episode 2"), "{problem}");
    }
    assert!(open(&with_head(8, &[0; 8])).unwrap_err().contains("too short"));
    let mut header = bytes[..ends[0]].to_vec();
    for len in [1u64 << 60, u64::MAX, 1 << 25] {
        header[16..24].copy_from_slice(&len.to_le_bytes());
        assert!(open(&header).unwrap_err().contains("header"));
    }
    let deep = format!("{}{}", "[".repeat(200_000), " ".repeat(8));
    let mut body = (deep.len() as u64).to_le_bytes().to_vec();
    body.extend(deep.as_bytes());
    let crc = crc32fast::hash(&body);
    let file = [b"ELMURDAT\x01\0\0\0", &crc.to_le_bytes()[..], &body].concat();
    assert!(open(&file).unwrap_err().contains("header"));
}

#[test]
fn appending_goes_on_after_a_torn_tail() {
    let (bytes, ends) = native(4);
    let folder = Folder::new("append");
    let path = folder.join("a.elmur");
    // Cut in the head and in the payload of the last record, right after it, and right after the header.
    for (len, kept) in [(ends[3] + 5, 3), (ends[4] - 1, 3), (ends[4], 4), (ends[0] + 30, 0)] {
        fs::write(&path, &bytes[..len]).unwrap();
        let mut writer = Writer::append_to(&path).unwrap();
        assert_eq!(writer.episodes(), kept);
        episodes(6)[kept..].iter().for_each(|episode| writer.push(episode).unwrap());
        writer.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), native(6).0, "cut at {len}");
    }
    // Killed again after a record that is shorter than the torn tail was.
    fs::write(&path, &bytes[..ends[4] - 1]).unwrap();
    let mut writer = Writer::append_to(&path).unwrap();
    writer.push(&episodes(1)[0]).unwrap();
    drop(writer);
    assert_eq!(owned(&Dataset::open(&path).unwrap()), [&episodes(3)[..], &episodes(1)].concat());
    fs::write(&path, &bytes[..ends[0] - 1]).unwrap();
    assert!(Writer::append_to(&path).is_err());
    assert!(Writer::append_to(folder.join("none.elmur")).is_err());
    let mut damaged = bytes.clone();
    damaged[ends[1] + 30] ^= 1;
    fs::write(&path, &damaged).unwrap();
    assert!(Writer::append_to(&path).unwrap_err().to_string().contains("episode 1"));
    assert_eq!(fs::read(&path).unwrap(), damaged, "a damaged file is left alone");
}

#[test]
fn an_unfinished_writer_leaves_the_old_file_and_its_own_work() {
    let folder = Folder::new("unfinished");
    let path = folder.join("a.elmur");
    dataset(2).save(&path).unwrap();
    let refused = Writer::create(&path, &spaces(), metadata()).unwrap_err().to_string();
    assert!(refused.contains("exists already") && refused.contains("--force"), "{refused}");
    let mut writer = Writer::replace(&path, &spaces(), metadata()).unwrap();
    writer.push(&episodes(1)[0]).unwrap();
    let busy = Writer::replace(&path, &spaces(), metadata()).unwrap_err();
    assert!(busy.to_string().contains("another process writes this file"), "{busy}");
    drop(writer);
    assert_eq!(Dataset::open(&path).unwrap().len(), 2);
    assert_eq!(owned(&Dataset::open(folder.join("a.elmur.tmp")).unwrap()), episodes(1));
    let empty = Writer::replace(&path, &spaces(), metadata()).unwrap().finish().unwrap_err();
    assert!(matches!(empty, Error::Empty { .. }));
    assert_eq!(Dataset::open(&path).unwrap().len(), 2);
    assert!(!folder.join("a.elmur.tmp").exists());
}

#[test]
fn a_discarded_writer_leaves_nothing_of_its_own() {
    let folder = Folder::new("discard");
    let path = folder.join("data.elmur");
    dataset(2).save(&path).unwrap();
    let before = fs::read(&path).unwrap();
    let mut writer = Writer::replace(&path, &spaces(), metadata()).unwrap();
    writer.push(&episodes(1)[0]).unwrap();
    writer.discard();
    assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    assert_eq!(fs::read(&path).unwrap(), before);
    // In place: the episodes so far stay.
    let mut writer = Writer::append_to(&path).unwrap();
    writer.push(&episodes(1)[0]).unwrap();
    writer.discard();
    assert_eq!(Dataset::open(&path).unwrap().len(), 3);
}

#[test]
fn episodes_that_do_not_fit_are_refused_and_named() {
    let folder = Folder::new("misfits");
    let path = folder.join("a.elmur");
    let mut writer = Writer::create(&path, &spaces(), metadata()).unwrap();
    writer.push(&episodes(1)[0]).unwrap();
    let refused = |writer: &mut Writer, change: &dyn Fn(&mut Episode)| {
        let mut episode = episodes(5).remove(4);
        change(&mut episode);
        let mut both = episodes(1);
        both.push(episode.clone());
        let problem = writer.push(&episode).unwrap_err().to_string();
        let memory = Dataset::from_episodes(spaces(), metadata(), both).unwrap_err().to_string();
        assert_eq!(problem.replace(&path.display().to_string(), "memory"), memory);
        problem
    };
    let problem = refused(&mut writer, &|e| {
        let Column::F32(x) = &mut e.observations[2] else { unreachable!() };
        x[7] = f32::NAN;
    });
    assert!(problem.contains("a.elmur: episode 1: observation leaf 2, step 3, entry 1"), "{problem}");
    assert!(problem.contains("got NaN"), "{problem}");
    let problem = refused(&mut writer, &|e| e.observations[1] = Column::F32(vec![0.5; 15]));
    assert!(problem.contains("expected u8 as in the first episode, got f32"), "{problem}");
    refused(&mut writer, &|e| e.actions[0] = Column::I32(vec![0, 1, 2, 3, 4]));
    writer.push(&episodes(2)[1]).unwrap();
    writer.finish().unwrap();
    assert_eq!(owned(&Dataset::open(&path).unwrap()), episodes(2), "refused episodes leave no trace");

    let infinite = Spaces { observation: Space::between(0.0, f32::INFINITY, [1]), ..spaces() };
    let mut writer = Writer::replace(&path, &infinite, metadata()).unwrap();
    let one = Episode { observations: vec![Column::F32(vec![0.5])], ..episodes(1).remove(0) };
    assert!(writer.push(&one).unwrap_err().to_string().contains("use f32::MIN and f32::MAX for no bound"));
    let impossible = Spaces { observation: Space::Discrete { n: 0 }, ..spaces() };
    assert!(Writer::create(&path, &impossible, metadata()).is_err());
    assert!(Writer::create(&folder.0, &spaces(), metadata()).is_err());
}

#[test]
fn what_is_no_dataset_says_so() {
    let folder = Folder::new("none");
    let path = folder.join("empty.elmur");
    fs::write(&path, b"").unwrap();
    let problem = |path: &Path| Dataset::open(path).unwrap_err().to_string();
    assert!(problem(&path).contains("an empty file"));
    assert!(ElmurFile::open(&path).is_err());
    // A folder of native files is as good as the files in it.
    assert!(problem(&folder.0).contains("empty.elmur"));
    fs::create_dir(folder.join("folder")).unwrap();
    let other = problem(&folder.join("folder"));
    assert!(other.contains("a folder without .elmur or .npz files; expected train_data_0.npz"), "{other}");
    for (bytes, look) in [
        (&b"PK\x03\x04 an archive"[..], "not a whole .npz file"),
        (b"\x89HDF\r\n\x1a\n", "not a whole HDF5 file"),
        (b"\x93NUMPY\x01\x00", "np.savez"),
        (b"\x80\x04\x95", "pickle"),
        (b"step,reward\n", "looks like text, beginning with \"step,rew"),
        (b"\x00\x01\xff", "not data of a known format"),
        (b"ELMURD", "ends within the header, after 6 bytes"),
    ] {
        fs::write(&path, bytes).unwrap();
        let problem = problem(&path);
        assert!(problem.contains(look), "{problem}");
        assert!(look.contains("whole") || problem.contains("expected one of: an .elmur file, a folder of"));
    }
    assert!(problem(&folder.join("missing")).contains("no such dataset"));
    #[cfg(unix)]
    {
        let (socket, link) = (folder.join("socket"), folder.join("link"));
        let _socket = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        for path in [socket, link] {
            assert!(problem(&path).contains("a pipe, device or socket"));
        }
    }
    assert!(matches!(Dataset::from_episodes(spaces(), metadata(), vec![]), Err(Error::Empty { .. })));
}

#[test]
fn summaries_add_up() {
    let summary = dataset(4).summary().unwrap();
    assert_eq!((summary.episodes, summary.steps, summary.terminated, summary.truncated), (4, 10, 2, 2));
    assert_eq!((summary.lengths.mean, summary.lengths.min, summary.lengths.max), (2.5, 1.0, 4.0));
    let returns: Vec<f64> = episodes(4).iter().map(Episode::episode_return).collect();
    assert!((summary.returns.mean - returns.iter().sum::<f64>() / 4.0).abs() < 1e-12);
    let imitated = |e: &Episode| e.imitate.as_ref().map_or(e.steps(), |c| c.iter().filter(|c| **c).count());
    assert_eq!(summary.imitated_share, episodes(4).iter().map(imitated).sum::<usize>() as f64 / 10.0);
}

/// Spaces and episodes that the published layout can hold.
fn plain(observation: Space, action: Space, columns: impl Fn(usize) -> (Column, Column)) -> Dataset {
    let episode = |steps: usize| {
        let (observation, action) = columns(steps);
        Episode {
            observations: vec![observation],
            actions: vec![action],
            rewards: (0..steps).map(|i| i as f32 - 0.5).collect(),
            terminated: true,
            truncated: false,
            imitate: (steps == 2).then(|| vec![false, true]),
            labels: None,
            accepted: None,
        }
    };
    Dataset::from_episodes(Spaces { observation, action }, BTreeMap::new(), (1..=11).map(episode).collect())
        .unwrap()
}

fn kinds() -> Vec<Dataset> {
    let ints = |n: usize, below: usize| Column::I32((0..n).map(|i| ((i * 7 + 3) % below) as i32).collect());
    let floats = |n: usize| Column::F32((0..n).map(|i| i as f32 * 0.37 - 1.0).collect());
    let pixels = |n: usize| Column::U8((0..n).map(|i| (i * 31) as u8).collect());
    vec![
        plain(Space::MultiDiscrete { sizes: vec![5; 3] }, Space::Discrete { n: 4 }, |steps| {
            (ints(3 * steps, 5), ints(steps, 4))
        }),
        plain(Space::unbounded([4]), Space::unbounded([2]), |steps| (floats(4 * steps), floats(2 * steps))),
        plain(Space::between(0.0, 1.0, [3, 2, 2]), Space::MultiDiscrete { sizes: vec![3, 3] }, |steps| {
            (pixels(12 * steps), ints(2 * steps, 3))
        }),
    ]
}

#[test]
fn the_published_layout_returns_what_it_can_hold() {
    for (i, dataset) in kinds().iter().enumerate() {
        let folder = Folder::new(&format!("npz-{i}"));
        let npz = folder.join("npz");
        write_npz(&npz, dataset).unwrap();
        assert_eq!(fs::read_dir(&npz).unwrap().count(), 11);
        let inferred = Dataset::open(&npz).unwrap();
        assert_eq!(inferred.spaces(), dataset.spaces());
        assert_eq!(owned(&inferred), owned(dataset), "in the order of numbers: 2 before 10");
        let given = read_npz(&npz, Some(dataset.spaces().clone())).unwrap();
        given.save(folder.join("a.elmur")).unwrap();
        assert_eq!(owned(&Dataset::open(folder.join("a.elmur")).unwrap()), owned(dataset));
        assert!(write_npz(&npz, dataset).unwrap_err().to_string().contains("choose an empty folder"));
        let wrong = Spaces { observation: Space::unbounded([7]), action: Space::Discrete { n: 4 } };
        let problem = read_npz(&npz, Some(wrong)).unwrap_err().to_string();
        assert!(
            problem.contains("train_data_0.npz") && problem.contains("give the right spaces"),
            "{problem}"
        );
    }
}

#[test]
fn the_published_layout_splits_tuples_and_keeps_mixtures_apart() {
    let folder = Folder::new("npz-tuple");
    let parts = vec![Space::Discrete { n: 5 }, Space::MultiDiscrete { sizes: vec![5, 5] }];
    let tuple = Spaces { observation: Space::Tuple { parts }, action: Space::Discrete { n: 4 } };
    write_npz(folder.join("flat"), &kinds()[0]).unwrap();
    let split = read_npz(folder.join("flat"), Some(tuple.clone())).unwrap();
    assert_eq!(split.episode(1).observations[0].to_column(), Column::I32(vec![3, 4]));
    assert_eq!(split.episode(1).observations[1].to_column(), Column::I32(vec![0, 2, 1, 3]));
    write_npz(folder.join("tuple"), &split).unwrap();
    assert_eq!(owned(&Dataset::open(folder.join("tuple")).unwrap()), owned(&kinds()[0]));
    // Numbers of several types are arrays of their own.
    let mixed = Dataset::from_episodes(spaces(), metadata(), episodes(1)).unwrap();
    write_npz(folder.join("mixed"), &mixed).unwrap();
    assert_eq!(owned(&read_npz(folder.join("mixed"), Some(spaces())).unwrap()), owned(&mixed));
    let problem = write_npz(folder.join("labelled"), &dataset(2)).unwrap_err().to_string();
    assert!(problem.contains("use the native format"), "{problem}");
    // Small integers in a box become floats; choices beyond the space are refused and located.
    let boxes = Spaces { observation: Space::unbounded([3]), action: Space::Discrete { n: 4 } };
    let floats = read_npz(folder.join("flat"), Some(boxes)).unwrap();
    assert_eq!(floats.episode(0).observations[0].to_column(), Column::F32(vec![3.0, 0.0, 2.0]));
    let narrow = Spaces { observation: Space::MultiDiscrete { sizes: vec![4; 3] }, ..tuple };
    let problem = read_npz(folder.join("flat"), Some(narrow)).unwrap_err().to_string();
    assert!(
        problem.contains("train_data_1.npz: episode 1: observation leaf 0, step 1, entry 0"),
        "{problem}"
    );
}

#[test]
fn damaged_npz_files_never_crash_and_their_numbers_never_change_unseen() {
    let folder = Folder::new("npz-damage");
    let whole = folder.join("whole");
    write_npz(&whole, &kinds()[0]).unwrap();
    let bytes = fs::read(whole.join("train_data_3.npz")).unwrap();
    let expected = kinds()[0].episode(3).to_episode();
    let spaces = kinds()[0].spaces().clone();
    let path = folder.join("train_data_0.npz");
    let check = |damaged: &[u8], spaces: &[Option<&Spaces>]| {
        // A new file each time: some systems flush files that are overwritten.
        let _ = fs::remove_file(&path);
        fs::write(&path, damaged).unwrap();
        for spaces in spaces {
            let kept = Limits::default();
            let decoded_again = Limits { memory: 0, ..kept };
            let read = |limits| Dataset::load(&*open_with(&folder.0, *spaces, limits)?);
            let (read, again) = (read(&kept), read(&decoded_again));
            match (&read, &again) {
                (Ok(a), Ok(b)) => assert_eq!(a.fingerprint(), b.fingerprint()),
                (a, b) => assert_eq!(format!("{a:?}"), format!("{b:?}")),
            }
            match read {
                Ok(read) => {
                    // Optional arrays can go lost with their names; the others cannot change.
                    let read = read.episode(0).to_episode();
                    assert_eq!(
                        (&read.observations, &read.actions),
                        (&expected.observations, &expected.actions)
                    );
                    assert_eq!(read.rewards, expected.rewards);
                }
                Err(problem) => assert!(problem.to_string().contains("train_data_0.npz"), "{problem}"),
            }
        }
    };
    for len in 0..bytes.len() {
        check(&bytes[..len], &[Some(&spaces), None]);
    }
    for bit in 0..8 * bytes.len() {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        check(&damaged, &[Some(&spaces)]);
    }
    let mut rng = Rng::new(13, 0);
    for _ in 0..3000 {
        let mut damaged = bytes.clone();
        for _ in 0..1 + rng.below(6) {
            let at = rng.below(damaged.len() as u32) as usize;
            damaged[at] = rng.bits() as u8;
        }
        check(&damaged, &[Some(&spaces), None]);
    }
}

/// A stored or deflated archive of one array `obs` with this header, `data` bytes of zeros, and sound other
/// arrays.
fn archive(header: &str, data: usize, deflate: bool, version: u8) -> Vec<u8> {
    let npy = |header: &str, data: Vec<u8>, version: u8| {
        let mut bytes = b"\x93NUMPY".to_vec();
        bytes.extend([version, 0]);
        match version {
            1 => bytes.extend((header.len() as u16).to_le_bytes()),
            _ => bytes.extend((header.len() as u32).to_le_bytes()),
        }
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    };
    let sound = |shape: &str| {
        npy(&format!("{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}}}"), vec![0; 8], 1)
    };
    let members = [
        ("obs.npy", npy(header, vec![0; data], version)),
        ("action.npy", sound("(2,)")),
        ("reward.npy", sound("(2, 1)")),
    ];
    let mut bytes = Vec::new();
    let mut zip = rawzip::ZipArchiveWriter::new(&mut bytes);
    for (name, member) in members {
        let method =
            if deflate { rawzip::CompressionMethod::DEFLATE } else { rawzip::CompressionMethod::STORE };
        let (mut entry, config) = zip.new_file(name).compression_method(method).start().unwrap();
        if deflate {
            let encoder = flate2::write::DeflateEncoder::new(&mut entry, flate2::Compression::best());
            let mut writer = config.wrap(encoder);
            writer.write_all(&member).unwrap();
            let (encoder, descriptor) = writer.finish().unwrap();
            encoder.finish().unwrap();
            entry.finish(descriptor).unwrap();
        } else {
            let mut writer = config.wrap(&mut entry);
            writer.write_all(&member).unwrap();
            let (_, descriptor) = writer.finish().unwrap();
            entry.finish(descriptor).unwrap();
        }
    }
    zip.finish().unwrap();
    bytes
}

#[test]
fn hostile_arrays_are_refused_with_a_remedy() {
    let folder = Folder::new("npz-hostile");
    let open = |bytes: &[u8]| {
        fs::write(folder.join("train_data_0.npz"), bytes).unwrap();
        Dataset::open(&folder.0).map(|d| d.spaces().observation.clone()).map_err(|e| e.to_string())
    };
    let header = |descr: &str, order: &str, shape: &str| {
        format!("{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n")
    };
    for deflate in [false, true] {
        let read = |descr: &str, order: &str, shape: &str, data: usize| {
            open(&archive(&header(descr, order, shape), data, deflate, 1))
        };
        assert_eq!(read("'<f8'", "False", "(2, 3)", 48).unwrap(), Space::unbounded([3]));
        assert_eq!(read("'<f4'", "False", "(3, 1, 2)", 24).unwrap(), Space::unbounded([2]));
        assert_eq!(read("'>f4'", "True", "(2, 3)", 24).unwrap(), Space::unbounded([3]));
        assert_eq!(read("'<f2'", "False", "(2, 3)", 12).unwrap(), Space::unbounded([3]));
        assert_eq!(read("'<u1'", "False", "(2,)", 2).unwrap(), Space::MultiDiscrete { sizes: vec![1] });
        assert_eq!(read("'|b1'", "False", "(2, 2)", 4).unwrap(), Space::MultiDiscrete { sizes: vec![1; 2] });
        assert_eq!(
            open(&archive(&header("'<i8'", "False", "(2, 2)"), 32, deflate, 2)).unwrap(),
            Space::MultiDiscrete { sizes: vec![1; 2] }
        );
        for (descr, order, shape, data, remedy) in [
            ("'|O'", "False", "(2, 3)", 24, "x.astype('f4')"),
            ("'<f16'", "False", "(2, 3)", 96, "x.astype('f4')"),
            ("'<c8'", "False", "(2, 3)", 48, "x.astype('f4')"),
            ("'<U5'", "False", "(2, 3)", 120, "x.astype('f4')"),
            ("[('a', '<f4')]", "False", "(2,)", 8, "plain arrays"),
            ("'<f4'", "False", "(2, 99999999999999999999999)", 24, "plain arrays"),
            ("'<f4'", "False", "(1152921504606846976, 16)", 24, "too large"),
            ("'<f4'", "False", "(2, 1099511627776)", 24, "the archive has"),
            ("'<f4'", "False", "(0, 4611686018427387904, 4, 3)", 0, "at least one step"),
            ("'<f4'", "False", "()", 4, "at least one step"),
            ("'<f4'", "False", "(2, 100000000)", 24, "the archive has"),
            ("'<f4'", "False", "(2, 2)", 24, "the archive has"),
            // 64 MB of zeros in a small archive: not read beyond what the header says.
            ("'<f4'", "False", "(2, 3)", 1 << 26, "the archive has"),
            ("'<f4'", "False", "(7, 3)", 84, "7 observations for 2 actions"),
        ] {
            let problem = read(descr, order, shape, data).unwrap_err();
            assert!(problem.contains("train_data_0.npz") && problem.contains(remedy), "{shape}: {problem}");
        }
        let long = format!("{}{}", header("'<f4'", "False", "(2, 3)"), " ".repeat(1 << 17));
        assert!(open(&archive(&long, 24, deflate, 2)).unwrap_err().contains("array header of"));
    }
    // The archive's own words on size are no better: a claim of 4 GB in the directory.
    let mut lying = archive(&header("'<f4'", "False", "(2, 500000000)"), 24, true, 1);
    let directory = lying.windows(4).position(|w| w == b"PK\x01\x02").unwrap();
    let total = 10 + header("'<f4'", "False", "(2, 500000000)").len() as u32 + 4_000_000_000;
    lying[directory + 24..directory + 28].copy_from_slice(&total.to_le_bytes());
    assert!(open(&lying).unwrap_err().contains("too large"));
    let mut lying = archive(&header("'<f4'", "False", "(2, 50000000)"), 24, true, 1);
    let directory = lying.windows(4).position(|w| w == b"PK\x01\x02").unwrap();
    let total = 10 + header("'<f4'", "False", "(2, 50000000)").len() as u32 + 400_000_000;
    lying[directory + 24..directory + 28].copy_from_slice(&total.to_le_bytes());
    assert!(open(&lying).unwrap_err().contains("copy or collect it again"));
}

#[test]
fn different_files_in_one_folder_are_refused() {
    let folder = Folder::new("npz-mixture");
    let (a, b) = (folder.join("a"), folder.join("b"));
    write_npz(&a, &kinds()[0]).unwrap();
    write_npz(&b, &kinds()[1]).unwrap();
    fs::copy(b.join("train_data_5.npz"), a.join("train_data_11.npz")).unwrap();
    let problem = Dataset::open(&a).unwrap_err().to_string();
    assert!(problem.contains("train_data_11.npz") && problem.contains("different folders"), "{problem}");
}
