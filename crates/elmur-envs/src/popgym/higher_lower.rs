//! HigherLower: say whether the next card is higher or lower than the current one.
//!
//! Observation: the rank of the current card, from 0 (ace) to 12 (king). Actions: 0 higher, 1 lower. A right
//! answer pays 1/N, a wrong one costs as much, and equal ranks pay nothing. N cards make N - 1 steps.

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_rng::Rng;

use super::deck::{DealOrder, Deck, rank};
use super::replay::{choice, episodes};
use super::task::Difficulty;
use crate::env::{Player, Step};
use crate::error::{Error, Result};

/// HigherLower: say whether the next card is higher or lower than the current one.
#[derive(Debug, Clone)]
pub struct HigherLower {
    spaces: Spaces,
    deck: Deck,
    pay: f64,
    /// Rank of the current card.
    rank: usize,
    /// Cards shown; 0 before the first reset.
    shown: usize,
}

fn decks(difficulty: Difficulty) -> usize {
    difficulty.pick([1, 2, 3])
}

impl HigherLower {
    /// The task of this difficulty: 1, 2 or 3 decks.
    pub fn new(difficulty: Difficulty) -> Self {
        let spaces = Spaces { observation: Space::Discrete { n: 13 }, action: Space::Discrete { n: 2 } };
        let deck = Deck::new(decks(difficulty));
        Self { spaces, pay: 1.0 / deck.len() as f64, deck, rank: 0, shown: 0 }
    }

    #[inline]
    fn show(&mut self, observation: ValuesMut<'_>) {
        self.rank = rank(self.deck.card(self.shown));
        self.shown += 1;
        observation.ints[0] = self.rank as i32;
    }

    fn deal(&mut self, rng: &mut Rng) {
        self.deck.shuffle(rng);
    }

    fn take(&mut self, hidden: &DealOrder) -> Result<()> {
        self.deck.arrange(&hidden.deal_order)
    }

    fn start(&mut self, observation: ValuesMut<'_>) {
        self.shown = 0;
        self.show(observation);
    }

    #[inline]
    fn play(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        if self.shown == 0 || self.shown == self.deck.len() {
            return Err(Error::Finished);
        }
        let lower = choice(action, 2, "guess")? == 1;
        let before = self.rank;
        self.show(observation);
        let reward = if self.rank == before {
            0.0
        } else if (self.rank < before) == lower {
            self.pay
        } else {
            -self.pay
        };
        Ok(Step { reward, terminated: self.shown == self.deck.len(), ..Step::default() })
    }
}

episodes!(HigherLower, DealOrder, env => env.spaces);

/// A player that counts the cards that are left and gives the likelier answer. Answers do not change what
/// comes, so that this is optimal.
#[derive(Debug, Clone)]
pub struct HigherLowerPlayer {
    decks: usize,
    /// Cards of each rank not yet seen.
    left: [i32; 13],
    /// Whether both answers are equally likely to be right.
    even: bool,
}

impl HigherLowerPlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        let decks = decks(difficulty);
        Self { decks, left: [4 * decks as i32; 13], even: false }
    }
}

impl Player for HigherLowerPlayer {
    fn reset(&mut self) {
        self.left = [4 * self.decks as i32; 13];
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let rank = (observation.ints[0].max(0) as usize).min(12);
        self.left[rank] -= 1;
        let lower: i32 = self.left[..rank].iter().sum();
        let higher: i32 = self.left[rank + 1..].iter().sum();
        self.even = lower == higher;
        action.ints[0] = i32::from(lower > higher);
    }

    fn took(&mut self, _: Values<'_>) {}

    /// Both answers where as many lower cards are left as higher ones.
    fn accept(&mut self, choices: &mut [bool]) {
        if self.even {
            choices.fill(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::popgym::Replay;
    use crate::popgym::deck::tests::{check_misuse, check_pairs, check_seeds, play};
    use crate::popgym::trace::tests::{check_family, mean_return};

    #[test]
    fn traces_replay() {
        check_family("HigherLower", HigherLower::new);
    }

    /// Expected returns from the hypergeometric distribution of the cards left above and below.
    const EXPECTED: [f64; 3] = [0.527_600, 0.516_103, 0.511_459];

    #[test]
    fn the_player_guesses_as_well_as_one_can() {
        for (difficulty, expected) in Difficulty::ALL.into_iter().zip(EXPECTED) {
            let mut player = HigherLowerPlayer::new(difficulty);
            let (mean, error) = mean_return(&mut HigherLower::new(difficulty), &mut player, 0..4000);
            assert!((mean - expected).abs() < 4.0 * error && error < 0.002, "{mean} ± {error}");
        }
    }

    #[test]
    fn seeds_decide_episodes_and_their_cards_are_shuffled() {
        check_seeds(&mut HigherLower::new(Difficulty::Easy), 51);
        check_seeds(&mut HigherLower::new(Difficulty::Hard), 155);
        let mut env = HigherLower::new(Difficulty::Easy);
        check_pairs(13, 52, 30_000, |seed| {
            let (shown, _) = play(&mut env, seed, 1);
            (shown[0][0], shown[1][0])
        });
    }

    #[test]
    fn misuse_is_an_error() {
        let mut env = HigherLower::new(Difficulty::Medium);
        check_misuse(&mut env);
        let hidden = DealOrder { deal_order: (1..105).collect() };
        assert!(env.begin(&hidden, ValuesMut::ints(&mut [0])).is_err());
    }
}
