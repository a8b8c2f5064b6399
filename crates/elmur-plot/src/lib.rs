//! Pictures from plain data, each as `<path>.svg` and `<path>.png` from one drawing, and films of episodes as
//! animated PNG.
//!
//! Made to be read by anyone: colours that differ for colour-blind eyes (Okabe-Ito) and in greyscale, a
//! second sign beside every colour (mark, dash or number), a legend that never covers data. Values that are
//! not finite are left out.

mod canvas;
mod chart;
mod dots;
mod film;
mod grid;

pub use chart::{Curve, Marker, learning_curves, success_by_length};
pub use dots::{Dots, scores};
pub use film::{Film, Frame, Picture, SlotSteps, film};
pub use grid::{SlotRow, Timeline, heat_map, slot_timeline};

use canvas::{Canvas, Pen, Rgb, Type};

/// Result of drawing a picture.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Nothing that could be drawn.
    #[error("picture `{title}`: expected at least one finite value, got none")]
    Empty {
        /// Title of the picture.
        title: String,
    },
    /// Data that cannot be what the picture shows.
    #[error("picture `{title}`: expected {expected}, got {got}")]
    Input {
        /// Title of the picture.
        title: String,
        /// What the data may be.
        expected: String,
        /// What was given.
        got: String,
    },
    /// A file could not be written.
    #[error(transparent)]
    Base(#[from] elmur_base::Error),
    /// The picture could not be painted.
    #[error("picture: {0}")]
    Render(String),
}

impl Error {
    fn empty(title: &str) -> Self {
        Error::Empty { title: title.to_owned() }
    }

    fn input(title: &str, expected: impl Into<String>, got: impl ToString) -> Self {
        Error::Input { title: title.to_owned(), expected: expected.into(), got: got.to_string() }
    }
}

const INK: Rgb = Rgb(34, 38, 46);
const SOFT: Rgb = Rgb(92, 99, 112);
const EDGE: Rgb = Rgb(150, 156, 166);
const WHITE: Rgb = Rgb(255, 255, 255);

const TITLE: Type = Type { size: 17.0, color: INK, bold: true, anchor: 0.0, angle: 0.0 };
const LABEL: Type = Type { size: 12.5, color: INK, bold: false, anchor: 0.0, angle: 0.0 };
const TICK: Type = Type { size: 11.5, color: SOFT, bold: false, anchor: 0.0, angle: 0.0 };

const WIDTH: f32 = 800.0;
const MARGIN: f32 = 24.0;

/// Okabe-Ito without its yellow, which is lost on white.
const PALETTE: [Rgb; 7] = [
    Rgb(0, 114, 178),
    Rgb(213, 94, 0),
    Rgb(0, 158, 115),
    Rgb(204, 121, 167),
    Rgb(230, 159, 0),
    Rgb(86, 180, 233),
    Rgb(60, 60, 60),
];

const fn pen(color: Rgb, width: f32) -> Pen {
    Pen { color, width, dash: &[] }
}

/// To whole device pixels: thin lines stay sharp.
fn snap(v: f32) -> f32 {
    (v * 2.0).round() / 2.0
}

/// Draws the title; returns where it ends.
fn heading(canvas: &mut Canvas, title: &str, width: f32) -> f32 {
    let lines = canvas.wrap(title, TITLE, width - 2.0 * MARGIN, 3);
    for (i, line) in lines.iter().enumerate() {
        canvas.text((MARGIN, MARGIN + 8.0 + i as f32 * 23.0), line, TITLE);
    }
    MARGIN + 4.0 + lines.len() as f32 * 23.0
}

/// Draws a sign of a legend, given its left end and middle.
type Sign = dyn Fn(&mut Canvas, f32, f32);

/// A name in a legend, and its sign.
struct Key {
    name: String,
    wide: f32,
    sign: Box<Sign>,
}

impl Key {
    fn new(name: impl Into<String>, wide: f32, sign: impl Fn(&mut Canvas, f32, f32) + 'static) -> Key {
        Key { name: name.into(), wide, sign: Box::new(sign) }
    }
}

/// Draws keys in one row, or in columns where a row is too short; returns where the last row ends.
fn legend(canvas: &mut Canvas, keys: &[Key], top: f32, width: f32) -> f32 {
    let (room, gap) = (width - 2.0 * MARGIN, 22.0);
    let names: Vec<_> = keys.iter().map(|key| canvas.fit(&key.name, LABEL, room - key.wide - 8.0)).collect();
    let wide = |(key, name): (&Key, &String)| key.wide + 8.0 + canvas.text_width(name, LABEL) + gap;
    let widths: Vec<f32> = keys.iter().zip(&names).map(wide).collect();
    let column =
        (widths.iter().sum::<f32>() > room + gap).then(|| widths.iter().fold(0.0, |a: f32, b| a.max(*b)));
    let (mut x, mut y) = (MARGIN, top + 12.0);
    for (i, key) in keys.iter().enumerate() {
        let wide = column.unwrap_or(widths[i]);
        if x > MARGIN && x + wide - gap > width - MARGIN {
            (x, y) = (MARGIN, y + 19.0);
        }
        (key.sign)(canvas, x, y);
        canvas.text((x + key.wide + 8.0, y), &names[i], LABEL);
        x += wide;
    }
    y + 12.0
}

/// A label above the plot, on a pole that stands at `x`.
struct Flag {
    x: f32,
    left: f32,
    right: f32,
    row: usize,
    label: String,
    color: Rgb,
}

const FLAG_ROW: f32 = 17.0;

/// Places flags in rows so that no label meets another, or another's pole. Labels lie to the right of their
/// poles, or to the left where they would pass `edge`. Taken from the outside in, each pole rises beside the
/// labels already placed.
fn place_flags(canvas: &Canvas, flags: &[(f32, &str, Rgb)], edge: f32) -> Vec<Flag> {
    let mut all: Vec<Flag> = Vec::new();
    for &(x, label, color) in flags {
        let label = canvas.fit(label, TICK, edge - 2.0 * MARGIN);
        let wide = canvas.text_width(&label, TICK) + 10.0;
        let left = if x + wide > edge { (x - wide).max(MARGIN) } else { x };
        all.push(Flag { x, left, right: left + wide, row: 0, label, color });
    }
    all.sort_by(|a, b| {
        let turned = |f: &Flag| f.left < f.x;
        let outside_in = if turned(a) { a.x.total_cmp(&b.x) } else { b.x.total_cmp(&a.x) };
        turned(a).cmp(&turned(b)).then(outside_in)
    });
    for i in 0..all.len() {
        let meets = |row: usize| {
            all[..i].iter().any(|f| {
                let (left, right) = if f.row == row { (f.left, f.right) } else { (f.x, f.x) };
                f.row >= row && left <= all[i].right && right >= all[i].left
            })
        };
        all[i].row = (0..i).find(|&row| !meets(row)).unwrap_or(i);
    }
    all
}

fn flags_height(flags: &[Flag]) -> f32 {
    flags.iter().map(|f| (f.row + 1) as f32 * FLAG_ROW + 6.0).fold(0.0, f32::max)
}

/// Draws poles from `bottom` to their labels above `top`.
fn draw_flags(canvas: &mut Canvas, flags: &[Flag], top: f32, bottom: f32) {
    for Flag { x, left, row, label, color, .. } in flags {
        let y = top - 13.0 - *row as f32 * FLAG_ROW;
        canvas.line(&[(*x, y - 7.0), (*x, bottom)], Pen { color: *color, width: 1.2, dash: &[4.0, 3.0] });
        canvas.text((left + 5.0, y), label, Type { color: *color, ..TICK });
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use std::path::PathBuf;

    use super::*;

    /// A folder of its own for each test, gone when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("elmur-plot-{}-{name}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }

        fn svg(&self, draw: impl FnOnce(&Path) -> Result<()>) -> String {
            draw(&self.0.join("picture.1")).unwrap();
            std::fs::read_to_string(self.0.join("picture.1.svg")).unwrap()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn curve(points: &[(u64, f64, f64)]) -> Vec<Curve> {
        vec![Curve { name: "ELMUR <2 slots>".to_owned(), points: points.to_vec() }]
    }

    fn line(name: &str, points: &[(f64, f64)]) -> Vec<(String, Vec<(f64, f64)>)> {
        vec![(name.to_owned(), points.to_vec())]
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|n| n.to_string()).collect()
    }

    fn marker(x: f64, label: &str) -> Marker {
        Marker { x, label: label.to_owned() }
    }

    fn timeline(slots: usize, segments: usize) -> Timeline {
        let row = |slot| {
            let write = |t| (t % slots == slot).then_some(if t < slots { 1.0 } else { 0.5 });
            SlotRow { read: vec![1.0 / slots as f64; segments], written: (0..segments).map(write).collect() }
        };
        Timeline { layers: vec![(0..slots).map(row).collect()], cue: Some(0), decision: Some(segments - 1) }
    }

    #[test]
    fn both_files_are_written_with_labels_and_nothing_else() {
        let folder = Folder::new("files");
        let points = [(9, 1.0, 0.0), (1000, 0.9, 0.05), (1_000_000, 0.5, 0.02)];
        let markers = [marker(90.0, "longest training episode")];
        let svg = folder.svg(|path| success_by_length(path, "A & B", &curve(&points), &markers));
        for label in
            ["A &amp; B", "ELMUR &lt;2 slots&gt;", ">chance<", "longest training", ">1k<", ">1M<", ">75%<"]
        {
            assert!(svg.contains(label), "{label}");
        }
        let png = std::fs::read(folder.0.join("picture.1.png")).unwrap();
        assert_eq!((&png[1..4], &png[16..20]), (&b"PNG"[..], &1600u32.to_be_bytes()[..]));
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 2);
    }

    #[test]
    fn values_that_are_not_finite_change_nothing() {
        let folder = Folder::new("finite");
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let success = |points: &[_], markers: &[_]| {
            folder.svg(|path| success_by_length(path, "t", &curve(points), markers))
        };
        let clean = success(&[(9, 0.5, 0.0), (99, 0.7, 0.1)], &[]);
        let dirty = [(0, 0.1, 0.1), (9, 0.5, nan), (50, nan, 0.1), (99, 0.7, 0.1)];
        assert_eq!(success(&dirty, &[marker(nan, "nowhere")]), clean);
        let learning =
            |points: &[_]| folder.svg(|path| learning_curves(path, "t", "x", "y", &line("a", points), true));
        let clean = learning(&[(1.0, 2.0), (2.0, 1.0)]);
        assert_eq!(
            learning(&[(1.0, 2.0), (nan, 1.0), (1.5, inf), (1.6, 0.0), (1.7, -1.0), (2.0, 1.0)]),
            clean
        );
        let heat = |row| {
            folder.svg(|path| heat_map(path, "t", "x", &names(&["a", "b"]), "y", &names(&["c"]), &[row]))
        };
        let clean = heat(vec![Some(0.25), None]);
        assert_eq!(heat(vec![Some(0.25), Some(nan)]), clean);
        assert!(clean.contains(">25%<") && clean.contains("no data"));
    }

    #[test]
    fn nothing_to_draw_is_an_error() {
        let path = Path::new("/nowhere/picture");
        let (nan, markers) = (f64::NAN, [marker(1.0, "")]);
        let empty = Timeline { layers: vec![vec![SlotRow::default()], vec![]], cue: None, decision: None };
        for result in [
            success_by_length(path, "t", &[], &markers),
            success_by_length(path, "t", &curve(&[(5, nan, 0.0), (0, 1.0, 0.0)]), &markers),
            learning_curves(path, "t", "x", "y", &line("a", &[(1.0, nan), (2.0, 0.0)]), true),
            heat_map(path, "t", "x", &[], "y", &[], &[]),
            heat_map(path, "t", "x", &names(&["a"]), "y", &names(&["b"]), &[vec![Some(nan)]]),
            slot_timeline(path, "t", &empty),
        ] {
            assert!(matches!(result, Err(Error::Empty { .. })), "{result:?}");
        }
    }

    #[test]
    fn what_cannot_be_drawn_is_an_error() {
        let path = Path::new("/nowhere/picture");
        let (one, many) = (names(&["a"]), names(&["row"; 20_000]));
        let late = Timeline { cue: Some(9), ..timeline(2, 9) };
        for result in [
            success_by_length(path, "t", &curve(&[(9, 97.0, 1.0)]), &[]),
            heat_map(path, "t", "x", &one, "y", &one, &[vec![Some(1.0), None]]),
            slot_timeline(path, "t", &late),
        ] {
            assert!(matches!(result, Err(Error::Input { .. })), "{result:?}");
        }
        let result = heat_map(path, "t", "x", &one, "y", &many, &vec![vec![Some(0.5)]; 20_000]);
        assert!(matches!(result, Err(Error::Render(_))), "{result:?}");
        let result = success_by_length(path, "t", &curve(&[(9, 0.97, 0.01)]), &[]);
        assert!(matches!(result, Err(Error::Base(_))), "{result:?}");
    }

    #[test]
    fn extremes_do_not_panic() {
        let folder = Folder::new("extremes");
        let text = "word ".repeat(200) + &"x".repeat(500) + "\n\t\u{1}\u{ffff}日";
        let ends = [f64::MIN, -1e99, -1.0, 0.0, 5e-324, 1.0, 1.0 + 1e-15, f64::MAX];
        for (a, b) in ends.iter().flat_map(|a| ends.map(|b| (*a, b))).filter(|(a, b)| a <= b) {
            let curves = line("", &[(a, b), (b, a)]);
            for log in [false, true] {
                let result = learning_curves(folder.0.join("curves"), "t", "x", "y", &curves, log);
                assert!(matches!(result, Ok(()) | Err(Error::Empty { .. })), "{a} {b} {result:?}");
            }
        }
        let result =
            learning_curves(folder.0.join("text"), &text, &text, &text, &line(&text, &[(1.0, 1.0)]), true);
        assert!(result.is_ok(), "{result:?}");
        let points = [(1, 0.0, 1e300), (u64::MAX, 1.0, -1.0)];
        let markers = [1e-300, 1.0, 1.1, 1e300].map(|x| marker(x, &text));
        folder.svg(|path| success_by_length(path, "", &curve(&points), &markers));
        let svg = folder.svg(|path| slot_timeline(path, &text, &timeline(3, 100_000)));
        assert!(svg.contains("mean of 250") && svg.len() < 100_000, "{}", svg.len());
    }

    #[test]
    fn scores_have_a_mark_each_and_missing_ones_none() {
        let folder = Folder::new("scores");
        let rows = names(&["tmaze <9>", "popgym"]);
        let dots = |points: [Option<(f64, f64)>; 2]| {
            vec![
                Dots { name: "elmur".to_owned(), points: points.to_vec() },
                Dots { name: "player".to_owned(), points: vec![Some((1.0, 0.0)), None] },
            ]
        };
        let draw = |series: &[Dots]| folder.svg(|path| scores(path, "t", "return", &rows, series));
        let whole = draw(&dots([Some((-0.5, 0.25)), None]));
        for label in ["tmaze &lt;9&gt;", ">popgym<", ">elmur<", ">player<", ">return<", ">-0.5<", ">1.0<"] {
            assert!(whole.contains(label), "{label}");
        }
        assert_eq!(draw(&dots([Some((-0.5, 0.25)), Some((f64::NAN, 0.0))])), whole);
        let more = draw(&dots([Some((-0.5, 0.25)), Some((0.0, f64::NAN))]));
        assert!(more.len() > whole.len());
        assert!(draw(&dots([None, None])).contains("elmur (no data)"));
        let path = Path::new("/nowhere/picture");
        let result = scores(path, "t", "x", &rows[..1], &dots([None, None]));
        assert!(matches!(result, Err(Error::Input { .. })), "{result:?}");
        let result = scores(path, "t", "x", &rows, &[]);
        assert!(matches!(result, Err(Error::Empty { .. })), "{result:?}");
    }

    #[test]
    fn a_timeline_shows_what_is_kept_of_the_cue() {
        let svg = Folder::new("cue").svg(|path| slot_timeline(path, "t", &timeline(2, 8)));
        for label in ["cue shown", "decision", "layer 0", "slot replaced", "new content blended in"] {
            assert!(svg.contains(label), "{label}");
        }
        // Each bar is `M x top H right V bottom ...`: all of it, a half, a quarter, an eighth, to half a
        // unit.
        let bars = svg.split("<path fill=\"#d55e00\" shape-rendering=\"crispEdges\" d=\"M").skip(1);
        let height = |bar: &str| -> Option<f32> {
            let (top, rest) = bar.split_once(' ')?.1.split_once('H')?;
            let bottom = rest.split_once('V')?.1.split_once('H')?.0;
            Some(bottom.parse::<f32>().ok()? - top.parse::<f32>().ok()?)
        };
        assert_eq!(bars.map(height).collect::<Vec<_>>(), [7.0, 3.5, 2.0, 1.0].map(Some));
    }

    #[test]
    fn labels_of_flags_never_meet() {
        let places = [100.0, 110.0, 130.0, 400.0, 690.0, 699.0, 700.0].map(|x| (x, "some label", INK));
        let flags = place_flags(&Canvas::new().unwrap(), &places, 700.0);
        for (i, a) in flags.iter().enumerate() {
            for b in flags[..i].iter().filter(|b| b.row == a.row) {
                assert!(a.right < b.left || b.right < a.left, "{} {}", a.x, b.x);
            }
        }
    }
}
