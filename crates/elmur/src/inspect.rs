//! `elmur inspect`, `elmur presets` and `elmur import`: what a model is, without running it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use elmur_engine::DType;
use elmur_model::config::{MemoryInit, ModelConfig};
use elmur_model::segments::parameter_graph;
use elmur_model::{Checkpoint, Error, Result, checkpoint, presets, published, theory};
use serde_json::json;

use crate::say;

/// Options of `elmur inspect`.
#[derive(clap::Args)]
pub struct InspectArgs {
    /// A preset's name, a checkpoint's folder or a config.json.
    what: String,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Options of `elmur import`.
#[derive(clap::Args)]
pub struct ImportArgs {
    /// State dict of the published code, saved as safetensors.
    weights: PathBuf,
    /// A preset's name or a config.json that describes the model.
    #[arg(long)]
    config: String,
    /// Folder for the checkpoint.
    #[arg(long)]
    out: PathBuf,
}

/// A model by preset, checkpoint or config file.
fn config_of(what: &str) -> Result<ModelConfig> {
    if let Some(config) = presets::model(what) {
        return Ok(config);
    }
    let path = Path::new(what);
    if checkpoint::is_checkpoint(path) {
        return checkpoint::read_config(&path.join("config.json"));
    }
    if path.is_file() {
        return checkpoint::read_config(path);
    }
    let names: Vec<&str> = presets::all().iter().map(|p| p.name).collect();
    let expected = format!("a preset ({}), a checkpoint's folder or a config.json", names.join(", "));
    Err(Error::Input { what: "model", expected, got: what.to_owned() })
}

/// Prints a model's size, its parts and what the paper's theory says of its memory.
pub fn inspect(args: &InspectArgs) -> Result<()> {
    let config = config_of(&args.what)?;
    if checkpoint::is_checkpoint(Path::new(&args.what)) {
        // Loading checks every tensor.
        Checkpoint::load(Path::new(&args.what))?;
    }
    let graph = parameter_graph(&config, DType::F32)?;
    let mut parts: BTreeMap<String, usize> = BTreeMap::new();
    let mut total = 0;
    for (name, value) in graph.params() {
        let count = graph.ty(value)?.len();
        total += count;
        let part: Vec<&str> = name.split('.').filter(|p| p.parse::<usize>().is_err()).collect();
        let depth = if part[0] == "layers" { 2 } else { 1 };
        *parts.entry(part[..depth.min(part.len())].join(".")).or_default() += count;
    }
    let in_published = published::parameter_count(&config);
    let memory = &config.memory;
    let half_life = theory::effective_horizon(memory.lambda, memory.slots, config.segment_length, 0.5);
    let one_percent = theory::effective_horizon(memory.lambda, memory.slots, config.segment_length, 0.01);
    if args.json {
        let row = json!({
            "model": args.what, "parameters": total, "published_parameters": in_published, "parts": parts,
            "half_life_steps": half_life, "horizon_1_percent_steps": one_percent, "config": config,
        });
        say(&row.to_string());
        return Ok(());
    }
    say(&format!("{}: {total} parameters", args.what));
    for (part, count) in &parts {
        say(&format!("  {part:<24} {count:>10}"));
    }
    say(&format!("  in the published layout: {in_published}"));
    if let Some(more) = in_published.checked_sub(total).filter(|more| *more > 0) {
        say(&format!(
            "  ({more} more there: action and return embeddings that exist but that these tokens never use)"
        ));
    }
    let start = match memory.init {
        MemoryInit::Normal { std } => format!("normal, std {std}"),
        MemoryInit::Learned => "learned".to_owned(),
    };
    say(&format!(
        "memory: {} x {} slots of {}, lambda {}, start {start}",
        config.memories(),
        memory.slots,
        config.d_model,
        memory.lambda
    ));
    say(&format!(
        "  a content's weight halves in {half_life:.0} steps and falls to 1% in {one_percent:.0} (theory)"
    ));
    Ok(())
}

/// Lists the presets.
pub fn list_presets() {
    for preset in presets::all() {
        say(&format!("{:<24} {}", preset.name, preset.summary));
    }
}

/// Turns published weights into a checkpoint.
pub fn import(args: &ImportArgs) -> Result<()> {
    let config = config_of(&args.config)?;
    let imported = Checkpoint::import(&config, &args.weights)?;
    imported.save(&args.out)?;
    let count = Checkpoint::parameter_count(&config)?;
    say(&format!("{}: {count} parameters from {}", args.out.display(), args.weights.display()));
    Ok(())
}
