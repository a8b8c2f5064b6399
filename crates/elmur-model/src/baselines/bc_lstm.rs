//! BC-LSTM: behaviour cloning with a recurrent network.
//!
//! ```text
//! x_t = encoder(o_t);   h_t, c_t = LSTM(x_t, h_(t-1), c_(t-1)) per layer;   outputs = head(h_t)
//! ```
//!
//! (h, c) is carried through the whole episode and starts at zero. Training backpropagates through the whole
//! window; where a crop is cut into several, the state goes on without gradient beyond `unroll` windows.

use elmur_base::Describe;
use elmur_engine::{Activation as Act, Value};
use serde::{Deserialize, Serialize};

use crate::architecture::Architecture;
use crate::ends::{Action, Encoder, Ends, TokenFormat, read_encoders};
use crate::error::{Error, Result};
use crate::initial::Init;
use crate::net::{Net, Start};
use crate::phase::{Phase, Window};
use crate::sizes::{Sizes, check_depth};

/// Behaviour cloning with an LSTM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct BcLstm {
    /// How observations become vectors: a list with one encoder per leaf of the observation space. Follows
    /// from the environment or the dataset unless given.
    #[serde(deserialize_with = "read_encoders")]
    pub observation: Vec<Encoder>,
    /// The kind of action that the policy chooses, and how many choices or numbers it has. Follows from the
    /// environment or the dataset unless given.
    pub action: Action,
    /// Width of encoded observations: 1 to 1048576.
    pub d_model: usize,
    /// Width of the hidden state of each layer: 1 to 8192.
    pub hidden: usize,
    /// Number of LSTM layers, 1 to 64; each reads the hidden states of the one before.
    pub layers: usize,
    /// Environment steps of a training window, through all of which gradients flow.
    pub window: usize,
    /// Share of the hidden states between layers that training sets to zero: 0 or more and below 1.
    pub dropout: f64,
    /// Windows of one optimizer step, 1 to 4096, with gradients through the state that is carried from one to
    /// the next.
    #[serde(default = "one")]
    pub unroll: usize,
}

fn one() -> usize {
    1
}

impl BcLstm {
    /// Name of the state that holds layer `i`'s hidden state, [rows, hidden].
    pub fn hidden_state(i: usize) -> String {
        format!("h.{i}")
    }

    /// Name of the state that holds layer `i`'s cell, [rows, hidden].
    pub fn cell_state(i: usize) -> String {
        format!("c.{i}")
    }
}

impl BcLstm {
    /// The parameters, added up; an error for models that are too large to build.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        check_depth("unroll", self.unroll, self.layers)?;
        let (mut sizes, h) = (Sizes::default(), self.hidden);
        self.ends().add_sizes(&mut sizes, h, self.window)?;
        sizes.value("window", &[self.window, 4, h])?;
        sizes.value("window", &[self.window, self.d_model])?;
        sizes.param("hidden", 1, &[4, h, self.d_model])?;
        sizes.param("hidden", 2 * self.layers - 1, &[4, h, h])?;
        sizes.param("hidden", 2 * self.layers, &[4, h])?;
        Ok(sizes)
    }
}

impl Architecture for BcLstm {
    fn validate(&self) -> Result<()> {
        for (key, count, most) in [
            ("d_model", self.d_model, 1 << 20),
            ("hidden", self.hidden, 8192),
            ("layers", self.layers, 64),
            ("window", self.window, 1 << 20),
            ("unroll", self.unroll, 4096),
        ] {
            if !(1..=most).contains(&count) {
                let (key, expected) = (key.to_owned(), format!("1 to {most}"));
                return Err(Error::Config { key, expected, got: count.to_string() });
            }
        }
        if !(0.0..1.0).contains(&self.dropout) {
            let (key, expected) = ("dropout".to_owned(), "0 or more and below 1".to_owned());
            return Err(Error::Config { key, expected, got: self.dropout.to_string() });
        }
        self.ends().validate()?;
        self.sizes().map(|_| ())
    }

    fn ends(&self) -> Ends<'_> {
        Ends {
            observation: &self.observation,
            action: &self.action,
            tokens: TokenFormat::Observation,
            width: self.d_model,
        }
    }

    fn config_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|_| format!("{self:?}"))
    }

    fn window(&self) -> Window {
        Window::of(self.window, self.unroll)
    }

    fn forward(&self, net: &mut Net<'_>) -> Result<Value> {
        let mut x = net.encode_observation()?;
        for layer in 0..self.layers {
            if layer > 0 {
                x = net.dropout(x, self.dropout)?;
            }
            let (width, zero) = (self.hidden, Init::Constant(0.0));
            let name = format!("lstm.{layer}.input");
            let gates = net.linear_act(x, &name, 4 * width, Init::Orthogonal, Some(zero), Act::Identity)?;
            let weight =
                net.param(&format!("lstm.{layer}.hidden.weight"), [4 * width, width], Init::Orthogonal)?;
            let bias = net.param(&format!("lstm.{layer}.hidden.bias"), [4 * width], zero)?;
            let (h, c) = (Self::hidden_state(layer), Self::cell_state(layer));
            let hidden = net.carried(&h, &[width], Start::Zeros)?;
            let cell = net.carried(&c, &[width], Start::Zeros)?;
            let lstm = net.g.lstm(gates, weight, bias, hidden, cell)?;
            net.keep(&h, lstm.last_hidden)?;
            net.keep(&c, lstm.last_cell)?;
            net.tap(&format!("hidden.{layer}"), lstm.last_hidden)?;
            x = lstm.hidden;
        }
        Ok(x)
    }

    fn steps_exactly(&self) -> bool {
        true
    }

    /// A step is a window of one step.
    fn step(&self, net: &mut Net<'_>, phase: Phase) -> Result<Option<Value>> {
        match phase {
            Phase::Observe => Ok(Some(self.forward(net)?)),
            Phase::Begin | Phase::Act | Phase::Close => Ok(None),
        }
    }
}
