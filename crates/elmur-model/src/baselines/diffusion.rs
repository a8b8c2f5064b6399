//! Diffusion Policy: chunks of actions, denoised step by step, given the newest observations (Chi et al.,
//! 2023).
//!
//! ```text
//! x_0 = the actions of H steps, scaled to [-1, 1];   x_t = sqrt(ab_t) x_0 + sqrt(1 - ab_t) noise
//! loss = mean (noise - denoiser(x_t, cond))²,        t uniform per row, over the steps that are imitated
//! cond = [ W_b mish(W_a e_t + b) + b ; features of the newest O observations, oldest first ]
//! ```
//!
//! Action 0 of a chunk belongs to the oldest observation, so that the current step's is action O - 1. Acting
//! plans a chunk from pure noise, plays `act_horizon` actions of it from the current one on, and plans anew. It
//! uses weights that are averaged over training.

mod denoiser;
mod features;
mod planner;
mod schedule;

use elmur_base::{Describe, Field};
use elmur_engine::{Activation as Act, Device, Store, Value};
use serde::{Deserialize, Serialize};

use super::layers::{check_counts, check_widths};
use crate::architecture::Architecture;
use crate::ends::{Action, Encoder, Ends, TokenFormat, read_encoders};
use crate::error::{Error, Result};
use crate::initial::Init;
use crate::net::{Average, Loss, Net};
use crate::phase::Window;
use crate::planner::Planner;
use crate::sizes::Sizes;
use crate::statistic::Statistic;
use denoiser::{LAST_GROUPS, perceptron};
pub(crate) use denoiser::{Layer, Unet};
pub(crate) use planner::{NOISE, STEP, X, sampling_graphs};
pub(crate) use schedule::{Move, NoiseSchedule};

/// What the names of averaged weights begin with, and how they follow.
pub(crate) const EMA: &str = "ema";
pub(crate) const AVERAGE: Average = Average::Warming(0.9999);

/// Steps back from noise where recorded episodes are predicted.
const EVALUATION_STEPS: usize = 10;

/// Least half width of the range of actions, for numbers that never change.
const LEAST_RANGE: f64 = 1e-6;

/// The network that tells noise from actions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Denoiser {
    /// Convolutions over time at several resolutions.
    Unet {
        /// Widths of the levels, from the finest on: multiples of `groups`, the first of 8 too.
        widths: Vec<usize>,
        /// Steps of the convolutions' kernels, an odd number: 1 to 63.
        #[serde(default = "five")]
        kernel: usize,
        /// Groups of channels that are normalised together.
        #[serde(default = "eight")]
        groups: usize,
    },
    /// A perceptron over the whole chunk, smaller and faster.
    Mlp {
        /// Widths of the hidden layers.
        hidden: Vec<usize>,
    },
}

fn five() -> usize {
    5
}

fn eight() -> usize {
    8
}

/// The way back from noise to actions when acting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum DiffusionSampler {
    /// This many evenly spaced steps (1 to `diffusion_steps`) that follow from the noise they begin with; 10
    /// to 16 do.
    Ddim(usize),
    /// Every step of the diffusion, each with fresh noise (the published code's way).
    Ddpm,
}

/// Diffusion Policy: chunks of continuous actions, denoised given the newest observations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct Diffusion {
    /// How observations become features: a list with one encoder per leaf of the observation space. Vectors are
    /// taken as they are. Follows from the environment or the dataset unless given.
    #[serde(deserialize_with = "read_encoders")]
    pub observation: Vec<Encoder>,
    /// The kind of action, which must be continuous, and how many numbers it has. Follows from the environment
    /// or the dataset unless given.
    pub action: Action,
    /// Width of encoded integers of observations: 1 to 65536. Vectors and images have features of their own.
    #[serde(default = "sixty_four")]
    pub d_model: usize,
    /// Number of newest observations that a plan is made from: 1 to `pred_horizon`.
    pub obs_horizon: usize,
    /// Number of actions in a chunk, counted from the oldest of these observations on: 1 to 65536. The U-Net
    /// halves it between its levels.
    pub pred_horizon: usize,
    /// Number of actions that are played before the next plan: 1 to `pred_horizon` - `obs_horizon` + 1.
    pub act_horizon: usize,
    /// Number of steps of the diffusion: 1 to 10000.
    pub diffusion_steps: usize,
    /// Width of the embedding of diffusion steps, an even number: 4 to 1024.
    pub step_embed: usize,
    /// The network that tells noise from actions.
    pub denoiser: Denoiser,
    /// The way back from noise to actions when acting: `{ddim: N}` or `ddpm`.
    pub sampler: DiffusionSampler,
    /// Behaviours of the published Python code that differ from the method, to reproduce its results.
    #[serde(default, skip_serializing_if = "DiffusionCompat::is_default")]
    pub compat: DiffusionCompat,
}

fn sixty_four() -> usize {
    64
}

/// Behaviours of the published Python code that differ from the method; all off by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields, default)]
pub struct DiffusionCompat {
    /// Whether a plan is made at every step and only its first action is played.
    pub replan_every_step: bool,
    /// Whether acting uses the weights that training ends with instead of their average.
    pub raw_weights: bool,
}

impl DiffusionCompat {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl Diffusion {
    /// Actions of a plan that are played.
    fn plays(&self) -> usize {
        if self.compat.replan_every_step { 1 } else { self.act_horizon }
    }

    fn actions(&self) -> usize {
        self.action.dim()
    }

    /// Width of what the denoiser is conditioned on: the step's embedding and the observations' features.
    fn cond(&self) -> usize {
        self.obs_horizon.saturating_mul(features::width(self.ends())).saturating_add(self.step_embed)
    }

    /// The U-Net of these settings.
    pub(crate) fn unet<'a>(&self, widths: &'a [usize], kernel: usize, groups: usize) -> Unet<'a> {
        Unet { widths, kernel, groups, actions: self.actions(), cond: self.cond() }
    }

    /// The parameters, added up; an error for models that are too large to build.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        let (mut sizes, s, chunk) = (Sizes::default(), self.step_embed, self.pred_horizon);
        let copies = if self.compat.raw_weights { 1 } else { 2 };
        features::add_statistics(self.ends(), &mut sizes)?;
        sizes.param("action", 2, &[self.actions()])?;
        for _ in 0..copies {
            features::add_sizes(self.ends(), &mut sizes, self.obs_horizon, chunk)?;
            sizes.value("action", &[chunk, self.actions()])?;
            sizes.param("step_embed", 2, &[4, s, s])?;
            sizes.param("step_embed", 5, &[s])?;
            match &self.denoiser {
                Denoiser::Unet { widths, kernel, groups } => {
                    self.unet(widths, *kernel, *groups).add_sizes(&mut sizes, chunk)?;
                }
                Denoiser::Mlp { hidden } => {
                    let out = chunk.saturating_mul(self.actions());
                    let mut inputs = out.saturating_add(self.cond());
                    for width in hidden.iter().copied().chain([out]) {
                        sizes.param("denoiser.mlp.hidden", 1, &[width, inputs])?;
                        sizes.param("denoiser.mlp.hidden", 1, &[width])?;
                        inputs = width;
                    }
                }
            }
        }
        Ok(sizes)
    }

    /// The embedding of the diffusion step that `index` i32 `[rows]` names in a list, [rows, step_embed].
    fn embedded(
        &self,
        net: &mut Net<'_>,
        steps: impl ExactSizeIterator<Item = usize>,
        index: Value,
    ) -> Result<Value> {
        let shape = [steps.len(), self.step_embed];
        let table = match net.only_params {
            true => net.g.full(net.dtype, shape, 0.0)?,
            false => net.float_constant(&schedule::step_embeddings(steps, self.step_embed), shape)?,
        };
        Ok(net.g.embedding(table, index)?)
    }

    /// The factor that `index` i32 `[rows]` names in a list, [rows, 1, 1].
    fn factor(&self, net: &mut Net<'_>, factors: &[f64], index: Value) -> Result<Value> {
        let table = net.float_constant(factors, [factors.len(), 1])?;
        let factor = net.g.embedding(table, index)?;
        Ok(net.g.reshape(factor, [net.rows(), 1, 1])?)
    }

    /// The middle of the range of recorded actions and half its width, each `[actions]`.
    fn range(&self, net: &mut Net<'_>) -> Result<[Value; 2]> {
        let least = net.statistic("action.least", Statistic::Least(Field::Action))?;
        let greatest = net.statistic("action.greatest", Statistic::Greatest(Field::Action))?;
        let sum = net.g.add(greatest, least)?;
        let middle = net.g.scale(sum, 0.5)?;
        // Half the difference, at least LEAST_RANGE.
        let difference = net.g.sub(least, greatest)?;
        let negative = net.g.scale(difference, 0.5)?;
        let most = net.g.scalar(net.dtype, -LEAST_RANGE)?;
        let negative = net.g.minimum(negative, most)?;
        Ok([middle, net.g.scale(negative, -1.0)?])
    }

    /// Features of the newest observations at hand, [rows, obs_horizon * features].
    fn features(&self, net: &mut Net<'_>) -> Result<Value> {
        features::features(net, self.obs_horizon)
    }

    /// The noise in x [rows, steps, actions], given embedded diffusion steps [rows, step_embed] and features.
    fn predict(&self, net: &mut Net<'_>, x: Value, step: Value, features: Value) -> Result<Value> {
        let s = self.step_embed;
        let init = Init::fan_in(s);
        let step = net.linear_act(step, "step.0", 4 * s, init, Some(init), Act::Mish)?;
        let init = Init::fan_in(4 * s);
        let step = net.linear_act(step, "step.1", s, init, Some(init), Act::Identity)?;
        let cond = net.g.concat(&[step, features], 1)?;
        match &self.denoiser {
            Denoiser::Unet { widths, kernel, groups } => {
                self.unet(widths, *kernel, *groups).predict(net, x, cond)
            }
            Denoiser::Mlp { hidden } => perceptron(net, hidden, x, cond),
        }
    }

    /// In training: the noise that the denoiser sees in noised actions, beside the noise that is in them,
    /// [rows, steps, 2 actions]. `noise` is [rows, steps, actions], `t` i32 `[rows]`.
    pub(crate) fn denoise(&self, net: &mut Net<'_>, noise: Value, t: Value) -> Result<Value> {
        let noisy = self.noised(net, noise, t)?;
        let step = self.embedded(net, 0..self.diffusion_steps, t)?;
        let features = self.features(net)?;
        let predicted = self.predict(net, noisy, step, features)?;
        Ok(net.g.concat(&[predicted, noise], 2)?)
    }

    /// x_t = sqrt(ab_t) x_0 + sqrt(1 - ab_t) noise, [rows, steps, actions], of the recorded actions.
    pub(crate) fn noised(&self, net: &mut Net<'_>, noise: Value, t: Value) -> Result<Value> {
        let target = net.feed(Field::Target)?;
        let [middle, half] = self.range(net)?;
        let clean = net.g.sub(target, middle)?;
        let clean = net.g.div(clean, half)?;
        let left = NoiseSchedule::new(self.diffusion_steps).alpha_bars;
        let kept: Vec<f64> = left.iter().map(|ab| ab.sqrt()).collect();
        let added: Vec<f64> = left.iter().map(|ab| (1.0 - ab).sqrt()).collect();
        let (kept, added) = (self.factor(net, &kept, t)?, self.factor(net, &added, t)?);
        let clean = net.g.mul(clean, kept)?;
        let noise = net.g.mul(noise, added)?;
        Ok(net.g.add(clean, noise)?)
    }

    /// Builds a part of the graph with the weights that acting uses.
    fn acting<T>(&self, net: &mut Net<'_>, part: impl FnOnce(&mut Net<'_>) -> Result<T>) -> Result<T> {
        if self.compat.raw_weights { part(net) } else { net.averaged(EMA, AVERAGE, part) }
    }

    /// One move back from noise, x [rows, steps, actions] to the next x. `at` i32 `[rows]` is the number of the
    /// move; `fresh` is noise like x, where moves take some.
    fn step_back(
        &self,
        net: &mut Net<'_>,
        moves: &[Move],
        at: Value,
        x: Value,
        features: Value,
        fresh: Option<Value>,
    ) -> Result<Value> {
        let step = self.embedded(net, moves.iter().map(|m| m.t), at)?;
        let noise = self.predict(net, x, step, features)?;
        let scaled = |net: &mut Net<'_>, x: Value, of: fn(&Move) -> f64| -> Result<Value> {
            let factors: Vec<f64> = moves.iter().map(of).collect();
            let factor = self.factor(net, &factors, at)?;
            Ok(net.g.mul(x, factor)?)
        };
        let (clean, wrong) = (scaled(net, x, |m| m.of_x)?, scaled(net, noise, |m| m.of_noise)?);
        let clean = net.g.sub(clean, wrong)?;
        // At most 1, at least -1.
        let one = net.g.scalar(net.dtype, 1.0)?;
        let clean = net.g.minimum(clean, one)?;
        let negative = net.g.scale(clean, -1.0)?;
        let negative = net.g.minimum(negative, one)?;
        let clean = net.g.scale(negative, -1.0)?;
        let (clean, kept) = (scaled(net, clean, |m| m.to_clean)?, scaled(net, x, |m| m.to_x)?);
        let next = net.g.add(clean, kept)?;
        match fresh {
            Some(fresh) => {
                let fresh = scaled(net, fresh, |m| m.to_fresh)?;
                Ok(net.g.add(next, fresh)?)
            }
            None => Ok(next),
        }
    }

    /// Actions in their own units from x, both [rows, steps, actions].
    fn unscaled(&self, net: &mut Net<'_>, x: Value) -> Result<Value> {
        let [middle, half] = self.range(net)?;
        let wide = net.g.mul(x, half)?;
        Ok(net.g.add(wide, middle)?)
    }

    /// The chunk that lies nearest to no noise at all, [rows, steps, actions]: what is compared with recorded
    /// actions.
    fn expected(&self, net: &mut Net<'_>) -> Result<Value> {
        let count = EVALUATION_STEPS.min(self.diffusion_steps);
        let moves = NoiseSchedule::new(self.diffusion_steps).moves(DiffusionSampler::Ddim(count));
        let features = self.features(net)?;
        let mut x = net.g.full(net.dtype, [net.rows(), self.pred_horizon, self.actions()], 0.0)?;
        for i in 0..count {
            let at = net.g.constant(&vec![i as i32; net.rows()], [net.rows()])?;
            x = self.step_back(net, &moves, at, x, features, None)?;
        }
        self.unscaled(net, x)
    }

    fn refuse<T>(key: &str, expected: impl Into<String>, got: impl ToString) -> Result<T> {
        Err(Error::Config { key: key.to_owned(), expected: expected.into(), got: got.to_string() })
    }

    fn validate_denoiser(&self) -> Result<()> {
        let (widths, kernel, groups) = match &self.denoiser {
            Denoiser::Unet { widths, kernel, groups } => (widths, kernel, groups),
            Denoiser::Mlp { hidden } => return check_widths("denoiser.mlp.hidden", hidden),
        };
        let key = "denoiser.unet.widths";
        if !(1..=16).contains(&widths.len()) {
            return Self::refuse(key, "1 to 16 widths of levels", widths.len());
        }
        check_widths(key, widths)?;
        check_counts(&[("denoiser.unet.groups", *groups, 1 << 16), ("denoiser.unet.kernel", *kernel, 63)])?;
        if kernel % 2 == 0 {
            return Self::refuse("denoiser.unet.kernel", "an odd number of steps", kernel);
        }
        if let Some(width) = widths.iter().find(|width| !width.is_multiple_of(*groups)) {
            return Self::refuse(key, format!("multiples of the {groups} groups"), width);
        }
        if !widths[0].is_multiple_of(LAST_GROUPS) {
            let expected =
                format!("a first width that is a multiple of the last block's {LAST_GROUPS} groups");
            return Self::refuse(key, expected, widths[0]);
        }
        let halved = 1 << (widths.len() - 1);
        if !self.pred_horizon.is_multiple_of(halved) {
            let expected = format!("a multiple of {halved}, as {} levels halve it", widths.len());
            return Self::refuse("pred_horizon", expected, self.pred_horizon);
        }
        Ok(())
    }
}

impl Architecture for Diffusion {
    fn validate(&self) -> Result<()> {
        check_counts(&[
            ("d_model", self.d_model, 1 << 16),
            ("pred_horizon", self.pred_horizon, 1 << 16),
            ("obs_horizon", self.obs_horizon, self.pred_horizon),
            ("diffusion_steps", self.diffusion_steps, 10_000),
        ])?;
        let left = self.pred_horizon - self.obs_horizon + 1;
        if !(1..=left).contains(&self.act_horizon) {
            let expected = format!("1 to {left}, the actions of a chunk from the current one on");
            return Self::refuse("act_horizon", expected, self.act_horizon);
        }
        if !(4..=1024).contains(&self.step_embed) || !self.step_embed.is_multiple_of(2) {
            return Self::refuse("step_embed", "an even number from 4 to 1024", self.step_embed);
        }
        if let DiffusionSampler::Ddim(count) = self.sampler
            && !(1..=self.diffusion_steps).contains(&count)
        {
            let expected = format!("1 to the {} steps of the diffusion", self.diffusion_steps);
            return Self::refuse("sampler.ddim", expected, count);
        }
        if self.action.is_discrete() {
            let expected = "continuous actions, which noise can be added to; bc-mlp, dt and elmur choose among \
                            discrete ones";
            return Self::refuse("action", expected, self.ends().spaces().action.to_string());
        }
        self.ends().validate()?;
        features::validate(self.ends())?;
        self.validate_denoiser()?;
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
        Window { lead: self.obs_horizon - 1, anywhere: true, ..Window::of(self.pred_horizon, 1) }
    }

    /// In training, the predicted noise and the noise side by side, [rows, steps, 2 actions]; otherwise a chunk
    /// of actions [rows, steps, actions].
    fn forward(&self, net: &mut Net<'_>) -> Result<Value> {
        let Some(rng) = net.rng else { return self.acting(net, |net| self.expected(net)) };
        let t = net.g.random_below(self.diffusion_steps, [net.rows()], rng)?;
        let shape = [net.rows(), self.pred_horizon, self.actions()];
        let noise = net.g.random_normal(net.dtype, shape, 1.0, rng)?;
        self.denoise(net, noise, t)
    }

    fn head(&self, net: &mut Net<'_>, hidden: Value) -> Result<Value> {
        Ok(net.g.slice(hidden, 2, 0..self.actions())?)
    }

    fn loss(&self, net: &mut Net<'_>, hidden: Value, outputs: Value) -> Result<Loss> {
        let n = self.actions();
        let noise = net.g.slice(hidden, 3, n..2 * n)?;
        let mask = net.feed_all(Field::Imitate)?;
        let action = net.g.mse(outputs, noise, Some(mask))?;
        if !self.compat.raw_weights {
            net.average_all(EMA, AVERAGE)?;
        }
        Ok(Loss { action, auxiliary: None, correct: None })
    }

    fn planner(&self, params: &Store, device: &Device, rows: usize) -> Result<Option<Box<dyn Planner>>> {
        Ok(Some(Box::new(planner::DiffusionPlanner::new(self, params, device, rows))))
    }
}
