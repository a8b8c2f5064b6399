// Attention of up to 128 queries to up to 128 keys on tensor cores. A warp computes the scores of 16 queries
// and keeps them in registers. Two neighbouring numbers of a line are the depths t and t + 4 of a product,
// t = lane % 4, for both operands alike: so scores that were just computed are an operand of the next product.

// Depths 8 k to 8 k + 7 of 16 lines, the left operand of a product.
template <bool exact> struct Left {
    Split<exact> x[4];
};

// sums += a b for 16 x 8 by 8 x 8, of b the two numbers that this lane holds. exact: as good as f32.
template <bool exact> __device__ __forceinline__ void multiply(float (&sums)[4], const Left<exact>& a, float x, float y) {
    Split<exact> b(x), c(y);
    multiply_add(sums, a.x[0].high, a.x[1].high, a.x[2].high, a.x[3].high, b.high, c.high);
    if (exact) {
        multiply_add(sums, a.x[0].low, a.x[1].low, a.x[2].low, a.x[3].low, b.high, c.high);
        multiply_add(sums, a.x[0].high, a.x[1].high, a.x[2].high, a.x[3].high, b.low, c.low);
    }
}

// The left operand from what one product left in its sums.
template <bool exact> __device__ __forceinline__ Left<exact> as_left(const float (&sums)[4]) { return {{Split<exact>(sums[0]), Split<exact>(sums[2]), Split<exact>(sums[1]), Split<exact>(sums[3])}}; }

// Of lines i + g and i + g + 8 of [count, W], g = lane / 4, the numbers of this lane; zeros beyond `count`.
template <int W> struct Lines {
    float2 x[W / 8][2];
    __device__ __forceinline__ Lines(const float* from, int stride, int i, int count) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int line = i + lane() / 4 + 8 * half;
#pragma unroll
            for (int k = 0; k < W / 8; ++k) x[k][half] = line < count ? *(const float2*)(from + line * stride + 8 * k + lane() % 4 * 2) : make_float2(0, 0);
        }
    }
    // As the left operand at depths 8 k to 8 k + 7, plus `shift` [W] unless that is null.
    template <bool exact> __device__ __forceinline__ Left<exact> left(int k, const float* shift) const {
        float2 z = shift ? *(const float2*)(shift + 8 * k + lane() % 4 * 2) : make_float2(0, 0);
        return {{Split<exact>(x[k][0].x + z.x), Split<exact>(x[k][1].x + z.x), Split<exact>(x[k][0].y + z.y), Split<exact>(x[k][1].y + z.y)}};
    }
};

// Copies lines `first`.. of [count, W] to `lines` lines of LINE numbers; zeros where there are no such lines.
template <int W, int LINE> __device__ __forceinline__ void stage_lines(float* to, const float* from, int stride, int first, int count, int lines) {
    for (int i = threadIdx.x; i < lines * (W / 4); i += blockDim.x) {
        int line = i / (W / 4), c = i % (W / 4) * 4, at = first + line;
        bool inside = at >= 0 && at < count;
        copy_async(to + line * LINE + c, from + (inside ? at * stride + c : 0), inside);
    }
}

// Bit m: whether element `index` + 16 m is kept by dropout, for m < COUNT. One draw of the generator serves four.
template <int COUNT> __device__ __forceinline__ u32 kept_by_dropout(const Rng& rng, u32 stream, u32 below, u64 index) {
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < (COUNT + 3) / 4 + 1; ++i) {
        if (i == (COUNT + 3) / 4 && index % 64 / 16 + COUNT <= 4 * i) break;
        Block4 draws = philox(rng, stream, (u32)(16 * (index / 64 + i) + index % 16));
#pragma unroll
        for (int word = 0; word < 4; ++word) bits |= (u32)(draws.w[word] >= below) << (4 * i + word);
    }
    return bits >> (index % 64 / 16);
}

// Two numbers of a line of global memory from column j on, of `count`; `otherwise` where there are none. even:
// whether all lines begin at multiples of two numbers.
__device__ __forceinline__ float2 read_pair(const float* line, int j, int count, bool even, float otherwise) {
    if (even && j < count) return *(const float2*)(line + j);
    return make_float2(j < count ? line[j] : otherwise, j + 1 < count ? line[j + 1] : otherwise);
}
__device__ __forceinline__ void write_pair(float* line, int j, int count, bool even, float x, float y) {
    if (even && j < count) {
        *(float2*)(line + j) = make_float2(x, y);
    } else {
        if (j < count) line[j] = x;
        if (j + 1 < count) line[j + 1] = y;
    }
}

// The score of query i and key j from their product: scaled, with its bias; -INF for keys that the query does not
// see or that are masked.
__device__ __forceinline__ float biased(const AttentionArgs& args, float x, int b, int h, int i, int j, bool sees) {
    const AttentionShape& s = args.shape;
    x *= args.scale;
    if (args.bias && sees) x += args.bias[(i64)b * s.bias_batch + ((i64)h * s.queries + i) * s.keys + j];
    if (args.mask && sees) sees = args.mask[(i64)b * s.mask_batch + (i64)i * s.keys + j];
    return sees ? x : -INF;
}

// The keys that any of the 16 queries from i on sees.
__device__ __forceinline__ Seen tile_seen(const AttentionShape& s, const int* ranges, int start_position, int i) {
    int query = i + lane() % 16;
    Seen seen = query < s.queries ? query_seen(s, ranges, query, start_position + query) : Seen{s.keys, 0};
    if (seen.from >= seen.to) seen = {s.keys, 0};
    return {__reduce_min_sync(0xffffffffu, seen.from), __reduce_max_sync(0xffffffffu, seen.to)};
}

// Sizes for 8 NK keys and heads of width W. Lines whose neighbouring numbers are read together are padded by
// 8, lines of which neighbours are read by 4, so that a warp's reads fall into different banks.
template <int NK, int W> struct Tiles {
    static constexpr int KEYS = 8 * NK, PAIRS = W + 8, LINE = W + 4;
    // Row r of the position terms of a tile has those of distances r - j + KEYS - 1.
    static constexpr int TERMS = KEYS + 24;
    // Diagonals and columns of ds are read.
    static constexpr int SCORES = KEYS + 3;
};

// 16 lines of W sums to global memory; those of `count` that there are. to: the first line.
template <int W> __device__ __forceinline__ void write_lines(float* to, int stride, int count, const float (&sums)[W / 8][4]) {
    int g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int c = 0; c < W / 8; ++c) {
        if (g < count) *(float2*)(to + g * stride + 8 * c + 2 * t) = make_float2(sums[c][0], sums[c][1]);
        if (g + 8 < count) *(float2*)(to + (g + 8) * stride + 8 * c + 2 * t) = make_float2(sums[c][2], sums[c][3]);
    }
}

// Shared memory: keys [KEYS, PAIRS], values [KEYS, LINE], r [KEYS + 16 tiles, PAIRS], per warp the position terms
// [16, TERMS]; the last two only where relative.
template <int NK, int W, bool exact> __device__ __forceinline__ void attention_tiles(const AttentionArgs& args) {
    using Size = Tiles<NK, W>;
    constexpr int KEYS = Size::KEYS, PAIRS = Size::PAIRS, LINE = Size::LINE, TERMS = Size::TERMS;
    const AttentionShape& s = args.shape;
    extern __shared__ float shared[];
    int h = blockIdx.x, b = blockIdx.y, warp = threadIdx.x / 32, d = s.heads * W, g = lane() / 4, t = lane() % 4;
    int tiles = (s.queries + 15) / 16, start_position = query_position(s, args.start, b, 0);
    float *ks = shared, *vs = ks + KEYS * PAIRS, *rs = vs + KEYS * LINE, *terms = rs + (KEYS + 16 * tiles) * PAIRS + warp * 16 * TERMS;
    stage_lines<W, PAIRS>(ks, args.k + (i64)b * s.keys * s.k_stride + h * W, s.k_stride, 0, s.keys, KEYS);
    stage_lines<W, LINE>(vs, args.v + (i64)b * s.keys * s.v_stride + h * W, s.v_stride, 0, s.keys, KEYS);
    // Line x of rs is that of query x - (KEYS - 1) and key 0.
    if (s.relative) stage_lines<W, PAIRS>(rs, args.r + (i64)b * s.r_batch + h * W, d, s.zero + start_position - (KEYS - 1), s.distances, KEYS + 16 * tiles);
    int first = 16 * warp;
    Lines<W> q(args.q + (i64)b * s.queries * s.q_stride + h * W, s.q_stride, first, s.queries);
    const int* ranges = args.ranges ? args.ranges + (i64)b * s.range_batch : nullptr;
    Rng rng(args.drop.state ? args.drop.state + b * s.rng_batch : nullptr);
    Seen span = tile_seen(s, ranges, start_position, first);
    // By four tiles of keys, so that several products are under way at once.
    auto skipped = [&](int n) { return 8 * (n & ~3) >= span.to || 8 * (n & ~3) + 32 <= span.from; };
    copies_done();
    __syncthreads();
    Left<exact> left[W / 8];
    if (s.relative) {
#pragma unroll
        for (int k = 0; k < W / 8; ++k) left[k] = q.template left<exact>(k, args.w + h * W);
        int to = span.from < span.to ? (KEYS + 14 - span.from) / 8 + 1 : 0;
        for (int n = max(0, KEYS - span.to) / 16 * 2; n < to; n += 2) {
            float sums[2][2][4] = {};
#pragma unroll
            for (int k = 0; k < W / 8; ++k)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float2 x = *(const float2*)(rs + (first + 8 * (n + i) + g) * PAIRS + 8 * k + 2 * t);
                    multiply<exact>(sums[i][k % 2], left[k], x.x, x.y);
                }
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float *even = sums[i][0] + 2 * half, *odd = sums[i][1] + 2 * half;
                    *(float2*)(terms + (g + 8 * half) * TERMS + 8 * (n + i) + 2 * t) = make_float2(even[0] + odd[0], even[1] + odd[1]);
                }
        }
        __syncwarp();
    }
#pragma unroll
    for (int k = 0; k < W / 8; ++k) left[k] = q.template left<exact>(k, s.relative ? args.u + h * W : nullptr);
    float scores[NK][4], top[2] = {-INF, -INF};
    Seen seen[2];
    i64 row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int i = first + g + 8 * half;
        seen[half] = i < s.queries ? query_seen(s, ranges, i, start_position + i) : Seen{0, 0};
        row[half] = (((i64)b * s.heads + h) * s.queries + i) * s.keys;
    }
#pragma unroll
    for (int four = 0; four < NK; four += 4) {
#pragma unroll
        for (int e = 0; e < 16; ++e) scores[four + e / 4][e % 4] = 0;
        if (skipped(four)) continue;
#pragma unroll
        for (int k = 0; k < W / 8; ++k)
#pragma unroll
            for (int n = four; n < four + 4; ++n) {
                float2 x = *(const float2*)(ks + (8 * n + g) * PAIRS + 8 * k + 2 * t);
                multiply<exact>(scores[n], left[k], x.x, x.y);
            }
#pragma unroll
        for (int e = 0; e < 16; ++e) {
            int n = four + e / 4, half = e % 4 / 2, line = g + 8 * half, i = first + line, j = 8 * n + 2 * t + e % 2;
            bool sees = seen[half].has(j);
            float x = scores[n][e % 4];
            if (s.relative) x += terms[line * TERMS + KEYS - 1 + line - j];
            x = biased(args, x, b, h, i, j, sees);
            scores[n][e % 4] = x;
            top[half] = fmaxf(top[half], x);
        }
    }
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 1));
        top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], 2));
        float total = 0;
#pragma unroll
        for (int four = 0; four < NK; four += 4) {
            if (skipped(four)) continue;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float& x = scores[four + i / 2][2 * half + i % 2];
                float e = exact ? expf(x - top[half]) : __expf(x - top[half]);
                x = x == -INF ? 0.0f : e;
                total += x;
            }
        }
        total += __shfl_xor_sync(0xffffffffu, total, 1);
        total += __shfl_xor_sync(0xffffffffu, total, 2);
        // Nothing but zeros for a query that sees nothing.
        inverse[half] = total == 0.0f ? 0.0f : 1.0f / total;
    }
    u32 kept[2][4];
    if (args.drop.state) {
        i64 before = s.rng_batch ? (i64)b * s.heads * s.queries * s.keys : 0;
#pragma unroll
        for (int c = 0; c < 8; ++c)
            kept[c / 4][c % 4] = kept_by_dropout<(NK + 1) / 2>(rng, args.drop.stream, args.drop.below, (u64)(row[c / 4] - before + 8 * (c % 4 / 2) + 2 * t + c % 2));
    }
    bool pairs = s.keys % 2 == 0;
#pragma unroll
    for (int n = 0; n < NK; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float *p = scores[n] + 2 * half;
            p[0] *= inverse[half], p[1] *= inverse[half];
            int j = 8 * n + 2 * t;
            if (args.weights && first + g + 8 * half < s.queries) write_pair(args.weights + row[half], j, s.keys, pairs, p[0], p[1]);
            if (args.drop.state) {
#pragma unroll
                for (int c = 0; c < 2; ++c) p[c] *= kept[half][n % 2 * 2 + c] >> (n / 2) & 1 ? args.drop.keep : 0.0f;
            }
        }
    }
    float sums[W / 8][4] = {};
#pragma unroll
    for (int four = 0; four < NK; four += 4) {
        if (skipped(four)) continue;
#pragma unroll
        for (int n = four; n < four + 4; ++n) {
            Left<exact> p = as_left<exact>(scores[n]);
#pragma unroll
            for (int c = 0; c < W / 8; ++c) {
                const float* v = vs + (8 * n + 2 * t) * LINE + 8 * c + g;
                multiply<exact>(sums[c], p, v[0], v[LINE]);
            }
        }
    }
    write_lines<W>(args.y + ((i64)b * s.queries + first) * d + h * W, d, s.queries - first, sums);
}

// The gradients, for a batch row and head: first ds and the dropped weights by two warps per 16 queries, then
// 16 lines of dq, dk, dv or dr by a warp. Shared memory: values [KEYS, PAIRS], dy and q [16 tiles, LINE], keys
// [KEYS, LINE], ds and dropped [16 tiles, SCORES], sums of rows [2, 16 tiles]; where relative r [KEYS + 16 tiles, LINE]
// and sums for u and w [tiles, 2, W].
template <int NK, int W, bool exact> __device__ __forceinline__ void attention_tiles_grad(const AttentionGradArgs& args) {
    using Size = Tiles<NK, W>;
    constexpr int KEYS = Size::KEYS, PAIRS = Size::PAIRS, LINE = Size::LINE, SCORES = Size::SCORES, HALF = NK / 2;
    const AttentionShape& s = args.shape;
    extern __shared__ float shared[];
    int h = blockIdx.x, b = blockIdx.y, warp = threadIdx.x / 32, warps = blockDim.x / 32, d = s.heads * W, g = lane() / 4, t = lane() % 4;
    int tiles = (s.queries + 15) / 16, rows = 16 * tiles, start_position = query_position(s, args.start, b, 0);
    float *vs = shared, *gs = vs + KEYS * PAIRS, *qs = gs + rows * LINE, *ks = qs + rows * LINE, *ds = ks + KEYS * LINE, *dropped = ds + rows * SCORES;
    float *means = dropped + rows * SCORES, *rs = means + 2 * rows, *tables = rs + (KEYS + rows) * LINE;
    const float* dy = args.dy + (i64)b * s.queries * d + h * W;
    // Row of r of line 0 of rs.
    int r_first = s.zero + start_position - (KEYS - 1);
    stage_lines<W, PAIRS>(vs, args.v + (i64)b * s.keys * s.v_stride + h * W, s.v_stride, 0, s.keys, KEYS);
    stage_lines<W, LINE>(gs, dy, d, 0, s.queries, rows);
    stage_lines<W, LINE>(qs, args.q + (i64)b * s.queries * s.q_stride + h * W, s.q_stride, 0, s.queries, rows);
    stage_lines<W, LINE>(ks, args.k + (i64)b * s.keys * s.k_stride + h * W, s.k_stride, 0, s.keys, KEYS);
    if (s.relative) stage_lines<W, LINE>(rs, args.r + (i64)b * s.r_batch + h * W, d, r_first, s.distances, KEYS + rows);
    const int* ranges = args.ranges ? args.ranges + (i64)b * s.range_batch : nullptr;
    Rng rng(args.drop.state ? args.drop.state + b * s.rng_batch : nullptr);
    i64 cells = (i64)s.queries * s.keys, head = (i64)b * s.heads + h;
    const float* weights = args.weights + head * cells;
    // Warps 2 i and 2 i + 1 have the first and the second half of the keys.
    int first = warp / 2 * 16, part = warp % 2 * HALF;
    Seen span = tile_seen(s, ranges, start_position, first);
    // By two tiles of keys, so that several products are under way at once.
    auto skipped = [&](int n) { return 8 * (n & ~1) >= span.to || 8 * (n & ~1) + 16 <= span.from; };
    float p[HALF][4], dp[HALF][4];
    bool pairs = s.keys % 2 == 0;
#pragma unroll
    for (int n = 0; n < HALF; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int i = first + g + 8 * half, j = 8 * (part + n) + 2 * t;
            float2 x = make_float2(0, 0);
            if (i < s.queries && !skipped(part + n)) x = read_pair(weights + (i64)i * s.keys, j, s.keys, pairs, 0.0f);
            p[n][2 * half] = x.x, p[n][2 * half + 1] = x.y;
        }
    u32 kept[2][4];
    if (args.drop.state) {
        i64 counted = (s.rng_batch ? h : head) * cells;
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            i64 i = first + g + 8 * (c / 4), j = 8 * (part + c % 4 / 2) + 2 * t + c % 2;
            kept[c / 4][c % 4] = kept_by_dropout<(HALF + 1) / 2>(rng, args.drop.stream, args.drop.below, (u64)(counted + i * s.keys + j));
        }
    }
    copies_done();
    __syncthreads();
    {
        Left<exact> left[W / 8];
        Lines<W> lines(gs, LINE, first, rows);
#pragma unroll
        for (int k = 0; k < W / 8; ++k) left[k] = lines.template left<exact>(k, nullptr);
        float mean[2] = {};
#pragma unroll
        for (int two = 0; two < HALF; two += 2) {
            // Even and odd depths apart.
            float sums[2][2][4] = {};
            if (!skipped(part + two)) {
#pragma unroll
                for (int k = 0; k < W / 8; ++k)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float2 x = *(const float2*)(vs + (8 * (part + two + i) + g) * PAIRS + 8 * k + 2 * t);
                        multiply<exact>(sums[i][k % 2], left[k], x.x, x.y);
                    }
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                int n = two + i / 4, e = i % 4, j = 8 * (part + n) + 2 * t + e % 2;
                float factor = !args.drop.state ? 1.0f : kept[e / 2][n % 2 * 2 + e % 2] >> (n / 2) & 1 ? args.drop.keep : 0.0f;
                // Weights that are zero, those of keys that a query does not see among them, count for nothing.
                dp[n][e] = p[n][e] == 0.0f ? 0.0f : (sums[i / 4][0][e] + sums[i / 4][1][e]) * factor;
                mean[e / 2] += p[n][e] * dp[n][e];
                dropped[(first + g + 8 * (e / 2)) * SCORES + j] = p[n][e] * factor;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mean[half] += __shfl_xor_sync(0xffffffffu, mean[half], 1);
            mean[half] += __shfl_xor_sync(0xffffffffu, mean[half], 2);
            if (t == 0) means[warp % 2 * rows + first + g + 8 * half] = mean[half];
        }
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int i = first + g + 8 * half;
        float mean = means[i] + means[rows + i];
#pragma unroll
        for (int n = 0; n < HALF; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                int j = 8 * (part + n) + 2 * t + c;
                float x = p[n][2 * half + c] * (dp[n][2 * half + c] - mean);
                ds[i * SCORES + j] = x * args.scale;
                if (args.ds_out && i < s.queries && j < s.keys) args.ds_out[head * cells + (i64)i * s.keys + j] = x;
            }
    }
    __syncthreads();
    bool wants_tables = s.relative && args.partial;
    float* partial = args.partial + (i64)b * (2 + s.distances) * d + h * W;
    int key_tiles = NK / 2, r_tiles = wants_tables ? (KEYS + rows) / 16 : 0;
    for (int task = warp; task < tiles + r_tiles + 2 * key_tiles; task += warps) {
        float sums[W / 8][4] = {};
        if (task < tiles) {
            // dq of 16 queries: ds k + ds r, the second along diagonals.
            int i = 16 * task;
            Seen span = tile_seen(s, ranges, start_position, i);
            const float* line = ds + (i + g) * SCORES;
            for (int n = span.from / 8; 8 * n < span.to; ++n) {
                const float* x = line + 8 * n + 2 * t;
                Left<exact> a = {{Split<exact>(x[0]), Split<exact>(x[8 * SCORES]), Split<exact>(x[1]), Split<exact>(x[8 * SCORES + 1])}};
#pragma unroll
                for (int c = 0; c < W / 8; ++c) {
                    const float* k = ks + (8 * n + 2 * t) * LINE + 8 * c + g;
                    multiply<exact>(sums[c], a, k[0], k[LINE]);
                }
            }
            float far[W / 8][4] = {};
            int to = s.relative && span.from < span.to ? (KEYS + 14 - span.from) / 8 + 1 : 0;
            for (int n = max(0, KEYS - span.to) / 8; n < to; ++n) {
                int j = KEYS - 1 + g - 8 * n - 2 * t;
                auto at = [&](int half, int j) { return j >= 0 && j < KEYS ? line[8 * half * SCORES + j] : 0.0f; };
                Left<exact> a = {{Split<exact>(at(0, j)), Split<exact>(at(1, j + 8)), Split<exact>(at(0, j - 1)), Split<exact>(at(1, j + 7))}};
#pragma unroll
                for (int c = 0; c < W / 8; ++c) {
                    const float* r = rs + (i + 8 * n + 2 * t) * LINE + 8 * c + g;
                    multiply<exact>(far[c], a, r[0], r[LINE]);
                }
            }
            if (wants_tables) {
                // Sums over the 16 queries, for u and w.
#pragma unroll
                for (int c = 0; c < W / 8; ++c)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        float total = e < 2 ? sums[c][e] + sums[c][e + 2] : far[c][e - 2] + far[c][e];
                        for (int o = 4; o < 32; o <<= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
                        if (g == 0) tables[(task * 2 + e / 2) * W + 8 * c + 2 * t + e % 2] = total;
                    }
            }
            if (!args.dq) continue;
#pragma unroll
            for (int c = 0; c < W / 8; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[c][e] += far[c][e];
            write_lines<W>(args.dq + ((i64)b * s.queries + i) * s.q_stride + h * W, s.q_stride, s.queries - i, sums);
        } else if (task < tiles + r_tiles) {
            // dr of 16 distances: diagonals of ds times q + w.
            int x = 16 * (task - tiles), row = r_first + x;
            if (row + 16 <= 0 || row >= s.distances) continue;
            const float* shift = args.w + h * W + g;
            for (int k = 0; k < 2 * tiles; ++k) {
                // The key of query 8 k + 2 t at the distance of line x + g.
                int i = 8 * k + 2 * t, j = KEYS - 1 + i - x - g;
                auto at = [&](int i, int j) { return j >= 0 && j < KEYS ? ds[i * SCORES + j] : 0.0f; };
                Left<exact> a = {{Split<exact>(at(i, j)), Split<exact>(at(i, j - 8)), Split<exact>(at(i + 1, j + 1)), Split<exact>(at(i + 1, j - 7))}};
#pragma unroll
                for (int c = 0; c < W / 8; ++c) {
                    const float* q = qs + i * LINE + 8 * c + g;
                    float more = shift[8 * c];
                    multiply<exact>(sums[c], a, q[0] + more, q[LINE] + more);
                }
            }
            int ahead = max(0, -row);
            float* to = partial + (i64)(2 + row) * d;
            if (ahead == 0) {
                write_lines<W>(to, d, s.distances - row, sums);
            } else {
#pragma unroll
                for (int c = 0; c < W / 8; ++c)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        int line = g + 8 * (e / 2);
                        if (line >= ahead && row + line < s.distances) to[(i64)line * d + 8 * c + 2 * t + e % 2] = sums[c][e];
                    }
            }
        } else {
            // dk: ds transposed times q + u; dv: the dropped weights transposed times dy.
            int j = 16 * ((task - tiles - r_tiles) % key_tiles);
            bool value = task - tiles - r_tiles >= key_tiles;
            if (j >= s.keys || !(value ? args.dv : args.dk)) continue;
            const float *scores = (value ? dropped : ds) + j + g, *lines = value ? gs : qs, *shift = !value && s.relative ? args.u + h * W + g : nullptr;
            for (int k = s.causal && !ranges ? max(0, j - start_position) / 8 : 0; k < 2 * tiles; ++k) {
                const float* x = scores + (8 * k + 2 * t) * SCORES;
                Left<exact> a = {{Split<exact>(x[0]), Split<exact>(x[8]), Split<exact>(x[SCORES]), Split<exact>(x[SCORES + 8])}};
#pragma unroll
                for (int c = 0; c < W / 8; ++c) {
                    const float* y = lines + (8 * k + 2 * t) * LINE + 8 * c + g;
                    float more = shift ? shift[8 * c] : 0.0f;
                    multiply<exact>(sums[c], a, y[0] + more, y[LINE] + more);
                }
            }
            int stride = value ? s.v_stride : s.k_stride;
            write_lines<W>((value ? args.dv : args.dk) + ((i64)b * s.keys + j) * stride + h * W, stride, s.keys - j, sums);
        }
    }
    if (!wants_tables) return;
    // Distances that no query and key have.
    for (int i = threadIdx.x; i < s.distances * W; i += blockDim.x) {
        int row = i / W;
        if (row < r_first || row >= r_first + KEYS + rows) partial[(i64)(2 + row) * d + i % W] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * W; i += blockDim.x) {
        float total = 0;
        for (int tile = 0; tile < tiles; ++tile) total += tables[tile * 2 * W + i];
        partial[(i64)(i / W) * d + i % W] = total;
    }
}

// Grid (heads, batch). NK: keys / 8; tiles of 16 queries: a warp each.
#define ATTENTION_TILES(name, nk, width, exact)                        \
    KERNEL __launch_bounds__(256) name(AttentionArgs args) {           \
        begin();                                                       \
        attention_tiles<nk, width, exact>(args);                       \
    }
// Grid (heads, batch), two warps for each tile of 16 queries.
#define ATTENTION_TILES_GRAD(name, nk, width, exact)                   \
    KERNEL __launch_bounds__(32 * nk) name(AttentionGradArgs args) {   \
        begin();                                                       \
        attention_tiles_grad<nk, width, exact>(args);                  \
    }
