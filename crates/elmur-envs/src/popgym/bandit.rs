//! MultiarmedBandit: find the arm that pays best and keep pulling it.
//!
//! 10, 20 or 30 arms, each with its own chance of a payout, uniform in [0, 1) and fixed for the episode.
//! Observation: whether the last pull paid (0 at the start). A payout earns 1/L and a miss costs as much,
//! with L = 200, 400 or 600 pulls, after which the episode is cut off.

use std::sync::OnceLock;

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_rng::{Rng, unit};
use serde::Deserialize;

use super::replay::{Replay, choice, impossible};
use super::task::Difficulty;
use crate::env::{Env, Player, Step};
use crate::error::{Error, Result};

/// The hidden state of [`MultiarmedBandit`].
#[derive(Debug, Clone, Deserialize)]
pub struct Bandits {
    /// Every arm's chance of a payout.
    pub bandits_f32: Vec<f32>,
}

/// Number of arms and pulls.
fn sizes(difficulty: Difficulty) -> (usize, usize) {
    difficulty.pick([(10, 200), (20, 400), (30, 600)])
}

/// MultiarmedBandit: find the arm that pays best and keep pulling it.
#[derive(Debug, Clone)]
pub struct MultiarmedBandit {
    spaces: Spaces,
    /// Chances of a payout.
    arms: Vec<f32>,
    pulls: usize,
    /// Pulls left; none without a running episode.
    left: usize,
    /// Rewards of a miss and of a payout: looked up, for a branch on chance would often be mispredicted.
    rewards: [f64; 2],
    rng: Rng,
}

impl MultiarmedBandit {
    /// The task of this difficulty: 10, 20 or 30 arms and 200, 400 or 600 pulls.
    pub fn new(difficulty: Difficulty) -> Self {
        let (arms, pulls) = sizes(difficulty);
        let spaces = Spaces { observation: Space::Discrete { n: 2 }, action: Space::Discrete { n: arms } };
        let pay = 1.0 / pulls as f64;
        Self { spaces, arms: vec![0.0; arms], pulls, left: 0, rewards: [-pay, pay], rng: Rng::new(0, 0) }
    }

    fn first(&mut self, observation: ValuesMut<'_>) {
        self.left = self.pulls;
        observation.ints[0] = 0;
    }

    /// The arm that an action pulls.
    #[inline]
    fn arm(&self, action: Values<'_>) -> Result<usize> {
        if self.left == 0 { Err(Error::Finished) } else { choice(action, self.arms.len(), "arm") }
    }

    #[inline]
    fn pull(&mut self, arm: usize, draw: f64, observation: ValuesMut<'_>) -> Step {
        // The package compares as f32.
        let paid = (draw as f32) < self.arms[arm];
        self.left -= 1;
        observation.ints[0] = i32::from(paid);
        Step { reward: self.rewards[usize::from(paid)], truncated: self.left == 0, ..Step::default() }
    }
}

impl Env for MultiarmedBandit {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
        self.rng = Rng::new(seed, 0);
        for arm in &mut self.arms {
            *arm = (self.rng.bits() >> 8) as f32 * (1.0 / 16_777_216.0);
        }
        self.first(observation);
        Ok(())
    }

    #[inline]
    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        let arm = self.arm(action)?; // refused actions draw nothing
        let draw = unit(self.rng.bits());
        Ok(self.pull(arm, draw, observation))
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
        let arm = self.arm(action)?;
        if !(0.0..1.0).contains(&draw) {
            return impossible("a draw from 0 up to 1", draw.to_string());
        }
        Ok(self.pull(arm, draw, observation))
    }
}

/// A player that pulls the arm with the largest Gittins index. An arm's chance is Beta(1 + payouts, 1 +
/// misses) distributed; its index is the sure payment per pull for which one would just as well give the arm
/// up, when the future is discounted by 1 - 1/horizon per pull. The horizon is 1.25 times the pulls left.
#[derive(Debug, Clone)]
pub struct MultiarmedBanditPlayer {
    /// Pulls and payouts of every arm.
    arms: Vec<(u32, u32)>,
    pulls: usize,
    left: usize,
    /// The arm pulled last.
    last: Option<usize>,
    /// Index of every arm at the last choice.
    indices: Vec<f64>,
}

/// Horizon as a multiple of the pulls left. Anything from 1 to 2 gives the same return within 0.001.
const STRETCH: f64 = 1.25;

impl MultiarmedBanditPlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        let (arms, pulls) = sizes(difficulty);
        Self { arms: vec![(0, 0); arms], pulls, left: pulls, last: None, indices: vec![0.0; arms] }
    }
}

impl Player for MultiarmedBanditPlayer {
    fn reset(&mut self) {
        self.arms.fill((0, 0));
        (self.left, self.last) = (self.pulls, None);
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        if let Some((pulls, payouts)) = self.last.and_then(|last| self.arms.get_mut(last)) {
            *pulls += 1;
            *payouts += u32::from(observation.ints[0] == 1);
        }
        let (indices, horizon) = (Indices::shared(), Horizon::new(STRETCH * self.left.max(1) as f64));
        let (mut best, mut arm) = (f64::NEG_INFINITY, 0);
        for (i, ((pulls, payouts), index)) in self.arms.iter().zip(&mut self.indices).enumerate() {
            *index = indices.index(*pulls, *payouts, horizon);
            if *index > best {
                (best, arm) = (*index, i);
            }
        }
        self.left = self.left.saturating_sub(1);
        self.last = Some(arm);
        action.ints[0] = arm as i32;
    }

    fn took(&mut self, action: Values<'_>) {
        self.last = Some(action.ints[0] as usize);
    }

    /// All arms with the largest index: those with as many pulls and payouts as the one chosen.
    fn accept(&mut self, choices: &mut [bool]) {
        let best = self.indices.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        for (choice, index) in choices.iter_mut().zip(&self.indices) {
            *choice |= *index == best;
        }
    }
}

/// Gittins indices of arms pulled up to [`Indices::PULLS`] times, for horizons 1, [`Horizon::RATIO`] and so
/// on: a tenth of a second of work.
struct Indices {
    levels: Vec<Vec<f64>>,
}

impl Indices {
    const PULLS: usize = 30;

    fn shared() -> &'static Self {
        static SHARED: OnceLock<Indices> = OnceLock::new();
        SHARED.get_or_init(|| Self {
            levels: (0..Horizon::LEVELS)
                .map(|i| gittins(1.0 - Horizon::RATIO.powi(-(i as i32)), Self::PULLS))
                .collect(),
        })
    }

    /// For arms pulled more often than those of the table: the index's excess over the mean is a function of
    /// horizon / pulls, times the standard deviation, which goes as 1 / sqrt(pulls).
    fn index(&self, pulls: u32, payouts: u32, horizon: Horizon) -> f64 {
        let (pulls, payouts) = (pulls as usize, payouts as usize);
        if pulls <= Self::PULLS {
            return self.known(pulls, payouts.min(pulls), horizon);
        }
        let shrunk = Self::PULLS as f64 / pulls as f64;
        let mean = mean(pulls, payouts);
        let payouts = (mean * (Self::PULLS + 2) as f64 - 1.0).clamp(0.0, Self::PULLS as f64);
        let (low, horizon) = ((payouts as usize).min(Self::PULLS - 1), Horizon::new(shrunk * horizon.pulls));
        let excess =
            |payouts: usize| self.known(Self::PULLS, payouts, horizon) - self::mean(Self::PULLS, payouts);
        mean + shrunk.sqrt() * between(excess(low), excess(low + 1), payouts - low as f64)
    }

    fn known(&self, pulls: usize, payouts: usize, horizon: Horizon) -> f64 {
        let [a, b] = [0, 1].map(|i| self.levels[horizon.level + i][row(pulls) + payouts]);
        between(a, b, horizon.part)
    }
}

/// A horizon between those of two levels of the table.
#[derive(Debug, Clone, Copy)]
struct Horizon {
    pulls: f64,
    level: usize,
    /// How far it is to the next level, in logarithms.
    part: f64,
}

impl Horizon {
    const RATIO: f64 = 1.7;
    /// The last is 990, more than 1.25 x 600.
    const LEVELS: usize = 14;

    fn new(pulls: f64) -> Self {
        let level = (pulls.max(1.0).ln() / Self::RATIO.ln()).min((Self::LEVELS - 1) as f64);
        let whole = (level as usize).min(Self::LEVELS - 2);
        Self { pulls, level: whole, part: level - whole as f64 }
    }
}

fn between(a: f64, b: f64, part: f64) -> f64 {
    a + (b - a) * part
}

/// Mean chance after this many pulls and payouts.
fn mean(pulls: usize, payouts: usize) -> f64 {
    (payouts + 1) as f64 / (pulls + 2) as f64
}

/// Where a table has the arms of this many pulls, by payouts.
fn row(pulls: usize) -> usize {
    pulls * (pulls + 1) / 2
}

/// Indices of all arms with up to `most` pulls (at most 139). For a sure payment c the gain of going on is
///
/// ```text
/// gain = mean - c + discount * (mean * max(gain after a payout, 0) + (1 - mean) * max(gain after a miss, 0))
/// ```
///
/// and the index is the c at which it is 0; it is found between neighbours on a grid. After 140 pulls the
/// chance counts as known.
fn gittins(discount: f64, most: usize) -> Vec<f64> {
    const DEPTH: usize = 140;
    const GRID: usize = 200;
    let mut indices = vec![1.0; row(most + 1)];
    let mut before = vec![f64::NAN; indices.len()];
    // Gains of one number of pulls, by payouts, and what they are worth.
    let mut worth = [0.0; DEPTH + 1];
    for step in 0..=GRID {
        let payment = step as f64 / GRID as f64;
        for (payouts, worth) in worth.iter_mut().enumerate() {
            *worth = ((mean(DEPTH, payouts) - payment) / (1.0 - discount)).max(0.0);
        }
        for pulls in (0..DEPTH).rev() {
            let scale = 1.0 / (pulls + 2) as f64;
            for payouts in 0..=pulls {
                let mean = (payouts + 1) as f64 * scale;
                let next = between(worth[payouts], worth[payouts + 1], mean);
                let gain = mean - payment + discount * next;
                worth[payouts] = gain.max(0.0);
                if pulls <= most {
                    let before = &mut before[row(pulls) + payouts];
                    if *before > 0.0 && gain <= 0.0 {
                        indices[row(pulls) + payouts] = payment - gain / (gain - *before) / GRID as f64;
                    }
                    *before = gain;
                }
            }
        }
    }
    indices
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::popgym::trace::tests::{check_family, mean_return};

    fn room(seen: &mut [i32]) -> ValuesMut<'_> {
        ValuesMut::ints(seen)
    }

    #[test]
    fn traces_replay() {
        check_family("MultiarmedBandit", MultiarmedBandit::new);
    }

    #[test]
    fn misuse_is_an_error() {
        let (mut env, mut seen) = (MultiarmedBandit::new(Difficulty::Easy), [0]);
        let mut step = |env: &mut MultiarmedBandit, ints: &[i32]| {
            env.step(Values::ints(ints), ValuesMut::ints(&mut seen))
        };
        assert!(matches!(step(&mut env, &[0]), Err(Error::Finished)));
        env.reset(0, room(&mut [0])).unwrap();
        for bad in [&[10][..], &[-1], &[], &[0, 0]] {
            assert!(matches!(step(&mut env, bad), Err(Error::Base(elmur_base::Error::Space { .. }))));
        }
        for draw in [1.0, -0.1, f64::NAN, f64::INFINITY] {
            assert!(env.advance(Values::ints(&[0]), draw, room(&mut [0])).is_err(), "{draw}");
        }
        for t in 1..=200 {
            let result = step(&mut env, &[9]).unwrap();
            assert_eq!((result.terminated, result.truncated), (false, t == 200));
        }
        assert!(matches!(step(&mut env, &[0]), Err(Error::Finished)));
        for bad in [vec![0.5; 9], vec![0.5; 11], vec![1.0; 10], vec![-0.1; 10], vec![f32::NAN; 10]] {
            assert!(env.begin(&Bandits { bandits_f32: bad }, room(&mut [0])).is_err());
        }
        assert!(matches!(step(&mut env, &[0]), Err(Error::Finished)));
    }

    #[test]
    fn draws_are_compared_in_single_precision() {
        let (mut env, mut seen) = (MultiarmedBandit::new(Difficulty::Easy), [1]);
        let mut arms = vec![0.0; 10];
        arms[3] = 0.5;
        env.begin(&Bandits { bandits_f32: arms }, room(&mut seen)).unwrap();
        assert_eq!(seen, [0]);
        let mut pull = |arm: i32, draw: f64| {
            let step = env.advance(Values::ints(&[arm]), draw, room(&mut seen)).unwrap();
            (step.reward, seen[0])
        };
        assert_eq!(pull(3, 0.499), (1.0 / 200.0, 1));
        assert_eq!(pull(3, 0.5), (-1.0 / 200.0, 0));
        // 0.5 as f32.
        assert_eq!(pull(3, 0.5 - 1e-12), (-1.0 / 200.0, 0));
        assert_eq!(pull(0, 0.0), (-1.0 / 200.0, 0));
    }

    #[test]
    fn a_seed_is_an_episode_whatever_is_refused() {
        let mut env = MultiarmedBandit::new(Difficulty::Easy);
        let mut play = |seed: u64, mistakes: bool| {
            let mut seen = [0];
            env.reset(seed, room(&mut seen)).unwrap();
            let pull = |i: i32| {
                if mistakes {
                    assert!(env.step(Values::ints(&[10]), room(&mut seen)).is_err());
                }
                env.step(Values::ints(&[i % 10]), room(&mut seen)).unwrap();
                seen[0]
            };
            (0..200).map(pull).collect::<Vec<_>>()
        };
        let (one, other) = (play(1, false), play(2, false));
        assert_ne!(one, other);
        assert_eq!(play(1, true), one);
    }

    /// Chances are uniform: chi-square of 20 classes, first and last arm apart, and of the pair of both.
    /// Payouts are as frequent as chances say, class by class.
    #[test]
    fn arms_and_payouts_have_their_distributions() {
        let (mut env, mut seen, rounds) = (MultiarmedBandit::new(Difficulty::Easy), [0], 8000);
        let (mut classes, mut pairs) = ([[0u32; 20]; 2], [[0u32; 5]; 5]);
        let mut paid = [0.0; 20];
        for seed in 0..rounds {
            env.reset(seed, room(&mut seen)).unwrap();
            let [a, b] = [env.arms[0], env.arms[9]];
            assert!(env.arms.iter().all(|p| (0.0..1.0).contains(p)));
            let class = (a * 20.0) as usize;
            classes[0][class] += 1;
            classes[1][(b * 20.0) as usize] += 1;
            pairs[(a * 5.0) as usize][(b * 5.0) as usize] += 1;
            for _ in 0..50 {
                env.step(Values::ints(&[0]), room(&mut seen)).unwrap();
                paid[class] += f64::from(seen[0]) - f64::from(a);
            }
        }
        for counts in classes {
            let chi: f64 = counts.iter().map(|n| (f64::from(*n) - 400.0).powi(2) / 400.0).sum();
            assert!(chi < 43.8, "{counts:?}"); // 19 degrees of freedom: once in 1,000
        }
        let chi: f64 = pairs.as_flattened().iter().map(|n| (f64::from(*n) - 320.0).powi(2) / 320.0).sum();
        assert!(chi < 51.2, "{pairs:?}"); // 24
        for (class, (paid, n)) in paid.iter().zip(classes[0]).enumerate() {
            let p = (class as f64 + 0.5) / 20.0;
            assert!(paid.abs() < 4.0 * (p * (1.0 - p) * 50.0 * f64::from(n)).sqrt(), "{class}: {paid}");
        }
    }

    /// Published values (Gittins 1989) for discounts 0.9 and 0.99.
    #[test]
    fn indices_are_the_known_ones() {
        for (discount, known) in [
            (0.9, [(0, 0, 0.7029), (1, 1, 0.8001), (1, 0, 0.5001), (2, 1, 0.6346)]),
            (0.99, [(0, 0, 0.8699), (1, 1, 0.9102), (1, 0, 0.7005), (2, 1, 0.7844)]),
        ] {
            let table = gittins(discount, 2);
            for (pulls, payouts, index) in known {
                let got = table[row(pulls) + payouts];
                assert!((got - index).abs() < 5e-4, "{discount} {pulls} {payouts}: {got} {index}");
            }
        }
    }

    /// Between the table's horizons and beyond its pulls.
    #[test]
    fn indices_in_between_are_close() {
        let indices = Indices::shared();
        for horizon in [10.0, 100.0, 300.0] {
            let exact = gittins(1.0 - 1.0 / horizon, 60);
            for (pulls, payouts) in
                [(0, 0), (1, 0), (3, 2), (10, 6), (30, 15), (30, 27), (45, 9), (60, 30), (60, 50)]
            {
                let got = indices.index(pulls as u32, payouts as u32, Horizon::new(horizon));
                assert!(
                    (got - exact[row(pulls) + payouts]).abs() < 0.006,
                    "{horizon} {pulls} {payouts}: {got}"
                );
            }
        }
        // With one pull left only the mean counts.
        assert!((indices.index(7, 3, Horizon::new(1.0)) - mean(7, 3)).abs() < 1e-9);
    }

    #[test]
    fn the_player_earns_what_indices_promise() {
        // From 12,000 episodes each.
        for (difficulty, expected) in
            [(Difficulty::Easy, 0.728), (Difficulty::Medium, 0.8248), (Difficulty::Hard, 0.8628)]
        {
            let mut player = MultiarmedBanditPlayer::new(difficulty);
            let (mean, error) = mean_return(&mut MultiarmedBandit::new(difficulty), &mut player, 0..1000);
            assert!((mean - expected).abs() < 4.0 * error && error < 0.008, "{difficulty:?}: {mean} {error}");
        }
    }

    /// Pulls of another count as the player's own.
    #[test]
    fn foreign_pulls_are_observations_and_like_arms_are_equally_good() {
        let (mut player, mut arm) = (MultiarmedBanditPlayer::new(Difficulty::Easy), [0]);
        let mut choices = [false; 10];
        player.act(Values::ints(&[0]), room(&mut arm));
        player.accept(&mut choices);
        assert_eq!((arm, choices), ([0], [true; 10]));
        for paid in [1, 1, 0] {
            player.took(Values::ints(&[7]));
            player.act(Values::ints(&[paid]), room(&mut arm));
        }
        assert_eq!((player.arms[7], player.arms[0], player.left), ((3, 2), (0, 0), 196));
        for other in [2, 5] {
            player.took(Values::ints(&[other]));
            player.act(Values::ints(&[1]), room(&mut arm));
        }
        choices.fill(false);
        player.accept(&mut choices);
        assert_eq!((arm, (0..10).filter(|i| choices[*i]).collect::<Vec<_>>()), ([2], vec![2, 5]));
    }
}
