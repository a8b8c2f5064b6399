//! Recordings of tasks that only their owner knows.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use common::*;

/// Writes episodes in which a symbol is seen first and must be answered at the end, among noise; returns
/// their folder.
fn symbols(folder: &Folder, episodes: usize) -> String {
    let path = folder.path("symbols");
    std::fs::create_dir(&path).unwrap();
    for i in 0..episodes {
        const STEPS: usize = 12;
        let symbol = (i % 8) as i64;
        let noise = |step: usize| 8 + ((i * 7 + step * step * 5 + i * step) % 3 % 2) as i64;
        let mut seen: Vec<i64> = (0..STEPS).map(noise).collect();
        (seen[0], seen[STEPS - 1]) = (symbol, 10);
        let (mut done, mut counts) = ([0; STEPS], [0.0; STEPS]);
        (done[STEPS - 1], counts[STEPS - 1]) = (symbol, 1.0);
        let arrays = [
            Array::ints("obs", &[STEPS], &seen),
            Array::ints("action", &[STEPS], &done),
            Array::floats("reward", &[STEPS], &[0.0; STEPS]),
            Array::floats("counts", &[STEPS], &counts),
        ];
        save_npz(format!("{path}/train_data_{i}.npz"), &arrays);
    }
    path
}

/// Writes episodes whose actions are the halves of what is seen; returns their folder.
fn halves(folder: &Folder, episodes: usize) -> String {
    let path = folder.path("halves");
    std::fs::create_dir(&path).unwrap();
    for i in 0..episodes {
        let seen: Vec<f32> = (0..20).map(|k| ((i * 37 + k * k * 13) % 101) as f32 / 50.0 - 1.0).collect();
        let taken: Vec<f32> = seen.iter().map(|x| x / 2.0).collect();
        let arrays = [
            Array::floats("obs", &[10, 2], &seen),
            Array::floats("action", &[10, 2], &taken),
            Array::floats("reward", &[10], &[0.0; 10]),
        ];
        save_npz(format!("{path}/train_data_{i}.npz"), &arrays);
    }
    path
}

#[test]
fn symbols_of_an_own_task_are_learnt_and_judged_by_accuracy() {
    let folder = Folder::new("symbols");
    let data = symbols(&folder, 400);
    assert!(fine(&["inspect", &data]).contains("400 episodes"));
    let settings = ["model.segment_length=4", "train.batch=32", "train.lr=0.003", "train.epochs=0"];
    for preset in ["tmaze-quick", "small"] {
        let run = folder.path(preset);
        let more = ["train.batches=300", "eval.every=50", "--data", &data, "--out", &run];
        let output = elmur(&[&["train", preset], &settings[..], &more].concat());
        let said = text(&output);
        assert_eq!(output.status.code(), Some(0), "{said}");
        assert!(said.contains("40 held-out episodes of 400"), "{said}");
        // The hint at the end works.
        let hint = said.lines().find_map(|line| line.strip_prefix("try it: elmur ")).unwrap();
        let judged = fine(&hint.split(' ').collect::<Vec<_>>());
        assert!(judged.contains("accuracy 1.000") || judged.contains("accuracy 0.9"), "{judged}");
        let row = &rows(&fine(&["eval", &run, "--data", &data, "--json"]))[0];
        assert!(row["measure"] == "accuracy" && row["actions"] == 400, "{row}");
        assert!(row["score"].as_f64().unwrap() > 0.95, "{row}");
        // The best checkpoint is the latest of the highest accuracy.
        let metrics = rows(&std::fs::read_to_string(format!("{run}/metrics.jsonl")).unwrap());
        let scores = metrics.iter().filter_map(|row| Some((row["score"].as_f64()?, row["batch"].as_u64()?)));
        let best = scores.max_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))).unwrap();
        let link = std::fs::read_link(format!("{run}/checkpoints/best")).unwrap();
        assert_eq!(link.to_str().unwrap(), format!("{:08}", best.1));
        refused(&["eval", &run], &["--data PATH"]);
    }
}

#[test]
fn continuous_actions_of_an_own_task_are_judged_by_their_error() {
    let folder = Folder::new("halves");
    let data = halves(&folder, 80);
    let run = folder.path("run");
    let more = ["eval.every=20", "train.batches=120", "train.lr=0.003", "--data", &data, "--out", &run];
    let output = elmur(&[&["train", "tmaze-quick"], &SMALL[..], &more].concat());
    let said = text(&output);
    // The target of T-Maze, a success rate of 1, is none for errors.
    assert!(output.status.success() && said.contains("done: ") && said.contains("target"), "{said}");
    assert!(said.contains("validation mean squared error"), "{said}");
    let row = &rows(&fine(&["eval", &run, "--data", &data, "--json"]))[0];
    assert_eq!(row["measure"], "mean_squared_error", "{row}");
    assert!(row["score"].as_f64().unwrap() < 0.05, "{row}");
    let metrics = rows(&std::fs::read_to_string(format!("{run}/metrics.jsonl")).unwrap());
    let scores: Vec<f64> = metrics.iter().filter_map(|row| row["score"].as_f64()).collect();
    assert_eq!(scores.len(), 6);
    let about = &rows(&fine(&["inspect", &run, "--json"]))[0];
    assert_eq!(about["best_validation"].as_f64(), scores.iter().copied().reduce(f64::min), "{about}");
    assert!(about["accuracy"].is_null(), "{about}");
}

#[test]
fn a_single_episode_is_judged_by_its_loss_without_the_target_of_another_task() {
    let folder = Folder::new("single");
    let (data, run) = (symbols(&folder, 1), folder.path("run"));
    let more = ["eval.every=2", "--data", &data, "--out", &run];
    let said = fine(&[&["train", "tmaze-quick"], &SMALL[..], &more].concat());
    assert!(said.contains("done: "), "{said}");
}

#[test]
fn data_without_an_environment_end_with_a_hint_that_works() {
    let folder = Folder::new("hint");
    let (data, run) = (folder.path("maze.elmur"), folder.path("run"));
    fine(&["collect", "tmaze", "--episodes", "40", "--length", "9", "--out", &data]);
    let more = ["env=null", "--data", &data, "--out", &run];
    let said = fine(&[&["train", "tmaze-quick"], &SMALL[..], &more].concat());
    let hint = said.lines().find_map(|line| line.strip_prefix("try it: elmur ")).unwrap();
    assert!(fine(&hint.split(' ').collect::<Vec<_>>()).contains("accuracy"), "{hint}");
    // Without data there is nothing to learn from.
    refused(&["train", "tmaze-quick", "env=null", "--out", &folder.path("none")], &["--data PATH"]);
}

#[test]
fn integers_that_are_no_choices_are_refused_with_what_to_save_instead() {
    let folder = Folder::new("negative");
    let data = folder.path("data");
    std::fs::create_dir(&data).unwrap();
    let arrays = [
        Array::ints("obs", &[3, 2], &[0, -1, 2, 3, 1, 0]),
        Array::ints("action", &[3], &[0, 1, 0]),
        Array::floats("reward", &[3], &[0.0; 3]),
    ];
    save_npz(format!("{data}/train_data_0.npz"), &arrays);
    let said = refused(&["train", "tmaze-quick", "--data", &data], &["train_data_0.npz", "float32"]);
    assert!(!said.contains("give spaces"), "{said}");
}

#[test]
fn recordings_that_show_fewer_choices_than_the_policy_has_are_judged() {
    let folder = Folder::new("fewer");
    let (data, run) = (symbols(&folder, 16), folder.path("run"));
    let more = ["--data", &data, "--out", &run];
    fine(&[&["train", "tmaze-quick"], &SMALL[..], &more].concat());
    // One episode has one of eight symbols.
    let one = format!("{data}/train_data_1.npz");
    let row = &rows(&fine(&["eval", &run, "--data", &one, "--json"]))[0];
    assert!(row["measure"] == "accuracy" && row["episodes"] == 1, "{row}");
    // More choices than it has are none of its own.
    let arrays = [
        Array::ints("obs", &[3], &[0, 1, 2]),
        Array::ints("action", &[3], &[0, 30, 0]),
        Array::floats("reward", &[3], &[0.0; 3]),
    ];
    let other = folder.path("other.npz");
    save_npz(&other, &arrays);
    refused(&["eval", &run, "--data", &other], &["choose a policy for these spaces, or other data"]);
}
