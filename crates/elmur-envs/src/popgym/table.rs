//! The types of every task: the one place that knows all families.

use elmur_pool::Pool;

use super::pendulum::PendulumWithVelocity;
use super::replay::Replay;
use super::task::{Family, Task, Version};
use super::trace::{Report, Trace};
use super::*;
use crate::env::{Env, Player};
use crate::error::{Error, Result};
use crate::family::{self, EnvSpec, Facts, Metric, Purpose, Setting};
use crate::vec_env::{AnyVecEnv, VecEnv};

/// Code that needs the concrete types of a task, because a `Box<dyn Env>` would be too slow or know too
/// little. See [`Task::visit`].
pub trait Visit {
    /// What `visit` returns.
    type Output;

    /// Called with functions that make the environment and the player of a task.
    fn visit<E, P>(self, env: impl Fn() -> E, player: impl Fn() -> P) -> Self::Output
    where
        E: Replay + 'static,
        P: Player + 'static;
}

impl Task {
    /// Calls `visitor` with the concrete types of the task.
    pub fn visit<V: Visit>(self, version: Version, visitor: V) -> V::Output {
        let (d, v) = (self.difficulty, version);
        match self.family {
            Family::Autoencode => visitor.visit(|| Autoencode::new(d), || AutoencodePlayer::new(d)),
            Family::Battleship => visitor.visit(|| Battleship::new(d), || BattleshipPlayer::new(d)),
            Family::Concentration => visitor.visit(|| Concentration::new(d), || ConcentrationPlayer::new(d)),
            Family::CountRecall => visitor.visit(|| CountRecall::new(d, v), || CountRecallPlayer::new(d, v)),
            Family::HigherLower => visitor.visit(|| HigherLower::new(d), || HigherLowerPlayer::new(d)),
            Family::LabyrinthEscape => {
                visitor.visit(|| LabyrinthEscape::new(d), || LabyrinthEscapePlayer::new(d))
            }
            Family::LabyrinthExplore => {
                visitor.visit(|| LabyrinthExplore::new(d), || LabyrinthExplorePlayer::new(d))
            }
            Family::MineSweeper => visitor.visit(|| MineSweeper::new(d, v), || MineSweeperPlayer::new(d, v)),
            Family::MultiarmedBandit => {
                visitor.visit(|| MultiarmedBandit::new(d), || MultiarmedBanditPlayer::new(d))
            }
            Family::NoisyPositionOnlyCartPole => visitor
                .visit(|| NoisyPositionOnlyCartPole::new(d), || NoisyPositionOnlyCartPolePlayer::new(d)),
            Family::NoisyPositionOnlyPendulum => visitor
                .visit(|| NoisyPositionOnlyPendulum::new(d), || NoisyPositionOnlyPendulumPlayer::new(d)),
            Family::PositionOnlyCartPole => {
                visitor.visit(|| PositionOnlyCartPole::new(d), || PositionOnlyCartPolePlayer::new(d))
            }
            Family::PositionOnlyPendulum => {
                visitor.visit(|| PositionOnlyPendulum::new(d), || PositionOnlyPendulumPlayer::new(d))
            }
            Family::RepeatFirst => visitor.visit(|| RepeatFirst::new(d), RepeatFirstPlayer::default),
            Family::RepeatPrevious => {
                visitor.visit(|| RepeatPrevious::new(d), || RepeatPreviousPlayer::new(d))
            }
            Family::VelocityOnlyCartpole => {
                visitor.visit(|| VelocityOnlyCartpole::new(d), || VelocityOnlyCartpolePlayer::new(d))
            }
        }
    }

    /// Makes the environment.
    pub fn make(self, version: Version) -> Box<dyn Env> {
        struct Make;
        impl Visit for Make {
            type Output = Box<dyn Env>;
            fn visit<E, P>(self, env: impl Fn() -> E, _: impl Fn() -> P) -> Box<dyn Env>
            where
                E: Replay + 'static,
                P: Player + 'static,
            {
                Box::new(env())
            }
        }
        self.visit(version, Make)
    }

    /// Makes rows of the environment that the threads of a pool step, in a loop compiled for its type.
    pub fn make_rows(self, version: Version, rows: usize, pool: &Pool) -> Result<Box<dyn AnyVecEnv>> {
        struct Make<'a>(usize, &'a Pool);
        impl Visit for Make<'_> {
            type Output = Result<Box<dyn AnyVecEnv>>;
            fn visit<E, P>(self, env: impl Fn() -> E, _: impl Fn() -> P) -> Self::Output
            where
                E: Replay + 'static,
                P: Player + 'static,
            {
                Ok(Box::new(VecEnv::new((0..self.0).map(|_| env()).collect())?.with_pool(self.1)))
            }
        }
        self.visit(version, Make(rows, pool))
    }

    /// Makes a player that plays the task well from observations alone.
    pub fn player(self, version: Version) -> Box<dyn Player> {
        struct Make;
        impl Visit for Make {
            type Output = Box<dyn Player>;
            fn visit<E, P>(self, _: impl Fn() -> E, player: impl Fn() -> P) -> Box<dyn Player>
            where
                E: Replay + 'static,
                P: Player + 'static,
            {
                Box::new(player())
            }
        }
        self.visit(version, Make)
    }

    /// Mean return of good play from observations alone: the optimum where it is known, elsewhere the mean of
    /// our players in simulation.
    pub fn good_return(self) -> f64 {
        self.difficulty.pick(match self.family {
            Family::Battleship => [0.624, 0.653, 0.670],
            Family::Concentration => [0.814, 0.813, 0.698],
            Family::HigherLower => [0.5275, 0.516, 0.511],
            Family::LabyrinthEscape => [0.966, 0.934, 0.890],
            Family::LabyrinthExplore => [0.969, 0.927, 0.867],
            Family::MineSweeper => [0.766, 0.586, 0.596],
            Family::MultiarmedBandit => [0.729, 0.826, 0.863],
            Family::NoisyPositionOnlyCartPole => [0.993, 0.645, 0.38],
            Family::NoisyPositionOnlyPendulum => [0.90, 0.745, 0.69],
            Family::PositionOnlyPendulum => [0.911, 0.887, 0.826],
            Family::Autoencode
            | Family::CountRecall
            | Family::PositionOnlyCartPole
            | Family::RepeatFirst
            | Family::RepeatPrevious
            | Family::VelocityOnlyCartpole => [1.0; 3],
        })
    }

    /// Number of steps of the longest episode.
    pub fn max_steps(self) -> usize {
        self.difficulty.pick(match self.family {
            Family::Autoencode => [103, 207, 311],
            Family::Battleship => [64, 100, 144],
            Family::Concentration => [104, 208, 104],
            Family::CountRecall => [51, 103, 207],
            Family::HigherLower => [51, 103, 155],
            Family::LabyrinthEscape | Family::LabyrinthExplore => [1023; 3],
            Family::MineSweeper => [14, 30, 54],
            Family::MultiarmedBandit => [200, 400, 600],
            Family::PositionOnlyCartPole | Family::VelocityOnlyCartpole => [200, 400, 600],
            Family::NoisyPositionOnlyCartPole | Family::NoisyPositionOnlyPendulum => [200; 3],
            Family::PositionOnlyPendulum => [200, 150, 100],
            Family::RepeatFirst => [51, 415, 831],
            Family::RepeatPrevious => [51, 103, 155],
        })
    }
}

/// POPGym in the [`Registry`](crate::Registry): its 48 tasks by id, with or without their `-v0`.
pub(crate) struct Popgym;

const VERSION: &str = "version";
const VELOCITY: &str = "velocity";

impl Popgym {
    fn task(spec: &EnvSpec) -> Result<(Task, Version)> {
        let task = Task::find(&spec.name)
            .ok_or_else(|| Error::config("name", "the id of a POPGym task", &spec.name))?;
        Ok((task, Version::find(&spec.get::<String>(VERSION)?)?))
    }

    /// Whether a task can show the velocity that it hides.
    fn can_show_velocity(task: Task) -> bool {
        task.family == Family::PositionOnlyPendulum
    }

    /// Whether an environment shows the velocity.
    fn shows_velocity(spec: &EnvSpec, task: Task) -> Result<bool> {
        Ok(Self::can_show_velocity(task) && spec.get(VELOCITY)?)
    }
}

impl family::Family for Popgym {
    fn names(&self) -> Vec<String> {
        Task::all().map(|task| task.id().to_owned()).collect()
    }

    fn resolve(&self, name: &str) -> Option<String> {
        Task::find(name).map(|task| task.id().to_owned())
    }

    fn settings(&self, name: &str) -> Vec<Setting> {
        let text = "Version of the Python package whose rules apply: 1.0.6 or 1.0.7.";
        let mut settings = vec![Setting::new(VERSION, Version::default().name(), text)];
        if Task::find(name).is_some_and(Self::can_show_velocity) {
            let text = "Whether PositionOnlyPendulum shows its speed as a third number, so that nothing need \
                        be remembered; not in the Python package.";
            settings.push(Setting::new(VELOCITY, false, text));
        }
        settings
    }

    fn make(&self, spec: &EnvSpec, _: Purpose) -> Result<Box<dyn Env>> {
        let (task, version) = Self::task(spec)?;
        Ok(match Self::shows_velocity(spec, task)? {
            true => Box::new(PendulumWithVelocity::new(task.difficulty)),
            false => task.make(version),
        })
    }

    fn make_rows(&self, spec: &EnvSpec, _: Purpose, rows: usize, pool: &Pool) -> Result<Box<dyn AnyVecEnv>> {
        let (task, version) = Self::task(spec)?;
        if Self::shows_velocity(spec, task)? {
            let env = || PendulumWithVelocity::new(task.difficulty);
            return Ok(Box::new(VecEnv::new((0..rows).map(|_| env()).collect())?.with_pool(pool)));
        }
        task.make_rows(version, rows, pool)
    }

    fn player(&self, spec: &EnvSpec) -> Result<Option<Box<dyn Player>>> {
        Self::task(spec).map(|(task, version)| Some(task.player(version)))
    }

    fn facts(&self, spec: &EnvSpec) -> Facts {
        Self::task(spec).map_or_else(
            |_| Facts::default(),
            |(task, _)| Facts {
                max_steps: Some(task.max_steps() as u64),
                good_return: Some(task.good_return()),
                metric: Metric::Return,
                ..Facts::default()
            },
        )
    }
}

impl Trace {
    /// Replays all episodes in the environment and by the version that the trace names, and compares.
    pub fn verify(&self) -> Result<Report> {
        struct Compare<'a>(&'a Trace);
        impl Visit for Compare<'_> {
            type Output = Result<Report>;
            fn visit<E, P>(self, env: impl Fn() -> E, _: impl Fn() -> P) -> Result<Report>
            where
                E: Replay + 'static,
                P: Player + 'static,
            {
                self.0.replay(&mut env())
            }
        }
        self.task()?.visit(self.version(), Compare(self))
    }
}
