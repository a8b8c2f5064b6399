//! A program on a GPU: its CUDA graph, what goes in and what comes out.

use std::cell::Cell;
use std::time::Duration;

use cudarc::driver::sys;

use super::Gpu;
use super::driver::{DeviceBuffer, Pinned, call};
use super::launch::{Shape, args, launch_kernel};
use super::parts::{longest_way, parts};
use super::record::{record, replayed_time};
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

/// Inputs that lie side by side on the device and go there together.
struct Span {
    device: u64,
    bytes: usize,
    /// Numbers of the inputs.
    inputs: Vec<usize>,
    /// Where the pinned copy begins.
    offset: usize,
}

/// Inputs up to this many bytes go together, changed or not, and are fetched by the graph's first kernel: a copy before the graph would
/// keep it waiting for some ten microseconds.
const SPAN: u64 = 64 << 10;

impl Span {
    fn is_fetched(&self) -> bool {
        self.bytes as u64 <= SPAN
    }
}

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

/// How a graph begins: by fetching small inputs from the entry of the ring whose turn it is, which it counts itself.
struct Fetch {
    spans: usize,
    table: u64,
    slots: u64,
    turn: u64,
    counter: u64,
    depth: u32,
}

impl Fetch {
    fn new(gpu: &Gpu, spans: &[Span], ring: &[Pinned], keep: &mut Vec<DeviceBuffer>) -> Result<Self> {
        let mut words = |words: &[u64]| -> Result<u64> {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let buffer = DeviceBuffer::with(gpu, &bytes, "a program's inputs")?;
            let address = buffer.address();
            keep.push(buffer);
            Ok(address)
        };
        let fetched: Vec<&Span> = spans.iter().filter(|span| span.is_fetched()).collect();
        if fetched.is_empty() {
            return Ok(Self { spans: 0, table: 0, slots: 0, turn: 0, counter: 0, depth: 0 });
        }
        let table: Vec<u64> =
            fetched.iter().flat_map(|span| [span.device, span.offset as u64, span.bytes as u64]).collect();
        let slots: Vec<u64> = ring.iter().map(|pinned| pinned.data as u64).collect();
        Ok(Self {
            spans: fetched.len(),
            table: words(&table)?,
            slots: words(&slots)?,
            turn: words(&[0])?,
            counter: words(&[0])?,
            depth: ring.len() as u32,
        })
    }

    fn queue(&self, gpu: &Gpu, stream: sys::CUstream) -> Result<()> {
        if self.spans == 0 {
            return Ok(());
        }
        let args = args![self.table, self.slots, self.turn, self.counter, self.depth];
        let shape = Shape { grid: [self.spans, 1, 1], threads: 1024, shared: 0, cluster: 1 };
        launch_kernel(&gpu.0.kernels, stream, "fetch_inputs", shape, args)
    }
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
    /// Pinned copies of the inputs, used in turn, so that the host can fill one while the GPU reads another.
    ring: Vec<Pinned>,
    turn: usize,
    /// Kernels, products and copies of one run.
    pub queued: usize,
    gpu: Gpu,
}

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
        let replay = record(gpu, |stream| fetch.queue(gpu, stream), steps, &mut keep, &mut queued)?;
        queued += usize::from(fetch.spans > 0);
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
                // Even if the launch fails, this much is under way.
                pinned.queued(stream)?;
            }
        }
        call!(cuGraphLaunch(self.replay, stream.raw))?;
        // The graph has taken its turn, whatever happens next.
        self.turn = (self.turn + 1) % self.ring.len();
        self.inputs.iter_mut().for_each(|input| input.changed = false);
        self.outputs.iter().for_each(|output| output.fetched.set(false));
        pinned.queued(stream)
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
