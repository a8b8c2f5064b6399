//! Products whose left operand is never written down: element (i, k) of A is `data[rows(i) + depths(k)]`, a number
//! that is read where it lies. Convolutions are such products, over patches that overlap.
//!
//! Every element of C is one chain of multiply-adds over k in blocks of [`DEPTH`], whatever the tile, the thread or the
//! vector width.

use super::{TileSet, Tiles, Vector};
use crate::cpu::float::Float;
use crate::cpu::isa::Isa;

/// Depth of one block: a panel of B with DEPTH x NR floats stays in half of the first-level cache.
const DEPTH: usize = 128;

/// Register tile: C[rows, NR] (+)= Σ_k a[i lda + depths[k]] b[k]; rows of b are NR numbers, those of C `ldc` apart.
pub(super) type Gather<T> =
    unsafe fn(a: *const T, lda: usize, depths: &[usize], b: *const T, c: *mut T, ldc: usize, add: bool);

/// Where numbers lie in a slice: those of a box of up to three extents, number (i, j, k) at
/// `i * steps[0] + j * steps[1] + k * steps[2]`, counted with the last extent as the fastest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places {
    pub extents: [usize; 3],
    pub steps: [usize; 3],
}

impl Places {
    pub(crate) fn count(&self) -> usize {
        self.extents.iter().product()
    }

    /// The largest place, of a box that is not empty.
    fn last(&self) -> usize {
        self.extents.iter().zip(self.steps).map(|(extent, step)| (extent - 1) * step).sum()
    }

    /// The places from number `first` on.
    fn fill(&self, first: usize, target: &mut [usize]) {
        let [_, rows, columns] = self.extents;
        let (mut i, mut j, mut k) = (first / (rows * columns), first / columns % rows, first % columns);
        for at in target {
            *at = i * self.steps[0] + j * self.steps[1] + k * self.steps[2];
            k += 1;
            if k == columns {
                (j, k) = (j + 1, 0);
            }
            if j == rows {
                (i, j) = (i + 1, 0);
            }
        }
    }
}

/// All indices of a box, the last one being the fastest.
fn indices([a, b, c]: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    (0..a).flat_map(move |i| (0..b).flat_map(move |j| (0..c).map(move |k| [i, j, k])))
}

/// The register tiles of this machine for products with so many columns whose left operand is read where it lies.
#[derive(Clone, Copy)]
pub(crate) struct Gathered<T: 'static> {
    tiles: &'static TileSet<T>,
    /// Entry i computes i + 1 rows.
    gather: &'static [Gather<T>],
    /// Columns of a panel.
    nr: usize,
    /// Columns of the product, filled up to whole panels.
    pub padded: usize,
}

impl<T: Tiles> Gathered<T> {
    /// The kernels of this machine for products with `columns` columns.
    pub(crate) fn new(columns: usize) -> Self {
        Self::of(T::tiles(Isa::best()), columns)
    }

    /// Panels are half as wide where that leaves fewer columns to fill up.
    fn of(tiles: &'static TileSet<T>, columns: usize) -> Self {
        let (whole, half) = (columns.next_multiple_of(tiles.nr), columns.next_multiple_of(tiles.nr / 2));
        let (gather, nr, padded) = match half < whole {
            true => (tiles.gather_half, tiles.nr / 2, half),
            false => (tiles.gather, tiles.nr, whole),
        };
        Self { tiles, gather, nr, padded }
    }

    /// Columns of a panel, NR.
    pub(crate) fn width(&self) -> usize {
        self.nr
    }

    /// Packs the transpose of `n` rows of `k` numbers, `stride` apart, as a right operand: whole panels of [k, NR].
    pub(crate) fn pack(&self, source: &[T], stride: usize, (k, n): (usize, usize), target: &mut [T]) {
        (self.tiles.pack)(target, self.nr, k, source, stride, 1, n);
    }

    /// Writes the transpose of a result C of `m` rows: `target.len() / m` rows of `m` numbers.
    pub(crate) fn unpack(&self, c: &[T], m: usize, target: &mut [T]) {
        let nr = self.nr;
        for (c, rows) in c.chunks_exact(m * nr).zip(target.chunks_mut(m * nr)) {
            (self.tiles.pack)(rows, m, rows.len() / m, c, nr, 1, m);
        }
    }

    /// C (+)= A B on the calling thread, unless A has no rows or no depth; A[i, k] is `data[rows(i) + depths(k)]`. B and
    /// C lie in panels: element (k, j) of B at `[j / NR][k][j % NR]`, element (i, j) of C at `[j / NR][i][j % NR]`.
    pub(crate) fn multiply(
        &self,
        data: &[T],
        (rows, depths): (Places, Places),
        b: &[T],
        c: &mut [T],
        accumulate: bool,
    ) {
        let (m, k, nr) = (rows.count(), depths.count(), self.nr);
        if m == 0 || k == 0 {
            return;
        }
        let panels = b.len() / (k * nr);
        assert!(rows.last() + depths.last() < data.len(), "places exceed their data");
        assert!(b.len() == panels * k * nr && c.len() == panels * m * nr, "operands are whole panels");
        // Tiles lie along the longest extent and are of about equal height.
        let along = (0..3).max_by_key(|axis| rows.extents[*axis]).unwrap_or(0);
        let (extent, lda) = (rows.extents[along], rows.steps[along]);
        let height = extent.div_ceil(extent.div_ceil(self.gather.len()));
        let numbers = [rows.extents[1] * rows.extents[2], rows.extents[2], 1];
        let mut others = rows.extents;
        others[along] = 1;
        let mut deep = [0; DEPTH];
        for first in (0..k).step_by(DEPTH) {
            let deep = &mut deep[..DEPTH.min(k - first)];
            depths.fill(first, deep);
            for panel in 0..panels {
                let (b, c) = (&b[(panel * k + first) * nr..], &mut c[panel * m * nr..][..m * nr]);
                // All other rows of a tile's numbers next: they read much of the same data.
                for row in (0..extent).step_by(height) {
                    let gather = self.gather[height.min(extent - row) - 1];
                    for at in indices(others) {
                        let sum =
                            |steps: [usize; 3]| at.iter().zip(steps).map(|(i, step)| i * step).sum::<usize>();
                        // SAFETY: no place exceeds the data, and both panels have so many rows, as asserted above;
                        // the tables are those of this machine's instructions.
                        unsafe {
                            let a = data.as_ptr().add(sum(rows.steps) + row * lda);
                            let c = c.as_mut_ptr().add((sum(numbers) + row * numbers[along]) * nr);
                            gather(a, lda, deep, b.as_ptr(), c, numbers[along] * nr, accumulate || first > 0);
                        }
                    }
                }
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn gather<T: Float, V: Vector<T>, const ROWS: usize, const VECTORS: usize>(
    a: *const T,
    lda: usize,
    depths: &[usize],
    b: *const T,
    c: *mut T,
    ldc: usize,
    accumulate: bool,
) {
    // SAFETY: the caller provides ROWS rows with the numbers that the depths name, rows of B for all depths, and
    // ROWS rows of C.
    unsafe {
        let mut sums = [[V::splat(T::ZERO); VECTORS]; ROWS];
        for (step, depth) in depths.iter().enumerate() {
            let b = b.add(step * VECTORS * V::WIDTH);
            let columns: [V; VECTORS] = std::array::from_fn(|v| V::load(b.add(v * V::WIDTH)));
            for (i, row) in sums.iter_mut().enumerate() {
                let x = V::splat(*a.add(i * lda + depth));
                for (sum, column) in row.iter_mut().zip(columns) {
                    *sum = sum.add_product(x, column);
                }
            }
        }
        for (i, row) in sums.into_iter().enumerate() {
            for (v, sum) in row.into_iter().enumerate() {
                let c = c.add(i * ldc + v * V::WIDTH);
                if accumulate { V::load(c).add(sum).store(c) } else { sum.store(c) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Stream;

    fn random(n: usize, stream: u32) -> Vec<f64> {
        let mut x = vec![0.0; n];
        Stream::new(6, 0, stream).fill_uniform(&mut x, -1.0, 1.0);
        x
    }

    /// Every element is the definition's, for patches that overlap, for more rows than a tile and more depth than a
    /// block, added or not.
    #[test]
    fn gathered_products_match_the_definition() {
        let whole = Gathered::<f64>::new(1 << 10).width();
        for (rows, depths, n) in [
            ([1, 1, 1], [1, 1, 1], 1),
            ([1, 3, 5], [2, 3, 3], whole),
            ([1, 7, 9], [20, 3, 3], whole + 1),
            ([3, 4, 2], [1, 11, 13], 3 * whole),
            ([17, 4, 2], [1, 2, 3], 2 * whole - 1),
        ] {
            let tiles = Gathered::<f64>::new(n);
            let nr = tiles.width();
            let rows = Places { extents: rows, steps: [40, 22, 2] };
            let depths = Places { extents: depths, steps: [130, 11, 1] };
            let data = random(rows.last() + depths.last() + 1, 0);
            let (m, k, padded) = (rows.count(), depths.count(), tiles.padded);
            assert!(padded >= n && padded < n + nr && padded.is_multiple_of(nr));
            let b = random(k * padded, 1);
            for accumulate in [false, true] {
                let mut c = vec![0.25; m * padded];
                tiles.multiply(&data, (rows, depths), &b, &mut c, accumulate);
                let (mut places, mut deep) = (vec![0; m], vec![0; k]);
                rows.fill(0, &mut places);
                depths.fill(0, &mut deep);
                for (i, j) in (0..m).flat_map(|i| (0..padded).map(move |j| (i, j))) {
                    let term = |p: usize| data[places[i] + deep[p]] * b[(j / nr * k + p) * nr + j % nr];
                    let want = (0..k).map(term).sum::<f64>() + if accumulate { 0.25 } else { 0.0 };
                    let got = c[(j / nr * m + i) * nr + j % nr];
                    assert!((got - want).abs() < 1e-12, "({i}, {j}): {got} instead of {want}");
                }
            }
        }
    }

    #[test]
    fn places_are_counted_from_anywhere() {
        let places = Places { extents: [3, 4, 5], steps: [100, 10, 2] };
        let mut all = vec![0; places.count()];
        places.fill(0, &mut all);
        assert_eq!((all[0], all[7], all[59]), (0, 14, 238));
        for first in 0..60 {
            let mut some = vec![0; 60 - first];
            places.fill(first, &mut some);
            assert_eq!(some, all[first..]);
        }
        assert_eq!(places.last(), all[59]);
    }

    /// Every instruction set computes the same chains of multiply-adds.
    #[test]
    fn gathering_tiles_of_all_instruction_sets_agree_to_the_bit() {
        let depths: Vec<usize> = (0..100).map(|k| k * 5 % 64).collect();
        let data: Vec<f32> = random(100, 0).into_iter().map(|x| x as f32).collect();
        let b: Vec<f32> = random(100 * 16, 1).into_iter().map(|x| x as f32).collect();
        let run = |isa: Isa, columns: usize| {
            let tiles = Gathered::of(f32::tiles(isa), columns);
            let mut packed = vec![0f32; 100 * tiles.nr];
            (tiles.tiles.pack)(&mut packed, tiles.nr, 100, &b, 1, 16, 16.min(tiles.nr));
            let mut c = vec![0f32; 6 * tiles.nr];
            // SAFETY: six rows, places up to 5 * 7 + 63, and whole rows of both panels.
            unsafe {
                let (a, b) = (data.as_ptr(), packed.as_ptr());
                tiles.gather[5](a, 7, &depths, b, c.as_mut_ptr(), tiles.nr, false);
            }
            c.chunks(tiles.nr)
                .flat_map(|row| row[..columns.min(tiles.nr).min(16)].to_vec())
                .collect::<Vec<_>>()
        };
        for columns in [4, 32] {
            let baseline = run(Isa::Baseline, columns);
            for isa in [Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx] {
                if isa <= Isa::detected() {
                    assert_eq!(run(isa, columns), baseline, "{isa:?}");
                }
            }
        }
    }
}
