//! Devices that programs run on: the CPU or a GPU.

use crate::cpu::pool::Pool;
#[cfg(feature = "cuda")]
use crate::cuda::Gpu;
use crate::error::{Error, Result};
use crate::precision::Precision;

/// A device, with everything needed to run programs on it. Made from a [`Pool`], then with products of f32 accuracy,
/// or, with the feature `cuda`, from a `Gpu`.
#[derive(Debug, Clone)]
pub enum Device {
    /// The CPU, on the threads of a pool, with matrix products in a precision.
    Cpu(Pool, Precision),
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(Gpu),
}

impl From<&Pool> for Device {
    fn from(pool: &Pool) -> Self {
        Device::Cpu(pool.clone(), Precision::F32)
    }
}

#[cfg(feature = "cuda")]
impl From<&Gpu> for Device {
    fn from(gpu: &Gpu) -> Self {
        Device::Cuda(gpu.clone())
    }
}

impl From<&Device> for Device {
    fn from(device: &Device) -> Self {
        device.clone()
    }
}

impl Device {
    /// Opens the device of this name: `cpu`, with `threads` threads (0: one per core), or `cuda` or `cuda:N`;
    /// with matrix products in `precision`.
    pub fn open(name: &str, threads: usize, precision: Precision) -> Result<Self> {
        Self::check_name(name)?;
        if name == "cpu" {
            return Ok(Device::Cpu(Pool::new(threads), precision));
        }
        #[cfg(feature = "cuda")]
        {
            let ordinal = name.strip_prefix("cuda:").and_then(|n| n.parse().ok()).unwrap_or(0);
            Ok(Device::Cuda(Gpu::open(ordinal, precision)?))
        }
        #[cfg(not(feature = "cuda"))]
        {
            let expected = "cpu (this build is without CUDA: build with --features cuda)".to_owned();
            Err(Error::Device { expected, got: name.to_owned() })
        }
    }

    /// Fails unless `name` is one that [`Device::open`] knows, whether or not this machine has such a device.
    pub fn check_name(name: &str) -> Result<()> {
        let numbered = |n: &str| n.parse::<u16>().is_ok();
        if name == "cpu" || name == "cuda" || name.strip_prefix("cuda:").is_some_and(numbered) {
            return Ok(());
        }
        Err(Error::Device { expected: "cpu, cuda or cuda:N".to_owned(), got: name.to_owned() })
    }

    /// A second device whose work runs beside that of this one: the same threads, or another queue of the
    /// same GPU.
    pub fn another(&self) -> Result<Self> {
        Ok(match self {
            Device::Cpu(pool, precision) => Device::Cpu(pool.clone(), *precision),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Device::Cuda(gpu.another()?),
        })
    }

    /// The device with products of f32 accuracy if it is the CPU; a GPU keeps its precision.
    pub fn exact(&self) -> Self {
        match self {
            Device::Cpu(pool, _) => Device::Cpu(pool.clone(), Precision::F32),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Device::Cuda(gpu.clone()),
        }
    }

    /// Whether the device is the CPU.
    pub fn is_cpu(&self) -> bool {
        matches!(self, Device::Cpu(..))
    }

    /// The threads of the CPU; none for a GPU.
    pub(crate) fn pool(&self) -> Option<&Pool> {
        match self {
            Device::Cpu(pool, _) => Some(pool),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => None,
        }
    }

    /// Bytes that a program may spend on giving every value memory of its own, which lets independent ops run
    /// side by side. None on the CPU, where ops run one after the other.
    pub(crate) fn unshared_budget(&self) -> usize {
        match self {
            Device::Cpu(..) => 0,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => 2 << 30,
        }
    }

    /// Waits until all work that was queued on the device is done.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Device::Cpu(..) => Ok(()),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => gpu.synchronize(),
        }
    }

    /// Bytes of free memory of a GPU; none for the CPU.
    pub fn free_memory(&self) -> Option<usize> {
        match self {
            Device::Cpu(..) => None,
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Some(gpu.memory().ok()?.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_opened_by_name() {
        assert!(Device::open("cpu", 1, Precision::F32).unwrap().is_cpu());
        for bad in ["gpu", "cuda:", "cuda:x", "CPU", ""] {
            let error = Device::open(bad, 1, Precision::F32).unwrap_err();
            assert!(matches!(error, Error::Device { .. }));
            assert_eq!(error.to_string(), format!("device: expected cpu, cuda or cuda:N, got {bad}"));
        }
        #[cfg(not(feature = "cuda"))]
        assert!(
            Device::open("cuda:0", 1, Precision::F32).unwrap_err().to_string().contains("--features cuda")
        );
    }
}
