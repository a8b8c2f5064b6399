//! POPGym's 48 partially observable tasks: sixteen families in three difficulties, with the semantics of
//! version 1.0.7.
//!
//! - [`Task`] names a task; ids are those of the Python package (`popgym-AutoencodeEasy-v0`).
//! - Every family is an [`Env`](crate::Env) that also implements [`Replay`]: an episode can be started from a
//!   given hidden state and stepped with given random numbers, so that traces of the Python package replay
//!   exactly ([`trace`]).
//! - Every family has a [`Player`](crate::Player) that plays it well from observations alone.
//!
//!   | its player accepts ([`Player::accept`](crate::Player::accept)) | |
//!   |---|---|
//!   | Autoencode, RepeatPrevious | any suit while answers do not count |
//!   | Battleship | all cells where a ship is as likely |
//!   | Concentration | all unseen cards, all cards of known pairs, or all known partners |
//!   | CountRecall | any number where the right one is no action (version 1.0.6) |
//!   | HigherLower | both answers where they are equally likely |
//!   | LabyrinthEscape, LabyrinthExplore | the ways to all unknown rooms that are equally promising or near |
//!   | MineSweeper | all cells surely clear; else all of equal expected return or chance to survive |
//!   | MultiarmedBandit | all arms with the largest index |
//!   | others | only what it does |
//!
//! - [`Task::make`] and [`Task::player`] make both; [`Task::visit`] gives access to their concrete types, for
//!   loops that must be fast.

mod autoencode;
mod bandit;
mod battleship;
mod body;
mod cartpole;
mod concentration;
mod count_recall;
mod deck;
mod higher_lower;
mod labyrinth;
mod mine_sweeper;
mod noise;
mod pendulum;
mod repeat;
mod replay;
mod table;
mod task;
pub mod trace;

pub use autoencode::{Autoencode, AutoencodePlayer};
pub use bandit::{MultiarmedBandit, MultiarmedBanditPlayer};
pub use battleship::{Battleship, BattleshipPlayer, Ships};
pub use body::{Exact, Noisy};
pub use cartpole::{
    Cart, NoisyPositionOnlyCartPole, NoisyPositionOnlyCartPolePlayer, PositionOnlyCartPole,
    PositionOnlyCartPolePlayer, VelocityOnlyCartpole, VelocityOnlyCartpolePlayer,
};
pub use concentration::{Concentration, ConcentrationPlayer};
pub use count_recall::{CountRecall, CountRecallPlayer};
pub use higher_lower::{HigherLower, HigherLowerPlayer};
pub use labyrinth::{LabyrinthEscape, LabyrinthEscapePlayer, LabyrinthExplore, LabyrinthExplorePlayer};
pub use mine_sweeper::{MineSweeper, MineSweeperPlayer, Mines};
pub use pendulum::{
    NoisyPositionOnlyPendulum, NoisyPositionOnlyPendulumPlayer, Pendulum, PositionOnlyPendulum,
    PositionOnlyPendulumPlayer,
};
pub use repeat::{RepeatFirst, RepeatFirstPlayer, RepeatPrevious, RepeatPreviousPlayer};
pub use replay::Replay;
pub(crate) use table::Popgym;
pub use table::Visit;
pub use task::{Difficulty, Family, Task, Version};
