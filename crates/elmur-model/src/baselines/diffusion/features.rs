//! What a chunk of actions is conditioned on: features of the newest observations.
//!
//! - Vectors are their own features, standardised: (x - mean) / deviation, measured on the data.
//! - Images: four times [3x3 convolution, ReLU, 2x2 max-pool], a 1x1 convolution with ReLU, the maximum of every
//!   channel, a linear map with ReLU; as in the published code, per observation.
//! - Integers are encoded as in other policies.

use elmur_base::Field;
use elmur_engine::{Activation as Act, Conv2d, Value};

use crate::ends::{CategoricalEncoding, Encoder, Ends};
use crate::error::{Error, Result};
use crate::initial::Init;
use crate::net::Net;
use crate::sizes::Sizes;
use crate::statistic::Statistic;

/// Channels of the convolutions, each followed by 2x2 max-pooling.
const CHANNELS: [usize; 4] = [16, 32, 64, 128];

/// Channels of the last convolution, and features of an image.
const LAST_CHANNELS: usize = 128;
const IMAGE_FEATURES: usize = 256;

/// Least rows and columns of pixels, which are halved by every pooling.
const LEAST_PIXELS: usize = 1 << CHANNELS.len();

/// Number of features of one observation.
pub(super) fn width(ends: Ends<'_>) -> usize {
    let each = |encoder: &Encoder| match encoder {
        Encoder::Vector { dim, .. } => *dim,
        Encoder::Categorical { .. } => ends.width,
        Encoder::Image { .. } | Encoder::ResidualImage { .. } => IMAGE_FEATURES,
    };
    ends.observation.iter().map(each).fold(0, usize::saturating_add)
}

/// Features of the first `count` steps at hand, [rows, count * features], oldest first.
pub(super) fn features(net: &mut Net<'_>, count: usize) -> Result<Value> {
    let ends = net.ends;
    let mut all = Vec::new();
    for (leaf, encoder) in ends.observation.iter().enumerate() {
        let (name, field) = (ends.encoder_name(leaf), Field::Observation(leaf));
        all.push(match encoder {
            Encoder::Categorical { .. } => {
                let encoded = net.encode(encoder, &name, field)?;
                net.g.slice(encoded, 1, 0..count)?
            }
            Encoder::Vector { .. } => {
                let x = numbers(net, encoder, field, count)?;
                let mean = net.statistic(&format!("{name}.mean"), Statistic::Mean(field))?;
                let deviation = net.statistic(&format!("{name}.deviation"), Statistic::Deviation(field))?;
                let x = net.g.sub(x, mean)?;
                net.g.div(x, deviation)?
            }
            Encoder::Image { .. } | Encoder::ResidualImage { .. } => {
                let x = numbers(net, encoder, field, count)?;
                image(net, &name, x)?
            }
        });
    }
    let joined = if let [one] = all[..] { one } else { net.g.concat(&all, 2)? };
    Ok(net.g.reshape(joined, [net.rows(), count * width(ends)])?)
}

/// The numbers of a leaf of the first `count` steps, [rows, count, ...]; bytes b are b / 255.
fn numbers(net: &mut Net<'_>, encoder: &Encoder, field: Field, count: usize) -> Result<Value> {
    let all = net.feed(field)?;
    let x = net.g.slice(all, 1, 0..count)?;
    net.numbers(encoder, x)
}

/// Features [rows, count, 256] of images [rows, count, channels, height, width].
fn image(net: &mut Net<'_>, name: &str, x: Value) -> Result<Value> {
    let shape = net.g.shape(x)?.to_vec();
    let mut x = net.g.reshape(x, [shape[0] * shape[1], shape[2], shape[3], shape[4]])?;
    let layers = CHANNELS.iter().map(|outputs| (*outputs, 3, true)).chain([(LAST_CHANNELS, 1, false)]);
    for (i, (outputs, kernel, pools)) in layers.enumerate() {
        let inputs = net.g.shape(x)?[1];
        let init = Init::fan_in(inputs * kernel * kernel);
        let weight = net.param(&format!("{name}.conv{i}.weight"), [outputs, inputs, kernel, kernel], init)?;
        let bias = net.param(&format!("{name}.conv{i}.bias"), [outputs], Init::Constant(0.0))?;
        let conv = Conv2d { stride: 1, padding: kernel / 2 };
        x = net.g.conv2d(x, weight, Some(bias), conv, Act::Relu)?;
        let window = if pools { (2, 2) } else { (net.g.shape(x)?[2], net.g.shape(x)?[3]) };
        x = net.g.max_pool2d(x, window)?;
    }
    let x = net.g.reshape(x, [shape[0], shape[1], LAST_CHANNELS])?;
    let (init, zero) = (Init::fan_in(LAST_CHANNELS), Init::Constant(0.0));
    net.linear_act(x, name, IMAGE_FEATURES, init, Some(zero), Act::Relu)
}

/// Refuses observations that have no features.
pub(super) fn validate(ends: Ends<'_>) -> Result<()> {
    for encoder in ends.observation {
        if let Encoder::Image { height, width, .. } | Encoder::ResidualImage { height, width, .. } = encoder
            && *height.min(width) < LEAST_PIXELS
        {
            let (key, got) = ("observation".to_owned(), format!("{height} x {width}"));
            let expected = format!(
                "images of at least {LEAST_PIXELS} x {LEAST_PIXELS} pixels, which are halved four times"
            );
            return Err(Error::Config { key, expected, got });
        }
    }
    Ok(())
}

/// Adds up the statistics of vectors.
pub(super) fn add_statistics(ends: Ends<'_>, sizes: &mut Sizes) -> Result<()> {
    for encoder in ends.observation {
        if let Encoder::Vector { dim, .. } = encoder {
            sizes.param("observation", 2, &[*dim])?;
        }
    }
    Ok(())
}

/// Adds up the parameters that are trained, and the largest values of the first `count` of `steps` steps.
pub(super) fn add_sizes(ends: Ends<'_>, sizes: &mut Sizes, count: usize, steps: usize) -> Result<()> {
    let (key, d) = ("observation", ends.width);
    for encoder in ends.observation {
        sizes.value(key, &[steps, encoder.len()])?;
        match encoder {
            Encoder::Vector { .. } => {}
            Encoder::Categorical { sizes: each, encoding } => {
                let total = each.iter().fold(0, |sum: usize, n| sum.saturating_add(*n));
                let inputs = if *encoding == CategoricalEncoding::Raw { each.len() } else { total };
                sizes.param(key, 1, &[inputs, d])?;
                sizes.param(key, usize::from(*encoding != CategoricalEncoding::Embedding), &[d])?;
                sizes.value(key, &[steps, each.len(), d])?;
            }
            Encoder::Image { channels, height, width, .. }
            | Encoder::ResidualImage { channels, height, width, .. } => {
                let (mut inputs, mut pixels) = (*channels, height.saturating_mul(*width));
                for outputs in CHANNELS {
                    sizes.value(key, &[count, inputs, 9, pixels])?;
                    sizes.param(key, 1, &[outputs, inputs, 9])?;
                    sizes.param(key, 1, &[outputs])?;
                    (inputs, pixels) = (outputs, pixels / 4);
                }
                sizes.param(key, 1, &[LAST_CHANNELS, inputs])?;
                sizes.param(key, 1, &[LAST_CHANNELS])?;
                sizes.param(key, 1, &[IMAGE_FEATURES, LAST_CHANNELS])?;
                sizes.param(key, 1, &[IMAGE_FEATURES])?;
            }
        }
    }
    Ok(())
}
