//! Initial weights: every parameter as it was declared to start.

use elmur_engine::rng::Stream;
use elmur_engine::{DType, Store};

use crate::architecture::Architecture;
use crate::error::Result;
use crate::window::{Built, parameter_graph};

/// A store with freshly initialised parameters of a policy.
pub fn parameters(architecture: &dyn Architecture, seed: u64) -> Result<Store> {
    let built = parameter_graph(architecture, DType::F32)?;
    let store = Store::new();
    store.declare_params(&built.graph)?;
    initialise(&built, &store, seed)?;
    Ok(store)
}

/// Fills every parameter that `store` holds. The same seed gives the same weights, in any element type.
pub fn initialise(built: &Built, store: &Store, seed: u64) -> Result<()> {
    for (index, (name, init)) in built.params.iter().enumerate() {
        let ty = store.ty(name)?;
        // Streams are numbered by the sorted names, far from those of dropout.
        let data = init.draw(&Stream::new(seed, u64::MAX, index as u32), &ty.shape);
        match ty.dtype {
            DType::F64 => store.set(name, &data)?,
            _ => store.set(name, &data.into_iter().map(|x| x as f32).collect::<Vec<_>>())?,
        }
    }
    copy_averages(built, store)
}

/// Makes every parameter that is a copy equal to the parameter that it follows.
pub fn copy_averages(built: &Built, store: &Store) -> Result<()> {
    for (copy, (parameter, _)) in &built.averages {
        match store.ty(copy)?.dtype {
            DType::F64 => store.set(copy, &store.get::<f64>(parameter)?)?,
            _ => store.set(copy, &store.get::<f32>(parameter)?)?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::initial::Init;
    use crate::presets;

    #[test]
    fn fused_matrices_start_as_their_parts() {
        let config = presets::model("tmaze").unwrap();
        let built = parameter_graph(config.architecture(), DType::F32).unwrap();
        let init = |name: &str| built.params[name];
        assert_eq!(init("layers.0.attention.qkv.weight"), Init::xavier(384, 128));
        assert_eq!(init("layers.0.mem2tok.kv.weight"), Init::xavier(128, 128));
        assert_eq!(init("layers.0.token_ffn.shared.gate_up.weight"), Init::xavier(512, 128));
        assert_eq!(init("layers.0.token_ffn.shared.down.weight"), Init::xavier(128, 512));
        assert_eq!(init("layers.0.token_ffn.routed.gate_up"), Init::xavier(32, 128));
        assert_eq!(init("layers.0.token_ffn.routed.down"), Init::xavier(128, 32));
        assert_eq!(init("layers.1.mem2tok.norm.scale"), Init::Constant(1.0));
        assert_eq!(init("encoder.weight"), Init::Uniform(0.5));
        assert_eq!(init("encoder.bias"), Init::Uniform(0.5));
        assert_eq!(init("u"), Init::Normal(0.02));
    }
}
