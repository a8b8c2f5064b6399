//! The seam between kinds of policies and everything that trains, runs, saves and looks at them.
//!
//! An architecture is graph code. It says what a whole window of steps computes ([`Architecture::forward`])
//! and, where it can, what a single step does ([`Architecture::step`]). Trainer, session, checkpoints,
//! evaluation and inspection are written against this trait and know no architecture by name.

use std::fmt::Debug;

use elmur_engine::{Device, Store, Value};

use crate::ends::{Ends, Token};
use crate::error::Result;
use crate::net::{Loss, Net};
use crate::phase::{Phase, Window};
use crate::planner::Planner;

/// One kind of policy as graph code. A value of an architecture is its configuration; it holds no tensors.
///
/// The property test in `tests/architectures.rs` ties the two halves together: what
/// [`Architecture::step`] computes phase by phase must be what [`Architecture::forward`] computes for the
/// whole window.
pub trait Architecture: Debug + Send + Sync {
    /// Checks everything that the types of the configuration leave open.
    fn validate(&self) -> Result<()>;

    /// What the policy sees and does: one encoder per leaf of the observation, the kind of action, the token
    /// format.
    fn ends(&self) -> Ends<'_>;

    /// The stretch of an episode that is computed together.
    fn window(&self) -> Window;

    /// Whether the policy aims at the return that it is told, so that a target return changes what it does. By
    /// default: where returns are among its tokens.
    fn aims_at_return(&self) -> bool {
        self.ends().tokens.has(Token::Return)
    }

    /// A whole window: hidden states [rows, steps, width], one per environment step, from which the head
    /// reads the action. What outlives the window goes through [`Net::carried`] and [`Net::keep`].
    fn forward(&self, net: &mut Net<'_>) -> Result<Value>;

    /// The configuration as text, from which [`Fingerprint`](crate::Fingerprint) tells architectures apart.
    /// By default that of `Debug`; where settings are added later, JSON that leaves out what has its default
    /// stays the same.
    fn config_text(&self) -> String {
        format!("{self:?}")
    }

    /// What actions are chosen from, [rows, steps, outputs of the action], given hidden states [rows, steps,
    /// width]: logits, or continuous actions. By default: one linear map.
    fn head(&self, net: &mut Net<'_>, hidden: Value) -> Result<Value> {
        net.head(hidden)
    }

    /// What training minimises, given hidden states [windows, rows, steps, width] and head outputs [windows,
    /// rows, steps, outputs]. By default: imitation.
    fn loss(&self, net: &mut Net<'_>, hidden: Value, outputs: Value) -> Result<Loss> {
        let _ = hidden;
        net.imitation(outputs)
    }

    /// How the optimizer treats the parameter of this name. By default: like all others.
    fn group(&self, parameter: &str) -> Group {
        let _ = parameter;
        Group::default()
    }

    /// Whether [`Architecture::step`] gives exactly what [`Architecture::forward`] would: always, or in a window
    /// that slides as long as it is not full. Where it does not, a session keeps the window's steps and runs the
    /// whole window again at every step; `forward` may then return the current step's hidden state alone.
    fn steps_exactly(&self) -> bool {
        false
    }

    /// One phase of one environment step, for the rows at hand. [`Phase::Observe`] returns the hidden state
    /// [rows, 1, width] from which the head reads; other phases return nothing.
    fn step(&self, net: &mut Net<'_>, phase: Phase) -> Result<Option<Value>> {
        let _ = (net, phase);
        Ok(None)
    }

    /// For a policy that plans several actions at once, or searches for them, instead of reading them from
    /// head outputs: its planner for `rows` episodes side by side, with these parameters. By default: none.
    fn planner(&self, params: &Store, device: &Device, rows: usize) -> Result<Option<Box<dyn Planner>>> {
        let _ = (params, device, rows);
        Ok(None)
    }
}

/// How the optimizer treats a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Group {
    /// Factor of the learning rate.
    pub lr_scale: f64,
    /// Whether weight decay applies.
    pub decays: bool,
}

impl Default for Group {
    fn default() -> Self {
        Self { lr_scale: 1.0, decays: true }
    }
}
