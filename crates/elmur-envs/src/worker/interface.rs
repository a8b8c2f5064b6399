//! What a worker's environment looks like on the wire: which array holds which part of a space.

use elmur_base::{Leaf, Spaces};
use serde::Deserialize;

/// The arrays of observations and actions, and what is known about the environment.
#[derive(Debug, Clone, PartialEq)]
pub struct Interface {
    /// Observation and action space.
    pub spaces: Spaces,
    /// The array of each leaf of the observation space, in their order.
    pub observation: Vec<Part>,
    /// The array of each leaf of the action space, in their order.
    pub action: Vec<Part>,
    /// Number of steps of the longest episode, where there is a limit.
    pub max_steps: Option<u64>,
    /// Return of a very good episode, where it is known.
    pub good_return: Option<f64>,
    /// Whether the worker answers what an expert would do (`oracle`).
    pub has_expert: bool,
}

/// An array on the wire.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Part {
    /// Name of the array.
    pub name: String,
    /// Type of the numbers.
    pub dtype: Dtype,
    /// Length of each axis.
    pub shape: Vec<usize>,
    /// Whether bytes [height, width, channels] are to become [channels, height, width].
    #[serde(default)]
    pub channels_last: bool,
}

/// Types of numbers in arrays, little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// Bytes: leaves of bytes.
    U8,
    /// 32-bit floats: leaves of floats.
    F32,
    /// 64-bit integers: leaves of integers.
    I64,
}

impl Dtype {
    /// Name of the type on the wire.
    pub(super) fn name(self) -> &'static str {
        match self {
            Dtype::U8 => "u8",
            Dtype::F32 => "f32",
            Dtype::I64 => "i64",
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Dtype::U8 => 1,
            Dtype::F32 => 4,
            Dtype::I64 => 8,
        }
    }
}

impl Part {
    /// Number of numbers; none if there are more than any array has.
    pub(super) fn numbers(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |total, n| total.checked_mul(*n as u64))
    }

    /// Number of bytes on the wire; none if there are more than any array has.
    pub(super) fn bytes(&self) -> Option<u64> {
        self.numbers()?.checked_mul(self.dtype.bytes())
    }

    /// The array with its type and shape, for errors.
    pub(super) fn describe(&self) -> String {
        let name: String = self.name.chars().take(40).collect();
        let shape: Vec<usize> = self.shape.iter().copied().take(8).collect();
        format!("{name:?} {} {shape:?}", self.dtype.name())
    }

    fn fits(&self, leaf: &Leaf<'_>) -> bool {
        let same = self.numbers() == Some(leaf.len() as u64);
        let last = |shape: &[usize]| {
            matches!((&self.shape[..], shape), ([h, w, c], [channels, height, width])
                if (h, w, c) == (height, width, channels))
        };
        match (self.dtype, leaf) {
            (Dtype::U8, Leaf::Bytes { shape }) => same && (!self.channels_last || last(shape)),
            (Dtype::F32, Leaf::Floats { .. }) | (Dtype::I64, Leaf::Ints(_)) => same && !self.channels_last,
            _ => false,
        }
    }
}

impl Interface {
    /// Checks that every leaf of both spaces has its array.
    pub(super) fn check(&self) -> Result<(), String> {
        self.spaces.validate().map_err(|error| error.to_string())?;
        let Spaces { observation, action } = &self.spaces;
        for (what, space, parts) in
            [("observation", observation, &self.observation), ("action", action, &self.action)]
        {
            let leaves = space.leaves();
            if leaves.len() != parts.len() {
                return Err(format!("{what}: {} arrays for {} leaves", parts.len(), leaves.len()));
            }
            for (i, (leaf, part)) in leaves.iter().zip(parts).enumerate() {
                if !part.fits(leaf) {
                    return Err(format!(
                        "{what}: array {} does not fit its leaf of the space",
                        part.describe()
                    ));
                }
                if parts[..i].iter().any(|other| other.name == part.name) {
                    return Err(format!("{what}: two arrays are called {:?}", part.name));
                }
            }
        }
        Ok(())
    }
}

/// Copies an image [height, width, channels] to [channels, height, width].
pub(super) fn channels_first(image: &[u8], channels: usize, target: &mut [u8]) {
    let pixels = image.len() / channels.max(1);
    if pixels == 0 {
        return;
    }
    for (channel, plane) in target.chunks_exact_mut(pixels).enumerate() {
        for (to, pixel) in plane.iter_mut().zip(image.chunks_exact(channels)) {
            *to = pixel[channel];
        }
    }
}
