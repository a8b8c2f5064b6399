//! How large an ELMUR model is, found out from its settings.

use super::config::{Elmur, Ffn, MemoryInit, NormType};
use crate::error::Result;
use crate::sizes::{Sizes, check_depth};

impl Elmur {
    /// The parameters, added up; an error for models that are too large to build.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        let (m, d, layers) = (&self.memory, self.d_model, self.layers);
        let (heads, tokens) = (self.heads, self.segment_tokens());
        check_depth("memory.gradient", m.gradient.segments(), layers)?;
        let mut sizes = Sizes::default();
        let s = &mut sizes;
        self.ends().add_sizes(s, d, self.segment_length)?;
        s.value("segment_length", &[heads, tokens, tokens])?;
        s.value("segment_length", &[tokens, 3, d])?;
        s.value("memory.slots", &[heads, tokens, m.slots])?;
        s.param("d_model", 2, &[d])?;
        s.param("d_model", layers, &[3, d, d])?;
        s.param("d_model", 2 * layers, &[d, d])?;
        self.add_norms(s, 2)?;
        self.add_ffn(s)?;
        if m.relative_bias && (m.read || m.write) {
            let reach = m.max_distance.saturating_mul(2).saturating_sub(1);
            s.param("memory.max_distance", layers, &[reach, heads])?;
        }
        for used in [m.read, m.write] {
            if used {
                // Queries, keys with values, outputs with a bias.
                s.param("d_model", layers, &[4, d, d])?;
                s.param("d_model", layers, &[d])?;
                self.add_norms(s, 1)?;
            }
        }
        if m.write {
            self.add_ffn(s)?;
            self.add_norms(s, 1)?;
        }
        if m.init == MemoryInit::Learned {
            s.param("memory.slots", self.memories(), &[m.slots, d])?;
        }
        Ok(sizes)
    }

    /// `count` normalisations per layer.
    fn add_norms(&self, sizes: &mut Sizes, count: usize) -> Result<()> {
        let each = if self.norm == NormType::Layer { 2 } else { 1 };
        sizes.param("d_model", self.layers * count * each, &[self.d_model])
    }

    /// One feed-forward network per layer.
    fn add_ffn(&self, sizes: &mut Sizes) -> Result<()> {
        let (d, layers, tokens) = (self.d_model, self.layers, self.segment_tokens());
        match &self.ffn {
            Ffn::Gelu { d_ff } => {
                sizes.value("ffn.gelu.d_ff", &[tokens, *d_ff])?;
                sizes.param("ffn.gelu.d_ff", 2 * layers, &[*d_ff, d])?;
                sizes.param("ffn.gelu.d_ff", layers, &[*d_ff])?;
                sizes.param("d_model", layers, &[d])
            }
            Ffn::SwiGlu { d_ff } => {
                sizes.value("ffn.swi_glu.d_ff", &[tokens, 2, *d_ff])?;
                sizes.param("ffn.swi_glu.d_ff", layers, &[2, *d_ff, d])?;
                sizes.param("ffn.swi_glu.d_ff", layers, &[*d_ff, d])
            }
            Ffn::Moe { experts, routed_d_ff, shared_experts, shared_d_ff, .. } => {
                let (routed, shared) = ("ffn.moe.routed_d_ff", "ffn.moe.shared_d_ff");
                sizes.value("ffn.moe.experts", &[tokens, *experts])?;
                sizes.param("ffn.moe.experts", layers, &[*experts, d])?;
                sizes.param(routed, layers, &[*experts, 2, *routed_d_ff, d])?;
                sizes.param(routed, layers, &[*experts, *routed_d_ff, d])?;
                sizes.value(shared, &[tokens, 2, *shared_experts, *shared_d_ff])?;
                sizes.param(shared, layers, &[2, *shared_experts, *shared_d_ff, d])?;
                sizes.param(shared, layers, &[*shared_experts, *shared_d_ff, d])
            }
        }
    }
}
