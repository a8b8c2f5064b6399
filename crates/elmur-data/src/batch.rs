//! Crops and batches: which part of which episode a training batch is made of, and the numbers in it.

use elmur_rng::{Rng, Stream};

use crate::episode::ColumnRef;
use crate::{Dataset, EpisodeRef};

/// A stretch of an episode. Where it reaches beyond the end, it is padded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crop {
    /// Which episode.
    pub episode: usize,
    /// Its first step.
    pub start: usize,
}

/// An endless sequence of crops, epoch after epoch, each in a new order that is a function of (seed, epoch) alone: the position
/// is all there is to save.
///
/// An epoch takes `ceil(steps / length)` crops from each episode, at random places where there is room to choose.
#[derive(Debug, Clone)]
pub struct Sampler {
    seed: u64,
    length: usize,
    /// Steps of the episode that each crop of an epoch comes from, and the episode.
    items: Vec<(usize, usize)>,
    order: Vec<u32>,
    /// The epoch that `order` belongs to.
    ordered: Option<u64>,
    position: u64,
}

/// Streams of the shuffle and of the places of crops.
const ORDER: u32 = 0;
const PLACES: u32 = 1;

impl Sampler {
    /// Crops of `length` steps from the dataset, from the first epoch on.
    pub fn new(dataset: &Dataset, length: usize, seed: u64) -> Self {
        let crops = |i: usize| {
            let steps = dataset.episode(i).steps();
            std::iter::repeat_n((i, steps), steps.div_ceil(length.max(1)))
        };
        let items: Vec<_> = (0..dataset.len()).flat_map(crops).collect();
        let order = (0..items.len() as u32).collect();
        Self { seed, length, items, order, ordered: None, position: 0 }
    }

    /// Crops of one epoch.
    pub fn epoch_len(&self) -> usize {
        self.items.len()
    }

    /// Crops taken so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Goes to the place where [`Sampler::position`] was `position`.
    pub fn seek(&mut self, position: u64) {
        self.position = position;
    }

    /// The next `rows` crops.
    pub fn next_crops(&mut self, rows: usize) -> Vec<Crop> {
        (0..rows).map(|_| self.next_crop()).collect()
    }

    fn next_crop(&mut self) -> Crop {
        let count = self.items.len() as u64;
        let (epoch, index) = (self.position / count, (self.position % count) as usize);
        if self.ordered != Some(epoch) {
            (0..).zip(&mut self.order).for_each(|(i, slot)| *slot = i);
            let seed = Stream::new(self.seed, epoch, ORDER).block(0);
            Rng::new(u64::from(seed[0]) << 32 | u64::from(seed[1]), ORDER).shuffle(&mut self.order);
            self.ordered = Some(epoch);
        }
        self.position += 1;
        let item = self.order[index];
        let (episode, steps) = self.items[item as usize];
        let room = steps.saturating_sub(self.length) as u64 + 1;
        let draw = Stream::new(self.seed, epoch, PLACES).draw(u64::from(item));
        Crop { episode, start: ((u64::from(draw) * room) >> 32) as usize }
    }
}

/// Steps `offset..offset + length` of every crop of a batch: the numbers of [rows, length] steps.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    /// Where the crops come from.
    pub dataset: &'a Dataset,
    /// The batch's rows.
    pub crops: &'a [Crop],
    /// First step, counted from each crop's start.
    pub offset: usize,
    /// Steps.
    pub length: usize,
}

impl Window<'_> {
    /// Calls `f(place, episode, step)` for each of the [rows, length] places; `step` may lie beyond the episode's end.
    fn each(&self, mut f: impl FnMut(usize, &EpisodeRef<'_>, usize)) {
        for (row, crop) in self.crops.iter().enumerate() {
            let episode = self.dataset.episode(crop.episode);
            for i in 0..self.length {
                f(row * self.length + i, &episode, crop.start + self.offset + i);
            }
        }
    }

    /// Part `leaf` of the observations as floats, [rows, length, numbers]; pixels become numbers in 0..=1. Beyond the end the last
    /// observation is repeated.
    pub fn observation_floats(&self, leaf: usize, out: &mut [f32]) {
        let width = out.len() / (self.crops.len() * self.length).max(1);
        self.each(|place, episode, step| {
            let column = episode.observations[leaf];
            let last = column.len() / width - 1;
            let from = step.min(last) * width..(step.min(last) + 1) * width;
            let target = &mut out[place * width..(place + 1) * width];
            match column {
                ColumnRef::F32(data) => target.copy_from_slice(&data[from]),
                ColumnRef::U8(data) => {
                    target.iter_mut().zip(&data[from]).for_each(|(x, pixel)| *x = f32::from(*pixel) / 255.0);
                }
                ColumnRef::I32(data) => target.iter_mut().zip(&data[from]).for_each(|(x, i)| *x = *i as f32),
            }
        });
    }

    /// Part `leaf` of the observations as integers, [rows, length, numbers]; others than integers leave `out` alone.
    pub fn observation_ints(&self, leaf: usize, out: &mut [i32]) {
        let width = out.len() / (self.crops.len() * self.length).max(1);
        self.each(|place, episode, step| {
            let ColumnRef::I32(data) = episode.observations[leaf] else { return };
            let step = step.min(data.len() / width - 1);
            out[place * width..(place + 1) * width].copy_from_slice(&data[step * width..(step + 1) * width]);
        });
    }

    /// Discrete actions, [rows, length, components]; `missing` beyond the end and, if `counted`, for steps not to be
    /// imitated.
    pub fn action_ints(&self, counted: bool, out: &mut [i64], missing: impl Fn(usize) -> i64) {
        let width = out.len() / (self.crops.len() * self.length).max(1);
        self.each(|place, episode, step| {
            let target = &mut out[place * width..(place + 1) * width];
            let known = step < episode.steps() && (!counted || counts(episode, step));
            let mut column = 0;
            for leaf in &episode.actions {
                let ColumnRef::I32(data) = leaf else { continue };
                let each = data.len() / episode.steps();
                for i in 0..each.min(width - column) {
                    target[column] = if known { i64::from(data[step * each + i]) } else { missing(column) };
                    column += 1;
                }
            }
        });
    }

    /// Continuous actions, [rows, length, numbers]; zeros beyond the end.
    pub fn action_floats(&self, out: &mut [f32]) {
        let width = out.len() / (self.crops.len() * self.length).max(1);
        self.each(|place, episode, step| {
            let target = &mut out[place * width..(place + 1) * width];
            match episode.actions.first() {
                Some(ColumnRef::F32(data)) if step < episode.steps() => {
                    target.copy_from_slice(&data[step * width..(step + 1) * width]);
                }
                _ => target.fill(0.0),
            }
        });
    }

    /// Steps that exist and are to be imitated, [rows, length].
    pub fn counted(&self, out: &mut [bool]) {
        self.each(|place, episode, step| out[place] = step < episode.steps() && counts(episode, step));
    }

    /// Sum of rewards from each step to the episode's end, [rows, length]; 0 beyond the end.
    pub fn returns_to_go(&self, out: &mut [f32]) {
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

/// Whether a step's action is worth imitating.
fn counts(episode: &EpisodeRef<'_>, step: usize) -> bool {
    episode.counts.is_none_or(|counts| counts[step])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use elmur_base::{Space, Spaces};

    use super::*;
    use crate::{Column, Episode};

    /// Episode i has `steps[i]` steps; observation 100 i + t (and a final one), action t % 3, reward 1, odd steps not counted.
    fn dataset(steps: &[usize]) -> Dataset {
        let spaces = Spaces { observation: Space::unbounded([1]), action: Space::Discrete { n: 3 } };
        let episode = |(i, steps): (usize, &usize)| Episode {
            observations: vec![Column::F32((0..=*steps).map(|t| (100 * i + t) as f32).collect())],
            actions: vec![Column::I32((0..*steps).map(|t| t as i32 % 3).collect())],
            rewards: vec![1.0; *steps],
            terminated: true,
            truncated: false,
            counts: Some((0..*steps).map(|t| t % 2 == 0).collect()),
        };
        let episodes = steps.iter().enumerate().map(episode).collect();
        Dataset::from_episodes(spaces, BTreeMap::new(), episodes).unwrap()
    }

    #[test]
    fn an_epoch_takes_every_crop_once_in_an_order_of_its_own() {
        let data = dataset(&[5, 12, 3, 10, 1]);
        let mut sampler = Sampler::new(&data, 5, 7);
        assert_eq!(sampler.epoch_len(), 1 + 3 + 1 + 2 + 1);
        let mut epochs = Vec::new();
        for _ in 0..3 {
            let crops = sampler.next_crops(8);
            let mut episodes: Vec<usize> = crops.iter().map(|c| c.episode).collect();
            epochs.push(crops.clone());
            episodes.sort_unstable();
            assert_eq!(episodes, [0, 1, 1, 1, 2, 3, 3, 4]);
            for crop in crops {
                assert!(crop.start + 5 <= [5, 12, 5, 10, 5][crop.episode], "{crop:?}");
            }
        }
        assert_ne!(epochs[0], epochs[1]);
        // Position is everything: seek equals having walked there, in batches of any size.
        let mut again = Sampler::new(&data, 5, 7);
        again.seek(11);
        let all = epochs.concat();
        assert_eq!(again.next_crops(7), all[11..18]);
        assert_ne!(Sampler::new(&data, 5, 8).next_crops(8), epochs[0]);
    }

    #[test]
    fn windows_pad_with_the_last_observation_and_missing_actions() {
        let data = dataset(&[4, 9]);
        let crops = [Crop { episode: 0, start: 0 }, Crop { episode: 1, start: 2 }];
        let window = Window { dataset: &data, crops: &crops, offset: 2, length: 4 };
        let mut seen = [0.0; 8];
        window.observation_floats(0, &mut seen);
        assert_eq!(seen, [2.0, 3.0, 4.0, 4.0, 104.0, 105.0, 106.0, 107.0]);
        let mut actions = [0; 8];
        window.action_ints(false, &mut actions, |_| -10);
        assert_eq!(actions, [2, 0, -10, -10, 1, 2, 0, 1]);
        window.action_ints(true, &mut actions, |_| -10);
        assert_eq!(actions, [2, -10, -10, -10, 1, -10, 0, -10]);
        let mut counted = [false; 8];
        window.counted(&mut counted);
        assert_eq!(counted, [true, false, false, false, true, false, true, false]);
        let mut returns = [0.0; 8];
        window.returns_to_go(&mut returns);
        assert_eq!(returns, [2.0, 1.0, 0.0, 0.0, 5.0, 4.0, 3.0, 2.0]);
    }
}
