//! The tokens of a transition: which numbers each place can be, and the numbers that tokens stand for.

use crate::ends::{Encoder, Ends};

/// The places of a transition, in order: observation, action, reward, value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Vocabulary {
    /// Number of different tokens of each place, but for the stop token.
    sizes: Vec<usize>,
    observation: usize,
    action: usize,
    /// Places whose tokens are bins.
    continuous: usize,
}

impl Vocabulary {
    /// The vocabulary of a policy whose continuous numbers are cut into `bins` bins.
    pub fn new(ends: Ends<'_>, bins: usize) -> Self {
        let (mut sizes, mut continuous) = (Vec::new(), 2);
        for encoder in ends.observation {
            match encoder {
                Encoder::Categorical { sizes: choices, .. } => sizes.extend(choices),
                other => {
                    continuous += other.len();
                    sizes.extend(std::iter::repeat_n(bins, other.len()));
                }
            }
        }
        let observation = sizes.len();
        sizes.extend(ends.action.sizes());
        if !ends.action.is_discrete() {
            continuous += ends.action.dim();
            sizes.extend(std::iter::repeat_n(bins, ends.action.dim()));
        }
        let action = sizes.len() - observation;
        sizes.extend([bins, bins]);
        Self { sizes, observation, action, continuous }
    }

    /// Tokens of a transition, D.
    pub fn per_transition(&self) -> usize {
        self.sizes.len()
    }

    /// Observation tokens of a transition: places 0 to below this.
    pub fn observation(&self) -> usize {
        self.observation
    }

    /// Action tokens of a transition, which follow the observation's.
    pub fn action(&self) -> usize {
        self.action
    }

    /// Places whose tokens are bins of continuous numbers.
    pub fn continuous(&self) -> usize {
        self.continuous
    }

    /// Whether a place is an action's.
    pub fn is_action(&self, place: usize) -> bool {
        (self.observation..self.observation + self.action).contains(&place)
    }

    /// Numbers of tokens that the parts of an action can be.
    pub fn actions(&self) -> impl Iterator<Item = usize> {
        self.sizes[self.observation..self.observation + self.action].iter().copied()
    }

    /// Number of different tokens of a place, but for the stop token.
    pub fn size(&self, place: usize) -> usize {
        self.sizes[place]
    }

    /// The stop token, which is also the number N of other tokens that every place has room for.
    pub fn stop(&self) -> usize {
        self.sizes.iter().copied().max().unwrap_or(0)
    }

    /// Row of the embedding table for a token at a place.
    pub fn row(&self, place: usize, token: usize) -> usize {
        let stop = self.stop();
        if token < stop { stop * place + token } else { stop * self.per_transition() }
    }
}
