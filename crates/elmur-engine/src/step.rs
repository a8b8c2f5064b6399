//! What a compiled program consists of, and what the executors of all devices have in common.

use std::sync::Arc;
use std::time::Duration;

use crate::allocation::Allocation;
use crate::buffer::Buffer;
use crate::error::Result;
use crate::lock::StoreLock;
use crate::op::Op;
use crate::operand::Operand;

/// An op with the addresses of its operands.
pub(crate) struct Step {
    pub op: Arc<dyn Op>,
    pub inputs: Box<[Operand]>,
    pub outputs: Box<[Operand]>,
    /// Memory of what the kernel keeps from run to run; on a CPU only.
    pub kept: Option<KeptMemory>,
}

/// Memory of what follows from an input that a run does not change.
pub(crate) struct KeptMemory {
    pub memory: Buffer,
    /// Bytes of the memory.
    pub bytes: usize,
    /// The lock of the store that has the input; none for a constant.
    pub lock: Option<Arc<StoreLock>>,
    /// Writes of that store before the run that filled the memory.
    pub filled: Option<u64>,
}

impl KeptMemory {
    /// Writes of the input's store so far.
    pub fn writes(&self) -> u64 {
        self.lock.as_ref().map_or(0, |lock| lock.writes())
    }
}

/// Everything that an executor needs to run a program.
pub(crate) struct Work {
    /// In the order in which they run.
    pub steps: Vec<Step>,
    /// (target, source) to copy after the last step: updates that could not be made in place.
    pub copies: Vec<(Operand, Operand)>,
    /// The program's inputs, by number.
    pub inputs: Vec<Operand>,
    /// The program's outputs, by number.
    pub outputs: Vec<Operand>,
    /// Memory of all intermediate values, then scratch.
    pub arena: Allocation,
    /// Bytes of the arena before scratch.
    pub scratch_offset: usize,
    /// Bytes of scratch, as much as the step that needs most.
    pub scratch_bytes: usize,
}

/// Runs the steps of one program on one kind of device.
///
/// Addresses stay valid as long as the executor. A caller must hold the locks of the program's stores.
pub(crate) trait Executor {
    /// The steps of a run, in order.
    fn steps(&self) -> &[Step];

    /// Runs all steps and applies the updates, or queues all that.
    fn run(&mut self) -> Result<()>;

    /// Times of every step over `runs` runs, and whether a run takes longer if that step does.
    fn profile(&mut self, runs: usize) -> Result<Vec<(Vec<Duration>, bool)>>;

    /// Where the caller reads input `index`, in the host's memory.
    fn input(&self, index: usize) -> *const u8;

    /// Where the caller writes input `index`, in the host's memory, before the next run.
    fn input_mut(&mut self, index: usize) -> *mut u8;

    /// Output `index` as of the last run, in the host's memory. Waits for the run, if need be.
    fn output(&self, index: usize) -> Result<*const u8>;

    /// Kernels, products and copies that a run queues on a GPU; 0 on the CPU.
    fn kernels(&self) -> usize;
}
