// One warp per row.
KERNEL logsumexp(float* y, const float* x, i64 rows, i64 n) {
    begin();
    i64 row = warp_number();
    if (row >= rows) return;
    x += row * n;
    float top = -INF;
    bool undefined = false;
    for (i64 i = lane(); i < n; i += 32) {
        top = fmaxf(top, x[i]);
        undefined |= isnan(x[i]);
    }
    top = warp_max(top);
    // Infinite differences are not numbers; NaN itself goes through the sum.
    bool infinite = isinf(top) && !__any_sync(0xffffffffu, undefined);
    float total = 0;
    for (i64 i = lane(); i < n; i += 32) total += expf(x[i] - top);
    total = warp_sum(total);
    if (lane() == 0) y[row] = infinite ? top : top + logf(total);
}

KERNEL logsumexp_grad(float* dx, const float* x, const float* y, const float* dy, i64 n, i64 count) {
    begin();
    i64 i = thread_number();
    if (i >= count) return;
    float whole = y[i / n];
    dx[i] = whole == -INF ? 0.0f : dy[i / n] * expf(x[i] - whole);
}
