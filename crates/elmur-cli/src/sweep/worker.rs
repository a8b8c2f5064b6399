//! `elmur sweep run`: workers that claim runs, train and evaluate them.
//!
//! Training and evaluation are processes of their own (`elmur train`, `elmur eval`): what goes wrong in one run
//! leaves the others alone. They end with their worker, saving first.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use elmur_base::Stop;
use elmur_engine::{Device, Precision};
use elmur_envs::Registry;
use elmur_pool::granted_threads;
use elmur_train::{Error, Result, RunFolder};
use serde_json::Value;

use super::claim::{Claim, Worker};
use super::file::{Plan, PlannedRun};
use super::notes::{commit, machine, reason, scores};
use super::state::{self, Results, RunResult, TestScore};
use crate::progress::clock;
use crate::{Context, note, report, say, signals};

/// Options of `elmur sweep run`.
#[derive(clap::Args)]
pub struct Args {
    /// The sweep: a JSON file (see docs/sweeps.md).
    file: PathBuf,
    /// Train this many runs at once.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = crate::count(256))]
    jobs: usize,
    /// Train on this device, whatever the file says: cpu, cuda or cuda:N.
    #[arg(long)]
    device: Option<String>,
    /// Use this many CPU threads per run; 0: those that are granted, divided among the jobs. Results do not depend
    /// on it.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = crate::threads())]
    threads: usize,
    /// Work on these runs alone, and on those that they begin with: runs whose name in `elmur sweep status` contains
    /// the pattern; * stands for anything.
    #[arg(long, value_name = "PATTERN")]
    only: Option<String>,
    /// Stop after this many minutes: running runs are saved, to be continued by the next `elmur sweep run`.
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    limit_minutes: Option<u64>,
    /// Train without evaluating, for a machine without the simulator: runs are left to be evaluated by an `elmur sweep
    /// run` where it is.
    #[arg(long)]
    train_only: bool,
    /// Try runs again that have failed.
    #[arg(long)]
    retry_failed: bool,
    /// When nothing is left to begin, wait for the runs of other workers, and take over those that are given up.
    #[arg(long)]
    wait: bool,
    /// Note this in the results as the machine; default: processor, number of cores and device.
    #[arg(long, value_name = "TEXT")]
    machine: Option<String>,
    /// Stop and save when the process that started this one has ended.
    #[arg(long)]
    die_with_parent: bool,
}

/// Exit code if runs are left for another time, as schedulers understand it (EX_TEMPFAIL).
const LEFT: u8 = 75;
/// Time between two looks at a process.
const LOOK: Duration = Duration::from_millis(50);
/// Time between two lines about how far everything is.
const TELL: Duration = Duration::from_secs(30);
/// Time between two looks at runs that others have.
const AGAIN: Duration = Duration::from_millis(500);

/// Refuses a sweep of whose `needed` runs one has no data here; those of others may lie elsewhere.
fn check_data(plan: &Plan, file: &Path, needed: &HashSet<usize>) -> Result<()> {
    let lacks_data = |run: &&PlannedRun| {
        run.settings.get("data.file").and_then(Value::as_str).is_some_and(|data| !Path::new(data).exists())
    };
    let mut runs = plan.runs.iter().enumerate().filter(|(i, _)| needed.contains(i)).map(|(_, run)| run);
    match runs.find(lacks_data) {
        Some(run) => {
            let remedy = "record it with `elmur collect`, or name other runs with --only";
            let (label, data) = (plan.label(run), &run.settings["data.file"]);
            Err(Error::file(file, format!("{label}: no such dataset as {data}: {remedy}")))
        }
        None => Ok(()),
    }
}

/// Refuses a sweep of whose runs that are `left` one cannot be tested here, because its simulator is missing: that would
/// be noticed after its training.
fn check_environments(plan: &Plan, file: &Path, left: &[usize], registry: &Registry) -> Result<()> {
    let mut checked = HashSet::new();
    for run in left.iter().map(|i| &plan.runs[*i]) {
        if checked.insert((run.task, run.column))
            && let Some(environment) = plan.environment_of(run, registry)?
        {
            environment
                .available()
                .map_err(|error| Error::file(file, format!("{}: {error}", plan.label(run))))?;
        }
    }
    Ok(())
}

/// Runs `elmur sweep run`.
pub fn run(args: &Args, context: &Context) -> Result<ExitCode> {
    let plan = Plan::read(&args.file, &context.registry)?;
    let device = args.device.clone().unwrap_or_else(|| plan.device.clone());
    for (key, name) in [("device", &device), ("evaluate.device", &plan.evaluate.device)] {
        // A device that is not there would fail every run.
        Device::open(name, 1, Precision::F32).map_err(|error| match error {
            elmur_engine::Error::Device { expected, got } => crate::keys::config(key, expected, got),
            error => error.into(),
        })?;
    }
    let selected = args.only.as_ref().map_or_else(|| (0..plan.runs.len()).collect(), |only| plan.only(only));
    if selected.is_empty() {
        let expected = format!("part of the name of a run, such as `{}`", plan.label(&plan.runs[0]));
        return Err(crate::keys::config("only", expected, args.only.as_deref().unwrap_or_default()));
    }
    let threads = match args.threads {
        0 => (granted_threads() / args.jobs).max(1),
        threads => threads,
    };
    let known = state::known(&plan)?;
    // Weights of a run that is known from elsewhere are not here.
    let lacks_result = |i: &usize| {
        let run = &plan.runs[*i];
        !known.contains_key(&run.id) && !plan.path_of(run, ".json").exists()
    };
    let left: Vec<usize> = selected.iter().copied().filter(lacks_result).collect();
    let needed: HashSet<usize> = plan.with_those_before(&left).into_iter().collect();
    let untrained = needed.iter().copied().filter(|i| !state::is_trained(&plan, &plan.runs[*i])).collect();
    check_data(&plan, &args.file, &untrained)?;
    if !args.train_only {
        check_environments(&plan, &args.file, &left, &context.registry)?;
    }
    let runs = plan.runs_folder();
    fs::create_dir_all(&runs).map_err(|e| Error::io(&runs, e))?;
    let selected = plan.with_those_before(&selected);
    if args.retry_failed {
        selected.iter().try_for_each(|i| state::forget_failure(&plan, &plan.runs[*i]))?;
    }
    if args.die_with_parent {
        signals::stop_with_parent(&context.stop);
    }
    let program = std::env::current_exe().map_err(|e| Error::io(Path::new("elmur"), e))?;
    let sweep = Sweep {
        plan: &plan,
        selected,
        needed,
        known,
        worker: Worker::here(),
        program,
        commit: commit(),
        machine: args.machine.clone().unwrap_or_else(|| machine(&device)),
        device,
        threads,
        jobs: args.jobs,
        train_only: args.train_only,
        wait: args.wait,
        deadline: args.limit_minutes.map(|minutes| Instant::now() + Duration::from_secs(60 * minutes)),
        stop: &context.stop,
        shared: Mutex::default(),
    };
    sweep.run()
}

/// A sweep at work.
struct Sweep<'a> {
    plan: &'a Plan,
    /// Indices of the runs to work on.
    selected: Vec<usize>,
    /// Indices of the runs whose weights must be here in the end: runs without result, and runs that these begin with.
    needed: HashSet<usize>,
    known: Results,
    worker: Worker,
    program: PathBuf,
    commit: Option<String>,
    machine: String,
    device: String,
    threads: usize,
    jobs: usize,
    train_only: bool,
    wait: bool,
    deadline: Option<Instant>,
    stop: &'a Stop,
    shared: Mutex<Shared>,
}

/// What the workers of this process share.
#[derive(Default)]
struct Shared {
    /// Runs that need no more look: done, failed or left for another time.
    settled: HashSet<usize>,
    /// Number of runs done by this process.
    done: usize,
    /// Runs that a worker of this process has or tries to claim.
    running: HashSet<usize>,
    /// When a line about how far everything is was last written.
    told: Option<Instant>,
    /// A failure of the sweep itself, such as a full disk.
    error: Option<Error>,
}

/// How work on a run ended.
enum Outcome {
    Done(Box<RunResult>),
    Failed(String),
    /// A process was killed from outside, or crashed.
    Killed(String),
    Interrupted,
    /// Trained, and left to be evaluated elsewhere.
    Trained,
}

/// What a worker finds to do.
enum Next {
    Work(usize, Claim),
    /// Others have all that is left.
    Held,
    /// What is left begins with the weights of runs that this process has.
    Later,
    Nothing,
}

impl Sweep<'_> {
    fn run(&self) -> Result<ExitCode> {
        let (count, out) = (self.selected.len(), self.plan.out.display());
        note(&format!("{}: {count} runs in {out}, {} at once", self.plan.name, self.jobs));
        std::thread::scope(|scope| {
            for job in 1..self.jobs {
                let name = format!("elmur-sweep-{job}");
                // Threads that the system refuses are done without.
                if std::thread::Builder::new().name(name).spawn_scoped(scope, || self.work()).is_err() {
                    break;
                }
            }
            self.work();
        });
        let results = state::results(self.plan)?;
        state::write_results(&self.plan.out.join("results.json"), self.plan, &results)?;
        let mut shared = self.shared();
        if let Some(error) = shared.error.take() {
            return Err(error);
        }
        let runs = || self.selected.iter().map(|i| &self.plan.runs[*i]);
        let done = runs().filter(|run| results.contains_key(&run.id)).count();
        let failed = runs()
            .filter(|run| !results.contains_key(&run.id) && state::failure_of(self.plan, run).is_some())
            .count();
        say(&format!(
            "{}: {done} of {count} runs done ({} by this command), {failed} failed, {} left",
            self.plan.name,
            shared.done,
            count - done - failed
        ));
        Ok(match (self.stop.requested(), failed, done == count) {
            (true, ..) => ExitCode::from(128 + self.stop.signal() as u8),
            (_, 1.., _) => ExitCode::from(1),
            (_, _, true) => ExitCode::SUCCESS,
            _ => ExitCode::from(LEFT),
        })
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether everything is to be saved and ended.
    fn ends(&self) -> bool {
        self.stop.requested()
            || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
            || self.shared().error.is_some()
    }

    /// One worker: run after run until none is left.
    fn work(&self) {
        let mut looked_twice = false;
        while !self.ends() {
            match self.next() {
                Ok(Next::Work(run, claim)) => {
                    looked_twice = false;
                    if let Err(error) = self.attend(run, &claim) {
                        self.shared().error.get_or_insert(error);
                    }
                    self.shared().running.remove(&run);
                }
                // A look of `elmur sweep status` at a claim is not work: whoever seems to have a run is looked at
                // twice.
                Ok(Next::Held) if self.wait || !looked_twice => {
                    looked_twice = true;
                    std::thread::sleep(AGAIN);
                }
                Ok(Next::Later) => std::thread::sleep(AGAIN),
                Ok(Next::Held | Next::Nothing) => break,
                Err(error) => {
                    self.shared().error.get_or_insert(error);
                }
            }
        }
    }

    /// Claims the first run that is neither done, failed nor another's, and whose first weights are there.
    fn next(&self) -> Result<Next> {
        let (mut held, mut later) = (false, false);
        for &i in &self.selected {
            let run = &self.plan.runs[i];
            {
                let mut shared = self.shared();
                if shared.settled.contains(&i) || shared.running.contains(&i) {
                    continue;
                }
                if self.is_settled(i) {
                    shared.settled.insert(i);
                    continue;
                }
                if let Some(before) = run.before.filter(|before| !self.has_weights(*before)) {
                    if shared.running.contains(&before) {
                        later = true;
                    } else if shared.settled.contains(&before) || self.has_failed(before) {
                        // That run has failed, or was saved and left for another time: this one is left too.
                        let [this, other] = [i, before].map(|i| self.plan.label(&self.plan.runs[i]));
                        note(&format!("left: {this}: it begins with {other}, which is not done"));
                        shared.settled.insert(i);
                    } else {
                        held = true;
                    }
                    continue;
                }
                shared.running.insert(i);
            }
            match Claim::take(&self.plan.path_of(run, ".claim"), &self.worker) {
                // It may have been finished between the two looks.
                Ok(Some(claim)) if !self.is_settled(i) => return Ok(Next::Work(i, claim)),
                Ok(taken) => {
                    held |= taken.is_none();
                    self.shared().running.remove(&i);
                }
                Err(error) => {
                    self.shared().running.remove(&i);
                    return Err(error);
                }
            }
        }
        Ok(match (later, held) {
            (true, _) => Next::Later,
            (_, true) => Next::Held,
            _ => Next::Nothing,
        })
    }

    /// Whether a run needs no more work: it has failed, or its result is there, with its weights if others begin with
    /// them.
    fn is_settled(&self, i: usize) -> bool {
        let run = &self.plan.runs[i];
        let is_done = self.known.contains_key(&run.id)
            || self.plan.path_of(run, ".json").exists()
            || self.train_only && state::is_trained(self.plan, run);
        self.has_failed(i) || is_done && (!self.needed.contains(&i) || self.has_weights(i))
    }

    fn has_failed(&self, i: usize) -> bool {
        self.plan.path_of(&self.plan.runs[i], ".failed.json").exists()
    }

    /// Whether a run is trained here, with weights that others can begin with.
    fn has_weights(&self, i: usize) -> bool {
        let run = &self.plan.runs[i];
        let folder = RunFolder::open(&self.plan.path_of(run, ""));
        let is_done = self.plan.path_of(run, ".json").exists() || state::is_trained(self.plan, run);
        is_done && folder.is_ok_and(|folder| folder.best().exists())
    }

    /// Trains and evaluates a run, and keeps what came of it.
    fn attend(&self, i: usize, claim: &Claim) -> Result<()> {
        let (run, start) = (&self.plan.runs[i], Instant::now());
        let label = self.plan.label(run);
        let mut outcome = self.train_and_evaluate(run, claim)?;
        // Whoever kills everything may begin with the training: that is no failure of the run. Twice in a row is.
        if let Outcome::Killed(reason) = &outcome {
            note(&format!("killed: {label}: {reason}; once more"));
            outcome = self.train_and_evaluate(run, claim)?;
        }
        let mut shared = self.shared();
        match outcome {
            Outcome::Done(result) => {
                state::write_result(self.plan, run, &result)?;
                let scores: Vec<String> = result.scores.iter().map(TestScore::brief).collect();
                let took = clock(start.elapsed().as_secs_f64());
                shared.done += 1;
                note(&format!("done: {label}: {} ({} batches, {took})", scores.join(", "), result.batches));
            }
            Outcome::Failed(reason) | Outcome::Killed(reason) => {
                state::write_failure(self.plan, run, &reason)?;
                report(&format!("failed: {label}: {reason}"));
            }
            Outcome::Interrupted => note(&format!("saved: {label}")),
            Outcome::Trained => note(&format!("trained: {label}: to be evaluated")),
        }
        shared.settled.insert(i);
        Ok(())
    }

    fn train_and_evaluate(&self, run: &PlannedRun, claim: &Claim) -> Result<Outcome> {
        let folder = self.plan.path_of(run, "");
        let path = self.plan.path_of(run, ".log");
        let log =
            OpenOptions::new().create(true).append(true).open(&path).map_err(|e| Error::io(&path, e))?;
        let begun = RunFolder::is_run(&folder);
        if begun && RunFolder::open(&folder).is_ok_and(|folder| folder.lock().is_err()) {
            note(&format!("{}: trained by another process outside of the sweep", self.plan.label(run)));
            return Ok(Outcome::Interrupted);
        }
        if !state::is_trained(self.plan, run) {
            let mut command = self.command(&log, claim)?;
            command.arg("train");
            if begun {
                command.arg("--resume").arg(&folder);
            } else {
                command
                    .arg(&self.plan.tasks[run.task])
                    .args(self.plan.changes(run))
                    .arg("--out")
                    .arg(&folder);
                command.args(["--seed", &run.seed.to_string()]);
            }
            command.args(["--json", "--die-with-parent", "--device", &self.device]);
            command.args(["--threads", &self.threads.to_string()]);
            command.stdout(log.try_clone().map_err(|e| Error::io(&path, e))?);
            let word = if begun { "resumed" } else { "begun" };
            note(&format!("{word}: {}", self.plan.label(run)));
            if let Some(outcome) = self.finish(command, claim, &path)? {
                return Ok(outcome);
            }
            state::write_trained(self.plan, run, self.commit.as_deref(), &self.machine)?;
        }
        if self.train_only {
            return Ok(Outcome::Trained);
        }
        let rows = self.plan.path_of(run, ".rows");
        let mut command = self.command(&log, claim)?;
        command.arg("eval").arg(&folder).args(self.evaluation(run));
        command.stdout(File::create(&rows).map_err(|e| Error::io(&rows, e))?);
        let outcome = self.finish(command, claim, &path)?;
        let text = fs::read_to_string(&rows).map_err(|e| Error::io(&rows, e))?;
        let _ = fs::remove_file(&rows);
        match (outcome, scores(&text, self.plan.evaluate.set.as_ref().map(|(key, _)| key.as_str()))) {
            (Some(outcome), _) => Ok(outcome),
            (None, Some(scores)) => Ok(Outcome::Done(Box::new(self.result(run, scores)))),
            (None, None) => Ok(Outcome::Failed(format!("`elmur eval` gave no score: {text:?}"))),
        }
    }

    /// A command of this program that has the claim as long as it lives and speaks to the run's log.
    fn command(&self, log: &File, claim: &Claim) -> Result<Command> {
        let log = log.try_clone().map_err(|e| Error::io(&self.plan.out, e))?;
        let mut command = Command::new(&self.program);
        command.arg("--quiet").stdin(Stdio::from(claim.handed_down()?)).stderr(log);
        Ok(command)
    }

    /// The options of `elmur eval`.
    fn evaluation(&self, run: &PlannedRun) -> Vec<String> {
        let how = &self.plan.evaluate;
        let mut options = vec!["--json".to_owned(), "--die-with-parent".to_owned()];
        let mut add = |name: &str, value: String| options.extend([name.to_owned(), value]);
        add("--episodes", how.episodes.to_string());
        add("--first-run", run.seed.to_string());
        add("--device", how.device.clone());
        add("--threads", self.threads.to_string());
        if let Some((key, values)) = &how.set {
            let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            add("--set", format!("{key}={}", values.iter().map(word).collect::<Vec<_>>().join(",")));
        }
        if let Some(metric) = how.metric {
            add("--metric", serde_json::json!(metric).as_str().unwrap_or_default().to_owned());
        }
        if how.sample {
            options.push("--sample".to_owned());
        }
        options
    }

    /// Lets a process end, or stops it when everything is to end. None: it succeeded.
    fn finish(&self, mut command: Command, claim: &Claim, log: &Path) -> Result<Option<Outcome>> {
        let from = fs::metadata(log).map_or(0, |about| about.len());
        let mut child = command.spawn().map_err(|e| Error::io(&self.program, e))?;
        let mut told = false;
        let mut lost = None;
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) => {}
                Err(e) => return Err(Error::io(&self.program, e)),
            }
            if (self.ends() || lost.is_some()) && !told {
                told = true;
                stop(&mut child);
            }
            if lost.is_none() {
                lost = claim.beat().err();
            }
            self.tell();
            std::thread::sleep(LOOK);
        };
        if let Some(error) = lost {
            return Err(error);
        }
        Ok(match status.code() {
            Some(0) => None,
            _ if told => Some(Outcome::Interrupted),
            // Ctrl-C reaches the process as well, and may reach it first.
            Some(128..) => Some(Outcome::Interrupted),
            Some(_) => Some(Outcome::Failed(reason(log, from, status))),
            None => Some(Outcome::Killed(reason(log, from, status))),
        })
    }

    /// Says now and then how far everything is.
    fn tell(&self) {
        let mut shared = self.shared();
        if shared.told.get_or_insert_with(Instant::now).elapsed() < TELL {
            return;
        }
        shared.told = Some(Instant::now());
        let mut running: Vec<usize> = shared.running.iter().copied().collect();
        let (settled, count) = (shared.settled.len(), self.selected.len());
        drop(shared);
        running.sort_unstable();
        let running: Vec<String> = running
            .iter()
            .map(|i| {
                format!(
                    "{}: {}",
                    self.plan.label(&self.plan.runs[*i]),
                    state::progress_of(self.plan, &self.plan.runs[*i])
                )
            })
            .collect();
        note(&format!("{settled} of {count} runs settled; running: {}", running.join("; ")));
    }

    fn result(&self, run: &PlannedRun, scores: Vec<TestScore>) -> RunResult {
        let column = &self.plan.columns[run.column];
        let (batches, train_seconds) = state::batches_of(self.plan, run);
        let (commit, machine) = state::trained_by(self.plan, run);
        RunResult {
            id: run.id.clone(),
            task: self.plan.tasks[run.task].clone(),
            policy: column.policy.clone(),
            case: column.case.clone(),
            seed: run.seed,
            settings: run.settings.clone(),
            scores,
            batches,
            train_seconds: (1e3 * train_seconds).round() / 1e3,
            commit,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            machine,
            finished: state::utc(SystemTime::now()),
        }
    }
}

/// Asks a process to save and end.
#[cfg(unix)]
fn stop(child: &mut Child) {
    if let Ok(process) = i32::try_from(child.id()) {
        // SAFETY: a plain system call. The process is a child that has not been waited for, so its number cannot
        // have been given to another.
        unsafe { libc::kill(process, libc::SIGTERM) };
    }
}

/// Without signals: ends a process. Checkpoints before are kept.
#[cfg(not(unix))]
fn stop(child: &mut Child) {
    let _ = child.kill();
}
