//! The arrays of one `.npz` file: a zip archive of `.npy` arrays, stored or deflated. Sizes are believed only
//! as far as the archive, the array's header and its data agree, and never beyond a limit.

use std::cell::Cell;
use std::io::Read;

use elmur_base::Spaces;
use flate2::bufread::DeflateDecoder;
use rawzip::{CompressionMethod, ZipArchive, ZipArchiveEntryWayfinder};

use crate::array::{Array, Element, Numeric, floats, too_large};
use crate::episode::Episode;
use crate::keys::{Selection, unknown_key};

/// Longest header of an array, in bytes.
const MAX_HEADER: usize = 1 << 16;
/// Most arrays of a file.
const MAX_ARRAYS: usize = 1 << 12;
/// What the names of observations begin with where a file has several.
pub(crate) const SEVERAL: &str = "obs/";
/// What is put before the name of an observation to name the one after the last action.
pub(crate) const FINAL: &str = "final_";

/// The arrays of one file.
pub(crate) struct Recording {
    /// Observations by their keys.
    pub(crate) observations: Vec<(String, Array)>,
    pub(crate) action: Array,
    rewards: Vec<f32>,
    terminated: bool,
    imitate: Option<Vec<bool>>,
}

impl Recording {
    /// Reads the arrays of an archive that inflate to at most `limit` bytes, and take at most as many when
    /// they are decoded. `keys` are the members to take as observations; none: those that `selection` says.
    pub(crate) fn parse(
        bytes: &[u8],
        limit: u64,
        selection: &Selection,
        keys: Option<&[String]>,
    ) -> Result<Self, String> {
        let archive = Archive::open(bytes)?;
        let keys = match keys {
            Some(keys) => keys.to_vec(),
            None => archive.observation_keys(selection)?,
        };
        let finals: Vec<String> = keys.iter().map(|key| format!("{FINAL}{key}")).collect();
        let others = ["action", "reward", "done", "counts"];
        let wanted = keys.iter().chain(&finals).map(String::as_str).chain(others);
        let claimed = wanted.map(|key| archive.claimed(key)).fold(0u64, u64::saturating_add);
        if claimed > limit {
            return Err(too_large(claimed, limit));
        }
        let left = Cell::new(limit);
        let read = |key: &str| archive.read(key, &left);
        let missing = |key: &str| format!("no array `{key}`; expected obs (or rgb), action and reward");
        let action = read("action")?.ok_or_else(|| missing("action"))?;
        let steps = action.rows();
        let mut observations = Vec::with_capacity(keys.len());
        for (key, last) in keys.iter().zip(&finals) {
            let mut array = read(key)?.ok_or_else(|| missing(key))?;
            if let Some(last) = read(last)? {
                array = array.followed_by(last).map_err(|problem| format!("`{FINAL}{key}`: {problem}"))?;
            }
            if ![steps, steps + 1].contains(&array.rows()) {
                let rows = array.rows();
                return Err(format!("{rows} observations for {steps} actions; save as many, or one more"));
            }
            observations.push((key.clone(), array));
        }
        let per_step = |key: &'static str| -> Result<Option<Vec<f32>>, String> {
            let Some(array) = read(key)? else { return Ok(None) };
            match array.numbers.len() == steps {
                true => Ok(Some(floats(array.numbers))),
                false => Err(format!("`{key}` has {} entries for {steps} actions", array.numbers.len())),
            }
        };
        let done = per_step("done")?.and_then(|done| done.last().copied());
        Ok(Self {
            rewards: per_step("reward")?.ok_or_else(|| missing("reward"))?,
            terminated: done != Some(0.0),
            imitate: per_step("counts")?.map(|imitate| imitate.iter().map(|x| *x != 0.0).collect()),
            observations,
            action,
        })
    }

    /// The episode in the columns of given spaces, of which none may take more than `limit` bytes.
    pub(crate) fn into_episode(self, spaces: &Spaces, limit: u64) -> Result<Episode, String> {
        Ok(Episode {
            observations: Array::columns_of(self.observations, &spaces.observation, limit)?,
            actions: self.action.columns("action", &spaces.action, limit)?,
            rewards: self.rewards,
            terminated: self.terminated,
            truncated: !self.terminated,
            imitate: self.imitate,
            labels: None,
            accepted: None,
        })
    }
}

/// An archive and where its arrays lie.
struct Archive<'a> {
    zip: rawzip::ZipSliceArchive<&'a [u8]>,
    members: Vec<(String, ZipArchiveEntryWayfinder, CompressionMethod)>,
}

fn damaged(e: rawzip::Error) -> String {
    format!("not a whole .npz file ({e}); copy or collect it again")
}

impl<'a> Archive<'a> {
    fn open(bytes: &'a [u8]) -> Result<Self, String> {
        let zip = ZipArchive::from_slice(bytes).map_err(damaged)?;
        let mut members: Vec<(String, _, _)> = Vec::new();
        let mut entries = zip.entries();
        while let Some(entry) = entries.next_entry().map_err(damaged)? {
            let path = entry.file_path();
            let Some(name) = path.as_bytes().strip_suffix(b".npy") else { continue };
            let Ok(name) = std::str::from_utf8(name) else { continue };
            if members.iter().any(|(other, ..)| other == name) {
                return Err(format!("two arrays `{name}`; save each once"));
            }
            if members.len() == MAX_ARRAYS {
                return Err(format!("more than {MAX_ARRAYS} arrays; save one episode per file"));
            }
            members.push((name.to_owned(), entry.wayfinder(), entry.compression_method()));
        }
        Ok(Self { zip, members })
    }

    fn names(&self) -> Vec<&str> {
        self.members.iter().map(|(name, ..)| name.as_str()).collect()
    }

    /// The arrays to take as observations: those that are chosen, else `obs`, else all `obs/...`, else `rgb`.
    fn observation_keys(&self, selection: &Selection) -> Result<Vec<String>, String> {
        let names = self.names();
        if !selection.keys.is_empty() {
            let find = |key: &String| {
                let among = format!("{SEVERAL}{key}");
                let name = names.iter().find(|name| **name == among);
                let name = name.or_else(|| names.iter().find(|name| *name == key));
                name.map(|name| (*name).to_owned()).ok_or_else(|| unknown_key(key, &names))
            };
            return selection.keys.iter().map(find).collect();
        }
        if names.contains(&"obs") {
            return Ok(vec!["obs".to_owned()]);
        }
        let several: Vec<String> =
            names.iter().filter(|name| name.starts_with(SEVERAL)).map(|name| (*name).to_owned()).collect();
        match several.is_empty() {
            false => Ok(several),
            true if names.contains(&"rgb") => Ok(vec!["rgb".to_owned()]),
            true => Ok(vec!["obs".to_owned()]),
        }
    }

    /// Bytes that the archive says an array has.
    fn claimed(&self, key: &str) -> u64 {
        let member = self.members.iter().find(|(name, ..)| name == key);
        member.map_or(0, |(_, place, _)| place.uncompressed_size_hint())
    }

    fn read(&self, key: &str, left: &Cell<u64>) -> Result<Option<Array>, String> {
        let Some((_, place, method)) = self.members.iter().find(|(name, ..)| name == key) else {
            return Ok(None);
        };
        let entry = self.zip.get_entry(*place).map_err(damaged)?;
        let data: Box<dyn Read + '_> = match *method {
            CompressionMethod::STORE => Box::new(entry.data()),
            CompressionMethod::DEFLATE => Box::new(DeflateDecoder::new(entry.data())),
            other => return Err(format!("`{key}` is compressed by {other}; use np.savez_compressed")),
        };
        let claimed = place.uncompressed_size_hint();
        let array = read_npy(&mut entry.verifying_reader(data), claimed, left);
        array.map(Some).map_err(|problem| format!("`{key}`: {problem}"))
    }
}

/// Reads an `.npy` file of which the archive says that it has `claimed` bytes; after as many, `source`
/// checks the archive's checksum. What the decoded numbers take is subtracted from what is `left`.
fn read_npy(source: &mut impl Read, claimed: u64, left: &Cell<u64>) -> Result<Array, String> {
    let short = |e: std::io::Error| format!("{e}; the file is damaged, copy or collect it again");
    let mut prefix = [0; 8];
    source.read_exact(&mut prefix).map_err(short)?;
    if !prefix.starts_with(b"\x93NUMPY") {
        return Err("not an .npy array; use np.savez".to_owned());
    }
    let mut len = [0; 4];
    let len_size = if prefix[6] == 1 { 2 } else { 4 };
    source.read_exact(&mut len[..len_size]).map_err(short)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_HEADER {
        return Err(format!("an array header of {len} bytes; use np.savez of plain arrays"));
    }
    let mut header = vec![0; len];
    source.read_exact(&mut header).map_err(short)?;
    let header = String::from_utf8_lossy(&header);
    let (descr, fortran, shape) = parse_header(&header).ok_or_else(|| {
        let start: String = header.chars().take(80).collect();
        format!("an array header that is not understood: {start:?}; use np.savez of plain arrays")
    })?;
    let element = element(descr)?;
    let mut numbers = element.column();
    // Without zeros no product of some axes is larger than that of all.
    if shape.is_empty() || shape.contains(&0) {
        return Err(format!("shape {shape:?}; expected at least one step, and numbers in it"));
    }
    let elements = shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n as u64));
    let bytes = elements.and_then(|n| n.checked_mul(element.size as u64));
    let bytes = bytes.ok_or_else(|| format!("shape {shape:?} is too large; one episode per file"))?;
    let total = ((prefix.len() + len_size + len) as u64).checked_add(bytes);
    if total != Some(claimed) {
        let head = prefix.len() + len_size + len;
        return Err(format!(
            "{shape:?} needs {head} + {bytes} bytes, the archive has {claimed}; copy it again"
        ));
    }
    let held = (bytes / element.size as u64).saturating_mul(numbers.view().element_type().size() as u64);
    let Some(rest) = left.get().checked_sub(held) else {
        return Err(too_large(held, left.get()));
    };
    left.set(rest);
    let mut buffer = vec![0; 1 << 16];
    let mut unread = bytes;
    while unread > 0 {
        let part = &mut buffer[..unread.min(1 << 16) as usize];
        source.read_exact(part).map_err(short)?;
        element.append(part, &mut numbers)?;
        unread -= part.len() as u64;
    }
    Ok(if fortran { Array::from_fortran(shape, numbers) } else { Array { shape, numbers } })
}

/// Element type, Fortran order and shape of a header such as `{'descr': '<f4', 'fortran_order': False,
/// 'shape': (3, 4), }`.
fn parse_header(header: &str) -> Option<(&str, bool, Vec<usize>)> {
    let value = |key: &str| Some(header.split_once(key)?.1.trim_start().strip_prefix(':')?.trim_start());
    let descr = value("'descr'")?.strip_prefix('\'')?.split_once('\'')?.0;
    let fortran = value("'fortran_order'")?;
    if !fortran.starts_with("True") && !fortran.starts_with("False") {
        return None;
    }
    let axes = value("'shape'")?.strip_prefix('(')?.split_once(')')?.0;
    let axes = axes.split(',').map(str::trim).filter(|n| !n.is_empty());
    let shape = axes.map(|n| n.parse().ok()).collect::<Option<Vec<_>>>()?;
    let plausible = descr.len() <= 16 && shape.len() <= 64;
    plausible.then(|| (descr, fortran.starts_with("True"), shape))
}

/// The element type that numpy describes as byte order, kind and size, such as `<f4`.
fn element(descr: &str) -> Result<Element, String> {
    let (order, rest) = match descr.as_bytes() {
        [order @ (b'<' | b'>' | b'|' | b'='), rest @ ..] => (*order, rest),
        rest => (b'<', rest),
    };
    let numeric = match rest {
        [b'f', _] => Some(Numeric::Float),
        [b'i', _] => Some(Numeric::Signed),
        [b'u', _] => Some(Numeric::Unsigned),
        [b'b', _] => Some(Numeric::Flag),
        _ => None,
    };
    let size = rest.get(1).map_or(0, |size| usize::from(size.wrapping_sub(b'0')));
    numeric.and_then(|numeric| Element::new(numeric, size, order == b'>')).ok_or_else(|| {
        format!(
            "element type {descr}; expected f2, f4, f8, i1 to i8, u1 to u8 or b1 (text, objects and structures are \
             not numbers); save x.astype('f4')"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn files() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/npz")
    }

    /// Arrays of all orders, byte orders and types that numpy saved, against what numpy reads.
    #[test]
    fn corner_cases_of_the_format_are_read_as_numpy_reads_them() {
        let expected = std::fs::read_to_string(files().join("expected.json")).unwrap();
        let expected: serde_json::Value = serde_json::from_str(&expected).unwrap();
        let bytes = std::fs::read(files().join("corner.npz")).unwrap();
        let archive = Archive::open(&bytes).unwrap();
        let left = Cell::new(1 << 20);
        for (key, about) in expected["corner"].as_object().unwrap() {
            if key == "u64" {
                assert!(archive.read(key, &left).unwrap_err().contains("beyond 32 bits"));
                continue;
            }
            let array = archive.read(key, &left).unwrap().unwrap();
            let shape: Vec<usize> = serde_json::from_value(about["shape"].clone()).unwrap();
            assert_eq!(array.shape, shape, "{key}");
            let width = array.width();
            let numbers = floats(array.numbers);
            let sum: f64 = numbers.iter().map(|x| f64::from(*x)).sum();
            assert!((sum - about["sum"].as_f64().unwrap()).abs() < 1e-5, "{key}: {sum}");
            let ends =
                [(&about["first"], &numbers[..width]), (&about["last"], &numbers[numbers.len() - width..])];
            for (about, numbers) in ends {
                for (about, number) in about.as_array().unwrap().iter().zip(numbers) {
                    let about = about.as_f64().or(about.as_bool().map(f64::from)).unwrap();
                    assert_eq!(*number, about as f32, "{key}");
                }
            }
        }
    }

    #[test]
    fn objects_structures_and_text_are_refused_unread() {
        for (name, key, text) in [
            ("refuse-object.npz", "obs", "|O"),
            ("refuse-structured.npz", "obs", "not understood"),
            ("odd-scalar-empty-string.npz", "text", "<U5"),
            ("odd-scalar-empty-string.npz", "scalar", "at least one step"),
            ("odd-scalar-empty-string.npz", "empty", "at least one step"),
        ] {
            let bytes = std::fs::read(files().join(name)).unwrap();
            let problem = Archive::open(&bytes).unwrap().read(key, &Cell::new(1 << 20)).unwrap_err();
            assert!(problem.contains(text), "{name}: {problem}");
        }
    }
}
