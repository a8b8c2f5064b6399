//! `elmur bench envs`: steps per second of POPGym's environments, and of their players in them; with `--env` of
//! any other.
//!
//! Random actions drawn beforehand, resets included, rows stepped as one. A line {"env", "steps_per_s"} per
//! environment, as the peer prints them for the Python package; the best of several short windows, because
//! other work on the machine only ever slows it down.
//!
//! With `--players`: one environment and its player on one thread, and the same with a fifth of the actions
//! drawn at random, which the player goes on from.

use std::time::{Duration, Instant};

use elmur_base::{Row, Space};
use elmur_engine::Pool;
use elmur_envs::popgym::{Difficulty, Task, Version};
use elmur_envs::{AnyVecEnv, Env, EnvSpec, Player, Purpose};
use elmur_rng::Rng;
use elmur_train::{Error, Result};
use serde_json::json;

use super::{print, round};
use crate::Context;

/// Options of `elmur bench envs`.
#[derive(clap::Args)]
pub struct Args {
    /// Measure only environments whose id contains this text.
    filter: Option<String>,
    /// Measure the environment of this name, such as python:CartPole-v1, instead of POPGym's.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["filter", "all", "players"])]
    env: Option<String>,
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    /// Measure all three difficulties instead of Easy alone.
    #[arg(long)]
    all: bool,
    /// Measure players in their environments, with no and with a fifth of their actions replaced at random.
    #[arg(long, conflicts_with_all = ["threads", "rows"])]
    players: bool,
    /// Use this many threads; with more than one, one thread is measured in turn and the ratio printed.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Step this many environments together; default: 1024, or 32768 with several threads; where rows are
    /// processes: one per thread that is granted.
    #[arg(long)]
    rows: Option<usize>,
    /// Measure this many windows of a tenth of a second.
    #[arg(long, default_value_t = 12)]
    windows: usize,
}

/// Steps whose actions are drawn beforehand.
const STEPS: usize = 64;

/// Runs `elmur bench envs`.
pub fn run(args: &Args, context: &Context) -> Result<()> {
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
    let named = args.env.as_ref().map(|name| context.registry.find(&EnvSpec::new(name))).transpose()?;
    let few = named.as_ref().and_then(|env| env.facts().max_rows);
    let rows = args.rows.or(few).unwrap_or(if args.threads == 1 { 1024 } else { 32_768 });
    if rows == 0 || rows > 1 << 20 {
        return config("rows", "1 to 1048576", rows.to_string());
    }
    if args.threads == 0 || args.threads > 1024 {
        return config("threads", "1 to 1024", args.threads.to_string());
    }
    let pools = [Pool::new(1), Pool::new(args.threads)];
    let pools = if args.threads == 1 { &pools[..1] } else { &pools[..] };
    if args.players {
        return tasks.into_iter().try_for_each(|task| {
            let [own, replaced] = player_rates(task, args.windows)?;
            let (own, replaced) = (own.round() as u64, replaced.round() as u64);
            let row = json!({"env": task.id(), "player_steps_per_s": own, "fifth_replaced": replaced});
            print(args.json, &row);
            Ok(())
        });
    }
    let tell = |name: &str, make: &dyn Fn(&Pool) -> Result<Box<dyn AnyVecEnv>>| -> Result<()> {
        let rates = rates(make, rows, args.windows, pools)?;
        let one = rates[0];
        let mut row = match rates.get(1) {
            None => json!({"env": name, "steps_per_s": one.round() as u64}),
            Some(many) => json!({
                "env": name, "steps_per_s": many.round() as u64, "threads": args.threads,
                "one_thread": one.round() as u64, "ratio": round(many / one),
            }),
        };
        if few.is_some() {
            row["rows"] = rows.into();
        }
        print(args.json, &row);
        Ok(())
    };
    match named {
        Some(env) => tell(env.name(), &|pool| Ok(env.make_rows(Purpose::Evaluate, rows, pool)?)),
        None => tasks.into_iter().try_for_each(|task| {
            tell(task.id(), &|pool| Ok(task.make_rows(Version::default(), rows, pool)?))
        }),
    }
}

/// Steps per second with each pool.
fn rates(
    make: &dyn Fn(&Pool) -> Result<Box<dyn AnyVecEnv>>,
    rows: usize,
    windows: usize,
    pools: &[Pool],
) -> Result<Vec<f64>> {
    let mut envs = Vec::new();
    for pool in pools {
        let mut env = make(pool)?;
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

/// Share of a player's actions that are replaced.
const REPLACED: f64 = 0.2;

/// Steps per second of a player in its environment, without and with actions replaced.
fn player_rates(task: Task, windows: usize) -> Result<[f64; 2]> {
    let (mut env, mut player) = (task.make(Version::default()), task.player(Version::default()));
    let mut best = [0.0f64; 2];
    for window in 0..=windows.max(1) {
        for (share, best) in [0.0, REPLACED].into_iter().zip(&mut best) {
            let rate = play(&mut *env, &mut *player, share, Duration::from_millis(100))?;
            if window > 0 {
                *best = best.max(rate);
            }
        }
    }
    Ok(best)
}

/// Plays whole episodes, always the same ones, for at least this time. Returns the steps per second.
fn play(env: &mut dyn Env, player: &mut dyn Player, share: f64, time: Duration) -> Result<f64> {
    let spaces = env.spaces().clone();
    let (mut seen, mut action) = (Row::of(&spaces.observation), Row::of(&spaces.action));
    let (start, mut steps, mut rng) = (Instant::now(), 0u64, Rng::new(0, 0));
    for seed in 0.. {
        env.reset(seed, seen.as_mut())?;
        player.reset();
        loop {
            player.act(seen.values(), action.as_mut());
            if rng.uniform(0.0, 1.0) < share {
                action.clear();
                spaces.action.sample(&mut rng, &mut action);
                player.took(action.values());
            }
            steps += 1;
            if env.step(action.values(), seen.as_mut())?.done() {
                break;
            }
        }
        if start.elapsed() >= time {
            break;
        }
    }
    Ok(steps as f64 / start.elapsed().as_secs_f64())
}

/// An action for every row, each equally likely.
fn random_actions(space: &Space, rows: usize, seed: u64) -> Row {
    let (mut rng, mut actions) = (Rng::new(seed, 0), Row::default());
    (0..rows).for_each(|_| space.sample(&mut rng, &mut actions));
    actions
}
