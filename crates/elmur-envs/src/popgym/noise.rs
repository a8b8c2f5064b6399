//! Normal noise on observations, which are then clipped: what the noisy control tasks and their players
//! share.

use std::f64::consts::SQRT_2;

use elmur_rng::Rng;

use super::replay::impossible;
use super::task::Difficulty;
use crate::error::Result;

/// Standard deviation of the noise.
pub(super) fn sigma(difficulty: Difficulty) -> f64 {
    difficulty.pick([0.1, 0.2, 0.3])
}

/// Noise on two numbers.
#[inline]
pub(super) fn draw(rng: &mut Rng, sigma: f64) -> [f64; 2] {
    rng.normals().map(|z| sigma * z)
}

/// A number with noise, clipped; in single precision, as in the package.
#[inline]
pub(super) fn noisy(number: f32, noise: f64, bound: f32) -> f32 {
    (number + noise as f32).clamp(-bound, bound)
}

/// Refuses noise that no environment could draw.
#[inline]
pub(super) fn check(noise: [f64; 2]) -> Result<()> {
    if noise.iter().all(|z| z.is_finite()) {
        return Ok(());
    }
    impossible("finite noise", format!("{noise:?}"))
}

/// What an observation says about the number behind it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sensor {
    pub sigma: f64,
    pub bound: f32,
}

impl Sensor {
    /// Likelihood of seeing `seen` when the number is `number`, up to a factor that depends on `seen` alone.
    /// Never below 1e-12, so that no observation rules everything out.
    #[inline]
    pub fn likelihood(self, seen: f32, number: f64) -> f64 {
        let bound = f64::from(self.bound);
        let likelihood = if seen.abs() < self.bound {
            let z = (f64::from(seen) - number) / self.sigma;
            (-0.5 * z * z).exp()
        } else {
            // Clipped: all that is known is that the noisy number lies outside.
            let z = (bound - number * f64::from(seen.signum())) / self.sigma;
            0.5 * libm::erfc(z / SQRT_2)
        };
        likelihood.max(1e-12)
    }
}

/// Square root of a covariance [[a, b], [b, c]]: the [d, e, f] for which (d x, e x + f y) has it when x and y
/// are independent with variance 1.
pub(super) fn root([a, b, c]: [f64; 3]) -> [f64; 3] {
    let d = a.sqrt().max(1e-9);
    let e = b / d;
    [d, e, (c - e * e).max(0.0).sqrt()]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Likelihoods against frequencies: how often a noisy number falls into a bin, and how often it is
    /// clipped.
    #[test]
    fn likelihoods_are_those_of_the_noise() {
        let sensor = Sensor { sigma: 0.3, bound: 1.0 };
        let (mut rng, n) = (Rng::new(1, 0), 40_000);
        for number in [0.0, 0.7, 0.95, -1.0] {
            let (mut bin, mut clipped) = (0.0, 0.0);
            for _ in 0..n / 2 {
                for noise in draw(&mut rng, sensor.sigma) {
                    let seen = noisy(number as f32, noise, sensor.bound);
                    bin += f64::from(u8::from((0.5..0.52).contains(&seen)));
                    clipped += f64::from(u8::from(seen == 1.0));
                }
            }
            let density =
                sensor.likelihood(0.51, number) / (sensor.sigma * (2.0 * std::f64::consts::PI).sqrt());
            let expected = [0.02 * density, sensor.likelihood(1.0, number)];
            for (count, p) in [bin, clipped].into_iter().zip(expected) {
                let (frequency, error) = (count / f64::from(n), (p.max(1e-4) / f64::from(n)).sqrt());
                assert!((frequency - p).abs() < 4.0 * error, "{number}: {frequency} {p}");
            }
            assert_eq!(sensor.likelihood(-1.0, number), sensor.likelihood(1.0, -number));
        }
        assert_eq!(sensor.likelihood(0.9, 1e9), 1e-12);
    }

    #[test]
    fn noise_has_its_deviation() {
        let mut rng = Rng::new(2, 0);
        let (n, sigma) = (20_000, sigma(Difficulty::Medium));
        let square: f64 = (0..n).map(|_| draw(&mut rng, sigma).map(|z| z * z).iter().sum::<f64>()).sum();
        let deviation = (square / f64::from(2 * n)).sqrt();
        assert!((deviation - 0.2).abs() < 0.2 * 4.0 / f64::from(4 * n).sqrt(), "{deviation}");
        assert!(check([0.0, f64::NAN]).is_err() && check([f64::INFINITY, 0.0]).is_err());
    }
}
