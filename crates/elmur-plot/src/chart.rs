//! Charts with two axes: success by length of the episode, learning curves.

use std::path::Path;

use super::canvas::{Canvas, Pen, Rgb, Type, circle, polygon};
use super::{
    EDGE, Error, INK, Key, LABEL, MARGIN, PALETTE, Result, SOFT, TICK, WHITE, WIDTH, draw_flags,
    flags_height, heading, legend, pen, place_flags, snap,
};

pub(super) const GRID: Rgb = Rgb(228, 231, 236);
const HEIGHT: f32 = 330.0;

/// How often a policy succeeds, by length of the episode.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Name in the legend.
    pub name: String,
    /// (steps in the episode, success rate 0 to 1, its standard error).
    pub points: Vec<(u64, f64, f64)>,
}

/// A vertical line with a label, such as the longest training episode.
#[derive(Debug, Clone, PartialEq)]
pub struct Marker {
    /// Where, in units of the x axis.
    pub x: f64,
    /// Text beside the marker.
    pub label: String,
}

/// Success rate by length of the episode, on a logarithmic axis, with standard errors, vertical `markers` and
/// a line at the chance of guessing one of two. Marks of several curves stand a little apart: at 100% they
/// would hide each other.
pub fn success_by_length(
    path: impl AsRef<Path>,
    title: &str,
    curves: &[Curve],
    markers: &[Marker],
) -> Result<()> {
    let mut rates = curves.iter().flat_map(|c| &c.points).map(|p| p.1).filter(|r| r.is_finite());
    if let Some(rate) = rates.find(|r| !(-1e-6..=1.000001).contains(r)) {
        return Err(Error::input(title, "success rates from 0 to 1", rate));
    }
    let drawn =
        |c: &Curve| -> Vec<_> { c.points.iter().filter(|p| p.0 > 0 && p.1.is_finite()).copied().collect() };
    let drawn: Vec<Vec<(u64, f64, f64)>> = curves.iter().map(drawn).collect();
    let lengths = drawn.iter().flatten().map(|p| p.0 as f64).chain(markers.iter().map(|m| m.x));
    let Some(x) = Axis::new("steps in the episode", true, lengths).filter(|_| !drawn.concat().is_empty())
    else {
        return Err(Error::empty(title));
    };

    let mut canvas = Canvas::new()?;
    let right = WIDTH - MARGIN - 8.0 - canvas.text_width("chance", TICK);
    let mut frame = Frame::new(&canvas, x, Axis::percent("success rate"), right);
    let keys = curves
        .iter()
        .zip(&drawn)
        .enumerate()
        .map(|(i, (c, points))| Look(i).key(&c.name, true, points.is_empty()));
    let height = frame.open(&mut canvas, title, &keys.collect::<Vec<_>>(), markers);
    if let Some(y) = frame.row(0.5) {
        canvas.line(&[(frame.left, y), (frame.right, y)], Pen { color: INK, width: 1.0, dash: &[5.0, 4.0] });
        canvas.text((frame.right + 8.0, y), "chance", TICK);
    }
    let apart = (12.0 / curves.len() as f32).min(3.0);
    for (i, points) in drawn.iter().enumerate() {
        let shift = (i as f32 - (curves.len() - 1) as f32 / 2.0) * apart;
        let place = |x: u64, y: f64| frame.point(x as f64, y.clamp(0.0, 1.0)).map(|(x, y)| (x + shift, y));
        let line: Vec<_> = points.iter().filter_map(|p| place(p.0, p.1)).collect();
        canvas.line(&line, Look(i).pen());
        for &(x, rate, error) in points.iter().filter(|p| p.2.is_finite() && p.2 > 0.0) {
            if let (Some((x, low)), Some((_, high))) = (place(x, rate - error), place(x, rate + error)) {
                let ends = [
                    [(x, low), (x, high)],
                    [(x - 3.5, low), (x + 3.5, low)],
                    [(x - 3.5, high), (x + 3.5, high)],
                ];
                ends.iter().for_each(|ends| canvas.line(ends, pen(Look(i).pen().color, 1.3)));
            }
        }
        line.iter().for_each(|&at| Look(i).mark(&mut canvas, at));
    }
    canvas.save(path.as_ref(), WIDTH, height)
}

/// Curves of `(x, y)`, such as losses over training steps. With `log_y`, values of zero and below are left
/// out.
pub fn learning_curves(
    path: impl AsRef<Path>,
    title: &str,
    x_label: &str,
    y_label: &str,
    curves: &[(String, Vec<(f64, f64)>)],
    log_y: bool,
) -> Result<()> {
    let drawn = |p: &&(f64, f64)| p.0.is_finite() && p.1.is_finite() && (!log_y || p.1 > 0.0);
    let all = || curves.iter().flat_map(|c| &c.1).filter(drawn);
    let x = Axis::new(x_label, false, all().map(|p| p.0));
    let y = Axis::new(y_label, log_y, all().map(|p| p.1));
    let (Some(x), Some(y)) = (x, y) else { return Err(Error::empty(title)) };

    let mut canvas = Canvas::new()?;
    let mut frame = Frame::new(&canvas, x, y, WIDTH - MARGIN - 8.0);
    let named = curves.iter().enumerate();
    let keys = named.map(|(i, (name, points))| Look(i).key(name, false, !points.iter().any(|p| drawn(&p))));
    let height = frame.open(&mut canvas, title, &keys.collect::<Vec<_>>(), &[]);
    for (i, (_, points)) in curves.iter().enumerate() {
        let line: Vec<_> = points.iter().filter(drawn).filter_map(|p| frame.point(p.0, p.1)).collect();
        match line[..] {
            [only] => Look(i).mark(&mut canvas, only),
            _ => canvas.line(&line, Pen { width: 1.8, ..Look(i).pen() }),
        }
    }
    canvas.save(path.as_ref(), WIDTH, height)
}

/// How the curve of this index looks. Colours return after seven, with another mark and dash.
#[derive(Clone, Copy)]
pub(super) struct Look(pub usize);

impl Look {
    pub fn pen(self) -> Pen {
        const DASHES: [&[f32]; 3] = [&[], &[7.0, 3.0], &[2.0, 2.5]];
        let dash = DASHES[self.0 / PALETTE.len() % DASHES.len()];
        Pen { color: PALETTE[self.0 % PALETTE.len()], width: 2.0, dash }
    }

    pub fn mark(self, canvas: &mut Canvas, (x, y): (f32, f32)) {
        // Sizes that look alike: square, triangle, diamond, triangle.
        const CORNERS: [&[(f32, f32)]; 4] = [
            &[(-3.7, -3.7), (3.7, -3.7), (3.7, 3.7), (-3.7, 3.7)],
            &[(0.0, -5.0), (4.8, 3.6), (-4.8, 3.6)],
            &[(0.0, -5.4), (5.4, 0.0), (0.0, 5.4), (-5.4, 0.0)],
            &[(0.0, 5.0), (4.8, -3.6), (-4.8, -3.6)],
        ];
        let path = match self.0 % (CORNERS.len() + 1) {
            0 => circle(x, y, 4.2),
            i => polygon(&CORNERS[i - 1].iter().map(|(dx, dy)| (x + dx, y + dy)).collect::<Vec<_>>(), true),
        };
        // A white edge keeps marks apart where they meet.
        canvas.stroke(path.clone(), pen(WHITE, 2.0));
        canvas.fill(path, self.pen().color);
    }

    fn key(self, name: &str, mark: bool, empty: bool) -> Key {
        let name = if empty { format!("{name} (no data)") } else { name.to_owned() };
        Key::new(name, 27.0, move |canvas, x, y| {
            canvas.line(&[(x, y), (x + 27.0, y)], self.pen());
            if mark {
                self.mark(canvas, (x + 13.5, y));
            }
        })
    }
}

/// One axis: its range, as logarithms if `log`, and where it is labelled. Ticks without a label are minor.
pub(super) struct Axis {
    label: String,
    log: bool,
    low: f64,
    high: f64,
    pub ticks: Vec<(f64, String)>,
}

impl Axis {
    pub fn new(label: &str, log: bool, values: impl Iterator<Item = f64>) -> Option<Axis> {
        let mut axis = Axis { label: label.to_owned(), log, low: 0.0, high: 0.0, ticks: Vec::new() };
        let ends = values.filter_map(|v| axis.scale(v)).map(|v| (v, v));
        (axis.low, axis.high) = ends.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))?;
        axis.ticks = if log { axis.log_ticks() } else { axis.linear_ticks() };
        Some(axis)
    }

    fn percent(label: &str) -> Axis {
        let ticks = [0, 25, 50, 75, 100].map(|p| (f64::from(p) / 100.0, format!("{p}%")));
        Axis { label: label.to_owned(), log: false, low: -0.03, high: 1.03, ticks: ticks.to_vec() }
    }

    /// The value on the axis' scale, if it can be drawn; numbers near the end of f64 would overflow the
    /// arithmetic of ticks.
    fn scale(&self, v: f64) -> Option<f64> {
        let v = if self.log { v.log10() } else { v };
        (v.abs() < 1e100).then_some(v)
    }

    /// Where a value lies: 0 at the low end, 1 at the high end.
    pub fn at(&self, v: f64) -> Option<f32> {
        self.scale(v).map(|v| ((v - self.low) / (self.high - self.low)) as f32)
    }

    fn widen(&mut self, pad: f64) {
        (self.low, self.high) = (self.low - pad, self.high + pad);
    }

    fn linear_ticks(&mut self) -> Vec<(f64, String)> {
        let size = self.low.abs().max(self.high.abs());
        if self.high - self.low <= size * 1e-9 {
            self.widen(if size > 1e-100 { size * 0.5 } else { 1.0 });
        }
        let step = nice_step(self.high - self.low, 5.0);
        self.widen((self.high - self.low) * 0.03);
        let (first, last) = ((self.low / step).ceil(), (self.high / step).floor());
        let values = (0..=(last - first) as usize).map(|i| (first + i as f64) * step);
        values.map(|v| (v, number(v, step))).collect()
    }

    fn log_ticks(&mut self) -> Vec<(f64, String)> {
        self.widen((self.high - self.low) * 0.03);
        // At least two powers of ten, or no one can tell the scale.
        if self.high.floor() - self.low.ceil() < 1.0 {
            (self.low, self.high) = (self.low.floor(), self.high.ceil().max(self.low.floor() + 1.0));
        }
        let (first, last) = (self.low.floor() as i32, self.high.ceil() as i32);
        let every = (last - first) / 9 + 1;
        let mut ticks = Vec::new();
        for (decade, digit) in (first..=last).flat_map(|decade| (1..10).map(move |digit| (decade, digit))) {
            let value = 10f64.powi(decade) * f64::from(digit);
            let named = (digit == 1 && decade % every == 0)
                || (self.high - self.low < 1.5 && [2, 5].contains(&digit));
            if (named || every == 1) && self.at(value).is_some_and(|at| (-1e-6..=1.000001).contains(&at)) {
                ticks.push((value, if named { number(value, value) } else { String::new() }));
            }
        }
        ticks
    }
}

/// A step of 1, 2 or 5 times a power of ten that divides `span` into about `count` parts.
pub fn nice_step(span: f64, count: f64) -> f64 {
    let raw = span / count;
    let power = 10f64.powf(raw.log10().floor());
    power * [1.0, 2.0, 5.0].into_iter().find(|m| m * power >= raw * 0.999).unwrap_or(10.0)
}

/// A tick's number, as exact as its step needs: 0.25, 10, 1.5k, 1M, 1e-5.
pub fn number(v: f64, step: f64) -> String {
    let trimmed = |text: String| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    };
    let size = v.abs();
    if size < step * 1e-6 {
        return "0".to_owned();
    }
    if (step < 0.999e-4 && size < 0.01) || size > 0.999e12 {
        let power = size.log10().floor() + 0.0;
        return format!("{}e{power}", trimmed(format!("{:.2}", v / 10f64.powf(power))));
    }
    let units = [(1e9, "G"), (1e6, "M"), (1e3, "k")];
    let (unit, suffix) = units.into_iter().find(|u| size > 0.999 * u.0).unwrap_or((1.0, ""));
    let decimals = (-(step / unit).log10().floor()).clamp(0.0, 9.0) as usize;
    let text = format!("{:.decimals$}", v / unit);
    if suffix.is_empty() { text } else { trimmed(text) + suffix }
}

/// Two axes and the rectangle between them.
struct Frame {
    x: Axis,
    y: Axis,
    left: f32,
    right: f32,
    top: f32,
    bottom: f32,
}

impl Frame {
    fn new(canvas: &Canvas, x: Axis, y: Axis, right: f32) -> Frame {
        let wide = y.ticks.iter().map(|(_, label)| canvas.text_width(label, TICK)).fold(0.0, f32::max);
        Frame { x, y, left: MARGIN + 28.0 + wide, right, top: 0.0, bottom: 0.0 }
    }

    fn column(&self, x: f64) -> Option<f32> {
        self.x.at(x).map(|at| self.left + at * (self.right - self.left))
    }

    fn row(&self, y: f64) -> Option<f32> {
        self.y.at(y).map(|at| self.bottom - at * (self.bottom - self.top))
    }

    fn point(&self, x: f64, y: f64) -> Option<(f32, f32)> {
        Some((self.column(x)?, self.row(y)?))
    }

    /// Draws everything but the data; returns the height of the picture.
    fn open(&mut self, canvas: &mut Canvas, title: &str, keys: &[Key], markers: &[Marker]) -> f32 {
        let flags = markers.iter().filter_map(|m| Some((self.column(m.x)?, m.label.as_str(), SOFT)));
        let flags = place_flags(canvas, &flags.collect::<Vec<_>>(), self.right);
        let below = heading(canvas, title, WIDTH);
        self.top = legend(canvas, keys, below, WIDTH) + flags_height(&flags) + 8.0;
        self.bottom = self.top + HEIGHT;
        let Frame { left, right, top, bottom, .. } = *self;
        for (y, label) in self.y.ticks.iter().filter_map(|(v, label)| Some((snap(self.row(*v)?), label))) {
            let from = if label.is_empty() { (left - 3.0, left, EDGE) } else { (left, right, GRID) };
            canvas.line(&[(from.0, y), (from.1, y)], pen(from.2, 1.0));
            canvas.text((left - 8.0, y), label, Type { anchor: 1.0, ..TICK });
        }
        for (x, label) in self.x.ticks.iter().filter_map(|(v, label)| Some((snap(self.column(*v)?), label))) {
            if !label.is_empty() {
                canvas.line(&[(x, top), (x, bottom)], pen(GRID, 1.0));
            }
            let long = if label.is_empty() { 3.0 } else { 6.0 };
            canvas.line(&[(x, bottom), (x, bottom + long)], pen(EDGE, 1.0));
            canvas.text((x, bottom + 16.0), label, Type { anchor: 0.5, ..TICK });
        }
        canvas.line(&[(left, bottom), (right, bottom)], pen(EDGE, 1.0));
        if self.y.log {
            canvas.line(&[(left, top), (left, bottom)], pen(EDGE, 1.0));
        }
        let (x_label, y_label) =
            (canvas.fit(&self.x.label, LABEL, right - left), canvas.fit(&self.y.label, LABEL, HEIGHT));
        canvas.text(((left + right) / 2.0, bottom + 39.0), &x_label, Type { anchor: 0.5, ..LABEL });
        canvas.text(
            (MARGIN + 6.0, (top + bottom) / 2.0),
            &y_label,
            Type { anchor: 0.5, angle: -90.0, ..LABEL },
        );
        draw_flags(canvas, &flags, top, bottom);
        bottom + 39.0 + MARGIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers() {
        let labels = |low, high, log| -> Vec<String> {
            let axis = Axis::new("", log, [low, high].into_iter()).unwrap();
            axis.ticks.into_iter().map(|(_, label)| label).filter(|label| !label.is_empty()).collect()
        };
        assert_eq!(labels(9.0, 1e6, true), ["10", "100", "1k", "10k", "100k", "1M"]);
        assert_eq!(labels(30.0, 80.0, true), ["10", "20", "50", "100"]);
        assert_eq!(labels(0.0, 2000.0, false), ["0", "500", "1k", "1.5k", "2k"]);
        assert_eq!(labels(-0.5, 1.0, false), ["-0.5", "0", "0.5", "1.0"]);
        assert_eq!(labels(1e-6, 1e-5, true), ["1e-6", "2e-6", "5e-6", "1e-5"]);
    }
}
