//! Options that choose where to compute.

use elmur_engine::{Device, Precision};

/// Where to compute.
#[derive(clap::Args, Clone)]
pub struct DeviceArgs {
    /// Where to compute: cpu, cuda or cuda:N.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// How products are computed on a GPU: f32, tf32 or bf16.
    #[arg(long, default_value = "tf32")]
    precision: String,
}

impl DeviceArgs {
    /// Opens the device; on the CPU with this many threads (0: one per core).
    pub fn open(&self, threads: usize) -> elmur_model::Result<Device> {
        Ok(Device::open(&self.device, threads, self.precision()?)?)
    }

    /// The device's name as given.
    pub fn name(&self) -> &str {
        &self.device
    }

    /// The precision of products.
    pub fn precision(&self) -> elmur_model::Result<Precision> {
        let found = Precision::ALL.into_iter().find(|p| p.name() == self.precision);
        found.ok_or_else(|| elmur_model::Error::Config {
            key: "precision".to_owned(),
            expected: "f32, tf32 or bf16".to_owned(),
            got: self.precision.clone(),
        })
    }
}
