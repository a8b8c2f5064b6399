//! A program's steps recorded into one CUDA graph.

use std::time::Duration;

use cudarc::driver::sys;

use super::Gpu;
use super::driver::{DeviceBuffer, Stream, call};
use super::launch::Launch;
use super::parts::{parts, urgent};
use crate::error::Result;
use crate::step::Step;

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

impl Step {
    /// Queues the step's work, or its work aside.
    pub(super) fn queue(
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
    pub(super) fn aside(&self) -> std::ops::Range<usize> {
        let range = self.op.aside(self.outputs.len());
        let wanted = self.outputs[range.clone()].iter().any(|o| !o.ptr.is_null());
        if wanted { range } else { 0..0 }
    }
}

/// Records `first`, then all steps into a CUDA graph and makes it ready to run.
pub(super) fn record(
    gpu: &Gpu,
    first: impl FnOnce(sys::CUstream) -> Result<()>,
    steps: &[Step],
    keep: &mut Vec<DeviceBuffer>,
    queued: &mut usize,
) -> Result<sys::CUgraphExec> {
    let streams = [Stream::new(&gpu.0.context)?, Stream::urgent(&gpu.0.context)?];
    let mut recording = Recording { graph: std::ptr::null_mut() };
    call!(cuGraphCreate(&raw mut recording.graph, 0))?;
    let parts = parts(steps);
    let urgent = urgent(&parts);
    let root = capture(streams[1].raw, recording.graph, &Leaves::default(), first)?;
    let mut leaves: Vec<Leaves> = Vec::with_capacity(parts.len());
    let mut notes = Vec::new();
    for (part, urgent) in parts.iter().zip(urgent) {
        let mut before = if part.needs.is_empty() { root.clone() } else { Leaves::default() };
        for need in &part.needs {
            before.0.extend_from_slice(&leaves[*need].0);
            before.1.extend_from_slice(&leaves[*need].1);
        }
        if !part.is_aside {
            notes.clear();
        }
        let stream = streams[usize::from(urgent)].raw;
        leaves.push(capture(stream, recording.graph, &before, |stream| {
            steps[part.step].queue(gpu, stream, keep, queued, &mut notes, part.is_aside)
        })?);
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

/// Adds what `queue` queues to a graph, to be done after `before`.
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

/// Lets urgent kernels be made ready while the kernels they depend on still run: ours begin by waiting for those to end. The library's
/// kernels do not, and copies and fills cannot, so their edges stay as they are; and what is not urgent must not take room while it
/// waits.
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

/// Whether a kernel was recorded from the urgent stream.
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
    // SAFETY: the driver points at `count` entries that live until the stream is used again; no entries, no pointers.
    unsafe {
        let nodes = if count == 0 { &[][..] } else { std::slice::from_raw_parts(nodes, count) };
        let plain = || vec![std::mem::zeroed(); count];
        let edges = if edges.is_null() { plain() } else { std::slice::from_raw_parts(edges, count).to_vec() };
        Ok((nodes.to_vec(), edges))
    }
}

/// Time of what `queue` queues, replayed as part of a chain, so that only the GPU's time counts.
pub(super) fn replayed_time(
    gpu: &Gpu,
    mut queue: impl FnMut(sys::CUstream) -> Result<()>,
) -> Result<Duration> {
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
