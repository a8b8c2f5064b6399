//! Checkpoints: a folder with `model.safetensors` (parameters by our names, f32) and `config.json`.
//!
//! Both are written aside and renamed. The weights carry a checksum, their fingerprint and the configuration
//! they were saved with, so that damage and a crash between the two files are noticed. Loading checks names,
//! shapes, element types and that every number is finite, and says exactly what is wrong.
//!
//! The weights alone are a whole checkpoint too: see [`Checkpoint::from_bytes`].

use std::path::Path;

use elmur_base::files::{read_small, write_atomic};
use elmur_engine::{DType, Store};

use crate::elmur::published;
use crate::error::{Error, Result};
use crate::fingerprint::Fingerprint;
use crate::policy::PolicyConfig;
use crate::tensors::{self, HostTensor, Notes, TensorData, Tensors};
use crate::window::{Built, parameter_graph};

/// Largest config file that is read, in bytes.
const MAX_CONFIG: u64 = 1 << 20;

/// A policy's configuration and parameters.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// The configuration.
    pub config: PolicyConfig,
    /// The parameters.
    pub params: Store,
}

/// Note of a tensor file: the configuration of its policy, as JSON.
const CONFIG: &str = "config";

/// Note of a tensor file: the fingerprint of its policy. Training states carry it too.
pub const FINGERPRINT: &str = "fingerprint";

impl Checkpoint {
    /// Writes the checkpoint into the folder `path`, which is made if absent.
    pub fn save(&self, path: &Path) -> Result<()> {
        std::fs::create_dir_all(path).map_err(|e| Error::io(path, e))?;
        let config = serde_json::to_vec_pretty(&self.config).map_err(|e| Error::file(path, e.to_string()))?;
        let bytes = self.serialise(|problem| Error::file(path, format!("not saved: {problem}")))?;
        write_atomic(&path.join("model.safetensors"), &bytes)?;
        Ok(write_atomic(&path.join("config.json"), &config)?)
    }

    /// The whole checkpoint as bytes: a safetensors file whose notes hold the configuration. They are what
    /// [`Checkpoint::save`] writes to `model.safetensors`, so a saved policy can be made part of a program:
    ///
    /// ```
    /// use elmur_model::{Checkpoint, init, presets};
    ///
    /// let config = presets::model("tmaze-quick").unwrap();
    /// let params = init::parameters(config.architecture(), 0)?;
    /// let bytes = Checkpoint { config, params }.to_bytes()?;
    ///
    /// // In a program: static POLICY: &[u8] = include_bytes!("../policy/model.safetensors");
    /// let policy = Checkpoint::from_bytes(&bytes)?;
    /// assert_eq!(policy.to_bytes()?, bytes);
    /// # Ok::<(), elmur_model::Error>(())
    /// ```
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        self.serialise(|problem| Error::input("checkpoint", "parameters that can be saved", problem))
    }

    /// A checkpoint from bytes of [`Checkpoint::to_bytes`] or of a `model.safetensors` of
    /// [`Checkpoint::save`], checked as [`Checkpoint::load`] checks files.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let problem = |problem: String| Error::input("checkpoint", "the bytes of a saved policy", problem);
        let (tensors, notes) = tensors::parse_own(bytes).map_err(problem)?;
        let Some(config) = notes.get(CONFIG) else {
            return Err(problem("tensors without their configuration".to_owned()));
        };
        let config: PolicyConfig = serde_json::from_str(config).map_err(|e| problem(e.to_string()))?;
        config.architecture().validate()?;
        Self::assemble(config, tensors, &notes, "configuration", problem)
    }

    /// A number that tells this policy from all others: it changes with the configuration and with every
    /// parameter. Training states and snapshots carry it.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        Fingerprint::of(self.config.architecture(), &self.params)
    }

    fn serialise(&self, failed: impl Fn(String) -> Error) -> Result<Vec<u8>> {
        let mut tensors = Tensors::new();
        let graph = parameter_graph(self.config.architecture(), DType::F32)?.graph;
        for (name, value) in graph.params() {
            let data = self.params.get::<f32>(name)?;
            if let Some(i) = data.iter().position(|x| !x.is_finite()) {
                return Err(failed(format!("`{name}` is {} at element {i}", data[i])));
            }
            let data = TensorData::F32(data);
            tensors.insert(name.to_owned(), HostTensor { shape: graph.shape(value)?.to_vec(), data });
        }
        let config = serde_json::to_string(&self.config).map_err(|e| failed(e.to_string()))?;
        let fingerprint = self.fingerprint()?.to_string();
        let notes = Notes::from([(CONFIG.to_owned(), config), (FINGERPRINT.to_owned(), fingerprint)]);
        tensors::serialise_with(&tensors, &notes).map_err(failed)
    }

    /// Reads a checkpoint from the folder `path`.
    pub fn load(path: &Path) -> Result<Self> {
        let config = read_config(&path.join("config.json"))?;
        let file = path.join("model.safetensors");
        let (tensors, notes) = tensors::read_own(&file)?;
        Self::assemble(config, tensors, &notes, "config.json", |problem| Error::file(&file, problem))
    }

    /// Puts parameters together that a configuration asks for, which errors call `asking`.
    fn assemble(
        config: PolicyConfig,
        mut tensors: Tensors,
        notes: &Notes,
        asking: &str,
        problem: impl Fn(String) -> Error,
    ) -> Result<Self> {
        let saved: Option<PolicyConfig> = notes.get(CONFIG).and_then(|own| serde_json::from_str(own).ok());
        if let Some(saved) = saved.as_ref().filter(|saved| saved.kind() != config.kind()) {
            let (saved, asked) = (saved.kind(), config.kind());
            let text =
                format!("weights of a policy of kind {saved}; its {asking} asks for one of kind {asked}");
            return Err(problem(text));
        }
        let graph = parameter_graph(config.architecture(), DType::F32)?.graph;
        let params = Store::new();
        for (name, value) in graph.params() {
            let shape = graph.shape(value)?;
            let Some(tensor) = tensors.remove(name) else {
                return Err(problem(format!(
                    "no tensor `{name}`; its {asking} asks for one of shape {shape:?}"
                )));
            };
            if tensor.shape != shape {
                return Err(problem(format!(
                    "`{name}` has shape {:?}, its {asking} asks for {shape:?}",
                    tensor.shape
                )));
            }
            let TensorData::F32(data) = tensor.data else {
                return Err(problem(format!("`{name}` does not hold 32-bit floats")));
            };
            if let Some(i) = data.iter().position(|x| !x.is_finite()) {
                return Err(problem(format!(
                    "`{name}` is {} at element {i}; expected finite numbers",
                    data[i]
                )));
            }
            // Memory is taken only for what the file has shown to hold.
            params.insert(name, graph.ty(value)?.clone())?;
            params.set(name, &data)?;
        }
        if let Some(name) = tensors.keys().next() {
            return Err(problem(format!("tensor `{name}` is not part of the model in its {asking}")));
        }
        // The weights carry their configuration as a note: a reader can tell if the two files belong
        // together.
        if notes.contains_key(CONFIG) && saved.as_ref() != Some(&config) {
            return Err(problem(format!(
                "its weights were saved with another {asking} than the one beside them"
            )));
        }
        Ok(Self { config, params })
    }

    /// Takes over weights of ELMUR under the published Python code's names (a state dict saved as
    /// safetensors).
    pub fn import(config: &PolicyConfig, weights: &Path) -> Result<Self> {
        let PolicyConfig::Elmur(elmur) = config else {
            return Err(Error::input("published weights", "a config of ELMUR", config.kind()));
        };
        let tensors = tensors::read(weights)?;
        // Golden files and some exporters put a prefix before every name.
        let prefix = ["param/", "model.", "module.", ""]
            .into_iter()
            .find(|p| tensors.contains_key(&format!("{p}r_w_bias")))
            .unwrap_or("");
        let ours = tensors.into_iter().filter(|(name, _)| name.starts_with(prefix)).collect();
        let converted =
            published::convert(elmur, &ours, prefix).map_err(|e| Error::file(weights, e.to_string()))?;
        let graph = parameter_graph(config.architecture(), DType::F32)?.graph;
        let params = Store::new();
        params.declare_params(&graph)?;
        for (name, data) in converted {
            let data: Vec<f32> = data.into_iter().map(|x| x as f32).collect();
            if let Some(i) = data.iter().position(|x| !x.is_finite()) {
                return Err(Error::file(weights, format!("`{name}` is {} at element {i}", data[i])));
            }
            params.set(&name, &data)?;
        }
        Ok(Self { config: config.clone(), params })
    }

    /// Number of parameters, copies that follow others among them.
    pub fn parameter_count(config: &PolicyConfig) -> Result<usize> {
        Self::count(config, |_, _| true)
    }

    /// Number of parameters that training changes by their gradients: without the copies that follow them (target
    /// networks, averages) and without statistics of the data.
    pub fn trained_parameter_count(config: &PolicyConfig) -> Result<usize> {
        Self::count(config, |built, name| {
            !built.averages.contains_key(name) && !built.statistics.contains_key(name)
        })
    }

    fn count(config: &PolicyConfig, counts: impl Fn(&Built, &str) -> bool) -> Result<usize> {
        let built = parameter_graph(config.architecture(), DType::F32)?;
        let mut count = 0;
        for (_, value) in built.graph.params().filter(|(name, _)| counts(&built, name)) {
            count += built.graph.ty(value)?.len();
        }
        Ok(count)
    }
}

/// Reads and checks a policy's configuration.
pub fn read_config(path: &Path) -> Result<PolicyConfig> {
    let text = read_small(path, MAX_CONFIG)?;
    let config: PolicyConfig = serde_json::from_str(&text).map_err(|e| Error::file(path, e))?;
    config.architecture().validate().map_err(|e| Error::file(path, e))?;
    Ok(config)
}

/// Whether a folder looks like a checkpoint.
pub fn is_checkpoint(path: &Path) -> bool {
    path.join("model.safetensors").is_file()
}
