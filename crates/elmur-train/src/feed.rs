//! From batches that were read to the inputs of programs.

use elmur_base::Field;
use elmur_data::{Buffer, Request};
use elmur_engine::{DType, Element, Program};
use elmur_model::window::WindowProgram;

use crate::error::{Error, Result};

/// What every batch must hold for these programs, which run the same windows: their fields, and
/// [`Field::Imitate`] first, which is counted.
pub(crate) fn request(
    programs: &[WindowProgram],
    rows: usize,
    windows: usize,
    steps: usize,
) -> Result<Request> {
    let mut fields = vec![(Field::Imitate, Buffer::Bool(Vec::new()), 1)];
    for program in programs {
        for (name, field) in program.fields() {
            let ty = program.program.input_type(name)?;
            let width = ty.len() / (program.windows() * rows * steps).max(1);
            let buffer = match ty.dtype {
                DType::I32 => Buffer::I32(Vec::new()),
                DType::I64 => Buffer::I64(Vec::new()),
                DType::U8 => Buffer::U8(Vec::new()),
                DType::Bool => Buffer::Bool(Vec::new()),
                _ => Buffer::F32(Vec::new()),
            };
            let entry = (*field, buffer, width);
            if !fields.contains(&entry) {
                fields.push(entry);
            }
        }
    }
    Ok(Request { rows, windows, steps, fields })
}

/// Fills the inputs of run `run` of a program, which takes `windows` of the batch's windows, from a batch's
/// fields.
pub(crate) fn fill_inputs(
    program: &mut WindowProgram,
    request: &Request,
    fields: &[Buffer],
    run: usize,
) -> Result<()> {
    let windows = program.windows();
    for i in 0..program.fields().len() {
        let (name, field) = program.fields()[i].clone();
        let dtype = program.program.input_type(&name)?.dtype;
        let same = |(other, buffer, _): &(Field, Buffer, usize)| *other == field && type_of(buffer) == dtype;
        let Some(place) = request.fields.iter().position(same) else {
            return Err(Error::config(name, "a field that was read", field));
        };
        let each = request.fields[place].2 * request.rows * request.steps * windows;
        let part = run * each..(run + 1) * each;
        let program = &mut program.program;
        match &fields[place] {
            Buffer::F32(x) => copy(program, &name, &x[part])?,
            Buffer::I32(x) => copy(program, &name, &x[part])?,
            Buffer::I64(x) => copy(program, &name, &x[part])?,
            Buffer::U8(x) => copy(program, &name, &x[part])?,
            Buffer::Bool(x) => copy(program, &name, &x[part])?,
        }
    }
    Ok(())
}

fn copy<T: Element>(program: &mut Program, name: &str, data: &[T]) -> Result<()> {
    program.input_mut::<T>(name)?.copy_from_slice(data);
    Ok(())
}

fn type_of(buffer: &Buffer) -> DType {
    match buffer {
        Buffer::F32(_) => DType::F32,
        Buffer::I32(_) => DType::I32,
        Buffer::I64(_) => DType::I64,
        Buffer::U8(_) => DType::U8,
        Buffer::Bool(_) => DType::Bool,
    }
}
