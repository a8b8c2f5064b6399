//! The backward pass of longer sequences.

use std::ops::Range;

use super::super::operands::{Operands, Positions};
use super::super::{Dims, Layout, rows_per_part};
use super::{HeadRows, Sizes, copy_rows, cut, drop_weights, span, total, turn, whole_vectors};
use crate::cpu::gemm::{Mat, Panels, Rows, SmallProducts, Tiles};
use crate::cpu::pool::{Pool, Rows as _, RowsMut};
use crate::cpu::simd::{LANES, add_assign, fold, simd_fn};
use crate::ops::dropout::Factors;

/// Lengths of a thread's scratch.
fn lengths<T: Tiles>(dims: &Dims, sizes: &Sizes) -> [usize; 12] {
    let Dims { queries, width, .. } = *dims;
    let [values, keys] = sizes.keys_and_values(dims);
    let narrow_rows = values.max(width * sizes.distances);
    [
        values,
        keys,
        queries * sizes.width,
        queries * sizes.width,
        if sizes.narrow { width * sizes.distances } else { queries * sizes.width },
        queries * sizes.keys,
        queries * sizes.keys,
        queries * sizes.distances,
        if sizes.narrow { narrow_rows } else { Panels::<T>::new().height() * sizes.width },
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
    let parts = dims.batch.div_ceil(rows_per_part(dims.batch));
    let sizes = Sizes::new::<T>(dims, next_query, parts, threads);
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
    let next_query = operands.positions.is_some_and(|p| p.next_query);
    let per_part = rows_per_part(dims.batch);
    let parts = dims.batch.div_ceil(per_part);
    let sizes = Sizes::new::<T>(&dims, next_query, parts, pool.threads());
    let (lengths, each_sums) = (lengths::<T>(&dims, &sizes), sums_len(&dims, &sizes));
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
    let groups = sizes.groups(&dims);
    pool.run(parts * groups, |task, thread| {
        let (part, heads) = (task / groups, sizes.heads(&dims, task % groups));
        let first = part * dims.heads + heads.start;
        // SAFETY: a thread owns its scratch, and a task the partial sums of its heads.
        let (scratch, sums) = unsafe { (scratches.part(thread, 1), partial.part(first, heads.len())) };
        sums.fill(T::ZERO);
        let write = |which: usize, b: usize, token: usize, h: usize, values: &[T]| {
            let tokens = if which == 0 { dims.queries } else { dims.keys };
            if let Some(grad) = &outputs[which] {
                // SAFETY: a head of a batch row belongs to one task.
                unsafe { grad.write(b * tokens + token, h * dims.width, values) }
            }
        };
        let rows = part * per_part..dims.batch.min((part + 1) * per_part);
        for (b, h) in rows.flat_map(|b| heads.clone().map(move |h| (b, h))) {
            let number = h - heads.start;
            let sums = &mut sums[number * each_sums..][..each_sums];
            // SAFETY: as above.
            let ds_out = unsafe { ds.part(b * dims.heads + h, 1) };
            let head = Head {
                b,
                h,
                weights: &weights[operands.weight_row(b, h, 0)..],
                dy: &dy[b * dims.queries * dims.d() + h * dims.width..],
                table: &tables[h * each_table..(h + 1) * each_table],
            };
            let mut rest = &mut *scratch;
            let mut parts = lengths.map(|len| cut(&mut rest, len));
            if !sizes.narrow {
                let write = |which, token, values: &[T]| write(which, b, token, h, values);
                gradient_head(operands, &sizes, head, ds_out, sums, parts, write);
                continue;
            }
            // Keys and values of all heads of the task are turned, and the gradients that took their place turned back.
            if number == 0 {
                turn(operands, (1, b), &heads, &sizes, parts[1]);
                turn(operands, (2, b), &heads, &sizes, parts[0]);
            }
            let each = dims.width * sizes.keys;
            for part in parts.iter_mut().take(2) {
                *part = &mut std::mem::take(part)[number * each..][..each];
            }
            let write_dq = |which, token, values: &[T]| write(which, b, token, h, values);
            gradient_head(operands, &sizes, head, ds_out, sums, parts, write_dq);
            if h + 1 == heads.end {
                let mut rest = &mut *scratch;
                let [values, keys, .., rows, _, _, _] = lengths.map(|len| cut(&mut rest, len));
                for (which, turned) in [(1, &*keys), (2, &*values)] {
                    let wide = heads.len() * dims.width;
                    Panels::new().turn(turned, sizes.keys, (dims.keys, wide), wide, rows);
                    let rows = rows.chunks_exact(wide).take(dims.keys).enumerate();
                    rows.for_each(|(j, row)| write(which, b, j, heads.start, row));
                }
            }
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
/// those of u, v and r are added to `sums`. Of a narrow head the first two parts of the scratch hold Vᵀ and Kᵀ, and
/// become dVᵀ and dKᵀ.
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
    let values_turned = if sizes.narrow {
        panels.rows(value_panels, sizes.keys)
    } else {
        copy_rows(k, None, width, sizes.width, key_rows);
        copy_rows(Rows { data: dy, start: 0, step: d as isize }, None, width, sizes.width, dy_rows);
        panels.transpose(&v.data[v.start..], v.step as usize, (width, keys), value_panels)
    };
    let at = h * width..(h + 1) * width;
    copy_rows(q, operands.positions.map(|p| &p.u[at.clone()]), width, sizes.width, content);
    if let Some(Positions { v, .. }) = operands.positions {
        copy_rows(q, Some(&v[at]), width, sizes.width, distance);
        by_distance.fill(T::ZERO);
    }
    let tiles = |n: usize, each: usize| (0..n).step_by(each).map(move |first| first..n.min(first + each));

    // dS and the dropped weights, and dS by distance. Weights that nothing is dropped of are read as they are stored.
    let as_stored = keys == sizes.keys && operands.drop(b, h, 0).is_none();
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
            let kept = if as_stored {
                p
            } else {
                kept[..vectors.start].fill(T::ZERO);
                kept[vectors.clone()].copy_from_slice(p);
                kept[vectors.end..].fill(T::ZERO);
                if let Some((mask, first)) = operands.drop(b, h, i) {
                    drop_weights(mask, &mut factors, first + own.start, &mut kept[own.clone()]);
                }
                &kept[vectors.clone()]
            };
            let out = match &mut ds_out {
                Some(out) => {
                    let out = &mut out[i * keys..(i + 1) * keys];
                    out[..vectors.start].fill(T::ZERO);
                    out[vectors.end.min(keys)..].fill(T::ZERO);
                    &mut out[vectors.start..vectors.end.min(keys)]
                }
                None => &mut [],
            };
            softmax_gradient(&mut ds[vectors], p, kept, operands.scale, out);
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

    let kept = if as_stored { &weights[..queries * keys] } else { &*kept };
    if sizes.narrow {
        let from = NarrowScores { ds, kept, by_distance };
        let turned = NarrowTurned { keys: key_rows, values: value_panels, table: dy_rows, rows: out };
        let queries = (&*content, &*distance);
        narrow_products(operands, sizes, &head, from, queries, turned, sums, |i, dq| write(0, i, dq));
        return add_position_biases(
            operands,
            &head,
            (ds, key_sums),
            (by_distance, distance_sums),
            sums,
            sizes.width,
        );
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
        for (which, source, right) in [(1, &*ds, &*content), (2, kept, &*dy_rows)] {
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
    add_position_biases(operands, &head, (ds, key_sums), (by_distance, distance_sums), sums, sizes.width);
    let Some(Positions { zero, next_query, .. }) = operands.positions else { return };
    let dr = &mut sums[2 * sizes.width..];
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

/// Adds du = Σ_ij dS_ij k_j and dv = Σ_ij dS_ij r_(p_i - j) to the first two rows, of `wide` numbers, of `sums`, by way
/// of the column sums of dS and of dS by distance, for which there is memory beside them.
fn add_position_biases<T: Tiles>(
    operands: &Operands<'_, T>,
    head: &Head<'_, T>,
    (ds, key_sums): (&[T], &mut [T]),
    (by_distance, distance_sums): (&[T], &mut [T]),
    sums: &mut [T],
    wide: usize,
) {
    let Some(Positions { r, .. }) = operands.positions else { return };
    let Dims { keys, width, distances, .. } = operands.dims;
    let products = SmallProducts::<T>::new();
    let (du, dv) = sums[..2 * wide].split_at_mut(wide);
    column_sums(key_sums, ds);
    products.combine((key_sums, 1), operands.rows(1, head.b, head.h), keys, &mut du[..width], true);
    column_sums(distance_sums, by_distance);
    let r = Rows { data: r, start: head.h * width, step: operands.dims.d() as isize };
    products.combine((distance_sums, 1), r, distances, &mut dv[..width], true);
}

/// What a narrow head's products are computed from: scale dS and dropped weights [Tq, keys], and scale dS by distance
/// [Tq, distances], in rows filled up with zeros.
#[derive(Clone, Copy)]
struct NarrowScores<'a, T> {
    ds: &'a [T],
    kept: &'a [T],
    by_distance: &'a [T],
}

/// Kᵀ and Vᵀ of a narrow head, which become dKᵀ and dVᵀ; memory for dRᵀ, and for its rows or a row of dQ.
struct NarrowTurned<'a, T> {
    keys: &'a mut [T],
    values: &'a mut [T],
    table: &'a mut [T],
    rows: &'a mut [T],
}

/// dQ, dKᵀ and dVᵀ of a narrow head, and dR added to `sums`, from Q + u and Q + v in rows.
#[allow(clippy::too_many_arguments)]
fn narrow_products<T: Tiles>(
    operands: &Operands<'_, T>,
    sizes: &Sizes,
    head: &Head<'_, T>,
    from: NarrowScores<'_, T>,
    (content, distance): (&[T], &[T]),
    turned: NarrowTurned<'_, T>,
    sums: &mut [T],
    write_dq: impl Fn(usize, &[T]),
) {
    let Dims { queries, keys, width, distances, .. } = operands.dims;
    let NarrowTurned { keys: dk, values: dv, table, rows } = turned;
    let NarrowScores { ds, kept, by_distance } = from;
    let (panels, products) = (Panels::<T>::new(), SmallProducts::<T>::new());
    let (b, d, nr) = (head.b, operands.dims.d(), panels.width());
    let by_column = |rows, step| Mat { data: rows, rs: 1, cs: step };
    for (i, ds) in ds.chunks_exact(sizes.keys).enumerate() {
        let (vectors, dq) = (whole_vectors(&operands.seen(b, i)), &mut rows[..width]);
        products.dots(&ds[vectors.clone()], &dk[vectors.start..], sizes.keys, dq);
        if operands.positions.is_some() {
            let used = distances_of(operands, b, i..i + 1);
            let by_distance = &by_distance[i * sizes.distances + used.start..];
            let r = Rows { data: head.table, start: used.start * width, step: width as isize };
            products.combine((by_distance, 1), r, used.len(), dq, true);
        }
        write_dq(i, dq);
    }
    for (left, right, to) in [(by_column(content, width), ds, dk), (by_column(head.dy, d), kept, dv)] {
        let right = panels.rows(right, sizes.keys);
        for first in (0..keys).step_by(nr) {
            let (seeing, tile) = (operands.seeing(b, first..keys.min(first + nr)), first / nr);
            let left = Mat { data: &left.data[(seeing.start * left.cs).min(left.data.len())..], ..left };
            panels.multiply(left, width, right, seeing, tile..tile + 1, to, sizes.keys, false);
        }
    }
    if operands.positions.is_some() {
        let (left, right) = (by_column(distance, width), panels.rows(by_distance, sizes.distances));
        let tiles = 0..sizes.distances / nr;
        panels.multiply(left, width, right, 0..queries, tiles, table, sizes.distances, false);
        panels.turn(table, sizes.distances, (distances, width), width, rows);
        add_to(&mut sums[2 * width..][..distances * width], &rows[..distances * width]);
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
    /// ds = p (dp' - Σ p dp') with dp' = factor dp and kept = factor p, of whole vectors: dp becomes scale ds and
    /// `out`, which may end inside the last vector or be empty, becomes ds.
    fn softmax_gradient<T>(dp: &mut [T], p: &[T], kept: &[T], scale: T, out: &mut [T]) {
        let (p, kept) = (p.as_chunks::<LANES>().0, kept.as_chunks::<LANES>().0);
        let dp = dp.as_chunks_mut::<LANES>().0;
        let mut sums = [T::ZERO; LANES];
        for (dp, kept) in dp.iter().zip(kept) {
            for l in 0..LANES {
                sums[l] = kept[l].mul_add(dp[l], sums[l]);
            }
        }
        let mean = fold(sums, |a, b| a + b);
        let (whole, rest) = out.as_chunks_mut::<LANES>();
        let mut whole = whole.iter_mut();
        let mut ds = [T::ZERO; LANES];
        for ((dp, p), kept) in dp.iter_mut().zip(p).zip(kept) {
            for l in 0..LANES {
                ds[l] = kept[l].mul_add(dp[l], -(p[l] * mean));
            }
            if let Some(out) = whole.next() {
                *out = ds;
            }
            for l in 0..LANES {
                dp[l] = ds[l] * scale;
            }
        }
        for (out, ds) in rest.iter_mut().zip(ds) {
            *out = ds;
        }
    }
}
