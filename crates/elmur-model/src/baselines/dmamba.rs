//! DMamba (Decision Mamba): a selective state-space model in the place of a transformer's attention.
//!
//! ```text
//! tokens of step t:  W_R r_t + b,  encoder(o_t),  embedding(a_t)
//! x = x + mamba(LN x);    x = x + W_2 gelu(W_1 LN x + b_1) + b_2        action read at observation tokens
//!
//! mamba:  [p ; z] = W_in x;   u = silu(conv(p)), depthwise and causal;   [s ; B ; C] = W_x u
//!         δ = softplus(W_dt s + b_dt);   A = -exp(A_log)
//!         h = exp(δ A) h + δ u Bᵀ;   y = h C + D u;   out = W_out (y silu(z))
//! ```
//!
//! A layer carries the newest p, which the convolution looks back on, and its states h through the whole
//! episode; both start at zero. A step is then a window of a few tokens, and costs the same at any time of
//! the episode.

use elmur_base::Describe;
use elmur_engine::{Activation as Act, Norm, NormKind, SelectiveScan, Value};
use serde::{Deserialize, Serialize};

use super::layers::{check_counts, check_dropout, check_number};
use crate::architecture::{Architecture, Group};
use crate::ends::{Action, Encoder, Ends, Token, TokenFormat, read_encoders};
use crate::error::Result;
use crate::initial::Init;
use crate::net::{Net, Start};
use crate::phase::{Phase, Window};
use crate::sizes::{Sizes, check_depth};

/// Epsilon of every normalisation.
const EPS: f64 = 1e-5;

/// Tokens of a step.
const TOKENS: TokenFormat = TokenFormat::ReturnObservationAction;

/// Decision Mamba.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct DMamba {
    /// How observations become vectors: a list with one encoder per leaf of the observation space. Follows
    /// from the environment or the dataset unless given.
    #[serde(deserialize_with = "read_encoders")]
    pub observation: Vec<Encoder>,
    /// The kind of action that the policy chooses, and how many choices or numbers it has. Follows from the
    /// environment or the dataset unless given.
    pub action: Action,
    /// Width of tokens: 1 to 65536.
    pub d_model: usize,
    /// Number of layers: 1 to 1024.
    pub layers: usize,
    /// Environment steps of a training window, through all of which gradients flow.
    pub window: usize,
    /// Share of embeddings and feed-forward outputs that training sets to zero: 0 or more and below 1.
    pub dropout: f64,
    /// Windows of one optimizer step, 1 to 4096, with gradients through the states that are carried from one
    /// to the next.
    #[serde(default = "one")]
    pub unroll: usize,
    /// Numbers in the state of a channel: 1 to 64.
    #[serde(default = "state")]
    pub state: usize,
    /// Tokens that the convolution sees, the current one included: 2 to 64.
    #[serde(default = "conv")]
    pub conv: usize,
    /// Channels of the state-space model for each number of `d_model`: 1 to 16.
    #[serde(default = "expand")]
    pub expand: usize,
    /// Whether action embeddings are squashed by tanh (the published code does so but for discrete POPGym
    /// actions and MIKASA).
    pub action_tanh: bool,
    /// Behaviours of the published Python code that differ from the method, to reproduce its results.
    #[serde(default, skip_serializing_if = "DMambaCompat::is_default")]
    pub compat: DMambaCompat,
}

fn one() -> usize {
    1
}

fn state() -> usize {
    16
}

fn conv() -> usize {
    4
}

fn expand() -> usize {
    2
}

/// Behaviours of the published Python code that differ from the method; all off by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields, default)]
pub struct DMambaCompat {
    /// Whether all linear maps and embeddings start with small normal numbers and biases at zero, those of
    /// Mamba's step sizes included, which leaves a memory of a few tokens; weight decay then applies to every
    /// parameter.
    pub flat_mamba_init: bool,
    /// Whether the state is forgotten after every window: acting runs the current window again at every step
    /// and begins an empty one when it is full.
    pub mamba_window: bool,
}

impl DMambaCompat {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Where the mixer's parameters in the form that the scan reads come from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Forms {
    /// From the parameters, with gradients.
    Computed,
    /// From states that [`Phase::Begin`] computed.
    Derived,
}

impl DMamba {
    /// Name of the state that holds layer `i`'s newest inputs of the convolution, oldest first: [rows, conv -
    /// 1, channels].
    pub fn conv_state(i: usize) -> String {
        format!("conv.{i}")
    }

    /// Name of the state that holds layer `i`'s state-space model, [rows, state, channels].
    pub fn ssm_state(i: usize) -> String {
        format!("ssm.{i}")
    }

    /// Channels of the state-space model.
    fn channels(&self) -> usize {
        self.expand * self.d_model
    }

    /// Numbers that step sizes are computed from.
    fn rank(&self) -> usize {
        self.d_model.div_ceil(16)
    }

    /// The parameters, added up; an error for models that are too large to build.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        check_depth("unroll", self.unroll, self.layers)?;
        let (d, e, n, rank, layers) = (self.d_model, self.channels(), self.state, self.rank(), self.layers);
        let (mut sizes, tokens) = (Sizes::default(), self.window.saturating_mul(3));
        self.ends().add_sizes(&mut sizes, d, self.window)?;
        // What is largest of a layer: hidden units, and the states that a gradient needs.
        sizes.value("window", &[tokens, 4 * d.max(e)])?;
        sizes.value("window", &[tokens.div_ceil((256 / n).max(1)), n, e])?;
        sizes.param("d_model", layers, &[2, e, d])?;
        sizes.param("conv", layers, &[e, self.conv + 1])?;
        sizes.param("state", layers, &[rank + 2 * n, e])?;
        sizes.param("d_model", layers, &[e, rank + 1])?;
        sizes.param("state", layers, &[e, n + 1])?;
        sizes.param("d_model", layers, &[d, e])?;
        sizes.param("d_model", 2 * layers, &[4, d, d])?;
        sizes.param("d_model", 9 * layers + 2, &[d])?;
        Ok(sizes)
    }
}

impl Architecture for DMamba {
    fn validate(&self) -> Result<()> {
        check_counts(&[
            ("d_model", self.d_model, 1 << 16),
            ("layers", self.layers, 1024),
            ("window", self.window, 1 << 20),
            ("unroll", self.unroll, 4096),
            ("state", self.state, 64),
            ("conv", self.conv, 64),
            ("expand", self.expand, 16),
        ])?;
        check_number("conv", self.conv as f64, self.conv > 1, "2 to 64")?;
        check_dropout("dropout", self.dropout)?;
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
        Window::of(self.window, self.unroll)
    }

    fn forward(&self, net: &mut Net<'_>) -> Result<Value> {
        self.flat(net, |net| self.tokens(net, TOKENS.tokens(), Forms::Computed))
    }

    fn head(&self, net: &mut Net<'_>, hidden: Value) -> Result<Value> {
        self.flat(net, |net| net.head(hidden))
    }

    /// Decay would pull the rates of Mamba's states towards one, and D towards zero.
    fn group(&self, parameter: &str) -> Group {
        let own = parameter.ends_with(".mixer.a_log") || parameter.ends_with(".mixer.d");
        Group { decays: !own || self.compat.flat_mamba_init, ..Group::default() }
    }

    fn steps_exactly(&self) -> bool {
        !self.compat.mamba_window
    }

    /// A step is a window of a few tokens: those up to the observation, then the action.
    fn step(&self, net: &mut Net<'_>, phase: Phase) -> Result<Option<Value>> {
        let (before, after) = TOKENS.tokens().split_at(TOKENS.observation_index() + 1);
        match phase {
            Phase::Begin => {
                for layer in 0..self.layers {
                    let (taps, rates) = self.forms(net, layer, Forms::Computed)?;
                    net.derive(&taps_state(layer), taps)?;
                    net.derive(&rates_state(layer), rates)?;
                }
                Ok(None)
            }
            Phase::Observe => Ok(Some(self.tokens(net, before, Forms::Derived)?)),
            Phase::Act => {
                self.tokens(net, after, Forms::Derived)?;
                Ok(None)
            }
            Phase::Close => Ok(None),
        }
    }
}

/// Name of the state with layer `i`'s convolution by taps, [conv, channels].
fn taps_state(i: usize) -> String {
    format!("taps.{i}")
}

/// Name of the state with layer `i`'s A, [state, channels].
fn rates_state(i: usize) -> String {
    format!("rates.{i}")
}

impl DMamba {
    /// Builds a part of the graph with the initialisation that the settings ask for.
    fn flat<T>(&self, net: &mut Net<'_>, part: impl FnOnce(&mut Net<'_>) -> Result<T>) -> Result<T> {
        if self.compat.flat_mamba_init { net.flat(0.02, part) } else { part(net) }
    }

    /// The given tokens of the steps at hand through all layers: hidden states of the observation's tokens,
    /// or of the last token where there is no whole step.
    fn tokens(&self, net: &mut Net<'_>, tokens: &[Token], forms: Forms) -> Result<Value> {
        let activation = if self.action_tanh { Act::Tanh } else { Act::Identity };
        let x = net.embed(tokens, activation)?;
        let mut x = net.dropout(x, self.dropout)?;
        let norm = self.norm(net, "layers.0.mixer.norm")?;
        let mut normed = net.g.norm(x, norm)?;
        for layer in 0..self.layers {
            let name = format!("layers.{layer}");
            let mut y = self.scan(net, layer, normed, forms)?;
            if layer + 1 == self.layers {
                // Nothing reads the other tokens any more.
                (x, y) = (self.observed(net, tokens, x)?, self.observed(net, tokens, y)?);
            }
            let init = Init::fan_in(self.channels());
            let y = net.linear(y, &format!("{name}.mixer.out"), self.d_model, init)?;
            let norm = self.norm(net, &format!("{name}.ffn.norm"))?;
            (normed, x) = net.g.residual_norm(x, y, norm)?;
            let y = self.ffn(net, &name, normed)?;
            let next = match layer + 1 == self.layers {
                true => "norm".to_owned(),
                false => format!("layers.{}.mixer.norm", layer + 1),
            };
            let norm = self.norm(net, &next)?;
            (normed, x) = net.g.residual_norm(x, y, norm)?;
        }
        Ok(normed)
    }

    /// Tokens of x [rows, tokens, width] that belong to observations, or the last token where there is no
    /// whole step.
    fn observed(&self, net: &mut Net<'_>, tokens: &[Token], x: Value) -> Result<Value> {
        match tokens.len() {
            1 => Ok(x),
            count if count == TOKENS.per_step() => net.at_observations(x),
            count => Ok(net.g.slice(x, 1, count - 1..count)?),
        }
    }

    fn norm(&self, net: &mut Net<'_>, name: &str) -> Result<Norm> {
        let d = self.d_model;
        let gamma = net.param(&format!("{name}.scale"), [d], Init::Constant(1.0))?;
        let beta = net.param(&format!("{name}.shift"), [d], Init::Constant(0.0))?;
        Ok(Norm { kind: NormKind::Layer { beta }, gamma, eps: EPS })
    }

    fn ffn(&self, net: &mut Net<'_>, name: &str, x: Value) -> Result<Value> {
        let (d, width) = (self.d_model, 4 * self.d_model);
        let init = Init::fan_in(d);
        let hidden = net.linear_act(x, &format!("{name}.ffn.up"), width, init, Some(init), Act::Gelu)?;
        let init = Init::fan_in(width);
        let y = net.linear_act(hidden, &format!("{name}.ffn.down"), d, init, Some(init), Act::Identity)?;
        net.dropout(y, self.dropout)
    }

    /// A layer's convolution by taps [conv, channels] and its A [state, channels].
    fn forms(&self, net: &mut Net<'_>, layer: usize, forms: Forms) -> Result<(Value, Value)> {
        let (e, n, w) = (self.channels(), self.state, self.conv);
        if forms == Forms::Derived {
            return Ok((net.derived(&taps_state(layer), [w, e])?, net.derived(&rates_state(layer), [n, e])?));
        }
        let name = format!("layers.{layer}.mixer");
        let taps = net.param(&format!("{name}.conv.weight"), [e, w], Init::fan_in(w))?;
        let rates = net.param(&format!("{name}.a_log"), [e, n], Init::LogColumns)?;
        let (taps, rates) = (net.g.transpose(taps, &[1, 0])?, net.g.transpose(rates, &[1, 0])?);
        let rates = net.g.exp(rates)?;
        Ok((taps, net.g.scale(rates, -1.0)?))
    }

    /// A layer's mixer up to its output map: tokens x [rows, T, d] to gated outputs [rows, T, channels].
    fn scan(&self, net: &mut Net<'_>, layer: usize, x: Value, forms: Forms) -> Result<Value> {
        let (d, e, n, rank) = (self.d_model, self.channels(), self.state, self.rank());
        let name = format!("layers.{layer}.mixer");
        let (taps, a) = self.forms(net, layer, forms)?;
        let [window, state] = self.carried(net, layer)?;

        // Maps of which parts are used apart are multiplied part by part: rows of a matrix need not be
        // copied, columns of its product would have to be.
        let init = net.start(Init::fan_in(d));
        let weight = net.param(&format!("{name}.in.weight"), [2 * e, d], init)?;
        let p = part(net, x, weight, 0..e)?;
        let z = part(net, x, weight, e..2 * e)?;

        let bias = net.param(&format!("{name}.conv.bias"), [e], Init::fan_in(self.conv))?;
        let conv = net.g.causal_conv1d_silu(p, taps, bias, window)?;
        let u = conv.y;

        let init = net.start(Init::fan_in(e));
        let weight = net.param(&format!("{name}.x.weight"), [rank + 2 * n, e], init)?;
        let s = part(net, u, weight, 0..rank)?;
        let bc = part(net, u, weight, rank..rank + 2 * n)?;
        let sizes = Init::StepSizes { least: 0.001, most: 0.1 };
        let init = Init::fan_in(rank);
        let delta = net.linear_act(s, &format!("{name}.dt"), e, init, Some(sizes), Act::Identity)?;

        let d = net.param(&format!("{name}.d"), [e], Init::Constant(1.0))?;
        let scanned = net.g.selective_scan(SelectiveScan { u, delta, a, bc, d, z, state })?;
        if !self.compat.mamba_window {
            net.keep(&Self::conv_state(layer), conv.window)?;
            net.keep(&Self::ssm_state(layer), scanned.state)?;
            net.tap(&format!("state.{layer}"), scanned.state)?;
        }
        Ok(scanned.y)
    }

    /// A layer's window of the convolution and its states, as the last window or step left them.
    fn carried(&self, net: &mut Net<'_>, layer: usize) -> Result<[Value; 2]> {
        let (window, state) = ([self.conv - 1, self.channels()], [self.state, self.channels()]);
        if self.compat.mamba_window {
            let rows = net.rows();
            return Ok([
                net.g.full(net.dtype, [&[rows], &window[..]].concat(), 0.0)?,
                net.g.full(net.dtype, [&[rows], &state[..]].concat(), 0.0)?,
            ]);
        }
        Ok([
            net.carried(&Self::conv_state(layer), &window, Start::Zeros)?,
            net.carried(&Self::ssm_state(layer), &state, Start::Zeros)?,
        ])
    }
}

/// x times some rows of a weight [outputs, inputs].
fn part(net: &mut Net<'_>, x: Value, weight: Value, rows: std::ops::Range<usize>) -> Result<Value> {
    let weight = net.g.slice(weight, 0, rows)?;
    Ok(net.g.linear(x, weight, None, Act::Identity)?)
}
