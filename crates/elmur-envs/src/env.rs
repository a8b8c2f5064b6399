//! One environment, and one who can play it.

use elmur_base::{Spaces, Values, ValuesMut};

use crate::error::Result;

/// What a step brought besides an observation.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Step {
    /// Reward.
    pub reward: f64,
    /// The task has ended.
    pub terminated: bool,
    /// The episode was cut off, by a time limit for example.
    pub truncated: bool,
    /// On the last step of an episode: whether the episode solved the task. `None` on other steps, and always in
    /// environments that have no notion of success besides the return.
    pub success: Option<bool>,
}

impl Step {
    /// Whether the episode is over.
    pub fn done(&self) -> bool {
        self.terminated || self.truncated
    }
}

/// An environment of one episode at a time.
pub trait Env: Send {
    /// What it shows and takes.
    fn spaces(&self) -> &Spaces;

    /// Starts the episode of this seed (the same seed gives the same episode) and writes its first observation.
    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()>;

    /// Acts and writes the next observation. An action outside the space and a step after the end are errors.
    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step>;

    /// Whether the next action has any effect. Where it has none (while the environment shows what must be
    /// remembered, for example) there is nothing to imitate.
    fn uses_action(&self) -> bool {
        true
    }
}

impl<E: Env + ?Sized> Env for Box<E> {
    fn spaces(&self) -> &Spaces {
        (**self).spaces()
    }
    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
        (**self).reset(seed, observation)
    }
    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        (**self).step(action, observation)
    }
    fn uses_action(&self) -> bool {
        (**self).uses_action()
    }
}

/// A player to learn from.
pub trait Expert: Send {
    /// What it plays.
    type Env: Env;

    /// Before the first observation of an episode.
    fn reset(&mut self);

    /// The action for the newest observation, from the observations since `reset` or from the environment's hidden state.
    fn act(&mut self, env: &Self::Env, observation: Values<'_>, action: ValuesMut<'_>);

    /// Says that the environment gets this action instead of the last one it chose. False: it cannot go on from there.
    fn overruled(&mut self, _action: Values<'_>) -> bool {
        false
    }
}

/// An expert that knows only what a policy knows: the observations of the episode and its own actions. Deterministic, so that what
/// it does can be learnt.
pub trait Player: Send {
    /// Before the first observation of an episode.
    fn reset(&mut self);

    /// The action for the newest observation; the environment then gets that very action, unless it is [`Player::overruled`].
    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>);

    /// Says that the environment gets this action instead of the last one it chose. False: it cannot go on from there.
    fn overruled(&mut self, _action: Values<'_>) -> bool {
        false
    }
}

impl<P: Player + ?Sized> Player for Box<P> {
    fn reset(&mut self) {
        (**self).reset();
    }
    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        (**self).act(observation, action);
    }
    fn overruled(&mut self, action: Values<'_>) -> bool {
        (**self).overruled(action)
    }
}

/// A [`Player`] as the [`Expert`] of some environment, whose hidden state it does not look at.
#[derive(Debug, Clone)]
pub struct Playing<E, P>(P, std::marker::PhantomData<fn(E)>);

impl<E, P> Playing<E, P> {
    /// The player.
    pub fn new(player: P) -> Self {
        Self(player, std::marker::PhantomData)
    }
}

impl<E: Env, P: Player> Expert for Playing<E, P> {
    type Env = E;

    fn reset(&mut self) {
        self.0.reset();
    }

    fn act(&mut self, _: &E, observation: Values<'_>, action: ValuesMut<'_>) {
        self.0.act(observation, action);
    }

    fn overruled(&mut self, action: Values<'_>) -> bool {
        self.0.overruled(action)
    }
}
