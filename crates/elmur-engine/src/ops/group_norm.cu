// One warp per sample and group; `count` groups in all samples. stats may be null.
struct GroupNormArgs {
    float *y, *stats;
    const float *x, *gamma, *beta;
    i64 count;
    int steps, channels, groups;
    float eps;
};
KERNEL group_norm(GroupNormArgs args) {
    begin();
    i64 number = warp_number();
    if (number >= args.count) return;
    int width = args.channels / args.groups, first = (int)(number % args.groups) * width, n = args.steps * width;
    i64 at = number / args.groups * args.steps * args.channels + first;
    const float* x = args.x + at;
    float* y = args.y + at;
    float total = 0, square = 0;
    for (int i = lane(); i < n; i += 32) total += x[(i64)(i / width) * args.channels + i % width];
    float mean = warp_sum(total) / n;
    for (int i = lane(); i < n; i += 32) {
        float d = x[(i64)(i / width) * args.channels + i % width] - mean;
        square += d * d;
    }
    float inverse = 1.0f / sqrtf(warp_sum(square) / n + args.eps);
    if (args.stats && lane() == 0) {
        args.stats[2 * number] = mean;
        args.stats[2 * number + 1] = inverse;
    }
    for (int i = lane(); i < n; i += 32) {
        int c = i % width;
        i64 k = (i64)(i / width) * args.channels + c;
        y[k] = fmaf((x[k] - mean) * inverse, args.gamma[first + c], args.beta[first + c]);
    }
}

// One warp per sample and group.
struct GroupNormGradArgs {
    float* dx;
    const float *x, *stats, *gamma, *dy;
    i64 count;
    int steps, channels, groups;
};
KERNEL group_norm_grad(GroupNormGradArgs args) {
    begin();
    i64 number = warp_number();
    if (number >= args.count) return;
    int width = args.channels / args.groups, first = (int)(number % args.groups) * width, n = args.steps * width;
    i64 at = number / args.groups * args.steps * args.channels + first;
    const float *x = args.x + at, *dy = args.dy + at, *gamma = args.gamma + first;
    float *dx = args.dx + at, mean = args.stats[2 * number], inverse = args.stats[2 * number + 1];
    float total = 0, along = 0;
    for (int i = lane(); i < n; i += 32) {
        int c = i % width;
        i64 k = (i64)(i / width) * args.channels + c;
        float g = dy[k] * gamma[c];
        total += g;
        along += g * ((x[k] - mean) * inverse);
    }
    total = warp_sum(total) / n;
    along = warp_sum(along) / n;
    for (int i = lane(); i < n; i += 32) {
        int c = i % width;
        i64 k = (i64)(i / width) * args.channels + c;
        dx[k] = inverse * (dy[k] * gamma[c] - total - (x[k] - mean) * inverse * along);
    }
}

// dgamma = sum dy n and dbeta = sum dy by channel; blocks of 32 channels by 32 rows sum a part of the rows,
// the last one the parts. Rows are steps of samples. partial: [parts, 2 channels]. dgamma and dbeta may be null.
struct GroupNormTablesArgs {
    float *dgamma, *dbeta, *partial;
    u32* counter;
    const float *x, *stats, *dy;
    i64 rows_per_part, rows;
    int steps, channels, groups;
};
KERNEL group_norm_tables(GroupNormTablesArgs args) {
    begin();
    __shared__ float sums[2][32][33];
    int tx = threadIdx.x & 31, ty = threadIdx.x >> 5;
    int d = args.channels, width = d / args.groups, c = blockIdx.x * 32 + tx;
    i64 start = blockIdx.y * args.rows_per_part, end = min(args.rows, start + args.rows_per_part);
    float scale = 0, shift = 0;
    if (c < d)
        for (i64 r = start + ty; r < end; r += 32) {
            float g = args.dy[r * d + c];
            const float* stats = args.stats + 2 * (r / args.steps * args.groups + c / width);
            scale += (args.x[r * d + c] - stats[0]) * stats[1] * g;
            shift += g;
        }
    sums[0][ty][tx] = scale;
    sums[1][ty][tx] = shift;
    __syncthreads();
    if (ty < 2 && c < d) {
        float all = 0;
        for (int i = 0; i < 32; ++i) all += sums[ty][i][tx];
        args.partial[((i64)blockIdx.y * 2 + ty) * d + c] = all;
    }
    if (!last_block(args.counter, gridDim.x * gridDim.y)) return;
    for (int i = threadIdx.x; i < 2 * d; i += blockDim.x) {
        float all = 0;
        for (u32 part = 0; part < gridDim.y; ++part) all += args.partial[(i64)part * 2 * d + i];
        float* to = i < d ? args.dgamma : args.dbeta;
        if (to) to[i < d ? i : i - d] = all;
    }
}

// Images [samples, channels, pixels], a block of 256 threads per sample and group. y: what is computed, which may be
// null for gradients; partial: [2, samples, channels] sums of dy n and of dy, may be null; stats may be null.
struct ImageNormArgs {
    float *y, *stats, *partial;
    const float *x, *gamma, *beta, *dy;
    int samples, channels, groups, pixels;
    float eps;
};
KERNEL __launch_bounds__(256) image_norm(ImageNormArgs args) {
    begin();
    constexpr int KEPT = 32;
    int width = args.channels / args.groups, first = blockIdx.x % args.groups * width, n = width * args.pixels;
    const float* x = args.x + (i64)blockIdx.x * n;
    float* y = args.y + (i64)blockIdx.x * n;
    // The first numbers stay in registers.
    float kept[KEPT], total = 0, square = 0;
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        int i = threadIdx.x + 256 * k;
        kept[k] = i < n ? x[i] : 0.0f;
        total += kept[k];
    }
    for (int i = threadIdx.x + 256 * KEPT; i < n; i += 256) total += x[i];
    float mean = (float)(block_sum((double)total) / n);
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        float d = kept[k] - mean;
        if ((int)threadIdx.x + 256 * k < n) square += d * d;
    }
    for (int i = threadIdx.x + 256 * KEPT; i < n; i += 256) square += (x[i] - mean) * (x[i] - mean);
    float inverse = 1.0f / sqrtf((float)(block_sum((double)square) / n) + args.eps);
    if (args.stats && threadIdx.x == 0) {
        args.stats[2 * (i64)blockIdx.x] = mean;
        args.stats[2 * (i64)blockIdx.x + 1] = inverse;
    }
    auto normal = [&](int i, float value) {
        int c = first + i / args.pixels;
        y[i] = fmaf((value - mean) * inverse, args.gamma[c], args.beta[c]);
    };
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        int i = threadIdx.x + 256 * k;
        if (i < n) normal(i, kept[k]);
    }
    for (int i = threadIdx.x + 256 * KEPT; i < n; i += 256) normal(i, x[i]);
}

// A warp per channel of the group.
KERNEL __launch_bounds__(256) image_norm_grad(ImageNormArgs args) {
    begin();
    constexpr int KEPT = 32;
    int warp = threadIdx.x / 32, width = args.channels / args.groups, group = blockIdx.x % args.groups, sample = blockIdx.x / args.groups;
    int pixels = args.pixels, channel = group * width;
    i64 at = ((i64)sample * args.channels + channel) * pixels;
    const float *x = args.x + at, *dy = args.dy + at, *gamma = args.gamma + channel;
    float *dx = args.y ? args.y + at : nullptr, mean = args.stats[2 * (i64)blockIdx.x], inverse = args.stats[2 * (i64)blockIdx.x + 1];
    // The first numbers of the warp's first channel stay in registers.
    float numbers[KEPT], grads[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        int i = lane() + 32 * k;
        bool inside = warp < width && i < pixels;
        numbers[k] = inside ? x[warp * pixels + i] : mean;
        grads[k] = inside ? dy[warp * pixels + i] : 0.0f;
    }
    float along = 0, total = 0;
    for (int c = warp; c < width; c += 8) {
        const float *from = x + (i64)c * pixels, *grad = dy + (i64)c * pixels;
        float a = 0, t = 0;
        if (c == warp) {
#pragma unroll
            for (int k = 0; k < KEPT; ++k) {
                a += grads[k] * (numbers[k] - mean);
                t += grads[k];
            }
        }
        for (int i = c == warp ? lane() + 32 * KEPT : lane(); i < pixels; i += 32) {
            a += grad[i] * (from[i] - mean);
            t += grad[i];
        }
        a = warp_sum(a) * inverse;
        t = warp_sum(t);
        if (args.partial && lane() == 0) {
            i64 to = (i64)sample * args.channels + channel + c;
            args.partial[to] = a;
            args.partial[(i64)args.samples * args.channels + to] = t;
        }
        along += gamma[c] * a;
        total += gamma[c] * t;
    }
    if (!dx) return;
    // All lanes of a warp have its sums.
    int n = width * pixels;
    along = (float)(block_sum(lane() == 0 ? (double)along : 0.0) / n);
    total = (float)(block_sum(lane() == 0 ? (double)total : 0.0) / n);
    for (int c = warp; c < width; c += 8) {
        const float *from = x + (i64)c * pixels, *grad = dy + (i64)c * pixels;
        float *to = dx + (i64)c * pixels, scale = gamma[c];
        auto one = [&](float number, float grad) { return inverse * (grad * scale - total - (number - mean) * inverse * along); };
        if (c == warp) {
#pragma unroll
            for (int k = 0; k < KEPT; ++k) {
                int i = lane() + 32 * k;
                if (i < pixels) to[i] = one(numbers[k], grads[k]);
            }
        }
        for (int i = c == warp ? lane() + 32 * KEPT : lane(); i < pixels; i += 32) to[i] = one(from[i], grad[i]);
    }
}
