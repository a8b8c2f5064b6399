//! The command line as a user meets it.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn elmur(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_elmur")).args(args).output().unwrap()
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn rows(output: &Output) -> Vec<Value> {
    out(output).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../elmur-model/tests/golden").join(name)
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("elmur-cli-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn verify_accepts_the_published_traces_and_refuses_altered_ones() {
    let file = golden("tmaze-small.safetensors");
    let output = elmur(&["verify", "--json", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let lines = rows(&output);
    assert!(lines[0]["dtype"] == "f64" && lines[0]["trained"].as_f64().unwrap() < 1e-9);
    assert!(lines[1]["dtype"] == "f32" && lines[1]["gradients"].as_f64().unwrap() < 2e-4);

    // Another lambda in the json makes another model: errors above tolerance, exit 1.
    let folder = folder("verify");
    let copy = folder.join("case.safetensors");
    std::fs::copy(&file, &copy).unwrap();
    let json = std::fs::read_to_string(golden("tmaze-small.json")).unwrap();
    let json = json.replace("\"lru_blend_alpha\": 0.05", "\"lru_blend_alpha\": 0.06");
    std::fs::write(folder.join("case.json"), json).unwrap();
    let output = elmur(&["verify", copy.to_str().unwrap()]);
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(out(&output).contains("ABOVE"), "{}", out(&output));
}

#[test]
fn inspect_tells_sizes_and_horizons() {
    let output = elmur(&["inspect", "tmaze"]);
    assert_eq!(output.status.code(), Some(0));
    let text = out(&output);
    assert!(
        text.contains("2110844 parameters") && text.contains("in the published layout: 2111740"),
        "{text}"
    );
    assert!(text.contains("halves in 270 steps"), "{text}");
    assert!(out(&elmur(&["presets"])).contains("tmaze-quick"));
}

#[test]
fn published_weights_become_a_checkpoint() {
    let folder = folder("import");
    let mut config = rows(&elmur(&["inspect", "tmaze", "--json"]))[0]["config"].take();
    config["d_model"] = 16.into();
    config["segment_length"] = 4.into();
    config["memory"]["max_distance"] = 32.into();
    config["ffn"]["moe"]["routed_d_ff"] = 8.into();
    config["ffn"]["moe"]["shared_d_ff"] = 24.into();
    let file = folder.join("config.json");
    std::fs::write(&file, config.to_string()).unwrap();
    let target = folder.join("checkpoint");
    let weights = golden("tmaze-small.safetensors");
    let run = |config: &str| {
        let weights = weights.to_str().unwrap();
        elmur(&["import", weights, "--config", config, "--force", "--out", target.to_str().unwrap()])
    };
    let output = run(file.to_str().unwrap());
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let output = elmur(&["inspect", target.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    // The wrong config: a cause, exit 2, and the checkpoint that was there still loads.
    let output = run("tmaze");
    assert_eq!(output.status.code(), Some(2));
    assert!(err(&output).contains("published weights: expected `"), "{}", err(&output));
    assert_eq!(elmur(&["inspect", target.to_str().unwrap()]).status.code(), Some(0));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn mistakes_exit_with_2_and_one_line() {
    for args in [
        &["inspect", "tmase"][..],
        &["verify", "/nonexistent.safetensors"],
        &["bench", "step", "--preset", "tmase"],
        &["bench", "train", "--preset", "tmaze-quick", "train.precision=bf16"],
        &["import", "/nonexistent", "--config", "tmaze", "--out", "/nonexistent/out"],
    ] {
        let output = elmur(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert_eq!(err(&output).lines().count(), 1, "{}", err(&output));
        assert!(err(&output).starts_with("error: "));
    }
    let output = elmur(&["inspekt"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(err(&output).contains("inspect"), "a suggestion: {}", err(&output));
}

#[test]
fn benchmarks_print_json_lines() {
    let output = elmur(&["bench", "block", "--json", "--rounds", "1"]);
    assert_eq!(output.status.code(), Some(0), "{}", err(&output));
    let lines = rows(&output);
    assert!(lines[0]["gemm_fraction"].as_f64().unwrap() > 0.0);
    assert!(lines[1]["p99_us"].as_f64().unwrap() >= lines[1]["p50_us"].as_f64().unwrap());
    let output =
        elmur(&["bench", "step", "--json", "--segments", "1", "--batch", "2", "--preset", "tmaze-quick"]);
    assert_eq!(rows(&output)[0]["work"], "step B=2");
    let output = elmur(&["bench", "train", "--json", "--batches", "1", "--preset", "tmaze-quick"]);
    assert_eq!(rows(&output)[0]["work"], "train");
}
