//! T-Maze: a corridor with a fork at its end. The first observation tells which way to turn, none after it
//! does.
//!
//! ```text
//!                         goal?          y = +1
//! start o-----------------+
//! x = 0   corridor        |  x = C       y = 0
//!                         goal?          y = -1
//! ```
//!
//! Observation: [y, hint, junction, noise]: hint is the goal's y at the first step and 0 after it, junction
//! is 1 at the fork, noise is -1, 0 or 1 at random. Actions: 0 right, 1 up, 2 left, 3 down; a move into a
//! wall does nothing. The episode ends at either goal, with reward 1 at the one that the hint told, or is cut
//! off after C + 2 steps. Length "T" means C + 2.

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_rng::Rng;

use crate::env::{Env, Player, Step};
use crate::error::{Error, Result};
use crate::family::{EnvSpec, Facts, Family, Metric, Purpose, Setting};

const RIGHT: i32 = 0;
const UP: i32 = 1;
const LEFT: i32 = 2;
const DOWN: i32 = 3;

/// Length of the corridors of a T-Maze.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Corridor {
    /// The same number of cells in every episode.
    Fixed(u64),
    /// A number of cells drawn for every episode, uniform from 1 to this.
    UpTo(u32),
}

/// T-Maze: remember the hint of the first observation, walk to the fork and turn to the side that it told.
///
/// Observation: [y, hint, junction, noise], 4 floats. Actions: 0 right, 1 up, 2 left, 3 down. Reward: 1 at
/// the goal of the episode. Success: the goal was reached.
#[derive(Debug, Clone)]
pub struct TMaze {
    spaces: Spaces,
    corridor: Corridor,
    rng: Rng,
    length: u64,
    x: u64,
    y: i8,
    goal: i8,
    time: u64,
    done: bool,
}

impl TMaze {
    /// A maze with the given corridors, which must be at least one cell long.
    pub fn new(corridor: Corridor) -> Result<Self> {
        if matches!(corridor, Corridor::Fixed(0) | Corridor::UpTo(0)) {
            return Err(Error::config("corridor", "at least one cell", 0));
        }
        let observation = Space::between(-1.0, 1.0, [4]);
        let spaces = Spaces { observation, action: Space::Discrete { n: 4 } };
        let rng = Rng::new(0, 0);
        Ok(Self { spaces, corridor, rng, length: 1, x: 0, y: 0, goal: 1, time: 0, done: true })
    }

    /// Cells from the start to the fork in this episode.
    pub fn corridor(&self) -> u64 {
        self.length
    }

    /// The y of the goal, 1 or -1, which only the first observation shows.
    pub fn goal(&self) -> i8 {
        self.goal
    }

    fn observe(&mut self, observation: ValuesMut<'_>) {
        let hint = if self.time == 0 { f32::from(self.goal) } else { 0.0 };
        let junction = self.x == self.length && self.y == 0;
        let noise = self.rng.below(3) as f32 - 1.0;
        observation.floats.copy_from_slice(&[f32::from(self.y), hint, f32::from(u8::from(junction)), noise]);
    }
}

impl Env for TMaze {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
        self.rng = Rng::new(seed, 0);
        self.goal = if self.rng.below(2) == 0 { -1 } else { 1 };
        self.length = match self.corridor {
            Corridor::Fixed(length) => length,
            Corridor::UpTo(longest) => 1 + u64::from(self.rng.below(longest)),
        };
        (self.x, self.y, self.time, self.done) = (0, 0, 0, false);
        self.observe(observation);
        Ok(())
    }

    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        if self.done {
            return Err(Error::Finished);
        }
        self.spaces.action.check("T-Maze action", action)?;
        let at_fork = self.x == self.length;
        match action.ints[0] {
            RIGHT if !at_fork => self.x += 1,
            LEFT if self.x > 0 => self.x -= 1,
            UP if at_fork => self.y = 1,
            DOWN if at_fork => self.y = -1,
            _ => {}
        }
        self.time += 1;
        let terminated = self.y != 0;
        let truncated = !terminated && self.time >= self.length.saturating_add(2);
        self.done = terminated || truncated;
        self.observe(observation);
        let reward = if self.y == self.goal { 1.0 } else { 0.0 };
        let success = self.done.then_some(reward > 0.5);
        Ok(Step { reward, terminated, truncated, success })
    }
}

/// A player that remembers the hint, walks right to the fork and turns.
#[derive(Debug, Clone, Default)]
pub struct TMazePlayer {
    hint: Option<f32>,
}

impl Player for TMazePlayer {
    fn reset(&mut self) {
        self.hint = None;
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let hint = *self.hint.get_or_insert(observation.floats[1]);
        action.ints[0] = match (observation.floats[2] > 0.5, hint > 0.0) {
            (false, _) => RIGHT,
            (true, true) => UP,
            (true, false) => DOWN,
        };
    }

    fn took(&mut self, _: Values<'_>) {}
}

/// T-Maze in the [`Registry`](crate::Registry): `tmaze`.
pub(crate) struct TMazeFamily;

const LENGTH: &str = "length";

impl TMazeFamily {
    /// Cells of the longest corridor.
    fn cells(spec: &EnvSpec) -> Result<u64> {
        let length: u64 = spec.get(LENGTH)?;
        length.checked_sub(2).filter(|cells| *cells > 0).ok_or_else(|| {
            Error::config(LENGTH, "at least 3 (a corridor of one cell, the turn and a spare step)", length)
        })
    }
}

impl Family for TMazeFamily {
    fn names(&self) -> Vec<String> {
        vec!["tmaze".to_owned()]
    }

    fn settings(&self, _: &str) -> Vec<Setting> {
        vec![Setting::new(
            LENGTH,
            30,
            "Longest episode in steps, two more than the corridor has cells. Demonstrations have corridors of \
             every length up to it, evaluations of exactly this length.",
        )]
    }

    fn make(&self, spec: &EnvSpec, purpose: Purpose) -> Result<Box<dyn Env>> {
        let cells = Self::cells(spec)?;
        let corridor = match purpose {
            Purpose::Evaluate => Corridor::Fixed(cells),
            Purpose::Collect => Corridor::UpTo(
                u32::try_from(cells)
                    .map_err(|_| Error::config(LENGTH, "at most 2^32 + 1 for demonstrations", cells + 2))?,
            ),
        };
        Ok(Box::new(TMaze::new(corridor)?))
    }

    fn player(&self, _: &EnvSpec) -> Result<Option<Box<dyn Player>>> {
        Ok(Some(Box::new(TMazePlayer::default())))
    }

    fn facts(&self, spec: &EnvSpec) -> Facts {
        Facts {
            max_steps: spec.get(LENGTH).ok(),
            good_return: Some(1.0),
            metric: Metric::Success,
            ..Facts::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn act(env: &mut TMaze, action: i32) -> (Step, [f32; 4]) {
        let mut seen = [9.0; 4];
        let room = ValuesMut::floats(&mut seen);
        let step = env.step(Values::ints(&[action]), room).unwrap();
        (step, seen)
    }

    fn start(corridor: u64, seed: u64) -> (TMaze, [f32; 4]) {
        let mut env = TMaze::new(Corridor::Fixed(corridor)).unwrap();
        let mut seen = [9.0; 4];
        env.reset(seed, ValuesMut::floats(&mut seen)).unwrap();
        (env, seen)
    }

    #[test]
    fn the_right_turn_pays_and_the_wrong_one_does_not() {
        let mut goals = std::collections::BTreeSet::new();
        for seed in 0..20 {
            for right in [true, false] {
                let (mut env, seen) = start(3, seed);
                let goal = f32::from(env.goal());
                goals.insert(env.goal());
                assert_eq!(seen[..3], [0.0, goal, 0.0]);
                for x in 1..=3 {
                    let (step, seen) = act(&mut env, RIGHT);
                    assert!(!step.done() && step.success.is_none());
                    assert_eq!(seen[..3], [0.0, 0.0, f32::from(u8::from(x == 3))]);
                }
                let up = (goal > 0.0) == right;
                let (step, seen) = act(&mut env, if up { UP } else { DOWN });
                let reward = if right { 1.0 } else { 0.0 };
                assert_eq!(step, Step { reward, terminated: true, truncated: false, success: Some(right) });
                assert_eq!(seen[..3], [if up { 1.0 } else { -1.0 }, 0.0, 0.0]);
            }
        }
        assert_eq!(goals.len(), 2);
    }

    #[test]
    fn walls_hold_and_time_runs_out() {
        let (mut env, _) = start(2, 1);
        // Left at the start, up in the corridor: nothing moves.
        assert_eq!(act(&mut env, LEFT).1[2], 0.0);
        assert_eq!(act(&mut env, UP).1[0], 0.0);
        act(&mut env, RIGHT);
        let (step, seen) = act(&mut env, RIGHT);
        assert_eq!(step, Step { reward: 0.0, terminated: false, truncated: true, success: Some(false) });
        assert_eq!(seen[2], 1.0, "at the fork, too late");
        assert!(matches!(
            env.step(Values::ints(&[0]), ValuesMut::floats(&mut [0.0; 4])),
            Err(Error::Finished)
        ));
    }

    #[test]
    fn a_right_turn_in_the_last_moment_counts() {
        let (mut env, _) = start(1, 3);
        act(&mut env, RIGHT);
        act(&mut env, RIGHT);
        let turn = if env.goal() > 0 { UP } else { DOWN };
        let (step, _) = act(&mut env, turn);
        assert_eq!(step, Step { reward: 1.0, terminated: true, truncated: false, success: Some(true) });
    }

    #[test]
    fn corridors_of_a_range_are_all_drawn() {
        let mut env = TMaze::new(Corridor::UpTo(28)).unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..1000 {
            env.reset(seed, ValuesMut::floats(&mut [0.0; 4])).unwrap();
            seen.insert(env.corridor());
        }
        assert!(seen.into_iter().eq(1..=28));
    }

    #[test]
    fn noise_is_uniform_over_three_values() {
        let (mut env, _) = start(30_001, 5);
        let mut counts = [0u32; 3];
        for _ in 0..30_000 {
            counts[(act(&mut env, RIGHT).1[3] + 1.0) as usize] += 1;
        }
        let chi: f64 = counts.iter().map(|c| (f64::from(*c) - 1e4).powi(2) / 1e4).sum();
        assert!(chi < 13.8, "{counts:?}");
    }

    #[test]
    fn misuse_is_an_error() {
        assert!(TMaze::new(Corridor::Fixed(0)).unwrap_err().to_string().contains("at least one cell"));
        let (mut env, _) = start(2, 1);
        let error = env.step(Values::ints(&[4]), ValuesMut::floats(&mut [0.0; 4])).unwrap_err();
        assert_eq!(error.to_string(), "T-Maze action: expected an integer from 0 to 3, got 4");
    }
}
