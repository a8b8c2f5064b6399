//! Evaluation on recorded episodes: does the policy predict the actions that were taken?

use elmur_base::{Field, FieldMut, Kind, Row, Statistics, Stop};
use elmur_data::{Crop, Source, Window};
use elmur_engine::{DType, Device, Store};
use elmur_model::ends::Action;
use elmur_model::session::{Seen, Session};
use elmur_model::window::{Begin, WindowProgram, evaluation_graph};
use elmur_model::{Architecture, Checkpoint, PolicyConfig};

use crate::error::{Error, Result};
use crate::measure::{Measure, Score};

/// Most episodes that are computed side by side.
const ROWS: usize = 64;
/// Most numbers of observations in one window of all rows.
const NUMBERS: usize = 1 << 24;
/// Steps that are read at once for a policy that plans.
const READ: usize = 64;

/// A policy and recorded episodes to judge it on.
#[derive(Debug, Clone, Copy)]
pub struct OfflineEvaluation<'a> {
    /// The policy's architecture and sizes.
    pub policy: &'a PolicyConfig,
    /// The policy's parameters.
    pub params: &'a Store,
    /// The recorded episodes.
    pub data: &'a dyn Source,
    /// The device that computes the policy; its parameters must lie there.
    pub device: &'a Device,
}

impl<'a> OfflineEvaluation<'a> {
    /// A policy judged on all episodes of `data`, on the device where its parameters lie.
    pub fn of(policy: &'a Checkpoint, data: &'a dyn Source) -> Self {
        Self { policy: &policy.config, params: &policy.params, data, device: policy.params.device() }
    }
}

/// How well a policy predicts recorded actions.
#[derive(Debug, Clone, PartialEq)]
pub struct OfflineOutcome {
    /// Accuracy of discrete actions, mean squared error of continuous ones; over episodes.
    pub score: Score,
    /// Number of actions that were compared.
    pub actions: u64,
    /// Number of episodes with at least one action to imitate.
    pub episodes: usize,
}

/// Lets a policy watch recorded episodes from their start and compares the actions it would take with those
/// that were taken, where these are to be imitated. It sees the recorded actions, not its own; memories that
/// begin with random numbers begin with zeros. A policy that plans makes a plan from the recorded steps
/// whenever it would make one, and is judged by the actions of its plans. `progress` is called with the
/// completed share, 0 to 1.
pub fn evaluate_offline(
    what: &OfflineEvaluation<'_>,
    stop: &Stop,
    progress: &mut dyn FnMut(f64),
) -> Result<OfflineOutcome> {
    let architecture = what.policy.architecture();
    let ends = architecture.ends();
    ends.check(what.data.spaces(), "dataset")?;
    let plans = architecture.planner(what.params, what.device, 1)?.is_some();
    let steps = if plans { READ } else { architecture.window().steps };
    let numbers: usize = ends.observation.iter().map(|encoder| encoder.len()).sum();
    let fitting = NUMBERS / steps.saturating_mul(numbers).max(1);
    let rows = what.data.episodes().min(ROWS).min(fitting.max(1));
    let mut predictor: Box<dyn Predictor> = match plans {
        true => Box::new(Watcher::new(what, rows)?),
        false => Box::new(Programs::new(architecture, what, rows)?),
    };
    // Episodes of like length together, so that few rows wait for the longest.
    let mut order: Vec<usize> = (0..what.data.episodes()).collect();
    order.sort_by_key(|episode| what.data.steps(*episode));
    let total: usize = order.iter().map(|episode| what.data.steps(*episode)).sum();
    let (mut done, mut means, mut actions) = (0, Vec::new(), 0);
    for group in order.chunks(rows) {
        let mut tallies = vec![Tally::default(); rows];
        // Rows beyond the last episode repeat it and are not looked at.
        let crops: Vec<Crop> = (0..rows).map(|row| Crop::new(group[row.min(group.len() - 1)], 0)).collect();
        let longest = group.iter().map(|episode| what.data.steps(*episode)).max().unwrap_or(0);
        for window in 0..longest.div_ceil(steps) {
            if stop.requested() {
                return Err(Error::Stopped);
            }
            let part = Window { source: what.data, crops: &crops, offset: window * steps, length: steps };
            let outputs = predictor.outputs(window, part)?;
            compare(ends.action, part, &outputs, &mut tallies)?;
        }
        for tally in tallies.iter().take(group.len()).filter(|tally| tally.actions > 0) {
            means.push(tally.sum / tally.actions as f64);
            actions += tally.actions;
        }
        done += group.iter().map(|episode| what.data.steps(*episode)).sum::<usize>();
        progress(done as f64 / total.max(1) as f64);
    }
    let measure = if ends.action.is_discrete() { Measure::Accuracy } else { Measure::MeanSquaredError };
    let episodes = means.len();
    if actions == 0 {
        return Err(Error::config("data", "at least one action to imitate", "none in these episodes"));
    }
    let score = Score { measure, value: Statistics::of(means) };
    Ok(OfflineOutcome { score, actions, episodes })
}

/// What tells a policy's outputs for recorded steps.
trait Predictor {
    /// Outputs [rows, steps, outputs] for window number `window` of episodes, which comes after the one before.
    /// Beyond the end of an episode they mean nothing.
    fn outputs(&mut self, window: usize, part: Window<'_>) -> Result<Vec<f32>>;
}

/// A policy that acts, step by step, in episodes whose actions are given.
struct Watcher<'a> {
    policy: &'a PolicyConfig,
    session: Session,
}

impl<'a> Watcher<'a> {
    fn new(what: &OfflineEvaluation<'a>, rows: usize) -> Result<Self> {
        let session = Session::new(what.policy, what.params, rows, what.device)?;
        Ok(Self { policy: what.policy, session })
    }
}

impl Predictor for Watcher<'_> {
    fn outputs(&mut self, window: usize, part: Window<'_>) -> Result<Vec<f32>> {
        let ends = self.policy.architecture().ends();
        let Window { crops, offset, length, .. } = part;
        let places = crops.len() * length;
        if window == 0 {
            let seeds = crops.iter().enumerate().map(|(row, crop)| (row, crop.episode as u64));
            self.session.reset(&seeds.collect::<Vec<_>>())?;
        }
        let mut leaves = Vec::with_capacity(ends.observation.len());
        for (i, encoder) in ends.observation.iter().enumerate() {
            let mut leaf = Row::default();
            let count = places * encoder.len();
            let out = match encoder.kind() {
                Kind::Floats => FieldMut::F32(room(&mut leaf.floats, count)),
                Kind::Ints => FieldMut::I32(room(&mut leaf.ints, count)),
                Kind::Bytes => FieldMut::U8(room(&mut leaf.bytes, count)),
            };
            part.fill(Field::Observation(i), out)?;
            leaves.push((leaf, encoder.len()));
        }
        let (mut returns, mut taken, dim) = (vec![0.0; places], Row::default(), ends.action.dim());
        part.fill(Field::ReturnToGo, FieldMut::F32(&mut returns))?;
        let out = match ends.action.is_discrete() {
            true => FieldMut::I32(room(&mut taken.ints, places * dim)),
            false => FieldMut::F32(room(&mut taken.floats, places * dim)),
        };
        part.fill(Field::Action, out)?;

        let width = ends.action.outputs();
        let mut all = vec![0.0; places * width];
        for step in 0..length {
            let goes_on = |row: &usize| offset + step < part.source.steps(crops[*row].episode);
            let rows: Vec<usize> = (0..crops.len()).filter(goes_on).collect();
            if rows.is_empty() {
                break;
            }
            let (mut seen, mut actions, mut to_go) = (Row::default(), Row::default(), Vec::new());
            for row in &rows {
                let place = row * length + step;
                leaves.iter().for_each(|(leaf, each)| append(&mut seen, leaf, place, *each));
                append(&mut actions, &taken, place, dim);
                to_go.push(returns[place]);
            }
            let seen = Seen { observation: seen.values(), returns: Some(&to_go) };
            let outputs = self.session.forward(&rows, seen)?;
            for (row, outputs) in rows.iter().zip(outputs.chunks_exact(width)) {
                let at = (row * length + step) * width;
                all[at..at + width].copy_from_slice(outputs);
            }
            self.session.commit(&rows, actions.values())?;
        }
        Ok(all)
    }
}

/// The vector with `count` zeros in it.
fn room<T: Clone + Default>(data: &mut Vec<T>, count: usize) -> &mut [T] {
    data.resize(count, T::default());
    data
}

/// Appends entry `place` of numbers that come `each` at a time.
fn append(to: &mut Row, from: &Row, place: usize, each: usize) {
    fn part<T>(data: &[T], place: usize, each: usize) -> &[T] {
        data.get(place * each..(place + 1) * each).unwrap_or_default()
    }
    to.floats.extend_from_slice(part(&from.floats, place, each));
    to.ints.extend_from_slice(part(&from.ints, place, each));
    to.bytes.extend_from_slice(part(&from.bytes, place, each));
}

/// Programs of whole windows: the first of episodes, and those after it.
struct Programs([WindowProgram; 2]);

impl Programs {
    fn new(architecture: &dyn Architecture, what: &OfflineEvaluation<'_>, rows: usize) -> Result<Self> {
        let carried = Store::on(what.device);
        let compile = |begin| -> Result<WindowProgram> {
            let built = evaluation_graph(architecture, rows, DType::F32, begin)?;
            built.declare(&carried, built.carried.iter().map(|state| state.name.as_str()))?;
            Ok(WindowProgram::new(&built, architecture, what.device, &[what.params, &carried])?)
        };
        Ok(Self([compile(Begin::Fresh)?, compile(Begin::Continue)?]))
    }
}

impl Predictor for Programs {
    fn outputs(&mut self, window: usize, part: Window<'_>) -> Result<Vec<f32>> {
        let program = &mut self.0[usize::from(window > 0)];
        for (name, field) in program.fields().to_vec() {
            let inputs = &mut program.program;
            let out = match inputs.input_type(&name)?.dtype {
                DType::I32 => FieldMut::I32(inputs.input_mut(&name)?),
                DType::I64 => FieldMut::I64(inputs.input_mut(&name)?),
                DType::U8 => FieldMut::U8(inputs.input_mut(&name)?),
                DType::Bool => FieldMut::Bool(inputs.input_mut(&name)?),
                _ => FieldMut::F32(inputs.input_mut(&name)?),
            };
            part.fill(field, out)?;
        }
        program.run(window as u64)?;
        Ok(program.program.get::<f32>("logits")?.to_vec())
    }
}

/// Correct answers, or squared errors, of one episode.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    sum: f64,
    actions: u64,
}

fn compare(action: &Action, part: Window<'_>, outputs: &[f32], tallies: &mut [Tally]) -> Result<()> {
    let places = part.crops.len() * part.length;
    let dim = action.dim();
    let mut imitate = vec![false; places];
    part.fill(Field::Imitate, FieldMut::Bool(&mut imitate))?;
    let rows = imitate.chunks_exact(part.length).zip(tallies);
    if !action.is_discrete() {
        let mut targets = vec![0.0; places * dim];
        part.fill(Field::Target, FieldMut::F32(&mut targets))?;
        for (row, (imitate, tally)) in rows.enumerate() {
            for (step, _) in imitate.iter().enumerate().filter(|(_, imitate)| **imitate) {
                let at = (row * part.length + step) * dim;
                let pairs = outputs[at..at + dim].iter().zip(&targets[at..at + dim]);
                let squares: f64 = pairs.map(|(x, y)| f64::from(x - y).powi(2)).sum();
                tally.sum += squares / dim as f64;
                tally.actions += 1;
            }
        }
        return Ok(());
    }
    let mut targets = vec![0i64; places * dim];
    part.fill(Field::Target, FieldMut::I64(&mut targets))?;
    let (sizes, width) = (action.sizes(), action.outputs());
    for (row, (imitate, tally)) in rows.enumerate() {
        for (step, _) in imitate.iter().enumerate().filter(|(_, imitate)| **imitate) {
            let place = row * part.length + step;
            let mut logits = &outputs[place * width..(place + 1) * width];
            let mut correct = 0;
            for (size, target) in sizes.iter().zip(&targets[place * dim..]) {
                let (own, rest) = logits.split_at(*size);
                logits = rest;
                let best = own.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
                correct += usize::from(best.map(|(i, _)| i as i64) == Some(*target));
            }
            tally.sum += correct as f64 / sizes.len() as f64;
            tally.actions += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use elmur_envs::Registry;
    use elmur_model::init;

    use super::*;
    use crate::RunConfig;

    /// Whole windows and single steps are two ways to the same outputs, for floats, integers and bytes, with
    /// returns and actions as tokens or without.
    #[test]
    fn a_policy_that_acts_predicts_what_its_windows_predict() {
        let task = "popgym-MultiarmedBanditEasy";
        for (preset, changes) in [
            ("tmaze", ["policy=bc-lstm", "model.hidden=16"]),
            (task, ["policy=elmur", "model.tokens=return_observation_action"]),
        ] {
            let config = RunConfig::preset(preset).unwrap();
            let changes = [&changes[..], &["model.d_model=16", "data.episodes=5"]].concat();
            let config = crate::overrides::apply(&config, &changes, &Registry::builtin()).unwrap();
            let prepared = config.prepare(&Registry::builtin(), false).unwrap();
            let params = init::parameters(prepared.config.model.architecture(), 3).unwrap();
            let (policy, data, device) = (&prepared.config.model, &*prepared.data, params.device());
            let what = OfflineEvaluation { policy, params: &params, data, device };
            let steps = policy.architecture().window().steps;
            let crops: Vec<Crop> = (0..data.episodes()).map(|episode| Crop::new(episode, 0)).collect();
            let mut programs = Programs::new(policy.architecture(), &what, crops.len()).unwrap();
            let mut watcher = Watcher::new(&what, crops.len()).unwrap();
            let longest = (0..data.episodes()).map(|episode| data.steps(episode)).max().unwrap();
            let width = policy.architecture().ends().action.outputs();
            let mut compared = 0;
            for window in 0..longest.div_ceil(steps) {
                let part = Window { source: data, crops: &crops, offset: window * steps, length: steps };
                let pair = (programs.outputs(window, part).unwrap(), watcher.outputs(window, part).unwrap());
                for (row, crop) in crops.iter().enumerate() {
                    let known = data.steps(crop.episode).saturating_sub(part.offset).min(steps) * width;
                    let at = row * steps * width;
                    for (a, b) in pair.0[at..at + known].iter().zip(&pair.1[at..at + known]) {
                        assert!((a - b).abs() < 1e-4, "{preset}, window {window}, row {row}: {a} {b}");
                        compared += 1;
                    }
                }
            }
            assert_eq!(
                compared,
                width * (0..data.episodes()).map(|episode| data.steps(episode)).sum::<usize>()
            );
        }
    }
}
