//! Training graphs: gradients through segments against central differences, padding, and the paper's theory
//! in the flesh.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use elmur_base::Field;
use elmur_engine::rng::Stream;
use elmur_engine::{AdamW, DType, Pool, Program, Store};
use elmur_model::elmur::config::*;
use elmur_model::elmur::{anchor_state, memory_state, theory};
use elmur_model::ends::*;
use elmur_model::window::{Begin, TrainSettings, WindowProgram, training_graph};
use elmur_model::{Elmur, init};

const B: usize = 2;

/// What makes one variant of a model.
type Change = Box<dyn Fn(&mut Elmur)>;

fn tiny() -> Elmur {
    let small = common::small();
    Elmur {
        action: Action::Categorical { count: 4 },
        d_model: 8,
        segment_length: 3,
        memory: MemoryConfig {
            slots: 2,
            lambda: 0.4,
            gradient: MemoryGradient::Through(4),
            dropout: 0.0,
            max_distance: 8,
            ..small.memory
        },
        ffn: Ffn::Moe {
            experts: 3,
            routed_d_ff: 4,
            shared_experts: 1,
            shared_d_ff: 6,
            top_k: 3,
            balance: 0.05,
            dropout: 0.0,
        },
        dropout: 0.0,
        attention_dropout: 0.0,
        ..small
    }
}

fn settings(dtype: DType) -> TrainSettings {
    TrainSettings {
        batch: B,
        label_smoothing: 0.1,
        ties: false,
        optimizer: AdamW { weight_decay: 0.0, ..AdamW::default() },
        clip: 1e9,
        dtype,
        export_gradients: true,
        dropout: true,
        table: None,
        augment: Default::default(),
        bytes: Vec::new(),
        weights: None,
    }
}

fn normal(n: usize, stream: u32) -> Vec<f64> {
    let mut data = vec![0.0; n];
    Stream::new(11, 5, stream).fill_normal(&mut data, 1.0);
    data
}

/// A training program in f64 with learning rate 0, so that runs leave parameters alone, fed with random data.
struct Case {
    store: Store,
    window: WindowProgram,
}

impl Case {
    fn new(config: &Elmur, start: Begin) -> Self {
        let built = training_graph(config, &settings(DType::F64), start).unwrap();
        let store = Store::new();
        store.declare(&built.graph).unwrap();
        init::initialise(&built, &store, 3).unwrap();
        let mut window = WindowProgram::new(&built, config, &Pool::new(1), &[&store]).unwrap();
        let program = &mut window.program;
        let k = config.memory.gradient.segments();
        let steps = k * B * config.segment_length;
        program.set("observation", &normal(steps * 3, 0)).unwrap();
        if config.tokens.tokens().contains(&Token::Return) {
            program.set("returns", &normal(steps, 1)).unwrap();
        }
        if config.tokens.tokens().contains(&Token::Action) {
            if config.action.is_discrete() {
                let data: Vec<i32> = (0..steps * config.action.dim()).map(|i| (i % 2) as i32).collect();
                program.set("action", &data).unwrap();
            } else {
                program.set("action", &normal(steps * config.action.dim(), 2)).unwrap();
            }
        }
        match &config.action {
            Action::Continuous { dim, .. } => {
                program.set("targets", &normal(steps * dim, 3)).unwrap();
                let mask: Vec<bool> = (0..steps).map(|i| i % 5 != 0).collect();
                program.set("mask", &mask).unwrap();
            }
            action => {
                let target = |i: usize| if i.is_multiple_of(7) { Field::IGNORED } else { (i % 2) as i64 };
                let targets: Vec<i64> = (0..steps * action.dim()).map(target).collect();
                program.set("targets", &targets).unwrap();
            }
        }
        let mut case = Self { store, window };
        case.start_over(config);
        case
    }

    /// Memory and generator as at the start.
    fn start_over(&mut self, config: &Elmur) {
        for i in 0..config.memories() {
            let len = B * config.memory.slots * config.d_model;
            self.store.set(&memory_state(i), &normal(len, 20 + i as u32)).unwrap();
            self.store.set(&anchor_state(i), &vec![-1i64; B * config.memory.slots]).unwrap();
        }
        self.store.set("rng", &[5i64, 0]).unwrap();
    }

    fn loss(&mut self, config: &Elmur) -> f64 {
        self.start_over(config);
        self.window.run(0).unwrap();
        self.window.program.get::<f64>("loss").unwrap()[0]
    }
}

/// Gradients through all segments of the program, for every parameter, against central differences.
fn check(name: &str, config: &Elmur, start: Begin) {
    let mut case = Case::new(config, start);
    case.loss(config);
    let params: Vec<String> = case
        .store
        .names()
        .into_iter()
        .filter(|n| case.window.program.output_type(&format!("grad.{n}")).is_ok())
        .collect();
    assert!(params.len() > 20, "{name}: {} parameters have gradients", params.len());
    let gradient =
        |param: &String| case.window.program.get::<f64>(&format!("grad.{param}")).unwrap().to_vec();
    let gradients: Vec<Vec<f64>> = params.iter().map(gradient).collect();
    for (param, analytic) in params.into_iter().zip(gradients) {
        let mut data = case.store.get::<f64>(&param).unwrap();
        let stride = data.len().div_ceil(4);
        for i in (0..data.len()).step_by(stride) {
            let x = data[i];
            let step = 1e-5;
            data[i] = x + step;
            case.store.set(&param, &data).unwrap();
            let above = case.loss(config);
            data[i] = x - step;
            case.store.set(&param, &data).unwrap();
            let below = case.loss(config);
            data[i] = x;
            case.store.set(&param, &data).unwrap();
            let numeric = (above - below) / (2.0 * step);
            let error = (analytic[i] - numeric).abs() / analytic[i].abs().max(numeric.abs()).max(1e-2);
            assert!(error < 1e-5, "{name}: {param}[{i}]: {} analytic, {numeric} numeric", analytic[i]);
        }
    }
}

/// With one accepted choice a step the loss that accepts any is the cross-entropy, gradients included; with more
/// it is what their probabilities together give.
#[test]
fn any_accepted_choice_is_right() {
    let config = tiny();
    let steps = 4 * B * config.segment_length;
    let mut plain = Case::new(&config, Begin::Continue);
    let expected = plain.loss(&config);
    let built =
        training_graph(&config, &TrainSettings { ties: true, ..settings(DType::F64) }, Begin::Continue)
            .unwrap();
    plain.store.declare(&built.graph).unwrap();
    let mut window = WindowProgram::new(&built, &config, &Pool::new(1), &[&plain.store]).unwrap();
    window.program.set("observation", &normal(steps * 3, 0)).unwrap();
    let target = |i: usize| (!i.is_multiple_of(7)).then_some(i % 2);
    let imitate: Vec<bool> = (0..steps).map(|i| target(i).is_some()).collect();
    window.program.set("mask", &imitate).unwrap();
    let mut accepted = vec![false; 4 * steps];
    (0..steps).filter_map(|i| Some(4 * i + target(i)?)).for_each(|at| accepted[at] = true);
    window.program.set("accepted", &accepted).unwrap();
    let mut case = Case { store: plain.store.clone(), window };
    let gradient = |case: &Case| case.window.program.get::<f64>("grad.head.weight").unwrap().to_vec();
    let with_ties = case.loss(&config);
    assert!((with_ties - expected).abs() < 1e-12, "{with_ties} and {expected}");
    for (a, b) in gradient(&plain).iter().zip(gradient(&case)) {
        assert!((a - b).abs() < 1e-12, "{a} and {b}");
    }
    // Choice 3 is as good everywhere.
    (0..steps).filter(|i| imitate[*i]).for_each(|i| accepted[4 * i + 3] = true);
    case.window.program.set("accepted", &accepted).unwrap();
    case.loss(&config);
    let logits = case.window.program.get::<f64>("logits").unwrap().to_vec();
    let lse = |z: &[f64]| z.iter().map(|z| z.exp()).sum::<f64>().ln();
    let each = (0..steps).filter(|i| imitate[*i]).map(|i| {
        let z = &logits[4 * i..4 * i + 4];
        let right = [z[i % 2], z[3]];
        lse(z) - 0.9 * lse(&right) - 0.1 * z.iter().sum::<f64>() / 4.0
    });
    let all: Vec<f64> = each.collect();
    let mean = all.iter().sum::<f64>() / all.len() as f64;
    let loss = case.window.program.get::<f64>("action_loss").unwrap()[0];
    assert!((loss - mean).abs() < 1e-9, "{loss} and {mean}");
}

#[test]
fn gradients_flow_through_segments_and_blends() {
    let variants: Vec<(&str, Begin, Change)> = vec![
        ("through 4, slots overwritten", Begin::Continue, Box::new(|_| {})),
        (
            "two slots per write",
            Begin::Continue,
            Box::new(|c| {
                c.memory.slots = 3;
                c.memory.slots_per_write = 2;
            }),
        ),
        ("learned memory", Begin::Fresh, Box::new(|c| c.memory.init = MemoryInit::Learned)),
        (
            "shared memory, pre-norm",
            Begin::Continue,
            Box::new(|c| {
                c.memory.shared = true;
                c.pre_norm = true;
            }),
        ),
        (
            "no LRU, RMSNorm, GELU",
            Begin::Continue,
            Box::new(|c| {
                c.memory.replacement = Replacement::All;
                c.norm = NormType::Rms;
                c.ffn = Ffn::Gelu { d_ff: 8 };
            }),
        ),
        (
            "all candidates, published quirks",
            Begin::Continue,
            Box::new(|c| {
                c.memory.candidates = Candidates::All;
                c.compat = Compat { empty_slot_blend: true, newest_first_times: true, absolute_offset: true };
            }),
        ),
        (
            "returns and multi-categorical actions",
            Begin::Continue,
            Box::new(|c| {
                c.tokens = TokenFormat::ReturnObservationAction;
                c.action = Action::MultiCategorical { sizes: vec![2, 3] };
            }),
        ),
        (
            "continuous actions",
            Begin::Continue,
            Box::new(|c| {
                c.tokens = TokenFormat::ObservationAction;
                c.action = Action::Continuous { dim: 2, tanh: true };
            }),
        ),
        (
            "dropout everywhere",
            Begin::Fresh,
            Box::new(|c| {
                (c.dropout, c.attention_dropout, c.memory.dropout) = (0.2, 0.2, 0.2);
            }),
        ),
        ("detached", Begin::Continue, Box::new(|c| c.memory.gradient = MemoryGradient::Detached)),
    ];
    for (name, start, change) in variants {
        let mut config = tiny();
        change(&mut config);
        check(name, &config, start);
    }
}
/// In the paper's mode the write path gets no gradient from the task; through two segments it does.
#[test]
fn only_gradients_through_segments_train_the_write_path() {
    let trained = |gradient| {
        let mut config = tiny();
        config.ffn = Ffn::SwiGlu { d_ff: 8 };
        config.memory.gradient = gradient;
        let mut case = Case::new(&config, Begin::Continue);
        case.loss(&config);
        let grad = case.window.program.get::<f64>("grad.layers.0.tok2mem.q.weight");
        grad.is_ok_and(|g| g.iter().any(|x| *x != 0.0))
    };
    assert!(!trained(MemoryGradient::Detached));
    assert!(!trained(MemoryGradient::Through(1)));
    assert!(trained(MemoryGradient::Through(2)));
}

/// What stands in padded steps after the last real one changes neither the loss nor any gradient.
#[test]
fn padding_changes_nothing() {
    let mut config = tiny();
    config.memory.gradient = MemoryGradient::Through(2);
    // All candidates and no balancing: padded tokens would otherwise be routed, and so be counted.
    if let Ffn::Moe { balance, .. } = &mut config.ffn {
        *balance = 0.0;
    }
    let mut case = Case::new(&config, Begin::Continue);
    // The last two steps of the second segment are padding.
    let mut targets: Vec<i64> = vec![1; 2 * B * 3];
    for b in 0..B {
        targets[(B + b) * 3 + 1] = Field::IGNORED;
        targets[(B + b) * 3 + 2] = Field::IGNORED;
    }
    case.window.program.set("targets", &targets).unwrap();
    let loss = case.loss(&config);
    let grad = case.window.program.get::<f64>("grad.encoder.weight").unwrap().to_vec();
    let logits = case.window.program.get::<f64>("logits").unwrap().to_vec();
    let observations = case.window.program.input_mut::<f64>("observation").unwrap();
    for b in 0..B {
        observations[((B + b) * 3 + 1) * 3..][..6].fill(7.0);
    }
    assert_eq!(case.loss(&config), loss);
    assert_eq!(case.window.program.get::<f64>("grad.encoder.weight").unwrap(), grad);
    let changed = case.window.program.get::<f64>("logits").unwrap();
    for b in 0..B {
        let real = (B + b) * 3 * 4..(B + b) * 3 * 4 + 4;
        assert_eq!(changed[real.clone()], logits[real]);
    }
}

/// Propositions 1 and 2 on the op that writes the memory: what k overwrites leave of a slot, and how large it
/// can get.
#[test]
fn overwrites_forget_exponentially_and_stay_bounded() {
    let lambda = 0.4;
    let mut g = elmur_engine::Graph::new();
    let memory = g.state("memory", DType::F64, [1, 1, 8]).unwrap();
    let anchors = g.state("anchors", DType::I64, [1, 1]).unwrap();
    let new = g.input("new", DType::F64, [1, 1, 8]).unwrap();
    let time = g.input("time", DType::I64, [1]).unwrap();
    let (slots, _) = g.lru_select(anchors, 1).unwrap();
    let blend = elmur_engine::Blend { lambda, empty_slots_too: false, active: None };
    let (m, a) = g.lru_blend(memory, anchors, slots, new, time, blend).unwrap();
    g.update(memory, m).unwrap();
    g.update(anchors, a).unwrap();
    let store = Store::new();
    store.declare(&g).unwrap();
    store.set("anchors", &[-1i64]).unwrap();
    let mut program = Program::new(&g, &Pool::new(1), &[&store]).unwrap();
    let writes: Vec<Vec<f64>> = (0..40).map(|i| normal(8, i)).collect();
    let size = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let bound = writes.iter().map(|w| size(w)).fold(0.0, f64::max);
    for (k, write) in writes.iter().enumerate() {
        program.set("new", write).unwrap();
        program.set("time", &[k as i64]).unwrap();
        program.run().unwrap();
        let got = store.get::<f64>("memory").unwrap();
        // Proposition 1: the first write fills the empty slot, each later one keeps (1 - lambda) of what was
        // there.
        let k = k as u32;
        let want: Vec<f64> = (0..8)
            .map(|i| {
                let recent =
                    (1..=k).map(|age| theory::contribution(lambda, age) * writes[(k + 1 - age) as usize][i]);
                theory::retained(lambda, k) * writes[0][i] + recent.sum::<f64>()
            })
            .collect();
        for (g, w) in got.iter().zip(&want) {
            assert!((g - w).abs() < 1e-14, "after {k} overwrites: {g}, want {w}");
        }
        assert!(size(&got) <= bound * (1.0 + 1e-15), "Proposition 2");
    }
}
