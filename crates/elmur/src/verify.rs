//! `elmur verify`: golden traces of the published code, replayed.

use std::path::PathBuf;

use elmur_engine::{DType, Precision};
use elmur_model::Result;
use elmur_model::golden;
use serde_json::json;

use crate::device::DeviceArgs;
use crate::say;

/// Options of `elmur verify`.
#[derive(clap::Args)]
pub struct Args {
    /// Golden files (`.safetensors`, each with its `.json` beside it).
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Print JSON lines.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    device: DeviceArgs,
}

/// Tolerances: everything in f64; logits, memory, loss and gradients in f32; anchors exactly.
const TOLERANCES: [(DType, f64); 2] = [(DType::F64, 1e-9), (DType::F32, 2e-4)];

/// On a GPU, by precision.
fn gpu_tolerance(precision: Precision) -> f64 {
    match precision {
        Precision::F32 => 2e-4,
        Precision::Tf32 => 5e-3,
        Precision::Bf16 => 5e-2,
    }
}

/// Replays every file in f64 and f32 (on a GPU in f32 alone); true if all are within tolerance.
pub fn run(args: &Args) -> Result<bool> {
    let device = args.device.open(1)?;
    let on_gpu = [(DType::F32, gpu_tolerance(args.device.precision()?))];
    let tolerances = if device.is_cpu() { &TOLERANCES[..] } else { &on_gpu[..] };
    let mut fine = true;
    if !args.json {
        say(
            "largest relative errors                    logits   memory  anchors     loss    grads trajectory  trained",
        );
    }
    for file in &args.files {
        for &(dtype, tolerance) in tolerances {
            let report = golden::verify(file, dtype, &device)?;
            let within = report.within(tolerance, dtype);
            fine &= within;
            if args.json {
                let row = json!({
                    "file": file.display().to_string(), "dtype": dtype.to_string(), "tolerance": tolerance, "ok": within,
                    "logits": report.logits, "memory": report.memory, "wrong_anchors": report.wrong_anchors,
                    "loss": report.loss, "gradients": report.gradients.0, "worst_gradient": report.gradients.1,
                    "trajectory": report.trajectory, "trained": report.trained.0, "worst_trained": report.trained.1,
                });
                say(&row.to_string());
                continue;
            }
            let name = file.file_stem().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            let verdict = if within { "ok".to_owned() } else { format!("ABOVE {tolerance:e}") };
            let [a, b, c, d] = [report.logits, report.memory, report.loss, report.gradients.0];
            let (anchors, e, f) = (report.wrong_anchors, report.trajectory, report.trained.0);
            say(&format!(
                "{name:<20} {dtype} {verdict:>16}  {a:8.1e} {b:8.1e} {anchors:>8} {c:8.1e} {d:8.1e}   {e:8.1e} {f:8.1e}"
            ));
        }
    }
    Ok(fine)
}
