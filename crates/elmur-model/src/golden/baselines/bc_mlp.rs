//! Golden cases of BC-MLP.

use serde::Deserialize;

use super::{Common, Parts};
use crate::architecture::Architecture;
use crate::baselines::BcMlp;
use crate::error::Result;
use crate::pieces::List;
use crate::policy::PolicyConfig;

#[derive(Debug, Deserialize)]
pub(super) struct Arguments {
    hidden_layers: Vec<usize>,
}

pub(super) fn parts(common: &Common, arguments: &Arguments) -> Result<Parts> {
    let config = BcMlp {
        observation: common.observation(),
        action: common.action(),
        d_model: common.d_model,
        hidden: arguments.hidden_layers.clone(),
        window: common.segment_length,
        dropout: 0.0,
    };
    config.validate()?;
    let mut list = List::default();
    list.encoder(&config.observation[0], common.d_model);
    let width = list.mlp("backbone_net", "mlp", common.d_model, &config.hidden);
    list.head(&config.action, width);
    Ok((PolicyConfig::BcMlp(config), list.pieces, Vec::new(), None))
}
