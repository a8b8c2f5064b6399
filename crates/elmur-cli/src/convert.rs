//! `elmur convert`: recordings of any format to the native one or to a folder of `.npz` files, one episode in
//! memory at a time.

use std::collections::BTreeMap;
use std::path::PathBuf;

use elmur_base::{Leaf, Spaces};
use elmur_data::collect::note_settings;
use elmur_data::{
    Column, Episode, EpisodeReader, Limits, NpzWriter, ObservationKey, PartsWriter, Selection, Writer,
};
use elmur_envs::{EnvSpec, Environment, Thinning};
use elmur_train::{Error, Result};
use serde_json::json;

use crate::progress::Bar;
use crate::{Context, note, say};

/// Most bytes of one decoded episode: more than for training, which may keep several.
const LARGEST_EPISODE: u64 = 4 << 30;

/// Options of `elmur convert`.
#[derive(clap::Args)]
pub struct Args {
    /// Dataset to read: an .elmur or .npz file, a folder of either, a LeRobot or Minari folder, an HDF5 file of
    /// Minari, D4RL or robomimic.
    source: PathBuf,
    /// Native file to write, or with --npz or --pieces a folder.
    out: PathBuf,
    /// Write a folder of native files part_0.elmur, part_1.elmur, ... of at most this many MiB each, which every
    /// command reads as one dataset.
    #[arg(long, value_name = "MIB", conflicts_with_all = ["npz", "force"], value_parser = crate::count(1 << 20))]
    pieces: Option<usize>,
    /// Write a folder of train_data_N.npz with obs (of several observations obs/NAME), action, reward and
    /// done.
    #[arg(long)]
    npz: bool,
    #[command(flatten)]
    what: What,
    /// The recordings are of this environment: take its spaces where the format does not tell them, and note its
    /// name, so that policies are judged in it. Where its settings thin pictures (MIKASA-Robo: render,
    /// levels), those of the recordings are thinned alike.
    #[arg(long, value_name = "NAME")]
    env: Option<String>,
    /// Change a setting of that environment, and note it; give it once per setting.
    #[arg(long, value_name = "KEY=VALUE", requires = "env")]
    set: Vec<String>,
    /// Replace a dataset that is there.
    #[arg(long)]
    force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// What to read of a dataset.
#[derive(clap::Args)]
pub struct What {
    /// Read these observations, separated by commas, in this order; all of them if none are given.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    keys: Vec<String>,
    /// Take actions from this feature (LeRobot).
    #[arg(long, value_name = "NAME")]
    action_key: Option<String>,
    /// Read the episodes of this list only (robomimic).
    #[arg(long, value_name = "NAME")]
    mask: Option<String>,
    /// Cut episodes of a D4RL file after this many steps; 1000 by default in files without `timeouts`.
    #[arg(long, value_name = "STEPS", value_parser = crate::count(1 << 32))]
    step_limit: Option<usize>,
}

impl What {
    /// The choice that the options make.
    pub fn selection(&self) -> Selection {
        Selection {
            keys: self.keys.clone(),
            action_key: self.action_key.clone(),
            mask: self.mask.clone(),
            step_limit: self.step_limit,
        }
    }
}

/// Runs `elmur convert`.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    if let (Ok(from), Ok(to)) = (args.source.canonicalize(), args.out.canonicalize())
        && from == to
    {
        return Err(Error::file(&args.out, "the dataset to read; write to another name"));
    }
    let limits = Limits { inflated: LARGEST_EPISODE, ..Limits::default() };
    let environment = args.env.as_ref().map(|name| environment(name, &args.set, context)).transpose()?;
    let thinning = environment.as_ref().map_or_else(Thinning::default, |e| e.facts().thinning);
    let known = environment.as_ref().map(|environment| {
        let own = environment.plain().spaces().clone();
        Spaces { observation: thinning.before(&own.observation), action: own.action }
    });
    let reader = EpisodeReader::open(&args.source, known.as_ref(), &args.what.selection(), &limits)?;
    let mut metadata = reader.metadata().clone();
    let mut spaces = reader.spaces().clone();
    if let Some(environment) = &environment {
        check_origin(args, environment, &reader)?;
        metadata.insert("env".to_owned(), environment.name().to_owned());
        let given = |key: &str| args.set.iter().any(|text| text.split('=').next() == Some(key));
        let thins = |key: &str| !thinning.is_none() && THINNING.contains(&key);
        note_settings(environment, |key| given(key) || thins(key), &mut metadata);
        if !thinning.is_none() {
            refuse_thinned(args, reader.metadata())?;
            spaces = environment.plain().spaces().clone();
            ObservationKey::note_names(&environment.facts().observations, &spaces.observation, &mut metadata);
            if Some(reader.spaces()) != known.as_ref() {
                let whole = known.map(|known| known.observation.to_string()).unwrap_or_default();
                let problem = format!(
                    "expected whole pictures of {} to thin, {whole}; the recordings have {}; give the size of \
                     their pictures as --set render=N, and what else they show (--keys, --set)",
                    environment.name(),
                    reader.spaces().observation
                );
                return Err(Error::file(&args.source, problem));
            }
        }
    }
    if let Some(text) = metadata.get("note") {
        note(&format!("note: {text}"));
    }
    if let Some(folder) = args.out.parent() {
        std::fs::create_dir_all(folder)
            .map_err(|e| Error::file(&args.out, format!("{e}; choose another place")))?;
    }
    let mut target = Target::create(args, &spaces, metadata)?;
    let mut bar = Bar::new("converting", 0, reader.len() as u64);
    let mut steps = 0;
    let mut write = || -> elmur_data::Result<()> {
        for i in 0..reader.len() {
            let mut episode = reader.episode(i)?;
            if !thinning.is_none() {
                thin(&mut episode, reader.spaces(), thinning);
            }
            steps += episode.steps();
            target.push(&episode)?;
            bar.update(i as u64 + 1, "episodes", "");
            if context.stop.requested() {
                return Err(elmur_data::Error::Stopped);
            }
        }
        Ok(())
    };
    let written = write();
    bar.finish();
    match written {
        Ok(()) => target.finish()?,
        Err(error) => {
            target.discard();
            return Err(error.into());
        }
    }
    let (episodes, out) = (reader.len(), args.out.display().to_string());
    if args.json {
        say(&json!({ "dataset": out, "episodes": episodes, "steps": steps }).to_string());
    } else {
        say(&format!("{out}: {episodes} episodes, {steps} steps"));
    }
    Ok(())
}

/// Refuses recordings that say that they are of another environment, or whose pictures have another size than those of
/// this one, where they are not thinned.
fn check_origin(args: &Args, environment: &Environment, reader: &EpisodeReader) -> Result<()> {
    let (name, before) = (environment.name(), reader.metadata().get("env"));
    if let Some(before) = before.filter(|before| *before != name) {
        return Err(Error::file(
            &args.source,
            format!("recorded in {before}, not in {name}; leave --env out"),
        ));
    }
    let pictures = |spaces: &Spaces| -> Vec<Vec<usize>> {
        let shape = |leaf: &Leaf<'_>| match leaf {
            Leaf::Bytes { shape } => Some(shape.to_vec()),
            _ => None,
        };
        spaces.observation.leaves().iter().filter_map(shape).collect()
    };
    let (had, has) = (pictures(reader.spaces()), pictures(environment.plain().spaces()));
    if environment.facts().thinning.is_none() && !had.is_empty() && had != has {
        let problem = format!(
            "expected pictures of {has:?}, which {name} has with these settings; the recordings have {had:?}; change \
             the settings with --set"
        );
        return Err(Error::file(&args.source, problem));
    }
    Ok(())
}

/// Settings of an environment that say how its pictures are thinned.
const THINNING: [&str; 3] = ["size", "render", "levels"];

/// Refuses to thin pictures that were thinned when they were recorded or converted: averages of averages are not what
/// the environment shows.
fn refuse_thinned(args: &Args, notes: &BTreeMap<String, String>) -> Result<()> {
    let noted = |key: &str| notes.get(key).filter(|value| *value != "null");
    let is_smaller = noted("render").is_some_and(|render| Some(render) != noted("size"));
    let has_fewer = noted("levels").is_some_and(|levels| levels != "256");
    if !is_smaller && !has_fewer {
        return Ok(());
    }
    let told: Vec<String> =
        THINNING.iter().filter_map(|key| Some(format!("{key}={}", notes.get(*key)?))).collect();
    let problem = format!(
        "expected whole pictures to thin; these were thinned before ({}): leave --env and its settings out, or thin \
         the recordings they were made of",
        told.join(" ")
    );
    Err(Error::file(&args.source, problem))
}

/// Thins the pictures of an episode.
fn thin(episode: &mut Episode, spaces: &Spaces, thinning: Thinning) {
    for (leaf, column) in spaces.observation.leaves().iter().zip(&mut episode.observations) {
        if let (Leaf::Bytes { shape: [_, height, width] }, Column::U8(pixels)) = (leaf, column) {
            *pixels = thinning.thin(pixels, *height, *width);
        }
    }
}

/// The environment of this name, with some settings changed.
fn environment(name: &str, set: &[String], context: &Context) -> Result<Environment> {
    let mut spec = EnvSpec::new(name);
    for text in set {
        let (key, value) = crate::collect::setting(text)?;
        spec = spec.with(key, value);
    }
    Ok(context.registry.find(&spec)?)
}

/// Where episodes go.
enum Target {
    Native(Writer),
    Parts(Box<PartsWriter>),
    Npz(NpzWriter),
}

impl Target {
    fn create(args: &Args, spaces: &Spaces, metadata: BTreeMap<String, String>) -> Result<Self> {
        let out = args.out.clone();
        if let Some(mib) = args.pieces {
            let most = (mib as u64) << 20;
            let parts = PartsWriter::create(out, spaces, metadata, most)?;
            return Ok(Self::Parts(Box::new(parts)));
        }
        if !args.npz {
            let create = if args.force { Writer::replace } else { Writer::create };
            return Ok(Self::Native(create(out, spaces, metadata)?));
        }
        let create = if args.force { NpzWriter::replace } else { NpzWriter::create };
        Ok(Self::Npz(create(out, spaces)?.with_metadata(&metadata)))
    }

    fn push(&mut self, episode: &Episode) -> elmur_data::Result<()> {
        match self {
            Self::Native(writer) => writer.push(episode),
            Self::Parts(writer) => writer.push(episode),
            Self::Npz(writer) => writer.push(episode),
        }
    }

    fn finish(self) -> Result<()> {
        match self {
            Self::Native(writer) => Ok(writer.finish()?),
            Self::Parts(writer) => Ok(writer.finish().map(|_| ())?),
            Self::Npz(writer) => Ok(writer.finish()?),
        }
    }

    fn discard(self) {
        match self {
            Self::Native(writer) => writer.discard(),
            Self::Parts(writer) => writer.discard(),
            Self::Npz(writer) => writer.discard(),
        }
    }
}
