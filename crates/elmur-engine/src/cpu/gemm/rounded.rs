//! Products x Wᵀ with a weight that is kept in bf16, eight bits of significand: half the memory to read, which is what
//! products of few rows wait for. x and all sums are f32.
//!
//! W [n, k] is packed in panels of 16 outputs and blocks of 32 inputs, filled up with zeros; word (j, c) of a block holds
//! inputs j (low half) and j + 16 (high half) of output c. That is how a matrix unit takes a right operand, and vectors
//! turn a word into two floats by a shift and a mask.
//!
//! On a matrix unit, from 32 rows on, x is three bf16 parts, so that products are exact. By vectors every output is two
//! sums in order, one over the low halves and one over the high ones, added at the end. Without AVX-512, from 32 rows on,
//! W is made f32 again.

use super::{BLOCK, BLOCK_LEN, Depths, Mat, MatrixUnit, PLANES, Product, Ptr, Tile, Tiles, add_edge, gemm};
use crate::cpu::isa::Isa;
use crate::cpu::pool::Pool;
use crate::cpu::simd::LANES;
use crate::precision::Precision;

/// Outputs of a panel.
const PANEL: usize = 16;

/// Words of a block of 16 outputs by 32 inputs.
const WORDS: usize = PANEL * BLOCK / 2;

/// Panels whose outputs one task computes at least.
const TOGETHER: usize = 4;

/// The nearest bf16, ties to even; what is not a number stays so.
fn rounded(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

fn low(word: u32) -> f32 {
    f32::from_bits(word << 16)
}

fn high(word: u32) -> f32 {
    f32::from_bits(word & 0xffff_0000)
}

/// A weight W [n, k] in bf16.
pub(crate) struct RoundedWeight {
    n: usize,
    k: usize,
    words: Vec<u32>,
}

impl std::fmt::Debug for RoundedWeight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "bf16[{}, {}]", self.n, self.k)
    }
}

impl RoundedWeight {
    /// Rounds W, row-major without gaps.
    pub(crate) fn new(weight: &[f32], n: usize, k: usize) -> Self {
        assert_eq!(weight.len(), n * k);
        let steps = k.div_ceil(BLOCK);
        let at = |output: usize, input: usize| {
            if output < n && input < k { u32::from(rounded(weight[output * k + input])) } else { 0 }
        };
        let mut words = Vec::with_capacity(n.div_ceil(PANEL) * steps * WORDS);
        for panel in 0..n.div_ceil(PANEL) {
            for step in 0..steps {
                for (j, c) in (0..BLOCK / 2).flat_map(|j| (0..PANEL).map(move |c| (j, c))) {
                    let (output, input) = (panel * PANEL + c, step * BLOCK + j);
                    words.push(at(output, input) | at(output, input + BLOCK / 2) << 16);
                }
            }
        }
        Self { n, k, words }
    }

    /// Outputs and inputs.
    pub(crate) fn shape(&self) -> [usize; 2] {
        [self.n, self.k]
    }

    fn steps(&self) -> usize {
        self.k.div_ceil(BLOCK)
    }

    fn unit(&self, m: usize) -> Option<&'static MatrixUnit<f32>> {
        let large = m.min(self.n).min(self.k) >= BLOCK && m * self.n * self.k >= 1 << 18;
        f32::tiles(Isa::best()).matrix_unit.filter(|_| large)
    }

    /// Whether vectors multiply `m` rows.
    fn by_vectors(&self, m: usize) -> bool {
        m < BLOCK || (Isa::best() >= Isa::Avx512 && self.unit(m).is_none())
    }

    /// Elements of scratch for a product of `m` rows.
    pub(crate) fn scratch_len(&self, m: usize, threads: usize) -> usize {
        if self.by_vectors(m) {
            m * self.steps() * BLOCK
        } else if self.unit(m).is_some() {
            m.div_ceil(BLOCK) * self.steps() * BLOCK_LEN
        } else {
            (self.n * self.k).next_multiple_of(LANES) + super::scratch_len::<f32>(m, self.n, self.k, threads)
        }
    }

    /// C [m, n] = x Wᵀ for x [m, k], then `epilogue` on every finished tile.
    pub(crate) fn multiply(
        &self,
        pool: &Pool,
        scratch: &mut [f32],
        x: &[f32],
        c: &mut [f32],
        epilogue: impl Fn(Tile<f32>) + Sync,
    ) {
        let Self { n, k, .. } = *self;
        let m = x.len() / k;
        assert!(x.len() == m * k && c.len() == m * n);
        if self.by_vectors(m) {
            self.vectors(pool, scratch, x, c, epilogue);
        } else if let Some(unit) = self.unit(m) {
            self.blocks(pool, unit, scratch, x, c, epilogue);
        } else {
            let (weight, scratch) = scratch.split_at_mut((n * k).next_multiple_of(LANES));
            self.expand(pool, &mut weight[..n * k]);
            let b = Mat::transposed(&weight[..n * k], k);
            let a = Mat::rows(x, k);
            let product = Product { m, n, k, a, b, accumulate: false, precision: Precision::F32 };
            gemm(pool, scratch, product, c, n, epilogue);
        }
    }

    /// W as floats.
    fn expand(&self, pool: &Pool, target: &mut [f32]) {
        let Self { n, k, .. } = *self;
        let panel_len = self.steps() * WORDS;
        let target = Ptr(target.as_mut_ptr());
        pool.run(n.div_ceil(PANEL), |panel, _| {
            let words = &self.words[panel * panel_len..][..panel_len];
            for c in 0..PANEL.min(n - panel * PANEL) {
                // SAFETY: each task writes rows of its own, which exist.
                let row =
                    unsafe { std::slice::from_raw_parts_mut(target.get().add((panel * PANEL + c) * k), k) };
                for (row, block) in row.chunks_mut(BLOCK).zip(words.chunks_exact(WORDS)) {
                    for (input, x) in row.iter_mut().enumerate() {
                        let word = block[input % (BLOCK / 2) * PANEL + c];
                        *x = if input < BLOCK / 2 { low(word) } else { high(word) };
                    }
                }
            }
        });
    }

    /// A product by vectors.
    fn vectors(
        &self,
        pool: &Pool,
        scratch: &mut [f32],
        x: &[f32],
        c: &mut [f32],
        epilogue: impl Fn(Tile<f32>) + Sync,
    ) {
        let Self { n, k, .. } = *self;
        let (m, depth) = (x.len() / k, self.steps() * BLOCK);
        // Rows that end with a block are read as they lie.
        let x = if k == depth {
            x
        } else {
            let padded = &mut scratch[..m * depth];
            for (padded, x) in padded.chunks_exact_mut(depth).zip(x.chunks_exact(k)) {
                padded[..k].copy_from_slice(x);
                padded[k..].fill(0.0);
            }
            &*padded
        };
        let groups = n.div_ceil(TOGETHER * PANEL);
        // A group for each thread where there is enough to read.
        let tasks = if n * k < 16_384 { 1 } else { pool.threads().min(groups) };
        let per_task = groups.div_ceil(tasks);
        let c = Ptr(c.as_mut_ptr());
        pool.run(groups.div_ceil(per_task), |task, _| {
            let (first, end) =
                (task * per_task * TOGETHER * PANEL, ((task + 1) * per_task * TOGETHER * PANEL).min(n));
            let tile = Tile { c: c.get(), ldc: n, row: 0, rows: m, col: first, cols: end - first };
            let words = &self.words[first / PANEL * self.steps() * WORDS..];
            // SAFETY: these columns of C are this task's.
            unsafe { dots(x, m, words, c.get().add(first), n, end - first) };
            epilogue(tile);
        });
    }

    /// A product on a matrix unit.
    fn blocks(
        &self,
        pool: &Pool,
        unit: &'static MatrixUnit<f32>,
        scratch: &mut [f32],
        x: &[f32],
        c: &mut [f32],
        epilogue: impl Fn(Tile<f32>) + Sync,
    ) {
        let Self { n, k, .. } = *self;
        let (m, steps) = (x.len() / k, self.steps());
        let (rows, each) = (m.div_ceil(BLOCK), steps * BLOCK_LEN);
        let packed = Ptr(scratch[..rows * each].as_mut_ptr());
        pool.run(rows, |panel, _| {
            let first = panel * BLOCK;
            let width = BLOCK.min(m - first);
            let source = Depths { data: &x[first * k..], step: k, depth_step: 1, width, depth: k };
            // SAFETY: every task packs a panel of its own.
            let target = unsafe { std::slice::from_raw_parts_mut(packed.get().add(panel * each), each) };
            (unit.pack)(target, true, 1, source, PLANES);
        });
        let columns = n.div_ceil(BLOCK);
        let per_task = columns.div_ceil(4 * pool.threads());
        let c = Ptr(c.as_mut_ptr());
        pool.run(columns.div_ceil(per_task), |task, _| {
            (unit.configure)(BLOCK);
            let own = task * per_task..((task + 1) * per_task).min(columns);
            for column in own.clone() {
                let col = column * BLOCK;
                let panel = |number: usize| {
                    // The last block may have one panel: the other half is not kept.
                    let number = number.min(n.div_ceil(PANEL) - 1);
                    self.words[number * steps * WORDS..][..steps * WORDS].as_ptr()
                };
                let right = (panel(2 * column), panel(2 * column + 1));
                for row in 0..rows {
                    let (height, width) = (BLOCK.min(m - row * BLOCK), BLOCK.min(n - col));
                    // SAFETY: packed above; this block of C is this task's, others go through a buffer.
                    unsafe {
                        let left = packed.get().add(row * each).cast_const();
                        let c = c.get().add(row * BLOCK * n + col);
                        if (height, width) == (BLOCK, BLOCK) {
                            (unit.multiply_rounded)(steps, left, right, c, n);
                        } else {
                            let mut edge = [0f32; BLOCK * BLOCK];
                            (unit.multiply_rounded)(steps, left, right, edge.as_mut_ptr(), BLOCK);
                            add_edge(&edge, BLOCK, c, n, (height, width), false);
                        }
                    }
                }
            }
            (unit.release)();
            let (first, end) = (own.start * BLOCK, (own.end * BLOCK).min(n));
            epilogue(Tile { c: c.get(), ldc: n, row: 0, rows: m, col: first, cols: end - first });
        });
    }
}

/// y[r][c] = x[r] . W[c] for `rows` rows of x and the first `outputs` outputs of panels one after the other; rows of y
/// are `stride` apart.
///
/// # Safety
/// y must have these elements, and nobody else may use them meanwhile.
unsafe fn dots(x: &[f32], rows: usize, words: &[u32], y: *mut f32, stride: usize, outputs: usize) {
    let steps = x.len() / rows / BLOCK;
    assert!(x.len() == rows * steps * BLOCK && words.len() >= outputs.div_ceil(PANEL) * steps * WORDS);
    // SAFETY: asserted here and promised by the caller; `Isa::best` never exceeds what the processor reports.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        match Isa::best() {
            Isa::Avx512 | Isa::Amx => return dots_avx512(x, rows, words, y, stride, outputs),
            Isa::Avx2 => return dots_avx2(x, rows, words, y, stride, outputs),
            Isa::Baseline | Isa::Neon => {}
        }
        dots_plain(x, rows, words, y, stride, outputs);
    }
}

/// # Safety
/// As for [`dots`].
#[inline(always)]
unsafe fn dots_plain(x: &[f32], rows: usize, words: &[u32], y: *mut f32, stride: usize, outputs: usize) {
    let depth = x.len() / rows;
    for (panel, words) in words.chunks_exact(depth / BLOCK * WORDS).take(outputs.div_ceil(PANEL)).enumerate()
    {
        for (row, x) in x.chunks_exact(depth).enumerate() {
            let (mut lows, mut highs) = ([0f32; PANEL], [0f32; PANEL]);
            for (x, block) in x.chunks_exact(BLOCK).zip(words.chunks_exact(WORDS)) {
                for (j, words) in block.chunks_exact(PANEL).enumerate() {
                    for c in 0..PANEL {
                        lows[c] = x[j].mul_add(low(words[c]), lows[c]);
                        highs[c] = x[j + BLOCK / 2].mul_add(high(words[c]), highs[c]);
                    }
                }
            }
            for c in 0..PANEL.min(outputs - panel * PANEL) {
                // SAFETY: promised by the caller.
                unsafe { *y.add(row * stride + panel * PANEL + c) = lows[c] + highs[c] };
            }
        }
    }
}

/// # Safety
/// As for [`dots`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn dots_avx2(x: &[f32], rows: usize, words: &[u32], y: *mut f32, stride: usize, outputs: usize) {
    // SAFETY: promised by the caller.
    unsafe { dots_plain(x, rows, words, y, stride, outputs) }
}

/// One row with four panels at a time, to hide the latency of sums; four rows with two, so that words are turned into
/// floats once for all of them.
///
/// # Safety
/// As for [`dots`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn dots_avx512(x: &[f32], rows: usize, words: &[u32], y: *mut f32, stride: usize, outputs: usize) {
    let depth = x.len() / rows;
    let mut row = 0;
    while row < rows {
        let many = rows - row >= 4;
        let here = if many { 4 } else { 1 };
        let x = &x[row * depth..][..here * depth];
        // SAFETY: promised by the caller.
        unsafe {
            let y = y.add(row * stride);
            match many {
                true => dots_tile::<4, 2>(x, words, y, stride, outputs),
                false => dots_tile::<1, 4>(x, words, y, stride, outputs),
            }
        }
        row += here;
    }
}

/// [`dots`] for R rows, P panels at a time.
///
/// # Safety
/// As for [`dots`].
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn dots_tile<const R: usize, const P: usize>(
    x: &[f32],
    words: &[u32],
    y: *mut f32,
    stride: usize,
    outputs: usize,
) {
    use std::arch::x86_64::*;

    use crate::cpu::simd::avx512::lanes;

    let depth = x.len() / R;
    let panel_len = depth / BLOCK * WORDS;
    let mask = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    let panels = outputs.div_ceil(PANEL);
    for first in (0..panels).step_by(P) {
        let mut start = [words.as_ptr(); P];
        for (p, start) in start.iter_mut().enumerate() {
            // Groups of fewer panels repeat the last one and drop the repeats.
            *start = words[(first + p).min(panels - 1) * panel_len..].as_ptr();
        }
        let mut lows = [[_mm512_setzero_ps(); P]; R];
        let mut highs = [[_mm512_setzero_ps(); P]; R];
        for step in 0..depth / BLOCK {
            for j in 0..BLOCK / 2 {
                for p in 0..P {
                    // SAFETY: word row j of block `step` of a panel, all of which exist as `dots` has asserted; inputs
                    // j and j + 16 of that block in each row of x.
                    unsafe {
                        let words = _mm512_loadu_si512(start[p].add(step * WORDS + j * PANEL).cast());
                        let low = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words));
                        let high = _mm512_castsi512_ps(_mm512_and_si512(words, mask));
                        for r in 0..R {
                            let x = x.as_ptr().add(r * depth + step * BLOCK + j);
                            lows[r][p] = _mm512_fmadd_ps(_mm512_set1_ps(*x), low, lows[r][p]);
                            highs[r][p] =
                                _mm512_fmadd_ps(_mm512_set1_ps(*x.add(BLOCK / 2)), high, highs[r][p]);
                        }
                    }
                }
            }
        }
        for p in 0..P.min(panels - first) {
            let at = (first + p) * PANEL;
            for r in 0..R {
                let sum = _mm512_add_ps(lows[r][p], highs[r][p]);
                // SAFETY: the mask keeps the store inside of the row's outputs.
                unsafe { _mm512_mask_storeu_ps(y.add(r * stride + at), lanes(outputs - at), sum) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::random;
    use super::*;

    fn f32s(n: usize, stream: u32) -> Vec<f32> {
        random(n, stream).into_iter().map(|x| x as f32).collect()
    }

    #[test]
    fn numbers_are_rounded_to_the_nearest() {
        for (x, want) in [
            (1.0, 1.0),
            (1.0 + 1.0 / 256.0, 1.0),
            (1.0 + 3.0 / 256.0, 1.015625),
            (-3.3, -3.296875),
            (0.0, 0.0),
        ] {
            assert_eq!(f32::from_bits(u32::from(rounded(x)) << 16), want, "{x}");
        }
        assert!(f32::from_bits(u32::from(rounded(f32::NAN)) << 16).is_nan());
        assert_eq!(f32::from_bits(u32::from(rounded(f32::INFINITY)) << 16), f32::INFINITY);
    }

    /// Few rows, many rows, with and without a matrix unit: the product with the rounded weight, to f32's accuracy, and
    /// the same bits for any number of threads.
    #[test]
    fn products_are_those_of_the_rounded_weight() {
        for (m, n, k) in [
            (1, 1, 1),
            (1, 128, 128),
            (2, 70, 33),
            (6, 200, 64),
            (13, 40, 50),
            (40, 20, 50),
            (100, 130, 96),
            (70, 50, 1024),
        ] {
            let (x, w) = (f32s(m * k, 0), f32s(n * k, 1));
            let weight = RoundedWeight::new(&w, n, k);
            let mut first: Option<Vec<f32>> = None;
            for threads in [1, 2, 3] {
                let pool = Pool::new(threads);
                let mut scratch = vec![f32::NAN; weight.scratch_len(m, threads)];
                let mut c = vec![f32::NAN; m * n];
                weight.multiply(&pool, &mut scratch, &x, &mut c, |mut tile| {
                    for i in tile.row..tile.row + tile.rows {
                        tile.row_mut(i).iter_mut().for_each(|c| *c += 1.0);
                    }
                });
                assert_eq!(c, *first.get_or_insert_with(|| c.clone()), "{m}x{n}x{k} with {threads} threads");
            }
            for (at, got) in first.unwrap_or_default().into_iter().enumerate() {
                let (i, j) = (at / n, at % n);
                let w = |p: usize| f32::from_bits(u32::from(rounded(w[j * k + p])) << 16);
                let terms = (0..k).map(|p| f64::from(x[i * k + p]) * f64::from(w(p)));
                let (exact, size) = terms.fold((1.0, 1.0), |(sum, size), t| (sum + t, size + t.abs()));
                let error = (f64::from(got) - exact).abs() / size;
                assert!(error < 1e-6, "{m}x{n}x{k} ({i}, {j}): {error:e}");
            }
        }
    }

    #[test]
    fn few_rows_have_the_same_bits_with_every_instruction_set() {
        let (n, k) = (83, 160);
        let weight = RoundedWeight::new(&f32s(n * k, 1), n, k);
        for rows in [1, 3, 4, 6] {
            let x = f32s(rows * k, 0);
            let (mut best, mut plain) = (vec![0f32; rows * n], vec![0f32; rows * n]);
            // SAFETY: both have as many rows of n outputs.
            unsafe {
                dots(&x, rows, &weight.words, best.as_mut_ptr(), n, n);
                dots_plain(&x, rows, &weight.words, plain.as_mut_ptr(), n, n);
            }
            assert_eq!(best, plain, "{rows} rows");
        }
    }
}
