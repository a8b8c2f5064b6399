//! SwiGLU's gate: y = silu(g) u, where one linear map has computed [g, u] side by side.

use crate::autodiff::Backward;
use crate::cpu::pool::RowsMut;
use crate::cpu::simd::simd_fn;
#[cfg(feature = "cuda")]
use crate::cuda::args::args;
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want_float};
use crate::types::TensorType;

impl Graph {
    /// y[..., f] = silu(h[..., :f]) h[..., f:] for h [..., 2f].
    pub fn swiglu(&mut self, h: Value) -> Result<Value> {
        self.push1(SwiGlu, &[h])
    }
}

#[derive(Debug)]
struct SwiGlu;

impl Op for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_float("swiglu", "h", &inputs[0])?;
        let mut shape = inputs[0].shape.clone();
        match shape.last_mut() {
            Some(width) if *width % 2 == 0 => *width /= 2,
            _ => return mismatch("swiglu", "h [..., 2f]", inputs[0].to_string()),
        }
        Ok(vec![inputs[0].with(shape)])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let dh = b.graph.push1(SwiGluGrad, &[b.inputs[0], dy])?;
            b.set(0, dh);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let f = io.out_ty(0).cols();
        dispatch_float!(io.dtype(), T => {
            let (h, y) = (io.input::<T>(0), io.output::<T>(0));
            io.pool.rows(y.len() / f, 8 * f, RowsMut::new(y, f), |first, y| {
                forward_rows(&h[first * 2 * f..][..2 * y.len()], f, y);
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (f, n) = (launch.out_ty(0).cols(), launch.out_ty(0).len());
        let aligned = (launch.input(0) | launch.output(0)).is_multiple_of(16);
        if f % 4 == 0 && aligned && i32::try_from(n).is_ok() {
            let args = args![launch.output(0), launch.input(0), f as i32, n as i32];
            return launch.elements("swiglu_4", n / 4, args);
        }
        launch.elements("swiglu", n, args![launch.output(0), launch.input(0), f, n])
    }
}

simd_fn! {
    pub(crate) fn forward_rows<T>(h: &[T], f: usize, y: &mut [T]) {
        for (h, y) in h.chunks_exact(2 * f).zip(y.chunks_exact_mut(f)) {
            let (g, u) = h.split_at(f);
            for ((y, g), u) in y.iter_mut().zip(g).zip(u) {
                *y = *g * g.sigmoid() * *u;
            }
        }
    }
}

#[derive(Debug)]
struct SwiGluGrad;

impl Op for SwiGluGrad {
    fn name(&self) -> &'static str {
        "swiglu_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].clone()])
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let f = io.ty(1).cols();
        dispatch_float!(io.dtype(), T => {
            // This op is usually the last reader of h, and can write the gradient over it.
            let (dh, dy) = (io.in_place::<T>(0, 0), io.input::<T>(1));
            io.pool.rows(dy.len() / f, 16 * f, RowsMut::new(dh, 2 * f), |first, dh| {
                gradient_rows(dh, f, &dy[first * f..][..dh.len() / 2]);
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (f, n) = (launch.ty(1).cols(), launch.ty(1).len());
        let (dh, h, dy) = (launch.output(0), launch.input(0), launch.input(1));
        if f % 4 == 0 && (dh | h | dy).is_multiple_of(16) && i32::try_from(n).is_ok() {
            return launch.elements("swiglu_grad_4", n / 4, args![dh, h, dy, f as i32, n as i32]);
        }
        launch.elements("swiglu_grad", n, args![dh, h, dy, f, n])
    }
}

simd_fn! {
    /// dh = [dy u silu'(g), dy silu(g)], written over h = [g, u].
    fn gradient_rows<T>(dh: &mut [T], f: usize, dy: &[T]) {
        for (dh, dy) in dh.chunks_exact_mut(2 * f).zip(dy.chunks_exact(f)) {
            let (dg, du) = dh.split_at_mut(f);
            for i in 0..f {
                let (g, u, dy) = (dg[i], du[i], dy[i]);
                let s = g.sigmoid();
                let silu = g * s;
                // silu' = s (1 + g (1 - s)) = s + silu (1 - s)
                dg[i] = dy * u * (s + silu * (T::ONE - s));
                du[i] = dy * silu;
            }
        }
    }
}
