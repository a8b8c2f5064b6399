//! How a policy is trained: the columns of the paper's tables, and what becomes of them.

use crate::config::TrainConfig;
use crate::schedule::{Decay, Schedule, Unit};

use super::Wanted;

/// Training of one policy on one benchmark, as the paper's tables have it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row {
    /// Crops of a batch.
    pub batch: usize,
    /// Peak learning rate.
    pub lr: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Global gradient norm.
    pub clip: f64,
    /// Optimizer steps of warm-up; in the published code tokens where the decay is a cosine.
    pub warmup: u64,
    /// Final share of the learning rate.
    pub end: f64,
    /// Whether the decay is a cosine instead of a straight line.
    pub cosine: bool,
    /// Passes over the data; none: as many as the run takes that the policy is for.
    pub epochs: Option<u64>,
}

/// Tokens after which the published cosine ends.
const FINAL_TOKENS: u64 = 10_000_000;

impl Wanted<'_> {
    /// How the policy is trained: a row of a table, with crops cut into `segments` windows. The betas and the
    /// missing label smoothing are those of all published baselines.
    ///
    /// By default the schedule counts optimizer steps and ends with the run, and the run is not longer than
    /// that which the policy is for. As published (`-compat`) a cosine counts tokens to 1e7 whatever the
    /// run's length, and a run takes the paper's epochs.
    pub fn train(&self, row: Row, segments: usize) -> TrainConfig {
        let published = self.name.compat;
        let (unit, total) = match published && row.cosine {
            true => (Unit::Tokens, Some(FINAL_TOKENS)),
            false => (Unit::Steps, None),
        };
        let decay = if row.cosine { Decay::Cosine } else { Decay::Linear };
        self.train_as(TrainConfig {
            segments,
            batch: row.batch,
            epochs: row.epochs,
            batches: None,
            lr: row.lr,
            schedule: Schedule {
                unit,
                warmup: row.warmup,
                decay,
                total,
                end_factor: row.end,
                from_zero: false,
            },
            label_smoothing: 0.0,
            clip: row.clip,
            weight_decay: row.weight_decay,
            betas: (0.9, 0.999),
            standardize: self.base.train.standardize && !published,
            standardize_integers: self.base.train.standardize_integers && !published,
            ..self.base.train.clone()
        })
    }

    /// [`Wanted::train`] on whole crops, with one optimizer step per batch. The published linear decay is
    /// planned for the three steps per batch of policies with segments, so that it ends a third of the way.
    pub fn train_whole(&self, row: Row) -> TrainConfig {
        let mut train = self.train(row, 1);
        if let (true, false, Some(epochs)) = (self.name.compat, row.cosine, row.epochs) {
            let batches = self.base.data.episodes.div_ceil(row.batch) as u64;
            train.schedule.total = Some(row.warmup + 3 * epochs * batches);
        }
        train
    }

    /// Training by these settings on the machine and with the seed of the run that the policy is for. The
    /// epochs of these settings are cut by that run's limits, unless they are the published ones.
    pub fn train_as(&self, settings: TrainConfig) -> TrainConfig {
        let base = &self.base.train;
        let (epochs, batches) = match (self.name.compat, settings.epochs, base.epochs) {
            (true, Some(published), _) => (Some(published), None),
            (_, Some(own), Some(of_run)) => (Some(own.min(of_run)), base.batches),
            (_, _, of_run) => (of_run, base.batches),
        };
        TrainConfig {
            seed: base.seed,
            epochs,
            batches,
            checkpoint_every: base.checkpoint_every,
            max_loss: base.max_loss,
            threads: base.threads,
            device: base.device.clone(),
            precision: base.precision,
            ..settings
        }
    }
}
