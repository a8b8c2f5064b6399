//! Golden cases of conservative Q-learning.

use serde::Deserialize;

use super::super::{Case, Fresh};
use super::bc_lstm::{lstm_pieces, lstm_states};
use super::{Common, Parts};
use crate::architecture::Architecture;
use crate::baselines::{Cql, CqlObjective, LstmCompat};
use crate::error::{Error, Result};
use crate::pieces::List;
use crate::policy::PolicyConfig;

#[derive(Debug, Deserialize)]
pub(super) struct Arguments {
    hidden_layers: Vec<usize>,
    backbone: Option<String>,
    #[serde(default = "one")]
    lstm_layers: usize,
    cql_alpha: f64,
    gamma: Option<f64>,
    tau: Option<f64>,
}

fn one() -> usize {
    1
}

fn config(common: &Common, arguments: &Arguments, objective: CqlObjective) -> Result<Cql> {
    let mut hidden = arguments.hidden_layers.clone();
    let lstm = match (arguments.backbone.as_deref(), hidden.last().copied()) {
        (Some("lstm"), Some(width)) => {
            // The projection between the LSTM and a head is as wide as the LSTM.
            hidden = vec![width];
            Some(width)
        }
        (_, None) => return Err(Error::input("golden case", "a width in `hidden_layers`", "none")),
        _ => None,
    };
    let config = Cql {
        observation: common.observation(),
        action: common.action(),
        d_model: common.d_model,
        lstm,
        lstm_layers: arguments.lstm_layers,
        hidden,
        window: common.segment_length,
        dropout: 0.0,
        objective,
        alpha: arguments.cql_alpha,
        gamma: arguments.gamma.unwrap_or(0.99),
        tau: arguments.tau.unwrap_or(0.005),
        compat: LstmCompat::default(),
    };
    config.validate()?;
    Ok(config)
}

fn list(common: &Common, config: &Cql) -> List {
    let mut list = List::default();
    list.encoder(&config.observation[0], common.d_model);
    if let Some(width) = config.lstm {
        lstm_pieces(&mut list, config.lstm_layers, common.d_model, width);
    }
    for network in ["q1", "q2"] {
        let (layers, inputs) = match config.lstm {
            Some(width) => ("projector", width),
            None => ("backbone", common.d_model),
        };
        let own = format!("{network}.mlp");
        let width = list.mlp(&format!("{network}_{layers}"), &own, inputs, &config.hidden);
        let choices = config.action.outputs();
        list.whole(&format!("{network}_head.weight"), &format!("{network}.head.weight"), (choices, width));
    }
    list
}

/// The published form.
pub(super) fn published(common: &Common, arguments: &Arguments) -> Result<Parts> {
    let config = config(common, arguments, CqlObjective::Published)?;
    let states = config.lstm.map(|_| lstm_states(config.lstm_layers)).unwrap_or_default();
    let pieces = list(common, &config).pieces;
    Ok((PolicyConfig::Cql(config), pieces, states, None))
}

/// The form with a Bellman term.
pub(super) fn td(common: Common, arguments: &Arguments) -> Result<Case> {
    let config = config(&common, arguments, CqlObjective::Td)?;
    let choices = config.action.outputs();
    Ok(Case {
        pieces: list(&common, &config).pieces,
        config: PolicyConfig::Cql(config),
        batch: common.batch,
        windows: common.segments,
        outputs: vec![
            ("hidden", Some(0..choices), "eval/q1"),
            ("hidden", Some(choices..2 * choices), "eval/q2"),
        ],
        states: Vec::new(),
        fresh: Fresh::None,
        acted: Vec::new(),
        targets: true,
        gradient_window: 0,
        gradients: "grad/param/",
        losses: vec![("loss", "grad/loss", 0), ("action_loss", "grad/loss", 1)],
        through: None,
        divides_by_more: false,
        spare: Box::new(|_| false),
        optimizer: common.optimizer,
    })
}
