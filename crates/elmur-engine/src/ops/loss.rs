//! Losses: cross-entropy with label smoothing and ignored targets, and masked mean squared error.
//!
//! Both are means over the elements that count; if none counts, the loss and its gradients are zero. With
//! weights, cross-entropy is a weighted sum.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::RowsMut;
use crate::cpu::simd::{max, reduce, simd_fn, sum};
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{IndexBound, Io, Op, dispatch_float, mismatch, want, want_float, want_index};
use crate::ops::gather::Indices;
use crate::ops::reduce::sum_all;
use crate::types::{DType, TensorType};

/// Settings of [`Graph::cross_entropy`].
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropy {
    /// Share e of the target spread evenly over all classes: (1 - e) CE + e mean_c(-log p_c).
    pub label_smoothing: f64,
    /// Targets with this value do not count (-10 in the published data, -100 in PyTorch).
    pub ignored: i64,
}

impl Graph {
    /// Mean cross-entropy (a scalar) of logits [..., C] against class targets [...] of i32 or i64.
    pub fn cross_entropy(&mut self, logits: Value, targets: Value, settings: CrossEntropy) -> Result<Value> {
        let like = self.ty(logits)?.dtype;
        let count = self.push1(CountTargets { ignored: settings.ignored, like }, &[targets])?;
        self.push1(CrossEntropyOp { settings, weighted: false }, &[logits, targets, count])
    }

    /// Σ w CE (a scalar): cross-entropy of logits [..., C] against class targets [...] of i32 or i64, added up
    /// with the weights w [...]. Gradients reach the logits only. A mean over n rows has weights of 1 / n.
    pub fn weighted_cross_entropy(
        &mut self,
        logits: Value,
        targets: Value,
        weights: Value,
        settings: CrossEntropy,
    ) -> Result<Value> {
        self.push1(CrossEntropyOp { settings, weighted: true }, &[logits, targets, weights])
    }

    /// Number of rows (a float) whose target class has the largest logit, for logits [..., C] and targets
    /// [...] of i32 or i64. Targets outside 0..C are not counted. Not differentiable.
    pub fn count_correct(&mut self, logits: Value, targets: Value) -> Result<Value> {
        self.push1(CountCorrect, &[logits, targets])
    }

    /// Mean of (prediction - target)² (a scalar) over the elements where `mask` holds, or over all without a
    /// mask.
    ///
    /// The mask is bool and has the shape of the prediction, or lacks its last axis.
    pub fn mse(&mut self, prediction: Value, target: Value, mask: Option<Value>) -> Result<Value> {
        let mut inputs = vec![prediction, target];
        inputs.extend(mask);
        self.push1(Mse, &inputs)
    }
}

/// The number of targets that are not ignored, but at least 1, as a float.
///
/// An op of its own, so that on a GPU the gradient of a mean waits for nothing but the logits.
#[derive(Debug)]
struct CountTargets {
    ignored: i64,
    like: DType,
}

impl Op for CountTargets {
    fn name(&self) -> &'static str {
        "count_targets"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_index("cross_entropy", "targets", &inputs[0])?;
        Ok(vec![TensorType::new(self.like, [])])
    }
    fn stops_gradient(&self) -> bool {
        true
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let targets = Indices::new(io, 0);
        let counted = (0..io.ty(0).len()).filter(|row| targets.get(*row) != self.ignored).count();
        dispatch_float!(self.like, T => io.output::<T>(0)[0] = T::of(counted.max(1) as f64));
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let wide = launch.ty(0).dtype == DType::I64;
        let args = args![launch.output(0), launch.input(0), wide, self.ignored as u64, launch.ty(0).len()];
        launch.kernel("count_targets", [1, 1, 1], 1024, 0, args)
    }
}

/// Neighbouring threads of a GPU that share a row of so many classes.
#[cfg(feature = "cuda")]
fn lanes(classes: usize) -> usize {
    classes.next_power_of_two().min(32)
}

/// How kernels go through rows of classes and add up one number of each: in blocks of 256 threads, of which the
/// last to end adds up what the others found.
#[cfg(feature = "cuda")]
fn row_sums(launch: &mut Launch<'_>, rows: usize, classes: usize) -> Result<(usize, RowSums)> {
    // Four rows for each group of threads, and no more blocks than one block can add up.
    let blocks = (rows * lanes(classes)).div_ceil(4 * 256).clamp(1, 128);
    let partial = launch.scratch(8 * blocks)?;
    let counter = launch.scratch(4)?;
    Ok((blocks, RowSums { partial, counter, rows, classes, lanes: lanes(classes) as i32 }))
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// How blocks divide rows of classes, and where they leave their sums.
    struct RowSums in "loss.cu" {
        partial: u64, counter: u64, rows: usize, classes: usize, lanes: i32,
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// What cross entropy writes, and its settings.
    struct CrossEntropyArgs in "loss.cu" {
        loss: u64, count: u64, weights: u64, ignored: i64, smoothing: f32, wide: i32,
    }
}

/// Inputs logits, targets, and weights if `weighted`, else the number of targets that count; output the loss.
#[derive(Debug, Clone, Copy)]
struct CrossEntropyOp {
    settings: CrossEntropy,
    weighted: bool,
}

impl CrossEntropyOp {
    fn bound(&self, classes: usize) -> IndexBound {
        IndexBound { input: 1, what: "class", limit: classes, ignored: Some(self.settings.ignored) }
    }

    fn check(&self, targets: &Indices<'_>, classes: usize) -> Result<()> {
        match targets {
            Indices::I32(t) => self.bound(classes).check("cross_entropy", t),
            Indices::I64(t) => self.bound(classes).check("cross_entropy", t),
        }
    }

    /// Addresses of the number of targets that count and of the weights; 0 for the one that there is not.
    #[cfg(feature = "cuda")]
    fn scales(&self, launch: &Launch<'_>) -> (u64, u64) {
        let third = launch.input(2);
        if self.weighted { (0, third) } else { (third, 0) }
    }
}

impl Op for CrossEntropyOp {
    fn name(&self) -> &'static str {
        "cross_entropy"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        const OP: &str = "cross_entropy";
        let (logits, targets) = (&inputs[0], &inputs[1]);
        want_float(OP, "logits", logits)?;
        want_index(OP, "targets", targets)?;
        if !(0.0..=1.0).contains(&self.settings.label_smoothing) {
            return mismatch(OP, "label smoothing in 0..=1", self.settings.label_smoothing.to_string());
        }
        match logits.shape.split_last() {
            Some((_, lead)) if lead == targets.shape => {}
            _ => return mismatch(OP, "logits [..., C] and targets [...]", format!("{logits} and {targets}")),
        }
        if self.weighted {
            want(OP, "weights", &inputs[2], logits.dtype, &targets.shape)?;
        }
        Ok(vec![logits.with([])])
    }
    fn indices(&self, inputs: &[TensorType]) -> Vec<IndexBound> {
        vec![self.bound(inputs[0].cols())]
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(grad) = b.grad(0) {
            let inputs = [b.inputs[0], b.inputs[1], b.inputs[2], grad];
            let dlogits = b.graph.push1(CrossEntropyGrad(*self), &inputs)?;
            b.set(0, dlogits);
        }
        Ok(())
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], _: usize) -> usize {
        inputs[0].rows() * inputs[0].dtype.size()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (rows, classes) = (io.ty(0).rows(), io.ty(0).cols());
        let targets = Indices::new(io, 1);
        self.check(&targets, classes)?;
        dispatch_float!(io.dtype(), T => {
            let third = io.input::<T>(2);
            let weights = self.weighted.then_some(third);
            let losses = io.scratch::<T>(rows);
            let smoothing = T::of(self.settings.label_smoothing);
            for (row, x) in io.input::<T>(0).chunks_exact(classes).enumerate() {
                let target = targets.get(row);
                losses[row] = T::ZERO;
                if target != self.settings.ignored {
                    let log_sum = log_sum_exp(x);
                    let hard = log_sum - x[target as usize];
                    // Without smoothing, infinite logits of other classes must not matter.
                    let even = if smoothing == T::ZERO { T::ZERO } else { smoothing * (log_sum - mean(x)) };
                    let loss = (T::ONE - smoothing) * hard + even;
                    losses[row] = match weights {
                        None => loss,
                        // Where the weight is 0, an infinite loss must not matter.
                        Some(weights) if weights[row] == T::ZERO => T::ZERO,
                        Some(weights) => weights[row] * loss,
                    };
                }
            }
            let total = sum_all(losses);
            io.output::<T>(0)[0] = if self.weighted { total } else { total / third[0] };
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, classes) = (launch.ty(0).rows(), launch.ty(0).cols());
        let (count, weights) = self.scales(launch);
        let args = CrossEntropyArgs {
            loss: launch.output(0),
            count,
            weights,
            ignored: self.settings.ignored,
            smoothing: self.settings.label_smoothing as f32,
            wide: i32::from(launch.ty(1).dtype == DType::I64),
        };
        let (blocks, sums) = row_sums(launch, rows, classes)?;
        let args = args![launch.input(0), launch.input(1), args, sums];
        launch.kernel("cross_entropy", [blocks, 1, 1], 256, 0, args)
    }
}

simd_fn! {
    fn log_sum_exp<T>(x: &[T]) -> T {
        let top = max(x);
        top + reduce(x, |x| (x - top).exp()).ln()
    }
}

simd_fn! {
    fn mean<T>(x: &[T]) -> T {
        sum(x) / T::of(x.len() as f64)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Gradient of the logits.
    struct CrossEntropyGradArgs in "loss.cu" {
        dx: u64, logits: u64, count: u64, grad: u64, weights: u64, targets: u64, ignored: i64, rows: usize,
        classes: usize, smoothing: f32, wide: i32, lanes: i32,
    }
}

/// dlogits = grad w / count (p - (1 - e) onehot - e / C), w = 1 without weights; zero for ignored rows.
#[derive(Debug)]
struct CrossEntropyGrad(CrossEntropyOp);

impl Op for CrossEntropyGrad {
    fn name(&self) -> &'static str {
        "cross_entropy_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].clone()])
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (rows, classes) = (io.ty(0).rows(), io.ty(0).cols());
        let (CrossEntropyOp { settings, weighted }, targets) = (self.0, Indices::new(io, 1));
        self.0.check(&targets, classes)?;
        dispatch_float!(io.dtype(), T => {
            let (logits, third, grad) = (io.input::<T>(0), io.input::<T>(2), io.input::<T>(3)[0]);
            let smoothing = T::of(settings.label_smoothing);
            let even = smoothing / T::of(classes as f64);
            io.pool.rows(rows, 16 * classes, RowsMut::new(io.output::<T>(0), classes), |first, dx| {
                for (i, dx) in dx.chunks_exact_mut(classes).enumerate() {
                    let row = first + i;
                    let target = targets.get(row);
                    if target == settings.ignored {
                        dx.fill(T::ZERO);
                        continue;
                    }
                    let scale = if weighted { grad * third[row] } else { grad / third[0] };
                    let x = &logits[row * classes..][..classes];
                    softmax_minus(x, log_sum_exp(x), even, scale, dx);
                    dx[target as usize] -= scale * (T::ONE - smoothing);
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, classes) = (launch.ty(0).rows(), launch.ty(0).cols());
        let (count, weights) = self.0.scales(launch);
        let args = CrossEntropyGradArgs {
            dx: launch.output(0),
            logits: launch.input(0),
            count,
            grad: launch.input(3),
            weights,
            targets: launch.input(1),
            ignored: self.0.settings.ignored,
            rows,
            classes,
            smoothing: self.0.settings.label_smoothing as f32,
            wide: i32::from(launch.ty(1).dtype == DType::I64),
            lanes: lanes(classes) as i32,
        };
        launch.elements("cross_entropy_grad", rows * lanes(classes), args)
    }
}

simd_fn! {
    fn softmax_minus<T>(x: &[T], lse: T, even: T, scale: T, dx: &mut [T]) {
        dx.iter_mut().zip(x).for_each(|(dx, x)| *dx = scale * ((*x - lse).exp() - even));
    }
}

#[derive(Debug)]
struct CountCorrect;

impl Op for CountCorrect {
    fn name(&self) -> &'static str {
        "count_correct"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (logits, targets) = (&inputs[0], &inputs[1]);
        want_float("count_correct", "logits", logits)?;
        want_index("count_correct", "targets", targets)?;
        match logits.shape.split_last() {
            Some((_, lead)) if lead == targets.shape => Ok(vec![logits.with([])]),
            _ => {
                let got = format!("{logits} and {targets}");
                mismatch("count_correct", "logits [..., C] and targets [...]", got)
            }
        }
    }
    fn stops_gradient(&self) -> bool {
        true
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let targets = Indices::new(io, 1);
        dispatch_float!(io.dtype(), T => {
            let rows = io.input::<T>(0).chunks_exact(io.ty(0).cols()).enumerate();
            let correct = rows.filter(|(row, x)| {
                let score = usize::try_from(targets.get(*row)).ok().and_then(|t| x.get(t));
                score.is_some_and(|score| x.iter().all(|other| other <= score))
            });
            io.output::<T>(0)[0] = T::of(correct.count() as f64);
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, classes) = (launch.ty(0).rows(), launch.ty(0).cols());
        let wide = launch.ty(1).dtype == DType::I64;
        let (blocks, sums) = row_sums(launch, rows, classes)?;
        let args = args![launch.output(0), launch.input(0), launch.input(1), wide, sums];
        launch.kernel("count_correct", [blocks, 1, 1], 256, 0, args)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Mean squared difference of x and t where the mask holds.
    struct MseArgs in "loss.cu" {
        loss: u64, count: u64, x: u64, t: u64, mask: u64, per: usize, n: usize,
    }
}

#[derive(Debug)]
struct Mse;

/// Mask of element `i` of a prediction with `cols` columns, given a mask of full or reduced shape.
#[inline(always)]
fn counts(mask: Option<&[bool]>, i: usize, len: usize) -> bool {
    mask.is_none_or(|mask| mask[i / (len / mask.len())])
}

/// Address of the mask operand (0 if there is none), and elements that share an entry of it.
#[cfg(feature = "cuda")]
fn cuda_mask(launch: &Launch<'_>, input: usize) -> (u64, usize) {
    match launch.inputs.get(input) {
        Some(mask) => (launch.input(input), launch.ty(0).len() / mask.ty.len()),
        None => (0, 1),
    }
}

impl Op for Mse {
    fn name(&self) -> &'static str {
        "mse"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let prediction = &inputs[0];
        want_float("mse", "prediction", prediction)?;
        want("mse", "target", &inputs[1], prediction.dtype, &prediction.shape)?;
        if let Some(mask) = inputs.get(2) {
            let lead = prediction.shape.split_last().map_or(&[][..], |(_, lead)| lead);
            let shape = if mask.shape == lead { lead } else { &prediction.shape[..] };
            want("mse", "mask", mask, DType::Bool, shape)?;
        }
        // Loss, number of elements that count.
        Ok(vec![prediction.with([]), prediction.with([])])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(grad) = b.grad(0) {
            let mut inputs = vec![b.inputs[0], b.inputs[1], b.outputs[1], grad];
            inputs.extend(b.inputs.get(2));
            let dx = b.graph.push1(MseGrad, &inputs)?;
            b.set(0, dx);
            if b.needs(1) {
                let dt = b.graph.scale(dx, -1.0)?;
                b.set(1, dt);
            }
        }
        Ok(())
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], _: usize) -> usize {
        inputs[0].bytes()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let mask = (io.inputs.len() > 2).then(|| io.input::<bool>(2));
        dispatch_float!(io.dtype(), T => {
            let (x, t) = (io.input::<T>(0), io.input::<T>(1));
            let squares = io.scratch::<T>(x.len());
            let mut counted = 0usize;
            for (i, square) in squares.iter_mut().enumerate() {
                let counts = counts(mask, i, x.len());
                counted += usize::from(counts);
                *square = if counts { (x[i] - t[i]) * (x[i] - t[i]) } else { T::ZERO };
            }
            let count = T::of(counted.max(1) as f64);
            if let Some(loss) = io.output_if_used::<T>(0) {
                loss[0] = sum_all(squares) / count;
            }
            if let Some(out) = io.output_if_used::<T>(1) {
                out[0] = count;
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (mask, per) = cuda_mask(launch, 2);
        let n = launch.ty(0).len();
        let args = MseArgs {
            loss: launch.output(0),
            count: launch.output(1),
            x: launch.input(0),
            t: launch.input(1),
            mask,
            per,
            n,
        };
        launch.kernel("mse", [1, 1, 1], 1024, 0, args)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Gradient of x.
    struct MseGradArgs in "loss.cu" {
        dx: u64, x: u64, t: u64, count: u64, grad: u64, mask: u64, per: usize, n: usize,
    }
}

/// dx = 2 grad / count (x - t) where the mask holds.
#[derive(Debug)]
struct MseGrad;

impl Op for MseGrad {
    fn name(&self) -> &'static str {
        "mse_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].clone()])
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let mask = (io.inputs.len() > 4).then(|| io.input::<bool>(4));
        dispatch_float!(io.dtype(), T => {
            let (x, t) = (io.input::<T>(0), io.input::<T>(1));
            let scale = T::of(2.0) * io.input::<T>(3)[0] / io.input::<T>(2)[0];
            for (i, dx) in io.output::<T>(0).iter_mut().enumerate() {
                *dx = if counts(mask, i, x.len()) { scale * (x[i] - t[i]) } else { T::ZERO };
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (mask, per) = cuda_mask(launch, 4);
        let n = launch.ty(0).len();
        let args = MseGradArgs {
            dx: launch.output(0),
            x: launch.input(0),
            t: launch.input(1),
            count: launch.input(2),
            grad: launch.input(3),
            mask,
            per,
            n,
        };
        launch.elements("mse_grad", n, args)
    }
}
