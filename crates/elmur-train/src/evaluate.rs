//! Evaluation by the paper's protocol: runs of 100 episodes with distinct seeds, mean and standard error
//! across runs.
//!
//! Episodes are acted out in groups whose size depends on their number alone, each group on a thread of its
//! own, so that the result is the same on any machine with any number of threads. Where rows are processes,
//! there are few of them: all episodes are one group, and a row whose episode has ended plays the next one. What
//! a policy does there is, on a CPU, the same to the bit for any number of processes; on a GPU the last bits may differ.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use elmur_base::{Row, Statistics, Stop};
use elmur_engine::{Device, Pool, Store};
use elmur_envs::{Autoreset, Environment, Facts, Metric, Purpose};
use elmur_model::session::{Choose, Seen, Session, Weights};
use elmur_model::{Checkpoint, PolicyConfig};
use elmur_pool::granted_threads;
use elmur_rng::Stream;

use crate::config::{MAX_EPISODES, TARGET_RETURN};
use crate::error::{Error, Result};

/// The episodes to evaluate on. Training, validation and test draw from ranges that never meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seeds {
    /// For choosing checkpoints.
    Validation,
    /// For reporting, in the run of this number.
    Test(u32),
}

impl Seeds {
    /// The seed of episode `i`. Demonstrations use seeds below 2^62.
    pub fn episode(self, i: usize) -> u64 {
        match self {
            Seeds::Validation => (1 << 62) + i as u64,
            Seeds::Test(run) => (1 << 63) + (u64::from(run) << 24) + i as u64,
        }
    }
}

/// A policy, an environment, and how the one is evaluated in the other.
#[derive(Debug, Clone)]
pub struct Evaluation<'a> {
    /// The policy's architecture and sizes.
    pub policy: &'a PolicyConfig,
    /// The policy's parameters.
    pub params: &'a Store,
    /// The environment to act in.
    pub env: &'a Environment,
    /// Number of episodes.
    pub episodes: usize,
    /// Episodes for choosing, or for reporting.
    pub seeds: Seeds,
    /// The return that a policy with return tokens is asked for; none: that of a very good episode, where the
    /// environment knows it. Other policies do not read it.
    pub target_return: Option<f64>,
    /// Draw actions instead of taking the likeliest.
    pub sample: bool,
    /// Number of threads; none: as many as are granted.
    pub threads: Option<usize>,
    /// The device that computes the policy; its parameters must lie there. On a GPU all episodes act side by
    /// side.
    pub device: &'a Device,
    /// How the weights of linear layers are kept while the policy acts.
    pub weights: Weights,
}

impl<'a> Evaluation<'a> {
    /// A policy's likeliest actions in 100 test episodes of an environment, on the device where its
    /// parameters lie. Other choices are fields: `Evaluation { episodes: 20, ..Evaluation::of(&policy, &env)
    /// }`.
    pub fn of(policy: &'a Checkpoint, env: &'a Environment) -> Self {
        Self {
            policy: &policy.config,
            params: &policy.params,
            env,
            episodes: 100,
            seeds: Seeds::Test(0),
            target_return: None,
            sample: false,
            threads: None,
            device: policy.params.device(),
            weights: Weights::F32,
        }
    }

    /// The return that the policy is asked for; none if it does not aim at one.
    pub fn asked_return(&self) -> Result<Option<f64>> {
        target_return(self.policy, self.env, self.target_return)
    }
}

/// What became of one episode.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EpisodeResult {
    /// Sum of rewards.
    pub episode_return: f64,
    /// Steps.
    pub steps: u64,
    /// Whether it was solved, where the environment says so.
    pub success: Option<bool>,
}

/// All episodes of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// One per episode, in the order of their seeds.
    pub episodes: Vec<EpisodeResult>,
}

impl Outcome {
    /// Mean of a metric over episodes. Where the environment does not say whether episodes succeeded, it is
    /// the return whatever was asked for: see [`Outcome::metric`].
    pub fn score(&self, metric: Metric) -> Statistics {
        match self.metric(metric) {
            Metric::Return => self.returns(),
            Metric::Success => self.success_rate().unwrap_or_else(|| self.returns()),
        }
    }

    /// The metric that [`Outcome::score`] is of when asked for this one.
    pub fn metric(&self, asked: Metric) -> Metric {
        if self.success_rate().is_some() { asked } else { Metric::Return }
    }

    /// Share of episodes that solved the task; none where the environment says it of no episode. Episodes of
    /// which it does not say so did not.
    pub fn success_rate(&self) -> Option<Statistics> {
        let known = self.episodes.iter().any(|episode| episode.success.is_some());
        let rate = |episode: &EpisodeResult| f64::from(u8::from(episode.success == Some(true)));
        known.then(|| Statistics::of(self.episodes.iter().map(rate)))
    }

    /// Mean return over episodes.
    pub fn returns(&self) -> Statistics {
        Statistics::of(self.episodes.iter().map(|e| e.episode_return))
    }
}

/// Acts out all episodes. `progress` is called with the completed share, 0 to 1, from any thread.
pub fn evaluate(
    evaluation: &Evaluation<'_>,
    stop: &Stop,
    progress: &(dyn Fn(f64) + Sync),
) -> Result<Outcome> {
    if evaluation.episodes == 0 {
        return Err(Error::config("episodes", "at least 1", 0));
    }
    if evaluation.episodes > MAX_EPISODES {
        return Err(Error::config("episodes", format!("at most {MAX_EPISODES}"), evaluation.episodes));
    }
    evaluation.policy.architecture().ends().check(evaluation.env.spaces(), "environment")?;
    let target = evaluation.asked_return()?.unwrap_or(0.0);
    let seeds: Vec<u64> = (0..evaluation.episodes).map(|i| evaluation.seeds.episode(i)).collect();
    let facts = evaluation.env.facts();
    let group = match facts.max_rows {
        Some(_) => evaluation.episodes,
        None => group_size(evaluation.episodes, evaluation.device),
    };
    let groups: Vec<&[u64]> = seeds.chunks(group).collect();
    let results: Mutex<Vec<Option<Result<Vec<EpisodeResult>>>>> =
        Mutex::new(groups.iter().map(|_| None).collect());
    let next = AtomicUsize::new(0);
    // Finished episodes count whole, running ones by their steps.
    let done = Mutex::new(0.0);
    let tick = |share: f64| {
        let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
        *done += share;
        progress((*done / groups.len() as f64).min(1.0));
    };
    let threads = workers(evaluation.threads, groups.len());
    // Every group has a thread of its own; a single one has them all.
    let per_group = if facts.max_rows.is_some() { workers(evaluation.threads, usize::MAX) } else { 1 };
    std::thread::scope(|scope| {
        let work = || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(seeds) = groups.get(i) else { break };
                let result = act_out(evaluation, target, seeds, per_group, stop, &facts, &tick);
                let failed = result.is_err();
                results.lock().unwrap_or_else(PoisonError::into_inner)[i] = Some(result);
                if failed {
                    break;
                }
            }
        };
        // A system that refuses more threads has granted those before; this one works too.
        for _ in 1..threads {
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let mut episodes = Vec::with_capacity(evaluation.episodes);
    for result in results.into_inner().unwrap_or_else(PoisonError::into_inner) {
        episodes.extend(result.unwrap_or(Err(Error::Stopped))?);
    }
    progress(1.0);
    Ok(Outcome { episodes })
}

/// Most rows that are worth making for an evaluation on so many threads: as many as the environment says, but no more
/// than there are threads where their number is given and that of workers is not.
fn most_rows(env: &Environment, threads: Option<usize>) -> usize {
    let given = env.spec().settings.get("workers").is_some_and(|workers| !workers.is_null());
    match (env.facts().max_rows, threads) {
        (Some(most), Some(threads)) if !given => most.min(threads),
        (most, _) => most.unwrap_or(usize::MAX),
    }
}

/// Episodes that act side by side, of so many, where the environment sets no limit.
pub(crate) fn group_size(episodes: usize, device: &Device) -> usize {
    let most = if device.is_cpu() { (episodes / 4).clamp(10, 50) } else { 4096 };
    most.min(episodes)
}

/// Threads that act out groups of episodes; of none given, as many as are granted.
pub(crate) fn workers(threads: Option<usize>, groups: usize) -> usize {
    threads.unwrap_or_else(granted_threads).clamp(1, groups)
}

/// The return that a policy is asked for in an environment: the given one, else that of a very good episode;
/// none for policies that do not aim at one.
pub(crate) fn target_return(
    policy: &PolicyConfig,
    env: &Environment,
    given: Option<f64>,
) -> Result<Option<f64>> {
    if !policy.architecture().aims_at_return() {
        return Ok(None);
    }
    match given.or(env.facts().good_return) {
        Some(target) if (target as f32).is_finite() => Ok(Some(target)),
        Some(target) => Err(Error::config("target_return", TARGET_RETURN, target)),
        None => {
            let expected = format!("{TARGET_RETURN}: {} does not tell one", env.name());
            Err(Error::config("target_return", expected, "none"))
        }
    }
}

/// The seed of an episode's initial memory. It differs from the episode's own seed, whose random numbers also
/// choose the goal: the memory would reveal it.
pub fn memory_seed(episode: u64) -> u64 {
    let draw = Stream::new(episode, u64::MAX, u32::MAX).block(0);
    u64::from(draw[0]) << 32 | u64::from(draw[1])
}

/// Time between two calls of `progress`.
const TICK: Duration = Duration::from_millis(100);

/// A session, and the rows that act in it.
struct Actor {
    session: Session,
    /// The first of the rows.
    first: usize,
    /// What they do, and whether all went well.
    actions: Row,
    acted: elmur_model::Result<()>,
}

/// One episode per seed, side by side in as many rows as there may be.
fn act_out(
    evaluation: &Evaluation<'_>,
    target: f64,
    seeds: &[u64],
    threads: usize,
    stop: &Stop,
    facts: &Facts,
    tick: &dyn Fn(f64),
) -> Result<Vec<EpisodeResult>> {
    let rows = seeds.len().min(most_rows(evaluation.env, evaluation.threads)).max(1);
    let interrupted = |error: elmur_envs::Error| if stop.requested() { Error::Stopped } else { error.into() };
    let mut env = evaluation.env.make_rows(Purpose::Evaluate, rows, Pool::serial()).map_err(interrupted)?;
    env.set_autoreset(Autoreset::Disabled);
    let widths = env.spaces().action.widths();
    // Products of many rows are summed in another order than those of few, and what a policy does must not depend on
    // the number of processes: on a CPU each row has a session of its own, and they act at the same time.
    let (pool, device, each) = match (evaluation.device.is_cpu(), facts.max_rows) {
        (true, Some(_)) => (Pool::new(threads.min(rows)), Device::from(Pool::serial()), 1),
        (true, None) => (Pool::serial().clone(), Device::from(&Pool::new(threads)), rows),
        (false, _) => (Pool::serial().clone(), evaluation.device.clone(), rows),
    };
    let actor = |first: usize| -> Result<Mutex<Actor>> {
        let session =
            Session::with_weights(evaluation.policy, evaluation.params, each, &device, evaluation.weights)?;
        Ok(Mutex::new(Actor { session, first, actions: Row::zeros(widths, each), acted: Ok(()) }))
    };
    let mut actors = (0..rows).step_by(each).map(actor).collect::<Result<Vec<_>>>()?;
    let how = if evaluation.sample { Choose::Sample } else { Choose::Greedy };
    let all: Vec<usize> = (0..rows).collect();
    let mut results = vec![EpisodeResult::default(); seeds.len()];
    // The number of each row's episode; none when there are no more. Rows in `starting` begin theirs.
    let mut playing: Vec<Option<usize>> = (0..rows).map(Some).collect();
    let (mut next, mut starting) = (rows, all.clone());
    let mut returns = vec![target as f32; rows];
    let seen_widths = env.spaces().observation.widths();
    let (mut running, mut taken) = (Vec::with_capacity(rows), Row::zeros(widths, rows));
    let (mut told, mut last) = (0.0, Instant::now());
    loop {
        if !starting.is_empty() {
            let seed = |row: &usize| playing[*row].map(|episode| (*row, seeds[episode]));
            let begun: Vec<(usize, u64)> = starting.iter().filter_map(seed).collect();
            env.reset_rows(&begun).map_err(interrupted)?;
            for (i, actor) in actors.iter_mut().enumerate() {
                let own = begun.iter().filter(|(row, _)| row / each == i);
                let rows: Vec<_> = own.map(|(row, seed)| (row % each, memory_seed(*seed))).collect();
                actor.get_mut().unwrap_or_else(PoisonError::into_inner).session.reset(&rows)?;
            }
            begun.iter().for_each(|(row, _)| returns[*row] = target as f32);
            starting.clear();
        }
        running.clear();
        running.extend(all.iter().filter(|row| playing[**row].is_some()));
        if running.is_empty() {
            break;
        }
        // Rows without an episode act where others of their session do: to leave them out costs more than to act.
        let observations = env.observations();
        pool.run(actors.len(), |i, _| {
            let mut actor = actors[i].lock().unwrap_or_else(PoisonError::into_inner);
            let Actor { session, first, actions, acted } = &mut *actor;
            if playing[*first..*first + each].iter().all(Option::is_none) {
                return;
            }
            let observation = observations.rows(seen_widths, *first, each);
            let seen = Seen { observation, returns: Some(&returns[*first..*first + each]) };
            *acted = session.select_action(&all[..each], seen, how, actions.as_mut());
        });
        taken.clear();
        for actor in &mut actors {
            let actor = actor.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut actor.acted, Ok(()))?;
            let own = running.iter().filter(|row| **row / each == actor.first / each);
            own.for_each(|row| taken.extend(actor.actions.values().rows(widths, row - actor.first, 1)));
        }
        let step = env.step_rows(&running, taken.values()).map_err(interrupted)?;
        if let Some(row) = step.rewards.iter().position(|reward| !reward.is_finite()) {
            return Err(Error::config("reward", "finite numbers from the environment", step.rewards[row]));
        }
        for row in &running {
            let row = *row;
            let Some(episode) = playing[row] else { continue };
            let result = &mut results[episode];
            if step.lost[row] {
                *result = EpisodeResult::default();
                starting.push(row);
                continue;
            }
            result.episode_return += step.rewards[row];
            result.steps += 1;
            returns[row] -= step.rewards[row] as f32;
            result.success = step.success[row];
            if step.terminated[row] || step.truncated[row] {
                playing[row] = (next < seeds.len()).then_some(next);
                if playing[row].is_some() {
                    starting.push(row);
                    next += 1;
                }
            }
        }
        if stop.requested() {
            return Err(Error::Stopped);
        }
        if last.elapsed() >= TICK {
            let share = share(&playing, &results, next, facts.max_steps).max(told);
            tick(share - told);
            (told, last) = (share, Instant::now());
        }
    }
    tick(1.0 - told);
    Ok(results)
}

/// The share of the episodes' steps that were played, where it is known how long they may be.
fn share(playing: &[Option<usize>], results: &[EpisodeResult], next: usize, most: Option<u64>) -> f64 {
    let running = playing.iter().flatten();
    let count = running.clone().count();
    let ended = (next.min(results.len()) - count) as f64;
    let steps =
        |episode: &usize| most.map_or(0.0, |most| (results[*episode].steps as f64 / most as f64).min(1.0));
    ((ended + running.map(steps).sum::<f64>()) / results.len() as f64).min(1.0)
}

#[cfg(test)]
mod tests {
    use elmur_envs::{Env, EnvSpec, Registry};

    use super::*;

    #[cfg(unix)]
    #[test]
    fn a_simulator_is_started_for_every_thread_unless_their_number_is_given() {
        let find = |spec: EnvSpec| Registry::builtin().find(&spec).unwrap();
        let spec = EnvSpec::new("mikasa-RememberColor3");
        let robot = find(spec.clone());
        assert_eq!(most_rows(&robot, Some(1)), 1);
        assert_eq!(most_rows(&robot, None), robot.facts().max_rows.unwrap());
        assert_eq!(most_rows(&find(spec.with("workers", 3)), Some(1)), 3);
        assert_eq!(most_rows(&find(EnvSpec::new("tmaze")), Some(1)), usize::MAX);
    }

    /// Were they drawn from one stream, the first number of the memory would tell the goal.
    #[test]
    fn the_initial_memory_tells_nothing_about_the_goal() {
        let mut maze = elmur_envs::TMaze::new(elmur_envs::Corridor::Fixed(5)).unwrap();
        let mut agree = 0;
        for i in 0..2000 {
            let seed = Seeds::Test(0).episode(i);
            maze.reset(seed, elmur_base::ValuesMut::floats(&mut [0.0; 4])).unwrap();
            let mut noise = [0.0; 2];
            Stream::new(memory_seed(seed), 0, 0).fill_normal(&mut noise, 1.0);
            let small = noise[0] * noise[0] + noise[1] * noise[1] < 2.0 * 2f64.ln();
            agree += usize::from(small == (maze.goal() > 0));
        }
        assert!((900..1100).contains(&agree), "{agree} of 2000");
    }

    #[test]
    fn seeds_of_training_validation_and_test_never_meet() {
        let last_of_training = ((1u64 << 30) << 32) - 1;
        assert!(last_of_training < Seeds::Validation.episode(0));
        assert!(Seeds::Validation.episode(1 << 40) < Seeds::Test(0).episode(0));
        assert!(Seeds::Test(3).episode((1 << 24) - 1) < Seeds::Test(4).episode(0));
    }
}
