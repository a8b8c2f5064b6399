//! `elmur bench envs`: steps per second of POPGym's environments.
//!
//! Random actions drawn beforehand, resets included, rows stepped as one. A line {"env", "steps_per_s"} per
//! environment, as the peer prints them for the Python package; the best of several short windows, because
//! other work on the machine only ever slows it down.

use std::time::{Duration, Instant};

use elmur_base::{Row, Space};
use elmur_engine::Pool;
use elmur_envs::AnyVecEnv;
use elmur_envs::popgym::{Difficulty, Task, Version};
use elmur_rng::Rng;
use elmur_train::{Error, Result};
use serde_json::json;

use super::{print, round};

/// Options of `elmur bench envs`.
#[derive(clap::Args)]
pub struct Args {
    /// Measure only environments whose id contains this text.
    filter: Option<String>,
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    /// Measure all three difficulties instead of Easy alone.
    #[arg(long)]
    all: bool,
    /// Use this many threads; with more than one, one thread is measured in turn and the ratio printed.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Step this many environments together; default: 1024, or 32768 with several threads.
    #[arg(long)]
    rows: Option<usize>,
    /// Measure this many windows of a tenth of a second.
    #[arg(long, default_value_t = 12)]
    windows: usize,
}

/// Steps whose actions are drawn beforehand.
const STEPS: usize = 64;

/// Runs `elmur bench envs`.
pub fn run(args: &Args) -> Result<()> {
    let filter = args.filter.as_deref().unwrap_or_default();
    let chosen = |task: &Task| {
        (args.all || task.difficulty == Difficulty::Easy || !filter.is_empty()) && task.id().contains(filter)
    };
    let tasks: Vec<Task> = Task::all().filter(chosen).collect();
    let config = |key: &str, expected: &str, got: String| {
        Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), got })
    };
    if tasks.is_empty() {
        return config("filter", "a part of an id such as popgym-RepeatFirstEasy-v0", filter.to_owned());
    }
    // Few enough to stay in a core's cache, and enough to be worth a second one.
    let rows = args.rows.unwrap_or(if args.threads == 1 { 1024 } else { 32_768 });
    if rows == 0 || rows > 1 << 20 {
        return config("rows", "1 to 1048576", rows.to_string());
    }
    if args.threads == 0 || args.threads > 1024 {
        return config("threads", "1 to 1024", args.threads.to_string());
    }
    let pools = [Pool::new(1), Pool::new(args.threads)];
    let pools = if args.threads == 1 { &pools[..1] } else { &pools[..] };
    for task in tasks {
        let rates = rates(task, rows, args.windows, pools)?;
        let one = rates[0];
        let row = match rates.get(1) {
            None => json!({"env": task.id(), "steps_per_s": one.round() as u64}),
            Some(many) => json!({
                "env": task.id(), "steps_per_s": many.round() as u64, "threads": args.threads,
                "one_thread": one.round() as u64, "ratio": round(many / one),
            }),
        };
        print(args.json, &row);
    }
    Ok(())
}

/// Steps per second with each pool.
fn rates(task: Task, rows: usize, windows: usize, pools: &[Pool]) -> Result<Vec<f64>> {
    let mut envs = Vec::new();
    for pool in pools {
        let mut env = task.make_rows(Version::default(), rows, pool)?;
        env.reset(&(0..rows as u64).collect::<Vec<_>>())?;
        envs.push(env);
    }
    let actions: Vec<Row> =
        (0..STEPS).map(|step| random_actions(&envs[0].spaces().action, rows, step as u64)).collect();
    let mut best = vec![0.0f64; envs.len()];
    // The first round warms up; rounds take turns, so that a noisy machine disturbs all alike.
    for window in 0..=windows.max(1) {
        for (env, best) in envs.iter_mut().zip(&mut best) {
            let rate = measure(&mut **env, &actions, Duration::from_millis(100))?;
            if window > 0 {
                *best = best.max(rate);
            }
        }
    }
    Ok(best)
}

fn measure(env: &mut dyn AnyVecEnv, actions: &[Row], time: Duration) -> Result<f64> {
    let (start, mut steps) = (Instant::now(), 0);
    loop {
        for actions in actions {
            env.step(actions.values())?;
            steps += env.rows();
        }
        let seconds = start.elapsed();
        if seconds >= time {
            return Ok(steps as f64 / seconds.as_secs_f64());
        }
    }
}

/// An action for every row, each equally likely.
fn random_actions(space: &Space, rows: usize, seed: u64) -> Row {
    let (mut rng, mut actions) = (Rng::new(seed, 0), Row::default());
    (0..rows).for_each(|_| space.sample(&mut rng, &mut actions));
    actions
}
