//! How an architecture cuts an episode: windows that are computed together, and the phases of a single step.

/// The stretch of an episode that an architecture computes together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Environment steps of a window.
    pub steps: usize,
    /// Windows that one optimizer step covers, with gradients through what is carried from one to the next.
    pub unroll: usize,
    /// When acting beyond the first window: true keeps the newest `steps` steps in view, false begins an
    /// empty window.
    pub slides: bool,
    /// Steps before a crop's start that a training window shows too. Where the episode has no such steps, its
    /// first is repeated.
    pub lead: usize,
    /// Whether crops begin at any step of an episode, also where they reach beyond its end; otherwise only
    /// where a whole crop fits.
    pub anywhere: bool,
}

impl Window {
    /// A window of `steps` steps that ends where the next begins, with gradients through `unroll` of them.
    pub fn of(steps: usize, unroll: usize) -> Self {
        Self { steps, unroll, slides: false, lead: 0, anywhere: false }
    }
}

/// The parts of an environment step when acting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Rows begin an episode, or parameters have changed: compute what follows from carried state and
    /// parameters.
    Begin,
    /// Tokens up to the observation; the action is read here.
    Observe,
    /// Tokens after the observation, once the action is known.
    Act,
    /// The window is full: what it leaves behind.
    Close,
}
