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

// Whether each of the first `count` lanes of a warp has more than the one before, or at least as much.
template <class T> __device__ __forceinline__ bool rises(T x, int count, bool strictly) {
    T next = __shfl_down_sync(0xffffffffu, x, 1);
    return __all_sync(0xffffffffu, lane() >= count - 1 || x < next || (x == next && !strictly));
}

// Adds x of the first `count` lanes of a warp to their rows of a table, in a fixed order.
__device__ __forceinline__ void add_to_rows(float* table, int row, float x, int count, bool falling) {
    int order = falling ? -row : row;
    if (rises(order, count, true)) {
        if (lane() < count) table[row] += x;
    } else if (rises(order, count, false)) {
        // Neighbours that share a row: the last of them adds the sum of all.
        for (int o = 1; o < 32; o <<= 1) {
            float y = __shfl_up_sync(0xffffffffu, x, o);
            int other = __shfl_up_sync(0xffffffffu, row, o);
            if (lane() >= o && other == row) x += y;
        }
        int next = __shfl_down_sync(0xffffffffu, row, 1);
        if (lane() < count && (lane() == count - 1 || next != row)) table[row] += x;
    } else {
        for (int l = 0; l < count; ++l) {
            if (lane() == l) table[row] += x;
            __syncwarp();
        }
    }
    __syncwarp();
}

// Sums of dy by table row and head, in a fixed order. Every warp has a table of its own for one head, and a
// tile of up to 32 queries by 32 keys. It goes through the tile key by key with a lane per query, whose times
// usually rise, and with them the rows; where times of queries do not and those of keys do, as where queries are
// slots, it goes query by query with a lane per key.
// Grid (heads, parts). Dynamic shared memory: per warp a table [rows] and a tile [32, 33]. to: the gradient [rows,
// heads] of one part, or [parts, heads, rows] for relative_bias_grad_sum. Pointers that are only read are parameters
// of their own, because `__restrict__` has no effect on members of a struct.
struct BiasGradArgs {
    float* to;
    i64 q_rows, k_rows;
    int batch, heads, queries, keys, rows;
};
KERNEL relative_bias_grad(const float* __restrict__ dy, const i64* __restrict__ q, const i64* __restrict__ k, BiasGradArgs args) {
    begin();
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
        bool by_key = !rises(time, lines, true) && rises(times, columns, true);
        i64 own = by_key ? times : time, others = by_key ? time : times;
        int lanes = by_key ? columns : lines, rounds = by_key ? lines : columns;
        for (int j = 0; j < rounds; ++j) {
            i64 other = __shfl_sync(0xffffffffu, others, j);
            int row = (int)(by_key ? bias_row(other, own, rows / 2) : bias_row(own, other, rows / 2));
            float x = lane() < lanes ? tile[by_key ? j * 33 + lane() : lane() * 33 + j] : 0.0f;
            add_to_rows(table, row, x, lanes, by_key);
        }
    }
    __syncthreads();
    bool alone = gridDim.y == 1;
    for (int r = threadIdx.x; r < rows; r += blockDim.x) {
        float sum = 0;
        for (int w = 0; w < warps; ++w) sum += shared[w * rows + r];
        args.to[alone ? (i64)r * heads + h : ((i64)blockIdx.y * heads + h) * rows + r] = sum;
    }
}

// dtable [rows, heads] from [parts, heads, rows]: a thread per number, which adds parts in their order.
KERNEL relative_bias_grad_sum(float* dtable, const float* __restrict__ partial, int parts, int heads, int rows) {
    begin();
    i64 i = thread_number(), n = (i64)heads * rows;
    if (i >= n) return;
    float sum = 0;
#pragma unroll 8
    for (int part = 0; part < parts; ++part) sum += partial[part * n + i];
    dtable[i % rows * heads + i / rows] = sum;
}
