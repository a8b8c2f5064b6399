//! `elmur plot`: pictures of what evaluations and runs have measured, each as SVG and PNG.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use elmur_base::Statistics;
use elmur_plot::{self as draw, Curve};
use elmur_train::{Error, Result, RunFolder};
use serde_json::Value;

use crate::say;

/// What `elmur plot` draws.
#[derive(clap::Subcommand)]
pub enum Plot {
    /// Draw the score by episode length, one curve per file of `elmur eval --json` rows; rows of several runs
    /// become mean ± SEM.
    ///
    /// Example: elmur plot success paper.jsonl no-dropout.jsonl --out docs/success
    Success(Rows),
    /// Draw the score as a grid of training length by evaluation length, from `elmur eval --json` rows.
    ///
    /// Example: elmur plot heat-map rows.jsonl --out docs/generalization
    HeatMap(Rows),
    /// Draw loss, accuracy and validation score of runs, batch by batch: OUT, and OUT-loss beside it.
    ///
    /// Example: elmur plot run out/tmaze-0 out/tmaze-1 --out docs/learning
    Run(Runs),
}

/// Rows to draw, and where the picture goes.
#[derive(clap::Args)]
pub struct Rows {
    /// Files of `elmur eval --json` rows.
    #[arg(required = true)]
    from: Vec<PathBuf>,
    #[command(flatten)]
    picture: Picture,
}

/// Runs to draw, and where the picture goes.
#[derive(clap::Args)]
pub struct Runs {
    /// Folders of runs.
    #[arg(required = true)]
    from: Vec<PathBuf>,
    #[command(flatten)]
    picture: Picture,
}

/// Where a picture goes.
#[derive(clap::Args)]
pub struct Picture {
    /// Write OUT.svg and OUT.png.
    #[arg(long)]
    out: PathBuf,
    /// Print this title above the picture.
    #[arg(long)]
    title: Option<String>,
}

/// Runs `elmur plot`.
pub fn run(what: &Plot) -> Result<()> {
    let out = match what {
        Plot::Success(rows) | Plot::HeatMap(rows) => &rows.picture.out,
        Plot::Run(runs) => &runs.picture.out,
    };
    make_folder(out)?;
    let drawn = match what {
        Plot::Success(rows) => success(&rows.from, &rows.picture)?,
        Plot::HeatMap(rows) => heat_map(&rows.from, &rows.picture)?,
        Plot::Run(of) => runs(&of.from, &of.picture)?,
    };
    for path in drawn {
        say(&format!("{0}.svg {0}.png", path.display()));
    }
    Ok(())
}

/// Makes the folder that a picture goes to.
pub fn make_folder(picture: &Path) -> Result<()> {
    match picture.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) => std::fs::create_dir_all(folder).map_err(|e| Error::io(folder, e)),
        None => Ok(()),
    }
}

/// A drawing's error as one of ours.
pub fn plot_error(path: &Path, error: draw::Error) -> Error {
    match error {
        // It names its file itself.
        draw::Error::Base(error) => error.into(),
        error => Error::file(path, error),
    }
}

/// Scores of single checkpoints by (training length, length).
fn scores(path: &Path) -> Result<BTreeMap<(u64, u64), Vec<f64>>> {
    let problem = |problem: String| Error::file(path, problem);
    if path.is_dir() {
        let rows = format!("elmur eval {} --lengths 9,30,90 --json > rows.jsonl", path.display());
        return Err(problem(format!(
            "a folder; expected a file of `elmur eval --json` rows: write one with `{rows}`, or draw the learning \
             curves of a run with `elmur plot run`"
        )));
    }
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

fn success(from: &[PathBuf], picture: &Picture) -> Result<Vec<PathBuf>> {
    let mut curves = Vec::new();
    for path in from {
        let point = |((_, length), scores): (&(u64, u64), &Vec<f64>)| {
            let Statistics { mean, sem, .. } = Statistics::of(scores.iter().copied());
            (*length, mean, sem)
        };
        curves.push(Curve { name: stem(path), points: scores(path)?.iter().map(point).collect() });
    }
    let title = picture.title.as_deref().unwrap_or("Success by episode length");
    draw::success_by_length(&picture.out, title, &curves, &[]).map_err(|e| plot_error(&picture.out, e))?;
    Ok(vec![picture.out.clone()])
}

fn heat_map(from: &[PathBuf], picture: &Picture) -> Result<Vec<PathBuf>> {
    let mut all: BTreeMap<(u64, u64), Vec<f64>> = BTreeMap::new();
    for path in from {
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
    let title = picture.title.as_deref().unwrap_or("Success by training and evaluation length");
    draw::heat_map(
        &picture.out,
        title,
        "evaluation length",
        &names(&lengths),
        "training length",
        &names(&trained),
        &values,
    )
    .map_err(|e| plot_error(&picture.out, e))?;
    Ok(vec![picture.out.clone()])
}

const NO_BATCHES: &str = "no batches yet; go on with: elmur train --resume RUN";

/// Two pictures: shares and scores, and losses.
fn runs(from: &[PathBuf], picture: &Picture) -> Result<Vec<PathBuf>> {
    let (mut scores, mut losses) = (Vec::new(), Vec::new());
    for path in from {
        let folder = RunFolder::open(path)?;
        let metrics = folder.metrics();
        if !metrics.exists() {
            return Err(Error::file(path, NO_BATCHES));
        }
        let text = std::fs::read_to_string(&metrics).map_err(|e| Error::io(&metrics, e))?;
        let found: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let measure = found.iter().find_map(|row| row["measure"].as_str()).unwrap_or("score");
        let validation = format!("validation {}", measure.replace('_', " "));
        for (key, name) in
            [("accuracy", "training accuracy"), ("score", validation.as_str()), ("loss", "training loss")]
        {
            let curves = if key == "loss" { &mut losses } else { &mut scores };
            // Rows of validations repeat the score under its name; accuracy is that of batches.
            let of_batch = key != "accuracy";
            let point = |row: &Value| {
                let row = Some(row).filter(|row| of_batch || row["loss"].is_number())?;
                Some((row["batch"].as_f64()?, row[key].as_f64()?))
            };
            let points: Vec<_> = found.iter().filter_map(point).collect();
            if !points.is_empty() {
                curves.push((format!("{} {name}", stem(path)), points));
            }
        }
    }
    let title = picture.title.as_deref().unwrap_or("Learning");
    let mut drawn = Vec::new();
    let mut loss_path = picture.out.clone().into_os_string();
    loss_path.push("-loss");
    for (path, curves, label, log) in
        [(picture.out.clone(), &scores, "score", false), (PathBuf::from(loss_path), &losses, "loss", true)]
    {
        if !curves.is_empty() {
            draw::learning_curves(&path, title, "batch", label, curves, log)
                .map_err(|e| plot_error(&path, e))?;
            drawn.push(path);
        }
    }
    if drawn.is_empty() {
        return Err(Error::file(&from[0], NO_BATCHES));
    }
    Ok(drawn)
}

/// A path's last name without its extension.
fn stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}
