//! Cameras: leaves of bytes from the environment to the file and back, never as anything but bytes.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_data::collect::play;
use elmur_data::{Column, Dataset, Episode, Source, wrap, write_npz};
use elmur_envs::{Env, Player, Result, Step, Wrappers};

/// Shows a picture that begins with its seed and the time, and a number; lasts four steps.
struct Camera {
    spaces: Spaces,
    seed: u8,
    time: u8,
}

impl Camera {
    fn new() -> Self {
        let parts = vec![Space::Bytes { shape: vec![1, 2, 2] }, Space::unbounded([1])];
        let spaces = Spaces { observation: Space::Tuple { parts }, action: Space::Discrete { n: 3 } };
        Self { spaces, seed: 0, time: 0 }
    }

    fn observe(&self, mut observation: ValuesMut<'_>) {
        let picture = [self.seed, self.time, 255, 0];
        observation.copy_from(Values { floats: &[f32::from(self.time)], ints: &[], bytes: &picture });
    }
}

impl Env for Camera {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
        (self.seed, self.time) = (seed as u8, 0);
        self.observe(observation);
        Ok(())
    }

    fn step(&mut self, _: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        self.time += 1;
        self.observe(observation);
        Ok(Step { reward: 1.0, terminated: self.time == 4, ..Step::default() })
    }
}

/// Answers with the time that it sees in the picture.
struct Watch;

impl Player for Watch {
    fn reset(&mut self) {}

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        action.ints[0] = i32::from(observation.bytes[1]) % 3;
    }

    fn took(&mut self, _: Values<'_>) {}
}

fn recorded() -> Dataset {
    let (mut env, mut player) = (Camera::new(), Watch);
    let episodes: Vec<Episode> =
        (0..3).map(|seed| play(&mut env, &mut player, seed, 0.0, &Default::default()).unwrap()).collect();
    Dataset::from_episodes(env.spaces, BTreeMap::new(), episodes).unwrap()
}

fn read_npz(path: impl AsRef<Path>, spaces: Option<Spaces>) -> elmur_data::Result<Dataset> {
    Dataset::load(&*elmur_data::open(path, spaces.as_ref())?)
}

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("elmur-data-bytes-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn pictures_are_played_kept_and_read_as_bytes() {
    let (dataset, folder) = (recorded(), folder("file"));
    let first = dataset.episode(2).to_episode();
    let pictures = (0..5).flat_map(|time| [2, time, 255, 0]).collect();
    assert_eq!(first.observations, [Column::U8(pictures), Column::F32(vec![0.0, 1.0, 2.0, 3.0, 4.0])]);
    assert_eq!(first.actions, [Column::I32(vec![0, 1, 2, 0])]);

    let path = folder.join("a.elmur");
    dataset.save(&path).unwrap();
    let bytes = fs::read(&path).unwrap();
    let find = |text: &str| bytes.windows(text.len()).position(|window| window == text.as_bytes());
    assert!(find(r#"{"bytes":{"shape":[1,2,2]}}"#).is_some());
    let at = find(r#"["u8","f32"]"#).unwrap();
    let read = Dataset::open(&path).unwrap();
    assert_eq!(read.spaces(), dataset.spaces());
    assert!(read.episodes().eq(dataset.episodes()));
    assert_eq!(read.fingerprint(), dataset.fingerprint());

    // The same file with another element type for the pictures, under a valid checksum.
    let mut wrong = bytes;
    wrong[at..at + 12].copy_from_slice(br#"["f32","u8"]"#);
    let len = u64::from_le_bytes(std::array::from_fn(|i| wrong[16 + i])) as usize;
    let crc = crc32fast::hash(&wrong[16..24 + len]);
    wrong[12..16].copy_from_slice(&crc.to_le_bytes());
    let error = Dataset::from_bytes(&wrong).unwrap_err().to_string();
    assert!(error.contains("element types that do not fit the spaces"), "{error}");
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn wrappers_leave_pictures_as_bytes() {
    let dataset: Arc<dyn Source> = Arc::new(recorded());
    let wrappers = Wrappers::named(&["previous_action", "first_step", "one_hot"]).unwrap();
    let wrapped = wrap(&dataset, wrappers).unwrap();
    let (plain, shown) = (dataset.episode(1).unwrap(), wrapped.episode(1).unwrap());
    assert_eq!(shown.observations[0], plain.observations[0]);
    let Column::F32(rest) = &shown.observations[1] else { panic!("floats") };
    // Time, the last of three actions, the flag of the first step.
    assert_eq!(rest[..12], [0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]);
}

#[test]
fn arrays_of_bytes_stay_bytes_where_the_spaces_say_so() {
    let folder = folder("npz");
    let spaces = |observation| Spaces { observation, action: Space::Discrete { n: 3 } };
    let camera = spaces(Space::Bytes { shape: vec![1, 2, 2] });
    let recorded = recorded();
    let episodes = recorded.episodes().map(|e| {
        let mut episode = e.to_episode();
        episode.observations.truncate(1);
        let Column::U8(pictures) = &mut episode.observations[0] else { panic!("bytes") };
        pictures.truncate(16);
        episode
    });
    let dataset = Dataset::from_episodes(camera.clone(), BTreeMap::new(), episodes.collect()).unwrap();
    write_npz(folder.join("npz"), &dataset).unwrap();
    let given = read_npz(folder.join("npz"), Some(camera.clone())).unwrap();
    assert!(given.spaces() == &camera && given.episodes().eq(dataset.episodes()));
    // Nobody said so: pixels of a box, as ever.
    let inferred = Dataset::open(folder.join("npz")).unwrap();
    assert_eq!(inferred.spaces().observation, Space::between(0.0, 1.0, [1, 2, 2]));
    assert_eq!(inferred.episode(0).observations, dataset.episode(0).observations);
    let turned = spaces(Space::Bytes { shape: vec![2, 2, 3] });
    assert!(
        read_npz(folder.join("npz"), Some(turned)).unwrap_err().to_string().contains("[2, 2, 3] per step")
    );
    // Floats are no bytes.
    let floats =
        Episode { observations: vec![Column::F32(vec![0.5; 16])], ..dataset.episode(0).to_episode() };
    let floats =
        Dataset::from_episodes(spaces(Space::unbounded([1, 2, 2])), BTreeMap::new(), vec![floats]).unwrap();
    write_npz(folder.join("floats"), &floats).unwrap();
    let error = read_npz(folder.join("floats"), Some(camera)).unwrap_err().to_string();
    assert!(error.contains("holds f32 where the space has bytes"), "{error}");
    fs::remove_dir_all(folder).unwrap();
}
