// One warp per row: s = x (+ f), y = normalised s gamma (+ beta). beta: LayerNorm, none: RMSNorm.
// stats, sums, f and beta may be null.
struct NormArgs {
    float *y, *stats, *sums;
    const float *x, *f, *gamma, *beta;
    i64 rows, d;
    float eps;
};
KERNEL norm_rows(NormArgs args) {
    begin();
    float *y = args.y, *stats = args.stats, *sums = args.sums, eps = args.eps;
    const float *x = args.x, *f = args.f, *gamma = args.gamma, *beta = args.beta;
    i64 rows = args.rows, d = args.d;
    i64 row = warp_number();
    if (row >= rows) return;
    i64 at = row * d;
    // The first 256 numbers of a row stay in registers, the rest is kept in y. All loads come before the
    // first store, or each load would wait for the store before it.
    float kept[8], scale[8], shift[8], total = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        i64 i = lane() + 32 * k;
        kept[k] = scale[k] = shift[k] = 0;
        if (i < d) {
            kept[k] = x[at + i] + (f ? f[at + i] : 0.0f);
            scale[k] = gamma[i];
            if (beta) shift[k] = beta[i];
        }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        i64 i = lane() + 32 * k;
        total += kept[k];
        if (i < d && sums) sums[at + i] = kept[k];
    }
    for (i64 i = lane() + 256; i < d; i += 32) {
        float s = x[at + i] + (f ? f[at + i] : 0.0f);
        y[at + i] = s;
        if (sums) sums[at + i] = s;
        total += s;
    }
    float mean = beta ? warp_sum(total) / d : 0.0f, square = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k)
        if (lane() + 32 * k < d) square += (kept[k] - mean) * (kept[k] - mean);
    for (i64 i = lane() + 256; i < d; i += 32) square += (y[at + i] - mean) * (y[at + i] - mean);
    float inverse = 1.0f / sqrtf(warp_sum(square) / d + eps);
    if (stats && lane() == 0) {
        stats[2 * row] = mean;
        stats[2 * row + 1] = inverse;
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        i64 i = lane() + 32 * k;
        float n = (kept[k] - mean) * inverse;
        if (i < d) y[at + i] = beta ? fmaf(n, scale[k], shift[k]) : n * scale[k];
    }
    for (i64 i = lane() + 256; i < d; i += 32) {
        float n = (y[at + i] - mean) * inverse;
        y[at + i] = beta ? fmaf(n, gamma[i], beta[i]) : n * gamma[i];
    }
}

// One warp per row. passed may be null.
struct NormGradArgs {
    float* ds;
    const float *s, *stats, *gamma, *dy, *passed;
    i64 rows, d;
    int layer;
};
KERNEL norm_grad(NormGradArgs args) {
    begin();
    float* ds = args.ds;
    const float *s = args.s, *stats = args.stats, *gamma = args.gamma, *dy = args.dy, *passed = args.passed;
    i64 rows = args.rows, d = args.d;
    int layer = args.layer;
    i64 row = warp_number();
    if (row >= rows) return;
    i64 at = row * d;
    float mean = stats[2 * row], inverse = stats[2 * row + 1], total = 0, along = 0;
    // As in norm_rows: 256 numbers in registers, all loads before the first store.
    float n[8], g[8], through[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        i64 i = lane() + 32 * k;
        n[k] = g[k] = through[k] = 0;
        if (i < d) {
            n[k] = s[at + i];
            g[k] = dy[at + i] * gamma[i];
            if (passed) through[k] = passed[at + i];
        }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        n[k] = (n[k] - mean) * inverse;
        total += g[k];
        along += g[k] * n[k];
    }
    for (i64 i = lane() + 256; i < d; i += 32) {
        float m = (s[at + i] - mean) * inverse, h = dy[at + i] * gamma[i];
        total += h;
        along += h * m;
    }
    float mean_g = layer ? warp_sum(total) / d : 0.0f, mean_gn = warp_sum(along) / d;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
        i64 i = lane() + 32 * k;
        if (i < d) ds[at + i] = inverse * (g[k] - mean_g - n[k] * mean_gn) + through[k];
    }
    for (i64 i = lane() + 256; i < d; i += 32) {
        float m = (s[at + i] - mean) * inverse, h = dy[at + i] * gamma[i];
        ds[at + i] = inverse * (h - mean_g - m * mean_gn) + (passed ? passed[at + i] : 0.0f);
    }
}

// dgamma = sum dy n and dbeta = sum dy by column; blocks of 32 columns by 32 rows sum a part of the rows, the
// last one the parts. partial: [parts, 2 d].
struct NormTablesArgs {
    float *dgamma, *dbeta, *partial;
    u32* counter;
    const float *s, *stats, *dy;
    i64 rows_per_part, rows, d;
};
KERNEL norm_tables(NormTablesArgs args) {
    begin();
    float *dgamma = args.dgamma, *dbeta = args.dbeta, *partial = args.partial;
    u32* counter = args.counter;
    const float *s = args.s, *stats = args.stats, *dy = args.dy;
    i64 rows_per_part = args.rows_per_part, rows = args.rows, d = args.d;
    __shared__ float sums[2][32][33];
    int tx = threadIdx.x & 31, ty = threadIdx.x >> 5;
    i64 c = (i64)blockIdx.x * 32 + tx, start = blockIdx.y * rows_per_part, end = min(rows, start + rows_per_part);
    float scale = 0, shift = 0;
    if (c < d)
        for (i64 r = start + ty; r < end; r += 32) {
            float g = dy[r * d + c];
            scale += (s[r * d + c] - stats[2 * r]) * stats[2 * r + 1] * g;
            shift += g;
        }
    sums[0][ty][tx] = scale;
    sums[1][ty][tx] = shift;
    __syncthreads();
    if (ty < 2 && c < d) {
        float all = 0;
        for (int i = 0; i < 32; ++i) all += sums[ty][i][tx];
        partial[(blockIdx.y * 2 + ty) * d + c] = all;
    }
    if (!last_block(counter, gridDim.x * gridDim.y)) return;
    for (i64 i = threadIdx.x; i < 2 * d; i += blockDim.x) {
        float all = 0;
        for (u32 part = 0; part < gridDim.y; ++part) all += partial[part * 2 * d + i];
        if (i < d) {
            if (dgamma) dgamma[i] = all;
        } else if (dbeta) {
            dbeta[i - d] = all;
        }
    }
}
