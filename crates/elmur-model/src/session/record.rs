//! What a recording session saw inside its policy.

use std::collections::BTreeMap;

use elmur_engine::DType;

use super::programs::StepProgram;
use crate::error::Result;
use crate::net::Tap;
use crate::tensors::TensorData;

/// Values that the architecture offered to look at, by name (see [`Net::tap`](crate::Net::tap)).
pub type Taps = BTreeMap<String, Tapped>;

/// One value to look at, row by row.
#[derive(Debug, Clone, PartialEq)]
pub struct Tapped {
    /// Axes of one row.
    pub shape: Vec<usize>,
    /// The rows of the step, one after the other.
    pub data: TensorData,
}

/// What a session did in one step, if it records.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StepRecord {
    /// Rows that acted.
    pub rows: Vec<usize>,
    /// Environment step of each of them.
    pub times: Vec<u64>,
    /// Values of the step.
    pub taps: Taps,
    /// Windows that ended with the step and left something behind; empty for architectures that carry nothing
    /// beyond a step.
    pub closed: Vec<ClosedRecord>,
}

/// What happened at the end of a window.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ClosedRecord {
    /// Rows whose window ended.
    pub rows: Vec<usize>,
    /// Values of the window's end.
    pub taps: Taps,
}

/// Adds the taps (those that are `kept`) of a program's last run, for its first `count` rows, to those of
/// earlier parts of the step. `token(i)` is the current observation's token of row i.
pub(super) fn collect(
    taps: &mut Taps,
    of: &StepProgram,
    count: usize,
    token: impl Fn(usize) -> usize,
    kept: impl Fn(&Tap) -> bool,
) -> Result<()> {
    for tap in of.taps.iter().filter(|tap| kept(tap)) {
        let ty = of.program.output_type(&tap.name)?;
        let mut shape = ty.shape[1..].to_vec();
        let tokens = if tap.by_token { shape.remove(1) } else { 1 };
        let (outer, inner) = if tap.by_token { (shape[0], shape[1..].iter().product()) } else { (1, 0) };
        let row = ty.len() / of.rows;
        let pick = |i: usize| -> Vec<usize> {
            if !tap.by_token {
                return (i * row..(i + 1) * row).collect();
            }
            // A phase holds few tokens, the observation's last; a window holds all.
            let at = token(i).min(tokens - 1);
            let start = |o: usize| i * row + (o * tokens + at) * inner;
            (0..outer).flat_map(|o| start(o)..start(o) + inner).collect()
        };
        let places = (0..count).flat_map(pick);
        let data = match ty.dtype {
            DType::I32 => {
                let all = of.program.get::<i32>(&tap.name)?;
                TensorData::I64(places.map(|i| i64::from(all[i])).collect())
            }
            DType::I64 => {
                let all = of.program.get::<i64>(&tap.name)?;
                TensorData::I64(places.map(|i| all[i]).collect())
            }
            _ => {
                let all = of.program.get::<f32>(&tap.name)?;
                TensorData::F32(places.map(|i| all[i]).collect())
            }
        };
        match taps.get_mut(&tap.name) {
            Some(before) => before.data.extend(data),
            None => {
                taps.insert(tap.name.clone(), Tapped { shape, data });
            }
        }
    }
    Ok(())
}
