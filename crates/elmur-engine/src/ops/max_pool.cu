// Images of h by w pixels, windows of p by q.
struct Pooling {
    int h, w, p, q;
};

// One thread per window: its largest number, and the pixel that has it. from may be null.
KERNEL max_pool(float* y, int* from, const float* x, Pooling g, i64 n) {
    begin();
    i64 at = thread_number();
    if (at >= n) return;
    int rows = g.h / g.p, columns = g.w / g.q, j = at % columns, i = at / columns % rows;
    x += at / columns / rows * g.h * g.w;
    int start = i * g.p * g.w + j * g.q, best = start;
    for (int r = 0; r < g.p; ++r)
        for (int pixel = start + r * g.w; pixel < start + r * g.w + g.q; ++pixel)
            if (x[pixel] > x[best] || (isnan(x[pixel]) && !isnan(x[best]))) best = pixel;
    y[at] = x[best];
    if (from) from[at] = best;
}

// One thread per pixel: the gradient of the window whose number the pixel gave.
KERNEL max_pool_grad(float* dx, const float* dy, const int* from, Pooling g, i64 n) {
    begin();
    i64 at = thread_number();
    if (at >= n) return;
    int rows = g.h / g.p, columns = g.w / g.q, pixel = at % (g.h * g.w), i = pixel / g.w / g.p, j = pixel % g.w / g.q;
    i64 window = (at / (g.h * g.w) * rows + i) * columns + j;
    dx[at] = i < rows && j < columns && from[window] == pixel ? dy[window] : 0.0f;
}
