//! Files of an earlier version (b483fae) load and give the numbers they gave: datasets, checkpoints, runs.
//!
//! `tests/earlier` holds two datasets and three small runs: ELMUR on T-Maze with experts and dropout, on
//! MineSweeper with several leaves and trained writes, on Autoencode with the published choices. Beside each
//! run lie the rows of metrics that the earlier version wrote when it resumed the run, and the returns of its
//! best checkpoint on test episodes.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};

use elmur_base::Stop;
use elmur_data::{earlier_fingerprint, open};
use elmur_envs::Registry;
use elmur_model::Checkpoint;
use elmur_model::session::Weights;
use elmur_train::{Ended, Evaluation, RunFolder, Seeds, Trainer, evaluate, train};
use serde_json::Value;

const RUNS: [&str; 3] = ["maze", "mines", "auto"];

fn earlier(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/earlier").join(name)
}

fn rows(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The same keys and numbers. Products are rounded otherwise on machines with other instructions.
fn same(got: &Value, want: &Value, what: &str) {
    for (key, want) in want.as_object().unwrap() {
        let (got, want) = (got[key].as_f64().unwrap(), want.as_f64().unwrap());
        assert!((got - want).abs() <= 1e-4 * want.abs().max(1.0), "{what}, {key}: {got}, then {want}");
    }
}

#[test]
fn earlier_datasets_are_read() {
    for (file, episodes, steps, checksum) in
        [("maze.elmur", 12, 62, 801_102_474), ("mines.elmur", 6, 84, 20_830_053)]
    {
        let data = open(earlier(file), None).unwrap();
        assert_eq!((data.episodes(), data.summary().unwrap().steps), (episodes, steps));
        assert_eq!(earlier_fingerprint(&*data).unwrap(), checksum);
    }
    let mines = open(earlier("mines.elmur"), None).unwrap();
    assert_eq!(mines.metadata()["wrappers"], "previous_action, flat_action");
}

#[test]
fn earlier_configs_make_the_same_runs_from_the_start() {
    for name in RUNS {
        let config = RunFolder::open(&earlier(name)).unwrap().config().unwrap();
        let dataset = config.prepare(&Registry::builtin(), true).unwrap().data;
        let mut trainer = Trainer::new(&config, &dataset, &elmur_engine::Pool::new(2)).unwrap();
        for row in rows(&earlier(name).join("metrics.jsonl")).iter().filter(|row| row["loss"].is_number()) {
            let report = trainer.step().unwrap();
            let got = serde_json::json!({
                "batch": report.batch, "epoch": report.epoch, "loss": report.loss, "action_loss": report.action_loss,
                "accuracy": report.accuracy, "gradient_norm": report.gradient_norm, "lr": report.lr,
            });
            same(&got, row, &format!("{name}, batch {}", report.batch));
        }
    }
}

#[test]
fn earlier_runs_are_resumed() {
    for name in RUNS {
        let folder = std::env::temp_dir().join(format!("elmur-earlier-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        copy(&earlier(name), &folder);
        let run = RunFolder::open(&folder).unwrap();
        let mut config = run.config().unwrap();
        let want = rows(&folder.join("resumed.jsonl"));
        config.train.batches = want.iter().filter_map(|row| row["batch"].as_u64()).max();
        let prepared = config.prepare(&Registry::builtin(), true).unwrap();
        let ended = train(&run, &prepared, true, &Stop::default(), &mut |_| {}).unwrap();
        assert_eq!(ended, Ended::Finished);
        let got = rows(&run.metrics());
        assert_eq!(got.len(), want.len(), "{name}");
        for (got, want) in got.iter().zip(&want) {
            same(got, want, name);
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

#[test]
fn earlier_checkpoints_act_as_they_did() {
    for (name, best) in RUNS.into_iter().zip(["00000012", "00000003", "00000004"]) {
        let path = earlier(name);
        let checkpoint = Checkpoint::load(&path.join("checkpoints").join(best)).unwrap();
        let config = RunFolder::open(&path).unwrap().config().unwrap();
        let text = std::fs::read_to_string(path.join("expected.json")).unwrap();
        let expected: Value = serde_json::from_str(&text).unwrap();
        for (sample, key) in [(false, "greedy"), (true, "sampled")] {
            let evaluation = Evaluation {
                policy: &checkpoint.config,
                params: &checkpoint.params,
                env: &config.validation_environment(&Registry::builtin()).unwrap().unwrap(),
                episodes: 20,
                seeds: Seeds::Test(0),
                target_return: None,
                sample,
                threads: Some(2),
                device: checkpoint.params.device(),
                weights: Weights::F32,
            };
            let got = evaluate(&evaluation, &Stop::default(), &|_| {}).unwrap().returns().mean;
            let want = expected[key].as_f64().unwrap();
            // One near tie that falls the other way on another machine changes one of 20 episodes a little.
            assert!((got - want).abs() < 0.02, "{name}, {key}: {got}, then {want}");
        }
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(|e| e.unwrap()) {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}
