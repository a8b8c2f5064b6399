//! Counter-based random numbers: Philox 4x32 with ten rounds (Salmon et al., 2011).
//!
//! A draw is a pure function of (seed, step, stream, index), so dropout masks need not be stored, any device
//! or thread produces the same bits, and saving two integers saves the whole generator. The mapping, which
//! every executor must follow:
//!
//! ```text
//! key     = (low32(seed), high32(seed))
//! counter = (low32(block), stream, low32(step), high32(step))     block = 16 (index / 64) + index % 16
//! draw    = philox4x32_10(counter, key)[index % 64 / 16]
//! ```
//!
//! so that sixteen neighbours come from the same word of sixteen blocks, as vector units like it. `stream`
//! numbers the random ops of a program, `step` counts program runs. An op may draw at most 2^34 numbers.

/// Philox's multipliers.
pub const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// What Philox adds to its key after every round.
pub const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// One Philox 4x32-10 block.
#[inline(always)]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut a, mut b, mut c, mut d] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let p = u64::from(MULTIPLIER[0]) * u64::from(a);
        let q = u64::from(MULTIPLIER[1]) * u64::from(c);
        (a, b, c, d) = ((q >> 32) as u32 ^ b ^ k0, q as u32, (p >> 32) as u32 ^ d ^ k1, p as u32);
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [a, b, c, d]
}

/// The random numbers of one op in one run: see the module's mapping.
#[derive(Debug, Clone, Copy)]
pub struct Stream {
    key: [u32; 2],
    stream: u32,
    step: [u32; 2],
}

impl Stream {
    /// The stream numbered `stream` at `step` under `seed`.
    pub fn new(seed: u64, step: u64, stream: u32) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], stream, step: [step as u32, (step >> 32) as u32] }
    }

    /// The four draws of one block.
    #[inline(always)]
    pub fn block(&self, block: u32) -> [u32; 4] {
        philox(self.counter(block), self.key)
    }

    /// Philox's counter for a block.
    #[inline(always)]
    pub fn counter(&self, block: u32) -> [u32; 4] {
        [block, self.stream, self.step[0], self.step[1]]
    }

    /// Philox's key.
    #[inline(always)]
    pub fn key(&self) -> [u32; 2] {
        self.key
    }

    /// Draws `64 * group .. 64 * group + 64`, sixteen per row. Written so that compilers turn each line into
    /// one vector instruction.
    #[inline(always)]
    pub fn group(&self, group: u32) -> [[u32; 16]; 4] {
        let mut a: [u32; 16] = std::array::from_fn(|i| (16 * group).wrapping_add(i as u32));
        let mut b = [self.stream; 16];
        let mut c = [self.step[0]; 16];
        let mut d = [self.step[1]; 16];
        let [mut k0, mut k1] = self.key;
        for _ in 0..10 {
            for i in 0..16 {
                let p = u64::from(MULTIPLIER[0]) * u64::from(a[i]);
                let q = u64::from(MULTIPLIER[1]) * u64::from(c[i]);
                (a[i], b[i]) = ((q >> 32) as u32 ^ b[i] ^ k0, q as u32);
                (c[i], d[i]) = ((p >> 32) as u32 ^ d[i] ^ k1, p as u32);
            }
            k0 = k0.wrapping_add(WEYL[0]);
            k1 = k1.wrapping_add(WEYL[1]);
        }
        [a, b, c, d]
    }

    /// Draw number `index`.
    pub fn draw(&self, index: u64) -> u32 {
        self.block((16 * (index / 64) + index % 16) as u32)[(index % 64 / 16) as usize]
    }

    /// Fills `out` with numbers uniform in `[low, high)`, element `i` from draw `i`.
    pub fn fill_uniform(&self, out: &mut [f64], low: f64, high: f64) {
        for (group, chunk) in out.chunks_mut(64).enumerate() {
            let draws = self.group(group as u32);
            for (x, draw) in chunk.iter_mut().zip(draws.as_flattened()) {
                *x = low + (high - low) * unit(*draw);
            }
        }
    }

    /// Fills `out` with normal numbers of mean 0 and the given standard deviation: four from each block in
    /// turn, by Box-Muller.
    pub fn fill_normal(&self, out: &mut [f64], std: f64) {
        for (block, chunk) in out.chunks_mut(4).enumerate() {
            for (x, z) in chunk.iter_mut().zip(normals(self.block(block as u32))) {
                *x = std * z;
            }
        }
    }
}

/// Numbers drawn one after the other, for environments and samplers: draws 0, 1, 2, ... of one [`Stream`].
///
/// ```
/// let mut rng = elmur_rng::Rng::new(7, 0);
/// let die = 1 + rng.below(6);
/// assert!((1..=6).contains(&die));
/// assert_eq!(elmur_rng::Rng::new(7, 0).below(6) + 1, die); // same seed, same draws
/// ```
#[derive(Debug, Clone)]
pub struct Rng {
    stream: Stream,
    next: u32,
    left: usize,
    block: [u32; 4],
}

impl Rng {
    /// The generator numbered `stream` under `seed`.
    pub fn new(seed: u64, stream: u32) -> Self {
        Self { stream: Stream::new(seed, 0, stream), next: 0, left: 0, block: [0; 4] }
    }

    /// The next 32 random bits. After 2^34 draws the sequence moves on to the next step of its stream.
    #[inline]
    pub fn bits(&mut self) -> u32 {
        if self.left == 0 {
            self.block = self.stream.block(self.next);
            self.left = 4;
            self.next = self.next.wrapping_add(1);
            if self.next == 0 {
                self.stream.step[0] = self.stream.step[0].wrapping_add(1);
            }
        }
        self.left -= 1;
        self.block[3 - self.left]
    }

    /// A whole number below `n`, each equally likely; 0 for `n` = 0.
    #[inline]
    pub fn below(&mut self, n: u32) -> u32 {
        // Lemire: the high half of bits * n, rejecting the few low halves that would favour some numbers.
        if n == 0 {
            return 0;
        }
        loop {
            let product = u64::from(self.bits()) * u64::from(n);
            // The division is needed for few draws only.
            if product as u32 >= n || product as u32 >= n.wrapping_neg() % n {
                return (product >> 32) as u32;
            }
        }
    }

    /// A number uniform in `[low, high)`.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * unit(self.bits())
    }

    /// Two independent standard normal numbers, from two draws.
    #[inline]
    pub fn normals(&mut self) -> [f64; 2] {
        let (a, b) = (self.bits(), self.bits());
        box_muller(a, b)
    }

    /// Puts the items in a random order, each equally likely.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u32 + 1) as usize);
        }
    }
}

/// A draw as a number in `[0, 1)`.
#[inline(always)]
pub fn unit(draw: u32) -> f64 {
    f64::from(draw) * (1.0 / 4_294_967_296.0)
}

/// Four standard normal numbers from one block: pairs (0, 1) and (2, 3) by Box-Muller.
pub fn normals(draws: [u32; 4]) -> [f64; 4] {
    let ([a, b], [c, d]) = (box_muller(draws[0], draws[1]), box_muller(draws[2], draws[3]));
    [a, b, c, d]
}

#[inline]
fn box_muller(a: u32, b: u32) -> [f64; 2] {
    let radius = (-2.0 * ((f64::from(a) + 1.0) * (1.0 / 4_294_967_296.0)).ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * unit(b)).sin_cos();
    [radius * cos, radius * sin]
}

/// Draws below this are dropped: `p` as a 32-bit threshold.
pub fn drop_threshold(p: f64) -> u32 {
    (p * 4_294_967_296.0).round().min(4_294_967_295.0) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the generator's authors (Random123, kat_vectors).
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn wide_blocks_equal_single_blocks() {
        let stream = Stream::new(0x1234_5678_9abc_def0, 77, 3);
        let wide = stream.group(100);
        for i in 0..16 {
            assert_eq!(stream.block(1600 + i as u32), std::array::from_fn(|j| wide[j][i]));
        }
        for (i, draw) in wide.as_flattened().iter().enumerate() {
            assert_eq!(stream.draw(6400 + i as u64), *draw);
        }
    }

    #[test]
    fn numbers_below_n_are_equally_likely_and_shuffles_keep_all() {
        let mut rng = Rng::new(5, 1);
        let mut counts = [0u32; 7];
        (0..70_000).for_each(|_| counts[rng.below(7) as usize] += 1);
        // Chi-square with 6 degrees of freedom: 22.5 is passed once in a thousand.
        let chi: f64 = counts.iter().map(|c| (f64::from(*c) - 1e4).powi(2) / 1e4).sum();
        assert!(chi < 22.5, "{counts:?}");
        let mut items: Vec<u32> = (0..100).collect();
        rng.shuffle(&mut items);
        assert_ne!(items, (0..100).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
        assert_eq!((rng.below(0), rng.below(1)), (0, 0));
        assert_eq!(Rng::new(5, 1).bits(), Stream::new(5, 0, 1).block(0)[0]);
    }

    #[test]
    fn uniform_and_normal_have_their_moments() {
        let mut x = vec![0.0; 40_000];
        let moments = |x: &[f64]| {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            (mean, x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64)
        };
        Stream::new(1, 0, 0).fill_uniform(&mut x, -1.0, 3.0);
        let (mean, variance) = moments(&x);
        assert!((mean - 1.0).abs() < 0.02 && (variance - 16.0 / 12.0).abs() < 0.03, "{mean} {variance}");
        assert!(x.iter().all(|v| (-1.0..3.0).contains(v)));
        Stream::new(1, 0, 1).fill_normal(&mut x, 2.0);
        let (mean, variance) = moments(&x);
        assert!(mean.abs() < 0.04 && (variance - 4.0).abs() < 0.1, "{mean} {variance}");
        let block = Stream::new(3, 0, 1).block(0);
        let mut rng = Rng::new(3, 1);
        assert_eq!([rng.normals(), rng.normals()].as_flattened(), normals(block));
    }
}
