//! CountRecall: say how often a value has been shown.
//!
//! Observation: a value and a query, dealt from two decks shuffled apart. Values are colours, suits or ranks.
//! Actions: a number from 0 to the cards of one value (one less in version 1.0.6, where some queries
//! therefore have no right answer). Right is how often the query's value has been shown, the value beside the
//! query included: it pays 1/(N - 1), another answer costs as much. N cards make N - 1 steps; the last query
//! is not asked.

use elmur_base::{Space, Spaces, Values, ValuesMut};
use elmur_rng::Rng;
use serde::Deserialize;

use super::deck::{Deck, Side};
use super::replay::{Replay, choice};
use super::task::{Difficulty, Version};
use crate::env::{Env, Player, Step};
use crate::error::{Error, Result};

/// CountRecall: say how often a value has been shown.
#[derive(Debug, Clone)]
pub struct CountRecall {
    spaces: Spaces,
    side: Side,
    actions: usize,
    /// Cards of one value.
    largest: usize,
    pay: f64,
    values: Deck,
    queries: Deck,
    /// Pairs shown; 0 before the first reset.
    shown: usize,
    /// How often each value was shown.
    counts: [u8; 13],
    /// The right answer to the newest query.
    answer: usize,
}

/// The hidden state of [`CountRecall`]: the orders of both decks, the first card first.
#[derive(Debug, Clone, Deserialize)]
pub struct DealOrders {
    /// Cards that are shown as values.
    pub value_order: Vec<u16>,
    /// Cards that are shown as queries.
    pub query_order: Vec<u16>,
}

/// Number of decks, and which property of a card is counted.
fn settings(difficulty: Difficulty) -> (usize, Side) {
    difficulty.pick([(1, Side::Colour), (2, Side::Suit), (4, Side::Rank)])
}

fn actions(difficulty: Difficulty, version: Version) -> usize {
    let (decks, side) = settings(difficulty);
    52 * decks / side.values() + usize::from(version == Version::V107)
}

impl CountRecall {
    /// The task of this difficulty: colours of 1 deck, suits of 2 or ranks of 4.
    pub fn new(difficulty: Difficulty, version: Version) -> Self {
        let ((decks, side), actions) = (settings(difficulty), actions(difficulty, version));
        let spaces = Spaces {
            observation: Space::MultiDiscrete { sizes: vec![side.values(); 2] },
            action: Space::Discrete { n: actions },
        };
        let deck = Deck::new(decks);
        let pay = 1.0 / (deck.len() - 1) as f64;
        Self {
            spaces,
            side,
            actions,
            largest: deck.len() / side.values(),
            pay,
            values: deck.clone(),
            queries: deck,
            shown: 0,
            counts: [0; 13],
            answer: 0,
        }
    }

    #[inline]
    fn show(&mut self, observation: ValuesMut<'_>) {
        let value = self.side.of(self.values.card(self.shown));
        let query = self.side.of(self.queries.card(self.shown));
        self.shown += 1;
        self.counts[value] += 1;
        self.answer = usize::from(self.counts[query]);
        observation.ints.copy_from_slice(&[value as i32, query as i32]);
    }

    #[inline]
    fn running(&self) -> bool {
        (1..self.values.len()).contains(&self.shown)
    }

    fn first(&mut self, observation: ValuesMut<'_>) {
        (self.shown, self.counts) = (0, [0; 13]);
        self.show(observation);
    }
}

impl Env for CountRecall {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn reset(&mut self, seed: u64, observation: ValuesMut<'_>) -> Result<()> {
        let mut rng = Rng::new(seed, 0);
        self.values.shuffle(&mut rng);
        self.queries.shuffle(&mut rng);
        self.first(observation);
        Ok(())
    }

    #[inline]
    fn step(&mut self, action: Values<'_>, observation: ValuesMut<'_>) -> Result<Step> {
        if self.running() {
            choice(action, self.actions, "count")?;
        }
        self.advance(action, (), observation)
    }
}

impl Replay for CountRecall {
    type Hidden = DealOrders;
    type Draw = ();

    fn begin(&mut self, hidden: &DealOrders, observation: ValuesMut<'_>) -> Result<()> {
        self.shown = 0; // no episode, should only one of the orders be possible
        self.values.arrange(&hidden.value_order)?;
        self.queries.arrange(&hidden.query_order)?;
        self.first(observation);
        Ok(())
    }

    /// Takes every count, as the package does: traces of version 1.0.6 have answers outside of its action
    /// space.
    #[inline]
    fn advance(&mut self, action: Values<'_>, (): (), observation: ValuesMut<'_>) -> Result<Step> {
        if !self.running() {
            return Err(Error::Finished);
        }
        let count = choice(action, self.largest + 1, "count")?;
        let reward = if count == self.answer { self.pay } else { -self.pay };
        self.show(observation);
        Ok(Step { reward, terminated: self.shown == self.values.len(), ..Step::default() })
    }
}

/// A player that counts. Where the count is not an action (version 1.0.6), it answers the largest action.
#[derive(Debug, Clone)]
pub struct CountRecallPlayer {
    counts: [i32; 13],
    largest: i32,
    /// The right answer to the newest query.
    answer: i32,
}

impl CountRecallPlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty, version: Version) -> Self {
        Self { counts: [0; 13], largest: actions(difficulty, version) as i32 - 1, answer: 0 }
    }
}

impl Player for CountRecallPlayer {
    fn reset(&mut self) {
        self.counts = [0; 13];
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let [value, query] = [0, 1].map(|i| (observation.ints[i].max(0) as usize).min(12));
        self.counts[value] += 1;
        self.answer = self.counts[query];
        action.ints[0] = self.answer.min(self.largest);
    }

    fn took(&mut self, _: Values<'_>) {}

    /// Any answer where the right one is not an action.
    fn accept(&mut self, choices: &mut [bool]) {
        if self.answer > self.largest {
            choices.fill(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::popgym::deck::tests::{check_misuse, check_pairs, check_seeds, check_shares, play};
    use crate::popgym::trace::tests::{check_family, check_family_v106, mean_return};

    #[test]
    fn traces_replay() {
        check_family("CountRecall", |difficulty| CountRecall::new(difficulty, Version::V107));
        check_family_v106("CountRecall", |difficulty| CountRecall::new(difficulty, Version::V106));
    }

    #[test]
    fn the_player_is_always_right() {
        for difficulty in Difficulty::ALL {
            let mut env = CountRecall::new(difficulty, Version::V107);
            let mut player = CountRecallPlayer::new(difficulty, Version::V107);
            let (mean, error) = mean_return(&mut env, &mut player, 0..50);
            assert!((mean - 1.0).abs() < 1e-9 && error < 1e-9, "{mean}");
        }
    }

    /// Expected returns: 1 less twice the share of queries that come when the last card of their value is
    /// out.
    #[test]
    fn the_player_misses_only_what_1_0_6_cannot_express() {
        for (difficulty, expected) in Difficulty::ALL.into_iter().zip([0.962_237, 0.943_905, 0.890_878]) {
            let mut env = CountRecall::new(difficulty, Version::V106);
            let mut player = CountRecallPlayer::new(difficulty, Version::V106);
            let (mean, error) = mean_return(&mut env, &mut player, 0..2000);
            assert!((mean - expected).abs() < 4.0 * error && error < 0.002, "{mean} ± {error}");
        }
    }

    #[test]
    fn seeds_decide_episodes_and_their_decks_are_shuffled_apart() {
        check_seeds(&mut CountRecall::new(Difficulty::Easy, Version::V107), 51);
        let mut env = CountRecall::new(Difficulty::Hard, Version::V107);
        check_seeds(&mut env, 207);
        for side in 0..2 {
            check_pairs(13, 208, 20_000, |seed| {
                let (shown, _) = play(&mut env, seed, 1);
                (shown[0][side], shown[1][side])
            });
        }
        let mut counts = [0; 169];
        for seed in 0..20_000 {
            let (shown, _) = play(&mut env, seed, 0);
            counts[(13 * shown[0][0] + shown[0][1]) as usize] += 1;
        }
        check_shares(&counts, [1.0 / 169.0; 169].into_iter());
    }

    #[test]
    fn misuse_is_an_error() {
        for (version, largest) in [(Version::V106, 25), (Version::V107, 26)] {
            let mut env = CountRecall::new(Difficulty::Medium, version);
            assert_eq!(env.spaces().action, Space::Discrete { n: largest + 1 });
            check_misuse(&mut env);
            let (whole, part): (Vec<u16>, Vec<u16>) = ((0..104).collect(), (0..103).collect());
            for (value_order, query_order) in [(&whole, &part), (&part, &whole)] {
                let hidden =
                    DealOrders { value_order: value_order.clone(), query_order: query_order.clone() };
                let mut seen = [0; 2];
                assert!(env.begin(&hidden, ValuesMut::ints(&mut seen)).is_err());
                let late = env.step(Values::ints(&[0]), ValuesMut::ints(&mut seen));
                assert!(matches!(late, Err(Error::Finished)));
            }
        }
    }
}
