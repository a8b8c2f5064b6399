//! Players of the pendulum tasks. Both choose the torque with the least expected cost from now on, read from
//! a table, or by a linear law near the top; one knows the state, the other has a distribution over states.

use std::f64::consts::PI;
use std::sync::OnceLock;

use elmur_base::{Values, ValuesMut};

use super::{MAX_SPEED, MAX_TORQUE, START_SPEED, TAU, cost, swing, wrap};
use crate::env::Player;
use crate::popgym::noise::{
    Estimate, Sensor, estimate, integer, nearest, normalize, root, sigma, sin_cos, sum,
};
use crate::popgym::task::Difficulty;

/// Angles and speeds of the table.
const ANGLES: usize = 161;
const SPEEDS: usize = 161;
const ANGLE_STEP: f64 = 2.0 * PI / ANGLES as f64;
const SPEED_STEP: f64 = 2.0 * MAX_SPEED / (SPEEDS - 1) as f64;
/// Iterations of the table: as many as the longest episode has steps.
const SWEEPS: usize = 200;

/// Numbers of [`Costs`]: two rows more than angles, and more up to a power of two, so that any number is a place in it
/// by its lowest bits.
const NUMBERS: usize = 1 << 15;
const _: () = assert!((ANGLES + 2) * SPEEDS <= NUMBERS);

/// Least cost from now on for angles from -pi (rows) and speeds from -8 (columns), by value iteration; each with the
/// difference to the next speed. The first two rows are there again after the last.
#[derive(Debug)]
struct Costs(Box<[[f32; 2]; NUMBERS]>);

/// Where a torque leads from a place of the table: between four others.
struct Move {
    /// The lower speed at the lower and at the higher angle.
    corners: [u32; 2],
    /// How far from there to the next angle and speed.
    parts: [f32; 2],
    cost: f32,
}

/// Place in the table at or below a state, and how far the state is from it. Angles between -3 pi and 3 pi.
#[inline]
fn place([angle, speed]: [f32; 2]) -> ([usize; 2], [f32; 2]) {
    const PER_ANGLE: f32 = (1.0 / ANGLE_STEP) as f32;
    const PER_SPEED: f32 = (1.0 / SPEED_STEP) as f32;
    let row = (angle + PI as f32) * PER_ANGLE + ANGLES as f32;
    let column = (speed + MAX_SPEED as f32) * PER_SPEED;
    let (low, left) = (row as usize, (column as usize).min(SPEEDS - 2));
    let corners = [low % ANGLES * SPEEDS + left, (low + 1) % ANGLES * SPEEDS + left];
    (corners, [row - low as f32, column - left as f32])
}

#[inline]
fn between(table: &[f32], corners: [usize; 2], parts: [f32; 2]) -> f32 {
    let [low, high] = corners.map(|at| table[at] + parts[1] * (table[at + 1] - table[at]));
    low + parts[0] * (high - low)
}

impl Costs {
    /// The table of a player that knows the state.
    fn known() -> &'static Self {
        static COSTS: OnceLock<Costs> = OnceLock::new();
        COSTS.get_or_init(|| Self::new([0, 0]))
    }

    /// The table of a player whose estimate of the state jumps with new observations.
    fn uncertain() -> &'static Self {
        static COSTS: OnceLock<Costs> = OnceLock::new();
        COSTS.get_or_init(|| Self::new([2, 3]))
    }

    /// Value iteration where every step is followed, with probability 1/6 each, by a jump of so many rows and
    /// columns up or down.
    fn new([rows, columns]: [usize; 2]) -> Self {
        let torques = [-MAX_TORQUE, 0.0, MAX_TORQUE];
        let moves: Vec<[Move; 3]> = (0..ANGLES * SPEEDS)
            .map(|at| {
                let angle = (at / SPEEDS) as f64 * ANGLE_STEP - PI;
                let state = [angle, (at % SPEEDS) as f64 * SPEED_STEP - MAX_SPEED];
                torques.map(|torque| {
                    let (corners, parts) = place(swing(state, torque).map(|x| x as f32));
                    Move { corners: corners.map(|c| c as u32), parts, cost: cost(state, torque) as f32 }
                })
            })
            .collect();
        let (mut table, mut expected) = (vec![0f32; ANGLES * SPEEDS], vec![0f32; ANGLES * SPEEDS]);
        for _ in 0..SWEEPS {
            for (row, out) in expected.chunks_exact_mut(SPEEDS).enumerate() {
                let line = |row: usize| &table[row % ANGLES * SPEEDS..][..SPEEDS];
                let (here, up, down) = (line(row), line(row + rows), line(row + ANGLES - rows));
                for (column, out) in out.iter_mut().enumerate() {
                    let right = up[(column + columns).min(SPEEDS - 1)];
                    let left = down[column.saturating_sub(columns)];
                    *out = (4.0 * here[column] + right + left) / 6.0;
                }
            }
            for (out, moves) in table.iter_mut().zip(&moves) {
                let value = |m: &Move| m.cost + between(&expected, m.corners.map(|c| c as usize), m.parts);
                *out = moves.iter().map(value).fold(f32::MAX, f32::min);
            }
        }
        let at = |i: usize| table[i % (ANGLES * SPEEDS)];
        let with_next =
            |i: usize| if i < (ANGLES + 2) * SPEEDS { [at(i), at(i + 1) - at(i)] } else { [0.0; 2] };
        Self(Box::new(std::array::from_fn(with_next)))
    }

    /// The sum of the costs of states by their weights, in blocks.
    #[inline(always)]
    fn expected(&self, blocks: usize, block: impl Fn(usize) -> Eight) -> f64 {
        const PER_ANGLE: f32 = (1.0 / ANGLE_STEP) as f32;
        const PER_SPEED: f32 = (1.0 / SPEED_STEP) as f32;
        // All but the looks into the table are loops over vectors.
        let (mut sums, mut places, mut rows, mut columns) = ([0f32; 8], [0u32; 8], [0f32; 8], [0f32; 8]);
        for number in 0..blocks {
            let Eight { weight, angle, speed } = block(number);
            for k in 0..8 {
                let row = (wrap_once(angle[k]) + PI as f32) * PER_ANGLE;
                let column = (speed[k] + MAX_SPEED as f32) * PER_SPEED;
                // At or below; in the middle between two places either of them.
                let low = nearest((row - 0.5).max(0.0));
                let left = nearest((column - 0.5).clamp(0.0, (SPEEDS - 2) as f32));
                places[k] = integer(low * SPEEDS as f32 + left);
                (rows[k], columns[k]) = (row - low, column - left);
            }
            for k in 0..8 {
                let at = places[k] as usize;
                let [low, high] = [at, at + SPEEDS].map(|at| {
                    let [cost, more] = self.0[at % NUMBERS];
                    cost + columns[k] * more
                });
                sums[k] += weight[k] * (low + rows[k] * (high - low));
            }
        }
        sums.iter().map(|sum| f64::from(*sum)).sum()
    }

    /// The torque with the least expected cost: the best of five, or between two of them where a parabola
    /// through the best and its neighbours has its minimum. `after` is where a torque leads, by blocks of states.
    #[inline(always)]
    fn torque(&self, blocks: usize, after: impl Fn(usize, f32) -> Eight) -> f32 {
        let value =
            |torque: f32| self.expected(blocks, |i| after(i, torque)) + f64::from(0.001 * torque * torque);
        let values = [-2.0, -1.0, 0.0, 1.0, 2.0].map(value);
        let best = (1..5).fold(0, |best, i| if values[i] < values[best] { i } else { best });
        let torque = best as f64 - 2.0;
        let [left, middle, right] = match best {
            1..=3 => [values[best - 1], values[best], values[best + 1]],
            _ => return torque as f32,
        };
        let bend = left - 2.0 * middle + right;
        (torque + if bend > 1e-9 { 0.5 * (left - right) / bend } else { 0.0 }) as f32
    }
}

/// Eight states, angles between -3 pi and 3 pi, with their weights.
struct Eight {
    weight: [f32; 8],
    angle: [f32; 8],
    speed: [f32; 8],
}

impl Eight {
    /// At most eight states of the same weight.
    fn alike(states: &[[f64; 2]]) -> Self {
        let mut all = Self { weight: [0.0; 8], angle: [0.0; 8], speed: [0.0; 8] };
        for (k, [angle, speed]) in states.iter().enumerate() {
            (all.weight[k], all.angle[k], all.speed[k]) =
                (1.0 / states.len() as f32, *angle as f32, *speed as f32);
        }
        all
    }
}

/// Possible states, a multiple of eight.
#[derive(Debug, Clone)]
struct Belief {
    weight: Vec<f32>,
    angle: Vec<f32>,
    speed: Vec<f32>,
    /// Of the angle.
    sin: Vec<f32>,
    cos: Vec<f32>,
}

impl Belief {
    /// States with their weights, and others of weight 0 up to a multiple of eight.
    fn new(states: impl IntoIterator<Item = (f32, [f32; 2])>) -> Self {
        let (mut weight, (mut angle, mut speed)): (Vec<f32>, (Vec<f32>, Vec<f32>)) =
            states.into_iter().map(|(weight, [angle, speed])| (weight, (angle, speed))).unzip();
        for numbers in [&mut weight, &mut angle, &mut speed] {
            numbers.resize(numbers.len().next_multiple_of(8), 0.0);
        }
        let (sin, cos) = angle.iter().map(|angle| sin_cos(*angle)).unzip();
        Self { weight, angle, speed, sin, cos }
    }

    /// One step from the eight states of a block; angles are not wrapped.
    #[inline(always)]
    fn after(&self, block: usize, torque: f32) -> Eight {
        let eight = |numbers: &[f32]| numbers.as_chunks::<8>().0[block];
        let (weight, sin) = (eight(&self.weight), eight(&self.sin));
        let (mut angle, mut speed) = (eight(&self.angle), eight(&self.speed));
        for k in 0..8 {
            let faster = speed[k] + (15.0 * sin[k] + 3.0 * torque) * TAU as f32;
            speed[k] = faster.clamp(-MAX_SPEED as f32, MAX_SPEED as f32);
            angle[k] += speed[k] * TAU as f32;
        }
        Eight { weight, angle, speed }
    }

    /// Number of blocks of eight states.
    fn blocks(&self) -> usize {
        self.weight.len() / 8
    }

    /// Moves all states by a step.
    #[inline(always)]
    fn step(&mut self, torque: f32) {
        for block in 0..self.blocks() {
            let Eight { angle, speed, .. } = self.after(block, torque);
            self.angle.as_chunks_mut::<8>().0[block] = angle.map(wrap_once);
            self.speed.as_chunks_mut::<8>().0[block] = speed;
        }
        self.find_directions();
    }

    #[inline(always)]
    fn find_directions(&mut self) {
        for ((angle, sin), cos) in self.angle.iter().zip(&mut self.sin).zip(&mut self.cos) {
            (*sin, *cos) = sin_cos(*angle);
        }
    }

    /// Bayes' rule.
    #[inline(always)]
    fn weigh(&mut self, sensor: Sensor, seen: &[f32]) {
        sensor.weigh(seen[0], &self.cos, &mut self.weight);
        sensor.weigh(seen[1], &self.sin, &mut self.weight);
        normalize(&mut self.weight);
    }

    /// The sum of numbers by their weights.
    #[inline(always)]
    fn mean(&self, number: impl Fn(usize) -> f32) -> f64 {
        sum(self.weight.len(), |i| self.weight[i] * number(i))
    }

    /// One over the number of states that carry the weight.
    #[inline(always)]
    fn concentration(&self) -> f64 {
        self.mean(|i| self.weight[i])
    }
}

/// The angle between -pi and pi, for angles from -3 pi to 3 pi.
#[inline(always)]
fn wrap_once(angle: f32) -> f32 {
    const PI: f32 = std::f32::consts::PI;
    let turn = if angle >= PI { -2.0 * PI } else { 0.0 } + if angle < -PI { 2.0 * PI } else { 0.0 };
    (angle + turn).clamp(-PI, PI)
}

/// The best linear law near the top, where the equations are nearly linear: torque per angle and per speed
/// (from the discrete Riccati equation of the costs).
const GAINS: [f64; 2] = [19.693, 5.2625];

/// A player that knows the speed: computed from the change of the angle in the last step, or seen where the
/// environment shows it as a third number.
#[derive(Debug, Clone)]
pub struct PositionOnlyPendulumPlayer {
    costs: &'static Costs,
    last: Option<f64>,
}

impl PositionOnlyPendulumPlayer {
    /// A player for any difficulty.
    pub fn new(_: Difficulty) -> Self {
        Self { costs: Costs::known(), last: None }
    }
}

impl Player for PositionOnlyPendulumPlayer {
    fn reset(&mut self) {
        self.last = None;
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let angle = f64::from(observation.floats[1]).atan2(f64::from(observation.floats[0]));
        let shown = observation.floats.get(2).map(|speed| f64::from(*speed));
        let speed = shown.or_else(|| self.last.map(|last| wrap(angle - last) / TAU));
        action.floats[0] = match speed {
            None => {
                let speeds = [-0.8, -0.4, 0.0, 0.4, 0.8].map(|part| part * START_SPEED);
                let after = |_, torque| Eight::alike(&speeds.map(|speed| swing([angle, speed], torque)));
                self.costs.torque(1, after)
            }
            Some(speed) => {
                let linear = -(GAINS[0] * angle + GAINS[1] * speed) as f32;
                if linear.abs() < MAX_TORQUE {
                    linear
                } else {
                    self.costs.torque(1, |_, torque| Eight::alike(&[swing([angle, speed], torque)]))
                }
            }
        };
        self.last = Some(angle);
    }

    fn took(&mut self, _: Values<'_>) {}
}

/// Side of the grid of nodes, and its half-width in standard deviations.
const SIDE: usize = 11;
const WIDTH: f64 = 3.0;

/// A player with Bayes' rule on a grid of possible states, weighted by the observations. When few of them
/// carry most of the weight, a new grid is laid over the normal distribution with their mean and covariance.
#[derive(Debug, Clone)]
pub struct NoisyPositionOnlyPendulumPlayer {
    costs: &'static Costs,
    sensor: Sensor,
    /// A grid with mean 0, variance 1 and weights of a normal distribution.
    grid: Vec<(f32, [f32; 2])>,
    belief: Belief,
    /// The concentration of the grid's weights.
    least: f64,
    /// Whether the noise is so small that near the top the linear law of the mean state is as good as the table.
    is_sure: bool,
    torque: Option<f32>,
}

impl NoisyPositionOnlyPendulumPlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        let is_sure = difficulty == Difficulty::Easy;
        let costs = if is_sure { Costs::known() } else { Costs::uncertain() };
        let along = |i: usize| WIDTH * (2.0 * i as f64 / (SIDE - 1) as f64 - 1.0);
        let places = (0..SIDE * SIDE).map(|i| [along(i / SIDE), along(i % SIDE)]);
        let weigh = |[x, y]: [f64; 2]| (-0.5 * (x * x + y * y)).exp();
        let total: f64 = places.clone().map(weigh).sum();
        let variance: f64 = places.clone().map(|place| weigh(place) / total * place[0] * place[0]).sum();
        let grid: Vec<_> = places
            .map(|place| ((weigh(place) / total) as f32, place.map(|x| (x / variance.sqrt()) as f32)))
            .collect();
        let sensor = Sensor { sigma: sigma(difficulty) as f32, bound: 1.0 };
        let belief = Belief::new(grid.iter().map(|(weight, _)| (*weight, [0.0; 2])));
        Self { costs, sensor, least: belief.concentration(), is_sure, belief, grid, torque: None }
    }
}

impl Estimate for NoisyPositionOnlyPendulumPlayer {
    /// The torque with the least expected cost.
    type Estimate = f32;

    #[inline(always)]
    fn estimate(&mut self, seen: &[f32]) -> f32 {
        let fit = match self.torque {
            None => {
                // All angles, and two speeds that have the variance of those at the start.
                let speed = (START_SPEED / 3f64.sqrt()) as f32;
                let angle = |i: u16| (f64::from(i / 2) * (PI / 128.0) - PI) as f32;
                let mut belief =
                    Belief::new((0..512).map(|i| (1.0, [angle(i), if i % 2 == 0 { speed } else { -speed }])));
                belief.weigh(self.sensor, seen);
                Some(Normal::fit(&belief))
            }
            Some(torque) => {
                self.belief.step(torque);
                self.belief.weigh(self.sensor, seen);
                (self.belief.concentration() > 2.0 * self.least).then(|| Normal::fit(&self.belief))
            }
        };
        if let Some(normal) = fit {
            for (i, (weight, place)) in self.grid.iter().enumerate() {
                self.belief.weight[i] = *weight;
                [self.belief.angle[i], self.belief.speed[i]] = normal.state(*place);
            }
            self.belief.find_directions();
        }
        let belief = &self.belief;
        let linear = self.is_sure.then(|| {
            let direction = belief.mean(|i| belief.sin[i]).atan2(belief.mean(|i| belief.cos[i]));
            -(GAINS[0] * direction + GAINS[1] * belief.mean(|i| belief.speed[i])) as f32
        });
        match linear {
            Some(torque) if torque.abs() < MAX_TORQUE => torque,
            _ => self.costs.torque(belief.blocks(), |block, torque| belief.after(block, torque)),
        }
    }
}

/// Mean and root of the covariance of angle and speed.
struct Normal {
    mean: [f64; 2],
    root: [f64; 3],
}

impl Normal {
    fn fit(belief: &Belief) -> Self {
        let Belief { angle, speed, sin, cos, .. } = belief;
        // Angles are counted from their average direction: they jump on the far side of the circle, where
        // there are none.
        let direction = belief.mean(|i| sin[i]).atan2(belief.mean(|i| cos[i]));
        let from = direction as f32;
        let turned = belief.mean(|i| wrap_once(angle[i] - from));
        let fast = belief.mean(|i| speed[i]);
        let (a, v) =
            (|i: usize| wrap_once(angle[i] - from) - turned as f32, |i: usize| speed[i] - fast as f32);
        let covariance =
            [belief.mean(|i| a(i) * a(i)), belief.mean(|i| a(i) * v(i)), belief.mean(|i| v(i) * v(i))];
        Self { mean: [direction + turned, fast], root: root(covariance) }
    }

    /// The state that a place of the standard normal distribution stands for.
    fn state(&self, [x, y]: [f32; 2]) -> [f32; 2] {
        let ([angle, speed], [spread, shared, own]) = (self.mean, self.root);
        let (x, y) = (f64::from(x), f64::from(y));
        let speed = (speed + shared * x + own * y).clamp(-MAX_SPEED, MAX_SPEED);
        [wrap(angle + spread * x) as f32, speed as f32]
    }
}

impl Player for NoisyPositionOnlyPendulumPlayer {
    fn reset(&mut self) {
        self.torque = None;
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let torque = estimate(self, observation.floats);
        self.torque = Some(torque);
        action.floats[0] = torque;
    }

    fn took(&mut self, action: Values<'_>) {
        self.torque = Some(action.floats[0].clamp(-MAX_TORQUE, MAX_TORQUE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The gains are the fixed point of the Riccati equation of the equations linearised at the top.
    #[test]
    fn the_linear_law_is_the_best() {
        let (a, b) = ([[1.0 + 15.0 * TAU * TAU, TAU], [15.0 * TAU, 1.0]], [3.0 * TAU * TAU, 3.0 * TAU]);
        let (mut p, mut gains) = ([[1.0, 0.0], [0.0, 0.1]], [0.0; 2]);
        for _ in 0..300 {
            let pb = [0, 1].map(|i| p[i][0] * b[0] + p[i][1] * b[1]);
            let scale = 0.001 + b[0] * pb[0] + b[1] * pb[1];
            gains = [0, 1].map(|i| (pb[0] * a[0][i] + pb[1] * a[1][i]) / scale);
            let closed = [0, 1].map(|i| [0, 1].map(|j| a[i][j] - b[i] * gains[j]));
            let pc = [0, 1].map(|i| [0, 1].map(|j| p[i][0] * closed[0][j] + p[i][1] * closed[1][j]));
            p = [0, 1].map(|i| {
                [0, 1].map(|j| {
                    let own = if i == j { [1.0, 0.1][i] } else { 0.0 };
                    own + a[0][i] * pc[0][j] + a[1][i] * pc[1][j]
                })
            });
        }
        assert!((gains[0] - GAINS[0]).abs() < 1e-3 && (gains[1] - GAINS[1]).abs() < 1e-3, "{gains:?}");
    }

    #[test]
    fn costs_are_least_at_the_top_and_alike_on_both_sides() {
        let value = |state: [f64; 2]| Costs::known().expected(1, |_| Eight::alike(&[state]));
        assert!(value([0.0; 2]) < 0.5, "{}", value([0.0; 2]));
        let bottom = value([PI, 0.0]);
        assert!((300.0..700.0).contains(&bottom), "{bottom}");
        for state in [[1.0, 0.0], [2.0, -3.0], [-0.7, 5.0], [3.1, 7.9]] {
            let mirrored = value(state.map(|x| -x));
            assert!((value(state) - mirrored).abs() < 0.02 * mirrored, "{state:?}");
            let turned = value([state[0] - 2.0 * PI, state[1]]);
            assert!((value(state) - turned).abs() < 1e-2, "{state:?}");
        }
    }

    #[test]
    fn a_normal_distribution_keeps_mean_and_covariance_of_its_nodes() {
        let player = NoisyPositionOnlyPendulumPlayer::new(Difficulty::Easy);
        let normal = Normal { mean: [3.1, -2.0], root: [0.2, -0.3, 0.1] };
        let states = player.grid.iter().map(|(weight, place)| (*weight, normal.state(*place)));
        let fit = Normal::fit(&Belief::new(states));
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-5, "{a} {b}");
        fit.mean.into_iter().zip(normal.mean).for_each(|(a, b)| close(wrap(a - b), 0.0));
        fit.root.into_iter().zip(normal.root).for_each(|(a, b)| close(a, b));
    }
}
