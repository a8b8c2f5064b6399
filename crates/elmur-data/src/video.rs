//! Pictures of video files: AV1 decoded here, H.264 and HEVC by the `ffmpeg` program if there is one.
//!
//! A reader remembers where it is, so that pictures asked for in the order in which they are shown are
//! decoded once. Colours: red = Y + 1.402 V, green = Y - 0.344 U - 0.714 V, blue = Y + 1.772 U (BT.601) with
//! Y, U and V in the limited range, unless the stream says otherwise; a pixel takes the colour values that
//! cover it.

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
            Codec::H264 | Codec::Hevc => {
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

/// Red, green and blue of a decoded picture.
fn rgb(picture: &Picture, (height, width): (usize, usize), out: &mut [u8]) -> Result<(), String> {
    if (picture.height() as usize, picture.width() as usize) != (height, width) {
        let (h, w) = (picture.height(), picture.width());
        return Err(format!("expected a picture of {height} x {width} (height x width), got {h} x {w}"));
    }
    if picture.bit_depth() != 8 {
        return Err(format!("{} bits per colour; expected 8", picture.bit_depth()));
    }
    // Shares of red and blue in brightness.
    let (kr, kb) = match picture.matrix_coefficients() {
        MatrixCoefficients::BT709 => (0.2126, 0.0722),
        MatrixCoefficients::BT2020NonConstantLuminance => (0.2627, 0.0593),
        MatrixCoefficients::Identity => return Err("colours without a matrix (GBR); expected YUV".to_owned()),
        _ => (0.299, 0.114),
    };
    let (black, brightness, colour): (f32, f32, f32) = match picture.color_range() {
        YUVRange::Limited => (16.0, 255.0 / 219.0, 255.0 / 224.0),
        YUVRange::Full => (0.0, 1.0, 1.0),
    };
    let kg = 1.0 - kr - kb;
    let red_v = 2.0 * (1.0 - kr) * colour;
    let blue_u = 2.0 * (1.0 - kb) * colour;
    let (green_u, green_v) = (blue_u * kb / kg, red_v * kr / kg);
    let plane = |component| (picture.plane(component), picture.stride(component) as usize);
    let (y, y_stride) = plane(PlanarImageComponent::Y);
    let (across, down) = match picture.pixel_layout() {
        PixelLayout::I400 => {
            for (row, out) in out.chunks_exact_mut(3 * width).enumerate() {
                for (out, y) in out.chunks_exact_mut(3).zip(&y[row * y_stride..]) {
                    out.fill(((f32::from(*y) - black) * brightness).round().clamp(0.0, 255.0) as u8);
                }
            }
            return Ok(());
        }
        PixelLayout::I420 => (2, 2),
        PixelLayout::I422 => (2, 1),
        PixelLayout::I444 => (1, 1),
    };
    let (u, stride) = plane(PlanarImageComponent::U);
    let (v, _) = plane(PlanarImageComponent::V);
    for (row, out) in out.chunks_exact_mut(3 * width).enumerate() {
        let colours = row / down * stride;
        for (column, out) in out.chunks_exact_mut(3).enumerate() {
            let y = (f32::from(y[row * y_stride + column]) - black) * brightness;
            let u = f32::from(u[colours + column / across]) - 128.0;
            let v = f32::from(v[colours + column / across]) - 128.0;
            let byte = |x: f32| x.round().clamp(0.0, 255.0) as u8;
            out.copy_from_slice(&[
                byte(y + red_v * v),
                byte(y - green_u * u - green_v * v),
                byte(y + blue_u * u),
            ]);
        }
    }
    Ok(())
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
                 encode the video as av1",
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
