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
//!
//! Where others turn cards over too, a turn can begin with a card seen before: [`Trials`] says whether to
//! take its partner in that case as well. And time can run out: known pairs are taken when there is just
//! time for them.

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
    /// Flips until the episode is cut off.
    left: usize,
    /// The first card of this turn, once it has been turned over.
    first: Option<First>,
    /// The card turned over last.
    last: Option<usize>,
    /// Cards that are as good as the one chosen last.
    ties: Ties,
}

/// The first card of a turn.
#[derive(Debug, Clone, Copy)]
struct First {
    position: usize,
    /// Whether the card had not been seen before.
    fresh: bool,
}

/// Cards that are as good as one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ties {
    Unseen,
    /// Seen cards with a partner that has been seen.
    Pairs,
    /// Seen cards of this value, one left out.
    Partners(usize, usize),
    /// None: no flip finds anything any more.
    Nothing,
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
            left: 0,
            first: None,
            last: None,
            ties: Ties::Nothing,
        };
        player.reset();
        player
    }

    /// Takes in what a flip has shown, by the rules of turns.
    fn learn(&mut self, position: usize, observation: Values<'_>) {
        self.left = self.left.saturating_sub(1);
        let fresh = self.cards[position] == Card::Unseen;
        if fresh {
            let value = (observation.ints[position].max(0) as usize).min(self.values - 1);
            self.cards[position] = Card::Seen(value);
            self.counts[value].unseen = self.counts[value].unseen.saturating_sub(1);
            self.counts[value].seen += 1;
        }
        match (self.first.take(), self.cards[position]) {
            // A card that is up already ends the turn.
            (_, Card::Paired) => {}
            (None, _) => self.first = Some(First { position, fresh }),
            (Some(first), card) => {
                if let Card::Seen(value) = card
                    && first.position != position
                    && self.cards[first.position] == card
                {
                    self.cards[first.position] = Card::Paired;
                    self.cards[position] = Card::Paired;
                    self.counts[value].seen -= 2;
                }
            }
        }
    }

    /// Whether a card is among equally good ones.
    fn is_among(&self, ties: Ties, position: usize) -> bool {
        match (ties, self.cards[position]) {
            (Ties::Unseen, card) => card == Card::Unseen,
            (Ties::Pairs, Card::Seen(value)) => self.counts[value].seen > 1,
            (Ties::Partners(value, except), card) => card == Card::Seen(value) && position != except,
            _ => false,
        }
    }

    /// Whether there is time for a turn that finds nothing, of which `flips` flips are to come, before all
    /// known pairs are taken.
    fn has_time(&self, flips: usize) -> bool {
        let pairs: usize = self.counts[..self.values].iter().map(|counts| counts.seen / 2).sum();
        self.left >= 2 * pairs + flips
    }

    /// Unseen cards, as long as there are any and there is time; then known pairs.
    fn begin(&self) -> Ties {
        let unseen = self.counts[..self.values].iter().any(|counts| counts.unseen > 0);
        let pairs = self.counts[..self.values].iter().any(|counts| counts.seen > 1);
        match (unseen && (self.has_time(2) || !pairs), pairs) {
            (true, _) => Ties::Unseen,
            (false, true) => Ties::Pairs,
            (false, false) => Ties::Nothing,
        }
    }

    fn complete(&self, first: First) -> Ties {
        let Card::Seen(value) = self.cards[first.position] else { return Ties::Nothing };
        let unseen = self.counts[..self.values].iter().any(|counts| counts.unseen > 0);
        let partner = self.counts[value].seen > 1;
        if partner && !(unseen && self.has_time(1) && self.tries(value, first.fresh)) {
            Ties::Partners(value, first.position)
        } else if unseen {
            Ties::Unseen
        } else {
            Ties::Nothing
        }
    }

    /// Whether to leave the partner of the turn's first card, which has this value, and try an unseen card.
    fn tries(&self, value: usize, fresh: bool) -> bool {
        self.values == 2 && Trials::shared().pay(self.counts[value], self.counts[1 - value], fresh)
    }
}

impl Player for ConcentrationPlayer {
    fn reset(&mut self) {
        self.cards.fill(Card::Unseen);
        let unseen = self.cards.len() / self.values;
        self.counts[..self.values].fill(Counts { unseen, seen: 0 });
        self.left = 2 * self.cards.len();
        (self.first, self.last) = (None, None);
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        if let Some(position) = self.last {
            self.learn(position, observation);
        }
        self.ties = self.first.map_or_else(|| self.begin(), |first| self.complete(first));
        let card = (0..self.cards.len()).find(|position| self.is_among(self.ties, *position)).unwrap_or(0);
        self.last = Some(card);
        action.ints[0] = card as i32;
    }

    fn took(&mut self, action: Values<'_>) {
        self.last = Some(action.ints[0] as usize);
    }

    /// All unseen cards where the player turns one over; either card of all known pairs at the beginning of a
    /// turn that takes one; all known partners at its end.
    fn accept(&mut self, choices: &mut [bool]) {
        choices.iter_mut().enumerate().for_each(|(card, choice)| *choice |= self.is_among(self.ties, card));
    }
}

/// With two values: expected failures until the end from every state at the beginning of a turn. They tell
/// whether it is better to try an unseen card where a flipped card's partner is known.
struct Trials {
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

    /// Whether to try another unseen card where a card has been turned over and its partner is known. The
    /// counts include that card among the seen ones; if it is `fresh`, it was unseen before.
    fn pay(&self, flipped: Counts, other: Counts, fresh: bool) -> bool {
        // Once the unseen cards all have one value, no turn fails any more.
        if other.unseen == 0 || flipped.index().max(other.index()) >= STATES {
            return false;
        }
        if fresh {
            let before = Counts { unseen: flipped.unseen + 1, seen: flipped.seen - 1 };
            return flip(&self.failures, before, other).1;
        }
        let left = (flipped.unseen + other.unseen) as f64;
        let failed = self.failures[index(flipped, other.after(1, 1))];
        let mut trial = other.unseen as f64 / left * (1.0 + failed);
        if flipped.unseen > 0 {
            trial += flipped.unseen as f64 / left * self.failures[index(flipped.after(1, -1), other)];
        }
        trial < self.failures[index(flipped.after(0, -2), other)] - 1e-12
    }

    /// In the order of the number of unseen cards, which every turn makes smaller. Once the unseen cards all
    /// have one value, no turn fails any more: the zeros that the table starts with.
    fn solve() -> Self {
        let mut failures = vec![0.0; STATES * STATES];
        for total in 2..=2 * MOST {
            for unseen in total.saturating_sub(MOST).max(1)..=MOST.min(total - 1) {
                for one in Counts::all(unseen) {
                    for other in Counts::all(total - unseen) {
                        let (expected, _) = flip(&failures, one, other);
                        // Both values get their share, each when its turn comes as `one`.
                        let share = unseen as f64 / total as f64 * expected;
                        failures[index(one, other)] += share;
                        failures[index(other, one)] += share;
                    }
                }
            }
        }
        Self { failures }
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
            assert_eq!(player.tries(0, true), expected, "{unseen} {seen} {other_unseen} {other_seen}");
        }
    }

    /// A player of the hardest task before cards in the order of aces to kings, and what it sees.
    fn at_table() -> (Concentration, ConcentrationPlayer, Vec<i32>) {
        let (mut env, mut player) =
            (Concentration::new(Difficulty::Hard), ConcentrationPlayer::new(Difficulty::Hard));
        let mut seen = vec![0; 52];
        let layout = (0..52).map(|i| 4 * (i % 13) + i / 13).collect();
        env.begin(&Layout { layout }, ValuesMut::ints(&mut seen)).unwrap();
        player.reset();
        (env, player, seen)
    }

    /// Asks the player, flips another card and returns what the player wanted.
    fn flip_other(table: &mut (Concentration, ConcentrationPlayer, Vec<i32>), card: i32) -> i32 {
        let (env, player, seen) = table;
        let mut action = [0];
        player.act(Values::ints(seen), ValuesMut::ints(&mut action));
        player.took(Values::ints(&[card]));
        env.step(Values::ints(&[card]), ValuesMut::ints(seen)).unwrap();
        action[0]
    }

    #[test]
    fn foreign_flips_are_remembered_and_their_turns_followed() {
        let mut table = at_table();
        // An ace and its partner; the ace again, which ends a turn at once; a two, whose turn the ace ends;
        // the two's partner, which is wanted together with the two.
        let wanted = [0, 13, 0, 1, 0, 14, 2].map(|card| flip_other(&mut table, card));
        assert_eq!(wanted, [0, 1, 1, 1, 2, 2, 1]);
        assert_eq!(table.1.cards[..2], [Card::Paired, Card::Seen(1)]);
        assert_eq!(table.1.cards[13..15], [Card::Paired, Card::Seen(1)]);
    }

    #[test]
    fn known_pairs_are_taken_before_time_runs_out() {
        let mut table = at_table();
        // Two aces and two twos are seen, but not in one turn; then flips of one card twice until six are
        // left.
        for card in [0, 1, 13, 14] {
            flip_other(&mut table, card);
        }
        for _ in 4..98 {
            flip_other(&mut table, 40);
        }
        let (env, player, seen) = &mut table;
        let mut flips = Vec::new();
        let mut action = [0];
        for _ in 0..6 {
            player.act(Values::ints(seen), ValuesMut::ints(&mut action));
            flips.push(action[0]);
            env.step(Values::ints(&action), ValuesMut::ints(seen)).unwrap();
        }
        // There is time for one turn with unseen cards before both pairs.
        assert_eq!(flips, [2, 3, 0, 13, 1, 14]);
    }

    #[test]
    fn cards_of_a_kind_are_equally_good() {
        let mut player = ConcentrationPlayer::new(Difficulty::Hard);
        player.cards[..4].copy_from_slice(&[Card::Seen(3), Card::Seen(3), Card::Paired, Card::Seen(5)]);
        player.counts[3].seen = 2;
        let among = |player: &ConcentrationPlayer, ties| -> Vec<usize> {
            (0..6).filter(|i| player.is_among(ties, *i)).collect()
        };
        assert_eq!(among(&player, Ties::Unseen), [4, 5]);
        assert_eq!(among(&player, Ties::Pairs), [0, 1]);
        assert_eq!(among(&player, Ties::Partners(3, 0)), [1]);
        assert!(among(&player, Ties::Nothing).is_empty());
    }
}
