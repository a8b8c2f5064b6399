//! `elmur collect`: an environment's player plays, and what happened goes to disk.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use elmur_base::Stop;
use elmur_data::collect::Demonstrations;
use elmur_data::{Dataset, Episode, NpzWriter, Summary, Writer, is_data, open, wrap};
use elmur_envs::{EnvSpec, Environment, Wrappers};
use elmur_train::{Error, Result};
use serde_json::{Value, json};

use crate::progress::Bar;
use crate::{Context, note, say};

/// Options of `elmur collect`.
#[derive(clap::Args)]
pub struct Args {
    /// Environment: tmaze, cartpole, a POPGym task such as popgym-RepeatFirstEasy, a MIKASA-Robo task such as
    /// mikasa-RememberColor3 (see `elmur simulators`), or one in Python: python:module:Class,
    /// python:file.py:Class or python:GYMNASIUM-ID, with --set expert=module:function.
    #[arg(required_unless_present = "env_option", conflicts_with = "env_option")]
    env: Option<String>,
    /// Environment, as an option instead of the first argument.
    #[arg(long = "env", id = "env_option", value_name = "ENV")]
    env_option: Option<String>,
    /// Record this many episodes.
    #[arg(long, default_value_t = 4800, value_parser = crate::count(1 << 32))]
    episodes: usize,
    /// Change a setting of the environment; give it once per setting. The value may be JSON, such as [1,2].
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// T-Maze: draw corridors of every length up to this one (as --set length=N).
    #[arg(long)]
    length: Option<u64>,
    /// POPGym: follow the rules of this version of the Python package, 1.0.6 or 1.0.7 (as --set version=V).
    #[arg(long, value_name = "VERSION")]
    rules: Option<String>,
    /// Apply these wrappers, separated by commas: previous_action, chosen_cell, first_step, one_hot or
    /// as_floats, flat_action.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    wrappers: Vec<String>,
    /// Use this seed, below 2^30; other seeds give other episodes.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(..1 << 30))]
    seed: u32,
    /// Replace the player's action by a random one with this probability. Random actions are marked as not to
    /// be imitated; the player's next actions show how to recover.
    #[arg(long, default_value_t = 0.0)]
    noise: f64,
    /// Play on this many threads, each with its own environment; environments in Python and simulators run in a
    /// process each. 0: as many as are granted. Episodes do not depend on it.
    #[arg(long, default_value_t = 0, value_parser = crate::threads())]
    threads: usize,
    /// Write this file (native format), or with --npz this folder.
    #[arg(long)]
    out: PathBuf,
    /// Write the published layout, a folder of train_data_N.npz, instead of one native file.
    #[arg(long)]
    npz: bool,
    /// Add the episodes to the dataset that is there; they continue its own.
    #[arg(long, conflicts_with_all = ["npz", "force"])]
    append: bool,
    /// Replace a dataset that is there.
    #[arg(long)]
    force: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl Args {
    fn environment(&self, context: &Context) -> Result<Environment> {
        let name = self.env.as_ref().or(self.env_option.as_ref()).map_or("", String::as_str);
        let mut spec = EnvSpec::new(name).with_wrappers(Wrappers::named(&self.wrappers)?);
        for text in &self.set {
            let (key, value) = setting(text)?;
            spec = spec.with(key, value);
        }
        if let Some(length) = self.length {
            spec = spec.with("length", length);
        }
        if let Some(version) = &self.rules {
            spec = spec.with("version", version.as_str());
        }
        Ok(context.registry.find(&spec)?)
    }
}

/// Splits `KEY=VALUE`; a value is JSON where it is JSON, else a word.
pub fn setting(text: &str) -> Result<(&str, Value)> {
    let expected = "KEY=VALUE, such as length=90";
    let (key, value) = text.split_once('=').ok_or_else(|| crate::keys::config("set", expected, text))?;
    Ok((key, serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()))))
}

/// Runs `elmur collect`.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    if !(0.0..1.0).contains(&args.noise) {
        return Err(crate::keys::config("noise", "in 0..1", args.noise));
    }
    let environment = args.environment(context)?;
    if args.out.exists() && !is_data(&args.out) {
        return Err(Error::file(&args.out, "exists and is not a dataset; choose another --out"));
    }
    let mut target = Target::open(args, &environment)?;
    let first = target.episodes();
    let demonstrations = Demonstrations {
        environment: &environment,
        episodes: first..target.last(args.episodes),
        seed: args.seed,
        noise: args.noise,
        threads: args.threads,
        stop: context.stop.clone(),
    };
    let mut bar = Bar::new("collecting", first as u64, demonstrations.episodes.end as u64);
    let mut done = first as u64;
    let collected = demonstrations.collect(|episode| {
        target.push(&episode, &environment)?;
        done += 1;
        bar.update(done, "episodes", "");
        if context.stop.requested() { Err(elmur_data::Error::Stopped) } else { Ok(()) }
    });
    bar.finish();
    if let Err(error) = collected {
        target.give_up(&demonstrations.episodes);
        return Err(error.into());
    }
    target.finish()?;
    tell(&args.out, &open(&args.out, None)?.summary()?, args.json);
    Ok(())
}

/// A setting that the program did not have when a file was begun is not noted in it later either, unless it has another
/// value than its default.
fn leave_out_new(metadata: &mut BTreeMap<String, String>, environment: &Environment, begun: &Path) {
    let Ok(begun) = open(begun, None) else { return };
    for setting in environment.settings() {
        let is_default = environment.spec().settings.get(setting.key) == Some(&setting.default);
        if is_default && !begun.metadata().contains_key(setting.key) {
            metadata.remove(setting.key);
        }
    }
}

/// Tells that a collection is continued, and which of its episodes are lost.
fn note_resumed(episodes: usize, damage: Option<&elmur_data::Error>) {
    if let Some(damage) = damage {
        note(&format!(
            "the interrupted collection is damaged ({damage}): its first {episodes} episodes are kept, those behind \
             them are recorded again"
        ));
    } else if episodes > 0 {
        note(&format!("going on after {episodes} episodes of an interrupted collection"));
    }
}

fn tell(path: &Path, summary: &Summary, as_json: bool) {
    let Summary { episodes, steps, returns, .. } = summary;
    if as_json {
        let row = json!({
            "dataset": path.display().to_string(), "episodes": episodes, "steps": steps, "return": returns,
            "length": summary.lengths, "terminated": summary.terminated, "truncated": summary.truncated,
        });
        return say(&row.to_string());
    }
    say(&format!(
        "{}: {episodes} episodes, {steps} steps, mean return {:.3} ± {:.3}",
        path.display(),
        returns.mean,
        returns.sem
    ));
}

/// Where episodes go.
enum Target {
    Native { writer: Writer, appended: bool },
    Npz(NpzWriter),
}

impl Target {
    fn open(args: &Args, environment: &Environment) -> Result<Self> {
        let spaces = environment.spaces();
        let (seed, noise, stop) = (args.seed, args.noise, Stop::default());
        let notes = Demonstrations { environment, episodes: 0..0, seed, noise, threads: 0, stop };
        let mut metadata = notes.metadata();
        let wrappers = environment.spec().wrappers;
        if !wrappers.is_none() {
            metadata.insert("wrappers".to_owned(), wrappers.names().join(", "));
        }
        if args.npz {
            let resume = if args.force { NpzWriter::resume_replacing } else { NpzWriter::resume };
            let mut writer = resume(args.out.clone(), spaces, &metadata)?;
            writer.truncate(args.episodes)?;
            note_resumed(writer.episodes(), None);
            return Ok(Self::Npz(writer));
        }
        let mut aside = args.out.clone().into_os_string();
        aside.push(".tmp");
        let begun = if args.append { args.out.as_path() } else { Path::new(&aside) };
        leave_out_new(&mut metadata, environment, begun);
        if args.append && args.out.exists() {
            let writer = Writer::append_to(&args.out)?;
            if writer.spaces() != spaces || *writer.metadata() != metadata {
                let problem = "recorded with another environment, or other settings, wrappers, seed or noise (see \
                               `elmur inspect`); repeat those to append to it, or use another --out";
                return Err(Error::file(&args.out, problem));
            }
            return Ok(Self::Native { writer, appended: true });
        }
        if let Some(folder) = args.out.parent() {
            std::fs::create_dir_all(folder)
                .map_err(|e| Error::file(&args.out, format!("{e}; choose another --out")))?;
        }
        let resume = if args.force { Writer::resume_replacing } else { Writer::resume };
        let mut writer = resume(args.out.clone(), spaces, metadata)?;
        note_resumed(writer.episodes(), writer.damage());
        // Fewer than an interrupted collection had recorded may be wanted now.
        writer.truncate(args.episodes)?;
        Ok(Self::Native { writer, appended: false })
    }

    fn episodes(&self) -> usize {
        match self {
            Self::Native { writer, .. } => writer.episodes(),
            Self::Npz(writer) => writer.episodes(),
        }
    }

    /// Number of the episode after the last.
    fn last(&self, wanted: usize) -> usize {
        match self {
            Self::Native { writer, appended: true } => writer.episodes() + wanted,
            _ => wanted,
        }
    }

    fn push(&mut self, episode: &Episode, environment: &Environment) -> elmur_data::Result<()> {
        let wrappers = environment.spec().wrappers;
        let wrapped;
        let mut episode = episode;
        if !wrappers.is_none() {
            let spaces = environment.plain().spaces().clone();
            let plain = Dataset::from_episodes(spaces, Default::default(), vec![episode.clone()])?;
            let source: Arc<dyn elmur_data::Source> = Arc::new(plain);
            wrapped = wrap(&source, wrappers)?.episode(0)?;
            episode = &wrapped;
        }
        match self {
            Self::Native { writer, .. } => writer.push(episode),
            Self::Npz(writer) => writer.push(episode),
        }
    }

    /// Ends a collection of these episodes that was stopped or failed. What was recorded is kept for the next
    /// try.
    fn give_up(self, wanted: &Range<usize>) {
        let kept = self.episodes();
        match self {
            Self::Native { appended: false, .. } | Self::Npz(_) if kept > 0 => {
                let place = if matches!(self, Self::Npz(_)) { "folder" } else { "file" };
                note(&format!(
                    "{kept} episodes are kept beside the {place}; the same command goes on from there"
                ));
            }
            Self::Native { writer, appended: true } => {
                let added = writer.episodes() - wanted.start;
                note(&format!(
                    "{added} of {} episodes were added; the dataset has {} now",
                    wanted.len(),
                    writer.episodes()
                ));
                writer.discard();
            }
            Self::Native { writer, .. } => writer.discard(),
            Self::Npz(writer) => writer.discard(),
        }
    }

    fn finish(self) -> Result<()> {
        match self {
            Self::Native { writer, .. } => Ok(writer.finish()?),
            Self::Npz(writer) => Ok(writer.finish()?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_one_value_and_may_be_a_list() {
        assert_eq!(setting("sizes=[1,2]").unwrap(), ("sizes", json!([1, 2])));
        assert_eq!(setting("length=90").unwrap(), ("length", json!(90)));
        assert_eq!(setting("name=a,b=c").unwrap(), ("name", json!("a,b=c")));
        assert!(setting("length").unwrap_err().to_string().contains("KEY=VALUE"));
    }
}
