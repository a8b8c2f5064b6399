struct Windows {
    int channels, kernel, steps, windows, stride, padding;
};

// One block per window: y[b, window, kernel channels] from x[b, steps, channels]. The numbers of a window lie
// one after the other in x; those before and behind are zeros.
KERNEL unfold_steps(float* y, const float* x, Windows g) {
    begin();
    i64 b = blockIdx.x / g.windows;
    int first = (int)(blockIdx.x % g.windows) * g.stride - g.padding, width = g.kernel * g.channels;
    int low = max(0, -first) * g.channels, high = (g.steps - first) * g.channels;
    y += (i64)blockIdx.x * width;
    x += (b * g.steps + first) * g.channels;
    for (int i = threadIdx.x; i < width; i += blockDim.x) y[i] = i >= low && i < high ? x[i] : 0.0f;
}

// The transpose of unfold_steps: one block per step adds up the windows that the step was in.
KERNEL fold_steps(float* y, const float* rows, Windows g) {
    begin();
    i64 b = blockIdx.x / g.steps;
    int step = (int)(blockIdx.x % g.steps);
    y += (i64)blockIdx.x * g.channels;
    rows += b * g.windows * g.kernel * g.channels;
    for (int c = threadIdx.x; c < g.channels; c += blockDim.x) {
        float total = 0;
        for (int p = 0; p < g.kernel; ++p) {
            int ahead = step + g.padding - p, window = ahead / g.stride;
            if (ahead >= 0 && ahead % g.stride == 0 && window < g.windows)
                total += rows[((i64)window * g.kernel + p) * g.channels + c];
        }
        y[c] = total;
    }
}
