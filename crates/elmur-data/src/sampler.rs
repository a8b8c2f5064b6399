//! Crops: which part of which episode a row of a training batch is made of.

use elmur_rng::{Rng, Stream};

use crate::source::Source;

/// A stretch of an episode, of a length that all crops of a batch share. Steps beyond the episode's end are
/// padded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crop {
    /// Number of the episode in its dataset.
    pub episode: usize,
    /// First step of the episode that the crop shows.
    pub start: usize,
    /// How often that step is shown again before itself, where a crop begins before its episode.
    pub repeated: usize,
}

impl Crop {
    /// The crop of an episode from step `start` on.
    pub const fn new(episode: usize, start: usize) -> Self {
        Self { episode, start, repeated: 0 }
    }
}

/// An endless sequence of crops, epoch after epoch. The order within an epoch is a function of (seed, epoch)
/// alone, so that its position is all that needs to be saved to resume it.
///
/// An epoch takes `ceil(steps / length)` crops from each episode, at random starts where the episode is
/// longer than a crop. With a lead, crops begin that many steps before any step of the episode.
#[derive(Debug, Clone)]
pub struct Sampler {
    seed: u64,
    length: usize,
    lead: usize,
    anywhere: bool,
    /// Episode of each crop of an epoch, and the number of its steps.
    items: Vec<(usize, usize)>,
    order: Vec<u32>,
    /// The epoch that `order` belongs to.
    ordered: Option<u64>,
    position: u64,
}

/// Random streams of the order and of the starts of crops.
const ORDER: u32 = 0;
const PLACES: u32 = 1;

impl Sampler {
    /// Crops of `length` steps from a source of episodes, starting with the first epoch.
    pub fn new(source: &dyn Source, length: usize, seed: u64) -> Self {
        let crops = |i: usize| {
            let steps = source.steps(i);
            std::iter::repeat_n((i, steps), steps.div_ceil(length.max(1)))
        };
        let items: Vec<_> = (0..source.episodes()).flat_map(crops).collect();
        let order = (0..items.len() as u32).collect();
        Self { seed, length, lead: 0, anywhere: false, items, order, ordered: None, position: 0 }
    }

    /// The sampler of crops that begin `lead` steps before a random step of their episode, any of its steps if
    /// there is a lead; steps before the episode's first repeat it.
    pub fn with_lead(self, lead: usize) -> Self {
        Self { lead, ..self }
    }

    /// The sampler of crops that begin at any step of their episode if `anywhere`, also where they reach beyond
    /// its end.
    pub fn with_starts(self, anywhere: bool) -> Self {
        Self { anywhere, ..self }
    }

    /// Number of crops in one epoch.
    pub fn epoch_len(&self) -> usize {
        self.items.len()
    }

    /// Number of crops taken so far.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Continues from the point where [`Sampler::position`] was `position`.
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
        let anywhere = self.anywhere || self.lead > 0;
        let room = if anywhere { steps as u64 } else { steps.saturating_sub(self.length) as u64 + 1 };
        let draw = Stream::new(self.seed, epoch, PLACES).draw(u64::from(item));
        let step = ((u64::from(draw) * room) >> 32) as usize;
        Crop { episode, start: step.saturating_sub(self.lead), repeated: self.lead.saturating_sub(step) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::tests::dataset;

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
    fn crops_may_begin_at_any_step() {
        let data = dataset(&[6]);
        let mut sampler = Sampler::new(&data, 5, 7).with_starts(true);
        let mut seen = [0; 6];
        sampler.next_crops(200).iter().for_each(|crop| seen[crop.start] += 1);
        assert!(seen.iter().all(|count| *count > 10), "{seen:?}");
    }
}
