//! `elmur demo`: the paper's headline in a few minutes. Demonstrations of at most 29 steps, a small model,
//! episodes of a million.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use elmur_base::Stop;
use elmur_envs::EnvConfig;
use elmur_model::elmur::theory;
use elmur_model::{Checkpoint, Elmur};
use elmur_plot::{Curve, Marker};
use elmur_train::{
    Devices, Ended, Error, Evaluation, Result, RunConfig, RunFolder, Seeds, SlotHistory, SlotTimeline,
    timeline,
};

use crate::eval::{plot_error, with_bar};
use crate::progress::clock;
use crate::{say, train};

/// Options of `elmur demo`.
#[derive(clap::Args)]
pub struct Args {
    /// Where things go: demonstrations, checkpoints, metrics, pictures. An earlier demo there is replaced.
    #[arg(long, default_value = "out/demo")]
    out: PathBuf,
    /// Seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Longest episodes to try.
    #[arg(long, default_value_t = 1_000_000)]
    longest: u64,
}

/// Episode lengths, and how many episodes of each. The paper reports 100% at all its lengths up to a million.
const LENGTHS: [(u64, usize); 8] =
    [(9, 100), (30, 100), (90, 100), (300, 100), (900, 100), (9_600, 100), (100_000, 20), (1_000_000, 20)];

/// Runs `elmur demo`.
pub fn run(args: &Args, stop: &Stop) -> Result<ExitCode> {
    let begin = Instant::now();
    let mut config = RunConfig::preset("tmaze-quick")?;
    config.train.seed = args.seed;
    clear(&args.out)?;
    say(
        "T-Maze: a corridor with a fork at its end. The first observation tells which way to turn, none after it does.",
    );
    let folder = RunFolder::create(&args.out, &config)?;

    let dataset = config.dataset()?;
    let file = args.out.join("demonstrations.elmur");
    let _ = std::fs::remove_file(&file);
    elmur_data::save(&*dataset, &file)?;
    let longest = dataset.summary()?.lengths.max as u64;
    say(&format!(
        "1. An expert plays {} episodes of at most {longest} steps: {}",
        dataset.episodes(),
        file.display()
    ));

    say(&format!(
        "2. A model of {} parameters imitates it until it holds the cue for {} steps on validation episodes.",
        Checkpoint::parameter_count(&config.model)?,
        grouped(config.eval.length)
    ));
    if let Ended::Stopped(signal) =
        train::watch(&Devices::open(&config)?, &folder, &config, &dataset, false, stop)?
    {
        say(&format!("stopped and saved; go on with: elmur train --resume {}", args.out.display()));
        return Ok(ExitCode::from(128 + signal as u8));
    }
    say(&format!("   trained in {}", clock(begin.elapsed().as_secs_f64())));

    say("3. It acts where the fork is ever further away:");
    let policy = Checkpoint::load(&folder.best())?;
    let model = policy.config.elmur("demo")?;
    let memory = &model.memory;
    let horizon = theory::effective_horizon(memory.lambda, memory.slots, model.segment_length, 0.01);
    say("      steps   episodes   success        in the paper");
    let mut points = Vec::new();
    for (length, episodes) in LENGTHS.into_iter().filter(|(length, _)| *length <= args.longest) {
        let what = Evaluation {
            policy: &policy.config,
            params: &policy.params,
            env: EnvConfig::tmaze(length),
            episodes,
            seeds: Seeds::Test(0),
            sample: false,
            threads: 0,
            device: policy.params.device(),
        };
        let score = with_bar(&format!("T = {length}"), &what, stop)?.score();
        say(&format!(
            "  {:>9}   {episodes:>8}   {:>5.1}% ± {:<4.1}  100%",
            grouped(length),
            100.0 * score.mean,
            100.0 * score.sem
        ));
        points.push((length, score.mean, score.sem));
    }
    say(&format!(
        "   An overwrite keeps {:.0}% of a slot: by the paper's formula 1% of the first write is left after {horizon:.0} steps. The cue lasts",
        100.0 * (1.0 - memory.lambda)
    ));
    say(
        "   longer, because what is read from the memory is written to it again (docs/RESULTS.md tells what dropout has to do with it).",
    );

    let success = args.out.join("success");
    let markers = [
        Marker { x: longest as f64, label: "longest demonstration".to_owned() },
        Marker { x: horizon, label: "formula: 1% left".to_owned() },
    ];
    let curve = Curve { name: "tmaze-quick".to_owned(), points: points.clone() };
    elmur_plot::success_by_length(&success, "T-Maze: success by episode length", &[curve], &markers)
        .map_err(|e| plot_error(&success, e))?;
    let slots = args.out.join("slots");
    let seed = Seeds::Test(0).episode(0);
    let history = timeline(&policy.config, &policy.params, &EnvConfig::tmaze(300), seed, 300)?;
    draw_slots(&slots, &history, model)?;
    say(&format!(
        "4. Pictures: {0}.svg, {0}.png (success), {1}.svg, {1}.png (what the memory did)",
        success.display(),
        slots.display()
    ));
    say(&format!(
        "   Checkpoint: {}; try: elmur eval {} --lengths 50,5000",
        folder.best().display(),
        args.out.display()
    ));
    say(&format!("Done in {}.", clock(begin.elapsed().as_secs_f64())));
    let solved = points.iter().all(|(_, success, _)| *success == 1.0);
    if !solved {
        say("Not every episode was solved; another --seed may do better.");
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes what an earlier demo left, and only that.
fn clear(out: &Path) -> Result<()> {
    if !RunFolder::is_run(out) {
        return Ok(());
    }
    let config = RunFolder::open(out)?.config()?;
    let mut quick = RunConfig::preset("tmaze-quick")?;
    quick.train.seed = config.train.seed;
    // Only a demo keeps its demonstrations beside its run.
    if config != quick || !out.join("demonstrations.elmur").exists() {
        return Err(Error::file(out, "holds a run that is not a demo; choose another --out"));
    }
    for name in ["config.json", "metrics.jsonl"] {
        let _ = std::fs::remove_file(out.join(name));
    }
    for name in ["checkpoints", "tensorboard"] {
        let _ = std::fs::remove_dir_all(out.join(name));
    }
    Ok(())
}

fn draw_slots(path: &Path, history: &SlotTimeline, config: &Elmur) -> Result<()> {
    let lambda = config.memory.lambda;
    let row = |slot: &SlotHistory| {
        let first = slot.written.iter().position(|written| *written);
        // An empty slot is replaced whole, a filled one blended.
        let weight =
            |(i, written): (usize, &bool)| written.then(|| if Some(i) == first { 1.0 } else { lambda });
        elmur_plot::SlotRow {
            written: slot.written.iter().enumerate().map(weight).collect(),
            read: slot.read.iter().map(|read| f64::from(*read)).collect(),
        }
    };
    let segments = history.layers.first().and_then(|l| l.first()).map_or(0, |slot| slot.read.len());
    let picture = elmur_plot::Timeline {
        layers: history.layers.iter().map(|layer| layer.iter().map(row).collect()).collect(),
        cue: Some(0),
        decision: segments.checked_sub(1),
    };
    let title = format!("What the memory did in a T-Maze episode of {} steps", history.steps);
    elmur_plot::slot_timeline(path, &title, &picture).map_err(|e| plot_error(path, e))
}

/// 1000000 as 1,000,000.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn thousands_are_grouped() {
        let grouped = super::grouped;
        assert_eq!(
            [grouped(9), grouped(900), grouped(9_600), grouped(1_000_000)],
            ["9", "900", "9,600", "1,000,000"]
        );
    }
}
