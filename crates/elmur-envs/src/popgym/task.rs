//! Names of the 48 tasks: family, difficulty and version of the rules.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Difficulty of a task. What it changes differs from family to family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Difficulty {
    /// The easiest setting.
    Easy,
    /// The middle setting.
    Medium,
    /// The hardest setting.
    Hard,
}

impl Difficulty {
    /// All three, easiest first.
    pub const ALL: [Difficulty; 3] = [Difficulty::Easy, Difficulty::Medium, Difficulty::Hard];

    /// The name in ids: Easy, Medium or Hard.
    pub fn name(self) -> &'static str {
        ["Easy", "Medium", "Hard"][self as usize]
    }

    /// Picks the setting of this difficulty out of three, easiest first.
    pub(crate) fn pick<T: Copy>(self, settings: [T; 3]) -> T {
        settings[self as usize]
    }
}

/// Version of the Python package whose rules a task follows, where versions differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Version {
    /// 1.0.6, which the published experiments used: CountRecall lacks the largest answer, and MineSweeper is
    /// cut off one step later.
    #[serde(rename = "1.0.6")]
    V106,
    /// 1.0.7, the default.
    #[default]
    #[serde(rename = "1.0.7")]
    V107,
}

impl Version {
    /// The name in configs and files.
    pub fn name(self) -> &'static str {
        match self {
            Version::V106 => "1.0.6",
            Version::V107 => "1.0.7",
        }
    }

    /// The version of this name.
    pub fn find(name: &str) -> Result<Self> {
        [Version::V106, Version::V107].into_iter().find(|version| version.name() == name).ok_or_else(|| {
            let (expected, got) = ("1.0.6 or 1.0.7".to_owned(), name.to_owned());
            Error::Config { key: "version".to_owned(), expected, got }
        })
    }
}

macro_rules! families {
    ($($name:ident, $doc:literal;)*) => {
        /// A family of POPGym tasks; each has three difficulties.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Family { $(#[doc = $doc] $name,)* }

        impl Family {
            /// All sixteen families, in the order of their names.
            pub const ALL: [Family; 16] = [$(Family::$name,)*];

            /// The name in ids.
            pub fn name(self) -> &'static str {
                match self { $(Family::$name => stringify!($name),)* }
            }

            /// What the tasks of the family ask for, in one sentence.
            pub fn summary(self) -> &'static str {
                match self { $(Family::$name => $doc,)* }
            }

            fn ids(self) -> [&'static str; 3] {
                match self { $(Family::$name => [
                    concat!("popgym-", stringify!($name), "Easy-v0"),
                    concat!("popgym-", stringify!($name), "Medium-v0"),
                    concat!("popgym-", stringify!($name), "Hard-v0"),
                ],)* }
            }
        }
    };
}

families! {
    Autoencode, "Watch a deck of cards, then name their suits from the last to the first.";
    Battleship, "Sink four hidden ships.";
    Concentration, "Turn cards over two at a time and find all pairs.";
    CountRecall, "Say how often a card has been shown.";
    HigherLower, "Say whether the next card is higher or lower.";
    LabyrinthEscape, "Find the way out of a maze.";
    LabyrinthExplore, "Visit every cell of a maze.";
    MineSweeper, "Uncover every cell without a mine.";
    MultiarmedBandit, "Find the arm that pays best.";
    NoisyPositionOnlyCartPole, "Balance a pole from noisy positions.";
    NoisyPositionOnlyPendulum, "Swing a pendulum up from noisy angles.";
    PositionOnlyCartPole, "Balance a pole from positions without velocities.";
    PositionOnlyPendulum, "Swing a pendulum up from angles without speeds.";
    RepeatFirst, "Name the first card's suit for ever.";
    RepeatPrevious, "Name the suit seen k cards ago.";
    VelocityOnlyCartpole, "Balance a pole from velocities without positions.";
}

/// One of the 48 tasks of POPGym.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    /// Family of the task.
    pub family: Family,
    /// Difficulty of the task.
    pub difficulty: Difficulty,
}

impl Task {
    /// All 48 tasks, family by family, easiest first.
    pub fn all() -> impl Iterator<Item = Task> {
        let tasks = |family| Difficulty::ALL.map(|difficulty| Task { family, difficulty });
        Family::ALL.into_iter().flat_map(tasks)
    }

    /// The Python package's id, for example `popgym-AutoencodeEasy-v0`.
    pub fn id(self) -> &'static str {
        self.difficulty.pick(self.family.ids())
    }

    /// The id without the `-v0` at its end.
    pub fn name(self) -> &'static str {
        self.id().trim_end_matches("-v0")
    }

    /// Finds a task by its id, with or without the `-v0` at its end.
    pub fn find(id: &str) -> Option<Self> {
        let name = id.strip_suffix("-v0").unwrap_or(id);
        Self::all().find(|task| task.name() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_found_by_their_ids() {
        assert_eq!(Task::all().count(), 48);
        for task in Task::all() {
            assert_eq!(Task::find(task.id()), Some(task));
            assert_eq!(Task::find(task.name()), Some(task));
        }
        let task = Task { family: Family::VelocityOnlyCartpole, difficulty: Difficulty::Hard };
        assert_eq!(task.id(), "popgym-VelocityOnlyCartpoleHard-v0");
        assert_eq!(Task::find("popgym-VelocityOnlyCartpoleHard"), Some(task));
        assert_eq!(Task::find("popgym-VelocityOnlyCartPoleHard-v0"), None);
        assert_eq!(Task::find("AutoencodeEasy"), None);
    }
}
