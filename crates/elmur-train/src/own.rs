//! Learning in one's own states (DAgger): the policy that is being trained plays some of the episodes, and the
//! player says at every step what it would have done.
//!
//! The policy plays as it was some batches ago. Which snapshot of it plays a batch follows from the batch's number
//! alone, and snapshots that are still needed are saved with the state of training: so runs are reproducible and
//! resume to the byte.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use elmur_base::{Row, Stop, Values};
use elmur_data::collect::Ties;
use elmur_data::{Column, Episode, Loader, OwnEpisodes};
use elmur_engine::{Pool, Store};
use elmur_envs::{Env, Environment, Player, Wrapping};
use elmur_model::PolicyConfig;
use elmur_model::session::{Choose, Seen, Session};

use crate::config::RunConfig;
use crate::error::Result;
use crate::evaluate::{memory_seed, target_return};

/// Most rows of a session that plays, and the number of which its rows are a multiple.
const ROWS: usize = 64;
const ROUND: usize = 8;

/// Snapshots of the policy, and sessions that play with them.
pub(crate) struct OwnStates {
    policy: PolicyConfig,
    environment: Environment,
    /// The return that the policy is asked for, if it aims at one.
    target: f32,
    /// Whether players are asked for choices that are equally good.
    ties: bool,
    from: u64,
    every: u64,
    /// Crops of a batch.
    batch: u64,
    /// Steps after which an episode is cut.
    most: usize,
    snapshots: Mutex<BTreeMap<u64, Store>>,
    /// Sessions that no thread uses, with the number of their snapshot. A step of all rows of a session is the
    /// fastest, so a session has hardly more rows than a batch has episodes to play.
    idle: Mutex<Vec<(u64, Session)>>,
}

impl fmt::Debug for OwnStates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnStates").field("from", &self.from).field("every", &self.every).finish()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl OwnStates {
    /// Episodes of the policy, cut after `most` steps.
    pub fn new(config: &RunConfig, environment: &Environment, most: usize) -> Result<Self> {
        let target = target_return(&config.model, environment, config.eval.target_return)?;
        Ok(Self {
            policy: config.model.clone(),
            environment: environment.clone(),
            target: target.unwrap_or(0.0) as f32,
            ties: config.data.ties,
            from: config.data.own_from,
            every: config.data.own_every,
            batch: config.train.batch as u64,
            most,
            snapshots: Mutex::default(),
            idle: Mutex::default(),
        })
    }

    /// The number of batches after which the policy was as it is when it plays batch `batch` (counted from 0):
    /// at least so many before that batches which are played ahead do not have to wait. None before it plays.
    fn snapshot_of(&self, batch: u64) -> Option<u64> {
        let since = batch.checked_sub(Loader::MOST_AHEAD + self.from)?;
        Some(self.from + since / self.every * self.every)
    }

    /// Whether the policy is to be kept as it is after `batches` batches.
    pub fn is_due(&self, batches: u64) -> bool {
        batches >= self.from && (batches - self.from).is_multiple_of(self.every)
    }

    /// Keeps the policy's parameters, on the host, as they are after `batches` batches.
    pub fn keep(&self, batches: u64, params: &Store) -> Result<()> {
        let copy = params.to(Pool::serial())?;
        let mut snapshots = lock(&self.snapshots);
        snapshots.insert(batches, copy);
        if let Some(oldest) = self.snapshot_of(batches) {
            snapshots.retain(|number, _| *number >= oldest);
        }
        Ok(())
    }

    /// The snapshots that batches behind the first `batches` may need.
    pub fn needed(&self, batches: u64) -> Vec<(u64, Store)> {
        let oldest = self.snapshot_of(batches).unwrap_or(0);
        lock(&self.snapshots).range(oldest..).map(|(number, store)| (*number, store.clone())).collect()
    }

    /// Replaces all snapshots by those that were saved.
    pub fn restore(&self, snapshots: BTreeMap<u64, Store>) {
        *lock(&self.snapshots) = snapshots;
        lock(&self.idle).clear();
    }

    /// A session of `rows` rows that plays with this snapshot.
    fn session(&self, number: u64, rows: usize) -> Result<Session> {
        let mut idle = lock(&self.idle);
        idle.retain(|(other, _)| *other >= number);
        let fits = |(other, session): &(u64, Session)| *other == number && session.rows() == rows;
        if let Some(i) = idle.iter().position(fits) {
            return Ok(idle.swap_remove(i).1);
        }
        drop(idle);
        let params = lock(&self.snapshots).get(&number).cloned();
        let params = params.ok_or_else(|| {
            let expected = format!("the policy as it was after {number} batches");
            crate::Error::config("data.own_every", expected, "none that was kept")
        })?;
        Ok(Session::new(&self.policy, &params, rows, &Pool::new(1))?)
    }

    fn act_out(&self, session: &mut Session, seeds: &[u64], stop: &Stop) -> Result<Vec<Episode>> {
        let play = |seed| Played::new(&self.environment, seed, self.target, self.ties, self.most);
        let mut rows = seeds.iter().map(|seed| play(*seed)).collect::<Result<Vec<_>>>()?;
        // Rows without an episode, and rows whose episode has ended, go on with what some row was shown last.
        let all: Vec<usize> = (0..session.rows()).collect();
        let of = |row: usize| row.min(seeds.len() - 1);
        session.reset(&all.iter().map(|row| (*row, memory_seed(seeds[of(*row)]))).collect::<Vec<_>>())?;
        let widths = self.environment.spaces().action.widths();
        let (mut shown, mut returns) = (Row::default(), Vec::new());
        loop {
            let running: Vec<usize> = (0..rows.len()).filter(|row| rows[*row].is_running()).collect();
            if running.is_empty() {
                return Ok(rows.into_iter().map(|row| row.episode).collect());
            }
            if stop.requested() {
                return Err(crate::Error::Stopped);
            }
            let stepped = if 2 * running.len() > all.len() { &all } else { &running };
            shown.clear();
            returns.clear();
            for row in stepped {
                shown.extend(rows[of(*row)].shown.values());
                returns.push(rows[of(*row)].to_go);
            }
            let mut actions = Row::zeros(widths, stepped.len());
            let seen = Seen { observation: shown.values(), returns: Some(&returns) };
            session.select_action(stepped, seen, Choose::Greedy, actions.as_mut())?;
            for (i, row) in stepped.iter().enumerate() {
                if *row >= rows.len() || !rows[*row].is_running() {
                    continue;
                }
                match rows[*row].step(actions.values().rows(widths, i, 1)) {
                    Err(crate::Error::Env(_)) if stop.requested() => return Err(crate::Error::Stopped),
                    Err(crate::Error::Env(error)) if error.is_lost() => {
                        rows[*row] = play(seeds[*row])?;
                        session.reset(&[(*row, memory_seed(seeds[*row]))])?;
                    }
                    stepped => stepped?,
                }
            }
        }
    }
}

impl OwnEpisodes for OwnStates {
    fn play(&self, position: u64, seeds: &[u64], stop: &Stop) -> elmur_data::Result<Option<Vec<Episode>>> {
        let Some(number) = self.snapshot_of(position / self.batch.max(1)) else { return Ok(None) };
        let play = || -> Result<Vec<Episode>> {
            let most = self.environment.facts().max_rows.unwrap_or(ROWS).clamp(1, ROWS);
            let rows = seeds.len().next_multiple_of(ROUND).min(most);
            let mut session = self.session(number, rows)?;
            let mut episodes = Vec::with_capacity(seeds.len());
            for seeds in seeds.chunks(rows) {
                episodes.extend(self.act_out(&mut session, seeds, stop)?);
            }
            lock(&self.idle).push((number, session));
            Ok(episodes)
        };
        play().map(Some).map_err(|error| match error {
            crate::Error::Stopped => elmur_data::Error::Stopped,
            error => elmur_envs::Error::foreign(error).into(),
        })
    }
}

/// An episode that is being played by the policy.
struct Played {
    env: Box<dyn Env>,
    player: Box<dyn Player>,
    wrapping: Wrapping,
    /// The newest observation, as the environment gives it and as the policy sees it.
    own: Row,
    shown: Row,
    /// The action that is taken, and the player's.
    action: Row,
    label: Row,
    /// What is left of the return that the policy is asked for.
    to_go: f32,
    episode: Episode,
    /// Steps after which the episode is cut. A policy that has lost its way would otherwise fill batches with it.
    most: usize,
    marks: Vec<bool>,
    ties: Option<Ties>,
}

impl Played {
    fn new(environment: &Environment, seed: u64, target: f32, ties: bool, most: usize) -> Result<Self> {
        let plain = environment.plain();
        let spaces = plain.spaces();
        let wrapping = Wrapping::new(spaces, environment.spec().wrappers)?;
        let shown = Row::of(&wrapping.spaces().observation);
        let (env, player) = plain.played()?;
        let mut played = Self {
            env,
            player,
            wrapping,
            own: Row::of(&spaces.observation),
            shown,
            action: Row::of(&spaces.action),
            label: Row::of(&spaces.action),
            to_go: target,
            episode: Episode { labels: Some(Column::of(&spaces.action)), ..Episode::empty(spaces) },
            most,
            marks: Vec::new(),
            ties: ties.then(|| Ties::of(&spaces.action)),
        };
        played.env.reset(seed, played.own.as_mut())?;
        played.player.reset();
        played.wrapping.observe(played.own.values(), None, played.shown.as_mut());
        Column::append(&mut played.episode.observations, &played.own, &played.env.spaces().observation);
        Ok(played)
    }

    fn is_running(&self) -> bool {
        !(self.episode.terminated || self.episode.truncated)
    }

    /// Takes the policy's action, behind the wrappers, and records it beside the player's.
    fn step(&mut self, action: Values<'_>) -> Result<()> {
        self.player.act(self.own.values(), self.label.as_mut());
        if let Some(ties) = &mut self.ties {
            ties.ask(&mut *self.player, self.label.values());
        }
        self.wrapping.unwrap_action(action, &mut self.action)?;
        self.player.took(self.action.values());
        self.marks.push(self.env.uses_action());
        let space = &self.env.spaces().action;
        Column::append(&mut self.episode.actions, &self.action, space);
        Column::append(self.episode.labels.get_or_insert_default(), &self.label, space);
        let step = self.env.step(self.action.values(), self.own.as_mut())?;
        self.wrapping.observe(self.own.values(), Some(self.action.values()), self.shown.as_mut());
        let episode = &mut self.episode;
        Column::append(&mut episode.observations, &self.own, &self.env.spaces().observation);
        episode.rewards.push(step.reward as f32);
        self.to_go -= step.reward as f32;
        let is_lost = !step.terminated && episode.rewards.len() >= self.most;
        (episode.terminated, episode.truncated) = (step.terminated, step.truncated || is_lost);
        if !self.is_running() {
            let marks = std::mem::take(&mut self.marks);
            self.episode.imitate = marks.contains(&false).then_some(marks);
            self.episode.accepted = self.ties.take().and_then(Ties::into_accepted);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use elmur_envs::Registry;
    use elmur_model::init;

    use super::*;
    use crate::overrides;

    /// What the policy did is recorded, and beside it what a player with the same history would have done.
    #[test]
    fn labels_are_the_players_in_the_policys_own_episodes() {
        let registry = Registry::builtin();
        for (preset, changes) in [
            ("popgym-RepeatPreviousEasy", &[][..]),
            ("popgym-PositionOnlyCartPoleEasy", &[]),
            ("cartpole", &["policy=bc-lstm"]),
        ] {
            let changes: Vec<String> = changes.iter().map(|s| (*s).to_owned()).collect();
            let config = overrides::apply(&RunConfig::preset(preset).unwrap(), &changes, &registry).unwrap();
            let environment = config.environment(&registry).unwrap().unwrap();
            let own = OwnStates::new(&config, &environment, 40).unwrap();
            let params = init::parameters(config.model.architecture(), 3).unwrap();
            own.keep(own.from, &params).unwrap();
            let position = (own.from + Loader::MOST_AHEAD) * own.batch;
            let stop = Stop::default();
            assert_eq!(own.play(position - own.batch, &[7, 8], &stop).unwrap(), None, "not yet");
            let episodes = own.play(position, &[7, 8, 9], &stop).unwrap().unwrap();
            assert!(episodes.iter().all(|episode| episode.steps() <= 40), "{preset}: longer than 40 steps");
            // One after the other they are the same.
            assert_eq!(own.play(position, &[8], &stop).unwrap().unwrap(), episodes[1..2], "{preset}");
            let plain = environment.plain();
            let spaces = plain.spaces();
            let mut differ = 0;
            for (episode, seed) in episodes.iter().zip(7..) {
                let (mut env, mut player) = plain.played().unwrap();
                let (mut observation, mut label) = (Row::of(&spaces.observation), Row::of(&spaces.action));
                env.reset(seed, observation.as_mut()).unwrap();
                player.reset();
                let (mut labels, mut rewards) = (Column::of(&spaces.action), Vec::new());
                for t in 0..episode.steps() {
                    player.act(observation.values(), label.as_mut());
                    Column::append(&mut labels, &label, &spaces.action);
                    let mut action = Row::of(&spaces.action);
                    let Column::I32(taken) = &episode.actions[0] else { panic!("choices") };
                    action.ints.copy_from_slice(&taken[t..=t]);
                    differ += usize::from(action != label);
                    player.took(action.values());
                    rewards.push(env.step(action.values(), observation.as_mut()).unwrap().reward as f32);
                }
                assert_eq!(episode.labels.as_ref(), Some(&labels), "{preset}");
                assert_eq!(episode.rewards, rewards, "{preset}");
                assert!(episode.terminated || episode.truncated);
            }
            assert!(differ > 0, "an untrained policy plays like the player in {preset}");
        }
    }

    #[test]
    fn the_snapshot_that_plays_follows_from_the_number_of_the_batch() {
        let registry = Registry::builtin();
        let mut config = RunConfig::preset("tmaze-quick").unwrap();
        (config.data.own_from, config.data.own_every) = (10, 5);
        let own = OwnStates::new(&config, &config.environment(&registry).unwrap().unwrap(), 40).unwrap();
        let ahead = Loader::MOST_AHEAD;
        let of = |batch| own.snapshot_of(batch);
        assert_eq!([of(0), of(9 + ahead), of(10 + ahead), of(14 + ahead)], [None, None, Some(10), Some(10)]);
        assert_eq!([of(15 + ahead), of(19 + ahead), of(20 + ahead)], [Some(15), Some(15), Some(20)]);
        assert!(!own.is_due(9) && own.is_due(10) && !own.is_due(11) && own.is_due(15));
        let params = init::parameters(config.model.architecture(), 0).unwrap();
        for batches in (10..=80).filter(|batches| own.is_due(*batches)) {
            own.keep(batches, &params).unwrap();
            // All that batches played ahead may still need are there, and no more than these.
            let numbers: Vec<u64> = own.needed(batches).iter().map(|(number, _)| *number).collect();
            assert_eq!(numbers.first(), of(batches).or(Some(10)).as_ref());
            assert_eq!(numbers.last(), Some(&batches));
        }
        let error = own.play(own.batch * 2000, &[1], &Stop::default()).unwrap_err().to_string();
        assert!(error.contains("as it was after"), "{error}");
    }
}
