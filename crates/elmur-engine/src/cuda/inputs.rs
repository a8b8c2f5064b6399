//! How a program's inputs reach a GPU: inputs that lie side by side are copied together, and small ones are
//! fetched by the program's first kernel.

use cudarc::driver::sys;

use super::Gpu;
use super::args::args;
use super::dependencies::Range;
use super::driver::{DeviceBuffer, Pinned};
use super::kernels::Shape;
use crate::buffer::{ALIGN, Buffer};
use crate::error::Result;

/// An input: the host memory that the caller writes, and the device memory that the program reads.
pub(super) struct Input {
    pub host: Buffer,
    pub device: u64,
    pub bytes: usize,
    /// Whether the caller may have written it since the last run.
    pub changed: bool,
}

impl Input {
    /// Bytes of the device that the input is copied to.
    pub fn range(&self) -> Range {
        Range::new(self.device as usize, self.bytes)
    }
}

/// Inputs that lie side by side on the device and are copied together.
pub(super) struct Span {
    pub device: u64,
    pub bytes: usize,
    /// Numbers of the inputs.
    pub inputs: Vec<usize>,
    /// Byte offset in an entry of the ring.
    pub offset: usize,
}

/// Spans of up to this many bytes are fetched by the graph's first kernel in every run, changed or not: a
/// copy before the graph would delay it by some ten microseconds.
const SPAN: u64 = 64 << 10;

impl Span {
    pub fn is_fetched(&self) -> bool {
        self.bytes as u64 <= SPAN
    }
}

/// Groups inputs by address. Only padding lies between two inputs of one span.
pub(super) fn spans(inputs: &[Input]) -> Vec<Span> {
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

/// The first kernel of a graph: fetches small inputs from one entry of the ring, and counts on the device
/// which entry is next.
pub(super) struct Fetch {
    pub spans: usize,
    table: u64,
    slots: u64,
    turn: u64,
    counter: u64,
    depth: u32,
}

impl Fetch {
    pub fn new(gpu: &Gpu, spans: &[Span], ring: &[Pinned], keep: &mut Vec<DeviceBuffer>) -> Result<Self> {
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

    pub fn queue(&self, gpu: &Gpu, stream: sys::CUstream) -> Result<()> {
        if self.spans == 0 {
            return Ok(());
        }
        let args = args![self.table, self.slots, self.turn, self.counter, self.depth];
        let shape = Shape { grid: [self.spans, 1, 1], threads: 1024, shared: 0, cluster: 1 };
        gpu.0.kernels.launch(stream, "fetch_inputs", shape, args)
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
