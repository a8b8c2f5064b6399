//! Transformer-XL over returns, observations and actions. With its parts switched on and off it is Decision
//! Transformer (DT), Transformer-XL with a cache (TrXL), Recurrent Memory Transformer (RMT) or RATE, as the
//! paper runs them.
//!
//! ```text
//! X     = W_R r_t + b,  encoder(o_t),  embedding(a_t)  per step, 3 * window tokens
//! x_0   = dropout [M ; X ; M]              m memory vectors before and after the tokens
//! K_l   = [cache_l ; x_l]                  keys and values; queries are the rows of x_l alone
//! s_ij  = [ (q_i + u) . k_j + (q_i + v) . (W_r PE(p_i - j)) ] / sqrt(D)      heads of width D; H * D need not be d
//! y     = LN1(x_l + W_o attention);   x_(l+1) = LN2(y + W_2 relu(W_1 y + b_1) + b_2), or y without d_ff
//! M'    = trailing rows, or valve(M, trailing rows)      cache_l' = the last rows of [cache_l ; x_l]
//! ```
//!
//! Who sees whom: leading memory rows see each other; tokens see the cache, the leading memory and earlier
//! tokens; trailing memory rows see all but the cache. So leading rows do not depend on the tokens, nor tokens
//! on the trailing rows, and a session steps through a window with keys and values of what came before.
//! Where that would not be exact, the window is run again: DT's slides (deeper layers have seen steps that left
//! it), and the published code has distances that depend on the length of the window.

mod layers;
mod steps;

use elmur_base::Describe;
use elmur_engine::{Activation as Act, Value};
use serde::{Deserialize, Deserializer, Serialize};

use super::layers::{check_counts, check_dropout};
use crate::architecture::Architecture;
use crate::ends::{Action, Encoder, Ends, Token, TokenFormat, read_encoders};
use crate::error::{Error, Result};
use crate::initial::Init;
use crate::net::{Net, Start};
use crate::phase::{Phase, Window};
use crate::sizes::{Sizes, check_depth};

/// A Transformer-XL decoder: DT, TrXL, RMT or RATE by its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct TransformerXl {
    /// How observations become vectors: a list with one encoder per leaf of the observation space. Follows
    /// from the environment or the dataset unless given.
    #[serde(deserialize_with = "read_encoders")]
    pub observation: Vec<Encoder>,
    /// The kind of action that the policy chooses, and how many choices or numbers it has. Follows from the
    /// environment or the dataset unless given.
    pub action: Action,
    /// Width of tokens: an even number up to 1048576.
    pub d_model: usize,
    /// Number of attention heads: 1 to 4096.
    pub heads: usize,
    /// Width of an attention head; `heads * d_head` need not be `d_model`.
    pub d_head: usize,
    /// Hidden width of the feed-forward networks; null or 0 for layers without one, as RATE's.
    #[serde(deserialize_with = "none_for_zero")]
    pub d_ff: Option<usize>,
    /// Number of layers: 1 to 1024.
    pub layers: usize,
    /// Environment steps of a segment: what is computed together, in training and when acting.
    pub window: usize,
    /// Memory vectors before and after the tokens of a segment, which carry what it leaves behind: 0 to 65536.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory_tokens: usize,
    /// Hidden states of every layer, in tokens, that are kept from earlier segments to look back on: 0 to
    /// 1048576. No gradient flows into them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cache_tokens: usize,
    /// Heads of RATE's memory retention valve, attention of the old memory to the new one; 0 replaces the
    /// memory.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub valve_heads: usize,
    /// What the valve applies to the new memory before attention: relu or none.
    #[serde(default, skip_serializing_if = "ValveActivation::is_relu")]
    pub valve_activation: ValveActivation,
    /// Share of embeddings, position encodings, attention outputs, feed-forward hidden units and outputs that
    /// training sets to zero: 0 or more and below 1.
    pub dropout: f64,
    /// Share of attention weights that training sets to zero: 0 or more and below 1.
    pub attention_dropout: f64,
    /// Whether action embeddings are squashed by tanh (the published code does so but for discrete POPGym
    /// actions and MIKASA).
    pub action_tanh: bool,
    /// Segments of one optimizer step, 1 to 4096, with gradients through the memory that is carried from one to
    /// the next. The published code has 1 and so never trains what memory is written.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub unroll: usize,
    /// Whether the window slides when acting, so that the newest `window` steps are always in view, as DT's
    /// does. Windows with memory or a cache begin anew when they are full.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub slides: bool,
    /// Behaviours of the published Python code that differ from the method, to reproduce its results.
    #[serde(default)]
    pub compat: TransformerXlCompat,
}

/// What the valve applies to the new memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum ValveActivation {
    /// max(x, 0).
    #[default]
    Relu,
    /// The new memory as it is.
    None,
}

/// Behaviours of the published Python code that differ from the method; all off by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields, default)]
pub struct TransformerXlCompat {
    /// Whether the residual is added twice around attention: LN(2x + attention).
    pub double_residual: bool,
    /// Whether distances between memory vectors that look ahead are what the published shift of matrices reads
    /// there: nothing for the next one, and for others the next row's query at a distance from the far end.
    #[serde(skip_serializing_if = "is_no")]
    pub wrapped_memory_distances: bool,
    /// Whether all memory vectors start as one and the same random vector.
    #[serde(skip_serializing_if = "is_no")]
    pub equal_memory_tokens: bool,
    /// Whether the valve's attention weights are dropped when acting too.
    #[serde(skip_serializing_if = "is_no")]
    pub valve_dropout_in_eval: bool,
    /// Whether the window shows, when acting, each action one step too early, and a zero for the newest.
    #[serde(skip_serializing_if = "is_no")]
    pub shifted_actions: bool,
    /// Whether a segment's memory and cache are computed, when acting, without the segment's last action.
    #[serde(skip_serializing_if = "is_no")]
    pub commit_without_last_action: bool,
}

fn none_for_zero<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Option<usize>, D::Error> {
    Ok(Option::deserialize(deserializer)?.filter(|width| *width > 0))
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

fn one() -> usize {
    1
}

fn is_one(n: &usize) -> bool {
    *n == 1
}

fn yes() -> bool {
    true
}

fn is_yes(flag: &bool) -> bool {
    *flag
}

fn is_no(flag: &bool) -> bool {
    !*flag
}

impl ValveActivation {
    fn is_relu(&self) -> bool {
        *self == ValveActivation::Relu
    }
}

/// Tokens of a step.
const TOKENS: TokenFormat = TokenFormat::ReturnObservationAction;

impl TransformerXl {
    /// Name of the state that holds the memory vectors, [rows, memory tokens, d].
    pub const MEMORY: &str = "memory";

    /// Name of the state that holds the newest inputs of layer `l`, [rows, cache tokens, d]; the newest last.
    pub fn cache_state(l: usize) -> String {
        format!("cache.{l}")
    }

    /// Tokens of a whole segment.
    fn tokens(&self) -> usize {
        TOKENS.per_step() * self.window
    }

    /// Width of all heads.
    fn inner(&self) -> usize {
        self.heads * self.d_head
    }

    /// Whether distances ahead depend on how many tokens the window holds.
    fn wraps_around(&self) -> bool {
        self.compat.wrapped_memory_distances && self.memory_tokens >= 3
    }

    /// Cache rows that hold something after `windows` segments of `tokens` tokens each.
    fn cached(&self, windows: u64, tokens: usize) -> usize {
        let each = (tokens + 2 * self.memory_tokens) as u64;
        windows.saturating_mul(each).min(self.cache_tokens as u64) as usize
    }

    /// The parameters, added up; an error for models that are too large to build.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        check_depth("unroll", self.unroll, self.layers)?;
        let (d, heads, d_head, layers) = (self.d_model, self.heads, self.d_head, self.layers);
        let (m, c) = (self.memory_tokens, self.cache_tokens);
        let mut sizes = Sizes::default();
        self.ends().add_sizes(&mut sizes, d, self.window)?;
        let rows = self.window.saturating_mul(3).saturating_add(2 * m);
        let keys = rows.saturating_add(c);
        for (key, shape) in [
            ("window", &[heads, rows, keys][..]),
            ("window", &[keys, 3, heads, d_head]),
            ("window", &[keys.saturating_add(m), d]),
            ("window", &[rows, self.d_ff.unwrap_or(0)]),
        ] {
            sizes.value(if c > rows { "cache_tokens" } else { key }, shape)?;
        }
        sizes.param("d_head", 2, &[heads, d_head])?;
        sizes.param("d_head", layers, &[3, heads, d_head, d])?;
        sizes.param("d_head", 2 * layers, &[heads, d_head, d])?;
        sizes.param("d_model", 2 * layers, &[d])?;
        if let Some(d_ff) = self.d_ff {
            sizes.param("d_ff", 2 * layers, &[d_ff, d])?;
            sizes.param("d_ff", layers, &[d_ff])?;
            sizes.param("d_model", 3 * layers, &[d])?;
        }
        sizes.param("memory_tokens", 1, &[m, d])?;
        if self.valve_heads > 0 {
            sizes.param("d_model", 4, &[d, d])?;
            sizes.param("d_model", 4, &[d])?;
        }
        Ok(sizes)
    }

    /// The memory vectors of the rows at hand, [rows, memory tokens, d]; none without memory.
    fn memory(&self, net: &mut Net<'_>) -> Result<Option<Value>> {
        if self.memory_tokens == 0 {
            return Ok(None);
        }
        let init = if self.compat.equal_memory_tokens { Init::Repeated(1.0) } else { Init::Normal(1.0) };
        let start = Start::Learned(Self::MEMORY_START.to_owned(), init);
        net.carried(Self::MEMORY, &[self.memory_tokens, self.d_model], start).map(Some)
    }

    /// Name of the parameter that the memory starts as.
    pub(crate) const MEMORY_START: &str = "memory_start";

    fn action_activation(&self) -> Act {
        if self.action_tanh { Act::Tanh } else { Act::Identity }
    }

    /// Embeddings of a window's tokens, [rows, tokens, d].
    fn embed(&self, net: &mut Net<'_>) -> Result<Value> {
        let x = if net.reruns() && self.compat.shifted_actions {
            let mut parts = vec![net.embed(&[Token::Return], Act::Identity)?];
            parts.push(net.encode_observation()?);
            parts.push(self.shifted_actions(net)?);
            net.interleave(&parts)?
        } else {
            net.embed(TOKENS.tokens(), self.action_activation())?
        };
        let tokens = self.window_tokens(net);
        if tokens == self.tokens() { Ok(x) } else { Ok(net.g.slice(x, 1, 0..tokens)?) }
    }

    /// Tokens of the pass: all of a segment's, or without the last action's.
    fn window_tokens(&self, net: &Net<'_>) -> usize {
        let without = net.reruns() && self.compat.commit_without_last_action;
        self.tokens() - usize::from(without)
    }

    /// Embeddings of actions, each in the place of the one before and zero for the newest, [rows, steps, d].
    fn shifted_actions(&self, net: &mut Net<'_>) -> Result<Value> {
        let embedded = net.encode_action(self.action_activation())?;
        let zero = net.encode_zero_action(self.action_activation())?;
        let all = net.g.concat(&[embedded, zero], 1)?;
        let (steps, most) = (self.window, self.window_tokens(net));
        let which = net.integers("shifted", elmur_engine::DType::I32, &[steps], move |progress, step| {
            let known = progress.tokens.min(most) / TOKENS.per_step();
            if step + 1 < known { step as i64 + 1 } else { steps as i64 }
        })?;
        Ok(net.g.gather_slots(all, which)?)
    }
}

impl Architecture for TransformerXl {
    fn validate(&self) -> Result<()> {
        check_counts(&[
            ("d_model", self.d_model, 1 << 20),
            ("heads", self.heads, 4096),
            ("d_head", self.d_head, 1 << 16),
            ("d_ff", self.d_ff.unwrap_or(1), 1 << 20),
            ("layers", self.layers, 1024),
            ("window", self.window, 1 << 20),
            ("unroll", self.unroll, 4096),
        ])?;
        let refuse = |key: &str, expected: String, got: String| {
            Err(Error::Config { key: key.to_owned(), expected, got })
        };
        if !self.d_model.is_multiple_of(2) {
            return refuse("d_model", "an even width".to_owned(), self.d_model.to_string());
        }
        for (key, count, most) in
            [("memory_tokens", self.memory_tokens, 1 << 16), ("cache_tokens", self.cache_tokens, 1 << 20)]
        {
            if count > most {
                return refuse(key, format!("0 to {most}"), count.to_string());
            }
        }
        if self.valve_heads > 0 && !self.d_model.is_multiple_of(self.valve_heads) {
            let expected = format!("0 or a divisor of d_model = {}", self.d_model);
            return refuse("valve_heads", expected, self.valve_heads.to_string());
        }
        if self.valve_heads > 0 && self.memory_tokens == 0 {
            let expected = "0 where there are no memory_tokens".to_owned();
            return refuse("valve_heads", expected, self.valve_heads.to_string());
        }
        if self.slides && (self.memory_tokens > 0 || self.cache_tokens > 0 || self.unroll > 1) {
            let expected =
                "false with memory_tokens, cache_tokens or unroll, which need windows that end".to_owned();
            return refuse("slides", expected, "true".to_owned());
        }
        let keys = self.tokens() + self.cache_tokens + 3 * self.memory_tokens;
        if keys.saturating_mul(self.d_model) > 1 << 26 {
            let key = if self.cache_tokens > self.tokens() { "cache_tokens" } else { "window" };
            return refuse(key, "at most 67108864 / d_model tokens".to_owned(), keys.to_string());
        }
        check_dropout("dropout", self.dropout)?;
        check_dropout("attention_dropout", self.attention_dropout)?;
        self.ends().validate()?;
        self.sizes().map(|_| ())
    }

    fn ends(&self) -> Ends<'_> {
        Ends { observation: &self.observation, action: &self.action, tokens: TOKENS, width: self.d_model }
    }

    fn config_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|_| format!("{self:?}"))
    }

    fn window(&self) -> Window {
        Window { slides: self.slides, ..Window::of(self.window, self.unroll) }
    }

    /// A segment: memory before and after the tokens, through all layers; then what it leaves behind.
    fn forward(&self, net: &mut Net<'_>) -> Result<Value> {
        let (m, tokens) = (self.memory_tokens, self.window_tokens(net));
        let memory = self.memory(net)?;
        let mut x = self.embed(net)?;
        // Trailing rows apart where nothing is differentiated through them.
        let apart = !net.gradients_follow();
        if let Some(memory) = memory {
            let all = [memory, x, memory];
            x = net.g.concat(if apart { &all[..2] } else { &all }, 1)?;
        }
        let mut x = net.dropout(x, self.dropout)?;
        let mut trailing = match memory.filter(|_| apart) {
            Some(memory) => Some(net.dropout(memory, self.dropout)?),
            None => None,
        };
        let segment = self.segment(net, tokens, apart)?;
        for layer in 0..self.layers {
            let cache = self.cache_of(net, layer)?;
            if let Some(cache) = cache {
                let all: Vec<Value> = [cache, x].into_iter().chain(trailing).collect();
                self.keep_cache(net, layer, &all)?;
            }
            if self.reads_last_token(net) && layer + 1 == self.layers {
                return self.last_layer_of_last_token(net, x, &segment);
            }
            (x, trailing) = self.layer_of_segment(net, layer, (x, trailing), cache, &segment)?;
        }
        let x = net.dropout(x, self.dropout)?;
        let Some(memory) = memory else { return self.hidden(net, x) };
        let trailing = match trailing {
            Some(trailing) => net.dropout(trailing, self.dropout)?,
            None => net.g.slice(x, 1, m + tokens..2 * m + tokens)?,
        };
        self.keep_memory(net, memory, trailing)?;
        let x = net.g.slice(x, 1, m..m + tokens)?;
        self.hidden(net, x)
    }

    fn steps_exactly(&self) -> bool {
        let compat = &self.compat;
        !(self.wraps_around() || compat.shifted_actions || compat.commit_without_last_action)
    }

    fn step(&self, net: &mut Net<'_>, phase: Phase) -> Result<Option<Value>> {
        let (before, after) = TOKENS.tokens().split_at(TOKENS.observation_index() + 1);
        match phase {
            Phase::Begin => self.begin(net)?,
            Phase::Observe => {
                let x = self.tokens_of_step(net, before)?;
                return Ok(Some(net.g.slice(x, 1, before.len() - 1..before.len())?));
            }
            Phase::Act => {
                self.tokens_of_step(net, after)?;
            }
            Phase::Close => self.close(net)?,
        }
        Ok(None)
    }
}

impl TransformerXl {
    /// Whether a pass is for the newest observation's hidden state alone: a window that leaves nothing behind is
    /// run again.
    fn reads_last_token(&self, net: &Net<'_>) -> bool {
        net.reruns() && self.memory_tokens == 0 && self.cache_tokens == 0
    }

    /// Hidden states at observations, [rows, steps, d], from those of the pass's tokens.
    fn hidden(&self, net: &mut Net<'_>, x: Value) -> Result<Value> {
        let missing = self.tokens() - self.window_tokens(net);
        if missing == 0 {
            return net.at_observations(x);
        }
        // Nothing is read where the last action would be.
        let shape = [net.rows(), missing, self.d_model];
        let zeros = net.g.full(net.dtype, shape, 0.0)?;
        let whole = net.g.concat(&[x, zeros], 1)?;
        net.at_observations(whole)
    }
}
