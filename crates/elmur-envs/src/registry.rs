//! Environments by name, as configs and command lines ask for them.

use serde::{Deserialize, Serialize};

use crate::cartpole::CartPole;
use crate::env::Env;
use crate::error::{Error, Result};
use crate::tmaze::{Corridor, TMaze};

/// Which environment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum EnvKind {
    /// [`TMaze`].
    #[serde(rename = "tmaze")]
    TMaze,
    /// [`CartPole`].
    #[serde(rename = "cartpole")]
    CartPole,
}

impl EnvKind {
    /// All of them.
    pub const ALL: [EnvKind; 2] = [EnvKind::TMaze, EnvKind::CartPole];

    /// The name in configs and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            EnvKind::TMaze => "tmaze",
            EnvKind::CartPole => "cartpole",
        }
    }

    /// The environment of this name.
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// An environment and its settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnvConfig {
    /// Which environment.
    pub name: EnvKind,
    /// T-Maze: steps until the episode is cut off, 2 more than the corridor's cells. Training draws corridors up to that length;
    /// evaluation uses that length. Others ignore it.
    #[serde(default)]
    pub length: u64,
}

impl EnvConfig {
    /// T-Maze of this length.
    pub fn tmaze(length: u64) -> Self {
        Self { name: EnvKind::TMaze, length }
    }

    /// CartPole-v1.
    pub fn cartpole() -> Self {
        Self { name: EnvKind::CartPole, length: 0 }
    }

    /// The maze that demonstrations are collected in: corridors of every length up to the longest.
    pub fn training_maze(&self) -> Result<TMaze> {
        let cells = self.corridor()?;
        let longest = u32::try_from(cells).map_err(|_| Error::Config {
            key: "length",
            expected: "at most 2^32 + 1 for training".to_owned(),
            got: self.length.to_string(),
        })?;
        TMaze::new(Corridor::UpTo(longest))
    }

    /// The environment that policies are evaluated in.
    pub fn evaluation(&self) -> Result<Box<dyn Env>> {
        Ok(match self.name {
            EnvKind::TMaze => Box::new(TMaze::new(Corridor::Fixed(self.corridor()?))?),
            EnvKind::CartPole => Box::new(CartPole::new()),
        })
    }

    /// The return of a perfect episode, which return-conditioned policies are asked for.
    pub fn best_return(&self) -> f64 {
        match self.name {
            EnvKind::TMaze => 1.0,
            EnvKind::CartPole => 500.0,
        }
    }

    /// Whether `length` means anything here.
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
        for kind in EnvKind::ALL {
            assert_eq!(EnvKind::find(kind.name()), Some(kind));
            EnvConfig { name: kind, length: 9 }.evaluation().unwrap().spaces().validate().unwrap();
        }
        for length in [0, 1, 2] {
            assert!(EnvConfig::tmaze(length).evaluation().is_err());
            assert!(EnvConfig::tmaze(length).training_maze().is_err());
        }
        assert!(EnvConfig::tmaze(1 << 40).training_maze().is_err());
        assert_eq!(EnvKind::find("tmase"), None);
    }
}
