//! What a policy is judged by, with its name and which way is better.

use elmur_base::Statistics;
use elmur_envs::Metric;
use serde::Serialize;

/// What a number about a policy measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Mean sum of rewards of an episode.
    Return,
    /// Share of episodes that solved the task.
    SuccessRate,
    /// Share of recorded discrete actions that the policy predicts.
    Accuracy,
    /// Mean squared error of predicted continuous actions.
    MeanSquaredError,
    /// Training loss, where there is nothing else to judge by.
    Loss,
}

impl Measure {
    /// The name in metrics files and JSON output.
    pub fn key(self) -> &'static str {
        match self {
            Measure::Return => "return",
            Measure::SuccessRate => "success_rate",
            Measure::Accuracy => "accuracy",
            Measure::MeanSquaredError => "mean_squared_error",
            Measure::Loss => "training_loss",
        }
    }

    /// The name in text and pictures.
    pub fn name(self) -> &'static str {
        match self {
            Measure::Return => "return",
            Measure::SuccessRate => "success rate",
            Measure::Accuracy => "accuracy",
            Measure::MeanSquaredError => "mean squared error",
            Measure::Loss => "training loss",
        }
    }

    /// Whether smaller numbers are better.
    pub fn is_error(self) -> bool {
        matches!(self, Measure::MeanSquaredError | Measure::Loss)
    }

    /// The number as a score of which more is better.
    pub fn score(self, value: f64) -> f64 {
        if self.is_error() { -value } else { value }
    }
}

impl From<Metric> for Measure {
    fn from(metric: Metric) -> Self {
        match metric {
            Metric::Return => Measure::Return,
            Metric::Success => Measure::SuccessRate,
        }
    }
}

/// The outcome of a validation or evaluation: a measure, and its mean and spread over episodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// What was measured.
    pub measure: Measure,
    /// Mean and spread over episodes.
    pub value: Statistics,
}

impl std::fmt::Display for Score {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:.3} ± {:.3}", self.measure.name(), self.value.mean, self.value.sem)
    }
}
