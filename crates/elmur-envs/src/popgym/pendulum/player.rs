//! Players of the pendulum tasks. Both choose the torque with the least expected cost from now on, read from a table; one knows the
//! state, the other what it may be.

use std::f64::consts::PI;
use std::sync::OnceLock;

use super::{MAX_SPEED, MAX_TORQUE, START_SPEED, TAU, cost, swing, wrap};
use crate::env::Player;
use crate::popgym::noise::{Sensor, root, sigma};
use crate::popgym::task::Difficulty;
use crate::space::{Values, ValuesMut};

/// Angles and speeds of the table.
const ANGLES: usize = 161;
const SPEEDS: usize = 161;
const ANGLE_STEP: f64 = 2.0 * PI / ANGLES as f64;
const SPEED_STEP: f64 = 2.0 * MAX_SPEED / (SPEEDS - 1) as f64;
/// As many steps ahead as the longest episode has.
const SWEEPS: usize = 200;

/// Least cost from now on for angles from -pi (rows) and speeds from -8 (columns), by value iteration.
#[derive(Debug)]
struct Costs(Vec<f32>);

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
fn place([angle, speed]: [f64; 2]) -> ([usize; 2], [f32; 2]) {
    let row = (angle + PI) / ANGLE_STEP + ANGLES as f64;
    let column = (speed + MAX_SPEED) / SPEED_STEP;
    let (low, left) = (row as usize, (column as usize).min(SPEEDS - 2));
    let corners = [low % ANGLES * SPEEDS + left, (low + 1) % ANGLES * SPEEDS + left];
    (corners, [(row - low as f64) as f32, (column - left as f64) as f32])
}

#[inline]
fn between(table: &[f32], corners: [usize; 2], parts: [f32; 2]) -> f32 {
    let [low, high] = corners.map(|at| table[at] + parts[1] * (table[at + 1] - table[at]));
    low + parts[0] * (high - low)
}

impl Costs {
    /// For one who knows the state.
    fn known() -> &'static Self {
        static COSTS: OnceLock<Costs> = OnceLock::new();
        COSTS.get_or_init(|| Self::new([0, 0]))
    }

    /// For one whose idea of the state changes by surprise.
    fn uncertain() -> &'static Self {
        static COSTS: OnceLock<Costs> = OnceLock::new();
        COSTS.get_or_init(|| Self::new([2, 3]))
    }

    /// Value iteration where every step is followed, with probability 1/6 each, by a jump of so many rows and columns up or down.
    fn new([rows, columns]: [usize; 2]) -> Self {
        let torques = [-MAX_TORQUE, 0.0, MAX_TORQUE];
        let moves: Vec<[Move; 3]> = (0..ANGLES * SPEEDS)
            .map(|at| {
                let angle = (at / SPEEDS) as f64 * ANGLE_STEP - PI;
                let state = [angle, (at % SPEEDS) as f64 * SPEED_STEP - MAX_SPEED];
                torques.map(|torque| {
                    let (corners, parts) = place(swing(state, torque));
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
        Self(table)
    }

    /// The torque with the least expected cost: the best of five, or between two of them where a parabola through the best and its
    /// neighbours has its minimum.
    fn torque(&self, belief: &[Node]) -> f32 {
        let value = |torque: f32| {
            let ahead = |node: &Node| {
                let (corners, parts) = place(swing(node.state, torque));
                node.weight * f64::from(between(&self.0, corners, parts))
            };
            belief.iter().map(ahead).sum::<f64>() + f64::from(0.001 * torque * torque)
        };
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

/// A possible state.
#[derive(Debug, Clone, Copy)]
struct Node {
    weight: f64,
    state: [f64; 2],
}

/// The best linear law near the top, where the equations are nearly linear: torque per angle and per speed (from the discrete Riccati
/// equation of the costs).
const GAINS: [f64; 2] = [19.693, 5.2625];

/// Knows the speed: it is the change of the angle in the last step.
#[derive(Debug, Clone)]
pub struct PositionOnlyPendulumPlayer {
    costs: &'static Costs,
    last: Option<f64>,
}

impl PositionOnlyPendulumPlayer {
    /// For any difficulty.
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
        let speed = self.last.map_or(0.0, |last| wrap(angle - last) / TAU);
        self.last = Some(angle);
        let linear = -(GAINS[0] * angle + GAINS[1] * speed) as f32;
        action.floats[0] = if linear.abs() < MAX_TORQUE {
            linear
        } else {
            self.costs.torque(&[Node { weight: 1.0, state: [angle, speed] }])
        };
    }
}

/// Side of the grid of nodes, and its half-width in standard deviations.
const SIDE: usize = 11;
const WIDTH: f64 = 3.0;

/// Bayes' rule on a grid of possible states, weighted by what has been seen. When few of them carry most of the weight, a new grid is
/// laid over the normal distribution with their mean and covariance.
#[derive(Debug, Clone)]
pub struct NoisyPositionOnlyPendulumPlayer {
    costs: &'static Costs,
    sensor: Sensor,
    /// A grid with mean 0, variance 1 and weights of a normal distribution.
    grid: Vec<Node>,
    belief: Vec<Node>,
    torque: Option<f32>,
}

impl NoisyPositionOnlyPendulumPlayer {
    /// For the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        let costs = if difficulty == Difficulty::Easy { Costs::known() } else { Costs::uncertain() };
        let along = |i: usize| WIDTH * (2.0 * i as f64 / (SIDE - 1) as f64 - 1.0);
        let mut grid: Vec<Node> = (0..SIDE * SIDE)
            .map(|i| [along(i / SIDE), along(i % SIDE)])
            .map(|[x, y]| Node { weight: (-0.5 * (x * x + y * y)).exp(), state: [x, y] })
            .collect();
        normalize(&mut grid);
        let variance: f64 = grid.iter().map(|node| node.weight * node.state[0] * node.state[0]).sum();
        for node in &mut grid {
            node.state = node.state.map(|x| x / variance.sqrt());
        }
        let sensor = Sensor { sigma: sigma(difficulty), bound: 1.0 };
        Self { costs, sensor, belief: grid.clone(), grid, torque: None }
    }
}

fn normalize(nodes: &mut [Node]) {
    let total: f64 = nodes.iter().map(|node| node.weight).sum();
    nodes.iter_mut().for_each(|node| node.weight /= total);
}

/// Bayes' rule.
fn weigh(nodes: &mut [Node], sensor: Sensor, seen: &[f32]) {
    for node in nodes.iter_mut() {
        let (sin, cos) = node.state[0].sin_cos();
        node.weight *= sensor.likelihood(seen[0], cos) * sensor.likelihood(seen[1], sin);
    }
    normalize(nodes);
}

/// One over the number of nodes that carry the weight.
fn concentration(nodes: &[Node]) -> f64 {
    nodes.iter().map(|node| node.weight * node.weight).sum()
}

/// Mean and root of the covariance of angle and speed.
struct Normal {
    mean: [f64; 2],
    root: [f64; 3],
}

impl Normal {
    fn fit(nodes: &[Node]) -> Self {
        let (mut sin, mut cos, mut speed) = (0.0, 0.0, 0.0);
        for Node { weight, state } in nodes {
            sin += weight * state[0].sin();
            cos += weight * state[0].cos();
            speed += weight * state[1];
        }
        // Angles are counted from their average direction: they jump on the far side of the circle, where there are none.
        let direction = sin.atan2(cos);
        let angle: f64 = nodes.iter().map(|node| node.weight * wrap(node.state[0] - direction)).sum();
        let mut covariance = [0.0; 3];
        for Node { weight, state } in nodes {
            let (a, v) = (wrap(state[0] - direction) - angle, state[1] - speed);
            covariance.iter_mut().zip([a * a, a * v, v * v]).for_each(|(sum, x)| *sum += weight * x);
        }
        Self { mean: [direction + angle, speed], root: root(covariance) }
    }

    /// The state that a place of the standard normal distribution stands for.
    fn state(&self, [x, y]: [f64; 2]) -> [f64; 2] {
        let ([angle, speed], [spread, shared, own]) = (self.mean, self.root);
        [wrap(angle + spread * x), (speed + shared * x + own * y).clamp(-MAX_SPEED, MAX_SPEED)]
    }
}

impl Player for NoisyPositionOnlyPendulumPlayer {
    fn reset(&mut self) {
        self.torque = None;
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let fit = match self.torque {
            None => {
                // All angles, and two speeds that have the variance of those at the start.
                let speed = START_SPEED / 3f64.sqrt();
                let mut nodes: [Node; 512] = std::array::from_fn(|i| Node {
                    weight: 1.0,
                    state: [(i / 2) as f64 * (PI / 128.0) - PI, if i % 2 == 0 { speed } else { -speed }],
                });
                weigh(&mut nodes, self.sensor, observation.floats);
                Some(Normal::fit(&nodes))
            }
            Some(torque) => {
                for node in &mut self.belief {
                    let [angle, speed] = swing(node.state, torque);
                    node.state = [wrap(angle), speed];
                }
                weigh(&mut self.belief, self.sensor, observation.floats);
                let few = concentration(&self.belief) > 2.0 * concentration(&self.grid);
                few.then(|| Normal::fit(&self.belief))
            }
        };
        if let Some(normal) = fit {
            for (node, Node { weight, state }) in self.belief.iter_mut().zip(&self.grid) {
                *node = Node { weight: *weight, state: normal.state(*state) };
            }
        }
        let torque = self.costs.torque(&self.belief);
        self.torque = Some(torque);
        action.floats[0] = torque;
    }
}
