//! `elmur watch`: an episode as an animated PNG, what was seen beside what the memory did.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use elmur_base::{Kind, Row, Space, Values};
use elmur_data::{Column, is_data, open};
use elmur_plot::{Film, Frame, Picture, SlotSteps};
use elmur_train::{Error, Result, Seeds, Watched, watch};
use serde_json::json;

use crate::plot::{make_folder, plot_error};
use crate::progress::Bar;
use crate::{Context, eval, say, signals};

/// Options of `elmur watch`.
#[derive(clap::Args)]
pub struct Args {
    /// Run or checkpoint that acts, or dataset whose recorded episode is shown.
    what: PathBuf,
    /// Act in this environment; default: the environment the run was trained in. If it is that one, it has the run's
    /// settings, else their defaults (--set).
    #[arg(long)]
    env: Option<String>,
    /// Change a setting of the environment; give it once per setting.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Show this episode: of the test episodes, or of the dataset.
    #[arg(long, value_name = "N", default_value_t = 0)]
    episode: usize,
    /// Act out the test episodes of this run number.
    #[arg(long, value_name = "N", default_value_t = 0)]
    first_run: u32,
    /// Show so many steps per second.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=100))]
    rate: u16,
    /// Show at most this many slots per layer.
    #[arg(long, default_value_t = 8, value_parser = crate::count(64))]
    slots: usize,
    /// Write OUT.png.
    #[arg(long)]
    out: PathBuf,
    /// Replace a film that is there.
    #[arg(long)]
    force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs `elmur watch`.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    // The ending may be given, or left to this.
    let out = if args.out.extension().is_some_and(|e| e == "png") {
        args.out.with_extension("")
    } else {
        args.out.clone()
    };
    let path = PathBuf::from(format!("{}.png", out.display()));
    if path.exists() && !args.force {
        return Err(Error::file(&path, "exists; choose another --out, or replace it with --force"));
    }
    make_folder(&out)?;
    let (film, title, success) = if is_data(&args.what) { recorded(args)? } else { acted(args, context)? };
    let mut bar = Bar::new("painting", 0, film.frames.len() as u64);
    {
        // Nothing is lost: the file is written at the end.
        let _watch = signals::EndAtOnce::new(&context.stop);
        let start = Instant::now();
        elmur_plot::film(&out, &title, &film, &mut |done| {
            if start.elapsed() > Duration::from_secs(2) {
                bar.update(done as u64, "frames", "");
            }
        })
        .map_err(|error| plot_error(&out, error))?;
    }
    bar.finish();
    let (path, frames) = (path.display().to_string(), film.frames.len());
    if args.json {
        say(&json!({"film": path, "steps": frames, "success": success}).to_string());
    } else {
        say(&format!("{path}: {frames} steps{}", outcome(success)));
    }
    Ok(())
}

fn outcome(success: Option<bool>) -> &'static str {
    match success {
        Some(true) => ", solved",
        Some(false) => ", not solved",
        None => "",
    }
}

/// An episode of a policy.
fn acted(args: &Args, context: &Context) -> Result<(Film, String, Option<bool>)> {
    let policy = eval::load(&args.what)?;
    let environment = eval::environment_of(args.env.as_deref(), &args.set, &policy, context)?;
    let seed = Seeds::Test(args.first_run).episode(args.episode);
    let checkpoint = &policy.checkpoint;
    let target = policy.target_return(&environment);
    let watched = watch(&checkpoint.config, &checkpoint.params, &environment, target, seed, &context.stop)?;
    let title = format!(
        "{} in {}, test episode {}{}",
        checkpoint.config.kind(),
        environment.name(),
        args.episode,
        outcome(watched.success)
    );
    Ok((film_of(&watched, &environment.spaces().observation, args), title, watched.success))
}

fn film_of(watched: &Watched, space: &Space, args: &Args) -> Film {
    let mut sum = 0.0;
    let frame = |(step, seen): (usize, &Row)| {
        let reward = watched.rewards.get(step).copied().unwrap_or(0.0);
        sum += reward;
        let caption = format!("step {step}, reward {reward:.2}, return so far {sum:.2}");
        Frame { pictures: pictures(space, seen.values()), caption }
    };
    let frames = watched.observations.iter().enumerate().map(frame).collect();
    let slots = |layer: &elmur_train::WatchedLayer| {
        let steps = |slot: usize| SlotSteps {
            slot,
            read: layer.read.iter().map(|read| read.get(slot).copied().unwrap_or(0.0).into()).collect(),
            written: layer
                .written
                .iter()
                .filter(|(_, other)| *other == slot)
                .map(|(step, _)| *step)
                .collect(),
        };
        layer.busiest(args.slots).into_iter().map(steps).collect()
    };
    Film { frames, memory: watched.layers.iter().map(slots).collect(), rate: args.rate }
}

/// A recorded episode.
fn recorded(args: &Args) -> Result<(Film, String, Option<bool>)> {
    let ignored =
        [("--env", args.env.is_some()), ("--set", !args.set.is_empty()), ("--first-run", args.first_run > 0)];
    if let Some((option, _)) = ignored.iter().find(|(_, given)| *given) {
        let problem =
            format!("expected a policy, for {option}; this is a dataset, whose episodes were acted already");
        return Err(Error::file(&args.what, problem));
    }
    let data = open(&args.what, None)?;
    if args.episode >= data.episodes() {
        let expected = format!("an episode of the dataset, 0 to {}", data.episodes().saturating_sub(1));
        return Err(crate::keys::config("episode", expected, args.episode));
    }
    let episode = data.episode(args.episode)?;
    let steps = episode.rewards.len().min(elmur_train::MAX_WATCHED);
    let leaves = data.spaces().observation.leaves();
    let frame = |step: usize| {
        let sum: f32 = episode.rewards[..=step].iter().sum();
        let caption = format!("step {step}, reward {:.2}, return so far {sum:.2}", episode.rewards[step]);
        let pictures = leaves.iter().zip(&episode.observations);
        let pictures = pictures.flat_map(|(leaf, column)| {
            let width = leaf.len();
            match column {
                Column::U8(bytes) => picture_of(&leaf_shape(leaf), &bytes[step * width..][..width]),
                _ => Vec::new(),
            }
        });
        Frame { pictures: pictures.collect(), caption }
    };
    let frames = (0..steps).map(frame).collect();
    let title = format!("{}, episode {}", file_name(&args.what), args.episode);
    Ok((Film { frames, memory: Vec::new(), rate: args.rate }, title, None))
}

fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
}

fn leaf_shape(leaf: &elmur_base::Leaf<'_>) -> Vec<usize> {
    match leaf {
        elmur_base::Leaf::Bytes { shape } | elmur_base::Leaf::Floats { shape, .. } => shape.to_vec(),
        elmur_base::Leaf::Ints(_) => Vec::new(),
    }
}

/// The pictures among the leaves of an observation.
fn pictures(space: &Space, seen: Values<'_>) -> Vec<Picture> {
    let (mut at, mut all) = (0, Vec::new());
    for leaf in space.leaves().iter().filter(|leaf| leaf.kind() == Kind::Bytes) {
        let bytes = &seen.bytes[at..at + leaf.len()];
        at += leaf.len();
        all.extend(picture_of(&leaf_shape(leaf), bytes));
    }
    all
}

/// Planes [channels, height, width] as pictures: three channels are one in colour, others one in grey each.
fn picture_of(shape: &[usize], planes: &[u8]) -> Vec<Picture> {
    let &[channels, height, width] = shape else { return Vec::new() };
    let size = height * width;
    let together = if channels % 3 == 0 { 3 } else { 1 };
    let picture = |planes: &[u8]| {
        let pixel = |i: usize| (0..3).map(move |c| planes[(c % together) * size + i]);
        Picture { width, height, rgb: (0..size).flat_map(pixel).collect() }
    };
    planes.chunks_exact((size * together).max(1)).map(picture).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn six_channels_are_two_pictures_and_others_are_grey() {
        let planes: Vec<u8> = (0..24).collect();
        let two = picture_of(&[6, 2, 2], &planes);
        assert_eq!((two.len(), &two[0].rgb[..6]), (2, &[0, 4, 8, 1, 5, 9][..]));
        assert_eq!(two[1].rgb[9..], [15, 19, 23]);
        let grey = picture_of(&[2, 2, 6], &planes);
        assert_eq!((grey.len(), &grey[1].rgb[..3]), (2, &[12, 12, 12][..]));
        assert!(picture_of(&[24], &planes).is_empty());
    }
}
