//! Learning rates over the course of training: linear warm-up, then constant, cosine or linear decay.

use elmur_base::Describe;
use serde::{Deserialize, Serialize};

use crate::none::none_or_positive;

/// The unit that a schedule counts in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Imitated actions (padding does not count), as the published code does with cosine decay.
    Tokens,
    /// Optimizer steps.
    Steps,
}

/// Decay of the learning rate after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// No decay.
    Constant,
    /// Half a cosine.
    Cosine,
    /// A straight line.
    Linear,
}

/// A learning-rate schedule; the factor is applied to the peak rate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Unit that `warmup` and `total` are counted in.
    pub unit: Unit,
    /// Number of units over which the learning rate rises from 0 to its peak.
    pub warmup: u64,
    /// Decay of the learning rate after warm-up.
    pub decay: Decay,
    /// Number of units after which the decay ends; null: at the end of training.
    #[serde(deserialize_with = "none_or_positive")]
    pub total: Option<u64>,
    /// Final learning rate as a share of the peak, 0 to 1.
    pub end_factor: f64,
    /// Whether a step counts after its own rate is chosen, so that the first step of a warm-up has rate 0, as
    /// published diffusion policies are trained.
    #[serde(default)]
    pub from_zero: bool,
}

impl Schedule {
    /// The factor when `done` units have been processed, the current step's included unless the schedule
    /// counts from zero; `planned` units make the whole training. After the end it stays at `end_factor` (the published cosine rises again).
    pub fn factor(&self, done: u64, planned: u64) -> f64 {
        if done < self.warmup {
            return done as f64 / self.warmup as f64;
        }
        let total = self.total.unwrap_or(planned);
        let part = (done - self.warmup) as f64 / (total.saturating_sub(self.warmup)).max(1) as f64;
        let part = part.min(1.0);
        match self.decay {
            Decay::Constant => 1.0,
            Decay::Cosine => self.end_factor.max(0.5 * (1.0 + (std::f64::consts::PI * part).cos())),
            Decay::Linear => 1.0 + (self.end_factor - 1.0) * part,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_at_known_places() {
        let mut schedule = Schedule {
            unit: Unit::Steps,
            warmup: 10,
            decay: Decay::Cosine,
            total: Some(110),
            end_factor: 0.1,
            from_zero: false,
        };
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        near(schedule.factor(1, 0), 0.1);
        near(schedule.factor(10, 0), 1.0);
        near(schedule.factor(60, 0), 0.5);
        near(schedule.factor(110, 0), 0.1);
        near(schedule.factor(500, 0), 0.1);
        schedule.decay = Decay::Linear;
        near(schedule.factor(60, 0), 0.55);
        near(schedule.factor(500, 0), 0.1);
        schedule.total = None;
        near(schedule.factor(60, 210), 1.0 - 0.9 * 0.25);
        schedule.decay = Decay::Constant;
        near(schedule.factor(500, 20), 1.0);
        schedule.warmup = 0;
        near(schedule.factor(0, 0), 1.0);
    }
}
