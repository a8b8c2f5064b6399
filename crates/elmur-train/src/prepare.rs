//! From settings to what a run needs: devices opened, demonstrations played or read.

use std::sync::Arc;

use elmur_base::Stop;
use elmur_data::{Dataset, Source, collect};
use elmur_engine::Device;
use elmur_envs::{EnvConfig, Wrappers};

use crate::config::RunConfig;
use crate::error::{Error, Result};

/// The devices of a run, open.
#[derive(Debug, Clone)]
pub struct Devices {
    /// The device that trains.
    pub train: Device,
    /// The device that evaluates meanwhile; none: the one that trains.
    pub eval: Option<Device>,
}

impl Devices {
    /// Opens the devices that a config names.
    pub fn open(config: &RunConfig) -> Result<Self> {
        let t = &config.train;
        let open = |key: &str, name: &str| match Device::open(name, t.threads, t.precision.into()) {
            // A device that this build or machine lacks is as much a mistake in the config as an unknown
            // name.
            Err(elmur_engine::Error::Device { expected, got }) => Err(Error::config(key, expected, got)),
            opened => Ok(opened?),
        };
        let elsewhere = config.eval.device.as_deref().filter(|name| *name != t.device);
        let eval = elsewhere.map(|name| open("eval.device", name)).transpose()?;
        Ok(Self { train: open("train.device", &t.device)?, eval })
    }

    /// Devices of the same kinds whose work runs beside these'.
    pub fn another(&self) -> Result<Self> {
        let eval = self.eval.as_ref().map(Device::another).transpose()?;
        Ok(Self { train: self.train.another()?, eval })
    }
}

impl RunConfig {
    /// The demonstrations: read from `data.file`, or played by the expert.
    pub fn dataset(&self) -> Result<Arc<dyn Source>> {
        self.watched_dataset(&Stop::default(), &mut |_| {})
    }

    /// [`Self::dataset`] for someone who waits: `progress` hears how many episodes the expert has played.
    pub fn watched_dataset(&self, stop: &Stop, progress: &mut dyn FnMut(usize)) -> Result<Arc<dyn Source>> {
        if let Some(file) = &self.data.file {
            return self.read(file);
        }
        let env = self.env.ok_or_else(|| Error::config("data.file", "a dataset", "null"))?;
        let data = &self.data;
        let mut episodes = Vec::with_capacity(data.episodes.min(1 << 20));
        let keep = |episode| {
            episodes.push(episode);
            progress(episodes.len());
            if stop.requested() { Err(elmur_data::Error::Stopped) } else { Ok(()) }
        };
        collect::collect(&env, data.episodes, data.seed, data.noise, self.train.threads, keep)?;
        let metadata = collect::metadata(&env, data.seed, data.noise);
        Ok(Arc::new(Dataset::from_episodes(collect::spaces(&env)?, metadata, episodes)?))
    }

    /// A dataset file or folder. Plain data of the environment gets the environment's wrappers.
    fn read(&self, file: &std::path::Path) -> Result<Arc<dyn Source>> {
        let Some(env) = self.env else { return Ok(elmur_data::open(file, None)?) };
        let plain = EnvConfig { wrappers: Wrappers::default(), ..env }.evaluation()?.spaces().clone();
        // Arrays do not tell their spaces: those of the environment are right unless the numbers say
        // otherwise.
        let source = elmur_data::open(file, Some(&plain)).or_else(|_| elmur_data::open(file, None))?;
        if env.wrappers.is_none() || *source.spaces() != plain {
            return Ok(source);
        }
        Ok(elmur_data::wrap(&source, env.wrappers)?)
    }
}
