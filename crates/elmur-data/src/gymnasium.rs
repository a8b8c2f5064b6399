//! Gymnasium's spaces as Minari writes them: JSON, in which bounds may be the words Infinity and NaN.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::fields::{Field, Meaning};
use crate::npz::MAX_INTS;

/// A field of a space, and the path from the root of the space to it: names of dictionaries, numbers in
/// tuples.
#[derive(Debug)]
pub(crate) struct Placed {
    pub(crate) field: Field,
    pub(crate) path: Vec<Step>,
}

/// One step of the path to a part of a space.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Key(String),
    Index(usize),
}

/// The parts of a space.
#[derive(Debug, Default)]
pub(crate) struct Fields {
    /// Parts that can be read, in the order in which the space lists them.
    pub(crate) placed: Vec<Placed>,
    /// Names and types of parts that cannot be read: texts, graphs.
    pub(crate) unread: Vec<(String, String)>,
}

impl Fields {
    /// All parts, of which none may be of a type that cannot be read.
    pub(crate) fn all(self) -> Result<Vec<Placed>, String> {
        match self.unread.first() {
            Some((name, kind)) => Err(unreadable(name, kind)),
            None => Ok(self.placed),
        }
    }
}

/// The error for a part of a type that cannot be read.
pub(crate) fn unreadable(name: &str, kind: &str) -> String {
    let part = if name.is_empty() { "the space".to_owned() } else { format!("space `{name}`") };
    format!("{part} is of type {kind}; expected Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple")
}

/// The parts of a space as Minari writes it. `bounded`: bounds of boxes are kept.
pub(crate) fn fields(text: &str, bounded: bool) -> Result<Fields, String> {
    let space: Described = serde_json::from_str(&without_words(text)).map_err(|e| format!("a space: {e}"))?;
    let mut fields = Fields::default();
    space.gather(bounded, &mut Vec::new(), &mut fields)?;
    match fields.placed.is_empty() && fields.unread.is_empty() {
        true => Err("a space without parts".to_owned()),
        false => Ok(fields),
    }
}

/// JSON without the words that Python writes for numbers that JSON does not have.
fn without_words(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(['"', 'I', 'N']) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some(string) = rest.strip_prefix('"') {
            // To the closing quote, which is not behind an odd number of backslashes.
            let mut escaped = false;
            let end = string.find(|c| {
                let closes = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                closes
            });
            let end = end.map_or(rest.len(), |end| end + 2);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        } else if let Some(after) = rest.strip_prefix("Infinity") {
            out.push_str("1e300");
            rest = after;
        } else if let Some(after) = rest.strip_prefix("NaN") {
            out.push_str("null");
            rest = after;
        } else {
            out.push_str(&rest[..1]);
            rest = &rest[1..];
        }
    }
    out.push_str(rest);
    out
}

/// A space as it is written.
#[derive(Deserialize)]
struct Described {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    dtype: Option<String>,
    #[serde(default)]
    shape: Option<Vec<usize>>,
    #[serde(default)]
    low: Numbers,
    #[serde(default)]
    high: Numbers,
    #[serde(default)]
    n: Numbers,
    #[serde(default)]
    nvec: Numbers,
    #[serde(default)]
    start: Numbers,
    #[serde(default)]
    subspaces: Subspaces,
}

impl Described {
    fn gather(&self, bounded: bool, path: &mut Vec<Step>, fields: &mut Fields) -> Result<(), String> {
        if path.len() > 8 || fields.placed.len() + fields.unread.len() > 1 << 10 {
            return Err("a space of more than 8 levels or 1024 parts".to_owned());
        }
        if ["Dict", "Tuple"].contains(&self.kind.as_str()) {
            for (step, space) in &self.subspaces.0 {
                path.push(step.clone());
                space.gather(bounded, path, fields)?;
                path.pop();
            }
            return Ok(());
        }
        let name = path.iter().map(|step| match step {
            Step::Key(key) => key.clone(),
            Step::Index(i) => i.to_string(),
        });
        let name = name.collect::<Vec<_>>().join("/");
        match self.leaf(bounded).map_err(|problem| format!("space `{name}`: {problem}"))? {
            Some((shape, meaning)) => {
                let field = Field { name, shape, meaning };
                fields.placed.push(Placed { field, path: path.clone() });
            }
            None => fields.unread.push((name, self.kind.chars().take(40).collect())),
        }
        Ok(())
    }

    /// Axes and meaning of a space that is not made of others; none for a type that cannot be read.
    fn leaf(&self, bounded: bool) -> Result<Option<(Vec<usize>, Meaning)>, String> {
        let integer =
            |numbers: &Numbers, i: usize, otherwise: f64| numbers.all.get(i).map_or(otherwise, |x| *x) as i64;
        let choices = |count: usize, size: &dyn Fn(usize) -> i64| {
            if !(1..=MAX_INTS).contains(&count) {
                return Err(format!("{count} integers; expected 1 to {MAX_INTS}"));
            }
            let sizes = (0..count).map(|i| usize::try_from(size(i)).ok().filter(|n| *n < 1 << 31));
            let sizes =
                sizes.collect::<Option<Vec<usize>>>().ok_or("numbers of choices below 0 or beyond 2^31")?;
            Ok(Meaning::Choices { sizes, starts: (0..count).map(|i| integer(&self.start, i, 0.0)).collect() })
        };
        let len = |shape: &[usize]| {
            let len = shape.iter().try_fold(1usize, |len, n| len.checked_mul(*n));
            len.filter(|len| *len <= 1 << 24).ok_or_else(|| format!("shape {shape:?} is too large"))
        };
        Ok(Some(match self.kind.as_str() {
            "Discrete" => (Vec::new(), choices(1, &|_| integer(&self.n, 0, 0.0))?),
            "MultiDiscrete" => {
                let count = self.nvec.all.len();
                let shape = if len(&self.nvec.shape) == Ok(count) { &self.nvec.shape[..] } else { &[count] };
                (shape.to_vec(), choices(count, &|i| integer(&self.nvec, i, 0.0))?)
            }
            "MultiBinary" => {
                let shape = self.n.all.iter().map(|n| *n as usize).collect::<Vec<_>>();
                let shape = if shape.is_empty() { self.shape.clone().unwrap_or_default() } else { shape };
                let count = len(&shape)?;
                (shape, choices(count, &|_| 2)?)
            }
            "Box" => {
                let shape = self.shape.clone().ok_or("a Box without a shape")?;
                let count = len(&shape)?;
                (shape.clone(), self.numbers(&shape, count, bounded))
            }
            _ => return Ok(None),
        }))
    }

    /// What the numbers of a box are: bytes from 0 to 255 with two or three axes are pictures.
    fn numbers(&self, shape: &[usize], count: usize, bounded: bool) -> Meaning {
        let all = |numbers: &Numbers, bound: f64| numbers.all.iter().all(|x| *x == bound);
        let bytes = self.dtype.as_deref() == Some("uint8") && all(&self.low, 0.0) && all(&self.high, 255.0);
        match *shape {
            [_, _] if bytes => return Meaning::Picture,
            // Stacks of frames have their channels first.
            [first, _, last] if bytes => return if last > first { Meaning::Bytes } else { Meaning::Picture },
            _ if bytes => return Meaning::Bytes,
            _ => {}
        }
        let bounds = |numbers: &Numbers| {
            let fits = bounded && (numbers.all.len() == 1 || numbers.all.len() == count);
            fits.then(|| {
                // Beyond any 32-bit float is no bound.
                numbers.all.iter().map(|x| (*x as f32).clamp(f32::MIN, f32::MAX)).collect::<Vec<_>>()
            })
            .filter(|bounds| bounds.iter().all(|x| x.is_finite()))
        };
        match (bounds(&self.low), bounds(&self.high)) {
            (Some(low), Some(high)) => Meaning::Floats { low, high },
            _ => Meaning::unbounded(),
        }
    }
}

/// A number or nested lists of numbers; NaN is what JSON calls null.
#[derive(Default)]
struct Numbers {
    /// All numbers, one after the other.
    all: Vec<f64>,
    /// Lengths of the lists, from the outermost; only the outermost where inner lists differ.
    shape: Vec<usize>,
}

impl From<f64> for Numbers {
    fn from(x: f64) -> Self {
        Self { all: vec![x], shape: Vec::new() }
    }
}

impl<'de> Deserialize<'de> for Numbers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Gather;
        impl<'de> Visitor<'de> for Gather {
            type Value = Numbers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "numbers")
            }

            fn visit_bool<E: Error>(self, x: bool) -> Result<Numbers, E> {
                Ok(f64::from(u8::from(x)).into())
            }

            fn visit_f64<E: Error>(self, x: f64) -> Result<Numbers, E> {
                Ok(x.into())
            }

            fn visit_i64<E: Error>(self, x: i64) -> Result<Numbers, E> {
                Ok((x as f64).into())
            }

            fn visit_u64<E: Error>(self, x: u64) -> Result<Numbers, E> {
                Ok((x as f64).into())
            }

            fn visit_unit<E: Error>(self) -> Result<Numbers, E> {
                Ok(f64::NAN.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Numbers, A::Error> {
                let (mut all, mut count, mut inner, mut even) = (Vec::new(), 0, Vec::new(), true);
                while let Some(part) = parts.next_element::<Numbers>()? {
                    even &= count == 0 || part.shape == inner;
                    inner = part.shape;
                    all.extend(part.all);
                    count += 1;
                }
                let shape = if even { [&[count], &inner[..]].concat() } else { vec![count] };
                Ok(Numbers { all, shape })
            }
        }
        deserializer.deserialize_any(Gather)
    }
}

/// The parts of a dictionary or a tuple.
#[derive(Default)]
struct Subspaces(Vec<(Step, Described)>);

impl<'de> Deserialize<'de> for Subspaces {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Gather;
        impl<'de> Visitor<'de> for Gather {
            type Value = Vec<(Step, Described)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "spaces by name or in a list")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut parts: A) -> Result<Self::Value, A::Error> {
                let mut all = Vec::new();
                while let Some((name, space)) = parts.next_entry()? {
                    all.push((Step::Key(name), space));
                }
                Ok(all)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Self::Value, A::Error> {
                let mut all = Vec::new();
                while let Some(space) = parts.next_element()? {
                    all.push((Step::Index(all.len()), space));
                }
                Ok(all)
            }
        }
        deserializer.deserialize_any(Gather).map(Subspaces)
    }
}

#[cfg(test)]
mod tests {
    use elmur_base::Space;

    use super::*;

    #[test]
    fn spaces_of_every_type_are_read() {
        let text = r#"{"type": "Dict", "subspaces": {
            "a \"N": {"type": "Discrete", "dtype": "int64", "n": 5, "start": 2},
            "b": {"type": "Tuple", "subspaces": [
                {"type": "MultiDiscrete", "nvec": [[2, 3], [4, 5]], "start": [[0, 1], [0, 0]], "dtype": "int64"},
                {"type": "MultiBinary", "n": [2, 3]},
                {"type": "Box", "dtype": "float32", "shape": [2], "low": [-Infinity, 0.0], "high": [1.0, NaN]}]},
            "c": {"type": "Box", "dtype": "uint8", "shape": [40, 32, 3], "low": [0], "high": [255]},
            "d": {"type": "Box", "dtype": "float64", "shape": [], "low": -1.5, "high": Infinity},
            "e": {"type": "Box", "dtype": "uint8", "shape": [16, 84, 84], "low": 0, "high": 255}}}"#;
        let all = fields(text, true).unwrap().all().unwrap();
        let names: Vec<&str> = all.iter().map(|placed| placed.field.name.as_str()).collect();
        assert_eq!(names, ["a \"N", "b/0", "b/1", "b/2", "c", "d", "e"]);
        let spaces: Vec<Space> = all.iter().map(|placed| placed.field.space()).collect();
        assert_eq!(spaces[0], Space::Discrete { n: 5 });
        assert_eq!(spaces[1], Space::MultiDiscrete { sizes: vec![2, 3, 4, 5] });
        assert_eq!(all[1].field.shape, [2, 2], "the axes of nested lists are kept");
        assert_eq!(spaces[2], Space::MultiDiscrete { sizes: vec![2; 6] });
        assert_eq!(spaces[3], Space::unbounded([2]), "a bound that is NaN is none");
        assert_eq!(spaces[4], Space::Bytes { shape: vec![3, 40, 32] });
        assert_eq!(spaces[5], Space::Box { shape: vec![1], low: vec![-1.5], high: vec![f32::MAX] });
        assert_eq!(spaces[6], Space::Bytes { shape: vec![16, 84, 84] });
        let Meaning::Choices { starts, .. } = &all[0].field.meaning else { panic!("choices") };
        assert_eq!(starts, &[2]);
    }

    #[test]
    fn spaces_that_cannot_be_read_say_which() {
        for (text, problem) in [
            (r#"{"type": "Text", "max_length": 5}"#, "the space is of type Text"),
            (r#"{"type": "Dict", "subspaces": {"x": {"type": "Graph"}}}"#, "space `x` is of type Graph"),
            (r#"{"type": "Dict", "subspaces": {}}"#, "without parts"),
            (r#"{"type": "Box", "shape": [99999999, 99999999]}"#, "too large"),
            (r#"{"type": "Discrete", "n": 99999999999}"#, "beyond 2^31"),
            (r#"{"type": "MultiDiscrete", "nvec": []}"#, "0 integers"),
            (r#"{"type": "Box"}"#, "without a shape"),
            (r#"{"type": 3}"#, "a space: "),
            ("\"unclosed", "a space: "),
        ] {
            let error = fields(text, false).and_then(Fields::all).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }
}
