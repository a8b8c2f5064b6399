//! Partially observable environments, in Gymnasium's words: spaces, `reset`, `step`, terminated, truncated.
//!
//! - [`Env`]: one environment. [`VecEnv`]: many rows of one environment, stepped together or some at a time.
//! - [`Player`]: a scripted expert that plays an environment from observations alone, and goes on from the
//!   actions of others. [`Choices`]: which actions it holds to be equally good.
//! - [`Wrappers`]: the usual changes of observations and actions: previous action, first-step flag, one-hot,
//!   flat actions.
//! - [`TMaze`], [`CartPole`], [`popgym`]: the environments. [`Registry`]: environments by name, to which a
//!   [`Family`] of your own can be added. `python:module:Class` and `python:GYMNASIUM-ID` are names too, and so
//!   are `mikasa-TASK`, whose simulator is installed apart (`mikasa`).
//! - [`ROBOT_TASKS`]: what is known of the tasks of MIKASA-Robo without the simulator.
//! - [`Thinning`]: smaller pictures, the same for cameras and for recordings.
//! - `worker`: environments in other processes, such as simulators and Python's.
//!
//! Spaces and the numbers in them are those of [`elmur_base`].

mod cartpole;
mod choices;
mod env;
mod error;
mod family;
#[cfg(unix)]
pub mod mikasa;
pub mod popgym;
#[cfg(unix)]
mod python;
mod registry;
mod robot_tasks;
mod thinning;
mod tmaze;
mod vec_env;
#[cfg(unix)]
pub mod worker;
mod wrappers;

pub use cartpole::{CartPole, CartPolePlayer};
pub use choices::Choices;
pub use env::{Env, Next, Player, Step};
pub use error::{Error, Result};
pub use family::{EnvSpec, Facts, Family, Metric, ObservationName, Played, Purpose, Setting};
pub use registry::{Environment, Registry};
pub use robot_tasks::{ROBOT_TASKS, RobotTask};
pub use thinning::Thinning;
pub use tmaze::{Corridor, TMaze, TMazePlayer};
pub use vec_env::{AnyVecEnv, Autoreset, VecEnv, VecStep};
pub use wrappers::{Encoding, Wrapped, Wrappers, Wrapping};
