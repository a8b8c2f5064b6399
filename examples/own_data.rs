//! Recordings of your own, in memory: no environment, no files. A policy learns to predict their actions.
//!
//! ```sh
//! cargo run --release --example own_data
//! ```

#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;
use std::error::Error;
use std::ops::Range;
use std::sync::Arc;

use elmur::base::{Space, Spaces, Stop};
use elmur::data::{Column, Dataset, Episode};
use elmur::envs::Registry;
use elmur::rng::Rng;
use elmur::train::{Devices, OfflineEvaluation, Prepared, RunConfig, Trainer, evaluate_offline, overrides};

/// A day of a thermostat: temperatures, and whether it heated. It begins to heat below 19 degrees and stops
/// above 21; in between it goes on as before, which one temperature does not tell.
fn day(number: u64) -> (Vec<f32>, Vec<i32>) {
    let mut rng = Rng::new(number, 0);
    let (mut temperatures, mut heating) = (Vec::new(), Vec::new());
    let (phase, mut heats) = (rng.uniform(0.0, 10.0), 0);
    for step in 0..40 {
        let temperature = 20.0 + 2.5 * (f64::from(step) / 4.0 + phase).sin() + rng.uniform(-0.4, 0.4);
        heats = match temperature {
            t if t < 19.0 => 1,
            t if t > 21.0 => 0,
            _ => heats,
        };
        temperatures.push(temperature as f32);
        heating.push(heats);
    }
    (temperatures, heating)
}

/// Days as episodes: a column of numbers for every part of the observation and of the action.
fn dataset(days: Range<u64>) -> Result<Dataset, elmur::data::Error> {
    let spaces = Spaces { observation: Space::unbounded([1]), action: Space::Discrete { n: 2 } };
    let episode = |number| {
        let (temperatures, heating) = day(number);
        Episode {
            rewards: vec![0.0; heating.len()],
            observations: vec![Column::F32(temperatures)],
            actions: vec![Column::I32(heating)],
            terminated: false,
            truncated: true,
            imitate: None,
            labels: None,
            accepted: None,
        }
    };
    Dataset::from_episodes(spaces, BTreeMap::new(), days.map(episode).collect())
}

fn main() -> Result<(), Box<dyn Error>> {
    // A preset without its environment: encoders and head follow from the data.
    let changes = ["env=null", "model.layers=1", "train.standardize=true", "train.batches=200"];
    let registry = Registry::builtin();
    let config = overrides::apply(&RunConfig::preset("tmaze-quick")?, &changes, &registry)?;
    let prepared = Prepared::new(config, Arc::new(dataset(0..500)?), &registry, false)?;
    prepared.notes.iter().for_each(|note| println!("{note}"));

    // `elmur::train::train` keeps a run in a folder; the trainer alone keeps nothing.
    let mut trainer =
        Trainer::new(&prepared.config, &prepared.data, &Devices::open(&prepared.config)?.train)?;
    while trainer.batches() < trainer.planned_batches() {
        let report = trainer.step()?;
        if report.batch.is_multiple_of(25) {
            println!("batch {}: loss {:.3}", report.batch, report.loss);
        }
    }

    let policy = trainer.checkpoint();
    let unseen = dataset(500..600)?;
    let outcome = evaluate_offline(&OfflineEvaluation::of(&policy, &unseen), &Stop::default(), &mut |_| {})?;
    println!("{} actions of {} unseen days: {}", outcome.actions, outcome.episodes, outcome.score);
    Ok(())
}
