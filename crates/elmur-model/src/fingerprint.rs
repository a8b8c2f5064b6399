//! Fingerprints of policies: one number for a configuration and its parameters, by which files say which policy
//! they belong to.

use std::fmt;
use std::str::FromStr;

use crc32fast::Hasher;
use elmur_engine::{DType, Store};

use crate::architecture::Architecture;
use crate::error::Result;
use crate::tensors::checksum;
use crate::window::parameter_graph;

/// A number that tells policies apart: a checksum of the configuration and one of all parameters. Two
/// policies with the same fingerprint are, but for a chance of one in 2^64, the same.
///
/// It is written as 16 hexadecimal digits, the configuration's first. Training states and snapshots carry
/// the fingerprint of their policy and are refused by others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    config: u32,
    params: u32,
}

impl Fingerprint {
    /// The fingerprint of an architecture with the parameters in a store.
    pub fn of(architecture: &dyn Architecture, params: &Store) -> Result<Self> {
        let graph = parameter_graph(architecture, DType::F32)?.graph;
        let mut names: Vec<&str> = graph.params().map(|(name, _)| name).collect();
        names.sort_unstable();
        let mut hasher = Hasher::new();
        for name in names {
            checksum::bytes(&mut hasher, name.as_bytes());
            checksum::shape(&mut hasher, &params.ty(name)?.shape);
            params.with::<f32, _>(name, |data| floats(&mut hasher, data))?;
        }
        let config = crc32fast::hash(architecture.config_text().as_bytes());
        Ok(Self { config, params: hasher.finalize() })
    }

    /// Whether the parameters are the same, whatever the configurations say.
    pub fn same_parameters(self, other: Self) -> bool {
        self.params == other.params
    }

    /// What differs between two policies, in words; nothing for the same policy.
    pub fn difference(self, other: Self) -> Option<&'static str> {
        match (self.config == other.config, self.params == other.params) {
            (true, true) => None,
            (true, false) => Some("other parameters"),
            (false, true) => Some("another configuration"),
            (false, false) => Some("another configuration and other parameters"),
        }
    }
}

/// Adds the bytes of floats to a checksum.
fn floats(hasher: &mut Hasher, data: &[f32]) {
    let mut bytes = [0; 4096];
    for some in data.chunks(bytes.len() / 4) {
        for (to, x) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(some) {
            *to = x.to_le_bytes();
        }
        hasher.update(&bytes[..4 * some.len()]);
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08x}{:08x}", self.config, self.params)
    }
}

impl FromStr for Fingerprint {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match u64::from_str_radix(text, 16) {
            Ok(both) if text.len() == 16 && text.bytes().all(|c| c.is_ascii_hexdigit()) => {
                Ok(Self { config: (both >> 32) as u32, params: (both & 0xffff_ffff) as u32 })
            }
            _ => {
                let got: String = text.chars().take(40).collect();
                Err(format!("expected a fingerprint of 16 hexadecimal digits, got `{got}`"))
            }
        }
    }
}
