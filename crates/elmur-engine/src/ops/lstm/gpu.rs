//! An LSTM on a GPU: how a window is divided among threads, and what its kernels are given. There are three
//! kinds of kernels, by where the weight is during all steps: in the registers and the shared memory of one
//! block or two ([`Held`]), in the shared memories of a cluster of blocks ([`Clusters`]), or in the second-level cache
//! ([`Blocks`]).

use super::Window;
use crate::cuda::args::{Args, args, kernel_args};
use crate::cuda::launch::Launch;
use crate::error::Result;
use crate::op::mismatch;
use crate::ops::broadcast::Steps;

/// Queues the forward pass.
pub(super) fn forward(launch: &mut Launch<'_>, window: Window) -> Result<()> {
    let Window { batch, steps, width } = window;
    let mut args = LstmForward {
        hidden: launch.output(0),
        last_hidden: launch.output(1),
        last_cell: launch.output(2),
        gates: launch.output(3),
        cells: launch.output(4),
        before: launch.output(5),
        x: launch.input(0),
        weight: launch.input(1),
        bias: launch.input(2),
        first_hidden: launch.input(3),
        first_cell: launch.input(4),
        batch,
        steps,
        width,
        lanes: 0,
        settled: usize::from(launch.is_settled(1)),
    };
    let clusters = Clusters::of(window).filter(|_| launch.has_clusters());
    if let Some(held) = Held::of(window, clusters.is_some()) {
        return held.queue(launch, &held.forward, args);
    }
    if let Some(clusters) = clusters {
        let kernel = [
            "lstm_forward_shared_1",
            "lstm_forward_shared_2",
            "lstm_forward_shared_4",
            "lstm_forward_shared_8",
        ][clusters.variant];
        args.lanes = clusters.blocks;
        return clusters.queue(launch, kernel, args);
    }
    let blocks = Blocks::of(window, 4 * width, 2 * width)?;
    // Threads that compute neighbouring gates read neighbouring weights: [width, 4 width].
    let weight = launch.scratch(launch.ty(1).bytes())?;
    let mut transpose = Steps::new(&[width, 4 * width], &[], &[]);
    (transpose.a[0], transpose.a[1]) = (1, width as i32);
    let count = launch.ty(1).len();
    launch.elements("rearrange_4", count, args![weight, args.weight, count, transpose])?;
    (args.weight, args.lanes) = (weight, blocks.lanes);
    let kernel = ["lstm_forward_1", "lstm_forward_2", "lstm_forward_4"][blocks.variant];
    launch.kernel(kernel, [blocks.count, 1, 1], Blocks::THREADS as u32, blocks.shared, args)
}

/// Queues the backward pass. `upper`: addresses of the gradients of the hidden states, the last hidden state
/// and the last cell state; 0 for gradients that there are not.
pub(super) fn backward(launch: &mut Launch<'_>, window: Window, upper: [u64; 3]) -> Result<()> {
    let Window { batch, steps, width } = window;
    let mut args = LstmBackward {
        dz: launch.output(0),
        dfirst_hidden: launch.output(1),
        dfirst_cell: launch.output(2),
        gates: launch.input(0),
        cells: launch.input(1),
        weight: launch.input(2),
        first_cell: launch.input(3),
        dhidden: upper[0],
        dlast_hidden: upper[1],
        dlast_cell: upper[2],
        batch,
        steps,
        width,
        lanes: 0,
        settled: usize::from(launch.is_settled(2)),
    };
    let clusters = Clusters::of(window).filter(|_| launch.has_clusters());
    if let Some(held) = Held::of(window, clusters.is_some()) {
        return held.queue(launch, &held.backward, args);
    }
    if let Some(clusters) = clusters {
        let kernel = [
            "lstm_backward_shared_1",
            "lstm_backward_shared_2",
            "lstm_backward_shared_4",
            "lstm_backward_shared_8",
        ][clusters.variant];
        args.lanes = clusters.blocks;
        return clusters.queue(launch, kernel, args);
    }
    let blocks = Blocks::of(window, width, 5 * width)?;
    args.lanes = blocks.lanes;
    let kernel = ["lstm_backward_1", "lstm_backward_2", "lstm_backward_4"][blocks.variant];
    launch.kernel(kernel, [blocks.count, 1, 1], Blocks::THREADS as u32, blocks.shared, args)
}

/// Blocks that run at once on a large GPU.
const FULL: usize = 132;

/// How a window is divided among blocks of threads on a GPU. A block walks through all steps with one, two or
/// four rows of its own. At every step it reads the whole weight, which takes longer than the arithmetic of
/// four rows; so large batches have several rows to a block, and read the weight less often.
struct Blocks {
    count: usize,
    /// Logarithm of the rows of a block.
    variant: usize,
    /// Threads that divide the columns of a product among them; groups of so many divide its depth.
    lanes: usize,
    /// Bytes of shared memory of a block.
    shared: usize,
}

impl Blocks {
    const THREADS: usize = 512;

    /// For products of `columns` columns, which lie in shared memory beside `kept` floats for each row.
    fn of(window: Window, columns: usize, kept: usize) -> Result<Self> {
        /// Bytes of shared memory that every GPU has.
        const ROOM: usize = 96 << 10;
        let lanes = columns.next_multiple_of(32).min(Self::THREADS);
        let row = 4 * (Self::THREADS / lanes * columns + kept);
        if row > ROOM {
            return mismatch("lstm", "a width of at most 4096 on a GPU", window.width.to_string());
        }
        let wanted = match window.batch {
            0..=32 => 0,
            33..=128 => 1,
            _ => 2,
        };
        let variant = (0..=wanted).rev().find(|variant| row << variant <= ROOM).unwrap_or(0);
        let rows = 1 << variant;
        Ok(Self { count: window.batch.div_ceil(rows), variant, lanes, shared: row * rows })
    }
}

/// Kernels for widths whose whole weight one multiprocessor holds, in registers and shared memory, or a cluster
/// of two; so a step needs little or nothing from elsewhere.
struct Held {
    width: usize,
    /// Blocks that share the units of their rows.
    blocks: usize,
    /// Rows of a block.
    rows: usize,
    /// Units for which four threads compute the gates.
    units: usize,
    forward: HeldKernel,
    backward: HeldKernel,
}

/// A kernel of lstm_held.cu.
struct HeldKernel {
    name: &'static str,
    /// Vectors of four weights that a thread holds in registers; the others are in shared memory.
    vectors: usize,
}

const fn held_kernel(name: &'static str, vectors: usize) -> HeldKernel {
    HeldKernel { name, vectors }
}

impl Held {
    /// By width, then by multiprocessors for each row, most first. Threads of width 128 have 64 vectors, or 32
    /// in a pair of blocks; registers hold as many of them as the rest of a step leaves.
    const ALL: [Self; 6] = [
        Self {
            width: 64,
            blocks: 1,
            rows: 1,
            units: 1,
            forward: held_kernel("lstm_forward_held_64_1", 16),
            backward: held_kernel("lstm_backward_held_64_1", 16),
        },
        Self {
            width: 64,
            blocks: 1,
            rows: 2,
            units: 1,
            forward: held_kernel("lstm_forward_held_64_2", 16),
            backward: held_kernel("lstm_backward_held_64_2", 16),
        },
        Self {
            width: 64,
            blocks: 1,
            rows: 4,
            units: 1,
            forward: held_kernel("lstm_forward_held_64_4", 16),
            backward: held_kernel("lstm_backward_held_64_4", 16),
        },
        Self {
            width: 128,
            blocks: 2,
            rows: 1,
            units: 1,
            forward: held_kernel("lstm_forward_pair_128_1", 32),
            backward: held_kernel("lstm_backward_pair_128_1", 32),
        },
        Self {
            width: 128,
            blocks: 1,
            rows: 1,
            units: 2,
            forward: held_kernel("lstm_forward_held_128_1", 50),
            backward: held_kernel("lstm_backward_held_128_1", 50),
        },
        Self {
            width: 128,
            blocks: 1,
            rows: 2,
            units: 2,
            forward: held_kernel("lstm_forward_held_128_2", 45),
            backward: held_kernel("lstm_backward_held_128_2", 45),
        },
    ];

    /// None for other widths; and where clusters can do the same, for windows so short that most of the time
    /// goes into reading the weight, which the blocks of a cluster divide among them.
    fn of(window: Window, has_clusters: bool) -> Option<&'static Self> {
        const SHORT: usize = 4;
        if has_clusters && window.steps < SHORT {
            return None;
        }
        let fits = |held: &&Self| held.width == window.width && (held.blocks == 1 || has_clusters);
        let fills = |held: &&Self| window.batch.div_ceil(held.rows) * held.blocks <= FULL;
        let mut all = Self::ALL.iter().filter(fits);
        all.clone().find(fills).or_else(|| all.next_back())
    }

    fn threads(&self) -> usize {
        4 * self.width / self.blocks / self.units
    }

    /// Bytes of shared memory of a block: the weights that are not in registers, and two steps of gradients
    /// of the gates; of hidden states, which the forward pass has there instead, there are fewer.
    fn shared(&self, kernel: &HeldKernel) -> usize {
        let weights = 4 * self.threads() * (self.units * self.width / 4 - kernel.vectors);
        4 * (weights + 2 * self.rows * 4 * self.width)
    }

    fn queue(&self, launch: &mut Launch<'_>, kernel: &HeldKernel, args: impl Into<Args>) -> Result<()> {
        let (count, threads) = (launch.ty(0).shape[0].div_ceil(self.rows), self.threads() as u32);
        let (grid, cluster) = ([count, 1, self.blocks], self.blocks as u32);
        launch.clusters(kernel.name, grid, cluster, threads, self.shared(kernel), args)
    }
}

/// How a window is divided among clusters of blocks on a GPU that has them: the shared memories of a cluster's
/// blocks together hold the weight, so that a step reads nothing from far away.
struct Clusters {
    count: usize,
    /// Blocks of a cluster.
    blocks: usize,
    /// Logarithm of the rows of a cluster.
    variant: usize,
    /// Bytes of shared memory of a block.
    shared: usize,
}

impl Clusters {
    const THREADS: usize = 512;

    /// None where a width cannot be divided so, or is too large.
    fn of(window: Window) -> Option<Self> {
        /// Bytes of shared memory that a block of a GPU with clusters can have.
        const ROOM: usize = 200 << 10;
        let Window { batch, width, .. } = window;
        let blocks = [4, 8].into_iter().find(|blocks| {
            width.is_multiple_of(4 * blocks) && 4 * width * (4 * width / blocks) <= ROOM / 2
        })?;
        let units = width / blocks;
        let fills = |variant: &usize| batch.div_ceil(1 << variant) * blocks <= FULL;
        let variant = (0..4).find(fills).unwrap_or(3);
        let rows = 1 << variant;
        let groups = |columns: usize| (Self::THREADS / columns).max(1);
        let forward = 2 * rows * width + groups(4 * units) * rows * 4 * units;
        let backward = rows * 4 * units + 2 * blocks * rows * units + groups(width) * rows * width;
        let shared = 4 * (4 * width * units + forward.max(backward));
        let fits = shared <= ROOM && 4 * units <= Self::THREADS && width <= Self::THREADS;
        (fits && rows * units <= Self::THREADS).then(|| Self {
            count: batch.div_ceil(rows),
            blocks,
            variant,
            shared,
        })
    }

    fn queue(&self, launch: &mut Launch<'_>, kernel: &'static str, args: impl Into<Args>) -> Result<()> {
        let (grid, cluster) = ([self.count, 1, self.blocks], self.blocks as u32);
        launch.clusters(kernel, grid, cluster, Self::THREADS as u32, self.shared, args)
    }
}

kernel_args! {
    /// What the kernels `lstm_forward_*` take.
    struct LstmForward in "../lstm.cu" {
        hidden: u64, last_hidden: u64, last_cell: u64, gates: u64, cells: u64, before: u64, x: u64, weight: u64, bias: u64, first_hidden: u64, first_cell: u64, batch: usize, steps: usize, width: usize, lanes: usize, settled: usize,
    }
}

kernel_args! {
    /// What the kernels `lstm_backward_*` take.
    struct LstmBackward in "../lstm.cu" {
        dz: u64, dfirst_hidden: u64, dfirst_cell: u64, gates: u64, cells: u64, weight: u64, first_cell: u64, dhidden: u64, dlast_hidden: u64, dlast_cell: u64, batch: usize, steps: usize, width: usize, lanes: usize, settled: usize,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_hold_the_weight_of_usual_widths() {
        for (batch, width, blocks) in
            [(1, 16, 4), (64, 128, 4), (64, 64, 4), (128, 128, 4), (1000, 128, 4), (64, 160, 4), (64, 192, 8)]
        {
            let clusters = Clusters::of(Window { batch, steps: 1, width }).unwrap();
            assert_eq!(clusters.blocks, blocks);
            assert!(clusters.count << clusters.variant >= batch && clusters.shared <= 200 << 10);
        }
        for width in [7, 12, 500, 1024] {
            assert!(Clusters::of(Window { batch: 64, steps: 1, width }).is_none(), "{width}");
        }
    }

    #[test]
    fn held_weights_are_divided_as_the_kernels_say() {
        let source = include_str!("../lstm_held.cu");
        for held in &Held::ALL {
            let Held { width, blocks, rows, units, .. } = held;
            // Four threads share the units of all rows.
            assert!([1, 2, 4].contains(&(rows * units)) && held.threads() <= 512);
            for (pass, kernel) in [("FORWARD", &held.forward), ("BACKWARD", &held.backward)] {
                let HeldKernel { name, vectors } = kernel;
                let line = format!("\nLSTM_{pass}({name}, {width}, {rows}, {units}, {vectors}, {blocks})\n");
                assert!(source.contains(&line), "{line}");
                assert!(*vectors <= units * width / 4 && held.shared(kernel) <= 96 << 10, "{name}");
            }
        }
    }

    #[test]
    fn long_windows_of_usual_widths_are_held() {
        let held = |batch, steps, width, has_clusters| Held::of(Window { batch, steps, width }, has_clusters);
        let blocks = |batch, has_clusters| held(batch, 30, 128, has_clusters).unwrap().blocks;
        assert_eq!((blocks(66, true), blocks(67, true), blocks(64, false)), (2, 1, 1));
        let rows =
            |batch, steps, width, has_clusters| held(batch, steps, width, has_clusters).map(|held| held.rows);
        assert_eq!(rows(64, 30, 128, true), Some(1));
        assert_eq!(rows(133, 30, 128, true), Some(2));
        assert_eq!(rows(1000, 30, 128, false), Some(2));
        assert_eq!(rows(300, 4, 64, true), Some(4));
        assert_eq!((rows(1, 1, 128, true), rows(1, 1, 128, false)), (None, Some(1)));
        assert_eq!((rows(64, 30, 160, true), rows(64, 30, 96, false)), (None, None));
    }

    #[test]
    fn blocks_fit_shared_memory_and_cover_all_rows() {
        for (batch, width) in [(1, 1), (32, 128), (33, 128), (129, 128), (500, 1000), (500, 4096)] {
            for (columns, kept) in [(4 * width, 2 * width), (width, 5 * width)] {
                let window = Window { batch, steps: 1, width };
                let blocks = Blocks::of(window, columns, kept).unwrap();
                assert!(blocks.shared <= 96 << 10 && blocks.variant <= 2);
                assert_eq!(blocks.count, batch.div_ceil(1 << blocks.variant));
                assert!(blocks.lanes.is_multiple_of(32) && (32..=512).contains(&blocks.lanes));
            }
        }
        let window = Window { batch: 1, steps: 1, width: 5000 };
        let error = Blocks::of(window, 20_000, 10_000).map(|_| ()).unwrap_err().to_string();
        assert_eq!(error, "lstm: expected a width of at most 4096 on a GPU, got 5000");
    }
}
