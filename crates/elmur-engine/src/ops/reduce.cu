// y[part] = sum of one of `parts` slices of x.
KERNEL sum_slices(float* y, const float* x, i64 n, i64 each) {
    begin();
    i64 start = blockIdx.x * each, end = min(n, start + each);
    double total = 0;
    for (i64 i = start + threadIdx.x; i < end; i += blockDim.x) total += x[i];
    total = block_sum(total);
    if (threadIdx.x == 0) y[blockIdx.x] = (float)total;
}

// y[r] = sum of row r of x [rows, columns]; one warp per row.
KERNEL sum_rows(float* y, const float* x, i64 rows, i64 columns) {
    begin();
    i64 row = warp_number();
    if (row >= rows) return;
    x += row * columns;
    float total = 0;
    for (i64 i = lane(); i < columns; i += 32) total += x[i];
    total = warp_sum(total);
    if (lane() == 0) y[row] = total;
}

// y[part, c] = sum over the part's rows of x[r, c]; blocks of 32 columns by 32 rows.
KERNEL sum_columns(float* y, const float* x, i64 rows, i64 columns, i64 rows_per_part, int accumulate) {
    begin();
    __shared__ float sums[32][33];
    int tx = threadIdx.x & 31, ty = threadIdx.x >> 5;
    i64 c = (i64)blockIdx.x * 32 + tx;
    i64 start = blockIdx.y * rows_per_part, end = min(rows, start + rows_per_part);
    float total = 0;
    if (c < columns)
        for (i64 r = start + ty; r < end; r += 32) total += x[r * columns + c];
    sums[ty][tx] = total;
    __syncthreads();
    if (ty == 0 && c < columns) {
        float all = 0;
        for (int i = 0; i < 32; ++i) all += sums[i][tx];
        float* to = &y[blockIdx.y * columns + c];
        *to = accumulate ? *to + all : all;
    }
}

// Axes that are kept, with their extents and steps in the input, and axes that are summed.
struct Reduction {
    int kept, shape[6], step[6];
    int summed, extent[6], stride[6];
};
// Offset of output number `rest`, and of summed element number `left`.
__device__ __forceinline__ i64 kept_offset(const Reduction& s, i64 rest) {
    i64 base = 0;
    for (int axis = s.kept - 1; axis >= 0; --axis) {
        base += rest % s.shape[axis] * s.step[axis];
        rest /= s.shape[axis];
    }
    return base;
}
__device__ __forceinline__ i64 summed_offset(const Reduction& s, i64 left) {
    i64 at = 0;
    for (int axis = s.summed - 1; axis >= 0; --axis) {
        at += left % s.extent[axis] * s.stride[axis];
        left /= s.extent[axis];
    }
    return at;
}

// Any axes: one block per output, walking the summed axes.
KERNEL sum_axes(float* y, const float* x, i64 count, i64 outputs, Reduction s) {
    begin();
    x += kept_offset(s, blockIdx.x);
    double total = 0;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) total += x[summed_offset(s, i)];
    total = block_sum(total);
    if (threadIdx.x == 0) y[blockIdx.x] = (float)total;
}

// Any axes: one thread per output.
KERNEL sum_few(float* y, const float* x, i64 count, i64 outputs, Reduction s) {
    begin();
    i64 output = thread_number();
    if (output >= outputs) return;
    x += kept_offset(s, output);
    double total = 0;
    for (i64 i = 0; i < count; ++i) total += x[summed_offset(s, i)];
    y[output] = (float)total;
}

// y[i] = total[i] + *scalars[i].
KERNEL sum_scalars(float* y, const u64* scalars, const float* total, i64 n) {
    begin();
    i64 i = thread_number();
    if (i < n) y[i] = (total ? total[i] : 0.0f) + *(const float*)scalars[i];
}
