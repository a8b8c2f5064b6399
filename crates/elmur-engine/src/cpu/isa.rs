//! The instruction sets that kernels are compiled for, and which of them this machine has.

use std::sync::OnceLock;

/// Vector instruction sets that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isa {
    /// Whatever the target guarantees, without kernels of its own.
    Baseline,
    /// NEON, on aarch64.
    Neon,
    /// AVX2 with fused multiply-add.
    Avx2,
    /// AVX-512 (F, BW, DQ, VL).
    Avx512,
    /// AVX-512 and a matrix unit for products of f32 (AMX with bf16).
    Amx,
}

impl Isa {
    /// The best set this machine has. `ELMUR_ISA=baseline|avx2|avx512` lowers it, for comparisons.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let limit = match std::env::var("ELMUR_ISA").as_deref() {
                Ok("baseline") => Isa::Baseline,
                Ok("avx2") => Isa::Avx2,
                Ok("avx512") => Isa::Avx512,
                _ => Isa::Amx,
            };
            Self::detected().min(limit)
        })
    }

    #[cfg(target_arch = "x86_64")]
    pub(crate) fn detected() -> Isa {
        let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        let avx512 = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match (avx2, avx512) {
            (true, true) if matrix_unit_available() => Isa::Amx,
            (true, true) => Isa::Avx512,
            (true, false) => Isa::Avx2,
            _ => Isa::Baseline,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn detected() -> Isa {
        if cfg!(target_arch = "aarch64") { Isa::Neon } else { Isa::Baseline }
    }
}

/// Whether this machine has a matrix unit for bf16 (AMX) that this process may use. Asks the operating system
/// for the right to use its registers, once per process.
#[cfg(target_arch = "x86_64")]
fn matrix_unit_available() -> bool {
    const TILE_AND_BF16: u32 = 1 << 24 | 1 << 22;
    let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
    features & TILE_AND_BF16 == TILE_AND_BF16 && permitted()
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn permitted() -> bool {
    const SYS_ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: a system call that changes nothing but this process's right to the tile registers.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn permitted() -> bool {
    false
}
