//! Images moved by a few pixels, for augmentation: every row of a batch by a distance of its own.
//!
//! y[r, ..., c, i, j] = x[r, ..., s(r, c), clamp(i + d(r, 0)), clamp(j + d(r, 1))], so that the pixels at the edge are
//! repeated, with d(r, k) = floor(draws[r, k] (2 most + 1)) - most. Without a third draw, s(r, c) = c; with it the
//! channels of every three change places in one of their six orders.

use crate::cpu::float::Float;
use crate::cpu::pool::RowsMut;
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_bits, dispatch_float, mismatch, want_float};
use crate::types::{DType, TensorType};

impl Graph {
    /// Moves the images x [R, ..., H, W], bytes or floats, by up to `most` pixels along both axes; pixels at the
    /// edge are repeated. Draws [R, 2] in 0..1 decide how far: all images of a row move alike. Draws [R, 3] also put
    /// every three channels of images [R, ..., C, H, W] into another order: red, green and blue change places.
    /// Gradients stop here.
    pub fn shift_images(&mut self, x: Value, draws: Value, most: usize) -> Result<Value> {
        self.push1(Shift { most }, &[x, draws])
    }
}

#[derive(Debug)]
struct Shift {
    most: usize,
}

/// Extents of images: those of one row, height and width.
struct Dims {
    images: usize,
    height: usize,
    width: usize,
    /// Draws of a row.
    draws: usize,
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Extents of images, how far they move at most, and draws of a row.
    struct ShiftSize in "shift.cu" {
        images: i64, h: i32, w: i32, most: i32, draws: i32,
    }
}

impl Shift {
    fn dims(x: &TensorType, draws: &TensorType) -> Option<Dims> {
        let ([rows, .., height, width], [of, draws]) = (&x.shape[..], &draws.shape[..]) else { return None };
        let coloured = x.shape.len() > 3 && x.shape[x.shape.len() - 3].is_multiple_of(3);
        let fits = of == rows && (*draws == 2 || *draws == 3 && coloured);
        let images = x.len() / (rows * height * width).max(1);
        (fits && !x.is_empty()).then_some(Dims { images, height: *height, width: *width, draws: *draws })
    }

    /// The distance that a draw stands for.
    fn distance(&self, draw: f32) -> isize {
        let range = 2 * self.most + 1;
        ((draw * range as f32) as usize).min(range - 1) as isize - self.most as isize
    }
}

impl Op for Shift {
    fn name(&self) -> &'static str {
        "shift_images"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (x, draws) = (&inputs[0], &inputs[1]);
        want_float("shift_images", "draws", draws)?;
        let pixels = matches!(x.dtype, DType::U8 | DType::F32 | DType::F64);
        let fits = Self::dims(x, draws).is_some_and(|dims| self.most < dims.height.min(dims.width));
        if !pixels || !fits {
            let expected = format!(
                "x [R, ..., H, W] of bytes or floats with more than {} pixels along both axes, and draws [R, 2], or \
                 [R, 3] where x is [R, ..., C, H, W] with threes of channels",
                self.most
            );
            return mismatch("shift_images", expected, format!("{x} and {draws}"));
        }
        Ok(vec![x.clone()])
    }
    fn stops_gradient(&self) -> bool {
        true
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        dispatch_bits!(io.dtype(), U => self.shift::<U>(io));
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let Some(dims) = Self::dims(launch.ty(0), launch.ty(1)) else { return Ok(()) };
        let n = launch.ty(0).len();
        let (h, w) = (dims.height as i32, dims.width as i32);
        let (images, most, draws) = (dims.images as i64, self.most as i32, dims.draws as i32);
        let size = ShiftSize { images, h, w, most, draws };
        let name = if launch.ty(0).dtype == DType::U8 { "shift_bytes" } else { "shift_floats" };
        launch.elements(name, n, args![launch.output(0), launch.input(0), launch.input(1), size, n])
    }
}

impl Shift {
    fn shift<U: Copy + Send + Sync>(&self, io: &Io<'_>) {
        let Some(Dims { images, height, width, draws }) = Self::dims(io.ty(0), io.ty(1)) else { return };
        let (x, y) = (io.input_bits::<U>(0), io.output_bits::<U>(0));
        let each = height * width;
        let draw =
            |i: usize| -> f32 { dispatch_float!(io.ty(1).dtype, T => io.input::<T>(1)[i].to_f64() as f32) };
        io.pool.rows(x.len() / each, each, RowsMut::new(y, each), |first, y| {
            for (i, y) in y.chunks_exact_mut(each).enumerate() {
                let row = (first + i) / images;
                let (down, right) = (self.distance(draw(draws * row)), self.distance(draw(draws * row + 1)));
                let colour = (draws == 3).then(|| draw(draws * row + 2));
                let from = colour.map_or(first + i, |draw| exchanged(first + i, draw));
                let image = &x[from * each..][..each];
                for (i, y) in y.chunks_exact_mut(width).enumerate() {
                    let from = (i as isize + down).clamp(0, height as isize - 1) as usize;
                    shift_line(&image[from * width..][..width], right, y);
                }
            }
        });
    }
}

/// The channel whose place `channel` takes in the order that a draw stands for: the three are turned by none, one or
/// two places, forwards or backwards.
fn exchanged(channel: usize, draw: f32) -> usize {
    let order = ((draw * 6.0) as usize).min(5);
    let own = channel % 3;
    channel - own + (order + if order < 3 { own } else { 3 - own }) % 3
}

/// y[j] = x[clamp(j + right)], where `right` is less than the line's length.
fn shift_line<U: Copy>(x: &[U], right: isize, y: &mut [U]) {
    let (n, gap) = (x.len(), right.unsigned_abs());
    if right >= 0 {
        y[..n - gap].copy_from_slice(&x[gap..]);
        y[n - gap..].fill(x[n - 1]);
    } else {
        y[gap..].copy_from_slice(&x[..n - gap]);
        y[..gap].fill(x[0]);
    }
}
