//! Demonstrations: episodes that a scripted expert plays.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use elmur_base::{Row, Spaces};
use elmur_envs::{
    Behind, CartPole, CartPoleExpert, Env, EnvConfig, EnvKind, Expert, Playing, TMazeExpert, Wrapped,
    Wrappers,
};
use elmur_rng::Rng;

use crate::episode::{append, columns};
use crate::{Episode, Result};

/// Plays one episode and records it. With probability `noise` a step takes a random action instead of the
/// expert's, so that the expert's next actions show how to recover. Random actions, and actions that the
/// environment does not use, are marked as not worth imitating.
pub fn play<X: Expert>(env: &mut X::Env, expert: &mut X, seed: u64, noise: f64) -> Result<Episode> {
    let spaces = env.spaces().clone();
    let mut observation = Row::of(&spaces.observation);
    let mut action = Row::of(&spaces.action);
    let mut episode = Episode {
        observations: columns(&spaces.observation),
        actions: columns(&spaces.action),
        rewards: Vec::new(),
        terminated: false,
        truncated: false,
        imitate: None,
    };
    let mut imitate = Vec::new();
    let mut rng = Rng::new(seed, NOISE);
    env.reset(seed, observation.as_mut())?;
    expert.reset();
    loop {
        append(&observation, &spaces.observation, &mut episode.observations);
        if episode.terminated || episode.truncated {
            episode.imitate = imitate.contains(&false).then_some(imitate);
            return Ok(episode);
        }
        expert.act(env, observation.values(), action.as_mut());
        let slip = noise > 0.0 && rng.uniform(0.0, 1.0) < noise;
        if slip {
            action = Row::default();
            spaces.action.sample(&mut rng, &mut action);
            if !expert.overruled(action.values()) {
                return Err(elmur_envs::Error::Config {
                    key: "noise",
                    expected: "0: this environment's expert cannot go on from another's action".to_owned(),
                    got: noise.to_string(),
                }
                .into());
            }
        }
        append(&action, &spaces.action, &mut episode.actions);
        imitate.push(env.uses_action() && !slip);
        let step = env.step(action.values(), observation.as_mut())?;
        episode.rewards.push(step.reward as f32);
        (episode.terminated, episode.truncated) = (step.terminated, step.truncated);
    }
}

/// Number of the stream that noise is drawn from.
const NOISE: u32 = 1 << 30;

/// Plays the episode of a seed.
type Play = Box<dyn FnMut(u64) -> Result<Episode>>;

/// Makes a function that plays episodes of the environment with its own expert.
fn demonstrator(config: &EnvConfig, noise: f64) -> Result<Play> {
    fn playing<X: Expert + 'static>(env: X::Env, expert: X, wrappers: Wrappers, noise: f64) -> Result<Play>
    where
        X::Env: 'static,
    {
        let mut env = Wrapped::new(env, wrappers)?;
        let mut expert = Behind::new(expert, &env);
        Ok(Box::new(move |seed| play(&mut env, &mut expert, seed, noise)))
    }
    let wrappers = config.wrappers;
    match config.name {
        EnvKind::TMaze => playing(config.training_maze()?, TMazeExpert::default(), wrappers, noise),
        EnvKind::CartPole => playing(CartPole::new(), CartPoleExpert, wrappers, noise),
        EnvKind::Popgym(task) => {
            playing(task.make(config.version), Playing::new(task.player(config.version)), wrappers, noise)
        }
    }
}

/// Plays `episodes` episodes with the environment's own expert (see [`play`] for `noise`) and hands each to
/// `keep`, in order. Episode i has the seed `seed * 2^32 + i`. An error of `keep` ends the collection.
/// `threads` threads play at once (0: one per core); the episodes do not depend on their number.
pub fn collect(
    config: &EnvConfig,
    episodes: usize,
    seed: u32,
    noise: f64,
    threads: usize,
    mut keep: impl FnMut(Episode) -> Result<()>,
) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if threads == 0 { cores } else { threads }.min(episodes);
    drop(demonstrator(config, noise)?);
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let (sender, receiver) = mpsc::sync_channel(2 * threads);
        for _ in 0..threads {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                // Checked above.
                let Ok(mut play) = demonstrator(config, noise) else { return };
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    // Where nobody listens any more, `keep` has failed.
                    if i >= episodes || sender.send((i, play((u64::from(seed) << 32) + i as u64))).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut waiting = BTreeMap::new();
        let mut kept = 0;
        for (i, episode) in receiver {
            waiting.insert(i, episode);
            while let Some(episode) = waiting.remove(&kept) {
                keep(episode?)?;
                kept += 1;
            }
        }
        Ok(())
    })
}

/// The spaces of the environment that [`collect`] plays.
pub fn spaces(config: &EnvConfig) -> Result<Spaces> {
    if config.name == EnvKind::TMaze {
        config.training_maze()?;
    }
    Ok(config.evaluation()?.spaces().clone())
}

/// The metadata of a dataset that [`collect`] has played.
pub fn metadata(config: &EnvConfig, seed: u32, noise: f64) -> BTreeMap<String, String> {
    let mut notes = vec![
        ("env", config.name.name().to_owned()),
        ("expert", "scripted".to_owned()),
        ("seed", seed.to_string()),
    ];
    match config.name {
        EnvKind::TMaze => notes.push(("length", config.length.to_string())),
        EnvKind::CartPole => {}
        EnvKind::Popgym(_) => notes.push(("version", config.version.name().to_owned())),
    }
    if noise > 0.0 {
        notes.push(("noise", noise.to_string()));
    }
    if !config.wrappers.is_none() {
        notes.push(("wrappers", config.wrappers.names().join(", ")));
    }
    notes.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Column, Dataset};

    fn demonstrations(config: EnvConfig, episodes: usize) -> Dataset {
        let mut kept = Vec::new();
        collect(&config, episodes, 3, 0.0, 0, |episode| {
            kept.push(episode);
            Ok(())
        })
        .unwrap();
        Dataset::from_episodes(spaces(&config).unwrap(), Default::default(), kept).unwrap()
    }

    #[test]
    fn maze_demonstrations_all_succeed_in_the_shortest_time() {
        let data = demonstrations(EnvConfig::tmaze(30), 500);
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
        let data = demonstrations(EnvConfig::cartpole(), 3);
        assert!((0..3).all(|i| data.episode(i).steps() == 500 && data.episode(i).truncated));
    }

    fn task(id: &str) -> EnvConfig {
        EnvConfig::popgym(elmur_envs::popgym::Task::find(id).unwrap())
    }

    #[test]
    fn episodes_do_not_depend_on_the_number_of_threads() {
        let config = task("popgym-RepeatPreviousEasy");
        let of = |threads| {
            let mut kept = Vec::new();
            collect(&config, 57, 1, 0.0, threads, |episode| {
                kept.push(episode);
                Ok(())
            })
            .unwrap();
            kept
        };
        let one = of(1);
        assert_eq!(one.len(), 57);
        assert!(one == of(2) && one == of(5));
        assert_ne!(one[0], one[1]);
    }

    #[test]
    fn ignored_actions_are_marked() {
        let data = demonstrations(task("popgym-RepeatPreviousEasy"), 4);
        for i in 0..data.len() {
            let imitate = data.episode(i).imitate.unwrap();
            assert_eq!(imitate.len(), 51);
            assert!(imitate.iter().enumerate().all(|(t, imitate)| *imitate == (t >= 3)));
            assert!((data.episode(i).episode_return() - 1.0).abs() < 1e-5);
        }
        let data = demonstrations(task("popgym-RepeatFirstEasy"), 2);
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
            let (config, mut returns, mut slips, mut steps) =
                (task(&format!("popgym-{family}Easy")), 0.0, 0, 0);
            collect(&config, 40, 3, 0.1, 0, |episode| {
                returns += episode.episode_return() / 40.0;
                slips += episode.imitate.iter().flatten().filter(|imitate| !**imitate).count();
                steps += episode.steps();
                Ok(())
            })
            .unwrap();
            let rate = slips as f64 / steps as f64;
            assert!(returns > least && (rate - 0.1).abs() < 0.02, "{family}: {returns}, {rate}");
        }
        let error = collect(&task("popgym-BattleshipEasy"), 2, 0, 0.5, 1, |_| Ok(())).unwrap_err();
        assert!(error.to_string().contains("cannot go on"), "{error}");
    }

    #[test]
    fn wrappers_are_part_of_what_is_collected() {
        let wrappers = Wrappers { previous_action: true, first_step: true, ..Wrappers::default() };
        let config = EnvConfig { wrappers, ..task("popgym-RepeatFirstEasy") };
        let data = demonstrations(config, 3);
        let episode = data.episode(1).to_episode();
        let column = |i: usize| match &episode.observations[i] {
            Column::I32(x) => x.clone(),
            _ => panic!("integers"),
        };
        let Column::I32(actions) = &episode.actions[0] else { panic!("integers") };
        assert_eq!(column(1)[0], 0);
        assert_eq!(column(1)[1..], actions[..]);
        assert_eq!(column(2)[..3], [1, 0, 0]);
        assert_eq!(metadata(&config, 0, 0.0)["wrappers"], "previous_action, first_step");
    }

    #[test]
    fn a_keeper_who_refuses_ends_the_collection() {
        let refuse = |_| Err(crate::Error::Empty { path: "x".into() });
        assert!(collect(&task("popgym-RepeatFirstEasy"), 1000, 0, 0.0, 3, refuse).is_err());
        assert!(collect(&EnvConfig::tmaze(1), 10, 0, 0.0, 2, |_| Ok(())).is_err());
    }
}
