// Images of c channels, h by w; kernels of p by q; i by j patches.
struct Geometry {
    int c, h, w, p, q, i, j, stride, padding;
};

// columns[b, depth, count] from images [b, c, h, w].
KERNEL unfold(float* columns, const float* images, Geometry g, i64 n) {
    begin();
    i64 at = thread_number();
    if (at >= n) return;
    i64 rest = at;
    int j = rest % g.j; rest /= g.j;
    int i = rest % g.i; rest /= g.i;
    int q = rest % g.q; rest /= g.q;
    int p = rest % g.p; rest /= g.p;
    int c = rest % g.c;
    i64 b = rest / g.c;
    int row = i * g.stride + p - g.padding, column = j * g.stride + q - g.padding;
    bool inside = row >= 0 && row < g.h && column >= 0 && column < g.w;
    columns[at] = inside ? images[((b * g.c + c) * g.h + row) * g.w + column] : 0.0f;
}

// The transpose of unfold: one thread per pixel adds up the patches it was in.
KERNEL fold(float* images, const float* columns, Geometry g, i64 n) {
    begin();
    i64 at = thread_number();
    if (at >= n) return;
    i64 rest = at;
    int column = rest % g.w; rest /= g.w;
    int row = rest % g.h; rest /= g.h;
    int c = rest % g.c;
    i64 b = rest / g.c;
    float total = 0;
    for (int p = 0; p < g.p; ++p) {
        int up = row + g.padding - p;
        if (up < 0 || up % g.stride || up / g.stride >= g.i) continue;
        for (int q = 0; q < g.q; ++q) {
            int left = column + g.padding - q;
            if (left < 0 || left % g.stride || left / g.stride >= g.j) continue;
            i64 depth = ((b * g.c + c) * g.p + p) * g.q + q;
            total += columns[(depth * g.i + up / g.stride) * g.j + left / g.stride];
        }
    }
    images[at] = total;
}

// y[b, o, count] += bias[o].
KERNEL add_channel_bias(float* y, const float* bias, i64 count, i64 outputs, i64 n) {
    begin();
    i64 i = thread_number();
    if (i < n) y[i] += bias[i / count % outputs];
}
