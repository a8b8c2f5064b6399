//! Environments by name, for configs and command lines.

use std::str::FromStr;

use elmur_base::nearest;
use serde::{Deserialize, Serialize};

use crate::cartpole::CartPole;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::popgym::{Task, Version};
use crate::tmaze::{Corridor, TMaze};
use crate::wrappers::{Wrapped, Wrappers};

/// Name of an environment. In configs and on the command line: `tmaze`, `cartpole`, or the id of a POPGym
/// task with or without its `-v0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "&'static str")]
pub enum EnvKind {
    /// [`TMaze`].
    TMaze,
    /// [`CartPole`].
    CartPole,
    /// One of the 48 tasks of POPGym.
    Popgym(Task),
}

impl EnvKind {
    /// All environments.
    pub fn all() -> impl Iterator<Item = EnvKind> {
        [EnvKind::TMaze, EnvKind::CartPole].into_iter().chain(Task::all().map(EnvKind::Popgym))
    }

    /// The name in configs and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            EnvKind::TMaze => "tmaze",
            EnvKind::CartPole => "cartpole",
            EnvKind::Popgym(task) => task.id(),
        }
    }

    /// The environment of this name.
    pub fn find(name: &str) -> Option<Self> {
        match name {
            "tmaze" => Some(EnvKind::TMaze),
            "cartpole" => Some(EnvKind::CartPole),
            _ => Task::find(name).map(EnvKind::Popgym),
        }
    }
}

impl FromStr for EnvKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::find(name).ok_or_else(|| {
            let names = Self::all().map(|kind| kind.name().trim_end_matches("-v0"));
            let near = nearest(name.trim_end_matches("-v0"), names);
            let hint = near.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default();
            Error::Config {
                key: "name",
                expected: format!("tmaze, cartpole or a POPGym task such as popgym-RepeatFirstEasy{hint}"),
                got: name.to_owned(),
            }
        })
    }
}

impl TryFrom<String> for EnvKind {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        name.parse()
    }
}

impl From<EnvKind> for &'static str {
    fn from(kind: EnvKind) -> Self {
        kind.name()
    }
}

/// An environment by name, and its settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnvConfig {
    /// Name of the environment.
    pub name: EnvKind,
    /// T-Maze: the longest episode in steps, 2 more than the corridor has cells. Demonstrations have
    /// corridors of every length up to it; evaluation uses exactly this length. Other environments ignore the
    /// setting.
    #[serde(default)]
    pub length: u64,
    /// POPGym: the version of the Python package whose rules apply. Other environments ignore the setting.
    #[serde(default)]
    pub version: Version,
    /// Changes of observations and actions.
    #[serde(default)]
    pub wrappers: Wrappers,
}

impl EnvConfig {
    /// The environment without wrappers; T-Maze also needs a length.
    pub fn new(name: EnvKind) -> Self {
        Self { name, length: 0, version: Version::default(), wrappers: Wrappers::default() }
    }

    /// T-Maze of this length, without wrappers.
    pub fn tmaze(length: u64) -> Self {
        Self { length, ..Self::new(EnvKind::TMaze) }
    }

    /// CartPole-v1, without wrappers.
    pub fn cartpole() -> Self {
        Self::new(EnvKind::CartPole)
    }

    /// A POPGym task, without wrappers.
    pub fn popgym(task: Task) -> Self {
        Self::new(EnvKind::Popgym(task))
    }

    /// Makes the T-Maze that demonstrations are collected in: corridors of every length up to the longest.
    pub fn training_maze(&self) -> Result<TMaze> {
        let cells = self.corridor()?;
        let longest = u32::try_from(cells).map_err(|_| Error::Config {
            key: "length",
            expected: "at most 2^32 + 1 for training".to_owned(),
            got: self.length.to_string(),
        })?;
        TMaze::new(Corridor::UpTo(longest))
    }

    /// Makes the environment that policies are evaluated in.
    pub fn evaluation(&self) -> Result<Box<dyn Env>> {
        let env: Box<dyn Env> = match self.name {
            EnvKind::TMaze => Box::new(TMaze::new(Corridor::Fixed(self.corridor()?))?),
            EnvKind::CartPole => Box::new(CartPole::new()),
            EnvKind::Popgym(task) => task.make(self.version),
        };
        Ok(if self.wrappers.is_none() { env } else { Box::new(Wrapped::new(env, self.wrappers)?) })
    }

    /// Return of a very good episode: what return-conditioned policies are asked for.
    pub fn best_return(&self) -> f64 {
        match self.name {
            EnvKind::TMaze => 1.0,
            EnvKind::CartPole => 500.0,
            EnvKind::Popgym(task) => task.good_return(),
        }
    }

    /// Number of steps of the longest episode.
    pub fn max_steps(&self) -> u64 {
        match self.name {
            EnvKind::TMaze => self.length,
            EnvKind::CartPole => 500,
            EnvKind::Popgym(task) => task.max_steps() as u64,
        }
    }

    /// Whether the environment has the setting `length`.
    pub fn has_length(&self) -> bool {
        self.name == EnvKind::TMaze
    }

    fn corridor(&self) -> Result<u64> {
        self.length.checked_sub(2).filter(|cells| *cells > 0).ok_or_else(|| Error::Config {
            key: "length",
            expected: "at least 3 (a corridor of one cell, the turn and a spare step)".to_owned(),
            got: self.length.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn environments_are_found_by_name_and_refuse_nonsense() {
        for kind in EnvKind::all() {
            assert_eq!(kind.name().parse::<EnvKind>().unwrap(), kind);
            let config = EnvConfig { length: 9, ..EnvConfig::new(kind) };
            config.evaluation().unwrap().spaces().validate().unwrap();
        }
        for length in [0, 1, 2] {
            assert!(EnvConfig::tmaze(length).evaluation().is_err());
            assert!(EnvConfig::tmaze(length).training_maze().is_err());
        }
        assert!(EnvConfig::tmaze(1 << 40).training_maze().is_err());
        let error = |name: &str| name.parse::<EnvKind>().unwrap_err().to_string();
        assert!(error("tmase").contains("did you mean `tmaze`"), "{}", error("tmase"));
        let far = error("popgym-RepeatFristEasy-v0");
        assert!(far.contains("did you mean `popgym-RepeatFirstEasy`"), "{far}");
    }

    #[test]
    fn configs_are_read_and_written_by_name() {
        let read = |text: &str| serde_json::from_str::<EnvConfig>(text);
        let short = read(r#"{"name":"popgym-RepeatFirstEasy","wrappers":{"first_step":true}}"#).unwrap();
        let task = Task::find("popgym-RepeatFirstEasy-v0").unwrap();
        assert_eq!((short.name, short.version), (EnvKind::Popgym(task), Version::V107));
        let json = serde_json::to_string(&short).unwrap();
        assert!(json.contains("popgym-RepeatFirstEasy-v0"), "{json}");
        assert_eq!(read(&json).unwrap(), short);
        // Files from before there were versions and wrappers.
        assert_eq!(read(r#"{"name":"tmaze","length":9}"#).unwrap(), EnvConfig::tmaze(9));
        assert!(read(r#"{"name":"tmase"}"#).unwrap_err().to_string().contains("did you mean `tmaze`"));
    }
}
