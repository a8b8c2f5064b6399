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

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::gemm::{DOT_ROWS, Mat, PackedRight, Product, Tiles, gemm};
use crate::cpu::pool::RowsMut;
use crate::cpu::simd::{add_assign, simd_fn};
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want, want_float};
#[cfg(feature = "cuda")]
use crate::ops::broadcast::Steps;
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

    /// Rows of one task.
    fn rows_per_task(&self, io: &Io<'_>) -> usize {
        // Sixteen multiply-adds cost about as much as one element touched; a gate as much as a few.
        let work = self.steps * self.width * (self.width / 4 + 32);
        // A register tile of fewer rows leaves the multiply-add units waiting.
        io.pool.rows_per_task(self.batch, work).max(4)
    }

    /// Elements of scratch: the packed weight, if it is packed, and for each row a product and two states.
    fn scratch<T: Tiles>(&self, right: Option<PackedRight<T>>) -> usize {
        right.map_or(0, |right| right.len()) + 6 * self.batch * self.width
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
/// state; and for the backward pass the activated gates [batch, steps, 4 width], the cell states after each
/// step and the hidden states before it, both [batch, steps, width].
#[derive(Debug)]
struct Forward;

impl Forward {
    /// How the weight is packed; not at all for a few rows.
    fn right<T: Tiles>(window: Window) -> Option<PackedRight<T>> {
        (window.batch > DOT_ROWS).then(|| PackedRight::new(4 * window.width, window.width))
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
        vec![(3, 1), (4, 2)]
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
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], _: usize) -> usize {
        let Some(window) = Window::of(&inputs[0]) else { return 0 };
        dispatch_float!(inputs[0].dtype, T => {
            window.scratch(Self::right::<T>(window)) * size_of::<T>()
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(window) = Window::of(io.ty(0)) else { return Ok(()) };
        dispatch_float!(io.dtype(), T => forward::<T>(io, window));
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(window) = Window::of(launch.ty(0)) else { return Ok(()) };
        let Window { width, .. } = window;
        let clusters = Clusters::of(window).filter(|_| launch.has_clusters());
        if let Some(held) = Held::of(window, clusters.is_some()) {
            let args = Self::args(launch, window, launch.input(1), 0);
            return held.queue(launch, &held.forward, args);
        }
        if let Some(clusters) = clusters {
            let kernel = [
                "lstm_forward_shared_1",
                "lstm_forward_shared_2",
                "lstm_forward_shared_4",
                "lstm_forward_shared_8",
            ][clusters.variant];
            let args = Self::args(launch, window, launch.input(1), clusters.blocks);
            return clusters.queue(launch, kernel, args);
        }
        let blocks = Blocks::of(window, 4 * width, 2 * width)?;
        // Threads that compute neighbouring gates read neighbouring weights: [width, 4 width].
        let weight = launch.scratch(launch.ty(1).bytes())?;
        let mut transpose = Steps::new(&[width, 4 * width], &[], &[]);
        (transpose.a[0], transpose.a[1]) = (1, width as i32);
        let count = launch.ty(1).len();
        launch.elements("rearrange_4", count, args![weight, launch.input(1), count, transpose])?;
        let args = Self::args(launch, window, weight, blocks.lanes);
        let kernel = ["lstm_forward_1", "lstm_forward_2", "lstm_forward_4"][blocks.variant];
        launch.kernel(kernel, [blocks.count, 1, 1], Blocks::THREADS as u32, blocks.shared, args)
    }
}

#[cfg(feature = "cuda")]
impl Forward {
    /// What the kernels are given, with a weight that is laid out for them.
    fn args(launch: &Launch<'_>, window: Window, weight: u64, lanes: usize) -> LstmForward {
        let Window { batch, steps, width } = window;
        LstmForward {
            hidden: launch.output(0),
            last_hidden: launch.output(1),
            last_cell: launch.output(2),
            gates: launch.output(3),
            cells: launch.output(4),
            before: launch.output(5),
            x: launch.input(0),
            weight,
            bias: launch.input(2),
            first_hidden: launch.input(3),
            first_cell: launch.input(4),
            batch,
            steps,
            width,
            lanes,
        }
    }
}

fn forward<T: Tiles>(io: &Io<'_>, window: Window) {
    let Window { batch, steps, width } = window;
    let (x, weight, bias) = (io.input::<T>(0), io.input::<T>(1), io.input::<T>(2));
    let right = Forward::right::<T>(window);
    let mut scratch = Parts(io.scratch::<T>(window.scratch(right)));
    let packed = scratch.take(right.map_or(0, |right| right.len()));
    if let Some(right) = right {
        right.pack(io.pool, Mat::transposed(weight, width), packed);
    }
    let packed = &*packed;
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
    // A few rows: their products are divided among the threads instead.
    let per_task = if right.is_some() { window.rows_per_task(io) } else { batch };
    io.pool.blocks(batch, per_task, outputs, |first, ((h, c, z), kept), _| {
        let (mut hidden, mut gates, mut cells, mut before) = kept;
        let rows = h.len() / width;
        for t in 0..steps {
            match &right {
                Some(right) => right.multiply(packed, h, z),
                None => {
                    let (a, b) = (Mat::rows(h, width), Mat::transposed(weight, width));
                    let product = Product { m: rows, n: 4 * width, k: width, a, b, accumulate: false };
                    gemm(io.pool, &mut [], product, z, 4 * width, |_| {});
                }
            }
            let states = h.chunks_exact_mut(width).zip(c.chunks_exact_mut(width));
            for (row, ((h, c), z)) in states.zip(z.chunks_exact_mut(4 * width)).enumerate() {
                let x = &x[((first + row) * steps + t) * 4 * width..][..4 * width];
                let at = row * steps + t;
                keep(&mut before, at, h);
                step_forward(z, x, bias, c, h);
                keep(&mut gates, at, z);
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
    /// One step of one row, from z = W h: z becomes the activated gates, c and h the new states.
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
        PackedRight::new(window.width, 4 * window.width)
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
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], _: usize) -> usize {
        let Some(window) = Window::of(&inputs[0]) else { return 0 };
        dispatch_float!(inputs[0].dtype, T => {
            window.scratch(Some(Self::right::<T>(window))) * size_of::<T>()
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(window) = Window::of(io.ty(0)) else { return Ok(()) };
        dispatch_float!(io.dtype(), T => self.walk_back::<T>(io, window));
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(window) = Window::of(launch.ty(0)) else { return Ok(()) };
        let Window { batch, steps, width } = window;
        let clusters = Clusters::of(window).filter(|_| launch.has_clusters());
        let blocks = Blocks::of(window, width, 5 * width)?;
        let upper = [0, 1, 2].map(|index| launch.input_if(self.upper(index)));
        let args = LstmBackward {
            dz: launch.output(0),
            dfirst_hidden: launch.output(1),
            dfirst_cell: launch.output(2),
            gates: launch.input(0),
            cells: launch.input(1),
            weight: launch.input(2),
            first_cell: launch.input(3),
            dhidden: upper[0],
            dlast_hidden: upper[1],
            dlast_cell: upper[2],
            batch,
            steps,
            width,
            lanes: clusters.as_ref().map_or(blocks.lanes, |clusters| clusters.blocks),
        };
        if let Some(held) = Held::of(window, clusters.is_some()) {
            return held.queue(launch, &held.backward, args);
        }
        if let Some(clusters) = clusters {
            let kernel = [
                "lstm_backward_shared_1",
                "lstm_backward_shared_2",
                "lstm_backward_shared_4",
                "lstm_backward_shared_8",
            ][clusters.variant];
            return clusters.queue(launch, kernel, args);
        }
        let kernel = ["lstm_backward_1", "lstm_backward_2", "lstm_backward_4"][blocks.variant];
        launch.kernel(kernel, [blocks.count, 1, 1], Blocks::THREADS as u32, blocks.shared, args)
    }
}

impl Gradient {
    fn walk_back<T: Tiles>(&self, io: &Io<'_>, window: Window) {
        let Window { batch, steps, width } = window;
        let (cells, weight, first_cell) = (io.input::<T>(1), io.input::<T>(2), io.input::<T>(3));
        let dhidden = self.upper(0).map(|input| io.input::<T>(input));
        let right = Self::right::<T>(window);
        let wants_first = !io.outputs[1].ptr.is_null();
        let mut scratch = Parts(io.scratch::<T>(window.scratch(Some(right))));
        let packed = scratch.take(right.len());
        right.pack(io.pool, Mat::rows(weight, width), packed);
        let packed = &*packed;
        let dz = scratch.take(4 * batch * width);
        let dh = state(io, self.upper(1), 1, batch * width, &mut scratch);
        let dc = state(io, self.upper(2), 2, batch * width, &mut scratch);

        // The gates, which dz takes the place of.
        let gates = RowsMut::new(io.in_place::<T>(0, 0), steps * 4 * width);
        let outputs = (gates, RowsMut::new(dh, width), RowsMut::new(dc, width), RowsMut::new(dz, 4 * width));
        let per_task = window.rows_per_task(io);
        io.pool.blocks(batch, per_task, outputs, |first, (gates, dh, dc, dz), _| {
            for t in (0..steps).rev() {
                let grads = dh.chunks_exact_mut(width).zip(dc.chunks_exact_mut(width));
                for (row, ((dh, dc), dz)) in grads.zip(dz.chunks_exact_mut(4 * width)).enumerate() {
                    let gates = &mut gates[(row * steps + t) * 4 * width..][..4 * width];
                    let at = ((first + row) * steps + t) * width;
                    let before = match t {
                        0 => &first_cell[(first + row) * width..][..width],
                        _ => &cells[at - width..at],
                    };
                    let dhidden = dhidden.map(|dhidden| &dhidden[at..][..width]);
                    step_backward(gates, &cells[at..][..width], before, dhidden, dh, dc);
                    dz.copy_from_slice(gates);
                }
                if t > 0 || wants_first {
                    right.multiply(packed, dz, dh);
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

/// Blocks that run at once on a large GPU.
#[cfg(feature = "cuda")]
const FULL: usize = 132;

/// How a window is divided among blocks of threads on a GPU. A block walks through all steps with one, two or
/// four rows of its own. At every step it reads the whole weight, which takes longer than the arithmetic of
/// four rows; so large batches have several rows to a block, and read the weight less often.
#[cfg(feature = "cuda")]
struct Blocks {
    count: usize,
    /// Logarithm of the rows of a block.
    variant: usize,
    /// Threads that divide the columns of a product among them; groups of so many divide its depth.
    lanes: usize,
    /// Bytes of shared memory of a block.
    shared: usize,
}

#[cfg(feature = "cuda")]
impl Blocks {
    const THREADS: usize = 512;

    /// For products of `columns` columns, which lie in shared memory beside `kept` floats for each row.
    fn of(window: Window, columns: usize, kept: usize) -> Result<Self> {
        /// Bytes of shared memory that every GPU has.
        const ROOM: usize = 96 << 10;
        let lanes = columns.next_multiple_of(32).min(Self::THREADS);
        let row = 4 * (Self::THREADS / lanes * columns + kept);
        if row > ROOM {
            return mismatch("lstm", "a width of at most 4096 on a GPU", window.width.to_string());
        }
        let wanted = match window.batch {
            0..=32 => 0,
            33..=128 => 1,
            _ => 2,
        };
        let variant = (0..=wanted).rev().find(|variant| row << variant <= ROOM).unwrap_or(0);
        let rows = 1 << variant;
        Ok(Self { count: window.batch.div_ceil(rows), variant, lanes, shared: row * rows })
    }
}

/// Kernels for widths whose whole weight one multiprocessor holds, in registers and shared memory; so blocks
/// need nothing of each other, and a step has one barrier.
#[cfg(feature = "cuda")]
struct Held {
    width: usize,
    /// Rows of a block.
    rows: usize,
    /// Units for which four threads compute the gates.
    units: usize,
    forward: HeldKernel,
    backward: HeldKernel,
}

/// A kernel of lstm_held.cu.
#[cfg(feature = "cuda")]
struct HeldKernel {
    name: &'static str,
    /// Vectors of four weights that a thread holds in registers; the others are in shared memory.
    vectors: usize,
}

#[cfg(feature = "cuda")]
const fn held_kernel(name: &'static str, vectors: usize) -> HeldKernel {
    HeldKernel { name, vectors }
}

#[cfg(feature = "cuda")]
impl Held {
    /// By width, then by rows. Threads of width 128 have 64 vectors; registers hold as many of them as the
    /// rest of a step leaves.
    const ALL: [Self; 5] = [
        Self {
            width: 64,
            rows: 1,
            units: 1,
            forward: held_kernel("lstm_forward_held_64_1", 16),
            backward: held_kernel("lstm_backward_held_64_1", 16),
        },
        Self {
            width: 64,
            rows: 2,
            units: 1,
            forward: held_kernel("lstm_forward_held_64_2", 16),
            backward: held_kernel("lstm_backward_held_64_2", 16),
        },
        Self {
            width: 64,
            rows: 4,
            units: 1,
            forward: held_kernel("lstm_forward_held_64_4", 16),
            backward: held_kernel("lstm_backward_held_64_4", 16),
        },
        Self {
            width: 128,
            rows: 1,
            units: 2,
            forward: held_kernel("lstm_forward_held_128_1", 50),
            backward: held_kernel("lstm_backward_held_128_1", 50),
        },
        Self {
            width: 128,
            rows: 2,
            units: 2,
            forward: held_kernel("lstm_forward_held_128_2", 45),
            backward: held_kernel("lstm_backward_held_128_2", 45),
        },
    ];

    /// None for other widths; and where clusters can do the same, for windows so short that most of the time
    /// goes into reading the weight, which the blocks of a cluster divide among them.
    fn of(window: Window, has_clusters: bool) -> Option<&'static Self> {
        const SHORT: usize = 4;
        if has_clusters && window.steps < SHORT {
            return None;
        }
        let fits = |held: &&Self| held.width == window.width;
        let fills = |held: &&Self| window.batch.div_ceil(held.rows) <= FULL;
        let mut all = Self::ALL.iter().filter(fits);
        all.clone().find(fills).or_else(|| all.next_back())
    }

    fn threads(&self) -> usize {
        4 * self.width / self.units
    }

    /// Bytes of shared memory of a block: the weights that are not in registers, and two steps of gradients
    /// of the gates; of hidden states, which the forward pass has there instead, there are fewer.
    fn shared(&self, kernel: &HeldKernel) -> usize {
        let weights = 4 * self.threads() * (self.units * self.width / 4 - kernel.vectors);
        4 * (weights + 2 * self.rows * 4 * self.width)
    }

    fn queue(
        &self,
        launch: &mut Launch<'_>,
        kernel: &HeldKernel,
        args: impl Into<crate::cuda::args::Args>,
    ) -> Result<()> {
        let blocks = launch.ty(0).shape[0].div_ceil(self.rows);
        launch.kernel(kernel.name, [blocks, 1, 1], self.threads() as u32, self.shared(kernel), args)
    }
}

/// How a window is divided among clusters of blocks on a GPU that has them: the shared memories of a cluster's
/// blocks together hold the weight, so that a step reads nothing from far away.
#[cfg(feature = "cuda")]
struct Clusters {
    count: usize,
    /// Blocks of a cluster.
    blocks: usize,
    /// Logarithm of the rows of a cluster.
    variant: usize,
    /// Bytes of shared memory of a block.
    shared: usize,
}

#[cfg(feature = "cuda")]
impl Clusters {
    const THREADS: usize = 512;

    /// None where a width cannot be divided so, or is too large.
    fn of(window: Window) -> Option<Self> {
        /// Bytes of shared memory that a block of a GPU with clusters can have.
        const ROOM: usize = 200 << 10;
        let Window { batch, width, .. } = window;
        let blocks = [4, 8].into_iter().find(|blocks| {
            width.is_multiple_of(4 * blocks) && 4 * width * (4 * width / blocks) <= ROOM / 2
        })?;
        let units = width / blocks;
        let fills = |variant: &usize| batch.div_ceil(1 << variant) * blocks <= FULL;
        let variant = (0..4).find(fills).unwrap_or(3);
        let rows = 1 << variant;
        let groups = |columns: usize| (Self::THREADS / columns).max(1);
        let forward = 2 * rows * width + groups(4 * units) * rows * 4 * units;
        let backward = rows * 4 * units + 2 * blocks * rows * units + groups(width) * rows * width;
        let shared = 4 * (4 * width * units + forward.max(backward));
        let fits = shared <= ROOM && 4 * units <= Self::THREADS && width <= Self::THREADS;
        (fits && rows * units <= Self::THREADS).then(|| Self {
            count: batch.div_ceil(rows),
            blocks,
            variant,
            shared,
        })
    }

    fn queue(
        &self,
        launch: &mut Launch<'_>,
        kernel: &'static str,
        args: impl Into<crate::cuda::args::Args>,
    ) -> Result<()> {
        let (grid, cluster) = ([self.count, 1, self.blocks], self.blocks as u32);
        launch.clusters(kernel, grid, cluster, Self::THREADS as u32, self.shared, args)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// What the kernels `lstm_forward_*` take.
    struct LstmForward in "lstm.cu" {
        hidden: u64, last_hidden: u64, last_cell: u64, gates: u64, cells: u64, before: u64, x: u64, weight: u64, bias: u64, first_hidden: u64, first_cell: u64, batch: usize, steps: usize, width: usize, lanes: usize,
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// What the kernels `lstm_backward_*` take.
    struct LstmBackward in "lstm.cu" {
        dz: u64, dfirst_hidden: u64, dfirst_cell: u64, gates: u64, cells: u64, weight: u64, first_cell: u64, dhidden: u64, dlast_hidden: u64, dlast_cell: u64, batch: usize, steps: usize, width: usize, lanes: usize,
    }
}

#[cfg(test)]
#[cfg(feature = "cuda")]
mod tests {
    use super::*;

    #[test]
    fn clusters_hold_the_weight_of_usual_widths() {
        for (batch, width, blocks) in
            [(1, 16, 4), (64, 128, 4), (64, 64, 4), (128, 128, 4), (1000, 128, 4), (64, 160, 4), (64, 192, 8)]
        {
            let clusters = Clusters::of(Window { batch, steps: 1, width }).unwrap();
            assert_eq!(clusters.blocks, blocks);
            assert!(clusters.count << clusters.variant >= batch && clusters.shared <= 200 << 10);
        }
        for width in [7, 12, 500, 1024] {
            assert!(Clusters::of(Window { batch: 64, steps: 1, width }).is_none(), "{width}");
        }
    }

    #[test]
    fn held_weights_are_divided_as_the_kernels_say() {
        let source = include_str!("lstm_held.cu");
        for held in &Held::ALL {
            let Held { width, rows, units, .. } = held;
            // Four threads share the units of all rows.
            assert!([1, 2, 4].contains(&(rows * units)) && held.threads() <= 512);
            for (pass, kernel) in [("FORWARD", &held.forward), ("BACKWARD", &held.backward)] {
                let HeldKernel { name, vectors } = kernel;
                let line = format!("\nLSTM_{pass}({name}, {width}, {rows}, {units}, {vectors})\n");
                assert!(source.contains(&line), "{line}");
                assert!(*vectors <= units * width / 4 && held.shared(kernel) <= 96 << 10, "{name}");
            }
        }
    }

    #[test]
    fn long_windows_of_usual_widths_are_held() {
        let rows = |batch, steps, width, has_clusters| {
            Held::of(Window { batch, steps, width }, has_clusters).map(|held| held.rows)
        };
        assert_eq!(rows(64, 30, 128, true), Some(1));
        assert_eq!(rows(133, 30, 128, true), Some(2));
        assert_eq!(rows(1000, 30, 128, false), Some(2));
        assert_eq!(rows(300, 4, 64, true), Some(4));
        assert_eq!((rows(1, 1, 128, true), rows(1, 1, 128, false)), (None, Some(1)));
        assert_eq!((rows(64, 30, 160, true), rows(64, 30, 96, false)), (None, None));
    }

    #[test]
    fn blocks_fit_shared_memory_and_cover_all_rows() {
        for (batch, width) in [(1, 1), (32, 128), (33, 128), (129, 128), (500, 1000), (500, 4096)] {
            for (columns, kept) in [(4 * width, 2 * width), (width, 5 * width)] {
                let window = Window { batch, steps: 1, width };
                let blocks = Blocks::of(window, columns, kept).unwrap();
                assert!(blocks.shared <= 96 << 10 && blocks.variant <= 2);
                assert_eq!(blocks.count, batch.div_ceil(1 << blocks.variant));
                assert!(blocks.lanes.is_multiple_of(32) && (32..=512).contains(&blocks.lanes));
            }
        }
        let window = Window { batch: 1, steps: 1, width: 5000 };
        let error = Blocks::of(window, 20_000, 10_000).map(|_| ()).unwrap_err().to_string();
        assert_eq!(error, "lstm: expected a width of at most 4096 on a GPU, got 5000");
    }
}
