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
use crate::store::{ALIGN, Buffer};
use crate::types::DType;

/// An input: where the caller writes it, where the program reads it.
pub(crate) struct Input {
    pub host: Buffer,
    pub device: u64,
    pub bytes: usize,
    /// Written since the last run.
    pub changed: bool,
}

/// Inputs that lie side by side on the device and are copied together.
struct Span {
    device: u64,
    bytes: usize,
    /// Numbers of the inputs.
    inputs: Vec<usize>,
    /// Where the pinned copy begins.
    offset: usize,
}

/// Small inputs up to this many bytes go in one copy, changed or not.
const SPAN: u64 = 64 << 10;

/// Groups inputs by where they lie: what is between two of one span is padding.
fn spans(inputs: &[Input]) -> Vec<Span> {
    let mut order: Vec<usize> = (0..inputs.len()).collect();
    order.sort_by_key(|i| inputs[*i].device);
    let mut spans: Vec<Span> = Vec::new();
    let mut offset = 0;
    for i in order {
        let (start, end) = (inputs[i].device, inputs[i].device + inputs[i].bytes as u64);
        match spans.last_mut() {
            Some(span)
                if start - (span.device + span.bytes as u64) < ALIGN as u64 && end - span.device <= SPAN =>
            {
                offset += (end - span.device) as usize - span.bytes;
                span.bytes = (end - span.device) as usize;
                span.inputs.push(i);
            }
            _ => {
                offset = offset.next_multiple_of(ALIGN);
                spans.push(Span { device: start, bytes: inputs[i].bytes, inputs: vec![i], offset });
                offset += inputs[i].bytes;
            }
        }
    }
    spans
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
    spans: Vec<Span>,
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
        let spans = spans(&inputs);
        let each = spans.last().map_or(0, |span| span.offset + span.bytes);
        let depth = if each < 64 << 20 { 8 } else { 2 };
        let ring = (0..depth).map(|_| Pinned::new(&gpu.0.context, each)).collect::<Result<_>>()?;
        Ok(Self {
            replay,
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
    pub fn run(&mut self) -> Result<()> {
        self.gpu.0.context.enter()?;
        let stream = &self.gpu.0.stream;
        if self.inputs.iter().any(|input| input.changed) {
            let pinned = &self.ring[self.turn];
            pinned.wait()?;
            for span in &self.spans {
                if !span.inputs.iter().any(|i| self.inputs[*i].changed) {
                    continue;
                }
                // SAFETY: the ring's entries hold all spans, and its last copies are done.
                let from = unsafe { pinned.data.add(span.offset) };
                for i in &span.inputs {
                    let input = &mut self.inputs[*i];
                    input.changed = false;
                    // SAFETY: as above, and the input lies inside its span.
                    unsafe {
                        let to = from.add((input.device - span.device) as usize);
                        std::ptr::copy_nonoverlapping(input.host.ptr(), to, input.bytes);
                    }
                }
                call!(cuMemcpyHtoDAsync_v2(span.device, from.cast(), span.bytes, stream.raw))?;
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

    /// For each step, its time when run on its own again and again, and whether it lies on the longest way through the graph by those
    /// times.
    pub fn profile(&mut self, steps: &[Step]) -> Result<Vec<(Duration, bool)>> {
        self.gpu.0.context.enter()?;
        let parts = parts(steps);
        let mut times = Vec::with_capacity(parts.len());
        // Scratch is kept to the end: work aside may go on with it.
        let (mut keep, mut queued, mut notes) = (Vec::new(), 0, Vec::new());
        for part in &parts {
            if !part.is_aside {
                notes.clear();
            }
            let step = &steps[part.step];
            times.push(replayed_time(&self.gpu, |stream| {
                step.queue(&self.gpu, stream, &mut keep, &mut queued, &mut notes, part.is_aside)
            })?);
        }
        let mut result = vec![(Duration::ZERO, false); steps.len()];
        for ((part, time), critical) in parts.iter().zip(&times).zip(longest_way(&parts, &times)) {
            let step = &mut result[part.step];
            // Of a step and its work aside, what others wait for counts.
            if critical == step.1 {
                step.0 += *time;
            } else if critical {
                *step = (*time, true);
            }
        }
        Ok(result)
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
    // Older GPUs know no kernels that wait.
    if gpu.0.context.architecture()? >= 90 {
        hasten(gpu, recording.graph)?;
    }
    let mut replay = std::ptr::null_mut();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY.0.into();
    call!(cuGraphInstantiateWithFlags(&raw mut replay, recording.graph, flags))?;
    Ok(replay)
}

/// Lets kernels be made ready while the kernels they depend on still run: ours begin by waiting for those to end. The library's
/// kernels do not, and copies and fills cannot, so their edges stay as they are.
fn hasten(gpu: &Gpu, graph: sys::CUgraph) -> Result<()> {
    let mut count = 0;
    let none = std::ptr::null_mut();
    call!(cuGraphGetEdges_v2(graph, none, none, std::ptr::null_mut(), &raw mut count))?;
    if count == 0 {
        return Ok(());
    }
    let mut from: Vec<sys::CUgraphNode> = vec![std::ptr::null_mut(); count];
    let mut to = from.clone();
    let plain = sys::CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };
    let mut edges = vec![plain; count];
    let [f, t] = [from.as_mut_ptr(), to.as_mut_ptr()];
    call!(cuGraphGetEdges_v2(graph, f, t, edges.as_mut_ptr(), &raw mut count))?;
    let early = sys::CUgraphEdgeData {
        from_port: sys::CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC as u8,
        type_: sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
        ..plain
    };
    for ((from, to), edge) in from.iter().zip(&to).zip(&edges) {
        let waits = kernel(*to)?.is_some_and(|function| gpu.0.kernels.has(function));
        if waits && kernel(*from)?.is_some() {
            call!(cuGraphRemoveDependencies_v2(graph, from, to, edge, 1))?;
            call!(cuGraphAddDependencies_v2(graph, from, to, &raw const early, 1))?;
        }
    }
    Ok(())
}

/// The function that a node runs, if it is a kernel.
fn kernel(node: sys::CUgraphNode) -> Result<Option<sys::CUfunction>> {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    call!(cuGraphNodeGetType(node, &raw mut kind))?;
    if kind != sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
        return Ok(None);
    }
    // SAFETY: plain numbers and addresses.
    let mut params: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
    call!(cuGraphKernelNodeGetParams_v2(node, &raw mut params))?;
    Ok(Some(params.func))
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

/// Which parts lie on the longest way by the times they take.
fn longest_way(parts: &[Part], times: &[Duration]) -> Vec<bool> {
    let mut ends: Vec<Duration> = Vec::with_capacity(parts.len());
    for (part, time) in parts.iter().zip(times) {
        ends.push(*time + part.needs.iter().map(|need| ends[*need]).max().unwrap_or_default());
    }
    let mut way = vec![false; parts.len()];
    let mut at = (0..parts.len()).max_by_key(|i| ends[*i]);
    while let Some(i) = at {
        way[i] = true;
        at = parts[i].needs.iter().copied().max_by_key(|need| ends[*need]);
    }
    way
}

/// Time of what `queue` queues, replayed as part of a chain, so that only the GPU's time counts.
fn replayed_time(gpu: &Gpu, mut queue: impl FnMut(sys::CUstream) -> Result<()>) -> Result<Duration> {
    const TIMES: u32 = 20;
    let stream = Stream::new(&gpu.0.context)?;
    let mut recording = Recording { graph: std::ptr::null_mut() };
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    call!(cuStreamBeginCapture_v2(stream.raw, mode))?;
    let queued = (0..TIMES).try_for_each(|_| queue(stream.raw));
    let ended = call!(cuStreamEndCapture(stream.raw, &raw mut recording.graph));
    queued?;
    ended?;
    let mut events = [std::ptr::null_mut(); 2];
    let mut replay = std::ptr::null_mut();
    call!(cuGraphInstantiateWithFlags(&raw mut replay, recording.graph, 0))?;
    let timed = (|| {
        for event in &mut events {
            call!(cuEventCreate(&raw mut *event, 0))?;
        }
        call!(cuGraphLaunch(replay, stream.raw))?;
        call!(cuEventRecord(events[0], stream.raw))?;
        call!(cuGraphLaunch(replay, stream.raw))?;
        call!(cuEventRecord(events[1], stream.raw))?;
        stream.synchronize()?;
        let mut milliseconds = 0f32;
        call!(cuEventElapsedTime_v2(&raw mut milliseconds, events[0], events[1]))?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1e3) / TIMES)
    })();
    // SAFETY: each is null or was made above, and its work is done.
    unsafe {
        sys::cuGraphExecDestroy(replay);
        for event in events.into_iter().filter(|e| !e.is_null()) {
            sys::cuEventDestroy_v2(event);
        }
    }
    timed
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
    fn inputs_side_by_side_are_copied_together() {
        let input = |device, bytes| Input {
            host: Buffer::new(bytes, "a test").unwrap(),
            device,
            bytes,
            changed: false,
        };
        // Two with padding between them, one too large to be sent for the others' sake, one far away.
        let inputs = [input(1064, 8), input(1000, 4), input(1128, 100_000), input(1 << 30, 16)];
        let spans = spans(&inputs);
        let found: Vec<_> = spans.iter().map(|s| (s.device, s.bytes, &s.inputs[..], s.offset)).collect();
        assert_eq!(found[0], (1000, 72, &[1, 0][..], 0));
        assert_eq!(found[1], (1128, 100_000, &[2][..], 128));
        assert_eq!(found[2], (1 << 30, 16, &[3][..], 128 + 100_032));
    }

    #[test]
    fn the_longest_way_is_by_time_not_by_count() {
        let mut parts = Vec::new();
        // 0 to 3 through 1 or 2; 4 stands apart.
        for (reads, writes) in [
            (&[][..], &[(0, 10)][..]),
            (&[(0, 10)], &[(10, 20)]),
            (&[(0, 10)], &[(20, 30)]),
            (&[(10, 30)], &[(30, 40)]),
            (&[], &[(50, 60)]),
        ] {
            let part = part(reads, writes, &parts);
            parts.push(part);
        }
        let times = [1, 5, 2, 1, 6].map(Duration::from_micros);
        assert_eq!(longest_way(&parts, &times), [true, true, false, true, false]);
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
