//! The traits of environments and of players.

use elmur_base::{Spaces, Values, ValuesMut};

use crate::error::Result;

/// Result of one step, besides the observation.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Step {
    /// Reward of the step.
    pub reward: f64,
    /// Whether the task has ended.
    pub terminated: bool,
    /// Whether the episode was cut off, by a time limit for example.
    pub truncated: bool,
    /// On the last step of an episode: whether the episode solved the task. `None` on other steps, and always
    /// in environments that have no notion of success besides the return.
    pub success: Option<bool>,
}

impl Step {
    /// Whether the episode is over.
    pub fn done(&self) -> bool {
        self.terminated || self.truncated
    }
}

/// An environment that plays one episode at a time.
pub trait Env: Send {
    /// The observation and action spaces.
    fn spaces(&self) -> &Spaces;

    /// Starts the episode of this seed and writes its first observation. The same seed gives the same
    /// episode. An environment in another process or on other hardware may fail to start one.
    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()>;

    /// Takes an action and writes the next observation. An action outside of the action space is an error,
    /// and so is a step without a running episode.
    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step>;

    /// Whether the next action has any effect. Where it has none (while the environment shows what must be
    /// remembered, for example) there is nothing to imitate.
    fn uses_action(&self) -> bool {
        true
    }

    /// Sends a reset or a step to where the environment computes, another process for example, and does not
    /// wait for the answer: the same [`Env::reset`] or [`Env::step`] follows, and has the result and the
    /// errors. So rows of such environments compute at the same time. False if nothing was sent, which is all
    /// that environments in this process have to say.
    fn send(&mut self, next: Next<'_>) -> bool {
        let _ = next;
        false
    }
}

/// What an environment is asked to do next: see [`Env::send`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Next<'a> {
    /// A reset with this seed.
    Reset(u64),
    /// A step with this action.
    Step(Values<'a>),
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
    fn send(&mut self, next: Next<'_>) -> bool {
        (**self).send(next)
    }
}

/// A scripted expert, to collect demonstrations from and to ask what it would do. A player knows what a
/// policy knows, the observations of the episode and the actions taken in it, and is deterministic: what it
/// chooses is a function of them alone, so that a policy can learn it.
///
/// Whoever asks a player need not do what it says. A player goes on from any action that was taken, its own
/// or not, and plays from there as well as it can with what has been observed since the start of the
/// episode.
pub trait Player: Send {
    /// Prepares for a new episode; called before its first observation.
    fn reset(&mut self);

    /// Writes the action for the newest observation. It counts as taken, unless [`Player::took`] names
    /// another.
    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>);

    /// Tells the player which action of the action space was taken after its last choice. Must be called
    /// where it was another than the player chose, and changes nothing where it was the same. Players whose
    /// choices do not depend on what was done before have nothing to do here.
    fn took(&mut self, action: Values<'_>);

    /// Marks the choices that are as good as the one written last: by the player's own reckoning, no other
    /// choice promises a better return, and which of them is taken makes no difference to it. `choices` has
    /// an entry for every choice of a discrete action (of several integers: for every combination of them,
    /// the last integer running fastest, as [`Choices`](crate::Choices) counts them), and the entry of the
    /// written action is marked already. Called between [`Player::act`] and what follows it, if at all.
    /// Players without ties mark nothing.
    fn accept(&mut self, _choices: &mut [bool]) {}
}

impl<P: Player + ?Sized> Player for Box<P> {
    fn reset(&mut self) {
        (**self).reset();
    }
    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        (**self).act(observation, action);
    }
    fn took(&mut self, action: Values<'_>) {
        (**self).took(action);
    }
    fn accept(&mut self, choices: &mut [bool]) {
        (**self).accept(choices);
    }
}
