//! Robot arms from recordings alone: presets train on the published layout and on packed files, with pictures moved and
//! steps weighed, and resume to the byte. The recording is the beginning of an expert's episode of RememberColor3, both
//! cameras averaged to 32 x 32 pixels.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use elmur_base::{Field, FieldMut, StepWeights, Stop};
use elmur_data::{Column, Crop, Episode, Limits, Window, open_with, save};
use elmur_engine::Pool;
use elmur_envs::{EnvSpec, Registry};
use elmur_model::ends::Encoder;
use elmur_train::{Judge, Prepared, RunConfig, Trainer, overrides};
use serde_json::json;

fn recordings() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../elmur-data/tests/fixtures/mikasa")
}

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("elmur-train-mikasa-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

fn prepared(preset: &str, data: &Path, changes: &[&str]) -> Prepared {
    prepare(preset, data, changes).unwrap()
}

fn prepare(preset: &str, data: &Path, changes: &[&str]) -> elmur_train::Result<Prepared> {
    let file = format!("data.file={}", data.display());
    let changes = [&[file.as_str(), "train.batch=2", "train.batches=2"], changes].concat();
    let config = RunConfig::preset(preset).unwrap();
    let config = overrides::apply(&config, &changes, &Registry::builtin())?;
    config.prepare(&Registry::builtin(), overrides::names_ends(&changes))
}

fn trainer(prepared: &Prepared) -> Trainer {
    Trainer::of(prepared, &Pool::new(1)).unwrap()
}

fn bytes(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap());
    files.map(|f| (f.file_name().into_string().unwrap(), std::fs::read(f.path()).unwrap())).collect()
}

#[test]
fn presets_train_from_recordings_without_a_simulator() {
    let small = ["model.d_model=16", "model.layers=1"];
    for (preset, changes) in [
        ("mikasa-RememberColor3", &small[..]),
        ("mikasa-RememberColor3", &[&small[..], &["data.keys=rgb,joints"]].concat()),
        ("mikasa-RememberColor3-compat", &small),
        ("mikasa-TakeItBack-compat", &[]),
        ("mikasa-ShellGameTouch", &[&small[..], &["policy=bc-mlp"]].concat()),
    ] {
        // Sizes of one policy are not those of another.
        let changes: Vec<&str> = match changes.contains(&"policy=bc-mlp") {
            true => vec!["policy=bc-mlp"],
            false => changes.to_vec(),
        };
        let prepared = prepared(preset, &recordings(), &changes);
        let encoders = prepared.config.model.architecture().ends().observation.to_vec();
        assert_eq!(encoders[0].shape(), [6, 32, 32]);
        let ours = !preset.ends_with("-compat");
        assert_eq!(matches!(encoders[0], Encoder::ResidualImage { cameras: 2, .. }), ours);
        if changes.contains(&"data.keys=rgb,joints") {
            assert_eq!(encoders[1..], [Encoder::Vector { dim: 25, bytes: false }]);
        }
        let mut trainer = trainer(&prepared);
        let (first, second) = (trainer.step().unwrap(), trainer.step().unwrap());
        assert!(first.loss.is_finite() && second.loss.is_finite() && first.loss > 0.0, "{preset}");
        assert_ne!(first.loss, second.loss, "{preset}");
    }
}

/// Writes two episodes of two steps of a task, with pictures of `size` and another observation of `width` numbers.
#[cfg(unix)]
fn record(path: &Path, spec: &EnvSpec, size: usize, other: (&str, usize), settings: &[(&str, &str)]) {
    let spaces = Registry::builtin().find(spec).unwrap().spaces().clone();
    let (name, width) = other;
    let keys = format!(
        r#"[{{"name":"rgb","shape":[{size},{size},6],"channels_last":true}},{{"name":"{name}","shape":[{width}]}}]"#
    );
    let (task, size_noted) = (format!("{}-v0", spec.name), size.to_string());
    let notes = [("env", &*task), ("size", &*size_noted), ("observation_keys", &*keys)];
    let notes = notes.iter().chain(settings).map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    let mut writer = elmur_data::Writer::create(path, &spaces, notes.collect()).unwrap();
    for light in [10, 200] {
        let mut episode = Episode::empty(&spaces);
        let pictures = Column::U8(vec![light; 2 * 6 * size * size]);
        episode.observations = vec![pictures, Column::F32(vec![0.0; 2 * width])];
        episode.actions = vec![Column::F32(vec![0.5; 16])];
        episode.rewards = vec![0.0, 1.0];
        episode.terminated = true;
        writer.push(&episode).unwrap();
    }
    writer.finish().unwrap();
}

#[cfg(unix)]
#[test]
fn runs_take_over_the_settings_that_their_data_were_recorded_with() {
    let place = folder("settings");
    let path = place.join("thinned.elmur");
    let spec = EnvSpec::new("mikasa-RememberColor3").with("size", 32).with("cue", true);
    let settings =
        [("render", "128"), ("levels", "16"), ("cue", "true"), ("head", "14"), ("keep_failures", "true")];
    record(&path, &spec, 32, ("cue", 3), &settings);
    // Where there is no simulator; what else the run has is ours, of pictures of 64 x 64 pixels.
    let nowhere = "env.folder=/nowhere";
    for (keys, cue) in [("data.keys=rgb", false), ("data.keys=rgb,cue", true), ("data.keys=null", true)] {
        let prepared = prepared("mikasa-RememberColor3", &path, &[nowhere, keys, "model.d_model=16"]);
        let settings = prepared.config.env.unwrap().settings;
        for (key, value) in [("size", json!(32)), ("render", json!(128)), ("levels", json!(16))] {
            assert_eq!(settings[key], value, "{key}");
        }
        assert_eq!(settings["cue"], json!(cue), "{keys}");
        assert_eq!(prepared.config.eval.on, Some(Judge::Data));
        let told =
            prepared.notes.iter().any(|note| note.contains("recorded with") && note.contains("size=32"));
        assert!(told, "{:?}", prepared.notes);
        assert_eq!(prepared.config.model.architecture().ends().observation.len(), 1 + usize::from(cue));
    }
    std::fs::remove_dir_all(&place).unwrap();
}

/// Settings that change neither what is shown nor its size, too.
#[cfg(unix)]
#[test]
fn settings_of_recordings_are_taken_over_unless_the_run_has_its_own() {
    let place = folder("free-settings");
    let path = place.join("blank.elmur");
    let spec = EnvSpec::new("mikasa-RememberColor3").with("size", 64).with("cue", true);
    let settings = [("render", "128"), ("blank_steps", "30"), ("reward", "dense"), ("cue", "true")];
    record(&path, &spec, 64, ("cue", 3), &settings);
    for (change, blank, told) in [
        (
            "env.levels=256",
            30,
            "recorded with blank_steps=30, reward=\"dense\", which the environment now has",
        ),
        ("env.blank_steps=7", 7, "recorded with blank_steps=30, and the run's environment has other values"),
    ] {
        let changes = ["env.folder=/nowhere", "data.keys=rgb", "model.d_model=16", change];
        let prepared = prepared("mikasa-RememberColor3", &path, &changes);
        let settings = prepared.config.env.unwrap().settings;
        assert_eq!(settings["blank_steps"], json!(blank));
        assert_eq!((&settings["reward"], &settings["cue"]), (&json!("dense"), &json!(false)));
        assert!(prepared.notes.iter().any(|note| note.contains(told)), "{:?}", prepared.notes);
    }
    std::fs::remove_dir_all(&place).unwrap();
}

/// The published data have dense rewards, the environment has 0 and 1.
#[cfg(unix)]
#[test]
fn policies_that_aim_at_a_return_are_told_of_other_rewards() {
    for (reward, told) in [("env.reward=success", true), ("env.reward=dense", false)] {
        let changes = ["policy=dt", "env.folder=/nowhere", reward];
        let prepared = prepared("mikasa-RememberColor3", &recordings(), &changes);
        assert!(prepared.config.eval.target_return.is_some_and(|target| target.fract() > 0.0));
        assert_eq!(
            prepared.notes.iter().any(|n| n.contains("env.reward=dense")),
            told,
            "{:?}",
            prepared.notes
        );
    }
}

/// The published data of the Rotate tasks have no prompt.
#[cfg(unix)]
#[test]
fn the_prompt_is_left_out_where_it_is_not_read() {
    let place = folder("prompt");
    let path = place.join("rotate.elmur");
    let task = EnvSpec::new("mikasa-RotateLenientPos");
    record(&path, &task.with("size", 64), 64, ("prompt", 1), &[("render", "128")]);
    for (keys, prompt) in [("data.keys=rgb", false), ("data.keys=rgb,prompt", true)] {
        let changes = ["env.folder=/nowhere", keys, "model.d_model=16"];
        let prepared = prepared("mikasa-RotateLenientPos", &path, &changes);
        assert_eq!(prepared.config.env.unwrap().settings["prompt"], json!(prompt), "{:?}", prepared.notes);
    }
    std::fs::remove_dir_all(&place).unwrap();
}

/// Recordings that say nothing of settings: pictures of 32 x 32 pixels, where the preset's environment shows 64 x 64.
#[test]
fn runs_have_the_environment_that_shows_what_their_data_show() {
    let of = |keys: &str| prepared("mikasa-RememberColor3", &recordings(), &["env.folder=/nowhere", keys]);
    for (keys, joints) in [("data.keys=rgb", false), ("data.keys=rgb,joints", true)] {
        let Prepared { config, data, notes, .. } = of(keys);
        let environment = config.environment(&Registry::builtin()).unwrap().unwrap();
        assert_eq!(environment.spec().settings["size"], json!(32));
        assert_eq!(environment.spec().settings.get("joints") == Some(&json!(true)), joints);
        assert_eq!(environment.spaces(), data.spaces());
        assert_eq!(config.eval.on, Some(Judge::Data));
        assert!(notes[0].contains("size=32") && notes[0].contains("joints=true") == joints, "{notes:?}");
    }
    // Who wants to be judged in the simulator needs that one, not other data.
    let judged = ["env.folder=/nowhere", "data.keys=rgb", "eval.on=env"];
    let error = prepare("mikasa-RememberColor3", &recordings(), &judged).unwrap_err().to_string();
    assert!(error.contains("no simulator in /nowhere"), "{error}");
    let judged = ["env.folder=/nowhere", "data.keys=joints", "eval.on=env"];
    let error = prepare("mikasa-RememberColor3", &recordings(), &judged).unwrap_err().to_string();
    assert!(error.contains("expected [6, 64, 64] per step"), "{error}");
    // No setting turns the order round.
    let Prepared { config, notes, .. } = of("data.keys=joints,rgb");
    assert!(config.env.is_none());
    let told = "the data show (25 numbers, numbers [6, 32, 32]), mikasa-RememberColor3-v0 shows bytes [6, 64, 64]: the run is without environment";
    assert!(notes.iter().any(|note| note.contains(told)), "{notes:?}");
}

/// The draws that pictures are moved by belong to what a saved batch carries.
#[test]
fn moved_pictures_resume_to_the_byte_from_any_format_and_within_a_batch() {
    let place = folder("resume");
    let packed = place.join("packed.elmur");
    let spec = EnvSpec::new("mikasa-RememberColor3").with("size", 32);
    let spaces = Registry::builtin().find(&spec).unwrap().spaces().clone();
    save(&*open_with(recordings(), Some(&spaces), &Limits::default()).unwrap(), &packed).unwrap();
    let changes =
        ["model.d_model=16", "model.layers=1", "data.shift=3", "data.brightness=0.2", "data.colours=true"];
    let preset = "mikasa-RememberColor3-compat";
    let of = |data: &Path, more: &[&str]| prepared(preset, data, &[&changes[..], more].concat());
    let (npz, native) = (of(&recordings(), &[]), of(&packed, &[]));
    let (mut whole, mut parts) = (trainer(&npz), trainer(&native));
    let stop = Stop::default();
    stop.request(15);
    for _ in 0..2 {
        whole.queue().unwrap();
        while !parts.queue_until(&stop).unwrap() {
            parts.save(&place.join("state")).unwrap();
            parts = trainer(&native);
            parts.load(&place.join("state")).unwrap();
        }
        assert_eq!(whole.report().unwrap(), parts.report().unwrap());
    }
    whole.save(&place.join("whole")).unwrap();
    parts.save(&place.join("parts")).unwrap();
    assert!(bytes(&place.join("whole")) == bytes(&place.join("parts")));
    let mut unmoved = trainer(&of(&packed, &["data.shift=0", "data.brightness=0", "data.colours=false"]));
    unmoved.step().unwrap();
    unmoved.step().unwrap();
    unmoved.save(&place.join("unmoved")).unwrap();
    assert!(bytes(&place.join("unmoved")) != bytes(&place.join("whole")));
    std::fs::remove_dir_all(&place).unwrap();
}

#[test]
fn steps_after_success_weigh_less_in_the_loss() {
    let place = folder("weights");
    let data = open_with(recordings(), None, &Limits::default()).unwrap();
    let mut episode = data.episode(0).unwrap();
    // As if the task had been solved at step 4.
    episode.rewards.iter_mut().enumerate().for_each(|(t, reward)| *reward = if t >= 4 { 1.0 } else { 0.5 });
    let path = place.join("solved.elmur");
    let mut writer = elmur_data::Writer::create(&path, data.spaces(), BTreeMap::new()).unwrap();
    writer.push(&episode).unwrap();
    writer.finish().unwrap();
    let solved = open_with(&path, None, &Limits::default()).unwrap();
    let window = Window { source: &*solved, crops: &[Crop::new(0, 0)], offset: 0, length: 16 };
    let mut weights = [9.0; 16];
    window.fill(Field::Weight(StepWeights::new(1.0, 0.1)), FieldMut::F32(&mut weights)).unwrap();
    assert_eq!(weights[..6], [1.0, 1.0, 1.0, 1.0, 1.0, 0.1]);
    assert_eq!(weights[13..], [0.1, 0.0, 0.0]);
    let loss = |after: &str| {
        let small = ["model.d_model=16", "model.layers=1", "data.shift=0", after];
        trainer(&prepared("mikasa-RememberColor3", &path, &small)).step().unwrap().action_loss
    };
    let (all, some) = (loss("train.after_success=1"), loss("train.after_success=0"));
    assert!(all > 0.0 && some > 0.0 && all != some, "{all} {some}");
    let preset = RunConfig::preset("mikasa-RememberColor3").unwrap();
    for (change, text) in [
        ("train.after_success=2", "train.after_success"),
        ("data.shift=64", "less than the 64 pixels"),
        ("data.brightness=-1", "data.brightness"),
        ("data.colours=2", "data.colours"),
    ] {
        let error = overrides::apply(&preset, &[change], &Registry::builtin()).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    std::fs::remove_dir_all(&place).unwrap();
}

/// Encoders that are named for what recordings show need no settings of the environment that say so again.
#[test]
fn named_encoders_are_compared_with_the_recordings() {
    let eyes = r#"{"residual_image":{"channels":6,"height":32,"width":32,"bytes":true,"cameras":2,"widths":[8],"queries":0,"grid":0,"keypoints":4}}"#;
    let of = |joints: usize| {
        let encoders = format!(r#"model.observation=[{eyes},{{"vector":{{"dim":{joints}}}}}]"#);
        prepare(
            "mikasa-RememberColor3",
            &recordings(),
            &["data.keys=rgb,joints", &encoders, "model.layers=1"],
        )
    };
    let prepared = of(25).unwrap();
    let seen = prepared.config.model.architecture().ends().observation;
    assert_eq!(seen, [serde_json::from_str(eyes).unwrap(), Encoder::Vector { dim: 25, bytes: false }]);
    let environment = prepared.config.env.unwrap();
    assert_eq!((&environment.settings["size"], &environment.settings["joints"]), (&json!(32), &json!(true)));
    let error = of(24).unwrap_err().to_string();
    assert!(error.contains("dataset: expected observations like the policy's"), "{error}");
}

/// Taught with the joints, in half of the crops, and then without them.
#[test]
fn a_policy_of_pictures_begins_with_one_that_was_told_numbers_too() {
    let place = folder("told");
    let small = ["model.d_model=16", "model.layers=1"];
    let of = |more: &[&str]| prepared("mikasa-RememberColor3", &recordings(), &[&small[..], more].concat());
    let told = of(&["data.keys=rgb,joints", "data.hide=0.5"]);
    let mut taught = trainer(&told);
    taught.step().unwrap();
    let checkpoint = place.join("checkpoint");
    taught.checkpoint().save(&checkpoint).unwrap();
    let begin = format!("train.begin_with={}", checkpoint.display());
    let mut alone = of(&["data.keys=rgb", &begin]);
    let weights = alone.config.first_weights().unwrap().unwrap();
    alone.read_first_weights().unwrap();
    let note = alone.notes.last().unwrap();
    assert!(
        note.contains("sees residual_image") && note.contains("alone, and the others count as 0"),
        "{note}"
    );
    let mut next = trainer(&alone);
    next.begin_with(&weights).unwrap();
    assert!(next.step().unwrap().loss.is_finite());
    // Not the other way round, and nothing is hidden where there is nothing to hide.
    next.checkpoint().save(&checkpoint).unwrap();
    let back = of(&["data.keys=rgb,joints", &begin]).config.first_weights().unwrap_err().to_string();
    assert!(back.contains("train.begin_with") && back.contains("encoder"), "{back}");
    let hidden = ["data.keys=rgb", "data.hide=0.5", "model.d_model=16", "model.layers=1"];
    let error = prepare("mikasa-RememberColor3", &recordings(), &hidden).unwrap_err().to_string();
    assert!(error.contains("data.hide`: expected 0, or pictures with numbers beside them"), "{error}");
    assert!(error.contains("got 0.5 with residual_image"), "{error}");
    let standardized = ["data.keys=rgb,joints", "data.hide=0.5", "train.standardize=true"];
    let error = prepare("mikasa-RememberColor3", &recordings(), &standardized).unwrap_err().to_string();
    assert!(error.contains("data.hide`: expected 0, or train.standardize=false"), "{error}");
    // A policy of the published encoder has no place for what a residual one learnt.
    taught.checkpoint().save(&checkpoint).unwrap();
    let published = r#"model.observation=[{"image":{"channels":6,"height":32,"width":32,"bytes":true}}]"#;
    let error = of(&["data.keys=rgb", published, &begin]).config.first_weights().unwrap_err().to_string();
    assert!(error.contains("expected a policy of the same observations"), "{error}");
    std::fs::remove_dir_all(&place).unwrap();
}
