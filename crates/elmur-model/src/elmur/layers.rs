//! The sub-layers of an ELMUR layer as graph code, one function each.
//!
//! Training, whole-window evaluation and step-by-step acting are built from the same functions; they differ
//! in where keys, values and times come from.

use elmur_engine::{
    Activation as Act, Attention, AttentionMask, Blend, Norm, NormKind, Qkv, Relative, Value,
};

use super::config::{Candidates, Elmur, Ffn, MemoryInit, NormType, Replacement};
use crate::error::Result;
use crate::initial::Init;
use crate::net::{Net, Start};

/// Epsilon of every normalisation.
const EPS: f64 = 1e-8;

/// Name of the state that holds memory `i`'s vectors, [rows, M, d].
pub fn memory_state(i: usize) -> String {
    format!("memory.{i}")
}

/// Name of the state that holds memory `i`'s anchors, i64 [rows, M].
pub fn anchor_state(i: usize) -> String {
    format!("anchors.{i}")
}

/// One layer's memory inside a graph.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryValue {
    /// [rows, M, d]
    pub vectors: Value,
    /// i64 [rows, M]
    pub anchors: Value,
}

/// When the tokens of a segment happen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// Time of every token as the biases see it, i64 [rows or 1, T].
    pub tokens: Value,
    /// Time of the newest token, i64 `[rows]`.
    pub newest: Value,
}

/// What self-attention looks back on.
#[derive(Debug, Clone, Copy)]
pub(super) enum Context {
    /// The whole segment at once; position encodings [T, d] or [rows, T, d], row δ for distance δ.
    Segment { encodings: Value },
    /// Earlier tokens' keys and values, appended to the window's state `cache.<layer>`; projected encodings
    /// W_r PE, [T, d].
    Cache { projected: Value },
}

/// What a write did, for recording and for key/value caches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Written {
    pub memory: MemoryValue,
    /// i32 [rows, W]
    pub slots: Value,
    /// Attention of the candidates to the tokens, [rows, H, queries, T]; absent if writing is off.
    pub weights: Option<Value>,
}

impl Elmur {
    fn norm(&self, net: &mut Net<'_>, name: &str) -> Result<Norm> {
        let d = self.d_model;
        let gamma = net.param(&format!("{name}.scale"), [d], Init::Constant(1.0))?;
        let kind = match self.norm {
            NormType::Layer => {
                NormKind::Layer { beta: net.param(&format!("{name}.shift"), [d], Init::Constant(0.0))? }
            }
            NormType::Rms => NormKind::Rms,
        };
        Ok(Norm { kind, gamma, eps: EPS })
    }

    /// A sub-layer with residual and norm: norm(x + f(x)), or x + f(norm(x)).
    fn sublayer(
        &self,
        net: &mut Net<'_>,
        x: Value,
        norm: &str,
        f: impl FnOnce(&mut Net<'_>, Value) -> Result<Value>,
    ) -> Result<Value> {
        let norm = self.norm(net, norm)?;
        if self.pre_norm {
            let normed = net.g.norm(x, norm)?;
            let y = f(net, normed)?;
            Ok(net.g.accumulate(x, y)?)
        } else {
            let y = f(net, x)?;
            Ok(net.g.residual_norm(x, y, norm)?.0)
        }
    }

    /// The output map of cross-attention, with a bias that starts at 0.
    fn out(&self, net: &mut Net<'_>, y: Value, name: &str) -> Result<Value> {
        let d = self.d_model;
        let bias = Some(Init::Constant(0.0));
        let y = net.linear_act(y, &format!("{name}.out"), d, Init::xavier(d, d), bias, Act::Identity)?;
        net.dropout(y, self.dropout)
    }

    /// Relative self-attention: the new token states.
    pub(super) fn attend(
        &self,
        net: &mut Net<'_>,
        layer: usize,
        x: Value,
        context: Context,
    ) -> Result<Value> {
        let (d, heads) = (self.d_model, self.heads);
        let name = format!("layers.{layer}.attention");
        self.sublayer(net, x, &format!("{name}.norm"), |net, x| {
            let relative = |net: &mut Net<'_>, r: Value| -> Result<Relative> {
                let shape = [heads, d / heads];
                let u = net.param("u", shape, Init::Normal(0.02))?;
                let v = net.param("v", shape, Init::Normal(0.02))?;
                Ok(Relative::new(u, v, r))
            };
            let qkv = net.linear(x, &format!("{name}.qkv"), 3 * d, Init::xavier(3 * d, d))?;
            let mut options = Attention {
                heads,
                mask: AttentionMask::Causal,
                dropout: net.drop_with(self.attention_dropout),
                ..Attention::default()
            };
            let y = match context {
                Context::Segment { encodings } => {
                    let encodings = net.dropout(encodings, self.dropout)?;
                    let r = self.project_encodings(net, layer, encodings)?;
                    options.relative = Some(relative(net, r)?);
                    net.g.attention(Qkv::Packed(qkv), options)?.0
                }
                Context::Cache { projected } => {
                    let q = net.g.slice(qkv, 2, 0..d)?;
                    let new = net.g.slice(qkv, 2, d..3 * d)?;
                    let kv = net.append(&format!("cache.{layer}"), new)?;
                    options.relative = Some(relative(net, projected)?);
                    options.start = Some(net.position()?);
                    net.g.attention(Qkv::QueryAndPacked { q, kv }, options)?.0
                }
            };
            let y = net.linear(y, &format!("{name}.out"), d, Init::xavier(d, d))?;
            net.dropout(y, self.dropout)
        })
    }

    /// W_r PE of one layer.
    pub(super) fn project_encodings(
        &self,
        net: &mut Net<'_>,
        layer: usize,
        encodings: Value,
    ) -> Result<Value> {
        let d = self.d_model;
        net.linear(encodings, &format!("layers.{layer}.attention.r"), d, Init::xavier(d, d))
    }

    /// Keys and values for reading, [rows, slots, 2d], from memory vectors. They start as two maps of d
    /// outputs would.
    pub(super) fn read_keys(&self, net: &mut Net<'_>, layer: usize, vectors: Value) -> Result<Value> {
        let d = self.d_model;
        net.linear(vectors, &format!("layers.{layer}.mem2tok.kv"), 2 * d, Init::xavier(d, d))
    }

    fn bias(&self, net: &mut Net<'_>, layer: usize, q_times: Value, k_times: Value) -> Result<Option<Value>> {
        if !self.memory.relative_bias {
            return Ok(None);
        }
        let shape = [2 * self.memory.max_distance - 1, self.heads];
        let table = net.param(&format!("layers.{layer}.relative_bias"), shape, Init::Normal(1.0))?;
        Ok(Some(net.g.relative_bias(table, q_times, k_times)?))
    }

    /// `mem2tok`: tokens read the memory through its keys and values `kv`. Returns the new token states and
    /// the attention map [rows, H, T, M].
    pub(super) fn read(
        &self,
        net: &mut Net<'_>,
        layer: usize,
        x: Value,
        kv: Value,
        anchors: Value,
        times: Value,
    ) -> Result<(Value, Option<Value>)> {
        let d = self.d_model;
        let name = format!("layers.{layer}.mem2tok");
        let bias = self.bias(net, layer, times, anchors)?;
        let mut map = None;
        let x = self.sublayer(net, x, &format!("{name}.norm"), |net, x| {
            let q = net.linear(x, &format!("{name}.q"), d, Init::xavier(d, d))?;
            let dropout = net.drop_with(self.attention_dropout);
            let options = Attention { heads: self.heads, bias, dropout, ..Attention::default() };
            let (y, weights) = net.g.attention(Qkv::QueryAndPacked { q, kv }, options)?;
            map = Some(weights);
            self.out(net, y, &name)
        })?;
        Ok((x, map))
    }

    /// The feed-forward sub-layer of the `token` or `memory` track.
    pub(super) fn feed_forward(
        &self,
        net: &mut Net<'_>,
        layer: usize,
        track: &str,
        x: Value,
    ) -> Result<Value> {
        let name = format!("layers.{layer}.{track}_ffn");
        // Tokens one after the other, residual and all: gradients of x then add up inside the products that
        // compute them.
        let shape = net.g.shape(x)?.to_vec();
        let tokens = shape.iter().product::<usize>() / self.d_model;
        let flat = net.g.reshape(x, [tokens, self.d_model])?;
        let y = self.sublayer(net, flat, &format!("{name}.norm"), |net, x| {
            let y = self.ffn(net, &name, x)?;
            match self.ffn {
                // The published dense SwiGLU drops hidden units only.
                Ffn::SwiGlu { .. } => Ok(y),
                _ => net.dropout(y, self.dropout),
            }
        })?;
        Ok(net.g.reshape(y, shape)?)
    }

    /// The feed-forward network for x [N, d].
    fn ffn(&self, net: &mut Net<'_>, name: &str, x: Value) -> Result<Value> {
        let d = self.d_model;
        match self.ffn {
            Ffn::Gelu { d_ff } => {
                let zero = Some(Init::Constant(0.0));
                let up = format!("{name}.up");
                let hidden = net.linear_act(x, &up, d_ff, Init::xavier(d_ff, d), zero, Act::Gelu)?;
                let hidden = net.dropout(hidden, self.dropout)?;
                let down = format!("{name}.down");
                net.linear_act(hidden, &down, d, Init::xavier(d, d_ff), zero, Act::Identity)
            }
            Ffn::SwiGlu { d_ff } => self.swiglu(net, name, x, 1, d_ff, self.dropout),
            Ffn::Moe { experts, routed_d_ff, shared_experts, shared_d_ff, top_k, balance, dropout } => {
                let router = format!("{name}.router");
                let logits = net.linear(x, &router, experts, Init::xavier(experts, d))?;
                let (gates, chosen) =
                    net.g.route_top_k(logits, top_k.saturating_sub(shared_experts).max(1))?;
                if net.is_training() && balance > 0.0 {
                    net.routes.push((gates, chosen));
                }
                let shape = [experts, 2 * routed_d_ff, d];
                let init = Init::xavier(routed_d_ff, d);
                let gate_up = net.param(&format!("{name}.routed.gate_up"), shape, init)?;
                let shape = [experts, d, routed_d_ff];
                let down = net.param(&format!("{name}.routed.down"), shape, init)?;
                let drop = net.drop_with(dropout);
                let shared = if shared_experts > 0 {
                    // All shared experts as one wider SwiGLU: their outputs are summed anyway.
                    let name = format!("{name}.shared");
                    Some(self.swiglu(net, &name, x, shared_experts, shared_d_ff, dropout)?)
                } else {
                    None
                };
                let routed = net.g.expert_mixture(x, gates, chosen, gate_up, down, drop)?;
                match shared {
                    Some(shared) => Ok(net.g.accumulate(shared, routed)?),
                    None => Ok(routed),
                }
            }
        }
    }

    /// `count` SwiGLUs of hidden width `d_ff`, summed, as one of their total width; each starts as it would
    /// alone.
    fn swiglu(
        &self,
        net: &mut Net<'_>,
        name: &str,
        x: Value,
        count: usize,
        d_ff: usize,
        dropout: f64,
    ) -> Result<Value> {
        let init = Init::xavier(d_ff, self.d_model);
        let hidden = net.linear(x, &format!("{name}.gate_up"), 2 * count * d_ff, init)?;
        let hidden = net.g.swiglu(hidden)?;
        let hidden = net.dropout(hidden, dropout)?;
        net.linear(hidden, &format!("{name}.down"), self.d_model, init)
    }

    /// `tok2mem` and the memory's update: candidates from the layer's final token states x [rows, T, d], then
    /// LRU replacement.
    pub(super) fn write(
        &self,
        net: &mut Net<'_>,
        layer: usize,
        x: Value,
        memory: MemoryValue,
        times: Times,
    ) -> Result<Written> {
        let m = &self.memory;
        let lru = m.replacement == Replacement::Lru;
        let count = if lru { m.slots_per_write } else { m.slots };
        let (slots, slot_anchors) = net.g.lru_select(memory.anchors, count)?;
        let every = m.candidates == Candidates::All && count < m.slots;
        let (old, anchors) = if every {
            (memory.vectors, memory.anchors)
        } else {
            (net.g.gather_slots(memory.vectors, slots)?, slot_anchors)
        };
        let mut weights = None;
        let mut candidates = old;
        if m.write {
            let (d, name) = (self.d_model, format!("layers.{layer}.tok2mem"));
            let kv = net.linear(x, &format!("{name}.kv"), 2 * d, Init::xavier(d, d))?;
            let bias = self.bias(net, layer, anchors, times.tokens)?;
            let queries = if every { m.slots } else { count };
            let seen = net.seen(queries)?;
            candidates = self.sublayer(net, old, &format!("{name}.norm"), |net, old| {
                let q = net.linear(old, &format!("{name}.q"), d, Init::xavier(d, d))?;
                let options = Attention {
                    heads: self.heads,
                    mask: seen.map_or(AttentionMask::Full, AttentionMask::Custom),
                    bias,
                    dropout: net.drop_with(self.attention_dropout),
                    ..Attention::default()
                };
                let (y, map) = net.g.attention(Qkv::QueryAndPacked { q, kv }, options)?;
                weights = Some(map);
                self.out(net, y, &name)
            })?;
            candidates = self.feed_forward(net, layer, "memory", candidates)?;
            candidates = net.dropout(candidates, m.dropout)?;
        }
        if every {
            candidates = net.g.gather_slots(candidates, slots)?;
        }
        let blend = Blend {
            lambda: if lru { m.lambda } else { 1.0 },
            empty_slots_too: self.compat.empty_slot_blend || !lru,
            active: None,
        };
        let (vectors, anchors) =
            net.g.lru_blend(memory.vectors, memory.anchors, slots, candidates, times.newest, blend)?;
        let anchors = if lru { anchors } else { memory.anchors };
        Ok(Written { memory: MemoryValue { vectors, anchors }, slots, weights })
    }

    /// Memory `i` of the rows at hand: vectors as the configuration starts them, all slots empty at first.
    pub(super) fn memory_of(&self, net: &mut Net<'_>, i: usize) -> Result<MemoryValue> {
        let (slots, d) = (self.memory.slots, self.d_model);
        let start = match self.memory.init {
            MemoryInit::Normal { std } => Start::Normal(std),
            MemoryInit::Learned => Start::Learned(format!("layers.{i}.memory_init"), Init::Normal(0.02)),
        };
        Ok(MemoryValue {
            vectors: net.carried(&memory_state(i), &[slots, d], start)?,
            anchors: net.carried(&anchor_state(i), &[slots], Start::Never)?,
        })
    }

    /// Keeps memory `i` as a write left it.
    pub(super) fn keep_memory(&self, net: &mut Net<'_>, i: usize, memory: MemoryValue) -> Result<()> {
        net.keep(&memory_state(i), memory.vectors)?;
        net.keep(&anchor_state(i), memory.anchors)
    }
}
