//! Conservative Q-learning for continuous actions, CQL(H): an actor and two critics, offline.
//!
//! ```text
//! pi(o):     mean, log std = mlp(encoder(o));  a = tanh(mean + std eps)       log std clamped to [-20, 2]
//!            log pi(a|o) = sum_j [ log N(pre_j) - log(1 - a_j^2 + 1e-6) ]
//! Q_i(o, a)  = mlp_i([encoder'(o) ; a]),  i = 1, 2; the critics share an encoder of their own
//! y          = r + gamma (1 - done) min_i Q'_i(o', a'),  a' ~ pi(o')          Q' moves towards Q by tau per step
//! pen_i      = mean logsumexp_b [ Q_i(o, b) + log w(b) ] - mean Q_i(o, a_data)
//!              b: some uniform in [-1, 1]^A (log w = A ln 2), some from pi(o) and pi(o') (log w = -log pi)
//! L_Q        = sum_i { mean (Q_i - y)^2 + alpha_c pen_i }
//! L_pi       = mean( alpha_e log pi(a|o) - min_i Q_i(o, a) ),  a ~ pi(o) with gradient
//!              in the first steps log pi(a_data|o) stands in place of Q
//! alpha_e    = e^l,  L_l = -l mean( log pi + target ),  target = -A
//! alpha_c    fixed, or e^k in [0, 1e6], which ascends on alpha_c (pen - threshold)
//! ```
//!
//! Actions lie in [-1, 1]: those of the data are scaled by their smallest and largest value in every
//! dimension, and tanh(mean), which is played, is scaled back. The squared error counts steps whose successor
//! is known or that ended the task, the penalty and the actor all steps that exist, imitation those that are to be
//! imitated.

use elmur_base::{Describe, Field};
use elmur_engine::{Activation as Act, Value};
use serde::{Deserialize, Serialize};

use super::layers::{check_counts, check_number, check_widths, mlp, mlp_sizes};
use crate::architecture::{Architecture, Group};
use crate::ends::{Action, Encoder, Ends, TokenFormat, read_encoders};
use crate::error::{Error, Result};
use crate::initial::Init;
use crate::net::{Average, Loss, Net};
use crate::phase::{Phase, Window};
use crate::sizes::Sizes;
use crate::statistic::Statistic;

/// Limits of the logarithm of the actor's standard deviation.
const LOG_STD: (f64, f64) = (-20.0, 2.0);

/// Keeps logarithms of 1 - a² finite.
const TINY: f64 = 1e-6;

/// Largest weight of the penalty where it is learned.
const MOST_ALPHA: f64 = 1e6;

/// Conservative Q-learning for continuous actions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct CqlContinuous {
    /// How observations become vectors: a list with one encoder per leaf of the observation space. Follows
    /// from the environment or the dataset unless given.
    #[serde(deserialize_with = "read_encoders")]
    pub observation: Vec<Encoder>,
    /// The kind of action that the policy chooses, a vector of numbers. Follows from the environment or the
    /// dataset unless given.
    pub action: Action,
    /// Width of encoded observations: 1 to 1048576.
    pub d_model: usize,
    /// Widths of the hidden layers of the actor and of each critic.
    pub hidden: Vec<usize>,
    /// Environment steps of a training crop.
    pub window: usize,
    /// Discount factor of rewards: 0 to 1.
    pub gamma: f64,
    /// Share of the way that target critics move towards the trained ones with every optimizer step: above 0
    /// and at most 1.
    pub tau: f64,
    /// Weight of the conservative penalty, 0 or more, where `lagrange` is null.
    pub alpha: f64,
    /// Threshold of the penalty above which its weight grows, and below which it shrinks (5 or 10 in the CQL
    /// paper); null: the weight is `alpha`.
    pub lagrange: Option<f64>,
    /// Number of actions of each of the three kinds that the penalty compares the data's action with: 1 to
    /// 4096.
    pub candidates: usize,
    /// Number of optimizer steps at first in which the actor imitates the data's actions instead of seeking
    /// high values.
    pub imitation_steps: u64,
    /// Factor of the learning rate for the actor and its entropy's weight; the critics have 1.
    pub policy_lr: f64,
}

/// A normal distribution per step, squashed by tanh: mean and logarithm of the standard deviation, [n, A].
#[derive(Debug, Clone, Copy)]
struct Actor {
    mean: Value,
    log_std: Value,
}

/// Actions [n, k, A], and the logarithm of their probability density, [n, k].
#[derive(Debug, Clone, Copy)]
struct Drawn {
    actions: Value,
    log_prob: Value,
}

/// What is minimised, each a scalar with gradients for its own parameters alone.
#[derive(Debug, Clone, Copy)]
struct Losses {
    /// Squared errors of both critics.
    td: Value,
    /// The weighted penalty of both critics.
    penalty: Value,
    actor: Value,
    /// Of the entropy's weight.
    entropy: Value,
    /// Of the penalty's weight, where it is learned.
    lagrange: Option<Value>,
}

impl CqlContinuous {
    fn dim(&self) -> usize {
        self.action.dim()
    }

    /// The parameters, added up; an error for models that are too large to build.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        let (d, dim, last) = (self.d_model, self.dim(), self.hidden.last().copied().unwrap_or(1));
        let mut sizes = Sizes::default();
        self.ends().add_encoder_sizes(&mut sizes, self.window)?;
        mlp_sizes(&mut sizes, "hidden", d, &self.hidden)?;
        sizes.param("action", 2, &[dim, last])?;
        sizes.param("action", 2, &[dim])?;
        for _trained_and_target in 0..2 {
            self.ends().add_encoder_sizes(&mut sizes, self.window)?;
            for _critic in 0..2 {
                mlp_sizes(&mut sizes, "hidden", d.saturating_add(dim), &self.hidden)?;
                sizes.param("hidden", 1, &[last])?;
                sizes.param("hidden", 1, &[1])?;
            }
        }
        // Weights of entropy and penalty; range of the data's actions.
        sizes.param("lagrange", 1 + usize::from(self.lagrange.is_some()), &[1])?;
        sizes.param("action", 2, &[dim])?;
        let candidates = self.candidates.saturating_mul(3).saturating_add(1);
        for width in self.hidden.iter().chain([&d.saturating_add(dim)]) {
            sizes.value("candidates", &[self.window, candidates, *width])?;
        }
        Ok(sizes)
    }

    /// Middle and half of the range of the data's actions, [A] each; a range of nothing has a small half, so
    /// that it can be divided by.
    fn range(&self, net: &mut Net<'_>) -> Result<(Value, Value)> {
        let least = net.statistic("action.least", Statistic::Least(Field::Action))?;
        let greatest = net.statistic("action.greatest", Statistic::Greatest(Field::Action))?;
        let sum = net.g.add(least, greatest)?;
        let width = net.g.sub(greatest, least)?;
        let above = net.g.affine(width, 0.5, -TINY)?;
        let above = net.g.relu(above)?;
        Ok((net.g.scale(sum, 0.5)?, net.g.affine(above, 1.0, TINY)?))
    }

    /// Mean and log std of the actor side by side, [.., 2A], for encoded observations [.., d].
    fn actor(&self, net: &mut Net<'_>, encoded: Value) -> Result<Value> {
        let dim = self.dim();
        let x = mlp(net, "policy.mlp", encoded, &self.hidden, 0.0)?;
        let init = Init::fan_in(net.g.shape(x)?.last().copied().unwrap_or(1));
        let both = net.linear_act(x, "policy.head", 2 * dim, init, Some(init), Act::Identity)?;
        let axis = net.g.shape(both)?.len() - 1;
        let mean = net.g.slice(both, axis, 0..dim)?;
        let log_std = net.g.slice(both, axis, dim..2 * dim)?;
        let log_std = clamp(net, log_std, LOG_STD)?;
        Ok(net.g.concat(&[mean, log_std], axis)?)
    }

    /// The actor's distributions at n steps, from mean and log std side by side.
    fn actor_of(&self, net: &mut Net<'_>, both: Value) -> Result<Actor> {
        let dim = self.dim();
        let steps = net.g.ty(both)?.len() / (2 * dim);
        let both = net.g.reshape(both, [steps, 2 * dim])?;
        Ok(Actor { mean: net.g.slice(both, 1, 0..dim)?, log_std: net.g.slice(both, 1, dim..2 * dim)? })
    }

    /// Q_1 and Q_2, each [n, k], of actions [n, k, A] at the observations that `encode` encodes.
    fn critics<'n>(
        &self,
        net: &mut Net<'n>,
        encode: fn(&mut Net<'n>) -> Result<Value>,
        actions: Value,
    ) -> Result<[Value; 2]> {
        net.named("critic", |net| {
            let (d, shape) = (self.d_model, net.g.shape(actions)?.to_vec());
            let (steps, count) = (shape[0], shape[1]);
            let encoded = encode(net)?;
            let encoded = net.g.reshape(encoded, [steps, 1, d])?;
            let encoded = net.g.broadcast_to(encoded, [steps, count, d])?;
            let x = net.g.concat(&[encoded, actions], 2)?;
            let mut critic = |name: &str| -> Result<Value> {
                let x = mlp(net, &format!("{name}.mlp"), x, &self.hidden, 0.0)?;
                let init = Init::fan_in(net.g.shape(x)?.last().copied().unwrap_or(1));
                let q = net.linear_act(x, &format!("{name}.head"), 1, init, Some(init), Act::Identity)?;
                Ok(net.g.reshape(q, [steps, count])?)
            };
            Ok([critic("q1")?, critic("q2")?])
        })
    }

    /// y, [n, 1], without gradient.
    fn target(&self, net: &mut Net<'_>, next: Actor) -> Result<Value> {
        let Drawn { actions, .. } = next.draw(net, 1)?;
        let [q1, q2] = net.averaged("target", Average::Constant(self.tau), |net| {
            self.critics(net, Net::encode_next_observation, actions)
        })?;
        let least = net.g.minimum(q1, q2)?;
        let shape = net.g.shape(least)?.to_vec();
        let (reward, ended) = (net.feed_all(Field::Reward)?, net.feed_all(Field::Terminated)?);
        let goes_on = net.g.cast(ended, net.dtype)?;
        let goes_on = net.g.affine(goes_on, -self.gamma, self.gamma)?;
        let goes_on = net.g.reshape(goes_on, shape.clone())?;
        let after = net.g.mul(least, goes_on)?;
        let reward = net.g.reshape(reward, shape)?;
        let y = net.g.add(reward, after)?;
        Ok(net.g.stop_gradient(y)?)
    }

    /// Actions to compare the data's with, and the logarithms of their weights, without gradient.
    fn candidates(&self, net: &mut Net<'_>, actor: Actor, next: Actor) -> Result<Drawn> {
        let (dim, count) = (self.dim(), self.candidates);
        let steps = net.g.shape(actor.mean)?[0];
        let uniform = uniform(net, [steps, count, dim])?;
        let even = net.g.full(net.dtype, [steps, count], dim as f64 * std::f64::consts::LN_2)?;
        let (mut actions, mut weights) = (vec![uniform], vec![even]);
        for actor in [actor.detached(net)?, next] {
            let drawn = actor.draw(net, count)?;
            actions.push(drawn.actions);
            weights.push(net.g.scale(drawn.log_prob, -1.0)?);
        }
        let (actions, weights) = (net.g.concat(&actions, 1)?, net.g.concat(&weights, 1)?);
        let (actions, log_prob) = (net.g.stop_gradient(actions)?, net.g.stop_gradient(weights)?);
        Ok(Drawn { actions, log_prob })
    }

    /// All losses, given mean and log std of the actor side by side.
    fn losses(&self, net: &mut Net<'_>, hidden: Value) -> Result<Losses> {
        let dim = self.dim();
        let actor = self.actor_of(net, hidden)?;
        let steps = net.g.shape(actor.mean)?[0];
        let next = net.frozen(|net| {
            let next = net.encode_next_observation()?;
            self.actor(net, next)
        })?;
        let next = self.actor_of(net, next)?.detached(net)?;

        let taken = net.feed_all(Field::Action)?;
        let taken = net.g.reshape(taken, [steps, dim])?;
        let (middle, half) = self.range(net)?;
        let taken = net.g.sub(taken, middle)?;
        let taken = net.g.div(taken, half)?;
        let [exists, known, imitate] = [Field::Exists, Field::KnownNext, Field::Imitate]
            .map(|field| net.feed_all(field).and_then(|flag| Ok(net.g.reshape(flag, [steps, 1])?)));
        let (exists, imitate) = (shares(net, exists?)?, shares(net, imitate?)?);

        // Critics: the data's action first, then the candidates.
        let y = self.target(net, next)?;
        let candidates = self.candidates(net, actor, next)?;
        let first = net.g.reshape(taken, [steps, 1, dim])?;
        let actions = net.g.concat(&[first, candidates.actions], 1)?;
        let values = self.critics(net, Net::encode_observation, actions)?;
        let (known, count) = (known?, 3 * self.candidates);
        let (mut errors, mut penalties) = (Vec::new(), Vec::new());
        for q in values {
            let at_data = net.g.slice(q, 1, 0..1)?;
            errors.push(net.g.mse(at_data, y, Some(known))?);
            let others = net.g.slice(q, 1, 1..count + 1)?;
            penalties.push(penalty(net, at_data, others, candidates.log_prob, exists)?);
        }
        let td = net.g.add(errors[0], errors[1])?;
        let both = net.g.add(penalties[0], penalties[1])?;
        let (penalty, lagrange) = match self.lagrange {
            None => (net.g.scale(both, self.alpha)?, None),
            Some(threshold) => {
                let over = net.g.affine(both, 1.0, -2.0 * threshold)?;
                let log_weight = net.param("penalty.log_weight", [1], Init::Constant(0.0))?;
                let weight = net.g.exp(log_weight)?;
                let weight = clamp(net, weight, (0.0, MOST_ALPHA))?;
                let weight = net.g.reshape(weight, [])?;
                let given = net.g.stop_gradient(weight)?;
                let fixed = net.g.stop_gradient(over)?;
                let ascent = net.g.mul(weight, fixed)?;
                (net.g.mul(given, over)?, Some(net.g.scale(ascent, -0.5)?))
            }
        };

        // Actor: its own action, the critics' parameters fixed.
        let drawn = actor.draw(net, 1)?;
        let [q1, q2] = net.frozen(|net| self.critics(net, Net::encode_observation, drawn.actions))?;
        let value = net.g.minimum(q1, q2)?;
        let value = mean(net, value, exists)?;
        let imitated = actor.log_prob(net, taken)?;
        let imitated = mean(net, imitated, imitate)?;
        let imitates = self.imitates(net)?;
        let seeks = net.g.affine(imitates, -1.0, 1.0)?;
        let (value, imitated) = (net.g.mul(value, seeks)?, net.g.mul(imitated, imitates)?);
        let wanted = net.g.add(value, imitated)?;
        let log_weight = net.param("entropy.log_weight", [1], Init::Constant(0.0))?;
        let log_weight = net.g.reshape(log_weight, [])?;
        let weight = net.g.exp(log_weight)?;
        let weight = net.g.stop_gradient(weight)?;
        let log_prob = mean(net, drawn.log_prob, exists)?;
        let weighted = net.g.mul(log_prob, weight)?;
        let actor = net.g.sub(weighted, wanted)?;

        // Entropy's weight: grows where the actor's entropy is below A.
        let short = net.g.stop_gradient(log_prob)?;
        let short = net.g.affine(short, -1.0, dim as f64)?;
        let entropy = net.g.mul(log_weight, short)?;
        Ok(Losses { td, penalty, actor, entropy, lagrange })
    }

    /// 1 in the first optimizer steps, in which the actor imitates, then 0.
    fn imitates(&self, net: &mut Net<'_>) -> Result<Value> {
        let steps = net.optimizer_steps()?;
        let left = net.g.affine(steps, -1.0, self.imitation_steps as f64)?;
        clamp(net, left, (0.0, 1.0))
    }
}

impl Actor {
    /// The same distributions as constants.
    fn detached(self, net: &mut Net<'_>) -> Result<Self> {
        Ok(Self { mean: net.g.stop_gradient(self.mean)?, log_std: net.g.stop_gradient(self.log_std)? })
    }

    /// `count` actions at every step, with gradients through them.
    fn draw(self, net: &mut Net<'_>, count: usize) -> Result<Drawn> {
        let (steps, dim) = (net.g.shape(self.mean)?[0], net.g.shape(self.mean)?[1]);
        let noise = match net.rng {
            Some(rng) => net.g.random_normal(net.dtype, [steps, count, dim], 1.0, rng)?,
            None => net.g.full(net.dtype, [steps, count, dim], 0.0)?,
        };
        let mean = net.g.reshape(self.mean, [steps, 1, dim])?;
        let log_std = net.g.reshape(self.log_std, [steps, 1, dim])?;
        let std = net.g.exp(log_std)?;
        let spread = net.g.mul(noise, std)?;
        let pre = net.g.add(spread, mean)?;
        let actions = net.g.tanh(pre)?;
        let log_prob = density(net, noise, log_std, actions)?;
        Ok(Drawn { actions, log_prob: net.g.reshape(log_prob, [steps, count])? })
    }

    /// log pi(a|o) of one action per step, a [n, A] in [-1, 1], as [n, 1].
    fn log_prob(self, net: &mut Net<'_>, actions: Value) -> Result<Value> {
        let actions = clamp(net, actions, (-1.0 + TINY, 1.0 - TINY))?;
        // pre = atanh a = (ln(1 + a) - ln(1 - a)) / 2
        let (above, below) = (net.g.affine(actions, 1.0, 1.0)?, net.g.affine(actions, -1.0, 1.0)?);
        let (above, below) = (net.g.ln(above)?, net.g.ln(below)?);
        let pre = net.g.sub(above, below)?;
        let pre = net.g.scale(pre, 0.5)?;
        let from_mean = net.g.sub(pre, self.mean)?;
        let std = net.g.exp(self.log_std)?;
        let noise = net.g.div(from_mean, std)?;
        density(net, noise, self.log_std, actions)
    }
}

/// sum_j [ log N(noise_j; 0, 1) - log std_j - log(1 - a_j² + 1e-6) ], [.., 1], for noise and actions [.., A] and
/// log std that broadcasts to them.
fn density(net: &mut Net<'_>, noise: Value, log_std: Value, actions: Value) -> Result<Value> {
    let squares = net.g.mul(noise, noise)?;
    let normal = net.g.affine(squares, -0.5, -0.5 * std::f64::consts::TAU.ln())?;
    let normal = net.g.sub(normal, log_std)?;
    let squares = net.g.mul(actions, actions)?;
    let slope = net.g.affine(squares, -1.0, 1.0 + TINY)?;
    let slope = net.g.ln(slope)?;
    let each = net.g.sub(normal, slope)?;
    let mut shape = net.g.shape(each)?.to_vec();
    if let Some(last) = shape.last_mut() {
        *last = 1;
    }
    Ok(net.g.sum_to(each, shape)?)
}

/// mean( logsumexp_b [ Q(o, b) + log w(b) ] - Q(o, a_data) ) over steps with these shares [n, 1], for values
/// [n, 1] of the data's action and [n, k] of candidates with log weights [n, k].
fn penalty(
    net: &mut Net<'_>,
    at_data: Value,
    others: Value,
    log_weights: Value,
    shares: Value,
) -> Result<Value> {
    let weighted = net.g.add(others, log_weights)?;
    let soft = net.g.logsumexp(weighted)?;
    let shape = net.g.shape(at_data)?.to_vec();
    let soft = net.g.reshape(soft, shape)?;
    let above = net.g.sub(soft, at_data)?;
    mean(net, above, shares)
}

/// Shares of steps in a mean over those where a flag holds, [n, 1].
fn shares(net: &mut Net<'_>, flags: Value) -> Result<Value> {
    let flags = net.g.cast(flags, net.dtype)?;
    let count = net.g.sum(flags)?;
    // At least 1.
    let more = net.g.affine(count, 1.0, -1.0)?;
    let more = net.g.relu(more)?;
    let count = net.g.affine(more, 1.0, 1.0)?;
    Ok(net.g.div(flags, count)?)
}

/// Σ share x, a scalar.
fn mean(net: &mut Net<'_>, x: Value, shares: Value) -> Result<Value> {
    let parts = net.g.mul(x, shares)?;
    Ok(net.g.sum(parts)?)
}

/// Numbers uniform between -1 and 1, of this shape.
fn uniform(net: &mut Net<'_>, shape: [usize; 3]) -> Result<Value> {
    const STEPS: usize = 1 << 24;
    let Some(rng) = net.rng else { return Ok(net.g.full(net.dtype, shape, 0.0)?) };
    let whole = net.g.random_below(STEPS, shape, rng)?;
    let whole = net.g.cast(whole, net.dtype)?;
    let step = 2.0 / STEPS as f64;
    Ok(net.g.affine(whole, step, step / 2.0 - 1.0)?)
}

/// x between two limits; without gradient beyond them.
fn clamp(net: &mut Net<'_>, x: Value, (least, most): (f64, f64)) -> Result<Value> {
    let above = net.g.affine(x, 1.0, -least)?;
    let above = net.g.relu(above)?;
    let x = net.g.affine(above, 1.0, least)?;
    let most = net.g.scalar(net.dtype, most)?;
    Ok(net.g.minimum(x, most)?)
}

impl Architecture for CqlContinuous {
    fn validate(&self) -> Result<()> {
        check_counts(&[
            ("d_model", self.d_model, 1 << 20),
            ("window", self.window, 1 << 20),
            ("candidates", self.candidates, 4096),
        ])?;
        check_widths("hidden", &self.hidden)?;
        check_number("gamma", self.gamma, (0.0..=1.0).contains(&self.gamma), "0 to 1")?;
        check_number("tau", self.tau, self.tau > 0.0 && self.tau <= 1.0, "above 0 and at most 1")?;
        check_number("alpha", self.alpha, self.alpha.is_finite() && self.alpha >= 0.0, "0 or more")?;
        let threshold = self.lagrange.unwrap_or(0.0);
        check_number("lagrange", threshold, threshold.is_finite(), "a finite number, or null")?;
        let rate = self.policy_lr;
        check_number("policy_lr", rate, rate.is_finite() && rate >= 0.0, "0 or more")?;
        if !matches!(self.action, Action::Continuous { .. }) {
            let expected = "continuous actions; cql is for choices".to_owned();
            let got = self.ends().spaces().action.to_string();
            return Err(Error::Config { key: "action".to_owned(), expected, got });
        }
        self.ends().validate()?;
        self.sizes().map(|_| ())
    }

    fn ends(&self) -> Ends<'_> {
        Ends {
            observation: &self.observation,
            action: &self.action,
            tokens: TokenFormat::Observation,
            width: self.d_model,
        }
    }

    fn config_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|_| format!("{self:?}"))
    }

    fn window(&self) -> Window {
        Window::of(self.window, 1)
    }

    /// Mean and log std of the actor side by side, [rows, steps, 2A].
    fn forward(&self, net: &mut Net<'_>) -> Result<Value> {
        let encoded = net.encode_observation()?;
        self.actor(net, encoded)
    }

    /// tanh(mean) in the range of the data's actions.
    fn head(&self, net: &mut Net<'_>, hidden: Value) -> Result<Value> {
        let axis = net.g.shape(hidden)?.len() - 1;
        let mean = net.g.slice(hidden, axis, 0..self.dim())?;
        let action = net.g.tanh(mean)?;
        let (middle, half) = self.range(net)?;
        let scaled = net.g.mul(action, half)?;
        Ok(net.g.add(scaled, middle)?)
    }

    fn loss(&self, net: &mut Net<'_>, hidden: Value, _: Value) -> Result<Loss> {
        let losses = self.losses(net, hidden)?;
        let mut auxiliary = net.g.add(losses.penalty, losses.actor)?;
        for more in [Some(losses.entropy), losses.lagrange].into_iter().flatten() {
            auxiliary = net.g.add(auxiliary, more)?;
        }
        Ok(Loss { action: losses.td, auxiliary: Some(auxiliary), correct: None })
    }

    /// The actor and its entropy's weight learn at a rate of their own; weights of losses do not decay.
    fn group(&self, parameter: &str) -> Group {
        let of_critics = parameter.starts_with("critic.") || parameter == "penalty.log_weight";
        let lr_scale = if of_critics { 1.0 } else { self.policy_lr };
        Group { lr_scale, decays: !parameter.ends_with(".log_weight") }
    }

    fn steps_exactly(&self) -> bool {
        true
    }

    /// A step is a window of one step.
    fn step(&self, net: &mut Net<'_>, phase: Phase) -> Result<Option<Value>> {
        match phase {
            Phase::Observe => Ok(Some(self.forward(net)?)),
            Phase::Begin | Phase::Act | Phase::Close => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use elmur_engine::{DType, Pool, Program, Store, gradcheck};

    use super::*;
    use crate::net::Pass;
    use crate::window::RNG;
    use crate::{Checkpoint, PolicyConfig, presets};

    const F64: DType = DType::F64;

    fn small() -> CqlContinuous {
        let observation = vec![Encoder::Vector { dim: 3, bytes: false }];
        let base = presets::cql_continuous(observation, Action::Continuous { dim: 2, tanh: false }, 2);
        CqlContinuous { d_model: 4, hidden: vec![5, 6], candidates: 3, imitation_steps: 5, ..base }
    }

    /// Runs a graph without parameters of its own and reads its outputs.
    fn run(config: &CqlContinuous, build: impl FnOnce(&mut Net<'_>) -> Result<Vec<Value>>) -> Vec<Vec<f64>> {
        let mut net = Net::new(config.ends(), F64, Pass::Rerun { closing: false }, 1, 2);
        let outputs = build(&mut net).unwrap();
        for (i, output) in outputs.iter().enumerate() {
            net.g.output(&i.to_string(), *output).unwrap();
        }
        let mut program = Program::new(&net.g, &Pool::new(1), &[&Store::new()]).unwrap();
        program.run().unwrap();
        (0..outputs.len()).map(|i| program.get::<f64>(&i.to_string()).unwrap().to_vec()).collect()
    }

    fn close(got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-12), "{got:?}, want {want:?}");
    }

    /// log pi(a|o) of one dimension by hand.
    fn log_prob(pre: f64, mean: f64, log_std: f64) -> f64 {
        let noise = (pre - mean) / log_std.exp();
        let normal = -0.5 * noise * noise - log_std - 0.5 * (2.0 * std::f64::consts::PI).ln();
        normal - (1.0 - pre.tanh().powi(2) + 1e-6).ln()
    }

    #[test]
    fn densities_are_those_of_squashed_normal_numbers() {
        let (mean, log_std) = ([0.3, -0.2, 1.5, 0.0], [-0.5, 0.4, -1.0, 0.1]);
        let pre = [0.9f64, -1.1, 0.2, 2.0];
        let outputs = run(&small(), |net| {
            let actor =
                Actor { mean: net.g.constant(&mean, [2, 2])?, log_std: net.g.constant(&log_std, [2, 2])? };
            let taken = net.g.constant(&pre.map(f64::tanh), [2, 2])?;
            let known = actor.log_prob(net, taken)?;
            // Without a generator the noise is zero.
            let drawn = actor.draw(net, 3)?;
            Ok(vec![known, drawn.actions, drawn.log_prob])
        });
        let want = |pre: [f64; 4]| -> Vec<f64> {
            let each: Vec<f64> = (0..4).map(|i| log_prob(pre[i], mean[i], log_std[i])).collect();
            vec![each[0] + each[1], each[2] + each[3]]
        };
        close(&outputs[0], &want(pre));
        let actions: Vec<f64> = mean.chunks(2).flat_map(|m| m.repeat(3)).map(f64::tanh).collect();
        close(&outputs[1], &actions);
        let [first, second] = want(mean)[..] else { panic!("two steps") };
        close(&outputs[2], &[first, first, first, second, second, second]);
        // The ends of the range have a finite density too.
        let edge = run(&small(), |net| {
            let actor =
                Actor { mean: net.g.constant(&[0.0], [1, 1])?, log_std: net.g.constant(&[0.0], [1, 1])? };
            let taken = net.g.constant(&[1.0], [1, 1])?;
            Ok(vec![actor.log_prob(net, taken)?])
        });
        assert!((edge[0][0] - log_prob((1.0f64 - 1e-6).atanh(), 0.0, 0.0)).abs() < 1e-6, "{edge:?}");
    }

    #[test]
    fn the_penalty_compares_candidates_with_the_data() {
        let outputs = run(&small(), |net| {
            let at_data = net.g.constant(&[1.0, 2.0, 9.0], [3, 1])?;
            let others = net.g.constant(&[0.0, 3f64.ln(), 2.0, 2.0, 9.0, 9.0], [3, 2])?;
            let log_weights = net.g.constant(&[0.0, 2f64.ln(), 0.0, 3f64.ln(), 0.0, 0.0], [3, 2])?;
            let exists = net.g.constant(&[true, true, false], [3, 1])?;
            let shares = shares(net, exists)?;
            let none = net.g.constant(&[false, false, false], [3, 1])?;
            let none = super::shares(net, none)?;
            let nothing = penalty(net, at_data, others, log_weights, none)?;
            Ok(vec![penalty(net, at_data, others, log_weights, shares)?, shares, nothing])
        });
        // ln(1 + 3 * 2) - 1 and 2 + ln(1 + 3) - 2; the third step does not exist.
        close(&outputs[0], &[(7f64.ln() - 1.0 + 4f64.ln()) / 2.0]);
        close(&outputs[1], &[0.5, 0.5, 0.0]);
        assert_eq!(outputs[2], [0.0]);
    }

    /// The graph of all losses in f64 and a store with random parameters; three steps of four exist.
    fn losses(config: &CqlContinuous, steps: f64) -> (Store, Program, Vec<String>) {
        let pass = Pass::Windows { count: 1, at: 0, fresh: true };
        let mut net = Net::new(config.ends(), F64, pass, 2, 2);
        net.rng = Some(net.g.rng(RNG).unwrap());
        let hidden = config.forward(&mut net).unwrap();
        let Losses { td, penalty, actor, entropy, lagrange } = config.losses(&mut net, hidden).unwrap();
        let g = &mut net.g;
        let critic = g.add(td, penalty).unwrap();
        let lagrange = lagrange.unwrap_or(entropy);
        let mut total = g.scalar(F64, 0.0).unwrap();
        for (name, loss) in
            [("critic", critic), ("actor", actor), ("entropy", entropy), ("lagrange", lagrange)]
        {
            g.output(name, loss).unwrap();
            if name != "lagrange" || config.lagrange.is_some() {
                total = g.add(total, loss).unwrap();
            }
        }
        let params: Vec<(String, Value)> = g.params().map(|(name, value)| (name.to_owned(), value)).collect();
        let values: Vec<Value> = params.iter().map(|(_, value)| *value).collect();
        let grads = g.gradients(total, &values).unwrap();
        let mut trained = Vec::new();
        for ((name, _), grad) in params.iter().zip(grads) {
            if let Some(grad) = grad {
                g.output(&format!("grad.{name}"), grad).unwrap();
                trained.push(name.clone());
            }
        }
        let store = Store::new();
        store.declare(g).unwrap();
        gradcheck::randomize(g, &store, 3, 0.3).unwrap();
        store.set("action.least", &[-2.0, 0.0]).unwrap();
        store.set("action.greatest", &[2.0, 4.0]).unwrap();
        let mut program = Program::new(g, &Pool::new(1), &[&store]).unwrap();
        let numbers =
            |n: usize, scale: f64| (0..n).map(|i| scale * (i as f64 * 1.7).sin()).collect::<Vec<_>>();
        program.set("observation", &numbers(12, 1.0)).unwrap();
        program.set("next_observation.0", &numbers(12, -0.8)).unwrap();
        program.set("action", &[-2.0, 1.0, 0.5, 3.9, 1.0, 2.0, 0.0, 0.0]).unwrap();
        program.set("reward", &[1.0, -0.5, 2.0, 0.0]).unwrap();
        program.set("terminated", &[false, true, false, false]).unwrap();
        program.set("known_next", &[true, true, false, false]).unwrap();
        program.set("exists", &[true, true, true, false]).unwrap();
        program.set("mask", &[true, false, true, false]).unwrap();
        program.set("optimizer_steps", &[steps]).unwrap();
        (store, program, trained)
    }

    #[test]
    fn gradients_are_those_of_each_loss_for_its_own_parameters() {
        for (lagrange, steps) in [(None, 0.0), (Some(2.0), 9.0)] {
            let config = CqlContinuous { lagrange, ..small() };
            let (store, mut program, trained) = losses(&config, steps);
            let mut evaluate = |output: &str| {
                // The same draws in every run.
                store.set(RNG, &[7i64, 0]).unwrap();
                program.run().unwrap();
                program.get::<f64>(output).unwrap().to_vec()
            };
            assert!(trained.iter().all(|name| !name.starts_with("target.") && !name.starts_with("action.")));
            assert_eq!(trained.contains(&"penalty.log_weight".to_owned()), lagrange.is_some());
            let mut checked = 0;
            for name in &trained {
                let own = match name.split('.').next().unwrap() {
                    "critic" => "critic",
                    "penalty" => "lagrange",
                    "entropy" => "entropy",
                    _ => "actor",
                };
                let analytic = evaluate(&format!("grad.{name}"));
                let before = store.get::<f64>(name).unwrap();
                for i in (0..before.len()).step_by(3) {
                    let mut sides = [0.0; 2];
                    for (side, shift) in sides.iter_mut().zip([1e-5, -1e-5]) {
                        let mut moved = before.clone();
                        moved[i] += shift;
                        store.set(name, &moved).unwrap();
                        *side = evaluate(own)[0];
                    }
                    store.set(name, &before).unwrap();
                    let numeric = (sides[0] - sides[1]) / 2e-5;
                    let error = (numeric - analytic[i]).abs() / numeric.abs().max(1.0);
                    assert!(error < 1e-6, "{name}[{i}]: {} for {numeric}", analytic[i]);
                    checked += 1;
                }
            }
            assert!(checked > 80, "{checked}");
        }
    }

    #[test]
    fn the_actor_imitates_at_first_and_then_seeks_values() {
        let actor = |steps: f64, q: f64| {
            let (store, mut program, _) = losses(&small(), steps);
            for critic in ["q1", "q2"] {
                store.set(&format!("critic.{critic}.head.bias"), &[q]).unwrap();
            }
            store.set(RNG, &[7i64, 0]).unwrap();
            program.run().unwrap();
            program.get::<f64>("actor").unwrap()[0]
        };
        assert!((actor(4.0, 0.0) - actor(4.0, 8.0)).abs() < 1e-12);
        assert!((actor(5.0, 0.0) - actor(5.0, 8.0) - 8.0).abs() < 1e-9);
    }

    #[test]
    fn parameters_are_counted_and_grouped() {
        for lagrange in [None, Some(5.0)] {
            let config = CqlContinuous { lagrange, ..small() };
            let counted = config.sizes().unwrap().parameters();
            assert_eq!(
                counted,
                Checkpoint::parameter_count(&PolicyConfig::CqlContinuous(config)).unwrap() as u128
            );
        }
        let group = |name: &str| small().group(name);
        assert_eq!(group("critic.q1.head.weight"), Group { lr_scale: 1.0, decays: true });
        assert_eq!(group("penalty.log_weight"), Group { lr_scale: 1.0, decays: false });
        assert_eq!(group("policy.head.weight"), Group { lr_scale: 1.0 / 3.0, decays: true });
        assert_eq!(group("entropy.log_weight"), Group { lr_scale: 1.0 / 3.0, decays: false });
        let error = |change: &dyn Fn(&mut CqlContinuous)| {
            let mut config = small();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        small().validate().unwrap();
        for (text, expected) in [
            (
                error(&|c| c.action = Action::Categorical { count: 2 }),
                "`action`: expected continuous actions",
            ),
            (error(&|c| c.candidates = 0), "`candidates`: expected 1 to 4096"),
            (error(&|c| c.lagrange = Some(f64::INFINITY)), "`lagrange`: expected a finite number"),
            (error(&|c| c.tau = 0.0), "`tau`: expected above 0"),
            (error(&|c| c.policy_lr = -1.0), "`policy_lr`: expected 0 or more"),
            (error(&|c| (c.window, c.candidates) = (1 << 20, 4096)), "`candidates`: expected at most"),
        ] {
            assert!(text.contains(expected), "{text}");
        }
    }
}
