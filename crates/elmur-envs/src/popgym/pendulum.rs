//! PositionOnlyPendulum and NoisyPositionOnlyPendulum: Gymnasium's Pendulum with its speed hidden. Swing it up and keep it there.
//!
//! Observation: cosine and sine of the angle (0 is up), in the second task with normal noise and clipped to [-1, 1]. Action: a torque,
//! clipped to [-2, 2]. A step from angle a (wrapped to [-pi, pi)) and speed s with torque u pays (1 - 2 (a² + 0.1 s² + 0.001 u²) / c) / L
//! where c = pi² + 6.404 is the largest cost. Ends after L steps, never earlier.

use std::f64::consts::PI;

use elmur_rng::Rng;
use serde::Deserialize;

use super::noise;
use super::replay::{Replay, impossible, number};
use super::task::Difficulty;
use crate::env::{Env, Step};
use crate::error::{Error, Result};
use crate::space::{Space, Spaces, Values, ValuesMut};

mod player;

pub use player::{NoisyPositionOnlyPendulumPlayer, PositionOnlyPendulumPlayer};

const TAU: f64 = 0.05;
const MAX_SPEED: f64 = 8.0;
const MAX_TORQUE: f32 = 2.0;
/// Largest speed of a first state.
const START_SPEED: f64 = 1.0;
/// Half of the largest cost of a step.
const HALF_COST: f64 = (PI * PI + 0.1 * MAX_SPEED * MAX_SPEED + 0.001 * 4.0) / 2.0;
const NOISY_LIMIT: u32 = 200;

fn limit(difficulty: Difficulty) -> u32 {
    difficulty.pick([200, 150, 100])
}

/// The angle between -pi and pi.
#[inline]
fn wrap(angle: f64) -> f64 {
    (angle + PI).rem_euclid(2.0 * PI) - PI
}

/// What a step with this torque costs.
#[inline]
fn cost([angle, speed]: [f64; 2], torque: f32) -> f64 {
    let angle = wrap(angle);
    angle * angle + 0.1 * (speed * speed) + f64::from(0.001 * (torque * torque))
}

/// One step of the equations of motion. Products with the torque are rounded to single precision, as in the package.
#[inline]
fn swing([angle, speed]: [f64; 2], torque: f32) -> [f64; 2] {
    let speed = speed + (15.0 * angle.sin() + f64::from(3.0 * torque)) * TAU;
    let speed = speed.clamp(-MAX_SPEED, MAX_SPEED);
    [angle + speed * TAU, speed]
}

/// The first state.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct PendulumState {
    /// Angle, speed.
    pub state_f64: [f64; 2],
}

/// The first state and the noise on its observation.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct NoisyPendulumState {
    /// Angle, speed.
    pub state_f64: [f64; 2],
    /// Added to cosine and sine.
    pub reset_noise_f64: [f64; 2],
}

/// The pendulum and the rules that do not depend on what is observed.
#[derive(Debug, Clone)]
struct Pendulum {
    spaces: Spaces,
    state: [f64; 2],
    limit: u32,
    /// Steps left; 0 when no episode runs.
    left: u32,
    pay: f64,
}

impl Pendulum {
    fn new(limit: u32) -> Self {
        let spaces = Spaces {
            observation: Space::between(-1.0, 1.0, [2]),
            action: Space::between(-MAX_TORQUE, MAX_TORQUE, [1]),
        };
        Self { spaces, state: [0.0; 2], limit, left: 0, pay: 1.0 / f64::from(limit) }
    }

    #[inline]
    fn reset(&mut self, rng: &mut Rng) {
        self.state = [rng.uniform(-PI, PI), rng.uniform(-START_SPEED, START_SPEED)];
        self.left = self.limit;
    }

    fn begin(&mut self, state: [f64; 2]) -> Result<()> {
        let [angle, speed] = state;
        if !(angle.abs() <= PI && speed.abs() <= START_SPEED) {
            return impossible("an angle from -pi to pi and a speed from -1 to 1", format!("{state:?}"));
        }
        (self.state, self.left) = (state, self.limit);
        Ok(())
    }

    #[inline]
    fn step(&mut self, action: Values<'_>) -> Result<Step> {
        if self.left == 0 {
            return Err(Error::Finished);
        }
        let torque = number(action, "torque")?.clamp(-MAX_TORQUE, MAX_TORQUE);
        let reward = (1.0 - cost(self.state, torque) / HALF_COST) * self.pay;
        self.state = swing(self.state, torque);
        self.left -= 1;
        Ok(Step { reward, terminated: false, truncated: self.left == 0 })
    }

    #[inline]
    fn direction(&self) -> [f32; 2] {
        let (sin, cos) = self.state[0].sin_cos();
        [cos as f32, sin as f32]
    }
}

#[inline]
fn show(numbers: [f32; 2], observation: ValuesMut<'_>) {
    observation.floats.copy_from_slice(&numbers);
}

/// Swing the pendulum up from its angle.
#[derive(Debug, Clone)]
pub struct PositionOnlyPendulum(Pendulum);

impl PositionOnlyPendulum {
    /// The task of this difficulty: 200, 150 or 100 steps.
    pub fn new(difficulty: Difficulty) -> Self {
        Self(Pendulum::new(limit(difficulty)))
    }
}

impl Env for PositionOnlyPendulum {
    fn spaces(&self) -> &Spaces {
        &self.0.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) {
        self.0.reset(&mut Rng::new(seed, 0));
        show(self.0.direction(), observation);
    }

    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        self.advance(action, (), observation)
    }
}

impl Replay for PositionOnlyPendulum {
    type Hidden = PendulumState;
    type Draw = ();

    fn begin(&mut self, hidden: &PendulumState, observation: ValuesMut<'_>) -> Result<()> {
        self.0.begin(hidden.state_f64)?;
        show(self.0.direction(), observation);
        Ok(())
    }

    #[inline]
    fn advance(&mut self, action: Values<'_>, (): (), observation: ValuesMut<'_>) -> Result<Step> {
        let step = self.0.step(action)?;
        show(self.0.direction(), observation);
        Ok(step)
    }

    fn state(&self) -> &[f64] {
        &self.0.state
    }
}

/// Swing the pendulum up from its noisy angle.
#[derive(Debug, Clone)]
pub struct NoisyPositionOnlyPendulum {
    pendulum: Pendulum,
    sigma: f64,
    rng: Rng,
}

impl NoisyPositionOnlyPendulum {
    /// The task of this difficulty: 200 steps with noise of standard deviation 0.1, 0.2 or 0.3.
    pub fn new(difficulty: Difficulty) -> Self {
        Self { pendulum: Pendulum::new(NOISY_LIMIT), sigma: noise::sigma(difficulty), rng: Rng::new(0, 0) }
    }

    #[inline]
    fn show(&self, noise: [f64; 2], observation: ValuesMut<'_>) {
        let [cos, sin] = self.pendulum.direction();
        show([noise::noisy(cos, noise[0], 1.0), noise::noisy(sin, noise[1], 1.0)], observation);
    }
}

impl Env for NoisyPositionOnlyPendulum {
    fn spaces(&self) -> &Spaces {
        &self.pendulum.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) {
        self.rng = Rng::new(seed, 0);
        self.pendulum.reset(&mut self.rng);
        let noise = noise::draw(&mut self.rng, self.sigma);
        self.show(noise, observation);
    }

    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        let noise = noise::draw(&mut self.rng, self.sigma);
        self.advance(action, noise, observation)
    }
}

impl Replay for NoisyPositionOnlyPendulum {
    type Hidden = NoisyPendulumState;
    type Draw = [f64; 2];

    fn begin(&mut self, hidden: &NoisyPendulumState, observation: ValuesMut<'_>) -> Result<()> {
        noise::check(hidden.reset_noise_f64)?;
        self.pendulum.begin(hidden.state_f64)?;
        self.show(hidden.reset_noise_f64, observation);
        Ok(())
    }

    #[inline]
    fn advance(&mut self, action: Values<'_>, noise: [f64; 2], observation: ValuesMut<'_>) -> Result<Step> {
        noise::check(noise)?;
        let step = self.pendulum.step(action)?;
        self.show(noise, observation);
        Ok(step)
    }

    fn state(&self) -> &[f64] {
        &self.pendulum.state
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::popgym::trace::tests::check_family;

    #[test]
    fn traces_replay() {
        check_family("PositionOnlyPendulum", PositionOnlyPendulum::new);
        check_family("NoisyPositionOnlyPendulum", NoisyPositionOnlyPendulum::new);
    }
}
