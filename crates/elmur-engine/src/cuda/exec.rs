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
            let mut notes = Vec::new();
            step.queue(&self.gpu, stream.raw, &mut keep, &mut queued, &mut notes, false)?;
            step.queue(&self.gpu, stream.raw, &mut keep, &mut queued, &mut notes, true)?;
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
    /// Queues the step's work, or its work aside.
    fn queue(
        &self,
        gpu: &Gpu,
        stream: sys::CUstream,
        keep: &mut Vec<DeviceBuffer>,
        queued: &mut usize,
        notes: &mut Vec<u64>,
        aside: bool,
    ) -> Result<()> {
        let (inputs, outputs) = (&*self.inputs, &*self.outputs);
        let mut launch = Launch { inputs, outputs, gpu, stream, keep, queued, notes };
        if aside { self.op.cuda_aside(&mut launch) } else { self.op.cuda(&mut launch) }
    }

    /// Outputs that work aside writes, as far as anyone reads them.
    fn aside(&self) -> std::ops::Range<usize> {
        let range = self.op.aside(self.outputs.len());
        let wanted = self.outputs[range.clone()].iter().any(|o| !o.ptr.is_null());
        if wanted { range } else { 0..0 }
    }
}

/// Records all steps into a CUDA graph and makes it ready to run.
fn record(
    gpu: &Gpu,
    steps: &[Step],
    keep: &mut Vec<DeviceBuffer>,
    queued: &mut usize,
) -> Result<sys::CUgraphExec> {
    let streams = [Stream::new(&gpu.0.context)?, Stream::urgent(&gpu.0.context)?];
    let mut recording = Recording { graph: std::ptr::null_mut() };
    call!(cuGraphCreate(&raw mut recording.graph, 0))?;
    let parts = parts(steps);
    let urgent = urgent(&parts);
    let mut leaves: Vec<Leaves> = Vec::with_capacity(parts.len());
    let mut notes = Vec::new();
    for (part, urgent) in parts.iter().zip(urgent) {
        let mut before: Leaves = Default::default();
        for need in &part.needs {
            before.0.extend_from_slice(&leaves[*need].0);
            before.1.extend_from_slice(&leaves[*need].1);
        }
        if !part.is_aside {
            notes.clear();
        }
        let stream = streams[usize::from(urgent)].raw;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        let (nodes, edges) = (before.0.as_ptr(), before.1.as_ptr());
        call!(cuStreamBeginCaptureToGraph(stream, recording.graph, nodes, edges, before.0.len(), mode))?;
        let step = &steps[part.step];
        let result =
            step.queue(gpu, stream, keep, queued, &mut notes, part.is_aside).and_then(|()| last_work(stream));
        let mut graph = std::ptr::null_mut();
        let ended = call!(cuStreamEndCapture(stream, &raw mut graph));
        leaves.push(result?);
        ended?;
    }
    let mut replay = std::ptr::null_mut();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY.0.into();
    call!(cuGraphInstantiateWithFlags(&raw mut replay, recording.graph, flags))?;
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

/// A step's work, or its work aside, and what it must wait for.
struct Part {
    /// Number of the step.
    step: usize,
    is_aside: bool,
    reads: Vec<Range>,
    writes: Vec<Range>,
    /// Earlier parts that this one waits for directly.
    needs: Vec<usize>,
    /// Bit j: this part comes after part j.
    after: Vec<u64>,
}

impl Part {
    fn of(number: usize, step: &Step, aside: &std::ops::Range<usize>, is_aside: bool) -> Self {
        let outputs = step.outputs.iter().enumerate().filter(|(i, _)| aside.contains(i) == is_aside);
        Self {
            step: number,
            is_aside,
            reads: step.inputs.iter().filter_map(Range::of).collect(),
            writes: outputs.filter_map(|(_, operand)| Range::of(operand)).collect(),
            needs: Vec::new(),
            after: Vec::new(),
        }
    }

    /// Finds the earlier parts that write what this one touches or read what it writes, and `also`. Those that another of
    /// them already waits for are left out.
    fn wait_for(&mut self, earlier: &[Part], also: Option<usize>) {
        self.after = vec![0; earlier.len() / 64 + 1];
        for (j, part) in earlier.iter().enumerate().rev() {
            if self.after[j / 64] >> (j % 64) & 1 == 1 {
                continue;
            }
            let waits = also == Some(j)
                || any_overlap(&part.writes, &self.reads)
                || any_overlap(&part.writes, &self.writes)
                || any_overlap(&part.reads, &self.writes);
            if waits {
                self.needs.push(j);
                self.after.iter_mut().zip(&part.after).for_each(|(s, a)| *s |= a);
                self.after[j / 64] |= 1 << (j % 64);
            }
        }
    }
}

/// All work of a program in order.
fn parts(steps: &[Step]) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        let aside = step.aside();
        let mut own = Part::of(number, step, &aside, false);
        own.wait_for(&parts, None);
        parts.push(own);
        if !aside.is_empty() {
            let mut part = Part::of(number, step, &aside, true);
            part.wait_for(&parts, step.op.aside_follows().then(|| parts.len() - 1));
            parts.push(part);
        }
    }
    parts
}

/// Which parts lie on the longest ways through the graph, or nearly so: others must not keep them waiting.
fn urgent(parts: &[Part]) -> Vec<bool> {
    let mut depth = vec![1usize; parts.len()];
    for (i, part) in parts.iter().enumerate() {
        depth[i] = 1 + part.needs.iter().map(|n| depth[*n]).max().unwrap_or(0);
    }
    let mut height = vec![0usize; parts.len()];
    for (i, part) in parts.iter().enumerate().rev() {
        for need in &part.needs {
            height[*need] = height[*need].max(height[i] + 1);
        }
    }
    let longest = depth.iter().copied().max().unwrap_or(0);
    depth.iter().zip(&height).map(|(d, h)| d + h + longest / 16 >= longest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(reads: &[(usize, usize)], writes: &[(usize, usize)], earlier: &[Part]) -> Part {
        let ranges =
            |list: &[(usize, usize)]| list.iter().map(|&(start, end)| Range { start, end }).collect();
        let (reads, writes) = (ranges(reads), ranges(writes));
        let (needs, after) = (Vec::new(), Vec::new());
        let mut part = Part { step: 0, is_aside: false, reads, writes, needs, after };
        part.wait_for(earlier, None);
        part
    }

    #[test]
    fn parts_wait_for_what_they_touch_and_no_more() {
        let mut parts = Vec::new();
        for (reads, writes) in [
            (&[][..], &[(0, 10)][..]),  // 0 writes a
            (&[(0, 10)], &[(10, 20)]),  // 1 reads a, writes b
            (&[(5, 10)], &[(20, 30)]),  // 2 reads part of a, writes c
            (&[(10, 30)], &[(30, 40)]), // 3 reads b and c
            (&[], &[(0, 5)]),           // 4 overwrites a, which 1 has read
            (&[(0, 5), (30, 40)], &[(40, 50)]),
            (&[], &[(60, 70)]), // 6 has nothing to do with the others
        ] {
            let next = part(reads, writes, &parts);
            parts.push(next);
        }
        // 0 - 1 - 3 - 5, 0 - 2 - 3 - 5 and 0 - 1 - 4 - 5 are the longest ways.
        assert_eq!(urgent(&parts), [true, true, true, true, true, true, false]);
        let needs: Vec<Vec<usize>> = parts.into_iter().map(|p| p.needs).collect();
        assert_eq!(needs, [vec![], vec![0], vec![0], vec![2, 1], vec![1], vec![4, 3], vec![]]);
    }
}
