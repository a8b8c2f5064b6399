//! Decision Mamba: sessions against whole windows, rows that do not disturb each other, the published
//! behaviours, and what is refused.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use elmur_base::{Field, Values};
use elmur_engine::{AdamW, DType, Pool, Store};
use elmur_model::baselines::{DMamba, DMambaCompat};
use elmur_model::ends::*;
use elmur_model::session::{Seen, Session};
use elmur_model::tensors::TensorData;
use elmur_model::window::{Begin, TrainSettings, WindowProgram, evaluation_graph, training_graph};
use elmur_model::{Architecture, Group, PolicyConfig, init, presets};

use common::random;

fn small(window: usize) -> DMamba {
    DMamba {
        observation: vec![Encoder::Vector { dim: 3, bytes: false }],
        action: Action::Categorical { count: 5 },
        d_model: 10,
        layers: 2,
        window,
        dropout: 0.1,
        unroll: 1,
        state: 5,
        conv: 4,
        expand: 2,
        action_tanh: true,
        compat: DMambaCompat::default(),
    }
}

/// The windows of the published code, with its compatibility flag.
fn windowed(window: usize) -> DMamba {
    DMamba { compat: DMambaCompat { mamba_window: true, ..DMambaCompat::default() }, ..small(window) }
}

/// What rows see and do: row b at step t that of number t + `offsets[b]`.
struct Episode {
    observations: Vec<f32>,
    returns: Vec<f32>,
    actions: Vec<i32>,
}

impl Episode {
    fn new(steps: usize) -> Self {
        let actions = (0..steps).map(|i| (i * 7 % 5) as i32).collect();
        Self { observations: random(3 * steps, 1), returns: random(steps, 2), actions }
    }

    /// Head outputs of all rows at every step, one row after the other.
    fn play(&self, session: &mut Session, steps: std::ops::Range<usize>, offsets: &[usize]) -> Vec<Vec<f32>> {
        let rows: Vec<usize> = (0..offsets.len()).collect();
        let step = |t: usize| {
            let at: Vec<usize> = offsets.iter().map(|offset| t + offset).collect();
            let observation: Vec<f32> =
                at.iter().flat_map(|i| self.observations[3 * i..3 * i + 3].to_vec()).collect();
            let returns: Vec<f32> = at.iter().map(|i| self.returns[*i]).collect();
            let actions: Vec<i32> = at.iter().map(|i| self.actions[*i]).collect();
            let seen = Seen { observation: Values::floats(&observation), returns: Some(&returns) };
            let outputs = session.forward(&rows, seen).unwrap().to_vec();
            session.commit(&rows, Values::ints(&actions)).unwrap();
            outputs
        };
        steps.map(step).collect()
    }
}

fn session(config: &DMamba, params: &Store, rows: usize) -> Session {
    Session::new(&PolicyConfig::DMamba(config.clone()), params, rows, &Pool::new(1)).unwrap()
}

#[test]
fn a_session_of_a_thousand_steps_equals_one_window_of_a_thousand_steps() {
    let (config, steps) = (small(1000), 1000);
    let params = init::parameters(&config, 3).unwrap();
    let episode = Episode::new(steps);
    let outputs = episode.play(&mut session(&config, &params, 1), 0..steps, &[0]);
    let built = evaluation_graph(&config, 1, DType::F32, Begin::Fresh).unwrap();
    let state = Store::new();
    state.declare_states(&built.graph).unwrap();
    let mut program = WindowProgram::new(&built, &config, &Pool::new(2), &[&state, &params]).unwrap();
    program.program.set("observation", &episode.observations).unwrap();
    program.program.set("returns", &episode.returns).unwrap();
    program.program.set("action", &episode.actions).unwrap();
    program.run(0).unwrap();
    let logits = program.program.get::<f32>("logits").unwrap();
    let largest = logits.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    for (t, (got, want)) in outputs.iter().zip(logits.chunks_exact(5)).enumerate() {
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= 1e-5 * largest, "step {t}: {got}, want {want}");
        }
    }
}

#[test]
fn rows_that_are_reset_moved_or_restored_go_on_bit_for_bit() {
    for config in [small(4), windowed(4)] {
        let params = init::parameters(&config, 4).unwrap();
        let mut session = session(&config, &params, 3);
        let episode = Episode::new(300);
        let straight = episode.play(&mut session, 0..30, &[0, 100, 200]);

        // Row 1 starts anew at steps 5 and 13; the last time with what it saw at first.
        session.reset(&[(0, 1), (1, 2), (2, 3)]).unwrap();
        let mut outputs = episode.play(&mut session, 0..5, &[0, 100, 200]);
        session.reset(&[(1, 77)]).unwrap();
        outputs.extend(episode.play(&mut session, 5..13, &[0, 100, 200]));
        session.reset(&[(1, 2)]).unwrap();
        outputs.extend(episode.play(&mut session, 13..30, &[0, 87, 200]));
        for (a, b) in straight.iter().zip(&outputs) {
            assert_eq!((&a[..5], &a[10..]), (&b[..5], &b[10..]));
        }
        for i in 0..17 {
            assert_eq!(straight[i][5..10], outputs[13 + i][5..10], "row 1, {i} steps after its reset");
        }

        session.reset(&[(0, 1), (1, 2), (2, 3)]).unwrap();
        let turned = episode.play(&mut session, 0..20, &[200, 0, 100]);
        for (a, b) in straight.iter().zip(&turned) {
            assert_eq!([&a[10..], &a[..10]].concat(), *b);
        }

        session.reset(&[(0, 1), (1, 2), (2, 3)]).unwrap();
        episode.play(&mut session, 0..7, &[0, 100, 200]);
        let snapshot = session.snapshot(&[0, 1, 2]).unwrap();
        episode.play(&mut session, 7..12, &[3, 50, 60]);
        session.restore(&[0, 1, 2], &snapshot).unwrap();
        assert_eq!(episode.play(&mut session, 7..30, &[0, 100, 200]), straight[7..]);
    }
}

#[test]
fn a_published_window_forgets_all_when_it_is_full() {
    let (steps, window) = (11, 4);
    let params = init::parameters(&small(window), 5).unwrap();
    let episode = Episode::new(steps);
    let forgetful = episode.play(&mut session(&windowed(window), &params, 1), 0..steps, &[0]);
    let mut carrying = session(&small(window), &params, 1);
    for (t, got) in forgetful.iter().enumerate() {
        if t % window == 0 {
            carrying.reset(&[(0, 1)]).unwrap();
        }
        let want = &episode.play(&mut carrying, t..t + 1, &[0])[0];
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= 1e-5, "step {t}: {got}, want {want}");
        }
    }
}

#[test]
fn a_recording_session_shows_the_states() {
    let config = small(4);
    let params = init::parameters(&config, 3).unwrap();
    let policy = PolicyConfig::DMamba(config);
    let mut session = Session::recording(&policy, &params, 2, &Pool::new(1)).unwrap();
    Episode::new(100).play(&mut session, 0..3, &[0, 50]);
    let TensorData::F32(state) = session.state(&DMamba::ssm_state(1), &[0, 1]).unwrap() else {
        panic!("floats")
    };
    assert_eq!(state.len(), 2 * 5 * 20);
    let records = session.take_records();
    assert_eq!(records.len(), 3);
    assert!(records.iter().all(|record| record.taps.contains_key("state.0")));
}

fn settings() -> TrainSettings {
    TrainSettings {
        batch: 2,
        label_smoothing: 0.0,
        ties: false,
        optimizer: AdamW { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.1, lr_scale: 1.0 },
        clip: 1e9,
        dtype: DType::F64,
        export_gradients: true,
        dropout: false,
        table: None,
        augment: Default::default(),
        bytes: Vec::new(),
        weights: None,
    }
}

/// What stands in padded steps after the last real one changes neither the loss nor any gradient.
#[test]
fn padding_changes_nothing() {
    let config = DMamba { unroll: 2, ..small(3) };
    let run = |padding: f64| {
        let built = training_graph(&config, &settings(), Begin::Fresh).unwrap();
        let store = Store::new();
        store.declare(&built.graph).unwrap();
        init::initialise(&built, &store, 3).unwrap();
        let mut train = WindowProgram::new(&built, &config, &Pool::new(1), &[&store]).unwrap();
        let steps = 2 * 2 * 3;
        // The last two steps of the second window, [windows, rows, steps].
        let padded = |i: usize| i >= 6 && !i.is_multiple_of(3);
        let numbers = |each: usize, seed: u64| -> Vec<f64> {
            let data = random(steps * each, seed).into_iter().map(f64::from);
            data.enumerate().map(|(i, x)| if padded(i / each) { padding } else { x }).collect()
        };
        let p = &mut train.program;
        p.set("observation", &numbers(3, 1)).unwrap();
        p.set("returns", &numbers(1, 2)).unwrap();
        let actions: Vec<i32> = (0..steps).map(|i| if padded(i) { 5 } else { (i % 5) as i32 }).collect();
        p.set("action", &actions).unwrap();
        let target = |i: usize| if padded(i) { Field::IGNORED } else { (i % 5) as i64 };
        p.set("targets", &(0..steps).map(target).collect::<Vec<_>>()).unwrap();
        train.set_rates(0.0, 0).unwrap();
        train.run(0).unwrap();
        let get = |name: &str| train.program.get::<f64>(name).unwrap().to_vec();
        ["loss", "gradient_norm", "grad.layers.0.mixer.a_log", "grad.encoder.weight"].map(get)
    };
    assert_eq!(run(0.0), run(7.0));
}

#[test]
fn states_begin_with_the_rates_and_step_sizes_of_mamba() {
    let tmaze = [Encoder::Vector { dim: 4, bytes: false }];
    let config = presets::dmamba(tmaze.to_vec(), Action::Categorical { count: 4 }, 30);
    let params = init::parameters(&config, 0).unwrap();
    let get = |name: &str| params.get::<f32>(name).unwrap();
    assert_eq!(get("layers.1.mixer.a_log")[..3], [0.0, 2f32.ln(), 3f32.ln()]);
    assert!(get("layers.0.mixer.d").iter().all(|x| *x == 1.0));
    let sizes: Vec<f32> = get("layers.0.mixer.dt.bias").iter().map(|x| x.exp().ln_1p()).collect();
    assert!(sizes.iter().all(|t| (0.000_999..0.100_1).contains(t)), "{sizes:?}");
    let bound = |name: &str| get(name).iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let close = |name: &str, want: f32| {
        let found = bound(name);
        assert!((0.9 * want..=want).contains(&found), "{name}: {found}, want {want}");
    };
    close("layers.0.mixer.dt.weight", 0.5);
    close("layers.0.mixer.conv.weight", 0.5);
    close("layers.0.mixer.in.weight", 0.125);
    close("layers.1.ffn.down.weight", 1.0 / 16.0);
    // As many as can influence the output of the published model for T-Maze.
    let names = params.names();
    let count: usize = names.iter().map(|name| params.ty(name).unwrap().len()).sum();
    assert_eq!(count, 133_120);
}

#[test]
fn the_published_initialisation_flattens_linear_maps_and_decays_everything() {
    let config = DMamba {
        compat: DMambaCompat { flat_mamba_init: true, ..DMambaCompat::default() },
        ..presets::dmamba(small(1).observation, small(1).action, 30)
    };
    let params = init::parameters(&config, 0).unwrap();
    let get = |name: &str| params.get::<f32>(name).unwrap();
    for name in ["encoder.weight", "head.weight", "action_encoder.0.table", "layers.0.mixer.dt.weight"] {
        let data = get(name);
        let mean = data.iter().map(|x| x * x).sum::<f32>() / data.len() as f32;
        assert!((0.015..0.025).contains(&mean.sqrt()), "{name}: {}", mean.sqrt());
    }
    for name in ["encoder.bias", "return_encoder.bias", "layers.1.mixer.dt.bias", "layers.0.ffn.up.bias"] {
        assert!(get(name).iter().all(|x| *x == 0.0), "{name}");
    }
    assert!(get("layers.0.mixer.conv.bias").iter().any(|x| *x != 0.0));
    assert_eq!(get("layers.1.mixer.a_log")[1], 2f32.ln());
    let decays = |config: &DMamba, name: &str| config.group(name).decays;
    for name in ["layers.0.mixer.a_log", "layers.1.mixer.d"] {
        assert!(decays(&config, name) && !decays(&small(1), name));
    }
    assert_eq!(small(1).group("layers.0.mixer.dt.bias"), Group::default());
}

#[test]
fn settings_out_of_bounds_are_refused_by_name() {
    let error = |change: &dyn Fn(&mut DMamba)| {
        let mut config = small(4);
        change(&mut config);
        config.validate().unwrap_err().to_string()
    };
    assert_eq!(error(&|c| c.state = 65), "config `state`: expected 1 to 64, got 65");
    assert_eq!(error(&|c| c.conv = 1), "config `conv`: expected 2 to 64, got 1");
    assert_eq!(error(&|c| c.expand = 0), "config `expand`: expected 1 to 16, got 0");
    assert_eq!(error(&|c| c.dropout = 1.0), "config `dropout`: expected 0 or more and below 1, got 1");
    for (key, change) in [
        ("window", (|c| c.window = 1 << 40) as fn(&mut DMamba)),
        ("window", |c| (c.window, c.d_model) = (1 << 20, 1 << 12)),
        ("d_model", |c| c.d_model = usize::MAX),
        ("d_model", |c| (c.d_model, c.layers) = (1 << 16, 64)),
        ("unroll", |c| (c.unroll, c.layers) = (4096, 1024)),
    ] {
        let error = error(&change);
        assert!(error.contains(&format!("config `{key}`")), "{key}: {error}");
    }
}
