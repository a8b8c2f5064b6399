//! Products on the matrix unit (AMX) of recent x86 servers, to the accuracy of f32.
//!
//! The unit multiplies bf16 and adds in f32. A float is the exact sum of three bf16 (8 + 8 + 8 bits of
//! significand), so a product of floats is nine products of bf16, of which three lie below the last bit of
//! the result: the other six are computed, smallest first. Six products of 16 x 16 x 32 still take a third of
//! the time of the same sum by vectors. In a reduced precision the smallest part of every number is left out, and three
//! products are computed.
//!
//! An operand is packed into blocks of 32 rows (or columns) by 32 steps of depth: three planes, each of two
//! tiles of 1 KB. The unit takes depths in pairs; pair j of a block holds depths j and j + 16, which two
//! vectors give without a permutation. Infinite operands give NaN where the exact product would be infinite.

use std::arch::asm;
use std::arch::x86_64::*;

use super::{BLOCK, BLOCK_LEN, Depths, MatrixUnit, PLANES};
use crate::cpu::simd::avx512::{lanes, transpose};

/// Distance, in rows of tiles, at which packing prefetches its source.
const AHEAD: usize = 2;

/// Rows of a tile register.
const TILE_ROWS: usize = 16;

/// Elements of a tile register.
const TILE: usize = TILE_ROWS * 16;

pub(super) static UNIT: MatrixUnit<f32> = MatrixUnit {
    // SAFETY: this table is chosen only where AMX and AVX-512 are present, here and below.
    configure: |rows| unsafe { configure(rows) },
    // SAFETY: as above.
    release: || unsafe { asm!("tilerelease", options(nomem, nostack)) },
    // SAFETY: as above.
    pack: |target, left, panels, source, planes| unsafe {
        match planes {
            PLANES => pack::<PLANES>(target, left, panels, source),
            _ => pack::<2>(target, left, panels, source),
        }
    },
    multiply,
    multiply_two,
    multiply_half,
    multiply_rounded,
};

/// Shapes of the tiles, as the processor reads them.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// Eight tiles, of which the lower halves of A and C have so many rows.
    const fn of(lower: u8) -> Self {
        let upper = TILE_ROWS as u8;
        let all = [upper, upper, lower, lower, upper, lower, upper, upper];
        let (mut row_bytes, mut rows, mut i) = ([0; 16], [0; 16], 0);
        while i < all.len() {
            (row_bytes[i], rows[i]) = (64, all[i]);
            i += 1;
        }
        Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    }
}

/// Eight tiles of 16 rows of 64 bytes; those of the lower half of A and C as [`multiply`] uses them have `rows` - 16
/// rows, 1 to 16.
///
/// # Safety
/// AMX must be present and permitted.
unsafe fn configure(rows: usize) {
    // Ready in memory: to load what was just put together would wait for that.
    static CONFIGS: [Config; TILE_ROWS] = {
        let mut all = [Config::of(1); TILE_ROWS];
        let mut lower = 1;
        while lower < TILE_ROWS {
            all[lower] = Config::of(lower as u8 + 1);
            lower += 1;
        }
        all
    };
    let config = &CONFIGS[rows.saturating_sub(TILE_ROWS + 1).min(TILE_ROWS - 1)];
    // SAFETY: the configuration is valid for palette 1.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const *config, options(readonly, nostack)) }
}

/// A function that computes C (32 x 32, rows `ldc` apart) (+)= A B over `steps` packed blocks of depth; `$line`s do so
/// for one block, whose C lies in tmm0 to tmm3. C has fewer rows where the tiles are configured so.
///
/// # Safety
/// The tiles must be configured on this thread, A and B hold `steps` blocks, C as many rows of 32 columns as
/// configured.
macro_rules! multiply_blocks {
    ($(#[$doc:meta])* $name:ident: $($line:literal)*) => {
        $(#[$doc])*
        unsafe fn $name(steps: usize, a: *const f32, b: *const f32, c: *mut f32, ldc: usize, accumulate: bool) {
            // SAFETY: as promised by the caller; every access is inside the blocks and the 32 x 32 part of C.
            unsafe {
                asm!(
                    "test {accumulate}, {accumulate}",
                    "jnz 2f",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    "jmp 3f",
                    "2:",
                    "tileloadd tmm0, [{c} + {ldc}*1]",
                    "tileloadd tmm1, [{c} + {ldc}*1 + 64]",
                    "tileloadd tmm2, [{c16} + {ldc}*1]",
                    "tileloadd tmm3, [{c16} + {ldc}*1 + 64]",
                    "3:",
                    $($line,)*
                    "add {a}, 6144",
                    "add {b}, 6144",
                    "dec {steps}",
                    "jnz 3b",
                    "tilestored [{c} + {ldc}*1], tmm0",
                    "tilestored [{c} + {ldc}*1 + 64], tmm1",
                    "tilestored [{c16} + {ldc}*1], tmm2",
                    "tilestored [{c16} + {ldc}*1 + 64], tmm3",
                    a = inout(reg) a => _,
                    b = inout(reg) b => _,
                    steps = inout(reg) steps => _,
                    c = in(reg) c,
                    c16 = in(reg) c.add(16 * ldc),
                    ldc = in(reg) ldc * size_of::<f32>(),
                    row = in(reg) 64_usize,
                    accumulate = in(reg) u64::from(accumulate),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

multiply_blocks! {
    /// The product from all planes. Planes of a block: high at 0, middle at 2048, low at 4096 bytes. Pairs run from the
    /// smallest to the largest; consecutive pairs share an operand where they can.
    ///
    /// # Safety
    /// As the macro says.
    multiply:
        // high x low
        "tileloadd tmm4, [{a} + {row}*1]"
        "tileloadd tmm6, [{b} + {row}*1 + 4096]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm7, [{b} + {row}*1 + 5120]"
        "tdpbf16ps tmm1, tmm4, tmm7"
        "tileloadd tmm5, [{a} + {row}*1 + 1024]"
        "tdpbf16ps tmm2, tmm5, tmm6"
        "tdpbf16ps tmm3, tmm5, tmm7"
        // high x middle
        "tileloadd tmm6, [{b} + {row}*1 + 2048]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm7, [{b} + {row}*1 + 3072]"
        "tdpbf16ps tmm1, tmm4, tmm7"
        "tdpbf16ps tmm2, tmm5, tmm6"
        "tdpbf16ps tmm3, tmm5, tmm7"
        // middle x middle
        "tileloadd tmm4, [{a} + {row}*1 + 2048]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tdpbf16ps tmm1, tmm4, tmm7"
        "tileloadd tmm5, [{a} + {row}*1 + 3072]"
        "tdpbf16ps tmm2, tmm5, tmm6"
        "tdpbf16ps tmm3, tmm5, tmm7"
        // middle x high
        "tileloadd tmm6, [{b} + {row}*1]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm7, [{b} + {row}*1 + 1024]"
        "tdpbf16ps tmm1, tmm4, tmm7"
        "tdpbf16ps tmm2, tmm5, tmm6"
        "tdpbf16ps tmm3, tmm5, tmm7"
        // low x high
        "tileloadd tmm4, [{a} + {row}*1 + 4096]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tdpbf16ps tmm1, tmm4, tmm7"
        "tileloadd tmm5, [{a} + {row}*1 + 5120]"
        "tdpbf16ps tmm2, tmm5, tmm6"
        "tdpbf16ps tmm3, tmm5, tmm7"
        // high x high
        "tileloadd tmm4, [{a} + {row}*1]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tdpbf16ps tmm1, tmm4, tmm7"
        "tileloadd tmm5, [{a} + {row}*1 + 1024]"
        "tdpbf16ps tmm2, tmm5, tmm6"
        "tdpbf16ps tmm3, tmm5, tmm7"
}

multiply_blocks! {
    /// The product from the high and middle planes of both: the three larger of the six products.
    ///
    /// # Safety
    /// As the macro says.
    multiply_two:
        // high x middle
        "tileloadd tmm4, [{a} + {row}*1]"
        "tileloadd tmm6, [{b} + {row}*1 + 2048]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm7, [{b} + {row}*1 + 3072]"
        "tdpbf16ps tmm1, tmm4, tmm7"
        "tileloadd tmm5, [{a} + {row}*1 + 1024]"
        "tdpbf16ps tmm2, tmm5, tmm6"
        "tdpbf16ps tmm3, tmm5, tmm7"
        // high x high
        "tileloadd tmm6, [{b} + {row}*1]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm7, [{b} + {row}*1 + 1024]"
        "tdpbf16ps tmm1, tmm4, tmm7"
        "tdpbf16ps tmm2, tmm5, tmm6"
        "tdpbf16ps tmm3, tmm5, tmm7"
        // middle x high
        "tileloadd tmm4, [{a} + {row}*1 + 2048]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tdpbf16ps tmm1, tmm4, tmm7"
        "tileloadd tmm5, [{a} + {row}*1 + 3072]"
        "tdpbf16ps tmm2, tmm5, tmm6"
        "tdpbf16ps tmm3, tmm5, tmm7"
}

/// C (16 x 64, rows `ldc` apart) = A B over `steps` packed blocks of depth: the upper halves of A's blocks,
/// and two panels of B, the second at `b_next`. Every sum runs in the order of [`multiply`].
///
/// # Safety
/// The tiles must be configured on this thread for 32 rows, A and both panels of B hold `steps` blocks, C 16
/// rows of 64 columns.
unsafe fn multiply_half(
    steps: usize,
    a: *const f32,
    (b, b_next): (*const f32, *const f32),
    c: *mut f32,
    ldc: usize,
) {
    // A's planes stay in tmm4 to tmm6 (high, middle, low) while tiles of B pass through tmm7.
    //
    // SAFETY: as promised by the caller; every access is inside the blocks and the 16 x 64 part of C.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "3:",
            // high x low
            "tileloadd tmm4, [{a} + {row}*1]",
            "tileloadd tmm7, [{b} + {row}*1 + 4096]",
            "tdpbf16ps tmm0, tmm4, tmm7",
            "tileloadd tmm7, [{b} + {row}*1 + 5120]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm7, [{b_next} + {row}*1 + 4096]",
            "tdpbf16ps tmm2, tmm4, tmm7",
            "tileloadd tmm7, [{b_next} + {row}*1 + 5120]",
            "tdpbf16ps tmm3, tmm4, tmm7",
            // high x middle, middle x middle
            "tileloadd tmm5, [{a} + {row}*1 + 2048]",
            "tileloadd tmm7, [{b} + {row}*1 + 2048]",
            "tdpbf16ps tmm0, tmm4, tmm7",
            "tdpbf16ps tmm0, tmm5, tmm7",
            "tileloadd tmm7, [{b} + {row}*1 + 3072]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm1, tmm5, tmm7",
            "tileloadd tmm7, [{b_next} + {row}*1 + 2048]",
            "tdpbf16ps tmm2, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm7",
            "tileloadd tmm7, [{b_next} + {row}*1 + 3072]",
            "tdpbf16ps tmm3, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // middle x high, low x high, high x high
            "tileloadd tmm6, [{a} + {row}*1 + 4096]",
            "tileloadd tmm7, [{b} + {row}*1]",
            "tdpbf16ps tmm0, tmm5, tmm7",
            "tdpbf16ps tmm0, tmm6, tmm7",
            "tdpbf16ps tmm0, tmm4, tmm7",
            "tileloadd tmm7, [{b} + {row}*1 + 1024]",
            "tdpbf16ps tmm1, tmm5, tmm7",
            "tdpbf16ps tmm1, tmm6, tmm7",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm7, [{b_next} + {row}*1]",
            "tdpbf16ps tmm2, tmm5, tmm7",
            "tdpbf16ps tmm2, tmm6, tmm7",
            "tdpbf16ps tmm2, tmm4, tmm7",
            "tileloadd tmm7, [{b_next} + {row}*1 + 1024]",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "tdpbf16ps tmm3, tmm6, tmm7",
            "tdpbf16ps tmm3, tmm4, tmm7",
            "add {a}, 6144",
            "add {b}, 6144",
            "add {b_next}, 6144",
            "dec {steps}",
            "jnz 3b",
            "tilestored [{c} + {ldc}*1], tmm0",
            "tilestored [{c} + {ldc}*1 + 64], tmm1",
            "tilestored [{c} + {ldc}*1 + 128], tmm2",
            "tilestored [{c} + {ldc}*1 + 192], tmm3",
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            b_next = inout(reg) b_next => _,
            steps = inout(reg) steps => _,
            c = in(reg) c,
            ldc = in(reg) ldc * size_of::<f32>(),
            row = in(reg) 64_usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// C (32 x 32, rows `ldc` apart) = A B over `steps` packed blocks of depth, where B is bf16: two panels of 16 columns,
/// blocks of one tile each. Products run from the smallest part of A to the largest.
///
/// # Safety
/// The tiles must be configured on this thread for 32 rows, A and both panels of B hold `steps` blocks, C 32 rows of 32
/// columns.
unsafe fn multiply_rounded(
    steps: usize,
    a: *const f32,
    (b, b_next): (*const u32, *const u32),
    c: *mut f32,
    ldc: usize,
) {
    // SAFETY: as promised by the caller; every access is inside the blocks and the 32 x 32 part of C.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "3:",
            "tileloadd tmm6, [{b} + {row}*1]",
            // low
            "tileloadd tmm4, [{a} + {row}*1 + 4096]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{b_next} + {row}*1]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {row}*1 + 5120]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // middle
            "tileloadd tmm4, [{a} + {row}*1 + 2048]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {row}*1 + 3072]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            // high
            "tileloadd tmm4, [{a} + {row}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{a} + {row}*1 + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 6144",
            "add {b}, 1024",
            "add {b_next}, 1024",
            "dec {steps}",
            "jnz 3b",
            "tilestored [{c} + {ldc}*1], tmm0",
            "tilestored [{c} + {ldc}*1 + 64], tmm1",
            "tilestored [{c16} + {ldc}*1], tmm2",
            "tilestored [{c16} + {ldc}*1 + 64], tmm3",
            a = inout(reg) a => _,
            b = inout(reg) b => _,
            b_next = inout(reg) b_next => _,
            steps = inout(reg) steps => _,
            c = in(reg) c,
            c16 = in(reg) c.add(16 * ldc),
            ldc = in(reg) ldc * size_of::<f32>(),
            row = in(reg) 64_usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// Packs `panels` panels of 32 into blocks, zeros beyond the depth. What lies beyond the width is left as it
/// was: it enters rows or columns of C that nobody keeps. So is what lies beyond the largest COUNT planes. A left
/// operand has the depth along its tile's rows, a right operand down its tile's columns.
#[target_feature(enable = "avx512f,avx512bw")]
fn pack<const COUNT: usize>(target: &mut [f32], left: bool, panels: usize, source: Depths<'_, f32>) {
    let Depths { data, step, depth_step, width, depth } = source;
    assert!((width - 1) * step + (depth - 1) * depth_step < data.len());
    let steps = depth.div_ceil(BLOCK);
    assert!(target.len() == panels * steps * BLOCK_LEN && (step == 1 || depth_step == 1));
    // The first tile of a block's half; its planes are two tiles apart.
    let tile = |s: usize, half: usize| ((half / 2) * steps + s) * BLOCK_LEN + half % 2 * TILE;
    let mut put = |s: usize, half: usize, row: usize, x: [__m512i; 3], y: [__m512i; 3]| {
        let at = &mut target[tile(s, half)..][..5 * TILE];
        for plane in 0..COUNT {
            let words = in_pairs(x[plane], y[plane]);
            // SAFETY: sixteen floats of row `row` < 16 of tile `2 * plane`, all inside the slice above.
            unsafe { _mm512_storeu_si512(at.as_mut_ptr().add(2 * plane * TILE + row * 16).cast(), words) };
        }
    };
    // Sources are read in long runs: tens of short ones far apart would miss the cache each time.
    if depth_step == 1 {
        // A row of the source is a row of each tile.
        for i in 0..width {
            let at = data.as_ptr().wrapping_add(i * step);
            for s in 0..steps {
                let deep = depth - s * BLOCK;
                let at = at.wrapping_add(s * BLOCK);
                prefetch(at.wrapping_add(AHEAD * step));
                prefetch(at.wrapping_add(AHEAD * step + 16));
                let x = split(load(at, deep));
                let y = split(load(at.wrapping_add(16), deep.saturating_sub(16)));
                put(s, i / 16, i % 16, x, y);
            }
        }
    } else {
        // Two depths of sixteen columns of the source are a row of a tile.
        for s in 0..steps {
            for row in 0..16 {
                let k = s * BLOCK + row;
                let at = data.as_ptr().wrapping_add(k * depth_step);
                // The last rows of a block fetch the first of the next.
                let ahead = depth_step * if row + AHEAD < 16 { AHEAD } else { AHEAD + 16 };
                for half in 0..width.div_ceil(16) {
                    let count = |k: usize| if k < depth { width - half * 16 } else { 0 };
                    let (x, y) = (at.wrapping_add(half * 16), at.wrapping_add(half * 16 + 16 * depth_step));
                    prefetch(x.wrapping_add(ahead));
                    prefetch(y.wrapping_add(ahead));
                    put(s, half, row, split(load(x, count(k))), split(load(y, count(k + 16))));
                }
            }
        }
    }
    if (depth_step == 1) != left {
        for block in target.chunks_exact_mut(BLOCK_LEN) {
            block[..2 * COUNT * TILE].chunks_exact_mut(TILE).for_each(|tile| turn(tile));
        }
    }
}

/// Exchanges rows and columns of a tile of 16 x 16 words.
#[inline]
#[target_feature(enable = "avx512f")]
fn turn(tile: &mut [f32]) {
    assert_eq!(tile.len(), TILE);
    let mut rows = [_mm512_setzero_ps(); 16];
    for (i, row) in rows.iter_mut().enumerate() {
        // SAFETY: the tile has sixteen rows of sixteen.
        *row = unsafe { _mm512_loadu_ps(tile.as_ptr().add(16 * i)) };
    }
    for (i, row) in transpose(rows).into_iter().enumerate() {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(tile.as_mut_ptr().add(16 * i), row) };
    }
}

/// Prefetches the cache line of an address; any address is allowed.
#[inline]
fn prefetch(at: *const f32) {
    // SAFETY: prefetches of any address are harmless.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
}

/// The first `count` floats, then zeros.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(at: *const f32, count: usize) -> __m512 {
    // SAFETY: `pack` asks only for elements inside its source; others are masked.
    unsafe { if count >= 16 { _mm512_loadu_ps(at) } else { _mm512_maskz_loadu_ps(lanes(count), at) } }
}

/// x as a sum of three numbers whose upper halves are bf16: the nearest, the nearest to the rest, and what
/// remains.
#[inline]
#[target_feature(enable = "avx512f")]
fn split(x: __m512) -> [__m512i; 3] {
    let nearest = |x: __m512| {
        let up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
        _mm512_and_si512(up, _mm512_set1_epi32(0xffff_0000_u32 as i32))
    };
    let high = nearest(x);
    let rest = _mm512_sub_ps(x, _mm512_castsi512_ps(high));
    let middle = nearest(rest);
    let low = _mm512_sub_ps(rest, _mm512_castsi512_ps(middle));
    [high, middle, _mm512_castps_si512(low)]
}

/// The upper halves of 32 words, a and b in turn.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn in_pairs(a: __m512i, b: __m512i) -> __m512i {
    _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(a), b)
}
