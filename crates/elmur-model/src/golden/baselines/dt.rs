//! Golden cases of Decision Transformer.

use serde::Deserialize;

use super::{Common, Parts};
use crate::architecture::Architecture;
use crate::baselines::{Dt, DtCompat};
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
    skip_dec_ffn: bool,
    compat: PublishedCompat,
}

#[derive(Debug, Deserialize)]
struct PublishedCompat {
    double_residual: bool,
}

pub(super) fn parts(common: &Common, arguments: &Arguments) -> Result<Parts> {
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
