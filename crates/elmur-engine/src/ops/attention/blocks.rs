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
//!
//! Register tiles are wider than narrow heads (dh <= 16), whose columns would fill a half or a quarter of them.
//! There keys and values lie turned, [dh, Tk], and vectors run along the keys in every product: Y and dQ are dot
//! products of rows of P and dS with rows of Vᵀ and Kᵀ, and dKᵀ, dVᵀ and dRᵀ are computed instead of dK, dV and dR.
//! A task computes all heads of a batch row, or at least those that share a cache line, and turns their keys and values
//! together: it reads and writes memory in long runs.

mod backward;

pub(super) use backward::{Gradients, gradient, gradient_scratch};

use std::marker::PhantomData;
use std::ops::Range;

use super::Dims;
use super::operands::{Operands, Positions};
use crate::cpu::float::Float;
use crate::cpu::gemm::{Mat, Panels, Rows, SmallProducts, Tiles};
use crate::cpu::pool::{Pool, Rows as _, RowsMut};
use crate::cpu::simd::{LANES, max, simd_fn};
use crate::ops::dropout::{Factors, Mask as DropMask};
use crate::ops::softmax::exp_lanes;

/// Whether sequences are long enough for matrix products to pay.
pub(super) fn pays(dims: &Dims) -> bool {
    dims.queries >= 8 && dims.keys >= 16
}

/// Widest head whose keys and values lie turned.
const NARROW: usize = LANES;

/// Extents of a head's matrices: columns filled up to whole tiles and vectors (but for narrow heads), and the
/// queries of a tile.
#[derive(Clone, Copy)]
struct Sizes {
    narrow: bool,
    /// Heads of one task.
    together: usize,
    width: usize,
    keys: usize,
    distances: usize,
    height: usize,
}

impl Sizes {
    /// Sizes where `tasks` tasks, each with all heads, would share the work of `threads` threads.
    fn new<T: Tiles>(dims: &Dims, next_query: bool, tasks: usize, threads: usize) -> Self {
        let panels = Panels::<T>::new();
        let wide = |n: usize| n.next_multiple_of(panels.width().max(LANES));
        // Where a query lends its position term to the one before, a tile of these has one more row.
        let most = panels.height() - usize::from(next_query);
        let narrow = dims.width <= NARROW;
        // Narrow heads in whole cache lines: as many as leave several tasks to each thread, and stay in its cache.
        let line = (LANES / dims.width).max(1);
        let lines = dims.heads.div_ceil(line);
        let fitting = (1 << 17) / (line * dims.width * wide(dims.keys)).max(1);
        let together = (lines / (4 * threads).div_ceil(tasks.max(1)).max(1)).min(fitting).max(1) * line;
        Self {
            narrow,
            together: if narrow { together } else { 1 },
            width: if narrow { dims.width } else { wide(dims.width) },
            keys: wide(dims.keys),
            distances: wide(dims.distances),
            height: dims.queries.div_ceil(dims.queries.div_ceil(most)),
        }
    }

    /// Columns of a head's width, as tiles.
    fn columns<T: Tiles>(&self) -> Range<usize> {
        0..self.width / Panels::<T>::new().width()
    }

    /// Elements of a task's keys and values: turned, or (values, and keys in the backward pass) as rows filled up.
    fn keys_and_values(&self, dims: &Dims) -> [usize; 2] {
        let turned = self.together * dims.width * self.keys;
        [turned, if self.narrow { turned } else { dims.keys * self.width }]
    }

    /// Tasks among which the heads of a batch row are divided.
    fn groups(&self, dims: &Dims) -> usize {
        dims.heads.div_ceil(self.together)
    }

    /// The heads of one of these tasks.
    fn heads(&self, dims: &Dims, group: usize) -> Range<usize> {
        group * self.together..dims.heads.min((group + 1) * self.together)
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

impl<T: Float> HeadRows<T> {
    /// `width` numbers of each of `rows` consecutive tokens, from this column of all heads on.
    ///
    /// # Safety
    /// No other thread may use these heads of these tokens meanwhile.
    unsafe fn tile(&self, token: usize, column: usize, rows: usize, width: usize) -> HeadTile<'_, T> {
        let at = token * self.stride + self.column + column;
        assert!(rows == 0 || at + (rows - 1) * self.stride + width <= self.len);
        HeadTile { data: self.data.wrapping_add(at), rows, stride: self.stride, width, _of: PhantomData }
    }

    /// Writes numbers of a token, from this column of all heads on.
    ///
    /// # Safety
    /// No other thread may write these heads of this token.
    unsafe fn write(&self, token: usize, column: usize, values: &[T]) {
        let at = token * self.stride + self.column + column;
        assert!(at + values.len() <= self.len);
        // SAFETY: inside the tensor, as just asserted; the caller owns this part.
        copy_vectors(values, unsafe { std::slice::from_raw_parts_mut(self.data.add(at), values.len()) });
    }
}

/// A part of [`HeadRows`] that one thread owns.
struct HeadTile<'a, T> {
    data: *mut T,
    rows: usize,
    stride: usize,
    width: usize,
    _of: PhantomData<&'a mut [T]>,
}

impl<T> HeadTile<'_, T> {
    #[inline(always)]
    fn row_mut(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows);
        // SAFETY: inside the tensor, as was asserted when the tile was made; its owner has no other borrow.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(i * self.stride), self.width) }
    }
}

simd_fn! {
    /// Copies rows of `wide` numbers, but for those beyond the tile's width.
    fn copy_to_tile<T>(rows: &[T], wide: usize, tile: HeadTile<'_, T>) {
        let mut tile = tile;
        for (i, row) in rows.chunks_exact(wide).enumerate() {
            let target = tile.row_mut(i);
            copy_vectors(&row[..target.len()], target);
        }
    }
}

/// Copies short rows by vectors: a call would take longer.
#[inline(always)]
fn copy_vectors<T: Copy>(from: &[T], to: &mut [T]) {
    let ((vectors, rest), (to_vectors, to_rest)) = (from.as_chunks::<LANES>(), to.as_chunks_mut::<LANES>());
    vectors.iter().zip(to_vectors).for_each(|(from, to)| *to = *from);
    let ((vectors, rest), (to_vectors, to_rest)) = (rest.as_chunks::<8>(), to_rest.as_chunks_mut::<8>());
    vectors.iter().zip(to_vectors).for_each(|(from, to)| *to = *from);
    if !rest.is_empty() {
        to_rest.copy_from_slice(rest);
    }
}

/// Kᵀ (`part` 1) or Vᵀ (2) of narrow heads, [heads dh, keys], in rows filled up with zeros.
fn turn<T: Tiles>(
    operands: &Operands<'_, T>,
    (part, b): (usize, usize),
    heads: &Range<usize>,
    sizes: &Sizes,
    target: &mut [T],
) {
    let rows = operands.rows(part, b, heads.start);
    let shape = (heads.len() * operands.dims.width, operands.dims.keys);
    Panels::new().turn(&rows.data[rows.start..], rows.step as usize, shape, sizes.keys, target);
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

simd_fn! {
    /// Rows of one head plus `u` and plus `v`, each in rows of whole tiles that are filled up with zeros.
    fn add_both_to_rows<T>(
        source: &[T],
        stride: usize,
        u: &[T],
        v: &[T],
        wide: usize,
        targets: (&mut [T], &mut [T]),
    ) {
        let rows = targets.0.chunks_exact_mut(wide).zip(targets.1.chunks_exact_mut(wide)).enumerate();
        for (i, (with_u, with_v)) in rows {
            let source = &source[i * stride..][..u.len()];
            for (target, shift) in [(with_u, u), (with_v, v)] {
                let (row, beyond) = target.split_at_mut(shift.len());
                row.iter_mut().zip(source).zip(shift).for_each(|((y, x), s)| *y = *x + *s);
                if !beyond.is_empty() {
                    beyond.fill(T::ZERO);
                }
            }
        }
    }
}

/// Lengths of a thread's scratch in the forward pass.
fn forward_lengths(dims: &Dims, sizes: &Sizes, table_per_row: bool) -> [usize; 8] {
    let width = dims.width;
    let [keys, values] = sizes.keys_and_values(dims);
    [
        keys,
        values,
        (sizes.height + 1) * sizes.width,
        (sizes.height + 1) * sizes.width,
        sizes.height * sizes.keys,
        LANES + (sizes.height + 1) * sizes.distances,
        sizes.height * sizes.width,
        if table_per_row { width * sizes.distances } else { 0 },
    ]
}

/// Elements of r packed for all heads, where one table serves all batch rows.
pub(super) fn tables_len<T: Tiles>(dims: &Dims, table_per_row: bool) -> usize {
    let distances = dims.distances.next_multiple_of(Panels::<T>::new().width().max(LANES));
    if table_per_row { 0 } else { dims.heads * (dims.width * distances).next_multiple_of(16) }
}

/// Scratch elements of the forward pass.
pub(super) fn forward_scratch<T: Tiles>(
    dims: &Dims,
    next_query: bool,
    table_per_row: bool,
    threads: usize,
) -> usize {
    let sizes = Sizes::new::<T>(dims, next_query, dims.batch, threads);
    tables_len::<T>(dims, table_per_row) + threads * total(&forward_lengths(dims, &sizes, table_per_row))
}

/// Rᵀ [dh, R] of head `h` for batch row `b`, packed.
fn pack_table<T: Tiles>(operands: &Operands<'_, T>, b: usize, h: usize, target: &mut [T]) {
    let (Some(Positions { r, .. }), dims) = (operands.positions, operands.dims) else { return };
    let r = &r[operands.table_start(b) + h * dims.width..];
    Panels::new().transpose(r, dims.d(), (dims.width, dims.distances), target);
}

/// y [B, Tq, d] and weights [B, H, Tq, Tk]. Where r stays the same, `tables` is memory for it, packed, and whether an
/// earlier call has filled that.
pub(super) fn forward<T: Tiles>(
    operands: &Operands<'_, T>,
    pool: &Pool,
    y: &mut [T],
    weights: Option<&mut [T]>,
    tables: Option<(&mut [T], bool)>,
    scratch: &mut [T],
) {
    let dims = operands.dims;
    let next_query = operands.positions.is_some_and(|p| p.next_query);
    let sizes = Sizes::new::<T>(&dims, next_query, dims.batch, pool.threads());
    let per_row = operands.positions.is_some_and(|p| p.table_per_row);
    let lengths = forward_lengths(&dims, &sizes, per_row);
    let (own_tables, scratch) = scratch.split_at_mut(tables_len::<T>(&dims, per_row));
    let (tables, filled) = tables.unwrap_or((own_tables, false));
    let each = tables.len() / dims.heads;
    if each > 0 && !filled {
        pool.rows(dims.heads, 4 * each, RowsMut::new(tables, each), |first, tables| {
            let heads = tables.chunks_exact_mut(each).enumerate();
            heads.for_each(|(h, table)| pack_table(operands, 0, first + h, table));
        });
    }
    let tables = &*tables;
    let scratches = RowsMut::new(scratch, total(&lengths));
    let y = HeadRows { data: y.as_mut_ptr(), len: y.len(), stride: dims.d(), column: 0 };
    let weights = weights.map(|weights| RowsMut::new(weights, dims.queries * dims.keys));
    let groups = sizes.groups(&dims);
    pool.run(dims.batch * groups, |task, thread| {
        let (b, heads) = (task / groups, sizes.heads(&dims, task % groups));
        // SAFETY: a thread owns its scratch.
        let scratch = unsafe { scratches.part(thread, 1) };
        if sizes.narrow {
            let mut rest = &mut *scratch;
            turn(operands, (1, b), &heads, &sizes, cut(&mut rest, lengths[0]));
            turn(operands, (2, b), &heads, &sizes, cut(&mut rest, lengths[1]));
        }
        for h in heads.clone() {
            // SAFETY: a head of a batch row belongs to one task.
            let weights = unsafe { weights.part(b * dims.heads + h, 1) };
            let mut rest = &mut *scratch;
            let mut parts = lengths.map(|len| cut(&mut rest, len));
            if sizes.narrow {
                let [keys, values, ..] = &mut parts;
                for turned in [keys, values] {
                    let each = dims.width * sizes.keys;
                    *turned = &mut std::mem::take(turned)[(h - heads.start) * each..][..each];
                }
            }
            // SAFETY: as above.
            let tile = |i: usize, rows: usize| unsafe {
                y.tile(b * dims.queries + i, h * dims.width, rows, dims.width)
            };
            forward_head(operands, (b, h), &sizes, &tables[h * each..(h + 1) * each], weights, parts, tile);
        }
    });
}

/// One head of one batch row. The first two parts of the scratch hold Kᵀ and Vᵀ of a narrow head; `y` gives the place of
/// the output for so many queries from one on.
fn forward_head<'y, T: Tiles>(
    operands: &Operands<'_, T>,
    (b, h): (usize, usize),
    sizes: &Sizes,
    table: &[T],
    mut weights: Option<&mut [T]>,
    scratch: [&mut [T]; 8],
    y: impl Fn(usize, usize) -> HeadTile<'y, T>,
) {
    let Dims { queries, keys, width, distances, .. } = operands.dims;
    let (panels, products) = (Panels::<T>::new(), SmallProducts::<T>::new());
    let [key_panels, values, content, distance, scores, by_distance, out, row_table] = scratch;
    let [q, k, v] = [0, 1, 2].map(|part| operands.rows(part, b, h));
    let keys_turned = if sizes.narrow {
        panels.rows(key_panels, sizes.keys)
    } else {
        copy_rows(v, None, width, sizes.width, values);
        panels.transpose(&k.data[k.start..], k.step as usize, (width, keys), key_panels)
    };
    let table = if row_table.is_empty() {
        table
    } else {
        pack_table(operands, b, h, row_table);
        &*row_table
    };
    let mut factors = Factors::none();
    for first in (0..queries).step_by(sizes.height) {
        let rows = sizes.height.min(queries - first);
        let mut tile = [const { TileRow { own: 0..0, terms: None } }; MAX_ROWS];
        let tile = &mut tile[..rows];
        tile.iter_mut().zip(first..).for_each(|(row, i)| row.own = operands.seen(b, i));
        let seen = span(tile.iter().map(|row| row.own.clone()));
        let own_q = &q.data[q.start + first * q.step as usize..];
        match operands.positions {
            Some(Positions { u, v, next_query, .. }) => {
                // A query that lends its position term to the one before is here too.
                let rows = if next_query { (rows + 1).min(queries - first) } else { rows };
                let at = h * width..(h + 1) * width;
                let targets = (&mut *content, &mut distance[..rows * sizes.width]);
                add_both_to_rows(own_q, q.step as usize, &u[at.clone()], &v[at], sizes.width, targets);
            }
            None => {
                let content = &mut content[..rows * sizes.width];
                add_to_rows(own_q, q.step as usize, None, width, sizes.width, content);
            }
        }
        let left = Mat::rows(content, sizes.width);
        panels.multiply_columns(left, rows, keys_turned, 0..width, seen.clone(), scores, sizes.keys, false);
        if let Some(Positions { zero, next_query, .. }) = operands.positions {
            // Rows of r that some query of the tile, or the one before it, takes.
            let near = (zero + operands.position(b, first) + 1).saturating_sub(seen.end);
            let last = zero + operands.position(b, first + rows - 1) + 1;
            let far = last.saturating_sub(seen.start).min(distances);
            let rows = if next_query { (rows + 1).min(queries - first) } else { rows };
            let table = panels.packed(table, (width, distances));
            let left = Mat::rows(distance, sizes.width);
            let scores = &mut by_distance[LANES..];
            panels.multiply_columns(left, rows, table, 0..width, near..far, scores, sizes.distances, false);
        }
        let zero = operands.positions.map_or(0, |p| p.zero);
        for (i, row) in (first..first + rows).zip(&mut *tile) {
            let (own, position) = (row.own.clone(), operands.position(b, i));
            let (placed, ahead) = operands.placed(position, own.clone());
            let at = LANES + (i - first) * sizes.distances + zero + position + 1;
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
        }
        let tile = &*tile;
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
            // The product with the values reads the whole span. Weights are zero in the vectors beside `own`.
            let vectors = whole_vectors(own);
            for beside in [
                seen.start..vectors.start.clamp(seen.start, seen.end),
                vectors.end.clamp(seen.start, seen.end)..seen.end,
            ] {
                if !beside.is_empty() {
                    row[beside].fill(T::ZERO);
                }
            }
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
        if sizes.narrow {
            let rows = scores.chunks_exact(sizes.keys).zip(tile).zip(out.chunks_exact_mut(width));
            rows.for_each(|((row, TileRow { own, .. }), y)| {
                let vectors = whole_vectors(own);
                products.dots(&row[vectors.clone()], &values[vectors.start..], sizes.keys, y);
            });
        } else {
            let left = Mat { data: &scores[seen.start..], rs: sizes.keys, cs: 1 };
            let values = panels.rows(values, sizes.width);
            panels.multiply(left, rows, values, seen, sizes.columns::<T>(), out, sizes.width, false);
        }
        copy_to_tile(&out[..rows * sizes.width], sizes.width, y(first, rows));
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

/// Negative infinity before lane `from` and from lane `to` on. NaN elsewhere becomes infinity, which makes weights NaN
/// too.
#[inline(always)]
fn hide<T: Float>(s: &mut [T; LANES], from: usize, to: usize) {
    for start in [LANES - from, 2 * LANES - to] {
        if let Some(most) = Limits::<T>::ALL[start..].first_chunk::<LANES>() {
            for l in 0..LANES {
                // In this order numbers that are not comparable become the limit, by one instruction.
                s[l] = if s[l] < most[l] { s[l] } else { most[l] };
            }
        }
    }
}

/// Upper limits of scores, from which [`hide`] takes a vector.
struct Limits<T>(PhantomData<T>);

impl<T: Float> Limits<T> {
    /// A vector that hides, one that does not, and one that hides.
    const ALL: [T; 3 * LANES] = {
        let mut all = [T::NEG_INFINITY; 3 * LANES];
        let mut l = LANES;
        while l < 2 * LANES {
            all[l] = T::INFINITY;
            l += 1;
        }
        all
    };
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
