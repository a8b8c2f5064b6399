//! Policies that can be named in files: every architecture of this crate, told apart by `kind`.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::architecture::Architecture;
use crate::baselines::{BcLstm, BcMlp, Cql, CqlContinuous, DMamba, Diffusion, TransformerXl, Tt};
use crate::elmur::Elmur;
use crate::ends::{Action, Encoder};
use crate::error::{Error, Result};
use elmur_base::{Describe, Spaces};

/// Writes out [`PolicyConfig`] and what follows from the list of kinds: every kind is one line of the list.
macro_rules! policies {
    ($($(#[$doc:meta])+ $variant:ident($config:ty) = $kind:literal,)+) => {
        /// The architecture of a policy, with its sizes. In files `kind` names it; files without a kind are
        /// ELMUR's.
        ///
        /// The list is closed because files must stay readable. A user's own architecture is handed to
        /// sessions and window programs as `Arc<dyn Architecture>`.
        #[derive(Debug, Clone, PartialEq, Serialize, Describe)]
        #[serde(tag = "kind")]
        pub enum PolicyConfig {
            $($(#[$doc])+ #[serde(rename = $kind)] $variant($config),)+
        }

        /// Names of all kinds, as files and messages have them.
        const KINDS: &[&str] = &[$($kind),+];

        impl PolicyConfig {
            /// The architecture, to build, train and run.
            pub fn architecture(&self) -> &dyn Architecture {
                match self {
                    $(PolicyConfig::$variant(config) => config,)+
                }
            }

            /// The name of the architecture.
            pub fn kind(&self) -> &'static str {
                match self {
                    $(PolicyConfig::$variant(_) => $kind,)+
                }
            }

            /// The parameters, added up from the settings.
            #[cfg(test)]
            pub(crate) fn sizes(&self) -> Result<crate::sizes::Sizes> {
                match self {
                    $(PolicyConfig::$variant(config) => config.sizes(),)+
                }
            }

            /// Encoders and action of the policy, to be changed.
            fn ends_mut(&mut self) -> (&mut Vec<Encoder>, &mut Action) {
                match self {
                    $(PolicyConfig::$variant(config) => (&mut config.observation, &mut config.action),)+
                }
            }

            /// The policy of a kind from the other entries of its map; none for a kind that does not exist.
            fn read(kind: &str, rest: Value) -> Option<serde_json::Result<Self>> {
                match kind {
                    $($kind => Some(serde_json::from_value(rest).map(PolicyConfig::$variant)),)+
                    _ => None,
                }
            }
        }

        impl From<&PolicyConfig> for Arc<dyn Architecture> {
            fn from(config: &PolicyConfig) -> Self {
                match config.clone() {
                    $(PolicyConfig::$variant(config) => Arc::new(config),)+
                }
            }
        }
    };
}

policies! {
    /// A transformer with an external memory in every layer.
    Elmur(Elmur) = "elmur",
    /// Behaviour cloning with a recurrent network.
    BcLstm(BcLstm) = "bc_lstm",
    /// Behaviour cloning with a perceptron, without memory.
    BcMlp(BcMlp) = "bc_mlp",
    /// Conservative Q-learning for discrete actions.
    Cql(Cql) = "cql",
    /// Conservative Q-learning for continuous actions.
    CqlContinuous(CqlContinuous) = "cql_continuous",
    /// Diffusion Policy: chunks of continuous actions, denoised given the newest observations.
    Diffusion(Diffusion) = "diffusion",
    /// Decision Mamba: a selective state-space model over returns, observations and actions.
    DMamba(DMamba) = "dmamba",
    /// Transformer-XL over returns, observations and actions: DT, TrXL, RMT or RATE by its settings.
    TransformerXl(TransformerXl) = "transformer_xl",
    /// Trajectory Transformer: a model of whole trajectories that acts by beam search.
    Tt(Tt) = "tt",
}

impl PolicyConfig {
    /// Gives the policy encoders and a head for these spaces, where it has not got them already: the encoder
    /// of every leaf that fits is kept, others are those of [`Encoder::resized`] and [`Action::of`].
    pub fn fit_to(&mut self, spaces: &Spaces) -> Result<()> {
        let (observation, action) = self.ends_mut();
        let leaves = spaces.observation.leaves();
        let encoder = |(i, leaf)| {
            let kept = observation.get(i).filter(|encoder: &&Encoder| encoder.fits(leaf));
            let before = observation.get(i).or(observation.first());
            let other = || before.map_or_else(|| Encoder::of(leaf), |encoder| encoder.resized(leaf));
            kept.cloned().unwrap_or_else(other)
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
        let name = match kind.as_str().unwrap_or_default() {
            // Files from before there were memory tokens and caches.
            "dt" => "transformer_xl",
            name => name,
        };
        match Self::read(name, Value::Object(map)) {
            Some(read) => read.map_err(D::Error::custom),
            None => {
                let near = elmur_base::did_you_mean(name, KINDS.iter().copied());
                let known = KINDS.join(", ");
                Err(D::Error::custom(format!("kind {kind} is not one of {known}{near}")))
            }
        }
    }
}
