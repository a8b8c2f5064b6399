//! What the `meta` folder of a LeRobot dataset says: features, episodes, tasks, and where files lie.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use elmur_base::files::read_small;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::array::{Element, Numeric, floats};
use crate::episode::Column;
use crate::error::{Error, Result};
use crate::limits::Limits;
use crate::parquet_file::ParquetFile;

/// Largest `info.json` and lists of episodes and tasks, in bytes.
const MAX_META: u64 = 64 << 20;

/// What `info.json` says.
#[derive(Debug)]
pub(super) struct Info {
    /// The file itself, for errors.
    pub(super) path: PathBuf,
    root: PathBuf,
    pub(super) version: String,
    pub(super) fps: f64,
    pub(super) features: BTreeMap<String, Feature>,
    pub(super) robot_type: Option<String>,
    total_episodes: Option<usize>,
    chunks_size: usize,
    data_path: String,
    video_path: Option<String>,
}

/// A column of the data or a video.
#[derive(Debug, Deserialize)]
pub(super) struct Feature {
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    #[serde(default)]
    names: Value,
    #[serde(default)]
    info: Map<String, Value>,
    #[serde(default)]
    video_info: Map<String, Value>,
}

/// An episode.
#[derive(Debug, Default)]
pub(super) struct Entry {
    pub(super) number: usize,
    pub(super) length: usize,
    /// Numbers that the names of its data file are made of.
    data: Place,
    /// Numbers that the names of its videos are made of, and where in them it begins.
    videos: BTreeMap<String, (Place, f64)>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Place {
    chunk: usize,
    file: usize,
}

#[derive(Deserialize)]
struct RawInfo {
    codebase_version: String,
    fps: f64,
    features: BTreeMap<String, Feature>,
    #[serde(default)]
    robot_type: Option<String>,
    #[serde(default)]
    total_episodes: Option<usize>,
    #[serde(default)]
    chunks_size: Option<usize>,
    data_path: String,
    #[serde(default)]
    video_path: Option<String>,
}

impl Feature {
    pub(super) fn is_picture(&self) -> bool {
        ["image", "video"].contains(&self.dtype.as_str())
    }

    /// Whether pictures hold distances, packed into colours.
    pub(super) fn is_depth(&self) -> bool {
        let said =
            |map: &Map<String, Value>, key: &str| map.get(key).and_then(Value::as_bool).unwrap_or(false);
        [&self.info, &self.video_info]
            .iter()
            .any(|map| said(map, "is_depth_map") || said(map, "video.is_depth_map"))
    }

    /// Type of the numbers in the data; none for pictures and text.
    pub(super) fn element(&self) -> Option<Element> {
        let (numeric, size) = match self.dtype.as_str() {
            "float16" => (Numeric::Float, 2),
            "float32" => (Numeric::Float, 4),
            "float64" => (Numeric::Float, 8),
            "int8" => (Numeric::Signed, 1),
            "int16" => (Numeric::Signed, 2),
            "int32" => (Numeric::Signed, 4),
            "int64" => (Numeric::Signed, 8),
            "uint8" => (Numeric::Unsigned, 1),
            "uint16" => (Numeric::Unsigned, 2),
            "uint32" => (Numeric::Unsigned, 4),
            "uint64" => (Numeric::Unsigned, 8),
            "bool" => (Numeric::Flag, 1),
            _ => return None,
        };
        Element::new(numeric, size, false)
    }

    /// Height, width and channels of pictures.
    pub(super) fn picture_size(&self) -> Result<(usize, usize, usize), String> {
        let first = self.names.get(0).and_then(Value::as_str).unwrap_or("height");
        let size = match self.shape[..] {
            [channels, height, width] if first.starts_with("channel") => (height, width, channels),
            [height, width, channels] => (height, width, channels),
            [height, width] => (height, width, 1),
            _ => return Err(format!("pictures of shape {:?}; expected height, width, channels", self.shape)),
        };
        let pixels = size.0.checked_mul(size.1).and_then(|n| n.checked_mul(size.2));
        match pixels.is_some_and(|n| (1..=1 << 24).contains(&n)) {
            true => Ok(size),
            false => Err(format!("pictures of shape {:?}; expected 1 to 2^24 numbers", self.shape)),
        }
    }
}

impl Info {
    pub(super) fn read(root: &Path) -> Result<Self> {
        let path = root.join("meta/info.json");
        let text = read_small(&path, MAX_META)?;
        let raw: RawInfo = serde_json::from_str(&text)
            .map_err(|e| Error::file(&path, format!("not the description of a LeRobot dataset: {e}")))?;
        let version = raw.codebase_version;
        if !["v2.", "v3."].iter().any(|known| version.starts_with(known)) {
            let problem = format!(
                "version {version} of the format; expected v2.0, v2.1 or v3.0. Convert it with LeRobot"
            );
            return Err(Error::file(&path, problem));
        }
        if !(raw.fps > 0.0 && raw.fps <= 1e6) {
            return Err(Error::file(&path, format!("{} frames per second; expected more than 0", raw.fps)));
        }
        let too_wide = |feature: &&Feature| {
            feature.shape.iter().try_fold(1usize, |n, x| n.checked_mul(*x)).is_none_or(|n| n > 1 << 24)
        };
        if let Some(feature) = raw.features.values().find(too_wide) {
            return Err(Error::file(
                &path,
                format!("a feature of shape {:?}, which is too large", feature.shape),
            ));
        }
        Ok(Self {
            path,
            root: root.to_owned(),
            version,
            fps: raw.fps,
            features: raw.features,
            robot_type: raw.robot_type,
            total_episodes: raw.total_episodes,
            chunks_size: raw.chunks_size.unwrap_or(1000).max(1),
            data_path: raw.data_path,
            video_path: raw.video_path,
        })
    }

    fn is_v3(&self) -> bool {
        self.version.starts_with("v3.")
    }

    /// All episodes in the order of their numbers, with their places in these videos.
    pub(super) fn episodes(&self, videos: &[&str], limits: &Limits) -> Result<Vec<Entry>> {
        let mut entries = match self.is_v3() {
            true => self.entries_v3(videos, limits)?,
            false => self.entries_v2(videos)?,
        };
        entries.sort_by_key(|entry| entry.number);
        let wrong = |problem: String| Error::file(&self.path, problem);
        if let Some(pair) = entries.windows(2).find(|pair| pair[0].number == pair[1].number) {
            return Err(wrong(format!("episode {} is listed twice in meta/episodes", pair[0].number)));
        }
        match self.total_episodes {
            _ if entries.is_empty() => Err(Error::Empty { path: self.root.clone() }),
            Some(total) if total != entries.len() => Err(wrong(format!(
                "{total} episodes, but {} are listed in meta/episodes; is the copy whole?",
                entries.len()
            ))),
            _ => Ok(entries),
        }
    }

    fn entries_v3(&self, videos: &[&str], limits: &Limits) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for path in parquet_files(&self.root.join("meta/episodes"))? {
            let file = ParquetFile::open(&path)?;
            let (left, rows) = (Cell::new(limits.inflated), 0..file.rows());
            let integers = |name: &str| -> Result<Vec<usize>> {
                let column = file.numbers(name, rows.clone(), 1, &left)?.numbers;
                let whole = match column {
                    Column::I32(numbers) => numbers.into_iter().map(|n| usize::try_from(n).ok()).collect(),
                    _ => None,
                };
                whole.ok_or_else(|| Error::file(&path, format!("`{name}`: expected integers from 0")))
            };
            let places = |prefix: &str| -> Result<Vec<Place>> {
                let chunks = integers(&format!("{prefix}/chunk_index"))?;
                let files = integers(&format!("{prefix}/file_index"))?;
                Ok(chunks.into_iter().zip(files).map(|(chunk, file)| Place { chunk, file }).collect())
            };
            let (numbers, lengths, data) = (integers("episode_index")?, integers("length")?, places("data")?);
            let mut found: Vec<Entry> = numbers
                .into_iter()
                .zip(lengths)
                .zip(data)
                .map(|((number, length), data)| Entry { number, length, data, videos: BTreeMap::new() })
                .collect();
            for video in videos {
                let places = places(&format!("videos/{video}"))?;
                let from = file.doubles(&format!("videos/{video}/from_timestamp"), rows.clone(), &left)?;
                for (entry, at) in found.iter_mut().zip(places.into_iter().zip(from)) {
                    entry.videos.insert((*video).to_owned(), at);
                }
            }
            entries.append(&mut found);
        }
        Ok(entries)
    }

    fn entries_v2(&self, videos: &[&str]) -> Result<Vec<Entry>> {
        #[derive(Deserialize)]
        struct Line {
            episode_index: usize,
            length: usize,
        }
        let path = self.root.join("meta/episodes.jsonl");
        let text = read_small(&path, MAX_META)?;
        let entry = |(i, line): (usize, &str)| {
            let line: Line =
                serde_json::from_str(line).map_err(|e| Error::file(&path, format!("line {}: {e}", i + 1)))?;
            let data = Place { chunk: line.episode_index / self.chunks_size, file: line.episode_index };
            let videos = videos.iter().map(|video| ((*video).to_owned(), (data, 0.0))).collect();
            Ok(Entry { number: line.episode_index, length: line.length, data, videos })
        };
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(entry).collect()
    }

    /// The file that an episode's rows lie in.
    pub(super) fn data_file(&self, entry: &Entry) -> Result<PathBuf> {
        self.place(&self.data_path, entry, entry.data, "")
    }

    /// The video of an episode, and where in it the episode begins, in seconds.
    pub(super) fn video_file(&self, entry: &Entry, key: &str) -> Result<(PathBuf, f64)> {
        let Some((pattern, (place, from))) = self.video_path.as_ref().zip(entry.videos.get(key)) else {
            return Err(Error::file(
                &self.path,
                format!("`{key}` is a video, but nothing says where it lies"),
            ));
        };
        Ok((self.place(pattern, entry, *place, key)?, *from))
    }

    /// The path that a pattern such as `data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet` gives,
    /// within the dataset's folder.
    fn place(&self, pattern: &str, entry: &Entry, place: Place, video: &str) -> Result<PathBuf> {
        let wrong = |problem: String| Error::file(&self.path, format!("path {pattern:?}: {problem}"));
        let (mut path, mut rest) = (String::new(), pattern);
        while let Some((before, after)) = rest.split_once('{') {
            path.push_str(before);
            let (name, after) =
                after.split_once('}').ok_or_else(|| wrong("a brace that is not closed".to_owned()))?;
            let (name, format) = name.split_once(':').unwrap_or((name, ""));
            let number = match name {
                "video_key" => None,
                "chunk_index" | "episode_chunk" => Some(place.chunk),
                "file_index" => Some(place.file),
                "episode_index" => Some(entry.number),
                other => return Err(wrong(format!("an unknown name {other:?}"))),
            };
            let digits = format.trim_end_matches('d').trim_start_matches('0').parse::<usize>().unwrap_or(0);
            match number {
                Some(number) => path.push_str(&format!("{number:0width$}", width = digits.min(32))),
                None => path.push_str(video),
            }
            rest = after;
        }
        path.push_str(rest);
        let inside = Path::new(&path).components().all(|part| matches!(part, Component::Normal(_)));
        match inside {
            true => Ok(self.root.join(path)),
            false => Err(wrong("a path out of the dataset's folder".to_owned())),
        }
    }

    /// The texts of the tasks by their numbers, as a JSON list.
    pub(super) fn tasks(&self, limits: &Limits) -> Result<Option<String>> {
        let tasks = match self.is_v3() {
            true => self.tasks_v3(limits)?,
            false => self.tasks_v2()?,
        };
        let texts: Vec<&String> = tasks.values().collect();
        Ok(serde_json::to_string(&texts).ok().filter(|_| !texts.is_empty()))
    }

    fn tasks_v3(&self, limits: &Limits) -> Result<BTreeMap<i64, String>> {
        let path = self.root.join("meta/tasks.parquet");
        if !path.is_file() {
            return Ok(BTreeMap::new());
        }
        let file = ParquetFile::open(&path)?;
        let (left, rows) = (Cell::new(limits.inflated), 0..file.rows());
        // The text is pandas' index, whose column may have any name.
        let pandas = file.note("pandas").and_then(|note| serde_json::from_str::<Value>(note).ok());
        let index = pandas.as_ref().and_then(|pandas| pandas["index_columns"][0].as_str());
        let columns = file.columns();
        let text = [index, Some("__index_level_0__"), Some("task")];
        let Some(text) = text.into_iter().flatten().find(|name| columns.contains(name)) else {
            return Ok(BTreeMap::new());
        };
        let numbers = floats(file.numbers("task_index", rows.clone(), 1, &left)?.numbers);
        let texts = file.byte_strings(text, None, rows, &left)?;
        let text = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).into_owned();
        Ok(numbers.into_iter().map(|n| n as i64).zip(texts.iter().map(text)).collect())
    }

    fn tasks_v2(&self) -> Result<BTreeMap<i64, String>> {
        #[derive(Deserialize)]
        struct Line {
            task_index: i64,
            task: String,
        }
        let path = self.root.join("meta/tasks.jsonl");
        if !path.is_file() {
            return Ok(BTreeMap::new());
        }
        let text = read_small(&path, MAX_META)?;
        let task = |(i, line): (usize, &str)| {
            let line: Line =
                serde_json::from_str(line).map_err(|e| Error::file(&path, format!("line {}: {e}", i + 1)))?;
            Ok((line.task_index, line.task))
        };
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(task).collect()
    }
}

/// The files `chunk-*/file-*.parquet` of a folder, in order.
fn parquet_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let list = |folder: &Path| -> Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(folder).map_err(|e| Error::io(folder, e))?;
        let mut paths = entries
            .map(|entry| entry.map(|entry| entry.path()).map_err(|e| Error::io(folder, e)))
            .collect::<Result<Vec<_>>>()?;
        paths.sort();
        Ok(paths)
    };
    let mut files = Vec::new();
    for chunk in list(folder)?.iter().filter(|path| path.is_dir()) {
        let inside = list(chunk)?;
        files.extend(inside.into_iter().filter(|path| path.extension().is_some_and(|e| e == "parquet")));
    }
    Ok(files)
}
