//! `elmur plot`: pictures of what evaluations and runs have measured, each as SVG and PNG.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use elmur_base::Statistics;
use elmur_plot::{self as draw, Curve};
use elmur_train::{Error, Result, RunFolder};
use serde_json::Value;

use crate::eval::plot_error;
use crate::say;

/// What `elmur plot` draws.
#[derive(clap::Subcommand)]
pub enum Plot {
    /// Success by episode length, one curve per file of `elmur eval --json` rows; rows of several runs become
    /// mean ± SEM.
    ///
    /// Example: elmur plot success paper.jsonl no-dropout.jsonl --out docs/success
    Success(Rows),
    /// Training length by evaluation length, from `elmur eval --json` rows.
    ///
    /// Example: elmur plot heat-map rows.jsonl --out docs/generalization
    HeatMap(Rows),
    /// Accuracy and validation score of runs.
    ///
    /// Example: elmur plot run out/tmaze-0 out/tmaze-1 --out docs/learning
    Run(Rows),
}

/// Where numbers come from and where the picture goes.
#[derive(clap::Args)]
pub struct Rows {
    /// Files with rows, or runs.
    #[arg(required = true)]
    from: Vec<PathBuf>,
    /// Writes OUT.svg and OUT.png.
    #[arg(long)]
    out: PathBuf,
    /// Title.
    #[arg(long)]
    title: Option<String>,
}

/// Runs `elmur plot`.
pub fn run(what: &Plot) -> Result<()> {
    let (rows, drawn) = match what {
        Plot::Success(rows) => (rows, success(rows)),
        Plot::HeatMap(rows) => (rows, heat_map(rows)),
        Plot::Run(rows) => (rows, runs(rows)),
    };
    drawn?;
    say(&format!("{0}.svg {0}.png", rows.out.display()));
    Ok(())
}

/// Scores of single checkpoints by (training length, length).
fn scores(path: &Path) -> Result<BTreeMap<(u64, u64), Vec<f64>>> {
    let problem = |problem: String| Error::file(path, problem);
    let text = std::fs::read_to_string(path).map_err(|e| problem(e.to_string()))?;
    let mut all: BTreeMap<_, Vec<f64>> = BTreeMap::new();
    for (i, line) in text.lines().enumerate() {
        let row: Value = serde_json::from_str(line).map_err(|e| problem(format!("line {}: {e}", i + 1)))?;
        // Rows over all runs repeat what the single ones say.
        if row["checkpoint"].is_null() {
            continue;
        }
        let (Some(length), Some(score)) = (row["length"].as_u64(), row["score"].as_f64()) else {
            return Err(problem(format!(
                "line {}: no `length` and `score`; expected rows of elmur eval --json",
                i + 1
            )));
        };
        all.entry((row["train_length"].as_u64().unwrap_or(0), length)).or_default().push(score);
    }
    if all.is_empty() { Err(problem("no rows of elmur eval --json".to_owned())) } else { Ok(all) }
}

fn success(rows: &Rows) -> Result<()> {
    let mut curves = Vec::new();
    for path in &rows.from {
        let point = |((_, length), scores): (&(u64, u64), &Vec<f64>)| {
            let Statistics { mean, sem, .. } = Statistics::of(scores.iter().copied());
            (*length, mean, sem)
        };
        curves.push(Curve { name: stem(path), points: scores(path)?.iter().map(point).collect() });
    }
    let title = rows.title.as_deref().unwrap_or("Success by episode length");
    draw::success_by_length(&rows.out, title, &curves, &[]).map_err(|e| plot_error(&rows.out, e))
}

fn heat_map(rows: &Rows) -> Result<()> {
    let mut all: BTreeMap<(u64, u64), Vec<f64>> = BTreeMap::new();
    for path in &rows.from {
        for (key, mut found) in scores(path)? {
            all.entry(key).or_default().append(&mut found);
        }
    }
    let unique = |f: fn(&(u64, u64)) -> u64| -> Vec<u64> {
        all.keys().map(f).collect::<std::collections::BTreeSet<_>>().into_iter().collect()
    };
    let (trained, lengths) = (unique(|k| k.0), unique(|k| k.1));
    let cell =
        |t: &u64, l: &u64| all.get(&(*t, *l)).map(|scores| Statistics::of(scores.iter().copied()).mean);
    let values: Vec<Vec<Option<f64>>> =
        trained.iter().map(|t| lengths.iter().map(|l| cell(t, l)).collect()).collect();
    let names = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>();
    let title = rows.title.as_deref().unwrap_or("Success by training and evaluation length");
    draw::heat_map(
        &rows.out,
        title,
        "evaluation length",
        &names(&lengths),
        "training length",
        &names(&trained),
        &values,
    )
    .map_err(|e| plot_error(&rows.out, e))
}

fn runs(rows: &Rows) -> Result<()> {
    let mut curves = Vec::new();
    for path in &rows.from {
        let folder = RunFolder::open(path)?;
        let metrics = folder.metrics();
        let text = std::fs::read_to_string(&metrics).map_err(|e| Error::file(&metrics, e))?;
        let found: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        for (key, name) in [("accuracy", "accuracy"), ("score", "validation")] {
            let point = |row: &Value| Some((row["batch"].as_f64()?, row[key].as_f64()?));
            let points: Vec<_> = found.iter().filter_map(point).collect();
            if !points.is_empty() {
                curves.push((format!("{} {name}", stem(path)), points));
            }
        }
    }
    let title = rows.title.as_deref().unwrap_or("Learning");
    draw::learning_curves(&rows.out, title, "batch", "share", &curves, false)
        .map_err(|e| plot_error(&rows.out, e))
}

/// A path's last name without its extension.
fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}
