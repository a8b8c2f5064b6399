//! Golden cases of ELMUR itself.

use serde::Deserialize;

use super::{Begins, Case, Fresh, Optimizer, Part, StateTrace};
use crate::elmur::config::{
    Candidates, Compat, Elmur, Ffn, MemoryConfig, MemoryGradient, MemoryInit, NormType, Replacement,
};
use crate::elmur::{anchor_state, memory_state, published};
use crate::ends::{Action, Encoder, TokenFormat};
use crate::error::{Error, Result};

/// Constructor arguments of the published model, and the optimizer's.
#[derive(Debug, Deserialize)]
struct Arguments {
    batch: usize,
    segment_length: usize,
    segments: usize,
    state_dim: usize,
    act_dim: usize,
    d_model: usize,
    d_ff: usize,
    n_layer: usize,
    n_head: usize,
    max_seq_len: usize,
    pre_lnorm: bool,
    memory_size: usize,
    memory_init_std: f64,
    lru_blend_alpha: f64,
    norm_type: Option<String>,
    use_moe: bool,
    num_experts: usize,
    top_k: usize,
    load_balancing_loss_coef: f64,
    use_shared_expert: bool,
    n_shared_experts: usize,
    #[serde(default)]
    shared_d_ff: Option<usize>,
    #[serde(default)]
    routed_d_ff: Option<usize>,
    use_swiglu: bool,
    use_lru: bool,
    use_relative_bias: bool,
    /// In the published code this flag is the read.
    use_tok2mem: bool,
    /// And this one the write.
    use_mem2tok: bool,
    use_shared_memory: bool,
    sequence_format: String,
    optimizer: Optimizer,
}

impl Arguments {
    fn config(&self) -> Result<Elmur> {
        let unsupported =
            |what: &str| Error::input("golden case", "observation-only tokens, a memory per layer", what);
        if self.sequence_format != "s" {
            return Err(unsupported(&format!("sequence_format {}", self.sequence_format)));
        }
        if self.use_shared_memory {
            return Err(unsupported("use_shared_memory"));
        }
        let ffn = if self.use_moe {
            Ffn::Moe {
                experts: self.num_experts,
                routed_d_ff: self.routed_d_ff.filter(|n| *n > 0).unwrap_or(self.d_ff),
                // In the published code zero means the default here.
                shared_experts: if self.use_shared_expert { self.n_shared_experts.max(1) } else { 0 },
                shared_d_ff: self.shared_d_ff.filter(|n| *n > 0).unwrap_or(self.d_ff),
                top_k: self.top_k,
                balance: self.load_balancing_loss_coef,
                dropout: 0.0,
            }
        } else if self.use_swiglu {
            Ffn::SwiGlu { d_ff: self.d_ff }
        } else {
            Ffn::Gelu { d_ff: self.d_ff }
        };
        let rms = self.norm_type.as_deref().is_some_and(|n| n.starts_with("rms"));
        Ok(Elmur {
            observation: vec![Encoder::Vector { dim: self.state_dim, bytes: false }],
            action: Action::Categorical { count: self.act_dim },
            tokens: TokenFormat::Observation,
            d_model: self.d_model,
            heads: self.n_head,
            layers: self.n_layer,
            segment_length: self.segment_length,
            memory: MemoryConfig {
                slots: self.memory_size,
                lambda: self.lru_blend_alpha,
                init: MemoryInit::Normal { std: self.memory_init_std },
                gradient: MemoryGradient::Detached,
                slots_per_write: 1,
                candidates: Candidates::All,
                dropout: 0.0,
                max_distance: self.max_seq_len,
                read: self.use_tok2mem,
                write: self.use_mem2tok,
                relative_bias: self.use_relative_bias,
                replacement: if self.use_lru { Replacement::Lru } else { Replacement::All },
                shared: false,
            },
            ffn,
            norm: if rms { NormType::Rms } else { NormType::Layer },
            pre_norm: self.pre_lnorm,
            dropout: 0.0,
            attention_dropout: 0.0,
            compat: Compat { empty_slot_blend: true, newest_first_times: true, absolute_offset: true },
        })
    }
}

/// The case that a json describes.
pub(super) fn case(json: &str) -> Result<Case> {
    let arguments: Arguments = serde_json::from_str(json)
        .map_err(|e| Error::input("golden case", "arguments of the published model", e.to_string()))?;
    let config = arguments.config()?;
    config.validate()?;
    let state = |layer: usize, is_time: bool| StateTrace {
        own: if is_time { anchor_state(layer) } else { memory_state(layer) },
        name: if is_time { "anchors" } else { "memory" },
        part: Part::OfLayer(layer),
        begins: if is_time { Begins::Never } else { Begins::Traced },
    };
    Ok(Case {
        pieces: published::pieces(&config),
        batch: arguments.batch,
        windows: arguments.segments,
        optimizer: arguments.optimizer,
        outputs: vec![("logits", None, "eval/logits")],
        fresh: Fresh::None,
        acted: Vec::new(),
        targets: false,
        states: (0..config.layers).flat_map(|i| [state(i, false), state(i, true)]).collect(),
        gradient_window: 2,
        gradients: "grad/",
        losses: vec![("action_loss", "grad_case/cross_entropy", 0), ("aux_loss", "grad_case/aux_loss", 0)],
        through: None,
        divides_by_more: false,
        spare: Box::new({
            let config = config.clone();
            move |name| published::is_spare(&config, name)
        }),
        config: config.into(),
    })
}
