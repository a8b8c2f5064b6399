// Products on tensor cores. A block computes 32 x 32 of C, 128 of the depth at a time; each of its warps
// computes the whole tile from depths of its own. Blocks of a cluster share the depth of one tile and add up
// in each other's shared memory.

constexpr int T = 32, DEPTH = 128, LINE = T + 8;

// A panel of one operand in shared memory: T rows (or columns) by DEPTH. along: stored as [extent, k], else
// as [k, extent]. Shared rows are padded so that a warp's reads fall into different banks.
template <bool along> struct Panel {
    static constexpr int LENGTH = along ? DEPTH : T, LINES = along ? T : DEPTH, STRIDE = LENGTH + 4 + (along ? 4 : 0), SIZE = LINES * STRIDE;

    // Copies what lies from (first, depth) on, zeros beyond the ends. wide: sixteen bytes at a time, which
    // addresses and extents must allow.
    template <int THREADS>
    static __device__ __forceinline__ void load(float* to, const float* from, int first, int extent, int depth, int depth_end, int k, bool wide) {
        int length = along ? k : extent, lines = along ? extent - first : depth_end - depth, ends = along ? depth_end - depth : extent - first;
        from += (along ? first : depth) * length + (along ? depth : first);
        if (wide) {
            constexpr int PER = LENGTH / 4, STEP = THREADS / PER;
            int line = threadIdx.x / PER, at = threadIdx.x % PER * 4;
#pragma unroll
            for (int step = 0; step < LINES / STEP; ++step) {
                int l = line + step * STEP;
                bool inside = l < lines && at < ends;
                copy_async(to + l * STRIDE + at, from + (inside ? l * length + at : 0), inside);
            }
        } else {
            for (int i = threadIdx.x; i < LINES * LENGTH; i += THREADS) {
                int l = i / LENGTH, at = i % LENGTH;
                bool inside = l < lines && at < ends;
                copy_one_async(to + l * STRIDE + at, from + (inside ? l * length + at : 0), inside);
            }
        }
    }

    // The numbers at depths d and d + 1 of row r.
    static __device__ __forceinline__ float2 pair(const float* panel, int r, int d) {
        if (along) return *(const float2*)(panel + r * STRIDE + d);
        return make_float2(panel[d * STRIDE + r], panel[(d + 1) * STRIDE + r]);
    }
};

// Writes x where block `rank` of the cluster has `own`.
__device__ __forceinline__ void write_shared(float4* own, int rank, float4 x) {
#if __CUDA_ARCH__ >= 900
    u32 address = (u32)__cvta_generic_to_shared(own);
    asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5};}" ::"r"(address), "r"(rank),
                 "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
                 : "memory");
#endif
}

// Four numbers, of which `count` are there.
__device__ __forceinline__ float4 read4(const float* from, int count, bool wide) {
    if (wide) return *(const float4*)from;
    return {from[0], count > 1 ? from[1] : 0.0f, count > 2 ? from[2] : 0.0f, count > 3 ? from[3] : 0.0f};
}
__device__ __forceinline__ void add(float4& x, float4 y) { x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w; }

// C = A B (+ bias per column) (+ addend), for each matrix of a batch; strides are elements from one matrix to
// the next. bias and addend may be null. No matrix has more than 2^31 elements. log_ranks: logarithm of the
// number of blocks in a cluster.
struct ProductArgs {
    float* c;
    const float *a, *b, *bias, *addend;
    i64 a_stride, b_stride, c_stride;
    int m, n, k, relu, log_ranks;
};

// A is [m, k] (a_along) or [k, m]; B is [n, k] (b_along) or [k, n]. exact: from both parts of every number,
// 22 bits, as good as f32.
template <bool a_along, bool b_along, bool exact, int warps> __device__ __forceinline__ void product(const ProductArgs& args) {
    int m = args.m, n = args.n, k = args.k, relu = args.relu, log_ranks = args.log_ranks;
    i64 z = blockIdx.z >> log_ranks;
    float* c = args.c + z * args.c_stride;
    const float *a = args.a + z * args.a_stride, *b = args.b + z * args.b_stride, *bias = args.bias;
    const float* addend = args.addend ? args.addend + z * args.c_stride : args.addend;
    using A = Panel<a_along>;
    using B = Panel<b_along>;
    constexpr int THREADS = 32 * warps, VECTORS = T * T / 4 / THREADS, STAGE = A::SIZE + B::SIZE;
    extern __shared__ float shared[];
    int warp = threadIdx.x / 32, group = lane() / 4, quad = lane() % 4;
    int row = blockIdx.y * T, column = blockIdx.x * T, rank = cluster_rank(), ranks = 1 << log_ranks;
    bool wide_a = ((u64)a & 15) == 0 && (a_along ? k : m) % 4 == 0, wide_b = ((u64)b & 15) == 0 && (b_along ? k : n) % 4 == 0;
    if (ranks > 1) cluster_arrive();
    // This block's share of the depth, a multiple of eight, and its panels.
    int share = (((k + ranks - 1) >> log_ranks) + 7) & ~7, begins = min(k, rank * share), ends = min(k, begins + share), panels = (ends - begins + DEPTH - 1) / DEPTH;
    auto load = [&](int panel) {
        float* to = shared + panel % 2 * STAGE;
        int depth = begins + panel * DEPTH;
        A::template load<THREADS>(to, a, row, m, depth, ends, k, wide_a);
        B::template load<THREADS>(to + A::SIZE, b, column, n, depth, ends, k, wide_b);
        commit_copies();
    };
    if (panels > 0) load(0);
    // What is added to this thread's part of C is loaded while the panels are copied. The addend may be C
    // itself.
    int rows = T >> log_ranks;
    bool wide_c = (((u64)c | (u64)addend | (u64)bias) & 15) == 0 && n % 4 == 0;
    float4 added[VECTORS] = {};
    if (bias || addend)
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            int at = 4 * (threadIdx.x + v * THREADS), r = row + rank * rows + at / T, s = column + at % T;
            if (at >= T * rows || r >= m || s >= n) continue;
            if (bias) add(added[v], read4(bias + s, n - s, wide_c));
            if (addend) add(added[v], read4(addend + r * n + s, n - s, wide_c));
        }
    float sums[2][4][4] = {}, low[2][4][4] = {}, total[2][4][4] = {};
    for (int panel = 0; panel < panels; ++panel) {
        if (panel + 1 < panels) {
            load(panel + 1);
            copies_done_but_last();
        } else {
            copies_done();
        }
        __syncthreads();
        const float *as = shared + panel % 2 * STAGE, *bs = as + A::SIZE;
        int steps = min(DEPTH, ends - begins - panel * DEPTH);
#pragma unroll 2
        for (int d = 8 * warp; d < steps; d += 8 * warps) {
            // Any order of the depth will do, if both operands have the same: a thread takes two neighbours.
            Split<exact> x[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float2 pair = A::pair(as, group + 8 * i, d + 2 * quad);
                x[i / 2][i % 2] = Split<exact>(pair.x), x[i / 2][i % 2 + 2] = Split<exact>(pair.y);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float2 pair = B::pair(bs, group + 8 * j, d + 2 * quad);
                Split<exact> y[2] = {Split<exact>(pair.x), Split<exact>(pair.y)};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    if (exact) {
                        multiply_add(low[i][j], x[i][0].low, x[i][1].low, x[i][2].low, x[i][3].low, y[0].high, y[1].high);
                        multiply_add(low[i][j], x[i][0].high, x[i][1].high, x[i][2].high, x[i][3].high, y[0].low, y[1].low);
                    }
                    multiply_add(sums[i][j], x[i][0].high, x[i][1].high, x[i][2].high, x[i][3].high, y[0].high, y[1].high);
                }
            }
        }
        // Tensor cores truncate sums: for exact products, long sums are made of short ones.
        if (exact)
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                float &high = sums[i / 16][i / 4 % 4][i % 4], &rest = low[i / 16][i / 4 % 4][i % 4];
                total[i / 16][i / 4 % 4][i % 4] += high + rest;
                high = rest = 0;
            }
        __syncthreads();
    }
    // The sums of all warps, in the memory of the panels.
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            auto& own = exact ? total[i / 2][j] : sums[i / 2][j];
            *(float2*)(shared + (warp * T + group + 8 * i) * LINE + 8 * j + 2 * quad) = make_float2(own[i % 2 * 2], own[i % 2 * 2 + 1]);
        }
    __syncthreads();
    float4 found[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        int at = 4 * (threadIdx.x + v * THREADS);
        found[v] = {};
#pragma unroll
        for (int w = 0; w < warps; ++w) add(found[v], *(const float4*)(shared + (w * T + at / T) * LINE + at % T));
    }
    // Each block of a cluster is given its rows of the tile by all blocks of the cluster.
    if (ranks > 1) {
        // At the same place in all blocks, of which the last may have fewer panels.
        float* given = shared + max((share > DEPTH ? 2 : 1) * STAGE, warps * T * LINE);
        cluster_wait();
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            int at = 4 * (threadIdx.x + v * THREADS), owner = at / T >> (5 - log_ranks);
            write_shared((float4*)(given + rank * T * rows + at - owner * T * rows), owner, found[v]);
        }
        cluster_arrive();
        cluster_wait();
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            int at = 4 * (threadIdx.x + v * THREADS);
            found[v] = {};
            if (at < T * rows)
                for (int other = 0; other < ranks; ++other) add(found[v], *(const float4*)(given + other * T * rows + at));
        }
    }
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        int at = 4 * (threadIdx.x + v * THREADS), r = row + rank * rows + at / T, s = column + at % T;
        if (at >= T * rows || r >= m || s >= n) continue;
        float4 x = found[v];
        add(x, added[v]);
        // NaN stays NaN.
        if (relu) x = {x.x < 0.0f ? 0.0f : x.x, x.y < 0.0f ? 0.0f : x.y, x.z < 0.0f ? 0.0f : x.z, x.w < 0.0f ? 0.0f : x.w};
        float* to = c + r * n + s;
        if (wide_c) {
            *(float4*)to = x;
        } else {
            to[0] = x.x;
            if (s + 1 < n) to[1] = x.y;
            if (s + 2 < n) to[2] = x.z;
            if (s + 3 < n) to[3] = x.w;
        }
    }
}

// Grid (tiles of n, tiles of m, batch x blocks of a cluster).
#define PRODUCT(name, a_along, b_along, exact, warps)              \
    KERNEL __launch_bounds__(32 * warps) name(ProductArgs args) {  \
        begin();                                                   \
        product<a_along, b_along, exact, warps>(args);             \
    }
