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

// Slots of a batch row that a block of lru_blend or lru_blend_grad takes, one of gridDim.y parts of them, and for each
// the candidate whose slot it is, or -1. Dynamic shared memory: an int per slot.
struct OwnSlots {
    int first, count, *candidate;
};
__device__ __forceinline__ OwnSlots own_slots(const int* slots, int w, int m) {
    extern __shared__ int candidate[];
    int first = (int)((i64)m * blockIdx.y / gridDim.y), count = (int)((i64)m * (blockIdx.y + 1) / gridDim.y) - first;
    for (int s = threadIdx.x; s < count; s += blockDim.x) candidate[s] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < w; i += blockDim.x) {
        int s = slots[i] - first;
        if (s >= 0 && s < count) candidate[s] = i;
    }
    __syncthreads();
    return {first, count, candidate};
}

// Grid (batch rows, parts of the slots), a warp for every slot. Outputs may be their inputs (in place), or null.
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
    i64 b = blockIdx.x, d = args.d;
    OwnSlots own = own_slots(args.slots + b * args.w, args.w, args.m);
    bool written = !args.active || args.active[b];
    for (int s = threadIdx.x / 32; s < own.count; s += blockDim.x / 32) {
        i64 slot = b * args.m + own.first + s, anchor = args.anchors[slot];
        int i = written ? own.candidate[s] : -1;
        float a = blend_weight(anchor, args.lambda, args.empty_too);
        const float *old = args.memory + slot * d, *candidate = args.candidates + (b * args.w + i) * d;
        // All lanes have read the anchor before it changes in place.
        __syncwarp();
        if (lane() == 0 && args.new_anchors) args.new_anchors[slot] = i < 0 ? anchor : args.times[b];
        if (!args.new_memory) continue;
#pragma unroll 4
        for (i64 at = lane(); at < d; at += 32) {
            float x = old[at];
            args.new_memory[slot * d + at] = i < 0 ? x : a * candidate[at] + (1.0f - a) * x;
        }
    }
}

// Grid (batch rows, parts of the slots), a warp for every slot and for the candidate that was blended into it.
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
    i64 b = blockIdx.x, d = args.d;
    OwnSlots own = own_slots(args.slots + b * args.w, args.w, args.m);
    bool written = !args.active || args.active[b];
    for (int s = threadIdx.x / 32; s < own.count; s += blockDim.x / 32) {
        i64 slot = b * args.m + own.first + s;
        int i = own.candidate[s];
        float a = written && i >= 0 ? blend_weight(args.anchors[slot], args.lambda, args.empty_too) : 0.0f;
#pragma unroll 4
        for (i64 at = lane(); at < d; at += 32) {
            float g = args.grad[slot * d + at];
            if (args.dmemory) args.dmemory[slot * d + at] = (1.0f - a) * g;
            if (args.dcandidates && i >= 0) args.dcandidates[(b * args.w + i) * d + at] = a * g;
        }
    }
}
