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
use super::endgame::{Choice, Endgame};
use super::view::{View, cells};
use crate::env::Player;
use crate::popgym::Difficulty;

/// Arrangements for which the best guess is found. More of them (1,000) brought nothing that 2,000 episodes
/// could show.
const FEW: f64 = 200.0;

/// A player that clicks cells that are certainly clear, and else guesses by exact probabilities of mines.
#[derive(Debug, Clone)]
pub struct MineSweeperPlayer {
    rules: Rules,
    view: View,
    last: Option<usize>,
    /// Cells that are surely clear.
    clear: u64,
    given_up: bool,
    chances: Chances,
    endgame: Endgame,
}

impl MineSweeperPlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        let rules = Rules::new(difficulty);
        Self {
            rules,
            view: View::default(),
            last: None,
            clear: 0,
            given_up: false,
            chances: Chances::new(&rules),
            endgame: Endgame::new(&rules),
        }
    }

    fn pick(&mut self) -> usize {
        let unviewed = self.rules.board() & !self.view.viewed;
        if self.clear == 0 && !self.given_up {
            self.chances.find(&self.view);
            self.clear = cells(unviewed).filter(|c| self.chances.mine[*c] == 0.0).map(|c| 1 << c).sum();
        }
        if self.clear == 0 && !self.given_up {
            match self.guess(unviewed) {
                Choice::Click(cell) => return cell,
                Choice::GiveUp => self.given_up = true,
            }
        }
        // Once given up, any viewed cell will do.
        let choices = if self.given_up { self.view.viewed } else { self.clear };
        let cell = cells(choices).next().unwrap_or(0);
        self.clear &= !(1 << cell);
        cell
    }

    fn guess(&mut self, unviewed: u64) -> Choice {
        if self.chances.arrangements <= FEW {
            return self.endgame.solve(&self.view).1;
        }
        if self.view.viewed == 0 {
            return Choice::Click(0);
        }
        Choice::Click(self.survivor(unviewed))
    }

    /// The unviewed cell with the best chance to survive it and one more guess, while there is more than one
    /// clear cell to go.
    fn survivor(&mut self, unviewed: u64) -> usize {
        let (mine, all) = (self.chances.mine, self.chances.arrangements);
        let (mut best, mut most) = (0, 0.0);
        for cell in cells(unviewed) {
            if 1.0 - mine[cell] <= most + 1e-9 {
                continue;
            }
            let mut survived = 0.0;
            for clue in 0..=9.min(self.rules.mines as u8) {
                let next = self.view.with(cell, clue);
                self.chances.find(&next);
                let after = cells(unviewed & !(1 << cell)).map(|c| self.chances.mine[c]).fold(1.0, f64::min);
                survived += self.chances.arrangements / all * (1.0 - after);
            }
            if survived > most + 1e-9 {
                (best, most) = (cell, survived);
            }
        }
        best
    }
}

impl Player for MineSweeperPlayer {
    fn reset(&mut self) {
        (self.view, self.last, self.clear, self.given_up) = (View::default(), None, 0, false);
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        if let Some(cell) = self.last {
            self.view = self.view.with(cell, observation.ints[0] as u8);
        }
        let cell = self.pick();
        self.last = Some(cell);
        action.ints[0] = (cell / self.rules.size) as i32;
        action.ints[1] = (cell % self.rules.size) as i32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Env;
    use crate::popgym::mine_sweeper::{MineSweeper, Mines};
    use crate::popgym::trace::tests::mean_return;
    use crate::popgym::{Replay, Version};

    #[test]
    fn the_player_finds_most_cells() {
        // Expected: means of 20,000 episodes.
        for (difficulty, episodes, expected, deviation) in
            [(Difficulty::Medium, 1_000, 0.591, 0.67), (Difficulty::Hard, 300, 0.606, 0.65)]
        {
            let mut env = MineSweeper::new(difficulty, Version::V107);
            let (mean, _) = mean_return(&mut env, &mut MineSweeperPlayer::new(difficulty), 0..episodes);
            let error = deviation / (episodes as f64).sqrt();
            assert!((mean - expected).abs() < 4.0 * error, "{difficulty:?}: {mean} +- {error}");
        }
    }

    #[test]
    fn the_first_click_is_where_the_rule_would_have_it() {
        for difficulty in [Difficulty::Medium, Difficulty::Hard] {
            let mut player = MineSweeperPlayer::new(difficulty);
            player.chances.find(&player.view);
            assert_eq!(player.survivor(player.rules.board()), player.pick());
        }
    }

    #[test]
    fn the_smallest_board_is_played_as_well_as_possible() {
        let mut player = MineSweeperPlayer::new(Difficulty::Easy);
        let (best, _) = Endgame::new(&player.rules).solve(&View::default());
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
        let mut player = MineSweeperPlayer::new(Difficulty::Medium);
        // A mine in cell 0 or 1, behind mines in 2 and 8.
        let mines: u64 = [0, 2, 8, 33, 34, 35].iter().map(|cell| 1 << cell).sum();
        for cell in cells(player.rules.board() & !mines & !(1 << 1)) {
            let clue = (mines & player.rules.blocks()[cell]).count_ones() as u8;
            player.view = player.view.with(cell, clue);
        }
        player.chances.find(&player.view);
        assert_eq!((player.chances.arrangements, player.chances.mine[1]), (2.0, 0.5));
        assert_eq!(player.guess(mines | 1 << 1), Choice::GiveUp);
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
        let mut player = MineSweeperPlayer::new(Difficulty::Medium);
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
        let mut player = MineSweeperPlayer::new(Difficulty::Medium);
        let first = play(&mut player, Version::V107, 1);
        (2..12).for_each(|seed| assert_ne!(play(&mut player, Version::V107, seed), first));
        assert_eq!(play(&mut player, Version::V107, 1), first);
    }
}
