//! Demonstrations without end: every batch is made of episodes that were not played before.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use elmur_base::Stop;
use elmur_envs::{Env, Environment, Player};
use elmur_rng::Stream as Draws;

use crate::collect::{How, play_with};
use crate::error::Result;
use crate::{Crop, Dataset, Episode, Error, Sampler, Source, wrap};

/// Episodes that an environment's player plays while they are needed. What a batch holds is a function of the
/// stream and of the batch's position alone, whatever thread plays it and whatever came before, so that the
/// position is all that needs to be saved to go on.
#[derive(Debug, Clone)]
pub struct Stream {
    /// The environment, played without its wrappers and shown with them.
    pub environment: Environment,
    /// Seed of the collection: episode i has the seed `seed * 2^32 + i`.
    pub seed: u32,
    /// Number of the first episode.
    pub first: u64,
    /// Probability of a random action in place of the player's: see [`play`](crate::collect::play).
    pub noise: f64,
    /// Whether players are asked for choices that are equally good, one of which is drawn and taken: see
    /// [`Episode::accepted`].
    pub ties: bool,
    /// Steps of a crop.
    pub length: usize,
    /// Steps that a crop begins before a random step of its episode: see [`Sampler::with_lead`].
    pub lead: usize,
    /// Whether crops begin at any step of their episode: see [`Sampler::with_starts`].
    pub anywhere: bool,
    /// Crops that an episode is expected to give: how many episodes are played at a time.
    pub crops_per_episode: usize,
    /// Steps of the longest demonstration that is known; the policy's own episodes are cut there.
    pub longest: usize,
    /// The policy that plays some of the episodes itself, and their share, 0 to 1.
    pub own: Option<(Arc<dyn OwnEpisodes>, f64)>,
    /// Threads that play at once; 0: as many as are granted.
    pub threads: usize,
}

/// A policy that plays episodes itself, while the player says what it would have done: it learns in states that it
/// comes to by its own mistakes.
pub trait OwnEpisodes: Debug + Send + Sync {
    /// Plays one episode per seed for the batch at `position`, with the player's actions as
    /// [labels](Episode::labels); none as long as the policy does not play.
    fn play(&self, position: u64, seeds: &[u64], stop: &Stop) -> Result<Option<Vec<Episode>>>;
}

/// An environment and its player, made once per thread.
pub(crate) struct Playing {
    env: Box<dyn Env>,
    player: Box<dyn Player>,
}

impl Stream {
    /// An environment and a player for one thread.
    pub(crate) fn playing(&self) -> Result<Playing> {
        let (env, player) = self.environment.plain().played()?;
        Ok(Playing { env, player })
    }

    /// The episodes and the `rows` crops of the batch at `position`, which counts the crops of the batches
    /// before. A batch takes the episodes from number `first + position` on, each with as many crops as its
    /// length gives, and at most `rows` of them: so no two batches share one.
    pub(crate) fn batch(
        &self,
        playing: &mut Playing,
        position: u64,
        rows: usize,
        stop: &Stop,
    ) -> Result<(Arc<dyn Source>, Vec<Crop>)> {
        let (mut episodes, mut crops) = (Vec::new(), 0);
        while crops < rows {
            let next = (self.first + position).saturating_add(episodes.len() as u64);
            let count = (rows - crops).div_ceil(self.crops_per_episode.max(1)) as u64;
            if next.saturating_add(count) > 1 << 32 {
                let expected = "a stream of at most 2^32 episodes; begin another run with another data.seed";
                let (what, expected) = ("episodes", expected.to_owned());
                return Err(Error::Choice { what, expected, got: format!("episode {next}") });
            }
            for episode in self.play(playing, position, next..next + count, stop)? {
                crops += episode.rewards.len().div_ceil(self.length.max(1)).max(1);
                episodes.push(episode);
            }
        }
        let spaces = self.environment.plain().spaces().clone();
        let plain: Arc<dyn Source> = Arc::new(Dataset::from_episodes(spaces, BTreeMap::new(), episodes)?);
        let wrappers = self.environment.spec().wrappers;
        let source = if wrappers.is_none() { plain } else { wrap(&plain, wrappers)? };
        let seed = Draws::new(u64::from(self.seed), position, CROPS).block(0);
        let seed = u64::from(seed[0]) << 32 | u64::from(seed[1]);
        let sampler = Sampler::new(&*source, self.length, seed);
        let crops = sampler.with_lead(self.lead).with_starts(self.anywhere).next_crops(rows);
        Ok((source, crops))
    }
}

impl Stream {
    /// The episodes of these numbers, some of them played by the policy.
    fn play(
        &self,
        playing: &mut Playing,
        position: u64,
        numbers: Range<u64>,
        stop: &Stop,
    ) -> Result<Vec<Episode>> {
        let seed = |number: u64| (u64::from(self.seed) << 32) + number;
        let mut own = Vec::new().into_iter();
        let mut is_own = vec![false; numbers.clone().count()];
        if let Some((policy, share)) = &self.own {
            let draw = |number| f64::from(Draws::new(u64::from(self.seed), number, OWN).draw(0));
            for (number, is_own) in numbers.clone().zip(&mut is_own) {
                *is_own = draw(number) < share * f64::from(u32::MAX);
            }
            let chosen = numbers.clone().zip(&is_own).filter(|(_, own)| **own);
            let seeds: Vec<u64> = chosen.map(|(number, _)| seed(number)).collect();
            if !seeds.is_empty()
                && let Some(episodes) = policy.play(position, &seeds, stop)?
            {
                own = episodes.into_iter();
            }
        }
        let mut episodes = Vec::with_capacity(is_own.len());
        for (number, is_own) in numbers.zip(is_own) {
            episodes.push(match is_own.then(|| own.next()).flatten() {
                Some(episode) => episode,
                None => {
                    let (env, player) = (&mut *playing.env, &mut *playing.player);
                    let drops_failures = self.environment.facts().drops_failures;
                    let how = How { noise: self.noise, ties: self.ties, drops_failures };
                    play_with(env, player, seed(number), how, stop)?
                }
            });
        }
        Ok(episodes)
    }
}

/// Random streams: the crops of batches, and who plays an episode.
const CROPS: u32 = 2;
const OWN: u32 = 3;

#[cfg(test)]
mod tests {
    use elmur_base::{Field, FieldMut, Row, Values};
    use elmur_envs::{Choices, EnvSpec, Registry};

    use super::*;
    use crate::{Buffer, Column, Loader, Request, Window};

    fn stream(name: &str, length: usize, threads: usize) -> Stream {
        let environment = Registry::builtin().find(&EnvSpec::new(name)).unwrap();
        Stream {
            environment,
            seed: 5,
            first: 100,
            noise: 0.0,
            ties: false,
            length,
            lead: 0,
            anywhere: false,
            longest: 100,
            crops_per_episode: 1,
            own: None,
            threads,
        }
    }

    fn request(rows: usize, steps: usize) -> Request {
        let fields = vec![
            (Field::Observation(0), Buffer::I32(Vec::new()), 1),
            (Field::Imitate, Buffer::Bool(Vec::new()), 1),
        ];
        Request { rows, windows: 1, steps, fields }
    }

    #[test]
    fn batches_do_not_depend_on_threads_and_can_be_sought() {
        let batches = |threads| {
            let mut loader = Loader::fresh(stream("popgym-RepeatPreviousEasy", 20, threads), request(6, 20));
            (0..8).map(|_| loader.next_batch().unwrap()).map(|b| (b.fields, b.position)).collect::<Vec<_>>()
        };
        let one = batches(1);
        assert_eq!(one, batches(3));
        assert_eq!(
            one.iter().map(|(_, position)| *position).collect::<Vec<_>>(),
            [6, 12, 18, 24, 30, 36, 42, 48]
        );
        let mut loader = Loader::fresh(stream("popgym-RepeatPreviousEasy", 20, 2), request(6, 20));
        loader.next_batch().unwrap();
        loader.seek(30);
        let batch = loader.next_batch().unwrap();
        assert_eq!((&batch.fields, batch.position), (&one[5].0, 36));
        assert_eq!(loader.position(), 36);
    }

    #[test]
    fn no_episode_is_shown_in_two_batches() {
        let stream = stream("popgym-RepeatFirstEasy", 60, 1);
        let mut playing = stream.playing().unwrap();
        let mut seen = std::collections::BTreeSet::new();
        for position in (0..40).step_by(4) {
            let (source, crops) = stream.batch(&mut playing, position, 4, &Stop::default()).unwrap();
            assert_eq!((source.episodes(), crops.len()), (4, 4));
            assert!((0..4).all(|episode| seen.insert(source.checksum(episode))), "batch at {position}");
        }
        // The episodes are those that a collection with the same seed has at these numbers.
        let demonstrations = crate::collect::Demonstrations {
            environment: &stream.environment,
            episodes: 100..104,
            seed: 5,
            noise: 0.0,
            threads: 1,
            stop: Stop::default(),
        };
        let mut collected = Vec::new();
        let keep = |episode| {
            collected.push(episode);
            Ok(())
        };
        demonstrations.collect(keep).unwrap();
        let spaces = stream.environment.plain().spaces().clone();
        let collected = Dataset::from_episodes(spaces, BTreeMap::new(), collected).unwrap();
        assert!((0..4).all(|episode| seen.contains(&collected.checksum(episode))));
    }

    /// An episode of many crops gives all of them to one batch, and crops lie inside the episode.
    #[test]
    fn long_episodes_give_several_crops() {
        let stream = Stream { crops_per_episode: 5, ..stream("cartpole", 100, 1) };
        let mut playing = stream.playing().unwrap();
        let (source, crops) = stream.batch(&mut playing, 0, 8, &Stop::default()).unwrap();
        assert_eq!(source.episodes(), 2);
        assert!(crops.iter().all(|crop| crop.start + 100 <= source.steps(crop.episode)));
        let window = Window { source: &*source, crops: &crops, offset: 0, length: 100 };
        let mut shown = vec![0.0; 8 * 100 * 4];
        window.fill(Field::Observation(0), FieldMut::F32(&mut shown)).unwrap();
        assert!(shown.iter().any(|x| *x != 0.0));
    }

    /// What is accepted is what a player with the same history names; one of it is drawn and taken.
    #[test]
    fn ties_are_those_that_the_player_names() {
        let plain = stream("popgym-MineSweeperEasy", 16, 1);
        let ties = Stream { ties: true, ..plain.clone() };
        let batch = |stream: &Stream| {
            let mut playing = stream.playing().unwrap();
            stream.batch(&mut playing, 0, 6, &Stop::default()).unwrap().0
        };
        let (env, alone, played) = (ties.environment.plain(), batch(&plain), batch(&ties));
        assert!((0..6).all(|i| alone.episode(i).unwrap().accepted.is_none()));
        let choices = Choices::of(&env.spaces().action).unwrap();
        let (mut more, mut others) = (0, 0);
        for i in 0..6 {
            let episode = played.episode(i).unwrap();
            let Some(accepted) = episode.accepted else { continue };
            let [Column::I32(cells)] = &episode.actions[..] else { panic!("cells") };
            let (mut env, mut player) = env.played().unwrap();
            let (mut seen, mut cell) = (Row::of(&env.spaces().observation), Row::of(&env.spaces().action));
            env.reset((u64::from(ties.seed) << 32) + ties.first + i as u64, seen.as_mut()).unwrap();
            player.reset();
            for (taken, accepted) in cells.chunks_exact(2).zip(accepted.chunks_exact(choices.count())) {
                let taken = Values::ints(taken);
                player.act(seen.values(), cell.as_mut());
                let mut named = vec![false; choices.count()];
                choices.accepted(&mut *player, cell.values(), &mut named);
                assert_eq!(named, accepted);
                assert!(named[choices.index(taken)]);
                more += named.iter().filter(|named| **named).count() - 1;
                others += usize::from(choices.index(taken) != choices.index(cell.values()));
                player.took(taken);
                env.step(taken, seen.as_mut()).unwrap();
            }
        }
        assert!(more > 0 && others > 0, "{more} ties, {others} of them taken in six boards");
    }

    #[test]
    fn a_stream_ends_where_its_numbers_do() {
        let stream = Stream { first: u64::from(u32::MAX) - 1, ..stream("popgym-RepeatFirstEasy", 60, 1) };
        let mut loader = Loader::fresh(stream, request(2, 60));
        loader.next_batch().unwrap();
        let error = loader.next_batch().unwrap_err().to_string();
        assert!(error.contains("data.seed"), "{error}");
    }
}
