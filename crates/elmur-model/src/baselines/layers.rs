//! Layers that several baselines are made of: perceptrons, and recurrent layers with carried states.

use elmur_base::Describe;
use elmur_engine::{Activation as Act, Value};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::initial::Init;
use crate::net::{Net, Start};
use crate::sizes::Sizes;

/// x [.., width] through hidden layers of these widths, `{name}.0`, `{name}.1`, ...: each a linear map with
/// bias, ReLU and dropout.
pub(super) fn mlp(
    net: &mut Net<'_>,
    name: &str,
    mut x: Value,
    widths: &[usize],
    dropout: f64,
) -> Result<Value> {
    for (i, width) in widths.iter().enumerate() {
        let inputs = net.g.shape(x)?.last().copied().unwrap_or(1);
        let init = Init::fan_in(inputs);
        x = net.linear_act(x, &format!("{name}.{i}"), *width, init, Some(init), Act::Relu)?;
        x = net.dropout(x, dropout)?;
    }
    Ok(x)
}

/// Parameters of [`mlp`] over inputs of width `inputs`, whose settings are named `key`.
pub(super) fn mlp_sizes(sizes: &mut Sizes, key: &str, mut inputs: usize, widths: &[usize]) -> Result<()> {
    for width in widths {
        sizes.param(key, 1, &[*width, inputs])?;
        sizes.param(key, 1, &[*width])?;
        inputs = *width;
    }
    Ok(())
}

/// A recurrent layer over a window: x [rows, steps, inputs] to hidden states [rows, steps, width], from the
/// states `hidden` and `cell` [rows, width].
pub(super) struct Recurrent {
    /// Hidden states of all steps, [rows, steps, width].
    pub all: Value,
    /// Hidden state after the last step, [rows, width].
    pub hidden: Value,
    /// Cell after the last step, [rows, width].
    pub cell: Value,
}

/// The recurrent layer `{name}` of this width: orthogonal weights, biases that start at zero.
pub(super) fn recurrent(
    net: &mut Net<'_>,
    name: &str,
    x: Value,
    width: usize,
    (hidden, cell): (Value, Value),
) -> Result<Recurrent> {
    let zero = Init::Constant(0.0);
    let input = format!("{name}.input");
    let gates = net.linear_act(x, &input, 4 * width, Init::Orthogonal, Some(zero), Act::Identity)?;
    let weight = net.param(&format!("{name}.hidden.weight"), [4 * width, width], Init::Orthogonal)?;
    let bias = net.param(&format!("{name}.hidden.bias"), [4 * width], zero)?;
    let lstm = net.g.lstm(gates, weight, bias, hidden, cell)?;
    Ok(Recurrent { all: lstm.hidden, hidden: lstm.last_hidden, cell: lstm.last_cell })
}

/// Behaviours of the published Python code for recurrent networks that differ from the method; all off by
/// default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields, default)]
pub struct LstmCompat {
    /// Whether hidden states and cells begin with random numbers instead of zeros: those of all rows of a
    /// batch together are a random vector of length about 1, so that a row's part is the smaller the larger
    /// the batch.
    pub random_hidden: bool,
}

impl LstmCompat {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// A stack of recurrent layers with states that are carried.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lstm {
    pub width: usize,
    pub layers: usize,
    /// Between layers.
    pub dropout: f64,
    pub compat: LstmCompat,
}

impl Lstm {
    /// Name of the state that holds layer `i`'s hidden state, [rows, width].
    pub fn hidden_state(i: usize) -> String {
        format!("h.{i}")
    }

    /// Name of the state that holds layer `i`'s cell, [rows, width].
    pub fn cell_state(i: usize) -> String {
        format!("c.{i}")
    }

    /// Hidden states [rows, steps, width] of the last layer; the states of all layers go on from the last
    /// window or step.
    pub fn carried(&self, net: &mut Net<'_>, x: Value) -> Result<Value> {
        let start = if self.compat.random_hidden {
            Start::Normal(1.0 / ((net.rows() * self.width) as f64).sqrt())
        } else {
            Start::Zeros
        };
        self.stack(
            net,
            x,
            |net, layer| {
                let hidden = net.carried(&Self::hidden_state(layer), &[self.width], start.clone())?;
                Ok((hidden, net.carried(&Self::cell_state(layer), &[self.width], start.clone())?))
            },
            |net, layer, after| {
                net.keep(&Self::hidden_state(layer), after.hidden)?;
                net.keep(&Self::cell_state(layer), after.cell)?;
                net.tap(&format!("hidden.{layer}"), after.hidden)
            },
        )
    }

    /// Hidden states [rows, steps, width] of the last layer, from zeros; nothing is carried.
    pub fn fresh(&self, net: &mut Net<'_>, x: Value) -> Result<Value> {
        let zeros = |net: &mut Net<'_>, _: usize| {
            let zeros = net.g.full(net.dtype, [net.rows(), self.width], 0.0)?;
            Ok((zeros, zeros))
        };
        self.stack(net, x, zeros, |_, _, _| Ok(()))
    }

    fn stack(
        &self,
        net: &mut Net<'_>,
        mut x: Value,
        mut before: impl FnMut(&mut Net<'_>, usize) -> Result<(Value, Value)>,
        mut after: impl FnMut(&mut Net<'_>, usize, &Recurrent) -> Result<()>,
    ) -> Result<Value> {
        for layer in 0..self.layers {
            if layer > 0 {
                x = net.dropout(x, self.dropout)?;
            }
            let states = before(net, layer)?;
            let run = recurrent(net, &format!("lstm.{layer}"), x, self.width, states)?;
            after(net, layer, &run)?;
            x = run.all;
        }
        Ok(x)
    }

    /// Parameters and values of windows of `steps` steps over inputs of width `inputs`; `key` names the
    /// setting of the width.
    pub fn add_sizes(&self, sizes: &mut Sizes, key: &str, inputs: usize, steps: usize) -> Result<()> {
        let (h, layers) = (self.width, self.layers);
        sizes.value("window", &[steps, 4, h])?;
        sizes.value("window", &[steps, inputs])?;
        sizes.param(key, usize::from(layers > 0), &[4, h, inputs])?;
        sizes.param(key, (2 * layers).saturating_sub(1), &[4, h, h])?;
        sizes.param(key, 2 * layers, &[4, h])
    }
}

/// Refuses numbers outside `1..=most`, by the name of the setting.
pub(super) fn check_counts(counts: &[(&str, usize, usize)]) -> Result<()> {
    for (key, count, most) in counts {
        if !(1..=*most).contains(count) {
            let expected = format!("1 to {most}");
            return Err(Error::Config { key: (*key).to_owned(), expected, got: count.to_string() });
        }
    }
    Ok(())
}

/// Refuses widths of hidden layers that are none or too many, too small or too large.
pub(super) fn check_widths(key: &str, widths: &[usize]) -> Result<()> {
    let config = |expected: &str, got: String| {
        Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), got })
    };
    if widths.is_empty() || widths.len() > 64 {
        return config("1 to 64 widths of hidden layers", widths.len().to_string());
    }
    match widths.iter().find(|width| !(1..=1 << 20).contains(*width)) {
        Some(width) => config("widths of 1 to 1048576", width.to_string()),
        None => Ok(()),
    }
}

/// Refuses a probability of dropout that is none.
pub(super) fn check_dropout(key: &str, p: f64) -> Result<()> {
    check_number(key, p, (0.0..1.0).contains(&p), "0 or more and below 1")
}

/// Refuses a number that does not fit, by the name of the setting.
pub(super) fn check_number(key: &str, x: f64, fits: bool, expected: &str) -> Result<()> {
    if fits {
        return Ok(());
    }
    Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), got: x.to_string() })
}
