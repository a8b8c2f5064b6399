//! Memory of tensors and arenas, on the host or on a GPU.

use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::Result;
use crate::types::Element;

/// Memory on the host or on a GPU.
#[derive(Debug)]
pub(crate) enum Allocation {
    Host(Buffer),
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::DeviceBuffer),
}

impl Allocation {
    pub(crate) fn new(device: &Device, bytes: usize, what: &'static str) -> Result<Self> {
        Ok(match device {
            Device::Cpu(..) => Allocation::Host(Buffer::new(bytes, what)?),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Allocation::Cuda(crate::cuda::DeviceBuffer::new(gpu, bytes, what)?),
        })
    }

    /// Memory with these contents.
    pub(crate) fn with(device: &Device, data: &[u8], what: &'static str) -> Result<Self> {
        let allocation = Self::new(device, data.len(), what)?;
        // SAFETY: it was made this long, and nobody else knows it yet.
        unsafe { allocation.write([(0, data)].into_iter())? };
        Ok(allocation)
    }

    /// Address of the first byte, on the device that the memory belongs to.
    pub(crate) fn ptr(&self) -> *mut u8 {
        match self {
            Allocation::Host(buffer) => buffer.ptr(),
            #[cfg(feature = "cuda")]
            Allocation::Cuda(buffer) => buffer.address() as *mut u8,
        }
    }

    /// Whether programs of `device` can use the memory in place.
    pub(crate) fn is_on(&self, device: &Device) -> bool {
        match (self, device) {
            (Allocation::Host(_), Device::Cpu(..)) => true,
            #[cfg(feature = "cuda")]
            (Allocation::Cuda(buffer), Device::Cuda(gpu)) => buffer.gpu().same_queue(gpu),
            #[cfg(feature = "cuda")]
            _ => false,
        }
    }

    /// Replaces parts of the contents: (byte offset, new bytes) each, in order.
    ///
    /// # Safety
    /// The parts must lie inside the memory, and nobody else may use it meanwhile.
    pub(crate) unsafe fn write<'a>(&self, parts: impl Iterator<Item = (usize, &'a [u8])>) -> Result<()> {
        match self {
            Allocation::Host(buffer) => {
                for (offset, data) in parts {
                    // SAFETY: by the contract.
                    unsafe {
                        std::ptr::copy_nonoverlapping(data.as_ptr(), buffer.ptr().add(offset), data.len());
                    }
                }
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Allocation::Cuda(buffer) => buffer.write(parts),
        }
    }

    /// Copies parts of the contents to the host: (byte offset, where to) each.
    ///
    /// # Safety
    /// The parts must lie inside the memory, and nobody may write it meanwhile.
    pub(crate) unsafe fn read<'a>(&self, parts: impl Iterator<Item = (usize, &'a mut [u8])>) -> Result<()> {
        match self {
            Allocation::Host(buffer) => {
                for (offset, data) in parts {
                    // SAFETY: by the contract.
                    unsafe {
                        let from = buffer.ptr().add(offset);
                        std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len());
                    }
                }
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Allocation::Cuda(buffer) => buffer.read(parts),
        }
    }
}

/// The bytes of a slice of elements.
pub(crate) fn bytes_of<T: Element>(data: &[T]) -> &[u8] {
    // SAFETY: elements are plain numbers without padding.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}
