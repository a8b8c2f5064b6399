__device__ __forceinline__ i64 bias_row(i64 q, i64 k, i64 reach) { return max(-reach, min(reach, q - k)) + reach; }

// y [batch, heads, queries, keys] from table [2 reach + 1, heads], or dtable from dy. q_rows and k_rows:
// elements from one batch row's times to the next, 0 where one serves all.
struct BiasArgs {
    float* to;
    const float* from;
    const i64 *q, *k;
    i64 q_rows, k_rows, reach, n;
    int heads, queries, keys;
};
KERNEL relative_bias(BiasArgs args) {
    begin();
    i64 i = thread_number();
    if (i >= args.n) return;
    i64 j = i % args.keys, rest = i / args.keys, t = rest % args.queries;
    rest /= args.queries;
    i64 h = rest % args.heads, b = rest / args.heads;
    i64 row = bias_row(args.q[b * args.q_rows + t], args.k[b * args.k_rows + j], args.reach);
    args.to[i] = args.from[row * args.heads + h];
}

// For tables too large for shared memory. Adds into zeros, in any order.
KERNEL relative_bias_grad_anywhere(BiasArgs args) {
    begin();
    i64 i = thread_number();
    if (i >= args.n) return;
    i64 j = i % args.keys, rest = i / args.keys, t = rest % args.queries;
    rest /= args.queries;
    i64 h = rest % args.heads, b = rest / args.heads;
    i64 row = bias_row(args.q[b * args.q_rows + t], args.k[b * args.k_rows + j], args.reach);
    atomicAdd(&args.to[row * args.heads + h], args.from[i]);
}

// Sums of dy by table row and head, in a fixed order. Every warp has a table of its own for one head, and a
// tile of up to 32 queries by 32 keys, which it goes through key by key with a lane per query: the times of
// queries differ, so that lanes rarely meet in one row.
// Grid (heads, parts). Dynamic shared memory: per warp a table [rows] and a tile [32, 33]. partial: [parts,
// heads, rows]; counters: [heads]. Pointers that are only read are parameters of their own, because
// `__restrict__` has no effect on members of a struct.
struct BiasGradArgs {
    float *dtable, *partial;
    u32* counters;
    i64 q_rows, k_rows;
    int batch, heads, queries, keys, rows;
};
KERNEL relative_bias_grad(const float* __restrict__ dy, const i64* __restrict__ q, const i64* __restrict__ k, BiasGradArgs args) {
    begin();
    float *dtable = args.dtable, *partial = args.partial;
    u32* counters = args.counters;
    i64 q_rows = args.q_rows, k_rows = args.k_rows;
    int batch = args.batch, heads = args.heads, queries = args.queries, keys = args.keys, rows = args.rows;
    extern __shared__ float shared[];
    int h = blockIdx.x, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    float *table = shared + warp * rows, *tile = shared + warps * rows + warp * 32 * 33;
    for (int i = threadIdx.x; i < warps * rows; i += blockDim.x) shared[i] = 0;
    __syncthreads();
    int across = (keys + 31) / 32, down = (queries + 31) / 32;
    i64 units = (i64)batch * across * down, end = units * (blockIdx.y + 1) / gridDim.y;
    for (i64 unit = units * blockIdx.y / gridDim.y + warp; unit < end; unit += warps) {
        int b = (int)(unit / (across * down)), t0 = (int)(unit / across % down) * 32, j0 = (int)(unit % across) * 32;
        int lines = min(32, queries - t0), columns = min(32, keys - j0);
        const float* from = dy + (((i64)b * heads + h) * queries + t0) * keys + j0;
#pragma unroll 8
        for (int t = 0; t < lines; ++t)
            if (lane() < columns) tile[t * 33 + lane()] = from[(i64)t * keys + lane()];
        i64 time = lane() < lines ? q[b * q_rows + t0 + lane()] : 0, times = lane() < columns ? k[b * k_rows + j0 + lane()] : 0;
        __syncwarp();
        for (int j = 0; j < columns; ++j) {
            int row = (int)bias_row(time, __shfl_sync(0xffffffffu, times, j), rows / 2), next = __shfl_down_sync(0xffffffffu, row, 1);
            float x = lane() < lines ? tile[lane() * 33 + j] : 0.0f;
            if (__all_sync(0xffffffffu, lane() >= lines - 1 || row < next)) {
                if (lane() < lines) table[row] += x;
            } else {
                for (int l = 0; l < lines; ++l) {
                    if (lane() == l) table[row] += x;
                    __syncwarp();
                }
            }
            __syncwarp();
        }
    }
    __syncthreads();
    bool alone = gridDim.y == 1;
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        float sum = 0;
        for (int w = 0; w < warps; ++w) sum += shared[w * rows + r];
        *(alone ? dtable + (i64)r * heads + h : partial + ((i64)blockIdx.y * heads + h) * rows + r) = sum;
    }
    if (alone || !last_block(counters + h, gridDim.y)) return;
    // Eight rows at once, so that their loads overlap.
    for (int first = threadIdx.x; first < rows; first += 8 * blockDim.x) {
        float sums[8] = {};
        for (u32 part = 0; part < gridDim.y; ++part)
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                int r = first + i * blockDim.x;
                if (r < rows) sums[i] += partial[((i64)part * heads + h) * rows + r];
            }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int r = first + i * blockDim.x;
            if (r < rows) dtable[(i64)r * heads + h] = sums[i];
        }
    }
}
