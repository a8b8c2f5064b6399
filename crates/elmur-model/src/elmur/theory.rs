//! The paper's theory of retention as functions: exponential forgetting, half-life, effective horizon.
//!
//! A slot is overwritten once every M / W segments of L steps; each overwrite keeps a share (1 - lambda) of
//! what was there.

/// Weight of a slot's original content after `overwrites` overwrites: (1 - lambda)^k (Proposition 1).
pub fn retained(lambda: f64, overwrites: u32) -> f64 {
    (1.0 - lambda).powi(overwrites as i32)
}

/// Weight of the write made `age` overwrites ago (1 = the newest): lambda (1 - lambda)^(age - 1) (Proposition
/// 1).
pub fn contribution(lambda: f64, age: u32) -> f64 {
    lambda * (1.0 - lambda).powi(age as i32 - 1)
}

/// Overwrites after which a content's weight has halved: ln 2 / -ln(1 - lambda). Infinite for lambda = 0,
/// zero for 1.
pub fn half_life(lambda: f64) -> f64 {
    overwrites_until(lambda, 0.5)
}

/// Environment steps until a content's weight falls to `epsilon`: M L ln(epsilon) / ln(1 - lambda).
///
/// ```
/// use elmur_model::elmur::theory::effective_horizon;
///
/// // T-Maze: two slots, segments of ten steps, lambda 0.05.
/// assert_eq!(effective_horizon(0.05, 2, 10, 0.5).round(), 270.0);
/// ```
pub fn effective_horizon(lambda: f64, slots: usize, segment_length: usize, epsilon: f64) -> f64 {
    (slots * segment_length) as f64 * overwrites_until(lambda, epsilon)
}

fn overwrites_until(lambda: f64, epsilon: f64) -> f64 {
    if lambda <= 0.0 {
        return f64::INFINITY;
    }
    if lambda >= 1.0 {
        return 0.0;
    }
    epsilon.ln() / (-lambda).ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_life_halves_and_small_lambdas_follow_the_asymptote() {
        for lambda in [0.01, 0.05, 0.4, 0.79, 0.99] {
            let k = half_life(lambda);
            assert!(((1.0f64 - lambda).powf(k) - 0.5).abs() < 1e-12);
        }
        assert!((half_life(1e-4) * 1e-4 / std::f64::consts::LN_2 - 1.0).abs() < 1e-4);
        assert_eq!(half_life(0.0), f64::INFINITY);
        assert_eq!(half_life(1.0), 0.0);
    }

    #[test]
    fn weights_of_all_writes_sum_to_one() {
        for k in [1, 5, 40] {
            let total: f64 = (1..=k).map(|age| contribution(0.3, age)).sum::<f64>() + retained(0.3, k);
            assert!((total - 1.0).abs() < 1e-14);
        }
    }
}
