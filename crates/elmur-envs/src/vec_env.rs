//! Many rows of one environment.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use elmur_base::{Row, Spaces, Values, ValuesMut, Widths};
use elmur_pool::{Claims, Pool, RowsMut};
use elmur_rng::Stream;

use crate::env::{Env, Next};
use crate::error::{Error, Result};

/// Rows of one environment, each in an episode of its own.
///
/// All rows are stepped together ([`VecEnv::step`]) or some of them ([`VecEnv::step_rows`]); [`Autoreset`]
/// says what happens to a row whose episode ends.
///
/// Seeds: episode n of a row with seed s is seeded by s for n = 0 and by a draw from (s, n) after it, so that
/// a row's episodes depend on nothing but its own seed. With a pool ([`VecEnv::with_pool`]) rows are stepped
/// on several threads; the results are the same for any number of them.
#[derive(Debug)]
pub struct VecEnv<E> {
    lanes: Vec<Lane<E>>,
    /// Newest observations, [rows, numbers].
    seen: Row,
    /// The observation that the latest finished episode of each row ended with, [rows, numbers].
    last: Row,
    step: VecStep,
    rules: Rules,
    pool: Pool,
    claims: Claims,
    /// Number of calls with a list of rows so far; a row keeps the number of the last that listed it.
    lists: u64,
    /// Whether any row's episode was lost in the newest step.
    any_lost: AtomicBool,
}

/// What all rows have in common.
#[derive(Debug, Clone, Copy)]
struct Rules {
    /// Numbers per observation.
    observation: Widths,
    /// Numbers per action.
    action: Widths,
    autoreset: Autoreset,
}

/// The first row that refused its action, by its place in the list of rows that are stepped, and why.
type Refusal = Option<(usize, Error)>;

/// When a row whose episode has ended begins the next one; Gymnasium's three conventions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Autoreset {
    /// In the step that ends the episode: the row's observation is already the first of the next episode, and
    /// the one that the old episode ended with is in [`VecEnv::final_observations`].
    #[default]
    SameStep,
    /// In the step after it, which ignores the row's action, pays 0 and ends nothing.
    NextStep,
    /// Never: the row must be reset before it is stepped again.
    Disabled,
}

/// Results of one step of all rows. Rows that were not stepped have reward 0, no flag and no success.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct VecStep {
    /// Rewards, `[rows]`.
    pub rewards: Vec<f64>,
    /// Whether the task has ended, `[rows]`.
    pub terminated: Vec<bool>,
    /// Whether the episode was cut off, by a time limit for example, `[rows]`.
    pub truncated: Vec<bool>,
    /// Whether the episode that ended in this step solved the task, `[rows]`. `None` where no episode ended,
    /// and in environments without a notion of success.
    pub success: Vec<Option<bool>>,
    /// Whether the row's episode was lost in this step because the process that played it died, `[rows]`. The
    /// step has no result then, and the row waits for the next episode as if this one had ended.
    pub lost: Vec<bool>,
}

/// Fewest rows that are worth a thread of their own: a few microseconds of the fastest environments.
const MIN_ROWS: usize = 128;

impl<E: Env> VecEnv<E> {
    /// Makes rows of the given environments, which must have the same spaces.
    pub fn new(rows: Vec<E>) -> Result<Self> {
        let mismatch = |got: String| {
            Err(Error::Config {
                key: "rows".to_owned(),
                expected: "one or more environments with equal spaces".to_owned(),
                got,
            })
        };
        let Some(first) = rows.first() else { return mismatch("none".to_owned()) };
        if let Some(i) = rows.iter().position(|row| row.spaces() != first.spaces()) {
            return mismatch(format!("row {i} with other spaces than row 0"));
        }
        let (n, Spaces { observation, action }) = (rows.len(), first.spaces());
        let (observation, action) = (observation.widths(), action.widths());
        Ok(Self {
            seen: Row::zeros(observation, n),
            last: Row::zeros(observation, n),
            step: VecStep {
                rewards: vec![0.0; n],
                terminated: vec![false; n],
                truncated: vec![false; n],
                success: vec![None; n],
                lost: vec![false; n],
            },
            rules: Rules { observation, action, autoreset: Autoreset::default() },
            pool: Pool::serial().clone(),
            claims: Claims::default(),
            lists: 0,
            any_lost: AtomicBool::new(false),
            lanes: rows.into_iter().map(Lane::new).collect(),
        })
    }

    /// Steps rows on the threads of a pool where there are enough rows.
    pub fn with_pool(mut self, pool: &Pool) -> Self {
        self.pool = pool.clone();
        self
    }

    /// Sets what happens to rows whose episode ends; [`Autoreset::SameStep`] by default.
    pub fn with_autoreset(mut self, autoreset: Autoreset) -> Self {
        self.rules.autoreset = autoreset;
        self
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.lanes.len()
    }

    /// Always false: there is at least one row.
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// The spaces that all rows have.
    pub fn spaces(&self) -> &Spaces {
        self.lanes[0].env.spaces()
    }

    /// The environment of one row.
    pub fn row(&self, row: usize) -> &E {
        &self.lanes[row].env
    }

    /// Starts every row anew, row i with `seeds[i]`.
    pub fn reset(&mut self, seeds: &[u64]) -> Result<()> {
        if seeds.len() != self.len() {
            let expected = format!("{} seeds", self.len());
            return Err(elmur_base::Error::space("reset", expected, seeds.len()).into());
        }
        send_all(self.lanes.iter_mut().zip(seeds), |(lane, seed)| lane.env.send(Next::Reset(*seed)));
        (0..).zip(seeds).try_for_each(|(row, seed)| self.restart(row, *seed))
    }

    /// Starts the listed rows anew, each with its seed; the others go on. No row may be listed twice.
    pub fn reset_rows(&mut self, rows: &[(usize, u64)]) -> Result<()> {
        self.list(rows.iter().map(|(row, _)| *row))?;
        send_all(rows, |(row, seed)| self.lanes[*row].env.send(Next::Reset(*seed)));
        rows.iter().try_for_each(|(row, seed)| self.restart(*row, *seed))
    }

    /// Starts one row anew; the others go on.
    pub fn reset_row(&mut self, row: usize, seed: u64) -> Result<()> {
        self.reset_rows(&[(row, seed)])
    }

    /// Starts the next episode of the listed rows, whether or not the one before has ended; the others go on. No
    /// row may be listed twice.
    pub fn next_episodes(&mut self, rows: &[usize]) -> Result<()> {
        self.list(rows.iter().copied())?;
        let observation = self.rules.observation;
        rows.iter()
            .try_for_each(|row| self.lanes[*row].next_episode(self.seen.as_mut().row(observation, *row)))
    }

    fn restart(&mut self, row: usize, seed: u64) -> Result<()> {
        let lane = &mut self.lanes[row];
        (lane.seed, lane.episode, lane.ended) = (seed, 0, false);
        lane.env.reset(seed, self.seen.as_mut().row(self.rules.observation, row))
    }

    /// Newest observations of all rows, [rows, numbers].
    pub fn observations(&self) -> Values<'_> {
        self.seen.values()
    }

    /// The observation that the latest finished episode of each row ended with, [rows, numbers]; zeros
    /// before.
    pub fn final_observations(&self) -> Values<'_> {
        self.last.values()
    }

    /// Steps all rows with actions [rows, numbers]. A row that refuses its action stays as it is while the
    /// others move; the error is that of the first such row.
    pub fn step(&mut self, actions: Values<'_>) -> Result<&VecStep> {
        let n = self.len();
        self.check_actions(n, actions)?;
        if self.rules.autoreset == Autoreset::Disabled
            && let Some(row) = self.lanes.iter().position(|lane| lane.ended)
        {
            return Err(Error::Ended { row });
        }
        let width = self.rules.action;
        send_all(self.lanes.iter_mut().enumerate(), |(place, lane)| lane.send(actions.rows(width, place, 1)));
        self.in_blocks(self.blocks(n), |first, lanes| lanes.step(first, actions))
    }

    /// Steps the listed rows with actions [listed rows, numbers] in the order of the list; no row may be
    /// listed twice. The other rows keep their time, observation and episode. In all else like
    /// [`VecEnv::step`].
    pub fn step_rows(&mut self, rows: &[usize], actions: Values<'_>) -> Result<&VecStep> {
        self.check_actions(rows.len(), actions)?;
        self.list(rows.iter().copied())?;
        if self.rules.autoreset == Autoreset::Disabled
            && let Some(row) = rows.iter().find(|row| self.lanes[**row].ended)
        {
            return Err(Error::Ended { row: *row });
        }
        let width = self.rules.action;
        send_all(rows.iter().enumerate(), |(place, row)| {
            self.lanes[*row].send(actions.rows(width, place, 1))
        });
        if self.blocks(rows.len()) == 1 {
            return self.in_blocks(1, |_, lanes| lanes.step_listed(rows, actions));
        }
        let list = self.lists;
        self.in_blocks(self.blocks(self.len()), |_, lanes| lanes.step_marked(list, actions))
    }

    /// Marks the rows of a list with their places in it.
    fn list(&mut self, rows: impl Iterator<Item = usize>) -> Result<()> {
        let count = self.len();
        let refuse =
            |expected: &str, got: String| Err(elmur_base::Error::space("rows", expected, got).into());
        self.lists += 1;
        for (place, row) in rows.enumerate() {
            match self.lanes.get_mut(row) {
                None => return refuse(&format!("rows below {count}"), row.to_string()),
                Some(lane) if lane.list == self.lists => {
                    return refuse("no row twice", format!("row {row} twice"));
                }
                Some(lane) => (lane.list, lane.place) = (self.lists, place),
            }
        }
        Ok(())
    }

    fn check_actions(&self, rows: usize, actions: Values<'_>) -> Result<()> {
        let Widths { floats, ints, bytes } = self.rules.action;
        let got = [actions.floats.len(), actions.ints.len(), actions.bytes.len()];
        if got == [rows * floats, rows * ints, rows * bytes] {
            return Ok(());
        }
        let expected = format!("{rows} rows of {floats} floats, {ints} integers and {bytes} bytes");
        let got = format!("{}, {} and {}", got[0], got[1], got[2]);
        Err(elmur_base::Error::space("actions", expected, got).into())
    }

    /// Number of blocks in which this many rows are best stepped.
    fn blocks(&self, rows: usize) -> usize {
        (rows / MIN_ROWS).clamp(1, self.pool.max_tasks())
    }

    /// Lets the pool's threads call `body(first row, rows)` for all rows in this many blocks.
    fn in_blocks(
        &mut self,
        blocks: usize,
        body: impl Fn(usize, Lanes<'_, E>) -> Refusal + Sync,
    ) -> Result<&VecStep> {
        let (rules, mut refused) = (self.rules, None);
        let VecStep { rewards, terminated, truncated, success, lost } = &mut self.step;
        if std::mem::take(self.any_lost.get_mut()) {
            lost.fill(false);
        }
        let any_lost = &self.any_lost;
        if blocks == 1 {
            let (lanes, seen, last) = (&mut self.lanes[..], self.seen.as_mut(), self.last.as_mut());
            refused = body(
                0,
                Lanes { lanes, seen, last, rewards, terminated, truncated, success, lost, any_lost, rules },
            );
        } else {
            let (rows, shared) = (self.lanes.len(), Mutex::new(&mut refused));
            let lanes = (
                RowsMut::new(&mut self.lanes, 1),
                number_rows(&mut self.seen, rules.observation),
                number_rows(&mut self.last, rules.observation),
                (
                    RowsMut::new(rewards, 1),
                    (RowsMut::new(terminated, 1), RowsMut::new(truncated, 1)),
                    RowsMut::new(success, 1),
                    RowsMut::new(lost, 1),
                ),
            );
            self.pool.sticky_blocks(&mut self.claims, rows, rows.div_ceil(blocks), lanes, |first, lanes| {
                let (lanes, seen, last, (rewards, (terminated, truncated), success, lost)) = lanes;
                let [seen, last] =
                    [seen, last].map(|(floats, ints, bytes)| ValuesMut { floats, ints, bytes });
                let lanes = Lanes {
                    lanes,
                    seen,
                    last,
                    rewards,
                    terminated,
                    truncated,
                    success,
                    lost,
                    any_lost,
                    rules,
                };
                if let Some((place, error)) = body(first, lanes) {
                    keep_first(&mut shared.lock().unwrap_or_else(PoisonError::into_inner), place, error);
                }
            });
        }
        match refused {
            Some((_, error)) => Err(error),
            None => Ok(&self.step),
        }
    }
}

/// Numbers of many rows, to be split among threads.
fn number_rows(numbers: &mut Row, widths: Widths) -> (RowsMut<'_, f32>, RowsMut<'_, i32>, RowsMut<'_, u8>) {
    (
        RowsMut::new(&mut numbers.floats, widths.floats),
        RowsMut::new(&mut numbers.ints, widths.ints),
        RowsMut::new(&mut numbers.bytes, widths.bytes),
    )
}

#[cold]
fn keep_first(refused: &mut Refusal, place: usize, error: Error) {
    if refused.as_ref().is_none_or(|(first, _)| place < *first) {
        *refused = Some((place, error));
    }
}

/// Sends something to all rows, unless the first says that there is nowhere to send it.
#[inline]
fn send_all<T>(rows: impl IntoIterator<Item = T>, mut send: impl FnMut(T) -> bool) {
    let mut rows = rows.into_iter();
    if rows.next().is_some_and(&mut send) {
        rows.for_each(|row| {
            send(row);
        });
    }
}

/// One row: an environment and where it stands.
#[derive(Debug)]
struct Lane<E> {
    env: E,
    /// The seed that the row was last reset with.
    seed: u64,
    /// Number of episodes since then.
    episode: u64,
    /// Whether the episode has ended and the next has not begun.
    ended: bool,
    /// The newest list that the row is in, and its place there.
    list: u64,
    place: usize,
}

impl<E: Env> Lane<E> {
    fn new(env: E) -> Self {
        Self { env, seed: 0, episode: 0, ended: false, list: 0, place: 0 }
    }

    /// Sends the step of an episode that runs.
    #[inline]
    fn send(&mut self, action: Values<'_>) -> bool {
        self.ended || self.env.send(Next::Step(action))
    }

    /// Keeps the observation that the episode ended with, and begins the next episode if it is time.
    #[inline(never)]
    fn end_episode(
        &mut self,
        seen: ValuesMut<'_>,
        mut last: ValuesMut<'_>,
        autoreset: Autoreset,
    ) -> Result<()> {
        last.copy_from(seen.values());
        self.ended = autoreset != Autoreset::SameStep;
        if self.ended { Ok(()) } else { self.next_episode(seen) }
    }

    fn next_episode(&mut self, seen: ValuesMut<'_>) -> Result<()> {
        self.episode += 1;
        let draw = Stream::new(self.seed, self.episode, 1).block(0);
        self.env.reset(u64::from(draw[0]) << 32 | u64::from(draw[1]), seen)?;
        self.ended = false;
        Ok(())
    }
}

/// Some of the rows, with their observations and results.
struct Lanes<'a, E> {
    lanes: &'a mut [Lane<E>],
    seen: ValuesMut<'a>,
    last: ValuesMut<'a>,
    rewards: &'a mut [f64],
    terminated: &'a mut [bool],
    truncated: &'a mut [bool],
    success: &'a mut [Option<bool>],
    lost: &'a mut [bool],
    any_lost: &'a AtomicBool,
    rules: Rules,
}

impl<E: Env> Lanes<'_, E> {
    /// Steps all of these rows; the first of them has the action at place `first`.
    fn step(mut self, first: usize, actions: Values<'_>) -> Refusal {
        let Rules { observation, action, autoreset } = self.rules;
        let (n, mut next, mut refused) = (self.lanes.len(), 0, None);
        if observation.bytes + action.bytes > 0 || autoreset == Autoreset::NextStep {
            (0..n).for_each(|row| self.step_row(row, first + row, actions, &mut refused));
            return refused;
        }
        while next < n {
            let actions = actions.rows(action, first + next, n - next);
            let Err((row, error)) = self.part(next..n).step_plain(actions) else { break };
            self.fail(next + row, first + next + row, error, &mut refused);
            next += row + 1;
        }
        refused
    }

    /// Steps the listed rows, where these are all rows.
    fn step_listed(mut self, rows: &[usize], actions: Values<'_>) -> Refusal {
        let mut refused = None;
        (0..self.lanes.len()).for_each(|row| self.clear(row));
        rows.iter().enumerate().for_each(|(place, row)| self.step_row(*row, place, actions, &mut refused));
        refused
    }

    /// Steps those of these rows that are in the list of this number.
    fn step_marked(mut self, list: u64, actions: Values<'_>) -> Refusal {
        let mut refused = None;
        for row in 0..self.lanes.len() {
            match &self.lanes[row] {
                lane if lane.list == list => self.step_row(row, lane.place, actions, &mut refused),
                _ => self.clear(row),
            }
        }
        refused
    }

    /// Steps one row with the action at this place.
    fn step_row(&mut self, row: usize, place: usize, actions: Values<'_>, refused: &mut Refusal) {
        self.clear(row);
        let (action, autoreset) = (actions.rows(self.rules.action, place, 1), self.rules.autoreset);
        let part = self.part(row..row + 1);
        let stepped = match &mut *part.lanes {
            [lane] if lane.ended && autoreset == Autoreset::NextStep => lane.next_episode(part.seen),
            _ => part.step_plain(action).map_err(|(_, error)| error),
        };
        if let Err(error) = stepped {
            self.fail(row, place, error, refused);
        }
    }

    /// A row at this place that could not be stepped: its episode is lost, or it refused its action.
    #[cold]
    fn fail(&mut self, row: usize, place: usize, error: Error, refused: &mut Refusal) {
        self.clear(row);
        if !error.is_lost() {
            return keep_first(refused, place, error);
        }
        self.lost[row] = true;
        self.any_lost.store(true, Ordering::Relaxed);
        let same_step = self.rules.autoreset == Autoreset::SameStep;
        let part = self.part(row..row + 1);
        let [lane] = part.lanes else { return };
        lane.ended = !same_step;
        if same_step && let Err(error) = lane.next_episode(part.seen) {
            keep_first(refused, place, error);
        }
    }

    /// The result of a row that was not stepped.
    fn clear(&mut self, row: usize) {
        (self.rewards[row], self.success[row]) = (0.0, None);
        (self.terminated[row], self.truncated[row]) = (false, false);
    }

    /// A range of these rows.
    fn part(&mut self, rows: Range<usize>) -> Lanes<'_, E> {
        let (first, count, widths) = (rows.start, rows.len(), self.rules.observation);
        Lanes {
            lanes: &mut self.lanes[rows.clone()],
            seen: self.seen.rows(widths, first, count),
            last: self.last.rows(widths, first, count),
            rewards: &mut self.rewards[rows.clone()],
            terminated: &mut self.terminated[rows.clone()],
            truncated: &mut self.truncated[rows.clone()],
            success: &mut self.success[rows.clone()],
            lost: &mut self.lost[rows],
            any_lost: self.any_lost,
            rules: self.rules,
        }
    }

    /// Steps these rows with actions [rows, numbers], up to the first row that refuses its action: one row,
    /// or any number of rows without bytes.
    ///
    /// The fastest environments take 10 ns a step, so that it counts what this loop does not do. It does not
    /// cut bytes into rows (5% of all environments' speed), it does not ask whether a row waits for its next
    /// episode (2%), and it is the only one that calls [`Env::step`]: where there are two, the compiler
    /// inlines neither (15%).
    #[inline(never)]
    fn step_plain(mut self, actions: Values<'_>) -> Result<(), (usize, Error)> {
        let Rules { observation, action, autoreset } = self.rules;
        let ends = self.terminated.iter_mut().zip(self.truncated);
        let results = self.rewards.iter_mut().zip(ends).zip(self.success);
        let lanes = self.lanes.iter_mut().zip(results);
        for (row, (lane, ((reward, (terminated, truncated)), success))) in lanes.enumerate() {
            // Hides that the offsets below grow evenly: the compiler would keep each in a register of its
            // own, and has too few of them (4%).
            let row = std::hint::black_box(row);
            let action = Values {
                floats: &actions.floats[row * action.floats..(row + 1) * action.floats],
                ints: &actions.ints[row * action.ints..(row + 1) * action.ints],
                bytes: actions.bytes,
            };
            let seen = plain_row(&mut self.seen, observation, row);
            let step = lane.env.step(action, seen).map_err(|error| (row, error))?;
            *reward = step.reward;
            *terminated = step.terminated;
            *truncated = step.truncated;
            *success = step.success;
            if step.done() {
                let seen = plain_row(&mut self.seen, observation, row);
                let last = plain_row(&mut self.last, observation, row);
                lane.end_episode(seen, last, autoreset).map_err(|error| (row, error))?;
            }
        }
        Ok(())
    }
}

/// Row `row` of values without bytes; or all, where there is only one row.
#[inline]
fn plain_row<'a>(values: &'a mut ValuesMut<'_>, widths: Widths, row: usize) -> ValuesMut<'a> {
    ValuesMut {
        floats: &mut values.floats[row * widths.floats..(row + 1) * widths.floats],
        ints: &mut values.ints[row * widths.ints..(row + 1) * widths.ints],
        bytes: &mut *values.bytes,
    }
}

/// A [`VecEnv`] whose environment type is not known at compile time. One virtual call steps all rows.
pub trait AnyVecEnv: Send {
    /// [`VecEnv::len`].
    fn rows(&self) -> usize;
    /// [`VecEnv::spaces`].
    fn spaces(&self) -> &Spaces;
    /// [`VecEnv::with_autoreset`].
    fn set_autoreset(&mut self, autoreset: Autoreset);
    /// [`VecEnv::reset`].
    fn reset(&mut self, seeds: &[u64]) -> Result<()>;
    /// [`VecEnv::reset_rows`].
    fn reset_rows(&mut self, rows: &[(usize, u64)]) -> Result<()>;
    /// [`VecEnv::next_episodes`].
    fn next_episodes(&mut self, rows: &[usize]) -> Result<()>;
    /// [`VecEnv::step`].
    fn step(&mut self, actions: Values<'_>) -> Result<&VecStep>;
    /// [`VecEnv::step_rows`].
    fn step_rows(&mut self, rows: &[usize], actions: Values<'_>) -> Result<&VecStep>;
    /// [`VecEnv::observations`].
    fn observations(&self) -> Values<'_>;
    /// [`VecEnv::final_observations`].
    fn final_observations(&self) -> Values<'_>;
}

impl<E: Env> AnyVecEnv for VecEnv<E> {
    fn rows(&self) -> usize {
        self.len()
    }
    fn spaces(&self) -> &Spaces {
        VecEnv::spaces(self)
    }
    fn set_autoreset(&mut self, autoreset: Autoreset) {
        self.rules.autoreset = autoreset;
    }
    fn reset(&mut self, seeds: &[u64]) -> Result<()> {
        VecEnv::reset(self, seeds)
    }
    fn reset_rows(&mut self, rows: &[(usize, u64)]) -> Result<()> {
        VecEnv::reset_rows(self, rows)
    }
    fn next_episodes(&mut self, rows: &[usize]) -> Result<()> {
        VecEnv::next_episodes(self, rows)
    }
    fn step(&mut self, actions: Values<'_>) -> Result<&VecStep> {
        VecEnv::step(self, actions)
    }
    fn step_rows(&mut self, rows: &[usize], actions: Values<'_>) -> Result<&VecStep> {
        VecEnv::step_rows(self, rows, actions)
    }
    fn observations(&self) -> Values<'_> {
        VecEnv::observations(self)
    }
    fn final_observations(&self) -> Values<'_> {
        VecEnv::final_observations(self)
    }
}

#[cfg(test)]
mod tests {
    use elmur_base::Space;
    use elmur_rng::Rng;

    use super::*;
    use crate::env::Step;
    use crate::tmaze::{Corridor, TMaze};

    fn mazes(rows: usize) -> VecEnv<TMaze> {
        VecEnv::new((0..rows).map(|_| TMaze::new(Corridor::UpTo(5)).unwrap()).collect()).unwrap()
    }

    /// What one row sees and gets over 60 steps of a fixed sequence of actions.
    fn history(env: &mut VecEnv<TMaze>, row: usize) -> Vec<([f32; 4], f64, bool)> {
        (0..60)
            .map(|t| {
                let actions = vec![[0, 0, 0, 1, 0, 3][t % 6]; env.len()];
                let step = env.step(Values::ints(&actions)).unwrap();
                let (reward, done) = (step.rewards[row], step.terminated[row] || step.truncated[row]);
                let seen = std::array::from_fn(|i| env.observations().floats[4 * row + i]);
                (seen, reward, done)
            })
            .collect()
    }

    #[test]
    fn a_row_depends_on_its_own_seed_alone() {
        let (mut three, mut one) = (mazes(3), mazes(1));
        three.reset(&[7, 8, 9]).unwrap();
        one.reset(&[8]).unwrap();
        let (a, b) = (history(&mut three, 1), history(&mut one, 0));
        assert_eq!(a, b);
        assert!(a.iter().filter(|(_, _, done)| *done).count() > 5, "several episodes in a row");
        one.reset(&[7]).unwrap();
        assert_ne!(history(&mut one, 0), b);
    }

    #[test]
    fn an_ended_row_shows_its_last_and_its_next_observation() {
        let mut env = mazes(2);
        env.reset(&[1, 2]).unwrap();
        let ended = (0..20).find_map(|_| {
            let step = env.step(Values::ints(&[0, 0])).unwrap();
            step.truncated.iter().position(|done| *done)
        });
        let row = ended.unwrap();
        let hint = env.observations().floats[4 * row + 1];
        assert_eq!(hint, f32::from(env.row(row).goal()), "the next episode's first observation");
        assert_eq!(env.final_observations().floats[4 * row + 1..4 * row + 3], [0.0, 1.0], "at the fork");
    }

    #[test]
    fn success_is_told_of_the_episode_that_ended() {
        let mut env = mazes(8);
        env.reset(&[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
        let mut told = [0, 0];
        for t in 0..60 {
            let step = env.step(Values::ints(&[[0, 0, 1][t % 3]; 8])).unwrap();
            for row in 0..8 {
                let ended = step.terminated[row] || step.truncated[row];
                assert_eq!(step.success[row], ended.then_some(step.rewards[row] == 1.0));
                step.success[row].inspect(|solved| told[usize::from(*solved)] += 1);
            }
        }
        assert!(told[0] > 5 && told[1] > 5, "{told:?}");
    }

    #[test]
    fn wrong_numbers_of_rows_are_errors() {
        let mut env = mazes(2);
        assert!(env.reset(&[1]).is_err());
        env.reset(&[1, 2]).unwrap();
        assert!(env.step(Values::ints(&[0])).is_err());
        assert!(VecEnv::<TMaze>::new(vec![]).is_err());
    }

    #[test]
    fn rows_are_the_same_on_any_number_of_threads() {
        let rows = 1000;
        let seeds: Vec<u64> = (0..rows as u64).map(|i| i * i).collect();
        let play = |threads| {
            let mut env = mazes(rows).with_pool(&Pool::new(threads));
            assert_eq!(env.blocks(rows) > 1, threads > 1);
            env.reset(&seeds).unwrap();
            let mut history = Vec::new();
            for t in 0..40 {
                let actions: Vec<i32> = (0..rows).map(|row| [0, 0, 0, 1, 0, 3][(t + row) % 6]).collect();
                let step = env.step(Values::ints(&actions)).unwrap().clone();
                history.push((step, env.observations().floats.to_vec()));
            }
            (history, env.final_observations().floats.to_vec())
        };
        let one = play(1);
        assert!(one == play(2) && one == play(5));
    }

    /// Rows take turns in lists of all sizes and orders. Each goes through what it would go through alone,
    /// and nobody else notices.
    #[test]
    fn listed_rows_step_as_if_alone_on_any_number_of_threads() {
        let rows = 600;
        let (seeds, mut rng) = ((0..rows as u64).collect::<Vec<_>>(), Rng::new(5, 0));
        let mut order: Vec<usize> = (0..rows).collect();
        let mut lists = Vec::new();
        for size in [1, 600, 3, 127, 128, 255, 256, 300, 512, 599, 0, 600, 20, 400].repeat(6) {
            rng.shuffle(&mut order);
            lists.push(order[..size].to_vec());
        }
        let action = |row: usize, time: usize| [0, 0, 0, 1, 0, 3][(row + time) % 6];
        for autoreset in [Autoreset::SameStep, Autoreset::NextStep] {
            let mut alone: Vec<_> = (0..rows).map(|_| mazes(1).with_autoreset(autoreset)).collect();
            alone.iter_mut().zip(&seeds).for_each(|(env, seed)| env.reset(&[*seed]).unwrap());
            let pools = [1, 2, 3].map(Pool::new);
            let mut together =
                pools.each_ref().map(|pool| mazes(rows).with_pool(pool).with_autoreset(autoreset));
            together.iter_mut().for_each(|env| env.reset(&seeds).unwrap());
            let mut times = vec![0; rows];
            for list in &lists {
                let mut expected = VecStep {
                    rewards: vec![0.0; rows],
                    terminated: vec![false; rows],
                    truncated: vec![false; rows],
                    success: vec![None; rows],
                    lost: vec![false; rows],
                };
                let actions: Vec<i32> = list.iter().map(|row| action(*row, times[*row])).collect();
                for row in list {
                    let step = alone[*row].step(Values::ints(&[action(*row, times[*row])])).unwrap();
                    (expected.rewards[*row], expected.success[*row]) = (step.rewards[0], step.success[0]);
                    expected.terminated[*row] = step.terminated[0];
                    expected.truncated[*row] = step.truncated[0];
                    times[*row] += 1;
                }
                for env in &mut together {
                    assert!(*env.step_rows(list, Values::ints(&actions)).unwrap() == expected);
                    for (row, alone) in alone.iter().enumerate() {
                        let mine = |values: Values<'_>| values.floats[4 * row..4 * row + 4].to_vec();
                        assert_eq!(mine(env.observations()), alone.observations().floats);
                        assert_eq!(mine(env.final_observations()), alone.final_observations().floats);
                    }
                }
            }
            assert!(times.iter().all(|time| *time > 15), "several episodes each");
        }
    }

    #[test]
    fn lists_with_repeated_or_missing_rows_are_refused_before_any_row_moves() {
        let mut env = mazes(4);
        env.reset(&[1, 2, 3, 4]).unwrap();
        let before = env.observations().floats.to_vec();
        let mut error =
            |rows: &[usize]| env.step_rows(rows, Values::ints(&vec![0; rows.len()])).unwrap_err().to_string();
        assert!(error(&[0, 2, 1, 2]).contains("row 2 twice"));
        assert!(error(&[0, 4]).contains("rows below 4, got 4"));
        assert!(env.step_rows(&[0, 1], Values::ints(&[0])).is_err(), "an action too few");
        assert!(env.reset_rows(&[(1, 9), (1, 8)]).is_err() && env.reset_row(4, 0).is_err());
        assert_eq!(env.observations().floats, before);
        env.step_rows(&[3, 0], Values::ints(&[0, 0])).unwrap();
        env.reset_rows(&[(3, 4), (0, 1)]).unwrap();
        assert_eq!(env.observations().floats, before);
    }

    /// Steps one maze to the end of an episode.
    fn end(env: &mut VecEnv<TMaze>) {
        let ended = (0..20).any(|_| env.step(Values::ints(&[0])).unwrap().truncated[0]);
        assert!(ended);
    }

    #[test]
    fn the_next_step_begins_the_next_episode_whatever_its_action() {
        let [mut now, mut later] =
            [Autoreset::SameStep, Autoreset::NextStep].map(|a| mazes(1).with_autoreset(a));
        now.reset(&[7]).unwrap();
        later.reset(&[7]).unwrap();
        for _ in 0..5 {
            end(&mut now);
            end(&mut later);
            assert_eq!(later.observations(), now.final_observations());
            assert_eq!(later.final_observations(), now.final_observations());
            let step = later.step(Values::ints(&[99])).unwrap();
            assert_eq!((step.rewards[0], step.terminated[0], step.truncated[0]), (0.0, false, false));
            assert_eq!(step.success[0], None);
            assert_eq!(later.observations(), now.observations(), "the same episode");
        }
    }

    #[test]
    fn the_next_episode_of_a_row_is_the_same_whoever_begins_it() {
        let [mut by_itself, mut asked] =
            [Autoreset::SameStep, Autoreset::Disabled].map(|a| mazes(1).with_autoreset(a));
        by_itself.reset(&[7]).unwrap();
        asked.reset(&[7]).unwrap();
        for _ in 0..5 {
            end(&mut by_itself);
            end(&mut asked);
            asked.next_episodes(&[0]).unwrap();
            assert_eq!(asked.observations(), by_itself.observations());
        }
        assert!(asked.next_episodes(&[1]).is_err());
    }

    #[test]
    fn without_autoreset_an_ended_row_waits_for_its_reset() {
        let mut env = mazes(3).with_autoreset(Autoreset::Disabled);
        env.reset(&[1, 2, 3]).unwrap();
        let all = Values::ints(&[0; 3]);
        let ended = (0..20).find_map(|_| env.step(all).unwrap().truncated.iter().position(|ended| *ended));
        let row = ended.unwrap();
        assert_eq!(env.observations().floats[4 * row + 2], 1.0, "still at the fork");
        let before = env.observations().floats.to_vec();
        let named = format!("row {row}: its episode has ended");
        assert!(env.step(all).unwrap_err().to_string().contains(&named));
        assert!(env.step_rows(&[0, 1, 2], all).unwrap_err().to_string().contains(&named));
        assert_eq!(env.observations().floats, before, "no row moved");
        let other = (row + 1) % 3;
        env.step_rows(&[other], Values::ints(&[0])).unwrap();
        env.reset_row(row, 9).unwrap();
        env.step_rows(&[row], Values::ints(&[0])).unwrap();
    }

    #[test]
    fn a_row_that_refuses_stays_and_the_first_is_named_on_any_number_of_threads() {
        let forward: Vec<usize> = (0..600).collect();
        let backward: Vec<usize> = (0..600).rev().collect();
        for (threads, list) in [(1, &forward), (3, &forward), (1, &backward), (3, &backward)] {
            let mut env = mazes(600).with_pool(&Pool::new(threads));
            env.reset(&[1; 600]).unwrap();
            let mut actions = vec![0; 600];
            (actions[599], actions[300], actions[5]) = (7, 4, 9);
            let refused: Vec<usize> = [5, 300, 599].map(|place| list[place]).to_vec();
            let result = match list == &forward {
                true => env.step(Values::ints(&actions)),
                false => env.step_rows(list, Values::ints(&actions)),
            };
            assert!(result.unwrap_err().to_string().contains("got 9"));
            for row in 0..600 {
                let moved = env.observations().floats[4 * row + 1] == 0.0; // the hint is gone
                assert_eq!(moved, !refused.contains(&row), "{row}");
            }
            actions.fill(0);
            assert!(env.step(Values::ints(&actions)).is_ok(), "an error is told once");
        }
    }

    /// Shows its seed and what it was told, in bytes; an episode has three steps.
    #[derive(Debug)]
    struct Echo {
        spaces: Spaces,
        seed: u8,
        time: u8,
    }

    impl Echo {
        fn new() -> Self {
            let spaces = Spaces {
                observation: Space::Tuple {
                    parts: vec![Space::Bytes { shape: vec![3] }, Space::Discrete { n: 3 }],
                },
                action: Space::Bytes { shape: vec![2] },
            };
            Self { spaces, seed: 0, time: 0 }
        }
    }

    impl Env for Echo {
        fn spaces(&self) -> &Spaces {
            &self.spaces
        }
        fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
            (self.seed, self.time) = (seed as u8, 0);
            observation.bytes.copy_from_slice(&[self.seed, 0, 0]);
            observation.ints[0] = 0;
            if seed == u64::MAX { Err(Error::Finished) } else { Ok(()) }
        }
        fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
            self.time += 1;
            observation.bytes[1..].copy_from_slice(action.bytes);
            observation.ints[0] = i32::from(self.time) % 3;
            Ok(Step { terminated: self.time == 3, ..Step::default() })
        }
    }

    #[test]
    fn bytes_go_in_and_out_row_by_row() {
        for (threads, listed) in [(1, false), (1, true), (3, false), (3, true)] {
            let rows = 400;
            let mut env =
                VecEnv::new((0..rows).map(|_| Echo::new()).collect()).unwrap().with_pool(&Pool::new(threads));
            env.reset(&(0..rows as u64).collect::<Vec<_>>()).unwrap();
            for time in 1..=4 {
                let actions: Vec<u8> = (0..rows).flat_map(|row| [row as u8, time]).collect();
                let actions = Values { bytes: &actions, ..Values::default() };
                let list: Vec<usize> = (0..rows).collect();
                let step = if listed { env.step_rows(&list, actions) } else { env.step(actions) };
                assert!(step.unwrap().terminated.iter().all(|ended| *ended == (time == 3)));
                let shown = if time == 3 { env.final_observations() } else { env.observations() };
                for row in 0..rows {
                    let seed = if time < 4 { row as u8 } else { shown.bytes[3 * row] };
                    assert_eq!(shown.bytes[3 * row..3 * row + 3], [seed, row as u8, time]);
                    assert_eq!(shown.ints[row], [0, 1, 2, 0, 1][usize::from(time)]);
                }
            }
        }
        let mut env = VecEnv::new(vec![Echo::new()]).unwrap();
        assert!(env.step(Values::ints(&[0])).unwrap_err().to_string().contains("0 integers and 2 bytes"));
        assert!(env.reset(&[u64::MAX]).is_err(), "a reset that fails");
    }
}
