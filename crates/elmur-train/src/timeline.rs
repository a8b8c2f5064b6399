//! What the memory did in one episode: which slot was written when, and how much each was read.

use elmur_base::Values;
use elmur_engine::{Pool, Store};
use elmur_envs::{EnvConfig, VecEnv};
use elmur_model::ModelConfig;
use elmur_model::config::Observation;
use elmur_model::session::{Obs, Session};

use crate::config::check_spaces;
use crate::error::{Error, Result};
use crate::evaluate::memory_seed;

/// One episode, segment by segment.
#[derive(Debug, Clone, PartialEq)]
pub struct SlotTimeline {
    /// Per layer and slot.
    pub layers: Vec<Vec<SlotHistory>>,
    /// Steps of the episode.
    pub steps: u64,
    /// Whether it was solved.
    pub success: Option<bool>,
}

/// One slot, segment by segment.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SlotHistory {
    /// Whether it was written at the segment's end.
    pub written: Vec<bool>,
    /// Attention that the segment's tokens gave it, mean over steps and heads.
    pub read: Vec<f32>,
}

/// Acts out the episode of this seed, up to `limit` steps, and watches the memory. For models with observation tokens and discrete
/// actions.
pub fn timeline(
    model: &ModelConfig,
    params: &Store,
    env: &EnvConfig,
    seed: u64,
    limit: u64,
) -> Result<SlotTimeline> {
    let mut env = VecEnv::new(vec![env.evaluation()?])?;
    check_spaces(model, env.spaces(), "environment")?;
    if model.tokens.per_step() != 1
        || !model.action.is_discrete()
        || matches!(model.observation, Observation::Parts(_))
    {
        return Err(Error::config("model", "observation tokens and discrete actions", "another model"));
    }
    env.reset(&[seed])?;
    let mut session = Session::recording(model, params, 1, &Pool::new(1))?;
    session.reset(&[(0, memory_seed(seed))])?;
    let slots = model.memory.slots;
    let mut layers = vec![vec![SlotHistory::default(); slots]; model.layers];
    let mut result = SlotTimeline { layers: Vec::new(), steps: 0, success: None };
    let length = model.segment_length as u64;
    while result.steps < limit {
        let seen = env.observations();
        let seen = if seen.ints.is_empty() { Obs::Floats(seen.floats) } else { Obs::Ints(seen.ints) };
        session.act(seen, None)?;
        for record in session.take_records() {
            let segment = (result.steps / length) as usize;
            for (layer, read) in record.read.iter().enumerate() {
                let heads = read.len() / slots;
                for (slot, history) in layers[layer].iter_mut().enumerate() {
                    history.read.resize(segment + 1, 0.0);
                    history.written.resize(segment + 1, false);
                    let sum: f32 = (0..heads).map(|head| read[head * slots + slot]).sum();
                    history.read[segment] += sum / heads as f32 / length as f32;
                }
            }
            for (memory, slots) in record.write.iter().flat_map(|write| write.slots.iter().enumerate()) {
                for slot in slots {
                    layers[memory][*slot as usize].written[segment] = true;
                }
            }
        }
        let actions = session.greedy_actions().to_vec();
        let step = env.step(Values::ints(&actions))?;
        result.steps += 1;
        if step.terminated[0] || step.truncated[0] {
            result.success = step.success[0];
            break;
        }
    }
    // The last segment may be short: a mean over the steps it has.
    let rest = result.steps % length;
    if rest > 0 {
        let last = (result.steps / length) as usize;
        for history in layers.iter_mut().flatten() {
            if let Some(read) = history.read.get_mut(last) {
                *read *= length as f32 / rest as f32;
            }
        }
    }
    result.layers = layers;
    Ok(result)
}
