//! Workers of one environment: started when they are needed, kept for the next episode, replaced when they
//! die.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use elmur_base::Stop;
use serde_json::{Map, Value};

use super::client::Client;
use super::frame::Failure;
use super::interface::Interface;
use super::process::{Launch, Process};
use crate::error::{Error, Result};

/// Kind of the refusal of a worker whose environment raised an error.
const INTERNAL: &str = "internal";

/// An environment that a worker can make, and how to deal with its workers.
#[derive(Debug, Clone)]
pub struct Task {
    /// Name of the environment, for errors.
    pub name: String,
    /// The program of a worker.
    pub launch: Launch,
    /// What a worker calls itself in its hello.
    pub hello: &'static str,
    /// Fields of the request `make`.
    pub make: Map<String, Value>,
    /// Reads the answer to `make`.
    pub interface: fn(&Map<String, Value>) -> Result<Interface, String>,
    /// The seed that a worker is given for an episode's seed: [`small_seed`](super::small_seed), unless the
    /// environment has a split of its own.
    pub seed: fn(u64) -> u64,
    /// Whether one step that reports success is enough; else the last step of an episode decides.
    pub success_once: bool,
    /// Time for an answer.
    pub timeout: Duration,
    /// Time for each of these: hello, `make`, and a worker's first episode to begin.
    pub start_timeout: Duration,
    /// Most times that one episode is begun anew because its worker died.
    pub restarts: u32,
    /// What to do where the program cannot be started, for the error; empty: nothing is known.
    pub remedy: &'static str,
}

/// Workers of a [`Task`], and what happened to them.
#[derive(Debug)]
pub struct Workers {
    task: Task,
    stop: Stop,
    interface: Mutex<Option<Arc<Interface>>>,
    /// Workers between two episodes.
    idle: Mutex<Vec<Worker>>,
    /// How often episodes were lost that are not finished yet, by their seeds.
    lost: Mutex<HashMap<u64, u32>>,
    restarts: AtomicU64,
    last_cause: Mutex<String>,
}

/// Most workers that are kept between two uses.
const MOST_IDLE: usize = 64;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workers {
    /// Workers for a task; none is started yet. Waiting for a worker ends when `stop` is requested.
    pub fn new(task: Task, stop: Stop) -> Self {
        Self {
            task,
            stop,
            interface: Mutex::default(),
            idle: Mutex::default(),
            lost: Mutex::default(),
            restarts: AtomicU64::new(0),
            last_cause: Mutex::default(),
        }
    }

    /// Workers for a task whose environment is known before a worker is asked: none is started until an episode
    /// begins. A worker that makes another environment is refused.
    pub fn knowing(task: Task, interface: Interface, stop: Stop) -> Result<Self> {
        let workers = Self::new(task, stop);
        interface.check().map_err(|problem| workers.problem(&problem))?;
        *lock(&workers.interface) = Some(Arc::new(interface));
        Ok(workers)
    }

    /// The environment that the workers make.
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// What the environment looks like; the first call starts a worker.
    pub fn interface(&self) -> Result<Arc<Interface>> {
        if let Some(known) = self.known_interface() {
            return Ok(known);
        }
        let mut worker = self.take()?;
        let ready = worker.ready(self);
        match ready {
            Ok(()) => self.give_back(worker),
            Err(failure) => return Err(self.error(failure, Some(&mut worker))),
        }
        self.known_interface().ok_or_else(|| self.problem("its worker said nothing about its spaces"))
    }

    /// What the environment looks like, if a worker was asked before.
    pub fn known_interface(&self) -> Option<Arc<Interface>> {
        lock(&self.interface).clone()
    }

    /// Keeps what a worker told about the environment. Another worker that tells something else is refused.
    fn learn(&self, interface: Interface) -> Result<(), Failure> {
        let mut known = lock(&self.interface);
        match &*known {
            Some(known) if **known != interface => Err(Failure::Protocol(
                "a worker made an environment with other arrays than expected".to_owned(),
            )),
            Some(_) => Ok(()),
            None => {
                *known = Some(Arc::new(interface));
                Ok(())
            }
        }
    }

    /// Number of workers that died or were killed because they did not answer, and the newest cause.
    pub fn restarts(&self) -> (u64, String) {
        (self.restarts.load(Ordering::Relaxed), lock(&self.last_cause).clone())
    }

    /// A worker that no one uses. A new one has been asked to make the environment, but not waited for.
    pub(super) fn take(&self) -> Result<Worker> {
        while let Some(mut worker) = { lock(&self.idle).pop() } {
            if worker.process.is_alive() {
                return Ok(worker);
            }
        }
        Worker::start(&self.task, &self.stop)
    }

    /// Keeps a worker that has answered everything for the next use.
    pub(super) fn give_back(&self, worker: Worker) {
        let mut idle = lock(&self.idle);
        if worker.client.waiting() == 0 && idle.len() < MOST_IDLE {
            idle.push(worker);
        }
    }

    /// The episode of this seed is over: it was not its fault if workers died.
    pub(super) fn finished(&self, seed: u64) {
        let mut lost = lock(&self.lost);
        if !lost.is_empty() {
            lost.remove(&seed);
        }
    }

    /// What to tell of a worker that failed in the episode of this seed: that the episode is lost, if it may
    /// be begun anew, else an error.
    pub(super) fn lose(&self, seed: u64, failure: Failure, worker: &mut Worker) -> Error {
        if !matches!(failure, Failure::Ended | Failure::Silent(_)) {
            return self.error(failure, Some(worker));
        }
        let cause = self.cause(failure, Some(worker));
        self.restarts.fetch_add(1, Ordering::Relaxed);
        lock(&self.last_cause).clone_from(&cause);
        let mut lost = lock(&self.lost);
        let times = lost.entry(seed).or_default();
        *times += 1;
        if *times > self.task.restarts {
            return self.problem(&format!(
                "the episode of the worker's seed {} was lost {times} times (setting `restarts`): {cause}",
                (self.task.seed)(seed)
            ));
        }
        Error::Lost { cause: format!("{}: {cause}", self.task.name) }
    }

    /// The error of a failure that another try would not mend.
    pub(super) fn error(&self, failure: Failure, worker: Option<&mut Worker>) -> Error {
        self.problem(&self.cause(failure, worker))
    }

    /// The error of a refusal in the episode of this seed. A fault within the worker may need its last lines to be
    /// understood.
    pub(super) fn refused(&self, seed: u64, failure: Failure, worker: &mut Worker) -> Error {
        let is_internal = matches!(&failure, Failure::Refused { kind, .. } if kind == INTERNAL);
        let mut cause = self.cause(failure, None);
        if is_internal {
            cause.push_str(&format!(" in the episode of the worker's seed {}", (self.task.seed)(seed)));
            let last = worker.process.last_lines();
            if !last.is_empty() {
                cause.push_str(&format!("; its last lines: {last}"));
            }
        }
        self.problem(&cause)
    }

    pub(super) fn problem(&self, cause: &str) -> Error {
        Error::Worker { name: self.task.name.clone(), cause: cause.to_owned() }
    }

    fn cause(&self, failure: Failure, worker: Option<&mut Worker>) -> String {
        match (failure, worker) {
            (Failure::Ended, Some(worker)) => {
                format!("the worker ended: {}", worker.process.obituary())
            }
            (Failure::Ended, None) => "the worker ended".to_owned(),
            (Failure::Silent(time), worker) => {
                let last = worker.map(|worker| worker.process.last_lines()).unwrap_or_default();
                let last = if last.is_empty() { last } else { format!("; its last lines: {last}") };
                format!(
                    "the worker did not answer for {} s (settings `timeout` and `start_timeout`){last}",
                    time.as_secs_f64()
                )
            }
            (Failure::Stopped, _) => "stopped while waiting for its worker".to_owned(),
            (Failure::Protocol(problem), _) => {
                format!("the worker does not keep to the protocol: {problem}")
            }
            (Failure::Refused { kind, message }, _) => format!("{message} ({kind})"),
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        // All are asked before the first is waited for.
        let idle = self.idle.get_mut().unwrap_or_else(PoisonError::into_inner);
        idle.iter_mut().for_each(|worker| worker.client.quit());
        for worker in idle {
            worker.process.end();
        }
    }
}

/// A worker with its environment.
#[derive(Debug)]
pub(super) struct Worker {
    process: Process,
    pub(super) client: Client,
    /// Whether hello and the answer to `make` have come.
    ready: bool,
    /// Whether the worker has not begun an episode yet.
    pub(super) fresh: bool,
}

impl Worker {
    fn start(task: &Task, stop: &Stop) -> Result<Self> {
        let fail = |cause: std::io::Error| Error::Worker {
            name: task.name.clone(),
            cause: match task.remedy {
                "" => format!("{:?} could not be started: {cause}", task.launch.program),
                remedy => format!("{:?} could not be started: {cause}; {remedy}", task.launch.program),
            },
        };
        let (process, stream) = Process::start(&task.launch).map_err(fail)?;
        let client = Client::new(stream, stop.clone()).map_err(fail)?;
        let mut worker = Self { process, client, ready: false, fresh: true };
        let fields = Value::Object(task.make.clone()).to_string();
        let fields = fields.get(1..fields.len() - 1).unwrap_or_default();
        // A worker that ended at once says why where its hello is waited for.
        if let Err(failure @ Failure::Protocol(_)) =
            worker.client.send("make", fields, |_| {}, task.start_timeout)
        {
            let Failure::Protocol(cause) = failure else { return Ok(worker) };
            return Err(Error::Worker { name: task.name.clone(), cause });
        }
        Ok(worker)
    }

    /// Waits until the worker has made its environment.
    pub(super) fn ready(&mut self, workers: &Workers) -> Result<(), Failure> {
        if self.ready {
            return Ok(());
        }
        let task = &workers.task;
        self.client.hello(task.hello, task.start_timeout)?;
        let answer = self.client.receive_fields(task.start_timeout)?;
        let interface = (task.interface)(&answer).and_then(|interface| {
            interface.check()?;
            Ok(interface)
        });
        workers.learn(interface.map_err(Failure::Protocol)?)?;
        self.ready = true;
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if !self.process.is_alive() {
            return;
        }
        if self.client.waiting() == 0 {
            self.client.quit();
            self.process.end();
        } else {
            self.process.kill();
        }
    }
}
