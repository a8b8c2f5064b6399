//! Register tiles, packing and small products with AVX-512 and AVX2.

use std::arch::x86_64::*;

use super::{
    Gather, LANES, Micro, NV, Rows, TileSet, Vector, amx, combine_rows, dot_rows, gathered, micro,
    pack_portable,
};
use crate::cpu::simd::avx512::{lanes, transpose};

macro_rules! vector {
    ($V:ident, $T:ty, $width:literal, $splat:ident, $load:ident, $store:ident, $fma:ident, $add:ident) => {
        // SAFETY: instantiated only inside functions that enable the instruction set.
        unsafe impl Vector<$T> for $V {
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
                unsafe { $fma(a, b, self) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: see above.
                unsafe { $add(self, other) }
            }
        }
    };
}
vector!(__m512, f32, 16, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps, _mm512_add_ps);
vector!(__m512d, f64, 8, _mm512_set1_pd, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_fmadd_pd, _mm512_add_pd);
vector!(__m256, f32, 8, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps, _mm256_add_ps);
vector!(__m256d, f64, 4, _mm256_set1_pd, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_fmadd_pd, _mm256_add_pd);

pub(super) static F32_AMX: TileSet<f32> = TileSet { matrix_unit: Some(&amx::UNIT), ..F32_VECTORS };
pub(super) static F32_AVX512: TileSet<f32> = F32_VECTORS;
const F32_VECTORS: TileSet<f32> = TileSet {
    mr: 14,
    nr: 32,
    micro: micro_table!(f32, __m512, NV, false, [1 2 3 4 5 6 7 8 9 10 11 12 13 14], "avx512f"),
    direct: micro_table!(f32, __m512, NV, true, [1 2 3 4 5 6 7 8 9 10 11 12 13 14], "avx512f"),
    half: micro_table!(f32, __m512, 1, true, [1 2 3 4 5 6 7 8 9 10 11 12 13 14], "avx512f"),
    gather: gather_table!(f32, __m512, NV, [1 2 3 4 5 6 7 8 9 10], "avx512f"),
    gather_half: gather_table!(f32, __m512, 1, [1 2 3 4 5 6 7 8 9 10], "avx512f"),
    pack: |target, width, kb, source, step, depth_step, valid| {
        if depth_step == 1 {
            // SAFETY: this table is chosen only where AVX-512 is present.
            unsafe { transpose_pack(target, width, kb, source, step, valid) }
        } else {
            // SAFETY: as above.
            unsafe { copy_pack(target, width, kb, source, step, depth_step, valid) }
        }
    },
    // SAFETY: as above.
    dot_rows: |x, w, stride, y, accumulate| unsafe { dot_rows_16(x, w, stride, y, accumulate) },
    matrix_unit: None,
    combine_rows: combine_rows_with!(f32, __m512, __m256, "avx512f,avx2,fma"),
};
pub(super) static F64_AVX512: TileSet<f64> = TileSet {
    mr: 14,
    nr: 16,
    micro: micro_table!(f64, __m512d, NV, false, [1 2 3 4 5 6 7 8 9 10 11 12 13 14], "avx512f"),
    direct: micro_table!(f64, __m512d, NV, true, [1 2 3 4 5 6 7 8 9 10 11 12 13 14], "avx512f"),
    half: micro_table!(f64, __m512d, 1, true, [1 2 3 4 5 6 7 8 9 10 11 12 13 14], "avx512f"),
    gather: gather_table!(f64, __m512d, NV, [1 2 3 4 5 6 7 8 9 10], "avx512f"),
    gather_half: gather_table!(f64, __m512d, 1, [1 2 3 4 5 6 7 8 9 10], "avx512f"),
    pack: pack_portable::<f64>,
    dot_rows: dot_rows_with!(f64, __m512d, 2, "avx512f"),
    matrix_unit: None,
    combine_rows: combine_rows_with!(f64, __m512d, __m256d, "avx512f,avx2,fma"),
};
pub(super) static F32_AVX2: TileSet<f32> = TileSet {
    mr: 6,
    nr: 16,
    micro: micro_table!(f32, __m256, NV, false, [1 2 3 4 5 6], "avx2,fma"),
    direct: micro_table!(f32, __m256, NV, true, [1 2 3 4 5 6], "avx2,fma"),
    half: micro_table!(f32, __m256, 1, true, [1 2 3 4 5 6], "avx2,fma"),
    gather: gather_table!(f32, __m256, NV, [1 2 3 4 5 6], "avx2,fma"),
    gather_half: gather_table!(f32, __m256, 1, [1 2 3 4 5 6], "avx2,fma"),
    pack: pack_portable::<f32>,
    dot_rows: dot_rows_with!(f32, __m256, 2, "avx2,fma"),
    matrix_unit: None,
    combine_rows: combine_rows_with!(f32, __m256, __m256, "avx2,fma"),
};
pub(super) static F64_AVX2: TileSet<f64> = TileSet {
    mr: 6,
    nr: 8,
    micro: micro_table!(f64, __m256d, NV, false, [1 2 3 4 5 6], "avx2,fma"),
    direct: micro_table!(f64, __m256d, NV, true, [1 2 3 4 5 6], "avx2,fma"),
    half: micro_table!(f64, __m256d, 1, true, [1 2 3 4 5 6], "avx2,fma"),
    gather: gather_table!(f64, __m256d, NV, [1 2 3 4 5 6], "avx2,fma"),
    gather_half: gather_table!(f64, __m256d, 1, [1 2 3 4 5 6], "avx2,fma"),
    pack: pack_portable::<f64>,
    dot_rows: dot_rows_with!(f64, __m256d, 4, "avx2,fma"),
    matrix_unit: None,
    combine_rows: combine_rows_with!(f64, __m256d, __m256d, "avx2,fma"),
};

/// [`pack_portable`] for a source contiguous in depth: blocks of 16 x 16 are transposed in registers.
#[target_feature(enable = "avx512f")]
fn transpose_pack(target: &mut [f32], width: usize, kb: usize, source: &[f32], step: usize, valid: usize) {
    assert!((valid - 1) * step + kb <= source.len() && target.len().is_multiple_of(kb * width));
    for (panel, target) in target.chunks_exact_mut(kb * width).enumerate() {
        let first = panel * width;
        for i0 in (0..width).step_by(16) {
            let store = lanes(width - i0);
            let rows_here = valid.saturating_sub(first + i0).min(16).min(width - i0);
            for k0 in (0..kb).step_by(16) {
                let (depth, load) = (16.min(kb - k0), lanes(kb - k0));
                // Rows far apart, which the processor does not foresee.
                for r in (first + i0 + 32..valid).take(16) {
                    _mm_prefetch::<_MM_HINT_T0>(source.as_ptr().wrapping_add(r * step + k0).cast());
                }
                let mut rows = [_mm512_setzero_ps(); 16];
                for (r, row) in rows.iter_mut().enumerate().take(rows_here) {
                    // SAFETY: row first + i0 + r < valid has kb elements; the mask keeps the load inside
                    // them.
                    *row = unsafe {
                        _mm512_maskz_loadu_ps(load, source.as_ptr().add((first + i0 + r) * step + k0))
                    };
                }
                for (k, column) in transpose(rows).into_iter().enumerate().take(depth) {
                    // SAFETY: the mask keeps the store inside row k0 + k of this panel.
                    unsafe {
                        let at = target.as_mut_ptr().add((k0 + k) * width + i0);
                        _mm512_mask_storeu_ps(at, store, column);
                    }
                }
            }
        }
    }
}

/// [`pack_portable`] with whole vectors where the source is contiguous across panels: each row of the source
/// is read in one run and dealt out to all panels.
#[target_feature(enable = "avx512f")]
fn copy_pack(
    target: &mut [f32],
    width: usize,
    kb: usize,
    source: &[f32],
    step: usize,
    depth_step: usize,
    valid: usize,
) {
    if step != 1 {
        return pack_portable(target, width, kb, source, step, depth_step, valid);
    }
    let panels = target.len() / (kb * width);
    assert!(target.len() == panels * kb * width && (kb - 1) * depth_step + valid <= source.len());
    for k in 0..kb {
        for panel in 0..panels {
            for i0 in (0..width).step_by(16) {
                let first = panel * width + i0;
                if k + 8 < kb {
                    _mm_prefetch::<_MM_HINT_T0>(
                        source.as_ptr().wrapping_add((k + 8) * depth_step + first).cast(),
                    );
                }
                let (load, store) = (lanes(valid.saturating_sub(first).min(width - i0)), lanes(width - i0));
                // SAFETY: the masks keep both accesses inside the slices, as asserted above.
                unsafe {
                    let row = _mm512_maskz_loadu_ps(load, source.as_ptr().add(k * depth_step + first));
                    let at = target.as_mut_ptr().add((panel * kb + k) * width + i0);
                    _mm512_mask_storeu_ps(at, store, row);
                }
            }
        }
    }
}

/// [`dot_rows`] with sixteen rows at a time: their lanes are summed by one transpose.
#[target_feature(enable = "avx512f")]
fn dot_rows_16(x: &[f32], w: &[f32], stride: usize, y: &mut [f32], accumulate: bool) {
    let (k, n) = (x.len(), y.len());
    let whole = k / LANES * LANES;
    assert!(n == 0 || (n - 1) * stride + k <= w.len());
    let tail = lanes(k - whole);
    for j in (0..n).step_by(16) {
        let count = 16.min(n - j);
        if count <= 4 {
            // Too few for a transpose to pay.
            // SAFETY: AVX-512 is enabled here.
            return unsafe {
                dot_rows::<f32, __m512, 1>(x, &w[j * stride..], stride, &mut y[j..], accumulate)
            };
        }
        let start = w[j * stride..].as_ptr();
        // For the numbers of rows that occur most the sums stay in registers.
        macro_rules! sums_of {
            ($count:expr) => {{
                let mut sums = [_mm512_setzero_ps(); 16];
                // SAFETY: rows j..j + count exist with k elements each; the tail is masked.
                unsafe {
                    for i in (0..whole).step_by(LANES) {
                        let x = _mm512_loadu_ps(x.as_ptr().add(i));
                        for (r, sum) in sums[..$count].iter_mut().enumerate() {
                            *sum = _mm512_fmadd_ps(x, _mm512_loadu_ps(start.add(r * stride + i)), *sum);
                        }
                    }
                    if tail != 0 {
                        let x = _mm512_maskz_loadu_ps(tail, x.as_ptr().add(whole));
                        for (r, sum) in sums[..$count].iter_mut().enumerate() {
                            let w = _mm512_maskz_loadu_ps(tail, start.add(r * stride + whole));
                            *sum = _mm512_fmadd_ps(x, w, *sum);
                        }
                    }
                }
                sums
            }};
        }
        let sums = match count {
            16 => sums_of!(16),
            8 => sums_of!(8),
            _ => sums_of!(count),
        };
        // Vector l now holds lane l of every row: the same pairwise sums as `fold`.
        let mut sums = transpose(sums);
        let mut width = 8;
        while width > 0 {
            for l in 0..width {
                sums[l] = _mm512_add_ps(sums[l], sums[l + width]);
            }
            width /= 2;
        }
        // SAFETY: `count` elements of y exist from j on; the mask keeps to them.
        unsafe {
            let (at, mask) = (y.as_mut_ptr().add(j), lanes(count));
            let sum =
                if accumulate { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), sums[0]) } else { sums[0] };
            _mm512_mask_storeu_ps(at, mask, sum);
        }
    }
}
