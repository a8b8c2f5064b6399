//! `elmur bench read`: how fast recordings are read, decoded and checked, one episode after the other.

use std::path::PathBuf;
use std::time::Instant;

use elmur_base::files::size_of;
use elmur_data::{Column, EpisodeReader, Limits};
use elmur_train::Result;
use serde_json::json;

use super::{print, round};
use crate::convert::What;

/// Options of `elmur bench read`.
#[derive(clap::Args)]
pub struct Args {
    /// Datasets to read.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    #[command(flatten)]
    what: What,
    /// Read everything this many times and show the fastest.
    #[arg(long, default_value_t = 3, value_parser = crate::count(1000))]
    rounds: usize,
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
}

/// Runs `elmur bench read`.
pub fn run(args: &Args) -> Result<()> {
    for path in &args.paths {
        let limits = Limits { inflated: 4 << 30, ..Limits::default() };
        let (mut best, mut numbers, mut steps, mut episodes) = (f64::INFINITY, 0, 0, 0);
        for _ in 0..args.rounds {
            let start = Instant::now();
            let reader = EpisodeReader::open(path, None, &args.what.selection(), &limits)?;
            (numbers, steps, episodes) = (0, 0, reader.len());
            for i in 0..reader.len() {
                let episode = reader.episode(i)?;
                steps += episode.steps();
                let bytes = |column: &Column| column.len() * column.view().element_type().size();
                numbers += episode.observations.iter().chain(&episode.actions).map(bytes).sum::<usize>();
                numbers += 4 * episode.steps();
            }
            best = best.min(start.elapsed().as_secs_f64());
        }
        let rate = |bytes: u64| round(bytes as f64 / 1e6 / best);
        print(
            args.json,
            &json!({
                "work": "reading", "dataset": path.display().to_string(), "episodes": episodes, "steps": steps,
                "file_mb": round(size_of(path) as f64 / 1e6), "numbers_mb": round(numbers as f64 / 1e6),
                "ms": round(best * 1e3), "file_mb_per_s": rate(size_of(path)),
                "numbers_mb_per_s": rate(numbers as u64), "steps_per_s": round(steps as f64 / best),
            }),
        );
    }
    Ok(())
}
