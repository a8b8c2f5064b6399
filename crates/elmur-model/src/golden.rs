//! Golden files: traces of the published code in float64, replayed by ours.
//!
//! A case is `<name>.safetensors` with `<name>.json` beside it. [`verify`] runs evaluation, one gradient case and the
//! optimizer's trajectory, and reports the largest relative error of each.

use std::path::Path;

use elmur_engine::{AdamW, DType, Device, Graph, Program, Store};
use serde::Deserialize;

use crate::config::{
    Action, Candidates, Compat, Ffn, Memory, MemoryGradient, MemoryInit, ModelConfig, NormType, Observation,
    TokenFormat,
};
use crate::error::{Error, Result};
use crate::published::{Piece, convert, pieces};
use crate::segments::{
    SegmentClock, Start, TrainSettings, anchor_state, evaluation_graph, memory_state, training_graph,
};
use crate::tensors::{self, Numbers, Tensors};

/// Largest relative errors of one case. Relative to the largest element of the tensor compared.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Logits of all segments.
    pub logits: f64,
    /// Memory vectors after all segments.
    pub memory: f64,
    /// Number of anchors that differ.
    pub wrong_anchors: usize,
    /// Cross-entropy and load-balancing loss.
    pub loss: f64,
    /// Gradients, with the name of the worst.
    pub gradients: (f64, String),
    /// Losses and gradient norms during training.
    pub trajectory: f64,
    /// Parameters after training, with the name of the worst.
    pub trained: (f64, String),
}

impl Report {
    /// Whether every error is within `tolerance`; the optimizer's trajectory counts in f64 only.
    pub fn within(&self, tolerance: f64, dtype: DType) -> bool {
        let forward = [self.logits, self.memory, self.loss, self.gradients.0];
        let trained = [self.trajectory, self.trained.0];
        let all = |errors: &[f64]| errors.iter().all(|e| *e <= tolerance);
        self.wrong_anchors == 0 && all(&forward) && (dtype != DType::F64 || all(&trained))
    }
}

/// The json beside a golden file: constructor arguments of the published model, and the optimizer's.
#[derive(Debug, Deserialize)]
struct Case {
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

#[derive(Debug, Deserialize)]
struct Optimizer {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    clip: f64,
    label_smoothing: f64,
}

impl Case {
    fn config(&self) -> Result<ModelConfig> {
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
        Ok(ModelConfig {
            observation: Observation::Vector { dim: self.state_dim },
            action: Action::Categorical { count: self.act_dim },
            tokens: TokenFormat::Observation,
            d_model: self.d_model,
            heads: self.n_head,
            layers: self.n_layer,
            segment_length: self.segment_length,
            memory: Memory {
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
                lru: self.use_lru,
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

/// Replays the golden file at `path` on a device, in the given float type.
pub fn verify(path: &Path, dtype: DType, device: impl Into<Device>) -> Result<Report> {
    let device = device.into();
    let json = path.with_extension("json");
    let text = std::fs::read_to_string(&json).map_err(|e| Error::io(&json, e))?;
    let case: Case = serde_json::from_str(&text).map_err(|e| Error::file(&json, e.to_string()))?;
    if case.segments < 3 || case.batch == 0 {
        return Err(Error::file(&json, "expected at least 3 segments and a batch of at least 1"));
    }
    let file = tensors::read(&path.with_extension("safetensors"))?;
    let config = case.config()?;
    let replay = Replay { config: &config, case: &case, file: &file, dtype, device: &device };
    let mut report = Report::default();
    replay.evaluation(&mut report)?;
    replay.gradients(&mut report)?;
    replay.trajectory(&mut report)?;
    Ok(report)
}

struct Replay<'a> {
    config: &'a ModelConfig,
    case: &'a Case,
    file: &'a Tensors,
    dtype: DType,
    device: &'a Device,
}

/// |got - want| over the largest |want|; the larger of the two stays in `worst`.
fn compare(worst: &mut f64, got: &[f64], want: &[f64]) -> Result<f64> {
    if got.len() != want.len() {
        return Err(Error::input("golden tensor", format!("{} elements", got.len()), want.len().to_string()));
    }
    let scale = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let difference = got.iter().zip(want).fold(0.0f64, |m, (g, w)| {
        let d = (g - w).abs();
        if d.is_nan() { f64::INFINITY } else { m.max(d) }
    });
    let error = if difference == 0.0 { 0.0 } else { difference / scale.max(f64::MIN_POSITIVE) };
    *worst = worst.max(error);
    Ok(error)
}

impl Replay<'_> {
    fn golden(&self, name: &str) -> Result<Vec<f64>> {
        let tensor = self.file.get(name);
        let missing = || Error::input("golden file", format!("a tensor `{name}`"), "none");
        Ok(tensor.ok_or_else(missing)?.to_f64())
    }

    fn set(&self, store: &Store, name: &str, data: &[f64]) -> Result<()> {
        match self.dtype {
            DType::F64 => store.set(name, data)?,
            _ => store.set(name, &narrow(data))?,
        }
        Ok(())
    }

    fn get(&self, store: &Store, name: &str) -> Result<Vec<f64>> {
        Ok(match self.dtype {
            DType::F64 => store.get::<f64>(name)?,
            _ => widen(&store.get::<f32>(name)?),
        })
    }

    fn output(&self, program: &Program, name: &str) -> Result<Vec<f64>> {
        Ok(match self.dtype {
            DType::F64 => program.get::<f64>(name)?.to_vec(),
            _ => widen(program.get::<f32>(name)?),
        })
    }

    /// A store with the golden parameters and initial memory, and zeros for the graphs' other states.
    fn store(&self, graphs: &[&Graph]) -> Result<Store> {
        let store = Store::on(self.device);
        for graph in graphs {
            store.declare(graph)?;
        }
        for (name, data) in convert(self.config, self.file, "param/")? {
            // Parameters that no graph here uses (the last layer's writes, say) are not in the store.
            if store.ty(&name).is_ok() {
                self.set(&store, &name, &data)?;
            }
        }
        for i in 0..self.config.layers {
            self.set(&store, &memory_state(i), &self.golden(&format!("init/memory.{i}"))?)?;
            let empty = vec![-1i64; self.case.batch * self.config.memory.slots];
            store.set(&anchor_state(i), &empty)?;
        }
        Ok(store)
    }

    fn feed(&self, program: &mut Program, segment: usize, training: bool) -> Result<()> {
        let observations = self.golden("input/observations")?;
        let len = observations.len() / self.case.segments;
        let part = &observations[segment * len..(segment + 1) * len];
        match self.dtype {
            DType::F64 => program.set("observation", part)?,
            _ => program.set("observation", &narrow(part))?,
        }
        if training {
            let actions = self.golden("input/actions")?;
            let len = actions.len() / self.case.segments;
            let part: Vec<i64> =
                actions[segment * len..(segment + 1) * len].iter().map(|x| *x as i64).collect();
            program.set("targets", &part)?;
            match self.dtype {
                DType::F64 => program.set("lr", &[self.case.optimizer.lr])?,
                _ => program.set("lr", &[self.case.optimizer.lr as f32])?,
            }
        }
        SegmentClock::set(self.config, program, segment as u64)
    }

    fn training(&self) -> Result<Graph> {
        let optimizer = &self.case.optimizer;
        let settings = TrainSettings {
            batch: self.case.batch,
            label_smoothing: optimizer.label_smoothing,
            optimizer: AdamW {
                betas: optimizer.betas,
                eps: optimizer.eps,
                weight_decay: optimizer.weight_decay,
                lr_scale: 1.0,
            },
            clip: optimizer.clip,
            dtype: self.dtype,
            export_gradients: true,
            table: None,
        };
        training_graph(self.config, &settings, Start::Continue)
    }

    fn evaluation(&self, report: &mut Report) -> Result<()> {
        let graph = evaluation_graph(self.config, self.case.batch, self.dtype)?;
        let store = self.store(&[&graph])?;
        let mut program = Program::new(&graph, self.device, &[&store])?;
        for segment in 0..self.case.segments {
            self.feed(&mut program, segment, false)?;
            program.run()?;
            let logits = self.output(&program, "logits")?;
            compare(&mut report.logits, &logits, &self.golden(&format!("eval/logits.{segment}"))?)?;
            for i in 0..self.config.layers {
                let memory = self.get(&store, &memory_state(i))?;
                compare(&mut report.memory, &memory, &self.golden(&format!("eval/memory.{segment}.{i}"))?)?;
                let name = format!("eval/anchors.{segment}.{i}");
                let Some(Numbers::I64(want)) = self.file.get(&name).map(|t| &t.numbers) else {
                    return Err(Error::input("golden file", format!("an integer tensor `{name}`"), "none"));
                };
                let got = store.get::<i64>(&anchor_state(i))?;
                report.wrong_anchors += got.iter().zip(want).filter(|(g, w)| g != w).count();
            }
        }
        Ok(())
    }

    /// Segments 0 and 1 forward, then loss and gradients on segment 2.
    fn gradients(&self, report: &mut Report) -> Result<()> {
        let (evaluation, training) =
            (evaluation_graph(self.config, self.case.batch, self.dtype)?, self.training()?);
        let store = self.store(&[&evaluation, &training])?;
        let mut forward = Program::new(&evaluation, self.device, &[&store])?;
        let mut train = Program::new(&training, self.device, &[&store])?;
        for segment in 0..2 {
            self.feed(&mut forward, segment, false)?;
            forward.run()?;
        }
        self.feed(&mut train, 2, true)?;
        train.run()?;
        for (output, golden) in [("action_loss", "cross_entropy"), ("aux_loss", "aux_loss")] {
            let got = self.output(&train, output)?;
            let want = self.golden(&format!("grad_case/{golden}"))?;
            if want.len() != 1 {
                let expected = format!("one number in `grad_case/{golden}`");
                return Err(Error::input("golden file", expected, want.len().to_string()));
            }
            // A loss that is absent is compared with zero absolutely.
            if want[0] == 0.0 {
                report.loss = report.loss.max(got[0].abs());
            } else {
                compare(&mut report.loss, &got, &want)?;
            }
        }
        for piece in pieces(self.config) {
            let Some(want) = self.listed(&piece, "grad/") else { continue };
            let got = self.output(&train, &format!("grad.{}", piece.own))?;
            let error = compare(&mut report.gradients.0, &piece.extract(&got), &want)?;
            if error == report.gradients.0 {
                report.gradients.1 = piece.published[0].clone();
            }
        }
        Ok(())
    }

    fn listed(&self, piece: &Piece, prefix: &str) -> Option<Vec<f64>> {
        piece.published.iter().find_map(|n| self.file.get(&format!("{prefix}{n}"))).map(|t| t.to_f64())
    }

    /// An AdamW step per segment from the start.
    fn trajectory(&self, report: &mut Report) -> Result<()> {
        let graph = self.training()?;
        let store = self.store(&[&graph])?;
        let mut train = Program::new(&graph, self.device, &[&store])?;
        let golden = self.golden("train/loss_and_grad_norm")?;
        if golden.len() != 2 * self.case.segments {
            let expected = format!("{} numbers in `train/loss_and_grad_norm`", 2 * self.case.segments);
            return Err(Error::input("golden file", expected, golden.len().to_string()));
        }
        for segment in 0..self.case.segments {
            self.feed(&mut train, segment, true)?;
            train.run()?;
            for (output, want) in ["loss", "gradient_norm"].into_iter().zip(&golden[2 * segment..]) {
                compare(&mut report.trajectory, &self.output(&train, output)?, &[*want])?;
            }
        }
        for piece in pieces(self.config) {
            // What is not listed did not move.
            let trained = self.listed(&piece, "train/param/").or_else(|| self.listed(&piece, "param/"));
            let (Some(want), true) = (trained, store.ty(&piece.own).is_ok()) else { continue };
            let got = piece.extract(&self.get(&store, &piece.own)?);
            let error = compare(&mut report.trained.0, &got, &want)?;
            if error == report.trained.0 {
                report.trained.1 = piece.published[0].clone();
            }
        }
        Ok(())
    }
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|x| *x as f32).collect()
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}
