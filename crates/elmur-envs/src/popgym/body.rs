//! What the control tasks share: a body that is moved by actions, of which two numbers are observed, exactly
//! or with noise.

use std::fmt::Debug;

use elmur_base::{Spaces, Values, ValuesMut};
use elmur_rng::Rng;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::noise;
use super::replay::Replay;
use crate::env::{Env, Step};
use crate::error::Result;

/// A body that is moved by actions, with rules that do not depend on what is observed of it.
pub trait Body: Debug + Clone + Send {
    /// State of the body, an array of numbers.
    type State: DeserializeOwned + Debug + Clone + Copy;

    /// Bounds of the two observed numbers, where noise is added.
    const BOUNDS: [f32; 2];

    /// The observation and action spaces.
    fn spaces(&self) -> &Spaces;
    /// Starts an episode in a random state.
    fn reset(&mut self, rng: &mut Rng);
    /// Starts an episode in this state; an error if no episode can start in it.
    fn begin(&mut self, state: Self::State) -> Result<()>;
    /// Moves the body by an action.
    fn step(&mut self, action: Values<'_>) -> Result<Step>;
    /// The two observed numbers at the start of an episode.
    fn first_seen(&self) -> [f32; 2];
    /// The two observed numbers after a step.
    fn seen(&self) -> [f32; 2] {
        self.first_seen()
    }
    /// State of the body in full precision.
    fn state(&self) -> &[f64];
}

/// The hidden state of a trace: the first state.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct FirstState<S> {
    /// First state.
    pub state_f64: S,
}

/// The hidden state of a trace: the first state, and the noise on its observation.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct NoisyFirstState<S> {
    /// First state.
    pub state_f64: S,
    /// Noise on the two numbers of the first observation.
    pub reset_noise_f64: [f64; 2],
}

#[inline]
fn show(numbers: [f32; 2], observation: ValuesMut<'_>) {
    observation.floats.copy_from_slice(&numbers);
}

/// A body that is observed exactly.
#[derive(Debug, Clone)]
pub struct Exact<B>(pub(super) B);

impl<B: Body> Env for Exact<B> {
    fn spaces(&self) -> &Spaces {
        self.0.spaces()
    }

    #[inline]
    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
        self.0.reset(&mut Rng::new(seed, 0));
        show(self.0.first_seen(), observation);
        Ok(())
    }

    #[inline]
    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        self.advance(action, (), observation)
    }
}

impl<B: Body> Replay for Exact<B> {
    type Hidden = FirstState<B::State>;
    type Draw = ();

    fn begin(&mut self, hidden: &Self::Hidden, observation: ValuesMut<'_>) -> Result<()> {
        self.0.begin(hidden.state_f64)?;
        show(self.0.first_seen(), observation);
        Ok(())
    }

    #[inline]
    fn advance(&mut self, action: Values<'_>, (): (), observation: ValuesMut<'_>) -> Result<Step> {
        let step = self.0.step(action)?;
        show(self.0.seen(), observation);
        Ok(step)
    }

    fn state(&self) -> &[f64] {
        self.0.state()
    }
}

/// A body that is observed with normal noise, clipped to its bounds.
#[derive(Debug, Clone)]
pub struct Noisy<B> {
    body: B,
    sigma: f64,
    rng: Rng,
}

impl<B: Body> Noisy<B> {
    /// A body that is observed with noise of this standard deviation.
    pub(super) fn with(body: B, sigma: f64) -> Self {
        Self { body, sigma, rng: Rng::new(0, 0) }
    }

    #[inline]
    fn show(numbers: [f32; 2], noise: [f64; 2], observation: ValuesMut<'_>) {
        show(std::array::from_fn(|i| noise::noisy(numbers[i], noise[i], B::BOUNDS[i])), observation);
    }
}

impl<B: Body> Env for Noisy<B> {
    fn spaces(&self) -> &Spaces {
        self.body.spaces()
    }

    #[inline]
    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
        self.rng = Rng::new(seed, 0);
        self.body.reset(&mut self.rng);
        let noise = noise::draw(&mut self.rng, self.sigma);
        Self::show(self.body.first_seen(), noise, observation);
        Ok(())
    }

    #[inline]
    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        let noise = noise::draw(&mut self.rng, self.sigma);
        self.advance(action, noise, observation)
    }
}

impl<B: Body> Replay for Noisy<B> {
    type Hidden = NoisyFirstState<B::State>;
    type Draw = [f64; 2];

    fn begin(&mut self, hidden: &Self::Hidden, observation: ValuesMut<'_>) -> Result<()> {
        noise::check(hidden.reset_noise_f64)?;
        self.body.begin(hidden.state_f64)?;
        Self::show(self.body.first_seen(), hidden.reset_noise_f64, observation);
        Ok(())
    }

    #[inline]
    fn advance(&mut self, action: Values<'_>, noise: [f64; 2], observation: ValuesMut<'_>) -> Result<Step> {
        noise::check(noise)?;
        let step = self.body.step(action)?;
        Self::show(self.body.seen(), noise, observation);
        Ok(step)
    }

    fn state(&self) -> &[f64] {
        self.body.state()
    }
}
