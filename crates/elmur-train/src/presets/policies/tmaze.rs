//! T-Maze: the published settings of every baseline, which were given for crops of 150 steps. For other crops
//! everything but the length of segments and windows is the same.
//!
//! What is ours: transformers warm up for 100 optimizer steps instead of 1,000, for runs of fewer batches.

use elmur_model::presets as models;

use super::row::Row;
use super::transformer::Transformer;
use super::{Chosen, Policy, Wanted};
use crate::error::Result;
use crate::presets::settings;

/// DT, RMT (memory) and TrXL (cache).
const SIZES: Transformer = Transformer {
    d_model: 64,
    d_head: 32,
    d_ff: 64,
    heads: 8,
    layers: 8,
    memory: 10,
    cache: 450,
    valve: 0,
    dropout: 0.2,
    attention_dropout: 0.1,
    action_tanh: true,
};

const RATE: Transformer =
    Transformer { heads: 4, layers: 10, memory: 15, cache: 0, valve: 2, attention_dropout: 0.0, ..SIZES };

const TRANSFORMER: Row = Row {
    batch: 64,
    lr: 1e-4,
    weight_decay: 0.001,
    clip: 1.0,
    warmup: 1000,
    end: 0.01,
    cosine: false,
    epochs: Some(200),
};
const RATE_ROW: Row = Row { batch: 128, lr: 3e-4, weight_decay: 0.01, ..TRANSFORMER };
const MLP: Row = Row { lr: 3e-4, weight_decay: 0.01, warmup: 100, end: 0.1, epochs: Some(50), ..TRANSFORMER };
const LSTM: Row = Row { clip: 5.0, epochs: Some(100), ..MLP };
/// Also on benchmarks for which no settings were published.
pub(super) const DMAMBA: Row =
    Row { batch: 128, weight_decay: 0.1, clip: 1.0, end: 0.01, epochs: Some(200), ..MLP };

/// Weight of the published CQL's penalty.
const ALPHA: f64 = 5.0;

/// The paper's learning rate of ELMUR, for 37,500 batches.
const PUBLISHED_LR: f64 = 2.06e-4;

pub(super) fn policy(wanted: &Wanted<'_>) -> Result<Chosen> {
    let warmed = |row: Row| if wanted.name.compat { row } else { Row { warmup: 100, ..row } };
    Ok(match wanted.name.policy {
        Policy::Elmur => {
            let mut train = settings::tmaze();
            if wanted.name.compat {
                train.lr = PUBLISHED_LR;
            }
            wanted.elmur(models::tmaze(), train)
        }
        Policy::Rate => wanted.transformer(RATE, warmed(RATE_ROW)),
        Policy::Rmt | Policy::Trxl | Policy::Dt => wanted.transformer(SIZES, warmed(TRANSFORMER)),
        Policy::DMamba => (wanted.dmamba(true), wanted.train_whole(DMAMBA)),
        Policy::CqlContinuous => wanted.cql_continuous(MLP),
        Policy::Diffusion => wanted.diffusion(),
        Policy::Tt => wanted.tt(),
        Policy::BcMlp => (wanted.bc_mlp(0.2), wanted.train_whole(MLP)),
        Policy::BcLstm => (wanted.bc_lstm(), wanted.train_whole(LSTM)),
        Policy::Cql => (wanted.cql(ALPHA, 0.2), wanted.train_whole(MLP)),
        Policy::CqlLstm => (wanted.cql(ALPHA, 0.0), wanted.train_whole(LSTM)),
    })
}
