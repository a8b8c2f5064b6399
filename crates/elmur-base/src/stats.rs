//! Mean, standard error and extremes of a list of numbers.

use serde::Serialize;

/// Mean, standard error of the mean, and extremes of a list of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Statistics {
    /// Mean; 0 for an empty list.
    pub mean: f64,
    /// Standard error of the mean; 0 for fewer than two numbers.
    pub sem: f64,
    /// Smallest number; infinity for an empty list.
    pub min: f64,
    /// Largest number; minus infinity for an empty list.
    pub max: f64,
    /// Number of numbers.
    pub count: usize,
}

impl Statistics {
    /// Statistics of these numbers.
    pub fn of(numbers: impl IntoIterator<Item = f64, IntoIter: Clone>) -> Self {
        let numbers = numbers.into_iter();
        let count = numbers.clone().count();
        let mean = numbers.clone().sum::<f64>() / count.max(1) as f64;
        let squares: f64 = numbers.clone().map(|x| (x - mean).powi(2)).sum();
        let sem = if count > 1 { (squares / (count - 1) as f64 / count as f64).sqrt() } else { 0.0 };
        let (min, max) = numbers.fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| (a.min(x), b.max(x)));
        Self { mean, sem, min, max, count }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_error_is_that_of_the_mean() {
        let s = Statistics::of([1.0, 2.0, 3.0, 4.0]);
        assert!((s.mean - 2.5).abs() < 1e-15 && (s.sem - (5.0f64 / 3.0 / 4.0).sqrt()).abs() < 1e-15);
        assert_eq!((s.min, s.max, s.count), (1.0, 4.0, 4));
        let one = Statistics::of([3.0]);
        assert_eq!((one.mean, one.sem, one.count), (3.0, 0.0, 1));
    }
}
