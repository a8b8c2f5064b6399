//! Golden files: traces of the published code in float64, replayed by ours.
//!
//! A case is `<name>.safetensors` with `<name>.json` beside it; the json's `policy` says whose, and without
//! one it is ELMUR's. [`verify`] runs evaluation, gradients, the optimizer's trajectory and, where the file
//! has them, gradients through several windows and a session's steps, and reports the largest relative error
//! of each.

mod baselines;
mod elmur;

use std::path::Path;

use elmur_base::files::read_small;
use elmur_base::{Field, Values};
use elmur_engine::{AdamW, DType, Device, Program, Store};
use serde::Deserialize;

use crate::architecture::Architecture;
use crate::error::{Error, Result};
use crate::pieces::{Piece, convert_pieces};
use crate::policy::PolicyConfig;
use crate::session::{Seen, Session};
use crate::tensors::{self, TensorData, Tensors};
use crate::window::{Begin, Built, TrainSettings, WindowProgram, evaluation_graph, training_graph};

/// Largest relative errors of one case. Relative to the largest element of the tensor compared.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Head outputs of all windows; for Diffusion Policy, predicted noise and samples.
    pub logits: f64,
    /// Carried floats (memory vectors, hidden states) after all windows.
    pub memory: f64,
    /// Number of carried times that differ.
    pub wrong_anchors: usize,
    /// Losses.
    pub loss: f64,
    /// Gradients, through several windows too where the file has them, with the name of the worst.
    pub gradients: (f64, String),
    /// Losses and gradient norms during training.
    pub trajectory: f64,
    /// Parameters after training, with the name of the worst.
    pub trained: (f64, String),
    /// Head outputs and states of a session, which computes in f32; none if the file has no such trace.
    pub acting: Option<f64>,
}

impl Report {
    /// Whether every error is within `tolerance`; the optimizer's trajectory counts in f64 only, and sessions
    /// within 1e-5 where the tolerance is smaller.
    pub fn within(&self, tolerance: f64, dtype: DType) -> bool {
        let forward = [self.logits, self.memory, self.loss, self.gradients.0];
        let trained = [self.trajectory, self.trained.0];
        let all = |errors: &[f64]| errors.iter().all(|e| *e <= tolerance);
        let acting = self.acting.unwrap_or(0.0) <= tolerance.max(1e-5);
        self.wrong_anchors == 0 && all(&forward) && acting && (dtype != DType::F64 || all(&trained))
    }
}

/// Settings of AdamW in a case.
#[derive(Debug, Clone, Deserialize)]
struct Optimizer {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    clip: f64,
    label_smoothing: f64,
}

/// What a case says of itself, in our words.
struct Case {
    config: PolicyConfig,
    pieces: Vec<Piece>,
    batch: usize,
    windows: usize,
    optimizer: Optimizer,
    /// Traced outputs of windows: our output, the columns of its last axis (none: all), the file's tensors
    /// without the window's number.
    outputs: Vec<(&'static str, Option<std::ops::Range<usize>>, &'static str)>,
    /// Carried states and how the file names them.
    states: Vec<StateTrace>,
    /// Windows whose carried states begin with what parameters say (which then have gradients), or with zeros.
    fresh: Fresh,
    /// States that a session carries, traced after every window.
    acted: Vec<ActedState>,
    /// Whether parameters have slowly moving copies, which the file has under `target/`.
    targets: bool,
    /// The window whose gradients are traced; those before it are run forward.
    gradient_window: usize,
    /// What the names of gradients begin with.
    gradients: &'static str,
    /// Traced losses: our output, the file's tensor and the element of it.
    losses: Vec<(&'static str, &'static str, usize)>,
    /// The same policy with gradients through all windows, if traced.
    through: Option<PolicyConfig>,
    /// The published loss divides by the number of imitated numbers plus 1e-8 where ours divides by the
    /// number itself.
    divides_by_more: bool,
    /// Whether a published tensor may be there although the policy does not use it.
    spare: Box<dyn Fn(&str) -> bool>,
}

/// A carried state in a golden file.
struct StateTrace {
    own: String,
    name: &'static str,
    part: Part,
    begins: Begins,
}

/// The windows of evaluation, gradients and training whose states begin anew.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fresh {
    /// None: the first begins with what the file has.
    None,
    /// The first.
    First,
    /// All.
    All,
}

/// Where a file has a state.
#[derive(Clone, Copy)]
enum Part {
    /// One tensor.
    Whole,
    /// A tensor for every layer.
    OfLayer(usize),
    /// One tensor that leads with layers.
    Layer(usize),
}

/// How a state begins.
#[derive(Clone, Copy, PartialEq)]
enum Begins {
    /// As the file has it under `init/`.
    Traced,
    /// A state of times, all -1.
    Never,
    /// This tensor in every row.
    Learned(&'static str),
    /// Empty; the file has the rows that are filled, ours are the last of a state with room for more.
    Empty,
}

/// A state of a session in a golden file, which has it with its last two axes exchanged.
struct ActedState {
    own: String,
    name: &'static str,
    layer: usize,
}

impl ActedState {
    /// This state of the file after a window, in our order of axes.
    fn read(&self, file: &Tensors, window: usize, rows: usize) -> Result<Vec<f64>> {
        let name = format!("{}.{window}.{}", self.name, self.layer);
        let all = golden(file, &name)?;
        let columns = file.get(&name).and_then(|t| t.shape.last().copied()).unwrap_or(1).max(1);
        let one = |x: &[f64]| -> Vec<f64> {
            let column = |c: usize| x.iter().skip(c).step_by(columns).copied().collect::<Vec<_>>();
            (0..columns).flat_map(column).collect()
        };
        Ok(all.chunks_exact((all.len() / rows).max(1)).flat_map(one).collect())
    }
}

impl StateTrace {
    /// This state of the file, at first or after a window.
    fn read(&self, file: &Tensors, after: Option<usize>) -> Result<Vec<f64>> {
        let folder =
            after.map_or(format!("init/{}", self.name), |window| format!("eval/{}.{window}", self.name));
        match self.part {
            Part::Whole => golden(file, &folder),
            Part::OfLayer(layer) => golden(file, &format!("{folder}.{layer}")),
            Part::Layer(layer) => {
                let all = golden(file, &folder)?;
                let layers = file.get(&folder).and_then(|t| t.shape.first().copied()).unwrap_or(1).max(1);
                let each = all.len() / layers;
                Ok(all.get(layer * each..(layer + 1) * each).unwrap_or_default().to_vec())
            }
        }
    }
}

/// The tensor of this name.
fn golden(file: &Tensors, name: &str) -> Result<Vec<f64>> {
    let missing = || Error::input("golden file", format!("a tensor `{name}`"), "none");
    Ok(file.get(name).ok_or_else(missing)?.to_f64())
}

/// Replays the golden file at `path` on a device, in the given float type.
pub fn verify(path: &Path, dtype: DType, device: impl Into<Device>) -> Result<Report> {
    #[derive(Deserialize)]
    struct Kind {
        policy: Option<String>,
    }
    let device = device.into();
    let json = path.with_extension("json");
    let text = read_small(&json, 1 << 20)?;
    let bad = |e: serde_json::Error| Error::file(&json, e);
    let file = tensors::read(&path.with_extension("safetensors"))?;
    let policy = serde_json::from_str::<Kind>(&text).map_err(bad)?.policy;
    // Traces of another form than windows of steps.
    let own = match policy.as_deref() {
        Some("tt") => Some(baselines::tt::verify(&text, &file, dtype, &device)),
        Some("diffusion_unet") => Some(baselines::diffusion::verify(&text, &file, dtype, &device)),
        _ => None,
    };
    if let Some(report) = own {
        return report.map_err(|e| Error::file(&json, e));
    }
    let case = match policy {
        None => elmur::case(&text).map_err(|e| Error::file(&json, e))?,
        Some(policy) => baselines::case(&policy, &text).map_err(|e| Error::file(&json, e))?,
    };
    let windows = case.gradient_window + 1;
    if case.windows < windows || case.batch == 0 || case.windows > 1 << 16 || case.batch > 1 << 16 {
        let expected = format!("expected at least {windows} segments and a batch of at least 1");
        return Err(Error::file(&json, expected));
    }
    case.config.architecture().validate().map_err(|e| Error::file(&json, e))?;
    let architecture = case.config.architecture();
    let each: usize = architecture.ends().observation.iter().map(|e| e.len()).sum();
    let numbers = [case.windows, case.batch, architecture.window().steps, each];
    let expected = numbers.iter().fold(1usize, |product, n| product.saturating_mul(*n));
    let found = golden(&file, "input/observations")?.len();
    if found != expected {
        let problem =
            format!("asks for {expected} numbers in `input/observations`, where its trace has {found}");
        return Err(Error::file(&json, problem));
    }
    let replay = Replay { case: &case, file: &file, dtype, device: &device };
    let mut report = Report::default();
    replay.evaluation(&mut report)?;
    replay.continued(&mut report)?;
    replay.gradients(&mut report)?;
    replay.trajectory(&mut report)?;
    replay.acting(&mut report)?;
    Ok(report)
}

struct Replay<'a> {
    case: &'a Case,
    file: &'a Tensors,
    dtype: DType,
    device: &'a Device,
}

/// |got - want| over the largest |want|; the larger of the two stays in `worst`.
fn compare(worst: &mut f64, got: &[f64], want: &[f64]) -> Result<f64> {
    if got.len() != want.len() {
        return Err(Error::input("golden tensor", format!("{} elements", got.len()), want.len().to_string()));
    }
    let scale = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let difference = got.iter().zip(want).fold(0.0f64, |m, (g, w)| {
        let d = (g - w).abs();
        if d.is_nan() { f64::INFINITY } else { m.max(d) }
    });
    let error = if difference == 0.0 { 0.0 } else { difference / scale.max(f64::MIN_POSITIVE) };
    *worst = worst.max(error);
    Ok(error)
}

impl Replay<'_> {
    fn set(&self, store: &Store, name: &str, data: &[f64]) -> Result<()> {
        match self.dtype {
            DType::F64 => store.set(name, data)?,
            _ => store.set(name, &narrow(data))?,
        }
        Ok(())
    }

    fn get(&self, store: &Store, name: &str) -> Result<Vec<f64>> {
        Ok(match self.dtype {
            DType::F64 => store.get::<f64>(name)?,
            _ => widen(&store.get::<f32>(name)?),
        })
    }

    fn output(&self, program: &Program, name: &str) -> Result<Vec<f64>> {
        Ok(match self.dtype {
            DType::F64 => program.get::<f64>(name)?.to_vec(),
            _ => widen(program.get::<f32>(name)?),
        })
    }

    /// A store with the golden parameters and initial states, and zeros for the graphs' other states.
    fn store(&self, graphs: &[&Built]) -> Result<Store> {
        // Memory is taken only for what the file has shown to hold.
        let parameters = convert_pieces(&self.case.pieces, self.file, "param/", &*self.case.spare)?;
        let store = Store::on(self.device);
        for built in graphs {
            store.declare(&built.graph)?;
        }
        let targets = match self.case.targets {
            true => convert_pieces(&self.case.pieces, self.file, "target/", &*self.case.spare)?,
            false => Vec::new(),
        };
        let targets = targets.into_iter().map(|(name, data)| (format!("target.{name}"), data));
        for (name, data) in parameters.into_iter().chain(targets) {
            // Parameters that no graph here uses (the last layer's writes, say) are not in the store.
            if store.ty(&name).is_ok() {
                self.set(&store, &name, &data)?;
            }
        }
        for state in &self.case.states {
            match state.begins {
                Begins::Traced => self.set(&store, &state.own, &state.read(self.file, None)?)?,
                Begins::Never => store.set(&state.own, &vec![-1i64; store.ty(&state.own)?.len()])?,
                Begins::Learned(name) => {
                    self.set(&store, &state.own, &golden(self.file, name)?.repeat(self.case.batch))?;
                }
                Begins::Empty => {}
            }
        }
        Ok(store)
    }

    /// Numbers of one window of a tensor that leads with windows.
    fn window(&self, name: &str, window: usize) -> Result<Vec<f64>> {
        let all = golden(self.file, name)?;
        let each = all.len() / self.case.windows;
        Ok(all[window * each..(window + 1) * each].to_vec())
    }

    /// Fills the inputs of a program with windows `first..`.
    fn feed(&self, program: &mut WindowProgram, first: usize, training: bool) -> Result<()> {
        let action = self.case.config.architecture().ends().action;
        let windows = first..first + program.windows();
        let of = |name: &str| -> Result<Vec<f64>> {
            let parts = windows.clone().map(|window| self.window(name, window));
            Ok(parts.collect::<Result<Vec<_>>>()?.concat())
        };
        for (name, field) in program.fields().to_vec() {
            let to = &mut program.program;
            match field {
                Field::Observation(_) => self.input(to, &name, &of("input/observations")?)?,
                Field::ReturnToGo => self.input(to, &name, &of("input/returns")?)?,
                Field::Target | Field::Action if !action.is_discrete() => {
                    self.input(to, &name, &of("input/actions")?)?;
                }
                Field::Target => {
                    let actions = of("input/actions")?;
                    to.set(&name, &actions.iter().map(|x| *x as i64).collect::<Vec<_>>())?;
                }
                Field::Action => {
                    let none = action.outputs() as i32;
                    let actions = of("input/actions")?;
                    let known = |x: &f64| if *x < 0.0 { none } else { *x as i32 };
                    to.set(&name, &actions.iter().map(known).collect::<Vec<_>>())?;
                }
                // Traces have one right choice a step, and all steps count alike: their programs do not ask for these.
                Field::Accepted | Field::Weight(_) => {}
                Field::NextObservation(_) => self.input(to, &name, &of("input/next_observations")?)?,
                Field::Reward | Field::CountedReward(_) => {
                    self.input(to, &name, &of("input/rewards")?)?;
                }
                Field::LaterRewards(_) => self.input(to, &name, &of("input/values")?)?,
                Field::Terminated => to.set(&name, &flags(&of("input/done")?))?,
                Field::KnownNext => to.set(&name, &flags(&of("input/bootstrap")?))?,
                Field::Imitate | Field::Exists => {
                    let actions = of("input/actions")?;
                    let padding = Field::IGNORED as f64;
                    let mask = actions.chunks(action.dim()).map(|a| a.iter().any(|x| *x != padding));
                    to.set(&name, &mask.collect::<Vec<bool>>())?;
                }
            }
        }
        if training {
            program.set_rates(self.case.optimizer.lr, first as u64)?;
        }
        Ok(())
    }

    /// What our loss over these windows, and its gradients, must be multiplied by to be the published ones.
    fn loss_factor(&self, windows: std::ops::Range<usize>) -> Result<f64> {
        if !self.case.divides_by_more {
            return Ok(1.0);
        }
        let mut count = 0.0;
        for window in windows {
            let actions = self.window("input/actions", window)?;
            count += actions.iter().filter(|x| **x != Field::IGNORED as f64).count() as f64;
        }
        Ok(count / (count + 1e-8))
    }

    fn input(&self, program: &mut Program, name: &str, data: &[f64]) -> Result<()> {
        match self.dtype {
            DType::F64 => program.set(name, data)?,
            _ => program.set(name, &narrow(data))?,
        }
        Ok(())
    }

    /// How the states of a window begin.
    fn begin(&self, window: usize) -> Begin {
        match self.case.fresh {
            Fresh::All => Begin::Fresh,
            Fresh::First if window == 0 => Begin::Fresh,
            Fresh::First | Fresh::None => Begin::Continue,
        }
    }

    fn training(&self, architecture: &dyn Architecture, begin: Begin) -> Result<Built> {
        let optimizer = &self.case.optimizer;
        let settings = TrainSettings {
            batch: self.case.batch,
            label_smoothing: optimizer.label_smoothing,
            ties: false,
            optimizer: AdamW {
                betas: optimizer.betas,
                eps: optimizer.eps,
                weight_decay: optimizer.weight_decay,
                lr_scale: 1.0,
            },
            clip: optimizer.clip,
            dtype: self.dtype,
            export_gradients: true,
            dropout: true,
            table: None,
            augment: Default::default(),
            bytes: Vec::new(),
            weights: None,
        };
        training_graph(architecture, &settings, begin)
    }

    fn evaluation_graph(&self, begin: Begin) -> Result<Built> {
        evaluation_graph(self.case.config.architecture(), self.case.batch, self.dtype, begin)
    }

    fn compile(&self, built: &Built, config: &PolicyConfig, store: &Store) -> Result<WindowProgram> {
        WindowProgram::new(built, config.architecture(), self.device, &[store])
    }

    fn evaluation(&self, report: &mut Report) -> Result<()> {
        // The store holds what the first window begins with, unless every window begins anew.
        let built = self.evaluation_graph(self.begin(1))?;
        let store = self.store(&[&built])?;
        let mut program = self.compile(&built, &self.case.config, &store)?;
        for window in 0..self.case.windows {
            self.feed(&mut program, window, false)?;
            program.run(window as u64)?;
            for (output, columns, name) in &self.case.outputs {
                let mut got = self.output(&program.program, output)?;
                if let Some(columns) = columns {
                    let width = program.program.output_type(output)?.shape.last().copied().unwrap_or(1);
                    let row = |x: &[f64]| x[columns.clone()].to_vec();
                    got = got.chunks_exact(width).flat_map(row).collect();
                }
                compare(&mut report.logits, &got, &golden(self.file, &format!("{name}.{window}"))?)?;
            }
            for state in &self.case.states {
                let want = state.read(self.file, Some(window))?;
                if state.begins == Begins::Never {
                    let got = store.get::<i64>(&state.own)?;
                    let wrong = got.iter().zip(&want).filter(|(g, w)| **g as f64 != **w).count();
                    report.wrong_anchors += wrong + got.len().abs_diff(want.len());
                    continue;
                }
                let mut got = self.get(&store, &state.own)?;
                if state.begins == Begins::Empty {
                    let (room, filled) = (got.len() / self.case.batch, want.len() / self.case.batch);
                    let newest = |row: &[f64]| row[room.saturating_sub(filled)..].to_vec();
                    got = got.chunks_exact(room.max(1)).flat_map(newest).collect();
                }
                compare(&mut report.memory, &got, &want)?;
            }
        }
        Ok(())
    }

    /// Windows whose carried states go on, where the file traces a session's: outputs are those of its steps.
    fn continued(&self, report: &mut Report) -> Result<()> {
        if self.case.acted.is_empty() {
            return Ok(());
        }
        let architecture = self.case.config.architecture();
        let (rows, steps) = (self.case.batch, architecture.window().steps);
        let built = evaluation_graph(architecture, rows, self.dtype, Begin::Continue)?;
        let store = self.store(&[&built])?;
        let mut program = self.compile(&built, &self.case.config, &store)?;
        let all = golden(self.file, "act/logits")?;
        let each = steps * architecture.ends().action.outputs();
        for window in 0..self.case.windows {
            self.feed(&mut program, window, false)?;
            program.run(window as u64)?;
            let of = |row: &[f64]| row.chunks_exact(each).nth(window).unwrap_or_default().to_vec();
            let want: Vec<f64> = all.chunks_exact(self.case.windows * each).flat_map(of).collect();
            compare(&mut report.logits, &self.output(&program.program, "logits")?, &want)?;
            for state in &self.case.acted {
                let want = state.read(self.file, window, rows)?;
                compare(&mut report.memory, &self.get(&store, &state.own)?, &want)?;
            }
        }
        Ok(())
    }

    /// Earlier windows forward, then loss and gradients on one; on the first; and through all of them.
    fn gradients(&self, report: &mut Report) -> Result<()> {
        let begin = self.begin(self.case.gradient_window);
        let evaluation = self.evaluation_graph(self.begin(1))?;
        let training = self.training(self.case.config.architecture(), begin)?;
        let store = self.store(&[&evaluation, &training])?;
        let mut forward = self.compile(&evaluation, &self.case.config, &store)?;
        let mut train = self.compile(&training, &self.case.config, &store)?;
        for window in 0..self.case.gradient_window {
            self.feed(&mut forward, window, false)?;
            forward.run(window as u64)?;
        }
        self.feed(&mut train, self.case.gradient_window, true)?;
        train.run(self.case.gradient_window as u64)?;
        let factor = self.loss_factor(self.case.gradient_window..self.case.gradient_window + 1)?;
        for (output, name, element) in &self.case.losses {
            let got = scaled(self.output(&train.program, output)?, factor);
            let all = golden(self.file, name)?;
            let Some(want) = all.get(*element) else {
                let expected = format!("{} numbers in `{name}`", element + 1);
                return Err(Error::input("golden file", expected, all.len().to_string()));
            };
            // A loss that is absent is compared with zero absolutely.
            if *want == 0.0 {
                report.loss = report.loss.max(got[0].abs());
            } else {
                compare(&mut report.loss, &got, &[*want])?;
            }
        }
        self.compare_gradients(report, &train.program, self.case.gradients, factor)?;
        if self.file.contains_key("grad0/loss") {
            let training = self.training(self.case.config.architecture(), self.begin(0))?;
            let store = self.store(&[&training])?;
            let mut train = self.compile(&training, &self.case.config, &store)?;
            self.feed(&mut train, 0, true)?;
            train.run(0)?;
            let factor = self.loss_factor(0..1)?;
            let got = scaled(self.output(&train.program, "loss")?, factor);
            compare(&mut report.loss, &got, &golden(self.file, "grad0/loss")?[..1])?;
            self.compare_gradients(report, &train.program, "grad0/param/", factor)?;
        }
        let Some(through) = &self.case.through else { return Ok(()) };
        let training = self.training(through.architecture(), self.begin(0))?;
        let store = self.store(&[&training])?;
        let mut train = self.compile(&training, through, &store)?;
        self.feed(&mut train, 0, true)?;
        train.run(0)?;
        let want = golden(self.file, "through/loss")?;
        let factor = self.loss_factor(0..self.case.windows)?;
        let got = scaled(self.output(&train.program, "action_loss")?, factor);
        compare(&mut report.loss, &got, &want)?;
        self.compare_gradients(report, &train.program, "through/param/", factor)
    }

    fn compare_gradients(
        &self,
        report: &mut Report,
        program: &Program,
        prefix: &str,
        factor: f64,
    ) -> Result<()> {
        for piece in &self.case.pieces {
            let Some(want) = self.listed(piece, prefix) else { continue };
            let got = scaled(self.output(program, &format!("grad.{}", piece.own))?, factor);
            let error = compare(&mut report.gradients.0, &piece.extract(&got), &want)?;
            if error == report.gradients.0 {
                report.gradients.1 = piece.published[0].clone();
            }
        }
        Ok(())
    }

    fn listed(&self, piece: &Piece, prefix: &str) -> Option<Vec<f64>> {
        piece.published.iter().find_map(|n| self.file.get(&format!("{prefix}{n}"))).map(|t| t.to_f64())
    }

    /// An AdamW step per window from the start.
    fn trajectory(&self, report: &mut Report) -> Result<()> {
        let begins = self.training(self.case.config.architecture(), self.begin(0))?;
        let goes_on = self.training(self.case.config.architecture(), self.begin(1))?;
        let store = self.store(&[&begins, &goes_on])?;
        let mut first = self.compile(&begins, &self.case.config, &store)?;
        let mut others = self.compile(&goes_on, &self.case.config, &store)?;
        let golden = golden(self.file, "train/loss_and_grad_norm")?;
        if golden.len() != 2 * self.case.windows {
            let expected = format!("{} numbers in `train/loss_and_grad_norm`", 2 * self.case.windows);
            return Err(Error::input("golden file", expected, golden.len().to_string()));
        }
        for window in 0..self.case.windows {
            let train = if window == 0 { &mut first } else { &mut others };
            self.feed(train, window, true)?;
            train.run(window as u64)?;
            let factor = self.loss_factor(window..window + 1)?;
            for (output, want) in ["loss", "gradient_norm"].into_iter().zip(&golden[2 * window..]) {
                let got = scaled(self.output(&train.program, output)?, factor);
                compare(&mut report.trajectory, &got, &[*want])?;
            }
        }
        self.compare_trained(report, &store)
    }

    /// Parameters after training.
    fn compare_trained(&self, report: &mut Report, store: &Store) -> Result<()> {
        for piece in &self.case.pieces {
            // What is not listed did not move.
            let trained = self.listed(piece, "train/param/").or_else(|| self.listed(piece, "param/"));
            let (Some(want), true) = (trained, store.ty(&piece.own).is_ok()) else { continue };
            let got = piece.extract(&self.get(store, &piece.own)?);
            let error = compare(&mut report.trained.0, &got, &want)?;
            if error == report.trained.0 {
                report.trained.1 = piece.published[0].clone();
            }
            if let Some(want) = self.listed(piece, "train/target/") {
                let got = piece.extract(&self.get(store, &format!("target.{}", piece.own))?);
                let error = compare(&mut report.trained.0, &got, &want)?;
                if error == report.trained.0 {
                    report.trained.1 = format!("target of {}", piece.published[0]);
                }
            }
        }
        Ok(())
    }

    /// A session through one episode made of all windows, with the actions that the file took.
    fn acting(&self, report: &mut Report) -> Result<()> {
        if !self.file.contains_key("act/logits") {
            return Ok(());
        }
        let (case, rows) = (self.case, self.case.batch);
        let architecture = case.config.architecture();
        let action = architecture.ends().action;
        let steps = architecture.window().steps;
        let f32s = Replay { dtype: DType::F32, ..*self };
        let built = f32s.evaluation_graph(self.begin(0))?;
        let params = f32s.store(&[&built])?;
        let mut session = Session::new(&case.config, &params, rows, self.device)?;
        let all: Vec<usize> = (0..rows).collect();
        let mut start = session.snapshot(&all)?;
        for state in case.states.iter().filter(|state| state.begins == Begins::Traced) {
            if let Some(tensor) = start.tensors.get_mut(&state.own) {
                tensor.data = TensorData::F32(narrow(&state.read(self.file, None)?));
            }
        }
        session.restore(&all, &start)?;
        let want = golden(self.file, "act/logits")?;
        let (outputs, total) = (action.outputs(), case.windows * steps);
        let (mut got, mut worst) = (vec![0.0; rows * total * outputs], 0.0);
        for t in 0..total {
            let (window, step) = (t / steps, t % steps);
            // Entry `step` of every row of a window's tensor [rows, steps, each].
            let at = |name: &str| -> Result<Vec<f64>> {
                let data = self.window(name, window)?;
                let each = data.len() / (rows * steps);
                let row = |b: usize| data[(b * steps + step) * each..][..each].to_vec();
                Ok((0..rows).flat_map(row).collect())
            };
            let (seen, returns) = (narrow(&at("input/observations")?), narrow(&at("input/returns")?));
            let seen = Seen { observation: Values::floats(&seen), returns: Some(&returns) };
            let logits = session.forward(&all, seen)?;
            for (b, logits) in logits.chunks_exact(outputs).enumerate() {
                let to = &mut got[(b * total + t) * outputs..][..outputs];
                to.iter_mut().zip(logits).for_each(|(to, x)| *to = f64::from(*x));
            }
            let actions = at("input/actions")?;
            if action.is_discrete() {
                let none = action.outputs() as i32;
                let known = |x: &f64| if *x < 0.0 { none } else { *x as i32 };
                let actions: Vec<i32> = actions.iter().map(known).collect();
                session.commit(&all, Values::ints(&actions))?;
            } else {
                session.commit(&all, Values::floats(&narrow(&actions)))?;
            }
            for state in case.acted.iter().filter(|_| step + 1 == steps) {
                let TensorData::F32(got) = session.state(&state.own, &all)? else {
                    return Err(Error::input("golden file", "states of floats", state.own.clone()));
                };
                compare(&mut worst, &widen(&got), &state.read(self.file, window, rows)?)?;
            }
        }
        compare(&mut worst, &got, &want)?;
        report.acting = Some(worst);
        Ok(())
    }
}

fn flags(x: &[f64]) -> Vec<bool> {
    x.iter().map(|x| *x != 0.0).collect()
}

fn scaled(mut x: Vec<f64>, factor: f64) -> Vec<f64> {
    x.iter_mut().for_each(|x| *x *= factor);
    x
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|x| *x as f32).collect()
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}
