//! Observations of several keys: a dictionary of arrays as a tuple of spaces.
//!
//! Spaces of ours have no names. A source that knows them notes names and shapes in its metadata, one entry
//! per leaf of the observation space, so that they survive conversion and can be chosen by name.

use std::collections::BTreeMap;

use elmur_base::{Leaf, Space, did_you_mean};
use elmur_envs::ObservationName;
use serde::{Deserialize, Serialize};

/// Key of the metadata that holds the names and shapes of observations, as a JSON list.
const NOTE: &str = "observation_keys";

/// One array of an observation as its source calls it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObservationKey {
    /// Name of the array; of arrays in groups, the path.
    pub name: String,
    /// Axes of the array at one step.
    pub shape: Vec<usize>,
    /// Whether these are pictures [height, width, channels] or [height, width], kept as [channels, height,
    /// width].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub channels_last: bool,
}

impl ObservationKey {
    /// The keys of the leaves of an observation space, in their order: those that metadata names, if they fit
    /// the space, else the numbers of the leaves.
    pub fn of(metadata: &BTreeMap<String, String>, space: &Space) -> Vec<Self> {
        let leaves = space.leaves();
        let noted = metadata.get(NOTE).and_then(|note| serde_json::from_str::<Vec<Self>>(note).ok());
        let fits = |keys: &Vec<Self>| {
            let len = |key: &Self| key.shape.iter().try_fold(1usize, |len, n| len.checked_mul(*n));
            keys.len() == leaves.len() && keys.iter().zip(&leaves).all(|(key, leaf)| key.fits(leaf, len(key)))
        };
        noted.filter(fits).unwrap_or_else(|| {
            let key = |(i, leaf): (usize, &Leaf<'_>)| {
                let shape = match leaf {
                    Leaf::Ints(sizes) => vec![sizes.len()],
                    Leaf::Floats { shape, .. } | Leaf::Bytes { shape } => shape.to_vec(),
                };
                Self { name: i.to_string(), shape, channels_last: false }
            };
            leaves.iter().enumerate().map(key).collect()
        })
    }

    /// Whether metadata name observations.
    pub fn are_noted(metadata: &BTreeMap<String, String>) -> bool {
        metadata.contains_key(NOTE)
    }

    fn fits(&self, leaf: &Leaf<'_>, len: Option<usize>) -> bool {
        let picture = match leaf {
            Leaf::Floats { shape, .. } | Leaf::Bytes { shape } => match (&self.shape[..], shape) {
                ([height, width], [1, h, w]) => (height, width) == (h, w),
                ([height, width, channels], [c, h, w]) => (height, width, channels) == (h, w, c),
                _ => false,
            },
            Leaf::Ints(_) => false,
        };
        len == Some(leaf.len()) && (picture || !self.channels_last)
    }

    /// Notes in metadata what an environment calls the leaves of its observation space; nothing where it names
    /// none.
    pub fn note_names(names: &[ObservationName], space: &Space, metadata: &mut BTreeMap<String, String>) {
        let leaves = space.leaves();
        if names.is_empty() || names.len() != leaves.len() {
            return;
        }
        let mut keys = Self::of(&BTreeMap::new(), space);
        for (key, name) in keys.iter_mut().zip(names) {
            key.name = name.name.to_owned();
            if let ([channels, height, width], true) = (&key.shape[..], name.channels_last) {
                (key.shape, key.channels_last) = (vec![*height, *width, *channels], true);
            }
        }
        Self::note(&keys, metadata);
    }

    /// Notes keys in metadata.
    pub(crate) fn note(keys: &[Self], metadata: &mut BTreeMap<String, String>) {
        if let Ok(note) = serde_json::to_string(keys) {
            metadata.insert(NOTE.to_owned(), note);
        }
    }
}

/// What to read of data that hold more than one policy needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// Names of the observations to read, in this order; none: all.
    pub keys: Vec<String>,
    /// Name of the array of actions, where a format has more than one.
    pub action_key: Option<String>,
    /// Name of the list of episodes to read, where a format has such lists (robomimic's masks).
    pub mask: Option<String>,
    /// Steps after which episodes of D4RL files without `timeouts` are cut; none: 1,000.
    pub step_limit: Option<usize>,
}

impl Selection {
    /// Refuses an action key, mask or step limit for a format that has none.
    pub(crate) fn only_keys(&self, format: &str) -> Result<(), String> {
        let refuse = |what: &str| Err(format!("{format} has no {what}; leave it out"));
        match self {
            Self { action_key: Some(_), .. } => refuse("choice of an action key"),
            Self { mask: Some(_), .. } => refuse("masks"),
            Self { step_limit: Some(_), .. } => refuse("use for a step limit"),
            _ => Ok(()),
        }
    }

    /// Of all keys that there are those to read, by their numbers in `all`.
    pub(crate) fn choose(&self, all: &[&str]) -> Result<Vec<usize>, String> {
        if self.keys.is_empty() {
            return Ok((0..all.len()).collect());
        }
        let find =
            |key: &String| all.iter().position(|have| have == key).ok_or_else(|| unknown_key(key, all));
        let chosen: Vec<usize> = self.keys.iter().map(find).collect::<Result<_, _>>()?;
        match chosen.iter().enumerate().find(|(i, key)| chosen[..*i].contains(key)) {
            Some((i, _)) => Err(format!("key {:?} is chosen twice; name each once", self.keys[i])),
            None => Ok(chosen),
        }
    }
}

/// The error for a key that does not exist.
pub(crate) fn unknown_key(key: &str, all: &[&str]) -> String {
    let close = did_you_mean(key, all.iter().copied());
    let listed = all.iter().take(20).copied().collect::<Vec<_>>().join(", ");
    format!("no key {key:?}{close}; there are: {listed}")
}

/// The space of observations of some keys: that of a single one, a tuple of several.
pub(crate) fn side_by_side(mut spaces: Vec<Space>) -> Space {
    if spaces.len() == 1 { spaces.remove(0) } else { Space::Tuple { parts: spaces } }
}
