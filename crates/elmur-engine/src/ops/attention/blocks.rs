//! CPU kernels for longer sequences: every product of a head is a matrix product in register tiles.
//!
//! ```text
//! forward    S = (Q + u) Kᵀ + shift((Q + v) Rᵀ)      P = softmax(scale S)      Y = drop(P) V
//! backward   dP = dY Vᵀ      dS = scale P (dP' - Σ P dP')      dQ = dS K + unshift(dS) R
//!            dK = dSᵀ (Q + u)      dV = drop(P)ᵀ dY      dR = unshift(dS)ᵀ (Q + v)
//! ```
//!
//! `shift` reads row zero + p_i - j of r for key j: a row of (Q + v) Rᵀ from back to front. Only tiles that some
//! query sees are computed: half of them under the causal mask. One thread computes a head of a batch row, so
//! that results do not depend on how many threads there are.

mod backward;

pub(super) use backward::{Gradients, gradient, gradient_scratch};

use std::ops::Range;

use super::Dims;
use super::operands::{Operands, Positions};
use crate::cpu::float::Float;
use crate::cpu::gemm::{Mat, Panels, Rows, Tiles};
use crate::cpu::pool::{Pool, Rows as _, RowsMut};
use crate::cpu::simd::{LANES, max, simd_fn};
use crate::ops::dropout::{Factors, Mask as DropMask};
use crate::ops::softmax::exp_lanes;

/// Whether sequences are long enough for matrix products to pay.
pub(super) fn pays(dims: &Dims) -> bool {
    dims.queries >= 8 && dims.keys >= 16
}

/// Extents of a head's matrices: columns filled up to whole tiles and vectors, and the queries of a tile.
#[derive(Clone, Copy)]
struct Sizes {
    width: usize,
    keys: usize,
    distances: usize,
    height: usize,
}

impl Sizes {
    fn new<T: Tiles>(dims: &Dims, next_query: bool) -> Self {
        let panels = Panels::<T>::new();
        let wide = |n: usize| n.next_multiple_of(panels.width().max(LANES));
        // Where a query lends its position term to the one before, a tile of these has one more row.
        let most = panels.height() - usize::from(next_query);
        Self {
            width: wide(dims.width),
            keys: wide(dims.keys),
            distances: wide(dims.distances),
            height: dims.queries.div_ceil(dims.queries.div_ceil(most)),
        }
    }

    /// Columns of a head's width, as tiles.
    fn columns<T: Tiles>(&self) -> Range<usize> {
        0..self.width / Panels::<T>::new().width()
    }
}

/// Cuts `len` elements off the front of the scratch memory, by whole cache lines.
fn cut<'s, T>(scratch: &mut &'s mut [T], len: usize) -> &'s mut [T] {
    let (front, rest) = std::mem::take(scratch).split_at_mut(len.next_multiple_of(16));
    *scratch = rest;
    &mut front[..len]
}

/// Elements that `cut` takes for these lengths.
fn total(lengths: &[usize]) -> usize {
    lengths.iter().map(|len| len.next_multiple_of(16)).sum()
}

/// A tensor [tokens, stride] whose heads are written by different threads.
struct HeadRows<T> {
    data: *mut T,
    len: usize,
    stride: usize,
    column: usize,
}

// SAFETY: threads write different heads, which lie in different columns.
unsafe impl<T: Send> Sync for HeadRows<T> {}

impl<T: Copy> HeadRows<T> {
    /// Writes head `h` of a token.
    ///
    /// # Safety
    /// No other thread may write this head of this token.
    unsafe fn write(&self, token: usize, h: usize, values: &[T]) {
        let at = token * self.stride + self.column + h * values.len();
        assert!(at + values.len() <= self.len);
        // SAFETY: inside the tensor, as just asserted; the caller owns this part.
        copy_vectors(values, unsafe { std::slice::from_raw_parts_mut(self.data.add(at), values.len()) });
    }
}

/// Copies short rows by vectors: a call would take longer.
#[inline(always)]
fn copy_vectors<T: Copy>(from: &[T], to: &mut [T]) {
    let ((vectors, rest), (to_vectors, to_rest)) = (from.as_chunks::<LANES>(), to.as_chunks_mut::<LANES>());
    vectors.iter().zip(to_vectors).for_each(|(from, to)| *to = *from);
    to_rest.copy_from_slice(rest);
}

/// Rows of one head, each plus `shift`, in rows of whole tiles that are filled up with zeros.
fn copy_rows<T: Tiles>(rows: Rows<'_, T>, shift: Option<&[T]>, width: usize, wide: usize, target: &mut [T]) {
    add_to_rows(&rows.data[rows.start..], rows.step as usize, shift, width, wide, target);
}

simd_fn! {
    fn add_to_rows<T>(
        source: &[T],
        stride: usize,
        shift: Option<&[T]>,
        width: usize,
        wide: usize,
        target: &mut [T],
    ) {
        for (i, row) in target.chunks_exact_mut(wide).enumerate() {
            let (row, beyond) = row.split_at_mut(width);
            let source = &source[i * stride..][..width];
            match shift {
                Some(shift) => row.iter_mut().zip(source).zip(shift).for_each(|((y, x), s)| *y = *x + *s),
                None => copy_vectors(source, row),
            }
            if !beyond.is_empty() {
                beyond.fill(T::ZERO);
            }
        }
    }
}

/// Lengths of a thread's scratch in the forward pass.
fn forward_lengths(dims: &Dims, sizes: &Sizes, table_per_row: bool) -> [usize; 8] {
    let Dims { queries, keys, width, .. } = *dims;
    [
        width * sizes.keys,
        keys * sizes.width,
        queries * sizes.width,
        queries * sizes.width,
        sizes.height * sizes.keys,
        LANES + (sizes.height + 1) * sizes.distances,
        sizes.height * sizes.width,
        if table_per_row { width * sizes.distances } else { 0 },
    ]
}

/// Elements of r packed for all heads, where one table serves all batch rows.
fn tables_len(dims: &Dims, sizes: &Sizes, table_per_row: bool) -> usize {
    if table_per_row { 0 } else { dims.heads * (dims.width * sizes.distances).next_multiple_of(16) }
}

/// Scratch elements of the forward pass.
pub(super) fn forward_scratch<T: Tiles>(
    dims: &Dims,
    next_query: bool,
    table_per_row: bool,
    threads: usize,
) -> usize {
    let sizes = Sizes::new::<T>(dims, next_query);
    tables_len(dims, &sizes, table_per_row) + threads * total(&forward_lengths(dims, &sizes, table_per_row))
}

/// Rᵀ [dh, R] of head `h` for batch row `b`, packed.
fn pack_table<T: Tiles>(operands: &Operands<'_, T>, b: usize, h: usize, target: &mut [T]) {
    let (Some(Positions { r, .. }), dims) = (operands.positions, operands.dims) else { return };
    let r = &r[operands.table_start(b) + h * dims.width..];
    Panels::new().transpose(r, dims.d(), (dims.width, dims.distances), target);
}

/// y [B, Tq, d] and weights [B, H, Tq, Tk].
pub(super) fn forward<T: Tiles>(
    operands: &Operands<'_, T>,
    pool: &Pool,
    y: &mut [T],
    weights: Option<&mut [T]>,
    scratch: &mut [T],
) {
    let dims = operands.dims;
    let sizes = Sizes::new::<T>(&dims, operands.positions.is_some_and(|p| p.next_query));
    let per_row = operands.positions.is_some_and(|p| p.table_per_row);
    let lengths = forward_lengths(&dims, &sizes, per_row);
    let (tables, scratch) = scratch.split_at_mut(tables_len(&dims, &sizes, per_row));
    let each = tables.len() / dims.heads;
    if each > 0 {
        pool.rows(dims.heads, 4 * each, RowsMut::new(tables, each), |first, tables| {
            let heads = tables.chunks_exact_mut(each).enumerate();
            heads.for_each(|(h, table)| pack_table(operands, 0, first + h, table));
        });
    }
    let tables = &*tables;
    let scratches = RowsMut::new(scratch, total(&lengths));
    let y = HeadRows { data: y.as_mut_ptr(), len: y.len(), stride: dims.d(), column: 0 };
    let weights = weights.map(|weights| RowsMut::new(weights, dims.queries * dims.keys));
    pool.run(dims.batch * dims.heads, |task, thread| {
        let (b, h) = (task / dims.heads, task % dims.heads);
        // SAFETY: a thread owns its scratch, and a head of a batch row belongs to one task.
        let (mut scratch, weights) = unsafe { (scratches.part(thread, 1), weights.part(task, 1)) };
        let parts = lengths.map(|len| cut(&mut scratch, len));
        // SAFETY: as above.
        let write = |i: usize, values: &[T]| unsafe { y.write(b * dims.queries + i, h, values) };
        forward_head(operands, (b, h), &sizes, &tables[h * each..(h + 1) * each], weights, parts, write);
    });
}

/// One head of one batch row.
fn forward_head<T: Tiles>(
    operands: &Operands<'_, T>,
    (b, h): (usize, usize),
    sizes: &Sizes,
    table: &[T],
    mut weights: Option<&mut [T]>,
    scratch: [&mut [T]; 8],
    write: impl Fn(usize, &[T]),
) {
    let Dims { queries, keys, width, distances, .. } = operands.dims;
    let (panels, columns) = (Panels::<T>::new(), sizes.columns::<T>());
    let nr = panels.width();
    let [key_panels, values, content, distance, scores, by_distance, out, row_table] = scratch;
    let (q, k) = (operands.rows(0, b, h), operands.rows(1, b, h));
    let keys_turned = panels.transpose(&k.data[k.start..], k.step as usize, (width, keys), key_panels);
    copy_rows(operands.rows(2, b, h), None, width, sizes.width, values);
    let values = panels.rows(values, sizes.width);
    let at = h * width..(h + 1) * width;
    copy_rows(q, operands.positions.map(|p| &p.u[at.clone()]), width, sizes.width, content);
    if let Some(Positions { v, .. }) = operands.positions {
        copy_rows(q, Some(&v[at]), width, sizes.width, distance);
    }
    let table = if row_table.is_empty() {
        table
    } else {
        pack_table(operands, b, h, row_table);
        &*row_table
    };
    let mut factors = Factors::none();
    for first in (0..queries).step_by(sizes.height) {
        let rows = sizes.height.min(queries - first);
        let seen = span((first..first + rows).map(|i| operands.seen(b, i)));
        let tiles = seen.start / nr..seen.end.div_ceil(nr);
        let left = Mat::rows(content, sizes.width).below(first);
        panels.multiply(left, rows, keys_turned, 0..width, tiles, scores, sizes.keys, false);
        if let Some(Positions { zero, next_query, .. }) = operands.positions {
            // Rows of r that some query of the tile, or the one before it, takes.
            let near = (zero + operands.position(b, first) + 1).saturating_sub(seen.end);
            let last = zero + operands.position(b, first + rows - 1) + 1;
            let far = last.saturating_sub(seen.start).min(distances);
            let rows = if next_query { (rows + 1).min(queries - first) } else { rows };
            let (tiles, table) = (near / nr..far.div_ceil(nr), panels.packed(table, (width, distances)));
            let left = Mat::rows(distance, sizes.width).below(first);
            let scores = &mut by_distance[LANES..];
            panels.multiply(left, rows, table, 0..width, tiles, scores, sizes.distances, false);
        }
        let zero = operands.positions.map_or(0, |p| p.zero);
        let place = |i: usize| {
            let (own, position) = (operands.seen(b, i), operands.position(b, i));
            let (placed, ahead) = operands.placed(position, own.clone());
            (own, placed, ahead, LANES + (i - first) * sizes.distances + zero + position + 1)
        };
        let mut tile = [const { TileRow { own: 0..0, terms: None } }; MAX_ROWS];
        for (i, row) in (first..first + rows).zip(&mut tile) {
            let (own, placed, ahead, at) = place(i);
            let scores = &mut scores[(i - first) * sizes.keys..][..sizes.keys];
            if !ahead.is_empty() && i + 1 < queries {
                let at = at + sizes.distances;
                add_reversed(&mut scores[ahead.clone()], &by_distance[at - ahead.end..at - ahead.start]);
            }
            // By whole vectors where every key has a position term; what is added beside `own` is overwritten.
            let vectors = whole_vectors(&own);
            row.terms = (placed == own && !own.is_empty()).then(|| at - vectors.end);
            if row.terms.is_none() && !placed.is_empty() {
                add_reversed(&mut scores[placed.clone()], &by_distance[at - placed.end..at - placed.start]);
            }
            row.own = own;
        }
        let tile = &tile[..rows];
        weigh(
            scores,
            sizes.keys,
            tile,
            by_distance,
            operands.scale,
            operands.bias_rows(b, h, first),
            operands.mask_rows(b, first),
            keys,
        );
        for (i, TileRow { own, .. }) in (first..).zip(tile) {
            let row = &mut scores[(i - first) * sizes.keys..][..sizes.keys];
            // The product with the values reads the whole span.
            row[seen.start..own.start.clamp(seen.start, seen.end)].fill(T::ZERO);
            row[own.end.clamp(seen.start, seen.end)..seen.end].fill(T::ZERO);
            if let Some(weights) = &mut weights {
                let weights = &mut weights[i * keys..(i + 1) * keys];
                weights[..own.start].fill(T::ZERO);
                weights[own.clone()].copy_from_slice(&row[own.clone()]);
                weights[own.end..].fill(T::ZERO);
            }
            if let Some((mask, first)) = operands.drop(b, h, i) {
                drop_weights(mask, &mut factors, first + own.start, &mut row[own.clone()]);
            }
        }
        let left = Mat { data: &scores[seen.start..], rs: sizes.keys, cs: 1 };
        panels.multiply(left, rows, values, seen, columns.clone(), out, sizes.width, false);
        for (i, out) in out.chunks_exact(sizes.width).take(rows).enumerate() {
            write(first + i, &out[..width]);
        }
    }
}

/// From the least start to the largest end of those that are not empty.
fn span(ranges: impl Iterator<Item = Range<usize>>) -> Range<usize> {
    let join = |all: Range<usize>, one: Range<usize>| {
        if all.is_empty() { one } else { all.start.min(one.start)..all.end.max(one.end) }
    };
    ranges.filter(|range| !range.is_empty()).fold(0..0, join)
}

simd_fn! {
    /// x += the numbers of `reversed` from the last to the first.
    fn add_reversed<T>(x: &mut [T], reversed: &[T]) {
        x.iter_mut().zip(reversed.iter().rev()).for_each(|(x, y)| *x += *y);
    }
}

/// Most queries of a tile.
const MAX_ROWS: usize = 16;

/// A query of a tile.
struct TileRow {
    /// The keys it sees.
    own: Range<usize>,
    /// Where the position terms of the vectors that hold `own` begin, from back to front; none to add.
    terms: Option<usize>,
}

simd_fn! {
    /// Weights of a tile's queries from products, in rows of whole vectors `stride` apart: position terms, scale,
    /// bias and mask (rows of `keys`), softmax. Each pass runs over all queries, which are independent, so that
    /// none waits for the sums of the one before.
    fn weigh<T>(
        scores: &mut [T],
        stride: usize,
        rows: &[TileRow],
        terms: &[T],
        scale: T,
        bias: Option<&[T]>,
        mask: Option<&[bool]>,
        keys: usize,
    ) {
        let mut tops = [T::NEG_INFINITY; MAX_ROWS];
        for (i, (row, top)) in rows.iter().zip(&mut tops).enumerate() {
            let (own, vectors) = (row.own.clone(), whole_vectors(&row.own));
            let scores = &mut scores[i * stride..][..stride];
            let whole = scores[vectors.clone()].as_chunks_mut::<LANES>().0;
            match row.terms {
                Some(start) => {
                    let terms = terms[start..start + vectors.len()].as_chunks::<LANES>().0;
                    for (s, x) in whole.iter_mut().zip(terms.iter().rev()) {
                        for l in 0..LANES {
                            s[l] = (s[l] + x[LANES - 1 - l]) * scale;
                        }
                    }
                }
                None => whole.as_flattened_mut().iter_mut().for_each(|s| *s *= scale),
            }
            if let Some(bias) = bias {
                let bias = &bias[i * keys..][own.clone()];
                scores[own.clone()].iter_mut().zip(bias).for_each(|(s, bias)| *s += *bias);
            }
            if let Some(mask) = mask {
                for (s, visible) in scores[own.clone()].iter_mut().zip(&mask[i * keys..][own.clone()]) {
                    if !visible {
                        *s = T::NEG_INFINITY;
                    }
                }
            }
            let whole = scores[vectors.clone()].as_chunks_mut::<LANES>().0;
            let (before, after) = (own.start - vectors.start, vectors.end - own.end);
            if let Some(s) = whole.first_mut() {
                hide(s, before, LANES);
            }
            if let Some(s) = whole.last_mut() {
                hide(s, 0, LANES - after);
            }
            *top = max(whole.as_flattened());
        }
        let mut factors = [T::ONE; MAX_ROWS];
        for (i, (row, factor)) in rows.iter().zip(&mut factors).enumerate() {
            *factor = T::ONE / exp_lanes(&mut scores[i * stride..][whole_vectors(&row.own)], tops[i]);
        }
        for (i, row) in rows.iter().enumerate() {
            let whole = scores[i * stride..][whole_vectors(&row.own)].as_chunks_mut::<LANES>().0;
            for s in whole {
                for l in 0..LANES {
                    s[l] *= factors[i];
                }
            }
        }
    }
}

/// Negative infinity before lane `from` and from lane `to` on.
#[inline(always)]
fn hide<T: Float>(s: &mut [T; LANES], from: usize, to: usize) {
    let (from, to) = (from as u32, to as u32);
    for l in 0..LANES as u32 {
        let x = s[l as usize];
        s[l as usize] = if (l < from) | (l >= to) { T::NEG_INFINITY } else { x };
    }
}

/// The vectors of a row that hold a range.
#[inline(always)]
fn whole_vectors(range: &Range<usize>) -> Range<usize> {
    range.start / LANES * LANES..range.end.next_multiple_of(LANES)
}

simd_fn! {
    fn drop_weights<T>(mask: DropMask, factors: &mut Factors<T>, first: usize, x: &mut [T]) {
        mask.apply_from(factors, first, x);
    }
}
