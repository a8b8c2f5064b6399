//! Whole runs: learning, resuming to the byte, stopping, diverging.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use elmur_base::{Space, Spaces, Stop};
use elmur_data::{Column, Dataset, Episode, Limits, Loader, Source, open_with};
use elmur_engine::Pool;
use elmur_envs::{EnvSpec, Environment, Metric, Registry};
use elmur_model::elmur::config::MemoryGradient;
use elmur_model::ends::{Action, CategoricalEncoding, Encoder, TokenFormat};
use elmur_model::session::Weights;
use elmur_model::{Checkpoint, Elmur, PolicyConfig};
use elmur_train::{
    DataConfig, Ended, Error, Evaluation, Event, Prepared, RunConfig, RunFolder, Seeds, Trainer, evaluate,
    overrides, timeline, train,
};

/// A folder that is removed when the test ends well.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("elmur-train-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

/// A tiny T-Maze run with dropout, 12 batches.
fn tiny(changes: &[&str]) -> RunConfig {
    let mut all = vec![
        "model.d_model=16",
        "model.ffn={\"swi_glu\":{\"d_ff\":16}}",
        "model.segment_length=3",
        "env.length=9",
        "data.episodes=60",
        "train.batch=8",
        "train.epochs=0",
        "train.batches=12",
        "train.checkpoint_every=5",
        "eval.every=4",
        "eval.episodes=10",
        "eval.length=9",
    ];
    all.extend(changes);
    changed(&RunConfig::preset("tmaze-quick").unwrap(), &all)
}

fn changed(config: &RunConfig, changes: &[impl ToString]) -> RunConfig {
    let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
    overrides::apply(config, &changes, &Registry::builtin()).unwrap()
}

fn prepared(config: &RunConfig) -> Prepared {
    config.prepare(&Registry::builtin(), false).unwrap()
}

fn maze(length: u64) -> Environment {
    Registry::builtin().find(&EnvSpec::new("tmaze").with("length", length)).unwrap()
}

fn run(path: &Path, config: &RunConfig, resume: bool, stop_at: Option<u64>) -> Result<Ended, Error> {
    let folder = if resume { RunFolder::open(path)? } else { RunFolder::create(path, config)? };
    let stop = Stop::default();
    train(&folder, &prepared(config), resume, &stop, &mut |event| {
        if let Event::Batch(report) = event
            && Some(report.batch) == stop_at
        {
            stop.request(2);
        }
    })
}

fn bytes(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap());
    files.map(|f| (f.file_name().into_string().unwrap(), std::fs::read(f.path()).unwrap())).collect()
}

#[test]
fn own_states_resume_to_the_byte_and_change_what_is_learnt() {
    let own = ["data.stream=true", "data.own_share=0.5", "data.own_from=2", "data.own_every=3"];
    let prepared = prepared(&tiny(&own));
    let trainer = |prepared: &Prepared| Trainer::of(prepared, &Pool::new(1)).unwrap();
    let folder = Folder::new("own-states");
    let losses = |trainer: &mut Trainer, count: usize| -> Vec<f64> {
        (0..count).map(|_| trainer.step().unwrap().loss).collect()
    };
    let (mut whole, mut first) = (trainer(&prepared), trainer(&prepared));
    let expected = losses(&mut whole, 48);
    assert_eq!(losses(&mut first, 40), expected[..40]);
    first.save(&folder.join("saved")).unwrap();
    let mut second = trainer(&prepared);
    second.load(&folder.join("saved")).unwrap();
    assert_eq!(losses(&mut second, 8), expected[40..]);
    whole.save(&folder.join("whole")).unwrap();
    second.save(&folder.join("second")).unwrap();
    assert_eq!(bytes(&folder.join("whole")), bytes(&folder.join("second")));
    // Until the policy plays, batches are those of the stream alone.
    let alone = self::prepared(&tiny(&["data.stream=true"]));
    let alone = losses(&mut trainer(&alone), 48);
    let same = alone.iter().zip(&expected).take_while(|(a, b)| a == b).count();
    assert_eq!(same as u64, Loader::MOST_AHEAD + 2);
}

#[test]
fn a_stream_of_episodes_needs_a_player() {
    let config = tiny(&["data.stream=true"]);
    let data = DataConfig { file: Some("x".into()), ..config.data.clone() };
    let error = RunConfig { data, ..config.clone() }.validate().unwrap_err().to_string();
    assert!(error.contains("data.stream") && error.contains("data.file"), "{error}");
    let prepared = prepared(&config);
    // The trainer of a run that was prepared with a stream wants it.
    let error = Trainer::new(&prepared.config, &prepared.data, &Pool::new(1)).unwrap_err().to_string();
    assert!(error.contains("data.stream"), "{error}");
    let mut trainer = Trainer::of(&prepared, &Pool::new(1)).unwrap();
    let first = trainer.step().unwrap();
    assert!(first.loss.is_finite() && first.tokens > 0);
    assert!(trainer.step().unwrap().epoch > first.epoch);
}

#[test]
fn stop_and_resume_equals_a_run_without_stop_to_the_byte() {
    let through = ["model.memory.gradient={\"through\":3}", "train.schedule.decay=linear"];
    for changes in [&[][..], &through, &["data.stream=true"]] {
        let folder = Folder::new(&format!("resume-{}", changes.len()));
        let config = tiny(changes);
        let (whole, parts) = (folder.join("whole"), folder.join("parts"));
        assert_eq!(run(&whole, &config, false, None).unwrap(), Ended::Finished);
        // Stopped between checkpoints, at one, and just before an evaluation; with another number of threads.
        assert_eq!(run(&parts, &config, false, Some(3)).unwrap(), Ended::Stopped(2));
        let mut other = config.clone();
        other.train.threads = Some(1);
        assert_eq!(run(&parts, &other, true, Some(5)).unwrap(), Ended::Stopped(2));
        assert_eq!(run(&parts, &config, true, Some(8)).unwrap(), Ended::Stopped(2));
        assert_eq!(run(&parts, &config, true, None).unwrap(), Ended::Finished);
        for name in ["last", "best"] {
            let (a, b) = (whole.join("checkpoints").join(name), parts.join("checkpoints").join(name));
            assert_eq!(std::fs::read_link(&a).unwrap(), std::fs::read_link(&b).unwrap(), "{name}");
            let (a, b) = (bytes(&a), bytes(&b));
            assert_eq!(
                a.keys().collect::<Vec<_>>(),
                ["config.json", "model.safetensors", "progress.json", "state.safetensors"]
            );
            assert!(a == b, "checkpoint `{name}` differs");
        }
        // The same rows of metrics, but for the seconds.
        let rows = |path: &Path| -> Vec<serde_json::Value> {
            let text = std::fs::read_to_string(path.join("metrics.jsonl")).unwrap();
            text.lines()
                .map(|line| {
                    let mut row: serde_json::Value = serde_json::from_str(line).unwrap();
                    let seconds = |key| row.as_object_mut().unwrap().remove(key).and_then(|s| s.as_f64());
                    if let [Some(all), Some(data)] = ["seconds", "data_seconds"].map(seconds) {
                        assert!(data >= 0.0 && all >= 0.0, "{data} of {all}");
                    }
                    row
                })
                .collect()
        };
        assert_eq!(rows(&whole), rows(&parts));
        assert_eq!(rows(&whole).len(), 12 + 3);
    }
}

/// What each policy has beside its parameters is saved too: copies that follow them, random numbers, moments.
#[test]
fn every_policy_resumes_to_the_byte() {
    let maze = ["env.length=9", "model.d_model=16"];
    let decoder = ["model.layers=1", "model.heads=2", "model.d_head=8"];
    let planner = ["model.layers=1", "model.bins=8", "model.plan.beam=2"];
    let unet = ["model.denoiser={\"unet\":{\"widths\":[8,8]}}", "model.step_embed=4"];
    let pendulum = "popgym-PositionOnlyPendulumEasy";
    for (policy, preset, more) in [
        ("rate", "tmaze", &[&maze[..], &decoder].concat()),
        ("rate-compat", "tmaze", &[&maze[..], &decoder].concat()),
        ("rmt", "tmaze", &[&maze[..], &decoder].concat()),
        ("trxl", "tmaze", &[&maze[..], &decoder].concat()),
        ("dt", "tmaze", &[&maze[..], &decoder].concat()),
        ("dmamba", "tmaze", &maze.to_vec()),
        ("bc-mlp", "tmaze", &maze.to_vec()),
        ("bc-lstm-compat", "tmaze", &maze.to_vec()),
        ("cql", "tmaze", &maze.to_vec()),
        ("cql-lstm", "tmaze", &maze.to_vec()),
        ("tt", "tmaze", &[&maze[..], &planner].concat()),
        ("cql-continuous", pendulum, &vec!["model.hidden=[8]", "model.candidates=2"]),
        ("diffusion", pendulum, &unet.to_vec()),
    ] {
        let policy_key = format!("policy={policy}");
        let shared = ["data.episodes=6", "train.batch=4", "train.epochs=null", "train.batches=6"];
        let changes = [&[policy_key.as_str()], &shared[..], more].concat();
        let config = changed(&RunConfig::preset(preset).unwrap(), &changes);
        let prepared = prepared(&config);
        let folder = Folder::new(&format!("resumed-{policy}"));
        let trained = |name: &str, from: Option<&Path>, batches: u64| {
            let mut trainer = Trainer::new(&prepared.config, &prepared.data, &Pool::new(1)).unwrap();
            if let Some(from) = from {
                trainer.load(from).unwrap();
            }
            while trainer.batches() < batches {
                trainer.step().unwrap();
            }
            let path = folder.join(name);
            trainer.save(&path).unwrap();
            path
        };
        let whole = trained("whole", None, 6);
        let half = trained("half", None, 3);
        let resumed = trained("resumed", Some(&half), 6);
        assert!(bytes(&whole) == bytes(&resumed), "{policy}");
        assert!(bytes(&whole) != bytes(&half), "{policy}");
    }
}

#[test]
fn where_data_lies_makes_no_difference_to_a_byte() {
    let folder = Folder::new("sources");
    let config = tiny(&[]);
    let memory = config.prepare(&Registry::builtin(), true).unwrap().data;
    let (file, npz) = (folder.join("a.elmur"), folder.join("npz"));
    elmur_data::save(&*memory, &file).unwrap();
    elmur_data::write_npz(&npz, &*memory).unwrap();
    let limits = Limits { memory: 0, ..Limits::default() };
    let spaces = memory.spaces().clone();
    let file = open_with(&file, None, &limits).unwrap();
    let npz = open_with(&npz, Some(&spaces), &limits).unwrap();
    let trained = |name: &str, source: &Arc<dyn Source>, resumed: Option<&Path>, batches: u64| {
        let mut trainer = Trainer::new(&config, source, &Pool::new(1)).unwrap();
        if let Some(from) = resumed {
            trainer.load(from).unwrap();
        }
        while trainer.batches() < batches {
            trainer.step().unwrap();
        }
        let path = folder.join(name);
        trainer.save(&path).unwrap();
        path
    };
    let whole = trained("whole", &memory, None, 9);
    // Read ahead or not: what is saved is the place of the batch that was used last.
    let (a, b) = (trained("a", &file, None, 4), trained("b", &npz, None, 4));
    assert!(bytes(&a) == bytes(&b));
    let (a, b) = (trained("c", &npz, Some(&a), 9), trained("d", &file, Some(&b), 9));
    assert!(bytes(&a) == bytes(&whole) && bytes(&b) == bytes(&whole));
}

#[test]
fn a_run_that_began_with_another_ones_weights_resumes_to_the_byte_without_that() {
    let folder = Folder::new("begin-with");
    let [first, whole, stopped, killed] =
        ["first", "whole", "stopped", "killed"].map(|name| folder.join(name));
    run(&first, &tiny(&["train.seed=5"]), false, None).unwrap();
    let config = tiny(&[&format!("train.begin_with={}", first.display())]);
    run(&whole, &config, false, None).unwrap();
    run(&stopped, &config, false, Some(2)).unwrap();
    // As if it had died before its first batch was saved.
    run(&killed, &config, false, Some(1)).unwrap();
    for number in bytes_names(&killed.join("checkpoints")).iter().filter(|name| name.as_str() > "00000000") {
        let path = killed.join("checkpoints").join(number);
        let _ = std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir_all(&path));
    }
    std::fs::remove_dir_all(&first).unwrap();
    for path in [&stopped, &killed] {
        run(path, &config, true, None).unwrap();
        assert_eq!(bytes(&path.join("checkpoints/last")), bytes(&whole.join("checkpoints/last")));
    }
    let fresh = folder.join("fresh");
    run(&fresh, &tiny(&[]), false, None).unwrap();
    assert!(bytes(&fresh.join("checkpoints/last")) != bytes(&whole.join("checkpoints/last")));
}

#[test]
fn a_run_is_trained_by_one_process_at_a_time_and_on_its_own_data() {
    let folder = Folder::new("alone");
    let path = folder.join("run");
    let config = tiny(&[]);
    let own = prepared(&config);
    let run_folder = RunFolder::create(&path, &config).unwrap();
    let mut second = None;
    let stop = Stop::default();
    let again = |prepared| train(&run_folder, prepared, true, &Stop::default(), &mut |_| {});
    train(&run_folder, &own, false, &stop, &mut |event| {
        if matches!(event, Event::Batch(_)) && second.is_none() {
            second = Some(again(&own).unwrap_err().to_string());
            stop.request(2);
        }
    })
    .unwrap();
    assert!(second.as_ref().unwrap().contains("another process trains this run"), "{second:?}");
    // Other episodes from the same environment, as if the file had changed.
    let other = prepared(&tiny(&["data.seed=5"])).data;
    let other = Prepared { data: other, ..own.clone() };
    let error = again(&other).unwrap_err().to_string();
    assert!(error.contains("data of the resumed run") && error.contains("checksum"), "{error}");
    assert_eq!(again(&own).unwrap(), Ended::Finished);
}

#[test]
fn batches_begun_ahead_are_reported_in_order() {
    let config = tiny(&[]);
    let dataset = prepared(&config).data;
    let mut one_by_one = Trainer::new(&config, &dataset, &Pool::new(1)).unwrap();
    let mut ahead = Trainer::new(&config, &dataset, &Pool::new(1)).unwrap();
    assert!(ahead.report().is_err());
    (0..3).for_each(|_| ahead.queue().unwrap());
    assert_eq!(ahead.waiting(), 3);
    for _ in 0..3 {
        assert_eq!(ahead.report().unwrap(), one_by_one.step().unwrap());
    }
    assert_eq!(ahead.waiting(), 0);
}

/// Long crops take minutes: a request to stop is heard between two optimizer steps, and what was done so far
/// is saved with what the windows carry.
#[test]
fn a_batch_that_was_interrupted_goes_on_to_the_same_bytes() {
    for device_threads in [1, 2] {
        let folder = Folder::new(&format!("within-{device_threads}"));
        let config = tiny(&["train.segments=6", "train.batches=4", "env.length=18", "eval.every=0"]);
        let data = prepared(&config).data;
        let trainer = || Trainer::new(&config, &data, &Pool::new(device_threads)).unwrap();
        let (mut whole, mut parts) = (trainer(), trainer());
        let stop = Stop::default();
        stop.request(15);
        let mut interruptions = 0;
        for _ in 0..4 {
            whole.queue().unwrap();
            // Every call makes one step and is stopped; every other time by another process.
            while !parts.queue_until(&stop).unwrap() {
                assert!(parts.is_within_batch());
                interruptions += 1;
                if interruptions % 2 == 0 {
                    parts.save(&folder.join("state")).unwrap();
                    parts = trainer();
                    parts.load(&folder.join("state")).unwrap();
                }
            }
            let (a, b) = (whole.report().unwrap(), parts.report().unwrap());
            assert_eq!(a, b);
        }
        assert_eq!(interruptions, 4 * 5);
        whole.save(&folder.join("whole")).unwrap();
        parts.save(&folder.join("parts")).unwrap();
        assert!(bytes(&folder.join("whole")) == bytes(&folder.join("parts")));
    }
}

#[test]
fn a_damaged_checkpoint_is_passed_over_and_kept_aside() {
    let folder = Folder::new("damaged");
    let config = tiny(&["train.checkpoint_every=2", "eval.every=0"]);
    let (whole, parts) = (folder.join("whole"), folder.join("parts"));
    run(&whole, &config, false, None).unwrap();
    run(&parts, &config, false, Some(6)).unwrap();
    for (newest, file) in [(6, "model.safetensors"), (8, "state.safetensors"), (10, "progress.json")] {
        let path = parts.join(format!("checkpoints/{newest:08}"));
        let mut bytes = std::fs::read(path.join(file)).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(path.join(file), bytes).unwrap();
        let stop = Stop::default();
        let mut notes = Vec::new();
        let run_folder = RunFolder::open(&parts).unwrap();
        let ended = train(&run_folder, &prepared(&config), true, &stop, &mut |event| match event {
            Event::Note(note) => notes.push(note.to_owned()),
            Event::Batch(report) if report.batch == newest + 2 => stop.request(2),
            _ => {}
        });
        assert!(ended.is_ok(), "{ended:?}");
        assert!(notes.len() == 1 && notes[0].contains(file), "{notes:?}");
        assert!(parts.join(format!("checkpoints/{newest:08}.damaged")).is_dir());
    }
    assert_eq!(run(&parts, &config, true, None).unwrap(), Ended::Finished);
    assert!(bytes(&whole.join("checkpoints/last")) == bytes(&parts.join("checkpoints/last")));
    // Where none is whole, the error says what to do.
    for entry in std::fs::read_dir(parts.join("checkpoints")).unwrap().map(|e| e.unwrap()) {
        if entry.path().join("state.safetensors").exists() {
            std::fs::write(entry.path().join("state.safetensors"), b"x").unwrap();
        }
    }
    let error = run(&parts, &config, true, None).unwrap_err().to_string();
    assert!(error.contains("begin another run"), "{error}");
}

#[test]
fn other_seeds_give_other_weights() {
    let dataset = prepared(&tiny(&[])).data;
    let loss = |seed: &str| {
        let config = tiny(&[seed]);
        let mut trainer = Trainer::new(&config, &dataset, &Pool::new(1)).unwrap();
        trainer.step().unwrap().loss
    };
    assert_eq!(loss("train.seed=1"), loss("train.seed=1"));
    assert_ne!(loss("train.seed=1"), loss("train.seed=2"));
}

#[test]
fn old_checkpoints_go_and_the_best_stays() {
    let folder = Folder::new("prune");
    let path = folder.join("run");
    run(&path, &tiny(&["train.checkpoint_every=1", "eval.every=0"]), false, None).unwrap();
    let mut names: Vec<String> = bytes_names(&path.join("checkpoints"));
    names.sort();
    assert_eq!(names, ["00000011", "00000012", "best", "last"]);
    assert_eq!(std::fs::read_link(path.join("checkpoints/best")).unwrap(), Path::new("00000012"));
}

fn bytes_names(folder: &Path) -> Vec<String> {
    std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_diverging_run_says_where_and_keeps_its_last_good_checkpoint() {
    let folder = Folder::new("diverge");
    let path = folder.join("run");
    let config = tiny(&["train.batches=30", "train.checkpoint_every=2", "eval.every=0", "train.max_loss=4"]);
    run(&path, &config, false, Some(4)).unwrap();
    let saved = bytes(&path.join("checkpoints/last"));
    let mut wild = config.clone();
    wild.train.lr = 1e6;
    let error = run(&path, &wild, true, None).unwrap_err();
    let message = error.to_string();
    let Error::Diverged { batch, loss, .. } = error else { panic!("{message}") };
    assert!(batch > 4 && (loss.is_nan() || loss >= 4.0), "{message}");
    assert!(message.contains("checkpoints/0000000") && message.contains("gradient norm"), "{message}");
    // Checkpoints before are whole.
    let last = bytes(&path.join("checkpoints/last"));
    assert!(Checkpoint::load(&path.join("checkpoints/last")).is_ok());
    assert_eq!(last.len(), saved.len());
}

#[test]
fn a_checkpoint_that_cannot_be_written_leaves_the_last_one() {
    let folder = Folder::new("full");
    let path = folder.join("run");
    let config = tiny(&["train.checkpoint_every=2", "eval.every=0"]);
    run(&path, &config, false, Some(2)).unwrap();
    let before = bytes(&path.join("checkpoints/last"));
    // A file where the next checkpoint's folder is to be made: the write fails as on a full disk.
    let run_folder = RunFolder::open(&path).unwrap();
    let block = path.join("checkpoints/.00000004.tmp");
    let error = train(&run_folder, &prepared(&config), true, &Stop::default(), &mut |event| {
        if matches!(event, Event::Started { .. }) {
            std::fs::write(&block, b"in the way").unwrap();
        }
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains(".00000004.tmp"), "{error}");
    assert_eq!(bytes(&path.join("checkpoints/last")), before);
    // What is left in the way is swept when the run is resumed.
    assert_eq!(run(&path, &config, true, None).unwrap(), Ended::Finished);
}

#[test]
fn damaged_or_foreign_states_are_refused() {
    let folder = Folder::new("foreign");
    let (a, b) = (folder.join("a"), folder.join("b"));
    run(&a, &tiny(&[]), false, Some(2)).unwrap();
    run(&b, &tiny(&["model.layers=1"]), false, Some(2)).unwrap();
    let dataset = prepared(&tiny(&[])).data;
    let mut trainer = Trainer::new(&tiny(&[]), &dataset, &Pool::new(1)).unwrap();
    let error = trainer.load(&b.join("checkpoints/last")).unwrap_err().to_string();
    assert!(error.contains("not the run's"), "{error}");
    // A state cut short at any of many places is an error.
    let state = a.join("checkpoints/last/state.safetensors");
    let whole = std::fs::read(&state).unwrap();
    for len in (0..whole.len()).step_by(whole.len() / 50 + 1) {
        std::fs::write(&state, &whole[..len]).unwrap();
        assert!(trainer.load(&a.join("checkpoints/last")).is_err(), "{len} bytes");
    }
    std::fs::write(&state, &whole).unwrap();
    trainer.load(&a.join("checkpoints/last")).unwrap();
    // A second run in the same folder is refused.
    let error = RunFolder::create(&a, &tiny(&[])).unwrap_err().to_string();
    assert!(error.contains("holds a run already"), "{error}");
}

#[test]
fn a_run_that_died_at_a_bad_moment_goes_on() {
    let folder = Folder::new("died");
    let config = tiny(&["train.checkpoint_every=2", "eval.every=0"]);
    let (whole, parts) = (folder.join("whole"), folder.join("parts"));
    run(&whole, &config, false, None).unwrap();
    // Before the first checkpoint: it starts over.
    RunFolder::create(&parts, &config).unwrap();
    std::fs::write(parts.join("metrics.jsonl"), "{\"batch\":1,\"loss\":1.0}\n{\"bat").unwrap();
    assert_eq!(run(&parts, &config, true, Some(4)).unwrap(), Ended::Stopped(2));
    // After a checkpoint was named but before `last` was turned to it, with something half-written beside it.
    std::fs::remove_file(parts.join("checkpoints/last")).unwrap();
    std::fs::create_dir_all(parts.join("checkpoints/.00000006.tmp")).unwrap();
    // And while a checkpoint was being replaced by another of the same batch.
    let old = parts.join("checkpoints/.00000004.old");
    std::fs::rename(parts.join("checkpoints/00000004"), &old).unwrap();
    assert_eq!(run(&parts, &config, true, Some(5)).unwrap(), Ended::Stopped(2), "one batch after the fourth");
    assert!(!old.exists() && parts.join("checkpoints/00000004").exists());
    assert_eq!(run(&parts, &config, true, None).unwrap(), Ended::Finished);
    assert!(bytes(&whole.join("checkpoints/last")) == bytes(&parts.join("checkpoints/last")));
    let rows = |path: &Path| std::fs::read_to_string(path.join("metrics.jsonl")).unwrap().lines().count();
    assert_eq!(rows(&whole), rows(&parts));
    // Behind the last checkpoint, before those that are no longer needed were removed.
    let needless = parts.join("checkpoints/00000001");
    std::fs::create_dir(&needless).unwrap();
    for file in std::fs::read_dir(parts.join("checkpoints/last")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), needless.join(file.file_name())).unwrap();
    }
    assert_eq!(run(&parts, &config, true, None).unwrap(), Ended::Finished);
    assert!(!needless.exists() && parts.join("checkpoints/last").exists());
    // What would make another run of it is refused.
    for change in ["train.seed=5", "data.seed=5", "train.batch=4"] {
        let changed = changed(&config, &[change]);
        let error = run(&parts, &changed, true, None).unwrap_err().to_string();
        assert!(error.contains("what the run began with"), "{error}");
    }
}

#[test]
fn folders_that_hold_something_else_are_left_alone() {
    let folder = Folder::new("precious");
    let path = folder.join("run");
    std::fs::create_dir_all(path.join("checkpoints/00000001")).unwrap();
    std::fs::write(path.join("checkpoints/00000001/precious"), "x").unwrap();
    let error = RunFolder::create(&path, &tiny(&[])).unwrap_err().to_string();
    assert!(error.contains("choose another --out"), "{error}");
    assert!(path.join("checkpoints/00000001/precious").exists() && !path.join("config.json").exists());
}

/// Removing a run removes nothing else.
#[test]
fn what_is_not_a_run_is_not_removed() {
    let folder = Folder::new("foreign-folder");
    for (name, config) in [("model", "{\"hidden_size\": 8}"), ("checkpoint", "")] {
        let path = folder.join(name);
        std::fs::create_dir_all(path.join("checkpoints")).unwrap();
        std::fs::write(path.join("checkpoints/w.bin"), "precious").unwrap();
        if !config.is_empty() {
            std::fs::write(path.join("config.json"), config).unwrap();
        }
        let error = RunFolder::remove(&path).unwrap_err().to_string();
        assert!(error.contains("not a run"), "{error}");
        assert!(path.join("checkpoints/w.bin").exists());
    }
    let run_path = folder.join("run");
    run(&run_path, &tiny(&[]), false, Some(2)).unwrap();
    std::fs::write(run_path.join("notes.txt"), "mine").unwrap();
    RunFolder::remove(&run_path).unwrap();
    assert!(run_path.join("notes.txt").exists() && !run_path.join("checkpoints").exists());
}

/// Scores by another measure or at other settings do not compare: the best is chosen anew.
#[test]
fn the_best_is_the_best_of_like_scores() {
    let folder = Folder::new("like");
    let path = folder.join("run");
    let config = tiny(&["eval.every=2", "eval.metric=return", "eval.target=null"]);
    run(&path, &config, false, Some(4)).unwrap();
    let other = changed(&config, &["eval.settings.length=400"]);
    assert_eq!(run(&path, &other, true, None).unwrap(), Ended::Finished);
    let best = std::fs::read_link(path.join("checkpoints/best")).unwrap();
    let best: u64 = best.to_str().unwrap().parse().unwrap();
    assert!(best > 4, "{best}: chosen among validations at the new length");
}

#[test]
fn data_without_an_action_to_imitate_are_refused() {
    let spaces = Spaces { observation: Space::unbounded([2]), action: Space::Discrete { n: 3 } };
    let unmarked = episodes(&spaces);
    let marked = |mut episode: Episode| {
        episode.imitate = Some(vec![false; episode.rewards.len()]);
        episode
    };
    let none: Vec<Episode> = unmarked.into_iter().map(marked).collect();
    let data: Arc<dyn Source> = Arc::new(Dataset::from_episodes(spaces, BTreeMap::new(), none).unwrap());
    let mut config = RunConfig::preset("small").unwrap();
    config.train.batches = Some(2);
    let error = Prepared::new(config, data, &Registry::builtin(), false).unwrap_err().to_string();
    assert!(error.contains("at least one action to imitate"), "{error}");
}

#[test]
fn the_target_ends_a_run_early() {
    let folder = Folder::new("target");
    let ended = run(&folder.join("run"), &tiny(&["eval.target=0", "eval.every=2"]), false, None).unwrap();
    assert_eq!(ended, Ended::Target);
    let last = std::fs::read_link(folder.join("run/checkpoints/last")).unwrap();
    assert_eq!(last, Path::new("00000004"), "after two evaluations");
}

/// The paper's point in small: a few hundred batches of episodes of at most 9 steps, then 90 steps.
#[test]
fn a_small_model_learns_to_remember_beyond_its_training() {
    let config = tiny(&[
        "model.d_model=32",
        "data.episodes=600",
        "train.batch=32",
        "train.batches=400",
        "train.lr=3e-3",
    ]);
    let dataset = prepared(&config).data;
    let mut trainer = Trainer::new(&config, &dataset, &Pool::new(2)).unwrap();
    let mut last = None;
    for _ in 0..400 {
        last = Some(trainer.step().unwrap());
    }
    assert!(last.unwrap().accuracy.unwrap() > 0.97, "{last:?}");
    let what = Evaluation {
        policy: &config.model,
        params: trainer.params(),
        env: &maze(90),
        episodes: 60,
        seeds: Seeds::Test(0),
        target_return: None,
        sample: false,
        threads: Some(2),
        device: trainer.device(),
        weights: Weights::F32,
    };
    let outcome = evaluate(&what, &Stop::default(), &|_| {}).unwrap();
    let score = outcome.score(Metric::Success);
    assert!(score.mean > 0.95, "{score:?}");
    // The same on one thread, and the steps of an optimal walk.
    let one = evaluate(&Evaluation { threads: Some(1), ..what.clone() }, &Stop::default(), &|_| {}).unwrap();
    assert_eq!(outcome, one);
    assert!(outcome.episodes.iter().filter(|e| e.steps == 89).count() > 55);
    // And what its memory did: each segment writes one slot per layer, slots in turn.
    let history = timeline(&config.model, trainer.params(), &maze(30), None, 5, 100).unwrap();
    assert_eq!((history.layers.len(), history.layers[0].len()), (2, 2));
    for layer in &history.layers {
        let written: Vec<(bool, bool)> =
            layer[0].written.iter().copied().zip(layer[1].written.iter().copied()).collect();
        assert_eq!(written[..4], [(true, false), (false, true), (true, false), (false, true)]);
        for segment in 0..written.len() {
            let sum = layer[0].read[segment] + layer[1].read[segment];
            assert!((sum - 1.0).abs() < 1e-4, "attention sums to one: {sum}");
        }
    }
}

/// A policy that is told returns is asked for the best return of its data, or for another.
#[test]
fn the_target_return_reaches_the_policy() {
    let small = ["policy=dt", "model.d_model=16", "model.layers=1", "model.window=5", "data.episodes=3"];
    let base = RunConfig::preset("cartpole").unwrap();
    let config = prepared(&changed(&base, &small)).config;
    assert_eq!(config.eval.target_return, Some(500.0), "all demonstrations balance to the end");
    let given = changed(&base, &[&small[..], &["eval.target_return=-0.5"]].concat());
    assert_eq!(prepared(&given).config.eval.target_return, Some(-0.5));
    let policy = Checkpoint {
        params: elmur_model::init::parameters(config.model.architecture(), 1).unwrap(),
        config: config.model,
    };
    let pole = Registry::builtin().find(&EnvSpec::new("cartpole")).unwrap();
    let outcome = |target_return| {
        let what = Evaluation { episodes: 30, target_return, sample: true, ..Evaluation::of(&policy, &pole) };
        (what.asked_return().unwrap(), evaluate(&what, &Stop::default(), &|_| {}).unwrap())
    };
    // Without a wish: what the environment knows to be good.
    assert_eq!(outcome(None), outcome(Some(500.0)));
    assert_eq!(outcome(None).0, Some(500.0));
    assert_ne!(outcome(Some(500.0)).1, outcome(Some(-500.0)).1);
    let what = Evaluation { target_return: Some(f64::NAN), ..Evaluation::of(&policy, &pole) };
    let error = evaluate(&what, &Stop::default(), &|_| {}).unwrap_err().to_string();
    assert!(error.contains("`target_return`: expected a finite number"), "{error}");

    // Policies that do not aim at a return have no target, and say so if they are given one.
    let lstm = ["policy=lstm", "data.episodes=3", "eval.target_return=2"];
    let prepared = prepared(&changed(&base, &lstm));
    assert!(
        prepared.notes.iter().any(|note| note.contains("bc_lstm does not aim at a given return")),
        "{:?}",
        prepared.notes
    );
    assert_eq!(prepared.config.eval.target_return, Some(2.0));
}

#[test]
fn a_target_return_that_is_no_number_is_refused() {
    let base = RunConfig::preset("tmaze-dt").unwrap();
    for value in ["NaN", "inf", "1e999", "high", "[1]"] {
        let change = [format!("eval.target_return={value}")];
        let error = overrides::apply(&base, &change, &Registry::builtin()).unwrap_err().to_string();
        assert!(error.contains("eval.target_return") && error.contains("expected a number"), "{error}");
    }
    for target in [f64::NAN, f64::INFINITY, 1e300] {
        let mut config = base.clone();
        config.eval.target_return = Some(target);
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains("`eval.target_return`: expected a finite number"), "{error}");
    }
}

/// Every kind of token, observation and action goes through the trainer: the loss falls on data that can be
/// learnt.
#[test]
fn every_kind_of_data_can_be_learnt() {
    type Change = Box<dyn Fn(&mut Elmur)>;
    let ints = Space::MultiDiscrete { sizes: vec![3, 4] };
    let cases: Vec<(&str, Space, Space, Change)> = vec![
        (
            "categorical, action tokens",
            ints.clone(),
            Space::Discrete { n: 3 },
            Box::new(|c| {
                let (sizes, encoding) = (vec![3, 4], CategoricalEncoding::Embedding);
                c.observation = vec![Encoder::Categorical { sizes, encoding }];
                c.action = Action::Categorical { count: 3 };
                c.tokens = TokenFormat::ObservationAction;
            }),
        ),
        (
            "parts, several choices, returns",
            Space::Tuple { parts: vec![Space::unbounded([2]), Space::Discrete { n: 4 }] },
            Space::MultiDiscrete { sizes: vec![2, 4] },
            Box::new(|c| {
                let (sizes, encoding) = (vec![4], CategoricalEncoding::OneHot);
                c.observation =
                    vec![Encoder::Vector { dim: 2, bytes: false }, Encoder::Categorical { sizes, encoding }];
                c.action = Action::MultiCategorical { sizes: vec![2, 4] };
                c.tokens = TokenFormat::ReturnObservationAction;
                c.memory.gradient = MemoryGradient::Through(3);
            }),
        ),
        (
            "continuous",
            Space::unbounded([2]),
            Space::between(-1.0, 1.0, [2]),
            Box::new(|c| {
                c.observation = vec![Encoder::Vector { dim: 2, bytes: false }];
                c.action = Action::Continuous { dim: 2, tanh: true };
            }),
        ),
        (
            "pixels as bytes",
            Space::Bytes { shape: vec![1, 8, 8] },
            Space::Discrete { n: 4 },
            Box::new(|c| {
                c.observation = vec![Encoder::Image { channels: 1, height: 8, width: 8, bytes: true }];
                c.action = Action::Categorical { count: 4 };
            }),
        ),
    ];
    for (name, observation, action, change) in cases {
        let spaces = Spaces { observation, action };
        let dataset = Dataset::from_episodes(spaces.clone(), BTreeMap::new(), episodes(&spaces)).unwrap();
        let dataset: Arc<dyn Source> = Arc::new(dataset);
        let mut config = tiny(&[
            "model.dropout=0",
            "model.attention_dropout=0",
            "train.lr=1e-2",
            "train.label_smoothing=0",
        ]);
        config.env = None;
        if let PolicyConfig::Elmur(model) = &mut config.model {
            change(model);
        }
        // What the test says is what follows from the spaces, but for how integers are encoded.
        let mut fitted = config.model.clone();
        fitted.fit_to(&spaces).unwrap();
        assert_eq!(fitted, config.model, "{name}");
        let mut trainer = Trainer::new(&config, &dataset, &Pool::new(1)).unwrap();
        let losses: Vec<f64> = (0..90).map(|_| trainer.step().unwrap().action_loss).collect();
        let (first, last) = (losses[0], losses[80..].iter().sum::<f64>() / 10.0);
        assert!(last < 0.5 * first, "{name}: {first} to {last}");
        // The wrong spaces are named.
        let mut wrong = config.clone();
        if let PolicyConfig::Elmur(model) = &mut wrong.model {
            model.action = Action::Categorical { count: 17 };
        }
        let error = Trainer::new(&wrong, &dataset, &Pool::new(1)).unwrap_err().to_string();
        assert!(error.contains("dataset: expected actions"), "{error}");
    }
}

/// Episodes of 5 to 12 steps whose actions follow from the observation; every fourth step is not to be
/// imitated, and wrong.
fn episodes(spaces: &Spaces) -> Vec<Episode> {
    let column = |space: &Space, steps: usize, value: &dyn Fn(usize, usize) -> usize| -> Vec<Column> {
        let leaves = space.leaves();
        leaves
            .iter()
            .map(|leaf| match leaf {
                elmur_base::Leaf::Ints(sizes) => Column::I32(
                    (0..steps).flat_map(|t| sizes.iter().map(move |n| (value(t, *n) % n) as i32)).collect(),
                ),
                elmur_base::Leaf::Floats { .. } => Column::F32(
                    (0..steps * leaf.len())
                        .map(|i| (value(i / leaf.len(), 4) % 4) as f32 / 4.0 - 0.4)
                        .collect(),
                ),
                elmur_base::Leaf::Bytes { .. } => Column::U8(
                    (0..steps * leaf.len()).map(|i| (value(i / leaf.len(), 4) % 4 * 80) as u8).collect(),
                ),
            })
            .collect()
    };
    (0..40)
        .map(|i| {
            let steps = 5 + i % 8;
            let seen = move |t: usize, _: usize| (t * t + i) / 2;
            let done = move |t: usize, n: usize| if t % 4 == 3 { t + 1 } else { seen(t, n) };
            Episode {
                observations: column(&spaces.observation, steps, &seen),
                actions: column(&spaces.action, steps, &done),
                rewards: vec![0.5; steps],
                terminated: true,
                truncated: false,
                imitate: Some((0..steps).map(|t| t % 4 != 3).collect()),
                labels: None,
                accepted: None,
            }
        })
        .collect()
}
