//! Decks of cards. Card c of d decks of 52: suit c mod 4, colour c mod 2, rank (c mod 52) / 4 with the ace as 0.

use elmur_rng::Rng;

use super::replay::impossible;
use crate::error::Result;

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

/// Colour of a card: 0 black, 1 red.
#[inline]
pub(super) fn colour(card: u16) -> usize {
    usize::from(card % 2)
}

/// Rank of a card, from 0 (ace) to 12 (king).
#[inline]
pub(super) fn rank(card: u16) -> usize {
    usize::from(card % 52 / 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_have_suit_colour_and_rank() {
        let deck = Deck::new(2);
        assert_eq!(deck.len(), 104);
        assert_eq!((deck.suit(55), colour(55), rank(55)), (3, 1, 0));
        assert_eq!((rank(51), rank(52), colour(52)), (12, 0, 0));
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

    /// Every card is equally likely at every place: chi-square with 51 degrees of freedom at four places, and of the order of
    /// one pair.
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
