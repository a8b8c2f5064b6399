//! What a tensor file of this library carries beside its tensors: notes, and a checksum over everything.
//!
//! Both lie in one entry of the file's metadata, because the order of several is not fixed and files are
//! the same byte for byte.

use crc32fast::Hasher;
use safetensors::tensor::{Metadata, TensorView};
use serde::{Deserialize, Serialize};

use super::Notes;

/// The entry of the metadata.
const ENTRY: &str = "elmur";

/// Entries that earlier versions wrote: single notes, without a checksum.
const EARLIER: [&str; 2] = ["config", "time_states"];

/// Notes and checksum as they lie in a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    notes: Notes,
    checksum: u32,
}

/// The one entry of the metadata of a file with these tensors, which are sorted by name.
pub(super) fn seal(tensors: &[(&str, TensorView<'_>)], notes: &Notes) -> Result<(String, String), String> {
    let checksum = checksum(tensors, notes);
    let envelope = Envelope { notes: notes.clone(), checksum };
    let text = serde_json::to_string(&envelope).map_err(|e| e.to_string())?;
    Ok((ENTRY.to_owned(), text))
}

/// The notes of a file whose contents fit its checksum. Files without one are those of earlier versions and,
/// unless the file must be this library's (`own`), of others.
pub(super) fn open(
    metadata: &Metadata,
    tensors: &[(&str, TensorView<'_>)],
    own: bool,
) -> Result<Notes, String> {
    let Some(entries) = metadata.metadata() else { return Ok(Notes::new()) };
    let foreign = |name: &&String| *name != ENTRY && !EARLIER.contains(&name.as_str());
    if own && let Some(name) = entries.keys().find(foreign) {
        let name: String = name.chars().take(40).collect();
        return Err(format!(
            "its header has an entry `{name}` that this library does not write: the file is damaged \
             or was made by another program"
        ));
    }
    let Some(text) = entries.get(ENTRY) else {
        return Ok(entries.iter().map(|(name, text)| (name.clone(), text.clone())).collect());
    };
    let envelope: Envelope = serde_json::from_str(text)
        .map_err(|e| format!("its notes cannot be read ({e}): the file is damaged; {REMEDY}"))?;
    if envelope.checksum != checksum(tensors, &envelope.notes) {
        return Err(format!("its checksum does not fit its contents: the file is damaged; {REMEDY}"));
    }
    Ok(envelope.notes)
}

/// What to do about a damaged file.
const REMEDY: &str = "copy it again from where it came, or go back to an earlier one";

/// CRC-32 of names, element types, shapes and bytes of the tensors, which are sorted by name, and of the
/// notes.
fn checksum(tensors: &[(&str, TensorView<'_>)], notes: &Notes) -> u32 {
    let mut hasher = Hasher::new();
    number(&mut hasher, tensors.len());
    for (name, tensor) in tensors {
        bytes(&mut hasher, name.as_bytes());
        bytes(&mut hasher, tensor.dtype().to_string().as_bytes());
        shape(&mut hasher, tensor.shape());
        bytes(&mut hasher, tensor.data());
    }
    for (name, text) in notes {
        bytes(&mut hasher, name.as_bytes());
        bytes(&mut hasher, text.as_bytes());
    }
    hasher.finalize()
}

/// Adds a number to a checksum.
fn number(hasher: &mut Hasher, n: usize) {
    hasher.update(&(n as u64).to_le_bytes());
}

/// Adds bytes and their number to a checksum, so that what comes next cannot be taken for their end.
pub(crate) fn bytes(hasher: &mut Hasher, bytes: &[u8]) {
    number(hasher, bytes.len());
    hasher.update(bytes);
}

/// Adds a shape to a checksum.
pub(crate) fn shape(hasher: &mut Hasher, shape: &[usize]) {
    number(hasher, shape.len());
    shape.iter().for_each(|n| number(hasher, *n));
}
