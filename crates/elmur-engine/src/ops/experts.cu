// One block: a stable counting sort. Dynamic shared memory: threads x count integers. Outputs may be null.
KERNEL group_by_expert(int* order, int* position, int* offsets, const int* experts, int count, i64 n) {
    begin();
    extern __shared__ u32 ranks[];
    int threads = blockDim.x, t = threadIdx.x;
    i64 each = (n + threads - 1) / threads, start = t * each, end = min(n, start + each);
    for (int e = 0; e < count; ++e) ranks[t * count + e] = 0;
    for (i64 i = start; i < end; ++i) {
        int e = experts[i];
        if (e >= 0 && e < count) ++ranks[t * count + e];
    }
    __syncthreads();
    // First rows of every (expert, thread), experts first: each warp sums one expert's column at a time.
    __shared__ u32 totals[1024];
    int warp = t / 32, warps = threads / 32;
    for (int e = warp; e < count; e += warps) {
        u32 running = 0;
        for (int s = 0; s < threads; s += 32) {
            u32 own = ranks[(s + lane()) * count + e], sum = own;
            for (int o = 1; o < 32; o <<= 1) {
                u32 below = __shfl_up_sync(0xffffffffu, sum, o);
                if (lane() >= o) sum += below;
            }
            ranks[(s + lane()) * count + e] = running + sum - own;
            running += __shfl_sync(0xffffffffu, sum, 31);
        }
        if (lane() == 0) totals[e] = running;
    }
    __syncthreads();
    if (t == 0) {
        u32 first = 0;
        for (int e = 0; e < count; ++e) {
            u32 total = totals[e];
            totals[e] = first;
            if (offsets) offsets[e] = first;
            first += total;
        }
        if (offsets) offsets[count] = first;
    }
    __syncthreads();
    for (i64 i = start; i < end; ++i) {
        int e = experts[i];
        if (e < 0 || e >= count) continue;
        u32 row = totals[e] + ranks[t * count + e]++;
        if (order) order[row] = (int)i;
        if (position) position[i] = (int)row;
    }
}

KERNEL gather_by_expert(float* y, const float* x, const int* order, int k, i64 d, i64 n) {
    begin();
    i64 i = thread_number();
    if (i < n) y[i] = x[order[i / d] / k * d + i % d];
}

KERNEL gather_by_expert_grad(float* dx, const float* dy, const int* position, int k, i64 d, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    i64 token = i / d;
    float total = 0;
    for (int s = 0; s < k; ++s) total += dy[position[token * k + s] * d + i % d];
    dx[i] = total;
}

// y[r] = x[r] W[e]^T (W [E, n, k], transpose) or x[r] W[e] (W [E, k, n]) for the expert e whose rows r are in
// offsets[e]..offsets[e + 1]. Blocks of 256 threads compute 32 rows by 32 columns, 128 of the depth at a
// time; a tile may span several experts. Dynamic shared memory: 2 x min(k, 128) x 33.
struct GroupedLinearArgs {
    float* y;
    const float *x, *weight;
    const int* offsets;
    i64 rows, k, n;
    int experts, transpose;
};
KERNEL grouped_linear(GroupedLinearArgs args) {
    begin();
    float* y = args.y;
    const float *x = args.x, *weight = args.weight;
    const int* offsets = args.offsets;
    i64 rows = args.rows, k = args.k, n = args.n;
    int experts = args.experts, transpose = args.transpose;
    extern __shared__ float shared[];
    int t = threadIdx.x, tx = t % 16, ty = t / 16, panel = (int)min(k, (i64)128);
    float *xs = shared, *ws = shared + panel * 33;
    i64 row = (i64)blockIdx.y * 32, column = (i64)blockIdx.x * 32;
    i64 last = min(rows, row + 32);
    for (int e = 0; e < experts; ++e) {
        i64 from = max(row, (i64)offsets[e]), to = min(last, (i64)offsets[e + 1]);
        if (from >= to) continue;
        const float* w = weight + e * n * k;
        float sums[2][2] = {};
        for (i64 depth = 0; depth < k; depth += panel) {
            int here = (int)min((i64)panel, k - depth);
            __syncthreads();
            for (int i = t; i < here * 32; i += 256) {
                int r = i / here, c = i % here;
                xs[c * 33 + r] = row + r < rows ? x[(row + r) * k + depth + c] : 0.0f;
            }
            for (int i = t; i < here * 32; i += 256) {
                // Neighbouring threads read neighbouring memory in either layout.
                int c = transpose ? i % here : i / 32, o = transpose ? i / here : i % 32;
                ws[c * 33 + o] = column + o >= n ? 0.0f : transpose ? w[(column + o) * k + depth + c] : w[(depth + c) * n + column + o];
            }
            __syncthreads();
#pragma unroll 8
            for (int c = 0; c < here; ++c) {
                float a = xs[c * 33 + ty], b = xs[c * 33 + ty + 16], p = ws[c * 33 + tx], q = ws[c * 33 + tx + 16];
                sums[0][0] += a * p;
                sums[0][1] += a * q;
                sums[1][0] += b * p;
                sums[1][1] += b * q;
            }
        }
        for (int i = 0; i < 2; ++i)
            for (int j = 0; j < 2; ++j) {
                i64 r = row + ty + 16 * i, c = column + tx + 16 * j;
                if (r >= from && r < to && c < n) y[r * n + c] = sums[i][j];
            }
    }
}

// partial[part, e, m, n] = a^T b over the rows of expert e that lie in the part. Blocks of 256 threads
// compute 32 by 32. Grid: (tiles of n, tiles of m, experts x parts).
struct GroupedWeightGradArgs {
    float* partial;
    const float *a, *b;
    const int* offsets;
    i64 rows, m, n, rows_per_part;
    int experts;
};
KERNEL grouped_weight_grad(GroupedWeightGradArgs args) {
    begin();
    float* partial = args.partial;
    const float *a = args.a, *b = args.b;
    const int* offsets = args.offsets;
    i64 rows = args.rows, m = args.m, n = args.n, rows_per_part = args.rows_per_part;
    int experts = args.experts;
    __shared__ float as[16][33], bs[16][33];
    int t = threadIdx.x, tx = t % 16, ty = t / 16, e = blockIdx.z % experts, part = blockIdx.z / experts;
    i64 from = max((i64)offsets[e], part * rows_per_part), to = min((i64)offsets[e + 1], min(rows, (part + 1) * rows_per_part));
    i64 row = (i64)blockIdx.y * 32, column = (i64)blockIdx.x * 32;
    float sums[2][2] = {};
    for (i64 depth = from; depth < to; depth += 16) {
        for (int i = t; i < 16 * 32; i += 256) {
            int r = i / 32, c = i % 32;
            as[r][c] = depth + r < to && row + c < m ? a[(depth + r) * m + row + c] : 0.0f;
            bs[r][c] = depth + r < to && column + c < n ? b[(depth + r) * n + column + c] : 0.0f;
        }
        __syncthreads();
        for (int r = 0; r < 16; ++r)
            for (int i = 0; i < 2; ++i)
                for (int j = 0; j < 2; ++j) sums[i][j] += as[r][ty + 16 * i] * bs[r][tx + 16 * j];
        __syncthreads();
    }
    float* out = partial + (i64)blockIdx.z * m * n;
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) {
            i64 r = row + ty + 16 * i, c = column + tx + 16 * j;
            if (r < m && c < n) out[r * n + c] = sums[i][j];
        }
}

// out[token] = the sum of its k rows of y, each weighed by its gate.
struct CombineArgs {
    float* out;
    const float *y, *gates;
    const int* position;
    i64 d, n;
    int k;
};
KERNEL combine_experts(CombineArgs args) {
    begin();
    i64 i = thread_number(), d = args.d;
    if (i >= args.n) return;
    i64 token = i / d;
    int k = args.k;
    float total = 0;
    for (int s = 0; s < k; ++s) total += args.gates[token * k + s] * args.y[args.position[token * k + s] * d + i % d];
    args.out[i] = total;
}

// One warp per assignment s of token n, which sits in sorted row position[s]: dy[row] = gate dout[n], dgate =
// dout[n] . y[row].
struct CombineGradArgs {
    float *dy, *dgates;
    const float *dout, *y, *gates;
    const int* position;
    i64 d, assignments;
    int k;
};
KERNEL combine_experts_grad(CombineGradArgs args) {
    begin();
    float *dy = args.dy, *dgates = args.dgates;
    const float *dout = args.dout, *y = args.y;
    i64 s = warp_number(), d = args.d;
    if (s >= args.assignments) return;
    i64 row = args.position[s], token = s / args.k;
    float along = 0, gate = args.gates[s];
    for (i64 i = lane(); i < d; i += 32) {
        float g = dout[token * d + i];
        if (dy) dy[row * d + i] = gate * g;
        along += g * y[row * d + i];
    }
    along = warp_sum(along);
    if (dgates && lane() == 0) dgates[s] = along;
}

// Which gate weighs row `row` of the rows [token, expert]; -1 if its expert was not chosen.
__device__ __forceinline__ i64 gate_of(i64 row, const int* experts, int k, int count) {
    i64 token = row / count;
    for (int s = 0; s < k; ++s)
        if (experts[token * k + s] == row % count) return token * k + s;
    return -1;
}

// y = gate silu(g) u for h = [g, u], rows [token, expert].
struct GatedSwigluArgs {
    float* y;
    const float *h, *gates;
    const int* experts;
    i64 f, n;
    int k, count;
};
KERNEL gated_swiglu(GatedSwigluArgs args) {
    begin();
    i64 i = thread_number(), f = args.f;
    if (i >= args.n) return;
    i64 row = i / f, slot = gate_of(row, args.experts, args.k, args.count);
    const float* from = args.h + row * 2 * f + i % f;
    args.y[i] = slot < 0 ? 0.0f : from[0] * sigmoid(from[0]) * from[f] * args.gates[slot];
}

// One warp per row; dgates may be null, dh may be h.
struct GatedSwigluGradArgs {
    float *dh, *dgates;
    const float *h, *gates, *dy;
    const int* experts;
    i64 f, rows;
    int k, count;
};
KERNEL gated_swiglu_grad(GatedSwigluGradArgs args) {
    begin();
    float *dh = args.dh, *dgates = args.dgates;
    const float *h = args.h, *dy = args.dy;
    i64 row = warp_number(), f = args.f;
    if (row >= args.rows) return;
    i64 slot = gate_of(row, args.experts, args.k, args.count), at = row * 2 * f;
    float gate = slot < 0 ? 0.0f : args.gates[slot], along = 0;
    for (i64 i = lane(); i < f; i += 32) {
        float g = h[at + i], u = h[at + f + i], d = dy[row * f + i], s = sigmoid(g), silu = g * s;
        along += d * silu * u;
        d *= gate;
        // 0 where the expert was not chosen, whatever h is.
        dh[at + i] = slot < 0 ? 0.0f : d * u * (s + silu * (1.0f - s));
        dh[at + f + i] = slot < 0 ? 0.0f : d * silu;
    }
    along = warp_sum(along);
    if (dgates && slot >= 0 && lane() == 0) dgates[slot] = along;
}
