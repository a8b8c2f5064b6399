//! The `elmur` command line.

mod bench;

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
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> elmur_model::Result<ExitCode> {
    match command {
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
