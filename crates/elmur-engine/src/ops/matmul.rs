//! Matrix products of two computed tensors, batched.

use std::sync::Arc;

use crate::autodiff::Backward;
use crate::cpu::gemm::{Mat, Product, gemm, gemm_pair, pair_scratch_len, scratch_len};
use crate::cpu::pool::{Pool, RowsMut};
#[cfg(feature = "cuda")]
use crate::cuda::launch::{Launch, Product as GpuProduct};
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want_float};
use crate::types::TensorType;

impl Graph {
    /// C[..., m, n] = A[..., m, k] B[..., k, n]; leading axes must be equal.
    pub fn matmul(&mut self, a: Value, b: Value) -> Result<Value> {
        self.matmul_with(a, b, false, false)
    }

    /// [`Graph::matmul`] where A is stored as [..., k, m] (`transpose_a`) or B as [..., n, k]
    /// (`transpose_b`).
    pub fn matmul_with(&mut self, a: Value, b: Value, transpose_a: bool, transpose_b: bool) -> Result<Value> {
        self.push1(MatMul { transpose_a, transpose_b, accumulate: false }, &[a, b])
    }
}

#[derive(Debug, Clone)]
struct MatMul {
    transpose_a: bool,
    transpose_b: bool,
    /// Whether the product is added to a third operand.
    accumulate: bool,
}

struct Dims {
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
}

impl MatMul {
    fn dims(&self, a: &TensorType, b: &TensorType) -> Option<Dims> {
        let rank = a.shape.len();
        if rank < 2 || b.shape.len() != rank || a.dtype != b.dtype {
            return None;
        }
        let (lead, a_matrix) = a.shape.split_at(rank - 2);
        let (b_lead, b_matrix) = b.shape.split_at(rank - 2);
        let (m, k) = if self.transpose_a { (a_matrix[1], a_matrix[0]) } else { (a_matrix[0], a_matrix[1]) };
        let (kb, n) = if self.transpose_b { (b_matrix[1], b_matrix[0]) } else { (b_matrix[0], b_matrix[1]) };
        (lead == b_lead && k == kb).then(|| Dims { batch: lead.iter().product(), m, n, k })
    }
}

impl Op for MatMul {
    fn name(&self) -> &'static str {
        "matmul"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (a, b) = (&inputs[0], &inputs[1]);
        want_float("matmul", "operands", a)?;
        let Some(dims) = self.dims(a, b) else {
            let t = |flag| if flag { " (transposed)" } else { "" };
            let got = format!("{a}{} and {b}{}", t(self.transpose_a), t(self.transpose_b));
            return mismatch("matmul", "[..., m, k] and [..., k, n] of one float type", got);
        };
        let mut shape = a.shape[..a.shape.len() - 2].to_vec();
        shape.extend([dims.m, dims.n]);
        Ok(vec![a.with(shape)])
    }
    fn accumulating(&self) -> Option<Arc<dyn Op>> {
        (!self.accumulate).then(|| Arc::new(Self { accumulate: true, ..self.clone() }) as Arc<dyn Op>)
    }
    fn matrix_product(&self) -> Option<[bool; 2]> {
        (!self.accumulate).then_some([self.transpose_a, self.transpose_b])
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        if self.accumulate { vec![(2, 0)] } else { Vec::new() }
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let Some(grad) = b.grad(0) else { return Ok(()) };
        let (x, y) = (b.inputs[0], b.inputs[1]);
        if b.needs(0) {
            // dA = dC Bᵀ, or its transpose B dCᵀ.
            let da = if self.transpose_a {
                b.graph.matmul_with(y, grad, self.transpose_b, true)?
            } else {
                b.graph.matmul_with(grad, y, false, !self.transpose_b)?
            };
            b.set(0, da);
        }
        if b.needs(1) {
            // dB = Aᵀ dC, or its transpose dCᵀ A.
            let db = if self.transpose_b {
                b.graph.matmul_with(grad, x, true, self.transpose_a)?
            } else {
                b.graph.matmul_with(x, grad, !self.transpose_a, false)?
            };
            b.set(1, db);
        }
        if self.accumulate {
            b.set(2, grad);
        }
        Ok(())
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], threads: usize) -> usize {
        let Some(Dims { batch, m, n, k }) = self.dims(&inputs[0], &inputs[1]) else { return 0 };
        dispatch_float!(inputs[0].dtype, T => {
            let len = if batch == 1 {
                scratch_len::<T>(m, n, k, threads)
            } else {
                threads * scratch_len::<T>(m, n, k, 1)
            };
            len * size_of::<T>()
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(Dims { batch, m, n, k }) = self.dims(io.ty(0), io.ty(1)) else { return Ok(()) };
        dispatch_float!(io.dtype(), T => {
            let (a, b) = (io.input::<T>(0), io.input::<T>(1));
            let c = if self.accumulate { io.in_place::<T>(2, 0) } else { io.output::<T>(0) };
            let product = |i: usize| {
                let (a, b) = (&a[i * m * k..][..m * k], &b[i * k * n..][..k * n]);
                Product {
                    m, n, k,
                    a: if self.transpose_a { Mat::transposed(a, m) } else { Mat::rows(a, k) },
                    b: if self.transpose_b { Mat::transposed(b, k) } else { Mat::rows(b, n) },
                    accumulate: self.accumulate,
                    precision: io.precision,
                }
            };
            if batch == 1 {
                let scratch = io.scratch::<T>(scratch_len::<T>(m, n, k, io.pool.threads()));
                gemm(io.pool, scratch, product(0), c, n, |_| {});
            } else {
                // Small products: one per task, each on one thread with scratch of its own.
                let each = scratch_len::<T>(m, n, k, 1);
                let scratch = io.scratch::<T>(io.pool.threads() * each);
                let tasks = io.pool.threads().min(batch);
                let per_task = batch.div_ceil(tasks);
                let outputs = RowsMut::new(c, m * n);
                let scratch = RowsMut::new(scratch, each);
                io.pool.blocks(batch, per_task, outputs, |first, c, task| {
                    // SAFETY: there are at most as many tasks as scratch parts, and each takes its own.
                    let scratch = unsafe { crate::cpu::pool::Rows::part(&scratch, task, 1) };
                    for (i, c) in c.chunks_exact_mut(m * n).enumerate() {
                        gemm(Pool::serial(), scratch, product(first + i), c, n, |_| {});
                    }
                });
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(Dims { batch, m, n, k }) = self.dims(launch.ty(0), launch.ty(1)) else { return Ok(()) };
        let (c, addend) = (launch.output(0), launch.input_if(self.accumulate.then_some(2)));
        let (a, b) = ((launch.input(0), self.transpose_a), (launch.input(1), self.transpose_b));
        let product = GpuProduct { c, batch, addend, ..GpuProduct::new(m, n, k, a, b) };
        launch.product(&product)
    }
}

/// Two products Aᵀ B with A stored as [k, m]: inputs A, B₁ and B₂ [k, n], outputs C₁ and C₂ [m, n]. Made of two
/// products by `fuse.rs`.
#[derive(Debug)]
pub(crate) struct MatMulPair;

impl MatMulPair {
    fn dims(a: &TensorType, b: [&TensorType; 2]) -> (usize, [usize; 2], usize) {
        (a.cols(), b.map(TensorType::cols), a.rows())
    }
}

impl Op for MatMulPair {
    fn name(&self) -> &'static str {
        "matmul_pair"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (m, n, _) = Self::dims(&inputs[0], [&inputs[1], &inputs[2]]);
        Ok(n.map(|n| inputs[0].with([m, n])).to_vec())
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], threads: usize) -> usize {
        let (m, n, k) = Self::dims(&inputs[0], [&inputs[1], &inputs[2]]);
        dispatch_float!(inputs[0].dtype, T => pair_scratch_len::<T>(m, n, k, threads) * size_of::<T>())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (m, n, k) = Self::dims(io.ty(0), [io.ty(1), io.ty(2)]);
        dispatch_float!(io.dtype(), T => {
            let scratch = io.scratch::<T>(pair_scratch_len::<T>(m, n, k, io.pool.threads()));
            let product = |i: usize| (Mat::rows(io.input::<T>(i + 1), n[i]), n[i], io.output::<T>(i));
            let a = Mat::transposed(io.input::<T>(0), m);
            gemm_pair(io.pool, scratch, (m, k), a, [product(0), product(1)], io.precision);
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (m, n, k) = Self::dims(launch.ty(0), [launch.ty(1), launch.ty(2)]);
        for (i, n) in n.into_iter().enumerate() {
            let (a, b) = ((launch.input(0), true), (launch.input(i + 1), false));
            launch.product(&GpuProduct { c: launch.output(i), ..GpuProduct::new(m, n, k, a, b) })?;
        }
        Ok(())
    }
}
