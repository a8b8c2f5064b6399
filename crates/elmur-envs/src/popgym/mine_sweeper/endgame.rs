//! The best play where few arrangements of mines are left.
//!
//! With L clear cells, s = 1/L and the costs b of a mine and w of a wasted click, the expected return from
//! here on is, with k clicks to go (as many as there are clear cells left, less those that were wasted),
//!
//! ```text
//! one arrangement left:      k s
//! some cell surely clear:    s + mean value after its clue (it must be clicked anyway)
//! else the larger of
//!     giving up:             -k w: clicks on a viewed cell until the episode is cut off
//!     any cell:              -p b + (1 - p) (s + mean value after its clue), p its chance of a mine
//! ```
//!
//! A wasted click makes one more clear cell unreachable and teaches nothing, so there is no point in wasting
//! one and going on. Where others have wasted some, there are fewer clicks to go.

use std::collections::HashMap;
use std::ops::Range;

use super::Rules;
use super::view::{View, cells};

/// What to do where no cell is surely clear.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Choice {
    Click(usize),
    GiveUp,
}

/// The best that can be done where no cell is surely clear.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Guess {
    /// Expected return from here on.
    pub value: f64,
    pub choice: Choice,
    /// Cells that are worth as much when clicked: viewed ones too, where giving up is.
    pub ties: u64,
}

/// Values that differ by less are equal but for rounding.
pub(super) const ROUNDING: f64 = 1e-9;

/// Solves positions, and remembers them.
#[derive(Debug, Clone)]
pub(super) struct Endgame {
    rules: Rules,
    blocks: [u64; 64],
    /// Lists of arrangements, one on top of the other, each with the clue that told it from its neighbours.
    lists: Vec<(u32, u64)>,
    /// Positions in which nothing is surely clear, by a hash of their arrangements, their number and the
    /// wasted clicks. (The arrangements tell what has been viewed: all that is clear in all of them.)
    known: HashMap<(u64, usize, usize), Guess>,
    /// Clicks that were wasted, of those that all clear cells need.
    wasted: usize,
}

/// Most positions remembered.
const MAX_KNOWN: usize = 100_000;

impl Endgame {
    pub fn new(rules: &Rules) -> Self {
        Self { rules: *rules, blocks: rules.blocks(), lists: Vec::new(), known: HashMap::new(), wasted: 0 }
    }

    /// The best expected return from a position in which no cell is surely clear, and how to get it, after so
    /// many wasted clicks.
    pub fn solve(&mut self, view: &View, wasted: usize) -> Guess {
        self.lists.clear();
        self.wasted = wasted;
        if self.known.len() > MAX_KNOWN {
            self.known.clear();
        }
        let unknown = self.rules.board() & !view.viewed;
        self.list(view, unknown, 0);
        // In order, so that sums do not depend on how a position was reached.
        self.lists.sort_unstable();
        self.guess(0..self.lists.len(), view.viewed)
    }

    /// Lists all arrangements with these mines and others in `open` cells.
    fn list(&mut self, view: &View, open: u64, mines: u64) {
        let left = self.rules.mines as u32 - mines.count_ones();
        if left > open.count_ones() {
            return;
        }
        let touching = cells(open).find(|cell| self.blocks[*cell] & view.viewed != 0);
        let Some(cell) = touching.or_else(|| cells(open).next()) else {
            self.lists.push((0, mines));
            return;
        };
        let open = open & !(1 << cell);
        for mines in [mines, mines | 1 << cell] {
            let fits = cells(self.blocks[cell] & view.viewed).all(|clue| {
                let certain = (self.blocks[clue] & mines).count_ones();
                let possible = certain + (self.blocks[clue] & open).count_ones();
                (certain..=possible).contains(&u32::from(view.clues[clue]))
            });
            if fits && mines.count_ones() as usize <= self.rules.mines {
                self.list(view, open, mines);
            }
        }
    }

    /// Clicks to go.
    fn left(&self, viewed: u64) -> f64 {
        self.rules.clear.saturating_sub(viewed.count_ones() as usize + self.wasted) as f64
    }

    /// Expected return from here on.
    fn value(&mut self, list: Range<usize>, viewed: u64) -> f64 {
        let left = self.left(viewed);
        if list.len() == 1 || left == 0.0 {
            return left * self.rules.found;
        }
        let mined = self.lists[list.clone()].iter().fold(0, |all, (_, mines)| all | mines);
        match cells(self.rules.board() & !mined & !viewed).next() {
            Some(clear) => self.click(clear, list, viewed),
            None => self.guess(list, viewed).value,
        }
    }

    fn guess(&mut self, list: Range<usize>, viewed: u64) -> Guess {
        let hash =
            self.lists[list.clone()].iter().fold(0u64, |hash, (_, mines)| hash.wrapping_add(mix(*mines)));
        let key = (hash, list.len(), self.wasted);
        if let Some(known) = self.known.get(&key) {
            return *known;
        }
        let mut risks = [(0, 0); 64];
        let unviewed = self.rules.board() & !viewed;
        for (risk, cell) in risks.iter_mut().zip(cells(unviewed)) {
            *risk =
                (self.lists[list.clone()].iter().filter(|(_, mines)| mines >> cell & 1 == 1).count(), cell);
        }
        let risks = &mut risks[..unviewed.count_ones() as usize];
        risks.sort_unstable();
        let left = self.left(viewed);
        let mut best = Guess { value: left * self.rules.wasted, choice: Choice::GiveUp, ties: viewed };
        for (mines, cell) in risks.iter() {
            // No more than if everything went well after this click.
            let risk = *mines as f64 / list.len() as f64;
            if risk * self.rules.blown + (1.0 - risk) * left * self.rules.found < best.value - ROUNDING {
                break;
            }
            let value = self.click(*cell, list.clone(), viewed);
            if value > best.value + ROUNDING {
                best = Guess { value, choice: Choice::Click(*cell), ties: 1 << cell };
            } else if value > best.value - ROUNDING {
                best.ties |= 1 << cell;
            }
        }
        self.known.insert(key, best);
        best
    }

    /// Expected return of a click and the best play after it.
    fn click(&mut self, cell: usize, list: Range<usize>, viewed: u64) -> f64 {
        let (start, all) = (self.lists.len(), list.len());
        for i in list {
            let mines = self.lists[i].1;
            if mines >> cell & 1 == 0 {
                self.lists.push(((mines & self.blocks[cell]).count_ones(), mines));
            }
        }
        let end = self.lists.len();
        self.lists[start..].sort_unstable();
        let mut sum = (all - (end - start)) as f64 * self.rules.blown;
        let mut first = start;
        while first < end {
            let clue = self.lists[first].0;
            let same = self.lists[first..end].iter().take_while(|other| other.0 == clue).count();
            let value = self.value(first..first + same, viewed | 1 << cell);
            sum += same as f64 * (self.rules.found + value);
            first += same;
        }
        self.lists.truncate(start);
        sum / all as f64
    }
}

/// Scrambles the bits of a number (the finaliser of SplitMix64).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::popgym::Difficulty;

    #[test]
    fn the_best_play_of_the_smallest_board_is_known() {
        let Guess { value, choice, ties } =
            Endgame::new(&Rules::new(Difficulty::Easy)).solve(&View::default(), 0);
        assert!((value - 0.766).abs() < 5e-4, "{value}");
        assert_eq!(choice, Choice::Click(0));
        assert_eq!(ties, 1 | 1 << 3 | 1 << 12 | 1 << 15, "the corners");
    }

    /// The view of a Medium board with these mines and these unviewed cells besides.
    fn view(mines: &[usize], unviewed: &[usize]) -> (Endgame, View) {
        let endgame = Endgame::new(&Rules::new(Difficulty::Medium));
        let set: u64 = mines.iter().map(|cell| 1 << cell).sum();
        let viewed = (0..36).filter(|cell| !mines.contains(cell) && !unviewed.contains(cell));
        let clue = |cell: usize| (set & endgame.blocks[cell]).count_ones() as u8;
        let view = viewed.fold(View::default(), |view, cell| view.with(cell, clue(cell)));
        (endgame, view)
    }

    #[test]
    fn a_toss_for_the_last_cell_is_given_up() {
        // A mine in cell 0 or 1, behind mines in 2 and 8: an even chance of 0.033 or -0.533, or -0.018 for a
        // wasted click.
        let (mut endgame, view) = view(&[0, 2, 8, 33, 34, 35], &[1]);
        let Guess { value, choice, ties } = endgame.solve(&view, 0);
        assert_eq!((choice, ties), (Choice::GiveUp, view.viewed));
        assert!((value + 0.5 / 28.0).abs() < 1e-12, "{value}");
    }

    #[test]
    fn what_has_been_solved_is_remembered() {
        let (mut endgame, view) = view(&[0, 2, 8, 33, 34, 35], &[1]);
        let first = endgame.solve(&view, 0);
        let known = endgame.known.len();
        assert!(known > 0 && endgame.solve(&view, 0) == first && endgame.known.len() == known);
        // The last click was wasted by another: there is nothing to lose any more, but by a mine.
        let late = endgame.solve(&view, 1);
        assert_eq!((late.value, late.choice, late.ties), (0.0, Choice::GiveUp, view.viewed));
    }

    /// Mines in one of cells 0 and 1 and in one of cells 30 and 31: two clear cells to go. With all clicks a
    /// guess at both costs more than to give up, and so does one where only one click is left.
    #[test]
    fn clicks_that_others_wasted_are_not_counted_on() {
        let (mut endgame, view) = view(&[0, 2, 8, 30, 32, 26], &[1, 31]);
        let values = [0, 1, 2].map(|wasted| endgame.solve(&view, wasted).value);
        assert!(
            (values[0] + 1.0 / 28.0).abs() < 1e-12 && (values[1] + 0.5 / 28.0).abs() < 1e-12,
            "{values:?}"
        );
        assert_eq!(values[2], 0.0);
    }
}
