//! CartPole-v1: the published settings, where an epoch shows every stretch of 90 steps of every episode. Ours
//! shows each step about once, so that runs take as many epochs as the preset does.

use elmur_model::presets as models;

use super::row::Row;
use super::transformer::Transformer;
use super::{Chosen, Policy, Wanted};
use crate::error::Result;
use crate::presets::settings;

/// RATE and RMT (memory); the paper did not run Decision Transformer here.
const TRANSFORMER: Transformer = Transformer {
    d_model: 128,
    d_head: 128,
    d_ff: 128,
    heads: 4,
    layers: 4,
    memory: 15,
    cache: 0,
    valve: 2,
    dropout: 0.2,
    attention_dropout: 0.0,
    action_tanh: true,
};

const TRXL: Transformer = Transformer { cache: 90, ..TRANSFORMER };

/// Stretches of 90 steps in an episode of 500, for one epoch of the published code, and for one of ours.
const STRETCHES: (u64, u64) = (411, 6);

const fn epochs(published: u64) -> u64 {
    published * STRETCHES.0 / STRETCHES.1
}

const SEGMENTS: Row = Row {
    batch: 256,
    lr: 3e-4,
    weight_decay: 0.01,
    clip: 1.0,
    warmup: 1000,
    end: 0.01,
    cosine: false,
    epochs: Some(epochs(5)),
};
const MLP: Row = Row { batch: 512, warmup: 100, end: 0.1, epochs: Some(epochs(50)), ..SEGMENTS };
const DMAMBA: Row = Row { batch: 256, weight_decay: 0.1, warmup: 100, ..SEGMENTS };
const LSTM: Row = Row { clip: 5.0, epochs: Some(epochs(100)), ..MLP };

/// Weight of the published CQL's penalty.
const ALPHA: f64 = 5.0;

pub(super) fn policy(wanted: &Wanted<'_>) -> Result<Chosen> {
    Ok(match wanted.name.policy {
        Policy::Elmur => wanted.elmur(models::cartpole(), settings::cartpole()),
        Policy::Trxl => wanted.transformer(TRXL, SEGMENTS),
        Policy::Rate | Policy::Rmt | Policy::Dt => wanted.transformer(TRANSFORMER, SEGMENTS),
        Policy::DMamba => (wanted.dmamba(true), wanted.train(DMAMBA, 1)),
        Policy::CqlContinuous => wanted.cql_continuous(MLP),
        Policy::Diffusion => wanted.diffusion(),
        Policy::Tt => wanted.tt(),
        Policy::BcMlp => (wanted.bc_mlp(0.2), wanted.train(MLP, 1)),
        Policy::BcLstm => (wanted.bc_lstm(), wanted.train(LSTM, 1)),
        Policy::Cql => (wanted.cql(ALPHA, 0.2), wanted.train(MLP, 1)),
        Policy::CqlLstm => (wanted.cql(ALPHA, 0.0), wanted.train(LSTM, 1)),
    })
}
