//! MineSweeper: uncover every cell without a mine; 4 x 4 cells with 2 mines, 6 x 6 with 6 or 8 x 8 with 10.
//!
//! Observation: the number of mines in the 3 x 3 block around the clicked cell, that cell included; 0 at the
//! start. Action: row and column. There are L = cells - mines cells to find. A new clear cell pays 1/L, a
//! mine costs 0.5 + 1/L and ends the episode, a cell viewed before costs 0.5 / (L - 2). The episode
//! terminates when all clear cells are found and is truncated at step L, so that one wasted click makes it
//! impossible to find them all.
//!
//! In 1.0.6 it is truncated at step L + 1, also when it terminates on that step.

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_rng::Rng;
use serde::Deserialize;

use super::replay::{cell, episodes, impossible};
use super::task::{Difficulty, Version};
use crate::env::Step;
use crate::error::{Error, Result};

mod chances;
mod endgame;
mod player;
mod view;
pub use player::MineSweeperPlayer;

/// Sizes and rewards of a difficulty.
#[derive(Debug, Clone, Copy)]
struct Rules {
    size: usize,
    cells: usize,
    mines: usize,
    /// Clear cells, which is also the number of steps.
    clear: usize,
    /// Rewards: of a new clear cell, a mine and a cell viewed before.
    found: f64,
    blown: f64,
    wasted: f64,
}

impl Rules {
    fn new(difficulty: Difficulty) -> Self {
        let (size, mines) = difficulty.pick([(4, 2), (6, 6), (8, 10)]);
        let cells = size * size;
        let clear = cells - mines;
        let found = 1.0 / clear as f64;
        let (blown, wasted) = (-(0.5 + found), -0.5 / (clear - 2) as f64);
        Self { size, cells, mines, clear, found, blown, wasted }
    }

    /// Step on which the episode is truncated.
    fn last_step(&self, version: Version) -> usize {
        self.clear + usize::from(version == Version::V106)
    }

    /// All cells, one bit each.
    fn board(&self) -> u64 {
        u64::MAX >> (64 - self.cells)
    }

    /// The 3 x 3 block around every cell, one bit per cell, row by row.
    fn blocks(&self) -> [u64; 64] {
        std::array::from_fn(|i| {
            let near = |j: usize| {
                (i / self.size).abs_diff(j / self.size) <= 1 && (i % self.size).abs_diff(j % self.size) <= 1
            };
            (0..self.cells).filter(|j| i < self.cells && near(*j)).map(|j| 1 << j).sum()
        })
    }
}

/// The hidden state of [`MineSweeper`].
#[derive(Debug, Clone, Deserialize)]
pub struct Mines {
    /// Numbers of the cells with a mine, counted row by row.
    pub mines_flat: Vec<u8>,
}

/// MineSweeper: uncover every cell without a mine.
#[derive(Debug, Clone)]
pub struct MineSweeper {
    spaces: Spaces,
    rules: Rules,
    /// Step on which the episode is truncated.
    last_step: u32,
    /// Whether an episode that terminates on its last step is not truncated as well.
    masked: bool,
    blocks: [u64; 64],
    mines: u64,
    viewed: u64,
    found: u32,
    steps: u32,
    running: bool,
}

impl MineSweeper {
    /// The task of this difficulty, by the rules of this version.
    pub fn new(difficulty: Difficulty, version: Version) -> Self {
        let rules = Rules::new(difficulty);
        let spaces = Spaces {
            observation: Space::Discrete { n: (rules.mines + 1).min(10) },
            action: Space::MultiDiscrete { sizes: vec![rules.size, rules.size] },
        };
        let masked = version == Version::V107;
        Self {
            spaces,
            rules,
            last_step: rules.last_step(version) as u32,
            masked,
            blocks: rules.blocks(),
            mines: 0,
            viewed: 0,
            found: 0,
            steps: 0,
            running: false,
        }
    }

    fn deal(&mut self, rng: &mut Rng) {
        let mut mines = 0u64;
        for _ in 0..self.rules.mines {
            // A cell that has no mine yet.
            mines |= loop {
                let mine = 1 << rng.below(self.rules.cells as u32);
                if mines & mine == 0 {
                    break mine;
                }
            };
        }
        self.mines = mines;
    }

    fn take(&mut self, hidden: &Mines) -> Result<()> {
        let Rules { cells, mines, .. } = self.rules;
        let on_board = hidden.mines_flat.iter().filter(|cell| usize::from(**cell) < cells);
        let set = on_board.fold(0u64, |set, cell| set | 1 << cell);
        if hidden.mines_flat.len() != mines || set.count_ones() as usize != mines {
            return impossible(
                format!("{mines} different cells from 0 to {}", cells - 1),
                format!("{} mines on {} cells", hidden.mines_flat.len(), set.count_ones()),
            );
        }
        self.mines = set;
        Ok(())
    }

    fn start(&mut self, observation: ValuesMut<'_>) {
        (self.viewed, self.found, self.steps, self.running) = (0, 0, 0, true);
        observation.ints[0] = 0;
    }

    #[inline]
    fn play(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        if !self.running {
            return Err(Error::Finished);
        }
        let (row, column) = cell(action, [self.rules.size; 2], "cell")?;
        let index = (row * self.rules.size + column) & 63;
        let bit = 1u64 << index;
        let mut terminated = false;
        let reward = if self.viewed & bit != 0 {
            self.rules.wasted
        } else if self.mines & bit != 0 {
            terminated = true;
            self.rules.blown
        } else {
            self.found += 1;
            terminated = self.found == self.rules.clear as u32;
            self.rules.found
        };
        self.viewed |= bit;
        self.steps += 1;
        let truncated = self.steps >= self.last_step && !(terminated && self.masked);
        self.running = !(terminated || truncated);
        observation.ints[0] = (self.mines & self.blocks[index]).count_ones() as i32;
        Ok(Step { reward, terminated, truncated, ..Step::default() })
    }
}

episodes!(MineSweeper, Mines, env => env.spaces);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Env;
    use crate::popgym::Replay;
    use crate::popgym::trace::tests::{check_family, check_family_v106};

    fn room(seen: &mut [i32; 1]) -> ValuesMut<'_> {
        ValuesMut::ints(seen)
    }

    fn click(env: &mut MineSweeper, ints: &[i32]) -> Result<(Step, i32)> {
        let mut seen = [-1];
        env.step(Values::ints(ints), room(&mut seen)).map(|step| (step, seen[0]))
    }

    /// An Easy episode with mines in the first two cells.
    fn easy(version: Version) -> MineSweeper {
        let mut env = MineSweeper::new(Difficulty::Easy, version);
        env.begin(&Mines { mines_flat: vec![1, 0] }, room(&mut [7])).unwrap();
        env
    }

    #[test]
    fn traces_replay() {
        check_family("MineSweeper", |difficulty| MineSweeper::new(difficulty, Version::V107));
        check_family_v106("MineSweeper", |difficulty| MineSweeper::new(difficulty, Version::V106));
    }

    #[test]
    fn clicks_show_the_block_and_pay() {
        let mut env = easy(Version::V107);
        let running = |reward| Step { reward, ..Step::default() };
        assert_eq!(click(&mut env, &[1, 0]).unwrap(), (running(1.0 / 14.0), 2));
        assert_eq!(click(&mut env, &[1, 2]).unwrap(), (running(1.0 / 14.0), 1));
        assert_eq!(click(&mut env, &[1, 0]).unwrap(), (running(-0.5 / 12.0), 2));
        assert_eq!(click(&mut env, &[3, 0]).unwrap(), (running(1.0 / 14.0), 0));
        let (step, seen) = click(&mut env, &[0, 0]).unwrap();
        assert_eq!(
            (step, seen),
            (Step { reward: -0.5 - 1.0 / 14.0, terminated: true, ..Step::default() }, 2)
        );
        assert!(matches!(click(&mut env, &[3, 3]), Err(Error::Finished)));
    }

    /// Flags of the last click after `wasted` wasted ones and a sweep over the clear cells.
    fn flags_of_a_sweep(version: Version, wasted: usize) -> (usize, bool, bool) {
        let mut env = easy(version);
        let clicks = std::iter::repeat_n(2, wasted).chain(2..16);
        for (i, cell) in clicks.enumerate() {
            let (step, _) = click(&mut env, &[cell / 4, cell % 4]).unwrap();
            if step.done() {
                return (i + 1, step.terminated, step.truncated);
            }
        }
        (0, false, false)
    }

    #[test]
    fn a_wasted_click_costs_the_last_cell_and_versions_differ_in_when() {
        assert_eq!(flags_of_a_sweep(Version::V107, 0), (14, true, false));
        assert_eq!(flags_of_a_sweep(Version::V106, 0), (14, true, false));
        // The first of two clicks on a cell is not wasted.
        assert_eq!(flags_of_a_sweep(Version::V107, 1), (14, false, true));
        assert_eq!(flags_of_a_sweep(Version::V106, 1), (15, true, true));
        assert_eq!(flags_of_a_sweep(Version::V106, 2), (15, false, true));
    }

    #[test]
    fn misuse_is_an_error() {
        let mut env = MineSweeper::new(Difficulty::Medium, Version::V107);
        assert!(matches!(click(&mut env, &[0, 0]), Err(Error::Finished)));
        env.reset(0, room(&mut [0])).unwrap();
        for bad in [&[6, 0][..], &[0, 6], &[-1, 0], &[0, i32::MIN], &[0], &[], &[0, 0, 0]] {
            assert!(
                matches!(click(&mut env, bad), Err(Error::Base(elmur_base::Error::Space { .. }))),
                "{bad:?}"
            );
        }
        for bad in [&[0, 1, 2, 3, 4][..], &[0, 1, 2, 3, 4, 4], &[0, 1, 2, 3, 4, 36], &[0; 300], &[255; 6]] {
            let error = env.begin(&Mines { mines_flat: bad.to_vec() }, room(&mut [0])).unwrap_err();
            assert!(error.to_string().contains("6 different cells from 0 to 35"), "{error}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_mines() {
        let mut env = MineSweeper::new(Difficulty::Hard, Version::V107);
        let mut mines = |seed| {
            env.reset(seed, room(&mut [0])).unwrap();
            env.mines
        };
        let first = mines(3);
        assert_ne!(mines(4), first);
        assert_eq!(mines(3), first);
    }

    #[test]
    fn mines_are_a_uniform_subset() {
        let mut env = MineSweeper::new(Difficulty::Easy, Version::V107);
        let (mut counts, rounds) = (std::collections::HashMap::new(), 24_000);
        for seed in 0..rounds {
            env.reset(seed, room(&mut [0])).unwrap();
            *counts.entry(env.mines).or_insert(0u32) += 1;
        }
        assert!(
            counts.len() == 120 && counts.keys().all(|mines| mines.count_ones() == 2 && *mines < 1 << 16)
        );
        let chi: f64 = counts.values().map(|c| (f64::from(*c) - 200.0).powi(2) / 200.0).sum();
        assert!(chi < 176.0, "{chi}"); // 119 degrees of freedom: passed once in 2,000
        for (difficulty, cells, mines) in [(Difficulty::Medium, 36, 6), (Difficulty::Hard, 64, 10)] {
            let mut env = MineSweeper::new(difficulty, Version::V107);
            let mut counts = [0u32; 64];
            for seed in 0..10_000 {
                env.reset(seed, room(&mut [0])).unwrap();
                assert_eq!(env.mines.count_ones(), mines);
                counts.iter_mut().enumerate().for_each(|(i, c)| *c += (env.mines >> i & 1) as u32);
            }
            let p = f64::from(mines) / cells as f64;
            let z = |c: &u32| (f64::from(*c) - 1e4 * p) / (1e4 * p * (1.0 - p)).sqrt();
            assert!(counts[..cells].iter().all(|c| z(c).abs() < 4.0), "{counts:?}");
        }
    }
}
