//! Policies by name: every column of the paper's hyper-parameter table, a small one for first steps, and
//! baselines. How each is trained is part of a run's preset (crate `elmur-train`).

use crate::baselines::{
    BcLstm, BcMlp, Cql, CqlContinuous, CqlObjective, DMamba, DMambaCompat, Denoiser, Diffusion,
    DiffusionCompat, DiffusionSampler, LstmCompat, TransformerXl, TransformerXlCompat, Tt, TtPlan,
    ValveActivation,
};
use crate::elmur::config::{
    Candidates, Compat, Elmur, Ffn, MemoryConfig, MemoryGradient, MemoryInit, NormType, Replacement,
};
use crate::ends::{Action, Encoder, TokenFormat};
use crate::policy::PolicyConfig;

/// All policies that have a name.
pub fn all() -> Vec<(&'static str, PolicyConfig)> {
    let (observation, action) = tmaze_ends();
    vec![
        ("tmaze", tmaze().into()),
        ("tmaze-quick", tmaze_quick().into()),
        ("remember-color", remember_color().into()),
        ("take-it-back", take_it_back().into()),
        ("mikasa", mikasa(60).into()),
        ("popgym-autoencode-easy", autoencode_easy().into()),
        ("cartpole", cartpole().into()),
        ("tmaze-bc-lstm", PolicyConfig::BcLstm(bc_lstm(observation.clone(), action.clone(), 30))),
        ("tmaze-dt", PolicyConfig::TransformerXl(dt(observation.clone(), action.clone(), 30))),
        ("tmaze-trxl", PolicyConfig::TransformerXl(trxl(observation.clone(), action.clone(), 10))),
        ("tmaze-rmt", PolicyConfig::TransformerXl(rmt(observation.clone(), action.clone(), 10))),
        ("tmaze-rate", PolicyConfig::TransformerXl(rate(observation, action, 10))),
    ]
}

/// The policy of this name.
pub fn model(name: &str) -> Option<PolicyConfig> {
    all().into_iter().find(|(known, _)| *known == name).map(|(_, policy)| policy)
}

fn memory(slots: usize, std: f64, lambda: f64, dropout: f64) -> MemoryConfig {
    MemoryConfig {
        slots,
        lambda,
        init: MemoryInit::Normal { std },
        gradient: MemoryGradient::Detached,
        slots_per_write: 1,
        candidates: Candidates::Selected,
        dropout,
        max_distance: 1024,
        read: true,
        write: true,
        relative_bias: true,
        replacement: Replacement::Lru,
        shared: false,
    }
}

/// T-Maze as in the paper: 2 layers, 2 slots, segments of 10.
pub fn tmaze() -> Elmur {
    Elmur {
        observation: vec![Encoder::Vector { dim: 4, bytes: false }],
        action: Action::Categorical { count: 4 },
        tokens: TokenFormat::Observation,
        d_model: 128,
        heads: 2,
        layers: 2,
        segment_length: 10,
        memory: memory(2, 0.001, 0.05, 0.01),
        ffn: Ffn::Moe {
            experts: 2,
            routed_d_ff: 32,
            shared_experts: 2,
            shared_d_ff: 512,
            top_k: 3,
            balance: 0.1,
            dropout: 0.10,
        },
        norm: NormType::Layer,
        pre_norm: false,
        dropout: 0.10,
        attention_dropout: 0.17,
        compat: Compat::default(),
    }
}

/// A small model for T-Maze.
fn tmaze_quick() -> Elmur {
    Elmur { d_model: 32, ffn: Ffn::SwiGlu { d_ff: 64 }, ..tmaze() }
}

/// MIKASA-Robo RememberColor as in the paper: 256 slots, 16 experts, two cameras.
pub fn remember_color() -> Elmur {
    Elmur {
        observation: vec![Encoder::Image { channels: 6, height: 128, width: 128, bytes: false }],
        action: Action::Continuous { dim: 8, tanh: true },
        tokens: TokenFormat::Observation,
        d_model: 128,
        heads: 16,
        layers: 4,
        segment_length: 20,
        memory: memory(256, 0.1, 0.40, 0.06),
        ffn: Ffn::Moe {
            experts: 16,
            routed_d_ff: 128,
            shared_experts: 1,
            shared_d_ff: 128,
            top_k: 2,
            balance: 0.1,
            dropout: 0.13,
        },
        norm: NormType::Layer,
        pre_norm: false,
        dropout: 0.13,
        attention_dropout: 0.30,
        compat: Compat::default(),
    }
}

/// MIKASA-Robo TakeItBack as in the paper: 32 slots, segments of 60.
pub fn take_it_back() -> Elmur {
    let mut model = remember_color();
    (model.d_model, model.heads, model.layers, model.segment_length) = (32, 16, 2, 60);
    model.memory = memory(32, 0.001, 0.20, 0.23);
    model.ffn = Ffn::Moe {
        experts: 1,
        routed_d_ff: 256,
        shared_experts: 1,
        shared_d_ff: 32,
        top_k: 1,
        balance: 0.05,
        dropout: 0.01,
    };
    (model.dropout, model.attention_dropout) = (0.01, 0.18);
    model
}

/// POPGym AutoencodeEasy as in the paper: 12 layers, 8 slots, RMSNorm.
fn autoencode_easy() -> Elmur {
    let mut model = tmaze();
    model.observation = vec![Encoder::Vector { dim: 2, bytes: false }];
    (model.d_model, model.heads, model.layers, model.segment_length) = (64, 4, 12, 35);
    model.memory = memory(8, 0.0, 0.80, 0.17);
    model.ffn = Ffn::Moe {
        experts: 1,
        routed_d_ff: 128,
        shared_experts: 2,
        shared_d_ff: 256,
        top_k: 1,
        balance: 0.1,
        dropout: 0.14,
    };
    model.norm = NormType::Rms;
    (model.dropout, model.attention_dropout) = (0.14, 0.26);
    model
}

/// The paper's POPGym model for other observations, actions and segments; `autoencode-easy` is the only one
/// whose settings were published.
pub fn popgym_paper(observation: Vec<Encoder>, action: Action, segment_length: usize) -> Elmur {
    Elmur { observation, action, segment_length, ..autoencode_easy() }
}

/// Our model for puzzles of about `steps` steps such as POPGym's, small enough for two cores. Short ones are
/// cut into three segments as the paper does, long ones into segments of at most 70 steps, and gradients flow
/// through all of them: the paper's cut leaves the write untrained, and recall needs it. Slots begin with
/// vectors of their own, so that several can be written at once with different things; there are enough of
/// them for every segment.
pub fn popgym_small(observation: Vec<Encoder>, action: Action, steps: usize) -> Elmur {
    let segments = if steps <= 210 { 3 } else { steps.div_ceil(70) };
    Elmur {
        observation,
        action,
        tokens: TokenFormat::Observation,
        d_model: 64,
        heads: 4,
        layers: 2,
        segment_length: steps.div_ceil(segments).max(1),
        memory: MemoryConfig {
            init: MemoryInit::Learned,
            gradient: MemoryGradient::Through(segments),
            slots_per_write: (32 / segments).clamp(1, 8),
            ..memory(32, 0.0, 0.5, 0.0)
        },
        ffn: Ffn::SwiGlu { d_ff: 128 },
        norm: NormType::Layer,
        pre_norm: true,
        dropout: 0.0,
        attention_dropout: 0.0,
        compat: Compat::default(),
    }
}

/// Our model for MIKASA-Robo's episodes of `steps` steps: [`popgym_small`] of twice the width, whose eyes keep places
/// apart. A cube is a few pixels large, and which of several it is decides everything.
pub fn mikasa(steps: usize) -> Elmur {
    let cameras = Encoder::ResidualImage {
        channels: 6,
        height: 64,
        width: 64,
        bytes: true,
        cameras: 2,
        widths: vec![32, 64, 64],
        strides: Vec::new(),
        queries: 0,
        grid: 16,
        keypoints: 0,
    };
    Elmur {
        d_model: 128,
        ffn: Ffn::SwiGlu { d_ff: 256 },
        ..popgym_small(vec![cameras], Action::Continuous { dim: 8, tanh: true }, steps)
    }
}

/// BC-LSTM with the published sizes for these ends and windows of `steps` steps.
pub fn bc_lstm(observation: Vec<Encoder>, action: Action, steps: usize) -> BcLstm {
    BcLstm {
        observation,
        action,
        d_model: 64,
        hidden: 128,
        layers: 1,
        window: steps,
        dropout: 0.0,
        unroll: 1,
        compat: LstmCompat::default(),
    }
}

/// BC-MLP with the published sizes for these ends and crops of `steps` steps.
pub fn bc_mlp(observation: Vec<Encoder>, action: Action, steps: usize) -> BcMlp {
    BcMlp { observation, action, d_model: 64, hidden: vec![128, 128], window: steps, dropout: 0.2 }
}

/// Conservative Q-learning with a Bellman term for these ends and crops of `steps` steps: the published sizes
/// (two networks of 256, 256 hidden units), on the current observation alone.
pub fn cql(observation: Vec<Encoder>, action: Action, steps: usize) -> Cql {
    Cql {
        observation,
        action,
        d_model: 64,
        lstm: None,
        lstm_layers: 1,
        hidden: vec![256, 256],
        window: steps,
        dropout: 0.0,
        objective: CqlObjective::Td,
        alpha: 1.0,
        gamma: 0.99,
        tau: 0.005,
        compat: LstmCompat::default(),
    }
}

/// [`cql`] on an LSTM of width 256 over the observations so far.
pub fn cql_lstm(observation: Vec<Encoder>, action: Action, steps: usize) -> Cql {
    Cql { lstm: Some(256), hidden: vec![256], ..cql(observation, action, steps) }
}

/// Decision Mamba with the published T-Maze sizes for these ends and windows of `steps` steps.
pub fn dmamba(observation: Vec<Encoder>, action: Action, steps: usize) -> DMamba {
    DMamba {
        observation,
        action,
        d_model: 64,
        layers: 2,
        window: steps,
        dropout: 0.2,
        unroll: 1,
        state: 16,
        conv: 4,
        expand: 2,
        action_tanh: true,
        compat: DMambaCompat::default(),
    }
}

/// Conservative Q-learning for continuous actions with the sizes of the CQL paper for these ends, on crops of
/// `steps` steps: three hidden layers of 256, a penalty of weight 5, 40,000 steps of imitation at first.
pub fn cql_continuous(observation: Vec<Encoder>, action: Action, steps: usize) -> CqlContinuous {
    CqlContinuous {
        observation,
        action,
        d_model: 64,
        hidden: vec![256; 3],
        window: steps,
        gamma: 0.99,
        tau: 0.005,
        alpha: 5.0,
        lagrange: None,
        candidates: 10,
        imitation_steps: 40_000,
        policy_lr: 1.0 / 3.0,
    }
}

/// Decision Transformer with the published T-Maze sizes for these ends and a context of `steps` steps.
pub fn dt(observation: Vec<Encoder>, action: Action, steps: usize) -> TransformerXl {
    TransformerXl {
        observation,
        action,
        d_model: 64,
        heads: 8,
        d_head: 32,
        d_ff: Some(64),
        layers: 8,
        window: steps,
        memory_tokens: 0,
        cache_tokens: 0,
        valve_heads: 0,
        valve_activation: ValveActivation::Relu,
        dropout: 0.2,
        attention_dropout: 0.1,
        action_tanh: true,
        unroll: 1,
        slides: true,
        compat: TransformerXlCompat::default(),
    }
}

/// Transformer-XL with the published T-Maze sizes for these ends, segments of `steps` steps and a cache of three
/// of them.
pub fn trxl(observation: Vec<Encoder>, action: Action, steps: usize) -> TransformerXl {
    TransformerXl { cache_tokens: 9 * steps, slides: false, ..dt(observation, action, steps) }
}

/// Recurrent Memory Transformer with the published T-Maze sizes for these ends and segments of `steps` steps.
pub fn rmt(observation: Vec<Encoder>, action: Action, steps: usize) -> TransformerXl {
    TransformerXl { memory_tokens: 10, slides: false, ..dt(observation, action, steps) }
}

/// RATE with the published T-Maze sizes for these ends and segments of `steps` steps.
pub fn rate(observation: Vec<Encoder>, action: Action, steps: usize) -> TransformerXl {
    TransformerXl {
        heads: 4,
        d_ff: None,
        layers: 10,
        memory_tokens: 15,
        valve_heads: 2,
        attention_dropout: 0.0,
        slides: false,
        ..dt(observation, action, steps)
    }
}

/// Diffusion Policy with the published sizes for these ends: chunks of 16 actions from two observations, of
/// which 8 are played, and a U-Net of widths 64, 128, 256. It samples in 10 steps of the 100 that it learns.
pub fn diffusion(observation: Vec<Encoder>, action: Action) -> Diffusion {
    Diffusion {
        observation,
        action,
        d_model: 64,
        obs_horizon: 2,
        pred_horizon: 16,
        act_horizon: 8,
        diffusion_steps: 100,
        step_embed: 64,
        denoiser: Denoiser::Unet { widths: vec![64, 128, 256], kernel: 5, groups: 8 },
        sampler: DiffusionSampler::Ddim(10),
        compat: DiffusionCompat::default(),
    }
}

/// [`diffusion`] with a perceptron of three hidden layers of width 256: for actions of few numbers, and CPUs.
pub fn diffusion_mlp(observation: Vec<Encoder>, action: Action) -> Diffusion {
    Diffusion { denoiser: Denoiser::Mlp { hidden: vec![256; 3] }, ..diffusion(observation, action) }
}

/// Trajectory Transformer with the sizes and the search of the TT paper for these ends: sequences of 10
/// transitions, 100 bins, a beam of 128 over 15 steps. Rewards are as they were paid.
pub fn tt(observation: Vec<Encoder>, action: Action) -> Tt {
    Tt {
        observation,
        action,
        d_model: 128,
        heads: 4,
        layers: 4,
        window: 10,
        bins: 100,
        dropout: 0.1,
        discount: 0.99,
        terminal_reward: None,
        action_weight: 5.0,
        reward_weight: 1.0,
        value_weight: 1.0,
        plan: TtPlan { context: 5, beam: 128, expansion: 2, horizon: 15, action_cdf: 0.6 },
    }
}

/// Encoders and action of T-Maze.
fn tmaze_ends() -> (Vec<Encoder>, Action) {
    let Elmur { observation, action, .. } = tmaze();
    (observation, action)
}

/// CartPole-v1 as in the paper's table: 4 layers, 16 slots, pre-norm.
pub fn cartpole() -> Elmur {
    let mut model = tmaze();
    model.action = Action::Categorical { count: 2 };
    (model.heads, model.layers, model.segment_length) = (4, 4, 30);
    model.memory = memory(16, 0.01, 0.9, 0.05);
    model.ffn = Ffn::Moe {
        experts: 4,
        routed_d_ff: 128,
        shared_experts: 1,
        shared_d_ff: 256,
        top_k: 2,
        balance: 0.1,
        dropout: 0.10,
    };
    model.pre_norm = true;
    (model.dropout, model.attention_dropout) = (0.10, 0.10);
    model
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_is_valid_and_found_by_name() {
        for (name, policy) in all() {
            policy.architecture().validate().unwrap();
            assert_eq!(model(name).unwrap(), policy);
            let json = serde_json::to_string(&policy).unwrap();
            assert_eq!(serde_json::from_str::<PolicyConfig>(&json).unwrap(), policy);
        }
        assert!(model("tmase").is_none());
    }

    #[test]
    fn puzzles_cover_their_steps_and_their_slots_every_segment() {
        for steps in [1, 14, 51, 103, 210, 211, 415, 831, 1023] {
            let action = Action::Categorical { count: 4 };
            let model = popgym_small(vec![Encoder::Vector { dim: 2, bytes: false }], action, steps);
            model.validate().unwrap();
            let segments = model.memory.gradient.segments();
            assert!(model.segment_length * segments >= steps);
            assert!(model.segment_length * (segments - 1) < steps || steps < 3);
            assert!(model.memory.slots_per_write * segments <= model.memory.slots);
        }
    }
}
