//! The compiled programs of a session: one set per phase, for all rows at once and for a few numbers of rows.

use std::sync::Arc;

use elmur_engine::{DType, Device, Graph, Program, RoundedWeights, Store};

use crate::architecture::Architecture;
use crate::error::Result;
use crate::net::{Declared, Feed, Net, Pass, Source, Tap};
use crate::phase::Phase;

/// Numbers of rows that programs are compiled for, beside all rows. Lists of other lengths are cut into
/// these, and the last part is filled up by repeating its last row where more than half of a program's rows
/// would be used.
const SIZES: [usize; 9] = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536];

/// Sessions of at most this many rows compute lists of rows by a program for all rows, filled up: products
/// then have the same shapes and a row's bits never depend on what other rows do. Larger sessions save the
/// time instead; how products of few rows are rounded then depends on how many there are.
const SMALL: usize = 4;

/// What a set of programs computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    Phase(Phase),
    /// The window of each row once more; at its end with what it leaves behind.
    Rerun {
        closing: bool,
    },
}

/// What programs are compiled from and for.
#[derive(Debug)]
pub(super) struct Context {
    pub architecture: Arc<dyn Architecture>,
    pub device: Device,
    pub params: Store,
    /// States carried per row, [capacity, ...].
    pub carried: Store,
    /// States that follow from the parameters.
    pub derived: Store,
    pub capacity: usize,
    pub recording: bool,
    /// Copies of weights in bf16, which programs read instead of the parameters.
    pub rounded: Option<RoundedWeights>,
}

impl Context {
    /// The graph of some work for `rows` rows, which are all rows or, with `bank`, some of them.
    pub fn graph(&self, work: Work, rows: usize, bank: bool) -> Result<(Graph, Declared)> {
        let architecture = &*self.architecture;
        let pass = match work {
            Work::Phase(phase) => Pass::Step(phase),
            Work::Rerun { closing } => Pass::Rerun { closing },
        };
        let mut net = Net::new(architecture.ends(), DType::F32, pass, rows, architecture.window().steps);
        net.recording = self.recording;
        if bank {
            let at_hand = net.input("rows", DType::I32, &[rows], Source::Rows)?;
            net.bank = Some((self.capacity, at_hand));
        }
        let hidden = match work {
            Work::Phase(phase) => architecture.step(&mut net, phase)?,
            Work::Rerun { .. } => Some(architecture.forward(&mut net)?),
        };
        if let Some(hidden) = hidden.filter(|_| !matches!(work, Work::Rerun { closing: true })) {
            let outputs = architecture.head(&mut net, hidden)?;
            net.g.output("outputs", outputs)?;
        }
        net.finish()
    }

    fn compile(&self, work: Work, rows: usize, bank: bool) -> Result<StepProgram> {
        let (graph, declared) = self.graph(work, rows, bank)?;
        let stores = [&self.carried, &self.derived, &self.params];
        let graph = match &self.rounded {
            Some(rounded) => rounded.apply(&graph, &self.params)?,
            None => graph,
        };
        let program = Program::new(&graph, &self.device, &stores)?;
        Ok(StepProgram { program, feeds: declared.feeds, taps: declared.taps, rows })
    }
}

/// A program for some number of rows.
#[derive(Debug)]
pub(super) struct StepProgram {
    pub program: Program,
    pub feeds: Vec<Feed>,
    pub taps: Vec<Tap>,
    pub rows: usize,
}

/// The next part of a list of rows: entries `first..first + count`, computed by a program for `size` rows.
/// All rows in order are one part without a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub first: usize,
    pub count: usize,
    size: Option<usize>,
}

/// Cuts a list of rows into parts for which there are programs.
pub(super) fn parts(rows: &[usize], capacity: usize) -> impl Iterator<Item = Part> {
    let all = rows.len() == capacity && rows.iter().enumerate().all(|(i, row)| i == *row);
    let total = rows.len();
    let mut first = 0;
    std::iter::from_fn(move || {
        let left = total - first;
        if left == 0 {
            return None;
        }
        let (count, size) = if all {
            (left, None)
        } else if capacity <= SMALL {
            (left, Some(0))
        } else {
            let size = size_for(left);
            (left.min(SIZES[size]), Some(size))
        };
        first += count;
        Some(Part { first: first - count, count, size })
    })
}

/// Number of the program for the next of `left` rows: the smallest that holds them all if more than half of it
/// is used, else the largest that they fill.
fn size_for(left: usize) -> usize {
    match SIZES.iter().position(|size| *size >= left) {
        Some(size) if size == 0 || SIZES[size] < 2 * left => size,
        Some(size) => size - 1,
        None => SIZES.len() - 1,
    }
}

/// Rows of the program that should compute the next of `left` rows of a session of `capacity` rows: as for
/// steps, for what computes rows on its own.
pub(crate) fn rows_at_once(left: usize, capacity: usize) -> usize {
    if capacity <= SMALL { capacity } else { SIZES[size_for(left)] }
}

/// The programs of one kind of work, compiled when first needed.
#[derive(Debug)]
pub(super) struct Programs {
    work: Work,
    all: Option<Box<StepProgram>>,
    sized: [Option<Box<StepProgram>>; SIZES.len()],
}

impl Programs {
    pub fn new(work: Work) -> Self {
        Self { work, all: None, sized: [const { None }; SIZES.len()] }
    }

    /// Compiles the programs that compute a list of rows, where they are not yet.
    pub fn compile(&mut self, context: &Context, rows: &[usize]) -> Result<()> {
        parts(rows, context.capacity).try_for_each(|part| self.of(context, part).map(|_| ()))
    }

    /// The program that computes a part.
    pub fn of(&mut self, context: &Context, part: Part) -> Result<&mut StepProgram> {
        let (slot, rows) = match part.size {
            None => (&mut self.all, context.capacity),
            Some(size) if context.capacity > SMALL => (&mut self.sized[size], SIZES[size]),
            Some(size) => (&mut self.sized[size], context.capacity),
        };
        let program = match slot.take() {
            Some(program) => program,
            None => Box::new(context.compile(self.work, rows, part.size.is_some())?),
        };
        Ok(slot.insert(program))
    }
}

/// Fills the input `rows` of a program that has no others.
pub(super) fn fill_rows(to: &mut StepProgram, rows: &[usize], part: Part) -> Result<()> {
    for feed in to.feeds.iter().filter(|feed| feed.source == Source::Rows) {
        let input = to.program.input_mut::<i32>(&feed.name)?;
        for (i, to) in input.iter_mut().enumerate() {
            *to = rows[part.first + i.min(part.count - 1)] as i32;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_rows_are_cut_into_few_parts_with_little_waste() {
        let cut = |rows: &[usize], capacity| {
            parts(rows, capacity).map(|p| (p.first, p.count, p.size.map(|s| SIZES[s]))).collect::<Vec<_>>()
        };
        assert_eq!(cut(&[0, 1, 2], 3), [(0, 3, None)]);
        assert_eq!(parts(&[2, 0], 3).count(), 1, "a small session pads to all rows");
        assert_eq!(cut(&[6, 1, 0], 9), [(0, 3, Some(4))]);
        assert_eq!(cut(&[5], 9), [(0, 1, Some(1))]);
        assert_eq!(cut(&[5, 1], 9), [(0, 1, Some(1)), (1, 1, Some(1))]);
        let many: Vec<usize> = (0..1000).collect();
        assert_eq!(cut(&many[..30], 1024), [(0, 16, Some(16)), (16, 14, Some(16))]);
        assert_eq!(cut(&many[1..600], 1024), [(0, 599, Some(1024))]);
        assert_eq!(cut(&[], 4), []);
        for n in 1..700 {
            let all: Vec<_> = parts(&many[1..=n], 1024).collect();
            assert_eq!(all.iter().map(|p| p.count).sum::<usize>(), n);
            let computed: usize = all.iter().filter_map(|p| p.size).map(|size| SIZES[size]).sum();
            assert!(computed < 2 * n && all.len() <= 10, "{n} rows: {computed} in {} parts", all.len());
        }
    }
}
