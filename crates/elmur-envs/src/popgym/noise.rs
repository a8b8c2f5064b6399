//! Normal noise on observations, which are then clipped: what the noisy control tasks and their players
//! share.
//!
//! Players weigh hundreds of possible states at every step. [`sin_cos`], [`exp`] and [`Sensor::weigh`] have no
//! branches that depend on a state, so that compilers make them loops over vectors; see [`estimate`].

use std::f32::consts::{FRAC_PI_2, LN_2, LOG2_E, PI, SQRT_2};
use std::sync::OnceLock;

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

/// A player whose work on an observation is loops over vectors.
pub(super) trait Estimate {
    /// What the player makes of an observation.
    type Estimate;

    /// Takes an observation in. To be inlined, as everything that it calls: [`estimate`] compiles it again.
    fn estimate(&mut self, seen: &[f32]) -> Self::Estimate;
}

/// [`Estimate::estimate`], with vectors of eight numbers on processors that have them (AVX2). Results are the same.
pub(super) fn estimate<P: Estimate>(player: &mut P, seen: &[f32]) -> P::Estimate {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn avx2<P: Estimate>(player: &mut P, seen: &[f32]) -> P::Estimate {
            player.estimate(seen)
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { avx2(player, seen) };
        }
    }
    player.estimate(seen)
}

/// Sine and cosine of an angle from -pi to pi, with errors below 1e-6.
#[inline(always)]
pub(super) fn sin_cos(angle: f32) -> (f32, f32) {
    // The sine from -pi / 2 to pi / 2.
    let sine = |a: f32| {
        let s = -a * a;
        let inner = 1.0 + s * (1.0 / 42.0) * (1.0 + s * (1.0 / 72.0) * (1.0 + s * (1.0 / 110.0)));
        a * (1.0 + s * (1.0 / 6.0) * (1.0 + s * (1.0 / 20.0) * inner))
    };
    let size = angle.abs();
    (sine(size.min(PI - size)).copysign(angle), sine(FRAC_PI_2 - size))
}

/// Added to a number below 2^22, it leaves the nearest integer in the lowest bits.
const ROUND: f32 = 12_582_912.0;

/// The integer nearest to a number below 2^22.
#[inline(always)]
pub(super) fn nearest(x: f32) -> f32 {
    (x + ROUND) - ROUND
}

/// An integer from 0 to 2^22 - 1 as such.
#[inline(always)]
pub(super) fn integer(x: f32) -> u32 {
    (x + ROUND).to_bits() & 0x3f_ffff
}

/// e^x for x from -80 to 0, with relative errors below 1e-5; e^-80 below.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let x = x.max(-80.0);
    let shifted = x * LOG2_E + ROUND;
    let r = x - (shifted - ROUND) * LN_2;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()));
    let series = 1.0
        + r * (1.0
            + r * (0.5
                + r * (1.0 / 6.0
                    + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0)))))));
    power * series
}

/// What an observation says about the number behind it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sensor {
    pub sigma: f32,
    pub bound: f32,
}

impl Sensor {
    /// Multiplies the weight of every number by the likelihood of seeing `seen` when that is the number behind it, up
    /// to a factor that depends on `seen` alone. Likelihoods are never below 1e-12, so that no observation rules
    /// everything out.
    #[inline(always)]
    pub fn weigh(self, seen: f32, numbers: &[f32], weights: &mut [f32]) {
        let each = weights.iter_mut().zip(numbers);
        if seen.abs() < self.bound {
            let scale = 1.0 / self.sigma;
            each.for_each(|(weight, number)| {
                let z = (seen - number) * scale;
                *weight *= exp(-0.5 * z * z).max(1e-12);
            });
        } else {
            // Clipped: all that is known is that the noisy number lies outside.
            let (side, scale) = (seen.signum(), 1.0 / (self.sigma * SQRT_2));
            each.for_each(|(weight, number)| {
                *weight *= (0.5 * erfc((self.bound - number * side) * scale)).max(1e-12);
            });
        }
    }
}

/// The complementary error function, with errors below 1e-6 (Abramowitz and Stegun, 7.1.26).
#[inline(always)]
fn erfc(x: f32) -> f32 {
    let size = x.abs();
    let t = 1.0 / (1.0 + 0.327_591_1 * size);
    let series = 0.254_829_6 + t * (-0.284_496_72 + t * (1.421_413_8 + t * (-1.453_152 + t * 1.061_405_4)));
    let beyond = t * series * exp(-size * size);
    if x < 0.0 { 2.0 - beyond } else { beyond }
}

/// The sum of some numbers, by their places: in eight parts, as vectors add.
#[inline(always)]
pub(super) fn sum(count: usize, number: impl Fn(usize) -> f32) -> f64 {
    let (mut parts, whole) = ([0.0f32; 8], count / 8 * 8);
    for first in (0..whole).step_by(8) {
        parts.iter_mut().enumerate().for_each(|(k, part)| *part += number(first + k));
    }
    let rest: f32 = (whole..count).map(number).sum();
    parts.iter().map(|part| f64::from(*part)).sum::<f64>() + f64::from(rest)
}

/// Pairs of normal numbers with mean 0 and variance 1, drawn once.
pub(super) fn normal_pairs() -> &'static [[f32; 2]; 4096] {
    static PAIRS: OnceLock<Box<[[f32; 2]; 4096]>> = OnceLock::new();
    PAIRS.get_or_init(|| {
        let mut rng = Rng::new(0, 0);
        Box::new(std::array::from_fn(|_| rng.normals().map(|z| z as f32)))
    })
}

/// Divides weights by their sum; those that are next to nothing become zero.
#[inline(always)]
pub(super) fn normalize(weights: &mut [f32]) {
    let scale = (1.0 / sum(weights.len(), |i| weights[i])) as f32;
    for weight in weights {
        let scaled = *weight * scale;
        // Smaller ones would soon be numbers for which processors take their time.
        *weight = if scaled < 1e-25 { 0.0 } else { scaled };
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
        let likelihood = |seen: f32, number: f32| {
            let mut weight = [1.0];
            sensor.weigh(seen, &[number], &mut weight);
            f64::from(weight[0])
        };
        let (mut rng, n) = (Rng::new(1, 0), 40_000);
        for number in [0.0, 0.7, 0.95, -1.0] {
            let (mut bin, mut clipped) = (0.0, 0.0);
            for _ in 0..n / 2 {
                for noise in draw(&mut rng, f64::from(sensor.sigma)) {
                    let seen = noisy(number, noise, sensor.bound);
                    bin += f64::from(u8::from((0.5..0.52).contains(&seen)));
                    clipped += f64::from(u8::from(seen == 1.0));
                }
            }
            let density = likelihood(0.51, number) / (f64::from(sensor.sigma) * std::f64::consts::TAU.sqrt());
            let expected = [0.02 * density, likelihood(1.0, number)];
            for (count, p) in [bin, clipped].into_iter().zip(expected) {
                let (frequency, error) = (count / f64::from(n), (p.max(1e-4) / f64::from(n)).sqrt());
                assert!((frequency - p).abs() < 4.0 * error, "{number}: {frequency} {p}");
            }
            assert_eq!(likelihood(-1.0, number), likelihood(1.0, -number));
        }
        assert_eq!(likelihood(0.9, 1e9), f64::from(1e-12f32));
    }

    #[test]
    fn numbers_are_rounded() {
        for (x, want) in
            [(0.0, 0), (0.4, 0), (0.6, 1), (160.49, 160), (26_000.7, 26_001), (4_194_303.0, 4_194_303)]
        {
            assert_eq!(nearest(x), want as f32, "{x}");
            assert_eq!(integer(nearest(x)), want, "{x}");
        }
    }

    #[test]
    fn functions_of_vectors_are_accurate() {
        for i in 0..=4000 {
            let part = f64::from(i) / 4000.0;
            let angle = ((2.0 * part - 1.0) * std::f64::consts::PI) as f32;
            let (sin, cos) = sin_cos(angle);
            let (want_sin, want_cos) = f64::from(angle).sin_cos();
            assert!((f64::from(sin) - want_sin).abs() < 1e-6, "sin {angle}: {sin}, {want_sin}");
            assert!((f64::from(cos) - want_cos).abs() < 1e-6, "cos {angle}: {cos}, {want_cos}");
            let x = (-80.0 * part) as f32;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got / want - 1.0).abs() < 1e-5, "e^{x}: {got}, {want}");
            let x = (8.0 * part - 4.0) as f32;
            let (got, want) = (f64::from(erfc(x)), libm::erfc(f64::from(x)));
            assert!((got - want).abs() < 1e-6, "erfc {x}: {got}, {want}");
        }
        assert_eq!(exp(-1e30), exp(-80.0));
    }

    #[test]
    fn weights_add_up_to_one_however_unlikely_all_are() {
        let mut weights = [1.0; 500];
        for seen in [0.9, -1.0, 1.0, -0.9] {
            for _ in 0..3 {
                Sensor { sigma: 0.1, bound: 1.0 }.weigh(seen, &[0.0; 500], &mut weights);
            }
            normalize(&mut weights);
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-4, "{seen}: {:?}", weights[0]);
        }
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
