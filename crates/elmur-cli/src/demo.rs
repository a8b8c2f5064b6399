//! `elmur demo`: the paper's headline in a few minutes. Demonstrations of at most 29 steps, a small model,
//! episodes of a million.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use elmur_data::collect::Demonstrations;
use elmur_data::{ElmurFile, Source, Writer};
use elmur_envs::{EnvSpec, Environment, Metric, Registry};
use elmur_model::elmur::theory;
use elmur_model::session::Weights;
use elmur_model::{Checkpoint, Elmur};
use elmur_plot::{Curve, Marker};
use elmur_train::{
    Devices, Ended, Error, Evaluation, Result, RunConfig, RunFolder, Seeds, SlotHistory, SlotTimeline,
    timeline,
};

use crate::eval::with_bar;
use crate::plot::plot_error;
use crate::progress::clock;
use crate::{Context, say, signals, train};

/// Options of `elmur demo`.
#[derive(clap::Args)]
pub struct Args {
    /// Write demonstrations, checkpoints, metrics and pictures into this folder. An earlier demo in it is
    /// replaced.
    #[arg(long, default_value = "out/demo")]
    out: PathBuf,
    /// Use this seed for weights, data order and dropout.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Evaluate on episodes of up to this many steps.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(9..))]
    longest: u64,
}

/// Episode lengths, and how many episodes of each. The paper reports 100% at all its lengths up to a million.
const LENGTHS: [(u64, usize); 8] =
    [(9, 100), (30, 100), (90, 100), (300, 100), (900, 100), (9_600, 100), (100_000, 20), (1_000_000, 20)];

/// Runs `elmur demo`.
pub fn run(args: &Args, context: &Context) -> Result<ExitCode> {
    let stop = &context.stop;
    // Its environment is ours, whatever else is known by the name.
    let registry = Registry::builtin();
    let begin = Instant::now();
    let mut config = RunConfig::preset("tmaze-quick")?;
    config.train.seed = args.seed;
    refuse_foreign(&args.out, &config, &registry)?;
    clear(&args.out)?;
    say(
        "T-Maze: a corridor with a fork at its end. The first observation tells which way to turn, none after it does.",
    );
    let prepared = config.prepare(&registry, true)?;
    // Another demo must not take the folder while the demonstrations are written.
    let (folder, lock) = RunFolder::create_locked(&args.out, &prepared.config)?;
    signals::acknowledge(stop);

    let file = args.out.join(DEMONSTRATIONS);
    let mut writer = Writer::replace(&file, prepared.data.spaces(), prepared.data.metadata().clone())?;
    for episode in 0..prepared.data.episodes() {
        writer.push(&prepared.data.episode(episode)?)?;
    }
    writer.finish()?;
    let longest = prepared.data.summary()?.lengths.max as u64;
    say(&format!(
        "1. A player plays {} episodes of at most {longest} steps: {}",
        prepared.data.episodes(),
        file.display()
    ));

    say(&format!(
        "2. A model of {} parameters imitates it until it holds the cue for {} steps on validation episodes.",
        Checkpoint::parameter_count(&config.model)?,
        grouped(config.eval.settings["length"].as_u64().unwrap_or(0))
    ));
    let devices = Devices::open(&config)?;
    // Training takes the lock itself.
    drop(lock);
    if let Ended::Stopped(signal) = train::watch(&devices, &folder, &prepared, false, stop, false)? {
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
            env: &maze(&registry, length)?,
            episodes,
            seeds: Seeds::Test(0),
            target_return: None,
            sample: false,
            threads: None,
            device: policy.params.device(),
            weights: Weights::F32,
        };
        let score = with_bar(&format!("T = {length}"), &what, stop)?.score(Metric::Success);
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
    let history = timeline(&policy.config, &policy.params, &maze(&registry, 300)?, None, seed, 300)?;
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

/// The demo's dataset in its folder.
const DEMONSTRATIONS: &str = "demonstrations.elmur";

/// The demo's pictures in its folder.
const PICTURES: [&str; 4] = ["success.svg", "success.png", "slots.svg", "slots.png"];

fn maze(registry: &Registry, length: u64) -> Result<Environment> {
    Ok(registry.find(&EnvSpec::new("tmaze").with("length", length))?)
}

/// Refuses a folder that has files of the names that a demo writes, but of another origin: demonstrations,
/// whole or begun, of other episodes, and pictures where no demo has been.
fn refuse_foreign(out: &Path, config: &RunConfig, registry: &Registry) -> Result<()> {
    let foreign = |name: &str, why: &str| {
        Err(Error::file(&out.join(name), format!("{why} and would be replaced; choose another --out")))
    };
    let Some(spec) = &config.env else { return Ok(()) };
    let environment = registry.find(spec)?;
    let ours = Demonstrations {
        environment: &environment,
        episodes: 0..config.data.episodes,
        seed: config.data.seed,
        noise: config.data.noise,
        threads: 0,
        stop: Default::default(),
    };
    let metadata = ours.metadata();
    let noted = |file: &ElmurFile| {
        // Demonstrations of a run have a note of its wrappers, also where there are none.
        let mut notes = file.metadata().clone();
        notes.retain(|key, value| key != "wrappers" || !value.is_empty());
        notes == metadata
    };
    let (whole, begun) = (out.join(DEMONSTRATIONS), format!("{DEMONSTRATIONS}.tmp"));
    if whole.exists() {
        let same = |file: ElmurFile| noted(&file) && file.episodes() == config.data.episodes;
        if !ElmurFile::open(&whole).is_ok_and(same) {
            return foreign(DEMONSTRATIONS, "is not of a demo");
        }
    } else if !out.join("config.json").exists()
        && let Some(picture) = PICTURES.iter().find(|name| out.join(name).exists())
    {
        return foreign(picture, "is not of a demo, which has demonstrations beside it,");
    }
    // One that was torn before its first episode was whole has nothing to lose.
    if ElmurFile::open(out.join(&begun)).is_ok_and(|file| !noted(&file)) {
        return foreign(&begun, "is not of a demo");
    }
    Ok(())
}

/// Removes what an earlier demo left, and only that. A demo that is running is left alone.
fn clear(out: &Path) -> Result<()> {
    if out.join("config.json").exists() {
        let config = RunFolder::open(out)?.config()?;
        let mut quick = RunConfig::preset("tmaze-quick")?;
        quick.train.seed = config.train.seed;
        // A demo differs from another run of its preset only in what lies beside it.
        let same = RunConfig { eval: quick.eval.clone(), ..config } == quick;
        let begun = out.join("metrics.jsonl").exists();
        if !same || (begun && !out.join(DEMONSTRATIONS).exists()) {
            return Err(Error::file(out, "holds a run that is not a demo; choose another --out"));
        }
    } else if !is_remnant(out) {
        // A demo that was killed between removing an earlier one and making its own leaves no run, at most
        // demonstrations and pictures, which are replaced.
        return Ok(());
    }
    RunFolder::remove(out)
}

/// Whether a folder without a run has an empty `checkpoints` and beside it nothing but what demos leave, as a
/// demo that was killed at once leaves it.
fn is_remnant(out: &Path) -> bool {
    let empty = |path: &Path| std::fs::read_dir(path).is_ok_and(|mut all| all.next().is_none());
    let leaves = ["checkpoints", ".lock", DEMONSTRATIONS];
    let ours = |name: &str| leaves.contains(&name) || PICTURES.contains(&name) || name.ends_with(".tmp");
    let all = std::fs::read_dir(out);
    empty(&out.join("checkpoints"))
        && all.is_ok_and(|mut all| all.all(|e| e.is_ok_and(|e| ours(&e.file_name().to_string_lossy()))))
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
