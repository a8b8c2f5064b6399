// y[r, y_start + c] = x[r, x_start + c] for rows of y_width and x_width elements.
template <class T> struct ColumnsArgs {
    T* y;
    const T* x;
    i64 y_width, y_start, x_width, x_start, rows, columns;
};
template <class T> __device__ __forceinline__ void copy_columns(const ColumnsArgs<T>& args) {
    i64 i = thread_number();
    if (i >= args.rows * args.columns) return;
    i64 r = i / args.columns, c = i % args.columns;
    args.y[r * args.y_width + args.y_start + c] = args.x[r * args.x_width + args.x_start + c];
}
KERNEL copy_columns_1(ColumnsArgs<unsigned char> args) { begin(); copy_columns(args); }
KERNEL copy_columns_4(ColumnsArgs<u32> args) { begin(); copy_columns(args); }
KERNEL copy_columns_8(ColumnsArgs<u64> args) { begin(); copy_columns(args); }

// y at i = x at the steps `a`.
template <class T> __device__ __forceinline__ void rearrange(T* y, const T* x, i64 n, const Steps& s) {
    i64 i = thread_number();
    if (i >= n) return;
    i64 a, b;
    offsets(i, s, a, b);
    y[i] = x[a];
}
KERNEL rearrange_1(unsigned char* y, const unsigned char* x, i64 n, Steps s) { begin(); rearrange(y, x, n, s); }
KERNEL rearrange_4(u32* y, const u32* x, i64 n, Steps s) { begin(); rearrange(y, x, n, s); }
KERNEL rearrange_8(u64* y, const u64* x, i64 n, Steps s) { begin(); rearrange(y, x, n, s); }

template <class T> __device__ __forceinline__ void fill(T* y, T x, i64 n) {
    i64 i = thread_number();
    if (i < n) y[i] = x;
}
KERNEL fill_1(unsigned char* y, u64 x, i64 n) { begin(); fill(y, (unsigned char)x, n); }
KERNEL fill_4(u32* y, u64 x, i64 n) { begin(); fill(y, (u32)x, n); }
KERNEL fill_8(u64* y, u64 x, i64 n) { begin(); fill(y, x, n); }

// Entries of 3 words: to, from, bytes; one row of blocks each.
KERNEL copy_all(const u64* table) {
    begin();
    const u64* entry = table + 3 * blockIdx.y;
    u64 to = entry[0], from = entry[1];
    i64 bytes = (i64)entry[2], wide = ((to | from) & 15) == 0 ? bytes / 16 : 0;
    for (i64 i = thread_number(); i < wide; i += (i64)gridDim.x * blockDim.x) ((uint4*)to)[i] = ((const uint4*)from)[i];
    for (i64 i = 16 * wide + thread_number(); i < bytes; i += (i64)gridDim.x * blockDim.x) ((unsigned char*)to)[i] = ((const unsigned char*)from)[i];
}

// Entries of 3 words: to, offset in a slot, bytes (up to 15 more are copied, into padding); a block each.
// Copies from slot `turn` of host memory, then advances `turn`. A thread issues all its loads at once: each
// takes a microsecond.
KERNEL fetch_inputs(const u64* table, const u64* slots, u32* turn, u32* counter, u32 depth) {
    begin();
    const u64* entry = table + 3 * blockIdx.x;
    u32 now = *turn;
    uint4* to = (uint4*)entry[0];
    const volatile uint4* from = (const volatile uint4*)(slots[now] + entry[1]);
    int count = (int)((entry[2] + 15) / 16);
    for (int first = threadIdx.x; first < count; first += 4 * blockDim.x) {
        uint4 read[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            int i = first + k * blockDim.x;
            if (i < count) read[k] = {from[i].x, from[i].y, from[i].z, from[i].w};
        }
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (first + k * (int)blockDim.x < count) to[first + k * blockDim.x] = read[k];
    }
    if (last_block(counter, gridDim.x) && threadIdx.x == 0) *turn = (now + 1) % depth;
}
