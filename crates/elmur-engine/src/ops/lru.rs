//! Least-recently-used memory: which slots to write, reading them, and the blend that writes them.
//!
//! An anchor is the time of a slot's last write; a negative one marks an empty slot.
//!
//! ```text
//! slots: empty ones first, then by smallest anchor; ties go to the lowest index
//! m[slot] = a u + (1 - a) m[slot],  a = 1 for an empty slot, else lambda;   anchor[slot] = time
//! ```

use crate::autodiff::Backward;
use crate::cpu::float::Float;
#[cfg(feature = "cuda")]
use crate::cuda::args::{Args, args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{IndexBound, Io, Op, dispatch_float, mismatch, want, want_float};
use crate::types::{DType, TensorType};

/// How [`Graph::lru_blend`] mixes candidates into slots.
#[derive(Debug, Clone, Copy)]
pub struct Blend {
    /// Weight of the candidate in a slot that has been written before.
    pub lambda: f64,
    /// Use `lambda` for empty slots too, instead of replacing them (the published code's behaviour).
    pub empty_slots_too: bool,
    /// Only batch rows where this bool tensor `[B]` holds are written; all if there is none.
    pub active: Option<Value>,
}

impl Graph {
    /// The `count` least recently used slots of anchors i64 [B, M]: their indices, i32 [B, count], and
    /// anchors, i64 [B, count].
    pub fn lru_select(&mut self, anchors: Value, count: usize) -> Result<(Value, Value)> {
        let outputs = self.push(SelectSlots { count }, &[anchors])?;
        Ok((outputs[0], outputs[1]))
    }

    /// The contents [B, W, d] of `slots` (i32 [B, W], distinct within a row) of memory [B, M, d].
    pub fn gather_slots(&mut self, memory: Value, slots: Value) -> Result<Value> {
        self.push1(GatherSlots, &[memory, slots])
    }

    /// Writes `candidates` [B, W, d] into `slots` i32 [B, W], distinct within a row, of memory [B, M, d] at
    /// `times` i64 `[B]`. Returns the new memory and the new anchors (i64 [B, M]).
    pub fn lru_blend(
        &mut self,
        memory: Value,
        anchors: Value,
        slots: Value,
        candidates: Value,
        times: Value,
        blend: Blend,
    ) -> Result<(Value, Value)> {
        let mut inputs = vec![memory, anchors, slots, candidates, times];
        inputs.extend(blend.active);
        let outputs = self.push(BlendSlots(blend), &inputs)?;
        Ok((outputs[0], outputs[1]))
    }
}

#[derive(Debug)]
struct SelectSlots {
    count: usize,
}

impl Op for SelectSlots {
    fn name(&self) -> &'static str {
        "lru_select"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        match inputs[0].shape[..] {
            [batch, slots] if inputs[0].dtype == DType::I64 && (1..=slots).contains(&self.count) => {
                let shape = [batch, self.count];
                Ok(vec![TensorType::new(DType::I32, shape), TensorType::new(DType::I64, shape)])
            }
            _ => {
                let expected = format!("anchors i64[batch, at least {} slots]", self.count.max(1));
                mismatch("lru_select", expected, inputs[0].to_string())
            }
        }
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let rows = io.input::<i64>(0).chunks_exact(io.ty(0).cols());
        let (mut slots, mut times) = (io.output_if_used::<i32>(0), io.output_if_used::<i64>(1));
        for (row, anchors) in rows.enumerate() {
            // The slot after the previous one in the order (empty or anchor, index): no marks, no allocation.
            let key = |slot: usize| (anchors[slot].max(-1), slot);
            let mut previous = None;
            for i in row * self.count..(row + 1) * self.count {
                let next = (0..anchors.len()).map(key).filter(|k| previous.is_none_or(|p| *k > p)).min();
                let slot = next.map_or(0, |(_, slot)| slot);
                if let Some(slots) = &mut slots {
                    slots[i] = slot as i32;
                }
                if let Some(times) = &mut times {
                    times[i] = anchors[slot];
                }
                previous = next;
            }
        }
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (rows, m) = (launch.ty(0).shape[0], launch.ty(0).shape[1]);
        let args =
            args![launch.output(0), launch.output(1), launch.input(0), self.count as i32, m as i32, rows,];
        launch.warps("lru_select", rows, args)
    }
}

/// Fails unless memory [B, M, d] and slots i32 [B, W] belong together; returns (B, M, d, W).
fn want_memory(
    op: &'static str,
    memory: &TensorType,
    slots: &TensorType,
) -> Result<(usize, usize, usize, usize)> {
    want_float(op, "memory", memory)?;
    match (&memory.shape[..], &slots.shape[..]) {
        (&[batch, m, d], &[rows, w]) if rows == batch && w <= m && slots.dtype == DType::I32 => {
            Ok((batch, m, d, w))
        }
        _ => mismatch(op, "memory [B, M, d] and slots i32[B, W]", format!("{memory} and {slots}")),
    }
}

fn slot_bound(memory: &TensorType, input: usize) -> IndexBound {
    IndexBound { input, what: "slot", limit: memory.shape[1], ignored: None }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Slots that are read from a memory, or added into one.
    struct SlotArgs in "lru.cu" {
        to: u64, from: u64, slots: u64, d: usize, n: usize, w: i32, m: i32,
    }
}

#[derive(Debug)]
struct GatherSlots;

impl Op for GatherSlots {
    fn name(&self) -> &'static str {
        "gather_slots"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (batch, _, d, w) = want_memory("gather_slots", &inputs[0], &inputs[1])?;
        Ok(vec![inputs[0].with([batch, w, d])])
    }
    fn indices(&self, inputs: &[TensorType]) -> Vec<IndexBound> {
        vec![slot_bound(&inputs[0], 1)]
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(grad) = b.grad(0) {
            let memory = b.graph.ty(b.inputs[0])?.clone();
            let dmemory = b.graph.push1(ScatterSlots { memory }, &[grad, b.inputs[1]])?;
            b.set(0, dmemory);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let &[_, m, d] = &io.ty(0).shape[..] else { return Ok(()) };
        let slots = io.input::<i32>(1);
        let w = io.ty(1).cols();
        slot_bound(io.ty(0), 1).check("gather_slots", slots)?;
        dispatch_float!(io.dtype(), T => {
            let memory = io.input::<T>(0);
            for (i, y) in io.output::<T>(0).chunks_exact_mut(d).enumerate() {
                y.copy_from_slice(&memory[(i / w * m + slots[i] as usize) * d..][..d]);
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (m, d) = (launch.ty(0).shape[1], launch.ty(0).shape[2]);
        let (w, n) = (launch.ty(1).cols(), launch.out_ty(0).len());
        let args = SlotArgs {
            to: launch.output(0),
            from: launch.input(0),
            slots: launch.input(1),
            d,
            n,
            w: w as i32,
            m: m as i32,
        };
        launch.elements("gather_slots", n, args)
    }
}

/// Zeros with rows added at the slots they came from.
#[derive(Debug)]
struct ScatterSlots {
    memory: TensorType,
}

impl Op for ScatterSlots {
    fn name(&self) -> &'static str {
        "gather_slots_grad"
    }
    fn infer(&self, _: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![self.memory.clone()])
    }
    fn indices(&self, _: &[TensorType]) -> Vec<IndexBound> {
        vec![slot_bound(&self.memory, 1)]
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let &[_, m, d] = &self.memory.shape[..] else { return Ok(()) };
        let slots = io.input::<i32>(1);
        let w = io.ty(1).cols();
        slot_bound(&self.memory, 1).check("gather_slots", slots)?;
        dispatch_float!(io.dtype(), T => {
            let dmemory = io.output::<T>(0);
            dmemory.fill(T::ZERO);
            for (i, grad) in io.input::<T>(0).chunks_exact(d).enumerate() {
                let start = (i / w * m + slots[i] as usize) * d;
                dmemory[start..start + d].iter_mut().zip(grad).for_each(|(y, g)| *y += *g);
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (m, d) = (self.memory.shape[1], self.memory.shape[2]);
        let (w, n) = (launch.ty(1).cols(), launch.ty(0).len());
        launch.clear(launch.output(0), self.memory.bytes())?;
        let args = SlotArgs {
            to: launch.output(0),
            from: launch.input(0),
            slots: launch.input(1),
            d,
            n,
            w: w as i32,
            m: m as i32,
        };
        launch.elements("scatter_slots", n, args)
    }
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Candidates blended into slots of a memory.
    struct BlendArgs in "lru.cu" {
        new_memory: u64, new_anchors: u64, memory: u64, candidates: u64, anchors: u64, times: u64,
        slots: u64, active: u64, d: usize, w: i32, m: i32, empty_too: i32, lambda: f32,
    }
}

#[derive(Debug)]
struct BlendSlots(Blend);

impl Blend {
    /// Weight of the candidate in a slot with this anchor.
    fn weight<T: Float>(&self, anchor: i64) -> T {
        if anchor < 0 && !self.empty_slots_too { T::ONE } else { T::of(self.lambda) }
    }
}

impl Op for BlendSlots {
    fn name(&self) -> &'static str {
        "lru_blend"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        const OP: &str = "lru_blend";
        if !(0.0..=1.0).contains(&self.0.lambda) {
            return mismatch(OP, "lambda in 0..=1", self.0.lambda.to_string());
        }
        let (batch, m, d, w) = want_memory(OP, &inputs[0], &inputs[2])?;
        want(OP, "anchors", &inputs[1], DType::I64, &[batch, m])?;
        want(OP, "candidates", &inputs[3], inputs[0].dtype, &[batch, w, d])?;
        want(OP, "times", &inputs[4], DType::I64, &[batch])?;
        if let Some(active) = inputs.get(5) {
            want(OP, "active", active, DType::Bool, &[batch])?;
        }
        Ok(inputs[..2].to_vec())
    }
    fn indices(&self, inputs: &[TensorType]) -> Vec<IndexBound> {
        vec![slot_bound(&inputs[0], 2)]
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0), (1, 1)]
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(grad) = b.grad(0) {
            let mut inputs = vec![grad, b.inputs[1], b.inputs[2]];
            inputs.extend(b.inputs.get(5));
            let grads = b.graph.push(BlendGrad(self.0), &inputs)?;
            b.set(0, grads[0]);
            b.set(3, grads[1]);
        }
        Ok(())
    }
    fn scratch(&self, inputs: &[TensorType], _: &[TensorType], _: usize) -> usize {
        inputs[2].len() * 8
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let &[_, m, d] = &io.ty(0).shape[..] else { return Ok(()) };
        let (slots, times) = (io.input::<i32>(2), io.input::<i64>(4));
        let w = io.ty(2).cols();
        slot_bound(io.ty(0), 2).check("lru_blend", slots)?;
        let active = (io.inputs.len() > 5).then(|| io.input::<bool>(5));
        let active = |i: usize| active.is_none_or(|a| a[i / w]);
        // The old anchors of the slots, before they may be overwritten in place.
        let old = io.scratch::<i64>(slots.len());
        for (i, old) in old.iter_mut().enumerate() {
            *old = io.input::<i64>(1)[i / w * m + slots[i] as usize];
        }
        if !io.outputs[1].ptr.is_null() {
            let anchors = io.in_place::<i64>(1, 1);
            for (i, slot) in slots.iter().enumerate().filter(|(i, _)| active(*i)) {
                anchors[i / w * m + *slot as usize] = times[i / w];
            }
        }
        if io.outputs[0].ptr.is_null() {
            return Ok(());
        }
        dispatch_float!(io.dtype(), T => {
            let memory = io.in_place::<T>(0, 0);
            for (i, candidate) in io.input::<T>(3).chunks_exact(d).enumerate().filter(|(i, _)| active(*i)) {
                let a: T = self.0.weight(old[i]);
                let start = (i / w * m + slots[i] as usize) * d;
                for (m, u) in memory[start..start + d].iter_mut().zip(candidate) {
                    *m = a * *u + (T::ONE - a) * *m;
                }
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (batch, m, d) = (launch.ty(0).shape[0], launch.ty(0).shape[1], launch.ty(0).shape[2]);
        let w = launch.ty(2).cols();
        let args = BlendArgs {
            new_memory: launch.output(0),
            new_anchors: launch.output(1),
            memory: launch.input(0),
            candidates: launch.input(3),
            anchors: launch.input(1),
            times: launch.input(4),
            slots: launch.input(2),
            active: launch.input_if((launch.inputs.len() > 5).then_some(5)),
            d,
            w: w as i32,
            m: m as i32,
            empty_too: i32::from(self.0.empty_slots_too),
            lambda: self.0.lambda as f32,
        };
        launch_slots(launch, "lru_blend", batch, m, args)
    }
}

/// Launches a kernel that has blocks of eight warps for parts of the `m` slots of each batch row, a warp per slot.
#[cfg(feature = "cuda")]
fn launch_slots(
    launch: &mut Launch<'_>,
    name: &'static str,
    batch: usize,
    m: usize,
    args: impl Into<Args>,
) -> Result<()> {
    const WARPS: usize = 8;
    let parts = m.div_ceil(WARPS).clamp(1, 1 << 15);
    launch.kernel(name, [batch, parts, 1], 32 * WARPS as u32, 4 * m.div_ceil(parts), args)
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Gradients of a memory and of the candidates blended into it.
    struct BlendGradArgs in "lru.cu" {
        dmemory: u64, dcandidates: u64, grad: u64, anchors: u64, slots: u64, active: u64, d: usize,
        w: i32, m: i32, empty_too: i32, lambda: f32,
    }
}

/// Inputs gradient of the new memory, old anchors, slots; outputs dmemory and dcandidates.
#[derive(Debug)]
struct BlendGrad(Blend);

impl Op for BlendGrad {
    fn name(&self) -> &'static str {
        "lru_blend_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (batch, _, d, w) = want_memory("lru_blend_grad", &inputs[0], &inputs[2])?;
        Ok(vec![inputs[0].clone(), inputs[0].with([batch, w, d])])
    }
    fn indices(&self, inputs: &[TensorType]) -> Vec<IndexBound> {
        vec![slot_bound(&inputs[0], 2)]
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let &[_, m, d] = &io.ty(0).shape[..] else { return Ok(()) };
        let (anchors, slots) = (io.input::<i64>(1), io.input::<i32>(2));
        let w = io.ty(2).cols();
        slot_bound(io.ty(0), 2).check("lru_blend", slots)?;
        let active = (io.inputs.len() > 3).then(|| io.input::<bool>(3));
        dispatch_float!(io.dtype(), T => {
            let grad = io.input::<T>(0);
            let (mut dmemory, mut dcandidates) = (io.output_if_used::<T>(0), io.output_if_used::<T>(1));
            if let Some(dmemory) = &mut dmemory {
                dmemory.copy_from_slice(grad);
            }
            for (i, slot) in slots.iter().enumerate() {
                let row = i / w * m + *slot as usize;
                let written = active.is_none_or(|a| a[i / w]);
                let a: T = if written { self.0.weight(anchors[row]) } else { T::ZERO };
                if let Some(dcandidates) = &mut dcandidates {
                    let grad = &grad[row * d..][..d];
                    dcandidates[i * d..][..d].iter_mut().zip(grad).for_each(|(u, g)| *u = a * *g);
                }
                if let Some(dmemory) = &mut dmemory {
                    dmemory[row * d..][..d].iter_mut().for_each(|g| *g *= T::ONE - a);
                }
            }
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (batch, m, d) = (launch.ty(0).shape[0], launch.ty(0).shape[1], launch.ty(0).shape[2]);
        let w = launch.ty(2).cols();
        let args = BlendGradArgs {
            dmemory: launch.output(0),
            dcandidates: launch.output(1),
            grad: launch.input(0),
            anchors: launch.input(1),
            slots: launch.input(2),
            active: launch.input_if((launch.inputs.len() > 3).then_some(3)),
            d,
            w: w as i32,
            m: m as i32,
            empty_too: i32::from(self.0.empty_slots_too),
            lambda: self.0.lambda as f32,
        };
        launch_slots(launch, "lru_blend_grad", batch, m, args)
    }
}
