//! Columns: which there are in an episode, their element types and widths.

use std::fmt;

use elmur_base::{Leaf, Space, Spaces};
use serde::{Deserialize, Serialize};

use crate::episode::joint_choices;
use crate::packed::frame_of;

/// Element type of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ElementType {
    /// 32-bit floats, for boxes.
    F32,
    /// 32-bit integers, for discrete leaves.
    I32,
    /// Bytes, for leaves of bytes and for boxes of pixels, where byte `b` is the number b / 255.
    U8,
}

impl ElementType {
    /// Bytes per element.
    pub fn size(self) -> usize {
        if self == ElementType::U8 { 1 } else { 4 }
    }

    /// The name in files and messages.
    pub fn name(self) -> &'static str {
        match self {
            ElementType::F32 => "f32",
            ElementType::I32 => "i32",
            ElementType::U8 => "u8",
        }
    }
}

/// One of the columns that an episode is recorded in, with one row per step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Leaf `i` of the observation, [T, leaf length], or [T + 1, leaf length] with the observation after the
    /// last action.
    Observation(usize),
    /// Leaf `i` of the action, [T, leaf length].
    Action(usize),
    /// Leaf `i` of the action to imitate, [T, leaf length]; recorded only where [`Outline::labelled`], otherwise it
    /// is the action that was taken.
    Label(usize),
    /// Choices that are as good as the action to imitate, [T, choices], as bool; recorded only where
    /// [`Outline::tied`].
    Accepted,
    /// Rewards, `[T]`, as f32.
    Reward,
    /// Whether each step's action is worth imitating, `[T]`, as bool; recorded only where
    /// [`Outline::marked`].
    Imitate,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Part::Observation(leaf) => write!(f, "observation leaf {leaf}"),
            Part::Action(leaf) => write!(f, "action leaf {leaf}"),
            Part::Label(leaf) => write!(f, "label leaf {leaf}"),
            Part::Accepted => write!(f, "accepted"),
            Part::Reward => write!(f, "reward"),
            Part::Imitate => write!(f, "imitate"),
        }
    }
}

/// Element type and width of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnType {
    /// Element type of the column.
    pub element: ElementType,
    /// Numbers per row.
    pub width: usize,
    /// How a row of bytes is a picture that native files pack; none for other columns.
    pub(crate) frame: Option<Frame>,
}

/// A picture: channels, each of which has all its pixels side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) channels: usize,
    /// Height times width.
    pub(crate) pixels: usize,
}

impl Frame {
    /// Bytes of a picture.
    pub(crate) fn len(self) -> usize {
        self.channels * self.pixels
    }
}

/// Element types and widths of all columns of an episode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// One per leaf of the observation space.
    pub observations: Vec<ColumnType>,
    /// One per leaf of the action space.
    pub actions: Vec<ColumnType>,
    /// Number of choices of a discrete action, all combinations of its integers counted; 0 for others.
    pub choices: usize,
}

impl Layout {
    /// The layout of columns that have the leaves' widths and the given element types.
    pub fn new(spaces: &Spaces, observations: &[ElementType], actions: &[ElementType]) -> Self {
        let columns = |space: &Space, types: &[ElementType], seen: bool| {
            let column = |(element, leaf): (&ElementType, Leaf<'_>)| ColumnType {
                element: *element,
                width: leaf.len(),
                frame: if seen { frame_of(&leaf, *element) } else { None },
            };
            types.iter().zip(space.leaves()).map(column).collect()
        };
        Self {
            observations: columns(&spaces.observation, observations, true),
            actions: columns(&spaces.action, actions, false),
            choices: joint_choices(&spaces.action),
        }
    }

    /// Numbers per row of a column, and the name of the type that it is read in: f32, i32, u8 or bool. None
    /// for a leaf that the spaces do not have.
    pub fn column(&self, part: Part) -> Option<(&'static str, usize)> {
        let leaf =
            |columns: &[ColumnType], leaf: usize| columns.get(leaf).map(|c| (c.element.name(), c.width));
        match part {
            Part::Observation(i) => leaf(&self.observations, i),
            Part::Action(i) | Part::Label(i) => leaf(&self.actions, i),
            Part::Accepted => Some(("bool", self.choices)),
            Part::Reward => Some(("f32", 1)),
            Part::Imitate => Some(("bool", 1)),
        }
    }
}

/// What is known of an episode without reading its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outline {
    /// T, the number of actions taken, at least 1.
    pub steps: usize,
    /// Whether the observation after the last action was recorded: T + 1 observations instead of T.
    pub final_observation: bool,
    /// Whether the task had ended.
    pub terminated: bool,
    /// Whether the episode was cut off, by a time limit for example.
    pub truncated: bool,
    /// Whether steps are marked as worth imitating or not; otherwise all are.
    pub marked: bool,
    /// Whether the actions to imitate were recorded beside those that were taken.
    pub labelled: bool,
    /// Whether choices that are as good as the one to imitate were recorded.
    pub tied: bool,
}

impl Outline {
    /// Number of rows of a column of this episode.
    pub fn rows(&self, part: Part) -> usize {
        match part {
            Part::Observation(_) => self.steps + usize::from(self.final_observation),
            Part::Action(_) | Part::Reward => self.steps,
            Part::Imitate if self.marked => self.steps,
            Part::Label(_) if self.labelled => self.steps,
            Part::Accepted if self.tied => self.steps,
            Part::Imitate | Part::Label(_) | Part::Accepted => 0,
        }
    }
}
