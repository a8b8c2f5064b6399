//! Where programs run.

use crate::cpu::pool::Pool;
#[cfg(feature = "cuda")]
use crate::cuda::Gpu;
use crate::error::{Error, Result};

/// How products of f32 are computed on a GPU. Sums, norms, losses and the optimizer are f32 in all of them, and so are, to its last bits,
/// products of up to 2^22 multiplications and layers with up to 16 outputs (routers and heads): there nothing is gained by rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// In f32, or on tensor cores from two tf32 parts of every number, 22 bits.
    F32,
    /// Operands rounded to tf32 (10 bits of mantissa), sums in f32.
    #[default]
    Tf32,
    /// Operands rounded to bf16 (7 bits of mantissa) where the library multiplies, to tf32 where our own kernel does; sums in f32.
    Bf16,
}

impl Precision {
    /// All of them.
    pub const ALL: [Precision; 3] = [Precision::F32, Precision::Tf32, Precision::Bf16];

    /// As in configs and on the command line.
    pub fn name(self) -> &'static str {
        ["f32", "tf32", "bf16"][self as usize]
    }
}

/// A device with everything needed to run programs on it. Made from a [`Pool`] or (with the feature `cuda`) a `Gpu`.
#[derive(Debug, Clone)]
pub enum Device {
    /// The CPU, on the threads of a pool.
    Cpu(Pool),
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(Gpu),
}

impl From<&Pool> for Device {
    fn from(pool: &Pool) -> Self {
        Device::Cpu(pool.clone())
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
    /// The device of this name: `cpu`, on `threads` threads (0: one per core), or `cuda` or `cuda:N`, with products in
    /// `precision`.
    pub fn open(name: &str, threads: usize, precision: Precision) -> Result<Self> {
        Self::check_name(name)?;
        if name == "cpu" {
            return Ok(Device::Cpu(Pool::new(threads)));
        }
        #[cfg(feature = "cuda")]
        {
            let ordinal = name.strip_prefix("cuda:").and_then(|n| n.parse().ok()).unwrap_or(0);
            Ok(Device::Cuda(Gpu::open(ordinal, precision)?))
        }
        #[cfg(not(feature = "cuda"))]
        {
            let _ = precision;
            let expected = "cpu (this build is without CUDA: build with --features cuda)".to_owned();
            Err(Error::Op { op: "device", expected, got: name.to_owned() })
        }
    }

    /// Fails unless [`Device::open`] knows the name, whether or not this machine has such a device.
    pub fn check_name(name: &str) -> Result<()> {
        let numbered = |n: &str| n.parse::<u16>().is_ok();
        if name == "cpu" || name == "cuda" || name.strip_prefix("cuda:").is_some_and(numbered) {
            return Ok(());
        }
        Err(Error::Op { op: "device", expected: "cpu, cuda or cuda:N".to_owned(), got: name.to_owned() })
    }

    /// A device of the same kind whose work runs beside this one's: the same threads, or another queue of the GPU.
    pub fn another(&self) -> Result<Self> {
        Ok(match self {
            Device::Cpu(pool) => Device::Cpu(pool.clone()),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Device::Cuda(gpu.another()?),
        })
    }

    /// Whether it is the CPU.
    pub fn is_cpu(&self) -> bool {
        matches!(self, Device::Cpu(_))
    }

    /// Waits until all queued work is done.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Device::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => gpu.synchronize(),
        }
    }

    /// Bytes that are free on it; unknown on the CPU.
    pub fn free_memory(&self) -> Option<usize> {
        match self {
            Device::Cpu(_) => None,
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
            let error = Device::open(bad, 1, Precision::F32).unwrap_err().to_string();
            assert!(error.contains("expected cpu, cuda or cuda:N"), "{error}");
        }
        #[cfg(not(feature = "cuda"))]
        assert!(
            Device::open("cuda:0", 1, Precision::F32).unwrap_err().to_string().contains("--features cuda")
        );
    }
}
