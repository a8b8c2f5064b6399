//! The policies that ELMUR is compared with, one file each, behind the same
//! [`Architecture`](crate::Architecture).

mod bc_lstm;
mod bc_mlp;
mod cql;
mod cql_continuous;
pub(crate) mod diffusion;
mod dmamba;
mod layers;
mod transformer_xl;
mod tt;

pub use bc_lstm::BcLstm;
pub use bc_mlp::BcMlp;
pub use cql::{Cql, CqlObjective};
pub use cql_continuous::CqlContinuous;
pub use diffusion::{Denoiser, Diffusion, DiffusionCompat, DiffusionSampler};
pub use dmamba::{DMamba, DMambaCompat};
pub use layers::LstmCompat;
pub use transformer_xl::{TransformerXl, TransformerXlCompat, ValveActivation};
pub use tt::{Tt, TtPlan};
