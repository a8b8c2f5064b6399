//! Some of the observations of a source, by the names that its metadata give them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use elmur_base::{FieldMut, Leaf, Space, Spaces};

use crate::error::Result;
use crate::keys::{ObservationKey, Selection, side_by_side};
use crate::layout::{Layout, Outline, Part};
use crate::source::{Source, check_read};

/// A source with some of its observations, in another order perhaps.
#[derive(Debug)]
struct SelectedSource {
    source: Arc<dyn Source>,
    spaces: Spaces,
    metadata: BTreeMap<String, String>,
    layout: Layout,
    /// Numbers of the leaves that are shown.
    leaves: Vec<usize>,
}

/// The source with the observations of these names only; none: with all of them.
pub(crate) fn select_keys(source: Arc<dyn Source>, keys: &[String]) -> Result<Arc<dyn Source>, String> {
    if keys.is_empty() {
        return Ok(source);
    }
    let noted = ObservationKey::of(source.metadata(), &source.spaces().observation);
    let names: Vec<&str> = noted.iter().map(|key| key.name.as_str()).collect();
    let leaves = Selection { keys: keys.to_vec(), ..Selection::default() }.choose(&names)?;
    let all = source.spaces().observation.leaves();
    let space = |i: &usize| match all[*i] {
        Leaf::Ints(sizes) => Space::MultiDiscrete { sizes: sizes.to_vec() },
        Leaf::Floats { shape, low, high } => {
            Space::Box { shape: shape.to_vec(), low: low.to_vec(), high: high.to_vec() }
        }
        Leaf::Bytes { shape } => Space::Bytes { shape: shape.to_vec() },
    };
    let observation = side_by_side(leaves.iter().map(space).collect());
    let spaces = Spaces { observation, action: source.spaces().action.clone() };
    let mut layout = source.layout().clone();
    layout.observations = leaves.iter().map(|i| layout.observations[*i]).collect();
    let mut metadata = source.metadata().clone();
    ObservationKey::note(&leaves.iter().map(|i| noted[*i].clone()).collect::<Vec<_>>(), &mut metadata);
    Ok(Arc::new(SelectedSource { source, spaces, metadata, layout, leaves }))
}

impl Source for SelectedSource {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn episodes(&self) -> usize {
        self.source.episodes()
    }

    fn outline(&self, episode: usize) -> Outline {
        self.source.outline(episode)
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn read(&self, part: Part, episode: usize, rows: Range<usize>, out: FieldMut<'_>) -> Result<()> {
        check_read(self, part, episode, &rows, &out)?;
        let part = match part {
            Part::Observation(leaf) => Part::Observation(self.leaves[leaf]),
            part => part,
        };
        self.source.read(part, episode, rows, out)
    }

    /// Reading an episode would be slower than telling which parts of it are shown.
    fn checksum(&self, episode: usize) -> u32 {
        let shown = format!("{:?}", self.leaves);
        self.source.checksum(episode).rotate_left(11) ^ crc32fast::hash(shown.as_bytes())
    }

    fn reading_threads(&self) -> usize {
        self.source.reading_threads()
    }

    fn torn_bytes(&self) -> u64 {
        self.source.torn_bytes()
    }
}
