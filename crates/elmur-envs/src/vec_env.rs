//! Many environments stepped as one.

use elmur_rng::Stream;

use crate::env::Env;
use crate::error::{Error, Result};
use crate::space::{Spaces, Values, ValuesMut};

/// Rows of one environment, each in an episode of its own. A row whose episode ends begins the next at once: its observation is
/// the new episode's first, and the last one of the old episode is kept in [`VecEnv::final_observations`].
///
/// Seeds: episode n of a row with seed s is seeded by s for n = 0 and by a draw from (s, n) after it, so that a row's
/// episodes depend on nothing but its own seed.
#[derive(Debug)]
pub struct VecEnv<E> {
    rows: Vec<E>,
    seeds: Vec<u64>,
    episodes: Vec<u64>,
    floats: Vec<f32>,
    ints: Vec<i32>,
    final_floats: Vec<f32>,
    final_ints: Vec<i32>,
    step: VecStep,
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
}

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
        let (floats, ints) = (first.spaces().observation.floats(), first.spaces().observation.ints());
        let n = rows.len();
        Ok(Self {
            seeds: vec![0; n],
            episodes: vec![0; n],
            floats: vec![0.0; n * floats],
            ints: vec![0; n * ints],
            final_floats: vec![0.0; n * floats],
            final_ints: vec![0; n * ints],
            step: VecStep { rewards: vec![0.0; n], terminated: vec![false; n], truncated: vec![false; n] },
            rows,
        })
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
            return Err(Error::Space { what: "reset", expected, got: seeds.len().to_string() });
        }
        for (row, seed) in seeds.iter().enumerate() {
            self.reset_row(row, *seed);
        }
        Ok(())
    }

    /// Starts one row anew; the others go on.
    pub fn reset_row(&mut self, row: usize, seed: u64) {
        (self.seeds[row], self.episodes[row]) = (seed, 0);
        self.begin(row, seed);
    }

    fn begin(&mut self, row: usize, seed: u64) {
        let (floats, ints) = self.widths();
        let observation = ValuesMut {
            floats: &mut self.floats[row * floats..(row + 1) * floats],
            ints: &mut self.ints[row * ints..(row + 1) * ints],
        };
        self.rows[row].reset(seed, observation);
    }

    fn widths(&self) -> (usize, usize) {
        (self.floats.len() / self.rows.len(), self.ints.len() / self.rows.len())
    }

    /// Newest observations of all rows, [rows, numbers].
    pub fn observations(&self) -> Values<'_> {
        Values { floats: &self.floats, ints: &self.ints }
    }

    /// For rows whose episode ended in the last step: the observation it ended with, [rows, numbers].
    pub fn final_observations(&self) -> Values<'_> {
        Values { floats: &self.final_floats, ints: &self.final_ints }
    }

    /// Steps all rows with actions [rows, numbers]. Where one row refuses its action, rows before it have moved: treat an error as
    /// the end.
    pub fn step(&mut self, actions: Values<'_>) -> Result<&VecStep> {
        let n = self.rows.len();
        let (action_floats, action_ints) = {
            let space = &self.rows[0].spaces().action;
            (space.floats(), space.ints())
        };
        if actions.floats.len() != n * action_floats || actions.ints.len() != n * action_ints {
            return Err(Error::Space {
                what: "actions",
                expected: format!("{n} rows of {action_floats} floats and {action_ints} integers"),
                got: format!("{} and {}", actions.floats.len(), actions.ints.len()),
            });
        }
        let (floats, ints) = self.widths();
        for row in 0..n {
            let action = Values {
                floats: &actions.floats[row * action_floats..(row + 1) * action_floats],
                ints: &actions.ints[row * action_ints..(row + 1) * action_ints],
            };
            let (floats, ints) = (row * floats..(row + 1) * floats, row * ints..(row + 1) * ints);
            let observation =
                ValuesMut { floats: &mut self.floats[floats.clone()], ints: &mut self.ints[ints.clone()] };
            let step = self.rows[row].step(action, observation)?;
            self.step.rewards[row] = step.reward;
            self.step.terminated[row] = step.terminated;
            self.step.truncated[row] = step.truncated;
            if step.done() {
                self.final_floats[floats.clone()].copy_from_slice(&self.floats[floats]);
                self.final_ints[ints.clone()].copy_from_slice(&self.ints[ints]);
                self.episodes[row] += 1;
                let draw = Stream::new(self.seeds[row], self.episodes[row], 1).block(0);
                self.begin(row, u64::from(draw[0]) << 32 | u64::from(draw[1]));
            }
        }
        Ok(&self.step)
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
                let step = env.step(Values { floats: &[], ints: &actions }).unwrap();
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
            let step = env.step(Values { floats: &[], ints: &[0, 0] }).unwrap();
            step.truncated.iter().position(|done| *done)
        });
        let row = ended.unwrap();
        let hint = env.observations().floats[4 * row + 1];
        assert_eq!(hint, f32::from(env.row(row).goal()), "the next episode's first observation");
        assert_eq!(env.final_observations().floats[4 * row + 1..4 * row + 3], [0.0, 1.0], "at the fork");
    }

    #[test]
    fn wrong_numbers_of_rows_are_errors() {
        let mut env = mazes(2);
        assert!(env.reset(&[1]).is_err());
        env.reset(&[1, 2]).unwrap();
        assert!(env.step(Values { floats: &[], ints: &[0] }).is_err());
        assert!(VecEnv::<TMaze>::new(vec![]).is_err());
    }
}
