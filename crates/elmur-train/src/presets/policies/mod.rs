//! Policies by name: `policy=NAME` gives a run another policy and trains it as that policy is trained.
//!
//! The benchmark decides sizes and settings: those of the paper where it has them ([`tmaze`], [`popgym`],
//! [`cartpole`], [`mikasa`]), ours elsewhere ([`other`]). Published choices that keep a policy from learning
//! what it could are left to `NAME-compat`, which also has the published code's quirks.

mod cartpole;
mod mikasa;
mod other;
mod popgym;
mod row;
mod tmaze;
mod transformer;

use elmur_base::nearest;
use elmur_envs::popgym::Task;
use elmur_envs::{Registry, Wrappers};
use elmur_model::PolicyConfig;
use elmur_model::baselines::{
    Cql, CqlObjective, DMambaCompat, Denoiser, Diffusion, DiffusionCompat, DiffusionSampler,
};
use elmur_model::elmur::config::{Compat, Elmur};
use elmur_model::ends::{Action, Encoder};
use elmur_model::presets as models;

use crate::config::{RunConfig, TrainConfig, below_model};
use crate::error::{Error, Result};
use crate::schedule::Unit;
use row::Row;

/// A kind of policy that a run can be given by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// A transformer with external memory in every layer.
    Elmur,
    /// RATE: memory tokens, a cache and a valve between segments.
    Rate,
    /// Recurrent Memory Transformer.
    Rmt,
    /// Transformer-XL with a cache.
    Trxl,
    /// Decision Transformer.
    Dt,
    /// Decision Mamba.
    DMamba,
    /// Behaviour cloning with a perceptron.
    BcMlp,
    /// Behaviour cloning with a recurrent network.
    BcLstm,
    /// Conservative Q-learning on the current observation.
    Cql,
    /// Conservative Q-learning on a recurrent network.
    CqlLstm,
    /// Conservative Q-learning for continuous actions.
    CqlContinuous,
    /// Diffusion Policy.
    Diffusion,
    /// Trajectory Transformer.
    Tt,
}

/// What is known of a policy by its name.
struct Entry {
    policy: Policy,
    /// The names, the usual one first.
    names: &'static [&'static str],
    summary: &'static str,
    /// What `-compat` brings back; none where nothing differs from the published code.
    published: Option<&'static str>,
}

const ENTRIES: &[Entry] = &[
    Entry {
        policy: Policy::Elmur,
        names: &["elmur"],
        summary: "transformer with external memory in every layer: tokens read it, segments write it",
        published: Some("the paper's model and training, memory without gradient between segments"),
    },
    Entry {
        policy: Policy::Rate,
        names: &["rate"],
        summary: "RATE: transformer over segments with memory tokens, a cache of earlier ones and a valve",
        published: Some("memory without gradient, all memory tokens alike at first, residual added twice"),
    },
    Entry {
        policy: Policy::Rmt,
        names: &["rmt"],
        summary: "Recurrent Memory Transformer: segments hand memory tokens on to the next",
        published: Some("memory without gradient, all memory tokens alike at first, residual added twice"),
    },
    Entry {
        policy: Policy::Trxl,
        names: &["trxl"],
        summary: "Transformer-XL: segments look back on a cache of earlier ones",
        published: Some("the residual added twice, actions one step early when acting"),
    },
    Entry {
        policy: Policy::Dt,
        names: &["dt"],
        summary: "Decision Transformer: returns, observations and actions of the newest steps, no memory",
        published: Some("the residual added twice; POPGym, MIKASA: context of a third of an episode"),
    },
    Entry {
        policy: Policy::DMamba,
        names: &["dmamba"],
        summary: "Decision Mamba: a state-space model over returns, observations and actions, carried along",
        published: Some("flat initialisation, state forgotten after every window"),
    },
    Entry {
        policy: Policy::BcMlp,
        names: &["bc-mlp", "mlp"],
        summary: "behaviour cloning from the current observation, no memory",
        published: None,
    },
    Entry {
        policy: Policy::BcLstm,
        names: &["bc-lstm", "lstm"],
        summary: "behaviour cloning with an LSTM that is carried through the episode",
        published: Some("random initial states"),
    },
    Entry {
        policy: Policy::Cql,
        names: &["cql", "cql-mlp"],
        summary: "conservative Q-learning from the current observation and rewards, for any actions; no memory",
        published: Some("no Bellman term"),
    },
    Entry {
        policy: Policy::CqlLstm,
        names: &["cql-lstm"],
        summary: "conservative Q-learning with an LSTM that is carried through the episode",
        published: Some("no Bellman term, random initial states"),
    },
    Entry {
        policy: Policy::CqlContinuous,
        names: &["cql-continuous"],
        summary: "conservative Q-learning for continuous actions: an actor and two critics, no memory",
        published: None,
    },
    Entry {
        policy: Policy::Diffusion,
        names: &["diffusion", "dp"],
        summary: "Diffusion Policy: denoises chunks of continuous actions, given the newest observations",
        published: Some("a plan at every step by all steps of the diffusion, weights without averaging"),
    },
    Entry {
        policy: Policy::Tt,
        names: &["tt"],
        summary: "Trajectory Transformer: models whole trajectories and plans by beam search; no images",
        published: None,
    },
];

/// The end of names that ask for the published code's choices and quirks.
const COMPAT: &str = "-compat";

/// The name of a policy, as `policy=NAME` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyName {
    /// The kind of policy.
    pub policy: Policy,
    /// Whether the published code's choices and quirks are wanted.
    pub compat: bool,
}

impl PolicyName {
    /// The policy of this name; underscores are taken for dashes. An unknown name is answered with the nearest.
    pub fn find(name: &str) -> Result<Self> {
        let wanted = name.replace('_', "-");
        let (stem, compat) = match wanted.strip_suffix(COMPAT) {
            Some(stem) => (stem, true),
            None => (wanted.as_str(), false),
        };
        let found = ENTRIES.iter().find(|entry| entry.names.contains(&stem));
        let Some(entry) = found.filter(|entry| !compat || entry.published.is_some()) else {
            let known: Vec<&str> = ENTRIES.iter().map(|entry| entry.names[0]).collect();
            let (known, all) = (known.join(", "), Self::spellings());
            let expected = match found {
                Some(entry) => format!("{}, which has no published quirks to keep", entry.names[0]),
                None => {
                    let near = nearest(&wanted, all.iter().map(String::as_str));
                    let hint = near.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default();
                    format!("one of {known}{hint}")
                }
            };
            return Err(Error::config("policy", expected, name));
        };
        Ok(Self { policy: entry.policy, compat })
    }

    /// All policies, each followed by its published form where there is one.
    pub fn all() -> impl Iterator<Item = Self> {
        ENTRIES.iter().flat_map(|entry| {
            let forms = [(false, true), (true, entry.published.is_some())];
            let named = move |(compat, _)| Self { policy: entry.policy, compat };
            forms.into_iter().filter(|(_, exists)| *exists).map(named)
        })
    }

    /// The usual name, such as `bc-lstm` or `dt-compat`.
    pub fn name(self) -> String {
        let stem = self.entry().map_or("", |entry| entry.names[0]);
        format!("{stem}{}", if self.compat { COMPAT } else { "" })
    }

    /// Other names of the same policy.
    pub fn aliases(self) -> Vec<String> {
        let end = if self.compat { COMPAT } else { "" };
        let others = self.entry().map_or(&[][..], |entry| &entry.names[1..]);
        others.iter().map(|name| format!("{name}{end}")).collect()
    }

    /// What the policy is, in a line.
    pub fn summary(self) -> &'static str {
        let text = |entry: &Entry| match (self.compat, entry.published) {
            (true, Some(published)) => published,
            _ => entry.summary,
        };
        self.entry().map_or("", text)
    }

    /// Whether the policy can act on what it saw longer ago than its training crop.
    fn remembers(self) -> bool {
        match self.policy {
            Policy::Elmur | Policy::Rate | Policy::Rmt | Policy::BcLstm | Policy::CqlLstm => true,
            // The published one forgets after every window.
            Policy::DMamba => !self.compat,
            Policy::Trxl | Policy::Dt | Policy::BcMlp => false,
            Policy::Cql | Policy::CqlContinuous | Policy::Diffusion | Policy::Tt => false,
        }
    }

    fn entry(self) -> Option<&'static Entry> {
        ENTRIES.iter().find(|entry| entry.policy == self.policy)
    }

    /// Every name that [`PolicyName::find`] knows.
    fn spellings() -> Vec<String> {
        Self::all().flat_map(|name| [vec![name.name()], name.aliases()].concat()).collect()
    }
}

impl Policy {
    /// Whether the form of the policy depends on what it sees and does: conservative Q-learning has one for
    /// continuous actions, Diffusion Policy one for images.
    fn depends_on_spaces(self) -> bool {
        matches!(self, Policy::Cql | Policy::Diffusion)
    }

    /// Whether the policy's own past actions are among its tokens.
    fn has_action_tokens(self) -> bool {
        match self {
            Policy::Rate | Policy::Rmt | Policy::Trxl | Policy::Dt | Policy::DMamba | Policy::Tt => true,
            Policy::Elmur | Policy::BcMlp | Policy::BcLstm => false,
            Policy::Cql | Policy::CqlLstm | Policy::CqlContinuous | Policy::Diffusion => false,
        }
    }
}

/// The benchmark of a run, which decides hyper-parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Benchmark {
    TMaze,
    CartPole,
    Popgym(Task),
    Mikasa(mikasa::Family),
    Other,
}

impl Benchmark {
    /// The benchmark of a run: by the environment's name, MIKASA-Robo also by what policies see and do there,
    /// since recordings do not always name their environment.
    fn of(run: &RunConfig) -> Self {
        let name = run.env.as_ref().map_or("", |env| env.name.as_str());
        match (name, Task::find(name), mikasa::Family::of(run)) {
            ("tmaze", _, _) => Benchmark::TMaze,
            ("cartpole", _, _) => Benchmark::CartPole,
            (_, Some(task), _) => Benchmark::Popgym(task),
            (name, None, Some(family)) if name.is_empty() || name.starts_with("mikasa-") => {
                Benchmark::Mikasa(family)
            }
            _ => Benchmark::Other,
        }
    }
}

/// What a policy is wanted for.
#[derive(Clone)]
struct Wanted<'a> {
    name: PolicyName,
    /// The run that gets the policy.
    base: &'a RunConfig,
    observation: Vec<Encoder>,
    action: Action,
    /// Steps of a training crop.
    crop: usize,
}

/// The return that published policies are asked for in POPGym, the best there is.
const POPGYM_TARGET: f64 = 1.0;

/// A policy and how it is trained.
type Chosen = (PolicyConfig, TrainConfig);

impl RunConfig {
    /// The run with another policy: `model` and `train` are those of the policy for the run's benchmark. What
    /// is no matter of the policy stays: seed, device, threads, checkpoints, environment, data, validation. A
    /// run is not made longer, unless by the published number of epochs of a `-compat` policy.
    ///
    /// Beside these, POPGym's environments stop showing the previous action to policies that have it as a
    /// token (a `-compat` policy draws actions there, asks for a return of 1 and has no flag at the start of
    /// an episode, as published), and T-Maze policies that cannot act on what lies far back are validated on
    /// the length they train on.
    pub fn with_policy(&self, name: &str, registry: &Registry) -> Result<Self> {
        let mut name = PolicyName::find(name)?;
        let mut run = self.clone();
        let benchmark = Benchmark::of(&run);
        if let (Benchmark::Popgym(task), Some(env)) = (benchmark, &mut run.env) {
            // Published policies are not told where an episode starts.
            let seen = |tokens, told| {
                let wrappers = super::popgym::env_of(task, tokens).wrappers;
                Wrappers { first_step: wrappers.first_step && told, ..wrappers }
            };
            if [(true, true), (false, true), (false, false)].iter().any(|(a, b)| seen(*a, *b) == env.wrappers)
            {
                env.wrappers = seen(name.policy.has_action_tokens(), !name.compat);
            }
        }
        let mut fitted = run.model.clone();
        match (run.environment(registry)?, &run.data.file) {
            (Some(environment), _) => fitted.fit_to(environment.spaces()).map_err(below_model)?,
            // What is wrong with a file is said when its episodes are read.
            (None, Some(file)) if name.policy.depends_on_spaces() => {
                if let Ok(spaces) = elmur_data::spaces_of(file) {
                    fitted.fit_to(&spaces).map_err(below_model)?;
                }
            }
            _ => {}
        }
        let ends = fitted.architecture().ends();
        let mut action = ends.action.clone();
        if name.policy == Policy::Cql && !name.compat && !action.is_discrete() {
            name.policy = Policy::CqlContinuous;
        }
        let continuous = matches!(name.policy, Policy::Diffusion | Policy::CqlContinuous);
        if continuous && run.env.is_none() && action.is_discrete() {
            // Data that are read later decide; discrete actions are refused then.
            action = Action::Continuous { dim: 1, tanh: false };
        }
        let wanted =
            Wanted { name, base: self, observation: ends.observation.to_vec(), action, crop: self.crop() };
        (run.model, run.train) = match benchmark {
            Benchmark::TMaze => tmaze::policy(&wanted)?,
            Benchmark::CartPole => cartpole::policy(&wanted)?,
            Benchmark::Popgym(task) => popgym::policy(task, wanted)?,
            Benchmark::Mikasa(family) => mikasa::policy(family, &wanted)?,
            Benchmark::Other => other::policy(&wanted)?,
        };
        if benchmark == Benchmark::TMaze && !name.remembers() {
            run.eval.settings.remove("length");
        }
        if let (Benchmark::Popgym(task), true) = (benchmark, name.compat) {
            run.eval.sample = super::popgym::published_sampling(task, run.model.architecture().ends().action);
            if run.model.architecture().aims_at_return() {
                run.eval.target_return.get_or_insert(POPGYM_TARGET);
            }
        }
        Ok(run)
    }
}

/// A gradient norm that is never reached, for policies that are trained without clipping.
const UNCLIPPED: f64 = 1e9;

/// Models that are the same on every benchmark.
impl Wanted<'_> {
    fn ends(&self) -> (Vec<Encoder>, Action, usize) {
        (self.observation.clone(), self.action.clone(), self.crop)
    }

    /// BC-MLP with the published sizes.
    fn bc_mlp(&self, dropout: f64) -> PolicyConfig {
        let (observation, action, steps) = self.ends();
        let mut model = models::bc_mlp(observation, action, steps);
        model.dropout = dropout;
        PolicyConfig::BcMlp(model)
    }

    /// BC-LSTM with the published sizes.
    fn bc_lstm(&self) -> PolicyConfig {
        let (observation, action, steps) = self.ends();
        let mut model = models::bc_lstm(observation, action, steps);
        model.compat.random_hidden = self.name.compat;
        PolicyConfig::BcLstm(model)
    }

    /// Decision Mamba with the sizes of the published T-Maze command, the only ones there are for our
    /// environments.
    fn dmamba(&self, action_tanh: bool) -> PolicyConfig {
        let (observation, action, steps) = self.ends();
        let mut model = models::dmamba(observation, action, steps);
        let published = self.name.compat;
        model.action_tanh = action_tanh;
        model.compat = DMambaCompat { flat_mamba_init: published, mamba_window: published };
        PolicyConfig::DMamba(model)
    }

    /// CQL with the published sizes; the weight of the penalty and dropout are published choices.
    fn cql(&self, alpha: f64, dropout: f64) -> PolicyConfig {
        let (observation, action, steps) = self.ends();
        let mut model = match self.name.policy {
            Policy::CqlLstm => models::cql_lstm(observation, action, steps),
            _ => models::cql(observation, action, steps),
        };
        if self.name.compat {
            model = Cql { objective: CqlObjective::Published, alpha, dropout, ..model };
            model.compat.random_hidden = model.lstm.is_some();
        }
        PolicyConfig::Cql(model)
    }

    /// CQL for continuous actions with the sizes of its own paper, trained like behaviour cloning by this row.
    /// The actor imitates for a third of a short run, where that paper's has 40,000 steps of a million.
    fn cql_continuous(&self, row: Row) -> Chosen {
        let (observation, action, steps) = self.ends();
        let mut model = models::cql_continuous(observation, action, steps);
        model.imitation_steps = 1000;
        // Adam as it is: without decay, and a large norm stands for no clipping.
        let row = Row { lr: 3e-4, weight_decay: 0.0, clip: UNCLIPPED, ..row };
        (PolicyConfig::CqlContinuous(model), self.train(row, 1))
    }

    /// Diffusion Policy with the published U-Net and training where observations are images, or where the
    /// published form is wanted; as long as the run takes otherwise.
    ///
    /// Elsewhere ours: a perceptron, chunks of 8 actions of which two are played, batches of 8,192 actions like
    /// those of our other policies, and the learning rate that 3,000 batches take: with 3e-4 they do not teach
    /// a pendulum's swing, and eight steps without a look are too many to hold it upright.
    fn diffusion(&self) -> Chosen {
        let (observation, action, _) = self.ends();
        let images = observation.iter().any(Encoder::is_image);
        let published = self.name.compat;
        let mut row = Row {
            batch: 128,
            lr: 1e-4,
            weight_decay: 1e-6,
            clip: UNCLIPPED,
            warmup: if published { 500 } else { 100 },
            end: 0.0,
            cosine: true,
            epochs: None,
        };
        let mut model = match published || images {
            true => models::diffusion(observation, action),
            false => {
                (row.batch, row.lr) = (1024, 1e-3);
                Diffusion { pred_horizon: 8, act_horizon: 2, ..models::diffusion_mlp(observation, action) }
            }
        };
        if images {
            // Of the published command; the code's own default is half as wide.
            model.denoiser = Denoiser::Unet { widths: vec![128, 256, 512], kernel: 5, groups: 8 };
            model.step_embed = 128;
        }
        if published {
            model.sampler = DiffusionSampler::Ddpm;
            model.compat = DiffusionCompat { replan_every_step: true, raw_weights: true };
        }
        let mut train = TrainConfig { betas: (0.95, 0.999), ..self.train(row, 1) };
        (train.schedule.unit, train.schedule.total) = (Unit::Steps, None);
        train.schedule.from_zero = true;
        if published {
            (train.epochs, train.batches) = (None, Some(10_000));
        }
        (PolicyConfig::Diffusion(model), train)
    }

    /// Trajectory Transformer with the sizes and the training of its own paper, which has none of our
    /// benchmarks. Ours: shorter plans and fewer of them, and unlikely actions are tried too where there are few
    /// to choose from.
    fn tt(&self) -> Chosen {
        let (observation, action, _) = self.ends();
        let mut model = models::tt(observation, action);
        (model.plan.beam, model.plan.horizon) = (32, 5);
        if model.action.is_discrete() {
            let choices = model.action.sizes().iter().fold(1usize, |all, n| all.saturating_mul(*n));
            model.plan.beam = model.plan.beam.min(choices.saturating_pow(5));
            model.plan.action_cdf = 0.2;
        }
        let row = Row {
            batch: 64,
            lr: 6e-4,
            weight_decay: 0.1,
            clip: 1.0,
            warmup: 100,
            end: 0.1,
            cosine: true,
            epochs: Some(50),
        };
        let train = TrainConfig {
            betas: (0.9, 0.95),
            standardize: false,
            standardize_integers: false,
            ..self.train(row, 1)
        };
        (PolicyConfig::Tt(model), train)
    }

    /// ELMUR: the run's own if it has one and no published form is wanted, else this model for the run's
    /// ends, trained like this.
    fn elmur(&self, model: Elmur, train: TrainConfig) -> Chosen {
        match (&self.base.model, self.name.compat) {
            (PolicyConfig::Elmur(own), false) => (own.clone().into(), self.base.train.clone()),
            (_, compat) => {
                let (observation, action, _) = self.ends();
                let mut model = Elmur { observation, action, ..model };
                if compat {
                    model.compat =
                        Compat { empty_slot_blend: true, newest_first_times: true, absolute_offset: true };
                }
                (model.into(), self.train_as(train))
            }
        }
    }
}

#[cfg(test)]
mod tests;
