//! The kernels: the `.cu` files beside the ops, compiled by NVRTC for the GPU at hand and cached on disk. Files are
//! compiled in parallel when a GPU is opened, but for kernels with many variants ([`LATER`]), most of which no
//! program uses and which take a second or more each: these are compiled one by one when they are first used.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;
use cudarc::nvrtc::sys as nvrtc;

use super::args::Args;
use super::driver::{Context, call, require};
use crate::error::{Error, Result};

/// Source that is put before every file.
const PRELUDE: &str = include_str!("prelude.cu");

const FILES: [&str; 39] = [
    concat!(include_str!("../ops/attention.cu"), include_str!("../ops/attention_forward.cu")),
    concat!(include_str!("../ops/attention.cu"), include_str!("../ops/attention_backward.cu")),
    concat!(
        include_str!("../ops/tensor_cores.cu"),
        include_str!("../ops/matmul.cu"),
        include_str!("../ops/matmul_nn.cu")
    ),
    concat!(
        include_str!("../ops/tensor_cores.cu"),
        include_str!("../ops/matmul.cu"),
        include_str!("../ops/matmul_nt.cu")
    ),
    concat!(
        include_str!("../ops/tensor_cores.cu"),
        include_str!("../ops/matmul.cu"),
        include_str!("../ops/matmul_tn.cu")
    ),
    concat!(
        include_str!("../ops/tensor_cores.cu"),
        include_str!("../ops/attention.cu"),
        include_str!("../ops/attention_tiles.cu"),
        include_str!("../ops/attention_tiles_16.cu")
    ),
    concat!(
        include_str!("../ops/tensor_cores.cu"),
        include_str!("../ops/attention.cu"),
        include_str!("../ops/attention_tiles.cu"),
        include_str!("../ops/attention_tiles_32.cu")
    ),
    concat!(
        include_str!("../ops/tensor_cores.cu"),
        include_str!("../ops/attention.cu"),
        include_str!("../ops/attention_tiles.cu"),
        include_str!("../ops/attention_tiles_64.cu")
    ),
    concat!(
        include_str!("../ops/tensor_cores.cu"),
        include_str!("../ops/attention.cu"),
        include_str!("../ops/attention_tiles.cu"),
        include_str!("../ops/attention_long.cu"),
        include_str!("../ops/attention_long_16.cu")
    ),
    concat!(
        include_str!("../ops/tensor_cores.cu"),
        include_str!("../ops/attention.cu"),
        include_str!("../ops/attention_tiles.cu"),
        include_str!("../ops/attention_long.cu"),
        include_str!("../ops/attention_long_32.cu")
    ),
    concat!(
        include_str!("../ops/tensor_cores.cu"),
        include_str!("../ops/attention.cu"),
        include_str!("../ops/attention_tiles.cu"),
        include_str!("../ops/attention_long.cu"),
        include_str!("../ops/attention_long_64.cu")
    ),
    concat!(
        include_str!("../ops/tensor_cores.cu"),
        include_str!("../ops/attention.cu"),
        include_str!("../ops/attention_tiles.cu"),
        include_str!("../ops/attention_long.cu"),
        include_str!("../ops/attention_long_128.cu")
    ),
    include_str!("../ops/experts.cu"),
    include_str!("../ops/arith.cu"),
    include_str!("../ops/layout.cu"),
    include_str!("../ops/activation.cu"),
    include_str!("../ops/add_each.cu"),
    include_str!("../ops/average.cu"),
    include_str!("../ops/causal_conv1d.cu"),
    concat!(include_str!("../ops/tensor_cores.cu"), include_str!("../ops/conv.cu")),
    include_str!("../ops/conv1d.cu"),
    include_str!("../ops/discretize.cu"),
    include_str!("../ops/dropout.cu"),
    include_str!("../ops/gather.cu"),
    include_str!("../ops/logsumexp.cu"),
    include_str!("../ops/loss.cu"),
    include_str!("../ops/lru.cu"),
    concat!(include_str!("../ops/lstm.cu"), include_str!("../ops/lstm_held.cu")),
    include_str!("../ops/group_norm.cu"),
    include_str!("../ops/max_pool.cu"),
    include_str!("../ops/norm.cu"),
    include_str!("../ops/optim.cu"),
    include_str!("../ops/reduce.cu"),
    include_str!("../ops/relative_bias.cu"),
    include_str!("../ops/route.cu"),
    include_str!("../ops/selective_scan.cu"),
    include_str!("../ops/shift.cu"),
    include_str!("../ops/softmax.cu"),
    include_str!("../ops/swiglu.cu"),
];

/// Loaded modules, and the functions looked up in them so far.
pub(super) struct Kernels {
    /// A module of every source in [`FILES`], in their order.
    modules: Vec<sys::CUmodule>,
    functions: Mutex<Functions>,
    context: Arc<Context>,
}

#[derive(Default)]
struct Functions {
    known: BTreeMap<&'static str, Function>,
    /// Modules of kernels that were compiled when they were first used.
    later: Vec<sys::CUmodule>,
}

/// A kernel, and the bytes of dynamic shared memory that it may use.
#[derive(Clone, Copy)]
struct Function {
    raw: sys::CUfunction,
    shared: u32,
}

// SAFETY: modules and functions may be used from any thread.
unsafe impl Send for Kernels {}
// SAFETY: as above; the map is locked.
unsafe impl Sync for Kernels {}

impl Kernels {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        context.enter()?;
        let architecture = context.architecture()?;
        let sources = FILES.map(|file| part(file, None));
        let images: Vec<Result<Vec<u8>>> = std::thread::scope(|scope| {
            let make = |source: &'_ str| image(source, architecture);
            let threads: Vec<_> = sources.iter().map(|source| scope.spawn(move || make(source))).collect();
            let failed =
                || Error::Cuda { call: "nvrtcCompileProgram", cause: "the compiler's thread died".into() };
            threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(failed()))).collect()
        });
        let mut kernels =
            Self { modules: Vec::new(), functions: Mutex::default(), context: Arc::clone(context) };
        for (image, source) in images.into_iter().zip(&sources) {
            kernels.modules.push(load_module(&image?, source, architecture)?);
        }
        Ok(kernels)
    }

    /// The kernel `name`, permitted to use `shared` bytes of dynamic shared memory.
    pub fn function(&self, name: &'static str, shared: u32) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let mut function = match functions.known.get(name) {
            Some(function) => *function,
            None => {
                let c_name = CString::new(name).unwrap_or_default();
                let missing =
                    || Error::Cuda { call: "cuModuleGetFunction", cause: format!("no kernel {name}") };
                let file = file_of(name).ok_or_else(missing)?;
                let module = if is_later(FILES[file], name) {
                    let (source, architecture) =
                        (part(FILES[file], Some(name)), self.context.architecture()?);
                    let module = load_module(&image(&source, architecture)?, &source, architecture)?;
                    functions.later.push(module);
                    module
                } else {
                    *self.modules.get(file).ok_or_else(missing)?
                };
                let mut raw = std::ptr::null_mut();
                call!(cuModuleGetFunction(&raw mut raw, module, c_name.as_ptr()))?;
                // The same for all kernels: a multiprocessor must be idle before its memory can be divided
                // differently.
                let carveout = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
                call!(cuFuncSetAttribute(raw, carveout, 100))?;
                Function { raw, shared: 48 << 10 }
            }
        };
        if shared > function.shared {
            let most = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            call!(cuFuncSetAttribute(function.raw, most, shared as i32))?;
            function.shared = shared;
        }
        functions.known.insert(name, function);
        Ok(function.raw)
    }

    /// Queues the kernel `name` on a stream.
    pub fn launch(
        &self,
        stream: sys::CUstream,
        name: &'static str,
        shape: Shape,
        mut args: Args,
    ) -> Result<()> {
        debug_assert!(args.structs.iter().all(|structure| takes(name, structure)), "arguments of {name}");
        let function = self.function(name, shape.shared as u32)?;
        let mut pointers = args.pointers();
        let [x, y, z] = shape.grid.map(|n| n as u32);
        // SAFETY: plain numbers; those of the cluster are written below.
        let mut cluster: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        cluster.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        cluster.value.clusterDim =
            sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: 1, y: 1, z: shape.cluster };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared as u32,
            hStream: stream,
            attrs: &raw mut cluster,
            // GPUs before compute capability 9.0 refuse the attribute, even for clusters of one block.
            numAttrs: u32::from(shape.cluster > 1),
        };
        call!(cuLaunchKernelEx(&raw const config, function, pointers.as_mut_ptr(), std::ptr::null_mut()))
    }

    /// Whether a function is one of our own kernels.
    pub fn has(&self, function: sys::CUfunction) -> bool {
        let functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        functions.known.values().any(|known| known.raw == function)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            let functions = self.functions.get_mut().unwrap_or_else(PoisonError::into_inner);
            for module in self.modules.iter().chain(&functions.later) {
                // SAFETY: loaded by `load_module`; nothing that uses it outlives it (see the order of `Gpu`'s
                // fields).
                unsafe { sys::cuModuleUnload(*module) };
            }
        }
    }
}

/// Launch configuration of a kernel.
pub(super) struct Shape {
    pub grid: [usize; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared: usize,
    /// Blocks along the last axis that form a cluster: they run together and see each other's shared memory.
    pub cluster: u32,
}

/// What comes before the name of a kernel in the sources.
const MACROS: [&str; 13] = [
    "KERNEL ",
    "KERNEL __launch_bounds__(256) ",
    "\nPRODUCT(",
    "\nATTENTION(",
    "\nATTENTION_GRAD(",
    "\nATTENTION_TILES(",
    "\nATTENTION_TILES_GRAD(",
    "\nATTENTION_LONG(",
    "\nCONVOLUTION(",
    "\nCONVOLUTION_INPUT_GRAD(",
    "\nCONVOLUTION_WEIGHT_GRAD(",
    "\nLSTM_FORWARD(",
    "\nLSTM_BACKWARD(",
];

/// Macros that make one of many variants of a kernel, each in a line of its own.
const LATER: [&str; 6] = [
    "ATTENTION_TILES(",
    "ATTENTION_TILES_GRAD(",
    "ATTENTION_LONG(",
    "CONVOLUTION(",
    "CONVOLUTION_INPUT_GRAD(",
    "CONVOLUTION_WEIGHT_GRAD(",
];

/// The kernel that a line of a file makes, if it is one of those that are compiled when they are first used.
fn later(line: &str) -> Option<&str> {
    let rest = LATER.iter().find_map(|start| line.strip_prefix(start))?;
    rest.split(',').next()
}

/// Whether the kernel `name` of a file is compiled when it is first used.
fn is_later(file: &str, name: &str) -> bool {
    file.lines().any(|line| later(line) == Some(name))
}

/// A file with one of the kernels that are compiled when they are first used, or with none of them.
fn part(file: &str, name: Option<&str>) -> String {
    let lines =
        file.split_inclusive('\n').filter(|line| later(line).is_none_or(|kernel| Some(kernel) == name));
    lines.collect()
}

/// Number of the file that has the kernel `name`, found in the sources: CUDA's checkers report a look-up in a
/// module without the kernel as an error.
fn file_of(name: &str) -> Option<usize> {
    let starts =
        MACROS.map(|start| format!("{start}{name}")).map(|start| [format!("{start}("), format!("{start},")]);
    FILES.iter().position(|file| starts.iter().flatten().any(|start| file.contains(start)))
}

/// Whether the kernel `name` has a parameter of type `structure`, as far as its source says so in one place.
fn takes(name: &str, structure: &str) -> bool {
    let start = format!("KERNEL {name}(");
    let declared = FILES.iter().find_map(|file| file.split_once(&start)?.1.split(')').next());
    declared.is_none_or(|parameters| parameters.contains(structure))
}

/// Loads the machine code of a source. A cached file that the driver refuses is compiled again.
fn load_module(image: &[u8], source: &str, architecture: i32) -> Result<sys::CUmodule> {
    let load = |image: &[u8]| {
        let mut module = std::ptr::null_mut();
        call!(cuModuleLoadData(&raw mut module, image.as_ptr().cast())).map(|()| module)
    };
    load(image).or_else(|_| load(&compile_and_keep(source, architecture)?))
}

/// Machine code of a source: from the cache, or compiled and written to the cache.
fn image(source: &str, architecture: i32) -> Result<Vec<u8>> {
    match cached(source, architecture).and_then(|path| std::fs::read(path).ok()) {
        Some(image) => Ok(image),
        None => compile_and_keep(source, architecture),
    }
}

fn compile_and_keep(source: &str, architecture: i32) -> Result<Vec<u8>> {
    let image = compile(&[PRELUDE, source].concat(), architecture)?;
    if let Some(path) = cached(source, architecture) {
        // Best effort: without a cache the next start takes longer.
        let _ = keep(&path, &image);
    }
    Ok(image)
}

/// Path of a source's machine code in the cache.
fn cached(source: &str, architecture: i32) -> Option<PathBuf> {
    let mut hasher = DefaultHasher::new();
    (PRELUDE, source, env!("CARGO_PKG_VERSION")).hash(&mut hasher);
    Some(cache_folder()?.join(format!("{:016x}-sm_{architecture}.cubin", hasher.finish())))
}

/// Folder of the cache: `$XDG_CACHE_HOME/elmur` or `~/.cache/elmur`.
fn cache_folder() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
    Some(base.join("elmur"))
}

/// Writes a temporary file and renames it, so that no other process ever reads half a file.
fn keep(path: &std::path::Path, image: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let aside = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&aside, image)?;
    std::fs::rename(aside, path)
}

fn compile(source: &str, architecture: i32) -> Result<Vec<u8>> {
    // SAFETY: only looks for the library.
    require(unsafe { nvrtc::is_culib_present() }, "libnvrtc.so (of the CUDA toolkit)")?;
    let failed = |call, code| Error::Cuda { call, cause: format!("{code:?}") };
    let ok =
        |call, code| if code == nvrtc::nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(failed(call, code)) };
    let source = CString::new(source).unwrap_or_default();
    let options = [CString::new(format!("--gpu-architecture=sm_{architecture}")).unwrap_or_default()];
    let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    // SAFETY: strings outlive the program, sizes are asked for before buffers are filled, and it is destroyed
    // once.
    unsafe {
        let none = std::ptr::null();
        let made =
            nvrtc::nvrtcCreateProgram(&raw mut program, source.as_ptr(), c"elmur.cu".as_ptr(), 0, none, none);
        ok("nvrtcCreateProgram", made)?;
        let compiled = nvrtc::nvrtcCompileProgram(program, options.len() as i32, options.as_ptr());
        let result = match ok("nvrtcCompileProgram", compiled) {
            Ok(()) => (|| {
                let mut size = 0;
                ok("nvrtcGetCUBINSize", nvrtc::nvrtcGetCUBINSize(program, &raw mut size))?;
                let mut image = vec![0u8; size];
                ok("nvrtcGetCUBIN", nvrtc::nvrtcGetCUBIN(program, image.as_mut_ptr().cast()))?;
                Ok(image)
            })(),
            Err(_) => Err(Error::Cuda { call: "nvrtcCompileProgram", cause: log_of(program) }),
        };
        nvrtc::nvrtcDestroyProgram(&raw mut program);
        result
    }
}

/// The log of the compiler.
///
/// # Safety
/// The program must be alive.
unsafe fn log_of(program: nvrtc::nvrtcProgram) -> String {
    let mut size = 0;
    // SAFETY: the program is alive; the log fits the size the compiler states and ends with a zero.
    unsafe {
        nvrtc::nvrtcGetProgramLogSize(program, &raw mut size);
        let mut log = vec![0u8; size.max(1)];
        nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
        CStr::from_bytes_until_nul(&log).map(|l| l.to_string_lossy().into_owned()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_found_in_its_own_file() {
        let mut names = std::collections::BTreeSet::new();
        for (index, file) in FILES.iter().enumerate() {
            for start in MACROS {
                for rest in file.split(start).skip(1) {
                    let end =
                        rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
                    let name = &rest[..end];
                    // A macro's own definition.
                    if name == "name" || name == "__launch_bounds__" {
                        continue;
                    }
                    assert_eq!(file_of(name), Some(index), "{name}");
                    assert!(names.insert(name), "two kernels named {name}");
                }
            }
        }
        assert!(names.len() > 80, "{}", names.len());
    }

    #[test]
    fn every_kernel_of_the_tables_of_attention_and_convolutions_exists() {
        for (source, prefix, least) in [
            (include_str!("../ops/attention/gpu.rs"), "attention_", 60),
            (include_str!("../ops/conv.rs"), "conv2d_", 13),
        ] {
            // Without a number of rows or of a head's width it is the name of an op.
            let is_kernel = |text: &&str| {
                text.strip_prefix(prefix)
                    .is_some_and(|rest| rest.contains(|letter: char| letter.is_ascii_digit()))
            };
            let names: Vec<_> = source.split('"').filter(is_kernel).collect();
            assert!(names.len() >= least, "{}", names.len());
            for name in names {
                assert!(file_of(name).is_some(), "no kernel {name}");
            }
        }
    }

    /// Opening a GPU compiles no variant, and using one compiles no other.
    #[test]
    fn variants_of_kernels_are_compiled_one_by_one() {
        let mut names = 0;
        for file in FILES {
            let kernels: Vec<&str> = file.lines().filter_map(later).collect();
            for name in &kernels {
                assert!(is_later(file, name) && file_of(name).is_some_and(|found| FILES[found] == file));
                let alone = part(file, Some(name));
                assert_eq!(alone.lines().filter_map(later).collect::<Vec<_>>(), [*name]);
                assert_eq!(alone.lines().count(), file.lines().count() + 1 - kernels.len());
            }
            assert!(part(file, None).lines().all(|line| later(line).is_none()));
            assert!(!is_later(file, "attention") && !is_later(file, "product_nn_4"));
            names += kernels.len();
        }
        assert!(names > 80, "{names}");
    }

    #[test]
    fn kernels_take_at_most_six_parameters() {
        for file in FILES {
            for rest in file.split("KERNEL ").skip(1) {
                let parameters = rest.trim_start_matches("__launch_bounds__(32 * warps) ").split(')').next();
                let count = parameters.unwrap_or_default().split(',').count();
                assert!(count <= 6, "{}", rest.lines().next().unwrap_or_default());
            }
        }
    }

    #[test]
    fn structs_of_arguments_are_known_to_their_kernels() {
        assert!(
            takes("norm_rows", "NormArgs")
                && takes("gather_rows_4", "RowArgs")
                && takes("attention", "AttentionArgs")
        );
        assert!(!takes("norm_rows", "NormGradArgs"));
    }

    #[test]
    fn every_kernel_waits_for_earlier_work() {
        for file in FILES {
            for rest in file.split("KERNEL ").skip(1) {
                let body = rest.split_once('{').map_or("", |(_, body)| body);
                let body = body.trim_start_matches([' ', '\\', '\n']);
                // Those that read what is settled before they wait do so in any case.
                let waits = [
                    ("if (!args.settled) begin();", "if (args.settled) begin();"),
                    ("if (!a.settled) begin();", "if (a.settled) begin();"),
                ];
                let waits_later =
                    waits.iter().any(|(now, later)| body.starts_with(now) && file.contains(later));
                assert!(
                    body.starts_with("begin();") || waits_later,
                    "{}",
                    rest.lines().next().unwrap_or_default()
                );
            }
        }
    }
}
