//! `elmur collect`: an expert plays, and what happened goes to disk.

use std::path::PathBuf;

use elmur_data::{Dataset, Writer, collect as demonstrations, write_npz};
use elmur_envs::{EnvConfig, EnvKind};
use elmur_train::{Error, Result, Stop};

use crate::progress::Bar;
use crate::say;

/// Options of `elmur collect`.
#[derive(clap::Args)]
pub struct Args {
    /// Environment: tmaze or cartpole.
    env: String,
    /// Episodes.
    #[arg(long, default_value_t = 4800)]
    episodes: usize,
    /// T-Maze: corridors are drawn so that an optimal episode takes at most this many steps, minus one.
    #[arg(long, default_value_t = 30)]
    length: u64,
    /// Seed, below 2^30; other seeds give other episodes.
    #[arg(long, default_value_t = 0)]
    seed: u32,
    /// The file to write (native format), or with --npz the folder.
    #[arg(long)]
    out: PathBuf,
    /// Write the published layout, a folder of train_data_<i>.npz, instead of one native file.
    #[arg(long)]
    npz: bool,
}

/// The environment of this name.
pub fn env_kind(name: &str) -> Result<EnvKind> {
    EnvKind::find(name).ok_or_else(|| {
        let names = EnvKind::ALL.map(EnvKind::name);
        let hint = elmur_train::overrides::nearest(name, names.into_iter());
        let hint = hint.map(|near| format!(" (did you mean `{near}`?)")).unwrap_or_default();
        let expected = format!("one of {}{hint}", names.join(", "));
        Error::Config { key: "env".to_owned(), expected, got: name.to_owned() }
    })
}

/// Runs `elmur collect`.
pub fn run(args: &Args, stop: &Stop) -> Result<()> {
    if args.episodes == 0 || args.seed >= 1 << 30 {
        let (key, expected) =
            if args.episodes == 0 { ("episodes", "at least 1") } else { ("seed", "below 2^30") };
        let got = if args.episodes == 0 { "0".to_owned() } else { args.seed.to_string() };
        return Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), got });
    }
    let env = EnvConfig { name: env_kind(&args.env)?, length: args.length };
    if !args.npz && args.out.exists() && Dataset::open(&args.out).is_err() {
        let problem = "exists and is not a dataset; choose another --out".to_owned();
        return Err(Error::File { path: args.out.clone(), problem });
    }
    let (spaces, metadata) = (demonstrations::spaces(&env)?, demonstrations::metadata(&env, args.seed));
    let mut bar = Bar::new("collecting", 0, args.episodes as u64);
    let mut done = 0;
    let mut tick = || {
        done += 1;
        bar.update(done, "episodes", "");
        if stop.requested() { Err(interrupted()) } else { Ok(()) }
    };
    let collected = if args.npz {
        let mut episodes = Vec::new();
        demonstrations::collect(&env, args.episodes, args.seed, |episode| {
            episodes.push(episode);
            tick()
        })
        .and_then(|()| Dataset::from_episodes(spaces, metadata, episodes))
        .and_then(|dataset| write_npz(&args.out, &dataset).map(|()| dataset.summary()))
    } else {
        let mut writer = Writer::create(&args.out, &spaces, metadata)?;
        demonstrations::collect(&env, args.episodes, args.seed, |episode| {
            writer.push(&episode)?;
            tick()
        })
        .and_then(|()| writer.finish())
        .and_then(|()| Ok(Dataset::open(&args.out)?.summary()))
    };
    if stop.requested() {
        // What was written aside is of no use; the file that was there before is untouched.
        let mut aside = args.out.clone().into_os_string();
        aside.push(".tmp");
        let _ = std::fs::remove_file(aside);
        return Err(Error::Stopped);
    }
    let summary = collected?;
    bar.finish();
    say(&format!(
        "{}: {} episodes, {} steps, mean return {:.2}",
        args.out.display(),
        summary.episodes,
        summary.steps,
        summary.returns.mean
    ));
    Ok(())
}

/// Ends a collection from within; the caller knows why.
fn interrupted() -> elmur_data::Error {
    let cause = std::io::Error::from(std::io::ErrorKind::Interrupted);
    elmur_data::Error::Io { path: PathBuf::new(), cause }
}
