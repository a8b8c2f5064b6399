//! A session's memory as a value: saved, restored, compared.
//!
//! File format: safetensors. `times` is i64 [B]; every other tensor is a session state by its name (`memory.<layer>`,
//! `anchors.<layer>`, and the open segment's caches).

use std::path::Path;

use elmur_engine::{DType, Program, Store};

use crate::error::{Error, Result};
use crate::tensors::{self, HostTensor, Numbers, Tensors};

/// Everything a session remembers: per layer vectors [B, M, d] and anchors [B, M], the open segment, time per row.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryState {
    pub(crate) batch: usize,
    pub(crate) times: Vec<u64>,
    pub(crate) tensors: Tensors,
}

impl MemoryState {
    /// Environment steps since each row's episode began.
    pub fn times(&self) -> &[u64] {
        &self.times
    }

    /// All tensors by name.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// The same memory `steps` environment steps later, anchors and all: nothing that reaches the model changes, so
    /// the policy acts the same. `steps` must be a whole number of segments.
    pub fn shifted(&self, steps: u64) -> Self {
        let mut shifted = self.clone();
        shifted.times.iter_mut().for_each(|t| *t += steps);
        for (name, tensor) in &mut shifted.tensors {
            if let (true, Numbers::I64(anchors)) = (name.starts_with("anchors."), &mut tensor.numbers) {
                anchors.iter_mut().filter(|a| **a >= 0).for_each(|a| *a += steps as i64);
            }
        }
        shifted
    }

    /// As bytes of a safetensors file.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut all = self.tensors.clone();
        let times = self.times.iter().map(|t| *t as i64).collect();
        all.insert("times".to_owned(), HostTensor { shape: vec![self.batch], numbers: Numbers::I64(times) });
        tensors::serialise(&all)
            .map_err(|problem| Error::input("memory state", "serialisable tensors", problem))
    }

    /// From bytes of [`MemoryState::to_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let bad = |got: String| Error::input("memory state", "a saved session memory", got);
        let mut tensors = tensors::parse(bytes).map_err(bad)?;
        let times = match tensors.remove("times").map(|t| t.numbers) {
            Some(Numbers::I64(times)) if times.iter().all(|t| *t >= 0) => {
                times.iter().map(|t| *t as u64).collect()
            }
            _ => return Err(bad("no valid `times`".to_owned())),
        };
        let times: Vec<u64> = times;
        Ok(Self { batch: times.len(), times, tensors })
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

pub(crate) fn from_store(store: &Store) -> Result<Tensors> {
    let mut tensors = Tensors::new();
    for name in store.names() {
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
    window: Option<(&mut Program, &[String])>,
) -> Result<()> {
    let find = |name: &str, shape: &[usize]| -> Result<&HostTensor> {
        match tensors.get(name) {
            Some(tensor) if tensor.shape == shape => Ok(tensor),
            Some(tensor) => {
                Err(Error::input("restore", format!("`{name}` {shape:?}"), format!("{:?}", tensor.shape)))
            }
            None => Err(Error::input("restore", format!("a tensor `{name}`"), "none")),
        }
    };
    let wrong =
        |name: &str| Error::input("restore", format!("`{name}` of the session's element type"), "another");
    for name in store.names() {
        let ty = store.ty(&name)?;
        let tensor = find(&name, &ty.shape)?;
        match (&tensor.numbers, ty.dtype) {
            (Numbers::I64(_), DType::I64) => {}
            (Numbers::F32(x), DType::F32) if x.iter().all(|x| x.is_finite()) => {}
            (Numbers::F32(_), DType::F32) => {
                return Err(Error::input("restore", format!("finite numbers in `{name}`"), "others"));
            }
            _ => return Err(wrong(&name)),
        }
    }
    if let Some((window, names)) = window {
        for name in names {
            let ty = window.input_type(name)?.clone();
            let key = format!("window.{name}");
            match (&find(&key, &ty.shape)?.numbers, ty.dtype) {
                (Numbers::I64(x), DType::I32) => {
                    let x: Vec<i32> = x.iter().map(|x| *x as i32).collect();
                    window.set(name, &x)?;
                }
                (Numbers::F32(x), DType::F32) => window.set(name, x)?,
                _ => return Err(wrong(&key)),
            }
        }
    }
    for name in store.names() {
        match tensors.get(&name).map(|t| &t.numbers) {
            Some(Numbers::I64(x)) => store.set(&name, x)?,
            Some(Numbers::F32(x)) => store.set(&name, x)?,
            _ => {}
        }
    }
    Ok(())
}
