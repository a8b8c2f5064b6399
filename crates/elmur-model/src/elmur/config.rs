//! What an ELMUR model is made of.

use elmur_base::Describe;
use serde::{Deserialize, Deserializer, Serialize};

use crate::ends::{Action, Encoder, Ends, TokenFormat, read_encoders};

/// An ELMUR model: sizes, memory, feed-forward networks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct Elmur {
    /// How observations become vectors: a list with one encoder per leaf of the observation space. Follows
    /// from the environment or the dataset unless given.
    #[serde(deserialize_with = "read_encoders")]
    pub observation: Vec<Encoder>,
    /// The kind of action that the policy chooses, and how many choices or numbers it has. Follows from the
    /// environment or the dataset unless given.
    pub action: Action,
    /// Tokens that one environment step becomes, in order; the action is read at the observation's token.
    pub tokens: TokenFormat,
    /// Width of tokens and memory vectors: an even number that `heads` divides, up to 1048576.
    pub d_model: usize,
    /// Number of attention heads, each `d_model / heads` wide; must divide `d_model`.
    pub heads: usize,
    /// Number of layers, each with a memory of its own: 1 to 1024.
    pub layers: usize,
    /// Environment steps per segment: how far self-attention looks back, and the interval between writes of
    /// the memory.
    pub segment_length: usize,
    /// The external memory of every layer: its size, and how it is read and written.
    pub memory: MemoryConfig,
    /// The kind of feed-forward network after attention, for tokens and for what is written to memory.
    pub ffn: Ffn,
    /// The kind of normalisation around every sub-layer.
    pub norm: NormType,
    /// Whether sub-layers normalise what they read, `x + f(norm(x))`, instead of what they leave,
    /// `norm(x + f(x))`.
    pub pre_norm: bool,
    /// Share of embeddings, position encodings, attention outputs and feed-forward outputs that training sets
    /// to zero: 0 or more and below 1.
    pub dropout: f64,
    /// Share of attention weights that training sets to zero: 0 or more and below 1.
    pub attention_dropout: f64,
    /// Behaviours of the published Python code that differ from the paper, to reproduce its results.
    #[serde(default)]
    pub compat: Compat,
}

/// The external memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct MemoryConfig {
    /// Number of memory vectors (slots) of each layer, M in the paper.
    pub slots: usize,
    /// Weight of the new vector when a slot is written again, 0 to 1: 1 replaces the old vector, 0 keeps it.
    /// A slot that was never written takes the new vector whole.
    pub lambda: f64,
    /// What the memory holds when an episode begins.
    pub init: MemoryInit,
    /// How far gradients flow back through writes of the memory in training.
    pub gradient: MemoryGradient,
    /// Number of slots written at the end of each segment, 1 to `slots` (paper: 1); the least recently
    /// written come first. Must be 1 where `replacement` is `all`.
    pub slots_per_write: usize,
    /// Which candidates for new vectors are computed at the end of a segment; the results are the same, `all`
    /// is slower and serves comparison.
    pub candidates: Candidates,
    /// Share of what is written to memory that training sets to zero: 0 or more and below 1.
    pub dropout: f64,
    /// Reach in tokens of the bias by time between tokens and memory, D: larger differences count as D - 1.
    pub max_distance: usize,
    /// Whether tokens read the memory; false is an ablation.
    pub read: bool,
    /// Whether tokens write the memory; false is an ablation.
    pub write: bool,
    /// Whether attention between tokens and memory is biased by the time between them; false is an ablation.
    pub relative_bias: bool,
    /// Which slots a write replaces; `all` is an ablation. (The key `lru` of earlier files, true or false, is
    /// still read.)
    #[serde(alias = "lru", deserialize_with = "read_replacement")]
    pub replacement: Replacement,
    /// Whether all layers share one memory, written by each in turn; true is an ablation. A later layer then
    /// reads in a segment what an earlier one wrote from all of it, future steps included, so training sees
    /// more than acting does; not with action tokens, where that would include the answer.
    pub shared: bool,
}

/// What a memory holds when an episode begins.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum MemoryInit {
    /// Normal numbers, drawn anew for every episode.
    Normal {
        /// Standard deviation of the numbers that a memory begins with: 0 or more.
        std: f64,
    },
    /// A trained vector per layer and slot.
    Learned,
}

/// How far gradients flow back through writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum MemoryGradient {
    /// Not at all (paper): an optimizer step per segment, and the write path learns nothing from the task.
    Detached,
    /// Through this many consecutive segments (1 to 4096), with one optimizer step for all of them.
    Through(usize),
}

impl MemoryGradient {
    /// Segments of one optimizer step.
    pub fn segments(self) -> usize {
        match self {
            MemoryGradient::Detached => 1,
            MemoryGradient::Through(k) => k,
        }
    }
}

/// Slots that a write replaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum Replacement {
    /// The least recently written ones, blended by `lambda`; empty slots first (paper).
    Lru,
    /// Every slot, each by its own candidate; `lambda` is not used.
    All,
}

/// Reads a replacement by name, or the boolean `lru` of earlier files.
fn read_replacement<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Replacement, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    match value.as_bool() {
        Some(true) => Ok(Replacement::Lru),
        Some(false) => Ok(Replacement::All),
        None => serde_json::from_value(value).map_err(serde::de::Error::custom),
    }
}

/// Candidates that are computed for a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum Candidates {
    /// Only those that are written.
    Selected,
    /// One per slot.
    All,
}

/// A feed-forward network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Ffn {
    /// A mixture of SwiGLU experts.
    Moe {
        /// Number of routed experts, of which each token uses a few: 1 to 65536.
        experts: usize,
        /// Hidden width of a routed expert.
        routed_d_ff: usize,
        /// Number of experts that every token uses; 0 for none.
        shared_experts: usize,
        /// Hidden width of a shared expert.
        shared_d_ff: usize,
        /// Number of experts per token, the shared ones included; at least one routed expert is used.
        top_k: usize,
        /// Weight of the load-balancing loss, which keeps routed experts equally busy: 0 or more.
        balance: f64,
        /// Share of the experts' hidden units that training sets to zero: 0 or more and below 1.
        dropout: f64,
    },
    /// A dense SwiGLU.
    SwiGlu {
        /// Hidden width of the feed-forward network.
        d_ff: usize,
    },
    /// Linear, exact GELU, linear, with biases.
    Gelu {
        /// Hidden width of the feed-forward network.
        d_ff: usize,
    },
}

/// Normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum NormType {
    /// LayerNorm with scale and shift.
    Layer,
    /// RMSNorm with scale.
    Rms,
}

/// Behaviours of the published Python code that differ from the paper; all off by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields, default)]
pub struct Compat {
    /// Whether slots that were never written are blended by `memory.lambda` too.
    pub empty_slot_blend: bool,
    /// Whether the biases by time count a segment's tokens from the newest instead of the oldest.
    pub newest_first_times: bool,
    /// Whether the segment's start is added to the distances that self-attention sees.
    pub absolute_offset: bool,
}

impl Elmur {
    /// Tokens of one segment.
    pub fn segment_tokens(&self) -> usize {
        self.segment_length * self.tokens.per_step()
    }

    /// Memories: one per layer, or one for all.
    pub fn memories(&self) -> usize {
        if self.memory.shared { 1 } else { self.layers }
    }

    /// Encoders, action and tokens.
    pub fn ends(&self) -> Ends<'_> {
        Ends {
            observation: &self.observation,
            action: &self.action,
            tokens: self.tokens,
            width: self.d_model,
        }
    }
}
