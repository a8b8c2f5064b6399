//! Matrix products by cuBLASLt, in the precision of the queue.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::sys::{self, cublasStatus_t};

use super::Precision;
use super::driver::{Context, require};
use crate::error::{Error, Result};

/// C[m, n] (+)= A[m, k] B[k, n] (+ bias per column), `batch` times; all row-major.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: u64,
    /// A is stored as [k, m].
    pub transpose_a: bool,
    pub b: u64,
    /// B is stored as [n, k].
    pub transpose_b: bool,
    pub c: u64,
    pub accumulate: bool,
    /// `[n]`, or 0 for none.
    pub bias: u64,
    /// max(., 0) at the end.
    pub relu: bool,
    pub batch: usize,
    /// Elements from one A, B, C of the batch to the next.
    pub strides: [usize; 3],
}

impl Product {
    /// A product of A and B, each with whether it is stored transposed, to be completed with its output.
    pub fn new(
        m: usize,
        n: usize,
        k: usize,
        (a, transpose_a): (u64, bool),
        (b, transpose_b): (u64, bool),
    ) -> Self {
        let (accumulate, bias, relu, batch) = (false, 0, false, 1);
        let strides = [m * k, k * n, m * n];
        Self { m, n, k, a, transpose_a, b, transpose_b, c: 0, accumulate, bias, relu, batch, strides }
    }
}

/// What decides which algorithm is best: extents, layout, epilogue, batch, strides.
type Key = ([usize; 4], [bool; 5], [usize; 3]);

pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    compute: sys::cublasComputeType_t,
    algorithms: Mutex<BTreeMap<Key, sys::cublasLtMatmulHeuristicResult_t>>,
    _context: Arc<Context>,
}

// SAFETY: cuBLASLt handles may be used from any thread.
unsafe impl Send for Products {}
// SAFETY: as above.
unsafe impl Sync for Products {}

fn ok(call: &'static str, status: cublasStatus_t) -> Result<()> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        Ok(())
    } else {
        Err(Error::Cuda { call, cause: format!("{status:?}") })
    }
}

/// Most workspace that a product may ask for.
const WORKSPACE: usize = 4 << 20;

/// Descriptors of one product, destroyed with it.
struct Descriptors {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: each is null or was created once.
        unsafe {
            if !self.operation.is_null() {
                sys::cublasLtMatmulDescDestroy(self.operation);
            }
            for layout in self.layouts.into_iter().filter(|l| !l.is_null()) {
                sys::cublasLtMatrixLayoutDestroy(layout);
            }
        }
    }
}

const F32: sys::cudaDataType = sys::cudaDataType_t::CUDA_R_32F;

impl Products {
    pub fn new(context: &Arc<Context>, precision: Precision) -> Result<Self> {
        use sys::cublasComputeType_t as C;
        // SAFETY: only looks for the library.
        require(unsafe { sys::is_culib_present() }, "libcublasLt.so (of the CUDA toolkit)")?;
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library writes the handle.
        ok("cublasLtCreate", unsafe { sys::cublasLtCreate(&raw mut handle) })?;
        let compute = match precision {
            Precision::F32 => C::CUBLAS_COMPUTE_32F,
            Precision::Tf32 => C::CUBLAS_COMPUTE_32F_FAST_TF32,
            Precision::Bf16 => C::CUBLAS_COMPUTE_32F_FAST_16BF,
        };
        Ok(Self { handle, compute, algorithms: Mutex::default(), _context: Arc::clone(context) })
    }

    /// Queues a product. `workspace` provides device memory of the size asked for.
    pub fn queue(
        &self,
        p: &Product,
        stream: cudarc::driver::sys::CUstream,
        workspace: impl FnOnce(usize) -> Result<u64>,
    ) -> Result<()> {
        let d = self.describe(p)?;
        let found = self.algorithm(p, &d)?;
        let space = if found.workspaceSize > 0 { workspace(found.workspaceSize)? } else { 0 };
        let (alpha, beta) = (1.0f32, if p.accumulate { 1.0f32 } else { 0.0 });
        let [a, b, c] = d.layouts;
        // SAFETY: descriptors are alive, addresses lead to matrices of the described extents, scalars are read at once.
        ok("cublasLtMatmul", unsafe {
            sys::cublasLtMatmul(
                self.handle,
                d.operation,
                (&raw const alpha).cast(),
                p.b as *const c_void,
                a,
                p.a as *const c_void,
                b,
                (&raw const beta).cast(),
                p.c as *const c_void,
                c,
                p.c as *mut c_void,
                c,
                &raw const found.algo,
                space as *mut c_void,
                found.workspaceSize,
                stream.cast(),
            )
        })
    }

    /// The library thinks in columns: a row-major C is its transpose, Cᵀ = Bᵀ Aᵀ.
    fn describe(&self, p: &Product) -> Result<Descriptors> {
        use sys::cublasLtEpilogue_t as Epilogue;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cublasLtMatrixLayoutAttribute_t as Layout;
        let mut d = Descriptors { operation: std::ptr::null_mut(), layouts: [std::ptr::null_mut(); 3] };
        // SAFETY: every attribute is given as a value of its documented type and size.
        unsafe {
            ok(
                "cublasLtMatmulDescCreate",
                sys::cublasLtMatmulDescCreate(&raw mut d.operation, self.compute, F32),
            )?;
            let set = |attribute, value: *const c_void, size| {
                let status = sys::cublasLtMatmulDescSetAttribute(d.operation, attribute, value, size);
                ok("cublasLtMatmulDescSetAttribute", status)
            };
            let transposed = |t: bool| if t { 1i32 } else { 0 };
            let (left, right) = (transposed(p.transpose_b), transposed(p.transpose_a));
            set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, (&raw const left).cast(), 4)?;
            set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, (&raw const right).cast(), 4)?;
            let epilogue = match (p.bias != 0, p.relu) {
                (false, false) => Epilogue::CUBLASLT_EPILOGUE_DEFAULT,
                (true, false) => Epilogue::CUBLASLT_EPILOGUE_BIAS,
                (false, true) => Epilogue::CUBLASLT_EPILOGUE_RELU,
                (true, true) => Epilogue::CUBLASLT_EPILOGUE_RELU_BIAS,
            };
            set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, (&raw const epilogue).cast(), 4)?;
            if p.bias != 0 {
                set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, (&raw const p.bias).cast(), 8)?;
            }
            let stored = |rows: usize, columns: usize, transposed: bool| {
                if transposed { (columns as u64, rows as u64) } else { (rows as u64, columns as u64) }
            };
            let extents =
                [stored(p.n, p.k, p.transpose_b), stored(p.k, p.m, p.transpose_a), (p.n as u64, p.m as u64)];
            let strides = [p.strides[1], p.strides[0], p.strides[2]];
            for i in 0..3 {
                let (rows, columns) = extents[i];
                let made =
                    sys::cublasLtMatrixLayoutCreate(&raw mut d.layouts[i], F32, rows, columns, rows as i64);
                ok("cublasLtMatrixLayoutCreate", made)?;
                if p.batch > 1 {
                    let (count, stride) = (p.batch as i32, strides[i] as i64);
                    for (attribute, value, size) in [
                        (Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast::<c_void>(), 4),
                        (Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (&raw const stride).cast(), 8),
                    ] {
                        let status =
                            sys::cublasLtMatrixLayoutSetAttribute(d.layouts[i], attribute, value, size);
                        ok("cublasLtMatrixLayoutSetAttribute", status)?;
                    }
                }
            }
        }
        Ok(d)
    }

    fn algorithm(&self, p: &Product, d: &Descriptors) -> Result<sys::cublasLtMatmulHeuristicResult_t> {
        let flags = [p.transpose_a, p.transpose_b, p.accumulate, p.bias != 0, p.relu];
        let key = ([p.m, p.n, p.k, p.batch], flags, p.strides);
        let mut algorithms = self.algorithms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = algorithms.get(&key) {
            return Ok(*found);
        }
        use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as MOST;
        let mut preference = std::ptr::null_mut();
        // SAFETY: descriptors are alive; the result is read only where one was found.
        let (found, count) = unsafe {
            ok("cublasLtMatmulPreferenceCreate", sys::cublasLtMatmulPreferenceCreate(&raw mut preference))?;
            let most = WORKSPACE as u64;
            let status =
                sys::cublasLtMatmulPreferenceSetAttribute(preference, MOST, (&raw const most).cast(), 8);
            let mut found: sys::cublasLtMatmulHeuristicResult_t = std::mem::zeroed();
            let mut count = 0;
            let [a, b, c] = d.layouts;
            let result = ok("cublasLtMatmulPreferenceSetAttribute", status).and_then(|()| {
                let status = sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    d.operation,
                    a,
                    b,
                    c,
                    c,
                    preference,
                    1,
                    &raw mut found,
                    &raw mut count,
                );
                ok("cublasLtMatmulAlgoGetHeuristic", status)
            });
            sys::cublasLtMatmulPreferenceDestroy(preference);
            result?;
            (found, count)
        };
        if count == 0 {
            let cause = format!("no algorithm for a product of {} x {} x {}", p.m, p.n, p.k);
            return Err(Error::Cuda { call: "cublasLtMatmulAlgoGetHeuristic", cause });
        }
        algorithms.insert(key, found);
        Ok(found)
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        unsafe { sys::cublasLtDestroy(self.handle) };
    }
}
