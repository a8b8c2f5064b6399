//! Players of the CartPole tasks. All push to the side given by the sign of a weighted sum of the state; they
//! differ in how they estimate the state.

use std::f32::consts::PI;

use elmur_base::{Values, ValuesMut};
use elmur_rng::Rng;

use super::{BOUNDS, START};
use crate::cartpole::{FORCE, GRAVITY, HALF_LENGTH, MAX_ANGLE, POLE_MASS, TAU, TOTAL_MASS, advance};
use crate::env::Player;
use crate::popgym::noise::{Estimate, Sensor, estimate, normal_pairs, normalize, root, sigma, sin_cos, sum};
use crate::popgym::task::Difficulty;

/// Weights of position, velocity, angle and angular velocity.
type Law = [f64; 4];

/// Weights for states that are known exactly.
const LAW: Law = [0.04, 0.08, 1.0, 0.25];

/// Pushes to the side where the state points; returns the force.
fn push(law: Law, state: [f64; 4], action: ValuesMut<'_>) -> f64 {
    let right = law.iter().zip(state).map(|(k, x)| k * x).sum::<f64>() > 0.0;
    action.ints[0] = i32::from(right);
    force(i32::from(right))
}

/// The force of a push.
fn force(push: i32) -> f64 {
    if push == 1 { FORCE } else { -FORCE }
}

fn numbers(observation: Values<'_>) -> [f64; 2] {
    [f64::from(observation.floats[0]), f64::from(observation.floats[1])]
}

/// A player that computes the velocities: the difference of two positions is the velocity at the first of
/// them, and the equations of motion bring it up to date.
#[derive(Debug, Clone, Default)]
pub struct PositionOnlyCartPolePlayer {
    /// State before the last push, and its force.
    last: Option<([f64; 4], f64)>,
}

impl PositionOnlyCartPolePlayer {
    /// A player for any difficulty.
    pub fn new(_: Difficulty) -> Self {
        Self::default()
    }
}

impl Player for PositionOnlyCartPolePlayer {
    fn reset(&mut self) {
        self.last = None;
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let [x, angle] = numbers(observation);
        let (velocity, spin) = match self.last {
            None => (0.0, 0.0),
            Some(([x0, _, angle0, _], force)) => {
                let before = [x0, (x - x0) / TAU, angle0, (angle - angle0) / TAU];
                let [_, velocity, _, spin] = advance(before, force);
                (velocity, spin)
            }
        };
        let state = [x, velocity, angle, spin];
        self.last = Some((state, push(LAW, state, action)));
    }

    fn took(&mut self, action: Values<'_>) {
        if let Some((_, last)) = &mut self.last {
            *last = force(action.ints[0]);
        }
    }
}

/// A player that integrates the velocities, from the positions that the first observation shows.
#[derive(Debug, Clone, Default)]
pub struct VelocityOnlyCartpolePlayer {
    /// State before the last push, and its force.
    last: Option<([f64; 4], f64)>,
    steps: u32,
}

impl VelocityOnlyCartpolePlayer {
    /// A player for any difficulty.
    pub fn new(_: Difficulty) -> Self {
        Self::default()
    }
}

impl Player for VelocityOnlyCartpolePlayer {
    fn reset(&mut self) {
        *self = Self::default();
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let seen = numbers(observation);
        let state = match self.last {
            None => [seen[0], 0.0, seen[1], 0.0],
            Some((mut before, force)) => {
                let [velocity, spin] = seen;
                if self.steps == 1 {
                    // What the first push adds to the velocities hardly depends on them: so much for those of
                    // the start.
                    let from_rest = advance(before, force);
                    (before[1], before[3]) = (velocity - from_rest[1], spin - from_rest[3]);
                }
                [before[0] + TAU * before[1], velocity, before[2] + TAU * before[3], spin]
            }
        };
        self.last = Some((state, push(LAW, state, action)));
        self.steps += 1;
    }

    fn took(&mut self, action: Values<'_>) {
        if let Some((_, last)) = &mut self.last {
            *last = force(action.ints[0]);
        }
    }
}

/// Number of particles.
const PARTICLES: usize = 500;
/// Part of the spread that is drawn anew when particles are replaced.
const FRESH: f64 = 0.4;

const GOLDEN: f64 = 0.618_033_988_749_894_9;

/// Possible angles and angular velocities, with the position and velocity expected in each case.
#[derive(Debug, Clone)]
struct Particles {
    weight: [f32; PARTICLES],
    /// Position, velocity, angle and angular velocity.
    state: [[f32; PARTICLES]; 4],
}

impl Default for Particles {
    fn default() -> Self {
        Self { weight: [1.0; PARTICLES], state: [[0.0; PARTICLES]; 4] }
    }
}

/// [`advance`] in single precision and without branches.
#[inline(always)]
fn advance_roughly([x, v, angle, spin]: [f32; 4], force: f32) -> [f32; 4] {
    const ALL: f32 = 1.0 / TOTAL_MASS as f32;
    const MOMENT: f32 = (POLE_MASS * HALF_LENGTH) as f32;
    const SHARE: f32 = (POLE_MASS / TOTAL_MASS) as f32;
    let (sin, cos) = sin_cos(angle.clamp(-PI, PI));
    let push = (force + MOMENT * (spin * spin) * sin) * ALL;
    let turn = (GRAVITY as f32 * sin - cos * push) / (HALF_LENGTH as f32 * (4.0 / 3.0 - SHARE * (cos * cos)));
    let pull = push - MOMENT * turn * cos * ALL;
    let tau = TAU as f32;
    [x + tau * v, v + tau * pull, angle + tau * spin, spin + tau * turn]
}

/// A player with a particle filter. Nothing but the start and the noise is random, so a particle is a
/// possible start and what has become of it. Position and velocity hardly act on the pole: given the angle
/// they are normal, with a covariance that all particles share (a Kalman filter per particle). That the
/// episode goes on is evidence, too: the pole has not fallen.
#[derive(Debug, Clone)]
pub struct NoisyPositionOnlyCartPolePlayer {
    law: Law,
    sigma: f32,
    angle: Sensor,
    particles: Box<Particles>,
    spare: Box<Particles>,
    /// Variance of position, covariance, variance of velocity.
    covariance: [f64; 3],
    force: Option<f64>,
    rng: Rng,
}

impl NoisyPositionOnlyCartPolePlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        let sigma = sigma(difficulty) as f32;
        // The best of a random search. With much noise the pole falls before the cart can go far.
        let wary = [0.01, 0.02, 1.0, 0.13];
        Self {
            law: difficulty.pick([[0.023, 0.028, 1.0, 0.115], wary, wary]),
            sigma,
            angle: Sensor { sigma, bound: BOUNDS[1] },
            particles: Box::default(),
            spare: Box::default(),
            covariance: [0.0; 3],
            force: None,
            rng: Rng::new(0, 0),
        }
    }

    /// Starts that are equally likely, evenly spread: multiples of the golden ratio fill an interval without
    /// gaps.
    fn scatter(&mut self) {
        self.rng = Rng::new(0, 0);
        *self.particles = Particles::default();
        let number = |part: f64| (START * (2.0 * part.fract() - 1.0)) as f32;
        let [_, _, angles, spins] = &mut self.particles.state;
        for (i, (angle, spin)) in (0..).map(|i| f64::from(i) + 0.5).zip(angles.iter_mut().zip(spins)) {
            (*angle, *spin) = (number(i / PARTICLES as f64), number(i * GOLDEN));
        }
        let variance = START * START / 3.0;
        self.covariance = [variance, 0.0, variance];
    }

    #[inline(always)]
    fn predict(&mut self, force: f64) {
        let (state, force) = (&mut self.particles.state, force as f32);
        for i in 0..PARTICLES {
            let next = advance_roughly([state[0][i], state[1][i], state[2][i], state[3][i]], force);
            (state[0][i], state[1][i], state[2][i], state[3][i]) = next.into();
        }
        let [xx, xv, vv] = self.covariance;
        self.covariance = [xx + 2.0 * TAU * xv + TAU * TAU * vv, xv + TAU * vv, vv];
    }

    #[inline(always)]
    fn update(&mut self, seen: &[f32]) {
        let [xx, xv, vv] = self.covariance;
        let variance = xx + f64::from(self.sigma).powi(2);
        let gain = [xx / variance, xv / variance];
        let Particles { weight, state: [x, velocity, angle, _] } = &mut *self.particles;
        // Carts stay far from where their position would be clipped.
        Sensor { sigma: variance.sqrt() as f32, bound: f32::INFINITY }.weigh(seen[0], x, weight);
        self.angle.weigh(seen[1], angle, weight);
        let (to_x, to_velocity, most) = (gain[0] as f32, gain[1] as f32, MAX_ANGLE as f32);
        for i in 0..PARTICLES {
            let surprise = seen[0] - x[i];
            x[i] += to_x * surprise;
            velocity[i] += to_velocity * surprise;
            weight[i] *= if angle[i].abs() > most { 1e-6 } else { 1.0 };
        }
        normalize(weight);
        self.covariance = [xx - gain[0] * xx, xv - gain[0] * xv, vv - gain[1] * xv];
    }

    #[inline(always)]
    fn mean(&self) -> [f64; 4] {
        let Particles { weight, state } = &*self.particles;
        [0, 1, 2, 3].map(|k| weighted(weight, |i| state[k][i]))
    }

    /// Replaces the particles by as many of equal weight, drawn in proportion to their weights, when few of
    /// them carry most of it. The copies are drawn towards the mean and scattered again by as much as that
    /// takes away (Liu and West, 2001).
    #[inline(always)]
    fn renew(&mut self, mean: [f64; 4]) {
        let (Particles { weight, state }, count) = (&*self.particles, PARTICLES as f64);
        if weighted(weight, |i| weight[i]) * count < 2.0 {
            return;
        }
        let (angles, spins) = (mean[2] as f32, mean[3] as f32);
        let (a, w) = (|i: usize| state[2][i] - angles, |i: usize| state[3][i] - spins);
        let covariance = [
            weighted(weight, |i| a(i) * a(i)),
            weighted(weight, |i| a(i) * w(i)),
            weighted(weight, |i| w(i) * w(i)),
        ];
        let fresh = root(covariance).map(|part| (FRESH * part) as f32);
        let keep = (1.0 - FRESH * FRESH).sqrt() as f32;

        let (offset, draws) = (self.rng.uniform(0.0, 1.0), normal_pairs());
        let draw = self.rng.below(draws.len() as u32) as usize;
        let (mut source, mut next, mut reached) = (0, 0, 0.0);
        for i in 0..PARTICLES {
            while reached * count <= i as f64 + offset && next < PARTICLES {
                (source, reached, next) = (next, reached + f64::from(weight[next]), next + 1);
            }
            let [z0, z1] = draws[(draw + i) % draws.len()];
            let to = &mut self.spare.state;
            (to[0][i], to[1][i]) = (state[0][source], state[1][source]);
            to[2][i] = angles + keep * a(source) + fresh[0] * z0;
            to[3][i] = spins + keep * w(source) + (fresh[1] * z0 + fresh[2] * z1);
        }
        self.spare.weight = [1.0 / PARTICLES as f32; PARTICLES];
        std::mem::swap(&mut self.particles, &mut self.spare);
    }
}

/// The sum of numbers by their weights.
#[inline(always)]
fn weighted(weight: &[f32; PARTICLES], number: impl Fn(usize) -> f32) -> f64 {
    sum(PARTICLES, |i| weight[i] * number(i))
}

impl Estimate for NoisyPositionOnlyCartPolePlayer {
    /// The mean state.
    type Estimate = [f64; 4];

    #[inline(always)]
    fn estimate(&mut self, seen: &[f32]) -> [f64; 4] {
        match self.force {
            None => self.scatter(),
            Some(force) => self.predict(force),
        }
        self.update(seen);
        let mean = self.mean();
        self.renew(mean);
        mean
    }
}

impl Player for NoisyPositionOnlyCartPolePlayer {
    fn reset(&mut self) {
        self.force = None;
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let mean = estimate(self, observation.floats);
        self.force = Some(push(self.law, mean, action));
    }

    fn took(&mut self, action: Values<'_>) {
        self.force = Some(force(action.ints[0]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::popgym::{PositionOnlyCartPole, Replay, VelocityOnlyCartpole};

    /// Largest difference between the state that a player believes in and the true one, from the second
    /// observation on.
    fn largest_error<P: Player>(
        mut env: impl Replay,
        mut player: P,
        believed: impl Fn(&P) -> [f64; 4],
    ) -> f64 {
        let (mut seen, mut action, mut largest) = ([0.0; 2], [0], 0f64);
        env.reset(0, ValuesMut::floats(&mut seen)).unwrap();
        for t in 0..200 {
            let room = ValuesMut::ints(&mut action);
            player.act(Values::floats(&seen), room);
            if t > 0 {
                let errors = believed(&player).into_iter().zip(env.state()).map(|(a, b)| (a - b).abs());
                largest = errors.fold(largest, f64::max);
            }
            let room = ValuesMut::floats(&mut seen);
            env.step(Values::ints(&action), room).unwrap();
        }
        largest
    }

    #[test]
    fn the_hidden_half_of_the_state_is_recovered() {
        let difficulty = Difficulty::Easy;
        let player = PositionOnlyCartPolePlayer::new(difficulty);
        let error = largest_error(PositionOnlyCartPole::new(difficulty), player, |p| p.last.unwrap().0);
        assert!(error < 1e-4, "{error}");
        let player = VelocityOnlyCartpolePlayer::new(difficulty);
        let error = largest_error(VelocityOnlyCartpole::new(difficulty), player, |p| p.last.unwrap().0);
        assert!(error < 1e-5, "{error}");
    }

    #[test]
    fn rough_steps_are_those_of_the_environment() {
        for i in 0..500 {
            let part = |k: f64| 2.0 * (f64::from(i) * k).fract() - 1.0;
            let state = [part(0.1), 3.0 * part(0.37), 0.5 * part(GOLDEN), 4.0 * part(0.77)];
            let force = if i % 2 == 0 { FORCE } else { -FORCE };
            let rough = advance_roughly(state.map(|x| x as f32), force as f32);
            for (got, want) in rough.into_iter().zip(advance(state, force)) {
                assert!(
                    (f64::from(got) - want).abs() < 2e-6 * want.abs().max(1.0),
                    "{state:?}: {got}, {want}"
                );
            }
        }
    }

    #[test]
    fn new_particles_have_mean_and_spread_of_the_old() {
        let mut player = NoisyPositionOnlyCartPolePlayer::new(Difficulty::Easy);
        let spread = |player: &NoisyPositionOnlyCartPolePlayer| {
            let (mean, Particles { weight, state }) = (player.mean(), &*player.particles);
            let square = weighted(weight, |i| (state[2][i] - mean[2] as f32).powi(2));
            (mean, square.sqrt())
        };
        player.scatter();
        let Particles { weight, state } = &mut *player.particles;
        weight
            .iter_mut()
            .zip(&state[2])
            .for_each(|(weight, angle)| *weight = (-(angle / 0.01).powi(2)).exp());
        normalize(weight);
        let (mean, deviation) = spread(&player);
        let distinct = |player: &NoisyPositionOnlyCartPolePlayer| {
            let mut angles: Vec<u32> =
                player.particles.state[2].iter().map(|angle| angle.to_bits()).collect();
            angles.sort_unstable();
            angles.dedup();
            angles.len()
        };
        player.renew(mean);
        assert!(player.particles.weight.iter().all(|weight| *weight == 1.0 / PARTICLES as f32));
        // A few may be the same in single precision.
        assert!(distinct(&player) > PARTICLES - 5);
        let (new_mean, new_deviation) = spread(&player);
        for (i, tolerance) in [(2, 0.1 * deviation), (3, 0.1 * START)] {
            assert!((new_mean[i] - mean[i]).abs() < tolerance, "{mean:?} {new_mean:?}");
        }
        assert!((new_deviation / deviation - 1.0).abs() < 0.04, "{deviation} {new_deviation}");
        // Particles that all count stay as they are.
        let before = spread(&player);
        player.renew(new_mean);
        assert_eq!(spread(&player), before);
    }
}
