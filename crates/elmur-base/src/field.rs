//! What a recorded step consists of, as learners ask for it.

/// One of the things that a step of an episode consists of. A policy says which of them it learns from; a dataset hands
/// them out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Field {
    /// Leaf `i` of the observation (see [`Space::leaves`](crate::Space::leaves)). Beyond the end of an episode its last
    /// observation is repeated.
    Observation(usize),
    /// The action taken, as something to look back on. Where there is none (beyond the end of an episode) a discrete
    /// component is its number of choices, and a continuous one is 0.
    Action,
    /// The action as an answer to learn. A discrete component that is not to be imitated is [`Field::IGNORED`].
    Target,
    /// Whether the step exists and its action is to be imitated.
    Imitate,
    /// The sum of rewards from this step to the end of the episode; 0 beyond it.
    ReturnToGo,
}

impl Field {
    /// The discrete [`Field::Target`] of a step that is not to be imitated.
    pub const IGNORED: i64 = -10;
}
