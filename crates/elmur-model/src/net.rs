//! The network as graph code: token track, memory track, encoders and heads, one function per sub-layer.
//!
//! Training, whole-segment evaluation and step-by-step acting are built from the same functions; they differ in where keys,
//! values and times come from. Parameters are declared on first use and found again by name, so that a graph may
//! unroll several segments.

use elmur_engine::{
    Activation as Act, Attention, AttentionMask, Blend, Conv2d, DType, Graph, Norm, NormKind, Qkv, Relative,
    Value,
};

use crate::config::{
    Action, Candidates, CategoricalEncoding, Ffn, MemoryInit, ModelConfig, NormType, Observation, Token,
};
use crate::error::Result;

/// Epsilon of every normalisation.
const EPS: f64 = 1e-8;

/// One layer's memory inside a graph.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryValue {
    /// [B, M, d]
    pub vectors: Value,
    /// i64 [B, M]
    pub anchors: Value,
}

/// When the tokens of a segment happen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// Time of every token as the biases see it, i64 [B or 1, T].
    pub tokens: Value,
    /// Time of the newest token, i64 `[B]`.
    pub newest: Value,
}

/// What self-attention looks back on.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Context {
    /// The whole segment at once; position encodings [T, d] or [B, T, d].
    Segment {
        /// PE(δ), row δ.
        encodings: Value,
    },
    /// Earlier tokens in a cache of keys and values [B, T, 2d]; new ones go to position `at` i32 `[B]`.
    Cache {
        /// The cache before this step.
        cache: Value,
        /// Projected encodings W_r PE, [T, d].
        projected: Value,
        /// Position of the first new token.
        at: Value,
    },
}

/// Restrictions on a write: which tokens it sees and which rows it is for.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WriteMask {
    /// bool [B, queries, T]; all tokens if absent.
    pub visible: Option<Value>,
    /// bool `[B]`; all rows if absent.
    pub active: Option<Value>,
}

/// What a write did, for recording and for key/value caches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written {
    pub memory: MemoryValue,
    /// i32 [B, W]
    pub slots: Value,
    /// Attention of the candidates to the tokens, [B, H, queries, T]; absent if writing is off.
    pub weights: Option<Value>,
}

/// Attention maps of one layer, for recording.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LayerMaps {
    pub read: Option<Value>,
    pub write: Option<Value>,
    pub slots: Option<Value>,
}

/// Graph under construction.
pub(crate) struct Net<'a> {
    pub g: &'a mut Graph,
    pub config: &'a ModelConfig,
    pub dtype: DType,
    /// Generator for dropout: present in training.
    pub rng: Option<Value>,
    /// Gates and experts of all layers whose balance counts, in training.
    pub routes: Vec<(Value, Value)>,
    /// Where the data lies on the device: rows of its tables, and which rows the segments are.
    pub table: Option<(usize, Value)>,
}

impl<'a> Net<'a> {
    pub(crate) fn new(g: &'a mut Graph, config: &'a ModelConfig, dtype: DType, rng: Option<Value>) -> Self {
        Self { g, config, dtype, rng, routes: Vec::new(), table: None }
    }

    /// The parameter `name`, declared if it is new.
    fn param(&mut self, name: &str, shape: impl Into<Vec<usize>>) -> Result<Value> {
        match self.g.find(name) {
            Some(value) => Ok(value),
            None => Ok(self.g.param(name, self.dtype, shape)?),
        }
    }

    fn dropout(&mut self, x: Value, p: f64) -> Result<Value> {
        Ok(match self.rng {
            Some(rng) => self.g.dropout(x, p, rng)?,
            None => x,
        })
    }

    /// x Wᵀ with W [out, in].
    fn map(&mut self, x: Value, name: &str, out: usize) -> Result<Value> {
        self.map_with(x, name, out, false, Act::Identity)
    }

    fn map_with(&mut self, x: Value, name: &str, out: usize, bias: bool, activation: Act) -> Result<Value> {
        let width = self.g.shape(x)?.last().copied().unwrap_or(1);
        let weight = self.param(&format!("{name}.weight"), [out, width])?;
        let bias = if bias { Some(self.param(&format!("{name}.bias"), [out])?) } else { None };
        Ok(self.g.linear(x, weight, bias, activation)?)
    }

    fn norm(&mut self, name: &str) -> Result<Norm> {
        let d = self.config.d_model;
        let gamma = self.param(&format!("{name}.scale"), [d])?;
        let kind = match self.config.norm {
            NormType::Layer => NormKind::Layer { beta: self.param(&format!("{name}.shift"), [d])? },
            NormType::Rms => NormKind::Rms,
        };
        Ok(Norm { kind, gamma, eps: EPS })
    }

    /// A sub-layer with residual and norm: norm(x + f(x)), or x + f(norm(x)).
    fn sublayer(
        &mut self,
        x: Value,
        norm: &str,
        f: impl FnOnce(&mut Self, Value) -> Result<Value>,
    ) -> Result<Value> {
        let norm = self.norm(norm)?;
        if self.config.pre_norm {
            let normed = self.g.norm(x, norm)?;
            let y = f(self, normed)?;
            Ok(self.g.add(x, y)?)
        } else {
            let y = f(self, x)?;
            Ok(self.g.residual_norm(x, y, norm)?.0)
        }
    }

    /// Dropout of attention weights.
    fn attention_dropout(&self) -> Option<(f64, Value)> {
        self.rng.map(|rng| (self.config.attention_dropout, rng))
    }

    // ---- tokens ----

    /// Embeddings of the given tokens of some steps, [B, steps * tokens, d], from inputs that `source` names.
    pub(crate) fn embed(&mut self, tokens: &[Token], source: &Sources) -> Result<Value> {
        let d = self.config.d_model;
        let mut parts = Vec::new();
        for token in tokens {
            parts.push(match token {
                Token::Observation => {
                    let observation = self.config.observation.clone();
                    self.encode(&observation, "encoder", &source.observation)?
                }
                Token::Action => self.encode_action(source.action)?,
                Token::Return => self.map_with(source.returns, "return_encoder", d, true, Act::Identity)?,
            });
        }
        let shape = self.g.shape(parts[0])?.to_vec();
        let (batch, steps) = (shape[0], shape[1]);
        let x = if parts.len() == 1 {
            parts[0]
        } else {
            let mut split = Vec::new();
            for part in &parts {
                split.push(self.g.reshape(*part, [batch, steps, 1, d])?);
            }
            let joined = self.g.concat(&split, 2)?;
            self.g.reshape(joined, [batch, steps * parts.len(), d])?
        };
        self.dropout(x, self.config.dropout)
    }

    /// An observation, [B, steps, ...], as [B, steps, d].
    fn encode(&mut self, observation: &Observation, name: &str, inputs: &[Value]) -> Result<Value> {
        let d = self.config.d_model;
        match observation {
            Observation::Vector { .. } => self.map_with(inputs[0], name, d, true, Act::Identity),
            Observation::Categorical { sizes, encoding } => {
                let x = inputs[0];
                let total: usize = sizes.iter().sum();
                if *encoding == CategoricalEncoding::Raw {
                    let x = self.g.cast(x, self.dtype)?;
                    return self.map_with(x, name, d, true, Act::Identity);
                }
                // One table for all components: one-hot times a matrix is a sum of its rows.
                let table = self.param(&format!("{name}.table"), [total, d])?;
                let shape = self.g.shape(x)?.to_vec();
                let mut offset = 0;
                let offsets: Vec<i32> = sizes
                    .iter()
                    .map(|size| {
                        offset += size;
                        (offset - size) as i32
                    })
                    .collect();
                let offsets = self.g.constant(&offsets, [sizes.len()])?;
                let index = self.g.add(x, offsets)?;
                let each = self.g.embedding(table, index)?;
                let sum = self.g.sum_to(each, [shape[0], shape[1], 1, d])?;
                let sum = self.g.reshape(sum, [shape[0], shape[1], d])?;
                if *encoding == CategoricalEncoding::Embedding {
                    return Ok(sum);
                }
                let bias = self.param(&format!("{name}.bias"), [d])?;
                Ok(self.g.add(sum, bias)?)
            }
            Observation::Image { .. } => {
                let shape = self.g.shape(inputs[0])?.to_vec();
                let mut x = self.g.reshape(inputs[0], [shape[0] * shape[1], shape[2], shape[3], shape[4]])?;
                for (i, (outputs, kernel, stride)) in
                    [(32, 8, 4), (64, 4, 2), (64, 3, 1)].into_iter().enumerate()
                {
                    let channels = self.g.shape(x)?[1];
                    let weight =
                        self.param(&format!("{name}.conv{i}.weight"), [outputs, channels, kernel, kernel])?;
                    let bias = self.param(&format!("{name}.conv{i}.bias"), [outputs])?;
                    x = self.g.conv2d(x, weight, Some(bias), Conv2d { stride, padding: 0 }, Act::Relu)?;
                }
                let features = self.g.ty(x)?.len() / (shape[0] * shape[1]);
                let x = self.g.reshape(x, [shape[0], shape[1], features])?;
                self.map_with(x, name, d, true, Act::Tanh)
            }
            Observation::Parts(parts) => {
                let mut encoded = Vec::new();
                for (i, part) in parts.iter().enumerate() {
                    encoded.push(self.encode(part, &format!("{name}.{i}"), &inputs[i..])?);
                }
                let joined = self.g.concat(&encoded, 2)?;
                self.map_with(joined, name, d, true, Act::Identity)
            }
        }
    }

    /// Actions as [B, steps, d]: discrete i32 [B, steps, components], where the count itself means "none".
    fn encode_action(&mut self, action: Value) -> Result<Value> {
        let d = self.config.d_model;
        let sizes = match &self.config.action {
            Action::Categorical { count } => vec![*count],
            Action::MultiCategorical { sizes } => sizes.clone(),
            Action::Continuous { .. } => {
                return self.map_with(action, "action_encoder", d, true, Act::Tanh);
            }
        };
        let shape = self.g.shape(action)?.to_vec();
        let mut sum: Option<Value> = None;
        for (i, size) in sizes.iter().enumerate() {
            let table = self.param(&format!("action_encoder.{i}.table"), [size + 1, d])?;
            let component = self.g.slice(action, 2, i..i + 1)?;
            let component = self.g.reshape(component, [shape[0], shape[1]])?;
            let each = self.g.embedding(table, component)?;
            sum = Some(match sum {
                Some(sum) => self.g.add(sum, each)?,
                None => each,
            });
        }
        match sum {
            Some(sum) => Ok(self.g.tanh(sum)?),
            None => self.map_with(action, "action_encoder", d, true, Act::Tanh),
        }
    }

    /// Head outputs [B, steps, outputs] from hidden states [B, steps * stride, d], read at `index` of each step.
    pub(crate) fn head(&mut self, hidden: Value, stride: usize, index: usize) -> Result<Value> {
        let d = self.config.d_model;
        let shape = self.g.shape(hidden)?.to_vec();
        let x = if stride == 1 {
            hidden
        } else {
            let x = self.g.reshape(hidden, [shape[0] * shape[1] / stride, stride, d])?;
            let x = self.g.slice(x, 1, index..index + 1)?;
            self.g.reshape(x, [shape[0], shape[1] / stride, d])?
        };
        let outputs = self.config.action.outputs();
        match self.config.action {
            Action::Continuous { tanh: true, .. } => self.map_with(x, "head", outputs, true, Act::Tanh),
            _ => self.map(x, "head", outputs),
        }
    }

    // ---- layers ----

    /// Relative self-attention. Returns the new token states and, with a cache, its new contents.
    pub(crate) fn attend(
        &mut self,
        layer: usize,
        x: Value,
        context: Context,
    ) -> Result<(Value, Option<Value>)> {
        let (d, heads) = (self.config.d_model, self.config.heads);
        let name = format!("layers.{layer}.attention");
        let mut new_cache = None;
        let x = self.sublayer(x, &format!("{name}.norm"), |net, x| {
            let relative = |net: &mut Self, r: Value| -> Result<Relative> {
                Ok(Relative {
                    u: net.param("u", [heads, d / heads])?,
                    v: net.param("v", [heads, d / heads])?,
                    r,
                })
            };
            let qkv = net.map(x, &format!("{name}.qkv"), 3 * d)?;
            let mut options = Attention {
                heads,
                mask: AttentionMask::Causal,
                dropout: net.attention_dropout(),
                ..Attention::default()
            };
            let y = match context {
                Context::Segment { encodings } => {
                    let encodings = net.dropout(encodings, net.config.dropout)?;
                    let r = net.map(encodings, &format!("{name}.r"), d)?;
                    options.relative = Some(relative(net, r)?);
                    net.g.attention(Qkv::Packed(qkv), options)?.0
                }
                Context::Cache { cache, projected, at } => {
                    let q = net.g.slice(qkv, 2, 0..d)?;
                    let rows = net.g.slice(qkv, 2, d..3 * d)?;
                    let kv = net.g.write_rows(cache, rows, at)?;
                    new_cache = Some(kv);
                    options.relative = Some(relative(net, projected)?);
                    options.start = Some(at);
                    net.g.attention(Qkv::QueryAndPacked { q, kv }, options)?.0
                }
            };
            let y = net.map(y, &format!("{name}.out"), d)?;
            net.dropout(y, net.config.dropout)
        })?;
        Ok((x, new_cache))
    }

    /// W_r PE of one layer, for caches.
    pub(crate) fn project_encodings(&mut self, layer: usize, encodings: Value) -> Result<Value> {
        self.map(encodings, &format!("layers.{layer}.attention.r"), self.config.d_model)
    }

    /// Keys and values for reading, [B, slots, 2d], from memory vectors.
    pub(crate) fn read_keys(&mut self, layer: usize, vectors: Value) -> Result<Value> {
        self.map(vectors, &format!("layers.{layer}.mem2tok.kv"), 2 * self.config.d_model)
    }

    fn bias(&mut self, layer: usize, q_times: Value, k_times: Value) -> Result<Option<Value>> {
        if !self.config.memory.relative_bias {
            return Ok(None);
        }
        let rows = 2 * self.config.memory.max_distance - 1;
        let table = self.param(&format!("layers.{layer}.relative_bias"), [rows, self.config.heads])?;
        Ok(Some(self.g.relative_bias(table, q_times, k_times)?))
    }

    /// `mem2tok`: tokens read the memory. Returns the new token states and the attention map.
    pub(crate) fn read(
        &mut self,
        layer: usize,
        x: Value,
        kv: Value,
        anchors: Value,
        times: Value,
    ) -> Result<(Value, Value)> {
        let d = self.config.d_model;
        let name = format!("layers.{layer}.mem2tok");
        let bias = self.bias(layer, times, anchors)?;
        let mut map = None;
        let x = self.sublayer(x, &format!("{name}.norm"), |net, x| {
            let q = net.map(x, &format!("{name}.q"), d)?;
            let options = Attention {
                heads: net.config.heads,
                bias,
                dropout: net.attention_dropout(),
                ..Attention::default()
            };
            let (y, weights) = net.g.attention(Qkv::QueryAndPacked { q, kv }, options)?;
            map = Some(weights);
            let y = net.map_with(y, &format!("{name}.out"), d, true, Act::Identity)?;
            net.dropout(y, net.config.dropout)
        })?;
        Ok((x, map.unwrap_or(x)))
    }

    /// The feed-forward sub-layer of the `token` or `memory` track.
    pub(crate) fn feed_forward(&mut self, layer: usize, track: &str, x: Value) -> Result<Value> {
        let name = format!("layers.{layer}.{track}_ffn");
        // Tokens one after the other, residual and all: gradients of x then add up inside the products that compute them.
        let shape = self.g.shape(x)?.to_vec();
        let tokens = shape.iter().product::<usize>() / self.config.d_model;
        let flat = self.g.reshape(x, [tokens, self.config.d_model])?;
        let y = self.sublayer(flat, &format!("{name}.norm"), |net, x| {
            let y = net.ffn(&name, x)?;
            match net.config.ffn {
                // The published dense SwiGLU drops hidden units only.
                Ffn::SwiGlu { .. } => Ok(y),
                _ => net.dropout(y, net.config.dropout),
            }
        })?;
        Ok(self.g.reshape(y, shape)?)
    }

    /// For x [N, d].
    fn ffn(&mut self, name: &str, x: Value) -> Result<Value> {
        let d = self.config.d_model;
        match self.config.ffn.clone() {
            Ffn::Gelu { d_ff } => {
                let hidden = self.map_with(x, &format!("{name}.up"), d_ff, true, Act::Gelu)?;
                let hidden = self.dropout(hidden, self.config.dropout)?;
                self.map_with(hidden, &format!("{name}.down"), d, true, Act::Identity)
            }
            Ffn::SwiGlu { d_ff } => self.swiglu(name, x, d_ff, self.config.dropout),
            Ffn::Moe { experts, routed_d_ff, shared_experts, shared_d_ff, top_k, balance, dropout } => {
                let logits = self.map(x, &format!("{name}.router"), experts)?;
                let (gates, chosen) =
                    self.g.route_top_k(logits, top_k.saturating_sub(shared_experts).max(1))?;
                if self.rng.is_some() && balance > 0.0 {
                    self.routes.push((gates, chosen));
                }
                let gate_up = self.param(&format!("{name}.routed.gate_up"), [experts, 2 * routed_d_ff, d])?;
                let down = self.param(&format!("{name}.routed.down"), [experts, d, routed_d_ff])?;
                let drop = self.rng.map(|rng| (dropout, rng));
                let shared = if shared_experts > 0 {
                    // All shared experts as one wider SwiGLU: their outputs are summed anyway.
                    let width = shared_experts * shared_d_ff;
                    Some(self.swiglu(&format!("{name}.shared"), x, width, dropout)?)
                } else {
                    None
                };
                let routed = self.g.expert_mixture(x, gates, chosen, gate_up, down, drop)?;
                match shared {
                    Some(shared) => Ok(self.g.accumulate(shared, routed)?),
                    None => Ok(routed),
                }
            }
        }
    }

    fn swiglu(&mut self, name: &str, x: Value, width: usize, dropout: f64) -> Result<Value> {
        let hidden = self.map(x, &format!("{name}.gate_up"), 2 * width)?;
        let hidden = self.g.swiglu(hidden)?;
        let hidden = self.dropout(hidden, dropout)?;
        self.map(hidden, &format!("{name}.down"), self.config.d_model)
    }

    /// `tok2mem` and the memory's update: candidates from the layer's final token states, then LRU replacement.
    pub(crate) fn write(
        &mut self,
        layer: usize,
        x: Value,
        memory: MemoryValue,
        times: Times,
        mask: WriteMask,
    ) -> Result<Written> {
        let m = self.config.memory.clone();
        let count = if m.lru { m.slots_per_write } else { m.slots };
        let (slots, slot_anchors) = self.g.lru_select(memory.anchors, count)?;
        let every = m.candidates == Candidates::All && count < m.slots;
        let (old, anchors) = if every {
            (memory.vectors, memory.anchors)
        } else {
            (self.g.gather_slots(memory.vectors, slots)?, slot_anchors)
        };
        let mut weights = None;
        let mut candidates = old;
        if m.write {
            let (d, name) = (self.config.d_model, format!("layers.{layer}.tok2mem"));
            let kv = self.map(x, &format!("{name}.kv"), 2 * d)?;
            let bias = self.bias(layer, anchors, times.tokens)?;
            candidates = self.sublayer(old, &format!("{name}.norm"), |net, old| {
                let q = net.map(old, &format!("{name}.q"), d)?;
                let options = Attention {
                    heads: net.config.heads,
                    mask: mask.visible.map_or(AttentionMask::Full, AttentionMask::Custom),
                    bias,
                    dropout: net.attention_dropout(),
                    ..Attention::default()
                };
                let (y, map) = net.g.attention(Qkv::QueryAndPacked { q, kv }, options)?;
                weights = Some(map);
                let y = net.map_with(y, &format!("{name}.out"), d, true, Act::Identity)?;
                net.dropout(y, net.config.dropout)
            })?;
            candidates = self.feed_forward(layer, "memory", candidates)?;
            candidates = self.dropout(candidates, m.dropout)?;
        }
        if every {
            candidates = self.g.gather_slots(candidates, slots)?;
        }
        let blend = Blend {
            lambda: if m.lru { m.lambda } else { 1.0 },
            empty_slots_too: self.config.compat.empty_slot_blend || !m.lru,
            active: mask.active,
        };
        let (vectors, anchors) =
            self.g.lru_blend(memory.vectors, memory.anchors, slots, candidates, times.newest, blend)?;
        let anchors = if m.lru { anchors } else { memory.anchors };
        Ok(Written { memory: MemoryValue { vectors, anchors }, slots, weights })
    }

    /// All layers over one segment: tokens [B, T, d] in, hidden states out, memories replaced by their successors.
    pub(crate) fn segment(
        &mut self,
        mut x: Value,
        memories: &mut [MemoryValue],
        times: Times,
        encodings: Value,
        mask: WriteMask,
    ) -> Result<(Value, Vec<LayerMaps>)> {
        let mut maps = Vec::new();
        for layer in 0..self.config.layers {
            let memory = &mut memories[if self.config.memory.shared { 0 } else { layer }];
            let mut layer_maps = LayerMaps::default();
            x = self.attend(layer, x, Context::Segment { encodings })?.0;
            if self.config.memory.read {
                let kv = self.read_keys(layer, memory.vectors)?;
                let (y, map) = self.read(layer, x, kv, memory.anchors, times.tokens)?;
                x = y;
                layer_maps.read = Some(map);
            }
            x = self.feed_forward(layer, "token", x)?;
            let written = self.write(layer, x, *memory, times, mask)?;
            *memory = written.memory;
            layer_maps.write = written.weights;
            layer_maps.slots = Some(written.slots);
            maps.push(layer_maps);
        }
        Ok((x, maps))
    }

    /// The memory at the start of an episode: random or learned, all slots empty.
    pub(crate) fn initial_memory(&mut self, index: usize, batch: usize) -> Result<MemoryValue> {
        let (slots, d) = (self.config.memory.slots, self.config.d_model);
        let anchors = self.g.full(DType::I64, [batch, slots], -1.0)?;
        let vectors = match (self.config.memory.init, self.rng) {
            (MemoryInit::Learned, _) => {
                let init = self.param(&format!("layers.{index}.memory_init"), [1, slots, d])?;
                self.g.broadcast_to(init, [batch, slots, d])?
            }
            (MemoryInit::Normal { std }, Some(rng)) => {
                self.g.random_normal(self.dtype, [batch, slots, d], std, rng)?
            }
            (MemoryInit::Normal { .. }, None) => self.g.full(self.dtype, [batch, slots, d], 0.0)?,
        };
        Ok(MemoryValue { vectors, anchors })
    }
}

/// The graph's inputs that tokens are made of.
pub(crate) struct Sources {
    /// One value per part of the observation.
    pub observation: Vec<Value>,
    /// Discrete i32 [B, steps, components] or continuous [B, steps, dim].
    pub action: Value,
    /// [B, steps, 1]
    pub returns: Value,
}

/// PE(delta) for `count` distances from `start` on: sines then cosines, [count, d].
pub(crate) fn position_encodings(start: u64, count: usize, d: usize) -> Vec<f64> {
    let half = d / 2;
    let mut table = Vec::with_capacity(count * d);
    for delta in 0..count as u64 {
        let angle = |c: usize| (start + delta) as f64 / 10_000f64.powf(2.0 * c as f64 / d as f64);
        table.extend((0..half).map(|c| angle(c).sin()));
        table.extend((0..half).map(|c| angle(c).cos()));
    }
    table
}
