//! Conservative Q-learning for discrete actions, offline.
//!
//! ```text
//! Q_i(o, .) = head_i(mlp_i(trunk(o))),  i = 1, 2;   trunk = encoder, or an LSTM over encoded observations
//!
//! td:         a* = argmax_a Q_1(o', a);   y = r + gamma (1 - done) min_i Q'_i(o', a*)
//!             loss = sum_i { mean 1/2 (Q_i(o, a) - y)^2 + alpha mean [ logsumexp_b Q_i(o, b) - Q_i(o, a) ] }
//!             theta' <- (1 - tau) theta' + tau theta after every optimizer step;  acts on min_i Q_i
//! published:  loss = CE(Q_1) + alpha [ CE(Q_1) + CE(Q_2) ];  acts on Q_1
//! ```
//!
//! The published form has no Bellman term: for discrete actions the penalty is a cross-entropy, so that it
//! clones behaviour twice. `td` is the method. The squared error counts steps whose successor is known or
//! that ended the task; the penalty counts steps that are to be imitated.

use elmur_base::{Describe, Field};
use elmur_engine::{CrossEntropy, Value};
use serde::{Deserialize, Serialize};

use super::layers::{
    Lstm, LstmCompat, check_counts, check_dropout, check_number, check_widths, mlp, mlp_sizes,
};
use crate::architecture::Architecture;
use crate::ends::{Action, Encoder, Ends, TokenFormat, read_encoders};
use crate::error::{Error, Result};
use crate::initial::Init;
use crate::net::{Average, Loss, Net};
use crate::phase::{Phase, Window};
use crate::sizes::Sizes;

/// What conservative Q-learning minimises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum CqlObjective {
    /// A Bellman error against a target network, and the conservative penalty.
    #[default]
    Td,
    /// The published form: cross-entropies of both networks, without rewards.
    Published,
}

/// Conservative Q-learning with two networks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(deny_unknown_fields)]
pub struct Cql {
    /// How observations become vectors: a list with one encoder per leaf of the observation space. Follows
    /// from the environment or the dataset unless given.
    #[serde(deserialize_with = "read_encoders")]
    pub observation: Vec<Encoder>,
    /// The kind of action that the policy chooses, one of a number of choices. Follows from the environment or
    /// the dataset unless given.
    pub action: Action,
    /// Width of encoded observations: 1 to 1048576.
    pub d_model: usize,
    /// Width of an LSTM over encoded observations, 1 to 8192, which both networks read; null: they read the
    /// current observation alone.
    pub lstm: Option<usize>,
    /// Number of LSTM layers, where there is an LSTM: 1 to 64.
    #[serde(default = "one")]
    pub lstm_layers: usize,
    /// Widths of the hidden layers of each of the two networks.
    pub hidden: Vec<usize>,
    /// Environment steps of a training crop.
    pub window: usize,
    /// Share of hidden units that training sets to zero: 0 or more and below 1.
    pub dropout: f64,
    /// What training minimises: `td` or `published`.
    #[serde(default)]
    pub objective: CqlObjective,
    /// Weight of the conservative penalty: 0 or more.
    pub alpha: f64,
    /// Discount factor of rewards, 0 to 1 (`td`).
    pub gamma: f64,
    /// Share of the way that target networks move towards the trained ones with every optimizer step: above 0
    /// and at most 1 (`td`).
    pub tau: f64,
    /// Behaviours of the published Python code that differ from the method, to reproduce its results.
    #[serde(default, skip_serializing_if = "LstmCompat::is_default")]
    pub compat: LstmCompat,
}

fn one() -> usize {
    1
}

impl Cql {
    fn choices(&self) -> usize {
        self.action.outputs()
    }

    fn recurrent(&self) -> Option<Lstm> {
        let (layers, dropout, compat) = (self.lstm_layers, self.dropout, self.compat);
        self.lstm.map(|width| Lstm { width, layers, dropout, compat })
    }

    /// The parameters, added up; an error for models that are too large to build.
    pub(crate) fn sizes(&self) -> Result<Sizes> {
        let mut sizes = Sizes::default();
        let copies = if self.objective == CqlObjective::Td { 2 } else { 1 };
        for _ in 0..copies {
            for network in 0..2 {
                let trunk = self.lstm.unwrap_or(self.d_model);
                let last = self.hidden.last().copied().unwrap_or(trunk);
                if network == 0 {
                    self.ends().add_sizes(&mut sizes, last, self.window)?;
                    if let Some(lstm) = self.recurrent() {
                        lstm.add_sizes(&mut sizes, "lstm", self.d_model, self.window)?;
                    }
                } else {
                    sizes.param("action", 1, &[self.choices(), last])?;
                }
                mlp_sizes(&mut sizes, "hidden", trunk, &self.hidden)?;
            }
        }
        sizes.value("window", &[self.window, self.d_model])?;
        for width in &self.hidden {
            sizes.value("window", &[self.window, *width])?;
        }
        Ok(sizes)
    }

    /// Q_1 and Q_2 side by side, [rows, steps, 2 choices], of trunk states [rows, steps, width].
    fn values(&self, net: &mut Net<'_>, trunk: Value) -> Result<Value> {
        let mut both = Vec::new();
        for name in ["q1", "q2"] {
            let x = mlp(net, &format!("{name}.mlp"), trunk, &self.hidden, self.dropout)?;
            let inputs = net.g.shape(x)?.last().copied().unwrap_or(1);
            both.push(net.linear(x, &format!("{name}.head"), self.choices(), Init::fan_in(inputs))?);
        }
        Ok(net.g.concat(&both, 2)?)
    }

    /// Q_1 and Q_2 of the observations that followed, [rows, steps, 2 choices]. An LSTM reads the window from
    /// its first observation on.
    fn next_values(&self, net: &mut Net<'_>) -> Result<Value> {
        let next = net.encode_next_observation()?;
        let Some(lstm) = self.recurrent() else { return self.values(net, next) };
        let first = net.encode_observation()?;
        let first = net.g.slice(first, 1, 0..1)?;
        let all = net.g.concat(&[first, next], 1)?;
        let states = lstm.fresh(net, all)?;
        let next = net.g.slice(states, 1, 1..self.window + 1)?;
        self.values(net, next)
    }

    /// Network `i`'s part of values of both, on the last axis.
    fn network(&self, net: &mut Net<'_>, both: Value, i: usize) -> Result<Value> {
        let (axis, n) = (net.g.shape(both)?.len() - 1, self.choices());
        Ok(net.g.slice(both, axis, i * n..(i + 1) * n)?)
    }

    fn least(&self, net: &mut Net<'_>, both: Value) -> Result<Value> {
        let (q1, q2) = (self.network(net, both, 0)?, self.network(net, both, 1)?);
        Ok(net.g.minimum(q1, q2)?)
    }

    /// The element of `values` [n, choices] that each of `index` i32 [n] names, [n]; 0 where it names none.
    fn pick(&self, net: &mut Net<'_>, values: Value, index: Value) -> Result<Value> {
        let n = self.choices();
        let unit = |i: usize| f64::from(u8::from(i / n == i % n));
        let table: Vec<f64> = (0..n * n).map(unit).chain(std::iter::repeat_n(0.0, n)).collect();
        let table = net.float_constant(&table, [n + 1, n])?;
        let chosen = net.g.gather_rows(table, index)?;
        let product = net.g.mul(values, chosen)?;
        let rows = net.g.shape(product)?[0];
        let sum = net.g.sum_to(product, [rows, 1])?;
        Ok(net.g.reshape(sum, [rows])?)
    }

    /// y = r + gamma (1 - done) min_i Q'_i(o', a*), [n], without gradient.
    fn target(&self, net: &mut Net<'_>) -> Result<Value> {
        let n = self.choices();
        let online = net.frozen(|net| self.next_values(net))?;
        let average = Average::Constant(self.tau);
        let slow = net.averaged("target", average, |net| self.next_values(net))?;
        let steps = net.g.ty(online)?.len() / (2 * n);
        let best = self.network(net, online, 0)?;
        let best = net.g.reshape(best, [steps, n])?;
        let best = net.g.argmax(best)?;
        let least = self.least(net, slow)?;
        let least = net.g.reshape(least, [steps, n])?;
        let after = self.pick(net, least, best)?;
        let (reward, ended) = (net.feed_all(Field::Reward)?, net.feed_all(Field::Terminated)?);
        let reward = net.g.reshape(reward, [steps])?;
        let ended = net.g.reshape(ended, [steps])?;
        let goes_on = net.g.cast(ended, net.dtype)?;
        let goes_on = net.g.affine(goes_on, -self.gamma, self.gamma)?;
        let after = net.g.mul(after, goes_on)?;
        let y = net.g.add(reward, after)?;
        Ok(net.g.stop_gradient(y)?)
    }
}

impl Architecture for Cql {
    fn validate(&self) -> Result<()> {
        check_counts(&[
            ("d_model", self.d_model, 1 << 20),
            ("lstm", self.lstm.unwrap_or(1), 8192),
            ("lstm_layers", self.lstm_layers, 64),
            ("window", self.window, (1 << 20) - 1),
        ])?;
        check_widths("hidden", &self.hidden)?;
        check_dropout("dropout", self.dropout)?;
        check_number("alpha", self.alpha, self.alpha.is_finite() && self.alpha >= 0.0, "0 or more")?;
        check_number("gamma", self.gamma, (0.0..=1.0).contains(&self.gamma), "0 to 1")?;
        check_number("tau", self.tau, self.tau > 0.0 && self.tau <= 1.0, "above 0 and at most 1")?;
        if !matches!(self.action, Action::Categorical { .. }) {
            let expected = "one choice, as Q-values are of whole actions; env.wrappers.flat_action=true makes \
                            one of several, and cql_continuous is for continuous actions";
            let got = self.ends().spaces().action.to_string();
            return Err(Error::Config { key: "action".to_owned(), expected: expected.to_owned(), got });
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

    /// Values of both networks side by side.
    fn forward(&self, net: &mut Net<'_>) -> Result<Value> {
        let mut x = net.encode_observation()?;
        if let Some(lstm) = self.recurrent() {
            x = lstm.carried(net, x)?;
        }
        self.values(net, x)
    }

    fn head(&self, net: &mut Net<'_>, hidden: Value) -> Result<Value> {
        match self.objective {
            CqlObjective::Td => self.least(net, hidden),
            CqlObjective::Published => self.network(net, hidden, 0),
        }
    }

    fn loss(&self, net: &mut Net<'_>, hidden: Value, outputs: Value) -> Result<Loss> {
        let n = self.choices();
        let steps = net.g.ty(outputs)?.len() / n;
        let settings = CrossEntropy { label_smoothing: 0.0, ignored: Field::IGNORED };
        let targets = net.feed_all(Field::Target)?;
        let targets = net.g.reshape(targets, [steps])?;
        let (mut values, mut penalty) = (Vec::new(), Vec::new());
        for i in 0..2 {
            let q = self.network(net, hidden, i)?;
            let q = net.g.reshape(q, [steps, n])?;
            penalty.push(net.g.cross_entropy(q, targets, settings)?);
            values.push(q);
        }
        let sum = net.g.add(penalty[0], penalty[1])?;
        let auxiliary = Some(net.g.scale(sum, self.alpha)?);
        let outputs = net.g.reshape(outputs, [steps, n])?;
        let correct = Some(net.g.count_correct(outputs, targets)?);
        if self.objective == CqlObjective::Published {
            return Ok(Loss { action: penalty[0], auxiliary, correct });
        }
        let y = self.target(net)?;
        let taken = net.feed_all(Field::Action)?;
        let taken = net.g.reshape(taken, [steps])?;
        let known = net.feed_all(Field::KnownNext)?;
        let known = net.g.reshape(known, [steps])?;
        let mut errors = Vec::new();
        for q in values {
            let chosen = self.pick(net, q, taken)?;
            errors.push(net.g.mse(chosen, y, Some(known))?);
        }
        let sum = net.g.add(errors[0], errors[1])?;
        let action = net.g.scale(sum, 0.5)?;
        Ok(Loss { action, auxiliary, correct })
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
