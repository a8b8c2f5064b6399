//! Your own environments and data: small models, trained like our small ELMUR.

use elmur_model::presets as models;

use super::row::Row;
use super::transformer::{CACHE, Transformer};
use super::{Chosen, Policy, Wanted};
use crate::error::Result;
use crate::presets::settings;

const TRANSFORMER: Transformer = Transformer {
    d_model: 64,
    d_head: 16,
    d_ff: 128,
    heads: 4,
    layers: 3,
    memory: 8,
    cache: CACHE,
    valve: 2,
    dropout: 0.1,
    attention_dropout: 0.0,
    action_tanh: false,
};

/// Training of every policy, for as long as the preset takes.
const ROW: Row = Row {
    batch: 128,
    lr: 1e-3,
    weight_decay: 0.01,
    clip: 1.0,
    warmup: 50,
    end: 0.1,
    cosine: true,
    epochs: None,
};

pub(super) fn policy(wanted: &Wanted<'_>) -> Result<Chosen> {
    let row = Row { batch: settings::crops(wanted.crop), ..ROW };
    Ok(match wanted.name.policy {
        Policy::Elmur => {
            let model = models::popgym_small(wanted.observation.clone(), wanted.action.clone(), wanted.crop);
            let train = settings::small(&model, wanted.crop);
            wanted.elmur(model, train)
        }
        // Memory tokens are what RATE has to show: no cache that could hold a whole crop.
        Policy::Rate => wanted.transformer(Transformer { cache: 0, ..TRANSFORMER }, row),
        Policy::Rmt | Policy::Trxl | Policy::Dt => wanted.transformer(TRANSFORMER, row),
        Policy::DMamba => (wanted.dmamba(false), wanted.train(row, 1)),
        Policy::CqlContinuous => wanted.cql_continuous(row),
        Policy::Diffusion => wanted.diffusion(),
        Policy::Tt => wanted.tt(),
        Policy::BcMlp => (wanted.bc_mlp(0.1), wanted.train(row, 1)),
        Policy::BcLstm => (wanted.bc_lstm(), wanted.train(row, 1)),
        Policy::Cql | Policy::CqlLstm => (wanted.cql(1.0, 0.1), wanted.train(row, 1)),
    })
}
