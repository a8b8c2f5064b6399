//! A selective scan, the recurrence of Mamba, over a window of steps in one op.
//!
//! ```text
//! δ = softplus(delta);   h_t[n] = exp(δ_t a[n]) h_(t-1)[n] + δ_t u_t B_t[n]        per channel, n < states
//! y_t = (Σ_n C_t[n] h_t[n] + d u_t) z_t σ(z_t)
//! ```
//!
//! Backward, from the last step to the first, with r_t = Σ_n C_t[n] h_t[n] + d u_t and E = exp(δ_t a[n]):
//!
//! ```text
//! gr = dy_t z_t σ(z_t);   dz_t = dy_t r_t (σ(z_t) + z_t σ(z_t) (1 - σ(z_t)))
//! gh[n] += C_t[n] gr;   e[n] = gh[n] E h_(t-1)[n];   p = Σ_n a[n] e[n];   q = Σ_n B_t[n] gh[n]
//! da[n] += δ_t e[n];   dδ_t = p + u_t q;   du_t = δ_t q + d gr;   dd += u_t gr;   ddelta_t = dδ_t σ(delta_t)
//! dB_t[n] = Σ_channels δ_t u_t gh[n];   dC_t[n] = Σ_channels h_t[n] gr;   then gh[n] becomes gh[n] E
//! ```
//!
//! For its gradient the forward pass keeps the states at the beginning of every chunk of steps; the backward
//! pass computes those in between again, which costs less than writing and reading all of them. Rows of the
//! batch are independent, and so are channels but for dB and dC. Loops run over [`LANES`] channels at once.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::{Rows, RowsMut, max_tasks};
use crate::cpu::simd::{LANES, fold, simd_fn};
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want, want_float};
use crate::ops::activation::softplus;
#[cfg(feature = "cuda")]
use crate::ops::reduce::cuda_sum_columns;
use crate::types::TensorType;

/// What [`Graph::selective_scan`] reads.
#[derive(Debug, Clone, Copy)]
pub struct SelectiveScan {
    /// Inputs u of the recurrence, [batch, steps, channels].
    pub u: Value,
    /// Step sizes before softplus, [batch, steps, channels].
    pub delta: Value,
    /// Rates at which states decay, negative, [states, channels].
    pub a: Value,
    /// B and C of every step, one after the other: how inputs enter the states, and how states are read;
    /// [batch, steps, 2 states].
    pub bc: Value,
    /// Share of the input that is added to what is read, `[channels]`.
    pub d: Value,
    /// Gate of the output before SiLU, [batch, steps, channels].
    pub z: Value,
    /// States before the first step, [batch, states, channels]; zeros at the start of a sequence.
    pub state: Value,
}

/// What [`Graph::selective_scan`] returns.
#[derive(Debug, Clone, Copy)]
pub struct Scanned {
    /// Gated outputs of all steps, [batch, steps, channels].
    pub y: Value,
    /// States after the last step, [batch, states, channels].
    pub state: Value,
}

impl Graph {
    /// The selective scan of a state-space model (Mamba) over a window of steps, as one differentiable op.
    pub fn selective_scan(&mut self, scan: SelectiveScan) -> Result<Scanned> {
        let SelectiveScan { u, delta, a, bc, d, z, state } = scan;
        let outputs = self.push(Forward, &[u, delta, a, bc, d, z, state])?;
        Ok(Scanned { y: outputs[0], state: outputs[1] })
    }
}

/// Extents of a scan.
#[derive(Clone, Copy)]
struct Dims {
    batch: usize,
    steps: usize,
    channels: usize,
    states: usize,
}

impl Dims {
    /// From u [batch, steps, channels] and a [states, channels].
    fn of(u: &TensorType, a: &TensorType) -> Option<Self> {
        match (&u.shape[..], &a.shape[..]) {
            (&[batch, steps, channels], &[states, _]) => Some(Self { batch, steps, channels, states }),
            _ => None,
        }
    }

    /// Steps between two kept states: so many that those of [`LANES`] channels stay in the first-level cache
    /// of a processor core, or in the shared memory of a GPU.
    fn chunk(&self) -> usize {
        (256 / self.states).clamp(1, 64)
    }

    fn chunks(&self) -> usize {
        self.steps.div_ceil(self.chunk())
    }

    /// Elements of one row of u.
    fn row(&self) -> usize {
        self.steps * self.channels
    }

    /// Elements of one row of the states.
    fn state(&self) -> usize {
        self.states * self.channels
    }

    /// Blocks of [`LANES`] channels.
    fn blocks(&self) -> usize {
        self.channels.div_ceil(LANES)
    }

    /// Elements of one block's states.
    fn block(&self) -> usize {
        self.states * LANES
    }
}

/// Channels of one block, zeros beyond the last one.
#[inline(always)]
fn load<T: Float>(x: &[T], first: usize) -> [T; LANES] {
    match x[first..].first_chunk() {
        Some(lanes) => *lanes,
        None => {
            let mut lanes = [T::ZERO; LANES];
            lanes[..x.len() - first].copy_from_slice(&x[first..]);
            lanes
        }
    }
}

/// Writes the channels of one block.
#[inline(always)]
fn store<T: Float>(x: &mut [T], first: usize, lanes: [T; LANES]) {
    match x[first..].first_chunk_mut() {
        Some(to) => *to = lanes,
        None => {
            let count = x.len() - first;
            x[first..].copy_from_slice(&lanes[..count]);
        }
    }
}

/// f of every lane.
#[inline(always)]
fn lanes<T: Float>(f: impl Fn(usize) -> T) -> [T; LANES] {
    let mut lanes = [T::ZERO; LANES];
    for (l, lane) in lanes.iter_mut().enumerate() {
        *lane = f(l);
    }
    lanes
}

/// Copies the block of channels from `first` on out of states [states, channels].
#[inline(always)]
fn gather<T: Float>(block: &mut [T], states: &[T], channels: usize, first: usize) {
    for (to, from) in block.as_chunks_mut().0.iter_mut().zip(states.chunks_exact(channels)) {
        *to = load(from, first);
    }
}

/// Copies a block of channels back into states [states, channels].
#[inline(always)]
fn scatter<T: Float>(block: &[T], states: &mut [T], channels: usize, first: usize) {
    for (from, to) in block.as_chunks().0.iter().zip(states.chunks_exact_mut(channels)) {
        store(to, first, *from);
    }
}

/// What both directions read of one row: u, delta and z [steps, channels], bc [steps, 2 states], and what all
/// rows share, a [states, channels] and d \[channels\].
#[derive(Clone, Copy)]
struct Row<'a, T> {
    u: &'a [T],
    a: &'a [T],
    bc: &'a [T],
    d: &'a [T],
}

impl<'a, T> Row<'a, T> {
    /// Row `row` of an op whose inputs 0, 2, 3 and 4 are u, a, bc and d.
    fn of(io: &Io<'a>, dims: Dims, row: usize) -> Self
    where
        T: Float,
    {
        let bc = 2 * dims.steps * dims.states;
        Self {
            u: &io.input::<T>(0)[row * dims.row()..][..dims.row()],
            a: io.input(2),
            bc: &io.input::<T>(3)[row * bc..][..bc],
            d: io.input(4),
        }
    }
}

/// Inputs u, delta, a, bc, d, z, states. Outputs y, the states after the last step, and for the backward pass
/// the states before every chunk of steps, [batch, chunks, states, channels].
#[derive(Debug)]
struct Forward;

impl Op for Forward {
    fn name(&self) -> &'static str {
        "selective_scan"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (name, u) = (self.name(), &inputs[0]);
        want_float(name, "u", u)?;
        let Some(dims) = Dims::of(u, &inputs[2]) else {
            let got = format!("{u} and {}", inputs[2]);
            return mismatch(name, "u [batch, steps, channels] and a [states, channels]", got);
        };
        let Dims { batch, steps, channels, states } = dims;
        want(name, "delta", &inputs[1], u.dtype, &u.shape)?;
        want(name, "a", &inputs[2], u.dtype, &[states, channels])?;
        want(name, "bc", &inputs[3], u.dtype, &[batch, steps, 2 * states])?;
        want(name, "d", &inputs[4], u.dtype, &[channels])?;
        want(name, "z", &inputs[5], u.dtype, &u.shape)?;
        want(name, "state", &inputs[6], u.dtype, &[batch, states, channels])?;
        Ok(vec![u.clone(), inputs[6].clone(), u.with([batch, dims.chunks(), states, channels])])
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(6, 1)]
    }
    fn always_writes(&self, output: usize) -> bool {
        output < 2
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let dy = match b.grad(0) {
            Some(dy) => dy,
            None => b.graph.zeros_like(b.outputs[0])?,
        };
        let mut inputs = b.inputs[..6].to_vec();
        inputs.extend([b.outputs[2], dy]);
        inputs.extend(b.grad(1));
        let grads = b.graph.push(Gradient, &inputs)?;
        for (input, grad) in grads.into_iter().enumerate() {
            b.set(input, grad);
        }
        Ok(())
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], threads: usize) -> usize {
        let Some(dims) = Dims::of(&inputs[0], &inputs[2]) else { return 0 };
        max_tasks(threads) * 2 * dims.block() * inputs[0].dtype.size()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::of(io.ty(0), io.ty(2)) else { return Ok(()) };
        dispatch_float!(io.dtype(), T => {
            let scratch = io.scratch::<T>(io.pool.max_tasks() * 2 * dims.block());
            let scratch = RowsMut::new(scratch, 2 * dims.block());
            let (y, states, kept) = (io.output::<T>(0), io.in_place::<T>(6, 1), io.output_if_used::<T>(2));
            let kept = kept.map(|kept| RowsMut::new(kept, dims.chunks() * dims.state()));
            let outputs = (RowsMut::new(y, dims.row()), RowsMut::new(states, dims.state()), kept);
            // A state costs about as much as ten elements touched.
            let per_task = io.pool.rows_per_task(dims.batch, 10 * dims.steps * dims.state());
            io.pool.blocks(dims.batch, per_task, outputs, |first, (y, states, mut kept), task| {
                // SAFETY: one part per task, and there are at most `max_tasks` tasks.
                let scratch = unsafe { scratch.part(task, 1) };
                let rows = y.chunks_exact_mut(dims.row()).zip(states.chunks_exact_mut(dims.state()));
                for (i, (y, states)) in rows.enumerate() {
                    let row = Row::of(io, dims, first + i);
                    let at = (first + i) * dims.row()..(first + i + 1) * dims.row();
                    let (delta, z) = (&io.input::<T>(1)[at.clone()], &io.input::<T>(5)[at]);
                    let len = dims.chunks() * dims.state();
                    let kept = kept.as_mut().map(|kept| &mut kept[i * len..][..len]);
                    forward_row(dims, row, delta, z, states, y, kept, scratch);
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::of(launch.ty(0), launch.ty(2)) else { return Ok(()) };
        let shared = 32 * (2 * dims.states + 3 * dims.chunk()) + 2 * dims.chunk() * dims.states;
        let args = ScanForward {
            y: launch.output(0),
            last: launch.output(1),
            kept: launch.output(2),
            u: launch.input(0),
            delta: launch.input(1),
            a: launch.input(2),
            bc: launch.input(3),
            d: launch.input(4),
            z: launch.input(5),
            first: launch.input(6),
            steps: dims.steps,
            channels: dims.channels,
            states: dims.states,
            chunk: dims.chunk(),
        };
        dims.fits_a_gpu()?;
        launch.kernel("selective_scan_forward", dims.grid(), 32, 4 * shared, args)
    }
}

simd_fn! {
    /// One row: `states` [states, channels] before the first step become those after the last, y is written,
    /// and `kept` where someone reads it. Scratch: a and h of one block.
    fn forward_row<T>(
        dims: Dims,
        row: Row<'_, T>,
        delta: &[T],
        z: &[T],
        states: &mut [T],
        y: &mut [T],
        kept: Option<&mut [T]>,
        scratch: &mut [T],
    ) {
        let mut kept = kept;
        let (channels, chunk) = (dims.channels, dims.chunk());
        let (a, h) = scratch.split_at_mut(dims.block());
        for first in (0..channels).step_by(LANES) {
            gather(a, row.a, channels, first);
            gather(h, states, channels, first);
            let d = load(row.d, first);
            for (t, bc) in row.bc.chunks_exact(2 * dims.states).enumerate() {
                if let Some(kept) = &mut kept && t % chunk == 0 {
                    let at = t / chunk * dims.state();
                    scatter(h, &mut kept[at..at + dims.state()], channels, first);
                }
                let at = t * channels..(t + 1) * channels;
                let (u, delta) = (load(&row.u[at.clone()], first), load(&delta[at.clone()], first));
                let delta = lanes(|l| softplus(delta[l]));
                let inflow = lanes(|l| delta[l] * u[l]);
                let mut read = lanes(|l| d[l] * u[l]);
                let (b, c) = bc.split_at(dims.states);
                let states = h.as_chunks_mut::<LANES>().0.iter_mut().zip(a.as_chunks::<LANES>().0);
                for ((h, a), (b, c)) in states.zip(b.iter().zip(c)) {
                    for l in 0..LANES {
                        h[l] = (delta[l] * a[l]).exp().mul_add(h[l], inflow[l] * *b);
                        read[l] = c.mul_add(h[l], read[l]);
                    }
                }
                let z = load(&z[at.clone()], first);
                store(&mut y[at], first, lanes(|l| read[l] * z[l] * z[l].sigmoid()));
            }
            scatter(h, states, channels, first);
        }
    }
}

/// Inputs u, delta, a, bc, d, z, the states before every chunk, dy, and the gradient of the last states where
/// there is one. Outputs the gradients of u, delta, a, bc, d, z and of the first states; those of delta and z
/// are written over them where they may.
#[derive(Debug)]
struct Gradient;

/// Scratch of one task of the backward pass.
struct Work<'a, T> {
    /// a of one block, [states, LANES].
    a: &'a mut [T],
    /// h of one block before and after every step of a chunk, [chunk + 1, states, LANES].
    h: &'a mut [T],
    /// exp(δ a) of one block at every step of a chunk, [chunk, states, LANES].
    decay: &'a mut [T],
    /// δ of one block at every step of a chunk, [chunk, LANES].
    delta: &'a mut [T],
    /// gr of one block at every step of a chunk, [chunk, LANES].
    gr: &'a mut [T],
    /// dB and dC of a chunk, [chunk, 2 states, LANES]: blocks of channels are added lane by lane.
    dbc: &'a mut [T],
    /// gh of all channels, [blocks, states, LANES].
    gh: &'a mut [T],
    /// Partial sums of da, [blocks, states, LANES].
    da: &'a mut [T],
    /// Partial sums of dd, [blocks, LANES].
    dd: &'a mut [T],
}

impl<'a, T> Work<'a, T> {
    fn lens(dims: Dims) -> [usize; 9] {
        let (block, chunk, all) = (dims.block(), dims.chunk().min(dims.steps), dims.blocks() * dims.block());
        [
            block,
            (chunk + 1) * block,
            chunk * block,
            chunk * LANES,
            chunk * LANES,
            2 * chunk * block,
            all,
            all,
            dims.blocks() * LANES,
        ]
    }

    fn len(dims: Dims) -> usize {
        Self::lens(dims).iter().sum()
    }

    fn new(dims: Dims, mut scratch: &'a mut [T]) -> Self {
        let [a, h, decay, delta, gr, dbc, gh, da, dd] =
            Self::lens(dims).map(|len| scratch.split_off_mut(..len).unwrap_or_default());
        Self { a, h, decay, delta, gr, dbc, gh, da, dd }
    }
}

/// Batch rows of one partial sum of da and dd: from the shape alone, so that sums have the same bits for any
/// number of threads.
fn rows_per_part(batch: usize) -> usize {
    batch.div_ceil(32)
}

impl Op for Gradient {
    fn name(&self) -> &'static str {
        "selective_scan_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (batch, states, channels) = match inputs[6].shape[..] {
            [batch, _, states, channels] => (batch, states, channels),
            _ => return mismatch(self.name(), "states of every chunk", inputs[6].to_string()),
        };
        let mut outputs = inputs[..6].to_vec();
        outputs.push(inputs[0].with([batch, states, channels]));
        Ok(outputs)
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(1, 1), (5, 5)]
    }
    fn always_writes(&self, _: usize) -> bool {
        true
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], _: usize) -> usize {
        let Some(dims) = Dims::of(&inputs[0], &inputs[2]) else { return 0 };
        let parts = dims.batch.div_ceil(rows_per_part(dims.batch));
        dispatch_float!(inputs[0].dtype, T => parts * Work::<T>::len(dims) * size_of::<T>())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::of(io.ty(0), io.ty(2)) else { return Ok(()) };
        dispatch_float!(io.dtype(), T => walk_back::<T>(io, dims));
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::of(launch.ty(0), launch.ty(2)) else { return Ok(()) };
        let Dims { batch, steps, channels, states } = dims;
        let (tiles, bc) = (channels.div_ceil(32), batch * steps * 2 * states);
        let da_rows = launch.scratch(4 * batch * dims.state())?;
        let dd_rows = launch.scratch(4 * batch * channels)?;
        let dbc_tiles = if tiles > 1 { launch.scratch(4 * tiles * bc)? } else { launch.output(3) };
        let args = ScanBackward {
            du: launch.output(0),
            ddelta: launch.output(1),
            dz: launch.output(5),
            dfirst: launch.output(6),
            da_rows,
            dd_rows,
            dbc_tiles,
            u: launch.input(0),
            delta: launch.input(1),
            a: launch.input(2),
            bc: launch.input(3),
            d: launch.input(4),
            z: launch.input(5),
            kept: launch.input(6),
            dy: launch.input(7),
            dlast: launch.input_if((launch.inputs.len() > 8).then_some(8)),
            steps,
            channels,
            states,
            chunk: dims.chunk(),
        };
        dims.fits_a_gpu()?;
        launch.kernel("selective_scan_backward", dims.grid(), 32, dims.shared(), args)?;
        if tiles > 1 {
            launch.elements("selective_scan_tiles", bc, args![launch.output(3), dbc_tiles, tiles, bc])?;
        }
        cuda_sum_columns(launch, launch.output(2), da_rows, batch, dims.state(), false)?;
        cuda_sum_columns(launch, launch.output(4), dd_rows, batch, channels, false)
    }
}

fn walk_back<T: Float>(io: &Io<'_>, dims: Dims) {
    let Dims { batch, states, .. } = dims;
    let (kept, dy) = (io.input::<T>(6), io.input::<T>(7));
    let dlast = (io.inputs.len() > 8).then(|| io.input::<T>(8));
    let per_part = rows_per_part(batch);
    let (parts, len) = (batch.div_ceil(per_part), Work::<T>::len(dims));
    let scratch = io.scratch::<T>(parts * len);
    let works = RowsMut::new(&mut *scratch, len);
    // delta and z, which their gradients take the place of.
    let inputs =
        (RowsMut::new(io.in_place::<T>(1, 1), dims.row()), RowsMut::new(io.in_place::<T>(5, 5), dims.row()));
    let bc = 2 * dims.steps * states;
    let (du, dbc) = (RowsMut::new(io.output::<T>(0), dims.row()), RowsMut::new(io.output::<T>(3), bc));
    let dfirst = RowsMut::new(io.output::<T>(6), dims.state());
    io.pool.blocks(batch, per_part, (inputs, du, dbc, dfirst), |first, outputs, part| {
        let ((delta, z), du, dbc, dfirst) = outputs;
        // SAFETY: one part per task.
        let mut work = Work::new(dims, unsafe { works.part(part, 1) });
        work.da.fill(T::ZERO);
        work.dd.fill(T::ZERO);
        for i in 0..per_part.min(batch - first) {
            let at = |len: usize| i * len..(i + 1) * len;
            let row = first + i;
            let given = Given {
                row: Row::of(io, dims, row),
                kept: &kept[row * dims.chunks() * dims.state()..][..dims.chunks() * dims.state()],
                dy: &dy[row * dims.row()..][..dims.row()],
                dlast: dlast.map(|dlast| &dlast[row * dims.state()..][..dims.state()]),
            };
            let grads = Grads {
                delta: &mut delta[at(dims.row())],
                z: &mut z[at(dims.row())],
                du: &mut du[at(dims.row())],
                dbc: &mut dbc[at(bc)],
                dfirst: &mut dfirst[at(dims.state())],
            };
            backward_row(dims, given, grads, &mut work);
        }
    });
    // Sums of all parts, in their order.
    let (da, dd) = (io.output::<T>(2), io.output::<T>(4));
    da.fill(T::ZERO);
    dd.fill(T::ZERO);
    for scratch in scratch.chunks_exact_mut(len) {
        let work = Work::new(dims, scratch);
        add_blocks(da, work.da, states);
        add_blocks(dd, work.dd, 1);
    }
}

/// y [rows, channels] += x [blocks, rows, LANES].
fn add_blocks<T: Float>(y: &mut [T], x: &[T], rows: usize) {
    let channels = y.len() / rows;
    for (block, x) in x.chunks_exact(rows * LANES).enumerate() {
        for (y, x) in y.chunks_exact_mut(channels).zip(x.chunks_exact(LANES)) {
            y[block * LANES..].iter_mut().zip(x).for_each(|(y, x)| *y += *x);
        }
    }
}

/// What the backward pass reads of one row: beside its inputs the states before every chunk [chunks, states,
/// channels], dy [steps, channels], and the gradient of the last states [states, channels].
#[derive(Clone, Copy)]
struct Given<'a, T> {
    row: Row<'a, T>,
    kept: &'a [T],
    dy: &'a [T],
    dlast: Option<&'a [T]>,
}

/// What the backward pass writes of one row. `delta` and `z` hold these inputs before, their gradients
/// afterwards.
struct Grads<'a, T> {
    delta: &'a mut [T],
    z: &'a mut [T],
    du: &'a mut [T],
    dbc: &'a mut [T],
    dfirst: &'a mut [T],
}

simd_fn! {
    /// One row, chunk by chunk from the last on. Its share of da and dd is added to that of other rows.
    fn backward_row<T>(dims: Dims, given: Given<'_, T>, grads: Grads<'_, T>, work: &mut Work<'_, T>) {
        let Dims { channels, states, .. } = dims;
        for (block, gh) in work.gh.chunks_exact_mut(dims.block()).enumerate() {
            match given.dlast {
                Some(dlast) => gather(gh, dlast, channels, block * LANES),
                None => gh.fill(T::ZERO),
            }
        }
        for (chunk, kept) in given.kept.chunks_exact(dims.state()).enumerate().rev() {
            let start = chunk * dims.chunk();
            let count = dims.chunk().min(dims.steps - start);
            work.dbc.fill(T::ZERO);
            for first in (0..channels).step_by(LANES) {
                gather(work.a, given.row.a, channels, first);
                gather(&mut work.h[..dims.block()], kept, channels, first);
                for t in 0..count {
                    again(dims, start + t, t, first, given, grads.z, grads.delta, work);
                }
                for t in (0..count).rev() {
                    back(dims, start + t, t, first, given.row, grads.du, grads.delta, work);
                }
            }
            let dbc = grads.dbc[2 * start * states..].iter_mut();
            for (dbc, sums) in dbc.zip(&work.dbc.as_chunks().0[..2 * count * states]) {
                *dbc = fold(*sums, |a, b| a + b);
            }
        }
        for (block, gh) in work.gh.chunks_exact(dims.block()).enumerate() {
            scatter(gh, grads.dfirst, channels, block * LANES);
        }
    }
}

/// Step `step` once more, number `t` of its chunk, for the channels from `first` on: h, exp(δ a), δ and gr are
/// kept in `work`, and z becomes dz.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn again<T: Float>(
    dims: Dims,
    step: usize,
    t: usize,
    first: usize,
    given: Given<'_, T>,
    z: &mut [T],
    delta: &[T],
    work: &mut Work<'_, T>,
) {
    let (channels, states, row) = (dims.channels, dims.states, given.row);
    let at = step * channels..(step + 1) * channels;
    let (u, d) = (load(&row.u[at.clone()], first), load(row.d, first));
    let delta = load(&delta[at.clone()], first);
    let delta = lanes(|l| softplus(delta[l]));
    let inflow = lanes(|l| delta[l] * u[l]);
    let mut read = lanes(|l| d[l] * u[l]);
    let (b, c) = row.bc[2 * step * states..2 * (step + 1) * states].split_at(states);
    let h = &mut work.h.as_chunks_mut::<LANES>().0[t * states..(t + 2) * states];
    let (before, after) = h.split_at_mut(states);
    let decay = &mut work.decay.as_chunks_mut::<LANES>().0[t * states..(t + 1) * states];
    let a = &work.a.as_chunks::<LANES>().0[..states];
    for n in 0..states {
        for l in 0..LANES {
            decay[n][l] = (delta[l] * a[n][l]).exp();
            after[n][l] = decay[n][l].mul_add(before[n][l], inflow[l] * b[n]);
            read[l] = c[n].mul_add(after[n][l], read[l]);
        }
    }
    let (z_t, dy) = (load(&z[at.clone()], first), load(&given.dy[at.clone()], first));
    let s = lanes(|l| z_t[l].sigmoid());
    let silu = lanes(|l| z_t[l] * s[l]);
    store(&mut z[at], first, lanes(|l| dy[l] * read[l] * (s[l] + silu[l] * (T::ONE - s[l]))));
    work.delta.as_chunks_mut().0[t] = delta;
    work.gr.as_chunks_mut().0[t] = lanes(|l| dy[l] * silu[l]);
}

/// Step `step` back, number `t` of its chunk, for the channels from `first` on: du is written, delta becomes
/// ddelta, and gh that of the step before.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn back<T: Float>(
    dims: Dims,
    step: usize,
    t: usize,
    first: usize,
    row: Row<'_, T>,
    du: &mut [T],
    delta: &mut [T],
    work: &mut Work<'_, T>,
) {
    let (channels, states) = (dims.channels, dims.states);
    let at = step * channels..(step + 1) * channels;
    let (u, d) = (load(&row.u[at.clone()], first), load(row.d, first));
    let gr: [T; LANES] = work.gr.as_chunks().0[t];
    let step_size: [T; LANES] = work.delta.as_chunks().0[t];
    let inflow = lanes(|l| step_size[l] * u[l]);
    let (mut p, mut q) = ([T::ZERO; LANES], [T::ZERO; LANES]);
    let (b, c) = row.bc[2 * step * states..2 * (step + 1) * states].split_at(states);
    let h = &work.h.as_chunks::<LANES>().0[t * states..(t + 2) * states];
    let (before, after) = h.split_at(states);
    let decay = &work.decay.as_chunks::<LANES>().0[t * states..(t + 1) * states];
    let a = &work.a.as_chunks::<LANES>().0[..states];
    let block = first / LANES * states..(first / LANES + 1) * states;
    let gh = &mut work.gh.as_chunks_mut::<LANES>().0[block.clone()];
    let da = &mut work.da.as_chunks_mut::<LANES>().0[block];
    let dbc = &mut work.dbc.as_chunks_mut::<LANES>().0[2 * t * states..2 * (t + 1) * states];
    let (db, dc) = dbc.split_at_mut(states);
    for n in 0..states {
        for l in 0..LANES {
            let g = c[n].mul_add(gr[l], gh[n][l]);
            dc[n][l] = after[n][l].mul_add(gr[l], dc[n][l]);
            db[n][l] = inflow[l].mul_add(g, db[n][l]);
            q[l] = b[n].mul_add(g, q[l]);
            gh[n][l] = g * decay[n][l];
            let e = gh[n][l] * before[n][l];
            da[n][l] = step_size[l].mul_add(e, da[n][l]);
            p[l] = a[n][l].mul_add(e, p[l]);
        }
    }
    let dd = &mut work.dd.as_chunks_mut::<LANES>().0[first / LANES];
    for l in 0..LANES {
        dd[l] = u[l].mul_add(gr[l], dd[l]);
    }
    let raw = load(&delta[at.clone()], first);
    store(&mut du[at.clone()], first, lanes(|l| step_size[l].mul_add(q[l], d[l] * gr[l])));
    store(&mut delta[at], first, lanes(|l| u[l].mul_add(q[l], p[l]) * raw[l].sigmoid()));
}

#[cfg(feature = "cuda")]
impl Dims {
    /// One block of threads per row and 32 channels.
    fn grid(&self) -> [usize; 3] {
        [self.batch, self.channels.div_ceil(32), 1]
    }

    /// Bytes of shared memory of the backward pass.
    fn shared(&self) -> usize {
        let (states, chunk) = (self.states, self.chunk());
        4 * (32 * ((4 + chunk) * states + 4 * chunk) + 2 * chunk * states + 2 * 33 * states)
    }

    /// Refuses what does not fit the shared memory that every GPU has.
    fn fits_a_gpu(&self) -> Result<()> {
        const ROOM: usize = 96 << 10;
        if self.shared() <= ROOM && self.channels <= 32 * 65_535 {
            return Ok(());
        }
        let got = format!("{} states of {} channels", self.states, self.channels);
        mismatch("selective_scan", "at most 64 states of 2097120 channels on a GPU", got)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// What the kernel `selective_scan_forward` takes.
    struct ScanForward in "selective_scan.cu" {
        y: u64, last: u64, kept: u64, u: u64, delta: u64, a: u64, bc: u64, d: u64, z: u64, first: u64,
        steps: usize, channels: usize, states: usize, chunk: usize,
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// What the kernel `selective_scan_backward` takes.
    struct ScanBackward in "selective_scan.cu" {
        du: u64, ddelta: u64, dz: u64, dfirst: u64, da_rows: u64, dd_rows: u64, dbc_tiles: u64,
        u: u64, delta: u64, a: u64, bc: u64, d: u64, z: u64, kept: u64, dy: u64, dlast: u64,
        steps: usize, channels: usize, states: usize, chunk: usize,
    }
}

#[cfg(test)]
#[cfg(feature = "cuda")]
mod tests {
    use super::*;

    #[test]
    fn up_to_64_states_fit_the_shared_memory_of_a_gpu() {
        let of = |states, channels| Dims { batch: 1, steps: 1, channels, states };
        assert!((1..=64).all(|states| of(states, 128).fits_a_gpu().is_ok()));
        let error = of(512, 128).fits_a_gpu().unwrap_err().to_string();
        assert!(error.contains("at most 64 states") && error.contains("got 512 states"), "{error}");
    }
}
