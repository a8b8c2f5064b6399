//! Partially observable environments, in Gymnasium's words: spaces, `reset`, `step`, terminated, truncated.
//!
//! - [`Env`]: one environment. [`VecEnv`]: many rows of one environment, stepped together or some at a time.
//! - [`Expert`]: plays an environment well and may look at its hidden state. [`Player`]: plays from
//!   observations alone.
//! - [`Wrappers`]: the usual changes of observations and actions: previous action, first-step flag, one-hot,
//!   flat actions.
//! - [`TMaze`], [`CartPole`], [`popgym`]: the environments. [`EnvConfig`] makes them by name.
//!
//! Spaces and the numbers in them are those of [`elmur_base`].

mod cartpole;
mod env;
mod error;
pub mod popgym;
mod registry;
mod tmaze;
mod vec_env;
mod wrappers;

pub use cartpole::{CartPole, CartPoleExpert};
pub use env::{Env, Expert, Player, Playing, Step};
pub use error::{Error, Result};
pub use registry::{EnvConfig, EnvKind};
pub use tmaze::{Corridor, TMaze, TMazeExpert};
pub use vec_env::{AnyVecEnv, Autoreset, VecEnv, VecStep};
pub use wrappers::{Behind, Wrapped, Wrappers, Wrapping};
