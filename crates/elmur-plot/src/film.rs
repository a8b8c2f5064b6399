//! Films: an episode as an animated PNG, which browsers and Markdown viewers play. Pictures stand on the left,
//! on the right what the memory did up to the moment: a row per slot, a column per step, attention as colour,
//! writes as dots.

use std::path::Path;

use png::{BitDepth, ColorType, Compression, Encoder};

use crate::canvas::{Canvas, Rgb, Type, circle, rect};
use crate::grid::{ink_on, shade};
use crate::{EDGE, Error, INK, LABEL, MARGIN, Result, TICK, pen};

/// An episode to be shown.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Film {
    /// Moments of the episode, in order.
    pub frames: Vec<Frame>,
    /// Per layer and shown slot; empty where the policy has no memory to look at.
    pub memory: Vec<Vec<SlotSteps>>,
    /// Frames per second.
    pub rate: u16,
}

/// One moment of an episode.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Frame {
    /// What was seen, from left to right.
    pub pictures: Vec<Picture>,
    /// Text below the pictures.
    pub caption: String,
}

/// A picture, [height, width, 3] bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Picture {
    /// Pixels of a row.
    pub width: usize,
    /// Number of rows.
    pub height: usize,
    /// Red, green and blue of each pixel, row by row.
    pub rgb: Vec<u8>,
}

/// One slot, step by step.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SlotSteps {
    /// Number of the slot.
    pub slot: usize,
    /// Attention that each step paid to the slot.
    pub read: Vec<f64>,
    /// Steps after which the slot was written.
    pub written: Vec<usize>,
}

/// Height that pictures are enlarged to, by a whole factor.
const PICTURE: usize = 256;
/// Width of the memory's part.
const PANEL: f32 = 420.0;
/// Most frames, and most pixels of a frame.
const MAX_FRAMES: usize = 100_000;
const MAX_PIXELS: usize = 1 << 24;

/// Writes `<path>.png`, animated, which plays once and begins anew after a pause. `painted` is called with the number
/// of frames so far.
pub fn film(path: impl AsRef<Path>, title: &str, film: &Film, painted: &mut dyn FnMut(usize)) -> Result<()> {
    let bytes = encode(title, film, painted)?;
    let mut file = path.as_ref().as_os_str().to_owned();
    file.push(".png");
    Ok(elmur_base::files::write_atomic(Path::new(&file), &bytes)?)
}

fn encode(title: &str, film: &Film, painted: &mut dyn FnMut(usize)) -> Result<Vec<u8>> {
    let Some(first) = film.frames.first() else { return Err(Error::empty(title)) };
    if film.frames.len() > MAX_FRAMES {
        return Err(Error::input(title, format!("at most {MAX_FRAMES} frames"), film.frames.len()));
    }
    let shape = |frame: &Frame| -> Vec<(usize, usize)> {
        frame.pictures.iter().map(|picture| (picture.width, picture.height)).collect()
    };
    for frame in &film.frames {
        let whole =
            |picture: &Picture| picture.width > 0 && picture.rgb.len() == picture.width * picture.height * 3;
        if shape(frame) != shape(first) || !frame.pictures.iter().all(whole) {
            return Err(Error::input(title, "pictures of one size in all frames", "others"));
        }
    }
    let layout = Layout::new(first, film);
    if layout.width * layout.height > MAX_PIXELS {
        let got = format!("{} x {}", layout.width, layout.height);
        return Err(Error::input(title, format!("frames of at most {MAX_PIXELS} pixels"), got));
    }
    let problem = |error: png::EncodingError| Error::Render(format!("png: {error}"));
    let mut bytes = Vec::new();
    let mut encoder = Encoder::new(&mut bytes, layout.width as u32, layout.height as u32);
    encoder.set_color(ColorType::Rgb);
    encoder.set_depth(BitDepth::Eight);
    encoder.set_compression(Compression::Balanced);
    encoder.set_animated(film.frames.len() as u32, 0).map_err(problem)?;
    encoder.set_frame_delay(1, film.rate.max(1)).map_err(problem)?;
    let mut writer = encoder.write_header().map_err(problem)?;
    for step in 0..film.frames.len() {
        if step + 1 == film.frames.len() {
            // The last moment stands still for a while.
            writer.set_frame_delay(2, 1).map_err(problem)?;
        }
        writer.write_image_data(&layout.paint(title, film, step)?).map_err(problem)?;
        painted(step + 1);
    }
    writer.finish().map_err(problem)?;
    Ok(bytes)
}

/// Where everything stands, in pixels.
struct Layout {
    /// How often each pixel of each picture is repeated, and where the picture begins.
    pictures: Vec<(usize, usize)>,
    top: usize,
    /// Where the memory's part begins.
    panel: f32,
    width: usize,
    height: usize,
}

impl Layout {
    fn new(first: &Frame, film: &Film) -> Self {
        let margin = MARGIN as usize;
        let (mut left, mut tallest, mut pictures) = (margin, 0, Vec::new());
        for picture in &first.pictures {
            let times = (PICTURE / picture.height.max(1)).clamp(1, 16);
            pictures.push((times, left));
            left += picture.width * times + margin / 2;
            tallest = tallest.max(picture.height * times);
        }
        let rows: usize = film.memory.iter().map(Vec::len).sum();
        let panel = if rows > 0 { PANEL } else { 0.0 };
        let slots = rows as f32 * ROW + film.memory.len() as f32 * LAYER + 40.0;
        let tallest = tallest.max(if rows > 0 { slots as usize } else { 0 });
        let width = (left as f32 + panel + MARGIN).max(320.0) as usize;
        Self { pictures, top: margin + 28, panel: left as f32, width, height: margin + 28 + tallest + 40 }
    }

    /// The frame of a step, [height, width, 3].
    fn paint(&self, title: &str, film: &Film, step: usize) -> Result<Vec<u8>> {
        let mut canvas = Canvas::new()?;
        let room = self.width as f32 - 2.0 * MARGIN;
        let heading = canvas.fit(title, HEADING, room);
        canvas.text((MARGIN, MARGIN + 4.0), &heading, HEADING);
        let frame = &film.frames[step];
        let caption = canvas.fit(&frame.caption, LABEL, room);
        canvas.text((MARGIN, self.height as f32 - 18.0), &caption, LABEL);
        if film.memory.iter().any(|slots| !slots.is_empty()) {
            self.draw_memory(&mut canvas, film, step);
        }
        let mut pixels = canvas.pixels(self.width as u32, self.height as u32)?;
        for (picture, (times, left)) in frame.pictures.iter().zip(&self.pictures) {
            for y in 0..picture.height * times {
                let row = &picture.rgb[y / times * picture.width * 3..][..picture.width * 3];
                let start = ((self.top + y) * self.width + left) * 3;
                let target = &mut pixels[start..start + picture.width * times * 3];
                for (x, pixel) in target.chunks_exact_mut(3).enumerate() {
                    pixel.copy_from_slice(&row[x / times * 3..][..3]);
                }
            }
        }
        Ok(pixels)
    }

    fn draw_memory(&self, canvas: &mut Canvas, film: &Film, step: usize) {
        let (left, right) = (self.panel + 70.0, self.panel + PANEL - 8.0);
        let wide = (right - left) / film.frames.len() as f32;
        let at = |step: usize| left + wide * step as f32;
        let reads = || film.memory.iter().flatten().flat_map(|slot| &slot.read);
        let peak = reads().copied().filter(|read| read.is_finite()).fold(0.0, f64::max).max(1e-9);
        let mut y = self.top as f32;
        for (layer, slots) in film.memory.iter().enumerate() {
            canvas.text((self.panel, y + 8.0), &format!("layer {layer}"), LABEL);
            y += LAYER;
            for slot in slots {
                let name = format!("slot {}", slot.slot);
                canvas.text((left - 6.0, y + ROW / 2.0), &name, Type { anchor: 1.0, ..TICK });
                canvas.fill_cells(rect(left, y, right - left, ROW - 2.0), EMPTY);
                for (i, read) in slot.read.iter().enumerate().take(step + 1) {
                    let share = (read / peak).clamp(0.0, 1.0);
                    canvas.fill_cells(rect(at(i), y, wide.max(1.0), ROW - 2.0), shade(share));
                }
                for written in slot.written.iter().filter(|written| **written <= step) {
                    let share = slot.read.get(*written).map_or(0.0, |read| (read / peak).clamp(0.0, 1.0));
                    canvas.fill(circle(at(*written) + wide / 2.0, y + ROW / 2.0 - 1.0, 3.0), ink_on(share));
                }
                y += ROW;
            }
        }
        let now = at(step) + wide / 2.0;
        canvas.line(&[(now, self.top as f32), (now, y)], pen(INK, 1.0));
        canvas.line(&[(left, y + 4.0), (right, y + 4.0)], pen(EDGE, 1.0));
        let foot = "attention paid to the slot by step; dots: the slot is written";
        let foot = canvas.fit(foot, TICK, PANEL - 8.0);
        canvas.text((self.panel, y + 18.0), &foot, TICK);
    }
}

const HEADING: Type = Type { size: 14.0, color: INK, bold: true, anchor: 0.0, angle: 0.0 };
/// Height of a slot's row and of a layer's name.
const ROW: f32 = 15.0;
const LAYER: f32 = 18.0;
/// Colour of steps that are still to come.
const EMPTY: Rgb = Rgb(243, 244, 246);

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn moving(steps: usize, memory: bool) -> Film {
        let frame = |step: usize| {
            let mut rgb = vec![200; 8 * 8 * 3];
            rgb[step * 3..][..3].copy_from_slice(&[255, 0, 7]);
            Frame { pictures: vec![Picture { width: 8, height: 8, rgb }], caption: format!("step {step}") }
        };
        let slot = SlotSteps { slot: 4, read: vec![0.5; steps], written: vec![1] };
        let memory = if memory { vec![vec![slot]] } else { Vec::new() };
        Film { frames: (0..steps).map(frame).collect(), memory, rate: 10 }
    }

    #[test]
    fn a_film_has_all_frames_with_their_pixels_enlarged() {
        for memory in [false, true] {
            let mut frames = Vec::new();
            let bytes = encode("an episode", &moving(3, memory), &mut |done| frames.push(done)).unwrap();
            assert_eq!(frames, [1, 2, 3]);
            let mut reader = png::Decoder::new(std::io::Cursor::new(&bytes)).read_info().unwrap();
            assert_eq!(reader.info().animation_control().unwrap().num_frames, 3);
            let (width, height) = (reader.info().width as usize, reader.info().height as usize);
            let mut frame = vec![0; width * height * 3];
            for step in 0..3 {
                reader.next_frame(&mut frame).unwrap();
                // Pictures of 8 pixels are enlarged 16 times, and begin below the title.
                let at = |x: usize, y: usize| &frame[((52 + y) * width + 24 + x) * 3..][..3];
                assert_eq!(at(16 * step + 15, 15), [255, 0, 7]);
                assert_eq!(at(16 * step + 16, 15), [200, 200, 200]);
                assert_eq!(at(16 * step, 16), [200, 200, 200]);
            }
            assert!(reader.next_frame(&mut frame).is_err());
        }
    }

    #[test]
    fn the_memory_is_shown_up_to_the_moment() {
        let film = moving(4, true);
        let layout = Layout::new(&film.frames[0], &film);
        let shades = |step: usize| {
            let pixels = layout.paint("t", &film, step).unwrap();
            let Rgb(r, g, b) = shade(1.0);
            pixels.chunks_exact(3).filter(|pixel| **pixel == [r, g, b]).count()
        };
        let counts: Vec<usize> = (0..4).map(shades).collect();
        assert!(counts[0] > 500 && counts.windows(2).all(|pair| pair[1] > pair[0] + 500), "{counts:?}");
    }

    #[test]
    fn films_without_frames_or_with_changing_pictures_are_refused() {
        assert!(matches!(encode("t", &Film::default(), &mut |_| {}), Err(Error::Empty { .. })));
        let mut film = moving(2, false);
        film.frames[1].pictures[0].height = 9;
        assert!(matches!(encode("t", &film, &mut |_| {}), Err(Error::Input { .. })));
        film.frames[1].pictures.clear();
        assert!(matches!(encode("t", &film, &mut |_| {}), Err(Error::Input { .. })));
    }
}
