// One thread per token: the k largest logits (NaN counts as smallest, ties to the lowest), a softmax over
// them.
KERNEL route_top_k(float* gates, int* experts, const float* logits, int k, int count, i64 rows) {
    begin();
    i64 row = thread_number();
    if (row >= rows) return;
    logits += row * count;
    experts += row * k;
    for (int slot = 0; slot < k; ++slot) {
        int best = -1;
        for (int e = 0; e < count; ++e) {
            bool taken = false;
            for (int s = 0; s < slot; ++s) taken |= experts[s] == e;
            if (!taken && (best < 0 || logits[e] > logits[best] || (isnan(logits[best]) && !isnan(logits[e])))) best = e;
        }
        experts[slot] = best;
    }
    if (!gates) return;
    float top = logits[experts[0]], total = 0;
    for (int s = 0; s < k; ++s) total += gates[row * k + s] = expf(logits[experts[s]] - top);
    for (int s = 0; s < k; ++s) gates[row * k + s] /= total;
}

struct RouteGradArgs {
    float* dlogits;
    const float *dgates, *gates;
    const int* experts;
    i64 rows;
    int k, count;
};
KERNEL route_top_k_grad(RouteGradArgs args) {
    begin();
    float* dlogits = args.dlogits;
    const float *dgates = args.dgates, *gates = args.gates;
    const int* experts = args.experts;
    i64 rows = args.rows;
    int k = args.k, count = args.count;
    i64 row = thread_number();
    if (row >= rows) return;
    for (int e = 0; e < count; ++e) dlogits[row * count + e] = 0.0f;
    float mean = 0;
    for (int s = 0; s < k; ++s) mean += gates[row * k + s] * dgates[row * k + s];
    for (int s = 0; s < k; ++s) dlogits[row * count + experts[row * k + s]] = gates[row * k + s] * (dgates[row * k + s] - mean);
}

// E sum_e f_e g_e, summed over several routings: a block each. Entries of 3 words: gates, experts,
// assignments.
KERNEL load_balancing_loss(float* loss, double* partial, u32* counter, const u64* table, int count) {
    begin();
    const u64* entry = table + 3 * blockIdx.x;
    const float* gates = (const float*)entry[0];
    const int* experts = (const int*)entry[1];
    i64 n = (i64)entry[2];
    double all = 0;
    for (int e = 0; e < count; ++e) {
        double gate = 0, chosen = 0;
        for (i64 i = threadIdx.x; i < n; i += blockDim.x)
            if (experts[i] == e) {
                gate += gates[i];
                chosen += 1;
            }
        gate = block_sum(gate);
        chosen = block_sum(chosen);
        all += chosen / n * (gate / n);
    }
    if (threadIdx.x == 0) partial[blockIdx.x] = all;
    if (!last_block(counter, gridDim.x) || threadIdx.x != 0) return;
    double sum = 0;
    for (u32 b = 0; b < gridDim.x; ++b) sum += partial[b];
    *loss = (float)(count * sum);
}

// One block; dynamic shared memory: count integers.
KERNEL load_balancing_loss_grad(float* dgates, const float* grad, const int* experts, int count, i64 n) {
    begin();
    extern __shared__ u32 chosen[];
    for (int e = threadIdx.x; e < count; e += blockDim.x) chosen[e] = 0;
    __syncthreads();
    for (i64 i = threadIdx.x; i < n; i += blockDim.x)
        if (experts[i] >= 0 && experts[i] < count) atomicAdd(&chosen[experts[i]], 1);
    __syncthreads();
    for (i64 i = threadIdx.x; i < n; i += blockDim.x) {
        int e = experts[i];
        dgates[i] = e >= 0 && e < count ? (float)((double)*grad * count * chosen[e] / ((double)n * n)) : 0.0f;
    }
}
