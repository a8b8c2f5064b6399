//! Golden cases of DMamba.

use serde::Deserialize;

use super::super::ActedState;
use super::{Common, Parts};
use crate::architecture::Architecture;
use crate::baselines::{DMamba, DMambaCompat};
use crate::error::{Error, Result};
use crate::pieces::List;
use crate::policy::PolicyConfig;

#[derive(Debug, Deserialize)]
pub(super) struct Arguments {
    n_layer: usize,
    token_mixer: String,
}

pub(super) fn parts(common: &Common, arguments: &Arguments) -> Result<Parts> {
    if arguments.token_mixer != "mamba" {
        return Err(Error::input("golden case of dmamba", "token_mixer mamba", &arguments.token_mixer));
    }
    let config = DMamba {
        observation: common.observation(),
        action: common.action(),
        d_model: common.d_model,
        layers: arguments.n_layer,
        window: common.segment_length,
        dropout: 0.0,
        unroll: 1,
        state: 16,
        conv: 4,
        expand: 2,
        action_tanh: common.action_tanh(),
        // For its weight decay; parameters are those of the file.
        compat: DMambaCompat { flat_mamba_init: true, mamba_window: false },
    };
    config.validate()?;
    let (d, e, n, w, rank) = (common.d_model, 2 * common.d_model, 16, 4, common.d_model.div_ceil(16));
    let mut list = List::default();
    list.encoder(&config.observation[0], d);
    list.action_encoder(&config.action, d);
    list.return_encoder(d);
    list.head(&config.action, d);
    list.norm_pieces("ln_f", "norm", d, true);
    for layer in 0..config.layers {
        let (from, to) = (format!("blocks.{layer}"), format!("layers.{layer}"));
        for (theirs, ours, size) in [
            ("mamba.in_proj.weight", "mixer.in.weight", (2 * e, d)),
            ("mamba.conv1d.weight", "mixer.conv.weight", (e, w)),
            ("mamba.conv1d.bias", "mixer.conv.bias", (1, e)),
            ("mamba.x_proj.weight", "mixer.x.weight", (rank + 2 * n, e)),
            ("mamba.dt_proj.weight", "mixer.dt.weight", (e, rank)),
            ("mamba.dt_proj.bias", "mixer.dt.bias", (1, e)),
            ("mamba.A_log", "mixer.a_log", (e, n)),
            ("mamba.D", "mixer.d", (1, e)),
            ("mamba.out_proj.weight", "mixer.out.weight", (d, e)),
            ("mlp_channels.0.weight", "ffn.up.weight", (4 * d, d)),
            ("mlp_channels.0.bias", "ffn.up.bias", (1, 4 * d)),
            ("mlp_channels.2.weight", "ffn.down.weight", (d, 4 * d)),
            ("mlp_channels.2.bias", "ffn.down.bias", (1, d)),
        ] {
            list.whole(&format!("{from}.{theirs}"), &format!("{to}.{ours}"), size);
        }
        list.norm_pieces(&format!("{from}.norm_mamba"), &format!("{to}.mixer.norm"), d, true);
        list.norm_pieces(&format!("{from}.ln2"), &format!("{to}.ffn.norm"), d, true);
    }
    let through = DMamba { unroll: common.segments, ..config.clone() };
    Ok((PolicyConfig::DMamba(config), list.pieces, Vec::new(), Some(PolicyConfig::DMamba(through))))
}

/// The states that a session carries.
pub(super) fn acted(layers: usize) -> Vec<ActedState> {
    let of = |layer: usize| {
        [
            ActedState { own: DMamba::conv_state(layer), name: "carry/conv", layer },
            ActedState { own: DMamba::ssm_state(layer), name: "carry/ssm", layer },
        ]
    };
    (0..layers).flat_map(of).collect()
}
