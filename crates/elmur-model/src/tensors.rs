//! Tensor files (safetensors), read with full validation: sizes first, then the checksum that files of this
//! library carry.

pub(crate) mod checksum;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::error::{Error, Result};

/// Largest file that is read, in bytes.
const MAX_FILE: u64 = 1 << 36;

/// Numbers of a tensor in memory, row-major.
#[derive(Debug, Clone, PartialEq)]
pub enum TensorData {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit floats.
    F64(Vec<f64>),
    /// 64-bit integers.
    I64(Vec<i64>),
    /// Bytes.
    U8(Vec<u8>),
}

impl TensorData {
    /// Appends numbers of the same type; others leave these alone.
    pub fn extend(&mut self, more: TensorData) {
        match (self, more) {
            (TensorData::F32(all), TensorData::F32(more)) => all.extend(more),
            (TensorData::F64(all), TensorData::F64(more)) => all.extend(more),
            (TensorData::I64(all), TensorData::I64(more)) => all.extend(more),
            (TensorData::U8(all), TensorData::U8(more)) => all.extend(more),
            _ => {}
        }
    }

    /// The numbers as f64.
    pub fn to_f64(&self) -> Vec<f64> {
        match self {
            TensorData::F32(x) => x.iter().map(|x| f64::from(*x)).collect(),
            TensorData::F64(x) => x.clone(),
            TensorData::I64(x) => x.iter().map(|x| *x as f64).collect(),
            TensorData::U8(x) => x.iter().map(|x| f64::from(*x)).collect(),
        }
    }
}

/// A tensor in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct HostTensor {
    /// Extent of each axis.
    pub shape: Vec<usize>,
    /// Row-major elements.
    pub data: TensorData,
}

impl HostTensor {
    /// Elements as f64.
    pub fn to_f64(&self) -> Vec<f64> {
        self.data.to_f64()
    }

    fn bytes(&self) -> (Dtype, Vec<u8>) {
        match &self.data {
            TensorData::F32(x) => (Dtype::F32, x.iter().flat_map(|x| x.to_le_bytes()).collect()),
            TensorData::F64(x) => (Dtype::F64, x.iter().flat_map(|x| x.to_le_bytes()).collect()),
            TensorData::I64(x) => (Dtype::I64, x.iter().flat_map(|x| x.to_le_bytes()).collect()),
            TensorData::U8(x) => (Dtype::U8, x.clone()),
        }
    }
}

/// All tensors of a file by name.
pub type Tensors = BTreeMap<String, HostTensor>;

/// Texts that a file carries beside its tensors, by name.
pub type Notes = BTreeMap<String, String>;

/// Reads a tensor file, whoever wrote it. Every size is checked against the file before anything is allocated
/// for it; where the file carries a checksum, it must fit.
pub fn read(path: &Path) -> Result<Tensors> {
    parse(&read_bytes(path)?).map_err(|problem| Error::file(path, problem))
}

/// Reads a tensor file that this library wrote, and its notes. Files of earlier versions have no checksum;
/// where there is one it must fit.
pub fn read_own(path: &Path) -> Result<(Tensors, Notes)> {
    parse_own(&read_bytes(path)?).map_err(|problem| Error::file(path, problem))
}

/// The bytes of a file that is not larger than any tensor file.
pub(crate) fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let about = fs::metadata(path).map_err(|e| Error::io(path, e))?;
    // Opening a pipe would wait for a writer; devices have no end.
    if !about.is_file() {
        let what = if about.is_dir() { "a folder" } else { "a pipe, device or socket" };
        return Err(Error::file(path, format!("{what}; expected a file of tensors: give the name of one")));
    }
    let size = about.len();
    if size > MAX_FILE {
        let problem = format!("{size} bytes is more than a checkpoint can have ({MAX_FILE})");
        return Err(Error::file(path, problem));
    }
    fs::read(path).map_err(|e| Error::io(path, e))
}

/// Parses the bytes of a tensor file as [`read`] does; the error says what is wrong.
pub fn parse(bytes: &[u8]) -> std::result::Result<Tensors, String> {
    Ok(parse_as(bytes, false)?.0)
}

/// Parses the bytes of a tensor file as [`read_own`] does; the error says what is wrong.
pub fn parse_own(bytes: &[u8]) -> std::result::Result<(Tensors, Notes), String> {
    parse_as(bytes, true)
}

fn parse_as(bytes: &[u8], own: bool) -> std::result::Result<(Tensors, Notes), String> {
    let invalid =
        |e| format!("not a valid safetensors file ({e}); is it truncated, damaged or of another format?");
    let file = SafeTensors::deserialize(bytes).map_err(invalid)?;
    let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(invalid)?;
    let mut views: Vec<(&str, TensorView<'_>)> = file.iter().collect();
    views.sort_unstable_by_key(|(name, _)| *name);
    let notes = checksum::open(&metadata, &views, own)?;
    let mut tensors = Tensors::new();
    for (name, view) in views {
        let data = data_of(&view).ok_or_else(|| {
            format!(
                "tensor `{name}` has element type {:?}; expected F64, F32, F16, BF16, I64, I32 or U8",
                view.dtype()
            )
        })?;
        tensors.insert(name.to_owned(), HostTensor { shape: view.shape().to_vec(), data });
    }
    Ok((tensors, notes))
}

fn data_of(view: &TensorView<'_>) -> Option<TensorData> {
    fn all<const N: usize, T>(data: &[u8], f: impl Fn([u8; N]) -> T) -> Vec<T> {
        data.as_chunks::<N>().0.iter().map(|b| f(*b)).collect()
    }
    let data = view.data();
    Some(match view.dtype() {
        Dtype::F64 => TensorData::F64(all(data, f64::from_le_bytes)),
        Dtype::F32 => TensorData::F32(all(data, f32::from_le_bytes)),
        Dtype::BF16 => TensorData::F32(all(data, |b| f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16))),
        Dtype::F16 => TensorData::F32(all(data, |b| half_to_f32(u16::from_le_bytes(b)))),
        Dtype::I64 => TensorData::I64(all(data, i64::from_le_bytes)),
        Dtype::U8 => TensorData::U8(data.to_vec()),
        Dtype::I32 => TensorData::I64(all(data, |b| i64::from(i32::from_le_bytes(b)))),
        _ => return None,
    })
}

/// IEEE half precision to single.
fn half_to_f32(bits: u16) -> f32 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f32::from(bits & 1023));
    sign * match exponent {
        0 => mantissa * 2f32.powi(-24),
        31 if mantissa == 0.0 => f32::INFINITY,
        31 => f32::NAN,
        e => (1024.0 + mantissa) * 2f32.powi(e - 25),
    }
}

/// The bytes of a tensor file with a checksum. The same tensors give the same bytes.
pub fn serialise(tensors: &Tensors) -> std::result::Result<Vec<u8>, String> {
    serialise_with(tensors, &Notes::new())
}

/// [`serialise`] with notes for the reader, which the checksum covers too.
pub fn serialise_with(tensors: &Tensors, notes: &Notes) -> std::result::Result<Vec<u8>, String> {
    let data: Vec<_> = tensors.iter().map(|(name, tensor)| (name, tensor, tensor.bytes())).collect();
    let mut views = Vec::new();
    for (name, tensor, (dtype, bytes)) in &data {
        let view = TensorView::new(*dtype, tensor.shape.clone(), bytes).map_err(|e| e.to_string())?;
        views.push((name.as_str(), view));
    }
    let metadata = std::iter::once(checksum::seal(&views, notes)?).collect();
    safetensors::serialize(views, Some(metadata)).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Tensors {
        let a =
            HostTensor { shape: vec![2, 3], data: TensorData::F32(vec![1.0, -2.0, 3.5, 0.0, 1e-30, 1e30]) };
        let b = HostTensor { shape: vec![2], data: TensorData::I64(vec![-1, 1 << 40]) };
        Tensors::from([("a".to_owned(), a), ("b".to_owned(), b)])
    }

    #[test]
    fn round_trip() {
        assert_eq!(parse(&serialise(&sample()).unwrap()).unwrap(), sample());
    }

    fn notes() -> Notes {
        Notes::from([("one".to_owned(), "1".to_owned()), ("two \"\\\n".to_owned(), "{\u{e9}}".to_owned())])
    }

    #[test]
    fn notes_are_read_back_and_files_are_the_same_byte_for_byte() {
        let bytes = serialise_with(&sample(), &notes()).unwrap();
        assert_eq!(parse_own(&bytes).unwrap(), (sample(), notes()));
        (0..20).for_each(|_| assert_eq!(serialise_with(&sample(), &notes()).unwrap(), bytes));
    }

    #[test]
    fn a_flip_of_any_bit_is_an_error() {
        let bytes = serialise_with(&sample(), &notes()).unwrap();
        for len in 0..bytes.len() {
            assert!(parse(&bytes[..len]).is_err(), "{len} bytes of {} were accepted", bytes.len());
        }
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(parse_own(&damaged).is_err(), "bit {} of byte {}", bit % 8, bit / 8);
        }
        let mut damaged = bytes.clone();
        *damaged.last_mut().unwrap() ^= 1;
        let error = parse(&damaged).unwrap_err();
        assert!(error.contains("its checksum does not fit") && error.contains("copy it again"), "{error}");
    }

    #[test]
    fn files_of_others_and_of_earlier_versions_have_no_checksum() {
        let view = |notes: &[(&str, &str)]| {
            let tensor = TensorView::new(Dtype::U8, vec![2], &[1, 2]).unwrap();
            let notes = notes.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
            safetensors::serialize([("x", tensor)], Some(notes)).unwrap()
        };
        let pytorch = view(&[("format", "pt")]);
        assert!(parse(&pytorch).is_ok());
        assert!(parse_own(&pytorch).unwrap_err().contains("`format`"));
        let earlier = parse_own(&view(&[("config", "{}")])).unwrap().1;
        assert_eq!(earlier["config"], "{}");
    }

    /// Sizes in a header that do not fit the file.
    #[test]
    fn hostile_headers_are_errors_not_crashes() {
        let mut giant = (1u64 << 60).to_le_bytes().to_vec();
        giant.extend_from_slice(b"{}");
        assert!(parse(&giant).is_err());
        let header = br#"{"a":{"dtype":"F32","shape":[1000000000,1000000000],"data_offsets":[0,4]}}"#;
        let mut hostile = (header.len() as u64).to_le_bytes().to_vec();
        hostile.extend_from_slice(header);
        hostile.extend_from_slice(&[0; 4]);
        assert!(parse(&hostile).is_err());
    }

    #[test]
    fn what_is_not_a_file_is_refused_before_it_is_opened() {
        let folder = std::env::temp_dir();
        assert!(read(&folder).unwrap_err().to_string().contains("a folder; expected a file"));
        #[cfg(unix)]
        {
            let pipe = folder.join(format!("elmur-model-pipe-{}", std::process::id()));
            let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
            assert!(made.success());
            for path in [&pipe, Path::new("/dev/zero")] {
                let error = read(path).unwrap_err().to_string();
                assert!(error.contains("a pipe, device or socket"), "{error}");
            }
            fs::remove_file(&pipe).unwrap();
        }
    }

    #[test]
    fn half_precision_is_read_exactly() {
        for (bits, want) in
            [(0x3c00, 1.0), (0xc000, -2.0), (0x7bff, 65504.0), (0x0001, 5.960_464_5e-8), (0, 0.0)]
        {
            assert_eq!(half_to_f32(bits), want);
        }
        assert!(half_to_f32(0x7e00).is_nan());
    }
}
