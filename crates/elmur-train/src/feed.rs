//! From a dataset's windows to the inputs of programs.

use elmur_base::{Field, FieldMut};
use elmur_data::Window;
use elmur_engine::{DType, Program};

use crate::error::Result;

/// Fills window `k` of `count` of a program's input with a field.
pub(crate) fn fill_input(
    program: &mut Program,
    name: &str,
    field: Field,
    (k, count): (usize, usize),
    window: Window<'_>,
) -> Result<()> {
    fn part<T>(data: &mut [T], k: usize, count: usize) -> &mut [T] {
        let each = data.len() / count;
        &mut data[k * each..(k + 1) * each]
    }
    let out = match program.input_type(name)?.dtype {
        DType::I32 => FieldMut::I32(part(program.input_mut(name)?, k, count)),
        DType::I64 => FieldMut::I64(part(program.input_mut(name)?, k, count)),
        DType::U8 => FieldMut::U8(part(program.input_mut(name)?, k, count)),
        DType::Bool => FieldMut::Bool(part(program.input_mut(name)?, k, count)),
        _ => FieldMut::F32(part(program.input_mut(name)?, k, count)),
    };
    Ok(window.fill(field, out)?)
}
