//! What the kernels of attention read, and which keys a query sees.

use std::ops::Range;

use super::{Dims, Extra, Shape};
use crate::cpu::float::Float;
use crate::cpu::gemm::Rows;
use crate::error::Result;
use crate::op::{IndexBound, Io};
use crate::ops::dropout::{DropStream, Mask as DropMask};

/// Everything a kernel reads.
pub(super) struct Operands<'a, T> {
    pub dims: Dims,
    causal: bool,
    /// q, k, v: data, elements per token, first column.
    parts: [(&'a [T], usize, usize); 3],
    pub positions: Option<Positions<'a, T>>,
    pub bias: Option<&'a [T]>,
    start: Option<&'a [i32]>,
    pub mask: Option<&'a [bool]>,
    ranges: Option<&'a [i32]>,
    /// One batch row of ranges serves all.
    one_range_row: bool,
    drop: Option<(DropStream, &'a [i64])>,
    pub scale: T,
}

/// The relative form: u, v [H, dh] and a table r [R, d], whose row `zero` is distance zero.
#[derive(Clone, Copy)]
pub(super) struct Positions<'a, T> {
    pub u: &'a [T],
    pub v: &'a [T],
    pub r: &'a [T],
    pub zero: usize,
    /// Keys ahead of a query take their position term from the next query.
    pub next_query: bool,
    /// There is a table for every batch row.
    pub table_per_row: bool,
}

impl<'a, T: Float> Operands<'a, T> {
    pub fn new(io: &Io<'a>, shape: &Shape, extra: &Extra, drop: Option<DropStream>) -> Self {
        let dims = shape.dims(|i| io.ty(i), extra);
        let parts = shape.layout.places().map(|(operand, column)| {
            (io.input::<T>(operand), shape.layout.widths()[operand] * dims.d(), column * dims.d())
        });
        Self {
            dims,
            causal: shape.causal,
            parts,
            positions: extra.relative.map(|i| Positions {
                u: io.input(i),
                v: io.input(i + 1),
                r: io.input(i + 2),
                zero: shape.zero,
                next_query: shape.next_query,
                table_per_row: io.ty(i + 2).shape.len() == 3,
            }),
            bias: extra.bias.map(|i| io.input(i)),
            start: extra.start.map(|i| io.input(i)),
            mask: extra.mask.map(|i| io.input(i)),
            ranges: extra.ranges.map(|i| io.input(i)),
            one_range_row: extra.ranges.is_some_and(|i| io.ty(i).shape[0] == 1),
            drop: drop.zip(extra.rng).map(|(drop, i)| (drop, io.input(i))),
            scale: T::ONE / T::of(dims.width as f64).sqrt(),
        }
    }

    /// Start positions and ranges of keys that the program did not check because an op computed them.
    pub fn check_indices(&self) -> Result<()> {
        let check = |what, limit, values: Option<&[i32]>| {
            let bound = IndexBound { input: 0, what, limit, ignored: None };
            values.map_or(Ok(()), |values| bound.check("attention", values))
        };
        check("start", self.dims.keys - self.dims.queries.min(self.dims.keys) + 1, self.start)?;
        check("key", self.dims.keys + 1, self.ranges)
    }

    /// Head `h` of token `t` of row `b` of q (0), k (1) or v (2).
    #[inline(always)]
    pub fn head(&self, part: usize, b: usize, t: usize, h: usize) -> &'a [T] {
        let rows = self.rows(part, b, h);
        &rows.data[rows.start + t * rows.step as usize..][..self.dims.width]
    }

    /// Rows of head `h` of batch row `b` of q (0), k (1) or v (2), one per token.
    #[inline(always)]
    pub fn rows(&self, part: usize, b: usize, h: usize) -> Rows<'a, T> {
        let (data, stride, column) = self.parts[part];
        let tokens = if part == 0 { self.dims.queries } else { self.dims.keys };
        Rows { data, start: b * tokens * stride + column + h * self.dims.width, step: stride as isize }
    }

    /// The keys that query `i` of row `b` may see, but for an arbitrary mask.
    #[inline(always)]
    pub fn seen(&self, b: usize, i: usize) -> Range<usize> {
        let keys = self.dims.keys;
        if let Some(ranges) = self.ranges {
            let row = if self.one_range_row { 0 } else { b };
            let at = 2 * (row * self.dims.queries + i);
            let (from, to) = (ranges[at] as usize, (ranges[at + 1] as usize).min(keys));
            return from.min(to)..to;
        }
        0..if self.causal { (self.position(b, i) + 1).min(keys) } else { keys }
    }

    /// The queries of row `b` that may see one of `keys`, from the first to the last.
    pub fn seeing(&self, b: usize, keys: Range<usize>) -> Range<usize> {
        let queries = self.dims.queries;
        if self.ranges.is_none() {
            let start = self.position(b, 0);
            return if self.causal {
                keys.start.saturating_sub(start).min(queries)..queries
            } else {
                0..queries
            };
        }
        let sees = |i: &usize| {
            let seen = self.seen(b, *i);
            seen.start < keys.end && keys.start < seen.end
        };
        let first = (0..queries).find(sees).unwrap_or(queries);
        first..(first..queries).rfind(sees).map_or(first, |last| last + 1)
    }

    /// Position of query `i` of row `b` among the keys.
    #[inline(always)]
    pub fn position(&self, b: usize, i: usize) -> usize {
        self.start.map_or(0, |start| start[b] as usize) + i
    }

    /// Of the keys `seen` by a query at `position`, those that have a position term: from the query itself,
    /// and (ahead of it) from the next query. Key j takes row zero + position - j of r.
    #[inline(always)]
    pub fn placed(&self, position: usize, seen: Range<usize>) -> (Range<usize>, Range<usize>) {
        let Some(Positions { zero, next_query, .. }) = self.positions else { return (0..0, 0..0) };
        let from = seen.start.max((zero + position + 1).saturating_sub(self.dims.distances));
        let to = seen.end.min(zero + position + 1).max(from);
        let split = if next_query { (position + 1).clamp(from, to) } else { to };
        (from..split, split..to)
    }

    /// Where the position table of batch row `b` begins.
    #[inline(always)]
    pub fn table_start(&self, b: usize) -> usize {
        match self.positions {
            Some(positions) if positions.table_per_row => b * self.dims.distances * self.dims.d(),
            _ => 0,
        }
    }

    /// Row of the weights for (b, h, i); bias and mask have such rows too, or those of one batch row.
    #[inline(always)]
    pub fn weight_row(&self, b: usize, h: usize, i: usize) -> usize {
        ((b * self.dims.heads + h) * self.dims.queries + i) * self.dims.keys
    }

    /// Dropout of batch row `b`: the mask, and the index of the first weight of query `i` of head `h`.
    #[inline(always)]
    pub fn drop(&self, b: usize, h: usize, i: usize) -> Option<(DropMask, usize)> {
        let (drop, states) = self.drop?;
        // With a generator per batch row, indices begin anew in every row.
        let own = states.len() > 2;
        let state = if own { &states[2 * b..2 * b + 2] } else { states };
        Some((drop.mask(state), self.weight_row(if own { 0 } else { b }, h, i)))
    }

    /// Rows (b, h, i) and following of the bias.
    #[inline(always)]
    pub fn bias_rows(&self, b: usize, h: usize, i: usize) -> Option<&'a [T]> {
        self.bias.map(|bias| &bias[self.weight_row(b, h, i) % bias.len()..])
    }

    /// Rows (b, i) and following of an arbitrary mask.
    #[inline(always)]
    pub fn mask_rows(&self, b: usize, i: usize) -> Option<&'a [bool]> {
        self.mask.map(|mask| &mask[(b * self.dims.queries + i) * self.dims.keys % mask.len()..])
    }
}
