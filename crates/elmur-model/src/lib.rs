//! Policies: architectures as graph code, and everything that runs and keeps them.
//!
//! - [`Architecture`]: one kind of policy. [`elmur`]: ELMUR, a transformer whose every layer owns an external
//!   memory. [`baselines`]: what it is compared with. [`PolicyConfig`]: any of them, by name in files;
//!   [`presets`]: by name for people.
//! - [`Net`]: the builder that architectures write graphs with. [`ends`]: encoders, heads, tokens.
//! - [`window`]: training and evaluation of whole windows. [`init`]: initial weights. [`Statistic`]: parameters
//!   that follow from the data.
//! - [`session`]: acting step by step, any number of episodes side by side; [`Snapshot`]: what they remember,
//!   as a value. [`Planner`]: what policies that plan ahead do there.
//! - [`Checkpoint`]: parameters and config on disk or as bytes. [`Fingerprint`]: which policy something
//!   belongs to. [`golden`]: traces of the published Python code,
//!   replayed.

mod architecture;
pub mod baselines;
pub mod checkpoint;
pub mod elmur;
mod encode;
pub mod ends;
mod error;
mod fewer;
mod fingerprint;
pub mod golden;
pub mod init;
mod initial;
mod net;
mod phase;
pub mod pieces;
mod planner;
mod policy;
pub mod presets;
pub mod session;
mod sizes;
mod snapshot;
mod statistic;
pub mod tensors;
mod vision;
pub mod window;

pub use architecture::{Architecture, Group};
pub use checkpoint::Checkpoint;
pub use elmur::Elmur;
pub use error::{Error, Result};
pub use fingerprint::Fingerprint;
pub use initial::Init;
pub use net::{Average, Carried, Loss, Net, Start, position_encodings};
pub use phase::{Phase, Window};
pub use planner::{Planner, Recent};
pub use policy::PolicyConfig;
pub use snapshot::Snapshot;
pub use statistic::Statistic;
pub use vision::Augment;
