//! `elmur bench bank`: a bank of many rows of which few act, are reset, saved or restored at a time.
//!
//! Every row of the output is the median time of one call for some of the rows; `per_row` divides it by their
//! number. Costs should follow the rows listed, not the rows of the bank.

use std::time::{Duration, Instant};

use elmur_base::Row;
use elmur_engine::Pool;
use elmur_model::init;
use elmur_model::session::{Choose, Seen, Session};
use elmur_train::Result;
use serde_json::json;

use super::policy::{Model, observations};
use super::{Times, print, round};
use crate::Context;

/// Options of `elmur bench bank`.
#[derive(clap::Args)]
pub struct Args {
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    model: Model,
    /// Keep this many rows in the session.
    #[arg(long, default_value_t = 1000, value_parser = crate::count(1 << 20))]
    rows: usize,
    /// Measure calls for these numbers of rows, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,16,64")]
    some: Vec<usize>,
    /// Use this many threads; 0: as many as are granted.
    #[arg(long, default_value_t = 1, value_parser = crate::threads())]
    threads: usize,
    /// Measure this many calls of each kind.
    #[arg(long, default_value_t = 50, value_parser = crate::count(1 << 20))]
    calls: usize,
}

/// Runs `elmur bench bank`.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let policy = args.model.preset(&context.registry)?.model;
    let label = args.model.label(&policy)?;
    let params = init::parameters(policy.architecture(), 0)?;
    let mut session = Session::new(&policy, &params, args.rows, &Pool::new(args.threads))?;
    for &count in args.some.iter().filter(|count| (1..=args.rows).contains(count)) {
        // Rows spread over the bank, in no order.
        let step = (args.rows / count).max(1);
        let rows: Vec<usize> = (0..count).map(|i| i * step).rev().collect();
        let seeds: Vec<(usize, u64)> = rows.iter().map(|row| (*row, *row as u64)).collect();
        let ends = policy.architecture().ends();
        let observation = observations(policy.architecture(), count);
        let returns = vec![1.0; count];
        let seen = Seen { observation: observation.values(), returns: Some(&returns) };
        let mut actions = Row::default();
        let room = count * ends.action.dim();
        if ends.action.is_discrete() {
            actions.ints.resize(room, 0)
        } else {
            actions.floats.resize(room, 0.0)
        }
        session.reset(&seeds)?;
        session.select_action(&rows, seen, Choose::Greedy, actions.as_mut())?;
        let kept = session.snapshot(&rows)?;
        let mut row = |work: &str,
                       call: &mut dyn FnMut(&mut Session) -> elmur_model::Result<()>|
         -> Result<()> {
            let mut times: Vec<Duration> = Vec::new();
            for _ in 0..args.calls.max(1) {
                let start = Instant::now();
                call(&mut session)?;
                times.push(start.elapsed());
            }
            times.sort();
            let ms = Times(times).ms(0.5);
            print(
                args.json,
                &json!({
                    "peer": "elmur", "device": "cpu", "work": format!("{work} {count} of {} rows", args.rows),
                    "ms": round(ms), "per_row_ms": round(ms / count as f64), "threads": args.threads,
                    "preset": args.model.preset, "policy": label,
                }),
            );
            Ok(())
        };
        row("reset", &mut |session| session.reset(&seeds))?;
        row("step", &mut |session| session.select_action(&rows, seen, Choose::Greedy, actions.as_mut()))?;
        row("snapshot", &mut |session| session.snapshot(&rows).map(drop))?;
        row("restore", &mut |session| session.restore(&rows, &kept))?;
    }
    Ok(())
}
