//! What products by vectors and by the matrix unit share: masks and transposes of AVX-512 registers.

use std::arch::x86_64::*;

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
