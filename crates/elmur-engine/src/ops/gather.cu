KERNEL embedding(float* y, const float* table, const void* index, int wide, i64 rows, i64 d, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    i64 row = index_at(index, wide, i / d);
    y[i] = row >= 0 && row < rows ? table[row * d + i % d] : NOT_A_NUMBER;
}

// Adds into zeros, in any order.
KERNEL embedding_grad(float* dtable, const float* dy, const void* index, int wide, i64 rows, i64 d, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    i64 row = index_at(index, wide, i / d);
    if (row >= 0 && row < rows) atomicAdd(&dtable[row * d + i % d], dy[i]);
}

__device__ __forceinline__ i64 bias_row(i64 q, i64 k, i64 reach) { return max(-reach, min(reach, q - k)) + reach; }

// q_rows and k_rows: elements from one batch row's times to the next, 0 where one serves all.
KERNEL relative_bias(float* y, const float* table, const i64* q, const i64* k, i64 q_rows, i64 k_rows, int heads, int queries, int keys, i64 reach, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    i64 j = i % keys, rest = i / keys, t = rest % queries;
    rest /= queries;
    i64 h = rest % heads, b = rest / heads;
    y[i] = table[bias_row(q[b * q_rows + t], k[b * k_rows + j], reach) * heads + h];
}

// Sums of dy by table row and head, in a fixed order. Every warp has a table of its own for one head, and a tile of up to 32 queries by 32 keys, which
// it goes through key by key with a lane per query: their times differ, so that lanes rarely meet in one row.
// Grid (heads, parts). Dynamic shared memory: per warp a table [rows] and a tile [32, 33]. partial: [parts, heads, rows]; counters: [heads].
KERNEL relative_bias_grad(float* dtable, float* partial, u32* counters, const float* __restrict__ dy, const i64* __restrict__ q, const i64* __restrict__ k, i64 q_rows,
                          i64 k_rows, int batch, int heads, int queries, int keys, int rows) {
    begin();
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
    // Eight rows at once, so that their numbers are asked for together.
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

// For tables too large for shared memory. Adds into zeros, in any order.
KERNEL relative_bias_grad_anywhere(float* dtable, const float* dy, const i64* q, const i64* k, i64 q_rows, i64 k_rows, int heads, int queries, int keys, i64 reach, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    i64 j = i % keys, rest = i / keys, t = rest % queries;
    rest /= queries;
    i64 h = rest % heads, b = rest / heads;
    atomicAdd(&dtable[bias_row(q[b * q_rows + t], k[b * k_rows + j], reach) * heads + h], dy[i]);
}

// Rows [batch, count, width] into cache [batch, length, width] from position at[b] on.
template <class T> __device__ __forceinline__ void write_rows(T* cache, const T* rows, const int* at, i64 length, i64 count, i64 width, i64 n) {
    i64 i = thread_number();
    if (i >= n) return;
    i64 b = i / (count * width), start = at[b];
    if (start >= 0 && start + count <= length) cache[(b * length + start) * width + i % (count * width)] = rows[i];
}
KERNEL write_rows_1(unsigned char* c, const unsigned char* r, const int* at, i64 l, i64 k, i64 w, i64 n) { begin(); write_rows(c, r, at, l, k, w, n); }
KERNEL write_rows_4(u32* c, const u32* r, const int* at, i64 l, i64 k, i64 w, i64 n) { begin(); write_rows(c, r, at, l, k, w, n); }
KERNEL write_rows_8(u64* c, const u64* r, const int* at, i64 l, i64 k, i64 w, i64 n) { begin(); write_rows(c, r, at, l, k, w, n); }

template <class T> __device__ __forceinline__ void take(T* y, const T* table, const void* index, int wide, i64 rows, i64 width, i64 n) {
    i64 i = thread_number();
    if (i >= n) return;
    i64 row = index_at(index, wide, i / width);
    if (row >= 0 && row < rows) y[i] = table[row * width + i % width];
}
KERNEL take_1(unsigned char* y, const unsigned char* t, const void* x, int w, i64 r, i64 d, i64 n) { begin(); take(y, t, x, w, r, d, n); }
KERNEL take_4(u32* y, const u32* t, const void* x, int w, i64 r, i64 d, i64 n) { begin(); take(y, t, x, w, r, d, n); }
KERNEL take_8(u64* y, const u64* t, const void* x, int w, i64 r, i64 d, i64 n) { begin(); take(y, t, x, w, r, d, n); }

// Row index[i] of the table becomes row i of values. Rows that are written twice are given equal values.
template <class T>
__device__ __forceinline__ void scatter_rows(T* table, const T* values, const void* index, int wide, i64 rows, i64 width, i64 n) {
    i64 i = thread_number();
    if (i >= n) return;
    i64 row = index_at(index, wide, i / width);
    if (row >= 0 && row < rows) table[row * width + i % width] = values[i];
}
KERNEL scatter_rows_1(unsigned char* t, const unsigned char* v, const void* x, int w, i64 r, i64 d, i64 n) { begin(); scatter_rows(t, v, x, w, r, d, n); }
KERNEL scatter_rows_4(u32* t, const u32* v, const void* x, int w, i64 r, i64 d, i64 n) { begin(); scatter_rows(t, v, x, w, r, d, n); }
KERNEL scatter_rows_8(u64* t, const u64* v, const void* x, int w, i64 r, i64 d, i64 n) { begin(); scatter_rows(t, v, x, w, r, d, n); }
