//! Dependencies between the parts of a program's work: a part waits for earlier parts that touch the same
//! bytes.

use std::time::Duration;

use crate::operand::Operand;
use crate::step::Step;

/// A range of bytes that a step reads or writes.
#[derive(Clone, Copy)]
pub(super) struct Range {
    start: usize,
    end: usize,
}

impl Range {
    /// All bytes that there are.
    pub const ALL: Self = Self { start: 0, end: usize::MAX };

    pub fn new(start: usize, bytes: usize) -> Self {
        Self { start, end: start + bytes }
    }

    pub fn of(operand: &Operand) -> Option<Self> {
        let start = operand.ptr.addr();
        (start != 0).then(|| Self::new(start, operand.ty.bytes()))
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// Whether two sets of ranges have bytes in common.
pub(super) fn any_overlap(a: &[Range], b: &[Range]) -> bool {
    a.iter().any(|x| b.iter().any(|y| x.overlaps(y)))
}

/// A step's work or its deferred work, and what it must wait for.
pub(super) struct Part {
    /// Number of the step that the part belongs to.
    pub step: usize,
    pub is_deferred: bool,
    reads: Vec<Range>,
    writes: Vec<Range>,
    /// Numbers of the earlier parts that this part waits for directly.
    pub needs: Vec<usize>,
    /// Bit j is set if this part runs after part j, directly or not.
    after: Vec<u64>,
}

impl Part {
    fn of(number: usize, step: &Step, deferred: &std::ops::Range<usize>, is_deferred: bool) -> Self {
        let outputs = step.outputs.iter().enumerate().filter(|(i, _)| deferred.contains(i) == is_deferred);
        Self {
            step: number,
            is_deferred,
            reads: step.inputs.iter().filter_map(Range::of).collect(),
            writes: outputs.filter_map(|(_, operand)| Range::of(operand)).collect(),
            needs: Vec::new(),
            after: Vec::new(),
        }
    }

    /// What this part writes.
    pub fn writes(&self) -> &[Range] {
        &self.writes
    }

    /// Finds the earlier parts that this part must wait for: parts that write bytes it touches, parts that
    /// read bytes it writes, and part `also`. Parts that another of these already waits for are left out.
    fn wait_for(&mut self, earlier: &[Part], also: Option<usize>) {
        self.after = vec![0; earlier.len() / 64 + 1];
        for (j, part) in earlier.iter().enumerate().rev() {
            if self.after[j / 64] >> (j % 64) & 1 == 1 {
                continue;
            }
            let waits = also == Some(j)
                || any_overlap(&part.writes, &self.reads)
                || any_overlap(&part.writes, &self.writes)
                || any_overlap(&part.reads, &self.writes);
            if waits {
                self.needs.push(j);
                self.after.iter_mut().zip(&part.after).for_each(|(s, a)| *s |= a);
                self.after[j / 64] |= 1 << (j % 64);
            }
        }
    }
}

/// All parts of a program's work, in order.
pub(super) fn parts(steps: &[Step]) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for (number, step) in steps.iter().enumerate() {
        let deferred = step.deferred();
        let mut own = Part::of(number, step, &deferred, false);
        own.wait_for(&parts, None);
        parts.push(own);
        if !deferred.is_empty() {
            let mut part = Part::of(number, step, &deferred, true);
            part.wait_for(&parts, step.op.deferred_reads_scratch().then(|| parts.len() - 1));
            parts.push(part);
        }
    }
    parts
}

/// Whether each part lies on the critical path, the longest by the times that parts take.
pub(super) fn critical_path(parts: &[Part], times: &[Duration]) -> Vec<bool> {
    let mut ends: Vec<Duration> = Vec::with_capacity(parts.len());
    for (part, time) in parts.iter().zip(times) {
        ends.push(*time + part.needs.iter().map(|need| ends[*need]).max().unwrap_or_default());
    }
    let mut path = vec![false; parts.len()];
    let mut at = (0..parts.len()).max_by_key(|i| ends[*i]);
    while let Some(i) = at {
        path[i] = true;
        at = parts[i].needs.iter().copied().max_by_key(|need| ends[*need]);
    }
    path
}

/// Whether each part lies on a longest path through the graph by number of parts, or nearly. Other parts must
/// not keep them waiting.
pub(super) fn urgent(parts: &[Part]) -> Vec<bool> {
    let mut depth = vec![1usize; parts.len()];
    for (i, part) in parts.iter().enumerate() {
        depth[i] = 1 + part.needs.iter().map(|n| depth[*n]).max().unwrap_or(0);
    }
    let mut height = vec![0usize; parts.len()];
    for (i, part) in parts.iter().enumerate().rev() {
        for need in &part.needs {
            height[*need] = height[*need].max(height[i] + 1);
        }
    }
    let longest = depth.iter().copied().max().unwrap_or(0);
    depth.iter().zip(&height).map(|(d, h)| d + h + longest / 16 >= longest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(reads: &[(usize, usize)], writes: &[(usize, usize)], earlier: &[Part]) -> Part {
        let ranges =
            |list: &[(usize, usize)]| list.iter().map(|&(start, end)| Range { start, end }).collect();
        let (reads, writes) = (ranges(reads), ranges(writes));
        let (needs, after) = (Vec::new(), Vec::new());
        let mut part = Part { step: 0, is_deferred: false, reads, writes, needs, after };
        part.wait_for(earlier, None);
        part
    }

    #[test]
    fn the_critical_path_is_by_time_not_by_count() {
        let mut parts = Vec::new();
        // 0 to 3 through 1 or 2; 4 stands apart.
        for (reads, writes) in [
            (&[][..], &[(0, 10)][..]),
            (&[(0, 10)], &[(10, 20)]),
            (&[(0, 10)], &[(20, 30)]),
            (&[(10, 30)], &[(30, 40)]),
            (&[], &[(50, 60)]),
        ] {
            let part = part(reads, writes, &parts);
            parts.push(part);
        }
        let times = [1, 5, 2, 1, 6].map(Duration::from_micros);
        assert_eq!(critical_path(&parts, &times), [true, true, false, true, false]);
    }

    #[test]
    fn parts_wait_for_what_they_touch_and_no_more() {
        let mut parts = Vec::new();
        for (reads, writes) in [
            (&[][..], &[(0, 10)][..]),  // 0 writes a
            (&[(0, 10)], &[(10, 20)]),  // 1 reads a, writes b
            (&[(5, 10)], &[(20, 30)]),  // 2 reads part of a, writes c
            (&[(10, 30)], &[(30, 40)]), // 3 reads b and c
            (&[], &[(0, 5)]),           // 4 overwrites a, which 1 has read
            (&[(0, 5), (30, 40)], &[(40, 50)]),
            (&[], &[(60, 70)]), // 6 has nothing to do with the others
        ] {
            let next = part(reads, writes, &parts);
            parts.push(next);
        }
        // 0 - 1 - 3 - 5, 0 - 2 - 3 - 5 and 0 - 1 - 4 - 5 are the longest paths.
        assert_eq!(urgent(&parts), [true, true, true, true, true, true, false]);
        let needs: Vec<Vec<usize>> = parts.into_iter().map(|p| p.needs).collect();
        assert_eq!(needs, [vec![], vec![0], vec![0], vec![2, 1], vec![1], vec![4, 3], vec![]]);
    }
}
