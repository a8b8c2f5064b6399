//! Demonstrations: an expert plays, and what happened is kept.

use std::collections::BTreeMap;

use elmur_envs::{
    CartPole, CartPoleExpert, Env, EnvConfig, EnvKind, Expert, Leaf, Space, Spaces, TMazeExpert, Values,
    ValuesMut,
};

use crate::{Column, Episode, Result};

/// Plays one episode.
pub fn play<X: Expert>(env: &mut X::Env, expert: &mut X, seed: u64) -> Result<Episode> {
    let spaces = env.spaces().clone();
    let mut observation = Numbers::of(&spaces.observation);
    let mut action = Numbers::of(&spaces.action);
    let mut episode = Episode {
        observations: columns(&spaces.observation),
        actions: columns(&spaces.action),
        rewards: Vec::new(),
        terminated: false,
        truncated: false,
        counts: None,
    };
    env.reset(seed, observation.room());
    expert.reset();
    loop {
        observation.append_to(&spaces.observation, &mut episode.observations);
        if episode.terminated || episode.truncated {
            return Ok(episode);
        }
        expert.act(env, observation.values(), action.room());
        action.append_to(&spaces.action, &mut episode.actions);
        let step = env.step(action.values(), observation.room())?;
        episode.rewards.push(step.reward as f32);
        (episode.terminated, episode.truncated) = (step.terminated, step.truncated);
    }
}

/// Plays `episodes` episodes with the environment's own expert, from seed `seed * 2^32` on, and hands each to `keep`.
pub fn collect(
    config: &EnvConfig,
    episodes: usize,
    seed: u32,
    mut keep: impl FnMut(Episode) -> Result<()>,
) -> Result<()> {
    let seeds = (0..episodes as u64).map(|i| (u64::from(seed) << 32) + i);
    match config.name {
        EnvKind::TMaze => {
            let (mut env, mut expert) = (config.training_maze()?, TMazeExpert::default());
            seeds.into_iter().try_for_each(|seed| keep(play(&mut env, &mut expert, seed)?))
        }
        EnvKind::CartPole => {
            let (mut env, mut expert) = (CartPole::new(), CartPoleExpert);
            seeds.into_iter().try_for_each(|seed| keep(play(&mut env, &mut expert, seed)?))
        }
    }
}

/// The spaces of the environment that [`collect`] plays.
pub fn spaces(config: &EnvConfig) -> Result<Spaces> {
    Ok(match config.name {
        EnvKind::TMaze => config.training_maze()?.spaces().clone(),
        EnvKind::CartPole => CartPole::new().spaces().clone(),
    })
}

/// What a dataset of [`collect`]ed episodes says of itself.
pub fn metadata(config: &EnvConfig, seed: u32) -> BTreeMap<String, String> {
    let mut notes = vec![
        ("env", config.name.name().to_owned()),
        ("expert", "scripted".to_owned()),
        ("seed", seed.to_string()),
    ];
    if config.name == EnvKind::TMaze {
        notes.push(("length", config.length.to_string()));
    }
    notes.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// One value of a space.
struct Numbers {
    floats: Vec<f32>,
    ints: Vec<i32>,
}

impl Numbers {
    fn of(space: &Space) -> Self {
        Self { floats: vec![0.0; space.floats()], ints: vec![0; space.ints()] }
    }

    fn values(&self) -> Values<'_> {
        Values { floats: &self.floats, ints: &self.ints }
    }

    fn room(&mut self) -> ValuesMut<'_> {
        ValuesMut { floats: &mut self.floats, ints: &mut self.ints }
    }

    fn append_to(&self, space: &Space, columns: &mut [Column]) {
        let (mut floats, mut ints) = (&self.floats[..], &self.ints[..]);
        for (leaf, column) in space.leaves().iter().zip(columns) {
            match column {
                Column::F32(data) => {
                    data.extend_from_slice(floats.split_off(..leaf.len()).unwrap_or_default())
                }
                Column::I32(data) => data.extend_from_slice(ints.split_off(..leaf.len()).unwrap_or_default()),
                Column::U8(_) => {}
            }
        }
    }
}

fn columns(space: &Space) -> Vec<Column> {
    let column = |leaf: &Leaf<'_>| match leaf {
        Leaf::Ints(_) => Column::I32(Vec::new()),
        Leaf::Floats { .. } => Column::F32(Vec::new()),
    };
    space.leaves().iter().map(column).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dataset;

    fn demonstrations(config: EnvConfig, episodes: usize) -> Dataset {
        let mut kept = Vec::new();
        collect(&config, episodes, 3, |episode| {
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
}
