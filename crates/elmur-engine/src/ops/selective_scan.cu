// A selective scan over a window; the formulas are in selective_scan.rs. A block is one warp: it walks through
// all steps of one row with 32 channels, one to a thread. States, and what a chunk of steps reads, lie in shared
// memory; an element of a thread's own is at [.., lane].

// Fields as in selective_scan.rs, [batch, steps, channels] where nothing else is said.
struct ScanForward {
    float* y;
    float* last;           // [batch, states, channels], possibly where `first` is
    float* kept;           // [batch, chunks, states, channels]; null if nobody reads it
    const float* u;
    const float* delta;
    const float* a;        // [states, channels]
    const float* bc;       // [batch, steps, 2 states]
    const float* d;        // [channels]
    const float* z;
    const float* first;    // [batch, states, channels]
    i64 steps, channels, states, chunk;
};

struct ScanBackward {
    float* du;
    float* ddelta;         // possibly where delta is
    float* dz;             // possibly where z is
    float* dfirst;         // [batch, states, channels]
    float* da_rows;        // [batch, states, channels]
    float* dd_rows;        // [batch, channels]
    float* dbc_tiles;      // [tiles of 32 channels, batch, steps, 2 states]
    const float* u;
    const float* delta;
    const float* a;        // [states, channels]
    const float* bc;       // [batch, steps, 2 states]
    const float* d;        // [channels]
    const float* z;
    const float* kept;     // [batch, chunks, states, channels]
    const float* dy;
    const float* dlast;    // [batch, states, channels]; null where there is no such gradient
    i64 steps, channels, states, chunk;
};

__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// Copies `count` steps of this thread's channel, `at` being the first, to shared memory [count, 32].
__device__ __forceinline__ void stage(float* to, const float* from, i64 at, i64 channels, int count, bool inside) {
#pragma unroll 4
    for (int t = 0; t < count; ++t) to[32 * t + lane()] = inside ? from[at + t * channels] : 0.0f;
}

// Shared memory: h and a [states, 32], u, delta and z [chunk, 32], bc [chunk, 2 states].
KERNEL selective_scan_forward(ScanForward s) {
    begin();
    extern __shared__ float shared[];
    int states = (int)s.states, chunk = (int)s.chunk;
    float *h = shared, *a = h + 32 * states, *u = a + 32 * states, *delta = u + 32 * chunk, *z = delta + 32 * chunk;
    float* bc = z + 32 * chunk;
    i64 row = blockIdx.x, channel = (i64)blockIdx.y * 32 + lane(), chunks = (s.steps + chunk - 1) / chunk;
    bool inside = channel < s.channels;
    for (int n = 0; n < states; ++n) {
        h[32 * n + lane()] = inside ? s.first[(row * states + n) * s.channels + channel] : 0.0f;
        a[32 * n + lane()] = inside ? s.a[n * s.channels + channel] : 0.0f;
    }
    float d = inside ? s.d[channel] : 0.0f;
    for (i64 number = 0; number < chunks; ++number) {
        i64 start = number * chunk, at = (row * s.steps + start) * s.channels + channel;
        int count = (int)min((i64)chunk, s.steps - start);
        if (s.kept && inside) {
            i64 to = (row * chunks + number) * states * s.channels + channel;
            for (int n = 0; n < states; ++n) s.kept[to + n * s.channels] = h[32 * n + lane()];
        }
        // The chunk before has been read.
        __syncthreads();
        stage(u, s.u, at, s.channels, count, inside);
        stage(delta, s.delta, at, s.channels, count, inside);
        stage(z, s.z, at, s.channels, count, inside);
        for (int i = lane(); i < 2 * states * count; i += 32) bc[i] = s.bc[(row * s.steps + start) * 2 * states + i];
        __syncthreads();
        for (int t = 0; t < count; ++t) {
            float x = u[32 * t + lane()], size = softplus(delta[32 * t + lane()]), inflow = size * x, read = d * x;
            const float *b = bc + 2 * states * t, *c = b + states;
#pragma unroll 4
            for (int n = 0; n < states; ++n) {
                float next = fmaf(expf(size * a[32 * n + lane()]), h[32 * n + lane()], inflow * b[n]);
                h[32 * n + lane()] = next;
                read = fmaf(c[n], next, read);
            }
            float gate = z[32 * t + lane()];
            if (inside) s.y[at + t * s.channels] = read * gate * sigmoid(gate);
        }
    }
    if (!inside) return;
    for (int n = 0; n < states; ++n) s.last[(row * states + n) * s.channels + channel] = h[32 * n + lane()];
}

// Shared memory: a, gh and da [states, 32], h [chunk + 1, states, 32], u, delta, z and dy [chunk, 32], bc
// [chunk, 2 states], terms of dB and dC [2 states, 33].
KERNEL selective_scan_backward(ScanBackward s) {
    begin();
    extern __shared__ float shared[];
    int states = (int)s.states, chunk = (int)s.chunk, width = 32 * states;
    float *a = shared, *gh = a + width, *da = gh + width, *h = da + width;
    float *u = h + (chunk + 1) * width, *delta = u + 32 * chunk, *z = delta + 32 * chunk, *dy = z + 32 * chunk;
    float *bc = dy + 32 * chunk, *terms = bc + 2 * states * chunk;
    i64 row = blockIdx.x, channel = (i64)blockIdx.y * 32 + lane(), chunks = (s.steps + chunk - 1) / chunk;
    bool inside = channel < s.channels;
    for (int n = 0; n < states; ++n) {
        a[32 * n + lane()] = inside ? s.a[n * s.channels + channel] : 0.0f;
        gh[32 * n + lane()] = inside && s.dlast ? s.dlast[(row * states + n) * s.channels + channel] : 0.0f;
        da[32 * n + lane()] = 0.0f;
    }
    float d = inside ? s.d[channel] : 0.0f, dd = 0.0f;
    for (i64 number = chunks - 1; number >= 0; --number) {
        i64 start = number * chunk, at = (row * s.steps + start) * s.channels + channel;
        int count = (int)min((i64)chunk, s.steps - start);
        stage(u, s.u, at, s.channels, count, inside);
        stage(delta, s.delta, at, s.channels, count, inside);
        stage(z, s.z, at, s.channels, count, inside);
        stage(dy, s.dy, at, s.channels, count, inside);
        for (int i = lane(); i < 2 * states * count; i += 32) bc[i] = s.bc[(row * s.steps + start) * 2 * states + i];
        i64 from = (row * chunks + number) * states * s.channels + channel;
        for (int n = 0; n < states; ++n) h[32 * n + lane()] = inside ? s.kept[from + n * s.channels] : 0.0f;
        __syncthreads();
        // The states of the chunk once more; dy becomes gr.
        for (int t = 0; t < count; ++t) {
            float x = u[32 * t + lane()], size = softplus(delta[32 * t + lane()]), inflow = size * x, read = d * x;
            const float *b = bc + 2 * states * t, *c = b + states;
            const float* before = h + t * width;
            float* after = h + (t + 1) * width;
#pragma unroll 4
            for (int n = 0; n < states; ++n) {
                float next = fmaf(expf(size * a[32 * n + lane()]), before[32 * n + lane()], inflow * b[n]);
                after[32 * n + lane()] = next;
                read = fmaf(c[n], next, read);
            }
            float gate = z[32 * t + lane()], p = sigmoid(gate), silu = gate * p, g = dy[32 * t + lane()];
            if (inside) s.dz[at + t * s.channels] = g * read * (p + silu * (1.0f - p));
            dy[32 * t + lane()] = g * silu;
        }
        for (int t = count - 1; t >= 0; --t) {
            float x = u[32 * t + lane()], raw = delta[32 * t + lane()], size = softplus(raw), gr = dy[32 * t + lane()];
            float inflow = size * x, along_a = 0.0f, along_b = 0.0f;
            const float *b = bc + 2 * states * t, *c = b + states;
            const float *before = h + t * width, *after = h + (t + 1) * width;
#pragma unroll 4
            for (int n = 0; n < states; ++n) {
                int i = 32 * n + lane();
                float g = fmaf(c[n], gr, gh[i]);
                terms[33 * n + lane()] = inflow * g;
                terms[33 * (states + n) + lane()] = after[i] * gr;
                along_b = fmaf(b[n], g, along_b);
                float passed = g * expf(size * a[i]), e = passed * before[i];
                gh[i] = passed;
                da[i] = fmaf(size, e, da[i]);
                along_a = fmaf(a[i], e, along_a);
            }
            dd = fmaf(x, gr, dd);
            if (inside) {
                s.du[at + t * s.channels] = fmaf(size, along_b, d * gr);
                s.ddelta[at + t * s.channels] = fmaf(x, along_b, along_a) * sigmoid(raw);
            }
            // Sums over this block's channels.
            __syncthreads();
            i64 to = (((i64)blockIdx.y * gridDim.x + row) * s.steps + start + t) * 2 * states;
            for (int i = lane(); i < 2 * states; i += 32) {
                float sum = 0.0f;
#pragma unroll
                for (int j = 0; j < 32; ++j) sum += terms[33 * i + j];
                s.dbc_tiles[to + i] = sum;
            }
            __syncthreads();
        }
    }
    if (!inside) return;
    for (int n = 0; n < states; ++n) {
        i64 to = (row * states + n) * s.channels + channel;
        s.dfirst[to] = gh[32 * n + lane()];
        s.da_rows[to] = da[32 * n + lane()];
    }
    s.dd_rows[row * s.channels + channel] = dd;
}

// y = sum of `tiles` arrays of n numbers, in their order.
KERNEL selective_scan_tiles(float* y, const float* x, i64 tiles, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    float sum = 0.0f;
    for (i64 tile = 0; tile < tiles; ++tile) sum += x[tile * n + i];
    y[i] = sum;
}
