//! `elmur eval`: how well checkpoints act, on episodes that no choice has seen.

use std::path::PathBuf;
use std::sync::Mutex;

use elmur_base::{Statistics, Stop};
use elmur_envs::EnvConfig;
use elmur_model::Checkpoint;
use elmur_train::{Error, Evaluation, Outcome, Result, Seeds, evaluate};
use serde_json::json;

use crate::device::DeviceArgs;
use crate::progress::Bar;
use crate::say;
use crate::train::checkpoint_of;

/// Options of `elmur eval`.
#[derive(clap::Args)]
pub struct Args {
    /// Runs or checkpoints. Several count as runs of one experiment: mean and standard error are taken across
    /// them.
    #[arg(required = true)]
    checkpoints: Vec<PathBuf>,
    /// Environment; default: that of the run.
    #[arg(long)]
    env: Option<String>,
    /// T-Maze: episode lengths, such as 9,30,900; default: that of the run's evaluation.
    #[arg(long, value_delimiter = ',')]
    lengths: Vec<u64>,
    /// Episodes per run.
    #[arg(long, default_value_t = 100)]
    episodes: usize,
    /// Draw actions from the policy's probabilities instead of taking the likeliest.
    #[arg(long)]
    sample: bool,
    /// Threads; 0: one per core. Results do not depend on it.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object per checkpoint and length, and one per length for all.
    #[arg(long)]
    json: bool,
    /// Draw success by length: writes PATH.svg and PATH.png.
    #[arg(long, value_name = "PATH")]
    plot: Option<PathBuf>,
}

/// Runs `elmur eval`.
pub fn run(args: &Args, stop: &Stop) -> Result<()> {
    let device = args.device.open(1)?;
    let mut policies = Vec::new();
    for path in &args.checkpoints {
        if !path.exists() {
            let problem = "no such run or checkpoint; train one with `elmur train`, or see `elmur demo`";
            return Err(Error::file(path, problem));
        }
        let (path, run) = checkpoint_of(path);
        let mut checkpoint = Checkpoint::load(&path)?;
        if !device.is_cpu() {
            checkpoint.params = checkpoint.params.to(&device).map_err(elmur_model::Error::from)?;
        }
        let config = run.and_then(|run| run.config().ok());
        let env = match (&args.env, config.as_ref().and_then(|c| c.validation_env())) {
            (Some(name), Some(of_run)) => EnvConfig { name: name.parse()?, ..of_run },
            (Some(name), None) => EnvConfig { length: 30, ..EnvConfig::new(name.parse()?) },
            (None, Some(env)) => env,
            (None, None) => {
                let expected = "--env: this checkpoint does not lie in a run with an environment".to_owned();
                return Err(Error::Config { key: "env".to_owned(), expected, got: "none".to_owned() });
            }
        };
        let trained = config.and_then(|c| c.env).map(|env| env.length);
        policies.push((path, checkpoint, env, trained));
    }
    let first = policies[0].2;
    let config =
        |key: &str, expected: String, got: String| Err(Error::Config { key: key.to_owned(), expected, got });
    if let Some((path, _, env, _)) = policies.iter().find(|(_, _, env, _)| env.name != first.name) {
        let got = format!("{} of {}", env.name.name(), path.display());
        return config(
            "env",
            format!("one environment for all, here {}; evaluate others apart", first.name.name()),
            got,
        );
    }
    if !first.has_length() && (!args.lengths.is_empty() || args.plot.is_some()) {
        let got = first.name.name().to_owned();
        return config("lengths", "T-Maze for --lengths and --plot".to_owned(), got);
    }
    let lengths = if args.lengths.is_empty() { vec![first.length] } else { args.lengths.clone() };
    for length in &lengths {
        EnvConfig { length: *length, ..first }.evaluation()?;
    }
    let mut points = Vec::new();
    for length in lengths {
        let mut scores = Vec::new();
        let mut single = None;
        let mut successful = true;
        for (run, (path, checkpoint, env, trained)) in policies.iter().enumerate() {
            let what = Evaluation {
                policy: &checkpoint.config,
                params: &checkpoint.params,
                env: EnvConfig { length, ..*env },
                episodes: args.episodes,
                seeds: Seeds::Test(run as u32),
                sample: args.sample,
                threads: args.threads,
                device: &device,
            };
            let outcome = with_bar(&label(&what.env), &what, stop)?;
            let (score, returns) = (outcome.score(), outcome.returns());
            successful = outcome.episodes[0].success.is_some();
            if args.json {
                let row = json!({
                    "checkpoint": path.display().to_string(), "env": env.name.name(), "train_length": trained,
                    "length": length, "episodes": score.count, "score": score.mean, "sem": score.sem, "return": returns.mean,
                });
                say(&row.to_string());
            }
            scores.push(score.mean);
            single = Some(score);
        }
        let score = match single {
            // Of a single run the spread between episodes is all there is.
            Some(score) if scores.len() == 1 => score,
            _ => Statistics::of(scores.iter().copied()),
        };
        let over = if scores.len() > 1 { "runs" } else { "episodes" };
        if args.json {
            let row = json!({
                "env": policies[0].2.name.name(), "length": length, "runs": scores.len(), "episodes": args.episodes,
                "score": score.mean, "sem": score.sem, "sem_over": over, "good_return": first.best_return(),
            });
            say(&row.to_string());
        } else {
            say(&format!(
                "{}: {:.3} ± {:.3} ({} run{} x {} episodes, ± over {over}{})",
                label(&EnvConfig { length, ..first }),
                score.mean,
                score.sem,
                scores.len(),
                if scores.len() == 1 { "" } else { "s" },
                args.episodes,
                // Where the score is a return, what it could be.
                if successful { String::new() } else { format!("; good play: {:.3}", first.best_return()) }
            ));
        }
        points.push((length, score.mean, score.sem));
    }
    if let Some(path) = &args.plot {
        let curve = elmur_plot::Curve { name: "elmur".to_owned(), points };
        elmur_plot::success_by_length(path, "Success by episode length", &[curve], &[])
            .map_err(|e| plot_error(path, e))?;
    }
    Ok(())
}

/// An environment in a few words.
fn label(env: &EnvConfig) -> String {
    let name = env.name.name();
    if env.has_length() { format!("{name} T = {}", env.length) } else { name.to_owned() }
}

/// A drawing's error as one of ours.
pub fn plot_error(path: &std::path::Path, error: impl ToString) -> Error {
    Error::file(path, error)
}

/// Evaluates with a progress bar.
pub fn with_bar(label: &str, what: &Evaluation<'_>, stop: &Stop) -> Result<Outcome> {
    const PARTS: f64 = 1e4;
    let steps = what.env.max_steps() as f64 * what.episodes as f64;
    let bar = Mutex::new(Bar::new(label, 0, steps as u64));
    let outcome = evaluate(what, stop, &|part| {
        if let Ok(mut bar) = bar.lock() {
            bar.update(((part * PARTS).round() / PARTS * steps) as u64, "steps", "");
        }
    });
    if let Ok(bar) = bar.lock() {
        bar.finish();
    }
    outcome
}
