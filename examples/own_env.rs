//! An environment of your own, from its rules to a policy that has learnt it (in the folder out/bell). With
//! arguments this program is the whole `elmur` command line, which knows the environment by its name:
//! `cargo run --release --example own_env -- train tmaze-quick env=bell env.wait=20`.

#![allow(clippy::print_stdout)]

use std::process::ExitCode;

use elmur::base::{Space, Spaces, Stop, Values, ValuesMut};
use elmur::envs::{
    Env, EnvSpec, Error, Facts, Family, Metric, Player, Purpose, Registry, Result, Setting, Step,
};
use elmur::model::Checkpoint;
use elmur::rng::Rng;
use elmur::train::{Evaluation, Event, RunConfig, RunFolder, evaluate, overrides, train};
use elmur_plot::learning_curves;

/// Numbers 0 to 3 are colours, shown and named; QUIET is shown and answered while nothing happens.
const QUIET: i32 = 4;
const BELL: i32 = 5;

/// A colour is shown at the first step. It must be named when the bell rings, some steps later, not before.
struct Bell {
    spaces: Spaces,
    wait: u32,
    purpose: Purpose,
    colour: i32,
    left: Option<u32>, // Steps until the bell rings, while an episode runs.
}

impl Env for Bell {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }
    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
        let mut rng = Rng::new(seed, 0);
        self.colour = rng.below(4) as i32;
        // Bells of demonstrations ring early and late, those of evaluations as late as possible.
        self.left = Some(if self.purpose == Purpose::Collect { 1 + rng.below(self.wait) } else { self.wait });
        observation.ints[0] = self.colour;
        Ok(())
    }
    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        self.spaces.action.check("answer", action)?;
        let (answer, left) = (action.ints[0], self.left.ok_or(Error::Finished)?);
        let (success, terminated) = (left == 0 && answer == self.colour, left == 0 || answer != QUIET);
        self.left = if terminated { None } else { Some(left - 1) };
        observation.ints[0] = if self.left == Some(0) { BELL } else { QUIET };
        let reward = f64::from(success);
        Ok(Step { reward, terminated, truncated: false, success: terminated.then_some(success) })
    }
}

/// Demonstrates the task: remembers the colour it was shown and names it when the bell rings.
struct Listener(Option<i32>);

impl Player for Listener {
    fn reset(&mut self) {
        self.0 = None;
    }
    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let colour = *self.0.get_or_insert(observation.ints[0]);
        action.ints[0] = if observation.ints[0] == BELL { colour } else { QUIET };
    }
    fn took(&mut self, _: Values<'_>) {} // what was done before does not change what is right
}

/// Makes the environment by its name `bell`, with the setting `env.wait`.
struct Bells;

impl Family for Bells {
    fn names(&self) -> Vec<String> {
        vec!["bell".to_owned()]
    }
    fn settings(&self, _: &str) -> Vec<Setting> {
        vec![Setting::new("wait", 25, "Steps from the colour to the bell, at most.")]
    }
    fn make(&self, spec: &EnvSpec, purpose: Purpose) -> Result<Box<dyn Env>> {
        let wait = spec.get::<std::num::NonZeroU32>("wait")?.get();
        let spaces = Spaces { observation: Space::Discrete { n: 6 }, action: Space::Discrete { n: 5 } };
        Ok(Box::new(Bell { spaces, wait, purpose, colour: 0, left: None }))
    }
    fn player(&self, _: &EnvSpec) -> Result<Option<Box<dyn Player>>> {
        Ok(Some(Box::new(Listener(None))))
    }
    fn facts(&self, _: &EnvSpec) -> Facts {
        Facts { metric: Metric::Success, ..Facts::default() }
    }
}

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let registry = Registry::builtin().with(Bells);
    if std::env::args().len() > 1 {
        return Ok(elmur_cli::main(registry));
    }
    // Gradients flow through the memory. Validations wait longer than any demonstration.
    let changes = "env=bell data.episodes=2000 model.memory.gradient={\"through\":3} train.lr=2e-3 \
                   eval.every=50 eval.settings.wait=150 eval.target=1";
    let changes: Vec<&str> = changes.split_whitespace().collect();
    let config = overrides::apply(&RunConfig::preset("tmaze-quick")?, &changes, &registry)?;
    let prepared = config.prepare(&registry, false)?; // The player demonstrates.
    RunFolder::remove("out/bell".as_ref())?; // What an earlier run has left.
    let folder = RunFolder::create("out/bell".as_ref(), &prepared.config)?;
    let mut curve = Vec::new();
    train(&folder, &prepared, false, &Stop::default(), &mut |event| {
        if let Event::Evaluated { batch, score } = event {
            println!("batch {batch}: {score}");
            curve.push((batch as f64, score.value.mean));
        }
    })?;
    let curves = [("bell".to_owned(), curve)];
    learning_curves("out/bell/curve", "Validation", "batch", "success rate", &curves, false)?;
    let policy = Checkpoint::load(&folder.best())?;
    for wait in [25, 150] {
        let env = registry.find(&EnvSpec::new("bell").with("wait", wait))?;
        let outcome = evaluate(&Evaluation::of(&policy, &env), &Stop::default(), &|_| {})?;
        println!("bell after {wait} steps: success rate {:.2}", outcome.score(Metric::Success).mean);
    }
    Ok(ExitCode::SUCCESS)
}
