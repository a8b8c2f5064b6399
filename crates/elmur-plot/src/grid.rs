//! Pictures of coloured cells: heat maps, and what the memory did during an episode.

use std::collections::BTreeMap;
use std::path::Path;

use super::canvas::{Canvas, PathBuilder, Rgb, Type, circle, rect};
use super::chart::{nice_step, number};
use super::{
    EDGE, Error, INK, Key, LABEL, MARGIN, PALETTE, Result, TICK, WHITE, WIDTH, draw_flags, flags_height,
    heading, legend, pen, place_flags, snap,
};

/// What the memory did during one episode.
#[derive(Debug, Clone, PartialEq)]
pub struct Timeline {
    /// `layers[layer][slot]`.
    pub layers: Vec<Vec<SlotRow>>,
    /// Segment in which the cue was shown.
    pub cue: Option<usize>,
    /// Segment in which the policy had to decide.
    pub decision: Option<usize>,
}

/// What happened to one slot, by segment. Segments past the end of a vector are unknown.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SlotRow {
    /// Share of the read attention that went to this slot, 0 to 1.
    pub read: Vec<f64>,
    /// Weight of the new content where the segment's end wrote the slot: 1 where it was replaced, λ where it
    /// was blended.
    pub written: Vec<Option<f64>>,
}

/// Colours of shares from 0 to 1: viridis turned round and opened to white at its light end. Brightness falls
/// in even steps, so order survives greyscale.
const SHADES: [Rgb; 7] = [
    Rgb(250, 249, 236),
    Rgb(222, 233, 168),
    Rgb(148, 208, 118),
    Rgb(52, 171, 130),
    Rgb(38, 126, 142),
    Rgb(60, 78, 138),
    Rgb(64, 14, 88),
];

pub(crate) fn shade(share: f64) -> Rgb {
    let place = share.clamp(0.0, 1.0) * (SHADES.len() - 1) as f64;
    let low = (place as usize).min(SHADES.len() - 2);
    let mix =
        |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * (place - low as f64)).round() as u8;
    let (Rgb(r, g, b), Rgb(r2, g2, b2)) = (SHADES[low], SHADES[low + 1]);
    Rgb(mix(r, r2), mix(g, g2), mix(b, b2))
}

/// A colour to write with on the shade of `share`.
pub(crate) fn ink_on(share: f64) -> Rgb {
    if share < 0.55 { INK } else { WHITE }
}

/// The scale of `shade` up to `most`.
fn color_bar(canvas: &mut Canvas, x: f32, top: f32, bottom: f32, most: f64) {
    let high = bottom - top;
    for i in 0..64 {
        let part = rect(x, top + high * i as f32 / 64.0, 12.0, high / 64.0 + 0.5);
        canvas.fill_cells(part, shade(1.0 - f64::from(i) / 63.0));
    }
    canvas.stroke(rect(x, top, 12.0, high), pen(EDGE, 0.8));
    let parts = if high > 80.0 { 4 } else { 1 };
    for share in (0..=parts).map(|i| f64::from(i) / f64::from(parts)) {
        let label = format!("{}%", (share * most * 1000.0).round() / 10.0);
        canvas.text((x + 18.0, bottom - high * share as f32), &label, TICK);
    }
}

/// A table of shares from 0 to 1, `values[row][column]`, printed as percent on their colour. Missing cells
/// are hatched.
pub fn heat_map(
    path: impl AsRef<Path>,
    title: &str,
    x_label: &str,
    x_names: &[String],
    y_label: &str,
    y_names: &[String],
    values: &[Vec<Option<f64>>],
) -> Result<()> {
    let (rows, columns) = (y_names.len(), x_names.len());
    if values.len() != rows || values.iter().any(|row| row.len() != columns) {
        let got = values.iter().map(|row| row.len().to_string()).collect::<Vec<_>>().join(", ");
        return Err(Error::input(
            title,
            format!("{rows} rows of {columns} values"),
            format!("rows of [{got}]"),
        ));
    }
    let known: Vec<f64> = values.iter().flatten().flatten().copied().filter(|v| v.is_finite()).collect();
    if known.is_empty() {
        return Err(Error::empty(title));
    }
    let mut canvas = Canvas::new()?;
    let (wide, high) = ((620.0 / columns as f32).clamp(38.0, 96.0), (380.0 / rows as f32).clamp(24.0, 46.0));
    let fit =
        |names: &[String]| -> Vec<String> { names.iter().map(|n| canvas.fit(n, TICK, 150.0)).collect() };
    let longest = |names: &[String]| names.iter().map(|n| canvas.text_width(n, TICK)).fold(0.0, f32::max);
    let (x_names, y_names) = (fit(x_names), fit(y_names));
    // Names wider than their column are turned, and then reach down and to the left.
    let long = longest(&x_names);
    let turned = long > wide - 6.0;
    let (down, aside) = if turned { (long * 0.64 + 4.0, long * 0.77 - wide / 2.0) } else { (12.0, 0.0) };
    let left = MARGIN + (8.0 + longest(&y_names)).max(aside);
    let right = left + wide * columns as f32;
    let width = (right + 72.0 + MARGIN).max(440.0);

    let mut top = heading(&mut canvas, title, width);
    if known.len() < rows * columns {
        let key = Key::new("no data", 22.0, |canvas, x, y| hatch(canvas, x, y - 6.0, 22.0, 12.0));
        top = legend(&mut canvas, &[key], top, width);
    }
    let y_label = canvas.fit(y_label, LABEL, width - 2.0 * MARGIN);
    let end = (left - 8.0).max(MARGIN + canvas.text_width(&y_label, LABEL));
    canvas.text((end, top + 14.0), &y_label, Type { anchor: 1.0, ..LABEL });
    top += 30.0;
    let bottom = top + high * rows as f32;

    draw_table(&mut canvas, values, (left, top), (wide, high));
    for (i, name) in y_names.iter().enumerate() {
        canvas.text((left - 8.0, top + high * (i as f32 + 0.5)), name, Type { anchor: 1.0, ..TICK });
    }
    for (j, name) in x_names.iter().enumerate() {
        let (x, y) = (left + wide * (j as f32 + 0.5), bottom + 10.0);
        let style =
            if turned { Type { anchor: 1.0, angle: -40.0, ..TICK } } else { Type { anchor: 0.5, ..TICK } };
        canvas.text((if turned { x + 3.0 } else { x }, y), name, style);
    }
    let below = bottom + down + 22.0;
    let x_label = canvas.fit(x_label, LABEL, width - 2.0 * MARGIN);
    let half = canvas.text_width(&x_label, LABEL) / 2.0;
    canvas.text((((left + right) / 2.0).max(MARGIN + half), below), &x_label, Type { anchor: 0.5, ..LABEL });
    color_bar(&mut canvas, right + 22.0, top, bottom - 1.5, 1.0);
    canvas.save(path.as_ref(), width, below + MARGIN)
}

/// Draws the cells of a heat map from `left` and `top` on, and their numbers as large as the widest allows.
fn draw_table(
    canvas: &mut Canvas,
    values: &[Vec<Option<f64>>],
    (left, top): (f32, f32),
    (wide, high): (f32, f32),
) {
    let known = || values.iter().flatten().flatten().copied().filter(|v| v.is_finite());
    // A rounded 99.6 would read as a perfect score.
    let whole = known().all(|v| (v * 100.0 - (v * 100.0).round()).abs() < 0.05);
    let decimals = usize::from(wide >= 50.0 && !whole);
    let percent = |v: f64| format!("{:.decimals$}%", v * 100.0);
    let widest = known().map(|v| canvas.text_width(&percent(v), LABEL)).fold(1.0, f32::max);
    let size = LABEL.size * ((wide - 8.0) / widest).min(1.0);
    for (i, row) in values.iter().enumerate() {
        for (j, value) in row.iter().enumerate() {
            let (x, y) = (left + wide * j as f32, top + high * i as f32);
            let (wide, high) = (wide - 1.5, high - 1.5);
            let Some(v) = value.filter(|v| v.is_finite()) else {
                hatch(canvas, x, y, wide, high);
                continue;
            };
            canvas.fill(rect(x, y, wide, high), shade(v));
            let style = Type { size, color: ink_on(v), anchor: 0.5, ..LABEL };
            canvas.text((x + wide / 2.0, y + high / 2.0), &percent(v), style);
        }
    }
}

/// A grey cell with thin diagonals: nothing was measured here.
fn hatch(canvas: &mut Canvas, x: f32, y: f32, wide: f32, high: f32) {
    canvas.fill(rect(x, y, wide, high), Rgb(243, 244, 246));
    for k in (1..((wide + high) / 7.0).ceil() as usize).map(|i| i as f32 * 7.0) {
        let ends = [(x + k.min(wide), y + (k - wide).max(0.0)), (x + (k - high).max(0.0), y + k.min(high))];
        canvas.line(&ends, pen(Rgb(205, 209, 216), 0.8));
    }
}

const CUE: Rgb = PALETTE[1];
const DECISION: Rgb = PALETTE[0];
/// Timelines of more segments show the mean of several in a column: narrower than a pixel they could not be
/// seen.
const MAX_COLUMNS: usize = 400;
/// Colours of a timeline; few enough that its cells make a small file.
const LEVELS: f64 = 32.0;
/// Space between layers.
const LAYER_GAP: f32 = 10.0;

/// What the memory did in an episode: a row per slot, a column per segment, attention as colour, writes as
/// dots, and at the foot of each row a bar for what the slot still holds of what was written with the cue: it
/// shrinks with every blend.
pub fn slot_timeline(path: impl AsRef<Path>, title: &str, timeline: &Timeline) -> Result<()> {
    let Timeline { layers, cue, decision } = timeline;
    let segments = layers.iter().flatten().map(|s| s.read.len().max(s.written.len())).max().unwrap_or(0);
    if segments == 0 {
        return Err(Error::empty(title));
    }
    if let Some(event) = [cue, decision].into_iter().flatten().find(|event| **event >= segments) {
        return Err(Error::input(title, format!("cue and decision before segment {segments}"), event));
    }

    let mut canvas = Canvas::new()?;
    let left = MARGIN + canvas.text_width(&layer_name(layers.len()), LABEL) + 34.0;
    let cells = Cells::new(timeline, left, segments);
    let right = cells.column(cells.columns * cells.group);
    let width = (right + 64.0 + MARGIN).max(520.0);
    let events = [(cue, "cue shown", CUE), (decision, "decision", DECISION)];
    let events = events.map(|(at, name, color)| at.map(|at| (cells.middle(at), name, color)));
    let flags =
        place_flags(&canvas, &events.into_iter().flatten().collect::<Vec<_>>(), right.max(left + 90.0));
    let below = heading(&mut canvas, title, width);
    let below = legend(&mut canvas, &slot_keys(timeline, &cells), below, width);
    let top = below + flags_height(&flags).max(20.0) + 2.0;

    let tops = name_slots(&mut canvas, layers, (left - 8.0, top), cells.high);
    let bottom = tops.last().map_or(top, |y| y + cells.high);
    let rows: Vec<_> = layers.iter().flatten().zip(tops).collect();
    cells.draw_reads(&mut canvas, &rows);
    for &(slot, y) in &rows {
        if let Some(cue) = *cue {
            cells.draw_held(&mut canvas, slot, y, cue);
        }
        cells.draw_writes(&mut canvas, slot, y);
    }
    draw_flags(&mut canvas, &flags, top, top - 3.0);
    for (x, _, color) in events.into_iter().flatten() {
        let wide = cells.wide - cells.gap + 3.0;
        canvas.stroke(rect(x - wide / 2.0, top - 2.0, wide, bottom - top + 3.0), pen(color, 1.4));
    }

    let step = nice_step(segments as f64, 8.0).max(1.0);
    for segment in (0..segments).step_by(step as usize) {
        let x = cells.middle(segment);
        canvas.line(&[(x, bottom + 3.0), (x, bottom + 7.0)], pen(EDGE, 1.0));
        canvas.text((x, bottom + 17.0), &number(segment as f64, step), Type { anchor: 0.5, ..TICK });
    }
    let label = match cells.group {
        1 => "segment".to_owned(),
        group => format!("segment (mean of {group} in a column)"),
    };
    canvas.text(((left + right) / 2.0, bottom + 39.0), &label, Type { anchor: 0.5, ..LABEL });
    color_bar(&mut canvas, right + 20.0, top, (bottom - 1.0).min(top + 360.0), cells.most);
    canvas.save(path.as_ref(), width, bottom + 39.0 + MARGIN)
}

fn layer_name(layer: usize) -> String {
    format!("layer {layer}")
}

/// Writes the names of layers and slots left of `right`; returns where each slot's row begins.
fn name_slots(canvas: &mut Canvas, layers: &[Vec<SlotRow>], (right, top): (f32, f32), high: f32) -> Vec<f32> {
    canvas.text((right, top - 12.0), "slot", Type { anchor: 1.0, ..TICK });
    let every = (11.0 / high).ceil() as usize;
    let (mut y, mut tops) = (top, Vec::new());
    for (layer, slots) in layers.iter().enumerate() {
        canvas.text((MARGIN, y + high * slots.len() as f32 / 2.0), &layer_name(layer), LABEL);
        for slot in 0..slots.len() {
            if slot % every == 0 {
                canvas.text((right, y + high / 2.0), &slot.to_string(), Type { anchor: 1.0, ..TICK });
            }
            tops.push(y);
            y += high;
        }
        y += LAYER_GAP;
    }
    tops
}

/// How the cells of a timeline lie and are coloured.
struct Cells {
    left: f32,
    wide: f32,
    high: f32,
    /// Space between columns.
    gap: f32,
    /// Segments in a column.
    group: usize,
    columns: usize,
    /// Attention of the darkest colour.
    most: f64,
    /// Segments of cue and decision; the mean must not hide them, so their columns show them alone.
    events: Vec<usize>,
}

impl Cells {
    fn new(timeline: &Timeline, left: f32, segments: usize) -> Cells {
        let slots = || timeline.layers.iter().flatten();
        let group = segments.div_ceil(MAX_COLUMNS);
        let columns = segments.div_ceil(group);
        let wide = ((WIDTH - MARGIN - 64.0 - left) / columns as f32).min(44.0);
        let high = snap(330.0 / slots().count() as f32).clamp(7.0, 24.0);
        let gap = if wide > 6.0 { 1.0 } else { 0.0 };
        let peak = slots().flat_map(|s| &s.read).copied().filter(|r| r.is_finite()).fold(0.0, f64::max);
        let most = [0.1, 0.2, 0.5].into_iter().find(|&m| peak <= m).unwrap_or(1.0);
        let events = [timeline.cue, timeline.decision].into_iter().flatten().collect();
        Cells { left, wide, high, gap, group, columns, most, events }
    }

    /// Left end of a segment's column.
    fn column(&self, segment: usize) -> f32 {
        self.left + self.wide * (segment / self.group) as f32
    }

    fn middle(&self, segment: usize) -> f32 {
        self.column(segment) + (self.wide - self.gap) / 2.0
    }

    fn mark_radius(&self) -> f32 {
        (self.wide.min(self.high) * 0.27).clamp(1.1, 5.0)
    }

    /// Attention in a column as a share of the darkest colour's, in steps of `LEVELS`.
    fn share(&self, slot: &SlotRow, column: usize) -> Option<f64> {
        let event = self.events.iter().find(|event| *event / self.group == column);
        let segments =
            event.map_or(column * self.group..(column + 1) * self.group, |&event| event..event + 1);
        let reads = segments.filter_map(|segment| slot.read.get(segment)).filter(|read| read.is_finite());
        let (sum, count) = reads.fold((0.0, 0), |(sum, count), read| (sum + read, count + 1));
        let level = |mean: f64| ((mean / self.most).clamp(0.0, 1.0) * LEVELS).round();
        (count > 0).then(|| level(sum / f64::from(count)) / LEVELS)
    }

    /// Draws attention. All cells of one colour are one shape, which keeps the file small.
    fn draw_reads(&self, canvas: &mut Canvas, rows: &[(&SlotRow, f32)]) {
        let mut shapes: BTreeMap<Option<u32>, PathBuilder> = BTreeMap::new();
        for &(slot, y) in rows {
            for column in 0..self.columns {
                let level = self.share(slot, column).map(|share| (share * LEVELS) as u32);
                let (x, wide) = (self.column(column * self.group), self.wide - self.gap);
                if let Some(cell) = rect(x, y, wide, self.high - 1.0) {
                    shapes.entry(level).or_default().push_path(&cell);
                }
            }
        }
        for (level, shape) in shapes {
            let color = level.map_or(Rgb(226, 228, 232), |level| shade(f64::from(level) / LEVELS));
            canvas.fill_cells(shape.finish(), color);
        }
    }

    /// Draws how much of the write at `cue` is left. A blend of weight w keeps 1 - w of what a slot held.
    fn draw_held(&self, canvas: &mut Canvas, slot: &SlotRow, y: f32, cue: usize) {
        let end = self.columns * self.group;
        let (mut held, mut since) = (0.0, cue);
        for segment in cue..=end {
            let weight = slot.written.get(segment).copied().flatten().filter(|w| w.is_finite());
            let Some(weight) = weight.or((segment == end).then_some(1.0)) else { continue };
            let weight = weight.clamp(0.0, 1.0);
            let (x, next) = (self.column(since), self.column(segment));
            if next > x {
                let tall = snap(held as f32 * self.high * 0.3).max(1.0);
                let bar = rect(x, y + self.high - 1.0 - tall, next - x - self.gap, tall);
                canvas.fill_cells(bar.filter(|_| held > 0.005), CUE);
                since = segment;
            }
            held = if segment == cue { weight } else { held * (1.0 - weight) };
        }
    }

    /// Draws writes, unless columns stand for several segments.
    fn draw_writes(&self, canvas: &mut Canvas, slot: &SlotRow, y: f32) {
        for (segment, weight) in slot.written.iter().enumerate().filter(|_| self.group == 1) {
            if let Some(weight) = weight.filter(|w| w.is_finite()) {
                let at = (self.middle(segment), y + (self.high - 1.0) / 2.0);
                let color = self.share(slot, segment).map_or(INK, ink_on);
                write_mark(canvas, at, self.mark_radius(), weight, color);
            }
        }
    }
}

/// Dots smaller than this have no room for a ring.
const RING: f32 = 2.0;

/// A full dot where the slot was replaced; a ring around a smaller dot where some of the old content stayed.
fn write_mark(canvas: &mut Canvas, (x, y): (f32, f32), radius: f32, weight: f64, color: Rgb) {
    if weight > 0.995 || radius < RING {
        return canvas.fill(circle(x, y, radius), color);
    }
    canvas.stroke(circle(x, y, radius - 0.5), pen(color, 1.0));
    canvas.fill(circle(x, y, (radius - 1.0) * weight.clamp(0.0, 1.0) as f32), color);
}

/// The signs that occur in a timeline.
fn slot_keys(timeline: &Timeline, cells: &Cells) -> Vec<Key> {
    let mut keys = vec![Key::new("attention paid to the slot", 30.0, |canvas, x, y| {
        for i in 0..5 {
            canvas.fill_cells(rect(x + 6.0 * i as f32, y - 5.0, 6.0, 10.0), shade(f64::from(i) / 4.0));
        }
    })];
    let weights = timeline.layers.iter().flatten().flat_map(|s| &s.written).flatten().copied();
    let weights: Vec<f64> = weights.filter(|w| w.is_finite() && cells.group == 1).collect();
    let radius = if cells.mark_radius() < RING { 1.1 } else { 5.0 };
    let dot = |weight| move |canvas: &mut Canvas, x, y| write_mark(canvas, (x + 5.0, y), radius, weight, INK);
    if radius < RING && !weights.is_empty() {
        keys.push(Key::new("slot written", 10.0, dot(1.0)));
    } else {
        let (whole, part) = (weights.iter().find(|w| **w > 0.995), weights.iter().find(|w| **w <= 0.995));
        keys.extend(whole.map(|&w| Key::new("slot replaced", 10.0, dot(w))));
        keys.extend(part.map(|&w| Key::new("new content blended in", 10.0, dot(w))));
    }
    if timeline.cue.is_some() {
        let bar = |canvas: &mut Canvas, x, y| canvas.fill(rect(x, y - 2.5, 22.0, 5.0), CUE);
        keys.push(Key::new("what is left of the cue's write", 22.0, bar));
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shades_darken_and_ink_stands_out() {
        // Brightness as greyscale printers see it (Rec. 709).
        let luma = |Rgb(r, g, b)| 0.2126 * f64::from(r) + 0.7152 * f64::from(g) + 0.0722 * f64::from(b);
        for i in 1..=100 {
            let share = f64::from(i) / 100.0;
            assert!(luma(shade(share)) < luma(shade(share - 0.01)), "{share}");
            assert!((luma(shade(share)) - luma(ink_on(share))).abs() > 95.0, "{share}");
        }
    }
}
