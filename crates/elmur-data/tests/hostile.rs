//! Damaged and hostile files of other programs' formats: an error or sound episodes, never a crash, and
//! little memory. One test per process and format would be slow to build; they share a process, whose largest
//! size Linux reports.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};

use elmur_data::{EpisodeReader, Limits, Selection, open_with};
use elmur_rng::Rng;

mod common;
use common::Folder;

/// Small enough that a claim of more is refused, large enough for all fixtures.
const LIMITS: Limits = Limits { memory: 1 << 20, inflated: 32 << 20 };

/// What reading damaged files may add to the memory of the process.
const MOST_MEMORY: usize = 512 << 20;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Number of damaged files per format, more if the environment asks for it.
fn rounds() -> usize {
    std::env::var("ELMUR_FUZZ_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(60)
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            copy(&entry.path(), &to.join(entry.file_name()));
        }
    } else {
        fs::copy(from, to).unwrap();
    }
}

/// Bytes with a few random changes: cut, flipped, replaced by large numbers, moved, removed, added.
fn damaged(bytes: &[u8], rng: &mut Rng) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..1 + rng.below(4) {
        if bytes.len() < 16 {
            break;
        }
        let at = rng.below(bytes.len() as u32 - 8) as usize;
        match rng.below(10) {
            0 => bytes.truncate(at.max(1)),
            1 | 2 => bytes[at] ^= 1 << rng.below(8),
            3 | 4 => bytes[at] = rng.bits() as u8,
            5 => bytes[at..at + 4].copy_from_slice(&[0xff; 4]),
            6 => bytes[at..at + 8].copy_from_slice(&(1u64 << rng.below(63)).to_le_bytes()),
            7 => bytes[at..at + 4].copy_from_slice(&(1u32 << rng.below(31)).to_be_bytes()),
            8 => drop(bytes.drain(at..at + 1 + rng.below(8) as usize)),
            _ => bytes.insert(at, rng.bits() as u8),
        }
    }
    bytes
}

/// Reads everything: errors are fine.
fn read(path: &Path) -> Result<(), String> {
    let reader =
        EpisodeReader::open(path, None, &Selection::default(), &LIMITS).map_err(|e| e.to_string())?;
    for i in 0..reader.len() {
        let episode = reader.episode(i).map_err(|e| e.to_string())?;
        episode.view().validate(reader.spaces()).expect("what is handed out fits the spaces");
    }
    // The same by the other way in.
    open_with(path, None, &LIMITS).map_err(|e| e.to_string())?;
    Ok(())
}

#[cfg(target_os = "linux")]
fn peak() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

#[cfg(not(target_os = "linux"))]
fn peak() -> usize {
    0
}

/// Damages these files of a dataset by turns and reads it each time.
fn fuzz(dataset: &str, files: &[&str]) {
    fuzz_rounds(dataset, files, rounds());
}

fn fuzz_rounds(dataset: &str, files: &[&str], rounds: usize) {
    let folder = Folder::new(&format!("fuzz-{}-{}", dataset.replace('/', "-"), files[0].len()));
    let here = folder.join("data");
    copy(&fixture(dataset), &here);
    read(&here).unwrap();
    let before = peak();
    let (mut rng, mut refused) = (Rng::new(17, 0), 0);
    for round in 0..rounds {
        let file = files[round % files.len()];
        let place = if file.is_empty() { here.clone() } else { here.join(file) };
        let sound = fs::read(&place).unwrap();
        // A file cut at any place is found at least as often as by chance.
        let bytes = match round % 5 {
            0 => sound[..rng.below(sound.len() as u32) as usize].to_vec(),
            _ => damaged(&sound, &mut rng),
        };
        fs::remove_file(&place).unwrap();
        fs::write(&place, &bytes).unwrap();
        if let Err(problem) = read(&here) {
            assert!(problem.contains("data"), "names the file: {problem}");
            refused += 1;
        }
        fs::remove_file(&place).unwrap();
        fs::write(&place, &sound).unwrap();
    }
    assert!(refused > rounds / 5, "{dataset}: only {refused} of {rounds} damaged files were refused");
    let grown = peak().saturating_sub(before);
    assert!(grown < MOST_MEMORY, "{dataset}: {} MiB", grown >> 20);
}

#[test]
fn damaged_minari_datasets_never_crash() {
    fuzz("minari/dict-v0", &["data/main_data.hdf5", "data/metadata.json"]);
    fuzz("minari/box-v0", &["data/main_data.hdf5", "data/metadata.json"]);
}

#[test]
fn damaged_d4rl_files_never_crash() {
    fuzz("d4rl/d4rl-v2-style.hdf5", &[""]);
    fuzz("d4rl/d4rl-writer.hdf5", &[""]);
}

#[test]
fn damaged_robomimic_files_never_crash() {
    fuzz("robomimic/robomimic.hdf5", &[""]);
}

#[test]
fn damaged_npz_files_never_crash() {
    fuzz("npz/mikasa", &["train_data_0.npz", "train_data_2.npz"]);
}

#[test]
fn damaged_lerobot_datasets_never_crash() {
    let (data, meta) = ("data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet");
    fuzz("lerobot-v3/state", &[data, meta, "meta/info.json", "meta/tasks.parquet"]);
    fuzz("lerobot-v3/image", &[data]);
    fuzz(
        "lerobot-v21/av1",
        &["data/chunk-000/episode_000001.parquet", "meta/episodes.jsonl", "meta/info.json"],
    );
}

#[test]
fn damaged_videos_never_crash() {
    // The decoder is slow without optimisation.
    let file = "videos/chunk-000/observation.images.top/episode_000003.mp4";
    fuzz_rounds("lerobot-v21/av1", &[file], rounds() / 4);
    fuzz_rounds("lerobot-v3/av1", &["videos/observation.images.top/chunk-000/file-000.mp4"], rounds() / 4);
}
