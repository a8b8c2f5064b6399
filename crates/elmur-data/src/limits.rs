//! Bounds on the memory that reading takes.

/// How much memory reading may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Data up to this many bytes is kept in memory; more is read from disk when it is needed. It also bounds
    /// the decoded episodes that are remembered of formats that can only be decoded whole. Default: 256 MiB.
    pub memory: u64,
    /// The most bytes that one compressed `.npz` file may inflate to, and that it may have itself, and that one
    /// decoded episode of another program's format may take. A file that claims more is refused before it is
    /// inflated, and one that has more than it claims is refused while it is. Reading a file takes at most three
    /// times as much memory: the file, its numbers, and a copy of them in another type. Default: 512 MiB.
    pub inflated: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { memory: 256 << 20, inflated: 512 << 20 }
    }
}
