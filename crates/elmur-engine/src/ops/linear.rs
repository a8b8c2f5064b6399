//! Linear layers: y = f(x Wᵀ + b).

use std::sync::Arc;

use crate::autodiff::Backward;
use crate::cpu::gemm::{KeptRight, Mat, Product, RoundedWeight, Tile, gemm_keeping, kept_len, scratch_len};
use crate::cpu::pool::RowsMut;
use crate::cpu::simd::{add_assign, simd_fn};
#[cfg(feature = "cuda")]
use crate::cuda::args::kernel_args;
#[cfg(feature = "cuda")]
use crate::cuda::launch::{Launch, Product as GpuProduct};
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Kept, Op, WithRounded, dispatch_float, mismatch, want, want_float};
use crate::ops::activation::{Activation, apply};
use crate::types::TensorType;

impl Graph {
    /// y[..., out] = f(x[..., in] Wᵀ + b) with W [out, in] (PyTorch's layout) and b `[out]`.
    pub fn linear(
        &mut self,
        x: Value,
        weight: Value,
        bias: Option<Value>,
        activation: Activation,
    ) -> Result<Value> {
        let mut inputs = vec![x, weight];
        inputs.extend(bias);
        self.push1(Linear { bias: bias.is_some(), activation, adds: false }, &inputs)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// z = x + bias by column, y = f(z).
    struct BiasActivationArgs in "activation.cu" {
        y: u64, z: u64, x: u64, bias: u64, columns: usize, n: usize, kind: i32,
    }
}

/// Inputs x, weight, [bias], [what is added]; outputs y, [the argument of the activation].
#[derive(Debug, Clone)]
struct Linear {
    bias: bool,
    activation: Activation,
    /// Whether the last input is added to y; without activation only.
    adds: bool,
}

impl Linear {
    /// Whether the argument of the activation must be kept for the backward pass.
    fn keeps_argument(&self) -> bool {
        !self.activation.derives_from_output()
    }

    /// Position of what is added.
    fn addend(&self) -> Option<usize> {
        self.adds.then_some(2 + usize::from(self.bias))
    }
}

/// [rows, cols]: all leading axes as one.
fn flatten(graph: &mut Graph, x: Value) -> Result<Value> {
    let ty = graph.ty(x)?;
    let shape = [ty.rows(), ty.cols()];
    graph.reshape(x, shape)
}

impl Op for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (x, w) = (&inputs[0], &inputs[1]);
        want_float("linear", "x", x)?;
        let (Some(&width), [out, columns]) = (x.shape.last(), &w.shape[..]) else {
            return mismatch("linear", "x [..., in] and weight [out, in]", format!("{x} and {w}"));
        };
        if *columns != width || w.dtype != x.dtype {
            return mismatch("linear", format!("weight {}[out, {width}] for x {x}", x.dtype), w.to_string());
        }
        if self.bias {
            want("linear", "bias", &inputs[2], x.dtype, &[*out])?;
        }
        let mut shape = x.shape.clone();
        shape[x.shape.len() - 1] = *out;
        let y = x.with(shape);
        if let Some(addend) = self.addend() {
            want("linear", "what is added", &inputs[addend], y.dtype, &y.shape)?;
        }
        Ok(if self.keeps_argument() { vec![y.clone(), y] } else { vec![y] })
    }
    fn accumulating(&self) -> Option<Arc<dyn Op>> {
        let can = self.activation == Activation::Identity && !self.adds;
        can.then(|| Arc::new(Self { adds: true, ..self.clone() }) as Arc<dyn Op>)
    }
    fn rounded(&self) -> Option<WithRounded> {
        let linear = self.clone();
        Some(Box::new(move |weight| Arc::new(RoundedLinear { linear, weight })))
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let Some(dy) = b.grad(0) else { return Ok(()) };
        if let Some(addend) = self.addend() {
            b.set(addend, dy);
        }
        let seen = b.outputs[usize::from(self.keeps_argument())];
        let dz = b.graph.activation_grad(self.activation, seen, dy)?;
        let dz = flatten(b.graph, dz)?;
        if self.bias && b.needs(2) {
            let shape = b.graph.shape(b.inputs[2])?.to_vec();
            let db = b.graph.sum_to(dz, shape)?;
            b.set(2, db);
        }
        if b.needs(0) {
            let dx = b.graph.matmul(dz, b.inputs[1])?;
            let shape = b.graph.shape(b.inputs[0])?.to_vec();
            let dx = b.graph.reshape(dx, shape)?;
            b.set(0, dx);
        }
        if b.needs(1) {
            // Last, so that the product can be made to add into an earlier gradient of the same weight.
            let x = flatten(b.graph, b.inputs[0])?;
            let dw = b.graph.matmul_with(dz, x, true, false)?;
            b.set(1, dw);
        }
        Ok(())
    }
    fn scratch(&self, inputs: &[TensorType], outputs: &[TensorType], threads: usize) -> usize {
        let (m, n, k) = (inputs[0].rows(), outputs[0].cols(), inputs[0].cols());
        dispatch_float!(inputs[0].dtype, T => scratch_len::<T>(m, n, k, threads) * size_of::<T>())
    }
    fn kept(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Option<Kept> {
        let (m, n, k) = (inputs[0].rows(), outputs[0].cols(), inputs[0].cols());
        dispatch_float!(inputs[0].dtype, T => {
            kept_len::<T>(m, n, k).map(|len| Kept { input: 1, bytes: len * size_of::<T>() })
        })
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (m, n, k) = (io.ty(0).rows(), io.out_ty(0).cols(), io.ty(0).cols());
        dispatch_float!(io.dtype(), T => {
            let kept = kept_len::<T>(m, n, k).and_then(|len| io.kept::<T>(len));
            let kept = kept.map(|(packed, filled)| KeptRight { packed, filled });
            let (x, w) = (io.input::<T>(0), io.input::<T>(1));
            let bias = self.bias.then(|| io.input::<T>(2));
            let addend = self.addend().map(|i| io.input::<T>(i));
            let scratch = io.scratch::<T>(scratch_len::<T>(m, n, k, io.pool.threads()));
            let (a, b) = (Mat::rows(x, k), Mat::transposed(w, k));
            let product = Product { m, n, k, a, b, accumulate: false, precision: io.precision };
            // If the argument of the activation must be kept, it is computed in place and the activation
            // written elsewhere.
            match self.keeps_argument().then(|| io.output_if_used::<T>(1)).flatten() {
                Some(z) => {
                    gemm_keeping(io.pool, scratch, kept, product, z, n, |tile| {
                        finish(tile, bias, Activation::Identity, None);
                    });
                    if let Some(y) = io.output_if_used::<T>(0) {
                        let z = &*z;
                        io.pool.rows(m, 8 * n, RowsMut::new(y, n), |first, y| {
                            y.copy_from_slice(&z[first * n..][..y.len()]);
                            apply(self.activation, y);
                        });
                    }
                }
                None => gemm_keeping(io.pool, scratch, kept, product, io.output::<T>(0), n, |tile| {
                    finish(tile, bias, self.activation, addend.map(|addend| (addend, n)));
                }),
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (m, n, k) = (launch.ty(0).rows(), launch.out_ty(0).cols(), launch.ty(0).cols());
        let (y, z) = (launch.output(0), if self.keeps_argument() { launch.output(1) } else { 0 });
        let bias = launch.input_if(self.bias.then_some(2));
        let simple = matches!(self.activation, Activation::Identity | Activation::Relu) && z == 0;
        let product = GpuProduct {
            bias: if simple { bias } else { 0 },
            relu: simple && self.activation == Activation::Relu,
            addend: launch.input_if(self.addend()),
            // Layers with few outputs are routers and heads, whose results are compared with each other.
            exact: n <= 16,
            c: if y != 0 { y } else { z },
            ..GpuProduct::new(m, n, k, (launch.input(0), false), (launch.input(1), true))
        };
        launch.product(&product)?;
        if simple {
            return Ok(());
        }
        let kind = self.activation as i32;
        let args = BiasActivationArgs { y, z, x: product.c, bias, columns: n, n: m * n, kind };
        launch.elements("bias_activation", m * n, args)
    }
}

/// [`Linear`] with a weight in bf16: inputs x, [bias], [what is added]; output y. Only for a CPU.
#[derive(Debug)]
struct RoundedLinear {
    linear: Linear,
    weight: Arc<RoundedWeight>,
}

impl Op for RoundedLinear {
    fn name(&self) -> &'static str {
        "rounded_linear"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let [out, columns] = self.weight.shape();
        let mut shape = inputs[0].shape.clone();
        match shape.last_mut() {
            Some(width) if *width == columns => *width = out,
            _ => return mismatch("linear", format!("x [..., {columns}]"), inputs[0].to_string()),
        }
        Ok(vec![inputs[0].with(shape)])
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], threads: usize) -> usize {
        self.weight.scratch_len(inputs[0].rows(), threads) * size_of::<f32>()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let [n, _] = self.weight.shape();
        let bias = self.linear.bias.then(|| io.input::<f32>(1));
        let addend = self.linear.addend().map(|i| io.input::<f32>(i - 1));
        let scratch = io.scratch::<f32>(self.weight.scratch_len(io.ty(0).rows(), io.pool.threads()));
        self.weight.multiply(io.pool, scratch, io.input::<f32>(0), io.output::<f32>(0), |tile| {
            finish(tile, bias, self.linear.activation, addend.map(|addend| (addend, n)));
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, _: &mut Launch<'_>) -> Result<()> {
        mismatch("linear", "weights of f32 on a GPU", "weights of bf16")
    }
}

/// Adds the bias to a tile of y, applies the activation, and adds the same tile of a matrix with so many columns.
fn finish<T: crate::cpu::float::Float>(
    mut tile: Tile<T>,
    bias: Option<&[T]>,
    activation: Activation,
    addend: Option<(&[T], usize)>,
) {
    for row in tile.row..tile.row + tile.rows {
        let (col, cols) = (tile.col, tile.cols);
        let y = tile.row_mut(row);
        if let Some(bias) = bias {
            add_vector(y, &bias[col..col + cols]);
        }
        apply(activation, y);
        if let Some((addend, columns)) = addend {
            add_vector(y, &addend[row * columns + col..][..cols]);
        }
    }
}

simd_fn! {
    fn add_vector<T>(y: &mut [T], x: &[T]) {
        add_assign(y, x);
    }
}
