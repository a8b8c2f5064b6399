//! The backward pass of longer sequences.

use std::ops::Range;

use super::super::operands::{Operands, Positions};
use super::super::{Dims, Layout, rows_per_part};
use super::{HeadRows, Sizes, copy_rows, cut, drop_weights, span, total, whole_vectors};
use crate::cpu::gemm::{Mat, Panels, Rows, SmallProducts, Tiles};
use crate::cpu::pool::{Pool, Rows as _, RowsMut};
use crate::cpu::simd::{LANES, add_assign, fold, simd_fn};
use crate::ops::dropout::Factors;

/// Lengths of a thread's scratch.
fn lengths<T: Tiles>(dims: &Dims, sizes: &Sizes) -> [usize; 12] {
    let Dims { queries, keys, width, .. } = *dims;
    [
        width * sizes.keys,
        keys * sizes.width,
        queries * sizes.width,
        queries * sizes.width,
        queries * sizes.width,
        queries * sizes.keys,
        queries * sizes.keys,
        queries * sizes.distances,
        Panels::<T>::new().height() * sizes.width,
        sizes.keys,
        sizes.keys,
        sizes.distances,
    ]
}

/// Elements of the partial sums of one head and one part of the batch: du, dv and dr, rows filled up.
fn sums_len(dims: &Dims, sizes: &Sizes) -> usize {
    (2 + dims.distances) * sizes.width
}

/// Scratch elements of the backward pass.
pub(in super::super) fn gradient_scratch<T: Tiles>(dims: &Dims, next_query: bool, threads: usize) -> usize {
    let sizes = Sizes::new::<T>(dims, next_query);
    let parts = dims.batch.div_ceil(rows_per_part(dims.batch));
    let tables = dims.heads * dims.distances * sizes.width;
    let sums = parts * dims.heads * sums_len(dims, &sizes);
    total(&[tables, sums]) + threads * total(&lengths::<T>(dims, &sizes))
}

/// What the gradient of attention reads and writes.
pub(in super::super) struct Gradients<'a, T> {
    /// [B, H, Tq, Tk]
    pub weights: &'a [T],
    /// [B, Tq, d]
    pub dy: &'a [T],
    /// Gradients of the operands that hold q, k, v.
    pub grads: [Option<&'a mut [T]>; 3],
    /// Gradients of the scaled scores, [B, H, Tq, Tk].
    pub ds: Option<&'a mut [T]>,
    /// du `[d]`, dv `[d]`, dr [R, d].
    pub sums: [Option<&'a mut [T]>; 3],
}

/// Every gradient of attention.
pub(in super::super) fn gradient<T: Tiles>(
    operands: &Operands<'_, T>,
    layout: Layout,
    pool: &Pool,
    gradients: Gradients<'_, T>,
    scratch: &mut [T],
) {
    let dims = operands.dims;
    let Gradients { weights, dy, grads, ds, sums: sum_outputs } = gradients;
    let sizes = Sizes::new::<T>(&dims, operands.positions.is_some_and(|p| p.next_query));
    let lengths = lengths::<T>(&dims, &sizes);
    let per_part = rows_per_part(dims.batch);
    let (parts, each_sums) = (dims.batch.div_ceil(per_part), sums_len(&dims, &sizes));
    let (mut scratch, each_table) = (scratch, dims.distances * sizes.width);
    let tables = cut(&mut scratch, dims.heads * each_table);
    let sums = cut(&mut scratch, parts * dims.heads * each_sums);
    if let Some(Positions { r, .. }) = operands.positions {
        for (h, table) in tables.chunks_exact_mut(each_table).enumerate() {
            let r = Rows { data: r, start: h * dims.width, step: dims.d() as isize };
            copy_rows(r, None, dims.width, sizes.width, table);
        }
    }
    let tables = &*tables;
    let scratches = RowsMut::new(scratch, total(&lengths));
    let partial = RowsMut::new(&mut *sums, each_sums);
    let ds = ds.map(|ds| RowsMut::new(ds, dims.queries * dims.keys));
    let grads = grads.map(|grad| grad.map(|grad| (grad.as_mut_ptr(), grad.len())));
    let outputs = layout.places().map(|(operand, column)| {
        let stride = layout.widths()[operand] * dims.d();
        grads[operand].map(|(data, len)| HeadRows { data, len, stride, column: column * dims.d() })
    });
    pool.run(parts * dims.heads, |task, thread| {
        let (part, h) = (task / dims.heads, task % dims.heads);
        // SAFETY: a thread owns its scratch, and a task its partial sums.
        let (scratch, sums) = unsafe { (scratches.part(thread, 1), partial.part(task, 1)) };
        sums.fill(T::ZERO);
        for b in part * per_part..dims.batch.min((part + 1) * per_part) {
            // SAFETY: a head of a batch row belongs to one task.
            let ds_out = unsafe { ds.part(b * dims.heads + h, 1) };
            let write = |which: usize, token: usize, values: &[T]| {
                let tokens = if which == 0 { dims.queries } else { dims.keys };
                if let Some(grad) = &outputs[which] {
                    // SAFETY: as above.
                    unsafe { grad.write(b * tokens + token, h, values) }
                }
            };
            let head = Head {
                b,
                h,
                weights: &weights[operands.weight_row(b, h, 0)..],
                dy: &dy[b * dims.queries * dims.d() + h * dims.width..],
                table: &tables[h * each_table..(h + 1) * each_table],
            };
            let mut rest = &mut *scratch;
            let parts = lengths.map(|len| cut(&mut rest, len));
            gradient_head(operands, &sizes, head, ds_out, sums, parts, write);
        }
    });
    let mut first = 0;
    for (output, rows) in sum_outputs.into_iter().zip([1, 1, dims.distances]) {
        if let Some(output) = output {
            output.fill(T::ZERO);
            for (task, sums) in sums.chunks_exact(each_sums).enumerate() {
                let column = task % dims.heads * dims.width;
                for row in 0..rows {
                    let sums = &sums[(first + row) * sizes.width..][..dims.width];
                    add_to(&mut output[row * dims.d() + column..][..dims.width], sums);
                }
            }
        }
        first += rows;
    }
}

simd_fn! {
    fn add_to<T>(y: &mut [T], x: &[T]) {
        add_assign(y, x);
    }
}

/// One head of one batch row.
struct Head<'a, T> {
    b: usize,
    h: usize,
    /// Weights from this head's on.
    weights: &'a [T],
    /// dy from this head of the first query on.
    dy: &'a [T],
    /// R of this head, rows filled up.
    table: &'a [T],
}

/// Gradients of one head of one batch row: `write(which, token, values)` takes those of q (0), k (1) and v (2);
/// those of u, v and r are added to `sums`.
fn gradient_head<T: Tiles>(
    operands: &Operands<'_, T>,
    sizes: &Sizes,
    head: Head<'_, T>,
    mut ds_out: Option<&mut [T]>,
    sums: &mut [T],
    scratch: [&mut [T]; 12],
    write: impl Fn(usize, usize, &[T]),
) {
    let Head { b, h, weights, dy, table } = head;
    let Dims { queries, keys, width, distances, .. } = operands.dims;
    let d = operands.dims.d();
    let (panels, columns) = (Panels::<T>::new(), sizes.columns::<T>());
    let (nr, height) = (panels.width(), panels.height());
    let [value_panels, key_rows, content, distance, dy_rows, ds, kept, by_distance, out, rest @ ..] = scratch;
    let [weight_row, key_sums, distance_sums] = rest;
    let (q, k, v) = (operands.rows(0, b, h), operands.rows(1, b, h), operands.rows(2, b, h));
    let values_turned = panels.transpose(&v.data[v.start..], v.step as usize, (width, keys), value_panels);
    copy_rows(k, None, width, sizes.width, key_rows);
    copy_rows(Rows { data: dy, start: 0, step: d as isize }, None, width, sizes.width, dy_rows);
    let at = h * width..(h + 1) * width;
    copy_rows(q, operands.positions.map(|p| &p.u[at.clone()]), width, sizes.width, content);
    if let Some(Positions { v, .. }) = operands.positions {
        copy_rows(q, Some(&v[at]), width, sizes.width, distance);
        by_distance.fill(T::ZERO);
    }
    let tiles = |n: usize, each: usize| (0..n).step_by(each).map(move |first| first..n.min(first + each));

    // dS and the dropped weights, and dS by distance.
    let mut factors = Factors::none();
    for tile in tiles(queries, sizes.height) {
        let seen = span(tile.clone().map(|i| operands.seen(b, i)));
        let some = seen.start / nr..seen.end.div_ceil(nr);
        let (left, to) =
            (Mat { data: &dy[tile.start * d..], rs: d, cs: 1 }, &mut ds[tile.start * sizes.keys..]);
        panels.multiply(left, tile.len(), values_turned, 0..width, some, to, sizes.keys, false);
        for i in tile {
            let own = operands.seen(b, i);
            let ds = &mut ds[i * sizes.keys..(i + 1) * sizes.keys];
            let kept = &mut kept[i * sizes.keys..(i + 1) * sizes.keys];
            ds[..own.start].fill(T::ZERO);
            ds[own.end..].fill(T::ZERO);
            let vectors = whole_vectors(&own);
            let stored = &weights[i * keys..][own.clone()];
            let p = if vectors == own {
                stored
            } else {
                let p = &mut weight_row[vectors.clone()];
                p.fill(T::ZERO);
                p[own.start - vectors.start..own.end - vectors.start].copy_from_slice(stored);
                &*p
            };
            kept[..vectors.start].fill(T::ZERO);
            kept[vectors.clone()].copy_from_slice(p);
            kept[vectors.end..].fill(T::ZERO);
            if let Some((mask, first)) = operands.drop(b, h, i) {
                drop_weights(mask, &mut factors, first + own.start, &mut kept[own.clone()]);
            }
            softmax_gradient(&mut ds[vectors.clone()], p, &kept[vectors.clone()]);
            if let Some(out) = &mut ds_out {
                out[i * keys..(i + 1) * keys].copy_from_slice(&ds[..keys]);
            }
            multiply(&mut ds[vectors], operands.scale);
            let Some(Positions { zero, .. }) = operands.positions else { continue };
            let position = operands.position(b, i);
            let (placed, ahead) = operands.placed(position, own);
            for (i, placed) in [(i, placed), (i + 1, ahead)] {
                if i < queries && !placed.is_empty() {
                    let at = i * sizes.distances + zero + position + 1;
                    copy_reversed(&mut by_distance[at - placed.end..at - placed.start], &ds[placed]);
                }
            }
        }
    }

    // dQ
    let key_rows = panels.rows(key_rows, sizes.width);
    for tile in tiles(queries, height) {
        let seen = span(tile.clone().map(|i| operands.seen(b, i)));
        let left = Mat { data: &ds[tile.start * sizes.keys + seen.start..], rs: sizes.keys, cs: 1 };
        panels.multiply(left, tile.len(), key_rows, seen, columns.clone(), out, sizes.width, false);
        if operands.positions.is_some() {
            let used = distances_of(operands, b, tile.clone());
            let data = &by_distance[tile.start * sizes.distances + used.start..];
            let (left, table) = (Mat { data, rs: sizes.distances, cs: 1 }, panels.rows(table, sizes.width));
            panels.multiply(left, tile.len(), table, used, columns.clone(), out, sizes.width, true);
        }
        for (i, out) in tile.zip(out.chunks_exact(sizes.width)) {
            write(0, i, &out[..width]);
        }
    }

    // dK, dV: columns of dS and of the dropped weights.
    for tile in tiles(keys, height) {
        let seeing = operands.seeing(b, tile.clone());
        for (which, source, right) in [(1, &*ds, &*content), (2, &*kept, &*dy_rows)] {
            let first = seeing.start * sizes.keys + tile.start;
            let left = Mat { data: &source[first.min(source.len())..], rs: 1, cs: sizes.keys };
            let right = panels.rows(right, sizes.width);
            panels.multiply(
                left,
                tile.len(),
                right,
                seeing.clone(),
                columns.clone(),
                out,
                sizes.width,
                false,
            );
            for (j, out) in tile.clone().zip(out.chunks_exact(sizes.width)) {
                write(which, j, &out[..width]);
            }
        }
    }

    // du, dv, dR: columns of dS by distance.
    let Some(Positions { r, zero, next_query, .. }) = operands.positions else { return };
    let products = SmallProducts::<T>::new();
    let (vectors, dr) = sums.split_at_mut(2 * sizes.width);
    let (du, dv) = vectors.split_at_mut(sizes.width);
    column_sums(key_sums, ds);
    products.combine((key_sums, 1), k, keys, &mut du[..width], true);
    column_sums(distance_sums, by_distance);
    let r = Rows { data: r, start: h * width, step: d as isize };
    products.combine((distance_sums, 1), r, distances, &mut dv[..width], true);
    let (distance, start) = (panels.rows(distance, sizes.width), zero + operands.position(b, 0));
    for tile in tiles(distances, height) {
        // Query i takes row start + i - j of r for some key j, or lends it to the query before.
        let last = (tile.end + keys + usize::from(next_query)).saturating_sub(start);
        let taking = tile.start.saturating_sub(start)..last.min(queries);
        if taking.is_empty() {
            continue;
        }
        let source = &by_distance[taking.start * sizes.distances + tile.start..];
        let (left, to) =
            (Mat { data: source, rs: 1, cs: sizes.distances }, &mut dr[tile.start * sizes.width..]);
        panels.multiply(left, tile.len(), distance, taking, columns.clone(), to, sizes.width, true);
    }
}

/// Rows of r that queries take for themselves or lend to the query before, all of them and perhaps some more.
fn distances_of<T: Tiles>(operands: &Operands<'_, T>, b: usize, queries: Range<usize>) -> Range<usize> {
    let Some(Positions { zero, next_query, .. }) = operands.positions else { return 0..0 };
    let lending = queries.start.saturating_sub(usize::from(next_query))..queries.end;
    let seen = span(lending.clone().map(|i| operands.seen(b, i)));
    let nearest = zero + operands.position(b, lending.start) + 1;
    let farthest = zero + operands.position(b, queries.end - 1) + 1;
    let end = (farthest - seen.start.min(farthest)).min(operands.dims.distances);
    (nearest - seen.end.min(nearest)).min(end)..end
}

simd_fn! {
    /// x = the numbers of `reversed` from the last to the first.
    fn copy_reversed<T>(x: &mut [T], reversed: &[T]) {
        x.iter_mut().zip(reversed.iter().rev()).for_each(|(x, y)| *x = *y);
    }
}

simd_fn! {
    /// sums[j] = Σ_i rows[i][j]
    fn column_sums<T>(sums: &mut [T], rows: &[T]) {
        sums.fill(T::ZERO);
        rows.chunks_exact(sums.len()).for_each(|row| add_assign(sums, row));
    }
}

simd_fn! {
    /// dp = p (dp' - Σ p dp') with dp' = factor dp and kept = factor p, of whole vectors.
    fn softmax_gradient<T>(dp: &mut [T], p: &[T], kept: &[T]) {
        let (p, kept) = (p.as_chunks::<LANES>().0, kept.as_chunks::<LANES>().0);
        let dp = dp.as_chunks_mut::<LANES>().0;
        let mut sums = [T::ZERO; LANES];
        for (dp, kept) in dp.iter().zip(kept) {
            for l in 0..LANES {
                sums[l] = kept[l].mul_add(dp[l], sums[l]);
            }
        }
        let mean = fold(sums, |a, b| a + b);
        for ((dp, p), kept) in dp.iter_mut().zip(p).zip(kept) {
            for l in 0..LANES {
                dp[l] = kept[l].mul_add(dp[l], -(p[l] * mean));
            }
        }
    }
}

simd_fn! {
    /// x *= factor, of whole vectors.
    fn multiply<T>(x: &mut [T], factor: T) {
        for x in x.as_chunks_mut::<LANES>().0 {
            for l in 0..LANES {
                x[l] *= factor;
            }
        }
    }
}
