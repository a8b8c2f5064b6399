//! The policies that ELMUR is compared with, one file each, behind the same
//! [`Architecture`](crate::Architecture).

mod bc_lstm;
mod bc_mlp;
mod cql;
mod cql_continuous;
mod dmamba;
mod dt;
mod layers;
mod tt;

pub use bc_lstm::BcLstm;
pub use bc_mlp::BcMlp;
pub use cql::{Cql, CqlObjective};
pub use cql_continuous::CqlContinuous;
pub use dmamba::{DMamba, DMambaCompat};
pub use dt::{Dt, DtCompat};
pub use layers::LstmCompat;
pub use tt::{Tt, TtPlan};
