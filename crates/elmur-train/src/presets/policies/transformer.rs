//! Sizes of the transformers of the paper's tables.

use elmur_model::PolicyConfig;
use elmur_model::baselines::TransformerXl;
use elmur_model::presets as models;

use super::Wanted;

/// Sizes of a Transformer-XL decoder: one row of a table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transformer {
    pub d_model: usize,
    pub d_head: usize,
    pub d_ff: usize,
    pub heads: usize,
    pub layers: usize,
    pub dropout: f64,
    pub attention_dropout: f64,
    /// Whether action embeddings are squashed by tanh.
    pub action_tanh: bool,
}

impl Wanted<'_> {
    /// Decision Transformer that looks back on `window` steps.
    pub fn dt(&self, sizes: Transformer, window: usize) -> PolicyConfig {
        let Transformer { d_model, d_head, d_ff, heads, layers, dropout, attention_dropout, action_tanh } =
            sizes;
        let (observation, action, _) = self.ends();
        let mut model: TransformerXl = models::dt(observation, action, window);
        model = TransformerXl {
            d_model,
            d_head,
            d_ff: Some(d_ff),
            heads,
            layers,
            dropout,
            attention_dropout,
            action_tanh,
            ..model
        };
        model.compat.double_residual = self.name.compat;
        PolicyConfig::TransformerXl(model)
    }
}
