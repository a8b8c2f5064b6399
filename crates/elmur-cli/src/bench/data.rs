//! `elmur bench data`: how fast batches of a run come, read from its data or played afresh, without training on
//! them. Where a batch takes less time here than in `elmur bench train`, training does not wait for data.

use std::time::Instant;

use elmur_engine::Pool;
use elmur_train::{Result, Trainer, overrides};
use serde_json::json;

use super::{print, round};
use crate::Context;

/// Options of `elmur bench data`.
#[derive(clap::Args)]
pub struct Args {
    /// The preset of a run, or its config file.
    preset: String,
    /// Changes of settings, as for `elmur train`: data.stream=true, policy=dt, train.batch=64.
    overrides: Vec<String>,
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    /// Play on this many threads (data.stream); 0: as many as are granted.
    #[arg(long, default_value_t = 0, value_parser = crate::threads())]
    threads: usize,
    /// Measure this many batches.
    #[arg(long, default_value_t = 50, value_parser = crate::count(1 << 20))]
    batches: usize,
}

/// Runs `elmur bench data`.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let config =
        overrides::apply(&crate::inspect::run_config(&args.preset)?, &args.overrides, &context.registry)?;
    let mut prepared = config.prepare(&context.registry, false)?;
    if let Some(stream) = &mut prepared.stream {
        stream.threads = args.threads;
    }
    let mut trainer = Trainer::of(&prepared, &Pool::new(1))?;
    // Threads start and read ahead with the first.
    trainer.read_batches(1)?;
    let start = Instant::now();
    let steps = trainer.read_batches(args.batches)?;
    let seconds = start.elapsed().as_secs_f64();
    let rows = args.batches * prepared.config.train.batch * prepared.config.crop();
    print(
        args.json,
        &json!({
            "work": "batches of data", "preset": args.preset, "stream": prepared.config.data.stream,
            "batch": prepared.config.train.batch, "crop": prepared.config.crop(),
            "ms": round(seconds * 1e3 / args.batches as f64), "imitated_per_s": round(steps as f64 / seconds),
            "steps_per_s": round(rows as f64 / seconds),
            "threads": if args.threads == 0 { elmur_pool::granted_threads() } else { args.threads },
        }),
    );
    Ok(())
}
