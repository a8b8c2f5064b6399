//! Environments by name, for configs and command lines. The list is open: a family of your own is added with
//! [`Registry::with`].

use std::fmt;
use std::sync::Arc;

use elmur_base::{Spaces, Stop, nearest};
use elmur_pool::Pool;
use serde_json::{Map, Value};

use crate::env::{Env, Player};
use crate::error::{Error, Result};
use crate::family::{EnvSpec, Facts, Family, Played, Purpose, Setting};
use crate::vec_env::{AnyVecEnv, VecEnv};
use crate::wrappers::{Wrapped, Wrappers};

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
    /// The environments of this crate: T-Maze, CartPole, POPGym's 48 tasks, and on Unix MIKASA-Robo's 32 tasks
    /// (their simulator is installed apart) and any environment in Python (`python:module:Class`,
    /// `python:GYMNASIUM-ID`).
    pub fn builtin() -> Self {
        let families: Vec<Arc<dyn Family>> = vec![
            Arc::new(crate::tmaze::TMazeFamily),
            Arc::new(crate::cartpole::CartPoleFamily),
            Arc::new(crate::popgym::Popgym),
            #[cfg(unix)]
            Arc::new(crate::mikasa::Mikasa::default()),
            #[cfg(unix)]
            Arc::new(crate::python::Python::default()),
        ];
        Self(families)
    }

    /// The registry with one more family. Its names hide those of families added before it.
    pub fn with(mut self, family: impl Family + 'static) -> Self {
        self.0.insert(0, Arc::new(family));
        self
    }

    /// Ends waiting for environments in other processes when `stop` is requested.
    pub fn stop_with(&self, stop: &Stop) {
        self.0.iter().for_each(|family| family.stop_with(stop));
    }

    /// What users should know about episodes played so far, such as how often a process died; a line each.
    pub fn incidents(&self) -> Vec<String> {
        self.0.iter().flat_map(|family| family.incidents()).collect()
    }

    /// The settings of the environment of this name, without making it; none if there is no such name.
    pub fn settings(&self, name: &str) -> Vec<Setting> {
        let found = self.0.iter().find_map(|family| Some((family, family.resolve(name)?)));
        found.map(|(family, name)| family.settings(&name)).unwrap_or_default()
    }

    /// The full name of the environment of this name, without making it; none if there is no such name.
    pub fn resolve(&self, name: &str) -> Option<String> {
        self.0.iter().find_map(|family| family.resolve(name))
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
        let many = ["popgym-", "mikasa-"];
        let own = all.iter().filter(|name| !many.iter().any(|family| name.starts_with(family)));
        let own = own.map(String::as_str);
        let own = own.collect::<Vec<_>>().join(", ");
        let expected = format!(
            "{own}, a POPGym task such as popgym-RepeatFirstEasy, a MIKASA-Robo task such as \
             mikasa-RememberColor3, or an environment in Python such as python:module:Class or \
             python:CartPole-v1{hint}"
        );
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
        self.family.player(&self.spec)?.ok_or_else(|| self.nobody_plays())
    }

    fn nobody_plays(&self) -> Error {
        let expected = "an environment with a player that can demonstrate it; give recordings instead";
        Error::config("name", expected, &self.spec.name)
    }

    /// Makes the environment without wrappers, for demonstrations, together with its player. An environment
    /// that nobody can demonstrate is an error.
    pub fn played(&self) -> Result<Played> {
        self.family.make_played(&self.spec)?.ok_or_else(|| self.nobody_plays())
    }

    /// Whether episodes of the environment can be played here; an error says what is missing and how to get it.
    pub fn available(&self) -> Result<()> {
        self.family.available(&self.spec)
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
        assert_eq!(registry.names().len(), if cfg!(unix) { 82 } else { 50 });
        // Those of simulators have tests of their own.
        for name in registry.names().into_iter().filter(|name| !name.starts_with("mikasa-")) {
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
        assert_eq!(negative, "environment `length`: expected a whole number of at least 0, got -2");
        let version = EnvSpec::new("popgym-CountRecallEasy").with("version", "2");
        assert!(message(version).contains("1.0.6 or 1.0.7"));
    }

    #[test]
    fn specs_are_written_with_all_settings_and_read_with_some() {
        let written = |spec: EnvSpec| serde_json::to_value(find(spec).unwrap().spec()).unwrap();
        let none = serde_json::to_value(Wrappers::default()).unwrap();
        assert_eq!(
            written(EnvSpec::new("tmaze").with("length", 9)),
            json!({"name": "tmaze", "length": 9, "wrappers": none})
        );
        assert_eq!(written(EnvSpec::new("cartpole")), json!({"name": "cartpole", "wrappers": none}));
        let read = |value| serde_json::from_value::<EnvSpec>(value);
        let early = json!({"name": "cartpole", "wrappers": {"first_step": true}});
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
