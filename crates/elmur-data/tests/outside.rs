//! Datasets that other programs wrote, against what their own readers read: `tests/fixtures`, each with an
//! `expected.json`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use elmur_base::{Space, Spaces};
use elmur_data::{
    Column, Episode, EpisodeReader, Limits, ObservationKey, Selection, Source, open, open_selected,
    open_with, save, write_npz,
};
use serde_json::Value;

mod common;
use common::Folder;

/// Nothing stays in memory.
const ON_DISK: Limits = Limits { memory: 0, inflated: 1 << 30 };

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn expected(name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(fixture(name)).unwrap()).unwrap()
}

fn numbers(column: &Column) -> Vec<f64> {
    match column {
        Column::F32(x) => x.iter().map(|x| f64::from(*x)).collect(),
        Column::I32(x) => x.iter().map(|x| f64::from(*x)).collect(),
        Column::U8(x) => x.iter().map(|x| f64::from(*x)).collect(),
    }
}

/// The numbers of an observation as the source has them: pictures with channels last.
fn as_stored(column: &Column, key: &ObservationKey) -> Vec<f64> {
    let numbers = numbers(column);
    let channels = if key.shape.len() == 3 { key.shape[2] } else { 1 };
    let size: usize = key.shape.iter().product();
    if !key.channels_last {
        return numbers;
    }
    let turned = |picture: &[f64]| {
        let plane = size / channels;
        (0..size).map(|i| picture[i % channels * plane + i / channels]).collect::<Vec<_>>()
    };
    numbers.chunks_exact(size).flat_map(turned).collect()
}

/// Compares numbers with shape, sum, first and last rows; `tolerance` of single numbers.
fn compare(numbers: &[f64], about: &Value, what: &str, tolerance: f64) {
    let shape: Vec<usize> = serde_json::from_value(about["shape"].clone()).unwrap();
    assert_eq!(numbers.len(), shape.iter().product::<usize>(), "{what}: {shape:?}");
    let width: usize = shape[1..].iter().product();
    let sum: f64 = numbers.iter().sum();
    let size: f64 = numbers.iter().map(|x| x.abs()).sum();
    let off = (sum - about["sum"].as_f64().unwrap()).abs();
    assert!(off <= 1e-6 * size + tolerance * numbers.len() as f64, "{what}: sum {sum} is off by {off}");
    let number = |x: &Value| x.as_f64().or(x.as_bool().map(f64::from)).unwrap();
    for (rows, at) in [("first", 0), ("last", numbers.len() - width)] {
        for (about, got) in about[rows].as_array().unwrap().iter().zip(&numbers[at..at + width]) {
            let about = number(about);
            // Numbers of 64 bits become 32-bit floats.
            let same = *got == about || *got == f64::from(about as f32) || (got - about).abs() <= tolerance;
            assert!(same, "{what}, {rows}: expected {about}, got {got}");
        }
    }
}

fn floats(numbers: &[f32]) -> Vec<f64> {
    numbers.iter().map(|x| f64::from(*x)).collect()
}

/// The same data three ways: in memory, decoded on demand, and one episode after the other.
fn opened(path: &Path, selection: &Selection) -> Arc<dyn Source> {
    let memory = open_selected(path, None, selection, &Limits::default()).unwrap();
    let disk = open_selected(path, None, selection, &ON_DISK).unwrap();
    let once = EpisodeReader::open(path, None, selection, &Limits::default()).unwrap();
    assert_eq!((memory.spaces(), memory.metadata()), (disk.spaces(), disk.metadata()));
    assert_eq!(
        (once.spaces(), once.metadata(), once.len()),
        (disk.spaces(), disk.metadata(), disk.episodes())
    );
    assert_eq!(memory.fingerprint(), disk.fingerprint());
    for i in 0..memory.episodes() {
        let episode = memory.episode(i).unwrap();
        assert_eq!(disk.episode(i).unwrap(), episode);
        assert_eq!(once.episode(i).unwrap(), episode);
    }
    memory
}

fn check_minari(name: &str, tolerance: f64) -> Arc<dyn Source> {
    let data = opened(&fixture(&format!("minari/{name}")), &Selection::default());
    let about = expected(&format!("minari/{name}.expected.json"));
    let keys = ObservationKey::of(data.metadata(), &data.spaces().observation);
    let episodes = about["episodes"].as_array().unwrap();
    assert_eq!(data.episodes(), episodes.len());
    for (i, about) in episodes.iter().enumerate() {
        let episode = data.episode(i).unwrap();
        assert_eq!(episode.steps() as u64, about["steps"].as_u64().unwrap());
        for (key, column) in keys.iter().zip(&episode.observations) {
            let mut about = &about["observations"];
            for part in key.name.split('/').filter(|part| *part != "observations") {
                about = part.parse::<usize>().map_or_else(|_| &about[part], |index| &about[index]);
            }
            let tolerance = if key.channels_last { tolerance } else { 0.0 };
            compare(&as_stored(column, key), about, &format!("{name} {i} {}", key.name), tolerance);
        }
        compare(&numbers(&episode.actions[0]), &about["actions"], "actions", 0.0);
        compare(&floats(&episode.rewards), &about["rewards"], "rewards", 0.0);
        let ended = |key: &str| about[key]["last"][0].as_bool().unwrap();
        assert_eq!((episode.terminated, episode.truncated), (ended("terminations"), ended("truncations")));
    }
    data
}

#[test]
fn minari_is_read_as_minari_reads_it() {
    let boxes = check_minari("box-v0", 0.0);
    assert_eq!(boxes.spaces().observation, Space::unbounded([5]));
    assert_eq!(boxes.spaces().action, Space::Box { shape: vec![3], low: vec![-1.0; 3], high: vec![1.0; 3] });
    assert!(boxes.outline(0).final_observation);
    let choices = check_minari("discrete-v0", 0.0);
    assert_eq!(choices.spaces().observation, Space::Discrete { n: 9 });
    assert_eq!(choices.spaces().action, Space::Discrete { n: 4 });
    // JPEG decoders round differently.
    let several = check_minari("dict-v0", 2.0);
    let parts = vec![
        Space::MultiDiscrete { sizes: vec![4, 3] },
        Space::Bytes { shape: vec![3, 32, 40] },
        Space::Discrete { n: 7 },
        Space::unbounded([2]),
        Space::unbounded([5]),
    ];
    assert_eq!(several.spaces().observation, Space::Tuple { parts });
}

#[test]
fn a_minari_dataset_is_named_by_its_folder_its_data_folder_or_its_file() {
    let whole = open(fixture("minari/box-v0"), None).unwrap();
    for path in ["minari/box-v0/data", "minari/box-v0/data/main_data.hdf5"] {
        assert_eq!(open(fixture(path), None).unwrap().fingerprint(), whole.fingerprint());
    }
    let folder = Folder::new("minari-arrow");
    fs::create_dir(folder.join("data")).unwrap();
    let text = fs::read_to_string(fixture("minari/box-v0/data/metadata.json")).unwrap();
    fs::write(folder.join("data/metadata.json"), text.replace("\"hdf5\"", "\"arrow\"")).unwrap();
    let problem = open(&folder.0, None).unwrap_err().to_string();
    assert!(problem.contains("stored as \"arrow\"") && problem.contains("data_format=\"hdf5\""), "{problem}");
}

#[test]
fn parts_of_a_minari_space_that_are_no_numbers_are_left_out() {
    let folder = Folder::new("minari-text");
    let (from, to) = ("\\\"subspaces\\\": {", r#"\"subspaces\": {\"mission\": {\"type\": \"Text\"}, "#);
    let path = altered(&folder, "minari/dict-v0", "data/metadata.json", from, to);
    let (all, data) = (open(fixture("minari/dict-v0"), None).unwrap(), open(&path, None).unwrap());
    assert_eq!((data.spaces(), data.fingerprint()), (all.spaces(), all.fingerprint()));
    assert_eq!(data.metadata()["note"], "not read: `mission` (Text)");
    let asked = Selection { keys: vec!["mission".to_owned()], ..Selection::default() };
    let problem = open_selected(&path, None, &asked, &Limits::default()).unwrap_err().to_string();
    assert!(problem.contains("space `mission` is of type Text"), "{problem}");
}

#[test]
fn observations_are_chosen_by_name_in_the_order_given() {
    let path = fixture("minari/dict-v0");
    let chosen = |keys: &[&str]| Selection {
        keys: keys.iter().map(|key| (*key).to_owned()).collect(),
        ..Selection::default()
    };
    let all = open(&path, None).unwrap();
    let two = opened(&path, &chosen(&["state", "pair/0"]));
    let parts = vec![Space::unbounded([5]), Space::Discrete { n: 7 }];
    assert_eq!(two.spaces().observation, Space::Tuple { parts });
    let (two_first, all_first) = (two.episode(1).unwrap(), all.episode(1).unwrap());
    assert_eq!(
        two_first.observations,
        [all_first.observations[4].clone(), all_first.observations[2].clone()]
    );
    // Names survive the native format.
    let folder = Folder::new("keys");
    save(&*all, folder.join("all.elmur")).unwrap();
    let native =
        open_selected(folder.join("all.elmur"), None, &chosen(&["state", "pair/0"]), &Limits::default());
    assert_eq!(native.unwrap().episode(1).unwrap(), two_first);
    let problem = |keys: &[&str], path: &Path| {
        open_selected(path, None, &chosen(keys), &Limits::default()).unwrap_err().to_string()
    };
    for path in [path, folder.join("all.elmur")] {
        let text = problem(&["stat"], &path);
        assert!(
            text.contains("no key \"stat\"; did you mean `state`?") && text.contains("cards, image"),
            "{text}"
        );
        assert!(problem(&["state", "state"], &path).contains("chosen twice"));
    }
    let mask = Selection { mask: Some("train".to_owned()), ..Selection::default() };
    let text =
        open_selected(fixture("minari/box-v0"), None, &mask, &Limits::default()).unwrap_err().to_string();
    assert!(text.contains("has no masks"), "{text}");
}

#[test]
fn d4rl_is_cut_into_episodes_where_they_ended() {
    for (name, final_observation) in [("d4rl-writer", false), ("d4rl-v2-style", true)] {
        let data = opened(&fixture(&format!("d4rl/{name}.hdf5")), &Selection::default());
        let about = expected(&format!("d4rl/{name}.expected.json"));
        let lengths: Vec<usize> = serde_json::from_value(about["episode_lengths"].clone()).unwrap();
        assert_eq!((0..data.episodes()).map(|i| data.steps(i)).collect::<Vec<_>>(), lengths);
        let episodes: Vec<Episode> = (0..data.episodes()).map(|i| data.episode(i).unwrap()).collect();
        let joined =
            |column: &dyn Fn(&Episode) -> Vec<f64>| episodes.iter().flat_map(column).collect::<Vec<f64>>();
        let width = data.layout().observations[0].width;
        let seen = joined(&|e| numbers(&e.observations[0])[..e.steps() * width].to_vec());
        compare(&seen, &about["datasets"]["observations"], "observations", 0.0);
        compare(&joined(&|e| numbers(&e.actions[0])), &about["datasets"]["actions"], "actions", 0.0);
        compare(&joined(&|e| floats(&e.rewards)), &about["datasets"]["rewards"], "rewards", 0.0);
        assert!((0..data.episodes()).all(|i| data.outline(i).final_observation == final_observation));
        if final_observation {
            let last = numbers(&episodes.last().unwrap().observations[0]);
            let about = &about["datasets"]["next_observations"]["last"];
            assert_eq!(
                last[last.len() - width..][..8],
                serde_json::from_value::<Vec<f64>>(about.clone()).unwrap()
            );
            let ended: Vec<bool> = episodes.iter().map(|e| e.terminated).collect();
            assert_eq!(ended, [true, false, true, false, false]);
            assert!(episodes.iter().all(|e| e.truncated != e.terminated));
            assert!(!data.metadata().contains_key("note"));
        } else {
            assert!(data.metadata()["note"].contains("cut after 1000 steps"));
        }
    }
    // Arrays of a million rows that were never written.
    let problem = open(fixture("d4rl/many-ends.hdf5"), None).unwrap_err().to_string();
    assert!(problem.contains("more than 1048576 episodes in 1048577 steps"), "{problem}");
    let short = Selection { step_limit: Some(10), ..Selection::default() };
    let data = opened(&fixture("d4rl/d4rl-writer.hdf5"), &short);
    let lengths: Vec<usize> = (0..4).map(|i| data.steps(i)).collect();
    assert_eq!(lengths, [10, 10, 8, 10]);
    assert_eq!((data.outline(0).truncated, data.outline(2).terminated), (true, true));
}

#[test]
fn robomimic_is_read_by_number_with_keys_and_masks() {
    let (path, about) = (fixture("robomimic/robomimic.hdf5"), expected("robomimic/robomimic.expected.json"));
    let data = opened(&path, &Selection::default());
    let keys = ObservationKey::of(data.metadata(), &data.spaces().observation);
    let names: Vec<&str> = keys.iter().map(|key| key.name.as_str()).collect();
    assert_eq!(names, ["agentview_image", "object", "robot0_eef_pos"]);
    let demos = about["demos"].as_array().unwrap();
    assert_eq!(data.episodes(), demos.len());
    for (i, about) in demos.iter().enumerate() {
        let episode = data.episode(i).unwrap();
        for (key, column) in keys.iter().zip(&episode.observations) {
            compare(&as_stored(column, key), &about["obs"][&key.name], &key.name, 0.0);
        }
        compare(&numbers(&episode.actions[0]), &about["actions"], "actions", 0.0);
        compare(&floats(&episode.rewards), &about["rewards"], "rewards", 0.0);
        assert!(episode.terminated && !episode.truncated);
    }
    let masked = |mask: &str| {
        let keys = vec!["robot0_eef_pos".to_owned()];
        let selection = Selection { keys, mask: Some(mask.to_owned()), ..Selection::default() };
        open_selected(&path, None, &selection, &Limits::default())
    };
    let train = masked("train").unwrap();
    assert_eq!(train.episodes(), 5);
    for (i, demo) in [0, 2, 5, 7, 10].into_iter().enumerate() {
        let (train, all) = (train.episode(i).unwrap(), data.episode(demo).unwrap());
        assert_eq!(train.actions, all.actions);
        let (Column::F32(train), Column::F32(all)) = (&train.observations[0], &all.observations[2]) else {
            panic!("floats");
        };
        // This key alone has observations one step later.
        assert_eq!((train.len(), &train[..all.len()]), (all.len() + 3, &all[..]));
    }
    let problem = masked("test").unwrap_err().to_string();
    assert!(problem.contains("no key \"test\"") && problem.contains("there are: train, valid"), "{problem}");
    let states = Selection { keys: vec!["states".to_owned()], ..Selection::default() };
    assert_eq!(opened(&path, &states).spaces().observation, Space::unbounded([8]));
}

#[test]
fn pictures_and_names_survive_npz_and_the_native_format() {
    let folder = Folder::new("outside-converted");
    for (i, path) in
        ["minari/dict-v0", "minari/discrete-v0", "robomimic/robomimic.hdf5", "d4rl/d4rl-v2-style.hdf5"]
            .into_iter()
            .enumerate()
    {
        let data = open(fixture(path), None).unwrap();
        let (native, npz) = (folder.join(&format!("{i}.elmur")), folder.join(&format!("npz-{i}")));
        save(&*data, &native).unwrap();
        let native = open(&native, None).unwrap();
        assert_eq!((native.fingerprint(), native.spaces()), (data.fingerprint(), data.spaces()));
        write_npz(&npz, &*native).unwrap();
        let read = open_with(&npz, Some(data.spaces()), &Limits::default()).unwrap();
        for episode in 0..data.episodes() {
            let (mut read, mut data) = (read.episode(episode).unwrap(), data.episode(episode).unwrap());
            (read.truncated, data.truncated) = (false, false);
            assert_eq!(read, data, "{path}");
        }
    }
    let inferred = open(folder.join("npz-0"), None).unwrap();
    let keys = ObservationKey::of(inferred.metadata(), &inferred.spaces().observation);
    let names: Vec<(&str, &[usize])> = keys.iter().map(|key| (key.name.as_str(), &key.shape[..])).collect();
    let wanted: [(&str, &[usize]); 5] =
        [("cards", &[2]), ("image", &[32, 40, 3]), ("pair/0", &[]), ("pair/1", &[2]), ("state", &[5])];
    assert_eq!(names, wanted);
}

#[test]
fn the_axes_of_integers_survive_npz() {
    let (folder, data) = (Folder::new("grid"), open(fixture("npz/grid.npz"), None).unwrap());
    assert_eq!(data.spaces().observation.leaves()[0].len(), 8);
    write_npz(folder.join("grid"), &*data).unwrap();
    let again = open(folder.join("grid"), None).unwrap();
    for data in [data, again] {
        let keys = ObservationKey::of(data.metadata(), &data.spaces().observation);
        assert_eq!(keys[0].shape, [2, 4]);
        let numbers = numbers(&data.episode(0).unwrap().observations[0]);
        assert_eq!(numbers, (0..24).map(f64::from).collect::<Vec<_>>());
    }
}

#[test]
fn known_spaces_take_the_place_of_inferred_ones() {
    let known =
        Spaces { observation: Space::between(-10.0, 10.0, [11]), action: Space::between(-1.0, 1.0, [3]) };
    let data = open(fixture("d4rl/d4rl-v2-style.hdf5"), Some(&known)).unwrap();
    assert_eq!(data.spaces(), &known);
    let wrong = Spaces { observation: Space::unbounded([12]), ..known };
    let problem = open(fixture("d4rl/d4rl-v2-style.hdf5"), Some(&wrong)).unwrap_err().to_string();
    assert!(problem.contains("expected 12 numbers per step, got [11]"), "{problem}");
}

#[test]
fn published_npz_layouts_are_read() {
    let about = expected("npz/expected.json");
    for name in ["popgym", "mikasa"] {
        let data = opened(&fixture(&format!("npz/{name}")), &Selection::default());
        let keys = ObservationKey::of(data.metadata(), &data.spaces().observation);
        for i in 0..3 {
            let (about, episode) = (&about[format!("{name}/train_data_{i}")], data.episode(i).unwrap());
            let seen = about.get("obs").unwrap_or(&about["rgb"]);
            compare(&as_stored(&episode.observations[0], &keys[0]), seen, "obs", 0.0);
            compare(&numbers(&episode.actions[0]), &about["action"], "action", 0.0);
            compare(&floats(&episode.rewards), &about["reward"], "reward", 0.0);
        }
    }
    let keys = vec!["rgb".to_owned(), "joints".to_owned()];
    let both = opened(&fixture("npz/mikasa"), &Selection { keys, ..Selection::default() });
    let parts = vec![Space::between(0.0, 1.0, [6, 16, 16]), Space::unbounded([25])];
    assert_eq!(both.spaces().observation, Space::Tuple { parts });
    compare(
        &numbers(&both.episode(1).unwrap().observations[1]),
        &about["mikasa/train_data_1"]["joints"],
        "",
        0.0,
    );
    for name in ["refuse-object", "refuse-structured", "odd-scalar-empty-string", "corner"] {
        assert!(open(fixture(&format!("npz/{name}.npz")), None).is_err(), "{name}");
    }
}

/// Numbers equal, pictures with the means that LeRobot's own reader gives, within `tolerance` of 255.
fn check_lerobot(name: &str, data: &dyn Source, tolerance: f64) {
    let about = expected(&format!("{name}.expected.json"));
    let keys = ObservationKey::of(data.metadata(), &data.spaces().observation);
    let key = |name: &str| keys.iter().position(|key| key.name == name);
    let episodes = about["episodes"].as_array().unwrap();
    assert_eq!(data.episodes(), episodes.len());
    for (i, about) in episodes.iter().enumerate() {
        let episode = data.episode(i).unwrap();
        let rows = |key: &str| -> Vec<f64> {
            serde_json::from_value::<Vec<Vec<f64>>>(about[key].clone()).unwrap().concat()
        };
        assert_eq!(episode.steps() as u64, about["length"].as_u64().unwrap());
        assert_eq!(numbers(&episode.observations[key("observation.state").unwrap()]), rows("state"));
        assert_eq!(numbers(&episode.actions[0]), rows("action"));
        let rewards: Vec<f64> = serde_json::from_value(about["reward"].clone()).unwrap();
        assert_eq!(floats(&episode.rewards), rewards);
        assert!(episode.terminated && !episode.truncated);
        let means = about["image_mean"].as_array().unwrap();
        let Some(top) = key("observation.images.top") else { continue };
        let (Column::U8(pixels), &[height, width, 3]) = (&episode.observations[top], &keys[top].shape[..])
        else {
            panic!("pictures");
        };
        let frames = pixels.chunks_exact(3 * height * width);
        assert_eq!((frames.len(), means.len()), (episode.steps(), episode.steps()));
        for (t, (frame, mean)) in frames.zip(means).enumerate() {
            for (channel, plane) in frame.chunks_exact(height * width).enumerate() {
                let got = plane.iter().map(|x| f64::from(*x)).sum::<f64>() / plane.len() as f64;
                let off = (got - mean[channel].as_f64().unwrap()).abs();
                assert!(off <= tolerance, "{name} episode {i} frame {t} channel {channel}: off by {off}");
            }
        }
    }
}

#[test]
fn lerobot_is_read_as_lerobot_reads_it() {
    let open = |name: &str| opened(&fixture(name), &Selection::default());
    let state = open("lerobot-v3/state");
    check_lerobot("lerobot-v3/state", &*state, 0.0);
    let parts = vec![Space::unbounded([3, 2]), Space::unbounded([6])];
    assert_eq!(state.spaces().observation, Space::Tuple { parts });
    let grid = numbers(&state.episode(0).unwrap().observations[0]);
    assert!(grid.iter().all(|x| (0.0..9.0).contains(x) && x.fract() == 0.0) && grid.contains(&8.0));
    assert_eq!(state.metadata()["tasks"], r#"["task 0","task 1"]"#);
    let image = open("lerobot-v3/image");
    check_lerobot("lerobot-v3/image", &*image, 0.001);
    let parts = vec![Space::Bytes { shape: vec![3, 24, 32] }, Space::unbounded([6])];
    assert_eq!(image.spaces().observation, Space::Tuple { parts });
    check_lerobot("lerobot-v3/av1", &*open("lerobot-v3/av1"), 0.001);
    check_lerobot("lerobot-v21/av1", &*open("lerobot-v21/av1"), 0.001);
}

/// Whether the program that decodes H.264 is there.
fn has_ffmpeg() -> bool {
    let program = std::env::var_os("ELMUR_FFMPEG").unwrap_or_else(|| "ffmpeg".into());
    std::process::Command::new(program).arg("-version").output().is_ok()
}

#[test]
fn other_codecs_are_read_with_ffmpeg_and_else_refused_by_name() {
    let path = fixture("lerobot-v3/h264");
    if has_ffmpeg() {
        check_lerobot("lerobot-v3/h264", &*opened(&path, &Selection::default()), 3.0);
    } else {
        let problem = open(&path, None).unwrap_err().to_string();
        assert!(problem.contains("encoded by h264, which needs the ffmpeg program"), "{problem}");
    }
    // What is not asked for is not decoded.
    let keys = vec!["observation.state".to_owned()];
    let selection = Selection { keys, ..Selection::default() };
    check_lerobot("lerobot-v3/h264", &*opened(&path, &selection), 0.0);
}

#[test]
fn lerobot_actions_and_observations_are_chosen_among_all_features() {
    let keys = vec!["observation.state".to_owned(), "task_index".to_owned()];
    let action_key = Some("observation.grid".to_owned());
    let chosen =
        opened(&fixture("lerobot-v3/state"), &Selection { keys, action_key, ..Selection::default() });
    let parts = vec![Space::unbounded([6]), Space::unbounded([1])];
    assert_eq!(chosen.spaces().observation, Space::Tuple { parts });
    assert_eq!(chosen.spaces().action, Space::MultiDiscrete { sizes: vec![9; 6] });
    assert_eq!(numbers(&chosen.episode(1).unwrap().observations[1])[0], 1.0);
    let problem = |selection: Selection| {
        open_selected(fixture("lerobot-v3/state"), None, &selection, &Limits::default())
            .unwrap_err()
            .to_string()
    };
    let text = problem(Selection { action_key: Some("actions".to_owned()), ..Selection::default() });
    assert!(text.contains("no key \"actions\"; did you mean `action`?"), "{text}");
    let text = problem(Selection { keys: vec!["observation.stat".to_owned()], ..Selection::default() });
    assert!(text.contains("did you mean `observation.state`?"), "{text}");
}

/// A copy of a fixture in which a text of a file is replaced.
fn altered(folder: &Folder, name: &str, file: &str, from: &str, to: &str) -> PathBuf {
    fn copy(from: &Path, to: &Path) {
        fs::create_dir_all(to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            match entry.path().is_dir() {
                true => copy(&entry.path(), &to.join(entry.file_name())),
                false => drop(fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
            }
        }
    }
    let path = folder.join("altered");
    let _ = fs::remove_dir_all(&path);
    copy(&fixture(name), &path);
    let text = fs::read_to_string(path.join(file)).unwrap();
    assert!(text.contains(from), "{file} has no {from}");
    fs::write(path.join(file), text.replace(from, to)).unwrap();
    path
}

#[test]
fn lerobot_datasets_that_cannot_be_read_say_why() {
    let folder = Folder::new("lerobot-refused");
    let info = "meta/info.json";
    for (from, to, problem) in [
        ("\"v3.0\"", "\"v1.6\"", "version v1.6 of the format; expected v2.0, v2.1 or v3.0"),
        ("\"total_episodes\": 4", "\"total_episodes\": 5", "5 episodes, but 4 are listed"),
        ("\"is_depth_map\": false", "\"is_depth_map\": true", "leave it out with keys"),
        ("\"is_depth_map\": false", "\"video.is_depth_map\": true", "leave it out with keys"),
        ("data/chunk-", "../chunk-", "a path out of the dataset's folder"),
        ("data/chunk-", "/etc/chunk-", "a path out of the dataset's folder"),
        ("{file_index:03d}.parquet", "{file:03d}.parquet", "an unknown name \"file\""),
        ("{file_index:03d}.parquet", "{file_index:04d}.parquet", "file-0000.parquet"),
        (
            "            \"shape\": [\n                6\n",
            "            \"shape\": [\n                5\n",
            "expected 5 values",
        ),
        (
            "                96,\n",
            "                95,\n",
            "expected pictures of 95 x 128 (height x width), got 96 x 128",
        ),
        ("\"fps\": 10,\n    \"features\"", "\"fps\": 0,\n    \"features\"", "frames per second"),
        ("\"observation.state\"", "\"observation.states\"", "column `observation.states`: missing"),
    ] {
        let path = altered(&folder, "lerobot-v3/av1", info, from, to);
        let text = open(&path, None).unwrap_err().to_string();
        assert!(text.contains(problem), "{to}: {text}");
    }
    // A recording that was not finalised.
    let path = altered(&folder, "lerobot-v3/av1", info, "\"toy\"", "\"robot\"");
    let data = path.join("data/chunk-000/file-000.parquet");
    let bytes = fs::read(&data).unwrap();
    fs::write(&data, &bytes[..bytes.len() - 100]).unwrap();
    let text = open(&path, None).unwrap_err().to_string();
    assert!(text.contains("not finalised") && text.contains("file-000.parquet"), "{text}");
    fs::write(&data, &bytes).unwrap();
    // A video that ends before the recording does.
    let video = path.join("videos/observation.images.top/chunk-000/file-000.mp4");
    fs::copy(fixture("lerobot-v21/av1/videos/chunk-000/observation.images.top/episode_000003.mp4"), video)
        .unwrap();
    let text = open(&path, None).unwrap_err().to_string();
    assert!(text.contains("file-000.mp4") && text.contains("no picture at 0.7"), "{text}");
}
