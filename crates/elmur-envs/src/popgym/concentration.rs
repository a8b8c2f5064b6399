//! Concentration: cards lie face down; turn them over two at a time and find all pairs.
//!
//! Observation: of every position its value, or K (the number of values) where the card lies face down.
//! Values are colours (K = 2) or ranks (K = 13). Actions: a position. A turn is two flips, and an observation
//! shows the cards of its turn as well as the pairs found so far. L = 2N for N cards:
//!
//! - the first flip of a turn pays nothing;
//! - a second flip with the same value elsewhere pays 2/N, and both cards stay up; any other second flip
//!   costs 2/L;
//! - a flip of a card that is already up ends the turn, at 1/L for every flip of it.
//!
//! The task ends when all cards are up, and is cut off after L steps; both may come together.

mod player;

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_rng::Rng;
use serde::Deserialize;

use super::deck::{Deck, Side};
use super::replay::{choice, episodes};
use super::task::Difficulty;
use crate::env::Step;
use crate::error::{Error, Result};

pub use player::ConcentrationPlayer;

/// Concentration: turn cards over two at a time and find all pairs.
#[derive(Debug, Clone)]
pub struct Concentration {
    spaces: Spaces,
    side: Side,
    /// Card i of this deck lies at position i.
    deck: Deck,
    /// What a pair pays.
    pair: f64,
    /// What one flip of a turn costs that finds none.
    flip: f64,
    /// The newest observation.
    faces: Vec<i32>,
    /// Positions of the pairs found, as bits.
    up: u128,
    /// The first card of this turn.
    first: Option<usize>,
    /// Cards of the turn that has just ended without a pair: still in the newest observation, not in the
    /// next.
    closing: [Option<usize>; 2],
    /// Steps left; 0 before the first reset and after the end.
    left: usize,
}

/// The hidden state of [`Concentration`].
#[derive(Debug, Clone, Deserialize)]
pub struct Layout {
    /// Card at each position.
    pub layout: Vec<u16>,
}

/// Number of decks, and which property of two cards makes them a pair.
fn settings(difficulty: Difficulty) -> (usize, Side) {
    difficulty.pick([(1, Side::Colour), (2, Side::Colour), (1, Side::Rank)])
}

impl Concentration {
    /// The task of this difficulty: colours of 1 or 2 decks, or ranks of 1.
    pub fn new(difficulty: Difficulty) -> Self {
        let (decks, side) = settings(difficulty);
        let deck = Deck::new(decks);
        let cards = deck.len();
        let spaces = Spaces {
            observation: Space::MultiDiscrete { sizes: vec![side.values() + 1; cards] },
            action: Space::Discrete { n: cards },
        };
        Self {
            spaces,
            side,
            deck,
            pair: 2.0 / cards as f64,
            flip: 0.5 / cards as f64,
            faces: vec![0; cards],
            up: 0,
            first: None,
            closing: [None; 2],
            left: 0,
        }
    }

    fn deal(&mut self, rng: &mut Rng) {
        self.deck.shuffle(rng);
    }

    fn take(&mut self, hidden: &Layout) -> Result<()> {
        self.deck.arrange(&hidden.layout)
    }

    fn start(&mut self, observation: ValuesMut<'_>) {
        self.faces.fill(self.side.values() as i32);
        (self.up, self.first, self.closing) = (0, None, [None; 2]);
        self.left = 2 * self.faces.len();
        observation.ints.copy_from_slice(&self.faces);
    }

    #[inline]
    fn play(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        if self.left == 0 {
            return Err(Error::Finished);
        }
        let card = choice(action, self.faces.len(), "position")?;
        for closing in std::mem::take(&mut self.closing).into_iter().flatten() {
            self.faces[closing] = self.side.values() as i32;
        }
        self.faces[card] = self.side.of(self.deck.card(card)) as i32;
        observation.ints.copy_from_slice(&self.faces);

        let reward = match self.first.take() {
            first if self.up >> card & 1 == 1 => {
                self.closing = [first, None];
                if first.is_some() { -2.0 * self.flip } else { -self.flip }
            }
            None => {
                self.first = Some(card);
                0.0
            }
            Some(first) if first != card && self.faces[first] == self.faces[card] => {
                self.up |= 1 << first | 1 << card;
                self.pair
            }
            Some(first) => {
                self.closing = [Some(first), Some(card)];
                -2.0 * self.flip
            }
        };
        self.left -= 1;
        let truncated = self.left == 0;
        let terminated = self.up.count_ones() as usize == self.faces.len();
        if terminated {
            self.left = 0;
        }
        Ok(Step { reward, terminated, truncated, ..Step::default() })
    }
}

episodes!(Concentration, Layout, env => env.spaces);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Env;
    use crate::popgym::Replay;
    use crate::popgym::deck::tests::{check_misuse, check_pairs, check_seeds};
    use crate::popgym::trace::tests::check_family;

    fn step(env: &mut Concentration, card: i32) -> (Vec<i32>, Step) {
        let mut seen = vec![-1; env.faces.len()];
        let room = ValuesMut::ints(&mut seen);
        let step = env.step(Values::ints(&[card]), room).unwrap();
        (seen, step)
    }

    /// Card i at position i.
    fn in_order(difficulty: Difficulty) -> Concentration {
        let mut env = Concentration::new(difficulty);
        let cards = env.faces.len();
        let mut seen = vec![-1; cards];
        let room = ValuesMut::ints(&mut seen);
        env.begin(&Layout { layout: (0..cards as u16).collect() }, room).unwrap();
        assert_eq!(seen, vec![env.side.values() as i32; cards]);
        env
    }

    #[test]
    fn traces_replay() {
        check_family("Concentration", Concentration::new);
    }

    #[test]
    fn turns_show_and_pay() {
        let mut env = in_order(Difficulty::Hard);
        // Card, what the first six positions then show, reward in units of 1/104.
        for (card, shown, reward) in [
            (0, [0, 13, 13, 13, 13, 13], 0.0), // a pair
            (3, [0, 13, 13, 0, 13, 13], 4.0),  //
            (1, [0, 0, 13, 0, 13, 13], 0.0),   // no pair
            (4, [0, 0, 13, 0, 1, 13], -2.0),   //
            (5, [0, 13, 13, 0, 13, 1], 0.0),   // the same card twice
            (5, [0, 13, 13, 0, 13, 1], -2.0),  //
            (3, [0, 13, 13, 0, 13, 13], -1.0), // first a card that is up
            (2, [0, 13, 0, 0, 13, 13], 0.0),   // second a card that is up
            (0, [0, 13, 0, 0, 13, 13], -2.0),  //
            (4, [0, 13, 13, 0, 1, 13], 0.0),   // a pair again
            (5, [0, 13, 13, 0, 1, 1], 4.0),    //
            (51, [0, 13, 13, 0, 1, 1], 0.0),
        ] {
            let (seen, step) = step(&mut env, card);
            assert_eq!(seen[..6], shown, "card {card}");
            assert!((step.reward * 104.0 - reward).abs() < 1e-12 && !step.done(), "card {card}: {step:?}");
        }
    }

    #[test]
    fn the_end_may_come_with_the_limit() {
        for (wasted, truncated) in [(50, false), (52, true)] {
            let mut env = in_order(Difficulty::Easy);
            (0..wasted).for_each(|_| assert!(!step(&mut env, 0).1.done()));
            let mut last = Step::default();
            for card in (0..52).filter(|c| c % 2 == 0).chain((0..52).filter(|c| c % 2 == 1)) {
                assert!(!last.done());
                last = step(&mut env, card).1;
            }
            assert_eq!((last.terminated, last.truncated), (true, truncated), "{wasted}");
            assert!(matches!(
                env.step(Values::ints(&[0]), ValuesMut::ints(&mut [0; 52])),
                Err(Error::Finished)
            ));
        }
        let mut env = in_order(Difficulty::Easy);
        let last = (0..104).map(|_| step(&mut env, 9).1).last().unwrap();
        assert_eq!((last.terminated, last.truncated), (false, true));
    }

    #[test]
    fn seeds_decide_episodes_and_their_cards_are_shuffled() {
        check_seeds(&mut Concentration::new(Difficulty::Easy), 104);
        check_seeds(&mut Concentration::new(Difficulty::Medium), 208);
        let mut env = Concentration::new(Difficulty::Hard);
        check_pairs(13, 52, 20_000, |seed| {
            env.reset(seed, ValuesMut::ints(&mut [0; 52])).unwrap();
            (step(&mut env, 0).0[0], step(&mut env, 51).0[51])
        });
    }

    #[test]
    fn misuse_is_an_error() {
        let mut env = Concentration::new(Difficulty::Medium);
        check_misuse(&mut env);
        let hidden = Layout { layout: vec![103; 104] };
        assert!(env.begin(&hidden, ValuesMut::ints(&mut [0; 104])).is_err());
    }
}
