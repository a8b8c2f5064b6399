//! A program on the CPU: its steps, one after the other, each on all threads of a pool.

use std::time::{Duration, Instant};

use crate::cpu::pool::Pool;
use crate::error::Result;
use crate::op::Io;
use crate::precision::Precision;
use crate::step::{Executor, Step, Work};

pub(crate) struct Exec {
    pool: Pool,
    precision: Precision,
    work: Work,
}

impl Exec {
    pub fn new(pool: &Pool, precision: Precision, work: Work) -> Self {
        Self { pool: pool.clone(), precision, work }
    }

    /// Runs all steps and copies; `around` is given each step's number and the call that runs it.
    fn run_with(
        &mut self,
        mut around: impl FnMut(usize, &dyn Fn() -> Result<()>) -> Result<()>,
    ) -> Result<()> {
        let Work { steps, copies, arena, scratch_offset, scratch_bytes, .. } = &mut self.work;
        // SAFETY: the scratch region follows the planned part of the arena.
        let scratch = unsafe { arena.ptr().add(*scratch_offset) };
        for (index, step) in steps.iter_mut().enumerate() {
            let kept = step
                .kept
                .as_ref()
                .map(|kept| (kept.memory.ptr(), kept.bytes, kept.filled == Some(kept.writes())));
            let (inputs, outputs) = (&*step.inputs, &*step.outputs);
            let io = Io {
                inputs,
                outputs,
                scratch,
                scratch_bytes: *scratch_bytes,
                kept,
                pool: &self.pool,
                precision: self.precision,
            };
            around(index, &|| step.op.cpu(&io))?;
            if let Some(kept) = &mut step.kept {
                kept.filled = Some(kept.writes());
            }
        }
        for (target, source) in &*copies {
            // SAFETY: types agree (checked by `update`), the source is never the target's own storage, and
            // the lock of the target's store is held for writing.
            unsafe { std::ptr::copy_nonoverlapping(source.ptr, target.ptr, target.ty.bytes()) };
        }
        Ok(())
    }
}

impl Executor for Exec {
    fn steps(&self) -> &[Step] {
        &self.work.steps
    }

    fn run(&mut self) -> Result<()> {
        self.run_with(|_, step| step())
    }

    fn profile(&mut self, runs: usize) -> Result<Vec<(Vec<Duration>, bool)>> {
        // Steps come one after the other: a run takes longer if any of them does.
        let mut times = vec![(Vec::with_capacity(runs), true); self.work.steps.len()];
        for _ in 0..runs {
            self.run_with(|index, step| {
                let start = Instant::now();
                let result = step();
                times[index].0.push(start.elapsed());
                result
            })?;
        }
        Ok(times)
    }

    fn input(&self, index: usize) -> *const u8 {
        self.work.inputs[index].ptr
    }

    fn input_mut(&mut self, index: usize) -> *mut u8 {
        self.work.inputs[index].ptr
    }

    fn output(&self, index: usize) -> Result<*const u8> {
        Ok(self.work.outputs[index].ptr)
    }

    fn kernels(&self) -> usize {
        0
    }
}
