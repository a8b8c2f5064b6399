//! The newest steps of every row, for architectures whose window is run again at every step.

use elmur_base::{Field, FieldMut, Kind, Values, Widths};
use elmur_engine::Program;

use crate::ends::{Encoder, Ends, Token};
use crate::error::{Error, Result};
use crate::tensors::TensorData;

/// Numbers of one field, [rows, steps, each]; step t of an episode lies at t mod steps.
#[derive(Debug)]
pub(super) struct Column {
    pub field: Field,
    /// Name of the program's input, and of the tensor in snapshots behind `window.`.
    pub name: String,
    pub shape: Vec<usize>,
    each: usize,
    /// For integers: how many values each of them has.
    limits: Vec<usize>,
    data: Data,
}

#[derive(Debug)]
enum Data {
    F32(Vec<f32>),
    I32(Vec<i32>),
    U8(Vec<u8>),
}

/// The newest steps of every row.
#[derive(Debug)]
pub(crate) struct History {
    pub(super) columns: Vec<Column>,
    pub(super) steps: usize,
}

/// The stretch of a row's steps that a window shows: steps `start..start + count` of the episode.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown {
    pub row: usize,
    pub start: u64,
    pub count: usize,
}

impl History {
    pub fn new(ends: Ends<'_>, rows: usize, steps: usize) -> Result<Self> {
        let mut columns = Vec::new();
        let mut add = |field: Field, name: String, kind: Kind, shape: Vec<usize>, limits: Vec<usize>| {
            let each: usize = shape.iter().product();
            let len = rows.saturating_mul(steps).saturating_mul(each);
            let data = match kind {
                Kind::Floats => Data::F32(zeros(len)?),
                Kind::Ints => Data::I32(zeros(len)?),
                Kind::Bytes => Data::U8(zeros(len)?),
            };
            columns.push(Column { field, name, shape, each, limits, data });
            Ok::<(), Error>(())
        };
        for (leaf, encoder) in ends.observation.iter().enumerate() {
            let one = ends.observation.len() == 1;
            let name = if one { "observation".to_owned() } else { format!("observation.{leaf}") };
            let limits = match encoder {
                Encoder::Categorical { sizes, .. } => sizes.clone(),
                _ => Vec::new(),
            };
            add(Field::Observation(leaf), name, encoder.kind(), encoder.shape(), limits)?;
        }
        if ends.tokens.has(Token::Action) {
            let kind = if ends.action.is_discrete() { Kind::Ints } else { Kind::Floats };
            // One more than the choices stands for none.
            let limits = ends.action.sizes().iter().map(|size| size + 1).collect();
            add(Field::Action, "action".to_owned(), kind, vec![ends.action.dim()], limits)?;
        }
        if ends.tokens.has(Token::Return) {
            add(Field::ReturnToGo, "returns".to_owned(), Kind::Floats, vec![1], Vec::new())?;
        }
        Ok(Self { columns, steps })
    }

    /// Forgets a row's steps.
    pub fn clear(&mut self, row: usize) {
        let steps = self.steps;
        for column in &mut self.columns {
            let range = row * steps * column.each..(row + 1) * steps * column.each;
            match &mut column.data {
                Data::F32(data) => data[range].fill(0.0),
                Data::I32(data) => data[range].fill(0),
                Data::U8(data) => data[range].fill(0),
            }
        }
    }

    /// Keeps entry `entry` of an observation as step `time` of a row.
    pub fn observe(&mut self, row: usize, time: u64, seen: Values<'_>, widths: Widths, entry: usize) {
        let (mut floats, mut ints, mut bytes) = (0, 0, 0);
        let steps = self.steps;
        for column in &mut self.columns {
            if !matches!(column.field, Field::Observation(_)) {
                continue;
            }
            let each = column.each;
            let at = (row * steps + (time % steps as u64) as usize) * each;
            match &mut column.data {
                Data::F32(data) => {
                    let from = entry * widths.floats + floats;
                    data[at..at + each].copy_from_slice(&seen.floats[from..from + each]);
                    floats += each;
                }
                Data::I32(data) => {
                    let from = entry * widths.ints + ints;
                    data[at..at + each].copy_from_slice(&seen.ints[from..from + each]);
                    ints += each;
                }
                Data::U8(data) => {
                    let from = entry * widths.bytes + bytes;
                    data[at..at + each].copy_from_slice(&seen.bytes[from..from + each]);
                    bytes += each;
                }
            }
        }
    }

    /// Keeps other numbers (an action or a return) of step `time` of a row, where the token format has them.
    pub fn keep(&mut self, field: Field, row: usize, time: u64, values: Values<'_>) {
        let steps = self.steps;
        for column in self.columns.iter_mut().filter(|column| column.field == field) {
            let at = (row * steps + (time % steps as u64) as usize) * column.each;
            match &mut column.data {
                Data::F32(data) => data[at..at + column.each].copy_from_slice(values.floats),
                Data::I32(data) => data[at..at + column.each].copy_from_slice(values.ints),
                Data::U8(_) => {}
            }
        }
    }

    /// Puts the shown steps of each row into a program's inputs [rows, steps, ...], oldest first. Steps not
    /// yet there keep whatever the input held: they come later, and no earlier step looks at them.
    pub fn fill(&self, program: &mut Program, shown: impl Iterator<Item = Shown> + Clone) -> Result<()> {
        for column in &self.columns {
            if program.input_type(&column.name).is_err() {
                continue; // an architecture need not look at everything
            }
            match &column.data {
                Data::F32(data) => {
                    self.copy(column.each, data, program.input_mut(&column.name)?, shown.clone())
                }
                Data::I32(data) => {
                    self.copy(column.each, data, program.input_mut(&column.name)?, shown.clone())
                }
                Data::U8(data) => {
                    self.copy(column.each, data, program.input_mut(&column.name)?, shown.clone())
                }
            }
        }
        Ok(())
    }

    /// Copies a field of the shown steps of a row, oldest first, to the beginning of `out`.
    pub fn read(&self, field: Field, shown: Shown, out: FieldMut<'_>) -> Result<()> {
        let missing = || Error::input("plan", "a field that the session keeps", field.to_string());
        let column = self.columns.iter().find(|column| column.field == field).ok_or_else(missing)?;
        let numbers = shown.count * column.each;
        if out.len() < numbers {
            let expected = format!("room for {numbers} numbers of {field}");
            return Err(Error::input("plan", expected, out.len().to_string()));
        }
        let got = out.type_name();
        match (&column.data, out) {
            (Data::F32(data), FieldMut::F32(out)) => self.copy_row(column.each, data, out, shown),
            (Data::I32(data), FieldMut::I32(out)) => self.copy_row(column.each, data, out, shown),
            (Data::U8(data), FieldMut::U8(out)) => self.copy_row(column.each, data, out, shown),
            _ => return Err(Error::input("plan", format!("the type of {field}"), got)),
        }
        Ok(())
    }

    fn copy<T: Copy>(&self, each: usize, data: &[T], input: &mut [T], shown: impl Iterator<Item = Shown>) {
        for (shown, input) in shown.zip(input.chunks_exact_mut(self.steps * each)) {
            self.copy_row(each, data, input, shown);
        }
    }

    fn copy_row<T: Copy>(&self, each: usize, data: &[T], to: &mut [T], shown: Shown) {
        let Shown { row, start, count } = shown;
        let whole = self.steps * each;
        let data = &data[row * whole..(row + 1) * whole];
        let first = (start % self.steps as u64) as usize;
        let until_end = count.min(self.steps - first);
        to[..until_end * each].copy_from_slice(&data[first * each..(first + until_end) * each]);
        to[until_end * each..count * each].copy_from_slice(&data[..(count - until_end) * each]);
    }
}

/// Zeros, or an error where there is not so much memory.
fn zeros<T: Clone + Default>(len: usize) -> Result<Vec<T>> {
    let mut data = Vec::new();
    let bytes = len.saturating_mul(size_of::<T>());
    data.try_reserve_exact(len).map_err(|_| {
        let expected = "memory for the windows of all rows; take fewer rows or a shorter window";
        Error::input("session", expected, format!("{bytes} bytes asked for"))
    })?;
    data.resize(len, T::default());
    Ok(data)
}

impl Column {
    /// Numbers of these rows, [rows, steps, each].
    pub fn rows(&self, rows: &[usize], steps: usize) -> TensorData {
        let whole = steps * self.each;
        fn gather<T: Copy>(data: &[T], rows: &[usize], whole: usize) -> Vec<T> {
            rows.iter().flat_map(|row| &data[row * whole..(row + 1) * whole]).copied().collect()
        }
        match &self.data {
            Data::F32(data) => TensorData::F32(gather(data, rows, whole)),
            Data::I32(data) => {
                TensorData::I64(gather(data, rows, whole).into_iter().map(i64::from).collect())
            }
            Data::U8(data) => TensorData::U8(gather(data, rows, whole)),
        }
    }

    /// Whether numbers are of the column's kind, finite, and values that the column can hold.
    pub fn takes(&self, numbers: &TensorData) -> bool {
        match (&self.data, numbers) {
            (Data::F32(_), TensorData::F32(x)) => x.iter().all(|x| x.is_finite()),
            (Data::I32(_), TensorData::I64(x)) => {
                let known = |(x, limit): (&i64, &usize)| (0..*limit as i64).contains(x);
                x.iter().zip(self.limits.iter().cycle()).all(known)
            }
            (Data::U8(_), TensorData::U8(_)) => true,
            _ => false,
        }
    }

    /// Replaces the numbers of these rows by those of [`Column::rows`].
    pub fn set_rows(&mut self, rows: &[usize], steps: usize, numbers: &TensorData) {
        let whole = steps * self.each;
        for (i, row) in rows.iter().enumerate() {
            let (to, from) = (row * whole..(row + 1) * whole, i * whole..(i + 1) * whole);
            match (&mut self.data, numbers) {
                (Data::F32(data), TensorData::F32(x)) => data[to].copy_from_slice(&x[from]),
                (Data::I32(data), TensorData::I64(x)) => {
                    data[to].iter_mut().zip(&x[from]).for_each(|(to, x)| *to = *x as i32);
                }
                (Data::U8(data), TensorData::U8(x)) => data[to].copy_from_slice(&x[from]),
                _ => {}
            }
        }
    }
}
