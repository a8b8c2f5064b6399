//! MIKASA-Robo through the command line. The simulator is played by this program, which starts itself again as
//! the worker (for that it owns its standard output, so it has a `main` of its own); where `ELMUR_MIKASA` names
//! the real one, the last test uses that.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

#[cfg(unix)]
mod common;

fn main() {
    #[cfg(unix)]
    unix::main();
}

#[cfg(unix)]
mod unix {
    use std::collections::BTreeMap;
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::time::Duration;

    use elmur_data::{Column, ObservationKey, Selection, open, open_selected};
    use serde_json::{Value, json};

    use crate::common::{Folder, ended, fine, refused, rows, signal, start, text, until};

    pub fn main() {
        if let Some(folder) = std::env::var_os("ELMUR_FAKE_MIKASA") {
            return Fake { folder: folder.into(), make: Value::Null, seed: 0, step: 0, end: 60 }.serve();
        }
        let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
        let tests: [(&str, fn()); 8] = [
            ("demonstrations_are_successes_that_end_after_their_tail", collects),
            ("the_published_layout_is_written_and_read", writes_npz),
            ("whole_recordings_are_thinned_once", thins),
            ("a_run_without_the_simulator_trains_from_data_and_acts_where_there_is_one", trains),
            ("workers_that_die_or_hang_at_any_moment_change_no_result", dies),
            ("without_the_simulator_errors_name_the_command_that_installs_it", misses),
            ("an_installation_ends_with_ctrl_c_and_tells_what_failed", installs),
            ("the_real_simulator_repeats_its_episodes_when_a_worker_is_killed", real),
        ];
        for (name, test) in tests {
            if wanted.is_empty() || wanted.iter().any(|part| name.contains(part.as_str())) {
                println!("test mikasa::{name} ...");
                test();
            }
        }
    }

    // The worker.

    /// Shows one of three shades for two steps, waits until step 10 and is solved by the action that names it.
    /// The expert of every seventh seed never does.
    struct Fake {
        folder: PathBuf,
        make: Value,
        seed: u64,
        step: u64,
        end: u64,
    }

    impl Fake {
        fn serve(&mut self) {
            let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout());
            let mut send = |header: Value, body: &[u8]| {
                let header = header.to_string();
                let mut frame = b"MKR1".to_vec();
                frame.extend((header.len() as u32).to_le_bytes());
                frame.extend((body.len() as u64).to_le_bytes());
                frame.extend(header.as_bytes());
                frame.extend(body);
                // A client that has gone needs no answer.
                let _ = output.write_all(&frame);
                let _ = output.flush();
            };
            send(json!({"hello": "mikasa-env", "protocol": 1, "tasks": 32}), &[]);
            loop {
                let mut prefix = [0; 16];
                if input.read_exact(&mut prefix).is_err() {
                    return;
                }
                let head = u32::from_le_bytes(prefix[4..8].try_into().unwrap()) as usize;
                let body = u64::from_le_bytes(prefix[8..].try_into().unwrap()) as usize;
                let mut rest = vec![0; head + body];
                input.read_exact(&mut rest).unwrap();
                let header: Value = serde_json::from_slice(&rest[..head]).unwrap();
                let (mut answer, body) = self.answer(&header, &rest[head..]);
                answer["id"] = header["id"].clone();
                answer["ok"] = json!(true);
                send(answer, &body);
            }
        }

        /// Whether a file asks for something to happen here; happens once, whatever process it happens in.
        fn is_due(&self, what: &str, moment: &str) -> bool {
            std::fs::remove_file(self.folder.join(format!("{what}-{moment}"))).is_ok()
        }

        fn fail(&self, moment: &str) {
            if self.is_due("die", moment) {
                std::process::exit(7);
            }
            if self.is_due("hang", moment) {
                std::thread::sleep(Duration::from_secs(3600));
            }
        }

        fn answer(&mut self, header: &Value, body: &[u8]) -> (Value, Vec<u8>) {
            match header["cmd"].as_str().unwrap() {
                "make" => {
                    self.make = header.clone();
                    let task = json!({"name": header["task"], "max_steps": header["max_steps"]});
                    (json!({"task": task, "observation": self.parts()}), Vec::new())
                }
                "reset" => {
                    (self.seed, self.step) = (header["seed"].as_u64().unwrap(), 0);
                    self.end = self.make["max_steps"].as_u64().unwrap();
                    self.fail("reset");
                    (json!({"arrays": self.parts()}), self.see())
                }
                "oracle" => {
                    self.fail("oracle");
                    let arrays = json!([{"name": "action", "dtype": "f32", "shape": [8]}]);
                    (json!({"arrays": arrays}), (0..8).flat_map(|_| self.expert().to_le_bytes()).collect())
                }
                "step" => {
                    self.fail(&self.step.to_string());
                    let told = f32::from_le_bytes(body[..4].try_into().unwrap());
                    self.note(body);
                    let solved = self.step >= 10 && (told - self.shade()).abs() < 0.3;
                    self.step += 1;
                    if let (true, Some(tail)) = (solved, self.make["tail"].as_u64()) {
                        self.end = self.end.min(self.step + tail);
                    }
                    let done = self.step >= self.end;
                    let reward = f64::from(u8::from(solved));
                    let answer = json!({
                        "reward": reward, "success": solved, "terminated": solved, "truncated": done,
                        "done": done, "arrays": self.parts(),
                    });
                    (answer, self.see())
                }
                _ => (json!({}), Vec::new()),
            }
        }

        /// Keeps the actions of every seed where a folder asks for them.
        fn note(&self, action: &[u8]) {
            let path = self.folder.join("actions").join(self.seed.to_string());
            if let Ok(mut file) = std::fs::OpenOptions::new().append(true).create(true).open(path) {
                file.write_all(action).unwrap();
            }
        }

        /// -1, 0 or 1.
        fn shade(&self) -> f32 {
            (self.seed % 3) as f32 - 1.0
        }

        fn expert(&self) -> f32 {
            if self.seed % 7 == 5 || self.step < 10 { 0.5 } else { self.shade() }
        }

        fn parts(&self) -> Value {
            let size = &self.make["size"];
            let part = |name: &Value| match name.as_str().unwrap() {
                "rgb" => {
                    json!({"name": "rgb", "dtype": "u8", "shape": [size, size, 6], "channels_last": true})
                }
                "joints" => json!({"name": "joints", "dtype": "f32", "shape": [25]}),
                _ => json!({"name": "cue", "dtype": "f32", "shape": [3]}),
            };
            self.make["observation"].as_array().unwrap().iter().map(part).collect()
        }

        fn see(&self) -> Vec<u8> {
            let (mut bytes, size) = (Vec::new(), self.make["size"].as_u64().unwrap());
            for name in self.make["observation"].as_array().unwrap() {
                let shade = if self.step < 2 { 60 + 60 * (self.seed % 3) as u8 } else { 0 };
                match name.as_str().unwrap() {
                    // Red and the place tell the step, so that no two observations are alike.
                    "rgb" => bytes.extend((0..size * size).flat_map(|i| {
                        [self.step as u8, shade, (i % 251) as u8, self.seed as u8, 9, (i / 251) as u8]
                    })),
                    "joints" => bytes.extend((0..25).flat_map(|i| (i as f32 + 0.5).to_le_bytes())),
                    _ => bytes.extend((0..3).flat_map(|i| f32::from(i == self.seed % 3).to_le_bytes())),
                }
            }
            bytes
        }
    }

    /// A simulator's folder whose launcher is this program.
    fn simulator(folder: &Folder) -> String {
        let launcher = folder.0.join("sim/mikasa-python");
        std::fs::create_dir_all(launcher.parent().unwrap()).unwrap();
        let (this, place) = (std::env::current_exe().unwrap(), folder.path("sim"));
        let script = format!("#!/bin/sh\nexport ELMUR_FAKE_MIKASA='{place}'\nexec '{}'\n", this.display());
        std::fs::write(&launcher, script).unwrap();
        std::fs::set_permissions(&launcher, std::fs::Permissions::from_mode(0o755)).unwrap();
        place
    }

    /// Arguments that collect from the fake simulator.
    fn collect<'a>(set: &'a str, episodes: &'a str, out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let common = ["collect", "mikasa-RememberColor3", "--set", "size=40", "--set", set, "--json"];
        [&common[..], &["--episodes", episodes, "--out", out], more].concat()
    }

    fn bytes(column: &Column) -> &[u8] {
        match column {
            Column::U8(bytes) => bytes,
            other => panic!("expected bytes, got {other:?}"),
        }
    }

    fn collects() {
        let folder = Folder::new("mikasa-collect");
        let sim = format!("folder={}", simulator(&folder));
        let data = folder.path("color.elmur");
        let tail = ["--set", "tail=5", "--set", "joints=true", "--threads", "2"];
        let told = rows(&fine(&collect(&sim, "9", &data, &tail))).remove(0);
        // Solved in the eleventh step, and five more.
        assert_eq!((told["episodes"].as_u64(), told["steps"].as_u64()), (Some(9), Some(9 * 16)));
        let read = open(&data, None).unwrap();
        for (key, value) in [("env", "mikasa-RememberColor3-v0"), ("tail", "5"), ("keep_failures", "false")] {
            assert_eq!(read.metadata()[key], value);
        }
        assert!(!read.metadata().contains_key("folder"), "where the simulator lies changes no episode");
        let keys = ObservationKey::of(read.metadata(), &read.spaces().observation);
        assert_eq!([keys[0].name.as_str(), keys[1].name.as_str()], ["rgb", "joints"]);
        assert!(keys[0].channels_last && keys[0].shape == [40, 40, 6]);
        let seeds: Vec<u8> = (0..9)
            .map(|i| {
                let episode = read.episode(i).unwrap();
                assert_eq!(episode.rewards.iter().sum::<f32>(), 6.0);
                // The fourth channel tells the seed.
                bytes(&episode.observations[0])[3 * 1600]
            })
            .collect();
        assert_eq!(seeds[..5], [0, 1, 2, 3, 4]);
        assert_ne!(seeds[5], 5, "the episode of seed 5 fails, and another seed takes its place");
        assert_eq!(seeds[6..], [6, 7, 8]);
        // Pictures are those of the worker, channels first.
        let episode = read.episode(2).unwrap();
        let (first, second) = bytes(&episode.observations[0])[..2 * 9600].split_at(9600);
        assert_eq!((first[0], second[0], first[1600], first[2 * 1600 + 250]), (0, 1, 180, 250));

        // One worker, and failures: the same episodes where they do not fail.
        let all = folder.path("all.elmur");
        let more =
            ["--set", "tail=5", "--set", "joints=true", "--threads", "1", "--set", "keep_failures=true"];
        let told = rows(&fine(&collect(&sim, "9", &all, &more))).remove(0);
        assert_eq!(told["steps"].as_u64(), Some(8 * 16 + 60), "a failure has its full length");
        let all = open(&all, None).unwrap();
        for i in (0..9).filter(|i| *i != 5) {
            assert_eq!(all.episode(i).unwrap(), read.episode(i).unwrap());
        }
    }

    fn writes_npz() {
        let folder = Folder::new("mikasa-npz");
        let sim = format!("folder={}", simulator(&folder));
        let (native, npz, direct) = (folder.path("color.elmur"), folder.path("npz"), folder.path("direct"));
        let more = ["--set", "tail=2", "--set", "joints=true"];
        fine(&collect(&sim, "3", &native, &more));
        fine(&["convert", &native, &npz, "--npz"]);
        fine(&collect(&sim, "3", &direct, &[&more[..], &["--npz"]].concat()));
        // Arrays alone do not tell that pictures are bytes of this environment.
        let back = folder.path("back.elmur");
        let convert = ["convert", &npz, &back, "--env", "mikasa-RememberColor3", "--set", "size=40"];
        fine(&[&convert[..], &["--set", "joints=true", "--keys", "rgb,joints"]].concat());
        let native = open(&native, None).unwrap();
        let back = open(&back, None).unwrap();
        assert_eq!((back.spaces(), &back.metadata()["env"]), (native.spaces(), &native.metadata()["env"]));
        assert_eq!(back.episode(1).unwrap().observations, native.episode(1).unwrap().observations);
        for written in [npz, direct] {
            let first = Path::new(&written).join("train_data_0.npz");
            let archive = std::fs::read(&first).unwrap();
            for name in ["rgb.npy", "joints.npy", "action.npy", "reward.npy", "success.npy", "done.npy"] {
                let found = archive.windows(name.len()).any(|part| part == name.as_bytes());
                assert!(found, "{name} in {}", first.display());
            }
            // Images alone as in the published setting, or what is asked for.
            let images = open(&written, None).unwrap();
            let keys = vec!["rgb".to_owned(), "joints".to_owned()];
            let both = Selection { keys, ..Selection::default() };
            let both = open_selected(&written, None, &both, &Default::default()).unwrap();
            for i in 0..3 {
                let episode = native.episode(i).unwrap();
                let (images, both) = (images.episode(i).unwrap(), both.episode(i).unwrap());
                assert_eq!(images.observations[..], episode.observations[..1]);
                assert_eq!(both.observations, episode.observations);
                assert_eq!((&both.actions, &both.rewards), (&episode.actions, &episode.rewards));
            }
        }
    }

    fn thins() {
        let folder = Folder::new("mikasa-thin");
        let sim = format!("folder={}", simulator(&folder));
        let [whole, small, again] =
            ["whole.elmur", "small.elmur", "again.elmur"].map(|name| folder.path(name));
        fine(&collect(&sim, "2", &whole, &["--set", "tail=2"]));
        let thin = ["--env", "mikasa-RememberColor3", "--set", "render=40", "--set", "size=20"];
        fine(&[&["convert", &whole, &small][..], &thin].concat());
        let notes = open(&small, None).unwrap().metadata().clone();
        let noted = ["size", "render", "levels"].map(|key| notes[key].as_str());
        assert_eq!(noted, ["20", "40", "256"]);
        let more = ["--env", "mikasa-RememberColor3", "--set", "size=20", "--set", "levels=16"];
        refused(
            &[&["convert", &small, &again][..], &more].concat(),
            &["thinned before", "size=20 render=40"],
        );
        // The same pictures in another form.
        fine(&["convert", &small, &again]);
        assert_eq!(open(&again, None).unwrap().metadata(), &notes);
    }

    /// Settings of a tiny policy for pictures of 40 x 40.
    const TINY: [&str; 9] = [
        "env.size=40",
        "model.d_model=16",
        "model.layers=1",
        "model.segment_length=10",
        "train.batch=4",
        "train.batches=3",
        "train.epochs=0",
        "eval.every=3",
        "eval.episodes=2",
    ];

    fn train<'a>(data: &'a str, run: &'a str) -> Vec<&'a str> {
        let common =
            ["train", "small", "--env", "mikasa-RememberColor3", "--data", data, "--out", run, "--json"];
        [&common[..], &TINY].concat()
    }

    fn trains() {
        let folder = Folder::new("mikasa-train");
        let place = simulator(&folder);
        let sim = format!("folder={place}");
        let (data, run, npz) = (folder.path("color.elmur"), folder.path("run"), folder.path("npz"));
        fine(&collect(&sim, "6", &data, &[]));
        let output = without_simulator(&train(&data, &run));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
        assert!(text(&output).contains("elmur simulators install mikasa DIR"), "{}", text(&output));
        assert!(text(&output).contains("held-out"), "{}", text(&output));
        let eval = ["eval", &run, "--set", &sim, "--episodes", "5", "--json"];
        let told = rows(&fine(&eval));
        assert_eq!(
            (told[0]["measure"].as_str(), told[0]["episodes"].as_u64()),
            (Some("success_rate"), Some(5))
        );
        let alone = rows(&fine(&[&eval[..], &["--set", "workers=1"]].concat()));
        assert_eq!(alone[0]["score"], told[0]["score"], "results do not depend on the number of workers");
        let acted = |workers: &str| -> BTreeMap<String, Vec<u8>> {
            let kept = Path::new(&place).join("actions");
            std::fs::create_dir(&kept).unwrap();
            fine(&["eval", &run, "--set", &sim, "--episodes", "8", "--set", workers]);
            let files = std::fs::read_dir(&kept).unwrap().map(|file| file.unwrap());
            let read = |file: std::fs::DirEntry| {
                (file.file_name().into_string().unwrap(), std::fs::read(file.path()).unwrap())
            };
            let all = files.map(read).collect();
            std::fs::remove_dir_all(&kept).unwrap();
            all
        };
        let one = acted("workers=1");
        assert_eq!((one.len(), one.values().next().unwrap().len()), (8, 60 * 8 * 4));
        assert!(one == acted("workers=8"), "nor does what the policy does, to the bit");
        let named = rows(&fine(&[&eval[..], &["--env", "mikasa-RememberColor3"]].concat()));
        assert_eq!(
            named[0]["score"], told[0]["score"],
            "the run's environment by name has the run's settings"
        );
        // Arrays without spaces are those of the environment.
        fine(&["convert", &data, &npz, "--npz"]);
        let other = folder.path("other");
        let output = without_simulator(&train(&npz, &other));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
        fine(&["eval", &other, "--set", &sim, "--episodes", "2", "--json"]);
        let told = text(&without_simulator(&["eval", &other, "--episodes", "2"]));
        assert!(told.contains("its simulator is not set up") && told.contains("--data PATH"), "{told}");
        // Where there is a simulator, validation plays in it.
        let validated = folder.path("validated");
        let setting = format!("env.folder={place}");
        let told = rows(&fine(&[&train(&data, &validated)[..], &[&setting]].concat()));
        assert_eq!(told[0]["measure"], "success_rate", "{}", told[0]);

        let film = folder.path("film");
        let told = rows(&fine(&["watch", &run, "--set", &sim, "--out", &film, "--json"])).remove(0);
        assert_eq!(told["steps"].as_u64(), Some(60));
        let bytes = std::fs::read(format!("{film}.png")).unwrap();
        assert!(bytes.starts_with(b"\x89PNG") && bytes.windows(4).any(|part| part == b"acTL"));
        let named = format!("{film}.png");
        refused(&["watch", &data, "--out", &named], &["film.png", "exists", "--force"]);
        let again = ["watch", &data, "--episode", "2", "--out", &named, "--force", "--json"];
        let told = rows(&fine(&again)).remove(0);
        assert_eq!(told["film"].as_str(), Some(&*named));
        assert_eq!(told["steps"].as_u64(), Some(60));
        refused(&["watch", &data, "--episode", "6", "--out", &film, "--force"], &["`episode`", "0 to 5"]);
        let asked = ["watch", &data, "--set", "size=64", "--out", &film, "--force"];
        refused(&asked, &["expected a policy, for --set"]);
    }

    /// Runs the program where no simulator is named.
    fn without_simulator(args: &[&str]) -> std::process::Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elmur"));
        command.args(args).env_remove("ELMUR_MIKASA").output().unwrap()
    }

    fn dies() {
        let folder = Folder::new("mikasa-dies");
        let place = simulator(&folder);
        let sim = format!("folder={place}");
        let (data, run) = (folder.path("color.elmur"), folder.path("run"));
        fine(&collect(&sim, "5", &data, &["--set", "tail=3"]));
        let whole = std::fs::read(&data).unwrap();
        let mark = |name: &str| std::fs::write(Path::new(&place).join(name), "").unwrap();
        // In a collection: at a reset, when the expert is asked, at the first, a middle and the last step.
        for moment in ["die-reset", "die-oracle", "die-0", "die-7", "die-13", "hang-9"] {
            mark(moment);
            let again = folder.path(&format!("{moment}.elmur"));
            let args = collect(&sim, "5", &again, &["--set", "tail=3", "--set", "timeout=2"]);
            let output = crate::common::elmur(&args);
            assert_eq!(output.status.code(), Some(0), "{moment}: {}", text(&output));
            assert!(text(&output).contains("1 worker had to be replaced"), "{moment}: {}", text(&output));
            assert_eq!(std::fs::read(&again).unwrap(), whole, "{moment}");
        }
        // In an evaluation.
        let output = without_simulator(&train(&data, &run));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
        let eval = ["eval", &run, "--set", &sim, "--set", "workers=2", "--episodes", "4", "--json"];
        let whole = fine(&eval);
        for moment in ["die-reset", "die-0", "die-30", "die-59"] {
            mark(moment);
            let output = crate::common::elmur(&eval);
            assert_eq!(output.status.code(), Some(0), "{moment}: {}", text(&output));
            assert_eq!(String::from_utf8_lossy(&output.stdout), whole, "{moment}");
            assert!(text(&output).contains("1 worker had to be replaced"), "{moment}: {}", text(&output));
        }
    }

    fn misses() {
        let folder = Folder::new("mikasa-missing");
        let out = folder.path("none.elmur");
        let install = "elmur simulators install mikasa DIR";
        let collect = ["collect", "mikasa-TakeItBack", "--episodes", "1", "--out", &out];
        for args in [&collect[..], &["simulators", "check"]] {
            let output = without_simulator(args);
            let message = text(&output);
            assert_eq!(output.status.code(), Some(2), "{message}");
            assert!(message.contains(install) && message.contains("ELMUR_MIKASA"), "{message}");
        }
        let empty = folder.path("empty");
        refused(&["simulators", "check", &empty], &[install, &empty]);
        let place = simulator(&folder);
        let told = rows(&fine(&["simulators", "check", &place, "--steps", "3", "--json"])).remove(0);
        assert!(
            told["pixel_deviation"].as_f64().unwrap() > 10.0 && told["env"] == "mikasa-RememberColor3-v0"
        );
    }

    fn installs() {
        let folder = Folder::new("mikasa-install");
        let (bin, place) = (folder.0.join("bin"), folder.path("place"));
        std::fs::create_dir_all(&bin).unwrap();
        let program = |name: &str, text: &str| {
            std::fs::write(bin.join(name), format!("#!/bin/sh\n{text}\n")).unwrap();
            std::fs::set_permissions(bin.join(name), std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        // No package is installed, and the installation of packages fails, or takes very long.
        program("dpkg-query", "exit 1");
        program("apt-get", "echo no network here >&2; exit 100");
        program("id", "echo 0");
        let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
        let install = || {
            let mut command = crate::common::program();
            command.args(["simulators", "install", "mikasa", &place]).env("PATH", &path);
            command
        };
        let output = install().output().unwrap();
        let message = text(&output);
        assert_eq!(output.status.code(), Some(2), "{message}");
        for part in ["0.7 GB", "1.1 GB", "no network here", "did not succeed"] {
            assert!(message.contains(part), "no {part:?} in {message}");
        }
        assert!(Path::new(&place).join("scripts/env_server.py").exists());

        let started = folder.path("started");
        program("apt-get", &format!("echo $$ > {started}.new; mv {started}.new {started}; exec sleep 600"));
        let mut command = install();
        command.stdin(std::process::Stdio::null());
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let child = command.spawn().unwrap();
        until(&started, 2);
        let apt: u32 = std::fs::read_to_string(&started).unwrap().trim().parse().unwrap();
        signal(&child, "INT");
        let output = ended(child, 60);
        assert_eq!(output.status.code(), Some(130), "{}", text(&output));
        let gone = || !Path::new(&format!("/proc/{apt}/cmdline")).exists();
        let begin = std::time::Instant::now();
        while Path::new("/proc/self").exists() && !gone() {
            assert!(begin.elapsed() < Duration::from_secs(60), "the installer's program is left behind");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Numbers of the processes that a process has started.
    fn children(process: u32) -> Vec<u32> {
        let list = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
        let read = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children")).ok();
        let text: String = list.filter_map(read).collect::<Vec<_>>().join(" ");
        text.split_whitespace().filter_map(|number| number.parse().ok()).collect()
    }

    fn real() {
        let Some(place) = std::env::var_os("ELMUR_MIKASA") else {
            return println!("skipped: ELMUR_MIKASA names no simulator");
        };
        let folder = Folder::new("mikasa-real");
        let (whole, again) = (folder.path("whole.elmur"), folder.path("again.elmur"));
        let args = |out: &str, threads: &str| -> Vec<String> {
            let words = format!(
                "collect mikasa-RememberColor3 --set size=64 --set tail=2 --set joints=true --set cue=true \
                 --set start_timeout=600 --episodes 3 --threads {threads} --out {out} --json"
            );
            words.split_whitespace().map(str::to_owned).collect()
        };
        let run = |args: &[String]| start(&args.iter().map(String::as_str).collect::<Vec<_>>());
        let output = ended(run(&args(&whole, "1")), 1200);
        assert_eq!(output.status.code(), Some(0), "{}: {}", place.display(), text(&output));
        let told = rows(&String::from_utf8_lossy(&output.stdout)).remove(0);
        let steps = told["steps"].as_u64().unwrap();
        assert!((3 * 20..3 * 40).contains(&steps), "solved after about 28 steps: {told}");
        let read = open(&whole, None).unwrap();
        for i in 0..3 {
            let episode = read.episode(i).unwrap();
            let images = bytes(&episode.observations[0]);
            let mean = images.iter().map(|byte| f64::from(*byte)).sum::<f64>() / images.len() as f64;
            assert!((40.0..220.0).contains(&mean), "{mean}");
            assert!(episode.rewards.iter().sum::<f32>() >= 1.0);
            let Column::F32(cue) = &episode.observations[2] else { panic!("the cue is floats") };
            assert!(cue.chunks(3).all(|cue| cue.iter().sum::<f32>() == 1.0 && cue == &cue[..3]));
        }
        // The first worker is killed as soon as an episode is on disk.
        let child = run(&args(&again, "1"));
        until(format!("{again}.tmp"), std::fs::metadata(&whole).unwrap().len() / 4);
        let worker = children(child.id())[0];
        assert!(Command::new("kill").args(["-9", &worker.to_string()]).status().unwrap().success());
        let output = ended(child, 1200);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
        assert!(text(&output).contains("1 worker had to be replaced"), "{}", text(&output));
        assert_eq!(std::fs::read(&again).unwrap(), std::fs::read(&whole).unwrap(), "bit for bit");
        noisy_actions_have_clean_labels(&folder, &whole);
        trains_and_repeats_its_evaluation(&folder, &whole);
    }

    /// The first action that the expert wants is the same with noise, and what it leads to is not.
    fn noisy_actions_have_clean_labels(folder: &Folder, whole: &str) {
        let noisy = folder.path("noisy.elmur");
        let settings =
            ["size=64", "tail=2", "joints=true", "cue=true", "action_noise=0.3", "keep_failures=true"];
        let set = settings.iter().flat_map(|setting| ["--set", setting]);
        let args = ["collect", "mikasa-RememberColor3", "--episodes", "1", "--threads", "1", "--out", &noisy];
        fine(&args.into_iter().chain(set).collect::<Vec<_>>());
        let [clean, noisy] = [whole, &noisy].map(|path| open(path, None).unwrap().episode(0).unwrap());
        let [wanted, with_noise] = [&clean, &noisy].map(|episode| match &episode.actions[0] {
            Column::F32(actions) => actions.clone(),
            other => panic!("expected floats, got {other:?}"),
        });
        assert_eq!(wanted[..8], with_noise[..8]);
        let picture = 6 * 64 * 64;
        let [still, moved] = [&clean, &noisy].map(|episode| bytes(&episode.observations[0]).to_vec());
        assert_eq!(still[..picture], moved[..picture]);
        assert_ne!(still[picture..5 * picture], moved[picture..5 * picture]);
    }

    /// Validation plays in the simulator, and the same test episodes have the same returns, also when a worker is killed.
    fn trains_and_repeats_its_evaluation(folder: &Folder, data: &str) {
        let run = folder.path("run");
        let mut args = vec!["train", "mikasa-RememberColor3", "--data", data, "--out", &run, "--json"];
        args.extend("data.keys=rgb model.d_model=16 model.layers=1 train.batch=2 train.batches=2".split(' '));
        args.extend("eval.every=2 eval.episodes=1 env.workers=1 env.start_timeout=600".split(' '));
        let told = rows(&fine(&args)).remove(0);
        assert_eq!(told["measure"], "success_rate", "{told}");
        let eval =
            "--episodes 3 --metric return --set reward=dense --set workers=2 --set start_timeout=600 --json";
        let args: Vec<&str> = ["eval", &run].into_iter().chain(eval.split(' ')).collect();
        let first = rows(&fine(&args)).remove(0);
        assert!(first["score"].as_f64().is_some_and(|score| score > 0.0), "{first}");
        let child = start(&args);
        let worker = loop {
            match children(child.id()).first() {
                Some(worker) => break *worker,
                None => std::thread::sleep(Duration::from_millis(50)),
            }
        };
        assert!(Command::new("kill").args(["-9", &worker.to_string()]).status().unwrap().success());
        let output = ended(child, 1200);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
        assert!(text(&output).contains("1 worker had to be replaced"), "{}", text(&output));
        let again = rows(&String::from_utf8_lossy(&output.stdout)).remove(0);
        assert_eq!(again["score"], first["score"]);
    }
}
