// Entries of 8 words: old p, old m, old v, gradient, new p, new m, new v, first chunk; then the lengths. A chunk is 2048 elements.
KERNEL adamw(const u64* table, const i64* lengths, int count, const float* lr, const i64* step, const float* norm, float max_norm, double b1, double b2, float eps,
             float weight_decay, float lr_scale) {
    __shared__ float rate[4];
    __shared__ int mine;
    if (threadIdx.x == 0) {
        double t = (double)(*step + 1), l = (double)*lr * lr_scale;
        double clip = norm ? fmin(1.0, (double)max_norm / ((double)*norm + 1e-6)) : 1.0;
        rate[0] = (float)clip;
        rate[1] = (float)(1.0 - l * weight_decay);
        rate[2] = (float)(l / (1.0 - pow(b1, t)));
        rate[3] = (float)(1.0 / sqrt(1.0 - pow(b2, t)));
        int low = 0, high = count - 1;
        while (low < high) {
            int middle = (low + high + 1) / 2;
            if (table[8 * middle + 7] <= blockIdx.x) low = middle;
            else high = middle - 1;
        }
        mine = low;
    }
    __syncthreads();
    const u64* entry = table + 8 * mine;
    const float *p = (const float*)entry[0], *m = (const float*)entry[1], *v = (const float*)entry[2], *g = (const float*)entry[3];
    float *new_p = (float*)entry[4], *new_m = (float*)entry[5], *new_v = (float*)entry[6];
    i64 start = (i64)(blockIdx.x - entry[7]) * 2048, end = min(lengths[mine], start + 2048);
    float f1 = (float)b1, f2 = (float)b2, n1 = (float)(1.0 - b1), n2 = (float)(1.0 - b2);
    for (i64 i = start + threadIdx.x; i < end; i += blockDim.x) {
        float d = g[i] * rate[0];
        float a = f1 * m[i] + n1 * d, b = f2 * v[i] + n2 * d * d;
        new_m[i] = a;
        new_v[i] = b;
        new_p[i] = p[i] * rate[1] - rate[2] * a / (sqrtf(b) * rate[3] + eps);
    }
}

// Entries of 3 words: gradient, length, first chunk. partial: one f64 per block.
KERNEL global_norm(float* norm, double* partial, u32* counter, const u64* table, int count) {
    __shared__ int mine;
    if (threadIdx.x == 0) {
        int low = 0, high = count - 1;
        while (low < high) {
            int middle = (low + high + 1) / 2;
            if (table[3 * middle + 2] <= blockIdx.x) low = middle;
            else high = middle - 1;
        }
        mine = low;
    }
    __syncthreads();
    const u64* entry = table + 3 * mine;
    const float* g = (const float*)entry[0];
    i64 start = (i64)(blockIdx.x - entry[2]) * 2048, end = min((i64)entry[1], start + 2048);
    float total = 0;
    for (i64 i = start + threadIdx.x; i < end; i += blockDim.x) total += g[i] * g[i];
    double sum = block_sum(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
    if (!last_block(counter, gridDim.x)) return;
    double all = 0;
    for (u32 b = threadIdx.x; b < gridDim.x; b += blockDim.x) all += partial[b];
    all = block_sum(all);
    if (threadIdx.x == 0) *norm = (float)sqrt(all);
}
