//! The four phases of a step: keys and values of the cache, of the leading memory and of earlier tokens are
//! kept, so that a step costs the step's tokens alone.
//!
//! ```text
//! keys.l    [cache ; leading memory ; tokens]    keys and values of layer l
//! inputs.l  [leading memory ; tokens]            inputs of layer l, of which the next cache is made
//! ```

use elmur_engine::{Attention, AttentionMask, DType, Qkv, Value};

use super::TransformerXl;
use crate::ends::Token;
use crate::error::Result;
use crate::net::{Net, Start};

fn keys_state(layer: usize) -> String {
    format!("keys.{layer}")
}

fn inputs_state(layer: usize) -> String {
    format!("inputs.{layer}")
}

fn projected_state(layer: usize) -> String {
    format!("projected.{layer}")
}

impl TransformerXl {
    /// W_r PE of one layer for all distances of a segment, which follow from the parameters.
    pub(super) fn projected(&self, net: &mut Net<'_>, layer: usize) -> Result<Value> {
        let rows = self.tokens() + 2 * self.memory_tokens;
        let distances = self.zero() + self.cache_tokens + rows;
        net.derived(&projected_state(layer), [distances, self.inner()])
    }

    /// What follows from the parameters, and from memory and cache: see [`TransformerXl::open`].
    pub(super) fn begin(&self, net: &mut Net<'_>) -> Result<()> {
        let rows = self.tokens() + 2 * self.memory_tokens;
        let encodings = self.constant_encodings(net, rows, rows)?;
        let mut projected = Vec::new();
        for layer in 0..self.layers {
            let r = self.project(net, layer, encodings)?;
            net.derive(&projected_state(layer), r)?;
            projected.push(r);
        }
        let memory = self.memory(net)?;
        let mut caches = Vec::new();
        for layer in 0..self.layers {
            caches.extend(self.cache_of(net, layer)?);
        }
        self.open(net, memory, &caches, &projected)
    }

    /// Begins a window: keys and values of the cache and of the leading memory, which goes through all layers
    /// with their projected encodings.
    fn open(
        &self,
        net: &mut Net<'_>,
        memory: Option<Value>,
        caches: &[Value],
        projected: &[Value],
    ) -> Result<()> {
        let (m, c, inner) = (self.memory_tokens, self.cache_tokens, self.inner());
        let mut x = memory;
        for layer in 0..self.layers {
            let mut keys = Vec::new();
            if let Some(cache) = caches.get(layer) {
                keys.push(self.keys_of(net, layer, *cache)?);
            }
            if let Some(rows) = x {
                let qkv = self.qkv(net, layer, rows)?;
                keys.push(net.g.slice(qkv, 2, inner..3 * inner)?);
                if c > 0 {
                    self.replace_front(net, &inputs_state(layer), &[rows], self.d_model)?;
                }
                let relative = Some(self.relative(net, projected[layer])?);
                let options = Attention { heads: self.heads, relative, ..Attention::default() };
                let y = net.g.attention(Qkv::Packed(qkv), options)?.0;
                x = Some(self.finish_layer(net, layer, rows, y)?);
            }
            if m + c > 0 {
                self.replace_front(net, &keys_state(layer), &keys, 2 * inner)?;
            }
        }
        Ok(())
    }

    /// Replaces the first rows of a state that the window's tokens are appended to.
    fn replace_front(&self, net: &mut Net<'_>, name: &str, front: &[Value], width: usize) -> Result<()> {
        let mut rows = 0;
        for part in front {
            rows += net.g.shape(*part)?[1];
        }
        let all = rows + self.tokens();
        let old = net.carried(name, &[all, width], Start::Zeros)?;
        let tokens = net.g.slice(old, 1, rows..all)?;
        let new = net.g.concat(&[front, &[tokens]].concat(), 1)?;
        net.keep(name, new)
    }

    /// Some tokens of one step through all layers.
    pub(super) fn tokens_of_step(&self, net: &mut Net<'_>, tokens: &[Token]) -> Result<Value> {
        let (m, c, inner, count) = (self.memory_tokens, self.cache_tokens, self.inner(), tokens.len());
        let before = m + c;
        let mut x = net.embed(tokens, self.action_activation())?;
        let start =
            net.integers("start", DType::I32, &[1], move |progress, _| (before + progress.first) as i64)?;
        let start = net.g.reshape(start, [net.rows()])?;
        let mask = if c == 0 {
            AttentionMask::Causal
        } else {
            let config = self.clone();
            AttentionMask::Range(net.integers("ranges", DType::I32, &[count, 2], move |progress, i| {
                let from = c - config.cached(progress.window, config.tokens());
                let to = before + progress.first + i / 2 + 1;
                if i % 2 == 0 { from as i64 } else { to as i64 }
            })?)
        };
        for layer in 0..self.layers {
            if c > 0 {
                net.append_after(&inputs_state(layer), m, x)?;
            }
            let qkv = self.qkv(net, layer, x)?;
            let q = net.g.slice(qkv, 2, 0..inner)?;
            let new = net.g.slice(qkv, 2, inner..3 * inner)?;
            let kv = net.append_after(&keys_state(layer), before, new)?;
            let r = self.projected(net, layer)?;
            let relative = Some(self.relative(net, r)?);
            let options =
                Attention { heads: self.heads, mask, relative, start: Some(start), ..Attention::default() };
            let (y, weights) = net.g.attention(Qkv::QueryAndPacked { q, kv }, options)?;
            self.tap_reads(net, layer, weights, 0..count)?;
            x = self.finish_layer(net, layer, x, y)?;
        }
        Ok(x)
    }

    /// The end of a window: trailing memory through all layers, the new memory and cache, and the beginning of
    /// the next window.
    pub(super) fn close(&self, net: &mut Net<'_>) -> Result<()> {
        let (m, c, d, inner, tokens) =
            (self.memory_tokens, self.cache_tokens, self.d_model, self.inner(), self.tokens());
        let memory = self.memory(net)?;
        let mut trailing = memory;
        let start = match memory {
            Some(_) => Some(net.g.full(DType::I32, [net.rows()], (m + tokens) as f64)?),
            None => None,
        };
        let (mut caches, mut projected) = (Vec::new(), Vec::new());
        for layer in 0..self.layers {
            projected.push(self.projected(net, layer)?);
            if let Some(cache) = self.cache_of(net, layer)? {
                let inputs = net.carried(&inputs_state(layer), &[m + tokens, d], Start::Zeros)?;
                let all: Vec<Value> = [cache, inputs].into_iter().chain(trailing).collect();
                caches.push(self.keep_cache(net, layer, &all)?);
            }
            if let Some(x) = trailing {
                let keys = net.carried(&keys_state(layer), &[c + m + tokens, 2 * inner], Start::Zeros)?;
                let keys = net.g.slice(keys, 1, c..c + m + tokens)?;
                let relative = Some(self.relative(net, projected[layer])?);
                let options = Attention { heads: self.heads, relative, start, ..Attention::default() };
                trailing = Some(self.trailing_layer(net, layer, x, keys, options)?);
            }
        }
        let memory = match (memory, trailing) {
            (Some(old), Some(trailing)) => Some(self.keep_memory(net, old, trailing)?),
            _ => None,
        };
        self.open(net, memory, &caches, &projected)
    }
}
