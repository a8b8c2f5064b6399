//! Pictures of video files: AV1 of 8 bits decoded here, deeper AV1, H.264 and HEVC by the `ffmpeg` program if
//! there is one.
//!
//! A reader remembers where it is, so that pictures asked for in the order in which they are shown are
//! decoded once. Colours: red = Y + 1.402 V, green = Y - 0.344 U - 0.714 V, blue = Y + 1.772 U (BT.601) with
//! Y, U and V in the limited range, unless the stream says otherwise; a pixel takes the colour values that
//! cover it. Pictures of an even number of rows, with colours of half the resolution, are those of ffmpeg to
//! the last bit; others differ from them by at most 3 of 255.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use re_rav1d::dav1d::pixel::{MatrixCoefficients, YUVRange};
use re_rav1d::dav1d::{Decoder, Picture, PixelLayout, PlanarImageComponent, Settings};

use crate::mp4::{self, Codec, Track};

/// Variable that names the program for codecs that are not decoded here.
const FFMPEG: &str = "ELMUR_FFMPEG";

/// A video file that pictures [height, width, 3] are read from.
pub(crate) struct Video {
    path: PathBuf,
    track: Track,
    /// Numbers of samples in the order in which they are shown.
    shown: Vec<usize>,
    decoding: Option<Decoding>,
}

/// Decoding under way.
enum Decoding {
    Av1(Av1),
    Ffmpeg(Ffmpeg),
}

impl fmt::Debug for Video {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Video").field("path", &self.path).field("codec", &self.track.codec).finish()
    }
}

impl Video {
    /// Opens a file whose pictures must have this height and width.
    pub(crate) fn open(path: &Path, (height, width): (usize, usize)) -> Result<Self, String> {
        let track = mp4::read(path)?;
        if (track.height, track.width) != (height, width) {
            let (h, w) = (track.height, track.width);
            return Err(format!("expected pictures of {height} x {width} (height x width), got {h} x {w}"));
        }
        let mut shown: Vec<usize> = (0..track.samples.len()).collect();
        shown.sort_by_key(|i| track.samples[*i].time);
        Ok(Self { path: path.to_owned(), track, shown, decoding: None })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Numbers of the pictures shown nearest to these times in seconds, each within `tolerance` of it.
    pub(crate) fn nearest(&self, times: &[f64], tolerance: f64) -> Result<Vec<usize>, String> {
        let scale = f64::from(self.track.timescale);
        let shown_at = |i: usize| self.track.samples[self.shown[i]].time as f64 / scale;
        let nearest = |time: &f64| {
            let after =
                self.shown.partition_point(|sample| (self.track.samples[*sample].time as f64) < time * scale);
            let candidates = [after.checked_sub(1), (after < self.shown.len()).then_some(after)];
            let distance = |i: &usize| (shown_at(*i) - time).abs();
            let best = candidates.into_iter().flatten().min_by(|a, b| distance(a).total_cmp(&distance(b)));
            match best.filter(|best| distance(best) <= tolerance) {
                Some(best) => Ok(best),
                None => Err(format!(
                    "no picture at {time:.3} s; expected one within {tolerance:.3} s, the video has {} from 0 to {:.3} s",
                    self.shown.len(),
                    shown_at(self.shown.len() - 1)
                )),
            }
        };
        times.iter().map(nearest).collect()
    }

    /// Hands the pictures of these numbers, which must not fall, to `take`.
    pub(crate) fn pictures(&mut self, numbers: &[usize], take: &mut dyn FnMut(&[u8])) -> Result<(), String> {
        let mut picture = vec![0; self.track.height * self.track.width * 3];
        let mut last = None;
        for number in numbers {
            if last != Some(*number) {
                let decoded = self.picture(*number, &mut picture);
                if decoded.is_err() {
                    // What is left of the decoder is of no use.
                    self.decoding = None;
                }
                decoded?;
            }
            last = Some(*number);
            take(&picture);
        }
        Ok(())
    }

    fn picture(&mut self, number: usize, out: &mut [u8]) -> Result<(), String> {
        match self.track.codec {
            Codec::Av1 => {
                let from = self.sync_before(self.shown[number]);
                let decoding = match self.decoding.take() {
                    Some(Decoding::Av1(decoding)) if decoding.reaches(from, self.time(number)) => decoding,
                    _ => Av1::start(&self.path, &self.track, from)?,
                };
                let decoding = self.decoding.insert(Decoding::Av1(decoding));
                let Decoding::Av1(decoding) = decoding else { return Ok(()) };
                let time = self.track.samples[self.shown[number]].time;
                decoding.picture_at(&self.track, time, out)
            }
            Codec::DeepAv1 | Codec::H264 | Codec::Hevc => {
                let mut decoding = match self.decoding.take() {
                    Some(Decoding::Ffmpeg(decoding)) if decoding.next <= number => decoding,
                    _ => Ffmpeg::start(&self.path, self.track.codec, FRAME_MODES[0])?,
                };
                let mut given = decoding.picture(number, out);
                if given.is_err() && decoding.next == 0 {
                    // Perhaps the program does not know the option.
                    decoding = Ffmpeg::start(&self.path, self.track.codec, FRAME_MODES[1])?;
                    given = decoding.picture(number, out);
                }
                self.decoding = Some(Decoding::Ffmpeg(decoding));
                given
            }
            codec => Err(format!("encoded by {codec}; expected av1, or h264 or hevc with ffmpeg installed")),
        }
    }

    fn time(&self, number: usize) -> i64 {
        self.track.samples[self.shown[number]].time
    }

    /// The last sample up to this one at which decoding can begin.
    fn sync_before(&self, sample: usize) -> usize {
        (0..=sample).rev().find(|i| self.track.samples[*i].is_sync).unwrap_or(0)
    }
}

/// An AV1 decoder and where it is in the file.
struct Av1 {
    decoder: Decoder,
    file: File,
    /// The next sample to decode.
    next: usize,
    /// The sample that decoding began at.
    start: usize,
    /// Pictures that were decoded before they were asked for.
    early: BTreeMap<i64, Picture>,
    /// When the last picture that was handed out is shown.
    taken: i64,
}

/// Pictures that may be decoded before they are asked for.
const MOST_EARLY: usize = 16;
/// Turns of giving data and taking pictures that one sample may need.
const MOST_TURNS: usize = 64;

impl Av1 {
    fn start(path: &Path, track: &Track, from: usize) -> Result<Self, String> {
        let mut settings = Settings::new();
        settings.set_n_threads(1);
        settings.set_max_frame_delay(1);
        // A stream that claims larger pictures is refused before there is memory for them.
        let size = track.height.saturating_mul(track.width);
        settings.set_frame_size_limit(u32::try_from(size).unwrap_or(u32::MAX).max(1));
        settings.set_strict_std_compliance(true);
        let decoder = Decoder::with_settings(&settings).map_err(|e| format!("AV1 decoder: {e}"))?;
        let file = File::open(path).map_err(|e| e.to_string())?;
        Ok(Self { decoder, file, next: from, start: from, early: BTreeMap::new(), taken: i64::MIN })
    }

    /// Whether going on is better than beginning at sample `from` to get the picture shown at `time`.
    fn reaches(&self, from: usize, time: i64) -> bool {
        self.early.contains_key(&time) || (time > self.taken && self.next >= from && self.start <= from)
    }

    fn picture_at(&mut self, track: &Track, time: i64, out: &mut [u8]) -> Result<(), String> {
        let fail = |e: re_rav1d::dav1d::Error| format!("AV1: {e}; the file is damaged, copy it again");
        self.early.retain(|early, _| *early >= time);
        loop {
            if let Some(picture) = self.early.remove(&time) {
                self.taken = time;
                return rgb(&picture, (track.height, track.width), out);
            }
            let Some(sample) = track.samples.get(self.next) else {
                return Err("a picture that the decoder did not give; the file is damaged".to_owned());
            };
            let mut data = if self.next == self.start { track.setup.clone() } else { Vec::new() };
            let head = data.len();
            data.resize(head + sample.size as usize, 0);
            self.file.seek(SeekFrom::Start(sample.offset)).map_err(|e| e.to_string())?;
            self.file.read_exact(&mut data[head..]).map_err(|e| e.to_string())?;
            self.next += 1;
            if data.is_empty() {
                continue;
            }
            let mut sent = self.decoder.send_data(data, None, Some(sample.time), None);
            for _ in 0..MOST_TURNS {
                match self.decoder.get_picture() {
                    Ok(picture) => {
                        let shown = picture.timestamp().unwrap_or(i64::MIN);
                        if shown >= time {
                            self.early.insert(shown, picture);
                        }
                    }
                    Err(e) if !e.is_again() => return Err(fail(e)),
                    Err(_) if sent.is_ok() => break,
                    Err(_) => {}
                }
                match sent {
                    Err(e) if e.is_again() => sent = self.decoder.send_pending_data(),
                    Err(e) => return Err(fail(e)),
                    Ok(()) => {}
                }
            }
            if let Err(e) = sent {
                return Err(fail(e));
            }
            if self.early.len() > MOST_EARLY {
                return Err("a picture that the decoder did not give; the file is damaged".to_owned());
            }
        }
    }
}

/// Bits behind the point of the factors of colours.
const FRACTION: u32 = 13;

/// Red, green and blue of a decoded picture.
fn rgb(picture: &Picture, (height, width): (usize, usize), out: &mut [u8]) -> Result<(), String> {
    if (picture.height() as usize, picture.width() as usize) != (height, width) {
        let (h, w) = (picture.height(), picture.width());
        return Err(format!("expected a picture of {height} x {width} (height x width), got {h} x {w}"));
    }
    if picture.bit_depth() != 8 {
        return Err(format!(
            "{} bits per colour; expected 8: encode the video as yuv420p",
            picture.bit_depth()
        ));
    }
    let (black, brightness, colour): (f32, f32, f32) = match picture.color_range() {
        YUVRange::Limited => (16.0, 255.0 / 219.0, 255.0 / 224.0),
        YUVRange::Full => (0.0, 1.0, 1.0),
    };
    let byte = |x: f32| x.round().clamp(0.0, 255.0) as u8;
    let level = |y: u8| (f32::from(y) - black) * brightness;
    // Shares of red and blue in brightness.
    let (kr, kb) = match picture.matrix_coefficients() {
        MatrixCoefficients::BT709 => (0.2126, 0.0722),
        MatrixCoefficients::BT2020NonConstantLuminance => (0.2627, 0.0593),
        MatrixCoefficients::Identity if picture.pixel_layout() == PixelLayout::I444 => {
            // Green, blue and red are stored as Y, U and V.
            each_pixel(picture, width, (1, 1), out, |g, b, r| [r, g, b].map(|x| byte(level(x))));
            return Ok(());
        }
        _ => (0.299, 0.114),
    };
    let kg = 1.0 - kr - kb;
    let red_v = 2.0 * (1.0 - kr) * colour;
    let blue_u = 2.0 * (1.0 - kb) * colour;
    let (green_u, green_v) = (-blue_u * kb / kg, -red_v * kr / kg);
    let steps = match picture.pixel_layout() {
        PixelLayout::I400 => {
            let (y, stride) = plane(picture, PlanarImageComponent::Y);
            for (row, out) in out.chunks_exact_mut(3 * width).enumerate() {
                out.chunks_exact_mut(3)
                    .zip(&y[row * stride..])
                    .for_each(|(out, y)| out.fill(byte(level(*y))));
            }
            return Ok(());
        }
        PixelLayout::I420 => (2, 2),
        PixelLayout::I422 => (2, 1),
        PixelLayout::I444 => (1, 1),
    };
    let rounded = |y: u8, u: f32, v: f32| {
        let (y, u, v) = (level(y), u - 128.0, v - 128.0);
        [y + red_v * v, y + green_u * u + green_v * v, y + blue_u * u].map(byte)
    };
    let truncated = |y: u8, u: f32, v: f32| {
        let (y, u, v) = (level(y).floor(), u - 128.0, v - 128.0);
        let green = y + (green_u * u).floor() + (green_v * v).floor();
        [y + (red_v * v).floor(), green, y + (blue_u * u).floor()].map(byte)
    };
    match (steps, height % 2, width % 2) {
        ((1, 1), ..) => {
            each_pixel(picture, width, steps, out, |y, u, v| rounded(y, f32::from(u), f32::from(v)));
            return Ok(());
        }
        (_, 1, 0) => {
            odd_rows(picture, (height, width), steps, out, truncated);
            return Ok(());
        }
        (_, 1, _) => {
            odd_rows(picture, (height, width), steps, out, rounded);
            return Ok(());
        }
        _ => {}
    }
    // Each term is rounded down by itself, as ffmpeg does with such pictures: LeRobot's own reader gives the
    // same bytes.
    let fixed = |factor: f32| (factor * (1 << FRACTION) as f32).round() as i32;
    let [brightness, red_v, green_u, green_v, blue_u] =
        [brightness, red_v, green_u, green_v, blue_u].map(fixed);
    let black = black as i32;
    each_pixel(picture, width, steps, out, |y, u, v| {
        let (u, v) = (i32::from(u) - 128, i32::from(v) - 128);
        let y = ((i32::from(y) - black) * brightness) >> FRACTION;
        let red = y + ((v * red_v) >> FRACTION);
        let green = y + ((u * green_u) >> FRACTION) + ((v * green_v) >> FRACTION);
        let blue = y + ((u * blue_u) >> FRACTION);
        [red, green, blue].map(|x| x.clamp(0, 255) as u8)
    });
    Ok(())
}

/// A plane of a picture, and the bytes from one of its rows to the next.
fn plane(picture: &Picture, component: PlanarImageComponent) -> (impl std::ops::Deref<Target = [u8]>, usize) {
    let stride = picture.stride(component) as usize;
    (picture.plane(component), stride)
}

/// Computes red, green and blue of every pixel from its Y, U and V, of which U and V are shared by as many
/// pixels `across` and `down`.
fn each_pixel(
    picture: &Picture,
    width: usize,
    (across, down): (usize, usize),
    out: &mut [u8],
    rgb: impl Fn(u8, u8, u8) -> [u8; 3],
) {
    let (y, y_stride) = plane(picture, PlanarImageComponent::Y);
    let (u, stride) = plane(picture, PlanarImageComponent::U);
    let (v, _) = plane(picture, PlanarImageComponent::V);
    for (row, out) in out.chunks_exact_mut(3 * width).enumerate() {
        let (y, colours) = (&y[row * y_stride..], row / down * stride);
        for (column, out) in out.chunks_exact_mut(3).enumerate() {
            let place = colours + column / across;
            out.copy_from_slice(&rgb(y[column], u[place], v[place]));
        }
    }
}

/// [`each_pixel`] for an odd number of rows, for which ffmpeg stretches colours: row by row it takes the nearest
/// or the mean of two, and in pictures of an odd width it interpolates along rows.
fn odd_rows(
    picture: &Picture,
    (height, width): (usize, usize),
    (across, down): (usize, usize),
    out: &mut [u8],
    rgb: impl Fn(u8, f32, f32) -> [u8; 3],
) {
    let (y, y_stride) = plane(picture, PlanarImageComponent::Y);
    let (u, stride) = plane(picture, PlanarImageComponent::U);
    let (v, _) = plane(picture, PlanarImageComponent::V);
    let (rows, columns) = (height.div_ceil(down), width.div_ceil(across));
    let along: Vec<(usize, f32)> = (0..width).map(|column| stretched(column, width, columns)).collect();
    for (row, out) in out.chunks_exact_mut(3 * width).enumerate() {
        // Of two rows that do not weigh the same, the mean is taken of both or the first alone.
        let (first, second) = match stretched(row, height, rows) {
            _ if down == 1 => (row, row),
            (near, share) if share >= 0.5 => (near, near + 1),
            (near, _) => (near, near),
        };
        let colours = |plane: &[u8], column: usize| {
            let sum = f32::from(plane[first * stride + column]) + f32::from(plane[second * stride + column]);
            sum / 2.0
        };
        let at = |plane: &[u8], column: usize| match along[column] {
            (near, share) if width % 2 == 1 && share > 0.0 => {
                colours(plane, near) * (1.0 - share) + colours(plane, near + 1) * share
            }
            (near, _) if width % 2 == 1 => colours(plane, near),
            _ => colours(plane, column / across),
        };
        let y = &y[row * y_stride..];
        for (column, out) in out.chunks_exact_mut(3).enumerate() {
            out.copy_from_slice(&rgb(y[column], at(&u, column), at(&v, column)));
        }
    }
}

/// Where place `i` of `n` lies among `m` places that cover the same length: the one before it, and the share
/// of the one that follows.
fn stretched(i: usize, n: usize, m: usize) -> (usize, f32) {
    let place = ((i as f64 + 0.5) * m as f64 / n as f64 - 0.5).max(0.0);
    match m {
        0 | 1 => (0, 0.0),
        // Beyond the last place there is nothing to mix with.
        _ if place >= (m - 1) as f64 => (m - 2, 1.0),
        _ => (place as usize, place.fract() as f32),
    }
}

/// A running `ffmpeg` that writes pictures one after the other in the order in which they are shown.
struct Ffmpeg {
    child: Child,
    pictures: ChildStdout,
    /// Number of the next picture.
    next: usize,
}

/// Names of the option that keeps pictures as they are, none twice and none left out: of new and of old
/// versions.
const FRAME_MODES: [&str; 2] = ["-fps_mode", "-vsync"];

impl Ffmpeg {
    fn start(path: &Path, codec: Codec, frame_mode: &str) -> Result<Self, String> {
        let program = std::env::var_os(FFMPEG).unwrap_or_else(|| "ffmpeg".into());
        let missing = |e: std::io::Error| {
            format!(
                "encoded by {codec}, which needs the ffmpeg program ({}: {e}); install it, name it in {FFMPEG}, or \
                 encode the video as av1 of 8 bits",
                program.to_string_lossy()
            )
        };
        // A name is no option and no protocol.
        let path = std::path::absolute(path).map_err(|e| e.to_string())?;
        let mut child = Command::new(&program)
            .args(["-nostdin", "-v", "error", "-protocol_whitelist", "file", "-i"])
            .arg(path)
            .args([
                "-map",
                "0:v:0",
                "-f",
                "rawvideo",
                "-pix_fmt",
                "rgb24",
                // As LeRobot's own reader stretches colours.
                "-sws_flags",
                "bilinear",
                frame_mode,
                "passthrough",
                "pipe:1",
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(missing)?;
        let pictures = child.stdout.take().ok_or("ffmpeg without output")?;
        Ok(Self { child, pictures, next: 0 })
    }

    fn picture(&mut self, number: usize, out: &mut [u8]) -> Result<(), String> {
        while self.next <= number {
            let read = self.pictures.read_exact(out);
            read.map_err(|e| {
                format!("ffmpeg gave {} pictures, expected more than {number} ({e})", self.next)
            })?;
            self.next += 1;
        }
        Ok(())
    }
}

impl Drop for Ffmpeg {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/video")
    }

    /// Two pictures of every way to store colours, against what ffmpeg makes of them.
    #[test]
    fn colours_are_those_of_ffmpeg() {
        for (name, tolerance) in [("yuv420", 0), ("yuv444", 1), ("gbr", 0), ("odd-rows", 3), ("odd", 3)] {
            let expected = std::fs::read(folder().join(format!("{name}.rgb"))).unwrap();
            let size = match name {
                "odd-rows" => (17, 24),
                "odd" => (17, 23),
                _ => (18, 24),
            };
            let mut video = Video::open(&folder().join(format!("{name}.mp4")), size).unwrap();
            let mut got = Vec::new();
            let numbers = video.nearest(&[0.0, 0.1], 0.05).unwrap();
            video.pictures(&numbers, &mut |picture| got.extend_from_slice(picture)).unwrap();
            assert_eq!(got.len(), expected.len(), "{name}");
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let off = got.abs_diff(*expected);
                assert!(off <= tolerance, "{name} byte {i}: {got} where ffmpeg has {expected}");
            }
        }
    }

    #[test]
    fn deeper_colours_are_left_to_ffmpeg() {
        let video = Video::open(&folder().join("ten-bits.mp4"), (18, 24)).unwrap();
        assert_eq!(video.track.codec, Codec::DeepAv1);
        assert_eq!(video.track.codec.to_string(), "av1 with more than 8 bits per colour");
    }
}
