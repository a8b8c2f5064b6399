//! Autoencode: watch a deck of cards, then name their suits from the last to the first.
//!
//! Observation: a mode (1 watch, 0 play) and a suit. Actions: a suit. While watching, actions are ignored and
//! every step shows the next card; the last card already comes with mode 0, so that it must be named at once.
//! While playing, each step takes the newest card that has not been named, pays 1/N for its suit and costs as
//! much for another, and shows (0, 0). N - 1 steps of watching and N of playing; the task ends with the last
//! card named.

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_rng::Rng;

use super::deck::{DealOrder, Deck};
use super::replay::{choice, episodes};
use super::task::Difficulty;
use crate::env::{Player, Step};
use crate::error::{Error, Result};

/// Autoencode: watch a deck of cards, then name their suits from the last to the first.
#[derive(Debug, Clone)]
pub struct Autoencode {
    spaces: Spaces,
    deck: Deck,
    pay: f64,
    /// Cards shown.
    shown: usize,
    /// Cards to name; 0 before the first reset and after the end.
    left: usize,
}

fn decks(difficulty: Difficulty) -> usize {
    difficulty.pick([1, 2, 3])
}

impl Autoencode {
    /// The task of this difficulty: 1, 2 or 3 decks.
    pub fn new(difficulty: Difficulty) -> Self {
        let parts = vec![Space::Discrete { n: 2 }, Space::Discrete { n: 4 }];
        let spaces = Spaces { observation: Space::Tuple { parts }, action: Space::Discrete { n: 4 } };
        let deck = Deck::new(decks(difficulty));
        Self { spaces, pay: 1.0 / deck.len() as f64, deck, shown: 0, left: 0 }
    }

    #[inline]
    fn show(&mut self, observation: ValuesMut<'_>) {
        let suit = self.deck.suit(self.shown);
        self.shown += 1;
        let watch = self.shown < self.deck.len();
        observation.ints.copy_from_slice(&[i32::from(watch), suit as i32]);
    }

    fn deal(&mut self, rng: &mut Rng) {
        self.deck.shuffle(rng);
    }

    fn take(&mut self, hidden: &DealOrder) -> Result<()> {
        self.deck.arrange(&hidden.deal_order)
    }

    fn start(&mut self, observation: ValuesMut<'_>) {
        (self.shown, self.left) = (0, self.deck.len());
        self.show(observation);
    }

    #[inline]
    fn play(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        if self.left == 0 {
            return Err(Error::Finished);
        }
        let answer = choice(action, 4, "suit")?;
        if self.shown < self.deck.len() {
            self.show(observation);
            return Ok(Step::default());
        }
        self.left -= 1;
        let reward = if self.deck.suit(self.left) == answer { self.pay } else { -self.pay };
        observation.ints.fill(0);
        Ok(Step { reward, terminated: self.left == 0, ..Step::default() })
    }
}

episodes!(Autoencode, DealOrder, env => env.spaces, uses_action: env.shown == env.deck.len());

/// A player that keeps the suits on a stack. Answers 0 while answers are ignored.
#[derive(Debug, Clone)]
pub struct AutoencodePlayer {
    stack: Vec<i32>,
    playing: bool,
}

impl AutoencodePlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        Self { stack: Vec::with_capacity(52 * decks(difficulty)), playing: false }
    }
}

impl Player for AutoencodePlayer {
    fn reset(&mut self) {
        self.stack.clear();
        self.playing = false;
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let (watch, suit) = (observation.ints[0] == 1, observation.ints[1]);
        if !self.playing {
            self.stack.push(suit); // the last one comes with the first question
        }
        self.playing = !watch;
        action.ints[0] = if watch { 0 } else { self.stack.pop().unwrap_or(0) };
    }

    fn took(&mut self, _: Values<'_>) {}

    /// Any answer while answers are ignored.
    fn accept(&mut self, choices: &mut [bool]) {
        if !self.playing {
            choices.fill(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Env;
    use crate::popgym::Replay;
    use crate::popgym::deck::tests::{check_misuse, check_pairs, check_seeds, play};
    use crate::popgym::trace::tests::{check_family, mean_return};

    #[test]
    fn traces_replay() {
        check_family("Autoencode", Autoencode::new);
    }

    #[test]
    fn the_player_is_always_right() {
        for difficulty in Difficulty::ALL {
            let mut player = AutoencodePlayer::new(difficulty);
            let (mean, error) = mean_return(&mut Autoencode::new(difficulty), &mut player, 0..20);
            assert!((mean - 1.0).abs() < 1e-9 && error < 1e-9, "{mean}");
        }
    }

    #[test]
    fn actions_are_used_from_the_last_card_on() {
        let mut env = Autoencode::new(Difficulty::Easy);
        for t in 0..103 {
            let (shown, steps) = play(&mut env, 5, t);
            assert_eq!(env.uses_action(), t >= 51);
            assert_eq!(shown[t][0], i32::from(t < 51));
            assert_eq!(steps.last().is_some_and(|s| s.reward != 0.0), t >= 52);
        }
    }

    #[test]
    fn seeds_decide_episodes_and_their_cards_are_shuffled() {
        check_seeds(&mut Autoencode::new(Difficulty::Easy), 103);
        check_seeds(&mut Autoencode::new(Difficulty::Hard), 311);
        let mut env = Autoencode::new(Difficulty::Easy);
        check_pairs(4, 52, 20_000, |seed| {
            let (shown, _) = play(&mut env, seed, 3);
            (shown[0][1], shown[3][1])
        });
    }

    #[test]
    fn misuse_is_an_error() {
        let mut env = Autoencode::new(Difficulty::Medium);
        check_misuse(&mut env);
        let hidden = DealOrder { deal_order: vec![7; 104] };
        assert!(env.begin(&hidden, ValuesMut::ints(&mut [0, 0])).is_err());
    }
}
