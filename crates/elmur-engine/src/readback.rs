//! Contents of stored tensors, asked for now and read later.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::allocation::Allocation;
use crate::error::Result;
use crate::lock::StoreLock;
use crate::store::{Store, Tensor};
use crate::types::Element;

impl Store {
    /// A reader of the tensor `name` that does not make a GPU wait; see [`Readback`].
    pub fn readback<T: Element>(&self, name: &str) -> Result<Readback<T>> {
        let (tensor, lock) = (self.checked::<T>(name)?, Arc::clone(self.lock()));
        Ok(Readback {
            tensor,
            lock,
            answers: VecDeque::new(),
            #[cfg(feature = "cuda")]
            spare: Vec::new(),
        })
    }
}

/// Reads a stored tensor as of several moments: [`Readback::ask`] marks a moment, [`Readback::answer`] later
/// returns the contents of that moment. On a GPU, queued work goes on meanwhile.
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
    lock: Arc<StoreLock>,
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
    /// Asks for the contents of the tensor after all work queued so far.
    pub fn ask(&mut self) -> Result<()> {
        let _guard = self.lock.read();
        let answer = match &*self.tensor.buffer {
            // SAFETY: the memory is aligned and holds this many elements, and the lock excludes writers.
            Allocation::Host(buffer) => Answer::Here(unsafe {
                std::slice::from_raw_parts(buffer.ptr().cast::<T>(), self.tensor.ty.len()).to_vec()
            }),
            #[cfg(feature = "cuda")]
            Allocation::Cuda(buffer) => Answer::OnItsWay(buffer.read_later(self.spare.pop())?),
        };
        self.answers.push_back(answer);
        Ok(())
    }

    /// The contents that were asked for first and not yet returned; none if there are none. Waits until they
    /// are here.
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
