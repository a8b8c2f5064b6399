//! Noise of a diffusion over T steps, and the ways back from noise to actions.
//!
//! ```text
//! abar(u) = cos²((u + 0.008) / 1.008 π/2);   beta_t = min(0.999, 1 - abar((t+1)/T) / abar(t/T)),  t = 0..T-1
//! ab_t = Π_{s <= t} (1 - beta_s);            x_t = sqrt(ab_t) x_0 + sqrt(1 - ab_t) noise
//! ```
//!
//! A step back from t to t' (with ab' = ab_t', 1 after the last) estimates x_0 and goes to x_t':
//!
//! ```text
//! x0 = clip((x - sqrt(1 - ab) noise) / sqrt(ab), -1, 1)
//! DDPM, t' = t - 1, b = 1 - ab / ab':
//!     x <- sqrt(ab') b / (1 - ab) x0 + sqrt(1 - b) (1 - ab') / (1 - ab) x + sqrt((1 - ab') / (1 - ab) b) z
//! DDIM, any t' < t:
//!     x <- sqrt(ab') x0 + sqrt(1 - ab') (x - sqrt(ab) x0) / sqrt(1 - ab)
//! ```

use super::DiffusionSampler;

/// The noise that is left after each step of a diffusion.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NoiseSchedule {
    /// beta_t of every step.
    pub betas: Vec<f64>,
    /// ab_t of every step.
    pub alpha_bars: Vec<f64>,
}

/// One step back from noise: x0 = clip(of_x x - of_noise noise), then x <- to_clean x0 + to_x x + to_fresh z.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Move {
    /// Step of the diffusion that the move begins at.
    pub t: usize,
    pub of_x: f64,
    pub of_noise: f64,
    pub to_clean: f64,
    pub to_x: f64,
    /// Share of fresh noise z; 0 where none is drawn.
    pub to_fresh: f64,
}

impl NoiseSchedule {
    /// The squared-cosine schedule of `steps` steps.
    pub fn new(steps: usize) -> Self {
        let share = |t: usize| {
            let u = t as f64 / steps as f64;
            ((u + 0.008) / 1.008 * std::f64::consts::FRAC_PI_2).cos().powi(2)
        };
        let betas: Vec<f64> = (0..steps).map(|t| (1.0 - share(t + 1) / share(t)).min(0.999)).collect();
        let mut left = 1.0;
        let after = |beta: &f64| {
            left *= 1.0 - beta;
            left
        };
        let alpha_bars = betas.iter().map(after).collect();
        Self { betas, alpha_bars }
    }

    /// The moves of a sampler from pure noise to actions.
    pub fn moves(&self, sampler: DiffusionSampler) -> Vec<Move> {
        let total = self.alpha_bars.len();
        match sampler {
            DiffusionSampler::Ddpm => (0..total).rev().map(|t| self.ddpm(t)).collect(),
            DiffusionSampler::Ddim(count) => {
                // Evenly spaced and from the noisiest step on: 99, 89, ..., 9 for ten steps of a hundred.
                let step = |i: usize| (i + 1) * total / count - 1;
                let next = |i: usize| i.checked_sub(1).map_or(1.0, |before| self.alpha_bars[step(before)]);
                (0..count).rev().map(|i| self.ddim(step(i), next(i))).collect()
            }
        }
    }

    fn ddpm(&self, t: usize) -> Move {
        let now = self.alpha_bars[t];
        let next = t.checked_sub(1).map_or(1.0, |t| self.alpha_bars[t]);
        let b = 1.0 - now / next;
        Move {
            to_clean: next.sqrt() * b / (1.0 - now),
            to_x: (1.0 - b).sqrt() * (1.0 - next) / (1.0 - now),
            to_fresh: ((1.0 - next) / (1.0 - now) * b).sqrt(),
            ..Self::clean(t, now)
        }
    }

    fn ddim(&self, t: usize, next: f64) -> Move {
        let now = self.alpha_bars[t];
        let to_x = ((1.0 - next) / (1.0 - now)).sqrt();
        Move { to_clean: next.sqrt() - to_x * now.sqrt(), to_x, ..Self::clean(t, now) }
    }

    /// The estimate of x_0 at step `t`, where `now` is ab_t.
    fn clean(t: usize, now: f64) -> Move {
        let (of_x, of_noise) = (1.0 / now.sqrt(), ((1.0 - now) / now).sqrt());
        Move { t, of_x, of_noise, to_clean: 0.0, to_x: 0.0, to_fresh: 0.0 }
    }
}

/// Sinusoidal embedding of steps, [steps, width]: sin(t g_k) then cos(t g_k), g_k = 10000^(-k / (width/2 - 1)).
pub(crate) fn step_embeddings(steps: impl Iterator<Item = usize>, width: usize) -> Vec<f64> {
    let half = width / 2;
    let rate = |k: usize| (-(k as f64) * 10_000f64.ln() / (half as f64 - 1.0)).exp();
    steps
        .flat_map(|t| {
            let angle = move |k: usize| t as f64 * rate(k);
            (0..half).map(move |k| angle(k).sin()).chain((0..half).map(move |k| angle(k).cos()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_grows_from_almost_none_to_almost_all() {
        let schedule = NoiseSchedule::new(100);
        assert!(schedule.alpha_bars[0] > 0.999 && schedule.alpha_bars[99] < 1e-5);
        assert!(schedule.alpha_bars.windows(2).all(|pair| pair[1] < pair[0]));
        assert_eq!(schedule.betas[99], 0.999);
        // Known: cos²(0.008/1.008 π/2) and the share of the first step.
        assert!((schedule.betas[0] - 6.3128e-4).abs() < 1e-7, "{}", schedule.betas[0]);
        assert_eq!(NoiseSchedule::new(1).betas, [0.999]);
    }

    #[test]
    fn samplers_visit_their_steps_and_end_clean() {
        let schedule = NoiseSchedule::new(100);
        let steps = |sampler| schedule.moves(sampler).iter().map(|m| m.t).collect::<Vec<_>>();
        assert_eq!(steps(DiffusionSampler::Ddim(10)), [99, 89, 79, 69, 59, 49, 39, 29, 19, 9]);
        assert_eq!(steps(DiffusionSampler::Ddim(3)), [99, 65, 32]);
        assert_eq!(steps(DiffusionSampler::Ddpm), (0..100).rev().collect::<Vec<_>>());
        for sampler in [DiffusionSampler::Ddim(7), DiffusionSampler::Ddpm] {
            let moves = schedule.moves(sampler);
            let last = moves.last().unwrap();
            assert!((last.to_clean - 1.0).abs() < 1e-12 && last.to_x.abs() < 1e-12 && last.to_fresh == 0.0);
            assert!(
                moves.iter().all(|m| [m.of_x, m.of_noise, m.to_clean, m.to_x].iter().all(|x| x.is_finite()))
            );
        }
    }

    /// With the true noise known, a move of DDIM leads from x_t exactly to x_t'.
    #[test]
    fn a_move_with_the_true_noise_stays_on_the_path() {
        let schedule = NoiseSchedule::new(50);
        let (clean, noise) = (0.3, -1.2);
        let at = |ab: f64| ab.sqrt() * clean + (1.0 - ab).sqrt() * noise;
        let moves = schedule.moves(DiffusionSampler::Ddim(8));
        let mut x = at(schedule.alpha_bars[49]);
        for (i, m) in moves.iter().enumerate() {
            let x0 = (m.of_x * x - m.of_noise * noise).clamp(-1.0, 1.0);
            x = m.to_clean * x0 + m.to_x * x;
            let next = moves.get(i + 1).map_or(1.0, |m| schedule.alpha_bars[m.t]);
            assert!((x - at(next)).abs() < 1e-9, "{x} {}", at(next));
        }
    }

    #[test]
    fn step_zero_is_embedded_as_sines_of_zero_and_cosines_of_zero() {
        let table = step_embeddings([0, 3].into_iter(), 6);
        assert_eq!(table[..6], [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
        assert!((table[6] - 3f64.sin()).abs() < 1e-15 && (table[8] - 3e-4f64.sin()).abs() < 1e-15);
    }
}
