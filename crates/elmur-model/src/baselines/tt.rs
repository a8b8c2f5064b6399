//! Trajectory Transformer: a language model of whole trajectories, and beam search through what it expects.
//!
//! A transition is D = observation + action + 2 tokens: every number of the observation and of the action,
//! the reward, and the value (the discounted sum of *later* rewards). Continuous numbers are cut into N bins
//! at the quantiles of the training data; a choice is its own number. After the end of an episode every token
//! is the stop token N.
//!
//! ```text
//! x    = E[N place + token] + P[position]          place = position mod D; the stop token has a row of its own
//! x    = x + attn(LN x);   x = x + W_2 gelu(W_1 LN x + b_1) + b_2          4d wide, biases everywhere
//! logits of the next token = H_place LN x          a head per place, [D, N + 1, d], without bias
//! loss = mean over all tokens of w CE(next token)  w = 5 for action tokens, 1 for others, 0 beyond what is known
//! ```
//!
//! Attention is causal, and value tokens are invisible to every query, themselves included: they are there to
//! be predicted. Acting plans anew at every step: see `plan.rs`.

mod network;
mod plan;
mod programs;
mod vocabulary;

use elmur_base::{Describe, Discount, Field};
use elmur_engine::{Device, Store, Value};
use serde::{Deserialize, Serialize};

use super::layers::{check_counts, check_dropout, check_number};
use crate::architecture::{Architecture, Group};
use crate::ends::{Action, Encoder, Ends, TokenFormat, read_encoders};
use crate::error::{Error, Result};
use crate::net::{Loss, Net};
use crate::phase::Window;
use crate::planner::Planner;
use crate::sizes::Sizes;
use crate::statistic::Statistic;
use plan::BeamPlanner;
pub(crate) use vocabulary::Vocabulary;

/// Numbers that an observation and an action may have together: each is a token.
const MOST_NUMBERS: usize = 1 << 14;

/// A Trajectory Transformer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct Tt {
    /// What an observation consists of: a list with one encoder per leaf of the observation space, vectors or
    /// choices. Follows from the environment or the dataset unless given.
    #[serde(deserialize_with = "read_encoders")]
    pub observation: Vec<Encoder>,
    /// The kind of action that the policy chooses, and how many choices or numbers it has. Follows from the
    /// environment or the dataset unless given.
    pub action: Action,
    /// Width of tokens, a multiple of `heads`: 1 to 1048576.
    pub d_model: usize,
    /// Number of attention heads: 1 to 4096.
    pub heads: usize,
    /// Number of layers: 1 to 1024.
    pub layers: usize,
    /// Number of transitions of a training sequence, at least 3.
    pub window: usize,
    /// Number of bins that every continuous number is cut into: 2 to 65536.
    pub bins: usize,
    /// Share of embeddings, attention weights, attention outputs and feed-forward outputs that training sets
    /// to zero: 0 or more and below 1.
    pub dropout: f64,
    /// Discount factor of later rewards, in values and in plans: 0 to 1.
    pub discount: f64,
    /// Reward that replaces that of a step that ended the task (-100 in the TT paper, where ends are falls);
    /// null: rewards as they were paid.
    pub terminal_reward: Option<f64>,
    /// Weight of action tokens in the loss: 0 or more. Observation tokens have weight 1.
    pub action_weight: f64,
    /// Weight of reward tokens in the loss: 0 or more.
    pub reward_weight: f64,
    /// Weight of value tokens in the loss: 0 or more.
    pub value_weight: f64,
    /// How the policy plans when it acts.
    pub plan: TtPlan,
}

/// How a Trajectory Transformer plans: beam search for the sequence of actions with the largest expected
/// return.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct TtPlan {
    /// Number of past transitions that a plan begins from, beside the current observation: 1 to `window` - 2.
    pub context: usize,
    /// Number of candidate sequences that are kept: 1 to 65536, and no more than there are different plans.
    pub beam: usize,
    /// Number of continuations that are tried of every candidate: 1 to 1024.
    pub expansion: usize,
    /// Number of steps that are planned ahead: 1 to 65536.
    pub horizon: usize,
    /// Probability of unlikely actions that are never tried: the least likely tokens whose probabilities add
    /// up to less than this are dropped before one is drawn. 0 or more and below 1; with two choices, 0.5 or
    /// more leaves only the likelier.
    pub action_cdf: f64,
}

impl Tt {
    /// The tokens of a transition, and which numbers each can be.
    pub(crate) fn vocabulary(&self) -> Vocabulary {
        Vocabulary::new(self.ends(), self.bins)
    }

    /// Tokens of a training sequence that the network reads: all but the last.
    pub(crate) fn inputs(&self) -> usize {
        (self.window * self.vocabulary().per_transition()).saturating_sub(1)
    }

    /// How rewards are counted.
    fn rewards(&self) -> Discount {
        Discount::new(self.discount).with_terminal_reward(self.terminal_reward)
    }

    /// The parameters, added up; an error for models that are too large to build.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        let vocabulary = self.vocabulary();
        let (d, layers, each) = (self.d_model, self.layers, vocabulary.per_transition());
        let (stop, outputs) = (vocabulary.stop(), vocabulary.stop().saturating_add(1));
        let all = self.window.saturating_mul(each);
        let mut sizes = Sizes::default();
        sizes.value("window", &[self.heads, all, all])?;
        sizes.value("window", &[all, 4, d])?;
        sizes.value("bins", &[all, outputs])?;
        sizes.param("bins", 1, &[stop.saturating_mul(each).saturating_add(1), d])?;
        sizes.param("bins", 1, &[each, outputs, d])?;
        sizes.param("window", 1, &[all.saturating_sub(1), d])?;
        // Attention 4 d^2, feed-forward 8 d^2; biases 4 d and 5 d, two norms.
        sizes.param("d_model", layers, &[12, d, d])?;
        sizes.param("d_model", layers, &[13, d])?;
        sizes.param("d_model", 2, &[d])?;
        sizes.param("bins", vocabulary.continuous(), &[self.bins.saturating_add(1)])?;
        let plan = &self.plan;
        let candidates = plan.beam.saturating_mul(plan.expansion);
        sizes.value("plan.beam", &[candidates, all, 2, d])?;
        sizes.value("plan.beam", &[candidates, outputs])?;
        sizes.value("plan.horizon", &[candidates, plan.horizon, each])?;
        Ok(sizes)
    }

    fn validate_plan(&self) -> Result<()> {
        let plan = &self.plan;
        check_counts(&[
            ("plan.beam", plan.beam, 1 << 16),
            ("plan.expansion", plan.expansion, 1024),
            ("plan.horizon", plan.horizon, 1 << 16),
        ])?;
        let most = self.window - 2;
        if !(1..=most).contains(&plan.context) {
            let expected = format!("1 to {most}, two less than the window of {} transitions", self.window);
            return refuse("plan.context", expected, plan.context);
        }
        // Each of the actions of a plan is one of so many.
        let choices = self.vocabulary().actions().fold(1u128, |all, n| all.saturating_mul(n as u128));
        let mut plans = 1u128;
        for _ in 0..plan.horizon.min(64) {
            plans = plans.saturating_mul(choices);
        }
        if (plan.beam as u128) > plans && plan.beam > 1 {
            let expected = format!("at most {plans}, the number of different plans of {} steps", plan.horizon);
            return refuse("plan.beam", expected, plan.beam);
        }
        let fits = (0.0..1.0).contains(&plan.action_cdf);
        check_number("plan.action_cdf", plan.action_cdf, fits, "0 or more and below 1")
    }

    /// Tokens of the steps at hand, i32 [rows, steps * D].
    fn tokens(&self, net: &mut Net<'_>) -> Result<Value> {
        let stop = self.vocabulary().stop();
        let mut parts = Vec::new();
        for (leaf, encoder) in self.observation.iter().enumerate() {
            let mut x = net.feed(Field::Observation(leaf))?;
            if let Encoder::Vector { bytes, .. } = encoder {
                if *bytes {
                    let numbers = net.g.cast(x, net.dtype)?;
                    x = net.g.scale(numbers, 1.0 / 255.0)?;
                }
                x = self.binned(net, x, Field::Observation(leaf))?;
            }
            parts.push(x);
        }
        let action = net.feed(Field::Action)?;
        let discrete = self.action.is_discrete();
        parts.push(if discrete { action } else { self.binned(net, action, Field::Action)? });
        for field in [Field::CountedReward(self.rewards()), Field::LaterRewards(self.rewards())] {
            let x = net.feed(field)?;
            let shape = [net.g.shape(x)?, &[1]].concat();
            let x = net.g.reshape(x, shape)?;
            parts.push(self.binned(net, x, field)?);
        }
        let tokens = net.g.concat(&parts, 2)?;
        let shape = net.g.shape(tokens)?.to_vec();
        let exists = net.feed(Field::Exists)?;
        let ended = net.g.full(elmur_engine::DType::I32, shape.clone(), stop as f64)?;
        let tokens = net.g.select(exists, tokens, ended)?;
        Ok(net.g.reshape(tokens, [shape[0], shape[1] * shape[2]])?)
    }

    /// The bins of a field's numbers x [rows, steps, numbers].
    fn binned(&self, net: &mut Net<'_>, x: Value, field: Field) -> Result<Value> {
        let ends = self.bin_ends(net, field)?;
        Ok(net.g.discretize(x, ends)?)
    }

    /// Ends of the bins of a field's numbers, [numbers, bins + 1].
    fn bin_ends(&self, net: &mut Net<'_>, field: Field) -> Result<Value> {
        net.statistic(&bins_name(field), Statistic::Bins { field, bins: self.bins })
    }

    /// Weights of all tokens as targets, [rows, steps * D]: those of their places, for tokens that are known.
    /// What an episode consists of is known, and that it ended if it ended; actions that are not to be
    /// imitated do not count.
    fn weights(&self, net: &mut Net<'_>) -> Result<Value> {
        let vocabulary = self.vocabulary();
        let each = vocabulary.per_transition();
        let mut flags = Vec::new();
        for field in [Field::Exists, Field::Imitate, Field::Terminated] {
            let flag = net.feed(field)?;
            flags.push(net.g.cast(flag, net.dtype)?);
        }
        let shape = net.g.shape(flags[0])?.to_vec();
        let (rows, steps) = (shape[0], shape[1]);
        // A sequence begins within its episode: where that ended in it, all that lies beyond is the end.
        let ended = net.g.sum_to(flags[2], [rows, 1])?;
        let beyond = net.g.affine(flags[0], -1.0, 1.0)?;
        let after = net.g.mul(beyond, ended)?;
        let mut total: Option<Value> = None;
        for (flag, is_action) in [(flags[0], false), (flags[1], true)] {
            let known = net.g.add(flag, after)?;
            let known = net.g.reshape(known, [rows, steps, 1])?;
            let counts = |place: &usize| vocabulary.is_action(*place) == is_action;
            let weight = |place| if counts(&place) { self.weight(&vocabulary, place) } else { 0.0 };
            let weights: Vec<f64> = (0..each).map(weight).collect();
            let weights = net.float_constant(&weights, [1, 1, each])?;
            let part = net.g.mul(known, weights)?;
            total = Some(match total {
                Some(total) => net.g.add(total, part)?,
                None => part,
            });
        }
        let total = total.unwrap_or(flags[0]);
        Ok(net.g.reshape(total, [rows, steps * each])?)
    }

    /// Weight of the token of a place in the loss.
    pub(crate) fn weight(&self, vocabulary: &Vocabulary, place: usize) -> f64 {
        match vocabulary.per_transition() - place {
            1 => self.value_weight,
            2 => self.reward_weight,
            _ if vocabulary.is_action(place) => self.action_weight,
            _ => 1.0,
        }
    }
}

/// Name of the parameter that holds the ends of bins of a field.
fn bins_name(field: Field) -> String {
    match field {
        Field::Observation(leaf) => format!("bins.observation.{leaf}"),
        Field::Action => "bins.action".to_owned(),
        Field::LaterRewards(_) => "bins.value".to_owned(),
        _ => "bins.reward".to_owned(),
    }
}

fn refuse<T>(key: &str, expected: String, got: impl ToString) -> Result<T> {
    Err(Error::Config { key: key.to_owned(), expected, got: got.to_string() })
}

impl Architecture for Tt {
    fn validate(&self) -> Result<()> {
        check_counts(&[
            ("d_model", self.d_model, 1 << 20),
            ("heads", self.heads, 4096),
            ("layers", self.layers, 1024),
            ("window", self.window, 1 << 20),
            ("bins", self.bins, 1 << 16),
        ])?;
        if !self.d_model.is_multiple_of(self.heads) {
            return refuse("d_model", format!("a multiple of {} heads", self.heads), self.d_model);
        }
        for (key, least, count) in [("window", 3, self.window), ("bins", 2, self.bins)] {
            if count < least {
                return refuse(key, format!("at least {least}"), count);
            }
        }
        check_dropout("dropout", self.dropout)?;
        check_number("discount", self.discount, (0.0..=1.0).contains(&self.discount), "0 to 1")?;
        let terminal = self.terminal_reward.unwrap_or(0.0);
        check_number("terminal_reward", terminal, terminal.is_finite(), "a finite number, or null")?;
        for (key, weight) in [
            ("action_weight", self.action_weight),
            ("reward_weight", self.reward_weight),
            ("value_weight", self.value_weight),
        ] {
            check_number(key, weight, weight.is_finite() && weight >= 0.0, "0 or more")?;
        }
        self.ends().validate()?;
        if let Some(image) = self.observation.iter().find(|e| matches!(e, Encoder::Image { .. })) {
            let expected = "vectors or choices, each number of which is a token; images have too many".to_owned();
            return refuse("observation", expected, format!("{image:?}"));
        }
        let numbers = self.observation.iter().fold(self.action.dim(), |sum, e| sum.saturating_add(e.len()));
        if numbers > MOST_NUMBERS {
            let expected = format!("at most {MOST_NUMBERS} numbers in an observation and an action");
            return refuse("observation", expected, numbers);
        }
        self.sizes()?;
        self.validate_plan()
    }

    fn ends(&self) -> Ends<'_> {
        Ends {
            observation: &self.observation,
            action: &self.action,
            // Past rewards are differences of returns-to-go.
            tokens: TokenFormat::ReturnObservationAction,
            width: self.d_model,
        }
    }

    fn config_text(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|_| format!("{self:?}"))
    }

    fn window(&self) -> Window {
        Window { anywhere: true, ..Window::of(self.window, 1) }
    }

    /// Logits of the token after each, [rows, steps, D (N + 1)].
    fn forward(&self, net: &mut Net<'_>) -> Result<Value> {
        let tokens = self.tokens(net)?;
        self.next_logits(net, tokens)
    }

    /// Actions as the model expects them without search: logits of choices, or means over bins.
    fn head(&self, net: &mut Net<'_>, hidden: Value) -> Result<Value> {
        self.action_outputs(net, hidden)
    }

    fn loss(&self, net: &mut Net<'_>, hidden: Value, outputs: Value) -> Result<Loss> {
        let (tokens, weights) = (self.tokens(net)?, self.weights(net)?);
        let all = self.inputs() + 1;
        let weights = net.g.slice(weights, 1, 1..all)?;
        let action = self.next_token_loss(net, hidden, tokens, weights)?;
        Ok(Loss { action, auxiliary: None, correct: net.imitation(outputs)?.correct })
    }

    /// Weight decay is for the matrices of attention, feed-forward networks and heads.
    fn group(&self, parameter: &str) -> Group {
        Group { decays: parameter.ends_with(".weight"), ..Group::default() }
    }

    fn planner(&self, params: &Store, device: &Device, rows: usize) -> Result<Option<Box<dyn Planner>>> {
        Ok(Some(Box::new(BeamPlanner::new(self, params, device, rows)?)))
    }
}
