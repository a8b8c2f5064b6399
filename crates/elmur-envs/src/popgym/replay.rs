//! Episodes from given hidden states and draws, and what all families share.

use elmur_base::{Values, ValuesMut};
use serde::de::DeserializeOwned;

use crate::env::{Env, Step};
use crate::error::{Error, Result};

/// An environment whose episodes can be started from a given hidden state and stepped with given random
/// numbers. `reset` and `step` of [`Env`] draw both from the seed.
pub trait Replay: Env {
    /// What the seed of an episode decides at its start, as trace files have it.
    type Hidden: DeserializeOwned;

    /// The random numbers of one step; `()` if there are none.
    type Draw: DeserializeOwned + Copy + Default;

    /// Starts an episode with this hidden state and writes its first observation. A hidden state that the
    /// environment could not draw is an error.
    fn begin(&mut self, hidden: &Self::Hidden, observation: ValuesMut<'_>) -> Result<()>;

    /// [`Env::step`] with the given random numbers.
    fn advance(&mut self, action: Values<'_>, draw: Self::Draw, observation: ValuesMut<'_>) -> Result<Step>;

    /// The state of a control task in full precision; empty for others.
    fn state(&self) -> &[f64] {
        &[]
    }
}

/// Implements [`Env`] and [`Replay`] for a family that draws nothing after the start of an episode:
/// `episodes!(Type, Hidden, env => its spaces, uses_action: optional)`. The type has
///
/// - `deal(&mut self, rng: &mut Rng)`, which draws a hidden state,
/// - `take(&mut self, hidden: &Hidden) -> Result<()>`, which takes a given one over, if it is possible,
/// - `start(&mut self, observation)`, which begins the episode of the hidden state, and
/// - `play(&mut self, action, observation) -> Result<Step>`, which is [`Env::step`].
macro_rules! episodes {
    ($family:ty, $hidden:ty, $env:ident => $spaces:expr $(, uses_action: $uses_action:expr)?) => {
        impl $crate::env::Env for $family {
            fn spaces(&self) -> &::elmur_base::Spaces {
                let $env = self;
                &$spaces
            }

            fn reset(
                &mut self,
                seed: u64,
                observation: ::elmur_base::ValuesMut<'_>,
            ) -> $crate::error::Result<()> {
                self.deal(&mut ::elmur_rng::Rng::new(seed, 0));
                self.start(observation);
                Ok(())
            }

            #[inline]
            fn step(
                &mut self,
                action: ::elmur_base::Values<'_>,
                observation: ::elmur_base::ValuesMut<'_>,
            ) -> $crate::error::Result<$crate::env::Step> {
                self.play(action, observation)
            }

            $(fn uses_action(&self) -> bool {
                let $env = self;
                $uses_action
            })?
        }

        impl $crate::popgym::replay::Replay for $family {
            type Hidden = $hidden;
            type Draw = ();

            fn begin(
                &mut self,
                hidden: &$hidden,
                observation: ::elmur_base::ValuesMut<'_>,
            ) -> $crate::error::Result<()> {
                self.take(hidden)?;
                self.start(observation);
                Ok(())
            }

            #[inline]
            fn advance(
                &mut self,
                action: ::elmur_base::Values<'_>,
                (): (),
                observation: ::elmur_base::ValuesMut<'_>,
            ) -> $crate::error::Result<$crate::env::Step> {
                self.play(action, observation)
            }
        }
    };
}
pub(super) use episodes;

/// The integer of a discrete action.
#[inline]
pub(super) fn choice(action: Values<'_>, n: usize, what: &'static str) -> Result<usize> {
    match action.ints {
        [a] if (*a as usize) < n => Ok(*a as usize),
        _ => refuse(what, format!("one integer from 0 to {}", n - 1), action.floats, action.ints),
    }
}

/// Row and column of an action on a board.
#[inline]
pub(super) fn cell(
    action: Values<'_>,
    [rows, columns]: [usize; 2],
    what: &'static str,
) -> Result<(usize, usize)> {
    match action.ints {
        [r, c] if (*r as usize) < rows && (*c as usize) < columns => Ok((*r as usize, *c as usize)),
        _ => refuse(
            what,
            format!("a row from 0 to {} and a column from 0 to {}", rows - 1, columns - 1),
            action.floats,
            action.ints,
        ),
    }
}

/// The number of a continuous action, which must be finite.
#[inline]
pub(super) fn number(action: Values<'_>, what: &'static str) -> Result<f32> {
    match action.floats {
        [x] if x.is_finite() => Ok(*x),
        _ => refuse(what, "one finite number".to_owned(), action.floats, action.ints),
    }
}

/// Takes slices, not [`Values`]: callers would have to write those to memory in every step.
#[cold]
fn refuse<T>(what: &'static str, expected: String, floats: &[f32], ints: &[i32]) -> Result<T> {
    let got = if floats.is_empty() {
        format!("{ints:?}")
    } else if ints.is_empty() {
        format!("{floats:?}")
    } else {
        format!("{floats:?} and {ints:?}")
    };
    Err(elmur_base::Error::space(what, expected, got).into())
}

/// An [`Error::Config`] about a hidden state.
#[cold]
pub(super) fn impossible<T>(expected: impl Into<String>, got: impl Into<String>) -> Result<T> {
    Err(Error::Config { key: "hidden state".to_owned(), expected: expected.into(), got: got.into() })
}
