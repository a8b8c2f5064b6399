//! Signals, kills, removed folders, and two processes in one place.

#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use common::*;

#[test]
fn an_evaluation_of_short_episodes_hears_signals_and_shows_progress() {
    let folder = Folder::new("eval-signal");
    let run = folder.path("run");
    fine(&tiny(&run, &[]));
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let child = start(&["eval", &run, "--episodes", "4000000", "--lengths", "9"]);
        std::thread::sleep(Duration::from_millis(800));
        signal(&child, name);
        let output = ended(child, 5);
        assert_eq!(output.status.code(), Some(code), "{}", text(&output));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("tmaze T = 9") && said.contains("episodes/s"), "{said}");
    }
}

#[test]
fn commands_with_nothing_to_save_end_at_once() {
    let folder = Folder::new("at-once");
    let pipe = folder.path("pipe.json");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let out = folder.path("out");
    // Two of them wait for a pipe that nobody writes to.
    for args in [
        &["bench", "block", "--rounds", "1000000"][..],
        &["bench", "train", "--batches", "1000000", "--preset", "tmaze-quick"],
        &["verify", &pipe],
        &["plot", "success", &pipe, "--out", &out],
    ] {
        for name in ["INT", "TERM"] {
            let child = start(args);
            std::thread::sleep(Duration::from_millis(200));
            signal(&child, name);
            let output = ended(child, 5);
            let number = if name == "INT" { 2 } else { 15 };
            assert_eq!(output.status.signal(), Some(number), "{args:?}: {}", text(&output));
        }
    }
}

/// A run that is told to stop, and goes on, ends with the bytes of one that was not.
#[test]
fn hangups_and_warnings_of_schedulers_save_too() {
    for (name, code) in [("HUP", 129), ("USR1", 138)] {
        let folder = Folder::new(&format!("signal-{name}"));
        let (whole, parts) = (folder.path("whole"), folder.path("parts"));
        let child =
            start(&tiny(&parts, &["train.batches=100000", "train.checkpoint_every=100000", "eval.every=0"]));
        until(Path::new(&parts).join("metrics.jsonl"), 500);
        signal(&child, name);
        let output = ended(child, 10);
        assert_eq!(output.status.code(), Some(code), "{}", text(&output));
        assert!(text(&output).contains("--resume"), "{}", text(&output));
        let last = std::fs::read_link(Path::new(&parts).join("checkpoints/last")).unwrap();
        let end = last.to_str().unwrap().parse::<u64>().unwrap() + 2;
        let batches = format!("train.batches={end}");
        fine(&["train", "--resume", &parts, &batches]);
        fine(&tiny(&whole, &[&batches, "train.checkpoint_every=100000", "eval.every=0"]));
        assert!(checkpoint(&parts, end) == checkpoint(&whole, end), "{name}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn signals_that_were_ignored_at_the_start_stay_ignored() {
    let folder = Folder::new("nohup");
    let run = folder.path("run");
    let more = ["train.batches=10000000", "train.checkpoint_every=1000000", "eval.every=0"];
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP INT; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_elmur")]);
    command.args(tiny(&run, &more)).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = Running(command.spawn().unwrap());
    let metrics = Path::new(&run).join("metrics.jsonl");
    until(&metrics, 500);
    signal(&child.0, "HUP");
    signal(&child.0, "INT");
    std::thread::sleep(Duration::from_millis(500));
    until(&metrics, std::fs::metadata(&metrics).unwrap().len() + 500);
    assert!(child.0.try_wait().unwrap().is_none());
    // What was not ignored is heard, as the first signal.
    signal(&child.0, "TERM");
    let begin = std::time::Instant::now();
    let status = loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            break status;
        }
        assert!(begin.elapsed() < Duration::from_secs(10), "SIGTERM is not heard");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(status.code(), Some(143));
    assert!(Path::new(&run).join("checkpoints/last").exists());
}

#[test]
fn a_stop_within_a_long_batch_is_heard_saved_and_continued() {
    let folder = Folder::new("long-batch");
    let (whole, parts) = (folder.path("whole"), folder.path("parts"));
    let more = ["train.segments=3000", "train.batches=2"];
    let child = start(&tiny(&parts, &more));
    until(Path::new(&parts).join("data.json"), 1);
    std::thread::sleep(Duration::from_millis(700));
    signal(&child, "TERM");
    let output = ended(child, 5);
    assert_eq!(output.status.code(), Some(143), "{}", text(&output));
    // It was the first batch, and its checkpoint has what its segments carry.
    let metrics = std::fs::read_to_string(Path::new(&parts).join("metrics.jsonl")).unwrap();
    assert_eq!(metrics, "", "the first batch was done too early for this test");
    let saved = std::fs::read(Path::new(&parts).join("checkpoints/00000001/state.safetensors")).unwrap();
    assert!(String::from_utf8_lossy(&saved).contains("trainer.within"));
    // Once more while it goes on.
    let child = start(&["train", "--resume", &parts]);
    std::thread::sleep(Duration::from_millis(500));
    signal(&child, "TERM");
    assert_eq!(ended(child, 5).status.code(), Some(143));
    fine(&["train", "--resume", &parts]);
    fine(&tiny(&whole, &more));
    assert!(checkpoint(&parts, 2) == checkpoint(&whole, 2));
    let losses = |run: &str| {
        let text = std::fs::read_to_string(Path::new(run).join("metrics.jsonl")).unwrap();
        rows(&text).iter().filter_map(|row| row["loss"].as_f64()).collect::<Vec<_>>()
    };
    assert_eq!(losses(&parts), losses(&whole));
}

#[test]
fn an_interrupted_collection_goes_on_to_the_same_bytes() {
    let folder = Folder::new("collect-stop");
    let whole = folder.path("whole.elmur");
    let collect = |out: &str| {
        ["collect", "tmaze", "--length", "300", "--episodes", "6000", "--out", out].map(str::to_owned)
    };
    let args = |out: &str| collect(out).to_vec();
    fine(&args(&whole).iter().map(String::as_str).collect::<Vec<_>>());
    for name in ["TERM", "KILL"] {
        let out = folder.path(&format!("{name}.elmur"));
        let args = args(&out);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let child = start(&args);
        until(format!("{out}.tmp"), 100_000);
        signal(&child, name);
        let output = ended(child, 5);
        let code = if name == "TERM" { (Some(143), None) } else { (None, Some(9)) };
        assert_eq!((output.status.code(), output.status.signal()), code, "{}", text(&output));
        assert!(!Path::new(&out).exists());
        let output = elmur(&args);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
        assert!(text(&output).contains("going on after"), "{}", text(&output));
        assert!(std::fs::read(&out).unwrap() == std::fs::read(&whole).unwrap(), "{name}");
        assert!(!Path::new(&format!("{out}.tmp")).exists());
    }
}

#[test]
fn a_run_whose_folder_is_removed_ends_with_an_error() {
    let folder = Folder::new("removed");
    let run = folder.path("run");
    for replaced in [false, true] {
        let child =
            start(&tiny(&run, &["train.batches=10000000", "eval.every=0", "train.checkpoint_every=1000000"]));
        until(Path::new(&run).join("metrics.jsonl"), 500);
        std::fs::remove_dir_all(&run).unwrap();
        if replaced {
            fine(&tiny(&run, &[]));
        }
        let output = ended(child, 10);
        assert_eq!(output.status.code(), Some(2), "{}", text(&output));
        assert!(text(&output).contains("removed or replaced"), "{}", text(&output));
        assert_eq!(Path::new(&run).exists(), replaced, "nothing is written where the run was");
    }
}

#[test]
fn a_demo_leaves_a_running_one_alone() {
    let folder = Folder::new("two-demos");
    let out = folder.path("demo");
    let first = Running(start(&["demo", "--out", &out, "--longest", "9"]));
    until(Path::new(&out).join("metrics.jsonl"), 500);
    let before = names(&out);
    refused(&["demo", "--out", &out, "--longest", "9"], &["another process trains this run"]);
    refused(&["train", "tmaze-quick", "--force", "--out", &out], &["another process trains this run"]);
    assert!(names(&out).iter().all(|name| name.ends_with(".tmp") || before.contains(name)));
    assert!(before.iter().all(|name| name.ends_with(".tmp") || Path::new(&out).join(name).exists()));
    drop(first);
    // From the moment its folder is made.
    let fresh = folder.path("fresh");
    let mut first = Running(start(&["demo", "--out", &fresh, "--longest", "9"]));
    until(Path::new(&fresh).join("config.json"), 1);
    refused(
        &["demo", "--out", &fresh, "--longest", "9", "--seed", "1"],
        &["another process trains this run"],
    );
    let config = std::fs::read_to_string(Path::new(&fresh).join("config.json")).unwrap();
    assert_eq!(rows(&config.replace('\n', " "))[0]["train"]["seed"], 0);
    until(Path::new(&fresh).join("metrics.jsonl"), 500);
    assert!(first.0.try_wait().unwrap().is_none());
    drop(first);
    // A run that is no demo is never taken for one.
    let run = folder.path("run");
    fine(&tiny(&run, &[]));
    refused(&["demo", "--out", &run], &["not a demo"]);
    fine(&["eval", &run, "--episodes", "10"]);
}

#[test]
fn a_demo_that_was_killed_early_does_not_block_its_folder() {
    let folder = Folder::new("killed-demo");
    let out = folder.path("demo");
    let begins = |what: &str| {
        let child = Running(start(&["demo", "--out", &out, "--longest", "9"]));
        let mut child = child;
        let begin = std::time::Instant::now();
        loop {
            if let Some(status) = child.0.try_wait().unwrap() {
                panic!("{what}: ended with {status}; {:?} is left", names(&out));
            }
            if std::fs::metadata(Path::new(&out).join("metrics.jsonl")).is_ok_and(|m| m.len() > 200) {
                return;
            }
            assert!(begin.elapsed() < Duration::from_secs(30), "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    for pause in [1, 5, 10, 20, 30, 40, 60, 80, 120] {
        let mut child = start(&["demo", "--out", &out, "--longest", "9"]);
        std::thread::sleep(Duration::from_millis(pause));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    begins("after kills");
    // Killed after an earlier demo was removed and before its own folder was made.
    for gone in
        [&["config.json", "checkpoints", "metrics.jsonl", "data.json", "tensorboard"][..], &["config.json"]]
    {
        for name in gone {
            let path = Path::new(&out).join(name);
            let _ = std::fs::remove_file(&path);
            let _ = std::fs::remove_dir_all(&path);
        }
        if gone.len() == 1 {
            // As it is when a folder is being made.
            for name in ["metrics.jsonl", "data.json"] {
                let _ = std::fs::remove_file(Path::new(&out).join(name));
            }
            for name in ["tensorboard", "checkpoints"] {
                let _ = std::fs::remove_dir_all(Path::new(&out).join(name));
            }
            std::fs::create_dir(Path::new(&out).join("checkpoints")).unwrap();
            std::fs::write(Path::new(&out).join(".config.json.1.0.tmp"), b"{").unwrap();
        }
        begins("killed between two demos");
    }
}

#[test]
fn seeds_trained_together_are_stopped_and_saved_together() {
    let folder = Folder::new("seeds-stop");
    let (parts, whole) = (folder.path("parts"), folder.path("whole"));
    let long = ["train.checkpoint_every=100000", "eval.every=0"];
    let child = start(&tiny(&parts, &[&long[..], &["--seeds", "2", "train.batches=100000"]].concat()));
    (0..2).for_each(|seed| until(format!("{parts}/seed-{seed}/metrics.jsonl"), 500));
    signal(&child, "TERM");
    let output = ended(child, 10);
    assert_eq!(output.status.code(), Some(143), "{}", text(&output));
    let run = format!("{parts}/seed-1");
    assert!(text(&output).contains(&format!("elmur train --resume {run}")), "{}", text(&output));
    let last = std::fs::read_link(Path::new(&run).join("checkpoints/last")).unwrap();
    let end = last.to_str().unwrap().parse::<u64>().unwrap() + 2;
    let batches = format!("train.batches={end}");
    fine(&["train", "--resume", &run, &batches]);
    fine(&tiny(&whole, &[&long[..], &["--seed", "1", &batches]].concat()));
    assert!(checkpoint(&run, end) == checkpoint(&whole, end));
}
