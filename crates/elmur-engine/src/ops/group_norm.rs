//! GroupNorm: every group of channels is normalised over its channels and all steps or pixels.
//!
//! For x [B, T, C] or images [B, C, H, W] in G groups, with mean and variance over all numbers of a group:
//!
//! ```text
//! n = (x - mean) / sqrt(var + eps),   y = n gamma + beta      gamma and beta per channel
//! dgamma = Σ dy n,  dbeta = Σ dy,  dx = (g - mean g - n mean(g n)) / sqrt(var + eps),  g = dy gamma
//! ```

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::{Rows, RowsMut, max_tasks};
use crate::cpu::simd::{add_assign, dot, simd_fn, sum};
#[cfg(feature = "cuda")]
use crate::cuda::args::kernel_args;
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want, want_float};
use crate::ops::reduce::add_rows;
#[cfg(feature = "cuda")]
use crate::ops::reduce::cuda_sum_columns;
use crate::types::TensorType;

impl Graph {
    /// Normalises x [B, T, C] in `groups` groups of channels, each over all steps, or images [B, C, H, W], each
    /// over all pixels, then scales by gamma `[C]` and shifts by beta `[C]`.
    pub fn group_norm(
        &mut self,
        x: Value,
        groups: usize,
        gamma: Value,
        beta: Value,
        eps: f64,
    ) -> Result<Value> {
        self.push1(Forward { groups, eps }, &[x, gamma, beta])
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Normalised groups.
    struct GroupNormArgs in "group_norm.cu" {
        y: u64, stats: u64, x: u64, gamma: u64, beta: u64, count: usize,
        steps: i32, channels: i32, groups: i32, eps: f32,
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Normalised groups of images, and gradients.
    struct ImageNormArgs in "group_norm.cu" {
        y: u64, stats: u64, partial: u64, x: u64, gamma: u64, beta: u64, dy: u64,
        samples: i32, channels: i32, groups: i32, pixels: i32, eps: f32,
    }
}

/// Extents of what is normalised.
#[derive(Debug, Clone, Copy)]
struct Dims {
    batch: usize,
    channels: usize,
    /// Steps, or pixels of an image.
    places: usize,
    /// Whether the numbers of a channel lie side by side, as in images.
    is_image: bool,
}

impl Dims {
    fn new(x: &TensorType) -> Option<Self> {
        match x.shape[..] {
            [batch, places, channels] => Some(Self { batch, channels, places, is_image: false }),
            [batch, channels, height, width] => {
                Some(Self { batch, channels, places: height * width, is_image: true })
            }
            _ => None,
        }
    }

    /// Numbers of a sample.
    fn len(&self) -> usize {
        self.places * self.channels
    }
}

/// Inputs x, gamma, beta; outputs y, statistics [B G, 2] (mean, 1 / deviation).
#[derive(Debug)]
struct Forward {
    groups: usize,
    eps: f64,
}

impl Op for Forward {
    fn name(&self) -> &'static str {
        "group_norm"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let x = &inputs[0];
        want_float("group_norm", "x", x)?;
        let Some(Dims { batch, channels, .. }) = Dims::new(x) else {
            return mismatch("group_norm", "x [B, T, C] or [B, C, H, W]", x.to_string());
        };
        if self.groups == 0 || channels % self.groups != 0 {
            let expected = format!("a number of groups that divides {channels} channels");
            return mismatch("group_norm", expected, self.groups.to_string());
        }
        want("group_norm", "gamma", &inputs[1], x.dtype, &[channels])?;
        want("group_norm", "beta", &inputs[2], x.dtype, &[channels])?;
        Ok(vec![x.clone(), x.with([batch * self.groups, 2])])
    }
    fn always_writes(&self, output: usize) -> bool {
        output == 0
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let inputs = [b.inputs[0], b.outputs[1], b.inputs[1], dy];
            let is_image = Dims::new(b.graph.ty(b.inputs[0])?).is_some_and(|dims| dims.is_image);
            let grads = b.graph.push(Gradient { groups: self.groups, is_image }, &inputs)?;
            grads.into_iter().enumerate().for_each(|(input, grad)| b.set(input, grad));
        }
        Ok(())
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], threads: usize) -> usize {
        max_tasks(threads) * 2 * inputs[1].len() * inputs[0].dtype.size()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::new(io.ty(0)) else { return Ok(()) };
        let (batch, channels, len) = (dims.batch, dims.channels, dims.len());
        if len == 0 {
            return Ok(());
        }
        dispatch_float!(io.dtype(), T => {
            let (x, gamma, beta) = (io.input::<T>(0), io.input::<T>(1), io.input::<T>(2));
            let stats = io.output_if_used::<T>(1).map(|s| RowsMut::new(s, 2 * self.groups));
            let scratch = io.scratch::<T>(io.pool.max_tasks() * 2 * channels);
            let scratch = RowsMut::new(scratch, 2 * channels);
            let per_task = io.pool.rows_per_task(batch, 4 * len);
            let outputs = (RowsMut::new(io.output::<T>(0), len), stats);
            io.pool.blocks(batch, per_task, outputs, |first, (y, stats), task| {
                // SAFETY: one part per task, and there are at most `max_tasks` tasks.
                let columns = unsafe { scratch.part(task, 1) };
                let (x, eps) = (&x[first * len..][..y.len()], T::of(self.eps));
                match dims.is_image {
                    true => forward_images(x, self.groups, gamma, beta, eps, y, stats, dims.places),
                    false => forward_samples(x, self.groups, gamma, beta, eps, y, stats, columns, len),
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::new(launch.ty(0)) else { return Ok(()) };
        let count = dims.batch * self.groups;
        if dims.is_image {
            let args = ImageNormArgs {
                y: launch.output(0),
                stats: launch.output(1),
                partial: 0,
                x: launch.input(0),
                gamma: launch.input(1),
                beta: launch.input(2),
                dy: 0,
                samples: dims.batch as i32,
                channels: dims.channels as i32,
                groups: self.groups as i32,
                pixels: dims.places as i32,
                eps: self.eps as f32,
            };
            return launch.kernel("image_norm", [count, 1, 1], 256, 0, args);
        }
        let args = GroupNormArgs {
            y: launch.output(0),
            stats: launch.output(1),
            x: launch.input(0),
            gamma: launch.input(1),
            beta: launch.input(2),
            count,
            steps: dims.places as i32,
            channels: dims.channels as i32,
            groups: self.groups as i32,
            eps: self.eps as f32,
        };
        launch.warps("group_norm", count, args)
    }
}

simd_fn! {
    /// Normalises samples of `len` numbers. Sums over steps are taken by column first, in `columns` of 2 C
    /// numbers, so that groups of any width are added up with whole vectors.
    fn forward_samples<T>(
        x: &[T],
        groups: usize,
        gamma: &[T],
        beta: &[T],
        eps: T,
        y: &mut [T],
        stats: Option<&mut [T]>,
        columns: &mut [T],
        len: usize,
    ) {
        let mut stats = stats;
        let channels = gamma.len();
        let width = channels / groups;
        let per = T::ONE / T::of((len / groups) as f64);
        let (mean, inverse) = columns.split_at_mut(channels);
        for (sample, (x, y)) in x.chunks_exact(len).zip(y.chunks_exact_mut(len)).enumerate() {
            mean.fill(T::ZERO);
            inverse.fill(T::ZERO);
            x.chunks_exact(channels).for_each(|x| add_assign(mean, x));
            for mean in mean.chunks_exact_mut(width) {
                let value = sum(mean) * per;
                mean.fill(value);
            }
            for x in x.chunks_exact(channels) {
                for c in 0..channels {
                    inverse[c] = (x[c] - mean[c]).mul_add(x[c] - mean[c], inverse[c]);
                }
            }
            for (group, inverse) in inverse.chunks_exact_mut(width).enumerate() {
                let value = T::ONE / (sum(inverse) * per + eps).sqrt();
                inverse.fill(value);
                if let Some(stats) = &mut stats {
                    let at = 2 * (sample * groups + group);
                    stats[at] = mean[group * width];
                    stats[at + 1] = value;
                }
            }
            for (x, y) in x.chunks_exact(channels).zip(y.chunks_exact_mut(channels)) {
                for c in 0..channels {
                    y[c] = ((x[c] - mean[c]) * inverse[c]).mul_add(gamma[c], beta[c]);
                }
            }
        }
    }
}

simd_fn! {
    /// Normalises images, whose channels have `pixels` numbers each, side by side.
    fn forward_images<T>(
        x: &[T],
        groups: usize,
        gamma: &[T],
        beta: &[T],
        eps: T,
        y: &mut [T],
        stats: Option<&mut [T]>,
        pixels: usize,
    ) {
        let mut stats = stats;
        let width = gamma.len() / groups;
        let per = T::ONE / T::of((width * pixels) as f64);
        let all = x.chunks_exact(width * pixels).zip(y.chunks_exact_mut(width * pixels));
        for (number, (x, y)) in all.enumerate() {
            let mean = sum(x) * per;
            y.iter_mut().zip(x).for_each(|(y, x)| *y = *x - mean);
            let inverse = T::ONE / (dot(y, y) * per + eps).sqrt();
            if let Some(stats) = &mut stats {
                stats[2 * number] = mean;
                stats[2 * number + 1] = inverse;
            }
            let first = number % groups * width;
            let tables = gamma[first..].iter().zip(&beta[first..]);
            for (y, (gamma, beta)) in y.chunks_exact_mut(pixels).zip(tables) {
                y.iter_mut().for_each(|y| *y = (*y * inverse).mul_add(*gamma, *beta));
            }
        }
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Gradient of x.
    struct GroupNormGradArgs in "group_norm.cu" {
        dx: u64, x: u64, stats: u64, gamma: u64, dy: u64, count: usize,
        steps: i32, channels: i32, groups: i32,
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Gradients of gamma and beta.
    struct GroupNormTablesArgs in "group_norm.cu" {
        dgamma: u64, dbeta: u64, partial: u64, counter: u64, x: u64, stats: u64, dy: u64,
        rows_per_part: usize, rows: usize, steps: i32, channels: i32, groups: i32,
    }
}

/// Inputs x, statistics, gamma, dy; outputs dx, dgamma, dbeta.
#[derive(Debug)]
struct Gradient {
    groups: usize,
    is_image: bool,
}

/// Samples of one partial sum of dgamma and dbeta: depends on the shape alone, so that sums have the same bits
/// for any number of threads.
fn samples_per_part(batch: usize) -> usize {
    batch.div_ceil(32)
}

impl Op for Gradient {
    fn name(&self) -> &'static str {
        "group_norm_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].clone(), inputs[2].clone(), inputs[2].clone()])
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], _: usize) -> usize {
        let batch = inputs[0].shape[0];
        batch.div_ceil(samples_per_part(batch)) * 6 * inputs[2].len() * inputs[0].dtype.size()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(dims) = Dims::new(io.ty(0)) else { return Ok(()) };
        let (batch, channels, len) = (dims.batch, dims.channels, dims.len());
        let per_part = samples_per_part(batch);
        let parts = batch.div_ceil(per_part);
        dispatch_float!(io.dtype(), T => {
            let (x, stats, gamma, dy) = (io.input::<T>(0), io.input::<T>(1), io.input::<T>(2), io.input::<T>(3));
            let partial = io.scratch::<T>(parts * 6 * channels);
            let partials = RowsMut::new(&mut *partial, 6 * channels);
            let dx = io.output_if_used::<T>(0).map(|dx| RowsMut::new(dx, len));
            io.pool.blocks(batch, per_part, dx, |first, dx, part| {
                // SAFETY: one part per task.
                let sums = unsafe { partials.part(part, 1) };
                let count = per_part.min(batch - first);
                let at = first * len..(first + count) * len;
                let stats = &stats[2 * self.groups * first..];
                let (x, dy) = (&x[at.clone()], &dy[at]);
                match self.is_image {
                    true => gradient_images(x, stats, self.groups, gamma, dy, dx, sums, dims.places),
                    false => gradient_samples(x, stats, self.groups, gamma, dy, dx, sums, len),
                }
            });
            for output in [1, 2] {
                if let Some(grad) = io.output_if_used::<T>(output) {
                    grad.fill(T::ZERO);
                    let at = (output - 1) * channels..output * channels;
                    partial.chunks_exact(6 * channels).for_each(|p| add_rows(grad, &p[at.clone()]));
                }
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::new(launch.ty(0)) else { return Ok(()) };
        let count = dims.batch * self.groups;
        if self.is_image {
            let wanted = launch.output(1) != 0 || launch.output(2) != 0;
            let partial = if wanted { launch.scratch(4 * 2 * dims.batch * dims.channels)? } else { 0 };
            let args = ImageNormArgs {
                y: launch.output(0),
                stats: launch.input(1),
                partial,
                x: launch.input(0),
                gamma: launch.input(2),
                beta: 0,
                dy: launch.input(3),
                samples: dims.batch as i32,
                channels: dims.channels as i32,
                groups: self.groups as i32,
                pixels: dims.places as i32,
                eps: 0.0,
            };
            launch.kernel("image_norm_grad", [count, 1, 1], 256, 0, args)?;
            launch.handoff.push(partial);
            return Ok(());
        }
        if launch.output(0) == 0 {
            return Ok(());
        }
        let args = GroupNormGradArgs {
            dx: launch.output(0),
            x: launch.input(0),
            stats: launch.input(1),
            gamma: launch.input(2),
            dy: launch.input(3),
            count,
            steps: dims.places as i32,
            channels: dims.channels as i32,
            groups: self.groups as i32,
        };
        launch.warps("group_norm_grad", count, args)
    }
    #[cfg(feature = "cuda")]
    fn deferred(&self, outputs: usize) -> std::ops::Range<usize> {
        1..outputs
    }
    /// Of images the sums of every sample are there after `cuda`; of steps nothing is.
    #[cfg(feature = "cuda")]
    fn deferred_reads_scratch(&self) -> bool {
        self.is_image
    }
    #[cfg(feature = "cuda")]
    fn cuda_deferred(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Dims::new(launch.ty(0)) else { return Ok(()) };
        let Dims { batch, channels, places: steps, .. } = dims;
        if self.is_image {
            let partial = launch.handoff.first().copied().unwrap_or(0);
            for (output, at) in [(1, 0), (2, 4 * (batch * channels) as u64)] {
                let grad = launch.output(output);
                if grad != 0 && partial != 0 {
                    cuda_sum_columns(launch, grad, partial + at, batch, channels, false)?;
                }
            }
            return Ok(());
        }
        let rows = batch * steps;
        let (tiles, each) = (channels.div_ceil(32), rows.div_ceil(16).max(32));
        let parts = rows.div_ceil(each);
        let (partial, counter) = (launch.scratch(4 * parts * 2 * channels)?, launch.scratch(4)?);
        let args = GroupNormTablesArgs {
            dgamma: launch.output(1),
            dbeta: launch.output(2),
            partial,
            counter,
            x: launch.input(0),
            stats: launch.input(1),
            dy: launch.input(3),
            rows_per_part: each,
            rows,
            steps: steps as i32,
            channels: channels as i32,
            groups: self.groups as i32,
        };
        launch.kernel("group_norm_tables", [tiles, parts, 1], 1024, 0, args)
    }
}

simd_fn! {
    /// Gradients of samples of `len` numbers. `sums` becomes dgamma and dbeta, followed by four rows of
    /// scratch.
    fn gradient_samples<T>(
        x: &[T],
        stats: &[T],
        groups: usize,
        gamma: &[T],
        dy: &[T],
        dx: Option<&mut [T]>,
        sums: &mut [T],
        len: usize,
    ) {
        let mut dx = dx;
        let channels = gamma.len();
        let width = channels / groups;
        let per = T::ONE / T::of((len / groups) as f64);
        let (dgamma, rest) = sums.split_at_mut(channels);
        let (dbeta, rest) = rest.split_at_mut(channels);
        let (along, rest) = rest.split_at_mut(channels);
        let (total, rest) = rest.split_at_mut(channels);
        let (mean, inverse) = rest.split_at_mut(channels);
        dgamma.fill(T::ZERO);
        dbeta.fill(T::ZERO);
        for (sample, (x, dy)) in x.chunks_exact(len).zip(dy.chunks_exact(len)).enumerate() {
            for group in 0..groups {
                let at = 2 * (sample * groups + group);
                mean[group * width..(group + 1) * width].fill(stats[at]);
                inverse[group * width..(group + 1) * width].fill(stats[at + 1]);
            }
            // By channel: Σ dy n and Σ dy over the steps of this sample.
            along.fill(T::ZERO);
            total.fill(T::ZERO);
            for (x, dy) in x.chunks_exact(channels).zip(dy.chunks_exact(channels)) {
                for c in 0..channels {
                    along[c] = ((x[c] - mean[c]) * inverse[c]).mul_add(dy[c], along[c]);
                    total[c] += dy[c];
                }
            }
            add_assign(dgamma, along);
            add_assign(dbeta, total);
            let Some(dx) = &mut dx else { continue };
            // By group: mean(g n) and mean g, repeated for the group's channels.
            for sums in [&mut *along, &mut *total] {
                for (sums, gamma) in sums.chunks_exact_mut(width).zip(gamma.chunks_exact(width)) {
                    let mean = dot(sums, gamma) * per;
                    sums.fill(mean);
                }
            }
            let dx = &mut dx[sample * len..(sample + 1) * len];
            let steps = dx.chunks_exact_mut(channels).zip(x.chunks_exact(channels)).zip(dy.chunks_exact(channels));
            for ((dx, x), dy) in steps {
                for c in 0..channels {
                    let n = (x[c] - mean[c]) * inverse[c];
                    dx[c] = inverse[c] * (dy[c] * gamma[c] - total[c] - n * along[c]);
                }
            }
        }
    }
}

simd_fn! {
    /// Gradients of images, whose channels have `pixels` numbers each, side by side. `sums` becomes dgamma and
    /// dbeta, followed by two rows of scratch.
    fn gradient_images<T>(
        x: &[T],
        stats: &[T],
        groups: usize,
        gamma: &[T],
        dy: &[T],
        dx: Option<&mut [T]>,
        sums: &mut [T],
        pixels: usize,
    ) {
        let mut dx = dx;
        let channels = gamma.len();
        let width = channels / groups;
        let per = T::ONE / T::of((width * pixels) as f64);
        let (tables, rest) = sums.split_at_mut(2 * channels);
        let (along, rest) = rest.split_at_mut(channels);
        let total = &mut rest[..channels];
        tables.fill(T::ZERO);
        let each = width * pixels;
        for (number, (x, dy)) in x.chunks_exact(each).zip(dy.chunks_exact(each)).enumerate() {
            let (mean, inverse) = (stats[2 * number], stats[2 * number + 1]);
            let first = number % groups * width;
            let gamma = &gamma[first..first + width];
            let (along, total) = (&mut along[..width], &mut total[..width]);
            // By channel: Σ dy n and Σ dy, where n = (x - mean) inverse; dx holds x - mean until it is known.
            let mut dx = dx.as_mut().map(|dx| &mut dx[number * each..(number + 1) * each]);
            if let Some(dx) = &mut dx {
                dx.iter_mut().zip(x).for_each(|(dx, x)| *dx = *x - mean);
            }
            for (c, (x, dy)) in x.chunks_exact(pixels).zip(dy.chunks_exact(pixels)).enumerate() {
                total[c] = sum(dy);
                along[c] = inverse
                    * match &dx {
                        Some(dx) => dot(dy, &dx[c * pixels..(c + 1) * pixels]),
                        None => dot(dy, x) - mean * total[c],
                    };
                tables[first + c] += along[c];
                tables[channels + first + c] += total[c];
            }
            let Some(dx) = dx else { continue };
            let (along, total) = (dot(along, gamma) * per, dot(total, gamma) * per);
            for ((dx, dy), gamma) in dx.chunks_exact_mut(pixels).zip(dy.chunks_exact(pixels)).zip(gamma) {
                for (dx, dy) in dx.iter_mut().zip(dy) {
                    *dx = inverse * (*dy * *gamma - total - *dx * inverse * along);
                }
            }
        }
    }
}
