//! The selective scan of one row of the batch on a processor, forward and backward. Loops run over [`LANES`]
//! channels at once; the formulas are those of the op, with exp(δ a) as 2^(δ a log2 e).
//!
//! Vectors of lanes are taken out of slices, computed as values and put back: compilers then need not find
//! out whether slices overlap, without which the backward pass is three times slower.

use crate::cpu::float::Float;
use crate::cpu::simd::{LANES, fold, simd_fn};
use crate::ops::activation::softplus;

/// Extents of a scan.
#[derive(Clone, Copy)]
pub(super) struct Dims {
    pub batch: usize,
    pub steps: usize,
    pub channels: usize,
    pub states: usize,
}

impl Dims {
    /// Steps between two kept states: so many that those of [`LANES`] channels stay in the first-level cache
    /// of a processor core, or in the shared memory of a GPU.
    pub fn chunk(&self) -> usize {
        (256 / self.states).clamp(1, 64)
    }

    pub fn chunks(&self) -> usize {
        self.steps.div_ceil(self.chunk())
    }

    /// Elements of one row of u.
    pub fn row(&self) -> usize {
        self.steps * self.channels
    }

    /// Elements of one row of the states.
    pub fn state(&self) -> usize {
        self.states * self.channels
    }

    /// Blocks of [`LANES`] channels.
    pub fn blocks(&self) -> usize {
        self.channels.div_ceil(LANES)
    }

    /// Elements of one block's states.
    pub fn block(&self) -> usize {
        self.states * LANES
    }
}

/// What both directions read of one row: u [steps, channels], bc [steps, 2 states], and what all rows share, a
/// [states, channels] and d \[channels\].
#[derive(Clone, Copy)]
pub(super) struct Row<'a, T> {
    pub u: &'a [T],
    pub a: &'a [T],
    pub bc: &'a [T],
    pub d: &'a [T],
}

impl<'a, T> Row<'a, T> {
    /// B and C of a step, \[states\] each.
    #[inline(always)]
    fn bc(&self, dims: Dims, step: usize) -> (&'a [T], &'a [T]) {
        self.bc[2 * step * dims.states..2 * (step + 1) * dims.states].split_at(dims.states)
    }
}

/// What the forward pass reads and writes of one row. `states` [states, channels] are those before the first
/// step, and those after the last one afterwards; `kept` [chunks, states, channels] is there where someone
/// reads it; everything else is [steps, channels].
pub(super) struct Forwards<'a, T> {
    pub row: Row<'a, T>,
    pub delta: &'a [T],
    pub z: &'a [T],
    pub states: &'a mut [T],
    pub y: &'a mut [T],
    pub kept: Option<&'a mut [T]>,
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

/// The block of channels from `first` on of a [states, channels], times log2 e.
#[inline(always)]
fn gather_rates<T: Float>(block: &mut [T], a: &[T], channels: usize, first: usize) {
    gather(block, a, channels, first);
    block.iter_mut().for_each(|a| *a *= T::of(std::f64::consts::LOG2_E));
}

/// Copies a block of channels back into states [states, channels].
#[inline(always)]
fn scatter<T: Float>(block: &[T], states: &mut [T], channels: usize, first: usize) {
    for (from, to) in block.as_chunks().0.iter().zip(states.chunks_exact_mut(channels)) {
        store(to, first, *from);
    }
}

simd_fn! {
    /// One row. Scratch: a log2 e and h of one block.
    pub(super) fn forward_row<T>(dims: Dims, of: Forwards<'_, T>, scratch: &mut [T]) {
        let Forwards { row, delta, z, states, y, mut kept } = of;
        let (channels, chunk) = (dims.channels, dims.chunk());
        let (a, h) = scratch.split_at_mut(dims.block());
        for first in (0..channels).step_by(LANES) {
            gather_rates(a, row.a, channels, first);
            gather(h, states, channels, first);
            let d = load(row.d, first);
            for t in 0..dims.steps {
                if let Some(kept) = &mut kept && t % chunk == 0 {
                    let at = t / chunk * dims.state();
                    scatter(h, &mut kept[at..at + dims.state()], channels, first);
                }
                let at = t * channels..(t + 1) * channels;
                let (u, delta) = (load(&row.u[at.clone()], first), load(&delta[at.clone()], first));
                let delta = lanes(|l| softplus(delta[l]));
                let inflow = lanes(|l| delta[l] * u[l]);
                let mut read = lanes(|l| d[l] * u[l]);
                let (b, c) = row.bc(dims, t);
                let states = h.as_chunks_mut::<LANES>().0.iter_mut().zip(a.as_chunks::<LANES>().0);
                for ((h, a), (b, c)) in states.zip(b.iter().zip(c)) {
                    let before = *h;
                    let next = lanes(|l| (delta[l] * a[l]).exp2().mul_add(before[l], inflow[l] * *b));
                    read = lanes(|l| c.mul_add(next[l], read[l]));
                    *h = next;
                }
                let z = load(&z[at.clone()], first);
                store(&mut y[at], first, lanes(|l| read[l] * z[l] * z[l].sigmoid()));
            }
            scatter(h, states, channels, first);
        }
    }
}

/// Scratch of one task of the backward pass.
pub(super) struct Work<'a, T> {
    /// a log2 e of one block, [states, LANES].
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
    pub da: &'a mut [T],
    /// Partial sums of dd, [blocks, LANES].
    pub dd: &'a mut [T],
}

impl<'a, T> Work<'a, T> {
    /// Elements of each field, in their order.
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

    /// Elements of all fields.
    pub fn len(dims: Dims) -> usize {
        Self::lens(dims).iter().sum()
    }

    /// Cuts `scratch` into the fields.
    pub fn new(dims: Dims, mut scratch: &'a mut [T]) -> Self {
        let [a, h, decay, delta, gr, dbc, gh, da, dd] =
            Self::lens(dims).map(|len| scratch.split_off_mut(..len).unwrap_or_default());
        Self { a, h, decay, delta, gr, dbc, gh, da, dd }
    }
}

/// What the backward pass reads of one row: beside its inputs the states before every chunk [chunks, states,
/// channels], dy [steps, channels], and the gradient of the last states [states, channels].
#[derive(Clone, Copy)]
pub(super) struct Given<'a, T> {
    pub row: Row<'a, T>,
    pub kept: &'a [T],
    pub dy: &'a [T],
    pub dlast: Option<&'a [T]>,
}

/// What the backward pass writes of one row. `delta` and `z` hold these inputs before, their gradients
/// afterwards.
pub(super) struct Grads<'a, T> {
    pub delta: &'a mut [T],
    pub z: &'a mut [T],
    pub du: &'a mut [T],
    pub dbc: &'a mut [T],
    pub dfirst: &'a mut [T],
}

simd_fn! {
    /// One row, chunk by chunk from the last on. Its share of da and dd is added to that of other rows.
    pub(super) fn backward_row<T>(dims: Dims, given: Given<'_, T>, grads: Grads<'_, T>, work: &mut Work<'_, T>) {
        let mut grads = grads;
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
                gather_rates(work.a, given.row.a, channels, first);
                gather(&mut work.h[..dims.block()], kept, channels, first);
                for t in 0..count {
                    again(dims, Place { step: start + t, t, first }, given, &mut grads, work);
                }
                for t in (0..count).rev() {
                    back(dims, Place { step: start + t, t, first }, given.row, &mut grads, work);
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

/// Where the backward pass is: at step `step` of the row, number `t` of its chunk, with the channels from
/// `first` on.
#[derive(Clone, Copy)]
struct Place {
    step: usize,
    t: usize,
    first: usize,
}

/// A step once more: h, exp(δ a), δ and gr are kept in `work`, and z becomes dz.
#[inline(always)]
fn again<T: Float>(
    dims: Dims,
    place: Place,
    given: Given<'_, T>,
    grads: &mut Grads<'_, T>,
    work: &mut Work<'_, T>,
) {
    let Place { step, t, first } = place;
    let (channels, states, row) = (dims.channels, dims.states, given.row);
    let at = step * channels..(step + 1) * channels;
    let (u, d) = (load(&row.u[at.clone()], first), load(row.d, first));
    let delta = load(&grads.delta[at.clone()], first);
    let delta = lanes(|l| softplus(delta[l]));
    let inflow = lanes(|l| delta[l] * u[l]);
    let mut read = lanes(|l| d[l] * u[l]);
    let (b, c) = row.bc(dims, step);
    let h = &mut work.h.as_chunks_mut::<LANES>().0[t * states..(t + 2) * states];
    let (before, after) = h.split_at_mut(states);
    let decay = &mut work.decay.as_chunks_mut::<LANES>().0[t * states..(t + 1) * states];
    let a = &work.a.as_chunks::<LANES>().0[..states];
    for n in 0..states {
        let (a, h) = (a[n], before[n]);
        let e = lanes(|l| (delta[l] * a[l]).exp2());
        let h = lanes(|l| e[l].mul_add(h[l], inflow[l] * b[n]));
        read = lanes(|l| c[n].mul_add(h[l], read[l]));
        (decay[n], after[n]) = (e, h);
    }
    let (z, dy) = (load(&grads.z[at.clone()], first), load(&given.dy[at.clone()], first));
    let s = lanes(|l| z[l].sigmoid());
    let silu = lanes(|l| z[l] * s[l]);
    store(&mut grads.z[at], first, lanes(|l| dy[l] * read[l] * (s[l] + silu[l] * (T::ONE - s[l]))));
    work.delta.as_chunks_mut().0[t] = delta;
    work.gr.as_chunks_mut().0[t] = lanes(|l| dy[l] * silu[l]);
}

/// A step back: du is written, delta becomes ddelta, and gh that of the step before.
#[inline(always)]
fn back<T: Float>(
    dims: Dims,
    place: Place,
    row: Row<'_, T>,
    grads: &mut Grads<'_, T>,
    work: &mut Work<'_, T>,
) {
    let Place { step, t, first } = place;
    let (channels, states) = (dims.channels, dims.states);
    let at = step * channels..(step + 1) * channels;
    let (u, d) = (load(&row.u[at.clone()], first), load(row.d, first));
    let gr: [T; LANES] = work.gr.as_chunks().0[t];
    let step_size: [T; LANES] = work.delta.as_chunks().0[t];
    let inflow = lanes(|l| step_size[l] * u[l]);
    let (mut p, mut q) = ([T::ZERO; LANES], [T::ZERO; LANES]);
    let (b, c) = row.bc(dims, step);
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
        let (g, h, h_before, e, rate) = (gh[n], after[n], before[n], decay[n], a[n]);
        let (db_n, dc_n, da_n) = (db[n], dc[n], da[n]);
        let g = lanes(|l| c[n].mul_add(gr[l], g[l]));
        db[n] = lanes(|l| inflow[l].mul_add(g[l], db_n[l]));
        dc[n] = lanes(|l| h[l].mul_add(gr[l], dc_n[l]));
        q = lanes(|l| b[n].mul_add(g[l], q[l]));
        gh[n] = lanes(|l| g[l] * e[l]);
        let e = lanes(|l| g[l] * e[l] * h_before[l]);
        p = lanes(|l| rate[l].mul_add(e[l], p[l]));
        da[n] = lanes(|l| step_size[l].mul_add(e[l], da_n[l]));
    }
    let dd = &mut work.dd.as_chunks_mut::<LANES>().0[first / LANES];
    *dd = lanes(|l| u[l].mul_add(gr[l], dd[l]));
    let raw = load(&grads.delta[at.clone()], first);
    store(&mut grads.du[at.clone()], first, lanes(|l| step_size[l].mul_add(q[l], d[l] * gr[l])));
    let p = lanes(|l| p[l] * T::of(std::f64::consts::LN_2));
    store(&mut grads.delta[at], first, lanes(|l| u[l].mul_add(q[l], p[l]) * raw[l].sigmoid()));
}
