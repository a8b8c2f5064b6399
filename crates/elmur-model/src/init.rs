//! Initial weights: Xavier-uniform inside layers, U(±1/sqrt(fan_in)) for encoders and heads, as published.

use elmur_engine::rng::Stream;
use elmur_engine::{DType, Graph, Store};

use crate::config::{Ffn, ModelConfig};
use crate::error::Result;
use crate::segments::parameter_graph;

/// How a parameter starts.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Init {
    Constant(f64),
    Normal(f64),
    Uniform(f64),
}

/// A store with freshly initialised parameters of the model.
pub fn parameters(config: &ModelConfig, seed: u64) -> Result<Store> {
    let graph = parameter_graph(config, DType::F32)?;
    let store = Store::new();
    store.declare_params(&graph)?;
    initialise(config, &graph, &store, seed)?;
    Ok(store)
}

/// Fills every parameter of `graph` that `store` holds. The same seed gives the same weights, in any element type.
pub fn initialise(config: &ModelConfig, graph: &Graph, store: &Store, seed: u64) -> Result<()> {
    for (index, (name, value)) in graph.params().enumerate() {
        let ty = graph.ty(value)?;
        let mut data = vec![0.0; ty.len()];
        // Streams are numbered by the sorted names, far from those of dropout.
        let stream = Stream::new(seed, u64::MAX, index as u32);
        match init_of(config, name, &ty.shape) {
            Init::Constant(x) => data.fill(x),
            Init::Normal(std) => stream.fill_normal(&mut data, std),
            Init::Uniform(bound) => stream.fill_uniform(&mut data, -bound, bound),
        }
        match ty.dtype {
            DType::F64 => store.set(name, &data)?,
            _ => store.set(name, &data.into_iter().map(|x| x as f32).collect::<Vec<_>>())?,
        }
    }
    Ok(())
}

fn init_of(config: &ModelConfig, name: &str, shape: &[usize]) -> Init {
    let d = config.d_model;
    let xavier = |out: usize, width: usize| Init::Uniform((6.0 / (out + width) as f64).sqrt());
    let last = name.rsplit('.').next().unwrap_or(name);
    if !name.starts_with("layers.") {
        return match (name, last) {
            ("u" | "v", _) => Init::Normal(0.02),
            // Embeddings; but the rows of a one-hot encoder are those of a linear map.
            (_, "table") if name.starts_with("action") || !one_hot(config, name) => Init::Normal(1.0),
            (_, "table") => Init::Uniform(1.0 / (shape[0] as f64).sqrt()),
            (_, "bias") => Init::Uniform(1.0 / (fan_in_of_bias(config, name) as f64).sqrt()),
            _ => Init::Uniform(1.0 / (shape[1..].iter().product::<usize>() as f64).sqrt()),
        };
    }
    match last {
        "scale" => Init::Constant(1.0),
        "shift" | "bias" => Init::Constant(0.0),
        "relative_bias" => Init::Normal(1.0),
        "memory_init" => Init::Normal(0.02),
        _ => {
            // Fused matrices start as their parts would.
            let out = match () {
                () if name.contains(".kv.") => d,
                () if name.contains(".shared.gate_up.") => shared_width(config),
                () if name.contains(".gate_up") => shape[shape.len() - 2] / 2,
                () => shape[shape.len() - 2],
            };
            let width =
                if name.contains(".shared.down.") { shared_width(config) } else { shape[shape.len() - 1] };
            xavier(out, width)
        }
    }
}

fn shared_width(config: &ModelConfig) -> usize {
    match config.ffn {
        Ffn::Moe { shared_d_ff, .. } => shared_d_ff,
        Ffn::SwiGlu { d_ff } | Ffn::Gelu { d_ff } => d_ff,
    }
}

fn one_hot(config: &ModelConfig, name: &str) -> bool {
    use crate::config::{CategoricalEncoding, Observation};
    let is =
        |o: &Observation| matches!(o, Observation::Categorical { encoding: CategoricalEncoding::OneHot, .. });
    match &config.observation {
        Observation::Parts(parts) => {
            let index = name.split('.').nth(1).and_then(|i| i.parse::<usize>().ok());
            index.and_then(|i| parts.get(i)).is_some_and(is)
        }
        one => is(one),
    }
}

/// Inputs of the map whose bias this is; encoders know theirs from the config.
fn fan_in_of_bias(config: &ModelConfig, name: &str) -> usize {
    use crate::config::Observation;
    fn of(observation: &Observation, name: &str, d: usize) -> usize {
        let conv = |c: usize| {
            name.split('.').find_map(|p| p.strip_prefix("conv")).map(|i| match i {
                "0" => c * 64,
                "1" => 32 * 16,
                _ => 64 * 9,
            })
        };
        match observation {
            Observation::Vector { dim } => *dim,
            Observation::Categorical { sizes, encoding } => match encoding {
                crate::config::CategoricalEncoding::Raw => sizes.len(),
                _ => sizes.iter().sum(),
            },
            Observation::Image { channels, height, width } => conv(*channels).unwrap_or_else(|| {
                let along = |n: usize| ((n - 8) / 4 + 1 - 4) / 2 + 1 - 2;
                64 * along(*height) * along(*width)
            }),
            Observation::Parts(parts) => {
                let index = name.split('.').nth(1).and_then(|i| i.parse::<usize>().ok());
                index.and_then(|i| parts.get(i)).map_or(parts.len() * d, |part| of(part, name, d))
            }
        }
    }
    match name.split('.').next() {
        Some("encoder") => of(&config.observation, name, config.d_model),
        Some("return_encoder") => 1,
        Some("action_encoder") => config.action.dim(),
        _ => config.d_model,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;

    #[test]
    fn fused_matrices_start_as_their_parts() {
        let config = presets::model("tmaze").unwrap();
        let bound = |name: &str, shape: &[usize]| init_of(&config, name, shape);
        let xavier = |a: f64, b: f64| Init::Uniform((6.0 / (a + b)).sqrt());
        assert_eq!(bound("layers.0.attention.qkv.weight", &[384, 128]), xavier(384.0, 128.0));
        assert_eq!(bound("layers.0.mem2tok.kv.weight", &[256, 128]), xavier(128.0, 128.0));
        assert_eq!(bound("layers.0.token_ffn.shared.gate_up.weight", &[2048, 128]), xavier(512.0, 128.0));
        assert_eq!(bound("layers.0.token_ffn.shared.down.weight", &[128, 1024]), xavier(128.0, 512.0));
        assert_eq!(bound("layers.0.token_ffn.routed.gate_up", &[2, 64, 128]), xavier(32.0, 128.0));
        assert_eq!(bound("layers.0.token_ffn.routed.down", &[2, 128, 32]), xavier(128.0, 32.0));
        assert_eq!(bound("layers.1.mem2tok.norm.scale", &[128]), Init::Constant(1.0));
        assert_eq!(bound("encoder.weight", &[128, 4]), Init::Uniform(0.5));
        assert_eq!(bound("encoder.bias", &[128]), Init::Uniform(0.5));
        assert_eq!(bound("u", &[2, 64]), Init::Normal(0.02));
    }
}
