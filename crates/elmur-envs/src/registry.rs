//! Environments by name, for configs and command lines. The list is open: a family of your own is added with
//! [`Registry::with`].

use std::fmt;
use std::sync::Arc;

use elmur_base::{Describe, Spaces, nearest};
use elmur_pool::Pool;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::env::{Env, Player};
use crate::error::{Error, Result};
use crate::vec_env::{AnyVecEnv, VecEnv};
use crate::wrappers::{Wrapped, Wrappers};

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
}

impl Setting {
    /// A setting with its default and what it does.
    pub fn new(key: &'static str, default: impl Into<Value>, text: &'static str) -> Self {
        Self { key, default: default.into(), text }
    }
}

/// Environments that are made by name: the three of this crate (T-Maze, CartPole, POPGym), or your own.
///
/// A family in a [`Registry`] is all that `collect`, `train` with validation, `eval` and pictures need.
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

    /// What is known about the environment without playing it.
    fn facts(&self, spec: &EnvSpec) -> Facts {
        let _ = spec;
        Facts::default()
    }
}

/// An environment by name, with its settings and wrappers: plain data for configs, which may also give the
/// name alone. [`Registry::find`] turns it into an [`Environment`].
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
            Error::config(key, expected, got)
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
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum NameOrAll {
            Name(String),
            All(Written),
        }
        let Written { name, wrappers, mut settings } = match NameOrAll::deserialize(deserializer)? {
            NameOrAll::Name(name) => return Ok(Self::new(name)),
            NameOrAll::All(written) => written,
        };
        // Earlier files have every setting of every environment, with these values where they mean nothing.
        if settings.get("length").is_some_and(|length| *length == 0) {
            settings.remove("length");
        }
        if settings.get("version").is_some_and(|version| *version == "1.0.7") {
            settings.remove("version");
        }
        Ok(Self { name, settings, wrappers })
    }
}

/// The environments that are known by name.
///
/// ```
/// use elmur_envs::{EnvSpec, Purpose, Registry};
///
/// let registry = Registry::builtin();
/// let maze = registry.find(&EnvSpec::new("tmaze").with("length", 90))?;
/// let env = maze.make(Purpose::Evaluate)?;
/// assert_eq!(env.spaces().observation.widths().floats, 4);
/// # Ok::<(), elmur_envs::Error>(())
/// ```
#[derive(Clone)]
pub struct Registry(Vec<Arc<dyn Family>>);

impl Default for Registry {
    fn default() -> Self {
        Self::builtin()
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registry").field(&self.names().len()).finish()
    }
}

impl Registry {
    /// The environments of this crate: T-Maze, CartPole and POPGym's 48 tasks.
    pub fn builtin() -> Self {
        let families: [Arc<dyn Family>; 3] = [
            Arc::new(crate::tmaze::TMazeFamily),
            Arc::new(crate::cartpole::CartPoleFamily),
            Arc::new(crate::popgym::Popgym),
        ];
        Self(families.into())
    }

    /// The registry with one more family. Its names hide those of families added before it.
    pub fn with(mut self, family: impl Family + 'static) -> Self {
        self.0.insert(0, Arc::new(family));
        self
    }

    /// The names of all environments.
    pub fn names(&self) -> Vec<String> {
        self.0.iter().flat_map(|family| family.names()).collect()
    }

    /// Finds the environment that a spec names, checks its settings and fills in those that are absent. An
    /// unknown name or setting is answered with the nearest.
    pub fn find(&self, spec: &EnvSpec) -> Result<Environment> {
        let found = self.0.iter().find_map(|family| Some((family, family.resolve(&spec.name)?)));
        let Some((family, name)) = found else { return Err(self.unknown(&spec.name)) };
        Environment::new(Arc::clone(family), EnvSpec { name, ..spec.clone() })
    }

    fn unknown(&self, name: &str) -> Error {
        let names = self.names();
        let short = |name: &str| name.strip_suffix("-v0").unwrap_or(name).to_owned();
        let all: Vec<String> = names.iter().map(|name| short(name)).collect();
        let near = nearest(&short(name), all.iter().map(String::as_str));
        let hint = near.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default();
        let own = all.iter().filter(|name| !name.starts_with("popgym-")).map(String::as_str);
        let own = own.collect::<Vec<_>>().join(", ");
        let expected = format!("{own} or a POPGym task such as popgym-RepeatFirstEasy{hint}");
        Error::config("name", expected, name)
    }
}

/// An environment that was found by name: makes environments, rows of them and players.
#[derive(Clone)]
pub struct Environment {
    family: Arc<dyn Family>,
    spec: EnvSpec,
    plain: Spaces,
    spaces: Spaces,
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Environment").field(&self.spec).finish()
    }
}

impl Environment {
    /// An environment of a family, whether or not the family is in a registry. Settings are checked, and
    /// those that are absent get their defaults.
    pub fn new(family: Arc<dyn Family>, mut spec: EnvSpec) -> Result<Self> {
        let known = family.settings(&spec.name);
        if let Some(key) = spec.settings.keys().find(|key| known.iter().all(|known| known.key != **key)) {
            let keys: Vec<&str> = known.iter().map(|setting| setting.key).collect();
            let hint = elmur_base::did_you_mean(key, keys.iter().copied());
            let expected = match keys.as_slice() {
                [] => format!("no settings: {} has none", spec.name),
                keys => format!("one of the settings of {}: {}{hint}", spec.name, keys.join(", ")),
            };
            return Err(Error::config(key, expected, &spec.settings[key]));
        }
        let mut settings = Map::new();
        for Setting { key, default, .. } in known {
            let value = spec.settings.remove(key).unwrap_or_else(|| default.clone());
            if !default.is_null() && std::mem::discriminant(&value) != std::mem::discriminant(&default) {
                return Err(Error::config(key, format!("a value like {default}"), value));
            }
            settings.insert(key.to_owned(), value);
        }
        spec.settings = settings;
        let plain = family.make(&spec, Purpose::Evaluate)?.spaces().clone();
        let spaces = crate::wrappers::Wrapping::new(&plain, spec.wrappers)?.spaces().clone();
        Ok(Self { family, spec, plain, spaces })
    }

    /// The name, all settings and the wrappers.
    pub fn spec(&self) -> &EnvSpec {
        &self.spec
    }

    /// Name of the environment.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The settings of the environment with their defaults and what they do.
    pub fn settings(&self) -> Vec<Setting> {
        self.family.settings(&self.spec.name)
    }

    /// Observation and action space, with all wrappers.
    pub fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    /// The environment without wrappers.
    pub fn plain(&self) -> Self {
        let spec = self.spec.clone().with_wrappers(Wrappers::default());
        Self { spec, spaces: self.plain.clone(), ..self.clone() }
    }

    /// The environment with one setting changed, checked.
    pub fn with(&self, key: &str, value: impl Into<Value>) -> Result<Self> {
        Self::new(Arc::clone(&self.family), self.spec.clone().with(key, value))
    }

    /// Makes an environment with all wrappers.
    pub fn make(&self, purpose: Purpose) -> Result<Box<dyn Env>> {
        let env = self.family.make(&self.spec, purpose)?;
        let wrappers = self.spec.wrappers;
        Ok(if wrappers.is_none() { env } else { Box::new(Wrapped::new(env, wrappers)?) })
    }

    /// Makes rows of the environment with all wrappers, stepped on the threads of a pool.
    pub fn make_rows(&self, purpose: Purpose, rows: usize, pool: &Pool) -> Result<Box<dyn AnyVecEnv>> {
        if self.spec.wrappers.is_none() {
            return self.family.make_rows(&self.spec, purpose, rows, pool);
        }
        let envs = (0..rows).map(|_| self.make(purpose)).collect::<Result<Vec<_>>>()?;
        Ok(Box::new(VecEnv::new(envs)?.with_pool(pool)))
    }

    /// Makes a player of the environment without wrappers. An environment that nobody can demonstrate is an
    /// error.
    pub fn player(&self) -> Result<Box<dyn Player>> {
        self.family.player(&self.spec)?.ok_or_else(|| {
            let expected = "an environment with a player that can demonstrate it; give recordings instead";
            Error::config("name", expected, &self.spec.name)
        })
    }

    /// What is known about the environment without playing it.
    pub fn facts(&self) -> Facts {
        self.family.facts(&self.spec)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn find(spec: EnvSpec) -> Result<Environment> {
        Registry::builtin().find(&spec)
    }

    #[test]
    fn all_environments_are_found_by_name_and_have_players() {
        let registry = Registry::builtin();
        assert_eq!(registry.names().len(), 50);
        for name in registry.names() {
            let env = registry.find(&EnvSpec::new(&name)).unwrap();
            assert_eq!(env.name(), name);
            assert!(
                env.player().is_ok() && env.facts().max_steps.is_some() && env.facts().good_return.is_some()
            );
            for purpose in [Purpose::Collect, Purpose::Evaluate] {
                assert_eq!(env.make(purpose).unwrap().spaces(), env.spaces());
                assert_eq!(env.make_rows(purpose, 2, Pool::serial()).unwrap().spaces(), env.spaces());
            }
        }
        let short = registry.find(&EnvSpec::new("popgym-RepeatFirstEasy")).unwrap();
        assert_eq!(short.name(), "popgym-RepeatFirstEasy-v0");
    }

    #[test]
    fn unknown_names_and_settings_are_answered_with_the_nearest() {
        let message = |spec| find(spec).unwrap_err().to_string();
        let maze = || EnvSpec::new("tmaze");
        assert!(message(EnvSpec::new("tmase")).contains("did you mean `tmaze`"));
        let task = message(EnvSpec::new("popgym-RepeatFristEasy-v0"));
        assert!(task.contains("did you mean `popgym-RepeatFirstEasy`"), "{task}");
        let setting = message(maze().with("lenght", 9));
        assert!(setting.contains("did you mean `length`"), "{setting}");
        assert!(message(EnvSpec::new("cartpole").with("length", 7)).contains("cartpole has none"));
        assert!(message(maze().with("length", "long")).contains("a value like 30"));
        assert!(message(maze().with("length", 2)).contains("at least 3"));
        let negative = message(maze().with("length", -2));
        assert_eq!(negative, "environment `length`: expected u64, got -2");
        let version = EnvSpec::new("popgym-CountRecallEasy").with("version", "2");
        assert!(message(version).contains("1.0.6 or 1.0.7"));
    }

    #[test]
    fn specs_are_written_with_all_settings_and_read_in_earlier_forms() {
        let written = |spec: EnvSpec| serde_json::to_value(find(spec).unwrap().spec()).unwrap();
        let none = serde_json::to_value(Wrappers::default()).unwrap();
        assert_eq!(
            written(EnvSpec::new("tmaze").with("length", 9)),
            json!({"name": "tmaze", "length": 9, "wrappers": none})
        );
        assert_eq!(written(EnvSpec::new("cartpole")), json!({"name": "cartpole", "wrappers": none}));
        let read = |value| serde_json::from_value::<EnvSpec>(value);
        let early =
            json!({"name": "cartpole", "length": 0, "version": "1.0.7", "wrappers": {"first_step": true}});
        let spec = read(early).unwrap();
        assert_eq!(find(spec).unwrap().spec().wrappers.names(), ["first_step"]);
        assert_eq!(read(json!("cartpole")).unwrap(), EnvSpec::new("cartpole"));
        assert!(read(json!({"length": 9})).is_err());
    }

    #[test]
    fn a_family_of_ones_own_is_found_like_the_others_and_its_errors_come_through() {
        struct Broken;
        impl Family for Broken {
            fn names(&self) -> Vec<String> {
                vec!["broken".to_owned(), "tmaze".to_owned()]
            }
            fn make(&self, spec: &EnvSpec, _: Purpose) -> Result<Box<dyn Env>> {
                Err(Error::foreign(format!("no simulator for {}", spec.name)))
            }
        }
        let registry = Registry::builtin().with(Broken);
        let message = |name: &str| registry.find(&EnvSpec::new(name)).unwrap_err().to_string();
        assert_eq!(message("broken"), "no simulator for broken");
        assert_eq!(message("tmaze"), "no simulator for tmaze", "the newest family hides earlier ones");
        assert!(message("broke").contains("did you mean `broken`"));
    }
}
