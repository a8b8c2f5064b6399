//! Parameters and persistent state: named tensors that outlive programs and are shared by them without
//! copying.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use crate::allocation::{Allocation, bytes_of};
use crate::cpu::pool::Pool;
use crate::device::Device;
use crate::error::{Error, Result, nearest};
use crate::graph::Graph;
use crate::lock::StoreLock;
use crate::types::{Element, TensorType};

#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    /// Shared, so that a look-up allocates nothing.
    pub ty: Arc<TensorType>,
    pub buffer: Arc<Allocation>,
}

impl Tensor {
    /// Calls `f` with the bytes of the tensor, copied to the host if need be. The caller must hold the lock
    /// of the store.
    fn read<R>(&self, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
        match &*self.buffer {
            Allocation::Host(buffer) => {
                // SAFETY: the memory holds this many bytes, and the lock excludes writers.
                let bytes = unsafe { std::slice::from_raw_parts(buffer.ptr(), self.ty.bytes()) };
                Ok(f(bytes))
            }
            #[cfg(feature = "cuda")]
            Allocation::Cuda(buffer) => {
                // Words of 8 bytes, so that all elements are aligned.
                let mut words = vec![0u64; self.ty.bytes().div_ceil(8)];
                // SAFETY: plain numbers of at least this many bytes.
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), self.ty.bytes()) };
                buffer.read([(0, &mut *bytes)].into_iter())?;
                Ok(f(bytes))
            }
        }
    }
}

#[derive(Debug)]
struct Inner {
    device: Device,
    lock: Arc<StoreLock>,
    tensors: RwLock<BTreeMap<String, Tensor>>,
}

/// Named tensors that programs share. A clone shares the same tensors; [`Store::duplicate`] copies them.
///
/// Programs that only read a store run side by side. A program that updates the store waits for all others.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

impl Default for Store {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({} tensors)", self.names().len())
    }
}

impl Store {
    /// An empty store in the host's memory.
    pub fn new() -> Self {
        Self::on(Pool::serial())
    }

    /// An empty store in a device's memory, for programs of that device.
    pub fn on(device: impl Into<Device>) -> Self {
        Self(Arc::new(Inner { device: device.into(), lock: Arc::default(), tensors: RwLock::default() }))
    }

    /// A store in a device's memory with copies of all tensors.
    pub fn to(&self, device: impl Into<Device>) -> Result<Self> {
        let copy = Store::on(device);
        let _guard = self.0.lock.read();
        for (name, tensor) in self.0.tensors.read().unwrap_or_else(PoisonError::into_inner).iter() {
            copy.insert(name, TensorType::clone(&tensor.ty))?;
            let target = copy.tensor(name)?.buffer;
            tensor.read(|data| {
                // SAFETY: nobody else knows the target; sizes agree.
                unsafe { target.write([(0, data)].into_iter()) }
            })??;
        }
        Ok(copy)
    }

    /// Adds zeros for every parameter and state of `graph` that the store does not have. Tensors that the
    /// store has must have the type that the graph declares.
    pub fn declare(&self, graph: &Graph) -> Result<()> {
        self.declare_params(graph)?;
        self.declare_states(graph)
    }

    /// [`Store::declare`] for parameters only.
    pub fn declare_params(&self, graph: &Graph) -> Result<()> {
        graph.params().try_for_each(|(name, value)| self.insert(name, graph.ty(value)?.clone()))
    }

    /// [`Store::declare`] for states only.
    pub fn declare_states(&self, graph: &Graph) -> Result<()> {
        graph.states().try_for_each(|(name, value)| self.insert(name, graph.ty(value)?.clone()))
    }

    /// Adds a tensor of zeros of the given type, or checks that the tensor `name` already has this type.
    pub fn insert(&self, name: &str, ty: TensorType) -> Result<()> {
        let refused = |expected| Error::Stored { name: name.to_owned(), expected, got: ty.to_string() };
        ty.valid().map_err(refused)?;
        let mut tensors = self.0.tensors.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(existing) = tensors.get(name) {
            if *existing.ty == ty {
                return Ok(());
            }
            return Err(Error::StoreMismatch {
                name: name.to_owned(),
                expected: ty.to_string(),
                got: existing.ty.to_string(),
            });
        }
        let buffer = Arc::new(Allocation::new(&self.0.device, ty.bytes(), "a stored tensor")?);
        tensors.insert(name.to_owned(), Tensor { ty: Arc::new(ty), buffer });
        Ok(())
    }

    /// Replaces the contents of the tensor `name`.
    pub fn set<T: Element>(&self, name: &str, data: &[T]) -> Result<()> {
        let tensor = self.checked::<T>(name)?;
        if tensor.ty.len() != data.len() {
            return Err(Error::Length { name: name.to_owned(), expected: tensor.ty.len(), got: data.len() });
        }
        let _guard = self.0.lock.write();
        // SAFETY: the lock excludes every other reader and writer, and the lengths agree.
        unsafe { tensor.buffer.write([(0, bytes_of(data))].into_iter()) }
    }

    /// Calls `f` with the contents of the tensor `name`.
    pub fn with<T: Element, R>(&self, name: &str, f: impl FnOnce(&[T]) -> R) -> Result<R> {
        let tensor = self.checked::<T>(name)?;
        let _guard = self.0.lock.read();
        tensor.read(|data| {
            // SAFETY: the memory is aligned and holds this many elements of this type.
            f(unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<T>(), tensor.ty.len()) })
        })
    }

    /// A copy of the contents of the tensor `name`.
    pub fn get<T: Element>(&self, name: &str) -> Result<Vec<T>> {
        self.with(name, <[T]>::to_vec)
    }

    /// Type of the tensor `name`.
    pub fn ty(&self, name: &str) -> Result<TensorType> {
        Ok(TensorType::clone(&self.tensor(name)?.ty))
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<String> {
        self.0.tensors.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    /// A store on the same device with copies of all tensors.
    pub fn duplicate(&self) -> Result<Self> {
        self.to(&self.0.device)
    }

    /// The device whose memory holds the tensors.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    pub(crate) fn lock(&self) -> &Arc<StoreLock> {
        &self.0.lock
    }

    pub(crate) fn find(&self, name: &str) -> Option<Tensor> {
        self.0.tensors.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    fn tensor(&self, name: &str) -> Result<Tensor> {
        self.find(name).ok_or_else(|| Error::UnknownName {
            kind: "stored tensor",
            name: name.to_owned(),
            nearest: nearest(name, self.names().iter().map(String::as_str)),
        })
    }

    pub(crate) fn checked<T: Element>(&self, name: &str) -> Result<Tensor> {
        let tensor = self.tensor(name)?;
        if tensor.ty.dtype != T::DTYPE {
            let (expected, got) = (tensor.ty.dtype, T::DTYPE);
            return Err(Error::ElementType { name: name.to_owned(), expected, got });
        }
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::DType;

    #[test]
    fn contents_are_typed_and_sized() {
        let store = Store::new();
        store.insert("w", TensorType::new(DType::F32, [2, 2])).unwrap();
        assert_eq!(store.get::<f32>("w").unwrap(), [0.0; 4]);
        store.set("w", &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
        let copy = store.duplicate().unwrap();
        store.set("w", &[0.0f32; 4]).unwrap();
        assert_eq!(copy.get::<f32>("w").unwrap(), [1.0, 2.0, 3.0, 4.0]);

        let message = |r: Result<()>| r.unwrap_err().to_string();
        assert_eq!(message(store.set("w", &[1.0f64; 4])), "`w` holds f32, got f64 data");
        assert_eq!(message(store.set("w", &[1.0f32; 3])), "`w` has 4 elements, got 3");
        assert_eq!(
            message(store.set("v", &[1.0f32; 4])),
            "there is no stored tensor named `v`; did you mean `w`?"
        );
        assert_eq!(
            message(store.insert("w", TensorType::new(DType::F32, [4]))),
            "`w` is f32[4] in the graph, but f32[2, 2] in the store"
        );
        assert_eq!(
            message(store.insert("x", TensorType::new(DType::F32, [2, 0]))),
            "`x`: expected at most 6 axes, none of them 0, and at most 1099511627776 bytes, got f32[2, 0]"
        );
    }
}
