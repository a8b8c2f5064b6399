//! What an op's `cuda` method is given: operands on the device, and ways to queue work on them.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUstream};

use super::driver::{DeviceBuffer, call};
use super::kernels::Kernels;
use super::{Gpu, product};
use crate::error::Result;
use crate::operand::Operand;
use crate::types::TensorType;

pub(crate) use product::Product;

/// One kernel argument: a number, an address, a struct of 4-byte integers, or one of [`struct_arg`].
pub(crate) trait Arg {
    fn push(&self, args: &mut Args);
}

/// Arguments of a kernel, each starting at a multiple of 8 bytes.
#[derive(Default)]
pub(crate) struct Args {
    words: Vec<u64>,
    starts: Vec<usize>,
}

macro_rules! scalar_args {
    ($($ty:ty => |$x:ident| $word:expr),* $(,)?) => {$(
        impl Arg for $ty {
            fn push(&self, args: &mut Args) {
                let $x = *self;
                args.starts.push(args.words.len());
                args.words.push($word);
            }
        }
    )*};
}
scalar_args! {
    u64 => |x| x,
    i64 => |x| x as u64,
    i32 => |x| u64::from(x as u32),
    u32 => |x| u64::from(x),
    f32 => |x| u64::from(x.to_bits()),
    f64 => |x| x.to_bits(),
    // Extents: kernels take them as 64-bit integers, or as 32-bit ones where they are known to fit.
    usize => |x| x as u64,
    bool => |x| u64::from(x),
}

/// A struct of 4-byte integers.
impl<const N: usize> Arg for [i32; N] {
    fn push(&self, args: &mut Args) {
        args.starts.push(args.words.len());
        for pair in self.chunks(2) {
            let high = pair.get(1).map_or(0, |x| u64::from(*x as u32) << 32);
            args.words.push(u64::from(pair[0] as u32) | high);
        }
    }
}

impl Args {
    /// Adds a struct of 8-byte fields.
    pub fn push_words(&mut self, words: &[u64]) {
        self.starts.push(self.words.len());
        self.words.extend_from_slice(words);
    }
}

/// Defines a struct of addresses and extents that a kernel takes by value. The `.cu` file has one of the same
/// name with the same fields in the same order, each a pointer or an `i64`.
macro_rules! struct_arg {
    ($(#[$meta:meta])* struct $name:ident { $($field:ident),* $(,)? }) => {
        $(#[$meta])*
        struct $name { $($field: u64),* }
        #[cfg(test)]
        impl $name {
            const FIELDS: &[&str] = &[$(stringify!($field)),*];
        }
        impl $crate::cuda::launch::Arg for $name {
            fn push(&self, args: &mut $crate::cuda::launch::Args) {
                args.push_words(&[$(self.$field),*]);
            }
        }
    };
}
pub(crate) use struct_arg;

/// `args![a, b, c]`: arguments in the kernel's order. `usize` and `i64` become `i64` (or `int`, if the kernel says so), `bool` becomes `int`.
macro_rules! args {
    ($($arg:expr),* $(,)?) => {{
        let mut args = $crate::cuda::launch::Args::default();
        $($crate::cuda::launch::Arg::push(&$arg, &mut args);)*
        args
    }};
}
pub(crate) use args;

/// Threads of most kernels' blocks.
pub(crate) const THREADS: u32 = 256;

/// What an op works with.
pub(crate) struct Launch<'a> {
    pub inputs: &'a [Operand],
    pub outputs: &'a [Operand],
    pub(super) gpu: &'a Gpu,
    pub(super) stream: CUstream,
    /// Scratch and tables, kept as long as the program.
    pub(super) keep: &'a mut Vec<DeviceBuffer>,
    /// Kernels, products, copies and fills queued.
    pub(super) queued: &'a mut usize,
    /// Addresses that an op's work leaves for its work aside.
    pub notes: &'a mut Vec<u64>,
}

impl Launch<'_> {
    pub fn ty(&self, input: usize) -> &TensorType {
        &self.inputs[input].ty
    }

    pub fn out_ty(&self, output: usize) -> &TensorType {
        &self.outputs[output].ty
    }

    /// Address of input `i`.
    pub fn input(&self, i: usize) -> u64 {
        self.inputs[i].ptr as u64
    }

    /// Address of input `i`, or 0 where there is no such operand.
    pub fn input_if(&self, i: Option<usize>) -> u64 {
        i.map_or(0, |i| self.input(i))
    }

    /// Address of output `i`; 0 if nobody reads it.
    pub fn output(&self, i: usize) -> u64 {
        self.outputs[i].ptr as u64
    }

    /// Queues a kernel with blocks of `threads` threads.
    pub fn kernel(
        &mut self,
        name: &'static str,
        grid: [usize; 3],
        threads: u32,
        shared: usize,
        args: Args,
    ) -> Result<()> {
        *self.queued += 1;
        launch_kernel(
            &self.gpu.0.kernels,
            self.stream,
            name,
            Shape { grid, threads, shared, cluster: 1 },
            args,
        )
    }

    /// Queues a kernel with one thread per element.
    pub fn elements(&mut self, name: &'static str, count: usize, args: Args) -> Result<()> {
        self.kernel(name, [count.div_ceil(THREADS as usize), 1, 1], THREADS, 0, args)
    }

    /// Queues a kernel with one warp per row, eight to a block.
    pub fn warps(&mut self, name: &'static str, rows: usize, args: Args) -> Result<()> {
        self.kernel(name, [rows.div_ceil(8), 1, 1], 256, 0, args)
    }

    /// Queues a matrix product.
    pub fn product(&mut self, product: &Product) -> Result<()> {
        *self.queued += 1;
        let (gpu, keep) = (self.gpu, &mut *self.keep);
        gpu.0.products.queue(product, self.stream, |bytes| kept(gpu, keep, bytes))
    }

    /// Device memory of this op's own, zero at first.
    pub fn scratch(&mut self, bytes: usize) -> Result<u64> {
        kept(self.gpu, self.keep, bytes)
    }

    /// A table of integers on the device.
    pub fn table(&mut self, data: &[u64]) -> Result<u64> {
        // SAFETY: plain integers.
        let bytes = unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) };
        let buffer = DeviceBuffer::with(self.gpu, bytes, "an op's table")?;
        let address = buffer.address();
        self.keep.push(buffer);
        Ok(address)
    }

    /// Queues a copy between places that do not overlap.
    pub fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<()> {
        *self.queued += 1;
        call!(cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream))
    }

    /// Queues zeros.
    pub fn clear(&mut self, at: u64, bytes: usize) -> Result<()> {
        *self.queued += 1;
        call!(cuMemsetD8Async(at, 0, bytes, self.stream))
    }

    /// For ops that work in place: makes output `output` hold input `input` if the two do not share memory.
    pub fn in_place(&mut self, input: usize, output: usize) -> Result<u64> {
        let (from, to) = (self.input(input), self.output(output));
        if from != to && to != 0 {
            self.copy(to, from, self.inputs[input].ty.bytes())?;
        }
        Ok(to)
    }
}

fn kept(gpu: &Gpu, keep: &mut Vec<DeviceBuffer>, bytes: usize) -> Result<u64> {
    let buffer = DeviceBuffer::new(gpu, bytes, "an op's scratch")?;
    let address = buffer.address();
    keep.push(buffer);
    Ok(address)
}

/// How a kernel is launched.
pub(super) struct Shape {
    pub grid: [usize; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared: usize,
    /// Blocks along the last axis that run together and see each other's shared memory.
    pub cluster: u32,
}

/// Queues a kernel.
pub(super) fn launch_kernel(
    kernels: &Kernels,
    stream: CUstream,
    name: &'static str,
    shape: Shape,
    mut args: Args,
) -> Result<()> {
    let function = kernels.function(name, shape.shared as u32)?;
    let words = args.words.as_mut_ptr();
    // SAFETY: starts lie inside the words.
    let mut pointers: Vec<*mut c_void> =
        args.starts.iter().map(|s| unsafe { words.add(*s) }.cast()).collect();
    let [x, y, z] = shape.grid.map(|n| n as u32);
    // SAFETY: plain numbers; those of the cluster are written below.
    let mut cluster: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
    cluster.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim =
        sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: 1, y: 1, z: shape.cluster };
    let config = sys::CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: shape.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: shape.shared as u32,
        hStream: stream,
        attrs: &raw mut cluster,
        // Older GPUs know no clusters, not even of one block.
        numAttrs: u32::from(shape.cluster > 1),
    };
    call!(cuLaunchKernelEx(&raw const config, function, pointers.as_mut_ptr(), std::ptr::null_mut()))
}
