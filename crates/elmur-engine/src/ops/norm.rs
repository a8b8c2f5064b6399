//! LayerNorm and RMSNorm, bare or after a residual sum.
//!
//! With s = x (+ f):
//! - LayerNorm: y = (s - mean s) / sqrt(var s + eps) * gamma + beta
//! - RMSNorm: y = s / sqrt(mean s² + eps) * gamma
//!
//! Backward, with n = normalised s, g = dy * gamma, r = 1 / sqrt(...):
//! - LayerNorm: ds = r (g - mean g - n mean(g n))
//! - RMSNorm: ds = r (g - n mean(g n))
//! - both: dgamma = Σ dy n, dbeta = Σ dy

use std::sync::Arc;

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::RowsMut;
use crate::cpu::simd::{dot, reduce, simd_fn, sum};
#[cfg(feature = "cuda")]
use crate::cuda::args::kernel_args;
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want, want_float};
use crate::ops::reduce::add_rows;
use crate::types::TensorType;

/// Scale and shift of a normalisation over the last axis.
#[derive(Debug, Clone, Copy)]
pub struct Norm {
    /// LayerNorm or RMSNorm.
    pub kind: NormKind,
    /// Scale, `[d]`.
    pub gamma: Value,
    /// Added to the variance or mean square.
    pub eps: f64,
}

/// The kind of normalisation.
#[derive(Debug, Clone, Copy)]
pub enum NormKind {
    /// LayerNorm with its shift beta, `[d]`.
    Layer {
        /// Shift, `[d]`.
        beta: Value,
    },
    /// RMSNorm.
    Rms,
}

impl Graph {
    /// Normalises the last axis of x [..., d].
    pub fn norm(&mut self, x: Value, norm: Norm) -> Result<Value> {
        Ok(self.push_norm(x, None, norm)?[0])
    }

    /// norm(x + f) and the sum x + f itself, both [..., d], in one pass.
    pub fn residual_norm(&mut self, x: Value, f: Value, norm: Norm) -> Result<(Value, Value)> {
        let outputs = self.push_norm(x, Some(f), norm)?;
        Ok((outputs[0], outputs[2]))
    }

    fn push_norm(&mut self, x: Value, f: Option<Value>, norm: Norm) -> Result<Vec<Value>> {
        let mut inputs = vec![x, norm.gamma];
        let layer = match norm.kind {
            NormKind::Layer { beta } => {
                inputs.push(beta);
                true
            }
            NormKind::Rms => false,
        };
        inputs.extend(f);
        self.push(Forward { layer, residual: f.is_some(), eps: norm.eps }, &inputs)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Normalised rows of x, or of x + f.
    struct NormArgs in "norm.cu" {
        y: u64, stats: u64, sums: u64, x: u64, f: u64, gamma: u64, beta: u64, rows: usize, d: usize,
        eps: f32,
    }
}

/// Inputs x, gamma, [beta], `[f]`; outputs y, statistics [rows, 2] (mean, 1 / deviation), [x + f].
#[derive(Debug)]
struct Forward {
    layer: bool,
    residual: bool,
    eps: f64,
}

impl Forward {
    fn f_index(&self) -> usize {
        2 + usize::from(self.layer)
    }
}

impl Op for Forward {
    fn name(&self) -> &'static str {
        if self.residual { "residual_norm" } else { "norm" }
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (name, x) = (self.name(), &inputs[0]);
        want_float(name, "x", x)?;
        if x.shape.is_empty() {
            return mismatch(name, "x [..., d]", x.to_string());
        }
        want(name, "gamma", &inputs[1], x.dtype, &[x.cols()])?;
        if self.layer {
            want(name, "beta", &inputs[2], x.dtype, &[x.cols()])?;
        }
        let mut outputs = vec![x.clone(), x.with([x.rows(), 2])];
        if self.residual {
            want(name, "f", &inputs[self.f_index()], x.dtype, &x.shape)?;
            outputs.push(x.clone());
        }
        Ok(outputs)
    }
    fn always_writes(&self, output: usize) -> bool {
        output == 0
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let passed = if self.residual { b.grad(2) } else { None };
        let (ds, mut rest) = match b.grad(0) {
            Some(dy) => {
                let s = if self.residual { b.outputs[2] } else { b.inputs[0] };
                let mut inputs = vec![s, b.outputs[1], b.inputs[1], dy];
                inputs.extend(passed);
                let op = Gradient { layer: self.layer, passed: passed.is_some() };
                let mut outputs = b.graph.push(op, &inputs)?.into_iter();
                (outputs.next(), outputs)
            }
            None => (passed, Vec::new().into_iter()),
        };
        if let Some(ds) = ds {
            b.set(0, ds);
            if self.residual {
                b.set(self.f_index(), ds);
            }
        }
        for input in 1..self.f_index() {
            if let Some(grad) = rest.next() {
                b.set(input, grad);
            }
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (rows, d) = (io.ty(0).rows(), io.ty(0).cols());
        dispatch_float!(io.dtype(), T => {
            let (x, gamma) = (io.input::<T>(0), io.input::<T>(1));
            let beta = self.layer.then(|| io.input::<T>(2));
            let f = self.residual.then(|| io.input::<T>(self.f_index()));
            let sums = if self.residual { io.output_if_used::<T>(2) } else { None };
            let stats = io.output_if_used::<T>(1);
            let outputs =
                (RowsMut::new(io.output::<T>(0), d), stats.map(|s| RowsMut::new(s, 2)), sums.map(|s| RowsMut::new(s, d)));
            io.pool.rows(rows, 4 * d, outputs, |first, (y, stats, sums)| {
                let count = y.len();
                let x = &x[first * d..][..count];
                let f = f.map(|f| &f[first * d..][..count]);
                forward_rows(x, f, gamma, beta, T::of(self.eps), y, stats, sums);
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, d) = (launch.ty(0).rows(), launch.ty(0).cols());
        let args = NormArgs {
            y: launch.output(0),
            stats: launch.output(1),
            sums: if self.residual { launch.output(2) } else { 0 },
            x: launch.input(0),
            f: launch.input_if(self.residual.then(|| self.f_index())),
            gamma: launch.input(1),
            beta: launch.input_if(self.layer.then_some(2)),
            rows,
            d,
            eps: self.eps as f32,
        };
        launch.warps("norm_rows", rows, args)
    }
}

simd_fn! {
    fn forward_rows<T>(
        x: &[T],
        f: Option<&[T]>,
        gamma: &[T],
        beta: Option<&[T]>,
        eps: T,
        y: &mut [T],
        stats: Option<&mut [T]>,
        sums: Option<&mut [T]>,
    ) {
        let (mut stats, mut sums) = (stats, sums);
        let d = gamma.len();
        let per = T::ONE / T::of(d as f64);
        for row in 0..y.len() / d {
            let at = row * d..(row + 1) * d;
            let y = &mut y[at.clone()];
            y.copy_from_slice(&x[at.clone()]);
            if let Some(f) = f {
                y.iter_mut().zip(&f[at.clone()]).for_each(|(y, f)| *y += *f);
            }
            if let Some(sums) = &mut sums {
                sums[at].copy_from_slice(y);
            }
            let mean = if beta.is_some() { sum(y) * per } else { T::ZERO };
            let square = reduce(y, |y| (y - mean) * (y - mean)) * per;
            let inverse = T::ONE / (square + eps).sqrt();
            if let Some(stats) = &mut stats {
                stats[2 * row] = mean;
                stats[2 * row + 1] = inverse;
            }
            match beta {
                Some(beta) => {
                    for ((y, gamma), beta) in y.iter_mut().zip(gamma).zip(beta) {
                        *y = ((*y - mean) * inverse).mul_add(*gamma, *beta);
                    }
                }
                None => y.iter_mut().zip(gamma).for_each(|(y, gamma)| *y = *y * inverse * *gamma),
            }
        }
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Gradient of s.
    struct NormGradArgs in "norm.cu" {
        ds: u64, s: u64, stats: u64, gamma: u64, dy: u64, passed: u64, rows: usize, d: usize,
        layer: i32,
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Gradients of gamma and beta.
    struct NormTablesArgs in "norm.cu" {
        dgamma: u64, dbeta: u64, partial: u64, counter: u64, s: u64, stats: u64, dy: u64,
        rows_per_part: usize, rows: usize, d: usize,
    }
}

/// Inputs s, statistics, gamma, dy, [gradient passed through s]; outputs ds, dgamma, [dbeta].
#[derive(Debug, Clone)]
struct Gradient {
    layer: bool,
    passed: bool,
}

/// Rows of one partial sum of dgamma and dbeta: depends on the shape alone, so that sums have the same bits
/// for any number of threads.
fn rows_per_part(rows: usize) -> usize {
    rows.div_ceil(32).max(16)
}

impl Op for Gradient {
    fn name(&self) -> &'static str {
        "norm_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let mut outputs = vec![inputs[0].clone(), inputs[2].clone()];
        if self.layer {
            outputs.push(inputs[2].clone());
        }
        Ok(outputs)
    }
    fn accumulating(&self) -> Option<Arc<dyn Op>> {
        (!self.passed).then(|| Arc::new(Self { passed: true, ..self.clone() }) as Arc<dyn Op>)
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], _: usize) -> usize {
        let (rows, d) = (inputs[0].rows(), inputs[0].cols());
        rows.div_ceil(rows_per_part(rows)) * 4 * d * inputs[0].dtype.size()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (rows, d) = (io.ty(0).rows(), io.ty(0).cols());
        let per_part = rows_per_part(rows);
        let parts = rows.div_ceil(per_part);
        dispatch_float!(io.dtype(), T => {
            let (s, stats, gamma, dy) = (io.input::<T>(0), io.input::<T>(1), io.input::<T>(2), io.input::<T>(3));
            let passed = self.passed.then(|| io.input::<T>(4));
            let partial = io.scratch::<T>(parts * 4 * d);
            let ds = io.output_if_used::<T>(0);
            let partials = RowsMut::new(&mut *partial, 4 * d);
            io.pool.blocks(rows, per_part, ds.map(|ds| RowsMut::new(ds, d)), |first, ds, part| {
                // SAFETY: one part per task.
                let sums = unsafe { crate::cpu::pool::Rows::part(&partials, part, 1) };
                let count = per_part.min(rows - first);
                let at = first * d..(first + count) * d;
                let stats = &stats[2 * first..2 * (first + count)];
                let passed = passed.map(|p| &p[at.clone()]);
                gradient_rows(self.layer, &s[at.clone()], stats, gamma, &dy[at], passed, ds, sums);
            });
            for (output, half) in [(1, 0), (2, 1)] {
                if output < io.outputs.len() && let Some(grad) = io.output_if_used::<T>(output) {
                    grad.fill(T::ZERO);
                    partial.chunks_exact(4 * d).for_each(|p| add_rows(grad, &p[half * d..(half + 1) * d]));
                }
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, d) = (launch.ty(0).rows(), launch.ty(0).cols());
        if launch.output(0) == 0 {
            return Ok(());
        }
        let args = NormGradArgs {
            ds: launch.output(0),
            s: launch.input(0),
            stats: launch.input(1),
            gamma: launch.input(2),
            dy: launch.input(3),
            passed: launch.input_if(self.passed.then_some(4)),
            rows,
            d,
            layer: i32::from(self.layer),
        };
        launch.warps("norm_grad", rows, args)
    }
    #[cfg(feature = "cuda")]
    fn deferred(&self, outputs: usize) -> std::ops::Range<usize> {
        1..outputs
    }
    #[cfg(feature = "cuda")]
    fn cuda_deferred(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, d) = (launch.ty(0).rows(), launch.ty(0).cols());
        let (tiles, each) = (d.div_ceil(32), rows.div_ceil(16).max(32));
        let parts = rows.div_ceil(each);
        let (partial, counter) = (launch.scratch(4 * parts * 2 * d)?, launch.scratch(4)?);
        let args = NormTablesArgs {
            dgamma: launch.output(1),
            dbeta: if self.layer { launch.output(2) } else { 0 },
            partial,
            counter,
            s: launch.input(0),
            stats: launch.input(1),
            dy: launch.input(3),
            rows_per_part: each,
            rows,
            d,
        };
        launch.kernel("norm_tables", [tiles, parts, 1], 1024, 0, args)
    }
}

simd_fn! {
    fn gradient_rows<T>(
        layer: bool,
        s: &[T],
        stats: &[T],
        gamma: &[T],
        dy: &[T],
        passed: Option<&[T]>,
        ds: Option<&mut [T]>,
        sums: &mut [T],
    ) {
        let mut ds = ds;
        let d = gamma.len();
        let per = T::ONE / T::of(d as f64);
        // dgamma, dbeta, then one row of n and of g.
        let (dgamma, rest) = sums.split_at_mut(d);
        let (dbeta, rest) = rest.split_at_mut(d);
        let (n, rest) = rest.split_at_mut(d);
        let g = &mut rest[..d];
        dgamma.fill(T::ZERO);
        dbeta.fill(T::ZERO);
        for row in 0..s.len() / d {
            let at = row * d..(row + 1) * d;
            let (s, dy) = (&s[at.clone()], &dy[at.clone()]);
            let (mean, inverse) = (stats[2 * row], stats[2 * row + 1]);
            for i in 0..d {
                n[i] = (s[i] - mean) * inverse;
                g[i] = dy[i] * gamma[i];
            }
            for i in 0..d {
                dgamma[i] = n[i].mul_add(dy[i], dgamma[i]);
                dbeta[i] += dy[i];
            }
            let Some(ds) = &mut ds else { continue };
            let ds = &mut ds[at.clone()];
            let mean_g = if layer { sum(g) * per } else { T::ZERO };
            let mean_gn = dot(g, n) * per;
            for i in 0..d {
                ds[i] = inverse * (g[i] - mean_g - n[i] * mean_gn);
            }
            if let Some(passed) = passed {
                ds.iter_mut().zip(&passed[at]).for_each(|(ds, p)| *ds += *p);
            }
        }
    }
}
