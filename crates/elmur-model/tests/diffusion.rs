//! Diffusion Policy: what it refuses, how its plans are made, and that it learns.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use elmur_base::{Field, Values, ValuesMut};
use elmur_engine::rng::Rng;
use elmur_engine::{AdamW, DType, Pool, Store};
use elmur_model::baselines::{Denoiser, Diffusion, DiffusionCompat, DiffusionSampler};
use elmur_model::ends::*;
use elmur_model::session::{Choose, Session};
use elmur_model::window::{
    Begin, TrainSettings, WindowProgram, evaluation_graph, parameter_graph, training_graph,
};
use elmur_model::{Architecture, PolicyConfig, Snapshot, init};

use common::random;

fn unet(widths: &[usize]) -> Denoiser {
    Denoiser::Unet { widths: widths.to_vec(), kernel: 3, groups: 4 }
}

/// A small policy of one number seen and one done.
fn small() -> Diffusion {
    Diffusion {
        observation: vec![Encoder::Vector { dim: 1, bytes: false }],
        action: Action::Continuous { dim: 1, tanh: false },
        d_model: 8,
        obs_horizon: 2,
        pred_horizon: 8,
        act_horizon: 3,
        diffusion_steps: 20,
        step_embed: 8,
        denoiser: unet(&[8, 16]),
        sampler: DiffusionSampler::Ddim(5),
        compat: DiffusionCompat::default(),
    }
}

/// [`small`] with so many numbers per action that an untrained network does not drive all of them to their ends.
fn wide() -> Diffusion {
    Diffusion { action: Action::Continuous { dim: 6, tanh: false }, ..small() }
}

/// What makes settings wrong.
type Change = Box<dyn Fn(&mut Diffusion)>;

#[test]
fn settings_that_make_no_policy_are_refused_with_what_was_expected() {
    small().validate().unwrap();
    let refused: Vec<(&str, &str, Change)> = vec![
        ("diffusion_steps", "1 to 10000, got 0", Box::new(|c| c.diffusion_steps = 0)),
        ("pred_horizon", "a multiple of 4, as 3 levels halve it, got 6", {
            Box::new(|c| (c.pred_horizon, c.denoiser) = (6, unet(&[8, 8, 8])))
        }),
        ("denoiser.unet.widths", "multiples of the 4 groups, got 18", {
            Box::new(|c| c.denoiser = unet(&[8, 18]))
        }),
        ("denoiser.unet.widths", "a multiple of the last block's 8 groups, got 12", {
            Box::new(|c| c.denoiser = unet(&[12, 16]))
        }),
        ("denoiser.unet.widths", "1 to 16 widths of levels, got 0", Box::new(|c| c.denoiser = unet(&[]))),
        ("denoiser.unet.kernel", "an odd number of steps, got 4", {
            Box::new(|c| c.denoiser = Denoiser::Unet { widths: vec![8], kernel: 4, groups: 8 })
        }),
        (
            "denoiser.mlp.hidden",
            "1 to 64 widths",
            Box::new(|c| c.denoiser = Denoiser::Mlp { hidden: vec![] }),
        ),
        ("act_horizon", "1 to 7, the actions of a chunk from the current one on, got 8", {
            Box::new(|c| c.act_horizon = 8)
        }),
        ("act_horizon", "got 0", Box::new(|c| c.act_horizon = 0)),
        ("obs_horizon", "1 to 8, got 9", Box::new(|c| c.obs_horizon = 9)),
        ("obs_horizon", "1 to 8, got 0", Box::new(|c| c.obs_horizon = 0)),
        ("step_embed", "an even number from 4 to 1024, got 7", Box::new(|c| c.step_embed = 7)),
        ("sampler.ddim", "1 to the 20 steps of the diffusion, got 21", {
            Box::new(|c| c.sampler = DiffusionSampler::Ddim(21))
        }),
        ("sampler.ddim", "got 0", Box::new(|c| c.sampler = DiffusionSampler::Ddim(0))),
        ("action", "expected continuous actions", Box::new(|c| c.action = Action::Categorical { count: 3 })),
        ("observation", "at least 16 x 16 pixels", {
            Box::new(|c| {
                c.observation = vec![Encoder::Image { channels: 1, height: 8, width: 64, bytes: true }];
            })
        }),
        // Hostile sizes are found out without memory.
        ("denoiser.unet.widths", "at most", Box::new(|c| c.denoiser = unet(&[1 << 20, 1 << 20]))),
        ("denoiser.mlp.hidden", "at most", {
            Box::new(|c| c.denoiser = Denoiser::Mlp { hidden: vec![1 << 20, 1 << 20] })
        }),
    ];
    for (key, expected, change) in refused {
        let mut config = small();
        change(&mut config);
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains(&format!("`{key}`")) && error.contains(expected), "{key}: {error}");
    }
}

#[test]
fn settings_are_written_in_few_words() {
    let text = serde_json::to_value(PolicyConfig::Diffusion(small())).unwrap();
    assert_eq!(text["kind"], "diffusion");
    assert_eq!(text["sampler"].to_string(), r#"{"ddim":5}"#);
    let mut changed = text.clone();
    changed["sampler"] = "ddpm".into();
    changed["denoiser"] = serde_json::json!({"unet": {"widths": [16, 32]}});
    let PolicyConfig::Diffusion(read) = serde_json::from_value(changed).unwrap() else { panic!("kind") };
    assert_eq!(read.sampler, DiffusionSampler::Ddpm);
    assert_eq!(read.denoiser, Denoiser::Unet { widths: vec![16, 32], kernel: 5, groups: 8 });
    let PolicyConfig::Diffusion(same) = serde_json::from_value(text).unwrap() else { panic!("kind") };
    assert_eq!(same, small());
}

/// What is added up from settings is what the graph declares, with every kind of observation and denoiser.
#[test]
fn parameters_are_averaged_but_statistics_are_not() {
    let mut config = small();
    config.observation.push(Encoder::Image { channels: 3, height: 16, width: 17, bytes: true });
    config
        .observation
        .push(Encoder::Categorical { sizes: vec![3, 4], encoding: CategoricalEncoding::OneHot });
    for (denoiser, raw_weights) in
        [(unet(&[8, 16, 8]), false), (unet(&[8]), true), (Denoiser::Mlp { hidden: vec![12, 10] }, false)]
    {
        (config.denoiser, config.compat.raw_weights) = (denoiser, raw_weights);
        let built = parameter_graph(&config, DType::F32).unwrap();
        let statistics = ["action.greatest", "action.least", "encoder.0.deviation", "encoder.0.mean"];
        assert_eq!(built.statistics.keys().collect::<Vec<_>>(), statistics);
        let averaged = built.params.keys().filter(|name| name.starts_with("ema.")).count();
        let trained = built.params.len() - averaged - statistics.len();
        assert_eq!(averaged, if raw_weights { 0 } else { trained });
    }
}

/// Actions of some steps of all rows, in the order of `rows`, from observations of row and step.
fn play(
    session: &mut Session,
    rows: &[usize],
    steps: std::ops::Range<usize>,
    ids: &[usize],
) -> Vec<Vec<f32>> {
    steps
        .map(|t| {
            let seen: Vec<f32> = ids.iter().map(|id| ((id * 7 + t * 3) % 11) as f32 / 5.0 - 1.0).collect();
            let mut actions = vec![0.0; rows.len() * session.action_widths().floats];
            let to = ValuesMut::floats(&mut actions);
            session.select_action(rows, Values::floats(&seen).into(), Choose::Greedy, to).unwrap();
            actions
        })
        .collect()
}

fn session(config: &Diffusion, params: &Store, rows: usize) -> Session {
    Session::new(&PolicyConfig::Diffusion(config.clone()), params, rows, &Pool::new(1)).unwrap()
}

fn seeds(rows: usize, first: u64) -> Vec<(usize, u64)> {
    (0..rows).map(|row| (row, first + row as u64)).collect()
}

/// Largest difference of two lists of actions.
fn apart(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    a.iter().flatten().zip(b.iter().flatten()).fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}

#[test]
fn a_seed_is_an_episode_whatever_other_rows_do() {
    for sampler in [DiffusionSampler::Ddim(4), DiffusionSampler::Ddpm] {
        let config = Diffusion { sampler, ..small() };
        let params = init::parameters(&config, 3).unwrap();
        let mut all = session(&config, &params, 6);
        all.reset(&seeds(6, 40)).unwrap();
        let rows: Vec<usize> = (0..6).collect();
        let together = play(&mut all, &rows, 0..10, &rows);
        assert!(apart(&together[..1], &together[1..2]) > 1e-3, "actions do not change");
        // The same seeds in other rows, which act in another order and at other times.
        let mut other = session(&config, &params, 6);
        other.reset(&[(5, 40), (4, 41), (3, 42), (2, 43), (1, 44), (0, 45)]).unwrap();
        let column = |entry: usize| together.iter().map(|step| vec![step[entry]]).collect::<Vec<_>>();
        for (row, id) in [(2, 3), (5, 0), (0, 5)] {
            let alone = play(&mut other, &[row], 0..10, &[id]);
            assert!(apart(&alone, &column(id)) < 1e-5, "{sampler:?} {row}");
        }
        // Another seed is another episode; the same seed again is the same.
        all.reset(&seeds(6, 46)).unwrap();
        assert!(apart(&play(&mut all, &rows, 0..10, &rows), &together) > 1e-2);
        all.reset(&seeds(6, 40)).unwrap();
        assert_eq!(play(&mut all, &rows, 0..10, &rows), together);
    }
}

#[test]
fn reset_row_forgets_only_that_row() {
    let config = small();
    let params = init::parameters(&config, 3).unwrap();
    let (mut one, mut two) = (session(&config, &params, 3), session(&config, &params, 3));
    let rows = [0, 1, 2];
    for session in [&mut one, &mut two] {
        session.reset(&seeds(3, 7)).unwrap();
        play(session, &rows, 0..4, &rows);
    }
    two.reset(&[(1, 99)]).unwrap();
    let (a, b) = (play(&mut one, &rows, 4..9, &rows), play(&mut two, &rows, 4..9, &rows));
    let column = |all: &[Vec<f32>], row: usize| all.iter().map(|step| vec![step[row]]).collect::<Vec<_>>();
    assert_eq!((column(&a, 0), column(&a, 2)), (column(&b, 0), column(&b, 2)));
    assert!(apart(&column(&a, 1), &column(&b, 1)) > 1e-3);
    // The fresh row has begun with its first observation repeated and a plan of its own.
    let mut fresh = session(&config, &params, 3);
    fresh.reset(&[(1, 99)]).unwrap();
    let alone = play(&mut fresh, &[1], 4..9, &[1]);
    assert!(apart(&alone, &column(&b, 1)) < 1e-5);
}

#[test]
fn a_snapshot_in_the_middle_of_a_plan_goes_on_with_it() {
    for sampler in [DiffusionSampler::Ddim(4), DiffusionSampler::Ddpm] {
        let config = Diffusion { sampler, ..small() };
        let params = init::parameters(&config, 3).unwrap();
        let mut first = session(&config, &params, 3);
        first.reset(&seeds(3, 7)).unwrap();
        let rows = [0, 1, 2];
        play(&mut first, &rows, 0..4, &rows);
        let saved = first.snapshot(&[1, 2]).unwrap();
        let saved = Snapshot::from_bytes(&saved.to_bytes().unwrap()).unwrap();
        let want = play(&mut first, &rows, 4..12, &rows);
        let mut second = session(&config, &params, 3);
        second.restore(&[2, 0], &saved).unwrap();
        let got = play(&mut second, &[2, 0], 4..12, &[1, 2]);
        let want: Vec<Vec<f32>> = want.iter().map(|step| vec![step[1], step[2]]).collect();
        assert!(apart(&got, &want) < 1e-6, "{sampler:?}");
    }
}

#[test]
fn plans_are_played_from_the_current_action_on() {
    let config = wide();
    let params = init::parameters(&config, 3).unwrap();
    let every = Diffusion {
        compat: DiffusionCompat { replan_every_step: true, raw_weights: false },
        ..config.clone()
    };
    let (mut queued, mut replanned) = (session(&config, &params, 1), session(&every, &params, 1));
    for session in [&mut queued, &mut replanned] {
        session.reset(&[(0, 5)]).unwrap();
    }
    let (a, b) = (play(&mut queued, &[0], 0..3, &[0]), play(&mut replanned, &[0], 0..3, &[0]));
    // Both make the same first plan; only one of them plays on.
    assert_eq!(a[0], b[0]);
    assert_ne!(a[1], b[1]);
    // Weights that are not averaged are others once training has moved them.
    let raw = Diffusion { compat: DiffusionCompat { replan_every_step: false, raw_weights: true }, ..wide() };
    params.set("out.bias", &[0.7f32; 6]).unwrap();
    let (mut with_raw, mut with_average) = (session(&raw, &params, 1), session(&config, &params, 1));
    for session in [&mut with_raw, &mut with_average] {
        session.reset(&[(0, 5)]).unwrap();
    }
    assert_eq!(play(&mut with_average, &[0], 0..1, &[0])[0], a[0]);
    assert_ne!(play(&mut with_raw, &[0], 0..1, &[0])[0], a[0]);
}

/// Actions are scaled to the range of the data and back.
#[test]
fn plans_lie_in_the_range_of_the_data() {
    let config = small();
    let params = init::parameters(&config, 3).unwrap();
    params.set("action.least", &[10.0f32]).unwrap();
    params.set("action.greatest", &[14.0f32]).unwrap();
    let mut session = session(&config, &params, 2);
    let actions = play(&mut session, &[0, 1], 0..9, &[0, 1]).concat();
    assert!(actions.iter().all(|a| (10.0..=14.0).contains(a)), "{actions:?}");
    assert!(actions.iter().any(|a| (a - actions[0]).abs() > 0.1), "{actions:?}");
}

/// Images, bytes and integers are conditions too: each of them changes what noise is seen. Observations after the
/// newest that a plan is made from do not.
#[test]
fn every_leaf_of_the_newest_observations_is_looked_at() {
    let mut config = small();
    config.observation.push(Encoder::Image { channels: 1, height: 16, width: 16, bytes: true });
    config
        .observation
        .push(Encoder::Categorical { sizes: vec![3], encoding: CategoricalEncoding::Embedding });
    let built = training_graph(&config, &settings(1, DType::F32), Begin::Fresh).unwrap();
    let predicted = |changed: Option<(usize, usize)>| {
        let store = Store::new();
        store.declare(&built.graph).unwrap();
        init::initialise(&built, &store, 1).unwrap();
        let mut program = WindowProgram::new(&built, &config, &Pool::new(1), &[&store]).unwrap();
        let (mut floats, mut bytes, mut ints) = ([0.5f32; 8], [9u8; 8 * 256], [1i32; 8]);
        match changed {
            Some((0, step)) => floats[step] = -0.5,
            Some((1, step)) => bytes[step * 256 + 77] = 200,
            Some((_, step)) => ints[step] = 2,
            None => {}
        }
        program.program.set("observation.0", &floats).unwrap();
        program.program.set("observation.1", &bytes).unwrap();
        program.program.set("observation.2", &ints).unwrap();
        program.program.set("mask", &[true; 8]).unwrap();
        program.set_rates(0.0, 0).unwrap();
        program.run(0).unwrap();
        program.program.get::<f32>("logits").unwrap().to_vec()
    };
    let base = predicted(None);
    for leaf in 0..3 {
        assert_ne!(predicted(Some((leaf, 0))), base, "leaf {leaf} of the oldest observation");
        assert_ne!(predicted(Some((leaf, 1))), base, "leaf {leaf} of the current observation");
        assert_eq!(predicted(Some((leaf, 2))), base, "leaf {leaf} of the next observation");
    }
}

/// Settings of training programs.
fn settings(batch: usize, dtype: DType) -> TrainSettings {
    TrainSettings {
        batch,
        label_smoothing: 0.0,
        ties: false,
        optimizer: AdamW { betas: (0.95, 0.999), weight_decay: 1e-6, ..AdamW::default() },
        clip: 1e9,
        dtype,
        export_gradients: false,
        dropout: true,
        table: None,
        augment: Default::default(),
        bytes: Vec::new(),
        weights: None,
    }
}

/// Trains on windows that `sample` makes: observations and actions of the window's steps.
fn train(
    config: &Diffusion,
    batches: usize,
    sample: impl Fn(&mut Rng) -> (Vec<f32>, Vec<f32>),
) -> (Store, Vec<f32>) {
    const BATCH: usize = 64;
    let built = training_graph(config, &settings(BATCH, DType::F32), Begin::Fresh).unwrap();
    let store = Store::new();
    store.declare(&built.graph).unwrap();
    init::initialise(&built, &store, 1).unwrap();
    store.set("rng", &[5i64, 0]).unwrap();
    let mut program = WindowProgram::new(&built, config, &Pool::new(1), &[&store]).unwrap();
    let mut rng = Rng::new(8, 0);
    let mut losses = Vec::new();
    for step in 0..batches {
        let rows: Vec<(Vec<f32>, Vec<f32>)> = (0..BATCH).map(|_| sample(&mut rng)).collect();
        for (name, field) in program.fields().to_vec() {
            match field {
                Field::Observation(_) => {
                    let all: Vec<f32> = rows.iter().flat_map(|(seen, _)| seen).copied().collect();
                    program.program.set(&name, &all).unwrap();
                }
                Field::Target => {
                    let all: Vec<f32> = rows.iter().flat_map(|(_, done)| done).copied().collect();
                    program.program.set(&name, &all).unwrap();
                }
                Field::Imitate => {
                    program.program.set(&name, &vec![true; BATCH * config.pred_horizon]).unwrap()
                }
                other => panic!("{other:?}"),
            }
        }
        let left = 1.0 - step as f64 / batches as f64;
        program.set_rates(3e-3 * left, step as u64).unwrap();
        program.run(0).unwrap();
        losses.push(program.program.get::<f32>("loss").unwrap()[0]);
    }
    (store, losses)
}

/// Demonstrations go left or right of the middle, never through it: plans do one or the other.
#[test]
fn both_of_two_ways_are_learned_and_not_their_mean() {
    let config = Diffusion {
        pred_horizon: 4,
        act_horizon: 3,
        diffusion_steps: 50,
        step_embed: 16,
        denoiser: Denoiser::Mlp { hidden: vec![64, 64, 64] },
        sampler: DiffusionSampler::Ddim(10),
        ..small()
    };
    let (params, _) = train(&config, 1600, |rng| {
        let seen = rng.uniform(-1.0, 1.0) as f32;
        let way = if rng.below(2) == 0 { 0.6 } else { -0.6 };
        (vec![seen; 4], vec![0.3 * seen + way; 4])
    });
    let rows: Vec<usize> = (0..64).collect();
    let mut session = session(&config, &params, 64);
    session.reset(&seeds(64, 100)).unwrap();
    let seen: Vec<f32> = rows.iter().map(|row| *row as f32 / 32.0 - 1.0).collect();
    // How far each action of a plan is from the middle between both ways, in ways.
    let mut away = vec![Vec::new(); 64];
    for _ in 0..3 {
        let mut actions = vec![0.0; 64];
        let to = ValuesMut::floats(&mut actions);
        session.select_action(&rows, Values::floats(&seen).into(), Choose::Greedy, to).unwrap();
        rows.iter().for_each(|row| away[*row].push((actions[*row] - 0.3 * seen[*row]) / 0.6));
    }
    let takes = |plan: &[f32], way: f32| plan.iter().all(|x| (x - way).abs() < 0.3);
    let right = away.iter().filter(|plan| takes(plan, 1.0)).count();
    let left = away.iter().filter(|plan| takes(plan, -1.0)).count();
    assert!(left + right >= 54 && left.min(right) >= 16, "{left} plans go left, {right} right: {away:?}");
}

/// A signal of period 5 whose phase two observations tell: the actions of a plan follow it step by step.
#[test]
fn a_plan_follows_a_signal_with_its_own_steps() {
    let config = Diffusion { step_embed: 16, denoiser: unet(&[16, 16]), ..small() };
    let angle = |t: usize| std::f32::consts::TAU * t as f32 / 5.0;
    let (params, losses) = train(&config, 400, |rng| {
        let start = rng.below(5) as usize;
        let steps = start..start + config.pred_horizon;
        (steps.clone().map(|t| angle(t).sin()).collect(), steps.map(|t| angle(t).cos()).collect())
    });
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    assert!(mean(&losses[350..]) < 0.05 * mean(&losses[..20]), "{} {}", losses[0], mean(&losses[350..]));
    let mut session = session(&config, &params, 5);
    session.reset(&seeds(5, 3)).unwrap();
    let rows: Vec<usize> = (0..5).collect();
    let mut off = Vec::new();
    for t in 0..24 {
        // Every row has another phase.
        let seen: Vec<f32> = rows.iter().map(|row| angle(t + row).sin()).collect();
        let mut actions = vec![0.0; 5];
        let to = ValuesMut::floats(&mut actions);
        session.select_action(&rows, Values::floats(&seen).into(), Choose::Greedy, to).unwrap();
        // The first plan knows one observation only.
        if t >= config.act_horizon {
            off.extend(rows.iter().map(|row| (actions[*row] - angle(t + row).cos()).abs()));
        }
    }
    // A plan that is one step late is 0.75 off on average.
    assert!(mean(&off) < 0.15, "{} off: {off:?}", mean(&off));

    // Whole windows are predicted from their first observations.
    let built = evaluation_graph(&config, 5, DType::F32, Begin::Fresh).unwrap();
    let mut program = WindowProgram::new(&built, &config, &Pool::new(1), &[&params]).unwrap();
    let steps = config.pred_horizon;
    let window = |f: &dyn Fn(f32) -> f32| -> Vec<f32> {
        (0..5).flat_map(|row| (0..steps).map(move |t| angle(row + t))).map(f).collect()
    };
    program.program.set("observation", &window(&f32::sin)).unwrap();
    program.run(0).unwrap();
    let predicted = program.program.get::<f32>("logits").unwrap();
    let error = predicted.iter().zip(window(&f32::cos)).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
    assert!(error / (5.0 * (steps as f32)) < 0.02, "mean squared error {error}");
}

/// Steps beyond the end of an episode count for nothing.
#[test]
fn masked_steps_do_not_change_the_loss() {
    let config = small();
    let built = training_graph(&config, &settings(2, DType::F64), Begin::Fresh).unwrap();
    let run = |mask: [bool; 16]| {
        let store = Store::new();
        store.declare(&built.graph).unwrap();
        init::initialise(&built, &store, 1).unwrap();
        let mut program = WindowProgram::new(&built, &config, &Pool::new(1), &[&store]).unwrap();
        let wide = |n, seed| random(n, seed).into_iter().map(f64::from).collect::<Vec<_>>();
        program.program.set("observation", &wide(16, 1)).unwrap();
        program.program.set("targets", &wide(16, 2)).unwrap();
        program.program.set("mask", &mask).unwrap();
        program.set_rates(0.0, 0).unwrap();
        program.run(0).unwrap();
        let predicted = program.program.get::<f64>("logits").unwrap().to_vec();
        (program.program.get::<f64>("loss").unwrap()[0], predicted)
    };
    let only = |steps: std::ops::Range<usize>| std::array::from_fn(|i| steps.contains(&i));
    let (all, predicted) = run([true; 16]);
    let (front, same) = run(only(0..5));
    let (rest, _) = run(only(5..16));
    assert_eq!(predicted, same);
    assert!((all - (5.0 * front + 11.0 * rest) / 16.0).abs() < 1e-12, "{all} {front} {rest}");
}
