//! Graph code that every architecture shares: embedding observations, actions and returns as tokens, the
//! head, the imitation loss.

use elmur_base::Field;
use elmur_engine::{Activation as Act, Conv2d, CrossEntropy, DType, Value};

use crate::ends::{Action, CategoricalEncoding, Convolution, Encoder, Token, convolutions};
use crate::error::Result;
use crate::initial::Init;
use crate::net::{Loss, Net};
use crate::vision::Residual;

impl Net<'_> {
    /// Embeddings of the given tokens of the steps at hand, [rows, steps * tokens, width].
    /// `action_activation` follows the action's embedding.
    pub fn embed(&mut self, tokens: &[Token], action_activation: Act) -> Result<Value> {
        let width = self.ends.width;
        let mut parts = Vec::new();
        for token in tokens {
            parts.push(match token {
                Token::Observation => self.encode_observation()?,
                Token::Action => self.encode_action(action_activation)?,
                Token::Return => {
                    let returns = self.feed(Field::ReturnToGo)?;
                    let init = Init::fan_in(1);
                    self.linear_act(returns, "return_encoder", width, init, Some(init), Act::Identity)?
                }
            });
        }
        self.interleave(&parts)
    }

    /// The tokens of each kind, [rows, steps, width], step by step: [rows, steps * kinds, width].
    pub fn interleave(&mut self, parts: &[Value]) -> Result<Value> {
        if parts.len() == 1 {
            return Ok(parts[0]);
        }
        let shape = self.g.shape(parts[0])?.to_vec();
        let (rows, steps, width) = (shape[0], shape[1], shape[2]);
        let mut split = Vec::new();
        for part in parts {
            split.push(self.g.reshape(*part, [rows, steps, 1, width])?);
        }
        let joined = self.g.concat(&split, 2)?;
        Ok(self.g.reshape(joined, [rows, steps * parts.len(), width])?)
    }

    /// The observation as [rows, steps, width]: its leaves, each encoded, side by side through a linear map.
    pub fn encode_observation(&mut self) -> Result<Value> {
        self.encode_leaves(Field::Observation)
    }

    /// The observation that followed each step, encoded as [`Net::encode_observation`] does.
    pub fn encode_next_observation(&mut self) -> Result<Value> {
        self.encode_leaves(Field::NextObservation)
    }

    fn encode_leaves(&mut self, field: fn(usize) -> Field) -> Result<Value> {
        let (ends, width) = (self.ends, self.ends.width);
        let mut encoded = Vec::new();
        for (leaf, encoder) in ends.observation.iter().enumerate() {
            encoded.push(self.encode(encoder, &ends.encoder_name(leaf), field(leaf))?);
        }
        if encoded.len() == 1 {
            return Ok(encoded[0]);
        }
        let joined = self.g.concat(&encoded, 2)?;
        let init = Init::fan_in(encoded.len() * width);
        self.linear_act(joined, "encoder", width, init, Some(init), Act::Identity)
    }

    /// A leaf of an observation, [rows, steps, ...], as [rows, steps, width].
    pub(crate) fn encode(&mut self, encoder: &Encoder, name: &str, field: Field) -> Result<Value> {
        let width = self.ends.width;
        let x = self.feed(field)?;
        let x = self.numbers(encoder, x)?;
        let shape = self.g.shape(x)?.to_vec();
        match encoder {
            Encoder::Vector { dim, .. } => {
                let init = Init::fan_in(*dim);
                self.linear_act(x, name, width, init, Some(init), Act::Identity)
            }
            Encoder::Categorical { sizes, encoding: CategoricalEncoding::Raw } => {
                let x = self.g.cast(x, self.dtype)?;
                let init = Init::fan_in(sizes.len());
                self.linear_act(x, name, width, init, Some(init), Act::Identity)
            }
            Encoder::Categorical { sizes, encoding } => {
                // One table for all components: one-hot times a matrix is a sum of its rows.
                let total: usize = sizes.iter().sum();
                let one_hot = *encoding == CategoricalEncoding::OneHot;
                let init = if one_hot { Init::fan_in(total) } else { Init::Normal(1.0) };
                let table = self.param(&format!("{name}.table"), [total, width], self.start(init))?;
                let mut offset = 0;
                let offsets: Vec<i32> = sizes
                    .iter()
                    .map(|size| {
                        offset += size;
                        (offset - size) as i32
                    })
                    .collect();
                let offsets = self.g.constant(&offsets, [sizes.len()])?;
                let index = self.g.add(x, offsets)?;
                let sum = self.g.embedding_sum(table, index)?;
                if !one_hot {
                    return Ok(sum);
                }
                let init = self.start_bias(Init::fan_in(total));
                let bias = self.param(&format!("{name}.bias"), [width], init)?;
                Ok(self.g.add(sum, bias)?)
            }
            Encoder::ResidualImage { .. } => match Residual::of(encoder) {
                Some(form) => self.residual_image(form, name, x),
                None => Ok(x),
            },
            Encoder::Image { height, width: columns, .. } => {
                let mut x = self.g.reshape(x, [shape[0] * shape[1], shape[2], shape[3], shape[4]])?;
                for (i, layer) in convolutions(*height, *columns).into_iter().enumerate() {
                    let Convolution { outputs, kernel, stride, padding } = layer;
                    let channels = self.g.shape(x)?[1];
                    let init = Init::fan_in(channels * kernel * kernel);
                    let weight = [outputs, channels, kernel, kernel];
                    let weight = self.param(&format!("{name}.conv{i}.weight"), weight, init)?;
                    let bias = self.param(&format!("{name}.conv{i}.bias"), [outputs], init)?;
                    x = self.g.conv2d(x, weight, Some(bias), Conv2d { stride, padding }, Act::Relu)?;
                }
                let features = self.g.ty(x)?.len() / (shape[0] * shape[1]);
                let x = self.g.reshape(x, [shape[0], shape[1], features])?;
                let init = Init::fan_in(features);
                self.linear_act(x, name, width, init, Some(init), Act::Tanh)
            }
        }
    }

    /// Actions as [rows, steps, width]: a vector per choice (one more for "none"), summed over components, or
    /// a linear map of continuous ones; then the activation.
    pub fn encode_action(&mut self, activation: Act) -> Result<Value> {
        let action = self.feed(Field::Action)?;
        self.encode_given_action(action, activation)
    }

    /// The action zero (in every component), encoded as [`Net::encode_action`] does: [rows, 1, width].
    pub fn encode_zero_action(&mut self, activation: Act) -> Result<Value> {
        let action = self.ends.action;
        let dtype = if action.is_discrete() { DType::I32 } else { self.dtype };
        let zero = self.g.full(dtype, [self.rows(), 1, action.dim()], 0.0)?;
        self.encode_given_action(zero, activation)
    }

    fn encode_given_action(&mut self, action: Value, activation: Act) -> Result<Value> {
        let (ends, width) = (self.ends, self.ends.width);
        let mut sum: Option<Value> = None;
        let shape = self.g.shape(action)?.to_vec();
        for (i, size) in ends.action.sizes().iter().enumerate() {
            let init = self.start(Init::Normal(1.0));
            let table = self.param(&format!("action_encoder.{i}.table"), [size + 1, width], init)?;
            let component = self.g.slice(action, 2, i..i + 1)?;
            let component = self.g.reshape(component, [shape[0], shape[1]])?;
            let each = self.g.embedding(table, component)?;
            sum = Some(match sum {
                Some(sum) => self.g.add(sum, each)?,
                None => each,
            });
        }
        match sum {
            Some(sum) if activation == Act::Identity => Ok(sum),
            Some(sum) => Ok(self.g.activation(sum, activation)?),
            None => {
                let init = Init::fan_in(ends.action.dim());
                self.linear_act(action, "action_encoder", width, init, Some(init), activation)
            }
        }
    }

    /// Hidden states of the observation's tokens, [rows, steps, d], from those of all tokens [rows, steps *
    /// tokens, d].
    pub fn at_observations(&mut self, hidden: Value) -> Result<Value> {
        let (stride, index) = (self.ends.tokens.per_step(), self.ends.tokens.observation_index());
        if stride == 1 {
            return Ok(hidden);
        }
        let shape = self.g.shape(hidden)?.to_vec();
        let x = self.g.reshape(hidden, [shape[0] * shape[1] / stride, stride, shape[2]])?;
        let x = self.g.slice(x, 1, index..index + 1)?;
        Ok(self.g.reshape(x, [shape[0], shape[1] / stride, shape[2]])?)
    }

    /// Head outputs [rows, steps, outputs] from hidden states [rows, steps, d]: logits, or continuous
    /// actions.
    pub(crate) fn head(&mut self, hidden: Value) -> Result<Value> {
        let action = self.ends.action;
        let init = Init::fan_in(self.g.shape(hidden)?.last().copied().unwrap_or(1));
        let (bias, activation) = match action {
            Action::Continuous { tanh: true, .. } => (Some(init), Act::Tanh),
            _ => (None, Act::Identity),
        };
        self.linear_act(hidden, "head", action.outputs(), init, bias, activation)
    }

    /// The imitation loss of head outputs [windows, rows, steps, outputs]: mean cross-entropy (or squared
    /// error) over all steps that are to be imitated.
    pub fn imitation(&mut self, outputs: Value) -> Result<Loss> {
        let action = self.ends.action;
        let rows = self.g.ty(outputs)?.len() / action.outputs();
        if self.ties && action.is_discrete() && action.dim() == 1 {
            let logits = self.g.reshape(outputs, [rows, action.outputs()])?;
            return self.any_accepted(logits);
        }
        let targets = self.feed_all(Field::Target)?;
        let weights = self.step_weights(rows)?;
        let settings = CrossEntropy { label_smoothing: self.label_smoothing, ignored: Field::IGNORED };
        let Action::Continuous { .. } = action else {
            let sizes = action.sizes();
            let logits = self.g.reshape(outputs, [rows, action.outputs()])?;
            if let [_] = sizes {
                let targets = self.g.reshape(targets, [rows])?;
                let correct = self.g.count_correct(logits, targets)?;
                let action = match weights {
                    Some(weights) => self.g.weighted_cross_entropy(logits, targets, weights, settings)?,
                    None => self.g.cross_entropy(logits, targets, settings)?,
                };
                return Ok(Loss { action, auxiliary: None, correct: Some(correct) });
            }
            let mut total: Option<Value> = None;
            let mut correct = self.g.scalar(self.dtype, 0.0)?;
            let mut first = 0;
            for (i, size) in sizes.iter().enumerate() {
                let component = self.g.slice(targets, 3, i..i + 1)?;
                let component = self.g.reshape(component, [rows])?;
                let part = self.g.slice(logits, 1, first..first + size)?;
                let loss = match weights {
                    Some(weights) => self.g.weighted_cross_entropy(part, component, weights, settings)?,
                    None => self.g.cross_entropy(part, component, settings)?,
                };
                let more = self.g.count_correct(part, component)?;
                correct = self.g.add(correct, more)?;
                total = Some(match total {
                    Some(total) => self.g.add(total, loss)?,
                    None => loss,
                });
                first += size;
            }
            let total = total.unwrap_or(logits);
            let action = self.g.scale(total, 1.0 / sizes.len() as f64)?;
            return Ok(Loss { action, auxiliary: None, correct: Some(correct) });
        };
        let action = match weights {
            Some(weights) => {
                let (outputs, targets) = (
                    self.g.reshape(outputs, [rows, action.outputs()])?,
                    self.g.reshape(targets, [rows, action.outputs()])?,
                );
                let error = self.g.sub(outputs, targets)?;
                let square = self.g.mul(error, error)?;
                let each = self.g.mean_to(square, [rows, 1])?;
                let each = self.g.reshape(each, [rows])?;
                let weighed = self.g.mul(each, weights)?;
                self.g.sum(weighed)?
            }
            None => {
                let mask = self.feed_all(Field::Imitate)?;
                self.g.mse(outputs, targets, Some(mask))?
            }
        };
        Ok(Loss { action, auxiliary: None, correct: None })
    }

    /// Where steps have weights of their own: the share of the loss that each of `rows` steps has, w / Σ w.
    fn step_weights(&mut self, rows: usize) -> Result<Option<Value>> {
        let Some(weights) = self.weights else { return Ok(None) };
        let weights = self.feed_all(Field::Weight(weights))?;
        let weights = self.g.reshape(weights, [rows])?;
        let total = self.g.sum(weights)?;
        // Nothing to imitate: nothing to lose.
        let tiny = self.g.scalar(self.dtype, 1e-30)?;
        let total = self.g.add(total, tiny)?;
        Ok(Some(self.g.div(weights, total)?))
    }

    /// The mean of -log Σ p over the accepted choices, for logits [rows, choices]. With label smoothing ε it is the
    /// mean of lse(z) - (1 - ε) lse(accepted z) - ε mean(z), as for one accepted choice.
    fn any_accepted(&mut self, logits: Value) -> Result<Loss> {
        let shape = self.g.shape(logits)?.to_vec();
        let rows = shape[0];
        let accepted = self.feed_all(Field::Accepted)?;
        let accepted = self.g.reshape(accepted, shape.clone())?;
        let imitate = self.feed_all(Field::Imitate)?;
        let imitate = self.g.reshape(imitate, [rows])?;
        let low = self.g.full(self.dtype, shape, -1e9)?;
        let among = self.g.select(accepted, logits, low)?;
        let best = self.g.argmax(among)?;
        let best = self.g.cast(best, DType::I64)?;
        let ignored = self.g.full(DType::I64, [rows], Field::IGNORED as f64)?;
        let targets = self.g.select(imitate, best, ignored)?;
        let correct = self.g.count_correct(logits, targets)?;
        let smoothing = self.label_smoothing;
        let all = self.g.logsumexp(logits)?;
        let some = self.g.logsumexp(among)?;
        let some = self.g.scale(some, 1.0 - smoothing)?;
        let mut each = self.g.sub(all, some)?;
        if smoothing > 0.0 {
            let mean = self.g.mean_to(logits, [rows, 1])?;
            let mean = self.g.reshape(mean, [rows])?;
            let mean = self.g.scale(mean, smoothing)?;
            each = self.g.sub(each, mean)?;
        }
        let zeros = self.g.full(self.dtype, [rows], 0.0)?;
        let each = self.g.select(imitate, each, zeros)?;
        if let Some(weights) = self.step_weights(rows)? {
            let weighed = self.g.mul(each, weights)?;
            let action = self.g.sum(weighed)?;
            return Ok(Loss { action, auxiliary: None, correct: Some(correct) });
        }
        let total = self.g.sum(each)?;
        let counts = self.g.cast(imitate, self.dtype)?;
        let count = self.g.sum(counts)?;
        // Nothing to imitate: nothing to lose.
        let tiny = self.g.scalar(self.dtype, 1e-30)?;
        let count = self.g.add(count, tiny)?;
        let action = self.g.div(total, count)?;
        Ok(Loss { action, auxiliary: None, correct: Some(correct) })
    }
}
