//! The best play. Nothing hurries a player who is never cut off, so what counts is the number of turns that
//! find no pair: a turn that fails costs 2/L whenever it comes.
//!
//! - A pair that is known is kept for later: it cannot be lost, and until then its cards can match others. So
//!   the first flip of a turn is an unseen card, as long as there is one.
//! - If that card matches a seen one, the pair can be taken. With many cards of a value, it can be better to
//!   try another unseen card: it matches too, or the failure shows two cards that make later turns safe. With
//!   two values, [`Trials`] says when, from the expected number of failures of every state. With 13 ranks of
//!   four cards it never is.
//! - If it matches none, the second flip is an unseen card as well, which may match and will be known.
//!
//! Dynamic programming over all options of all states (flipping seen cards first, taking known pairs at once
//! and others included) finds nothing better. Every failed turn shows two new cards, so there are at most
//! N/2, and the limit of 2N steps is enough.

use std::sync::OnceLock;

use elmur_base::{Values, ValuesMut};

use super::settings;
use crate::env::Player;
use crate::popgym::task::Difficulty;

/// A player that remembers every card and makes as few failing turns as possible.
#[derive(Debug, Clone)]
pub struct ConcentrationPlayer {
    cards: Vec<Card>,
    /// Number of values.
    values: usize,
    counts: [Counts; 13],
    /// Positions flipped in this turn.
    turn: [Option<usize>; 2],
}

/// What is known of a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Card {
    Unseen,
    Seen(usize),
    /// In a pair that was found.
    Paired,
}

/// Cards of one value that lie face down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Counts {
    unseen: usize,
    seen: usize,
}

impl ConcentrationPlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        let (decks, side) = settings(difficulty);
        let mut player = Self {
            cards: vec![Card::Unseen; 52 * decks],
            values: side.values(),
            counts: [Counts::default(); 13],
            turn: [None; 2],
        };
        player.reset();
        player
    }

    /// Notes what the newest flip showed.
    fn look(&mut self, position: usize, observation: Values<'_>) {
        let value = (observation.ints[position].max(0) as usize).min(self.values - 1);
        if self.cards[position] == Card::Unseen {
            self.cards[position] = Card::Seen(value);
            self.counts[value].unseen = self.counts[value].unseen.saturating_sub(1);
            self.counts[value].seen += 1;
        }
    }

    /// The lowest position of this kind, `except` left out.
    fn lowest(&self, kind: Card, except: Option<usize>) -> Option<usize> {
        (0..self.cards.len()).find(|i| self.cards[*i] == kind && Some(*i) != except)
    }

    /// Marks the cards of a turn that found a pair.
    fn settle(&mut self, first: usize, second: usize) {
        if let Card::Seen(value) = self.cards[first]
            && first != second
            && self.cards[first] == self.cards[second]
        {
            self.cards[first] = Card::Paired;
            self.cards[second] = Card::Paired;
            self.counts[value].seen -= 2;
        }
    }

    /// An unseen card; when there are none left, the first of a known pair.
    fn first(&self) -> usize {
        let seen = || self.cards.iter().position(|card| matches!(card, Card::Seen(_)));
        self.lowest(Card::Unseen, None).or_else(seen).unwrap_or(0)
    }

    fn second(&self, first: usize) -> usize {
        let partner = self.lowest(self.cards[first], Some(first));
        match (partner, self.lowest(Card::Unseen, None)) {
            (Some(_), Some(unseen)) if self.tries(first) => unseen,
            (Some(partner), _) => partner,
            (None, unseen) => unseen.unwrap_or(first),
        }
    }

    /// Whether to leave the partner of an unseen card that has just been flipped, and try another unseen
    /// card.
    fn tries(&self, first: usize) -> bool {
        match self.cards[first] {
            Card::Seen(value) if self.values == 2 => {
                let Counts { unseen, seen } = self.counts[value];
                let before = Counts { unseen: unseen + 1, seen: seen - 1 };
                Trials::shared().pay(before, self.counts[1 - value])
            }
            _ => false,
        }
    }
}

impl Player for ConcentrationPlayer {
    fn reset(&mut self) {
        self.cards.fill(Card::Unseen);
        let unseen = self.cards.len() / self.values;
        self.counts[..self.values].fill(Counts { unseen, seen: 0 });
        self.turn = [None; 2];
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        if let [Some(first), Some(second)] = self.turn {
            self.look(second, observation);
            self.settle(first, second);
            self.turn = [None; 2];
        }
        let card = match self.turn[0] {
            None => {
                let card = self.first();
                self.turn[0] = Some(card);
                card
            }
            Some(first) => {
                self.look(first, observation);
                let card = self.second(first);
                self.turn[1] = Some(card);
                card
            }
        };
        action.ints[0] = card as i32;
    }
}

/// With two values: where a flipped card's partner is known, whether it is better to try another unseen card.
struct Trials {
    /// Of every state before the flip, that of the flipped card's value first.
    pays: Vec<bool>,
    /// Expected failures until the end from every state.
    #[cfg(test)]
    failures: Vec<f64>,
}

/// Most cards of one value.
const MOST: usize = 52;
/// States of one value: an even number of cards up to `MOST` that lie face down, some of them unseen.
const STATES: usize = (MOST / 2 + 1) * (MOST / 2 + 1);

impl Counts {
    /// The states of one value in a row: 2h cards have 2h + 1 states, which h^2 states of fewer cards
    /// precede.
    fn index(self) -> usize {
        let half = (self.unseen + self.seen) / 2;
        half * half + self.unseen
    }

    /// All states with this many unseen cards.
    fn all(unseen: usize) -> impl Iterator<Item = Counts> {
        (unseen % 2..=MOST - unseen).step_by(2).map(move |seen| Counts { unseen, seen })
    }

    /// After unseen cards were flipped and seen ones were added or taken.
    fn after(self, flipped: usize, seen: isize) -> Counts {
        Counts { unseen: self.unseen - flipped, seen: self.seen.saturating_add_signed(seen) }
    }
}

fn index(one: Counts, other: Counts) -> usize {
    one.index() * STATES + other.index()
}

impl Trials {
    fn shared() -> &'static Self {
        static TRIALS: OnceLock<Trials> = OnceLock::new();
        TRIALS.get_or_init(Trials::solve)
    }

    fn pay(&self, flipped: Counts, other: Counts) -> bool {
        self.pays.get(index(flipped, other)).is_some_and(|pays| *pays)
    }

    /// In the order of the number of unseen cards, which every turn makes smaller. Once the unseen cards all
    /// have one value, no turn fails any more: the zeros that the table starts with.
    fn solve() -> Self {
        let mut failures = vec![0.0; STATES * STATES];
        let mut pays = vec![false; STATES * STATES];
        for total in 2..=2 * MOST {
            for unseen in total.saturating_sub(MOST).max(1)..=MOST.min(total - 1) {
                for one in Counts::all(unseen) {
                    for other in Counts::all(total - unseen) {
                        let (expected, pay) = flip(&failures, one, other);
                        pays[index(one, other)] = pay;
                        // Both values get their share, each when its turn comes as `one`.
                        let share = unseen as f64 / total as f64 * expected;
                        failures[index(one, other)] += share;
                        failures[index(other, one)] += share;
                    }
                }
            }
        }
        Self {
            pays,
            #[cfg(test)]
            failures,
        }
    }
}

/// Expected failures from the flip of an unseen card of value `one`, and whether another unseen card is
/// better than its partner.
fn flip(failures: &[f64], one: Counts, other: Counts) -> (f64, bool) {
    let left = (one.unseen - 1 + other.unseen) as f64;
    let mut trial = other.unseen as f64 / left * (1.0 + failures[index(one.after(1, 1), other.after(1, 1))]);
    if one.unseen > 1 {
        trial += (one.unseen - 1) as f64 / left * failures[index(one.after(2, 0), other)];
    }
    if one.seen == 0 {
        return (trial, false);
    }
    let partner = failures[index(one.after(1, -1), other)];
    if trial < partner - 1e-12 { (trial, true) } else { (partner, false) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Env;
    use crate::popgym::concentration::Layout;
    use crate::popgym::trace::tests::mean_return;
    use crate::popgym::{Concentration, Replay};

    /// The number of failed turns of the best play, from a dynamic program over all options written apart.
    #[test]
    fn expected_failures_are_those_of_the_best_play() {
        let trials = Trials::shared();
        for (unseen, expected) in [(26, 8.670_579_347_399), (52, 17.334_135_279_817)] {
            let all = Counts { unseen, seen: 0 };
            let failures = trials.failures[index(all, all)];
            assert!((failures - expected).abs() < 1e-9, "{failures}");
        }
        // Two of each unseen: two turns, and the first of them fails twice in three.
        let two = Counts { unseen: 2, seen: 0 };
        assert!((trials.failures[index(two, two)] - 2.0 / 3.0).abs() < 1e-12);
    }

    /// 1 - 2 failures / L, with 13.917183 expected failures where ranks make pairs.
    #[test]
    fn returns_are_those_of_the_best_play() {
        for (difficulty, expected) in Difficulty::ALL.into_iter().zip([0.833_258, 0.833_326, 0.732_362]) {
            let mut player = ConcentrationPlayer::new(difficulty);
            let (mean, error) = mean_return(&mut Concentration::new(difficulty), &mut player, 0..1000);
            assert!((mean - expected).abs() < 4.0 * error && error < 0.003, "{mean} ± {error}");
        }
    }

    /// The player's first flips of this layout. Its counts must be those of the cards at any time.
    fn flips(difficulty: Difficulty, layout: Vec<u16>, n: usize) -> Vec<i32> {
        let (mut env, mut player) = (Concentration::new(difficulty), ConcentrationPlayer::new(difficulty));
        let (mut seen, mut action) = (vec![0; layout.len()], [0]);
        env.begin(&Layout { layout }, ValuesMut::ints(&mut seen)).unwrap();
        let mut flip = || {
            let values = Values::ints(&seen);
            player.act(values, ValuesMut::ints(&mut action));
            for value in 0..player.values {
                let known = player.cards.iter().filter(|card| **card == Card::Seen(value)).count();
                assert_eq!(player.counts[value].seen, known);
            }
            let unseen = player.cards.iter().filter(|card| **card == Card::Unseen).count();
            assert_eq!(player.counts.iter().map(|counts| counts.unseen).sum::<usize>(), unseen);
            let room = ValuesMut::ints(&mut seen);
            env.step(Values::ints(&action), room).unwrap();
            action[0]
        };
        (0..n).map(|_| flip()).collect()
    }

    #[test]
    fn known_pairs_are_kept_for_later() {
        // Aces to kings four times over: the fourteenth card makes a pair of aces known.
        let layout = (0..52).map(|i| 4 * (i % 13) + i / 13).collect();
        let flips = flips(Difficulty::Hard, layout, 78);
        let fourteen: Vec<i32> = (0..14).collect();
        assert_eq!(flips[..14], fourteen);
        assert_eq!(flips[14..18], [14, 1, 15, 2]);
        assert_eq!(flips[36..44], [25, 12, 26, 0, 27, 28, 29, 30]);
        assert_eq!(flips[50..54], [37, 38, 39, 13]);
        assert_eq!(flips[74..], [50, 37, 51, 38]);
    }

    #[test]
    fn with_two_colours_a_second_unseen_card_can_be_better_than_the_known_partner() {
        // Black and red in turn: card 2 matches card 0, but there is much to gain from card 3.
        assert_eq!(flips(Difficulty::Easy, (0..52).collect(), 4), [0, 1, 2, 3]);
        // All black, then all red: no black card is left unseen after 26, and the reds pair up.
        let blacks_first: Vec<u16> = (0..52).map(|i| if i < 26 { 2 * i } else { 2 * (i - 26) + 1 }).collect();
        let whole: Vec<i32> = (0..52).collect();
        assert_eq!(flips(Difficulty::Easy, blacks_first, 52), whole);
    }

    /// Unseen and seen cards of the flipped card's value and of the other, before the flip; literals of the
    /// other program.
    #[test]
    fn trials_are_made_where_they_pay() {
        let mut player = ConcentrationPlayer::new(Difficulty::Easy);
        player.cards[0] = Card::Seen(0);
        for ([unseen, seen, other_unseen, other_seen], expected) in [
            ([3, 1, 2, 0], false),
            ([5, 1, 2, 0], true),
            ([5, 1, 4, 0], true),
            ([5, 1, 6, 0], false),
            ([5, 1, 1, 1], false),
            ([5, 1, 5, 1], true),
            ([5, 1, 7, 1], false),
            ([14, 2, 12, 0], true),
            ([14, 2, 14, 0], false),
            ([25, 1, 26, 0], true),
        ] {
            // The flipped card is seen now.
            player.counts[0] = Counts { unseen: unseen - 1, seen: seen + 1 };
            player.counts[1] = Counts { unseen: other_unseen, seen: other_seen };
            assert_eq!(player.tries(0), expected, "{unseen} {seen} {other_unseen} {other_seen}");
        }
    }
}
