//! How parameters start: declared where a parameter is declared, drawn here.

use elmur_engine::rng::Stream;
use elmur_engine::{DType, Store};

use crate::architecture::Architecture;
use crate::error::Result;
use crate::window::{Built, parameter_graph};

/// How a parameter starts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// The same number everywhere.
    Constant(f64),
    /// Normal numbers with this standard deviation.
    Normal(f64),
    /// Uniform numbers between minus and plus this bound.
    Uniform(f64),
    /// Orthonormal rows or columns (whichever are fewer) of the parameter seen as a matrix.
    Orthogonal,
}

impl Init {
    /// Xavier-uniform for a matrix [outputs, inputs]: variance 2 / (outputs + inputs).
    pub fn xavier(outputs: usize, inputs: usize) -> Self {
        Init::Uniform((6.0 / (outputs + inputs) as f64).sqrt())
    }

    /// Uniform between ±1 / sqrt(inputs), PyTorch's default for linear maps and convolutions.
    pub fn fan_in(inputs: usize) -> Self {
        Init::Uniform(1.0 / (inputs as f64).sqrt())
    }

    /// The numbers of a parameter of this shape.
    fn draw(self, stream: &Stream, shape: &[usize]) -> Vec<f64> {
        let mut data = vec![0.0; shape.iter().product()];
        match self {
            Init::Constant(x) => data.fill(x),
            Init::Normal(std) => stream.fill_normal(&mut data, std),
            Init::Uniform(bound) => stream.fill_uniform(&mut data, -bound, bound),
            Init::Orthogonal => {
                stream.fill_normal(&mut data, 1.0);
                let columns = shape.last().copied().unwrap_or(1).max(1);
                orthonormalise(&mut data, columns);
            }
        }
        data
    }
}

/// Makes the rows of a matrix orthonormal, or its columns where there are fewer of them (Gram-Schmidt, twice for accuracy).
fn orthonormalise(matrix: &mut [f64], columns: usize) {
    let rows = matrix.len() / columns;
    // (vectors, their length, from one vector to the next, from one entry to the next)
    let (count, len, step, stride) =
        if rows <= columns { (rows, columns, columns, 1) } else { (columns, rows, 1, columns) };
    for i in 0..count {
        for _ in 0..2 {
            for j in 0..i {
                let dot: f64 =
                    (0..len).map(|k| matrix[i * step + k * stride] * matrix[j * step + k * stride]).sum();
                (0..len).for_each(|k| matrix[i * step + k * stride] -= dot * matrix[j * step + k * stride]);
            }
        }
        let norm = (0..len).map(|k| matrix[i * step + k * stride].powi(2)).sum::<f64>().sqrt();
        (0..len).for_each(|k| matrix[i * step + k * stride] /= norm.max(f64::MIN_POSITIVE));
    }
}

/// A store with freshly initialised parameters of a policy.
pub fn parameters(architecture: &dyn Architecture, seed: u64) -> Result<Store> {
    let built = parameter_graph(architecture, DType::F32)?;
    let store = Store::new();
    store.declare_params(&built.graph)?;
    initialise(&built, &store, seed)?;
    Ok(store)
}

/// Fills every parameter that `store` holds. The same seed gives the same weights, in any element type.
pub fn initialise(built: &Built, store: &Store, seed: u64) -> Result<()> {
    for (index, (name, init)) in built.params.iter().enumerate() {
        let ty = store.ty(name)?;
        // Streams are numbered by the sorted names, far from those of dropout.
        let data = init.draw(&Stream::new(seed, u64::MAX, index as u32), &ty.shape);
        match ty.dtype {
            DType::F64 => store.set(name, &data)?,
            _ => store.set(name, &data.into_iter().map(|x| x as f32).collect::<Vec<_>>())?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn fused_matrices_start_as_their_parts() {
        let config = presets::model("tmaze").unwrap();
        let built = parameter_graph(config.architecture(), DType::F32).unwrap();
        let init = |name: &str| built.params[name];
        assert_eq!(init("layers.0.attention.qkv.weight"), Init::xavier(384, 128));
        assert_eq!(init("layers.0.mem2tok.kv.weight"), Init::xavier(128, 128));
        assert_eq!(init("layers.0.token_ffn.shared.gate_up.weight"), Init::xavier(512, 128));
        assert_eq!(init("layers.0.token_ffn.shared.down.weight"), Init::xavier(128, 512));
        assert_eq!(init("layers.0.token_ffn.routed.gate_up"), Init::xavier(32, 128));
        assert_eq!(init("layers.0.token_ffn.routed.down"), Init::xavier(128, 32));
        assert_eq!(init("layers.1.mem2tok.norm.scale"), Init::Constant(1.0));
        assert_eq!(init("encoder.weight"), Init::Uniform(0.5));
        assert_eq!(init("encoder.bias"), Init::Uniform(0.5));
        assert_eq!(init("u"), Init::Normal(0.02));
    }

    #[test]
    fn orthogonal_matrices_have_orthonormal_rows_or_columns() {
        for (rows, columns) in [(3, 5), (8, 4), (6, 6)] {
            let m = Init::Orthogonal.draw(&Stream::new(1, 2, 3), &[rows, columns]);
            let entry = |r: usize, c: usize| m[r * columns + c];
            let n = rows.min(columns);
            for i in 0..n {
                for j in 0..n {
                    let dot: f64 = if rows <= columns {
                        (0..columns).map(|k| entry(i, k) * entry(j, k)).sum()
                    } else {
                        (0..rows).map(|k| entry(k, i) * entry(k, j)).sum()
                    };
                    assert!((dot - f64::from(u8::from(i == j))).abs() < 1e-12, "{rows} x {columns}: {dot}");
                }
            }
        }
    }
}
