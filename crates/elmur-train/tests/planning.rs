//! Policies that plan, trained on recorded transitions: plans of Trajectory Transformer earn more than the behaviour
//! they were learned from, those of Diffusion Policy do as the behaviour did.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::Arc;

use elmur_base::{Space, Spaces, Stop, Values, ValuesMut};
use elmur_data::{Column, Dataset, Episode, Source};
use elmur_engine::Pool;
use elmur_envs::{EnvSpec, Registry};
use elmur_model::baselines::{Denoiser, Diffusion, Tt, TtPlan};
use elmur_model::session::{Choose, Seen, Session};
use elmur_model::{PolicyConfig, presets};
use elmur_rng::Rng;
use elmur_train::{Evaluation, OfflineEvaluation, RunConfig, Seeds, Trainer, evaluate, evaluate_offline};

/// Sets up training of a small Trajectory Transformer on data of these spaces.
fn run(spaces: &Spaces, window: usize, plan: TtPlan, batches: u64) -> RunConfig {
    let mut run = RunConfig::preset("small").unwrap();
    run.model.fit_to(spaces).unwrap();
    let ends = run.model.architecture().ends();
    let base = presets::tt(ends.observation.to_vec(), ends.action.clone());
    let base = Tt { d_model: 32, heads: 1, layers: 1, dropout: 0.0, ..base };
    run.model = PolicyConfig::Tt(Tt { window, bins: 30, plan, ..base });
    run.train.segments = 1;
    (run.train.batch, run.train.batches, run.train.epochs) = (32, Some(batches), None);
    (run.train.lr, run.train.weight_decay, run.train.clip, run.train.betas) = (2e-3, 0.1, 1.0, (0.9, 0.95));
    (run.train.label_smoothing, run.train.standardize) = (0.0, false);
    run.train.schedule.warmup = 20;
    run
}

/// Random bits to be guessed: the behaviour guesses at random, and a right guess pays 1.
fn guesses() -> Dataset {
    let spaces = Spaces { observation: Space::Discrete { n: 2 }, action: Space::Discrete { n: 2 } };
    let mut rng = Rng::new(1, 0);
    let mut bit = || i32::from(rng.uniform(0.0, 1.0) < 0.5);
    let mut episode = || {
        let (bits, guesses): (Vec<i32>, Vec<i32>) = (0..12).map(|_| (bit(), bit())).unzip();
        let right = bits.iter().zip(&guesses).map(|(bit, guess)| f32::from(u8::from(bit == guess)));
        Episode {
            rewards: right.collect(),
            observations: vec![Column::I32(bits)],
            actions: vec![Column::I32(guesses)],
            terminated: false,
            truncated: true,
            imitate: None,
        }
    };
    let episodes = (0..200).map(|_| episode()).collect();
    Dataset::from_episodes(spaces, BTreeMap::new(), episodes).unwrap()
}

#[test]
fn plans_earn_more_than_the_behaviour_they_were_learned_from() {
    let source: Arc<dyn Source> = Arc::new(guesses());
    let plan = TtPlan { context: 2, beam: 4, expansion: 2, horizon: 2, action_cdf: 0.0 };
    let run = run(source.spaces(), 4, plan, 150);
    let mut trainer = Trainer::new(&run, &source, &Pool::new(1)).unwrap();
    let first = trainer.step().unwrap().loss;
    let mut last = first;
    for _ in 1..150 {
        last = trainer.step().unwrap().loss;
    }
    assert!(last < 0.7 * first, "loss {first} to {last}");
    let mut session = Session::new(&run.model, trainer.params(), 1, &Pool::new(1)).unwrap();
    let (mut rng, mut right, mut left) = (Rng::new(2, 0), 0, 100.0);
    for _ in 0..100 {
        let bit = i32::from(rng.uniform(0.0, 1.0) < 0.5);
        let (mut guess, bits) = ([9], [bit]);
        let seen = Seen { observation: Values::ints(&bits), returns: Some(&[left]) };
        session.select_action(&[0], seen, Choose::Greedy, ValuesMut::ints(&mut guess)).unwrap();
        right += usize::from(guess[0] == bit);
        left -= f32::from(u8::from(guess[0] == bit));
    }
    assert!(right >= 95, "{right} of 100 guesses");
}

#[test]
fn trajectories_of_a_noisy_player_teach_cartpole() {
    let registry = Registry::builtin();
    let env = registry.find(&EnvSpec::new("cartpole")).unwrap();
    let plan = TtPlan { context: 2, beam: 2, expansion: 2, horizon: 2, action_cdf: 0.2 };
    let mut run = run(env.spaces(), 4, plan, 300);
    (run.env, run.data.episodes, run.data.noise) = (Some(EnvSpec::new("cartpole")), 100, 0.2);
    let prepared = run.prepare(&registry, true).unwrap();
    let mut trainer = Trainer::new(&prepared.config, &prepared.data, &Pool::new(1)).unwrap();
    for _ in 0..300 {
        trainer.step().unwrap();
    }
    let policy = trainer.checkpoint();
    let evaluation = Evaluation { episodes: 4, seeds: Seeds::Validation, ..Evaluation::of(&policy, &env) };
    let outcome = evaluate(&evaluation, &Stop::default(), &|_| {}).unwrap();
    assert!(outcome.returns().mean > 450.0, "{:?}", outcome.returns());
}

/// A point that is moved by speeds of up to 5 and brought to rest: x' = x + 0.1 a, a = -4 x.
fn rests() -> Dataset {
    let spaces = Spaces { observation: Space::unbounded([1]), action: Space::unbounded([1]) };
    let mut rng = Rng::new(3, 0);
    let mut episode = || {
        let mut x = rng.uniform(-1.25, 1.25) as f32;
        let mut step = |_| {
            let seen = x;
            x += 0.1 * (-4.0 * seen);
            (10.0 + seen, -4.0 * seen)
        };
        let (seen, done): (Vec<f32>, Vec<f32>) = (0..9).map(&mut step).unzip();
        Episode {
            rewards: vec![0.0; 9],
            observations: vec![Column::F32(seen)],
            actions: vec![Column::F32(done)],
            terminated: false,
            truncated: true,
            imitate: None,
        }
    };
    let episodes = (0..200).map(|_| episode()).collect();
    Dataset::from_episodes(spaces, BTreeMap::new(), episodes).unwrap()
}

/// Ranges and means are measured on the data, training averages the weights, and plans bring the point to rest.
#[test]
fn chunks_of_actions_are_learned_in_the_units_of_the_data() {
    let source: Arc<dyn Source> = Arc::new(rests());
    let mut run = RunConfig::preset("small").unwrap();
    run.model.fit_to(source.spaces()).unwrap();
    let ends = run.model.architecture().ends();
    let base = presets::diffusion_mlp(ends.observation.to_vec(), ends.action.clone());
    run.model = PolicyConfig::Diffusion(Diffusion {
        pred_horizon: 4,
        act_horizon: 2,
        diffusion_steps: 20,
        step_embed: 16,
        denoiser: Denoiser::Mlp { hidden: vec![64, 64] },
        ..base
    });
    run.train.segments = 1;
    (run.train.batch, run.train.batches, run.train.epochs) = (64, Some(600), None);
    (run.train.lr, run.train.weight_decay, run.train.clip, run.train.betas) =
        (3e-3, 1e-6, 1e3, (0.95, 0.999));
    let mut trainer = Trainer::new(&run, &source, &Pool::new(1)).unwrap();
    let first = trainer.step().unwrap().loss;
    let mut last = 0.0;
    for _ in 1..600 {
        last = 0.95 * last + 0.05 * trainer.step().unwrap().loss;
    }
    assert!(last < 0.3 * first, "loss {first} to {last}");

    let params = trainer.params();
    let number = |name: &str| params.get::<f32>(name).unwrap()[0];
    let (least, greatest) = (number("action.least"), number("action.greatest"));
    assert!((-5.0..-4.8).contains(&least) && (4.8..5.0).contains(&greatest), "{least} {greatest}");
    assert!((number("encoder.mean") - 10.0).abs() < 0.05, "{}", number("encoder.mean"));
    assert!((0.2..0.6).contains(&number("encoder.deviation")), "{}", number("encoder.deviation"));
    assert_ne!(number("mlp.0.weight"), number("ema.mlp.0.weight"));
    assert!((number("mlp.0.weight") - number("ema.mlp.0.weight")).abs() < 0.05);

    let rows: Vec<usize> = (0..16).collect();
    let mut session = Session::new(&run.model, params, 16, &Pool::new(1)).unwrap();
    let mut points: Vec<f32> = rows.iter().map(|row| *row as f32 / 8.0 - 0.9375).collect();
    for _ in 0..12 {
        let seen: Vec<f32> = points.iter().map(|x| 10.0 + x).collect();
        let mut moves = vec![0.0; 16];
        let to = ValuesMut::floats(&mut moves);
        session.select_action(&rows, Values::floats(&seen).into(), Choose::Greedy, to).unwrap();
        points.iter_mut().zip(&moves).for_each(|(x, a)| *x += 0.1 * a);
    }
    let worst = points.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    assert!(worst < 0.15, "{points:?}");

    // Recorded actions are predicted, window by window.
    let policy = trainer.checkpoint();
    let judged = OfflineEvaluation::of(&policy, &*source);
    let outcome = evaluate_offline(&judged, &Stop::default(), &mut |_| {}).unwrap();
    assert_eq!(outcome.actions, 200 * 9);
    assert!(outcome.score.value.mean < 0.3, "{:?}", outcome.score);
}
