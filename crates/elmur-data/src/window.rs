//! The numbers of a batch: fields of all steps of some crops, padded beyond the ends of episodes.

use std::ops::Range;

use elmur_base::{Field, FieldMut, Leaf};

use crate::episode::{ColumnRef, ElementType, pixel};
use crate::error::{Error, Result};
use crate::{Crop, Dataset, EpisodeRef};

/// Steps `offset..offset + length` of every crop of a batch: [rows, length] steps.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    /// The dataset that the crops are taken from.
    pub dataset: &'a Dataset,
    /// One crop per row of the batch.
    pub crops: &'a [Crop],
    /// First step, counted from each crop's start.
    pub offset: usize,
    /// Steps per row.
    pub length: usize,
}

impl Window<'_> {
    /// Writes a field of all steps, [rows, length, numbers], padded as [`Field`] says.
    ///
    /// | field | type of `out` |
    /// |---|---|
    /// | [`Field::Observation`] | f32 for any leaf (byte b is b / 255), i32 for discrete leaves, u8 for bytes |
    /// | [`Field::Action`] | i32 for the discrete components of the action, f32 for the continuous ones |
    /// | [`Field::Target`] | i64 for the discrete components of the action, f32 for the continuous ones |
    /// | [`Field::Imitate`] | bool |
    /// | [`Field::ReturnToGo`] | f32 |
    ///
    /// Another type, room for more or fewer numbers, and a leaf that does not exist are errors.
    pub fn fill(&self, field: Field, out: FieldMut<'_>) -> Result<()> {
        let widths = self.dataset.spaces().action.widths();
        let (discrete, continuous) = (widths.ints, widths.floats + widths.bytes);
        match (field, out) {
            (Field::Observation(leaf), out) => return self.observations(leaf, out),
            (Field::Action, FieldMut::I32(out)) if discrete > 0 => {
                self.check_room(field, discrete, out.len())?;
                let choices = self.choices();
                self.actions(discrete, out, exists, choice, |i| choices[i]);
            }
            (Field::Target, FieldMut::I64(out)) if discrete > 0 => {
                self.check_room(field, discrete, out.len())?;
                let choice = |column: ColumnRef<'_>, i: usize| choice(column, i).map(i64::from);
                self.actions(discrete, out, imitated, choice, |_| Field::IGNORED);
            }
            (Field::Action | Field::Target, FieldMut::F32(out)) if continuous > 0 => {
                self.check_room(field, continuous, out.len())?;
                self.actions(continuous, out, exists, number, |_| 0.0);
            }
            (Field::Imitate, FieldMut::Bool(out)) => {
                self.check_room(field, 1, out.len())?;
                self.each(|place, episode, step| out[place] = imitated(episode, step));
            }
            (Field::ReturnToGo, FieldMut::F32(out)) => {
                self.check_room(field, 1, out.len())?;
                self.returns_to_go(out);
            }
            (field, out) => {
                let of_actions = |integer: &str| match (discrete, continuous) {
                    (_, 0) => format!("{integer}, since actions are discrete"),
                    (0, _) => "f32, since actions are continuous".to_owned(),
                    _ => format!("{integer} or f32"),
                };
                let expected = match field {
                    Field::Action => of_actions("i32"),
                    Field::Target => of_actions("i64"),
                    Field::Imitate => "bool".to_owned(),
                    Field::Observation(_) | Field::ReturnToGo => "f32".to_owned(),
                };
                return Err(Error::field(field, expected, out.type_name()));
            }
        }
        Ok(())
    }

    fn check_room(&self, field: Field, width: usize, got: usize) -> Result<()> {
        let (rows, length) = (self.crops.len(), self.length);
        let expected = rows * length * width;
        if got == expected {
            return Ok(());
        }
        Err(Error::field(field, format!("room for {expected} numbers, [{rows}, {length}, {width}]"), got))
    }

    /// Calls `f(place, episode, step)` for each of the [rows, length] places; `step` may lie beyond the
    /// episode's end.
    fn each(&self, mut f: impl FnMut(usize, &EpisodeRef<'_>, usize)) {
        for (row, crop) in self.crops.iter().enumerate() {
            let episode = self.dataset.episode(crop.episode);
            for i in 0..self.length {
                f(row * self.length + i, &episode, crop.start + self.offset + i);
            }
        }
    }

    fn observations(&self, leaf: usize, out: FieldMut<'_>) -> Result<()> {
        let (field, leaves) = (Field::Observation(leaf), self.dataset.spaces().observation.leaves());
        let Some(width) = leaves.get(leaf).map(Leaf::len) else {
            return Err(Error::field(field, format!("a leaf below {}", leaves.len()), leaf));
        };
        self.check_room(field, width, out.len())?;
        match (out, self.dataset.episode(0).observations[leaf].element_type()) {
            (FieldMut::F32(out), _) => self.rows_of(leaf, width, out, |column, range, out| match column {
                ColumnRef::F32(data) => out.copy_from_slice(&data[range]),
                ColumnRef::U8(data) => out.iter_mut().zip(&data[range]).for_each(|(x, b)| *x = pixel(*b)),
                ColumnRef::I32(data) => out.iter_mut().zip(&data[range]).for_each(|(x, i)| *x = *i as f32),
            }),
            (FieldMut::I32(out), ElementType::I32) => self.rows_of(leaf, width, out, |column, range, out| {
                if let ColumnRef::I32(data) = column {
                    out.copy_from_slice(&data[range]);
                }
            }),
            (FieldMut::U8(out), ElementType::U8) => self.rows_of(leaf, width, out, |column, range, out| {
                if let ColumnRef::U8(data) = column {
                    out.copy_from_slice(&data[range]);
                }
            }),
            (out, recorded) => {
                let expected = match recorded {
                    ElementType::F32 => "f32",
                    ElementType::I32 => "i32 or f32",
                    ElementType::U8 => "u8 or f32",
                };
                return Err(Error::field(field, expected, out.type_name()));
            }
        }
        Ok(())
    }

    /// Calls `copy(column, range, out)` for every step with the numbers of its observation, or of the last
    /// there is.
    fn rows_of<T>(
        &self,
        leaf: usize,
        width: usize,
        out: &mut [T],
        copy: impl Fn(ColumnRef<'_>, Range<usize>, &mut [T]),
    ) {
        self.each(|place, episode, step| {
            let column = episode.observations[leaf];
            // A leaf may have no numbers.
            let rows = column.len().checked_div(width).unwrap_or(1);
            let row = step.min(rows - 1);
            copy(column, row * width..(row + 1) * width, &mut out[place * width..(place + 1) * width]);
        });
    }

    /// Components of the actions, as many as `width`: those that `component(column, index)` finds where an
    /// action is `there`, and `missing(component)` elsewhere.
    fn actions<T>(
        &self,
        width: usize,
        out: &mut [T],
        there: impl Fn(&EpisodeRef<'_>, usize) -> bool,
        component: impl Fn(ColumnRef<'_>, usize) -> Option<T>,
        missing: impl Fn(usize) -> T,
    ) {
        let leaves: Vec<usize> = self.dataset.spaces().action.leaves().iter().map(Leaf::len).collect();
        self.each(|place, episode, step| {
            let out = &mut out[place * width..(place + 1) * width];
            if !there(episode, step) {
                out.iter_mut().enumerate().for_each(|(i, out)| *out = missing(i));
                return;
            }
            let columns = episode.actions.iter().zip(&leaves);
            let numbers =
                columns.flat_map(|(column, each)| (step * each..(step + 1) * each).map(|i| (*column, i)));
            let found = numbers.filter_map(|(column, i)| component(column, i));
            out.iter_mut().zip(found).for_each(|(out, x)| *out = x);
        });
    }

    /// Number of choices of each discrete component of an action.
    fn choices(&self) -> Vec<i32> {
        let leaves = self.dataset.spaces().action.leaves();
        let sizes = leaves.iter().flat_map(|leaf| if let Leaf::Ints(sizes) = leaf { sizes } else { &[][..] });
        sizes.map(|n| *n as i32).collect()
    }

    fn returns_to_go(&self, out: &mut [f32]) {
        for (row, crop) in self.crops.iter().enumerate() {
            let rewards = self.dataset.episode(crop.episode).rewards;
            let first = crop.start + self.offset;
            let mut total: f64 = rewards.iter().skip(first + self.length).map(|r| f64::from(*r)).sum();
            for i in (0..self.length).rev() {
                total += rewards.get(first + i).map_or(0.0, |r| f64::from(*r));
                out[row * self.length + i] = total as f32;
            }
        }
    }
}

fn exists(episode: &EpisodeRef<'_>, step: usize) -> bool {
    step < episode.steps()
}

fn imitated(episode: &EpisodeRef<'_>, step: usize) -> bool {
    exists(episode, step) && episode.imitate.is_none_or(|imitate| imitate[step])
}

/// A discrete component of an action.
fn choice(column: ColumnRef<'_>, i: usize) -> Option<i32> {
    if let ColumnRef::I32(data) = column { Some(data[i]) } else { None }
}

/// A continuous component of an action.
fn number(column: ColumnRef<'_>, i: usize) -> Option<f32> {
    match column {
        ColumnRef::F32(data) => Some(data[i]),
        ColumnRef::U8(data) => Some(pixel(data[i])),
        ColumnRef::I32(_) => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use elmur_base::{Space, Spaces};

    use super::*;
    use crate::{Column, Episode};

    /// Episode i has `steps[i]` steps; observation 100 i + t (and a final one), action t % 3, reward 1, even
    /// steps to be imitated.
    pub(crate) fn dataset(steps: &[usize]) -> Dataset {
        let spaces = Spaces { observation: Space::unbounded([1]), action: Space::Discrete { n: 3 } };
        let episode = |(i, steps): (usize, &usize)| Episode {
            observations: vec![Column::F32((0..=*steps).map(|t| (100 * i + t) as f32).collect())],
            actions: vec![Column::I32((0..*steps).map(|t| t as i32 % 3).collect())],
            rewards: vec![1.0; *steps],
            terminated: true,
            truncated: false,
            imitate: Some((0..*steps).map(|t| t % 2 == 0).collect()),
        };
        let episodes = steps.iter().enumerate().map(episode).collect();
        Dataset::from_episodes(spaces, BTreeMap::new(), episodes).unwrap()
    }

    #[test]
    fn windows_pad_with_the_last_observation_and_missing_actions() {
        let data = dataset(&[4, 9]);
        let crops = [Crop { episode: 0, start: 0 }, Crop { episode: 1, start: 2 }];
        let window = Window { dataset: &data, crops: &crops, offset: 2, length: 4 };
        let mut seen = [9.0; 8];
        window.fill(Field::Observation(0), FieldMut::F32(&mut seen)).unwrap();
        assert_eq!(seen, [2.0, 3.0, 4.0, 4.0, 104.0, 105.0, 106.0, 107.0]);
        let mut actions = [9; 8];
        window.fill(Field::Action, FieldMut::I32(&mut actions)).unwrap();
        assert_eq!(actions, [2, 0, 3, 3, 1, 2, 0, 1]);
        let mut targets = [9; 8];
        window.fill(Field::Target, FieldMut::I64(&mut targets)).unwrap();
        assert_eq!(targets, [2, -10, -10, -10, 1, -10, 0, -10]);
        let mut imitate = [false; 8];
        window.fill(Field::Imitate, FieldMut::Bool(&mut imitate)).unwrap();
        assert_eq!(imitate, [true, false, false, false, true, false, true, false]);
        let mut returns = [9.0; 8];
        window.fill(Field::ReturnToGo, FieldMut::F32(&mut returns)).unwrap();
        assert_eq!(returns, [2.0, 1.0, 0.0, 0.0, 5.0, 4.0, 3.0, 2.0]);
    }

    /// A camera, pixels of a box, a pair of choices and nothing at all; actions of two choices around two
    /// numbers.
    fn mixed() -> Dataset {
        let observation = Space::Tuple {
            parts: vec![
                Space::Bytes { shape: vec![1, 2] },
                Space::between(0.0, 1.0, [1]),
                Space::MultiDiscrete { sizes: vec![5, 6] },
                Space::unbounded([0]),
            ],
        };
        let parts = vec![Space::Discrete { n: 4 }, Space::unbounded([2]), Space::Discrete { n: 7 }];
        let episode = Episode {
            observations: vec![
                Column::U8(vec![0, 255, 51, 102]),
                Column::U8(vec![255, 51]),
                Column::I32(vec![4, 5, 0, 1]),
                Column::F32(vec![]),
            ],
            actions: vec![
                Column::I32(vec![3, 1]),
                Column::F32(vec![0.5, -0.5, 1.5, 2.5]),
                Column::I32(vec![6, 2]),
            ],
            rewards: vec![1.0, 0.5],
            terminated: true,
            truncated: false,
            imitate: Some(vec![true, false]),
        };
        let spaces = Spaces { observation, action: Space::Tuple { parts } };
        Dataset::from_episodes(spaces, BTreeMap::new(), vec![episode]).unwrap()
    }

    const CROP: [Crop; 1] = [Crop { episode: 0, start: 0 }];

    #[test]
    fn every_kind_of_leaf_and_component_has_its_types() {
        let data = mixed();
        let window = Window { dataset: &data, crops: &CROP, offset: 0, length: 3 };
        let floats = |field, width: usize| {
            let mut out = vec![9.0; 3 * width];
            window.fill(field, FieldMut::F32(&mut out)).unwrap();
            out
        };
        assert_eq!(floats(Field::Observation(0), 2), [0.0, 1.0, 0.2, 0.4, 0.2, 0.4]);
        assert_eq!(floats(Field::Observation(1), 1), [1.0, 0.2, 0.2]);
        assert_eq!(floats(Field::Observation(2), 2), [4.0, 5.0, 0.0, 1.0, 0.0, 1.0]);
        assert!(floats(Field::Observation(3), 0).is_empty());
        assert_eq!(floats(Field::Action, 2), [0.5, -0.5, 1.5, 2.5, 0.0, 0.0]);
        assert_eq!(floats(Field::Target, 2), floats(Field::Action, 2));
        let mut bytes = [9; 6];
        window.fill(Field::Observation(0), FieldMut::U8(&mut bytes)).unwrap();
        assert_eq!(bytes, [0, 255, 51, 102, 51, 102]);
        window.fill(Field::Observation(1), FieldMut::U8(&mut bytes[..3])).unwrap();
        assert_eq!(bytes[..3], [255, 51, 51]);
        let mut ints = [9; 6];
        window.fill(Field::Observation(2), FieldMut::I32(&mut ints)).unwrap();
        assert_eq!(ints, [4, 5, 0, 1, 0, 1]);
        window.fill(Field::Action, FieldMut::I32(&mut ints)).unwrap();
        assert_eq!(ints, [3, 6, 1, 2, 4, 7]);
        let mut targets = [9; 6];
        window.fill(Field::Target, FieldMut::I64(&mut targets)).unwrap();
        assert_eq!(targets, [3, 6, -10, -10, -10, -10]);
    }

    #[test]
    fn impossible_types_and_sizes_are_refused_by_name() {
        let (mixed, discrete) = (mixed(), dataset(&[3]));
        let error = |dataset, field, out: FieldMut<'_>| {
            let window = Window { dataset, crops: &CROP, offset: 0, length: 3 };
            window.fill(field, out).unwrap_err().to_string()
        };
        let (mut f32s, mut i32s, mut i64s, mut u8s, mut bools) =
            ([0.0; 6], [0; 6], [0; 6], [0; 6], [false; 6]);
        for (text, expected) in [
            (
                error(&discrete, Field::Observation(0), FieldMut::U8(&mut u8s[..3])),
                "observation leaf 0: expected f32, got u8",
            ),
            (
                error(&mixed, Field::Observation(0), FieldMut::I32(&mut i32s)),
                "observation leaf 0: expected u8 or f32, got i32",
            ),
            (
                error(&mixed, Field::Observation(2), FieldMut::U8(&mut u8s)),
                "observation leaf 2: expected i32 or f32, got u8",
            ),
            (
                error(&mixed, Field::Observation(4), FieldMut::F32(&mut f32s)),
                "observation leaf 4: expected a leaf below 4, got 4",
            ),
            (
                error(&mixed, Field::Observation(2), FieldMut::I32(&mut i32s[..3])),
                "room for 6 numbers, [1, 3, 2], got 3",
            ),
            (
                error(&discrete, Field::Action, FieldMut::F32(&mut f32s[..3])),
                "action: expected i32, since actions are discrete, got f32",
            ),
            (
                error(&discrete, Field::Target, FieldMut::I32(&mut i32s[..3])),
                "target: expected i64, since actions are discrete, got i32",
            ),
            (
                error(&mixed, Field::Target, FieldMut::Bool(&mut bools)),
                "target: expected i64 or f32, got bool",
            ),
            (error(&mixed, Field::Imitate, FieldMut::I64(&mut i64s[..3])), "imitate: expected bool, got i64"),
            (
                error(&mixed, Field::ReturnToGo, FieldMut::I64(&mut i64s[..3])),
                "return to go: expected f32, got i64",
            ),
            (
                error(&mixed, Field::ReturnToGo, FieldMut::F32(&mut f32s)),
                "room for 3 numbers, [1, 3, 1], got 6",
            ),
        ] {
            assert!(text.contains(expected), "{text}");
        }
    }
}
