//! MIKASA-Robo: 32 table-top tasks of a robot arm that need memory, in their simulator.
//!
//! Every row has a process of its own that runs `simulators/mikasa/env_server.py`, which is part of this
//! library; the simulator itself is installed apart (`elmur simulators install mikasa DIR`) and found by
//! `ELMUR_MIKASA=DIR`. The protocol between both is docs/worker-protocol.md; what differs from the published
//! environments is `simulators/mikasa/README.md`.
//!
//! Observations are two cameras side by side, bytes [6, size, size], as in the published experiments, and what
//! settings add: joints (25 floats), the hidden answer; and, unless it is left out, the prompt of the Rotate tasks
//! (1 float). Actions are 8 floats in [-1, 1]. An episode has its full length, and is solved if one of its steps was.
//!
//! | episodes | seeds in the simulator |
//! |---|---|
//! | demonstrations 0 to 9,999 of seed 0 | 0 to 9,999 |
//! | validation | from 10,000 on |
//! | test, run r | from 20,000 + 1,000 r on |
//! | all others | from 2^24 on, in ranges that never meet |

use std::path::PathBuf;
use std::sync::Arc;

use elmur_base::{Space, Spaces, Stop};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::env::{Env, Player};
use crate::error::{Error, Result};
use crate::family::{EnvSpec, Facts, Family, Metric, ObservationName, Played, Purpose, Setting};
use crate::robot_tasks::{ROBOT_TASKS, RobotTask};
use crate::thinning::Thinning;
use crate::worker::{
    Dtype, FamilyWorkers, Interface, Launch, Part, Patience, Task, WorkerEnv, Workers, max_rows,
    technical_settings,
};

/// Environment variable that names the folder of the simulator, where the setting `folder` does not.
pub const VARIABLE: &str = "ELMUR_MIKASA";
/// Name of the program in the simulator's folder that runs Python with the simulator's packages.
pub const LAUNCHER: &str = "mikasa-python";
/// Name of the script among [`SCRIPTS`] that installs the simulator: `bash setup.sh DIR`.
pub const INSTALLER: &str = "setup.sh";

macro_rules! scripts {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../../simulators/mikasa/", $name)))),*]
    };
}

/// The scripts that install and run the simulator, by their names: all of `simulators/mikasa`.
pub const SCRIPTS: [(&str, &str); 7] = scripts![
    "setup.sh",
    "check.py",
    "decimate.py",
    "standin_mug.py",
    "mikasa_env.py",
    "oracle.py",
    "env_server.py",
];

/// The worker, and the modules that it imports.
const SERVER: &str = include_str!("../../../simulators/mikasa/env_server.py");
const MODULES: [(&str, &str); 2] = [
    ("mikasa_env", include_str!("../../../simulators/mikasa/mikasa_env.py")),
    ("oracle", include_str!("../../../simulators/mikasa/oracle.py")),
];

/// What names of the tasks begin with.
const PREFIX: &str = "mikasa-";
/// What to do without the simulator.
const REMEDY: &str = "install the simulator with `elmur simulators install mikasa DIR` and set \
                      ELMUR_MIKASA=DIR, or the environment's setting `folder`; or work on recordings (--data PATH), \
                      for which it is not needed";
/// Seconds for an answer, and for the start with its first image: a rendered step takes 30 ms and the first
/// image 10 seconds of a core, of which a busy machine may have little.
const TIMEOUTS: (u64, u64) = (120, 600);
/// Blank steps between cue and recall of the Remember tasks.
const BLANK: u64 = 5;

/// The tasks of MIKASA-Robo, in the [`Registry`](crate::Registry): `mikasa-RememberColor3-v0` and 31 others.
#[derive(Default)]
pub(crate) struct Mikasa(FamilyWorkers);

/// The folder of the simulator: the setting `folder`, else the environment variable [`VARIABLE`].
fn folder(spec: &EnvSpec) -> Result<Option<PathBuf>> {
    let set: Option<PathBuf> = spec.get("folder")?;
    Ok(set.or_else(|| std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty()).map(PathBuf::from)))
}

fn found(spec: &EnvSpec) -> Result<&'static RobotTask> {
    let name = spec.name.strip_prefix(PREFIX).unwrap_or_default();
    RobotTask::find(name).ok_or_else(|| Error::config("name", "a task of MIKASA-Robo", &spec.name))
}

/// Settings that are checked.
struct Choice {
    task: &'static RobotTask,
    size: u64,
    render: u64,
    levels: u64,
    joints: bool,
    cue: bool,
    prompt: bool,
    reward: String,
    tail: Option<u64>,
    head: Option<u64>,
    action_noise: f64,
    end_at_success: bool,
    /// Steps of an episode, where success does not end it (`tail`, `end_at_success`).
    steps: u64,
    blank_steps: u64,
}

impl Choice {
    fn of(spec: &EnvSpec) -> Result<Self> {
        let task = found(spec)?;
        let size: u64 = spec.get("size")?;
        if !(16..=512).contains(&size) {
            return Err(Error::config("size", "16 to 512", size));
        }
        let render: u64 = spec.get::<Option<u64>>("render")?.unwrap_or(size);
        if !(size..=512).contains(&render) || !render.is_multiple_of(size) {
            return Err(Error::config("render", "a multiple of `size` up to 512, or null", render));
        }
        let levels: u64 = spec.get("levels")?;
        if !(2..=256).contains(&levels) {
            return Err(Error::config("levels", "2 to 256", levels));
        }
        let reward: String = spec.get("reward")?;
        if !["success", "dense"].contains(&reward.as_str()) {
            return Err(Error::config("reward", "success or dense", reward));
        }
        let (head, keep_failures): (Option<u64>, bool) = (spec.get("head")?, spec.get("keep_failures")?);
        if head == Some(0) {
            return Err(Error::config("head", "1 or more, or null", 0));
        }
        if head.is_some() && !keep_failures {
            let expected = "true where `head` is set, since tasks are rarely solved by then";
            return Err(Error::config("keep_failures", expected, keep_failures));
        }
        let action_noise: f64 = spec.get("action_noise")?;
        if !(0.0..=1.0).contains(&action_noise) {
            return Err(Error::config("action_noise", "0 to 1", action_noise));
        }
        let blank_steps = if task.has_blank() { spec.get("blank_steps")? } else { BLANK };
        if blank_steps > 100_000 {
            return Err(Error::config("blank_steps", "0 to 100000", blank_steps));
        }
        let tail: Option<u64> = spec.get("tail")?;
        let steps = task.steps - BLANK + blank_steps;
        if let Some(tail) = tail.filter(|tail| *tail > steps) {
            return Err(Error::config("tail", format!("0 to {steps}, or null"), tail));
        }
        let (joints, cue, end_at_success) =
            (spec.get("joints")?, spec.get("cue")?, spec.get("end_at_success")?);
        let prompt = task.has_prompt() && spec.get("prompt")?;
        Ok(Self {
            task,
            size,
            render,
            levels,
            joints,
            cue,
            prompt,
            reward,
            tail,
            head,
            action_noise,
            end_at_success,
            steps,
            blank_steps,
        })
    }

    /// The most steps of an episode for a purpose: demonstrations may be cut (`head`).
    fn steps_for(&self, purpose: Purpose) -> u64 {
        let cut = self.head.filter(|_| purpose == Purpose::Collect);
        cut.unwrap_or(u64::MAX).min(self.steps)
    }

    fn thinning(&self) -> Thinning {
        Thinning { shrink: (self.render / self.size) as usize, levels: self.levels as usize }
    }

    /// The arrays of an observation, in the order in which a worker sends them.
    fn observation(&self) -> Vec<Part> {
        let size = self.size as usize;
        let floats = |name: &str, n: usize| part(name, Dtype::F32, vec![n]);
        let rgb = Part { channels_last: true, ..part("rgb", Dtype::U8, vec![size, size, 6]) };
        let added = [
            self.joints.then(|| floats("joints", 25)),
            self.prompt.then(|| floats("prompt", 1)),
            self.cue.then(|| floats("cue", self.task.answer)),
        ];
        [rgb].into_iter().chain(added.into_iter().flatten()).collect()
    }

    /// Fields of the request `make`: of demonstrations and evaluations each without the other's own settings.
    fn make(&self, purpose: Purpose) -> Map<String, Value> {
        let names: Vec<String> = self.observation().into_iter().map(|part| part.name).collect();
        let options = if self.task.has_blank() { json!({"delta_time": self.blank_steps}) } else { json!({}) };
        let mut make = json!({
            "task": self.task.name, "obs": "rgb", "size": self.size, "render": self.render,
            "levels": self.levels, "observation": names, "reward": self.reward, "max_steps": self.steps_for(purpose),
            "options": options,
        });
        if purpose == Purpose::Collect {
            make["tail"] = json!(self.tail);
            make["action_noise"] = json!(self.action_noise);
        } else {
            make["expert"] = json!(false);
            if self.end_at_success {
                make["tail"] = json!(0);
            }
        }
        match make {
            Value::Object(make) => make,
            _ => Map::new(),
        }
    }
}

fn part(name: &str, dtype: Dtype, shape: Vec<usize>) -> Part {
    Part { name: name.to_owned(), dtype, shape, channels_last: false }
}

/// An environment with these arrays as observations.
fn interface_of(observation: Vec<Part>, max_steps: u64) -> Interface {
    let space = |part: &Part| match (part.dtype, &part.shape[..]) {
        (Dtype::U8, [height, width, channels]) => Space::Bytes { shape: vec![*channels, *height, *width] },
        (_, shape) => Space::unbounded(shape),
    };
    let mut parts: Vec<Space> = observation.iter().map(space).collect();
    let seen = if parts.len() == 1 { parts.remove(0) } else { Space::Tuple { parts } };
    Interface {
        spaces: Spaces { observation: seen, action: Space::between(-1.0, 1.0, [8]) },
        observation,
        action: vec![part("action", Dtype::F32, vec![8])],
        max_steps: Some(max_steps),
        good_return: None,
        has_expert: true,
    }
}

/// Reads a worker's answer to `make`.
fn interface(answer: &Map<String, Value>) -> Result<Interface, String> {
    #[derive(Deserialize)]
    struct Made {
        observation: Vec<Part>,
        task: About,
    }
    #[derive(Deserialize)]
    struct About {
        max_steps: u64,
    }
    let made = Made::deserialize(&Value::Object(answer.clone())).map_err(|error| error.to_string())?;
    Ok(interface_of(made.observation, made.task.max_steps))
}

/// The simulator's seed for the seed of an episode: see the module's table.
fn simulator_seed(seed: u64) -> u64 {
    const FIRST: u64 = 1 << 24;
    const TRAINING: u64 = (1 << 30) - FIRST;
    const OTHERS: u64 = 1 << 29;
    const SPLIT: u64 = 10_000;
    let small = seed % (1 << 24);
    match seed >> 62 {
        0 if seed < SPLIT => seed,
        // Collection c has episode i at c * 2^32 + i.
        0 => {
            let mixed = (seed as u32 as u64).wrapping_add((seed >> 32).wrapping_mul(0x9E37_79B1));
            FIRST + mixed % TRAINING
        }
        1 if seed - (1 << 62) < SPLIT => SPLIT + seed - (1 << 62),
        1 => (1 << 30) + seed % OTHERS,
        // Test run r has episode i at 2^63 + r * 2^24 + i.
        _ => match (seed - (1 << 63)) >> 24 {
            run @ 0..1000 if small < 1000 => 2 * SPLIT + 1000 * run + small,
            _ => (1 << 30) + OTHERS + seed % OTHERS,
        },
    }
}

impl Mikasa {
    /// The workers for an environment; the same for what is the same to a worker.
    fn workers(&self, spec: &EnvSpec, purpose: Purpose) -> Result<Arc<Workers>> {
        let (choice, patience) = (Choice::of(spec)?, Patience::of(spec)?);
        max_rows(spec)?;
        let make = choice.make(purpose);
        let program = folder(spec)?.map_or_else(|| PathBuf::from(LAUNCHER), |folder| folder.join(LAUNCHER));
        let known = interface_of(choice.observation(), choice.steps_for(purpose));
        let key = format!("{} {} {patience:?}", program.display(), Value::Object(make.clone()));
        let modules = MODULES.iter().map(|(name, source)| format!("{name}={source}").into());
        let task = Task {
            name: spec.name.clone(),
            launch: Launch {
                program: program.into(),
                arguments: ["-c".into(), SERVER.into()].into_iter().chain(modules).collect(),
                variables: Vec::new(),
                show_output: patience.show_output,
            },
            hello: "mikasa-env",
            make,
            interface,
            seed: simulator_seed,
            success_once: true,
            timeout: patience.timeout,
            start_timeout: patience.start_timeout,
            restarts: patience.restarts,
            remedy: REMEDY,
        };
        self.0.of(key, |stop| Workers::knowing(task, known, stop))
    }
}

impl Family for Mikasa {
    fn names(&self) -> Vec<String> {
        ROBOT_TASKS.iter().map(|task| format!("{PREFIX}{}", task.name)).collect()
    }

    fn resolve(&self, name: &str) -> Option<String> {
        Some(format!("{PREFIX}{}", RobotTask::find(name.strip_prefix(PREFIX)?)?.name))
    }

    fn settings(&self, name: &str) -> Vec<Setting> {
        let task = name.strip_prefix(PREFIX).and_then(RobotTask::find);
        let blank = Setting::new(
            "blank_steps",
            BLANK,
            "Steps with an empty table between the cue and the moment to act; episodes are longer by as many.",
        );
        let shaping = [
            Setting::new("size", 128, "Height and width of a camera's image in pixels, 16 to 512."),
            Setting::new(
                "render",
                Value::Null,
                "Height and width of images before they are averaged down to `size`, a multiple of it; null: \
                 `size`.",
            ),
            Setting::new(
                "levels",
                256,
                "Number of values that a colour of a pixel may have, 2 to 256: fewer make recordings smaller.",
            ),
            Setting::new(
                "joints",
                false,
                "Observe the arm too: pose of the gripper, positions and velocities of the joints, 25 numbers.",
            ),
            Setting::new(
                "cue",
                false,
                "Observe the hidden answer too: shows what a policy that needs no memory can do.",
            ),
            Setting::new(
                "reward",
                "success",
                "Rewards: success (1 in steps that are solved, else 0) or dense (the simulator's, 0 to 1).",
            ),
            Setting::new(
                "tail",
                Value::Null,
                "End demonstrations this many steps after the first solved step; null: at their full length.",
            ),
            Setting::new(
                "head",
                Value::Null,
                "End demonstrations after this many steps, solved or not; null: never. Cheap where what has to be \
                 learnt is in the first steps. Needs `keep_failures`.",
            ),
            Setting::new(
                "action_noise",
                0.0,
                "Add Gaussian noise of this size to the arm's actions in demonstrations; recordings keep what \
                 the expert wanted.",
            ),
            Setting::new(
                "end_at_success",
                false,
                "End evaluations at the first solved step instead of playing them to their full length: the rate \
                 of success is the same, and returns are not.",
            )
            .technical(),
            Setting::new(
                "keep_failures",
                false,
                "Keep demonstrations that do not solve the task; else another seed is played instead.",
            ),
        ];
        let folder = Setting::new(
            "folder",
            Value::Null,
            "Folder of the simulator (elmur simulators install mikasa DIR); null: $ELMUR_MIKASA.",
        );
        let blank = task.is_some_and(RobotTask::has_blank).then_some(blank);
        let prompt = Setting::new(
            "prompt",
            true,
            "Observe the angle to turn by, which no picture shows: without it, as in the published data, it can only \
             be guessed.",
        );
        let prompt = task.is_some_and(RobotTask::has_prompt).then_some(prompt);
        shaping
            .into_iter()
            .chain(blank)
            .chain(prompt)
            .chain([folder.technical()])
            .chain(technical_settings(TIMEOUTS.0, TIMEOUTS.1))
            .collect()
    }

    fn available(&self, spec: &EnvSpec) -> Result<()> {
        let missing = |cause: String| Error::Worker { name: spec.name.clone(), cause };
        match folder(spec)? {
            None => Err(missing(format!("its simulator is not set up; {REMEDY}"))),
            Some(folder) if !folder.join(LAUNCHER).is_file() => {
                Err(missing(format!("no simulator in {}; {REMEDY}", folder.display())))
            }
            Some(_) => Ok(()),
        }
    }

    fn make(&self, spec: &EnvSpec, purpose: Purpose) -> Result<Box<dyn Env>> {
        Ok(Box::new(WorkerEnv::new(&self.workers(spec, purpose)?)?))
    }

    fn make_played(&self, spec: &EnvSpec) -> Result<Option<Played>> {
        self.available(spec)?;
        let env = WorkerEnv::new(&self.workers(spec, Purpose::Collect)?)?;
        let player = env.player().map(|player| Box::new(player) as Box<dyn Player>);
        Ok(player.map(|player| (Box::new(env) as Box<dyn Env>, player)))
    }

    fn facts(&self, spec: &EnvSpec) -> Facts {
        let Ok(choice) = Choice::of(spec) else { return Facts::default() };
        let name = |part: Part| {
            let known = ["rgb", "joints", "prompt", "cue"].into_iter().find(|name| *name == part.name)?;
            Some(ObservationName { name: known, channels_last: part.channels_last })
        };
        Facts {
            max_steps: Some(choice.steps),
            good_return: None,
            metric: Metric::Success,
            max_rows: max_rows(spec).ok(),
            drops_failures: !spec.get("keep_failures").unwrap_or(false),
            observations: choice.observation().into_iter().filter_map(name).collect(),
            thinning: choice.thinning(),
        }
    }

    fn stop_with(&self, stop: &Stop) {
        self.0.stop_with(stop);
    }

    fn incidents(&self) -> Vec<String> {
        self.0.incidents()
    }
}

#[cfg(test)]
mod tests;
