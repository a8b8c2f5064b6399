//! Settings of an ELMUR model that the types leave open, checked one by one.

use super::config::{Elmur, Ffn, MemoryGradient, MemoryInit, Replacement};
use crate::ends::Token;
use crate::error::{Error, Result};

impl Elmur {
    /// Checks everything that the types leave open.
    pub fn validate(&self) -> Result<()> {
        let check = |ok: bool, key: &str, expected: &str, got: String| {
            if ok {
                Ok(())
            } else {
                Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), got })
            }
        };
        let m = &self.memory;
        let size = |n: usize| (1..=1 << 20).contains(&n);
        check(size(self.d_model), "d_model", "1 to 1048576", self.d_model.to_string())?;
        check(self.d_model.is_multiple_of(2), "d_model", "an even width", self.d_model.to_string())?;
        let divides = self.heads > 0 && self.d_model.is_multiple_of(self.heads);
        check(divides, "heads", &format!("a divisor of d_model = {}", self.d_model), self.heads.to_string())?;
        check((1..=1024).contains(&self.layers), "layers", "1 to 1024", self.layers.to_string())?;
        check(size(self.segment_length), "segment_length", "1 to 1048576", self.segment_length.to_string())?;
        let window = self.segment_tokens().saturating_mul(self.d_model);
        let tokens = self.segment_tokens().to_string();
        check(window <= 1 << 26, "segment_length", "at most 67108864 / d_model tokens per segment", tokens)?;
        check(size(m.slots), "memory.slots", "1 to 1048576", m.slots.to_string())?;
        check((0.0..=1.0).contains(&m.lambda), "memory.lambda", "0 to 1", m.lambda.to_string())?;
        let writes = (1..=m.slots).contains(&m.slots_per_write);
        check(writes, "memory.slots_per_write", "1 to memory.slots", m.slots_per_write.to_string())?;
        let effect = m.replacement == Replacement::Lru || m.slots_per_write == 1;
        let expected = "1 with memory.replacement = all, which writes every slot";
        check(effect, "memory.slots_per_write", expected, m.slots_per_write.to_string())?;
        check(size(m.max_distance), "memory.max_distance", "1 to 1048576", m.max_distance.to_string())?;
        let has_actions = self.tokens.has(Token::Action);
        check(!(m.shared && has_actions), "memory.shared", "false with action tokens", "true".to_owned())?;
        let total = m.slots.saturating_mul(self.d_model).saturating_mul(self.layers);
        check(
            total <= 1 << 28,
            "memory.slots",
            "at most 268435456 numbers in all layers",
            m.slots.to_string(),
        )?;
        if let MemoryInit::Normal { std } = m.init {
            check(std >= 0.0 && std.is_finite(), "memory.init.normal.std", "0 or more", std.to_string())?;
        }
        if let MemoryGradient::Through(k) = m.gradient {
            check((1..=4096).contains(&k), "memory.gradient", "through 1 to 4096 segments", k.to_string())?;
        }
        for (key, p) in [
            ("dropout", self.dropout),
            ("attention_dropout", self.attention_dropout),
            ("memory.dropout", m.dropout),
        ] {
            check((0.0..1.0).contains(&p), key, "0 or more and below 1", p.to_string())?;
        }
        match &self.ffn {
            Ffn::Moe { experts, routed_d_ff, shared_experts, shared_d_ff, top_k, balance, dropout } => {
                check((1..=65536).contains(experts), "ffn.moe.experts", "1 to 65536", experts.to_string())?;
                check(size(*routed_d_ff), "ffn.moe.routed_d_ff", "1 to 1048576", routed_d_ff.to_string())?;
                check(
                    *shared_experts <= 4096,
                    "ffn.moe.shared_experts",
                    "at most 4096",
                    shared_experts.to_string(),
                )?;
                let width = *shared_experts == 0 || size(*shared_d_ff);
                check(width, "ffn.moe.shared_d_ff", "1 to 1048576", shared_d_ff.to_string())?;
                let routed = top_k.saturating_sub(*shared_experts).max(1);
                check(
                    routed <= *experts,
                    "ffn.moe.top_k",
                    "at most experts + shared_experts",
                    top_k.to_string(),
                )?;
                check(
                    *balance >= 0.0 && balance.is_finite(),
                    "ffn.moe.balance",
                    "0 or more",
                    balance.to_string(),
                )?;
                check(
                    (0.0..1.0).contains(dropout),
                    "ffn.moe.dropout",
                    "0 or more and below 1",
                    dropout.to_string(),
                )?;
            }
            Ffn::SwiGlu { d_ff } => {
                check(size(*d_ff), "ffn.swi_glu.d_ff", "1 to 1048576", d_ff.to_string())?;
            }
            Ffn::Gelu { d_ff } => {
                check(size(*d_ff), "ffn.gelu.d_ff", "1 to 1048576", d_ff.to_string())?;
            }
        }
        self.ends().validate()?;
        self.sizes().map(|_| ())
    }
}
