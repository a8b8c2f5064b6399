//! What must hold of every architecture: stepping equals whole windows.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use elmur_base::{Field, Values};
use elmur_engine::{DType, Pool, Store};
use elmur_model::baselines::{
    BcLstm, BcMlp, Cql, CqlObjective, DMamba, DMambaCompat, LstmCompat, TransformerXl, TransformerXlCompat,
    ValveActivation,
};
use elmur_model::elmur::config::*;
use elmur_model::ends::*;
use elmur_model::session::{Seen, Session};
use elmur_model::tensors::TensorData;
use elmur_model::window::{Begin, WindowProgram, evaluation_graph};
use elmur_model::{Elmur, PolicyConfig, Start, init, presets};

use common::{random, small as elmur};

const ROWS: usize = 3;

fn encoder() -> Vec<Encoder> {
    vec![Encoder::Vector { dim: 3, bytes: false }]
}

fn close(got: &[f32], want: &[f32], what: &str) {
    let scale = want.iter().fold(1.0f32, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= 1e-5 * scale, "{what}, element {i}: {g}, want {w}");
    }
}

/// Where a session's steps and whole windows must agree.
#[derive(Clone, Copy, PartialEq)]
enum Agree {
    /// At every step.
    Always,
    /// At the last step of a window: before that, a partial window is another computation.
    AtTheEnd,
    /// In the first window: after that, the session's window slides.
    FirstWindow,
    /// Only what a whole window leaves behind: its last step is computed before its last token is there.
    MemoryAtTheEnd,
}

fn stepping_equals_windows(name: &str, config: &PolicyConfig, agree: Agree) {
    stepping_equals(name, config, agree, 5);
}

/// Steps a session through this many windows; compares outputs and carried states with whole-window programs.
fn stepping_equals(name: &str, config: &PolicyConfig, agree: Agree, windows: usize) {
    let architecture = config.architecture();
    let params = init::parameters(architecture, 3).unwrap();
    let length = architecture.window().steps;
    let (ends, outputs) = (architecture.ends(), architecture.ends().action.outputs());
    let steps = length * windows;
    let observations = random(steps * ROWS * 3, 1);
    let actions: Vec<i32> = (0..steps * ROWS).map(|i| (i * 7 % 5) as i32).collect();
    let returns = random(steps * ROWS, 2);
    let all = [0, 1, 2];
    // Rows of a new session are ready for their first episodes.
    let mut session = Session::new(config, &params, ROWS, &Pool::new(1)).unwrap();

    let built = evaluation_graph(architecture, ROWS, DType::F32, Begin::Continue).unwrap();
    let state = Store::new();
    state.declare_states(&built.graph).unwrap();
    let mut program = WindowProgram::new(&built, architecture, &Pool::new(1), &[&state, &params]).unwrap();
    for carried in &built.carried {
        match session.state(&carried.name, &all).unwrap() {
            TensorData::F32(x) => state.set(&carried.name, &x).unwrap(),
            TensorData::I64(x) => state.set(&carried.name, &x).unwrap(),
            _ => panic!("floats or times"),
        }
    }
    for window in 0..windows {
        // [steps, rows, ...] to [rows, steps, ...].
        let at = |b: usize, t: usize| (window * length + t) * ROWS + b;
        let order: Vec<usize> = (0..ROWS).flat_map(|b| (0..length).map(move |t| at(b, t))).collect();
        let pick = |data: &[f32], each: usize| -> Vec<f32> {
            order.iter().flat_map(|i| data[i * each..(i + 1) * each].to_vec()).collect()
        };
        for (name, field) in program.fields().to_vec() {
            match field {
                Field::Observation(_) => program.program.set(&name, &pick(&observations, 3)).unwrap(),
                Field::ReturnToGo => program.program.set(&name, &pick(&returns, 1)).unwrap(),
                Field::Action => {
                    let actions: Vec<i32> = order.iter().map(|i| actions[*i]).collect();
                    program.program.set(&name, &actions).unwrap();
                }
                other => panic!("{other:?} when acting"),
            }
        }
        program.run(window as u64).unwrap();
        let logits = program.program.get::<f32>("logits").unwrap();
        for t in 0..length {
            let step = window * length + t;
            let part = step * ROWS..(step + 1) * ROWS;
            let observation = Values::floats(&observations[3 * part.start..3 * part.end]);
            let seen = Seen { observation, returns: Some(&returns[part.clone()]) };
            let got = session.forward(&all, seen).unwrap().to_vec();
            session.commit(&all, Values::ints(&actions[part])).unwrap();
            let compared = match agree {
                Agree::Always => true,
                Agree::AtTheEnd => t + 1 == length,
                Agree::FirstWindow => window == 0,
                Agree::MemoryAtTheEnd => false,
            };
            for b in (0..ROWS).filter(|_| compared) {
                let want = &logits[(b * length + t) * outputs..][..outputs];
                close(&got[b * outputs..][..outputs], want, &format!("{name}, step {step}, row {b}"));
            }
        }
        for carried in &built.carried {
            match session.state(&carried.name, &all).unwrap() {
                TensorData::F32(x) => close(&x, &state.get::<f32>(&carried.name).unwrap(), name),
                TensorData::I64(x) => {
                    assert_eq!(carried.start, Start::Never);
                    assert_eq!(x, state.get::<i64>(&carried.name).unwrap(), "{name}, window {window}");
                }
                _ => panic!("floats or times"),
            }
        }
    }
    assert!(ends.observation.len() == 1);
}

/// What makes one variant of a model.
type Change = Box<dyn Fn(&mut Elmur)>;

#[test]
fn stepping_equals_whole_windows_in_every_variant_of_elmur() {
    let variants: Vec<(&str, Change)> = vec![
        ("paper", Box::new(|_| {})),
        (
            "pre-norm GELU",
            Box::new(|c| {
                c.pre_norm = true;
                c.ffn = Ffn::Gelu { d_ff: 20 };
            }),
        ),
        (
            "RMSNorm SwiGLU",
            Box::new(|c| {
                c.norm = NormType::Rms;
                c.ffn = Ffn::SwiGlu { d_ff: 20 };
            }),
        ),
        ("two slots per write", Box::new(|c| c.memory.slots_per_write = 2)),
        ("all candidates", Box::new(|c| c.memory.candidates = Candidates::All)),
        ("no bias", Box::new(|c| c.memory.relative_bias = false)),
        ("no read", Box::new(|c| c.memory.read = false)),
        ("no write", Box::new(|c| c.memory.write = false)),
        ("no LRU", Box::new(|c| c.memory.replacement = Replacement::All)),
        ("learned memory", Box::new(|c| c.memory.init = MemoryInit::Learned)),
        ("empty slots blended", Box::new(|c| c.compat.empty_slot_blend = true)),
        ("absolute offset", Box::new(|c| c.compat.absolute_offset = true)),
        ("observation, action", Box::new(|c| c.tokens = TokenFormat::ObservationAction)),
        ("observation, return", Box::new(|c| c.tokens = TokenFormat::ObservationReturn)),
        ("return, observation, action", Box::new(|c| c.tokens = TokenFormat::ReturnObservationAction)),
        (
            "absolute offset with actions",
            Box::new(|c| {
                c.compat.absolute_offset = true;
                c.tokens = TokenFormat::ReturnObservationAction;
            }),
        ),
    ];
    for (name, change) in variants {
        let mut config = elmur();
        change(&mut config);
        stepping_equals_windows(name, &config.into(), Agree::Always);
    }
    let mut config = elmur();
    config.compat = Compat { empty_slot_blend: true, newest_first_times: true, absolute_offset: true };
    stepping_equals_windows("published", &config.into(), Agree::AtTheEnd);
    let mut config = elmur();
    config.memory.shared = true;
    stepping_equals_windows("shared memory", &config.into(), Agree::AtTheEnd);
}

fn lstm(layers: usize, random_hidden: bool) -> PolicyConfig {
    PolicyConfig::BcLstm(BcLstm {
        observation: encoder(),
        action: Action::Categorical { count: 5 },
        d_model: 8,
        hidden: 11,
        layers,
        window: 4,
        dropout: 0.1,
        unroll: 1,
        compat: LstmCompat { random_hidden },
    })
}

#[test]
fn stepping_equals_whole_windows_for_recurrent_networks() {
    for layers in [1, 2] {
        stepping_equals_windows("bc-lstm", &lstm(layers, false), Agree::Always);
        stepping_equals_windows("bc-lstm, random states", &lstm(layers, true), Agree::Always);
    }
}

fn mlp() -> PolicyConfig {
    PolicyConfig::BcMlp(BcMlp {
        observation: encoder(),
        action: Action::Categorical { count: 5 },
        d_model: 8,
        hidden: vec![11, 7],
        window: 4,
        dropout: 0.1,
    })
}

/// Q-learning in every form.
fn q_learning() -> Vec<(&'static str, PolicyConfig)> {
    let cql = |lstm, objective| {
        PolicyConfig::Cql(Cql {
            observation: encoder(),
            action: Action::Categorical { count: 5 },
            d_model: 8,
            lstm,
            lstm_layers: 2,
            hidden: vec![9],
            window: 4,
            dropout: 0.1,
            objective,
            alpha: 1.0,
            gamma: 0.9,
            tau: 0.1,
            compat: LstmCompat::default(),
        })
    };
    let continuous = presets::cql_continuous(encoder(), Action::Continuous { dim: 2, tanh: false }, 4);
    vec![
        ("cql", cql(None, CqlObjective::Td)),
        ("cql-lstm", cql(Some(6), CqlObjective::Td)),
        ("published cql-lstm", cql(Some(6), CqlObjective::Published)),
        ("continuous cql", PolicyConfig::CqlContinuous(continuous)),
    ]
}

#[test]
fn stepping_equals_whole_windows_without_memory_and_for_q_values() {
    stepping_equals_windows("bc-mlp", &mlp(), Agree::Always);
    for (name, config) in q_learning() {
        stepping_equals_windows(name, &config, Agree::Always);
    }
}

/// Rounding errors of what is carried do not add up.
#[test]
fn a_thousand_steps_equal_whole_windows() {
    let mut policies = vec![("elmur", elmur().into()), ("bc-mlp", mlp()), ("bc-lstm", lstm(2, false))];
    policies.extend(q_learning());
    policies.push(("dmamba", PolicyConfig::DMamba(dmamba())));
    policies
        .extend(segmented().into_iter().map(|(name, config)| (name, PolicyConfig::TransformerXl(config))));
    for (name, config) in policies {
        stepping_equals(name, &config, Agree::Always, 250);
    }
}

fn dt() -> TransformerXl {
    TransformerXl {
        observation: encoder(),
        action: Action::Categorical { count: 5 },
        d_model: 8,
        heads: 3,
        d_head: 4,
        d_ff: Some(12),
        layers: 2,
        window: 4,
        memory_tokens: 0,
        cache_tokens: 0,
        valve_heads: 0,
        valve_activation: ValveActivation::Relu,
        dropout: 0.1,
        attention_dropout: 0.1,
        action_tanh: true,
        unroll: 1,
        slides: true,
        compat: TransformerXlCompat::default(),
    }
}

fn dmamba() -> DMamba {
    DMamba {
        observation: encoder(),
        action: Action::Categorical { count: 5 },
        d_model: 9,
        layers: 2,
        window: 4,
        dropout: 0.1,
        unroll: 1,
        state: 6,
        conv: 4,
        expand: 2,
        action_tanh: true,
        compat: DMambaCompat::default(),
    }
}

#[test]
fn stepping_equals_whole_windows_for_state_space_models() {
    stepping_equals_windows("dmamba", &PolicyConfig::DMamba(dmamba()), Agree::Always);
    let config = DMamba { layers: 1, state: 16, expand: 1, conv: 7, ..dmamba() };
    stepping_equals_windows("dmamba that looks far back", &PolicyConfig::DMamba(config), Agree::Always);
    let compat = DMambaCompat { mamba_window: true, ..DMambaCompat::default() };
    let config = PolicyConfig::DMamba(DMamba { compat, ..dmamba() });
    stepping_equals_windows("dmamba with windows", &config, Agree::Always);
}

/// Variants of Transformer-XL whose windows do not slide.
fn segmented() -> Vec<(&'static str, TransformerXl)> {
    let base = TransformerXl { slides: false, ..dt() };
    let compat = TransformerXlCompat::default();
    vec![
        ("no memory", base.clone()),
        ("trxl", TransformerXl { cache_tokens: 40, ..base.clone() }),
        ("trxl, short cache", TransformerXl { cache_tokens: 7, ..base.clone() }),
        ("rmt", TransformerXl { memory_tokens: 4, ..base.clone() }),
        ("rmt, one token", TransformerXl { memory_tokens: 1, ..base.clone() }),
        ("rate", TransformerXl { memory_tokens: 3, valve_heads: 2, d_ff: None, ..base.clone() }),
        (
            "rate, cache",
            TransformerXl {
                memory_tokens: 3,
                cache_tokens: 20,
                valve_heads: 4,
                valve_activation: ValveActivation::None,
                ..base.clone()
            },
        ),
        (
            "rate, small cache",
            TransformerXl { memory_tokens: 5, cache_tokens: 2, valve_heads: 1, ..base.clone() },
        ),
        (
            "rate, two wrapped tokens",
            TransformerXl {
                memory_tokens: 2,
                cache_tokens: 9,
                compat: TransformerXlCompat {
                    wrapped_memory_distances: true,
                    double_residual: true,
                    ..compat
                },
                ..base
            },
        ),
    ]
}

#[test]
fn stepping_equals_whole_windows_for_transformer_xl() {
    for (name, config) in segmented() {
        stepping_equals_windows(name, &PolicyConfig::TransformerXl(config), Agree::Always);
    }
    // Distances that depend on the window's length: only a full window has those of the whole.
    let compat = TransformerXlCompat { wrapped_memory_distances: true, ..TransformerXlCompat::default() };
    let config = TransformerXl { memory_tokens: 4, cache_tokens: 9, slides: false, compat, ..dt() };
    stepping_equals_windows("wrapped", &PolicyConfig::TransformerXl(config), Agree::MemoryAtTheEnd);
}

#[test]
fn stepping_equals_the_whole_window_until_it_slides() {
    stepping_equals_windows("dt", &PolicyConfig::TransformerXl(dt()), Agree::FirstWindow);
}

/// Once the window slides, a step equals a whole window of the newest steps.
#[test]
fn a_sliding_window_shows_the_newest_steps_for_a_thousand_steps() {
    const STEPS: usize = 1000;
    let config = PolicyConfig::TransformerXl(dt());
    let params = init::parameters(config.architecture(), 3).unwrap();
    let mut session = Session::new(&config, &params, 1, &Pool::new(1)).unwrap();
    let built = evaluation_graph(config.architecture(), 1, DType::F32, Begin::Continue).unwrap();
    let mut program = WindowProgram::new(&built, config.architecture(), &Pool::new(1), &[&params]).unwrap();
    let (observations, returns) = (random(3 * STEPS, 1), random(STEPS, 2));
    let actions: Vec<i32> = (0..STEPS).map(|i| (i * 3 % 5) as i32).collect();
    for t in 0..STEPS {
        let observation = Values::floats(&observations[3 * t..3 * t + 3]);
        let seen = Seen { observation, returns: Some(&returns[t..=t]) };
        let got = session.forward(&[0], seen).unwrap().to_vec();
        if t >= 3 {
            let window = t - 3..t + 1;
            program.program.set("observation", &observations[3 * window.start..3 * window.end]).unwrap();
            program.program.set("returns", &returns[window.clone()]).unwrap();
            program.program.set("action", &actions[window]).unwrap();
            program.run(0).unwrap();
            close(&got, &program.program.get::<f32>("logits").unwrap()[15..], &format!("step {t}"));
        }
        session.commit(&[0], Values::ints(&actions[t..=t])).unwrap();
    }
}

#[test]
fn configs_say_which_policy_they_are() {
    let lstm = r#"{"kind":"bc_lstm","observation":[{"vector":{"dim":4}}],"action":{"categorical":{"count":4}},
        "d_model":64,"hidden":128,"layers":1,"window":30,"dropout":0.0}"#;
    let read = |text: &str| serde_json::from_str::<PolicyConfig>(text);
    let config = read(lstm).unwrap();
    assert!(matches!(&config, PolicyConfig::BcLstm(c) if c.hidden == 128 && c.unroll == 1));
    let continuous = Action::Continuous { dim: 2, tanh: false };
    for config in [
        config,
        PolicyConfig::TransformerXl(dt()),
        PolicyConfig::DMamba(dmamba()),
        PolicyConfig::Tt(presets::tt(encoder(), continuous.clone())),
        PolicyConfig::CqlContinuous(presets::cql_continuous(encoder(), continuous, 4)),
        elmur().into(),
    ] {
        let text = serde_json::to_string(&config).unwrap();
        assert!(text.contains(&format!("\"kind\":\"{}\"", config.kind())), "{text}");
        assert_eq!(read(&text).unwrap(), config);
    }
    // Files from before there were several kinds are ELMUR's.
    let mut tree = serde_json::to_value(PolicyConfig::from(elmur())).unwrap();
    tree.as_object_mut().unwrap().remove("kind");
    assert_eq!(serde_json::from_value::<PolicyConfig>(tree).unwrap(), elmur().into());
    let error = read(&lstm.replace("bc_lstm", "bc-lstm")).unwrap_err().to_string();
    assert!(error.contains("did you mean `bc_lstm`"), "{error}");
    let error = read(&lstm.replace("hidden", "hiden")).unwrap_err().to_string();
    assert!(error.contains("unknown field `hiden`"), "{error}");
}
