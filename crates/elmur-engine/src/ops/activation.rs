//! Elementwise functions: ReLU, exact GELU, SiLU, tanh, sigmoid, softplus, exp, mish, ln.
//! [`linear`](Graph::linear) can apply them too, while its output is still in the cache.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::RowsMut;
use crate::cpu::simd::simd_fn;
#[cfg(feature = "cuda")]
use crate::cuda::args::args;
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, want_float};
use crate::types::TensorType;

/// An elementwise function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// x
    Identity,
    /// max(x, 0)
    Relu,
    /// x Φ(x), exactly (by erf, not the tanh approximation)
    Gelu,
    /// x σ(x)
    Silu,
    /// tanh x
    Tanh,
    /// σ(x) = 1 / (1 + e^-x)
    Sigmoid,
    /// ln(1 + e^x)
    Softplus,
    /// e^x
    Exp,
    /// x tanh(softplus x)
    Mish,
    /// ln x; not a number for negative x
    Ln,
}

use Activation as A;

impl Activation {
    /// Whether the derivative is computed from the function's value rather than its argument.
    pub(crate) fn derives_from_output(self) -> bool {
        matches!(self, A::Identity | A::Relu | A::Tanh | A::Sigmoid | A::Exp)
    }
}

/// φ(x), the normal density.
#[inline(always)]
fn density<T: Float>(x: T) -> T {
    T::of(0.398_942_280_401_432_7) * (x * x * T::of(-0.5)).exp()
}

/// Φ(x), the normal distribution function.
#[inline(always)]
fn normal_cdf<T: Float>(x: T) -> T {
    T::of(0.5) * (T::ONE + (x * T::of(std::f64::consts::FRAC_1_SQRT_2)).erf())
}

/// ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|).
#[inline(always)]
pub(crate) fn softplus<T: Float>(x: T) -> T {
    x.max(T::ZERO) + (-x.abs()).exp().ln_1p()
}

/// e^x, t = tanh(ln(1 + e^x)) = n / (n + 2) and 1 - t = 2 / (n + 2), with n = e^x (e^x + 2): without
/// cancellation, and without a branch that would cost the vector instructions.
#[inline(always)]
fn mish_parts<T: Float>(x: T) -> (T, T, T) {
    // Beyond 20, t is 1 to the last digit of an f64.
    let most = T::of(20.0);
    let e = if x > most { most } else { x }.exp();
    let n = e * (e + T::of(2.0));
    let share = T::ONE / (n + T::of(2.0));
    (e, n * share, share + share)
}

simd_fn! {
    /// x = f(x).
    pub(crate) fn apply<T>(kind: Activation, x: &mut [T]) {
        match kind {
            A::Identity => {}
            A::Relu => x.iter_mut().for_each(|x| *x = if *x < T::ZERO { T::ZERO } else { *x }),
            A::Gelu => x.iter_mut().for_each(|x| *x *= normal_cdf(*x)),
            A::Silu => x.iter_mut().for_each(|x| *x *= x.sigmoid()),
            A::Tanh => x.iter_mut().for_each(|x| *x = x.tanh()),
            A::Sigmoid => x.iter_mut().for_each(|x| *x = x.sigmoid()),
            A::Softplus => x.iter_mut().for_each(|x| *x = softplus(*x)),
            A::Exp => x.iter_mut().for_each(|x| *x = x.exp()),
            A::Mish => x.iter_mut().for_each(|x| *x *= mish_parts(*x).1),
            A::Ln => x.iter_mut().for_each(|x| *x = x.ln()),
        }
    }
}

simd_fn! {
    /// dx *= f', computed from the value or the argument of f as [`Activation::derives_from_output`] says.
    fn derive<T>(kind: Activation, seen: &[T], dx: &mut [T]) {
        let pairs = dx.iter_mut().zip(seen);
        match kind {
            A::Identity => {}
            A::Relu => pairs.for_each(|(dx, y)| *dx = if *y > T::ZERO { *dx } else { T::ZERO }),
            A::Gelu => pairs.for_each(|(dx, x)| *dx *= normal_cdf(*x) + *x * density(*x)),
            A::Silu => pairs.for_each(|(dx, x)| {
                let s = x.sigmoid();
                *dx *= s * (T::ONE + *x * (T::ONE - s));
            }),
            A::Tanh => pairs.for_each(|(dx, y)| *dx *= T::ONE - *y * *y),
            A::Sigmoid => pairs.for_each(|(dx, y)| *dx *= *y * (T::ONE - *y)),
            A::Softplus => pairs.for_each(|(dx, x)| *dx *= x.sigmoid()),
            A::Exp => pairs.for_each(|(dx, y)| *dx *= *y),
            A::Mish => pairs.for_each(|(dx, x)| {
                let (e, t, rest) = mish_parts(*x);
                *dx *= t + *x * (e / (T::ONE + e)) * rest * (T::ONE + t);
            }),
            A::Ln => pairs.for_each(|(dx, x)| *dx /= *x),
        }
    }
}

impl Graph {
    /// f(x), elementwise.
    pub fn activation(&mut self, x: Value, kind: Activation) -> Result<Value> {
        if kind == A::Identity { Ok(x) } else { self.push1(Apply(kind), &[x]) }
    }

    /// max(x, 0).
    pub fn relu(&mut self, x: Value) -> Result<Value> {
        self.activation(x, A::Relu)
    }

    /// x Φ(x), exactly.
    pub fn gelu(&mut self, x: Value) -> Result<Value> {
        self.activation(x, A::Gelu)
    }

    /// x σ(x).
    pub fn silu(&mut self, x: Value) -> Result<Value> {
        self.activation(x, A::Silu)
    }

    /// tanh x.
    pub fn tanh(&mut self, x: Value) -> Result<Value> {
        self.activation(x, A::Tanh)
    }

    /// 1 / (1 + e^-x).
    pub fn sigmoid(&mut self, x: Value) -> Result<Value> {
        self.activation(x, A::Sigmoid)
    }

    /// ln(1 + e^x).
    pub fn softplus(&mut self, x: Value) -> Result<Value> {
        self.activation(x, A::Softplus)
    }

    /// e^x.
    pub fn exp(&mut self, x: Value) -> Result<Value> {
        self.activation(x, A::Exp)
    }

    /// x tanh(softplus x).
    pub fn mish(&mut self, x: Value) -> Result<Value> {
        self.activation(x, A::Mish)
    }

    /// ln x.
    pub fn ln(&mut self, x: Value) -> Result<Value> {
        self.activation(x, A::Ln)
    }

    /// dy f', where `seen` is the value or the argument of f.
    pub(crate) fn activation_grad(&mut self, kind: Activation, seen: Value, dy: Value) -> Result<Value> {
        if kind == A::Identity { Ok(dy) } else { self.push1(Derive(kind), &[dy, seen]) }
    }
}

#[derive(Debug)]
struct Apply(Activation);

impl Op for Apply {
    fn name(&self) -> &'static str {
        "activation"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_float("activation", "x", &inputs[0])?;
        Ok(inputs.to_vec())
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let seen = if self.0.derives_from_output() { b.outputs[0] } else { b.inputs[0] };
            let dx = b.graph.activation_grad(self.0, seen, dy)?;
            b.set(0, dx);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_float!(io.dtype(), T => {
            let y = io.in_place::<T>(0, 0);
            io.pool.rows(y.len(), 8, RowsMut::new(y, 1), |_, y| apply(self.0, y));
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = launch.ty(0).len();
        let args = args![self.0 as i32, launch.output(0), launch.input(0), n];
        launch.elements("activation", n, args)
    }
}

#[derive(Debug)]
struct Derive(Activation);

impl Op for Derive {
    fn name(&self) -> &'static str {
        "activation_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].clone()])
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_float!(io.dtype(), T => {
            let (dx, seen) = (io.in_place::<T>(0, 0), io.input::<T>(1));
            io.pool.rows(dx.len(), 8, RowsMut::new(dx, 1), |first, dx| derive(self.0, &seen[first..][..dx.len()], dx));
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = launch.ty(0).len();
        let args = args![self.0 as i32, launch.output(0), launch.input(0), launch.input(1), n];
        launch.elements("activation_grad", n, args)
    }
}
