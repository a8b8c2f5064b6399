//! What must hold of every policy, whatever it carries: an episode is the same in any row, beside any others, after
//! any reset, and when it is saved and continued elsewhere; padded steps teach nothing.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use elmur_base::{Field, Values};
use elmur_engine::{AdamW, DType, Pool, Store};
use elmur_model::baselines::{
    Cql, CqlObjective, DMamba, DMambaCompat, Denoiser, Diffusion, DiffusionSampler, LstmCompat,
    TransformerXl, TransformerXlCompat, Tt, TtPlan,
};
use elmur_model::ends::{Action, Encoder};
use elmur_model::session::{Seen, Session};
use elmur_model::window::{Begin, TrainSettings, WindowProgram, training_graph};
use elmur_model::{PolicyConfig, Snapshot, init, presets};

use common::random;

/// Numbers of an observation.
const SEEN: usize = 3;

/// Steps of a window, where the policy has windows.
const WINDOW: usize = 4;

fn seen() -> Vec<Encoder> {
    vec![Encoder::Vector { dim: SEEN, bytes: false }]
}

fn choice() -> Action {
    Action::Categorical { count: 5 }
}

fn numbers() -> Action {
    Action::Continuous { dim: 2, tanh: false }
}

fn transformer() -> TransformerXl {
    let base = presets::dt(seen(), choice(), WINDOW);
    TransformerXl { d_model: 8, heads: 3, d_head: 4, d_ff: Some(12), layers: 2, ..base }
}

fn dmamba() -> DMamba {
    DMamba { d_model: 9, state: 6, ..presets::dmamba(seen(), choice(), WINDOW) }
}

fn cql(lstm: Option<usize>) -> Cql {
    Cql { d_model: 8, lstm, lstm_layers: 2, hidden: vec![9], ..presets::cql(seen(), choice(), WINDOW) }
}

fn tt(action: Action) -> Tt {
    let plan = TtPlan { context: 2, beam: 2, expansion: 2, horizon: 2, action_cdf: 0.1 };
    Tt { d_model: 8, heads: 2, layers: 1, window: 4, bins: 5, plan, ..presets::tt(seen(), action) }
}

fn diffusion(sampler: DiffusionSampler) -> Diffusion {
    Diffusion {
        d_model: 8,
        pred_horizon: 8,
        act_horizon: 3,
        diffusion_steps: 6,
        step_embed: 8,
        denoiser: Denoiser::Unet { widths: vec![8, 16], kernel: 3, groups: 4 },
        sampler,
        ..presets::diffusion(seen(), numbers())
    }
}

/// Every kind of policy, in every form that carries something else.
fn policies() -> Vec<(&'static str, PolicyConfig)> {
    let random_hidden = LstmCompat { random_hidden: true };
    let mut lstm = presets::bc_lstm(seen(), choice(), WINDOW);
    (lstm.d_model, lstm.hidden, lstm.layers) = (8, 11, 2);
    let mut random_lstm = lstm.clone();
    random_lstm.compat = random_hidden;
    let mut mlp = presets::bc_mlp(seen(), choice(), WINDOW);
    (mlp.d_model, mlp.hidden) = (8, vec![11, 7]);
    let mut actor = presets::cql_continuous(seen(), numbers(), WINDOW);
    (actor.d_model, actor.hidden, actor.candidates) = (8, vec![12, 12], 3);
    let segments = TransformerXl { slides: false, ..transformer() };
    let wrapped = TransformerXlCompat { wrapped_memory_distances: true, ..TransformerXlCompat::default() };
    let rate = TransformerXl {
        memory_tokens: 3,
        cache_tokens: 8,
        valve_heads: 2,
        d_ff: None,
        unroll: 2,
        ..segments.clone()
    };
    let mamba_window = DMambaCompat { mamba_window: true, ..DMambaCompat::default() };
    let published = CqlObjective::Published;
    vec![
        ("elmur", common::small().into()),
        ("bc-mlp", PolicyConfig::BcMlp(mlp)),
        ("bc-lstm", PolicyConfig::BcLstm(lstm)),
        ("bc-lstm, random states", PolicyConfig::BcLstm(random_lstm)),
        ("cql", PolicyConfig::Cql(cql(None))),
        ("cql-lstm", PolicyConfig::Cql(cql(Some(6)))),
        (
            "published cql-lstm",
            PolicyConfig::Cql(Cql { objective: published, compat: random_hidden, ..cql(Some(6)) }),
        ),
        ("cql-continuous", PolicyConfig::CqlContinuous(actor)),
        ("dt", PolicyConfig::TransformerXl(transformer())),
        ("trxl", PolicyConfig::TransformerXl(TransformerXl { cache_tokens: 19, ..segments.clone() })),
        ("rmt", PolicyConfig::TransformerXl(TransformerXl { memory_tokens: 2, ..segments })),
        ("rate", PolicyConfig::TransformerXl(rate.clone())),
        ("wrapped rate", PolicyConfig::TransformerXl(TransformerXl { compat: wrapped, ..rate })),
        ("dmamba", PolicyConfig::DMamba(dmamba())),
        ("dmamba with windows", PolicyConfig::DMamba(DMamba { compat: mamba_window, ..dmamba() })),
        ("diffusion", PolicyConfig::Diffusion(diffusion(DiffusionSampler::Ddim(3)))),
        ("diffusion, all steps", PolicyConfig::Diffusion(diffusion(DiffusionSampler::Ddpm))),
        ("tt", PolicyConfig::Tt(tt(choice()))),
        ("tt of numbers", PolicyConfig::Tt(tt(numbers()))),
    ]
}

/// Random parameters; those of a policy that plans prefer something.
fn params(policy: &PolicyConfig) -> Store {
    let params = init::parameters(policy.architecture(), 3).unwrap();
    if let PolicyConfig::Tt(_) = policy {
        for name in params.names().into_iter().filter(|name| !name.starts_with("bins")) {
            let len = params.get::<f32>(&name).unwrap().len();
            params.set(&name, &random(len, len as u64)).unwrap();
        }
    }
    params
}

/// A session of a policy, and what its episodes show: moment `t` of an episode is the same in every row.
struct Stage {
    session: Session,
    action: Action,
}

impl Stage {
    fn new(policy: &PolicyConfig, rows: usize) -> Self {
        let session = Session::new(policy, &params(policy), rows, &Pool::new(1)).unwrap();
        Self { session, action: policy.architecture().ends().action.clone() }
    }

    /// Begins these episodes in these rows.
    fn begin(&mut self, episodes: &[(usize, u64)]) {
        self.session.reset(episodes).unwrap();
    }

    /// What the policy says at the next moment of an episode in each of some rows.
    fn act(&mut self, rows: &[(usize, u64)]) -> Vec<Vec<f32>> {
        let moment = |(row, episode): &(usize, u64)| 10_000 * episode + self.session.times()[*row];
        let moments: Vec<u64> = rows.iter().map(moment).collect();
        let observation: Vec<f32> = moments.iter().flat_map(|m| random(SEEN, *m)).collect();
        // Every step pays 0.25.
        let returns: Vec<f32> = moments.iter().map(|m| 300.0 - 0.25 * (m % 10_000) as f32).collect();
        let list: Vec<usize> = rows.iter().map(|(row, _)| *row).collect();
        let seen = Seen { observation: Values::floats(&observation), returns: Some(&returns) };
        let outputs = self.session.forward(&list, seen).unwrap();
        let outputs = outputs.chunks(self.action.outputs()).map(<[f32]>::to_vec).collect();
        if self.action.is_discrete() {
            let taken: Vec<i32> = moments.iter().map(|m| (m * 7 % 5) as i32).collect();
            self.session.commit(&list, Values::ints(&taken)).unwrap();
        } else {
            let taken: Vec<f32> = moments.iter().flat_map(|m| random(2, m + 5000)).collect();
            self.session.commit(&list, Values::floats(&taken)).unwrap();
        }
        outputs
    }

    /// The first `steps` steps of an episode, alone in a row.
    fn alone(&mut self, row: usize, episode: u64, steps: usize) -> Vec<Vec<f32>> {
        self.begin(&[(row, episode)]);
        (0..steps).map(|_| self.act(&[(row, episode)]).remove(0)).collect()
    }

    fn time(&self, row: usize) -> usize {
        self.session.times()[row] as usize
    }
}

#[test]
fn an_episode_is_the_same_in_any_row_and_beside_any_others() {
    for (name, policy) in policies() {
        let mut stage = Stage::new(&policy, 3);
        let alone: Vec<_> = (0..3).map(|episode| stage.alone(1, episode, 19)).collect();
        assert_ne!(alone[0], alone[1], "{name}");
        // Rows turned, all together.
        let turned = [(2, 0), (0, 1), (1, 2)];
        stage.begin(&turned);
        for t in 0..19 {
            for ((row, episode), got) in turned.iter().zip(stage.act(&turned)) {
                assert_eq!(got, alone[*episode as usize][t], "{name}, row {row}, step {t}");
            }
        }
        // Rows that leave out steps fall behind, in changing company.
        stage.begin(&turned);
        for round in 0..19 {
            let list: Vec<(usize, u64)> =
                turned.iter().copied().filter(|(row, _)| (round + row) % 3 != 0).rev().collect();
            let at: Vec<usize> = list.iter().map(|(row, _)| stage.time(*row)).collect();
            for (((_, episode), t), got) in list.iter().zip(at).zip(stage.act(&list)) {
                assert_eq!(got, alone[*episode as usize][t], "{name}, episode {episode}, step {t}");
            }
        }
    }
}

#[test]
fn reset_row_forgets_only_that_row() {
    for (name, policy) in policies() {
        let mut stage = Stage::new(&policy, 3);
        let alone: Vec<_> = (0..4).map(|episode| stage.alone(1, episode, 16)).collect();
        let mut list = [(0, 0), (1, 1), (2, 2)];
        stage.begin(&list);
        for t in 0..16 {
            // In the middle of a window and of a plan, and at the end of one.
            if t == 6 || t == 8 {
                list[1].1 = 3;
                stage.begin(&list[1..2]);
            }
            let at = list.map(|(row, _)| stage.time(row));
            for (((row, episode), at), got) in list.iter().zip(at).zip(stage.act(&list)) {
                assert_eq!(got, alone[*episode as usize][at], "{name}, row {row}, step {t}");
            }
        }
        assert_eq!(stage.session.times(), [16, 8, 16], "{name}");
    }
}

#[test]
fn a_snapshot_goes_on_bit_for_bit_in_another_session() {
    for (name, policy) in policies() {
        let mut one = Stage::new(&policy, 2);
        for steps in [1, 2, 4, 7, 13] {
            one.begin(&[(0, 0), (1, 1)]);
            (0..steps).for_each(|_| drop(one.act(&[(0, 0), (1, 1)])));
            let bytes = one.session.snapshot(&[0, 1]).unwrap().to_bytes().unwrap();
            let mut other = Stage::new(&policy, 2);
            other.session.restore(&[1, 0], &Snapshot::from_bytes(&bytes).unwrap()).unwrap();
            for t in steps..steps + 10 {
                let want = one.act(&[(0, 0), (1, 1)]);
                assert_eq!(other.act(&[(1, 0), (0, 1)]), want, "{name}, from {steps}, step {t}");
            }
        }
    }
}

#[test]
fn a_recording_session_acts_the_same_and_tells_every_step() {
    for (name, policy) in policies() {
        let mut silent = Stage::new(&policy, 2);
        let session = Session::recording(&policy, &params(&policy), 2, &Pool::new(1)).unwrap();
        let mut telling = Stage { session, action: silent.action.clone() };
        let rows = [(0, 3), (1, 4)];
        silent.begin(&rows);
        telling.begin(&rows);
        for t in 0..9 {
            assert_eq!(silent.act(&rows), telling.act(&rows), "{name}, step {t}");
        }
        let records = telling.session.take_records();
        let times: Vec<u64> = records.iter().flat_map(|record| record.times.clone()).collect();
        assert_eq!(times, (0..9).flat_map(|t| [t, t]).collect::<Vec<_>>(), "{name}");
        assert!(silent.session.take_records().is_empty() && telling.session.take_records().is_empty());
    }
}

/// What a row carries is all that there is of an episode, however long it is.
#[test]
fn a_thousand_steps_are_the_same_when_handed_from_session_to_session() {
    for (name, policy) in policies() {
        let mut whole = Stage::new(&policy, 1);
        let mut parts = [Stage::new(&policy, 1), Stage::new(&policy, 1)];
        whole.begin(&[(0, 5)]);
        parts[0].begin(&[(0, 5)]);
        let (mut size, mut holder) = (None, 0);
        for t in 0..1000 {
            if t % 37 == 36 {
                let snapshot = parts[holder].session.snapshot(&[0]).unwrap();
                // Windows that fill up and caches that grow are full by now.
                if t > 100 {
                    let numbers: usize =
                        snapshot.tensors().values().map(|x| x.shape.iter().product::<usize>()).sum();
                    assert_eq!(*size.get_or_insert(numbers), numbers, "{name}, step {t}");
                }
                holder = 1 - holder;
                parts[holder].session.restore(&[0], &snapshot).unwrap();
            }
            assert_eq!(parts[holder].act(&[(0, 5)]), whole.act(&[(0, 5)]), "{name}, step {t}");
        }
    }
}

/// A plan is made from the context alone: after a thousand steps it is that of a session that saw only those.
/// Where unlikely actions are left out altogether, no random number decides.
#[test]
fn plans_after_a_thousand_steps_are_those_from_the_last_transitions() {
    let base = tt(choice());
    let plan = TtPlan { action_cdf: 0.999, ..base.plan };
    let policy = PolicyConfig::Tt(Tt { plan, ..base });
    let mut long = Stage::new(&policy, 1);
    long.begin(&[(0, 5)]);
    let outputs: Vec<_> = (0..1000).map(|_| long.act(&[(0, 5)]).remove(0)).collect();
    for last in [40, 998, 999] {
        let mut short = Session::new(&policy, &params(&policy), 1, &Pool::new(1)).unwrap();
        let mut got = Vec::new();
        for t in last - plan.context..=last {
            let moment = 50_000 + t as u64;
            let (observation, returns) = (random(SEEN, moment), [300.0 - 0.25 * t as f32]);
            let seen = Seen { observation: Values::floats(&observation), returns: Some(&returns) };
            got = short.forward(&[0], seen).unwrap().to_vec();
            short.commit(&[0], Values::ints(&[(moment * 7 % 5) as i32])).unwrap();
        }
        assert_eq!(got, outputs[last], "step {last}");
    }
    assert!(outputs.iter().any(|plan| *plan != outputs[0]), "plans differ");
}

/// What stands in padded steps after the last real one changes neither the loss nor any gradient. (Diffusion
/// Policy learns whole chunks, whose padded actions are noised like the others: see `tests/diffusion.rs`.)
#[test]
fn padded_steps_teach_nothing() {
    let others = policies().into_iter().filter(|(_, policy)| !matches!(policy, PolicyConfig::Diffusion(_)));
    for (name, mut policy) in others {
        // Padded tokens would be routed to experts, and so be counted.
        if let PolicyConfig::Elmur(elmur) = &mut policy {
            elmur.ffn = elmur_model::elmur::config::Ffn::SwiGlu { d_ff: 8 };
        }
        let (zeros, sevens, seen) =
            (gradients(&policy, 0.0, 3), gradients(&policy, 7.0, 3), { gradients(&policy, 7.0, 4) });
        assert!(zeros.len() > 4 && zeros[0].1[0].is_finite(), "{name}: {zeros:?}");
        assert_eq!(zeros, sevens, "{name}");
        assert_ne!(zeros, seen, "{name}: the fourth step");
    }
}

/// Loss and gradients of every parameter in a batch of two crops, of which the second has `real` steps and is
/// padded with `padding`.
fn gradients(policy: &PolicyConfig, padding: f64, real: usize) -> Vec<(String, Vec<f64>)> {
    const ROWS: usize = 2;
    let architecture = policy.architecture();
    let window = architecture.window();
    let settings = TrainSettings {
        batch: ROWS,
        label_smoothing: 0.0,
        ties: false,
        optimizer: AdamW::default(),
        clip: 1e9,
        dtype: DType::F64,
        export_gradients: true,
        dropout: false,
        table: None,
        augment: Default::default(),
        bytes: Vec::new(),
        weights: None,
    };
    let built = training_graph(architecture, &settings, Begin::Fresh).unwrap();
    let store = Store::new();
    store.declare(&built.graph).unwrap();
    init::initialise(&built, &store, 3).unwrap();
    if built.graph.states().any(|(name, _)| name == "rng") {
        store.set("rng", &[5i64, 0]).unwrap();
    }
    let mut program = WindowProgram::new(&built, architecture, &Pool::new(1), &[&store]).unwrap();
    let steps = window.unroll * ROWS * window.steps;
    // Steps are [windows, rows, steps]; the crop's step and whether it is real.
    let place =
        |i: usize| (i / window.steps % ROWS, i / window.steps / ROWS * window.steps + i % window.steps);
    let exists = |i: usize| place(i).0 == 0 || place(i).1 < real;
    for (name, field) in program.fields().to_vec() {
        let ty = program.program.input_type(&name).unwrap();
        let each = ty.len() / steps;
        let dtype = ty.dtype;
        let flags = |of: &dyn Fn(usize) -> bool| (0..steps).map(of).collect::<Vec<_>>();
        let program = &mut program.program;
        match (field, dtype) {
            (Field::Terminated, _) => program.set(&name, &vec![false; steps]).unwrap(),
            (Field::Imitate | Field::Exists | Field::KnownNext, _) => {
                program.set(&name, &flags(&exists)).unwrap();
            }
            (_, DType::F64) => {
                let data = random(steps * each, each as u64).into_iter().map(f64::from).enumerate();
                let data: Vec<f64> = data.map(|(i, x)| if exists(i / each) { x } else { padding }).collect();
                program.set(&name, &data).unwrap();
            }
            (Field::Target, DType::I64) => {
                let target = |i: usize| if exists(i) { (i % 5) as i64 } else { Field::IGNORED };
                program.set(&name, &(0..steps).map(target).collect::<Vec<_>>()).unwrap();
            }
            (Field::Action, DType::I32) => {
                let action = |i: usize| if exists(i) { (i % 5) as i32 } else { 5 };
                program.set(&name, &(0..steps).map(action).collect::<Vec<_>>()).unwrap();
            }
            other => panic!("{other:?}"),
        }
    }
    program.set_rates(0.0, 0).unwrap();
    program.run(0).unwrap();
    let get = |name: String| {
        let data = program.program.get::<f64>(&name).unwrap().to_vec();
        (name, data)
    };
    let named = built.params.keys().map(|name| format!("grad.{name}"));
    let known = named.filter(|name| program.program.output_type(name).is_ok());
    ["loss".to_owned()].into_iter().chain(known).map(get).collect()
}
