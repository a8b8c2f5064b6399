//! ELMUR as an architecture: whole segments, and the four phases of a step.
//!
//! Inside a segment a step costs one token, whatever the time: keys and values of earlier tokens and of the
//! memory are cached. At a segment's last step the memory is written and the window begins anew. Where a
//! cache would not be exact (`compat.newest_first_times`, `compat.absolute_offset`, shared memory) sessions
//! run the window again at every step.

use elmur_engine::{Activation as Act, Blend, Value};

use super::config::{Elmur, Ffn};
use super::layers::{Context, MemoryValue, Times, Written};
use crate::architecture::Architecture;
use crate::ends::{Ends, Token};
use crate::error::Result;
use crate::net::{Loss, Net, Start};
use crate::phase::{Phase, Window};

fn hidden_state(layer: usize) -> String {
    format!("hidden.{layer}")
}

fn keys_state(layer: usize) -> String {
    format!("read_keys.{layer}")
}

fn projected_state(layer: usize) -> String {
    format!("projected.{layer}")
}

impl Architecture for Elmur {
    fn validate(&self) -> Result<()> {
        Elmur::validate(self)
    }

    fn ends(&self) -> Ends<'_> {
        Elmur::ends(self)
    }

    fn config_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|_| format!("{self:?}"))
    }

    fn window(&self) -> Window {
        Window::of(self.segment_length, self.memory.gradient.segments())
    }

    /// A segment: every layer attends, reads its memory, and writes it at the end.
    fn forward(&self, net: &mut Net<'_>) -> Result<Value> {
        let (tokens, d) = (self.segment_tokens(), self.d_model);
        let times = Times {
            tokens: net.token_times(tokens, self.compat.newest_first_times)?,
            newest: net.newest_time()?,
        };
        let encodings = if self.compat.absolute_offset {
            net.absolute_encodings(tokens, d)?
        } else {
            net.encodings(tokens, d)?
        };
        let mut memories: Vec<MemoryValue> = Vec::new();
        for i in 0..self.memories() {
            memories.push(self.memory_of(net, i)?);
        }
        let x = net.embed(self.tokens.tokens(), Act::Tanh)?;
        let mut x = net.dropout(x, self.dropout)?;
        for layer in 0..self.layers {
            let memory = &mut memories[if self.memory.shared { 0 } else { layer }];
            x = self.attend(net, layer, x, Context::Segment { encodings })?;
            if self.memory.read {
                let kv = self.read_keys(net, layer, memory.vectors)?;
                let (y, map) = self.read(net, layer, x, kv, memory.anchors, times.tokens)?;
                x = y;
                if let Some(map) = map {
                    net.tap_by_token(&format!("read.{layer}"), map)?;
                }
            }
            x = self.feed_forward(net, layer, "token", x)?;
            let written = self.write(net, layer, x, *memory, times)?;
            *memory = written.memory;
            self.tap_write(net, layer, &written)?;
        }
        for (i, memory) in memories.into_iter().enumerate() {
            self.keep_memory(net, i, memory)?;
        }
        net.at_observations(x)
    }

    fn loss(&self, net: &mut Net<'_>, _hidden: Value, outputs: Value) -> Result<Loss> {
        let mut loss = net.imitation(outputs)?;
        let routes = std::mem::take(&mut net.routes);
        if let Ffn::Moe { experts, balance, .. } = self.ffn
            && !routes.is_empty()
        {
            let sum = net.g.load_balancing_losses(&routes, experts)?;
            // A mean over segments, like the action loss.
            let segments = self.memory.gradient.segments() as f64;
            loss.auxiliary = Some(net.g.scale(sum, balance / segments)?);
        }
        Ok(loss)
    }

    fn steps_exactly(&self) -> bool {
        !self.compat.newest_first_times && !self.compat.absolute_offset && !self.memory.shared
    }

    fn step(&self, net: &mut Net<'_>, phase: Phase) -> Result<Option<Value>> {
        let (before, after) = self.tokens.tokens().split_at(self.tokens.observation_index() + 1);
        match phase {
            Phase::Begin => self.begin(net)?,
            Phase::Observe => {
                let x = self.tokens_of_step(net, before)?;
                let last = before.len();
                return Ok(Some(if last == 1 { x } else { net.g.slice(x, 1, last - 1..last)? }));
            }
            Phase::Act if after.is_empty() => {}
            Phase::Act => {
                self.tokens_of_step(net, after)?;
            }
            Phase::Close => self.close(net)?,
        }
        Ok(None)
    }
}

impl Elmur {
    /// Slots written, vectors after the write, and attention of the candidates to the tokens.
    fn tap_write(&self, net: &mut Net<'_>, layer: usize, written: &Written) -> Result<()> {
        net.tap(&format!("slots.{layer}"), written.slots)?;
        net.tap(&format!("memory.{layer}"), written.memory.vectors)?;
        match written.weights {
            Some(weights) => net.tap(&format!("write.{layer}"), weights),
            None => Ok(()),
        }
    }

    /// The memory's keys and values for reading, kept from one write to the next.
    fn kept_keys(&self, net: &mut Net<'_>, layer: usize) -> Result<Value> {
        net.carried(&keys_state(layer), &[self.memory.slots, 2 * self.d_model], Start::Zeros)
    }

    /// What follows from parameters (projected position encodings) and from the memory (its keys and values).
    fn begin(&self, net: &mut Net<'_>) -> Result<()> {
        let (tokens, d) = (self.segment_tokens(), self.d_model);
        let encodings = net.encodings(tokens, d)?;
        for layer in 0..self.layers {
            let r = self.project_encodings(net, layer, encodings)?;
            net.derive(&projected_state(layer), r)?;
            let memory = self.memory_of(net, layer)?;
            if self.memory.read {
                self.kept_keys(net, layer)?;
                let keys = self.read_keys(net, layer, memory.vectors)?;
                net.keep(&keys_state(layer), keys)?;
            }
        }
        Ok(())
    }

    /// Some tokens of one step through all layers.
    fn tokens_of_step(&self, net: &mut Net<'_>, tokens: &[Token]) -> Result<Value> {
        let (all, d) = (self.segment_tokens(), self.d_model);
        let mut x = net.embed(tokens, Act::Tanh)?;
        for layer in 0..self.layers {
            let projected = net.derived(&projected_state(layer), [all, d])?;
            x = self.attend(net, layer, x, Context::Cache { projected })?;
            if self.memory.read {
                let times = net.token_times(tokens.len(), false)?;
                let keys = self.kept_keys(net, layer)?;
                let anchors = self.memory_of(net, layer)?.anchors;
                let (y, map) = self.read(net, layer, x, keys, anchors, times)?;
                x = y;
                if let Some(map) = map {
                    net.tap_by_token(&format!("read.{layer}"), map)?;
                }
            }
            x = self.feed_forward(net, layer, "token", x)?;
            net.append(&hidden_state(layer), x)?;
        }
        Ok(x)
    }

    /// The write at the end of a segment.
    fn close(&self, net: &mut Net<'_>) -> Result<()> {
        let (all, d) = (self.segment_tokens(), self.d_model);
        let times = Times { tokens: net.token_times(all, false)?, newest: net.newest_time()? };
        for layer in 0..self.layers {
            let memory = self.memory_of(net, layer)?;
            let hidden = net.carried(&hidden_state(layer), &[all, d], Start::Zeros)?;
            let written = self.write(net, layer, hidden, memory, times)?;
            self.keep_memory(net, layer, written.memory)?;
            if self.memory.read {
                // Only the written slots have new keys.
                let keys = self.kept_keys(net, layer)?;
                let vectors = net.g.gather_slots(written.memory.vectors, written.slots)?;
                let new = self.read_keys(net, layer, vectors)?;
                let replace = Blend { lambda: 1.0, empty_slots_too: true, active: None };
                let (new_keys, _) =
                    net.g.lru_blend(keys, memory.anchors, written.slots, new, times.newest, replace)?;
                net.keep(&keys_state(layer), new_keys)?;
            }
            self.tap_write(net, layer, &written)?;
        }
        Ok(())
    }
}
