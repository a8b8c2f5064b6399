// Attention to any number of keys on tensor cores, by blocks of 64 keys. A warp has 16 queries. Scores go through
// global memory, in the place of the weights and of their gradients.

// What 16 queries of every warp of a block see, from query `base` on: the warp's, and all.
struct Spans {
    Seen own, all;
    __device__ __forceinline__ Spans(const AttentionShape& s, const int* ranges, int start_position, int base) : all{s.keys, 0} {
        for (int w = 0; w < (int)blockDim.x / 32; ++w) {
            Seen seen = tile_seen(s, ranges, start_position, base + 16 * w);
            all = {min(all.from, seen.from), max(all.to, seen.to)};
            if (w == (int)threadIdx.x / 32) own = seen;
        }
    }
    // Whether none of the 64 keys from j on is seen by the warp, or by the block.
    __device__ __forceinline__ bool skips(int j) const { return j >= own.to || j + 64 <= own.from; }
    __device__ __forceinline__ bool all_skip(int j) const { return j >= all.to || j + 64 <= all.from; }
};

// Bits of `kept_by_dropout` for the scores of 16 queries and 64 keys that a lane holds: bit n / 2 of element
// [half][n % 2 * 2 + c]. index: of the first key of each of the lane's two queries.
__device__ __forceinline__ void kept_scores(u32 (&kept)[2][4], const DropArgs& drop, const Rng& rng, const i64 (&index)[2]) {
    int t = lane() % 4;
#pragma unroll
    for (int c = 0; c < 8; ++c)
        kept[c / 4][c % 4] = kept_by_dropout<4>(rng, drop.stream, drop.below, (u64)(index[c / 4] + 8 * (c % 4 / 2) + 2 * t + c % 2));
}

// First all scores, with their greatest and the sum of their exponentials so far, then the weights and the sums of
// values. Grid (heads, batch, parts of the queries). `weights` is never null. Shared memory: keys [64, PAIRS] and
// later values [64, LINE]; where relative r [64 + 16 warps, PAIRS] and per warp the position terms [16, TERMS].
template <int W, bool exact> __device__ __forceinline__ void attention_long(const AttentionArgs& args) {
    using Size = Tiles<8, W>;
    constexpr int NK = 8, KEYS = Size::KEYS, PAIRS = Size::PAIRS, LINE = Size::LINE, TERMS = Size::TERMS;
    const AttentionShape& s = args.shape;
    extern __shared__ float shared[];
    int h = blockIdx.x, b = blockIdx.y, warp = threadIdx.x / 32, warps = blockDim.x / 32, d = s.heads * W, g = lane() / 4, t = lane() % 4;
    int base = blockIdx.z * 16 * warps, first = base + 16 * warp, start_position = query_position(s, args.start, b, 0);
    float *lines = shared, *rs = lines + KEYS * PAIRS, *terms = rs + (KEYS + 16 * warps) * PAIRS + warp * 16 * TERMS;
    const float *keys = args.k + (i64)b * s.keys * s.k_stride + h * W, *values = args.v + (i64)b * s.keys * s.v_stride + h * W;
    Lines<W> q(args.q + (i64)b * s.queries * s.q_stride + h * W, s.q_stride, first, s.queries);
    const int* ranges = args.ranges ? args.ranges + (i64)b * s.range_batch : nullptr;
    Rng rng(args.drop.state ? args.drop.state + b * s.rng_batch : nullptr);
    Spans spans(s, ranges, start_position, base);
    bool even = s.keys % 2 == 0;
    float top[2] = {-INF, -INF}, total[2] = {};
    Seen seen[2];
    float* line[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int i = first + g + 8 * half;
        seen[half] = i < s.queries ? query_seen(s, ranges, i, start_position + i) : Seen{0, 0};
        line[half] = args.weights + (((i64)b * s.heads + h) * s.queries + i) * s.keys;
    }
    for (int start = 0; start < s.keys; start += KEYS) {
        if (spans.all_skip(start)) continue;
        __syncthreads();
        stage_lines<W, PAIRS>(lines, keys, s.k_stride, start, s.keys, KEYS);
        // Line x of rs is that of query base + x - (KEYS - 1) and the first of these keys.
        if (s.relative) stage_lines<W, PAIRS>(rs, args.r + (i64)b * s.r_batch + h * W, d, s.zero + start_position + base - start - (KEYS - 1), s.distances, KEYS + 16 * warps);
        copies_done();
        __syncthreads();
        if (spans.skips(start)) continue;
        Left<exact> left[W / 8];
        if (s.relative) {
#pragma unroll
            for (int k = 0; k < W / 8; ++k) left[k] = q.template left<exact>(k, args.w + h * W);
            for (int n = 0; n < (KEYS + 16) / 8; n += 2) {
                float sums[2][4] = {};
#pragma unroll
                for (int k = 0; k < W / 8; ++k)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float2 x = *(const float2*)(rs + (16 * warp + 8 * (n + i) + g) * PAIRS + 8 * k + 2 * t);
                        multiply<exact>(sums[i], left[k], x.x, x.y);
                    }
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    *(float2*)(terms + (g + 8 * (i % 2)) * TERMS + 8 * (n + i / 2) + 2 * t) = make_float2(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
            }
            __syncwarp();
        }
#pragma unroll
        for (int k = 0; k < W / 8; ++k) left[k] = q.template left<exact>(k, s.relative ? args.u + h * W : nullptr);
        float scores[NK][4] = {}, most[2] = {top[0], top[1]};
#pragma unroll
        for (int k = 0; k < W / 8; ++k)
#pragma unroll
            for (int n = 0; n < NK; ++n) {
                float2 x = *(const float2*)(lines + (8 * n + g) * PAIRS + 8 * k + 2 * t);
                multiply<exact>(scores[n], left[k], x.x, x.y);
            }
#pragma unroll
        for (int e = 0; e < 4 * NK; ++e) {
            int n = e / 4, half = e % 4 / 2, row = g + 8 * half, i = first + row, column = 8 * n + 2 * t + e % 2, j = start + column;
            float x = scores[n][e % 4];
            if (s.relative) x += terms[row * TERMS + KEYS - 1 + row - column];
            x = biased(args, x, b, h, i, j, seen[half].has(j));
            scores[n][e % 4] = x;
            most[half] = fmaxf(most[half], x);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffffu, most[half], 1));
            most[half] = fmaxf(most[half], __shfl_xor_sync(0xffffffffu, most[half], 2));
            float sum = top[half] == -INF ? 0.0f : total[half] * expf(top[half] - most[half]);
            bool there = first + g + 8 * half < s.queries;
#pragma unroll
            for (int n = 0; n < NK; ++n) {
                float x = scores[n][2 * half], y = scores[n][2 * half + 1];
                sum += (x == -INF ? 0.0f : expf(x - most[half])) + (y == -INF ? 0.0f : expf(y - most[half]));
                if (there) write_pair(line[half], start + 8 * n + 2 * t, s.keys, even, x, y);
            }
            top[half] = most[half], total[half] = sum;
        }
        // All lanes have read the position terms.
        __syncwarp();
    }
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
        total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
        // Nothing but zeros for a query that sees nothing.
        inverse[half] = total[half] == 0.0f ? 0.0f : 1.0f / total[half];
    }
    float sums[W / 8][4] = {};
    for (int start = 0; start < s.keys; start += KEYS) {
        if (!spans.all_skip(start)) {
            __syncthreads();
            stage_lines<W, LINE>(lines, values, s.v_stride, start, s.keys, KEYS);
            copies_done();
            __syncthreads();
        }
        bool skipped = spans.skips(start);
        u32 kept[2][4];
        if (args.drop.state) {
            i64 before = s.rng_batch ? (i64)b * s.heads * s.queries * s.keys : 0;
            kept_scores(kept, args.drop, rng, {line[0] - args.weights - before + start, line[1] - args.weights - before + start});
        }
        float p[NK][4];
#pragma unroll
        for (int n = 0; n < NK; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int j = start + 8 * n + 2 * t;
                bool there = first + g + 8 * half < s.queries;
                float2 x = there && !skipped ? read_pair(line[half], j, s.keys, even, -INF) : make_float2(-INF, -INF);
                float* to = p[n] + 2 * half;
                to[0] = x.x == -INF ? 0.0f : expf(x.x - top[half]) * inverse[half];
                to[1] = x.y == -INF ? 0.0f : expf(x.y - top[half]) * inverse[half];
                if (there) write_pair(line[half], j, s.keys, even, to[0], to[1]);
                if (args.drop.state) {
#pragma unroll
                    for (int c = 0; c < 2; ++c) to[c] *= kept[half][n % 2 * 2 + c] >> (n / 2) & 1 ? args.drop.keep : 0.0f;
                }
            }
        if (skipped) continue;
#pragma unroll
        for (int n = 0; n < NK; ++n) {
            Left<exact> a = as_left<exact>(p[n]);
#pragma unroll
            for (int c = 0; c < W / 8; ++c) {
                const float* v = lines + (8 * n + 2 * t) * LINE + 8 * c + g;
                multiply<exact>(sums[c], a, v[0], v[LINE]);
            }
        }
    }
    if (first < s.queries) write_lines<W>(args.y + ((i64)b * s.queries + first) * d + h * W, d, s.queries - first, sums);
}

// ds and the dropped weights into `spill`, which is never null, and dq with the sums for u and w. Grid (heads, batch).
// Shared memory: values [64, PAIRS] and later keys [64, LINE]; per warp ds [16, SCORES]; where relative r
// [64 + 16 warps, LINE] and sums for u and w [warps, 2, W].
template <int W, bool exact> __device__ __forceinline__ void attention_long_grad(const AttentionGradArgs& args) {
    using Size = Tiles<8, W>;
    constexpr int NK = 8, KEYS = Size::KEYS, PAIRS = Size::PAIRS, LINE = Size::LINE, SCORES = Size::SCORES;
    const AttentionShape& s = args.shape;
    extern __shared__ float shared[];
    int h = blockIdx.x, b = blockIdx.y, warp = threadIdx.x / 32, warps = blockDim.x / 32, d = s.heads * W, g = lane() / 4, t = lane() % 4;
    int start_position = query_position(s, args.start, b, 0);
    float *lines = shared, *own = lines + KEYS * PAIRS + warp * 16 * SCORES, *rs = lines + KEYS * PAIRS + warps * 16 * SCORES;
    float* tables = rs + (KEYS + 16 * warps) * LINE;
    const float *keys = args.k + (i64)b * s.keys * s.k_stride + h * W, *values = args.v + (i64)b * s.keys * s.v_stride + h * W;
    const int* ranges = args.ranges ? args.ranges + (i64)b * s.range_batch : nullptr;
    Rng rng(args.drop.state ? args.drop.state + b * s.rng_batch : nullptr);
    i64 cells = (i64)s.queries * s.keys, head = (i64)b * s.heads + h, counted = (s.rng_batch ? h : head) * cells;
    const float* weights = args.weights + head * cells;
    float *ds = args.spill + head * 2 * cells, *dropped = ds + cells, *ds_out = args.ds_out ? args.ds_out + head * cells : nullptr;
    bool even = s.keys % 2 == 0, wants_tables = s.relative && args.partial;
    float sums_u[W / 8][2] = {}, sums_w[W / 8][2] = {};
    for (int base = 0; base < s.queries; base += 16 * warps) {
        int first = base + 16 * warp;
        Spans spans(s, ranges, start_position, base);
        // Offsets of this lane's two lines of scores.
        i64 line[2] = {(i64)(first + g) * s.keys, (i64)(first + g + 8) * s.keys};
        bool there[2] = {first + g < s.queries, first + g + 8 < s.queries};
        Lines<W> dy(args.dy + (i64)b * s.queries * d + h * W, d, first, s.queries);
        float mean[2] = {};
        for (int start = 0; start < s.keys; start += KEYS) {
            if (!spans.all_skip(start)) {
                __syncthreads();
                stage_lines<W, PAIRS>(lines, values, s.v_stride, start, s.keys, KEYS);
                copies_done();
                __syncthreads();
            }
            bool skipped = spans.skips(start);
            float dp[NK][4] = {};
            if (!skipped) {
#pragma unroll
                for (int k = 0; k < W / 8; ++k) {
                    Left<exact> left = dy.template left<exact>(k, nullptr);
#pragma unroll
                    for (int n = 0; n < NK; ++n) {
                        float2 x = *(const float2*)(lines + (8 * n + g) * PAIRS + 8 * k + 2 * t);
                        multiply<exact>(dp[n], left, x.x, x.y);
                    }
                }
            }
            u32 kept[2][4];
            if (args.drop.state) kept_scores(kept, args.drop, rng, {counted + line[0] + start, counted + line[1] + start});
#pragma unroll
            for (int n = 0; n < NK; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int j = start + 8 * n + 2 * t;
                    if (!there[half]) continue;
                    float2 x = skipped ? make_float2(0, 0) : read_pair(weights + line[half], j, s.keys, even, 0.0f);
                    float p[2] = {x.x, x.y}, more[2], kept_p[2];
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        float factor = !args.drop.state ? 1.0f : kept[half][n % 2 * 2 + c] >> (n / 2) & 1 ? args.drop.keep : 0.0f;
                        // Weights that are zero, those of keys that a query does not see among them, count for nothing.
                        more[c] = p[c] == 0.0f ? 0.0f : dp[n][2 * half + c] * factor;
                        kept_p[c] = p[c] * factor;
                        mean[half] += p[c] * more[c];
                    }
                    write_pair(ds + line[half], j, s.keys, even, more[0], more[1]);
                    write_pair(dropped + line[half], j, s.keys, even, kept_p[0], kept_p[1]);
                }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            mean[half] += __shfl_xor_sync(0xffffffffu, mean[half], 1);
            mean[half] += __shfl_xor_sync(0xffffffffu, mean[half], 2);
        }
        float sums[W / 8][4] = {}, far[W / 8][4] = {};
        for (int start = 0; start < s.keys; start += KEYS) {
            if (!spans.all_skip(start)) {
                __syncthreads();
                stage_lines<W, LINE>(lines, keys, s.k_stride, start, s.keys, KEYS);
                // Line x of rs is that of query base + x - (KEYS - 1) and the first of these keys.
                if (s.relative) stage_lines<W, LINE>(rs, args.r + (i64)b * s.r_batch + h * W, d, s.zero + start_position + base - start - (KEYS - 1), s.distances, KEYS + 16 * warps);
                copies_done();
                __syncthreads();
            }
            bool skipped = spans.skips(start);
            float x[NK][4];
#pragma unroll
            for (int n = 0; n < NK; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int j = start + 8 * n + 2 * t;
                    float* to = x[n] + 2 * half;
                    to[0] = to[1] = 0;
                    if (there[half] && !skipped) {
                        float2 p = read_pair(weights + line[half], j, s.keys, even, 0.0f), dp = read_pair(ds + line[half], j, s.keys, even, 0.0f);
                        to[0] = p.x * (dp.x - mean[half]), to[1] = p.y * (dp.y - mean[half]);
                    }
                    if (there[half] && ds_out) write_pair(ds_out + line[half], j, s.keys, even, to[0], to[1]);
                    to[0] *= args.scale, to[1] *= args.scale;
                    if (there[half] && !skipped) write_pair(ds + line[half], j, s.keys, even, to[0], to[1]);
                    if (s.relative) own[(g + 8 * half) * SCORES + 8 * n + 2 * t] = to[0], own[(g + 8 * half) * SCORES + 8 * n + 2 * t + 1] = to[1];
                }
            if (skipped) continue;
#pragma unroll
            for (int n = 0; n < NK; ++n) {
                Left<exact> a = as_left<exact>(x[n]);
#pragma unroll
                for (int c = 0; c < W / 8; ++c) {
                    const float* k = lines + (8 * n + 2 * t) * LINE + 8 * c + g;
                    multiply<exact>(sums[c], a, k[0], k[LINE]);
                }
            }
            if (!s.relative) continue;
            __syncwarp();
            for (int n = 0; n < (KEYS + 16) / 8; ++n) {
                // The key of this lane's first query at the distance of line 8 n + 2 t.
                int j = KEYS - 1 + g - 8 * n - 2 * t;
                auto at = [&](int half, int j) { return j >= 0 && j < KEYS ? own[(g + 8 * half) * SCORES + j] : 0.0f; };
                Left<exact> a = {{Split<exact>(at(0, j)), Split<exact>(at(1, j + 8)), Split<exact>(at(0, j - 1)), Split<exact>(at(1, j + 7))}};
#pragma unroll
                for (int c = 0; c < W / 8; ++c) {
                    const float* r = rs + (16 * warp + 8 * n + 2 * t) * LINE + 8 * c + g;
                    multiply<exact>(far[c], a, r[0], r[LINE]);
                }
            }
            // All lanes have read the warp's ds.
            __syncwarp();
        }
#pragma unroll
        for (int c = 0; c < W / 8; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                sums_u[c][e % 2] += sums[c][e];
                sums_w[c][e % 2] += far[c][e];
                sums[c][e] += far[c][e];
            }
        if (args.dq && first < s.queries) write_lines<W>(args.dq + ((i64)b * s.queries + first) * s.q_stride + h * W, s.q_stride, s.queries - first, sums);
    }
    if (!wants_tables) return;
#pragma unroll
    for (int c = 0; c < W / 8; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float total = e < 2 ? sums_u[c][e] : sums_w[c][e - 2];
            for (int o = 4; o < 32; o <<= 1) total += __shfl_xor_sync(0xffffffffu, total, o);
            if (g == 0) tables[(warp * 2 + e / 2) * W + 8 * c + 2 * t + e % 2] = total;
        }
    __syncthreads();
    float* partial = args.partial + (i64)b * (2 + s.distances) * d + h * W;
    for (int i = threadIdx.x; i < 2 * W; i += blockDim.x) {
        float total = 0;
        for (int w = 0; w < warps; ++w) total += tables[w * 2 * W + i];
        partial[(i64)(i / W) * d + i % W] = total;
    }
}

// dk, dv and dr from what attention_long_grad has left in `spill`: a warp for 16 lines of one of them. Grid (heads,
// batch, parts of the lines).
template <int W, bool exact> __device__ __forceinline__ void attention_long_grad_keys(const AttentionGradArgs& args) {
    const AttentionShape& s = args.shape;
    int h = blockIdx.x, b = blockIdx.y, warps = blockDim.x / 32, d = s.heads * W, g = lane() / 4, t = lane() % 4;
    int start_position = query_position(s, args.start, b, 0);
    i64 cells = (i64)s.queries * s.keys, head = (i64)b * s.heads + h;
    const float *ds = args.spill + head * 2 * cells, *dropped = ds + cells;
    const float *q = args.q + (i64)b * s.queries * s.q_stride + h * W, *dy = args.dy + (i64)b * s.queries * d + h * W;
    int key_tiles = (s.keys + 15) / 16, r_tiles = s.relative && args.partial ? (s.distances + 15) / 16 : 0, eights = (s.queries + 7) / 8;
    for (int task = blockIdx.z * warps + threadIdx.x / 32; task < 2 * key_tiles + r_tiles; task += gridDim.z * warps) {
        bool is_value = task >= key_tiles && task < 2 * key_tiles, is_distance = task >= 2 * key_tiles;
        int tile = 16 * (is_distance ? task - 2 * key_tiles : task % key_tiles);
        if (!is_distance && !(is_value ? args.dv : args.dk)) continue;
        const float *scores = is_value ? dropped : ds, *lines = is_value ? dy : q;
        const float* shift = is_distance ? args.w + h * W + g : !is_value && s.relative ? args.u + h * W + g : nullptr;
        int stride = is_value ? d : s.q_stride;
        // Line g of the tile is key tile + g, or the diagonal of keys at distance tile + g; it moves with the query.
        int column = is_distance ? s.zero + start_position - tile - g : tile + g, down = is_distance ? -8 : 8, along = is_distance;
        auto at = [&](int i, int j) { return i < s.queries && j >= 0 && j < s.keys ? scores[(i64)i * s.keys + j] : 0.0f; };
        float sums[W / 8][4] = {};
        // Earlier queries do not see the key.
#pragma unroll 2
        for (int k = !is_distance && s.causal && !args.ranges ? max(0, tile - start_position) / 8 : 0; k < eights; ++k) {
            int i = 8 * k + 2 * t, j = column + along * i;
            Left<exact> a = {{Split<exact>(at(i, j)), Split<exact>(at(i, j + down)), Split<exact>(at(i + 1, j + along)), Split<exact>(at(i + 1, j + along + down))}};
#pragma unroll
            for (int c = 0; c < W / 8; ++c) {
                const float* y = lines + (i64)i * stride + 8 * c + g;
                float more = shift ? shift[8 * c] : 0.0f;
                multiply<exact>(sums[c], a, i < s.queries ? y[0] + more : 0.0f, i + 1 < s.queries ? y[stride] + more : 0.0f);
            }
        }
        if (is_distance) {
            write_lines<W>(args.partial + ((i64)b * (2 + s.distances) + 2 + tile) * d + h * W, d, s.distances - tile, sums);
        } else {
            int to_stride = is_value ? s.v_stride : s.k_stride;
            write_lines<W>((is_value ? args.dv : args.dk) + ((i64)b * s.keys + tile) * to_stride + h * W, to_stride, s.keys - tile, sums);
        }
    }
}

// Declares a kernel: its name, the function that does the work, the latter's arguments, threads of a block, width of a
// head and whether it computes to f32 accuracy.
#define ATTENTION_LONG(name, kernel, Args, threads, width, exact)      \
    KERNEL __launch_bounds__(threads) name(Args args) {                \
        begin();                                                       \
        kernel<width, exact>(args);                                    \
    }
