//! AdamW with decoupled weight decay, and clipping by the global gradient norm, as one op over all
//! parameters.
//!
//! ```text
//! g *= min(1, max_norm / (norm + 1e-6))
//! p *= 1 - lr wd;   m = b1 m + (1 - b1) g;   v = b2 v + (1 - b2) g²
//! p -= lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//! ```

use crate::cpu::float::Float;
use crate::cpu::simd::{dot, simd_fn};
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want, want_float};
use crate::types::{DType, TensorType};

/// AdamW settings of one group of parameters.
#[derive(Debug, Clone, Copy)]
pub struct AdamW {
    /// Decay of the moments.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Multiplies the learning rate of this group.
    pub lr_scale: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01, lr_scale: 1.0 }
    }
}

/// Name of the state that counts optimizer steps.
pub const STEP_STATE: &str = "adamw.step";

impl Graph {
    /// sqrt(Σ g²) over all elements of all tensors: a scalar.
    pub fn global_norm(&mut self, grads: &[Value]) -> Result<Value> {
        self.push1(GlobalNorm, grads)
    }

    /// Updates each parameter by its gradient, in place.
    ///
    /// `lr` is a scalar of the parameters' type. `clip` scales all gradients by min(1, max / (norm + 1e-6))
    /// for a norm from [`Graph::global_norm`]. Moments become states `adamw.m.<param>` and `adamw.v.<param>`;
    /// all calls in one graph share the step counter [`STEP_STATE`]. Call once per group of parameters.
    ///
    /// Returns the new parameters in the order of `params`, for what must read them in the same run, such as
    /// [`Graph::moving_average`]: the parameters themselves are read as they were before the run.
    pub fn adamw(
        &mut self,
        settings: AdamW,
        lr: Value,
        clip: Option<(Value, f64)>,
        params: &[(Value, Value)],
    ) -> Result<Vec<Value>> {
        if params.is_empty() {
            return Ok(Vec::new());
        }
        let step = match self.find(STEP_STATE) {
            Some(step) => step,
            None => {
                let step = self.state(STEP_STATE, DType::I64, [])?;
                let one = self.scalar(DType::I64, 1.0)?;
                let next = self.add(step, one)?;
                self.update(step, next)?;
                step
            }
        };
        let mut inputs = vec![lr, step];
        inputs.extend(clip.map(|(norm, _)| norm));
        let mut targets = Vec::new();
        for &(param, grad) in params {
            let ty = self.ty(param)?.clone();
            self.check("adamw", grad)?;
            let name = self.describe(param);
            let m = self.state(&format!("adamw.m.{name}"), ty.dtype, ty.shape.clone())?;
            let v = self.state(&format!("adamw.v.{name}"), ty.dtype, ty.shape)?;
            inputs.extend([param, grad, m, v]);
            targets.extend([param, m, v]);
        }
        if let Some(taken) = targets.iter().find(|t| self.updates.iter().any(|(u, _)| u == *t)) {
            let got = format!("a second for `{}`", self.describe(*taken));
            return mismatch("adamw", "one update per parameter", got);
        }
        let op = AdamWOp { settings, max_norm: clip.map(|(_, max)| max) };
        let outputs = self.push(op, &inputs)?;
        for (target, new) in targets.into_iter().zip(&outputs) {
            self.update(target, *new)?;
        }
        Ok(outputs.into_iter().step_by(3).collect())
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// A table of parameters and moments, and the settings of their update.
    struct AdamWArgs in "optim.cu" {
        table: u64, lr: u64, norm: u64, step: u64, b1: f64, b2: f64, log_b1: f64, log_b2: f64,
        max_norm: f32, eps: f32, weight_decay: f32, lr_scale: f32, settled: usize,
    }
}

#[derive(Debug)]
struct AdamWOp {
    settings: AdamW,
    max_norm: Option<f64>,
}

/// Elements of one task.
const CHUNK: usize = 8192;

/// Number of tasks that one tensor of `len` elements is divided into.
pub(crate) fn chunks(len: usize) -> usize {
    len.div_ceil(CHUNK)
}

/// The tensor that task `task` works on, and the range of elements, where the tasks of tensor 0 come first.
/// `len` gives the elements of a tensor.
pub(crate) fn chunk(task: usize, len: impl Fn(usize) -> usize) -> (usize, std::ops::Range<usize>) {
    let (mut tensor, mut chunk) = (0, task);
    while chunk >= chunks(len(tensor)) {
        chunk -= chunks(len(tensor));
        tensor += 1;
    }
    (tensor, chunk * CHUNK..len(tensor).min((chunk + 1) * CHUNK))
}

/// Elements of one block of threads on a GPU.
#[cfg(feature = "cuda")]
const GPU_CHUNK: usize = 2048;

/// First element and number of elements of each block's part of a tensor.
#[cfg(feature = "cuda")]
pub(crate) fn gpu_chunks(len: usize) -> impl Iterator<Item = (u64, u64)> {
    (0..len).step_by(GPU_CHUNK).map(move |start| (start as u64, GPU_CHUNK.min(len - start) as u64))
}

impl AdamWOp {
    /// Position of the first parameter among the inputs.
    fn first(&self) -> usize {
        2 + usize::from(self.max_norm.is_some())
    }

    /// (input, output) of every parameter and moment.
    fn pairs(&self, inputs: usize) -> impl Iterator<Item = (usize, usize)> {
        let first = self.first();
        let group = move |i: usize| {
            let input = first + 4 * i;
            [(input, 3 * i), (input + 2, 3 * i + 1), (input + 3, 3 * i + 2)]
        };
        (0..(inputs - first) / 4).flat_map(group)
    }
}

impl Op for AdamWOp {
    fn name(&self) -> &'static str {
        "adamw"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        const OP: &str = "adamw";
        let lr = &inputs[0];
        want_float(OP, "lr", lr)?;
        want(OP, "lr", lr, lr.dtype, &[])?;
        want(OP, "step", &inputs[1], DType::I64, &[])?;
        if self.max_norm.is_some() {
            want(OP, "norm", &inputs[2], lr.dtype, &[])?;
        }
        let AdamW { betas, eps, .. } = self.settings;
        if !(0.0..1.0).contains(&betas.0) || !(0.0..1.0).contains(&betas.1) || eps < 0.0 {
            return mismatch(OP, "betas in 0..1 and eps of at least 0", format!("{:?}", self.settings));
        }
        let mut outputs = Vec::new();
        for group in inputs[self.first()..].chunks_exact(4) {
            want(OP, "parameters of lr's type:", &group[0], lr.dtype, &group[0].shape)?;
            want(OP, "gradient", &group[1], lr.dtype, &group[0].shape)?;
            outputs.extend([group[0].clone(), group[2].clone(), group[3].clone()]);
        }
        Ok(outputs)
    }
    fn in_place(&self, inputs: usize) -> Vec<(usize, usize)> {
        self.pairs(inputs).collect()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_float!(io.dtype(), T => {
            let AdamW { betas: (b1, b2), eps, weight_decay, lr_scale } = self.settings;
            let lr = io.input::<T>(0)[0].to_f64() * lr_scale;
            let t = (io.input::<i64>(1)[0] + 1) as f64;
            let clip = self.max_norm.map_or(1.0, |max| (max / (io.input::<T>(2)[0].to_f64() + 1e-6)).min(1.0));
            let rates = Rates {
                clip: T::of(clip),
                decay: T::of(1.0 - lr * weight_decay),
                b1: T::of(b1),
                b2: T::of(b2),
                new1: T::of(1.0 - b1),
                new2: T::of(1.0 - b2),
                rate: T::of(lr / (1.0 - b1.powf(t))),
                root: T::of(1.0 / (1.0 - b2.powf(t)).sqrt()),
                eps: T::of(eps),
            };
            let first = self.first();
            let count = (io.inputs.len() - first) / 4;
            for (input, output) in self.pairs(io.inputs.len()) {
                io.in_place::<T>(input, output);
            }
            let len = |i: usize| io.ty(first + 4 * i).len();
            io.pool.run((0..count).map(|i| chunks(len(i))).sum(), |task, _| {
                let (i, at) = chunk(task, len);
                let g = &io.input::<T>(first + 4 * i + 1)[at.clone()];
                // SAFETY: tasks own disjoint chunks of the outputs, which hold the old values by now.
                let [p, m, v] = [0, 1, 2].map(|o| unsafe {
                    let data = io.outputs[3 * i + o].ptr.cast::<T>();
                    std::slice::from_raw_parts_mut(data.add(at.start), at.len())
                });
                update(&rates, g, p, m, v);
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let first = self.first();
        let mut table = Vec::new();
        for i in 0..(launch.inputs.len() - first) / 4 {
            let at = first + 4 * i;
            let [p, g, m, v] = [0, 1, 2, 3].map(|k| launch.input(at + k));
            let [new_p, new_m, new_v] = [0, 1, 2].map(|k| launch.output(3 * i + k));
            for (offset, count) in gpu_chunks(launch.ty(at).len()) {
                table.extend([p, m, v, g, new_p, new_m, new_v].map(|address| address + 4 * offset));
                table.push(count);
            }
        }
        let chunks = table.len() / 8;
        let table = launch.table(&table)?;
        let AdamW { betas: (b1, b2), eps, weight_decay, lr_scale } = self.settings;
        let norm = self.max_norm.map(|_| 2);
        let settled = (0..launch.inputs.len()).all(|i| Some(i) == norm || launch.is_settled(i));
        let args = AdamWArgs {
            table,
            lr: launch.input(0),
            norm: launch.input_if(norm),
            step: launch.input(1),
            b1,
            b2,
            log_b1: b1.ln(),
            log_b2: b2.ln(),
            max_norm: self.max_norm.unwrap_or(0.0) as f32,
            eps: eps as f32,
            weight_decay: weight_decay as f32,
            lr_scale: lr_scale as f32,
            settled: usize::from(settled),
        };
        launch.kernel("adamw", [chunks, 1, 1], 256, 0, args)
    }
}

/// The scalars of one step.
struct Rates<T> {
    clip: T,
    decay: T,
    b1: T,
    b2: T,
    /// 1 - b1 and 1 - b2, subtracted in f64: in f32 the latter would lose four digits.
    new1: T,
    new2: T,
    rate: T,
    root: T,
    eps: T,
}

simd_fn! {
    fn update<T>(rates: &Rates<T>, g: &[T], p: &mut [T], m: &mut [T], v: &mut [T]) {
        let &Rates { clip, decay, b1, b2, new1, new2, rate, root, eps } = rates;
        for (((g, p), m), v) in g.iter().zip(p).zip(m).zip(v) {
            let g = *g * clip;
            *m = b1 * *m + new1 * g;
            *v = b2 * *v + new2 * g * g;
            *p = *p * decay - rate * *m / (v.sqrt() * root + eps);
        }
    }
}

#[derive(Debug)]
struct GlobalNorm;

impl Op for GlobalNorm {
    fn name(&self) -> &'static str {
        "global_norm"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let Some(first) = inputs.first() else {
            return mismatch("global_norm", "at least one tensor", "none");
        };
        want_float("global_norm", "gradients", first)?;
        if let Some(other) = inputs.iter().find(|ty| ty.dtype != first.dtype) {
            return mismatch("global_norm", format!("gradients of {}", first.dtype), other.to_string());
        }
        Ok(vec![first.with([])])
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], _: usize) -> usize {
        inputs.iter().map(|ty| chunks(ty.len())).sum::<usize>() * size_of::<f64>()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let len = |i: usize| io.ty(i).len();
        let total = (0..io.inputs.len()).map(|i| chunks(len(i))).sum();
        let partial = io.scratch::<f64>(total);
        dispatch_float!(io.dtype(), T => {
            io.pool.blocks(total, 1, crate::cpu::pool::RowsMut::new(&mut *partial, 1), |task, sum, _| {
                let (i, at) = chunk(task, len);
                sum[0] = squares(&io.input::<T>(i)[at]).to_f64();
            });
            io.output::<T>(0)[0] = T::of(partial.iter().sum::<f64>().sqrt());
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let mut table = Vec::new();
        for i in 0..launch.inputs.len() {
            for (offset, count) in gpu_chunks(launch.ty(i).len()) {
                table.extend([launch.input(i) + 4 * offset, count]);
            }
        }
        let chunks = table.len() / 2;
        let (table, partial, counter) =
            (launch.table(&table)?, launch.scratch(8 * chunks)?, launch.scratch(4)?);
        let args = args![launch.output(0), partial, counter, table];
        launch.kernel("global_norm", [chunks, 1, 1], 256, 0, args)
    }
}

simd_fn! {
    fn squares<T>(g: &[T]) -> T {
        dot(g, g)
    }
}
