//! The `elmur` command line.

mod bench;
mod collect;
mod demo;
mod device;
mod eval;
mod inspect;
mod plot;
mod progress;
mod train;
mod verify;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use elmur_base::Stop;

/// Policies with external layer memory: train, run and look at them.
#[derive(Parser)]
#[command(name = "elmur", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Collect T-Maze demonstrations, train a small model on them and watch it act after a million steps.
    ///
    /// Example: elmur demo
    Demo(demo::Args),
    /// Record demonstrations by an environment's expert.
    ///
    /// Example: elmur collect tmaze --episodes 1000 --out tmaze.elmur
    Collect(collect::Args),
    /// Train a policy by imitation.
    ///
    /// Examples:
    ///   elmur train tmaze-quick
    ///   elmur train tmaze train.batches=1000 --seed 1 --out out/first
    ///   elmur train --resume out/first
    #[command(verbatim_doc_comment)]
    Train(train::Args),
    /// Evaluate checkpoints on test episodes: mean ± standard error.
    ///
    /// Examples:
    ///   elmur eval out/demo --lengths 9,900,9600
    ///   elmur eval out/tmaze-0 out/tmaze-1 --json
    #[command(verbatim_doc_comment)]
    Eval(eval::Args),
    /// Draw results of `elmur eval --json` and of runs.
    #[command(subcommand)]
    Plot(plot::Plot),
    /// List the built-in presets.
    Presets,
    /// Show what a preset, checkpoint, config.json, run or dataset is.
    ///
    /// Examples:
    ///   elmur inspect tmaze
    ///   elmur inspect out/demo
    ///   elmur inspect out/demo/demonstrations.elmur
    #[command(verbatim_doc_comment)]
    Inspect(inspect::InspectArgs),
    /// Turn weights of the published Python code into a checkpoint.
    ///
    /// Example: elmur import weights.safetensors --config tmaze --out runs/imported
    Import(inspect::ImportArgs),
    /// Replay traces of the published code and of POPGym; exits with 1 if any error is above tolerance.
    ///
    /// Examples:
    ///   elmur verify crates/elmur-model/tests/golden/*.safetensors
    ///   elmur verify crates/elmur-envs/tests/popgym/*.json.gz
    #[command(verbatim_doc_comment)]
    Verify(verify::Args),
    /// Measure speed, as a ratio to a peer or a limit in the same run.
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
    /// One transformer block: training against its matrix products alone, and one token at batch 1.
    ///
    /// Example: elmur bench block --json
    Block(bench::block::Args),
    /// One environment step of a whole model, at batch 1 and 100.
    ///
    /// Example: elmur bench step --json
    Step(bench::policy::StepArgs),
    /// One training batch of a whole model: 3 segments, 3 optimizer steps.
    ///
    /// Example: elmur bench train --json
    Train(bench::policy::TrainArgs),
    /// A bank of many rows of which few act, are reset, saved and restored at a time.
    ///
    /// Example: elmur bench bank --preset remember-color --no-images --rows 1000
    Bank(bench::bank::Args),
    /// Steps per second of POPGym's environments, with random actions and resets.
    ///
    /// Example: elmur bench envs --json
    Envs(bench::envs::Args),
}

fn main() -> ExitCode {
    let stop = Stop::default();
    if let Err(error) = listen(&stop) {
        report(&format!(
            "warning: could not install signal handlers; Ctrl-C will not save a checkpoint: {error}"
        ));
    }
    match run(Cli::parse().command, &stop) {
        Ok(code) => code,
        Err(error) => {
            report(&format!("error: {error}"));
            ExitCode::from(code_of(&error, &stop))
        }
    }
}

/// 2 for what the user can mend, 128 + n after signal n, 1 for the rest.
fn code_of(error: &elmur_train::Error, stop: &Stop) -> u8 {
    use elmur_train::Error;
    match error {
        Error::Stopped => 128 + stop.signal() as u8,
        Error::Diverged { .. } | Error::Model(elmur_model::Error::Engine(_)) => 1,
        _ => 2,
    }
}

/// The first SIGINT or SIGTERM asks to stop; another, a second or more later, ends the program at once. (Some
/// supervisors signal a process and its group; signals within a second count as one.)
fn listen(stop: &Stop) -> std::io::Result<()> {
    use std::sync::atomic::{AtomicU64, Ordering};
    let first = std::sync::Arc::new(AtomicU64::new(0));
    let start = std::time::Instant::now();
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        let (first, stop) = (first.clone(), stop.clone());
        let hear = move || {
            let now = start.elapsed().as_millis() as u64 + 1;
            match first.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed) {
                Err(first) if now >= first + 1000 => signal_hook::low_level::exit(128 + signal),
                _ => stop.request(signal as usize),
            }
        };
        // SAFETY: the handler reads a clock, writes atomics and exits without unwinding: all allowed in a
        // signal handler.
        unsafe { signal_hook::low_level::register(signal, hear)? };
    }
    Ok(())
}

fn run(command: Command, stop: &Stop) -> elmur_train::Result<ExitCode> {
    match command {
        Command::Demo(args) => return demo::run(&args, stop),
        Command::Collect(args) => collect::run(&args, stop)?,
        Command::Train(args) => return train::run(&args, stop),
        Command::Eval(args) => eval::run(&args, stop)?,
        Command::Plot(what) => plot::run(&what)?,
        Command::Presets => inspect::list_presets(),
        Command::Inspect(args) => inspect::inspect(&args)?,
        Command::Import(args) => inspect::import(&args)?,
        Command::Verify(args) => return Ok(ExitCode::from(u8::from(!verify::run(&args)?))),
        Command::Bench { what } => match what {
            Bench::Block(args) => bench::block::run(&args)?,
            Bench::Step(args) => bench::policy::step(&args)?,
            Bench::Train(args) => bench::policy::train(&args)?,
            Bench::Bank(args) => bench::bank::run(&args)?,
            Bench::Envs(args) => bench::envs::run(&args)?,
        },
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "elmur", &mut script);
            say(String::from_utf8_lossy(&script).trim_end());
        }
    }
    Ok(ExitCode::SUCCESS)
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

/// The one place that writes to standard error. Where nobody listens, the work goes on.
fn report(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "{line}");
}
