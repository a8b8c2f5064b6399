//! BC-LSTM: behaviour cloning with a recurrent network.
//!
//! ```text
//! x_t = encoder(o_t);   h_t, c_t = LSTM(x_t, h_(t-1), c_(t-1)) per layer;   outputs = head(h_t)
//! ```
//!
//! (h, c) is carried through the whole episode and starts at zero. Training backpropagates through the whole
//! window; where a crop is cut into several, the state goes on without gradient beyond `unroll` windows.

use elmur_base::Describe;
use elmur_engine::Value;
use serde::{Deserialize, Serialize};

use super::layers::{Lstm, LstmCompat, check_counts, check_dropout};
use crate::architecture::Architecture;
use crate::ends::{Action, Encoder, Ends, TokenFormat, read_encoders};
use crate::error::Result;
use crate::net::Net;
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
    /// Behaviours of the published Python code that differ from the method, to reproduce its results.
    #[serde(default, skip_serializing_if = "LstmCompat::is_default")]
    pub compat: LstmCompat,
}

fn one() -> usize {
    1
}

impl BcLstm {
    /// Name of the state that holds layer `i`'s hidden state, [rows, hidden].
    pub fn hidden_state(i: usize) -> String {
        Lstm::hidden_state(i)
    }

    /// Name of the state that holds layer `i`'s cell, [rows, hidden].
    pub fn cell_state(i: usize) -> String {
        Lstm::cell_state(i)
    }

    fn lstm(&self) -> Lstm {
        Lstm { width: self.hidden, layers: self.layers, dropout: self.dropout, compat: self.compat }
    }

    /// The parameters, added up; an error for models that are too large to build.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        check_depth("unroll", self.unroll, self.layers)?;
        let mut sizes = Sizes::default();
        self.ends().add_sizes(&mut sizes, self.hidden, self.window)?;
        self.lstm().add_sizes(&mut sizes, "hidden", self.d_model, self.window)?;
        Ok(sizes)
    }
}

impl Architecture for BcLstm {
    fn validate(&self) -> Result<()> {
        check_counts(&[
            ("d_model", self.d_model, 1 << 20),
            ("hidden", self.hidden, 8192),
            ("layers", self.layers, 64),
            ("window", self.window, 1 << 20),
            ("unroll", self.unroll, 4096),
        ])?;
        check_dropout("dropout", self.dropout)?;
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
        let x = net.encode_observation()?;
        self.lstm().carried(net, x)
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
