//! The published Python code's parameter names and layout, and how ours are made of them.
//!
//! Ours fuse what is used together (keys with values, gates with up-projections, all shared experts, all
//! routed ones). Every published tensor is one rectangle of one of ours, so both directions are copies.

use super::config::{Elmur, Ffn, NormType};
use crate::ends::{Action, CategoricalEncoding, Encoder, Token};
use crate::error::{Error, Result};
use crate::pieces::{List, Piece, convert_pieces};
use crate::tensors::Tensors;

/// Whether a published tensor exists whatever the configuration, and this one does not use it.
pub(crate) fn is_spare(config: &Elmur, name: &str) -> bool {
    let memory = &config.memory;
    let spare = [
        (true, "action_embeddings."),
        (true, "ret_emb."),
        (!memory.read, ".cross_attention1."),
        (!memory.read, ".token_norm_cross."),
        (!memory.write, ".cross_attention2."),
        (!memory.write, ".memory_norm_cross."),
        (!memory.write, ".memory_ffn."),
        (!memory.relative_bias, ".cross_rel_bias."),
        (!memory.read && !memory.write, ".cross_rel_bias."),
    ];
    spare.iter().any(|(unused, part)| *unused && name.contains(part))
}

/// All published tensors that the model uses.
pub fn pieces(config: &Elmur) -> Vec<Piece> {
    let mut list = List::default();
    let d = config.d_model;
    if let [encoder] = &config.observation[..] {
        list.encoder(encoder, d);
    }
    if config.tokens.has(Token::Action) {
        list.action_encoder(&config.action, d);
    }
    if config.tokens.has(Token::Return) {
        list.return_encoder(d);
    }
    list.head(&config.action, d);
    let heads = (config.heads, d / config.heads);
    list.whole("r_w_bias", "u", heads);
    list.whole("r_r_bias", "v", heads);
    for layer in 0..config.layers {
        list.layer(config, layer);
    }
    list.pieces
}

/// ELMUR's parts.
impl List {
    fn norm(&mut self, config: &Elmur, published: &str, own: &str) {
        self.norm_pieces(published, own, config.d_model, config.norm == NormType::Layer);
    }

    fn layer(&mut self, config: &Elmur, layer: usize) {
        let d = config.d_model;
        let (from, to) = (format!("layers.{layer}"), format!("layers.{layer}"));
        self.whole(
            &format!("{from}.self_attention.qkv_net.weight"),
            &format!("{to}.attention.qkv.weight"),
            (3 * d, d),
        );
        self.whole(
            &format!("{from}.self_attention.r_net.weight"),
            &format!("{to}.attention.r.weight"),
            (d, d),
        );
        self.whole(
            &format!("{from}.self_attention.o_net.weight"),
            &format!("{to}.attention.out.weight"),
            (d, d),
        );
        self.norm(config, &format!("{from}.self_attention.layer_norm"), &format!("{to}.attention.norm"));
        let memory = &config.memory;
        for (on, theirs, ours, norm) in [
            (memory.read, "cross_attention1", "mem2tok", "token_norm_cross"),
            (memory.write, "cross_attention2", "tok2mem", "memory_norm_cross"),
        ] {
            if !on {
                continue;
            }
            let own = |part: &str| format!("{to}.{ours}.{part}");
            self.whole(&format!("{from}.{theirs}.w_q.weight"), &own("q.weight"), (d, d));
            self.part(
                &[&format!("{from}.{theirs}.w_k.weight")],
                &own("kv.weight"),
                (2 * d, d),
                (0, 0),
                (d, d),
            );
            self.part(
                &[&format!("{from}.{theirs}.w_v.weight")],
                &own("kv.weight"),
                (2 * d, d),
                (d, 0),
                (d, d),
            );
            self.whole(&format!("{from}.{theirs}.w_o.weight"), &own("out.weight"), (d, d));
            self.whole(&format!("{from}.{theirs}.w_o.bias"), &own("out.bias"), (1, d));
            self.norm(config, &format!("{from}.{norm}"), &own("norm"));
        }
        if memory.relative_bias && (memory.read || memory.write) {
            let size = (2 * memory.max_distance - 1, config.heads);
            self.whole(&format!("{from}.cross_rel_bias.bias.weight"), &format!("{to}.relative_bias"), size);
        }
        for (on, track) in [(true, "token_ffn"), (memory.write, "memory_ffn")] {
            if on {
                self.ffn(config, &format!("{from}.{track}"), &format!("{to}.{track}"));
            }
        }
    }

    fn ffn(&mut self, config: &Elmur, from: &str, to: &str) {
        let d = config.d_model;
        self.norm(config, &format!("{from}.layer_norm"), &format!("{to}.norm"));
        let core = format!("{from}.core_net");
        match config.ffn {
            Ffn::Gelu { d_ff } => {
                self.whole(&format!("{core}.0.weight"), &format!("{to}.up.weight"), (d_ff, d));
                self.whole(&format!("{core}.0.bias"), &format!("{to}.up.bias"), (1, d_ff));
                self.whole(&format!("{core}.3.weight"), &format!("{to}.down.weight"), (d, d_ff));
                self.whole(&format!("{core}.3.bias"), &format!("{to}.down.bias"), (1, d));
            }
            Ffn::SwiGlu { d_ff } => {
                let names = |part: &str| {
                    [
                        format!("{core}.{part}.weight"),
                        format!("{core}.swiglu.{part}.weight"),
                        format!("{core}.0.{part}.weight"),
                    ]
                };
                for (part, own, matrix, at, size) in [
                    ("gate_proj", "gate_up", (2 * d_ff, d), (0, 0), (d_ff, d)),
                    ("up_proj", "gate_up", (2 * d_ff, d), (d_ff, 0), (d_ff, d)),
                    ("down_proj", "down", (d, d_ff), (0, 0), (d, d_ff)),
                ] {
                    let names = names(part);
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    self.part(&names, &format!("{to}.{own}.weight"), matrix, at, size);
                }
            }
            Ffn::Moe { experts, routed_d_ff: f, shared_experts, shared_d_ff: s, .. } => {
                self.whole(
                    &format!("{core}.router.linear.weight"),
                    &format!("{to}.router.weight"),
                    (experts, d),
                );
                for e in 0..experts {
                    let name = |part: &str| format!("{core}.experts.{e}.swiglu.{part}.weight");
                    let (gate_up, down) = (format!("{to}.routed.gate_up"), format!("{to}.routed.down"));
                    self.part(&[&name("gate_proj")], &gate_up, (experts * 2 * f, d), (e * 2 * f, 0), (f, d));
                    self.part(
                        &[&name("up_proj")],
                        &gate_up,
                        (experts * 2 * f, d),
                        (e * 2 * f + f, 0),
                        (f, d),
                    );
                    self.part(&[&name("down_proj")], &down, (experts * d, f), (e * d, 0), (d, f));
                }
                let width = shared_experts * s;
                for e in 0..shared_experts {
                    let name = |part: &str| format!("{core}.shared_experts.{e}.swiglu.{part}.weight");
                    let gate_up = format!("{to}.shared.gate_up.weight");
                    self.part(&[&name("gate_proj")], &gate_up, (2 * width, d), (e * s, 0), (s, d));
                    self.part(&[&name("up_proj")], &gate_up, (2 * width, d), (width + e * s, 0), (s, d));
                    self.part(
                        &[&name("down_proj")],
                        &format!("{to}.shared.down.weight"),
                        (d, width),
                        (0, e * s),
                        (d, s),
                    );
                }
            }
        }
    }
}

/// Our parameters from published ones, by our names. Missing, misshapen or unknown tensors are errors that
/// name them.
pub fn convert(config: &Elmur, published: &Tensors, prefix: &str) -> Result<Vec<(String, Vec<f64>)>> {
    let supported = matches!(
        &config.observation[..],
        [Encoder::Vector { .. }
            | Encoder::Image { .. }
            | Encoder::Categorical { encoding: CategoricalEncoding::Raw, .. }]
    );
    if !supported {
        return Err(Error::input(
            "published weights",
            "vector, raw categorical or image observations",
            "others",
        ));
    }
    convert_pieces(&pieces(config), published, prefix, |name| is_spare(config, name))
}

/// Parameters of the published layout, the unused action and return embeddings of observation-only tokens
/// included.
pub fn parameter_count(config: &Elmur) -> usize {
    let mut count: usize = pieces(config).iter().map(|p| p.size.0 * p.size.1).sum();
    let (d, tokens) = (config.d_model, config.tokens);
    if !tokens.has(Token::Action) {
        count += match &config.action {
            Action::Continuous { dim, .. } => d * dim + d,
            action => (action.outputs() + 1) * d,
        };
    }
    if !tokens.has(Token::Return) {
        count += 2 * d;
    }
    count
}
