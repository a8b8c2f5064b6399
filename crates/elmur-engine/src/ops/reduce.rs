//! Sums, means, and their transpose, broadcasting. Large sums are taken in fixed blocks, so their bits do not
//! depend on the number of threads.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::{Pool, RowsMut};
use crate::cpu::simd::{add_assign, simd_fn, sum};
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Node, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want, want_float};
use crate::ops::broadcast::{broadcast_steps, row_offset};
use crate::types::TensorType;

impl Graph {
    /// Sum of all elements: a scalar.
    pub fn sum(&mut self, x: Value) -> Result<Value> {
        self.sum_to(x, [])
    }

    /// Mean of all elements: a scalar.
    pub fn mean(&mut self, x: Value) -> Result<Value> {
        let len = self.ty(x)?.len();
        let sum = self.sum(x)?;
        self.scale(sum, 1.0 / len as f64)
    }

    /// Sum over the axes along which `shape` has extent 1 or is missing on the left: the reverse of
    /// broadcasting. A sum that the graph has already is not computed again.
    pub fn sum_to(&mut self, x: Value, shape: impl Into<Vec<usize>>) -> Result<Value> {
        let shape = shape.into();
        if *self.shape(x)? == *shape {
            return Ok(x);
        }
        if let Some(sum) = self.existing_sum(x, &shape) {
            return Ok(sum);
        }
        self.push1(SumTo(shape), &[x])
    }

    /// The sum of `x` to `shape`, if the graph has it: both biases of an LSTM have one and the same gradient.
    fn existing_sum(&self, x: Value, shape: &[usize]) -> Option<Value> {
        let (ty, source) = (self.ty_of(x), self.before_reshapes(x));
        let is_same = |node: &&Node| {
            let [input, sum] = [node.inputs[0], node.outputs[0]];
            self.ty_of(sum).shape == shape && self.ty_of(input) == ty && self.before_reshapes(input) == source
        };
        let sums = self.nodes.iter().filter(|node| node.op.name() == SumTo::NAME);
        sums.rev().find(is_same).map(|node| node.outputs[0])
    }

    /// Mean over the axes along which `shape` has extent 1 or is missing on the left.
    pub fn mean_to(&mut self, x: Value, shape: impl Into<Vec<usize>>) -> Result<Value> {
        let before = self.ty(x)?.len();
        let sum = self.sum_to(x, shape)?;
        let after = self.ty(sum)?.len();
        self.scale(sum, after as f64 / before as f64)
    }

    /// Several scalars side by side as one tensor `[n]`, added to `total` `[n]` if there is one. Not
    /// differentiable: for sums of losses that stay on the device until they are read.
    pub fn sum_scalars(&mut self, scalars: &[Value], total: Option<Value>) -> Result<Value> {
        let inputs: Vec<Value> = scalars.iter().copied().chain(total).collect();
        self.push1(SumScalars { count: scalars.len() }, &inputs)
    }

    /// Repeats `x` along axes of extent 1 and missing leading axes until it has `shape`.
    pub fn broadcast_to(&mut self, x: Value, shape: impl Into<Vec<usize>>) -> Result<Value> {
        let shape = shape.into();
        if *self.shape(x)? == *shape {
            return Ok(x);
        }
        self.push1(Broadcast(shape), &[x])
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// The axes of a tensor that are summed and those that are kept, with extents and strides.
    struct Reduction in "reduce.cu" {
        kept: i32, shape: [i32; 6], step: [i32; 6], summed: i32, extent: [i32; 6], stride: [i32; 6],
    }
}

/// Rows of one partial sum.
const BLOCK: usize = 64;

/// Most partial sums of a column reduction.
const MAX_PARTS: usize = 32;

fn rows_per_part(rows: usize) -> usize {
    rows.div_ceil(MAX_PARTS).max(BLOCK)
}

/// Elements of scratch for [`sum_columns`].
pub(crate) fn column_scratch(rows: usize, cols: usize) -> usize {
    rows.div_ceil(rows_per_part(rows)) * cols
}

/// y[c] = Σ_r x[r][c] over fixed blocks of rows.
pub(crate) fn sum_columns<T: Float>(pool: &Pool, scratch: &mut [T], x: &[T], cols: usize, y: &mut [T]) {
    let rows = x.len() / cols;
    let per_part = rows_per_part(rows);
    let parts = rows.div_ceil(per_part);
    if parts == 1 {
        y.fill(T::ZERO);
        return add_rows(y, x);
    }
    let partial = &mut scratch[..parts * cols];
    pool.blocks(parts, 1, RowsMut::new(partial, cols), |part, sums, _| {
        sums.fill(T::ZERO);
        let rows = part * per_part..rows.min((part + 1) * per_part);
        add_rows(sums, &x[rows.start * cols..rows.end * cols]);
    });
    y.fill(T::ZERO);
    add_rows(y, partial);
}

simd_fn! {
    /// y += each row of x.
    pub(crate) fn add_rows<T>(y: &mut [T], x: &[T]) {
        for row in x.chunks_exact(y.len()) {
            add_assign(y, row);
        }
    }
}

simd_fn! {
    fn sum_slice<T>(x: &[T]) -> T {
        sum(x)
    }
}

/// Elements of one partial sum of [`sum_all`].
const SUM_BLOCK: usize = 4096;

/// Sum of a slice in blocks of fixed size, on the calling thread.
pub(crate) fn sum_all<T: Float>(x: &[T]) -> T {
    let mut total = T::ZERO;
    for block in x.chunks(SUM_BLOCK) {
        total += sum_slice(block);
    }
    total
}

/// Queues y[c] (+)= Σ_r x[r, c]; many rows are summed in parts first.
#[cfg(feature = "cuda")]
pub(crate) fn cuda_sum_columns(
    launch: &mut Launch<'_>,
    y: u64,
    x: u64,
    rows: usize,
    columns: usize,
    accumulate: bool,
) -> Result<()> {
    let tiles = columns.div_ceil(32);
    // Enough blocks to fill a GPU, each with so many rows that a second kernel is worth it.
    let parts = (256 / tiles).min(rows / 2048).max(1);
    let (mut from, mut left) = (x, rows);
    if parts > 1 {
        let each = rows.div_ceil(parts);
        left = rows.div_ceil(each);
        from = launch.scratch(4 * left * columns)?;
        launch.kernel(
            "sum_columns",
            [tiles, left, 1],
            1024,
            0,
            args![from, x, rows, columns, each, false],
        )?;
    }
    launch.kernel("sum_columns", [tiles, 1, 1], 1024, 0, args![y, from, left, columns, left, accumulate])
}

#[derive(Debug)]
struct SumTo(Vec<usize>);

impl SumTo {
    const NAME: &str = "sum_to";
}

impl Op for SumTo {
    fn name(&self) -> &'static str {
        Self::NAME
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_float("sum_to", "x", &inputs[0])?;
        let ty = inputs[0].with(self.0.clone());
        ty.check("sum_to")?;
        if broadcast_steps(&self.0, &inputs[0].shape).is_none() {
            return mismatch(
                "sum_to",
                format!("a shape that broadcasts to {}", inputs[0]),
                format!("{:?}", self.0),
            );
        }
        Ok(vec![ty])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(grad) = b.grad(0) {
            let shape = b.graph.shape(b.inputs[0])?.to_vec();
            let grad = b.graph.broadcast_to(grad, shape)?;
            b.set(0, grad);
        }
        Ok(())
    }
    fn scratch(&self, inputs: &[TensorType], outputs: &[TensorType], _: usize) -> usize {
        let cols = outputs[0].len();
        column_scratch(inputs[0].len() / cols, cols) * inputs[0].dtype.size()
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (shape, target) = (&io.ty(0).shape, &io.out_ty(0).shape);
        // Leading axes summed, the rest kept as it is.
        let kept: usize = target.iter().product();
        let trailing = target.iter().skip_while(|n| **n == 1).copied().collect::<smallshape::Shape>();
        let leading_only = shape.ends_with(trailing.as_slice());
        dispatch_float!(io.dtype(), T => {
            let (x, y) = (io.input::<T>(0), io.output::<T>(0));
            if kept == 1 {
                y[0] = sum_all(x);
            } else if leading_only {
                let scratch = io.scratch::<T>(column_scratch(x.len() / kept, kept));
                sum_columns(io.pool, scratch, x, kept, y);
            } else {
                sum_general(x, shape, target, y);
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (ty, out) = (launch.ty(0).clone(), launch.out_ty(0).clone());
        let (n, kept) = (ty.len(), out.len());
        if kept == 1 {
            const SLICE: usize = 1 << 16;
            let parts = n.div_ceil(SLICE);
            let mut from = launch.input(0);
            if parts > 1 {
                let partial = launch.scratch(4 * parts)?;
                launch.kernel("sum_slices", [parts, 1, 1], 1024, 0, args![partial, from, n, SLICE])?;
                from = partial;
            }
            let last = if parts > 1 { parts } else { n };
            return launch.kernel(
                "sum_slices",
                [1, 1, 1],
                1024,
                0,
                args![launch.output(0), from, last, last],
            );
        }
        let trailing: Vec<usize> = out.shape.iter().skip_while(|n| **n == 1).copied().collect();
        if ty.shape.ends_with(&trailing) {
            return cuda_sum_columns(launch, launch.output(0), launch.input(0), n / kept, kept, false);
        }
        let Some(steps) = broadcast_steps(&out.shape, &ty.shape) else { return Ok(()) };
        // Axes summed on both sides of those that are kept, as for the biases of a convolution: rows first.
        let is_summed = |axis: &usize| steps[*axis] == 0 || ty.shape[*axis] == 1;
        let inner: usize =
            (0..ty.shape.len()).rev().take_while(is_summed).map(|axis| ty.shape[axis]).product();
        let outer: usize = (0..ty.shape.len()).take_while(is_summed).map(|axis| ty.shape[axis]).product();
        if outer * kept * inner == n && outer > 1 && inner >= 32 {
            let partial = launch.scratch(4 * outer * kept)?;
            launch.warps("sum_rows", outer * kept, args![partial, launch.input(0), outer * kept, inner])?;
            return cuda_sum_columns(launch, launch.output(0), partial, outer, kept, false);
        }
        let none = [0; crate::types::MAX_RANK];
        let mut reduction =
            Reduction { kept: 0, shape: none, step: none, summed: 0, extent: none, stride: none };
        let mut stride = n;
        // Kept axes in order, so that outputs are numbered as they lie.
        for (axis, extent) in ty.shape.iter().enumerate() {
            stride /= extent;
            let r = &mut reduction;
            let (count, extents, strides) = match steps[axis] {
                0 => (&mut r.summed, &mut r.extent, &mut r.stride),
                _ => (&mut r.kept, &mut r.shape, &mut r.step),
            };
            let at = *count as usize;
            (extents[at], strides[at]) = (*extent as i32, stride as i32);
            *count += 1;
        }
        let args = args![launch.output(0), launch.input(0), n / kept, kept, reduction];
        // Few numbers are added by one thread: a block would wait longer for its own threads.
        match n / kept <= 64 {
            true => launch.elements("sum_few", kept, args),
            false => launch.kernel("sum_axes", [kept, 1, 1], 256, 0, args),
        }
    }
}

/// Any combination of summed axes, in order of the input, on one thread.
fn sum_general<T: Float>(x: &[T], shape: &[usize], target: &[usize], y: &mut [T]) {
    y.fill(T::ZERO);
    let Some(steps) = broadcast_steps(target, shape) else { return };
    let cols = shape.last().copied().unwrap_or(1);
    let last = shape.len().saturating_sub(1);
    for (row, x) in x.chunks_exact(cols).enumerate() {
        let offset = row_offset(row, shape, &steps);
        if steps[last] == 0 {
            y[offset] += sum_slice(x);
        } else {
            add_rows(&mut y[offset..offset + cols], x);
        }
    }
}

mod smallshape {
    //! A shape on the stack: kernels must not allocate.
    use crate::types::MAX_RANK;

    #[derive(Default)]
    pub(super) struct Shape {
        axes: [usize; MAX_RANK],
        len: usize,
    }
    impl Shape {
        pub(super) fn as_slice(&self) -> &[usize] {
            &self.axes[..self.len]
        }
    }
    impl FromIterator<usize> for Shape {
        fn from_iter<I: IntoIterator<Item = usize>>(iter: I) -> Self {
            let mut shape = Self::default();
            for axis in iter {
                shape.axes[shape.len] = axis;
                shape.len += 1;
            }
            shape
        }
    }
}

#[derive(Debug)]
struct SumScalars {
    count: usize,
}

impl Op for SumScalars {
    fn name(&self) -> &'static str {
        "sum_scalars"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let Some(first) = inputs.first().filter(|_| self.count > 0) else {
            return mismatch("sum_scalars", "at least one scalar", "none");
        };
        want_float("sum_scalars", "scalars", first)?;
        for (i, ty) in inputs.iter().enumerate() {
            let shape: &[usize] = if i < self.count { &[] } else { &[self.count] };
            want("sum_scalars", if i < self.count { "scalar" } else { "total" }, ty, first.dtype, shape)?;
        }
        Ok(vec![first.with([self.count])])
    }
    fn stops_gradient(&self) -> bool {
        true
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_float!(io.dtype(), T => {
            for (i, y) in io.output::<T>(0).iter_mut().enumerate() {
                let before = if io.inputs.len() > self.count { io.input::<T>(self.count)[i] } else { T::ZERO };
                *y = before + io.input::<T>(i)[0];
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let addresses: Vec<u64> = (0..self.count).map(|i| launch.input(i)).collect();
        let table = launch.table(&addresses)?;
        let total = launch.input_if((launch.inputs.len() > self.count).then_some(self.count));
        launch.elements("sum_scalars", self.count, args![launch.output(0), table, total, self.count])
    }
}

#[derive(Debug)]
struct Broadcast(Vec<usize>);

impl Op for Broadcast {
    fn name(&self) -> &'static str {
        "broadcast_to"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_float("broadcast_to", "x", &inputs[0])?;
        let ty = inputs[0].with(self.0.clone());
        ty.check("broadcast_to")?;
        if broadcast_steps(&inputs[0].shape, &self.0).is_none() {
            return mismatch(
                "broadcast_to",
                format!("a shape that {} broadcasts to", inputs[0]),
                format!("{:?}", self.0),
            );
        }
        Ok(vec![ty])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(grad) = b.grad(0) {
            let shape = b.graph.shape(b.inputs[0])?.to_vec();
            let grad = b.graph.sum_to(grad, shape)?;
            b.set(0, grad);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let shape = &io.out_ty(0).shape;
        let Some(steps) = broadcast_steps(&io.ty(0).shape, shape) else { return Ok(()) };
        let cols = io.out_ty(0).cols();
        let last = shape.len().saturating_sub(1);
        dispatch_float!(io.dtype(), T => {
            let (x, y) = (io.input::<T>(0), io.output::<T>(0));
            let rows = y.len() / cols;
            io.pool.rows(rows, cols, RowsMut::new(y, cols), |first, y| {
                for (row, y) in y.chunks_exact_mut(cols).enumerate() {
                    let offset = row_offset(first + row, shape, &steps);
                    if steps[last] == 0 { y.fill(x[offset]) } else { y.copy_from_slice(&x[offset..][..cols]) }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let shape = launch.out_ty(0).shape.clone();
        let steps = crate::ops::broadcast::Steps::new(&shape, &launch.ty(0).shape, &launch.ty(0).shape);
        let n = launch.out_ty(0).len();
        let args = args![launch.output(0), launch.input(0), n, steps];
        launch.elements("rearrange_4", n, args)
    }
}
