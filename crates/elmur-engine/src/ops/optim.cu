// Entries of 8 words: old p, old m, old v, gradient, new p, new m, new v, first chunk; then the lengths. A chunk is 2048 elements.
KERNEL adamw(const u64* table, const i64* lengths, int count, const float* lr, const i64* step, const float* norm, float max_norm, double b1, double b2, double log_b1, double log_b2, float eps,
             float weight_decay, float lr_scale) {
    begin();
    __shared__ float rate[4];
    __shared__ int mine;
    if (threadIdx.x == 0) {
        double t = (double)(*step + 1), l = (double)*lr * lr_scale;
        double clip = norm ? fmin(1.0, (double)max_norm / ((double)*norm + 1e-6)) : 1.0;
        rate[0] = (float)clip;
        rate[1] = (float)(1.0 - l * weight_decay);
        rate[2] = (float)(l / (1.0 - exp(t * log_b1)));
        rate[3] = (float)(1.0 / sqrt(1.0 - exp(t * log_b2)));
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
    auto update = [&](float d, float& x, float& a, float& b) {
        d *= rate[0];
        a = f1 * a + n1 * d;
        b = f2 * b + n2 * d * d;
        x = x * rate[1] - rate[2] * a / (sqrtf(b) * rate[3] + eps);
    };
    // Four at a time where all start at multiples of 16 bytes, as nearly all tensors do.
    bool aligned = ((entry[0] | entry[1] | entry[2] | entry[3] | entry[4] | entry[5] | entry[6]) & 15) == 0;
    i64 whole = aligned ? start + (end - start) / 4 * 4 : start;
    for (i64 i = start + 4 * threadIdx.x; i < whole; i += 4 * blockDim.x) {
        float4 d = *(const float4*)(g + i), x = *(const float4*)(p + i), a = *(const float4*)(m + i), b = *(const float4*)(v + i);
        update(d.x, x.x, a.x, b.x);
        update(d.y, x.y, a.y, b.y);
        update(d.z, x.z, a.z, b.z);
        update(d.w, x.w, a.w, b.w);
        *(float4*)(new_p + i) = x;
        *(float4*)(new_m + i) = a;
        *(float4*)(new_v + i) = b;
    }
    for (i64 i = whole + threadIdx.x; i < end; i += blockDim.x) {
        float x = p[i], a = m[i], b = v[i];
        update(g[i], x, a, b);
        new_p[i] = x;
        new_m[i] = a;
        new_v[i] = b;
    }
}

// Entries of 3 words: gradient, length, first chunk. partial: one f64 per block.
KERNEL global_norm(float* norm, double* partial, u32* counter, const u64* table, int count) {
    begin();
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
    i64 whole = (entry[0] & 15) == 0 ? start + (end - start) / 4 * 4 : start;
    for (i64 i = start + 4 * threadIdx.x; i < whole; i += 4 * blockDim.x) {
        float4 x = *(const float4*)(g + i);
        total += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    }
    for (i64 i = whole + threadIdx.x; i < end; i += blockDim.x) total += g[i] * g[i];
    double sum = block_sum(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
    if (!last_block(counter, gridDim.x)) return;
    double all = 0;
    for (u32 b = threadIdx.x; b < gridDim.x; b += blockDim.x) all += partial[b];
    all = block_sum(all);
    if (threadIdx.x == 0) *norm = (float)sqrt(all);
}
