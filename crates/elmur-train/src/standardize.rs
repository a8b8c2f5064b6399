//! Standardizes vector observations: the mean and standard deviation of the data are folded into the initial
//! weights of the encoder.

use elmur_base::FieldMut;
use elmur_data::{ElementType, Part, Source, chunks};
use elmur_engine::Store;
use elmur_model::ends::{Encoder, Ends};

use crate::error::Result;

/// Spread below which a number counts as constant.
const LEAST: f64 = 1e-6;

/// Changes the fresh encoders W x + b of vector observations to W ((x - mean) / spread) + b, with the data's
/// mean and spread of every number. They remain linear maps, so that nothing else need know.
pub(crate) fn standardize(ends: Ends<'_>, source: &dyn Source, params: &Store) -> Result<()> {
    for (leaf, encoder) in ends.observation.iter().enumerate() {
        let Encoder::Vector { dim, bytes: false } = encoder else { continue };
        // A policy may have several networks with encoders of their own, or none.
        let name = ends.encoder_name(leaf);
        let (all, part) = (params.names(), format!(".{name}"));
        let linear = all.iter().filter_map(|parameter| parameter.strip_suffix(".weight"));
        let encoders: Vec<&str> = linear.filter(|own| *own == name || own.ends_with(&part)).collect();
        if encoders.is_empty() {
            continue;
        }
        let spread = moments(source, leaf, *dim)?;
        for own in encoders {
            let (weight, bias) = (format!("{own}.weight"), format!("{own}.bias"));
            let (mut w, mut b) = (params.get::<f32>(&weight)?, params.get::<f32>(&bias)?);
            for (row, b) in w.chunks_exact_mut(*dim).zip(&mut b) {
                for (w, (mean, deviation)) in row.iter_mut().zip(&spread) {
                    let scaled = f64::from(*w) / deviation;
                    *b -= (scaled * mean) as f32;
                    *w = scaled as f32;
                }
            }
            params.set(&weight, &w)?;
            params.set(&bias, &b)?;
        }
    }
    Ok(())
}

/// Mean and standard deviation of every number of a leaf; 0 and 1 where it never changes, or is not recorded
/// as floats. Observations are read a few at a time.
fn moments(source: &dyn Source, leaf: usize, dim: usize) -> Result<Vec<(f64, f64)>> {
    let mut sums = vec![(0.0, 0.0); dim];
    let mut count = 0.0f64;
    let part = Part::Observation(leaf);
    let floats = source.layout().observations.get(leaf).is_some_and(|c| c.element == ElementType::F32);
    let episodes = if floats { source.episodes() } else { 0 };
    let mut numbers = Vec::new();
    for episode in 0..episodes {
        for rows in chunks(source.outline(episode).rows(part), dim) {
            numbers.resize(rows.len() * dim, 0.0);
            source.read(part, episode, rows, FieldMut::F32(&mut numbers))?;
            for row in numbers.chunks_exact(dim) {
                count += 1.0;
                for ((sum, squares), x) in sums.iter_mut().zip(row) {
                    *sum += f64::from(*x);
                    *squares += f64::from(*x).powi(2);
                }
            }
        }
    }
    Ok(sums.into_iter().map(|sums| moment(sums, count)).collect())
}

/// Mean and standard deviation of `count` numbers from their sum and that of their squares; 0 and 1 where the
/// numbers are all the same.
pub(crate) fn moment((sum, squares): (f64, f64), count: f64) -> (f64, f64) {
    let mean = sum / count.max(1.0);
    let deviation = (squares / count.max(1.0) - mean * mean).max(0.0).sqrt();
    if deviation > LEAST { (mean, deviation) } else { (0.0, 1.0) }
}

#[cfg(test)]
mod tests {
    use elmur_data::{Column, Dataset, Episode};
    use elmur_envs::{EnvSpec, Registry};
    use elmur_model::{init, presets};

    use super::*;

    #[test]
    fn the_encoder_sees_standardized_numbers() {
        let model = presets::model("tmaze").unwrap();
        // Three numbers around 0.5 with spread 0.01, and one that never changes.
        let noise = |i: usize, c: usize| if (i >> c).is_multiple_of(2) { 0.01f32 } else { -0.01 };
        let rows = 64;
        let numbers =
            (0..rows).flat_map(|i| (0..4).map(move |c| if c == 3 { 0.7 } else { 0.5 + noise(i, c) }));
        let episode = Episode {
            observations: vec![Column::F32(numbers.collect())],
            actions: vec![Column::I32(vec![0; rows])],
            rewards: vec![0.0; rows],
            terminated: true,
            truncated: false,
            imitate: None,
            labels: None,
            accepted: None,
        };
        let maze = Registry::builtin().find(&EnvSpec::new("tmaze")).unwrap();
        let spaces = maze.spaces().clone();
        let dataset = Dataset::from_episodes(spaces, Default::default(), vec![episode]).unwrap();
        let (plain, fitted) = (
            init::parameters(model.architecture(), 1).unwrap(),
            init::parameters(model.architecture(), 1).unwrap(),
        );
        standardize(model.architecture().ends(), &dataset, &fitted).unwrap();
        let map = |store: &Store, x: [f32; 4]| -> Vec<f32> {
            let (w, b) =
                (store.get::<f32>("encoder.weight").unwrap(), store.get::<f32>("encoder.bias").unwrap());
            let row = |(w, b): (&[f32], &f32)| w.iter().zip(x).map(|(w, x)| w * x).sum::<f32>() + b;
            w.chunks_exact(4).zip(&b).map(row).collect()
        };
        let (a, b) = (map(&plain, [1.0, -1.0, 0.0, 0.7]), map(&fitted, [0.51, 0.49, 0.5, 0.7]));
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-2), "{a:?} {b:?}");
    }
}
