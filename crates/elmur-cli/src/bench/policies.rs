//! `elmur bench policies`: all policies of a benchmark side by side: parameters, time of a training batch, time
//! of an environment step.
//!
//! Batches have each policy's own number of crops (`batch`); a step is one row on one thread.

use elmur_model::session::Weights;
use elmur_model::{Checkpoint, init};
use elmur_train::{PolicyName, Result};
use serde_json::json;

use super::policy::{Model, Steps, TrainBench};
use super::{print, round};
use crate::Context;
use crate::device::DeviceArgs;

/// Options of `elmur bench policies`.
#[derive(clap::Args)]
pub struct Args {
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: Model,
    /// Use this many threads for training; 0: as many as are granted.
    #[arg(long, default_value_t = 0, value_parser = crate::threads())]
    threads: usize,
    /// Measure this many batches of each policy.
    #[arg(long, default_value_t = 5, value_parser = crate::count(1 << 20))]
    batches: usize,
    /// Measure this many segments, steps of a sliding window, or plans of each policy.
    #[arg(long, default_value_t = 20, value_parser = crate::count(1 << 20))]
    segments: usize,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Runs `elmur bench policies`.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let device = args.device.open(args.threads)?;
    let named = args.model.policy()?;
    for name in PolicyName::all().filter(|name| named.map_or(!name.compat, |named| named == *name)) {
        let run = match args.model.with(Some(&name.name()), &context.registry).and_then(|run| {
            run.validate()?;
            Ok(run)
        }) {
            Ok(run) => run,
            // A policy for another kind of actions.
            Err(error) => {
                crate::note(&format!("{}: {error}", name.name()));
                continue;
            }
        };
        let params = init::parameters(run.model.architecture(), 0)?;
        // One thread acts; on a GPU the GPU does.
        let acting = if device.is_cpu() { args.device.open(1)? } else { device.clone() };
        let steps = Steps::measure(&run.model, &params, 1, &acting, args.segments, Weights::F32)?;
        let mut bench = TrainBench::new(&run, true, &device)?;
        let (batches, _) = bench.times(&device, args.batches)?;
        print(
            args.json,
            &json!({
                "policy": name.name(), "preset": args.model.preset, "parameters": Checkpoint::trained_parameter_count(&run.model)?,
                "batch": run.train.batch, "train_ms": round(batches.ms(0.5)), "step_ms": round(steps.mean),
                "device": args.device.name(),
            }),
        );
    }
    Ok(())
}
