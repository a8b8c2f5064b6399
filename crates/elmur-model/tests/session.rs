//! Acting step by step against whole segments, and what must hold of sessions.

#![allow(clippy::unwrap_used, clippy::panic)]

use elmur_engine::rng::Stream;
use elmur_engine::{DType, Pool, Program, Store};
use elmur_model::config::*;
use elmur_model::memory::MemoryState;
use elmur_model::segments::{SegmentClock, anchor_state, evaluation_graph, memory_state};
use elmur_model::session::{Actions, Obs, Session};
use elmur_model::{ModelConfig, init};

/// What makes one variant of a model.
type Change = Box<dyn Fn(&mut ModelConfig)>;

/// A small model; tests change what they are about.
fn small() -> ModelConfig {
    ModelConfig {
        observation: Observation::Vector { dim: 3 },
        action: Action::Categorical { count: 5 },
        tokens: TokenFormat::Observation,
        d_model: 24,
        heads: 2,
        layers: 2,
        segment_length: 4,
        memory: Memory {
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
            lru: true,
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

fn params(config: &ModelConfig, seed: u64) -> Store {
    init::parameters(config, seed).unwrap()
}

fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut data = vec![0.0; n];
    Stream::new(seed, 9, 9).fill_normal(&mut data, 1.0);
    data.into_iter().map(|x| x as f32).collect()
}

fn close(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    let scale = want.iter().fold(1.0f32, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * scale, "{what}, element {i}: {g}, want {w}");
    }
}

/// Data of an episode batch: [steps, B, ...].
struct Episode {
    observations: Vec<f32>,
    actions: Vec<i32>,
    returns: Vec<f32>,
}

const B: usize = 3;

fn episode(config: &ModelConfig, steps: usize) -> Episode {
    let Observation::Vector { dim } = config.observation else { panic!("vector observations here") };
    Episode {
        observations: random(steps * B * dim, 1),
        actions: (0..steps * B).map(|i| (i * 7 % 5) as i32).collect(),
        returns: random(steps * B, 2),
    }
}

/// Steps a session through `steps` steps; compares outputs and memories with whole-segment programs.
fn stepping_equals_segments(name: &str, config: &ModelConfig, whole_windows_only: bool) {
    let params = params(config, 3);
    let length = config.segment_length;
    let segments = 5;
    let Observation::Vector { dim } = config.observation else { panic!("vector observations here") };
    let data = episode(config, segments * length);
    let mut session = Session::new(config, &params, B, &Pool::new(1)).unwrap();
    session.reset(&[(0, 10), (1, 11), (2, 12)]).unwrap();

    let graph = evaluation_graph(config, B, DType::F32).unwrap();
    let state = Store::new();
    state.declare_states(&graph).unwrap();
    let mut program = Program::new(&graph, &Pool::new(1), &[&state, &params]).unwrap();
    for i in 0..config.memories() {
        let (vectors, anchors) = session.memory(i).unwrap();
        state.set(&memory_state(i), &vectors).unwrap();
        state.set(&anchor_state(i), &anchors).unwrap();
    }
    for segment in 0..segments {
        // [steps, B, ...] to [B, steps, ...].
        let at = |b: usize, t: usize| (segment * length + t) * B + b;
        let order: Vec<usize> = (0..B).flat_map(|b| (0..length).map(move |t| at(b, t))).collect();
        let pick = |data: &[f32], row: usize| -> Vec<f32> {
            order.iter().flat_map(|i| data[i * row..(i + 1) * row].to_vec()).collect()
        };
        program.set("observation", &pick(&data.observations, dim)).unwrap();
        let tokens = config.tokens.tokens();
        if tokens.contains(&Token::Return) {
            program.set("returns", &pick(&data.returns, 1)).unwrap();
        }
        if tokens.contains(&Token::Action) {
            let actions: Vec<i32> = order.iter().map(|i| data.actions[*i]).collect();
            program.set("action", &actions).unwrap();
        }
        SegmentClock::set(config, &mut program, segment as u64).unwrap();
        program.run().unwrap();
        let logits = program.get::<f32>("logits").unwrap();
        let outputs = config.action.outputs();
        for t in 0..length {
            let step = segment * length + t;
            let got = session
                .forward(
                    Obs::Floats(&data.observations[step * B * dim..(step + 1) * B * dim]),
                    Some(&data.returns[step * B..(step + 1) * B]),
                )
                .unwrap()
                .to_vec();
            session.commit(Some(Actions::Discrete(&data.actions[step * B..(step + 1) * B]))).unwrap();
            if whole_windows_only && t + 1 < length {
                continue;
            }
            for b in 0..B {
                let want = &logits[(b * length + t) * outputs..][..outputs];
                close(&got[b * outputs..][..outputs], want, 1e-5, &format!("{name}, step {step}, row {b}"));
            }
        }
        for i in 0..config.memories() {
            let (vectors, anchors) = session.memory(i).unwrap();
            assert_eq!(anchors, state.get::<i64>(&anchor_state(i)).unwrap(), "{name}, segment {segment}");
            close(&vectors, &state.get::<f32>(&memory_state(i)).unwrap(), 1e-5, name);
        }
    }
}

#[test]
fn stepping_equals_whole_segments_in_every_variant() {
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
        ("no LRU", Box::new(|c| c.memory.lru = false)),
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
        let mut config = small();
        change(&mut config);
        stepping_equals_segments(name, &config, false);
    }
    // Here a partial window is another computation; only complete ones agree.
    let mut config = small();
    config.compat = Compat { empty_slot_blend: true, newest_first_times: true, absolute_offset: true };
    stepping_equals_segments("published", &config, true);
    let mut config = small();
    config.memory.shared = true;
    stepping_equals_segments("shared memory", &config, true);
}

/// Outputs of `steps` steps of one row, alone in row `row` of a session, from a given seed.
fn outputs_of(session: &mut Session, steps: std::ops::Range<usize>, rows: &[usize; B]) -> Vec<Vec<f32>> {
    // Row b sees observation number steps + its own offset.
    steps
        .map(|t| {
            let observation: Vec<f32> =
                rows.iter().flat_map(|offset| random(3, (t + offset) as u64)).collect();
            session.act(Obs::Floats(&observation), None).unwrap().to_vec()
        })
        .collect()
}

#[test]
fn rows_reset_at_different_times_do_not_disturb_each_other() {
    let config = small();
    let params = params(&config, 4);
    let mut session = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
    session.reset(&[(0, 1), (1, 2), (2, 3)]).unwrap();
    let undisturbed = outputs_of(&mut session, 0..30, &[0, 100, 200]);

    // Row 1 starts anew at steps 5 and 13; rows 0 and 2 must give the very same bits as before.
    session.reset(&[(0, 1), (1, 2), (2, 3)]).unwrap();
    let mut outputs = outputs_of(&mut session, 0..5, &[0, 100, 200]);
    session.reset(&[(1, 77)]).unwrap();
    outputs.extend(outputs_of(&mut session, 5..13, &[0, 100, 200]));
    session.reset(&[(1, 2)]).unwrap();
    outputs.extend(outputs_of(&mut session, 13..30, &[0, 87, 200]));
    assert_eq!(session.times(), [30, 17, 30]);
    for (t, (a, b)) in undisturbed.iter().zip(&outputs).enumerate() {
        assert_eq!((&a[..5], &a[10..]), (&b[..5], &b[10..]), "rows 0 and 2 at step {t}");
    }
    // Row 1 after its last reset saw at step 13 + i what it first saw at step i, from the same seed: the same bits.
    for i in 0..17 {
        assert_eq!(undisturbed[i][5..10], outputs[13 + i][5..10], "row 1, {i} steps after its reset");
    }
}

#[test]
fn permuting_rows_permutes_outputs() {
    let config = small();
    let params = params(&config, 4);
    let mut session = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
    session.reset(&[(0, 1), (1, 2), (2, 3)]).unwrap();
    let straight = outputs_of(&mut session, 0..20, &[0, 100, 200]);
    session.reset(&[(0, 3), (1, 1), (2, 2)]).unwrap();
    let turned = outputs_of(&mut session, 0..20, &[200, 0, 100]);
    for (a, b) in straight.iter().zip(&turned) {
        assert_eq!([&a[10..], &a[..10]].concat(), *b);
    }
}

#[test]
fn a_snapshot_continues_bit_for_bit() {
    for compat in [Compat::default(), Compat { newest_first_times: true, ..Compat::default() }] {
        let mut config = small();
        config.compat = compat;
        let params = params(&config, 4);
        let mut session = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
        outputs_of(&mut session, 0..6, &[0, 1, 2]);
        session.reset(&[(2, 9)]).unwrap();
        outputs_of(&mut session, 6..13, &[0, 1, 2]);
        let snapshot = session.snapshot().unwrap();
        let on = outputs_of(&mut session, 13..30, &[0, 1, 2]);

        let folder = std::env::temp_dir().join(format!("elmur-snapshot-{}-{:?}", std::process::id(), compat));
        snapshot.save(&folder).unwrap();
        let loaded = MemoryState::load(&folder).unwrap();
        std::fs::remove_file(&folder).unwrap();
        assert_eq!(loaded, snapshot);
        let mut other = Session::new(&config, &params, B, &Pool::new(2)).unwrap();
        other.restore(&loaded).unwrap();
        assert_eq!(other.times(), [13, 13, 7]);
        assert_eq!(outputs_of(&mut other, 13..30, &[0, 1, 2]), on);

        let bytes = snapshot.to_bytes().unwrap();
        for len in (0..bytes.len()).step_by(97) {
            assert!(MemoryState::from_bytes(&bytes[..len]).is_err());
        }
        let mut smaller = Session::new(&config, &params, 2, &Pool::new(1)).unwrap();
        assert_eq!(smaller.restore(&loaded).unwrap_err().to_string(), "restore: expected 2 rows, got 3");
    }
}

#[test]
fn a_recording_session_acts_the_same_and_tells_what_it_did() {
    let config = small();
    let params = params(&config, 4);
    let mut silent = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
    let mut telling = Session::recording(&config, &params, B, &Pool::new(1)).unwrap();
    assert_eq!(outputs_of(&mut silent, 0..9, &[0, 1, 2]), outputs_of(&mut telling, 0..9, &[0, 1, 2]));
    let records = telling.take_records();
    assert_eq!(records.len(), 9);
    for (t, record) in records.iter().enumerate() {
        assert_eq!(record.times, [t as u64; B]);
        assert_eq!(record.read.len(), 2);
        for map in &record.read {
            assert_eq!(map.len(), B * 2 * 3);
            assert!(map.chunks(3).all(|row| (row.iter().sum::<f32>() - 1.0).abs() < 1e-5));
        }
        assert_eq!(record.write.is_some(), t % 4 == 3);
    }
    let write = records[7].write.clone().unwrap();
    assert_eq!(write.slots, vec![vec![1; B]; 2]); // the second segment takes the second slot
    assert_eq!(write.rows, [true; B]);
    assert_eq!(write.memory[0], telling.memory(0).unwrap().0);
    assert!(write.attention[1].chunks(4).all(|row| (row.iter().sum::<f32>() - 1.0).abs() < 1e-5));
    assert!(silent.take_records().is_empty());
}

/// The state of a session does not grow with time, and anchors stay exact beyond what a float could count.
#[test]
fn a_million_steps_cost_what_a_thousand_cost() {
    let mut config = small();
    config.d_model = 8;
    config.layers = 1;
    config.ffn = Ffn::SwiGlu { d_ff: 8 };
    let params = params(&config, 4);
    let mut session = Session::new(&config, &params, 1, &Pool::new(1)).unwrap();
    let observation = [0.5, -1.0, 2.0];
    let size = |session: &Session| session.snapshot().unwrap().to_bytes().unwrap().len();
    let before = size(&session);
    for _ in 0..1_000_000 {
        session.act(Obs::Floats(&observation), None).unwrap();
    }
    assert_eq!(session.times(), [1_000_000]);
    assert_eq!(size(&session), before);
    assert_eq!(session.memory(0).unwrap().1.iter().max(), Some(&999_999));
    // Only differences of times reach the model: far in the future nothing changes.
    let snapshot = session.snapshot().unwrap();
    let near: Vec<f32> = session.act(Obs::Floats(&observation), None).unwrap().to_vec();
    let mut far = session;
    far.restore(&snapshot.shifted(1_000_000_000_000).unwrap()).unwrap();
    assert!(snapshot.shifted(3).is_err() && snapshot.shifted(u64::MAX).is_err());
    assert_eq!(far.act(Obs::Floats(&observation), None).unwrap(), near);
}

#[test]
fn mistakes_are_explained() {
    let mut config = small();
    let store = params(&config, 4);
    let mut session = Session::new(&config, &store, 2, &Pool::new(1)).unwrap();
    let message = |r: Result<&[f32], elmur_model::Error>| r.unwrap_err().to_string();
    assert_eq!(message(session.act(Obs::Floats(&[0.0; 5]), None)), "observation: expected 6 numbers, got 5");
    assert_eq!(
        message(session.act(Obs::Floats(&[0.0, 0.0, f32::NAN, 0.0, 0.0, 0.0]), None)),
        "observation: expected finite numbers, got NaN at 2"
    );
    assert_eq!(message(session.act(Obs::Ints(&[0; 6]), None)), "observation: expected floats, got integers");
    assert_eq!(session.reset(&[(2, 0)]).unwrap_err().to_string(), "reset: expected rows below 2, got 2");
    assert_eq!(
        session.commit(None).unwrap_err().to_string(),
        "commit: expected forward first, got no step begun"
    );
    session.act(Obs::Floats(&[0.0; 6]), None).unwrap();
    config.heads = 5;
    let error = Session::new(&config, &store, 2, &Pool::new(1)).unwrap_err().to_string();
    assert_eq!(error, "config `heads`: expected a divisor of d_model = 24, got 5");
    config.heads = 3;
    config.d_model = 12;
    let error = Session::new(&config, &store, 2, &Pool::new(1)).unwrap_err().to_string();
    assert!(error.contains("in the graph, but"), "{error}");
}

#[test]
fn every_encoder_and_head_acts() {
    let mut config = small();
    config.observation = Observation::Parts(vec![
        Observation::Vector { dim: 2 },
        Observation::Categorical { sizes: vec![3, 4], encoding: CategoricalEncoding::Embedding },
        Observation::Categorical { sizes: vec![5], encoding: CategoricalEncoding::OneHot },
        Observation::Categorical { sizes: vec![5], encoding: CategoricalEncoding::Raw },
        Observation::Image { channels: 3, height: 40, width: 44 },
    ]);
    for action in [
        Action::Categorical { count: 4 },
        Action::MultiCategorical { sizes: vec![3, 2] },
        Action::Continuous { dim: 2, tanh: true },
        Action::Continuous { dim: 2, tanh: false },
    ] {
        for tokens in [TokenFormat::Observation, TokenFormat::ReturnObservationAction] {
            config.action = action.clone();
            config.tokens = tokens;
            let params = params(&config, 1);
            let mut session = Session::new(&config, &params, 2, &Pool::new(1)).unwrap();
            let image = vec![0.5f32; 2 * 3 * 40 * 44];
            let parts = [
                Obs::Floats(&[0.1, 0.2, 0.3, 0.4]),
                Obs::Ints(&[0, 3, 2, 1]),
                Obs::Ints(&[4, 0]),
                Obs::Ints(&[1, 2]),
                Obs::Floats(&image),
            ];
            for _ in 0..9 {
                let outputs = session.act(Obs::Parts(&parts), Some(&[1.0, 0.5])).unwrap();
                assert_eq!(outputs.len(), 2 * action.outputs());
                assert!(outputs.iter().all(|x| x.is_finite()));
                if let Action::Continuous { tanh: true, .. } = action {
                    assert!(outputs.iter().all(|x| x.abs() <= 1.0));
                }
            }
            // One component's values are never taken for another's; what is refused changes nothing.
            let before = session.snapshot().unwrap();
            for bad in [[0, 4, 2, 1], [3, 0, 0, 0], [0, -1, 0, 0]] {
                let parts = [parts[0], Obs::Ints(&bad), parts[2], parts[3], parts[4]];
                assert!(session.act(Obs::Parts(&parts), Some(&[1.0, 0.5])).is_err(), "{bad:?}");
            }
            assert!(session.act(parts[0], Some(&[1.0, 0.5])).is_err(), "one part of five");
            if tokens != TokenFormat::Observation {
                assert!(session.act(Obs::Parts(&parts), Some(&[1.0, f32::NAN])).is_err());
                assert!(session.act(Obs::Parts(&parts), None).is_err());
            }
            assert_eq!(session.snapshot().unwrap(), before);
            session.act(Obs::Parts(&parts), Some(&[1.0, 0.5])).unwrap();
        }
    }
}

/// A refused action can be followed by a good one, at any position, in both modes.
#[test]
fn a_refused_action_changes_nothing() {
    for compat in [Compat::default(), Compat { newest_first_times: true, ..Compat::default() }] {
        let mut config = small();
        config.tokens = TokenFormat::ObservationAction;
        config.compat = compat;
        let params = params(&config, 4);
        let run = |mistakes: bool| {
            let mut session = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
            let mut outputs = Vec::new();
            for t in 0..10 {
                outputs.extend_from_slice(session.forward(Obs::Floats(&random(3 * B, t)), None).unwrap());
                if mistakes {
                    let error = session.commit(Some(Actions::Discrete(&[0, 99, 0]))).unwrap_err().to_string();
                    assert_eq!(error, "action: expected 0 to 5 in component 0, got 99");
                    assert!(session.commit(None).is_err() && session.reset(&[(1, 1)]).is_err());
                }
                session.commit(Some(Actions::Discrete(&[0, 2, 5]))).unwrap();
            }
            outputs
        };
        assert_eq!(run(false), run(true));
    }
}

#[test]
fn a_learned_memory_is_kept_by_snapshots_in_both_modes() {
    for shared in [false, true] {
        let mut config = small();
        config.memory.init = MemoryInit::Learned;
        config.memory.shared = shared;
        let params = params(&config, 4);
        let mut session = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
        let learned = params.get::<f32>("layers.0.memory_init").unwrap();
        assert_eq!(session.memory(0).unwrap().0, learned.repeat(B));
        let fresh = session.snapshot().unwrap();
        let first = outputs_of(&mut session, 0..9, &[0, 1, 2]);
        let later = session.snapshot().unwrap();
        let on = outputs_of(&mut session, 9..14, &[0, 1, 2]);
        let mut other = Session::new(&config, &params, B, &Pool::new(1)).unwrap();
        other.restore(&later).unwrap();
        assert_eq!(outputs_of(&mut other, 9..14, &[0, 1, 2]), on);
        other.restore(&fresh).unwrap();
        assert_eq!(outputs_of(&mut other, 0..9, &[0, 1, 2]), first);
    }
}

#[test]
fn impossible_snapshots_are_refused() {
    use elmur_model::tensors::{Numbers, parse, serialise};
    let config = small();
    let store = params(&config, 4);
    let mut session = Session::new(&config, &store, B, &Pool::new(1)).unwrap();
    outputs_of(&mut session, 0..9, &[0, 1, 2]);
    let bytes = session.snapshot().unwrap().to_bytes().unwrap();
    let changed = |name: &str, to: i64| {
        let mut tensors = parse(&bytes).unwrap();
        if let Numbers::I64(x) = &mut tensors.get_mut(name).unwrap().numbers {
            x[0] = to;
        }
        MemoryState::from_bytes(&serialise(&tensors).unwrap())
    };
    assert!(changed("times", 9).is_ok() && changed("anchors.0", 3).is_ok());
    for (name, to) in [("times", i64::MAX), ("times", -1), ("anchors.0", 11), ("anchors.1", -2), ("clock", 0)]
    {
        assert!(changed(name, to).is_err(), "{name} = {to}");
    }
    let mut other = config.clone();
    other.segment_length = 5;
    let params = params(&other, 4);
    let mut other = Session::new(&other, &params, B, &Pool::new(1)).unwrap();
    let error = other.restore(&MemoryState::from_bytes(&bytes).unwrap()).unwrap_err().to_string();
    assert_eq!(
        error,
        "restore: expected segments of 5 steps of 1 tokens, got segments of 4 steps of 1 tokens"
    );
}
