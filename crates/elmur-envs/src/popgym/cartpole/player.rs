//! Players of the CartPole tasks. All push to the side given by the sign of a weighted sum of the state; they
//! differ in how they estimate the state.

use elmur_base::{Values, ValuesMut};
use elmur_rng::Rng;

use super::{BOUNDS, START};
use crate::cartpole::{FORCE, MAX_ANGLE, TAU, advance};
use crate::env::Player;
use crate::popgym::noise::{Sensor, root, sigma};
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

/// A possible angle and angular velocity, with the position and velocity expected in that case.
#[derive(Debug, Clone, Copy, Default)]
struct Particle {
    weight: f64,
    state: [f64; 4],
}

/// A player with a particle filter. Nothing but the start and the noise is random, so a particle is a
/// possible start and what has become of it. Position and velocity hardly act on the pole: given the angle
/// they are normal, with a covariance that all particles share (a Kalman filter per particle). That the
/// episode goes on is evidence, too: the pole has not fallen.
#[derive(Debug, Clone)]
pub struct NoisyPositionOnlyCartPolePlayer {
    law: Law,
    position: Sensor,
    angle: Sensor,
    particles: Vec<Particle>,
    spare: Vec<Particle>,
    /// Variance of position, covariance, variance of velocity.
    covariance: [f64; 3],
    force: Option<f64>,
    rng: Rng,
}

impl NoisyPositionOnlyCartPolePlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        let sigma = sigma(difficulty);
        // The best of a random search. With much noise the pole falls before the cart can go far.
        let wary = [0.01, 0.02, 1.0, 0.13];
        Self {
            law: difficulty.pick([[0.023, 0.028, 1.0, 0.115], wary, wary]),
            position: Sensor { sigma, bound: BOUNDS[0] },
            angle: Sensor { sigma, bound: BOUNDS[1] },
            particles: vec![Particle::default(); PARTICLES],
            spare: vec![Particle::default(); PARTICLES],
            covariance: [0.0; 3],
            force: None,
            rng: Rng::new(0, 0),
        }
    }

    /// Starts that are equally likely, evenly spread: multiples of the golden ratio fill an interval without
    /// gaps.
    fn scatter(&mut self) {
        self.rng = Rng::new(0, 0);
        let number = |part: f64| START * (2.0 * part.fract() - 1.0);
        for (i, particle) in (0..).map(|i| f64::from(i) + 0.5).zip(&mut self.particles) {
            let (angle, spin) = (number(i / PARTICLES as f64), number(i * GOLDEN));
            *particle = Particle { weight: 1.0, state: [0.0, 0.0, angle, spin] };
        }
        let variance = START * START / 3.0;
        self.covariance = [variance, 0.0, variance];
    }

    fn predict(&mut self, force: f64) {
        for particle in &mut self.particles {
            particle.state = advance(particle.state, force);
        }
        let [xx, xv, vv] = self.covariance;
        self.covariance = [xx + 2.0 * TAU * xv + TAU * TAU * vv, xv + TAU * vv, vv];
    }

    fn update(&mut self, seen: &[f32]) {
        let [xx, xv, vv] = self.covariance;
        let variance = xx + self.position.sigma * self.position.sigma;
        let gain = [xx / variance, xv / variance];
        let mut total = 0.0;
        for Particle { weight, state: [x, velocity, angle, _] } in &mut self.particles {
            let surprise = f64::from(seen[0]) - *x;
            *x += gain[0] * surprise;
            *velocity += gain[1] * surprise;
            let fallen = if angle.abs() > MAX_ANGLE { 1e-6 } else { 1.0 };
            let likelihood = (-0.5 * surprise * surprise / variance).exp().max(1e-12);
            *weight *= likelihood * self.angle.likelihood(seen[1], *angle) * fallen;
            total += *weight;
        }
        self.covariance = [xx - gain[0] * xx, xv - gain[0] * xv, vv - gain[1] * xv];
        self.particles.iter_mut().for_each(|particle| particle.weight /= total);
    }

    fn mean(&self) -> [f64; 4] {
        let mut mean = [0.0; 4];
        for Particle { weight, state } in &self.particles {
            mean.iter_mut().zip(state).for_each(|(mean, x)| *mean += weight * x);
        }
        mean
    }

    /// Replaces the particles by as many of equal weight, drawn in proportion to their weights, when few of
    /// them carry most of it. The copies are drawn towards the mean and scattered again by as much as that
    /// takes away (Liu and West, 2001).
    fn renew(&mut self, mean: [f64; 4]) {
        let count = PARTICLES as f64;
        if self.particles.iter().map(|p| p.weight * p.weight).sum::<f64>() * count < 2.0 {
            return;
        }
        let mut covariance = [0.0; 3];
        for Particle { weight, state } in &self.particles {
            let (a, w) = (state[2] - mean[2], state[3] - mean[3]);
            covariance.iter_mut().zip([a * a, a * w, w * w]).for_each(|(sum, x)| *sum += weight * x);
        }
        let [spread, shared, own] = root(covariance);
        let keep = (1.0 - FRESH * FRESH).sqrt();

        let offset = self.rng.uniform(0.0, 1.0);
        let mut sources = self.particles.iter();
        let (mut source, mut reached) = (Particle::default(), 0.0);
        for (i, target) in self.spare.iter_mut().enumerate() {
            while reached * count <= i as f64 + offset {
                let Some(next) = sources.next() else { break };
                (source, reached) = (*next, reached + next.weight);
            }
            let ([x, velocity, angle, spin], [z0, z1]) = (source.state, self.rng.normals());
            let angle = mean[2] + keep * (angle - mean[2]) + FRESH * spread * z0;
            let spin = mean[3] + keep * (spin - mean[3]) + FRESH * (shared * z0 + own * z1);
            *target = Particle { weight: 1.0 / count, state: [x, velocity, angle, spin] };
        }
        std::mem::swap(&mut self.particles, &mut self.spare);
    }
}

impl Player for NoisyPositionOnlyCartPolePlayer {
    fn reset(&mut self) {
        self.force = None;
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        match self.force {
            None => self.scatter(),
            Some(force) => self.predict(force),
        }
        self.update(observation.floats);
        let mean = self.mean();
        self.renew(mean);
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
    fn new_particles_have_mean_and_spread_of_the_old() {
        let mut player = NoisyPositionOnlyCartPolePlayer::new(Difficulty::Easy);
        let spread = |player: &NoisyPositionOnlyCartPolePlayer| {
            let mean = player.mean();
            let square = |p: &Particle| p.weight * (p.state[2] - mean[2]).powi(2);
            (mean, player.particles.iter().map(square).sum::<f64>().sqrt())
        };
        player.scatter();
        player.particles.iter_mut().for_each(|p| p.weight = (-(p.state[2] / 0.01).powi(2)).exp());
        let total: f64 = player.particles.iter().map(|p| p.weight).sum();
        player.particles.iter_mut().for_each(|p| p.weight /= total);
        let (mean, deviation) = spread(&player);
        let distinct = |player: &NoisyPositionOnlyCartPolePlayer| {
            let mut angles: Vec<u64> = player.particles.iter().map(|p| p.state[2].to_bits()).collect();
            angles.sort_unstable();
            angles.dedup();
            angles.len()
        };
        player.renew(mean);
        assert!(player.particles.iter().all(|p| p.weight == 1.0 / PARTICLES as f64));
        assert_eq!(distinct(&player), PARTICLES);
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
