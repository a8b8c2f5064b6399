// Cross-entropy, and what is counted beside it. Targets have 64 bits if `wide`. `lanes` neighbouring threads, a
// power of two up to 32, share a row of classes.

// Largest of x, known to all threads that share a row.
__device__ __forceinline__ float row_max(float x, int lanes) {
    for (int o = lanes / 2; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}
__device__ __forceinline__ float row_sum(float x, int lanes) {
    for (int o = lanes / 2; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

// log sum e^x of a row; all threads of a warp call this, those without a row with classes = 0.
__device__ __forceinline__ float row_log_sum_exp(const float* x, i64 classes, int sub, int lanes) {
    float top = -INF, sum = 0;
    for (i64 c = sub; c < classes; c += lanes) top = fmaxf(top, x[c]);
    top = row_max(top, lanes);
    for (i64 c = sub; c < classes; c += lanes) sum += expf(x[c] - top);
    return top + logf(row_sum(sum, lanes));
}

// How blocks divide rows, and where they leave their sums: partial [blocks], counter [1].
struct RowSums {
    double* partial;
    u32* counter;
    i64 rows, classes;
    int lanes;
};

// Sum of x over all threads of all blocks, in the threads of the block that arrives last; true there.
__device__ __forceinline__ bool grid_sum(double* x, const RowSums& sums) {
    *x = block_sum(*x);
    if (gridDim.x == 1) return true;
    if (threadIdx.x == 0) sums.partial[blockIdx.x] = *x;
    if (!last_block(sums.counter, gridDim.x)) return false;
    *x = block_sum(threadIdx.x < gridDim.x ? sums.partial[threadIdx.x] : 0.0);
    return true;
}

// Targets that are not ignored, at least 1; one block.
KERNEL count_targets(float* count, const void* targets, int wide, i64 ignored, i64 rows) {
    begin();
    double counted = 0;
    for (i64 row = threadIdx.x; row < rows; row += blockDim.x) counted += index_at(targets, wide, row) != ignored;
    counted = block_sum(counted);
    if (threadIdx.x == 0) *count = (float)fmax(counted, 1.0);
}

// The loss: a sum with weights, or without them divided by the count; one of the two is null. Pointers that are
// only read are parameters of their own, because `__restrict__` has no effect on members of a struct.
struct CrossEntropyArgs {
    float* loss;
    const float *count, *weights;
    i64 ignored;
    float smoothing;
    int wide;
};
KERNEL cross_entropy(const float* __restrict__ logits, const void* __restrict__ targets, CrossEntropyArgs args, RowSums sums) {
    begin();
    int lanes = sums.lanes, sub = lane() % lanes, groups = (int)blockDim.x / lanes;
    i64 classes = sums.classes, step = (i64)gridDim.x * groups;
    double total = 0;
    // All threads of a warp make the same number of rounds.
    for (i64 first = 0; first < sums.rows; first += step) {
        i64 row = first + (i64)blockIdx.x * groups + threadIdx.x / lanes;
        bool works = row < sums.rows;
        const float* x = logits + (works ? row : 0) * classes;
        float log_sum = row_log_sum_exp(x, works ? classes : 0, sub, lanes), sum = 0;
        if (args.smoothing != 0.0f) {
            for (i64 c = sub; works && c < classes; c += lanes) sum += x[c];
            sum = row_sum(sum, lanes);
        }
        i64 target = works ? index_at(targets, args.wide, row) : args.ignored;
        if (sub != 0 || target == args.ignored) continue;
        float hard = target >= 0 && target < classes ? log_sum - x[target] : NOT_A_NUMBER;
        // Without smoothing, infinite logits of other classes must not matter.
        float even = args.smoothing == 0.0f ? 0.0f : args.smoothing * (log_sum - sum / classes);
        float weight = args.weights ? args.weights[row] : 1.0f;
        // Where the weight is 0, an infinite loss must not matter.
        if (weight != 0.0f) total += weight * ((1.0f - args.smoothing) * hard + even);
    }
    if (grid_sum(&total, sums) && threadIdx.x == 0) *args.loss = (float)(args.count ? total / *args.count : total);
}

struct CrossEntropyGradArgs {
    float* dx;
    const float *logits, *count, *grad, *weights;
    const void* targets;
    i64 ignored, rows, classes;
    float smoothing;
    int wide, lanes;
};
KERNEL cross_entropy_grad(CrossEntropyGradArgs args) {
    begin();
    int lanes = args.lanes, sub = lane() % lanes;
    i64 row = thread_number() / lanes, classes = row < args.rows ? args.classes : 0, at = row * classes;
    const float* x = args.logits + at;
    float log_sum = row_log_sum_exp(x, classes, sub, lanes);
    if (classes == 0) return;
    i64 target = index_at(args.targets, args.wide, row);
    float scale = *args.grad, smoothing = args.smoothing;
    scale = args.weights ? scale * args.weights[row] : scale / *args.count;
    for (i64 c = sub; c < classes; c += lanes) {
        float d = scale * (expf(x[c] - log_sum) - smoothing / classes);
        if (c == target) d -= scale * (1.0f - smoothing);
        args.dx[at + c] = target == args.ignored ? 0.0f : d;
    }
}

// Rows whose likeliest class is the target (all classes below or equal).
KERNEL count_correct(float* correct, const float* logits, const void* targets, int wide, RowSums sums) {
    begin();
    int lanes = sums.lanes, sub = lane() % lanes, groups = (int)blockDim.x / lanes;
    i64 classes = sums.classes, step = (i64)gridDim.x * groups;
    double total = 0;
    for (i64 first = 0; first < sums.rows; first += step) {
        i64 row = first + (i64)blockIdx.x * groups + threadIdx.x / lanes;
        i64 target = row < sums.rows ? index_at(targets, wide, row) : -1;
        bool counts = target >= 0 && target < classes;
        const float* x = logits + (counts ? row : 0) * classes;
        float other = 0;
        for (i64 c = sub; counts && c < classes; c += lanes) other += !(x[c] <= x[target]);
        other = row_sum(other, lanes);
        total += counts && sub == 0 && other == 0.0f;
    }
    if (grid_sum(&total, sums) && threadIdx.x == 0) *correct = (float)total;
}

// One block; `per` elements share one mask entry. loss, count and mask may be null.
struct MseArgs {
    float *loss, *count;
    const float *x, *t;
    const unsigned char* mask;
    i64 per, n;
};
KERNEL mse(MseArgs args) {
    begin();
    float *loss = args.loss, *count = args.count;
    const float *x = args.x, *t = args.t;
    const unsigned char* mask = args.mask;
    i64 per = args.per, n = args.n;
    double total = 0, counted = 0;
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        if (mask && !mask[i / per]) continue;
        float e = x[i] - t[i];
        total += e * e;
        counted += 1;
    }
    total = block_sum(total);
    counted = block_sum(counted);
    if (threadIdx.x == 0) {
        if (loss) *loss = (float)(total / fmax(counted, 1.0));
        if (count) *count = (float)fmax(counted, 1.0);
    }
}

struct MseGradArgs {
    float* dx;
    const float *x, *t, *count, *grad;
    const unsigned char* mask;
    i64 per, n;
};
KERNEL mse_grad(MseGradArgs args) {
    begin();
    i64 i = thread_number();
    if (i >= args.n) return;
    bool hidden = args.mask && !args.mask[i / args.per];
    args.dx[i] = hidden ? 0.0f : 2.0f * *args.grad / *args.count * (args.x[i] - args.t[i]);
}
