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

// Adds into zeros, in any order.
KERNEL relative_bias_grad(float* dtable, const float* dy, const i64* q, const i64* k, i64 q_rows, i64 k_rows, int heads, int queries, int keys, i64 reach, i64 n) {
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
