//! Scores of several policies in many tasks: a row per task, a mark per policy.

use std::path::Path;

use super::canvas::{Canvas, Type};
use super::chart::{Axis, GRID, Look};
use super::{EDGE, Error, Key, LABEL, MARGIN, Result, TICK, WIDTH, heading, legend, pen, snap};

/// The scores of one policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Dots {
    /// Name in the legend.
    pub name: String,
    /// (score, standard error) in each row; none where nothing was measured.
    pub points: Vec<Option<(f64, f64)>>,
}

/// Height of a mark's line; rows are as high as their marks need.
const LINE: f32 = 6.0;

/// Scores by task: a row per name in `rows`, in it a mark with its standard error for each of `series`, one below the
/// other, so that equal scores do not hide each other.
pub fn scores(
    path: impl AsRef<Path>,
    title: &str,
    x_label: &str,
    rows: &[String],
    series: &[Dots],
) -> Result<()> {
    if let Some(dots) = series.iter().find(|dots| dots.points.len() != rows.len()) {
        let got = format!("{} of `{}`", dots.points.len(), dots.name);
        return Err(Error::input(title, format!("{} scores", rows.len()), got));
    }
    let drawn = |point: &Option<(f64, f64)>| point.filter(|(score, _)| score.is_finite());
    let error = |error: f64| if error.is_finite() { error.max(0.0) } else { 0.0 };
    let known = || series.iter().flat_map(|dots| dots.points.iter().filter_map(drawn));
    let ends = known().flat_map(|(score, sem)| [score - error(sem), score + error(sem)]);
    // From zero on, so that small differences do not look large.
    let zero = known().next().map(|_| 0.0);
    let Some(x) = Axis::new(x_label, false, ends.chain(zero)) else { return Err(Error::empty(title)) };

    let mut canvas = Canvas::new()?;
    let names: Vec<String> = rows.iter().map(|name| canvas.fit(name, TICK, 280.0)).collect();
    let longest = names.iter().map(|name| canvas.text_width(name, TICK)).fold(0.0, f32::max);
    let (left, right) = (MARGIN + longest + 10.0, WIDTH - MARGIN);
    let place = |score: f64| x.at(score).map(|at| left + at * (right - left));
    let keys: Vec<Key> = series
        .iter()
        .enumerate()
        .map(|(i, dots)| {
            let empty = dots.points.iter().filter_map(drawn).next().is_none();
            let name = if empty { format!("{} (no data)", dots.name) } else { dots.name.clone() };
            Key::new(name, 12.0, move |canvas, x, y| Look(i).mark(canvas, (x + 6.0, y)))
        })
        .collect();
    let below = heading(&mut canvas, title, WIDTH);
    let top = legend(&mut canvas, &keys, below, WIDTH) + 8.0;
    let high = (LINE * series.len() as f32 + 8.0).max(18.0);
    let bottom = top + high * rows.len() as f32;
    for (score, label) in &x.ticks {
        let Some(at) = place(*score).map(snap) else { continue };
        canvas.line(&[(at, top), (at, bottom)], pen(GRID, 1.0));
        canvas.text((at, bottom + 16.0), label, Type { anchor: 0.5, ..TICK });
    }
    for (row, name) in names.iter().enumerate() {
        let y = top + high * row as f32;
        canvas.line(&[(left, snap(y)), (right, snap(y))], pen(GRID, 1.0));
        canvas.text((left - 10.0, y + high / 2.0), name, Type { anchor: 1.0, ..TICK });
        for (i, dots) in series.iter().enumerate() {
            let Some((score, sem)) = drawn(&dots.points[row]) else { continue };
            let at = y + high / 2.0 + LINE * (i as f32 - (series.len() - 1) as f32 / 2.0);
            let (low, more) = (place(score - error(sem)), place(score + error(sem)));
            if let (Some(low), Some(more)) = (low, more) {
                canvas.line(&[(low, at), (more, at)], pen(Look(i).pen().color, 1.3));
            }
            if let Some(x) = place(score) {
                Look(i).mark(&mut canvas, (x, at));
            }
        }
    }
    canvas.line(&[(left, bottom), (right, bottom)], pen(EDGE, 1.0));
    let label = canvas.fit(x_label, LABEL, right - left);
    canvas.text(((left + right) / 2.0, bottom + 39.0), &label, Type { anchor: 0.5, ..LABEL });
    canvas.save(path.as_ref(), WIDTH, bottom + 39.0 + MARGIN)
}
