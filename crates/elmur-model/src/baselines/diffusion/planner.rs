//! Acting: chunks of actions from noise, move by move.
//!
//! Two programs share a store: one computes the features of the newest observations, the other makes one move
//! back from noise, over and over. Noise comes from each row's own random numbers.

use std::collections::BTreeMap;

use elmur_base::{Field, FieldMut, Kind};
use elmur_engine::{DType, Device, Element, Graph, Program, Store};

use super::Diffusion;
use super::schedule::{Move, NoiseSchedule};
use crate::architecture::Architecture;
use crate::error::Result;
use crate::net::{Net, Pass};
use crate::planner::{Planner, Recent};
use crate::session::{Draws, rows_at_once};

/// Names of states: the chunk at hand, and the features of observations.
pub(crate) const X: &str = "x";
const FEATURES: &str = "features";

/// Names of inputs: the number of the move, and fresh noise.
pub(crate) const STEP: &str = "step";
pub(crate) const NOISE: &str = "noise";

/// Name of the output that holds the actions to play, [rows, plays, actions].
const PLAN: &str = "plan";

/// The graphs of acting for `rows` rows: features of observations, and one move.
pub(crate) struct SamplingGraphs {
    pub observe: Graph,
    pub denoise: Graph,
    /// Name of the input of each leaf of the observation.
    pub inputs: Vec<String>,
}

/// Builds the graphs of acting for moves over `rows` rows.
pub(crate) fn sampling_graphs(
    config: &Diffusion,
    moves: &[Move],
    dtype: DType,
    rows: usize,
) -> Result<SamplingGraphs> {
    let (chunk, actions) = (config.pred_horizon, config.action.dim());
    let new = || Net::new(config.ends(), dtype, Pass::Rerun { closing: false }, rows, config.obs_horizon);

    let mut net = new();
    let features = config.acting(&mut net, |net| config.features(net))?;
    let width = net.g.shape(features)?[1];
    let state = net.g.state(FEATURES, dtype, [rows, width])?;
    net.g.update(state, features)?;
    let (observe, declared) = net.finish()?;
    let inputs = declared.feeds.into_iter().map(|feed| feed.name).collect();

    let mut net = new();
    let features = net.g.state(FEATURES, dtype, [rows, width])?;
    let x = net.g.state(X, dtype, [rows, chunk, actions])?;
    let at = net.g.input(STEP, DType::I32, [rows])?;
    let fresh = match moves.iter().any(|m| m.to_fresh > 0.0) {
        true => Some(net.g.input(NOISE, dtype, [rows, chunk, actions])?),
        false => None,
    };
    let (next, plan) = config.acting(&mut net, |net| {
        let next = config.step_back(net, moves, at, x, features, fresh)?;
        let current = config.obs_horizon - 1;
        let plan = net.g.slice(next, 1, current..current + config.plays())?;
        Ok((next, config.unscaled(net, plan)?))
    })?;
    net.g.update(x, next)?;
    net.g.output(PLAN, plan)?;
    let (denoise, _) = net.finish()?;
    Ok(SamplingGraphs { observe, denoise, inputs })
}

/// Plans chunks of actions for the rows of a session.
#[derive(Debug)]
pub(super) struct DiffusionPlanner {
    config: Diffusion,
    moves: Vec<Move>,
    params: Store,
    device: Device,
    /// Rows of the session.
    capacity: usize,
    /// By number of rows, compiled when first needed.
    programs: BTreeMap<usize, Programs>,
    noise: Vec<f32>,
}

/// The programs of one number of rows.
#[derive(Debug)]
struct Programs {
    observe: Program,
    denoise: Program,
    /// The states of both.
    states: Store,
    inputs: Vec<String>,
}

impl DiffusionPlanner {
    pub fn new(config: &Diffusion, params: &Store, device: &Device, rows: usize) -> Self {
        Self {
            moves: NoiseSchedule::new(config.diffusion_steps).moves(config.sampler),
            config: config.clone(),
            params: params.clone(),
            device: device.clone(),
            capacity: rows,
            programs: BTreeMap::new(),
            noise: Vec::new(),
        }
    }

    fn compile(&self, rows: usize) -> Result<Programs> {
        let SamplingGraphs { observe, denoise, inputs } =
            sampling_graphs(&self.config, &self.moves, DType::F32, rows)?;
        let states = Store::on(&self.device);
        states.declare_states(&denoise)?;
        let compile = |graph| Program::new(graph, &self.device, &[&self.params, &states]);
        Ok(Programs { observe: compile(&observe)?, denoise: compile(&denoise)?, states, inputs })
    }

    /// Plans for rows `first..first + draws.len()` of `recent`, by programs for `rows` rows.
    fn plan_part(
        &mut self,
        recent: &Recent<'_>,
        first: usize,
        rows: usize,
        draws: &mut [Draws],
        plans: &mut [f32],
    ) -> Result<()> {
        let mut programs = match self.programs.remove(&rows) {
            Some(programs) => programs,
            None => self.compile(rows)?,
        };
        let done = self.run(&mut programs, recent, first, rows, draws, plans);
        self.programs.insert(rows, programs);
        done
    }

    fn run(
        &mut self,
        programs: &mut Programs,
        recent: &Recent<'_>,
        first: usize,
        rows: usize,
        draws: &mut [Draws],
        plans: &mut [f32],
    ) -> Result<()> {
        let config = &self.config;
        let Programs { observe, denoise, states, inputs } = programs;
        for (leaf, (name, encoder)) in inputs.iter().zip(&config.observation).enumerate() {
            let shown = Shown { recent, first, rows: draws.len(), steps: config.obs_horizon };
            let (field, each) = (Field::Observation(leaf), encoder.len());
            match encoder.kind() {
                Kind::Floats => shown.fill(field, each, observe.input_mut(name)?, |x| FieldMut::F32(x))?,
                Kind::Ints => shown.fill(field, each, observe.input_mut(name)?, |x| FieldMut::I32(x))?,
                Kind::Bytes => shown.fill(field, each, observe.input_mut(name)?, |x| FieldMut::U8(x))?,
            }
        }
        observe.run()?;
        let chunk = config.pred_horizon * config.action.dim();
        self.noise.clear();
        self.noise.resize(rows * chunk, 0.0);
        draw(&mut self.noise, chunk, draws);
        states.set(X, &self.noise)?;
        for (at, step) in self.moves.iter().enumerate() {
            denoise.input_mut::<i32>(STEP)?.fill(at as i32);
            if step.to_fresh > 0.0 {
                draw(&mut self.noise, chunk, draws);
                denoise.set(NOISE, &self.noise)?;
            }
            denoise.run()?;
        }
        plans.copy_from_slice(&denoise.get::<f32>(PLAN)?[..plans.len()]);
        Ok(())
    }
}

/// Fills the rows that plan with normal numbers, each from its own draws.
fn draw(noise: &mut [f32], chunk: usize, draws: &mut [Draws]) {
    for (row, draws) in noise.chunks_exact_mut(chunk).zip(draws) {
        row.iter_mut().for_each(|x| *x = draws.normal() as f32);
    }
}

/// The newest `steps` steps of `rows` rows from row `first` on.
struct Shown<'a> {
    recent: &'a Recent<'a>,
    first: usize,
    rows: usize,
    steps: usize,
}

impl Shown<'_> {
    /// Puts a field of `each` numbers into an input [rows, steps, each], oldest step first. Steps before an
    /// episode's first show the first; rows beyond the last are left as they are.
    fn fill<T: Element>(
        &self,
        field: Field,
        each: usize,
        input: &mut [T],
        slice: impl Fn(&mut [T]) -> FieldMut<'_>,
    ) -> Result<()> {
        for (i, steps) in input.chunks_exact_mut(self.steps * each).take(self.rows).enumerate() {
            let missing = self.steps - self.recent.count(self.first + i).min(self.steps);
            let (before, known) = steps.split_at_mut(missing * each);
            self.recent.read(field, self.first + i, slice(known))?;
            before.chunks_exact_mut(each).for_each(|step| step.copy_from_slice(&known[..each]));
        }
        Ok(())
    }
}

impl Planner for DiffusionPlanner {
    fn looks_back(&self) -> usize {
        self.config.obs_horizon
    }

    fn plays(&self) -> usize {
        self.config.plays()
    }

    fn plan(&mut self, recent: &Recent<'_>, draws: &mut [Draws], plans: &mut [f32]) -> Result<()> {
        let each = self.config.plays() * self.config.action.dim();
        let mut first = 0;
        while first < recent.rows() {
            let left = recent.rows() - first;
            let rows = rows_at_once(left, self.capacity);
            let count = left.min(rows);
            let (draws, plans) =
                (&mut draws[first..first + count], &mut plans[first * each..(first + count) * each]);
            self.plan_part(recent, first, rows, draws, plans)?;
            first += count;
        }
        Ok(())
    }
}
