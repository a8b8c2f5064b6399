//! The programs in `examples` do what they say.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::path::PathBuf;
use std::process::Command;

use common::{Folder, text};

/// An example beside the program under test. `cargo test` builds both, but with `--test examples` not the
/// examples.
fn example(name: &str) -> PathBuf {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_elmur"));
    let path = program.parent().unwrap().join("examples").join(name);
    path.with_extension(std::env::consts::EXE_EXTENSION)
}

/// Runs an example in a folder; what it printed. It must succeed.
fn run(name: &str, folder: &Folder, args: &[&str]) -> String {
    let path = example(name);
    let output = Command::new(&path).args(args).current_dir(&folder.0).output();
    let output = output.unwrap_or_else(|error| {
        panic!("{}: {error}; build it with `cargo build -p elmur-cli --examples`", path.display())
    });
    assert!(output.status.success(), "{name} {args:?}: {}", text(&output));
    String::from_utf8(output.stdout).unwrap()
}

/// The numbers that follow a word in a program's output.
fn numbers_after(word: &str, output: &str) -> Vec<f64> {
    let number = |rest: &str| rest.split_whitespace().next().unwrap().parse().unwrap();
    output.split(word).skip(1).map(number).collect()
}

#[test]
fn an_environment_of_ones_own_is_learnt_far_beyond_its_demonstrations() {
    let folder = Folder::new("own-env");
    let output = run("own_env", &folder, &[]);
    let evaluated = output.split_once("bell after").unwrap().1;
    let rates = numbers_after("success rate ", evaluated);
    assert!(rates.len() == 2 && rates.iter().all(|rate| *rate > 0.9), "{output}");
    for file in ["curve.svg", "curve.png", "config.json", "checkpoints/best/model.safetensors"] {
        assert!(folder.0.join("out/bell").join(file).is_file(), "{file}");
    }
}

#[test]
fn the_command_line_knows_an_environment_of_ones_own() {
    let folder = Folder::new("own-cli");
    let elmur = |line: &str| run("own_env", &folder, &line.split(' ').collect::<Vec<_>>());
    elmur("collect bell --episodes 300 --set wait=8 --out bell.elmur");
    assert!(elmur("inspect bell.elmur").contains("bell"));
    let small = "model.layers=1 model.d_model=16 model.segment_length=10 train.segments=1 train.batch=32 \
                 train.lr=5e-3";
    let changes = format!("env=bell env.wait=8 {small} train.batches=150 eval.every=50 eval.target=1");
    elmur(&format!("train tmaze-quick {changes} --data bell.elmur --out run"));
    let row = elmur("eval run --set wait=4,8 --episodes 50 --json");
    let scores = numbers_after("\"score\":", &row.replace([',', '}'], " "));
    assert!(scores.len() >= 2 && scores.iter().all(|score| *score > 0.9), "{row}");

    let output = Command::new(example("own_env")).args(["collect", "bel", "--out", "x"]).output().unwrap();
    assert!(text(&output).contains("did you mean `bell`"), "{}", text(&output));
}

#[test]
fn recordings_in_memory_are_learnt() {
    let output = run("own_data", &Folder::new("own-data"), &[]);
    let accuracy = numbers_after("accuracy ", &output);
    assert!(accuracy.len() == 1 && accuracy[0] > 0.95, "{output}");
}

#[test]
fn a_control_loop_acts_resets_rows_and_survives_a_restart() {
    let folder = Folder::new("act");
    let output = run("act", &folder, &[]);
    for part in
        ["robot 0 begins another episode", "at times [11, 41, 151]", "300 steps of 3 robots", "p50", "p99"]
    {
        assert!(output.contains(part), "{part}: {output}");
    }
    // A checkpoint by its folder.
    let policy = elmur::model::presets::model("tmaze-quick").unwrap();
    let params = elmur::model::init::parameters(policy.architecture(), 0).unwrap();
    elmur::model::Checkpoint { config: policy, params }.save(&folder.0.join("policy")).unwrap();
    let again = run("act", &folder, &["policy", "120", "1000"]);
    assert!(again.contains("120 steps of 3 robots at 1000 per second"), "{again}");
}
