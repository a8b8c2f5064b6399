//! AVX-512 where compilers do not find the instructions: masks and transposes that products share, and random
//! numbers.

use std::arch::x86_64::*;

use crate::rng::{MULTIPLIER, Stream, WEYL};

/// A mask of the first `count` lanes.
#[inline]
pub(crate) fn lanes(count: usize) -> __mmask16 {
    ((1u32 << count.min(16)) - 1) as __mmask16
}

/// Rows to columns of a 16 x 16 block: within 128-bit lanes first, then whole lanes.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose(r: [__m512; 16]) -> [__m512; 16] {
    let mut u = [_mm512_setzero_ps(); 16];
    for g in 0..4 {
        let rows = &r[4 * g..4 * g + 4];
        let low = |a, b| _mm512_castps_pd(_mm512_unpacklo_ps(a, b));
        let high = |a, b| _mm512_castps_pd(_mm512_unpackhi_ps(a, b));
        let (t0, t1) = (low(rows[0], rows[1]), high(rows[0], rows[1]));
        let (t2, t3) = (low(rows[2], rows[3]), high(rows[2], rows[3]));
        u[4 * g] = _mm512_castpd_ps(_mm512_unpacklo_pd(t0, t2));
        u[4 * g + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(t0, t2));
        u[4 * g + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(t1, t3));
        u[4 * g + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(t1, t3));
    }
    let mut out = [_mm512_setzero_ps(); 16];
    for c in 0..4 {
        let even = |a, b| _mm512_shuffle_f32x4::<0x88>(a, b);
        let odd = |a, b| _mm512_shuffle_f32x4::<0xdd>(a, b);
        let (a, b) = (even(u[c], u[4 + c]), odd(u[c], u[4 + c]));
        let (d, e) = (even(u[8 + c], u[12 + c]), odd(u[8 + c], u[12 + c]));
        out[c] = even(a, d);
        out[4 + c] = even(b, e);
        out[8 + c] = odd(a, d);
        out[12 + c] = odd(b, e);
    }
    out
}

/// [`Stream::group`] in a third of the time: products of the even and of the odd words, then their halves.
#[target_feature(enable = "avx512f")]
pub(crate) fn random_group(stream: &Stream, group: u32) -> [[u32; 16]; 4] {
    // (high, low) words of sixteen products.
    let multiply = |x: __m512i, factor: __m512i| {
        let even = _mm512_mul_epu32(x, factor);
        let odd = _mm512_mul_epu32(_mm512_srli_epi64::<32>(x), factor);
        const SWAP: i32 = 0b10_11_00_01;
        let high = _mm512_mask_shuffle_epi32::<SWAP>(odd, 0x5555, even);
        let low = _mm512_mask_shuffle_epi32::<SWAP>(even, 0xaaaa, odd);
        (high, low)
    };
    let splat = |x: u32| _mm512_set1_epi32(x as i32);
    const XOR3: i32 = 0x96;
    let [first, b, c, d] = stream.counter(group.wrapping_mul(16));
    let count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let mut a = _mm512_add_epi32(splat(first), count);
    let (mut b, mut c, mut d) = (splat(b), splat(c), splat(d));
    let [m0, m1] = MULTIPLIER.map(splat);
    let [mut k0, mut k1] = stream.key().map(splat);
    let [w0, w1] = WEYL.map(splat);
    for _ in 0..10 {
        let (p_high, p_low) = multiply(a, m0);
        let (q_high, q_low) = multiply(c, m1);
        a = _mm512_ternarylogic_epi32::<XOR3>(q_high, b, k0);
        c = _mm512_ternarylogic_epi32::<XOR3>(p_high, d, k1);
        (b, d) = (q_low, p_low);
        k0 = _mm512_add_epi32(k0, w0);
        k1 = _mm512_add_epi32(k1, w1);
    }
    let mut draws = [[0; 16]; 4];
    for (to, x) in draws.iter_mut().zip([a, b, c, d]) {
        // SAFETY: sixteen words.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), x) };
    }
    draws
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Isa;

    #[test]
    fn random_groups_are_those_of_the_generator() {
        if Isa::detected() < Isa::Avx512 {
            return;
        }
        for (seed, group) in [(0, 0), (u64::MAX - 3, 7), (1 << 40, u32::MAX / 16)] {
            let stream = Stream::new(seed, seed ^ 12345, 9);
            // SAFETY: just detected.
            assert_eq!(unsafe { random_group(&stream, group) }, stream.group(group));
        }
    }
}
