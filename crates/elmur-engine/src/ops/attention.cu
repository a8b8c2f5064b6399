// Extents and options shared by both passes. Strides are elements from one token to the next.
struct AttentionShape {
    int batch, heads, queries, keys, width, distances, causal, relative;
    // Row of r for distance zero, and whether keys ahead take their position term from the next query.
    int zero, next_query;
    int q_stride, k_stride, v_stride;
    // Elements from one batch row to the next; 0 where one serves all.
    int r_batch, bias_batch, mask_batch, range_batch, rng_batch;
    // Numbers from one staged row to the next.
    int padded;
    // Logarithm of the number of lanes that share a product of two rows.
    int log_parts;
};

__device__ __forceinline__ int query_position(const AttentionShape& s, const int* start, int b, int i) {
    return (start ? max(0, min(start[b], s.keys - s.queries)) : 0) + i;
}

// The keys from..to that a query sees, but for an arbitrary mask.
struct Seen {
    int from, to;
    __device__ __forceinline__ bool has(int j) const { return j >= from && j < to; }
};
__device__ __forceinline__ Seen query_seen(const AttentionShape& s, const int* ranges, int i, int position) {
    if (!ranges) return {0, s.causal ? min(position + 1, s.keys) : s.keys};
    int to = max(0, min(ranges[2 * i + 1], s.keys));
    return {max(0, min(ranges[2 * i], to)), to};
}

// The query that gives the position term of key j for query i, at most the last one, and the row of r; a row
// outside of r where there is no position term.
struct Place {
    int query, row;
};
__device__ __forceinline__ Place place(const AttentionShape& s, int i, int position, int j) {
    bool lent = s.next_query && j > position;
    int query = lent ? i + 1 : i;
    return {min(query, s.queries - 1), query < s.queries ? s.zero + position - j : -1};
}
__device__ __forceinline__ bool placed(const AttentionShape& s, int row) { return row >= 0 && row < s.distances; }

// Rows [count, width] of one head, in global or in shared memory. All index arithmetic is in 32 bits: these
// kernels are limited by the number of their instructions.
struct Rows {
    const float* data;
    int stride;
};

// Copies head rows [count, width] to shared rows of `padded` numbers, from `at` on; `at` moves behind them.
// Complete after copies_done() and a barrier.
template <bool staged> __device__ __forceinline__ Rows stage(float*& at, const float* from, int stride, int count, const AttentionShape& s) {
    if (!staged) return {from, stride};
    float* to = at;
    at += count * s.padded;
    if ((s.width | stride) % 4 == 0 && ((u64)from & 15) == 0) {
        int pieces = s.width / 4;
        // Rows of 16 to 128 numbers without a division.
        int shift = (pieces & (pieces - 1)) == 0 ? __ffs(pieces) - 1 : -1;
        for (int i = threadIdx.x; i < count * pieces; i += blockDim.x) {
            int row = shift >= 0 ? i >> shift : i / pieces, c = (i - row * pieces) * 4;
            copy_async(to + row * s.padded + c, from + row * stride + c, true);
        }
    } else {
        for (int i = threadIdx.x; i < count * s.width; i += blockDim.x) {
            int row = i / s.width, c = i - row * s.width;
            to[row * s.padded + c] = from[row * stride + c];
        }
    }
    return {to, s.padded};
}

// This lane's part of q . k, or of (q + u) . k where u is not null, plus (p + w) . r where r is not null; four at
// a time where all are in shared memory and aligned.
template <bool staged>
__device__ __forceinline__ float dot(const float* q, const float* k, const float* u, const float* p, const float* w, const float* r, const AttentionShape& s, int part) {
    int step = 1 << s.log_parts;
    float sum = 0;
    if (staged && s.width % 4 == 0) {
#pragma unroll 2
        for (int c = 4 * part; c < s.width; c += 4 * step) {
            float4 x = *(const float4*)(q + c), y = *(const float4*)(k + c);
            if (u) {
                float4 a = *(const float4*)(u + c);
                sum += (x.x + a.x) * y.x + (x.y + a.y) * y.y + (x.z + a.z) * y.z + (x.w + a.w) * y.w;
            } else {
                sum += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
            }
            if (r) {
                float4 o = *(const float4*)(p + c), b = *(const float4*)(w + c), z = *(const float4*)(r + c);
                sum += (o.x + b.x) * z.x + (o.y + b.y) * z.y + (o.z + b.z) * z.z + (o.w + b.w) * z.w;
            }
        }
    } else {
        for (int c = part; c < s.width; c += step) {
            sum += (u ? q[c] + u[c] : q[c]) * k[c];
            if (r) sum += (p[c] + w[c]) * r[c];
        }
    }
    for (int o = step / 2; o; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    return sum;
}

// How a warp adds up rows [count, width]: a lane per column, and where the columns leave lanes over, these
// take turns with the rows.
struct Columns {
    int first, turn, turns, width;
    __device__ __forceinline__ explicit Columns(int width) : first(lane()), turn(0), turns(1), width(width) {
        if (width < 32 && 32 % width == 0) first = lane() % width, turn = lane() / width, turns = 32 / width;
    }
    __device__ __forceinline__ float total(float sum) const {
        if (turns > 1)
            for (int o = 16; o >= width; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
        return sum;
    }
};

// A warp per query, but scores are computed by all threads alike. Shared memory: per warp the scores of its
// query, then staged rows.
struct AttentionArgs {
    float *y, *weights;
    const float *q, *k, *v, *u, *w, *r, *bias;
    const int* start;
    const unsigned char* mask;
    const int* ranges;
    DropArgs drop;
    float scale;
    AttentionShape shape;
};
template <bool staged> __device__ __forceinline__ void attention_forward(const AttentionArgs& args) {
    float *y = args.y, *weights = args.weights, scale = args.scale, keep = args.drop.keep;
    const float *q = args.q, *k = args.k, *v = args.v, *u = args.u, *w = args.w, *r = args.r, *bias = args.bias;
    const int *start = args.start, *ranges = args.ranges;
    const unsigned char* mask = args.mask;
    const i64* state = args.drop.state;
    u32 stream = args.drop.stream, below = args.drop.below;
    const AttentionShape& s = args.shape;
    extern __shared__ float shared[];
    int h = blockIdx.x, b = blockIdx.y, warp = threadIdx.x / 32, warps = blockDim.x / 32, d = s.heads * s.width, room = (s.keys + 3) / 4 * 4;
    Rng rng(state ? state + b * s.rng_batch : nullptr);
    float *at = shared + warps * room, *p = shared + warp * room;
    Rows ks = stage<staged>(at, k + (i64)b * s.keys * s.k_stride + h * s.width, s.k_stride, s.keys, s);
    Rows qs = stage<staged>(at, q + (i64)b * s.queries * s.q_stride + h * s.width, s.q_stride, s.queries, s);
    Rows vs = stage<staged>(at, v + (i64)b * s.keys * s.v_stride + h * s.width, s.v_stride, s.keys, s);
    Rows us = {}, ws = {}, rs = {};
    if (s.relative) {
        us = stage<staged>(at, u + h * s.width, 0, 1, s);
        ws = stage<staged>(at, w + h * s.width, 0, 1, s);
        rs = stage<staged>(at, r + (i64)b * s.r_batch + h * s.width, d, s.distances, s);
    }
    int start_position = query_position(s, start, b, 0);
    if (bias) bias += (i64)b * s.bias_batch + (i64)h * s.queries * s.keys;
    if (mask) mask += (i64)b * s.mask_batch;
    if (ranges) ranges += (i64)b * s.range_batch;
    copies_done();
    __syncthreads();
    for (int base = blockIdx.z * warps; base < s.queries; base += warps * gridDim.z) {
        // Waits until all threads are done with the previous scores.
        if (base >= warps * (int)gridDim.z) __syncthreads();
        int here = min(warps, s.queries - base), part = threadIdx.x & ((1 << s.log_parts) - 1);
        for (int first = 0; first < (here * s.keys) << s.log_parts; first += blockDim.x) {
            int pair = (first + (int)threadIdx.x) >> s.log_parts, line = pair / s.keys, j = pair - line * s.keys, t = base + line, position = start_position + t;
            bool seen = line < here && query_seen(s, ranges, t, position).has(j), hidden = false;
            float more = 0;
            if (seen && bias) more = bias[t * s.keys + j];
            if (seen && mask) hidden = !mask[t * s.keys + j];
            // Lanes without a pair compute that of another lane, and drop the result.
            if (!seen) t = base, j = 0, position = start_position + t;
            Place at = place(s, t, position, j);
            const float* far = s.relative && placed(s, at.row) ? rs.data + at.row * rs.stride : nullptr;
            float score = dot<staged>(qs.data + t * qs.stride, ks.data + j * ks.stride, us.data, qs.data + at.query * qs.stride, ws.data, far, s, part);
            if (seen && part == 0) shared[line * room + j] = hidden ? -INF : score * scale + more;
        }
        __syncthreads();
        int i = base + warp;
        if (i >= s.queries) continue;
        Seen seen = query_seen(s, ranges, i, start_position + i);
        i64 row = (((i64)b * s.heads + h) * s.queries + i) * s.keys;
        float top = -INF, total = 0;
        bool undefined = false;
        for (int j = seen.from + lane(); j < seen.to; j += 32) {
            undefined |= isnan(p[j]);
            top = fmaxf(top, p[j]);
        }
        top = warp_max(top);
        bool blind = top == -INF && !__any_sync(0xffffffffu, undefined);
        for (int j = seen.from + lane(); j < seen.to; j += 32) {
            float e = blind ? 0.0f : expf(p[j] - top);
            p[j] = e;
            total += e;
        }
        float inverse = blind ? 0.0f : 1.0f / warp_sum(total);
        // The first element that the generator counts.
        i64 counted = s.rng_batch ? row - (i64)b * s.heads * s.queries * s.keys : row;
        // What a lane has not computed itself waits for the others.
        __syncwarp();
        for (int j = lane(); j < s.keys; j += 32) {
            float x = seen.has(j) ? p[j] * inverse : 0.0f;
            if (weights) weights[row + j] = x;
            if (state && seen.has(j)) x *= drop_factor(rng, stream, below, keep, counted + j);
            p[j] = x;
        }
        __syncwarp();
        float* to = y + ((i64)b * s.queries + i) * d + h * s.width;
        Columns own(s.width);
        for (int c = own.first; c < s.width; c += 32) {
            float sum = 0;
#pragma unroll 4
            for (int j = seen.from + own.turn; j < seen.to; j += own.turns) sum += p[j] * vs.data[j * vs.stride + c];
            sum = own.total(sum);
            if (own.turn == 0) to[c] = sum;
        }
    }
}

// ds and dropped live in `spill` where it is not null ([batch, heads, 2, queries, keys]), else in shared
// memory. partial: [batch, 2 + distances, d] sums for u, w, r. Shared memory: ds, dropped, column sums,
// diagonals, then staged rows.
struct AttentionGradArgs {
    float *dq, *dk, *dv, *ds_out, *partial, *spill;
    const float *q, *k, *v, *u, *w, *r, *weights, *dy;
    const int *start, *ranges;
    DropArgs drop;
    float scale;
    AttentionShape shape;
};
template <bool staged> __device__ __forceinline__ void attention_backward(const AttentionGradArgs& args) {
    float *dq = args.dq, *dk = args.dk, *dv = args.dv, *ds_out = args.ds_out, *partial = args.partial, *spill = args.spill;
    const float *q = args.q, *k = args.k, *v = args.v, *u = args.u, *w = args.w, *r = args.r, *weights = args.weights, *dy = args.dy;
    const int *start = args.start, *ranges = args.ranges;
    const i64* state = args.drop.state;
    u32 stream = args.drop.stream, below = args.drop.below;
    float keep = args.drop.keep, scale = args.scale;
    const AttentionShape& s = args.shape;
    extern __shared__ float shared[];
    int h = blockIdx.x, b = blockIdx.y, warp = threadIdx.x / 32, warps = blockDim.x / 32, d = s.heads * s.width, cells = s.queries * s.keys;
    Rng rng(state ? state + b * s.rng_batch : nullptr);
    if (ranges) ranges += (i64)b * s.range_batch;
    // The head among those whose elements the generator counts.
    i64 head = (i64)b * s.heads + h, counted = s.rng_batch ? h : head;
    weights += head * cells;
    // The first weights of the warp's first query, loaded early.
    float held = warp < s.queries && lane() < s.keys ? weights[warp * s.keys + lane()] : 0.0f;
    // If the operands are staged, ds and dropped fit into shared memory too; otherwise they may not.
    float *ds = staged || !spill ? shared : spill + head * 2 * cells, *dropped = ds + cells;
    float* rest = staged || !spill ? shared + (2 * cells + 3) / 4 * 4 : shared;
    float *column_sums = rest, *diagonals = rest + s.keys;
    // Aligned for four numbers at a time.
    float* at = rest + (s.keys + s.distances + 3) / 4 * 4;
    i64 token = (i64)b * s.queries;
    Rows vs = stage<staged>(at, v + (i64)b * s.keys * s.v_stride + h * s.width, s.v_stride, s.keys, s);
    Rows gs = stage<staged>(at, dy + token * d + h * s.width, d, s.queries, s);
    Rows ks = stage<staged>(at, k + (i64)b * s.keys * s.k_stride + h * s.width, s.k_stride, s.keys, s);
    Rows qs = stage<staged>(at, q + token * s.q_stride + h * s.width, s.q_stride, s.queries, s);
    Rows us = {}, ws = {}, rs = {};
    if (s.relative) {
        us = stage<staged>(at, u + h * s.width, 0, 1, s);
        ws = stage<staged>(at, w + h * s.width, 0, 1, s);
        rs = stage<staged>(at, r + (i64)b * s.r_batch + h * s.width, d, s.distances, s);
    }
    int start_position = query_position(s, start, b, 0), part = threadIdx.x & ((1 << s.log_parts) - 1);
    copies_done();
    __syncthreads();
    for (int from = 0; from < cells << s.log_parts; from += blockDim.x) {
        int cell = (from + (int)threadIdx.x) >> s.log_parts, i = cell / s.keys, j = cell - i * s.keys;
        bool seen = cell < cells && query_seen(s, ranges, i, start_position + i).has(j);
        float dp = dot<staged>(gs.data + (seen ? i * gs.stride : 0), vs.data + (seen ? j * vs.stride : 0), nullptr, nullptr, nullptr, nullptr, s, part);
        if (cell < cells && part == 0) ds[cell] = seen ? dp : 0.0f;
    }
    __syncthreads();
    for (int i = warp; i < s.queries; i += warps) {
        int position = start_position + i;
        Seen seen = query_seen(s, ranges, i, position);
        float *line = ds + i * s.keys, *kept = dropped + i * s.keys;
        if (i != warp) held = lane() < s.keys ? weights[i * s.keys + lane()] : 0.0f;
        auto weight = [&](int j) { return !seen.has(j) ? 0.0f : j == lane() ? held : weights[i * s.keys + j]; };
        float mean = 0;
        for (int j = lane(); j < s.keys; j += 32) {
            float factor = !seen.has(j) ? 0.0f : state ? drop_factor(rng, stream, below, keep, counted * cells + i * s.keys + j) : 1.0f;
            float p = weight(j), dp = factor * line[j];
            line[j] = dp;
            kept[j] = factor * p;
            mean += p * dp;
        }
        mean = warp_sum(mean);
        for (int j = lane(); j < s.keys; j += 32) {
            float x = weight(j) * (line[j] - mean);
            if (ds_out) ds_out[head * cells + i * s.keys + j] = x;
            line[j] = x * scale;
        }
    }
    __syncthreads();
    // Query i takes row r_row(i) - j of r for key j: of the keys that it sees those from..to, and of the query
    // before, where that borrows, those ahead of it.
    auto r_row = [&](int i) { return s.zero + start_position + i; };
    auto own_keys = [&](int i) -> Seen {
        Seen seen = query_seen(s, ranges, i, start_position + i);
        int to = min(seen.to, s.next_query ? min(start_position + i, r_row(i)) + 1 : r_row(i) + 1);
        return {max(seen.from, r_row(i) - s.distances + 1), to};
    };
    auto lent_keys = [&](int i) -> Seen {
        if (!s.next_query || i == 0) return {0, 0};
        Seen seen = query_seen(s, ranges, i - 1, start_position + i - 1);
        return {max(max(seen.from, start_position + i), r_row(i - 1) - s.distances + 1), min(seen.to, r_row(i - 1) + 1)};
    };
    for (int i = warp; i < s.queries && dq; i += warps) {
        Seen seen = query_seen(s, ranges, i, start_position + i), near = {0, 0}, lent = {0, 0};
        if (s.relative) near = own_keys(i), lent = lent_keys(i);
        const float* line = ds + i * s.keys;
        float* to = dq + (token + i) * s.q_stride + h * s.width;
        Columns own(s.width);
        for (int c = own.first; c < s.width; c += 32) {
            const float *key = ks.data + c, *far = rs.data + r_row(i) * rs.stride + c;
            float sum = 0;
            if (s.relative && near.from == seen.from && near.to == seen.to) {
#pragma unroll 4
                for (int j = seen.from + own.turn; j < seen.to; j += own.turns) sum += line[j] * (key[j * ks.stride] + far[-j * rs.stride]);
            } else {
#pragma unroll 4
                for (int j = seen.from + own.turn; j < seen.to; j += own.turns) sum += line[j] * key[j * ks.stride];
                for (int j = near.from + own.turn; j < near.to; j += own.turns) sum += line[j] * far[-j * rs.stride];
            }
            for (int j = lent.from + own.turn; j < lent.to; j += own.turns) sum += line[j - s.keys] * far[(-1 - j) * rs.stride];
            sum = own.total(sum);
            if (own.turn == 0) to[c] = sum;
        }
    }
    // Sums of ds over the queries, and over the diagonals of keys whose position term is a row of r.
    if (s.relative)
        for (int at = threadIdx.x; at < s.keys + s.distances; at += blockDim.x) {
            bool column = at < s.keys;
            float sum = 0;
            // The last query lends nobody its position term.
            int queries = !column && s.next_query && at - s.keys < s.zero ? s.queries - 1 : s.queries;
            for (int i = 0; i < queries; ++i) {
                int j = column ? at : r_row(i) - (at - s.keys);
                if (j >= 0 && j < s.keys) sum += ds[i * s.keys + j];
            }
            (column ? column_sums[at] : diagonals[at - s.keys]) = sum;
        }
    for (int at = threadIdx.x; at < s.keys * s.width; at += blockDim.x) {
        int j = at / s.width, c = at - j * s.width;
        i64 key = (i64)b * s.keys + j;
        const float *query = qs.data + c, *grad = gs.data + c;
        float sum = 0, value = 0, shift = s.relative ? us.data[c] : 0.0f;
        // Earlier queries do not see the key.
#pragma unroll 4
        for (int i = s.causal ? max(0, j - start_position) : 0; i < s.queries; ++i) {
            sum += ds[i * s.keys + j] * (query[i * qs.stride] + shift);
            value += dropped[i * s.keys + j] * grad[i * gs.stride];
        }
        if (dk) dk[key * s.k_stride + h * s.width + c] = sum;
        if (dv) dv[key * s.v_stride + h * s.width + c] = value;
    }
    if (!s.relative || !partial) return;
    __syncthreads();
    // A warp per line of u, w and r.
    float* out = partial + (i64)b * (2 + s.distances) * d + h * s.width;
    for (int line = warp; line < 2 + s.distances; line += warps) {
        int row = line - 2, later = s.next_query && row < s.zero;
        int from = max(0, row - r_row(0)), to = min(s.queries - later, s.keys - r_row(0) + row);
        for (int c = lane(); c < s.width; c += 32) {
            float sum = 0;
            if (line == 0) {
                for (int j = 0; j < s.keys; ++j) sum += column_sums[j] * ks.data[j * ks.stride + c];
            } else if (line == 1) {
                for (int i = 0; i < s.distances; ++i) sum += diagonals[i] == 0.0f ? 0.0f : diagonals[i] * rs.data[i * rs.stride + c];
            } else {
                float shift = ws.data[c];
                const float* query = qs.data + later * qs.stride + c;
#pragma unroll 4
                for (int i = from; i < to; ++i) sum += ds[i * s.keys + r_row(i) - row] * (query[i * qs.stride] + shift);
            }
            out[line * d + c] = sum;
        }
    }
}

// Grid (heads, batch, query tiles).
#define ATTENTION(name, staged)            \
    KERNEL name(AttentionArgs args) {      \
        begin();                           \
        attention_forward<staged>(args);   \
    }
// Grid (heads, batch).
#define ATTENTION_GRAD(name, staged)       \
    KERNEL name(AttentionGradArgs args) {  \
        begin();                           \
        attention_backward<staged>(args);  \
    }
