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

KERNEL embedding(RowArgs<float> args) {
    begin();
    i64 i = thread_number(), d = args.width;
    if (i >= args.n) return;
    i64 row = index_at(args.index, args.wide, i / d);
    args.to[i] = row >= 0 && row < args.rows ? args.from[row * d + i % d] : NOT_A_NUMBER;
}

// Adds into zeros, in any order.
KERNEL embedding_grad(RowArgs<float> args) {
    begin();
    i64 i = thread_number(), d = args.width;
    if (i >= args.n) return;
    i64 row = index_at(args.index, args.wide, i / d);
    if (row >= 0 && row < args.rows) atomicAdd(&args.to[row * d + i % d], args.from[i]);
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
