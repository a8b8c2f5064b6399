//! `elmur verify`: golden traces of the published code and of POPGym's Python package, replayed.

use std::path::{Path, PathBuf};

use elmur_engine::{DType, Precision};
use elmur_envs::popgym::trace::Trace;
use elmur_model::golden;
use elmur_train::{Error, Result};
use serde_json::json;

use crate::device::DeviceArgs;
use crate::say;

/// Options of `elmur verify`.
#[derive(clap::Args)]
pub struct Args {
    /// Traces of the model (`.safetensors`, each with its `.json` beside it) and of POPGym tasks (`.json`,
    /// `.json.gz`).
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Tolerances: everything in f64; logits, memory, loss, gradients and sessions in f32; anchors exactly.
const TOLERANCES: [(DType, f64); 2] = [(DType::F64, 1e-9), (DType::F32, 2e-4)];

/// On a GPU, by precision.
fn gpu_tolerance(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 2e-4,
        Precision::Tf32 => 5e-3,
        Precision::Bf16 => 5e-2,
    }
}

/// Replays every file; true if all are within tolerance.
pub fn run(args: &Args) -> Result<bool> {
    let (mut tasks, mut models): (Vec<PathBuf>, Vec<PathBuf>) = Default::default();
    for file in &args.files {
        let beside = file.with_extension("safetensors");
        if file.extension().is_some_and(|e| e == "json") && beside.exists() {
            // A part of a model's trace; the pair is one, whichever of the two is given.
            if !args.files.contains(&beside) {
                models.push(beside);
            }
        } else if file.extension().is_some_and(|e| e == "json" || e == "gz") {
            tasks.push(file.clone());
        } else {
            check_model(file)?;
            models.push(file.clone());
        }
    }
    Ok(verify_models(&models, args)? & verify_tasks(&tasks, args.json)?)
}

/// Refuses what cannot be a trace of a model.
fn check_model(file: &Path) -> Result<()> {
    let problem = if !file.exists() {
        "no such file"
    } else if file.extension().is_none_or(|e| e != "safetensors") {
        "not a trace; expected NAME.safetensors with NAME.json beside it (a model's), or NAME.json or NAME.json.gz \
         (a POPGym task's)"
    } else if !file.with_extension("json").is_file() {
        "not a trace: NAME.safetensors and NAME.json belong together, and the .json is missing"
    } else {
        return Ok(());
    };
    Err(Error::file(file, problem))
}

fn name(file: &Path) -> String {
    let name = file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    name.split('.').next().unwrap_or_default().to_owned()
}

/// POPGym: observations and flags exactly, rewards to 1e-9, states of control tasks in every bit.
fn verify_tasks(files: &[PathBuf], as_json: bool) -> Result<bool> {
    let mut fine = true;
    for (index, file) in files.iter().enumerate() {
        let trace = Trace::read(file)?;
        let report = trace.verify()?;
        fine &= report.exact();
        let rules = trace.version().name();
        if index == 0 && !as_json {
            say(
                "wrong                                            rules episodes  steps  observations  flags  states   rewards by",
            );
        }
        if as_json {
            let row = json!({
                "file": file.display().to_string(), "env": trace.env, "rules": rules, "ok": report.exact(),
                "episodes": report.episodes, "steps": report.steps, "wrong_observations": report.wrong_observations,
                "wrong_flags": report.wrong_flags, "wrong_states": report.wrong_states, "reward_error": report.reward_error,
            });
            say(&row.to_string());
            continue;
        }
        let verdict = if report.exact() { "ok" } else { "DIFFERS" };
        say(&format!(
            "{:<40} {verdict:>7} {rules} {:>8} {:>6} {:>13} {:>6} {:>7} {:>12.1e}",
            name(file),
            report.episodes,
            report.steps,
            report.wrong_observations,
            report.wrong_flags,
            report.wrong_states,
            report.reward_error
        ));
    }
    Ok(fine)
}

/// Every file in f64 and f32.
fn verify_models(files: &[PathBuf], args: &Args) -> Result<bool> {
    if files.is_empty() {
        return Ok(true);
    }
    let as_json = args.json;
    let device = args.device.open(1)?.exact();
    let on_gpu = [(DType::F32, gpu_tolerance(args.device.precision()?))];
    let tolerances = if device.is_cpu() { &TOLERANCES[..] } else { &on_gpu[..] };
    let mut fine = true;
    if !as_json {
        say(
            "largest relative errors                    logits   memory  anchors     loss    grads trajectory  trained   acting",
        );
    }
    for file in files {
        for &(dtype, tolerance) in tolerances {
            let report = golden::verify(file, dtype, &device)?;
            let within = report.within(tolerance, dtype);
            fine &= within;
            if as_json {
                let row = json!({
                    "file": file.display().to_string(), "dtype": dtype.to_string(), "device": args.device.name(),
                    "tolerance": tolerance, "ok": within,
                    "logits": report.logits, "memory": report.memory, "wrong_anchors": report.wrong_anchors,
                    "loss": report.loss, "gradients": report.gradients.0, "worst_gradient": report.gradients.1,
                    "trajectory": report.trajectory, "trained": report.trained.0, "worst_trained": report.trained.1,
                    "acting": report.acting,
                });
                say(&row.to_string());
                continue;
            }
            let name = name(file);
            let how =
                if device.is_cpu() { dtype.to_string() } else { args.device.precision()?.name().to_owned() };
            let verdict = if within { "ok".to_owned() } else { format!("ABOVE {tolerance:e}") };
            let [a, b, c, d] = [report.logits, report.memory, report.loss, report.gradients.0];
            let (anchors, e, f) = (report.wrong_anchors, report.trajectory, report.trained.0);
            // Sessions compute in f32; ELMUR's traces have no steps.
            let acting = report.acting.map_or("       -".to_owned(), |error| format!("{error:8.1e}"));
            say(&format!(
                "{name:<20} {how:<4} {verdict:>15}  {a:8.1e} {b:8.1e} {anchors:>8} {c:8.1e} {d:8.1e}   {e:8.1e} {f:8.1e} {acting}"
            ));
        }
    }
    Ok(fine)
}
