//! Discrete actions as one choice among many, and the choices that a player accepts.

use elmur_base::{Leaf, Space, Values};

use crate::env::Player;

/// The choices of a discrete action space, in one row. An action of several integers counts as one choice,
/// the last integer running fastest: cell (row, column) of a board is choice row * columns + column. These
/// are the actions of the same environment with [`Wrappers::flat_action`](crate::Wrappers::flat_action).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choices {
    sizes: Vec<usize>,
    count: usize,
}

impl Choices {
    /// The choices of an action space; none where actions are not all integers, or more than 2^31 - 1.
    pub fn of(action: &Space) -> Option<Self> {
        let mut sizes = Vec::new();
        for leaf in action.leaves() {
            let Leaf::Ints(leaf) = leaf else { return None };
            sizes.extend_from_slice(leaf);
        }
        let count = sizes.iter().try_fold(1usize, |count, n| count.checked_mul(*n))?;
        (count <= i32::MAX as usize).then_some(Self { sizes, count })
    }

    /// How many choices there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The number of an action's choice.
    pub fn index(&self, action: Values<'_>) -> usize {
        row_major(&self.sizes, action.ints)
    }

    /// Writes the action of a choice.
    pub fn write(&self, choice: usize, action: &mut [i32]) {
        write_row_major(&self.sizes, choice, action);
    }

    /// Marks the choices that are as good as `action`, which `player` has just chosen, that choice among
    /// them, and clears all others. `accepted` has [`Choices::count`] entries. See [`Player::accept`].
    pub fn accepted(&self, player: &mut dyn Player, action: Values<'_>, accepted: &mut [bool]) {
        accepted.fill(false);
        if let Some(chosen) = accepted.get_mut(self.index(action)) {
            *chosen = true;
        }
        player.accept(accepted);
    }
}

/// The number of a combination of integers, the last of which runs fastest.
pub(crate) fn row_major(sizes: &[usize], ints: &[i32]) -> usize {
    ints.iter().zip(sizes).fold(0, |number, (i, n)| number * n + *i as usize)
}

/// Writes the combination of integers that has this number.
pub(crate) fn write_row_major(sizes: &[usize], number: usize, ints: &mut [i32]) {
    let mut rest = number;
    for (i, n) in ints.iter_mut().zip(sizes).rev() {
        (*i, rest) = ((rest % n) as i32, rest / n);
    }
}

#[cfg(test)]
mod tests {
    use elmur_base::ValuesMut;

    use super::*;

    #[test]
    fn cells_of_a_board_are_counted_row_by_row() {
        let board = Choices::of(&Space::MultiDiscrete { sizes: vec![2, 3] }).unwrap();
        assert_eq!(board.count(), 6);
        assert_eq!(
            [[0, 0], [0, 2], [1, 0], [1, 2]].map(|cell| board.index(Values::ints(&cell))),
            [0, 2, 3, 5]
        );
        for choice in 0..6 {
            let mut cell = [9; 2];
            board.write(choice, &mut cell);
            assert_eq!(board.index(Values::ints(&cell)), choice);
        }
        assert_eq!(Choices::of(&Space::Discrete { n: 4 }).unwrap().count(), 4);
    }

    #[test]
    fn numbers_are_no_choices_and_neither_are_too_many() {
        assert_eq!(Choices::of(&Space::unbounded([1])), None);
        let mixed = Space::Tuple { parts: vec![Space::Discrete { n: 4 }, Space::unbounded([1])] };
        assert_eq!(Choices::of(&mixed), None);
        assert_eq!(Choices::of(&Space::MultiDiscrete { sizes: vec![1 << 16, 1 << 15] }), None);
        assert_eq!(Choices::of(&Space::MultiDiscrete { sizes: vec![usize::MAX; 3] }), None);
    }

    #[test]
    fn a_player_without_ties_accepts_what_it_chose() {
        struct Second;
        impl Player for Second {
            fn reset(&mut self) {}
            fn act(&mut self, _: Values<'_>, action: ValuesMut<'_>) {
                action.ints[0] = 1;
            }
            fn took(&mut self, _: Values<'_>) {}
        }
        let choices = Choices::of(&Space::Discrete { n: 3 }).unwrap();
        let (mut action, mut accepted) = ([0], [true; 3]);
        Second.act(Values::default(), ValuesMut::ints(&mut action));
        choices.accepted(&mut Second, Values::ints(&action), &mut accepted);
        assert_eq!(accepted, [false, true, false]);
    }
}
