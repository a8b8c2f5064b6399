//! POPGym's 48 partially observable tasks: sixteen families in three difficulties, with the semantics of version 1.0.7.
//!
//! - [`Task`] names one of them; ids are those of the Python package (`popgym-AutoencodeEasy-v0`).
//! - Every family is an [`Env`](crate::Env) that also implements [`Replay`]: an episode can be begun from its hidden state and
//!   stepped with given random numbers, so that traces of the Python package replay exactly ([`trace`]).
//! - Every family has a [`Player`](crate::Player) that plays it well from observations alone.

mod cartpole;
mod deck;
mod noise;
mod pendulum;
mod repeat;
mod replay;
mod task;
pub mod trace;

pub use cartpole::{
    NoisyPositionOnlyCartPole, NoisyPositionOnlyCartPolePlayer, PositionOnlyCartPole,
    PositionOnlyCartPolePlayer, VelocityOnlyCartpole, VelocityOnlyCartpolePlayer,
};
pub use pendulum::{
    NoisyPositionOnlyPendulum, NoisyPositionOnlyPendulumPlayer, PositionOnlyPendulum,
    PositionOnlyPendulumPlayer,
};
pub use repeat::{RepeatFirst, RepeatFirstPlayer, RepeatPrevious, RepeatPreviousPlayer};
pub use replay::Replay;
pub use task::{Difficulty, Family, Task, Version};
