//! The layout of the published datasets: a folder of `train_data_{i}.npz`, one file per episode, or one such
//! file.
//!
//! | key | shape | meaning |
//! |---|---|---|
//! | `obs` | (T, ...) or (T + 1, ...) | observations; a middle axis of one, (T, 1, k), is dropped |
//! | `obs/NAME` | as `obs` | observations where there are several |
//! | `rgb` | (T, height, width, channels) bytes | observations if there is no `obs`; channels first in memory |
//! | `final_obs` | (1, ...) | ours: the observation after the last action; `final_obs/NAME` of several |
//! | `action` | (T,) or (T, ...) | actions |
//! | `reward` | (T,) | rewards |
//! | `done` | (T,) | last entry 0: cut off; otherwise, or without the key: terminated |
//! | `counts` | (T,) | ours: 1 where the action is worth imitating, else 0; without the key all are |

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use elmur_base::{Leaf, Space, Spaces};

use crate::array::Array;
use crate::episode::{Column, Episode};
use crate::error::{Error, Result};
use crate::keys::{ObservationKey, Selection, side_by_side};
use crate::layout::ElementType;
use crate::limits::Limits;
use crate::npy::{Recording, SEVERAL};
use crate::recordings::{INFERRED, Recordings};

/// Most integers per step for which a space is inferred.
pub(crate) const MAX_INTS: usize = 1 << 16;

/// A folder of files or a single one.
#[derive(Debug)]
pub(crate) struct NpzFiles {
    files: Vec<PathBuf>,
    spaces: Spaces,
    metadata: BTreeMap<String, String>,
    /// Arrays of the archives that are the observations.
    keys: Vec<String>,
    /// Arrays that are pictures with channels last.
    turned: Vec<bool>,
    /// Types and shapes of the first file, which spaces were inferred from.
    inferred: Option<(Vec<InferredSpace>, InferredSpace)>,
    limits: Limits,
}

impl NpzFiles {
    /// Opens a folder of `.npz` files, in the order of the numbers in their names, or a single one.
    pub(crate) fn open(
        path: &Path,
        known: Option<&Spaces>,
        selection: &Selection,
        limits: &Limits,
    ) -> Result<Self> {
        let files = if path.is_dir() { list(path)? } else { vec![path.to_owned()] };
        let Some(first_path) = files.first() else {
            return Err(Error::file(path, "no .npz files; expected train_data_0.npz, train_data_1.npz, ..."));
        };
        selection.only_keys("an .npz file").map_err(|problem| Error::file(path, problem))?;
        let first = recording(first_path, limits, selection, None)?;
        let keys: Vec<String> = first.observations.iter().map(|(key, _)| key.clone()).collect();
        let mut noted = Vec::new();
        let mut turned = Vec::new();
        for (i, (key, array)) in first.observations.iter().enumerate() {
            let wanted = known.and_then(|known| wanted_shape(known, keys.len(), i));
            let turn = is_turned(key, array, known.is_some(), wanted.as_deref());
            let name = key.strip_prefix(SEVERAL).unwrap_or(key).to_owned();
            noted.push(ObservationKey { name, shape: array.row_shape().to_vec(), channels_last: turn });
            turned.push(turn);
        }
        let (spaces, inferred) = match known {
            Some(spaces) => {
                spaces.validate()?;
                (spaces.clone(), None)
            }
            None => {
                let first = turn(first, &turned).map_err(|problem| Error::file(first_path, problem))?;
                let infer = |(key, array): &(String, Array)| InferredSpace::of(key, first_path, array, false);
                let observations = first.observations.iter().map(infer).collect::<Result<Vec<_>>>()?;
                let action = InferredSpace::of("action", first_path, &first.action, true)?;
                let observation = side_by_side(observations.iter().map(InferredSpace::space).collect());
                (Spaces { observation, action: action.space() }, Some((observations, action)))
            }
        };
        let mut metadata = BTreeMap::from([("source".to_owned(), path.display().to_string())]);
        let plain = ObservationKey::of(&BTreeMap::new(), &spaces.observation);
        let is_plain =
            known.is_some() || plain.iter().map(|key| &key.shape).eq(noted.iter().map(|key| &key.shape));
        if keys.len() > 1 || turned[0] || !is_plain {
            ObservationKey::note(&noted, &mut metadata);
        }
        Ok(Self { files, spaces, metadata, keys, turned, inferred, limits: *limits })
    }
}

impl Recordings for NpzFiles {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn episodes(&self) -> usize {
        self.files.len()
    }

    fn file(&self, episode: usize) -> &Path {
        &self.files[episode]
    }

    fn load(&self, episode: usize, _: bool) -> Result<Episode> {
        let path = &self.files[episode];
        let recording = recording(path, &self.limits, &Selection::default(), Some(&self.keys))?;
        let recording = turn(recording, &self.turned).map_err(|problem| Error::file(path, problem))?;
        if let Some((observations, action)) = &self.inferred {
            let all = observations.iter().zip(&recording.observations);
            all.map(|(space, (_, array))| (space, array))
                .chain([(action, &recording.action)])
                .try_for_each(|(space, array)| space.check(path, array))?;
        }
        let episode = recording.into_episode(&self.spaces, self.limits.inflated);
        episode.map_err(|problem| Error::file(path, problem))
    }
}

/// The folder's `.npz` files, by the number at the end of their names.
pub(crate) fn list(folder: &Path) -> Result<Vec<PathBuf>> {
    list_files(folder, "npz")
}

/// The folder's files of this extension that are not hidden, by the number at the end of their names.
pub(crate) fn list_files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let path = entry.map_err(|e| Error::io(folder, e))?.path();
        let hidden = path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if path.extension().is_some_and(|e| e == extension) && !hidden {
            paths.push(path);
        }
    }
    paths.sort_by_cached_key(|path| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let digits = stem.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        (stem[..digits].to_owned(), stem[digits..].parse::<u64>().ok(), stem)
    });
    Ok(paths)
}

/// Reads the arrays of one file.
fn recording(
    path: &Path,
    limits: &Limits,
    selection: &Selection,
    keys: Option<&[String]>,
) -> Result<Recording> {
    let about = fs::metadata(path).map_err(|e| Error::io(path, e))?;
    if !about.is_file() {
        return Err(Error::file(path, "not a file; keep only episodes in this folder"));
    }
    if about.len() > limits.inflated {
        let (size, most) = (about.len(), limits.inflated);
        let problem =
            format!("{size} bytes, too large for one file (at most {most}); save one episode per file");
        return Err(Error::file(path, problem));
    }
    let bytes = fs::read(path).map_err(|e| Error::io(path, e))?;
    Recording::parse(&bytes, limits.inflated, selection, keys).map_err(|problem| Error::file(path, problem))
}

/// The shape that given spaces have for observation `i` of `keys`.
fn wanted_shape(known: &Spaces, keys: usize, i: usize) -> Option<Vec<usize>> {
    let leaves = known.observation.leaves();
    match leaves.get(i) {
        Some(Leaf::Floats { shape, .. } | Leaf::Bytes { shape }) if leaves.len() == keys => {
            Some(shape.to_vec())
        }
        _ => None,
    }
}

/// Whether an array holds pictures with channels last: `rgb` always does; others if given spaces have its
/// axes in the other order, or if without spaces it looks so.
fn is_turned(key: &str, array: &Array, known: bool, wanted: Option<&[usize]>) -> bool {
    let shape = &array.shape[1..];
    let bytes = array.numbers.view().element_type() == ElementType::U8;
    match *shape {
        [height, width, channels] if bytes => {
            key == "rgb"
                || match known {
                    true => wanted.is_some_and(|w| w != shape && *w == [channels, height, width]),
                    false => looks_channels_last(shape),
                }
        }
        _ => key == "rgb",
    }
}

/// Whether the axes of a picture of bytes are [height, width, channels] rather than [channels, height,
/// width]: at least 8 x 8 pixels, and at most 16 channels, fewer than rows and columns.
pub(crate) fn looks_channels_last(shape: &[usize]) -> bool {
    match *shape {
        [height, width, channels] => height.min(width) >= 8 && channels <= 16 && channels < height.min(width),
        _ => false,
    }
}

/// Turns the pictures with channels last of a recording.
fn turn(mut recording: Recording, turned: &[bool]) -> Result<Recording, String> {
    let observations = std::mem::take(&mut recording.observations).into_iter().zip(turned);
    let turn = |((key, array), turn): ((String, Array), &bool)| match turn {
        true => match array.channels_first() {
            Ok(array) => Ok((key, array)),
            Err(problem) => Err(format!("`{key}`: {problem}; use `obs`")),
        },
        false => Ok((key, array)),
    };
    recording.observations = observations.map(turn).collect::<Result<_, _>>()?;
    Ok(recording)
}

/// The space that an array's numbers fit in: integers become choices, bytes with three axes pixels, floats an
/// unbounded box.
#[derive(Debug)]
struct InferredSpace {
    key: String,
    action: bool,
    element: ElementType,
    shape: Vec<usize>,
    /// Number of integers per row that are choices.
    choices: usize,
}

impl InferredSpace {
    fn of(key: &str, path: &Path, array: &Array, action: bool) -> Result<Self> {
        let element = array.numbers.view().element_type();
        let shape = array.row_shape().to_vec();
        let choices = match element {
            ElementType::F32 => 0,
            ElementType::U8 if shape.len() == 3 => 0,
            _ => array.width(),
        };
        if choices > MAX_INTS {
            let problem = format!("`{key}`: {choices} integers per step; save {key}.astype('float32')");
            return Err(Error::file(path, problem));
        }
        Ok(Self { key: key.to_owned(), action, element, shape, choices })
    }

    /// Checks that the numbers of another file are of the same type and shape, and choices not below 0.
    fn check(&self, path: &Path, array: &Array) -> Result<()> {
        let (key, element, shape) = (&self.key, array.numbers.view().element_type(), array.row_shape());
        if element != self.element || shape != self.shape {
            let expected = format!("{} {:?} as in the first file", self.element.name(), self.shape);
            let got = format!("{} {shape:?}", element.name());
            let remedy = "keep different datasets in different folders";
            return Err(Error::file(path, format!("`{key}`: expected {expected}, got {got}; {remedy}")));
        }
        match &array.numbers {
            Column::I32(numbers) => match numbers.iter().find(|x| **x < 0) {
                Some(x) => Err(Error::file(path, below_zero(key, *x))),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    fn space(&self) -> Space {
        match (self.element, self.choices) {
            (ElementType::F32, _) if self.shape.is_empty() => Space::unbounded([1]),
            (ElementType::F32, _) => Space::unbounded(self.shape.clone()),
            (ElementType::U8, 0) => Space::between(0.0, 1.0, self.shape.clone()),
            (_, 1) if self.action && self.shape.is_empty() => Space::Discrete { n: INFERRED },
            (_, choices) => Space::MultiDiscrete { sizes: vec![INFERRED; choices] },
        }
    }
}

/// The error for an integer that is no choice.
pub(crate) fn below_zero(key: &str, x: i32) -> String {
    format!(
        "`{key}` holds {x}, and integers are read as choices, which begin at 0: save {key}.astype('float32') \
         if they are measurements, or {key} - {key}.min() if they are choices"
    )
}
