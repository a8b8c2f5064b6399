//! Some of the episodes of a source, and the split into episodes to train on and episodes held out.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use elmur_base::{FieldMut, Spaces};
use elmur_rng::Rng;

use crate::error::{Error, Result};
use crate::layout::{Layout, Outline, Part};
use crate::source::{Source, check_read};

/// Some episodes of a source, by their numbers, in any order.
#[derive(Debug, Clone)]
pub struct Subset {
    source: Arc<dyn Source>,
    episodes: Vec<usize>,
}

impl Subset {
    /// Episodes of `source` with these numbers. None at all, and numbers that it does not have, are errors.
    pub fn new(source: &Arc<dyn Source>, episodes: Vec<usize>) -> Result<Self> {
        let have = source.episodes();
        let wrong = episodes.iter().find(|episode| **episode >= have).map(ToString::to_string);
        let wrong = if episodes.is_empty() { Some("none".to_owned()) } else { wrong };
        match wrong {
            Some(got) => {
                Err(Error::Choice { what: "subset", expected: format!("episodes below {have}"), got })
            }
            None => Ok(Self { source: Arc::clone(source), episodes }),
        }
    }
}

/// Splits a source at random into episodes to train on and a share of episodes to hold out, both in their
/// order. The split is a function of the number of episodes, the share and the seed. A part without episodes
/// is an error.
pub fn split(source: &Arc<dyn Source>, share: f64, seed: u64) -> Result<(Arc<dyn Source>, Arc<dyn Source>)> {
    let have = source.episodes();
    let fail =
        |expected: String, got: String| Err(Error::Choice { what: "share to hold out", expected, got });
    if !(share > 0.0 && share < 1.0) {
        return fail("a number between 0 and 1".to_owned(), share.to_string());
    }
    let held = (share * have as f64).round() as usize;
    if held == 0 || held >= have {
        let expected = match have {
            1 => "at least two episodes to split".to_owned(),
            _ => format!(
                "at least one of {have} episodes in both parts: a share from {} to {}",
                1.0 / have as f64,
                1.0 - 1.0 / have as f64
            ),
        };
        return fail(expected, format!("{share} of {have}, which is {held}"));
    }
    let mut order: Vec<usize> = (0..have).collect();
    Rng::new(seed, SPLIT).shuffle(&mut order);
    let mut out = order.split_off(have - held);
    order.sort_unstable();
    out.sort_unstable();
    Ok((Arc::new(Subset::new(source, order)?), Arc::new(Subset::new(source, out)?)))
}

/// Number of the random stream that splits are drawn from.
const SPLIT: u32 = (1 << 30) + 1;

impl Source for Subset {
    fn spaces(&self) -> &Spaces {
        self.source.spaces()
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        self.source.metadata()
    }

    fn episodes(&self) -> usize {
        self.episodes.len()
    }

    fn outline(&self, episode: usize) -> Outline {
        self.source.outline(self.episodes[episode])
    }

    fn layout(&self) -> &Layout {
        self.source.layout()
    }

    fn read(&self, part: Part, episode: usize, rows: Range<usize>, out: FieldMut<'_>) -> Result<()> {
        check_read(self, part, episode, &rows, &out)?;
        self.source.read(part, self.episodes[episode], rows, out)
    }

    fn checksum(&self, episode: usize) -> u32 {
        self.source.checksum(self.episodes[episode])
    }

    fn reading_threads(&self) -> usize {
        self.source.reading_threads()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::tests::dataset;

    fn source(n: usize) -> Arc<dyn Source> {
        Arc::new(dataset(&(1..=n).collect::<Vec<_>>()))
    }

    fn lengths(source: &Arc<dyn Source>) -> Vec<usize> {
        (0..source.episodes()).map(|i| source.steps(i)).collect()
    }

    #[test]
    fn a_split_is_a_function_of_its_seed_and_loses_nothing() {
        let all = source(20);
        let (train, held) = split(&all, 0.25, 7).unwrap();
        assert_eq!((train.episodes(), held.episodes()), (15, 5));
        let mut both = [lengths(&train), lengths(&held)].concat();
        both.sort_unstable();
        assert_eq!(both, lengths(&all));
        let again = split(&all, 0.25, 7).unwrap();
        assert_eq!((lengths(&again.0), again.1.fingerprint()), (lengths(&train), held.fingerprint()));
        assert_ne!(lengths(&split(&all, 0.25, 8).unwrap().1), lengths(&held));
        for i in 0..5 {
            let number = held.steps(i) - 1;
            assert_eq!(held.episode(i).unwrap(), all.episode(number).unwrap());
        }
    }

    #[test]
    fn splits_without_episodes_on_one_side_say_why() {
        for (n, share, text) in [
            (20, 0.01, "from 0.05 to 0.95"),
            (1, 0.5, "two episodes"),
            (9, 1.0, "between 0 and 1"),
            (9, f64::NAN, "NaN"),
        ] {
            let error = split(&source(n), share, 0).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
        assert!(Subset::new(&source(3), vec![0, 3]).is_err());
        assert!(Subset::new(&source(3), vec![]).is_err());
    }
}
