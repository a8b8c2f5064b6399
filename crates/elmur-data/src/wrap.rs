//! Wrappers applied to recorded data, while it is read.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use elmur_base::{FieldMut, Leaf, Row, Space, Spaces};
use elmur_envs::{Wrappers, Wrapping};

use crate::episode::{Column, own_type, pixel};
use crate::error::{Error, Result};
use crate::layout::{ColumnType, Layout, Outline, Part};
use crate::source::{Source, check_read, chunks};

/// A source as the wrapped environment would have shown it. Data is kept without wrappers, and each policy
/// sees it in its own way; nothing is copied.
#[derive(Debug)]
pub struct WrappedSource {
    source: Arc<dyn Source>,
    wrapping: Wrapping,
    layout: Layout,
    metadata: BTreeMap<String, String>,
    /// The wrappers' names as a number, for checksums.
    mark: u32,
}

/// Applies wrappers to recorded data: see [`WrappedSource`]. Flat actions are an error where actions are not
/// all integers.
pub fn wrap(source: &Arc<dyn Source>, wrappers: Wrappers) -> Result<Arc<dyn Source>> {
    let wrapping = Wrapping::new(source.spaces(), wrappers).map_err(Error::Env)?;
    let types = |space: &Space| space.leaves().iter().map(own_type).collect::<Vec<_>>();
    let spaces = wrapping.spaces();
    let layout = Layout::new(spaces, &types(&spaces.observation), &types(&spaces.action));
    let names = wrappers.names().join(", ");
    let mark = crc32fast::hash(names.as_bytes());
    let mut metadata = source.metadata().clone();
    metadata.insert("wrappers".to_owned(), names);
    Ok(Arc::new(WrappedSource { source: Arc::clone(source), wrapping, layout, metadata, mark }))
}

impl Source for WrappedSource {
    fn spaces(&self) -> &Spaces {
        self.wrapping.spaces()
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
        match part {
            Part::Reward | Part::Imitate | Part::Accepted => self.source.read(part, episode, rows, out),
            Part::Observation(leaf) => self.observations(leaf, episode, rows, out),
            Part::Action(leaf) => self.actions((Part::Action, leaf), episode, rows, out),
            Part::Label(leaf) => self.actions((Part::Label, leaf), episode, rows, out),
        }
    }

    fn checksum(&self, episode: usize) -> u32 {
        self.source.checksum(episode).rotate_left(7) ^ self.mark
    }

    fn reading_threads(&self) -> usize {
        self.source.reading_threads()
    }
}

impl WrappedSource {
    fn observations(
        &self,
        leaf: usize,
        episode: usize,
        rows: Range<usize>,
        mut out: FieldMut<'_>,
    ) -> Result<()> {
        let (own, own_layout) = (self.source.spaces(), self.source.layout());
        let mut wrapping = self.wrapping.clone();
        let (mut seen, mut action) = (Row::of(&own.observation), Row::of(&own.action));
        let space = &self.wrapping.spaces().observation;
        let mut shown = Row::of(space);
        let width = own_layout.observations.iter().map(|c| c.width).sum();
        let mut place = 0;
        for part in chunks(rows.len(), width) {
            let part = rows.start + part.start..rows.start + part.end;
            let observed =
                self.columns(Part::Observation, &own_layout.observations, episode, part.clone())?;
            // The action before each observation; the first of an episode has none.
            let from = part.start.saturating_sub(1);
            let taken = self.columns(Part::Action, &own_layout.actions, episode, from..part.end - 1)?;
            for t in part.clone() {
                row(&observed, &own.observation, t - part.start, &mut seen);
                if t > 0 {
                    row(&taken, &own.action, t - 1 - from, &mut action);
                }
                wrapping.observe(seen.values(), (t > 0).then(|| action.values()), shown.as_mut());
                place = put(&shown, space, leaf, &mut out, place);
            }
        }
        Ok(())
    }

    /// Leaf `leaf` of the actions that were taken or should have been.
    fn actions(
        &self,
        (part, leaf): (fn(usize) -> Part, usize),
        episode: usize,
        rows: Range<usize>,
        mut out: FieldMut<'_>,
    ) -> Result<()> {
        let (own, own_layout) = (self.source.spaces(), self.source.layout());
        let space = &self.wrapping.spaces().action;
        let (mut action, mut taken) = (Row::of(&own.action), Row::of(space));
        let width = own_layout.actions.iter().map(|c| c.width).sum();
        let mut place = 0;
        for chunk in chunks(rows.len(), width) {
            let chunk = rows.start + chunk.start..rows.start + chunk.end;
            let columns = self.columns(part, &own_layout.actions, episode, chunk.clone())?;
            for t in 0..chunk.len() {
                row(&columns, &own.action, t, &mut action);
                self.wrapping.wrap_action(action.values(), taken.as_mut());
                place = put(&taken, space, leaf, &mut out, place);
            }
        }
        Ok(())
    }

    /// Rows of all columns of an observation or an action.
    fn columns(
        &self,
        part: fn(usize) -> Part,
        types: &[ColumnType],
        episode: usize,
        rows: Range<usize>,
    ) -> Result<Vec<Column>> {
        let column = |(i, column): (usize, &ColumnType)| {
            let mut data = Column::zeros(column.element, rows.len() * column.width);
            self.source.read(part(i), episode, rows.clone(), data.as_mut())?;
            Ok(data)
        };
        types.iter().enumerate().map(column).collect()
    }
}

/// Reads row `t` of a space's columns.
fn row(columns: &[Column], space: &Space, t: usize, value: &mut Row) {
    value.clear();
    for (leaf, column) in space.leaves().iter().zip(columns) {
        let range = t * leaf.len()..(t + 1) * leaf.len();
        match (leaf, column) {
            (_, Column::F32(data)) => value.floats.extend_from_slice(&data[range]),
            (_, Column::I32(data)) => value.ints.extend_from_slice(&data[range]),
            (Leaf::Bytes { .. }, Column::U8(data)) => value.bytes.extend_from_slice(&data[range]),
            (_, Column::U8(data)) => value.floats.extend(data[range].iter().map(|byte| pixel(*byte))),
        }
    }
}

/// Copies one leaf of a value to `out` from `place` on; the place after it.
fn put(value: &Row, space: &Space, leaf: usize, out: &mut FieldMut<'_>, place: usize) -> usize {
    let (mut floats, mut ints, mut bytes) = (0, 0, 0);
    for (i, leaf_here) in space.leaves().iter().enumerate() {
        let len = leaf_here.len();
        let start = match leaf_here {
            Leaf::Floats { .. } => &mut floats,
            Leaf::Ints(_) => &mut ints,
            Leaf::Bytes { .. } => &mut bytes,
        };
        if i == leaf {
            let range = *start..*start + len;
            match out {
                FieldMut::F32(out) => out[place..place + len].copy_from_slice(&value.floats[range]),
                FieldMut::I32(out) => out[place..place + len].copy_from_slice(&value.ints[range]),
                FieldMut::U8(out) => out[place..place + len].copy_from_slice(&value.bytes[range]),
                FieldMut::I64(_) | FieldMut::Bool(_) => {}
            }
            return place + len;
        }
        *start += len;
    }
    place
}

#[cfg(test)]
mod tests {
    use elmur_envs::{Encoding, Env, EnvSpec, Purpose, Registry};

    use super::*;
    use crate::Dataset;
    use crate::collect::Demonstrations;
    use crate::episode::Episode;

    /// Plays the recorded actions again in an environment behind wrappers.
    fn replayed(env: &mut dyn Env, wrapped: &Spaces, actions: &[Column], seed: u64, steps: usize) -> Episode {
        let mut shown = Row::of(&wrapped.observation);
        let mut episode = Episode {
            observations: Column::of(&wrapped.observation),
            actions: actions.to_vec(),
            rewards: Vec::new(),
            terminated: false,
            truncated: false,
            imitate: None,
            labels: None,
            accepted: None,
        };
        env.reset(seed, shown.as_mut()).unwrap();
        Column::append(&mut episode.observations, &shown, &wrapped.observation);
        for t in 0..steps {
            let mut action = Row::of(&wrapped.action);
            row(actions, &wrapped.action, t, &mut action);
            let step = env.step(action.values(), shown.as_mut()).unwrap();
            Column::append(&mut episode.observations, &shown, &wrapped.observation);
            episode.rewards.push(step.reward as f32);
            (episode.terminated, episode.truncated) = (step.terminated, step.truncated);
        }
        episode
    }

    fn cut(column: &Column, range: Range<usize>) -> Column {
        match column {
            Column::F32(x) => Column::F32(x[range].to_vec()),
            Column::I32(x) => Column::I32(x[range].to_vec()),
            Column::U8(x) => Column::U8(x[range].to_vec()),
        }
    }

    #[test]
    fn wrapped_data_is_what_a_wrapped_environment_shows() {
        let registry = Registry::builtin();
        for id in [
            "popgym-RepeatPreviousEasy",
            "popgym-BattleshipEasy",
            "popgym-ConcentrationEasy",
            "popgym-PositionOnlyPendulumHard",
        ] {
            let environment = registry.find(&EnvSpec::new(id)).unwrap();
            let (environment, mut kept) = (&environment, Vec::new());
            let demonstrations = Demonstrations {
                environment,
                episodes: 0..3,
                seed: 3,
                noise: 0.0,
                threads: 1,
                stop: Default::default(),
            };
            let keep = |episode| {
                kept.push(episode);
                Ok(())
            };
            demonstrations.collect(keep).unwrap();
            let data =
                Dataset::from_episodes(environment.spaces().clone(), Default::default(), kept).unwrap();
            let plain: Arc<dyn Source> = Arc::new(data);
            let encodings = [Encoding::AsIs, Encoding::OneHot, Encoding::Floats];
            for (bits, encoding) in (0..8).flat_map(|bits| encodings.map(|encoding| (bits, encoding))) {
                let on = |bit: u32| bits >> bit & 1 == 1;
                let wrappers = Wrappers {
                    previous_action: on(0),
                    chosen_cell: on(1) && id.contains("Concentration"),
                    first_step: on(1),
                    encoding,
                    flat_action: on(2) && plain.spaces().action.widths().floats == 0,
                };
                let wrapped = wrap(&plain, wrappers).unwrap();
                let wrapped_env = registry.find(&EnvSpec::new(id).with_wrappers(wrappers)).unwrap();
                let mut env = wrapped_env.make(Purpose::Evaluate).unwrap();
                assert_eq!(wrapped.spaces(), env.spaces());
                for i in 0..3 {
                    let got = wrapped.episode(i).unwrap();
                    let spaces = wrapped.spaces().clone();
                    let seed = (3 << 32) + i as u64;
                    let played = replayed(&mut *env, &spaces, &got.actions, seed, got.steps());
                    assert_eq!(Episode { imitate: None, ..got.clone() }, played, "{id} {wrappers:?}");
                    // Parts of it are the same as parts of the whole.
                    let width = wrapped.layout().observations[0].width;
                    let mut part = Column::zeros(wrapped.layout().observations[0].element, 3 * width);
                    wrapped.read(Part::Observation(0), i, 2..5, part.as_mut()).unwrap();
                    let whole = cut(&got.observations[0], 2 * width..5 * width);
                    assert_eq!(part, whole);
                }
            }
        }
    }
}
