//! A program on a GPU: its CUDA graph, its inputs and outputs, and the times of its steps.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

use super::Gpu;
use super::capture::{capture_steps, replayed_time};
use super::dependencies::{Range, critical_path, parts};
use super::driver::{DeviceBuffer, Pinned, call};
use super::inputs::{Fetch, Input, Span, spans};
use super::launch::Launch;
use crate::allocation::Allocation;
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::operand::Operand;
use crate::ops::layout::CopyAll;
use crate::step::{Executor, Step, Work};
use crate::types::DType;

/// An output, copied to the host when it is first asked for after a run.
struct Output {
    device: u64,
    bytes: usize,
    host: Buffer,
    fetched: Cell<bool>,
}

/// A program on a GPU.
pub(crate) struct Exec {
    replay: sys::CUgraphExec,
    steps: Vec<Step>,
    /// Device memory that the captured work uses.
    _arena: Allocation,
    _keep: Vec<DeviceBuffer>,
    inputs: Vec<Input>,
    spans: Vec<Span>,
    outputs: Vec<Output>,
    /// Pinned copies of the inputs, used in turn, so that the host can fill one while the GPU reads another.
    ring: Vec<Pinned>,
    turn: usize,
    /// Number of kernels, products and copies of one run.
    queued: usize,
    gpu: Gpu,
}

impl Exec {
    /// Captures the program's work as a CUDA graph.
    pub fn new(gpu: &Gpu, work: Work) -> Result<Self> {
        gpu.0.context.enter()?;
        let Work { mut steps, copies, inputs, outputs, arena, .. } = work;
        if !copies.is_empty() {
            let (targets, sources): (Vec<Operand>, Vec<Operand>) = copies.into_iter().unzip();
            steps.push(Step {
                op: Arc::new(CopyAll),
                inputs: sources.into(),
                outputs: targets.into(),
                kept: None,
            });
        }
        for operand in steps.iter().flat_map(|s| s.inputs.iter().chain(&*s.outputs)) {
            if operand.ty.dtype == DType::F64 {
                return Err(Error::Program {
                    expected: "f32 on a GPU (f64 is for the CPU)".to_owned(),
                    got: operand.ty.to_string(),
                });
            }
        }
        let inputs = inputs.iter().map(|operand| -> Result<Input> {
            let bytes = operand.ty.bytes();
            let host = Buffer::new(bytes, "a program's inputs")?;
            Ok(Input { host, device: operand.ptr as u64, bytes, changed: false })
        });
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let outputs = outputs.iter().map(|operand| -> Result<Output> {
            let bytes = operand.ty.bytes();
            let host = Buffer::new(bytes, "a program's outputs")?;
            Ok(Output { device: operand.ptr as u64, bytes, host, fetched: Cell::new(true) })
        });
        let outputs = outputs.collect::<Result<Vec<_>>>()?;
        let spans = spans(&inputs);
        let each = spans.last().map_or(0, |span| span.offset + span.bytes);
        let depth = if each < 64 << 20 { 8 } else { 2 };
        let ring = (0..depth).map(|_| Pinned::new(&gpu.0.context, each.next_multiple_of(16)));
        let ring = ring.collect::<Result<Vec<_>>>()?;
        let (mut keep, mut queued) = (Vec::new(), 0);
        let fetch = Fetch::new(gpu, &spans, &ring, &mut keep)?;
        let replay =
            capture_steps(gpu, |stream| fetch.queue(gpu, stream), &inputs, &steps, &mut keep, &mut queued)?;
        queued += usize::from(fetch.spans > 0);
        Ok(Self {
            replay,
            steps,
            _arena: arena,
            _keep: keep,
            inputs,
            spans,
            outputs,
            ring,
            turn: 0,
            queued,
            gpu: gpu.clone(),
        })
    }

    /// Queues one run; returns before it is done.
    fn queue(&mut self) -> Result<()> {
        self.gpu.0.context.enter()?;
        let stream = &self.gpu.0.stream;
        let pinned = &self.ring[self.turn];
        pinned.wait()?;
        for span in &self.spans {
            if !span.is_fetched() && !span.inputs.iter().any(|i| self.inputs[*i].changed) {
                continue;
            }
            // SAFETY: the ring's entries hold all spans, and the run that read this one is done.
            let from = unsafe { pinned.data.add(span.offset) };
            for input in span.inputs.iter().map(|i| &self.inputs[*i]) {
                // SAFETY: as above, and the input lies inside its span.
                unsafe {
                    let to = from.add((input.device - span.device) as usize);
                    std::ptr::copy_nonoverlapping(input.host.ptr(), to, input.bytes);
                }
            }
            if !span.is_fetched() {
                call!(cuMemcpyHtoDAsync_v2(span.device, from.cast(), span.bytes, stream.raw))?;
                // The copy is under way even if the launch fails.
                pinned.queued(stream)?;
            }
        }
        call!(cuGraphLaunch(self.replay, stream.raw))?;
        // The graph uses this entry of the ring, even if a call below fails.
        self.turn = (self.turn + 1) % self.ring.len();
        self.inputs.iter_mut().for_each(|input| input.changed = false);
        self.outputs.iter().for_each(|output| output.fetched.set(false));
        pinned.queued(stream)
    }

    /// Host copy of output `index` as of the last run.
    fn fetch(&self, index: usize) -> Result<*const u8> {
        let output = &self.outputs[index];
        if !output.fetched.replace(true) {
            self.gpu.0.context.enter()?;
            let stream = &self.gpu.0.stream;
            call!(cuMemcpyDtoHAsync_v2(output.host.ptr().cast(), output.device, output.bytes, stream.raw))?;
            stream.synchronize()?;
        }
        Ok(output.host.ptr())
    }

    /// For each step, its time when run on its own again and again, and whether it lies on the critical path
    /// through the graph by those times.
    fn replay_steps(&self) -> Result<Vec<(Duration, bool)>> {
        self.gpu.0.context.enter()?;
        let steps = &self.steps;
        let parts = parts(steps);
        let mut times = Vec::with_capacity(parts.len());
        // Scratch is kept to the end: deferred work may read it.
        let (mut keep, mut queued, mut handoff) = (Vec::new(), 0, Vec::new());
        for part in &parts {
            if !part.is_deferred {
                handoff.clear();
            }
            let step = &steps[part.step];
            times.push(replayed_time(&self.gpu, |stream| {
                let (inputs, outputs, gpu) = (&*step.inputs, &*step.outputs, &self.gpu);
                let (keep, queued, handoff, written) =
                    (&mut keep, &mut queued, &mut handoff, &[Range::ALL][..]);
                let mut launch = Launch { inputs, outputs, gpu, stream, keep, queued, handoff, written };
                step.queue(&mut launch, part.is_deferred)
            })?);
        }
        let mut result = vec![(Duration::ZERO, false); steps.len()];
        for ((part, time), critical) in parts.iter().zip(&times).zip(critical_path(&parts, &times)) {
            let step = &mut result[part.step];
            // Of a step and its deferred work, only what is critical counts, if either is.
            if critical == step.1 {
                step.0 += *time;
            } else if critical {
                *step = (*time, true);
            }
        }
        Ok(result)
    }
}

impl Executor for Exec {
    fn steps(&self) -> &[Step] {
        &self.steps
    }

    fn run(&mut self) -> Result<()> {
        self.queue()
    }

    fn profile(&mut self, runs: usize) -> Result<Vec<(Vec<Duration>, bool)>> {
        // One whole run first, to copy changed inputs.
        self.queue()?;
        let mut result = vec![(Vec::with_capacity(runs), true); self.steps.len()];
        for _ in 0..runs {
            for ((times, critical), (time, is_critical)) in result.iter_mut().zip(self.replay_steps()?) {
                times.push(time);
                *critical = is_critical;
            }
        }
        Ok(result)
    }

    fn input(&self, index: usize) -> *const u8 {
        self.inputs[index].host.ptr()
    }

    fn input_mut(&mut self, index: usize) -> *mut u8 {
        self.inputs[index].changed = true;
        self.inputs[index].host.ptr()
    }

    fn output(&self, index: usize) -> Result<*const u8> {
        self.fetch(index)
    }

    fn kernels(&self) -> usize {
        self.queued
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        // Work in flight uses the memory of this program.
        if self.gpu.synchronize().is_ok() {
            // SAFETY: instantiated by `capture_steps`, and no longer running.
            unsafe { sys::cuGraphExecDestroy(self.replay) };
        }
    }
}
