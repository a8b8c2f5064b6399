//! What the control tasks share: a body moves by its action, and two numbers of it are seen, exactly or through noise.

use std::fmt::Debug;

use elmur_base::{Spaces, Values, ValuesMut};
use elmur_rng::Rng;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::noise;
use super::replay::Replay;
use crate::env::{Env, Step};
use crate::error::Result;

/// A body that moves by its action, with rules that do not depend on what is seen of it.
pub trait Body: Debug + Clone + Send {
    /// Its state, an array of numbers.
    type State: DeserializeOwned + Debug + Clone + Copy;

    /// Largest numbers that are seen through noise.
    const BOUNDS: [f32; 2];

    /// What is seen and done.
    fn spaces(&self) -> &Spaces;
    /// Begins an episode in a random state.
    fn reset(&mut self, rng: &mut Rng);
    /// Begins an episode in this state, if one can begin so.
    fn begin(&mut self, state: Self::State) -> Result<()>;
    /// Moves.
    fn step(&mut self, action: Values<'_>) -> Result<Step>;
    /// What is seen of it at the start of an episode.
    fn first_seen(&self) -> [f32; 2];
    /// What is seen of it after a step.
    fn seen(&self) -> [f32; 2] {
        self.first_seen()
    }
    /// Its state in full precision.
    fn state(&self) -> &[f64];
}

/// A first state in a trace.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct FirstState<S> {
    /// The state.
    pub state_f64: S,
}

/// A first state in a trace, and the noise on its observation.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct NoisyFirstState<S> {
    /// The state.
    pub state_f64: S,
    /// Added to the two numbers.
    pub reset_noise_f64: [f64; 2],
}

#[inline]
fn show(numbers: [f32; 2], observation: ValuesMut<'_>) {
    observation.floats.copy_from_slice(&numbers);
}

/// A body seen exactly.
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

/// A body seen through normal noise, clipped to its bounds.
#[derive(Debug, Clone)]
pub struct Noisy<B> {
    body: B,
    sigma: f64,
    rng: Rng,
}

impl<B: Body> Noisy<B> {
    /// With noise of this standard deviation.
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
