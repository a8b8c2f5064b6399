//! Demonstrations: episodes that a player has played.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError, mpsc};

use elmur_base::{Row, Space, Stop, Values};
use elmur_envs::{Choices, Env, Environment, Played, Player};
use elmur_pool::{MAX_THREADS, granted_threads};
use elmur_rng::{Rng, Stream};
use serde_json::Value;

use crate::episode::joint_choices;
use crate::{Column, Episode, Error, ObservationKey, Result};

/// Plays one episode and records it. With probability `noise` a step takes a random action instead of the
/// player's, so that the player's next actions show how to recover. Random actions, and actions that the
/// environment does not use, are marked as not worth imitating. An episode whose process dies
/// ([`elmur_envs::Error::Lost`]) is begun anew. A requested stop is noticed at every step and ends the
/// episode with [`Error::Stopped`].
pub fn play(
    env: &mut dyn Env,
    player: &mut dyn Player,
    seed: u64,
    noise: f64,
    stop: &Stop,
) -> Result<Episode> {
    play_with(env, player, seed, How { noise, ties: false, drops_failures: false }, stop)
}

/// How episodes are played.
#[derive(Debug, Clone, Copy)]
pub(crate) struct How {
    /// Probability of a random action in place of the player's.
    pub(crate) noise: f64,
    /// Whether the player is asked for choices that are equally good, and one of them is drawn and taken.
    pub(crate) ties: bool,
    /// Whether an episode that does not solve the task is played again with another seed.
    pub(crate) drops_failures: bool,
}

/// Most seeds that are tried for one episode where failures are dropped.
const TRIES: u64 = 20;

/// The seed that takes the place of an episode's after so many failures: below 2^62, like those of all
/// demonstrations.
fn substitute(seed: u64, failures: u64) -> u64 {
    if failures == 0 {
        return seed;
    }
    let draw = Stream::new(seed, failures, SUBSTITUTE).block(0);
    (u64::from(draw[0]) << 32 | u64::from(draw[1])) >> 2
}

/// Choices that the player names as equally good, step by step.
#[derive(Debug)]
pub struct Ties {
    choices: Option<Choices>,
    accepted: Vec<bool>,
    any: bool,
}

impl Ties {
    /// For actions of this space; nothing is recorded where they are not discrete.
    pub fn of(action: &Space) -> Self {
        let choices = Choices::of(action).filter(|_| joint_choices(action) > 0);
        Self { choices, accepted: Vec::new(), any: false }
    }

    /// Asks the player about the action that it wrote last.
    pub fn ask(&mut self, player: &mut dyn Player, action: Values<'_>) {
        let Some(choices) = &self.choices else { return };
        let first = self.accepted.len();
        self.accepted.resize(first + choices.count(), false);
        let here = &mut self.accepted[first..];
        choices.accepted(player, action, here);
        self.any |= here.iter().filter(|accepted| **accepted).count() > 1;
    }

    /// Draws one of the choices that were named last and writes it to `action`, which is the player's. Returns
    /// whether it is another.
    fn draw(&self, rng: &mut Rng, action: &mut Row) -> bool {
        let Some(choices) = &self.choices else { return false };
        let last = &self.accepted[self.accepted.len() - choices.count()..];
        let named: Vec<usize> = (0..last.len()).filter(|choice| last[*choice]).collect();
        if named.len() < 2 {
            return false;
        }
        let (chosen, drawn) = (choices.index(action.values()), named[rng.below(named.len() as u32) as usize]);
        choices.write(drawn, action.as_mut().ints);
        drawn != chosen
    }

    /// What was recorded, [steps, choices]; none if the player has never named another choice.
    pub fn into_accepted(self) -> Option<Vec<bool>> {
        self.any.then_some(self.accepted)
    }
}

/// [`play`] that also asks the player for choices that are equally good, or plays on until an episode succeeds.
pub(crate) fn play_with(
    env: &mut dyn Env,
    player: &mut dyn Player,
    seed: u64,
    how: How,
    stop: &Stop,
) -> Result<Episode> {
    let mut failures = 0;
    loop {
        match play_once(env, player, substitute(seed, failures), how, stop) {
            // Whoever waits for another process is interrupted by the same stop.
            Err(Error::Env(_)) if stop.requested() => return Err(Error::Stopped),
            Err(Error::Env(error)) if error.is_lost() => {}
            Ok((_, Some(false))) if how.drops_failures => failures += 1,
            played => return played.map(|(episode, _)| episode),
        }
        if failures == TRIES {
            let problem = format!(
                "the player solved neither the episode of seed {seed} nor {} others in its place; record \
                 failures too, by the environment's setting for it (MIKASA-Robo: keep_failures=true)",
                TRIES - 1
            );
            return Err(elmur_envs::Error::foreign(problem).into());
        }
    }
}

/// An episode, and whether it solved the task, where the environment says so.
fn play_once(
    env: &mut dyn Env,
    player: &mut dyn Player,
    seed: u64,
    How { noise, ties, .. }: How,
    stop: &Stop,
) -> Result<(Episode, Option<bool>)> {
    let spaces = env.spaces().clone();
    let mut observation = Row::of(&spaces.observation);
    let mut action = Row::of(&spaces.action);
    let mut episode = Episode::empty(&spaces);
    let mut imitate = Vec::new();
    let mut named = ties.then(|| Ties::of(&spaces.action));
    let mut rng = Rng::new(seed, NOISE);
    let mut success = None;
    env.reset(seed, observation.as_mut())?;
    player.reset();
    loop {
        Column::append(&mut episode.observations, &observation, &spaces.observation);
        if episode.terminated || episode.truncated {
            episode.imitate = imitate.contains(&false).then_some(imitate);
            episode.accepted = named.and_then(Ties::into_accepted);
            return Ok((episode, success));
        }
        if stop.requested() {
            return Err(Error::Stopped);
        }
        player.act(observation.values(), action.as_mut());
        if let Some(named) = &mut named {
            named.ask(player, action.values());
            // A policy that may choose any of them must have seen what comes after each.
            if named.draw(&mut rng, &mut action) {
                player.took(action.values());
            }
        }
        let slip = noise > 0.0 && rng.uniform(0.0, 1.0) < noise;
        if slip {
            action = Row::default();
            spaces.action.sample(&mut rng, &mut action);
            player.took(action.values());
        }
        Column::append(&mut episode.actions, &action, &spaces.action);
        imitate.push(env.uses_action() && !slip);
        let step = env.step(action.values(), observation.as_mut())?;
        episode.rewards.push(step.reward as f32);
        (episode.terminated, episode.truncated, success) = (step.terminated, step.truncated, step.success);
    }
}

/// Numbers of the streams that noise and substitutes for seeds are drawn from.
const NOISE: u32 = 1 << 30;
const SUBSTITUTE: u32 = NOISE + 1;

/// Demonstrations to be played: environment, numbers of episodes, seed and noise.
#[derive(Debug, Clone)]
pub struct Demonstrations<'a> {
    /// The environment, played without its wrappers: [`wrap`](crate::wrap) adds them afterwards.
    pub environment: &'a Environment,
    /// Numbers of the episodes. Episode i has the seed `seed * 2^32 + i`, so that a collection can be
    /// continued. Where the environment drops failures ([`elmur_envs::Facts::drops_failures`]), an episode that
    /// is not solved is played again with seeds that follow from its own.
    pub episodes: Range<usize>,
    /// Seed of the collection.
    pub seed: u32,
    /// Probability of a random action in place of the player's: see [`play`].
    pub noise: f64,
    /// Threads that play at once; 0: as many as are granted. The episodes do not depend on their number.
    pub threads: usize,
    /// Ends the collection when it is requested, even within an episode. `Stop::default()`: never.
    pub stop: Stop,
}

/// Threads play at most this many episodes, times their number, before the first that is still missing is kept.
const AHEAD: usize = 4;

/// Keeps threads from playing far ahead of a slow episode: what they play waits in memory until that one is kept.
struct Ahead {
    /// Number of the first episode that is not kept; none: no more are wanted.
    kept: Mutex<Option<usize>>,
    moved: Condvar,
    most: usize,
}

impl Ahead {
    fn new(first: usize, most: usize) -> Self {
        Self { kept: Mutex::new(Some(first)), moved: Condvar::new(), most }
    }

    /// Waits until episode `i` may be played; false if no more are wanted.
    fn wait_for(&self, i: usize) -> bool {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let is_early = |kept: &mut Option<usize>| kept.is_some_and(|kept| i >= kept + self.most);
        self.moved.wait_while(kept, is_early).unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// All episodes before this one are kept.
    fn kept(&self, first_missing: usize) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        *kept = kept.map(|_| first_missing);
        drop(kept);
        self.moved.notify_all();
    }
}

/// When this is dropped after an error, or by a thread that panics, nobody waits any more.
struct End<'a> {
    ahead: &'a Ahead,
    /// Whether it ends the waiting without a panic too.
    always: bool,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        if self.always || std::thread::panicking() {
            *self.ahead.kept.lock().unwrap_or_else(PoisonError::into_inner) = None;
            self.ahead.moved.notify_all();
        }
    }
}

impl Demonstrations<'_> {
    fn players(&self) -> Result<Played> {
        Ok(self.environment.plain().played()?)
    }

    /// Plays all episodes with the environment's own player and hands each to `keep`, in order. An error of
    /// `keep` ends the collection, and so does a requested stop, with [`Error::Stopped`].
    pub fn collect(&self, mut keep: impl FnMut(Episode) -> Result<()>) -> Result<()> {
        // What is wrong with the settings is found before threads are started.
        drop(self.players()?);
        let wanted = if self.threads == 0 { granted_threads() } else { self.threads };
        let wanted = wanted.min(self.episodes.len()).min(MAX_THREADS);
        let next = AtomicUsize::new(self.episodes.start);
        let ahead = Ahead::new(self.episodes.start, AHEAD * wanted);
        let drops_failures = self.environment.facts().drops_failures;
        let how = How { noise: self.noise, ties: false, drops_failures };
        std::thread::scope(|scope| {
            let (sender, receiver) = mpsc::sync_channel(2 * wanted);
            let _end = End { ahead: &ahead, always: true };
            for thread in 0..wanted {
                let (sender, next, ahead) = (sender.clone(), &next, &ahead);
                let work = move || {
                    let _end = End { ahead, always: false };
                    let (mut env, mut player) = match self.players() {
                        Ok(players) => players,
                        Err(error) => return drop(sender.send((usize::MAX, Err(error)))),
                    };
                    loop {
                        let i = next.fetch_add(1, Ordering::Relaxed);
                        let seed = (u64::from(self.seed) << 32) + i as u64;
                        if i >= self.episodes.end || !ahead.wait_for(i) {
                            return;
                        }
                        // Where nobody listens any more, `keep` has failed.
                        let played = play_with(&mut *env, &mut *player, seed, how, &self.stop);
                        if sender.send((i, played)).is_err() {
                            return;
                        }
                    }
                };
                // A system that refuses another thread has granted the ones before it.
                if let Err(cause) = std::thread::Builder::new().spawn_scoped(scope, work)
                    && thread == 0
                {
                    return Err(elmur_envs::Error::foreign(cause).into());
                }
            }
            drop(sender);
            let mut waiting = BTreeMap::new();
            let mut kept = self.episodes.start;
            for (i, episode) in receiver {
                if i == usize::MAX {
                    return episode.map(drop);
                }
                waiting.insert(i, episode);
                while let Some(episode) = waiting.remove(&kept) {
                    keep(episode?)?;
                    kept += 1;
                }
                ahead.kept(kept);
            }
            Ok(())
        })
    }

    /// Notes on where the episodes come from, as metadata of a dataset: environment, settings, seed, noise, and
    /// the names of observations where the environment has some.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        let spec = self.environment.spec();
        let mut notes = BTreeMap::from([
            ("env".to_owned(), spec.name.clone()),
            ("expert".to_owned(), "scripted".to_owned()),
            ("seed".to_owned(), self.seed.to_string()),
        ]);
        note_settings(self.environment, |_| true, &mut notes);
        if self.noise > 0.0 {
            notes.insert("noise".to_owned(), self.noise.to_string());
        }
        let named = self.environment.facts().observations;
        ObservationKey::note_names(&named, &self.environment.plain().spaces().observation, &mut notes);
        notes
    }
}

/// Notes in metadata the settings of an environment that change what happens in its episodes, of those that
/// are `wanted`: numbers and lists as JSON, words as they are.
pub fn note_settings(
    environment: &Environment,
    wanted: impl Fn(&str) -> bool,
    metadata: &mut BTreeMap<String, String>,
) {
    let settings = environment.settings();
    let shapes = |key: &str| settings.iter().any(|setting| setting.key == key && setting.shapes_episodes);
    for (key, value) in &environment.spec().settings {
        if shapes(key) && wanted(key) {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            metadata.insert(key.clone(), text);
        }
    }
}

/// The settings that [`note_settings`] noted of an environment; a word that is JSON is read as JSON.
pub fn noted_settings<'a>(
    environment: &Environment,
    metadata: &'a BTreeMap<String, String>,
) -> Vec<(&'a str, Value)> {
    let settings = environment.settings();
    let shapes = |key: &str| settings.iter().any(|setting| setting.key == key && setting.shapes_episodes);
    let read = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()));
    metadata.iter().filter(|(key, _)| shapes(key)).map(|(key, text)| (key.as_str(), read(text))).collect()
}

#[cfg(test)]
mod tests {
    use elmur_envs::{EnvSpec, Purpose, Registry, Wrappers};

    use super::*;
    use crate::Dataset;

    fn environment(spec: EnvSpec) -> Environment {
        Registry::builtin().find(&spec).unwrap()
    }

    fn task(name: &str) -> Environment {
        environment(EnvSpec::new(name))
    }

    fn of(environment: &Environment, episodes: Range<usize>) -> Demonstrations<'_> {
        Demonstrations { environment, episodes, seed: 3, noise: 0.0, threads: 0, stop: Stop::default() }
    }

    fn played(demonstrations: &Demonstrations<'_>) -> Result<Vec<Episode>> {
        let mut kept = Vec::new();
        let keep = |episode| {
            kept.push(episode);
            Ok(())
        };
        demonstrations.collect(keep).map(|()| kept)
    }

    fn demonstrations(environment: &Environment, episodes: usize) -> Dataset {
        let kept = played(&of(environment, 0..episodes)).unwrap();
        Dataset::from_episodes(environment.plain().spaces().clone(), Default::default(), kept).unwrap()
    }

    #[test]
    fn maze_demonstrations_all_succeed_in_the_shortest_time() {
        let data = demonstrations(&environment(EnvSpec::new("tmaze").with("length", 30)), 500);
        let mut lengths = std::collections::BTreeSet::new();
        for i in 0..data.len() {
            let episode = data.episode(i);
            assert_eq!(episode.rewards.iter().sum::<f32>(), 1.0);
            assert!(episode.terminated && episode.has_final_observation(data.spaces()));
            lengths.insert(episode.steps());
        }
        // A corridor of C cells takes C + 1 steps; corridors reach from 1 to 28.
        assert!(lengths.into_iter().eq(2..=29));
    }

    #[test]
    fn pole_demonstrations_last_500_steps() {
        let data = demonstrations(&task("cartpole"), 3);
        assert!((0..3).all(|i| data.episode(i).steps() == 500 && data.episode(i).truncated));
    }

    #[test]
    fn episodes_do_not_depend_on_the_number_of_threads_or_on_where_a_collection_was_continued() {
        let env = task("popgym-RepeatPreviousEasy");
        let with = |threads| played(&Demonstrations { threads, ..of(&env, 0..57) }).unwrap();
        let one = with(1);
        assert_eq!(one.len(), 57);
        assert!(one == with(2) && one == with(5) && one == with(100_000));
        assert_ne!(one[0], one[1]);
        let parts = [played(&of(&env, 0..20)).unwrap(), played(&of(&env, 20..57)).unwrap()];
        assert!(parts.concat() == one);
        assert!(played(&of(&env, 5..5)).unwrap().is_empty());
    }

    #[test]
    fn ignored_actions_are_marked() {
        let data = demonstrations(&task("popgym-RepeatPreviousEasy"), 4);
        for i in 0..data.len() {
            let imitate = data.episode(i).imitate.unwrap();
            assert_eq!(imitate.len(), 51);
            assert!(imitate.iter().enumerate().all(|(t, imitate)| *imitate == (t >= 3)));
            assert!((data.episode(i).episode_return() - 1.0).abs() < 1e-5);
        }
        let data = demonstrations(&task("popgym-RepeatFirstEasy"), 2);
        assert_eq!(data.episode(0).imitate, None);
    }

    /// Slips are rare, marked, and hardly cost anything: the expert knows of them.
    #[test]
    fn experts_recover_from_noise() {
        let easy = [
            "PositionOnlyCartPole",
            "VelocityOnlyCartpole",
            "NoisyPositionOnlyCartPole",
            "PositionOnlyPendulum",
            "NoisyPositionOnlyPendulum",
        ];
        for (family, least) in easy.into_iter().zip([0.99, 0.99, 0.7, 0.8, 0.8]) {
            let (env, mut returns, mut slips, mut steps) = (task(&format!("popgym-{family}Easy")), 0.0, 0, 0);
            for episode in played(&Demonstrations { noise: 0.1, ..of(&env, 0..40) }).unwrap() {
                returns += episode.episode_return() / 40.0;
                slips += episode.imitate.iter().flatten().filter(|imitate| !**imitate).count();
                steps += episode.steps();
            }
            let rate = slips as f64 / steps as f64;
            assert!(returns > least && (rate - 0.1).abs() < 0.02, "{family}: {returns}, {rate}");
        }
    }

    /// No player refuses, whatever is taken in its place, and every slip is marked.
    #[test]
    fn all_environments_can_be_played_with_noise() {
        let registry = Registry::builtin();
        let names = registry
            .names()
            .into_iter()
            .filter(|name| !name.starts_with("popgym") || name.ends_with("Easy-v0"))
            .filter(|name| !name.starts_with("mikasa"));
        for name in names {
            let env = task(&name);
            for episode in played(&Demonstrations { noise: 1.0, ..of(&env, 0..2) }).unwrap() {
                let imitated = episode.imitate.iter().flatten().filter(|imitate| **imitate).count();
                assert!(imitated == 0 && episode.imitate.is_some(), "{name}: {imitated}");
            }
        }
    }

    #[test]
    fn episodes_are_collected_without_wrappers() {
        let wrappers = Wrappers { previous_action: true, first_step: true, ..Wrappers::default() };
        let env = environment(EnvSpec::new("popgym-RepeatFirstEasy").with_wrappers(wrappers));
        let plain = played(&of(&task("popgym-RepeatFirstEasy"), 0..3)).unwrap();
        assert!(played(&of(&env, 0..3)).unwrap() == plain);
        let notes = of(&env, 0..3).metadata();
        assert_eq!(
            (notes["env"].as_str(), notes["version"].as_str()),
            ("popgym-RepeatFirstEasy-v0", "1.0.7")
        );
    }

    #[test]
    fn a_stop_within_a_long_episode_ends_the_collection() {
        struct Endless {
            spaces: elmur_base::Spaces,
            steps: usize,
            stop: Stop,
        }
        impl Env for Endless {
            fn spaces(&self) -> &elmur_base::Spaces {
                &self.spaces
            }
            fn reset(&mut self, _: u64, _: elmur_base::ValuesMut<'_>) -> elmur_envs::Result<()> {
                Ok(())
            }
            fn step(
                &mut self,
                _: Values<'_>,
                _: elmur_base::ValuesMut<'_>,
            ) -> elmur_envs::Result<elmur_envs::Step> {
                self.steps += 1;
                if self.steps == 1500 {
                    self.stop.request(15);
                }
                Ok(elmur_envs::Step { truncated: self.steps == 100_000, ..Default::default() })
            }
        }
        struct Idle;
        impl Player for Idle {
            fn reset(&mut self) {}
            fn act(&mut self, _: Values<'_>, _: elmur_base::ValuesMut<'_>) {}
            fn took(&mut self, _: Values<'_>) {}
        }
        let spaces =
            elmur_base::Spaces { observation: Space::unbounded([1]), action: Space::Discrete { n: 2 } };
        let stop = Stop::default();
        let mut env = Endless { spaces, steps: 0, stop: stop.clone() };
        assert!(matches!(play(&mut env, &mut Idle, 0, 0.0, &stop), Err(Error::Stopped)));
        assert_eq!(env.steps, 1500);
        // Requested before: nothing is played.
        let tmaze = task("tmaze");
        let demonstrations = Demonstrations { stop, ..of(&tmaze, 0..9) };
        assert!(matches!(played(&demonstrations), Err(Error::Stopped)));
    }

    /// An environment of one step, whose resets are this function of the seed.
    type Begin = fn(u64) -> elmur_envs::Result<()>;

    fn beginning(begin: Begin) -> Environment {
        struct Begins(elmur_base::Spaces, Begin);
        impl Env for Begins {
            fn spaces(&self) -> &elmur_base::Spaces {
                &self.0
            }
            fn reset(&mut self, seed: u64, _: elmur_base::ValuesMut<'_>) -> elmur_envs::Result<()> {
                self.1(seed)
            }
            fn step(
                &mut self,
                _: Values<'_>,
                _: elmur_base::ValuesMut<'_>,
            ) -> elmur_envs::Result<elmur_envs::Step> {
                Ok(elmur_envs::Step { truncated: true, ..Default::default() })
            }
        }
        struct Idle;
        impl Player for Idle {
            fn reset(&mut self) {}
            fn act(&mut self, _: Values<'_>, _: elmur_base::ValuesMut<'_>) {}
            fn took(&mut self, _: Values<'_>) {}
        }
        struct Arms(Begin);
        impl elmur_envs::Family for Arms {
            fn names(&self) -> Vec<String> {
                vec!["arm".to_owned()]
            }
            fn make(&self, _: &EnvSpec, _: Purpose) -> elmur_envs::Result<Box<dyn Env>> {
                let spaces = elmur_base::Spaces {
                    observation: Space::unbounded([1]),
                    action: Space::Discrete { n: 2 },
                };
                Ok(Box::new(Begins(spaces, self.0)))
            }
            fn player(&self, _: &EnvSpec) -> elmur_envs::Result<Option<Box<dyn Player>>> {
                Ok(Some(Box::new(Idle)))
            }
        }
        Registry::builtin().with(Arms(begin)).find(&EnvSpec::new("arm")).unwrap()
    }

    /// Episode 5 takes 200 ms, all others next to nothing.
    #[test]
    fn threads_do_not_play_far_ahead_of_a_slow_episode() {
        static LAST: AtomicUsize = AtomicUsize::new(0);
        static AHEAD_OF_5: AtomicUsize = AtomicUsize::new(0);
        let slow = beginning(|seed| {
            LAST.fetch_max(seed as u32 as usize, Ordering::SeqCst);
            if seed as u32 == 5 {
                std::thread::sleep(std::time::Duration::from_millis(200));
                AHEAD_OF_5.store(LAST.load(Ordering::SeqCst), Ordering::SeqCst);
            }
            Ok(())
        });
        let mut kept = 0;
        let keep = |_| {
            kept += 1;
            Ok(())
        };
        Demonstrations { threads: 3, ..of(&slow, 0..5000) }.collect(keep).unwrap();
        assert_eq!(kept, 5000);
        let ahead = AHEAD_OF_5.load(Ordering::SeqCst);
        assert!((5..5 + 3 * AHEAD).contains(&ahead), "{ahead}");
    }

    #[test]
    fn a_keeper_who_refuses_and_a_foreign_error_end_the_collection() {
        let refuse = |_| Err(Error::Empty { path: "x".into() });
        let env = task("popgym-RepeatFirstEasy");
        assert!(Demonstrations { threads: 3, ..of(&env, 0..1000) }.collect(refuse).is_err());

        let arm = beginning(|seed| {
            if seed % 8 == 5 { Err(elmur_envs::Error::foreign("the arm is jammed")) } else { Ok(()) }
        });
        let mut kept = 0;
        let keep = |_| {
            kept += 1;
            Ok(())
        };
        let error = of(&arm, 0..100).collect(keep).unwrap_err().to_string();
        assert_eq!((error.as_str(), kept), ("the arm is jammed", 5));
    }
}
