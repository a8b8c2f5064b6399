//! Pictures made smaller: fewer pixels, and fewer values of each.
//!
//! ```text
//! y = (Σ x over shrink x shrink pixels + shrink² / 2) / shrink²          whole numbers, rounded down
//! z = (255 l + (levels - 1) / 2) / (levels - 1),   l = (y (levels - 1) + 127) / 255
//! ```
//!
//! An environment that thins its cameras says so in its [`Facts`](crate::Facts), and recordings of whole
//! pictures can be thinned to what the environment shows, bit for bit: a camera's noise and grain take most of
//! the bytes of recordings that have been packed.

use elmur_base::Space;

/// How pictures are thinned; see the formulas above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thinning {
    /// This many pixels along each axis are averaged to one; 1: none.
    pub shrink: usize,
    /// Number of evenly spaced values from 0 to 255 that numbers are rounded to, 2 to 256; 256: all.
    pub levels: usize,
}

impl Default for Thinning {
    fn default() -> Self {
        Self { shrink: 1, levels: 256 }
    }
}

impl Thinning {
    /// Whether pictures stay as they are.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    /// The space of whole pictures whose thinned ones are of `space`: all leaves of bytes [channels, height,
    /// width] are `shrink` times as high and wide.
    pub fn before(&self, space: &Space) -> Space {
        match space {
            Space::Bytes { shape } => match shape[..] {
                [channels, height, width] => {
                    let larger = |n: usize| n.saturating_mul(self.shrink);
                    Space::Bytes { shape: vec![channels, larger(height), larger(width)] }
                }
                _ => space.clone(),
            },
            Space::Tuple { parts } => {
                Space::Tuple { parts: parts.iter().map(|part| self.before(part)).collect() }
            }
            space => space.clone(),
        }
    }

    /// Thins pictures [planes, height, width], whose height and width are multiples of `shrink`, to [planes,
    /// height / shrink, width / shrink]. Pixels behind the last whole plane are left out.
    pub fn thin(&self, pixels: &[u8], height: usize, width: usize) -> Vec<u8> {
        let n = self.shrink.max(1);
        let (rows, columns) = (height / n, width / n);
        let mut out = Vec::with_capacity(pixels.len() / (n * n));
        let table = self.table();
        for plane in pixels.chunks_exact((height * width).max(1)) {
            for row in 0..rows {
                for column in 0..columns {
                    let lines = plane[row * n * width..].chunks(width).take(n);
                    let sum: usize = lines
                        .map(|line| {
                            line[column * n..][..n].iter().map(|pixel| usize::from(*pixel)).sum::<usize>()
                        })
                        .sum();
                    out.push(table[(sum + n * n / 2) / (n * n)]);
                }
            }
        }
        out
    }

    /// What every number is rounded to.
    fn table(&self) -> [u8; 256] {
        let steps = self.levels.clamp(2, 256) - 1;
        std::array::from_fn(|y| match steps {
            255 => y as u8,
            _ => (((y * steps + 127) / 255 * 255 + steps / 2) / steps) as u8,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pixels_are_averaged_and_rounded_to_the_levels() {
        let two_planes: Vec<u8> = vec![1, 2, 10, 20, 3, 4, 30, 41, 255, 255, 0, 0, 255, 254, 0, 1];
        let half = Thinning { shrink: 2, levels: 256 };
        // (1 + 2 + 3 + 4 + 2) / 4 = 3, (101 + 2) / 4 = 25, (1019 + 2) / 4 = 255, (1 + 2) / 4 = 0.
        assert_eq!(half.thin(&two_planes, 2, 4), [3, 25, 255, 0]);
        let few = Thinning { shrink: 1, levels: 4 };
        assert_eq!(few.thin(&[0, 42, 43, 127, 128, 212, 213, 255], 1, 8), [0, 0, 85, 85, 170, 170, 255, 255]);
        let both = Thinning { shrink: 2, levels: 16 };
        assert_eq!(both.thin(&two_planes, 2, 4), [0, 17, 255, 0]);
        assert_eq!(Thinning { shrink: 1, levels: 8 }.thin(&[100], 1, 1), [109]);
        let all: Vec<u8> = (0..=255).collect();
        assert_eq!(Thinning::default().thin(&all, 16, 16), all);
        assert!(Thinning::default().is_none() && !few.is_none());
    }

    #[test]
    fn whole_pictures_are_larger_and_other_parts_stay() {
        let parts = |size| {
            let bytes = |shape: Vec<usize>| Space::Bytes { shape };
            vec![bytes(vec![6, size, size]), bytes(vec![7]), Space::unbounded([25])]
        };
        let thinned = Space::Tuple { parts: parts(64) };
        let whole = Thinning { shrink: 2, levels: 16 }.before(&thinned);
        assert_eq!(whole, Space::Tuple { parts: parts(128) });
    }
}
