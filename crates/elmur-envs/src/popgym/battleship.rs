//! Battleship: find every cell of four hidden ships, of 2, 3, 3 and 4 cells, on a board of 8, 10 or 12 cells
//! a side.
//!
//! Observation: 1 if the last shot hit something new, else 0 (also for a cell shot at before, and at the
//! start). Nothing tells that a ship is sunk. Action: row and column. A hit pays 1/12; any other shot costs
//! 1 / (cells - 12), so that sweeping the whole board sums to 0. The episode terminates with the twelfth hit
//! and is truncated after as many shots as there are cells; both can fall on the same shot.
//!
//! The ships are placed in that order, each uniformly over the places that are still free for it; ships may
//! touch.

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_rng::Rng;
use serde::Deserialize;

use super::replay::{cell, episodes, impossible};
use super::task::Difficulty;
use crate::env::Step;
use crate::error::{Error, Result};

mod player;
pub use player::BattleshipPlayer;

/// Lengths of the ships, in the order in which they are placed.
const SHIPS: [usize; 4] = [2, 3, 3, 4];
/// Cells of all ships.
const TARGETS: u32 = 12;

/// One bit per cell: bit c of entry r. Sixteen rows, so that no index needs a check.
type Board = [u16; 16];

fn side(difficulty: Difficulty) -> usize {
    difficulty.pick([8, 10, 12])
}

/// The hidden state of [`Battleship`].
#[derive(Debug, Clone, Deserialize)]
pub struct Ships {
    /// Rows of the board, with 0 for water and 1 for a ship.
    pub board: Vec<Vec<u8>>,
}

/// Battleship: find all cells of four hidden ships with few shots.
#[derive(Debug, Clone)]
pub struct Battleship {
    spaces: Spaces,
    size: usize,
    ships: Board,
    shot: Board,
    hits_left: u32,
    /// Shots until the episode is truncated; 0 without a running episode.
    shots_left: u32,
    miss: f64,
}

impl Battleship {
    /// The task of this difficulty: 8, 10 or 12 rows and columns.
    pub fn new(difficulty: Difficulty) -> Self {
        let size = side(difficulty);
        let spaces = Spaces {
            observation: Space::Discrete { n: 2 },
            action: Space::MultiDiscrete { sizes: vec![size, size] },
        };
        let miss = -1.0 / ((size * size) as f64 - f64::from(TARGETS));
        Self { spaces, size, ships: [0; 16], shot: [0; 16], hits_left: 0, shots_left: 0, miss }
    }

    fn deal(&mut self, rng: &mut Rng) {
        self.ships = place(self.size, &SHIPS, rng);
    }

    fn take(&mut self, hidden: &Ships) -> Result<()> {
        let (rows, size) = (&hidden.board, self.size);
        if rows.len() != size || rows.iter().any(|row| row.len() != size || row.iter().any(|cell| *cell > 1))
        {
            return impossible(format!("a board of {size} rows of {size} zeros and ones"), "another");
        }
        let mut board: Board = [0; 16];
        for (bits, row) in board.iter_mut().zip(rows) {
            *bits = row.iter().enumerate().map(|(c, cell)| u16::from(*cell) << c).sum();
        }
        let cells: u32 = board.iter().map(|bits| bits.count_ones()).sum();
        if cells != TARGETS || !covers(&board, &SHIPS) {
            return impossible("ships of 2, 3, 3 and 4 cells", format!("other shapes, {cells} cells"));
        }
        self.ships = board;
        Ok(())
    }

    fn start(&mut self, observation: ValuesMut<'_>) {
        self.shot = [0; 16];
        self.hits_left = TARGETS;
        self.shots_left = (self.size * self.size) as u32;
        observation.ints[0] = 0;
    }

    #[inline]
    fn play(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        if self.shots_left == 0 {
            return Err(Error::Finished);
        }
        let (row, column) = cell(action, [self.size; 2], "shot")?;
        let (row, bit) = (row & 15, 1u16 << (column & 15));
        let hit = self.ships[row] & !self.shot[row] & bit != 0;
        self.shot[row] |= bit;
        self.hits_left -= u32::from(hit);
        self.shots_left -= 1;
        observation.ints[0] = i32::from(hit);
        let (terminated, truncated) = (self.hits_left == 0, self.shots_left == 0);
        if terminated {
            self.shots_left = 0;
        }
        let reward = if hit { 1.0 / f64::from(TARGETS) } else { self.miss };
        Ok(Step { reward, terminated, truncated, ..Step::default() })
    }
}

episodes!(Battleship, Ships, env => env.spaces);

/// Draws a board. Places are drawn uniformly until a free one comes, which makes every free place equally
/// likely.
fn place(size: usize, ships: &[usize], rng: &mut Rng) -> Board {
    let mut board: Board = [0; 16];
    for length in ships {
        loop {
            let line = rng.below(2 * size as u32) as usize;
            let start = rng.below((size - length + 1) as u32) as usize;
            let ship: u16 = (1 << length) - 1;
            if line < size {
                if board[line & 15] & (ship << start) == 0 {
                    board[line & 15] |= ship << start;
                    break;
                }
            } else {
                let (bit, rows) = (1u16 << (line - size), start..start + length);
                if rows.clone().all(|row| board[row & 15] & bit == 0) {
                    rows.for_each(|row| board[row & 15] |= bit);
                    break;
                }
            }
        }
    }
    board
}

/// Whether the ships of these lengths can cover exactly the given cells.
fn covers(board: &Board, ships: &[usize]) -> bool {
    // The first cell must be the upper or left end of some ship.
    let Some(row) = board.iter().position(|bits| *bits != 0) else {
        return ships.is_empty();
    };
    let column = board[row].trailing_zeros();
    ships.iter().enumerate().any(|(i, length)| {
        let rest: Vec<usize> = ships.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, n)| *n).collect();
        let across = (((1u32 << length) - 1) << column) as u16;
        let along = board[row..].iter().take(*length).filter(|bits| **bits >> column & 1 == 1).count();
        let without = |rows: usize, bits: u16| {
            let mut left = *board;
            left[row..].iter_mut().take(rows).for_each(|row| *row &= !bits);
            covers(&left, &rest)
        };
        let fits = across.count_ones() as usize == *length && board[row] & across == across;
        (fits && without(1, across)) || (along == *length && without(*length, 1 << column))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Env;
    use crate::popgym::Replay;
    use crate::popgym::trace::tests::check_family;

    fn room(seen: &mut [i32; 1]) -> ValuesMut<'_> {
        ValuesMut::ints(seen)
    }

    fn shoot(env: &mut Battleship, ints: &[i32]) -> Result<(Step, i32)> {
        let mut seen = [7];
        env.step(Values::ints(ints), room(&mut seen)).map(|step| (step, seen[0]))
    }

    fn rows(board: &[&str]) -> Ships {
        Ships { board: board.iter().map(|row| row.bytes().map(|b| u8::from(b == b'#')).collect()).collect() }
    }

    const EXAMPLE: [&str; 8] =
        ["##......", "###.....", "###.....", "####....", "........", "........", "........", "........"];

    #[test]
    fn traces_replay() {
        check_family("Battleship", Battleship::new);
    }

    #[test]
    fn shots_pay_once_and_the_twelfth_hit_ends() {
        let mut env = Battleship::new(Difficulty::Easy);
        env.begin(&rows(&EXAMPLE), room(&mut [0])).unwrap();
        let (step, seen) = shoot(&mut env, &[0, 0]).unwrap();
        assert_eq!((step, seen), (Step { reward: 1.0 / 12.0, ..Step::default() }, 1));
        for again in [[0, 0], [7, 7], [7, 7]] {
            let (step, seen) = shoot(&mut env, &again).unwrap();
            assert_eq!((step, seen), (Step { reward: -1.0 / 52.0, ..Step::default() }, 0));
        }
        let targets =
            [[0, 1], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2], [3, 0], [3, 1], [3, 2], [3, 3]];
        for (i, target) in targets.iter().enumerate() {
            let (step, _) = shoot(&mut env, target).unwrap();
            assert_eq!((step.terminated, step.truncated), (i == 10, false));
        }
        assert!(matches!(shoot(&mut env, &[5, 5]), Err(Error::Finished)));
    }

    #[test]
    fn a_sweep_that_ends_on_the_last_cell_is_terminated_and_truncated_and_pays_nothing() {
        let mut env = Battleship::new(Difficulty::Easy);
        env.begin(&rows(&EXAMPLE), room(&mut [0])).unwrap();
        let sweep: Vec<Step> = (0..64).rev().map(|i| shoot(&mut env, &[i / 8, i % 8]).unwrap().0).collect();
        assert!(sweep[..63].iter().all(|step| !step.done()));
        assert!(sweep[63].terminated && sweep[63].truncated);
        assert!(sweep.iter().map(|step| step.reward).sum::<f64>().abs() < 1e-12);
    }

    #[test]
    fn misuse_is_an_error() {
        let mut env = Battleship::new(Difficulty::Easy);
        assert!(matches!(shoot(&mut env, &[0, 0]), Err(Error::Finished)));
        env.reset(0, room(&mut [0])).unwrap();
        for bad in [&[8, 0][..], &[0, 8], &[-1, 0], &[0, i32::MIN], &[0], &[], &[0, 0, 0]] {
            assert!(
                matches!(shoot(&mut env, bad), Err(Error::Base(elmur_base::Error::Space { .. }))),
                "{bad:?}"
            );
        }
        let mut last = Step::default();
        for _ in 0..64 {
            last = shoot(&mut env, &[0, 0]).unwrap().0;
        }
        assert!(last.truncated && !last.terminated);
        assert!(matches!(shoot(&mut env, &[0, 0]), Err(Error::Finished)));
    }

    #[test]
    fn boards_that_hold_other_ships_are_refused() {
        let mut env = Battleship::new(Difficulty::Easy);
        let mut begin = |hidden: &Ships| env.begin(hidden, room(&mut [0]));
        begin(&rows(&EXAMPLE)).unwrap();
        let change = |row: usize, with: &'static str| {
            let mut board = EXAMPLE;
            board[row] = with;
            rows(&board)
        };
        // Crossing and touching ships in one lump, read in the only way that works.
        begin(&rows(&[
            "...#....", "...#....", "..##....", "..##....", "..#.....", "........", "####....", "........",
        ]))
        .unwrap_err();
        begin(&rows(&[
            "...#....", "...#....", "..##....", "..#.....", "..#.....", "........", "####....", "......##",
        ]))
        .unwrap();
        for bad in [
            change(0, "........"),
            change(0, "#......#"),
            change(3, "#.#.#.#."),
            change(0, "##.....#"),
            change(0, "##....."),
            change(0, "##......."),
            Ships { board: vec![] },
            Ships { board: vec![vec![1; 8]; 9] },
            Ships { board: vec![vec![2; 8]; 8] },
        ] {
            assert!(begin(&bad).unwrap_err().to_string().contains("hidden state"), "{bad:?}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_board() {
        let mut env = Battleship::new(Difficulty::Hard);
        let mut boards = |seed| {
            env.reset(seed, room(&mut [0])).unwrap();
            env.ships
        };
        let first = boards(3);
        assert_ne!(boards(4), first);
        assert_eq!(boards(3), first);
    }

    /// The two-cell ship is uniform over its 112 places and the next one over those that it leaves: the
    /// chances of every cell follow from counting.
    #[test]
    fn ships_are_placed_one_after_the_other_each_uniformly() {
        let places = |length: usize| -> Vec<u64> {
            let line = |start: usize, step: usize| (0..length).map(|i| 1u64 << (start + i * step)).sum();
            let fits = (0..8).flat_map(|a| (0..=8 - length).map(move |b| (a, b)));
            fits.flat_map(|(a, b)| [line(a * 8 + b, 1), line(b * 8 + a, 8)]).collect()
        };
        let (two, three) = (places(2), places(3));
        assert_eq!((two.len(), three.len()), (112, 96));
        let mut expected = [0.0; 64];
        for a in &two {
            let free: Vec<u64> = three.iter().copied().filter(|b| a & b == 0).collect();
            for b in &free {
                let chance = 1.0 / (112 * free.len()) as f64;
                (0..64).filter(|i| (a | b) >> i & 1 == 1).for_each(|i| expected[i] += chance);
            }
        }
        let (mut counts, rounds) = ([0u32; 64], 60_000u64);
        for seed in 0..rounds {
            let board = place(8, &SHIPS[..2], &mut Rng::new(seed, 0));
            (0..64).for_each(|i| counts[i] += u32::from(board[i / 8] >> (i % 8) & 1));
        }
        for (i, (count, p)) in counts.iter().zip(expected).enumerate() {
            let n = rounds as f64;
            let z = (f64::from(*count) - n * p) / (n * p * (1.0 - p)).sqrt();
            assert!(z.abs() < 4.0, "cell {i}: {z}");
        }
    }
}
