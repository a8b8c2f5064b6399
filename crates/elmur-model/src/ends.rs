//! The two ends of a policy: encoders of what it sees, the kind of what it does, and the tokens in between.
//!
//! Both follow from spaces ([`Encoder::of`], [`Action::of`]): one encoder per leaf of the observation space,
//! one head for the action space.

use elmur_base::{Describe, Kind, Leaf, Space, Spaces};
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{Error, Result};
use crate::vision::Residual;

/// What an architecture sees and does, borrowed from its configuration.
#[derive(Debug, Clone, Copy)]
pub struct Ends<'a> {
    /// One encoder per leaf of the observation.
    pub observation: &'a [Encoder],
    /// The kind of action.
    pub action: &'a Action,
    /// Tokens that an environment step becomes.
    pub tokens: TokenFormat,
    /// Width of tokens.
    pub width: usize,
}

/// How one leaf of an observation becomes a vector of the model's width.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Encoder {
    /// `dim` numbers through a linear map.
    Vector {
        /// Number of numbers in an observation: 1 to 16777216.
        dim: usize,
        /// Whether the numbers come as bytes, which the policy sees as b / 255.
        #[serde(default, skip_serializing_if = "is_false")]
        bytes: bool,
    },
    /// One integer per entry of `sizes`, each below it.
    Categorical {
        /// Number of values of each integer of an observation, which lie from 0 to below it.
        sizes: Vec<usize>,
        /// How the integers of an observation become vectors.
        encoding: CategoricalEncoding,
    },
    /// Pixels [channels, height, width] through three convolutions and a linear map.
    Image {
        /// Number of colour channels of all cameras together: 1 to 65536.
        channels: usize,
        /// Number of rows of pixels: 8 to 65536.
        height: usize,
        /// Number of columns of pixels: 8 to 65536.
        width: usize,
        /// Whether pixels come as bytes, which the policy sees as b / 255; otherwise they come as numbers
        /// from 0 to 1.
        #[serde(default, skip_serializing_if = "is_false")]
        bytes: bool,
    },
    /// Pixels [channels, height, width] through residual convolutions, camera by camera, whose grid of features
    /// is read place by place and by learned queries: places are kept apart.
    ResidualImage {
        /// Number of colour channels of all cameras together: 1 to 65536.
        channels: usize,
        /// Number of rows of pixels: 8 to 65536.
        height: usize,
        /// Number of columns of pixels: 8 to 65536.
        width: usize,
        /// Whether pixels come as bytes, which the policy sees as b / 255; otherwise they come as numbers
        /// from 0 to 1.
        #[serde(default, skip_serializing_if = "is_false")]
        bytes: bool,
        /// Number of cameras, whose channels follow each other: a divisor of the channels.
        cameras: usize,
        /// Channels of the first convolution and of each residual block behind it, multiples of 8.
        widths: Vec<usize>,
        /// For each of `widths`, 2 if it halves height and width and 1 if it keeps them; none: all halve them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        strides: Vec<usize>,
        /// Number of queries that look at places of the grid: 0 to 256. At least one of `queries`, `grid` and
        /// `keypoints` is not 0.
        queries: usize,
        /// Number of features of every place of the grid that are read by weights of the place's own: 0 to 256.
        /// Policies learn sooner from them than from queries where things are.
        #[serde(default, skip_serializing_if = "is_zero")]
        grid: usize,
        /// Number of features of which it is read where in a camera's picture they are (spatial softmax):
        /// 0 to 256. What they have learned at one place holds at all places.
        #[serde(default, skip_serializing_if = "is_zero")]
        keypoints: usize,
    },
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// How integers become vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum CategoricalEncoding {
    /// One-hot through a linear map with bias.
    OneHot,
    /// A learned vector per value, summed over components.
    Embedding,
    /// The integer itself as a number through a linear map (the published code's way).
    Raw,
}

/// One convolution of an image encoder.
pub(crate) struct Convolution {
    pub outputs: usize,
    pub kernel: usize,
    pub stride: usize,
    pub padding: usize,
}

impl Convolution {
    /// Pixels along an axis after the convolution of `n` pixels.
    fn along(&self, n: usize) -> usize {
        (n + 2 * self.padding - self.kernel) / self.stride + 1
    }
}

/// The convolutions for images of this size: 8x8/4, 4x4/2, 3x3/1 as in the published code from 36 pixels on;
/// smaller images are shrunk to a quarter by 4x4/2, 4x4/2, 3x3/1 with padding.
pub(crate) fn convolutions(height: usize, width: usize) -> [Convolution; 3] {
    let layers = if height.min(width) >= 36 {
        [(32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0)]
    } else {
        [(32, 4, 2, 1), (64, 4, 2, 1), (64, 3, 1, 1)]
    };
    layers.map(|(outputs, kernel, stride, padding)| Convolution { outputs, kernel, stride, padding })
}

impl Encoder {
    /// The encoder of a leaf: integers are embedded, images [channels, height, width] of at least 8 x 8 are
    /// convolved, other numbers go through a linear map.
    pub fn of(leaf: &Leaf<'_>) -> Self {
        match leaf {
            Leaf::Ints(sizes) => {
                Encoder::Categorical { sizes: sizes.to_vec(), encoding: CategoricalEncoding::Embedding }
            }
            Leaf::Floats { shape, .. } | Leaf::Bytes { shape } => {
                let bytes = leaf.kind() == Kind::Bytes;
                match **shape {
                    [channels, height, width] if height >= 8 && width >= 8 => {
                        Encoder::Image { channels, height, width, bytes }
                    }
                    _ => Encoder::Vector { dim: leaf.len(), bytes },
                }
            }
        }
    }

    /// The encoder of this one's kind for a leaf of another shape: a residual encoder stays one for pictures of another
    /// size that have as many cameras. Other encoders are those of [`Encoder::of`].
    pub fn resized(&self, leaf: &Leaf<'_>) -> Self {
        match (self, Encoder::of(leaf)) {
            (
                Encoder::ResidualImage { cameras, widths, strides, queries, grid, keypoints, .. },
                Encoder::Image { channels, height, width, bytes },
            ) if channels.is_multiple_of((*cameras).max(1)) => Encoder::ResidualImage {
                channels,
                height,
                width,
                bytes,
                cameras: *cameras,
                widths: widths.clone(),
                strides: strides.clone(),
                queries: *queries,
                grid: *grid,
                keypoints: *keypoints,
            },
            (_, encoder) => encoder,
        }
    }

    /// Whether the encoder takes pictures.
    pub fn is_image(&self) -> bool {
        matches!(self, Encoder::Image { .. } | Encoder::ResidualImage { .. })
    }

    /// Whether the encoder takes the numbers of this leaf.
    pub fn fits(&self, leaf: &Leaf<'_>) -> bool {
        let kind = self.kind() == leaf.kind();
        kind && match (self, leaf) {
            (Encoder::Categorical { sizes, .. }, Leaf::Ints(have)) => sizes == have,
            (Encoder::Vector { dim, .. }, _) => *dim == leaf.len(),
            (
                Encoder::Image { .. } | Encoder::ResidualImage { .. },
                Leaf::Floats { shape, .. } | Leaf::Bytes { shape },
            ) => *shape == self.shape(),
            _ => false,
        }
    }

    /// The kind of numbers that the encoder takes.
    pub fn kind(&self) -> Kind {
        match self {
            Encoder::Categorical { .. } => Kind::Ints,
            Encoder::Vector { bytes: true, .. }
            | Encoder::Image { bytes: true, .. }
            | Encoder::ResidualImage { bytes: true, .. } => Kind::Bytes,
            _ => Kind::Floats,
        }
    }

    /// Axes of one observation.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Encoder::Vector { dim, .. } => vec![*dim],
            Encoder::Categorical { sizes, .. } => vec![sizes.len()],
            Encoder::Image { channels, height, width, .. }
            | Encoder::ResidualImage { channels, height, width, .. } => vec![*channels, *height, *width],
        }
    }

    /// Numbers of one observation.
    pub fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Whether an observation has no numbers, which [`Encoder::validate`] refuses.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Channels, inputs and outputs of the convolutions of an image encoder: [outputs, inputs per output] of
    /// each, and the features they end with. None for other encoders.
    pub(crate) fn convolved(&self) -> Option<(Vec<(usize, usize)>, usize)> {
        let Encoder::Image { channels, height, width, .. } = self else { return None };
        let (mut shapes, mut depth, mut size) = (Vec::new(), *channels, (*height, *width));
        for layer in convolutions(*height, *width) {
            shapes.push((layer.outputs, depth * layer.kernel * layer.kernel));
            (depth, size) = (layer.outputs, (layer.along(size.0), layer.along(size.1)));
        }
        Some((shapes, depth * size.0 * size.1))
    }

    /// Checks sizes.
    pub fn validate(&self) -> Result<()> {
        let fail = |expected: &str, got: String| {
            Err(Error::Config { key: "observation".to_owned(), expected: expected.to_owned(), got })
        };
        match self {
            Encoder::Vector { dim, .. } if !(1..=1 << 24).contains(dim) => {
                fail("a dim of 1 to 16777216", dim.to_string())
            }
            Encoder::Categorical { sizes, .. } if sizes.is_empty() || sizes.len() > 4096 => {
                fail("1 to 4096 sizes", sizes.len().to_string())
            }
            Encoder::Categorical { sizes, .. } if sizes.iter().any(|n| *n == 0 || *n > 1 << 24) => {
                fail("sizes of 1 to 16777216", format!("{sizes:?}"))
            }
            Encoder::Image { channels, height, width, .. }
            | Encoder::ResidualImage { channels, height, width, .. }
                if *channels == 0 || *height.min(width) < 8 || *channels.max(height).max(width) > 65536 =>
            {
                fail("at least one channel and 8 x 8 pixels", format!("{channels} x {height} x {width}"))
            }
            _ => Residual::of(self).map_or(Ok(()), |form| form.validate()),
        }
    }
}

/// Reads a list of encoders; a single encoder and `{"parts": [...]}` of earlier files are lists too.
pub(crate) fn read_encoders<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Encoder>, D::Error> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Parts {
        parts: Vec<Encoder>,
    }
    let value = serde_json::Value::deserialize(deserializer)?;
    let read = if value.is_array() {
        serde_json::from_value(value)
    } else if value.get("parts").is_some() {
        serde_json::from_value::<Parts>(value).map(|all| all.parts)
    } else {
        serde_json::from_value::<Encoder>(value).map(|one| vec![one])
    };
    read.map_err(serde::de::Error::custom)
}

/// The kind of action that a policy chooses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Action {
    /// One of `count` actions.
    Categorical {
        /// Number of actions to choose from: 1 to 1048576.
        count: usize,
    },
    /// One choice per entry of `sizes`.
    MultiCategorical {
        /// Number of choices of each component of an action.
        sizes: Vec<usize>,
    },
    /// A vector of `dim` numbers.
    Continuous {
        /// Number of numbers in an action: 1 to 1048576.
        dim: usize,
        /// Whether actions are squashed to the range from -1 to 1 by tanh.
        tanh: bool,
    },
}

impl Action {
    /// The kind of action for a space: one head per choice, or numbers as they are.
    pub fn of(space: &Space) -> Result<Self> {
        match space {
            Space::Discrete { n } => Ok(Action::Categorical { count: *n }),
            Space::MultiDiscrete { sizes } => Ok(Action::MultiCategorical { sizes: sizes.clone() }),
            Space::Box { shape, .. } => Ok(Action::Continuous { dim: shape.iter().product(), tanh: false }),
            Space::Tuple { .. } | Space::Bytes { .. } => Err(Error::input(
                "action space",
                "one box, or one or more choices",
                format!("{space:?}").chars().take(80).collect::<String>(),
            )),
        }
    }

    /// Whether the action is one of this space.
    pub fn fits(&self, space: &Space) -> bool {
        match (self, space) {
            (Action::Categorical { count }, Space::Discrete { n }) => count == n,
            (Action::Categorical { count }, Space::MultiDiscrete { sizes }) => sizes == &[*count],
            (Action::MultiCategorical { sizes }, Space::MultiDiscrete { sizes: have }) => sizes == have,
            (Action::Continuous { dim, .. }, Space::Box { shape, .. }) => {
                *dim == shape.iter().product::<usize>()
            }
            _ => false,
        }
    }

    /// Outputs of the head.
    pub fn outputs(&self) -> usize {
        match self {
            Action::Categorical { count } => *count,
            Action::MultiCategorical { sizes } => {
                sizes.iter().fold(0, |sum: usize, n| sum.saturating_add(*n))
            }
            Action::Continuous { dim, .. } => *dim,
        }
    }

    /// Choices of each component of a discrete action; none for continuous ones.
    pub fn sizes(&self) -> &[usize] {
        match self {
            Action::Categorical { count } => std::slice::from_ref(count),
            Action::MultiCategorical { sizes } => sizes,
            Action::Continuous { .. } => &[],
        }
    }

    /// Numbers per action.
    pub fn dim(&self) -> usize {
        match self {
            Action::Categorical { .. } => 1,
            Action::MultiCategorical { sizes } => sizes.len(),
            Action::Continuous { dim, .. } => *dim,
        }
    }

    /// Whether actions are integers.
    pub fn is_discrete(&self) -> bool {
        !matches!(self, Action::Continuous { .. })
    }

    fn validate(&self) -> Result<()> {
        let fail = |key: &str, expected: &str, got: String| {
            Err(Error::Config { key: key.to_owned(), expected: expected.to_owned(), got })
        };
        if let Action::MultiCategorical { sizes } = self
            && sizes.iter().any(|n| !(1..=1 << 20).contains(n))
        {
            return fail("action.multi_categorical.sizes", "sizes of 1 to 1048576", format!("{sizes:?}"));
        }
        if !(1..=1 << 20).contains(&self.outputs()) {
            return fail("action", "1 to 1048576 outputs", self.outputs().to_string());
        }
        Ok(())
    }
}

/// Tokens that an environment step becomes, in order. The action is read at the observation's token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
pub enum TokenFormat {
    /// One token: the observation.
    Observation,
    /// Two tokens: the observation, then the action.
    ObservationAction,
    /// Two tokens: the observation, then the return-to-go.
    ObservationReturn,
    /// Three tokens: return-to-go, observation, action, as in Decision Transformer.
    ReturnObservationAction,
}

/// One kind of token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Token {
    /// An encoded observation.
    Observation,
    /// An encoded action.
    Action,
    /// An encoded return-to-go.
    Return,
}

impl TokenFormat {
    /// The tokens of one step, in order.
    pub fn tokens(self) -> &'static [Token] {
        match self {
            TokenFormat::Observation => &[Token::Observation],
            TokenFormat::ObservationAction => &[Token::Observation, Token::Action],
            TokenFormat::ObservationReturn => &[Token::Observation, Token::Return],
            TokenFormat::ReturnObservationAction => &[Token::Return, Token::Observation, Token::Action],
        }
    }

    /// Whether a step has a token of this kind.
    pub fn has(self, token: Token) -> bool {
        self.tokens().contains(&token)
    }

    /// Tokens per environment step.
    pub fn per_step(self) -> usize {
        self.tokens().len()
    }

    /// Position of the observation among a step's tokens.
    pub fn observation_index(self) -> usize {
        usize::from(self == TokenFormat::ReturnObservationAction)
    }
}

impl Ends<'_> {
    /// Checks encoders and action.
    pub fn validate(&self) -> Result<()> {
        if self.observation.is_empty() || self.observation.len() > 64 {
            return Err(Error::Config {
                key: "observation".to_owned(),
                expected: "1 to 64 encoders".to_owned(),
                got: self.observation.len().to_string(),
            });
        }
        self.observation.iter().try_for_each(Encoder::validate)?;
        self.action.validate()
    }

    /// Whether the policy takes these observations and gives these actions. `what` (a dataset, an
    /// environment) is named in the error.
    pub fn check(&self, spaces: &Spaces, what: &'static str) -> Result<()> {
        let leaves = spaces.observation.leaves();
        let fits = self.observation.len() == leaves.len()
            && self.observation.iter().zip(&leaves).all(|(encoder, leaf)| encoder.fits(leaf));
        let mismatch = |expected: String, got: &Space| {
            let got = format!("{got}; choose a policy for these spaces, or other data");
            Err(Error::input(what, expected, got))
        };
        if !fits {
            let expected = format!("observations like the policy's ({})", self.spaces().observation);
            return mismatch(expected, &spaces.observation);
        }
        if !self.action.fits(&spaces.action) {
            return mismatch(format!("actions like the policy's ({})", self.spaces().action), &spaces.action);
        }
        Ok(())
    }

    /// The spaces of data that the policy takes as they are: as many choices as its encoders and its head
    /// have, numbers without bounds.
    pub fn spaces(&self) -> Spaces {
        let choices = |sizes: &[usize]| match sizes {
            [n] => Space::Discrete { n: *n },
            _ => Space::MultiDiscrete { sizes: sizes.to_vec() },
        };
        let seen = |encoder: &Encoder| match encoder {
            Encoder::Categorical { sizes, .. } => choices(sizes),
            _ if encoder.kind() == Kind::Bytes => Space::Bytes { shape: encoder.shape() },
            _ => Space::unbounded(encoder.shape()),
        };
        let observation = match self.observation {
            [one] => seen(one),
            all => Space::Tuple { parts: all.iter().map(seen).collect() },
        };
        let action = match self.action {
            Action::Categorical { count } => Space::Discrete { n: *count },
            Action::MultiCategorical { sizes } => Space::MultiDiscrete { sizes: sizes.clone() },
            Action::Continuous { dim, .. } => Space::unbounded([*dim]),
        };
        Spaces { observation, action }
    }

    /// Name of the encoder of leaf `i`: its parameters begin with it.
    pub fn encoder_name(&self, leaf: usize) -> String {
        if self.observation.len() == 1 { "encoder".to_owned() } else { format!("encoder.{leaf}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoders_follow_from_the_leaves_of_a_space() {
        let space = Space::Tuple {
            parts: vec![
                Space::MultiDiscrete { sizes: vec![3, 4] },
                Space::unbounded([5]),
                Space::Bytes { shape: vec![3, 8, 9] },
                Space::Bytes { shape: vec![7] },
                Space::between(0.0, 1.0, [1, 64, 64]),
            ],
        };
        let encoders: Vec<Encoder> = space.leaves().iter().map(Encoder::of).collect();
        let embedding = CategoricalEncoding::Embedding;
        let expected = [
            Encoder::Categorical { sizes: vec![3, 4], encoding: embedding },
            Encoder::Vector { dim: 5, bytes: false },
            Encoder::Image { channels: 3, height: 8, width: 9, bytes: true },
            Encoder::Vector { dim: 7, bytes: true },
            Encoder::Image { channels: 1, height: 64, width: 64, bytes: false },
        ];
        assert_eq!(encoders, expected);
        for (i, encoder) in encoders.iter().enumerate() {
            encoder.validate().unwrap();
            for (j, leaf) in space.leaves().iter().enumerate() {
                assert_eq!(encoder.fits(leaf), i == j, "encoder {i}, leaf {j}");
            }
        }
        // The published encoder: 128 x 128 pixels end as 64 x 12 x 12 numbers.
        let published = Encoder::Image { channels: 6, height: 128, width: 128, bytes: false };
        assert_eq!(published.convolved().unwrap().1, 64 * 12 * 12);
        assert_eq!(expected[2].convolved().unwrap().1, 64 * 2 * 2);
        assert!(Encoder::Image { channels: 3, height: 7, width: 9, bytes: true }.validate().is_err());
    }

    #[test]
    fn a_policy_takes_data_of_its_own_spaces() {
        let embedding = CategoricalEncoding::Embedding;
        let all = [
            Encoder::Categorical { sizes: vec![5], encoding: embedding },
            Encoder::Categorical { sizes: vec![3, 4], encoding: embedding },
            Encoder::Vector { dim: 5, bytes: false },
            Encoder::Vector { dim: 7, bytes: true },
            Encoder::Image { channels: 3, height: 8, width: 9, bytes: true },
        ];
        let actions = [
            Action::Categorical { count: 4 },
            Action::MultiCategorical { sizes: vec![2] },
            Action::Continuous { dim: 2, tanh: true },
        ];
        for observation in [&all[..], &all[..1], &all[1..2], &all[4..]] {
            for action in &actions {
                let ends = Ends { observation, action, tokens: TokenFormat::Observation, width: 8 };
                let spaces = ends.spaces();
                spaces.validate().unwrap();
                ends.check(&spaces, "data").unwrap();
            }
        }
    }

    #[test]
    fn observations_of_earlier_files_are_read_as_lists() {
        #[derive(Deserialize)]
        struct Config {
            #[serde(deserialize_with = "read_encoders")]
            observation: Vec<Encoder>,
        }
        let read = |text: &str| {
            serde_json::from_str::<Config>(&format!("{{\"observation\":{text}}}")).map(|c| c.observation)
        };
        let vector = Encoder::Vector { dim: 4, bytes: false };
        let one = std::slice::from_ref(&vector);
        assert_eq!(read(r#"{"vector":{"dim":4}}"#).unwrap(), one);
        assert_eq!(read(r#"[{"vector":{"dim":4}}]"#).unwrap(), one);
        let image = Encoder::Image { channels: 1, height: 40, width: 40, bytes: false };
        let parts = r#"{"parts":[{"vector":{"dim":4}},{"image":{"channels":1,"height":40,"width":40}}]}"#;
        assert_eq!(read(parts).unwrap(), [vector.clone(), image]);
        assert_eq!(serde_json::to_string(&vector).unwrap(), r#"{"vector":{"dim":4}}"#);
        assert!(read(r#"{"vectr":{"dim":4}}"#).is_err() && read("3").is_err());
    }
}
