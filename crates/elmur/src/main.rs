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
}

fn main() -> ExitCode {
    let Cli { command: Command::Bench { what: Bench::Block(args) } } = Cli::parse();
    match bench::block::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// The one place that writes to standard error.
#[allow(clippy::print_stderr)]
fn report(line: &str) {
    eprintln!("{line}");
}
