// One warp per row: s = x (+ f), y = normalised s gamma (+ beta). beta: LayerNorm, none: RMSNorm.
KERNEL norm_rows(float* y, float* stats, float* sums, const float* x, const float* f, const float* gamma, const float* beta, float eps, i64 rows, i64 d) {
    i64 row = warp_number();
    if (row >= rows) return;
    i64 at = row * d;
    float total = 0;
    for (i64 i = lane(); i < d; i += 32) {
        float s = x[at + i] + (f ? f[at + i] : 0.0f);
        // Kept in y until the row's moments are known.
        y[at + i] = s;
        if (sums) sums[at + i] = s;
        total += s;
    }
    float mean = beta ? warp_sum(total) / d : 0.0f, square = 0;
    for (i64 i = lane(); i < d; i += 32) {
        float s = y[at + i] - mean;
        square += s * s;
    }
    float inverse = 1.0f / sqrtf(warp_sum(square) / d + eps);
    if (stats && lane() == 0) {
        stats[2 * row] = mean;
        stats[2 * row + 1] = inverse;
    }
    for (i64 i = lane(); i < d; i += 32) {
        float n = (y[at + i] - mean) * inverse;
        y[at + i] = beta ? fmaf(n, gamma[i], beta[i]) : n * gamma[i];
    }
}

// Eight warps per block, each over rows of its own; columns of dgamma and dbeta are summed by block, then by the last block.
// partial: [blocks, 2 d]; dynamic shared memory: [8, 2 d].
KERNEL norm_grad(float* ds, float* dgamma, float* dbeta, float* partial, u32* counter, const float* s, const float* stats, const float* gamma,
                 const float* dy, const float* passed, int layer, i64 rows, i64 d) {
    extern __shared__ float shared[];
    int warp = threadIdx.x / 32;
    float* own = shared + warp * 2 * d;
    for (i64 i = lane(); i < 2 * d; i += 32) own[i] = 0.0f;
    for (i64 row = blockIdx.x * 8 + warp; row < rows; row += 8 * gridDim.x) {
        i64 at = row * d;
        float mean = stats[2 * row], inverse = stats[2 * row + 1], total = 0, along = 0;
        for (i64 i = lane(); i < d; i += 32) {
            float n = (s[at + i] - mean) * inverse, g = dy[at + i] * gamma[i];
            own[i] += n * dy[at + i];
            own[d + i] += dy[at + i];
            total += g;
            along += g * n;
        }
        if (!ds) continue;
        float mean_g = layer ? warp_sum(total) / d : 0.0f, mean_gn = warp_sum(along) / d;
        for (i64 i = lane(); i < d; i += 32) {
            float n = (s[at + i] - mean) * inverse, g = dy[at + i] * gamma[i];
            ds[at + i] = inverse * (g - mean_g - n * mean_gn) + (passed ? passed[at + i] : 0.0f);
        }
    }
    __syncthreads();
    for (i64 i = threadIdx.x; i < 2 * d; i += blockDim.x) {
        float total = 0;
        for (int w = 0; w < 8; ++w) total += shared[w * 2 * d + i];
        partial[blockIdx.x * 2 * d + i] = total;
    }
    if (!last_block(counter, gridDim.x)) return;
    for (i64 i = threadIdx.x; i < 2 * d; i += blockDim.x) {
        float total = 0;
        for (u32 b = 0; b < gridDim.x; ++b) total += partial[b * 2 * d + i];
        if (i < d) {
            if (dgamma) dgamma[i] = total;
        } else if (dbeta) {
            dbeta[i - d] = total;
        }
    }
}
