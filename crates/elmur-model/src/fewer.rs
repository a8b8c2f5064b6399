//! From a policy that sees several observations to one that sees only one of them: what was told in training is left
//! out.

use elmur_engine::{DType, Store, TensorType};

use crate::checkpoint::Checkpoint;
use crate::ends::Encoder;
use crate::error::Result;

impl Checkpoint {
    /// The parameters of a policy that sees `seen` alone where this one sees more: it does what this one does where
    /// all other numbers are 0. For a policy that was told something in training which it will not be told later.
    ///
    /// None if this policy does not see `seen` just once, or if what it sees beside it are not plain numbers.
    pub fn seeing_only(&self, seen: &Encoder) -> Result<Option<Store>> {
        let ends = self.config.architecture().ends();
        let (leaves, width) = (ends.observation.len(), ends.width);
        let mut alike = (0..leaves).filter(|leaf| ends.observation[*leaf] == *seen);
        let (Some(kept), None) = (alike.next(), alike.next()) else { return Ok(None) };
        let mut others = (0..leaves).filter(|leaf| *leaf != kept).map(|leaf| &ends.observation[leaf]);
        let known = self.params.ty("encoder.weight").is_ok();
        if leaves < 2 || !known || !ends_linear(seen) || !others.all(is_numbers) {
            return Ok(None);
        }
        let params = Store::new();
        let put = |name: &str, shape: &[usize], data: &[f32]| -> Result<()> {
            params.insert(name, TensorType { dtype: DType::F32, shape: shape.to_vec() })?;
            Ok(params.set(name, data)?)
        };
        for name in self.params.names() {
            // What the kept leaf's encoder and the joining map end up as is set below.
            let renamed = match name.strip_prefix("encoder.") {
                None => name.clone(),
                Some(rest) => match rest.strip_prefix(&format!("{kept}.")) {
                    None | Some("weight" | "bias") => continue,
                    Some(rest) => format!("encoder.{rest}"),
                },
            };
            put(&renamed, &self.params.ty(&name)?.shape, &self.params.get::<f32>(&name)?)?;
        }
        // J [W x + b, b of the others] + c = (J of the kept leaf W) x + (J [all b] + c).
        let join = self.params.get::<f32>("encoder.weight")?;
        let joined = |out: usize, leaf: usize| {
            let first = out * leaves * width + leaf * width;
            join[first..first + width].iter().map(|x| f64::from(*x))
        };
        let name = format!("encoder.{kept}.weight");
        let (weight, inputs) = (self.params.get::<f32>(&name)?, self.params.ty(&name)?.shape[1]);
        let mut product = vec![0f64; width * inputs];
        for (out, row) in product.chunks_exact_mut(inputs).enumerate() {
            for (factor, from) in joined(out, kept).zip(weight.chunks_exact(inputs)) {
                for (sum, x) in row.iter_mut().zip(from) {
                    *sum += factor * f64::from(*x);
                }
            }
        }
        let mut bias: Vec<f64> = self.params.get::<f32>("encoder.bias")?.into_iter().map(f64::from).collect();
        for leaf in 0..leaves {
            let of_leaf = self.params.get::<f32>(&format!("encoder.{leaf}.bias"))?;
            for (out, sum) in bias.iter_mut().enumerate() {
                *sum +=
                    joined(out, leaf).zip(&of_leaf).map(|(factor, x)| factor * f64::from(*x)).sum::<f64>();
            }
        }
        let single = |numbers: &[f64]| numbers.iter().map(|x| *x as f32).collect::<Vec<_>>();
        put("encoder.weight", &[width, inputs], &single(&product))?;
        put("encoder.bias", &[width], &single(&bias))?;
        Ok(Some(params))
    }
}

/// Whether an encoder ends with a linear map alone, into which another can be multiplied.
fn ends_linear(encoder: &Encoder) -> bool {
    matches!(encoder, Encoder::ResidualImage { .. }) || is_numbers(encoder)
}

/// Whether an encoder is a linear map of numbers.
fn is_numbers(encoder: &Encoder) -> bool {
    matches!(encoder, Encoder::Vector { .. })
}
