//! Register tiles, packing and small products with NEON, which every aarch64 processor has.
//!
//! A tile of 6 x 16 floats (6 x 8 doubles) is 24 registers of sums, 4 of B and 1 of A: 29 of 32.

use std::arch::aarch64::*;

use super::{Gather, Micro, NV, TileSet, Vector, combine_rows, dot_rows, gathered, micro, pack_portable};

/// Two registers that are used as one of twice the width.
#[derive(Clone, Copy)]
struct Two<R>(R, R);

macro_rules! vector {
    ($R:ident, $T:ty, $width:literal, $splat:ident, $load:ident, $store:ident, $fma:ident, $add:ident) => {
        // SAFETY: NEON belongs to the target.
        unsafe impl Vector<$T> for $R {
            const WIDTH: usize = $width;
            #[inline(always)]
            unsafe fn splat(x: $T) -> Self {
                // SAFETY: see above.
                unsafe { $splat(x) }
            }
            #[inline(always)]
            unsafe fn load(p: *const $T) -> Self {
                // SAFETY: the caller provides a full vector.
                unsafe { $load(p) }
            }
            #[inline(always)]
            unsafe fn store(self, p: *mut $T) {
                // SAFETY: the caller provides a full vector.
                unsafe { $store(p, self) }
            }
            #[inline(always)]
            unsafe fn add_product(self, a: Self, b: Self) -> Self {
                // SAFETY: see above.
                unsafe { $fma(self, a, b) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: see above.
                unsafe { $add(self, other) }
            }
        }
    };
}
vector!(float32x4_t, f32, 4, vdupq_n_f32, vld1q_f32, vst1q_f32, vfmaq_f32, vaddq_f32);
vector!(float64x2_t, f64, 2, vdupq_n_f64, vld1q_f64, vst1q_f64, vfmaq_f64, vaddq_f64);

// SAFETY: as for one register.
unsafe impl<T, R: Vector<T>> Vector<T> for Two<R> {
    const WIDTH: usize = 2 * R::WIDTH;
    #[inline(always)]
    unsafe fn splat(x: T) -> Self {
        // SAFETY: NEON belongs to the target.
        let one = unsafe { R::splat(x) };
        Self(one, one)
    }
    #[inline(always)]
    unsafe fn load(p: *const T) -> Self {
        // SAFETY: the caller provides a full vector.
        unsafe { Self(R::load(p), R::load(p.add(R::WIDTH))) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut T) {
        // SAFETY: the caller provides a full vector.
        unsafe {
            self.0.store(p);
            self.1.store(p.add(R::WIDTH));
        }
    }
    #[inline(always)]
    unsafe fn add_product(self, a: Self, b: Self) -> Self {
        // SAFETY: NEON belongs to the target.
        unsafe { Self(self.0.add_product(a.0, b.0), self.1.add_product(a.1, b.1)) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: NEON belongs to the target.
        unsafe { Self(self.0.add(other.0), self.1.add(other.1)) }
    }
}

type F32 = Two<float32x4_t>;
type F64 = Two<float64x2_t>;

pub(super) static F32_NEON: TileSet<f32> = TileSet {
    mr: 6,
    nr: 16,
    micro: micro_table!(f32, F32, NV, false, [1 2 3 4 5 6]),
    direct: micro_table!(f32, F32, NV, true, [1 2 3 4 5 6]),
    half: micro_table!(f32, F32, 1, true, [1 2 3 4 5 6]),
    gather: gather_table!(f32, F32, NV, [1 2 3 4 5 6]),
    gather_half: gather_table!(f32, F32, 1, [1 2 3 4 5 6]),
    pack: |target, width, kb, source, step, depth_step, valid| {
        if depth_step == 1 {
            transpose_pack(target, width, kb, source, step, valid);
        } else {
            pack_portable(target, width, kb, source, step, depth_step, valid);
        }
    },
    // SAFETY: NEON belongs to the target.
    dot_rows: |x, w, stride, y, acc| unsafe { dot_rows::<f32, F32, 2>(x, w, stride, y, acc) },
    // SAFETY: as above.
    combine_rows: |a, w, count, y, acc| unsafe { combine_rows::<f32, F32, float32x4_t>(a, w, count, y, acc) },
    matrix_unit: None,
};
pub(super) static F64_NEON: TileSet<f64> = TileSet {
    mr: 6,
    nr: 8,
    micro: micro_table!(f64, F64, NV, false, [1 2 3 4 5 6]),
    direct: micro_table!(f64, F64, NV, true, [1 2 3 4 5 6]),
    half: micro_table!(f64, F64, 1, true, [1 2 3 4 5 6]),
    gather: gather_table!(f64, F64, NV, [1 2 3 4 5 6]),
    gather_half: gather_table!(f64, F64, 1, [1 2 3 4 5 6]),
    pack: pack_portable::<f64>,
    // SAFETY: NEON belongs to the target.
    dot_rows: |x, w, stride, y, acc| unsafe { dot_rows::<f64, F64, 4>(x, w, stride, y, acc) },
    // SAFETY: as above.
    combine_rows: |a, w, count, y, acc| unsafe { combine_rows::<f64, F64, float64x2_t>(a, w, count, y, acc) },
    matrix_unit: None,
};

/// [`pack_portable`] for a source contiguous in depth: blocks of 4 x 4 are transposed in registers, what is left
/// over is copied number by number.
fn transpose_pack(target: &mut [f32], width: usize, kb: usize, source: &[f32], step: usize, valid: usize) {
    assert!((valid - 1) * step + kb <= source.len() && target.len().is_multiple_of(kb * width));
    for (panel, target) in target.chunks_exact_mut(kb * width).enumerate() {
        let (source, valid) = (&source[panel * width * step..], width.min(valid - panel * width));
        if valid < width {
            target.fill(0.0);
        }
        let (blocks, depth) = (valid / 4 * 4, kb / 4 * 4);
        for i in (0..blocks).step_by(4) {
            for k in (0..depth).step_by(4) {
                // SAFETY: rows i to i + 3 have kb elements, as asserted above, and the panel kb rows of `width`.
                unsafe {
                    let rows = std::array::from_fn(|r| vld1q_f32(source.as_ptr().add((i + r) * step + k)));
                    for (c, column) in transpose(rows).into_iter().enumerate() {
                        vst1q_f32(target.as_mut_ptr().add((k + c) * width + i), column);
                    }
                }
            }
        }
        for i in 0..valid {
            for k in if i < blocks { depth..kb } else { 0..kb } {
                target[k * width + i] = source[i * step + k];
            }
        }
    }
}

/// Rows to columns of a 4 x 4 block.
#[inline(always)]
fn transpose(r: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: NEON belongs to the target.
    unsafe {
        let pairs = |a, b| (vreinterpretq_f64_f32(vtrn1q_f32(a, b)), vreinterpretq_f64_f32(vtrn2q_f32(a, b)));
        let ((even, odd), (even_below, odd_below)) = (pairs(r[0], r[1]), pairs(r[2], r[3]));
        [
            vreinterpretq_f32_f64(vtrn1q_f64(even, even_below)),
            vreinterpretq_f32_f64(vtrn1q_f64(odd, odd_below)),
            vreinterpretq_f32_f64(vtrn2q_f64(even, even_below)),
            vreinterpretq_f32_f64(vtrn2q_f64(odd, odd_below)),
        ]
    }
}
