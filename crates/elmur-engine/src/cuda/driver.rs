//! The CUDA driver as the executor needs it: contexts, streams and memory, with every call checked.

use std::ffi::CStr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::Gpu;
use crate::error::{Error, Result};

/// An error of the driver, with the call that failed.
#[cold]
fn failed(call: &'static str, code: sys::CUresult) -> Error {
    let mut name = std::ptr::null();
    // SAFETY: the driver writes a pointer to a static string, or leaves null.
    let cause = unsafe {
        let known =
            sys::cuGetErrorName(code, &raw mut name) == sys::CUresult::CUDA_SUCCESS && !name.is_null();
        if known { CStr::from_ptr(name).to_string_lossy().into_owned() } else { format!("{code:?}") }
    };
    Error::Cuda { call, cause }
}

/// Calls a function of the driver and turns its status into a result.
macro_rules! call {
    ($name:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: see the caller: handles are alive and pointers lead to memory of the stated size.
        let code = unsafe { cudarc::driver::sys::$name($($arg),*) };
        $crate::cuda::driver::check(stringify!($name), code)
    }};
}
pub(super) use call;

#[inline]
pub(super) fn check(call: &'static str, code: sys::CUresult) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(failed(call, code)) }
}

/// Fails unless a library can be loaded.
pub(super) fn require(present: bool, library: &'static str) -> Result<()> {
    if present { Ok(()) } else { Err(Error::MissingLibrary { library }) }
}

/// The primary context of one GPU.
#[derive(Debug)]
pub(super) struct Context {
    ordinal: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: contexts may be made current on any thread.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Context {}

impl Context {
    pub fn open(ordinal: usize) -> Result<Arc<Self>> {
        // SAFETY: only looks for the library.
        require(unsafe { sys::is_culib_present() }, "libcuda.so (the NVIDIA driver)")?;
        call!(cuInit(0))?;
        let mut count = 0;
        call!(cuDeviceGetCount(&raw mut count))?;
        if ordinal >= count as usize {
            let expected =
                if count == 0 { "a GPU".to_owned() } else { format!("cuda:0 to cuda:{}", count - 1) };
            return Err(Error::Device { expected, got: format!("cuda:{ordinal}") });
        }
        let mut device = 0;
        call!(cuDeviceGet(&raw mut device, ordinal as i32))?;
        let mut context = std::ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        let context = Self { ordinal, device, context };
        context.enter()?;
        Ok(Arc::new(context))
    }

    /// Makes the context current on this thread.
    pub fn enter(&self) -> Result<()> {
        call!(cuCtxSetCurrent(self.context))
    }

    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    pub fn name(&self) -> String {
        let mut name = [0 as std::ffi::c_char; 128];
        match call!(cuDeviceGetName(name.as_mut_ptr(), 128, self.device)) {
            // SAFETY: the driver ends the name with a zero within the array.
            Ok(()) => unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(),
            Err(_) => format!("cuda:{}", self.ordinal),
        }
    }

    pub fn memory(&self) -> Result<(usize, usize)> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok((free, total))
    }

    /// Compute capability as one number, 90 for 9.0.
    pub fn architecture(&self) -> Result<i32> {
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        let (mut major, mut minor) = (0, 0);
        call!(cuDeviceGetAttribute(&raw mut major, MAJOR, self.device))?;
        call!(cuDeviceGetAttribute(&raw mut minor, MINOR, self.device))?;
        Ok(10 * major + minor)
    }

    /// Bytes of shared memory that a block may use at most.
    pub fn most_shared(&self) -> Result<usize> {
        let most = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let mut bytes = 0;
        call!(cuDeviceGetAttribute(&raw mut bytes, most, self.device))?;
        Ok(bytes as usize)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// A CUDA stream: a queue of work.
#[derive(Debug)]
pub(super) struct Stream {
    pub raw: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        context.enter()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        call!(cuStreamCreate(&raw mut raw, flags))?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    /// A stream whose work goes before the work of other streams.
    pub fn urgent(context: &Arc<Context>) -> Result<Self> {
        context.enter()?;
        let (mut least, mut greatest) = (0, 0);
        call!(cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest))?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        call!(cuStreamCreateWithPriority(&raw mut raw, flags, greatest))?;
        Ok(Self { raw, context: Arc::clone(context) })
    }

    pub fn synchronize(&self) -> Result<()> {
        self.context.enter()?;
        call!(cuStreamSynchronize(self.raw))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created by `new`; the driver finishes queued work first.
            unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// Zero-initialised device memory, used by the queue of one [`Gpu`].
pub(crate) struct DeviceBuffer {
    address: sys::CUdeviceptr,
    bytes: usize,
    gpu: Gpu,
}

impl std::fmt::Debug for DeviceBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceBuffer({} bytes)", self.bytes)
    }
}

impl DeviceBuffer {
    pub fn new(gpu: &Gpu, bytes: usize, what: &'static str) -> Result<Self> {
        gpu.0.context.enter()?;
        let mut address = 0;
        // SAFETY: the driver writes the address.
        let code = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes.max(256)) };
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::OutOfMemory { bytes, what });
        }
        check("cuMemAlloc", code)?;
        let buffer = Self { address, bytes, gpu: gpu.clone() };
        // Zeroed in stream order: after earlier users of this memory, before later ones.
        call!(cuMemsetD8Async(address, 0, bytes.max(256), gpu.0.stream.raw))?;
        Ok(buffer)
    }

    /// Device memory with these contents.
    pub fn with(gpu: &Gpu, data: &[u8], what: &'static str) -> Result<Self> {
        let buffer = Self::new(gpu, data.len(), what)?;
        buffer.write([(0, data)].into_iter())?;
        Ok(buffer)
    }

    pub fn address(&self) -> sys::CUdeviceptr {
        self.address
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Replaces parts of the contents, (byte offset, new bytes) each, after all work queued so far; returns
    /// when that is done.
    pub fn write<'a>(&self, parts: impl Iterator<Item = (usize, &'a [u8])>) -> Result<()> {
        self.gpu.0.context.enter()?;
        let stream = self.gpu.0.stream.raw;
        for (offset, data) in parts {
            let to = self.part(offset, data.len());
            call!(cuMemcpyHtoDAsync_v2(to, data.as_ptr().cast(), data.len(), stream))?;
        }
        self.gpu.synchronize()
    }

    /// Copies parts of the contents to the host, (byte offset, where to) each, after all work queued so far.
    pub fn read<'a>(&self, parts: impl Iterator<Item = (usize, &'a mut [u8])>) -> Result<()> {
        self.gpu.0.context.enter()?;
        let stream = self.gpu.0.stream.raw;
        for (offset, data) in parts {
            let from = self.part(offset, data.len());
            call!(cuMemcpyDtoHAsync_v2(data.as_mut_ptr().cast(), from, data.len(), stream))?;
        }
        self.gpu.synchronize()
    }

    /// Address of `len` bytes from `offset` on.
    fn part(&self, offset: usize, len: usize) -> sys::CUdeviceptr {
        assert!(offset <= self.bytes && len <= self.bytes - offset);
        self.address + offset as u64
    }

    /// Queues a copy of the whole contents to host memory: to `spare`, if given, or to new memory.
    pub fn read_later(&self, spare: Option<Pinned>) -> Result<Pinned> {
        let pinned = match spare {
            Some(pinned) => pinned,
            None => Pinned::new(&self.gpu.0.context, self.bytes)?,
        };
        let stream = &self.gpu.0.stream;
        self.gpu.0.context.enter()?;
        call!(cuMemcpyDtoHAsync_v2(pinned.data.cast(), self.address, self.bytes, stream.raw))?;
        pinned.queued(stream)?;
        Ok(pinned)
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.gpu.0.context.enter().is_ok() {
            // SAFETY: allocated by `new`; freeing waits for work that may still use it.
            unsafe { sys::cuMemFree_v2(self.address) };
        }
    }
}

/// Host memory that the GPU reads and writes directly, and an event that says when the GPU is done with it.
#[derive(Debug)]
pub(crate) struct Pinned {
    pub data: *mut u8,
    event: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: memory and event belong to it alone and may be used from any thread.
unsafe impl Send for Pinned {}
// SAFETY: shared references only wait and record.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self> {
        context.enter()?;
        let mut data = std::ptr::null_mut();
        // SAFETY: the driver writes the address.
        let code = unsafe { sys::cuMemHostAlloc(&raw mut data, bytes.max(1), 0) };
        if code == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::OutOfMemory { bytes, what: "memory shared with the GPU" });
        }
        check("cuMemHostAlloc", code)?;
        let mut pinned =
            Self { data: data.cast(), event: std::ptr::null_mut(), context: Arc::clone(context) };
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        call!(cuEventCreate(&raw mut pinned.event, flags))?;
        Ok(pinned)
    }

    /// Waits until all work queued before the last call of [`Pinned::queued`] is done.
    pub fn wait(&self) -> Result<()> {
        self.context.enter()?;
        call!(cuEventSynchronize(self.event))
    }

    /// Records the event after all work queued so far.
    pub(super) fn queued(&self, stream: &Stream) -> Result<()> {
        call!(cuEventRecord(self.event, stream.raw))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: created by `new`; the wait ends copies that still read it.
            unsafe {
                if !self.event.is_null() {
                    sys::cuEventSynchronize(self.event);
                    sys::cuEventDestroy_v2(self.event);
                }
                sys::cuMemFreeHost(self.data.cast());
            }
        }
    }
}
