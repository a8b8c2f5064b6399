// Extents and options shared by both passes. Strides are elements from one token to the next.
struct AttentionShape {
    int batch, heads, queries, keys, width, distances, causal, relative;
    int q_stride, k_stride, v_stride;
    // Elements from one batch row to the next; 0 where one serves all.
    int r_batch, bias_batch, mask_batch;
    // Queries, keys, values, r, u and w (backward: dy too) are copied to shared memory.
    int staged;
    // Numbers from one staged row to the next.
    int padded;
};

__device__ __forceinline__ int query_position(const AttentionShape& s, const int* start, int b, int i) {
    return (start ? max(0, min(start[b], s.keys - s.queries)) : 0) + i;
}

__device__ __forceinline__ int query_reach(const AttentionShape& s, int position) { return s.causal ? min(position + 1, s.keys) : s.keys; }

// Copies head rows [count, width] with the given stride to shared rows of `padded` numbers; done after copies_done() and a barrier.
__device__ __forceinline__ void stage(float* to, const float* from, int stride, int count, int width, int padded) {
    if ((width | stride) % 4 == 0 && ((u64)from & 15) == 0) {
        int pieces = width / 4;
        for (int i = threadIdx.x; i < count * pieces; i += blockDim.x) {
            int row = i / pieces, c = i % pieces * 4;
            copy_async(to + row * padded + c, from + (i64)row * stride + c, true);
        }
        return;
    }
    for (int i = threadIdx.x; i < count * width; i += blockDim.x) to[i / width * padded + i % width] = from[(i64)(i / width) * stride + i % width];
}

// x . y, four at a time where both are in shared memory and aligned.
__device__ __forceinline__ float dot(const float* x, const float* y, int width, bool by_four) {
    float sum = 0;
    if (by_four) {
#pragma unroll 4
        for (int c = 0; c < width; c += 4) {
            float4 a = *(const float4*)(x + c), b = *(const float4*)(y + c);
            sum += a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
        }
    } else {
        for (int c = 0; c < width; ++c) sum += x[c] * y[c];
    }
    return sum;
}

// Grid (heads, batch, query tiles); a warp per query. Dynamic shared memory: staged rows, then per warp 2 width + keys.
KERNEL attention(float* y, float* weights, const float* q, const float* k, const float* v, const float* u, const float* w, const float* r, const float* bias,
                 const int* start, const unsigned char* mask, const i64* rng, u32 stream, u32 below, float keep, float scale, AttentionShape s) {
    begin();
    extern __shared__ float shared[];
    int h = blockIdx.x, b = blockIdx.y, warp = threadIdx.x / 32, warps = blockDim.x / 32, d = s.heads * s.width;
    q += (i64)b * s.queries * s.q_stride + h * s.width;
    k += (i64)b * s.keys * s.k_stride + h * s.width;
    v += (i64)b * s.keys * s.v_stride + h * s.width;
    if (s.relative) {
        u += h * s.width;
        w += h * s.width;
        r += (i64)b * s.r_batch + h * s.width;
    }
    int q_stride = s.q_stride, k_stride = s.k_stride, v_stride = s.v_stride, r_stride = d;
    float* own = shared;
    if (s.staged) {
        float *ks = shared, *vs = ks + s.keys * s.padded, *qs = vs + s.keys * s.padded, *rs = qs + s.queries * s.padded;
        stage(ks, k, k_stride, s.keys, s.width, s.padded);
        stage(vs, v, v_stride, s.keys, s.width, s.padded);
        stage(qs, q, q_stride, s.queries, s.width, s.padded);
        k = ks, v = vs, q = qs;
        own = rs;
        if (s.relative) {
            float *us = rs + s.distances * s.padded, *ws = us + s.padded;
            stage(rs, r, r_stride, s.distances, s.width, s.padded);
            stage(us, u, 0, 1, s.width, s.padded);
            stage(ws, w, 0, 1, s.width, s.padded);
            r = rs, u = us, w = ws;
            own = ws + s.padded;
        }
        q_stride = k_stride = v_stride = r_stride = s.padded;
        copies_done();
        __syncthreads();
    }
    int room = 2 * s.width + (s.keys + 3) / 4 * 4;
    float *content = own + warp * room, *distance = content + s.width, *p = distance + s.width;
    bool by_four = s.staged && s.width % 4 == 0;
    for (int i = blockIdx.z * warps + warp; i < s.queries; i += warps * gridDim.z) {
        int position = query_position(s, start, b, i), reach = query_reach(s, position);
        for (int c = lane(); c < s.width; c += 32) {
            float x = q[(i64)i * q_stride + c];
            content[c] = s.relative ? x + u[c] : x;
            distance[c] = s.relative ? x + w[c] : 0.0f;
        }
        __syncwarp();
        i64 row = (((i64)b * s.heads + h) * s.queries + i) * s.keys;
        float top = -INF;
        bool undefined = false;
        for (int j = lane(); j < reach; j += 32) {
            float score = dot(content, k + (i64)j * k_stride, s.width, by_four);
            if (s.relative) score += dot(distance, r + (i64)(position - j) * r_stride, s.width, by_four);
            score *= scale;
            if (bias) score += bias[(i64)b * s.bias_batch + ((i64)h * s.queries + i) * s.keys + j];
            if (mask && !mask[(i64)b * s.mask_batch + (i64)i * s.keys + j]) score = -INF;
            p[j] = score;
            undefined |= isnan(score);
            top = fmaxf(top, score);
        }
        top = warp_max(top);
        bool blind = top == -INF && !__any_sync(0xffffffffu, undefined);
        float total = 0;
        for (int j = lane(); j < reach; j += 32) {
            float e = blind ? 0.0f : expf(p[j] - top);
            p[j] = e;
            total += e;
        }
        float inverse = blind ? 0.0f : 1.0f / warp_sum(total);
        for (int j = lane(); j < s.keys; j += 32) {
            float x = j < reach ? p[j] * inverse : 0.0f;
            if (weights) weights[row + j] = x;
            if (rng && j < reach) x *= drop_factor(rng, stream, below, keep, row + j);
            p[j] = x;
        }
        __syncwarp();
        for (int c = lane(); c < s.width; c += 32) {
            float sum = 0;
#pragma unroll 4
            for (int j = 0; j < reach; ++j) sum += p[j] * v[(i64)j * v_stride + c];
            y[((i64)b * s.queries + i) * d + h * s.width + c] = sum;
        }
        __syncwarp();
    }
}

// Grid (heads, batch). ds and dropped live in `spill` where it is not null ([batch, heads, 2, queries, keys]), else in shared memory.
// partial: [batch, 2 + distances, d] sums for u, w, r. Dynamic shared memory: ds, dropped, column sums, diagonals, then staged rows.
KERNEL attention_grad(float* dq, float* dk, float* dv, float* ds_out, float* partial, float* spill, const float* q, const float* k, const float* v, const float* u,
                      const float* w, const float* r, const int* start, const i64* rng, u32 stream, u32 below, float keep, float scale, const float* weights,
                      const float* dy, AttentionShape s) {
    begin();
    extern __shared__ float shared[];
    int h = blockIdx.x, b = blockIdx.y, warp = threadIdx.x / 32, warps = blockDim.x / 32, d = s.heads * s.width, cells = s.queries * s.keys;
    i64 head = (i64)b * s.heads + h;
    float *ds = spill ? spill + head * 2 * cells : shared, *dropped = ds + cells;
    float* rest = spill ? shared : shared + (2 * cells + 3) / 4 * 4;
    float *column_sums = rest, *diagonals = rest + s.keys;
    // Aligned for four numbers at a time.
    rest += (s.keys + s.distances + 3) / 4 * 4;
    q += (i64)b * s.queries * s.q_stride + h * s.width;
    k += (i64)b * s.keys * s.k_stride + h * s.width;
    v += (i64)b * s.keys * s.v_stride + h * s.width;
    const float* g = dy + (i64)b * s.queries * d + h * s.width;
    if (s.relative) {
        u += h * s.width;
        w += h * s.width;
        r += (i64)b * s.r_batch + h * s.width;
    }
    int q_stride = s.q_stride, k_stride = s.k_stride, v_stride = s.v_stride, g_stride = d, r_stride = d;
    if (s.staged) {
        float *ks = rest, *vs = ks + s.keys * s.padded, *qs = vs + s.keys * s.padded, *gs = qs + s.queries * s.padded;
        stage(ks, k, k_stride, s.keys, s.width, s.padded);
        stage(vs, v, v_stride, s.keys, s.width, s.padded);
        stage(qs, q, q_stride, s.queries, s.width, s.padded);
        stage(gs, g, g_stride, s.queries, s.width, s.padded);
        k = ks, v = vs, q = qs, g = gs;
        if (s.relative) {
            float *rs = gs + s.queries * s.padded, *us = rs + s.distances * s.padded, *ws = us + s.padded;
            stage(rs, r, r_stride, s.distances, s.width, s.padded);
            stage(us, u, 0, 1, s.width, s.padded);
            stage(ws, w, 0, 1, s.width, s.padded);
            r = rs, u = us, w = ws;
        }
        q_stride = k_stride = v_stride = g_stride = r_stride = s.padded;
        copies_done();
        __syncthreads();
    }
    bool by_four = s.staged && s.width % 4 == 0;
    for (int i = warp; i < s.queries; i += warps) {
        int position = query_position(s, start, b, i), reach = query_reach(s, position);
        i64 row = (head * s.queries + i) * s.keys;
        float mean = 0;
        for (int j = lane(); j < s.keys; j += 32) {
            float dp = 0, factor = 0;
            if (j < reach) {
                dp = dot(g + (i64)i * g_stride, v + (i64)j * v_stride, s.width, by_four);
                factor = rng ? drop_factor(rng, stream, below, keep, row + j) : 1.0f;
            }
            float p = j < reach ? weights[row + j] : 0.0f;
            dp *= factor;
            ds[i * s.keys + j] = dp;
            dropped[i * s.keys + j] = factor * p;
            mean += p * dp;
        }
        mean = warp_sum(mean);
        for (int j = lane(); j < s.keys; j += 32) {
            float x = j < reach ? weights[row + j] * (ds[i * s.keys + j] - mean) : 0.0f;
            if (ds_out) ds_out[row + j] = x;
            ds[i * s.keys + j] = x * scale;
        }
        __syncwarp();
        for (int c = lane(); c < s.width && dq; c += 32) {
            float sum = 0;
#pragma unroll 4
            for (int j = 0; j < reach; ++j) sum += ds[i * s.keys + j] * k[(i64)j * k_stride + c];
            if (s.relative) {
#pragma unroll 4
                for (int j = 0; j < reach; ++j) sum += ds[i * s.keys + j] * r[(i64)(position - j) * r_stride + c];
            }
            dq[((i64)b * s.queries + i) * s.q_stride + h * s.width + c] = sum;
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < s.keys * s.width; at += blockDim.x) {
        int j = at / s.width, c = at % s.width;
        float sum = 0, value = 0, shift = s.relative ? u[c] : 0.0f;
#pragma unroll 4
        for (int i = 0; i < s.queries; ++i) {
            sum += ds[i * s.keys + j] * (q[(i64)i * q_stride + c] + shift);
            value += dropped[i * s.keys + j] * g[(i64)i * g_stride + c];
        }
        if (dk) dk[((i64)b * s.keys + j) * s.k_stride + h * s.width + c] = sum;
        if (dv) dv[((i64)b * s.keys + j) * s.v_stride + h * s.width + c] = value;
    }
    if (!s.relative || !partial) return;
    int first = query_position(s, start, b, 0);
    for (int j = threadIdx.x; j < s.keys; j += blockDim.x) {
        float sum = 0;
        for (int i = 0; i < s.queries; ++i) sum += ds[i * s.keys + j];
        column_sums[j] = sum;
    }
    // Query i sees distance delta at key first + i - delta.
    for (int delta = threadIdx.x; delta < s.distances; delta += blockDim.x) {
        float sum = 0;
        for (int i = 0; i < s.queries; ++i) {
            int j = first + i - delta;
            if (j >= 0 && j < s.keys) sum += ds[i * s.keys + j];
        }
        diagonals[delta] = sum;
    }
    __syncthreads();
    float* out = partial + (i64)b * (2 + s.distances) * d + h * s.width;
    for (int at = threadIdx.x; at < (2 + s.distances) * s.width; at += blockDim.x) {
        int line = at / s.width, c = at % s.width;
        float sum = 0;
        if (line == 0) {
            for (int j = 0; j < s.keys; ++j) sum += column_sums[j] * k[(i64)j * k_stride + c];
        } else if (line == 1) {
            for (int delta = 0; delta < s.distances; ++delta)
                sum += diagonals[delta] == 0.0f ? 0.0f : diagonals[delta] * r[(i64)delta * r_stride + c];
        } else {
            int delta = line - 2;
            float shift = w[c];
            for (int i = 0; i < s.queries; ++i) {
                int j = first + i - delta;
                if (j >= 0 && j < s.keys) sum += ds[i * s.keys + j] * (q[(i64)i * q_stride + c] + shift);
            }
        }
        out[(i64)line * d + c] = sum;
    }
}

// Sums of attention_grad's partial [batch, 2 + distances, d] over the batch, into du [d], dw [d], dr [distances, d]; 32 columns by 8 rows.
KERNEL attention_tables(float* du, float* dw, float* dr, const float* partial, i64 batch, i64 d, i64 columns) {
    begin();
    __shared__ float sums[8][33];
    int tx = threadIdx.x & 31, ty = threadIdx.x >> 5;
    i64 c = (i64)blockIdx.x * 32 + tx;
    float total = 0;
    if (c < columns)
        for (i64 b = ty; b < batch; b += 8) total += partial[b * columns + c];
    sums[ty][tx] = total;
    __syncthreads();
    if (ty != 0 || c >= columns) return;
    float all = 0;
    for (int i = 0; i < 8; ++i) all += sums[i][tx];
    float* out = c < d ? du : c < 2 * d ? dw : dr;
    if (out) out[c < d ? c : c < 2 * d ? c - d : c - 2 * d] = all;
}
