//! Options that choose where to compute.

use elmur_engine::{Device, Precision};

/// Where to compute.
#[derive(clap::Args, Clone)]
pub struct DeviceArgs {
    /// Compute on this device: cpu, cuda or cuda:N; `eval` also knows auto, the faster one.
    #[arg(long, default_value = "cpu")]
    device: String,
    /// Compute matrix products in this precision: f32, tf32 or bf16; a CPU has a choice only if it trains and has a
    /// matrix unit (AMX).
    #[arg(long, default_value = "tf32")]
    precision: String,
}

impl DeviceArgs {
    /// Opens the device; on the CPU with this many threads (0: as many as are granted).
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
