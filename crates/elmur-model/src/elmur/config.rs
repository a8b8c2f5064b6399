//! What an ELMUR model is made of.

use serde::{Deserialize, Serialize};

use crate::ends::{Action, Encoder, Ends, Token, TokenFormat, read_encoders};
use crate::error::{Error, Result};

/// An ELMUR model: sizes, memory, feed-forward networks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Elmur {
    /// One encoder per leaf of the observation.
    #[serde(deserialize_with = "read_encoders")]
    pub observation: Vec<Encoder>,
    /// What the policy does.
    pub action: Action,
    /// Tokens that an environment step becomes.
    pub tokens: TokenFormat,
    /// Width of tokens and memory vectors.
    pub d_model: usize,
    /// Attention heads; must divide `d_model`.
    pub heads: usize,
    /// Layers, each with a memory of its own.
    pub layers: usize,
    /// Environment steps per segment: the window of self-attention, and the interval between memory writes.
    pub segment_length: usize,
    /// The external memory.
    pub memory: MemoryConfig,
    /// Feed-forward network of the token and of the memory track.
    pub ffn: Ffn,
    /// Normalisation.
    pub norm: NormType,
    /// `x + f(norm(x))` instead of `norm(x + f(x))`.
    pub pre_norm: bool,
    /// Dropout of embeddings, position encodings, attention outputs and feed-forward outputs.
    pub dropout: f64,
    /// Dropout of attention weights.
    pub attention_dropout: f64,
    /// Behaviours of the published Python code that differ from the paper.
    #[serde(default)]
    pub compat: Compat,
}

/// The external memory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryConfig {
    /// Slots per layer, M.
    pub slots: usize,
    /// Weight of a new vector in a slot that has been written before, lambda.
    pub lambda: f64,
    /// How a memory begins.
    pub init: MemoryInit,
    /// How far gradients flow back through writes.
    pub gradient: MemoryGradient,
    /// Slots written per segment (paper: 1).
    pub slots_per_write: usize,
    /// Candidates computed per segment: only those that are written, or all (for comparison).
    pub candidates: Candidates,
    /// Dropout of what is written, in training.
    pub dropout: f64,
    /// Reach of the relative bias, D: offsets are clamped to ±(D - 1).
    pub max_distance: usize,
    /// Ablation: tokens read the memory.
    pub read: bool,
    /// Ablation: tokens write the memory.
    pub write: bool,
    /// Ablation: attention between tokens and memory is biased by time.
    pub relative_bias: bool,
    /// Ablation: least-recently-used replacement; without it every slot is replaced by its candidate.
    pub lru: bool,
    /// Ablation: one memory for all layers, written by each in turn. A later layer then reads in a segment
    /// what an earlier one wrote from all of it, future steps included, so training sees more than acting
    /// does; not with action tokens, where that would include the answer.
    pub shared: bool,
}

/// How a memory begins.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum MemoryInit {
    /// Normal numbers, drawn anew for every episode.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// A trained vector per layer and slot.
    Learned,
}

/// How far gradients flow back through writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryGradient {
    /// Not at all (paper): an optimizer step per segment, and the write path learns nothing from the task.
    Detached,
    /// Through this many consecutive segments, one optimizer step for all of them.
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

/// Candidates that are computed for a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Candidates {
    /// Only those that are written.
    Selected,
    /// One per slot.
    All,
}

/// A feed-forward network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Ffn {
    /// A mixture of SwiGLU experts.
    Moe {
        /// Routed experts, E.
        experts: usize,
        /// Their hidden width.
        routed_d_ff: usize,
        /// Experts that every token uses.
        shared_experts: usize,
        /// Their hidden width.
        shared_d_ff: usize,
        /// Experts per token, the shared ones included; at least one routed expert is used.
        top_k: usize,
        /// Weight of the load-balancing loss.
        balance: f64,
        /// Dropout of hidden units.
        dropout: f64,
    },
    /// A dense SwiGLU.
    SwiGlu {
        /// Hidden width.
        d_ff: usize,
    },
    /// Linear, exact GELU, linear, with biases.
    Gelu {
        /// Hidden width.
        d_ff: usize,
    },
}

/// Normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormType {
    /// LayerNorm with scale and shift.
    Layer,
    /// RMSNorm with scale.
    Rms,
}

/// Behaviours of the published Python code that differ from the paper; all off by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Compat {
    /// Blend empty slots by lambda too.
    pub empty_slot_blend: bool,
    /// In read and write biases, count a segment's tokens from the newest.
    pub newest_first_times: bool,
    /// Add the segment's start to the distances of self-attention.
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

    /// Checks everything that the types leave open.
    pub fn validate(&self) -> Result<()> {
        let check = |ok: bool, key: &str, expected: &str, got: String| {
            if ok {
                Ok(())
            } else {
                Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), got })
            }
        };
        let m = &self.memory;
        let size = |n: usize| (1..=1 << 20).contains(&n);
        check(size(self.d_model), "d_model", "1 to 1048576", self.d_model.to_string())?;
        check(self.d_model.is_multiple_of(2), "d_model", "an even width", self.d_model.to_string())?;
        let divides = self.heads > 0 && self.d_model.is_multiple_of(self.heads);
        check(divides, "heads", &format!("a divisor of d_model = {}", self.d_model), self.heads.to_string())?;
        check((1..=1024).contains(&self.layers), "layers", "1 to 1024", self.layers.to_string())?;
        check(size(self.segment_length), "segment_length", "1 to 1048576", self.segment_length.to_string())?;
        let window = self.segment_tokens().saturating_mul(self.d_model);
        let tokens = self.segment_tokens().to_string();
        check(window <= 1 << 26, "segment_length", "at most 67108864 / d_model tokens per segment", tokens)?;
        check(size(m.slots), "memory.slots", "1 to 1048576", m.slots.to_string())?;
        check((0.0..=1.0).contains(&m.lambda), "memory.lambda", "0 to 1", m.lambda.to_string())?;
        let writes = (1..=m.slots).contains(&m.slots_per_write);
        check(writes, "memory.slots_per_write", "1 to memory.slots", m.slots_per_write.to_string())?;
        check(size(m.max_distance), "memory.max_distance", "1 to 1048576", m.max_distance.to_string())?;
        let has_actions = self.tokens.has(Token::Action);
        check(!(m.shared && has_actions), "memory.shared", "false with action tokens", "true".to_owned())?;
        let total = m.slots.saturating_mul(self.d_model).saturating_mul(self.layers);
        check(
            total <= 1 << 28,
            "memory.slots",
            "at most 268435456 numbers in all layers",
            m.slots.to_string(),
        )?;
        if let MemoryInit::Normal { std } = m.init {
            check(std >= 0.0 && std.is_finite(), "memory.init.std", "0 or more", std.to_string())?;
        }
        if let MemoryGradient::Through(k) = m.gradient {
            check((1..=4096).contains(&k), "memory.gradient", "through(1) to through(4096)", k.to_string())?;
        }
        for (key, p) in [
            ("dropout", self.dropout),
            ("attention_dropout", self.attention_dropout),
            ("memory.dropout", m.dropout),
        ] {
            check((0.0..1.0).contains(&p), key, "0 or more and below 1", p.to_string())?;
        }
        match &self.ffn {
            Ffn::Moe { experts, routed_d_ff, shared_experts, shared_d_ff, top_k, balance, dropout } => {
                check((1..=65536).contains(experts), "ffn.experts", "1 to 65536", experts.to_string())?;
                check(size(*routed_d_ff), "ffn.routed_d_ff", "1 to 1048576", routed_d_ff.to_string())?;
                check(
                    *shared_experts <= 4096,
                    "ffn.shared_experts",
                    "at most 4096",
                    shared_experts.to_string(),
                )?;
                let width = *shared_experts == 0 || size(*shared_d_ff);
                check(width, "ffn.shared_d_ff", "1 to 1048576", shared_d_ff.to_string())?;
                let routed = top_k.saturating_sub(*shared_experts).max(1);
                check(
                    routed <= *experts,
                    "ffn.top_k",
                    "at most experts + shared_experts",
                    top_k.to_string(),
                )?;
                check(
                    *balance >= 0.0 && balance.is_finite(),
                    "ffn.balance",
                    "0 or more",
                    balance.to_string(),
                )?;
                check(
                    (0.0..1.0).contains(dropout),
                    "ffn.dropout",
                    "0 or more and below 1",
                    dropout.to_string(),
                )?;
            }
            Ffn::SwiGlu { d_ff } | Ffn::Gelu { d_ff } => {
                check(size(*d_ff), "ffn.d_ff", "1 to 1048576", d_ff.to_string())?;
            }
        }
        self.ends().validate()
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
