//! Policies that can be named in files: every architecture of this crate, told apart by `kind`.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::architecture::Architecture;
use crate::baselines::{BcLstm, Dt};
use crate::elmur::Elmur;
use crate::ends::{Action, Encoder};
use crate::error::{Error, Result};
use elmur_base::{Describe, Spaces};

/// The architecture of a policy, with its sizes. In files `kind` names it; files without a kind are ELMUR's.
///
/// The list is closed because files must stay readable. A user's own architecture is handed to sessions and
/// window programs as `Arc<dyn Architecture>`.
#[derive(Debug, Clone, PartialEq, Serialize, Describe)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum PolicyConfig {
    /// A transformer with an external memory in every layer.
    Elmur(Elmur),
    /// Behaviour cloning with a recurrent network.
    BcLstm(BcLstm),
    /// Decision Transformer: a causal transformer over the newest returns, observations and actions.
    Dt(Dt),
}

/// Names of all kinds, as files and messages have them.
const KINDS: [&str; 3] = ["elmur", "bc_lstm", "dt"];

impl PolicyConfig {
    /// The architecture, to build, train and run.
    pub fn architecture(&self) -> &dyn Architecture {
        match self {
            PolicyConfig::Elmur(config) => config,
            PolicyConfig::BcLstm(config) => config,
            PolicyConfig::Dt(config) => config,
        }
    }

    /// The name of the architecture.
    pub fn kind(&self) -> &'static str {
        match self {
            PolicyConfig::Elmur(_) => KINDS[0],
            PolicyConfig::BcLstm(_) => KINDS[1],
            PolicyConfig::Dt(_) => KINDS[2],
        }
    }

    /// Gives the policy encoders and a head for these spaces, where it has not got them already: the encoder
    /// of every leaf that fits is kept, others are those of [`Encoder::of`] and [`Action::of`].
    pub fn fit_to(&mut self, spaces: &Spaces) -> Result<()> {
        let (observation, action) = match self {
            PolicyConfig::Elmur(config) => (&mut config.observation, &mut config.action),
            PolicyConfig::BcLstm(config) => (&mut config.observation, &mut config.action),
            PolicyConfig::Dt(config) => (&mut config.observation, &mut config.action),
        };
        let leaves = spaces.observation.leaves();
        let encoder = |(i, leaf)| {
            let kept = observation.get(i).filter(|encoder: &&Encoder| encoder.fits(leaf));
            kept.cloned().unwrap_or_else(|| Encoder::of(leaf))
        };
        *observation = leaves.iter().enumerate().map(encoder).collect();
        if !action.fits(&spaces.action) {
            *action = match (&*action, Action::of(&spaces.action)?) {
                (Action::Continuous { tanh, .. }, Action::Continuous { dim, .. }) => {
                    Action::Continuous { dim, tanh: *tanh }
                }
                (_, other) => other,
            };
        }
        Ok(())
    }

    /// The configuration of ELMUR, or an error that says what needs it.
    pub fn elmur(&self, what: &'static str) -> Result<&Elmur> {
        match self {
            PolicyConfig::Elmur(config) => Ok(config),
            _ => Err(Error::input(what, "a policy with ELMUR's memory", self.kind())),
        }
    }
}

impl From<&PolicyConfig> for Arc<dyn Architecture> {
    fn from(config: &PolicyConfig) -> Self {
        match config.clone() {
            PolicyConfig::Elmur(config) => Arc::new(config),
            PolicyConfig::BcLstm(config) => Arc::new(config),
            PolicyConfig::Dt(config) => Arc::new(config),
        }
    }
}

impl From<&Elmur> for Arc<dyn Architecture> {
    fn from(config: &Elmur) -> Self {
        Arc::new(config.clone())
    }
}

impl From<Elmur> for PolicyConfig {
    fn from(config: Elmur) -> Self {
        PolicyConfig::Elmur(config)
    }
}

impl<'de> Deserialize<'de> for PolicyConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error as _;
        let mut map = Map::deserialize(deserializer)?;
        let kind = map.remove("kind").unwrap_or(Value::from(KINDS[0]));
        let rest = Value::Object(map);
        let read = match kind.as_str() {
            Some("elmur") => serde_json::from_value(rest).map(PolicyConfig::Elmur),
            Some("bc_lstm") => serde_json::from_value(rest).map(PolicyConfig::BcLstm),
            Some("dt") => serde_json::from_value(rest).map(PolicyConfig::Dt),
            _ => {
                let near = elmur_base::did_you_mean(kind.as_str().unwrap_or(""), KINDS.into_iter());
                let known = KINDS.join(", ");
                return Err(D::Error::custom(format!("kind {kind} is not one of {known}{near}")));
            }
        };
        read.map_err(D::Error::custom)
    }
}
