//! The network of a Trajectory Transformer: tokens to logits of the tokens that follow, and their loss.

use elmur_base::Field;
use elmur_engine::{
    Activation as Act, Attention, AttentionMask, CrossEntropy, DType, Norm, NormKind, Qkv, Value,
};

use super::Tt;
use crate::ends::Action;
use crate::error::Result;
use crate::initial::Init;
use crate::net::Net;

/// Epsilon of every normalisation.
const EPS: f64 = 1e-5;

/// How matrices and token embeddings start.
const WEIGHTS: Init = Init::Normal(0.02);

const ZERO: Init = Init::Constant(0.0);

impl Tt {
    /// Logits of the token after each of whole transitions' tokens, i32 [rows, steps * D]: [rows, steps,
    /// D (N + 1)]. The last token of a sequence is not read; what would follow it is meaningless.
    pub(crate) fn next_logits(&self, net: &mut Net<'_>, tokens: Value) -> Result<Value> {
        let vocabulary = self.vocabulary();
        let (d, each, outputs) = (self.d_model, vocabulary.per_transition(), vocabulary.stop() + 1);
        let shape = net.g.shape(tokens)?.to_vec();
        let (rows, all) = (shape[0], shape[1]);
        let read = all - 1;
        let tokens = net.g.slice(tokens, 1, 0..read)?;
        let x = self.embed(net, tokens)?;
        let positions = self.positions(net)?;
        let positions = net.g.slice(positions, 0, 0..read)?;
        let x = net.g.add(x, positions)?;
        let x = net.dropout(x, self.dropout)?;
        let mask = self.visible(net, read)?;
        let x = self.blocks(net, x, |net, _, qkv| {
            let options = Attention {
                heads: self.heads,
                mask: AttentionMask::Custom(mask),
                dropout: net.drop_with(self.dropout),
                ..Attention::default()
            };
            Ok(net.g.attention(Qkv::Packed(qkv), options)?.0)
        })?;
        // Every place has its own head: [D, rows * steps, d] times [D, N + 1, d].
        let nothing = net.g.full(net.dtype, [rows, 1, d], 0.0)?;
        let x = net.g.concat(&[x, nothing], 1)?;
        let steps = all / each;
        let x = net.g.reshape(x, [rows * steps, each, d])?;
        let x = net.g.transpose(x, &[1, 0, 2])?;
        let heads = self.heads_of_places(net)?;
        let logits = net.g.matmul_with(x, heads, false, true)?;
        let logits = net.g.transpose(logits, &[1, 0, 2])?;
        Ok(net.g.reshape(logits, [rows, steps, each * outputs])?)
    }

    /// Embeddings [rows, tokens, d] of tokens i32 [rows, tokens] that begin with a transition.
    fn embed(&self, net: &mut Net<'_>, tokens: Value) -> Result<Value> {
        let vocabulary = self.vocabulary();
        let (d, each, stop) = (self.d_model, vocabulary.per_transition(), vocabulary.stop());
        // A row for every token of every place, the stop token's repeated.
        let table = self.embeddings(net)?;
        let own = net.g.slice(table, 0, 0..each * stop)?;
        let own = net.g.reshape(own, [each, stop, d])?;
        let ends = net.g.slice(table, 0, each * stop..each * stop + 1)?;
        let ends = net.g.reshape(ends, [1, 1, d])?;
        let ends = net.g.broadcast_to(ends, [each, 1, d])?;
        let table = net.g.concat(&[own, ends], 1)?;
        let table = net.g.reshape(table, [each * (stop + 1), d])?;
        let count = net.g.shape(tokens)?[1];
        let firsts: Vec<i32> = (0..count).map(|i| (i % each * (stop + 1)) as i32).collect();
        let firsts = net.g.constant(&firsts, [count])?;
        let index = net.g.add(tokens, firsts)?;
        Ok(net.g.embedding(table, index)?)
    }

    /// Embeddings of tokens, [N D + 1, d]: N rows per place, and the stop token's.
    pub(super) fn embeddings(&self, net: &mut Net<'_>) -> Result<Value> {
        let vocabulary = self.vocabulary();
        let rows = vocabulary.stop() * vocabulary.per_transition() + 1;
        net.param("embedding", [rows, self.d_model], WEIGHTS)
    }

    /// Embeddings of positions, [tokens that are read, d].
    pub(super) fn positions(&self, net: &mut Net<'_>) -> Result<Value> {
        net.param("positions", [self.inputs(), self.d_model], ZERO)
    }

    /// The heads of all places, [D, N + 1, d].
    pub(super) fn heads_of_places(&self, net: &mut Net<'_>) -> Result<Value> {
        let (vocabulary, d) = (self.vocabulary(), self.d_model);
        let shape = [vocabulary.per_transition(), vocabulary.stop() + 1, d];
        net.param("head.weight", shape, Init::fan_in(d))
    }

    /// The keys that each of `count` queries sees, bool [1, count, count].
    pub(super) fn visible(&self, net: &mut Net<'_>, count: usize) -> Result<Value> {
        if net.only_params {
            return Ok(net.g.full(DType::Bool, [1, count, count], 1.0)?);
        }
        let each = self.vocabulary().per_transition();
        let seen: Vec<bool> = (0..count * count).map(|i| sees(i / count, i % count, each)).collect();
        Ok(net.g.constant(&seen, [1, count, count])?)
    }

    /// x [.., d] through all layers and the last norm. `attend(net, layer, qkv)` is the attention of a layer
    /// with queries, keys and values side by side, [.., 3d].
    pub(super) fn blocks(
        &self,
        net: &mut Net<'_>,
        mut x: Value,
        mut attend: impl FnMut(&mut Net<'_>, usize, Value) -> Result<Value>,
    ) -> Result<Value> {
        let d = self.d_model;
        let norm = self.norm(net, "layers.0.attention.norm")?;
        let mut h = net.g.norm(x, norm)?;
        for layer in 0..self.layers {
            let name = format!("layers.{layer}");
            let linear = |net: &mut Net<'_>, x, part: &str, outputs, activation| {
                net.linear_act(x, &format!("{name}.{part}"), outputs, WEIGHTS, Some(ZERO), activation)
            };
            let qkv = linear(net, h, "attention.qkv", 3 * d, Act::Identity)?;
            let y = attend(net, layer, qkv)?;
            let y = linear(net, y, "attention.out", d, Act::Identity)?;
            let y = net.dropout(y, self.dropout)?;
            let norm = self.norm(net, &format!("{name}.ffn.norm"))?;
            (h, x) = net.g.residual_norm(x, y, norm)?;
            let y = linear(net, h, "ffn.up", 4 * d, Act::Gelu)?;
            let y = linear(net, y, "ffn.down", d, Act::Identity)?;
            let y = net.dropout(y, self.dropout)?;
            let after = layer + 1;
            let last = after == self.layers;
            let name = if last { "norm".to_owned() } else { format!("layers.{after}.attention.norm") };
            let norm = self.norm(net, &name)?;
            (h, x) = net.g.residual_norm(x, y, norm)?;
        }
        Ok(h)
    }

    fn norm(&self, net: &mut Net<'_>, name: &str) -> Result<Norm> {
        let d = self.d_model;
        let gamma = net.param(&format!("{name}.scale"), [d], Init::Constant(1.0))?;
        let beta = net.param(&format!("{name}.shift"), [d], ZERO)?;
        Ok(Norm { kind: NormKind::Layer { beta }, gamma, eps: EPS })
    }

    /// The mean over all tokens but the first of weight times cross-entropy, given logits as
    /// [`Tt::next_logits`] has them (with any leading axes of extent 1), tokens [rows, n] and the weights of
    /// tokens 1.., [rows, n - 1].
    pub(crate) fn next_token_loss(
        &self,
        net: &mut Net<'_>,
        logits: Value,
        tokens: Value,
        weights: Value,
    ) -> Result<Value> {
        let shape = net.g.shape(tokens)?.to_vec();
        let (rows, all, outputs) = (shape[0], shape[1], self.vocabulary().stop() + 1);
        let logits = net.g.reshape(logits, [rows, all, outputs])?;
        let logits = net.g.slice(logits, 1, 0..all - 1)?;
        let targets = net.g.slice(tokens, 1, 1..all)?;
        let weights = net.g.scale(weights, 1.0 / (rows * (all - 1)) as f64)?;
        let settings = CrossEntropy { label_smoothing: 0.0, ignored: Field::IGNORED };
        Ok(net.g.weighted_cross_entropy(logits, targets, weights, settings)?)
    }

    /// Actions as the model expects them, [.., outputs], from logits [.., D (N + 1)]: logits of choices, or
    /// the means over bins of continuous numbers.
    pub(super) fn action_outputs(&self, net: &mut Net<'_>, logits: Value) -> Result<Value> {
        let vocabulary = self.vocabulary();
        let outputs = vocabulary.stop() + 1;
        let shape = net.g.shape(logits)?.to_vec();
        let axis = shape.len() - 1;
        // What a place predicts is the next place's token.
        let first = (vocabulary.observation() - 1) * outputs;
        let Action::Continuous { dim, .. } = self.action else {
            let mut parts = Vec::new();
            for (i, size) in self.action.sizes().iter().enumerate() {
                let start = first + i * outputs;
                parts.push(net.g.slice(logits, axis, start..start + size)?);
            }
            return Ok(if let [one] = parts[..] { one } else { net.g.concat(&parts, axis)? });
        };
        let lead = &shape[..axis];
        let logits = net.g.slice(logits, axis, first..first + dim * outputs)?;
        let logits = net.g.reshape(logits, [lead, &[dim, outputs]].concat())?;
        let logits = net.g.slice(logits, axis + 1, 0..self.bins)?;
        let shares = net.g.softmax(logits)?;
        let ends = self.bin_ends(net, Field::Action)?;
        let (low, high) = (net.g.slice(ends, 1, 0..self.bins)?, net.g.slice(ends, 1, 1..self.bins + 1)?);
        let middles = net.g.add(low, high)?;
        let middles = net.g.scale(middles, 0.5)?;
        let mean = net.g.mul(shares, middles)?;
        let mean = net.g.sum_to(mean, [lead, &[dim, 1]].concat())?;
        Ok(net.g.reshape(mean, [lead, &[dim]].concat())?)
    }
}

/// Whether a query sees a key in sequences of transitions of `each` tokens: earlier ones and itself, but no
/// values.
pub(super) fn sees(query: usize, key: usize, each: usize) -> bool {
    key <= query && key % each != each - 1
}
