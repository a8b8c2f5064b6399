//! Dropout and random tensors from the counter-based generator of [`rng`](crate::rng).
//!
//! Masks are never stored: the backward pass draws the same numbers again. Element i of a tensor is dropped
//! where draw i of the op's stream is below p 2^32; kept elements are scaled by 1 / (1 - p).

use crate::autodiff::Backward;
use crate::cpu::float::Float;
#[cfg(target_arch = "x86_64")]
use crate::cpu::isa::Isa;
use crate::cpu::normal::{self, fill_normals};
use crate::cpu::pool::RowsMut;
use crate::cpu::simd::simd_fn;
#[cfg(feature = "cuda")]
use crate::cuda::args::{args, kernel_args};
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{Io, Op, dispatch_float, mismatch, want, want_float};
use crate::rng::{Stream, drop_threshold};
use crate::types::{DType, TensorType};

impl Graph {
    /// A random generator: the state `name`, i64 `[2]` = (seed, step). The step advances by one with every
    /// run.
    pub fn rng(&mut self, name: &str) -> Result<Value> {
        let state = self.state(name, DType::I64, [2])?;
        let one = self.constant(&[0i64, 1], [2])?;
        let next = self.add(state, one)?;
        self.update(state, next)?;
        Ok(state)
    }

    /// Zeroes each element of `x` with probability `p` and scales the rest by 1 / (1 - p).
    pub fn dropout(&mut self, x: Value, p: f64, rng: Value) -> Result<Value> {
        if p == 0.0 {
            return Ok(x);
        }
        let drop = self.drop_stream(p)?;
        self.push1(Dropout(drop), &[x, rng])
    }

    /// Normal numbers of the given standard deviation, drawn anew in every run.
    pub fn random_normal(
        &mut self,
        dtype: DType,
        shape: impl Into<Vec<usize>>,
        std: f64,
        rng: Value,
    ) -> Result<Value> {
        let stream = self.next_stream();
        self.push1(RandomNormal { stream, std, ty: TensorType::new(dtype, shape) }, &[rng])
    }

    /// Whole numbers in 0..`limit`, i32, each equally likely, drawn anew in every run. Element i is the high
    /// half of draw i times the limit, so that numbers differ in probability by at most 2^-32.
    pub fn random_below(&mut self, limit: usize, shape: impl Into<Vec<usize>>, rng: Value) -> Result<Value> {
        let stream = self.next_stream();
        self.push1(RandomBelow { stream, limit, shape: shape.into() }, &[rng])
    }

    /// A fresh stream with drop probability `p`.
    pub(crate) fn drop_stream(&mut self, p: f64) -> Result<DropStream> {
        if !(0.0..1.0).contains(&p) {
            return mismatch("dropout", "a probability in 0..1", p.to_string());
        }
        Ok(DropStream { p, stream: self.next_stream() })
    }

    fn next_stream(&mut self) -> u32 {
        self.streams += 1;
        self.streams - 1
    }
}

/// Fails unless `ty` is a generator's state.
pub(crate) fn want_rng(op: &'static str, ty: &TensorType) -> Result<()> {
    want(op, "rng", ty, DType::I64, &[2])
}

fn stream_of(state: &[i64], stream: u32) -> Stream {
    Stream::new(state[0] as u64, state[1] as u64, stream)
}

/// One op's dropout: probability and stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DropStream {
    p: f64,
    stream: u32,
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Arguments for dropout inside kernels.
    pub(crate) struct DropArgs in "../cuda/prelude.cu" {
        state: u64, stream: u32, below: u32, keep: f32,
    }
}

#[cfg(feature = "cuda")]
impl DropArgs {
    /// Nothing is dropped.
    pub(crate) const NONE: Self = Self { state: 0, stream: 0, below: 0, keep: 1.0 };
}

impl DropStream {
    /// Arguments for dropout inside kernels, given the address of the generator's state.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda(&self, state: u64) -> DropArgs {
        let (below, keep) = (drop_threshold(self.p), (1.0 / (1.0 - self.p)) as f32);
        DropArgs { state, stream: self.stream, below, keep }
    }

    /// The mask of this run, given the generator's state.
    pub(crate) fn mask(&self, state: &[i64]) -> Mask {
        Mask {
            stream: stream_of(state, self.stream),
            below: drop_threshold(self.p),
            keep: 1.0 / (1.0 - self.p),
        }
    }
}

/// A dropout mask as a function of the element's index.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mask {
    stream: Stream,
    below: u32,
    keep: f64,
}

impl Mask {
    /// x[i] *= mask(first + i).
    #[inline(always)]
    pub(crate) fn apply<T: Float>(&self, first: usize, x: &mut [T]) {
        self.apply_from(&mut Factors::none(), first, x);
    }

    /// [`Mask::apply`] for one piece after the other of the same tensor: `last` keeps the factors that were drawn
    /// last, of which the next piece may use some.
    #[inline(always)]
    pub(crate) fn apply_from<T: Float>(&self, last: &mut Factors<T>, first: usize, x: &mut [T]) {
        let keep = T::of(self.keep);
        let mut i = 0;
        // Whole groups of 64 in the middle, parts of groups at the ends.
        while i < x.len() {
            let (group, offset) = ((first + i) / 64, (first + i) % 64);
            if last.group != Some(group) {
                last.group = Some(group);
                let draws = random_group(&self.stream, group as u32);
                for (factors, draws) in last.factors.iter_mut().zip(&draws) {
                    for l in 0..16 {
                        factors[l] = if draws[l] < self.below { T::ZERO } else { keep };
                    }
                }
            }
            let n = (64 - offset).min(x.len() - i);
            if n == 64 {
                for (x, factors) in x[i..i + 64].as_chunks_mut::<16>().0.iter_mut().zip(&last.factors) {
                    for l in 0..16 {
                        x[l] *= factors[l];
                    }
                }
            } else {
                let factors = &last.factors.as_flattened()[offset..offset + n];
                x[i..i + n].iter_mut().zip(factors).for_each(|(x, factor)| *x *= *factor);
            }
            i += n;
        }
    }
}

/// The factors of one group of 64 elements.
pub(crate) struct Factors<T> {
    group: Option<usize>,
    factors: [[T; 16]; 4],
}

impl<T: Float> Factors<T> {
    #[inline(always)]
    pub(crate) fn none() -> Self {
        Self { group: None, factors: [[T::ZERO; 16]; 4] }
    }
}

/// [`Stream::group`] by the machine's best instructions.
#[inline(always)]
fn random_group(stream: &Stream, group: u32) -> [[u32; 16]; 4] {
    #[cfg(target_arch = "x86_64")]
    if Isa::best() >= Isa::Avx512 {
        // SAFETY: `Isa::best` never exceeds what the processor reports.
        return unsafe { crate::cpu::simd::avx512::random_group(stream, group) };
    }
    stream.group(group)
}

#[derive(Debug)]
struct Dropout(DropStream);

impl Op for Dropout {
    fn name(&self) -> &'static str {
        "dropout"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_float("dropout", "x", &inputs[0])?;
        want_rng("dropout", &inputs[1])?;
        Ok(vec![inputs[0].clone()])
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let dx = b.graph.push1(Dropout(self.0), &[dy, b.inputs[1]])?;
            b.set(0, dx);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let mask = self.0.mask(io.input::<i64>(1));
        dispatch_float!(io.dtype(), T => {
            let y = io.in_place::<T>(0, 0);
            let chunk = 256.min(y.len());
            let whole = y.len() / chunk * chunk;
            let (head, tail) = y.split_at_mut(whole);
            io.pool.rows(whole / chunk, 8 * chunk, RowsMut::new(head, chunk), |first, y| drop_row(y, mask, first * chunk));
            drop_row(tail, mask, whole);
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = launch.ty(0).len();
        let drop = self.0.cuda(launch.input(1));
        let args = args![launch.output(0), launch.input(0), drop, n];
        launch.elements("dropout", n.div_ceil(64) * 16, args)
    }
}

simd_fn! {
    fn drop_row<T>(y: &mut [T], mask: Mask, first: usize) {
        mask.apply(first, y);
    }
}

/// Numbers of one group of draws.
const GROUP: usize = 4 * normal::BLOCKS;

#[derive(Debug)]
struct RandomNormal {
    stream: u32,
    std: f64,
    ty: TensorType,
}

impl Op for RandomNormal {
    fn name(&self) -> &'static str {
        "random_normal"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_rng("random_normal", &inputs[0])?;
        want_float("random_normal", "a tensor", &self.ty)?;
        Ok(vec![self.ty.clone()])
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let stream = stream_of(io.input::<i64>(0), self.stream);
        dispatch_float!(self.ty.dtype, T => {
            let y = io.output::<T>(0);
            let (head, tail) = y.split_at_mut(y.len() / GROUP * GROUP);
            let groups = head.len() / GROUP;
            io.pool.rows(groups, 16 * GROUP, RowsMut::new(head, GROUP), |first, y| {
                for (group, y) in (first as u32..).zip(y.as_chunks_mut::<GROUP>().0) {
                    fill_normals(y, &random_group(&stream, group), self.std);
                }
            });
            let mut last = [T::ZERO; GROUP];
            fill_normals(&mut last, &random_group(&stream, groups as u32), self.std);
            tail.copy_from_slice(&last[..tail.len()]);
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = self.ty.len();
        let args = args![launch.output(0), launch.input(0), self.stream, self.std as f32, n];
        launch.elements("random_normal", n.div_ceil(4), args)
    }
}

#[derive(Debug)]
struct RandomBelow {
    stream: u32,
    limit: usize,
    shape: Vec<usize>,
}

impl Op for RandomBelow {
    fn name(&self) -> &'static str {
        "random_below"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_rng("random_below", &inputs[0])?;
        if self.limit == 0 || self.limit > i32::MAX as usize {
            return mismatch("random_below", "a limit in 1..2^31", self.limit.to_string());
        }
        Ok(vec![TensorType::new(DType::I32, self.shape.clone())])
    }
    fn stops_gradient(&self) -> bool {
        true
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let stream = stream_of(io.input::<i64>(0), self.stream);
        for (i, y) in io.output::<i32>(0).iter_mut().enumerate() {
            *y = ((u64::from(stream.draw(i as u64)) * self.limit as u64) >> 32) as i32;
        }
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let n = launch.out_ty(0).len();
        let args = args![launch.output(0), launch.input(0), self.stream, self.limit as u32, n];
        launch.elements("random_below", n, args)
    }
}
