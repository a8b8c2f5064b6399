//! How a parameter starts, declared where the parameter is declared.

use elmur_engine::rng::Stream;

/// How a parameter starts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// The same number everywhere.
    Constant(f64),
    /// Normal numbers with this standard deviation.
    Normal(f64),
    /// One vector of normal numbers with this standard deviation, repeated along all axes but the last.
    Repeated(f64),
    /// Uniform numbers between minus and plus this bound.
    Uniform(f64),
    /// Orthonormal rows or columns (whichever are fewer) of the parameter seen as a matrix.
    Orthogonal,
    /// Numbers from the first to the second in even steps along the last axis.
    Spaced(f64, f64),
    /// ln(n + 1) in column n of the parameter seen as a matrix.
    LogColumns,
    /// Numbers whose softplus lies between these positive ones, uniform in its logarithm.
    StepSizes {
        /// The smallest softplus.
        least: f64,
        /// The largest softplus.
        most: f64,
    },
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
    pub(crate) fn draw(self, stream: &Stream, shape: &[usize]) -> Vec<f64> {
        let mut data = vec![0.0; shape.iter().product()];
        match self {
            Init::Constant(x) => data.fill(x),
            Init::Normal(std) => stream.fill_normal(&mut data, std),
            Init::Repeated(std) => {
                let columns = shape.last().copied().unwrap_or(1).max(1);
                let mut vector = vec![0.0; columns];
                stream.fill_normal(&mut vector, std);
                data.chunks_mut(columns).for_each(|row| row.copy_from_slice(&vector[..row.len()]));
            }
            Init::Uniform(bound) => stream.fill_uniform(&mut data, -bound, bound),
            Init::Orthogonal => {
                stream.fill_normal(&mut data, 1.0);
                let columns = shape.last().copied().unwrap_or(1).max(1);
                orthonormalise(&mut data, columns);
            }
            Init::Spaced(first, last) => {
                let columns = shape.last().copied().unwrap_or(1).max(1);
                let step = (last - first) / (columns - 1).max(1) as f64;
                data.iter_mut().enumerate().for_each(|(i, x)| *x = first + step * (i % columns) as f64);
            }
            Init::LogColumns => {
                let columns = shape.last().copied().unwrap_or(1).max(1);
                data.iter_mut().enumerate().for_each(|(i, x)| *x = ((i % columns + 1) as f64).ln());
            }
            Init::StepSizes { least, most } => {
                stream.fill_uniform(&mut data, least.ln(), most.ln());
                for x in &mut data {
                    // softplus(t + ln(1 - e^-t)) = t
                    let t = x.exp();
                    *x = t + (-(-t).exp_m1()).ln();
                }
            }
        }
        data
    }
}

/// Makes the rows of a matrix orthonormal, or its columns where there are fewer of them (Gram-Schmidt, twice
/// for accuracy).
fn orthonormalise(matrix: &mut [f64], columns: usize) {
    let rows = matrix.len() / columns;
    if rows > columns {
        // Vectors that lie in one piece are much faster to work with.
        let mut turned: Vec<f64> = (0..columns)
            .flat_map(|c| (0..rows).map(move |r| (r, c)))
            .map(|(r, c)| matrix[r * columns + c])
            .collect();
        orthonormalise(&mut turned, rows);
        for (i, x) in turned.into_iter().enumerate() {
            matrix[i % rows * columns + i / rows] = x;
        }
        return;
    }
    for i in 0..rows {
        let (before, rest) = matrix.split_at_mut(i * columns);
        let vector = &mut rest[..columns];
        for _ in 0..2 {
            for other in before.chunks_exact(columns) {
                let dot: f64 = vector.iter().zip(other).map(|(x, y)| x * y).sum();
                vector.iter_mut().zip(other).for_each(|(x, y)| *x -= dot * y);
            }
        }
        let norm = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
        vector.iter_mut().for_each(|x| *x /= norm.max(f64::MIN_POSITIVE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_vectors_are_one_random_vector() {
        let data = Init::Repeated(1.0).draw(&Stream::new(1, 2, 3), &[1, 3, 4]);
        assert!(data[..4] == data[4..8] && data[..4] == data[8..] && data[0] != data[1]);
    }

    #[test]
    fn spaced_numbers_rise_along_the_last_axis() {
        let data = Init::Spaced(-1.0, 1.0).draw(&Stream::new(1, 2, 3), &[2, 5]);
        assert_eq!(data, [-1.0, -0.5, 0.0, 0.5, 1.0, -1.0, -0.5, 0.0, 0.5, 1.0]);
        assert_eq!(Init::Spaced(-1.0, 1.0).draw(&Stream::new(1, 2, 3), &[2, 1]), [-1.0, -1.0]);
    }

    #[test]
    fn step_sizes_are_spread_evenly_over_their_orders_of_magnitude() {
        let sizes = Init::StepSizes { least: 0.001, most: 0.1 }.draw(&Stream::new(1, 2, 3), &[4000]);
        let sizes: Vec<f64> = sizes.into_iter().map(|x| x.exp().ln_1p()).collect();
        assert!(sizes.iter().all(|t| (0.001 - 1e-12..0.1 + 1e-12).contains(t)));
        let below = sizes.iter().filter(|t| **t < 0.01).count();
        assert!((1900..2100).contains(&below), "{below} of 4000 below the geometric mean");
    }

    #[test]
    fn columns_start_with_their_logarithms() {
        let matrix = Init::LogColumns.draw(&Stream::new(1, 2, 3), &[2, 3]);
        assert_eq!(matrix, [1.0f64, 2.0, 3.0, 1.0, 2.0, 3.0].map(f64::ln));
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
