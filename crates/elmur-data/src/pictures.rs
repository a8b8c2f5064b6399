//! Pictures that are stored as files of their own, one per step: PNG and JPEG.

use std::io::Cursor;

use jpeg_decoder::PixelFormat;

/// Most passes over a JPEG picture: progressive files have about ten. A file of nothing but passes would take
/// hours.
const MOST_SCANS: usize = 256;

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
    let fail = |e: jpeg_decoder::Error| format!("JPEG: {e}");
    let scans = bytes.windows(2).filter(|pair| *pair == [0xff, 0xda]).count();
    if scans > MOST_SCANS {
        return Err(format!("a JPEG of {scans} scans; expected at most {MOST_SCANS}"));
    }
    let mut decoder = jpeg_decoder::Decoder::new(bytes);
    decoder.read_info().map_err(fail)?;
    let info = decoder.info().ok_or("a JPEG without a size")?;
    let got = (usize::from(info.height), usize::from(info.width));
    if got != (height, width) {
        return Err(other_size((height, width), got));
    }
    let pixels = decoder.decode().map_err(fail)?;
    match (info.pixel_format, channels) {
        (PixelFormat::L8, 1) | (PixelFormat::RGB24, 3) => to.extend(pixels),
        (PixelFormat::L8, 3) => to.extend(pixels.iter().flat_map(|x| [x; 3])),
        (format, wanted) => {
            return Err(format!("a JPEG of {format:?} for {wanted} channels; expected 1 or 3"));
        }
    }
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn file(name: &str) -> Vec<u8> {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/pictures");
        std::fs::read(folder.join(name)).unwrap()
    }

    /// Colours of half the resolution and a width that is no multiple of a block's: the last columns must not
    /// take colours from beyond the edge.
    #[test]
    fn jpeg_pictures_are_those_of_pillow_to_the_last_column() {
        for name in ["baseline", "progressive"] {
            let (bytes, expected, mut got) =
                (file(&format!("{name}.jpg")), file(&format!("{name}.rgb")), Vec::new());
            decode(&bytes, (17, 20, 3), &mut got).unwrap();
            assert_eq!(got.len(), expected.len());
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                assert!(got.abs_diff(*expected) <= 3, "{name} byte {i}: {got} where Pillow has {expected}");
            }
        }
    }

    #[test]
    fn jpeg_pictures_that_are_cut_of_another_size_or_endless_are_refused() {
        let bytes = file("progressive.jpg");
        let problem = |bytes: &[u8], size| decode(bytes, size, &mut Vec::new()).unwrap_err();
        assert!(problem(&bytes, (20, 17, 3)).contains("expected a picture of 20 x 17"));
        assert!(problem(&bytes, (17, 20, 1)).contains("RGB24 for 1 channels"));
        for length in (2..bytes.len() - 2).step_by(7) {
            assert!(problem(&bytes[..length], (17, 20, 3)).starts_with("JPEG: "), "{length}");
        }
        let start = bytes.windows(2).position(|pair| pair == [0xff, 0xda]).unwrap();
        let scans = [&bytes[..start], &[0xff, 0xda].repeat(300), &bytes[start..]].concat();
        assert!(problem(&scans, (17, 20, 3)).contains("scans; expected at most 256"));
    }
}
