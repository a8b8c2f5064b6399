//! Products of matrices that stay in a core's cache, on the calling thread: what attention multiplies for one
//! head. Operands are used in several products, of which only some rows, columns and depths are needed, and are
//! read as they lie where their columns fill whole tiles.
//!
//! Every element of C is one chain of multiply-adds over the depths asked for.

use std::ops::Range;

use super::{Mat, TileSet, Tiles};
use crate::cpu::isa::Isa;

/// The packing and the register tiles of this machine.
#[derive(Clone, Copy)]
pub(crate) struct Panels<T: 'static>(&'static TileSet<T>);

/// A right operand B [depth, columns], columns being a multiple of NR: element (k, j) is
/// `data[j / NR * panel + k * step + j % NR]`.
#[derive(Clone, Copy)]
pub(crate) struct RightOperand<'a, T> {
    data: &'a [T],
    depth: usize,
    columns: usize,
    step: usize,
    panel: usize,
}

impl<T: Tiles> Panels<T> {
    /// Panels for this machine.
    pub(crate) fn new() -> Self {
        Self(T::tiles(Isa::best()))
    }

    /// Columns of a register tile, NR.
    pub(crate) fn width(&self) -> usize {
        self.0.nr
    }

    /// Rows of a register tile, MR.
    pub(crate) fn height(&self) -> usize {
        self.0.mr
    }

    /// Rows as they lie as a right operand [depth, columns].
    pub(crate) fn rows<'a>(&self, data: &'a [T], columns: usize) -> RightOperand<'a, T> {
        RightOperand { data, depth: data.len() / columns, columns, step: columns, panel: self.0.nr }
    }

    /// The transpose of `n` rows of `k` numbers, `stride` apart, as a right operand [k, n], packed into `target`:
    /// k numbers for each of n columns, filled up with zeros to whole tiles.
    pub(crate) fn transpose<'a>(
        &self,
        source: &[T],
        stride: usize,
        (k, n): (usize, usize),
        target: &'a mut [T],
    ) -> RightOperand<'a, T> {
        let (nr, columns) = (self.0.nr, n.next_multiple_of(self.0.nr));
        let target = &mut target[..columns * k];
        Mat { data: source, rs: 1, cs: stride }.check(k, n);
        (self.0.pack)(target, nr, k, source, stride, 1, n);
        self.packed(target, (k, n))
    }

    /// The transpose of `n` rows of `k` numbers, `stride` apart, in `k` rows of `wide` numbers, filled up with zeros.
    pub(crate) fn turn(
        &self,
        source: &[T],
        stride: usize,
        (k, n): (usize, usize),
        wide: usize,
        target: &mut [T],
    ) {
        Mat { data: source, rs: 1, cs: stride }.check(k, n);
        (self.0.pack)(&mut target[..k * wide], wide, k, source, stride, 1, n);
    }

    /// What [`Panels::transpose`] left in its target.
    pub(crate) fn packed<'a>(&self, data: &'a [T], (k, n): (usize, usize)) -> RightOperand<'a, T> {
        let nr = self.0.nr;
        RightOperand { data, depth: k, columns: n.next_multiple_of(nr), step: nr, panel: k * nr }
    }

    /// C[rows, columns of `tiles`] (+)= A[rows, depths] B[depths, columns of `tiles`], rows of C being `ldc`
    /// elements apart. A begins with the depths asked for, `c` with the first row's column 0.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn multiply(
        &self,
        a: Mat<'_, T>,
        rows: usize,
        b: RightOperand<'_, T>,
        depths: Range<usize>,
        tiles: Range<usize>,
        c: &mut [T],
        ldc: usize,
        accumulate: bool,
    ) {
        let columns = tiles.start * self.0.nr..tiles.end * self.0.nr;
        self.multiply_columns(a, rows, b, depths, columns, c, ldc, accumulate);
    }

    /// [`Panels::multiply`] for these columns at least, and at most for those of the tiles that hold them: of the last
    /// tile half is left out where it can be.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn multiply_columns(
        &self,
        a: Mat<'_, T>,
        rows: usize,
        b: RightOperand<'_, T>,
        depths: Range<usize>,
        columns: Range<usize>,
        c: &mut [T],
        ldc: usize,
        accumulate: bool,
    ) {
        let (mr, nr, k) = (self.0.mr, self.0.nr, depths.len());
        let tiles = columns.start / nr..columns.end.div_ceil(nr);
        if rows == 0 || columns.is_empty() || (k == 0 && accumulate) {
            return;
        }
        if k > 0 {
            a.check(rows, k);
            assert!(depths.end <= b.depth && tiles.end * nr <= b.columns && a.has_unit_stride());
            assert!((tiles.end - 1) * b.panel + (depths.end - 1) * b.step + nr <= b.data.len());
        }
        assert!((rows - 1) * ldc + tiles.end * nr <= c.len());
        // Tiles of about equal height.
        let height = rows.div_ceil(rows.div_ceil(mr));
        for row in (0..rows).step_by(height) {
            let here = height.min(rows - row);
            // Nothing is read where there is no depth.
            let left = a.data.as_ptr().wrapping_add(row * a.rs);
            let (left, lda, whole, half) = match a.cs {
                1 => (left, a.rs, self.0.direct[here - 1], Some(self.0.half[here - 1])),
                _ => (left, a.cs, self.0.micro[here - 1], None),
            };
            for tile in tiles.clone() {
                let right = b.data.as_ptr().wrapping_add(tile * b.panel + depths.start * b.step);
                let micro = half.filter(|_| columns.end <= tile * nr + nr / 2).unwrap_or(whole);
                // SAFETY: the operands hold k steps and this part of C exists, as asserted above.
                unsafe {
                    let c = c.as_mut_ptr().add(row * ldc + tile * nr);
                    micro(k, left, lda, right, b.step, c, ldc, accumulate);
                }
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
        Stream::new(4, 0, stream).fill_uniform(&mut x, -1.0, 1.0);
        x
    }

    /// Every element of the part asked for is the definition's, from rows or columns, packed or as they lie;
    /// others stay.
    #[test]
    fn parts_of_products_match_the_definition() {
        let panels = Panels::<f64>::new();
        let (mr, nr) = (panels.height(), panels.width());
        for (m, n, k) in [(1, nr, 1), (mr, nr, 9), (mr + 3, 3 * nr, 40), (2 * mr + 5, 2 * nr, 7)] {
            let (a, b) = (random(m * k, 0), random(k * n, 1));
            let turned = |x: &[f64], rows: usize, cols: usize| -> Vec<f64> {
                (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
            };
            let (columns, b_rows) = (turned(&a, m, k), turned(&b, k, n));
            let mut packed = vec![f64::NAN; n * k];
            let packed = panels.transpose(&b_rows, k, (k, n), &mut packed);
            let all = n / nr;
            for (depths, tiles) in
                [(0..k, 0..all), (k / 3..k, all / 2..all), (0..k / 2, 0..1), (k..k, 0..all)]
            {
                for (accumulate, right) in
                    [(false, panels.rows(&b, n)), (true, panels.rows(&b, n)), (false, packed)]
                {
                    for by_columns in [false, true] {
                        let left = match by_columns {
                            true => Mat { data: &columns[depths.start * m..], rs: 1, cs: m },
                            false => Mat { data: &a[depths.start.min(a.len())..], rs: k, cs: 1 },
                        };
                        let mut c = vec![0.5; m * n];
                        panels.multiply(left, m, right, depths.clone(), tiles.clone(), &mut c, n, accumulate);
                        for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                            let sum: f64 = depths.clone().map(|p| a[i * k + p] * b[p * n + j]).sum();
                            let inside = tiles.contains(&(j / nr));
                            let before = if !inside || accumulate { 0.5 } else { 0.0 };
                            let want = before + if inside { sum } else { 0.0 };
                            assert!((c[i * n + j] - want).abs() < 1e-13, "{m}x{n}x{k} {depths:?} ({i}, {j})");
                        }
                    }
                }
            }
        }
    }

    /// Columns that end anywhere in a tile have the bits that whole tiles give them.
    #[test]
    fn parts_of_tiles_have_the_bits_of_whole_ones() {
        let panels = Panels::<f32>::new();
        let (m, n, k) = (panels.height() + 2, 3 * panels.width(), 21);
        let numbers = |len, stream| random(len, stream).into_iter().map(|x| x as f32).collect::<Vec<_>>();
        let (a, b) = (numbers(m * k, 0), numbers(k * n, 1));
        let (left, right) = (Mat { data: &a, rs: k, cs: 1 }, panels.rows(&b, n));
        let mut whole = vec![0f32; m * n];
        panels.multiply(left, m, right, 0..k, 0..3, &mut whole, n, false);
        for end in 1..=n {
            let start = end / 2;
            let mut part = vec![f32::NAN; m * n];
            panels.multiply_columns(left, m, right, 0..k, start..end, &mut part, n, false);
            for (got, want) in part.chunks_exact(n).zip(whole.chunks_exact(n)) {
                assert_eq!(got[start..end], want[start..end], "columns {start}..{end}");
            }
        }
    }
}
