// Products of small tiles on tensor cores.

// A number as tf32, the 11 bits that tensor cores look at, rounded to nearest, and what that leaves of it.
// (The conversion instruction is eight times slower than these three operations.) Numbers beyond 4e34 become
// NaN.
struct Split {
    float high, low;
    __device__ __forceinline__ explicit Split(float x) {
        float far = __fmul_rn(x, 8193.0f);
        high = __fsub_rn(far, __fsub_rn(far, x));
        low = __fsub_rn(x, high);
    }
    Split() = default;
};

// sums += a b for 16 x 8 by 8 x 8.
__device__ __forceinline__ void multiply_add(float (&sums)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)),
          "r"(__float_as_uint(b1)));
}
