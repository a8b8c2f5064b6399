//! PositionOnlyPendulum and NoisyPositionOnlyPendulum: Gymnasium's Pendulum with its speed hidden. Swing it
//! up and keep it there.
//!
//! Observation: cosine and sine of the angle (0 is up), in the second task with normal noise and clipped to
//! [-1, 1]. Action: a torque, clipped to [-2, 2]. A step from angle a (wrapped to [-pi, pi)) and speed s with
//! torque u pays (1 - 2 (a² + 0.1 s² + 0.001 u²) / c) / L where c = pi² + 6.404 is the largest cost. Ends
//! after L steps, never earlier.
//!
//! With `env.velocity=true` PositionOnlyPendulum shows the speed too, for policies without memory.

use std::f64::consts::PI;

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_rng::Rng;

use super::body::{Body, Exact, Noisy};
use super::noise;
use super::replay::{impossible, number};
use super::task::Difficulty;
use crate::env::{Env, Step};
use crate::error::{Error, Result};

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

/// One step of the equations of motion. Products with the torque are rounded to single precision, as in the
/// package.
#[inline]
fn swing([angle, speed]: [f64; 2], torque: f32) -> [f64; 2] {
    let speed = speed + (15.0 * angle.sin() + f64::from(3.0 * torque)) * TAU;
    let speed = speed.clamp(-MAX_SPEED, MAX_SPEED);
    [angle + speed * TAU, speed]
}

/// The pendulum and its rules.
#[derive(Debug, Clone)]
pub struct Pendulum {
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
}

impl Body for Pendulum {
    /// Angle, speed.
    type State = [f64; 2];

    const BOUNDS: [f32; 2] = [1.0; 2];

    fn spaces(&self) -> &Spaces {
        &self.spaces
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

    // Into the loop over rows: 10% of its speed.
    #[inline(always)]
    fn step(&mut self, action: Values<'_>) -> Result<Step> {
        if self.left == 0 {
            return Err(Error::Finished);
        }
        let torque = number(action, "torque")?.clamp(-MAX_TORQUE, MAX_TORQUE);
        let reward = (1.0 - cost(self.state, torque) / HALF_COST) * self.pay;
        self.state = swing(self.state, torque);
        self.left -= 1;
        Ok(Step { reward, truncated: self.left == 0, ..Step::default() })
    }

    #[inline]
    fn first_seen(&self) -> [f32; 2] {
        let (sin, cos) = self.state[0].sin_cos();
        [cos as f32, sin as f32]
    }

    fn state(&self) -> &[f64] {
        &self.state
    }
}

/// PositionOnlyPendulum: swing the pendulum up from its angle.
pub type PositionOnlyPendulum = Exact<Pendulum>;

/// NoisyPositionOnlyPendulum: swing the pendulum up from its noisy angle.
pub type NoisyPositionOnlyPendulum = Noisy<Pendulum>;

impl Exact<Pendulum> {
    /// The task of this difficulty: 200, 150 or 100 steps.
    pub fn new(difficulty: Difficulty) -> Self {
        Self(Pendulum::new(limit(difficulty)))
    }
}

/// PositionOnlyPendulum that shows its speed: observations are cosine, sine and speed.
#[derive(Debug, Clone)]
pub(super) struct PendulumWithVelocity {
    spaces: Spaces,
    pendulum: PositionOnlyPendulum,
}

impl PendulumWithVelocity {
    /// The task of this difficulty: 200, 150 or 100 steps.
    pub fn new(difficulty: Difficulty) -> Self {
        let pendulum = PositionOnlyPendulum::new(difficulty);
        let largest = [1.0, 1.0, MAX_SPEED as f32];
        let observation =
            Space::Box { shape: vec![3], low: largest.map(|x| -x).to_vec(), high: largest.to_vec() };
        let spaces = Spaces { observation, action: pendulum.spaces().action.clone() };
        Self { spaces, pendulum }
    }

    fn show(&self, observation: ValuesMut<'_>) {
        let [cos, sin] = self.pendulum.0.seen();
        observation.floats.copy_from_slice(&[cos, sin, self.pendulum.0.state[1] as f32]);
    }
}

impl Env for PendulumWithVelocity {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
        self.pendulum.0.reset(&mut Rng::new(seed, 0));
        self.show(observation);
        Ok(())
    }

    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        let step = self.pendulum.0.step(action)?;
        self.show(observation);
        Ok(step)
    }
}

impl Noisy<Pendulum> {
    /// The task of this difficulty: 200 steps with noise of standard deviation 0.1, 0.2 or 0.3.
    pub fn new(difficulty: Difficulty) -> Self {
        Self::with(Pendulum::new(NOISY_LIMIT), noise::sigma(difficulty))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::popgym::Replay;
    use crate::popgym::body::{FirstState, NoisyFirstState};
    use crate::popgym::trace::tests::{check_family, mean_return};

    fn start(env: &mut impl Env, seed: u64) -> [f32; 2] {
        let mut seen = [0.0; 2];
        env.reset(seed, ValuesMut::floats(&mut seen)).unwrap();
        seen
    }

    fn act(env: &mut impl Env, floats: &[f32]) -> Result<([f32; 2], Step)> {
        let mut seen = [0.0; 2];
        let step = env.step(Values::floats(floats), ValuesMut::floats(&mut seen))?;
        Ok((seen, step))
    }

    #[test]
    fn traces_replay() {
        check_family("PositionOnlyPendulum", PositionOnlyPendulum::new);
        check_family("NoisyPositionOnlyPendulum", NoisyPositionOnlyPendulum::new);
    }

    /// Chi-square with 19 degrees of freedom for angle and speed: 52 is passed once in 15,000.
    #[test]
    fn first_states_are_uniform() {
        let mut env = PositionOnlyPendulum::new(Difficulty::Easy);
        let (mut counts, n) = ([[0u32; 20]; 2], 20_000);
        for seed in 0..n {
            start(&mut env, seed);
            for ((counts, x), largest) in counts.iter_mut().zip(env.state()).zip([PI, 1.0]) {
                counts[((x / largest + 1.0) * 10.0) as usize] += 1;
            }
        }
        for counts in counts {
            let chi: f64 = counts.iter().map(|c| (f64::from(*c) - 1e3).powi(2) / 1e3).sum();
            assert!(chi < 52.0, "{chi}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_episode() {
        let mut env = NoisyPositionOnlyPendulum::new(Difficulty::Medium);
        let mut episode = |seed| {
            let mut all = vec![start(&mut env, seed)];
            all.extend((0..100).map(|_| act(&mut env, &[1.0]).unwrap().0));
            all
        };
        let (first, other, again) = (episode(3), episode(4), episode(3));
        assert_eq!(first, again);
        assert_ne!(first, other);
    }

    #[test]
    fn noise_is_added_to_the_direction_and_clipped() {
        let mut env = NoisyPositionOnlyPendulum::new(Difficulty::Hard);
        let (n, mut sum, mut square, mut clipped) = (10_000, 0.0, 0.0, 0);
        for seed in 0..n {
            let seen = start(&mut env, seed);
            let (sin, cos) = env.state()[0].sin_cos();
            if cos.abs() < 0.1 {
                (sum, square) = (sum + 1.0, square + (f64::from(seen[0]) - cos).powi(2));
                clipped += u32::from(seen[1].abs() == 1.0 && f64::from(seen[1]) * sin > 0.0);
            }
            assert!(seen.iter().all(|x| x.abs() <= 1.0));
        }
        let (deviation, clipped) = ((square / sum).sqrt(), f64::from(clipped) / sum);
        assert!((deviation - 0.3).abs() < 0.035, "{deviation}");
        assert!((clipped - 0.5).abs() < 0.08, "{clipped}");
    }

    #[test]
    fn episodes_end_after_the_last_step_and_only_then() {
        for difficulty in Difficulty::ALL {
            let mut env = PositionOnlyPendulum::new(difficulty);
            start(&mut env, 0);
            for t in 1..=limit(difficulty) {
                let (_, step) = act(&mut env, &[2.0]).unwrap();
                assert_eq!((step.terminated, step.truncated), (false, t == limit(difficulty)));
            }
            assert!(matches!(act(&mut env, &[0.0]), Err(Error::Finished)));
        }
    }

    /// Numbers worked out by hand from the published equations.
    #[test]
    fn rewards_and_motion_are_those_of_the_equations() {
        let mut env = PositionOnlyPendulum::new(Difficulty::Hard);
        let mut seen = [0.0; 2];
        let mut from = |state_f64, torque| {
            env.begin(&FirstState { state_f64 }, ValuesMut::floats(&mut seen)).unwrap();
            let (_, step) = act(&mut env, &[torque]).unwrap();
            (step.reward, [env.state()[0], env.state()[1]])
        };
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-7, "{a} {b}");
        let (reward, state) = from([0.0; 2], 0.0);
        assert_eq!((reward, state), (0.01, [0.0; 2]));
        let (reward, [angle, speed]) = from([PI, 1.0], 2.0);
        close(reward, 0.01 * (1.0 - (9.869_604_401 + 0.1 + 0.004) / 8.136_802_2));
        close(speed, 1.3);
        close(angle, PI + 0.065);
        // A larger torque counts as the largest.
        assert_eq!(from([1.0, 0.5], 7.0), from([1.0, 0.5], 2.0));
        assert_eq!(from([1.0, 0.5], f32::MIN), from([1.0, 0.5], -2.0));
        assert_eq!(swing([PI / 2.0, 7.9], 2.0)[1], 8.0);
        close(wrap(4.0 * PI + 0.5), 0.5);
        close(wrap(-3.5 * PI), 0.5 * PI);
        assert_eq!(wrap(PI), -PI);
    }

    /// Means of 20,000 episodes; with the state known from the start the best possible are about 0.915, 0.887
    /// and 0.830.
    #[test]
    fn the_player_is_nearly_perfect() {
        for (difficulty, expected) in Difficulty::ALL.into_iter().zip([0.9146, 0.8862, 0.8292]) {
            let mut player = PositionOnlyPendulumPlayer::new(difficulty);
            let (mean, error) = mean_return(&mut PositionOnlyPendulum::new(difficulty), &mut player, 0..1000);
            assert!((mean - expected).abs() < 4.0 * error, "{difficulty:?}: {mean} {error}");
        }
    }

    /// Means of 6,000 episodes.
    #[test]
    fn the_noisy_player_reaches_its_mean_return() {
        for (difficulty, expected) in Difficulty::ALL.into_iter().zip([0.902, 0.766, 0.704]) {
            let mut player = NoisyPositionOnlyPendulumPlayer::new(difficulty);
            let mut env = NoisyPositionOnlyPendulum::new(difficulty);
            let (mean, error) = mean_return(&mut env, &mut player, 0..60);
            assert!((mean - expected).abs() < 4.0 * error, "{difficulty:?}: {mean} {error}");
            // Nothing is left of earlier episodes.
            let again = mean_return(&mut env, &mut player, 55..60);
            let fresh = mean_return(&mut env, &mut NoisyPositionOnlyPendulumPlayer::new(difficulty), 55..60);
            assert_eq!(again, fresh);
        }
    }

    /// The same episode with and without the speed; the player that sees it plays as well, and knows it at the
    /// first step.
    #[test]
    fn the_speed_is_shown_beside_the_direction() {
        let (mut env, mut hidden) =
            (PendulumWithVelocity::new(Difficulty::Easy), PositionOnlyPendulum::new(Difficulty::Easy));
        let mut seen = [0.0; 3];
        env.reset(7, ValuesMut::floats(&mut seen)).unwrap();
        let direction = start(&mut hidden, 7);
        assert_eq!(seen, [direction[0], direction[1], hidden.state()[1] as f32]);
        for torque in [2.0, -1.0, 0.5] {
            let step = env.step(Values::floats(&[torque]), ValuesMut::floats(&mut seen)).unwrap();
            let (direction, same) = act(&mut hidden, &[torque]).unwrap();
            assert_eq!((seen[..2].to_vec(), step.reward), (direction.to_vec(), same.reward));
            assert_eq!(seen[2], hidden.state()[1] as f32);
        }
        for (difficulty, expected) in Difficulty::ALL.into_iter().zip([0.9146, 0.8862, 0.8292]) {
            let mut player = PositionOnlyPendulumPlayer::new(difficulty);
            let (mean, error) = mean_return(&mut PendulumWithVelocity::new(difficulty), &mut player, 0..1000);
            assert!((mean - expected).abs() < 4.0 * error, "{difficulty:?}: {mean} {error}");
        }
    }

    #[test]
    fn misuse_is_an_error() {
        let mut env = NoisyPositionOnlyPendulum::new(Difficulty::Easy);
        assert!(matches!(act(&mut env, &[0.0]), Err(Error::Finished)));
        start(&mut env, 0);
        for bad in [&[f32::NAN][..], &[f32::INFINITY], &[f32::NEG_INFINITY], &[], &[0.0, 0.0]] {
            assert!(matches!(act(&mut env, bad), Err(Error::Base(elmur_base::Error::Space { .. }))));
        }
        let mut seen = [0.0; 2];
        let room = ValuesMut::floats(&mut seen);
        assert!(env.advance(Values::floats(&[0.0]), [f64::NAN, 0.0], room).is_err());
        act(&mut env, &[0.0]).unwrap();

        let mut begin = |state_f64, reset_noise_f64| {
            let hidden = NoisyFirstState { state_f64, reset_noise_f64 };
            env.begin(&hidden, ValuesMut::floats(&mut seen))
        };
        assert!(begin([-PI, 1.0], [0.0; 2]).is_ok());
        for bad in [[3.2, 0.0], [0.0, -1.01], [f64::NAN, 0.0], [0.0, f64::NAN]] {
            assert!(begin(bad, [0.0; 2]).is_err(), "{bad:?}");
        }
        assert!(begin([0.0; 2], [0.0, f64::INFINITY]).is_err());
    }
}
