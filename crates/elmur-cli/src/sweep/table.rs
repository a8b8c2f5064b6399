//! The numbers of a report: a cell per task and column, and sums over groups of tasks.

use elmur_base::Statistics;
use elmur_train::Measure;
use serde_json::Value;

use super::file::Plan;
use super::state::{Results, RunResult, TestScore};

/// The measures by which runs are judged in environments.
const MEASURES: [Measure; 2] = [Measure::Return, Measure::SuccessRate];

/// Scores of one column in one row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cell {
    /// Mean over seeds.
    pub mean: f64,
    /// Standard error of the mean over seeds; of a single seed, over its episodes.
    pub sem: f64,
    /// Number of seeds, or, in a sum, of tasks.
    pub count: usize,
    /// Number of seeds or tasks that there are to be.
    pub planned: usize,
    /// Whether no other column of the row has more.
    pub best: bool,
}

/// A row: a task at one value of the setting that was varied, or the sum over a group of tasks.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Name of the task or group.
    pub name: String,
    /// The setting of the environment that was varied, and its value.
    pub at: Option<(String, Value)>,
    /// What was measured; none if nothing was.
    pub measure: Option<Measure>,
    /// One cell per column of the plan.
    pub cells: Vec<Option<Cell>>,
    /// Return of good play, where scores are returns.
    pub player: Option<f64>,
    /// Numbers from elsewhere, one per column of references.
    pub references: Vec<Option<f64>>,
    /// What the row's runs took, one per column of the plan.
    pub efforts: Vec<Option<Effort>>,
    /// Whether the row is a sum.
    pub is_sum: bool,
}

impl Row {
    /// The row's name with the value of the setting.
    pub fn label(&self) -> String {
        match &self.at {
            Some((key, value)) => format!("{}, {key} {value}", self.name),
            None => self.name.clone(),
        }
    }
}

/// What some runs took, all together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Effort {
    /// Number of runs.
    pub runs: usize,
    /// Batches.
    pub batches: u64,
    /// Seconds of training.
    pub seconds: f64,
}

impl Effort {
    /// That of these runs; none if there are none.
    fn of(runs: &[&RunResult]) -> Option<Self> {
        let one = |run: &&RunResult| Self { runs: 1, batches: run.batches, seconds: run.train_seconds };
        runs.iter().map(one).reduce(Self::and)
    }

    fn and(self, other: Self) -> Self {
        Self {
            runs: self.runs + other.runs,
            batches: self.batches + other.batches,
            seconds: self.seconds + other.seconds,
        }
    }

    /// Mean number of batches of a run.
    pub fn batches_per_run(&self) -> f64 {
        self.batches as f64 / self.runs as f64
    }
}

/// A whole table.
#[derive(Debug)]
pub struct Table {
    /// Tasks, then sums.
    pub rows: Vec<Row>,
    /// What the runs of each column took.
    pub efforts: Vec<Option<Effort>>,
}

impl Table {
    /// The table of all results of a plan's runs.
    pub fn new(plan: &Plan, results: &Results) -> Self {
        let values: Vec<Option<(String, Value)>> = match &plan.evaluate.set {
            Some((key, values)) => values.iter().map(|value| Some((key.clone(), value.clone()))).collect(),
            None => vec![None],
        };
        let mut rows = Vec::new();
        for task in 0..plan.tasks.len() {
            rows.extend(values.iter().map(|at| row(plan, results, task, at.as_ref())));
        }
        for (name, tasks) in &plan.groups {
            for (v, at) in values.iter().enumerate() {
                let of_group: Vec<&Row> = tasks.iter().map(|task| &rows[task * values.len() + v]).collect();
                let sum = sum_of(name, at.clone(), &of_group);
                rows.push(sum);
            }
        }
        let effort = |column: usize| Effort::of(&of_column(plan, results, None, column));
        Self { rows, efforts: (0..plan.columns.len()).map(effort).collect() }
    }
}

/// Results of a column, of one task or all.
fn of_column<'a>(
    plan: &Plan,
    results: &'a Results,
    task: Option<usize>,
    column: usize,
) -> Vec<&'a RunResult> {
    let runs =
        plan.runs.iter().filter(|run| run.column == column && task.is_none_or(|task| task == run.task));
    runs.filter_map(|run| results.get(&run.id)).collect()
}

fn row(plan: &Plan, results: &Results, task: usize, at: Option<&(String, Value)>) -> Row {
    let scores = |column: usize| -> Vec<&TestScore> {
        let runs = of_column(plan, results, Some(task), column);
        runs.into_iter().flat_map(|run| &run.scores).filter(|score| score.at.as_ref() == at).collect()
    };
    let all: Vec<&TestScore> = (0..plan.columns.len()).flat_map(scores).collect();
    let measure = all.first().and_then(|score| MEASURES.into_iter().find(|m| m.key() == score.measure));
    let cell = |column: usize| {
        let scores = scores(column);
        let over = Statistics::of(scores.iter().map(|score| score.score));
        let sem = if scores.len() == 1 { scores[0].sem } else { over.sem };
        let (count, planned) = (scores.len(), plan.seeds.len());
        (count > 0).then_some(Cell { mean: over.mean, sem, count, planned, best: false })
    };
    let mut cells: Vec<Option<Cell>> = (0..plan.columns.len()).map(cell).collect();
    mark_best(&mut cells);
    let player = all.iter().find_map(|score| score.good_return).filter(|_| measure == Some(Measure::Return));
    let references = plan.references.iter().map(|(_, numbers)| numbers[task]).collect();
    let effort = |column: usize| Effort::of(&of_column(plan, results, Some(task), column));
    let efforts = (0..plan.columns.len()).map(effort).collect();
    let (name, at) = (plan.tasks[task].clone(), at.cloned());
    Row { name, at, measure, cells, player, references, efforts, is_sum: false }
}

/// Marks the best of a row: all that look equal to it. A single cell is no winner.
fn mark_best(cells: &mut [Option<Cell>]) {
    let thousandths = |cell: &Cell| (1000.0 * cell.mean).round() as i64;
    let there = || cells.iter().flatten();
    let (Some(most), 2..) = (there().map(thousandths).max(), there().count()) else { return };
    for cell in cells.iter_mut().flatten() {
        cell.best = thousandths(cell) == most;
    }
}

/// Sums over the rows of a group. Standard errors of independent runs add up as squares.
fn sum_of(name: &str, at: Option<(String, Value)>, rows: &[&Row]) -> Row {
    let cell = |column: usize| {
        let cells: Vec<Cell> = rows.iter().filter_map(|row| row.cells[column]).collect();
        let sem = cells.iter().map(|cell| cell.sem.powi(2)).sum::<f64>().sqrt();
        let mean = cells.iter().map(|cell| cell.mean).sum();
        (!cells.is_empty()).then_some(Cell {
            mean,
            sem,
            count: cells.len(),
            planned: rows.len(),
            best: false,
        })
    };
    let columns = rows.first().map_or(0, |row| row.cells.len());
    let mut cells: Vec<Option<Cell>> = (0..columns).map(cell).collect();
    // Sums over different tasks do not compare.
    if cells.iter().flatten().all(|cell| cell.count == cell.planned) {
        mark_best(&mut cells);
    }
    let whole = |numbers: Vec<Option<f64>>| -> Option<f64> { numbers.into_iter().sum() };
    let references = rows.first().map_or(0, |row| row.references.len());
    Row {
        name: format!("sum of {name} ({} tasks)", rows.len()),
        at,
        measure: rows.iter().find_map(|row| row.measure),
        cells,
        player: whole(rows.iter().map(|row| row.player).collect()),
        references: (0..references)
            .map(|i| whole(rows.iter().map(|row| row.references[i]).collect()))
            .collect(),
        efforts: (0..columns)
            .map(|column| rows.iter().filter_map(|row| row.efforts[column]).reduce(Effort::and))
            .collect(),
        is_sum: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(mean: f64, count: usize) -> Option<Cell> {
        Some(Cell { mean, sem: 0.3, count, planned: 2, best: false })
    }

    fn row(cells: Vec<Option<Cell>>, player: Option<f64>) -> Row {
        let (name, references) = ("a".to_owned(), vec![player]);
        let effort =
            |cell: &Option<Cell>| cell.map(|cell| Effort { runs: cell.count, batches: 6, seconds: 1.5 });
        let efforts = cells.iter().map(effort).collect();
        Row { name, at: None, measure: None, cells, player, references, efforts, is_sum: false }
    }

    #[test]
    fn the_best_are_all_that_look_equal() {
        let mut cells = vec![cell(0.5001, 1), None, cell(0.4996, 2), cell(-1.0, 1)];
        mark_best(&mut cells);
        let best: Vec<_> = cells.iter().map(|cell| cell.map(|cell| cell.best)).collect();
        assert_eq!(best, [Some(true), None, Some(true), Some(false)]);
        let mut alone = vec![cell(0.5, 1), None];
        mark_best(&mut alone);
        assert!(!alone[0].unwrap().best);
    }

    #[test]
    fn sums_tell_how_many_tasks_they_are_of_and_compare_only_when_whole() {
        let rows =
            [row(vec![cell(0.5, 2), cell(0.25, 2)], Some(1.0)), row(vec![cell(0.5, 2), None], Some(0.5))];
        let sum = sum_of("x", None, &rows.iter().collect::<Vec<_>>());
        let [Some(a), Some(b)] = sum.cells[..] else { panic!("{sum:?}") };
        assert!((a.sem - (0.18f64).sqrt()).abs() < 1e-12);
        assert_eq!((a.mean, a.count, a.planned, a.best), (1.0, 2, 2, false));
        assert_eq!((b.mean, b.count, b.planned, b.best), (0.25, 1, 2, false));
        assert_eq!((sum.player, sum.references), (Some(1.5), vec![Some(1.5)]));
        let [Some(first), Some(second)] = sum.efforts[..] else { panic!("{:?}", sum.efforts) };
        assert_eq!((first.batches_per_run(), first.seconds), (3.0, 3.0));
        assert_eq!((second.batches_per_run(), second.seconds), (3.0, 1.5));
        let known = row(vec![cell(0.5, 2), cell(0.25, 2)], None);
        let whole = sum_of("x", None, &[&rows[0], &known]);
        assert_eq!(whole.player, None);
        assert!(whole.cells[0].unwrap().best && !whole.cells[1].unwrap().best);
    }
}
