//! Policies that learn from recorded transitions, rewards included: they earn more than the behaviour they
//! learned from.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::Arc;

use elmur_base::{Space, Spaces, Stop, Values, ValuesMut};
use elmur_data::{Column, Dataset, Episode, Source};
use elmur_engine::Pool;
use elmur_envs::{EnvSpec, Registry};
use elmur_model::baselines::{CqlContinuous, Tt, TtPlan};
use elmur_model::ends::{Action, Encoder};
use elmur_model::session::{Choose, Seen, Session};
use elmur_model::{PolicyConfig, presets};
use elmur_rng::Rng;
use elmur_train::{Evaluation, RunConfig, Seeds, Trainer, evaluate};

/// A run of this many small batches.
fn run(model: PolicyConfig, batches: u64) -> RunConfig {
    let mut run = RunConfig::preset("small").unwrap();
    run.model = model;
    run.train.segments = 1;
    (run.train.batch, run.train.batches, run.train.epochs) = (32, Some(batches), None);
    (run.train.lr, run.train.weight_decay, run.train.clip, run.train.betas) = (2e-3, 0.1, 1.0, (0.9, 0.95));
    (run.train.label_smoothing, run.train.standardize) = (0.0, false);
    run.train.schedule.warmup = 20;
    run
}

/// Training of a small Trajectory Transformer on data of these spaces.
fn tt(spaces: &Spaces, plan: TtPlan, batches: u64) -> RunConfig {
    let observation = spaces.observation.leaves().iter().map(Encoder::of).collect();
    let base = presets::tt(observation, Action::of(&spaces.action).unwrap());
    let base = Tt { d_model: 32, heads: 1, layers: 1, dropout: 0.0, ..base };
    run(PolicyConfig::Tt(Tt { window: 4, bins: 30, plan, ..base }), batches)
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
            labels: None,
            accepted: None,
        }
    };
    let episodes = (0..200).map(|_| episode()).collect();
    Dataset::from_episodes(spaces, BTreeMap::new(), episodes).unwrap()
}

#[test]
fn plans_earn_more_than_the_behaviour_they_were_learned_from() {
    let source: Arc<dyn Source> = Arc::new(guesses());
    let plan = TtPlan { context: 2, beam: 4, expansion: 2, horizon: 2, action_cdf: 0.0 };
    let run = tt(source.spaces(), plan, 150);
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
    let mut run = tt(env.spaces(), plan, 300);
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

/// Numbers to be met: the behaviour answers x with anything between -2 and 2, and pays for the squared distance.
fn distances() -> Dataset {
    let spaces = Spaces { observation: Space::unbounded([1]), action: Space::unbounded([1]) };
    let mut rng = Rng::new(4, 0);
    let mut episode = || {
        let (x, a): (Vec<f32>, Vec<f32>) =
            (0..10).map(|_| (rng.uniform(-1.0, 1.0) as f32, rng.uniform(-2.0, 2.0) as f32)).unzip();
        Episode {
            rewards: x.iter().zip(&a).map(|(x, a)| -(x - a).powi(2)).collect(),
            observations: vec![Column::F32(x)],
            actions: vec![Column::F32(a)],
            terminated: true,
            truncated: false,
            imitate: None,
            labels: None,
            accepted: None,
        }
    };
    let episodes = (0..100).map(|_| episode()).collect();
    Dataset::from_episodes(spaces, BTreeMap::new(), episodes).unwrap()
}

#[test]
fn conservative_q_learning_meets_numbers_that_its_data_miss() {
    let source: Arc<dyn Source> = Arc::new(distances());
    let earned = source.summary().unwrap().returns.mean / 10.0;
    assert!(earned < -1.4, "{earned}");
    for lagrange in [None, Some(1.0)] {
        let observation = vec![Encoder::Vector { dim: 1, bytes: false }];
        let base = presets::cql_continuous(observation, Action::Continuous { dim: 1, tanh: false }, 1);
        let model = CqlContinuous {
            d_model: 16,
            hidden: vec![32, 32],
            gamma: 0.5,
            tau: 0.05,
            alpha: 0.2,
            lagrange,
            candidates: 4,
            imitation_steps: 20,
            ..base
        };
        let mut run = run(PolicyConfig::CqlContinuous(model), 600);
        (run.train.batch, run.train.lr, run.train.weight_decay, run.train.clip) = (64, 3e-3, 0.0, 100.0);
        let mut trainer = Trainer::new(&run, &source, &Pool::new(1)).unwrap();
        let reports: Vec<_> = (0..600).map(|_| trainer.step().unwrap()).collect();
        let mut session = Session::new(&run.model, trainer.params(), 1, &Pool::new(1)).unwrap();
        let mut distance = 0.0;
        for i in 0..41 {
            let (x, mut a) = ([i as f32 / 20.0 - 1.0], [0.0]);
            let seen = Values::floats(&x).into();
            session.select_action(&[0], seen, Choose::Greedy, ValuesMut::floats(&mut a)).unwrap();
            distance += (x[0] - a[0]).powi(2) / 41.0;
        }
        let last = reports[599];
        assert!(distance < 0.1, "mean squared distance {distance} ({lagrange:?}, {last:?})");
    }
}
