//! Pictures that are stored as files of their own, one per step: PNG and JPEG.

use std::io::Cursor;

use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

/// Decodes a PNG or JPEG file, told apart by its first bytes, into `to`: [height, width, channels], or
/// [height, width] for `channels` of 1. A picture of another size is an error before it is decoded.
pub(crate) fn decode(
    bytes: &[u8],
    (height, width, channels): (usize, usize, usize),
    to: &mut Vec<u8>,
) -> Result<(), String> {
    if bytes.starts_with(b"\x89PNG") {
        png(bytes, (height, width, channels), to)
    } else if bytes.starts_with(&[0xff, 0xd8]) {
        jpeg(bytes, (height, width, channels), to)
    } else {
        let start = &bytes[..bytes.len().min(4)];
        Err(format!("a picture that begins with {start:02x?}; expected a PNG or JPEG file"))
    }
}

fn other_size(wanted: (usize, usize), got: (usize, usize)) -> String {
    format!("expected a picture of {} x {} (height x width), got {} x {}", wanted.0, wanted.1, got.0, got.1)
}

fn jpeg(
    bytes: &[u8],
    (height, width, channels): (usize, usize, usize),
    to: &mut Vec<u8>,
) -> Result<(), String> {
    let fail = |e: zune_jpeg::errors::DecodeErrors| format!("JPEG: {e:?}");
    let colors = match channels {
        1 => ColorSpace::Luma,
        3 => ColorSpace::RGB,
        other => return Err(format!("a JPEG for {other} channels; expected 1 or 3")),
    };
    let options = DecoderOptions::default()
        .set_max_width(width)
        .set_max_height(height)
        .set_strict_mode(true)
        .jpeg_set_out_colorspace(colors);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(fail)?;
    let got = decoder.dimensions().map_or((0, 0), |(width, height)| (height, width));
    if got != (height, width) {
        return Err(other_size((height, width), got));
    }
    let pixels = decoder.decode().map_err(fail)?;
    if pixels.len() != height * width * channels {
        return Err(format!("a JPEG of {} numbers; expected {}", pixels.len(), height * width * channels));
    }
    to.extend(pixels);
    Ok(())
}

fn png(
    bytes: &[u8],
    (height, width, channels): (usize, usize, usize),
    to: &mut Vec<u8>,
) -> Result<(), String> {
    let fail = |e: png::DecodingError| format!("PNG: {e}");
    let size = height.saturating_mul(width).saturating_mul(4);
    let limits = png::Limits { bytes: size.saturating_mul(2).saturating_add(1 << 20) };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), limits);
    decoder.set_transformations(png::Transformations::EXPAND | png::Transformations::STRIP_16);
    decoder.set_ignore_text_chunk(true);
    let mut reader = decoder.read_info().map_err(fail)?;
    let got = (reader.info().height as usize, reader.info().width as usize);
    if got != (height, width) {
        return Err(other_size((height, width), got));
    }
    let (color, _) = reader.output_color_type();
    let len = reader.output_buffer_size().filter(|len| *len <= size);
    let mut pixels = vec![0; len.ok_or("PNG: more bytes than its pixels have")?];
    reader.next_frame(&mut pixels).map_err(fail)?;
    let has = color.samples();
    match (has, channels) {
        (has, wanted) if has == wanted => to.extend(pixels),
        // An alpha channel that nobody asked for.
        (4, 3) => to.extend(pixels.chunks_exact(4).flat_map(|x| &x[..3])),
        (2, 1) => to.extend(pixels.iter().step_by(2)),
        (1, 3) => to.extend(pixels.iter().flat_map(|x| [x; 3])),
        (has, wanted) => return Err(format!("a PNG of {has} channels; expected {wanted}")),
    }
    Ok(())
}
