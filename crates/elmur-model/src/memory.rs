//! A session's memory as a value: saved, restored, compared.
//!
//! File format: safetensors. `times` is i64 `[B]`, `clock` i64 `[2]` = (tokens per step, steps per segment); every other tensor
//! is a session state by its name (`memory.<layer>`, `anchors.<layer>`, and the open segment's caches).

use std::path::Path;

use elmur_engine::{DType, Program, Store, TensorType};

use crate::error::{Error, Result};
use crate::tensors::{self, HostTensor, Numbers, Tensors};

/// Everything a session remembers: per layer vectors [B, M, d] and anchors [B, M], the open segment, time per row.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryState {
    /// Tokens per environment step: anchors count tokens.
    pub(crate) per_step: u64,
    /// Environment steps per segment.
    pub(crate) segment_length: u64,
    pub(crate) times: Vec<u64>,
    pub(crate) tensors: Tensors,
}

/// Environment steps that a session counts to: two thousand years at a thousand steps a second, far from any overflow.
pub(crate) const MAX_TIME: u64 = 1 << 46;

impl MemoryState {
    /// Environment steps since each row's episode began.
    pub fn times(&self) -> &[u64] {
        &self.times
    }

    /// All tensors by name.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// The same memory `steps` environment steps later, anchors and all. Differences of times stay what they were, so once all
    /// slots have been written the policy acts the same. `steps` must be a whole number of segments.
    pub fn shifted(&self, steps: u64) -> Result<Self> {
        let latest = self.times.iter().copied().max().unwrap_or(0);
        if !steps.is_multiple_of(self.segment_length) || steps > MAX_TIME || latest + steps > MAX_TIME {
            let expected = format!("a multiple of {} that ends before {MAX_TIME}", self.segment_length);
            return Err(Error::input("shift", expected, steps.to_string()));
        }
        let mut shifted = self.clone();
        shifted.times.iter_mut().for_each(|t| *t += steps);
        let tokens = (steps * self.per_step) as i64;
        for (name, tensor) in &mut shifted.tensors {
            if let (true, Numbers::I64(anchors)) = (name.starts_with("anchors."), &mut tensor.numbers) {
                anchors.iter_mut().filter(|a| **a >= 0).for_each(|a| *a += tokens);
            }
        }
        Ok(shifted)
    }

    /// As bytes of a safetensors file.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut all = self.tensors.clone();
        let integers = |x: Vec<i64>| HostTensor { shape: vec![x.len()], numbers: Numbers::I64(x) };
        all.insert("times".to_owned(), integers(self.times.iter().map(|t| *t as i64).collect()));
        all.insert("clock".to_owned(), integers(vec![self.per_step as i64, self.segment_length as i64]));
        tensors::serialise(&all)
            .map_err(|problem| Error::input("memory state", "serialisable tensors", problem))
    }

    /// From bytes of [`MemoryState::to_bytes`]. Times and anchors are checked to be possible.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = |got: &str| Error::input("memory state", "a saved session memory", got);
        let mut tensors = tensors::parse(bytes).map_err(|problem| bad(&problem))?;
        let mut integers = |name: &str| match tensors.remove(name).map(|t| t.numbers) {
            Some(Numbers::I64(x)) if x.iter().all(|x| (0..=MAX_TIME as i64).contains(x)) => Some(x),
            _ => None,
        };
        let times = integers("times").ok_or_else(|| bad("no valid `times`"))?;
        let clock: Option<[i64; 2]> = integers("clock").and_then(|c| c.try_into().ok());
        let [per_step, segment_length] = clock
            .filter(|[per_step, length]| (1..=3).contains(per_step) && *length >= 1)
            .ok_or_else(|| bad("no valid `clock`"))?;
        let times: Vec<u64> = times.iter().map(|t| *t as u64).collect();
        for (name, tensor) in tensors.iter().filter(|(name, _)| name.starts_with("anchors.")) {
            let Numbers::I64(anchors) = &tensor.numbers else {
                return Err(bad(&format!("no integers in `{name}`")));
            };
            let slots = anchors.len().checked_div(times.len()).unwrap_or(0).max(1);
            let possible = |(row, row_anchors): (usize, &[i64])| {
                let now = times.get(row).map_or(0, |t| (*t as i64 + 1) * per_step);
                row_anchors.iter().all(|a| (-1..now).contains(a))
            };
            if !anchors.chunks(slots).enumerate().all(possible) {
                return Err(bad(&format!("impossible times in `{name}`")));
            }
        }
        Ok(Self { per_step: per_step as u64, segment_length: segment_length as u64, times, tensors })
    }

    /// Writes a file, aside and renamed.
    pub fn save(&self, path: &Path) -> Result<()> {
        tensors::write_atomic(path, &self.to_bytes()?)
    }

    /// Reads a file of [`MemoryState::save`].
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, e))?;
        Self::from_bytes(&bytes).map_err(|e| Error::file(path, e.to_string()))
    }
}

/// The states of a store that `keep` names.
pub(crate) fn from_store(store: &Store, keep: impl Fn(&str) -> bool) -> Result<Tensors> {
    let mut tensors = Tensors::new();
    for name in store.names().into_iter().filter(|name| keep(name)) {
        let ty = store.ty(&name)?;
        let numbers = match ty.dtype {
            DType::I64 => Numbers::I64(store.get(&name)?),
            _ => Numbers::F32(store.get(&name)?),
        };
        tensors.insert(name, HostTensor { shape: ty.shape, numbers });
    }
    Ok(tensors)
}

/// Adds the inputs of a window program under `window.<name>`.
pub(crate) fn from_window(window: &Program, names: &[String], tensors: &mut Tensors) -> Result<()> {
    for name in names {
        let ty = window.input_type(name)?;
        let numbers = match ty.dtype {
            DType::I32 => {
                Numbers::I64(window.input_data::<i32>(name)?.iter().map(|x| i64::from(*x)).collect())
            }
            _ => Numbers::F32(window.input_data::<f32>(name)?.to_vec()),
        };
        tensors.insert(format!("window.{name}"), HostTensor { shape: ty.shape.clone(), numbers });
    }
    Ok(())
}

/// Puts tensors back; all are checked before any is changed.
pub(crate) fn restore(
    tensors: &Tensors,
    store: &Store,
    keep: impl Fn(&str) -> bool,
    window: Option<(&mut Program, &[String])>,
) -> Result<()> {
    let check = |name: &str, ty: &TensorType| -> Result<()> {
        let Some(tensor) = tensors.get(name) else {
            return Err(Error::input("restore", format!("a tensor `{name}`"), "none"));
        };
        if tensor.shape != ty.shape {
            let expected = format!("`{name}` {:?}", ty.shape);
            return Err(Error::input("restore", expected, format!("{:?}", tensor.shape)));
        }
        let fits = match (&tensor.numbers, ty.dtype) {
            (Numbers::I64(_), DType::I64) => true,
            (Numbers::I64(x), DType::I32) => x.iter().all(|x| i32::try_from(*x).is_ok()),
            (Numbers::F32(x), DType::F32) => x.iter().all(|x| x.is_finite()),
            _ => false,
        };
        if fits {
            Ok(())
        } else {
            Err(Error::input("restore", format!("finite {} in `{name}`", ty.dtype), "others"))
        }
    };
    let names: Vec<String> = store.names().into_iter().filter(|name| keep(name)).collect();
    for name in &names {
        check(name, &store.ty(name)?)?;
    }
    if let Some((window, inputs)) = window {
        for name in inputs {
            check(&format!("window.{name}"), window.input_type(name)?)?;
        }
        for name in inputs {
            match tensors.get(&format!("window.{name}")).map(|t| &t.numbers) {
                Some(Numbers::I64(x)) => {
                    window.set(name, &x.iter().map(|x| *x as i32).collect::<Vec<_>>())?
                }
                Some(Numbers::F32(x)) => window.set(name, x)?,
                _ => {}
            }
        }
    }
    for name in &names {
        match tensors.get(name).map(|t| &t.numbers) {
            Some(Numbers::I64(x)) => store.set(name, x)?,
            Some(Numbers::F32(x)) => store.set(name, x)?,
            _ => {}
        }
    }
    Ok(())
}
