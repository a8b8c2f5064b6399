//! Datasets of other programs on the command line: inspected, converted, learnt from, and policies handed on.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::*;
use serde_json::Value;

fn fixture(name: &str) -> String {
    format!("{}/../elmur-data/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Datasets, their episodes and steps, and the arrays of their `.npz` files.
const DATASETS: [(&str, usize, usize, &[&str]); 8] = [
    ("minari/box-v0", 11, 54, &["obs", "final_obs"]),
    ("minari/dict-v0", 5, 32, &["obs/cards", "obs/image", "obs/pair/0", "obs/pair/1", "obs/state"]),
    ("d4rl/d4rl-writer.hdf5", 9, 174, &["obs"]),
    ("robomimic/robomimic.hdf5", 11, 72, &["obs/agentview_image", "obs/object", "obs/robot0_eef_pos"]),
    ("lerobot-v3/state", 4, 39, &["obs/observation.grid", "obs/observation.state"]),
    ("lerobot-v3/av1", 4, 42, &["obs/observation.images.top", "obs/observation.state"]),
    ("lerobot-v21/av1", 4, 42, &["obs/observation.images.top", "obs/observation.state"]),
    ("npz/mikasa", 3, 20, &["obs"]),
];

/// Names of the arrays of an `.npz` file, from the directory at its end.
fn arrays(path: &str) -> Vec<String> {
    let bytes = std::fs::read(path).unwrap();
    let archive = rawzip::ZipArchive::from_slice(&bytes[..]).unwrap();
    let mut entries = archive.entries();
    let mut names = Vec::new();
    while let Some(entry) = entries.next_entry().unwrap() {
        let name = String::from_utf8(entry.file_path().as_bytes().to_vec()).unwrap();
        names.push(name.strip_suffix(".npy").unwrap().to_owned());
    }
    names
}

#[test]
fn datasets_of_other_programs_are_inspected_and_converted() {
    let folder = Folder::new("outside");
    for (i, (name, episodes, steps, observations)) in DATASETS.into_iter().enumerate() {
        let (source, native, npz) =
            (fixture(name), folder.path(&format!("{i}.elmur")), folder.path(&format!("npz-{i}")));
        let counts = format!("{episodes} episodes, {steps} steps");
        assert!(fine(&["inspect", &source]).contains(&counts), "{name}: {}", fine(&["inspect", &source]));
        assert!(fine(&["convert", &source, &native]).contains(&counts), "{name}");
        assert!(fine(&["inspect", &native]).contains(&counts));
        assert!(fine(&["convert", &native, &npz, "--npz"]).contains(&counts));
        assert_eq!(std::fs::read_dir(&npz).unwrap().count(), episodes);
        assert!(fine(&["inspect", &npz]).contains(&counts));
        let have = arrays(&format!("{npz}/train_data_{}.npz", episodes - 1));
        for wanted in observations.iter().chain(&["action", "reward", "done"]) {
            assert!(have.iter().any(|name| name == wanted), "{name}: {have:?}");
        }
        // Straight to .npz is the same as by way of a native file.
        let straight = folder.path(&format!("straight-{i}"));
        fine(&["convert", &source, &straight, "--npz"]);
        let file = format!("train_data_{}.npz", episodes - 1);
        assert_eq!(
            std::fs::read(format!("{npz}/{file}")).unwrap(),
            std::fs::read(format!("{straight}/{file}")).unwrap()
        );
    }
    let native = folder.path("0.elmur");
    mistake(&["convert", &fixture("minari/box-v0"), &native], "exists already");
    mistake(&["convert", &native, &native], "write to another name");
    mistake(&["convert", &fixture("npz/refuse-object.npz"), &folder.path("no.elmur")], "refuse-object.npz");
    assert!(!std::path::Path::new(&folder.path("no.elmur")).exists());
    let part = folder.path("part.elmur");
    let said = fine(&[
        "convert",
        &fixture("robomimic/robomimic.hdf5"),
        &part,
        "--mask",
        "train",
        "--keys",
        "object",
    ]);
    assert!(said.contains("5 episodes"), "{said}");
    mistake(
        &["convert", &fixture("minari/box-v0"), &folder.path("x"), "--keys", "state"],
        "no key \"state\"",
    );
    let row: Value =
        serde_json::from_str(&fine(&["bench", "read", &part, "--json", "--rounds", "1"])).unwrap();
    assert_eq!((row["episodes"].as_u64(), row["numbers_mb_per_s"].as_f64().unwrap() > 0.0), (Some(5), true));
}

#[test]
fn a_policy_learns_from_several_observations_and_is_handed_on() {
    let folder = Folder::new("outside-train");
    let run = folder.path("run");
    let data = fixture("lerobot-v3/av1");
    let settings =
        ["model.d_model=16", "train.batch=4", "train.batches=4", "data.held_out=0.25", "eval.every=2"];
    let said = fine(&[&["train", "small", "--data", &data, "--out", &run], &settings[..]].concat());
    assert!(!said.is_empty());
    let about: Value = serde_json::from_str(&fine(&["inspect", &run, "--json"])).unwrap();
    let encoders = about["config"]["model"]["observation"].as_array().unwrap();
    assert!(encoders[0].get("image").is_some() && encoders[1].get("vector").is_some(), "{encoders:?}");
    // Some of the observations; the evaluation asks for the same.
    let state = folder.path("state");
    let keys = "data.keys=observation.state";
    fine(&[&["train", "small", "--data", &data, "--out", &state, keys], &settings[..]].concat());
    assert!(fine(&["eval", &state, "--data", &data]).contains("squared error"));
    // For a hub: a checkpoint with a card, which replaces nothing unasked.
    let hub = folder.path("hub");
    fine(&["export", "hub", &state, "--out", &hub, "--license", "mit", "--name", "reach"]);
    let card = std::fs::read_to_string(format!("{hub}/README.md")).unwrap();
    for part in [
        "---\nlibrary_name: elmur\nlicense: \"mit\"\n",
        "pipeline_tag: robotics",
        "model-index:\n- name: \"reach\"",
        "- type: \"mean squared error\"",
        "# reach",
        "| validation | mean squared error |",
        "elmur eval . --data RECORDINGS",
    ] {
        assert!(card.contains(part), "{part}: {card}");
    }
    let config = std::fs::read_to_string(format!("{hub}/train_config.json")).unwrap();
    assert!(config.contains("\"file\": \"av1\""), "the place of the data stays private: {config}");
    assert!(fine(&["inspect", &hub]).contains("parameters"));
    // As the card says, with the data's keys that it was trained on.
    assert!(fine(&["eval", &hub, "--data", &data]).contains("squared error"));
    mistake(&["export", "hub", &state, "--out", &hub], "exists already");
    fine(&["export", "hub", &run, "--out", &hub, "--force", "--last"]);
    mistake(&["export", "hub", &data, "--out", &folder.path("none")], "run");
}
