//! Golden cases of the baselines.

use serde::Deserialize;

use super::{Case, Optimizer, StateTrace};
use crate::architecture::Architecture;
use crate::baselines::{BcLstm, Dt, DtCompat};
use crate::ends::{Action, Encoder};
use crate::error::{Error, Result};
use crate::pieces::{List, Piece};
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

#[derive(Debug, Deserialize)]
struct LstmArguments {
    hidden_layers: Vec<usize>,
    lstm_layers: usize,
}

#[derive(Debug, Deserialize)]
struct DtArguments {
    d_head: usize,
    d_inner: usize,
    n_head: usize,
    n_layer: usize,
    n_head_ca: usize,
    num_mem_tokens: usize,
    mem_len: usize,
    skip_dec_ffn: bool,
    compat: PublishedCompat,
}

#[derive(Debug, Deserialize)]
struct PublishedCompat {
    double_residual: bool,
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
    let (config, pieces, states, through) = match policy {
        "bc_lstm" => bc_lstm(&common, parse(json)?)?,
        "dt" => dt(&common, &parse(json)?)?,
        other => return Err(Error::input("golden case", "policy bc_lstm or dt, or none for ELMUR", other)),
    };
    Ok(Case {
        config,
        pieces,
        batch: common.batch,
        windows: common.segments,
        states,
        gradient_window: common.segments.saturating_sub(1),
        gradients: "grad/param/",
        losses: vec![("loss", "grad/loss", 0), ("action_loss", "grad/loss", 1)],
        through,
        divides_by_more: common.action != "discrete" && common.is_popgym(),
        spare: Box::new(|_| false),
        optimizer: common.optimizer,
    })
}

type Parts = (PolicyConfig, Vec<Piece>, Vec<StateTrace>, Option<PolicyConfig>);

fn bc_lstm(common: &Common, arguments: LstmArguments) -> Result<Parts> {
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
    };
    config.validate()?;
    let mut list = List::default();
    list.encoder(&config.observation[0], common.d_model);
    list.head(&config.action, hidden);
    for layer in 0..config.layers {
        let inputs = if layer == 0 { common.d_model } else { hidden };
        let own = format!("lstm.{layer}");
        for (theirs, ours, width) in [("ih", "input", inputs), ("hh", "hidden", hidden)] {
            let weight = format!("backbone_net.weight_{theirs}_l{layer}");
            list.whole(&weight, &format!("{own}.{ours}.weight"), (4 * hidden, width));
            let bias = format!("backbone_net.bias_{theirs}_l{layer}");
            list.whole(&bias, &format!("{own}.{ours}.bias"), (1, 4 * hidden));
        }
    }
    let state = |(name, own): (&'static str, String), layer: usize| StateTrace {
        own,
        name,
        layer,
        stacked: true,
        is_time: false,
    };
    let of = |layer: usize| {
        [("h", BcLstm::hidden_state(layer)), ("c", BcLstm::cell_state(layer))].map(|s| state(s, layer))
    };
    let states = (0..config.layers).flat_map(of).collect();
    let through = BcLstm { unroll: common.segments, ..config.clone() };
    Ok((PolicyConfig::BcLstm(config), list.pieces, states, Some(PolicyConfig::BcLstm(through))))
}

fn dt(common: &Common, arguments: &DtArguments) -> Result<Parts> {
    let a = arguments;
    if [a.n_head_ca, a.num_mem_tokens, a.mem_len] != [0; 3] || a.skip_dec_ffn {
        let expected = "no memory tokens, no cache and a feed-forward network";
        return Err(Error::input("golden case of dt", expected, "others"));
    }
    let config = Dt {
        observation: common.observation(),
        action: common.action(),
        d_model: common.d_model,
        heads: a.n_head,
        d_head: a.d_head,
        d_ff: a.d_inner,
        layers: a.n_layer,
        window: common.segment_length,
        dropout: 0.0,
        attention_dropout: 0.0,
        action_tanh: common.action_tanh(),
        compat: DtCompat { double_residual: a.compat.double_residual },
    };
    config.validate()?;
    let (d, inner) = (common.d_model, a.n_head * a.d_head);
    let mut list = List::default();
    list.encoder(&config.observation[0], d);
    list.action_encoder(&config.action, d);
    list.return_encoder(d);
    list.head(&config.action, d);
    list.whole("r_w_bias", "u", (a.n_head, a.d_head));
    list.whole("r_r_bias", "v", (a.n_head, a.d_head));
    for layer in 0..a.n_layer {
        let name = format!("layers.{layer}");
        for (theirs, ours, size) in [
            ("dec_attn.qkv_net.weight", "attention.qkv.weight", (3 * inner, d)),
            ("dec_attn.r_net.weight", "attention.r.weight", (inner, d)),
            ("dec_attn.o_net.weight", "attention.out.weight", (d, inner)),
            ("pos_ff.CoreNet.0.weight", "ffn.up.weight", (a.d_inner, d)),
            ("pos_ff.CoreNet.0.bias", "ffn.up.bias", (1, a.d_inner)),
            ("pos_ff.CoreNet.3.weight", "ffn.down.weight", (d, a.d_inner)),
            ("pos_ff.CoreNet.3.bias", "ffn.down.bias", (1, d)),
        ] {
            list.whole(&format!("{name}.{theirs}"), &format!("{name}.{ours}"), size);
        }
        list.norm_pieces(&format!("{name}.layer_norm1"), &format!("{name}.attention.norm"), d, true);
        list.norm_pieces(&format!("{name}.layer_norm2"), &format!("{name}.ffn.norm"), d, true);
    }
    Ok((PolicyConfig::Dt(config), list.pieces, Vec::new(), None))
}
