//! Environments in Python through the command line, where there is a Python with Gymnasium: `$ELMUR_PYTHON`,
//! else `python3`. Without one these tests say so and pass; workers in Rust are tested by `elmur-envs`
//! everywhere.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::path::Path;

use common::{Folder, Running, fine, has_gymnasium, refused, rows, signal, start, text, until};

/// The memory task of the examples.
fn recall(name: &str) -> String {
    format!("{}/../../examples/recall.py:{name}", env!("CARGO_MANIFEST_DIR"))
}

fn env(name: &str) -> String {
    format!("python:{}", recall(name))
}

#[test]
fn a_memory_task_in_python_is_collected_learnt_and_solved() {
    if !has_gymnasium() {
        return;
    }
    let folder = Folder::new("python-recall");
    let (data, run) = (folder.path("recall.elmur"), folder.path("run"));
    let (recall, expert) = (env("Recall"), format!("expert={}", recall("Expert")));
    let wait = ["--set", "kwargs={\"wait\":10}"];
    let collect = ["collect", &recall, "--set", &expert, wait[0], wait[1], "--episodes", "60", "--json"];
    let told = rows(&fine(&[&collect[..], &["--out", &data]].concat())).remove(0);
    assert_eq!((told["episodes"].as_u64(), told["steps"].as_u64()), (Some(60), Some(60 * 12)));
    assert_eq!((told["return"]["mean"].as_f64(), told["terminated"].as_u64()), (Some(1.0), Some(60)));
    let about = fine(&["inspect", &data, "--json"]);
    assert!(about.contains("\"kwargs\":\"{\\\"wait\\\":10}\""), "{about}");
    assert!(!about.contains("timeout"), "what does not change episodes is not recorded: {about}");

    // On one thread, and again: the same episodes.
    let again = folder.path("again.elmur");
    fine(&[&collect[..], &["--threads", "1", "--out", &again]].concat());
    assert_eq!(std::fs::read(&again).unwrap(), std::fs::read(&data).unwrap());

    let kwargs = "env.kwargs={\"wait\":10}";
    let changes =
        ["train.batches=80", "model.d_model=32", "train.lr=3e-3", "eval.every=40", "eval.episodes=20"];
    let train = ["train", "small", "--data", &data, "--env", &recall, kwargs, "--out", &run, "--json"];
    let told = rows(&fine(&[&train[..], &changes].concat()));
    assert_eq!(told[0]["measure"], "success_rate", "validated in the environment: {}", told[0]);
    let eval = [
        "eval",
        &run,
        "--env",
        &recall,
        wait[0],
        wait[1],
        "--set",
        "workers=2",
        "--episodes",
        "30",
        "--json",
    ];
    let told = rows(&fine(&eval));
    assert_eq!((told[0]["measure"].as_str(), told[0]["score"].as_f64()), (Some("success_rate"), Some(1.0)));
    // The run knows its environment, and results do not depend on the number of workers.
    let alone = rows(&fine(&["eval", &run, "--set", "workers=1", "--episodes", "30", "--json"]));
    assert_eq!(alone[0]["score"], told[0]["score"]);
}

#[test]
fn gymnasium_environments_are_known_by_their_ids() {
    if !has_gymnasium() {
        return;
    }
    let folder = Folder::new("python-ids");
    std::fs::write(
        folder.0.join("balance.py"),
        "def act(obs, info):\n    return int(0.2 * obs[0] + 0.5 * obs[1] + 10 * obs[2] + 1.5 * obs[3] > 0)\n",
    )
    .unwrap();
    let (expert, data) = (format!("expert={}:act", folder.path("balance.py")), folder.path("pole.elmur"));
    let collect = ["collect", "--env", "python:CartPole-v1", "--set", &expert, "--episodes", "3", "--json"];
    let told = rows(&fine(&[&collect[..], &["--out", &data]].concat())).remove(0);
    assert_eq!((told["return"]["mean"].as_f64(), told["truncated"].as_u64()), (Some(500.0), Some(3)));
    let cut = folder.path("cut.elmur");
    let short = ["--set", "max_steps=7", "--out", &cut];
    let told = rows(&fine(&[&collect[..], &short].concat())).remove(0);
    assert_eq!((told["steps"].as_u64(), told["truncated"].as_u64()), (Some(21), Some(3)));

    let out = folder.path("none.elmur");
    let refuse = |more: &[&str], parts: &[&str]| {
        refused(&[&["collect", "--episodes", "1", "--out", &out], more].concat(), parts);
    };
    refuse(&["python:CartPole-v1"], &["`expert`", "module:function"]);
    refuse(&["python:NoSuchEnv-v3"], &["NoSuchEnv", "unknown_task"]);
    refuse(&["python:no_such_module:Env"], &["no_such_module", "`python`"]);
    refuse(&["python:json:Missing"], &["has no 'Missing'"]);
    refuse(&["python:CartPole-v1", "--set", "kwargs={\"sutton\":1}"], &["sutton"]);
    refuse(&["python:CartPole-v1", "--set", "timeout=0"], &["`timeout`", "seconds"]);
    refuse(&["python:CartPole-v1", "--set", "workers=0"], &["`workers`", "1 to 256"]);
    refuse(&["python:CartPole-v1", "--set", "python=no-such-python"], &["no-such-python"]);
    refuse(&["python:CartPole-v1", "--set", "success=twice"], &["end or once"]);
    refuse(&["pyton:CartPole-v1"], &["python:CartPole-v1"]);
    let wrong = format!("{}:broken", folder.path("balance.py"));
    refuse(&["python:CartPole-v1", "--set", &format!("expert={wrong}")], &["has no 'broken'"]);
}

/// Spaces of all kinds, an error, a crash and a long wait.
const ODD: &str = r#"
import os, time
import numpy as np
import gymnasium
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

class Mixed(gymnasium.Env):
    """Shows what it was told: a camera, numbers, choices."""
    def __init__(self):
        self.observation_space = Dict({
            "camera": Box(0, 255, (8, 12, 3), np.uint8), "gray": Box(0, 255, (8, 9), np.uint8),
            "joints": Box(-1.0, np.inf, (2,), np.float64), "mode": Discrete(3, start=5),
            "switches": MultiBinary(2), "pair": Tuple((MultiDiscrete([2, 4]), Box(0, 1, (), np.int32)))})
        self.action_space = Box(-1.0, 1.0, (2,), np.float32)
    def see(self):
        camera = np.zeros((8, 12, 3), np.uint8)
        camera[1, 2] = [10, 20, 30]
        gray = np.zeros((16, 9), np.uint8)
        gray[::2, 4] = self.time
        return {"camera": camera, "gray": gray[::2], "joints": self.told.astype(float), "mode": 5 + self.time % 3,
                "switches": [1, 0], "pair": ((1, self.time % 4), 1)}
    def reset(self, *, seed=None, options=None):
        self.time, self.told = 0, np.zeros(2)
        return self.see(), {}
    def step(self, action):
        assert self.action_space.contains(action), action
        self.time, self.told = self.time + 1, action
        return self.see(), -0.5, False, self.time == 4, {"is_success": np.array([self.time == 2])}

def two(obs, info):
    return [0.5, 7.0]

class Word(Mixed):
    def __init__(self):
        super().__init__()
        self.observation_space = Text(5)

class Slow(Mixed):
    def step(self, action):
        time.sleep(3600)

class Broken(Mixed):
    def step(self, action):
        raise RuntimeError("the arm is jammed")

class Fragile(Mixed):
    """Kills its process once, in the third step of the episode of a seed."""
    def __init__(self, marker, seed=3):
        super().__init__()
        self.marker, self.unlucky = marker, seed
    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return super().reset()
    def step(self, action):
        if self.seed == self.unlucky and self.time == 2 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), 9)
        return super().step(action)
"#;

#[test]
fn spaces_of_all_kinds_errors_and_crashes() {
    if !has_gymnasium() {
        return;
    }
    let folder = Folder::new("python-odd");
    let file = folder.path("odd.py");
    std::fs::write(&file, ODD).unwrap();
    let (data, expert) = (folder.path("mixed.elmur"), format!("expert={file}:two"));
    let collect = |class: &str, out: &str, more: &[&str]| -> Vec<String> {
        let env = format!("python:{file}:{class}");
        let all = ["collect", &env, "--set", &expert, "--episodes", "6", "--threads", "2", "--out", out];
        all.iter().chain(more).map(|arg| (*arg).to_owned()).collect()
    };
    let call = |args: Vec<String>| fine(&args.iter().map(String::as_str).collect::<Vec<_>>());
    call(collect("Mixed", &data, &[]));
    let source = elmur_data::open(Path::new(&data), None).unwrap();
    let space = serde_json::to_value(&source.spaces().observation).unwrap();
    let parts = space["tuple"]["parts"].as_array().unwrap();
    assert_eq!(parts[0]["bytes"]["shape"], serde_json::json!([3, 8, 12]), "channels first: {space}");
    assert_eq!(parts[1]["bytes"]["shape"], serde_json::json!([1, 8, 9]));
    assert_eq!(parts[3]["discrete"]["n"], 3);
    let episode = source.episode(2).unwrap();
    let bytes = |leaf: usize| match &episode.observations[leaf] {
        elmur_data::Column::U8(bytes) => bytes.clone(),
        other => panic!("{other:?}"),
    };
    let (camera, gray) = (bytes(0), bytes(1));
    assert_eq!([0, 1, 2].map(|channel| camera[(channel * 8 + 1) * 12 + 2]), [10, 20, 30]);
    assert_eq!(gray[3 * 72 + 2 * 9 + 4], 3, "step 3, row 2");
    let numbers = format!("{:?} {:?}", episode.observations[2..].to_vec(), episode.actions);
    assert!(
        numbers.contains("[0.0, 0.0, 0.5, 1.0, 0.5, 1.0"),
        "actions beyond their bounds are moved there: {numbers}"
    );
    assert_eq!((episode.rewards.as_slice(), episode.truncated), (&[-0.5; 4][..], true));

    // A crash costs its episode alone: the data are those of an environment that does not crash.
    let (crashed, marker) = (folder.path("crashed.elmur"), folder.path("marker"));
    let kwargs = format!("kwargs={{\"marker\":\"{marker}\"}}");
    let args = collect("Fragile", &crashed, &["--set", &kwargs]);
    let output = common::elmur(&args.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(
        output.status.success() && text(&output).contains("1 worker had to be replaced"),
        "{}",
        text(&output)
    );
    assert!(text(&output).contains("killed by signal 9"), "{}", text(&output));
    let other = elmur_data::open(Path::new(&crashed), None).unwrap();
    assert_eq!(other.episodes(), 6);
    assert!((0..6).all(|i| other.episode(i).unwrap() == source.episode(i).unwrap()));

    // So does one in an evaluation, here in test episode 5: the score is that of an undisturbed one.
    let run = folder.path("run");
    let train = ["train", "small", "--data", &data, "eval.on=data", "model.d_model=16", "train.batches=1"];
    fine(&[&train[..], &["train.batch=2", "--out", &run]].concat());
    std::fs::remove_file(&marker).unwrap();
    let seed = (1 << 30) + (1 << 29) + 5;
    let kwargs = format!("kwargs={{\"marker\":\"{marker}\",\"seed\":{seed}}}");
    let (env, fragile) = (format!("python:{file}:Mixed"), format!("python:{file}:Fragile"));
    let eval = |more: &[&str]| common::elmur(&[&["eval", &run, "--episodes", "9", "--json"], more].concat());
    let calm = eval(&["--env", &env, "--set", "workers=2", "--metric", "return"]);
    let shaken = eval(&["--env", &fragile, "--set", &kwargs, "--set", "workers=2", "--metric", "return"]);
    assert!(text(&shaken).contains("1 worker had to be replaced"), "{}", text(&shaken));
    let scores = [&calm, &shaken].map(|output| rows(&String::from_utf8_lossy(&output.stdout)).remove(0));
    assert_eq!(scores[0]["score"].as_f64(), Some(-2.0), "{}", text(&calm));
    assert_eq!(scores[1]["score"], scores[0]["score"]);

    let refuse = |class: &str, more: &[&str], parts: &[&str]| {
        let out = folder.path("none.elmur");
        let args = collect(class, &out, more);
        refused(&args.iter().map(String::as_str).collect::<Vec<_>>(), parts);
    };
    refuse("Word", &[], &["Text", "not supported"]);
    refuse("Broken", &[], &["the arm is jammed", "odd.py, line"]);
    let slow = ["--set", "timeout=0.5", "--set", "restarts=1"];
    refuse("Slow", &slow, &["lost 2 times", "did not answer for 0.5 s"]);
}

#[test]
fn a_signal_ends_a_collection_and_its_workers_in_the_middle_of_a_step() {
    if !has_gymnasium() {
        return;
    }
    let folder = Folder::new("python-signal");
    let file = folder.path("odd.py");
    let begun = folder.path("begun");
    let slow = ODD.replace(
        "time.sleep(3600)",
        &format!("open({begun:?}, 'w').write(str(os.getpid())); time.sleep(3600)"),
    );
    std::fs::write(&file, slow).unwrap();
    let (env, expert) = (format!("python:{file}:Slow"), format!("expert={file}:two"));
    for (name, code) in [("INT", Some(130)), ("KILL", None)] {
        let out = folder.path("slow.elmur");
        let args = ["collect", &env, "--set", &expert, "--episodes", "3", "--threads", "1", "--out", &out];
        let mut child = Running(start(&args));
        until(&begun, 1);
        let worker = std::fs::read_to_string(&begun).unwrap();
        signal(&child.0, name);
        let status = child.0.wait().unwrap();
        assert_eq!(status.code(), code);
        // The worker of a client that was killed notices it within some seconds.
        let alive = || Path::new(&format!("/proc/{worker}/cmdline")).exists();
        let begin = std::time::Instant::now();
        while Path::new("/proc/self").exists() && alive() {
            assert!(begin.elapsed() < std::time::Duration::from_secs(60), "{name}: its worker lives on");
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        std::fs::remove_file(&begun).unwrap();
    }
}
