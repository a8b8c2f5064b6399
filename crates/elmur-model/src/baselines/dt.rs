//! Decision Transformer as the paper runs it: a Transformer-XL decoder without memory over the newest steps.
//!
//! ```text
//! tokens of step t:  W_R r_t + b,  encoder(o_t),  embedding(a_t);   n = 3 * window tokens
//! s_ij = [ (q_i + u) . k_j + (q_i + v) . (W_r PE(i - j)) ] / sqrt(D),  j <= i       heads of width D; H * D need not be d
//! y    = LN1(x + W_o attention);   x' = LN2(y + W_2 relu(W_1 y + b_1) + b_2)        action read at observation tokens
//! ```
//!
//! When acting, the window slides: it shows the newest steps and is run again, because deeper layers of a
//! slid window have seen steps that left it.

use elmur_base::Describe;
use elmur_engine::{Activation as Act, Attention, AttentionMask, Norm, NormKind, Qkv, Relative, Value};
use serde::{Deserialize, Serialize};

use crate::architecture::Architecture;
use crate::ends::{Action, Encoder, Ends, TokenFormat, read_encoders};
use crate::error::{Error, Result};
use crate::initial::Init;
use crate::net::Net;
use crate::phase::Window;
use crate::sizes::Sizes;

/// Epsilon of every normalisation.
const EPS: f64 = 1e-5;

/// A Decision Transformer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct Dt {
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
    /// Hidden width of the feed-forward networks.
    pub d_ff: usize,
    /// Number of layers: 1 to 1024.
    pub layers: usize,
    /// Environment steps that the policy looks back on, in training and when acting.
    pub window: usize,
    /// Share of embeddings, position encodings, attention outputs, feed-forward hidden units and outputs that
    /// training sets to zero: 0 or more and below 1.
    pub dropout: f64,
    /// Share of attention weights that training sets to zero: 0 or more and below 1.
    pub attention_dropout: f64,
    /// Whether action embeddings are squashed by tanh (the published code does so but for discrete POPGym
    /// actions and MIKASA).
    pub action_tanh: bool,
    /// Behaviours of the published Python code that differ from the method, to reproduce its results.
    #[serde(default)]
    pub compat: DtCompat,
}

/// Behaviours of the published Python code that differ from the method; all off by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields, default)]
pub struct DtCompat {
    /// Whether the residual is added twice around attention: LN(2x + attention).
    pub double_residual: bool,
}

impl Architecture for Dt {
    fn validate(&self) -> Result<()> {
        for (key, count, most) in [
            ("d_model", self.d_model, 1 << 20),
            ("heads", self.heads, 4096),
            ("d_head", self.d_head, 1 << 16),
            ("d_ff", self.d_ff, 1 << 20),
            ("layers", self.layers, 1024),
            ("window", self.window, 1 << 20),
        ] {
            if !(1..=most).contains(&count) {
                let (key, expected) = (key.to_owned(), format!("1 to {most}"));
                return Err(Error::Config { key, expected, got: count.to_string() });
            }
        }
        let refuse = |key: &str, expected: &str, got: String| {
            Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), got })
        };
        if !self.d_model.is_multiple_of(2) {
            return refuse("d_model", "an even width", self.d_model.to_string());
        }
        if self.window.saturating_mul(3).saturating_mul(self.d_model) > 1 << 26 {
            return refuse("window", "at most 67108864 / d_model tokens", self.window.to_string());
        }
        for (key, p) in [("dropout", self.dropout), ("attention_dropout", self.attention_dropout)] {
            if !(0.0..1.0).contains(&p) {
                return refuse(key, "0 or more and below 1", p.to_string());
            }
        }
        self.ends().validate()?;
        self.sizes().map(|_| ())
    }

    fn ends(&self) -> Ends<'_> {
        Ends {
            observation: &self.observation,
            action: &self.action,
            tokens: TokenFormat::ReturnObservationAction,
            width: self.d_model,
        }
    }

    fn config_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|_| format!("{self:?}"))
    }

    fn window(&self) -> Window {
        Window { slides: true, ..Window::of(self.window, 1) }
    }

    fn forward(&self, net: &mut Net<'_>) -> Result<Value> {
        let (d, tokens) = (self.d_model, 3 * self.window);
        let activation = if self.action_tanh { Act::Tanh } else { Act::Identity };
        let x = net.embed(TokenFormat::ReturnObservationAction.tokens(), activation)?;
        let mut x = net.dropout(x, self.dropout)?;
        let encodings = net.encodings(tokens, d)?;
        let encodings = net.dropout(encodings, self.dropout)?;
        for layer in 0..self.layers {
            x = self.layer(net, layer, x, encodings)?;
        }
        let x = net.dropout(x, self.dropout)?;
        net.at_observations(x)
    }
}

impl Dt {
    /// The parameters, added up; an error for models that are too large to build.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        let (d, heads, d_head, layers) = (self.d_model, self.heads, self.d_head, self.layers);
        let (mut sizes, tokens) = (Sizes::default(), self.window.saturating_mul(3));
        self.ends().add_sizes(&mut sizes, d, self.window)?;
        sizes.value("window", &[heads, tokens, tokens])?;
        sizes.value("window", &[tokens, 3, heads, d_head])?;
        sizes.value("window", &[tokens, self.d_ff])?;
        sizes.param("d_head", 2, &[heads, d_head])?;
        sizes.param("d_head", layers, &[3, heads, d_head, d])?;
        sizes.param("d_head", 2 * layers, &[heads, d_head, d])?;
        sizes.param("d_ff", 2 * layers, &[self.d_ff, d])?;
        sizes.param("d_ff", layers, &[self.d_ff])?;
        sizes.param("d_model", 5 * layers, &[d])?;
        Ok(sizes)
    }

    fn norm(&self, net: &mut Net<'_>, name: &str) -> Result<Norm> {
        let d = self.d_model;
        let gamma = net.param(&format!("{name}.scale"), [d], Init::Constant(1.0))?;
        let beta = net.param(&format!("{name}.shift"), [d], Init::Constant(0.0))?;
        Ok(Norm { kind: NormKind::Layer { beta }, gamma, eps: EPS })
    }

    /// Tokens [rows, T, d] through one layer.
    fn layer(&self, net: &mut Net<'_>, layer: usize, x: Value, encodings: Value) -> Result<Value> {
        let (d, heads, inner) = (self.d_model, self.heads, self.heads * self.d_head);
        let name = format!("layers.{layer}");
        let qkv = net.linear(x, &format!("{name}.attention.qkv"), 3 * inner, Init::fan_in(d))?;
        let r = net.linear(encodings, &format!("{name}.attention.r"), inner, Init::fan_in(d))?;
        let (shape, init) = ([heads, self.d_head], Init::xavier(heads, self.d_head));
        let relative = Relative::new(net.param("u", shape, init)?, net.param("v", shape, init)?, r);
        let options = Attention {
            heads,
            mask: AttentionMask::Causal,
            relative: Some(relative),
            dropout: net.drop_with(self.attention_dropout),
            ..Attention::default()
        };
        let y = net.g.attention(Qkv::Packed(qkv), options)?.0;
        let y = net.linear(y, &format!("{name}.attention.out"), d, Init::fan_in(inner))?;
        let y = net.dropout(y, self.dropout)?;
        let residual = if self.compat.double_residual { net.g.scale(x, 2.0)? } else { x };
        let norm = self.norm(net, &format!("{name}.attention.norm"))?;
        let x = net.g.residual_norm(residual, y, norm)?.0;

        let init = Init::fan_in(d);
        let hidden = net.linear_act(x, &format!("{name}.ffn.up"), self.d_ff, init, Some(init), Act::Relu)?;
        let hidden = net.dropout(hidden, self.dropout)?;
        let init = Init::fan_in(self.d_ff);
        let y = net.linear_act(hidden, &format!("{name}.ffn.down"), d, init, Some(init), Act::Identity)?;
        let y = net.dropout(y, self.dropout)?;
        let norm = self.norm(net, &format!("{name}.ffn.norm"))?;
        Ok(net.g.residual_norm(x, y, norm)?.0)
    }
}
