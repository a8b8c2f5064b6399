//! `elmur sweep`: many runs from one file, shared by any number of workers, and the table of their scores.

mod claim;
mod file;
mod notes;
mod report;
mod state;
mod table;
mod worker;
mod written;

use std::path::PathBuf;
use std::process::ExitCode;

use elmur_train::Result;
use serde_json::json;

use crate::{Context, say};
use claim::Worker;
use file::Plan;
use state::State;

/// What `elmur sweep` does.
#[derive(clap::Subcommand)]
pub enum Sweep {
    /// Train and evaluate the runs of a sweep: those that nobody has begun, and those that were interrupted.
    ///
    /// Any number of these commands share the work, on one machine or on several with a common folder. Exits with
    /// 0 if all runs are done, 75 if some are left, 1 if some have failed.
    ///
    /// Examples:
    ///   elmur sweep run runs/popgym.json --jobs 8 --device cuda
    ///   elmur sweep run runs/popgym.json --only 'RepeatFirst*seed 0' --limit-minutes 10
    #[command(verbatim_doc_comment)]
    Run(worker::Args),
    /// Say how many runs of a sweep are done, running, waiting and failed.
    ///
    /// Example: elmur sweep status runs/popgym.json
    Status(StatusArgs),
    /// Make the table of scores as Markdown, CSV and picture, of what is done so far.
    ///
    /// Examples:
    ///   elmur sweep report runs/popgym.json
    ///   elmur sweep report runs/popgym.json --out docs/popgym --state docs/popgym/results.json
    #[command(verbatim_doc_comment)]
    Report(report::Args),
}

/// Options of `elmur sweep status`.
#[derive(clap::Args)]
pub struct StatusArgs {
    /// The sweep: a JSON file (see docs/sweeps.md).
    file: PathBuf,
    /// Print JSON lines: one object per run.
    #[arg(long)]
    json: bool,
}

/// Runs `elmur sweep`.
pub fn run(what: &Sweep, context: &Context) -> Result<ExitCode> {
    match what {
        Sweep::Run(args) => return worker::run(args, context),
        Sweep::Status(args) => status(args, context)?,
        Sweep::Report(args) => report::run(args, context)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn status(args: &StatusArgs, context: &Context) -> Result<()> {
    let plan = Plan::read(&args.file, &context.registry)?;
    let (results, worker) = (state::results(&plan)?, Worker::here());
    let states: Vec<State> =
        plan.runs.iter().map(|run| state::state_of(&plan, run, &results, &worker)).collect();
    if args.json {
        for (run, state) in plan.runs.iter().zip(&states) {
            let (word, more) = describe(&plan, run, state);
            say(&json!({"run": plan.label(run), "id": run.id, "state": word, "about": more}).to_string());
        }
        return Ok(());
    }
    let count = |word: &str| {
        plan.runs.iter().zip(&states).filter(|(run, state)| describe(&plan, run, state).0 == word).count()
    };
    let words = ["done", "running", "interrupted", "waiting", "failed"];
    let counts: Vec<String> = words.iter().map(|word| format!("{} {word}", count(word))).collect();
    say(&format!("{}: {} runs: {}", plan.name, plan.runs.len(), counts.join(", ")));
    for (run, state) in plan.runs.iter().zip(&states) {
        let (word, more) = describe(&plan, run, state);
        match state {
            State::Running(_) | State::Interrupted | State::Failed(_) => {
                say(&format!("{word}: {}: {more}", plan.label(run)));
            }
            State::Done | State::Waiting => {}
        }
    }
    Ok(())
}

/// A state in a word, and what else there is to say.
fn describe(plan: &Plan, run: &file::PlannedRun, state: &State) -> (&'static str, String) {
    match state {
        State::Done => ("done", String::new()),
        State::Running(Worker { host, process, .. }) => {
            ("running", format!("{}, by process {process} on {host}", state::progress_of(plan, run)))
        }
        State::Failed(reason) => ("failed", reason.clone()),
        State::Interrupted => ("interrupted", state::progress_of(plan, run)),
        State::Waiting => ("waiting", String::new()),
    }
}
