//! The parts of a layer as graph code; segments and single steps are built from the same ones.

use std::sync::Arc;

use elmur_engine::{
    Activation as Act, Attention, AttentionMask, DType, Norm, NormKind, Qkv, Relative, Value,
};

use super::{TransformerXl, ValveActivation};
use crate::architecture::Architecture;
use crate::error::Result;
use crate::initial::Init;
use crate::net::{Net, Start, position_encoding};

/// Epsilon of every normalisation.
const EPS: f64 = 1e-5;

/// What all layers of a segment share.
pub(super) struct Segment {
    /// The keys that leading memory and tokens see, and trailing memory unless it is apart.
    mask: AttentionMask,
    /// Position of the first of these among the keys, i32 `[rows]`: behind the cache.
    start: Option<Value>,
    /// Position of trailing memory that is apart, among leading memory, tokens and itself.
    trailing_start: Option<Value>,
    /// Position encodings, [distances, d] (or with rows in front): from the farthest key ahead on.
    encodings: Value,
}

impl TransformerXl {
    /// Row of position encodings that holds distance zero: those before are for memory vectors ahead.
    pub(super) fn zero(&self) -> usize {
        self.memory_tokens.saturating_sub(1)
    }

    /// Distances of position encodings where `rows` rows follow the cache.
    fn distances(&self, rows: usize) -> usize {
        self.zero() + self.cache_tokens + rows
    }

    /// The distance whose encoding stands at row `i`, in a window whose rows and cache are `keys` together; none
    /// for zeros.
    fn distance(&self, i: usize, keys: usize) -> Option<f64> {
        let ahead = self.zero().saturating_sub(i);
        match (ahead, self.compat.wrapped_memory_distances) {
            (0, _) => Some((i - self.zero()) as f64),
            (_, false) => Some(-(ahead as f64)),
            (1, true) => None,
            (_, true) => Some((keys + 1 - ahead) as f64),
        }
    }

    /// Position encodings of windows whose rows and cache are always `keys` together, [distances, d].
    pub(super) fn constant_encodings(&self, net: &mut Net<'_>, rows: usize, keys: usize) -> Result<Value> {
        let (d, count) = (self.d_model, self.distances(rows));
        if net.only_parameters() {
            return Ok(net.g.full(net.dtype, [count, d], 0.0)?);
        }
        if self.memory_tokens < 2 {
            return net.encodings(count, d);
        }
        let mut table = Vec::with_capacity(count * d);
        for i in 0..count {
            match self.distance(i, keys) {
                Some(distance) => table.extend(position_encoding(distance, d)),
                None => table.resize(table.len() + d, 0.0),
            }
        }
        net.float_constant(&table, [count, d])
    }

    /// Mask, positions and encodings of a segment of `tokens` tokens, with trailing memory `apart` or among the rows.
    pub(super) fn segment(&self, net: &mut Net<'_>, tokens: usize, apart: bool) -> Result<Segment> {
        let (m, c, d) = (self.memory_tokens, self.cache_tokens, self.d_model);
        let rows = tokens + 2 * m;
        let queries = if apart { m + tokens } else { rows };
        let config = Arc::new(self.clone());
        let range = move |cached: usize, i: usize| match i {
            i if i < m => (c, c + m),
            i if i < m + tokens => (c - cached, c + i + 1),
            _ => (c, c + rows),
        };
        let mask = if m == 0 && c == 0 {
            AttentionMask::Causal
        } else if c == 0 {
            let all: Vec<i32> =
                (0..queries).flat_map(|i| [range(0, i).0 as i32, range(0, i).1 as i32]).collect();
            AttentionMask::Range(net.g.constant(&all, [1, queries, 2])?)
        } else {
            let config = Arc::clone(&config);
            let name = if apart { "ranges" } else { "ranges.together" };
            AttentionMask::Range(net.integers(name, DType::I32, &[queries, 2], move |progress, i| {
                let (from, to) = range(config.cached(progress.window, tokens), i / 2);
                if i % 2 == 0 { from as i64 } else { to as i64 }
            })?)
        };
        let batch = [net.rows()];
        let start = if c > 0 { Some(net.g.full(DType::I32, batch, c as f64)?) } else { None };
        let after = (m + tokens) as f64;
        let trailing_start = if m > 0 && apart { Some(net.g.full(DType::I32, batch, after)?) } else { None };
        // Where distances wrap around, they depend on how much the cache and the window hold.
        let varies = self.wraps_around() && (c > 0 || net.reruns());
        let encodings = if !varies || net.only_parameters() {
            self.constant_encodings(net, rows, rows)?
        } else {
            let count = self.distances(rows);
            let known = Arc::new(
                (0..=c + rows)
                    .map(|t| position_encoding(t as f64, d).collect::<Vec<_>>())
                    .collect::<Vec<_>>(),
            );
            net.floats("wrapped", &[count, d], move |progress, i| {
                let keys = config.cached(progress.window, tokens) + 2 * m + progress.tokens.min(tokens);
                config.distance(i / d, keys).map_or(0.0, |distance| known[distance as usize][i % d])
            })?
        };
        Ok(Segment { mask, start, trailing_start, encodings: net.dropout(encodings, self.dropout)? })
    }

    fn norm(&self, net: &mut Net<'_>, name: &str) -> Result<Norm> {
        let d = self.d_model;
        let gamma = net.param(&format!("{name}.scale"), [d], Init::Constant(1.0))?;
        let beta = net.param(&format!("{name}.shift"), [d], Init::Constant(0.0))?;
        Ok(Norm { kind: NormKind::Layer { beta }, gamma, eps: EPS })
    }

    /// Queries, keys and values of rows x [rows, T, d] side by side, [rows, T, 3 H D].
    pub(super) fn qkv(&self, net: &mut Net<'_>, layer: usize, x: Value) -> Result<Value> {
        net.linear(x, &format!("layers.{layer}.attention.qkv"), 3 * self.inner(), Init::fan_in(self.d_model))
    }

    /// Keys and values of rows x [rows, T, d] that ask nothing, [rows, T, 2 H D].
    pub(super) fn keys_of(&self, net: &mut Net<'_>, layer: usize, x: Value) -> Result<Value> {
        let (d, inner) = (self.d_model, self.inner());
        let name = format!("layers.{layer}.attention.qkv.weight");
        let weight = net.param(&name, [3 * inner, d], Init::fan_in(d))?;
        let weight = net.g.slice(weight, 0, inner..3 * inner)?;
        Ok(net.g.linear(x, weight, None, Act::Identity)?)
    }

    /// W_r PE of one layer, [distances, H D].
    pub(super) fn project(&self, net: &mut Net<'_>, layer: usize, encodings: Value) -> Result<Value> {
        let init = Init::fan_in(self.d_model);
        net.linear(encodings, &format!("layers.{layer}.attention.r"), self.inner(), init)
    }

    /// The relative form with projected encodings.
    pub(super) fn relative(&self, net: &mut Net<'_>, r: Value) -> Result<Relative> {
        let (shape, init) = ([self.heads, self.d_head], Init::xavier(self.heads, self.d_head));
        Ok(Relative {
            u: net.param("u", shape, init)?,
            v: net.param("v", shape, init)?,
            r,
            zero: self.zero(),
            next_query_ahead: self.compat.wrapped_memory_distances,
        })
    }

    /// What follows attention in a layer, for rows x [rows, T, d] and their attention y [rows, T, H D].
    pub(super) fn finish_layer(&self, net: &mut Net<'_>, layer: usize, x: Value, y: Value) -> Result<Value> {
        let (d, name) = (self.d_model, format!("layers.{layer}"));
        let y = net.linear(y, &format!("{name}.attention.out"), d, Init::fan_in(self.inner()))?;
        let y = net.dropout(y, self.dropout)?;
        let residual = if self.compat.double_residual { net.g.scale(x, 2.0)? } else { x };
        let norm = self.norm(net, &format!("{name}.attention.norm"))?;
        let x = net.g.residual_norm(residual, y, norm)?.0;
        let Some(d_ff) = self.d_ff else { return Ok(x) };
        let init = Init::fan_in(d);
        let hidden = net.linear_act(x, &format!("{name}.ffn.up"), d_ff, init, Some(init), Act::Relu)?;
        let hidden = net.dropout(hidden, self.dropout)?;
        let init = Init::fan_in(d_ff);
        let y = net.linear_act(hidden, &format!("{name}.ffn.down"), d, init, Some(init), Act::Identity)?;
        let y = net.dropout(y, self.dropout)?;
        let norm = self.norm(net, &format!("{name}.ffn.norm"))?;
        Ok(net.g.residual_norm(x, y, norm)?.0)
    }

    /// Leading memory and tokens [rows, T, d] and trailing memory that is apart [rows, m, d] through one layer, with
    /// the layer's cache [rows, cache tokens, d].
    pub(super) fn layer_of_segment(
        &self,
        net: &mut Net<'_>,
        layer: usize,
        (x, trailing): (Value, Option<Value>),
        cache: Option<Value>,
        segment: &Segment,
    ) -> Result<(Value, Option<Value>)> {
        let inner = self.inner();
        let qkv = self.qkv(net, layer, x)?;
        let r = self.encodings_of(net, layer, segment)?;
        let options = Attention {
            heads: self.heads,
            mask: segment.mask,
            relative: Some(self.relative(net, r)?),
            start: segment.start,
            dropout: net.drop_with(self.attention_dropout),
            ..Attention::default()
        };
        let operands = match cache {
            None => Qkv::Packed(qkv),
            Some(cache) => {
                let before = self.keys_of(net, layer, cache)?;
                let own = net.g.slice(qkv, 2, inner..3 * inner)?;
                let kv = net.g.concat(&[before, own], 1)?;
                Qkv::QueryAndPacked { q: net.g.slice(qkv, 2, 0..inner)?, kv }
            }
        };
        let (y, weights) = net.g.attention(operands, options)?;
        let queries = net.g.shape(weights)?[2];
        self.tap_reads(net, layer, weights, self.memory_tokens..queries)?;
        let x = self.finish_layer(net, layer, x, y)?;
        let Some(rows) = trailing else { return Ok((x, None)) };
        let options = Attention { mask: AttentionMask::Full, start: segment.trailing_start, ..options };
        let own = net.g.slice(qkv, 2, inner..3 * inner)?;
        Ok((x, Some(self.trailing_layer(net, layer, rows, own, options)?)))
    }

    /// Trailing memory x [rows, m, d] through one layer, which sees the keys and values of leading memory and
    /// tokens [rows, T, 2 H D] and its own.
    pub(super) fn trailing_layer(
        &self,
        net: &mut Net<'_>,
        layer: usize,
        x: Value,
        before: Value,
        options: Attention,
    ) -> Result<Value> {
        let inner = self.inner();
        let qkv = self.qkv(net, layer, x)?;
        let own = net.g.slice(qkv, 2, inner..3 * inner)?;
        let kv = net.g.concat(&[before, own], 1)?;
        let q = net.g.slice(qkv, 2, 0..inner)?;
        let y = net.g.attention(Qkv::QueryAndPacked { q, kv }, options)?.0;
        self.finish_layer(net, layer, x, y)
    }

    /// Projected encodings of one layer for a segment; sessions that step too have them ready.
    fn encodings_of(&self, net: &mut Net<'_>, layer: usize, segment: &Segment) -> Result<Value> {
        if net.reruns() && self.steps_exactly() {
            return self.projected(net, layer);
        }
        self.project(net, layer, segment.encodings)
    }

    /// The last layer of a window x [rows, T, d], for its newest token alone: [rows, 1, d].
    pub(super) fn last_layer_of_last_token(
        &self,
        net: &mut Net<'_>,
        x: Value,
        segment: &Segment,
    ) -> Result<Value> {
        let (layer, d, inner) = (self.layers - 1, self.d_model, self.inner());
        let last = net.integers("last", DType::I32, &[1], |progress, _| progress.tokens as i64 - 1)?;
        let newest = net.g.gather_slots(x, last)?;
        let kv = self.keys_of(net, layer, x)?;
        let weight =
            net.param(&format!("layers.{layer}.attention.qkv.weight"), [3 * inner, d], Init::fan_in(d))?;
        let weight = net.g.slice(weight, 0, 0..inner)?;
        let q = net.g.linear(newest, weight, None, Act::Identity)?;
        let r = self.encodings_of(net, layer, segment)?;
        let options = Attention {
            heads: self.heads,
            mask: AttentionMask::Causal,
            relative: Some(self.relative(net, r)?),
            start: Some(net.g.reshape(last, [net.rows()])?),
            ..Attention::default()
        };
        let y = net.g.attention(Qkv::QueryAndPacked { q, kv }, options)?.0;
        self.finish_layer(net, layer, newest, y)
    }

    /// Offers the attention of tokens (some queries) to the leading memory, [rows, H, tokens, memory tokens].
    pub(super) fn tap_reads(
        &self,
        net: &mut Net<'_>,
        layer: usize,
        weights: Value,
        tokens: std::ops::Range<usize>,
    ) -> Result<()> {
        if self.memory_tokens == 0 || !net.is_recording() {
            return Ok(());
        }
        let weights = net.g.slice(weights, 2, tokens)?;
        let memory = self.cache_tokens..self.cache_tokens + self.memory_tokens;
        let weights = net.g.slice(weights, 3, memory)?;
        net.tap_by_token(&format!("read.{layer}"), weights)
    }

    /// The cache of one layer, [rows, cache tokens, d]; none without a cache.
    pub(super) fn cache_of(&self, net: &mut Net<'_>, layer: usize) -> Result<Option<Value>> {
        if self.cache_tokens == 0 {
            return Ok(None);
        }
        let shape = [self.cache_tokens, self.d_model];
        net.carried(&Self::cache_state(layer), &shape, Start::Zeros).map(Some)
    }

    /// Keeps the last rows of `all`, one after the other, as a layer's cache, without gradient.
    pub(super) fn keep_cache(&self, net: &mut Net<'_>, layer: usize, all: &[Value]) -> Result<Value> {
        // As many of the last ones as are needed.
        let mut first = all.len();
        let mut rows = 0;
        while first > 0 && rows < self.cache_tokens {
            first -= 1;
            rows += net.g.shape(all[first])?[1];
        }
        let all = if let [one] = all[first..] { one } else { net.g.concat(&all[first..], 1)? };
        let newest = net.g.slice(all, 1, rows - self.cache_tokens..rows)?;
        let newest = net.g.stop_gradient(newest)?;
        net.keep(&Self::cache_state(layer), newest)?;
        Ok(newest)
    }

    /// Keeps what a segment leaves behind as the new memory: its trailing rows, through the valve where there is
    /// one.
    pub(super) fn keep_memory(&self, net: &mut Net<'_>, old: Value, trailing: Value) -> Result<Value> {
        let new = if self.valve_heads > 0 { self.valve(net, old, trailing)? } else { trailing };
        net.keep(Self::MEMORY, new)?;
        net.tap("memory", new)?;
        Ok(new)
    }

    /// RATE's memory retention valve: the old memory [rows, m, d] attends to the trailing rows [rows, m, d].
    fn valve(&self, net: &mut Net<'_>, old: Value, trailing: Value) -> Result<Value> {
        let d = self.d_model;
        let new = match self.valve_activation {
            ValveActivation::Relu => net.g.relu(trailing)?,
            ValveActivation::None => trailing,
        };
        let init = Init::fan_in(d);
        let map = |net: &mut Net<'_>, x: Value, name: &str| {
            net.linear_act(x, &format!("valve.{name}"), d, init, Some(init), Act::Identity)
        };
        let (q, k, v) = (map(net, old, "q")?, map(net, new, "k")?, map(net, new, "v")?);
        let dropout = match net.drop_with(self.attention_dropout) {
            None if self.compat.valve_dropout_in_eval => {
                Some((self.attention_dropout, net.generator_of_time()?))
            }
            dropout => dropout,
        };
        let options = Attention { heads: self.valve_heads, dropout, ..Attention::default() };
        let y = net.g.attention(Qkv::Separate { q, k, v }, options)?.0;
        map(net, y, "out")
    }
}
