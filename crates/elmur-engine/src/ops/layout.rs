//! Ops that move elements without changing them: reshape, slice, concatenate, transpose, copy, zeros,
//! stop-gradient.

use std::ops::Range;

use crate::autodiff::Backward;
use crate::cpu::pool::RowsMut;
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_bits, mismatch};
#[cfg(feature = "cuda")]
use crate::ops::broadcast::{Steps, by_size};
use crate::types::{DType, MAX_RANK, TensorType};

impl Graph {
    /// The same elements in another shape. Costs nothing.
    pub fn reshape(&mut self, x: Value, shape: impl Into<Vec<usize>>) -> Result<Value> {
        let shape = shape.into();
        if *self.shape(x)? == *shape { Ok(x) } else { self.push1(Reshape(shape), &[x]) }
    }

    /// The value that `x` is, apart from its shape.
    pub(crate) fn before_reshapes(&self, mut x: Value) -> Value {
        while let Some(node) = self.producer(x).filter(|node| node.op.name() == Reshape::NAME) {
            x = node.inputs[0];
        }
        x
    }

    /// `x` itself, as a constant to differentiation. Costs nothing.
    pub fn stop_gradient(&mut self, x: Value) -> Result<Value> {
        self.push1(StopGradient, &[x])
    }

    /// Elements `range` along `axis`. Costs nothing if the result is contiguous (all axes before `axis` have
    /// extent 1).
    pub fn slice(&mut self, x: Value, axis: usize, range: Range<usize>) -> Result<Value> {
        self.push1(Slice { axis, range }, &[x])
    }

    /// Joins tensors along `axis`; all other axes must agree.
    pub fn concat(&mut self, parts: &[Value], axis: usize) -> Result<Value> {
        self.push1(Concat { axis }, parts)
    }

    /// Reorders the axes: axis `i` of the result is axis `axes[i]` of `x`.
    pub fn transpose(&mut self, x: Value, axes: &[usize]) -> Result<Value> {
        self.push1(Transpose(axes.to_vec()), &[x])
    }

    /// Zeros of the type of `x`.
    pub fn zeros_like(&mut self, x: Value) -> Result<Value> {
        let ty = self.ty(x)?.clone();
        self.full(ty.dtype, ty.shape, 0.0)
    }

    /// A tensor that holds `x` everywhere.
    pub fn full(&mut self, dtype: DType, shape: impl Into<Vec<usize>>, x: f64) -> Result<Value> {
        self.push1(Full(TensorType::new(dtype, shape), x), &[])
    }

    /// A copy of `x` with memory of its own.
    pub fn copy(&mut self, x: Value) -> Result<Value> {
        self.push1(Copy, &[x])
    }
}

#[derive(Debug)]
struct Reshape(Vec<usize>);

impl Reshape {
    const NAME: &str = "reshape";
}

impl Op for Reshape {
    fn name(&self) -> &'static str {
        Self::NAME
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let ty = inputs[0].with(self.0.clone());
        ty.check("reshape")?;
        if ty.len() != inputs[0].len() {
            return mismatch(
                "reshape",
                format!("a shape of {} elements", inputs[0].len()),
                format!("{:?}", self.0),
            );
        }
        Ok(vec![ty])
    }
    fn only_rearranges(&self) -> bool {
        true
    }
    fn alias(&self, _: &[TensorType]) -> Option<usize> {
        Some(0)
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let shape = b.graph.shape(b.inputs[0])?.to_vec();
        if let Some(grad) = b.grad(0) {
            let grad = b.graph.reshape(grad, shape)?;
            b.set(0, grad);
        }
        Ok(())
    }
    fn cpu(&self, _: &Io<'_>) -> Result<()> {
        Ok(()) // an alias: never run
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let _ = launch;
        Ok(()) // an alias: never run
    }
}

#[derive(Debug)]
struct StopGradient;

impl Op for StopGradient {
    fn name(&self) -> &'static str {
        "stop_gradient"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(inputs.to_vec())
    }
    fn stops_gradient(&self) -> bool {
        true
    }
    fn alias(&self, _: &[TensorType]) -> Option<usize> {
        Some(0)
    }
    fn cpu(&self, _: &Io<'_>) -> Result<()> {
        Ok(()) // an alias: never run
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let _ = launch;
        Ok(()) // an alias: never run
    }
}

#[derive(Debug)]
struct Copy;

impl Op for Copy {
    fn name(&self) -> &'static str {
        "copy"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(inputs.to_vec())
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(grad) = b.grad(0) {
            b.set(0, grad);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_bits!(io.dtype(), U => io.output_bits::<U>(0).copy_from_slice(io.input_bits(0)));
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        launch.copy(launch.output(0), launch.input(0), launch.ty(0).bytes())
    }
}

#[derive(Debug)]
struct Full(TensorType, f64);

impl Op for Full {
    fn name(&self) -> &'static str {
        "full"
    }
    fn infer(&self, _: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![self.0.clone()])
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        match self.0.dtype {
            DType::F32 => io.output::<f32>(0).fill(self.1 as f32),
            DType::F64 => io.output::<f64>(0).fill(self.1),
            DType::I32 => io.output::<i32>(0).fill(self.1 as i32),
            DType::I64 => io.output::<i64>(0).fill(self.1 as i64),
            DType::Bool => io.output::<bool>(0).fill(self.1 != 0.0),
            DType::U8 => io.output::<u8>(0).fill(self.1 as u8),
        }
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = self.0.len();
        let bits = match self.0.dtype {
            DType::F32 => u64::from((self.1 as f32).to_bits()),
            DType::F64 => self.1.to_bits(),
            DType::I32 => u64::from(self.1 as i32 as u32),
            DType::I64 => self.1 as i64 as u64,
            DType::Bool => u64::from(self.1 != 0.0),
            DType::U8 => u64::from(self.1 as u8),
        };
        let args = args![launch.output(0), bits, n];
        launch.elements(by_size(self.0.dtype, ["fill_1", "fill_4", "fill_8"]), n, args)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Columns that are copied between rows of different widths.
    struct ColumnsArgs in "layout.cu" {
        y: u64, x: u64, y_width: usize, y_start: usize, x_width: usize, x_start: usize, rows: usize,
        columns: usize,
    }
}

#[cfg(feature = "cuda")]
const COPY_COLUMNS: [&str; 3] = ["copy_columns_1", "copy_columns_4", "copy_columns_8"];

/// Copies each input over the output of the same number; only ever run on a GPU, where one kernel does it for
/// all.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub(crate) struct CopyAll;

#[cfg(feature = "cuda")]
impl Op for CopyAll {
    fn name(&self) -> &'static str {
        "copy_all"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(inputs.to_vec())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        for i in 0..io.inputs.len() {
            dispatch_bits!(io.ty(i).dtype, U => io.output_bits::<U>(i).copy_from_slice(io.input_bits(i)));
        }
        Ok(())
    }
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let mut table = Vec::new();
        for i in 0..launch.inputs.len() {
            table.extend([launch.output(i), launch.input(i), launch.ty(i).bytes() as u64]);
        }
        let count = launch.inputs.len();
        let largest = launch.inputs.iter().map(|o| o.ty.bytes()).max().unwrap_or(0);
        let table = launch.table(&table)?;
        let blocks = largest.div_ceil(16 * 256).clamp(1, 256);
        launch.kernel("copy_all", [blocks, count, 1], 256, 0, args![table])
    }
}

/// (rows before the axis, elements of one step along the axis).
fn around(shape: &[usize], axis: usize) -> (usize, usize) {
    (shape[..axis].iter().product(), shape[axis + 1..].iter().product())
}

#[derive(Debug)]
struct Slice {
    axis: usize,
    range: Range<usize>,
}

impl Op for Slice {
    fn name(&self) -> &'static str {
        "slice"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let Range { start, end } = self.range;
        let extent = inputs[0].shape.get(self.axis).copied().unwrap_or(0);
        if start >= end || end > extent {
            let expected = format!("a non-empty range inside axis {} of {}", self.axis, inputs[0]);
            return mismatch("slice", expected, format!("{start}..{end}"));
        }
        let mut shape = inputs[0].shape.clone();
        shape[self.axis] = end - start;
        Ok(vec![inputs[0].with(shape)])
    }
    fn alias(&self, inputs: &[TensorType]) -> Option<usize> {
        let (outer, inner) = around(&inputs[0].shape, self.axis);
        (outer == 1).then_some(self.range.start * inner * inputs[0].dtype.size())
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(grad) = b.grad(0) {
            let extent = b.graph.shape(b.inputs[0])?[self.axis];
            let place = Place { axis: self.axis, start: self.range.start, extent };
            let grad = b.graph.push1(place, &[grad])?;
            b.set(0, grad);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let shape = &io.ty(0).shape;
        let (outer, inner) = around(shape, self.axis);
        let (from, to) = (shape[self.axis] * inner, self.range.len() * inner);
        dispatch_bits!(io.dtype(), U => {
            let (x, y) = (io.input_bits::<U>(0), io.output_bits::<U>(0));
            io.pool.rows(outer, to, RowsMut::new(y, to), |first, y| {
                for (row, y) in y.chunks_exact_mut(to).enumerate() {
                    y.copy_from_slice(&x[(first + row) * from + self.range.start * inner..][..to]);
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let shape = &launch.ty(0).shape;
        let (outer, inner) = around(shape, self.axis);
        let (from, to) = (shape[self.axis] * inner, self.range.len() * inner);
        let args = ColumnsArgs {
            y: launch.output(0),
            x: launch.input(0),
            y_width: to,
            y_start: 0,
            x_width: from,
            x_start: self.range.start * inner,
            rows: outer,
            columns: to,
        };
        launch.elements(by_size(launch.ty(0).dtype, COPY_COLUMNS), outer * to, args)
    }
}

/// Zeros with the input placed from `start` on along `axis`: the transpose of [`Slice`].
#[derive(Debug)]
struct Place {
    axis: usize,
    start: usize,
    extent: usize,
}

impl Op for Place {
    fn name(&self) -> &'static str {
        "slice_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let mut shape = inputs[0].shape.clone();
        shape[self.axis] = self.extent;
        Ok(vec![inputs[0].with(shape)])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(grad) = b.grad(0) {
            let len = b.graph.shape(b.inputs[0])?[self.axis];
            let grad = b.graph.slice(grad, self.axis, self.start..self.start + len)?;
            b.set(0, grad);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let shape = &io.ty(0).shape;
        let (outer, inner) = around(shape, self.axis);
        let (from, to, start) = (shape[self.axis] * inner, self.extent * inner, self.start * inner);
        dispatch_bits!(io.dtype(), U => {
            let (x, y) = (io.input_bits::<U>(0), io.output_bits::<U>(0));
            io.pool.rows(outer, to, RowsMut::new(y, to), |first, y| {
                for (row, y) in y.chunks_exact_mut(to).enumerate() {
                    y[..start].fill(0);
                    y[start..start + from].copy_from_slice(&x[(first + row) * from..][..from]);
                    y[start + from..].fill(0);
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let shape = &launch.ty(0).shape;
        let (outer, inner) = around(shape, self.axis);
        let (from, to, start) = (shape[self.axis] * inner, self.extent * inner, self.start * inner);
        if from != to {
            launch.clear(launch.output(0), launch.out_ty(0).bytes())?;
        }
        let args = ColumnsArgs {
            y: launch.output(0),
            x: launch.input(0),
            y_width: to,
            y_start: start,
            x_width: from,
            x_start: 0,
            rows: outer,
            columns: from,
        };
        launch.elements(by_size(launch.ty(0).dtype, COPY_COLUMNS), outer * from, args)
    }
}

#[derive(Debug)]
struct Concat {
    axis: usize,
}

impl Op for Concat {
    fn name(&self) -> &'static str {
        "concat"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let Some(first) = inputs.first().filter(|ty| self.axis < ty.shape.len()) else {
            let got = inputs.first().map_or("nothing".to_owned(), TensorType::to_string);
            return mismatch("concat", format!("at least one tensor with an axis {}", self.axis), got);
        };
        let mut shape = first.shape.clone();
        shape[self.axis] = 0;
        for part in inputs {
            let agrees = part.dtype == first.dtype
                && part.shape.len() == shape.len()
                && (0..shape.len()).all(|i| i == self.axis || part.shape[i] == shape[i]);
            if !agrees {
                return mismatch(
                    "concat",
                    format!("{first} except along axis {}", self.axis),
                    part.to_string(),
                );
            }
            shape[self.axis] = shape[self.axis].saturating_add(part.shape[self.axis]);
        }
        Ok(vec![first.with(shape)])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let Some(grad) = b.grad(0) else { return Ok(()) };
        let mut start = 0;
        for part in 0..b.inputs.len() {
            let len = b.graph.shape(b.inputs[part])?[self.axis];
            if b.needs(part) {
                let grad = b.graph.slice(grad, self.axis, start..start + len)?;
                b.set(part, grad);
            }
            start += len;
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (outer, inner) = around(&io.out_ty(0).shape, self.axis);
        let to = io.out_ty(0).shape[self.axis] * inner;
        dispatch_bits!(io.dtype(), U => {
            let y = io.output_bits::<U>(0);
            io.pool.rows(outer, to, RowsMut::new(y, to), |first, y| {
                for (row, y) in y.chunks_exact_mut(to).enumerate() {
                    let mut start = 0;
                    for part in 0..io.inputs.len() {
                        let len = io.ty(part).shape[self.axis] * inner;
                        let x = &io.input_bits::<U>(part)[(first + row) * len..][..len];
                        y[start..start + len].copy_from_slice(x);
                        start += len;
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (outer, inner) = around(&launch.out_ty(0).shape, self.axis);
        let to = launch.out_ty(0).shape[self.axis] * inner;
        let mut start = 0;
        for part in 0..launch.inputs.len() {
            let len = launch.ty(part).shape[self.axis] * inner;
            let args = ColumnsArgs {
                y: launch.output(0),
                x: launch.input(part),
                y_width: to,
                y_start: start,
                x_width: len,
                x_start: 0,
                rows: outer,
                columns: len,
            };
            launch.elements(by_size(launch.ty(0).dtype, COPY_COLUMNS), outer * len, args)?;
            start += len;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Transpose(Vec<usize>);

impl Op for Transpose {
    fn name(&self) -> &'static str {
        "transpose"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let rank = inputs[0].shape.len();
        let is_permutation = self.0.len() == rank && (0..rank).all(|axis| self.0.contains(&axis));
        if !is_permutation {
            return mismatch(
                "transpose",
                format!("a permutation of the axes of {}", inputs[0]),
                format!("{:?}", self.0),
            );
        }
        Ok(vec![inputs[0].with(self.0.iter().map(|a| inputs[0].shape[*a]).collect::<Vec<_>>())])
    }
    fn only_rearranges(&self) -> bool {
        true
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(grad) = b.grad(0) {
            let mut inverse = vec![0; self.0.len()];
            self.0.iter().enumerate().for_each(|(i, &axis)| inverse[axis] = i);
            let grad = b.graph.transpose(grad, &inverse)?;
            b.set(0, grad);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (shape, rank) = (&io.out_ty(0).shape, self.0.len());
        // Step in the input for one step along each output axis.
        let mut steps = [0; MAX_RANK];
        for (i, &axis) in self.0.iter().enumerate() {
            steps[i] = io.ty(0).shape[axis + 1..].iter().product();
        }
        let (cols, step) = if rank == 0 { (1, 1) } else { (shape[rank - 1], steps[rank - 1]) };
        let rows = io.out_ty(0).len() / cols;
        dispatch_bits!(io.dtype(), U => {
            let (x, y) = (io.input_bits::<U>(0), io.output_bits::<U>(0));
            io.pool.rows(rows, cols, RowsMut::new(y, cols), |first, y| {
                for (row, y) in y.chunks_exact_mut(cols).enumerate() {
                    let mut rest = first + row;
                    let mut start = 0;
                    for i in (0..rank.saturating_sub(1)).rev() {
                        start += rest % shape[i] * steps[i];
                        rest /= shape[i];
                    }
                    if step == 1 {
                        y.copy_from_slice(&x[start..][..cols]);
                    } else {
                        y.iter_mut().enumerate().for_each(|(i, y)| *y = x[start + i * step]);
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let shape = &launch.out_ty(0).shape;
        let mut steps = Steps::new(shape, shape, shape);
        for (i, &axis) in self.0.iter().enumerate() {
            steps.a[i] = launch.ty(0).shape[axis + 1..].iter().product::<usize>() as i32;
        }
        let n = launch.ty(0).len();
        let args = args![launch.output(0), launch.input(0), n, steps];
        launch.elements(by_size(launch.ty(0).dtype, ["rearrange_1", "rearrange_4", "rearrange_8"]), n, args)
    }
}
