//! Rows of tables: embeddings, rows gathered and scattered, and rows of a key/value cache.

use crate::autodiff::Backward;
use crate::cpu::float::Float;
use crate::cpu::pool::RowsMut;
#[cfg(feature = "cuda")]
use crate::cuda::args::kernel_args;
#[cfg(feature = "cuda")]
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::graph::{Graph, Value};
use crate::op::{IndexBound, Io, Op, dispatch_bits, dispatch_float, mismatch, want_float, want_index};
use crate::ops::reduce::add_rows;
use crate::types::{DType, TensorType};

impl Graph {
    /// Rows of a table: y[..., d] = table[index[...]] for table [rows, d] and index of i32 or i64.
    pub fn embedding(&mut self, table: Value, index: Value) -> Result<Value> {
        self.push1(Embedding { summed: false }, &[table, index])
    }

    /// Sums of rows of a table: y[..., d] = Σ_k table[index[..., k]] for table [rows, d] and index of i32 or i64.
    pub fn embedding_sum(&mut self, table: Value, index: Value) -> Result<Value> {
        self.push1(Embedding { summed: true }, &[table, index])
    }

    /// Rows of a table of any element type: y[..., rest] = table[index[...]] for table [rows, rest] and index
    /// of i32 or i64, at the cost of the rows gathered. Not differentiable; see [`Graph::embedding`].
    pub fn gather_rows(&mut self, table: Value, index: Value) -> Result<Value> {
        self.push1(GatherRows, &[table, index])
    }

    /// `table` [..., rest] of any element type with `values` [n, rest] written over its rows `index` (i32 or
    /// i64 `[n]`), rows being counted over all leading axes. In place where the table is a state, at the cost
    /// of n rows. Not differentiable.
    ///
    /// Where an index is repeated, its values must be equal: which of them stays is not defined. Repeating a
    /// row with the same values fills a list of rows up to a fixed length.
    pub fn scatter_rows(&mut self, table: Value, index: Value, values: Value) -> Result<Value> {
        self.push1(ScatterRows, &[table, index, values])
    }
}

/// An operand of i32 or i64, read as i64.
#[derive(Clone, Copy)]
pub(crate) enum Indices<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl<'a> Indices<'a> {
    pub(crate) fn new(io: &Io<'a>, input: usize) -> Self {
        match io.ty(input).dtype {
            DType::I32 => Self::I32(io.input(input)),
            _ => Self::I64(io.input(input)),
        }
    }

    #[inline(always)]
    pub(crate) fn get(&self, i: usize) -> i64 {
        match self {
            Self::I32(x) => i64::from(x[i]),
            Self::I64(x) => x[i],
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::I32(x) => x.len(),
            Self::I64(x) => x.len(),
        }
    }

    fn check(&self, op: &'static str, bound: &IndexBound) -> Result<()> {
        match self {
            Self::I32(x) => bound.check(op, x),
            Self::I64(x) => bound.check(op, x),
        }
    }
}

/// Input 1 must hold rows of the table.
fn rows_of(table: &TensorType) -> IndexBound {
    IndexBound { input: 1, what: "row", limit: table.shape[0], ignored: None }
}

/// Elements of one entry of the first axis.
fn row_len(table: &TensorType) -> usize {
    table.shape[1..].iter().product()
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// Rows that an index names, read from a table or written to one.
    struct RowArgs in "gather.cu" {
        to: u64, from: u64, index: u64, rows: usize, width: usize, n: usize, wide: i32,
    }
}

/// Arguments for the rows that input 1 names in a table of `rows` rows; `width` elements (or words) each.
#[cfg(feature = "cuda")]
fn row_args(launch: &Launch<'_>, to: u64, from: u64, rows: usize, width: usize) -> RowArgs {
    let wide = i32::from(launch.ty(1).dtype == DType::I64);
    RowArgs { to, from, index: launch.input(1), rows, width, n: launch.ty(1).len() * width, wide }
}

/// The widest words in which rows of `bytes` bytes at these addresses can be moved: the variant of a kernel
/// for words of 1, 4 or 8 bytes, and the words of a row.
#[cfg(feature = "cuda")]
fn words(bytes: usize, addresses: [u64; 2], kernels: [&'static str; 3]) -> (&'static str, usize) {
    let fits = |size: usize| {
        bytes.is_multiple_of(size) && addresses.iter().all(|address| address.is_multiple_of(size as u64))
    };
    let variant = if fits(8) { 2 } else { usize::from(fits(4)) };
    (kernels[variant], bytes / [1, 4, 8][variant])
}

#[cfg(feature = "cuda")]
kernel_args! {
    /// A table of `rows` rows, or its gradient, and vectors that are sums of `size` of its rows each.
    struct SumArgs in "gather.cu" {
        to: u64, from: u64, index: u64, rows: usize, width: usize, count: usize, size: usize, wide: i32,
    }
}

#[cfg(feature = "cuda")]
fn sum_args(launch: &Launch<'_>, rows: usize, size: usize) -> SumArgs {
    let (index, width) = (launch.ty(1), launch.ty(0).cols());
    let (count, wide) = (index.len() / size, i32::from(index.dtype == DType::I64));
    let (to, from, index) = (launch.output(0), launch.input(0), launch.input(1));
    SumArgs { to, from, index, rows, width, count, size, wide }
}

/// Rows of a table, or sums of as many of them as the index's last axis has.
#[derive(Debug)]
struct Embedding {
    summed: bool,
}

impl Embedding {
    /// How many rows are added up for a vector.
    fn size(&self, index: &TensorType) -> usize {
        if self.summed { index.cols() } else { 1 }
    }
}

impl Op for Embedding {
    fn name(&self) -> &'static str {
        if self.summed { "embedding_sum" } else { "embedding" }
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        let (name, index) = (self.name(), &inputs[1]);
        want_float(name, "table", &inputs[0])?;
        want_index(name, "index", index)?;
        let [_, d] = inputs[0].shape[..] else {
            return mismatch(name, "table [rows, d]", inputs[0].to_string());
        };
        let shape = match (self.summed, index.shape.split_last()) {
            (false, _) => &index.shape[..],
            (true, Some((1.., shape))) => shape,
            (true, _) => return mismatch(name, "index [..., k] with k at least 1", index.to_string()),
        };
        Ok(vec![inputs[0].with([shape, &[d]].concat())])
    }
    fn indices(&self, inputs: &[TensorType]) -> Vec<IndexBound> {
        vec![rows_of(&inputs[0])]
    }
    fn backward(&self, b: &mut Backward<'_>) -> Result<()> {
        if let Some(dy) = b.grad(0) {
            let rows = b.graph.shape(b.inputs[0])?[0];
            let size = self.size(b.graph.ty(b.inputs[1])?);
            let dtable = b.graph.push1(EmbeddingGrad { rows, size }, &[dy, b.inputs[1]])?;
            b.set(0, dtable);
        }
        Ok(())
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (index, size, d) = (Indices::new(io, 1), self.size(io.ty(1)), io.ty(0).shape[1]);
        index.check(self.name(), &rows_of(io.ty(0)))?;
        dispatch_float!(io.dtype(), T => {
            let (table, y) = (io.input::<T>(0), io.output::<T>(0));
            let row = |i: usize| &table[index.get(i) as usize * d..][..d];
            io.pool.rows(index.len() / size, size * d, RowsMut::new(y, d), |first, y| {
                for (i, y) in y.chunks_exact_mut(d).enumerate() {
                    let first = (first + i) * size;
                    y.copy_from_slice(row(first));
                    (first + 1..first + size).for_each(|i| add_rows(y, row(i)));
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let args = sum_args(launch, launch.ty(0).shape[0], self.size(launch.ty(1)));
        launch.elements("embedding", args.count * args.width, args)
    }
}

#[derive(Debug)]
struct GatherRows;

impl Op for GatherRows {
    fn name(&self) -> &'static str {
        "gather_rows"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        want_index("gather_rows", "index", &inputs[1])?;
        let Some((_, rest)) = inputs[0].shape.split_first() else {
            return mismatch("gather_rows", "table [rows, ...]", inputs[0].to_string());
        };
        let ty = inputs[0].with([&inputs[1].shape[..], rest].concat());
        ty.check("gather_rows")?;
        Ok(vec![ty])
    }
    fn indices(&self, inputs: &[TensorType]) -> Vec<IndexBound> {
        vec![rows_of(&inputs[0])]
    }
    fn stops_gradient(&self) -> bool {
        true
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (index, width) = (Indices::new(io, 1), row_len(io.ty(0)));
        index.check("gather_rows", &rows_of(io.ty(0)))?;
        dispatch_bits!(io.dtype(), U => {
            let (table, y) = (io.input_bits::<U>(0), io.output_bits::<U>(0));
            io.pool.rows(index.len(), width, RowsMut::new(y, width), |first, y| {
                for (i, y) in y.chunks_exact_mut(width).enumerate() {
                    y.copy_from_slice(&table[index.get(first + i) as usize * width..][..width]);
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (y, table) = (launch.output(0), launch.input(0));
        let bytes = row_len(launch.ty(0)) * launch.ty(0).dtype.size();
        let (kernel, width) = words(bytes, [y, table], GATHER_ROWS);
        let args = row_args(launch, y, table, launch.ty(0).shape[0], width);
        launch.elements(kernel, args.n, args)
    }
}

#[derive(Debug)]
struct ScatterRows;

impl Op for ScatterRows {
    fn name(&self) -> &'static str {
        "scatter_rows"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        const OP: &str = "scatter_rows";
        let (table, index) = (&inputs[0], &inputs[1]);
        want_index(OP, "index", index)?;
        let (&[count], values) = (&index.shape[..], &inputs[2]) else {
            return mismatch(OP, "index [n]", index.to_string());
        };
        let fits = values.dtype == table.dtype
            && values.shape.first() == Some(&count)
            && values.shape.len() <= table.shape.len()
            && table.shape.ends_with(&values.shape[1..]);
        if !fits {
            return mismatch(
                OP,
                format!("values [{count}, ...] that end as {table} does"),
                values.to_string(),
            );
        }
        Ok(vec![table.clone()])
    }
    fn in_place(&self, _: usize) -> Vec<(usize, usize)> {
        vec![(0, 0)]
    }
    fn indices(&self, inputs: &[TensorType]) -> Vec<IndexBound> {
        vec![IndexBound { limit: inputs[0].len() / row_len(&inputs[2]), ..rows_of(&inputs[0]) }]
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (index, width) = (Indices::new(io, 1), row_len(io.ty(2)));
        let rows = io.ty(0).len() / width;
        index.check("scatter_rows", &IndexBound { limit: rows, ..rows_of(io.ty(0)) })?;
        dispatch_bits!(io.dtype(), U => {
            let (table, values) = (io.output_bits::<U>(0), io.input_bits::<U>(2));
            if io.inputs[0].ptr != io.outputs[0].ptr {
                table.copy_from_slice(io.input_bits(0));
            }
            // Each task owns a range of table rows and scans all indices for them: no two write one row.
            let work = index.len() * width / rows;
            io.pool.rows(rows, work, RowsMut::new(table, width), |first, table| {
                let owned = first as i64..(first + table.len() / width) as i64;
                for (i, value) in values.chunks_exact(width).enumerate() {
                    let row = index.get(i);
                    if owned.contains(&row) {
                        let at = (row - owned.start) as usize * width;
                        table[at..at + width].copy_from_slice(value);
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        let (table, values) = (launch.in_place(0, 0)?, launch.input(2));
        let bytes = row_len(launch.ty(2)) * launch.ty(2).dtype.size();
        let (kernel, width) = words(bytes, [table, values], SCATTER_ROWS);
        let args = row_args(launch, table, values, launch.ty(0).bytes() / bytes, width);
        launch.elements(kernel, args.n, args)
    }
}

#[cfg(feature = "cuda")]
const GATHER_ROWS: [&str; 3] = ["gather_rows_1", "gather_rows_4", "gather_rows_8"];
#[cfg(feature = "cuda")]
const SCATTER_ROWS: [&str; 3] = ["scatter_rows_1", "scatter_rows_4", "scatter_rows_8"];

/// dtable[r] = Σ dy[i] over the vectors i to which row r was added, as often as it was, in order of i.
#[derive(Debug)]
struct EmbeddingGrad {
    rows: usize,
    /// How many rows were added up for a vector.
    size: usize,
}

impl Op for EmbeddingGrad {
    fn name(&self) -> &'static str {
        "embedding_grad"
    }
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>> {
        Ok(vec![inputs[0].with([self.rows, inputs[0].cols()])])
    }
    fn cpu(&self, io: &Io<'_>) -> Result<()> {
        let (d, size) = (io.ty(0).cols(), self.size);
        let index = Indices::new(io, 1);
        dispatch_float!(io.dtype(), T => {
            let (dy, dtable) = (io.input::<T>(0), io.output::<T>(0));
            let work = d * (1 + index.len() / self.rows);
            // Each task owns a range of table rows and scans all indices for them.
            io.pool.rows(self.rows, work, RowsMut::new(dtable, d), |first, dtable| {
                dtable.fill(T::ZERO);
                let owned = first as i64..(first + dtable.len() / d) as i64;
                for i in 0..index.len() {
                    let row = index.get(i);
                    if owned.contains(&row) {
                        let at = (row - owned.start) as usize * d;
                        add_rows(&mut dtable[at..at + d], &dy[i / size * d..][..d]);
                    }
                }
            });
        });
        Ok(())
    }
    #[cfg(feature = "cuda")]
    fn cuda(&self, launch: &mut Launch<'_>) -> Result<()> {
        // As in gather.cu: vectors, at most, and columns of a block.
        const CHUNK: usize = 256;
        const WIDTH: usize = 128;
        // As few as 16 vectors, which a thread adds up one after the other, until there are blocks enough for a GPU.
        const FEW: usize = 16;
        const BLOCKS: usize = 128;
        launch.clear(launch.output(0), launch.out_ty(0).bytes())?;
        let args = sum_args(launch, self.rows, self.size);
        let chunks = args.count.div_ceil(CHUNK).max(args.count.div_ceil(FEW).min(BLOCKS));
        let grid = [chunks, self.size, args.width.div_ceil(WIDTH)];
        launch.kernel("embedding_grad", grid, WIDTH as u32, 0, args)
    }
}
