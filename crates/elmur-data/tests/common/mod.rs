//! What tests of files share.

#![allow(clippy::unwrap_used, dead_code)]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use elmur_base::{Space, Spaces};
use elmur_data::{Column, Dataset, Episode};
use elmur_rng::Rng;

/// A folder of its own that goes away with the test.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("elmur-data-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub fn spaces() -> Spaces {
    let parts = vec![
        Space::MultiDiscrete { sizes: vec![3, 2] },
        Space::between(0.0, 1.0, [1, 3]),
        Space::Box { shape: vec![2], low: vec![-1.5, f32::MIN], high: vec![0.1, f32::MAX] },
    ];
    Spaces { observation: Space::Tuple { parts }, action: Space::Discrete { n: 4 } }
}

pub fn metadata() -> BTreeMap<String, String> {
    BTreeMap::from([("env".to_owned(), "täst".to_owned()), ("seed".to_owned(), "7".to_owned())])
}

/// Episodes of 1, 2, ... steps; every other one with a final observation, every third with counts,
/// every fourth with labels.
pub fn episodes(n: usize) -> Vec<Episode> {
    let mut rng = Rng::new(3, 0);
    let mut episode = |i: usize| {
        let (steps, rows) = (1 + i, 1 + i + i % 2);
        Episode {
            observations: vec![
                Column::I32(
                    (0..2 * rows).map(|k| rng.below(if k % 2 == 0 { 3 } else { 2 }) as i32).collect(),
                ),
                Column::U8((0..3 * rows).map(|_| rng.below(256) as u8).collect()),
                Column::F32((0..2 * rows).map(|_| rng.uniform(-1.5, 0.1) as f32).collect()),
            ],
            actions: vec![Column::I32((0..steps).map(|_| rng.below(4) as i32).collect())],
            rewards: (0..steps).map(|_| rng.uniform(-1.0, 1.0) as f32).collect(),
            terminated: i.is_multiple_of(2),
            truncated: i % 2 == 1,
            imitate: i.is_multiple_of(3).then(|| (0..steps).map(|_| rng.below(2) == 1).collect()),
            labels: (i % 4 == 1)
                .then(|| vec![Column::I32((0..steps).map(|_| rng.below(4) as i32).collect())]),
            accepted: (i % 5 == 2).then(|| (0..4 * steps).map(|_| rng.below(2) == 1).collect()),
        }
    };
    (0..n).map(&mut episode).collect()
}

pub fn dataset(n: usize) -> Dataset {
    Dataset::from_episodes(spaces(), metadata(), episodes(n)).unwrap()
}
