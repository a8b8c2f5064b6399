//! Training and evaluation: demonstrations in, checkpoints and numbers out.
//!
//! - [`RunConfig`]: everything that decides a run, as one tree with dotted overrides ([`overrides`]).
//! - [`PolicyName`]: policies by name, for any run ([`RunConfig::with_policy`]).
//! - [`Trainer`]: one batch after the other, resumable bit for bit.
//! - [`train`]: a whole run in a folder: metrics, evaluation, best and last checkpoints, early stop.
//! - [`Prepared`]: a config with its data and what policies are judged on.
//! - [`evaluate`]: the paper's protocol; [`timeline()`]: what the memory did in one episode;
//!   [`watch()`]: one episode with everything that was seen; [`evaluate_offline`]: predictions on recorded
//!   episodes; [`faster_device`]: where acting takes least time.
//! - [`tensorboard`]: event files.

mod config;
mod error;
mod evaluate;
mod faster;
mod feed;
mod folder;
mod measure;
mod metrics;
mod none;
mod offline;
pub mod overrides;
mod own;
mod prepare;
mod presets;
mod resident;
mod run;
mod schedule;
mod standardize;
mod statistics;
pub mod tensorboard;
mod timeline;
mod trainer;
mod watch;

pub use config::{DataConfig, EvalConfig, Judge, PrecisionName, RunConfig, TrainConfig};
pub use error::{Error, Result};
pub use evaluate::{EpisodeResult, Evaluation, Outcome, Seeds, evaluate, memory_seed};
pub use faster::faster_device;
pub use folder::{RunFolder, RunLock};
pub use measure::{Measure, Score};
pub use offline::{OfflineEvaluation, OfflineOutcome, evaluate_offline};
pub use prepare::{Devices, Prepared};
pub use presets::{Policy, PolicyName};
pub use run::{Ended, Event, Observe, train, train_on};
pub use schedule::{Decay, Schedule, Unit};
pub use timeline::{SlotHistory, SlotTimeline, timeline};
pub use trainer::{BatchReport, Trainer};
pub use watch::{MAX_WATCHED, Watched, WatchedLayer, watch};
