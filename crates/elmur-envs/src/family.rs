//! Families: environments that are made by name, with settings of their own.

use elmur_base::{Describe, Stop};
use elmur_pool::Pool;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::env::{Env, Player};
use crate::error::{Error, Result};
use crate::thinning::Thinning;
use crate::vec_env::{AnyVecEnv, VecEnv};
use crate::wrappers::Wrappers;

/// What an environment is made for. The two may differ: T-Maze, for example, shows corridors of every length
/// in demonstrations and of one length in evaluations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Demonstrations are collected in it.
    Collect,
    /// Policies are evaluated in it.
    Evaluate,
}

/// What the episodes of an environment are judged by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// The sum of an episode's rewards.
    #[default]
    Return,
    /// Whether the episode solved the task ([`Step::success`](crate::Step::success)).
    Success,
}

/// What is known about an environment without playing it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Facts {
    /// Number of steps of the longest episode, where there is a limit. Used to show progress.
    pub max_steps: Option<u64>,
    /// Return of a very good episode: what return-conditioned policies are asked for.
    pub good_return: Option<f64>,
    /// What evaluations judge episodes by.
    pub metric: Metric,
    /// Most rows that are worth making, where rows are expensive: a process each, for example. Evaluations
    /// then play one episode after the other in each of them.
    pub max_rows: Option<usize>,
    /// Whether demonstrations that do not solve the task are played again with another seed, so that recordings
    /// show successes only.
    pub drops_failures: bool,
    /// What the environment calls the leaves of its observation space, in their order; empty: they have no
    /// names.
    pub observations: Vec<ObservationName>,
    /// How the environment thins what its cameras see.
    pub thinning: Thinning,
}

/// Name of a leaf of an observation space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservationName {
    /// Name of the array.
    pub name: &'static str,
    /// Whether the leaf is a picture [channels, height, width] that the environment, and recordings of other
    /// programs, have as [height, width, channels].
    pub channels_last: bool,
}

/// A setting of an environment, as `env.KEY` in configs and on the command line.
#[derive(Debug, Clone, PartialEq)]
pub struct Setting {
    /// Name of the setting.
    pub key: &'static str,
    /// The value where none is given. Other values must be of the same JSON type, unless this is null.
    pub default: Value,
    /// What the setting does, in a sentence.
    pub text: &'static str,
    /// Whether the setting changes what happens in episodes, so that data tell with which value they were
    /// recorded.
    pub shapes_episodes: bool,
}

impl Setting {
    /// A setting with its default and what it does.
    pub fn new(key: &'static str, default: impl Into<Value>, text: &'static str) -> Self {
        Self { key, default: default.into(), text, shapes_episodes: true }
    }

    /// The setting as one that changes nothing in what is recorded: time-outs, numbers of processes, when evaluations
    /// end.
    pub fn technical(mut self) -> Self {
        self.shapes_episodes = false;
        self
    }
}

/// Environments that are made by name: those of this crate (T-Maze, CartPole, POPGym, Python's), or your own.
///
/// A family in a [`Registry`](crate::Registry) is all that `collect`, `train` with validation, `eval` and
/// pictures need.
pub trait Family: Send + Sync {
    /// The names of the family's environments.
    fn names(&self) -> Vec<String>;

    /// The full name of the environment that someone means by `name`; none if it is not in this family.
    fn resolve(&self, name: &str) -> Option<String> {
        self.names().into_iter().find(|known| known == name)
    }

    /// The settings of the environment of this name. Unknown settings in a config are refused.
    fn settings(&self, name: &str) -> Vec<Setting> {
        let _ = name;
        Vec::new()
    }

    /// Whether episodes of the environment can be played here; an error says what is missing, such as a
    /// simulator, and how to get it. Spaces and facts are known either way.
    fn available(&self, spec: &EnvSpec) -> Result<()> {
        let _ = spec;
        Ok(())
    }

    /// Makes an environment without wrappers. The spec has a value for every setting.
    fn make(&self, spec: &EnvSpec, purpose: Purpose) -> Result<Box<dyn Env>>;

    /// Makes rows of an environment without wrappers. Families whose environments are stepped together by
    /// nature, or faster when their type is known, make their own.
    fn make_rows(
        &self,
        spec: &EnvSpec,
        purpose: Purpose,
        rows: usize,
        pool: &Pool,
    ) -> Result<Box<dyn AnyVecEnv>> {
        let envs = (0..rows).map(|_| self.make(spec, purpose)).collect::<Result<Vec<_>>>()?;
        Ok(Box::new(VecEnv::new(envs)?.with_pool(pool)))
    }

    /// Makes a player that demonstrates the environment without wrappers; none if nobody can.
    fn player(&self, spec: &EnvSpec) -> Result<Option<Box<dyn Player>>> {
        let _ = spec;
        Ok(None)
    }

    /// Makes an environment without wrappers together with a player of its episodes; none if nobody can play
    /// it. Families whose players live where the environment does make both at once.
    fn make_played(&self, spec: &EnvSpec) -> Result<Option<Played>> {
        let Some(player) = self.player(spec)? else { return Ok(None) };
        Ok(Some((self.make(spec, Purpose::Collect)?, player)))
    }

    /// What is known about the environment without playing it.
    fn facts(&self, spec: &EnvSpec) -> Facts {
        let _ = spec;
        Facts::default()
    }

    /// Ends waiting for other processes when `stop` is requested. Families that wait for none ignore it.
    fn stop_with(&self, stop: &Stop) {
        let _ = stop;
    }

    /// What users should know about episodes played so far, such as how often a process died; a line each.
    fn incidents(&self) -> Vec<String> {
        Vec::new()
    }
}

/// An environment and a player of its episodes.
pub type Played = (Box<dyn Env>, Box<dyn Player>);

/// An environment by name, with its settings and wrappers: plain data for configs, which may also give the
/// name alone. [`Registry::find`](crate::Registry::find) turns it into an
/// [`Environment`](crate::Environment).
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EnvSpec {
    /// Name of the environment.
    pub name: String,
    /// Settings of the environment; those that are absent have their defaults.
    #[serde(flatten)]
    pub settings: Map<String, Value>,
    /// Changes of observations and actions.
    pub wrappers: Wrappers,
}

impl EnvSpec {
    /// The environment of this name with all settings at their defaults and no wrappers.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), settings: Map::new(), wrappers: Wrappers::default() }
    }

    /// The same environment with one setting changed.
    pub fn with(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.settings.insert(key.into(), value.into());
        self
    }

    /// The same environment with these wrappers.
    pub fn with_wrappers(mut self, wrappers: Wrappers) -> Self {
        self.wrappers = wrappers;
        self
    }

    /// The value of a setting. A value of another type is an error that names the key.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Result<T> {
        let value = self.settings.get(key).cloned().unwrap_or(Value::Null);
        let got = value.to_string();
        serde_json::from_value(value).map_err(|e| {
            // Of "invalid value: integer `0`, expected a nonzero u32" the end.
            let problem = e.to_string();
            let expected =
                problem.rsplit_once("expected ").map_or(problem.as_str(), |(_, expected)| expected);
            let whole = ["u64", "u32", "usize"].iter().find(|name| expected == **name);
            Error::config(key, whole.map_or(expected, |_| "a whole number of at least 0"), got)
        })
    }
}

impl<'de> Deserialize<'de> for EnvSpec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Written {
            name: String,
            #[serde(default)]
            wrappers: Wrappers,
            #[serde(flatten)]
            settings: Map<String, Value>,
        }
        let written = match Value::deserialize(deserializer)? {
            Value::String(name) => return Ok(Self::new(name)),
            written => written,
        };
        let Written { name, wrappers, settings } =
            serde_json::from_value(written).map_err(D::Error::custom)?;
        Ok(Self { name, settings, wrappers })
    }
}
