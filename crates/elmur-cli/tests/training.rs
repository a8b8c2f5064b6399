//! Collect, train, evaluate and look, as a user does it.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Folder, fine, mistake, program, text};
use serde_json::Value;

/// A tiny T-Maze run.
const TINY: [&str; 9] = [
    "model.d_model=16",
    "model.segment_length=3",
    "env.length=9",
    "data.episodes=100",
    "train.batch=8",
    "train.epochs=0",
    "train.batches=6",
    "eval.episodes=10",
    "eval.length=9",
];

fn train(out: &str, more: &[&str]) -> Vec<String> {
    let all = [&["train", "tmaze-quick"], &TINY[..], more, &["--out", out]].concat();
    all.into_iter().map(str::to_owned).collect()
}

fn strs(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

#[test]
fn collect_inspect_train_eval_and_plot() {
    let folder = Folder::new("whole");
    let data = folder.path("maze.elmur");
    let said = fine(&["collect", "tmaze", "--episodes", "100", "--length", "9", "--out", &data]);
    assert!(said.contains("100 episodes") && said.contains("mean return 1.00"), "{said}");
    let about: Value = serde_json::from_str(&fine(&["inspect", &data, "--json"])).unwrap();
    assert_eq!(
        (about["episodes"].as_u64(), about["length"]["max"].as_f64()),
        (Some(100), Some(8.0)),
        "{about}"
    );
    assert_eq!(about["metadata"]["env"], "tmaze");
    assert!(fine(&["inspect", &data]).contains("terminated"));

    let run = folder.path("run");
    let args = train(&run, &["--data", &data, "--seed", "3"]);
    assert!(fine(&strs(&args)).contains("elmur eval"));
    let about: Value = serde_json::from_str(&fine(&["inspect", &run, "--json"])).unwrap();
    assert_eq!((about["batches"].as_u64(), about["config"]["train"]["seed"].as_u64()), (Some(6), Some(3)));
    assert!(fine(&["inspect", &run]).contains("a run of 6 batches"));
    assert!(fine(&["inspect", &format!("{run}/checkpoints/best")]).contains("parameters"));
    let events = std::fs::read_dir(Path::new(&run).join("tensorboard")).unwrap().count();
    assert_eq!(events, 1);

    let rows = fine(&["eval", &run, "--lengths", "9,12", "--episodes", "20", "--json"]);
    let rows_of = |text: &str| text.lines().map(|l| serde_json::from_str(l).unwrap()).collect::<Vec<Value>>();
    let found = rows_of(&rows);
    assert_eq!(found.len(), 4);
    assert_eq!((found[0]["train_length"].as_u64(), found[2]["length"].as_u64()), (Some(9), Some(12)));
    assert_eq!(
        rows,
        fine(&["eval", &run, "--lengths", "9,12", "--episodes", "20", "--json", "--threads", "1"])
    );
    let two = rows_of(&fine(&["eval", &run, &run, "--episodes", "20", "--json"]));
    assert_eq!((two[2]["runs"].as_u64(), two[2]["sem_over"].as_str()), (Some(2), Some("runs")));

    let file = folder.path("rows.jsonl");
    std::fs::write(&file, rows).unwrap();
    for what in ["success", "heat-map", "run"] {
        let from = if what == "run" { &run } else { &file };
        let picture = folder.path(what);
        fine(&["plot", what, from, "--out", &picture]);
        assert!(std::fs::read_to_string(format!("{picture}.svg")).unwrap().contains("</svg>"));
        assert!(std::fs::read(format!("{picture}.png")).unwrap().starts_with(b"\x89PNG"));
    }
}

#[test]
fn npz_datasets_are_written_and_trained_on() {
    let folder = Folder::new("npz");
    let data = folder.path("npz");
    fine(&["collect", "cartpole", "--episodes", "3", "--npz", "--out", &data]);
    assert!(fine(&["inspect", &data]).contains("3 episodes, 1500 steps"));
    let run = folder.path("run");
    fine(&[
        "train",
        "cartpole",
        "--data",
        &data,
        "train.batch=4",
        "train.epochs=0",
        "train.batches=2",
        "eval.episodes=2",
        "model.d_model=16",
        "model.segment_length=5",
        "--out",
        &run,
    ]);
}

#[test]
fn the_demo_leaves_a_checkpoint_and_pictures() {
    let folder = Folder::new("demo");
    let out = folder.path("demo");
    let said = fine(&["demo", "--out", &out, "--longest", "30"]);
    assert!(said.contains("30        100   100.0%"), "{said}");
    for name in
        ["success.svg", "success.png", "slots.svg", "slots.png", "demonstrations.elmur", "checkpoints/best"]
    {
        assert!(Path::new(&out).join(name).exists(), "{name}");
    }
    assert!(fine(&["eval", &out, "--lengths", "50", "--episodes", "20"]).contains("1.000"));
}

/// A run whose process is told to stop goes on as if nothing had happened.
#[test]
#[cfg(unix)]
fn signals_save_and_exit_with_their_number() {
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let folder = Folder::new(&format!("signal-{signal}"));
        let (whole, parts) = (folder.path("whole"), folder.path("parts"));
        let more = ["train.batches=3000", "train.checkpoint_every=3000"];
        let child = program()
            .args(train(&parts, &more))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_for(&Path::new(&parts).join("metrics.jsonl"));
        let killed =
            Command::new("kill").args([format!("-{signal}"), child.id().to_string()]).status().unwrap();
        assert!(killed.success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", text(&output));
        assert!(text(&output).contains("--resume"), "{}", text(&output));
        // The batch it got to, then two more: the same bytes as without the stop.
        let last = std::fs::read_link(Path::new(&parts).join("checkpoints/last")).unwrap();
        let batches = last.to_str().unwrap().parse::<u64>().unwrap() + 2;
        let end = format!("train.batches={batches}");
        fine(&["train", "--resume", &parts, &end]);
        fine(&strs(&train(&whole, &[more[1], &end])));
        let name = format!("checkpoints/{batches:08}/state.safetensors");
        let bytes = |run: &str| std::fs::read(Path::new(run).join(&name)).unwrap();
        assert!(bytes(&parts) == bytes(&whole), "{signal}");
    }
}

fn wait_for(path: &Path) {
    let start = Instant::now();
    while !std::fs::metadata(path).is_ok_and(|m| m.len() > 500) {
        assert!(start.elapsed() < Duration::from_secs(60), "{} never came", path.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A process killed while saving leaves the checkpoint before.
#[test]
#[cfg(unix)]
fn a_killed_process_leaves_a_whole_checkpoint() {
    let folder = Folder::new("kill");
    let run = folder.path("run");
    for round in 0..5 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elmur"));
        if round == 0 {
            command.args(train(&run, &["train.batches=100000", "train.checkpoint_every=1", "eval.every=0"]));
        } else {
            command.args(["train", "--resume", &run]);
        }
        let mut child: Child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_for(&Path::new(&run).join("metrics.jsonl"));
        std::thread::sleep(Duration::from_millis(150 + 37 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        fine(&["inspect", &format!("{run}/checkpoints/last")]);
    }
    let rows = std::fs::read_to_string(Path::new(&run).join("metrics.jsonl")).unwrap();
    assert!(rows.lines().count() > 5);
}

#[test]
fn mistakes_are_named_and_nothing_is_written() {
    let folder = Folder::new("mistakes");
    let out = folder.path("out");
    mistake(&["train", "tmase", "--out", &out], "did you mean `tmaze`");
    mistake(&["train", "tmaze", "train.lrr=1", "--out", &out], "did you mean `train.lr`");
    mistake(&["train", "tmaze", "train.lr=fast", "--out", &out], "train.lr");
    mistake(&["train", "tmaze", "env.length=2", "--out", &out], "at least 3");
    mistake(&["train", "remember-color", "--out", &out], "data.file");
    mistake(&["train", "tmaze", "data.noise=2", "--out", &out], "data.noise");
    for key in ["train.device", "eval.device"] {
        mistake(&["train", "tmaze", &format!("{key}=gpu"), "--out", &out], key);
        if cfg!(not(feature = "cuda")) {
            mistake(&["train", "tmaze", &format!("{key}=cuda"), "--out", &out], "--features cuda");
        }
    }
    mistake(&["train", "--out", &out], "a preset");
    mistake(&["train", "tmaze", "--data", "/nonexistent.elmur", "--out", &out], "/nonexistent.elmur");
    mistake(&["train", "--resume", "/nonexistent"], "not the folder of a run");
    mistake(&["collect", "tmase", "--out", &out], "did you mean `tmaze`");
    mistake(&["collect", "tmaze", "--length", "2", "--out", &out], "at least 3");
    mistake(&["collect", "tmaze", "--episodes", "0", "--out", &out], "--episodes");
    mistake(&["collect", "cartpole", "--noise", "1", "--out", &out], "noise");
    mistake(&["eval", "/nonexistent"], "/nonexistent");
    mistake(&["inspect", "tmase"], "did you mean `tmaze`");
    for huge in [
        "train.batch=1000000000000",
        "train.segments=9223372036854775807",
        "eval.episodes=18446744073709551615",
        "train.threads=1000000",
        "data.episodes=1000000000000",
        "train.schedule.end_factor=-50",
        "train.lr=NaN",
    ] {
        mistake(&["train", "tmaze", huge, "--out", &out], huge.split('=').next().unwrap());
    }
    assert!(!Path::new(&out).exists());

    // Data of other spaces; empty and damaged data; a place that cannot be written.
    let pole = folder.path("pole.elmur");
    fine(&["collect", "cartpole", "--episodes", "1", "--out", &pole]);
    let kept = ["train", "tmaze", "model.action.categorical.count=4", "--data", &pole, "--out", &out];
    mistake(&kept, "dataset: expected actions");
    let bytes = std::fs::read(&pole).unwrap();
    for (name, damaged) in
        [("empty", vec![]), ("flipped", flipped(&bytes)), ("words", b"not a dataset".to_vec())]
    {
        let path = folder.path(&format!("{name}.elmur"));
        std::fs::write(&path, damaged).unwrap();
        mistake(&["train", "tmaze", "--data", &path, "--out", &out], name);
        mistake(&["inspect", &path], name);
    }
    let file = folder.path("file");
    std::fs::write(&file, "in the way").unwrap();
    mistake(&["collect", "tmaze", "--episodes", "1", "--out", &file], "not a dataset");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "in the way");
    mistake(&["train", "tmaze", "--out", &format!("{file}/run")], "file/run");
    mistake(&["collect", "tmaze", "--episodes", "1", "--out", &format!("{file}/x.elmur")], "file/x.elmur");
    assert!(!Path::new(&out).exists());

    // A checkpoint of another environment, and of another config.
    let run = folder.path("run");
    fine(&strs(&train(&run, &[])));
    mistake(&["eval", &run, "--env", "cartpole"], "expected actions");
    mistake(&["eval", &run, "--lengths", "2"], "at least 3");
    mistake(&["eval", &run, "--episodes", "18446744073709551615"], "episodes");
    mistake(&["train", "--resume", &run, "model.layers=1", "train.batches=9"], "not the run's");
    mistake(&strs(&train(&run, &[])), "--resume");
    // Weights to begin with that are not there, and of another policy.
    let begin = |with: &str| format!("train.begin_with={with}");
    mistake(&strs(&train(&out, &[&begin("/nonexistent")])), "expected a run with a checkpoint");
    mistake(&strs(&train(&out, &[&begin(&file)])), "expected a run with a checkpoint");
    mistake(&strs(&train(&out, &[&begin(&run), "model.layers=1"])), "with the run's parameters");
    mistake(&["train", "--resume", &run, &begin(&run), "train.batches=9"], "train.begin_with");
    assert!(!Path::new(&out).exists());
    // The run itself, which is replaced: its weights are read before it goes.
    mistake(&strs(&train(&run, &[&begin("/nonexistent"), "--force"])), "expected a run with a checkpoint");
    fine(&strs(&train(&run, &[&begin(&run), "--force"])));
    let model = format!("{run}/checkpoints/best/model.safetensors");
    let bytes = std::fs::read(&model).unwrap();
    std::fs::write(&model, &bytes[..bytes.len() / 2]).unwrap();
    mistake(&["eval", &run], "model.safetensors");
}

fn flipped(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    bytes
}

#[test]
fn completions_and_keys_are_printed() {
    assert!(fine(&["completions", "bash"]).contains("_elmur"));
    assert!(fine(&["completions", "zsh"]).contains("#compdef elmur"));
    let keys = fine(&["inspect", "tmaze", "--keys"]);
    assert!(keys.contains("train.lr=") && keys.contains("model.memory.lambda=0.05"), "{keys}");
}
