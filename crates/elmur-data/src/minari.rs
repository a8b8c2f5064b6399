//! Minari: `<name>-v<n>/data/main_data.hdf5`, a group per episode, with `metadata.json` beside it.
//!
//! | in group `episode_<id>` | rows | meaning |
//! |---|---|---|
//! | `observations` | T + 1 | an array, or a group per dictionary and tuple (`_index_0`, `_index_1`, ...) |
//! | `actions` | T | likewise |
//! | `rewards`, `terminations`, `truncations` | T | rewards and how the episode ended |
//!
//! The spaces are JSON texts within the metadata. Pictures of at least 32 x 32 pixels are JPEG files, one
//! byte string per step; if all of them happen to have the same length, one row of bytes per step. Which of
//! the two, or plain pixels, is decided by how the array is stored.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use elmur_base::Spaces;
use elmur_base::files::read_small;
use serde::Deserialize;

use crate::array::{Array, floats, too_large};
use crate::episode::{Column, Episode};
use crate::error::{Error, Result};
use crate::fields::{Field, Meaning, action_columns, action_space, observation_space};
use crate::gymnasium::{Fields, Placed, Step, fields, unreadable};
use crate::hdf5::Hdf5;
use crate::keys::{ObservationKey, Selection};
use crate::limits::Limits;
use crate::pictures;
use crate::recordings::Recordings;

/// Name of the file that holds the episodes.
const MAIN: &str = "main_data.hdf5";
/// Largest metadata, in bytes: bounds of pictures are lists of numbers.
const MAX_METADATA: u64 = 64 << 20;

/// A dataset and which of its keys are read.
#[derive(Debug)]
pub(crate) struct Minari {
    file: Hdf5,
    spaces: Spaces,
    metadata: BTreeMap<String, String>,
    /// Observations and their paths within an episode's group.
    observations: Vec<(Field, String)>,
    actions: Vec<(Field, String)>,
    episodes: usize,
    limits: Limits,
}

/// What is needed of `metadata.json`.
#[derive(Deserialize)]
struct About {
    total_episodes: usize,
    #[serde(default)]
    data_format: Option<String>,
    observation_space: String,
    action_space: String,
    #[serde(default)]
    dataset_id: Option<String>,
    #[serde(default)]
    env_spec: Option<String>,
}

/// The file of episodes, if a folder is a dataset or the `data` folder of one.
fn main_file(folder: &Path) -> Option<PathBuf> {
    [folder.join("data").join(MAIN), folder.join(MAIN)].into_iter().find(|path| path.is_file())
}

/// Whether a folder is a dataset, of this or of a format of Minari's that cannot be read.
pub(crate) fn is_in(folder: &Path) -> bool {
    main_file(folder).is_some() || folder.join("data/metadata.json").is_file()
}

impl Minari {
    /// Whether an HDF5 file holds episodes of Minari.
    pub(crate) fn is_in(file: &Hdf5) -> Result<bool> {
        Ok(file.members("")?.0.iter().any(|name| number(name).is_some()))
    }

    /// Opens a dataset's folder, its `data` folder or its file.
    pub(crate) fn open(
        path: &Path,
        known: Option<&Spaces>,
        selection: &Selection,
        limits: &Limits,
    ) -> Result<Self> {
        let main = match path.is_dir() {
            true => main_file(path).unwrap_or_else(|| path.join("data").join(MAIN)),
            false => path.to_owned(),
        };
        let about_path = main.with_file_name("metadata.json");
        let about = match about_path.is_file() {
            true => {
                let text = read_small(&about_path, MAX_METADATA)?;
                let about = serde_json::from_str::<About>(&text);
                about.map_err(|e| Error::file(&about_path, format!("not Minari's metadata: {e}")))?
            }
            false => {
                return Err(Error::file(&about_path, "missing; Minari keeps the spaces there: copy it too"));
            }
        };
        if let Some(format) = about.data_format.as_deref().filter(|format| *format != "hdf5") {
            let problem = format!(
                "episodes are stored as {format:?}; expected \"hdf5\". Save them again with data_format=\"hdf5\""
            );
            return Err(Error::file(&about_path, problem));
        }
        let file = Hdf5::open(&main, limits)?;
        let wrong = |problem: String| Error::file(&about_path, problem);
        let parts = fields(&about.observation_space, false).map_err(wrong)?;
        let asked = |(name, _): &&(String, String)| selection.keys.contains(name) || parts.placed.is_empty();
        if let Some((name, kind)) = parts.unread.iter().find(asked) {
            return Err(wrong(unreadable(name, kind)));
        }
        let observations: Vec<(Field, String)> =
            parts.placed.into_iter().map(|p| at("observations", p)).collect();
        let names: Vec<&str> = observations.iter().map(|(field, _)| field.name.as_str()).collect();
        selection.only_keys("a Minari dataset").map_err(wrong)?;
        let chosen = selection.choose(&names).map_err(wrong)?;
        let observations: Vec<(Field, String)> =
            chosen.into_iter().map(|i| observations[i].clone()).collect();
        let acted = fields(&about.action_space, true).and_then(Fields::all).map_err(wrong)?;
        let actions: Vec<(Field, String)> = acted.into_iter().map(|p| at("actions", p)).collect();
        let plain =
            |fields: &[(Field, String)]| fields.iter().map(|(field, _)| field.clone()).collect::<Vec<_>>();
        let spaces = match known {
            Some(known) => known.clone(),
            None => Spaces {
                observation: observation_space(&plain(&observations)),
                action: action_space(&plain(&actions)),
            },
        };
        let have = file.members("")?.0.iter().filter(|name| number(name).is_some()).count();
        if have < about.total_episodes || about.total_episodes == 0 {
            let problem = format!("{have} episodes where the metadata say {}", about.total_episodes);
            return Err(file.error(format!("{problem}; is the copy whole?")));
        }
        let mut metadata = BTreeMap::from([
            ("format".to_owned(), "Minari".to_owned()),
            ("source".to_owned(), path.display().to_string()),
        ]);
        metadata.extend(about.dataset_id.map(|id| ("dataset_id".to_owned(), id)));
        metadata.extend(about.env_spec.map(|spec| ("env_spec".to_owned(), spec)));
        if selection.keys.is_empty() && !parts.unread.is_empty() {
            let left_out: Vec<String> =
                parts.unread.iter().map(|(name, kind)| format!("`{name}` ({kind})")).collect();
            metadata.insert("note".to_owned(), format!("not read: {}", left_out.join(", ")));
        }
        let noted: Vec<ObservationKey> = observations.iter().map(|(field, _)| field.key()).collect();
        ObservationKey::note(&noted, &mut metadata);
        let episodes = about.total_episodes;
        Ok(Self { file, spaces, metadata, observations, actions, episodes, limits: *limits })
    }

    /// The rows of one field of an episode.
    fn field(&self, group: &str, field: &Field, place: &str, left: &Cell<u64>) -> Result<Array> {
        let data = self.file.data(&format!("{group}/{place}"))?;
        let fail = |problem: String| self.file.error(format!("{group}: {problem}"));
        let rows = data.rows()?;
        let shape = data.shape()?;
        let picture = match (&field.meaning, &field.shape[..]) {
            (Meaning::Picture, &[height, width]) => Some((height, width, 1)),
            (Meaning::Picture, &[height, width, channels]) => Some((height, width, channels)),
            _ => None,
        };
        let array = match picture {
            Some(size) if data.is_byte_strings() || shape.len() == 2 => {
                let files = match data.is_byte_strings() {
                    true => data.byte_strings(0..rows, left)?,
                    false => {
                        let Column::U8(bytes) = data.read_all(left)?.numbers else {
                            return Err(fail(format!("`{place}`: expected pictures as bytes")));
                        };
                        bytes.chunks(shape[1].max(1)).map(<[u8]>::to_vec).collect()
                    }
                };
                let held =
                    [rows, size.0, size.1, size.2].iter().fold(1u64, |n, x| n.saturating_mul(*x as u64));
                let rest = left.get().checked_sub(held);
                left.set(rest.ok_or_else(|| fail(too_large(held, left.get())))?);
                let mut pixels = Vec::new();
                for (t, file) in files.iter().enumerate() {
                    pictures::decode(file, size, &mut pixels)
                        .map_err(|problem| fail(format!("`{place}`, step {t}: {problem}")))?;
                }
                let shape = [&[rows], &field.shape[..]].concat();
                Array { shape, numbers: Column::U8(pixels) }
            }
            _ => data.read_all(left)?,
        };
        field.prepared(array).map_err(fail)
    }
}

/// A field and its path in an episode's group, below `root`.
fn at(root: &str, mut placed: Placed) -> (Field, String) {
    if placed.path.is_empty() {
        placed.field.name = root.to_owned();
    }
    let step = |step: &Step| match step {
        Step::Key(key) => key.clone(),
        Step::Index(i) => format!("_index_{i}"),
    };
    let parts: Vec<String> = std::iter::once(root.to_owned()).chain(placed.path.iter().map(step)).collect();
    (placed.field, parts.join("/"))
}

fn number(name: &str) -> Option<u64> {
    name.strip_prefix("episode_")?.parse().ok()
}

impl Recordings for Minari {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn episodes(&self) -> usize {
        self.episodes
    }

    fn file(&self, _: usize) -> &Path {
        self.file.path()
    }

    fn load(&self, episode: usize, _: bool) -> Result<Episode> {
        let (file, limit, left) = (&self.file, self.limits.inflated, Cell::new(self.limits.inflated));
        let group = format!("episode_{episode}");
        let fail = |problem: String| file.error(format!("{group}: {problem}"));
        let rewards = floats(file.data(&format!("{group}/rewards"))?.read_all(&left)?.numbers);
        let steps = rewards.len();
        let read = |fields: &[(Field, String)], rows: &[usize]| -> Result<Vec<(String, Array)>> {
            let one = |(field, place): &(Field, String)| {
                let array = self.field(&group, field, place, &left)?;
                match rows.contains(&array.rows()) {
                    true => Ok((field.name.clone(), array)),
                    false => Err(fail(format!("`{place}`: {} rows for {steps} rewards", array.rows()))),
                }
            };
            fields.iter().map(one).collect()
        };
        let observations = read(&self.observations, &[steps + 1, steps])?;
        let actions = read(&self.actions, &[steps])?;
        let last = |key: &str| -> Result<bool> {
            let flags = floats(file.data(&format!("{group}/{key}"))?.read_all(&left)?.numbers);
            match flags.len() == steps {
                true => Ok(flags.last().is_some_and(|flag| *flag != 0.0)),
                false => Err(fail(format!("`{key}`: {} flags for {steps} rewards", flags.len()))),
            }
        };
        let (terminated, truncated) = (last("terminations")?, last("truncations")?);
        Ok(Episode {
            observations: Array::columns_of(observations, &self.spaces.observation, limit).map_err(fail)?,
            actions: action_columns(actions, &self.spaces.action, limit).map_err(fail)?,
            rewards,
            terminated,
            // Recordings that simply stop were cut off.
            truncated: truncated || !terminated,
            imitate: None,
            labels: None,
            accepted: None,
        })
    }
}
