//! Arrays of other programs' datasets by what they mean: measurements, pictures, choices.

use elmur_base::Space;

use crate::array::{Array, Element, Numeric};
use crate::episode::Column;
use crate::keys::{ObservationKey, side_by_side};
use crate::npz::{MAX_INTS, below_zero, looks_channels_last};
use crate::recordings::INFERRED;

/// One array of an observation or an action.
#[derive(Debug, Clone)]
pub(crate) struct Field {
    pub(crate) name: String,
    /// Axes of one step, as stored.
    pub(crate) shape: Vec<usize>,
    pub(crate) meaning: Meaning,
}

/// What the numbers of a field mean.
#[derive(Debug, Clone)]
pub(crate) enum Meaning {
    /// Measurements between bounds, given once for all numbers or once per number.
    Floats { low: Vec<f32>, high: Vec<f32> },
    /// Bytes in the order in which they are stored.
    Bytes,
    /// Pictures of bytes [height, width, channels] or [height, width].
    Picture,
    /// One choice per integer: how many there are, and the number of the first.
    Choices { sizes: Vec<usize>, starts: Vec<i64> },
}

impl Meaning {
    /// Measurements without bounds.
    pub(crate) fn unbounded() -> Self {
        Meaning::Floats { low: vec![f32::MIN], high: vec![f32::MAX] }
    }
}

impl Field {
    /// An array of observations whose space nobody says: bytes of two or three axes are pictures, all else
    /// are measurements.
    pub(crate) fn observed(name: &str, shape: &[usize], element: Element) -> Self {
        let bytes = element.numeric == Numeric::Unsigned && element.size == 1;
        let meaning = match shape.len() {
            2 if bytes => Meaning::Picture,
            3 if bytes && looks_channels_last(shape) => Meaning::Picture,
            3 if bytes => Meaning::Bytes,
            _ => Meaning::unbounded(),
        };
        Self { name: name.to_owned(), shape: shape.to_vec(), meaning }
    }

    /// An array of actions whose space nobody says: integers and flags are choices.
    pub(crate) fn acted(name: &str, shape: &[usize], element: Element) -> Result<Self, String> {
        let len = shape.iter().try_fold(1usize, |len, n| len.checked_mul(*n)).unwrap_or(usize::MAX);
        let meaning = match element.numeric {
            Numeric::Float => Meaning::unbounded(),
            _ if len > MAX_INTS => {
                return Err(format!("`{name}`: {len} integers per action; expected floats"));
            }
            _ => Meaning::Choices { sizes: vec![INFERRED; len], starts: vec![0; len] },
        };
        // One choice is one choice, whether it lies in an axis of its own or not.
        let shape = match (&meaning, shape) {
            (Meaning::Choices { .. }, [1]) => &[],
            (_, shape) => shape,
        };
        Ok(Self { name: name.to_owned(), shape: shape.to_vec(), meaning })
    }

    /// The space of the field's numbers in memory.
    pub(crate) fn space(&self) -> Space {
        let shape = || if self.shape.is_empty() { vec![1] } else { self.shape.clone() };
        match &self.meaning {
            Meaning::Floats { low, high } => {
                Space::Box { shape: shape(), low: low.clone(), high: high.clone() }
            }
            Meaning::Bytes => Space::Bytes { shape: shape() },
            Meaning::Picture => Space::Bytes {
                shape: match self.shape[..] {
                    [height, width, channels] => vec![channels, height, width],
                    _ => [&[1], &self.shape[..]].concat(),
                },
            },
            Meaning::Choices { sizes, .. } => match (&self.shape[..], &sizes[..]) {
                ([], [n]) => Space::Discrete { n: *n },
                _ => Space::MultiDiscrete { sizes: sizes.clone() },
            },
        }
    }

    /// What metadata note of the field.
    pub(crate) fn key(&self) -> ObservationKey {
        let channels_last = matches!(self.meaning, Meaning::Picture);
        ObservationKey { name: self.name.clone(), shape: self.shape.clone(), channels_last }
    }

    /// Checks the shape of stored numbers, shifts choices to begin at 0 and turns pictures.
    pub(crate) fn prepared(&self, mut array: Array) -> Result<Array, String> {
        let name = &self.name;
        let width = self.shape.iter().try_fold(1usize, |len, n| len.checked_mul(*n));
        if Some(array.width()) != width {
            return Err(format!("`{name}`: expected {:?} per step, got {:?}", self.shape, &array.shape[1..]));
        }
        array.shape.truncate(1);
        array.shape.extend(&self.shape);
        match &self.meaning {
            Meaning::Picture => array.channels_first().map_err(|problem| format!("`{name}`: {problem}")),
            Meaning::Choices { starts, .. } => {
                if let Column::U8(x) = array.numbers {
                    array.numbers = Column::I32(x.into_iter().map(i32::from).collect());
                }
                if let Column::I32(numbers) = &mut array.numbers {
                    for (i, number) in numbers.iter_mut().enumerate() {
                        let shifted = i64::from(*number) - starts[i % starts.len().max(1)];
                        *number = i32::try_from(shifted).map_err(|_| below_zero(name, *number))?;
                        if *number < 0 {
                            return Err(below_zero(name, *number));
                        }
                    }
                }
                Ok(array)
            }
            _ => Ok(array),
        }
    }
}

/// The space of observations of some fields: that of a single one, a tuple of several.
pub(crate) fn observation_space(fields: &[Field]) -> Space {
    side_by_side(fields.iter().map(Field::space).collect())
}

/// The space of actions of some fields. Policies have one head, so that several fields of measurements become
/// one box and several choices one list of choices.
pub(crate) fn action_space(fields: &[Field]) -> Space {
    if let [field] = fields {
        return field.space();
    }
    let all_floats = fields.iter().all(|field| matches!(field.meaning, Meaning::Floats { .. }));
    let all_choices = fields.iter().all(|field| matches!(field.meaning, Meaning::Choices { .. }));
    let width = |field: &Field| field.shape.iter().product::<usize>();
    if all_floats {
        let bounds = |high: bool| {
            let bound = |field: &Field| match &field.meaning {
                Meaning::Floats { low, high: upper } => {
                    let bound = if high { upper } else { low };
                    (0..width(field)).map(|i| elmur_base::bound_at(bound, i)).collect::<Vec<_>>()
                }
                _ => Vec::new(),
            };
            fields.iter().flat_map(bound).collect()
        };
        return Space::Box {
            shape: vec![fields.iter().map(width).sum()],
            low: bounds(false),
            high: bounds(true),
        };
    }
    if all_choices {
        let sizes = |field: &Field| match &field.meaning {
            Meaning::Choices { sizes, .. } => sizes.clone(),
            _ => Vec::new(),
        };
        return Space::MultiDiscrete { sizes: fields.iter().flat_map(sizes).collect() };
    }
    observation_space(fields)
}

/// The columns of an action space of arrays of its fields.
pub(crate) fn action_columns(
    mut arrays: Vec<(String, Array)>,
    space: &Space,
    limit: u64,
) -> Result<Vec<Column>, String> {
    if arrays.len() > 1 && !matches!(space, Space::Tuple { .. }) {
        let joined = Array::beside(arrays.into_iter().map(|(_, array)| array).collect())?;
        arrays = vec![("actions".to_owned(), joined)];
    }
    Array::columns_of(arrays, space, limit)
}
