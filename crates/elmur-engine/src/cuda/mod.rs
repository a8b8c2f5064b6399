//! Execution on NVIDIA GPUs: every program becomes one CUDA graph, replayed by one call.
//!
//! - `driver.rs`: context, streams, device and pinned memory; errors that name the call and the cause.
//! - `kernels.rs`: the kernels (`*.cu` beside each op), compiled by NVRTC once and kept on disk.
//! - `product.rs`: matrix products by cuBLASLt or our own kernel.
//! - `args.rs`: arguments of kernels.
//! - `launch.rs`: what an op's `cuda` method is given.
//! - `dependencies.rs`: which part of a program waits for which; `capture.rs`: its steps as a CUDA graph with
//!   just those edges.
//! - `exec.rs`: running that graph, outputs, and the time of every step; `inputs.rs`: copies of inputs.
//!
//! Libraries are loaded at run time: this compiles and runs on machines without CUDA, where opening a GPU is
//! an error.

pub(crate) mod args;
mod capture;
mod dependencies;
mod driver;
pub(crate) mod exec;
mod inputs;
mod kernels;
pub(crate) mod launch;
mod product;

use std::sync::Arc;

use driver::{Context, Stream};
pub(crate) use driver::{DeviceBuffer, Pinned};

use crate::error::Result;
use crate::precision::Precision;

/// One GPU, and a queue of work on it. Clones share the queue; [`Gpu::another`] opens a second queue.
///
/// A program and its stores must use the same queue.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    // Fields are dropped in this order: queued work first, then the context that it runs in.
    stream: Stream,
    products: product::Products,
    kernels: Arc<kernels::Kernels>,
    context: Arc<Context>,
    precision: Precision,
    /// Bytes of shared memory that a block may use at most.
    most_shared: usize,
}

impl std::fmt::Debug for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gpu({}, {})", self.0.context.ordinal(), self.0.precision.name())
    }
}

impl Gpu {
    /// Opens GPU number `ordinal`: loads the driver, compiles the kernels or reads them from the cache.
    pub fn open(ordinal: usize, precision: Precision) -> Result<Self> {
        let context = Context::open(ordinal)?;
        let kernels = Arc::new(kernels::Kernels::load(&context)?);
        Self::new(context, kernels, precision)
    }

    fn new(context: Arc<Context>, kernels: Arc<kernels::Kernels>, precision: Precision) -> Result<Self> {
        let stream = Stream::new(&context)?;
        let products = product::Products::new(&context, &kernels, precision)?;
        let most_shared = context.most_shared()?;
        Ok(Self(Arc::new(Inner { stream, products, kernels, context, precision, most_shared })))
    }

    /// Another queue on the same GPU, whose work runs beside that of this queue.
    pub fn another(&self) -> Result<Self> {
        Self::new(Arc::clone(&self.0.context), Arc::clone(&self.0.kernels), self.0.precision)
    }

    /// Name of the GPU.
    pub fn name(&self) -> String {
        self.0.context.name()
    }

    /// Free and total bytes of the GPU's memory.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.0.context.memory()
    }

    /// Waits until all work in the queue is done.
    pub fn synchronize(&self) -> Result<()> {
        self.0.stream.synchronize()
    }

    pub(crate) fn same_queue(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
