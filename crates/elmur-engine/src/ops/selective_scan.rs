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

mod row;

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::{Rows, RowsMut, max_tasks};
use crate::cpu::simd::LANES;
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want, want_float};
#[cfg(feature = "cuda")]
use crate::ops::reduce::cuda_sum_columns;
use crate::types::TensorType;

use row::{Dims, Forwards, Given, Grads, Row, Work, backward_row, forward_row};

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

impl Dims {
    /// From u [batch, steps, channels] and a [states, channels].
    fn of(u: &TensorType, a: &TensorType) -> Option<Self> {
        match (&u.shape[..], &a.shape[..]) {
            (&[batch, steps, channels], &[states, _]) => Some(Self { batch, steps, channels, states }),
            _ => None,
        }
    }
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
                    let at = (first + i) * dims.row()..(first + i + 1) * dims.row();
                    let len = dims.chunks() * dims.state();
                    let of = Forwards {
                        row: Row::of(io, dims, first + i),
                        delta: &io.input::<T>(1)[at.clone()],
                        z: &io.input::<T>(5)[at],
                        states,
                        y,
                        kept: kept.as_mut().map(|kept| &mut kept[i * len..][..len]),
                    };
                    forward_row(dims, of, scratch);
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

/// Inputs u, delta, a, bc, d, z, the states before every chunk, dy, and the gradient of the last states where
/// there is one. Outputs the gradients of u, delta, a, bc, d, z and of the first states; those of delta and z
/// are written over them where they may.
#[derive(Debug)]
struct Gradient;

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
