//! What a player has seen of a board.

/// Viewed cells and their clues.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    pub viewed: u64,
    /// Mines around each viewed cell.
    pub clues: [u8; 64],
}

impl Default for View {
    fn default() -> Self {
        Self { viewed: 0, clues: [0; 64] }
    }
}

impl View {
    pub fn with(&self, cell: usize, clue: u8) -> Self {
        let mut more = *self;
        more.viewed |= 1 << cell;
        more.clues[cell] = clue;
        more
    }
}

/// Cells of a set, lowest first.
pub(super) fn cells(mut set: u64) -> impl Iterator<Item = usize> + Clone {
    std::iter::from_fn(move || {
        let cell = set.trailing_zeros() as usize;
        set &= set.wrapping_sub(1);
        (cell < 64).then_some(cell)
    })
}
