// One block: loss, log-sum-exp per row (lse may be null), number of rows that count.
KERNEL cross_entropy(float* loss, float* lse, float* count, const float* __restrict__ logits, const void* __restrict__ targets, int wide, i64 ignored, float smoothing, i64 rows, i64 classes) {
    begin();
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
        // Where nothing is smoothed an infinite logit elsewhere must not matter.
        float even = smoothing == 0.0f ? 0.0f : smoothing * (log_sum - mean / classes);
        total += (1.0f - smoothing) * hard + even;
    }
    total = block_sum(total);
    counted = block_sum(counted);
    if (threadIdx.x == 0) {
        if (loss) *loss = (float)(total / fmax(counted, 1.0));
        if (count) *count = (float)fmax(counted, 1.0);
    }
}

KERNEL cross_entropy_grad(float* dx, const float* logits, const void* targets, int wide, const float* lse, const float* count, const float* grad, i64 ignored,
                          float smoothing, i64 classes, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    i64 row = i / classes, target = index_at(targets, wide, row);
    float scale = *grad / *count;
    float d = scale * (expf(logits[i] - lse[row]) - smoothing / classes);
    if (i % classes == target) d -= scale * (1.0f - smoothing);
    dx[i] = target == ignored ? 0.0f : d;
}

// Rows whose likeliest class is the target (all classes below or equal); one block.
KERNEL count_right(float* right, const float* logits, const void* targets, int wide, i64 rows, i64 classes) {
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
    if (threadIdx.x == 0) *right = (float)total;
}

// One block; `per` elements share one mask entry.
KERNEL mse(float* loss, float* count, const float* x, const float* t, const unsigned char* mask, i64 per, i64 n) {
    begin();
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

KERNEL mse_grad(float* dx, const float* x, const float* t, const float* count, const float* grad, const unsigned char* mask, i64 per, i64 n) {
    begin();
    i64 i = thread_number();
    if (i < n) dx[i] = mask && !mask[i / per] ? 0.0f : 2.0f * *grad / *count * (x[i] - t[i]);
}
