//! An environment in a worker, and the expert beside it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use elmur_base::{Leaf, Row, Spaces, Values, ValuesMut, bound_at};

use super::client::{action_arrays, append_action, out_of_range};
use super::frame::Failure;
use super::interface::Interface;
use super::workers::{Worker, Workers};
use crate::env::{Env, Next, Player, Step};
use crate::error::{Error, Result};

/// An environment that runs in a worker process.
///
/// A worker that dies or does not answer in time costs the episode: [`Env::step`] answers with
/// [`Error::Lost`], and the next [`Env::reset`] has a new worker.
#[derive(Debug)]
pub struct WorkerEnv {
    interface: Arc<Interface>,
    play: Arc<Mutex<Play>>,
}

/// What an expert in the worker of a [`WorkerEnv`] would do.
#[derive(Debug)]
pub struct WorkerPlayer(Arc<Mutex<Play>>);

/// An episode in a worker.
#[derive(Debug)]
struct Play {
    workers: Arc<Workers>,
    interface: Arc<Interface>,
    /// The member `arrays` of requests that carry an action.
    arrays: String,
    /// The action that is sent.
    action: Row,
    worker: Option<Worker>,
    seed: u64,
    running: bool,
    /// Whether a step of the episode has reported success, and whether the newest has.
    solved: (bool, Option<bool>),
    uses_action: bool,
    /// The request that was sent and whose answer was not read.
    begun: Option<Begun>,
    /// What went wrong where it could not be told.
    failed: Option<Error>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Begun {
    Reset(u64),
    Step,
}

fn lock(play: &Mutex<Play>) -> MutexGuard<'_, Play> {
    play.lock().unwrap_or_else(PoisonError::into_inner)
}

impl WorkerEnv {
    /// An environment in one of the workers, without a running episode.
    pub fn new(workers: &Arc<Workers>) -> Result<Self> {
        let interface = workers.interface()?;
        let play = Play {
            workers: Arc::clone(workers),
            arrays: action_arrays(&interface),
            action: Row::of(&interface.spaces.action),
            interface: Arc::clone(&interface),
            worker: None,
            seed: 0,
            running: false,
            solved: (false, None),
            uses_action: true,
            begun: None,
            failed: None,
        };
        Ok(Self { interface, play: Arc::new(Mutex::new(play)) })
    }

    /// The expert of the episode that this environment plays; none if the worker has none.
    pub fn player(&self) -> Option<WorkerPlayer> {
        self.interface.has_expert.then(|| WorkerPlayer(Arc::clone(&self.play)))
    }
}

impl Env for WorkerEnv {
    fn spaces(&self) -> &Spaces {
        &self.interface.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
        lock(&self.play).reset(seed, observation)
    }

    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        lock(&self.play).step(action, observation)
    }

    fn uses_action(&self) -> bool {
        lock(&self.play).uses_action
    }

    fn send(&mut self, next: Next<'_>) -> bool {
        let mut play = lock(&self.play);
        let begun = match next {
            Next::Reset(seed) => play.begin_reset(seed),
            Next::Step(action) => play.begin_step(action),
        };
        if let Err(error) = begun {
            play.failed = Some(error);
        }
        true
    }
}

impl Player for WorkerPlayer {
    fn reset(&mut self) {}

    fn act(&mut self, _: Values<'_>, mut action: ValuesMut<'_>) {
        let mut play = lock(&self.0);
        if let Err(error) = play.ask_expert(action.reborrow()) {
            action.floats.fill(0.0);
            action.ints.fill(0);
            action.bytes.fill(0);
            play.failed = Some(error);
        }
    }

    /// The expert sees the next observation, whoever acted.
    fn took(&mut self, _: Values<'_>) {}
}

/// A seed from 0 to 2^31 - 1, which every random generator takes. Seeds of demonstrations (below 2^62), of
/// validation (below 2^63) and of test episodes have a range each, and in one run no two episodes share a
/// seed.
pub fn small_seed(seed: u64) -> u64 {
    const TRAINING: u64 = 1 << 30;
    const OTHERS: u64 = 1 << 29;
    match seed >> 62 {
        // Collection c has episode i at c * 2^32 + i.
        0 => (seed as u32 as u64).wrapping_add((seed >> 32).wrapping_mul(0x9E37_79B1)) % TRAINING,
        1 => TRAINING + seed % OTHERS,
        _ => TRAINING + OTHERS + seed % OTHERS,
    }
}

impl Play {
    fn patience(&self) -> Duration {
        let task = self.workers.task();
        let fresh = self.worker.as_ref().is_some_and(|worker| worker.fresh);
        if fresh { task.start_timeout } else { task.timeout }
    }

    /// Takes leave of a worker that failed.
    fn fail(&mut self, failure: Failure) -> Error {
        (self.running, self.begun) = (false, None);
        // After a refusal the worker can be asked again.
        let usable = matches!(failure, Failure::Refused { .. });
        match self.worker.take() {
            Some(mut worker) if usable => {
                let error = self.workers.refused(self.seed, failure, &mut worker);
                self.workers.give_back(worker);
                error
            }
            Some(mut worker) => self.workers.lose(self.seed, failure, &mut worker),
            None => self.workers.error(failure, None),
        }
    }

    fn begin_reset(&mut self, seed: u64) -> Result<()> {
        if self.worker.as_ref().is_some_and(|worker| worker.client.waiting() > 0) {
            // The answer to an earlier request is still to come; another worker is sooner ready.
            self.worker = None;
        }
        (self.running, self.begun, self.failed, self.seed) = (false, None, None, seed);
        if self.worker.is_none() {
            self.worker = Some(self.workers.take()?);
        }
        self.begun = Some(Begun::Reset(seed));
        let (fields, patience) = (format!("\"seed\":{}", (self.workers.task().seed)(seed)), self.patience());
        let Some(worker) = &mut self.worker else { return Ok(()) };
        match worker.client.send("reset", &fields, |_| {}, patience) {
            // A worker that has ended tells why where its answer is waited for.
            Ok(()) | Err(Failure::Ended) => Ok(()),
            Err(failure) => Err(self.fail(failure)),
        }
    }

    /// Begins the episode of a seed, with another worker if one dies of it: nothing is lost yet.
    fn reset(&mut self, seed: u64, mut observation: ValuesMut<'_>) -> Result<()> {
        if self.begun == Some(Begun::Reset(seed)) && self.failed.is_none() {
            match self.finish_reset(observation.reborrow()) {
                Err(Error::Lost { .. }) => {}
                finished => return finished,
            }
        }
        loop {
            let begun = self.begin_reset(seed).and_then(|()| self.finish_reset(observation.reborrow()));
            match begun {
                Err(Error::Lost { .. }) => {}
                finished => return finished,
            }
        }
    }

    fn finish_reset(&mut self, mut observation: ValuesMut<'_>) -> Result<()> {
        let patience = self.patience();
        let (workers, interface) = (Arc::clone(&self.workers), Arc::clone(&self.interface));
        let Some(worker) = &mut self.worker else { return Err(Error::Finished) };
        let answer = worker
            .ready(&workers)
            .and_then(|()| worker.client.receive(patience, &interface.observation, &mut observation));
        self.begun = None;
        let answer = answer.map_err(|failure| self.fail(failure))?;
        self.check_observation(observation.values())?;
        if let Some(worker) = &mut self.worker {
            worker.fresh = false;
        }
        (self.running, self.solved) = (true, (false, None));
        self.uses_action = answer.uses_action.unwrap_or(true);
        Ok(())
    }

    fn begin_step(&mut self, action: Values<'_>) -> Result<()> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if !self.running || self.begun.is_some() {
            return Err(Error::Finished);
        }
        self.clip(action)?;
        let (patience, interface) = (self.patience(), &self.interface);
        let action = self.action.values();
        let Some(worker) = &mut self.worker else { return Err(Error::Finished) };
        let body = |body: &mut Vec<u8>| append_action(interface, action, body);
        let sent = worker.client.send("step", &self.arrays, body, patience);
        self.begun = Some(Begun::Step);
        sent.map_err(|failure| self.fail(failure))
    }

    /// Keeps the action that is sent: numbers beyond their bounds are moved to the bounds, as simulators do.
    fn clip(&mut self, action: Values<'_>) -> Result<()> {
        let space = &self.interface.spaces.action;
        self.action.clear();
        self.action.extend(action);
        let mut numbers = self.action.floats.iter_mut();
        for leaf in space.leaves() {
            let Leaf::Floats { low, high, .. } = leaf else { continue };
            for (i, x) in (0..leaf.len()).zip(&mut numbers) {
                // What is not finite stays so, and is refused below.
                if x.is_finite() {
                    *x = x.max(bound_at(low, i)).min(bound_at(high, i));
                }
            }
        }
        Ok(space.check("action", self.action.values())?)
    }

    fn step(&mut self, action: Values<'_>, mut observation: ValuesMut<'_>) -> Result<Step> {
        if self.begun != Some(Begun::Step) || self.failed.is_some() {
            self.begin_step(action)?;
        }
        let patience = self.patience();
        let interface = Arc::clone(&self.interface);
        let Some(worker) = &mut self.worker else { return Err(Error::Finished) };
        let answer = worker.client.receive(patience, &interface.observation, &mut observation);
        self.begun = None;
        let answer = answer.map_err(|failure| self.fail(failure))?;
        self.check_observation(observation.values())?;
        let Some(reward) = answer.reward.filter(|reward| reward.is_finite()) else {
            let problem = "a step was answered without a finite reward".to_owned();
            return Err(self.fail(Failure::Protocol(problem)));
        };
        let (ended, cut) = (answer.terminated.unwrap_or(false), answer.truncated.unwrap_or(false));
        let done = answer.done.unwrap_or(ended || cut);
        self.solved = (self.solved.0 || answer.success == Some(true), answer.success);
        self.uses_action = answer.uses_action.unwrap_or(true);
        if done {
            self.running = false;
            self.workers.finished(self.seed);
        }
        let once = self.workers.task().success_once;
        let success = answer.success.map(|now| if once { self.solved.0 } else { now });
        Ok(Step {
            reward,
            terminated: done && ended,
            truncated: done && (cut || !ended),
            success: success.filter(|_| done),
        })
    }

    fn check_observation(&mut self, observation: Values<'_>) -> Result<()> {
        let found = out_of_range(&self.interface.spaces.observation, observation.ints);
        let Some((value, size)) = found else { return Ok(()) };
        let problem = format!("an observation holds {value}, expected an integer from 0 to {}", size - 1);
        Err(self.fail(Failure::Protocol(problem)))
    }

    fn ask_expert(&mut self, mut action: ValuesMut<'_>) -> Result<()> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let patience = self.patience();
        let interface = Arc::clone(&self.interface);
        let running = self.running && self.begun.is_none();
        let Some(worker) = self.worker.as_mut().filter(|_| running) else { return Err(Error::Finished) };
        let asked = worker.client.send("oracle", "", |_| {}, patience);
        let answer = asked.and_then(|()| worker.client.receive(patience, &interface.action, &mut action));
        answer.map_err(|failure| self.fail(failure))?;
        self.clip(action.values())?;
        action.copy_from(self.action.values());
        Ok(())
    }
}

impl Drop for Play {
    fn drop(&mut self) {
        if let Some(worker) = self.worker.take() {
            self.workers.give_back(worker);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_small_and_those_of_training_validation_and_test_never_meet() {
        let below = |seeds: &[u64], range: std::ops::Range<u64>| {
            let small: std::collections::BTreeSet<u64> = seeds.iter().map(|seed| small_seed(*seed)).collect();
            assert_eq!(small.len(), seeds.len(), "no two are the same");
            assert!(small.iter().all(|seed| range.contains(seed)));
        };
        let collection = |seed: u64| (0..5000).map(move |i| (seed << 32) + i);
        below(&collection(0).chain(collection(1)).chain(collection(77)).collect::<Vec<_>>(), 0..1 << 30);
        assert_eq!(small_seed(41), 41, "the first collection has seeds 0, 1, 2, ...");
        let first = 1 << 30;
        below(&(0..5000).map(|i| (1 << 62) + i).collect::<Vec<_>>(), first..first + (1 << 29));
        let tests = |run: u64| (0..5000).map(move |i| (1 << 63) + (run << 24) + i);
        below(&tests(0).chain(tests(1)).chain(tests(31)).collect::<Vec<_>>(), first + (1 << 29)..1 << 31);
    }
}
