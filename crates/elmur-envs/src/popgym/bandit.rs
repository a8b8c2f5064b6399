//! MultiarmedBandit: find the arm that pays best and keep pulling it.
//!
//! 10, 20 or 30 arms, each with its own chance of a payout, uniform in [0, 1) and fixed for the episode. Observation: whether the last
//! pull paid (0 at the start). A payout earns 1/L and a miss costs as much, with L = 200, 400 or 600 pulls, after which the episode
//! is cut off.

use elmur_rng::{Rng, unit};
use serde::Deserialize;

use super::replay::{Replay, choice, impossible};
use super::task::Difficulty;
use crate::env::{Env, Step};
use crate::error::{Error, Result};
use crate::space::{Space, Spaces, Values, ValuesMut};

/// The hidden state.
#[derive(Debug, Clone, Deserialize)]
pub struct Bandits {
    /// Every arm's chance of a payout.
    pub bandits_f32: Vec<f32>,
}

/// Number of arms and pulls.
fn sizes(difficulty: Difficulty) -> (usize, usize) {
    difficulty.pick([(10, 200), (20, 400), (30, 600)])
}

/// Pull arms.
#[derive(Debug, Clone)]
pub struct MultiarmedBandit {
    spaces: Spaces,
    /// Chances of a payout.
    arms: Vec<f32>,
    pulls: usize,
    /// Pulls left; none without a running episode.
    left: usize,
    /// What a payout earns.
    pay: f64,
    rng: Rng,
}

impl MultiarmedBandit {
    /// The task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        let (arms, pulls) = sizes(difficulty);
        let spaces = Spaces { observation: Space::Discrete { n: 2 }, action: Space::Discrete { n: arms } };
        let (pay, rng) = (1.0 / pulls as f64, Rng::new(0, 0));
        Self { spaces, arms: vec![0.0; arms], pulls, left: 0, pay, rng }
    }

    fn first(&mut self, observation: ValuesMut<'_>) {
        self.left = self.pulls;
        observation.ints[0] = 0;
    }
}

impl Env for MultiarmedBandit {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) {
        self.rng = Rng::new(seed, 0);
        for arm in &mut self.arms {
            *arm = (self.rng.bits() >> 8) as f32 * (1.0 / 16_777_216.0);
        }
        self.first(observation);
    }

    #[inline]
    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        let draw = unit(self.rng.bits());
        self.advance(action, draw, observation)
    }
}

impl Replay for MultiarmedBandit {
    type Hidden = Bandits;
    type Draw = f64;

    fn begin(&mut self, hidden: &Bandits, observation: ValuesMut<'_>) -> Result<()> {
        let arms = &hidden.bandits_f32;
        if arms.len() != self.arms.len() || !arms.iter().all(|p| (0.0..1.0).contains(p)) {
            return impossible(
                format!("{} numbers from 0 up to 1", self.arms.len()),
                format!("{} numbers: {:?}", arms.len(), arms.iter().take(30).collect::<Vec<_>>()),
            );
        }
        self.arms.copy_from_slice(arms);
        self.first(observation);
        Ok(())
    }

    #[inline]
    fn advance(&mut self, action: Values<'_>, draw: f64, observation: ValuesMut<'_>) -> Result<Step> {
        if self.left == 0 {
            return Err(Error::Finished);
        }
        let arm = choice(action, self.arms.len(), "arm")?;
        if !(0.0..1.0).contains(&draw) {
            return impossible("a draw from 0 up to 1", draw.to_string());
        }
        // The package compares as f32.
        let paid = (draw as f32) < self.arms[arm];
        self.left -= 1;
        observation.ints[0] = i32::from(paid);
        let reward = if paid { self.pay } else { -self.pay };
        Ok(Step { reward, terminated: false, truncated: self.left == 0 })
    }
}
