//! Episodes: observations, actions and rewards as flat columns.
//!
//! There is one column per leaf of a space ([`elmur_base::Space::leaves`]), with one row per step: [rows,
//! leaf length].

use elmur_base::{FieldMut, Leaf, Row, Space, Spaces, Values, bound_at};
use elmur_envs::Choices;

use crate::error::{Fault, Result};
use crate::layout::{ElementType, Layout, Outline};

/// The numbers of one leaf, [rows, leaf length].
#[derive(Debug, Clone, PartialEq)]
pub enum Column {
    /// Numbers of a box.
    F32(Vec<f32>),
    /// Numbers of a discrete leaf.
    I32(Vec<i32>),
    /// Bytes, or numbers of a box as pixels: byte `b` is the number b / 255.
    U8(Vec<u8>),
}

/// A borrowed [`Column`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ColumnRef<'a> {
    /// Numbers of a box.
    F32(&'a [f32]),
    /// Numbers of a discrete leaf.
    I32(&'a [i32]),
    /// Bytes, or numbers of a box as pixels: byte `b` is the number b / 255.
    U8(&'a [u8]),
}

impl Column {
    /// A column of `len` zeros.
    pub fn zeros(element: ElementType, len: usize) -> Self {
        match element {
            ElementType::F32 => Column::F32(vec![0.0; len]),
            ElementType::I32 => Column::I32(vec![0; len]),
            ElementType::U8 => Column::U8(vec![0; len]),
        }
    }

    /// The column as a place to write to.
    pub fn as_mut(&mut self) -> FieldMut<'_> {
        match self {
            Column::F32(x) => FieldMut::F32(x),
            Column::I32(x) => FieldMut::I32(x),
            Column::U8(x) => FieldMut::U8(x),
        }
    }

    /// The first `len` numbers as a place to write to.
    pub(crate) fn first(&mut self, len: usize) -> FieldMut<'_> {
        match self {
            Column::F32(x) => FieldMut::F32(&mut x[..len]),
            Column::I32(x) => FieldMut::I32(&mut x[..len]),
            Column::U8(x) => FieldMut::U8(&mut x[..len]),
        }
    }

    /// Borrows the column.
    pub fn view(&self) -> ColumnRef<'_> {
        match self {
            Column::F32(x) => ColumnRef::F32(x),
            Column::I32(x) => ColumnRef::I32(x),
            Column::U8(x) => ColumnRef::U8(x),
        }
    }

    /// Number of numbers, of all rows.
    pub fn len(&self) -> usize {
        self.view().len()
    }

    /// Whether the column has no numbers.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ColumnRef<'_> {
    /// Number of numbers, of all rows.
    pub fn len(&self) -> usize {
        match self {
            ColumnRef::F32(x) => x.len(),
            ColumnRef::I32(x) => x.len(),
            ColumnRef::U8(x) => x.len(),
        }
    }

    /// Whether the column has no numbers.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type of the column.
    pub fn element_type(&self) -> ElementType {
        match self {
            ColumnRef::F32(_) => ElementType::F32,
            ColumnRef::I32(_) => ElementType::I32,
            ColumnRef::U8(_) => ElementType::U8,
        }
    }

    /// Copies the column.
    pub fn to_column(&self) -> Column {
        match *self {
            ColumnRef::F32(x) => Column::F32(x.to_vec()),
            ColumnRef::I32(x) => Column::I32(x.to_vec()),
            ColumnRef::U8(x) => Column::U8(x.to_vec()),
        }
    }
}

/// One episode of T steps, T >= 1: observation t was seen, action t taken, reward t received.
#[derive(Debug, Clone, PartialEq)]
pub struct Episode {
    /// One column per leaf of the observation space, [T, leaf length], or [T + 1, leaf length] with the
    /// observation after the last action.
    pub observations: Vec<Column>,
    /// One column per leaf of the action space, [T, leaf length].
    pub actions: Vec<Column>,
    /// Rewards, `[T]`.
    pub rewards: Vec<f32>,
    /// Whether the task had ended.
    pub terminated: bool,
    /// Whether the episode was cut off, by a time limit for example.
    pub truncated: bool,
    /// Whether each step's action is worth imitating, `[T]`; none means all are.
    pub imitate: Option<Vec<bool>>,
    /// The actions to imitate where others were taken: one column per leaf of the action space, [T, leaf length];
    /// none: those that were taken.
    pub labels: Option<Vec<Column>>,
    /// Choices of a discrete action that are as good as the one to imitate, [T, choices] (of several integers: all
    /// combinations, the last integer running fastest); none: no other.
    pub accepted: Option<Vec<bool>>,
}

/// A borrowed [`Episode`]: what datasets hand out.
#[derive(Debug, Clone, PartialEq)]
pub struct EpisodeRef<'a> {
    /// One column per leaf of the observation space; see [`Episode::observations`].
    pub observations: Vec<ColumnRef<'a>>,
    /// One column per leaf of the action space, [T, leaf length].
    pub actions: Vec<ColumnRef<'a>>,
    /// Rewards, `[T]`.
    pub rewards: &'a [f32],
    /// Whether the task had ended.
    pub terminated: bool,
    /// Whether the episode was cut off, by a time limit for example.
    pub truncated: bool,
    /// Whether each step's action is worth imitating, `[T]`; none means all are.
    pub imitate: Option<&'a [bool]>,
    /// The actions to imitate where others were taken; see [`Episode::labels`].
    pub labels: Option<Vec<ColumnRef<'a>>>,
    /// Choices that are as good as the one to imitate; see [`Episode::accepted`].
    pub accepted: Option<&'a [bool]>,
}

impl Episode {
    /// An episode without steps, to record in: see [`Column::append`].
    pub fn empty(spaces: &Spaces) -> Self {
        Self {
            observations: Column::of(&spaces.observation),
            actions: Column::of(&spaces.action),
            rewards: Vec::new(),
            terminated: false,
            truncated: false,
            imitate: None,
            labels: None,
            accepted: None,
        }
    }

    /// Borrows the episode.
    pub fn view(&self) -> EpisodeRef<'_> {
        EpisodeRef {
            observations: self.observations.iter().map(Column::view).collect(),
            actions: self.actions.iter().map(Column::view).collect(),
            rewards: &self.rewards,
            terminated: self.terminated,
            truncated: self.truncated,
            imitate: self.imitate.as_deref(),
            labels: self.labels.as_ref().map(|labels| labels.iter().map(Column::view).collect()),
            accepted: self.accepted.as_deref(),
        }
    }

    /// T, the number of actions taken.
    pub fn steps(&self) -> usize {
        self.rewards.len()
    }

    /// Sum of the rewards.
    pub fn episode_return(&self) -> f64 {
        self.view().episode_return()
    }

    /// What an index would know of the episode, for columns of this layout.
    pub(crate) fn outline(&self, layout: &Layout) -> Outline {
        let sized = layout.observations.iter().zip(&self.observations).find(|(column, _)| column.width > 0);
        let steps = self.steps();
        Outline {
            steps,
            final_observation: sized.is_some_and(|(column, data)| data.len() == (steps + 1) * column.width),
            terminated: self.terminated,
            truncated: self.truncated,
            marked: self.imitate.is_some(),
            labelled: self.labels.is_some(),
            tied: self.accepted.is_some(),
        }
    }
}

impl<'a> From<&'a Episode> for EpisodeRef<'a> {
    fn from(episode: &'a Episode) -> Self {
        episode.view()
    }
}

impl EpisodeRef<'_> {
    /// T, the number of actions taken.
    pub fn steps(&self) -> usize {
        self.rewards.len()
    }

    /// Sum of the rewards.
    pub fn episode_return(&self) -> f64 {
        self.rewards.iter().map(|r| f64::from(*r)).sum()
    }

    /// Number of steps whose action is worth imitating.
    pub fn imitated_steps(&self) -> usize {
        self.imitate.map_or(self.steps(), |imitate| imitate.iter().filter(|imitate| **imitate).count())
    }

    /// Whether the observation after the last action was recorded: T + 1 observations instead of T.
    pub fn has_final_observation(&self, spaces: &Spaces) -> bool {
        let leaves = spaces.observation.leaves();
        let sized = leaves.iter().zip(&self.observations).find(|(leaf, _)| !leaf.is_empty());
        sized.is_some_and(|(leaf, column)| column.len() == (self.steps() + 1).saturating_mul(leaf.len()))
    }

    /// Copies the episode.
    pub fn to_episode(&self) -> Episode {
        Episode {
            observations: self.observations.iter().map(ColumnRef::to_column).collect(),
            actions: self.actions.iter().map(ColumnRef::to_column).collect(),
            rewards: self.rewards.to_vec(),
            terminated: self.terminated,
            truncated: self.truncated,
            imitate: self.imitate.map(<[bool]>::to_vec),
            labels: self.labels.as_ref().map(|labels| labels.iter().map(ColumnRef::to_column).collect()),
            accepted: self.accepted.map(<[bool]>::to_vec),
        }
    }

    /// Checks that the episode belongs to these spaces: the right number of numbers of the right type,
    /// observations and integers within bounds, everything finite. Continuous actions may exceed their
    /// bounds, as those of real experts do.
    pub fn validate(&self, spaces: &Spaces) -> Result<(), Fault> {
        if let Err(problem) = spaces.validate() {
            return Fault::new("spaces", "spaces that make sense", problem, "correct the spaces");
        }
        self.check(spaces)
    }

    /// [`Self::validate`] for spaces that are known to be valid.
    pub(crate) fn check(&self, spaces: &Spaces) -> Result<(), Fault> {
        let steps = self.steps();
        check_steps(steps)?;
        let seen = steps + usize::from(self.has_final_observation(spaces));
        check_columns("observation", &self.observations, &spaces.observation, seen, true)?;
        check_columns("action", &self.actions, &spaces.action, steps, false)?;
        if let Some(labels) = &self.labels {
            check_columns("label", labels, &spaces.action, steps, false)?;
        }
        let choices = joint_choices(&spaces.action);
        if let Some(accepted) = self
            .accepted
            .filter(|accepted| choices == 0 || Some(accepted.len()) != steps.checked_mul(choices))
        {
            let expected = format!("{steps} rows of {choices} choices, of a discrete action");
            return Fault::new("accepted", expected, accepted.len(), CORRECT);
        }
        check_rewards(self.rewards, 0)?;
        match self.imitate {
            Some(imitate) if imitate.len() != steps => {
                Fault::new("imitate", format!("{steps}, one per step"), imitate.len(), CORRECT)
            }
            _ => Ok(()),
        }
    }
}

/// Number of choices of a discrete action, counting all combinations of its integers; 0 if the action is not
/// discrete or there are too many to list.
pub(crate) fn joint_choices(action: &Space) -> usize {
    Choices::of(action).map(|choices| choices.count()).filter(|count| *count <= 1 << 16).unwrap_or(0)
}

impl Column {
    /// Empty columns for the leaves of a space, to record values in.
    pub fn of(space: &Space) -> Vec<Column> {
        space.leaves().iter().map(|leaf| Column::zeros(own_type(leaf), 0)).collect()
    }

    /// Appends one value of a space to its columns.
    pub fn append(columns: &mut [Column], value: &Row, space: &Space) {
        let Values { mut floats, mut ints, mut bytes } = value.values();
        for (leaf, column) in space.leaves().iter().zip(columns) {
            match column {
                Column::F32(data) => {
                    data.extend_from_slice(floats.split_off(..leaf.len()).unwrap_or_default());
                }
                Column::I32(data) => data.extend_from_slice(ints.split_off(..leaf.len()).unwrap_or_default()),
                Column::U8(data) => data.extend_from_slice(bytes.split_off(..leaf.len()).unwrap_or_default()),
            }
        }
    }
}

/// The element type that a leaf is recorded in by those who have its numbers as [`Values`].
pub(crate) fn own_type(leaf: &Leaf<'_>) -> ElementType {
    match leaf {
        Leaf::Ints(_) => ElementType::I32,
        Leaf::Floats { .. } => ElementType::F32,
        Leaf::Bytes { .. } => ElementType::U8,
    }
}

const CORRECT: &str = "correct the recording";
const KIND: &str = "record discrete leaves as i32, boxes as f32 or u8, bytes as u8";
const RANGE: &str = "correct the recording, or widen the space";

fn check_columns(
    role: &str,
    columns: &[ColumnRef<'_>],
    space: &Space,
    rows: usize,
    bounded: bool,
) -> Result<(), Fault> {
    let leaves = space.leaves();
    if columns.len() != leaves.len() {
        let expected = format!("{} columns, one per leaf of the space", leaves.len());
        return Fault::new(format!("{role}s"), expected, columns.len(), "are these the right spaces?");
    }
    for (number, (leaf, column)) in leaves.iter().zip(columns).enumerate() {
        let (name, width) = (format!("{role} leaf {number}"), leaf.len());
        if !fits(leaf, column.element_type()) {
            let expected = match leaf {
                Leaf::Ints(_) => "i32",
                Leaf::Floats { .. } => "f32 or u8",
                Leaf::Bytes { .. } => "u8",
            };
            return Fault::new(name, expected, column.element_type().name(), KIND);
        }
        if column.len() != rows.saturating_mul(width) {
            let more = if bounded { " (or one row more)" } else { "" };
            let expected = format!("{rows} rows of {width} numbers{more}");
            return Fault::new(name, expected, format!("{} numbers", column.len()), CORRECT);
        }
        misfit_fault(&name, leaf, *column, bounded, 0)?;
    }
    Ok(())
}

/// Checks that an episode has steps.
pub(crate) fn check_steps(steps: usize) -> Result<(), Fault> {
    if steps == 0 {
        return Fault::new("rewards", "at least one step", "none", "leave episodes without steps out");
    }
    Ok(())
}

/// Checks the rewards of the steps from `first` on.
pub(crate) fn check_rewards(rewards: &[f32], first: usize) -> Result<(), Fault> {
    match rewards.iter().position(|r| !r.is_finite()) {
        Some(i) => {
            Fault::new(format!("reward of step {}", first + i), "a finite number", rewards[i], CORRECT)
        }
        None => Ok(()),
    }
}

/// Checks the numbers of some rows of a column called `name`, the first of which is row `first`.
pub(crate) fn misfit_fault(
    name: &str,
    leaf: &Leaf<'_>,
    column: ColumnRef<'_>,
    bounded: bool,
    first: usize,
) -> Result<(), Fault> {
    match misfit(leaf, column, bounded) {
        Some((step, entry, expected, got)) => {
            Fault::new(format!("{name}, step {}, entry {entry}", first + step), expected, got, RANGE)
        }
        None => Ok(()),
    }
}

/// Whether a leaf can be recorded in this element type.
pub(crate) fn fits(leaf: &Leaf<'_>, element: ElementType) -> bool {
    match leaf {
        Leaf::Ints(_) => element == ElementType::I32,
        Leaf::Floats { .. } => element != ElementType::I32,
        Leaf::Bytes { .. } => element == ElementType::U8,
    }
}

/// The first number that does not belong to the leaf: its row, its index in the row, what was expected, what
/// was found.
fn misfit(leaf: &Leaf<'_>, column: ColumnRef<'_>, bounded: bool) -> Option<(usize, usize, String, String)> {
    let width = leaf.len();
    let bounds = |entry: usize| match leaf {
        Leaf::Floats { low, high, .. } if bounded => (bound_at(low, entry), bound_at(high, entry)),
        _ => (f32::MIN, f32::MAX),
    };
    let within = |entry: usize, x: f32| {
        let (low, high) = bounds(entry);
        x.is_finite() && low <= x && x <= high
    };
    let report = |step: usize, entry: usize, x: f32| {
        let expected = match bounds(entry) {
            (f32::MIN, f32::MAX) => "a finite number".to_owned(),
            (low, high) => format!("a finite number from {low} to {high}"),
        };
        (step, entry, expected, x.to_string())
    };
    match (leaf, column) {
        (Leaf::Ints(sizes), ColumnRef::I32(x)) => {
            let inside = |entry: usize, x: i32| usize::try_from(x).is_ok_and(|x| x < sizes[entry]);
            let (step, entry, x) = first(x, width, inside)?;
            Some((step, entry, format!("an integer from 0 to {}", sizes[entry] - 1), x.to_string()))
        }
        (Leaf::Bytes { .. }, _) => None,
        (_, ColumnRef::F32(x)) => first(x, width, within).map(|(step, entry, x)| report(step, entry, x)),
        (_, ColumnRef::U8(x)) => {
            if (0..width).all(|entry| within(entry, 0.0) && within(entry, 1.0)) {
                return None;
            }
            let (step, entry, x) = first(x, width, |entry, x| within(entry, pixel(x)))?;
            Some(report(step, entry, pixel(x)))
        }
        (_, ColumnRef::I32(_)) => None,
    }
}

/// The number that a byte stands for, to policies and in boxes.
pub(crate) fn pixel(byte: u8) -> f32 {
    f32::from(byte) / 255.0
}

/// Row, index in the row, and value of the first number that is not `ok`.
fn first<T: Copy>(x: &[T], width: usize, ok: impl Fn(usize, T) -> bool) -> Option<(usize, usize, T)> {
    let rows = x.chunks_exact(width.max(1)).enumerate();
    rows.flat_map(|(row, x)| x.iter().enumerate().map(move |(entry, x)| (row, entry, *x)))
        .find(|(_, entry, x)| !ok(*entry, *x))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spaces() -> Spaces {
        let image = Space::between(0.0, 1.0, [1, 2]);
        Spaces {
            observation: Space::Tuple { parts: vec![Space::MultiDiscrete { sizes: vec![3, 2] }, image] },
            action: Space::between(-1.0, 1.0, [1]),
        }
    }

    fn episode() -> Episode {
        Episode {
            observations: vec![Column::I32(vec![2, 1, 0, 0, 1, 1]), Column::U8(vec![0, 255, 1, 2, 3, 4])],
            actions: vec![Column::F32(vec![0.5, -7.0])],
            rewards: vec![1.0, 0.5],
            terminated: true,
            truncated: false,
            imitate: Some(vec![true, false]),
            labels: None,
            accepted: None,
        }
    }

    fn fault(change: impl FnOnce(&mut Episode)) -> String {
        let mut episode = episode();
        change(&mut episode);
        episode.view().validate(&spaces()).unwrap_err().to_string()
    }

    #[test]
    fn a_fitting_episode_passes_and_counts_its_steps() {
        let episode = episode();
        episode.view().validate(&spaces()).unwrap();
        assert_eq!((episode.steps(), episode.episode_return(), episode.view().imitated_steps()), (2, 1.5, 1));
        assert!(episode.view().has_final_observation(&spaces()));
        assert_eq!(episode.view().to_episode(), episode);
    }

    #[test]
    fn a_misfit_is_named_with_step_and_bounds() {
        let text = fault(|e| e.observations[0] = Column::I32(vec![2, 1, 0, 2, 1, 1]));
        assert!(
            text.contains("observation leaf 0, step 1, entry 1: expected an integer from 0 to 1, got 2"),
            "{text}"
        );
        let text = fault(|e| e.observations[1] = Column::F32(vec![0.0, 1.0, 0.5, f32::NAN, 0.0, 0.0]));
        assert!(
            text.contains("leaf 1, step 1, entry 1: expected a finite number from 0 to 1, got NaN"),
            "{text}"
        );
        let text = fault(|e| e.observations[1] = Column::F32(vec![0.0, 1.0, 0.5, 1.0, 0.0, 1.5]));
        assert!(text.contains("step 2, entry 1") && text.contains("got 1.5"), "{text}");
        let text = fault(|e| e.actions[0] = Column::F32(vec![0.0, f32::INFINITY]));
        assert!(text.contains("action leaf 0, step 1, entry 0: expected a finite number, got inf"), "{text}");
        let text = fault(|e| e.rewards[1] = f32::NEG_INFINITY);
        assert!(text.contains("reward of step 1"), "{text}");
    }

    #[test]
    fn wrong_shapes_and_kinds_are_refused() {
        assert!(fault(|e| e.observations[0] = Column::F32(vec![0.0; 6])).contains("expected i32, got f32"));
        assert!(fault(|e| e.actions[0] = Column::I32(vec![0; 2])).contains("expected f32 or u8, got i32"));
        assert!(fault(|e| e.actions[0] = Column::F32(vec![0.0; 3])).contains("2 rows of 1 numbers, got 3"));
        // The first column decides whether there is a final observation; the others must agree.
        assert!(fault(|e| e.observations[1] = Column::U8(vec![0; 4])).contains("3 rows of 2 numbers"));
        assert!(fault(|e| e.observations.truncate(1)).contains("2 columns, one per leaf"));
        assert!(fault(|e| e.imitate = Some(vec![true])).contains("2, one per step, got 1"));
        assert!(fault(|e| e.rewards.clear()).contains("at least one step"));
    }

    #[test]
    fn leaves_of_bytes_are_recorded_as_bytes() {
        let spaces =
            Spaces { observation: Space::Bytes { shape: vec![2] }, action: Space::Discrete { n: 1 } };
        let mut episode = Episode {
            observations: vec![Column::U8(vec![0, 255])],
            actions: vec![Column::I32(vec![0])],
            rewards: vec![0.0],
            terminated: true,
            truncated: false,
            imitate: None,
            labels: None,
            accepted: None,
        };
        episode.view().validate(&spaces).unwrap();
        for wrong in [Column::F32(vec![0.0, 1.0]), Column::I32(vec![0, 1])] {
            episode.observations[0] = wrong;
            let text = episode.view().validate(&spaces).unwrap_err().to_string();
            assert!(text.contains("observation leaf 0: expected u8, got"), "{text}");
        }
    }

    #[test]
    fn pixels_stand_for_numbers_from_0_to_1() {
        let dark = Spaces { observation: Space::between(0.0, 0.5, [2]), action: Space::Discrete { n: 1 } };
        let mut episode = Episode {
            observations: vec![Column::U8(vec![127, 0])],
            actions: vec![Column::I32(vec![0])],
            rewards: vec![0.0],
            terminated: false,
            truncated: false,
            imitate: None,
            labels: None,
            accepted: None,
        };
        episode.view().validate(&dark).unwrap();
        episode.observations[0] = Column::U8(vec![0, 128]);
        assert!(
            episode.view().validate(&dark).unwrap_err().to_string().contains("from 0 to 0.5, got 0.50196")
        );
    }
}
