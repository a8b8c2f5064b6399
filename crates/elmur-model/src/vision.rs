//! Pictures to features: the residual encoder, and changes of pictures in training.
//!
//! The residual encoder sees every camera alone, with the same weights. A 5x5 convolution and residual blocks,
//! each of which halves height and width or keeps them, leave a grid of features. Places are kept apart: a few
//! features of every place are read by weights of the place's own, of some features it is read where in the picture
//! of a camera they are (keypoints), and learned queries look at places by attention:
//!
//! ```text
//! x0 = relu(norm(conv5x5/2(camera)))
//! x  = relu(norm(conv3x3(relu(norm(conv3x3/2(x))))) + conv1x1/2(x))            one block per further width
//! f(p) = x(p) + position(p)                                               p: places of all cameras
//! a(q, p) = softmax over p of query(q) f(p)
//! s(j, p) = key(j) x(p), k(j, p) = softmax of s(j, p) over the places p of one camera
//! m(j) = Σ_p k(j, p) (column, row)(p)                                     for every camera
//! y = W [Σ_p a(q, p) f(p) for all q, relu(V x(p) + c) for all p, m(j) for all j and cameras] + b
//! ```
//!
//! Queries alone begin with the mean over all places, in which a thing of a few pixels hardly counts. A prototype in
//! PyTorch, on single frames of RememberColor3 (32 x 32 pixels, the answer told), explained two thirds of the variance
//! of actions after 110 batches of 128 frames with features place by place, and none with queries.
//!
//! norm is group norm: the numbers of eight channels and all places have mean 0 and variance 1, then a scale and a
//! shift per channel.

use elmur_engine::{Activation as Act, Conv2d, DType, Value};

use crate::ends::Encoder;
use crate::error::{Error, Result};
use crate::initial::Init;
use crate::net::{Net, Start};
use crate::sizes::Sizes;

/// Channels that are normalised together.
const GROUP: usize = 8;
/// Rows and columns of the first convolution.
const STEM: usize = 5;
/// Spread of the scores of keypoints in a new policy, for features of spread 1: wide enough that single places stand
/// out.
const KEY: f64 = 3.0;

/// How observations are changed in training: by draws that all steps of a crop share, so that what is remembered stays
/// true of what is seen.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Augment {
    /// Pictures move by up to this many pixels along both axes.
    pub shift: usize,
    /// Pixels are multiplied by a number from 1 - `brightness` to 1 + `brightness`.
    pub brightness: f64,
    /// Red, green and blue change places, in one of their six orders.
    pub colours: bool,
    /// Numbers beside pictures are 0 in this share of crops.
    pub hide: f64,
}

/// What decides the form of a residual encoder.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Residual<'a> {
    channels: usize,
    size: (usize, usize),
    cameras: usize,
    widths: &'a [usize],
    strides: &'a [usize],
    queries: usize,
    grid: usize,
    keypoints: usize,
}

impl<'a> Residual<'a> {
    /// The form of an encoder that is residual.
    pub fn of(encoder: &'a Encoder) -> Option<Self> {
        let Encoder::ResidualImage {
            channels,
            height,
            width,
            cameras,
            widths,
            strides,
            queries,
            grid,
            keypoints,
            ..
        } = encoder
        else {
            return None;
        };
        let (channels, size) = (*channels, (*height, *width));
        let (queries, grid, keypoints) = (*queries, *grid, *keypoints);
        Some(Self { channels, size, cameras: *cameras, widths, strides, queries, grid, keypoints })
    }

    /// Refuses forms that cannot be built, or are too large.
    pub fn validate(&self) -> Result<()> {
        let fail = |expected: &str, got: String| {
            let key = "observation.residual_image".to_owned();
            Err(Error::Config { key, expected: expected.to_owned(), got })
        };
        if self.cameras == 0 || !self.channels.is_multiple_of(self.cameras) {
            let got = format!("{} cameras for {} channels", self.cameras, self.channels);
            return fail("a number of cameras that divides the channels", got);
        }
        let widths = self.widths;
        let fits = |width: &usize| (1..=1024).contains(width) && width.is_multiple_of(GROUP);
        if !(1..=8).contains(&widths.len()) || !widths.iter().all(fits) {
            return fail("1 to 8 widths that are multiples of 8 up to 1024", format!("{widths:?}"));
        }
        let strides = self.strides;
        if !strides.is_empty()
            && (strides.len() != widths.len() || strides.iter().any(|s| ![1, 2].contains(s)))
        {
            let got = format!("{strides:?} for {} widths", widths.len());
            return fail("strides of 1 or 2, one for each width, or none", got);
        }
        let read = [self.queries, self.grid, self.keypoints];
        if read.iter().any(|n| *n > 256) || read == [0; 3] {
            let got =
                format!("{} queries, grid {} and {} keypoints", self.queries, self.grid, self.keypoints);
            return fail("0 to 256 queries, a grid of 0 to 256 and 0 to 256 keypoints, not all 0", got);
        }
        Ok(())
    }

    /// Stride of the first convolution or of a block, 1 or 2 even before settings are validated.
    fn stride(&self, i: usize) -> usize {
        self.strides.get(i).map_or(2, |stride| (*stride).clamp(1, 2))
    }

    /// Places of the grids of all cameras.
    fn places(&self) -> usize {
        let halved = |n: usize| (0..self.widths.len()).fold(n, |n, i| n.div_ceil(self.stride(i)));
        self.cameras.saturating_mul(halved(self.size.0)).saturating_mul(halved(self.size.1))
    }

    /// Channels of the grid.
    fn features(&self) -> usize {
        self.widths.last().copied().unwrap_or(0)
    }

    /// Adds up parameters and values of windows of `steps` steps, for tokens of width `d`.
    pub fn add_sizes(&self, sizes: &mut Sizes, steps: usize, d: usize) -> Result<()> {
        let key = "observation";
        let mut inputs = self.channels / self.cameras.max(1);
        let mut pixels = self.size.0.saturating_mul(self.size.1);
        for (i, width) in self.widths.iter().enumerate() {
            let kernel = if i == 0 { STEM * STEM } else { 9 };
            pixels = pixels.div_ceil(self.stride(i) * self.stride(i));
            sizes.value(key, &[steps, self.cameras, inputs.max(*width), kernel, pixels])?;
            sizes.param(key, 1, &[*width, inputs, kernel])?;
            sizes.param(key, 2, &[*width])?;
            if i > 0 {
                sizes.param(key, 1, &[*width, *width, 9])?;
                sizes.param(key, 2, &[*width])?;
                sizes.param(key, 1, &[*width, inputs])?;
            }
            inputs = *width;
        }
        if self.queries > 0 {
            sizes.param(key, 1, &[self.places(), inputs])?;
            sizes.param(key, 1, &[self.queries, inputs])?;
            sizes.value(key, &[steps, self.queries, self.places()])?;
        }
        if self.grid > 0 {
            sizes.param(key, 1, &[self.grid, inputs])?;
            sizes.param(key, 1, &[self.grid])?;
            sizes.value(key, &[steps, self.grid, self.places()])?;
        }
        if self.keypoints > 0 {
            sizes.param(key, 1, &[self.keypoints, inputs])?;
            sizes.value(key, &[steps, self.keypoints, self.places()])?;
        }
        let (queried, kept) = (self.queries.saturating_mul(inputs), self.grid.saturating_mul(self.places()));
        let found = self.keypoints.saturating_mul(2).saturating_mul(self.cameras);
        let read = queried.saturating_add(kept).saturating_add(found);
        sizes.param(key, 1, &[d, read])?;
        sizes.param(key, 1, &[d])
    }
}

impl Net<'_> {
    /// The numbers of a leaf [rows, steps, ...] as encoders compute with them: bytes b are b / 255, and in training
    /// they are changed as [`Augment`] says.
    pub(crate) fn numbers(&mut self, encoder: &Encoder, x: Value) -> Result<Value> {
        let bytes = self.g.ty(x)?.dtype == DType::U8;
        let Augment { shift, brightness, colours, hide } = self.augment;
        let changes = encoder.is_image() && self.drop_with(0.0).is_some();
        // Two distances, an order of the colours where they change places, the light.
        let moves = if colours { 3 } else { 2 };
        let draws = match changes && (shift > 0 || brightness > 0.0 || colours) {
            true => Some(self.carried("augment", &[moves + 1], Start::Uniform)?),
            false => None,
        };
        let mut x = x;
        if let Some(draws) = draws.filter(|_| shift > 0 || colours) {
            let moves = self.g.slice(draws, 1, 0..moves)?;
            x = self.g.shift_images(x, moves, shift)?;
        }
        if bytes {
            let numbers = self.g.cast(x, self.dtype)?;
            x = self.g.scale(numbers, 1.0 / 255.0)?;
        }
        if let Some(draws) = draws.filter(|_| brightness > 0.0) {
            let light = self.g.slice(draws, 1, moves..moves + 1)?;
            let light = self.g.affine(light, 2.0 * brightness, 1.0 - brightness)?;
            let light = self.g.reshape(light, [self.rows(), 1, 1, 1, 1])?;
            x = self.g.mul(x, light)?;
        }
        if hide > 0.0 && matches!(encoder, Encoder::Vector { .. }) && self.drop_with(0.0).is_some() {
            let draw = self.carried("hide", &[1], Start::Uniform)?;
            // 1 for draws from `hide` on, 0 below.
            let shown = self.g.affine(draw, 1.0, 1.0 - hide)?;
            let shown = self.g.cast(shown, DType::I64)?;
            let shown = self.g.cast(shown, self.dtype)?;
            let shown = self.g.reshape(shown, [self.rows(), 1, 1])?;
            x = self.g.mul(x, shown)?;
        }
        Ok(x)
    }

    /// Images [rows, steps, channels, height, width] through a residual encoder, [rows, steps, token width].
    pub(crate) fn residual_image(&mut self, form: Residual<'_>, name: &str, x: Value) -> Result<Value> {
        let shape = self.g.shape(x)?.to_vec();
        let (images, cameras) = (shape[0] * shape[1], form.cameras);
        let channels = form.channels / cameras;
        let mut x = self.g.reshape(x, [images * cameras, channels, shape[3], shape[4]])?;
        for (i, width) in form.widths.iter().enumerate() {
            let name = format!("{name}.{i}");
            x = match i {
                0 => {
                    let y = self.image_conv(x, &name, *width, STEM, form.stride(i))?;
                    self.image_norm(y, &name, Act::Relu)?
                }
                _ => self.residual_block(x, &name, *width, form.stride(i))?,
            };
        }
        let grid = self.g.shape(x)?.to_vec();
        let (features, places) = (form.features(), cameras * grid[2] * grid[3]);
        let x = self.g.reshape(x, [images * cameras, features, grid[2] * grid[3]])?;
        let x = self.g.transpose(x, &[0, 2, 1])?;
        let mut read = Vec::new();
        if form.keypoints > 0 {
            let found = self.keypoints(x, name, form.keypoints, (grid[2], grid[3]))?;
            read.push(self.g.reshape(found, [shape[0], shape[1], cameras * form.keypoints * 2])?);
        }
        let x = self.g.reshape(x, [images, places, features])?;
        if form.queries > 0 {
            let position = self.param(&format!("{name}.position"), [places, features], Init::Normal(0.1))?;
            let placed = self.g.add(x, position)?;
            let scores =
                self.linear(placed, &format!("{name}.queries"), form.queries, Init::fan_in(features))?;
            let scores = self.g.transpose(scores, &[0, 2, 1])?;
            let weights = self.g.softmax(scores)?;
            let seen = self.g.matmul(weights, placed)?;
            read.push(self.g.reshape(seen, [shape[0], shape[1], form.queries * features])?);
        }
        if form.grid > 0 {
            let init = Init::fan_in(features);
            let few = self.linear_act(x, &format!("{name}.grid"), form.grid, init, Some(init), Act::Relu)?;
            read.push(self.g.reshape(few, [shape[0], shape[1], places * form.grid])?);
        }
        let seen = if read.len() == 1 { read[0] } else { self.g.concat(&read, 2)? };
        let init = Init::fan_in(form.queries * features + form.grid * places + 2 * cameras * form.keypoints);
        self.linear_act(seen, name, self.ends.width, init, Some(init), Act::Identity)
    }

    /// Where in a picture `count` learned features are: of features [cameras, rows x columns, channels] the mean column
    /// and row, from -1 to 1, with the weights of a softmax over places, [cameras, count, 2].
    fn keypoints(&mut self, x: Value, name: &str, count: usize, grid: (usize, usize)) -> Result<Value> {
        let shape = self.g.shape(x)?.to_vec();
        let init = Init::Normal(KEY / (shape[2] as f64).sqrt());
        let scores = self.linear(x, &format!("{name}.keypoints"), count, init)?;
        let scores = self.g.transpose(scores, &[0, 2, 1])?;
        let weights = self.g.softmax(scores)?;
        let along = |i: usize, n: usize| (2 * i + 1) as f32 / n as f32 - 1.0;
        let places: Vec<f32> = (0..grid.0 * grid.1)
            .flat_map(|p| [along(p % grid.1, grid.1), along(p / grid.1, grid.0)])
            .collect();
        let places = self.g.constant(&places, [1, grid.0 * grid.1, 2])?;
        let places = self.g.cast(places, self.dtype)?;
        let rows = self.g.reshape(weights, [1, shape[0] * count, grid.0 * grid.1])?;
        let found = self.g.matmul(rows, places)?;
        Ok(self.g.reshape(found, [shape[0], count, 2])?)
    }

    /// relu(norm(conv(relu(norm(conv/stride(x))))) + conv1x1/stride(x)).
    fn residual_block(&mut self, x: Value, name: &str, width: usize, stride: usize) -> Result<Value> {
        let (a, b) = (format!("{name}.a"), format!("{name}.b"));
        let y = self.image_conv(x, &a, width, 3, stride)?;
        let y = self.image_norm(y, &a, Act::Relu)?;
        let y = self.image_conv(y, &b, width, 3, 1)?;
        let y = self.image_norm(y, &b, Act::Identity)?;
        let skip = self.image_conv(x, &format!("{name}.skip"), width, 1, stride)?;
        let sum = self.g.add(y, skip)?;
        Ok(self.g.relu(sum)?)
    }

    /// A convolution without bias, padded so that the stride alone decides the size.
    fn image_conv(
        &mut self,
        x: Value,
        name: &str,
        outputs: usize,
        kernel: usize,
        stride: usize,
    ) -> Result<Value> {
        let channels = self.g.shape(x)?[1];
        let init = Init::fan_in(channels * kernel * kernel);
        let weight = self.param(&format!("{name}.weight"), [outputs, channels, kernel, kernel], init)?;
        let conv = Conv2d { stride, padding: kernel / 2 };
        Ok(self.g.conv2d(x, weight, None, conv, Act::Identity)?)
    }

    /// Group norm of [images, channels, height, width], then the activation.
    fn image_norm(&mut self, x: Value, name: &str, activation: Act) -> Result<Value> {
        let channels = self.g.shape(x)?[1];
        let gamma = self.param(&format!("{name}.gamma"), [channels], Init::Constant(1.0))?;
        let beta = self.param(&format!("{name}.beta"), [channels], Init::Constant(0.0))?;
        let normal = self.g.group_norm(x, channels / GROUP, gamma, beta, 1e-5)?;
        Ok(self.g.activation(normal, activation)?)
    }
}
