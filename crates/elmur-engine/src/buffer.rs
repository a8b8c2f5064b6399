//! Memory of the host: zero-initialised, of fixed size and address, aligned for every kernel.

use std::alloc::Layout;
use std::ptr::NonNull;

use crate::error::{Error, Result};

/// Alignment of every buffer: a cache line, and the widest vector.
pub(crate) const ALIGN: usize = 64;

/// Zero-initialised memory of fixed size and address.
#[derive(Debug)]
pub(crate) struct Buffer {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory; who may touch it when is decided by the owners (a store's lock, a program's `&mut`).
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

/// Asks the system for huge pages, before the memory is first touched. Rows in an arena lie kilobytes apart,
/// on more small pages than address translations can be cached for. Failure is ignored.
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
