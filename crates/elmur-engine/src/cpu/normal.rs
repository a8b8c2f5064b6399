//! Standard normal numbers by Box-Muller, many at a time.
//!
//! ```text
//! z = sqrt(-2 ln u) (cos 2πv, sin 2πv)      u = (a + 1) / 2^32      v = b / 2^32
//! ```
//!
//! for draws a and b, as `elmur_rng::normals`, without its calls of library functions one by one. Logarithm, sine and
//! cosine are those of fdlibm (<https://www.netlib.org/fdlibm>) without branches, each within a unit in the last place
//! of f64; the angle is reduced exactly, as an integer. Rounded to f32 the numbers are those of the library functions
//! but for about one in 10^8.

use super::simd::simd_fn;

/// Blocks of four draws that are turned into numbers at once.
pub(crate) const BLOCKS: usize = 16;

/// ln x for a normal number: x = 2^k (1 + f) with 1 + f from about 0.71 to 1.41.
#[inline(always)]
fn ln(x: f64) -> f64 {
    const LN2_HIGH: f64 = 6.931_471_803_691_238e-1;
    const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    // sqrt(1/2), above which the significand counts as that of the next power of two.
    const HALF: u64 = 0x3fe6_a09e_0000_0000;
    let bits = x.to_bits().wrapping_add(0x3ff0_0000_0000_0000 - HALF);
    let exponent = (bits >> 52) as i32 - 1023;
    let f = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) + HALF) - 1.0;
    let half_square = 0.5 * f * f;
    let s = f / (2.0 + f);
    let z = s * s;
    let p = z.mul_add(1.479_819_860_511_658_6e-1, 1.531_383_769_920_937_3e-1);
    let p = z.mul_add(p, 1.818_357_216_161_805e-1);
    let p = z.mul_add(p, 2.222_219_843_214_978_4e-1);
    let p = z.mul_add(p, 2.857_142_874_366_239e-1);
    let p = z.mul_add(p, 3.999_999_999_940_942e-1);
    let p = z * z.mul_add(p, 6.666_666_666_666_735e-1);
    let k = f64::from(exponent);
    k * LN2_HIGH - ((half_square - (s * (half_square + p) + k * LN2_LOW)) - f)
}

/// (sin, cos) of 2π b / 2^32.
#[inline(always)]
fn sin_cos(b: u32) -> (f64, f64) {
    // The nearest quarter of a turn, and what is left: at most an eighth of a turn to either side.
    let quarter = b.wrapping_add(1 << 29) >> 30;
    let x = f64::from(b.wrapping_sub(quarter << 30) as i32) * (std::f64::consts::TAU / 4_294_967_296.0);
    let z = x * x;
    let p = z.mul_add(1.589_690_995_211_55e-10, -2.505_076_025_340_686_3e-8);
    let p = z.mul_add(p, 2.755_731_370_707_006_8e-6);
    let p = z.mul_add(p, -1.984_126_982_985_795e-4);
    let p = z.mul_add(p, 8.333_333_333_322_49e-3);
    let p = z.mul_add(p, -1.666_666_666_666_663_2e-1);
    let sin = (z * x).mul_add(p, x);
    let p = z.mul_add(-1.135_964_755_778_819_5e-11, 2.087_572_321_298_175e-9);
    let p = z.mul_add(p, -2.755_731_435_139_066_3e-7);
    let p = z.mul_add(p, 2.480_158_728_947_673e-5);
    let p = z.mul_add(p, -1.388_888_888_887_411e-3);
    let p = z.mul_add(p, 4.166_666_666_666_66e-2);
    let cos = (z * z).mul_add(p, z.mul_add(-0.5, 1.0));
    let turned = quarter & 1 == 1;
    let (s, c) = (if turned { cos } else { sin }, if turned { sin } else { cos });
    let sign = |x: f64, negative: u32| f64::from_bits(x.to_bits() ^ (u64::from(negative & 1) << 63));
    (sign(s, quarter >> 1), sign(c, quarter.wrapping_add(1) >> 1))
}

simd_fn! {
    /// y[4 i + j] = std times normal number j of block i, whose draws are draws[0..4][i].
    pub(crate) fn fill_normals<T>(y: &mut [T; 4 * BLOCKS], draws: &[[u32; BLOCKS]; 4], std: f64) {
        for pair in 0..2 {
            let (a, b) = (&draws[2 * pair], &draws[2 * pair + 1]);
            let (mut cosines, mut sines) = ([0.0; BLOCKS], [0.0; BLOCKS]);
            for i in 0..BLOCKS {
                let radius = std * (-2.0 * ln((f64::from(a[i]) + 1.0) * (1.0 / 4_294_967_296.0))).sqrt();
                let (sin, cos) = sin_cos(b[i]);
                (cosines[i], sines[i]) = (radius * cos, radius * sin);
            }
            for i in 0..BLOCKS {
                y[4 * i + 2 * pair] = T::of(cosines[i]);
                y[4 * i + 2 * pair + 1] = T::of(sines[i]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Stream, normals};

    /// The ends of both ranges, quarters of a turn, and many others: f64 to a few units in the last place of the
    /// largest; draws that were not chosen to the bit in f32, but for one in a million.
    #[test]
    fn numbers_are_those_of_the_library_functions() {
        let (mut worst, mut different, mut count) = (0.0f64, 0, 0);
        let stream = Stream::new(3, 1, 4);
        for group in 0..4000 {
            let mut draws = stream.group(group);
            if group == 0 {
                let ends = [0, 1, 2, u32::MAX, u32::MAX - 1, 1 << 29, (1 << 29) - 1, 1 << 30];
                for (i, b) in ends.into_iter().enumerate() {
                    (draws[0][i], draws[1][i]) = (b, b.rotate_left(1));
                    (draws[2][i], draws[3][i]) = (u32::MAX - b, b);
                }
            }
            let (mut doubles, mut floats) = ([0.0f64; 64], [0.0f32; 64]);
            fill_normals(&mut doubles, &draws, 0.5);
            fill_normals(&mut floats, &draws, 0.5);
            for i in 0..16 {
                let expected = normals(std::array::from_fn(|j| draws[j][i]));
                for (j, z) in expected.into_iter().enumerate() {
                    worst = worst.max((doubles[4 * i + j] - 0.5 * z).abs());
                    // Chosen draws give sines of about 0, which are not as near in relation to their size.
                    different += usize::from(group > 0 && floats[4 * i + j] != (0.5 * z) as f32);
                    count += 1;
                }
            }
        }
        assert!(worst < 5e-15, "{worst:e}");
        assert!(different * 1_000_000 <= count, "{different} of {count}");
    }
}
