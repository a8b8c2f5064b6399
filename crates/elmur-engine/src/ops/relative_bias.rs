//! The relative bias of memory attention: a learned number per head and difference of times.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::gemm::Panels;
use crate::cpu::pool::{Rows, RowsMut, max_tasks};
use crate::cpu::simd::{add_assign, simd_fn};
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want_float};
use crate::ops::reduce::add_rows;
use crate::types::{DType, TensorType};

impl Graph {
    /// The per-head bias of attention between times: y[B, H, Tq, Tk] = table[clamp(q_time - k_time) + D - 1,
    /// h].
    ///
    /// The table is [2D - 1, H] and offsets are clamped to ±(D - 1); `q_times` is i64 [B or 1, Tq], `k_times`
    /// i64 [B or 1, Tk]. B is 1 if both are.
    pub fn relative_bias(&mut self, table: Value, q_times: Value, k_times: Value) -> Result<Value> {
        self.push1(RelativeBias, &[table, q_times, k_times])
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// A relative bias from its table, or the gradient of the table.
    struct BiasArgs in "relative_bias.cu" {
        to: u64, from: u64, q: u64, k: u64, q_rows: usize, k_rows: usize, reach: usize, n: usize,
        heads: i32, queries: i32, keys: i32,
    }
}

#[derive(Debug)]
struct RelativeBias;

/// Table row for a difference of times.
#[inline(always)]
fn bias_row(q: i64, k: i64, reach: i64) -> usize {
    (q.saturating_sub(k).clamp(-reach, reach) + reach) as usize
}

/// Whether y or dy [B, H, Tq, Tk] is large enough for whole rows of the table, all heads of a key, to pay.
fn many(y: &TensorType) -> bool {
    y.shape[1] >= 8 && y.shape[3] >= 16
}

/// The `count` times of batch row `b`, of all rows or of one that serves all.
fn times(all: &[i64], b: usize, count: usize) -> &[i64] {
    &all[b * count % all.len()..][..count]
}

/// Elements from one batch row's times to the next; 0 where one row serves all.
#[cfg(feature = "cuda")]
fn batch_step(times: &TensorType) -> usize {
    if times.shape[0] == 1 { 0 } else { times.shape[1] }
}

/// Queues either pass of the relative bias over y or dy [B, H, Tq, Tk].
#[cfg(feature = "cuda")]
fn cuda_bias(launch: &mut Launch<'_>, kernel: &'static str, ty: TensorType, rows: usize) -> Result<()> {
    let args = BiasArgs {
        to: launch.output(0),
        from: launch.input(0),
        q: launch.input(1),
        k: launch.input(2),
        q_rows: batch_step(launch.ty(1)),
        k_rows: batch_step(launch.ty(2)),
        reach: rows / 2,
        n: ty.len(),
        heads: ty.shape[1] as i32,
        queries: ty.shape[2] as i32,
        keys: ty.shape[3] as i32,
    };
    launch.elements(kernel, args.n, args)
}

impl Op for RelativeBias {
    fn name(&self) -> &'static str {
        "relative_bias"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        const OP: &str = "relative_bias";
        let [table, q, k] = inputs else { return mismatch(OP, "three operands", inputs.len().to_string()) };
        want_float(OP, "table", table)?;
        let heads = match table.shape[..] {
            [rows, heads] if rows % 2 == 1 => heads,
            _ => return mismatch(OP, "table [2D - 1, heads]", table.to_string()),
        };
        let (&[q_rows, queries], &[k_rows, keys]) = (&q.shape[..], &k.shape[..]) else {
            return mismatch(OP, "times [batch or 1, tokens]", format!("{q} and {k}"));
        };
        let agree = q_rows == k_rows || q_rows == 1 || k_rows == 1;
        if q.dtype != DType::I64 || k.dtype != DType::I64 || !agree {
            return mismatch(OP, "i64 times of one batch size, or one row", format!("{q} and {k}"));
        }
        Ok(vec![table.with([q_rows.max(k_rows), heads, queries, keys])])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let rows = b.graph.shape(b.inputs[0])?[0];
            let dtable = b.graph.push1(RelativeBiasGrad { rows }, &[dy, b.inputs[1], b.inputs[2]])?;
            b.set(0, dtable);
        }
        Ok(())
    }
    fn scratch(&self, _: &[TensorType], outputs: &[TensorType], threads: usize) -> usize {
        let y = &outputs[0];
        let each =
            if many(y) { 2 * y.shape[1] * y.cols() * y.dtype.size() } else { y.cols() * size_of::<i64>() };
        max_tasks(threads) * each
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let &[batch, heads, queries, keys] = &io.out_ty(0).shape[..] else { return Ok(()) };
        let reach = (io.ty(0).shape[0] / 2) as i64;
        let (q, k) = (io.input::<i64>(1), io.input::<i64>(2));
        if many(io.out_ty(0)) {
            dispatch_float!(io.dtype(), T => {
                let (table, y, panels) = (io.input::<T>(0), io.output::<T>(0), Panels::<T>::new());
                let (row, each) = (heads * queries * keys, 2 * heads * keys);
                let scratch = RowsMut::new(io.scratch::<T>(io.pool.max_tasks() * each), each);
                let per_task = io.pool.rows_per_task(batch, 2 * row);
                io.pool.blocks(batch, per_task, RowsMut::new(y, row), |first, y, task| {
                    // SAFETY: one part per task, and there are at most `max_tasks` tasks.
                    let (rows, turned) = unsafe { scratch.part(task, 1) }.split_at_mut(heads * keys);
                    for (b, y) in (first..).zip(y.chunks_exact_mut(row)) {
                        let (q, k) = (times(q, b, queries), times(k, b, keys));
                        for (i, q) in q.iter().enumerate() {
                            take_rows(rows, table, heads, *q, k, reach);
                            panels.turn(rows, heads, (heads, keys), keys, turned);
                            for (h, turned) in turned.chunks_exact(keys).enumerate() {
                                y[(h * queries + i) * keys..][..keys].copy_from_slice(turned);
                            }
                        }
                    }
                });
            });
            return Ok(());
        }
        let indices = RowsMut::new(io.scratch::<i64>(io.pool.max_tasks() * keys), keys);
        dispatch_float!(io.dtype(), T => {
            let (table, y) = (io.input::<T>(0), io.output::<T>(0));
            let row = heads * queries * keys;
            let per_task = io.pool.rows_per_task(batch, 4 * row);
            io.pool.blocks(batch, per_task, RowsMut::new(y, row), |first, y, task| {
                // SAFETY: one part per task, and there are at most `max_tasks` tasks.
                let index = unsafe { indices.part(task, 1) };
                for (b, y) in y.chunks_exact_mut(row).enumerate() {
                    let (q, k) = (times(q, first + b, queries), times(k, first + b, keys));
                    for (i, &q) in q.iter().enumerate() {
                        // Table rows of one query, then a run of keys per head.
                        index.iter_mut().zip(k).for_each(|(x, k)| *x = (bias_row(q, *k, reach) * heads) as i64);
                        for h in 0..heads {
                            let y = &mut y[(h * queries + i) * keys..][..keys];
                            y.iter_mut().zip(&*index).for_each(|(y, x)| *y = table[*x as usize + h]);
                        }
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let rows = launch.ty(0).shape[0];
        cuda_bias(launch, "relative_bias", launch.out_ty(0).clone(), rows)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// What the gradient of a bias table writes, and its extents.
    struct BiasGradArgs in "relative_bias.cu" {
        to: u64, q_rows: usize, k_rows: usize, batch: i32, heads: i32, queries: i32, keys: i32, rows: i32,
    }
}

/// Heads whose gradients of the bias table are added up together, where there are few heads or keys.
const HEADS: usize = 4;

/// Partial sums of the gradient of the table where there are many heads and keys: by shape alone.
const PARTS: usize = 16;

simd_fn! {
    /// y[j] = table[row of key j], rows of `heads` numbers.
    fn take_rows<T>(y: &mut [T], table: &[T], heads: usize, q: i64, k: &[i64], reach: i64) {
        for (y, k) in y.chunks_exact_mut(heads).zip(k) {
            let row = &table[bias_row(q, *k, reach) * heads..][..heads];
            let ((to, to_rest), (from, rest)) = (y.as_chunks_mut::<8>(), row.as_chunks::<8>());
            to.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            to_rest.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
        }
    }
}

simd_fn! {
    /// table[row of key j] += dy[j], rows of `heads` numbers.
    fn add_to_rows<T>(table: &mut [T], dy: &[T], heads: usize, q: i64, k: &[i64], reach: i64) {
        for (dy, k) in dy.chunks_exact(heads).zip(k) {
            let row = &mut table[bias_row(q, *k, reach) * heads..][..heads];
            let ((to, to_rest), (from, rest)) = (row.as_chunks_mut::<8>(), dy.as_chunks::<8>());
            for (to, from) in to.iter_mut().zip(from) {
                for l in 0..8 {
                    to[l] += from[l];
                }
            }
            add_assign(to_rest, rest);
        }
    }
}

#[derive(Debug)]
struct RelativeBiasGrad {
    rows: usize,
}

impl Op for RelativeBiasGrad {
    fn name(&self) -> &'static str {
        "relative_bias_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].with([self.rows, inputs[0].shape[1]])])
    }
    fn scratch(&self, inputs: &[TensorType], outputs: &[TensorType], _: usize) -> usize {
        let dy = &inputs[0];
        if many(dy) {
            return PARTS.min(dy.shape[0]) * dy.shape[1] * (self.rows + dy.cols()) * dy.dtype.size();
        }
        outputs[0].cols().div_ceil(HEADS) * HEADS * self.rows * inputs[0].dtype.size()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let &[batch, heads, queries, keys] = &io.ty(0).shape[..] else { return Ok(()) };
        let (q, k) = (io.input::<i64>(1), io.input::<i64>(2));
        let reach = (self.rows / 2) as i64;
        if many(io.ty(0)) {
            dispatch_float!(io.dtype(), T => {
                let (dy, dtable, panels) = (io.input::<T>(0), io.output::<T>(0), Panels::<T>::new());
                let (per_part, each) = (batch.div_ceil(PARTS.min(batch)), heads * (self.rows + keys));
                let parts = io.scratch::<T>(PARTS.min(batch) * each);
                parts.fill(T::ZERO);
                let tasks = batch.div_ceil(per_part);
                io.pool.blocks(tasks, 1, RowsMut::new(&mut *parts, each), |_, part, task| {
                    let (table, turned) = part.split_at_mut(heads * self.rows);
                    let rows = task * per_part..batch.min((task + 1) * per_part);
                    for (b, i) in rows.flat_map(|b| (0..queries).map(move |i| (b, i))) {
                        let (q, k) = (times(q, b, queries)[i], times(k, b, keys));
                        // All heads of a key side by side, as in the table.
                        let dy = &dy[(b * heads * queries + i) * keys..];
                        panels.turn(dy, queries * keys, (keys, heads), heads, turned);
                        add_to_rows(table, turned, heads, q, k, reach);
                    }
                });
                let parts = &*parts;
                io.pool.rows(self.rows, PARTS * heads, RowsMut::new(dtable, heads), |first, dtable| {
                    dtable.fill(T::ZERO);
                    for part in parts.chunks_exact(each).take(tasks) {
                        add_rows(dtable, &part[first * heads..][..dtable.len()]);
                    }
                });
            });
            return Ok(());
        }
        dispatch_float!(io.dtype(), T => {
            let (dy, dtable) = (io.input::<T>(0), io.output::<T>(0));
            // Some heads per task, each task into a table of its own, then side by side into the table.
            let groups = heads.div_ceil(HEADS);
            let tables = io.scratch::<T>(groups * HEADS * self.rows);
            let work = HEADS * batch * queries * keys + self.rows;
            io.pool.rows(groups, work, RowsMut::new(&mut *tables, HEADS * self.rows), |first, tables| {
                tables.fill(T::ZERO);
                for (group, table) in (first..).zip(tables.chunks_exact_mut(HEADS * self.rows)) {
                    let table = table.as_chunks_mut::<HEADS>().0;
                    // Heads that there are not repeat the last one, and are not kept.
                    let heads_here: [usize; HEADS] = std::array::from_fn(|h| (group * HEADS + h).min(heads - 1));
                    for (b, i) in (0..batch).flat_map(|b| (0..queries).map(move |i| (b, i))) {
                        let (q, k) = (times(q, b, queries)[i], times(k, b, keys));
                        let dy = heads_here.map(|h| &dy[((b * heads + h) * queries + i) * keys..][..keys]);
                        for j in 0..keys {
                            // Keys often share a row of the table: the sums of several heads do not wait for each other.
                            let row = &mut table[bias_row(q, k[j], reach)];
                            for h in 0..HEADS {
                                row[h] += dy[h][j];
                            }
                        }
                    }
                }
            });
            for (row, target) in dtable.chunks_exact_mut(heads).enumerate() {
                for (h, y) in target.iter_mut().enumerate() {
                    *y = tables[(h / HEADS * self.rows + row) * HEADS + h % HEADS];
                }
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let &[batch, heads, queries, keys] = &launch.ty(0).shape[..] else { return Ok(()) };
        // A table and a tile per warp, in as much shared memory as every GPU has.
        let each = 4 * (self.rows + 32 * 33);
        let warps = ((96 << 10) / each).min(8);
        if warps == 0 {
            launch.clear(launch.output(0), launch.out_ty(0).bytes())?;
            return cuda_bias(launch, "relative_bias_grad_anywhere", launch.ty(0).clone(), self.rows);
        }
        // A tile per warp, and no more blocks than fill a GPU.
        let tiles = batch * queries.div_ceil(32) * keys.div_ceil(32);
        let parts = tiles.div_ceil(warps).min(128usize.div_ceil(heads)).max(1);
        let dtable = launch.output(0);
        let to = if parts > 1 { launch.scratch(4 * parts * heads * self.rows)? } else { dtable };
        let args = BiasGradArgs {
            to,
            q_rows: batch_step(launch.ty(1)),
            k_rows: batch_step(launch.ty(2)),
            batch: batch as i32,
            heads: heads as i32,
            queries: queries as i32,
            keys: keys as i32,
            rows: self.rows as i32,
        };
        let args = args![launch.input(0), launch.input(1), launch.input(2), args];
        launch.kernel("relative_bias_grad", [heads, parts, 1], 32 * warps as u32, warps * each, args)?;
        if parts == 1 {
            return Ok(());
        }
        let args = args![dtable, to, parts as i32, heads as i32, self.rows as i32];
        launch.elements("relative_bias_grad_sum", heads * self.rows, args)
    }
}
