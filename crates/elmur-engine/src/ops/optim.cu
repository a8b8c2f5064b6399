// A block of 256 threads takes a chunk of up to 2048 elements, eight per thread; every chunk has an entry of
// its own.

// Entries of 8 words: old p, old m, old v, gradient, new p, new m, new v, elements.
struct AdamWArgs {
    const u64* table;
    const float *lr, *norm;
    const i64* step;
    double b1, b2, log_b1, log_b2;
    float max_norm, eps, weight_decay, lr_scale;
    i64 settled;  // whether all but the norm may be read before begin()
};
KERNEL adamw(AdamWArgs args) {
    if (!args.settled) begin();
    const u64* table = args.table;
    const float *lr = args.lr, *norm = args.norm;
    const i64* step = args.step;
    double b1 = args.b1, b2 = args.b2, log_b1 = args.log_b1, log_b2 = args.log_b2;
    float max_norm = args.max_norm, eps = args.eps, weight_decay = args.weight_decay, lr_scale = args.lr_scale;
    __shared__ float rate[4];
    const u64* entry = table + 8 * (i64)blockIdx.x;
    const float *p = (const float*)entry[0], *m = (const float*)entry[1], *v = (const float*)entry[2], *g = (const float*)entry[3];
    float *new_p = (float*)entry[4], *new_m = (float*)entry[5], *new_v = (float*)entry[6];
    int count = (int)entry[7];
    // Four at a time if all pointers are multiples of 16 bytes, as for nearly all tensors. All loads come
    // before the rates are known.
    bool aligned = ((entry[0] | entry[1] | entry[2] | entry[3] | entry[4] | entry[5] | entry[6]) & 15) == 0;
    int whole = aligned ? count / 4 * 4 : 0;
    float4 d[2], x[2], a[2], b[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        int i = 4 * (threadIdx.x + 256 * k);
        if (i < whole) d[k] = *(const float4*)(g + i), x[k] = *(const float4*)(p + i), a[k] = *(const float4*)(m + i), b[k] = *(const float4*)(v + i);
    }
    if (threadIdx.x == 0) {
        double t = (double)(*step + 1), l = (double)*lr * lr_scale;
        rate[1] = (float)(1.0 - l * weight_decay);
        rate[2] = (float)(l / (1.0 - exp(t * log_b1)));
        rate[3] = (float)(1.0 / sqrt(1.0 - exp(t * log_b2)));
    }
    if (args.settled) begin();
    if (threadIdx.x == 0) {
        double clip = norm ? fmin(1.0, (double)max_norm / ((double)*norm + 1e-6)) : 1.0;
        rate[0] = (float)clip;
    }
    __syncthreads();
    float f1 = (float)b1, f2 = (float)b2, n1 = (float)(1.0 - b1), n2 = (float)(1.0 - b2);
    auto update = [&](float d, float& x, float& a, float& b) {
        d *= rate[0];
        a = f1 * a + n1 * d;
        b = f2 * b + n2 * d * d;
        x = x * rate[1] - rate[2] * a / (sqrtf(b) * rate[3] + eps);
    };
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        int i = 4 * (threadIdx.x + 256 * k);
        if (i >= whole) continue;
        update(d[k].x, x[k].x, a[k].x, b[k].x);
        update(d[k].y, x[k].y, a[k].y, b[k].y);
        update(d[k].z, x[k].z, a[k].z, b[k].z);
        update(d[k].w, x[k].w, a[k].w, b[k].w);
        *(float4*)(new_p + i) = x[k];
        *(float4*)(new_m + i) = a[k];
        *(float4*)(new_v + i) = b[k];
    }
    for (int i = whole + threadIdx.x; i < count; i += 256) {
        float x = p[i], a = m[i], b = v[i];
        update(g[i], x, a, b);
        new_p[i] = x;
        new_m[i] = a;
        new_v[i] = b;
    }
}

// Entries of 2 words: gradient, elements. partial: one f64 per block.
KERNEL global_norm(float* norm, double* partial, u32* counter, const u64* table) {
    begin();
    const u64* entry = table + 2 * (i64)blockIdx.x;
    const float* g = (const float*)entry[0];
    int count = (int)entry[1], whole = (entry[0] & 15) == 0 ? count / 4 * 4 : 0;
    float total = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        int i = 4 * (threadIdx.x + 256 * k);
        float4 x = i < whole ? *(const float4*)(g + i) : float4{};
        total += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    }
    for (int i = whole + threadIdx.x; i < count; i += 256) total += g[i] * g[i];
    double sum = block_sum(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
    if (!last_block(counter, gridDim.x)) return;
    double all = 0;
#pragma unroll 4
    for (u32 b = threadIdx.x; b < gridDim.x; b += 256) all += partial[b];
    all = block_sum(all);
    if (threadIdx.x == 0) *norm = (float)sqrt(all);
}
