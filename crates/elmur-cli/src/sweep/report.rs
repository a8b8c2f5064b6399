//! `elmur sweep report`: the table of a sweep as Markdown, CSV and a picture, at any time.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use elmur_base::files::write_atomic;
use elmur_plot::Dots;
use elmur_train::{Error, Result};

use super::claim::Worker;
use super::file::{Column, Plan};
use super::state::{self, Results, RunResult, State};
use super::table::{Cell, Row, Table};
use crate::progress::clock;
use crate::{Context, note, say};

/// Options of `elmur sweep report`.
#[derive(clap::Args)]
pub struct Args {
    /// The sweep: a JSON file (see docs/sweeps.md).
    file: PathBuf,
    /// Write report.md, table.csv, scores.svg, scores.png and results.json to this folder; default: that of the
    /// sweep.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Add all results to this file too, such as the sweep's `known`: sweeps that know it do not repeat them.
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
}

/// Runs `elmur sweep report`.
pub fn run(args: &Args, context: &Context) -> Result<()> {
    let plan = Plan::read(&args.file, &context.registry)?;
    let results = state::results(&plan)?;
    let table = Table::new(&plan, &results);
    let out = args.out.as_ref().unwrap_or(&plan.out);
    fs::create_dir_all(out).map_err(|e| Error::io(out, e))?;
    let text = markdown(&plan, &table, &results);
    write_atomic(&out.join("report.md"), text.as_bytes())?;
    write_atomic(&out.join("table.csv"), csv(&plan, &table).as_bytes())?;
    state::write_results(&out.join("results.json"), &plan, &results)?;
    if let Some(path) = &args.state {
        crate::plot::make_folder(path)?;
        state::add_results(path, &plan, &results)?;
    }
    let drawn = draw(&out.join("scores"), &plan, &table)?;
    say(text.trim_end());
    let picture = if drawn { ", scores.svg, scores.png" } else { "" };
    note(&format!("{}: report.md, table.csv, results.json{picture}", out.display()));
    Ok(())
}

/// Names of the columns: the policy, the case, or both, whichever tell them apart.
fn names(plan: &Plan) -> Vec<String> {
    let policies: BTreeSet<&str> = plan.columns.iter().map(|column| &*column.policy).collect();
    let name = |Column { policy, case }: &Column| match case {
        Some(case) if policies.len() == 1 => case.clone(),
        Some(case) => format!("{policy}, {case}"),
        None => policy.clone(),
    };
    plan.columns.iter().map(name).collect()
}

/// Whether any row has the return of good play.
fn has_player(table: &Table) -> bool {
    table.rows.iter().any(|row| row.player.is_some())
}

fn markdown(plan: &Plan, table: &Table, results: &Results) -> String {
    let measures: BTreeSet<&str> =
        table.rows.iter().filter_map(|row| row.measure).map(|measure| measure.name()).collect();
    let measures: Vec<&str> = measures.into_iter().collect();
    let measure = if measures.is_empty() { "score".to_owned() } else { measures.join(" or ") };
    let mut text = format!("# {}\n\n", plan.name);
    text.push_str(&format!(
        "Mean {measure} over {} test episodes per run; ± is the standard error over seeds, or, with one seed (*), \
         over its episodes. The best of a row is bold.\n\n",
        plan.evaluate.episodes
    ));
    let player = has_player(table);
    let mut head = vec!["task".to_owned()];
    head.extend(names(plan));
    head.extend(player.then(|| "player".to_owned()));
    head.extend(plan.references.iter().map(|(name, _)| name.clone()));
    let mut line = |cells: &[String]| {
        let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
        text.push_str(&format!("| {} |\n", cells.join(" | ")));
    };
    line(&head);
    line(&vec!["---".to_owned(); head.len()]);
    let number = |number: Option<f64>| number.map_or_else(|| "-".to_owned(), |number| format!("{number:.3}"));
    for row in &table.rows {
        let mut cells = vec![row.label()];
        cells.extend(row.cells.iter().map(|cell| in_words(*cell, row.is_sum)));
        cells.extend(player.then(|| number(row.player)));
        cells.extend(row.references.iter().map(|reference| number(*reference)));
        line(&cells);
    }
    let effort = |name: &str, words: &dyn Fn(&super::table::Effort) -> String| {
        let mut cells = vec![name.to_owned()];
        cells.extend(table.efforts.iter().map(|e| e.as_ref().map_or_else(|| "-".to_owned(), words)));
        cells.resize(head.len(), String::new());
        cells
    };
    line(&effort("batches per run", &|effort| format!("{:.0}", effort.batches_per_run())));
    line(&effort("time of training, all runs", &|effort| clock(effort.seconds)));
    text.push('\n');
    text.push_str(&missing(plan, results));
    text.push_str(&provenance(plan, results));
    text
}

/// A cell of the table: mean ± standard error, and how many seeds or tasks are in it if not all.
fn in_words(cell: Option<Cell>, is_sum: bool) -> String {
    let Some(Cell { mean, sem, count, planned, best }) = cell else { return "-".to_owned() };
    let star = if count == 1 && !is_sum { "*" } else { "" };
    let mut words = format!("{mean:.3} ± {sem:.3}{star}");
    if best {
        words = format!("**{words}**");
    }
    if count < planned {
        let what = if is_sum { "tasks" } else { "seeds" };
        words.push_str(&format!(" ({count} of {planned} {what})"));
    }
    words
}

/// Most runs that are listed as not begun; of more the number is enough.
const MOST_WAITING: usize = 24;

/// What is not done yet, and why.
fn missing(plan: &Plan, results: &Results) -> String {
    let worker = Worker::here();
    let (mut lines, mut waiting) = (Vec::new(), Vec::new());
    for run in &plan.runs {
        let word = match state::state_of(plan, run, results, &worker) {
            State::Done => continue,
            State::Waiting => {
                waiting.push(format!("- {}: not begun\n", plan.label(run)));
                continue;
            }
            State::Running(_) => format!("running, {}", state::progress_of(plan, run)),
            State::Failed(reason) => format!("failed: {reason}"),
            State::Interrupted => format!("interrupted, {}", state::progress_of(plan, run)),
        };
        lines.push(format!("- {}: {word}\n", plan.label(run)));
    }
    let count = lines.len() + waiting.len();
    match waiting.len() {
        ..=MOST_WAITING => lines.append(&mut waiting),
        many => lines.push(format!("- {many} runs are not begun\n")),
    }
    match count {
        0 => format!("All {} runs are done.\n\n", plan.runs.len()),
        _ => format!("Missing: {count} of {} runs.\n\n{}\n", plan.runs.len(), lines.concat()),
    }
}

/// With which programs, on which machines and when the numbers were made.
fn provenance(plan: &Plan, results: &Results) -> String {
    let done: Vec<&RunResult> = plan.runs.iter().filter_map(|run| results.get(&run.id)).collect();
    let (Some(first), Some(last)) =
        (done.iter().map(|run| &run.finished).min(), done.iter().map(|run| &run.finished).max())
    else {
        return String::new();
    };
    let list = |of: &dyn Fn(&RunResult) -> String| {
        let all: BTreeSet<String> = done.iter().map(|run| of(run)).collect();
        all.into_iter().collect::<Vec<_>>().join("; ")
    };
    let commits =
        list(&|run| run.commit.clone().unwrap_or_else(|| format!("unknown (version {})", run.version)));
    format!(
        "Commits: {commits}. Machines: {}. Finished {first} to {last}.\n",
        list(&|run| run.machine.clone())
    )
}

/// One line per cell.
fn csv(plan: &Plan, table: &Table) -> String {
    let mut head = "kind,task,setting,value,policy,case,measure,mean,sem,count,planned,best,batches,train_seconds,player"
        .split(',')
        .map(str::to_owned)
        .collect::<Vec<_>>();
    head.extend(plan.references.iter().map(|(name, _)| name.clone()));
    let mut lines = vec![head];
    let number = |number: Option<f64>| number.map(|number| number.to_string()).unwrap_or_default();
    for row in &table.rows {
        for (i, (column, cell)) in plan.columns.iter().zip(&row.cells).enumerate() {
            let effort = row.efforts[i];
            let (key, value) =
                row.at.clone().map_or_else(Default::default, |(key, value)| (key, value.to_string()));
            let mut line = vec![
                if row.is_sum { "sum" } else { "task" }.to_owned(),
                row.name.clone(),
                key,
                value,
                column.policy.clone(),
                column.case.clone().unwrap_or_default(),
                row.measure.map(|measure| measure.key().to_owned()).unwrap_or_default(),
                number(cell.map(|cell| cell.mean)),
                number(cell.map(|cell| cell.sem)),
                cell.map_or(0, |cell| cell.count).to_string(),
                planned(plan, row, *cell).to_string(),
                cell.is_some_and(|cell| cell.best).to_string(),
                number(effort.map(|effort| effort.batches_per_run())),
                number(effort.map(|effort| effort.seconds)),
                number(row.player),
            ];
            line.extend(row.references.iter().map(|reference| number(*reference)));
            lines.push(line);
        }
    }
    let quoted = |field: &String| match field.contains([',', '"', '\n']) {
        true => format!("\"{}\"", field.replace('"', "\"\"")),
        false => field.clone(),
    };
    lines.iter().map(|line| line.iter().map(quoted).collect::<Vec<_>>().join(",") + "\n").collect()
}

fn planned(plan: &Plan, row: &Row, cell: Option<Cell>) -> usize {
    cell.map_or(if row.is_sum { 0 } else { plan.seeds.len() }, |cell| cell.planned)
}

/// Draws the scores of tasks as dots; false if there are none yet.
fn draw(path: &Path, plan: &Plan, table: &Table) -> Result<bool> {
    let rows: Vec<&Row> = table.rows.iter().filter(|row| !row.is_sum).collect();
    if rows.iter().all(|row| row.cells.iter().all(Option::is_none)) {
        return Ok(false);
    }
    let mut series: Vec<Dots> = names(plan)
        .into_iter()
        .enumerate()
        .map(|(i, name)| Dots {
            name,
            points: rows.iter().map(|row| row.cells[i].map(|cell| (cell.mean, cell.sem))).collect(),
        })
        .collect();
    let fixed = |numbers: Vec<Option<f64>>| numbers.into_iter().map(|n| n.map(|n| (n, 0.0))).collect();
    if has_player(table) {
        let points = fixed(rows.iter().map(|row| row.player).collect());
        series.push(Dots { name: "player".to_owned(), points });
    }
    for (i, (name, _)) in plan.references.iter().enumerate() {
        let points = fixed(rows.iter().map(|row| row.references[i]).collect());
        series.push(Dots { name: name.clone(), points });
    }
    let measure = rows.iter().find_map(|row| row.measure).map_or("score", |measure| measure.name());
    let labels: Vec<String> = rows.iter().map(|row| row.label()).collect();
    elmur_plot::scores(path, &plan.name, measure, &labels, &series)
        .map_err(|e| crate::plot::plot_error(path, e))?;
    Ok(true)
}
