//! How large a policy may be, found out from its settings before anything is built.

use crate::ends::{Action, CategoricalEncoding, Encoder, Ends, Token};
use crate::error::{Error, Result};
use crate::vision::Residual;

/// Numbers that one tensor may hold.
pub(crate) const MAX_TENSOR: u128 = 1 << 31;

/// Parameters that a policy may have.
pub(crate) const MAX_PARAMETERS: u128 = 1 << 33;

/// Adds up the parameters of a policy and refuses what is too large, naming the setting to change.
#[derive(Debug, Default)]
pub(crate) struct Sizes {
    parameters: u128,
}

impl Sizes {
    /// Parameters so far.
    #[cfg(test)]
    pub fn parameters(&self) -> u128 {
        self.parameters
    }

    /// `count` parameters of this shape, whose size the setting `key` decides.
    pub fn param(&mut self, key: &str, count: usize, shape: &[usize]) -> Result<()> {
        let numbers = Self::numbers(key, shape)?;
        self.parameters = self.parameters.saturating_add(numbers.saturating_mul(count as u128));
        if self.parameters <= MAX_PARAMETERS {
            return Ok(());
        }
        let expected = format!("at most {MAX_PARAMETERS} parameters in all");
        Err(Error::Config { key: key.to_owned(), expected, got: self.parameters.to_string() })
    }

    /// A tensor of this shape that is computed for one row.
    pub fn value(&self, key: &str, shape: &[usize]) -> Result<()> {
        Self::numbers(key, shape).map(|_| ())
    }

    fn numbers(key: &str, shape: &[usize]) -> Result<u128> {
        let numbers = shape.iter().fold(1, |product: u128, n| product.saturating_mul(*n as u128));
        if numbers <= MAX_TENSOR {
            return Ok(numbers);
        }
        let got = shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
        let expected = format!("at most {MAX_TENSOR} numbers in one tensor");
        Err(Error::Config { key: key.to_owned(), expected, got })
    }
}

impl Ends<'_> {
    /// Parameters of encoders and head; the head reads hidden states of width `hidden`, and a window has
    /// `steps` steps.
    pub(crate) fn add_sizes(&self, sizes: &mut Sizes, hidden: usize, steps: usize) -> Result<()> {
        let d = self.width;
        self.add_encoder_sizes(sizes, steps)?;
        if self.tokens.has(Token::Return) {
            sizes.param("d_model", 2, &[d])?;
        }
        if self.tokens.has(Token::Action) {
            for choices in self.action.sizes() {
                sizes.param("action", 1, &[choices.saturating_add(1), d])?;
            }
            if let Action::Continuous { dim, .. } = self.action {
                sizes.param("action", 1, &[d, *dim])?;
                sizes.param("action", 1, &[d])?;
            }
        }
        sizes.param("action", 1, &[self.action.outputs(), hidden])?;
        sizes.value("action", &[steps, self.action.outputs()])?;
        match self.action {
            Action::Continuous { tanh: true, dim } => sizes.param("action", 1, &[*dim]),
            _ => Ok(()),
        }
    }

    /// Parameters of the encoders of observations, for windows of `steps` steps.
    pub(crate) fn add_encoder_sizes(&self, sizes: &mut Sizes, steps: usize) -> Result<()> {
        let d = self.width;
        for encoder in self.observation {
            let key = "observation";
            sizes.value(key, &[steps, encoder.len()])?;
            match encoder {
                Encoder::Vector { dim, .. } => {
                    sizes.param(key, 1, &[d, *dim])?;
                    sizes.param(key, 1, &[d])?;
                }
                Encoder::Categorical { sizes: each, encoding } => {
                    let total = each.iter().fold(0, |sum: usize, n| sum.saturating_add(*n));
                    let inputs = if *encoding == CategoricalEncoding::Raw { each.len() } else { total };
                    sizes.param(key, 1, &[inputs, d])?;
                    sizes.param(key, usize::from(*encoding != CategoricalEncoding::Embedding), &[d])?;
                    sizes.value(key, &[steps, each.len(), d])?;
                }
                Encoder::ResidualImage { .. } => {
                    if let Some(form) = Residual::of(encoder) {
                        form.add_sizes(sizes, steps, d)?;
                    }
                }
                Encoder::Image { .. } => {
                    let (layers, features) = encoder.convolved().unwrap_or_default();
                    for (outputs, inputs) in layers {
                        sizes.param(key, 1, &[outputs, inputs])?;
                        sizes.param(key, 1, &[outputs])?;
                    }
                    sizes.param(key, 1, &[d, features])?;
                    sizes.param(key, 1, &[d])?;
                }
            }
        }
        if self.observation.len() > 1 {
            sizes.param("d_model", 1, &[d, self.observation.len(), d])?;
            sizes.param("d_model", 1, &[d])?;
        }
        Ok(())
    }
}

/// Refuses more than 65,536 layers in all windows of an optimizer step: they are one graph.
pub(crate) fn check_depth(key: &str, windows: usize, layers: usize) -> Result<()> {
    if windows.saturating_mul(layers) <= 1 << 16 {
        return Ok(());
    }
    let expected = "at most 65536 layers in all windows of an optimizer step".to_owned();
    Err(Error::Config { key: key.to_owned(), expected, got: format!("{windows} x {layers}") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elmur::config::*;
    use crate::ends::TokenFormat;
    use crate::{Checkpoint, PolicyConfig, presets};

    /// What is added up from settings is what the graph declares.
    #[test]
    fn parameters_are_counted_without_building_a_graph() {
        let mut policies: Vec<PolicyConfig> = presets::all().into_iter().map(|(_, policy)| policy).collect();
        let base = presets::model("tmaze-quick").unwrap().elmur("test").unwrap().clone();
        let mut change = |change: &dyn Fn(&mut Elmur)| {
            let mut config = base.clone();
            change(&mut config);
            policies.push(config.into());
        };
        change(&|c| c.ffn = Ffn::Gelu { d_ff: 7 });
        change(&|c| c.ffn = Ffn::SwiGlu { d_ff: 7 });
        change(&|c| c.norm = NormType::Rms);
        change(&|c| c.memory.read = false);
        change(&|c| c.memory.write = false);
        change(&|c| (c.memory.read, c.memory.write) = (false, false));
        change(&|c| c.memory.relative_bias = false);
        change(&|c| c.memory.init = MemoryInit::Learned);
        change(&|c| (c.memory.shared, c.memory.init) = (true, MemoryInit::Learned));
        change(&|c| c.tokens = TokenFormat::ReturnObservationAction);
        change(&|c| {
            c.tokens = TokenFormat::ReturnObservationAction;
            c.action = Action::Continuous { dim: 3, tanh: true };
        });
        for encoding in
            [CategoricalEncoding::OneHot, CategoricalEncoding::Embedding, CategoricalEncoding::Raw]
        {
            change(&|c| c.observation.push(Encoder::Categorical { sizes: vec![3, 4], encoding }));
        }
        change(&|c| c.observation.push(Encoder::Image { channels: 2, height: 9, width: 40, bytes: true }));
        let residual = |cameras, widths: &[usize], strides: &[usize], (queries, grid, keypoints)| {
            Encoder::ResidualImage {
                channels: 6,
                height: 20,
                width: 33,
                bytes: true,
                cameras,
                widths: widths.to_vec(),
                strides: strides.to_vec(),
                queries,
                grid,
                keypoints,
            }
        };
        change(&|c| c.observation.push(residual(2, &[8, 16, 8], &[1, 2, 1], (3, 5, 4))));
        change(&|c| {
            c.observation = vec![
                residual(1, &[24], &[], (3, 0, 0)),
                residual(2, &[24], &[], (0, 2, 0)),
                residual(2, &[24], &[1], (0, 0, 1)),
            ]
        });
        let seen = vec![
            Encoder::Vector { dim: 5, bytes: false },
            Encoder::Image { channels: 2, height: 16, width: 17, bytes: true },
            Encoder::Categorical { sizes: vec![3, 4], encoding: CategoricalEncoding::OneHot },
        ];
        let action = Action::Continuous { dim: 3, tanh: false };
        let mut diffusion = presets::diffusion(seen.clone(), action.clone());
        policies.push(PolicyConfig::Diffusion(diffusion.clone()));
        diffusion.compat.raw_weights = true;
        policies.push(PolicyConfig::Diffusion(diffusion));
        policies.push(PolicyConfig::Diffusion(presets::diffusion_mlp(seen, action)));
        for policy in policies {
            let graph = Checkpoint::parameter_count(&policy).unwrap();
            assert_eq!(policy.sizes().unwrap().parameters(), graph as u128, "{policy:?}");
        }
    }

    #[test]
    fn policies_that_are_too_large_are_refused_by_the_setting_that_makes_them_so() {
        let error = |policy: &str, key: &str, value: u64| {
            let mut json = serde_json::to_value(presets::model(policy).unwrap()).unwrap();
            *key.split('.').fold(&mut json, |json, part| &mut json[part]) = value.into();
            let policy: PolicyConfig = serde_json::from_value(json).unwrap();
            let error = policy.architecture().validate().unwrap_err().to_string();
            assert_eq!(Checkpoint::parameter_count(&policy).unwrap_err().to_string(), error);
            error
        };
        for (policy, key, value) in [
            ("tmaze", "d_model", 1 << 20),
            ("tmaze", "d_model", 1 << 16),
            ("tmaze", "d_model", 24576),
            ("tmaze", "segment_length", 1 << 18),
            ("tmaze-dt", "d_model", 1 << 20),
            ("tmaze-dt", "window", 1 << 17),
        ] {
            let error = error(policy, key, value);
            assert!(error.contains(key) && error.contains("expected at most"), "{policy} {key}: {error}");
        }
        assert!(check_depth("unroll", 4096, 16).is_ok());
        let error = check_depth("unroll", 4096, 17).unwrap_err().to_string();
        assert!(error.contains("config `unroll`: expected at most 65536 layers"), "{error}");
    }
}
