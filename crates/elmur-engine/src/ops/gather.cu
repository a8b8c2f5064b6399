// Rows of `width` elements that an index names. A gather reads them from the table at `from`, one after the
// other into `to`; a scatter writes them over those of the table at `to`. wide: indices have 64 bits. n:
// elements of all rows named.
template <class T> struct RowArgs {
    T* to;
    const T* from;
    const void* index;
    i64 rows, width, n;
    int wide;
};

// Vectors of `width` numbers, each the sum of `size` rows of a table that an index names, or the table's gradient
// from theirs. count: vectors.
struct SumArgs {
    float* to;
    const float* from;
    const void* index;
    i64 rows, width, count, size;
    int wide;
};

KERNEL embedding(SumArgs args) {
    begin();
    i64 i = thread_number(), d = args.width;
    if (i >= args.count * d) return;
    i64 first = i / d * args.size;
    float sum = 0;
    for (i64 k = 0; k < args.size; ++k) {
        i64 row = index_at(args.index, args.wide, first + k);
        sum += row >= 0 && row < args.rows ? args.from[row * d + i % d] : NOT_A_NUMBER;
    }
    args.to[i] = sum;
}

// A block takes one of the `size` rows of at most SUM_CHUNK vectors and SUM_WIDTH columns: a thread each. Rows that lie
// close together, as the values of one component do, are added up in shared memory first. Adds into zeros, in any order.
const int SUM_CHUNK = 256, SUM_WIDTH = 128, SUM_ROWS = 64;
KERNEL embedding_grad(SumArgs args) {
    begin();
    __shared__ float sums[SUM_ROWS * SUM_WIDTH];
    __shared__ int rows[SUM_CHUNK], least, most;
    i64 chunk = (args.count + gridDim.x - 1) / gridDim.x, first = blockIdx.x * chunk, d = args.width;
    int count = (int)min(chunk, args.count - first), t = threadIdx.x;
    if (t == 0) least = 0x7fffffff, most = -1;
    __syncthreads();
    for (int i = t; i < count; i += SUM_WIDTH) {
        i64 row = index_at(args.index, args.wide, (first + i) * args.size + blockIdx.y);
        rows[i] = row >= 0 && row < args.rows ? (int)row : -1;
        if (rows[i] >= 0) atomicMin(&least, rows[i]), atomicMax(&most, rows[i]);
    }
    __syncthreads();
    i64 column = (i64)blockIdx.z * SUM_WIDTH + t;
    if (most < 0 || column >= d) return;
    const float* from = args.from + first * d + column;
    float* to = args.to + column;
    int span = most - least + 1;
    if (span > SUM_ROWS) {
        for (int i = 0; i < count; ++i)
            if (rows[i] >= 0) atomicAdd(&to[rows[i] * d], from[i * d]);
        return;
    }
    for (int r = 0; r < span; ++r) sums[r * SUM_WIDTH + t] = 0;
    // Eight vectors at once, so that their loads overlap.
    for (int i = 0; i < count; i += 8) {
        float x[8];
#pragma unroll
        for (int u = 0; u < 8; ++u) x[u] = i + u < count ? from[(i + u) * d] : 0.0f;
#pragma unroll
        for (int u = 0; u < 8; ++u)
            if (i + u < count && rows[i + u] >= 0) sums[(rows[i + u] - least) * SUM_WIDTH + t] += x[u];
    }
    for (int r = 0; r < span; ++r) {
        float sum = sums[r * SUM_WIDTH + t];
        if (sum != 0) atomicAdd(&to[(least + r) * d], sum);
    }
}

template <class T> __device__ __forceinline__ void gather_rows(const RowArgs<T>& args) {
    i64 i = thread_number(), width = args.width;
    if (i >= args.n) return;
    i64 row = index_at(args.index, args.wide, i / width);
    if (row >= 0 && row < args.rows) args.to[i] = args.from[row * width + i % width];
}
KERNEL gather_rows_1(RowArgs<unsigned char> args) { begin(); gather_rows(args); }
KERNEL gather_rows_4(RowArgs<u32> args) { begin(); gather_rows(args); }
KERNEL gather_rows_8(RowArgs<u64> args) { begin(); gather_rows(args); }

// Rows that are written twice are given equal values.
template <class T> __device__ __forceinline__ void scatter_rows(const RowArgs<T>& args) {
    i64 i = thread_number(), width = args.width;
    if (i >= args.n) return;
    i64 row = index_at(args.index, args.wide, i / width);
    if (row >= 0 && row < args.rows) args.to[row * width + i % width] = args.from[i];
}
KERNEL scatter_rows_1(RowArgs<unsigned char> args) { begin(); scatter_rows(args); }
KERNEL scatter_rows_4(RowArgs<u32> args) { begin(); scatter_rows(args); }
KERNEL scatter_rows_8(RowArgs<u64> args) { begin(); scatter_rows(args); }
