//! Wrappers applied to datasets.

use elmur_base::{Leaf, Row, Space};
use elmur_envs::{Wrappers, Wrapping};

use crate::collect::{append, columns};
use crate::episode::{ColumnRef, Episode, pixel};
use crate::error::{Error, Result};
use crate::{Dataset, EpisodeRef};

/// Applies wrappers to a recorded dataset: the episodes that the wrapped environment would have shown. Data
/// is kept without wrappers, and each policy sees it in its own way.
pub fn wrap(dataset: &Dataset, wrappers: Wrappers) -> Result<Dataset> {
    let own = dataset.spaces();
    let mut wrapping = Wrapping::new(own, wrappers).map_err(Error::Env)?;
    let spaces = wrapping.spaces().clone();
    let (mut seen, mut action) = (Row::of(&own.observation), Row::of(&own.action));
    let (mut shown, mut taken) = (Row::of(&spaces.observation), Row::of(&spaces.action));
    let mut wrapped = |episode: EpisodeRef<'_>| {
        let steps = episode.steps() + usize::from(episode.has_final_observation(own));
        let (mut observations, mut actions) = (columns(&spaces.observation), columns(&spaces.action));
        for t in 0..steps {
            row(&episode.observations, &own.observation, t, &mut seen);
            // The action of the step before is still there.
            wrapping.observe(seen.values(), (t > 0).then(|| action.values()), shown.as_mut());
            append(&shown, &spaces.observation, &mut observations);
            if t < episode.steps() {
                row(&episode.actions, &own.action, t, &mut action);
                wrapping.wrap_action(action.values(), taken.as_mut());
                append(&taken, &spaces.action, &mut actions);
            }
        }
        Episode {
            observations,
            actions,
            rewards: episode.rewards.to_vec(),
            terminated: episode.terminated,
            truncated: episode.truncated,
            imitate: episode.imitate.map(<[bool]>::to_vec),
        }
    };
    let episodes = dataset.episodes().map(&mut wrapped).collect();
    let mut metadata = dataset.metadata().clone();
    metadata.insert("wrappers".to_owned(), wrappers.names().join(", "));
    Dataset::from_episodes(spaces, metadata, episodes)
}

/// Reads row `t` of a space's columns.
fn row(columns: &[ColumnRef<'_>], space: &Space, t: usize, value: &mut Row) {
    value.clear();
    for (leaf, column) in space.leaves().iter().zip(columns) {
        let range = t * leaf.len()..(t + 1) * leaf.len();
        match (leaf, column) {
            (_, ColumnRef::F32(data)) => value.floats.extend_from_slice(&data[range]),
            (_, ColumnRef::I32(data)) => value.ints.extend_from_slice(&data[range]),
            (Leaf::Bytes { .. }, ColumnRef::U8(data)) => value.bytes.extend_from_slice(&data[range]),
            (_, ColumnRef::U8(data)) => value.floats.extend(data[range].iter().map(|byte| pixel(*byte))),
        }
    }
}

#[cfg(test)]
mod tests {
    use elmur_envs::EnvConfig;
    use elmur_envs::popgym::Task;

    use super::*;
    use crate::collect::{collect, spaces};

    fn demonstrations(config: EnvConfig) -> Dataset {
        let mut kept = Vec::new();
        collect(&config, 3, 3, 0.0, 1, |episode| {
            kept.push(episode);
            Ok(())
        })
        .unwrap();
        Dataset::from_episodes(spaces(&config).unwrap(), Default::default(), kept).unwrap()
    }

    #[test]
    fn wrapped_data_is_what_playing_behind_wrappers_gives() {
        for id in ["popgym-RepeatPreviousEasy", "popgym-BattleshipEasy", "popgym-PositionOnlyPendulumHard"] {
            let config = EnvConfig::popgym(Task::find(id).unwrap());
            let plain = demonstrations(config);
            for bits in 0..16 {
                let on = |bit: u32| bits >> bit & 1 == 1;
                let wrappers = Wrappers {
                    previous_action: on(0),
                    first_step: on(1),
                    one_hot: on(2) && !on(1),
                    as_floats: on(2) && on(1),
                    flat_action: on(3) && plain.spaces().action.widths().floats == 0,
                };
                let played = demonstrations(EnvConfig { wrappers, ..config });
                let wrapped = wrap(&plain, wrappers).unwrap();
                assert_eq!(wrapped.spaces(), played.spaces());
                assert!(wrapped.episodes().eq(played.episodes()), "{id} {wrappers:?}");
            }
        }
    }
}
