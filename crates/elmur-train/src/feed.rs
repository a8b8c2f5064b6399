//! From a dataset's windows to the inputs of programs.

use elmur_base::Field;
use elmur_data::Window;
use elmur_engine::{DType, Program};

use crate::error::Result;

pub(crate) enum FieldMut<'a> {
    F32(&'a mut [f32]),
    I32(&'a mut [i32]),
    I64(&'a mut [i64]),
    U8(&'a mut [u8]),
    Bool(&'a mut [bool]),
}

pub(crate) fn fill(window: Window<'_>, field: Field, out: FieldMut<'_>) -> Result<()> {
    match (field, out) {
        (Field::Observation(leaf), FieldMut::F32(out)) => window.observation_floats(leaf, out),
        (Field::Observation(leaf), FieldMut::I32(out)) => window.observation_ints(leaf, out),
        (Field::Target | Field::Action, FieldMut::F32(out)) => window.action_floats(out),
        (Field::Target, FieldMut::I64(out)) => window.action_ints(true, out, |_| Field::IGNORED),
        (Field::Imitate, FieldMut::Bool(out)) => window.counted(out),
        (Field::ReturnToGo, FieldMut::F32(out)) => window.returns_to_go(out),
        (Field::Action, FieldMut::I32(out)) => {
            let leaves = window.dataset.spaces().action.leaves();
            let sizes: Vec<usize> = leaves
                .iter()
                .flat_map(|leaf| match leaf {
                    elmur_base::Leaf::Ints(sizes) => sizes.to_vec(),
                    _ => vec![],
                })
                .collect();
            let mut wide = vec![0i64; out.len()];
            window.action_ints(false, &mut wide, |i| sizes[i] as i64);
            out.iter_mut().zip(wide).for_each(|(t, a)| *t = a as i32);
        }
        (Field::Observation(leaf), FieldMut::U8(out)) => {
            let width = out.len() / (window.crops.len() * window.length).max(1);
            for (crop, out) in window.crops.iter().zip(out.chunks_exact_mut(width * window.length)) {
                let episode = window.dataset.episode(crop.episode);
                let elmur_data::ColumnRef::U8(data) = episode.observations[leaf] else { continue };
                for (i, out) in out.chunks_exact_mut(width).enumerate() {
                    let step = (crop.start + window.offset + i).min(data.len() / width - 1);
                    out.copy_from_slice(&data[step * width..(step + 1) * width]);
                }
            }
        }
        _ => {}
    }
    Ok(())
}

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
    fill(window, field, out)
}
