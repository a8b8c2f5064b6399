//! CartPole-v1 with Gymnasium's equations: push a cart left or right so that the pole on it stays up, for 500
//! steps.
//!
//! Nothing is hidden here: the paper uses it to show that a memory does no harm where none is needed.

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_rng::Rng;

use crate::env::{Env, Player, Step};
use crate::error::{Error, Result};
use crate::family::{EnvSpec, Facts, Family, Metric, Purpose};

pub(crate) const GRAVITY: f64 = 9.8;
pub(crate) const POLE_MASS: f64 = 0.1;
pub(crate) const TOTAL_MASS: f64 = 1.1;
pub(crate) const HALF_LENGTH: f64 = 0.5;
pub(crate) const FORCE: f64 = 10.0;
pub(crate) const TAU: f64 = 0.02;
pub(crate) const MAX_X: f64 = 2.4;
pub(crate) const MAX_ANGLE: f64 = 12.0 * std::f64::consts::PI / 180.0;
const LIMIT: u32 = 500;

/// CartPole-v1. Observation: [position, velocity, angle, angular velocity]. Actions: 0 left, 1 right. Reward:
/// 1 per step. Success: upright for all 500 steps.
#[derive(Debug, Clone)]
pub struct CartPole {
    spaces: Spaces,
    state: [f64; 4],
    time: u32,
    done: bool,
}

impl Default for CartPole {
    fn default() -> Self {
        Self::new()
    }
}

impl CartPole {
    /// An environment without a running episode; `reset` starts one.
    pub fn new() -> Self {
        let bounds = vec![2.0 * MAX_X as f32, f32::MAX, 2.0 * MAX_ANGLE as f32, f32::MAX];
        let low = bounds.iter().map(|b| -b).collect();
        let spaces = Spaces {
            observation: Space::Box { shape: vec![4], low, high: bounds },
            action: Space::Discrete { n: 2 },
        };
        Self { spaces, state: [0.0; 4], time: 0, done: true }
    }

    /// Position, velocity, angle and angular velocity, unrounded.
    pub fn state(&self) -> [f64; 4] {
        self.state
    }

    fn observe(&self, observation: ValuesMut<'_>) {
        for (target, x) in observation.floats.iter_mut().zip(self.state) {
            *target = x as f32;
        }
    }
}

/// One step of the equations of motion (explicit Euler). The order of operations is Gymnasium's: the motion
/// is unstable, so that another rounding would show after a few hundred steps.
#[inline]
pub(crate) fn advance([x, v, angle, spin]: [f64; 4], force: f64) -> [f64; 4] {
    let (sin, cos) = angle.sin_cos();
    let push = (force + POLE_MASS * HALF_LENGTH * (spin * spin) * sin) / TOTAL_MASS;
    let turn =
        (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * (cos * cos) / TOTAL_MASS));
    let pull = push - POLE_MASS * HALF_LENGTH * turn * cos / TOTAL_MASS;
    [x + TAU * v, v + TAU * pull, angle + TAU * spin, spin + TAU * turn]
}

impl Env for CartPole {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
        let mut rng = Rng::new(seed, 0);
        self.state = std::array::from_fn(|_| rng.uniform(-0.05, 0.05));
        (self.time, self.done) = (0, false);
        self.observe(observation);
        Ok(())
    }

    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        if self.done {
            return Err(Error::Finished);
        }
        self.spaces.action.check("CartPole action", action)?;
        self.state = advance(self.state, if action.ints[0] == 1 { FORCE } else { -FORCE });
        self.time += 1;
        let [x, _, angle, _] = self.state;
        let terminated = x.abs() > MAX_X || angle.abs() > MAX_ANGLE;
        let truncated = self.time >= LIMIT;
        self.done = terminated || truncated;
        self.observe(observation);
        // The pole may fall on the very last step; the episode has the full return all the same.
        let success = self.done.then_some(truncated);
        Ok(Step { reward: 1.0, terminated, truncated, success })
    }
}

/// A linear controller: pushes to the side given by the sign of a weighted sum of the state.
#[derive(Debug, Clone, Copy, Default)]
pub struct CartPolePlayer;

impl Player for CartPolePlayer {
    fn reset(&mut self) {}

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let [x, v, angle, spin] = [0, 1, 2, 3].map(|i| f64::from(observation.floats[i]));
        action.ints[0] = i32::from(0.2 * x + 0.5 * v + 10.0 * angle + 1.5 * spin > 0.0);
    }

    fn took(&mut self, _: Values<'_>) {}
}

/// CartPole-v1 in the [`Registry`](crate::Registry): `cartpole`.
pub(crate) struct CartPoleFamily;

impl Family for CartPoleFamily {
    fn names(&self) -> Vec<String> {
        vec!["cartpole".to_owned()]
    }

    fn make(&self, _: &EnvSpec, _: Purpose) -> Result<Box<dyn Env>> {
        Ok(Box::new(CartPole::new()))
    }

    fn player(&self, _: &EnvSpec) -> Result<Option<Box<dyn Player>>> {
        Ok(Some(Box::new(CartPolePlayer)))
    }

    fn facts(&self, _: &EnvSpec) -> Facts {
        Facts {
            max_steps: Some(u64::from(LIMIT)),
            good_return: Some(f64::from(LIMIT)),
            metric: Metric::Return,
            ..Facts::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of Gymnasium's CartPole-v1 (euler), worked out by hand from its published equations.
    #[test]
    fn one_push_from_rest() {
        let [x, v, angle, spin] = advance([0.0; 4], FORCE);
        assert_eq!((x, angle), (0.0, 0.0));
        let turn = -(FORCE / TOTAL_MASS) / (HALF_LENGTH * (4.0 / 3.0 - POLE_MASS / TOTAL_MASS));
        assert!((spin - TAU * turn).abs() < 1e-15);
        assert!((v - 0.195_121_951_219_512_2).abs() < 1e-12, "{v}");
        assert!((spin + 0.292_682_926_829_268_3).abs() < 1e-12, "{spin}");
    }

    #[test]
    fn the_player_stays_up_for_all_500_steps() {
        let (mut env, mut player) = (CartPole::new(), CartPolePlayer);
        for seed in 0..200 {
            let mut seen = [0f32; 4];
            env.reset(seed, ValuesMut::floats(&mut seen)).unwrap();
            player.reset();
            let mut total = 0.0;
            loop {
                let mut action = [0];
                player.act(Values::floats(&seen), ValuesMut::ints(&mut action));
                let room = ValuesMut::floats(&mut seen);
                let step = env.step(Values::ints(&action), room).unwrap();
                total += step.reward;
                if step.done() {
                    assert!(step.truncated && !step.terminated, "seed {seed} fell at {total}");
                    assert_eq!((total, step.success), (500.0, Some(true)));
                    break;
                }
            }
        }
    }

    #[test]
    fn one_sided_pushing_falls() {
        let mut env = CartPole::new();
        let mut seen = [0f32; 4];
        env.reset(0, ValuesMut::floats(&mut seen)).unwrap();
        let steps = (1..).find(|_| {
            let step = env.step(Values::ints(&[1]), ValuesMut::floats(&mut seen)).unwrap();
            assert_eq!(step.success, step.terminated.then_some(false));
            step.terminated
        });
        assert!((8..12).contains(&steps.unwrap()), "{steps:?}");
    }
}
