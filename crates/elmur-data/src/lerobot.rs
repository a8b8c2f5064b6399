//! LeRobot datasets, versions 2 and 3: columns of numbers in Parquet files, pictures in them or in videos.
//!
//! `meta/info.json` names the features with their types and shapes, and where files lie. Features
//! `observation.*` are observations and `action` is the action; `next.reward` and `next.done` are rewards and
//! ends, if there are any.
//!
//! | | version 2 | version 3 |
//! |---|---|---|
//! | episodes | `meta/episodes.jsonl` | `meta/episodes/chunk-*/file-*.parquet` |
//! | data, videos | one file per episode | several episodes per file |
//! | frame t of an episode | at `timestamp[t]` of its video | at `from_timestamp + timestamp[t]` |

mod index;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use elmur_base::Spaces;

use crate::array::{Array, Element, Numeric, append_channels_first, floats, too_large};
use crate::episode::{Column, Episode};
use crate::error::{Error, Result};
use crate::fields::{Field, Meaning, observation_space};
use crate::keys::{ObservationKey, Selection, unknown_key};
use crate::limits::Limits;
use crate::parquet_file::ParquetFile;
use crate::pictures;
use crate::recordings::Recordings;
use crate::video::Video;

use index::{Entry, Feature, Info};

/// Most files that are kept open.
const OPEN_FILES: usize = 16;

/// A dataset and which of its features are read.
#[derive(Debug)]
pub(crate) struct LeRobot {
    info: Info,
    spaces: Spaces,
    metadata: BTreeMap<String, String>,
    observations: Vec<Observed>,
    action: Field,
    episodes: Vec<Entry>,
    /// The data file of each episode.
    files: Vec<PathBuf>,
    limits: Limits,
    /// Data files that were read last.
    open: Mutex<Vec<Arc<DataFile>>>,
    /// Videos that were read last, each with a decoder that may be on its way.
    videos: Mutex<Vec<Video>>,
}

/// A feature that is an observation.
#[derive(Debug)]
struct Observed {
    field: Field,
    stored: Stored,
}

/// How a feature is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stored {
    Numbers,
    /// Files of pictures in a column.
    Pictures {
        height: usize,
        width: usize,
        channels: usize,
    },
    /// Pictures of a video.
    Video {
        height: usize,
        width: usize,
    },
}

/// A data file, and the rows of the episodes in it.
#[derive(Debug)]
struct DataFile {
    file: ParquetFile,
    /// The number of each row's episode.
    episodes: Vec<i32>,
}

/// Whether a folder is a dataset.
pub(crate) fn is_in(folder: &Path) -> bool {
    folder.join("meta/info.json").is_file()
}

impl LeRobot {
    pub(crate) fn open(
        path: &Path,
        known: Option<&Spaces>,
        selection: &Selection,
        limits: &Limits,
    ) -> Result<Self> {
        let info = Info::read(path)?;
        let wrong = |problem: String| Error::file(&info.path, problem);
        let plain = Selection { action_key: None, ..selection.clone() };
        plain.only_keys("a LeRobot dataset").map_err(wrong)?;
        let observations = observations(&info, selection).map_err(wrong)?;
        let action = action(&info, selection.action_key.as_deref()).map_err(wrong)?;
        let videos: Vec<&str> =
            observations.iter().filter(|o| o.stored.is_video()).map(|o| o.field.name.as_str()).collect();
        let episodes = info.episodes(&videos, limits)?;
        let files = episodes.iter().map(|entry| info.data_file(entry)).collect::<Result<Vec<_>>>()?;
        let fields: Vec<Field> = observations.iter().map(|o| o.field.clone()).collect();
        let spaces = match known {
            Some(known) => known.clone(),
            None => Spaces { observation: observation_space(&fields), action: action.space() },
        };
        let mut metadata = BTreeMap::from([
            ("format".to_owned(), format!("LeRobot {}", info.version)),
            ("source".to_owned(), path.display().to_string()),
        ]);
        metadata.extend(info.robot_type.clone().map(|robot| ("robot_type".to_owned(), robot)));
        metadata.extend(info.tasks(limits)?.map(|tasks| ("tasks".to_owned(), tasks)));
        if !info.features.contains_key("next.reward") {
            metadata.insert("note".to_owned(), "no rewards were recorded; they are read as 0".to_owned());
        }
        ObservationKey::note(&fields.iter().map(Field::key).collect::<Vec<_>>(), &mut metadata);
        let limits = *limits;
        let (open, videos) = (Mutex::default(), Mutex::default());
        Ok(Self { info, spaces, metadata, observations, action, episodes, files, limits, open, videos })
    }

    /// The data file of an episode, and its rows in it.
    fn data(&self, episode: usize) -> Result<(Arc<DataFile>, std::ops::Range<usize>)> {
        let path = &self.files[episode];
        let remembered = || self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let found = remembered().iter().find(|file| file.file.path() == path).cloned();
        let file = match found {
            Some(file) => file,
            None => {
                let file = ParquetFile::open(path)?;
                let left = Cell::new(self.limits.inflated);
                let column = file.numbers("episode_index", 0..file.rows(), 1, &left)?;
                let Column::I32(episodes) = column.numbers else {
                    return Err(Error::file(path, "`episode_index`: expected integers"));
                };
                let file = Arc::new(DataFile { file, episodes });
                let mut open = remembered();
                open.truncate(OPEN_FILES - 1);
                open.insert(0, Arc::clone(&file));
                file
            }
        };
        let entry = &self.episodes[episode];
        let number = i32::try_from(entry.number).unwrap_or(i32::MAX);
        let is_its = |row: &i32| *row == number;
        let start = file.episodes.iter().position(is_its).unwrap_or(file.episodes.len());
        let rows = file.episodes[start..].iter().take_while(|row| is_its(row)).count();
        if rows != entry.length || file.episodes[start + rows..].iter().any(is_its) {
            let (number, expected) = (entry.number, entry.length);
            let problem =
                format!("episode {number}: expected {expected} rows one after the other, got {rows}");
            return Err(Error::file(path, format!("{problem}; is the copy whole?")));
        }
        Ok((file, start..start + rows))
    }

    /// The pictures of an episode's video, channels first.
    fn video(&self, episode: usize, observed: &Observed, times: &[f64], left: &Cell<u64>) -> Result<Array> {
        let Stored::Video { height, width } = observed.stored else {
            return Err(Error::file(&self.info.path, "no video"));
        };
        let entry = &self.episodes[episode];
        let (path, from) = self.info.video_file(entry, &observed.field.name)?;
        let fail = |problem: String| Error::file(&path, format!("episode {}: {problem}", entry.number));
        let held = [times.len(), height, width, 3].iter().fold(1u64, |n, x| n.saturating_mul(*x as u64));
        let rest = left.get().checked_sub(held);
        left.set(rest.ok_or_else(|| fail(too_large(held, left.get())))?);
        let mut remembered = self.videos.lock().unwrap_or_else(PoisonError::into_inner);
        let found = remembered.iter().position(|video| video.path() == path).map(|i| remembered.remove(i));
        // Others may read meanwhile, with a decoder of their own.
        drop(remembered);
        let mut video = match found {
            Some(video) => video,
            None => Video::open(&path, (height, width)).map_err(fail)?,
        };
        let times: Vec<f64> = times.iter().map(|time| from + time).collect();
        let numbers = video.nearest(&times, 0.5 / self.info.fps).map_err(fail)?;
        let mut pixels = Vec::with_capacity(held as usize);
        let decoded = video.pictures(&numbers, &mut |picture| append_channels_first(picture, 3, &mut pixels));
        decoded.map_err(fail)?;
        let mut remembered = self.videos.lock().unwrap_or_else(PoisonError::into_inner);
        remembered.truncate(OPEN_FILES - 1);
        remembered.insert(0, video);
        Ok(Array { shape: vec![times.len(), 3, height, width], numbers: Column::U8(pixels) })
    }

    /// The rows of an observation.
    fn observation(
        &self,
        observed: &Observed,
        (file, rows): (&ParquetFile, std::ops::Range<usize>),
        left: &Cell<u64>,
    ) -> Result<Array> {
        let field = &observed.field;
        let fail = |problem: String| Error::file(file.path(), problem);
        let Stored::Pictures { height, width, channels } = observed.stored else {
            let numbers = file.numbers(&field.name, rows, field.shape.iter().product(), left)?;
            return field.prepared(numbers).map_err(fail);
        };
        let held =
            [rows.len(), height, width, channels].iter().fold(1u64, |n, x| n.saturating_mul(*x as u64));
        let rest = left.get().checked_sub(held);
        left.set(rest.ok_or_else(|| fail(too_large(held, left.get())))?);
        let (mut pixels, mut picture, count) = (Vec::with_capacity(held as usize), Vec::new(), rows.len());
        let start = rows.start;
        for (t, bytes) in file.byte_strings(&field.name, Some("bytes"), rows, left)?.iter().enumerate() {
            picture.clear();
            pictures::decode(bytes, (height, width, channels), &mut picture)
                .map_err(|problem| fail(format!("`{}`, row {}: {problem}", field.name, start + t)))?;
            append_channels_first(&picture, channels, &mut pixels);
        }
        Ok(Array { shape: vec![count, channels, height, width], numbers: Column::U8(pixels) })
    }
}

impl Stored {
    fn is_video(self) -> bool {
        matches!(self, Stored::Video { .. })
    }
}

/// The features that are observations: `observation` and `observation.*`, or those that are chosen.
fn observations(info: &Info, selection: &Selection) -> Result<Vec<Observed>, String> {
    let readable = |feature: &Feature| feature.is_picture() || feature.element().is_some();
    let names: Vec<&str> = info
        .features
        .iter()
        .filter(|(_, feature)| readable(feature))
        .map(|(name, _)| name.as_str())
        .collect();
    let is_observation = |name: &str| name == "observation" || name.starts_with("observation.");
    let chosen: Vec<&str> = match selection.keys.is_empty() {
        true => names.iter().copied().filter(|name| is_observation(name)).collect(),
        false => selection.choose(&names)?.into_iter().map(|i| names[i]).collect(),
    };
    if chosen.is_empty() {
        let listed = names.join(", ");
        return Err(format!("no feature `observation.*`; choose keys among: {listed}"));
    }
    chosen.into_iter().map(|name| observed(name, &info.features[name])).collect()
}

fn observed(name: &str, feature: &Feature) -> Result<Observed, String> {
    if feature.is_depth() {
        return Err(format!(
            "`{name}` is a map of quantised depth, which cannot be read; leave it out with keys"
        ));
    }
    if feature.is_picture() {
        let (height, width, channels) = feature.picture_size().map_err(|e| format!("`{name}`: {e}"))?;
        let stored = match feature.dtype.as_str() {
            "video" if channels == 3 => Stored::Video { height, width },
            "video" => return Err(format!("`{name}`: a video of {channels} channels; expected 3")),
            _ => Stored::Pictures { height, width, channels },
        };
        let shape = vec![height, width, channels];
        return Ok(Observed {
            field: Field { name: name.to_owned(), shape, meaning: Meaning::Picture },
            stored,
        });
    }
    let element = feature.element().ok_or_else(|| format!("`{name}`: expected numbers"))?;
    // Numbers in columns are measurements, bytes of two axes too.
    let wide = Element { numeric: Numeric::Float, ..element };
    Ok(Observed { field: Field::observed(name, &feature.shape, wide), stored: Stored::Numbers })
}

/// The feature that is the action.
fn action(info: &Info, chosen: Option<&str>) -> Result<Field, String> {
    let name = chosen.unwrap_or("action");
    let Some(feature) = info.features.get(name) else {
        let names: Vec<&str> = info.features.keys().map(String::as_str).collect();
        return Err(format!("action: {}; choose an action key", unknown_key(name, &names)));
    };
    let element = feature.element().ok_or_else(|| format!("`{name}`: expected numbers"))?;
    Field::acted(name, &feature.shape, element)
}

impl Recordings for LeRobot {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn episodes(&self) -> usize {
        self.episodes.len()
    }

    fn file(&self, episode: usize) -> &Path {
        &self.files[episode]
    }

    fn load(&self, episode: usize, pictures: bool) -> Result<Episode> {
        let (data, rows) = self.data(episode)?;
        let (file, limit) = (&data.file, self.limits.inflated);
        let fail = |problem: String| {
            Error::file(file.path(), format!("episode {}: {problem}", self.episodes[episode].number))
        };
        let left = Cell::new(limit);
        let mut observations = Vec::new();
        for observed in &self.observations {
            let array = if !pictures && observed.stored != Stored::Numbers {
                None
            } else if observed.stored.is_video() {
                let times = file.doubles("timestamp", rows.clone(), &left)?;
                Some(self.video(episode, observed, &times, &left)?)
            } else {
                Some(self.observation(observed, (file, rows.clone()), &left)?)
            };
            observations.push((observed.field.name.clone(), array));
        }
        let per_step = |name: &str| -> Result<Option<Vec<f32>>> {
            match self.info.features.contains_key(name) {
                true => file.numbers(name, rows.clone(), 1, &left).map(|array| Some(floats(array.numbers))),
                false => Ok(None),
            }
        };
        let width = self.action.shape.iter().product();
        let actions = file.numbers(&self.action.name, rows.clone(), width, &left)?;
        let actions = self.action.prepared(actions).map_err(fail)?;
        let terminated = per_step("next.done")?.and_then(|done| done.last().copied()).unwrap_or(0.0) != 0.0;
        Ok(Episode {
            observations: match observations.iter().all(|(_, array)| array.is_some()) {
                true => {
                    let all =
                        observations.into_iter().filter_map(|(name, array)| Some((name, array?))).collect();
                    Array::columns_of(all, &self.spaces.observation, limit).map_err(fail)?
                }
                // Enough to know the integers, of which observations have none.
                false => Vec::new(),
            },
            actions: actions.columns("action", &self.spaces.action, limit).map_err(fail)?,
            rewards: per_step("next.reward")?.unwrap_or_else(|| vec![0.0; rows.len()]),
            terminated,
            truncated: !terminated,
            imitate: None,
            labels: None,
            accepted: None,
        })
    }
}
