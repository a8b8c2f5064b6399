//! What must hold of Transformer-XL policies (DT, TrXL, RMT, RATE) beyond what holds of every architecture.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use elmur_base::Values;
use elmur_engine::{DType, Pool, Store};
use elmur_model::baselines::{TransformerXl, TransformerXlCompat, ValveActivation};
use elmur_model::ends::*;
use elmur_model::session::{Seen, Session};
use elmur_model::tensors::{self, TensorData, Tensors};
use elmur_model::window::{Begin, WindowProgram, evaluation_graph};
use elmur_model::{Architecture, PolicyConfig, Snapshot, init};

use common::random;

const STEPS: usize = 4;

const ACTIONS: usize = 5;

fn dt() -> TransformerXl {
    TransformerXl {
        observation: vec![Encoder::Vector { dim: 3, bytes: false }],
        action: Action::Categorical { count: ACTIONS },
        d_model: 8,
        heads: 3,
        d_head: 4,
        d_ff: Some(12),
        layers: 2,
        window: STEPS,
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

fn trxl() -> TransformerXl {
    TransformerXl { cache_tokens: 19, slides: false, ..dt() }
}

fn rmt() -> TransformerXl {
    TransformerXl { memory_tokens: 2, slides: false, ..dt() }
}

fn rate() -> TransformerXl {
    TransformerXl { memory_tokens: 3, cache_tokens: 8, valve_heads: 2, d_ff: None, slides: false, ..dt() }
}

/// A policy whose windows are run again.
fn wrapped() -> TransformerXl {
    let compat = TransformerXlCompat { wrapped_memory_distances: true, ..TransformerXlCompat::default() };
    TransformerXl { compat, ..rate() }
}

fn all() -> Vec<(&'static str, TransformerXl)> {
    vec![("dt", dt()), ("trxl", trxl()), ("rmt", rmt()), ("rate", rate()), ("wrapped rate", wrapped())]
}

fn session(config: &TransformerXl, rows: usize) -> Session {
    let config = PolicyConfig::TransformerXl(config.clone());
    let params = init::parameters(config.architecture(), 3).unwrap();
    Session::new(&config, &params, rows, &Pool::new(1)).unwrap()
}

/// Acts in some rows, each in its own episode: row `i` of the list sees moment `t` of episode `episodes[i]`.
fn act(session: &mut Session, rows: &[usize], episodes: &[u64], t: usize) -> Vec<Vec<f32>> {
    let moment = |episode: &u64| 1000 * episode + t as u64;
    let observation: Vec<f32> = episodes.iter().flat_map(|e| random(3, moment(e))).collect();
    let returns: Vec<f32> = episodes.iter().flat_map(|e| random(1, moment(e) + 500)).collect();
    let actions: Vec<i32> = episodes.iter().map(|e| (moment(e) * 7 % ACTIONS as u64) as i32).collect();
    let seen = Seen { observation: Values::floats(&observation), returns: Some(&returns) };
    let outputs = session.forward(rows, seen).unwrap().chunks(ACTIONS).map(<[f32]>::to_vec).collect();
    session.commit(rows, Values::ints(&actions)).unwrap();
    outputs
}

/// Rows at other times, in another order, alone or together: every episode gives the same bits.
#[test]
fn an_episode_does_not_depend_on_the_rows_beside_it() {
    for (name, config) in all() {
        let mut session = session(&config, 3);
        let alone: Vec<Vec<Vec<f32>>> = (0..3)
            .map(|episode| {
                session.reset(&[(1, 7)]).unwrap();
                (0..22).map(|t| act(&mut session, &[1], &[episode], t).remove(0)).collect()
            })
            .collect();
        session.reset(&[(0, 1), (1, 2), (2, 3)]).unwrap();
        // Episode 1 begins at step 3, episode 2 at step 6, and they leave their rows in turns.
        let starts = [0, 3, 6];
        for t in 0..22 {
            let rows: Vec<usize> =
                (0..3).rev().filter(|row| t >= starts[*row] && (t + row) % 5 != 0).collect();
            for row in rows {
                // Each row at its own pace: rows that were left out come later.
                let at = session.times()[row] as usize;
                let got = act(&mut session, &[row], &[row as u64], at);
                assert_eq!(got[0], alone[row][at], "{name}, row {row}, step {at}");
            }
        }
        session.reset(&[(0, 1), (1, 2), (2, 3)]).unwrap();
        for t in 0..5 {
            act(&mut session, &[2], &[2], t);
        }
        session.reset(&[(2, 3)]).unwrap();
        for t in 0..22 {
            for (row, got) in [2, 0, 1].into_iter().zip(act(&mut session, &[2, 0, 1], &[2, 0, 1], t)) {
                assert_eq!(got, alone[row][t], "{name}, row {row}, step {t}");
            }
        }
    }
}

#[test]
fn a_snapshot_continues_bit_for_bit_before_and_after_windows_end() {
    for (name, config) in all() {
        for at in [2, 4, 7, 13] {
            let mut one = session(&config, 2);
            for t in 0..at {
                act(&mut one, &[0, 1], &[0, 1], t);
            }
            let snapshot = one.snapshot(&[0, 1]).unwrap();
            let mut other = session(&config, 2);
            other.restore(&[1, 0], &snapshot).unwrap();
            for t in at..at + 10 {
                let want = act(&mut one, &[0, 1], &[0, 1], t);
                assert_eq!(act(&mut other, &[1, 0], &[0, 1], t), want, "{name}, from {at}, step {t}");
            }
        }
    }
}

fn changed(snapshot: &Snapshot, change: impl FnOnce(&mut Tensors)) -> Snapshot {
    let mut tensors = tensors::parse(&snapshot.to_bytes().unwrap()).unwrap();
    change(&mut tensors);
    Snapshot::from_bytes(&tensors::serialise(&tensors).unwrap()).unwrap()
}

/// Snapshots of DT from before its windows took single steps have the newest steps alone.
#[test]
fn snapshots_without_states_of_single_steps_go_on_by_windows() {
    let mut one = session(&dt(), 1);
    (0..2).for_each(|t| drop(act(&mut one, &[0], &[0], t)));
    let old = changed(&one.snapshot(&[0]).unwrap(), |tensors| {
        tensors.retain(|name, _| !name.starts_with("keys.") && name != "stepped");
    });
    assert_eq!(
        old.tensors().keys().collect::<Vec<_>>(),
        ["window.action", "window.observation", "window.returns"]
    );
    let mut other = session(&dt(), 1);
    other.restore(&[0], &old).unwrap();
    for t in 2..9 {
        let want = act(&mut one, &[0], &[0], t).remove(0);
        let got = act(&mut other, &[0], &[0], t).remove(0);
        assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 1e-5), "step {t}: {got:?}, want {want:?}");
        if t == 3 {
            // Such rows are saved as what they are.
            let again = other.snapshot(&[0]).unwrap();
            assert_eq!(again.tensors()["stepped"].data, TensorData::I64(vec![0]));
            other.restore(&[0], &again).unwrap();
        }
    }
    let bad = changed(&one.snapshot(&[0]).unwrap(), |tensors| {
        tensors.get_mut("stepped").unwrap().data = TensorData::I64(vec![2]);
    });
    let error = one.restore(&[0], &bad).unwrap_err().to_string();
    assert_eq!(error, "restore: expected 0 or 1 in `stepped`, got others");
}

/// A whole-window program of one row, and its states.
struct Windows {
    program: WindowProgram,
    states: Store,
}

impl Windows {
    fn new(config: &TransformerXl, begin: Begin) -> Self {
        let params = init::parameters(config, 3).unwrap();
        let built = evaluation_graph(config, 1, DType::F32, begin).unwrap();
        let states = Store::new();
        states.declare_states(&built.graph).unwrap();
        let program = WindowProgram::new(&built, config, &Pool::new(1), &[&states, &params]).unwrap();
        Self { program, states }
    }

    /// Logits of a window that shows these moments of an episode and these actions.
    fn run(&mut self, episode: u64, first: usize, actions: &[i32]) -> Vec<f32> {
        let moments = || (first..first + STEPS).map(|t| 1000 * episode + t as u64);
        let observation: Vec<f32> = moments().flat_map(|m| random(3, m)).collect();
        let returns: Vec<f32> = moments().flat_map(|m| random(1, m + 500)).collect();
        let program = &mut self.program.program;
        program.set("observation", &observation).unwrap();
        program.set("returns", &returns).unwrap();
        program.set("action", actions).unwrap();
        self.program.run((first / STEPS) as u64).unwrap();
        self.program.program.get::<f32>("logits").unwrap().to_vec()
    }
}

fn action(episode: u64, t: usize) -> i32 {
    ((1000 * episode + t as u64) * 7 % ACTIONS as u64) as i32
}

fn close(got: &[f32], want: &[f32], what: &str) {
    let near = got.iter().zip(want).all(|(g, w)| (g - w).abs() <= 1e-5 * w.abs().max(1.0));
    assert!(near && got.len() == want.len(), "{what}: {got:?}, want {want:?}");
}

/// Later steps, padding among them, change nothing before them.
#[test]
fn no_step_looks_at_later_ones() {
    for (name, config) in all() {
        let mut windows = Windows::new(&config, Begin::Fresh);
        let actions: Vec<i32> = (0..STEPS).map(|t| action(0, t)).collect();
        let whole = windows.run(0, 0, &actions);
        for t in 0..STEPS {
            let mut changed = actions.clone();
            changed[t..].fill(ACTIONS as i32);
            let logits = windows.run(0, 0, &changed);
            let known = (t + 1) * ACTIONS;
            assert_eq!(logits[..known], whole[..known], "{name}, step {t}");
            if t + 1 < STEPS {
                assert_ne!(logits[known..], whole[known..], "{name}, step {t}");
            }
        }
    }
}

#[test]
fn a_thousand_steps_equal_whole_windows() {
    for (name, config) in [("trxl", trxl()), ("rmt", rmt()), ("rate", rate())] {
        let mut session = session(&config, 1);
        let (mut fresh, mut windows) =
            (Windows::new(&config, Begin::Fresh), Windows::new(&config, Begin::Continue));
        for window in 0..250 {
            let first = window * STEPS;
            let actions: Vec<i32> = (first..first + STEPS).map(|t| action(0, t)).collect();
            let of = if window == 0 { &mut fresh } else { &mut windows };
            let want = of.run(0, first, &actions);
            if window == 0 {
                for (state, _) in evaluation_states(&config) {
                    windows.states.set(&state, &fresh.states.get::<f32>(&state).unwrap()).unwrap();
                }
            }
            for t in 0..STEPS {
                let got = act(&mut session, &[0], &[0], first + t).remove(0);
                let want = &want[t * ACTIONS..(t + 1) * ACTIONS];
                assert!(
                    got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-3),
                    "{name}, step {}: {got:?}, want {want:?}",
                    first + t
                );
            }
        }
    }
}

/// States that whole windows carry.
fn evaluation_states(config: &TransformerXl) -> Vec<(String, Vec<usize>)> {
    let built = evaluation_graph(config, 1, DType::F32, Begin::Continue).unwrap();
    built.carried.into_iter().map(|state| (state.name, state.shape)).collect()
}

fn memory_of(session: &Session) -> Vec<f32> {
    match session.state(TransformerXl::MEMORY, &[0]).unwrap() {
        TensorData::F32(x) => x,
        _ => panic!("floats"),
    }
}

/// The published window shows [a_1, ..., a_(t-1), 0] where training has [a_0, ..., a_(t-1)].
#[test]
fn shifted_actions_are_shown_one_step_too_early() {
    let compat = TransformerXlCompat { shifted_actions: true, ..TransformerXlCompat::default() };
    let mut session = session(&TransformerXl { compat, ..rmt() }, 1);
    let mut windows = Windows::new(&rmt(), Begin::Fresh);
    let shown = |known: usize| -> Vec<i32> {
        (0..STEPS).map(|slot| if slot + 1 < known { action(0, slot + 1) } else { 0 }).collect()
    };
    for t in 0..STEPS {
        let want = windows.run(0, 0, &shown(t));
        let got = act(&mut session, &[0], &[0], t).remove(0);
        close(&got, &want[t * ACTIONS..(t + 1) * ACTIONS], &format!("step {t}"));
    }
    // What the window leaves behind has seen all of its actions.
    windows.run(0, 0, &shown(STEPS));
    close(&memory_of(&session), &windows.states.get::<f32>(TransformerXl::MEMORY).unwrap(), "memory");
}

#[test]
fn a_segments_last_action_can_be_left_out_of_its_memory() {
    let without = TransformerXlCompat { commit_without_last_action: true, ..TransformerXlCompat::default() };
    for (compat, counts) in [(TransformerXlCompat::default(), true), (without, false)] {
        let mut session = session(&TransformerXl { compat, ..rate() }, 2);
        let mut at = |t: usize, last: [i32; 2]| {
            let observation = [random(3, t as u64), random(3, t as u64)].concat();
            let seen = Seen { observation: Values::floats(&observation), returns: Some(&[0.5; 2]) };
            let outputs = session.forward(&[0, 1], seen).unwrap().to_vec();
            session.commit(&[0, 1], Values::ints(&last)).unwrap();
            outputs
        };
        for window in 0..3 {
            for t in 0..STEPS {
                // Rows differ in the last action of the second segment alone.
                let differs = window == 1 && t + 1 == STEPS;
                let outputs = at(window * STEPS + t, if differs { [1, 2] } else { [3, 3] });
                let same = outputs[..ACTIONS] == outputs[ACTIONS..];
                assert_eq!(same, window < 2 || !counts, "{compat:?}, window {window}, step {t}");
            }
        }
    }
}

#[test]
fn the_valve_drops_when_acting_only_as_the_published_code_does() {
    let always = TransformerXlCompat { valve_dropout_in_eval: true, ..TransformerXlCompat::default() };
    for (compat, drops) in [(TransformerXlCompat::default(), false), (always, true)] {
        let config = TransformerXl { compat, attention_dropout: 0.5, ..rate() };
        let mut session = session(&config, 3);
        let mut run = |seeds: [u64; 3]| {
            session.reset(&[(0, seeds[0]), (1, seeds[1]), (2, seeds[2])]).unwrap();
            let steps = 3 * STEPS;
            (0..steps).map(|t| act(&mut session, &[0, 1, 2], &[0, 0, 0], t)).collect::<Vec<_>>()
        };
        let (first, again) = (run([1, 2, 1]), run([2, 1, 1]));
        for (t, (first, again)) in first.iter().zip(&again).enumerate() {
            // A seed decides what is dropped, whatever row it is in.
            assert!(first[0] == first[2] && first[0] == again[1] && first[1] == again[0], "step {t}");
            assert_eq!(first[0] != first[1], drops && t >= STEPS, "step {t}");
        }
    }
}

#[test]
fn recording_tells_memory_and_who_reads_it() {
    for (name, config) in [("rate", rate()), ("wrapped rate", wrapped())] {
        let (m, heads) = (config.memory_tokens, config.heads);
        let config = PolicyConfig::TransformerXl(config);
        let params = init::parameters(config.architecture(), 3).unwrap();
        let mut session = Session::recording(&config, &params, 2, &Pool::new(1)).unwrap();
        (0..STEPS).for_each(|t| drop(act(&mut session, &[0, 1], &[0, 1], t)));
        let records = session.take_records();
        assert_eq!(records.len(), STEPS);
        for (t, record) in records.iter().enumerate() {
            let reads = &record.taps["read.1"];
            assert_eq!(reads.shape, [heads, m], "{name}");
            let TensorData::F32(weights) = &reads.data else { panic!("floats") };
            assert!(weights.len() == 2 * heads * m && weights.iter().all(|w| (0.0..1.0).contains(w)));
            assert_eq!(!record.closed.is_empty(), t + 1 == STEPS, "{name}");
        }
        let TensorData::F32(memory) = &records[STEPS - 1].closed[0].taps["memory"].data else {
            panic!("floats")
        };
        assert_eq!(memory[..memory.len() / 2], memory_of(&session), "{name}");
    }
}

#[test]
fn equal_memory_tokens_start_as_one_vector() {
    let compat = TransformerXlCompat { equal_memory_tokens: true, ..TransformerXlCompat::default() };
    for (compat, equal) in [(compat, true), (TransformerXlCompat::default(), false)] {
        let session = session(&TransformerXl { compat, ..rate() }, 1);
        let memory = memory_of(&session);
        assert_eq!(memory[..8] == memory[8..16] && memory[..8] == memory[16..], equal);
    }
}

/// Files of kind `dt` from before there were memory and caches, and fingerprints of their policies.
#[test]
fn earlier_decision_transformers_are_read_and_keep_their_fingerprint() {
    let text = r#"{"observation":[{"vector":{"dim":3}}],"action":{"categorical":{"count":5}},"d_model":8,"heads":3,"d_head":4,"d_ff":12,"layers":2,"window":4,"dropout":0.1,"attention_dropout":0.1,"action_tanh":true,"compat":{"double_residual":false}}"#;
    let mut tree: serde_json::Value = serde_json::from_str(text).unwrap();
    tree["kind"] = "dt".into();
    let read: PolicyConfig = serde_json::from_value(tree).unwrap();
    assert_eq!(read, PolicyConfig::TransformerXl(dt()));
    assert_eq!(read.kind(), "transformer_xl");
    assert_eq!(read.architecture().config_text(), text);
    for (name, config) in all() {
        let config = PolicyConfig::TransformerXl(config);
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<PolicyConfig>(&text).unwrap(), config, "{name}: {text}");
    }
    let without = r#"{"d_ff":0"#;
    let text = serde_json::to_string(&rate()).unwrap().replacen(r#"{"#, without, 1).replacen(
        r#""d_ff":null,"#,
        "",
        1,
    );
    let text = text.replacen(r#""d_ff":0"#, r#""d_ff":0,"#, 1);
    assert_eq!(serde_json::from_str::<TransformerXl>(&text).unwrap(), rate());
}

#[test]
fn settings_that_do_not_fit_are_refused_by_name() {
    let refused = |config: TransformerXl, key: &str, expected: &str| {
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains(&format!("config `{key}`: expected {expected}")), "{error}");
    };
    refused(TransformerXl { slides: true, ..rate() }, "slides", "false with memory_tokens");
    refused(TransformerXl { valve_heads: 3, ..rate() }, "valve_heads", "0 or a divisor of d_model = 8");
    refused(TransformerXl { valve_heads: 2, ..trxl() }, "valve_heads", "0 where there are no memory_tokens");
    refused(TransformerXl { d_model: 9, ..rmt() }, "d_model", "an even width");
    refused(TransformerXl { memory_tokens: 1 << 20, ..rmt() }, "memory_tokens", "0 to 65536");
    refused(TransformerXl { cache_tokens: 1 << 40, ..trxl() }, "cache_tokens", "0 to 1048576");
    refused(
        TransformerXl { cache_tokens: 1 << 20, d_model: 1 << 10, ..trxl() },
        "cache_tokens",
        "at most 67108864 / d_model tokens",
    );
    refused(TransformerXl { memory_tokens: 1 << 16, ..rmt() }, "window", "at most 2147483648 numbers");
    refused(TransformerXl { unroll: 4096, layers: 1000, ..rmt() }, "unroll", "at most 65536 layers");
    refused(TransformerXl { dropout: 1.0, ..rmt() }, "dropout", "0 or more and below 1");
}
