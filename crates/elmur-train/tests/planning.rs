//! Policies that plan, trained on recorded transitions: their plans earn more than the behaviour they learned from.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::Arc;

use elmur_base::{Space, Spaces, Stop, Values, ValuesMut};
use elmur_data::{Column, Dataset, Episode, Source};
use elmur_engine::Pool;
use elmur_envs::{EnvSpec, Registry};
use elmur_model::baselines::{Tt, TtPlan};
use elmur_model::session::{Choose, Seen, Session};
use elmur_model::{PolicyConfig, presets};
use elmur_rng::Rng;
use elmur_train::{Evaluation, RunConfig, Seeds, Trainer, evaluate};

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
