//! The transformers of the paper's tables: DT, TrXL, RMT and RATE are one decoder with parts switched off.

use elmur_model::PolicyConfig;
use elmur_model::baselines::{TransformerXl, TransformerXlCompat};
use elmur_model::presets as models;

use super::row::Row;
use super::{Chosen, Policy, Wanted};

/// Sizes of a Transformer-XL decoder: one row of a table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transformer {
    pub d_model: usize,
    pub d_head: usize,
    /// Of the feed-forward networks, which RATE does without.
    pub d_ff: usize,
    pub heads: usize,
    pub layers: usize,
    /// Memory tokens of RMT and RATE.
    pub memory: usize,
    /// Tokens of the cache of RATE and TrXL.
    pub cache: usize,
    /// Heads of RATE's valve.
    pub valve: usize,
    pub dropout: f64,
    pub attention_dropout: f64,
    /// Whether action embeddings are squashed by tanh.
    pub action_tanh: bool,
}

/// Tokens of a step: return, observation, action.
const TOKENS: usize = 3;
/// Tokens of TrXL's cache where none were published: as for T-Maze, where they hold a crop of 150 steps.
pub(super) const CACHE: usize = 450;

impl Wanted<'_> {
    /// Segments that a crop is cut into: three as published, but of at most 70 steps where that is ours to
    /// choose.
    fn segments(&self) -> usize {
        if self.name.compat || self.crop <= 210 { 3 } else { self.crop.div_ceil(70) }
    }

    /// One of the four transformers, which is trained on whole crops (DT) or segment by segment.
    ///
    /// RMT and RATE train what they write: gradients flow through all segments of a crop, with one optimizer
    /// step for all of them. The published code cuts gradients between segments and takes a step for each.
    pub fn transformer(&self, sizes: Transformer, row: Row) -> Chosen {
        let published = self.name.compat;
        let Transformer { d_model, d_head, heads, layers, dropout, attention_dropout, action_tanh, .. } =
            sizes;
        let (segments, window) = match self.name.policy {
            Policy::Dt => (1, self.crop),
            _ => (self.segments(), self.crop.div_ceil(self.segments())),
        };
        let (observation, action, _) = self.ends();
        let base = TransformerXl {
            d_model,
            d_head,
            d_ff: Some(sizes.d_ff),
            heads,
            layers,
            dropout,
            attention_dropout,
            action_tanh,
            ..models::dt(observation, action, window)
        };
        let through = if published { 1 } else { segments };
        let mut model = match self.name.policy {
            Policy::Rate => TransformerXl {
                d_ff: None,
                memory_tokens: sizes.memory,
                cache_tokens: sizes.cache,
                valve_heads: sizes.valve,
                unroll: through,
                slides: false,
                ..base
            },
            Policy::Rmt => {
                TransformerXl { memory_tokens: sizes.memory, unroll: through, slides: false, ..base }
            }
            Policy::Trxl => {
                // Training fills no more than a crop.
                let most = if published { usize::MAX } else { TOKENS * self.crop };
                TransformerXl { cache_tokens: sizes.cache.min(most), slides: false, ..base }
            }
            _ => base,
        };
        if published {
            model.compat = TransformerXlCompat {
                double_residual: true,
                wrapped_memory_distances: model.memory_tokens > 0,
                equal_memory_tokens: model.memory_tokens > 0,
                valve_dropout_in_eval: model.valve_heads > 0,
                shifted_actions: true,
                commit_without_last_action: !model.slides,
            };
        }
        let train = if segments == 1 { self.train_whole(row) } else { self.train(row, segments) };
        (PolicyConfig::TransformerXl(model), train)
    }
}
