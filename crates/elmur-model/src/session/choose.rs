//! From head outputs to actions.

use elmur_base::ValuesMut;
use elmur_engine::rng::{Stream, unit};

use crate::ends::Action;

/// How actions are chosen from a policy's outputs. Continuous actions are the outputs themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Choose {
    /// The likeliest choice of every component.
    #[default]
    Greedy,
    /// A choice drawn with the policy's probabilities, from the row's own stream of random numbers: the seed
    /// of the row's reset decides it.
    Sample,
}

/// The random numbers of a row: draws `next`, `next + 1`, ... of the stream of its seed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Draws {
    pub(super) seed: u64,
    pub(super) next: u64,
}

impl Draws {
    /// The random numbers that a row has after a reset with this seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, next: 0 }
    }

    /// A normal number with mean 0 and standard deviation 1.
    pub fn normal(&mut self) -> f64 {
        // 1 - u lies in (0, 1].
        let (u, angle) = (1.0 - self.below(1.0), self.below(std::f64::consts::TAU));
        (-2.0 * u.ln()).sqrt() * angle.cos()
    }

    /// A number uniform in `[0, high)`.
    pub fn below(&mut self, high: f64) -> f64 {
        // The order in which `Rng` draws.
        let block = Stream::new(self.seed, self.next >> 34, u32::MAX).block((self.next >> 2) as u32);
        let draw = block[(self.next & 3) as usize];
        self.next += 1;
        high * unit(draw)
    }
}

/// Writes the action that one row's outputs mean.
pub(super) fn choose(action: &Action, outputs: &[f32], how: Choose, draws: &mut Draws, to: ValuesMut<'_>) {
    if !action.is_discrete() {
        to.floats.copy_from_slice(outputs);
        return;
    }
    let mut rest = outputs;
    for (size, chosen) in action.sizes().iter().zip(to.ints) {
        let (logits, after) = rest.split_at(*size);
        rest = after;
        *chosen = match how {
            Choose::Greedy => greedy(logits),
            Choose::Sample => sample(logits, draws),
        };
    }
}

/// The first of the largest logits.
fn greedy(logits: &[f32]) -> i32 {
    let mut best = 0;
    for (i, x) in logits.iter().enumerate() {
        if *x > logits[best] {
            best = i;
        }
    }
    best as i32
}

/// A choice with the probabilities that the logits mean.
fn sample(logits: &[f32], draws: &mut Draws) -> i32 {
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |x: &f32| f64::from(x - top).exp();
    let mut left = draws.below(logits.iter().map(weight).sum());
    let chosen = logits.iter().position(|x| {
        left -= weight(x);
        left < 0.0
    });
    chosen.unwrap_or(logits.len() - 1) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_follows_the_logits() {
        let logits: Vec<f32> = [0.5f32, 0.25, 0.25].iter().map(|p| p.ln() + 3.0).collect();
        let mut draws = Draws { seed: 1, next: 0 };
        let mut counts = [0u32; 3];
        for _ in 0..10_000 {
            counts[sample(&logits, &mut draws) as usize] += 1;
        }
        let expected = [5000.0, 2500.0, 2500.0];
        let chi: f64 = counts.iter().zip(expected).map(|(c, e)| (f64::from(*c) - e).powi(2) / e).sum();
        assert!(chi < 13.8, "{counts:?}");
        assert_eq!(draws.next, 10_000);
    }

    #[test]
    fn normal_draws_have_mean_0_and_variance_1() {
        let mut draws = Draws::new(5);
        let all: Vec<f64> = (0..20_000).map(|_| draws.normal()).collect();
        let moment = |power: i32| all.iter().map(|x| x.powi(power)).sum::<f64>() / all.len() as f64;
        assert!(moment(1).abs() < 0.03 && (moment(2) - 1.0).abs() < 0.04 && (moment(4) - 3.0).abs() < 0.3);
    }

    #[test]
    fn draws_are_those_of_the_random_generator() {
        let (mut draws, mut rng) = (Draws { seed: 9, next: 0 }, elmur_engine::rng::Rng::new(9, u32::MAX));
        for _ in 0..100 {
            assert_eq!(draws.below(2.0), rng.uniform(0.0, 2.0));
        }
    }

    #[test]
    fn every_component_is_chosen_from_its_own_logits() {
        let action = Action::MultiCategorical { sizes: vec![2, 3] };
        let mut chosen = [9; 2];
        let outputs = [0.0, 1.0, 5.0, 7.0, 7.0];
        let (how, draws) = (Choose::Greedy, &mut Draws::default());
        choose(&action, &outputs, how, draws, ValuesMut::ints(&mut chosen));
        assert_eq!(chosen, [1, 1]);
    }
}
