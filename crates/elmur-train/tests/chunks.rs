//! Diffusion Policy trained on recorded episodes: plans do as the behaviour did.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::Arc;

use elmur_base::{Space, Spaces, Stop, Values, ValuesMut};
use elmur_data::{Column, Dataset, Episode, Source};
use elmur_engine::Pool;
use elmur_envs::{Metric, Registry};
use elmur_model::baselines::{Denoiser, Diffusion};
use elmur_model::session::{Choose, Session};
use elmur_model::{PolicyConfig, presets};
use elmur_rng::Rng;
use elmur_train::{
    Evaluation, OfflineEvaluation, Prepared, RunConfig, Trainer, evaluate, evaluate_offline, overrides,
};

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
            labels: None,
            accepted: None,
        }
    };
    let episodes = (0..200).map(|_| episode()).collect();
    Dataset::from_episodes(spaces, BTreeMap::new(), episodes).unwrap()
}

/// A pendulum whose speed is shown is swung up and held by plans of a small network: 0.8 of what the player has
/// is 0.73. It needs plans from the right observations, played from the right place of a chunk.
#[test]
fn a_pendulum_is_swung_up_and_held() {
    let registry = Registry::builtin();
    let changes = [
        "policy=diffusion",
        "env.velocity=true",
        "data.noise=0.2",
        "data.episodes=1000",
        "model.denoiser={\"mlp\":{\"hidden\":[128,128,128]}}",
        "model.obs_horizon=1",
        "model.pred_horizon=4",
        "train.batch=256",
        "train.batches=2000",
        "train.lr=2e-3",
    ];
    let preset = RunConfig::preset("popgym-PositionOnlyPendulumEasy").unwrap();
    let run = overrides::apply(&preset, &changes, &registry).unwrap();
    let Prepared { config, data, validation, .. } = run.prepare(&registry, false).unwrap();
    let mut trainer = Trainer::new(&config, &data, &Pool::new(2)).unwrap();
    for _ in 0..2000 {
        trainer.step().unwrap();
    }
    let (policy, env) = (trainer.checkpoint(), validation.unwrap());
    let what = Evaluation { episodes: 40, threads: Some(2), ..Evaluation::of(&policy, &env) };
    let score = evaluate(&what, &Stop::default(), &|_| {}).unwrap().score(Metric::Return);
    assert!(score.mean > 0.73, "{score:?}");
}

/// Chunks begin at every step of an episode, also where they reach beyond its end, whatever the number of
/// observations; and the published warm-up begins with a rate of zero.
#[test]
fn every_step_of_an_episode_begins_a_chunk() {
    let source: Arc<dyn Source> = Arc::new(rests());
    let mut run = RunConfig::preset("small").unwrap();
    run.model.fit_to(source.spaces()).unwrap();
    let mut run = run.with_policy("diffusion", &Registry::builtin()).unwrap();
    let PolicyConfig::Diffusion(model) = &mut run.model else { panic!("another policy") };
    (model.obs_horizon, model.pred_horizon, model.act_horizon) = (1, 8, 1);
    model.denoiser = Denoiser::Mlp { hidden: vec![8] };
    (run.train.batch, run.train.batches, run.train.schedule.warmup) = (32, Some(100), 4);
    let mut trainer = Trainer::new(&run, &source, &Pool::new(1)).unwrap();
    let reports: Vec<_> = (0..40).map(|_| trainer.step().unwrap()).collect();
    let rates: Vec<f64> = reports[..6].iter().map(|report| report.lr / run.train.lr).collect();
    assert_eq!(rates[..5], [0.0, 0.25, 0.5, 0.75, 1.0]);
    assert!(rates[5] < 1.0 && rates[5] > 0.999, "{rates:?}");
    // A start is uniform over the 9 steps of an episode: chunks of 8 hold 8, 8, 7, .., 1 of them.
    let held = reports.iter().map(|report| report.tokens).sum::<u64>() as f64 / (40.0 * 32.0);
    assert!((held - 44.0 / 9.0).abs() < 0.25, "{held}");
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
