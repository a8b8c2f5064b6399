//! Spaces: what observations and actions may be.
//!
//! A space is a list of leaves ([`Space::leaves`]): floats, integers or bytes. The numbers of a value are
//! stored flat, each kind by itself, in the order of the leaves: a value of a tuple of (Discrete 3, Box of 2)
//! is the integers `[i]` and the floats `[x, y]`.

use std::fmt;

use elmur_rng::Rng;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A set of values that an observation or an action may take, as in Gymnasium.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Space {
    /// One integer from 0 to n - 1.
    Discrete {
        /// Number of choices.
        n: usize,
    },
    /// Several integers, integer i from 0 to `sizes[i]` - 1.
    MultiDiscrete {
        /// Number of choices of each integer.
        sizes: Vec<usize>,
    },
    /// Floats between `low` and `high`. Bounds are given once for all numbers or once per number; `f32::MIN`
    /// and `f32::MAX` mean no bound.
    Box {
        /// Length of each axis.
        shape: Vec<usize>,
        /// Lower bound of all numbers, or of each.
        low: Vec<f32>,
        /// Upper bound of all numbers, or of each.
        high: Vec<f32>,
    },
    /// Bytes from 0 to 255, such as the pixels of a camera [channels, height, width]. Policies see byte `b`
    /// as the number b / 255.
    Bytes {
        /// Length of each axis.
        shape: Vec<usize>,
    },
    /// Several spaces side by side.
    Tuple {
        /// The spaces, in order.
        parts: Vec<Space>,
    },
}

/// In words: `a choice of 4`, `52 integers below 3`, `6 numbers`, `bytes [3, 64, 64]`, `(6 numbers, a choice of 2)`.
impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Space::Discrete { n } => write!(f, "a choice of {n}"),
            Space::MultiDiscrete { sizes } => {
                let (least, most) = (sizes.iter().min(), sizes.iter().max());
                let (least, most) = (least.copied().unwrap_or(0), most.copied().unwrap_or(0));
                write!(f, "{} integers below {least}", sizes.len())?;
                if least < most { write!(f, " to {most}") } else { Ok(()) }
            }
            Space::Box { shape, .. } => match &shape[..] {
                [n] => write!(f, "{n} numbers"),
                shape => write!(f, "numbers {shape:?}"),
            },
            Space::Bytes { shape } => write!(f, "bytes {shape:?}"),
            Space::Tuple { parts } => {
                for (i, part) in parts.iter().enumerate() {
                    write!(f, "{}{part}", if i == 0 { "(" } else { ", " })?;
                }
                f.write_str(if parts.is_empty() { "nothing" } else { ")" })
            }
        }
    }
}

/// The observation space and the action space of an environment, a dataset or a policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spaces {
    /// What observations may be.
    pub observation: Space,
    /// What actions may be.
    pub action: Space,
}

/// A part of a space that is not a tuple. See [`Space::leaves`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Leaf<'a> {
    /// Integers, integer i from 0 to size i - 1.
    Ints(&'a [usize]),
    /// Floats between bounds.
    Floats {
        /// Length of each axis.
        shape: &'a [usize],
        /// Lower bound of all numbers, or of each.
        low: &'a [f32],
        /// Upper bound of all numbers, or of each.
        high: &'a [f32],
    },
    /// Bytes.
    Bytes {
        /// Length of each axis.
        shape: &'a [usize],
    },
}

/// The three kinds of numbers that values are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// 32-bit floats.
    Floats,
    /// 32-bit integers.
    Ints,
    /// Bytes.
    Bytes,
}

impl Leaf<'_> {
    /// Numbers that one value of the leaf has.
    pub fn len(&self) -> usize {
        match self {
            Leaf::Ints(sizes) => sizes.len(),
            Leaf::Floats { shape, .. } | Leaf::Bytes { shape } => shape.iter().product(),
        }
    }

    /// The kind of the numbers of the leaf.
    pub fn kind(&self) -> Kind {
        match self {
            Leaf::Ints(_) => Kind::Ints,
            Leaf::Floats { .. } => Kind::Floats,
            Leaf::Bytes { .. } => Kind::Bytes,
        }
    }

    /// Whether the leaf has no numbers.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The numbers of one or more values of a space, borrowed. Each kind of number lies in a slice of its own,
/// value after value.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Values<'a> {
    /// Numbers of the float leaves, [rows, floats].
    pub floats: &'a [f32],
    /// Numbers of the integer leaves, [rows, ints].
    pub ints: &'a [i32],
    /// Numbers of the byte leaves, [rows, bytes].
    pub bytes: &'a [u8],
}

impl<'a> Values<'a> {
    /// Values of a space that has only floats.
    #[inline]
    pub fn floats(floats: &'a [f32]) -> Self {
        Self { floats, ..Self::default() }
    }

    /// Values of a space that has only integers.
    #[inline]
    pub fn ints(ints: &'a [i32]) -> Self {
        Self { ints, ..Self::default() }
    }

    /// Rows `first..first + count` of values that have the given numbers per row.
    #[inline]
    pub fn rows(&self, widths: Widths, first: usize, count: usize) -> Values<'a> {
        #[inline]
        fn part<T>(data: &[T], width: usize, first: usize, count: usize) -> &[T] {
            &data[first * width..(first + count) * width]
        }
        Values {
            floats: part(self.floats, widths.floats, first, count),
            ints: part(self.ints, widths.ints, first, count),
            bytes: part(self.bytes, widths.bytes, first, count),
        }
    }
}

/// The numbers of one or more values of a space, to be written. See [`Values`].
#[derive(Debug, Default, PartialEq)]
pub struct ValuesMut<'a> {
    /// Numbers of the float leaves, [rows, floats].
    pub floats: &'a mut [f32],
    /// Numbers of the integer leaves, [rows, ints].
    pub ints: &'a mut [i32],
    /// Numbers of the byte leaves, [rows, bytes].
    pub bytes: &'a mut [u8],
}

impl<'a> ValuesMut<'a> {
    /// Values of a space that has only floats.
    #[inline]
    pub fn floats(floats: &'a mut [f32]) -> Self {
        Self { floats, ..Self::default() }
    }

    /// Values of a space that has only integers.
    #[inline]
    pub fn ints(ints: &'a mut [i32]) -> Self {
        Self { ints, ..Self::default() }
    }

    /// The same numbers, to be read.
    #[inline]
    pub fn values(&self) -> Values<'_> {
        Values { floats: self.floats, ints: self.ints, bytes: self.bytes }
    }

    /// The same numbers, borrowed for a shorter time.
    #[inline]
    pub fn reborrow(&mut self) -> ValuesMut<'_> {
        ValuesMut { floats: &mut *self.floats, ints: &mut *self.ints, bytes: &mut *self.bytes }
    }

    /// Row `row` of values that have the given numbers per row.
    #[inline]
    pub fn row(&mut self, widths: Widths, row: usize) -> ValuesMut<'_> {
        self.rows(widths, row, 1)
    }

    /// Rows `first..first + count` of values that have the given numbers per row.
    #[inline]
    pub fn rows(&mut self, widths: Widths, first: usize, count: usize) -> ValuesMut<'_> {
        #[inline]
        fn part<T>(data: &mut [T], width: usize, first: usize, count: usize) -> &mut [T] {
            &mut data[first * width..(first + count) * width]
        }
        ValuesMut {
            floats: part(self.floats, widths.floats, first, count),
            ints: part(self.ints, widths.ints, first, count),
            bytes: part(self.bytes, widths.bytes, first, count),
        }
    }

    /// Overwrites these numbers with `values`, which must be as many.
    #[inline]
    pub fn copy_from(&mut self, values: Values<'_>) {
        self.floats.copy_from_slice(values.floats);
        self.ints.copy_from_slice(values.ints);
        self.bytes.copy_from_slice(values.bytes);
    }
}

/// How many floats, integers and bytes one value of a space has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Widths {
    /// Number of floats.
    pub floats: usize,
    /// Number of integers.
    pub ints: usize,
    /// Number of bytes.
    pub bytes: usize,
}

/// The numbers of one value of a space, or of several rows of values, owned.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Row {
    /// Numbers of the float leaves.
    pub floats: Vec<f32>,
    /// Numbers of the integer leaves.
    pub ints: Vec<i32>,
    /// Numbers of the byte leaves.
    pub bytes: Vec<u8>,
}

impl Row {
    /// Zeros for a value of this space.
    pub fn of(space: &Space) -> Self {
        Self::zeros(space.widths(), 1)
    }

    /// Zeros for `rows` values with the given numbers each.
    pub fn zeros(widths: Widths, rows: usize) -> Self {
        Self {
            floats: vec![0.0; rows * widths.floats],
            ints: vec![0; rows * widths.ints],
            bytes: vec![0; rows * widths.bytes],
        }
    }

    /// The numbers, to be read.
    #[inline]
    pub fn values(&self) -> Values<'_> {
        Values { floats: &self.floats, ints: &self.ints, bytes: &self.bytes }
    }

    /// The numbers, to be written.
    #[inline]
    pub fn as_mut(&mut self) -> ValuesMut<'_> {
        ValuesMut { floats: &mut self.floats, ints: &mut self.ints, bytes: &mut self.bytes }
    }

    /// Empties all three lists, keeping their memory.
    pub fn clear(&mut self) {
        self.floats.clear();
        self.ints.clear();
        self.bytes.clear();
    }

    /// Appends the numbers of `values`.
    pub fn extend(&mut self, values: Values<'_>) {
        self.floats.extend_from_slice(values.floats);
        self.ints.extend_from_slice(values.ints);
        self.bytes.extend_from_slice(values.bytes);
    }
}

/// Most numbers that one value of a space may have.
const MAX_NUMBERS: usize = 1 << 24;

impl Space {
    /// A box without bounds.
    pub fn unbounded(shape: impl Into<Vec<usize>>) -> Self {
        Space::Box { shape: shape.into(), low: vec![f32::MIN], high: vec![f32::MAX] }
    }

    /// A box with the same bounds for all numbers.
    pub fn between(low: f32, high: f32, shape: impl Into<Vec<usize>>) -> Self {
        Space::Box { shape: shape.into(), low: vec![low], high: vec![high] }
    }

    /// The parts that are not tuples, in order.
    pub fn leaves(&self) -> Vec<Leaf<'_>> {
        match self {
            Space::Discrete { n } => vec![Leaf::Ints(std::slice::from_ref(n))],
            Space::MultiDiscrete { sizes } => vec![Leaf::Ints(sizes)],
            Space::Box { shape, low, high } => vec![Leaf::Floats { shape, low, high }],
            Space::Bytes { shape } => vec![Leaf::Bytes { shape }],
            Space::Tuple { parts } => parts.iter().flat_map(Space::leaves).collect(),
        }
    }

    /// How many floats, integers and bytes one value has.
    pub fn widths(&self) -> Widths {
        let mut widths = Widths::default();
        for leaf in self.leaves() {
            let width = match leaf.kind() {
                Kind::Floats => &mut widths.floats,
                Kind::Ints => &mut widths.ints,
                Kind::Bytes => &mut widths.bytes,
            };
            *width += leaf.len();
        }
        widths
    }

    /// Appends a random value, uniform over the space, to `numbers`. Boxes must have finite bounds.
    pub fn sample(&self, rng: &mut Rng, numbers: &mut Row) {
        for leaf in self.leaves() {
            match leaf {
                Leaf::Ints(sizes) => {
                    numbers.ints.extend(sizes.iter().map(|n| rng.below(*n as u32) as i32));
                }
                Leaf::Floats { low, high, .. } => {
                    let at = |bound: &[f32], i: usize| f64::from(bound_at(bound, i));
                    numbers
                        .floats
                        .extend((0..leaf.len()).map(|i| rng.uniform(at(low, i), at(high, i)) as f32));
                }
                Leaf::Bytes { .. } => {
                    numbers.bytes.extend((0..leaf.len()).map(|_| rng.below(256) as u8));
                }
            }
        }
    }

    /// Checks the space itself: 1 to 2^24 numbers, at least one choice per integer, bounds in order, tuples
    /// at most 8 deep.
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
                    let bounds =
                        (0..low.len().max(high.len())).map(|i| (bound_at(low, i), bound_at(high, i)));
                    if let Some((low, high)) =
                        bounds.into_iter().find(|(low, high)| low > high || low.is_nan() || high.is_nan())
                    {
                        return fail("low <= high", format!("{low} and {high}"));
                    }
                    len
                }
                Leaf::Bytes { shape } => shape.iter().try_fold(1usize, |len, n| len.checked_mul(*n)),
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

    /// Checks that `values` are rows of this space: the right number of numbers, all within bounds. Errors
    /// call them `what`.
    pub fn check(&self, what: &'static str, values: Values<'_>) -> Result<()> {
        let fail = |expected: String, got: String| Err(Error::Space { what, expected, got });
        let Widths { floats, ints, bytes } = self.widths();
        let count = values.floats.len().max(values.ints.len()).max(values.bytes.len());
        let rows = count.checked_div(floats.max(ints).max(bytes)).unwrap_or(0);
        let fits = [(values.floats.len(), floats), (values.ints.len(), ints), (values.bytes.len(), bytes)];
        if fits.iter().any(|(have, each)| *have != rows * each) {
            return fail(
                format!("{floats} floats, {ints} integers and {bytes} bytes per row"),
                format!("{}, {} and {} in all", values.floats.len(), values.ints.len(), values.bytes.len()),
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
                            let (low, high) = (bound_at(low, i), bound_at(high, i));
                            if !(low..=high).contains(value) {
                                return fail(format!("a number from {low} to {high}"), value.to_string());
                            }
                        }
                    }
                    Leaf::Bytes { .. } => {}
                }
            }
        }
        Ok(())
    }
}

/// Bound of number `i`, where bounds are given once for all numbers or once per number.
pub fn bound_at(bound: &[f32], i: usize) -> f32 {
    bound[if bound.len() == 1 { 0 } else { i }]
}

impl Spaces {
    /// Checks both spaces; see [`Space::validate`].
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
    fn spaces_are_told_in_words() {
        let parts = vec![
            Space::Discrete { n: 4 },
            Space::MultiDiscrete { sizes: vec![3; 52] },
            Space::MultiDiscrete { sizes: vec![2, 5] },
            Space::unbounded([6]),
            Space::Bytes { shape: vec![3, 8, 8] },
        ];
        let words =
            "(a choice of 4, 52 integers below 3, 2 integers below 2 to 5, 6 numbers, bytes [3, 8, 8])";
        assert_eq!(Space::Tuple { parts }.to_string(), words);
    }

    #[test]
    fn values_are_counted_and_checked_part_by_part() {
        let space = pair();
        assert_eq!(space.widths(), Widths { floats: 2, ints: 1, bytes: 0 });
        let check = |floats: &[f32], ints: &[i32]| space.check("value", Values { floats, ints, bytes: &[] });
        check(&[0.5, -1.0, 0.0, 1.0], &[0, 2]).unwrap();
        assert!(check(&[0.5, -1.0], &[3]).unwrap_err().to_string().contains("from 0 to 2, got 3"));
        assert!(check(&[0.5, -1.0], &[-1]).is_err());
        assert!(check(&[f32::NAN, 0.0], &[0]).unwrap_err().to_string().contains("got NaN"));
        assert!(check(&[0.5, 1.5], &[0]).is_err());
        assert!(check(&[0.5], &[0]).is_err());
        assert!(check(&[0.5, 0.5], &[0, 1]).is_err());
    }

    #[test]
    fn rows_of_all_kinds_are_cut_out_and_copied() {
        let space = Space::Tuple { parts: vec![pair(), Space::Bytes { shape: vec![1, 2] }] };
        let widths = space.widths();
        assert_eq!(widths, Widths { floats: 2, ints: 1, bytes: 2 });
        let mut rows = Row::default();
        let mut rng = Rng::new(1, 0);
        (0..3).for_each(|_| space.sample(&mut rng, &mut rows));
        space.check("rows", rows.values()).unwrap();
        let mut copy = Row::zeros(widths, 3);
        copy.as_mut().rows(widths, 1, 2).copy_from(rows.values().rows(widths, 0, 2));
        copy.as_mut().row(widths, 0).copy_from(rows.values().rows(widths, 2, 1));
        let mut turned = Row::default();
        [1, 2, 0].into_iter().for_each(|row| turned.extend(copy.values().rows(widths, row, 1)));
        assert_eq!(turned, rows);
        rows.bytes.pop();
        let error = space.check("rows", rows.values()).unwrap_err().to_string();
        assert!(error.contains("1 integers and 2 bytes per row"), "{error}");
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
            Space::Bytes { shape: vec![3, 0] },
            Space::Bytes { shape: vec![1 << 12, 1 << 13] },
            (0..9).fold(Space::Discrete { n: 2 }, |space, _| Space::Tuple { parts: vec![space] }),
        ] {
            assert!(bad.validate().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn spaces_survive_json() {
        let camera = Space::Bytes { shape: vec![3, 64, 64] };
        assert_eq!(serde_json::to_string(&camera).unwrap(), r#"{"bytes":{"shape":[3,64,64]}}"#);
        let observation = Space::Tuple { parts: vec![pair(), camera] };
        let spaces = Spaces { observation, action: Space::unbounded([2]) };
        let json = serde_json::to_string(&spaces).unwrap();
        assert_eq!(serde_json::from_str::<Spaces>(&json).unwrap(), spaces, "{json}");
    }
}
