//! The player of Battleship: shoots where a ship is most likely.
//!
//! The chance of every cell is a sum over all fleets that agree with the shots so far. A fleet splits in one
//! way into ships that lie on hits and ships that lie on cells never shot at. The former are enumerated: the
//! first hit that no ship covers yet must be covered by one of the ships left. The latter are summed without
//! enumerating them: with S the sum of the weights w of a ship's free places and K(b) that of the places that
//! overlap place b,
//!
//! ```text
//! one ship left:     T(b) = w(b)
//! two, b and c:      T(b) = w(b) A_c
//! three, b, c, d:    T(b) = w(b) (A_c A_d - O_cd)
//! four, b, c, d, e:  T(b) = w(b) A_c A_d A_e (1 - o_cd) (1 - o_ce) (1 - o_de)
//!
//! A_c = S_c - K_c(b), and O_cd the sum over overlapping pairs (c, d) that avoid b;
//! o_cd = O_cd / (A_c A_d)
//! ```
//!
//! are the weights of all fleets with a ship at b. The pairs that avoid b are all pairs less those in which
//! c or d meets b; pairs in which both do are so taken off twice. They are few: to put them back where three
//! ships are left changed the return by less than 0.0005 and took two to four times as long. Before the first
//! hit all four ships are free. Then these pairs are put back, and whether one pair overlaps is taken to be
//! independent of the others.
//!
//! The weights: a fleet placed ship by ship has the chance 1 / (n_1 n_2 n_3 n_4) with n_i the places that the
//! ships before leave for ship i. The share of the n places of a later ship that a ship takes away is k/n, so
//! a ship's weight is the product of 1 / (1 - k/n) over the ships placed after it. (Shares of several ships
//! multiply only on average; the error is of second order.)
//!
//! Choices after the first shots are remembered for all players: many episodes begin alike, and the more ships
//! are left, the longer a choice takes.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, OnceLock, PoisonError};

use elmur_base::{Values, ValuesMut};

use super::side;
use crate::env::Player;
use crate::popgym::Difficulty;

/// Kinds of ships: of 2, 3 and 4 cells.
const LENGTHS: [usize; 3] = [2, 3, 4];
/// How many of each kind.
const FLEET: [usize; 3] = [1, 2, 1];
/// Most cells of a board.
const CELLS: usize = 144;

/// A set of cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
struct Cells([u64; 3]);

impl Cells {
    fn insert(&mut self, cell: usize) {
        self.0[cell / 64] |= 1 << (cell % 64);
    }

    fn has(&self, cell: usize) -> bool {
        self.0[cell / 64] >> (cell % 64) & 1 == 1
    }

    fn meets(&self, other: &Cells) -> bool {
        (0..3).any(|i| self.0[i] & other.0[i] != 0)
    }

    fn without(&self, other: &Cells) -> Cells {
        Cells(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }

    fn with(&self, other: &Cells) -> Cells {
        Cells(std::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    fn first(&self) -> Option<usize> {
        let word = self.0.iter().position(|word| *word != 0)?;
        Some(64 * word + self.0[word].trailing_zeros() as usize)
    }
}

/// Lists of places, one after the other.
#[derive(Debug, Default)]
struct Lists {
    ends: Vec<u32>,
    places: Vec<u16>,
}

impl Lists {
    fn new(lists: usize, members: impl Fn(usize) -> Vec<u16>) -> Self {
        let mut all = Self::default();
        for i in 0..lists {
            all.places.extend(members(i));
            all.ends.push(all.places.len() as u32);
        }
        all
    }

    #[inline]
    fn of(&self, i: usize) -> &[u16] {
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        &self.places[start as usize..self.ends[i] as usize]
    }
}

/// All places of ships on a board, kind after kind, and how they meet.
#[derive(Debug)]
struct Chart {
    size: usize,
    /// Places of kind k are `starts[k]..starts[k + 1]`.
    starts: [usize; 4],
    cells: Vec<Cells>,
    weights: Vec<f64>,
    /// By kind: the places of that kind that overlap a place.
    overlaps: [Lists; 3],
    /// By kind: the places of that kind on a cell.
    through: [Lists; 3],
    chosen: Chosen,
}

/// What is known of the board: hits and shots.
type Board = (Cells, Cells);

/// The cells chosen on boards with few shots, and those that are as likely.
#[derive(Debug, Default)]
struct Chosen([Mutex<HashMap<Board, (u8, Cells)>>; 16]);

impl Chosen {
    /// Most shots of a board that is remembered, and most boards of one of the maps: 30 MB in all.
    const SHOTS: usize = 24;
    const MOST: usize = 1 << 14;

    /// The choice on this board: remembered, or made by `choose`.
    fn get(&self, board: Board, choose: impl FnOnce() -> (usize, Cells)) -> (usize, Cells) {
        if board.1.len() > Self::SHOTS {
            return choose();
        }
        let mut hasher = DefaultHasher::new();
        board.hash(&mut hasher);
        let map = &self.0[hasher.finish() as usize % self.0.len()];
        let lock = || map.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((cell, ties)) = lock().get(&board) {
            return (usize::from(*cell), *ties);
        }
        // Others may choose meanwhile, and come to the same.
        let (cell, ties) = choose();
        let mut map = lock();
        if map.len() < Self::MOST {
            map.insert(board, (cell as u8, ties));
        }
        (cell, ties)
    }
}

impl Chart {
    /// The chart of this difficulty, made once.
    fn of(difficulty: Difficulty) -> &'static Chart {
        static CHARTS: [OnceLock<Chart>; 3] = [const { OnceLock::new() }; 3];
        CHARTS[difficulty as usize].get_or_init(|| Chart::new(side(difficulty)))
    }

    fn new(size: usize) -> Self {
        let mut cells = Vec::new();
        let starts_after = LENGTHS.map(|length| {
            for (line, start) in (0..size).flat_map(|a| (0..=size - length).map(move |b| (a, b))) {
                for (first, stride) in [(line * size + start, 1), (start * size + line, size)] {
                    let mut ship = Cells::default();
                    (0..length).for_each(|i| ship.insert(first + i * stride));
                    cells.push(ship);
                }
            }
            cells.len()
        });
        let starts = [0, starts_after[0], starts_after[1], starts_after[2]];
        let range = |kind: usize| starts[kind]..starts[kind + 1];
        let meeting = |kind: usize, with: &Cells| -> Vec<u16> {
            range(kind).filter(|p| cells[*p].meets(with)).map(|p| p as u16).collect()
        };
        let overlaps = [0, 1, 2].map(|kind| Lists::new(cells.len(), |p| meeting(kind, &cells[p])));
        let through = [0, 1, 2].map(|kind| {
            Lists::new(size * size, |cell| {
                let mut only = Cells::default();
                only.insert(cell);
                meeting(kind, &only)
            })
        });
        let mut weights = vec![1.0; cells.len()];
        for kind in 0..3 {
            for p in range(kind) {
                let kept = |later: usize| {
                    1.0 - overlaps[later].of(p).len() as f64 / (starts[later + 1] - starts[later]) as f64
                };
                // The two ships of three cells are alike to the sums: each has the (geometric) mean of both
                // weights.
                weights[p] = match kind {
                    0 => 1.0 / (kept(1) * kept(1) * kept(2)),
                    1 => 1.0 / (kept(1).sqrt() * kept(2)),
                    _ => 1.0,
                };
            }
        }
        Self { size, starts, cells, weights, overlaps, through, chosen: Chosen::default() }
    }

    fn range(&self, kind: usize) -> std::ops::Range<usize> {
        self.starts[kind]..self.starts[kind + 1]
    }
}

/// Sums over all fleets that agree with the shots.
#[derive(Debug, Clone)]
struct Sums {
    chart: &'static Chart,
    hits: Cells,
    shots: Cells,
    /// Weights of places without a shot, 0 for others.
    free: Vec<f64>,
    /// Whether a place has no miss.
    possible: Vec<bool>,
    /// By kind: the sum of `free` over the places of that kind that overlap a place.
    overlap: [Vec<f64>; 3],
    /// `free` and `overlap` less the places that meet the enumerated ships.
    left: Vec<f64>,
    left_overlap: [Vec<f64>; 3],
    /// Weight of all fleets with a ship at a place.
    fleets: Vec<f64>,
    /// By kind: the weight of the overlapping pairs that a place makes with places of that kind.
    pairs: [Vec<f64>; 3],
}

/// Ships that have been given a place.
#[derive(Debug, Clone, Copy, Default)]
struct Placed {
    places: [usize; 4],
    len: usize,
    cells: Cells,
    /// How many of each kind are left.
    left: [usize; 3],
}

impl Placed {
    fn with(&self, chart: &Chart, kind: usize, place: usize) -> Self {
        let mut more = *self;
        more.places[more.len] = place;
        more.len += 1;
        more.cells = more.cells.with(&chart.cells[place]);
        more.left[kind] -= 1;
        more
    }

    fn kinds_left(&self) -> impl Iterator<Item = usize> {
        let left = self.left;
        (0..3).flat_map(move |kind| std::iter::repeat_n(kind, left[kind]))
    }
}

impl Sums {
    fn new(chart: &'static Chart) -> Self {
        let none = vec![0.0; chart.cells.len()];
        Self {
            chart,
            hits: Cells::default(),
            shots: Cells::default(),
            free: chart.weights.clone(),
            possible: vec![true; chart.cells.len()],
            overlap: [none.clone(), none.clone(), none.clone()],
            left: none.clone(),
            left_overlap: [none.clone(), none.clone(), none.clone()],
            fleets: none.clone(),
            pairs: [none.clone(), none.clone(), none],
        }
    }

    fn reset(&mut self) {
        (self.hits, self.shots) = (Cells::default(), Cells::default());
        self.free.copy_from_slice(&self.chart.weights);
        self.possible.fill(true);
    }

    fn learn(&mut self, cell: usize, hit: bool) {
        self.shots.insert(cell);
        if hit {
            self.hits.insert(cell);
        }
        for place in self.chart.through.iter().flat_map(|lists| lists.of(cell)) {
            self.free[usize::from(*place)] = 0.0;
            self.possible[usize::from(*place)] &= hit;
        }
    }

    /// Weight of all fleets with a ship on a cell, for every cell.
    fn cells(&mut self) -> [f64; CELLS] {
        let chart = self.chart;
        for (lists, sums) in chart.overlaps.iter().zip(&mut self.overlap) {
            for (p, sum) in sums.iter_mut().enumerate() {
                *sum = lists.of(p).iter().map(|q| self.free[usize::from(*q)]).sum();
            }
        }
        self.fleets.fill(0.0);
        self.cover(self.hits, &Placed { left: FLEET, ..Placed::default() }, 1.0);
        let mut cells = [0.0; CELLS];
        for (cell, sum) in cells[..chart.size * chart.size].iter_mut().enumerate() {
            let places = chart.through.iter().flat_map(|lists| lists.of(cell));
            *sum = places.map(|p| self.fleets[usize::from(*p)]).sum();
        }
        cells
    }

    /// Adds the fleets that have these ships in place and cover `hits` with others. Returns their weight.
    fn cover(&mut self, hits: Cells, placed: &Placed, weight: f64) -> f64 {
        let chart = self.chart;
        let Some(hit) = hits.first() else {
            return self.finish(placed, weight);
        };
        if hits.len() > placed.kinds_left().map(|kind| LENGTHS[kind]).sum() {
            return 0.0;
        }
        let mut total = 0.0;
        for kind in (0..3).filter(|kind| placed.left[*kind] > 0) {
            for place in chart.through[kind].of(hit).iter().map(|p| usize::from(*p)) {
                let cells = &chart.cells[place];
                if self.possible[place] && !placed.cells.meets(cells) {
                    let more = placed.with(chart, kind, place);
                    total += self.cover_with(hits.without(cells), &more, place, weight);
                }
            }
        }
        total
    }

    fn cover_with(&mut self, hits: Cells, placed: &Placed, place: usize, weight: f64) -> f64 {
        let added = self.cover(hits, placed, weight * self.chart.weights[place]);
        self.fleets[place] += added;
        added
    }

    /// Adds the fleets that have these ships in place and all others on cells without a shot. Returns their
    /// weight.
    fn finish(&mut self, placed: &Placed, weight: f64) -> f64 {
        let mut kinds = [0; 4];
        let mut ships = 0;
        for kind in placed.kinds_left() {
            kinds[ships] = kind;
            ships += 1;
        }
        // Ships of one kind are alike: each fleet is met twice where both of three cells are free.
        let weight = if placed.left[1] == 2 { weight / 2.0 } else { weight };
        if ships > 0 {
            self.leave(placed);
        }
        match kinds[..ships] {
            [] => weight,
            [a] => self.one(a, weight),
            [a, b] => {
                self.two(b, a, weight);
                self.two(a, b, weight)
            }
            [a, b, c] => {
                self.three(c, [a, b], weight);
                self.three(b, [a, c], weight);
                self.three(a, [b, c], weight)
            }
            [a, b, c, d] => {
                self.four(d, [a, b, c], weight);
                self.four(c, [a, b, d], weight);
                self.four(b, [a, c, d], weight);
                self.four(a, [b, c, d], weight)
            }
            _ => 0.0,
        }
    }

    /// Removes what meets the ships in place from `left` and `left_overlap`, for the kinds that are left.
    fn leave(&mut self, placed: &Placed) {
        let chart = self.chart;
        for kind in (0..3).filter(|kind| placed.left[*kind] > 0) {
            let range = chart.range(kind);
            self.left[range.clone()].copy_from_slice(&self.free[range]);
            self.left_overlap[kind].copy_from_slice(&self.overlap[kind]);
            for ship in &placed.places[..placed.len] {
                for gone in chart.overlaps[kind].of(*ship).iter().map(|p| usize::from(*p)) {
                    let weight = std::mem::take(&mut self.left[gone]);
                    if weight > 0.0 {
                        for other in (0..3).filter(|kind| placed.left[*kind] > 0) {
                            for q in chart.overlaps[other].of(gone) {
                                self.left_overlap[kind][usize::from(*q)] -= weight;
                            }
                        }
                    }
                }
            }
        }
    }

    fn sum_left(&self, kind: usize) -> f64 {
        self.left[self.chart.range(kind)].iter().sum()
    }

    fn one(&mut self, kind: usize, weight: f64) -> f64 {
        let mut total = 0.0;
        for p in self.chart.range(kind) {
            self.fleets[p] += weight * self.left[p];
            total += weight * self.left[p];
        }
        total
    }

    /// Two ships left, `kind` and `other`: adds the fleets of the first.
    fn two(&mut self, kind: usize, other: usize, weight: f64) -> f64 {
        let all = self.sum_left(other);
        let mut total = 0.0;
        for p in self.chart.range(kind) {
            let sum = weight * self.left[p] * (all - self.left_overlap[other][p]).max(0.0);
            self.fleets[p] += sum;
            total += sum;
        }
        total
    }

    /// Weighs the overlapping pairs of these kinds.
    fn pair(&mut self, [c, d]: [usize; 2]) -> f64 {
        let mut all = 0.0;
        for p in self.chart.range(c) {
            self.pairs[d][p] = self.left[p] * self.left_overlap[d][p];
            all += self.pairs[d][p];
        }
        for p in self.chart.range(d) {
            self.pairs[c][p] = self.left[p] * self.left_overlap[c][p];
        }
        all
    }

    /// The overlapping pairs of these kinds that avoid place `b`, of `all` that there are.
    fn avoiding(&self, b: usize, [c, d]: [usize; 2], all: f64) -> f64 {
        let met = |kind: usize, other: usize| -> f64 {
            self.chart.overlaps[kind].of(b).iter().map(|p| self.pairs[other][usize::from(*p)]).sum()
        };
        all - (met(c, d) + met(d, c))
    }

    /// The overlapping pairs of these kinds of which both places meet place `b`.
    fn meeting(&self, b: usize, [c, d]: [usize; 2]) -> f64 {
        let chart = self.chart;
        let mut sum = 0.0;
        for p in chart.overlaps[c].of(b).iter().map(|p| usize::from(*p)).filter(|p| self.left[*p] > 0.0) {
            let others = chart.overlaps[d].of(p).iter().map(|q| usize::from(*q));
            let met = others.filter(|q| chart.cells[*q].meets(&chart.cells[b])).map(|q| self.left[q]);
            sum += self.left[p] * met.sum::<f64>();
        }
        sum
    }

    /// Three ships left: adds the fleets of `kind`.
    fn three(&mut self, kind: usize, [c, d]: [usize; 2], weight: f64) -> f64 {
        let (all_c, all_d) = (self.sum_left(c), self.sum_left(d));
        let overlapping = self.pair([c, d]);
        let mut total = 0.0;
        for b in self.chart.range(kind) {
            if self.left[b] == 0.0 {
                continue;
            }
            let free = (all_c - self.left_overlap[c][b]) * (all_d - self.left_overlap[d][b]);
            let sum = weight * self.left[b] * (free - self.avoiding(b, [c, d], overlapping)).max(0.0);
            self.fleets[b] += sum;
            total += sum;
        }
        total
    }

    /// Four ships left: adds the fleets of `kind`.
    fn four(&mut self, kind: usize, [c, d, e]: [usize; 3], weight: f64) -> f64 {
        let pairs = [[c, d], [c, e], [d, e]];
        let overlapping = pairs.map(|pair| self.pair(pair));
        let all = [0, 1, 2].map(|kind| self.sum_left(kind));
        let mut total = 0.0;
        for b in self.chart.range(kind) {
            if self.left[b] == 0.0 {
                continue;
            }
            let free = [0, 1, 2].map(|kind| (all[kind] - self.left_overlap[kind][b]).max(0.0));
            let mut sum = weight * self.left[b] * free[c] * free[d] * free[e];
            for ([c, d], overlapping) in pairs.into_iter().zip(overlapping) {
                if sum > 0.0 {
                    let avoiding = self.avoiding(b, [c, d], overlapping) + self.meeting(b, [c, d]);
                    sum *= (1.0 - avoiding / (free[c] * free[d])).max(0.0);
                }
            }
            self.fleets[b] += sum;
            total += sum;
        }
        total
    }
}

/// A player that shoots at the cell where a ship is most likely.
#[derive(Debug, Clone)]
pub struct BattleshipPlayer {
    sums: Sums,
    /// The cell shot at last.
    last: Option<usize>,
    /// Cells as likely as the one that the player chose last.
    ties: Cells,
}

impl BattleshipPlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        Self { sums: Sums::new(Chart::of(difficulty)), last: None, ties: Cells::default() }
    }

    /// The cell where a ship is most likely, and all where one is as likely.
    fn likeliest(&mut self) -> (usize, Cells) {
        let cells = self.sums.cells();
        let untried =
            || (0..self.sums.chart.size * self.sums.chart.size).filter(|i| !self.sums.shots.has(*i));
        // Cells that differ by rounding only are equally likely; the lowest of them is chosen.
        let more = |i: usize, than: usize| cells[i] > cells[than] * (1.0 + 1e-9);
        let cell = untried().reduce(|best, i| if more(i, best) { i } else { best }).unwrap_or(0);
        let mut ties = Cells::default();
        untried().filter(|i| !more(cell, *i)).for_each(|i| ties.insert(i));
        (cell, ties)
    }
}

impl Player for BattleshipPlayer {
    fn reset(&mut self) {
        self.sums.reset();
        self.last = None;
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        // A second shot at a cell shows nothing.
        if let Some(cell) = self.last.filter(|cell| !self.sums.shots.has(*cell)) {
            self.sums.learn(cell, observation.ints[0] == 1);
        }
        let board = (self.sums.hits, self.sums.shots);
        let (cell, ties) = self.sums.chart.chosen.get(board, || self.likeliest());
        (self.last, self.ties) = (Some(cell), ties);
        let size = self.sums.chart.size;
        action.ints[0] = (cell / size) as i32;
        action.ints[1] = (cell % size) as i32;
    }

    fn took(&mut self, action: Values<'_>) {
        self.last = Some(action.ints[0] as usize * self.sums.chart.size + action.ints[1] as usize);
    }

    /// All cells where a ship is as likely as where the player shoots.
    fn accept(&mut self, choices: &mut [bool]) {
        choices.iter_mut().enumerate().for_each(|(cell, choice)| *choice |= self.ties.has(cell));
    }
}

#[cfg(test)]
mod tests {
    use elmur_rng::Rng;

    use super::*;
    use crate::popgym::Battleship;
    use crate::popgym::battleship::SHIPS;
    use crate::popgym::trace::tests::mean_return;

    /// The sums of `Sums::cells` by going through all fleets.
    fn by_hand(sums: &Sums) -> Vec<f64> {
        let chart = sums.chart;
        let mut cells = vec![0.0; chart.size * chart.size];
        let places = |kind| chart.range(kind).filter(|p| sums.possible[*p]);
        for a in places(0) {
            for b in places(1).filter(|b| !chart.cells[*b].meets(&chart.cells[a])) {
                let two = chart.cells[a].with(&chart.cells[b]);
                for c in places(1).filter(|c| *c > b && !chart.cells[*c].meets(&two)) {
                    let three = two.with(&chart.cells[c]);
                    for d in places(2).filter(|d| !chart.cells[*d].meets(&three)) {
                        let all = three.with(&chart.cells[d]);
                        if sums.hits.without(&all) == Cells::default() {
                            let weight: f64 = [a, b, c, d].iter().map(|p| chart.weights[*p]).product();
                            (0..cells.len()).filter(|i| all.has(*i)).for_each(|i| cells[i] += weight);
                        }
                    }
                }
            }
        }
        cells
    }

    /// Sums after misses outside of the rectangle of these rows and columns, and the given shots.
    fn after(rows: usize, columns: usize, shots: &[(usize, bool)]) -> Sums {
        let mut sums = Sums::new(Chart::of(Difficulty::Easy));
        (0..64).filter(|i| i / 8 >= rows || i % 8 >= columns).for_each(|i| sums.learn(i, false));
        shots.iter().for_each(|(cell, hit)| sums.learn(*cell, *hit));
        sums
    }

    fn largest_error(mut sums: Sums) -> f64 {
        let (fast, slow) = (sums.cells(), by_hand(&sums));
        let (fast_all, slow_all) = (fast.iter().sum::<f64>() / 12.0, slow.iter().sum::<f64>() / 12.0);
        assert!(slow_all > 0.0);
        slow.iter()
            .zip(fast)
            .map(|(slow, fast)| (slow / slow_all - fast / fast_all).abs())
            .fold(0.0, f64::max)
    }

    #[test]
    fn chances_are_those_of_all_fleets() {
        // None, one or two ships are free, in every mixture of kinds.
        for shots in [
            &[(0, true), (36, true), (20, false)][..],
            &[(0, true), (4, true), (32, true), (18, false)],
            &[(0, true), (1, true), (2, true), (3, true), (16, true), (18, false)],
            &[(0, true), (9, true), (18, true), (27, true), (3, false)],
        ] {
            let error = largest_error(after(5, 5, shots));
            assert!(error < 1e-12, "{shots:?}: {error}");
        }
        // Three or four ships free: pairs that meet the third at both ends are left out, here on a fifth of
        // the board.
        for shots in [&[(9, true)][..], &[(12, false)]] {
            let error = largest_error(after(5, 5, shots));
            assert!(error < 0.05, "{shots:?}: {error}");
        }
    }

    /// The chances before the first shot are those of boards as they are drawn.
    #[test]
    fn weights_are_those_of_ships_placed_one_after_the_other() {
        let (mut counts, rounds) = ([0u32; 64], 40_000u32);
        for seed in 0..rounds {
            let board = super::super::place(8, &SHIPS, &mut Rng::new(seed.into(), 2));
            (0..64).for_each(|i| counts[i] += u32::from(board[i / 8] >> (i % 8) & 1));
        }
        let cells = Sums::new(Chart::of(Difficulty::Easy)).cells();
        let all = cells.iter().sum::<f64>() / 12.0;
        let (n, chance) = (f64::from(rounds), |sum: f64| sum / all);
        let squared = |(count, p): (&u32, f64)| (f64::from(*count) - n * p).powi(2) / (n * p * (1.0 - p));
        let chi: f64 = counts.iter().zip(cells.map(chance)).map(squared).sum();
        assert!(chi < 110.0, "{chi}"); // of 64 cells: passed once in 3,000
    }

    #[test]
    fn the_player_finds_the_ships() {
        // Expected: means of 4,000 episodes, with a standard deviation of 0.10.
        let cases =
            [(Difficulty::Easy, 200, 0.635), (Difficulty::Medium, 60, 0.656), (Difficulty::Hard, 20, 0.664)];
        for (difficulty, episodes, expected) in cases {
            let (mut env, mut player) = (Battleship::new(difficulty), BattleshipPlayer::new(difficulty));
            let (mean, _) = mean_return(&mut env, &mut player, 0..episodes);
            let error = 0.105 / (episodes as f64).sqrt();
            assert!((mean - expected).abs() < 4.0 * error, "{difficulty:?}: {mean} +- {error}");
        }
    }

    #[test]
    fn the_player_forgets_the_last_episode_and_never_shoots_twice() {
        let mut player = BattleshipPlayer::new(Difficulty::Easy);
        let mut play = |hits: u64| -> Vec<[i32; 2]> {
            player.reset();
            let mut seen = 0;
            (0..64)
                .map(|i| {
                    let mut shot = [0; 2];
                    player.act(Values::ints(&[seen]), ValuesMut::ints(&mut shot));
                    seen = (hits >> i & 1) as i32;
                    shot
                })
                .collect()
        };
        let (first, other) = (play(0b1001_1000), play(0b1_0000));
        assert_ne!(first, other);
        assert_eq!(play(0b1001_1000), first);
        let mut cells = first;
        cells.sort_unstable();
        cells.dedup();
        assert_eq!(cells.len(), 64);
    }

    /// What others shoot at counts as the player's own shots do, and a second shot at a hit does not undo it.
    #[test]
    fn foreign_shots_are_observations() {
        let mut player = BattleshipPlayer::new(Difficulty::Easy);
        let mut shot = [0; 2];
        player.reset();
        for (seen, foreign) in [(0, [3, 3]), (1, [3, 3]), (0, [3, 5]), (1, [7, 7])] {
            player.act(Values::ints(&[seen]), ValuesMut::ints(&mut shot));
            player.took(Values::ints(&foreign));
        }
        player.act(Values::ints(&[0]), ValuesMut::ints(&mut shot));
        let mut sums = Sums::new(Chart::of(Difficulty::Easy));
        [(27, true), (29, true), (63, false)].iter().for_each(|(cell, hit)| sums.learn(*cell, *hit));
        assert!(player.sums.hits == sums.hits && player.sums.shots == sums.shots);
        assert!(player.sums.cells() == sums.cells());
        // Between both hits.
        assert_eq!(shot, [3, 4]);
    }

    /// Remembered choices are those that would be made again.
    #[test]
    fn remembered_choices_are_those_of_the_sums() {
        let mut rng = Rng::new(5, 0);
        for _ in 0..40 {
            let mut player = BattleshipPlayer::new(Difficulty::Easy);
            let (mut shot, mut seen) = ([0; 2], 0);
            for _ in 0..Chosen::SHOTS + 2 {
                player.act(Values::ints(&[seen]), ValuesMut::ints(&mut shot));
                let (cell, ties) = player.likeliest();
                assert_eq!((player.last, player.ties), (Some(cell), ties));
                if rng.below(3) == 0 {
                    player.took(Values::ints(&[rng.below(8) as i32, rng.below(8) as i32]));
                }
                seen = i32::from(rng.below(4) == 0 && player.sums.hits.len() < 2);
            }
        }
    }

    #[test]
    fn cells_that_are_alike_are_equally_good() {
        let mut player = BattleshipPlayer::new(Difficulty::Easy);
        let mut shot = [0; 2];
        player.act(Values::ints(&[0]), ValuesMut::ints(&mut shot));
        let mut choices = [false; 64];
        player.accept(&mut choices);
        let mirrored = |i: usize| [i, 7 - i];
        let [row, column] = shot.map(|i| i as usize);
        let mut alike: Vec<usize> = [[row, column], [column, row]]
            .into_iter()
            .flat_map(|[r, c]| mirrored(r).into_iter().flat_map(move |r| mirrored(c).map(|c| 8 * r + c)))
            .collect();
        alike.sort_unstable();
        alike.dedup();
        assert_eq!((0..64).filter(|i| choices[*i]).collect::<Vec<_>>(), alike);
    }
}
