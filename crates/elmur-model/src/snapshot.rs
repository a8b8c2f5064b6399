//! What rows of a session remember, as a value: saved, restored, compared.
//!
//! File format: safetensors. `times` is i64 `[rows]`, `clock` i64 `[2]` = (tokens per step, steps per
//! window), `seeds` and `draws` i64 `[rows]` the random streams; every other tensor is a session state by its
//! name, [rows, ...]: what the architecture carries, and `window.<field>` for sessions that keep the steps of
//! the open window. The note `time_states` names the states that hold times, the note `fingerprint` the
//! policy.

use std::fmt;
use std::path::Path;

use elmur_base::files::write_atomic;

use crate::checkpoint::FINGERPRINT;
use crate::error::{Error, Result};
use crate::fingerprint::Fingerprint;
use crate::tensors::{self, HostTensor, Notes, TensorData, Tensors};

/// Everything that some rows of a session remember.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    pub(crate) clock: Clock,
    pub(crate) times: Vec<u64>,
    /// Seed and number of draws of each row's random stream.
    pub(crate) draws: Vec<(u64, u64)>,
    /// Names of the states that hold times.
    pub(crate) time_states: Vec<String>,
    pub(crate) tensors: Tensors,
    /// The policy whose memory this is; unknown to snapshots from before it was written.
    pub(crate) fingerprint: Option<Fingerprint>,
}

/// How a session counts: tokens per environment step, environment steps per window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Clock {
    pub per_step: u64,
    pub steps: u64,
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "windows of {} steps of {} tokens", self.steps, self.per_step)
    }
}

/// Environment steps that a session counts to: two thousand years at a thousand steps a second, far from any
/// overflow.
pub(crate) const MAX_TIME: u64 = 1 << 46;

/// Whether a token's time (-1: never) can be known to a row that has taken `steps` steps.
pub(crate) fn time_is_possible(token: i64, steps: u64, per_step: usize) -> bool {
    (-1..(steps as i64 + 1) * per_step as i64).contains(&token)
}

const TIME_STATES: &str = "time_states";

impl Snapshot {
    /// Environment steps since each row's episode began.
    pub fn times(&self) -> &[u64] {
        &self.times
    }

    /// Seed of each row's episode: what the row was last reset with.
    pub fn seeds(&self) -> Vec<u64> {
        self.draws.iter().map(|(seed, _)| *seed).collect()
    }

    /// All states by name, [rows, ...].
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// The fingerprint of the policy whose memory this is; none in files of earlier versions.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.fingerprint
    }

    /// The state of this name, which must have this shape.
    pub(crate) fn tensor(&self, name: &str, shape: &[usize]) -> Result<&TensorData> {
        match self.tensors.get(name) {
            Some(tensor) if tensor.shape == shape => Ok(&tensor.data),
            Some(tensor) => {
                let got = format!("{:?}", tensor.shape);
                Err(Error::input("restore", format!("`{name}` {shape:?}"), got))
            }
            None => Err(Error::input("restore", format!("a tensor `{name}`"), "none")),
        }
    }

    /// The same memory `steps` environment steps later, with every time in it. Differences of times stay what
    /// they were, so where an architecture sees only those, it acts the same. `steps` must be a whole number
    /// of windows.
    pub fn shifted(&self, steps: u64) -> Result<Self> {
        let latest = self.times.iter().copied().max().unwrap_or(0);
        if !steps.is_multiple_of(self.clock.steps) || steps > MAX_TIME || latest + steps > MAX_TIME {
            let expected = format!("a multiple of {} that ends before {MAX_TIME}", self.clock.steps);
            return Err(Error::input("shift", expected, steps.to_string()));
        }
        let mut shifted = self.clone();
        shifted.times.iter_mut().for_each(|t| *t += steps);
        let tokens = (steps * self.clock.per_step) as i64;
        for name in &self.time_states {
            if let Some(TensorData::I64(times)) = shifted.tensors.get_mut(name).map(|t| &mut t.data) {
                times.iter_mut().filter(|a| **a >= 0).for_each(|a| *a = a.saturating_add(tokens));
            }
        }
        Ok(shifted)
    }

    /// As bytes of a safetensors file.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut all = self.tensors.clone();
        let mut integers = |name: &str, x: Vec<i64>| {
            all.insert(name.to_owned(), HostTensor { shape: vec![x.len()], data: TensorData::I64(x) });
        };
        integers("times", self.times.iter().map(|t| *t as i64).collect());
        integers("clock", vec![self.clock.per_step as i64, self.clock.steps as i64]);
        integers("seeds", self.draws.iter().map(|(seed, _)| *seed as i64).collect());
        integers("draws", self.draws.iter().map(|(_, next)| *next as i64).collect());
        let mut notes = Notes::from([(TIME_STATES.to_owned(), self.time_states.join(" "))]);
        if let Some(fingerprint) = self.fingerprint {
            notes.insert(FINGERPRINT.to_owned(), fingerprint.to_string());
        }
        tensors::serialise_with(&all, &notes)
            .map_err(|problem| Error::input("snapshot", "serialisable tensors", problem))
    }

    /// From bytes of [`Snapshot::to_bytes`]. Restoring checks the states against the session.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = |got: &str| Error::input("snapshot", "a saved session snapshot", got);
        let (mut tensors, notes) = tensors::parse_own(bytes).map_err(|problem| bad(&problem))?;
        let fingerprint = notes.get(FINGERPRINT).map(|text| text.parse()).transpose();
        let fingerprint = fingerprint.map_err(|problem: String| bad(&problem))?;
        let mut integers = |name: &str| match tensors.remove(name).map(|t| t.data) {
            Some(TensorData::I64(x)) => Some(x),
            _ => None,
        };
        let within = |x: &Vec<i64>| x.iter().all(|x| (0..=MAX_TIME as i64).contains(x));
        let times = integers("times").filter(within).ok_or_else(|| bad("no valid `times`"))?;
        let clock: Option<[i64; 2]> = integers("clock").and_then(|c| c.try_into().ok());
        let [per_step, steps] = clock
            .filter(|[per_step, steps]| (1..=3).contains(per_step) && (1..=1 << 32).contains(steps))
            .ok_or_else(|| bad("no valid `clock`"))?;
        // Snapshots from before sampling was part of a session have no streams.
        let streams = |x: Option<Vec<i64>>| x.unwrap_or_else(|| vec![0; times.len()]);
        let (seeds, draws) = (streams(integers("seeds")), streams(integers("draws")));
        if seeds.len() != times.len() || draws.len() != times.len() || draws.iter().any(|n| *n < 0) {
            return Err(bad("no valid `seeds` and `draws`"));
        }
        let time_states = match notes.get(TIME_STATES) {
            Some(note) => note.split_whitespace().map(str::to_owned).collect(),
            // Snapshots from before they said so have times in ELMUR's anchors only.
            None => tensors.keys().filter(|name| name.starts_with("anchors.")).cloned().collect(),
        };
        Ok(Self {
            clock: Clock { per_step: per_step as u64, steps: steps as u64 },
            times: times.iter().map(|t| *t as u64).collect(),
            draws: seeds.into_iter().zip(draws).map(|(seed, next)| (seed as u64, next as u64)).collect(),
            time_states,
            tensors,
            fingerprint,
        })
    }

    /// Writes a file, aside and renamed.
    pub fn save(&self, path: &Path) -> Result<()> {
        Ok(write_atomic(path, &self.to_bytes()?)?)
    }

    /// Reads a file of [`Snapshot::save`].
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = tensors::read_bytes(path)?;
        Self::from_bytes(&bytes).map_err(|e| Error::file(path, e.to_string()))
    }
}
