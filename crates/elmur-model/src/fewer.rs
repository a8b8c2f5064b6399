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
    /// None if this policy does not see `seen` just once, if it sees anything but plain numbers beside it, if the
    /// encoder of `seen` does not end with a linear map (numbers and residual images do), or if the policy does not
    /// join what it sees by a linear map.
    pub fn seeing_only(&self, seen: &Encoder) -> Result<Option<Store>> {
        let ends = self.config.architecture().ends();
        let leaves = ends.observation.len();
        let mut alike = (0..leaves).filter(|leaf| ends.observation[*leaf] == *seen);
        let (Some(kept), None) = (alike.next(), alike.next()) else { return Ok(None) };
        let mut others = (0..leaves).filter(|leaf| *leaf != kept).map(|leaf| &ends.observation[leaf]);
        if leaves < 2 || !ends_linear(seen) || !others.all(is_numbers) {
            return Ok(None);
        }
        // Policies with several networks have an encoder in each.
        let names = self.params.names();
        let is_joining = |name: &str| name == JOINING || name.ends_with(&format!(".{JOINING}"));
        let encoders: Vec<&str> = names
            .iter()
            .filter(|name| is_joining(name))
            .map(|name| &name[..name.len() - ".weight".len()])
            .collect();
        if encoders.is_empty() {
            return Ok(None);
        }
        let params = Store::new();
        let put = |name: &str, shape: &[usize], data: &[f32]| -> Result<()> {
            params.insert(name, TensorType { dtype: DType::F32, shape: shape.to_vec() })?;
            Ok(params.set(name, data)?)
        };
        for name in &names {
            let within = encoders.iter().find_map(|encoder| {
                name.strip_prefix(encoder).and_then(|rest| rest.strip_prefix('.')).map(|rest| (encoder, rest))
            });
            // What the kept leaf's encoder and the joining map end up as is set below.
            let renamed = match within {
                None => name.clone(),
                Some((encoder, rest)) => match rest.strip_prefix(&format!("{kept}.")) {
                    None | Some("weight" | "bias") => continue,
                    Some(rest) => format!("{encoder}.{rest}"),
                },
            };
            put(&renamed, &self.params.ty(name)?.shape, &self.params.get::<f32>(name)?)?;
        }
        for encoder in encoders {
            let Some(Linear { width, inputs, weight, bias }) = self.joined(encoder, leaves, kept)? else {
                return Ok(None);
            };
            put(&format!("{encoder}.weight"), &[width, inputs], &weight)?;
            put(&format!("{encoder}.bias"), &[width], &bias)?;
        }
        Ok(Some(params))
    }

    /// The kept leaf's last linear map and the joining map behind it as one map, where all other numbers are 0:
    /// J [W x + b, b of the others] + c = (J of the kept leaf W) x + (J [all b] + c). None if the maps do not fit
    /// together.
    fn joined(&self, encoder: &str, leaves: usize, kept: usize) -> Result<Option<Linear>> {
        let shape = |part: &str| match self.params.ty(&format!("{encoder}.{part}")) {
            Ok(ty) => ty.shape,
            Err(_) => Vec::new(),
        };
        let get = |part: &str| self.params.get::<f32>(&format!("{encoder}.{part}"));
        let (joining, last) = (shape("weight"), shape(&format!("{kept}.weight")));
        let (&[width, all], &[rows, inputs]) = (&joining[..], &last[..]) else { return Ok(None) };
        let biases = (0..leaves).all(|leaf| shape(&format!("{leaf}.bias")) == [width]);
        if all != leaves * width || rows != width || shape("bias") != [width] || !biases {
            return Ok(None);
        }
        let join = get("weight")?;
        let of_leaf =
            |out: usize, leaf: usize| join[out * all + leaf * width..][..width].iter().map(|x| f64::from(*x));
        let last = get(&format!("{kept}.weight"))?;
        let mut weight = vec![0f64; width * inputs];
        for (out, row) in weight.chunks_exact_mut(inputs).enumerate() {
            for (factor, from) in of_leaf(out, kept).zip(last.chunks_exact(inputs)) {
                for (sum, x) in row.iter_mut().zip(from) {
                    *sum += factor * f64::from(*x);
                }
            }
        }
        let mut bias: Vec<f64> = get("bias")?.into_iter().map(f64::from).collect();
        for leaf in 0..leaves {
            let theirs = get(&format!("{leaf}.bias"))?;
            for (out, sum) in bias.iter_mut().enumerate() {
                *sum +=
                    of_leaf(out, leaf).zip(&theirs).map(|(factor, x)| factor * f64::from(*x)).sum::<f64>();
            }
        }
        let single = |numbers: Vec<f64>| numbers.into_iter().map(|x| x as f32).collect();
        Ok(Some(Linear { width, inputs, weight: single(weight), bias: single(bias) }))
    }
}

/// The map that joins the vectors of several leaves, below its network's name.
const JOINING: &str = "encoder.weight";

/// A linear map with its extents, weight [width, inputs].
struct Linear {
    width: usize,
    inputs: usize,
    weight: Vec<f32>,
    bias: Vec<f32>,
}

/// Whether an encoder ends with a linear map alone, into which another can be multiplied.
fn ends_linear(encoder: &Encoder) -> bool {
    matches!(encoder, Encoder::ResidualImage { .. }) || is_numbers(encoder)
}

/// Whether an encoder is a linear map of numbers.
fn is_numbers(encoder: &Encoder) -> bool {
    matches!(encoder, Encoder::Vector { .. })
}
