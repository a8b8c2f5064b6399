//! Kernels for every instruction set from one source, and the row primitives every kernel is made of.
//!
//! Kernels are ordinary Rust over rows. [`simd_fn!`] compiles each of them once per instruction set and picks
//! the best at run time; compilers vectorise the plain loops (for aarch64 once, with NEON, which all of its
//! processors have). Reductions run in [`LANES`] interleaved partial sums whatever the vector width, so their
//! bits do not depend on the machine's vector unit.

use super::float::Float;

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;

/// Defines a function compiled once per instruction set, dispatched at run time.
///
/// The body must consist of plain loops and `#[inline(always)]` calls: only inlined code is recompiled.
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$T:ident>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$T: $crate::cpu::float::Float>($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body<$T: $crate::cpu::float::Float>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512<$T: $crate::cpu::float::Float>($($arg: $ty),*) $(-> $ret)? { body::<$T>($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx2<$T: $crate::cpu::float::Float>($($arg: $ty),*) $(-> $ret)? { body::<$T>($($arg),*) }
                match $crate::cpu::isa::Isa::best() {
                    // SAFETY: `Isa::best` never exceeds what the processor reports.
                    $crate::cpu::isa::Isa::Avx512 | $crate::cpu::isa::Isa::Amx => return unsafe { avx512::<$T>($($arg),*) },
                    // SAFETY: as above.
                    $crate::cpu::isa::Isa::Avx2 => return unsafe { avx2::<$T>($($arg),*) },
                    $crate::cpu::isa::Isa::Baseline | $crate::cpu::isa::Isa::Neon => {}
                }
            }
            body::<$T>($($arg),*)
        }
    };
}
pub(crate) use simd_fn;

/// Interleaved partial sums of every reduction.
pub(crate) const LANES: usize = 16;

/// Adds the lanes pairwise, always in the same order. One array per width: halves of a single one would be
/// added number by number.
#[inline(always)]
pub(crate) fn fold<T: Float>(lanes: [T; LANES], f: impl Fn(T, T) -> T) -> T {
    let (mut eight, mut four, mut two) = ([T::ZERO; 8], [T::ZERO; 4], [T::ZERO; 2]);
    for i in 0..8 {
        eight[i] = f(lanes[i], lanes[i + 8]);
    }
    for i in 0..4 {
        four[i] = f(eight[i], eight[i + 4]);
    }
    for i in 0..2 {
        two[i] = f(four[i], four[i + 2]);
    }
    f(two[0], two[1])
}

/// Σ f(x), in [`LANES`] interleaved partial sums. Written over slices: an index would cost a bounds check and
/// with it the vector instructions.
#[inline(always)]
pub(crate) fn reduce<T: Float>(x: &[T], f: impl Fn(T) -> T) -> T {
    let mut lanes = [T::ZERO; LANES];
    let chunks = x.chunks_exact(LANES);
    let tail = chunks.remainder();
    for x in chunks {
        for l in 0..LANES {
            lanes[l] += f(x[l]);
        }
    }
    for (l, x) in tail.iter().enumerate() {
        lanes[l] += f(*x);
    }
    fold(lanes, |a, b| a + b)
}

/// Sum of a slice.
#[inline(always)]
pub(crate) fn sum<T: Float>(x: &[T]) -> T {
    reduce(x, |x| x)
}

/// Dot product with fused multiply-adds.
#[inline(always)]
pub(crate) fn dot<T: Float>(x: &[T], y: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let (xs, ys) = (x.chunks_exact(LANES), y[..x.len()].chunks_exact(LANES));
    let (x_tail, y_tail) = (xs.remainder(), ys.remainder());
    for (x, y) in xs.zip(ys) {
        for l in 0..LANES {
            lanes[l] = x[l].mul_add(y[l], lanes[l]);
        }
    }
    for (l, (x, y)) in x_tail.iter().zip(y_tail).enumerate() {
        lanes[l] = x.mul_add(*y, lanes[l]);
    }
    fold(lanes, |a, b| a + b)
}

/// Largest element; negative infinity for none or only NaN.
#[inline(always)]
pub(crate) fn max<T: Float>(x: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; LANES];
    let chunks = x.chunks_exact(LANES);
    let tail = chunks.remainder();
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = chunk[l].max(lanes[l]);
        }
    }
    for (l, v) in tail.iter().enumerate() {
        lanes[l] = v.max(lanes[l]);
    }
    fold(lanes, |a, b| a.max(b))
}

/// y += a x.
#[inline(always)]
pub(crate) fn axpy<T: Float>(y: &mut [T], a: T, x: &[T]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = a.mul_add(*x, *y);
    }
}

/// y += x.
#[inline(always)]
pub(crate) fn add_assign<T: Float>(y: &mut [T], x: &[T]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += *x;
    }
}

/// Fetches a row that is needed soon into the second-level cache, where processors know how.
#[inline(always)]
pub(crate) fn prefetch<T>(row: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..size_of_val(row)).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: prefetches of any address are harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(row.as_ptr().cast::<i8>().wrapping_add(line)) };
    }
    #[cfg(target_arch = "aarch64")]
    for line in (0..size_of_val(row)).step_by(64) {
        let at = row.as_ptr().cast::<u8>().wrapping_add(line);
        // SAFETY: prefetches of any address are harmless.
        unsafe { std::arch::asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nostack, readonly)) };
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = row;
}

#[cfg(test)]
mod tests {
    use super::*;

    simd_fn! {
        fn all_reductions<T>(x: &[T], y: &[T]) -> [T; 4] {
            let mut z = [T::ONE; 64];
            axpy(&mut z[..x.len()], T::of(2.0), x);
            [sum(x), dot(x, y), max(x), sum(&z[..x.len()])]
        }
    }

    #[test]
    fn reductions_agree_with_plain_loops_at_every_length() {
        for n in 1..50 {
            let x: Vec<f64> = (0..n).map(|i| ((i * 37 + 11) % 23) as f64 - 9.0).collect();
            let y: Vec<f64> = (0..n).map(|i| ((i * 17 + 5) % 29) as f64 / 8.0).collect();
            let sum: f64 = x.iter().sum();
            let dot: f64 = x.iter().zip(&y).map(|(a, b)| a * b).sum();
            let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            assert_eq!(all_reductions(&x, &y), [sum, dot, max, n as f64 + 2.0 * sum]);
        }
    }
}
