//! Maximum over the pixels of windows that do not overlap; one window as large as the image is global
//! max-pooling.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::RowsMut;
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want_float};
use crate::types::{DType, TensorType};

impl Graph {
    /// x [B, C, H, W] to [B, C, H / h, W / w]: the largest number of each window of h by w pixels, NaN if the
    /// window has one. Rows and columns that fill no window are left out. The gradient goes to the first of
    /// equals.
    pub fn max_pool2d(&mut self, x: Value, window: (usize, usize)) -> Result<Value> {
        self.push1(MaxPool { window }, &[x])
    }
}

/// Extents of images and windows.
#[derive(Debug, Clone, Copy)]
struct Extents {
    /// Images times channels.
    planes: usize,
    image: (usize, usize),
    window: (usize, usize),
}

impl Extents {
    fn new(x: &TensorType, window: (usize, usize)) -> Option<Self> {
        let &[batch, channels, height, width] = &x.shape[..] else { return None };
        let fits = window.0 > 0 && window.1 > 0 && window.0 <= height && window.1 <= width;
        fits.then_some(Self { planes: batch * channels, image: (height, width), window })
    }

    /// Rows and columns of the result.
    fn pooled(&self) -> (usize, usize) {
        (self.image.0 / self.window.0, self.image.1 / self.window.1)
    }

    #[cfg(feature = "cuda")]
    fn args(&self) -> Pooling {
        let [h, w, p, q] = [self.image.0, self.image.1, self.window.0, self.window.1].map(|n| n as i32);
        Pooling { h, w, p, q }
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Extents of images and windows.
    struct Pooling in "max_pool.cu" { h: i32, w: i32, p: i32, q: i32 }
}

/// Outputs y and, as i32, the pixel of the image that each number of y came from.
#[derive(Debug)]
struct MaxPool {
    window: (usize, usize),
}

impl Op for MaxPool {
    fn name(&self) -> &'static str {
        "max_pool2d"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let x = &inputs[0];
        want_float("max_pool2d", "x", x)?;
        let Some(extents) = Extents::new(x, self.window) else {
            let expected =
                format!("x [B, C, H, W] of at least one window of {} by {}", self.window.0, self.window.1);
            return mismatch("max_pool2d", expected, x.to_string());
        };
        let (rows, columns) = extents.pooled();
        let shape = [x.shape[0], x.shape[1], rows, columns];
        Ok(vec![x.with(shape), TensorType::new(DType::I32, shape)])
    }
    fn always_writes(&self, output: usize) -> bool {
        output == 0
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let image = b.graph.ty(b.inputs[0])?.clone();
            let dx = b.graph.push1(MaxPoolGrad { window: self.window, image }, &[dy, b.outputs[1]])?;
            b.set(0, dx);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(extents) = Extents::new(io.ty(0), self.window) else { return Ok(()) };
        let (image, pooled) = (extents.image.0 * extents.image.1, extents.pooled().0 * extents.pooled().1);
        dispatch_float!(io.dtype(), T => {
            let x = io.input::<T>(0);
            let from = io.output_if_used::<i32>(1).map(|from| RowsMut::new(from, pooled));
            let outputs = (RowsMut::new(io.output::<T>(0), pooled), from);
            io.pool.rows(extents.planes, image, outputs, |first, (y, mut from)| {
                for (i, y) in y.chunks_exact_mut(pooled).enumerate() {
                    let x = &x[(first + i) * image..][..image];
                    for (at, y) in y.iter_mut().enumerate() {
                        let pixel = largest(x, &extents, at);
                        *y = x[pixel];
                        if let Some(from) = &mut from {
                            from[i * pooled + at] = pixel as i32;
                        }
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(extents) = Extents::new(launch.ty(0), self.window) else { return Ok(()) };
        let n = launch.out_ty(0).len();
        let args = args![launch.output(0), launch.output(1), launch.input(0), extents.args(), n];
        launch.elements("max_pool", n, args)
    }
}

/// The pixel of window `at` with the largest number: the first NaN, or else the first of equals.
#[inline(always)]
fn largest<T: Float>(x: &[T], extents: &Extents, at: usize) -> usize {
    let ((_, width), (h, w)) = (extents.image, extents.window);
    let columns = extents.pooled().1;
    let start = at / columns * h * width + at % columns * w;
    let mut best = start;
    for row in 0..h {
        for pixel in start + row * width..start + row * width + w {
            if x[pixel] > x[best] || (x[pixel].is_nan() && !x[best].is_nan()) {
                best = pixel;
            }
        }
    }
    best
}

/// dx, from dy and the pixels that the numbers came from.
#[derive(Debug)]
struct MaxPoolGrad {
    window: (usize, usize),
    image: TensorType,
}

impl Op for MaxPoolGrad {
    fn name(&self) -> &'static str {
        "max_pool2d_grad"
    }
    fn infer(&self, _: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![self.image.clone()])
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let Some(extents) = Extents::new(&self.image, self.window) else { return Ok(()) };
        let (image, pooled) = (extents.image.0 * extents.image.1, extents.pooled().0 * extents.pooled().1);
        dispatch_float!(io.dtype(), T => {
            let (dy, from, dx) = (io.input::<T>(0), io.input::<i32>(1), io.output::<T>(0));
            io.pool.rows(extents.planes, image, RowsMut::new(dx, image), |first, dx| {
                dx.fill(T::ZERO);
                for (i, dx) in dx.chunks_exact_mut(image).enumerate() {
                    let at = (first + i) * pooled..(first + i + 1) * pooled;
                    dy[at.clone()].iter().zip(&from[at]).for_each(|(dy, from)| dx[*from as usize] = *dy);
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(extents) = Extents::new(&self.image, self.window) else { return Ok(()) };
        let n = self.image.len();
        let args = args![launch.output(0), launch.input(0), launch.input(1), extents.args(), n];
        launch.elements("max_pool_grad", n, args)
    }
}
