//! A list of shapes, written as SVG and painted as PNG. The size is chosen last, when the drawing knows what
//! it needs.
//!
//! Fonts are embedded, so a picture needs nothing of its machine. SVG keeps text as text, to be searched and
//! restyled.

use std::fmt::Write as _;
use std::path::Path as FilePath;

use tiny_skia::{FillRule, LineJoin, Paint, PathSegment, Pixmap, Point, Rect, Stroke, StrokeDash, Transform};
pub use tiny_skia::{Path, PathBuilder};
use ttf_parser::{Face, GlyphId, OutlineBuilder};

use super::{Error, Result};

/// Device pixels per unit of the drawing: crisp on dense screens and in print.
const SCALE: f32 = 2.0;
/// A larger picture is a mistake in the data.
const MAX_PIXELS: f32 = 64e6;
/// Half the height of a capital letter, as a share of the font size: centres text on its `y`.
const HALF_CAP: f32 = 0.357;

#[derive(Clone, Copy, PartialEq)]
pub struct Rgb(pub u8, pub u8, pub u8);

#[derive(Clone, Copy)]
pub struct Pen {
    pub color: Rgb,
    pub width: f32,
    /// Lengths of dashes and gaps; empty for a solid line.
    pub dash: &'static [f32],
}

/// How text is set. It is centred vertically on its point, and turned around it.
#[derive(Clone, Copy)]
pub struct Type {
    pub size: f32,
    pub color: Rgb,
    pub bold: bool,
    /// Which part of the text stands on the point: 0 its start, 0.5 its middle, 1 its end.
    pub anchor: f32,
    /// Degrees, clockwise.
    pub angle: f32,
}

enum Shape {
    Fill { path: Path, color: Rgb, smooth: bool },
    Stroke { path: Path, pen: Pen },
    Text { x: f32, y: f32, text: String, style: Type },
}

pub struct Canvas {
    shapes: Vec<Shape>,
    regular: Face<'static>,
    bold: Face<'static>,
}

impl Canvas {
    pub fn new() -> Result<Self> {
        let face = |bytes| Face::parse(bytes, 0).map_err(|e| Error::Render(format!("font: {e}")));
        let (regular, bold) = (face(notosans::REGULAR_TTF)?, face(notosans::BOLD_TTF)?);
        Ok(Self { shapes: Vec::new(), regular, bold })
    }

    /// Shapes without area or extent are none, and are not drawn.
    pub fn fill(&mut self, path: Option<Path>, color: Rgb) {
        self.shapes.extend(path.map(|path| Shape::Fill { path, color, smooth: true }));
    }

    /// Fills with hard edges, so that neighbouring cells leave no seam.
    pub fn fill_cells(&mut self, path: Option<Path>, color: Rgb) {
        self.shapes.extend(path.map(|path| Shape::Fill { path, color, smooth: false }));
    }

    pub fn stroke(&mut self, path: Option<Path>, pen: Pen) {
        self.shapes.extend(path.map(|path| Shape::Stroke { path, pen }));
    }

    pub fn line(&mut self, points: &[(f32, f32)], pen: Pen) {
        self.stroke(polygon(points, false), pen);
    }

    pub fn text(&mut self, (x, y): (f32, f32), text: &str, style: Type) {
        // XML knows no control characters, and fonts draw them as boxes.
        let text = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        self.shapes.push(Shape::Text { x, y, text, style });
    }

    fn face(&self, style: Type) -> &Face<'static> {
        if style.bold { &self.bold } else { &self.regular }
    }

    /// A character's glyph, and how far it moves the pen.
    fn glyph(&self, c: char, style: Type) -> (GlyphId, f32) {
        let face = self.face(style);
        let id = face.glyph_index(c).unwrap_or(GlyphId(0));
        let units = f32::from(face.glyph_hor_advance(id).unwrap_or(0));
        (id, units * style.size / f32::from(face.units_per_em()))
    }

    pub fn text_width(&self, text: &str, style: Type) -> f32 {
        text.chars().map(|c| self.glyph(c, style).1).sum()
    }

    /// `text`, cut with an ellipsis where it is longer than `width`.
    pub fn fit(&self, text: &str, style: Type, width: f32) -> String {
        if self.text_width(text, style) <= width {
            return text.to_owned();
        }
        let mut room = width - self.text_width("…", style);
        let keep = text.chars().take_while(|&c| {
            room -= self.glyph(c, style).1;
            room >= 0.0
        });
        keep.collect::<String>().trim_end().to_owned() + "…"
    }

    /// `text` broken between words into at most `lines` lines of `width`.
    pub fn wrap(&self, text: &str, style: Type, width: f32, lines: usize) -> Vec<String> {
        let mut all: Vec<String> = Vec::new();
        for word in text.split_whitespace() {
            let last = all.len() == lines;
            match all.last_mut() {
                Some(line) if last || self.text_width(&format!("{line} {word}"), style) <= width => {
                    *line = format!("{line} {word}");
                }
                _ => all.push(word.to_owned()),
            }
        }
        all.iter().map(|line| self.fit(line, style, width)).collect()
    }

    /// Writes `<path>.svg` and `<path>.png`.
    pub fn save(&self, path: &FilePath, width: f32, height: f32) -> Result<()> {
        if width * height * SCALE * SCALE > MAX_PIXELS {
            return Err(Error::Render(format!("{width} x {height} is more than a picture can hold")));
        }
        write_aside(path, ".svg", self.svg(width.round(), height.round()).as_bytes())?;
        write_aside(path, ".png", &self.png(width.round(), height.round())?)
    }

    fn svg(&self, width: f32, height: f32) -> String {
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"'Noto Sans', Helvetica, Arial, sans-serif\" \
             fill=\"none\" stroke-linejoin=\"round\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
        );
        for shape in &self.shapes {
            out += &match shape {
                Shape::Fill { path, color, smooth } => {
                    let edges = if *smooth { "" } else { " shape-rendering=\"crispEdges\"" };
                    format!("<path fill=\"{}\"{edges} d=\"{}\"/>\n", hex(*color), svg_path(path))
                }
                Shape::Stroke { path, pen } => {
                    let dash = pen.dash.iter().map(f32::to_string).collect::<Vec<_>>().join(" ");
                    let dash = if dash.is_empty() { dash } else { format!(" stroke-dasharray=\"{dash}\"") };
                    let (color, width, path) = (hex(pen.color), pen.width, svg_path(path));
                    format!("<path stroke=\"{color}\" stroke-width=\"{width}\"{dash} d=\"{path}\"/>\n")
                }
                Shape::Text { x, y, text, style } => {
                    let Type { size, angle, .. } = style;
                    let anchor = ["start", "middle", "end"][(style.anchor * 2.0) as usize % 3];
                    let weight = if style.bold { " font-weight=\"bold\"" } else { "" };
                    let (x, y, color) = (short(*x), short(*y), hex(style.color));
                    let turn = if *angle == 0.0 {
                        "".into()
                    } else {
                        format!(" transform=\"rotate({angle} {x} {y})\"")
                    };
                    let (y, text) = (short(y + HALF_CAP * size), escaped(text));
                    format!(
                        "<text x=\"{x}\" y=\"{y}\" font-size=\"{size}\" text-anchor=\"{anchor}\" \
                         fill=\"{color}\"{weight}{turn}>{text}</text>\n"
                    )
                }
            };
        }
        out + "</svg>\n"
    }

    fn png(&self, width: f32, height: f32) -> Result<Vec<u8>> {
        let map = self.bitmap((width * SCALE) as u32, (height * SCALE) as u32, SCALE)?;
        map.encode_png().map_err(|e| Error::Render(format!("png: {e}")))
    }

    /// Red, green and blue of the drawing's pixels on white, one pixel per unit: [height, width, 3].
    pub fn pixels(&self, width: u32, height: u32) -> Result<Vec<u8>> {
        let map = self.bitmap(width, height, 1.0)?;
        // White below everything leaves no pixel transparent.
        Ok(map.data().chunks_exact(4).flat_map(|pixel| [pixel[0], pixel[1], pixel[2]]).collect())
    }

    /// Paints the drawing with so many pixels per unit.
    fn bitmap(&self, width: u32, height: u32, scale: f32) -> Result<Pixmap> {
        let mut map = Pixmap::new(width, height)
            .ok_or_else(|| Error::Render(format!("no bitmap of {width} x {height}")))?;
        map.fill(tiny_skia::Color::WHITE);
        let scale = Transform::from_scale(scale, scale);
        for shape in &self.shapes {
            match shape {
                Shape::Fill { path, color, smooth } => {
                    let paint = Paint { anti_alias: *smooth, ..paint(*color) };
                    map.fill_path(path, &paint, FillRule::Winding, scale, None);
                }
                Shape::Stroke { path, pen: Pen { color, width, dash } } => {
                    let dash = StrokeDash::new(dash.to_vec(), 0.0);
                    let stroke =
                        Stroke { width: *width, dash, line_join: LineJoin::Round, ..Stroke::default() };
                    map.stroke_path(path, &paint(*color), &stroke, scale, None);
                }
                Shape::Text { x, y, text, style } => {
                    let place = scale.pre_translate(*x, *y).pre_concat(Transform::from_rotate(style.angle));
                    if let Some(path) = self.outline(text, *style) {
                        map.fill_path(&path, &paint(style.color), FillRule::Winding, place, None);
                    }
                }
            }
        }
        Ok(map)
    }

    /// The outline of `text`, its anchor at the origin.
    fn outline(&self, text: &str, style: Type) -> Option<Path> {
        let face = self.face(style);
        let scale = style.size / f32::from(face.units_per_em());
        let mut x = -self.text_width(text, style) * style.anchor;
        let mut all = PathBuilder::new();
        for c in text.chars() {
            let (id, advance) = self.glyph(c, style);
            let mut pen = Outline(PathBuilder::new());
            face.outline_glyph(id, &mut pen);
            // In fonts y points up.
            let place = Transform::from_row(scale, 0.0, 0.0, -scale, x, HALF_CAP * style.size);
            if let Some(path) = pen.0.finish().and_then(|path| path.transform(place)) {
                all.push_path(&path);
            }
            x += advance;
        }
        all.finish()
    }
}

/// Carries a glyph from the font's parser to the painter.
struct Outline(PathBuilder);

impl OutlineBuilder for Outline {
    fn move_to(&mut self, x: f32, y: f32) {
        self.0.move_to(x, y);
    }
    fn line_to(&mut self, x: f32, y: f32) {
        self.0.line_to(x, y);
    }
    fn quad_to(&mut self, x1: f32, y1: f32, x: f32, y: f32) {
        self.0.quad_to(x1, y1, x, y);
    }
    fn curve_to(&mut self, x1: f32, y1: f32, x2: f32, y2: f32, x: f32, y: f32) {
        self.0.cubic_to(x1, y1, x2, y2, x, y);
    }
    fn close(&mut self) {
        self.0.close();
    }
}

pub fn rect(x: f32, y: f32, width: f32, height: f32) -> Option<Path> {
    Rect::from_xywh(x, y, width, height).map(PathBuilder::from_rect)
}

pub fn circle(x: f32, y: f32, radius: f32) -> Option<Path> {
    PathBuilder::from_circle(x, y, radius)
}

pub fn polygon(points: &[(f32, f32)], closed: bool) -> Option<Path> {
    let (&(x, y), rest) = points.split_first()?;
    let mut builder = PathBuilder::new();
    builder.move_to(x, y);
    rest.iter().for_each(|&(x, y)| builder.line_to(x, y));
    if closed {
        builder.close();
    }
    builder.finish()
}

fn paint(color: Rgb) -> Paint<'static> {
    let mut paint = Paint::default();
    paint.set_color_rgba8(color.0, color.1, color.2, 255);
    paint
}

fn hex(Rgb(r, g, b): Rgb) -> String {
    format!("#{r:02x}{g:02x}{b:02x}")
}

/// A coordinate to a hundredth.
fn short(v: f32) -> f32 {
    (v * 100.0).round() / 100.0
}

fn svg_path(path: &Path) -> String {
    let mut out = String::new();
    let mut last = Point::zero();
    for segment in path.segments() {
        // Level and upright lines name one coordinate: timelines are thousands of rectangles.
        let (verb, points) = match segment {
            PathSegment::MoveTo(p) => ('M', vec![p.x, p.y]),
            PathSegment::LineTo(p) if p.y == last.y => ('H', vec![p.x]),
            PathSegment::LineTo(p) if p.x == last.x => ('V', vec![p.y]),
            PathSegment::LineTo(p) => ('L', vec![p.x, p.y]),
            PathSegment::QuadTo(a, p) => ('Q', vec![a.x, a.y, p.x, p.y]),
            PathSegment::CubicTo(a, b, p) => ('C', vec![a.x, a.y, b.x, b.y, p.x, p.y]),
            PathSegment::Close => ('Z', vec![]),
        };
        if let PathSegment::MoveTo(p)
        | PathSegment::LineTo(p)
        | PathSegment::QuadTo(_, p)
        | PathSegment::CubicTo(_, _, p) = segment
        {
            last = p;
        }
        out.push(verb);
        for (i, v) in points.into_iter().enumerate() {
            // Writing to a string cannot fail.
            let _ = write!(out, "{}{}", if i > 0 { " " } else { "" }, short(v));
        }
    }
    out
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace(['\u{fffe}', '\u{ffff}'], "")
}

/// Writes a file whole or not at all. The extension is appended: `run.1` becomes `run.1.svg`.
fn write_aside(path: &FilePath, extension: &str, bytes: &[u8]) -> Result<()> {
    let mut file = path.as_os_str().to_owned();
    file.push(extension);
    Ok(elmur_base::files::write_atomic(FilePath::new(&file), bytes)?)
}
