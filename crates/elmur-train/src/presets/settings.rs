//! How ELMUR is trained on each benchmark.

use elmur_model::Elmur;

use crate::config::{PrecisionName, TrainConfig};
use crate::schedule::{Decay, Schedule, Unit};

/// T-Maze as in the paper, but for its learning rate: 2.06e-4 is for 37,500 batches; with it one seed of twelve
/// does not hold 9,600 steps within 1,000.
pub fn tmaze() -> TrainConfig {
    TrainConfig {
        seed: 0,
        begin_with: None,
        batch: 128,
        segments: 3,
        epochs: Some(1000),
        batches: None,
        lr: 5e-4,
        schedule: Schedule {
            unit: Unit::Tokens,
            warmup: 10_000,
            decay: Decay::Cosine,
            total: None,
            end_factor: 1.0,
            from_zero: false,
        },
        label_smoothing: 0.16,
        after_success: 1.0,
        changes: 0.0,
        success_reward: 1.0,
        clip: 5.0,
        weight_decay: 1e-4,
        betas: (0.95, 0.999),
        standardize: false,
        standardize_integers: false,
        checkpoint_every: 100,
        max_loss: 1e4,
        threads: None,
        device: "cpu".to_owned(),
        precision: PrecisionName::default(),
    }
}

/// T-Maze for a small model.
pub fn tmaze_quick() -> TrainConfig {
    TrainConfig { epochs: Some(54), lr: 1e-3, ..tmaze() }
}

/// MIKASA-Robo RememberColor as in the paper.
pub fn remember_color() -> TrainConfig {
    TrainConfig {
        batch: 64,
        epochs: Some(200),
        lr: 2.05e-4,
        schedule: Schedule { warmup: 30_000, end_factor: 0.1, ..tmaze().schedule },
        label_smoothing: 0.21,
        weight_decay: 1e-3,
        betas: (0.99, 0.99),
        ..tmaze()
    }
}

/// MIKASA-Robo TakeItBack as in the paper.
pub fn take_it_back() -> TrainConfig {
    TrainConfig {
        epochs: Some(300),
        lr: 2.57e-4,
        schedule: linear(30_000, 0.01),
        label_smoothing: 0.20,
        clip: 1.0,
        weight_decay: 0.01,
        betas: (0.9, 0.99),
        ..remember_color()
    }
}

/// POPGym AutoencodeEasy as in the paper, for all of its tasks.
pub fn popgym_paper() -> TrainConfig {
    TrainConfig {
        epochs: Some(800),
        lr: 1.16e-4,
        schedule: linear(50_000, 0.01),
        label_smoothing: 0.22,
        weight_decay: 0.1,
        betas: (0.99, 0.99),
        ..tmaze()
    }
}

/// CartPole-v1 as in the paper's table.
pub fn cartpole() -> TrainConfig {
    TrainConfig {
        batch: 512,
        epochs: Some(100),
        lr: 3.0e-4,
        schedule: Schedule { warmup: 1000, end_factor: 0.1, ..tmaze().schedule },
        label_smoothing: 0.0,
        clip: 1.0,
        weight_decay: 0.01,
        betas: (0.9, 0.999),
        ..tmaze()
    }
}

/// Our small ELMUR on crops of `steps` steps, without a limit on epochs; about as many steps in a batch,
/// however long the crops.
pub fn small(model: &Elmur, steps: usize) -> TrainConfig {
    TrainConfig {
        segments: model.memory.gradient.segments(),
        batch: crops(steps),
        epochs: None,
        lr: 1e-3,
        schedule: Schedule { decay: Decay::Cosine, ..linear(50, 0.1) },
        label_smoothing: 0.0,
        clip: 1.0,
        weight_decay: 0.01,
        betas: (0.9, 0.98),
        ..tmaze()
    }
}

/// Crops of `steps` steps in a batch of about 8,192 steps: 8 to 128.
pub fn crops(steps: usize) -> usize {
    (8192 / steps.max(1)).clamp(8, 128)
}

/// A warm-up of this many optimizer steps, then a linear decay to a share of the peak.
fn linear(warmup: u64, end_factor: f64) -> Schedule {
    Schedule { unit: Unit::Steps, warmup, decay: Decay::Linear, total: None, end_factor, from_zero: false }
}
