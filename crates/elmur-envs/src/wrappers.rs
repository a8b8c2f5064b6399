//! The usual changes of observations and actions, as options of any environment.
//!
//! In this order: the observation, then the previous action, then the cell that it chose, then the first-step flag;
//! all of it as floats where asked for, except bytes, which no wrapper changes. Where actions are made flat, the
//! previous action is still shown as the environment's own.

use elmur_base::{Describe, Leaf, Row, Space, Spaces, Values, ValuesMut, Widths, bound_at};
use serde::{Deserialize, Serialize};

use crate::choices::{Choices, row_major, write_row_major};
use crate::env::{Env, Next, Step};
use crate::error::{Error, Result};

/// Changes of observations and actions. All are off by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(from = "Written")]
pub struct Wrappers {
    /// Append the previous action to every observation; zeros at the start of an episode.
    pub previous_action: bool,
    /// Append what the observation shows where the previous action pointed, for actions that choose one of its
    /// integers (a card on a table); a value of its own at the start of an episode.
    pub chosen_cell: bool,
    /// Append a flag to every observation that is 1 at the first step of an episode and 0 after it.
    pub first_step: bool,
    /// How the numbers of an observation are shown: as_is, one_hot or floats.
    pub encoding: Encoding,
    /// Turn actions of several integers into one integer, row-major: row * columns + column.
    pub flat_action: bool,
}

/// How the numbers of an observation are shown. Leaves of bytes (cameras) stay bytes in all cases and come
/// first; with `one_hot` and `floats` everything else becomes one box behind them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum Encoding {
    /// Leave integers and floats as they are.
    #[default]
    AsIs,
    /// Turn every integer into a one-hot vector of floats.
    OneHot,
    /// Turn every integer into a float of the same value, as the published code does.
    Floats,
}

/// Wrappers as files have them: earlier ones have two switches in place of `encoding`.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Written {
    previous_action: bool,
    chosen_cell: bool,
    first_step: bool,
    encoding: Encoding,
    one_hot: bool,
    as_floats: bool,
    flat_action: bool,
}

impl From<Written> for Wrappers {
    fn from(written: Written) -> Self {
        let encoding = match (written.one_hot, written.as_floats) {
            (true, _) => Encoding::OneHot,
            (_, true) => Encoding::Floats,
            _ => written.encoding,
        };
        let Written { previous_action, chosen_cell, first_step, flat_action, .. } = written;
        Self { previous_action, chosen_cell, first_step, encoding, flat_action }
    }
}

impl Wrappers {
    /// The names that [`Wrappers::named`] knows.
    pub const NAMES: [&str; 6] =
        ["previous_action", "chosen_cell", "first_step", "one_hot", "as_floats", "flat_action"];

    /// Whether all wrappers are off.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// Names of the wrappers that are on.
    pub fn names(self) -> Vec<&'static str> {
        let on = [
            self.previous_action,
            self.chosen_cell,
            self.first_step,
            self.encoding == Encoding::OneHot,
            self.encoding == Encoding::Floats,
            self.flat_action,
        ];
        Self::NAMES.into_iter().zip(on).filter(|(_, on)| *on).map(|(name, _)| name).collect()
    }

    /// The wrappers of these names on, all others off. `one_hot` and `as_floats` exclude each other.
    pub fn named(names: &[impl AsRef<str>]) -> Result<Self> {
        let mut wrappers = Self::default();
        for name in names {
            let other = wrappers.encoding != Encoding::AsIs;
            match name.as_ref() {
                "previous_action" => wrappers.previous_action = true,
                "chosen_cell" => wrappers.chosen_cell = true,
                "first_step" => wrappers.first_step = true,
                "one_hot" | "as_floats" if other => {
                    return Err(Error::config("wrappers", "one_hot or as_floats", "both"));
                }
                "one_hot" => wrappers.encoding = Encoding::OneHot,
                "as_floats" => wrappers.encoding = Encoding::Floats,
                "flat_action" => wrappers.flat_action = true,
                unknown => {
                    let expected = format!("one of {}", Self::NAMES.join(", "));
                    return Err(Error::config("wrappers", expected, unknown));
                }
            }
        }
        Ok(wrappers)
    }
}

/// How one number of an observation becomes floats.
#[derive(Debug, Clone, Copy)]
enum Entry {
    /// An integer below this becomes a one-hot vector of this many floats.
    OneOf(usize),
    /// An integer below this becomes one float.
    Number(usize),
    /// A float stays as it is.
    Float,
}

/// [`Wrappers`] applied to the numbers of an environment with given spaces.
#[derive(Debug, Clone)]
pub struct Wrapping {
    wrappers: Wrappers,
    /// Whether observations become floats.
    encoded: bool,
    spaces: Spaces,
    /// Bounds of the own action's floats.
    bounds: Vec<(f32, f32)>,
    /// Choices of the own action's integers.
    choices: Vec<usize>,
    /// Values that a chosen cell can have, where it is shown.
    cell: Option<usize>,
    entries: Vec<Entry>,
    /// The whole observation before its numbers become floats.
    plain: Row,
}

impl Wrapping {
    /// Applies wrappers to the spaces `own`. Flat actions are an error where actions are not all integers, and chosen
    /// cells where there are not as many integers in an observation as actions.
    pub fn new(own: &Spaces, wrappers: Wrappers) -> Result<Self> {
        let mut bounds = Vec::new();
        let mut choices = Vec::new();
        for leaf in own.action.leaves() {
            match leaf {
                Leaf::Ints(sizes) => choices.extend_from_slice(sizes),
                Leaf::Floats { low, high, .. } => {
                    bounds.extend((0..leaf.len()).map(|i| (bound_at(low, i), bound_at(high, i))));
                }
                Leaf::Bytes { .. } => {}
            }
        }
        let action = if wrappers.flat_action { flat(&own.action)? } else { own.action.clone() };
        let cell = if wrappers.chosen_cell { Some(cell_values(own)?) } else { None };
        let plain = extended(own, wrappers, cell);
        let entries = entries(&plain, wrappers.encoding == Encoding::OneHot);
        let encoded = wrappers.encoding != Encoding::AsIs;
        let observation = if encoded { encoded_space(&plain, &entries) } else { plain.clone() };
        let spaces = Spaces { observation, action };
        Ok(Self { wrappers, encoded, spaces, bounds, choices, cell, entries, plain: Row::of(&plain) })
    }

    /// The spaces with all changes.
    pub fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    /// Writes the changed observation for the environment's own observation. `previous` is the environment's
    /// own action before it; none at the start of an episode.
    pub fn observe(&mut self, own: Values<'_>, previous: Option<Values<'_>>, mut out: ValuesMut<'_>) {
        let target = if self.encoded { self.plain.as_mut() } else { out.reborrow() };
        let (floats, more_floats) = target.floats.split_at_mut(own.floats.len());
        let (ints, more_ints) = target.ints.split_at_mut(own.ints.len());
        let (bytes, more_bytes) = target.bytes.split_at_mut(own.bytes.len());
        ValuesMut { floats, ints, bytes }.copy_from(own);
        let mut rest = more_ints.iter_mut();
        if self.wrappers.previous_action {
            let last = |i: usize| previous.map_or(0.0, |action| action.floats[i]);
            for (i, (x, (low, high))) in more_floats.iter_mut().zip(&self.bounds).enumerate() {
                *x = last(i).clamp(*low, *high);
            }
            let last = |i: usize| previous.map_or(0, |action| action.ints[i]);
            (0..self.choices.len()).zip(&mut rest).for_each(|(i, x)| *x = last(i));
            match previous {
                Some(action) => more_bytes.copy_from_slice(action.bytes),
                None => more_bytes.fill(0),
            }
        }
        if let Some(values) = self.cell
            && let Some(cell) = rest.next()
        {
            let chosen = previous.and_then(|action| own.ints.get(row_major(&self.choices, action.ints)));
            *cell = chosen.copied().unwrap_or(values as i32);
        }
        if let Some(flag) = rest.next() {
            *flag = i32::from(previous.is_none());
        }
        if self.encoded {
            encode(&self.entries, self.plain.values(), out.floats);
            out.bytes.copy_from_slice(&self.plain.bytes);
        }
    }

    /// Writes the changed action that stands for the environment's own action.
    pub fn wrap_action(&self, own: Values<'_>, mut action: ValuesMut<'_>) {
        if self.wrappers.flat_action {
            action.ints.fill(row_major(&self.choices, own.ints) as i32);
        } else {
            action.copy_from(own);
        }
    }

    /// Writes the environment's own action that an action behind the wrappers stands for; `own` has room for one.
    pub fn unwrap_action(&self, action: Values<'_>, own: &mut Row) -> Result<()> {
        if self.wrappers.flat_action {
            return self.unwrap_flat(action, own);
        }
        own.clear();
        own.extend(action);
        Ok(())
    }

    /// Writes the environment's own action that a flat action stands for.
    fn unwrap_flat(&self, action: Values<'_>, own: &mut Row) -> Result<()> {
        let count = self.choices.iter().product::<usize>();
        let choice = match action {
            Values { floats: [], ints: [a], bytes: [] } if (*a as usize) < count => *a as usize,
            _ => return refused(count, action),
        };
        write_row_major(&self.choices, choice, &mut own.ints);
        Ok(())
    }
}

/// An environment with wrappers.
#[derive(Debug, Clone)]
pub struct Wrapped<E> {
    inner: E,
    wrapping: Wrapping,
    /// The newest observation of the inner environment.
    own: Row,
    /// The newest action of the inner environment, where actions are flat.
    action: Row,
}

impl<E: Env> Wrapped<E> {
    /// Adds wrappers to `inner`. Flat actions are an error where actions are not all integers.
    pub fn new(inner: E, wrappers: Wrappers) -> Result<Self> {
        let wrapping = Wrapping::new(inner.spaces(), wrappers)?;
        let (own, action) = (Row::of(&inner.spaces().observation), Row::of(&inner.spaces().action));
        Ok(Self { inner, wrapping, own, action })
    }

    /// The inner environment.
    pub fn inner(&self) -> &E {
        &self.inner
    }
}

impl<E: Env> Env for Wrapped<E> {
    fn spaces(&self) -> &Spaces {
        self.wrapping.spaces()
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
        self.inner.reset(seed, self.own.as_mut())?;
        self.wrapping.observe(self.own.values(), None, observation);
        Ok(())
    }

    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        let (own, action) = if self.wrapping.wrappers.flat_action {
            self.wrapping.unwrap_flat(action, &mut self.action)?;
            (&mut self.own, self.action.values())
        } else {
            (&mut self.own, action)
        };
        let step = self.inner.step(action, own.as_mut())?;
        self.wrapping.observe(own.values(), Some(action), observation);
        Ok(step)
    }

    fn uses_action(&self) -> bool {
        self.inner.uses_action()
    }

    fn send(&mut self, next: Next<'_>) -> bool {
        match next {
            Next::Step(action) if self.wrapping.wrappers.flat_action => {
                // The step that follows tells what is wrong with an action.
                let inner = self.wrapping.unwrap_flat(action, &mut self.action);
                inner.is_ok() && self.inner.send(Next::Step(self.action.values()))
            }
            next => self.inner.send(next),
        }
    }
}

#[cold]
fn refused<T>(count: usize, action: Values<'_>) -> Result<T> {
    let (expected, got) = (format!("one integer from 0 to {}", count - 1), format!("{:?}", action.ints));
    Err(elmur_base::Error::space("flat action", expected, got).into())
}

/// The space of flat actions.
fn flat(action: &Space) -> Result<Space> {
    let Widths { floats, bytes, .. } = action.widths();
    match Choices::of(action) {
        Some(choices) => Ok(Space::Discrete { n: choices.count() }),
        None => {
            let continuous = floats + bytes > 0;
            let expected =
                if continuous { "an environment with discrete actions" } else { "at most 2^31 - 1 actions" };
            let got: String = format!("{action:?}").chars().take(80).collect();
            Err(Error::config("wrappers.flat_action", expected, got))
        }
    }
}

/// The number of values that a cell which an action chooses can have: the observation's integers are the cells.
fn cell_values(own: &Spaces) -> Result<usize> {
    let sizes: Vec<usize> = own
        .observation
        .leaves()
        .iter()
        .flat_map(|leaf| match leaf {
            Leaf::Ints(sizes) => sizes.to_vec(),
            _ => vec![],
        })
        .collect();
    let actions = Choices::of(&own.action).map_or(0, |choices| choices.count());
    match sizes.iter().max() {
        Some(most) if sizes.len() == actions => Ok(*most),
        _ => {
            let expected = "an environment whose actions choose one of an observation's integers";
            let got = format!("{actions} discrete actions and {} integers", sizes.len());
            Err(Error::config("wrappers.chosen_cell", expected, got))
        }
    }
}

/// The observation space with the parts that wrappers append; `cell`: values of a chosen cell, if it is one of them.
fn extended(own: &Spaces, wrappers: Wrappers, cell: Option<usize>) -> Space {
    if !wrappers.previous_action && cell.is_none() && !wrappers.first_step {
        return own.observation.clone();
    }
    let mut parts = match &own.observation {
        Space::Tuple { parts } => parts.clone(),
        one => vec![one.clone()],
    };
    if wrappers.previous_action {
        parts.push(own.action.clone());
    }
    // One more for none.
    parts.extend(cell.map(|values| Space::Discrete { n: values + 1 }));
    if wrappers.first_step {
        parts.push(Space::Discrete { n: 2 });
    }
    Space::Tuple { parts }
}

fn entries(space: &Space, one_hot: bool) -> Vec<Entry> {
    let integer = |n: &usize| if one_hot { Entry::OneOf(*n) } else { Entry::Number(*n) };
    let entries = |leaf: &Leaf<'_>| match leaf {
        Leaf::Ints(sizes) => sizes.iter().map(integer).collect(),
        Leaf::Floats { .. } => vec![Entry::Float; leaf.len()],
        Leaf::Bytes { .. } => vec![],
    };
    space.leaves().iter().flat_map(entries).collect()
}

/// A space whose numbers have become floats: leaves of bytes, then a box of all the others.
fn encoded_space(space: &Space, entries: &[Entry]) -> Space {
    let mut parts: Vec<Space> = Vec::new();
    for leaf in space.leaves() {
        if let Leaf::Bytes { shape } = leaf {
            parts.push(Space::Bytes { shape: shape.to_vec() });
        }
    }
    if !entries.is_empty() {
        parts.push(floats(space, entries));
    }
    if parts.len() == 1 { parts.remove(0) } else { Space::Tuple { parts } }
}

/// The box of the floats that all numbers but bytes become.
fn floats(space: &Space, entries: &[Entry]) -> Space {
    let mut bounds = space.leaves().into_iter().flat_map(|leaf| match leaf {
        Leaf::Ints(_) | Leaf::Bytes { .. } => vec![],
        Leaf::Floats { low, high, .. } => {
            (0..leaf.len()).map(|i| (bound_at(low, i), bound_at(high, i))).collect()
        }
    });
    let (mut low, mut high) = (Vec::new(), Vec::new());
    for entry in entries {
        let (count, bound) = match entry {
            Entry::OneOf(n) => (*n, (0.0, 1.0)),
            Entry::Number(n) => (1, (0.0, (*n - 1) as f32)),
            Entry::Float => (1, bounds.next().unwrap_or((f32::MIN, f32::MAX))),
        };
        low.extend(std::iter::repeat_n(bound.0, count));
        high.extend(std::iter::repeat_n(bound.1, count));
    }
    Space::Box { shape: vec![low.len()], low, high }
}

/// Writes an observation as floats.
fn encode(entries: &[Entry], values: Values<'_>, out: &mut [f32]) {
    out.fill(0.0);
    let (mut floats, mut ints) = (values.floats.iter(), values.ints.iter());
    let mut at = 0;
    for entry in entries {
        let (offset, value, width) = match entry {
            Entry::OneOf(n) => (ints.next().map_or(0, |i| *i as usize).min(n - 1), 1.0, *n),
            Entry::Number(_) => (0, ints.next().map_or(0.0, |i| *i as f32), 1),
            Entry::Float => (0, floats.next().copied().unwrap_or(0.0), 1),
        };
        out[at + offset] = value;
        at += width;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A board of 2 x 3 cells that shows how often it was stepped, and a number.
    struct Board {
        spaces: Spaces,
        time: i32,
        last: (i32, i32),
    }

    impl Board {
        fn new() -> Self {
            let observation = Space::Tuple { parts: vec![Space::Discrete { n: 9 }, Space::unbounded([1])] };
            let spaces = Spaces { observation, action: Space::MultiDiscrete { sizes: vec![2, 3] } };
            Self { spaces, time: 0, last: (0, 0) }
        }
    }

    impl Env for Board {
        fn spaces(&self) -> &Spaces {
            &self.spaces
        }
        fn reset(&mut self, _: u64, observation: ValuesMut<'_>) -> Result<()> {
            self.time = 0;
            observation.ints[0] = 0;
            observation.floats[0] = 0.5;
            Ok(())
        }
        fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
            self.spaces.action.check("cell", action)?;
            self.last = (action.ints[0], action.ints[1]);
            self.time += 1;
            observation.ints[0] = self.time;
            observation.floats[0] = -0.5;
            Ok(Step::default())
        }
        fn uses_action(&self) -> bool {
            self.time > 1
        }
    }

    const ALL: Wrappers = Wrappers {
        previous_action: true,
        chosen_cell: false,
        first_step: true,
        encoding: Encoding::OneHot,
        flat_action: true,
    };

    fn wrapped(wrappers: Wrappers) -> (Wrapped<Board>, Row) {
        let mut env = Wrapped::new(Board::new(), wrappers).unwrap();
        env.spaces().validate().unwrap();
        let mut seen = Row::of(&env.spaces().observation);
        env.reset(0, seen.as_mut()).unwrap();
        env.spaces().observation.check("observation", seen.values()).unwrap();
        (env, seen)
    }

    fn step(env: &mut Wrapped<Board>, action: &[i32], seen: &mut Row) -> Result<Step> {
        let step = env.step(Values::ints(action), seen.as_mut());
        env.spaces().observation.check("observation", seen.values()).unwrap();
        step
    }

    #[test]
    fn previous_action_and_flag_follow_the_observation() {
        let on = Wrappers { previous_action: true, first_step: true, ..Wrappers::default() };
        let (mut env, mut seen) = wrapped(on);
        assert_eq!((&seen.ints[..], &seen.floats[..]), (&[0, 0, 0, 1][..], &[0.5][..]));
        step(&mut env, &[1, 2], &mut seen).unwrap();
        assert_eq!(seen.ints, [1, 1, 2, 0]);
        assert!(step(&mut env, &[2, 0], &mut seen).is_err());
        step(&mut env, &[0, 1], &mut seen).unwrap();
        assert_eq!(seen.ints, [2, 0, 1, 0]);
        assert!(env.uses_action());
        env.reset(0, seen.as_mut()).unwrap();
        assert_eq!(seen.ints, [0, 0, 0, 1], "nothing is left of the last episode");
    }

    #[test]
    fn one_hot_is_laid_out_part_by_part() {
        let on = ALL;
        let (mut env, mut seen) = wrapped(on);
        assert_eq!(env.spaces().observation.widths().floats, 9 + 1 + 2 + 3 + 2);
        step(&mut env, &[5], &mut seen).unwrap();
        let mut expected = [0.0; 17];
        (expected[1], expected[9], expected[11], expected[14], expected[15]) = (1.0, -0.5, 1.0, 1.0, 1.0);
        assert_eq!(seen.floats, expected);
        assert!(seen.ints.is_empty());
    }

    #[test]
    fn numbers_can_become_floats_as_they_are() {
        let on = Wrappers { encoding: Encoding::Floats, ..ALL };
        let (mut env, mut seen) = wrapped(on);
        step(&mut env, &[5], &mut seen).unwrap();
        assert_eq!(seen.floats, [1.0, -0.5, 1.0, 2.0, 0.0]);
    }

    #[test]
    fn the_cell_that_was_chosen_is_shown() {
        let spec = crate::EnvSpec::new("popgym-ConcentrationHard");
        let registry = crate::Registry::builtin();
        let names = ["previous_action", "chosen_cell", "first_step"];
        let wrapped = spec.with_wrappers(Wrappers::named(&names).unwrap());
        let mut env = registry.find(&wrapped).unwrap().make(crate::Purpose::Evaluate).unwrap();
        let mut seen = Row::of(&env.spaces().observation);
        env.reset(3, seen.as_mut()).unwrap();
        assert_eq!(seen.ints[52..], [0, 14, 1], "no action yet");
        for card in [7, 51, 0] {
            env.step(Values::ints(&[card]), seen.as_mut()).unwrap();
            let face = seen.ints[card as usize];
            assert!((0..13).contains(&face));
            assert_eq!(seen.ints[52..], [card, face, 0]);
        }
        let on = Wrappers { chosen_cell: true, ..Wrappers::default() };
        let error = Wrapped::new(Board::new(), on).err().unwrap().to_string();
        assert!(error.contains("6 discrete actions and 1 integers"), "{error}");
    }

    #[test]
    fn flat_actions_are_row_major() {
        let (mut env, mut seen) = wrapped(Wrappers { flat_action: true, ..Wrappers::default() });
        assert_eq!(env.spaces().action, Space::Discrete { n: 6 });
        for a in 0..6 {
            step(&mut env, &[a], &mut seen).unwrap();
            assert_eq!(env.inner().last, (a / 3, a % 3));
            let mut again = [9];
            env.wrapping.wrap_action(env.action.values(), ValuesMut::ints(&mut again));
            assert_eq!(again, [a]);
        }
        for bad in [&[6][..], &[-1], &[0, 0], &[]] {
            assert!(step(&mut env, bad, &mut seen).unwrap_err().to_string().contains("from 0 to 5"));
        }
    }

    /// Continuous actions, as a pendulum's.
    #[derive(Debug)]
    struct Torque(Spaces);

    impl Env for Torque {
        fn spaces(&self) -> &Spaces {
            &self.0
        }
        fn reset(&mut self, _: u64, observation: ValuesMut<'_>) -> Result<()> {
            observation.floats[0] = 7.0;
            Ok(())
        }
        fn step(&mut self, _: Values<'_>, _: ValuesMut<'_>) -> Result<Step> {
            Ok(Step::default())
        }
    }

    #[test]
    fn continuous_actions_are_shown_within_their_bounds_and_are_never_flat() {
        let spaces = Spaces { observation: Space::unbounded([1]), action: Space::between(-2.0, 2.0, [1]) };
        let flat = Wrappers { flat_action: true, ..Wrappers::default() };
        let error = Wrapped::new(Torque(spaces.clone()), flat).unwrap_err().to_string();
        assert!(error.contains("discrete actions"), "{error}");
        let on = Wrappers { previous_action: true, ..Wrappers::default() };
        let mut env = Wrapped::new(Torque(spaces), on).unwrap();
        let mut seen = Row::of(&env.spaces().observation);
        env.reset(0, seen.as_mut()).unwrap();
        assert_eq!(seen.floats, [7.0, 0.0]);
        env.step(Values::floats(&[3.5]), seen.as_mut()).unwrap();
        assert_eq!(seen.floats, [7.0, 2.0]);
    }

    /// A camera, a choice and a number; what it is told is a byte.
    struct Camera(Spaces);

    impl Camera {
        fn new() -> Self {
            let parts =
                vec![Space::Discrete { n: 3 }, Space::Bytes { shape: vec![1, 2] }, Space::unbounded([1])];
            Self(Spaces { observation: Space::Tuple { parts }, action: Space::Bytes { shape: vec![1] } })
        }
    }

    impl Env for Camera {
        fn spaces(&self) -> &Spaces {
            &self.0
        }
        fn reset(&mut self, _: u64, mut observation: ValuesMut<'_>) -> Result<()> {
            observation.copy_from(Values { floats: &[0.5], ints: &[2], bytes: &[7, 8] });
            Ok(())
        }
        fn step(&mut self, _: Values<'_>, _: ValuesMut<'_>) -> Result<Step> {
            Ok(Step::default())
        }
    }

    #[test]
    fn bytes_stay_bytes_in_front_of_what_becomes_floats() {
        let shown = |names: &[&str]| {
            let mut env = Wrapped::new(Camera::new(), Wrappers::named(names).unwrap()).unwrap();
            let mut seen = Row::of(&env.spaces().observation);
            env.reset(0, seen.as_mut()).unwrap();
            assert_eq!(seen.bytes[2..], vec![0; seen.bytes.len() - 2], "no action yet");
            env.step(Values { bytes: &[9], ..Values::default() }, seen.as_mut()).unwrap();
            (env.spaces().observation.clone(), seen)
        };
        let Space::Tuple { parts: plain } = Camera::new().0.observation else { panic!("a tuple") };
        let (camera, told) = (plain[1].clone(), Space::Bytes { shape: vec![1] });

        let (space, seen) = shown(&["previous_action", "first_step"]);
        let more = vec![told.clone(), Space::Discrete { n: 2 }];
        assert_eq!(space, Space::Tuple { parts: [plain, more].concat() });
        assert_eq!(seen, Row { floats: vec![0.5], ints: vec![2, 0], bytes: vec![7, 8, 9] });

        let (space, seen) = shown(&["previous_action", "one_hot"]);
        let Space::Tuple { parts } = &space else { panic!("a tuple") };
        assert_eq!(parts[..2], [camera.clone(), told]);
        assert_eq!((parts[2].widths().floats, parts.len()), (4, 3));
        assert_eq!(seen, Row { floats: vec![0.0, 0.0, 1.0, 0.5], ints: vec![], bytes: vec![7, 8, 9] });

        let (space, seen) = shown(&["as_floats"]);
        assert_eq!(
            (space.leaves().len(), &seen.floats[..], &seen.bytes[..]),
            (2, &[2.0, 0.5][..], &[7, 8][..])
        );

        let error = Wrapped::new(Camera::new(), Wrappers::named(&["flat_action"]).unwrap()).err().unwrap();
        assert!(error.to_string().contains("discrete actions"), "{error}");
        let only = Spaces { observation: camera.clone(), action: Space::Discrete { n: 2 } };
        let wrapping = Wrapping::new(&only, Wrappers::named(&["one_hot"]).unwrap()).unwrap();
        assert_eq!(wrapping.spaces().observation, camera, "nothing to encode");
    }

    #[test]
    fn wrappers_read_from_json_with_defaults() {
        let read = |text: &str| serde_json::from_str::<Wrappers>(text);
        assert!(read("{}").unwrap().is_none());
        assert_eq!(read(r#"{"first_step":true}"#).unwrap().names(), ["first_step"]);
        assert!(read(r#"{"firststep":true}"#).is_err());
        for (text, names) in [
            (r#"{"one_hot":true,"as_floats":false}"#, vec!["one_hot"]),
            (r#"{"as_floats":true,"flat_action":true}"#, vec!["as_floats", "flat_action"]),
            (r#"{"encoding":"one_hot"}"#, vec!["one_hot"]),
        ] {
            let wrappers = read(text).unwrap();
            assert_eq!(wrappers.names(), names, "{text}");
            assert_eq!(Wrappers::named(&names).unwrap(), wrappers);
            assert_eq!(read(&serde_json::to_string(&wrappers).unwrap()).unwrap(), wrappers);
        }
        assert!(Wrappers::named(&["one_hot", "as_floats"]).unwrap_err().to_string().contains("both"));
        assert!(Wrappers::named(&["onehot"]).unwrap_err().to_string().contains("previous_action"));
    }
}
