//! Spaces: what observations and actions may be.
//!
//! The numbers of a space lie flat in the order of its parts: those of boxes as floats, those of discrete parts as
//! integers. A tuple of (Discrete 3, Box of 2) is the integers `[i]` and the floats `[x, y]`.

use elmur_rng::Rng;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A set of values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Space {
    /// One of 0, ..., n - 1.
    Discrete {
        /// How many.
        n: usize,
    },
    /// One choice per entry.
    MultiDiscrete {
        /// How many of each.
        sizes: Vec<usize>,
    },
    /// Numbers between `low` and `high`, each given once for all or once per number. The largest finite numbers mean no bound.
    Box {
        /// Axes.
        shape: Vec<usize>,
        /// Smallest.
        low: Vec<f32>,
        /// Largest.
        high: Vec<f32>,
    },
    /// Several spaces side by side.
    Tuple {
        /// The spaces.
        parts: Vec<Space>,
    },
}

/// What an environment shows and takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spaces {
    /// Observations.
    pub observation: Space,
    /// Actions.
    pub action: Space,
}

/// A part of a space that is not a tuple.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Leaf<'a> {
    /// Integers, each below its size.
    Ints(&'a [usize]),
    /// Floats.
    Floats {
        /// Axes.
        shape: &'a [usize],
        /// Smallest, one for all or one each.
        low: &'a [f32],
        /// Largest, one for all or one each.
        high: &'a [f32],
    },
}

impl Leaf<'_> {
    /// How many numbers.
    pub fn len(&self) -> usize {
        match self {
            Leaf::Ints(sizes) => sizes.len(),
            Leaf::Floats { shape, .. } => shape.iter().product(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Numbers of one or more rows of a space.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Values<'a> {
    /// Those of boxes, [rows, floats].
    pub floats: &'a [f32],
    /// Those of discrete parts, [rows, ints].
    pub ints: &'a [i32],
}

/// Room for numbers of one or more rows of a space.
#[derive(Debug, Default, PartialEq)]
pub struct ValuesMut<'a> {
    /// Those of boxes, [rows, floats].
    pub floats: &'a mut [f32],
    /// Those of discrete parts, [rows, ints].
    pub ints: &'a mut [i32],
}

/// One value of a space, owned.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Numbers {
    /// Those of boxes.
    pub floats: Vec<f32>,
    /// Those of discrete parts.
    pub ints: Vec<i32>,
}

impl Numbers {
    /// Zeros for a value of this space.
    pub fn of(space: &Space) -> Self {
        Self { floats: vec![0.0; space.floats()], ints: vec![0; space.ints()] }
    }

    /// The numbers, borrowed.
    pub fn values(&self) -> Values<'_> {
        Values { floats: &self.floats, ints: &self.ints }
    }

    /// Room for other numbers.
    pub fn room(&mut self) -> ValuesMut<'_> {
        ValuesMut { floats: &mut self.floats, ints: &mut self.ints }
    }
}

/// Most numbers that one value of a space may have.
const MAX_NUMBERS: usize = 1 << 24;

impl Space {
    /// Numbers without bounds.
    pub fn unbounded(shape: impl Into<Vec<usize>>) -> Self {
        Space::Box { shape: shape.into(), low: vec![f32::MIN], high: vec![f32::MAX] }
    }

    /// Numbers between `low` and `high`.
    pub fn between(low: f32, high: f32, shape: impl Into<Vec<usize>>) -> Self {
        Space::Box { shape: shape.into(), low: vec![low], high: vec![high] }
    }

    /// The parts that are not tuples, in order.
    pub fn leaves(&self) -> Vec<Leaf<'_>> {
        match self {
            Space::Discrete { n } => vec![Leaf::Ints(std::slice::from_ref(n))],
            Space::MultiDiscrete { sizes } => vec![Leaf::Ints(sizes)],
            Space::Box { shape, low, high } => vec![Leaf::Floats { shape, low, high }],
            Space::Tuple { parts } => parts.iter().flat_map(Space::leaves).collect(),
        }
    }

    /// Floats of one value.
    pub fn floats(&self) -> usize {
        self.leaves().iter().filter(|leaf| matches!(leaf, Leaf::Floats { .. })).map(Leaf::len).sum()
    }

    /// Integers of one value.
    pub fn ints(&self) -> usize {
        self.leaves().iter().filter(|leaf| matches!(leaf, Leaf::Ints(_))).map(Leaf::len).sum()
    }

    /// Appends a value to `numbers`, each as likely as any other; floats need bounds.
    pub fn sample(&self, rng: &mut Rng, numbers: &mut Numbers) {
        for leaf in self.leaves() {
            match leaf {
                Leaf::Ints(sizes) => {
                    numbers.ints.extend(sizes.iter().map(|n| rng.below(*n as u32) as i32));
                }
                Leaf::Floats { low, high, .. } => {
                    let at = |bound: &[f32], i: usize| f64::from(bound[i.min(bound.len() - 1)]);
                    numbers
                        .floats
                        .extend((0..leaf.len()).map(|i| rng.uniform(at(low, i), at(high, i)) as f32));
                }
            }
        }
    }

    /// Whether the space makes sense: at least one value, bounds in order, a bounded number of numbers.
    pub fn validate(&self) -> Result<()> {
        let fail = |expected: &str, got: String| {
            Err(Error::Space { what: "space", expected: expected.to_owned(), got })
        };
        if self.depth() > 8 {
            return fail("tuples nested at most 8 deep", format!("{} deep", self.depth()));
        }
        let mut total = 0usize;
        for leaf in self.leaves() {
            let len = match leaf {
                Leaf::Ints(sizes) => {
                    if let Some(size) = sizes.iter().find(|n| **n == 0 || **n > i32::MAX as usize) {
                        return fail("1 to 2^31 - 1 choices", size.to_string());
                    }
                    Some(sizes.len())
                }
                Leaf::Floats { shape, low, high } => {
                    let len = shape.iter().try_fold(1usize, |len, n| len.checked_mul(*n));
                    let each = |bound: &[f32]| bound.len() == 1 || Some(bound.len()) == len;
                    if !each(low) || !each(high) {
                        return fail(
                            "one bound, or one per number",
                            format!("{} and {}", low.len(), high.len()),
                        );
                    }
                    let bounds = (0..low.len().max(high.len())).map(|i| (at(low, i), at(high, i)));
                    if let Some((low, high)) =
                        bounds.into_iter().find(|(low, high)| low > high || low.is_nan() || high.is_nan())
                    {
                        return fail("low <= high", format!("{low} and {high}"));
                    }
                    len
                }
            };
            total = match len.and_then(|len| total.checked_add(len)) {
                Some(total) if total <= MAX_NUMBERS => total,
                _ => return fail("at most 2^24 numbers", format!("{self:?}").chars().take(80).collect()),
            };
        }
        if total == 0 { fail("at least one number", "none".to_owned()) } else { Ok(()) }
    }

    fn depth(&self) -> usize {
        match self {
            Space::Tuple { parts } => 1 + parts.iter().map(Space::depth).max().unwrap_or(0),
            _ => 0,
        }
    }

    /// Whether `values` are rows of this space: as many numbers, all finite, all within bounds.
    pub fn check(&self, what: &'static str, values: Values<'_>) -> Result<()> {
        let fail = |expected: String, got: String| Err(Error::Space { what, expected, got });
        let (floats, ints) = (self.floats(), self.ints());
        let rows = (values.floats.len().max(values.ints.len())).checked_div(floats.max(ints)).unwrap_or(0);
        if values.floats.len() != rows * floats || values.ints.len() != rows * ints {
            return fail(
                format!("{floats} floats and {ints} integers per row"),
                format!("{} and {} in all", values.floats.len(), values.ints.len()),
            );
        }
        let leaves = self.leaves();
        for row in 0..rows {
            let mut float = values.floats[row * floats..].iter();
            let mut int = values.ints[row * ints..].iter();
            for leaf in &leaves {
                match leaf {
                    Leaf::Ints(sizes) => {
                        for (size, value) in sizes.iter().zip(&mut int) {
                            if usize::try_from(*value).is_ok_and(|value| value < *size) {
                                continue;
                            }
                            return fail(format!("an integer from 0 to {}", size - 1), value.to_string());
                        }
                    }
                    Leaf::Floats { low, high, .. } => {
                        for (i, value) in (0..leaf.len()).zip(&mut float) {
                            let (low, high) = (at(low, i), at(high, i));
                            if !(low..=high).contains(value) {
                                return fail(format!("a number from {low} to {high}"), value.to_string());
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// A bound that is given once for all or once per number.
pub(crate) fn at(bound: &[f32], i: usize) -> f32 {
    bound[if bound.len() == 1 { 0 } else { i }]
}

impl Spaces {
    /// Checks both spaces.
    pub fn validate(&self) -> Result<()> {
        self.observation.validate()?;
        self.action.validate()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> Space {
        Space::Tuple { parts: vec![Space::Discrete { n: 3 }, Space::between(-1.0, 1.0, [2])] }
    }

    #[test]
    fn values_are_counted_and_checked_part_by_part() {
        let space = pair();
        assert_eq!((space.floats(), space.ints()), (2, 1));
        let check = |floats: &[f32], ints: &[i32]| space.check("value", Values { floats, ints });
        check(&[0.5, -1.0, 0.0, 1.0], &[0, 2]).unwrap();
        assert!(check(&[0.5, -1.0], &[3]).unwrap_err().to_string().contains("from 0 to 2, got 3"));
        assert!(check(&[0.5, -1.0], &[-1]).is_err());
        assert!(check(&[f32::NAN, 0.0], &[0]).unwrap_err().to_string().contains("got NaN"));
        assert!(check(&[0.5, 1.5], &[0]).is_err());
        assert!(check(&[0.5], &[0]).is_err());
        assert!(check(&[0.5, 0.5], &[0, 1]).is_err());
    }

    #[test]
    fn impossible_spaces_are_refused() {
        pair().validate().unwrap();
        Space::unbounded([3]).validate().unwrap();
        for bad in [
            Space::Discrete { n: 0 },
            Space::MultiDiscrete { sizes: vec![] },
            Space::between(1.0, -1.0, [2]),
            Space::between(f32::NAN, 1.0, [2]),
            Space::unbounded([usize::MAX, 3]),
            Space::unbounded([1 << 30]),
            Space::Box { shape: vec![3], low: vec![0.0; 2], high: vec![1.0] },
            Space::Tuple { parts: vec![] },
            (0..9).fold(Space::Discrete { n: 2 }, |space, _| Space::Tuple { parts: vec![space] }),
        ] {
            assert!(bad.validate().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn spaces_survive_json() {
        let spaces = Spaces { observation: pair(), action: Space::unbounded([2]) };
        let json = serde_json::to_string(&spaces).unwrap();
        assert_eq!(serde_json::from_str::<Spaces>(&json).unwrap(), spaces, "{json}");
    }
}
