//! The player of MineSweeper: clicks cells that are certainly clear, and guesses well where there is none.
//!
//! Where nothing is surely clear and few arrangements of the mines are left, the best guess, or to give up,
//! is found by going through all that can follow ([`Endgame`]); Easy is played so from the first click on.
//! Where there are more, the guess is the cell with the best chance to survive it and one more guess: (1 - p)
//! times the mean over clues of 1 - p', with p' the lowest chance of a mine after that clue. It begins in a
//! corner, where that chance is best.

use elmur_base::{Values, ValuesMut};

use super::Rules;
use super::chances::Chances;
use super::endgame::{Choice, Endgame, ROUNDING};
use super::view::{View, cells};
use crate::env::Player;
use crate::popgym::{Difficulty, Version};

/// Arrangements for which the best guess is found. More of them (1,000) brought nothing that 2,000 episodes
/// could show.
const FEW: f64 = 200.0;

/// A player that clicks cells that are certainly clear, and else guesses by exact probabilities of mines.
#[derive(Debug, Clone)]
pub struct MineSweeperPlayer {
    rules: Rules,
    /// Clicks that can be wasted and all clear cells still be found.
    spare: usize,
    view: View,
    /// The cell clicked last.
    last: Option<usize>,
    /// Clicks on cells that had been viewed before.
    wasted: usize,
    /// Cells that are surely clear.
    clear: u64,
    given_up: bool,
    /// Cells that are as good as the one chosen last, where it is not known to be clear.
    ties: u64,
    chances: Chances,
    endgame: Endgame,
}

impl MineSweeperPlayer {
    /// A player for the task of this difficulty, by the rules of this version.
    pub fn new(difficulty: Difficulty, version: Version) -> Self {
        let rules = Rules::new(difficulty);
        Self {
            rules,
            spare: rules.last_step(version) - rules.clear,
            view: View::default(),
            last: None,
            wasted: 0,
            clear: 0,
            given_up: false,
            ties: 0,
            chances: Chances::new(&rules),
            endgame: Endgame::new(&rules),
        }
    }

    /// Takes in what a click has shown.
    fn learn(&mut self, cell: usize, clue: u8) {
        if self.view.viewed >> cell & 1 == 1 {
            self.wasted += 1;
            return;
        }
        self.view = self.view.with(cell, clue);
        self.clear &= !(1 << cell);
        // Another has clicked on: there may be more to find.
        self.given_up = false;
    }

    fn pick(&mut self) -> usize {
        let unviewed = self.rules.board() & !self.view.viewed;
        if self.clear == 0 && !self.given_up {
            self.chances.find(&self.view);
            self.clear = self.surely_clear();
        }
        if self.clear == 0 && !self.given_up {
            let (choice, ties) = self.guess(unviewed);
            self.ties = ties;
            match choice {
                Choice::Click(cell) => return cell,
                Choice::GiveUp => self.given_up = true,
            }
        }
        // Once given up, any viewed cell will do.
        let choices = if self.given_up { self.view.viewed } else { self.clear };
        cells(choices).next().unwrap_or(0)
    }

    /// Unviewed cells without a mine in any arrangement, of those that `chances` were found for.
    fn surely_clear(&self) -> u64 {
        let unviewed = self.rules.board() & !self.view.viewed;
        cells(unviewed).filter(|cell| self.chances.mine[*cell] == 0.0).map(|cell| 1 << cell).sum()
    }

    /// The best guess, and all cells that are as good.
    fn guess(&mut self, unviewed: u64) -> (Choice, u64) {
        if self.chances.arrangements <= FEW {
            let guess = self.endgame.solve(&self.view, self.wasted.saturating_sub(self.spare));
            return (guess.choice, guess.ties);
        }
        if self.view.viewed == 0 {
            let far = self.rules.size - 1;
            let corners = [0, far, far * self.rules.size, far * self.rules.size + far];
            return (Choice::Click(0), corners.iter().map(|cell| 1 << cell).sum());
        }
        let (cell, ties) = self.survivor(unviewed);
        (Choice::Click(cell), ties)
    }

    /// The unviewed cell with the best chance to survive it and one more guess, while there is more than one
    /// clear cell to go, and all cells with that chance.
    fn survivor(&mut self, unviewed: u64) -> (usize, u64) {
        let (mine, all) = (self.chances.mine, self.chances.arrangements);
        let (mut best, mut most, mut ties) = (0, 0.0, 0);
        for cell in cells(unviewed) {
            if 1.0 - mine[cell] < most - ROUNDING {
                continue;
            }
            let mut survived = 0.0;
            for clue in 0..=9.min(self.rules.mines as u8) {
                let next = self.view.with(cell, clue);
                self.chances.find(&next);
                let after = cells(unviewed & !(1 << cell)).map(|c| self.chances.mine[c]).fold(1.0, f64::min);
                survived += self.chances.arrangements / all * (1.0 - after);
            }
            if survived > most + ROUNDING {
                (best, most, ties) = (cell, survived, 1 << cell);
            } else if survived > most - ROUNDING {
                ties |= 1 << cell;
            }
        }
        (best, ties)
    }
}

impl Player for MineSweeperPlayer {
    fn reset(&mut self) {
        (self.view, self.last, self.wasted) = (View::default(), None, 0);
        (self.clear, self.given_up) = (0, false);
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        if let Some(cell) = self.last {
            self.learn(cell, observation.ints[0] as u8);
        }
        let cell = self.pick();
        self.last = Some(cell);
        action.ints[0] = (cell / self.rules.size) as i32;
        action.ints[1] = (cell % self.rules.size) as i32;
    }

    fn took(&mut self, action: Values<'_>) {
        self.last = Some(action.ints[0] as usize * self.rules.size + action.ints[1] as usize);
    }

    /// All cells that are surely clear; where there is none, the cells with the same expected return, or
    /// with the same chance to survive two guesses; all viewed cells once the player has given up.
    fn accept(&mut self, choices: &mut [bool]) {
        let cells = if self.given_up {
            self.view.viewed
        } else if self.clear == 0 {
            self.ties
        } else {
            self.chances.find(&self.view);
            self.surely_clear()
        };
        choices.iter_mut().enumerate().for_each(|(cell, choice)| *choice |= cells >> cell & 1 == 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Env;
    use crate::popgym::Replay;
    use crate::popgym::mine_sweeper::{MineSweeper, Mines};
    use crate::popgym::trace::tests::mean_return;

    #[test]
    fn the_player_finds_most_cells() {
        // Expected: means of 20,000 episodes.
        for (difficulty, episodes, expected, deviation) in
            [(Difficulty::Medium, 1_000, 0.591, 0.67), (Difficulty::Hard, 300, 0.606, 0.65)]
        {
            let mut env = MineSweeper::new(difficulty, Version::V107);
            let mut player = MineSweeperPlayer::new(difficulty, Version::V107);
            let (mean, _) = mean_return(&mut env, &mut player, 0..episodes);
            let error = deviation / (episodes as f64).sqrt();
            assert!((mean - expected).abs() < 4.0 * error, "{difficulty:?}: {mean} +- {error}");
        }
    }

    #[test]
    fn the_first_click_is_where_the_rule_would_have_it() {
        for difficulty in [Difficulty::Medium, Difficulty::Hard] {
            let mut player = MineSweeperPlayer::new(difficulty, Version::V107);
            player.chances.find(&player.view);
            let (cell, ties) = player.survivor(player.rules.board());
            assert_eq!((player.pick(), player.ties), (cell, ties));
        }
    }

    #[test]
    fn the_smallest_board_is_played_as_well_as_possible() {
        let mut player = MineSweeperPlayer::new(Difficulty::Easy, Version::V107);
        let best = Endgame::new(&player.rules).solve(&View::default(), 0).value;
        let mut env = MineSweeper::new(Difficulty::Easy, Version::V107);
        let mut sum = 0.0;
        for (a, b) in (0..16).flat_map(|a| (0..a).map(move |b| (a, b))) {
            let mut seen = [0];
            let room = ValuesMut::ints(&mut seen);
            env.begin(&Mines { mines_flat: vec![a, b] }, room).unwrap();
            sum += finish(&mut env, &mut player, seen).1.iter().sum::<f64>();
        }
        assert!((sum / 120.0 - best).abs() < 1e-9, "{} of {best}", sum / 120.0);
    }

    #[test]
    fn the_player_gives_up_a_toss_for_the_last_cell() {
        let mut player = MineSweeperPlayer::new(Difficulty::Medium, Version::V107);
        // A mine in cell 0 or 1, behind mines in 2 and 8.
        let mines: u64 = [0, 2, 8, 33, 34, 35].iter().map(|cell| 1 << cell).sum();
        for cell in cells(player.rules.board() & !mines & !(1 << 1)) {
            let clue = (mines & player.rules.blocks()[cell]).count_ones() as u8;
            player.view = player.view.with(cell, clue);
        }
        player.chances.find(&player.view);
        assert_eq!((player.chances.arrangements, player.chances.mine[1]), (2.0, 0.5));
        assert_eq!(player.guess(mines | 1 << 1), (Choice::GiveUp, player.view.viewed));
        let again = player.pick();
        assert!(player.view.viewed >> again & 1 == 1 && player.pick() == again);
    }

    /// The cells clicked, the rewards, and whether the episode was cut off.
    type Played = (Vec<[i32; 2]>, Vec<f64>, bool);

    fn play(player: &mut MineSweeperPlayer, version: Version, seed: u64) -> Played {
        let mut env = MineSweeper::new(Difficulty::Medium, version);
        let mut seen = [0];
        env.reset(seed, ValuesMut::ints(&mut seen)).unwrap();
        finish(&mut env, player, seen)
    }

    fn finish(env: &mut MineSweeper, player: &mut MineSweeperPlayer, mut seen: [i32; 1]) -> Played {
        player.reset();
        let (mut clicks, mut rewards) = (vec![], vec![]);
        loop {
            let mut click = [0; 2];
            player.act(Values::ints(&seen), ValuesMut::ints(&mut click));
            let room = ValuesMut::ints(&mut seen);
            let step = env.step(Values::ints(&click), room).unwrap();
            clicks.push(click);
            rewards.push(step.reward);
            if step.done() {
                return (clicks, rewards, step.truncated);
            }
        }
    }

    #[test]
    fn the_player_wastes_clicks_only_to_give_up() {
        let mut player = MineSweeperPlayer::new(Difficulty::Medium, Version::V107);
        let mut given_up = 0;
        for seed in 0..150 {
            for version in [Version::V106, Version::V107] {
                let (_, rewards, truncated) = play(&mut player, version, seed);
                let wasted = rewards.iter().filter(|r| **r == player.rules.wasted).count();
                assert_eq!(wasted > 0, truncated);
                // All at the end.
                assert!(rewards.iter().rev().take(wasted).all(|r| *r == player.rules.wasted));
                given_up += usize::from(truncated);
            }
        }
        assert!(given_up > 2, "{given_up}");
    }

    #[test]
    fn the_player_forgets_the_last_episode() {
        let mut player = MineSweeperPlayer::new(Difficulty::Medium, Version::V107);
        let first = play(&mut player, Version::V107, 1);
        (2..12).for_each(|seed| assert_ne!(play(&mut player, Version::V107, seed), first));
        assert_eq!(play(&mut player, Version::V107, 1), first);
    }

    /// A click of another shows what it shows, and is not repeated; a second click on a cell is a step lost.
    #[test]
    fn foreign_clicks_are_observations() {
        let mut env = MineSweeper::new(Difficulty::Easy, Version::V107);
        let mut player = MineSweeperPlayer::new(Difficulty::Easy, Version::V107);
        let (mut seen, mut click) = ([0], [0; 2]);
        env.begin(&Mines { mines_flat: vec![0, 1] }, ValuesMut::ints(&mut seen)).unwrap();
        player.reset();
        for foreign in [[3, 3], [3, 3], [2, 1]] {
            player.act(Values::ints(&seen), ValuesMut::ints(&mut click));
            player.took(Values::ints(&foreign));
            env.step(Values::ints(&foreign), ValuesMut::ints(&mut seen)).unwrap();
        }
        player.act(Values::ints(&seen), ValuesMut::ints(&mut click));
        assert_eq!((player.view.viewed, player.wasted), (1 << 15 | 1 << 9, 1));
        // Neither mine is near: the cells around both are surely clear.
        let mut choices = [false; 16];
        player.accept(&mut choices);
        let clear: Vec<usize> = (0..16).filter(|i| choices[*i]).collect();
        assert_eq!(clear, [4, 5, 6, 8, 10, 11, 12, 13, 14]);
        assert!(clear.contains(&((4 * click[0] + click[1]) as usize)));
    }

    #[test]
    fn what_was_given_up_is_looked_at_again_when_another_finds_something() {
        let mut player = MineSweeperPlayer::new(Difficulty::Medium, Version::V107);
        (player.given_up, player.view) = (true, View::default().with(0, 0));
        player.learn(0, 0);
        assert!(player.given_up && player.wasted == 1);
        player.learn(1, 0);
        assert!(!player.given_up && player.wasted == 1 && player.view.viewed == 3);
    }
}
