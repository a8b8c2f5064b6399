// Products of small tiles on tensor cores.

// A number as tensor cores take it, which use only the first 11 bits of it (tf32). exact: rounded to these, and what that
// leaves of it; numbers beyond 4e34 become NaN. (The conversion instruction is eight times slower than these
// operations.) Otherwise what is cut off on average is added before (ln 2 / 2 of the last bit's value at 1): so errors
// have no sign, and what has 11 bits stays as it is.
template <bool exact> struct Split {
    float high, low;
    __device__ __forceinline__ explicit Split(float x) : high(x * 1.000338f), low(0) {}
    Split() = default;
};
template <> __device__ __forceinline__ Split<true>::Split(float x) {
    float far = __fmul_rn(x, 8193.0f);
    high = __fsub_rn(far, __fsub_rn(far, x));
    low = __fsub_rn(x, high);
}

// sums += a b for 16 x 8 by 8 x 8.
__device__ __forceinline__ void multiply_add(float (&sums)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)),
          "r"(__float_as_uint(b1)));
}

// Four 8 x 4 tiles of shared memory: in tile i this thread gets number (lane / 4, lane % 4). Lanes 8 i to 8 i + 7 say
// where the rows of tile i lie, 16 bytes each.
__device__ __forceinline__ void load_tiles(float (&to)[4], u32 row) {
    u32 x[4];
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(row));
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = __uint_as_float(x[i]);
}
