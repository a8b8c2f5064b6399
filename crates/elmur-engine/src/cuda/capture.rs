//! A program's steps captured as one CUDA graph, whose edges are the dependencies between them.

use std::time::Duration;

use cudarc::driver::sys;

use super::Gpu;
use super::dependencies::{Range, parts, urgent};
use super::driver::{DeviceBuffer, Stream, call};
use super::inputs::Input;
use super::launch::Launch;
use crate::error::Result;
use crate::step::Step;

/// A CUDA graph while it is being captured.
struct Captured {
    graph: sys::CUgraph,
}

impl Drop for Captured {
    fn drop(&mut self) {
        if !self.graph.is_null() {
            // SAFETY: created by `capture_steps` or by the driver; an instantiated copy lives on its own.
            unsafe { sys::cuGraphDestroy(self.graph) };
        }
    }
}

/// The last nodes of a captured part, and the edges that lead from them.
type Leaves = (Vec<sys::CUgraphNode>, Vec<sys::CUgraphEdgeData>);

impl Step {
    /// Queues the step's work, or its deferred work, with a launch that has the step's operands.
    pub(super) fn queue(&self, launch: &mut Launch<'_>, deferred: bool) -> Result<()> {
        if !deferred {
            return self.op.cuda(launch);
        }
        // Work that does not wait for the step's own finds nothing of it.
        if !self.op.deferred_reads_scratch() {
            launch.handoff.clear();
        }
        self.op.cuda_deferred(launch)
    }

    /// Outputs that deferred work writes; none if nobody reads them.
    pub(super) fn deferred(&self) -> std::ops::Range<usize> {
        let range = self.op.deferred(self.outputs.len());
        let wanted = self.outputs[range.clone()].iter().any(|o| !o.ptr.is_null());
        if wanted { range } else { 0..0 }
    }
}

/// Captures `first`, which writes the program's inputs, then all steps as a CUDA graph and makes it ready to
/// run.
pub(super) fn capture_steps(
    gpu: &Gpu,
    first: impl FnOnce(sys::CUstream) -> Result<()>,
    inputs: &[Input],
    steps: &[Step],
    keep: &mut Vec<DeviceBuffer>,
    queued: &mut usize,
) -> Result<sys::CUgraphExec> {
    let streams = [Stream::new(&gpu.0.context)?, Stream::urgent(&gpu.0.context)?];
    let mut captured = Captured { graph: std::ptr::null_mut() };
    call!(cuGraphCreate(&raw mut captured.graph, 0))?;
    let parts = parts(steps);
    let urgent = urgent(&parts);
    let root = capture(streams[1].raw, captured.graph, &Leaves::default(), first)?;
    let mut leaves: Vec<Leaves> = Vec::with_capacity(parts.len());
    let mut handoff = Vec::new();
    let inputs: Vec<Range> = inputs.iter().map(Input::range).collect();
    for (part, urgent) in parts.iter().zip(urgent) {
        let mut before = if part.needs.is_empty() { root.clone() } else { Leaves::default() };
        for need in &part.needs {
            before.0.extend_from_slice(&leaves[*need].0);
            before.1.extend_from_slice(&leaves[*need].1);
        }
        if !part.is_deferred {
            handoff.clear();
        }
        let stream = streams[usize::from(urgent)].raw;
        let before_it = part.needs.iter().flat_map(|need| parts[*need].writes()).copied();
        let written = if part.needs.is_empty() { inputs.clone() } else { before_it.collect() };
        let step = &steps[part.step];
        leaves.push(capture(stream, captured.graph, &before, |stream| {
            let (inputs, outputs, handoff) = (&*step.inputs, &*step.outputs, &mut handoff);
            let mut launch =
                Launch { inputs, outputs, gpu, stream, keep, queued, handoff, written: &written };
            step.queue(&mut launch, part.is_deferred)
        })?);
    }
    // GPUs before compute capability 9.0 cannot launch kernels early.
    if gpu.0.context.architecture()? >= 90 {
        enable_early_launch(gpu, captured.graph)?;
    }
    let mut replay = std::ptr::null_mut();
    let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY.0.into();
    call!(cuGraphInstantiateWithFlags(&raw mut replay, captured.graph, flags))?;
    Ok(replay)
}

/// Adds the work that `queue` queues to a graph, with edges from `before`. Returns the last nodes of that
/// work.
fn capture(
    stream: sys::CUstream,
    graph: sys::CUgraph,
    before: &Leaves,
    queue: impl FnOnce(sys::CUstream) -> Result<()>,
) -> Result<Leaves> {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let (nodes, edges) = (before.0.as_ptr(), before.1.as_ptr());
    call!(cuStreamBeginCaptureToGraph(stream, graph, nodes, edges, before.0.len(), mode))?;
    let result = queue(stream).and_then(|()| last_work(stream));
    let mut same = std::ptr::null_mut();
    let ended = call!(cuStreamEndCapture(stream, &raw mut same));
    let leaves = result?;
    ended.map(|()| leaves)
}

/// Lets urgent kernels be launched while the kernels they depend on still run (programmatic dependent
/// launch): our kernels begin by waiting for those to end. Edges to kernels of the library, which do not
/// wait, and to copies and fills, which cannot, stay as they are. Kernels that are not urgent must not occupy
/// a multiprocessor while they wait.
fn enable_early_launch(gpu: &Gpu, graph: sys::CUgraph) -> Result<()> {
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
        if waits && kernel(*from)?.is_some() && is_urgent(*to)? {
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

/// Whether a kernel was captured from the urgent stream.
fn is_urgent(node: sys::CUgraphNode) -> Result<bool> {
    // SAFETY: plain numbers, of which the driver writes one.
    let mut value: sys::CUkernelNodeAttrValue = unsafe { std::mem::zeroed() };
    let priority = sys::CUkernelNodeAttrID::CU_LAUNCH_ATTRIBUTE_PRIORITY;
    call!(cuGraphKernelNodeGetAttribute(node, priority, &raw mut value))?;
    // SAFETY: the number asked for. Streams of the usual priority have 0, urgent ones less.
    Ok(unsafe { value.priority } < 0)
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
    // SAFETY: the driver points at `count` entries that live until the stream is used again; no entries, no
    // pointers.
    unsafe {
        let nodes = if count == 0 { &[][..] } else { std::slice::from_raw_parts(nodes, count) };
        let plain = || vec![std::mem::zeroed(); count];
        let edges = if edges.is_null() { plain() } else { std::slice::from_raw_parts(edges, count).to_vec() };
        Ok((nodes.to_vec(), edges))
    }
}

/// Time that the GPU takes for the work that `queue` queues: the work is captured many times in a chain and
/// replayed, so that launches on the host do not count.
pub(super) fn replayed_time(
    gpu: &Gpu,
    mut queue: impl FnMut(sys::CUstream) -> Result<()>,
) -> Result<Duration> {
    const TIMES: u32 = 20;
    let stream = Stream::new(&gpu.0.context)?;
    let mut captured = Captured { graph: std::ptr::null_mut() };
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    call!(cuStreamBeginCapture_v2(stream.raw, mode))?;
    let queued = (0..TIMES).try_for_each(|_| queue(stream.raw));
    let ended = call!(cuStreamEndCapture(stream.raw, &raw mut captured.graph));
    queued?;
    ended?;
    let mut events = [std::ptr::null_mut(); 2];
    let mut replay = std::ptr::null_mut();
    call!(cuGraphInstantiateWithFlags(&raw mut replay, captured.graph, 0))?;
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
