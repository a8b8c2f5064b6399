KERNEL softmax(float* y, const float* x, i64 rows, i64 n) {
    begin();
    i64 row = warp_number();
    if (row >= rows) return;
    x += row * n;
    y += row * n;
    float top = -INF;
    bool undefined = false;
    for (i64 i = lane(); i < n; i += 32) {
        top = fmaxf(top, x[i]);
        undefined |= isnan(x[i]);
    }
    top = warp_max(top);
    // A row of -inf alone gives zeros, but NaN stays NaN: a diverged model must not look like a masked row.
    if (top == -INF && !__any_sync(0xffffffffu, undefined)) {
        for (i64 i = lane(); i < n; i += 32) y[i] = 0.0f;
        return;
    }
    float total = 0;
    for (i64 i = lane(); i < n; i += 32) {
        float e = expf(x[i] - top);
        y[i] = e;
        total += e;
    }
    float scale = 1.0f / warp_sum(total);
    for (i64 i = lane(); i < n; i += 32) y[i] *= scale;
}

KERNEL softmax_grad(float* dx, const float* dy, const float* y, i64 rows, i64 n) {
    begin();
    i64 row = warp_number();
    if (row >= rows) return;
    i64 at = row * n;
    float mean = 0;
    for (i64 i = lane(); i < n; i += 32) mean += dy[at + i] * y[at + i];
    mean = warp_sum(mean);
    for (i64 i = lane(); i < n; i += 32) dx[at + i] = y[at + i] * (dy[at + i] - mean);
}

KERNEL argmax(int* y, const float* x, i64 rows, i64 n) {
    begin();
    i64 row = thread_number();
    if (row >= rows) return;
    x += row * n;
    int best = 0;
    for (int i = 1; i < n; ++i)
        if (x[i] > x[best] || (isnan(x[best]) && !isnan(x[i]))) best = i;
    y[row] = best;
}
