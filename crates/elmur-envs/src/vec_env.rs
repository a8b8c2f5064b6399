//! Many environments stepped as one.

use std::sync::{Mutex, PoisonError};

use elmur_base::{Spaces, Values, ValuesMut};
use elmur_pool::{Claims, Pool, RowsMut};
use elmur_rng::Stream;

use crate::env::Env;
use crate::error::{Error, Result};

/// Rows of one environment, each in an episode of its own. A row whose episode ends begins the next at once: its observation is
/// the new episode's first, and the last one of the old episode is kept in [`VecEnv::final_observations`].
///
/// Seeds: episode n of a row with seed s is seeded by s for n = 0 and by a draw from (s, n) after it, so that a row's
/// episodes depend on nothing but its own seed. With a pool ([`VecEnv::with_pool`]) rows are stepped on several threads; what
/// comes of it is the same for any number of them.
#[derive(Debug)]
pub struct VecEnv<E> {
    rows: Vec<E>,
    widths: Widths,
    seeds: Vec<u64>,
    episodes: Vec<u64>,
    floats: Vec<f32>,
    ints: Vec<i32>,
    final_floats: Vec<f32>,
    final_ints: Vec<i32>,
    step: VecStep,
    pool: Option<Pool>,
    claims: Claims,
    /// The first row that refused its action, and why.
    refused: Mutex<Option<(usize, Error)>>,
}

/// Numbers per row.
#[derive(Debug, Clone, Copy)]
struct Widths {
    floats: usize,
    ints: usize,
    action_floats: usize,
    action_ints: usize,
}

/// What a step brought to every row.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct VecStep {
    /// Rewards.
    pub rewards: Vec<f64>,
    /// Rows whose task has ended.
    pub terminated: Vec<bool>,
    /// Rows that were cut off.
    pub truncated: Vec<bool>,
    /// Rows whose episode ended, where the task knows success: whether the episode solved it.
    pub success: Vec<Option<bool>>,
}

/// Fewest rows that are worth a thread of their own: a few microseconds of the fastest environments.
const MIN_ROWS: usize = 128;

impl<E: Env> VecEnv<E> {
    /// The given environments as rows; all must have the same spaces.
    pub fn new(rows: Vec<E>) -> Result<Self> {
        let mismatch = |got: String| {
            Err(Error::Config {
                key: "rows",
                expected: "one or more environments with equal spaces".to_owned(),
                got,
            })
        };
        let Some(first) = rows.first() else { return mismatch("none".to_owned()) };
        if let Some(i) = rows.iter().position(|row| row.spaces() != first.spaces()) {
            return mismatch(format!("row {i} with other spaces than row 0"));
        }
        let Spaces { observation, action } = first.spaces();
        let widths = Widths {
            floats: observation.widths().floats,
            ints: observation.widths().ints,
            action_floats: action.widths().floats,
            action_ints: action.widths().ints,
        };
        let n = rows.len();
        Ok(Self {
            widths,
            seeds: vec![0; n],
            episodes: vec![0; n],
            floats: vec![0.0; n * widths.floats],
            ints: vec![0; n * widths.ints],
            final_floats: vec![0.0; n * widths.floats],
            final_ints: vec![0; n * widths.ints],
            step: VecStep {
                rewards: vec![0.0; n],
                terminated: vec![false; n],
                truncated: vec![false; n],
                success: vec![None; n],
            },
            pool: None,
            claims: Claims::default(),
            refused: Mutex::new(None),
            rows,
        })
    }

    /// The same rows, stepped by the pool's threads where there are enough of them.
    pub fn with_pool(mut self, pool: &Pool) -> Self {
        self.pool = (pool.threads() > 1 && self.rows.len() >= 2 * MIN_ROWS).then(|| pool.clone());
        self
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Never: there is at least one row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// What every row shows and takes.
    pub fn spaces(&self) -> &Spaces {
        self.rows[0].spaces()
    }

    /// One row.
    pub fn row(&self, row: usize) -> &E {
        &self.rows[row]
    }

    /// Starts every row anew, row i with `seeds[i]`.
    pub fn reset(&mut self, seeds: &[u64]) -> Result<()> {
        if seeds.len() != self.rows.len() {
            let expected = format!("{} seeds", self.rows.len());
            return Err(elmur_base::Error::space("reset", expected, seeds.len()).into());
        }
        for (row, seed) in seeds.iter().enumerate() {
            self.reset_row(row, *seed)?;
        }
        Ok(())
    }

    /// Starts one row anew; the others go on.
    pub fn reset_row(&mut self, row: usize, seed: u64) -> Result<()> {
        (self.seeds[row], self.episodes[row]) = (seed, 0);
        let Widths { floats, ints, .. } = self.widths;
        let observation = ValuesMut {
            floats: &mut self.floats[row * floats..(row + 1) * floats],
            ints: &mut self.ints[row * ints..(row + 1) * ints],
            bytes: &mut [],
        };
        self.rows[row].reset(seed, observation)
    }

    /// Newest observations of all rows, [rows, numbers].
    pub fn observations(&self) -> Values<'_> {
        Values { floats: &self.floats, ints: &self.ints, bytes: &[] }
    }

    /// For rows whose episode ended in the last step: the observation it ended with, [rows, numbers].
    pub fn final_observations(&self) -> Values<'_> {
        Values { floats: &self.final_floats, ints: &self.final_ints, bytes: &[] }
    }

    /// Steps all rows with actions [rows, numbers]. Where a row refuses its action, others may have moved: treat an error as the end.
    pub fn step(&mut self, actions: Values<'_>) -> Result<&VecStep> {
        let (n, w) = (self.rows.len(), self.widths);
        if actions.floats.len() != n * w.action_floats || actions.ints.len() != n * w.action_ints {
            let expected = format!("{n} rows of {} floats and {} integers", w.action_floats, w.action_ints);
            let got = format!("{} and {}", actions.floats.len(), actions.ints.len());
            return Err(elmur_base::Error::space("actions", expected, got).into());
        }
        let Some(pool) = &self.pool else {
            let part = Part {
                rows: &mut self.rows,
                seeds: &mut self.seeds,
                episodes: &mut self.episodes,
                floats: &mut self.floats,
                ints: &mut self.ints,
                final_floats: &mut self.final_floats,
                final_ints: &mut self.final_ints,
                rewards: &mut self.step.rewards,
                terminated: &mut self.step.terminated,
                truncated: &mut self.step.truncated,
                success: &mut self.step.success,
            };
            return match part.step(w, actions) {
                Ok(()) => Ok(&self.step),
                Err((_, error)) => Err(error),
            };
        };
        let outputs = (
            (
                RowsMut::new(&mut self.rows, 1),
                RowsMut::new(&mut self.seeds, 1),
                RowsMut::new(&mut self.episodes, 1),
            ),
            (
                RowsMut::new(&mut self.floats, w.floats),
                RowsMut::new(&mut self.ints, w.ints),
                RowsMut::new(&mut self.final_floats, w.floats),
                RowsMut::new(&mut self.final_ints, w.ints),
            ),
            (
                RowsMut::new(&mut self.step.rewards, 1),
                RowsMut::new(&mut self.step.terminated, 1),
                RowsMut::new(&mut self.step.truncated, 1),
                RowsMut::new(&mut self.step.success, 1),
            ),
        );
        let tasks = (n / MIN_ROWS).clamp(1, pool.max_tasks());
        let refused = &self.refused;
        pool.sticky_blocks(&mut self.claims, n, n.div_ceil(tasks), outputs, |first, (a, b, c)| {
            let (rows, seeds, episodes) = a;
            let (floats, ints, final_floats, final_ints) = b;
            let (rewards, terminated, truncated, success) = c;
            let last = first + rows.len();
            let actions = Values {
                floats: &actions.floats[first * w.action_floats..last * w.action_floats],
                ints: &actions.ints[first * w.action_ints..last * w.action_ints],
                bytes: &[],
            };
            let part = Part {
                rows,
                seeds,
                episodes,
                floats,
                ints,
                final_floats,
                final_ints,
                rewards,
                terminated,
                truncated,
                success,
            };
            if let Err((row, error)) = part.step(w, actions) {
                let mut refused = refused.lock().unwrap_or_else(PoisonError::into_inner);
                if refused.as_ref().is_none_or(|(other, _)| first + row < *other) {
                    *refused = Some((first + row, error));
                }
            }
        });
        match self.refused.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            Some((_, error)) => Err(error),
            None => Ok(&self.step),
        }
    }
}

/// Some of the rows, and all that belongs to them.
struct Part<'a, E> {
    rows: &'a mut [E],
    seeds: &'a mut [u64],
    episodes: &'a mut [u64],
    floats: &'a mut [f32],
    ints: &'a mut [i32],
    final_floats: &'a mut [f32],
    final_ints: &'a mut [i32],
    rewards: &'a mut [f64],
    terminated: &'a mut [bool],
    truncated: &'a mut [bool],
    success: &'a mut [Option<bool>],
}

impl<E: Env> Part<'_, E> {
    /// Steps every row; an error comes with the row that it came from.
    #[inline]
    fn step(self, w: Widths, actions: Values<'_>) -> Result<(), (usize, Error)> {
        for (row, env) in self.rows.iter_mut().enumerate() {
            let action = Values {
                floats: &actions.floats[row * w.action_floats..(row + 1) * w.action_floats],
                ints: &actions.ints[row * w.action_ints..(row + 1) * w.action_ints],
                bytes: &[],
            };
            let floats = &mut self.floats[row * w.floats..(row + 1) * w.floats];
            let ints = &mut self.ints[row * w.ints..(row + 1) * w.ints];
            let room = ValuesMut { floats: &mut *floats, ints: &mut *ints, bytes: &mut [] };
            let step = env.step(action, room).map_err(|error| (row, error))?;
            self.rewards[row] = step.reward;
            self.terminated[row] = step.terminated;
            self.truncated[row] = step.truncated;
            self.success[row] = step.success;
            if step.done() {
                self.final_floats[row * w.floats..(row + 1) * w.floats].copy_from_slice(floats);
                self.final_ints[row * w.ints..(row + 1) * w.ints].copy_from_slice(ints);
                self.episodes[row] += 1;
                let draw = Stream::new(self.seeds[row], self.episodes[row], 1).block(0);
                env.reset(
                    u64::from(draw[0]) << 32 | u64::from(draw[1]),
                    ValuesMut { floats, ints, bytes: &mut [] },
                )
                .map_err(|error| (row, error))?;
            }
        }
        Ok(())
    }
}

/// A [`VecEnv`] of some environment: one virtual call steps all rows.
pub trait AnyVecEnv: Send {
    /// [`VecEnv::len`].
    fn rows(&self) -> usize;
    /// [`VecEnv::spaces`].
    fn spaces(&self) -> &Spaces;
    /// [`VecEnv::reset`].
    fn reset(&mut self, seeds: &[u64]) -> Result<()>;
    /// [`VecEnv::reset_row`].
    fn reset_row(&mut self, row: usize, seed: u64) -> Result<()>;
    /// [`VecEnv::step`].
    fn step(&mut self, actions: Values<'_>) -> Result<&VecStep>;
    /// [`VecEnv::observations`].
    fn observations(&self) -> Values<'_>;
    /// [`VecEnv::final_observations`].
    fn final_observations(&self) -> Values<'_>;
}

impl<E: Env> AnyVecEnv for VecEnv<E> {
    fn rows(&self) -> usize {
        self.len()
    }
    fn spaces(&self) -> &Spaces {
        VecEnv::spaces(self)
    }
    fn reset(&mut self, seeds: &[u64]) -> Result<()> {
        VecEnv::reset(self, seeds)
    }
    fn reset_row(&mut self, row: usize, seed: u64) -> Result<()> {
        VecEnv::reset_row(self, row, seed)
    }
    fn step(&mut self, actions: Values<'_>) -> Result<&VecStep> {
        VecEnv::step(self, actions)
    }
    fn observations(&self) -> Values<'_> {
        VecEnv::observations(self)
    }
    fn final_observations(&self) -> Values<'_> {
        VecEnv::final_observations(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tmaze::{Corridor, TMaze};

    fn mazes(rows: usize) -> VecEnv<TMaze> {
        VecEnv::new((0..rows).map(|_| TMaze::new(Corridor::UpTo(5)).unwrap()).collect()).unwrap()
    }

    /// What one row sees and gets over 60 steps of a fixed sequence of actions.
    fn history(env: &mut VecEnv<TMaze>, row: usize) -> Vec<([f32; 4], f64, bool)> {
        (0..60)
            .map(|t| {
                let actions = vec![[0, 0, 0, 1, 0, 3][t % 6]; env.len()];
                let step = env.step(Values::ints(&actions)).unwrap();
                let (reward, done) = (step.rewards[row], step.terminated[row] || step.truncated[row]);
                let seen = std::array::from_fn(|i| env.observations().floats[4 * row + i]);
                (seen, reward, done)
            })
            .collect()
    }

    #[test]
    fn a_row_depends_on_its_own_seed_alone() {
        let (mut three, mut one) = (mazes(3), mazes(1));
        three.reset(&[7, 8, 9]).unwrap();
        one.reset(&[8]).unwrap();
        let (a, b) = (history(&mut three, 1), history(&mut one, 0));
        assert_eq!(a, b);
        assert!(a.iter().filter(|(_, _, done)| *done).count() > 5, "several episodes in a row");
        one.reset(&[7]).unwrap();
        assert_ne!(history(&mut one, 0), b);
    }

    #[test]
    fn an_ended_row_shows_its_last_and_its_next_observation() {
        let mut env = mazes(2);
        env.reset(&[1, 2]).unwrap();
        let ended = (0..20).find_map(|_| {
            let step = env.step(Values::ints(&[0, 0])).unwrap();
            step.truncated.iter().position(|done| *done)
        });
        let row = ended.unwrap();
        let hint = env.observations().floats[4 * row + 1];
        assert_eq!(hint, f32::from(env.row(row).goal()), "the next episode's first observation");
        assert_eq!(env.final_observations().floats[4 * row + 1..4 * row + 3], [0.0, 1.0], "at the fork");
    }

    #[test]
    fn success_is_told_of_the_episode_that_ended() {
        let mut env = mazes(8);
        env.reset(&[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        let mut told = [0, 0];
        for t in 0..60 {
            let step = env.step(Values::ints(&[[0, 0, 1][t % 3]; 8])).unwrap();
            for row in 0..8 {
                let ended = step.terminated[row] || step.truncated[row];
                assert_eq!(step.success[row], ended.then_some(step.rewards[row] == 1.0));
                step.success[row].inspect(|solved| told[usize::from(*solved)] += 1);
            }
        }
        assert!(told[0] > 5 && told[1] > 5, "{told:?}");
    }

    #[test]
    fn wrong_numbers_of_rows_are_errors() {
        let mut env = mazes(2);
        assert!(env.reset(&[1]).is_err());
        env.reset(&[1, 2]).unwrap();
        assert!(env.step(Values::ints(&[0])).is_err());
        assert!(VecEnv::<TMaze>::new(vec![]).is_err());
    }

    #[test]
    fn rows_are_the_same_on_any_number_of_threads() {
        let rows = 1000;
        let seeds: Vec<u64> = (0..rows as u64).map(|i| i * i).collect();
        let play = |threads| {
            let mut env = mazes(rows).with_pool(&Pool::new(threads));
            assert_eq!(env.pool.is_some(), threads > 1);
            env.reset(&seeds).unwrap();
            let mut history = Vec::new();
            for t in 0..40 {
                let actions: Vec<i32> = (0..rows).map(|row| [0, 0, 0, 1, 0, 3][(t + row) % 6]).collect();
                let step = env.step(Values::ints(&actions)).unwrap().clone();
                history.push((step, env.observations().floats.to_vec()));
            }
            (history, env.final_observations().floats.to_vec())
        };
        let one = play(1);
        assert!(one == play(2) && one == play(5));
    }

    #[test]
    fn the_first_row_that_refuses_is_named_on_any_number_of_threads() {
        for threads in [1, 3] {
            let mut env = mazes(600).with_pool(&Pool::new(threads));
            env.reset(&[1; 600]).unwrap();
            let mut actions = vec![0; 600];
            (actions[599], actions[300]) = (7, 4);
            let error = env.step(Values::ints(&actions)).unwrap_err();
            assert!(error.to_string().contains("got 4"), "{error}");
            actions.fill(0);
            assert!(env.step(Values::ints(&actions)).is_ok(), "an error is told once");
        }
    }
}
