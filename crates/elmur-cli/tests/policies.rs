//! Policies by name, from the command line: trained, evaluated, inspected, measured, and mistaken for others.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::path::Path;
use std::process::Command;

use common::{Folder, elmur, fine, mistake, refused, text};
use serde_json::Value;

fn rows(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A run that is over in a moment, whatever the policy.
const TINY: [&str; 7] = [
    "model.d_model=16",
    "env.length=9",
    "data.episodes=40",
    "train.batch=8",
    "train.batches=3",
    "eval.episodes=4",
    "train.threads=1",
];

/// Further settings of tiny policies.
fn tiny(policy: &str) -> &'static [&'static str] {
    match policy.trim_end_matches("-compat") {
        "rate" | "rmt" | "trxl" | "dt" => &["model.layers=1", "model.heads=2", "model.d_head=8"],
        "tt" => &["model.plan.beam=2", "model.plan.horizon=2", "model.layers=1", "model.bins=8"],
        _ => &[],
    }
}

fn train(policy: &str, out: &str) -> String {
    let name = format!("policy={policy}");
    let args = [&["train", "tmaze-quick", &name, "eval.length=9", "--out", out], &TINY[..], tiny(policy)];
    fine(&args.concat())
}

/// Every policy that `elmur presets` lists.
fn policies() -> Vec<String> {
    let rows = rows(&fine(&["presets", "--json"]));
    rows.iter().filter_map(|row| row["policy"].as_str().map(str::to_owned)).collect()
}

/// Whether a policy is for continuous actions only.
fn for_numbers(policy: &str) -> bool {
    ["diffusion", "diffusion-compat", "cql-continuous"].contains(&policy)
}

#[test]
fn every_policy_trains_resumes_and_is_evaluated() {
    let folder = Folder::new("policies");
    for policy in policies() {
        let run = folder.path(&policy);
        if for_numbers(&policy) {
            let name = format!("policy={policy}");
            mistake(&["train", "tmaze-quick", &name, "--out", &run], "continuous actions");
            continue;
        }
        train(&policy, &run);
        fine(&["train", "--resume", &run, "train.batches=4"]);
        let found = rows(&fine(&["eval", &run, "--episodes", "4", "--json"]));
        assert_eq!((found[1]["env"].as_str(), found[1]["episodes"].as_u64()), (Some("tmaze"), Some(4)));
        let score = found[1]["score"].as_f64().unwrap();
        assert!((0.0..=1.0).contains(&score), "{policy}: {found:?}");
    }
}

/// Recordings without an environment: encoders and head follow from them, and policies are judged on some of
/// them, those that plan by what they would have done.
#[test]
fn every_policy_learns_from_recordings_and_is_judged_on_them() {
    let folder = Folder::new("recordings");
    let data = folder.path("data");
    fine(&["collect", "tmaze", "--episodes", "20", "--length", "9", "--npz", "--out", &data]);
    for policy in policies().iter().filter(|policy| !for_numbers(policy) && !policy.ends_with("-compat")) {
        let (name, run) = (format!("policy={policy}"), folder.path(policy));
        let settings = ["model.d_model=16", "train.batch=4", "train.batches=2", "train.threads=1"];
        let args = [&["train", "small", &name, "--data", &data, "--out", &run], &settings[..], tiny(policy)];
        fine(&args.concat());
        let found = rows(&fine(&["eval", &run, "--data", &data, "--json"]));
        assert_eq!(
            (found[0]["measure"].as_str(), found[0]["episodes"].as_u64()),
            (Some("accuracy"), Some(20))
        );
        assert!((0.0..=1.0).contains(&found[0]["score"].as_f64().unwrap()), "{policy}: {found:?}");
    }
}

/// The same with actions that are numbers, in an environment and on recordings.
#[test]
fn every_policy_for_numbers_learns_to_give_them() {
    let folder = Folder::new("numbers");
    let task = "popgym-PositionOnlyPendulumEasy";
    let data = folder.path("data.elmur");
    fine(&["collect", task, "--episodes", "6", "--out", &data]);
    let small = [
        "model.denoiser={\"unet\":{\"widths\":[8,8]}}",
        "model.sampler={\"ddim\":2}",
        "model.diffusion_steps=4",
        "model.step_embed=4",
    ];
    let settings = ["train.batch=4", "train.batches=2", "eval.episodes=2", "train.threads=1"];
    for (policy, more) in [
        ("rate", &["model.d_model=16", "model.layers=1", "model.heads=2", "model.d_head=8"][..]),
        ("mlp", &[]),
        ("cql", &["model.hidden=[8]", "model.candidates=2"]),
        ("diffusion", &small),
        ("dp-compat", &small),
    ] {
        let (name, run, judged) = (format!("policy={policy}"), folder.path(policy), folder.path("judged"));
        fine(&[&["train", task, &name, "--data", &data, "--out", &run], &settings[..], more].concat());
        let found = rows(&fine(&["eval", &run, "--episodes", "2", "--json"]));
        assert_eq!(found[1]["measure"], "return", "{policy}: {found:?}");
        // Without an environment the recordings tell which kind of actions there are.
        let small = ["train", "small", &name, "--data", &data, "--out", &judged, "--force"];
        fine(&[&small, &settings[..], more].concat());
        let found = rows(&fine(&["eval", &judged, "--data", &data, "--json"]));
        assert_eq!(found[0]["measure"], "mean_squared_error");
        assert!(found[0]["score"].as_f64().unwrap() > 0.0, "{policy}: {found:?}");
    }
    let tmaze = folder.path("maze.elmur");
    fine(&["collect", "tmaze", "--episodes", "6", "--out", &tmaze]);
    let out = folder.path("none");
    let own = |policy: &'static str, data: &str, part: &str| {
        refused(&["train", "small", policy, "--data", data, "--out", &out], &[part]);
    };
    own("policy=dp", &tmaze, "expected continuous actions");
    own("policy=cql-lstm", &data, "cql_continuous is for continuous actions");
    assert!(!Path::new(&out).exists());
}

#[test]
fn runs_are_named_after_their_policy() {
    let folder = Folder::new("named");
    let args = [&["train", "tmaze-quick", "policy=lstm"], &TINY[..], &["eval.length=9"]].concat();
    let output =
        Command::new(env!("CARGO_BIN_EXE_elmur")).args(&args).current_dir(&folder.0).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(folder.0.join("out/tmaze-quick-bc-lstm-0/config.json").is_file());
}

#[test]
fn a_misspelt_policy_is_answered_with_the_nearest() {
    mistake(&["train", "tmaze", "policy=lstn"], "did you mean `lstm`");
    mistake(&["train", "tmaze", "polcy=dt"], "did you mean `policy`");
    mistake(&["inspect", "tmaze", "policy=bc-lstn", "--keys"], "did you mean `bc-lstm`");
    mistake(&["bench", "step", "--policy", "dtt"], "did you mean `dt`");
    mistake(&["train", "tmaze", "model.kind=dt"], "policy=NAME");
}

#[test]
fn policies_are_listed_and_shown_with_their_settings() {
    let listed = fine(&["presets"]);
    for name in policies() {
        assert!(
            listed.contains(&format!(" {name} ")) || listed.contains(&format!(" {name},")),
            "{name}: {listed}"
        );
        // Some policies have continuous actions only.
        let preset = if for_numbers(&name) { "remember-color" } else { "tmaze" };
        let change = format!("policy={name}");
        let about = rows(&fine(&["inspect", preset, &change, "--json"]));
        assert!(about[0]["parameters"].as_u64().unwrap() > 1000, "{about:?}");
        let keys = rows(&fine(&["inspect", preset, &change, "--keys", "--json"]));
        let described = |row: &Value| row["description"].as_str().is_some_and(|text| text.len() > 10);
        assert!(keys.iter().all(described), "{name}: {:?}", keys.iter().find(|row| !described(row)));
        let kind = keys.iter().find(|row| row["key"] == "model.kind").unwrap();
        assert_eq!(kind["value"], about[0]["kind"]);
    }
    assert!(fine(&["inspect", "tmaze", "policy=dt", "model.layers=1", "--keys"]).contains("model.layers=1 "));
    assert!(fine(&["completions", "bash"]).contains("policy=bc-lstm"));
    mistake(&["inspect", "/nonexistent.elmur", "policy=dt"], "/nonexistent.elmur");
}

#[test]
fn a_checkpoint_of_one_policy_is_refused_by_another() {
    let folder = Folder::new("mixed");
    let (lstm, mlp) = (folder.path("lstm"), folder.path("mlp"));
    train("lstm", &lstm);
    train("mlp", &mlp);
    // Resumed with another policy, by name or by the files.
    refused(&["train", "--resume", &lstm, "policy=mlp"], &["`policy`", "of kind bc_lstm", "got mlp"]);
    let config = |run: &str| Path::new(run).join("config.json");
    let own = std::fs::read(config(&lstm)).unwrap();
    std::fs::copy(config(&mlp), config(&lstm)).unwrap();
    refused(&["train", "--resume", &lstm, "train.batches=5"], &["of kind bc_lstm", "of kind bc_mlp"]);
    std::fs::write(config(&lstm), own).unwrap();
    // One policy's weights beside the other's config.
    let best = |run: &str, file: &str| Path::new(run).join("checkpoints/best").join(file);
    let weights = "model.safetensors";
    std::fs::copy(best(&mlp, weights), best(&lstm, weights)).unwrap();
    refused(&["eval", &lstm], &[weights, "a policy of kind bc_mlp", "asks for one of kind bc_lstm"]);
}

#[test]
fn the_target_return_is_a_setting_of_evaluation() {
    let folder = Folder::new("target");
    let (dt, lstm, tt) = (folder.path("dt"), folder.path("lstm"), folder.path("tt"));
    train("dt", &dt);
    train("lstm", &lstm);
    train("tt", &tt);
    let asked = |more: &[&str]| {
        let args = [&["eval", &dt, "--episodes", "2", "--json"], more].concat();
        rows(&fine(&args))[0]["target_return"].as_f64()
    };
    assert_eq!(asked(&[]), Some(1.0), "the best return of the demonstrations, as the run's config says");
    let config: Value =
        serde_json::from_slice(&std::fs::read(Path::new(&dt).join("config.json")).unwrap()).unwrap();
    assert_eq!(config["eval"]["target_return"], 1.0);
    assert_eq!(asked(&["--target-return", "-2.5"]), Some(-2.5));
    for value in ["NaN", "inf", "1e400", "much", ""] {
        let message =
            refused(&["eval", &dt, "--target-return", value], &["--target-return", "a finite number"]);
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    refused(&["train", "tmaze-dt", "eval.target_return=NaN"], &["eval.target_return", "expected a number"]);
    // One is not told returns, the other plans for the largest.
    for run in [&lstm, &tt] {
        let output = elmur(&["eval", run, "--episodes", "2", "--target-return", "3"]);
        let says = text(&output).contains("does not aim at a given return");
        assert!(output.status.success() && says, "{}", text(&output));
        assert!(rows(&fine(&["eval", run, "--episodes", "2", "--json"]))[0].get("target_return").is_none());
    }
}

#[test]
fn policies_are_measured() {
    let quick = ["--json", "--segments", "1", "--batch", "2"];
    let found = rows(&fine(&[&["bench", "step", "--policy", "dt"], &quick[..]].concat()));
    assert_eq!((found[0]["policy"].as_str(), found[0]["state"].as_str()), (Some("dt"), Some("full window")));
    assert!(found[0]["ms"].as_f64().unwrap() > 0.0, "{found:?}");
    let found = rows(&fine(&["bench", "train", "--policy", "mlp", "--batches", "1", "--json"]));
    assert!(found.len() == 2 && found[0]["policy"] == "bc-mlp" && found[0]["ms"].as_f64().unwrap() > 0.0);
    let table = ["bench", "policies", "--policy", "lstm", "--batches", "1", "--segments", "1", "--json"];
    let found = rows(&fine(&table));
    assert_eq!((found.len(), found[0]["parameters"].as_u64()), (1, Some(100_160)));
    assert!(["train_ms", "step_ms"].iter().all(|key| found[0][key].as_f64().unwrap() > 0.0), "{found:?}");
}
