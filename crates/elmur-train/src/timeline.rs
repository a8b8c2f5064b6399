//! What the memory did in one episode: which slot was written when, and how much each was read.

use elmur_engine::{Pool, Store};
use elmur_envs::{Environment, Purpose};
use elmur_model::PolicyConfig;
use elmur_model::session::{Choose, Seen, Session};
use elmur_model::tensors::TensorData;

use crate::error::Result;
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

/// Acts out the episode of this seed, up to `limit` steps, and watches ELMUR's memory. `target_return` is
/// what a policy with return tokens is asked for; none: the return of a very good episode.
pub fn timeline(
    policy: &PolicyConfig,
    params: &Store,
    env: &Environment,
    target_return: Option<f64>,
    seed: u64,
    limit: u64,
) -> Result<SlotTimeline> {
    let model = policy.elmur("timeline")?;
    let mut to_go = crate::evaluate::target_return(policy, env, target_return)?.unwrap_or(0.0) as f32;
    let mut env = env.make_rows(Purpose::Evaluate, 1, Pool::serial())?;
    model.ends().check(env.spaces(), "environment")?;
    env.reset(&[seed])?;
    let mut session = Session::recording(model, params, 1, &Pool::new(1))?;
    session.reset(&[(0, memory_seed(seed))])?;
    let slots = model.memory.slots;
    let mut layers = vec![vec![SlotHistory::default(); slots]; model.layers];
    let mut result = SlotTimeline { layers: Vec::new(), steps: 0, success: None };
    let length = model.segment_length as u64;
    let mut action = elmur_base::Row::of(&env.spaces().action);
    while result.steps < limit {
        let seen = Seen { observation: env.observations(), returns: Some(std::slice::from_ref(&to_go)) };
        session.select_action(&[0], seen, Choose::Greedy, action.as_mut())?;
        for record in session.take_records() {
            let segment = (result.steps / length) as usize;
            for (layer, history) in layers.iter_mut().enumerate() {
                for slot in history.iter_mut() {
                    slot.read.resize(segment + 1, 0.0);
                    slot.written.resize(segment + 1, false);
                }
                if let Some(TensorData::F32(read)) =
                    record.taps.get(&format!("read.{layer}")).map(|tap| &tap.data)
                {
                    let heads = read.len() / slots;
                    for (slot, history) in history.iter_mut().enumerate() {
                        let sum: f32 = (0..heads).map(|head| read[head * slots + slot]).sum();
                        history.read[segment] += sum / heads as f32 / length as f32;
                    }
                }
                let written = record.closed.first().and_then(|c| c.taps.get(&format!("slots.{layer}")));
                if let Some(TensorData::I64(written)) = written.map(|tap| &tap.data) {
                    written.iter().for_each(|slot| history[*slot as usize].written[segment] = true);
                }
            }
        }
        let step = env.step(action.values())?;
        if step.lost[0] {
            let cause = "the process of the environment ended; watch the episode again".to_owned();
            return Err(elmur_envs::Error::Lost { cause }.into());
        }
        to_go -= step.rewards[0] as f32;
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
