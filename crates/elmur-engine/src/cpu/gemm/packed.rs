//! A right operand that is packed once and then multiplied by many left sides, one after the other: the
//! weight of a recurrence.
//!
//! Every element of a product has the same bits in whatever parts the rows come. Register tiles give it the
//! bits of [`gemm`](super::gemm) by vectors.
//!
//! A matrix unit takes rows by the sixteen, register tiles by the four: with few rows and many threads the
//! unit leaves threads without work. It is chosen by the number of rows alone, since the number of threads
//! must not change a result: from [`UNIT_ROWS`] on, which is work for four threads. Forward and backward
//! passes of an LSTM (64 rows, 30 steps, width 128), with the layers around it, took 10.9 ms instead of 13.7
//! on one thread; with that gain, register tiles should be the faster ones for 64 rows on eight threads.

use super::{
    BLOCK, BLOCK_LEN, Depths, KC, Left, Mat, MatrixUnit, PLANES, Ptr, TileSet, Tiles, add_edge, pack_panels,
};
use crate::cpu::isa::Isa;
use crate::cpu::pool::{Pool, RowsMut};
use crate::cpu::simd::LANES;

/// Rows, of all left sides together, from which a matrix unit multiplies.
const UNIT_ROWS: usize = 64;

/// Rows of half a block of a matrix unit.
const HALF: usize = BLOCK / 2;

/// Most rows of one left side for a matrix unit: with a depth of 512 they are 400 KB when packed, which stay in
/// the second-level cache beside the right operand.
const MOST_ROWS: usize = 2 * BLOCK;

/// How a right operand B [k, n] is packed.
#[derive(Clone, Copy)]
pub(crate) struct PackedRight<T: 'static> {
    tiles: &'static TileSet<T>,
    /// What multiplies instead of register tiles.
    unit: Option<&'static MatrixUnit<T>>,
    n: usize,
    k: usize,
}

impl<T: Tiles> PackedRight<T> {
    /// For left sides that have `rows` rows together.
    pub(crate) fn new(rows: usize, n: usize, k: usize) -> Self {
        let tiles = T::tiles(Isa::best());
        let large = rows >= UNIT_ROWS && n.min(k) >= BLOCK;
        Self { tiles, unit: tiles.matrix_unit.filter(|_| large), n, k }
    }

    /// Elements of the packed operand, a whole number of cache lines.
    pub(crate) fn len(&self) -> usize {
        match self.unit {
            Some(_) => self.n.div_ceil(BLOCK) * self.panel_len(),
            None => (self.n.div_ceil(self.tiles.nr) * self.tiles.nr * self.k).next_multiple_of(LANES),
        }
    }

    /// Elements of a matrix unit's panel.
    fn panel_len(&self) -> usize {
        self.k.div_ceil(BLOCK) * BLOCK_LEN
    }

    /// Rows of one left side for a matrix unit, if there is one: `rows` rows divided among `threads` threads.
    pub(crate) fn unit_rows(&self, rows: usize, threads: usize) -> Option<usize> {
        self.unit.map(|_| rows.div_ceil(threads).next_multiple_of(HALF).min(MOST_ROWS))
    }

    /// Elements of scratch for the products of a left side with up to `rows` rows.
    pub(crate) fn left_len(&self, rows: usize) -> usize {
        self.unit.map_or(0, |_| rows.div_ceil(BLOCK) * self.panel_len())
    }

    /// Packs B into [`PackedRight::len`] elements.
    pub(crate) fn pack(&self, pool: &Pool, b: Mat<'_, T>, target: &mut [T]) {
        let Self { tiles, unit, n, k } = *self;
        b.check(k, n);
        let target = &mut target[..self.len()];
        let pool = if n * k < 32_768 { Pool::serial() } else { pool };
        let (step, depth_step) = (b.cs, b.rs);
        let Some(unit) = unit else {
            let source = (b.data, step, depth_step, n);
            let run = |count: usize, task: &(dyn Fn(usize, usize) + Sync)| pool.run(count, task);
            // SAFETY: as large as it must be, and borrowed for this call.
            return unsafe { pack_panels(tiles, &run, Ptr(target.as_mut_ptr()), tiles.nr, k, source) };
        };
        let panels = n.div_ceil(BLOCK);
        let per_task = panels.div_ceil(2 * pool.threads());
        pool.blocks(panels, per_task, RowsMut::new(target, self.panel_len()), |first, target, _| {
            let col = first * BLOCK;
            let panels = target.len() / self.panel_len();
            let width = (panels * BLOCK).min(n - col);
            let source = Depths { data: &b.data[col * step..], step, depth_step, width, depth: k };
            (unit.pack)(target, false, panels, source, PLANES);
        });
    }

    /// C [m, n] = A [m, k] B, all row-major and without gaps, on the calling thread. `left` is scratch, as
    /// much as [`PackedRight::left_len`] says.
    pub(crate) fn multiply(&self, packed: &[T], left: &mut [T], a: &[T], c: &mut [T]) {
        let m = a.len() / self.k;
        assert!(packed.len() >= self.len() && a.len() == m * self.k && c.len() == m * self.n);
        match self.unit {
            Some(unit) => self.multiply_blocks(unit, packed, &mut left[..self.left_len(m)], a, c),
            None => self.multiply_tiles(packed, a, c),
        }
    }

    /// [`PackedRight::multiply`] by register tiles.
    fn multiply_tiles(&self, packed: &[T], a: &[T], c: &mut [T]) {
        let Self { tiles, n, k, .. } = *self;
        let (m, nr, panels) = (a.len() / k, tiles.nr, n.div_ceil(tiles.nr));
        // Tiles of about equal height; each panel of B serves them all while it is in the first-level cache.
        let height = m.div_ceil(m.div_ceil(tiles.direct_height(k)).max(1)).max(1);
        for k0 in (0..k).step_by(KC) {
            let kb = KC.min(k - k0);
            for panel in 0..panels {
                let b = packed[(k0 * panels + panel * kb) * nr..][..kb * nr].as_ptr();
                for row in (0..m).step_by(height) {
                    let size = (height.min(m - row), nr.min(n - panel * nr));
                    let left = Left::Rows(a[row * k + k0..].as_ptr(), k);
                    let c = c[row * n + panel * nr..].as_mut_ptr();
                    tiles.run(kb, left, (b, nr), c, n, size, k0 > 0);
                }
            }
        }
    }

    /// [`PackedRight::multiply`] by a matrix unit, with A packed into `left`.
    fn multiply_blocks(&self, unit: &MatrixUnit<T>, packed: &[T], left: &mut [T], a: &[T], c: &mut [T]) {
        let Self { n, k, .. } = *self;
        let (m, steps) = (a.len() / k, k.div_ceil(BLOCK));
        if m == 0 {
            return;
        }
        let source = Depths { data: a, step: k, depth_step: 1, width: m, depth: k };
        (unit.pack)(left, true, m.div_ceil(BLOCK), source, PLANES);
        let panel = |packed: &[T], first: usize| packed[first / BLOCK * self.panel_len()..].as_ptr();
        (unit.configure)(BLOCK);
        // Two panels of B at a time serve all rows while they are in the cache.
        for col in (0..n).step_by(2 * BLOCK) {
            for row in (0..m).step_by(BLOCK) {
                let (rows, a) = (BLOCK.min(m - row), panel(left, row));
                let is_half = rows <= HALF && col + BLOCK < n;
                let (height, width) = if is_half { (HALF, 2 * BLOCK) } else { (BLOCK, BLOCK) };
                for col in (col..n.min(col + 2 * BLOCK)).step_by(width) {
                    let b = panel(packed, col);
                    let cols = width.min(n - col);
                    let c = &mut c[row * n + col..][..(rows - 1) * n + cols];
                    let product = |c: *mut T, ldc: usize| {
                        // SAFETY: the tiles are configured, A and B packed for `steps` blocks, and C is a
                        // whole block or a buffer of that size.
                        unsafe {
                            if is_half {
                                let b_next = b.add(self.panel_len());
                                (unit.multiply_half)(steps, a, (b, b_next), c, ldc);
                            } else {
                                (unit.multiply)(steps, a, b, c, ldc, false);
                            }
                        }
                    };
                    if (rows, cols) == (height, width) {
                        product(c.as_mut_ptr(), n);
                    } else {
                        let mut edge = [T::ZERO; BLOCK * BLOCK];
                        product(edge.as_mut_ptr(), width);
                        // SAFETY: this part of C exists.
                        unsafe { add_edge(&edge, width, c.as_mut_ptr(), n, (rows, cols), false) };
                    }
                }
            }
        }
        (unit.release)();
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{SIZES, product, random};
    use super::*;

    /// A B in parts of several sizes, which must all agree.
    fn in_parts<T: Tiles>((m, n, k): (usize, usize, usize), a: &[T], b: &[T]) -> Vec<T> {
        let pool = Pool::new(2);
        let right = PackedRight::<T>::new(m, n, k);
        let mut packed = vec![T::of(f64::NAN); right.len()];
        right.pack(&pool, Mat::rows(b, n), &mut packed);
        let mut whole: Option<Vec<T>> = None;
        for part in [m, 1, 3, 16, 20, 32, 48] {
            let mut got = vec![T::of(f64::NAN); m * n];
            let mut left = vec![T::of(f64::NAN); right.left_len(part)];
            for (a, c) in a.chunks(part * k).zip(got.chunks_mut(part * n)) {
                right.multiply(&packed, &mut left, a, c);
            }
            assert!(got == *whole.get_or_insert_with(|| got.clone()), "{m}x{n}x{k} in parts of {part}");
        }
        whole.unwrap_or_default()
    }

    #[test]
    fn a_packed_operand_multiplies_like_gemm_in_whatever_parts() {
        for (m, n, k) in SIZES {
            // In f64, which no matrix unit computes.
            let (a, b) = (random(m * k, 0), random(k * n, 1));
            let got = in_parts((m, n, k), &a, &b);
            // `product` adds one to what `gemm` computes.
            let want = product(&Pool::new(2), (m, n, k), (&a, false), (&b, false), None);
            assert!(got.iter().zip(&want).all(|(got, want)| got + 1.0 == *want), "{m}x{n}x{k}");
        }
    }

    /// On the matrix unit, where there is one.
    #[test]
    fn a_packed_operand_of_f32_is_accurate_in_whatever_parts() {
        for (m, n, k) in SIZES.into_iter().chain([(64, 512, 128), (70, 33, 132), (80, 96, 40), (64, 160, 32)])
        {
            let f32s = |x: Vec<f64>| x.into_iter().map(|v| v as f32).collect::<Vec<_>>();
            let (a, b) = (f32s(random(m * k, 0)), f32s(random(k * n, 1)));
            for (at, got) in in_parts((m, n, k), &a, &b).into_iter().enumerate() {
                let (i, j) = (at / n, at % n);
                let terms = (0..k).map(|p| f64::from(a[i * k + p]) * f64::from(b[p * n + j]));
                let (exact, size) = terms.fold((0.0, 1.0), |(sum, size), t: f64| (sum + t, size + t.abs()));
                let error = (f64::from(got) - exact).abs() / size;
                assert!(error < 1e-6, "{m}x{n}x{k} ({i}, {j}): {error:e}");
            }
        }
    }
}
