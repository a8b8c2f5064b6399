//! Golden cases of BC-LSTM.

use serde::Deserialize;

use super::super::{Begins, Part, StateTrace};
use super::{Common, Parts};
use crate::architecture::Architecture;
use crate::baselines::{BcLstm, LstmCompat};
use crate::error::{Error, Result};
use crate::pieces::List;
use crate::policy::PolicyConfig;

#[derive(Debug, Deserialize)]
pub(super) struct Arguments {
    hidden_layers: Vec<usize>,
    lstm_layers: usize,
}

pub(super) fn parts(common: &Common, arguments: &Arguments) -> Result<Parts> {
    let Some(&hidden) = arguments.hidden_layers.last() else {
        return Err(Error::input("golden case", "a width in `hidden_layers`", "none"));
    };
    let config = BcLstm {
        observation: common.observation(),
        action: common.action(),
        d_model: common.d_model,
        hidden,
        layers: arguments.lstm_layers,
        window: common.segment_length,
        dropout: 0.0,
        unroll: 1,
        compat: LstmCompat::default(),
    };
    config.validate()?;
    let mut list = List::default();
    list.encoder(&config.observation[0], common.d_model);
    list.head(&config.action, hidden);
    lstm_pieces(&mut list, config.layers, common.d_model, hidden);
    let states = lstm_states(config.layers);
    let through = BcLstm { unroll: common.segments, ..config.clone() };
    Ok((PolicyConfig::BcLstm(config), list.pieces, states, Some(PolicyConfig::BcLstm(through))))
}

/// The parameters of a stack of recurrent layers of width `hidden` over inputs of width `d`.
pub(super) fn lstm_pieces(list: &mut List, layers: usize, d: usize, hidden: usize) {
    for layer in 0..layers {
        let inputs = if layer == 0 { d } else { hidden };
        let own = format!("lstm.{layer}");
        for (theirs, ours, width) in [("ih", "input", inputs), ("hh", "hidden", hidden)] {
            let weight = format!("backbone_net.weight_{theirs}_l{layer}");
            list.whole(&weight, &format!("{own}.{ours}.weight"), (4 * hidden, width));
            let bias = format!("backbone_net.bias_{theirs}_l{layer}");
            list.whole(&bias, &format!("{own}.{ours}.bias"), (1, 4 * hidden));
        }
    }
}

/// Hidden states and cells of a stack of recurrent layers.
pub(super) fn lstm_states(layers: usize) -> Vec<StateTrace> {
    let state = |(name, own): (&'static str, String), layer: usize| StateTrace {
        own,
        name,
        part: Part::Layer(layer),
        begins: Begins::Traced,
    };
    let of = |layer: usize| {
        [("h", BcLstm::hidden_state(layer)), ("c", BcLstm::cell_state(layer))].map(|s| state(s, layer))
    };
    (0..layers).flat_map(of).collect()
}
