//! Matrix products C = A B (+ C) for any strides, without allocation.
//!
//! B is packed into panels ([k][NR]) in scratch memory that the caller provides; A is read as it lies where
//! its rows are contiguous and packed ([k][MR]) otherwise. A register tile of MR x NR is accumulated by fused
//! multiply-adds. Every element of C is one chain of multiply-adds over k in blocks of [`KC`], whatever the
//! tile, the thread or the vector width: its bits depend on nothing but its row, its column and k. (The
//! `gemm` crate, our peer in `elmur bench`, allocates on every call, chooses its k blocks by m and n, and
//! runs products with a transposed left side at half speed.) Where k is much larger than C, as for the weight of
//! a map that is applied to every slot of a memory, C is the sum of products over parts of k, again by shape alone.
//!
//! Where the machine has a matrix unit, large f32 products run there instead, in blocks of 32 x 32 with both
//! operands packed; see `gemm/amx.rs`. They too give every element the same bits for any number of threads.
//!
//! Products of a few rows with a transposed B (x Wᵀ at batch 1) read B once as it lies, as dot products.
//!
//! [`PackedRight`] is for recurrences, which multiply one small left side after the other by the same B;
//! [`Panels`] for attention, whose operands stay in a core's cache.

use std::ops::Range;

use super::float::Float;
use super::isa::Isa;
use super::pool::Pool;
use super::simd::{LANES, add_assign, fold, simd_fn};
use crate::precision::Precision;

/// Depth of one block: a B panel of KC x NR floats stays in the first-level cache.
const KC: usize = 256;

/// Largest register tile of any instruction set, for the edge buffer.
const MAX_TILE: usize = 14 * 32;

/// Up to this many rows, x Wᵀ is computed as dot products.
pub(crate) const DOT_ROWS: usize = 6;

/// A read-only matrix: element (i, j) is `data[i * rs + j * cs]`.
#[derive(Clone, Copy)]
pub(crate) struct Mat<'a, T> {
    pub data: &'a [T],
    pub rs: usize,
    pub cs: usize,
}

impl<'a, T: Float> Mat<'a, T> {
    /// Row-major with `cols` columns.
    pub(crate) fn rows(data: &'a [T], cols: usize) -> Self {
        Self { data, rs: cols, cs: 1 }
    }

    /// The transpose of a row-major matrix with `cols` columns.
    pub(crate) fn transposed(data: &'a [T], cols: usize) -> Self {
        Self { data, rs: 1, cs: cols }
    }

    fn has_unit_stride(&self) -> bool {
        self.rs == 1 || self.cs == 1
    }

    fn check(&self, rows: usize, cols: usize) {
        assert!((rows - 1) * self.rs + (cols - 1) * self.cs < self.data.len(), "matrix exceeds its data");
    }
}

/// The finished part of C that an epilogue may transform: rows `row..row + rows`, columns `col..col + cols`.
pub(crate) struct Tile<T> {
    c: *mut T,
    ldc: usize,
    pub row: usize,
    pub rows: usize,
    pub col: usize,
    pub cols: usize,
}

impl<T> Tile<T> {
    /// Row `i` (absolute) of the tile.
    pub(crate) fn row_mut(&mut self, i: usize) -> &mut [T] {
        debug_assert!((self.row..self.row + self.rows).contains(&i));
        // SAFETY: tiles are disjoint parts of C, each handed to one task.
        unsafe { std::slice::from_raw_parts_mut(self.c.add(i * self.ldc + self.col), self.cols) }
    }
}

struct Ptr<T>(*mut T);
impl<T> Clone for Ptr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Ptr<T> {}
impl<T> Ptr<T> {
    fn get(self) -> *mut T {
        self.0
    }
}
// SAFETY: tasks write disjoint parts.
unsafe impl<T> Sync for Ptr<T> {}
// SAFETY: as above.
unsafe impl<T> Send for Ptr<T> {}

/// Elements of scratch that a product may need with `threads` threads.
pub(crate) fn scratch_len<T: Tiles>(m: usize, n: usize, k: usize, threads: usize) -> usize {
    if let Some(parts) = deep_parts(m, n, k) {
        let each = scratch_len::<T>(m, n, DEEP_PART, 1).next_multiple_of(LANES);
        return (parts * m * n).next_multiple_of(LANES) + threads * each;
    }
    let tiles = T::tiles(Isa::best());
    let (mr, nr) = (tiles.mr, tiles.nr);
    let blocks = Blocks::of(tiles, m, &[n], k).map_or(0, |blocks| blocks.scratch_len(threads));
    // Either operand may be the shared one; per thread one block of the other.
    let shared = (m.div_ceil(mr) * mr).max(n.div_ceil(nr) * nr) * k;
    blocks.max(shared + threads * KC.min(k) * (mr * PANELS).max(nr) + LANES)
}

/// The epilogue that does nothing, of one type wherever it is used.
fn nothing<T>(_: Tile<T>) {}

/// Depth of a part of a deep product.
const DEEP_PART: usize = 2048;

/// Number of parts of a product whose depth is much larger than C: tasks that own parts of the depth read rows of both
/// operands in one run, where tasks that own rows or columns of C would read a few numbers of each.
fn deep_parts(m: usize, n: usize, k: usize) -> Option<usize> {
    (k >= 2 * DEEP_PART && m > DOT_ROWS && m * n <= 1 << 16).then(|| k.div_ceil(DEEP_PART))
}

/// Panels that are packed together, and row panels of one task when B is shared: 8 x 14 x KC floats stay in
/// the second-level cache, and rows of the source are read in long runs.
const PANELS: usize = 16;

/// Extents and operands of a product; see [`gemm`].
pub(crate) struct Product<'a, T> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Mat<'a, T>,
    pub b: Mat<'a, T>,
    /// Add to C instead of replacing it.
    pub accumulate: bool,
    pub precision: Precision,
}

/// A right operand that stays the same from one product to the next, as a matrix unit reads it.
pub(crate) struct KeptRight<'a, T> {
    /// [`kept_len`] elements.
    pub packed: &'a mut [T],
    /// Whether an earlier product of the same extents has filled them.
    pub filled: bool,
}

/// Most rows of a left operand for which a right one that stays the same is kept as it was packed: packing takes a
/// few percent of a product with more rows.
const KEPT_ROWS: usize = 256;

/// Elements of [`KeptRight`] for products of these extents, whose operands have unit strides; none if nothing is to
/// be gained.
pub(crate) fn kept_len<T: Tiles>(m: usize, n: usize, k: usize) -> Option<usize> {
    let blocks = Blocks::of(T::tiles(Isa::best()), m, &[n], k)?;
    (m <= KEPT_ROWS && deep_parts(m, n, k).is_none()).then(|| blocks.right_len())
}

/// C (row-major, `ldc` elements per row) = A B, or += where `accumulate`; then `epilogue` on every finished
/// tile.
pub(crate) fn gemm<T: Tiles>(
    pool: &Pool,
    scratch: &mut [T],
    product: Product<'_, T>,
    c: &mut [T],
    ldc: usize,
    epilogue: impl Fn(Tile<T>) + Sync,
) {
    gemm_keeping(pool, scratch, None, product, c, ldc, epilogue);
}

/// [`gemm`], to the same bits, with a right operand that may be kept.
pub(crate) fn gemm_keeping<T: Tiles>(
    pool: &Pool,
    scratch: &mut [T],
    kept: Option<KeptRight<'_, T>>,
    product: Product<'_, T>,
    c: &mut [T],
    ldc: usize,
    epilogue: impl Fn(Tile<T>) + Sync,
) {
    let Product { m, n, k, a, b, accumulate, precision } = product;
    let operands = (a, b);
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    a.check(m, k);
    b.check(k, n);
    assert!((m - 1) * ldc + n <= c.len() && n <= ldc, "C exceeds its data");
    let c = Ptr(c.as_mut_ptr());
    let tile = |row, rows, col, cols| Tile { c: c.get(), ldc, row, rows, col, cols };

    let tiles = T::tiles(Isa::best());
    if m <= DOT_ROWS && a.cs == 1 && b.rs == 1 {
        let columns = if pool.threads() == 1 || n * k < 32_768 { n } else { 64 };
        pool.run(n.div_ceil(columns), |task, _| {
            let col = task * columns;
            let cols = columns.min(n - col);
            let mut out = tile(0, m, col, cols);
            for row in 0..m {
                let x = &a.data[row * a.rs..][..k];
                (tiles.dot_rows)(x, &b.data[col * b.cs..], b.cs, out.row_mut(row), accumulate);
            }
            epilogue(out);
        });
        return;
    }

    if let Some(parts) = deep_parts(m, n, k) {
        let (sums, rest) = scratch.split_at_mut((parts * m * n).next_multiple_of(LANES));
        let each = scratch_len::<T>(m, n, DEEP_PART, 1).next_multiple_of(LANES);
        assert!(rest.len() >= pool.threads() * each);
        let (shared, private) = (Ptr(sums.as_mut_ptr()), Ptr(rest.as_mut_ptr()));
        pool.run(parts, |part, thread| {
            let first = part * DEEP_PART;
            let (a, b) = (&a.data[first * a.cs..], &b.data[first * b.rs..]);
            let (a, b) = (Mat { data: a, ..operands.0 }, Mat { data: b, ..operands.1 });
            let product = Product { m, n, k: DEEP_PART.min(k - first), a, b, accumulate: false, precision };
            // SAFETY: each part has sums of its own, each thread scratch of its own.
            let (sums, scratch) = unsafe {
                (
                    std::slice::from_raw_parts_mut(shared.get().add(part * m * n), m * n),
                    std::slice::from_raw_parts_mut(private.get().add(thread * each), each),
                )
            };
            gemm(Pool::serial(), scratch, product, sums, n, nothing);
        });
        let per_task = pool.rows_per_task(m, parts * n);
        return pool.run(m.div_ceil(per_task), |task, _| {
            let (first, rows) = (task * per_task, per_task.min(m - task * per_task));
            let mut out = tile(first, rows, 0, n);
            for row in first..first + rows {
                let c = out.row_mut(row);
                if !accumulate {
                    c.fill(T::ZERO);
                }
                for part in 0..parts {
                    add_row(c, &sums[(part * m + row) * n..][..n]);
                }
            }
            epilogue(out);
        });
    }

    if let Some(blocks) = Blocks::of(tiles, m, &[n], k).filter(|_| a.has_unit_stride() && b.has_unit_stride())
    {
        let planes = planes(precision, m, n, k);
        let rights = [Right { b, n, c, ldc }];
        return blocks.run(pool, scratch, kept, a, &rights, accumulate, planes, |panels| {
            let (at, end) = (panels.start * BLOCK, panels.end * BLOCK);
            epilogue(match blocks.own_rows() {
                true => tile(at, end.min(m) - at, 0, n),
                false => tile(0, m, at, end.min(n) - at),
            });
        });
    }

    let threads = if 2 * m * n * k < 500_000 { 1 } else { pool.threads() };
    let run = |count: usize, task: &(dyn Fn(usize, usize) + Sync)| {
        if threads == 1 { (0..count).for_each(|i| task(i, 0)) } else { pool.run(count, task) }
    };
    let (mr, nr) = (tiles.mr, tiles.nr);
    // Which operand is packed once for all tasks, in panels of which width.
    let plan = if m >= n || m >= 512 { Plan::SharedB } else { Plan::SharedA };
    let (width, source) = match plan {
        Plan::SharedB => (nr, (b.data, b.cs, b.rs, n)),
        Plan::SharedA => (mr, (a.data, a.rs, a.cs, m)),
    };
    let panels = source.3.div_ceil(width);
    // Align panels to cache lines: the scratch is allocated so, its parts are kept so.
    let (shared, private) = scratch.split_at_mut((panels * width * k).next_multiple_of(LANES));
    let private_len = private.len() / pool.threads();
    let (shared, private) = (Ptr(shared.as_mut_ptr()), Ptr(private.as_mut_ptr()));
    // SAFETY: each thread owns its part of the private scratch.
    let private = |thread: usize| unsafe { private.get().add(thread * private_len) };

    // SAFETY: the shared part has room for all panels.
    unsafe { pack_panels(tiles, &run, shared, width, k, source) };
    // SAFETY: packed above.
    let panel_of = |k0: usize, panel: usize, kb: usize| unsafe {
        shared.get().add(k0 * panels * width + panel * width * kb).cast_const()
    };
    let blocks = || (0..k).step_by(KC).map(|k0| (k0, KC.min(k - k0)));

    match plan {
        // Tasks own row panels. A row-major A is read as it lies; others are packed.
        Plan::SharedB => {
            let direct = a.cs == 1;
            let mr = if direct { tiles.direct_height(a.rs) } else { mr };
            let row_panels = m.div_ceil(mr);
            // Aim at four tasks per thread, at most PANELS panels each.
            let per_task = row_panels.div_ceil(4 * threads).clamp(1, PANELS);
            run(row_panels.div_ceil(per_task), &|task, thread| {
                let own = task * per_task..((task + 1) * per_task).min(row_panels);
                let first_row = own.start * mr;
                let rows = (own.end * mr).min(m) - first_row;
                let block = private(thread);
                for (k0, kb) in blocks() {
                    let data = &a.data[first_row * a.rs + k0 * a.cs..];
                    if !direct {
                        // SAFETY: `scratch_len` provides PANELS panels per thread.
                        let target = unsafe { std::slice::from_raw_parts_mut(block, own.len() * mr * kb) };
                        (tiles.pack)(target, mr, kb, data, a.rs, a.cs, rows);
                    }
                    // One depth block: along the rows of C, which are then written in long runs. Several:
                    // each panel of B serves all rows while it is in the first-level cache.
                    let along_rows = k <= KC;
                    for step in 0..panels * own.len() {
                        let (panel, j) = if along_rows {
                            (own.start + step / panels, step % panels)
                        } else {
                            (own.start + step % own.len(), step / own.len())
                        };
                        let (row, col) = (panel * mr, j * nr);
                        let size = (mr.min(m - row), nr.min(n - col));
                        // SAFETY: the tile lies inside C and belongs to this task.
                        let c = unsafe { c.get().add(row * ldc + col) };
                        let left = if direct {
                            Left::Rows(data[(row - first_row) * a.rs..].as_ptr(), a.rs)
                        } else {
                            // SAFETY: packed just above.
                            Left::Columns(unsafe { block.add((panel - own.start) * mr * kb) }, mr)
                        };
                        tiles.run(kb, left, (panel_of(k0, j, kb), nr), c, ldc, size, accumulate || k0 > 0);
                    }
                }
                epilogue(tile(first_row, rows, 0, n));
            });
        }
        // Few rows: tasks own column panels and pack them on the way.
        Plan::SharedA => run(n.div_ceil(nr), &|j, thread| {
            let col = j * nr;
            let cols = nr.min(n - col);
            for (k0, kb) in blocks() {
                // SAFETY: `scratch_len` provides one panel per thread.
                let b_panel = unsafe { std::slice::from_raw_parts_mut(private(thread), nr * kb) };
                (tiles.pack)(b_panel, nr, kb, &b.data[col * b.cs + k0 * b.rs..], b.cs, b.rs, cols);
                for panel in 0..panels {
                    let row = panel * mr;
                    // SAFETY: the tile lies inside C and belongs to this task.
                    let c = unsafe { c.get().add(row * ldc + col) };
                    let left = Left::Columns(panel_of(k0, panel, kb), mr);
                    let size = (mr.min(m - row), cols);
                    tiles.run(kb, left, (b_panel.as_ptr(), nr), c, ldc, size, accumulate || k0 > 0);
                }
            }
            epilogue(tile(0, m, col, cols));
        }),
    }
}

simd_fn! {
    fn add_row<T>(y: &mut [T], x: &[T]) {
        add_assign(y, x);
    }
}

/// Elements of scratch that [`gemm_pair`] may need with `threads` threads.
pub(crate) fn pair_scratch_len<T: Tiles>(m: usize, n: [usize; 2], k: usize, threads: usize) -> usize {
    let blocks = Blocks::of(T::tiles(Isa::best()), m, &n, k).map_or(0, |blocks| blocks.scratch_len(threads));
    n.into_iter().map(|n| scratch_len::<T>(m, n, k, threads)).fold(blocks, usize::max)
}

/// C = A B for two B of `k` rows and unit strides, given with their numbers of columns and their C (without gaps),
/// to the bits of [`gemm`]. A matrix unit packs A once.
pub(crate) fn gemm_pair<T: Tiles>(
    pool: &Pool,
    scratch: &mut [T],
    (m, k): (usize, usize),
    a: Mat<'_, T>,
    products: [(Mat<'_, T>, usize, &mut [T]); 2],
    precision: Precision,
) {
    let n = [products[0].1, products[1].1];
    let [planes, others] = n.map(|n| planes(precision, m, n, k));
    let apart = planes != others || n.iter().any(|n| deep_parts(m, *n, k).is_some());
    match Blocks::of(T::tiles(Isa::best()), m, &n, k).filter(|_| a.has_unit_stride() && !apart) {
        Some(blocks) => {
            a.check(m, k);
            let rights = products.map(|(b, n, c)| {
                b.check(k, n);
                assert!(m * n <= c.len() && b.has_unit_stride(), "C exceeds its data");
                Right { b, n, c: Ptr(c.as_mut_ptr()), ldc: n }
            });
            blocks.run(pool, scratch, None, a, &rights, false, planes, |_| {});
        }
        None => products.into_iter().for_each(|(b, n, c)| {
            gemm(pool, scratch, Product { m, n, k, a, b, accumulate: false, precision }, c, n, |_| {});
        }),
    }
}

/// Runs `task(i, thread)` for every i below a count.
type Run<'a> = &'a dyn Fn(usize, &(dyn Fn(usize, usize) + Sync));

/// Packs a whole operand in panels of `width`: panel p of the block of depth kb at k0 begins at
/// (k0 * panels + p * kb) * width. The source is (data, step, depth step, extent).
///
/// # Safety
/// `target` must have room for every panel at depth k, and nobody else may use it meanwhile.
unsafe fn pack_panels<T: Float>(
    tiles: &TileSet<T>,
    run: Run<'_>,
    target: Ptr<T>,
    width: usize,
    k: usize,
    (data, step, depth_step, total): (&[T], usize, usize, usize),
) {
    let panels = total.div_ceil(width);
    let groups = panels.div_ceil(PANELS);
    run(groups * k.div_ceil(KC), &|task, _| {
        let (k0, first) = (task / groups * KC, task % groups * PANELS);
        let kb = KC.min(k - k0);
        let count = PANELS.min(panels - first);
        // SAFETY: offsets stay inside the target; every panel of every block is written by one task.
        let target = unsafe {
            let start = target.get().add(k0 * panels * width + first * width * kb);
            std::slice::from_raw_parts_mut(start, count * kb * width)
        };
        let valid = (count * width).min(total - first * width);
        let data = &data[first * width * step + k0 * depth_step..];
        (tiles.pack)(target, width, kb, data, step, depth_step, valid);
    });
}

/// Rows, columns and depth of a block of the matrix unit.
const BLOCK: usize = 32;

/// Elements of a packed block: three numbers of half the size for each.
const BLOCK_LEN: usize = BLOCK * BLOCK * 3 / 2;

/// Blocks of depth between visits to C: the packed panels of a task stay in the second-level cache.
const BLOCK_STEPS: usize = 16;

/// An operand seen along the depth: element i at depth k is `data[i * step + k * depth_step]`.
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "only x86 has a matrix unit so far"))]
struct Depths<'a, T> {
    data: &'a [T],
    step: usize,
    depth_step: usize,
    width: usize,
    depth: usize,
}

/// (steps, A, B, C, distance of C's rows, whether to add).
type Multiply<T> = unsafe fn(usize, *const T, *const T, *mut T, usize, bool);

/// Parts of a number that a matrix unit multiplies: all three, or two for large products of reduced precision.
const PLANES: usize = 3;

/// How many parts of every number a product needs.
fn planes(precision: Precision, m: usize, n: usize, k: usize) -> usize {
    if precision == Precision::F32 || m * n * k <= 1 << 22 { PLANES } else { 2 }
}

/// The kernels of a matrix unit; see `gemm/amx.rs`.
struct MatrixUnit<T> {
    /// Called on a thread before its first product, and before `multiply` for another number of rows, 17 to 32.
    configure: fn(rows: usize),
    /// Called on a thread after its last product.
    release: fn(),
    /// Packs panels of an operand (`left` or right) into blocks, panel by panel, the largest `planes` of the parts of
    /// every number.
    pack: fn(target: &mut [T], left: bool, panels: usize, source: Depths<'_, T>, planes: usize),
    /// C[configured rows, 32] (+)= A B over `steps` blocks.
    multiply: Multiply<T>,
    /// The same from two planes of both.
    multiply_two: Multiply<T>,
    /// C[16, 64] = A B over `steps` blocks, of which A fills the upper half and B is two panels.
    multiply_half: unsafe fn(steps: usize, a: *const T, b: (*const T, *const T), c: *mut T, ldc: usize),
    /// C[32, 32] = A B over `steps` blocks, B being two panels of 16 columns of bf16; see `gemm/rounded.rs`.
    multiply_rounded:
        unsafe fn(steps: usize, a: *const T, b: (*const u32, *const u32), c: *mut T, ldc: usize),
}

/// A right operand B [k, n] and where the product with the left operand goes: C, rows `ldc` apart.
struct Right<'a, T> {
    b: Mat<'a, T>,
    n: usize,
    c: Ptr<T>,
    ldc: usize,
}

/// Products of one left operand in blocks of a matrix unit: tasks own panels of the side that has more of them
/// and pack their operand on the way; the other side is packed once for all.
struct Blocks<T: 'static> {
    unit: &'static MatrixUnit<T>,
    m: usize,
    k: usize,
    /// Panels of all right operands.
    right_panels: usize,
}

impl<T: Float> Blocks<T> {
    /// Blocks of products with `n` columns each; none without a matrix unit, or if a product is too small to be
    /// worth packing.
    fn of(tiles: &TileSet<T>, m: usize, n: &[usize], k: usize) -> Option<Self> {
        let unit = tiles.matrix_unit?;
        let right_panels = n.iter().map(|n| n.div_ceil(BLOCK)).sum();
        let large = |n: &usize| m.min(*n).min(k) >= BLOCK && m * n * k >= 1 << 18;
        n.iter().all(large).then_some(Self { unit, m, k, right_panels })
    }

    fn steps(&self) -> usize {
        self.k.div_ceil(BLOCK)
    }

    /// Whether tasks own rows of C.
    fn own_rows(&self) -> bool {
        self.m.div_ceil(BLOCK) >= self.right_panels
    }

    /// Panels of (the side tasks own, the shared side).
    fn panels(&self) -> (usize, usize) {
        let left_panels = self.m.div_ceil(BLOCK);
        (left_panels.max(self.right_panels), left_panels.min(self.right_panels))
    }

    /// Elements of all right operands when packed.
    fn right_len(&self) -> usize {
        self.right_panels * self.steps() * BLOCK_LEN
    }

    /// Panels of one task: aim at four tasks per thread.
    fn per_task(&self, threads: usize) -> usize {
        self.panels().0.div_ceil(4 * threads).clamp(1, 8)
    }

    fn scratch_len(&self, threads: usize) -> usize {
        let private = self.per_task(threads) * self.steps().min(BLOCK_STEPS);
        (self.panels().1 * self.steps() + threads * private) * BLOCK_LEN + LANES
    }

    /// The products of `a` with all right operands, which may be kept, from so many planes; `finish` is told which
    /// panels of a side are done.
    #[allow(clippy::too_many_arguments)]
    fn run(
        &self,
        pool: &Pool,
        scratch: &mut [T],
        kept: Option<KeptRight<'_, T>>,
        a: Mat<'_, T>,
        rights: &[Right<'_, T>],
        accumulate: bool,
        planes: usize,
        finish: impl Fn(Range<usize>) + Sync,
    ) {
        let Self { unit, m, k, .. } = *self;
        let multiply = if planes == PLANES { unit.multiply } else { unit.multiply_two };
        let own_rows = self.own_rows();
        // The right operand that a panel belongs to, and its number there.
        let right_of = |mut panel: usize| {
            let mut index = 0;
            while panel >= rights[index].n.div_ceil(BLOCK) {
                panel -= rights[index].n.div_ceil(BLOCK);
                index += 1;
            }
            (&rights[index], panel)
        };
        // Packs panels of the left or the right side, right ones operand by operand.
        let pack = |target: &mut [T], left: bool, panels: Range<usize>, k0: usize, depth: usize| {
            let each = depth.div_ceil(BLOCK) * BLOCK_LEN;
            let (mut at, mut target) = (panels.start, target);
            while at < panels.end {
                let (data, step, depth_step, all, first) = if left {
                    (a.data, a.rs, a.cs, m, at)
                } else {
                    let (right, panel) = right_of(at);
                    (right.b.data, right.b.cs, right.b.rs, right.n, panel)
                };
                let count = (panels.end - at).min(all.div_ceil(BLOCK) - first);
                let width = (count * BLOCK).min(all - first * BLOCK);
                let data = &data[first * BLOCK * step + k0 * depth_step..];
                let (here, rest) = target.split_at_mut(count * each);
                (unit.pack)(here, left, count, Depths { data, step, depth_step, width, depth }, planes);
                (at, target) = (at + count, rest);
            }
        };
        let (own_panels, shared_panels) = self.panels();
        let (per_task, threads) = (self.per_task(pool.threads()), pool.threads());
        let private_len = per_task * self.steps().min(BLOCK_STEPS) * BLOCK_LEN;
        let (private, shared) = scratch.split_at_mut(threads * private_len);
        let private = Ptr(private.as_mut_ptr());
        let depth_blocks = || {
            (0..k).step_by(BLOCK * BLOCK_STEPS).map(|k0| {
                let depth = (k - k0).min(BLOCK * BLOCK_STEPS);
                (k0, depth, depth.div_ceil(BLOCK))
            })
        };
        // Of a side with so many panels, panel p of the depth block at k0 begins here.
        let offset = |k0: usize, panels: usize, panel: usize, steps: usize| {
            (k0 / BLOCK * panels + panel * steps) * BLOCK_LEN
        };
        // Packs all panels of a side.
        let pack_side = |target: &mut [T], left: bool, all: usize| {
            let (len, target) = (target.len(), Ptr(target.as_mut_ptr()));
            let count = k.div_ceil(BLOCK * BLOCK_STEPS);
            let groups = if count >= 2 * threads { 1 } else { (2 * threads).min(all) };
            let in_group = all.div_ceil(groups);
            pool.run(count * groups, |task, _| {
                let k0 = task / groups * BLOCK * BLOCK_STEPS;
                let depth = (k - k0).min(BLOCK * BLOCK_STEPS);
                let steps = depth.div_ceil(BLOCK);
                let first = task % groups * in_group;
                let panels = in_group.min(all.saturating_sub(first));
                if panels == 0 {
                    return;
                }
                let start = offset(k0, all, first, steps);
                assert!(start + panels * steps * BLOCK_LEN <= len);
                // SAFETY: inside the target, as just asserted; tasks own disjoint panels.
                let target = unsafe {
                    std::slice::from_raw_parts_mut(target.get().add(start), panels * steps * BLOCK_LEN)
                };
                pack(target, left, first..first + panels, k0, depth);
            });
        };
        let kept = kept.map(|kept| {
            assert_eq!(kept.packed.len(), self.right_len());
            if !kept.filled {
                pack_side(kept.packed, false, self.right_panels);
            }
            Ptr(kept.packed.as_mut_ptr())
        });
        let shared = match kept {
            Some(kept) if own_rows => kept,
            _ => {
                pack_side(shared, !own_rows, shared_panels);
                Ptr(shared.as_mut_ptr())
            }
        };
        let kept = kept.filter(|_| !own_rows);
        pool.run(own_panels.div_ceil(per_task), |task, thread| {
            let mut configured = BLOCK;
            (unit.configure)(configured);
            let first = task * per_task;
            let own = per_task.min(own_panels - first);
            for (k0, depth, steps) in depth_blocks() {
                let packed = match kept {
                    // SAFETY: all panels of the right side are there.
                    Some(kept) => unsafe {
                        kept.get().add(offset(k0, own_panels, first, steps)).cast_const()
                    },
                    None => {
                        // SAFETY: each thread owns its part of the private scratch.
                        let packed = unsafe {
                            let start = private.get().add(thread * private_len);
                            std::slice::from_raw_parts_mut(start, own * steps * BLOCK_LEN)
                        };
                        pack(packed, own_rows, first..first + own, k0, depth);
                        packed.as_ptr()
                    }
                };
                // One depth block: along the rows of C, which are then written in long runs.
                let along_rows = own_rows && k <= BLOCK * BLOCK_STEPS;
                for step in 0..shared_panels * own {
                    let (panel, i) = if along_rows {
                        (step % shared_panels, step / shared_panels)
                    } else {
                        (step / own, step % own)
                    };
                    // SAFETY: packed above.
                    let (mine, other) = unsafe {
                        let other = shared.get().add(offset(k0, shared_panels, panel, steps)).cast_const();
                        (packed.add(i * steps * BLOCK_LEN), other)
                    };
                    let ((row, left), (right_panel, right)) = if own_rows {
                        (((first + i) * BLOCK, mine), (panel, other))
                    } else {
                        ((panel * BLOCK, other), (first + i, mine))
                    };
                    let (&Right { n, c, ldc, .. }, panel) = right_of(right_panel);
                    let col = panel * BLOCK;
                    let (rows, cols) = (BLOCK.min(m - row), BLOCK.min(n - col));
                    let add = accumulate || k0 > 0;
                    let height = if rows > BLOCK / 2 { rows } else { BLOCK };
                    if height != configured {
                        configured = height;
                        (unit.configure)(height);
                    }
                    // SAFETY: the block lies inside C and belongs to this task; blocks that do not fill their
                    // tiles go through a buffer.
                    unsafe {
                        let c = c.get().add(row * ldc + col);
                        if (rows, cols) == (height, BLOCK) {
                            multiply(steps, left, right, c, ldc, add);
                        } else {
                            // The same sums as elsewhere: C's elements go first.
                            let mut edge = [T::ZERO; BLOCK * BLOCK];
                            for i in 0..if add { rows } else { 0 } {
                                edge[i * BLOCK..][..cols]
                                    .copy_from_slice(std::slice::from_raw_parts(c.add(i * ldc), cols));
                            }
                            multiply(steps, left, right, edge.as_mut_ptr(), BLOCK, add);
                            add_edge(&edge, BLOCK, c, ldc, (rows, cols), false);
                        }
                    }
                }
            }
            (unit.release)();
            finish(first..first + own);
        });
    }
}

/// C[rows, cols] (+)= a finished tile with `width` columns.
///
/// # Safety
/// C must have that part.
unsafe fn add_edge<T: Float>(
    edge: &[T],
    width: usize,
    c: *mut T,
    ldc: usize,
    (rows, cols): (usize, usize),
    accumulate: bool,
) {
    for i in 0..rows {
        for j in 0..cols {
            // SAFETY: promised by the caller.
            unsafe {
                let c = c.add(i * ldc + j);
                *c = if accumulate { *c + edge[i * width + j] } else { edge[i * width + j] };
            }
        }
    }
}

/// How a product is divided.
enum Plan {
    /// B packed once, tasks own rows.
    SharedB,
    /// A packed once, tasks own columns.
    SharedA,
}

/// The left operand of a register tile.
#[derive(Clone, Copy)]
enum Left<T> {
    /// Columns as they lie, and their distance: MR in a packed panel [k][MR].
    Columns(*const T, usize),
    /// Rows of a matrix as they lie, and their distance.
    Rows(*const T, usize),
}

/// y[j] (+)= x . w[j], rows of `w` being `stride` apart. Lanes and their final sum are those of
/// [`dot`](super::simd::dot), whatever the vector width.
///
/// # Safety
/// The vector's instruction set must be present. NL vectors must make LANES lanes.
#[inline(always)]
unsafe fn dot_rows<T: Float, V: Vector<T>, const NL: usize>(
    x: &[T],
    w: &[T],
    stride: usize,
    y: &mut [T],
    accumulate: bool,
) {
    // Rows at a time: enough independent sums to keep the multiply-add units busy.
    const ROWS: usize = 4;
    let (k, n) = (x.len(), y.len());
    assert!(n == 0 || (n - 1) * stride + k <= w.len());
    let whole = k / LANES * LANES;
    for j in (0..n).step_by(ROWS) {
        let rows = ROWS.min(n - j);
        // Short groups repeat their last row; the repeats are dropped below.
        let row = |r: usize| (j + r.min(rows - 1)) * stride;
        let mut lanes = [[T::ZERO; LANES]; ROWS];
        // SAFETY: all loads stay inside rows that the assertion above has shown to exist.
        unsafe {
            let starts: [*const T; ROWS] = std::array::from_fn(|r| w.as_ptr().add(row(r)));
            let mut sums = [[V::splat(T::ZERO); NL]; ROWS];
            for i in (0..whole).step_by(LANES) {
                let x: [V; NL] = std::array::from_fn(|v| V::load(x.as_ptr().add(i + v * V::WIDTH)));
                for r in 0..ROWS {
                    for v in 0..NL {
                        sums[r][v] = sums[r][v].add_product(x[v], V::load(starts[r].add(i + v * V::WIDTH)));
                    }
                }
            }
            for r in 0..ROWS {
                for v in 0..NL {
                    sums[r][v].store(lanes[r].as_mut_ptr().add(v * V::WIDTH));
                }
            }
        }
        for r in 0..rows {
            for (l, i) in (whole..k).enumerate() {
                lanes[r][l] = x[i].mul_add(w[row(r) + i], lanes[r][l]);
            }
            let sum = fold(lanes[r], |a, b| a + b);
            y[j + r] = if accumulate { y[j + r] + sum } else { sum };
        }
    }
}

/// y[c] (+)= Σ_j a[j * a_step] w[j * stride + c], the sum in order of j. V is the widest vector, N one for
/// narrow heads.
///
/// # Safety
/// The vectors' instruction set must be present.
#[inline(always)]
unsafe fn combine_rows<T: Float, V: Vector<T>, N: Vector<T>>(
    (a, a_step): (&[T], usize),
    w: Rows<'_, T>,
    count: usize,
    y: &mut [T],
    accumulate: bool,
) {
    /// Vectors whose sums are kept in registers.
    const BLOCK: usize = 4;
    let n = y.len();
    if count == 0 {
        if !accumulate {
            y.fill(T::ZERO);
        }
        return;
    }
    let last = w.start as isize + (count - 1) as isize * w.step;
    assert!((count - 1) * a_step < a.len() && last >= 0);
    assert!(last as usize + n <= w.data.len() && w.start + n <= w.data.len());
    let mut c = 0;
    // SAFETY: the assertions above show that the first and last coefficient and row exist, and so do those
    // between.
    unsafe {
        let row = |j: usize, c: usize| w.data.as_ptr().offset(w.start as isize + j as isize * w.step).add(c);
        while c + BLOCK * V::WIDTH <= n {
            let mut sums: [V; BLOCK] = std::array::from_fn(|v| {
                if accumulate { V::load(y.as_ptr().add(c + v * V::WIDTH)) } else { V::splat(T::ZERO) }
            });
            for j in 0..count {
                let x = V::splat(*a.as_ptr().add(j * a_step));
                for (v, sum) in sums.iter_mut().enumerate() {
                    *sum = sum.add_product(x, V::load(row(j, c + v * V::WIDTH)));
                }
            }
            for (v, sum) in sums.into_iter().enumerate() {
                sum.store(y.as_mut_ptr().add(c + v * V::WIDTH));
            }
            c += BLOCK * V::WIDTH;
        }
        while c + V::WIDTH <= n {
            combine_column::<T, V>((a, a_step), |j| row(j, c), count, y.as_mut_ptr().add(c), accumulate);
            c += V::WIDTH;
        }
        while c + N::WIDTH <= n {
            combine_column::<T, N>((a, a_step), |j| row(j, c), count, y.as_mut_ptr().add(c), accumulate);
            c += N::WIDTH;
        }
        for c in c..n {
            let mut sum = if accumulate { y[c] } else { T::ZERO };
            for j in 0..count {
                sum = a[j * a_step].mul_add(*row(j, c), sum);
            }
            y[c] = sum;
        }
    }
}

/// One vector of columns of [`combine_rows`]. Two sums would hide latency better but change the order of the
/// sum.
///
/// # Safety
/// As for `combine_rows`; `row(j)` must point at a vector of elements for each j below `count`.
#[inline(always)]
unsafe fn combine_column<T: Float, V: Vector<T>>(
    (a, a_step): (&[T], usize),
    row: impl Fn(usize) -> *const T,
    count: usize,
    y: *mut T,
    accumulate: bool,
) {
    // SAFETY: the caller has checked the extents.
    unsafe {
        let mut sum = if accumulate { V::load(y) } else { V::splat(T::ZERO) };
        for j in 0..count {
            sum = sum.add_product(V::splat(*a.as_ptr().add(j * a_step)), V::load(row(j)));
        }
        sum.store(y);
    }
}

/// Rows inside a slice: row j begins at `start + j * step`.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a, T> {
    pub data: &'a [T],
    pub start: usize,
    pub step: isize,
}

/// Products of one vector with a few rows, for kernels that are too small for [`gemm`].
pub(crate) struct SmallProducts<T: 'static>(&'static TileSet<T>);

impl<T: Tiles> SmallProducts<T> {
    /// The kernels for this machine.
    pub(crate) fn new() -> Self {
        Self(T::tiles(Isa::best()))
    }

    /// y[j] = x . w[j * stride..]
    #[inline(always)]
    pub(crate) fn dots(&self, x: &[T], w: &[T], stride: usize, y: &mut [T]) {
        (self.0.dot_rows)(x, w, stride, y, false);
    }

    /// y[c] (+)= Σ_j a[j * a_step] w[j][c] over `count` rows.
    #[inline(always)]
    pub(crate) fn combine(
        &self,
        a: (&[T], usize),
        w: Rows<'_, T>,
        count: usize,
        y: &mut [T],
        accumulate: bool,
    ) {
        (self.0.combine_rows)(a, w, count, y, accumulate);
    }
}

/// Register tile: C[rows, NR] (+)= Σ_k a[k] b[k], where a[k] is column k of A, contiguous and `lda` from the
/// next, or spread over rows `lda` apart, and rows of b are `ldb` apart.
type Micro<T> = unsafe fn(
    k: usize,
    a: *const T,
    lda: usize,
    b: *const T,
    ldb: usize,
    c: *mut T,
    ldc: usize,
    accumulate: bool,
);

/// Packs `valid` of `width` columns of depth `kb`: target[k][i] = source[i * step + k * depth_step], zeros
/// beyond.
type Pack<T> =
    fn(target: &mut [T], width: usize, kb: usize, source: &[T], step: usize, depth_step: usize, valid: usize);

/// y[j] (+)= x . w[j * stride..].
type DotRows<T> = fn(x: &[T], w: &[T], stride: usize, y: &mut [T], accumulate: bool);

/// y[c] (+)= Σ_j a[j * a_step] w[j][c].
type CombineRows<T> = fn(a: (&[T], usize), w: Rows<'_, T>, count: usize, y: &mut [T], accumulate: bool);

/// The kernels of one instruction set.
pub(crate) struct TileSet<T: 'static> {
    mr: usize,
    nr: usize,
    /// Entry i computes i + 1 rows from the columns of A, packed or as they lie.
    micro: &'static [Micro<T>],
    /// Entry i computes i + 1 rows from the rows of A as they lie.
    direct: &'static [Micro<T>],
    /// The same for the first half of the columns.
    half: &'static [Micro<T>],
    /// Entry i computes i + 1 rows of A that is read where its numbers lie; see `gemm/gathered.rs`. With AVX-512 ten
    /// rows are the most for which compilers keep all sums in registers.
    gather: &'static [Gather<T>],
    /// The same for half as many columns.
    gather_half: &'static [Gather<T>],
    pack: Pack<T>,
    dot_rows: DotRows<T>,
    combine_rows: CombineRows<T>,
    matrix_unit: Option<&'static MatrixUnit<T>>,
}

impl<T: Float> TileSet<T> {
    /// Rows of a tile whose left side is read as it lies, its rows `stride` elements apart.
    fn direct_height(&self, stride: usize) -> usize {
        // Rows whose distance is a multiple of the cache's period compete for one set of 12 lines or so.
        let crowded = (stride * size_of::<T>()).is_multiple_of(4096);
        if crowded { self.mr.min(10) } else { self.mr }
    }

    /// One tile; columns beyond the matrix go through a buffer.
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    fn run(
        &self,
        k: usize,
        left: Left<T>,
        (b, ldb): (*const T, usize),
        c: *mut T,
        ldc: usize,
        (rows, cols): (usize, usize),
        accumulate: bool,
    ) {
        let (micro, a, lda) = match left {
            Left::Columns(a, lda) => (self.micro[rows - 1], a, lda),
            Left::Rows(a, lda) => (self.direct[rows - 1], a, lda),
        };
        if cols == self.nr {
            // SAFETY: the operands hold k steps, C has `rows` rows of `nr` columns here.
            return unsafe { micro(k, a, lda, b, ldb, c, ldc, accumulate) };
        }
        let mut edge = [T::ZERO; MAX_TILE];
        // SAFETY: the buffer is as large as the largest tile.
        unsafe { micro(k, a, lda, b, ldb, edge.as_mut_ptr(), self.nr, false) };
        // SAFETY: this part of C exists.
        unsafe { add_edge(&edge, self.nr, c, ldc, (rows, cols), accumulate) };
    }
}

/// Floats that have register tiles.
pub(crate) trait Tiles: Float {
    fn tiles(isa: Isa) -> &'static TileSet<Self>;
}

/// A vector register of `T`.
///
/// # Safety
/// Methods may only run where the instruction set is present.
unsafe trait Vector<T>: Copy {
    const WIDTH: usize;
    unsafe fn splat(x: T) -> Self;
    unsafe fn load(p: *const T) -> Self;
    unsafe fn store(self, p: *mut T);
    /// self + a * b.
    unsafe fn add_product(self, a: Self, b: Self) -> Self;
    unsafe fn add(self, other: Self) -> Self;
}

/// Vectors per tile row: NR = 2 vectors.
const NV: usize = 2;

#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn micro<T: Float, V: Vector<T>, const ROWS: usize, const VECTORS: usize, const DIRECT: bool>(
    k: usize,
    a: *const T,
    lda: usize,
    b: *const T,
    ldb: usize,
    c: *mut T,
    ldc: usize,
    accumulate: bool,
) {
    // SAFETY: the caller provides k steps of both operands and ROWS rows of C.
    unsafe {
        let mut sums = [[V::splat(T::ZERO); VECTORS]; ROWS];
        for step in 0..k {
            let b = b.add(step * ldb);
            let columns: [V; VECTORS] = std::array::from_fn(|v| V::load(b.add(v * V::WIDTH)));
            for (i, row) in sums.iter_mut().enumerate() {
                let x = V::splat(*a.add(if DIRECT { i * lda + step } else { step * lda + i }));
                for (sum, column) in row.iter_mut().zip(columns) {
                    *sum = sum.add_product(x, column);
                }
            }
        }
        for (i, row) in sums.into_iter().enumerate() {
            for (v, sum) in row.into_iter().enumerate() {
                let c = c.add(i * ldc + v * V::WIDTH);
                if accumulate { V::load(c).add(sum).store(c) } else { sum.store(c) }
            }
        }
    }
}

/// Packing without special instructions.
fn pack_portable<T: Float>(
    target: &mut [T],
    width: usize,
    kb: usize,
    source: &[T],
    step: usize,
    depth_step: usize,
    valid: usize,
) {
    for (panel, target) in target.chunks_exact_mut(width * kb).enumerate() {
        let first = panel * width;
        let valid = width.min(valid - first);
        let source = &source[first * step..];
        if step == 1 {
            for (k, row) in target.chunks_exact_mut(width).enumerate() {
                row[..valid].copy_from_slice(&source[k * depth_step..][..valid]);
                row[valid..].fill(T::ZERO);
            }
            continue;
        }
        if valid < width {
            target.fill(T::ZERO);
        }
        for i in 0..valid {
            for k in 0..kb {
                target[k * width + i] = source[i * step + k * depth_step];
            }
        }
    }
}

/// A table of register tiles with 1 to MR rows of so many vectors, from columns or (`DIRECT`) from rows as they lie.
macro_rules! micro_table {
    ($T:ty, $V:ty, $vectors:expr, $direct:literal, [$($rows:literal)*] $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        #[allow(clippy::too_many_arguments)]
        unsafe fn tile<const ROWS: usize>(
            k: usize, a: *const $T, lda: usize, b: *const $T, ldb: usize, c: *mut $T, ldc: usize, acc: bool,
        ) {
            // SAFETY: as promised by the caller.
            unsafe { micro::<$T, $V, ROWS, { $vectors }, $direct>(k, a, lda, b, ldb, c, ldc, acc) }
        }
        const TABLE: &[Micro<$T>] = &[$(tile::<$rows>),*];
        TABLE
    }};
}

/// A table of register tiles with 1 and more rows of so many vectors, from numbers that are read where they lie.
macro_rules! gather_table {
    ($T:ty, $V:ty, $vectors:expr, [$($rows:literal)*] $(, $features:literal)?) => {{
        $(#[target_feature(enable = $features)])?
        unsafe fn tile<const ROWS: usize>(
            a: *const $T, lda: usize, depths: &[usize], b: *const $T, c: *mut $T, ldc: usize, add: bool,
        ) {
            // SAFETY: as promised by the caller.
            unsafe { gathered::gather::<$T, $V, ROWS, { $vectors }>(a, lda, depths, b, c, ldc, add) }
        }
        const TABLE: &[Gather<$T>] = &[$(tile::<$rows>),*];
        TABLE
    }};
}

/// [`dot_rows`] compiled for an instruction set.
#[cfg(target_arch = "x86_64")]
macro_rules! dot_rows_with {
    ($T:ty, $V:ty, $NL:literal, $features:literal) => {{
        #[target_feature(enable = $features)]
        fn with(x: &[$T], w: &[$T], stride: usize, y: &mut [$T], accumulate: bool) {
            // SAFETY: the features are enabled here.
            unsafe { dot_rows::<$T, $V, $NL>(x, w, stride, y, accumulate) }
        }
        // SAFETY: the table that holds this is chosen only where the features are present.
        |x, w, stride, y, accumulate| unsafe { with(x, w, stride, y, accumulate) }
    }};
}

/// [`combine_rows`] compiled for an instruction set.
#[cfg(target_arch = "x86_64")]
macro_rules! combine_rows_with {
    ($T:ty, $V:ty, $N:ty, $features:literal) => {{
        #[target_feature(enable = $features)]
        fn with(a: (&[$T], usize), w: Rows<'_, $T>, count: usize, y: &mut [$T], accumulate: bool) {
            // SAFETY: the features are enabled here.
            unsafe { combine_rows::<$T, $V, $N>(a, w, count, y, accumulate) }
        }
        // SAFETY: the table that holds this is chosen only where the features are present.
        |a, w, count, y, accumulate| unsafe { with(a, w, count, y, accumulate) }
    }};
}

/// The portable vector: an array that compilers keep in registers.
#[derive(Clone, Copy)]
struct Portable<T>([T; 8]);

// SAFETY: plain Rust.
unsafe impl<T: Float> Vector<T> for Portable<T> {
    const WIDTH: usize = 8;
    #[inline(always)]
    unsafe fn splat(x: T) -> Self {
        Self([x; 8])
    }
    #[inline(always)]
    unsafe fn load(p: *const T) -> Self {
        // SAFETY: the caller provides eight elements.
        Self(unsafe { p.cast::<[T; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut T) {
        // SAFETY: the caller provides eight elements.
        unsafe { p.cast::<[T; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add_product(mut self, a: Self, b: Self) -> Self {
        for i in 0..8 {
            self.0[i] = a.0[i].mul_add(b.0[i], self.0[i]);
        }
        self
    }
    #[inline(always)]
    unsafe fn add(mut self, other: Self) -> Self {
        for i in 0..8 {
            self.0[i] += other.0[i];
        }
        self
    }
}

macro_rules! portable_tiles {
    ($T:ty) => {{
        static SET: TileSet<$T> = TileSet {
            mr: 6,
            nr: 16,
        micro: micro_table!($T, Portable<$T>, NV, false, [1 2 3 4 5 6]),
        direct: micro_table!($T, Portable<$T>, NV, true, [1 2 3 4 5 6]),
        half: micro_table!($T, Portable<$T>, 1, true, [1 2 3 4 5 6]),
        gather: gather_table!($T, Portable<$T>, NV, [1 2 3 4 5 6]),
        gather_half: gather_table!($T, Portable<$T>, 1, [1 2 3 4 5 6]),
            pack: pack_portable::<$T>,
            matrix_unit: None,
            // SAFETY: plain Rust.
            dot_rows: |x, w, stride, y, acc| unsafe { dot_rows::<$T, Portable<$T>, 2>(x, w, stride, y, acc) },
            // SAFETY: plain Rust.
            combine_rows: |a, w, count, y, acc| unsafe {
                combine_rows::<$T, Portable<$T>, Portable<$T>>(a, w, count, y, acc)
            },
        };
        &SET
    }};
}

#[cfg(target_arch = "x86_64")]
mod amx;
mod gathered;
#[cfg(target_arch = "aarch64")]
mod neon;
mod packed;
mod panels;
mod rounded;
#[cfg(target_arch = "x86_64")]
mod x86;

use gathered::Gather;
pub(crate) use gathered::{Gathered, Places};
pub(crate) use packed::PackedRight;
pub(crate) use panels::Panels;
pub(crate) use rounded::RoundedWeight;

macro_rules! impl_tiles {
    ($T:ty, $amx:ident, $avx512:ident, $avx2:ident, $neon:ident) => {
        impl Tiles for $T {
            fn tiles(isa: Isa) -> &'static TileSet<Self> {
                #[cfg(target_arch = "x86_64")]
                match isa {
                    Isa::Amx => return &x86::$amx,
                    Isa::Avx512 => return &x86::$avx512,
                    Isa::Avx2 => return &x86::$avx2,
                    Isa::Baseline | Isa::Neon => {}
                }
                #[cfg(target_arch = "aarch64")]
                if isa >= Isa::Neon {
                    return &neon::$neon;
                }
                let _ = isa;
                portable_tiles!($T)
            }
        }
    };
}
impl_tiles!(f32, F32_AMX, F32_AVX512, F32_AVX2, F32_NEON);
impl_tiles!(f64, F64_AVX512, F64_AVX512, F64_AVX2, F64_NEON);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Stream;

    pub(super) fn random(n: usize, stream: u32) -> Vec<f64> {
        let mut x = vec![0.0; n];
        Stream::new(9, 0, stream).fill_uniform(&mut x, -1.0, 1.0);
        x
    }

    /// A, B stored plain or transposed; returns C.
    pub(super) fn product<T: Tiles>(
        pool: &Pool,
        (m, n, k): (usize, usize, usize),
        a: (&[T], bool),
        b: (&[T], bool),
        start: Option<&[T]>,
    ) -> Vec<T> {
        let mat = |(data, transposed): (_, bool), rows: usize, cols: usize| {
            if transposed { Mat::transposed(data, rows) } else { Mat::rows(data, cols) }
        };
        let mut c = start.map_or_else(|| vec![T::of(f64::NAN); m * n], <[T]>::to_vec);
        let mut scratch = vec![T::of(f64::NAN); scratch_len::<T>(m, n, k, pool.threads())];
        let (a, b) = (mat(a, m, k), mat(b, k, n));
        let product = Product { m, n, k, a, b, accumulate: start.is_some(), precision: Precision::F32 };
        gemm(pool, &mut scratch, product, &mut c, n, |mut tile| {
            for i in tile.row..tile.row + tile.rows {
                tile.row_mut(i).iter_mut().for_each(|v| *v += T::ONE);
            }
        });
        c
    }

    pub(super) const SIZES: [(usize, usize, usize); 12] = [
        (1, 1, 1),
        (1, 70, 33),
        (3, 5, 7),
        (4, 64, 128),
        (7, 33, 16),
        (14, 32, 256),
        (15, 33, 257),
        (100, 40, 600),
        (33, 200, 31),
        (600, 17, 9),
        (129, 129, 129),
        (40, 700, 300),
    ];

    /// A product that is computed in parts of its depth.
    const DEEP: (usize, usize, usize) = (40, 33, 4500);

    /// Large products of reduced precision have 16 bits of significand or more, and the same bits on any number of
    /// threads; small ones are those of f32.
    #[test]
    fn reduced_precision_keeps_sixteen_bits() {
        for (m, n, k) in [(300, 200, 130), (64, 1024, 128), (40, 33, 4500), (70, 50, 60)] {
            let f32s = |len, seed| random(len, seed).into_iter().map(|x| x as f32).collect::<Vec<_>>();
            let (a, b) = (f32s(m * k, 0), f32s(k * n, 1));
            let [exact, two, three] = [(Precision::F32, 1), (Precision::Tf32, 2), (Precision::Tf32, 3)].map(
                |(precision, threads)| {
                    let mut c = vec![f32::NAN; m * n];
                    let mut scratch = vec![f32::NAN; scratch_len::<f32>(m, n, k, threads)];
                    let product = Product {
                        m,
                        n,
                        k,
                        a: Mat::rows(&a, k),
                        b: Mat::rows(&b, n),
                        accumulate: false,
                        precision,
                    };
                    gemm(&Pool::new(threads), &mut scratch, product, &mut c, n, |_| {});
                    c
                },
            );
            assert_eq!(two, three, "{m}x{n}x{k}");
            if m * n * k <= 1 << 22 {
                assert_eq!(exact, two);
            }
            for (at, got) in two.iter().enumerate() {
                let terms = (0..k).map(|p| f64::from(a[at / n * k + p]) * f64::from(b[p * n + at % n]));
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), t| (sum + t, size + t.abs()));
                let error = (f64::from(*got) - sum).abs() / size;
                assert!(error < 1.0 / 65536.0, "{m}x{n}x{k}: {error:e}");
            }
        }
    }

    #[test]
    fn a_pair_of_products_has_the_bits_of_each() {
        // More panels on the left, more on the right, and too small for a matrix unit.
        for (m, n, k) in [(200, [70, 33], 600), (64, [160, 100], 130), (90, [40, 5], 31)] {
            let f32s = |len, seed| random(len, seed).into_iter().map(|x| x as f32).collect::<Vec<_>>();
            let (a, b) = (f32s(k * m, 0), n.map(|n| f32s(k * n, n as u32)));
            for threads in [1, 3] {
                let pool = Pool::new(threads);
                let mut c = n.map(|n| vec![f32::NAN; m * n]);
                let mut scratch = vec![f32::NAN; pair_scratch_len::<f32>(m, n, k, threads)];
                let [c0, c1] = c.each_mut().map(|c| &mut c[..]);
                let products = [(Mat::rows(&b[0], n[0]), n[0], c0), (Mat::rows(&b[1], n[1]), n[1], c1)];
                gemm_pair(&pool, &mut scratch, (m, k), Mat::transposed(&a, m), products, Precision::F32);
                for ((n, b), c) in n.into_iter().zip(&b).zip(&c) {
                    let want = product(&pool, (m, n, k), (&a, true), (b, false), None);
                    // `product` adds one to what `gemm` computes.
                    assert!(c.iter().zip(&want).all(|(c, want)| c + 1.0 == *want), "{m}x{n}x{k}");
                }
            }
        }
    }

    #[test]
    fn products_match_the_definition_for_every_layout() {
        let pool = Pool::new(2);
        for (m, n, k) in SIZES.into_iter().chain([DEEP]) {
            let (a, b, c) = (random(m * k, 0), random(k * n, 1), random(m * n, 2));
            for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
                for accumulate in [false, true] {
                    let got = product(&pool, (m, n, k), (&a, ta), (&b, tb), accumulate.then_some(&c));
                    for i in 0..m {
                        for j in 0..n {
                            let x = |p: usize| if ta { a[p * m + i] } else { a[i * k + p] };
                            let y = |p: usize| if tb { b[j * k + p] } else { b[p * n + j] };
                            let sum: f64 = (0..k).map(|p| x(p) * y(p)).sum();
                            let want = sum + 1.0 + if accumulate { c[i * n + j] } else { 0.0 };
                            let error = (got[i * n + j] - want).abs();
                            assert!(error < 1e-11, "{m}x{n}x{k} {ta} {tb} ({i}, {j}): {error:e}");
                        }
                    }
                }
            }
        }
    }

    /// Register tiles and matrix units alike: no worse than a few roundings of f32.
    #[test]
    fn products_of_f32_are_accurate() {
        for (m, n, k) in SIZES.into_iter().chain([(64, 64, 64), (200, 96, 1500)]) {
            let small = |x: Vec<f64>| x.into_iter().map(|v| (v * v * v) as f32).collect::<Vec<_>>();
            let (a, b) = (small(random(m * k, 0)), small(random(k * n, 1)));
            let got = product(&Pool::new(2), (m, n, k), (&a, false), (&b, false), None);
            for (i, j) in (0..m).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let term = |p: usize| f64::from(a[i * k + p]) * f64::from(b[p * n + j]);
                let (exact, size) =
                    (0..k).map(term).fold((1.0, 1.0), |(sum, size), t| (sum + t, size + t.abs()));
                let error = (f64::from(got[i * n + j]) - exact).abs() / size;
                assert!(error < 1e-6, "{m}x{n}x{k} ({i}, {j}): {error:e}");
            }
        }
    }

    #[test]
    fn not_a_number_shows_in_every_product_it_enters() {
        let (m, n, k) = (96, 96, 64);
        let (mut a, b) = (vec![1f32; m * k], vec![1f32; k * n]);
        for bad in [f32::NAN, f32::INFINITY] {
            a[5 * k + 7] = bad;
            let got = product(&Pool::new(2), (m, n, k), (&a, false), (&b, false), None);
            for (i, value) in got.iter().enumerate() {
                assert_eq!(value.is_finite(), i / n != 5, "{bad} at row {}: {value}", i / n);
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads_layout_or_position() {
        let f32s = |x: Vec<f64>| x.into_iter().map(|v| v as f32).collect::<Vec<_>>();
        let transpose = |x: &[f32], rows: usize, cols: usize| -> Vec<f32> {
            (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
        };
        for (m, n, k) in SIZES.into_iter().chain([DEEP]) {
            let (a, b) = (f32s(random(m * k, 0)), f32s(random(k * n, 1)));
            let one = product(&Pool::new(1), (m, n, k), (&a, false), (&b, false), None);
            for threads in [2, 3, 5] {
                assert_eq!(one, product(&Pool::new(threads), (m, n, k), (&a, false), (&b, false), None));
            }
            let a_transposed = transpose(&a, m, k);
            assert_eq!(one, product(&Pool::new(2), (m, n, k), (&a_transposed, true), (&b, false), None));
            if m > DOT_ROWS {
                let b_transposed = transpose(&b, k, n);
                assert_eq!(one, product(&Pool::new(2), (m, n, k), (&a, false), (&b_transposed, true), None));
            }
        }
    }

    #[test]
    fn dot_rows_of_all_instruction_sets_agree_to_the_bit() {
        for (n, k) in [(1, 1), (3, 16), (16, 128), (37, 100), (20, 33), (5, 7)] {
            let x: Vec<f32> = random(k, 0).into_iter().map(|v| v as f32).collect();
            let w: Vec<f32> = random(n * (k + 3), 1).into_iter().map(|v| v as f32).collect();
            for accumulate in [false, true] {
                let run = |isa: Isa| {
                    let mut y: Vec<f32> = (0..n).map(|i| i as f32).collect();
                    (f32::tiles(isa).dot_rows)(&x, &w, k + 3, &mut y, accumulate);
                    y
                };
                let want = (0..n).map(|j| {
                    let dot = crate::cpu::simd::dot(&x, &w[j * (k + 3)..][..k]);
                    if accumulate { j as f32 + dot } else { dot }
                });
                let want: Vec<f32> = want.collect();
                for isa in [Isa::Baseline, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx]
                    .into_iter()
                    .filter(|i| *i <= Isa::detected())
                {
                    assert_eq!(run(isa), want, "{isa:?} {n}x{k}");
                }
            }
        }
    }

    #[test]
    fn combined_rows_of_all_instruction_sets_agree_to_the_bit() {
        for (n, count) in [(1, 1), (64, 10), (70, 3), (33, 0), (17, 5), (8, 20), (27, 4)] {
            let a: Vec<f32> = random(3 * count + 1, 0).into_iter().map(|v| v as f32).collect();
            let data: Vec<f32> = random((count + 1) * (n + 2), 1).into_iter().map(|v| v as f32).collect();
            let stride = n as isize + 2;
            for (start, step) in [(0, stride), (count.saturating_sub(1) * (n + 2), -stride)] {
                for accumulate in [false, true] {
                    let w = Rows { data: &data, start, step };
                    let run = |isa: Isa| {
                        let mut y: Vec<f32> = (0..n).map(|i| i as f32).collect();
                        (f32::tiles(isa).combine_rows)((&a, 3), w, count, &mut y, accumulate);
                        y
                    };
                    let row = |j: usize| (start as isize + j as isize * step) as usize;
                    let want = (0..n).map(|c| {
                        let first = if accumulate { c as f32 } else { 0.0 };
                        (0..count).fold(first, |sum, j| a[3 * j].mul_add(data[row(j) + c], sum))
                    });
                    let want: Vec<f32> = want.collect();
                    for isa in [Isa::Baseline, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx]
                        .into_iter()
                        .filter(|i| *i <= Isa::detected())
                    {
                        assert_eq!(run(isa), want, "{isa:?} {n} x {count}");
                    }
                }
            }
        }
    }

    /// Every instruction set computes the same chains of multiply-adds.
    #[test]
    fn register_tiles_of_all_instruction_sets_agree_to_the_bit() {
        let k = 300;
        let (rows, cols) = (6, 16);
        let a: Vec<f32> = random(k * rows, 0).into_iter().map(|v| v as f32).collect();
        let b: Vec<f32> = random(k * cols, 1).into_iter().map(|v| v as f32).collect();
        let run = |isa: Isa| {
            let tiles = f32::tiles(isa);
            let (mut pa, mut pb) = (vec![0f32; k * tiles.mr], vec![0f32; k * tiles.nr]);
            (tiles.pack)(&mut pa, tiles.mr, k, &a, 1, rows, rows);
            (tiles.pack)(&mut pb, tiles.nr, k, &b, 1, cols, cols);
            let mut c = vec![0f32; rows * cols];
            let (left, right) = (Left::Columns(pa.as_ptr(), tiles.mr), (pb.as_ptr(), tiles.nr));
            tiles.run(k, left, right, c.as_mut_ptr(), cols, (rows, cols), false);
            c
        };
        let baseline = run(Isa::Baseline);
        for isa in
            [Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx].into_iter().filter(|isa| *isa <= Isa::detected())
        {
            assert_eq!(run(isa), baseline, "{isa:?}");
        }
    }
}
