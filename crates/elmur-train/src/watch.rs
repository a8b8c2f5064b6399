//! One episode of a policy, step by step: what was seen, and what the memory did meanwhile.

use elmur_base::{Row, Stop};
use elmur_engine::{Pool, Store};
use elmur_envs::{Environment, Purpose};
use elmur_model::PolicyConfig;
use elmur_model::session::{Choose, Seen, Session, StepRecord};
use elmur_model::tensors::TensorData;

use crate::error::{Error, Result};
use crate::evaluate::memory_seed;

/// An episode that a policy has acted out.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Watched {
    /// Observation before each step.
    pub observations: Vec<Row>,
    /// Reward of each step.
    pub rewards: Vec<f64>,
    /// Whether the episode was solved, where the environment says so.
    pub success: Option<bool>,
    /// What each memory layer did; empty for policies without slots.
    pub layers: Vec<WatchedLayer>,
}

/// One memory layer, step by step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct WatchedLayer {
    /// Attention that each step paid to each slot, mean over heads, `[steps][slots]`.
    pub read: Vec<Vec<f32>>,
    /// (step, slot) of each write; a write follows the last step of its segment.
    pub written: Vec<(usize, usize)>,
}

impl WatchedLayer {
    /// At most `most` slots in the order of their numbers: those that were read the most after something was written
    /// to them, then others that were written, then those that were read the most.
    pub fn busiest(&self, most: usize) -> Vec<usize> {
        let slots = self.read.first().map_or(0, Vec::len);
        let rank = |slot: usize| {
            let first = self.written.iter().filter(|(_, other)| *other == slot).map(|(step, _)| *step).min();
            let after = first.map_or(0, |step| step + 1);
            let read = self.read.iter().skip(after).filter_map(|read| read.get(slot)).sum::<f32>();
            (first.is_none(), -read, slot)
        };
        let mut order: Vec<(bool, f32, usize)> = (0..slots).map(rank).collect();
        order.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)));
        let mut chosen: Vec<usize> = order.into_iter().take(most).map(|(.., slot)| slot).collect();
        chosen.sort_unstable();
        chosen
    }
}

/// Steps after which watching ends: all observations are kept.
pub const MAX_WATCHED: usize = 10_000;

/// Acts out the episode of this seed, up to [`MAX_WATCHED`] steps. `target_return` is what a policy with return
/// tokens is asked for; none: the return of a very good episode. An episode whose process dies is begun anew.
pub fn watch(
    policy: &PolicyConfig,
    params: &Store,
    env: &Environment,
    target_return: Option<f64>,
    seed: u64,
    stop: &Stop,
) -> Result<Watched> {
    loop {
        match watch_once(policy, params, env, target_return, seed, stop) {
            Err(Error::Env(error)) if error.is_lost() && !stop.requested() => {}
            Err(Error::Env(_)) if stop.requested() => return Err(Error::Stopped),
            watched => return watched,
        }
    }
}

fn watch_once(
    policy: &PolicyConfig,
    params: &Store,
    env: &Environment,
    target_return: Option<f64>,
    seed: u64,
    stop: &Stop,
) -> Result<Watched> {
    policy.architecture().ends().check(env.spaces(), "environment")?;
    let mut to_go = crate::evaluate::target_return(policy, env, target_return)?.unwrap_or(0.0) as f32;
    let mut env = env.make(Purpose::Evaluate)?;
    let spaces = env.spaces().clone();
    let mut session = Session::recording(policy, params, 1, &Pool::new(1))?;
    session.reset(&[(0, memory_seed(seed))])?;
    let layers = policy.elmur("watch").map_or(0, |model| model.layers);
    let mut result = Watched { layers: vec![WatchedLayer::default(); layers], ..Watched::default() };
    let (mut seen, mut action) = (Row::of(&spaces.observation), Row::of(&spaces.action));
    env.reset(seed, seen.as_mut())?;
    while result.rewards.len() < MAX_WATCHED {
        if stop.requested() {
            return Err(Error::Stopped);
        }
        result.observations.push(seen.clone());
        let now = Seen { observation: seen.values(), returns: Some(std::slice::from_ref(&to_go)) };
        session.select_action(&[0], now, Choose::Greedy, action.as_mut())?;
        let step = result.rewards.len();
        for record in session.take_records() {
            note(&mut result.layers, step, &record);
        }
        let outcome = env.step(action.values(), seen.as_mut())?;
        to_go -= outcome.reward as f32;
        result.rewards.push(outcome.reward);
        if outcome.done() {
            result.success = outcome.success;
            break;
        }
    }
    Ok(result)
}

/// Keeps what a step did to the memory.
fn note(layers: &mut [WatchedLayer], step: usize, record: &StepRecord) {
    for (i, layer) in layers.iter_mut().enumerate() {
        if let Some(tap) = record.taps.get(&format!("read.{i}"))
            && let TensorData::F32(read) = &tap.data
        {
            // [heads, slots]
            let slots = tap.shape.last().copied().unwrap_or(0).max(1);
            let heads = (read.len() / slots).max(1) as f32;
            let mean = |slot| read.iter().skip(slot).step_by(slots).sum::<f32>() / heads;
            layer.read.push((0..slots).map(mean).collect());
        }
        for closed in &record.closed {
            if let Some(TensorData::I64(slots)) = closed.taps.get(&format!("slots.{i}")).map(|tap| &tap.data)
            {
                layer.written.extend(slots.iter().map(|slot| (step, *slot as usize)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_slots_are_those_that_are_read_after_they_were_written() {
        // Slot 0 is read before it is written at the end, slot 1 after, slot 2 is never read, slot 3 never written.
        let read = vec![vec![0.9, 0.0, 0.0, 0.1], vec![0.6, 0.2, 0.0, 0.2], vec![0.5, 0.4, 0.0, 0.1]];
        let layer = WatchedLayer { read, written: vec![(0, 1), (1, 2), (2, 0)] };
        assert_eq!(layer.busiest(1), [1]);
        assert_eq!(layer.busiest(3), [0, 1, 2]);
        assert_eq!(layer.busiest(9), [0, 1, 2, 3]);
        assert_eq!(WatchedLayer { written: Vec::new(), ..layer }.busiest(2), [0, 1]);
        assert!(WatchedLayer::default().busiest(2).is_empty());
    }
}
