//! The networks that tell noise from actions: a U-Net over time, or a perceptron.
//!
//! ```text
//! block(x)     = mish(GroupNorm_G(conv_k(x)))                   padding k / 2
//! res(x, cond) = block_2(s block_1(x) + b) + skip(x),           [s ; b] = W mish(cond) + bias, per channel
//!                                                               skip: x, or a linear map where widths differ
//! ```
//!
//! The U-Net over widths w_1, ..., w_D: at every level res(-> w_i) and res, then half as many steps (not after
//! the last level); two res in the middle; on the way up from D to 2 the state of level i on the way down is
//! joined, res(2 w_i -> w_(i-1)) and res follow, then twice as many steps. Last a block with eight groups and a
//! linear map to the action. The first level's state is not joined, as in the published network.

use elmur_engine::{Activation as Act, Conv1d, Value};

use crate::error::Result;
use crate::initial::Init;
use crate::net::Net;
use crate::sizes::Sizes;

/// Added to the variance of a group.
const EPS: f64 = 1e-5;

/// Groups of the last block, whatever the others have.
pub(crate) const LAST_GROUPS: usize = 8;

/// Steps of the kernels between levels: on the way down, and on the way up.
const HALVE: usize = 3;
const DOUBLE: usize = 4;

/// A part of the U-Net, by name.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Layer {
    /// A residual pair of blocks.
    Residual { name: String, inputs: usize, outputs: usize },
    /// Remembers the state for the way up.
    Keep,
    /// Joins the state that was remembered last, behind the channels at hand.
    Join,
    /// Half as many steps.
    Halve { name: String, width: usize },
    /// Twice as many steps.
    Double { name: String, width: usize },
}

/// A U-Net over chunks of actions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unet<'a> {
    pub widths: &'a [usize],
    pub kernel: usize,
    pub groups: usize,
    /// Numbers of an action.
    pub actions: usize,
    /// Width of what the chunk is conditioned on.
    pub cond: usize,
}

impl Unet<'_> {
    /// All parts in order, up to the last block.
    pub fn layers(&self) -> Vec<Layer> {
        let mut layers = Vec::new();
        let residual = |layers: &mut Vec<Layer>, name: String, inputs: usize, outputs: usize| {
            layers.push(Layer::Residual { name, inputs, outputs });
        };
        let mut inputs = self.actions;
        for (i, &width) in self.widths.iter().enumerate() {
            residual(&mut layers, format!("down.{i}.0"), inputs, width);
            residual(&mut layers, format!("down.{i}.1"), width, width);
            layers.push(Layer::Keep);
            if i + 1 < self.widths.len() {
                layers.push(Layer::Halve { name: format!("down.{i}.halve"), width });
            }
            inputs = width;
        }
        for i in 0..2 {
            residual(&mut layers, format!("mid.{i}"), inputs, inputs);
        }
        for (i, pair) in self.widths.windows(2).rev().enumerate() {
            let (above, width) = (pair[0], pair[1]);
            layers.push(Layer::Join);
            residual(&mut layers, format!("up.{i}.0"), 2 * width, above);
            residual(&mut layers, format!("up.{i}.1"), above, above);
            layers.push(Layer::Double { name: format!("up.{i}.double"), width: above });
        }
        layers
    }

    /// The noise in x [rows, steps, actions], given what it is conditioned on, [rows, cond].
    pub fn predict(&self, net: &mut Net<'_>, mut x: Value, cond: Value) -> Result<Value> {
        let cond = net.g.mish(cond)?;
        let mut kept = Vec::new();
        for layer in self.layers() {
            match layer {
                Layer::Residual { name, outputs, .. } => x = self.residual(net, &name, x, cond, outputs)?,
                Layer::Keep => kept.push(x),
                Layer::Join => {
                    let below = kept.pop().unwrap_or(x);
                    x = net.g.concat(&[x, below], 2)?;
                }
                Layer::Halve { name, width } => {
                    let init = Init::fan_in(width * HALVE);
                    let weight = net.param(&format!("{name}.weight"), [width, HALVE, width], init)?;
                    let bias = net.param(&format!("{name}.bias"), [width], init)?;
                    let conv = Conv1d { stride: 2, padding: 1 };
                    x = net.g.conv1d(x, weight, Some(bias), conv, Act::Identity)?;
                }
                Layer::Double { name, width } => {
                    let init = Init::fan_in(width * DOUBLE);
                    let weight = net.param(&format!("{name}.weight"), [DOUBLE, width, width], init)?;
                    let bias = net.param(&format!("{name}.bias"), [width], init)?;
                    let conv = Conv1d { stride: 2, padding: 1 };
                    x = net.g.conv_transpose1d(x, weight, Some(bias), conv, Act::Identity)?;
                }
            }
        }
        let width = self.widths.first().copied().unwrap_or(1);
        x = self.block(net, "last", x, width, LAST_GROUPS)?;
        let init = Init::fan_in(width);
        net.linear_act(x, "out", self.actions, init, Some(init), Act::Identity)
    }

    fn residual(
        &self,
        net: &mut Net<'_>,
        name: &str,
        x: Value,
        cond: Value,
        outputs: usize,
    ) -> Result<Value> {
        let inputs = net.g.shape(x)?[2];
        let h = self.block(net, &format!("{name}.0"), x, outputs, self.groups)?;
        let init = Init::fan_in(self.cond);
        let film =
            net.linear_act(cond, &format!("{name}.film"), 2 * outputs, init, Some(init), Act::Identity)?;
        let film = net.g.reshape(film, [net.rows(), 1, 2 * outputs])?;
        let scale = net.g.slice(film, 2, 0..outputs)?;
        let shift = net.g.slice(film, 2, outputs..2 * outputs)?;
        let h = net.g.mul(h, scale)?;
        let h = net.g.add(h, shift)?;
        let h = self.block(net, &format!("{name}.1"), h, outputs, self.groups)?;
        let skip = if inputs == outputs {
            x
        } else {
            let init = Init::fan_in(inputs);
            net.linear_act(x, &format!("{name}.skip"), outputs, init, Some(init), Act::Identity)?
        };
        Ok(net.g.add(h, skip)?)
    }

    fn block(&self, net: &mut Net<'_>, name: &str, x: Value, outputs: usize, groups: usize) -> Result<Value> {
        let inputs = net.g.shape(x)?[2];
        let init = Init::fan_in(inputs * self.kernel);
        let weight = net.param(&format!("{name}.conv.weight"), [outputs, self.kernel, inputs], init)?;
        let bias = net.param(&format!("{name}.conv.bias"), [outputs], init)?;
        let conv = Conv1d { stride: 1, padding: self.kernel / 2 };
        let x = net.g.conv1d(x, weight, Some(bias), conv, Act::Identity)?;
        let gamma = net.param(&format!("{name}.norm.scale"), [outputs], Init::Constant(1.0))?;
        let beta = net.param(&format!("{name}.norm.shift"), [outputs], Init::Constant(0.0))?;
        let x = net.g.group_norm(x, groups, gamma, beta, EPS)?;
        Ok(net.g.mish(x)?)
    }

    /// Adds up the parameters, and the largest values of one row of `steps` steps.
    pub fn add_sizes(&self, sizes: &mut Sizes, steps: usize) -> Result<()> {
        let key = "denoiser.unet.widths";
        let block = |sizes: &mut Sizes, inputs: usize, outputs: usize| {
            sizes.value(key, &[steps, self.kernel, inputs])?;
            sizes.value(key, &[steps, outputs])?;
            sizes.param(key, 1, &[outputs, self.kernel, inputs])?;
            sizes.param(key, 3, &[outputs])
        };
        for layer in self.layers() {
            match layer {
                Layer::Residual { inputs, outputs, .. } => {
                    block(sizes, inputs, outputs)?;
                    block(sizes, outputs, outputs)?;
                    sizes.param(key, 1, &[2, outputs, self.cond])?;
                    sizes.param(key, 2, &[outputs])?;
                    if inputs != outputs {
                        sizes.param(key, 1, &[outputs, inputs])?;
                        sizes.param(key, 1, &[outputs])?;
                    }
                }
                Layer::Halve { width, .. } => {
                    sizes.param(key, 1, &[width, HALVE, width])?;
                    sizes.param(key, 1, &[width])?;
                }
                Layer::Double { width, .. } => {
                    sizes.param(key, 1, &[DOUBLE, width, width])?;
                    sizes.param(key, 1, &[width])?;
                }
                Layer::Keep | Layer::Join => {}
            }
        }
        let width = self.widths.first().copied().unwrap_or(1);
        block(sizes, width, width)?;
        sizes.param(key, 1, &[self.actions, width])?;
        sizes.param(key, 1, &[self.actions])
    }
}

/// The noise in x [rows, steps, actions] by a perceptron with mish over the whole chunk and what it is
/// conditioned on, [rows, cond].
pub(super) fn perceptron(net: &mut Net<'_>, widths: &[usize], x: Value, cond: Value) -> Result<Value> {
    let shape = net.g.shape(x)?.to_vec();
    let chunk = shape[1] * shape[2];
    let flat = net.g.reshape(x, [shape[0], chunk])?;
    let mut h = net.g.concat(&[flat, cond], 1)?;
    let layers = widths.iter().map(|width| (*width, Act::Mish)).chain([(chunk, Act::Identity)]);
    for (i, (width, activation)) in layers.enumerate() {
        let init = Init::fan_in(net.g.shape(h)?[1]);
        h = net.linear_act(h, &format!("mlp.{i}"), width, init, Some(init), activation)?;
    }
    Ok(net.g.reshape(h, shape)?)
}
