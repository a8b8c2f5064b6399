//! Golden cases of Diffusion Policy: schedule, noised actions, predicted noise, gradients, a sample move by move,
//! and training with averaged weights.

use elmur_base::Field;
use elmur_engine::{AdamW, DType, Device, Program, Store, Value};
use serde::Deserialize;

use super::super::{Report, compare, golden, narrow, widen};
use super::parse;
use crate::architecture::Architecture;
use crate::baselines::diffusion::{AVERAGE, EMA, Layer, NOISE, NoiseSchedule, STEP, X, sampling_graphs};
use crate::baselines::{Denoiser, Diffusion, DiffusionCompat, DiffusionSampler};
use crate::ends::{Action, Encoder, Ends};
use crate::error::{Error, Result};
use crate::init;
use crate::net::{Loss, Net};
use crate::phase::Window;
use crate::tensors::Tensors;
use crate::window::{Begin, Built, TrainSettings, WindowProgram, training_graph};

#[derive(Debug, Deserialize)]
struct Arguments {
    batch: usize,
    act_dim: usize,
    obs_horizon: usize,
    feature_dim: usize,
    pred_horizon: usize,
    diffusion_step_embed_dim: usize,
    unet_dims: Vec<usize>,
    kernel_size: usize,
    n_groups: usize,
    diffusion_steps: usize,
    optimizer: Optimizer,
}

#[derive(Debug, Deserialize)]
struct Optimizer {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    warmup: u64,
    total: u64,
    steps: usize,
}

impl Optimizer {
    /// The published learning rate of step `k` = 0, 1, ...: a linear rise from 0, then half a cosine.
    fn rate(&self, k: u64) -> f64 {
        if k < self.warmup {
            return self.lr * k as f64 / self.warmup as f64;
        }
        let part = (k - self.warmup) as f64 / self.total.saturating_sub(self.warmup).max(1) as f64;
        self.lr * (0.5 * (1.0 + (std::f64::consts::PI * part).cos())).max(0.0)
    }
}

/// How a published tensor lies in ours.
#[derive(Debug, Clone, Copy)]
enum Order {
    /// As it is.
    Same,
    /// A convolution's kernel [outputs, inputs, steps]; ours has steps before inputs.
    Kernel([usize; 3]),
    /// A transposed convolution's kernel [inputs, outputs, steps]; ours has steps first and inputs last.
    Transposed([usize; 3]),
}

/// A published parameter and ours.
#[derive(Debug)]
struct Pair {
    published: String,
    own: String,
    order: Order,
}

impl Pair {
    /// Our numbers from the published ones.
    fn own(&self, published: &[f64]) -> Result<Vec<f64>> {
        let (shape, axes) = match self.order {
            Order::Same => return Ok(published.to_vec()),
            Order::Kernel(shape) => (shape, [0, 2, 1]),
            Order::Transposed(shape) => (shape, [2, 1, 0]),
        };
        if published.len() != shape.iter().product::<usize>() {
            let expected = format!("`{}` {shape:?}", self.published);
            return Err(Error::input("golden file", expected, format!("{} numbers", published.len())));
        }
        let steps = [shape[1] * shape[2], shape[2], 1];
        let mut own = Vec::with_capacity(published.len());
        for i in 0..shape[axes[0]] {
            for j in 0..shape[axes[1]] {
                let at = i * steps[axes[0]] + j * steps[axes[1]];
                own.extend((0..shape[axes[2]]).map(|k| published[at + k * steps[axes[2]]]));
            }
        }
        Ok(own)
    }
}

/// All parameters of a U-Net policy, published and ours.
fn pairs(config: &Diffusion) -> Vec<Pair> {
    let mut all = Vec::new();
    let mut add = |published: String, own: String, order: Order| all.push(Pair { published, own, order });
    // Weight and bias, or scale and shift.
    let mut both = |published: &str, own: &str, [weight, bias]: [&str; 2], order: Order| {
        add(format!("{published}.weight"), format!("{own}.{weight}"), order);
        add(format!("{published}.bias"), format!("{own}.{bias}"), Order::Same);
    };
    let (linear, norm) = (["weight", "bias"], ["scale", "shift"]);
    both("diffusion_step_encoder.1", "step.0", linear, Order::Same);
    both("diffusion_step_encoder.3", "step.1", linear, Order::Same);
    let Denoiser::Unet { widths, kernel, groups } = &config.denoiser else { return Vec::new() };
    let unet = config.unet(widths, *kernel, *groups);
    let theirs = |own: &str| {
        let (part, rest) = own.split_once('.').unwrap_or((own, ""));
        let rest = rest.replace("halve", "2.conv").replace("double", "2.conv");
        format!("{part}_modules.{rest}")
    };
    for layer in unet.layers() {
        match layer {
            Layer::Residual { name, inputs, outputs } => {
                let from = theirs(&name);
                for (i, inputs) in [inputs, outputs].into_iter().enumerate() {
                    let (block, own) = (format!("{from}.blocks.{i}.block"), format!("{name}.{i}"));
                    let order = Order::Kernel([outputs, inputs, *kernel]);
                    both(&format!("{block}.0"), &format!("{own}.conv"), linear, order);
                    both(&format!("{block}.1"), &format!("{own}.norm"), norm, Order::Same);
                }
                both(&format!("{from}.cond_encoder.1"), &format!("{name}.film"), linear, Order::Same);
                if inputs != outputs {
                    both(&format!("{from}.residual_conv"), &format!("{name}.skip"), linear, Order::Same);
                }
            }
            Layer::Halve { name, width } => {
                both(&theirs(&name), &name, linear, Order::Kernel([width, width, 3]))
            }
            Layer::Double { name, width } => {
                both(&theirs(&name), &name, linear, Order::Transposed([width, width, 4]));
            }
            Layer::Keep | Layer::Join => {}
        }
    }
    both("final_conv.0.block.0", "last.conv", linear, Order::Kernel([widths[0], widths[0], *kernel]));
    both("final_conv.0.block.1", "last.norm", norm, Order::Same);
    both("final_conv.1", "out", linear, Order::Same);
    all
}

/// The policy with noise and steps from inputs instead of a random generator.
#[derive(Debug)]
struct Given<'a>(&'a Diffusion);

/// Names of the inputs of [`Given`].
const GIVEN_NOISE: &str = "given.noise";
const GIVEN_STEPS: &str = "given.steps";

impl Architecture for Given<'_> {
    fn validate(&self) -> Result<()> {
        self.0.validate()
    }
    fn ends(&self) -> Ends<'_> {
        self.0.ends()
    }
    fn window(&self) -> Window {
        self.0.window()
    }
    fn forward(&self, net: &mut Net<'_>) -> Result<Value> {
        let shape = [net.rows(), self.0.pred_horizon, self.0.action.dim()];
        let noise = net.g.input(GIVEN_NOISE, net.dtype, shape)?;
        let t = net.g.input(GIVEN_STEPS, DType::I32, [net.rows()])?;
        let noisy = self.0.noised(net, noise, t)?;
        net.g.output("noisy", noisy)?;
        self.0.denoise(net, noise, t)
    }
    fn head(&self, net: &mut Net<'_>, hidden: Value) -> Result<Value> {
        self.0.head(net, hidden)
    }
    fn loss(&self, net: &mut Net<'_>, hidden: Value, outputs: Value) -> Result<Loss> {
        self.0.loss(net, hidden, outputs)
    }
}

/// Replays the case that a json describes.
pub(in super::super) fn verify(json: &str, file: &Tensors, dtype: DType, device: &Device) -> Result<Report> {
    let arguments: Arguments = parse(json)?;
    let a = &arguments;
    let config = Diffusion {
        observation: vec![Encoder::Vector { dim: a.feature_dim, bytes: false }],
        action: Action::Continuous { dim: a.act_dim, tanh: false },
        d_model: 1,
        obs_horizon: a.obs_horizon,
        pred_horizon: a.pred_horizon,
        act_horizon: 1,
        diffusion_steps: a.diffusion_steps,
        step_embed: a.diffusion_step_embed_dim,
        denoiser: Denoiser::Unet { widths: a.unet_dims.clone(), kernel: a.kernel_size, groups: a.n_groups },
        sampler: DiffusionSampler::Ddpm,
        compat: DiffusionCompat::default(),
    };
    config.validate()?;
    let (each, steps) = (a.pred_horizon * a.act_dim, a.optimizer.steps);
    for (name, count) in [
        ("input/actions", [steps, a.batch, each]),
        ("input/noise", [steps, a.batch, each]),
        ("input/timesteps", [steps, a.batch, 1]),
        ("input/cond", [steps, a.batch, a.obs_horizon * a.feature_dim]),
        ("sample/noise", [a.diffusion_steps + 1, a.batch, each]),
    ] {
        let (found, expected) =
            (golden(file, name)?.len(), count.iter().fold(1, |all: usize, n| all.saturating_mul(*n)));
        if found != expected || found == 0 {
            return Err(Error::input(
                "golden file",
                format!("{expected} numbers in `{name}`"),
                found.to_string(),
            ));
        }
    }
    let replay =
        Replay { arguments: &arguments, config: &config, pairs: pairs(&config), file, dtype, device };
    let mut report = Report::default();
    let schedule = NoiseSchedule::new(config.diffusion_steps);
    compare(&mut report.logits, &schedule.betas, &golden(file, "schedule/betas")?)?;
    compare(&mut report.logits, &schedule.alpha_bars, &golden(file, "schedule/alphas_cumprod")?)?;
    replay.training(&mut report)?;
    replay.sampling(&mut report)?;
    Ok(report)
}

struct Replay<'a> {
    arguments: &'a Arguments,
    config: &'a Diffusion,
    pairs: Vec<Pair>,
    file: &'a Tensors,
    dtype: DType,
    device: &'a Device,
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

    fn input(&self, program: &mut Program, name: &str, data: &[f64]) -> Result<()> {
        match self.dtype {
            DType::F64 => program.set(name, data)?,
            _ => program.set(name, &narrow(data))?,
        }
        Ok(())
    }

    fn output(&self, program: &Program, name: &str) -> Result<Vec<f64>> {
        Ok(match self.dtype {
            DType::F64 => program.get::<f64>(name)?.to_vec(),
            _ => widen(program.get::<f32>(name)?),
        })
    }

    /// Entry `at` of a tensor that leads with steps.
    fn entry(&self, name: &str, at: usize) -> Result<Vec<f64>> {
        let all = golden(self.file, name)?;
        let count = self.file.get(name).and_then(|tensor| tensor.shape.first().copied()).unwrap_or(1);
        let each = all.len() / count.max(1);
        Ok(all.get(at * each..(at + 1) * each).unwrap_or_default().to_vec())
    }

    /// Puts the golden parameters into a store with everything that a graph declares.
    fn fill(&self, built: &Built, store: &Store) -> Result<()> {
        store.declare(&built.graph)?;
        init::initialise(built, store, 0)?;
        for pair in &self.pairs {
            let published = golden(self.file, &format!("param/{}", pair.published))?;
            self.set(store, &pair.own, &pair.own(&published)?)?;
        }
        let known = |name: &str| self.pairs.iter().any(|pair| pair.published == name);
        let mut names = self.file.keys().filter_map(|name| name.strip_prefix("param/"));
        if let Some(name) = names.find(|name| !known(name)) {
            return Err(Error::input("golden file", "only parameters of this U-Net", format!("`{name}`")));
        }
        init::copy_averages(built, store)
    }

    fn built(&self) -> Result<Built> {
        let optimizer = &self.arguments.optimizer;
        let settings = TrainSettings {
            batch: self.arguments.batch,
            label_smoothing: 0.0,
            ties: false,
            optimizer: AdamW {
                betas: optimizer.betas,
                eps: optimizer.eps,
                weight_decay: optimizer.weight_decay,
                lr_scale: 1.0,
            },
            clip: f64::INFINITY,
            dtype: self.dtype,
            export_gradients: true,
            dropout: true,
            table: None,
            augment: Default::default(),
            bytes: Vec::new(),
            weights: None,
        };
        training_graph(&Given(self.config), &settings, Begin::Fresh)
    }

    /// Noised actions, predicted noise, loss and gradients of the first step; losses, rates, parameters and their
    /// averages of all.
    fn training(&self, report: &mut Report) -> Result<()> {
        let (a, built, store) = (self.arguments, self.built()?, Store::on(self.device));
        self.fill(&built, &store)?;
        let mut program = WindowProgram::new(&built, &Given(self.config), self.device, &[&store])?;
        for k in 0..a.optimizer.steps {
            self.feed(&mut program, k)?;
            let rate = a.optimizer.rate(k as u64);
            program.set_rates(rate, k as u64)?;
            program.run(0)?;
            let noisy = self.output(&program.program, "noisy")?;
            compare(&mut report.logits, &noisy, &self.entry("eval/noisy", k)?)?;
            let loss = self.output(&program.program, "loss")?;
            if k == 0 {
                let predicted = self.output(&program.program, "logits")?;
                compare(&mut report.logits, &predicted, &golden(self.file, "eval/prediction")?)?;
                compare(&mut report.loss, &loss, &golden(self.file, "grad/loss")?)?;
                self.gradients(&program.program, report)?;
            }
            let want = self.entry("train/loss_lr_decay", k)?;
            for (got, want) in [loss[0], rate, AVERAGE.decay(k as u64)].iter().zip(&want) {
                compare(&mut report.trajectory, &[*got], &[*want])?;
            }
        }
        for pair in &self.pairs {
            for (published, own) in
                [("train/param", pair.own.clone()), ("train/ema", format!("{EMA}.{}", pair.own))]
            {
                let Some(want) = self.file.get(&format!("{published}/{}", pair.published)) else { continue };
                let error =
                    compare(&mut report.trained.0, &self.get(&store, &own)?, &pair.own(&want.to_f64())?)?;
                if error == report.trained.0 {
                    report.trained.1 = own;
                }
            }
        }
        Ok(())
    }

    /// Fills the inputs of training step `k`.
    fn feed(&self, program: &mut WindowProgram, k: usize) -> Result<()> {
        let (a, actions) = (self.arguments, self.entry("input/actions", k)?);
        for (name, field) in program.fields().to_vec() {
            let to = &mut program.program;
            match field {
                Field::Target => self.input(to, &name, &actions)?,
                Field::Imitate => to.set(&name, &vec![true; a.batch * a.pred_horizon])?,
                Field::Observation(_) => {
                    // Only the first observations of the window are looked at.
                    let rest = (a.pred_horizon - a.obs_horizon) * a.feature_dim;
                    let cond = self.entry("input/cond", k)?;
                    let rows = cond.chunks(a.obs_horizon * a.feature_dim);
                    let shown =
                        rows.flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(0.0, rest)));
                    self.input(to, &name, &shown.collect::<Vec<f64>>())?;
                }
                other => {
                    return Err(Error::input("golden case", "actions and observations", other.to_string()));
                }
            }
        }
        let steps = self.entry("input/timesteps", k)?;
        let to = &mut program.program;
        to.set(GIVEN_STEPS, &steps.iter().map(|t| *t as i32).collect::<Vec<_>>())?;
        self.input(to, GIVEN_NOISE, &self.entry("input/noise", k)?)
    }

    fn gradients(&self, program: &Program, report: &mut Report) -> Result<()> {
        for pair in &self.pairs {
            // A gradient that is not listed is zero.
            let Some(want) = self.file.get(&format!("grad/param/{}", pair.published)) else { continue };
            let got = self.output(program, &format!("grad.{}", pair.own))?;
            let error = compare(&mut report.gradients.0, &got, &pair.own(&want.to_f64())?)?;
            if error == report.gradients.0 {
                report.gradients.1 = pair.own.clone();
            }
        }
        Ok(())
    }

    /// A chunk from the file's noise, after 1, T / 2 + 1 and all T moves.
    fn sampling(&self, report: &mut Report) -> Result<()> {
        let (rows, total) = (self.arguments.batch, self.config.diffusion_steps);
        let raw = DiffusionCompat { raw_weights: true, ..self.config.compat };
        let config = Diffusion { compat: raw, ..self.config.clone() };
        let moves = NoiseSchedule::new(total).moves(config.sampler);
        let graphs = sampling_graphs(&config, &moves, self.dtype, rows)?;
        let store = Store::on(self.device);
        self.fill(&self.built()?, &store)?;
        store.declare_states(&graphs.denoise)?;
        let mut observe = Program::new(&graphs.observe, self.device, &[&store])?;
        let mut denoise = Program::new(&graphs.denoise, self.device, &[&store])?;
        for name in &graphs.inputs {
            self.input(&mut observe, name, &self.entry("input/cond", 0)?)?;
        }
        observe.run()?;
        self.set(&store, X, &self.entry("sample/noise", total)?)?;
        for (i, step) in moves.iter().enumerate() {
            denoise.set(STEP, &vec![i as i32; rows])?;
            if denoise.input_type(NOISE).is_ok() {
                self.input(&mut denoise, NOISE, &self.entry("sample/noise", step.t)?)?;
            }
            denoise.run()?;
            for (name, after) in [("first", 1), ("middle", total / 2 + 1), ("final", total)] {
                if i + 1 == after {
                    let want = golden(self.file, &format!("sample/{name}"))?;
                    compare(&mut report.logits, &self.get(&store, X)?, &want)?;
                }
            }
        }
        Ok(())
    }
}
