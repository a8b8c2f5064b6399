//! Golden cases of the baselines: what all of them have in common; one file for each.

mod bc_lstm;
mod bc_mlp;
mod cql;
pub(super) mod diffusion;
mod dmamba;
mod transformer_xl;
pub(super) mod tt;

use serde::Deserialize;

use super::{Case, Fresh, Optimizer, StateTrace};
use crate::ends::{Action, Encoder};
use crate::error::{Error, Result};
use crate::pieces::Piece;
use crate::policy::PolicyConfig;

/// What the json of every baseline's case says.
#[derive(Debug, Deserialize)]
struct Common {
    env_name: String,
    action: String,
    batch: usize,
    segments: usize,
    segment_length: usize,
    state_dim: usize,
    act_dim: usize,
    d_model: usize,
    optimizer: Optimizer,
}

impl Common {
    fn is_popgym(&self) -> bool {
        self.env_name.starts_with("popgym")
    }

    fn observation(&self) -> Vec<Encoder> {
        vec![Encoder::Vector { dim: self.state_dim, bytes: false }]
    }

    /// The published head: tanh for continuous actions, but not on POPGym.
    fn action(&self) -> Action {
        if self.action == "discrete" {
            Action::Categorical { count: self.act_dim }
        } else {
            Action::Continuous { dim: self.act_dim, tanh: !self.is_popgym() }
        }
    }

    /// Whether published action embeddings end with tanh: all but those of discrete POPGym tasks and MIKASA.
    fn action_tanh(&self) -> bool {
        if self.action == "discrete" { !self.is_popgym() } else { !self.env_name.contains("mikasa") }
    }
}

fn parse<'de, T: Deserialize<'de>>(json: &'de str) -> Result<T> {
    serde_json::from_str(json)
        .map_err(|e| Error::input("golden case", "arguments of the published policy", e.to_string()))
}

/// The case of this policy that a json describes.
pub(super) fn case(policy: &str, json: &str) -> Result<Case> {
    let common: Common = parse(json)?;
    if policy == "cql_td" {
        return cql::td(common, &parse(json)?);
    }
    let (config, pieces, states, through) = match policy {
        "bc_lstm" => bc_lstm::parts(&common, &parse(json)?)?,
        "bc_mlp" => bc_mlp::parts(&common, &parse(json)?)?,
        "cql_mlp" | "cql_lstm" => cql::published(&common, &parse(json)?)?,
        "dmamba" => dmamba::parts(&common, &parse(json)?)?,
        "dt" | "trxl" | "rmt" | "rate" => transformer_xl::parts(policy, &common, &parse(json)?)?,
        other => {
            let expected = "policy bc_mlp, bc_lstm, cql_mlp, cql_lstm, cql_td, dmamba, dt, trxl, rmt, rate, tt or \
                            diffusion_unet, or none for ELMUR";
            return Err(Error::input("golden case", expected, other));
        }
    };
    let mut outputs = vec![("logits", None, "eval/logits")];
    if policy.starts_with("cql") {
        let choices = config.architecture().ends().action.outputs();
        outputs.push(("hidden", Some(choices..2 * choices), "eval/q2"));
    }
    // The published DMamba carries nothing from one window to the next; its mixer can, and a session does.
    let (fresh, acted) = match &config {
        PolicyConfig::DMamba(config) => (Fresh::All, dmamba::acted(config.layers)),
        PolicyConfig::TransformerXl(_) => (Fresh::First, Vec::new()),
        _ => (Fresh::None, Vec::new()),
    };
    Ok(Case {
        outputs,
        fresh,
        acted,
        targets: false,
        config,
        pieces,
        batch: common.batch,
        windows: common.segments,
        states,
        gradient_window: common.segments.saturating_sub(1),
        gradients: "grad/param/",
        losses: vec![("loss", "grad/loss", 0), ("action_loss", "grad/loss", 1)],
        through,
        divides_by_more: common.action != "discrete" && !common.env_name.contains("mikasa"),
        spare: Box::new(|_| false),
        optimizer: common.optimizer,
    })
}

/// Policy, pieces, states, and the policy with gradients through all windows.
type Parts = (PolicyConfig, Vec<Piece>, Vec<StateTrace>, Option<PolicyConfig>);
