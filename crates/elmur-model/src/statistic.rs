//! Parameters that are computed from the training data before training begins: ranges to scale by, ends of
//! bins. They have no gradient, and checkpoints keep them with the weights that were trained beside them.

use elmur_base::{Field, Kind};

use crate::ends::Ends;
use crate::error::{Error, Result};
use crate::initial::Init;

/// What a parameter holds that is computed from the training data; see [`Net::statistic`](crate::Net::statistic).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statistic {
    /// The smallest value of every number of a field, `[numbers]`.
    Least(Field),
    /// The largest value of every number of a field, `[numbers]`.
    Greatest(Field),
    /// The mean of every number of a field, `[numbers]`; 0 for a number that never changes.
    Mean(Field),
    /// The standard deviation of every number of a field, `[numbers]`; 1 for a number that never changes.
    Deviation(Field),
    /// Rising ends of `bins` bins for every number of a field, [numbers, bins + 1], with about as many steps
    /// of the data in each bin.
    ///
    /// They are every ceil(n / bins)-th of the n sorted values, and the largest. A number that takes at most
    /// `bins` different values has a bin for each of them instead, with ends halfway between neighbours.
    Bins {
        /// The field whose numbers are cut into bins.
        field: Field,
        /// Number of bins of each number.
        bins: usize,
    },
}

impl Statistic {
    /// The field that the parameter is computed from.
    pub fn field(self) -> Field {
        match self {
            Statistic::Least(field)
            | Statistic::Greatest(field)
            | Statistic::Mean(field)
            | Statistic::Deviation(field)
            | Statistic::Bins { field, .. } => field,
        }
    }

    /// Axes of the parameter for a field of this many numbers.
    pub(crate) fn shape(self, numbers: usize) -> Vec<usize> {
        match self {
            Statistic::Bins { bins, .. } => vec![numbers, bins.saturating_add(1)],
            _ => vec![numbers],
        }
    }

    /// What the parameter holds before there are data: the range from -1 to 1, mean 0 and deviation 1.
    pub(crate) fn init(self) -> Init {
        match self {
            Statistic::Least(_) => Init::Constant(-1.0),
            Statistic::Greatest(_) | Statistic::Deviation(_) => Init::Constant(1.0),
            Statistic::Mean(_) => Init::Constant(0.0),
            Statistic::Bins { .. } => Init::Spaced(-1.0, 1.0),
        }
    }

    /// An error for fields that hold no real numbers.
    pub(crate) fn check(self, ends: Ends<'_>) -> Result<()> {
        let real = match self.field() {
            Field::Observation(leaf) | Field::NextObservation(leaf) => {
                ends.observation.get(leaf).is_some_and(|encoder| encoder.kind() != Kind::Ints)
            }
            Field::Action | Field::Target => !ends.action.is_discrete(),
            Field::Reward | Field::CountedReward(_) | Field::LaterRewards(_) | Field::ReturnToGo => true,
            Field::Weight(_) => false,
            Field::Accepted | Field::Imitate | Field::Exists | Field::KnownNext | Field::Terminated => false,
        };
        if real && !matches!(self, Statistic::Bins { bins: 0, .. }) {
            return Ok(());
        }
        let expected = "a field of real numbers, and at least one bin";
        Err(Error::input("statistic", expected, format!("{self:?}")))
    }
}
