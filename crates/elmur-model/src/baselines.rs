//! The policies that ELMUR is compared with, one file each, behind the same
//! [`Architecture`](crate::Architecture).

mod bc_lstm;
mod dt;

pub use bc_lstm::BcLstm;
pub use dt::{Dt, DtCompat};
