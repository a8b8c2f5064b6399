//! The `elmur` command line, as a library: a program with environments of its own is
//!
//! ```no_run
//! # struct MyFamily;
//! # impl elmur_envs::Family for MyFamily {
//! #     fn names(&self) -> Vec<String> { Vec::new() }
//! #     fn make(&self, _: &elmur_envs::EnvSpec, _: elmur_envs::Purpose) -> elmur_envs::Result<Box<dyn elmur_envs::Env>> {
//! #         Err(elmur_envs::Error::Finished)
//! #     }
//! # }
//! fn main() -> std::process::ExitCode {
//!     elmur_cli::main(elmur_envs::Registry::builtin().with(MyFamily))
//! }
//! ```
//!
//! and has `collect`, `convert`, `train`, `eval`, `watch`, `sweep`, `demo`, `plot` and all other commands with them.

mod bench;
mod collect;
mod convert;
mod demo;
mod device;
mod eval;
mod export;
mod inspect;
mod keys;
mod plot;
mod progress;
mod signals;
#[cfg(unix)]
mod simulators;
mod sweep;
mod train;
mod verify;
mod watch;

use std::process::ExitCode;

use clap::builder::RangedU64ValueParser;
use clap::{CommandFactory, Parser, Subcommand};
use elmur_base::Stop;
use elmur_envs::Registry;

/// Train, evaluate and inspect policies with external layer memory.
#[derive(Parser)]
#[command(name = "elmur", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print results and errors only: no progress and no notes.
    #[arg(long, short, global = true)]
    quiet: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Collect T-Maze demonstrations, train a small model on them and watch it act after a million steps.
    ///
    /// Example: elmur demo
    Demo(demo::Args),
    /// Record demonstrations by an environment's player.
    ///
    /// Examples:
    ///   elmur collect tmaze --episodes 1000 --out tmaze.elmur
    ///   elmur collect tmaze --set length=90 --out long.elmur
    ///   elmur collect tmaze --episodes 500 --append --out tmaze.elmur
    ///   elmur collect mikasa-RememberColor3 --set tail=5 --episodes 1000 --out color3.elmur
    ///   elmur collect python:CartPole-v1 --set expert=my_module:balance --episodes 100 --out pole.elmur
    #[command(verbatim_doc_comment)]
    Collect(collect::Args),
    /// Convert recordings of any format that can be read to the native format or to a folder of .npz files.
    ///
    /// Videos are decoded once, here; training then reads from disk what it needs.
    ///
    /// Examples:
    ///   elmur convert lerobot/pusht pusht.elmur --keys observation.state,observation.image
    ///   elmur convert ~/.minari/datasets/D4RL/door/human-v2 door.elmur
    ///   elmur convert low_dim.hdf5 lift.elmur --mask train
    ///   elmur convert out/maze.elmur out/maze-npz --npz
    ///   elmur convert color3-npz color3.elmur --env mikasa-RememberColor3
    #[command(verbatim_doc_comment)]
    Convert(convert::Args),
    /// Train a policy by imitation.
    ///
    /// Examples:
    ///   elmur train tmaze-quick
    ///   elmur train tmaze train.batches=1000 --seed 1 --out out/first
    ///   elmur train tmaze policy=bc-lstm
    ///   elmur train small --data recordings/
    ///   elmur train small --env python:my_module:MyEnv --data recordings/
    ///   elmur train out/first/config.json --out out/again
    ///   elmur train --resume out/first
    #[command(verbatim_doc_comment)]
    Train(train::Args),
    /// Evaluate checkpoints on test episodes or on recorded data: mean ± standard error.
    ///
    /// Examples:
    ///   elmur eval out/demo --lengths 9,900,9600
    ///   elmur eval out/tmaze-0 out/tmaze-1 --json
    ///   elmur eval out/tmaze-dt-0 --target-return 0.5
    ///   elmur eval out/own --data recordings/
    ///   elmur eval out/own --env python:my_module:MyEnv --set workers=4
    #[command(verbatim_doc_comment)]
    Eval(eval::Args),
    /// Act out an episode, or take a recorded one, and write it as an animated PNG: what was seen, and what the
    /// memory did.
    ///
    /// Examples:
    ///   elmur watch out/color3 --episode 3 --out out/color3-episode-3
    ///   elmur watch color3.elmur --out out/demonstration
    #[command(verbatim_doc_comment)]
    Watch(watch::Args),
    /// Train and evaluate many runs from one file, and make the table of their scores.
    ///
    /// Examples:
    ///   elmur sweep run runs/sweep-example.json --jobs 2
    ///   elmur sweep status runs/sweep-example.json
    ///   elmur sweep report runs/sweep-example.json
    #[command(subcommand, verbatim_doc_comment)]
    Sweep(sweep::Sweep),
    /// Install simulators that environments need, and try whether they work.
    ///
    /// Examples:
    ///   elmur simulators install mikasa /opt/mikasa
    ///   ELMUR_MIKASA=/opt/mikasa elmur simulators check
    #[cfg(unix)]
    #[command(subcommand, verbatim_doc_comment)]
    Simulators(simulators::Simulators),
    /// Draw results of `elmur eval --json` and of runs.
    #[command(subcommand)]
    Plot(plot::Plot),
    /// List the built-in presets and policies.
    Presets {
        /// Print JSON lines.
        #[arg(long)]
        json: bool,
    },
    /// Show what a preset, checkpoint, config.json, run or dataset is.
    ///
    /// Examples:
    ///   elmur inspect tmaze --keys
    ///   elmur inspect tmaze policy=dt --keys
    ///   elmur inspect out/demo
    ///   elmur inspect out/demo/demonstrations.elmur
    #[command(verbatim_doc_comment)]
    Inspect(inspect::InspectArgs),
    /// Turn weights of the published Python code into a checkpoint.
    ///
    /// Example: elmur import weights.safetensors --config tmaze --out runs/imported
    Import(inspect::ImportArgs),
    /// Write a policy for others to use.
    #[command(subcommand)]
    Export(export::Export),
    /// Replay traces of the published code and of POPGym; exits with 1 if any error is above tolerance.
    ///
    /// Examples:
    ///   elmur verify crates/elmur-model/tests/golden/*.safetensors
    ///   elmur verify crates/elmur-envs/tests/popgym/*.json.gz
    #[command(verbatim_doc_comment)]
    Verify(verify::Args),
    /// Measure speed. Limits are measured in the same run, so that ratios hold on a noisy machine; rows have
    /// the form of the peers' that they are compared with.
    Bench {
        #[command(subcommand)]
        what: Bench,
    },
    /// Print a script that completes elmur's commands in a shell.
    ///
    /// Example: elmur completions bash > ~/.local/share/bash-completion/completions/elmur
    Completions {
        /// The shell to complete commands in.
        shell: clap_complete::Shell,
    },
}

#[derive(Subcommand)]
enum Bench {
    /// Measure one transformer block: a training step against its matrix products alone, and one token at
    /// batch 1.
    ///
    /// Example: elmur bench block --json
    Block(bench::block::Args),
    /// Measure the convolutions of the published image encoder, forward and backward.
    ///
    /// Example: elmur bench conv --images 1280 --json
    Conv(bench::conv::Args),
    /// Measure one environment step of a whole model, at batch 1 and 100.
    ///
    /// Examples:
    ///   elmur bench step --json
    ///   elmur bench step --policy bc-lstm
    #[command(verbatim_doc_comment)]
    Step(bench::policy::StepArgs),
    /// Measure one training batch of a whole model: for ELMUR 3 segments, 3 optimizer steps.
    ///
    /// Examples:
    ///   elmur bench train --json
    ///   elmur bench train --policy dt --preset popgym-RepeatFirstEasy
    #[command(verbatim_doc_comment)]
    Train(bench::policy::TrainArgs),
    /// Measure training and acting of the T-Maze model here and in PyTorch and ONNX Runtime, in alternating rounds.
    ///
    /// Example: elmur bench compare --peer-python venv/bin/python
    Compare(bench::compare::Args),
    /// Measure all policies side by side: parameters, one training batch, one environment step.
    ///
    /// Example: elmur bench policies --preset tmaze
    Policies(bench::policies::Args),
    /// Measure a session of many rows when only a few of them act, are reset, saved or restored.
    ///
    /// Example: elmur bench bank --preset remember-color --no-images --rows 1000
    Bank(bench::bank::Args),
    /// Measure steps per second of environments (POPGym's, or --env NAME), with random actions and resets.
    ///
    /// Examples:
    ///   elmur bench envs --json
    ///   elmur bench envs --env python:CartPole-v1 --rows 2
    #[command(verbatim_doc_comment)]
    Envs(bench::envs::Args),
    /// Measure how fast batches of a run's data come, without training on them.
    ///
    /// Example: elmur bench data popgym-RepeatFirstEasy data.stream=true
    Data(bench::data::Args),
    /// Measure how fast recordings are read: megabytes per second of their files and of their numbers.
    ///
    /// Example: elmur bench read recordings/
    Read(bench::read::Args),
}

/// What all commands share.
struct Context {
    /// The environments that are known by name.
    registry: Registry,
    /// Requested by the first signal.
    stop: Stop,
}

/// Runs the command line of this process with the environments of a registry.
pub fn main(registry: Registry) -> ExitCode {
    run_from(std::env::args_os(), registry)
}

/// Runs a command line, given as the name of the program and its arguments, with the environments of a
/// registry. A mistake in the arguments ends the process, as does a request for help.
pub fn run_from<A>(args: impl IntoIterator<Item = A>, registry: Registry) -> ExitCode
where
    A: Into<std::ffi::OsString> + Clone,
{
    let cli = Cli::try_parse_from(args).unwrap_or_else(|error| refuse(&error));
    progress::set_quiet(cli.quiet);
    let context = Context { registry, stop: Stop::default() };
    context.registry.stop_with(&context.stop);
    // Other commands have nothing to save and no process to end: signals end them at once.
    let saves = matches!(
        cli.command,
        Command::Demo(_)
            | Command::Collect(_)
            | Command::Convert(_)
            | Command::Train(_)
            | Command::Eval(_)
            | Command::Watch(_)
            | Command::Sweep(sweep::Sweep::Run(_))
    );
    #[cfg(unix)]
    let saves = saves || matches!(cli.command, Command::Simulators(_));
    if saves && let Err(error) = signals::listen(&context.stop) {
        report(&format!(
            "warning: could not install signal handlers; Ctrl-C will not save a checkpoint: {error}"
        ));
    }
    let result = run(cli.command, &context);
    context.registry.incidents().iter().for_each(|line| note(line));
    match result {
        Ok(code) => code,
        Err(error) => {
            report(&format!("error: {error}"));
            ExitCode::from(code_of(&error, &context.stop))
        }
    }
}

/// Ends the process because of a mistake in the arguments: a bad value in one line, like other mistakes.
fn refuse(error: &clap::Error) -> ! {
    use clap::error::ErrorKind::{InvalidValue, ValueValidation};
    if matches!(error.kind(), InvalidValue | ValueValidation) {
        let text = error.to_string();
        let told = text.lines().take(1).chain(text.lines().filter(|line| line.contains("[possible values")));
        report(&told.map(str::trim).collect::<Vec<_>>().join(" "));
        std::process::exit(2);
    }
    error.exit()
}

/// 2 for what the user can mend, 128 + n after signal n, 1 for the rest: divergence, a full disk.
fn code_of(error: &elmur_train::Error, stop: &Stop) -> u8 {
    use elmur_train::Error;
    match error {
        Error::Stopped => 128 + stop.signal() as u8,
        Error::Diverged { .. } | Error::Model(elmur_model::Error::Engine(_)) => 1,
        error if is_exhausted(error) => 1,
        _ => 2,
    }
}

/// Whether an error is about a disk that is full or a machine that has no more of something.
fn is_exhausted(error: &elmur_train::Error) -> bool {
    use elmur_base::Error::Io;
    use std::io::ErrorKind::{FileTooLarge, OutOfMemory, QuotaExceeded, StorageFull};
    let cause = match error {
        elmur_train::Error::Base(Io { cause, .. })
        | elmur_train::Error::Model(elmur_model::Error::Base(Io { cause, .. }))
        | elmur_train::Error::Data(elmur_data::Error::Base(Io { cause, .. })) => cause,
        _ => return false,
    };
    matches!(cause.kind(), StorageFull | QuotaExceeded | FileTooLarge | OutOfMemory)
}

fn run(command: Command, context: &Context) -> elmur_train::Result<ExitCode> {
    match command {
        Command::Demo(args) => return demo::run(&args, context),
        Command::Collect(args) => collect::run(&args, context)?,
        Command::Convert(args) => convert::run(&args, context)?,
        Command::Train(args) => return train::run(&args, context),
        Command::Eval(args) => eval::run(&args, context)?,
        Command::Watch(args) => watch::run(&args, context)?,
        Command::Sweep(what) => return sweep::run(&what, context),
        #[cfg(unix)]
        Command::Simulators(what) => simulators::run(&what, context)?,
        Command::Plot(what) => plot::run(&what)?,
        Command::Presets { json } => inspect::list_presets(json),
        Command::Inspect(args) => inspect::inspect(&args, context)?,
        Command::Import(args) => inspect::import(&args)?,
        Command::Export(what) => export::run(&what)?,
        Command::Verify(args) => return Ok(ExitCode::from(u8::from(!verify::run(&args)?))),
        Command::Bench { what } => match what {
            Bench::Block(args) => bench::block::run(&args)?,
            Bench::Conv(args) => bench::conv::run(&args)?,
            Bench::Step(args) => bench::policy::step(&args, context)?,
            Bench::Train(args) => bench::policy::train(&args, context)?,
            Bench::Compare(args) => bench::compare::run(&args)?,
            Bench::Policies(args) => bench::policies::run(&args, context)?,
            Bench::Data(args) => bench::data::run(&args, context)?,
            Bench::Read(args) => bench::read::run(&args)?,
            Bench::Bank(args) => bench::bank::run(&args, context)?,
            Bench::Envs(args) => bench::envs::run(&args, context)?,
        },
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut completed(context), "elmur", &mut script);
            say(String::from_utf8_lossy(&script).trim_end());
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The commands with the names of presets, policies and environments as values, for shells to complete.
fn completed(context: &Context) -> clap::Command {
    use clap::builder::PossibleValuesParser;
    // Values live as long as the process, which ends when they are printed.
    let values = |names: Vec<String>| PossibleValuesParser::new(names.into_iter().map(|name| &*name.leak()));
    let presets = values(elmur_train::RunConfig::preset_names());
    let envs = values(context.registry.names());
    let names = || elmur_train::PolicyName::all().map(|policy| policy.name());
    let (policies, changes) =
        (values(names().collect()), values(names().map(|name| format!("policy={name}")).collect()));
    let with = |command: clap::Command, name: &str, values: &PossibleValuesParser| {
        // Not `mut_arg`, which would move the argument behind all others.
        command.mut_args(|arg| match arg.get_id() == name {
            true => arg.value_parser(values.clone()),
            false => arg,
        })
    };
    Cli::command()
        .mut_subcommand("train", |command| with(with(command, "preset", &presets), "overrides", &changes))
        .mut_subcommand("inspect", |command| with(with(command, "what", &presets), "overrides", &changes))
        .mut_subcommand("bench", |command| {
            command.mut_subcommands(|command| with(with(command, "preset", &presets), "policy", &policies))
        })
        .mut_subcommand("collect", |command| with(command, "env", &envs))
        .mut_subcommand("eval", |command| with(command, "env", &envs))
        .mut_subcommand("watch", |command| with(command, "env", &envs))
}

/// Parses a number from 1 to `most`.
fn count(most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(1..=most)
}

/// Reads how weights are kept.
fn weights(name: &str) -> Result<elmur_model::session::Weights, String> {
    match name {
        "f32" => Ok(elmur_model::session::Weights::F32),
        "bf16" => Ok(elmur_model::session::Weights::Bf16),
        _ => Err("expected f32 or bf16".to_owned()),
    }
}

/// Parses a number of threads; 0 means as many as are granted.
fn threads() -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(0..=elmur_pool::MAX_THREADS as u64)
}

/// The one place that writes to standard output. A reader that went away (`| head`) ends the program quietly.
fn say(line: &str) {
    use std::io::Write;
    if let Err(error) = writeln!(std::io::stdout(), "{line}") {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        report(&format!("error: standard output: {error}"));
        std::process::exit(1);
    }
}

/// Writes to standard error. Where nobody listens, the work goes on.
fn report(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// [`report`] for what `--quiet` leaves out.
fn note(line: &str) {
    if !progress::is_quiet() {
        report(line);
    }
}
