// Small products on tensor cores: operands rounded to tf32, sums in f32. One block per 32 x 32 of C, 128 of the depth at a time; groups of four
// warps of 16 x 16 share the depth. For products of a few hundred rows this takes half the time of the library's larger tiles.

__device__ __forceinline__ u32 to_tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// Shared rows are padded so that a warp's reads fall into different banks: [32][132] where the depth runs along a row, [128][40] else.
#define DEPTH 128
#define ALONG 132
#define ACROSS 40
#define TILE (DEPTH * ACROSS)

// Copies a panel: `extent` rows (or columns) from `first` on, depths from `depth` on. along: stored as [extent, k], else as [k, extent].
template <bool along, int groups> __device__ __forceinline__ void load_panel(float* to, const float* from, i64 first, i64 extent, i64 depth, i64 k) {
#pragma unroll
    for (int step = 0; step < 32 * DEPTH / 4 / (128 * groups); ++step) {
        int i = threadIdx.x + step * 128 * groups;
        if (along) {
            int r = i / (DEPTH / 4), c = i % (DEPTH / 4) * 4;
            bool inside = first + r < extent && depth + c < k;
            copy_async(to + r * ALONG + c, inside ? from + (first + r) * k + depth + c : from, inside);
        } else {
            int c = i / 8, r = i % 8 * 4;
            bool inside = first + r < extent && depth + c < k;
            copy_async(to + c * ACROSS + r, inside ? from + (depth + c) * extent + first + r : from, inside);
        }
    }
}

template <bool along> __device__ __forceinline__ u32 element(const float* tile, int r, int c) { return to_tf32(tile[along ? r * ALONG + c : c * ACROSS + r]); }

// A is [m, k] (a_along) or [k, m]; B is [n, k] (b_along) or [k, n].
template <bool a_along, bool b_along, int groups>
__device__ __forceinline__ void small_product(float* c, const float* a, const float* b, const float* bias, const float* addend, i64 m, i64 n, i64 k, int relu) {
    extern __shared__ float shared[];
    int part = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, group = lane() / 4, quad = lane() % 4, wr = warp / 2 * 16, wc = warp % 2 * 16;
    i64 row = (i64)blockIdx.y * 32, column = (i64)blockIdx.x * 32;
    float sums[2][4] = {};
    int panels = (int)((k + DEPTH - 1) / DEPTH);
    load_panel<a_along, groups>(shared, a, row, m, 0, k);
    load_panel<b_along, groups>(shared + TILE, b, column, n, 0, k);
    asm volatile("cp.async.commit_group;");
    for (int panel = 0; panel < panels; ++panel) {
        const float *as = shared + panel % 2 * 2 * TILE, *bs = as + TILE;
        if (panel + 1 < panels) {
            float* next = shared + (panel + 1) % 2 * 2 * TILE;
            load_panel<a_along, groups>(next, a, row, m, (i64)(panel + 1) * DEPTH, k);
            load_panel<b_along, groups>(next + TILE, b, column, n, (i64)(panel + 1) * DEPTH, k);
            asm volatile("cp.async.commit_group;");
            asm volatile("cp.async.wait_group 1;");
        } else {
            asm volatile("cp.async.wait_group 0;");
        }
        __syncthreads();
        int steps = (int)min((i64)DEPTH, k - (i64)panel * DEPTH), own = (steps + 8 * groups - 1) / (8 * groups) * 8;
#pragma unroll 4
        for (int d = part * own; d < min(steps, (part + 1) * own); d += 8) {
            u32 x[4];
            x[0] = element<a_along>(as, wr + group, d + quad);
            x[1] = element<a_along>(as, wr + group + 8, d + quad);
            x[2] = element<a_along>(as, wr + group, d + quad + 4);
            x[3] = element<a_along>(as, wr + group + 8, d + quad + 4);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                u32 y0 = element<b_along>(bs, wc + 8 * j + group, d + quad), y1 = element<b_along>(bs, wc + 8 * j + group, d + quad + 4);
                asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                             : "+f"(sums[j][0]), "+f"(sums[j][1]), "+f"(sums[j][2]), "+f"(sums[j][3])
                             : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y0), "r"(y1));
            }
        }
        __syncthreads();
    }
    // The other groups' sums are left in shared memory for the first.
    if (groups > 1) {
        int thread = threadIdx.x % 128;
        if (part > 0)
#pragma unroll
            for (int i = 0; i < 8; ++i) shared[((part - 1) * 8 + i) * 128 + thread] = sums[i / 4][i % 4];
        __syncthreads();
        if (part > 0) return;
#pragma unroll
        for (int other = 0; other < groups - 1; ++other)
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] += shared[(other * 8 + i) * 128 + thread];
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            i64 r = row + wr + group + i / 2 * 8, s = column + wc + 8 * j + 2 * quad + i % 2;
            if (r >= m || s >= n) continue;
            float x = sums[j][i] + (bias ? bias[s] : 0.0f) + (addend ? addend[r * n + s] : 0.0f);
            c[r * n + s] = relu ? fmaxf(x, 0.0f) : x;
        }
}

#define SMALL_PRODUCT(name, a_along, b_along, groups)                                                                                                          \
    KERNEL name(float* c, const float* a, const float* b, const float* bias, const float* addend, i64 m, i64 n, i64 k, int relu, i64 sa, i64 sb, i64 sc) {     \
        begin();                                                                                                                                               \
        i64 z = blockIdx.z;                                                                                                                                    \
        small_product<a_along, b_along, groups>(c + z * sc, a + z * sa, b + z * sb, bias, addend ? addend + z * sc : addend, m, n, k, relu);                    \
    }
SMALL_PRODUCT(small_product_nn_2, true, false, 2)
SMALL_PRODUCT(small_product_nt_2, true, true, 2)
SMALL_PRODUCT(small_product_tn_2, false, false, 2)
SMALL_PRODUCT(small_product_tt_2, false, true, 2)
SMALL_PRODUCT(small_product_nn_4, true, false, 4)
SMALL_PRODUCT(small_product_nt_4, true, true, 4)
SMALL_PRODUCT(small_product_tn_4, false, false, 4)
SMALL_PRODUCT(small_product_tt_4, false, true, 4)
