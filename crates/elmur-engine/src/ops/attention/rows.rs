//! CPU kernels for short sequences: one query at a time, its products as dot products and combinations of
//! rows. Nothing is packed, so that ten tokens, or one token and a cache, cost little more than their
//! multiplications.

use super::operands::{Operands, Positions};
use super::{Dims, Layout};
use crate::cpu::float::Float;
use crate::cpu::gemm::{Rows, SmallProducts, Tiles};
use crate::cpu::simd::{dot, simd_fn};
use crate::ops::dropout::Mask as DropMask;
use crate::ops::softmax::softmax_row;

/// Scratch of one forward task: q + u, q + v, scores by distance, weights and dropped weights of one head.
pub(super) fn forward_scratch(dims: &Dims) -> usize {
    (2 * dims.width + dims.keys + 2 * dims.queries * dims.keys).next_multiple_of(16)
}

/// One batch row: y [Tq, d] and weights [H, Tq, Tk].
pub(super) fn forward_row<T: Tiles>(
    operands: &Operands<'_, T>,
    b: usize,
    y: &mut [T],
    mut weights: Option<&mut [T]>,
    scratch: &mut [T],
) {
    let Dims { queries, keys, heads, width, .. } = operands.dims;
    let d = heads * width;
    let products = SmallProducts::<T>::new();
    let (content, rest) = scratch.split_at_mut(width);
    let (distance, rest) = rest.split_at_mut(width);
    let (by_distance, rest) = rest.split_at_mut(keys);
    let (spare, rest) = rest.split_at_mut(queries * keys);
    let dropped = &mut rest[..queries * keys];
    for h in 0..heads {
        let weights = match &mut weights {
            Some(weights) => &mut weights[h * queries * keys..(h + 1) * queries * keys],
            None => &mut *spare,
        };
        for i in 0..queries {
            let q = operands.head(0, b, i, h);
            let seen = operands.seen(b, i);
            let row = &mut weights[i * keys..(i + 1) * keys];
            row[..seen.start].fill(T::ZERO);
            row[seen.end..].fill(T::ZERO);
            let scores = &mut row[seen.clone()];
            let k = operands.rows(1, b, h);
            let keys_seen = &k.data[(k.start + seen.start * k.step as usize).min(k.data.len())..];
            match operands.positions {
                Some(Positions { u, v, r, zero, .. }) => {
                    let at = h * width..(h + 1) * width;
                    sum_into(content, q, &u[at.clone()]);
                    products.dots(content, keys_seen, k.step as usize, scores);
                    let position = operands.position(b, i);
                    let (own, ahead) = operands.placed(position, seen.clone());
                    for (query, placed) in [(i, own), (i + 1, ahead)] {
                        if placed.is_empty() || query == queries {
                            continue;
                        }
                        sum_into(distance, operands.head(0, b, query, h), &v[at.clone()]);
                        // Rows of r rise from that of the last key: against the order of keys.
                        let nearest = zero + position + 1 - placed.end;
                        let r = &r[operands.table_start(b) + nearest * d + at.start..];
                        let by_distance = &mut by_distance[..placed.len()];
                        products.dots(distance, r, d, by_distance);
                        let scores = &mut scores[placed.start - seen.start..placed.end - seen.start];
                        scores.iter_mut().zip(by_distance.iter().rev()).for_each(|(s, x)| *s += *x);
                    }
                }
                None => products.dots(q, keys_seen, k.step as usize, scores),
            }
            scores.iter_mut().for_each(|s| *s *= operands.scale);
            if let Some(bias) = operands.bias_rows(b, h, i) {
                scores.iter_mut().zip(&bias[seen.clone()]).for_each(|(s, bias)| *s += *bias);
            }
            if let Some(mask) = operands.mask_rows(b, i) {
                for (s, visible) in scores.iter_mut().zip(&mask[seen]) {
                    if !visible {
                        *s = T::NEG_INFINITY;
                    }
                }
            }
            normalise(scores);
        }
        let mut used = &*weights;
        if let Some((mask, first)) = operands.drop(b, h, 0) {
            dropped.copy_from_slice(weights);
            drop_weights(mask, first, dropped);
            used = &*dropped;
        }
        for i in 0..queries {
            let y = &mut y[i * d + h * width..][..width];
            let seen = operands.seen(b, i);
            let values = from_row(operands.rows(2, b, h), seen.start);
            products.combine((&used[i * keys + seen.start..], 1), values, seen.len(), y, false);
        }
    }
}

/// Rows from row `first` on.
fn from_row<T>(rows: Rows<'_, T>, first: usize) -> Rows<'_, T> {
    Rows { start: rows.start + first * rows.step as usize, ..rows }
}

/// y = a + b
fn sum_into<T: Float>(y: &mut [T], a: &[T], b: &[T]) {
    y.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y = *a + *b);
}

simd_fn! {
    fn normalise<T>(x: &mut [T]) {
        softmax_row(x);
    }
}

simd_fn! {
    fn drop_weights<T>(mask: DropMask, first: usize, x: &mut [T]) {
        mask.apply(first, x);
    }
}

/// Scratch of one part of the batch beside its partial sums: for one head q + u and q + v of all queries, ds
/// and dropped weights, and three rows of a head.
pub(super) fn gradient_scratch(dims: &Dims) -> usize {
    (2 * dims.queries * (dims.width + dims.keys) + 3 * dims.width).next_multiple_of(16)
}

/// What the gradient of attention reads and writes for one batch row.
pub(super) struct GradientRow<'a, T> {
    /// All weights, [B, H, Tq, Tk].
    pub weights: &'a [T],
    /// [B, Tq, d]
    pub dy: &'a [T],
    /// Gradients of the operands that hold q, k, v.
    pub grads: [Option<&'a mut [T]>; 3],
    /// Gradients of the scaled scores, [H, Tq, Tk].
    pub ds: Option<&'a mut [T]>,
    /// Sums of du `[d]`, dv `[d]` and dr [R, d], added to.
    pub sums: &'a mut [T],
    pub scratch: &'a mut [T],
}

/// One batch row of every gradient.
pub(super) fn gradient_row<T: Tiles>(
    operands: &Operands<'_, T>,
    layout: Layout,
    b: usize,
    row: GradientRow<'_, T>,
) {
    let GradientRow { weights, dy, mut grads, ds: mut ds_out, sums, scratch } = row;
    let Dims { queries, keys, heads, width, distances, .. } = operands.dims;
    let d = heads * width;
    let products = SmallProducts::<T>::new();
    // (gradient, elements per token, first column) of q, k, v, as in `Operands::rows`.
    let place = layout.places().map(|(operand, column)| (operand, layout.widths()[operand] * d, column * d));
    let (du, rest) = sums.split_at_mut(d);
    let (dv, dr) = rest.split_at_mut(d);
    let (content, rest) = scratch.split_at_mut(queries * width);
    let (distance, rest) = rest.split_at_mut(queries * width);
    let (ds, rest) = rest.split_at_mut(queries * keys);
    let (dropped, rest) = rest.split_at_mut(queries * keys);
    let (from_content, rest) = rest.split_at_mut(width);
    let (from_distance, rest) = rest.split_at_mut(width);
    let from_before = &mut rest[..width];
    for h in 0..heads {
        let at = h * width..(h + 1) * width;
        let dy = Rows { data: dy, start: b * queries * d + at.start, step: d as isize };
        // Factors of dropout for the whole head, to become dropped weights row by row.
        dropped.fill(T::ONE);
        if let Some((mask, first)) = operands.drop(b, h, 0) {
            drop_weights(mask, first, dropped);
        }
        // What the query before had from this one's position term.
        from_before.fill(T::ZERO);
        for i in 0..queries {
            let q = operands.head(0, b, i, h);
            let seen = operands.seen(b, i);
            let p = &weights[operands.weight_row(b, h, i)..][seen.clone()];
            let own = i * width..(i + 1) * width;
            match operands.positions {
                Some(Positions { u, v, .. }) => {
                    sum_into(&mut content[own.clone()], q, &u[at.clone()]);
                    sum_into(&mut distance[own], q, &v[at.clone()]);
                }
                None => content[own].copy_from_slice(q),
            }
            for all in [&mut *ds, &mut *dropped] {
                all[i * keys..i * keys + seen.start].fill(T::ZERO);
                all[i * keys + seen.end..(i + 1) * keys].fill(T::ZERO);
            }
            let ds = &mut ds[i * keys..(i + 1) * keys][seen.clone()];
            let dropped = &mut dropped[i * keys..(i + 1) * keys][seen.clone()];
            // dP, then dS = P (dP - Σ P dP).
            let dy = &dy.data[dy.start + i * d..][..width];
            let v = from_row(operands.rows(2, b, h), seen.start);
            products.dots(dy, &v.data[v.start.min(v.data.len())..], v.step as usize, ds);
            softmax_gradient(ds, p, dropped);
            if let Some(out) = &mut ds_out {
                let row = &mut out[(h * queries + i) * keys..][..keys];
                row.fill(T::ZERO);
                row[seen.clone()].copy_from_slice(ds);
            }
            ds.iter_mut().for_each(|ds| *ds *= operands.scale);
            let k = from_row(operands.rows(1, b, h), seen.start);
            products.combine((ds, 1), k, seen.len(), from_content, false);
            if let Some(Positions { r, zero, .. }) = operands.positions {
                let position = operands.position(b, i);
                let (placed, ahead) = operands.placed(position, seen.clone());
                let combine = |placed: std::ops::Range<usize>, y: &mut [T]| {
                    // Distances fall as keys rise.
                    let row = zero + position - placed.start.min(zero + position);
                    let start = operands.table_start(b) + row * d + at.start;
                    let r = Rows { data: r, start, step: -(d as isize) };
                    let ds = &ds[placed.start - seen.start..placed.end - seen.start];
                    products.combine((ds, 1), r, placed.len(), y, false);
                };
                combine(placed, from_distance);
                from_distance.iter_mut().zip(&*from_before).for_each(|(x, g)| *x += *g);
                from_before.fill(T::ZERO);
                if i + 1 < queries && !ahead.is_empty() {
                    combine(ahead, from_before);
                }
                du[at.clone()].iter_mut().zip(&*from_content).for_each(|(x, g)| *x += *g);
                dv[at.clone()].iter_mut().zip(&*from_distance).for_each(|(x, g)| *x += *g);
                from_content.iter_mut().zip(&*from_distance).for_each(|(x, g)| *x += *g);
            }
            let (operand, stride, column) = place[0];
            if let Some(dq) = &mut grads[operand] {
                dq[i * stride + column + at.start..][..width].copy_from_slice(from_content);
            }
        }
        // Columns of dS and of the dropped weights give keys and values.
        for j in 0..keys {
            let (operand, stride, column) = place[1];
            if let Some(dk) = &mut grads[operand] {
                let dk = &mut dk[j * stride + column + at.start..][..width];
                let content = Rows { data: &*content, start: 0, step: width as isize };
                products.combine((&ds[j..], keys), content, queries, dk, false);
            }
            let (operand, stride, column) = place[2];
            if let Some(dvalue) = &mut grads[operand] {
                let dvalue = &mut dvalue[j * stride + column + at.start..][..width];
                products.combine((&dropped[j..], keys), dy, queries, dvalue, false);
            }
        }
        // Diagonals of dS give distances: query i sees row ρ of r at key p_i + zero - ρ.
        let Some(Positions { zero, next_query, .. }) = operands.positions else { continue };
        let start = zero + operands.position(b, 0);
        for rho in 0..distances.min(start + queries) {
            let first = rho.saturating_sub(start);
            let key = start + first - rho;
            let later = usize::from(next_query && rho < zero);
            if key >= keys || first + later >= queries {
                continue;
            }
            let count = (queries - first - later).min(keys - key);
            let rows = Rows { data: &*distance, start: (first + later) * width, step: width as isize };
            let dr = &mut dr[rho * d + at.start..][..width];
            products.combine((&ds[first * keys + key..], keys + 1), rows, count, dr, true);
        }
    }
}

simd_fn! {
    /// dp = p (dp' - Σ p dp') with dp' = factor dp, and factor = factor p.
    fn softmax_gradient<T>(dp: &mut [T], p: &[T], factor: &mut [T]) {
        for i in 0..dp.len().min(p.len()).min(factor.len()) {
            dp[i] *= factor[i];
            factor[i] *= p[i];
        }
        let mean = dot(p, dp);
        dp.iter_mut().zip(p).for_each(|(dp, p)| *dp = *p * (*dp - mean));
    }
}
