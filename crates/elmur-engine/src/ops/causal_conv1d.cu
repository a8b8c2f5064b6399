// Depthwise causal convolution over time with SiLU; the formulas are in causal_conv1d.rs. [batch, steps,
// channels] where nothing else is said.
struct ConvArgs {
    const float *x, *weight, *bias, *window;  // weight [taps, channels], window [batch, taps - 1, channels]
    i64 batch, steps, channels, taps;
};

// Step i of a row's carried window and the steps x after it.
__device__ __forceinline__ float conv_step(const ConvArgs& a, i64 row, i64 i, i64 c) {
    i64 kept = a.taps - 1;
    return i < kept ? a.window[(row * kept + i) * a.channels + c] : a.x[(row * a.steps + i - kept) * a.channels + c];
}

// s of one step and channel.
__device__ __forceinline__ float convolve(const ConvArgs& a, i64 row, i64 t, i64 c) {
    float s = a.bias[c];
    for (i64 k = 0; k < a.taps; ++k) s = fmaf(a.weight[k * a.channels + c], conv_step(a, row, t + k, c), s);
    return s;
}

KERNEL causal_conv1d(float* y, ConvArgs a) {
    begin();
    i64 i = thread_number(), c = i % a.channels, at = i / a.channels;
    if (at >= a.batch * a.steps) return;
    float s = convolve(a, at / a.steps, at % a.steps, c);
    y[i] = s * sigmoid(s);
}

// One thread per row and channel. The next window may lie where the old one does: its steps are written oldest
// first, and each is read from a place that has not been written yet.
KERNEL causal_conv1d_window(float* next, ConvArgs a) {
    begin();
    i64 i = thread_number(), c = i % a.channels, row = i / a.channels, kept = a.taps - 1;
    if (row >= a.batch) return;
    for (i64 k = 0; k < kept; ++k) next[(row * kept + k) * a.channels + c] = conv_step(a, row, a.steps + k, c);
}

// g = dy silu'(s).
KERNEL causal_conv1d_backward(float* g, const float* dy, ConvArgs a) {
    begin();
    i64 i = thread_number(), c = i % a.channels, at = i / a.channels;
    if (at >= a.batch * a.steps) return;
    float s = convolve(a, at / a.steps, at % a.steps, c), p = sigmoid(s);
    g[i] = dy[i] * p * (1.0f + s * (1.0f - p));
}

// One thread per element of the carried window and the steps after it. dwindow and dnext may be null.
struct ConvSpread {
    float *dx, *dwindow;
    const float *g, *dnext, *weight;
    i64 batch, steps, channels, taps;
};
KERNEL causal_conv1d_spread(ConvSpread a) {
    begin();
    i64 kept = a.taps - 1, i = thread_number(), c = i % a.channels;
    i64 row = i / a.channels / (kept + a.steps), at = i / a.channels % (kept + a.steps);
    if (row >= a.batch) return;
    float sum = 0.0f;
    for (i64 k = 0; k < a.taps; ++k) {
        i64 t = at - k;
        if (t >= 0 && t < a.steps) sum = fmaf(a.weight[k * a.channels + c], a.g[(row * a.steps + t) * a.channels + c], sum);
    }
    if (a.dnext && at >= a.steps) sum += a.dnext[(row * kept + at - a.steps) * a.channels + c];
    if (at >= kept) {
        a.dx[(row * a.steps + at - kept) * a.channels + c] = sum;
    } else if (a.dwindow) {
        a.dwindow[(row * kept + at) * a.channels + c] = sum;
    }
}

// partial[part, k, c] = sum of g_t x_(t - taps + 1 + k) over `each` rows and steps; of g alone for k = taps.
// Blocks of 32 channels by 8 rows.
KERNEL causal_conv1d_sums(float* partial, const float* g, ConvArgs a, i64 each) {
    begin();
    __shared__ float sums[8][33];
    int tx = threadIdx.x & 31, ty = threadIdx.x >> 5;
    i64 c = (i64)blockIdx.x * 32 + tx, k = blockIdx.y;
    i64 start = blockIdx.z * each, end = min(a.batch * a.steps, start + each);
    float sum = 0.0f;
    if (c < a.channels) {
        for (i64 at = start + ty; at < end; at += 8) {
            float x = k < a.taps ? conv_step(a, at / a.steps, at % a.steps + k, c) : 1.0f;
            sum = fmaf(g[at * a.channels + c], x, sum);
        }
    }
    sums[ty][tx] = sum;
    __syncthreads();
    if (ty == 0 && c < a.channels) {
        float all = 0.0f;
        for (int i = 0; i < 8; ++i) all += sums[i][tx];
        partial[(blockIdx.z * (a.taps + 1) + k) * a.channels + c] = all;
    }
}
