//! Sweeps: what is trained, by whom, and what the table says.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use common::*;
use elmur_train::RunConfig;
use serde_json::{Value, json};

/// A sweep of a tiny policy with memory and a perceptron in a T-Maze of nine steps, two seeds each.
fn tiny_sweep(folder: &Folder) -> Value {
    json!({
        "name": "tiny",
        "tasks": ["tmaze-quick"],
        "policies": ["preset", "bc-mlp"],
        "seeds": [0, 1],
        "settings": {
            "env.length": 9, "data.episodes": 100, "train.batch": 8, "train.epochs": null, "train.batches": 6,
            "eval.every": null, "eval.length": 9, "eval.episodes": 10, "eval.target": null,
        },
        "per_policy": {"preset": {"model.d_model": 16, "model.segment_length": 3}},
        "evaluate": {"episodes": 20, "lengths": [9, 15]},
        "out": folder.path("out"),
    })
}

fn write(folder: &Folder, name: &str, sweep: &Value) -> String {
    let path = folder.path(name);
    std::fs::write(&path, sweep.to_string()).unwrap();
    path
}

/// Results by task, policy, case and seed.
fn results(path: &str) -> BTreeMap<(String, Option<String>, u64), Value> {
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let key = |run: &Value| {
        let case = run["case"].as_str().map(str::to_owned);
        (run["policy"].as_str().unwrap().to_owned(), case, run["seed"].as_u64().unwrap())
    };
    file["results"].as_array().unwrap().iter().map(|run| (key(run), run.clone())).collect()
}

/// The folder of a run whose name begins with `start`.
fn run_folder(folder: &Folder, out: &str, start: &str) -> String {
    let runs = folder.0.join(out).join("runs");
    let fits = |name: &&String| name.starts_with(start) && !name.contains('.');
    let name = names(&runs).iter().find(fits).unwrap_or_else(|| panic!("no run {start}")).clone();
    runs.join(name).to_str().unwrap().to_owned()
}

/// Numbers of a line of table.csv by the names of its columns.
fn csv(path: &str) -> Vec<BTreeMap<String, String>> {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines().map(|line| line.split(',').map(str::to_owned).collect::<Vec<_>>());
    let head = lines.next().unwrap();
    lines.map(|line| head.iter().cloned().zip(line).collect()).collect()
}

#[test]
fn a_sweep_is_trained_evaluated_and_reported_once() {
    let folder = Folder::new("sweep");
    let mut sweep = tiny_sweep(&folder);
    sweep["references"] = json!({"paper": {"tmaze-quick": 0.75}});
    let file = write(&folder, "sweep.json", &sweep);
    assert!(
        fine(&["sweep", "status", &file])
            .contains("4 runs: 0 done, 0 running, 0 interrupted, 4 waiting, 0 failed")
    );
    let said = fine(&["sweep", "run", &file, "--jobs", "2", "--threads", "1"]);
    assert!(said.contains("4 of 4 runs done (4 by this command), 0 failed, 0 left"), "{said}");
    let said = fine(&["sweep", "run", &file]);
    assert!(said.contains("4 of 4 runs done (0 by this command)"), "{said}");

    // Every score is what `elmur eval` says of the run.
    let found = results(&folder.path("out/results.json"));
    let score = |policy: &str, seed: u64, i: usize| {
        found[&(policy.to_owned(), None, seed)]["scores"][i]["score"].as_f64().unwrap()
    };
    for policy in ["preset", "bc-mlp"] {
        for seed in [0, 1] {
            let run = run_folder(&folder, "out", &format!("tmaze-quick-{policy}-seed-{seed}-"));
            let seed_text = seed.to_string();
            let eval =
                ["eval", &run, "--lengths", "9,15", "--episodes", "20", "--first-run", &seed_text, "--json"];
            let rows = rows(&fine(&eval));
            assert_eq!(rows[0]["score"].as_f64().unwrap(), score(policy, seed, 0));
            assert_eq!(rows[2]["score"].as_f64().unwrap(), score(policy, seed, 1));
            let config: Value =
                serde_json::from_str(&std::fs::read_to_string(format!("{run}/config.json")).unwrap())
                    .unwrap();
            assert_eq!(config["train"]["seed"], seed);
            let result = &found[&(policy.to_owned(), None, seed)];
            assert_eq!((&result["batches"], &result["scores"][1]["at"]), (&json!(6), &json!(["length", 15])));
            assert!(result["train_seconds"].as_f64().unwrap() > 0.0);
            for key in ["commit", "version", "machine", "finished", "settings"] {
                assert!(result.get(key).is_some(), "{key}: {result}");
            }
        }
    }

    let report = fine(&["sweep", "report", &file]);
    let table = csv(&folder.path("out/table.csv"));
    assert_eq!(table.len(), 4);
    for line in &table {
        let i = usize::from(line["value"] == "15");
        let (a, b) = (score(&line["policy"], 0, i), score(&line["policy"], 1, i));
        let number = |key: &str| line[key].parse::<f64>().unwrap();
        assert!((number("mean") - (a + b) / 2.0).abs() < 1e-12, "{line:?}");
        assert!((number("sem") - (a - b).abs() / 2.0).abs() < 1e-12, "{line:?}");
        assert_eq!((&*line["count"], &*line["planned"], &*line["paper"]), ("2", "2", "0.75"));
        let other = if line["policy"] == "preset" { "bc-mlp" } else { "preset" };
        let of_other = (score(other, 0, i) + score(other, 1, i)) / 2.0;
        assert_eq!(line["best"] == "true", number("mean") > of_other - 5e-4, "{line:?}");
        let bold = if line["best"] == "true" { "**" } else { "" };
        assert!(
            report.contains(&format!("{bold}{:.3} ± {:.3}{bold}", number("mean"), number("sem"))),
            "{report}"
        );
    }
    assert!(report.contains("| task | preset | bc-mlp | paper |"), "{report}");
    assert!(report.contains("tmaze-quick, length 15") && report.contains("All 4 runs are done."), "{report}");
    assert!(report.contains("| batches per run | 6 | 6 |"), "{report}");
    for name in ["scores.svg", "scores.png", "report.md"] {
        assert!(folder.0.join("out").join(name).is_file(), "{name}");
    }

    // Another sweep that knows these results repeats none of them.
    let state = folder.path("state/results.json");
    fine(&["sweep", "report", &file, "--state", &state, "--out", &folder.path("report")]);
    (sweep["known"], sweep["out"], sweep["seeds"]) =
        (json!(state), json!(folder.path("later")), json!([1, 0]));
    let later = write(&folder, "later.json", &sweep);
    let said = fine(&["sweep", "run", &later]);
    assert!(said.contains("4 of 4 runs done (0 by this command)"), "{said}");
    assert_eq!(results(&folder.path("later/results.json")), found);
    assert!(names(folder.0.join("later/runs")).is_empty());

    // Another sweep's report keeps the results that the file has already.
    (sweep["known"], sweep["seeds"]) = (Value::Null, json!([7]));
    let other = write(&folder, "other.json", &sweep);
    fine(&["sweep", "report", &other, "--state", &state]);
    assert_eq!(results(&state), found);
}

/// The training that a worker has started.
fn training_of(worker: u32) -> u32 {
    let begin = Instant::now();
    loop {
        let children = std::fs::read_to_string(format!("/proc/{worker}/task/{worker}/children")).unwrap();
        let trains = |child: &&str| {
            let command = std::fs::read_to_string(format!("/proc/{child}/cmdline")).unwrap_or_default();
            command.split('\0').any(|word| word == "train")
        };
        if let Some(child) = children.split_whitespace().find(trains) {
            return child.parse().unwrap();
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "no training");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Kills processes at one moment, the first one first.
fn kill(processes: &[u32]) {
    let mut command = std::process::Command::new("kill");
    command.arg("-KILL").args(processes.iter().map(u32::to_string));
    assert!(command.status().unwrap().success());
}

/// Starts a worker and waits until its run has made some progress; returns it and its training.
fn start_worker(folder: &Folder, file: &str) -> (Child, u32) {
    let worker = start(&["-q", "sweep", "run", file, "--threads", "1"]);
    let training = training_of(worker.id());
    let begin = Instant::now();
    let runs = folder.0.join("out/runs");
    let grown = |start: u64| {
        let name = names(&runs).into_iter().find(|name| !name.contains('.'));
        let metrics = name.map(|name| runs.join(name).join("metrics.jsonl"));
        metrics.and_then(|path| path.metadata().ok()).is_some_and(|about| about.len() > start)
    };
    let name = names(&runs).into_iter().find(|name| !name.contains('.'));
    let before =
        name.and_then(|name| runs.join(name).join("metrics.jsonl").metadata().ok()).map_or(0, |a| a.len());
    while !grown(before + 3000) {
        assert!(begin.elapsed() < Duration::from_secs(60), "no progress");
        std::thread::sleep(Duration::from_millis(5));
    }
    (worker, training)
}

#[test]
fn a_killed_workers_run_is_taken_over_and_ends_with_the_same_bytes() {
    let folder = Folder::new("sweep-kill");
    let mut sweep = tiny_sweep(&folder);
    (sweep["policies"], sweep["seeds"]) = (json!(["preset"]), json!([3]));
    sweep["settings"]["train.batches"] = json!(600);
    sweep["settings"]["train.checkpoint_every"] = json!(40);
    let file = write(&folder, "sweep.json", &sweep);
    let status = || fine(&["sweep", "status", &file]);

    // The training alone: its worker resumes it.
    let (mut worker, training) = start_worker(&folder, &file);
    assert!(status().contains("1 running"), "{}", status());
    kill(&[training]);
    let begin = Instant::now();
    let resumed = loop {
        match training_of(worker.id()) {
            same if same == training => assert!(begin.elapsed() < Duration::from_secs(20), "not resumed"),
            other => break other,
        }
    };

    // Worker and training at once: the claim is free at once.
    kill(&[worker.id(), resumed]);
    worker.wait().unwrap();
    assert!(status().contains("1 interrupted"), "{}", status());

    // The worker alone: its training saves and ends, and has the claim until then.
    let (mut worker, _) = start_worker(&folder, &file);
    kill(&[worker.id()]);
    worker.wait().unwrap();
    let begin = Instant::now();
    while !status().contains("1 interrupted") {
        assert!(
            begin.elapsed() < Duration::from_secs(20),
            "training goes on without its worker: {}",
            status()
        );
        std::thread::sleep(Duration::from_millis(20));
    }

    // A polite signal: saved, and said so.
    let (worker, _) = start_worker(&folder, &file);
    signal(&worker, "TERM");
    let output = ended(worker, 20);
    assert_eq!(output.status.code(), Some(143), "{}", text(&output));
    assert!(text(&output).contains("0 failed, 1 left"), "{}", text(&output));

    let said = fine(&["sweep", "run", &file, "--wait"]);
    assert!(said.contains("1 of 1 runs done (1 by this command)"), "{said}");
    sweep["out"] = json!(folder.path("whole"));
    let whole = write(&folder, "whole.json", &sweep);
    fine(&["sweep", "run", &whole]);
    let run = |out: &str| run_folder(&folder, out, "tmaze-quick-preset-seed-3-");
    assert!(checkpoint(&run("out"), 600) == checkpoint(&run("whole"), 600));
    let losses = |out: &str| {
        let rows = rows(&std::fs::read_to_string(format!("{}/metrics.jsonl", run(out))).unwrap());
        rows.iter().filter_map(|row| row["loss"].as_f64()).collect::<Vec<_>>()
    };
    assert_eq!(losses("out").len(), 600);
    assert_eq!(losses("out"), losses("whole"));
    let scores = |out: &str| {
        results(&folder.path(&format!("{out}/results.json"))).values().next().unwrap()["scores"].clone()
    };
    assert_eq!(scores("out"), scores("whole"));
}

#[test]
fn two_workers_never_train_the_same_run() {
    let folder = Folder::new("sweep-two");
    let mut sweep = tiny_sweep(&folder);
    sweep["settings"]["train.batches"] = json!(30);
    let file = write(&folder, "sweep.json", &sweep);
    let args = ["sweep", "run", &file, "--jobs", "2", "--threads", "1", "--wait"];
    let workers = [start(&args), start(&args), start(&args)];
    let mut done = 0;
    for worker in workers {
        let output = ended(worker, 60);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(0), "{said}");
        let number = said.split("runs done (").nth(1).and_then(|rest| rest.split(' ').next());
        done += number.unwrap().parse::<usize>().unwrap();
    }
    assert_eq!(done, 4);
    let runs = folder.0.join("out/runs");
    let logs: Vec<_> = names(&runs).into_iter().filter(|name| name.ends_with(".log")).collect();
    assert_eq!(logs.len(), 4);
    for log in logs {
        let text = std::fs::read_to_string(runs.join(log)).unwrap();
        assert_eq!(text.matches("\"event\":\"end\"").count(), 1, "{text}");
    }
}

#[test]
fn a_run_begins_with_the_weights_of_another_when_that_is_done() {
    let folder = Folder::new("sweep-before");
    let mut sweep = tiny_sweep(&folder);
    // The later of two tasks comes first in the table.
    sweep["tasks"] = json!(["tmaze-quick", "tmaze"]);
    sweep["policies"] = json!(["bc-mlp"]);
    sweep["seeds"] = json!([0]);
    sweep["per_policy"] = json!({});
    sweep["per_task"] = json!({"tmaze-quick": {"train.batches": 1, "train.lr": 1e-9}});
    sweep["begin_with"] = json!({"tmaze-quick": "tmaze"});
    let file = write(&folder, "sweep.json", &sweep);
    let said = fine(&["sweep", "run", &file, "--jobs", "2", "--threads", "1"]);
    assert!(said.contains("2 of 2 runs done (2 by this command)"), "{said}");
    let first = run_folder(&folder, "out", "tmaze-bc-mlp");
    let second = run_folder(&folder, "out", "tmaze-quick-bc-mlp");
    let weights = |run: &str| {
        let checkpoint = elmur_model::Checkpoint::load(&Path::new(run).join("checkpoints/best")).unwrap();
        let name = checkpoint.params.names().into_iter().find(|name| name.ends_with("weight")).unwrap();
        checkpoint.params.get::<f32>(&name).unwrap()
    };
    let (before, after) = (weights(&first), weights(&second));
    assert!(before.iter().zip(&after).all(|(a, b)| (a - b).abs() < 1e-6));

    // Known results of the first are no weights: it is trained again, and the second is another run.
    let state = folder.path("state.json");
    fine(&["sweep", "report", &file, "--state", &state]);
    std::fs::remove_dir_all(folder.path("out")).unwrap();
    sweep["known"] = json!(state);
    let file = write(&folder, "sweep.json", &sweep);
    assert!(fine(&["sweep", "run", &file]).contains("2 of 2 runs done (0 by this command)"));
    sweep["per_task"] = json!({"tmaze-quick": {"train.batches": 2, "train.lr": 1e-9}});
    let file = write(&folder, "sweep.json", &sweep);
    let said = fine(&["sweep", "run", &file, "--only", "tmaze-quick"]);
    assert!(said.contains("2 of 2 runs done (2 by this command)"), "{said}");

    // Nor is its result beside a folder that somebody removed.
    std::fs::remove_dir_all(run_folder(&folder, "out", "tmaze-bc-mlp")).unwrap();
    assert!(fine(&["sweep", "run", &file]).contains("2 of 2 runs done (0 by this command)"));
    sweep["per_task"] = json!({"tmaze-quick": {"train.batches": 3, "train.lr": 1e-9}});
    let file = write(&folder, "sweep.json", &sweep);
    let said = fine(&["sweep", "run", &file]);
    assert!(said.contains("2 of 2 runs done (2 by this command)"), "{said}");
}

#[test]
fn runs_that_begin_with_one_that_failed_are_left() {
    let folder = Folder::new("sweep-chain");
    let mut sweep = tiny_sweep(&folder);
    let config = RunConfig::preset("tmaze").unwrap();
    let third = write(&folder, "third.json", &serde_json::to_value(config).unwrap());
    sweep["tasks"] = json!([&third, "tmaze-quick", "tmaze"]);
    sweep["policies"] = json!(["bc-mlp"]);
    sweep["seeds"] = json!([0]);
    sweep["per_policy"] = json!({});
    // Diverges at once.
    sweep["per_task"] = json!({"tmaze": {"train.max_loss": 1e-9}});
    sweep["begin_with"] = json!({&third: "tmaze-quick", "tmaze-quick": "tmaze"});
    let file = write(&folder, "sweep.json", &sweep);
    let run = |more: &[&str]| text(&elmur(&[&["sweep", "run", &file], more].concat()));
    for more in [&["--wait"][..], &["--jobs", "2"]] {
        let said = run(more);
        assert!(said.contains("0 of 3 runs done (0 by this command), 1 failed, 2 left"), "{said}");
        assert!(said.contains("left: tmaze-quick bc-mlp, seed 0: it begins with tmaze bc-mlp"), "{said}");
    }
    // They have not failed themselves.
    let failures = names(folder.0.join("out/runs")).into_iter().filter(|name| name.ends_with(".failed.json"));
    assert_eq!(failures.count(), 1);
    let mended = write(&folder, "mended.json", &{
        sweep["per_task"] = json!({});
        sweep
    });
    let said = fine(&["sweep", "run", &mended, "--jobs", "2", "--threads", "1"]);
    assert!(said.contains("3 of 3 runs done (3 by this command)"), "{said}");
}

#[test]
fn a_half_finished_sweep_reports_what_there_is_and_what_is_missing() {
    let folder = Folder::new("sweep-half");
    let mut sweep = tiny_sweep(&folder);
    // The second case diverges at once, which must not disturb the first.
    sweep["policies"] = json!(["preset"]);
    sweep["cases"] =
        json!([{"name": "as it is"}, {"name": "hopeless, really", "settings": {"train.max_loss": 1e-9}}]);
    sweep["evaluate"] = json!({"episodes": 10});
    sweep["groups"] = json!({"mazes": ["tmaze*"]});
    let file = write(&folder, "sweep.json", &sweep);
    // Before anything is done.
    let report = fine(&["sweep", "report", &file]);
    assert!(report.contains("Missing: 4 of 4 runs.") && report.contains("not begun"), "{report}");
    assert!(!folder.0.join("out/scores.svg").exists());

    let output = elmur(&["sweep", "run", &file, "--only", "seed 0", "--threads", "1"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(
        text(&output).contains("1 of 2 runs done (1 by this command), 1 failed, 0 left"),
        "{}",
        text(&output)
    );
    let status = fine(&["sweep", "status", &file]);
    assert!(status.contains("4 runs: 1 done, 0 running, 0 interrupted, 2 waiting, 1 failed"), "{status}");
    let reason = "failed: tmaze-quick preset, hopeless, really, seed 0: training diverged at batch";
    assert!(status.contains(reason), "{status}");
    let report = fine(&["sweep", "report", &file]);
    assert!(report.contains("| task | as it is | hopeless, really |"), "{report}");
    assert!(report.contains("(1 of 2 seeds) | - |") && report.contains("Missing: 3 of 4 runs."), "{report}");
    assert!(report.contains("- tmaze-quick preset, as it is, seed 1: not begun"), "{report}");
    assert!(report.contains("seed 0: failed: training diverged"), "{report}");
    assert!(!report.contains("sum of mazes"), "a group of one task: {report}");

    // Failed runs stay failed until they are tried again.
    let output = elmur(&["sweep", "run", &file, "--only", "hopeless*seed 0"]);
    assert!(text(&output).contains("0 of 1 runs done (0 by this command), 1 failed"), "{}", text(&output));
    let log = |folder: &Folder| {
        let runs = folder.0.join("out/runs");
        let name = names(&runs).into_iter().find(|name| name.contains("hopeless") && name.ends_with(".log"));
        std::fs::read_to_string(runs.join(name.unwrap())).unwrap()
    };
    assert_eq!(log(&folder).matches("diverged").count(), 1);
    let output = elmur(&["sweep", "run", &file, "--only", "hopeless*seed 0", "--retry-failed"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(log(&folder).matches("diverged").count(), 2);
}

#[test]
fn sums_by_group_have_the_players_score_and_references() {
    let folder = Folder::new("sweep-groups");
    let sweep = json!({
        "name": "groups",
        "tasks": ["popgym-Repeat*Easy"],
        "settings": {
            "data.episodes": 20, "train.epochs": null, "train.batches": 2, "train.batch": 4, "model.layers": 1,
            "eval.every": null, "eval.episodes": 2,
        },
        "evaluate": {"episodes": 2},
        "references": {"paper": {"popgym-RepeatFirstEasy": 0.5, "popgym-RepeatPreviousEasy": 0.25}},
        "out": folder.path("out"),
    });
    let file = write(&folder, "sweep.json", &sweep);
    fine(&["sweep", "run", &file]);
    fine(&["sweep", "report", &file]);
    let table = csv(&folder.path("out/table.csv"));
    let named = |kind: &str| table.iter().filter(|line| line["kind"] == kind).collect::<Vec<_>>();
    let (tasks, sums) = (named("task"), named("sum"));
    let number = |line: &BTreeMap<String, String>, key: &str| line[key].parse::<f64>().unwrap();
    let names: Vec<&str> = sums.iter().map(|line| &*line["task"]).collect();
    assert_eq!(names, ["sum of all Easy (2 tasks)", "sum of all tasks (2 tasks)"]);
    for key in ["mean", "player", "paper"] {
        let sum = number(tasks[0], key) + number(tasks[1], key);
        assert!((number(sums[0], key) - sum).abs() < 1e-12, "{key}: {table:?}");
    }
    assert_eq!((number(sums[0], "player"), number(sums[0], "paper")), (2.0, 0.75));
    assert_eq!((&*sums[0]["count"], &*sums[0]["planned"], &*sums[0]["measure"]), ("2", "2", "return"));
    let squares = number(tasks[0], "sem").powi(2) + number(tasks[1], "sem").powi(2);
    assert!((number(sums[0], "sem") - squares.sqrt()).abs() < 1e-12);
}

#[test]
fn the_repositorys_sweeps_are_sound() {
    let runs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../runs");
    let files: Vec<_> = names(&runs).into_iter().filter(|name| name.ends_with(".json")).collect();
    assert!(files.contains(&"popgym.json".to_owned()), "{files:?}");
    for file in files {
        let path = runs.join(&file);
        fine(&["sweep", "status", path.to_str().unwrap()]);
    }
}

/// Data may lie on the machine that trains: without them a sweep can be looked at, and run where no run needs them.
#[test]
fn data_are_asked_for_by_runs_that_need_them() {
    let folder = Folder::new("sweep-data");
    let mut sweep = tiny_sweep(&folder);
    sweep["seeds"] = json!([0]);
    sweep["per_policy"]["preset"]["data.file"] = json!("nowhere.elmur");
    let file = write(&folder, "sweep.json", &sweep);
    refused(
        &["sweep", "run", &file],
        &["sweep.json", "tmaze-quick preset, seed 0", "nowhere.elmur", "elmur collect", "--only"],
    );
    assert!(!Path::new(&folder.path("out")).exists(), "something was begun");
    for command in ["status", "report"] {
        fine(&["sweep", command, &file]);
    }
    fine(&["sweep", "run", &file, "--only", "bc-mlp"]);
}

#[cfg(unix)]
#[test]
fn a_missing_simulator_is_noticed_before_anything_is_trained() {
    let folder = Folder::new("sweep-simulator");
    let data = write(&folder, "data.elmur", &json!(null));
    let file = write(
        &folder,
        "sweep.json",
        &json!({
            "name": "robots", "tasks": ["mikasa-RememberColor3"], "policies": ["preset"], "seeds": [0],
            "settings": {"data.file": data, "env.folder": folder.path("nowhere")}, "evaluate": {"episodes": 1},
            "out": folder.path("out"),
        }),
    );
    let parts = ["sweep.json", "mikasa-RememberColor3 preset, seed 0", "elmur simulators install mikasa DIR"];
    refused(&["sweep", "run", &file], &parts);
    assert!(!Path::new(&folder.path("out")).exists(), "something was begun");
    fine(&["sweep", "status", &file]);
}

#[test]
fn mistakes_in_the_file_are_refused_before_anything_starts() {
    let folder = Folder::new("sweep-mistakes");
    let refuse = |change: &dyn Fn(&mut Value), parts: &[&str]| {
        let mut sweep = tiny_sweep(&folder);
        change(&mut sweep);
        let file = write(&folder, "sweep.json", &sweep);
        for command in ["run", "status", "report"] {
            refused(&["sweep", command, &file], &[&["sweep.json"], parts].concat());
        }
    };
    let set = |key: &'static str, value: Value| move |sweep: &mut Value| sweep[key] = value.clone();
    refuse(&set("task", json!([])), &["`task`: expected one of the keys", "did you mean `tasks`"]);
    refuse(
        &|sweep| drop(sweep.as_object_mut().unwrap().remove("tasks")),
        &["`tasks`: expected a list of presets, got nothing"],
    );
    refuse(&set("name", json!("")), &["`name`: expected a name, got nothing"]);
    refuse(&set("out", json!("")), &["`out`: expected a name, got nothing"]);
    refuse(&set("tasks", json!([])), &["`tasks`: expected at least one"]);
    refuse(&set("tasks", json!(["tmase"])), &["`tasks`", "did you mean `tmaze`"]);
    refuse(
        &set("tasks", json!(["popgym-*Simple"])),
        &["`tasks`: expected a pattern that fits a preset", "popgym-*Simple"],
    );
    refuse(
        &set("tasks", json!(["tmaze", "tmaze"])),
        &["`tasks`: expected everything once, got \"tmaze\" twice"],
    );
    refuse(&set("tasks", json!(["remember-color"])), &["remember-color", "env"]);
    refuse(&set("policies", json!(["lsmt"])), &["`policies`: expected `preset` or one of", "lsmt"]);
    refuse(&set("policies", json!(["lstm", "bc-lstm"])), &["`policies`: expected everything once"]);
    refuse(&set("seeds", json!([-1])), &["`seeds`", "-1"]);
    refuse(&set("seeds", json!([1, 1])), &["`seeds`: expected everything once, got 1 twice"]);
    refuse(&set("seeds", json!([4_294_967_296u64])), &["`seeds`: expected numbers below 2^32"]);
    refuse(
        &set("settings", json!({"train.lrr": 1})),
        &["tmaze-quick with policy preset", "did you mean `train.lr`", "(in `settings`)"],
    );
    refuse(&set("settings", json!({"train.batches": "many"})), &["train.batches", "many"]);
    refuse(
        &set("settings", json!({"train.seed": 1})),
        &["`settings.train.seed`: expected the list `seeds` instead"],
    );
    refuse(&set("settings", json!({"policy": "dt"})), &["the list `policies` instead"]);
    refuse(&set("settings", json!({"train.device": "cuda"})), &["`device`, or --device"]);
    refuse(&set("settings", json!({"train.threads": 2})), &["--threads"]);
    refuse(&set("per_policy", json!({"dt": {}})), &["`per_policy`", "preset, bc-mlp", "got dt"]);
    refuse(&set("per_policy", json!({"bc-mlp": {"model.slots": 1}})), &["with policy bc-mlp", "model.slots"]);
    refuse(&set("per_task", json!({"popgym-*": {}})), &["`per_task`", "got popgym-*"]);
    refuse(&set("per_task", json!({"tmaze*": 3})), &["`per_task.tmaze*`: expected settings"]);
    refuse(
        &set("begin_with", json!({"tmaze": "tmaze-quick"})),
        &["`begin_with`: expected tasks of the sweep"],
    );
    refuse(
        &set("begin_with", json!({"tmaze-quick": "tmaze"})),
        &["`begin_with.tmaze-quick`: expected another task of the sweep, got \"tmaze\""],
    );
    refuse(
        &set("begin_with", json!({"tmaze-quick": "tmaze-quick"})),
        &["`begin_with.tmaze-quick`", "one that begins with tmaze-quick itself"],
    );
    refuse(
        &|sweep| {
            sweep["tasks"] = json!(["tmaze-quick", "tmaze"]);
            sweep["begin_with"] = json!({"tmaze-quick": "tmaze", "tmaze": "tmaze"});
        },
        &["`begin_with.tmaze`", "one that begins with tmaze itself"],
    );
    refuse(
        &set("settings", json!({"train.begin_with": "out/run"})),
        &["`settings.train.begin_with`: expected `begin_with` instead"],
    );
    refuse(
        &|sweep| {
            sweep["tasks"] = json!(["tmaze-quick", "tmaze"]);
            sweep["per_task"] = json!({"tmaze": {"model.d_model": 32}});
            sweep["policies"] = json!(["preset"]);
            sweep["begin_with"] = json!({"tmaze-quick": "tmaze"});
        },
        &["`begin_with`: tmaze-quick", "weights of a policy with the run's parameters"],
    );
    refuse(&set("cases", json!([{"name": "a"}, {"name": "a"}])), &["`cases`: expected everything once"]);
    refuse(
        &set("cases", json!([{"name": "a"}, {"name": "b"}])),
        &["`cases`", "the same run twice", "preset, a, seed"],
    );
    refuse(&set("cases", json!([{"name": "a", "settings": {"env.length": 1}}])), &["case a", "at least 3"]);
    refuse(&set("evaluate", json!({"episodes": 0})), &["`evaluate.episodes`: expected 1 to"]);
    refuse(&set("evaluate", json!({"lengths": [2]})), &["`evaluate.set.length`", "at least 3"]);
    refuse(&set("evaluate", json!({"set": {"width": [2]}})), &["`evaluate.set.width`"]);
    refuse(
        &set("evaluate", json!({"set": {"length": []}})),
        &["`evaluate.set.length`: expected at least one"],
    );
    refuse(&set("evaluate", json!({"lengths": [9], "set": {"length": [9]}})), &["`evaluate.set`"]);
    refuse(&set("evaluate", json!({"metric": "fame"})), &["`evaluate.metric`", "fame"]);
    refuse(&set("evaluate", json!({"episode": 9})), &["`evaluate.episode`", "did you mean `episodes`"]);
    refuse(&set("evaluate", json!(9)), &["`evaluate`: expected an object"]);
    refuse(&set("cases", json!([{"settings": {}}])), &["`cases.0.name`: expected a name"]);
    refuse(&set("device", json!("gpu")), &["`device`: expected cpu, cuda or cuda:N, got gpu"]);
    refuse(&set("groups", json!({"x": ["popgym-*"]})), &["`groups.x`: expected tasks of the sweep"]);
    refuse(&set("groups", json!({"x": "tmaze"})), &["`groups.x`: expected a list"]);
    refuse(
        &set("references", json!({"paper": {"tmaze-quick": "1"}})),
        &["`references.paper.tmaze-quick`: expected a number"],
    );
    refuse(
        &set("references", json!({"paper": {"tmase": 1}})),
        &["`references.paper`: expected names of presets, got tmase"],
    );
    assert!(!Path::new(&folder.path("out")).exists());

    let file = write(&folder, "sweep.json", &tiny_sweep(&folder));
    mistake(&["sweep", "run", &file, "--only", "seed 7"], "`only`: expected part of the name of a run");
    mistake(&["sweep", "run", &file, "--device", "cuda:99"], "`device`");
    mistake(&["sweep", "run", &folder.path("none.json")], "none.json");
    std::fs::write(&file, "{").unwrap();
    mistake(&["sweep", "run", &file], "not a sweep");
    let mut sweep = tiny_sweep(&folder);
    sweep["known"] = json!(write(&folder, "known.json", &json!({"results": 3})));
    let file = write(&folder, "sweep.json", &sweep);
    refused(&["sweep", "report", &file], &["known.json", "not a file of `elmur sweep report`"]);
}

/// Training may happen where no simulator is: runs that are trained alone are evaluated later, without their data, and
/// their results say who trained them.
#[test]
fn runs_that_are_trained_alone_are_evaluated_by_a_later_sweep() {
    let folder = Folder::new("sweep-train-only");
    let mut sweep = tiny_sweep(&folder);
    sweep["seeds"] = json!([0]);
    let data = folder.path("maze.elmur");
    fine(&["collect", "tmaze", "--length", "9", "--episodes", "20", "--out", &data]);
    sweep["settings"]["data.file"] = json!(data);
    sweep["settings"].as_object_mut().unwrap().remove("data.episodes");
    let file = write(&folder, "sweep.json", &sweep);
    let train = ["sweep", "run", &file, "--train-only", "--machine", "a machine that trains"];
    for times in ["first", "again"] {
        let trained = elmur(&train);
        assert_eq!(trained.status.code(), Some(75), "{times}: {trained:?}");
    }
    let run = run_folder(&folder, "out", "tmaze-quick-preset");
    assert!(!Path::new(&format!("{run}.json")).exists(), "it was evaluated");
    let weights = std::fs::read(format!("{run}/checkpoints/last/model.safetensors")).unwrap();
    std::fs::remove_file(&data).unwrap();
    fine(&["sweep", "run", &file, "--machine", "a machine with the simulator"]);
    assert_eq!(std::fs::read(format!("{run}/checkpoints/last/model.safetensors")).unwrap(), weights);
    for result in results(&folder.path("out/results.json")).values() {
        assert_eq!((&result["machine"], &result["batches"]), (&json!("a machine that trains"), &json!(6)));
    }
}
