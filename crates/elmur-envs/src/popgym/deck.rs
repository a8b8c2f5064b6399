//! Decks of cards. Card c of d decks of 52: suit c mod 4, colour c mod 2, rank (c mod 52) / 4 with the ace as
//! 0.

use elmur_rng::Rng;
use serde::Deserialize;

use super::replay::impossible;
use crate::error::Result;

/// The order of a deck.
#[derive(Debug, Clone, Deserialize)]
pub struct DealOrder {
    /// Cards, the first dealt first.
    pub deal_order: Vec<u16>,
}

/// A shuffled deck, in the order in which its cards are dealt.
#[derive(Debug, Clone)]
pub(super) struct Deck {
    cards: Vec<u16>,
}

impl Deck {
    /// `decks` decks of 52, unshuffled.
    pub fn new(decks: usize) -> Self {
        Self { cards: (0..52 * decks as u16).collect() }
    }

    /// Number of cards.
    pub fn len(&self) -> usize {
        self.cards.len()
    }

    /// A new order, each equally likely, whatever the order before.
    pub fn shuffle(&mut self, rng: &mut Rng) {
        self.cards.iter_mut().zip(0..).for_each(|(card, i)| *card = i);
        rng.shuffle(&mut self.cards);
    }

    /// The given order, which must hold every card once.
    pub fn arrange(&mut self, order: &[u16]) -> Result<()> {
        let mut seen = vec![false; self.len()];
        let fresh =
            |card: &u16| seen.get_mut(usize::from(*card)).is_some_and(|s| !std::mem::replace(s, true));
        if order.len() != self.len() || !order.iter().all(fresh) {
            return impossible(
                format!("every card from 0 to {} once", self.len() - 1),
                format!("{} cards", order.len()),
            );
        }
        self.cards.copy_from_slice(order);
        Ok(())
    }

    /// The i-th card dealt.
    #[inline]
    pub fn card(&self, i: usize) -> u16 {
        self.cards[i]
    }

    /// Suit of the i-th card dealt.
    #[inline]
    pub fn suit(&self, i: usize) -> usize {
        usize::from(self.cards[i] % 4)
    }
}

/// Rank of a card, from 0 (ace) to 12 (king).
#[inline]
pub(super) fn rank(card: u16) -> usize {
    usize::from(card % 52 / 4)
}

/// What of a card counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// 0 black, 1 red.
    Colour,
    /// 0 to 3.
    Suit,
    /// 0 (ace) to 12 (king).
    Rank,
}

impl Side {
    /// How many values there are.
    pub fn values(self) -> usize {
        match self {
            Side::Colour => 2,
            Side::Suit => 4,
            Side::Rank => 13,
        }
    }

    /// The value of a card.
    #[inline]
    pub fn of(self, card: u16) -> usize {
        match self {
            Side::Colour => usize::from(card % 2),
            Side::Suit => usize::from(card % 4),
            Side::Rank => rank(card),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use elmur_base::{Space, Values, ValuesMut};

    use super::*;
    use crate::env::{Env, Step};
    use crate::error::Error;

    /// What an environment of integers shows and pays when it is given random actions until the end, or for
    /// `limit` steps.
    pub fn play(env: &mut impl Env, seed: u64, limit: usize) -> (Vec<Vec<i32>>, Vec<Step>) {
        let mut seen = vec![0; env.spaces().observation.widths().ints];
        let Space::Discrete { n } = env.spaces().action else { panic!("no choice between actions") };
        let mut rng = Rng::new(seed, 1);
        env.reset(seed, ValuesMut::ints(&mut seen)).unwrap();
        let (mut shown, mut steps) = (vec![seen.clone()], Vec::new());
        while steps.len() < limit && !steps.last().is_some_and(Step::done) {
            let action = [rng.below(n as u32) as i32];
            let room = ValuesMut::ints(&mut seen);
            steps.push(env.step(Values::ints(&action), room).unwrap());
            shown.push(seen.clone());
        }
        (shown, steps)
    }

    /// Every seed has its own episode, whatever was played before; it lasts `length` steps, and after it a
    /// step is an error.
    pub fn check_seeds(env: &mut impl Env, length: usize) {
        let whole = play(env, 3, usize::MAX);
        assert_eq!(whole.1.len(), length);
        let mut room = whole.0[0].clone();
        let late = env.step(Values::ints(&[0]), ValuesMut::ints(&mut room));
        assert!(matches!(late, Err(Error::Finished)));
        assert_ne!(
            play(env, 4, length / 2),
            (whole.0[..=length / 2].to_vec(), whole.1[..length / 2].to_vec())
        );
        assert_eq!(play(env, 3, usize::MAX), whole);
    }

    /// Steps before the first reset and actions outside of the space are errors.
    pub fn check_misuse(env: &mut impl Env) {
        let mut seen = vec![0; env.spaces().observation.widths().ints];
        let Space::Discrete { n } = env.spaces().action else { panic!("no choice between actions") };
        let mut step =
            |env: &mut dyn Env, ints: &[i32]| env.step(Values::ints(ints), ValuesMut::ints(&mut seen));
        assert!(matches!(step(env, &[0]), Err(Error::Finished)));
        play(env, 0, 1);
        for bad in [&[n as i32][..], &[-1], &[i32::MIN], &[], &[0, 0]] {
            assert!(matches!(step(env, bad), Err(Error::Base(elmur_base::Error::Space { .. }))), "{bad:?}");
        }
        assert!(step(env, &[n as i32 - 1]).is_ok());
    }

    /// Two cards of one shuffled deck: chi-square of the pairs of values that episodes show. Equal values
    /// have probability (m - 1) / (N - 1) after the first, with m cards of each value; others m / (N - 1).
    pub fn check_pairs(values: usize, cards: usize, rounds: u64, mut pair: impl FnMut(u64) -> (i32, i32)) {
        let mut counts = vec![0u32; values * values];
        (0..rounds).map(&mut pair).for_each(|(a, b)| counts[a as usize * values + b as usize] += 1);
        let each = (cards / values) as f64;
        let shares = (0..counts.len()).map(|i| {
            let equal = i / values == i % values;
            (each - f64::from(u8::from(equal))) / (cards - 1) as f64 / values as f64
        });
        check_shares(&counts, shares);
    }

    /// Chi-square of counts against the shares that are expected, passed once in a few thousand.
    pub fn check_shares(counts: &[u32], shares: impl Iterator<Item = f64>) {
        let total: f64 = counts.iter().copied().map(f64::from).sum();
        let terms = counts.iter().zip(shares).map(|(n, share)| {
            let expected = share * total;
            (f64::from(*n) - expected).powi(2) / expected
        });
        let (chi, freedom) = (terms.sum::<f64>(), counts.len() as f64 - 1.0);
        // Wilson and Hilferty: the cube root of chi-square per degree of freedom is nearly normal.
        let spread = 2.0 / (9.0 * freedom);
        let z = ((chi / freedom).cbrt() - 1.0 + spread) / spread.sqrt();
        assert!(z < 3.5, "chi-square {chi} with {freedom} degrees of freedom");
    }

    #[test]
    fn cards_have_suit_colour_and_rank() {
        let deck = Deck::new(2);
        assert_eq!(deck.len(), 104);
        assert_eq!((deck.suit(55), [Side::Colour, Side::Suit, Side::Rank].map(|s| s.of(55))), (3, [1, 3, 0]));
        assert_eq!((rank(51), rank(52), Side::Colour.of(52)), (12, 0, 0));
    }

    #[test]
    fn only_whole_decks_are_arranged() {
        let mut deck = Deck::new(1);
        let order: Vec<u16> = (0..52).rev().collect();
        deck.arrange(&order).unwrap();
        assert_eq!(deck.card(0), 51);
        let mut twice = order.clone();
        twice[3] = 51;
        assert!(deck.arrange(&twice).is_err());
        assert!(deck.arrange(&order[1..]).is_err());
        assert!(deck.arrange(&[60; 52]).is_err());
    }

    /// Every card is equally likely at every place: chi-square with 51 degrees of freedom at four places, and
    /// of the order of one pair.
    #[test]
    fn shuffles_are_uniform() {
        let (mut deck, rounds) = (Deck::new(1), 52_000);
        let mut counts = [[0u32; 52]; 4];
        let mut ordered = 0;
        for seed in 0..rounds {
            deck.shuffle(&mut Rng::new(seed, 0));
            for (place, counts) in [0, 1, 30, 51].into_iter().zip(&mut counts) {
                counts[usize::from(deck.card(place))] += 1;
            }
            ordered += u32::from(deck.card(7) < deck.card(40));
        }
        for counts in counts {
            let chi: f64 = counts.iter().map(|c| (f64::from(*c) - 1e3).powi(2) / 1e3).sum();
            assert!(chi < 93.0, "{chi}"); // passed once in 3,000
        }
        assert!((f64::from(ordered) / rounds as f64 - 0.5).abs() < 0.01);
    }
}
