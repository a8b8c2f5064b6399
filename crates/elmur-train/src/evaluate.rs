//! Evaluation by the paper's protocol: runs of 100 episodes with distinct seeds, mean and standard error
//! across runs.
//!
//! Episodes are acted out in groups whose size depends on their number alone, each group on a thread of its
//! own, so that the result is the same on any machine with any number of threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use elmur_base::{Row, Statistics, Stop};
use elmur_engine::{Device, Pool, Store};
use elmur_envs::{EnvConfig, VecEnv};
use elmur_model::PolicyConfig;
use elmur_model::session::{Choose, Seen, Session};
use elmur_rng::Stream;

use crate::error::{Error, Result};

/// Most episodes of one evaluation: the seeds of the next run begin there.
pub(crate) const MAX_EPISODES: usize = 1 << 24;

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
    pub env: EnvConfig,
    /// Number of episodes.
    pub episodes: usize,
    /// Episodes for choosing, or for reporting.
    pub seeds: Seeds,
    /// Draw actions instead of taking the likeliest.
    pub sample: bool,
    /// Threads; 0: one per core.
    pub threads: usize,
    /// The device that computes the policy; its parameters must lie there. On a GPU all episodes act side by
    /// side.
    pub device: &'a Device,
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
    /// Success rate where the environment knows success, mean return elsewhere, over episodes.
    pub fn score(&self) -> Statistics {
        let score = |e: &EpisodeResult| e.success.map_or(e.episode_return, |s| f64::from(u8::from(s)));
        Statistics::of(self.episodes.iter().map(score))
    }

    /// Mean return over episodes.
    pub fn returns(&self) -> Statistics {
        Statistics::of(self.episodes.iter().map(|e| e.episode_return))
    }
}

/// Acts out all episodes. `progress` hears how much is done (0 to 1), from any thread.
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
    evaluation.policy.architecture().ends().check(evaluation.env.evaluation()?.spaces(), "environment")?;
    let seeds: Vec<u64> = (0..evaluation.episodes).map(|i| evaluation.seeds.episode(i)).collect();
    let group = if evaluation.device.is_cpu() { (evaluation.episodes / 4).clamp(10, 50) } else { 4096 };
    let group = group.min(evaluation.episodes);
    let groups: Vec<&[u64]> = seeds.chunks(group).collect();
    let results: Mutex<Vec<Option<Result<Vec<EpisodeResult>>>>> =
        Mutex::new(groups.iter().map(|_| None).collect());
    let (next, steps) = (AtomicUsize::new(0), AtomicUsize::new(0));
    // Groups of episodes are as long as the environment lets them be, at most.
    let expected = (evaluation.env.max_steps() as usize).saturating_mul(groups.len()).max(1);
    let tick = || {
        let done = steps.fetch_add(TICK, Ordering::Relaxed) + TICK;
        progress((done as f64 / expected as f64).min(1.0));
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if evaluation.threads == 0 { cores } else { evaluation.threads }.min(groups.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(seeds) = groups.get(i) else { break };
                    let result = act_out(evaluation, seeds, stop, &tick);
                    let failed = result.is_err();
                    results.lock().unwrap_or_else(PoisonError::into_inner)[i] = Some(result);
                    if failed {
                        break;
                    }
                }
            });
        }
    });
    let mut episodes = Vec::with_capacity(evaluation.episodes);
    for result in results.into_inner().unwrap_or_else(PoisonError::into_inner) {
        episodes.extend(result.unwrap_or(Err(Error::Stopped))?);
    }
    progress(1.0);
    Ok(Outcome { episodes })
}

/// The seed of an episode's initial memory. Not the episode's own: the noise would be made of the numbers
/// that hide the goal.
pub(crate) fn memory_seed(episode: u64) -> u64 {
    let draw = Stream::new(episode, u64::MAX, u32::MAX).block(0);
    u64::from(draw[0]) << 32 | u64::from(draw[1])
}

/// Steps between two words of progress, and between two looks at `stop`.
const TICK: usize = 64;

/// One episode per seed, side by side.
fn act_out(
    evaluation: &Evaluation<'_>,
    seeds: &[u64],
    stop: &Stop,
    tick: &dyn Fn(),
) -> Result<Vec<EpisodeResult>> {
    let rows = seeds.len();
    let envs = seeds.iter().map(|_| evaluation.env.evaluation()).collect::<elmur_envs::Result<Vec<_>>>()?;
    let mut env = VecEnv::new(envs)?;
    env.reset(seeds)?;
    // On the CPU every group has a thread of its own.
    let device =
        if evaluation.device.is_cpu() { Device::Cpu(Pool::new(1)) } else { evaluation.device.clone() };
    let mut session = Session::new(evaluation.policy, evaluation.params, rows, &device)?;
    session.reset(&seeds.iter().map(|seed| memory_seed(*seed)).enumerate().collect::<Vec<_>>())?;
    let how = if evaluation.sample { Choose::Sample } else { Choose::Greedy };
    let all: Vec<usize> = (0..rows).collect();
    let mut results = vec![EpisodeResult::default(); rows];
    let mut running = vec![true; rows];
    let mut returns = vec![evaluation.env.best_return() as f32; rows];
    let mut actions = Row::zeros(env.spaces().action.widths(), rows);
    for step in 1.. {
        let seen = Seen { observation: env.observations(), returns: Some(&returns) };
        session.select_action(&all, seen, how, actions.as_mut())?;
        let taken = env.step(actions.values())?;
        for row in 0..rows {
            if !running[row] {
                continue;
            }
            results[row].episode_return += taken.rewards[row];
            results[row].steps += 1;
            returns[row] -= taken.rewards[row] as f32;
            results[row].success = taken.success[row];
            running[row] = !(taken.terminated[row] || taken.truncated[row]);
        }
        if step % TICK == 0 {
            if stop.requested() {
                return Err(Error::Stopped);
            }
            tick();
        }
        if running.iter().all(|running| !running) {
            break;
        }
    }
    Ok(results)
}

#[cfg(test)]
mod tests {
    use elmur_envs::Env;

    use super::*;

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
