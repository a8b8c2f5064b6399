//! POPGym: the published sizes of each family, which RATE and Decision Transformer share.
//!
//! What is ours: runs of 3,000 batches instead of 400 epochs (so that behaviour cloning has a higher learning
//! rate), fewer crops in a batch where they are long, whole episodes as context for Decision Transformer,
//! where the published one is trained on their first third; segments of at most 70 steps. The paper did not run
//! RMT, TrXL, DMamba, CQL and TT here: sizes of RMT and TrXL are RATE's.

use elmur_envs::popgym::{Family, Task};
use elmur_model::presets as models;

use super::row::Row;
use super::transformer::{CACHE, Transformer};
use super::{Chosen, Policy, Wanted};
use crate::error::Result;
use crate::presets::popgym::{crop, published_segment};
use crate::presets::settings;

/// Behaviour cloning, on all tasks.
const CLONING: Row = Row {
    batch: 128,
    lr: 3e-4,
    weight_decay: 0.01,
    clip: 5.0,
    warmup: 100,
    end: 0.1,
    cosine: false,
    epochs: Some(400),
};
const DMAMBA: Row = Row { epochs: Some(400), ..super::tmaze::DMAMBA };

/// Learning rate of behaviour cloning and Q-learning in 3,000 batches.
const LR: f64 = 1e-3;

/// A family's transformer, and how it is trained.
fn family(family: Family) -> (Transformer, Row) {
    // d_model, d_head, d_ff; heads, layers; memory, cache, valve; dropout, attention dropout; batch, lr, weight
    // decay, clip, end of the decay, cosine.
    let (d, (heads, layers), memory, drop, (batch, lr, weight_decay, clip, end, cosine)) = match family {
        Family::Autoencode => {
            ([128, 64, 128], (8, 8), [10, 300, 0], [0.2, 0.2], (32, 3e-4, 0.001, 3.0, 0.1, false))
        }
        Family::Battleship => {
            ([32, 128, 128], (8, 10), [30, 70, 0], [0.3, 0.05], (256, 3e-4, 0.1, 3.0, 0.01, true))
        }
        Family::Concentration => {
            ([256, 32, 128], (2, 2), [30, 70, 0], [0.0, 0.2], (256, 1e-4, 0.001, 3.0, 0.1, true))
        }
        Family::CountRecall => {
            ([32, 64, 32], (2, 10), [30, 100, 2], [0.1, 0.05], (32, 3e-4, 0.001, 5.0, 0.1, false))
        }
        Family::HigherLower => {
            ([256, 32, 128], (4, 10), [15, 300, 0], [0.1, 0.1], (32, 3e-4, 0.1, 5.0, 0.01, true))
        }
        Family::LabyrinthEscape => {
            ([128, 64, 64], (8, 8), [2, 300, 0], [0.3, 0.2], (128, 1e-3, 0.001, 5.0, 0.01, true))
        }
        Family::LabyrinthExplore => {
            ([32, 64, 32], (4, 10), [10, 100, 2], [0.1, 0.2], (256, 1e-3, 0.01, 3.0, 0.01, false))
        }
        Family::MineSweeper => {
            ([256, 64, 128], (8, 8), [30, 40, 2], [0.1, 0.1], (128, 1e-3, 0.001, 3.0, 0.01, true))
        }
        Family::MultiarmedBandit => {
            ([64, 128, 128], (2, 2), [15, 70, 2], [0.3, 0.2], (256, 1e-3, 0.01, 5.0, 0.01, true))
        }
        Family::NoisyPositionOnlyCartPole => {
            ([256, 32, 128], (2, 2), [5, 100, 0], [0.2, 0.1], (64, 3e-4, 0.1, 5.0, 0.01, false))
        }
        Family::NoisyPositionOnlyPendulum => {
            ([256, 32, 256], (4, 10), [2, 70, 2], [0.3, 0.1], (128, 3e-4, 0.001, 5.0, 0.01, false))
        }
        Family::PositionOnlyCartPole => {
            ([256, 64, 256], (8, 10), [2, 300, 2], [0.0, 0.2], (32, 1e-4, 0.1, 5.0, 0.01, true))
        }
        Family::PositionOnlyPendulum => {
            ([128, 256, 64], (4, 2), [5, 40, 0], [0.0, 0.05], (64, 3e-4, 0.01, 1.0, 0.01, true))
        }
        Family::RepeatFirst => {
            ([64, 64, 32], (8, 8), [30, 40, 2], [0.2, 0.1], (64, 1e-3, 0.001, 1.0, 0.01, false))
        }
        Family::RepeatPrevious => {
            ([64, 128, 256], (8, 4), [10, 100, 2], [0.1, 0.1], (256, 1e-3, 0.001, 5.0, 0.01, false))
        }
        Family::VelocityOnlyCartpole => {
            ([64, 64, 32], (8, 10), [30, 100, 0], [0.2, 0.1], (128, 1e-4, 0.001, 5.0, 0.1, true))
        }
    };
    let ([d_model, d_head, d_ff], [memory, cache, valve]) = (d, memory);
    let [dropout, attention_dropout] = drop;
    let pendulum = matches!(family, Family::NoisyPositionOnlyPendulum | Family::PositionOnlyPendulum);
    let sizes = Transformer {
        d_model,
        d_head,
        d_ff,
        heads,
        layers,
        memory,
        cache,
        valve,
        dropout,
        attention_dropout,
        action_tanh: pendulum,
    };
    (sizes, Row { batch, lr, weight_decay, clip, warmup: 100, end, cosine, epochs: Some(400) })
}

pub(super) fn policy(task: Task, wanted: Wanted<'_>) -> Result<Chosen> {
    let published = wanted.name.compat;
    let crop = if published { 3 * published_segment(task) } else { crop(task) };
    let wanted = Wanted { crop, ..wanted };
    let (sizes, mut row) = family(task.family);
    let (mut cloning, mut dmamba) = (CLONING, DMAMBA);
    if !published {
        row.batch = row.batch.min(settings::crops(crop));
        (cloning.lr, dmamba.lr) = (LR, LR);
    }
    Ok(match wanted.name.policy {
        Policy::Elmur if published => {
            let model = models::popgym_paper(wanted.observation.clone(), wanted.action.clone(), crop / 3);
            wanted.elmur(model, settings::popgym_paper())
        }
        Policy::Elmur => {
            let model = models::popgym_small(wanted.observation.clone(), wanted.action.clone(), crop);
            let train = settings::small(&model, crop);
            wanted.elmur(model, train)
        }
        // The published one is trained on the first third of every episode.
        Policy::Dt if published => Wanted { crop: crop / 3, ..wanted }.transformer(sizes, row),
        Policy::Trxl => wanted.transformer(Transformer { cache: CACHE, ..sizes }, row),
        Policy::Rate | Policy::Rmt | Policy::Dt => wanted.transformer(sizes, row),
        Policy::DMamba => (wanted.dmamba(sizes.action_tanh), wanted.train_whole(dmamba)),
        Policy::CqlContinuous => wanted.cql_continuous(cloning),
        Policy::Diffusion => wanted.diffusion(),
        Policy::Tt => wanted.tt(),
        Policy::BcMlp => (wanted.bc_mlp(0.2), wanted.train_whole(cloning)),
        Policy::BcLstm => (wanted.bc_lstm(), wanted.train_whole(cloning)),
        Policy::Cql | Policy::CqlLstm => (wanted.cql(1.0, 0.2), wanted.train_whole(cloning)),
    })
}
