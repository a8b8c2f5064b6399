//! PositionOnlyCartPole, VelocityOnlyCartpole and NoisyPositionOnlyCartPole: [`CartPole`](crate::CartPole) with half of its state
//! hidden.
//!
//! Observation: position and angle; or velocity and angular velocity, but position and angle at the start; or position and angle
//! with normal noise, clipped to twice the range in which the pole counts as up. Actions: 0 left, 1 right. Every step of at most L
//! pays 1/L, the one that fails included. Ends when the cart leaves the track, when the pole falls, or after L steps.

use elmur_rng::Rng;
use serde::Deserialize;

use super::noise;
use super::replay::{Replay, choice, impossible};
use super::task::Difficulty;
use crate::cartpole::{FORCE, MAX_ANGLE, MAX_X, advance};
use crate::env::{Env, Step};
use crate::error::{Error, Result};
use crate::space::{Space, Spaces, Values, ValuesMut};

mod player;

pub use player::{NoisyPositionOnlyCartPolePlayer, PositionOnlyCartPolePlayer, VelocityOnlyCartpolePlayer};

/// Largest number of a first state.
const START: f64 = 0.05;
/// Largest observed position and angle.
const BOUNDS: [f32; 2] = [2.0 * MAX_X as f32, 2.0 * MAX_ANGLE as f32];
const NOISY_LIMIT: u32 = 200;

fn limit(difficulty: Difficulty) -> u32 {
    difficulty.pick([200, 400, 600])
}

/// The first state.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct CartState {
    /// Position, velocity, angle, angular velocity.
    pub state_f64: [f64; 4],
}

/// The first state and the noise on its observation.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct NoisyCartState {
    /// Position, velocity, angle, angular velocity.
    pub state_f64: [f64; 4],
    /// Added to position and angle.
    pub reset_noise_f64: [f64; 2],
}

/// The cart and the rules that do not depend on what is observed.
#[derive(Debug, Clone)]
struct Cart {
    spaces: Spaces,
    state: [f64; 4],
    limit: u32,
    /// Steps left; 0 when no episode runs.
    left: u32,
    pay: f64,
}

impl Cart {
    fn new(limit: u32, observation: Space) -> Self {
        let spaces = Spaces { observation, action: Space::Discrete { n: 2 } };
        Self { spaces, state: [0.0; 4], limit, left: 0, pay: 1.0 / f64::from(limit) }
    }

    #[inline]
    fn reset(&mut self, rng: &mut Rng) {
        self.state = std::array::from_fn(|_| rng.uniform(-START, START));
        self.left = self.limit;
    }

    fn begin(&mut self, state: [f64; 4]) -> Result<()> {
        if !state.iter().all(|x| x.abs() <= START) {
            return impossible(format!("numbers from -{START} to {START}"), format!("{state:?}"));
        }
        (self.state, self.left) = (state, self.limit);
        Ok(())
    }

    #[inline]
    fn step(&mut self, action: Values<'_>) -> Result<Step> {
        if self.left == 0 {
            return Err(Error::Finished);
        }
        let force = if choice(action, 2, "push")? == 1 { FORCE } else { -FORCE };
        self.state = advance(self.state, force);
        self.left -= 1;
        let truncated = self.left == 0;
        let [x, _, angle, _] = self.state;
        let terminated = x.abs() > MAX_X || angle.abs() > MAX_ANGLE;
        if terminated {
            self.left = 0;
        }
        Ok(Step { reward: self.pay, terminated, truncated })
    }

    #[inline]
    fn positions(&self) -> [f32; 2] {
        [self.state[0] as f32, self.state[2] as f32]
    }

    #[inline]
    fn velocities(&self) -> [f32; 2] {
        [self.state[1] as f32, self.state[3] as f32]
    }
}

fn bounded() -> Space {
    Space::Box { shape: vec![2], low: BOUNDS.map(|b| -b).to_vec(), high: BOUNDS.to_vec() }
}

#[inline]
fn show(numbers: [f32; 2], observation: ValuesMut<'_>) {
    observation.floats.copy_from_slice(&numbers);
}

/// Balance the pole from position and angle.
#[derive(Debug, Clone)]
pub struct PositionOnlyCartPole(Cart);

impl PositionOnlyCartPole {
    /// The task of this difficulty: 200, 400 or 600 steps.
    pub fn new(difficulty: Difficulty) -> Self {
        Self(Cart::new(limit(difficulty), bounded()))
    }
}

impl Env for PositionOnlyCartPole {
    fn spaces(&self) -> &Spaces {
        &self.0.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) {
        self.0.reset(&mut Rng::new(seed, 0));
        show(self.0.positions(), observation);
    }

    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        self.advance(action, (), observation)
    }
}

impl Replay for PositionOnlyCartPole {
    type Hidden = CartState;
    type Draw = ();

    fn begin(&mut self, hidden: &CartState, observation: ValuesMut<'_>) -> Result<()> {
        self.0.begin(hidden.state_f64)?;
        show(self.0.positions(), observation);
        Ok(())
    }

    #[inline]
    fn advance(&mut self, action: Values<'_>, (): (), observation: ValuesMut<'_>) -> Result<Step> {
        let step = self.0.step(action)?;
        show(self.0.positions(), observation);
        Ok(step)
    }

    fn state(&self) -> &[f64] {
        &self.0.state
    }
}

/// Balance the pole from velocity and angular velocity; the first observation is position and angle.
#[derive(Debug, Clone)]
pub struct VelocityOnlyCartpole(Cart);

impl VelocityOnlyCartpole {
    /// The task of this difficulty: 200, 400 or 600 steps.
    pub fn new(difficulty: Difficulty) -> Self {
        Self(Cart::new(limit(difficulty), Space::unbounded([2])))
    }
}

impl Env for VelocityOnlyCartpole {
    fn spaces(&self) -> &Spaces {
        &self.0.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) {
        self.0.reset(&mut Rng::new(seed, 0));
        show(self.0.positions(), observation);
    }

    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        self.advance(action, (), observation)
    }
}

impl Replay for VelocityOnlyCartpole {
    type Hidden = CartState;
    type Draw = ();

    fn begin(&mut self, hidden: &CartState, observation: ValuesMut<'_>) -> Result<()> {
        self.0.begin(hidden.state_f64)?;
        show(self.0.positions(), observation);
        Ok(())
    }

    #[inline]
    fn advance(&mut self, action: Values<'_>, (): (), observation: ValuesMut<'_>) -> Result<Step> {
        let step = self.0.step(action)?;
        show(self.0.velocities(), observation);
        Ok(step)
    }

    fn state(&self) -> &[f64] {
        &self.0.state
    }
}

/// Balance the pole from noisy position and angle.
#[derive(Debug, Clone)]
pub struct NoisyPositionOnlyCartPole {
    cart: Cart,
    sigma: f64,
    rng: Rng,
}

impl NoisyPositionOnlyCartPole {
    /// The task of this difficulty: 200 steps with noise of standard deviation 0.1, 0.2 or 0.3.
    pub fn new(difficulty: Difficulty) -> Self {
        Self { cart: Cart::new(NOISY_LIMIT, bounded()), sigma: noise::sigma(difficulty), rng: Rng::new(0, 0) }
    }

    #[inline]
    fn show(&self, noise: [f64; 2], observation: ValuesMut<'_>) {
        let [x, angle] = self.cart.positions();
        let seen = [noise::noisy(x, noise[0], BOUNDS[0]), noise::noisy(angle, noise[1], BOUNDS[1])];
        show(seen, observation);
    }
}

impl Env for NoisyPositionOnlyCartPole {
    fn spaces(&self) -> &Spaces {
        &self.cart.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) {
        self.rng = Rng::new(seed, 0);
        self.cart.reset(&mut self.rng);
        let noise = noise::draw(&mut self.rng, self.sigma);
        self.show(noise, observation);
    }

    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        let noise = noise::draw(&mut self.rng, self.sigma);
        self.advance(action, noise, observation)
    }
}

impl Replay for NoisyPositionOnlyCartPole {
    type Hidden = NoisyCartState;
    type Draw = [f64; 2];

    fn begin(&mut self, hidden: &NoisyCartState, observation: ValuesMut<'_>) -> Result<()> {
        noise::check(hidden.reset_noise_f64)?;
        self.cart.begin(hidden.state_f64)?;
        self.show(hidden.reset_noise_f64, observation);
        Ok(())
    }

    #[inline]
    fn advance(&mut self, action: Values<'_>, noise: [f64; 2], observation: ValuesMut<'_>) -> Result<Step> {
        noise::check(noise)?;
        let step = self.cart.step(action)?;
        self.show(noise, observation);
        Ok(step)
    }

    fn state(&self) -> &[f64] {
        &self.cart.state
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::popgym::trace::tests::check_family;

    #[test]
    fn traces_replay() {
        check_family("PositionOnlyCartPole", PositionOnlyCartPole::new);
        check_family("VelocityOnlyCartpole", VelocityOnlyCartpole::new);
        check_family("NoisyPositionOnlyCartPole", NoisyPositionOnlyCartPole::new);
    }
}
