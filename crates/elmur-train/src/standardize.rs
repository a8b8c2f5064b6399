//! Standardizes observations: means and standard deviations of the data are folded into the initial weights of the
//! encoder.

use elmur_base::FieldMut;
use elmur_data::{ElementType, Part, Source, chunks};
use elmur_engine::Store;
use elmur_model::ends::{CategoricalEncoding, Encoder, Ends};

use crate::config::TrainConfig;
use crate::error::Result;

/// Spread below which a number counts as constant.
const LEAST: f64 = 1e-6;
/// Observations of integers after which no further episode is looked at.
const MOST_ROWS: f64 = 20_000.0;

/// Changes fresh encoders, so that they give standardized tokens at first. They remain what they are, so that nothing
/// else need know:
///
/// - With `settings.standardize`, linear maps W x + b of vectors become W ((x - mean) / spread) + b, with the data's
///   mean and spread of every number.
/// - With `settings.standardize_integers`, tables of which a row is added up for each of an observation's integers,
///   two or more, are shifted and scaled, so that over the data these sums have mean 0 in every column and, over all
///   columns, the spread 1. Of a board of which most fields are empty, a token would hardly tell anything but that.
pub(crate) fn standardize(
    settings: &TrainConfig,
    ends: Ends<'_>,
    source: &dyn Source,
    params: &Store,
) -> Result<()> {
    for (leaf, encoder) in ends.observation.iter().enumerate() {
        // A policy may have several networks with encoders of their own, or none.
        let name = ends.encoder_name(leaf);
        let (all, part) = (params.names(), format!(".{name}"));
        let ending = |ending: &str| -> Vec<&str> {
            let encoders = all.iter().filter_map(|parameter| parameter.strip_suffix(ending));
            encoders.filter(|own| *own == name || own.ends_with(&part)).collect()
        };
        match encoder {
            Encoder::Vector { dim, bytes: false } if settings.standardize => {
                let encoders = ending(".weight");
                if !encoders.is_empty() {
                    standardize_numbers(&encoders, &moments(source, leaf, *dim)?, params)?;
                }
            }
            Encoder::Categorical { sizes, encoding: CategoricalEncoding::Embedding }
                if settings.standardize_integers =>
            {
                for own in ending(".table") {
                    standardize_sums(&format!("{own}.table"), sizes, (source, leaf), params)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Folds mean and spread of every number into linear maps.
fn standardize_numbers(encoders: &[&str], spread: &[(f64, f64)], params: &Store) -> Result<()> {
    for own in encoders {
        let (weight, bias) = (format!("{own}.weight"), format!("{own}.bias"));
        let (mut w, mut b) = (params.get::<f32>(&weight)?, params.get::<f32>(&bias)?);
        for (row, b) in w.chunks_exact_mut(spread.len()).zip(&mut b) {
            for (w, (mean, deviation)) in row.iter_mut().zip(spread) {
                let scaled = f64::from(*w) / deviation;
                *b -= (scaled * mean) as f32;
                *w = scaled as f32;
            }
        }
        params.set(&weight, &w)?;
        params.set(&bias, &b)?;
    }
    Ok(())
}

/// Shifts and scales a table of which a row is added up for each of `sizes` integers.
fn standardize_sums(
    name: &str,
    sizes: &[usize],
    (source, leaf): (&dyn Source, usize),
    params: &Store,
) -> Result<()> {
    let integers = source.layout().observations.get(leaf).is_some_and(|c| c.element == ElementType::I32);
    let mut table = params.get::<f32>(name)?;
    let (rows, parts) = (sizes.iter().sum::<usize>(), sizes.len());
    // A single vector is standardized as it is drawn.
    if !integers || parts < 2 || rows == 0 || table.len() < rows {
        return Ok(());
    }
    let (width, part) = (table.len() / rows, Part::Observation(leaf));
    let mut moments = vec![(0.0f64, 0.0f64); width];
    let (mut values, mut sum, mut count) = (Vec::new(), vec![0.0f32; width], 0.0f64);
    for episode in 0..source.episodes() {
        for range in chunks(source.outline(episode).rows(part), parts) {
            values.resize(range.len() * parts, 0);
            source.read(part, episode, range, FieldMut::I32(&mut values))?;
            for observation in values.chunks_exact(parts) {
                sum.fill(0.0);
                let mut first = 0;
                for (value, size) in observation.iter().zip(sizes) {
                    let row = first + usize::try_from(*value).map_or(0, |value| value.min(size - 1));
                    first += size;
                    sum.iter_mut().zip(&table[row * width..]).for_each(|(sum, x)| *sum += x);
                }
                count += 1.0;
                for ((mean, squares), sum) in moments.iter_mut().zip(&sum) {
                    *mean += f64::from(*sum);
                    *squares += f64::from(*sum).powi(2);
                }
            }
        }
        if count >= MOST_ROWS {
            break;
        }
    }
    let count = count.max(1.0);
    let variance = |(sum, squares): &(f64, f64)| (squares / count - (sum / count).powi(2)).max(0.0);
    let spread = (moments.iter().map(variance).sum::<f64>() / width as f64).sqrt();
    if spread > LEAST {
        for row in table.chunks_exact_mut(width) {
            for (x, (sum, _)) in row.iter_mut().zip(&moments) {
                *x = ((f64::from(*x) - sum / count / parts as f64) / spread) as f32;
            }
        }
        params.set(name, &table)?;
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
        let settings = TrainConfig { standardize: true, ..crate::RunConfig::preset("tmaze").unwrap().train };
        standardize(&settings, model.architecture().ends(), &dataset, &fitted).unwrap();
        let map = |store: &Store, x: [f32; 4]| -> Vec<f32> {
            let (w, b) =
                (store.get::<f32>("encoder.weight").unwrap(), store.get::<f32>("encoder.bias").unwrap());
            let row = |(w, b): (&[f32], &f32)| w.iter().zip(x).map(|(w, x)| w * x).sum::<f32>() + b;
            w.chunks_exact(4).zip(&b).map(row).collect()
        };
        let (a, b) = (map(&plain, [1.0, -1.0, 0.0, 0.7]), map(&fitted, [0.51, 0.49, 0.5, 0.7]));
        assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-2), "{a:?} {b:?}");
    }

    #[test]
    fn sums_of_a_boards_vectors_are_standardized() {
        let run = crate::RunConfig::preset("popgym-ConcentrationHard").unwrap();
        let run =
            crate::overrides::apply(&run, &["data.episodes=5".to_owned()], &Registry::builtin()).unwrap();
        let prepared = run.prepare(&Registry::builtin(), false).unwrap();
        let architecture = prepared.config.model.architecture();
        let (plain, fitted) =
            (init::parameters(architecture, 1).unwrap(), init::parameters(architecture, 1).unwrap());
        standardize(&prepared.config.train, architecture.ends(), &*prepared.data, &fitted).unwrap();
        let name = format!("{}.table", architecture.ends().encoder_name(0));
        // Over all observations: the mean of the first column, and the mean over columns of their variance.
        let moments = |store: &Store| -> (f64, f64) {
            let table = store.get::<f32>(&name).unwrap();
            let (data, width) = (&prepared.data, table.len() / (52 * 14));
            let mut sums = Vec::new();
            for episode in 0..data.episodes() {
                let rows = data.outline(episode).rows(Part::Observation(0));
                let mut cards = vec![0; rows * 52];
                data.read(Part::Observation(0), episode, 0..rows, FieldMut::I32(&mut cards)).unwrap();
                for board in cards.chunks_exact(52) {
                    let column = |c: usize| {
                        let row = |(i, card): (usize, &i32)| {
                            f64::from(table[(14 * i + *card as usize) * width + c])
                        };
                        board.iter().enumerate().map(row).sum::<f64>()
                    };
                    sums.push((0..width).map(column).collect::<Vec<_>>());
                }
            }
            let mean = |c: usize| sums.iter().map(|sum| sum[c]).sum::<f64>() / sums.len() as f64;
            let variance = |c: usize| {
                let mean = mean(c);
                sums.iter().map(|sum| (sum[c] - mean).powi(2)).sum::<f64>() / sums.len() as f64
            };
            (mean(0), (0..width).map(variance).sum::<f64>() / width as f64)
        };
        let ((before, wide), (mean, variance)) = (moments(&plain), moments(&fitted));
        assert!(before.abs() > 0.1 && (wide - 1.0).abs() > 0.1, "{before} {wide}");
        assert!(mean.abs() < 1e-3 && (variance - 1.0).abs() < 1e-3, "{mean} {variance}");
    }
}
