//! Matrix products by our own kernel or by cuBLASLt, whichever is measured to be faster, in the precision of
//! the queue.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::sys::{self, cublasStatus_t};

use super::args::kernel_args;
use super::driver::{Context, Stream, call, require};
use super::kernels::{Kernels, Shape};
use crate::error::{Error, Result};
use crate::precision::Precision;

kernel_args! {
    /// Arguments of our own kernel.
    struct ProductArgs in "../ops/matmul.cu" {
        c: u64, a: u64, b: u64, bias: u64, addend: u64, a_stride: usize, b_stride: usize,
        c_stride: usize, m: i32, n: i32, k: i32, relu: i32, log_ranks: i32,
    }
}

/// C[m, n] = A[m, k] B[k, n] (+ bias per column) (+ addend), `batch` times; all row-major.
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
    /// A matrix with the extents of C that is added to the product, possibly C itself; 0 for none.
    pub addend: u64,
    /// A vector `[n]` that is added to every row; 0 for none.
    pub bias: u64,
    /// Whether negative results become 0.
    pub relu: bool,
    /// Whether to compute to f32 accuracy in every precision, for results that are compared with each other.
    pub exact: bool,
    pub batch: usize,
    /// Elements from one matrix of the batch to the next, for A, B and C.
    pub strides: [usize; 3],
}

impl Product {
    /// A product of A and B, each given as (address, whether it is stored transposed). The output `c` is to
    /// be filled in.
    pub fn new(
        m: usize,
        n: usize,
        k: usize,
        (a, transpose_a): (u64, bool),
        (b, transpose_b): (u64, bool),
    ) -> Self {
        let (addend, bias, relu, exact, batch) = (0, 0, false, false, 1);
        let strides = [m * k, k * n, m * n];
        Self { m, n, k, a, transpose_a, b, transpose_b, c: 0, addend, bias, relu, exact, batch, strides }
    }
}

/// What the choice of an algorithm depends on: extents and batch, layout and epilogue, strides.
type Key = ([usize; 4], [bool; 6], [usize; 3]);

/// How a product is computed.
#[derive(Clone, Copy)]
enum Algorithm {
    /// By our own kernel.
    Own(Own),
    Library(sys::cublasLtMatmulHeuristicResult_t),
}

/// A variant of our own kernel (`matmul.cu`).
#[derive(Clone, Copy)]
struct Own {
    /// Warps of a block, 4 or 8.
    warps: usize,
    /// Logarithm of the number of blocks that share the depth of a tile.
    log_cluster: u32,
}

impl Own {
    /// Rows and columns of C per block.
    const TILE: usize = 32;
    /// Depth of a panel.
    const DEPTH: usize = 128;

    /// Bytes of shared memory: panels of A and B, two of each if more than one is loaded, or in the same
    /// place the sums of all warps; then the sums that the blocks of a cluster give each other.
    fn shared(&self, p: &Product) -> usize {
        let (tile, depth) = (Self::TILE, Self::DEPTH);
        let panel = |along: bool| if along { tile * (depth + 8) } else { depth * (tile + 4) };
        let share = p.k.div_ceil(1 << self.log_cluster).next_multiple_of(8);
        let panels = if share > depth { 2 } else { 1 } * (panel(!p.transpose_a) + panel(p.transpose_b));
        let sums = self.warps * tile * (tile + 8);
        let given = if self.log_cluster > 0 { tile * tile } else { 0 };
        4 * (panels.max(sums) + given)
    }

    fn kernel(&self, p: &Product, exact: bool) -> &'static str {
        let [four, eight, precise] = match (p.transpose_a, p.transpose_b) {
            (false, false) => ["product_nn_4", "product_nn_8", "exact_product_nn_4"],
            (false, true) => ["product_nt_4", "product_nt_8", "exact_product_nt_4"],
            (true, _) => ["product_tn_4", "product_tn_8", "exact_product_tn_4"],
        };
        match (exact, self.warps) {
            (true, _) => precise,
            (false, 8) => eight,
            (false, _) => four,
        }
    }
}

pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    compute: sys::cublasComputeType_t,
    precision: Precision,
    /// Whether algorithms are chosen by timing them.
    tuned: bool,
    /// Whether the GPU has clusters, whose blocks see each other's shared memory.
    clusters: bool,
    algorithms: Mutex<BTreeMap<Key, Algorithm>>,
    kernels: Arc<Kernels>,
    context: Arc<Context>,
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

fn compute_type(precision: Precision) -> sys::cublasComputeType_t {
    use sys::cublasComputeType_t as C;
    match precision {
        Precision::F32 => C::CUBLAS_COMPUTE_32F,
        Precision::Tf32 => C::CUBLAS_COMPUTE_32F_FAST_TF32,
        Precision::Bf16 => C::CUBLAS_COMPUTE_32F_FAST_16BF,
    }
}

/// Products of at most this many multiplications are computed to f32 accuracy in every precision.
const EXACT: usize = 1 << 22;

/// Most tiles of a product that our own kernel is tried for.
const MOST_TILES: usize = 4096;

/// Blocks that fill a GPU.
const FULL: usize = 256;

/// Most workspace that a product may ask for.
const WORKSPACE: usize = 4 << 20;

/// Number of algorithms of the library that are tried.
const CANDIDATES: usize = 6;

/// Descriptors of one product for cuBLASLt, destroyed when dropped.
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
    pub fn new(context: &Arc<Context>, kernels: &Arc<Kernels>, precision: Precision) -> Result<Self> {
        // SAFETY: only looks for the library.
        require(unsafe { sys::is_culib_present() }, "libcublasLt.so (of the CUDA toolkit)")?;
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library writes the handle.
        ok("cublasLtCreate", unsafe { sys::cublasLtCreate(&raw mut handle) })?;
        let compute = compute_type(precision);
        let clusters = context.architecture()? >= 90;
        let (kernels, context) = (Arc::clone(kernels), Arc::clone(context));
        // Under CUDA's checkers every trial takes seconds.
        let tuned = std::env::var_os("ELMUR_TUNING").is_none_or(|value| value != "off");
        Ok(Self {
            handle,
            compute,
            precision,
            tuned,
            clusters,
            algorithms: Mutex::default(),
            kernels,
            context,
        })
    }

    /// Whether the GPU has clusters, whose blocks see each other's shared memory.
    pub fn clusters(&self) -> bool {
        self.clusters
    }

    /// Queues a product. `workspace` provides device memory of the size asked for.
    pub fn queue(
        &self,
        p: &Product,
        stream: cudarc::driver::sys::CUstream,
        workspace: impl FnOnce(usize) -> Result<u64>,
    ) -> Result<()> {
        let d = self.describe(p)?;
        match self.algorithm(p, &d)? {
            Algorithm::Own(variant) => self.multiply_own(p, variant, stream),
            Algorithm::Library(found) => {
                let space = if found.workspaceSize > 0 { workspace(found.workspaceSize)? } else { 0 };
                self.multiply(p, &d, &found, space, stream)
            }
        }
    }

    /// Descriptors of a product. cuBLASLt stores matrices by columns, so that a row-major C is Cᵀ = Bᵀ Aᵀ to
    /// it.
    fn describe(&self, p: &Product) -> Result<Descriptors> {
        use sys::cublasLtEpilogue_t as Epilogue;
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cublasLtMatrixLayoutAttribute_t as Layout;
        let mut d = Descriptors { operation: std::ptr::null_mut(), layouts: [std::ptr::null_mut(); 3] };
        // SAFETY: every attribute is given as a value of its documented type and size.
        unsafe {
            let compute = if self.is_exact(p) { compute_type(Precision::F32) } else { self.compute };
            ok(
                "cublasLtMatmulDescCreate",
                sys::cublasLtMatmulDescCreate(&raw mut d.operation, compute, F32),
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

    /// Whether the product is computed to f32 accuracy: on request, or because it is so small that this costs
    /// nothing.
    fn is_exact(&self, p: &Product) -> bool {
        p.exact || self.precision == Precision::F32 || p.m * p.n * p.k * p.batch <= EXACT
    }

    /// Variants of our own kernel that can compute the product, the most promising first.
    fn own_variants(&self, p: &Product) -> Vec<Own> {
        let tiles = p.m.div_ceil(Own::TILE) * p.n.div_ceil(Own::TILE) * p.batch;
        let elements = p.m * p.k.max(p.n) + p.k * p.n;
        if p.transpose_a && p.transpose_b || tiles > MOST_TILES || elements > i32::MAX as usize {
            return Vec::new();
        }
        // As many blocks as fill the GPU, of at least half a panel each.
        let fills =
            (FULL / tiles.max(1)).min(p.k / (Own::DEPTH / 2)).clamp(1, if self.clusters { 8 } else { 1 });
        let most = fills.ilog2();
        let mut variants: Vec<Own> = Vec::new();
        for (warps, log_cluster) in [(4, most), (8, most.saturating_sub(1)), (4, 0), (8, 0)] {
            let known =
                variants.iter().any(|variant| variant.warps == warps && variant.log_cluster == log_cluster);
            if !known && (warps == 4 || !self.is_exact(p)) {
                variants.push(Own { warps, log_cluster });
            }
        }
        variants
    }

    fn multiply_own(&self, p: &Product, variant: Own, stream: cudarc::driver::sys::CUstream) -> Result<()> {
        let [a_stride, b_stride, c_stride] = p.strides;
        let args = ProductArgs {
            c: p.c,
            a: p.a,
            b: p.b,
            bias: p.bias,
            addend: p.addend,
            a_stride,
            b_stride,
            c_stride,
            m: p.m as i32,
            n: p.n as i32,
            k: p.k as i32,
            relu: i32::from(p.relu),
            log_ranks: variant.log_cluster as i32,
        };
        let cluster = 1 << variant.log_cluster;
        let shape = Shape {
            grid: [p.n.div_ceil(Own::TILE), p.m.div_ceil(Own::TILE), p.batch * cluster],
            threads: 32 * variant.warps as u32,
            shared: variant.shared(p),
            cluster: cluster as u32,
        };
        self.kernels.launch(stream, variant.kernel(p, self.is_exact(p)), shape, args.into())
    }

    fn algorithm(&self, p: &Product, d: &Descriptors) -> Result<Algorithm> {
        let flags = [p.transpose_a, p.transpose_b, p.addend != 0, p.bias != 0, p.relu, p.exact];
        let key = ([p.m, p.n, p.k, p.batch], flags, p.strides);
        let mut algorithms = self.algorithms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = algorithms.get(&key) {
            return Ok(*found);
        }
        let candidates = self.candidates(d)?;
        if candidates.is_empty() {
            let cause = format!("no algorithm for a product of {} x {} x {}", p.m, p.n, p.k);
            return Err(Error::Cuda { call: "cublasLtMatmulAlgoGetHeuristic", cause });
        }
        let own = self.own_variants(p);
        let found = match own.first() {
            _ if self.tuned => self.fastest(p, d, &own, &candidates)?,
            Some(variant) => Algorithm::Own(*variant),
            None => Algorithm::Library(candidates[0]),
        };
        algorithms.insert(key, found);
        Ok(found)
    }

    /// The algorithms that cuBLASLt suggests, best first.
    fn candidates(&self, d: &Descriptors) -> Result<Vec<sys::cublasLtMatmulHeuristicResult_t>> {
        use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as MOST;
        let mut preference = std::ptr::null_mut();
        // SAFETY: descriptors are alive; plain results start as zeros, and only those that were found are
        // kept.
        unsafe {
            ok("cublasLtMatmulPreferenceCreate", sys::cublasLtMatmulPreferenceCreate(&raw mut preference))?;
            let most = WORKSPACE as u64;
            let status =
                sys::cublasLtMatmulPreferenceSetAttribute(preference, MOST, (&raw const most).cast(), 8);
            let mut found = vec![std::mem::zeroed::<sys::cublasLtMatmulHeuristicResult_t>(); CANDIDATES];
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
                    CANDIDATES as i32,
                    found.as_mut_ptr(),
                    &raw mut count,
                );
                ok("cublasLtMatmulAlgoGetHeuristic", status)
            });
            sys::cublasLtMatmulPreferenceDestroy(preference);
            result?;
            found.truncate(count.max(0) as usize);
            found.retain(|f| f.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS);
            Ok(found)
        }
    }

    /// The fastest of several algorithms, by measurement: for small products the first suggestion of the
    /// library is often half as fast as the best.
    fn fastest(
        &self,
        p: &Product,
        d: &Descriptors,
        own: &[Own],
        library: &[sys::cublasLtMatmulHeuristicResult_t],
    ) -> Result<Algorithm> {
        let mut trial = Trial::new(p, &self.context)?;
        let mut best: Option<(f32, Algorithm)> = None;
        let own = own.iter().copied().map(Algorithm::Own);
        for candidate in own.chain(library.iter().copied().map(Algorithm::Library)) {
            let time = trial.time(|stream, [a, b, c], space| {
                let p = Product { a, b, c, addend: if p.addend != 0 { c } else { 0 }, ..*p };
                match candidate {
                    Algorithm::Own(variant) => self.multiply_own(&p, variant, stream).is_ok(),
                    Algorithm::Library(found) => self.multiply(&p, d, &found, space, stream).is_ok(),
                }
            })?;
            // Kernels of the library are not launched early, and many occupy a whole multiprocessor.
            let time =
                time.map(|time| if matches!(candidate, Algorithm::Library(_)) { 1.1 * time } else { time });
            if let Some(time) = time
                && best.is_none_or(|(shortest, _)| time < shortest)
            {
                best = Some((time, candidate));
            }
        }
        Ok(best.map_or(Algorithm::Library(library[0]), |(_, candidate)| candidate))
    }

    fn multiply(
        &self,
        p: &Product,
        d: &Descriptors,
        found: &sys::cublasLtMatmulHeuristicResult_t,
        space: u64,
        stream: cudarc::driver::sys::CUstream,
    ) -> Result<()> {
        let (alpha, beta) = (1.0f32, if p.addend != 0 { 1.0f32 } else { 0.0 });
        let [a, b, c] = d.layouts;
        // SAFETY: descriptors are alive, addresses lead to matrices of the described extents, scalars are
        // read at once.
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
                if p.addend != 0 { p.addend } else { p.c } as *const c_void,
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
}

/// Memory and events for timing one product. Operands are made up, because the real ones may be in use.
struct Trial {
    stream: Stream,
    memory: [u64; 4],
    events: [cudarc::driver::sys::CUevent; 2],
}

impl Trial {
    fn new(p: &Product, context: &Arc<Context>) -> Result<Self> {
        let mut trial =
            Self { stream: Stream::new(context)?, memory: [0; 4], events: [std::ptr::null_mut(); 2] };
        let extent = |each: usize, stride: usize| 4 * (each + stride * (p.batch - 1));
        let sizes = [
            extent(p.m * p.k, p.strides[0]),
            extent(p.k * p.n, p.strides[1]),
            extent(p.m * p.n, p.strides[2]),
            WORKSPACE,
        ];
        for (address, bytes) in trial.memory.iter_mut().zip(sizes) {
            call!(cuMemAlloc_v2(&raw mut *address, bytes))?;
            call!(cuMemsetD8Async(*address, 0, bytes, trial.stream.raw))?;
        }
        for event in &mut trial.events {
            call!(cuEventCreate(&raw mut *event, 0))?;
        }
        Ok(trial)
    }

    /// Milliseconds that the GPU takes for many runs, which are captured and replayed so that launches on the
    /// host do not count; none if `run` fails.
    fn time(
        &mut self,
        run: impl Fn(cudarc::driver::sys::CUstream, [u64; 3], u64) -> bool,
    ) -> Result<Option<f32>> {
        use cudarc::driver::sys as driver;
        let [a, b, c, space] = self.memory;
        let stream = self.stream.raw;
        // One run before, so that nothing is loaded during the capture.
        if !run(stream, [a, b, c], space) {
            return Ok(None);
        }
        let mode = driver::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        call!(cuStreamBeginCapture_v2(stream, mode))?;
        let fine = (0..20).all(|_| run(stream, [a, b, c], space));
        let (mut graph, mut replay) = (std::ptr::null_mut(), std::ptr::null_mut());
        call!(cuStreamEndCapture(stream, &raw mut graph))?;
        let timed = (|| {
            if !fine {
                return Ok(None);
            }
            call!(cuGraphInstantiateWithFlags(&raw mut replay, graph, 0))?;
            call!(cuGraphLaunch(replay, stream))?;
            call!(cuEventRecord(self.events[0], stream))?;
            call!(cuGraphLaunch(replay, stream))?;
            call!(cuEventRecord(self.events[1], stream))?;
            self.stream.synchronize()?;
            let mut milliseconds = 0f32;
            call!(cuEventElapsedTime_v2(&raw mut milliseconds, self.events[0], self.events[1]))?;
            Ok(Some(milliseconds))
        })();
        // SAFETY: each is null or was made above, and its work is done.
        unsafe {
            if !replay.is_null() {
                driver::cuGraphExecDestroy(replay);
            }
            if !graph.is_null() {
                driver::cuGraphDestroy(graph);
            }
        }
        timed
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
        // SAFETY: each is null or was created once, and nothing uses them any more.
        unsafe {
            for address in self.memory.into_iter().filter(|a| *a != 0) {
                cudarc::driver::sys::cuMemFree_v2(address);
            }
            for event in self.events.into_iter().filter(|e| !e.is_null()) {
                cudarc::driver::sys::cuEventDestroy_v2(event);
            }
        }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        unsafe { sys::cublasLtDestroy(self.handle) };
    }
}
