//! What an op's `cuda` method is given: operands on the device, and ways to queue work on them.

use cudarc::driver::sys::CUstream;

use super::args::Args;
use super::dependencies::{Range, any_overlap};
use super::driver::{DeviceBuffer, call};
use super::kernels::Shape;
use super::{Gpu, product};
use crate::error::Result;
use crate::operand::Operand;
use crate::precision::Precision;
use crate::types::TensorType;

pub(crate) use product::Product;

/// Threads in a block of most kernels.
pub(crate) const THREADS: u32 = 256;

/// What an op's `cuda` method is given.
pub(crate) struct Launch<'a> {
    pub inputs: &'a [Operand],
    pub outputs: &'a [Operand],
    pub(super) gpu: &'a Gpu,
    pub(super) stream: CUstream,
    /// Scratch and tables of all ops, alive as long as the program.
    pub(super) keep: &'a mut Vec<DeviceBuffer>,
    /// Number of kernels, products, copies and fills queued so far.
    pub(super) queued: &'a mut usize,
    /// Addresses of scratch memory that an op's work leaves for its deferred work.
    pub handoff: &'a mut Vec<u64>,
    /// What the work writes that this work waits for directly.
    pub(super) written: &'a [Range],
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

    /// Whether the first kernel that is queued may read input `i` before `begin()`: no work that it waits for
    /// directly writes it. What that work itself waits for has ended when the kernel starts, since every kernel
    /// waits before it lets others be launched.
    pub fn is_settled(&self, i: usize) -> bool {
        !Range::of(&self.inputs[i]).is_some_and(|range| any_overlap(self.written, &[range]))
    }

    /// Queues a kernel with blocks of `threads` threads.
    pub fn kernel(
        &mut self,
        name: &'static str,
        grid: [usize; 3],
        threads: u32,
        shared: usize,
        args: impl Into<Args>,
    ) -> Result<()> {
        *self.queued += 1;
        let shape = Shape { grid, threads, shared, cluster: 1 };
        self.gpu.0.kernels.launch(self.stream, name, shape, args.into())
    }

    /// Queues a kernel in clusters of `cluster` blocks along the last axis of the grid.
    pub fn clusters(
        &mut self,
        name: &'static str,
        grid: [usize; 3],
        cluster: u32,
        threads: u32,
        shared: usize,
        args: impl Into<Args>,
    ) -> Result<()> {
        *self.queued += 1;
        let shape = Shape { grid, threads, shared, cluster };
        self.gpu.0.kernels.launch(self.stream, name, shape, args.into())
    }

    /// Whether the GPU has clusters, whose blocks see each other's shared memory.
    pub fn has_clusters(&self) -> bool {
        self.gpu.0.products.clusters()
    }

    /// Whether products are to be as good as f32.
    pub fn is_exact(&self) -> bool {
        self.gpu.0.precision == Precision::F32
    }

    /// Bytes of shared memory that a block may use at most.
    pub fn most_shared(&self) -> usize {
        self.gpu.0.most_shared
    }

    /// Queues a kernel with one thread per element.
    pub fn elements(&mut self, name: &'static str, count: usize, args: impl Into<Args>) -> Result<()> {
        self.kernel(name, [count.div_ceil(THREADS as usize), 1, 1], THREADS, 0, args)
    }

    /// Queues a kernel with one warp per row, eight to a block.
    pub fn warps(&mut self, name: &'static str, rows: usize, args: impl Into<Args>) -> Result<()> {
        self.kernel(name, [rows.div_ceil(8), 1, 1], 256, 0, args)
    }

    /// Queues a matrix product.
    pub fn product(&mut self, product: &Product) -> Result<()> {
        *self.queued += 1;
        let (gpu, keep) = (self.gpu, &mut *self.keep);
        gpu.0.products.queue(product, self.stream, |bytes| kept(gpu, keep, bytes))
    }

    /// Allocates scratch memory for this op, zero before the first run.
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

    /// Queues a copy of `bytes` bytes between addresses that do not overlap.
    pub fn copy(&mut self, to: u64, from: u64, bytes: usize) -> Result<()> {
        *self.queued += 1;
        call!(cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream))
    }

    /// Queues a fill of `bytes` bytes with zeros.
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
