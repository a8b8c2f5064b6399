//! `elmur export`: a trained policy for others. `hub`: the folder that model hubs expect, with a card.

use std::fs;
use std::path::{Path, PathBuf};

use elmur_base::files::{read_small, write_atomic};
use elmur_model::checkpoint::Checkpoint;
use elmur_train::{Error, Result, RunConfig, RunFolder};
use serde_json::Value;

use crate::say;

/// What a policy is written as.
#[derive(clap::Subcommand)]
pub enum Export {
    /// Write a folder for a model hub: config.json, model.safetensors, train_config.json and a card,
    /// README.md.
    ///
    /// The folder is a checkpoint: `elmur eval`, `elmur inspect` and programs load it. Upload it with the
    /// hub's own tool.
    ///
    /// Examples:
    ///   elmur export hub out/tmaze-0 --out hub/tmaze --license mit
    ///   elmur eval out/tmaze-0 --json > results.jsonl; elmur export hub out/tmaze-0 --results results.jsonl --out hub/tmaze
    #[command(verbatim_doc_comment)]
    Hub(HubArgs),
}

/// Options of `elmur export hub`.
#[derive(clap::Args)]
pub struct HubArgs {
    /// Folder of a run.
    run: PathBuf,
    /// Write to this folder.
    #[arg(long)]
    out: PathBuf,
    /// Name of the policy on its card; the name of the folder by default.
    #[arg(long)]
    name: Option<String>,
    /// License to name on the card, such as mit or apache-2.0.
    #[arg(long)]
    license: Option<String>,
    /// Results to show: lines that `elmur eval --json` printed. Without them those of validation are shown.
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,
    /// Export the last checkpoint, not the best.
    #[arg(long)]
    last: bool,
    /// Replace files of an earlier export.
    #[arg(long)]
    force: bool,
}

/// Runs `elmur export`.
pub fn run(what: &Export) -> Result<()> {
    match what {
        Export::Hub(args) => hub(args),
    }
}

/// Files that an export writes.
const FILES: [&str; 4] = ["config.json", "model.safetensors", SETTINGS, "README.md"];

/// Name of the file with the settings of the training.
pub const SETTINGS: &str = "train_config.json";

fn hub(args: &HubArgs) -> Result<()> {
    let folder = RunFolder::open(&args.run)?;
    let mut config = folder.config()?;
    let checkpoint_path = if args.last { folder.last() } else { folder.best() };
    if !checkpoint_path.exists() {
        return Err(crate::eval::no_checkpoint(&checkpoint_path, &folder));
    }
    let checkpoint = Checkpoint::load(&checkpoint_path)?;
    let results = results(args, &folder)?;
    // Where the data lay is nobody else's business.
    config.data.file = config.data.file.as_ref().and_then(|file| file.file_name()).map(PathBuf::from);
    if !args.force
        && let Some(there) = FILES.iter().map(|name| args.out.join(name)).find(|path| path.exists())
    {
        return Err(Error::file(&there, "exists already; choose another --out, or replace it with --force"));
    }
    let name = args.name.clone().unwrap_or_else(|| name_of(&args.out));
    let card = card(&name, args.license.as_deref(), &config, &checkpoint, &results)?;
    fs::create_dir_all(&args.out)
        .map_err(|e| Error::file(&args.out, format!("{e}; choose another --out")))?;
    checkpoint.save(&args.out)?;
    let settings = serde_json::to_vec_pretty(&config).map_err(|e| Error::file(&args.out, e))?;
    write_atomic(&args.out.join(SETTINGS), &settings)?;
    write_atomic(&args.out.join("README.md"), card.as_bytes())?;
    say(&format!("{}: {}", args.out.display(), FILES.join(", ")));
    Ok(())
}

/// The last part of a path, for people.
fn name_of(path: &Path) -> String {
    path.file_name().map_or_else(|| "policy".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// A score and where it comes from.
struct Scored {
    task: String,
    measure: String,
    score: f64,
    spread: Option<f64>,
    /// How many episodes, or at which batch.
    of: String,
}

/// Results of `elmur eval --json`, else the best validation of the run.
fn results(args: &HubArgs, folder: &RunFolder) -> Result<Vec<Scored>> {
    let rows = |path: &Path| -> Result<Vec<Value>> {
        let text = read_small(path, 1 << 26)?;
        let row = |(i, line): (usize, &str)| {
            serde_json::from_str(line)
                .map_err(|e| Error::file(path, format!("line {}: not JSON: {e}", i + 1)))
        };
        text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).map(row).collect()
    };
    let scored = |row: &Value, task: String, of: String| {
        Some(Scored {
            task,
            measure: row["measure"].as_str().unwrap_or("score").replace('_', " "),
            score: row["score"].as_f64()?,
            spread: row["sem"].as_f64(),
            of,
        })
    };
    if let Some(path) = &args.results {
        // Rows of single runs have a checkpoint; those over all runs have not.
        let all = rows(path)?;
        let over_all = all.iter().filter(|row| row["score"].is_number() && row.get("checkpoint").is_none());
        let found: Vec<Scored> = over_all
            .filter_map(|row| {
                let task = row["env"]
                    .as_str()
                    .or(row["data"].as_str().map(|data| data.rsplit('/').next().unwrap_or(data)));
                let known =
                    ["env", "data", "runs", "episodes", "measure", "score", "sem", "sem_over", "good_return"];
                let settings = row
                    .as_object()?
                    .iter()
                    .filter(|(key, value)| !known.contains(&key.as_str()) && !value.is_null());
                let settings: Vec<String> = settings.map(|(key, value)| format!("{key} {value}")).collect();
                let task = std::iter::once(task.unwrap_or("test").to_owned())
                    .chain(settings)
                    .collect::<Vec<_>>()
                    .join(", ");
                scored(row, task, format!("{} episodes", row["episodes"]))
            })
            .collect();
        if found.is_empty() {
            return Err(Error::file(path, "no results; expected what `elmur eval --json` prints"));
        }
        return Ok(found);
    }
    let Ok(all) = rows(&folder.metrics()) else { return Ok(Vec::new()) };
    let lower = |row: &Value| {
        row["measure"].as_str().is_some_and(|m| ["mean_squared_error", "training_loss"].contains(&m))
    };
    let worth =
        |row: &Value| row["score"].as_f64().map_or(f64::NEG_INFINITY, |x| if lower(row) { -x } else { x });
    let best = all.iter().filter(|row| row["score"].is_number()).max_by(|a, b| worth(a).total_cmp(&worth(b)));
    let scored = best.and_then(|row| scored(row, "validation".to_owned(), format!("batch {}", row["batch"])));
    Ok(scored.into_iter().collect())
}

/// The card: a head in YAML for the hub, then what people want to know.
fn card(
    name: &str,
    license: Option<&str>,
    config: &RunConfig,
    checkpoint: &Checkpoint,
    results: &[Scored],
) -> Result<String> {
    let env = config.env.as_ref().map(|env| env.name.clone());
    let data = config.data.file.as_ref().map(|file| file.display().to_string());
    let kind = config.model.kind();
    // Strings in JSON are strings in YAML.
    let quoted = |text: &str| Value::from(text).to_string();
    let mut head = vec!["---".to_owned(), "library_name: elmur".to_owned()];
    head.extend(license.map(|license| format!("license: {}", quoted(license))));
    let pipeline = if env.is_some() { "reinforcement-learning" } else { "robotics" };
    head.push(format!("pipeline_tag: {pipeline}"));
    head.push("tags:".to_owned());
    let tags = ["imitation-learning", "memory", "partial-observability", kind];
    head.extend(tags.iter().copied().chain(env.as_deref()).map(|tag| format!("- {}", quoted(tag))));
    if let Some(data) = &data {
        head.extend(["datasets:".to_owned(), format!("- {}", quoted(data))]);
    }
    let task = env.clone().or(data.clone()).unwrap_or_else(|| "recordings".to_owned());
    if !results.is_empty() {
        head.extend([
            "model-index:".to_owned(),
            format!("- name: {}", quoted(name)),
            "  results:".to_owned(),
        ]);
        for result in results {
            head.extend([
                "  - task:".to_owned(),
                format!("      type: {pipeline}"),
                "    dataset:".to_owned(),
                format!("      name: {}", quoted(&format!("{task}: {}", result.task))),
                format!("      type: {}", quoted(&task)),
                "    metrics:".to_owned(),
                format!("    - type: {}", quoted(&result.measure)),
                format!("      value: {}", result.score),
            ]);
        }
    }
    head.push("---".to_owned());
    let parameters = Checkpoint::parameter_count(&checkpoint.config)?;
    let window = config.model.architecture().window().steps;
    let mut text = vec![
        head.join("\n"),
        format!("# {name}"),
        format!(
            "A policy of kind `{kind}` with {parameters} parameters, which learnt by imitation in windows of {window} \
             steps {}. It was trained with elmur {}.",
            match (&env, &data) {
                (_, Some(data)) => format!("from recordings ({data})"),
                (Some(env), None) => format!("from demonstrations in `{env}`"),
                (None, None) => "from recordings".to_owned(),
            },
            env!("CARGO_PKG_VERSION"),
        ),
        "## Results".to_owned(),
    ];
    if results.is_empty() {
        text.push("None were recorded.".to_owned());
    } else {
        let mut table = vec!["| on | measure | score | of |".to_owned(), "|---|---|---|---|".to_owned()];
        table.extend(results.iter().map(|result| {
            let spread = result.spread.map(|sem| format!(" ± {sem:.3}")).unwrap_or_default();
            format!("| {} | {} | {:.3}{spread} | {} |", result.task, result.measure, result.score, result.of)
        }));
        text.push(table.join("\n"));
    }
    let judge = match (&env, &data) {
        (Some(_), _) => "elmur eval .                          # on episodes that no choice has seen",
        (None, _) => "elmur eval . --data RECORDINGS        # on other recordings",
    };
    text.extend([
        "## Use".to_owned(),
        format!(
            "```sh\n{judge}\nelmur inspect .                       # sizes and horizon\nelmur train train_config.json{}   # \
             the same training again\n```",
            if data.is_some() { " --data RECORDINGS" } else { "" }
        ),
        "`config.json` describes the policy with what it sees and does, `model.safetensors` holds its parameters \
         (numbers that normalise observations among them), `train_config.json` every setting of the training."
            .to_owned(),
    ]);
    Ok(text.join("\n\n") + "\n")
}
