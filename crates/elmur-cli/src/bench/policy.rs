//! `elmur bench step` and `elmur bench train`: a whole model, acting and training.
//!
//! Rows have the form of the PyTorch and ONNX Runtime peers they are compared with: {"peer", "device",
//! "work", "ms"}, where a training unit is one batch (3 segments with 3 optimizer steps) and a step is one
//! environment step of B rows. Steps at the end of a segment, which also write the memory, are reported
//! apart (`boundary_ms`), as are steps in which a planning policy makes a plan. A session can also leave the write to
//! the time in which the environment moves: then `deferred_ms` and `deferred_p99_ms` are what the caller waits for an
//! action in all steps, `deferred_boundary_ms` in those at the end of a segment, and `write_ms` is what remains to be
//! done before the next step. Policies whose window slides are measured when it is full.

use std::time::{Duration, Instant};

use elmur_base::{Field, Row, Space};
use elmur_engine::{DType, Device, Store};
use elmur_envs::Registry;
use elmur_model::ends::{Encoder, Ends};
use elmur_model::session::{Seen, Session, Weights};
use elmur_model::window::{Begin, TrainSettings, WindowProgram, training_graph};
use elmur_model::{Architecture, PolicyConfig, init};
use elmur_train::{Error, PolicyName, Result, RunConfig, overrides};
use serde_json::json;

use super::{Times, WARM_UP, print, round};
use crate::Context;
use crate::device::DeviceArgs;

/// Options of `elmur bench step`.
#[derive(clap::Args)]
pub struct StepArgs {
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: Model,
    /// Act in this many rows at once; default: measure 1 and 100, on a GPU 1,024 too.
    #[arg(long, value_parser = crate::count(1 << 20))]
    batch: Option<usize>,
    /// Use this many threads; 0: as many as are granted. Batch 1 defaults to one thread, larger batches to 0.
    #[arg(long, value_parser = crate::threads())]
    threads: Option<usize>,
    /// Measure this many segments; of policies whose window slides this many steps, of policies that plan this
    /// many plans, and of both for at most 20 seconds.
    #[arg(long, default_value_t = 100, value_parser = crate::count(1 << 20))]
    segments: usize,
    /// Keep the weights of linear layers as f32 or, on a CPU, as bf16.
    #[arg(long, default_value = "f32", value_parser = crate::weights)]
    weights: Weights,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Options of `elmur bench train`.
#[derive(clap::Args)]
pub struct TrainArgs {
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: Model,
    /// Use this many threads; 0: as many as are granted.
    #[arg(long, default_value_t = 0, value_parser = crate::threads())]
    threads: usize,
    /// Measure this many batches.
    #[arg(long, default_value_t = 10, value_parser = crate::count(1 << 20))]
    batches: usize,
    /// Also print the time of every op.
    #[arg(long)]
    profile: bool,
    /// Train this many models side by side, as runs of one experiment.
    #[arg(long, default_value_t = 1, value_parser = crate::count(256))]
    runs: usize,
    /// Train models of these presets too, side by side with the first, and compare with each alone.
    #[arg(long, value_name = "PRESETS", value_delimiter = ',', conflicts_with_all = ["runs", "profile"])]
    beside: Vec<String>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// The model to measure.
#[derive(clap::Args)]
pub(super) struct Model {
    /// Measure the model of this preset.
    #[arg(long, default_value = "tmaze")]
    pub preset: String,
    /// Measure this policy with the sizes that it has for the preset (as policy=NAME, see `elmur presets`).
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    /// Replace images by vectors of 64 numbers, to measure the policy without its image encoder.
    #[arg(long)]
    no_images: bool,
    /// Settings of the preset that are changed, as in `elmur train`.
    #[arg(value_name = "KEY=VALUE")]
    settings: Vec<String>,
}

impl Model {
    /// The run whose model is measured.
    pub fn preset(&self, registry: &Registry) -> Result<RunConfig> {
        self.with(self.policy.as_deref(), registry)
    }

    /// The policy that was asked for.
    pub fn policy(&self) -> Result<Option<PolicyName>> {
        self.policy.as_deref().map(PolicyName::find).transpose()
    }

    /// The name of the measured policy: the one that was asked for, else its kind.
    pub fn label(&self, config: &PolicyConfig) -> Result<String> {
        Ok(self.policy()?.map_or_else(|| config.kind().to_owned(), PolicyName::name))
    }

    /// The preset with this policy, or with its own.
    pub fn with(&self, policy: Option<&str>, registry: &Registry) -> Result<RunConfig> {
        self.of(&self.preset, policy, registry)
    }

    /// A named preset with this policy, or with its own.
    fn of(&self, name: &str, policy: Option<&str>, registry: &Registry) -> Result<RunConfig> {
        let mut preset = RunConfig::preset(name)?;
        if let Some(policy) = policy {
            preset = preset.with_policy(policy, registry)?;
        }
        if let Some(given) = self.settings.iter().find(|setting| setting.starts_with("train.precision=")) {
            return Err(Error::Config {
                key: "train.precision".to_owned(),
                expected: "--precision NAME, in which benchmarks compute".to_owned(),
                got: given.clone(),
            });
        }
        if !self.settings.is_empty() {
            preset = overrides::apply(&preset, &self.settings, registry)?;
        }
        if self.no_images {
            let ends = preset.model.architecture().ends();
            let mut spaces = ends.spaces();
            let seen = |encoder: &Encoder| match encoder {
                encoder if encoder.is_image() => Space::unbounded([64]),
                _ => Ends { observation: std::slice::from_ref(encoder), ..ends }.spaces().observation,
            };
            let mut parts: Vec<Space> = ends.observation.iter().map(seen).collect();
            spaces.observation = if parts.len() == 1 { parts.remove(0) } else { Space::Tuple { parts } };
            preset.model.fit_to(&spaces)?;
        }
        Ok(preset)
    }
}

/// Runs `elmur bench step`.
pub fn step(args: &StepArgs, context: &Context) -> Result<()> {
    let config = args.model.preset(&context.registry)?.model;
    let params = init::parameters(config.architecture(), 0)?;
    let is_gpu = args.device.name() != "cpu";
    let usual = if is_gpu { vec![1, 100, 1024] } else { vec![1, 100] };
    for batch in args.batch.map_or(usual, |b| vec![b]) {
        let device = args.device.open(args.threads.unwrap_or(usize::from(batch == 1)))?;
        let steps = Steps::measure(&config, &params, batch, &device, args.segments, args.weights)?;
        let mut row = json!({
            "peer": "elmur", "device": args.device.name(), "work": format!("step B={batch}"), "ms": round(steps.inside.ms(0.5)),
            "p99_ms": round(steps.inside.ms(0.99)), "boundary_ms": round(steps.boundary.ms(0.5)),
            "boundary_p99_ms": round(steps.boundary.ms(0.99)), "mean_ms": round(steps.mean),
            "weights": args.weights, "preset": args.model.preset, "policy": args.model.label(&config)?,
        });
        match &device {
            Device::Cpu(pool, _) => row["threads"] = json!(pool.threads()),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => row["precision"] = json!(args.device.precision()?.name()),
        }
        if let Some(Deferred { all, boundary, write }) = &steps.deferred {
            row["deferred_ms"] = json!(round(all.ms(0.5)));
            row["deferred_p99_ms"] = json!(round(all.ms(0.99)));
            row["deferred_boundary_ms"] = json!(round(boundary.ms(0.5)));
            row["write_ms"] = json!(round(write.ms(0.5)));
        }
        if let Some(state) = steps.state {
            row["state"] = state.into();
        }
        print(args.json, &row);
    }
    Ok(())
}

/// Times of environment steps.
pub(super) struct Steps {
    /// Steps inside of a segment; of planning policies those without a plan, if there are such steps.
    inside: Times,
    /// Steps that end a segment, or make a plan.
    boundary: Times,
    /// Mean over all steps, in milliseconds.
    pub mean: f64,
    /// The same steps with writes deferred, for policies that write at the end of a segment.
    deferred: Option<Deferred>,
    /// What was measured, where that is not obvious.
    state: Option<&'static str>,
}

/// Times of steps that leave writing the memory to the time between steps.
struct Deferred {
    /// From observations to actions, in all steps.
    all: Times,
    /// From observations to actions, in steps that end a segment.
    boundary: Times,
    /// Writing the memory, after the actions of a segment's last step.
    write: Times,
}

impl Deferred {
    /// Acts in `segments` segments of `steps` steps.
    fn measure(session: &mut Session, seen: Seen<'_>, segments: usize, steps: usize) -> Result<Self> {
        let (mut all, mut boundary, mut write) = (Vec::new(), Vec::new(), Vec::new());
        session.defer_writes(true)?;
        for _ in 0..segments {
            for position in 0..steps {
                let start = Instant::now();
                session.act(seen)?;
                all.push(start.elapsed());
                if position == steps - 1 {
                    boundary.push(start.elapsed());
                    let start = Instant::now();
                    session.settle()?;
                    write.push(start.elapsed());
                }
            }
        }
        for times in [&mut all, &mut boundary, &mut write] {
            times.sort();
        }
        Ok(Self { all: Times(all), boundary: Times(boundary), write: Times(write) })
    }
}

/// Longest time that steps of policies with costly steps are measured.
const PATIENCE: Duration = Duration::from_secs(20);

impl Steps {
    /// Median of the steps that are neither boundaries nor plans, in milliseconds.
    pub fn median(&self) -> f64 {
        self.inside.ms(0.5)
    }

    /// Acts in `batch` rows and measures `segments` segments, after two that are not measured.
    pub fn measure(
        config: &PolicyConfig,
        params: &Store,
        batch: usize,
        device: &Device,
        segments: usize,
        weights: Weights,
    ) -> Result<Self> {
        let architecture = config.architecture();
        let params = params.to(device)?;
        let mut session = Session::with_weights(config, &params, batch, device, weights)?;
        let observation = observations(architecture, batch);
        let returns = vec![1.0; batch];
        let seen = Seen { observation: observation.values(), returns: Some(&returns) };
        let window = architecture.window();
        let planner = architecture.planner(&params, device, batch)?;
        // Steps that fill what is looked back on; steps of a cycle; the costly one of them, if one is.
        let (fill, cycle, costly) = match &planner {
            Some(planner) => {
                let plays = planner.plays();
                (planner.looks_back().next_multiple_of(plays), plays, usize::from(plays == 1))
            }
            None if window.slides => (window.steps, 1, 1),
            None => (2 * window.steps, window.steps, window.steps - 1),
        };
        let state = match planner {
            Some(_) => Some("boundary steps make plans"),
            None => window.slides.then_some("full window"),
        };
        for _ in 0..fill {
            session.act(seen)?;
        }
        let (mut inside, mut boundary, begin) = (Vec::new(), Vec::new(), Instant::now());
        for _ in 0..segments {
            for position in 0..cycle {
                let start = Instant::now();
                session.act(seen)?;
                let times = if position == costly { &mut boundary } else { &mut inside };
                times.push(start.elapsed());
            }
            if state.is_some() && begin.elapsed() > PATIENCE {
                break;
            }
        }
        let whole: f64 = inside.iter().chain(&boundary).map(|t| t.as_secs_f64() * 1e3).sum();
        let mean = whole / (inside.len() + boundary.len()) as f64;
        inside.sort();
        boundary.sort();
        let deferred = match state {
            None => Some(Deferred::measure(&mut session, seen, segments, window.steps)?),
            Some(_) => None,
        };
        Ok(Self { inside: Times(inside), boundary: Times(boundary), mean, deferred, state })
    }
}

/// Observations of `rows` rows that fit an architecture.
pub(super) fn observations(architecture: &dyn Architecture, rows: usize) -> Row {
    let mut all = Row::default();
    for encoder in architecture.ends().observation {
        let count = rows * encoder.len();
        match encoder.kind() {
            elmur_base::Kind::Floats => all.floats.extend((0..count).map(number)),
            elmur_base::Kind::Ints => all.ints.extend(std::iter::repeat_n(0, count)),
            elmur_base::Kind::Bytes => all.bytes.extend((0..count).map(|i| i as u8)),
        }
    }
    all
}

/// Made-up number `i`.
fn number(i: usize) -> f32 {
    (i % 13) as f32 * 0.1 - 0.6
}

/// Fills every field of a program with made-up data.
fn fill(program: &mut WindowProgram) -> Result<()> {
    for (name, field) in program.fields().to_vec() {
        let program = &mut program.program;
        match (program.input_type(&name)?.dtype, field) {
            (DType::I32, _) => program.input_mut::<i32>(&name)?.fill(0),
            (DType::I64, _) => program.input_mut::<i64>(&name)?.fill(1),
            (DType::Bool, _) => program.input_mut::<bool>(&name)?.fill(true),
            (DType::U8, _) => {
                let input = program.input_mut::<u8>(&name)?;
                input.iter_mut().enumerate().for_each(|(i, x)| *x = i as u8);
            }
            (_, Field::Target) => program.input_mut::<f32>(&name)?.fill(0.1),
            _ => {
                let input = program.input_mut::<f32>(&name)?;
                input.iter_mut().enumerate().for_each(|(i, x)| *x = number(i));
            }
        }
    }
    Ok(())
}

/// Runs `elmur bench train`.
pub fn train(args: &TrainArgs, context: &Context) -> Result<()> {
    let preset = args.model.preset(&context.registry)?;
    let begin = Instant::now();
    let device = args.device.open(args.threads)?;
    let opened = begin.elapsed();
    if !args.beside.is_empty() {
        let others = args.beside.iter().map(|name| args.model.of(name, None, &context.registry));
        let presets: Result<Vec<RunConfig>> = std::iter::once(Ok(preset)).chain(others).collect();
        return train_beside(args, &presets?, &device);
    }
    let mut first = None;
    // The peers are measured without dropout.
    for (dropout, work) in [(false, "train"), (true, "train with dropout")] {
        if args.runs > 1 {
            train_runs(args, (&preset, dropout), &device, work)?;
            continue;
        }
        let mut bench = TrainBench::new(&preset, dropout, &device)?;
        bench.batch()?;
        device.synchronize()?;
        // From nothing to the end of the first batch: what a user waits for.
        let start_up = *first.get_or_insert(begin.elapsed());
        train_row(args, &mut bench, &device, work, [opened, start_up])?;
    }
    Ok(())
}

/// A model in training on made-up data.
pub(super) struct TrainBench<'a> {
    preset: &'a RunConfig,
    programs: Vec<WindowProgram>,
}

impl<'a> TrainBench<'a> {
    pub fn new(preset: &'a RunConfig, dropout: bool, device: &Device) -> Result<Self> {
        let architecture = preset.model.architecture();
        let settings = TrainSettings { dropout, ..preset.train.program_settings(None) };
        let store = init::parameters(architecture, 0)?.to(device)?;
        let mut programs = Vec::new();
        for begin in [Begin::Fresh, Begin::Continue] {
            let built = training_graph(architecture, &settings, begin)?;
            store.declare(&built.graph)?;
            let mut program = WindowProgram::new(&built, architecture, device, &[&store])?;
            fill(&mut program)?;
            program.set_rates(2e-4, 0)?;
            programs.push(program);
        }
        Ok(Self { preset, programs })
    }

    /// One batch; on a GPU it is only queued.
    pub fn batch(&mut self) -> Result<()> {
        let unroll = self.preset.model.architecture().window().unroll;
        for run in 0..self.preset.train.segments / unroll {
            self.programs[usize::from(run > 0)].run((run * unroll) as u64)?;
        }
        Ok(())
    }
}

impl TrainBench<'_> {
    /// Times of `rounds` batches, and of the host alone to queue them, after a few that are not measured.
    pub fn times(&mut self, device: &Device, rounds: usize) -> Result<(Times, Times)> {
        let stride = stride(device);
        let (mut times, mut queueing) = (Vec::new(), Vec::new());
        for round in 0..rounds + WARM_UP.min(3) {
            let start = Instant::now();
            for _ in 0..stride {
                self.batch()?;
            }
            let queued = start.elapsed();
            device.synchronize()?;
            if round >= WARM_UP.min(3) {
                times.push(start.elapsed() / stride as u32);
                queueing.push(queued / stride as u32);
            }
        }
        times.sort();
        queueing.sort();
        Ok((Times(times), Times(queueing)))
    }
}

/// Batches between two looks at the clock: a GPU is only waited for at the end of several.
fn stride(device: &Device) -> usize {
    if device.is_cpu() { 1 } else { 20 }
}

/// Models of several presets side by side, beside the time that each takes alone. Each has as many batches as
/// it computes alone while the first computes the number asked for.
fn train_beside(args: &TrainArgs, presets: &[RunConfig], device: &Device) -> Result<()> {
    let mut alone = Vec::new();
    for preset in presets {
        let (times, _) = TrainBench::new(preset, true, device)?.times(device, args.batches)?;
        alone.push(times.ms(0.5));
    }
    let share = |ms: &f64| ((args.batches * stride(device)) as f64 * alone[0] / ms).ceil() as usize;
    let counts: Vec<usize> = alone.iter().map(share).collect();
    let runs: Vec<_> = presets.iter().zip(counts.iter().copied()).collect();
    let ms = side_by_side(&runs, true, device)?.as_secs_f64() * 1e3;
    let names: Vec<&str> =
        std::iter::once(&args.model.preset).chain(&args.beside).map(String::as_str).collect();
    let one_by_one: f64 = counts.iter().zip(&alone).map(|(count, ms)| *count as f64 * ms).sum();
    print(
        args.json,
        &json!({
            "peer": "elmur", "device": args.device.name(), "precision": args.device.precision()?.name(),
            "work": "train with dropout, side by side", "presets": names, "batches": counts,
            "alone_ms": alone.iter().map(|ms| round(*ms)).collect::<Vec<_>>(), "one_by_one_ms": round(one_by_one),
            "ms": round(ms), "speedup": round(one_by_one / ms),
        }),
    );
    Ok(())
}

/// Trains several models, each on a thread and a queue of its own, for so many batches each. Returns the time
/// until all have ended.
fn side_by_side(runs: &[(&RunConfig, usize)], dropout: bool, device: &Device) -> Result<Duration> {
    let barrier = std::sync::Barrier::new(runs.len() + 1);
    let train = |preset: &RunConfig, batches: usize| -> Result<()> {
        let prepared = (|| -> Result<(Device, TrainBench<'_>)> {
            let device = device.another()?;
            let mut bench = TrainBench::new(preset, dropout, &device)?;
            bench.batch()?;
            device.synchronize()?;
            Ok((device, bench))
        })();
        barrier.wait();
        let (device, mut bench) = prepared?;
        for _ in 0..batches {
            bench.batch()?;
        }
        Ok(device.synchronize()?)
    };
    let train = &train;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            runs.iter().map(|(preset, batches)| scope.spawn(move || train(preset, *batches))).collect();
        barrier.wait();
        let start = Instant::now();
        for thread in threads {
            let ended = thread.join().map_err(|_| Error::Config {
                key: "runs".into(),
                expected: "threads that end".into(),
                got: "one that did not".into(),
            });
            ended??;
        }
        Ok(start.elapsed())
    })
}

/// Models of one preset side by side.
fn train_runs(
    args: &TrainArgs,
    (preset, dropout): (&RunConfig, bool),
    device: &Device,
    work: &str,
) -> Result<()> {
    let batches = args.batches * stride(device);
    let elapsed = side_by_side(&vec![(preset, batches); args.runs], dropout, device)?;
    let ms = elapsed.as_secs_f64() * 1e3 / batches as f64;
    print(
        args.json,
        &json!({
            "peer": "elmur", "device": args.device.name(), "precision": args.device.precision()?.name(), "work": work,
            "runs": args.runs, "ms": round(ms), "batches_per_s": round(args.runs as f64 * 1e3 / ms),
            "preset": args.model.preset, "policy": args.model.label(&preset.model)?, "batch": preset.train.batch,
        }),
    );
    Ok(())
}

fn train_row(
    args: &TrainArgs,
    bench: &mut TrainBench<'_>,
    device: &Device,
    work: &str,
    [opened, start_up]: [Duration; 2],
) -> Result<()> {
    let (times, queueing) = bench.times(device, args.batches)?;
    let programs = &mut bench.programs;
    let mut row = json!({
        "peer": "elmur", "device": args.device.name(), "work": work, "ms": round(times.ms(0.5)), "best_ms": round(times.ms(0.0)),
        "preset": args.model.preset, "policy": args.model.label(&bench.preset.model)?, "batch": bench.preset.train.batch, "arena_bytes": programs[1].program.arena_bytes(),
        "steps": programs[1].program.steps(),
    });
    match device {
        Device::Cpu(pool, precision) => {
            row["threads"] = json!(pool.threads());
            row["precision"] = json!(precision.name());
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => {
            row["precision"] = json!(args.device.precision()?.name());
            // Time of the host alone: where it is as long as `ms`, the GPU waits for work.
            row["queue_ms"] = json!(round(queueing.ms(0.5)));
            row["kernels_per_segment"] = json!(programs[1].program.kernels());
            row["open_s"] = json!(round(opened.as_secs_f64()));
            row["first_batch_s"] = json!(round(start_up.as_secs_f64()));
        }
    }
    #[cfg(not(feature = "cuda"))]
    let _ = (opened, start_up, queueing);
    print(args.json, &row);
    if args.profile {
        let mut by_op: std::collections::BTreeMap<(&str, String), (usize, f64, usize, f64)> =
            Default::default();
        let (mut critical_steps, mut critical_ms) = (0, 0.0);
        // Ops are repeated many times as it is.
        for step in programs[1].program.profile(args.batches.min(3))? {
            let shape = step.outputs.first().map(ToString::to_string).unwrap_or_default();
            let entry = by_op.entry((step.op, shape)).or_default();
            let ms = step.time.as_secs_f64() * 1e3;
            entry.0 += 1;
            entry.1 += ms;
            if step.critical {
                entry.2 += 1;
                entry.3 += ms;
                critical_steps += 1;
                critical_ms += ms;
            }
        }
        print(
            args.json,
            &json!({"longest_way_steps": critical_steps, "longest_way_ms_per_segment": round(critical_ms)}),
        );
        let mut rows: Vec<_> = by_op.into_iter().collect();
        rows.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
        for ((op, output), (count, ms, critical, critical_ms)) in rows {
            print(
                args.json,
                &json!({
                    "op": op, "output": output, "count": count, "ms_per_segment": round(ms),
                    "on_longest_way": critical, "longest_way_ms": round(critical_ms),
                }),
            );
        }
    }
    Ok(())
}
