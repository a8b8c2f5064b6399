//! RepeatFirst and RepeatPrevious: name the suit of the first card, or of the card seen k - 1 cards before
//! the current one.
//!
//! Observation: the suit of the newest card. N cards make N - 1 steps. A right answer pays 1/n and a wrong
//! one costs as much, with n the number of answers that count: all of them in RepeatFirst, all but the first
//! k - 1 in RepeatPrevious.

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_rng::Rng;

use super::deck::{DealOrder, Deck};
use super::replay::{choice, episodes};
use super::task::Difficulty;
use crate::env::{Player, Step};
use crate::error::{Error, Result};

/// What both tasks share: a deck that is dealt card by card.
#[derive(Debug, Clone)]
struct Repeat {
    spaces: Spaces,
    deck: Deck,
    /// Cards shown; 0 before the first reset.
    shown: usize,
}

impl Repeat {
    fn new(decks: usize) -> Self {
        let spaces = Spaces { observation: Space::Discrete { n: 4 }, action: Space::Discrete { n: 4 } };
        Self { spaces, deck: Deck::new(decks), shown: 0 }
    }

    fn show(&mut self, observation: ValuesMut<'_>) {
        observation.ints[0] = self.deck.suit(self.shown) as i32;
        self.shown += 1;
    }

    fn first(&mut self, observation: ValuesMut<'_>) {
        self.shown = 0;
        self.show(observation);
    }

    /// Judges the action against card `asked` (none: nothing counts) and shows the next card.
    fn step(
        &mut self,
        action: Values<'_>,
        asked: Option<usize>,
        pay: f64,
        observation: ValuesMut<'_>,
    ) -> Result<Step> {
        if self.shown == 0 || self.shown == self.deck.len() {
            return Err(Error::Finished);
        }
        let answer = choice(action, 4, "suit")?;
        let reward = match asked {
            None => 0.0,
            Some(card) if self.deck.suit(card) == answer => pay,
            Some(_) => -pay,
        };
        self.show(observation);
        Ok(Step { reward, terminated: self.shown == self.deck.len(), ..Step::default() })
    }
}

/// RepeatFirst: name the suit of the first card at every step.
#[derive(Debug, Clone)]
pub struct RepeatFirst(Repeat);

impl RepeatFirst {
    /// The task of this difficulty: 1, 8 or 16 decks.
    pub fn new(difficulty: Difficulty) -> Self {
        Self(Repeat::new(difficulty.pick([1, 8, 16])))
    }

    fn deal(&mut self, rng: &mut Rng) {
        self.0.deck.shuffle(rng);
    }

    fn take(&mut self, hidden: &DealOrder) -> Result<()> {
        self.0.deck.arrange(&hidden.deal_order)
    }

    fn start(&mut self, observation: ValuesMut<'_>) {
        self.0.first(observation);
    }

    fn play(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        let pay = 1.0 / (self.0.deck.len() - 1) as f64;
        self.0.step(action, Some(0), pay, observation)
    }
}

episodes!(RepeatFirst, DealOrder, env => env.0.spaces);

/// RepeatPrevious: name the suit of the card that was shown k - 1 cards before the newest.
#[derive(Debug, Clone)]
pub struct RepeatPrevious {
    repeat: Repeat,
    k: usize,
}

impl RepeatPrevious {
    /// The task of this difficulty: k = 4, 32 or 64 in 1, 2 or 3 decks.
    pub fn new(difficulty: Difficulty) -> Self {
        Self { repeat: Repeat::new(difficulty.pick([1, 2, 3])), k: lag(difficulty) }
    }

    fn deal(&mut self, rng: &mut Rng) {
        self.repeat.deck.shuffle(rng);
    }

    fn take(&mut self, hidden: &DealOrder) -> Result<()> {
        self.repeat.deck.arrange(&hidden.deal_order)
    }

    fn start(&mut self, observation: ValuesMut<'_>) {
        self.repeat.first(observation);
    }

    fn play(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        let pay = 1.0 / (self.repeat.deck.len() - self.k) as f64;
        self.repeat.step(action, self.repeat.shown.checked_sub(self.k), pay, observation)
    }
}

episodes!(RepeatPrevious, DealOrder, env => env.repeat.spaces, uses_action: env.repeat.shown >= env.k);

fn lag(difficulty: Difficulty) -> usize {
    difficulty.pick([4, 32, 64])
}

/// A player that repeats the first suit of the episode.
#[derive(Debug, Clone, Default)]
pub struct RepeatFirstPlayer {
    first: Option<i32>,
}

impl Player for RepeatFirstPlayer {
    fn reset(&mut self) {
        self.first = None;
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        action.ints[0] = *self.first.get_or_insert(observation.ints[0]);
    }

    fn took(&mut self, _: Values<'_>) {}
}

/// A player that keeps the last k suits.
#[derive(Debug, Clone)]
pub struct RepeatPreviousPlayer {
    /// Suit number i of the episode at i mod k.
    ring: Vec<i32>,
    seen: usize,
}

impl RepeatPreviousPlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        Self { ring: vec![0; lag(difficulty)], seen: 0 }
    }
}

impl Player for RepeatPreviousPlayer {
    fn reset(&mut self) {
        self.ring.fill(0);
        self.seen = 0;
    }

    /// Suit 0 until k cards have been seen.
    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let k = self.ring.len();
        self.ring[self.seen % k] = observation.ints[0];
        self.seen += 1;
        action.ints[0] = self.ring[self.seen % k];
    }

    fn took(&mut self, _: Values<'_>) {}

    /// Any suit while answers do not count.
    fn accept(&mut self, choices: &mut [bool]) {
        if self.seen < self.ring.len() {
            choices.fill(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Env;
    use crate::popgym::Replay;
    use crate::popgym::trace::tests::{check_family, mean_return};

    #[test]
    fn traces_replay() {
        check_family("RepeatFirst", RepeatFirst::new);
        check_family("RepeatPrevious", RepeatPrevious::new);
    }

    #[test]
    fn players_are_always_right() {
        for difficulty in Difficulty::ALL {
            let (mean, error) =
                mean_return(&mut RepeatFirst::new(difficulty), &mut RepeatFirstPlayer::default(), 0..20);
            assert!((mean - 1.0).abs() < 1e-9 && error < 1e-9, "{mean}");
            let mut player = RepeatPreviousPlayer::new(difficulty);
            let (mean, error) = mean_return(&mut RepeatPrevious::new(difficulty), &mut player, 0..20);
            assert!((mean - 1.0).abs() < 1e-9 && error < 1e-9, "{mean}");
        }
    }

    #[test]
    fn the_first_answers_of_repeat_previous_are_not_used() {
        let mut env = RepeatPrevious::new(Difficulty::Easy);
        let mut seen = [0];
        env.reset(1, ValuesMut::ints(&mut seen)).unwrap();
        let used: Vec<bool> = (0..6)
            .map(|_| {
                let uses = env.uses_action();
                let room = ValuesMut::ints(&mut seen);
                let step = env.step(Values::ints(&[0]), room).unwrap();
                assert_eq!(uses, step.reward != 0.0);
                uses
            })
            .collect();
        assert_eq!(used, [false, false, false, true, true, true]);
    }

    #[test]
    fn misuse_is_an_error() {
        let mut env = RepeatFirst::new(Difficulty::Easy);
        let mut seen = [0];
        let mut step =
            |env: &mut RepeatFirst, ints: &[i32]| env.step(Values::ints(ints), ValuesMut::ints(&mut seen));
        assert!(matches!(step(&mut env, &[0]), Err(Error::Finished)));
        env.reset(0, ValuesMut::ints(&mut [0])).unwrap();
        for bad in [&[4][..], &[-1], &[], &[0, 0]] {
            assert!(matches!(step(&mut env, bad), Err(Error::Base(elmur_base::Error::Space { .. }))));
        }
        (0..51).for_each(|_| assert!(step(&mut env, &[0]).is_ok()));
        assert!(matches!(step(&mut env, &[0]), Err(Error::Finished)));
        assert!(env.begin(&DealOrder { deal_order: vec![0; 52] }, ValuesMut::ints(&mut [0])).is_err());
    }
}
