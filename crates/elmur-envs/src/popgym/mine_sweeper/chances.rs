//! Exact chances of mines.
//!
//! Unviewed cells that touch the same viewed cells are alike: only their number of mines matters. These
//! groups hang together by the clues (viewed cells) they share; each such component is enumerated, group by
//! group, for the number of its arrangements with m mines, and components, together with the cells that touch
//! no clue, are combined by the total number of mines.

use super::Rules;
use super::view::{View, cells};

/// Most mines of a board, and one more.
const COUNTS: usize = 11;

/// Number of arrangements by number of mines.
type Counts = [f64; COUNTS];

#[derive(Debug, Clone, Copy)]
struct Group {
    cells: u64,
    clues: u64,
    size: usize,
    /// Sum over arrangements of the mines in this group, by the mines of its component.
    mines: Counts,
    chosen: usize,
}

/// Room for the computation, and its result.
#[derive(Debug, Clone)]
pub(super) struct Chances {
    blocks: [u64; 64],
    board: u64,
    mines: usize,
    choose: [[f64; COUNTS]; 65],
    groups: Vec<Group>,
    /// First group of each component.
    components: Vec<(usize, Counts)>,
    /// Mines that clues still ask for, and cells that can hold them.
    need: [usize; 64],
    capacity: [usize; 64],
    /// Number of arrangements that agree with the view.
    pub arrangements: f64,
    /// Chance of a mine in each cell; 0 for viewed cells.
    pub mine: [f64; 64],
}

impl Chances {
    pub fn new(rules: &Rules) -> Self {
        let mut choose = [[0.0; COUNTS]; 65];
        for n in 0..65 {
            choose[n][0] = 1.0;
            for k in 1..COUNTS.min(n + 1) {
                choose[n][k] = choose[n - 1][k - 1] + choose[n - 1][k];
            }
        }
        Self {
            blocks: rules.blocks(),
            board: rules.board(),
            mines: rules.mines,
            choose,
            groups: Vec::with_capacity(64),
            components: Vec::with_capacity(64),
            need: [0; 64],
            capacity: [0; 64],
            arrangements: 0.0,
            mine: [0.0; 64],
        }
    }

    /// Fills in `arrangements` and `mine`. With no arrangement all chances are 0.
    pub fn find(&mut self, view: &View) {
        let unknown = self.board & !view.viewed;
        // Clues without an unviewed cell beside them are in no group.
        let alone = |clue: &usize| self.blocks[*clue] & unknown == 0;
        if cells(view.viewed).filter(alone).any(|clue| view.clues[clue] > 0) {
            (self.arrangements, self.mine) = (0.0, [0.0; 64]);
            return;
        }
        self.group(view, unknown);
        let mut rest = unknown;
        for i in 0..self.components.len() {
            let (start, end) = self.component(i);
            for clue in cells(self.groups[start..end].iter().fold(0, |all, group| all | group.clues)) {
                self.need[clue] = usize::from(view.clues[clue]);
                self.capacity[clue] = (self.blocks[clue] & unknown).count_ones() as usize;
            }
            self.arrange(i, start, end, 0, 1.0);
            rest &= !self.groups[start..end].iter().fold(0, |all, group| all | group.cells);
        }
        self.combine(rest);
    }

    /// Finds groups and components; groups of a component follow one another, ordered so that clues are
    /// complete early.
    fn group(&mut self, view: &View, unknown: u64) {
        self.groups.clear();
        self.components.clear();
        let mut open = unknown;
        while let Some(seed) = cells(open).find(|cell| self.blocks[*cell] & view.viewed != 0) {
            self.components.push((self.groups.len(), [0.0; COUNTS]));
            let mut clues = self.blocks[seed] & view.viewed;
            let mut done = 0u64;
            while let Some(clue) = cells(clues & !done).next() {
                done |= 1 << clue;
                while let Some(cell) = cells(self.blocks[clue] & open).next() {
                    let touching = self.blocks[cell] & view.viewed;
                    let alike = cells(self.blocks[clue] & open);
                    let alike = alike.filter(|other| self.blocks[*other] & view.viewed == touching);
                    let set = alike.fold(0u64, |set, cell| set | 1 << cell);
                    open &= !set;
                    clues |= touching;
                    let size = set.count_ones() as usize;
                    self.groups.push(Group {
                        cells: set,
                        clues: touching,
                        size,
                        mines: [0.0; COUNTS],
                        chosen: 0,
                    });
                }
            }
            open &= !(1 << seed);
        }
    }

    /// Groups of a component.
    fn component(&self, i: usize) -> (usize, usize) {
        let end = self.components.get(i + 1).map_or(self.groups.len(), |next| next.0);
        (self.components[i].0, end)
    }

    /// Goes through the mines of group `at` and those after it.
    fn arrange(&mut self, component: usize, at: usize, end: usize, mines: usize, weight: f64) {
        if at == end {
            self.components[component].1[mines] += weight;
            for group in &mut self.groups[self.components[component].0..end] {
                group.mines[mines] += weight * group.chosen as f64;
            }
            return;
        }
        let Group { clues, size, .. } = self.groups[at];
        // As many as all clues allow; as few as no clue needs more than the cells after this group can hold.
        let (mut most, mut least) = (size.min(self.mines - mines), 0);
        for clue in cells(clues) {
            self.capacity[clue] -= size;
            most = most.min(self.need[clue]);
            least = least.max(self.need[clue].saturating_sub(self.capacity[clue]));
        }
        for count in least..=most {
            self.groups[at].chosen = count;
            cells(clues).for_each(|clue| self.need[clue] -= count);
            self.arrange(component, at + 1, end, mines + count, weight * self.choose[size][count]);
            cells(clues).for_each(|clue| self.need[clue] += count);
        }
        cells(clues).for_each(|clue| self.capacity[clue] += size);
    }

    fn combine(&mut self, rest: u64) {
        let free = rest.count_ones() as usize;
        // Arrangements of the rest of the board, by the mines that components leave for it; then with one
        // cell of it a mine.
        let outside: Counts =
            std::array::from_fn(|m| if m <= self.mines { self.choose[free][self.mines - m] } else { 0.0 });
        let all = self.components.iter().fold(one(), |all, component| product(&all, &component.1));
        self.arrangements = dot(&all, &outside);
        self.mine = [0.0; 64];
        if self.arrangements <= 0.0 {
            return;
        }
        if free > 0 {
            let with: Counts = std::array::from_fn(|m| {
                if m < self.mines { self.choose[free - 1][self.mines - m - 1] } else { 0.0 }
            });
            let chance = dot(&all, &with) / self.arrangements;
            cells(rest).for_each(|cell| self.mine[cell] = chance);
        }
        for i in 0..self.components.len() {
            let (start, end) = self.component(i);
            let others = self.components.iter().enumerate().filter(|(j, _)| *j != i);
            let others = others.fold(one(), |all, (_, component)| product(&all, &component.1));
            // What everything else adds to an arrangement of this component with m mines.
            let weight: Counts =
                std::array::from_fn(|m| (0..COUNTS - m).map(|n| others[n] * outside[m + n]).sum());
            for group in &self.groups[start..end] {
                let chance = dot(&group.mines, &weight) / (self.arrangements * group.size as f64);
                cells(group.cells).for_each(|cell| self.mine[cell] = chance);
            }
        }
    }
}

fn one() -> Counts {
    std::array::from_fn(|m| if m == 0 { 1.0 } else { 0.0 })
}

fn dot(a: &Counts, b: &Counts) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn product(a: &Counts, b: &Counts) -> Counts {
    std::array::from_fn(|m| (0..=m).map(|i| a[i] * b[m - i]).sum())
}

#[cfg(test)]
mod tests {
    use elmur_rng::Rng;

    use super::*;
    use crate::popgym::Difficulty;

    /// Sets of `k` of these cells.
    fn subsets(of: &[usize], k: usize) -> Vec<u64> {
        match (of.split_first(), k) {
            (_, 0) => vec![0],
            (None, _) => vec![],
            (Some((cell, rest)), _) => {
                let with = subsets(rest, k - 1).into_iter().map(|set| set | 1 << cell);
                with.chain(subsets(rest, k)).collect()
            }
        }
    }

    #[test]
    fn chances_are_those_of_all_arrangements() {
        // The smallest board from the first click on; others once 16 and 18 cells are left.
        for (difficulty, unviewed) in [
            (Difficulty::Easy, 15),
            (Difficulty::Easy, 12),
            (Difficulty::Easy, 6),
            (Difficulty::Medium, 16),
            (Difficulty::Hard, 18),
        ] {
            let rules = Rules::new(difficulty);
            let (blocks, mut chances) = (rules.blocks(), Chances::new(&rules));
            for seed in 0..6 {
                let mut order: Vec<usize> = (0..rules.cells).collect();
                Rng::new(seed, 1).shuffle(&mut order);
                let mines: u64 = order[..rules.mines].iter().map(|cell| 1 << cell).sum();
                let clue = |mines: u64, cell: usize| (mines & blocks[cell]).count_ones() as u8;
                let viewed = &order[unviewed..];
                let view = viewed.iter().fold(View::default(), |view, c| view.with(*c, clue(mines, *c)));
                let agrees = |mines: &u64| viewed.iter().all(|c| clue(*mines, *c) == view.clues[*c]);
                let all: Vec<u64> =
                    subsets(&order[..unviewed], rules.mines).into_iter().filter(agrees).collect();
                chances.find(&view);
                assert_eq!(chances.arrangements, all.len() as f64, "{difficulty:?} {seed}");
                for cell in 0..rules.cells {
                    let expected =
                        all.iter().filter(|mines| **mines >> cell & 1 == 1).count() as f64 / all.len() as f64;
                    assert!((chances.mine[cell] - expected).abs() < 1e-12, "{difficulty:?} {seed} {cell}");
                    assert_eq!(chances.mine[cell] == 0.0, expected == 0.0);
                }
            }
        }
    }

    #[test]
    fn clues_that_no_mines_give_leave_no_arrangement() {
        let mut chances = Chances::new(&Rules::new(Difficulty::Easy));
        chances.find(&View::default());
        assert_eq!((chances.arrangements, chances.mine[3]), (120.0, 0.125));
        for clue in [3, 255] {
            chances.find(&View::default().with(0, clue));
            assert_eq!((chances.arrangements, chances.mine[3]), (0.0, 0.0));
        }
        // A corner that claims a mine, when all cells around it are known to be clear.
        let corner = [0, 1, 4, 5].iter().fold(View::default(), |view, cell| view.with(*cell, 1));
        chances.find(&corner);
        assert_eq!((chances.arrangements, chances.mine[3]), (0.0, 0.0));
    }
}
