//! Environments in other processes, with a worker in Rust that needs nothing else: this program starts itself
//! again as the worker, and the worker dies, hangs or talks nonsense where it is told to. (For that it owns
//! its standard output, so it has a `main` of its own.)
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

fn main() {
    #[cfg(unix)]
    unix::main();
}

#[cfg(unix)]
mod unix {
    use std::io::{Read, Write};
    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use std::time::Duration;

    use elmur_base::{Row, Space, Spaces, Stop, Values};
    use elmur_envs::worker::{Dtype, Interface, Launch, Part, Task, WorkerEnv, Workers, small_seed};
    use elmur_envs::{Autoreset, Encoding, Env, Error, Player, VecEnv, Wrapped, Wrappers};
    use serde_json::{Map, Value, json};

    pub fn main() {
        if std::env::var_os("ELMUR_FAKE_WORKER").is_some() {
            return Fake::default().serve();
        }
        let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
        let tests: [(&str, fn()); 10] = [
            ("an_episode_is_played_in_a_worker_and_its_expert_solves_it", plays),
            ("rows_have_a_worker_each_and_a_row_depends_on_its_own_seed_alone", rows),
            ("rows_compute_at_the_same_time", together),
            ("a_worker_that_dies_at_any_moment_costs_its_episode_alone", dies),
            ("rows_that_are_lost_are_told_and_the_others_move_on", lost_rows),
            ("a_worker_that_hangs_is_replaced_when_its_time_is_over", hangs),
            ("an_episode_that_kills_every_worker_is_an_error_that_quotes_their_last_words", kills),
            ("errors_are_answers_and_the_worker_stays", refuses),
            ("workers_that_do_not_keep_to_the_protocol_are_refused", breaks),
            ("workers_end_with_their_owner_and_are_used_again_before", ends),
        ];
        for (name, test) in tests {
            if wanted.is_empty() || wanted.iter().any(|part| name.contains(part.as_str())) {
                println!("test worker::{name} ...");
                test();
            }
        }
    }

    // The worker.

    /// Shows a number, waits three steps and asks for it.
    #[derive(Default)]
    struct Fake {
        make: Value,
        seed: u64,
        step: u64,
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
            let version = if std::env::var_os("ELMUR_FAKE_OLD").is_some() { 0 } else { 1 };
            send(json!({"hello": "fake", "protocol": version}), &[]);
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
                match self.answer(&header, &rest[head..]) {
                    Some((answer, body)) => send(answer, &body),
                    None => return,
                }
            }
        }

        fn is_due(&self, what: &str) -> bool {
            let due = self.make[what].as_u64() == Some(self.step) || self.make[what] == "always";
            let seed = self.make["seed"].as_u64().is_none_or(|seed| seed == self.seed);
            // A marker lets things happen once only, whatever process they happen in.
            let marker = self.make["once"].as_str();
            let first = || marker.is_none_or(|path| std::fs::File::create_new(path).is_ok());
            due && seed && first()
        }

        /// Waits until four workers have come here.
        fn meet(&self, folder: &Path) {
            std::fs::write(folder.join(self.seed.to_string()), "").unwrap();
            while std::fs::read_dir(folder).unwrap().count() < 4 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }

        fn answer(&mut self, header: &Value, body: &[u8]) -> Option<(Value, Vec<u8>)> {
            let fine = |more: Value| {
                let mut answer = json!({"id": header["id"], "ok": true});
                answer.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                answer
            };
            let (code, number) = (self.seed % 4, |n: u64| (n as i64).to_le_bytes().to_vec());
            let seen = json!([{"name": "seen", "dtype": "i64", "shape": [1]}]);
            match header["cmd"].as_str().unwrap() {
                "make" => {
                    self.make = header.clone();
                    Some((fine(json!({"max_steps": 4})), Vec::new()))
                }
                "reset" => {
                    (self.seed, self.step) = (header["seed"].as_u64().unwrap(), 0);
                    if self.is_due("die") {
                        std::process::exit(7);
                    }
                    let shown = if self.make["odd"] == true { 99 } else { self.seed % 4 };
                    let mut arrays = seen;
                    if self.make["wide"] == true {
                        arrays[0]["shape"] = json!([2]);
                    }
                    Some((fine(json!({"arrays": arrays})), number(shown)))
                }
                "oracle" => {
                    let answer = if self.step == 3 { code } else { 0 };
                    let arrays = json!([{"name": "act", "dtype": "i64", "shape": [1]}]);
                    Some((fine(json!({"arrays": arrays})), number(answer)))
                }
                "step" => {
                    self.step += 1;
                    if self.is_due("die") {
                        std::io::stderr().write_all(b"out of luck\n").unwrap();
                        std::process::exit(7);
                    }
                    if self.is_due("hang") {
                        std::thread::sleep(Duration::from_secs(3600));
                    }
                    if let Some(folder) = self.make["meet"].as_str() {
                        self.meet(Path::new(folder));
                    }
                    if self.is_due("refuse") {
                        let error = json!({"kind": "internal", "message": "the arm is jammed"});
                        return Some((json!({"id": header["id"], "ok": false, "error": error}), Vec::new()));
                    }
                    let told = i64::from_le_bytes(body.try_into().unwrap());
                    let (done, right) = (self.step == 4, told == code as i64);
                    let reward = f64::from(u8::from(done && right));
                    let answer = json!({
                        "reward": reward, "terminated": done, "truncated": false, "done": done,
                        "success": done && right, "uses_action": self.step == 3, "arrays": seen,
                    });
                    // 4: nothing, 5: asked.
                    Some((fine(answer), number(if self.step == 3 { 5 } else { 4 })))
                }
                _ => None,
            }
        }
    }

    // The client.

    fn interface(answer: &Map<String, Value>) -> Result<Interface, String> {
        let part = |name: &str| Part {
            name: name.to_owned(),
            dtype: Dtype::I64,
            shape: vec![1],
            channels_last: false,
        };
        Ok(Interface {
            spaces: Spaces { observation: Space::Discrete { n: 6 }, action: Space::Discrete { n: 4 } },
            observation: vec![part("seen")],
            action: vec![part("act")],
            max_steps: answer.get("max_steps").and_then(Value::as_u64),
            good_return: None,
            has_expert: true,
        })
    }

    fn task(make: Value, variables: &[&str]) -> Task {
        let variables = ["ELMUR_FAKE_WORKER"].iter().chain(variables).map(|name| (name.into(), "1".into()));
        Task {
            name: "fake".to_owned(),
            launch: Launch {
                program: std::env::current_exe().unwrap().into(),
                arguments: Vec::new(),
                variables: variables.collect(),
                show_output: false,
            },
            hello: "fake",
            make: make.as_object().unwrap().clone(),
            interface,
            seed: small_seed,
            success_once: false,
            timeout: Duration::from_secs(60),
            start_timeout: Duration::from_secs(60),
            restarts: 3,
            remedy: "",
        }
    }

    fn workers(make: Value) -> Arc<Workers> {
        Arc::new(Workers::new(task(make, &[]), Stop::default()))
    }

    /// A file that is not there yet, and goes with the test.
    struct Marker(PathBuf);

    impl Marker {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("elmur-worker-{}-{name}", std::process::id()));
            let _ = std::fs::remove_file(&path);
            Self(path)
        }
        fn text(&self) -> String {
            self.0.display().to_string()
        }
    }

    impl Drop for Marker {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    /// An episode by the expert: what was seen, and the last step.
    fn play(env: &mut WorkerEnv, seed: u64) -> Result<(Vec<i32>, elmur_envs::Step), Error> {
        let (mut seen, mut action) = (Row::of(&env.spaces().observation), Row::of(&env.spaces().action));
        let mut player = env.player().unwrap();
        env.reset(seed, seen.as_mut())?;
        let mut all = vec![seen.ints[0]];
        loop {
            player.act(seen.values(), action.as_mut());
            let step = env.step(action.values(), seen.as_mut())?;
            all.push(seen.ints[0]);
            if step.done() {
                return Ok((all, step));
            }
        }
    }

    fn plays() {
        let workers = workers(json!({}));
        let mut env = WorkerEnv::new(&workers).unwrap();
        for seed in [2, 3, 7] {
            let (seen, step) = play(&mut env, seed).unwrap();
            assert_eq!(seen, [(seed % 4) as i32, 4, 4, 5, 4]);
            assert_eq!((step.reward, step.terminated, step.success), (1.0, true, Some(true)));
        }
        let mut seen = Row::of(&env.spaces().observation);
        let after = env.step(Values::ints(&[0]), seen.as_mut());
        assert!(matches!(after, Err(Error::Finished)), "{after:?}");
        env.reset(1, seen.as_mut()).unwrap();
        assert!(env.uses_action(), "not told");
        assert!(env.step(Values::ints(&[4]), seen.as_mut()).unwrap_err().to_string().contains("from 0 to 3"));
        let step = env.step(Values::ints(&[2]), seen.as_mut()).unwrap();
        assert_eq!((step.done(), step.success, env.uses_action()), (false, None, false));
        assert_eq!((workers.restarts().0, workers.interface().unwrap().max_steps), (0, Some(4)));
    }

    fn vec_env(workers: &Arc<Workers>, rows: usize) -> VecEnv<WorkerEnv> {
        VecEnv::new((0..rows).map(|_| WorkerEnv::new(workers).unwrap()).collect()).unwrap()
    }

    fn rows() {
        let workers = workers(json!({}));
        let mut env = vec_env(&workers, 3);
        env.reset(&[5, 6, 7]).unwrap();
        assert_eq!(env.observations().ints, [1, 2, 3]);
        for _ in 0..3 {
            env.step(Values::ints(&[0, 0, 0])).unwrap();
        }
        let step = env.step(Values::ints(&[1, 0, 3])).unwrap();
        assert_eq!(step.success, [Some(true), Some(false), Some(true)]);
        // Flat and one-hot wrappers stand between rows and workers.
        let wrappers = Wrappers { encoding: Encoding::OneHot, flat_action: true, ..Wrappers::default() };
        let wrapped = (0..2).map(|_| Wrapped::new(WorkerEnv::new(&workers).unwrap(), wrappers).unwrap());
        let mut env = VecEnv::new(wrapped.collect()).unwrap();
        env.reset(&[1, 2]).unwrap();
        env.step(Values::ints(&[3, 3])).unwrap();
        assert_eq!(env.observations().floats[..6], [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    }

    fn together() {
        // A step ends when all four rows are in theirs: one after the other none ever would.
        let folder = Marker::new("together");
        std::fs::create_dir(&folder.0).unwrap();
        let workers = workers(json!({"meet": folder.text()}));
        let mut env = vec_env(&workers, 4);
        env.reset(&[1, 2, 3, 4]).unwrap();
        env.step_rows(&[3, 1, 0, 2], Values::ints(&[0; 4])).unwrap();
        assert_eq!(env.observations().ints, [4; 4]);
        std::fs::remove_dir_all(&folder.0).unwrap();
    }

    fn dies() {
        for moment in 0..=4 {
            let marker = Marker::new("dies");
            let workers = workers(json!({"die": moment, "once": marker.text()}));
            let mut env = WorkerEnv::new(&workers).unwrap();
            let played = play(&mut env, 6);
            if moment == 0 {
                assert_eq!(played.unwrap().0[0], 2, "a worker that dies in a reset costs nothing");
            } else {
                let error = played.unwrap_err();
                assert!(error.is_lost() && error.to_string().contains("exited with status 7"), "{error}");
                assert!(error.to_string().contains("out of luck"), "{error}");
                assert_eq!(play(&mut env, 6).unwrap().1.success, Some(true), "another worker plays it");
            }
            assert_eq!(workers.restarts().0, 1);
        }
    }

    fn lost_rows() {
        let modes = [Autoreset::Disabled, Autoreset::NextStep, Autoreset::SameStep];
        for autoreset in modes {
            let marker = Marker::new("rows");
            let workers = workers(json!({"die": 2, "seed": 6, "once": marker.text()}));
            let mut env = vec_env(&workers, 3).with_autoreset(autoreset);
            env.reset(&[5, 6, 7]).unwrap();
            env.step(Values::ints(&[0; 3])).unwrap();
            let step = env.step(Values::ints(&[0; 3])).unwrap();
            assert_eq!(step.lost, [false, true, false]);
            assert!(!step.terminated[1] && !step.truncated[1]);
            match autoreset {
                Autoreset::Disabled => {
                    assert!(matches!(env.step(Values::ints(&[0; 3])), Err(Error::Ended { row: 1 })));
                    env.reset_row(1, 6).unwrap();
                    assert_eq!(env.observations().ints, [4, 2, 4], "the same episode from its beginning");
                }
                _ => assert_eq!(env.observations().ints[2], 4, "the others have moved"),
            }
            let step = env.step(Values::ints(&[0; 3])).unwrap();
            assert_eq!(step.lost, [false; 3], "told once");
            assert_eq!(env.observations().ints[0], 5);
        }
    }

    fn hangs() {
        let marker = Marker::new("hangs");
        let mut task = task(json!({"hang": 2, "once": marker.text()}), &[]);
        task.timeout = Duration::from_millis(300);
        let workers = Arc::new(Workers::new(task, Stop::default()));
        let mut env = WorkerEnv::new(&workers).unwrap();
        let error = play(&mut env, 3).unwrap_err();
        assert!(error.is_lost() && error.to_string().contains("did not answer for 0.3 s"), "{error}");
        assert_eq!(play(&mut env, 3).unwrap().1.success, Some(true));
        let (restarts, cause) = workers.restarts();
        assert!(restarts == 1 && cause.contains("did not answer"), "{restarts} {cause}");
        // Whoever is asked to stop does not wait any longer.
        let stop = Stop::default();
        let workers = Arc::new(Workers::new(self::task(json!({"hang": 1}), &[]), stop.clone()));
        let mut env = WorkerEnv::new(&workers).unwrap();
        env.reset(0, Row::of(&Space::Discrete { n: 6 }).as_mut()).unwrap();
        stop.request(2);
        let stopped = env.step(Values::ints(&[0]), Row::of(&Space::Discrete { n: 6 }).as_mut()).unwrap_err();
        assert!(stopped.to_string().contains("stopped"), "{stopped}");
    }

    fn kills() {
        let workers = workers(json!({"die": 3, "seed": 5}));
        let mut env = WorkerEnv::new(&workers).unwrap();
        for _ in 0..3 {
            assert!(play(&mut env, 5).unwrap_err().is_lost());
            assert!(play(&mut env, 4).is_ok(), "other episodes are not concerned");
        }
        let error = play(&mut env, 5).unwrap_err();
        assert!(!error.is_lost(), "{error}");
        for part in ["fake", "seed 5", "4 times", "`restarts`", "status 7", "out of luck"] {
            assert!(error.to_string().contains(part), "{part}: {error}");
        }
        let nowhere = self::workers(json!({"die": "always"}));
        let mut env = WorkerEnv::new(&nowhere).unwrap();
        let error = env.reset(1, Row::of(&Space::Discrete { n: 6 }).as_mut()).unwrap_err();
        assert!(error.to_string().contains("4 times"), "no episode can begin: {error}");
    }

    fn refuses() {
        let workers = workers(json!({"refuse": 1, "seed": 3}));
        let mut env = WorkerEnv::new(&workers).unwrap();
        let error = play(&mut env, 3).unwrap_err();
        let told = error.to_string();
        let expected = "fake: the arm is jammed (internal) in the episode of the worker's seed 3";
        assert!(told.starts_with(expected), "{told}");
        assert_eq!(play(&mut env, 2).unwrap().1.success, Some(true));
        assert_eq!(workers.restarts().0, 0, "the worker goes on");
    }

    fn breaks() {
        let start = |make: Value| {
            let workers = workers(make);
            let mut env = WorkerEnv::new(&workers)?;
            env.reset(2, Row::of(&Space::Discrete { n: 6 }).as_mut())
        };
        let message = |result: Result<(), Error>| result.unwrap_err().to_string();
        assert!(message(start(json!({"odd": true}))).contains("holds 99, expected an integer from 0 to 5"));
        assert!(message(start(json!({"wide": true}))).contains("longer than its frame"));
        let first = |task: Task| WorkerEnv::new(&Arc::new(Workers::new(task, Stop::default())));
        let old = first(task(json!({}), &["ELMUR_FAKE_OLD"])).unwrap_err().to_string();
        assert!(old.contains("protocol 0"), "{old}");
        let launch = |program: &str, arguments: &[&str]| {
            let mut task = task(json!({}), &[]);
            task.launch = Launch {
                program: program.into(),
                arguments: arguments.iter().map(Into::into).collect(),
                variables: Vec::new(),
                show_output: false,
            };
            task.start_timeout = Duration::from_millis(400);
            first(task).unwrap_err().to_string()
        };
        assert!(launch("no-such-program", &[]).contains("\"no-such-program\" could not be started"));
        let other = launch("sh", &["-c", "echo no module named x >&2; exit 3"]);
        assert!(other.contains("status 3") && other.contains("no module named x"), "{other}");
        assert!(launch("sh", &["-c", "echo hello, I am a shell"]).contains("starts with \"hell\""));
        assert!(launch("sleep", &["3600"]).contains("did not answer for 0.4 s"));
        let endless = launch("sh", &["-c", "while :; do echo MKR1MKR1MKR1MKR1; done"]);
        assert!(endless.contains("beyond the limits"), "{endless}");
        let mut huge = task(json!({"note": "x".repeat(2 << 20)}), &[]);
        huge.name = "huge".to_owned();
        assert!(first(huge).unwrap_err().to_string().contains("beyond the limits"));
        let mut other_spaces = task(json!({}), &[]);
        other_spaces.interface = |answer| {
            let whole = interface(answer)?;
            let spaces = Spaces { action: Space::between(-1.0, 1.0, [1]), ..whole.spaces };
            Ok(Interface { spaces, ..whole })
        };
        assert!(first(other_spaces).unwrap_err().to_string().contains("\"act\" i64 [1] does not fit"));
    }

    /// Processes that were started by this one and are alive.
    fn children() -> usize {
        let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
        let read = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children"));
        tasks.filter_map(|task| read(task).ok()).map(|list| list.split_whitespace().count()).sum()
    }

    fn ends() {
        if !Path::new("/proc/self/task").exists() {
            return println!("skipped: processes cannot be listed here");
        }
        let before = children();
        let workers = workers(json!({}));
        for _ in 0..3 {
            let mut env = vec_env(&workers, 2);
            env.reset(&[1, 2]).unwrap();
            env.step(Values::ints(&[0, 0])).unwrap();
            assert_eq!(children(), before + 2, "those of the last round");
        }
        drop(workers);
        assert_eq!(children(), before);
    }
}
