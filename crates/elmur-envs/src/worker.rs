//! Environments in other processes: simulators and environments in other languages behind one protocol.
//!
//! A worker is a program that plays one environment and speaks frames on its standard input and output
//! (docs/worker-protocol.md): a hello, then one answer per request (`make`, `reset`, `step`, `oracle`,
//! `quit`). Errors are answers. Frames are bounded, every answer has a time by which it must come, and pixels
//! are read from the socket to where the observation lies.
//!
//! - [`Task`]: what to start and what to ask it for. [`Workers`]: its workers, kept between episodes.
//! - [`WorkerEnv`]: one row, with a worker of its own. [`WorkerPlayer`]: the expert in that worker.
//! - [`Interface`]: which array on the wire is which part of the spaces.
//! - [`FamilyWorkers`], [`technical_settings`], [`Patience`], [`max_rows`]: what families of such environments
//!   share.
//!
//! A worker that dies costs at most its episode: see [`Error::Lost`](crate::Error::Lost).

mod client;
mod env;
mod family;
mod frame;
mod interface;
mod process;
mod workers;

pub use env::{WorkerEnv, WorkerPlayer, small_seed};
pub use family::{FamilyWorkers, Patience, max_rows, technical_settings};
pub use interface::{Dtype, Interface, Part};
pub use process::Launch;
pub use workers::{Task, Workers};

#[cfg(test)]
mod tests;
