// Whether the minimum of two numbers is the first one; NaN counts as smaller than all numbers.
template <class T> __device__ __forceinline__ bool takes_first(T a, T b) { return a <= b || a != a; }

// kind: 0 a + b, 1 a - b, 2 a b, 3 a / b, 4 minimum.
template <class T> __device__ __forceinline__ T combined(T u, T v, int kind) {
    return kind == 0 ? u + v : kind == 1 ? u - v : kind == 2 ? u * v : kind == 3 ? u / v : takes_first(u, v) ? u : v;
}

// flat: 1 equal shapes, 2 b is one number, 0 by steps.
template <class T> struct BinaryArgs {
    T* y;
    const T *a, *b;
    i64 n;
    int kind, flat;
    Steps steps;
};
template <class T> __device__ __forceinline__ void binary(const BinaryArgs<T>& args) {
    i64 i = thread_number();
    if (i >= args.n) return;
    i64 p = i, q = args.flat == 2 ? 0 : i;
    if (!args.flat) offsets(i, args.steps, p, q);
    T u = args.a[p], v = args.b[q];
    args.y[i] = combined(u, v, args.kind);
}
// The same for equal shapes of a multiple of four numbers, at addresses that are multiples of 16.
KERNEL binary_fours(float4* y, const float4* a, const float4* b, int kind, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    float4 u = a[i], v = b[i];
    y[i] = {combined(u.x, v.x, kind), combined(u.y, v.y, kind), combined(u.z, v.z, kind), combined(u.w, v.w, kind)};
}
KERNEL binary_f32(BinaryArgs<float> args) { begin(); binary(args); }
KERNEL binary_i32(BinaryArgs<int> args) { begin(); binary(args); }
KERNEL binary_i64(BinaryArgs<i64> args) { begin(); binary(args); }

// dy where the minimum of a and b took the first (or, unless `first`, the second), 0 elsewhere.
KERNEL minimum_grad(float* dx, const float* dy, const float* a, const float* b, int first, i64 n) {
    begin();
    i64 i = thread_number();
    if (i < n) dx[i] = takes_first(a[i], b[i]) == (first != 0) ? dy[i] : 0.0f;
}

KERNEL affine(float* y, const float* x, float factor, float offset, i64 n) {
    begin();
    i64 i = thread_number();
    if (i < n) y[i] = fmaf(factor, x[i], offset);
}

// a where the condition of the element's row holds, else b.
template <class T> __device__ __forceinline__ void select(T* y, const T* a, const T* b, const unsigned char* condition, i64 row, i64 n) {
    i64 i = thread_number();
    if (i < n) y[i] = condition[i / row] ? a[i] : b[i];
}
KERNEL select_1(unsigned char* y, const unsigned char* a, const unsigned char* b, const unsigned char* c, i64 row, i64 n) { begin(); select(y, a, b, c, row, n); }
KERNEL select_4(u32* y, const u32* a, const u32* b, const unsigned char* c, i64 row, i64 n) { begin(); select(y, a, b, c, row, n); }
KERNEL select_8(u64* y, const u64* a, const u64* b, const unsigned char* c, i64 row, i64 n) { begin(); select(y, a, b, c, row, n); }

// Types: 0 f32, 2 i32, 3 i64, 4 bool, 5 u8.
KERNEL cast(void* y, const void* x, int from, int to, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    float f = 0;
    i64 z = 0;
    if (from == 0) {
        f = ((const float*)x)[i];
        z = (i64)f;
    } else {
        z = from == 2 ? ((const int*)x)[i] : from == 3 ? ((const i64*)x)[i] : ((const unsigned char*)x)[i];
        f = (float)z;
    }
    if (to == 0) ((float*)y)[i] = f;
    else if (to == 2) ((int*)y)[i] = from == 0 ? (int)f : (int)z;
    else if (to == 3) ((i64*)y)[i] = z;
    else if (to == 4) ((unsigned char*)y)[i] = from == 0 ? f != 0.0f : z != 0;
    else if (from == 0) ((unsigned char*)y)[i] = (unsigned char)fminf(fmaxf(f, 0.0f), 255.0f);
    else ((unsigned char*)y)[i] = (unsigned char)max(0LL, min(255LL, z));
}
