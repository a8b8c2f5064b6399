//! What several tests share: a small model, and random numbers.

use elmur_engine::rng::Stream;
use elmur_model::Elmur;
use elmur_model::elmur::config::*;
use elmur_model::ends::*;

/// A small ELMUR; tests change what they are about.
#[allow(dead_code)]
pub fn small() -> Elmur {
    Elmur {
        observation: vec![Encoder::Vector { dim: 3, bytes: false }],
        action: Action::Categorical { count: 5 },
        tokens: TokenFormat::Observation,
        d_model: 24,
        heads: 2,
        layers: 2,
        segment_length: 4,
        memory: MemoryConfig {
            slots: 3,
            lambda: 0.3,
            init: MemoryInit::Normal { std: 0.5 },
            gradient: MemoryGradient::Detached,
            slots_per_write: 1,
            candidates: Candidates::Selected,
            dropout: 0.1,
            max_distance: 12,
            read: true,
            write: true,
            relative_bias: true,
            replacement: Replacement::Lru,
            shared: false,
        },
        ffn: Ffn::Moe {
            experts: 3,
            routed_d_ff: 8,
            shared_experts: 1,
            shared_d_ff: 16,
            top_k: 3,
            balance: 0.1,
            dropout: 0.1,
        },
        norm: NormType::Layer,
        pre_norm: false,
        dropout: 0.1,
        attention_dropout: 0.1,
        compat: Compat::default(),
    }
}

/// Normal numbers of this seed.
#[allow(dead_code)]
pub fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut data = vec![0.0; n];
    Stream::new(seed, 9, 9).fill_normal(&mut data, 1.0);
    data.into_iter().map(|x| x as f32).collect()
}
