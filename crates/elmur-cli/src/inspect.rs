//! `elmur inspect`, `elmur presets` and `elmur import`: what a model, a run or a dataset is, without running
//! it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use elmur_base::files::read_small;
use elmur_base::{Space, Statistics};
use elmur_engine::DType;
use elmur_envs::popgym::Family;
use elmur_model::elmur::config::MemoryInit;
use elmur_model::elmur::{Elmur, published, theory};
use elmur_model::window::{Built, parameter_graph};
use elmur_model::{Checkpoint, Error, PolicyConfig, checkpoint};
use elmur_train::{PolicyName, Result, RunConfig, RunFolder, overrides};
use serde_json::{Value, json};

use crate::{Context, say};

/// Options of `elmur inspect`.
#[derive(clap::Args)]
pub struct InspectArgs {
    /// Preset, run folder, checkpoint folder, config.json, or dataset (file or folder of .npz).
    #[arg(value_name = "PATH_OR_PRESET", index = 1)]
    what: String,
    /// Show a preset, a run's settings or a config.json with another policy (policy=NAME) or other settings
    /// (KEY=VALUE).
    #[arg(value_name = "KEY=VALUE", index = 2)]
    overrides: Vec<String>,
    /// List every key that `elmur train PRESET KEY=VALUE` can change, with its value and what it does; for
    /// presets, runs and configs of runs.
    #[arg(long)]
    keys: bool,
    /// Print JSON: one object, or one per key.
    #[arg(long)]
    json: bool,
}

/// Options of `elmur import`.
#[derive(clap::Args)]
pub struct ImportArgs {
    /// State dict of the published code, saved as safetensors.
    weights: PathBuf,
    /// Preset or config.json that describes the model.
    #[arg(long)]
    config: String,
    /// Write the checkpoint to this folder.
    #[arg(long)]
    out: PathBuf,
    /// Replace a checkpoint that is in the folder already.
    #[arg(long)]
    force: bool,
}

/// A policy by preset, checkpoint or config file.
fn config_of(what: &str) -> Result<PolicyConfig> {
    if let Ok(run) = RunConfig::preset(what) {
        return Ok(run.model);
    }
    let path = Path::new(what);
    if checkpoint::is_checkpoint(path) {
        return Ok(checkpoint::read_config(&path.join("config.json"))?);
    }
    if path.is_file() {
        // The config of a run has its model's inside.
        let (run, config) = (RunConfig::read(path), checkpoint::read_config(path));
        return run.map(|run| run.model).or(config.map_err(|cause| not_a_config(path, cause.into())));
    }
    let presets = RunConfig::expected_preset(what);
    let expected = format!("a checkpoint, a config.json, a run, a dataset or a preset: {presets}");
    Err(Error::Input { what: "model", expected, got: what.to_owned() }.into())
}

/// The config of a run from a file.
pub fn read_run(path: &Path) -> Result<RunConfig> {
    RunConfig::read(path).map_err(|cause| not_a_config(path, cause))
}

/// Says what a file is that was taken for a config; the cause, if it looks like one after all.
fn not_a_config(path: &Path, cause: elmur_train::Error) -> elmur_train::Error {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let text = read_small(path, 1 << 20).unwrap_or_default();
    let keys = ["model", "kind", "d_model"];
    if serde_json::from_str::<Value>(&text).is_ok_and(|tree| keys.iter().any(|key| tree.get(key).is_some())) {
        return cause;
    }
    let problem = if elmur_data::is_data(path) {
        "a dataset, not a config".to_owned()
    } else if checkpoint::is_checkpoint(parent) || RunFolder::is_run(parent) {
        format!("a part of {}; give that folder", parent.display())
    } else {
        "neither a config.json nor a dataset".to_owned()
    };
    elmur_train::Error::file(path, problem)
}

/// What a dataset holds.
fn inspect_dataset(path: &Path, as_json: bool) -> Result<()> {
    let dataset = elmur_data::open(path, None)?;
    let s = dataset.summary()?;
    let (stored, plain) = (elmur_base::files::size_of(path), dataset.plain_bytes());
    if as_json {
        let row = json!({
            "dataset": path.display().to_string(), "spaces": dataset.spaces(), "metadata": dataset.metadata(),
            "episodes": s.episodes, "steps": s.steps, "torn_bytes": dataset.torn_bytes(),
            "return": s.returns, "length": s.lengths, "terminated": s.terminated, "truncated": s.truncated,
            "imitated": s.imitated_share, "stored_bytes": stored, "plain_bytes": plain,
        });
        say(&row.to_string());
        return Ok(());
    }
    say(&format!("{}: {} episodes, {} steps", path.display(), s.episodes, s.steps));
    say(&format!("  observation  {}", within(&dataset.spaces().observation)));
    say(&format!("  action       {}", within(&dataset.spaces().action)));
    let Statistics { mean, sem, min, max, .. } = s.returns;
    say(&format!("  return       {mean:.3} ± {sem:.3} mean, {min:.3} to {max:.3}"));
    say(&format!("  length       {:.1} mean, {} to {}", s.lengths.mean, s.lengths.min, s.lengths.max));
    let both = if s.terminated + s.truncated > s.episodes { ", some of them both" } else { "" };
    say(&format!("  ended        {} terminated, {} truncated{both}", s.terminated, s.truncated));
    say(&format!("  imitated     {:.1}% of steps", 100.0 * s.imitated_share));
    let (mb, each) = (|bytes: u64| bytes as f64 / 1e6, |bytes: u64| bytes as f64 / s.steps as f64);
    say(&format!("  size         {:.2} MB on disk, {:.0} bytes per step", mb(stored), each(stored)));
    say(&format!("  unpacked     {:.2} MB, {:.0} bytes per step", mb(plain), each(plain)));
    for (key, value) in dataset.metadata() {
        say(&format!("  {key:<12} {value}"));
    }
    if dataset.torn_bytes() > 0 {
        say(&format!("  the last record is torn: {} bytes are not read", dataset.torn_bytes()));
    }
    Ok(())
}

/// A space in words, with the bounds of a box that has the same for all its numbers.
fn within(space: &Space) -> String {
    if let Space::Box { low, high, .. } = space
        && let ([low], [high]) = (&low[..], &high[..])
        && *low > f32::MIN
        && *high < f32::MAX
    {
        return format!("{space} from {low} to {high}");
    }
    space.to_string()
}

/// How far a run has come.
fn inspect_run(folder: &RunFolder, as_json: bool) -> Result<()> {
    let config = folder.config()?;
    let text = std::fs::read_to_string(folder.metrics()).unwrap_or_default();
    let rows: Vec<Value> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let last = rows.iter().rev().find(|row| row["loss"].is_number());
    let measure = rows.iter().rev().find_map(|row| row["measure"].as_str()).unwrap_or("score");
    let lower = ["mean_squared_error", "training_loss"].contains(&measure);
    let scores = || rows.iter().filter_map(|row| Some((row["batch"].as_u64()?, row["score"].as_f64()?)));
    let worth = |score: f64| if lower { -score } else { score };
    let best = scores().max_by(|a, b| worth(a.1).total_cmp(&worth(b.1)).then(a.0.cmp(&b.0)));
    let number = |name: &str| last.and_then(|row| row[name].as_f64());
    if as_json {
        let row = json!({
            "run": folder.path().display().to_string(), "batches": last.map(|row| row["batch"].clone()),
            "loss": number("loss"), "action_loss": number("action_loss"), "accuracy": number("accuracy"),
            "measure": best.map(|_| measure), "best_validation": best.map(|(_, score)| score),
            "best_batch": best.map(|(batch, _)| batch), "config": config,
        });
        say(&row.to_string());
        return Ok(());
    }
    let batches = last.and_then(|row| row["batch"].as_u64()).unwrap_or(0);
    say(&format!("{}: a run of {batches} batches", folder.path().display()));
    if let Some(loss) = number("loss") {
        let more = match (number("accuracy"), number("action_loss")) {
            (Some(accuracy), _) => format!(", accuracy {:.1}%", 100.0 * accuracy),
            (None, Some(error)) => format!(", mean squared error {error:.5}"),
            _ => String::new(),
        };
        say(&format!("  loss         {loss:.4}{more}"));
    }
    if let Some((batch, score)) = best {
        say(&format!("  validation   best {} {score:.3} at batch {batch}", measure.replace('_', " ")));
    }
    let count = Checkpoint::parameter_count(&config.model)?;
    let steps = config.model.architecture().window().steps;
    say(&format!("  policy       {}, {count} parameters, windows of {steps} steps", config.model.kind()));
    say(&format!("  seed         {}", config.train.seed));
    for name in ["best", "last"] {
        let path = folder.checkpoints().join(name);
        if path.exists() {
            Checkpoint::load(&path)?;
            say(&format!("  {name:<12} {}", path.display()));
        }
    }
    Ok(())
}

/// The config of a preset, a run or a run's config.json.
pub(crate) fn run_config(what: &str) -> Result<RunConfig> {
    let path = Path::new(what);
    if RunFolder::is_run(path) {
        return RunFolder::open(path)?.config();
    }
    if path.is_file() { read_run(path) } else { RunConfig::preset(what) }
}

/// Shows a preset, checkpoint, config, run or dataset.
pub fn inspect(args: &InspectArgs, context: &Context) -> Result<()> {
    let path = Path::new(&args.what);
    if args.keys || !args.overrides.is_empty() {
        let mut run = run_config(&args.what)?;
        if !args.overrides.is_empty() {
            run = overrides::apply(&run, &args.overrides, &context.registry)?;
        }
        if args.keys {
            return crate::keys::list(&run, &context.registry, args.json);
        }
        let name = [std::slice::from_ref(&args.what), &args.overrides[..]].concat().join(" ");
        return inspect_policy(&name, &run.model, args.json);
    }
    if RunFolder::is_run(path) {
        return inspect_run(&RunFolder::open(path)?, args.json);
    }
    if elmur_data::is_data(path) || path.extension().is_some_and(|e| e == "elmur") {
        return inspect_dataset(path, args.json);
    }
    let config = config_of(&args.what)?;
    if checkpoint::is_checkpoint(Path::new(&args.what)) {
        // Loading checks every tensor.
        Checkpoint::load(Path::new(&args.what))?;
    }
    inspect_policy(&args.what, &config, args.json)
}

/// Parameters by the part of the policy that they belong to.
fn parts_of(built: &Built) -> Result<BTreeMap<String, usize>> {
    let mut parts: BTreeMap<String, usize> = BTreeMap::new();
    for (name, value) in built.graph.params() {
        let count = built.graph.ty(value).map_err(Error::from)?.len();
        let part: Vec<&str> = name.split('.').filter(|p| p.parse::<usize>().is_err()).collect();
        let depth = if part[0] == "layers" { 2 } else { 1 };
        *parts.entry(part[..depth.min(part.len())].join(".")).or_default() += count;
    }
    Ok(parts)
}

/// Prints a policy's size, its parts and what it carries from window to window.
fn inspect_policy(name: &str, config: &PolicyConfig, as_json: bool) -> Result<()> {
    let architecture = config.architecture();
    let built = parameter_graph(architecture, DType::F32)?;
    let parts = parts_of(&built)?;
    let total: usize = parts.values().sum();
    let window = architecture.window();
    let carried: usize = built.carried.iter().map(|c| c.shape.iter().product::<usize>()).sum();
    if as_json {
        let mut row = json!({
            "model": name, "kind": config.kind(), "parameters": total,
            "trained_parameters": Checkpoint::trained_parameter_count(config)?, "parts": parts, "window_steps": window.steps,
            "carried_numbers": carried, "config": config,
        });
        if let PolicyConfig::Elmur(elmur) = config {
            let (half_life, one_percent) = horizons(elmur);
            row["published_parameters"] = json!(published::parameter_count(elmur));
            row["half_life_steps"] = json!(half_life);
            row["horizon_1_percent_steps"] = json!(one_percent);
        }
        say(&row.to_string());
        return Ok(());
    }
    let trained = Checkpoint::trained_parameter_count(config)?;
    let copies = if trained < total { format!(", {trained} without copies") } else { String::new() };
    say(&format!("{name}: {}, {total} parameters{copies}", config.kind()));
    for (part, count) in &parts {
        say(&format!("  {part:<24} {count:>10}"));
    }
    let far = if window.slides { "shows the newest steps" } else { "begins anew when it is full" };
    say(&format!("window: {} steps, {far}; {carried} numbers carried beyond it", window.steps));
    if let PolicyConfig::Elmur(elmur) = config {
        describe_memory(elmur, total);
    }
    Ok(())
}

/// Steps in which a content's weight halves and falls to 1%, by the paper's theory.
fn horizons(config: &Elmur) -> (f64, f64) {
    let memory = &config.memory;
    let after = |share| theory::effective_horizon(memory.lambda, memory.slots, config.segment_length, share);
    (after(0.5), after(0.01))
}

/// ELMUR's memory, and its size in the published layout.
fn describe_memory(config: &Elmur, total: usize) {
    let in_published = published::parameter_count(config);
    say(&format!("in the published layout: {in_published} parameters"));
    if let Some(more) = in_published.checked_sub(total).filter(|more| *more > 0) {
        say(&format!(
            "  ({more} more there: action and return embeddings that exist but that these tokens never use)"
        ));
    }
    let memory = &config.memory;
    let start = match memory.init {
        MemoryInit::Normal { std } => format!("normal, std {std}"),
        MemoryInit::Learned => "learned".to_owned(),
    };
    let (count, slots, d, lambda) = (config.memories(), memory.slots, config.d_model, memory.lambda);
    say(&format!("memory: {count} x {slots} slots of {d}, lambda {lambda}, start {start}"));
    let (half_life, one_percent) = horizons(config);
    say(&format!(
        "  a content's weight halves in {half_life:.0} steps and falls to 1% in {one_percent:.0} (theory)"
    ));
}

/// Lists the presets and the policies.
pub fn list_presets(as_json: bool) {
    if as_json {
        for name in RunConfig::preset_names() {
            let named = RunConfig::preset_summaries().iter().find(|(known, _)| *known == name);
            let summary = named.map(|(_, summary)| (*summary).to_owned()).unwrap_or_else(|| {
                if name.starts_with("mikasa-") {
                    let published = name.ends_with("-compat");
                    return if published { MIKASA[1].1 } else { MIKASA[0].1 }.to_owned();
                }
                let family = Family::ALL.iter().find(|family| name.contains(family.name()));
                family.map(|family| family.summary().to_owned()).unwrap_or_default()
            });
            say(&json!({"name": name, "summary": summary}).to_string());
        }
        for policy in PolicyName::all() {
            let row = json!({
                "policy": policy.name(), "aliases": policy.aliases(), "summary": policy.summary(),
                "published": policy.compat,
            });
            say(&row.to_string());
        }
        return;
    }
    say("Presets, for elmur train PRESET:");
    for (name, summary) in RunConfig::preset_summaries() {
        say(&format!("  {name:<24} {summary}"));
    }
    let tasks = [
        ("popgym-TASK", "POPGym's 48 tasks with small models that train what they write (ours); TASK is a"),
        ("", "family with Easy, Medium or Hard, such as popgym-RepeatFirstEasy:"),
    ];
    tasks.iter().for_each(|(name, summary)| say(&format!("  {name:<24} {summary}")));
    for family in Family::ALL {
        say(&format!("    {:<26} {}", family.name(), family.summary()));
    }
    let endings = [
        (
            "popgym-TASK-compat",
            "the same tasks with the published choices: the paper's model, numbers as they are",
        ),
        ("popgym-TASK-bc-lstm", "the same as popgym-TASK policy=bc-lstm"),
        ("popgym-TASK-dt", "the same as popgym-TASK policy=dt"),
    ];
    endings.iter().for_each(|(name, summary)| say(&format!("  {name:<24} {summary}")));
    say(&format!("  {:<24} {}:", MIKASA[0].0, MIKASA[0].1));
    let task =
        |name: &String| name.strip_prefix("mikasa-").filter(|task| !task.contains('-')).map(str::to_owned);
    let robots: Vec<String> = RunConfig::preset_names().iter().filter_map(task).collect();
    robots.chunks(6).for_each(|tasks| say(&format!("    {}", tasks.join(" "))));
    say(&format!("  {:<24} {}", MIKASA[1].0, MIKASA[1].1));
    say("Policies, for elmur train PRESET policy=POLICY with any preset, your own environment or data:");
    for policy in PolicyName::all().filter(|policy| !policy.compat) {
        let names = [vec![policy.name()], policy.aliases()].concat().join(", ");
        say(&format!("  {names:<24} {}", policy.summary()));
    }
    say("  POLICY-compat            the published code's choices and quirks:");
    for policy in PolicyName::all().filter(|policy| policy.compat) {
        say(&format!("    {:<26} {}", policy.name(), policy.summary()));
    }
}

/// Presets for recordings of MIKASA-Robo's tasks, and what they are.
const MIKASA: [(&str, &str); 2] = [
    (
        "mikasa-TASK",
        "MIKASA-Robo's 32 tasks from recordings (--data PATH): a residual encoder that keeps places apart (ours)",
    ),
    ("mikasa-TASK-compat", "the paper's model and training, for RememberColor3, 5, 9 and TakeItBack"),
];

/// Turns published weights into a checkpoint.
pub fn import(args: &ImportArgs) -> Result<()> {
    let config = config_of(&args.config)?;
    let problem = if RunFolder::is_run(&args.out) {
        Some("holds a run; choose another --out")
    } else if !args.force && (checkpoint::is_checkpoint(&args.out) || args.out.join("config.json").exists()) {
        Some("holds a checkpoint already; replace it with --force, or choose another --out")
    } else {
        None
    };
    if let Some(problem) = problem {
        return Err(elmur_train::Error::file(&args.out, problem));
    }
    let imported = Checkpoint::import(&config, &args.weights)?;
    imported.save(&args.out)?;
    let count = Checkpoint::parameter_count(&config)?;
    say(&format!("{}: {count} parameters from {}", args.out.display(), args.weights.display()));
    Ok(())
}
