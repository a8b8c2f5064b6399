//! Fields: the things that a recorded step consists of, as learners ask for them.

use std::fmt;

/// One of the things that a step of an episode consists of. A policy says which of them it learns from; a
/// dataset hands them out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Field {
    /// Leaf `i` of the observation (see [`Space::leaves`](crate::Space::leaves)). Beyond the end of an
    /// episode its last observation is repeated.
    Observation(usize),
    /// The action that was taken, as an input of a policy that sees its past actions. Beyond the end of an
    /// episode a discrete component is its number of choices, and a continuous one is 0.
    Action,
    /// The action as what a policy should output. A discrete component that is not to be imitated, or lies
    /// beyond the end of an episode, is [`Field::IGNORED`]; a continuous one beyond the end is 0.
    Target,
    /// The choices that are as good as [`Field::Target`], where the action is one choice of a list (of several integers:
    /// of all combinations, the last integer running fastest): the target itself, and those that were recorded
    /// beside it. None where the step is not to be imitated.
    Accepted,
    /// Whether the step exists and its action is to be imitated.
    Imitate,
    /// Whether the step exists: false beyond the end of an episode.
    Exists,
    /// The sum of rewards from this step to the end of the episode; 0 beyond it.
    ReturnToGo,
    /// The reward of the step; 0 beyond the end of an episode.
    Reward,
    /// The reward of the step as [`Field::LaterRewards`] counts it: that of a step that ended the task may be
    /// replaced ([`Discount::with_terminal_reward`]).
    CountedReward(Discount),
    /// The discounted sum of the rewards after this step, r(t+1) + γ r(t+2) + ..., to the end of the episode;
    /// 0 beyond it.
    LaterRewards(Discount),
    /// Leaf `i` of the observation that followed the step. Where none was recorded, and beyond the end of an
    /// episode, the last observation is repeated.
    NextObservation(usize),
    /// Whether the step exists and what followed it is known: the next observation was recorded, or the step
    /// ended the task.
    KnownNext,
    /// Whether the step ended the task, so that nothing follows; false where an episode was only cut off.
    Terminated,
    /// The weight of the step's action in a loss; 0 where it is not to be imitated, and beyond the end of an episode.
    Weight(StepWeights),
}

/// How much the actions of an episode count: 1 each up to the first step whose reward reaches a bound, and another
/// weight for those after it; more where an action differs from the one before. All are kept by their bits so that
/// fields can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepWeights {
    success: u32,
    after: u32,
    changes: u32,
}

impl StepWeights {
    /// The weight `after` behind the first reward of at least `success`.
    pub fn new(success: f32, after: f32) -> Self {
        Self { success: success.to_bits(), after: after.to_bits(), changes: 0 }
    }

    /// The same, with weights multiplied by 1 + `changes` times the change of the action from the step before: the root
    /// of the mean square over its components, where a choice changes by 0 or 1. An episode's first step has none.
    pub fn with_changes(self, changes: f32) -> Self {
        Self { changes: changes.to_bits(), ..self }
    }

    /// How much a change of the action counts.
    pub fn changes(self) -> f32 {
        f32::from_bits(self.changes)
    }

    /// The reward that tells success.
    pub fn success(self) -> f32 {
        f32::from_bits(self.success)
    }

    /// The weight of steps after the first success.
    pub fn after(self) -> f32 {
        f32::from_bits(self.after)
    }
}

/// How rewards are counted: the discount factor γ of later ones, and what a step that ended the task is said
/// to have paid. Both are kept by their bits so that fields can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Discount {
    gamma: u64,
    terminal: Option<u64>,
}

impl Discount {
    /// The discount factor `gamma`, with rewards as they were paid.
    pub fn new(gamma: f64) -> Self {
        Self { gamma: gamma.to_bits(), terminal: None }
    }

    /// The same discount factor, with the reward of every step that ended the task replaced by `reward`, if
    /// there is one.
    pub fn with_terminal_reward(self, reward: Option<f64>) -> Self {
        Self { terminal: reward.map(f64::to_bits), ..self }
    }

    /// The factor as a number.
    pub fn gamma(self) -> f64 {
        f64::from_bits(self.gamma)
    }

    /// The reward that replaces that of a step that ended the task.
    pub fn terminal_reward(self) -> Option<f64> {
        self.terminal.map(f64::from_bits)
    }
}

impl Field {
    /// The discrete [`Field::Target`] of a step that is not to be imitated.
    pub const IGNORED: i64 = -10;
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Field::Observation(leaf) => write!(f, "observation leaf {leaf}"),
            Field::Action => write!(f, "action"),
            Field::Target => write!(f, "target"),
            Field::Accepted => write!(f, "accepted"),
            Field::Imitate => write!(f, "imitate"),
            Field::Exists => write!(f, "whether the step exists"),
            Field::ReturnToGo => write!(f, "return to go"),
            Field::Reward => write!(f, "reward"),
            Field::CountedReward(_) => write!(f, "counted reward"),
            Field::LaterRewards(discount) => write!(f, "later rewards, discounted by {}", discount.gamma()),
            Field::NextObservation(leaf) => write!(f, "next observation leaf {leaf}"),
            Field::KnownNext => write!(f, "whether what followed is known"),
            Field::Terminated => write!(f, "whether the task ended"),
            Field::Weight(_) => write!(f, "weight"),
        }
    }
}

/// A slice to write the numbers of a [`Field`] to, in the element type that the learner computes with.
#[derive(Debug, PartialEq)]
pub enum FieldMut<'a> {
    /// 32-bit floats.
    F32(&'a mut [f32]),
    /// 32-bit integers.
    I32(&'a mut [i32]),
    /// 64-bit integers.
    I64(&'a mut [i64]),
    /// Bytes.
    U8(&'a mut [u8]),
    /// Flags.
    Bool(&'a mut [bool]),
}

impl FieldMut<'_> {
    /// Length of the slice.
    pub fn len(&self) -> usize {
        match self {
            FieldMut::F32(out) => out.len(),
            FieldMut::I32(out) => out.len(),
            FieldMut::I64(out) => out.len(),
            FieldMut::U8(out) => out.len(),
            FieldMut::Bool(out) => out.len(),
        }
    }

    /// Whether the slice is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The name of the element type: f32, i32, i64, u8 or bool.
    pub fn type_name(&self) -> &'static str {
        match self {
            FieldMut::F32(_) => "f32",
            FieldMut::I32(_) => "i32",
            FieldMut::I64(_) => "i64",
            FieldMut::U8(_) => "u8",
            FieldMut::Bool(_) => "bool",
        }
    }
}
