//! BC-MLP: behaviour cloning without memory.
//!
//! ```text
//! outputs_t = head(mlp(encoder(o_t)));   mlp = [linear, ReLU, dropout] per hidden width
//! ```
//!
//! Steps are independent and nothing is carried, so whatever is not in the current observation is lost: the
//! floor that a policy with memory is compared with.

use elmur_base::Describe;
use elmur_engine::Value;
use serde::{Deserialize, Serialize};

use super::layers::{check_counts, check_dropout, check_widths, mlp, mlp_sizes};
use crate::architecture::Architecture;
use crate::ends::{Action, Encoder, Ends, TokenFormat, read_encoders};
use crate::error::Result;
use crate::net::Net;
use crate::phase::{Phase, Window};
use crate::sizes::Sizes;

/// Behaviour cloning with a perceptron.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct BcMlp {
    /// How observations become vectors: a list with one encoder per leaf of the observation space. Follows
    /// from the environment or the dataset unless given.
    #[serde(deserialize_with = "read_encoders")]
    pub observation: Vec<Encoder>,
    /// The kind of action that the policy chooses, and how many choices or numbers it has. Follows from the
    /// environment or the dataset unless given.
    pub action: Action,
    /// Width of encoded observations: 1 to 1048576.
    pub d_model: usize,
    /// Widths of the hidden layers.
    pub hidden: Vec<usize>,
    /// Environment steps of a training crop.
    pub window: usize,
    /// Share of hidden units that training sets to zero: 0 or more and below 1.
    pub dropout: f64,
}

impl BcMlp {
    /// The parameters, added up; an error for models that are too large to build.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        let (mut sizes, last) = (Sizes::default(), self.hidden.last().copied().unwrap_or(self.d_model));
        self.ends().add_sizes(&mut sizes, last, self.window)?;
        sizes.value("window", &[self.window, self.d_model])?;
        mlp_sizes(&mut sizes, "hidden", self.d_model, &self.hidden)?;
        for width in &self.hidden {
            sizes.value("window", &[self.window, *width])?;
        }
        Ok(sizes)
    }
}

impl Architecture for BcMlp {
    fn validate(&self) -> Result<()> {
        check_counts(&[("d_model", self.d_model, 1 << 20), ("window", self.window, 1 << 20)])?;
        check_widths("hidden", &self.hidden)?;
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
        Window::of(self.window, 1)
    }

    fn forward(&self, net: &mut Net<'_>) -> Result<Value> {
        let x = net.encode_observation()?;
        mlp(net, "mlp", x, &self.hidden, self.dropout)
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
