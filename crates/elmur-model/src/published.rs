//! The published Python code's parameter names and layout, and how ours are made of them.
//!
//! Ours fuse what is used together (keys with values, gates with up-projections, all shared experts, all routed ones).
//! Every published tensor is one rectangle of one of ours, so both directions are copies.

use crate::config::{Action, CategoricalEncoding, Ffn, ModelConfig, NormType, Observation, Token};
use crate::error::{Error, Result};
use crate::tensors::Tensors;

/// One published tensor as a rectangle of one of ours.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Possible published names; the first is the usual one.
    pub published: Vec<String>,
    /// Our parameter.
    pub own: String,
    /// Shape of our parameter seen as a matrix.
    pub matrix: (usize, usize),
    /// First row and column.
    pub at: (usize, usize),
    /// Rows and columns.
    pub size: (usize, usize),
}

impl Piece {
    /// Copies the published tensor into ours.
    fn insert(&self, published: &[f64], own: &mut [f64]) {
        for (row, source) in published.chunks_exact(self.size.1).enumerate() {
            let start = (self.at.0 + row) * self.matrix.1 + self.at.1;
            own[start..start + self.size.1].copy_from_slice(source);
        }
    }

    /// Copies the rectangle out of ours.
    pub fn extract(&self, own: &[f64]) -> Vec<f64> {
        let row = |r: usize| &own[(self.at.0 + r) * self.matrix.1 + self.at.1..][..self.size.1];
        (0..self.size.0).flat_map(|r| row(r).to_vec()).collect()
    }
}

/// Whether a published tensor exists whatever the configuration, and this one does not use it.
fn is_spare(config: &ModelConfig, name: &str) -> bool {
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
pub fn pieces(config: &ModelConfig) -> Vec<Piece> {
    let mut list = List(Vec::new());
    let d = config.d_model;
    match &config.observation {
        Observation::Image { channels, height, width } => {
            // The encoder as a sequence: convolution, ReLU, ..., flatten, linear, tanh.
            let along = |n: usize| ((n - 8) / 4 + 1 - 4) / 2 + 1 - 2;
            for (i, (outputs, depth)) in
                [(32, channels * 64), (64, 32 * 16), (64, 64 * 9)].into_iter().enumerate()
            {
                list.whole(
                    &format!("state_encoder.{}.weight", 2 * i),
                    &format!("encoder.conv{i}.weight"),
                    (outputs, depth),
                );
                list.whole(
                    &format!("state_encoder.{}.bias", 2 * i),
                    &format!("encoder.conv{i}.bias"),
                    (1, outputs),
                );
            }
            let features = 64 * along(*height) * along(*width);
            list.whole("state_encoder.7.weight", "encoder.weight", (d, features));
            list.whole("state_encoder.7.bias", "encoder.bias", (1, d));
        }
        observation => {
            let dim = match observation {
                Observation::Vector { dim } => *dim,
                Observation::Categorical { sizes, .. } => sizes.len(),
                _ => 0,
            };
            list.whole("state_encoder.weight", "encoder.weight", (d, dim));
            list.whole("state_encoder.bias", "encoder.bias", (1, d));
        }
    }
    if config.tokens.tokens().contains(&Token::Action) {
        match &config.action {
            Action::Continuous { dim, .. } => {
                list.whole("action_embeddings.0.weight", "action_encoder.weight", (d, *dim));
                list.whole("action_embeddings.0.bias", "action_encoder.bias", (1, d));
            }
            action => {
                let rows = action.outputs() + 1;
                list.whole("action_embeddings.0.weight", "action_encoder.0.table", (rows, d));
            }
        }
    }
    if config.tokens.tokens().contains(&Token::Return) {
        list.whole("ret_emb.weight", "return_encoder.weight", (d, 1));
        list.whole("ret_emb.bias", "return_encoder.bias", (1, d));
    }
    let outputs = config.action.outputs();
    if matches!(config.action, Action::Continuous { tanh: true, .. }) {
        list.either(&["head.0.weight", "head.weight"], "head.weight", (outputs, d));
        list.either(&["head.0.bias", "head.bias"], "head.bias", (1, outputs));
    } else {
        list.whole("head.weight", "head.weight", (outputs, d));
    }
    let heads = (config.heads, d / config.heads);
    list.whole("r_w_bias", "u", heads);
    list.whole("r_r_bias", "v", heads);
    for layer in 0..config.layers {
        list.layer(config, layer);
    }
    list.0
}

struct List(Vec<Piece>);

impl List {
    fn whole(&mut self, published: &str, own: &str, size: (usize, usize)) {
        self.either(&[published], own, size);
    }

    fn either(&mut self, published: &[&str], own: &str, size: (usize, usize)) {
        self.part(published, own, size, (0, 0), size);
    }

    fn part(
        &mut self,
        published: &[&str],
        own: &str,
        matrix: (usize, usize),
        at: (usize, usize),
        size: (usize, usize),
    ) {
        let published = published.iter().map(|name| (*name).to_owned()).collect();
        self.0.push(Piece { published, own: own.to_owned(), matrix, at, size });
    }

    fn norm(&mut self, config: &ModelConfig, published: &str, own: &str) {
        self.whole(&format!("{published}.weight"), &format!("{own}.scale"), (1, config.d_model));
        if config.norm == NormType::Layer {
            self.whole(&format!("{published}.bias"), &format!("{own}.shift"), (1, config.d_model));
        }
    }

    fn layer(&mut self, config: &ModelConfig, layer: usize) {
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

    fn ffn(&mut self, config: &ModelConfig, from: &str, to: &str) {
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

/// Our parameters from published ones, by our names. Missing, misshapen or unknown tensors are errors that name them.
pub fn convert(config: &ModelConfig, published: &Tensors, prefix: &str) -> Result<Vec<(String, Vec<f64>)>> {
    let supported = match &config.observation {
        Observation::Vector { .. } | Observation::Image { .. } => true,
        Observation::Categorical { encoding, .. } => *encoding == CategoricalEncoding::Raw,
        Observation::Parts(_) => false,
    };
    if !supported {
        return Err(Error::input(
            "published weights",
            "vector, raw categorical or image observations",
            "others",
        ));
    }
    let mut own: std::collections::BTreeMap<String, Vec<f64>> = std::collections::BTreeMap::new();
    let mut used = std::collections::BTreeSet::new();
    for piece in pieces(config) {
        let found = piece.published.iter().find_map(|name| {
            let full = format!("{prefix}{name}");
            published.get(&full).map(|tensor| (full, tensor))
        });
        let Some((name, tensor)) = found else {
            return Err(Error::input(
                "published weights",
                format!("a tensor `{}`", piece.published[0]),
                "none",
            ));
        };
        // A matrix row by row; vectors have one row, convolutions fold what follows the first axis.
        let (rows, columns) = match tensor.shape.split_first() {
            Some((rows, rest)) if !rest.is_empty() => (*rows, rest.iter().product()),
            _ => (1, tensor.shape.iter().product()),
        };
        if (rows, columns) != piece.size {
            let expected = format!("`{name}` of {} x {}", piece.size.0, piece.size.1);
            return Err(Error::input("published weights", expected, format!("{:?}", tensor.shape)));
        }
        let target =
            own.entry(piece.own.clone()).or_insert_with(|| vec![0.0; piece.matrix.0 * piece.matrix.1]);
        piece.insert(&tensor.to_f64(), target);
        used.insert(name);
    }
    let mut names = published.keys().filter(|name| name.starts_with(prefix));
    let unknown = names.find(|name| !used.contains(*name) && !is_spare(config, name));
    if let Some(name) = unknown {
        return Err(Error::input(
            "published weights",
            "only tensors that this config has",
            format!("`{name}`"),
        ));
    }
    Ok(own.into_iter().collect())
}

/// Parameters of the published layout, the unused action and return embeddings of observation-only tokens included.
pub fn parameter_count(config: &ModelConfig) -> usize {
    let mut count: usize = pieces(config).iter().map(|p| p.size.0 * p.size.1).sum();
    let (d, tokens) = (config.d_model, config.tokens.tokens());
    if !tokens.contains(&Token::Action) {
        count += match &config.action {
            Action::Continuous { dim, .. } => d * dim + d,
            action => (action.outputs() + 1) * d,
        };
    }
    if !tokens.contains(&Token::Return) {
        count += 2 * d;
    }
    count
}
