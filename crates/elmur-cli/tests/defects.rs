//! Mistakes that a user once met, or could: each test fails where one of them is back.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use common::*;
use serde_json::Value;

/// Weights of the published code and a config that fits them.
fn published(folder: &Folder) -> (String, String) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../elmur-model/tests/golden");
    let mut config = rows(&fine(&["inspect", "tmaze", "--json"]))[0]["config"].take();
    config["d_model"] = 16.into();
    config["segment_length"] = 4.into();
    config["memory"]["max_distance"] = 32.into();
    config["ffn"]["moe"]["routed_d_ff"] = 8.into();
    config["ffn"]["moe"]["shared_d_ff"] = 24.into();
    let file = folder.path("published.json");
    std::fs::write(&file, config.to_string()).unwrap();
    (golden.join("tmaze-small.safetensors").to_str().unwrap().to_owned(), file)
}

#[test]
fn an_import_replaces_a_checkpoint_if_forced_and_never_a_run() {
    let folder = Folder::new("import-over");
    let (weights, config) = published(&folder);
    let import = |out: &str, more: &[&str]| {
        let args = [&["import", &weights, "--config", &config, "--out", out], more].concat();
        elmur(&args)
    };
    let says = |output: &std::process::Output, code: i32, part: &str| {
        assert_eq!(output.status.code(), Some(code), "{}", text(output));
        assert!(text(output).contains(part), "no {part:?} in {}", text(output));
    };
    let run = folder.path("run");
    fine(&tiny(&run, &[]));
    says(&import(&run, &[]), 2, "holds a run; choose another --out");
    says(&import(&run, &["--force"]), 2, "holds a run; choose another --out");
    // The run is what it was.
    fine(&["inspect", &run]);
    fine(&["eval", &run, "--episodes", "10"]);
    fine(&["train", "--resume", &run, "train.batches=7"]);

    let out = folder.path("checkpoint");
    says(&import(&out, &[]), 0, "parameters from");
    let weights_then = std::fs::read(format!("{out}/model.safetensors")).unwrap();
    says(&import(&out, &[]), 2, "holds a checkpoint already; replace it with --force");
    std::fs::write(format!("{out}/model.safetensors"), b"damaged").unwrap();
    says(&import(&out, &["--force"]), 0, "parameters from");
    assert!(std::fs::read(format!("{out}/model.safetensors")).unwrap() == weights_then);
}

#[test]
fn a_run_is_resumed_where_its_data_lie_now_and_on_no_other_data() {
    let folder = Folder::new("moved-data");
    let [here, there, other] = ["here.elmur", "there.elmur", "other.elmur"].map(|name| folder.path(name));
    let (run, whole) = (folder.path("run"), folder.path("whole"));
    let collect = |out: &str, seed: &str| {
        fine(&["collect", "tmaze", "--episodes", "60", "--length", "9", "--seed", seed, "--out", out]);
    };
    collect(&here, "0");
    collect(&other, "1");
    fine(&tiny(&whole, &["--data", &here, "train.batches=9"]));
    fine(&tiny(&run, &["--data", &here]));
    std::fs::rename(&here, &there).unwrap();
    refused(&["train", "--resume", &run, "train.batches=9"], &[&here, "--data PATH"]);
    refused(&["train", "--resume", &run, "train.batches=9", "--data", &other], &["checksum", "--data PATH"]);
    fine(&["train", "--resume", &run, "train.batches=9", "--data", &there]);
    assert!(checkpoint(&run, 9) == checkpoint(&whole, 9));
    // From now on it is known where they are.
    fine(&["train", "--resume", &run, "train.batches=10"]);
}

#[test]
fn a_flipped_bit_is_reported_with_the_name_of_its_file() {
    let folder = Folder::new("flips");
    for (file, evaluated) in
        [("model.safetensors", true), ("state.safetensors", false), ("config.json", true)]
    {
        let run = folder.path(file);
        fine(&tiny(&run, &[]));
        // One checkpoint, and it is damaged.
        let path = format!("{run}/checkpoints/00000006/{file}");
        flip(&path);
        if evaluated {
            refused(&["eval", &run, "--episodes", "10"], &[file]);
        }
        refused(&["train", "--resume", &run, "train.batches=9"], &[file, "begin another run"]);
        assert!(Path::new(&path).exists(), "nothing is removed");
    }
}

#[test]
fn a_damaged_newest_checkpoint_is_kept_aside_and_the_one_before_goes_on() {
    let folder = Folder::new("damaged-newest");
    let (run, whole) = (folder.path("run"), folder.path("whole"));
    let every = ["train.checkpoint_every=3", "eval.every=0"];
    fine(&tiny(&whole, &[&every[..], &["train.batches=9"]].concat()));
    for file in ["model.safetensors", "state.safetensors", "progress.json"] {
        fine(&tiny(&run, &[&every[..], &["train.batches=6", "--force"]].concat()));
        assert_eq!(names(format!("{run}/checkpoints")), ["00000003", "00000006", "best", "last"]);
        flip(format!("{run}/checkpoints/00000006/{file}"));
        let output = elmur(&["train", "--resume", &run, "train.batches=9"]);
        let said = String::from_utf8(output.stderr.clone()).unwrap();
        assert_eq!(output.status.code(), Some(0), "{said}");
        for part in ["note: ", file, "00000006.damaged", "resuming from", "00000003"] {
            assert!(said.contains(part), "no {part}: {said}");
        }
        assert!(Path::new(&run).join("checkpoints/00000006.damaged").join(file).exists());
        assert!(checkpoint(&run, 9) == checkpoint(&whole, 9), "{file}");
        let batches: Vec<u64> = rows(&std::fs::read_to_string(format!("{run}/metrics.jsonl")).unwrap())
            .iter()
            .filter(|row| row["loss"].is_number())
            .map(|row| row["batch"].as_u64().unwrap())
            .collect();
        assert_eq!(batches, (1..=9).collect::<Vec<_>>());
        fine(&["eval", &run, "--episodes", "10"]);
    }
    for number in ["00000006", "00000009"] {
        flip(format!("{run}/checkpoints/{number}/state.safetensors"));
    }
    refused(&["train", "--resume", &run, "train.batches=12"], &["no checkpoint", "begin another run"]);
}

#[test]
fn leftovers_of_processes_that_died_are_swept_at_resume() {
    let folder = Folder::new("leftovers");
    let run = folder.path("run");
    fine(&tiny(&run, &["train.checkpoint_every=3"]));
    let here = Path::new(&run);
    for name in [".00000004.tmp", ".00000002.gone", "00000001"] {
        std::fs::create_dir(here.join("checkpoints").join(name)).unwrap();
        std::fs::write(here.join("checkpoints").join(name).join("model.safetensors"), b"half").unwrap();
    }
    std::fs::write(here.join(".config.json.123.0.tmp"), b"{").unwrap();
    std::fs::write(here.join("checkpoints/.last.tmp"), b"").unwrap();
    // What a user put there stays.
    std::fs::create_dir(here.join("checkpoints/mine")).unwrap();
    std::fs::write(here.join("notes.txt"), b"mine").unwrap();
    fine(&["train", "--resume", &run, "train.batches=7"]);
    let left = names(here.join("checkpoints"));
    assert!(left.iter().all(|name| !name.starts_with('.') && name != "00000001"), "{left:?}");
    assert!(left.contains(&"mine".to_owned()) && here.join("notes.txt").exists());
    assert!(!names(here).iter().any(|name| name.ends_with(".tmp")), "{:?}", names(here));
}

#[test]
fn evaluations_say_what_they_measured() {
    let folder = Folder::new("measures");
    let (pole, maze) = (folder.path("pole"), folder.path("maze"));
    let args = [&["train", "cartpole"], &SMALL[..], &["data.episodes=5", "--out", &pole]].concat();
    fine(&args);
    fine(&tiny(&maze, &[]));
    let said = fine(&["eval", &pole, "--episodes", "10"]);
    assert!(said.contains("cartpole: return ") && said.contains("good play: 500"), "{said}");
    let said = fine(&["eval", &maze, "--episodes", "10"]);
    assert!(said.contains("tmaze T = 9: success rate "), "{said}");
    for (run, measure) in [(&pole, "return"), (&maze, "success_rate")] {
        for row in rows(&fine(&["eval", run, "--episodes", "10", "--json"])) {
            assert_eq!(row["measure"], measure, "{row}");
        }
        let metrics = std::fs::read_to_string(format!("{run}/metrics.jsonl")).unwrap();
        let last = rows(&metrics).pop().unwrap();
        assert!(last["measure"] == measure && last["score"] == last[measure], "{last}");
    }
    // The best of CartPole is chosen by its return.
    let about = &rows(&fine(&["inspect", &pole, "--json"]))[0];
    assert!(about["measure"] == "return" && about["best_validation"].as_f64().unwrap() > 5.0, "{about}");
}

#[test]
fn continuous_actions_have_errors_and_no_accuracy() {
    let folder = Folder::new("continuous");
    let run = folder.path("run");
    let preset = "popgym-PositionOnlyPendulumEasy";
    let output = elmur(&[&["train", preset], &SMALL[..], &["data.episodes=5", "--out", &run]].concat());
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("mean squared error") && !said.contains("accuracy"), "{said}");
    let metrics = std::fs::read_to_string(format!("{run}/metrics.jsonl")).unwrap();
    assert!(metrics.contains("action_loss") && !metrics.contains("accuracy"), "{metrics}");
    let about = fine(&["inspect", &run]);
    assert!(about.contains("mean squared error") && !about.contains("accuracy"), "{about}");
    assert!(rows(&fine(&["inspect", &run, "--json"]))[0]["accuracy"].is_null());
    // Pictures make the folders they lie in.
    let picture = folder.path("new/folders/run");
    fine(&["plot", "run", &run, "--out", &picture]);
    let drawn = std::fs::read_to_string(format!("{picture}-loss.svg")).unwrap();
    assert!(drawn.contains("training loss") && !drawn.contains("accuracy"));
    assert!(!std::fs::read_to_string(format!("{picture}.svg")).unwrap().contains("accuracy"));
}

#[test]
fn numbers_out_of_range_are_refused() {
    let folder = Folder::new("range");
    let out = folder.path("out");
    for args in [
        &["bench", "step", "--segments", "0"][..],
        &["bench", "train", "--batches", "0"],
        &["bench", "block", "--rounds", "0"],
        &["bench", "bank", "--rows", "0"],
        &["bench", "bank", "--calls", "0"],
        &["bench", "step", "--threads", "100000"],
        &["bench", "train", "--runs", "100000"],
        &["bench", "train", "--threads", "100000"],
        &["bench", "envs", "--threads", "100000"],
        &["collect", "tmaze", "--threads", "100000", "--out", &out],
        &["demo", "--longest", "1", "--out", &out],
    ] {
        refused(args, &[args[args.len() - if args[0] == "collect" || args[0] == "demo" { 3 } else { 1 }]]);
    }
    refused(&["collect", "cartpole", "--length", "7", "--out", &out], &["length", "cartpole has none"]);
    let huge = ["train", "tmaze", "model.d_model=1048576", "--out", &out];
    let said = refused(&huge, &["`model.d_model`", "at most"]);
    assert!(!said.contains("engine"), "{said}");
    refused(&["train", "tmaze", "model.layers=0", "--out", &out], &["`model.layers`"]);
    refused(&["train", "tmaze", "model.memory.slots=0", "--out", &out], &["`model.memory.slots`"]);
    assert!(!Path::new(&out).exists());
}

#[test]
fn an_archive_that_claims_gigabytes_is_refused_at_once() {
    let folder = Folder::new("bomb");
    let data = folder.path("data");
    std::fs::create_dir(&data).unwrap();
    // An empty deflate stream that is said to hold 2 GiB.
    let member = |name: &'static str| (name, 8, &[3, 0][..], 1 << 31);
    let archive = zip(&["obs", "action", "reward"].map(member));
    (0..3).for_each(|i| std::fs::write(format!("{data}/train_data_{i}.npz"), &archive).unwrap());
    let begin = Instant::now();
    refused(&["inspect", &data], &["train_data_0.npz", "inflates to 6442450944 bytes"]);
    let args = ["train", "tmaze-quick", "--data", &data, "--out", &folder.path("run")];
    refused(&args, &["train_data_0.npz", "inflates to 6442450944 bytes"]);
    assert!(begin.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_dataset_is_replaced_only_by_force_and_grows_by_append() {
    let folder = Folder::new("collect-over");
    let [data, whole] = ["data.elmur", "whole.elmur"].map(|name| folder.path(name));
    let collect = |episodes: &str, out: &str, more: &[&str]| {
        let args = ["collect", "tmaze", "--length", "9", "--episodes", episodes, "--out", out];
        elmur(&[&args[..], more].concat())
    };
    let code = |output: std::process::Output| output.status.code();
    assert_eq!(code(collect("30", &data, &[])), Some(0));
    let before = std::fs::read(&data).unwrap();
    let output = collect("5", &data, &[]);
    assert!(code(output.clone()) == Some(2) && text(&output).contains("--force"), "{}", text(&output));
    assert!(std::fs::read(&data).unwrap() == before);
    // Appended episodes continue the others.
    assert_eq!(code(collect("12", &data, &["--append"])), Some(0));
    assert_eq!(code(collect("42", &whole, &[])), Some(0));
    assert!(std::fs::read(&data).unwrap() == std::fs::read(&whole).unwrap());
    let output = collect("5", &data, &["--append", "--seed", "1"]);
    assert!(code(output.clone()) == Some(2) && text(&output).contains("seed"), "{}", text(&output));
    assert_eq!(code(collect("30", &data, &["--force"])), Some(0));
    assert!(std::fs::read(&data).unwrap() == before);
    // Folders too, and a folder with other files is never removed.
    let npz = folder.path("npz");
    assert_eq!(code(collect("3", &npz, &["--npz"])), Some(0));
    assert_eq!(code(collect("2", &npz, &["--npz"])), Some(2));
    assert_eq!(names(&npz).len(), 3);
    std::fs::write(format!("{npz}/notes.txt"), b"mine").unwrap();
    assert_eq!(code(collect("2", &npz, &["--npz", "--force"])), Some(2));
    std::fs::remove_file(format!("{npz}/notes.txt")).unwrap();
    assert_eq!(code(collect("2", &npz, &["--npz", "--force"])), Some(0));
    assert_eq!(names(&npz).len(), 2);
}

#[test]
fn what_is_inspected_is_judged_by_its_content() {
    let folder = Folder::new("content");
    let data = folder.path("x.txt");
    fine(&["collect", "tmaze", "--episodes", "3", "--length", "9", "--out", &data]);
    assert!(fine(&["inspect", &data]).contains("3 episodes"));
    let one = folder.path("one.npz");
    let (numbers, zeros) = ([0, 1, 2, 1], [0.0; 4]);
    let arrays = [
        Array::ints("obs", &[4], &numbers),
        Array::ints("action", &[4], &numbers),
        Array::floats("reward", &[4], &zeros),
    ];
    save_npz(&one, &arrays);
    assert!(fine(&["inspect", &one]).contains("1 episodes, 4 steps"));
    let [words, noise, pipe] = ["words.txt", "noise.bin", "pipe"].map(|name| folder.path(name));
    std::fs::write(&words, "just words").unwrap();
    std::fs::write(&noise, [0xff, 0xfe, 0x00, 0x9c]).unwrap();
    for path in [&words, &noise] {
        for more in [&[][..], &["--keys"]] {
            let said =
                refused(&[&["inspect", path], more].concat(), &[path, "neither a config.json nor a dataset"]);
            assert!(!said.contains("UTF-8"), "{said}");
        }
        let said = refused(&["train", path, "--out", &folder.path("run")], &[path, "config.json"]);
        assert!(!said.contains("UTF-8"), "{said}");
    }
    refused(&["inspect", &data, "--keys"], &["a dataset, not a config"]);
    refused(&["train", &data], &["a dataset", &format!("--data {data}")]);
    let run = folder.path("run");
    fine(&tiny(&run, &[]));
    refused(&["inspect", &format!("{run}/metrics.jsonl")], &["a part of", "give that folder"]);
    refused(&["inspect", &format!("{run}/checkpoints/best/model.safetensors")], &["a part of"]);
    let keys = fine(&["inspect", &run, "--keys"]);
    assert!(keys.contains("model.d_model=16") && keys.contains("train.batches=6"), "{keys}");
    // A pipe that nobody writes to.
    if Command::new("mkfifo").arg(&pipe).status().is_ok_and(|made| made.success()) {
        for args in
            [&["inspect", &pipe][..], &["inspect", &pipe, "--keys"], &["train", "tmaze", "--data", &pipe]]
        {
            let output = ended(start(args), 5);
            assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output));
        }
    }
}

#[test]
fn verify_says_what_a_trace_is() {
    let folder = Folder::new("verify");
    let toml = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    let said = refused(&["verify", toml], &["Cargo.toml: not a trace", "NAME.safetensors", "NAME.json.gz"]);
    assert!(!said.contains("Cargo.json"), "{said}");
    let weights = folder.path("weights.safetensors");
    std::fs::write(&weights, b"").unwrap();
    refused(&["verify", &weights], &["the .json is missing"]);
    // Of a trace in two files either is enough, and both are one.
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../elmur-model/tests/golden");
    let [one, other] = ["json", "safetensors"].map(|end| golden.join(format!("tmaze-small.{end}")));
    let [one, other] = [&one, &other].map(|path| path.to_str().unwrap());
    assert_eq!(rows(&fine(&["verify", "--json", one])).len(), 2);
    assert_eq!(rows(&fine(&["verify", "--json", one, other])).len(), 2);
}

#[test]
fn plots_of_the_wrong_thing_are_refused_with_the_right_command() {
    let folder = Folder::new("plots");
    let (run, picture) = (folder.path("run"), folder.path("a/b/picture"));
    fine(&tiny(&run, &[]));
    let remedy = format!("elmur eval {run}");
    for what in ["success", "heat-map"] {
        refused(&["plot", what, &run, "--out", &picture], &[&run, &remedy, "elmur plot run"]);
    }
    let file = folder.path("rows.jsonl");
    std::fs::write(&file, fine(&["eval", &run, "--lengths", "9,12", "--episodes", "10", "--json"])).unwrap();
    fine(&["plot", "success", &file, "--out", &picture]);
    assert!(Path::new(&format!("{picture}.png")).exists());
    let evaluated = folder.path("c/d/picture");
    fine(&["eval", &run, "--lengths", "9,12", "--episodes", "10", "--plot", &evaluated]);
    assert!(Path::new(&format!("{evaluated}.svg")).exists());
}

#[test]
fn a_run_is_repeated_from_its_config_to_the_byte() {
    let folder = Folder::new("repeat");
    let [run, again, alone] = ["run", "again", "alone"].map(|name| folder.path(name));
    fine(&tiny(&run, &["--seed", "5"]));
    fine(&["train", &format!("{run}/config.json"), "--out", &again]);
    assert!(checkpoint(&run, 6) == checkpoint(&again, 6));
    assert_eq!(
        std::fs::read(format!("{run}/config.json")).unwrap(),
        std::fs::read(format!("{again}/config.json")).unwrap()
    );
    // One thread, as a scheduler may grant it, changes nothing.
    let output = Command::new(env!("CARGO_BIN_EXE_elmur"))
        .args(tiny(&alone, &["--seed", "5"]))
        .env("SLURM_CPUS_PER_TASK", "1")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert!(checkpoint(&run, 6) == checkpoint(&alone, 6));
    refused(&["train", &run, "--out", &folder.path("x")], &["config.json", "--resume"]);
}

#[test]
fn quiet_commands_print_results_alone() {
    let folder = Folder::new("quiet");
    let (run, data) = (folder.path("run"), folder.path("data.elmur"));
    let collect = ["collect", "tmaze", "--episodes", "30", "--length", "9", "--quiet", "--out", &data];
    let several = folder.path("several");
    for args in [
        &collect[..],
        &tiny(&run, &["--quiet"]),
        &tiny(&several, &["--quiet", "--seeds", "2"]),
        &["train", "--resume", &run, "--quiet", "train.batches=8"],
        &["eval", &run, "--episodes", "10", "-q"],
        &["eval", &run, "--data", &data, "--quiet"],
    ] {
        let output = elmur(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output));
        assert!(output.stderr.is_empty() && !output.stdout.is_empty(), "{args:?}: {}", text(&output));
    }
    refused(&["eval", &folder.path("none"), "--quiet"], &["no such run"]);
}

#[test]
fn json_is_one_object_per_line() {
    let folder = Folder::new("json");
    let (run, data) = (folder.path("run"), folder.path("data.elmur"));
    let collected =
        rows(&fine(&["collect", "tmaze", "--episodes", "30", "--length", "9", "--json", "--out", &data]));
    assert_eq!((collected.len(), collected[0]["episodes"].as_u64()), (1, Some(30)));
    let trained = rows(&fine(&tiny(&run, &["eval.every=3", "--json"])));
    let events: Vec<&Value> = trained.iter().map(|row| &row["event"]).collect();
    assert_eq!(events, ["validation", "validation", "end"]);
    assert!(trained[0]["batch"] == 3 && trained[0]["measure"] == "success_rate", "{trained:?}");
    assert!(trained[2]["ended"] == "finished" && trained[2]["run"] == run.as_str(), "{trained:?}");
    let several = folder.path("several");
    let trained = rows(&fine(&tiny(&several, &["--seeds", "2", "--json"])));
    let ends: Vec<u64> =
        trained.iter().filter(|row| row["event"] == "end").map(|row| row["seed"].as_u64().unwrap()).collect();
    assert_eq!(ends, [0, 1]);
    assert!(rows(&fine(&["presets", "--json"])).iter().any(|row| row["name"] == "tmaze-quick"));
    for what in ["tmaze", &run, &data, &format!("{run}/checkpoints/best")] {
        assert_eq!(rows(&fine(&["inspect", what, "--json"])).len(), 1, "{what}");
    }
    let keys = rows(&fine(&["inspect", &run, "--keys", "--json"]));
    assert!(keys.iter().any(|row| row["key"] == "train.batch" && row["value"] == 8), "{keys:?}");
}

#[test]
fn completions_know_presets_and_environments() {
    for shell in ["bash", "zsh"] {
        let script = fine(&["completions", shell]);
        for name in ["tmaze-quick", "popgym-RepeatFirstEasy", "cartpole"] {
            assert!(script.contains(name), "{shell}: {name}");
        }
    }
}

/// Runs the program where no file may have more than 8 KiB: writing more fails as on a full disk.
#[cfg(unix)]
fn where_disks_are_full(args: &[&str]) -> std::process::Output {
    let script = "trap '' XFSZ; ulimit -f 16; exec \"$0\" \"$@\"";
    Command::new("sh").args(["-c", script, env!("CARGO_BIN_EXE_elmur")]).args(args).output().unwrap()
}

#[test]
#[cfg(unix)]
fn a_full_disk_is_not_the_users_mistake_and_what_was_done_is_kept() {
    let folder = Folder::new("full");
    let [data, whole] = ["data.elmur", "whole.elmur"].map(|name| folder.path(name));
    let exhausted = |args: &[&str]| {
        let output = where_disks_are_full(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {}", text(&output));
        assert!(text(&output).contains("error: "), "{args:?}: {}", text(&output));
    };
    let collect = |out: &str| {
        let args = ["collect", "tmaze", "--length", "9", "--episodes", "300", "--out", out];
        args.map(str::to_owned)
    };
    let args = collect(&data);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    exhausted(&args);
    assert!(!Path::new(&data).exists());
    let output = elmur(&args);
    assert!(output.status.success() && text(&output).contains("going on after"), "{}", text(&output));
    let undisturbed = collect(&whole);
    fine(&undisturbed.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(std::fs::read(&data).unwrap() == std::fs::read(&whole).unwrap());

    let run = folder.path("run");
    exhausted(&tiny(&run, &[]));
    assert!(names(format!("{run}/checkpoints")).is_empty());
    refused(&["eval", &run], &["no checkpoint yet", "elmur train --resume"]);
    fine(&["train", "--resume", &run]);
    exhausted(&["plot", "run", &run, "--out", &folder.path("picture")]);
    let demo = folder.path("demo");
    exhausted(&["demo", "--out", &demo]);
    exhausted(&["demo", "--out", &demo]);
    // Standard output too can be on a full disk.
    if let Ok(full) = std::fs::OpenOptions::new().write(true).open("/dev/full") {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elmur"));
        let output = command.arg("presets").stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    }
}

#[test]
fn a_run_that_has_not_begun_says_so() {
    let folder = Folder::new("not-begun");
    let run = folder.path("run");
    fine(&tiny(&run, &[]));
    for name in ["checkpoints", "tensorboard"] {
        std::fs::remove_dir_all(format!("{run}/{name}")).unwrap();
    }
    std::fs::remove_file(format!("{run}/metrics.jsonl")).unwrap();
    std::fs::create_dir(format!("{run}/checkpoints")).unwrap();
    refused(&["eval", &run], &["no checkpoint yet", "elmur train --resume"]);
    refused(&["plot", "run", &run, "--out", &folder.path("picture")], &["no batches yet"]);
    assert!(fine(&["inspect", &run]).contains("a run of 0 batches"));
    // What is left of a process that died between removing a run and making another; and what is not a run.
    let left = folder.path("left");
    std::fs::create_dir(&left).unwrap();
    std::fs::write(format!("{left}/.lock"), b"").unwrap();
    fine(&tiny(&left, &["--force"]));
    let other = folder.path("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(format!("{other}/thesis.txt"), b"").unwrap();
    refused(&tiny(&other, &["--force"]), &["not a run"]);
}

/// Progress on a terminal; `script` gives one.
#[test]
#[cfg(target_os = "linux")]
fn a_validation_is_shown_while_it_goes_on() {
    let folder = Folder::new("validating");
    let run = folder.path("run");
    let args = tiny(&run, &["train.batches=2", "eval.episodes=300", "eval.length=900", "eval.target=null"]);
    let line = [&[env!("CARGO_BIN_EXE_elmur")], &args[..]].concat().join(" ");
    let Ok(output) = Command::new("script").args(["-qec", &line, "/dev/null"]).output() else { return };
    let said = text(&output);
    assert!(said.contains("validating ") && said.contains("success rate"), "{said}");
    // In a file, where lines cannot be replaced, there are few.
    let output = elmur(&[&args[..], &["--force"]].concat());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.lines().count() < 8, "{said}");
}

#[test]
fn seeds_trained_together_show_their_progress() {
    let folder = Folder::new("seeds");
    let run = folder.path("runs");
    let output = elmur(&tiny(&run, &["--seeds", "2"]));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("training ") && said.contains("batches/s") && said.contains("loss"), "{said}");
    assert!(said.contains("seed 1, batch 6: validation success rate"), "{said}");
}

/// Arguments that train a tiny policy on CartPole.
fn balancing<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let env = ["env={\"name\":\"cartpole\"}", "eval.settings={}", "data.episodes=20", "eval.target=null"];
    [&["train", "tmaze-quick"], &SMALL[..], &env, more, &["--out", out]].concat()
}

#[test]
fn runs_of_different_measures_are_judged_by_one() {
    let folder = Folder::new("one-metric");
    let (solved, summed) = (folder.path("solved"), folder.path("summed"));
    fine(&balancing(&solved, &["eval.metric=success"]));
    fine(&balancing(&summed, &["eval.metric=return"]));
    let judged = |more: &[&str]| {
        let args = [&["eval", &solved, &summed, "--episodes", "10", "--json"], more].concat();
        rows(&fine(&args)).iter().map(|row| row["measure"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    // The environment decides where the runs do not agree, and the user over all.
    assert_eq!(judged(&[]), ["return"; 3]);
    assert_eq!(judged(&["--metric", "success"]), ["success_rate"; 3]);
    let said = fine(&["eval", &solved, &summed, "--episodes", "10"]);
    assert!(said.contains("cartpole: return "), "{said}");
    let said = fine(&["eval", &solved, &solved, "--episodes", "10"]);
    assert!(said.contains("cartpole: success rate "), "{said}");
    refused(&["eval", &solved, "--env", "popgym-RepeatFirstEasy", "--metric", "nothing"], &["--metric"]);
}

#[test]
fn recordings_are_judged_as_far_as_asked() {
    let folder = Folder::new("first-episodes");
    let (data, run) = (folder.path("maze.elmur"), folder.path("run"));
    fine(&["collect", "tmaze", "--episodes", "40", "--length", "9", "--out", &data]);
    fine(&tiny(&run, &[]));
    let episodes = |more: &[&str]| {
        let args = [&["eval", &run, "--data", &data, "--json"], more].concat();
        rows(&fine(&args)).iter().map(|row| row["episodes"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(episodes(&["--episodes", "7"]), [7, 7]);
    assert_eq!(episodes(&[]), [40, 40]);
    assert_eq!(episodes(&["--episodes", "1000"]), [40, 40]);
}

#[test]
fn what_is_no_checkpoint_and_no_config_is_named_as_such() {
    let folder = Folder::new("neither");
    let (file, run) = (folder.path("notes.txt"), folder.path("run"));
    std::fs::write(&file, b"notes").unwrap();
    fine(&tiny(&run, &[]));
    refused(&["eval", &file], &["neither a run nor a checkpoint"]);
    refused(&["eval", &folder.path("")], &["neither a run nor a checkpoint"]);
    let part = format!("{run}/checkpoints/last/model.safetensors");
    refused(&["eval", &part], &["a part of", "give that folder"]);
    for name in ["nosuch/config.json", "nosuch.json"] {
        let said = refused(&["train", name], &["no such file", "elmur presets"]);
        assert!(!said.contains("tmaze-quick"), "{said}");
    }
    refused(&["train", "tmaze-quik"], &["tmaze-quick"]);
}

#[test]
fn a_demo_replaces_no_demonstrations_or_pictures_of_others() {
    let folder = Folder::new("foreign-demo");
    let (data, begun, pictures) = (folder.path("data"), folder.path("begun"), folder.path("pictures"));
    let refused_and_kept = |out: &str, name: &str| {
        let path = Path::new(out).join(name);
        let before = (std::fs::read(&path).unwrap(), names(out));
        refused(&["demo", "--out", out, "--longest", "9"], &[name, "not of a demo", "--out"]);
        assert!((std::fs::read(&path).unwrap(), names(out)) == before, "{name}");
    };
    for out in [&data, &begun, &pictures] {
        std::fs::create_dir(out).unwrap();
    }
    let file = format!("{data}/demonstrations.elmur");
    fine(&["collect", "tmaze", "--episodes", "40", "--length", "9", "--out", &file]);
    refused_and_kept(&data, "demonstrations.elmur");
    // Also where it lies beside a folder as a demo that was killed at once leaves it.
    std::fs::create_dir(format!("{data}/checkpoints")).unwrap();
    refused_and_kept(&data, "demonstrations.elmur");
    std::fs::rename(&file, format!("{begun}/demonstrations.elmur.tmp")).unwrap();
    refused_and_kept(&begun, "demonstrations.elmur.tmp");
    std::fs::write(format!("{pictures}/slots.png"), b"a picture").unwrap();
    refused_and_kept(&pictures, "slots.png");
}

#[test]
fn several_seeds_are_made_all_or_none() {
    let folder = Folder::new("all-or-none");
    let out = folder.path("new/runs");
    let seeds = |more: &[&'static str]| -> Vec<String> {
        tiny(&out, &[&["--seeds", "3"], more].concat()).iter().map(|arg| (*arg).to_owned()).collect()
    };
    let refuses = |more: &[&'static str], parts: &[&str]| {
        let args = seeds(more);
        refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), parts);
    };
    // The second is taken: the first is not made.
    fine(&tiny(&format!("{out}/seed-1"), &["--seed", "1"]));
    refuses(&[], &["seed-1", "holds a run already"]);
    assert_eq!(names(&out), ["seed-1"]);
    // The third is no run: the second is not replaced, nor the first made.
    let notes = format!("{out}/seed-2/notes.txt");
    std::fs::create_dir(format!("{out}/seed-2")).unwrap();
    std::fs::write(&notes, b"notes").unwrap();
    let before = checkpoint(&format!("{out}/seed-1"), 6);
    refuses(&["--force", "model.d_model=8"], &["seed-2", "not a run"]);
    assert_eq!(names(&out), ["seed-1", "seed-2"]);
    assert!(checkpoint(&format!("{out}/seed-1"), 6) == before && Path::new(&notes).exists());
    // A folder that was not there is gone again.
    std::fs::remove_dir_all(folder.path("new")).unwrap();
    std::fs::create_dir(folder.path("new")).unwrap();
    std::fs::create_dir(&out).unwrap();
    std::fs::write(format!("{out}/seed-2"), b"a file").unwrap();
    refuses(&[], &["seed-2"]);
    assert_eq!(names(&out), ["seed-2"]);
}

#[cfg(unix)]
#[test]
fn forced_seeds_replace_nothing_while_one_of_them_is_trained() {
    let folder = Folder::new("forced-seeds");
    let out = folder.path("runs");
    let [first, second] = ["seed-0", "seed-1"].map(|name| format!("{out}/{name}"));
    fine(&tiny(&first, &[]));
    let before = checkpoint(&first, 6);
    let long = ["--seed", "1", "train.batches=10000000", "train.checkpoint_every=1000000", "eval.every=0"];
    let child = Running(start(&tiny(&second, &long)));
    until(Path::new(&second).join("metrics.jsonl"), 500);
    refused(&tiny(&out, &["--seeds", "2", "--force"]), &["another process trains this run"]);
    assert!(checkpoint(&first, 6) == before);
    drop(child);
    fine(&tiny(&out, &["--seeds", "2", "--force"]));
}
