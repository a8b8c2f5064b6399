//! Floating-point elements as the kernels see them, with functions that compilers can vectorise.
//!
//! `f32` gets branch-free polynomial `exp`, `tanh` and `erf` (a few units in the last place); `f64` serves
//! gradient checks and comparisons with float64 references, so it takes the exact library functions.

use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

use crate::types::Element;

/// `f32` or `f64`.
pub(crate) trait Float:
    Element
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
{
    const ZERO: Self;
    const ONE: Self;
    const INFINITY: Self;
    const NEG_INFINITY: Self;
    fn of(x: f64) -> Self;
    fn to_f64(self) -> f64;
    fn mul_add(self, a: Self, b: Self) -> Self;
    fn sqrt(self) -> Self;
    fn abs(self) -> Self;
    fn ln(self) -> Self;
    fn exp(self) -> Self;
    /// [`Float::exp`] of a number from -87 to 88, or of NaN, in three quarters of the instructions.
    fn exp_in_range(self) -> Self;
    /// 2^self. In f32 at most 2^127 and at least 2^-126: half as many instructions as `exp`, for decays.
    fn exp2(self) -> Self;
    /// ln(1 + self), for numbers from 0 to 1.
    fn ln_1p(self) -> Self;
    fn tanh(self) -> Self;
    fn erf(self) -> Self;

    #[inline(always)]
    fn is_nan(self) -> bool {
        self.partial_cmp(&self).is_none()
    }

    /// The larger one; `other` where `self` is not a number.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + (-self).exp())
    }
}

macro_rules! float_basics {
    ($t:ident) => {
        const ZERO: Self = 0.0;
        const ONE: Self = 1.0;
        const INFINITY: Self = $t::INFINITY;
        const NEG_INFINITY: Self = $t::NEG_INFINITY;
        #[inline(always)]
        fn of(x: f64) -> Self {
            x as $t
        }
        #[inline(always)]
        fn to_f64(self) -> f64 {
            self as f64
        }
        #[inline(always)]
        fn mul_add(self, a: Self, b: Self) -> Self {
            $t::mul_add(self, a, b)
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            $t::sqrt(self)
        }
        #[inline(always)]
        fn abs(self) -> Self {
            $t::abs(self)
        }
        #[inline(always)]
        fn ln(self) -> Self {
            $t::ln(self)
        }
    };
}

/// e^r and n with e^x = 2^n e^r: n = round(x / ln 2), and a degree-6 polynomial on |r| <= ln(2) / 2.
#[inline(always)]
fn exp_parts(x: f32) -> (f32, i32) {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding 1.5 * 2^23 rounds to an integer that then sits in the low mantissa bits.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    let p = r.mul_add(1.0 / 720.0, 1.0 / 120.0);
    let p = p.mul_add(r, 1.0 / 24.0);
    let p = p.mul_add(r, 1.0 / 6.0);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r, 1.0);
    let p = p.mul_add(r, 1.0);
    (p, shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32)
}

/// 2^e for e from -126 to 127.
#[inline(always)]
fn power_of_two(e: i32) -> f32 {
    f32::from_bits((e.wrapping_add(127) << 23) as u32)
}

impl Float for f32 {
    float_basics!(f32);

    #[inline(always)]
    fn exp(self) -> Self {
        // Outside this range the result is 0 or infinity; n then still fits the exponent arithmetic below.
        let (p, n) = exp_parts(self.clamp(-104.0, 89.0));
        // 2^n in two factors, so that results near the ends of the range round instead of wrapping.
        let half = n >> 1;
        p * power_of_two(half) * power_of_two(n - half)
    }

    #[inline(always)]
    fn exp_in_range(self) -> Self {
        let (p, n) = exp_parts(self);
        p * power_of_two(n)
    }

    /// 2^n p(r) with n = round(x) and a polynomial 1 + r ln 2 + ... of degree 5 on |r| <= 1/2, fitted by iterated
    /// weighted least squares (relative error 1.1e-7).
    #[inline(always)]
    fn exp2(self) -> Self {
        // As in `exp_parts`.
        const ROUND: f32 = 12_582_912.0;
        let x = self.clamp(-126.0, 127.0);
        let shifted = x + ROUND;
        let r = x - (shifted - ROUND);
        let p = r.mul_add(1.330_062_2e-3, 9.669_696e-3);
        let p = p.mul_add(r, 5.550_558_5e-2);
        let p = p.mul_add(r, 0.240_222_83);
        let p = p.mul_add(r, std::f32::consts::LN_2);
        let p = p.mul_add(r, 1.0);
        // n lies in the low bits; all others are shifted out.
        p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits()))
    }

    /// 2 artanh(s) with s = x / (x + 2), at most 1/3: the series to the 13th power.
    #[inline(always)]
    fn ln_1p(self) -> Self {
        let s = self / (self + 2.0);
        let z = s * s;
        let p = z.mul_add(2.0 / 13.0, 2.0 / 11.0);
        let p = p.mul_add(z, 2.0 / 9.0);
        let p = p.mul_add(z, 2.0 / 7.0);
        let p = p.mul_add(z, 2.0 / 5.0);
        let p = p.mul_add(z, 2.0 / 3.0);
        (p * z).mul_add(s, 2.0 * s)
    }

    /// An odd polynomial near zero, where 1 - 2 / (e^2x + 1) would cancel.
    #[inline(always)]
    fn tanh(self) -> Self {
        let z = self * self;
        let p = z.mul_add(62.0 / 2835.0, -17.0 / 315.0);
        let p = p.mul_add(z, 2.0 / 15.0);
        let p = p.mul_add(z, -1.0 / 3.0);
        let small = (p * z).mul_add(self, self);
        let large = 1.0 - 2.0 / (Float::exp(2.0 * self) + 1.0);
        if z < 0.0625 { small } else { large }
    }

    /// x P(x²) / Q(x²) on |x| <= 4, fitted by iterated weighted least squares (relative error 3e-8); ±1
    /// beyond.
    #[inline(always)]
    fn erf(self) -> Self {
        let x = self.clamp(-4.0, 4.0);
        let z = x * x;
        let p = z.mul_add(2.001_509_6e-6, 2.828_315_8e-4);
        let p = p.mul_add(z, 3.803_308e-3);
        let p = p.mul_add(z, 5.285_225_7e-2);
        let p = p.mul_add(z, 0.191_670_25);
        let p = p.mul_add(z, std::f32::consts::FRAC_2_SQRT_PI);
        let q = z.mul_add(3.748_329_5e-5, 1.166_348_8e-3);
        let q = q.mul_add(z, 1.504_592_3e-2);
        let q = q.mul_add(z, 0.114_573_83);
        let q = q.mul_add(z, 0.503_196_24);
        let q = q.mul_add(z, 1.0);
        if z < 16.0 { x * p / q } else { 0.25 * x }
    }
}

impl Float for f64 {
    float_basics!(f64);

    #[inline(always)]
    fn exp(self) -> Self {
        f64::exp(self)
    }
    #[inline(always)]
    fn exp_in_range(self) -> Self {
        f64::exp(self)
    }
    #[inline(always)]
    fn exp2(self) -> Self {
        f64::exp2(self)
    }
    #[inline(always)]
    fn ln_1p(self) -> Self {
        f64::ln_1p(self)
    }
    #[inline(always)]
    fn tanh(self) -> Self {
        f64::tanh(self)
    }
    #[inline(always)]
    fn erf(self) -> Self {
        libm::erf(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, own: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64, range: f32, tolerance: f64) {
        for i in -20_000..=20_000 {
            let x = range * i as f32 / 20_000.0;
            let (y, want) = (f64::from(own(x)), exact(f64::from(x)));
            let error = (y - want).abs() / want.abs().max(1e-37);
            assert!(error <= tolerance, "{name}({x}) = {y}, want {want}, relative error {error:e}");
        }
    }

    #[test]
    fn f32_functions_match_the_exact_ones() {
        check("exp", Float::exp, f64::exp, 87.0, 3e-7);
        for x in (-8700..=8800).map(|i| i as f32 / 100.0) {
            assert_eq!(Float::exp_in_range(x), Float::exp(x));
        }
        assert!(Float::exp_in_range(f32::NAN).is_nan());
        check("exp2", Float::exp2, f64::exp2, 126.0, 3e-7);
        check("tanh", Float::tanh, f64::tanh, 10.0, 6e-7);
        check("erf", Float::erf, libm::erf, 5.0, 6e-7);
        // In 0..=1 only.
        check("ln_1p", |x| Float::ln_1p(x.abs()), |x| x.abs().ln_1p(), 1.0, 3e-7);
        check("sigmoid", Float::sigmoid, |x| 1.0 / (1.0 + (-x).exp()), 80.0, 6e-7);
    }

    #[test]
    fn f32_functions_are_defined_at_the_extremes() {
        for x in [1e4f32, 1e30, f32::INFINITY] {
            assert_eq!(Float::exp(x), f32::INFINITY);
            assert_eq!(Float::exp(-x), 0.0);
            assert_eq!((Float::tanh(x), Float::tanh(-x)), (1.0, -1.0));
            assert_eq!((Float::erf(x), Float::erf(-x)), (1.0, -1.0));
            assert_eq!((Float::sigmoid(x), Float::sigmoid(-x)), (1.0, 0.0));
        }
        assert!(Float::exp(f32::NAN).is_nan() && Float::tanh(f32::NAN).is_nan());
        assert_eq!(
            (Float::exp2(0.0f32), Float::exp2(-3.0f32), Float::exp2(100.0f32)),
            (1.0, 0.125, 2f32.powi(100))
        );
        assert_eq!((Float::exp2(1e30f32), Float::exp2(-1e30f32)), (2f32.powi(127), 2f32.powi(-126)));
        assert!(Float::exp2(f32::NAN).is_nan());
    }
}
