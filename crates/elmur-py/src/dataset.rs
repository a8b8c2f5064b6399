//! Recorded episodes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use elmur::base::{Space, Spaces};
use elmur::data::{self, Episode, Limits, ObservationKey, Selection, Source, Subset, Writer};
use elmur::train::Error::Stopped;
use numpy::{PyArray1, PyUntypedArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyIndexError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PySlice};

use crate::arrays::{Layout, as_array, flags, floats};
use crate::background::watch;
use crate::rows::space_json;
use crate::{fail, refuse};

/// Recorded episodes, in memory or on disk. Datasets do not change.
#[pyclass(frozen, weakref, module = "elmur")]
pub struct Dataset {
    source: Arc<dyn Source>,
    /// Where the episodes lie and which were chosen, if they were opened from a file or folder and all are here.
    origin: Option<(PathBuf, Selection)>,
}

impl Dataset {
    /// A dataset of episodes from anywhere.
    pub fn of(source: Arc<dyn Source>) -> Self {
        Self { source, origin: None }
    }

    /// Opens what is chosen of a file or folder.
    fn open_selected(path: &Path, chosen: Selection) -> data::Result<Self> {
        let limits = Limits::default();
        let mut chosen = chosen;
        let mut source = data::open_selected(path, None, &chosen, &limits)?;
        if chosen.keys.is_empty() && ObservationKey::are_noted(source.metadata()) {
            // Policies take dictionaries in the order of their sorted keys; files have orders of their own.
            let all = ObservationKey::of(source.metadata(), &source.spaces().observation);
            chosen.keys = all.into_iter().map(|key| key.name).collect();
            if !chosen.keys.is_sorted() {
                chosen.keys.sort();
                source = data::open_selected(path, None, &chosen, &limits)?;
            }
        }
        Ok(Self { source, origin: Some((absolute(path), chosen)) })
    }

    /// The episodes.
    pub fn source(&self) -> Arc<dyn Source> {
        Arc::clone(&self.source)
    }
}

fn space_from(what: &str, text: &str) -> PyResult<Space> {
    let space: Space = serde_json::from_str(text).map_err(|e| refuse(what, "a space", e))?;
    space.validate().map_err(fail)?;
    Ok(space)
}

/// Spaces from JSON.
fn spaces_from(observation: &str, action: &str) -> PyResult<Spaces> {
    Ok(Spaces {
        observation: space_from("observation space", observation)?,
        action: space_from("action space", action)?,
    })
}

#[pymethods]
impl Dataset {
    /// Opens a file or folder of any format that is known, by its content. `keys`: the observations to read, in this
    /// order; all of them in the order of their names without it.
    #[staticmethod]
    #[pyo3(signature = (path, keys=None, *, action_key=None, mask=None))]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        keys: Option<Vec<String>>,
        action_key: Option<String>,
        mask: Option<String>,
    ) -> PyResult<Self> {
        let chosen = Selection { keys: keys.unwrap_or_default(), action_key, mask, step_limit: None };
        py.detach(|| Self::open_selected(&path, chosen)).map_err(fail)
    }

    /// A dataset from arrays: see `elmur.data.from_numpy`.
    #[staticmethod]
    #[pyo3(signature = (observations, actions, rewards=None, episode_ends=None, spaces=None, *, terminated=None, metadata=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn from_numpy<'py>(
        py: Python<'py>,
        observations: Bound<'py, PyAny>,
        actions: Bound<'py, PyAny>,
        rewards: Option<Bound<'py, PyAny>>,
        episode_ends: Option<Bound<'py, PyAny>>,
        spaces: Option<Bound<'py, PyAny>>,
        terminated: Option<Bound<'py, PyAny>>,
        metadata: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let make = py.import("elmur.data")?.getattr("from_numpy")?;
        make.call1((observations, actions, rewards, episode_ends, spaces, terminated, metadata))
    }

    /// A dataset from one `.npz` file per episode, or from a folder of them.
    #[staticmethod]
    fn from_npz<'py>(py: Python<'py>, files: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        py.import("elmur.data")?.getattr("from_npz")?.call1((files,))
    }

    /// A dataset from the folder of a Minari dataset: see `open`.
    #[staticmethod]
    #[pyo3(signature = (path, keys=None))]
    fn from_minari(py: Python<'_>, path: PathBuf, keys: Option<Vec<String>>) -> PyResult<Self> {
        Self::open(py, path, keys, None, None)
    }

    /// A dataset from the folder of a LeRobot dataset: see `open`.
    #[staticmethod]
    #[pyo3(signature = (path, keys=None))]
    fn from_lerobot(py: Python<'_>, path: PathBuf, keys: Option<Vec<String>>) -> PyResult<Self> {
        Self::open(py, path, keys, None, None)
    }

    /// A dataset from an HDF5 file of D4RL or robomimic: see `open`.
    #[staticmethod]
    #[pyo3(signature = (path, keys=None, *, action_key=None, mask=None))]
    fn from_hdf5(
        py: Python<'_>,
        path: PathBuf,
        keys: Option<Vec<String>>,
        action_key: Option<String>,
        mask: Option<String>,
    ) -> PyResult<Self> {
        Self::open(py, path, keys, action_key, mask)
    }

    /// A dataset from the bytes of an `.elmur` file.
    #[staticmethod]
    fn from_bytes(py: Python<'_>, data: &[u8]) -> PyResult<Self> {
        let dataset = py.detach(|| data::Dataset::from_bytes(data)).map_err(fail)?;
        Ok(Self::of(Arc::new(dataset)))
    }

    /// Writes all episodes to a new `.elmur` file, or with `npz` to a folder with one `.npz` file per episode. What is
    /// there already is refused without `overwrite`. Ctrl-C leaves what was there.
    #[pyo3(signature = (path, *, npz=false, overwrite=false))]
    fn save(&self, py: Python<'_>, path: PathBuf, npz: bool, overwrite: bool) -> PyResult<()> {
        let source = self.source();
        watch(py, py.None().bind(py), move |stop, _| {
            let episodes = || (0..source.episodes()).take_while(|_| !stop.requested());
            if npz {
                let make = if overwrite { data::NpzWriter::replace } else { data::NpzWriter::create };
                let mut writer = make(path, source.spaces())?;
                episodes().try_for_each(|i| writer.push(&source.episode(i)?))?;
                if stop.requested() {
                    writer.discard();
                    return Err(Stopped);
                }
                return Ok(writer.finish()?);
            }
            let make = if overwrite { Writer::replace } else { Writer::create };
            let mut writer = make(path, source.spaces(), source.metadata().clone())?;
            episodes().try_for_each(|i| writer.push(&source.episode(i)?))?;
            if stop.requested() {
                writer.discard();
                return Err(Stopped);
            }
            Ok(writer.finish()?)
        })
    }

    fn __len__(&self) -> usize {
        self.source.episodes()
    }

    /// An episode as a dictionary of arrays, or the dataset of a slice of the episodes.
    fn __getitem__<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let count = self.source.episodes();
        if let Ok(slice) = index.cast::<PySlice>() {
            let range = slice.indices(count as isize)?;
            let mut episodes = Vec::with_capacity(range.slicelength);
            let mut next = range.start;
            for _ in 0..range.slicelength {
                episodes.push(next as usize);
                next += range.step;
            }
            if episodes.is_empty() {
                return Err(PyIndexError::new_err("a dataset has at least one episode; this slice has none"));
            }
            let part = Subset::new(&self.source, episodes).map_err(fail)?;
            return Self::of(Arc::new(part)).into_bound_py_any(py);
        }
        let index: isize = index.extract().map_err(|_| {
            PyTypeError::new_err("index: expected the number of an episode or a slice of episodes")
        })?;
        let i = if index < 0 { index + count as isize } else { index };
        if !(0..count as isize).contains(&i) {
            return Err(PyIndexError::new_err(format!("episode {index} of {count}")));
        }
        let episode = py.detach(|| self.source.episode(i as usize)).map_err(fail)?;
        Ok(episode_dict(py, episode, &*self.source)?.into_any())
    }

    /// All episodes, one after the other.
    fn __iter__(slf: PyRef<'_, Self>) -> Episodes {
        Episodes { data: slf.into(), next: AtomicUsize::new(0) }
    }

    /// Number of steps of all episodes.
    #[getter]
    fn steps(&self, py: Python<'_>) -> usize {
        py.detach(|| (0..self.source.episodes()).map(|i| self.source.steps(i)).sum())
    }

    /// Notes on the data: environment, expert, seed, ...
    #[getter]
    fn metadata(&self) -> BTreeMap<String, String> {
        self.source.metadata().clone()
    }

    /// Counts and statistics of returns and lengths, as a dictionary.
    fn summary<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let summary = py.detach(|| self.source.summary()).map_err(fail)?;
        py.import("json")?.call_method1("loads", (serde_json::to_string(&summary).map_err(fail)?,))
    }

    /// The space of observations, of Gymnasium.
    #[getter]
    fn observation_space<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let space = space_json(&self.source.spaces().observation)?;
        py.import("elmur.spaces")?.call_method1("to_gymnasium", (space,))
    }

    /// The space of actions, of Gymnasium.
    #[getter]
    fn action_space<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let space = space_json(&self.source.spaces().action)?;
        py.import("elmur.spaces")?.call_method1("to_gymnasium", (space,))
    }

    fn __copy__(&self) -> Self {
        Self { source: self.source(), origin: self.origin.clone() }
    }

    fn __deepcopy__(&self, _memo: &Bound<'_, PyAny>) -> Self {
        self.__copy__()
    }

    /// Files are opened again where they lie; episodes in memory are part of the pickle.
    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
        let class = py.get_type::<Self>();
        if let Some((path, Selection { keys, action_key, mask, .. })) = &self.origin {
            let make = py.import("elmur.data")?.getattr("reopen")?;
            return Ok((make, (path, keys, action_key, mask).into_bound_py_any(py)?));
        }
        let make = py.import("elmur.data")?.getattr("to_bytes")?;
        let bytes = make.call1((self.__copy__(),))?;
        let bytes = bytes.cast_into::<PyBytes>()?;
        Ok((class.getattr("from_bytes")?, (bytes,).into_bound_py_any(py)?))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!("Dataset(episodes={}, steps={})", self.source.episodes(), self.steps(py))
    }
}

/// The episodes of a dataset that are yet to come.
#[pyclass(frozen, module = "elmur._elmur")]
pub struct Episodes {
    data: Py<Dataset>,
    next: AtomicUsize,
}

#[pymethods]
impl Episodes {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let source = self.data.get().source();
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        if next >= source.episodes() {
            return Ok(None);
        }
        let episode = py.detach(|| source.episode(next)).map_err(fail)?;
        episode_dict(py, episode, &*source).map(Some)
    }
}

/// Names of several kinds of observations, where the data have them.
fn observation_names(source: &dyn Source) -> Option<Vec<String>> {
    let keys = ObservationKey::of(source.metadata(), &source.spaces().observation);
    let named = keys.len() > 1 && ObservationKey::are_noted(source.metadata());
    named.then(|| keys.into_iter().map(|key| key.name).collect())
}

/// An episode as a dictionary: observations, actions, rewards, terminated, truncated, and `imitate` if steps are
/// marked. Observations of several kinds are a dictionary too if they have names, else a tuple.
fn episode_dict<'py>(py: Python<'py>, episode: Episode, source: &dyn Source) -> PyResult<Bound<'py, PyDict>> {
    let spaces = source.spaces();
    let outline = |columns: &[data::Column], space: &Space| {
        let leaf = space.leaves().first().map_or(1, elmur::base::Leaf::len).max(1);
        columns.first().map_or(0, |column| column.len() / leaf)
    };
    let (seen, acted) = (Layout::of(&spaces.observation), Layout::of(&spaces.action));
    let rows = (outline(&episode.observations, &spaces.observation), episode.rewards.len());
    let all = PyDict::new(py);
    let observations = seen.of_columns(episode.observations);
    match observation_names(source) {
        Some(names) => {
            let named = PyDict::new(py);
            for (name, array) in names.iter().zip(seen.arrays(py, observations, Some(rows.0))?) {
                named.set_item(name, array)?;
            }
            all.set_item("observations", named)?;
        }
        None => all.set_item("observations", seen.build(py, observations, Some(rows.0))?)?,
    }
    all.set_item("actions", acted.build(py, acted.of_columns(episode.actions), Some(rows.1))?)?;
    all.set_item("rewards", PyArray1::from_vec(py, episode.rewards))?;
    all.set_item("terminated", episode.terminated)?;
    all.set_item("truncated", episode.truncated)?;
    if let Some(imitate) = episode.imitate {
        all.set_item("imitate", PyArray1::from_vec(py, imitate))?;
    }
    Ok(all)
}

/// Episodes that are recorded one after the other, in memory or in a file.
#[pyclass(frozen, module = "elmur._elmur")]
pub struct Recorder {
    spaces: Spaces,
    observation: Layout,
    action: Layout,
    metadata: BTreeMap<String, String>,
    kept: Mutex<Kept>,
}

enum Kept {
    Memory(Vec<Episode>),
    File(PathBuf, Box<Writer>),
    Finished,
}

impl Kept {
    fn push(&mut self, episode: Episode) -> PyResult<()> {
        match self {
            Kept::Memory(episodes) => {
                episodes.push(episode);
                Ok(())
            }
            Kept::File(_, writer) => writer.push(&episode).map_err(fail),
            Kept::Finished => Err(refuse("push", "a recorder that is not finished", "one that is")),
        }
    }
}

#[pymethods]
impl Recorder {
    /// Records episodes of these spaces (JSON): in memory, or with a path in a new `.elmur` file.
    #[new]
    #[pyo3(signature = (observation, action, metadata, path=None, overwrite=false))]
    fn new(
        observation: &str,
        action: &str,
        metadata: BTreeMap<String, String>,
        path: Option<PathBuf>,
        overwrite: bool,
    ) -> PyResult<Self> {
        let spaces = spaces_from(observation, action)?;
        let kept = match path {
            None => Kept::Memory(Vec::new()),
            Some(path) => {
                let make = if overwrite { Writer::replace } else { Writer::create };
                let writer = make(path.clone(), &spaces, metadata.clone()).map_err(fail)?;
                Kept::File(path, Box::new(writer))
            }
        };
        let (observation, action) = (Layout::of(&spaces.observation), Layout::of(&spaces.action));
        Ok(Self { spaces, observation, action, metadata, kept: Mutex::new(kept) })
    }

    /// Records an episode of T steps: observations [T, ...] or [T + 1, ...], actions [T, ...], rewards [T].
    #[pyo3(signature = (observations, actions, rewards, terminated, truncated, *, seen, imitate=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn push(
        &self,
        py: Python<'_>,
        observations: &Bound<'_, PyAny>,
        actions: &Bound<'_, PyAny>,
        rewards: &Bound<'_, PyAny>,
        terminated: bool,
        truncated: bool,
        seen: usize,
        imitate: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let rewards = as_array(rewards)?;
        let steps = rewards.len();
        let episode = Episode {
            observations: self.observation.columns("observations", observations, seen)?,
            actions: self.action.columns("actions", actions, steps)?,
            rewards: floats("rewards", &rewards)?.as_slice()?.to_vec(),
            terminated,
            truncated,
            imitate: imitate.map(|imitate| flags("imitate", imitate, steps)).transpose()?,
            labels: None,
            accepted: None,
        };
        py.detach(|| {
            episode.view().validate(&self.spaces).map_err(|fault| fail(&fault))?;
            self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(episode)
        })
    }

    /// Ends the recording.
    fn finish(&self, py: Python<'_>) -> PyResult<Dataset> {
        py.detach(|| {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            match std::mem::replace(&mut *kept, Kept::Finished) {
                Kept::Memory(episodes) => {
                    let dataset =
                        data::Dataset::from_episodes(self.spaces.clone(), self.metadata.clone(), episodes);
                    Ok(Dataset::of(Arc::new(dataset.map_err(fail)?)))
                }
                Kept::File(path, writer) => {
                    writer.finish().map_err(fail)?;
                    opened(&path)
                }
                Kept::Finished => Err(refuse("finish", "a recorder that is not finished", "one that is")),
            }
        })
    }

    /// Gives the recording up; a file that was begun is removed.
    fn discard(&self, py: Python<'_>) {
        py.detach(|| {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            if let Kept::File(_, writer) = std::mem::replace(&mut *kept, Kept::Finished) {
                writer.discard();
            }
        });
    }
}

/// A dataset that was written a moment ago.
pub fn opened(path: &Path) -> PyResult<Dataset> {
    Dataset::open_selected(path, Selection::default()).map_err(fail)
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
