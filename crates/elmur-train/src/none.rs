//! `null` for none in configs, where earlier files have 0.

use serde::{Deserialize, Deserializer};

/// Reads null, or a positive number. 0 means none, as in earlier files.
pub(crate) fn none_or_positive<'de, D: Deserializer<'de>, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: Deserialize<'de> + PartialEq + From<u8>,
{
    Ok(Option::<T>::deserialize(deserializer)?.filter(|n| *n != T::from(0)))
}
