// y[r, y_start + c] = x[r, x_start + c] for rows of y_width and x_width elements.
template <class T> __device__ __forceinline__ void copy_columns(T* y, i64 y_width, i64 y_start, const T* x, i64 x_width, i64 x_start, i64 rows, i64 columns) {
    i64 i = thread_number();
    if (i >= rows * columns) return;
    i64 r = i / columns, c = i % columns;
    y[r * y_width + y_start + c] = x[r * x_width + x_start + c];
}
KERNEL copy_columns_1(unsigned char* y, i64 yw, i64 ys, const unsigned char* x, i64 xw, i64 xs, i64 r, i64 c) { begin(); copy_columns(y, yw, ys, x, xw, xs, r, c); }
KERNEL copy_columns_4(u32* y, i64 yw, i64 ys, const u32* x, i64 xw, i64 xs, i64 r, i64 c) { begin(); copy_columns(y, yw, ys, x, xw, xs, r, c); }
KERNEL copy_columns_8(u64* y, i64 yw, i64 ys, const u64* x, i64 xw, i64 xs, i64 r, i64 c) { begin(); copy_columns(y, yw, ys, x, xw, xs, r, c); }

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

// Entries of 3 words: to, offset in a slot, bytes (up to 15 more are copied, into padding); a block each. Copies from the slot of host memory whose turn it is, then passes
// the turn on. All of a thread's numbers are asked for at once: each takes a microsecond.
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
