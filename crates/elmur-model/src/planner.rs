//! Policies that plan: several actions at once (a diffusion policy's chunk), or one action by search (a
//! trajectory model's beam). A session keeps the newest steps of every row, asks for a plan where a row has
//! none left, and plays it action by action.

use std::fmt::Debug;

use elmur_base::{Field, FieldMut};

use crate::error::Result;
use crate::session::{Draws, History, Shown};

/// What makes plans for the rows of a session.
///
/// A plan must not depend on which rows are planned together, so that episodes side by side act as they would
/// alone.
pub trait Planner: Debug + Send {
    /// Newest environment steps that a plan is made from, the current one included: at least 1.
    fn looks_back(&self) -> usize;

    /// Actions of a plan that are played before the next plan is made: at least 1.
    fn plays(&self) -> usize;

    /// Writes a plan for every row of `recent` to `plans`, [rows, plays, outputs]: continuous actions, or
    /// logits of discrete ones. Random numbers of a row come from its own `draws`.
    fn plan(&mut self, recent: &Recent<'_>, draws: &mut [Draws], plans: &mut [f32]) -> Result<()>;
}

/// The newest steps of some rows of a session.
#[derive(Debug)]
pub struct Recent<'a> {
    pub(crate) history: &'a History,
    pub(crate) shown: &'a [Shown],
}

impl Recent<'_> {
    /// Rows that want a plan.
    pub fn rows(&self) -> usize {
        self.shown.len()
    }

    /// Steps of row `row` that are known, the current one included: from 1 up to
    /// [`Planner::looks_back`].
    pub fn count(&self, row: usize) -> usize {
        self.shown[row].count
    }

    /// Copies a field of the known steps of a row, oldest first, [count, numbers], to the beginning of `out`.
    /// Floats, integers and bytes are copied as what they are. The current step has no action yet.
    pub fn read(&self, field: Field, row: usize, out: FieldMut<'_>) -> Result<()> {
        self.history.read(field, self.shown[row], out)
    }
}
