//! Everything about a step's numbers that could be wrong, found before anything is changed.

use elmur_base::{Kind, Values, Widths};

use crate::ends::{Action, Encoder};
use crate::error::{Error, Result};

/// `count` finite numbers.
pub(super) fn check_floats(what: &'static str, data: &[f32], count: usize) -> Result<()> {
    if data.len() != count {
        return Err(Error::input(what, format!("{count} numbers"), data.len().to_string()));
    }
    match data.iter().position(|x| !x.is_finite()) {
        Some(bad) => Err(Error::input(what, "finite numbers", format!("{} at {bad}", data[bad]))),
        None => Ok(()),
    }
}

/// Integers of `sizes.len()` components in every row, component i in 0..sizes[i] + `more`. A row is `width`
/// integers, of which these begin at `first`.
fn check_integers(
    what: &'static str,
    data: &[i32],
    sizes: &[usize],
    (width, first): (usize, usize),
    more: usize,
) -> Result<()> {
    for row in data.chunks_exact(width.max(1)) {
        for (component, (x, size)) in row[first..].iter().zip(sizes).enumerate() {
            let limit = size + more;
            if !usize::try_from(*x).is_ok_and(|x| x < limit) {
                let expected = format!("0 to {} in component {component}", limit - 1);
                return Err(Error::input(what, expected, x.to_string()));
            }
        }
    }
    Ok(())
}

/// Numbers of each kind in one observation.
pub(super) fn observation_widths(encoders: &[Encoder]) -> Widths {
    let mut widths = Widths::default();
    for encoder in encoders {
        let width = match encoder.kind() {
            Kind::Floats => &mut widths.floats,
            Kind::Ints => &mut widths.ints,
            Kind::Bytes => &mut widths.bytes,
        };
        *width += encoder.len();
    }
    widths
}

/// One observation for each of `rows` rows.
pub(super) fn check_observation(
    encoders: &[Encoder],
    widths: Widths,
    seen: Values<'_>,
    rows: usize,
) -> Result<()> {
    const WHAT: &str = "observation";
    let kinds = [
        ("floats", widths.floats, seen.floats.len()),
        ("integers", widths.ints, seen.ints.len()),
        ("bytes", widths.bytes, seen.bytes.len()),
    ];
    // Numbers of a kind that the policy does not take are told apart from a wrong number of them.
    if let Some((got, ..)) = kinds.iter().find(|(_, width, len)| *width == 0 && *len > 0) {
        let expected: Vec<&str> =
            kinds.iter().filter(|(_, width, _)| *width > 0).map(|(name, ..)| *name).collect();
        return Err(Error::input(WHAT, expected.join(" and "), *got));
    }
    for (name, width, len) in [kinds[1], kinds[2]] {
        if len != width * rows {
            return Err(Error::input(WHAT, format!("{} {name}", width * rows), len.to_string()));
        }
    }
    check_floats(WHAT, seen.floats, widths.floats * rows)?;
    let mut first = 0;
    for encoder in encoders {
        if let Encoder::Categorical { sizes, .. } = encoder {
            check_integers(WHAT, seen.ints, sizes, (widths.ints, first), 0)?;
            first += sizes.len();
        }
    }
    Ok(())
}

/// One action for each of `rows` rows. A discrete component equal to its number of choices means none.
pub(super) fn check_actions(action: &Action, actions: Values<'_>, rows: usize) -> Result<()> {
    const WHAT: &str = "action";
    let count = action.dim() * rows;
    if !action.is_discrete() {
        if !actions.ints.is_empty() {
            return Err(Error::input(WHAT, "continuous actions", "discrete ones"));
        }
        return check_floats(WHAT, actions.floats, count);
    }
    if !actions.floats.is_empty() {
        return Err(Error::input(WHAT, "discrete actions", "continuous ones"));
    }
    if actions.ints.len() != count {
        return Err(Error::input(WHAT, format!("{count} integers"), actions.ints.len().to_string()));
    }
    check_integers(WHAT, actions.ints, action.sizes(), (action.dim(), 0), 1)
}
