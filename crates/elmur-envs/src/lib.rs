//! Environments that hide something, in Gymnasium's words: spaces, `reset`, `step`, terminated, truncated.
//!
//! - [`Env`]: one environment. [`VecEnv`]: many stepped as one, each row with its own seed and episode ends.
//! - [`Expert`]: plays an environment well, from what it has seen or from what it may peek at. [`Player`]: from observations
//!   alone.
//! - [`Wrappers`]: the usual changes of what is seen and done: previous action, first-step flag, one-hot, flat actions.
//! - [`TMaze`], [`CartPole`], [`popgym`]: the environments; [`EnvConfig`] makes them by name.

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
