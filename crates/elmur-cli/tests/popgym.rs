//! POPGym from the command line: collect, inspect, train, evaluate, verify, measure.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::path::Path;
use std::process::Command;

use common::{Folder, elmur, fine, mistake, text};
use serde_json::Value;

fn rows(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn fixture(name: &str) -> String {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../elmur-envs/tests");
    tests.join(name).to_str().unwrap().to_owned()
}

const FAMILIES: [&str; 16] = [
    "Autoencode",
    "Battleship",
    "Concentration",
    "CountRecall",
    "HigherLower",
    "LabyrinthEscape",
    "LabyrinthExplore",
    "MineSweeper",
    "MultiarmedBandit",
    "NoisyPositionOnlyCartPole",
    "NoisyPositionOnlyPendulum",
    "PositionOnlyCartPole",
    "PositionOnlyPendulum",
    "RepeatFirst",
    "RepeatPrevious",
    "VelocityOnlyCartpole",
];

#[test]
fn collected_episodes_are_the_same_for_any_number_of_threads() {
    let folder = Folder::new("threads");
    let file = |threads: &str| {
        let path = folder.path(&format!("{threads}.elmur"));
        let task = "popgym-RepeatPreviousEasy-v0";
        fine(&["collect", task, "--episodes", "40", "--threads", threads, "--out", &path]);
        std::fs::read(path).unwrap()
    };
    assert!(file("1") == file("3"));
    let path = folder.path("1.elmur");
    let about = &rows(&fine(&["inspect", &path, "--json"]))[0];
    assert_eq!(about["metadata"]["env"], "popgym-RepeatPreviousEasy-v0");
    assert_eq!(about["metadata"]["version"], "1.0.7");
    assert!((about["return"]["mean"].as_f64().unwrap() - 1.0).abs() < 1e-5);
    // The first three of 51 answers are not used.
    assert!((about["imitated"].as_f64().unwrap() - 48.0 / 51.0).abs() < 1e-9);
    assert!(fine(&["inspect", &path]).contains("94.1% of steps"));
}

#[test]
fn both_layouts_and_older_rules_are_collected() {
    let folder = Folder::new("layouts");
    let npz = folder.path("npz");
    fine(&["collect", "popgym-AutoencodeEasy", "--episodes", "3", "--npz", "--out", &npz]);
    assert!(fine(&["inspect", &npz]).contains("3 episodes, 309 steps"));
    let old = folder.path("old.elmur");
    fine(&["collect", "popgym-CountRecallHard", "--episodes", "3", "--rules", "1.0.6", "--out", &old]);
    let about = &rows(&fine(&["inspect", &old, "--json"]))[0];
    assert_eq!(about["spaces"]["action"]["discrete"]["n"], 16);
    let wrapped = folder.path("wrapped.elmur");
    let wrappers = "previous_action,first_step,one_hot,flat_action";
    let task = "popgym-BattleshipEasy";
    fine(&["collect", task, "--episodes", "3", "--noise", "0.5", "--wrappers", wrappers, "--out", &wrapped]);
    let about = &rows(&fine(&["inspect", &wrapped, "--json"]))[0];
    assert_eq!(about["spaces"]["observation"]["box"]["shape"][0], 20);
    assert_eq!(about["spaces"]["action"]["discrete"]["n"], 64);

    let out = folder.path("none");
    mistake(&["collect", "popgym-RepeatFristEasy", "--out", &out], "did you mean `popgym-RepeatFirstEasy`");
    mistake(&["collect", task, "--rules", "1.0.5", "--out", &out], "1.0.6 or 1.0.7");
    mistake(&["collect", task, "--wrappers", "onehot", "--out", &out], "one_hot");
    let pendulum = "popgym-PositionOnlyPendulumEasy";
    mistake(&["collect", pendulum, "--wrappers", "flat_action", "--out", &out], "discrete actions");
    assert!(!Path::new(&out).exists());
}

/// A run that is over in a moment.
const TINY: [&str; 6] = [
    "model.d_model=16",
    "data.episodes=6",
    "train.batch=3",
    "train.batches=2",
    "eval.episodes=2",
    "train.threads=1",
];

#[test]
fn every_family_trains_and_is_evaluated() {
    let folder = Folder::new("families");
    for family in FAMILIES {
        let (task, run) = (format!("popgym-{family}Easy"), folder.path(family));
        fine(&[&["train", task.as_str()], &TINY[..], &["--out", &run]].concat());
        let found = rows(&fine(&["eval", &run, "--episodes", "2", "--json"]));
        assert_eq!(found[1]["env"], format!("{task}-v0"));
        assert!(found[1]["score"].as_f64().unwrap() <= 1.0, "{found:?}");
    }
    assert!(fine(&["eval", &folder.path("Battleship"), "--episodes", "2"]).contains("good play: 0.6"));
}

#[test]
fn plain_data_is_seen_through_the_presets_wrappers() {
    let folder = Folder::new("plain");
    for npz in [false, true] {
        let data = folder.path(if npz { "npz" } else { "plain.elmur" });
        let flags: &[&str] = if npz { &["--npz"] } else { &[] };
        let task = "popgym-MineSweeperEasy";
        fine(&[&["collect", task, "--episodes", "20", "--out", &data], flags].concat());
        let run = folder.path(if npz { "run-npz" } else { "run" });
        fine(&[&["train", task], &TINY[..], &["--data", &data, "--out", &run]].concat());
        fine(&["train", "--resume", &run, "train.batches=3"]);
    }
}

#[test]
fn the_published_choices_train_too() {
    let folder = Folder::new("compat");
    for task in ["popgym-RepeatPreviousEasy-compat", "popgym-PositionOnlyPendulumHard-compat"] {
        let run = folder.path(task);
        fine(&[&["train", task], &TINY[..], &["model.layers=1", "train.epochs=0", "--out", &run]].concat());
        fine(&["eval", &run, "--episodes", "2"]);
    }
}

#[test]
fn presets_are_found_by_task() {
    assert!(fine(&["presets"]).lines().count() < 70);
    assert!(fine(&["inspect", "popgym-ConcentrationHard"]).contains("parameters"));
    let keys = fine(&["inspect", "popgym-BattleshipEasy", "--keys"]);
    assert!(keys.contains("env.wrappers.previous_action=true"), "{keys}");
    assert!(keys.contains("env.wrappers.first_step=true"), "{keys}");
    mistake(&["inspect", "popgym-ConcentratonHard"], "did you mean `popgym-ConcentrationHard`");
    mistake(&["train", "popgym-Concentration"], "popgym-ConcentrationE");
}

#[test]
fn traces_are_verified() {
    let (file, older) = (
        fixture("popgym/popgym-CountRecallEasy.json.gz"),
        fixture("popgym-1.0.6/popgym-CountRecallEasy.json.gz"),
    );
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../elmur-model/tests/golden");
    let model = golden.join("tmaze-small.safetensors");
    // Traces of models and of tasks side by side.
    let found = rows(&fine(&["verify", "--json", &file, model.to_str().unwrap(), &older]));
    let of = |rules: &str| found.iter().find(|row| row["rules"] == rules).unwrap();
    assert!(of("1.0.7")["ok"] == true && of("1.0.6")["ok"] == true && found.len() == 4);
    assert_eq!(of("1.0.7")["episodes"], 4);
    let table = fine(&["verify", &file]);
    assert!(table.contains("popgym-CountRecallEasy") && table.contains("ok"), "{table}");

    // Another reward in the file: exit 1.
    let folder = Folder::new("verify");
    let altered = folder.path("altered.json");
    let plain = Command::new("gzip").args(["-dc", &file]).output().unwrap().stdout;
    let mut json: Value = serde_json::from_slice(&plain).unwrap();
    let reward = json["episodes"][0]["rewards"][3].as_f64().unwrap();
    json["episodes"][0]["rewards"][3] = (reward + 1e-6).into();
    std::fs::write(&altered, json.to_string()).unwrap();
    let output = elmur(&["verify", &file, &altered]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("DIFFERS"), "{}", text(&output));
    // Not a trace; a task that does not exist.
    std::fs::write(&altered, "{}").unwrap();
    mistake(&["verify", &altered], "altered.json");
    json["env"] = "popgym-ChessEasy-v0".into();
    std::fs::write(&altered, json.to_string()).unwrap();
    mistake(&["verify", &altered], "popgym-ChessEasy-v0");
    mistake(&["verify", "/nonexistent.json.gz"], "/nonexistent.json.gz");
}

#[test]
fn environments_are_measured() {
    let quick = ["--rows", "300", "--windows", "1", "--json"];
    let found = rows(&fine(&[&["bench", "envs"], &quick[..]].concat()));
    assert_eq!(found.len(), 16);
    assert!(found.iter().all(|row| row["steps_per_s"].as_f64().unwrap() > 0.0));
    let found = rows(&fine(&[&["bench", "envs", "RepeatFirst", "--threads", "2"], &quick[..]].concat()));
    assert_eq!((found.len(), found[2]["threads"].as_u64()), (3, Some(2)));
    assert!(found[0]["ratio"].as_f64().unwrap() > 0.0);
    mistake(&["bench", "envs", "Chess"], "filter");
    mistake(&["bench", "envs", "--rows", "0"], "rows");
}
