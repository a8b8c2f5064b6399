// One warp per row: the `count` least recently used slots, empty ones first, ties to the lowest index.
KERNEL lru_select(int* slots, i64* times, const i64* anchors, int count, int m, i64 rows) {
    begin();
    i64 row = warp_number();
    if (row >= rows) return;
    anchors += row * m;
    // The slot chosen last; those that come before it, by key and number, were chosen already.
    i64 last_key = 0;
    int last = -1;
    for (int i = 0; i < count; ++i) {
        int best = -1;
        i64 best_key = 0;
        for (int s = lane(); s < m; s += 32) {
            i64 key = max(anchors[s], (i64)-1);
            bool later = last < 0 || key > last_key || (key == last_key && s > last);
            if (later && (best < 0 || key < best_key)) {
                best = s;
                best_key = key;
            }
        }
        for (int o = 16; o; o >>= 1) {
            int other = __shfl_xor_sync(0xffffffffu, best, o);
            i64 other_key = __shfl_xor_sync(0xffffffffu, best_key, o);
            if (other >= 0 && (best < 0 || other_key < best_key || (other_key == best_key && other < best))) {
                best = other;
                best_key = other_key;
            }
        }
        if (lane() == 0 && slots) slots[row * count + i] = best;
        if (lane() == 0 && times) times[row * count + i] = anchors[best];
        last = best;
        last_key = best_key;
    }
}

// Slots [B, w] of a memory [B, m, d]: read from `from` into `to` [B, w, d], or added from `from` [B, w, d]
// into `to`.
struct SlotArgs {
    float* to;
    const float* from;
    const int* slots;
    i64 d, n;
    int w, m;
};
KERNEL gather_slots(SlotArgs args) {
    begin();
    i64 i = thread_number(), d = args.d;
    if (i >= args.n) return;
    i64 row = i / d;
    int slot = args.slots[row], m = args.m;
    args.to[i] = slot >= 0 && slot < m ? args.from[(row / args.w * m + slot) * d + i % d] : NOT_A_NUMBER;
}

// Into zeros; slots of a row are distinct.
KERNEL scatter_slots(SlotArgs args) {
    begin();
    i64 i = thread_number(), d = args.d;
    if (i >= args.n) return;
    i64 row = i / d;
    int slot = args.slots[row], m = args.m;
    if (slot >= 0 && slot < m) args.to[(row / args.w * m + slot) * d + i % d] += args.from[i];
}

__device__ __forceinline__ float blend_weight(i64 anchor, float lambda, int empty_too) { return anchor < 0 && !empty_too ? 1.0f : lambda; }

// One block per batch row. Outputs may be their inputs (in place), or null. Dynamic shared memory: w floats.
struct BlendArgs {
    float* new_memory;
    i64* new_anchors;
    const float *memory, *candidates;
    const i64 *anchors, *times;
    const int* slots;
    const unsigned char* active;
    i64 d;
    int w, m, empty_too;
    float lambda;
};
KERNEL lru_blend(BlendArgs args) {
    begin();
    float *new_memory = args.new_memory, lambda = args.lambda;
    i64* new_anchors = args.new_anchors;
    const float *memory = args.memory, *candidates = args.candidates;
    const i64 *anchors = args.anchors, *times = args.times;
    const int* slots = args.slots;
    const unsigned char* active = args.active;
    i64 d = args.d;
    int w = args.w, m = args.m, empty_too = args.empty_too;
    extern __shared__ float shared[];
    i64 b = blockIdx.x;
    bool written = !active || active[b];
    for (int i = threadIdx.x; i < w; i += blockDim.x) shared[i] = blend_weight(anchors[b * m + slots[b * w + i]], lambda, empty_too);
    __syncthreads();
    for (int s = threadIdx.x; s < m && new_anchors; s += blockDim.x) {
        i64 anchor = anchors[b * m + s];
        for (int i = 0; i < w && written; ++i)
            if (slots[b * w + i] == s) anchor = times[b];
        new_anchors[b * m + s] = anchor;
    }
    for (i64 at = threadIdx.x; at < m * d && new_memory; at += blockDim.x) {
        float x = memory[b * m * d + at];
        for (int i = 0; i < w && written; ++i)
            if (slots[b * w + i] == at / d) x = shared[i] * candidates[(b * w + i) * d + at % d] + (1.0f - shared[i]) * x;
        new_memory[b * m * d + at] = x;
    }
}

// One block per batch row.
struct BlendGradArgs {
    float *dmemory, *dcandidates;
    const float* grad;
    const i64* anchors;
    const int* slots;
    const unsigned char* active;
    i64 d;
    int w, m, empty_too;
    float lambda;
};
KERNEL lru_blend_grad(BlendGradArgs args) {
    begin();
    float *dmemory = args.dmemory, *dcandidates = args.dcandidates, lambda = args.lambda;
    const float* grad = args.grad;
    const i64* anchors = args.anchors;
    const int* slots = args.slots;
    const unsigned char* active = args.active;
    i64 d = args.d;
    int w = args.w, m = args.m, empty_too = args.empty_too;
    i64 b = blockIdx.x;
    bool written = !active || active[b];
    for (i64 i = threadIdx.x; i < m * d && dmemory; i += blockDim.x) {
        float a = 0.0f;
        for (int s = 0; s < w; ++s)
            if (written && slots[b * w + s] == i / d) a = blend_weight(anchors[b * m + i / d], lambda, empty_too);
        dmemory[b * m * d + i] = (1.0f - a) * grad[b * m * d + i];
    }
    for (i64 i = threadIdx.x; i < w * d && dcandidates; i += blockDim.x) {
        int slot = slots[b * w + i / d];
        float a = written ? blend_weight(anchors[b * m + slot], lambda, empty_too) : 0.0f;
        dcandidates[b * w * d + i] = a * grad[(b * m + slot) * d + i % d];
    }
}
