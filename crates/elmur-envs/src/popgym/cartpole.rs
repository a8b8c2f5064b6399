//! PositionOnlyCartPole, VelocityOnlyCartpole and NoisyPositionOnlyCartPole: [`CartPole`](crate::CartPole)
//! with half of its state hidden.
//!
//! Observation: position and angle; or velocity and angular velocity, but position and angle at the start; or
//! position and angle with normal noise, clipped to twice the range in which the pole counts as up. Actions:
//! 0 left, 1 right. Every step of at most L pays 1/L, the one that fails included. Ends when the cart leaves
//! the track, when the pole falls, or after L steps.

use elmur_base::{Space, Spaces, Values};
use elmur_rng::Rng;

use super::body::{Body, Exact, Noisy};
use super::noise;
use super::replay::{choice, impossible};
use super::task::Difficulty;
use crate::cartpole::{FORCE, MAX_ANGLE, MAX_X, advance};
use crate::env::Step;
use crate::error::{Error, Result};

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

/// The cart and its rules. What is observed is position and angle, or with `VELOCITIES` the two velocities
/// after the first step.
#[derive(Debug, Clone)]
pub struct Cart<const VELOCITIES: bool> {
    spaces: Spaces,
    state: [f64; 4],
    limit: u32,
    /// Steps left; 0 when no episode runs.
    left: u32,
    pay: f64,
}

impl<const VELOCITIES: bool> Cart<VELOCITIES> {
    fn new(limit: u32) -> Self {
        let bounded =
            || Space::Box { shape: vec![2], low: BOUNDS.map(|b| -b).to_vec(), high: BOUNDS.to_vec() };
        let observation = if VELOCITIES { Space::unbounded([2]) } else { bounded() };
        let spaces = Spaces { observation, action: Space::Discrete { n: 2 } };
        Self { spaces, state: [0.0; 4], limit, left: 0, pay: 1.0 / f64::from(limit) }
    }
}

impl<const VELOCITIES: bool> Body for Cart<VELOCITIES> {
    /// Position, velocity, angle, angular velocity.
    type State = [f64; 4];

    const BOUNDS: [f32; 2] = BOUNDS;

    fn spaces(&self) -> &Spaces {
        &self.spaces
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

    // Into the loop over rows: 10% of its speed.
    #[inline(always)]
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
        Ok(Step { reward: self.pay, terminated, truncated, ..Step::default() })
    }

    #[inline]
    fn first_seen(&self) -> [f32; 2] {
        [self.state[0] as f32, self.state[2] as f32]
    }

    #[inline]
    fn seen(&self) -> [f32; 2] {
        if VELOCITIES { [self.state[1] as f32, self.state[3] as f32] } else { self.first_seen() }
    }

    fn state(&self) -> &[f64] {
        &self.state
    }
}

/// PositionOnlyCartPole: balance the pole from position and angle.
pub type PositionOnlyCartPole = Exact<Cart<false>>;

/// VelocityOnlyCartpole: balance the pole from velocity and angular velocity; the first observation is
/// position and angle.
pub type VelocityOnlyCartpole = Exact<Cart<true>>;

/// NoisyPositionOnlyCartPole: balance the pole from noisy position and angle.
pub type NoisyPositionOnlyCartPole = Noisy<Cart<false>>;

impl<const VELOCITIES: bool> Exact<Cart<VELOCITIES>> {
    /// The task of this difficulty: 200, 400 or 600 steps.
    pub fn new(difficulty: Difficulty) -> Self {
        Self(Cart::new(limit(difficulty)))
    }
}

impl Noisy<Cart<false>> {
    /// The task of this difficulty: 200 steps with noise of standard deviation 0.1, 0.2 or 0.3.
    pub fn new(difficulty: Difficulty) -> Self {
        Self::with(Cart::new(NOISY_LIMIT), noise::sigma(difficulty))
    }
}

#[cfg(test)]
mod tests {
    use elmur_base::ValuesMut;

    use super::*;
    use crate::env::{Env, Player};
    use crate::popgym::Replay;
    use crate::popgym::body::NoisyFirstState;
    use crate::popgym::trace::tests::{check_family, mean_return};

    fn start(env: &mut impl Env, seed: u64) -> [f32; 2] {
        let mut seen = [0.0; 2];
        env.reset(seed, ValuesMut::floats(&mut seen)).unwrap();
        seen
    }

    fn act(env: &mut impl Env, ints: &[i32]) -> Result<([f32; 2], Step)> {
        let mut seen = [0.0; 2];
        let step = env.step(Values::ints(ints), ValuesMut::floats(&mut seen))?;
        Ok((seen, step))
    }

    /// Plays `steps` steps of the player, then pushes right until the end; the number of steps and the last
    /// of them.
    fn play_then_push(env: &mut impl Env, player: &mut impl Player, seed: u64, steps: u32) -> (u32, Step) {
        let mut seen = start(env, seed);
        player.reset();
        for t in 0.. {
            let mut action = [1];
            if t < steps {
                let room = ValuesMut::ints(&mut action);
                player.act(Values::floats(&seen), room);
            }
            let (next, step) = act(env, &action).unwrap();
            seen = next;
            if step.done() {
                return (t + 1, step);
            }
        }
        unreachable!()
    }

    #[test]
    fn traces_replay() {
        check_family("PositionOnlyCartPole", PositionOnlyCartPole::new);
        check_family("VelocityOnlyCartpole", VelocityOnlyCartpole::new);
        check_family("NoisyPositionOnlyCartPole", NoisyPositionOnlyCartPole::new);
    }

    /// Chi-square with 19 degrees of freedom for each number of the state: 52 is passed once in 15,000.
    #[test]
    fn first_states_are_uniform() {
        let mut env = NoisyPositionOnlyCartPole::new(Difficulty::Easy);
        let (mut counts, n) = ([[0u32; 20]; 4], 20_000);
        for seed in 0..n {
            start(&mut env, seed);
            for (counts, x) in counts.iter_mut().zip(env.state()) {
                counts[((x / START + 1.0) * 10.0) as usize] += 1;
            }
        }
        for counts in counts {
            let chi: f64 = counts.iter().map(|c| (f64::from(*c) - 1e3).powi(2) / 1e3).sum();
            assert!(chi < 52.0, "{chi}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_episode() {
        let mut env = NoisyPositionOnlyCartPole::new(Difficulty::Hard);
        let mut episode = |seed| {
            let mut all = vec![start(&mut env, seed)];
            all.extend((0..8).map(|t| act(&mut env, &[t % 2]).unwrap().0));
            all
        };
        let (first, other, again) = (episode(3), episode(4), episode(3));
        assert_eq!(first, again);
        assert!(first.iter().zip(&other).all(|(a, b)| a != b));
    }

    #[test]
    fn velocities_are_shown_from_the_first_step_on() {
        let mut env = VelocityOnlyCartpole::new(Difficulty::Easy);
        let seen = start(&mut env, 5);
        assert_eq!(seen, [env.state()[0] as f32, env.state()[2] as f32]);
        let (seen, _) = act(&mut env, &[1]).unwrap();
        assert_eq!(seen, [env.state()[1] as f32, env.state()[3] as f32]);
    }

    #[test]
    fn noise_is_added_to_positions_and_clipped() {
        let mut env = NoisyPositionOnlyCartPole::new(Difficulty::Hard);
        let (n, mut square, mut clipped) = (10_000, 0.0, 0);
        for seed in 0..n {
            let [x, angle] = start(&mut env, seed);
            square += (f64::from(x) - env.state()[0]).powi(2);
            clipped += u32::from(angle.abs() == BOUNDS[1]);
            assert!(angle.abs() <= BOUNDS[1]);
        }
        let (deviation, clipped) = ((square / n as f64).sqrt(), f64::from(clipped) / n as f64);
        assert!((deviation - 0.3).abs() < 0.01, "{deviation}");
        // Two tails beyond 0.419 / 0.3 standard deviations.
        assert!((clipped - 0.163).abs() < 0.016, "{clipped}");
    }

    #[test]
    fn every_step_pays_and_both_ends_can_coincide() {
        for difficulty in Difficulty::ALL {
            let mut env = PositionOnlyCartPole::new(difficulty);
            let mut player = PositionOnlyCartPolePlayer::new(difficulty);
            let limit = limit(difficulty);
            let pay = 1.0 / f64::from(limit);
            let (steps, step) = play_then_push(&mut env, &mut player, 0, 0);
            assert!((8..12).contains(&steps), "{steps}");
            assert_eq!(step, Step { reward: pay, terminated: true, ..Step::default() });
            assert!(matches!(act(&mut env, &[0]), Err(Error::Finished)));
            let (steps, step) = play_then_push(&mut env, &mut player, 0, limit);
            assert_eq!((steps, step), (limit, Step { reward: pay, truncated: true, ..Step::default() }));
            let both = (0..200)
                .map(|i| play_then_push(&mut env, &mut player, i / 20, limit - i as u32 % 20))
                .find(|(steps, step)| *steps == limit && step.terminated);
            assert_eq!(
                both,
                Some((limit, Step { reward: pay, terminated: true, truncated: true, ..Step::default() }))
            );
        }
    }

    #[test]
    fn players_that_can_know_the_state_never_fall() {
        for difficulty in Difficulty::ALL {
            let mut player = PositionOnlyCartPolePlayer::new(difficulty);
            let (mean, error) = mean_return(&mut PositionOnlyCartPole::new(difficulty), &mut player, 0..100);
            assert!((mean - 1.0).abs() < 1e-9 && error < 1e-9, "{mean}");
            let mut player = VelocityOnlyCartpolePlayer::new(difficulty);
            let (mean, error) = mean_return(&mut VelocityOnlyCartpole::new(difficulty), &mut player, 0..100);
            assert!((mean - 1.0).abs() < 1e-9 && error < 1e-9, "{mean}");
        }
    }

    /// Means of 6,000 episodes.
    #[test]
    fn the_noisy_player_reaches_its_mean_return() {
        for (difficulty, expected) in Difficulty::ALL.into_iter().zip([0.997, 0.658, 0.400]) {
            let mut player = NoisyPositionOnlyCartPolePlayer::new(difficulty);
            let mut env = NoisyPositionOnlyCartPole::new(difficulty);
            let (mean, error) = mean_return(&mut env, &mut player, 0..100);
            assert!((mean - expected).abs() < 4.0 * error.max(0.003), "{difficulty:?}: {mean} {error}");
            // Nothing is left of earlier episodes.
            let again = mean_return(&mut env, &mut player, 90..100);
            let fresh = mean_return(&mut env, &mut NoisyPositionOnlyCartPolePlayer::new(difficulty), 90..100);
            assert_eq!(again, fresh);
        }
    }

    #[test]
    fn misuse_is_an_error() {
        let mut env = NoisyPositionOnlyCartPole::new(Difficulty::Easy);
        assert!(matches!(act(&mut env, &[0]), Err(Error::Finished)));
        start(&mut env, 0);
        for bad in [&[2][..], &[-1], &[], &[0, 0]] {
            assert!(matches!(act(&mut env, bad), Err(Error::Base(elmur_base::Error::Space { .. }))));
        }
        let mut seen = [0.0; 2];
        let room = ValuesMut::floats(&mut seen);
        assert!(env.advance(Values::ints(&[0]), [0.0, f64::NAN], room).is_err());
        act(&mut env, &[0]).unwrap();

        let mut begin = |state_f64, reset_noise_f64| {
            let hidden = NoisyFirstState { state_f64, reset_noise_f64 };
            env.begin(&hidden, ValuesMut::floats(&mut seen))
        };
        assert!(begin([0.05, -0.05, 0.0, 0.0], [0.0; 2]).is_ok());
        for bad in [0.051, -0.06, f64::NAN, f64::INFINITY] {
            assert!(begin([0.0, 0.0, bad, 0.0], [0.0; 2]).is_err(), "{bad}");
        }
        assert!(begin([0.0; 4], [f64::NEG_INFINITY, 0.0]).is_err());
    }
}
