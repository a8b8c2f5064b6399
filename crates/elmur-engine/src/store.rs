//! Parameters and persistent state: named tensors that outlive programs and are shared by them without copying.

use std::alloc::Layout;
use std::collections::{BTreeMap, VecDeque};
use std::ptr::NonNull;
use std::sync::{Arc, PoisonError, RwLock};

use crate::cpu::pool::Pool;
use crate::device::Device;
use crate::error::{Error, Result, nearest};
use crate::graph::Graph;
use crate::types::{Element, TensorType};

/// Alignment of every buffer: a cache line, and the widest vector.
pub(crate) const ALIGN: usize = 64;

/// Zero-initialised memory of fixed size and address.
#[derive(Debug)]
pub(crate) struct Buffer {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory; who may touch it when is decided by the owners (a store's gate, a program's `&mut`).
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(crate) fn new(bytes: usize, what: &'static str) -> Result<Self> {
        let out_of_memory = || Error::OutOfMemory { bytes, what };
        let align = if bytes >= HUGE_PAGE { HUGE_PAGE } else { ALIGN };
        let size = bytes.max(1).checked_next_multiple_of(align).ok_or_else(out_of_memory)?;
        let layout = Layout::from_size_align(size, align).map_err(|_| out_of_memory())?;
        // SAFETY: the layout has a size above zero.
        let ptr = unsafe {
            if align == ALIGN {
                std::alloc::alloc_zeroed(layout)
            } else {
                let ptr = std::alloc::alloc(layout);
                if !ptr.is_null() {
                    use_huge_pages(ptr, size);
                    ptr.write_bytes(0, size);
                }
                ptr
            }
        };
        Ok(Self { ptr: NonNull::new(ptr).ok_or_else(out_of_memory)?, layout })
    }

    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(self.ptr.as_ptr(), self.layout) }
    }
}

/// Size and alignment of a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Asks for huge pages before the memory is first touched: an arena's rows lie kilobytes apart, more than small pages'
/// translations can be cached for. Best effort.
fn use_huge_pages(ptr: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    {
        unsafe extern "C" {
            fn madvise(address: *mut u8, length: usize, advice: i32) -> i32;
        }
        const MADV_HUGEPAGE: i32 = 14;
        // SAFETY: the range is one whole allocation; the advice changes no contents.
        unsafe { madvise(ptr, bytes, MADV_HUGEPAGE) };
    }
    let _ = (ptr, bytes);
}

/// Memory of a tensor, on the host or on a device.
#[derive(Debug)]
pub(crate) enum Memory {
    Host(Buffer),
    #[cfg(feature = "cuda")]
    Cuda(crate::cuda::DeviceBuffer),
}

impl Memory {
    pub(crate) fn new(device: &Device, bytes: usize, what: &'static str) -> Result<Self> {
        Ok(match device {
            Device::Cpu(_) => Memory::Host(Buffer::new(bytes, what)?),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Memory::Cuda(crate::cuda::DeviceBuffer::new(gpu, bytes, what)?),
        })
    }

    /// Memory with these contents.
    pub(crate) fn with(device: &Device, data: &[u8], what: &'static str) -> Result<Self> {
        let memory = Self::new(device, data.len(), what)?;
        // SAFETY: it was made this long, and nobody else knows it yet.
        unsafe { memory.write([(0, data)].into_iter())? };
        Ok(memory)
    }

    /// Address of the first byte, on whichever device it lies.
    pub(crate) fn ptr(&self) -> *mut u8 {
        match self {
            Memory::Host(buffer) => buffer.ptr(),
            #[cfg(feature = "cuda")]
            Memory::Cuda(buffer) => buffer.address() as *mut u8,
        }
    }

    /// Whether programs of `device` can use it where it lies.
    pub(crate) fn is_on(&self, device: &Device) -> bool {
        match (self, device) {
            (Memory::Host(_), Device::Cpu(_)) => true,
            #[cfg(feature = "cuda")]
            (Memory::Cuda(buffer), Device::Cuda(gpu)) => buffer.gpu().same_queue(gpu),
            #[cfg(feature = "cuda")]
            _ => false,
        }
    }

    /// Replaces parts of the contents: (byte offset, new bytes) each, in order.
    ///
    /// # Safety
    /// The parts must lie inside the memory, and nobody else may use it meanwhile.
    pub(crate) unsafe fn write<'a>(&self, parts: impl Iterator<Item = (usize, &'a [u8])>) -> Result<()> {
        match self {
            Memory::Host(buffer) => {
                for (offset, data) in parts {
                    // SAFETY: by the contract.
                    unsafe {
                        std::ptr::copy_nonoverlapping(data.as_ptr(), buffer.ptr().add(offset), data.len());
                    }
                }
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Memory::Cuda(buffer) => buffer.write(parts),
        }
    }

    /// Copies parts of the contents to the host: (byte offset, where to) each.
    ///
    /// # Safety
    /// The parts must lie inside the memory, and nobody may write it meanwhile.
    pub(crate) unsafe fn read<'a>(&self, parts: impl Iterator<Item = (usize, &'a mut [u8])>) -> Result<()> {
        match self {
            Memory::Host(buffer) => {
                for (offset, data) in parts {
                    // SAFETY: by the contract.
                    unsafe {
                        let from = buffer.ptr().add(offset);
                        std::ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len());
                    }
                }
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Memory::Cuda(buffer) => buffer.read(parts),
        }
    }
}

/// The bytes of numbers.
pub(crate) fn bytes_of<T: Element>(data: &[T]) -> &[u8] {
    // SAFETY: elements are plain numbers without padding.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), size_of_val(data)) }
}

#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    /// Shared, so that looking a tensor up allocates nothing.
    pub ty: Arc<TensorType>,
    pub buffer: Arc<Memory>,
}

impl Tensor {
    /// Calls `f` with the bytes, copied to the host if need be. The gate must be held.
    fn read<R>(&self, f: impl FnOnce(&[u8]) -> R) -> Result<R> {
        match &*self.buffer {
            Memory::Host(buffer) => {
                // SAFETY: the memory holds this many bytes, and the gate excludes writers.
                let bytes = unsafe { std::slice::from_raw_parts(buffer.ptr(), self.ty.bytes()) };
                Ok(f(bytes))
            }
            #[cfg(feature = "cuda")]
            Memory::Cuda(buffer) => {
                // In words, so that numbers are aligned.
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

/// Guards the tensors of one store: programs that change any of them lock it for writing while they run.
pub(crate) type Gate = RwLock<()>;

#[derive(Debug)]
struct Inner {
    device: Device,
    gate: Arc<Gate>,
    tensors: RwLock<BTreeMap<String, Tensor>>,
}

/// Named tensors shared by programs. Cloning shares; see [`Store::duplicate`] for a copy.
///
/// Programs that only read a store run side by side; one that updates it waits for the others.
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
        Self(Arc::new(Inner { device: device.into(), gate: Arc::default(), tensors: RwLock::default() }))
    }

    /// A copy of its own in a device's memory.
    pub fn to(&self, device: impl Into<Device>) -> Result<Self> {
        let copy = Store::on(device);
        let _gate = self.0.gate.read().unwrap_or_else(PoisonError::into_inner);
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

    /// Adds zeros for every parameter and state of `graph` that is not here yet; others must have the same type.
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

    /// Adds zeros of the given type, or checks that `name` already has it.
    pub fn insert(&self, name: &str, ty: TensorType) -> Result<()> {
        ty.check("store")?;
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
        let buffer = Arc::new(Memory::new(&self.0.device, ty.bytes(), "a stored tensor")?);
        tensors.insert(name.to_owned(), Tensor { ty: Arc::new(ty), buffer });
        Ok(())
    }

    /// Replaces the contents of `name`.
    pub fn set<T: Element>(&self, name: &str, data: &[T]) -> Result<()> {
        let tensor = self.checked::<T>(name)?;
        if tensor.ty.len() != data.len() {
            return Err(Error::Length { name: name.to_owned(), expected: tensor.ty.len(), got: data.len() });
        }
        let _gate = self.0.gate.write().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the gate excludes every other reader and writer, and the lengths agree.
        unsafe { tensor.buffer.write([(0, bytes_of(data))].into_iter()) }
    }

    /// Calls `f` with the contents of `name`.
    pub fn with<T: Element, R>(&self, name: &str, f: impl FnOnce(&[T]) -> R) -> Result<R> {
        let tensor = self.checked::<T>(name)?;
        let _gate = self.0.gate.read().unwrap_or_else(PoisonError::into_inner);
        tensor.read(|data| {
            // SAFETY: the memory is aligned and holds this many elements of this type.
            f(unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<T>(), tensor.ty.len()) })
        })
    }

    /// A copy of the contents of `name`.
    pub fn get<T: Element>(&self, name: &str) -> Result<Vec<T>> {
        self.with(name, <[T]>::to_vec)
    }

    /// Reads `name` again and again without making a GPU wait; see [`Readback`].
    pub fn readback<T: Element>(&self, name: &str) -> Result<Readback<T>> {
        let (tensor, gate) = (self.checked::<T>(name)?, Arc::clone(&self.0.gate));
        Ok(Readback {
            tensor,
            gate,
            answers: VecDeque::new(),
            #[cfg(feature = "cuda")]
            spare: Vec::new(),
        })
    }

    /// Type of `name`.
    pub fn ty(&self, name: &str) -> Result<TensorType> {
        Ok(TensorType::clone(&self.tensor(name)?.ty))
    }

    /// All names, sorted.
    pub fn names(&self) -> Vec<String> {
        self.0.tensors.read().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }

    /// A store of its own with the same contents, on the same device.
    pub fn duplicate(&self) -> Result<Self> {
        self.to(&self.0.device)
    }

    /// Where its tensors lie.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.0.gate
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

/// Contents of a stored tensor as of several moments: asked for at each of them, read later. On a GPU the queue of work goes on meanwhile.
///
/// ```
/// use elmur_engine::{DType, Store, TensorType};
///
/// let store = Store::new();
/// store.insert("loss", TensorType::new(DType::F32, [1]))?;
/// let mut losses = store.readback::<f32>("loss")?;
/// for loss in [3.0f32, 2.0] {
///     store.set("loss", &[loss])?;
///     losses.ask()?;
/// }
/// assert_eq!(losses.answer()?, Some(vec![3.0]));
/// assert_eq!(losses.answer()?, Some(vec![2.0]));
/// assert_eq!(losses.answer()?, None);
/// # Ok::<(), elmur_engine::Error>(())
/// ```
#[derive(Debug)]
pub struct Readback<T> {
    tensor: Tensor,
    gate: Arc<Gate>,
    answers: VecDeque<Answer<T>>,
    #[cfg(feature = "cuda")]
    spare: Vec<crate::cuda::Pinned>,
}

#[derive(Debug)]
enum Answer<T> {
    Here(Vec<T>),
    #[cfg(feature = "cuda")]
    OnItsWay(crate::cuda::Pinned),
}

impl<T: Element> Readback<T> {
    /// Asks for the contents as of all work queued so far.
    pub fn ask(&mut self) -> Result<()> {
        let _gate = self.gate.read().unwrap_or_else(PoisonError::into_inner);
        let answer = match &*self.tensor.buffer {
            // SAFETY: the memory is aligned and holds this many elements, and the gate excludes writers.
            Memory::Host(buffer) => Answer::Here(unsafe {
                std::slice::from_raw_parts(buffer.ptr().cast::<T>(), self.tensor.ty.len()).to_vec()
            }),
            #[cfg(feature = "cuda")]
            Memory::Cuda(buffer) => Answer::OnItsWay(buffer.read_later(self.spare.pop())?),
        };
        self.answers.push_back(answer);
        Ok(())
    }

    /// The oldest contents asked for and not yet taken; waits for them.
    pub fn answer(&mut self) -> Result<Option<Vec<T>>> {
        Ok(match self.answers.pop_front() {
            None => None,
            Some(Answer::Here(data)) => Some(data),
            #[cfg(feature = "cuda")]
            Some(Answer::OnItsWay(pinned)) => {
                pinned.wait()?;
                // SAFETY: as many bytes have been copied to it, and it is aligned for all elements.
                let data = unsafe {
                    std::slice::from_raw_parts(pinned.data.cast::<T>(), self.tensor.ty.len()).to_vec()
                };
                self.spare.push(pinned);
                Some(data)
            }
        })
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
    }
}
