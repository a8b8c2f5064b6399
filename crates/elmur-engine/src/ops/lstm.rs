//! A long short-term memory over a window of steps, in one op.
//!
//! ```text
//! [i, f, g, o] = x_t + W h_(t-1) + b          x_t already holds the input's share of the gates
//! c_t = σ(f) c_(t-1) + σ(i) tanh(g);   h_t = σ(o) tanh(c_t)
//! ```
//!
//! Backward, from the last step to the first, with i, f, g, o now the activated gates:
//!
//! ```text
//! dh = dh_t (from outside) + dz_(t+1) W
//! dc = dc_(t+1) f_(t+1) + dh o (1 - tanh² c_t)
//! dz_t = [dc g i (1 - i), dc c_(t-1) f (1 - f), dc i (1 - g²), dh tanh(c_t) o (1 - o)]
//! ```
//!
//! Then dx = dz, and over all rows and steps dW = Σ dz h_(t-1)ᵀ and db = Σ dz.
//!
//! Rows of the batch are independent: each task walks through all steps with rows of its own. The weight is
//! packed once per window, except for so few rows that one product reads it faster as it lies. On a GPU the
//! weight stays in registers and shared memory for all steps: of one block (lstm_held.cu), of a cluster of
//! blocks, or, where it is too large for either, in the second-level cache (both lstm.cu).

#[cfg(feature = "cuda")]
mod gpu;

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::gemm::{DOT_ROWS, Mat, PackedRight, Product, Tiles, gemm};
use crate::cpu::pool::{Rows, RowsMut};
use crate::cpu::simd::{add_assign, prefetch, simd_fn};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want, want_float};
use crate::types::TensorType;

/// What [`Graph::lstm`] returns.
#[derive(Debug, Clone, Copy)]
pub struct Lstm {
    /// Hidden states after every step, [batch, steps, width].
    pub hidden: Value,
    /// Hidden state after the last step, [batch, width].
    pub last_hidden: Value,
    /// Cell state after the last step, [batch, width].
    pub last_cell: Value,
}

impl Graph {
    /// A long short-term memory (LSTM) over a window of steps, as one differentiable op.
    ///
    /// - `x` [batch, steps, 4 width]: the input's share of the gates (in PyTorch's names W_ih input + b_ih),
    ///   in the order input, forget, candidate, output;
    /// - `weight` [4 width, width] and `bias` [4 width]: those of the hidden state (W_hh and b_hh), in that
    ///   order too;
    /// - `hidden` and `cell` [batch, width]: the states before the first step.
    pub fn lstm(&mut self, x: Value, weight: Value, bias: Value, hidden: Value, cell: Value) -> Result<Lstm> {
        let outputs = self.push(Forward, &[x, weight, bias, hidden, cell])?;
        Ok(Lstm { hidden: outputs[0], last_hidden: outputs[1], last_cell: outputs[2] })
    }
}

/// Extents of an LSTM's window.
#[derive(Clone, Copy)]
struct Window {
    batch: usize,
    steps: usize,
    width: usize,
}

impl Window {
    /// From the type of a tensor [batch, steps, 4 width].
    fn of(gates: &TensorType) -> Option<Self> {
        match gates.shape[..] {
            [batch, steps, columns] if columns.is_multiple_of(4) => {
                Some(Self { batch, steps, width: columns / 4 })
            }
            _ => None,
        }
    }

    /// Rows of one task that multiplies by the packed weight.
    fn rows_per_task<T: Tiles>(&self, right: &PackedRight<T>, io: &Io<'_>) -> usize {
        right.unit_rows(self.batch, io.pool.threads()).unwrap_or_else(|| {
            // Sixteen multiply-adds cost about as much as one element touched; a gate as much as a few.
            let work = self.steps * self.width * (self.width / 4 + 32);
            // A register tile of fewer rows leaves the multiply-add units waiting.
            io.pool.rows_per_task(self.batch, work).max(4)
        })
    }

    /// Elements of scratch: the packed weight, if it is packed, with the left sides of all tasks, and for
    /// each row a product and two states.
    fn scratch<T: Tiles>(&self, right: Option<PackedRight<T>>, threads: usize) -> usize {
        let packed = right.map_or(0, |right| right.len() + self.left_sides(&right, threads));
        packed + 6 * self.batch * self.width
    }

    /// Elements of scratch for the left sides of all tasks.
    fn left_sides<T: Tiles>(&self, right: &PackedRight<T>, threads: usize) -> usize {
        let per_task = right.unit_rows(self.batch, threads);
        per_task.map_or(0, |rows| self.batch.div_ceil(rows) * right.left_len(rows))
    }
}

/// Scratch, cut into parts one after the other.
struct Parts<'a, T>(&'a mut [T]);

impl<'a, T> Parts<'a, T> {
    fn take(&mut self, len: usize) -> &'a mut [T] {
        let (part, rest) = std::mem::take(&mut self.0).split_at_mut(len);
        self.0 = rest;
        part
    }
}

/// The `len` elements of a state that begins as an input, or as zeros: kept in the output that it ends as
/// where someone reads that, else in scratch.
fn state<'a, T: Float>(
    io: &Io<'a>,
    input: Option<usize>,
    output: usize,
    len: usize,
    scratch: &mut Parts<'a, T>,
) -> &'a mut [T] {
    let shared = input.is_some_and(|input| io.inputs[input].ptr == io.outputs[output].ptr);
    let state = io.output_if_used::<T>(output).unwrap_or_else(|| scratch.take(len));
    match input {
        Some(_) if shared => {}
        Some(input) => state.copy_from_slice(io.input(input)),
        None => state.fill(T::ZERO),
    }
    state
}

/// Inputs x, weight, bias, hidden, cell. Outputs the hidden states, the last hidden state, the last cell
/// state; and for the backward pass the activated gates [batch, steps, 4 width], written over x where they may,
/// the cell states after each step and the hidden states before it, both [batch, steps, width].
#[derive(Debug)]
struct Forward;

impl Forward {
    /// How the weight is packed; not at all for a few rows.
    fn right<T: Tiles>(window: Window) -> Option<PackedRight<T>> {
        (window.batch > DOT_ROWS).then(|| PackedRight::new(window.batch, 4 * window.width, window.width))
    }
}

impl Op for Forward {
    fn name(&self) -> &'static str {
        "lstm"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let x = &inputs[0];
        want_float("lstm", "x", x)?;
        let Some(Window { batch, steps, width }) = Window::of(x) else {
            return mismatch("lstm", "x [batch, steps, 4 width]", x.to_string());
        };
        want("lstm", "weight", &inputs[1], x.dtype, &[4 * width, width])?;
        want("lstm", "bias", &inputs[2], x.dtype, &[4 * width])?;
        want("lstm", "hidden", &inputs[3], x.dtype, &[batch, width])?;
        want("lstm", "cell", &inputs[4], x.dtype, &[batch, width])?;
        let states = x.with([batch, steps, width]);
        let last = x.with([batch, width]);
        Ok(vec![states.clone(), last.clone(), last, x.clone(), states.clone(), states])
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 3), (3, 1), (4, 2)]
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let (gates, cells, before) = (b.outputs[3], b.outputs[4], b.outputs[5]);
        let mut inputs = vec![gates, cells, b.inputs[1], b.inputs[4]];
        let upper = [0, 1, 2].map(|output| b.grad(output));
        inputs.extend(upper.into_iter().flatten());
        let op = Gradient { upper: upper.map(|grad| grad.is_some()) };
        let grads = b.graph.push(op, &inputs)?;
        let (dz, dhidden, dcell) = (grads[0], grads[1], grads[2]);
        b.set(0, dz);
        b.set(3, dhidden);
        b.set(4, dcell);
        let (rows, columns) = (b.graph.ty(dz)?.rows(), b.graph.ty(dz)?.cols());
        let flat = b.graph.reshape(dz, [rows, columns])?;
        if b.needs(2) {
            let dbias = b.graph.sum_to(flat, [columns])?;
            b.set(2, dbias);
        }
        if b.needs(1) {
            // Last, so that it can be told to add to an earlier gradient of the same weight.
            let before = b.graph.reshape(before, [rows, columns / 4])?;
            let dweight = b.graph.matmul_with(flat, before, true, false)?;
            b.set(1, dweight);
        }
        Ok(())
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], threads: usize) -> usize {
        let Some(window) = Window::of(&inputs[0]) else { return 0 };
        dispatch_float!(inputs[0].dtype, T => {
            window.scratch(Self::right::<T>(window), threads) * size_of::<T>()
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(window) = Window::of(io.ty(0)) else { return Ok(()) };
        dispatch_float!(io.dtype(), T => forward::<T>(io, window));
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        Window::of(launch.ty(0)).map_or(Ok(()), |window| gpu::forward(launch, window))
    }
}

fn forward<T: Tiles>(io: &Io<'_>, window: Window) {
    let Window { batch, steps, width } = window;
    let columns = 4 * width;
    let (weight, bias) = (io.input::<T>(1), io.input::<T>(2));
    // Where the gates take the place of x, they are where it is read.
    let shared = io.inputs[0].ptr == io.outputs[3].ptr;
    let x = if shared { &[] } else { io.input::<T>(0) };
    let right = Forward::right::<T>(window);
    let threads = io.pool.threads();
    let mut scratch = Parts(io.scratch::<T>(window.scratch(right, threads)));
    let packed = scratch.take(right.map_or(0, |right| right.len()));
    if let Some(right) = right {
        right.pack(io.pool, Mat::transposed(weight, width), packed);
    }
    let packed = &*packed;
    // A few rows: their products are divided among the threads instead.
    let per_task = right.map_or(batch, |right| window.rows_per_task(&right, io));
    let left = scratch.take(right.map_or(0, |right| window.left_sides(&right, threads)));
    let left = RowsMut::new(left, right.map_or(0, |right| right.left_len(per_task)));
    let z = scratch.take(4 * batch * width);
    let h = state(io, Some(3), 1, batch * width, &mut scratch);
    let c = state(io, Some(4), 2, batch * width, &mut scratch);
    let kept = |output, columns: usize| {
        io.output_if_used::<T>(output).map(|data| RowsMut::new(data, steps * columns))
    };
    let outputs = (
        (RowsMut::new(h, width), RowsMut::new(c, width), RowsMut::new(z, 4 * width)),
        (kept(0, width), kept(3, 4 * width), kept(4, width), kept(5, width)),
    );
    io.pool.blocks(batch, per_task, outputs, |first, ((h, c, z), kept), task| {
        // SAFETY: there is a part for every task, and each takes its own.
        let left = unsafe { left.part(task, 1) };
        let (mut hidden, mut gates, mut cells, mut before) = kept;
        let rows = h.len() / width;
        for t in 0..steps {
            match &right {
                Some(right) => right.multiply(packed, left, h, z),
                None => {
                    let (a, b) = (Mat::rows(h, width), Mat::transposed(weight, width));
                    let precision = io.precision;
                    let product =
                        Product { m: rows, n: 4 * width, k: width, a, b, accumulate: false, precision };
                    gemm(io.pool, &mut [], product, z, 4 * width, |_| {});
                }
            }
            let states = h.chunks_exact_mut(width).zip(c.chunks_exact_mut(width));
            for (row, ((h, c), z)) in states.zip(z.chunks_exact_mut(4 * width)).enumerate() {
                let at = row * steps + t;
                keep(&mut before, at, h);
                let x = if shared { x } else { &x[((first + row) * steps + t) * columns..][..columns] };
                match &mut gates {
                    Some(gates) => {
                        let (gates, later) = gates[at * columns..].split_at_mut(columns);
                        if !shared {
                            gates.copy_from_slice(x);
                        }
                        if t + 1 < steps {
                            prefetch(&later[..columns]);
                        }
                        step_forward(gates, z, bias, c, h);
                    }
                    None => step_forward(z, x, bias, c, h),
                }
                keep(&mut cells, at, c);
                keep(&mut hidden, at, h);
            }
        }
    });
}

/// Writes row `at` of an output that someone reads.
fn keep<T: Float>(output: &mut Option<&mut [T]>, at: usize, row: &[T]) {
    if let Some(output) = output {
        output[at * row.len()..][..row.len()].copy_from_slice(row);
    }
}

simd_fn! {
    /// One step of one row, from x and W h, in either order: `z` becomes the activated gates, c and h the new
    /// states.
    fn step_forward<T>(z: &mut [T], x: &[T], bias: &[T], c: &mut [T], h: &mut [T]) {
        let width = h.len();
        let [i, f, g, o] = quarters(z);
        for (quarter, z) in [&mut *i, &mut *f, &mut *g, &mut *o].into_iter().enumerate() {
            let part = quarter * width..(quarter + 1) * width;
            let z = z.iter_mut().zip(&x[part.clone()]).zip(&bias[part]);
            if quarter == 2 {
                z.for_each(|((z, x), b)| *z = (*z + *x + *b).tanh());
            } else {
                z.for_each(|((z, x), b)| *z = (*z + *x + *b).sigmoid());
            }
        }
        let gates = i.iter().zip(f).zip(g.iter().zip(o));
        for (((i, f), (g, o)), (c, h)) in gates.zip(c.iter_mut().zip(h)) {
            *c = f.mul_add(*c, *i * *g);
            *h = *o * c.tanh();
        }
    }
}

/// Input, forget, candidate and output gates of one row.
#[inline(always)]
fn quarters<T>(gates: &mut [T]) -> [&mut [T]; 4] {
    let (low, high) = gates.split_at_mut(gates.len() / 2);
    let (i, f) = low.split_at_mut(low.len() / 2);
    let (g, o) = high.split_at_mut(high.len() / 2);
    [i, f, g, o]
}

/// Inputs gates, cell states, weight, first cell state, then the gradients that there are of the hidden
/// states, the last hidden state and the last cell state. Outputs dz, written over the gates where it may,
/// and the gradients of the first hidden state and the first cell state.
#[derive(Debug)]
struct Gradient {
    /// Whether there is a gradient of the hidden states, the last hidden state, the last cell state.
    upper: [bool; 3],
}

impl Gradient {
    /// The input that holds the gradient of number `index` in `upper`, if there is one.
    fn upper(&self, index: usize) -> Option<usize> {
        self.upper[index].then(|| 4 + self.upper[..index].iter().filter(|there| **there).count())
    }

    fn right<T: Tiles>(window: Window) -> PackedRight<T> {
        PackedRight::new(window.batch, window.width, 4 * window.width)
    }
}

impl Op for Gradient {
    fn name(&self) -> &'static str {
        "lstm_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].clone(), inputs[3].clone(), inputs[3].clone()])
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
    fn always_writes(&self, output: usize) -> bool {
        output == 0
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], threads: usize) -> usize {
        let Some(window) = Window::of(&inputs[0]) else { return 0 };
        dispatch_float!(inputs[0].dtype, T => {
            window.scratch(Some(Self::right::<T>(window)), threads) * size_of::<T>()
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(window) = Window::of(io.ty(0)) else { return Ok(()) };
        dispatch_float!(io.dtype(), T => self.walk_back::<T>(io, window));
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let upper = [0, 1, 2].map(|index| launch.input_if(self.upper(index)));
        Window::of(launch.ty(0)).map_or(Ok(()), |window| gpu::backward(launch, window, upper))
    }
}

impl Gradient {
    fn walk_back<T: Tiles>(&self, io: &Io<'_>, window: Window) {
        let Window { batch, steps, width } = window;
        let (cells, weight, first_cell) = (io.input::<T>(1), io.input::<T>(2), io.input::<T>(3));
        let dhidden = self.upper(0).map(|input| io.input::<T>(input));
        let right = Self::right::<T>(window);
        let wants_first = !io.outputs[1].ptr.is_null();
        let threads = io.pool.threads();
        let mut scratch = Parts(io.scratch::<T>(window.scratch(Some(right), threads)));
        let packed = scratch.take(right.len());
        right.pack(io.pool, Mat::rows(weight, width), packed);
        let packed = &*packed;
        let per_task = window.rows_per_task(&right, io);
        let left = RowsMut::new(scratch.take(window.left_sides(&right, threads)), right.left_len(per_task));
        let dz = scratch.take(4 * batch * width);
        let dh = state(io, self.upper(1), 1, batch * width, &mut scratch);
        let dc = state(io, self.upper(2), 2, batch * width, &mut scratch);

        // The gates, which dz takes the place of.
        let gates = RowsMut::new(io.in_place::<T>(0, 0), steps * 4 * width);
        let outputs = (gates, RowsMut::new(dh, width), RowsMut::new(dc, width), RowsMut::new(dz, 4 * width));
        io.pool.blocks(batch, per_task, outputs, |first, (gates, dh, dc, dz), task| {
            // SAFETY: there is a part for every task, and each takes its own.
            let left = unsafe { left.part(task, 1) };
            for t in (0..steps).rev() {
                let grads = dh.chunks_exact_mut(width).zip(dc.chunks_exact_mut(width));
                for (row, ((dh, dc), dz)) in grads.zip(dz.chunks_exact_mut(4 * width)).enumerate() {
                    let at = ((first + row) * steps + t) * width;
                    let before = match t {
                        0 => &first_cell[(first + row) * width..][..width],
                        _ => &cells[at - width..at],
                    };
                    // What the step before this one reads, which comes from far away.
                    if t > 0 {
                        prefetch(&gates[(row * steps + t - 1) * 4 * width..][..4 * width]);
                        prefetch(&cells[at - width * t.min(2)..][..width]);
                        prefetch(dhidden.map_or(&[], |dhidden| &dhidden[at - width..at]));
                    }
                    let gates = &mut gates[(row * steps + t) * 4 * width..][..4 * width];
                    let dhidden = dhidden.map(|dhidden| &dhidden[at..][..width]);
                    step_backward(gates, &cells[at..][..width], before, dhidden, dh, dc);
                    dz.copy_from_slice(gates);
                }
                if t > 0 || wants_first {
                    right.multiply(packed, left, dz, dh);
                }
            }
        });
    }
}

simd_fn! {
    /// One step of one row, from the gradients dh and dc of the states after it: the gates become dz, and dc
    /// the gradient of the cell state before it.
    fn step_backward<T>(
        gates: &mut [T],
        cell: &[T],
        before: &[T],
        dhidden: Option<&[T]>,
        dh: &mut [T],
        dc: &mut [T],
    ) {
        if let Some(dhidden) = dhidden {
            add_assign(dh, dhidden);
        }
        let [i, f, g, o] = quarters(gates);
        let gates = i.iter_mut().zip(f).zip(g.iter_mut().zip(o));
        let states = cell.iter().zip(before).zip(dh.iter().zip(dc));
        for (((i, f), (g, o)), ((cell, before), (dh, dc))) in gates.zip(states) {
            let shown = cell.tanh();
            let dcell = (*dh * *o).mul_add(T::ONE - shown * shown, *dc);
            *dc = dcell * *f;
            let (input, candidate) = (*i, *g);
            *i = dcell * candidate * (input * (T::ONE - input));
            *f = dcell * *before * (*f * (T::ONE - *f));
            *g = dcell * input * (T::ONE - candidate * candidate);
            *o = *dh * shown * (*o * (T::ONE - *o));
        }
    }
}
