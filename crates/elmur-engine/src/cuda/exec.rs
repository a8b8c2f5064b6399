//! A planned graph as one CUDA graph. Its edges are the dependencies of the data, so independent ops run side by side.

use std::cell::Cell;
use std::time::Duration;

use cudarc::driver::sys;

use super::Gpu;
use super::driver::{DeviceBuffer, Pinned, Stream, call};
use super::launch::Launch;
use crate::error::{Error, Result};
use crate::op::Operand;
use crate::program::Step;
use crate::store::Buffer;
use crate::types::DType;

/// An input: where the caller writes it, where the program reads it.
pub(crate) struct Input {
    pub host: Buffer,
    pub device: u64,
    pub bytes: usize,
    /// Written since the last run.
    pub changed: bool,
}

/// An output, copied to the host when it is first asked for after a run.
pub(crate) struct Output {
    device: u64,
    bytes: usize,
    host: Buffer,
    fetched: Cell<bool>,
}

/// A program on a GPU.
pub(crate) struct Exec {
    replay: sys::CUgraphExec,
    /// Device memory that the recorded work uses.
    _arena: DeviceBuffer,
    _keep: Vec<DeviceBuffer>,
    pub inputs: Vec<Input>,
    pub outputs: Vec<Output>,
    /// Pinned copies of changed inputs, used in turn, so that the host can fill one while the GPU reads another.
    ring: Vec<Pinned>,
    turn: usize,
    /// Kernels, products and copies of one run.
    pub queued: usize,
    gpu: Gpu,
}

/// The CUDA graph while it is being recorded.
struct Recording {
    graph: sys::CUgraph,
    stream: Stream,
}

impl Drop for Recording {
    fn drop(&mut self) {
        if !self.graph.is_null() {
            // SAFETY: created by `record`; an instantiated copy lives on its own.
            unsafe { sys::cuGraphDestroy(self.graph) };
        }
    }
}

/// Last work of a recorded step, as others depend on it.
type Leaves = (Vec<sys::CUgraphNode>, Vec<sys::CUgraphEdgeData>);

impl Exec {
    pub fn new(
        gpu: &Gpu,
        arena: DeviceBuffer,
        steps: &[Step],
        inputs: &[Operand],
        outputs: &[Operand],
    ) -> Result<Self> {
        gpu.0.context.enter()?;
        for operand in steps.iter().flat_map(|s| s.inputs.iter().chain(&*s.outputs)) {
            if operand.ty.dtype == DType::F64 {
                return Err(Error::Op {
                    op: "program",
                    expected: "f32 on a GPU (f64 is for the CPU)".to_owned(),
                    got: operand.ty.to_string(),
                });
            }
        }
        let mut keep = Vec::new();
        let mut queued = 0;
        let replay = record(gpu, steps, &mut keep, &mut queued)?;
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
        let each: usize = inputs.iter().map(|i| i.bytes.next_multiple_of(64)).sum();
        let depth = if each < 64 << 20 { 8 } else { 2 };
        let ring = (0..depth).map(|_| Pinned::new(&gpu.0.context, each)).collect::<Result<_>>()?;
        Ok(Self {
            replay,
            _arena: arena,
            _keep: keep,
            inputs,
            outputs,
            ring,
            turn: 0,
            queued,
            gpu: gpu.clone(),
        })
    }

    /// Queues one run; returns before it is done.
    pub fn run(&mut self) -> Result<()> {
        self.gpu.0.context.enter()?;
        let stream = &self.gpu.0.stream;
        if self.inputs.iter().any(|input| input.changed) {
            let pinned = &self.ring[self.turn];
            pinned.wait()?;
            let mut offset = 0;
            for input in &mut self.inputs {
                if std::mem::take(&mut input.changed) {
                    // SAFETY: the ring's entries hold all inputs, and its last copies are done.
                    let from = unsafe {
                        let from = pinned.data.add(offset);
                        std::ptr::copy_nonoverlapping(input.host.ptr(), from, input.bytes);
                        from
                    };
                    call!(cuMemcpyHtoDAsync_v2(input.device, from.cast(), input.bytes, stream.raw))?;
                }
                offset += input.bytes.next_multiple_of(64);
            }
            pinned.queued(stream)?;
            self.turn = (self.turn + 1) % self.ring.len();
        }
        call!(cuGraphLaunch(self.replay, stream.raw))?;
        self.outputs.iter().for_each(|output| output.fetched.set(false));
        Ok(())
    }

    /// Host copy of output `index` as of the last run.
    pub fn fetch(&self, index: usize) -> Result<*const u8> {
        let output = &self.outputs[index];
        if !output.fetched.replace(true) {
            self.gpu.0.context.enter()?;
            let stream = &self.gpu.0.stream;
            call!(cuMemcpyDtoHAsync_v2(output.host.ptr().cast(), output.device, output.bytes, stream.raw))?;
            stream.synchronize()?;
        }
        Ok(output.host.ptr())
    }

    /// Time of each step, run one after the other outside the graph.
    pub fn profile(&mut self, steps: &[Step]) -> Result<Vec<Duration>> {
        self.gpu.0.context.enter()?;
        let stream = &self.gpu.0.stream;
        let mut events = Vec::new();
        for _ in 0..=steps.len() {
            let mut event = std::ptr::null_mut();
            call!(cuEventCreate(&raw mut event, 0))?;
            events.push(event);
        }
        let (mut keep, mut queued) = (Vec::new(), 0);
        for (step, event) in steps.iter().zip(&events) {
            call!(cuEventRecord(*event, stream.raw))?;
            step.queue(&self.gpu, stream.raw, &mut keep, &mut queued)?;
        }
        call!(cuEventRecord(events[steps.len()], stream.raw))?;
        stream.synchronize()?;
        let mut times = Vec::new();
        for pair in events.windows(2) {
            let mut milliseconds = 0f32;
            call!(cuEventElapsedTime_v2(&raw mut milliseconds, pair[0], pair[1]))?;
            times.push(Duration::from_secs_f32(milliseconds.max(0.0) / 1e3));
        }
        for event in events {
            call!(cuEventDestroy_v2(event))?;
        }
        Ok(times)
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        // Work in flight uses this program's memory.
        if self.gpu.synchronize().is_ok() {
            // SAFETY: instantiated by `record`, and no longer running.
            unsafe { sys::cuGraphExecDestroy(self.replay) };
        }
    }
}

impl Step {
    fn queue(
        &self,
        gpu: &Gpu,
        stream: sys::CUstream,
        keep: &mut Vec<DeviceBuffer>,
        queued: &mut usize,
    ) -> Result<()> {
        let mut launch = Launch { inputs: &self.inputs, outputs: &self.outputs, gpu, stream, keep, queued };
        self.op.cuda(&mut launch)
    }
}

/// Records all steps into a CUDA graph and makes it ready to run.
fn record(
    gpu: &Gpu,
    steps: &[Step],
    keep: &mut Vec<DeviceBuffer>,
    queued: &mut usize,
) -> Result<sys::CUgraphExec> {
    let mut recording = Recording { graph: std::ptr::null_mut(), stream: Stream::new(&gpu.0.context)? };
    call!(cuGraphCreate(&raw mut recording.graph, 0))?;
    let stream = recording.stream.raw;
    let dependencies = dependencies(steps);
    let mut leaves: Vec<Leaves> = Vec::with_capacity(steps.len());
    for (step, needs) in steps.iter().zip(dependencies) {
        let mut before: Leaves = Default::default();
        for need in needs {
            before.0.extend_from_slice(&leaves[need].0);
            before.1.extend_from_slice(&leaves[need].1);
        }
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let (nodes, edges) = (before.0.as_ptr(), before.1.as_ptr());
        call!(cuStreamBeginCaptureToGraph(stream, recording.graph, nodes, edges, before.0.len(), mode))?;
        let result = step.queue(gpu, stream, keep, queued).and_then(|()| last_work(stream));
        let mut graph = std::ptr::null_mut();
        let ended = call!(cuStreamEndCapture(stream, &raw mut graph));
        leaves.push(result?);
        ended?;
    }
    let mut replay = std::ptr::null_mut();
    call!(cuGraphInstantiateWithFlags(&raw mut replay, recording.graph, 0))?;
    Ok(replay)
}

/// The nodes that the next work in a capturing stream would depend on.
fn last_work(stream: sys::CUstream) -> Result<Leaves> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut nodes, mut edges, mut count) = (std::ptr::null(), std::ptr::null(), 0);
    call!(cuStreamGetCaptureInfo_v3(
        stream,
        &raw mut status,
        std::ptr::null_mut(),
        std::ptr::null_mut(),
        &raw mut nodes,
        &raw mut edges,
        &raw mut count,
    ))?;
    // SAFETY: the driver points at `count` entries that live until the stream is used again; no entries, no pointers.
    unsafe {
        let nodes = if count == 0 { &[][..] } else { std::slice::from_raw_parts(nodes, count) };
        let plain = || vec![std::mem::zeroed(); count];
        let edges = if edges.is_null() { plain() } else { std::slice::from_raw_parts(edges, count).to_vec() };
        Ok((nodes.to_vec(), edges))
    }
}

/// Bytes that a step touches.
#[derive(Clone, Copy)]
struct Range {
    start: usize,
    end: usize,
}

impl Range {
    fn of(operand: &Operand) -> Option<Self> {
        let start = operand.ptr.addr();
        (start != 0).then(|| Self { start, end: start + operand.ty.bytes() })
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

fn any_overlap(a: &[Range], b: &[Range]) -> bool {
    a.iter().any(|x| b.iter().any(|y| x.overlaps(y)))
}

/// For each step the earlier steps that it must wait for: those that write what it touches or read what it writes. Steps that
/// another of them already waits for are left out.
fn dependencies(steps: &[Step]) -> Vec<Vec<usize>> {
    let ranges = |operands: &[Operand]| operands.iter().filter_map(Range::of).collect::<Vec<_>>();
    let touched: Vec<(Vec<Range>, Vec<Range>)> =
        steps.iter().map(|s| (ranges(&s.inputs), ranges(&s.outputs))).collect();
    let words = steps.len().div_ceil(64);
    // Bit j of row i: step i comes after step j.
    let mut after: Vec<Vec<u64>> = Vec::with_capacity(steps.len());
    let mut all = Vec::with_capacity(steps.len());
    for (i, (reads, writes)) in touched.iter().enumerate() {
        let mut seen = vec![0u64; words];
        let mut needs = Vec::new();
        for j in (0..i).rev() {
            if seen[j / 64] >> (j % 64) & 1 == 1 {
                continue;
            }
            let (earlier_reads, earlier_writes) = &touched[j];
            let waits = any_overlap(earlier_writes, reads)
                || any_overlap(earlier_writes, writes)
                || any_overlap(earlier_reads, writes);
            if waits {
                needs.push(j);
                seen.iter_mut().zip(&after[j]).for_each(|(s, a)| *s |= a);
                seen[j / 64] |= 1 << (j % 64);
            }
        }
        after.push(seen);
        all.push(needs);
    }
    all
}
