//! The `elmur` command line.

mod bench;
mod inspect;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Policies with external layer memory: train, run and look at them.
#[derive(Parser)]
#[command(name = "elmur", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the models that have a name.
    Presets,
    /// Show what a preset, checkpoint or config.json is: its parts, parameters and the horizon of its memory.
    ///
    /// Example: elmur inspect tmaze
    Inspect(inspect::InspectArgs),
    /// Turn weights of the published Python code into a checkpoint.
    ///
    /// Example: elmur import weights.safetensors --config tmaze --out runs/imported
    Import(inspect::ImportArgs),
    /// Replay traces of the published code and print the largest errors; exits with 1 if any is above tolerance.
    ///
    /// Example: elmur verify crates/elmur-model/tests/golden/*.safetensors
    Verify(verify::Args),
    /// Measure speed, as a ratio to a peer or a limit in the same run.
    Bench {
        #[command(subcommand)]
        what: Bench,
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
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            report(&format!("error: {error}"));
            // 2 for what the user can mend, 1 for the rest.
            ExitCode::from(if matches!(error, elmur_model::Error::Engine(_)) { 1 } else { 2 })
        }
    }
}

fn run(command: Command) -> elmur_model::Result<ExitCode> {
    match command {
        Command::Presets => inspect::list_presets(),
        Command::Inspect(args) => inspect::inspect(&args)?,
        Command::Import(args) => inspect::import(&args)?,
        Command::Verify(args) => return Ok(ExitCode::from(u8::from(!verify::run(&args)?))),
        Command::Bench { what } => match what {
            Bench::Block(args) => bench::block::run(&args)?,
            Bench::Step(args) => bench::policy::step(&args)?,
            Bench::Train(args) => bench::policy::train(&args)?,
        },
    }
    Ok(ExitCode::SUCCESS)
}

/// The one place that writes to standard output. A reader that went away (`| head`) ends the program quietly.
fn say(line: &str) {
    use std::io::Write;
    if writeln!(std::io::stdout(), "{line}").is_err() {
        std::process::exit(0);
    }
}

/// The one place that writes to standard error.
#[allow(clippy::print_stderr)]
fn report(line: &str) {
    eprintln!("{line}");
}
