//! Elementwise arithmetic with NumPy broadcasting: add, sub, mul, div, minimum, scale, select, and casts.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::RowsMut;
use crate::cpu::simd::simd_fn;
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_bits, dispatch_float, mismatch, want, want_float};
#[cfg(feature = "cuda")]
use crate::ops::broadcast::{Steps, by_size};
use crate::ops::broadcast::{broadcast_steps, row_offset};
use crate::types::{DType, Element, MAX_RANK, TensorType};

impl Graph {
    /// a + b, broadcasting. Integers too (counters, offsets), where only `b` may broadcast.
    pub fn add(&mut self, a: Value, b: Value) -> Result<Value> {
        self.push1(Binary(Kind::Add), &[a, b])
    }

    /// a - b, broadcasting.
    pub fn sub(&mut self, a: Value, b: Value) -> Result<Value> {
        self.push1(Binary(Kind::Sub), &[a, b])
    }

    /// a b elementwise, broadcasting.
    pub fn mul(&mut self, a: Value, b: Value) -> Result<Value> {
        self.push1(Binary(Kind::Mul), &[a, b])
    }

    /// a / b elementwise, broadcasting.
    pub fn div(&mut self, a: Value, b: Value) -> Result<Value> {
        self.push1(Binary(Kind::Div), &[a, b])
    }

    /// The smaller of a and b elementwise, broadcasting; NaN if one of them is. The gradient goes to the
    /// smaller one, to a where both are equal.
    pub fn minimum(&mut self, a: Value, b: Value) -> Result<Value> {
        self.push1(Binary(Kind::Min), &[a, b])
    }

    /// factor x.
    pub fn scale(&mut self, x: Value, factor: f64) -> Result<Value> {
        self.affine(x, factor, 0.0)
    }

    /// factor x + offset. Costs nothing if that is x itself, or if x is a constant scalar.
    pub fn affine(&mut self, x: Value, factor: f64, offset: f64) -> Result<Value> {
        let ty = self.ty(x)?.clone();
        if factor == 1.0 && offset == 0.0 && ty.dtype.is_float() {
            return Ok(x);
        }
        match self.constant_scalar(x) {
            Some(constant) => self.scalar(ty.dtype, factor * constant + offset),
            None => self.push1(Affine { factor, offset }, &[x]),
        }
    }

    /// `a` where `condition` holds, else `b`, for any element type. The condition is bool and has the shape
    /// of `a`, or only its leading axes (then it chooses whole rows).
    pub fn select(&mut self, condition: Value, a: Value, b: Value) -> Result<Value> {
        self.push1(Select, &[a, b, condition])
    }

    /// Converts between element types. Floats become integers by rounding toward zero; numbers that a byte
    /// cannot hold become 0 or 255. Only float to float has a gradient.
    ///
    /// Pixels become numbers from 0 to 1 by `cast` and then [`Graph::scale`] by 1/255, which works in place.
    pub fn cast(&mut self, x: Value, dtype: DType) -> Result<Value> {
        if self.ty(x)?.dtype == dtype { Ok(x) } else { self.push1(Cast(dtype), &[x]) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Add,
    Sub,
    Mul,
    Div,
    Min,
}

#[derive(Debug)]
struct Binary(Kind);

/// The shape both operands broadcast to.
fn broadcast_shape(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let axis = |shape: &[usize], i: usize| (i + shape.len()).checked_sub(rank).map_or(1, |i| shape[i]);
    (0..rank)
        .map(|i| match (axis(a, i), axis(b, i)) {
            (x, y) if x == y => Some(x),
            (1, y) => Some(y),
            (x, 1) => Some(x),
            _ => None,
        })
        .collect()
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// A binary function of two operands.
    struct BinaryArgs in "arith.cu" {
        y: u64, a: u64, b: u64, n: usize, kind: i32, flat: i32, steps: Steps,
    }
}

impl Op for Binary {
    fn name(&self) -> &'static str {
        match self.0 {
            Kind::Add => "add",
            Kind::Sub => "sub",
            Kind::Mul => "mul",
            Kind::Div => "div",
            Kind::Min => "minimum",
        }
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (a, b) = (&inputs[0], &inputs[1]);
        let counts = self.0 == Kind::Add && matches!(a.dtype, DType::I32 | DType::I64);
        if a.dtype != b.dtype || !(a.dtype.is_float() || counts) {
            let expected = if self.0 == Kind::Add {
                "operands of one numeric type"
            } else {
                "operands of one float type"
            };
            return mismatch(self.name(), expected, format!("{a} and {b}"));
        }
        match broadcast_shape(&a.shape, &b.shape) {
            Some(shape) if a.dtype.is_float() || a.shape == shape => Ok(vec![a.with(shape)]),
            Some(_) => mismatch(self.name(), "a first operand of the full shape", format!("{a} and {b}")),
            None => mismatch(self.name(), "shapes that broadcast", format!("{a} and {b}")),
        }
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let Some(grad) = b.grad(0) else { return Ok(()) };
        for (this, other) in [(0, 1), (1, 0)] {
            if b.needs(this) {
                let full = match self.0 {
                    Kind::Mul => b.graph.mul(grad, b.inputs[other])?,
                    // d(a / b) = da / b - y db / b
                    Kind::Div => {
                        let share = b.graph.div(grad, b.inputs[1])?;
                        if this == 0 {
                            share
                        } else {
                            let product = b.graph.mul(share, b.outputs[0])?;
                            b.graph.scale(product, -1.0)?
                        }
                    }
                    Kind::Min => {
                        let shape = b.graph.shape(grad)?.to_vec();
                        let first = b.graph.broadcast_to(b.inputs[0], shape.clone())?;
                        let second = b.graph.broadcast_to(b.inputs[1], shape)?;
                        b.graph.push1(MinGrad { first: this == 0 }, &[grad, first, second])?
                    }
                    Kind::Sub if this == 1 => b.graph.scale(grad, -1.0)?,
                    _ => grad,
                };
                let shape = b.graph.shape(b.inputs[this])?.to_vec();
                let reduced = b.graph.sum_to(full, shape)?;
                b.set(this, reduced);
            }
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        match io.dtype() {
            DType::I32 => add_integers(io, i32::wrapping_add),
            DType::I64 => add_integers(io, i64::wrapping_add),
            dtype => dispatch_float!(dtype, T => binary::<T>(io, self.0)),
        }
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (out, a, b) = (launch.out_ty(0).clone(), launch.ty(0).clone(), launch.ty(1).clone());
        let flat = match a.shape == out.shape {
            true if b.shape == a.shape => 1,
            true if b.len() == 1 => 2,
            _ => 0,
        };
        let [y, from_a, from_b] = [launch.output(0), launch.input(0), launch.input(1)];
        let fours = [y, from_a, from_b].iter().all(|address| address.is_multiple_of(16));
        if flat == 1 && out.dtype == DType::F32 && fours && out.len().is_multiple_of(4) {
            let n = out.len() / 4;
            return launch.elements("binary_fours", n, args![y, from_a, from_b, self.0 as i32, n]);
        }
        let kernel = match out.dtype {
            DType::I32 => "binary_i32",
            DType::I64 => "binary_i64",
            _ => "binary_f32",
        };
        let args = BinaryArgs {
            y,
            a: from_a,
            b: from_b,
            n: out.len(),
            kind: self.0 as i32,
            flat,
            steps: Steps::new(&out.shape, &a.shape, &b.shape),
        };
        launch.elements(kernel, out.len(), args)
    }
}

/// a + b where only b broadcasts.
fn add_integers<T: Element>(io: &Io<'_>, add: impl Fn(T, T) -> T) {
    let (shape, b) = (&io.out_ty(0).shape, io.input::<T>(1));
    let Some(steps) = broadcast_steps(&io.ty(1).shape, shape) else { return };
    let (cols, last) = (io.out_ty(0).cols(), shape.len().saturating_sub(1));
    for (row, y) in io.in_place::<T>(0, 0).chunks_exact_mut(cols).enumerate() {
        let offset = row_offset(row, shape, &steps);
        y.iter_mut().enumerate().for_each(|(i, y)| *y = add(*y, b[offset + i * steps[last].min(1)]));
    }
}

fn binary<T: Float>(io: &Io<'_>, kind: Kind) {
    let out = io.out_ty(0);
    let (a, b) = (io.ty(0), io.ty(1));
    let in_place = io.inputs[0].ptr == io.outputs[0].ptr;
    // Operands of equal shape, or with one number as second operand, are one long row, divided among threads.
    let flat = a.shape == out.shape && (a.shape == b.shape || b.len() == 1);
    let cols = out.cols();
    let (Some(a_steps), Some(b_steps)) =
        (broadcast_steps(&a.shape, &out.shape), broadcast_steps(&b.shape, &out.shape))
    else {
        return;
    };
    let y = io.output::<T>(0);
    let b_data = io.input::<T>(1);
    // Not formed if it would overlap the output.
    let a_data = if in_place { None } else { Some(io.input::<T>(0)) };
    if flat {
        let chunk = 4096;
        let whole = out.len() / chunk * chunk;
        let body = |start: usize, y: &mut [T]| {
            let a = a_data.map(|a| &a[start..][..y.len()]);
            let b = if b_data.len() == 1 { b_data } else { &b_data[start..][..y.len()] };
            binary_row(kind, y, a, b);
        };
        let (head, tail) = y.split_at_mut(whole);
        io.pool.rows(whole / chunk, chunk, RowsMut::new(head, chunk), |first, y| body(first * chunk, y));
        if !tail.is_empty() {
            body(whole, tail);
        }
        return;
    }
    let last = out.shape.len() - 1;
    let row = |data: &'_ [T], row: usize, steps: &[usize; MAX_RANK]| -> (usize, usize) {
        let offset = row_offset(row, &out.shape, steps);
        debug_assert!(offset < data.len());
        (offset, if steps[last] == 0 { 1 } else { cols })
    };
    io.pool.rows(out.len() / cols, cols, RowsMut::new(y, cols), |first, y| {
        for (i, y) in y.chunks_exact_mut(cols).enumerate() {
            let a = a_data.map(|a| {
                let (offset, len) = row(a, first + i, &a_steps);
                &a[offset..offset + len]
            });
            let (offset, len) = row(b_data, first + i, &b_steps);
            binary_row(kind, y, a, &b_data[offset..offset + len]);
        }
    });
}

simd_fn! {
    /// y = a op b. Without `a`, y itself is the first operand. Operands of length 1 repeat.
    fn binary_row<T>(kind: Kind, y: &mut [T], a: Option<&[T]>, b: &[T]) {
        match a {
            Some([a]) => y.fill(*a),
            Some(a) => y.copy_from_slice(a),
            None => {}
        }
        match (kind, b) {
            (Kind::Add, [b]) => y.iter_mut().for_each(|y| *y += *b),
            (Kind::Sub, [b]) => y.iter_mut().for_each(|y| *y -= *b),
            (Kind::Mul, [b]) => y.iter_mut().for_each(|y| *y *= *b),
            (Kind::Div, [b]) => y.iter_mut().for_each(|y| *y /= *b),
            (Kind::Min, [b]) => y.iter_mut().for_each(|y| *y = if takes_first(*y, *b) { *y } else { *b }),
            (Kind::Add, b) => y.iter_mut().zip(b).for_each(|(y, b)| *y += *b),
            (Kind::Sub, b) => y.iter_mut().zip(b).for_each(|(y, b)| *y -= *b),
            (Kind::Mul, b) => y.iter_mut().zip(b).for_each(|(y, b)| *y *= *b),
            (Kind::Div, b) => y.iter_mut().zip(b).for_each(|(y, b)| *y /= *b),
            (Kind::Min, b) => {
                y.iter_mut().zip(b).for_each(|(y, b)| *y = if takes_first(*y, *b) { *y } else { *b });
            }
        }
    }
}

/// Whether the minimum of two numbers is the first one; NaN counts as smaller than all numbers.
#[inline(always)]
fn takes_first<T: Float>(a: T, b: T) -> bool {
    a <= b || a.is_nan()
}

/// The gradient of a minimum where the first operand was taken, or where the second was, and 0 elsewhere.
/// From the gradient and both operands, all of one shape.
#[derive(Debug)]
struct MinGrad {
    first: bool,
}

impl Op for MinGrad {
    fn name(&self) -> &'static str {
        "minimum_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].clone()])
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_float!(io.dtype(), T => {
            let (dx, a, b) = (io.in_place::<T>(0, 0), io.input::<T>(1), io.input::<T>(2));
            io.pool.rows(dx.len(), 2, RowsMut::new(dx, 1), |at, dx| {
                for ((dx, a), b) in dx.iter_mut().zip(&a[at..]).zip(&b[at..]) {
                    if takes_first(*a, *b) != self.first {
                        *dx = T::ZERO;
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = launch.ty(0).len();
        let [dy, a, b] = [0, 1, 2].map(|i| launch.input(i));
        launch.elements("minimum_grad", n, args![launch.output(0), dy, a, b, self.first, n])
    }
}

#[derive(Debug)]
struct Affine {
    factor: f64,
    offset: f64,
}

impl Op for Affine {
    fn name(&self) -> &'static str {
        "scale"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_float("scale", "x", &inputs[0])?;
        Ok(inputs.to_vec())
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(grad) = b.grad(0) {
            let grad = b.graph.scale(grad, self.factor)?;
            b.set(0, grad);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_float!(io.dtype(), T => {
            let y = io.in_place::<T>(0, 0);
            let (factor, offset) = (T::of(self.factor), T::of(self.offset));
            io.pool.rows(y.len(), 1, RowsMut::new(y, 1), |_, y| affine_row(y, factor, offset));
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = launch.ty(0).len();
        let (factor, offset) = (self.factor as f32, self.offset as f32);
        let args = args![launch.output(0), launch.input(0), factor, offset, n];
        launch.elements("affine", n, args)
    }
}

simd_fn! {
    fn affine_row<T>(y: &mut [T], factor: T, offset: T) {
        y.iter_mut().for_each(|y| *y = factor.mul_add(*y, offset));
    }
}

#[derive(Debug)]
struct Select;

impl Op for Select {
    fn name(&self) -> &'static str {
        "select"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (a, condition) = (&inputs[0], &inputs[2]);
        want("select", "b", &inputs[1], a.dtype, &a.shape)?;
        if condition.dtype != DType::Bool || !a.shape.starts_with(&condition.shape) {
            return mismatch(
                "select",
                format!("a bool condition over leading axes of {a}"),
                condition.to_string(),
            );
        }
        Ok(vec![a.clone()])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        let Some(grad) = b.grad(0) else { return Ok(()) };
        let zeros = b.graph.zeros_like(grad)?;
        let condition = b.inputs[2];
        if b.needs(0) {
            let grad = b.graph.select(condition, grad, zeros)?;
            b.set(0, grad);
        }
        if b.needs(1) {
            let grad = b.graph.select(condition, zeros, grad)?;
            b.set(1, grad);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let condition = io.input::<bool>(2);
        let row = io.ty(0).len() / condition.len();
        dispatch_bits!(io.dtype(), U => {
            let (a, b) = (io.input_bits::<U>(0), io.input_bits::<U>(1));
            for (i, (y, chosen)) in io.output_bits::<U>(0).chunks_exact_mut(row).zip(condition).enumerate() {
                y.copy_from_slice(&if *chosen { a } else { b }[i * row..(i + 1) * row]);
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (n, row) = (launch.ty(0).len(), launch.ty(0).len() / launch.ty(2).len());
        let kernel = by_size(launch.ty(0).dtype, ["select_1", "select_4", "select_8"]);
        let args = args![launch.output(0), launch.input(0), launch.input(1), launch.input(2), row, n];
        launch.elements(kernel, n, args)
    }
}

#[derive(Debug)]
struct Cast(DType);

impl Op for Cast {
    fn name(&self) -> &'static str {
        "cast"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![TensorType::new(self.0, inputs[0].shape.clone())])
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let (Some(grad), true) = (b.grad(0), b.needs(0)) {
            let dtype = b.graph.ty(b.inputs[0])?.dtype;
            let grad = b.graph.cast(grad, dtype)?;
            b.set(0, grad);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        match (io.dtype(), self.0) {
            (DType::I32, DType::I64) => convert(io, |x: i32| i64::from(x)),
            (DType::I64, DType::I32) => convert(io, |x: i64| x as i32),
            (DType::U8, DType::F32) => convert(io, |x: u8| f32::from(x)),
            (DType::F32, _) => convert_from(io, |x: f32| f64::from(x)),
            (DType::F64, _) => convert_from(io, |x: f64| x),
            (DType::I32, _) => convert_from(io, |x: i32| f64::from(x)),
            (DType::I64, _) => convert_from(io, |x: i64| x as f64),
            (DType::Bool, _) => convert_from(io, |x: bool| f64::from(u8::from(x))),
            (DType::U8, _) => convert_from(io, |x: u8| f64::from(x)),
        }
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = launch.ty(0).len();
        let (from, to) = (launch.ty(0).dtype as i32, self.0 as i32);
        let args = args![launch.output(0), launch.input(0), from, to, n];
        launch.elements("cast", n, args)
    }
}

/// Input 0 converted by `f`, element by element.
fn convert<T: Element, U: Element>(io: &Io<'_>, f: impl Fn(T) -> U + Sync) {
    let (x, y) = (io.input::<T>(0), io.output::<U>(0));
    io.pool.rows(x.len(), 1, RowsMut::new(y, 1), |first, y| {
        y.iter_mut().zip(&x[first..]).for_each(|(y, x)| *y = f(*x));
    });
}

/// Input 0 converted to the output's type through f64: exact for everything but integers beyond 2^53, which
/// no float could hold either.
fn convert_from<T: Element>(io: &Io<'_>, to_f64: impl Fn(T) -> f64 + Sync) {
    match io.out_ty(0).dtype {
        DType::F32 => convert(io, |x| to_f64(x) as f32),
        DType::F64 => convert(io, to_f64),
        DType::I32 => convert(io, |x| to_f64(x) as i32),
        DType::I64 => convert(io, |x| to_f64(x) as i64),
        DType::Bool => convert(io, |x| to_f64(x) != 0.0),
        DType::U8 => convert(io, |x| to_f64(x) as u8),
    }
}
