//! Golden cases of DT, TrXL, RMT and RATE.

use serde::Deserialize;

use super::super::{Begins, Part, StateTrace};
use super::{Common, Parts};
use crate::architecture::Architecture;
use crate::baselines::{TransformerXl, TransformerXlCompat, ValveActivation};
use crate::error::{Error, Result};
use crate::pieces::List;
use crate::policy::PolicyConfig;

#[derive(Debug, Deserialize)]
pub(super) struct Arguments {
    d_head: usize,
    d_inner: usize,
    n_head: usize,
    n_layer: usize,
    n_head_ca: usize,
    num_mem_tokens: usize,
    mem_len: usize,
    mrv_act: String,
    skip_dec_ffn: bool,
    compat: PublishedCompat,
}

#[derive(Debug, Deserialize)]
struct PublishedCompat {
    double_residual: bool,
    wrapped_memory_distances: bool,
}

/// Name of the published memory tokens.
const MEMORY: &str = "mem_tokens";

pub(super) fn parts(policy: &str, common: &Common, arguments: &Arguments) -> Result<Parts> {
    let a = arguments;
    let valve_activation = match a.mrv_act.as_str() {
        "relu" => ValveActivation::Relu,
        "no_act" => ValveActivation::None,
        other => return Err(Error::input("golden case", "mrv_act relu or no_act", other)),
    };
    let config = TransformerXl {
        observation: common.observation(),
        action: common.action(),
        d_model: common.d_model,
        heads: a.n_head,
        d_head: a.d_head,
        d_ff: (!a.skip_dec_ffn).then_some(a.d_inner),
        layers: a.n_layer,
        window: common.segment_length,
        memory_tokens: a.num_mem_tokens,
        cache_tokens: a.mem_len,
        valve_heads: a.n_head_ca,
        valve_activation,
        dropout: 0.0,
        attention_dropout: 0.0,
        action_tanh: common.action_tanh(),
        unroll: 1,
        slides: policy == "dt",
        compat: TransformerXlCompat {
            double_residual: a.compat.double_residual,
            wrapped_memory_distances: a.compat.wrapped_memory_distances,
            ..TransformerXlCompat::default()
        },
    };
    config.validate()?;
    let mut states = Vec::new();
    if config.memory_tokens > 0 {
        let own = TransformerXl::MEMORY.to_owned();
        let begins = Begins::Learned("param/mem_tokens");
        states.push(StateTrace { own, name: MEMORY, part: Part::Whole, begins });
    }
    for layer in 0..if config.cache_tokens > 0 { config.layers } else { 0 } {
        let own = TransformerXl::cache_state(layer);
        states.push(StateTrace { own, name: "cache", part: Part::OfLayer(layer), begins: Begins::Empty });
    }
    let pieces = pieces(&config).pieces;
    let through = TransformerXl { unroll: common.segments, ..config.clone() };
    let through = (config.memory_tokens > 0).then_some(PolicyConfig::TransformerXl(through));
    Ok((PolicyConfig::TransformerXl(config), pieces, states, through))
}

/// The published parameters.
fn pieces(config: &TransformerXl) -> List {
    let (d, inner) = (config.d_model, config.heads * config.d_head);
    let mut list = List::default();
    list.encoder(&config.observation[0], d);
    list.action_encoder(&config.action, d);
    list.return_encoder(d);
    list.head(&config.action, d);
    list.whole("r_w_bias", "u", (config.heads, config.d_head));
    list.whole("r_r_bias", "v", (config.heads, config.d_head));
    for layer in 0..config.layers {
        let name = format!("layers.{layer}");
        let mut whole = |theirs: &str, ours: &str, size| {
            list.whole(&format!("{name}.{theirs}"), &format!("{name}.{ours}"), size);
        };
        whole("dec_attn.qkv_net.weight", "attention.qkv.weight", (3 * inner, d));
        whole("dec_attn.r_net.weight", "attention.r.weight", (inner, d));
        whole("dec_attn.o_net.weight", "attention.out.weight", (d, inner));
        if let Some(d_ff) = config.d_ff {
            whole("pos_ff.CoreNet.0.weight", "ffn.up.weight", (d_ff, d));
            whole("pos_ff.CoreNet.0.bias", "ffn.up.bias", (1, d_ff));
            whole("pos_ff.CoreNet.3.weight", "ffn.down.weight", (d, d_ff));
            whole("pos_ff.CoreNet.3.bias", "ffn.down.bias", (1, d));
            list.norm_pieces(&format!("{name}.layer_norm2"), &format!("{name}.ffn.norm"), d, true);
        }
        list.norm_pieces(&format!("{name}.layer_norm1"), &format!("{name}.attention.norm"), d, true);
    }
    if config.memory_tokens > 0 {
        list.whole(MEMORY, TransformerXl::MEMORY_START, (config.memory_tokens, d));
    }
    if config.valve_heads > 0 {
        for (theirs, ours) in [("wq", "q"), ("wk", "k"), ("wv", "v"), ("dense", "out")] {
            let (theirs, ours) = (format!("mha_mem_to_mem.{theirs}"), format!("valve.{ours}"));
            list.whole(&format!("{theirs}.weight"), &format!("{ours}.weight"), (d, d));
            list.whole(&format!("{theirs}.bias"), &format!("{ours}.bias"), (1, d));
        }
    }
    list
}
