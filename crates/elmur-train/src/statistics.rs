//! Computes the parameters that a policy declares as statistics of its training data
//! ([`Statistic`]), before training begins.

use elmur_base::{Field, FieldMut};
use elmur_data::{Crop, Source, Window, chunks};
use elmur_engine::Store;
use elmur_model::Statistic;
use elmur_model::window::Built;

use crate::error::Result;
use crate::standardize::moment;

/// Most steps that bins are computed from; of more steps, evenly spread ones are taken.
const MOST_STEPS: usize = 1 << 24;

/// Most numbers that are sorted in memory at once: more are sorted one after the other.
const MOST_NUMBERS: usize = 1 << 25;

/// Fills the parameters that `built` declares as statistics from all steps of `source`.
pub(crate) fn fill(built: &Built, source: &dyn Source, params: &Store) -> Result<()> {
    for (name, statistic) in &built.statistics {
        let shape = params.ty(name)?.shape;
        let numbers = shape.first().copied().unwrap_or(1);
        let field = statistic.field();
        let data = match *statistic {
            Statistic::Least(_) => extremes(source, field, numbers, f32::min)?,
            Statistic::Greatest(_) => extremes(source, field, numbers, f32::max)?,
            Statistic::Mean(_) => {
                moments(source, field, numbers)?.iter().map(|(mean, _)| *mean as f32).collect()
            }
            Statistic::Deviation(_) => {
                moments(source, field, numbers)?.iter().map(|(_, deviation)| *deviation as f32).collect()
            }
            Statistic::Bins { bins, .. } => all_bins(source, field, numbers, bins)?,
        };
        params.set(name, &data)?;
    }
    Ok(())
}

/// Calls `f` with the numbers of a field of every step of all episodes, a few steps at a time.
fn each_step(source: &dyn Source, field: Field, numbers: usize, mut f: impl FnMut(&[f32])) -> Result<()> {
    let mut data = Vec::new();
    for episode in 0..source.episodes() {
        let crops = [Crop::new(episode, 0)];
        for steps in chunks(source.steps(episode), numbers) {
            data.resize(steps.len() * numbers, 0.0);
            let window = Window { source, crops: &crops, offset: steps.start, length: steps.len() };
            window.fill(field, FieldMut::F32(&mut data))?;
            data.chunks_exact(numbers).for_each(&mut f);
        }
    }
    Ok(())
}

/// The smallest or largest value of every number of a field.
fn extremes(
    source: &dyn Source,
    field: Field,
    numbers: usize,
    choose: fn(f32, f32) -> f32,
) -> Result<Vec<f32>> {
    let mut found: Option<Vec<f32>> = None;
    each_step(source, field, numbers, |step| match &mut found {
        None => found = Some(step.to_vec()),
        Some(found) => found.iter_mut().zip(step).for_each(|(found, x)| *found = choose(*found, *x)),
    })?;
    Ok(found.unwrap_or_else(|| vec![0.0; numbers]))
}

/// Mean and standard deviation of every number of a field.
fn moments(source: &dyn Source, field: Field, numbers: usize) -> Result<Vec<(f64, f64)>> {
    let (mut sums, mut count) = (vec![(0.0, 0.0); numbers], 0.0);
    each_step(source, field, numbers, |step| {
        count += 1.0;
        for ((sum, squares), x) in sums.iter_mut().zip(step) {
            *sum += f64::from(*x);
            *squares += f64::from(*x).powi(2);
        }
    })?;
    Ok(sums.into_iter().map(|sums| moment(sums, count)).collect())
}

/// Ends of bins for every number of a field, [numbers, bins + 1].
fn all_bins(source: &dyn Source, field: Field, numbers: usize, bins: usize) -> Result<Vec<f32>> {
    let steps: usize = (0..source.episodes()).map(|episode| source.steps(episode)).sum();
    let every = steps.div_ceil(MOST_STEPS).max(1);
    let at_once = (MOST_NUMBERS / steps.div_ceil(every).max(1)).clamp(1, numbers.max(1));
    let mut ends = Vec::with_capacity(numbers * (bins + 1));
    for first in (0..numbers).step_by(at_once) {
        let mut columns = vec![Vec::new(); at_once.min(numbers - first)];
        let mut number = 0usize;
        each_step(source, field, numbers, |step| {
            if number.is_multiple_of(every) {
                columns.iter_mut().zip(&step[first..]).for_each(|(column, x)| column.push(*x));
            }
            number += 1;
        })?;
        for mut column in columns {
            column.sort_unstable_by(f32::total_cmp);
            ends.extend(bin_ends(column, bins));
        }
    }
    Ok(ends)
}

/// Ends of `bins` bins of sorted values, as [`Statistic::Bins`] says; where there are fewer bins, the last
/// end is repeated.
fn bin_ends(sorted: Vec<f32>, bins: usize) -> Vec<f32> {
    let mut values = sorted.clone();
    values.dedup();
    let mut ends: Vec<f32> = match &values[..] {
        [] => vec![0.0],
        [one] => vec![*one],
        [first, .., last] if values.len() <= bins => {
            let between = values.windows(2).map(|pair| pair[0] + (pair[1] - pair[0]) / 2.0);
            let between: Vec<f32> = between.collect();
            let (low, high) = (between[0] - first, last - between[between.len() - 1]);
            [&[first - low], &between[..], &[last + high]].concat()
        }
        [.., last] => {
            let each = sorted.len().div_ceil(bins);
            sorted.iter().step_by(each).chain([last]).copied().collect()
        }
    };
    let last = ends[ends.len() - 1];
    ends.resize(bins + 1, last);
    ends
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use elmur_base::{Discount, Space, Spaces};
    use elmur_data::{Column, Dataset, Episode};

    use super::*;

    #[test]
    fn bins_end_at_quantiles_or_between_few_values() {
        // Ten values in four bins: every third, and the largest.
        let sorted: Vec<f32> = (0..10).map(|x| x as f32).collect();
        assert_eq!(bin_ends(sorted.clone(), 4), [0.0, 3.0, 6.0, 9.0, 9.0]);
        assert_eq!(bin_ends(sorted.clone(), 5), [0.0, 2.0, 4.0, 6.0, 8.0, 9.0]);
        // As many bins as values: each value is the middle of its own.
        let ends: Vec<f32> = (0..11).map(|x| x as f32 - 0.5).collect();
        assert_eq!(bin_ends(sorted, 10), ends);
        // A reward that is almost never paid keeps a bin of its own.
        let mut rare = vec![0.0; 1000];
        rare.push(1.0);
        assert_eq!(bin_ends(rare, 4), [-0.5, 0.5, 1.5, 1.5, 1.5]);
        assert_eq!(bin_ends(vec![2.0; 7], 3), [2.0; 4]);
    }

    /// Two episodes of actions (t, -10 t) and reward t; the first ended its task.
    fn dataset() -> Dataset {
        let spaces = Spaces { observation: Space::unbounded([1]), action: Space::unbounded([2]) };
        let episode = |steps: usize| Episode {
            observations: vec![Column::F32(vec![0.5; steps])],
            actions: vec![Column::F32((0..steps).flat_map(|t| [t as f32, -10.0 * t as f32]).collect())],
            rewards: (0..steps).map(|t| t as f32).collect(),
            terminated: steps == 3,
            truncated: steps != 3,
            imitate: None,
            labels: None,
            accepted: None,
        };
        Dataset::from_episodes(spaces, BTreeMap::new(), vec![episode(3), episode(5)]).unwrap()
    }

    #[test]
    fn statistics_are_of_every_number_over_all_steps() {
        let data = dataset();
        assert_eq!(extremes(&data, Field::Action, 2, f32::min).unwrap(), [0.0, -40.0]);
        assert_eq!(extremes(&data, Field::Action, 2, f32::max).unwrap(), [4.0, 0.0]);
        // 0 0 1 1 2 2 3 4 and tenfold, negated.
        let ends = all_bins(&data, Field::Action, 2, 4).unwrap();
        assert_eq!(ends, [0.0, 1.0, 2.0, 3.0, 4.0, -40.0, -20.0, -10.0, 0.0, 0.0]);
        let moments = moments(&data, Field::Action, 2).unwrap();
        // Of 0 0 1 1 2 2 3 4: mean 13 / 8, mean square 35 / 8.
        let deviation = (35.0f64 / 8.0 - (13.0f64 / 8.0).powi(2)).sqrt();
        let near = |a: (f64, f64), b: (f64, f64)| (a.0 - b.0).abs() < 1e-12 && (a.1 - b.1).abs() < 1e-12;
        assert!(near(moments[0], (1.625, deviation)) && near(moments[1], (-16.25, 10.0 * deviation)));
        assert_eq!(super::moments(&data, Field::Observation(0), 1).unwrap(), [(0.0, 1.0)]);
        let paid = Field::CountedReward(Discount::new(1.0).with_terminal_reward(Some(-7.0)));
        assert_eq!(extremes(&data, paid, 1, f32::min).unwrap(), [-7.0]);
    }
}
