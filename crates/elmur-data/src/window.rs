//! The numbers of a batch: fields of all steps of some crops, padded beyond the ends of episodes.

use std::ops::Range;

use elmur_base::{Discount, Field, FieldMut, Leaf, StepWeights};

use crate::Crop;
use crate::episode::{Column, pixel};
use crate::error::{Error, Result};
use crate::layout::ElementType;
use crate::layout::{ColumnType, Outline, Part};
use crate::source::{Source, chunks};

/// Steps `offset..offset + length` of every crop of a batch: [rows, length] steps.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    /// The episodes that the crops are taken from.
    pub source: &'a dyn Source,
    /// One crop per row of the batch.
    pub crops: &'a [Crop],
    /// First step, counted from each crop's start.
    pub offset: usize,
    /// Steps per row.
    pub length: usize,
}

/// One row of a window: which steps of which episode there are to fill it.
#[derive(Clone, Copy)]
struct Row {
    episode: usize,
    outline: Outline,
    /// First step; may lie beyond the episode's end.
    first: usize,
    length: usize,
}

impl Row {
    /// How many rows of a column there are from the first step on, at most the window's length.
    fn there(&self, part: Part) -> usize {
        self.outline.rows(part).saturating_sub(self.first).min(self.length)
    }
}

impl Window<'_> {
    /// Writes a field of all steps, [rows, length, numbers], padded as [`Field`] says.
    ///
    /// | field | type of `out` |
    /// |---|---|
    /// | [`Field::Observation`] | f32 for any leaf (byte b is b / 255), i32 for discrete leaves, u8 for bytes |
    /// | [`Field::Action`] | i32 for the discrete components of the action, f32 for the continuous ones |
    /// | [`Field::Target`] | i64 for the discrete components of the action, f32 for the continuous ones |
    /// | [`Field::Imitate`], [`Field::Exists`] | bool |
    /// | [`Field::NextObservation`] | as [`Field::Observation`] |
    /// | [`Field::ReturnToGo`], [`Field::Reward`], [`Field::CountedReward`], [`Field::LaterRewards`], [`Field::Weight`] | f32 |
    /// | [`Field::KnownNext`], [`Field::Terminated`] | bool |
    ///
    /// Another type, room for more or fewer numbers, and a leaf or episode that does not exist are errors.
    pub fn fill(&self, field: Field, out: FieldMut<'_>) -> Result<()> {
        let widths = self.source.spaces().action.widths();
        let (discrete, continuous) = (widths.ints, widths.floats + widths.bytes);
        match (field, out) {
            (Field::Observation(leaf), out) => self.observations(field, leaf, 0, out),
            (Field::NextObservation(leaf), out) => self.observations(field, leaf, 1, out),
            (Field::Action, FieldMut::I32(out)) if discrete > 0 => {
                self.check_room(field, discrete, out.len())?;
                let choices = self.choices();
                out.chunks_exact_mut(discrete).for_each(|step| step.copy_from_slice(&choices));
                self.choices_taken(discrete, out, Part::Action, |choice| choice)
            }
            (Field::Target, FieldMut::I64(out)) if discrete > 0 => {
                self.check_room(field, discrete, out.len())?;
                out.fill(Field::IGNORED);
                self.choices_taken(discrete, out, Part::Label, i64::from)?;
                let mut marks = vec![true; self.length];
                self.each(discrete, out, |row, out| {
                    self.marks(row, &mut marks[..row.length])?;
                    let steps = out.chunks_exact_mut(discrete).zip(&marks).filter(|(_, mark)| !**mark);
                    steps.for_each(|(step, _)| step.fill(Field::IGNORED));
                    Ok(())
                })
            }
            (Field::Action | Field::Target, FieldMut::F32(out)) if continuous > 0 => {
                self.check_room(field, continuous, out.len())?;
                out.fill(0.0);
                let part = if field == Field::Target { Part::Label } else { Part::Action };
                self.numbers_taken(continuous, out, part)
            }
            (Field::Accepted, FieldMut::Bool(out)) if self.source.layout().choices > 0 => {
                self.accepted(field, out)
            }
            (Field::Imitate, FieldMut::Bool(out)) => {
                self.check_room(field, 1, out.len())?;
                self.each(1, out, |row, out| self.marks(row, out))
            }
            (Field::Exists, FieldMut::Bool(out)) => {
                self.check_room(field, 1, out.len())?;
                self.each(1, out, |row, out| {
                    let there = row.there(Part::Reward);
                    out.iter_mut().enumerate().for_each(|(i, out)| *out = i < there);
                    Ok(())
                })
            }
            (Field::ReturnToGo, FieldMut::F32(out)) => {
                self.check_room(field, 1, out.len())?;
                let (mut rewards, all) = (Vec::new(), Discount::new(1.0));
                self.each(1, out, |row, out| {
                    self.sums_to_end(row, all, &mut rewards, out, |reward, later| reward + later)
                })
            }
            (Field::LaterRewards(discount), FieldMut::F32(out)) => {
                self.check_room(field, 1, out.len())?;
                let mut rewards = Vec::new();
                self.each(1, out, |row, out| {
                    self.sums_to_end(row, discount, &mut rewards, out, |_, later| later)
                })
            }
            (Field::Reward, FieldMut::F32(out)) => {
                self.check_room(field, 1, out.len())?;
                self.each(1, out, |row, out| self.rewards(row, None, out))
            }
            (Field::CountedReward(discount), FieldMut::F32(out)) => {
                self.check_room(field, 1, out.len())?;
                self.each(1, out, |row, out| self.rewards(row, discount.terminal_reward(), out))
            }
            (Field::KnownNext, FieldMut::Bool(out)) => {
                self.check_room(field, 1, out.len())?;
                self.each(1, out, |row, out| {
                    let Outline { steps, terminated, .. } = row.outline;
                    let recorded = row.outline.rows(Part::Observation(0)).saturating_sub(1);
                    let steps = if terminated { steps } else { steps.min(recorded) };
                    out.iter_mut().enumerate().for_each(|(i, out)| *out = row.first + i < steps);
                    Ok(())
                })
            }
            (Field::Terminated, FieldMut::Bool(out)) => {
                self.check_room(field, 1, out.len())?;
                self.each(1, out, |row, out| {
                    let end = |i: usize| row.outline.terminated && row.first + i + 1 == row.outline.steps;
                    out.iter_mut().enumerate().for_each(|(i, out)| *out = end(i));
                    Ok(())
                })
            }
            (Field::Weight(weights), FieldMut::F32(out)) => {
                self.check_room(field, 1, out.len())?;
                let (mut rewards, mut marks) = (Vec::new(), vec![true; self.length]);
                self.each(1, &mut *out, |row, out| {
                    self.marks(row, &mut marks[..row.length])?;
                    self.weights(row, weights, &mut rewards, out)?;
                    let left_out = out.iter_mut().zip(&marks).filter(|(_, mark)| !**mark);
                    left_out.for_each(|(weight, _)| *weight = 0.0);
                    Ok(())
                })?;
                if weights.changes() != 0.0 {
                    let changes = self.changes(discrete, continuous)?;
                    let factors = changes.iter().map(|change| 1.0 + weights.changes() * change);
                    out.iter_mut().zip(factors).for_each(|(weight, factor)| *weight *= factor);
                }
                Ok(())
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
                    Field::Accepted if self.source.layout().choices == 0 => {
                        "discrete actions of at most 65536 choices".to_owned()
                    }
                    Field::Imitate
                    | Field::Exists
                    | Field::KnownNext
                    | Field::Terminated
                    | Field::Accepted => "bool".to_owned(),
                    Field::Observation(_)
                    | Field::NextObservation(_)
                    | Field::ReturnToGo
                    | Field::Reward
                    | Field::CountedReward(_)
                    | Field::LaterRewards(_)
                    | Field::Weight(_) => "f32".to_owned(),
                };
                Err(Error::field(field, expected, out.type_name()))
            }
        }
    }

    fn check_room(&self, field: Field, width: usize, got: usize) -> Result<()> {
        let (rows, length) = (self.crops.len(), self.length);
        let expected = rows * length * width;
        if got == expected {
            return Ok(());
        }
        Err(Error::field(field, format!("room for {expected} numbers, [{rows}, {length}, {width}]"), got))
    }

    /// Calls `f` for each row of the window with its part of `out`, [length, width].
    fn each<T: Clone>(
        &self,
        width: usize,
        out: &mut [T],
        mut f: impl FnMut(&Row, &mut [T]) -> Result<()>,
    ) -> Result<()> {
        let each = self.length * width;
        for (i, crop) in self.crops.iter().enumerate() {
            let (episode, have) = (crop.episode, self.source.episodes());
            if episode >= have {
                let (expected, got) = (format!("an episode below {have}"), episode.to_string());
                return Err(Error::Part { part: Part::Reward, expected, got });
            }
            // Steps before the episode's first show the first; the others are read behind them.
            let front = crop.repeated.saturating_sub(self.offset).min(self.length.saturating_sub(1));
            let (outline, length) = (self.source.outline(episode), self.length - front);
            let first = crop.start.saturating_add(self.offset.saturating_sub(crop.repeated));
            let out = &mut out[i * each..(i + 1) * each];
            f(&Row { episode, outline, first, length }, &mut out[front * width..])?;
            for step in 0..front {
                let (repeated, from) = out.split_at_mut(front * width);
                repeated[step * width..(step + 1) * width].clone_from_slice(&from[..width]);
            }
        }
        Ok(())
    }

    /// The observations `later` steps after those of the window.
    fn observations(&self, field: Field, leaf: usize, later: usize, out: FieldMut<'_>) -> Result<()> {
        let columns = &self.source.layout().observations;
        let Some(ColumnType { element, width, .. }) = columns.get(leaf).copied() else {
            return Err(Error::field(field, format!("a leaf below {}", columns.len()), leaf));
        };
        self.check_room(field, width, out.len())?;
        match (out, element) {
            (FieldMut::F32(out), ElementType::F32) => {
                self.observed((leaf, later), width, out, |out| FieldMut::F32(out), |x| x)
            }
            (FieldMut::F32(out), ElementType::U8) => {
                self.observed((leaf, later), width, out, |x: &mut [u8]| FieldMut::U8(x), pixel)
            }
            (FieldMut::F32(out), ElementType::I32) => {
                self.observed((leaf, later), width, out, |x: &mut [i32]| FieldMut::I32(x), |x| x as f32)
            }
            (FieldMut::I32(out), ElementType::I32) => {
                self.observed((leaf, later), width, out, |out| FieldMut::I32(out), |x| x)
            }
            (FieldMut::U8(out), ElementType::U8) => {
                self.observed((leaf, later), width, out, |out| FieldMut::U8(out), |x| x)
            }
            (out, recorded) => {
                let expected = match recorded {
                    ElementType::F32 => "f32",
                    ElementType::I32 => "i32 or f32",
                    ElementType::U8 => "u8 or f32",
                };
                Err(Error::field(field, expected, out.type_name()))
            }
        }
    }

    /// Reads the observations of every row in the type that they are recorded in, `R`, and writes them
    /// converted; beyond the end the last one is repeated.
    fn observed<R: Copy + Default + 'static, T: Copy + 'static>(
        &self,
        (leaf, later): (usize, usize),
        width: usize,
        out: &mut [T],
        field_of: impl Fn(&mut [R]) -> FieldMut<'_>,
        convert: impl Fn(R) -> T,
    ) -> Result<()> {
        let part = Part::Observation(leaf);
        let mut recorded = vec![R::default(); self.length.max(1) * width];
        self.each(width, out, |row, out| {
            let row = &Row { first: row.first.saturating_add(later), ..*row };
            let there = row.there(part);
            // Beyond the end only the last observation is read.
            let last = row.outline.rows(part) - 1;
            let rows = if there > 0 { row.first..row.first + there } else { last..last + 1 };
            let read = rows.len();
            let recorded = &mut recorded[..read * width];
            self.source.read(part, row.episode, rows, field_of(recorded))?;
            out.iter_mut().zip(&*recorded).for_each(|(out, x)| *out = convert(*x));
            if read < row.length && width > 0 {
                let (filled, rest) = out.split_at_mut(read * width);
                let last = &filled[(read - 1) * width..];
                rest.chunks_exact_mut(width).for_each(|step| step.copy_from_slice(last));
            }
            Ok(())
        })
    }

    /// Writes the discrete components of the actions that there are, taken or (`Part::Label`) to imitate.
    fn choices_taken<T: Clone>(
        &self,
        width: usize,
        out: &mut [T],
        part: fn(usize) -> Part,
        convert: impl Fn(i32) -> T,
    ) -> Result<()> {
        self.taken(width, out, part, |column, i| match column {
            Column::I32(x) => Some(convert(x[i])),
            _ => None,
        })
    }

    /// Writes the continuous components of the actions that there are, taken or (`Part::Label`) to imitate.
    fn numbers_taken(&self, width: usize, out: &mut [f32], part: fn(usize) -> Part) -> Result<()> {
        self.taken(width, out, part, |column, i| match column {
            Column::F32(x) => Some(x[i]),
            Column::U8(x) => Some(pixel(x[i])),
            Column::I32(_) => None,
        })
    }

    /// Writes the components of actions that `component(column, index)` finds, as many as `width` per step.
    fn taken<T: Clone>(
        &self,
        width: usize,
        out: &mut [T],
        part: fn(usize) -> Part,
        component: impl Fn(&Column, usize) -> Option<T>,
    ) -> Result<()> {
        let columns = &self.source.layout().actions;
        let room = |c: &ColumnType| Column::zeros(c.element, self.length * c.width);
        let mut recorded: Vec<Column> = columns.iter().map(room).collect();
        self.each(width, out, |row, out| {
            let mut place = 0;
            for (leaf, (column, recorded)) in columns.iter().zip(&mut recorded).enumerate() {
                let each = column.width;
                // Without labels the actions that were taken are imitated.
                let part = if row.outline.labelled { part(leaf) } else { Part::Action(leaf) };
                let there = row.there(part);
                if there == 0 || each == 0 || component(recorded, 0).is_none() {
                    continue;
                }
                let rows = row.first..row.first + there;
                self.source.read(part, row.episode, rows, recorded.first(there * each))?;
                for step in 0..there {
                    for i in 0..each {
                        if let Some(x) = component(recorded, step * each + i) {
                            out[step * width + place + i] = x;
                        }
                    }
                }
                place += each;
            }
            Ok(())
        })
    }

    /// Marks the choices that are as good as the targets, [rows, length, choices].
    fn accepted(&self, field: Field, out: &mut [bool]) -> Result<()> {
        let count = self.source.layout().choices;
        self.check_room(field, count, out.len())?;
        let sizes = self.choices();
        let mut targets = vec![0i64; self.crops.len() * self.length * sizes.len()];
        self.fill(Field::Target, FieldMut::I64(&mut targets))?;
        out.fill(false);
        self.each(count, out, |row, out| {
            let there = row.there(Part::Accepted);
            if there == 0 {
                return Ok(());
            }
            let rows = row.first..row.first + there;
            self.source.read(Part::Accepted, row.episode, rows, FieldMut::Bool(&mut out[..there * count]))
        })?;
        for (accepted, target) in out.chunks_exact_mut(count).zip(targets.chunks_exact(sizes.len())) {
            if target.contains(&Field::IGNORED) {
                accepted.fill(false);
                continue;
            }
            let joint = target.iter().zip(&sizes).fold(0, |all, (i, n)| all * *n as usize + *i as usize);
            accepted[joint] = true;
        }
        Ok(())
    }

    /// Number of choices of each discrete component of an action.
    fn choices(&self) -> Vec<i32> {
        let leaves = self.source.spaces().action.leaves();
        let sizes = leaves.iter().flat_map(|leaf| if let Leaf::Ints(sizes) = leaf { sizes } else { &[][..] });
        sizes.map(|n| *n as i32).collect()
    }

    /// Whether each step of a row exists and is to be imitated.
    fn marks(&self, row: &Row, out: &mut [bool]) -> Result<()> {
        let there = row.there(Part::Reward);
        let (marks, beyond) = out.split_at_mut(there);
        beyond.fill(false);
        if !row.outline.marked {
            marks.fill(true);
        } else if there > 0 {
            let rows = row.first..row.first + there;
            self.source.read(Part::Imitate, row.episode, rows, FieldMut::Bool(marks))?;
        }
        Ok(())
    }

    /// The rewards of the steps that there are, and 0 beyond them; `terminal` replaces that of a step that
    /// ended the task.
    fn rewards(&self, row: &Row, terminal: Option<f64>, out: &mut [f32]) -> Result<()> {
        let there = row.there(Part::Reward);
        let (paid, beyond) = out.split_at_mut(there);
        beyond.fill(0.0);
        if there == 0 {
            return Ok(());
        }
        self.read_rewards(row, terminal, row.first..row.first + there, paid)
    }

    /// The rewards of these steps of a row's episode.
    fn read_rewards(
        &self,
        row: &Row,
        terminal: Option<f64>,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let ends = row.outline.terminated && rows.end == row.outline.steps;
        self.source.read(Part::Reward, row.episode, rows, FieldMut::F32(out))?;
        if let (true, Some(terminal), Some(last)) = (ends, terminal, out.last_mut()) {
            *last = terminal as f32;
        }
        Ok(())
    }

    /// Weights of the steps of a row: 1 up to the episode's first success, another number after it.
    fn weights(
        &self,
        row: &Row,
        weights: StepWeights,
        rewards: &mut Vec<f32>,
        out: &mut [f32],
    ) -> Result<()> {
        let mut end = None;
        let seen = row.first.saturating_add(row.length).min(row.outline.steps);
        for rows in chunks(seen, 1) {
            rewards.resize(rows.len(), 0.0);
            self.read_rewards(row, None, rows.clone(), rewards)?;
            if let Some(i) = rewards.iter().position(|reward| *reward >= weights.success()) {
                end = Some(rows.start + i);
                break;
            }
        }
        for (i, weight) in out.iter_mut().enumerate() {
            let after = end.is_some_and(|end| row.first + i > end);
            *weight = if after { weights.after() } else { 1.0 };
        }
        Ok(())
    }

    /// How much the action of each step differs from the one before, [rows, length]: the root of the mean square over
    /// its components, of which choices differ by 0 or 1; 0 for an episode's first step.
    fn changes(&self, discrete: usize, continuous: usize) -> Result<Vec<f32>> {
        // From one step earlier on; an episode's first step is shown twice.
        let earlier = |crop: &Crop| {
            let repeated = crop.repeated.saturating_sub(self.offset);
            let first = crop.start.saturating_add(self.offset.saturating_sub(crop.repeated));
            match (repeated, first) {
                (0, 1..) => Crop::new(crop.episode, first - 1),
                _ => Crop { episode: crop.episode, start: first, repeated: repeated + 1 },
            }
        };
        let crops: Vec<Crop> = self.crops.iter().map(earlier).collect();
        let longer = Window { source: self.source, crops: &crops, offset: 0, length: self.length + 1 };
        let (steps, width) = (crops.len() * longer.length, discrete + continuous);
        let (mut numbers, mut choices) = (vec![0f32; steps * continuous], vec![0i32; steps * discrete]);
        if continuous > 0 {
            longer.fill(Field::Target, FieldMut::F32(&mut numbers))?;
        }
        if discrete > 0 {
            longer.fill(Field::Action, FieldMut::I32(&mut choices))?;
        }
        let mut changes = vec![0f32; self.crops.len() * self.length];
        for (step, change) in changes.iter_mut().enumerate() {
            let at = step / self.length * longer.length + step % self.length;
            let pair = |width: usize| (at * width..(at + 1) * width, (at + 1) * width..(at + 2) * width);
            let (before, now) = pair(continuous);
            let squares = numbers[before].iter().zip(&numbers[now]).map(|(a, b)| (a - b) * (a - b));
            let (before, now) = pair(discrete);
            let differ = choices[before].iter().zip(&choices[now]).filter(|(a, b)| a != b).count();
            *change = ((squares.sum::<f32>() + differ as f32) / width.max(1) as f32).sqrt();
        }
        Ok(changes)
    }

    /// Sums of rewards to the end of the episode: `shown(reward, later)` of each step's reward and the
    /// discounted sum of those after it.
    fn sums_to_end(
        &self,
        row: &Row,
        discount: Discount,
        rewards: &mut Vec<f32>,
        out: &mut [f32],
        shown: impl Fn(f64, f64) -> f64,
    ) -> Result<()> {
        let (gamma, terminal) = (discount.gamma(), discount.terminal_reward());
        let (steps, end) = (row.outline.steps, row.first.saturating_add(row.length));
        let (mut later, mut factor) = (0.0, 1.0);
        for rows in chunks(steps.saturating_sub(end), 1) {
            rewards.resize(rows.len(), 0.0);
            self.read_rewards(row, terminal, end + rows.start..end + rows.end, rewards)?;
            for reward in &*rewards {
                later += factor * f64::from(*reward);
                factor *= gamma;
            }
        }
        self.rewards(row, terminal, out)?;
        for sum in out[..row.there(Part::Reward)].iter_mut().rev() {
            let reward = f64::from(*sum);
            *sum = shown(reward, later) as f32;
            later = reward + gamma * later;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use elmur_base::{Space, Spaces};

    use super::*;
    use crate::{Column, Dataset, Episode};

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
            labels: None,
            accepted: None,
        };
        let episodes = steps.iter().enumerate().map(episode).collect();
        Dataset::from_episodes(spaces, BTreeMap::new(), episodes).unwrap()
    }

    #[test]
    fn labels_are_targets_and_actions_stay_what_was_taken() {
        let mut episode = dataset(&[3]).episode(0).to_episode();
        episode.labels = Some(vec![Column::I32(vec![2, 0, 0])]);
        let spaces = dataset(&[3]).spaces().clone();
        let data = Dataset::from_episodes(spaces.clone(), BTreeMap::new(), vec![episode.clone()]).unwrap();
        assert_ne!(data.checksum(0), dataset(&[3]).checksum(0));
        let window = Window { source: &data, crops: &[Crop::new(0, 0)], offset: 0, length: 4 };
        let (mut actions, mut targets) = ([9; 4], [9; 4]);
        window.fill(Field::Action, FieldMut::I32(&mut actions)).unwrap();
        window.fill(Field::Target, FieldMut::I64(&mut targets)).unwrap();
        assert_eq!(actions, [0, 1, 2, 3]);
        assert_eq!(targets, [2, Field::IGNORED, 0, Field::IGNORED]);
        // A label is an action of the space, one for every step.
        for labels in [vec![2, 0], vec![2, 0, 3]] {
            let wrong = Episode { labels: Some(vec![Column::I32(labels)]), ..episode.clone() };
            let error = Dataset::from_episodes(spaces.clone(), BTreeMap::new(), vec![wrong]).unwrap_err();
            assert!(error.to_string().contains("label leaf 0"), "{error}");
        }
    }

    #[test]
    fn accepted_choices_are_the_target_and_those_recorded_beside_it() {
        let spaces =
            Spaces { observation: Space::unbounded([1]), action: Space::MultiDiscrete { sizes: vec![2, 3] } };
        let mut episode = Episode {
            observations: vec![Column::F32(vec![0.0; 3])],
            actions: vec![Column::I32(vec![0, 1, 1, 0, 1, 2])],
            rewards: vec![0.0; 3],
            terminated: true,
            truncated: false,
            imitate: Some(vec![true, false, true]),
            labels: None,
            accepted: None,
        };
        let shown_from = |episode: &Episode, start: usize| {
            let data =
                Dataset::from_episodes(spaces.clone(), BTreeMap::new(), vec![episode.clone()]).unwrap();
            let window = Window { source: &data, crops: &[Crop::new(0, start)], offset: 0, length: 4 };
            let mut accepted = [true; 4 * 6];
            window.fill(Field::Accepted, FieldMut::Bool(&mut accepted)).unwrap();
            let marked = |t: usize| (0..6).filter(|i| accepted[6 * t + i]).collect::<Vec<_>>();
            (0..4).map(marked).collect::<Vec<_>>()
        };
        let shown = |episode: &Episode| shown_from(episode, 0);
        // Alone: joint choice 3 i + j; nothing where a step is not imitated or not there.
        assert_eq!(shown(&episode), [vec![1], vec![], vec![5], vec![]]);
        assert_eq!(shown_from(&episode, 2), [vec![5], vec![], vec![], vec![]]);
        let mut ties = vec![false; 3 * 6];
        [0, 6, 7, 12, 13].iter().for_each(|i| ties[*i] = true);
        episode.accepted = Some(ties);
        assert_eq!(shown(&episode), [vec![0, 1], vec![], vec![0, 1, 5], vec![]]);
        assert_eq!(shown_from(&episode, 2), [vec![0, 1, 5], vec![], vec![], vec![]]);
        episode.accepted = Some(vec![true; 5]);
        let error = Dataset::from_episodes(spaces.clone(), BTreeMap::new(), vec![episode]).unwrap_err();
        assert!(error.to_string().contains("3 rows of 6 choices"), "{error}");
    }

    #[test]
    fn windows_pad_with_the_last_observation_and_missing_actions() {
        let data = dataset(&[4, 9]);
        let crops = [Crop::new(0, 0), Crop::new(1, 2)];
        let window = Window { source: &data, crops: &crops, offset: 2, length: 4 };
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
        let mut exists = [false; 8];
        window.fill(Field::Exists, FieldMut::Bool(&mut exists)).unwrap();
        assert_eq!(exists, [true, true, false, false, true, true, true, true]);
    }

    #[test]
    fn a_terminal_reward_replaces_that_of_the_step_that_ended_the_task() {
        let data = dataset(&[4, 9]);
        let crops = [Crop::new(0, 0), Crop::new(1, 2)];
        let window = Window { source: &data, crops: &crops, offset: 2, length: 4 };
        let floats = |field| {
            let mut out = [9.0; 8];
            window.fill(field, FieldMut::F32(&mut out)).unwrap();
            out
        };
        let paid = Discount::new(0.5);
        let replaced = paid.with_terminal_reward(Some(-8.0));
        assert_eq!(floats(Field::CountedReward(paid)), [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
        assert_eq!(floats(Field::CountedReward(replaced)), [1.0, -8.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
        // The second row ends one step after the window: 1 1 1 1 (1, or -8).
        assert_eq!(floats(Field::LaterRewards(paid)), [1.0, 0.0, 0.0, 0.0, 1.875, 1.75, 1.5, 1.0]);
        let later = floats(Field::LaterRewards(replaced));
        assert_eq!(later, [-8.0, 0.0, 0.0, 0.0, 0.75, -0.5, -3.0, -8.0]);
    }

    #[test]
    fn steps_after_the_first_success_have_a_weight_of_their_own() {
        let mut episode = dataset(&[6]).episode(0).to_episode();
        episode.rewards = vec![0.0, 0.5, 1.0, 0.0, 1.0, 0.0];
        episode.imitate = Some(vec![true, false, true, true, false, true]);
        let spaces = dataset(&[6]).spaces().clone();
        let data = Dataset::from_episodes(spaces, BTreeMap::new(), vec![episode]).unwrap();
        let weights = |start: usize, offset: usize, success: f32| {
            let window = Window { source: &data, crops: &[Crop::new(0, start)], offset, length: 4 };
            let mut out = [9.0; 4];
            let field = Field::Weight(StepWeights::new(success, 0.25));
            window.fill(field, FieldMut::F32(&mut out)).unwrap();
            out
        };
        // The step that succeeds counts in full, whatever window it is seen in.
        assert_eq!(weights(0, 0, 1.0), [1.0, 0.0, 1.0, 0.25]);
        assert_eq!(weights(2, 0, 1.0), [1.0, 0.25, 0.0, 0.25]);
        assert_eq!(weights(0, 3, 1.0), [0.25, 0.0, 0.25, 0.0]);
        assert_eq!(weights(0, 0, 0.5), [1.0, 0.0, 0.25, 0.25]);
        assert_eq!(weights(2, 0, 2.0), [1.0, 1.0, 0.0, 1.0]);
    }

    #[test]
    fn actions_that_change_weigh_more() {
        let weights = |data: &Dataset, start: usize, offset: usize| {
            let window = Window { source: data, crops: &[Crop::new(0, start)], offset, length: 2 };
            let mut out = [9.0; 2];
            let field = Field::Weight(StepWeights::new(9.0, 1.0).with_changes(2.0));
            window.fill(field, FieldMut::F32(&mut out)).unwrap();
            out
        };
        // From (3, 0.5, -0.5, 6) to (1, 1.5, 2.5, 2), which is not imitated.
        let data = mixed();
        assert_eq!(weights(&data, 0, 0), [1.0, 0.0]);
        let mut episode = data.episode(0).to_episode();
        episode.imitate = None;
        let data = Dataset::from_episodes(data.spaces().clone(), BTreeMap::new(), vec![episode]).unwrap();
        let changed = 1.0 + 2.0 * ((1.0 + 9.0 + 2.0) / 4.0f32).sqrt();
        assert_eq!(weights(&data, 0, 0), [1.0, changed]);
        // Whatever window a step is seen in; nothing beyond the end.
        assert_eq!(weights(&data, 1, 0), [changed, 0.0]);
        assert_eq!(weights(&data, 0, 1), [changed, 0.0]);
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
            labels: None,
            accepted: None,
        };
        let spaces = Spaces { observation, action: Space::Tuple { parts } };
        Dataset::from_episodes(spaces, BTreeMap::new(), vec![episode]).unwrap()
    }

    const CROP: [Crop; 1] = [Crop::new(0, 0)];

    #[test]
    fn every_kind_of_leaf_and_component_has_its_types() {
        let data = mixed();
        let window = Window { source: &data, crops: &CROP, offset: 0, length: 3 };
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
        let error = |source: &Dataset, field, out: FieldMut<'_>| {
            let window = Window { source, crops: &CROP, offset: 0, length: 3 };
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
