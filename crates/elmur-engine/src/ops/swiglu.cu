KERNEL swiglu(float* y, const float* h, i64 f, i64 n) {
    i64 i = thread_number();
    if (i >= n) return;
    const float* row = h + i / f * 2 * f + i % f;
    float g = row[0];
    y[i] = g * sigmoid(g) * row[f];
}

// dh = [dy u silu'(g), dy silu(g)]; may stand where h does.
KERNEL swiglu_grad(float* dh, const float* h, const float* dy, i64 f, i64 n) {
    i64 i = thread_number();
    if (i >= n) return;
    i64 at = i / f * 2 * f + i % f;
    float g = h[at], u = h[at + f], d = dy[i], s = sigmoid(g), silu = g * s;
    dh[at] = d * u * (s + silu * (1.0f - s));
    dh[at + f] = d * silu;
}
