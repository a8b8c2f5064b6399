//! D4RL: one HDF5 file of flat arrays, all episodes one after the other.
//!
//! | array | shape | meaning |
//! |---|---|---|
//! | `observations` | [N, ...] | observations |
//! | `next_observations` | [N, ...], optional | what followed: its row at an episode's end is the final observation |
//! | `actions` | [N, ...] | actions |
//! | `rewards` | `[N]` or [N, 1] | rewards |
//! | `terminals` | `[N]`, any numbers | not 0 where the task ended |
//! | `timeouts` | `[N]`, any numbers, optional | not 0 where an episode was cut off |
//!
//! An episode ends where `terminals` or `timeouts` say so; in files without `timeouts` also after a number of
//! steps. What follows the last end is an episode that was cut off. Everything else in the file is ignored.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use elmur_base::Spaces;

use crate::array::{Array, floats};
use crate::episode::Episode;
use crate::error::{Error, Result};
use crate::fields::{Field, action_space, observation_space};
use crate::hdf5::{Data, Hdf5};
use crate::keys::{ObservationKey, Selection};
use crate::limits::Limits;
use crate::recordings::Recordings;

/// Steps after which an episode is cut in files without `timeouts`.
const STEP_LIMIT: usize = 1000;
/// Most episodes of a file: a few bytes can claim that every one of billions of steps is an end.
const MAX_EPISODES: usize = 1 << 20;
/// Most steps of a file.
const MAX_STEPS: usize = 1 << 28;
/// Steps of which the ends are read at once.
const BLOCK: usize = 1 << 20;

/// A file and where its episodes begin and end.
#[derive(Debug)]
pub(crate) struct D4rl {
    file: Hdf5,
    spaces: Spaces,
    metadata: BTreeMap<String, String>,
    observation: Field,
    action: Field,
    /// Rows of each episode, and whether its task ended.
    episodes: Vec<(Range<usize>, bool)>,
    limits: Limits,
}

impl D4rl {
    /// Whether a file has the arrays of this format at its root.
    pub(crate) fn is_in(file: &Hdf5) -> Result<bool> {
        let (_, datasets) = file.members("")?;
        Ok(["observations", "actions", "rewards"].iter().all(|name| datasets.iter().any(|have| have == name)))
    }

    pub(crate) fn open(
        file: Hdf5,
        known: Option<&Spaces>,
        selection: &Selection,
        limits: &Limits,
    ) -> Result<Self> {
        let plain = Selection { step_limit: None, ..selection.clone() };
        plain.only_keys("a D4RL file").map_err(|problem| file.error(problem))?;
        plain.choose(&["observations"]).map_err(|problem| file.error(problem))?;
        let field = |name: &str| -> Result<(Vec<usize>, _)> {
            let data = file.data(name)?;
            let element = data.element().ok_or_else(|| file.error(format!("`{name}`: expected numbers")))?;
            let shape = data.shape()?;
            Ok((shape.get(1..).unwrap_or_default().to_vec(), element))
        };
        let (shape, element) = field("observations")?;
        let observation = Field::observed("observations", &shape, element);
        let (shape, element) = field("actions")?;
        let action = Field::acted("actions", &shape, element).map_err(|problem| file.error(problem))?;
        let spaces = match known {
            Some(known) => known.clone(),
            None => Spaces {
                observation: observation_space(std::slice::from_ref(&observation)),
                action: action_space(std::slice::from_ref(&action)),
            },
        };
        let rows = file.data("observations")?.rows()?;
        if rows > MAX_STEPS {
            return Err(file.error(format!("`observations`: {rows} steps; expected at most {MAX_STEPS}")));
        }
        let cut = match (file.find("timeouts")?, selection.step_limit) {
            (_, Some(limit)) => Some(limit.max(1)),
            (None, None) => Some(STEP_LIMIT),
            (Some(_), None) => None,
        };
        let mut episodes = ended_episodes(&file, rows, cut, limits)?;
        let start = episodes.last().map_or(0, |(last, _)| last.end);
        let mut metadata = BTreeMap::from([
            ("format".to_owned(), "D4RL".to_owned()),
            ("source".to_owned(), file.path().display().to_string()),
        ]);
        let mut notes = Vec::new();
        if let Some(cut) = cut {
            notes.push(format!("episodes are cut after {cut} steps where they had not ended"));
        }
        if start < rows {
            notes.push(format!(
                "the last {} steps have no end and are taken as an episode that was cut off",
                rows - start
            ));
            episodes.push((start..rows, false));
        }
        if !notes.is_empty() {
            metadata.insert("note".to_owned(), notes.join("; "));
        }
        if episodes.is_empty() {
            return Err(Error::Empty { path: file.path().to_owned() });
        }
        ObservationKey::note(&[observation.key()], &mut metadata);
        Ok(Self { file, spaces, metadata, observation, action, episodes, limits: *limits })
    }

    fn episode(&self, rows: Range<usize>, ended: bool) -> Result<Episode> {
        let left = Cell::new(self.limits.inflated);
        let total = self.file.data("observations")?.rows()?;
        let actions = self.file.data("actions")?;
        if actions.rows()? != total {
            let got = actions.rows()?;
            return Err(self
                .file
                .error(format!("`actions`: expected {total} rows as of `observations`, got {got}")));
        }
        let mut observations = self.file.data("observations")?.read(rows.clone(), &left)?;
        let text = |problem| self.file.error(problem);
        if let Some(next) = self.file.find("next_observations")? {
            let last: Array = next.read(rows.end - 1..rows.end, &left)?;
            observations = observations.followed_by(last).map_err(text)?;
        }
        let limit = self.limits.inflated;
        let observations = self.observation.prepared(observations).map_err(text)?;
        let actions = self.action.prepared(actions.read(rows.clone(), &left)?).map_err(text)?;
        Ok(Episode {
            observations: observations
                .columns("observations", &self.spaces.observation, limit)
                .map_err(text)?,
            actions: actions.columns("actions", &self.spaces.action, limit).map_err(text)?,
            rewards: per_step(&self.file, "rewards", &self.file.data("rewards")?, total, rows, &left)?,
            terminated: ended,
            truncated: !ended,
            imitate: None,
            labels: None,
            accepted: None,
        })
    }
}

/// Rows of the episodes that ended, or were `cut` after as many steps, and whether their tasks ended.
fn ended_episodes(
    file: &Hdf5,
    rows: usize,
    cut: Option<usize>,
    limits: &Limits,
) -> Result<Vec<(Range<usize>, bool)>> {
    let (terminals, timeouts) = (file.find("terminals")?, file.find("timeouts")?);
    let (mut episodes, mut start) = (Vec::new(), 0);
    for first in (0..rows).step_by(BLOCK) {
        let block = first..rows.min(first + BLOCK);
        let read = |name: &str, data: &Option<Data<'_>>| match data {
            Some(data) => per_step(file, name, data, rows, block.clone(), &Cell::new(limits.inflated)),
            None => Ok(vec![0.0; block.len()]),
        };
        let flags = read("terminals", &terminals)?.into_iter().zip(read("timeouts", &timeouts)?);
        for (row, (terminal, timeout)) in block.clone().zip(flags) {
            let ended = terminal != 0.0;
            if ended || timeout != 0.0 || cut.is_some_and(|cut| row + 1 - start >= cut) {
                if episodes.len() == MAX_EPISODES {
                    let problem = format!("more than {MAX_EPISODES} episodes in {rows} steps");
                    return Err(file.error(format!("{problem}; are `terminals` and `timeouts` right?")));
                }
                episodes.push((start..row + 1, ended));
                start = row + 1;
            }
        }
    }
    Ok(episodes)
}

/// Numbers of one per step, `[N]` or [N, 1].
fn per_step(
    file: &Hdf5,
    name: &str,
    data: &Data<'_>,
    steps: usize,
    rows: Range<usize>,
    left: &Cell<u64>,
) -> Result<Vec<f32>> {
    let shape = data.shape()?;
    if ![&[steps][..], &[steps, 1]].contains(&&shape[..]) {
        return Err(file.error(format!("`{name}`: expected {steps} numbers, one per step, got {shape:?}")));
    }
    Ok(floats(data.read(rows, left)?.numbers))
}

impl Recordings for D4rl {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn episodes(&self) -> usize {
        self.episodes.len()
    }

    fn file(&self, _: usize) -> &Path {
        self.file.path()
    }

    fn load(&self, episode: usize, _: bool) -> Result<Episode> {
        let (rows, ended) = self.episodes[episode].clone();
        self.episode(rows, ended)
    }
}
