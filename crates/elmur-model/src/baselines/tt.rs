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
        if self.window < 3 {
            return refuse("window", "at least 3 transitions, to plan with".to_owned(), self.window);
        }
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
            let expected =
                format!("at most {plans}, the number of different plans of {} steps", plan.horizon);
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

impl Tt {
    /// Checks everything that concerns the network.
    pub(crate) fn validate_network(&self) -> Result<()> {
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
        if self.bins < 2 {
            return refuse("bins", "at least 2".to_owned(), self.bins);
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
        if let Some(image) = self.observation.iter().find(|e| e.is_image()) {
            let expected =
                "vectors or choices, each number of which is a token; images have too many".to_owned();
            return refuse("observation", expected, format!("an image {:?}", image.shape()));
        }
        let numbers = self.observation.iter().fold(self.action.dim(), |sum, e| sum.saturating_add(e.len()));
        if numbers > MOST_NUMBERS {
            let expected = format!("at most {MOST_NUMBERS} numbers in an observation and an action");
            return refuse("observation", expected, numbers);
        }
        self.sizes().map(|_| ())
    }
}

impl Architecture for Tt {
    fn validate(&self) -> Result<()> {
        self.validate_network()?;
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

    /// Plans are for the largest return, whatever was asked for.
    fn aims_at_return(&self) -> bool {
        false
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

#[cfg(test)]
mod tests {
    use elmur_engine::{DType, Pool, Program};

    use super::*;
    use crate::ends::CategoricalEncoding;
    use crate::net::Pass;
    use crate::{Checkpoint, PolicyConfig, init, presets};

    fn small() -> Tt {
        let observation = vec![
            Encoder::Vector { dim: 1, bytes: true },
            Encoder::Categorical { sizes: vec![6, 2], encoding: CategoricalEncoding::Embedding },
        ];
        let base = presets::tt(observation, Action::Continuous { dim: 2, tanh: false });
        let plan = TtPlan { context: 1, beam: 4, expansion: 2, horizon: 3, action_cdf: 0.2 };
        Tt { d_model: 8, heads: 2, layers: 2, window: 4, bins: 4, plan, ..base }
    }

    /// The first row's episode ends its task after two steps, the second's third action is not to be imitated.
    #[test]
    fn steps_become_tokens_and_the_end_becomes_stop_tokens() {
        let config = small();
        let params = init::parameters(&config, 0).unwrap();
        params.set("bins.observation.0", &[0.0f32, 0.1, 0.2, 0.4, 0.8]).unwrap();
        params.set("bins.action", &[0.0f32, 1.0, 2.0, 3.0, 4.0, -4.0, -3.0, -2.0, -1.0, 0.0]).unwrap();
        params.set("bins.reward", &[0.0f32, 1.0, 2.0, 3.0, 4.0]).unwrap();
        params.set("bins.value", &[0.0f32, 10.0, 20.0, 30.0, 40.0]).unwrap();
        let pass = Pass::Windows { count: 1, at: 0, fresh: true };
        let mut net = Net::new(config.ends(), DType::F32, pass, 2, 4);
        let (tokens, weights) = (config.tokens(&mut net).unwrap(), config.weights(&mut net).unwrap());
        net.g.output("tokens", tokens).unwrap();
        net.g.output("weights", weights).unwrap();
        let mut program = Program::new(&net.g, &Pool::new(1), &[&params]).unwrap();
        program.set("observation.0", &[0u8, 255, 30, 30, 52, 60, 110, 1]).unwrap();
        program.set("observation.1", &[0, 1, 2, 0, 3, 1, 4, 0, 5, 1, 0, 0, 1, 1, 2, 0]).unwrap();
        let actions: Vec<f32> = (0..8).flat_map(|i| [0.5 + (i % 4) as f32, -0.5 - (i % 4) as f32]).collect();
        program.set("action", &actions).unwrap();
        program.set("counted_reward", &[0.0f32, 3.5, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0]).unwrap();
        program.set("later_rewards", &[3.5f32, 0.0, 0.0, 0.0, 39.0, 40.0, 12.0, 5.0]).unwrap();
        let exists = [true, true, false, false, true, true, true, true];
        program.set("exists", &exists).unwrap();
        program.set("mask", &[true, true, false, false, true, true, false, true]).unwrap();
        let ends = [false, true, false, false, false, false, false, false];
        program.set("terminated", &ends).unwrap();
        program.run().unwrap();
        let stop = [6; 7];
        let want = [
            [0, 0, 1, 0, 3, 0, 0],
            [3, 2, 0, 1, 2, 3, 0],
            stop,
            stop,
            [2, 5, 1, 0, 3, 1, 3],
            [2, 0, 0, 1, 2, 1, 3],
            [3, 1, 1, 2, 1, 2, 1],
            [0, 2, 0, 3, 0, 2, 0],
        ];
        assert_eq!(program.get::<i32>("tokens").unwrap(), want.concat());
        let all = [1.0, 1.0, 1.0, 5.0, 5.0, 1.0, 1.0];
        let unseen = [1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0];
        let want = [all, all, all, all, all, all, unseen, all].concat();
        assert_eq!(program.get::<f32>("weights").unwrap(), want);
        // An episode that was only cut off: nobody knows what followed.
        program.set("terminated", &[false; 8]).unwrap();
        program.run().unwrap();
        let weights = program.get::<f32>("weights").unwrap();
        assert_eq!(weights[14..28], [0.0; 14]);
        assert_eq!(weights[..14], [all, all].concat());
    }

    #[test]
    fn actions_without_search_are_the_means_of_their_bins() {
        let config = small();
        let params = init::parameters(&config, 0).unwrap();
        params.set("bins.action", &[0.0f32, 1.0, 2.0, 3.0, 4.0, -4.0, -3.0, -2.0, -1.0, 0.0]).unwrap();
        let mut net = Net::new(config.ends(), DType::F32, Pass::Rerun { closing: false }, 1, 4);
        let hidden = net.g.input("hidden", DType::F32, [1, 1, 49]).unwrap();
        let outputs = config.head(&mut net, hidden).unwrap();
        net.g.output("outputs", outputs).unwrap();
        let mut program = Program::new(&net.g, &Pool::new(1), &[&params]).unwrap();
        // Place 2 predicts the first action: bin 3; place 3 the second: bins 0 and 1 alike.
        let mut logits = [0.0f32; 49];
        logits[2 * 7 + 3] = 50.0;
        logits[3 * 7..3 * 7 + 2].fill(50.0);
        program.set("hidden", &logits).unwrap();
        program.run().unwrap();
        let got = program.get::<f32>("outputs").unwrap();
        assert!((got[0] - 3.5).abs() < 1e-6 && (got[1] + 3.0).abs() < 1e-6, "{got:?}");
    }

    #[test]
    fn parameters_are_counted_and_matrices_alone_decay() {
        for policy in
            [small(), presets::tt(small().observation, Action::MultiCategorical { sizes: vec![3, 9] })]
        {
            let counted = policy.sizes().unwrap().parameters();
            assert_eq!(counted, Checkpoint::parameter_count(&PolicyConfig::Tt(policy)).unwrap() as u128);
        }
        let built = crate::window::parameter_graph(&small(), DType::F32).unwrap();
        let decays = built.params.keys().filter(|name| small().group(name).decays);
        assert_eq!(decays.count(), 2 * 4 + 1);
        assert!(!small().group("embedding").decays && !small().group("positions").decays);
    }

    #[test]
    fn impossible_settings_are_refused_by_name() {
        let error = |change: &dyn Fn(&mut Tt)| {
            let mut config = small();
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        small().validate().unwrap();
        let image = Encoder::Image { channels: 1, height: 8, width: 8, bytes: true };
        for (text, expected) in [
            (error(&|c| c.plan.context = 0), "`plan.context`: expected 1 to 2, two less than the window"),
            (error(&|c| c.plan.context = 3), "`plan.context`: expected 1 to 2"),
            (error(&|c| c.plan.horizon = 0), "`plan.horizon`: expected 1 to 65536"),
            (error(&|c| c.plan.beam = 0), "`plan.beam`: expected 1 to 65536"),
            (
                error(&|c| {
                    c.action = Action::Categorical { count: 2 };
                    c.plan.beam = 9;
                }),
                "`plan.beam`: expected at most 8, the number of different plans of 3 steps",
            ),
            (error(&|c| c.plan.expansion = 0), "`plan.expansion`"),
            (error(&|c| c.plan.action_cdf = 1.0), "`plan.action_cdf`: expected 0 or more and below 1"),
            (error(&|c| c.window = 2), "`window`: expected at least 3"),
            (error(&|c| c.window = 1 << 16), "`window`: expected at most"),
            (error(&|c| c.bins = 1), "`bins`: expected at least 2"),
            (error(&|c| c.heads = 3), "`d_model`: expected a multiple of 3 heads"),
            (error(&|c| c.discount = 1.5), "`discount`: expected 0 to 1"),
            (error(&|c| c.terminal_reward = Some(f64::NAN)), "`terminal_reward`"),
            (error(&|c| c.action_weight = -1.0), "`action_weight`: expected 0 or more"),
            (error(&|c| c.observation.push(image.clone())), "`observation`: expected vectors or choices"),
            (
                error(&|c| c.observation[0] = Encoder::Vector { dim: 1 << 24, bytes: false }),
                "`observation`: expected at most 16384 numbers",
            ),
            (error(&|c| (c.plan.beam, c.plan.expansion) = (1 << 16, 1024)), "`plan.beam`: expected at most"),
        ] {
            assert!(text.contains(expected), "{text}");
        }
    }
}
