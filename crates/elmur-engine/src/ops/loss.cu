// One block: loss, log-sum-exp per row, what the sum of losses is divided by (the number of rows that count,
// or 1 where rows have weights); each may be null, and so may the weights. wide: targets have 64 bits. Pointers that are only read are parameters of their own, because `__restrict__` has no effect on
// members of a struct.
struct CrossEntropyArgs {
    float *loss, *lse, *count;
    const float* weights;
    i64 ignored, rows, classes;
    float smoothing;
    int wide;
};
KERNEL cross_entropy(const float* __restrict__ logits, const void* __restrict__ targets, CrossEntropyArgs args) {
    begin();
    float *loss = args.loss, *lse = args.lse, *count = args.count, smoothing = args.smoothing;
    i64 ignored = args.ignored, rows = args.rows, classes = args.classes;
    int wide = args.wide;
    double total = 0, counted = 0;
    for (i64 row = threadIdx.x; row < rows; row += blockDim.x) {
        const float* x = logits + row * classes;
        i64 target = index_at(targets, wide, row);
        float top = -INF, mean = 0, sum = 0;
        for (i64 c = 0; c < classes; ++c) {
            top = fmaxf(top, x[c]);
            mean += x[c];
        }
        for (i64 c = 0; c < classes; ++c) sum += expf(x[c] - top);
        float log_sum = top + logf(sum);
        if (lse) lse[row] = log_sum;
        if (target == ignored) continue;
        counted += 1;
        float hard = target >= 0 && target < classes ? log_sum - x[target] : NOT_A_NUMBER;
        // Without smoothing, infinite logits of other classes must not matter.
        float even = smoothing == 0.0f ? 0.0f : smoothing * (log_sum - mean / classes);
        float weight = args.weights ? args.weights[row] : 1.0f;
        // Where the weight is 0, an infinite loss must not matter.
        if (weight != 0.0f) total += weight * ((1.0f - smoothing) * hard + even);
    }
    total = block_sum(total);
    counted = args.weights ? 1.0 : fmax(block_sum(counted), 1.0);
    if (threadIdx.x == 0) {
        if (loss) *loss = (float)(total / counted);
        if (count) *count = (float)counted;
    }
}

struct CrossEntropyGradArgs {
    float* dx;
    const float *logits, *lse, *count, *grad, *weights;
    const void* targets;
    i64 ignored, classes, n;
    float smoothing;
    int wide;
};
KERNEL cross_entropy_grad(CrossEntropyGradArgs args) {
    begin();
    i64 i = thread_number(), classes = args.classes;
    if (i >= args.n) return;
    i64 row = i / classes, target = index_at(args.targets, args.wide, row);
    float scale = *args.grad / *args.count, smoothing = args.smoothing;
    if (args.weights) scale *= args.weights[row];
    float d = scale * (expf(args.logits[i] - args.lse[row]) - smoothing / classes);
    if (i % classes == target) d -= scale * (1.0f - smoothing);
    args.dx[i] = target == args.ignored ? 0.0f : d;
}

// Rows whose likeliest class is the target (all classes below or equal); one block.
KERNEL count_correct(float* correct, const float* logits, const void* targets, int wide, i64 rows, i64 classes) {
    begin();
    double total = 0;
    for (i64 row = threadIdx.x; row < rows; row += blockDim.x) {
        i64 target = index_at(targets, wide, row);
        if (target < 0 || target >= classes) continue;
        const float* x = logits + row * classes;
        bool best = true;
        for (i64 c = 0; c < classes; ++c) best &= x[c] <= x[target];
        total += best;
    }
    total = block_sum(total);
    if (threadIdx.x == 0) *correct = (float)total;
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
