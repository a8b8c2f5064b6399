//! Evaluation by the paper's protocol: runs of 100 episodes with distinct seeds, mean and standard error across runs.
//!
//! Episodes are acted out in groups whose size depends on their number alone, each group on a thread of its own, so that the
//! result is the same on any machine with any number of threads.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use elmur_base::Values;
use elmur_engine::{Device, Pool, Store};
use elmur_envs::{Env, EnvConfig, VecEnv};
use elmur_model::ModelConfig;
use elmur_model::config::{Action, Observation, Token};
use elmur_model::session::{Actions, Obs, Session};
use elmur_rng::{Rng, Stream};

use crate::config::{check_spaces, has_token};
use crate::error::{Error, Result};
use crate::run::Stop;

/// Most episodes of one evaluation: the seeds of the next run begin there.
pub(crate) const MAX_EPISODES: usize = 1 << 24;

/// Which episodes. Training, validation and test draw from ranges that never meet.
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

/// What is evaluated, and how.
#[derive(Debug, Clone)]
pub struct Evaluation<'a> {
    /// The policy's model.
    pub model: &'a ModelConfig,
    /// Its parameters.
    pub params: &'a Store,
    /// Where it acts.
    pub env: EnvConfig,
    /// How often.
    pub episodes: usize,
    /// On which episodes.
    pub seeds: Seeds,
    /// Draw actions instead of taking the likeliest.
    pub sample: bool,
    /// Threads; 0: one per core.
    pub threads: usize,
    /// Where the policy computes; its parameters must lie there. On a GPU all episodes act side by side.
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

/// A mean and its standard error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Statistic {
    /// Mean.
    pub mean: f64,
    /// Standard error of the mean; 0 for a single number.
    pub sem: f64,
    /// How many numbers.
    pub count: usize,
}

impl Statistic {
    /// Of these numbers.
    pub fn of(numbers: &[f64]) -> Self {
        let count = numbers.len();
        let mean = numbers.iter().sum::<f64>() / count.max(1) as f64;
        let squares: f64 = numbers.iter().map(|x| (x - mean).powi(2)).sum();
        let sem = if count > 1 { (squares / (count - 1) as f64 / count as f64).sqrt() } else { 0.0 };
        Self { mean, sem, count }
    }
}

impl Outcome {
    /// Success rate where the environment knows success, mean return elsewhere, over episodes.
    pub fn score(&self) -> Statistic {
        let score = |e: &EpisodeResult| e.success.map_or(e.episode_return, |s| f64::from(u8::from(s)));
        Statistic::of(&self.episodes.iter().map(score).collect::<Vec<_>>())
    }

    /// Mean return over episodes.
    pub fn returns(&self) -> Statistic {
        Statistic::of(&self.episodes.iter().map(|e| e.episode_return).collect::<Vec<_>>())
    }
}

/// Acts out all episodes. `progress` hears how much is done (0 to 1), from any thread.
pub fn evaluate(what: &Evaluation<'_>, stop: &Stop, progress: &(dyn Fn(f64) + Sync)) -> Result<Outcome> {
    if what.episodes == 0 {
        return Err(Error::config("episodes", "at least 1", 0));
    }
    if what.episodes > MAX_EPISODES {
        return Err(Error::config("episodes", format!("at most {MAX_EPISODES}"), what.episodes));
    }
    check_spaces(what.model, what.env.evaluation()?.spaces(), "environment")?;
    let seeds: Vec<u64> = (0..what.episodes).map(|i| what.seeds.episode(i)).collect();
    let group = if what.device.is_cpu() { (what.episodes / 4).clamp(10, 50) } else { 4096 };
    let group = group.min(what.episodes);
    let groups: Vec<&[u64]> = seeds.chunks(group).collect();
    let results: Mutex<Vec<Option<Result<Vec<EpisodeResult>>>>> =
        Mutex::new(groups.iter().map(|_| None).collect());
    let (next, steps) = (AtomicUsize::new(0), AtomicUsize::new(0));
    // Groups of episodes are as long as the environment lets them be, at most.
    let expected = (what.env.max_steps() as usize).saturating_mul(groups.len()).max(1);
    let tick = || {
        let done = steps.fetch_add(TICK, Ordering::Relaxed) + TICK;
        progress((done as f64 / expected as f64).min(1.0));
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if what.threads == 0 { cores } else { what.threads }.min(groups.len());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(seeds) = groups.get(i) else { break };
                    let result = act_out(what, seeds, stop, &tick);
                    let failed = result.is_err();
                    results.lock().unwrap_or_else(PoisonError::into_inner)[i] = Some(result);
                    if failed {
                        break;
                    }
                }
            });
        }
    });
    let mut episodes = Vec::with_capacity(what.episodes);
    for result in results.into_inner().unwrap_or_else(PoisonError::into_inner) {
        episodes.extend(result.unwrap_or(Err(Error::Stopped))?);
    }
    progress(1.0);
    Ok(Outcome { episodes })
}

/// The seed of an episode's initial memory. Not the episode's own: the noise would be made of the numbers that hide the goal.
pub(crate) fn memory_seed(episode: u64) -> u64 {
    let draw = Stream::new(episode, u64::MAX, u32::MAX).block(0);
    u64::from(draw[0]) << 32 | u64::from(draw[1])
}

/// Steps between two words of progress, and between two looks at `stop`.
const TICK: usize = 64;

/// One episode per seed, side by side.
fn act_out(what: &Evaluation<'_>, seeds: &[u64], stop: &Stop, tick: &dyn Fn()) -> Result<Vec<EpisodeResult>> {
    let rows = seeds.len();
    let envs = seeds.iter().map(|_| what.env.evaluation()).collect::<elmur_envs::Result<Vec<_>>>()?;
    let mut env = VecEnv::new(envs)?;
    env.reset(seeds)?;
    // On the CPU every group has a thread of its own.
    let device = if what.device.is_cpu() { Device::Cpu(Pool::new(1)) } else { what.device.clone() };
    let mut session = Session::new(what.model, what.params, rows, &device)?;
    session.reset(&seeds.iter().map(|seed| memory_seed(*seed)).enumerate().collect::<Vec<_>>())?;
    let mut rngs: Vec<Rng> = seeds.iter().map(|seed| Rng::new(memory_seed(*seed), u32::MAX)).collect();
    let mut results = vec![EpisodeResult::default(); rows];
    let mut running = vec![true; rows];
    let mut returns = vec![what.env.best_return() as f32; rows];
    let (returned, acting) = (has_token(what.model, Token::Return), has_token(what.model, Token::Action));
    let mut ints = Vec::new();
    let mut floats = Vec::new();
    let observed = Observed::new(what.model, &env);
    for step in 1.. {
        let outputs = observed.forward(&mut session, env.observations(), returned.then_some(&returns[..]))?;
        match &what.model.action {
            Action::Continuous { .. } => {
                floats.clear();
                floats.extend_from_slice(outputs);
            }
            action if what.sample => {
                ints.clear();
                sample(action, outputs, &mut rngs, &mut ints);
            }
            _ => {
                ints.clear();
                ints.extend_from_slice(session.greedy_actions());
            }
        }
        let discrete = what.model.action.is_discrete();
        let actions = if discrete { Actions::Discrete(&ints) } else { Actions::Continuous(&floats) };
        session.commit(acting.then_some(actions))?;
        let taken = env.step(Values { floats: &floats, ints: &ints, bytes: &[] })?;
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

/// How an environment's numbers become a session's observation.
struct Observed {
    /// Whether the whole observation is integers; `None`: parts.
    ints: Option<bool>,
    /// For parts: (is integers, first number, numbers) of each, per row.
    parts: Vec<(bool, usize, usize)>,
}

impl Observed {
    fn new<E: Env>(model: &ModelConfig, env: &VecEnv<E>) -> Self {
        let (mut floats, mut ints) = (0, 0);
        let leaves = env.spaces().observation.leaves();
        let place = |leaf: &elmur_base::Leaf<'_>| {
            let integer = matches!(leaf, elmur_base::Leaf::Ints(_));
            let counter = if integer { &mut ints } else { &mut floats };
            *counter += leaf.len();
            (integer, *counter - leaf.len(), leaf.len())
        };
        let parts: Vec<_> = leaves.iter().map(place).collect();
        let one = !matches!(model.observation, Observation::Parts(_));
        Self { ints: one.then(|| parts[0].0), parts }
    }

    fn forward<'s>(
        &self,
        session: &'s mut Session,
        values: Values<'_>,
        returns: Option<&[f32]>,
    ) -> Result<&'s [f32]> {
        match self.ints {
            Some(true) => Ok(session.forward(Obs::Ints(values.ints), returns)?),
            Some(false) => Ok(session.forward(Obs::Floats(values.floats), returns)?),
            None => {
                let rows = session.batch();
                let gather = |(integer, first, len): &(bool, usize, usize)| {
                    if *integer {
                        let width = values.ints.len() / rows;
                        (
                            values.ints.chunks(width).flat_map(|r| r[*first..first + len].to_vec()).collect(),
                            vec![],
                        )
                    } else {
                        let width = values.floats.len() / rows;
                        (
                            vec![],
                            values
                                .floats
                                .chunks(width)
                                .flat_map(|r| r[*first..first + len].to_vec())
                                .collect(),
                        )
                    }
                };
                let parts: Vec<(Vec<i32>, Vec<f32>)> = self.parts.iter().map(gather).collect();
                let views: Vec<Obs<'_>> = (parts.iter().zip(&self.parts))
                    .map(
                        |((ints, floats), (integer, ..))| {
                            if *integer { Obs::Ints(ints) } else { Obs::Floats(floats) }
                        },
                    )
                    .collect();
                Ok(session.forward(Obs::Parts(&views), returns)?)
            }
        }
    }
}

/// Draws an action per row and component from the probabilities that the logits mean.
fn sample(action: &Action, logits: &[f32], rngs: &mut [Rng], actions: &mut Vec<i32>) {
    let sizes = action.sizes();
    let width: usize = sizes.iter().sum();
    for (row, rng) in logits.chunks_exact(width).zip(rngs) {
        let mut rest = row;
        for size in sizes {
            let (part, after) = rest.split_at(*size);
            rest = after;
            let top = part.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f64> = part.iter().map(|x| f64::from(x - top).exp()).collect();
            let mut left = rng.uniform(0.0, weights.iter().sum());
            let chosen = weights.iter().position(|w| {
                left -= w;
                left < 0.0
            });
            actions.push(chosen.unwrap_or(size - 1) as i32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_error_is_that_of_the_mean() {
        let s = Statistic::of(&[1.0, 2.0, 3.0, 4.0]);
        assert!((s.mean - 2.5).abs() < 1e-15 && (s.sem - (5.0f64 / 3.0 / 4.0).sqrt()).abs() < 1e-15);
        assert_eq!(Statistic::of(&[3.0]), Statistic { mean: 3.0, sem: 0.0, count: 1 });
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
    fn sampling_follows_the_logits() {
        let logits: Vec<f32> = [0.5f32, 0.25, 0.25].iter().map(|p| p.ln() + 3.0).collect();
        let mut rng = [Rng::new(1, 0)];
        let mut counts = [0u32; 3];
        for _ in 0..10_000 {
            let mut actions = Vec::new();
            sample(&Action::Categorical { count: 3 }, &logits, &mut rng, &mut actions);
            counts[actions[0] as usize] += 1;
        }
        let expected = [5000.0, 2500.0, 2500.0];
        let chi: f64 = counts.iter().zip(expected).map(|(c, e)| (f64::from(*c) - e).powi(2) / e).sum();
        assert!(chi < 13.8, "{counts:?}");
    }

    #[test]
    fn seeds_of_training_validation_and_test_never_meet() {
        let last_of_training = ((1u64 << 30) << 32) - 1;
        assert!(last_of_training < Seeds::Validation.episode(0));
        assert!(Seeds::Validation.episode(1 << 40) < Seeds::Test(0).episode(0));
        assert!(Seeds::Test(3).episode((1 << 24) - 1) < Seeds::Test(4).episode(0));
    }
}
