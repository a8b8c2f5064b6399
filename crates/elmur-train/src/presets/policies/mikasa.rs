//! MIKASA-Robo, from the authors' git history. The published warm-up of 10,000 optimizer steps is longer than
//! most runs; ours takes 100 steps.

use elmur_model::ends::Action;
use elmur_model::presets as models;

use super::row::Row;
use super::transformer::{CACHE, Transformer};
use super::{Chosen, Policy, Wanted};
use crate::config::RunConfig;
use crate::error::Result;
use crate::presets::settings;

/// Tasks with presets, and with hyper-parameters of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    RememberColor,
    TakeItBack,
}

/// Steps of the longest episodes that the settings for RememberColor are for.
const SHORT: usize = 120;

impl Family {
    /// The family of tasks of a run, known by its policy alone: two cameras in, eight numbers out; TakeItBack's
    /// episodes are the longest ones.
    pub fn of(run: &RunConfig) -> Option<Self> {
        let ends = run.model.architecture().ends();
        let cameras = ends.observation.iter().any(|encoder| encoder.is_image() && encoder.shape()[0] == 6);
        let robot = cameras && matches!(ends.action, Action::Continuous { dim: 8, .. });
        robot.then(|| if run.crop() <= SHORT { Family::RememberColor } else { Family::TakeItBack })
    }

    /// The transformer, and how it is trained.
    fn transformer(self) -> (Transformer, Row) {
        let row = Row {
            batch: 96,
            lr: 1e-3,
            weight_decay: 0.001,
            clip: 1.0,
            end: 0.01,
            cosine: true,
            epochs: Some(250),
            warmup: WARMUP,
        };
        match self {
            Family::RememberColor => {
                let sizes = Transformer {
                    d_model: 64,
                    d_head: 128,
                    d_ff: 64,
                    heads: 2,
                    layers: 10,
                    memory: 10,
                    cache: 300,
                    valve: 0,
                    dropout: 0.3,
                    attention_dropout: 0.2,
                    action_tanh: false,
                };
                (sizes, row)
            }
            Family::TakeItBack => {
                let sizes = Transformer {
                    d_model: 128,
                    d_head: 64,
                    d_ff: 128,
                    heads: 8,
                    layers: 4,
                    memory: 15,
                    cache: 40,
                    valve: 0,
                    dropout: 0.2,
                    attention_dropout: 0.2,
                    action_tanh: false,
                };
                (
                    sizes,
                    Row {
                        batch: 32,
                        lr: 1e-4,
                        weight_decay: 0.1,
                        clip: 3.0,
                        end: 0.001,
                        cosine: false,
                        ..row
                    },
                )
            }
        }
    }
}

/// Warm-up of the published runs.
const WARMUP: u64 = 10_000;

/// Behaviour cloning and Q-learning.
const CLONING: Row = Row {
    batch: 96,
    lr: 3e-4,
    weight_decay: 0.1,
    clip: 1.0,
    warmup: WARMUP,
    end: 0.1,
    cosine: true,
    epochs: Some(150),
};

pub(super) fn policy(family: Family, wanted: &Wanted<'_>) -> Result<Chosen> {
    let published = wanted.name.compat;
    let sensible = |row: Row| if published { row } else { Row { warmup: 100, ..row } };
    let (sizes, row) = family.transformer();
    let (row, cloning) = (sensible(row), sensible(CLONING));
    Ok(match wanted.name.policy {
        Policy::Elmur => match family {
            Family::RememberColor => wanted.elmur(models::remember_color(), settings::remember_color()),
            Family::TakeItBack => wanted.elmur(models::take_it_back(), settings::take_it_back()),
        },
        // The published one is trained on the first third of every episode.
        Policy::Dt if published => {
            Wanted { crop: wanted.crop.div_ceil(3), ..wanted.clone() }.transformer(sizes, row)
        }
        Policy::Trxl => wanted.transformer(Transformer { cache: CACHE, ..sizes }, row),
        Policy::Rate | Policy::Rmt | Policy::Dt => wanted.transformer(sizes, row),
        Policy::DMamba => (wanted.dmamba(false), wanted.train(cloning, 1)),
        Policy::CqlContinuous => wanted.cql_continuous(cloning),
        Policy::Diffusion => wanted.diffusion(),
        Policy::Tt => wanted.tt(),
        Policy::BcMlp => (wanted.bc_mlp(0.0), wanted.train(cloning, 1)),
        Policy::BcLstm => (wanted.bc_lstm(), wanted.train(cloning, 1)),
        Policy::Cql | Policy::CqlLstm => (wanted.cql(1.0, 0.0), wanted.train(cloning, 1)),
    })
}
