//! The inputs of a step's programs, from the rows listed and their times.

use elmur_base::{Field, Values, Widths};
use elmur_engine::DType;

use super::history::{History, Shown};
use super::programs::{Part, StepProgram};
use super::{Group, RowState};
use crate::ends::{Encoder, TokenFormat};
use crate::error::{Error, Result};
use crate::net::{Progress, Source, fill_following, position_encodings};
use crate::phase::{Phase, Window};
use crate::window::token_times;

/// What the inputs of a step's programs follow from.
pub(super) struct Moment<'a> {
    pub phase: Phase,
    pub window: Window,
    pub tokens: TokenFormat,
    /// Encoders of the observation's leaves.
    pub observation: &'a [Encoder],
    /// Environment step of every row.
    pub times: &'a [u64],
    /// The rows at hand, and their numbers in what the caller gave.
    pub group: &'a Group,
    /// Return-to-go of every row.
    pub returns: &'a [f32],
    /// Whether the window ends with this run.
    pub closing: bool,
    /// Seeds of every row's episode, among others.
    pub states: &'a [RowState],
}

impl Moment<'_> {
    /// The row of entry `i` of a part; entries beyond its end repeat the last.
    fn row(&self, part: Part, i: usize) -> usize {
        self.group.rows[part.first + i.min(part.count - 1)]
    }

    /// The number of entry `i` of a part in what the caller gave.
    fn entry(&self, part: Part, i: usize) -> usize {
        self.group.entries[part.first + i.min(part.count - 1)]
    }

    /// Token times begin here: the window's first token, or the step's.
    fn first_time(&self, row: usize) -> i64 {
        let (time, length) = (self.times[row], self.window.steps as u64);
        let step = if self.phase == Phase::Close { time / length * length } else { time };
        (step * self.tokens.per_step() as u64) as i64
    }

    /// Number, in the row's window, of the first token of the phase.
    fn position(&self, row: usize) -> usize {
        let after = if self.phase == Phase::Act { self.tokens.observation_index() + 1 } else { 0 };
        (self.times[row] % self.window.steps as u64) as usize * self.tokens.per_step() + after
    }

    /// How far a row is, in a phase of a step.
    fn progress(&self, row: usize) -> Progress {
        let (first, before) = (self.position(row), self.tokens.observation_index() + 1);
        let tokens = match self.phase {
            Phase::Observe => first + before,
            Phase::Act => first - before + self.tokens.per_step(),
            _ => first + self.tokens.per_step(),
        };
        Progress {
            window: self.times[row] / self.window.steps as u64,
            first,
            tokens,
            seed: self.states[row].draws.seed,
        }
    }

    /// Fills the inputs of a phase's program. `values` are observations or actions, one entry per listed row.
    pub fn fill(&self, to: &mut StepProgram, part: Part, values: Values<'_>, widths: Widths) -> Result<()> {
        let n = to.rows;
        let program = &mut to.program;
        for feed in &to.feeds {
            let name = &feed.name;
            match &feed.source {
                &Source::Field(field @ (Field::Observation(_) | Field::Action)) => {
                    let offset = match field {
                        Field::Observation(leaf) if self.phase == Phase::Observe => self.offset(leaf),
                        Field::Action if self.phase == Phase::Act => 0,
                        _ => return Err(wrong(name)),
                    };
                    let entry = |i: usize| self.entry(part, i);
                    match program.input_type(name)?.dtype {
                        DType::I32 => {
                            place(program.input_mut(name)?, n, values.ints, widths.ints, offset, entry)
                        }
                        DType::U8 => {
                            place(program.input_mut(name)?, n, values.bytes, widths.bytes, offset, entry)
                        }
                        _ => {
                            let input = program.input_mut::<f32>(name)?;
                            place(input, n, values.floats, widths.floats, offset, entry);
                        }
                    }
                }
                Source::Field(Field::ReturnToGo) => {
                    let input = program.input_mut::<f32>(name)?;
                    (0..n).for_each(|i| input[i] = self.returns[self.row(part, i)]);
                }
                Source::Field(_) => return Err(wrong(name)),
                &Source::Times { first, count, .. } => {
                    let input = program.input_mut::<i64>(name)?;
                    for (i, input) in input.chunks_exact_mut(count).enumerate() {
                        let start = self.first_time(self.row(part, i)) + first as i64;
                        input.iter_mut().zip(start..).for_each(|(to, time)| *to = time);
                    }
                }
                Source::Newest => {
                    let input = program.input_mut::<i64>(name)?;
                    let per_step = self.tokens.per_step() as i64;
                    let newest = |row: usize| (self.times[row] as i64 + 1) * per_step - 1;
                    (0..n).for_each(|i| input[i] = newest(self.row(part, i)));
                }
                Source::Rows => {
                    let input = program.input_mut::<i32>(name)?;
                    (0..n).for_each(|i| input[i] = self.row(part, i) as i32);
                }
                Source::Position => {
                    let input = program.input_mut::<i32>(name)?;
                    (0..n).for_each(|i| input[i] = self.position(self.row(part, i)) as i32);
                }
                &Source::Places { count, before } => {
                    let window = before + self.window.steps * self.tokens.per_step();
                    let input = program.input_mut::<i32>(name)?;
                    for (i, input) in input.chunks_exact_mut(count).enumerate() {
                        let row = self.row(part, i);
                        let start = (row * window + before + self.position(row)) as i32;
                        input.iter_mut().zip(start..).for_each(|(to, place)| *to = place);
                    }
                }
                Source::Integers(_) | Source::Floats(_) => {
                    fill_following(program, feed, (0..n).map(|i| self.progress(self.row(part, i))))?;
                }
                Source::Encodings { .. } | Source::Seen => {
                    return Err(wrong(name));
                }
            }
        }
        Ok(())
    }

    /// Numbers of its kind before leaf `leaf` in an observation.
    fn offset(&self, leaf: usize) -> usize {
        let kind = self.observation[leaf].kind();
        self.observation[..leaf].iter().filter(|e| e.kind() == kind).map(Encoder::len).sum()
    }

    /// The steps of a row that its window shows, the current one included.
    pub fn shown(&self, row: usize) -> Shown {
        let (time, length) = (self.times[row], self.window.steps as u64);
        let start =
            if self.window.slides { (time + 1).saturating_sub(length) } else { time / length * length };
        Shown { row, start, count: (time - start) as usize + 1 }
    }

    /// Number, in the row's window, of the current observation's token.
    pub fn observation_token(&self, row: usize) -> usize {
        (self.shown(row).count - 1) * self.tokens.per_step() + self.tokens.observation_index()
    }

    /// Fills the inputs of a program that runs whole windows.
    pub fn fill_window(&self, to: &mut StepProgram, part: Part, history: &History) -> Result<()> {
        let (n, per_step) = (to.rows, self.tokens.per_step());
        let program = &mut to.program;
        // Tokens that exist: all of the window's steps when it closes, up to the observation before.
        let seen = |row: usize| {
            if self.closing { self.shown(row).count * per_step } else { self.observation_token(row) + 1 }
        };
        let start = |row: usize| self.shown(row).start * per_step as u64;
        history.fill(program, (0..n).map(|i| self.shown(self.row(part, i))))?;
        for feed in &to.feeds {
            let name = &feed.name;
            match &feed.source {
                Source::Field(_) => {}
                &Source::Times { count, newest_first, .. } => {
                    let input = program.input_mut::<i64>(name)?;
                    for (i, input) in input.chunks_exact_mut(count).enumerate() {
                        let row = self.row(part, i);
                        input.fill(start(row) as i64);
                        let times = token_times(start(row), seen(row), newest_first);
                        input.iter_mut().zip(times).for_each(|(to, time)| *to = time);
                    }
                }
                Source::Newest => {
                    let input = program.input_mut::<i64>(name)?;
                    let newest = |row: usize| (start(row) + seen(row) as u64) as i64 - 1;
                    (0..n).for_each(|i| input[i] = newest(self.row(part, i)));
                }
                &Source::Encodings { count, width } => {
                    let input = program.input_mut::<f32>(name)?;
                    for (i, input) in input.chunks_exact_mut(count * width).enumerate() {
                        let table = position_encodings(start(self.row(part, i)), count, width);
                        input.iter_mut().zip(table).for_each(|(to, x)| *to = x as f32);
                    }
                }
                Source::Rows => {
                    let input = program.input_mut::<i32>(name)?;
                    (0..n).for_each(|i| input[i] = self.row(part, i) as i32);
                }
                Source::Seen => {
                    let window = self.window.steps * per_step;
                    let input = program.input_mut::<bool>(name)?;
                    let per_row = input.len() / n;
                    for (i, input) in input.chunks_exact_mut(per_row).enumerate() {
                        let seen = seen(self.row(part, i));
                        for query in input.chunks_exact_mut(window) {
                            query.iter_mut().enumerate().for_each(|(t, to)| *to = t < seen);
                        }
                    }
                }
                Source::Integers(_) | Source::Floats(_) => {
                    let progress = |row: usize| Progress {
                        window: self.times[row] / self.window.steps as u64,
                        first: 0,
                        tokens: seen(row),
                        seed: self.states[row].draws.seed,
                    };
                    fill_following(program, feed, (0..n).map(|i| progress(self.row(part, i))))?;
                }
                Source::Position | Source::Places { .. } => {
                    return Err(Error::input("window", "inputs of whole windows", format!("`{name}`")));
                }
            }
        }
        Ok(())
    }
}

/// A single step has no such input.
fn wrong(name: &str) -> Error {
    Error::input("step", "inputs of a single step", format!("`{name}`"))
}

/// Puts one leaf of some entries, `width` numbers each of which the leaf begins at `offset`, into an input [n, 1,
/// leaf], whose row i is entry `entry(i)`.
fn place<T: Copy>(
    input: &mut [T],
    n: usize,
    values: &[T],
    width: usize,
    offset: usize,
    entry: impl Fn(usize) -> usize,
) {
    let each = input.len() / n;
    for (i, input) in input.chunks_exact_mut(each).enumerate() {
        let at = entry(i) * width + offset;
        input.copy_from_slice(&values[at..at + each]);
    }
}
