//! `elmur collect`: an expert plays, and what happened goes to disk.

use std::path::PathBuf;

use elmur_base::Stop;
use elmur_data::{Dataset, Episode, Source, Writer, collect as demonstrations, write_npz};
use elmur_envs::popgym::Version;
use elmur_envs::{EnvConfig, Wrappers};
use elmur_train::{Error, Result};

use crate::progress::Bar;
use crate::say;

/// Options of `elmur collect`.
#[derive(clap::Args)]
pub struct Args {
    /// Environment: tmaze, cartpole, or a POPGym task such as popgym-RepeatFirstEasy.
    env: String,
    /// Episodes.
    #[arg(long, default_value_t = 4800)]
    episodes: usize,
    /// T-Maze: corridors are drawn so that an optimal episode takes at most this many steps, minus one.
    #[arg(long, default_value_t = 30)]
    length: u64,
    /// POPGym: rules of this version of the Python package, 1.0.6 or 1.0.7.
    #[arg(long, default_value = "1.0.7", value_name = "VERSION")]
    rules: String,
    /// What to add to observations or change about actions: previous_action, first_step, one_hot or
    /// as_floats, flat_action.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    wrappers: Vec<String>,
    /// Seed, below 2^30; other seeds give other episodes.
    #[arg(long, default_value_t = 0)]
    seed: u32,
    /// Probability of a random action in place of the expert's: marked as not to be imitated, and followed by
    /// how to recover.
    #[arg(long, default_value_t = 0.0)]
    noise: f64,
    /// Threads; 0: one per core. Episodes do not depend on it.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// The file to write (native format), or with --npz the folder.
    #[arg(long)]
    out: PathBuf,
    /// Write the published layout, a folder of train_data_N.npz, instead of one native file.
    #[arg(long)]
    npz: bool,
}

impl Args {
    fn env(&self) -> Result<EnvConfig> {
        let version = Version::find(&self.rules)?;
        let wrappers = Wrappers::named(&self.wrappers)?;
        Ok(EnvConfig { length: self.length, version, wrappers, ..EnvConfig::new(self.env.parse()?) })
    }
}

/// Runs `elmur collect`.
pub fn run(args: &Args, stop: &Stop) -> Result<()> {
    if args.episodes == 0 || args.seed >= 1 << 30 {
        let (key, expected) =
            if args.episodes == 0 { ("episodes", "at least 1") } else { ("seed", "below 2^30") };
        let got = if args.episodes == 0 { "0".to_owned() } else { args.seed.to_string() };
        return Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), got });
    }
    if !(0.0..1.0).contains(&args.noise) {
        let got = args.noise.to_string();
        return Err(Error::Config { key: "noise".to_owned(), expected: "in 0..1".to_owned(), got });
    }
    let env = args.env()?;
    if !args.npz && args.out.exists() && !elmur_data::is_data(&args.out) {
        return Err(Error::file(&args.out, "exists and is not a dataset; choose another --out"));
    }
    let spaces = demonstrations::spaces(&env)?;
    let metadata = demonstrations::metadata(&env, args.seed, args.noise);
    let mut bar = Bar::new("collecting", 0, args.episodes as u64);
    let mut done = 0;
    let mut tick = || {
        done += 1;
        bar.update(done, "episodes", "");
        if stop.requested() { Err(elmur_data::Error::Stopped) } else { Ok(()) }
    };
    let mut collect = |keep: &mut dyn FnMut(Episode) -> elmur_data::Result<()>| {
        demonstrations::collect(&env, args.episodes, args.seed, args.noise, args.threads, |episode| {
            keep(episode)?;
            tick()
        })
    };
    let collected = if args.npz {
        let mut episodes = Vec::new();
        collect(&mut |episode| {
            episodes.push(episode);
            Ok(())
        })
        .and_then(|()| Dataset::from_episodes(spaces, metadata, episodes))
        .and_then(|dataset| write_npz(&args.out, &dataset).and_then(|()| dataset.summary()))
    } else {
        let mut writer = Writer::replace(&args.out, &spaces, metadata)?;
        match collect(&mut |episode| writer.push(&episode)) {
            Ok(()) => writer.finish().and_then(|()| elmur_data::open(&args.out, None)?.summary()),
            // What was written aside is of no use; the file that was there before is untouched.
            Err(error) => {
                writer.discard();
                Err(error)
            }
        }
    };
    let summary = collected?;
    bar.finish();
    say(&format!(
        "{}: {} episodes, {} steps, mean return {:.3} ± {:.3}",
        args.out.display(),
        summary.episodes,
        summary.steps,
        summary.returns.mean,
        summary.returns.sem
    ));
    Ok(())
}
