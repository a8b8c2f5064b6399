// An LSTM over a window, as in lstm.cu, for widths W whose whole weight fits one multiprocessor, or the C
// multiprocessors of a cluster of blocks: each thread holds its part of the weight, most of it in registers,
// the rest in shared memory. So a step reads nothing from far away. Each block computes W / C of the units; a
// step ends when what it computed has arrived in all blocks. The weight is read before begin() where it may be.
//
// A product divides the weight into tiles. Four neighbouring threads compute U units of all R rows of a block
// (16 / U threads four units in the backward pass); each adds up a part of the depth, and then the sums are
// added up and handed out among those threads: LANES = 4 / (U R) of them share one unit of one row, and each
// of these goes on with GATES = U R of its four gates.

// The weights of one of THREADS threads: COUNT vectors of four, HELD of them in registers. The others lie in
// shared memory, evenly between them, so that their reads do not all come at once. Every index must be known
// to the compiler.
template <int COUNT, int HELD, int THREADS> struct HeldWeights {
    float4 held[HELD];
    float* rest;  // [COUNT - HELD, THREADS, 4]

    __device__ __forceinline__ explicit HeldWeights(float* shared) : rest(shared + 4 * threadIdx.x) {}
    // How many of the vectors before vector i are in registers.
    static __device__ __forceinline__ constexpr int held_before(int i) { return i * HELD / COUNT; }
    static __device__ __forceinline__ constexpr bool is_held(int i) { return held_before(i + 1) > held_before(i); }
    __device__ __forceinline__ float* spot(int i) const { return rest + 4 * THREADS * (i - held_before(i)); }
    // Reads vector i; complete after copies_done().
    __device__ __forceinline__ void load(int i, const float* from) {
        if (is_held(i)) {
            held[held_before(i)] = *(const float4*)from;
        } else {
            copy_async(spot(i), from, true);
        }
    }
    __device__ __forceinline__ float4 get(int i) const { return is_held(i) ? held[held_before(i)] : *(const float4*)spot(i); }
};

// Adds up sums[COUNT] over 2 OFFSET neighbouring threads and hands them out: each thread has LEFT of the
// totals, in sums[0] and so on; threads that have the same ones are neighbours.
template <int COUNT, int LEFT, int OFFSET> __device__ __forceinline__ void scatter_sums(float* sums) {
    constexpr int NEXT = COUNT > LEFT ? COUNT / 2 : COUNT;
    bool upper = lane() & OFFSET;
#pragma unroll
    for (int i = 0; i < NEXT; ++i) {
        float keep = sums[i], give = sums[i];
        if (COUNT > LEFT) {
            float other = sums[i + COUNT - NEXT];
            keep = upper ? other : keep;
            give = upper ? give : other;
        }
        sums[i] = keep + __shfl_xor_sync(0xffffffffu, give, OFFSET);
    }
    if constexpr (OFFSET > 1) scatter_sums<NEXT, LEFT, OFFSET / 2>(sums);
}

// The four gates of a unit, from the GATES that each of the threads which share it has.
template <int GATES> __device__ __forceinline__ void share_gates(float* all, const float* own) {
    constexpr int LANES = 4 / GATES;
#pragma unroll
    for (int gate = 0; gate < 4; ++gate) {
        float x = own[gate % GATES];
        all[gate] = LANES == 1 ? x : __shfl_sync(0xffffffffu, x, (lane() & ~(LANES - 1)) | (gate / GATES));
    }
}

// tanh(x) if `hyperbolic`, else the sigmoid of x; without branches, and with a relative error below 1e-6.
__device__ __forceinline__ float activated(float x, bool hyperbolic) {
    float s = __fdividef(1.0f, 1.0f + expf(hyperbolic ? -2.0f * x : -x));
    // Near zero, 2 s - 1 would lose the digits of tanh(x).
    float square = x * x;
    float series = fmaf(fmaf(fmaf(0.017988745f, square, -0.053387109f), square, 0.13330476f), square, -0.3333331f);
    float tanh = fabsf(x) < 0.5f ? fmaf(x * square, series, x) : fmaf(2.0f, s, -1.0f);
    return hyperbolic ? tanh : s;
}

// What the C blocks of a cluster compute at every step and all of them need: COUNT numbers in the shared memory
// of each, twice, since a block may be a step ahead. `step` counts from 1. Blocks of a cluster of one need no
// more than a barrier; others send each number to all, where a barrier in shared memory counts the bytes that
// have arrived. Nothing is sent to a block that might have ended, as long as each step that begins is completed.
template <int C, int COUNT> struct Exchange {
    float* data;      // [2, COUNT]
    u32 barriers;     // of even and odd steps
    u32 there[C][2];  // where each block has data and barriers

    // All threads of the cluster make one, before the first step.
    __device__ __forceinline__ explicit Exchange(float* shared) : data(shared) {
        if constexpr (C > 1) {
#if __CUDA_ARCH__ >= 900
            __shared__ u64 counted[2];
            barriers = (u32)__cvta_generic_to_shared(counted);
            if (threadIdx.x == 0) {
                for (int i = 0; i < 2; ++i) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers + 8 * i) : "memory");
                asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            }
            u32 own = (u32)__cvta_generic_to_shared(data);
#pragma unroll
            for (int rank = 0; rank < C; ++rank) {
                asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there[rank][0]) : "r"(own), "r"(rank));
                asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there[rank][1]) : "r"(barriers), "r"(rank));
            }
            cluster_arrive();
            cluster_wait();
#endif
        }
    }
    __device__ __forceinline__ float* at(int step) const { return data + (step & 1) * COUNT; }
    // Before the first `put` of a step, by all threads.
    __device__ __forceinline__ void begin_step(int step) const {
#if __CUDA_ARCH__ >= 900
        if (C > 1 && threadIdx.x == 0) {
            asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;}" ::"r"(barriers + 8 * (step & 1)), "r"(4 * COUNT) : "memory");
        }
#endif
    }
    // Number i of a step, which one thread of the cluster gives.
    __device__ __forceinline__ void put(int step, int i, float x) const {
        if constexpr (C == 1) {
            at(step)[i] = x;
        } else {
#if __CUDA_ARCH__ >= 900
#pragma unroll
            for (int rank = 0; rank < C; ++rank) {
                u32 to = there[rank][0] + 4 * ((step & 1) * COUNT + i), barrier = there[rank][1] + 8 * (step & 1);
                asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to), "f"(x), "r"(barrier) : "memory");
            }
#endif
        }
    }
    // Returns when all numbers of a step are there. By all threads.
    __device__ __forceinline__ void complete(int step) const {
        if constexpr (C == 1) {
            __syncthreads();
        } else {
#if __CUDA_ARCH__ >= 900
            u32 barrier = barriers + 8 * (step & 1), parity = (step - 1) >> 1 & 1, done;
            do {
                asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                             : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
            } while (!done);
#endif
        }
    }
};

// Shared memory: h twice [2, R, W], then weights. weight is [4 W, W].
template <int W, int R, int U, int HELD, int C> __device__ __forceinline__ void lstm_forward_held(const LstmForward& a) {
    constexpr int THREADS = 4 * W / C / U, GATES = U * R, LANES = 4 / GATES;
    extern __shared__ float shared[];
    Exchange<C, R * W> h(shared);
    HeldWeights<U * W / 4, HELD, THREADS> weights(shared + 2 * R * W);
    // In products this thread has every fourth vector of the depth, of the gates of U units.
    int part = (int)threadIdx.x % 4, first_unit = C == 1 ? 0 : cluster_rank() * (W / C);
    const float* mine = a.weight + (first_unit + (int)threadIdx.x / 4 * U) * W + 4 * part;
#pragma unroll
    for (int i = 0; i < W / 16; ++i) {
#pragma unroll
        for (int c = 0; c < 4 * U; ++c) weights.load(i * 4 * U + c, mine + (c % 4 * W + c / 4) * W + 16 * i);
    }
    if (a.settled) begin();
    i64 first = (i64)blockIdx.x * R;
    int rows = (int)min((i64)R, a.batch - first);
    for (int i = threadIdx.x; i < R * W; i += THREADS) h.at(0)[i] = i < rows * W ? a.first_hidden[first * W + i] : 0.0f;
    // Apart from products it has the GATES gates from GATES * sub on, of this unit of this row.
    int number = (int)threadIdx.x / LANES, unit = first_unit + number / R, row = number % R, sub = (int)threadIdx.x % LANES;
    bool works = row < rows;
    int steps = (int)a.steps;
    i64 state = (first + row) * W + unit, at = (first + row) * steps * 4 * W + sub * GATES * W + unit;
    float cell = works ? a.first_cell[state] : 0.0f, shown = works ? a.first_hidden[state] : 0.0f;
    const float* x = a.x + at;
    float *gates = a.gates + at, bias[GATES], input[GATES];
#pragma unroll
    for (int j = 0; j < GATES; ++j) {
        bias[j] = a.bias[(sub * GATES + j) * W + unit];
        input[j] = works && steps > 0 ? x[j * W] + bias[j] : 0.0f;
    }
    // Of hidden, cells and before each thread writes every LANES-th.
    constexpr int KEPT = (2 + LANES) / LANES;
    float* kept[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; ++k) {
        int which = k * LANES + sub;
        kept[k] = which == 0 ? a.hidden : which == 1 ? a.cells : which == 2 ? a.before : nullptr;
        if (kept[k]) kept[k] = works ? kept[k] + (first + row) * steps * W + unit : nullptr;
    }
    bool keeps_gates = works && a.gates;
    copies_done();
    __syncthreads();
    for (int t = 0; t < steps; ++t) {
        // Inputs of the next step, which arrive during the product.
        float next[GATES];
        x += 4 * W;
#pragma unroll
        for (int j = 0; j < GATES; ++j) next[j] = works && t + 1 < steps ? x[j * W] : 0.0f;
        const float* now = h.at(t) + 4 * part;
        bool goes_on = t + 1 < steps;
        if (goes_on) h.begin_step(t + 1);
        float sums[4 * GATES] = {};
#pragma unroll
        for (int i = 0; i < W / 16; ++i) {
            float4 y[R];
#pragma unroll
            for (int r = 0; r < R; ++r) y[r] = *(const float4*)(now + r * W + 16 * i);
#pragma unroll
            for (int c = 0; c < 4 * U; ++c) {
                float4 w = weights.get(i * 4 * U + c);
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    float& sum = sums[(c / 4 * R + r) * 4 + c % 4];
                    sum = fmaf(w.w, y[r].w, fmaf(w.z, y[r].z, fmaf(w.y, y[r].y, fmaf(w.x, y[r].x, sum))));
                }
            }
        }
        scatter_sums<4 * GATES, GATES, 2>(sums);
        float own[GATES], all[4], before = shown;
#pragma unroll
        for (int j = 0; j < GATES; ++j) own[j] = activated(sums[j] + input[j], sub * GATES + j == 2);
        share_gates<GATES>(all, own);
        cell = fmaf(all[1], cell, all[0] * all[2]);
        shown = all[3] * activated(cell, true);
        if (goes_on && sub == 0) h.put(t + 1, row * W + unit, shown);
        if (C == 1) h.complete(t + 1);
#pragma unroll
        for (int j = 0; j < GATES; ++j) {
            if (keeps_gates) gates[j * W] = own[j];
            input[j] = next[j] + bias[j];
        }
        gates += 4 * W;
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            int which = k * LANES + sub;
            if (kept[k]) *kept[k] = which == 0 ? shown : which == 1 ? cell : before, kept[k] += W;
        }
        // What is on its way to other blocks travels while this one writes.
        if (C > 1 && goes_on) h.complete(t + 1);
    }
    if (works && sub == 0 && a.last_hidden) a.last_hidden[state] = shown;
    if (works && sub == 0 && a.last_cell) a.last_cell[state] = cell;
}

// What the gradients of a step are made of, of one unit of one row: those of the cell and of GATES gates are
// factors of those of the hidden state and the cell.
template <int GATES> struct StepFactors {
    float cell, forget, gates[GATES];

    // From the gates of this thread, which are those from GATES * sub on, the cell state and the one before.
    __device__ __forceinline__ void set(const float* own, int sub, float now, float before) {
        float all[4];
        share_gates<GATES>(all, own);
        float in = all[0], candidate = all[2], out = all[3], shown = activated(now, true);
        forget = all[1];
        cell = out * (1.0f - shown * shown);
        float factors[4];
        factors[0] = candidate * (in * (1.0f - in));
        factors[1] = before * (forget * (1.0f - forget));
        factors[2] = in * (1.0f - candidate * candidate);
        factors[3] = shown * (out * (1.0f - out));
#pragma unroll
        for (int j = 0; j < GATES; ++j) {
            gates[j] = factors[j];
#pragma unroll
            for (int other = 1; other < 4 / GATES; ++other) {
                if (sub == other) gates[j] = factors[other * GATES + j];
            }
        }
    }
};

// Shared memory: dz twice [2, R, W, 4], then weights. weight is [4 W, W].
template <int W, int R, int U, int HELD, int C> __device__ __forceinline__ void lstm_backward_held(const LstmBackward& a) {
    constexpr int THREADS = 4 * W / C / U, GATES = U * R, LANES = 4 / GATES, GROUP = 16 / U;
    extern __shared__ float shared[];
    Exchange<C, 4 * R * W> dz(shared);
    HeldWeights<U * W / 4, HELD, THREADS> weights(shared + 8 * R * W);
    // In products this thread has the gates of every GROUP-th unit, for gradients of four units.
    int part = (int)threadIdx.x % GROUP, first_unit = C == 1 ? 0 : cluster_rank() * (W / C);
    const float* mine = a.weight + part * W + first_unit + (int)threadIdx.x / GROUP * 4;
#pragma unroll
    for (int i = 0; i < W / GROUP; ++i) {
#pragma unroll
        for (int gate = 0; gate < 4; ++gate) weights.load(4 * i + gate, mine + (gate * W + GROUP * i) * W);
    }
    if (a.settled) begin();
    // Apart from products it has the GATES gates from GATES * sub on, of this unit of this row.
    i64 first = (i64)blockIdx.x * R;
    int number = (int)threadIdx.x / LANES, unit = first_unit + number / R, row = number % R, sub = (int)threadIdx.x % LANES;
    bool works = first + row < a.batch;
    int steps = (int)a.steps;
    i64 state = (first + row) * W + unit, last = (first + row) * steps + steps - 1;
    const float *gates = a.gates + last * 4 * W + sub * GATES * W + unit, *cells = a.cells + last * W + unit;
    const float* dhidden = a.dhidden + last * W + unit;
    float* to = a.dz + last * 4 * W + sub * GATES * W + unit;
    bool reads_dhidden = works && a.dhidden;
    float dc = works && a.dlast_cell ? a.dlast_cell[state] : 0.0f;
    float dh = works && a.dlast_hidden ? a.dlast_hidden[state] : 0.0f;
    float own[GATES] = {}, now = 0.0f, before = 0.0f, added = 0.0f;
    if (works && steps > 0) {
#pragma unroll
        for (int j = 0; j < GATES; ++j) own[j] = gates[j * W];
        now = *cells;
        before = steps > 1 ? *(cells - W) : a.first_cell[state];
        if (reads_dhidden) added = *dhidden;
    }
    StepFactors<GATES> factors;
    factors.set(own, sub, now, before);
    copies_done();
    for (int t = steps - 1; t >= 0; --t) {
        // What the step before needs, which arrives during the product. Each thread reads the gates in whose
        // place it alone will write.
        bool reads = works && t > 0;
        float earlier = 0.0f, next = 0.0f;
        gates -= 4 * W;
        cells -= W;
        dhidden -= W;
#pragma unroll
        for (int j = 0; j < GATES; ++j) own[j] = reads ? gates[j * W] : 0.0f;
        if (reads) earlier = t > 1 ? *(cells - W) : a.first_cell[state];
        if (reads && reads_dhidden) next = *dhidden;

        dh += added;
        float dcell = fmaf(dh, factors.cell, dc), d[GATES];
        dc = dcell * factors.forget;
        int step = steps - t;
        bool goes_on = t > 0 || a.dfirst_hidden;
        if (goes_on) dz.begin_step(step);
#pragma unroll
        for (int j = 0; j < GATES; ++j) {
            d[j] = (sub * GATES + j == 3 ? dh : dcell) * factors.gates[j];
            if (goes_on) dz.put(step, row * 4 * W + unit * 4 + sub * GATES + j, d[j]);
        }
        if (C == 1) dz.complete(step);
#pragma unroll
        for (int j = 0; j < GATES; ++j) {
            if (works) to[j * W] = d[j];
        }
        to -= 4 * W;
        if (!goes_on) break;
        if (C > 1) dz.complete(step);
        float sums[4 * R] = {};
        const float* in = dz.at(step) + 4 * part;
#pragma unroll
        for (int i = 0; i < W / GROUP; ++i) {
            float y[R][4];
#pragma unroll
            for (int r = 0; r < R; ++r) {
                float4 x = *(const float4*)(in + r * 4 * W + 4 * GROUP * i);
                y[r][0] = x.x, y[r][1] = x.y, y[r][2] = x.z, y[r][3] = x.w;
            }
#pragma unroll
            for (int gate = 0; gate < 4; ++gate) {
                float4 w = weights.get(4 * i + gate);
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    sums[r] = fmaf(w.x, y[r][gate], sums[r]);
                    sums[R + r] = fmaf(w.y, y[r][gate], sums[R + r]);
                    sums[2 * R + r] = fmaf(w.z, y[r][gate], sums[2 * R + r]);
                    sums[3 * R + r] = fmaf(w.w, y[r][gate], sums[3 * R + r]);
                }
            }
        }
        now = before;
        before = earlier;
        added = next;
        factors.set(own, sub, now, before);
        scatter_sums<4 * R, 1, GROUP / 2>(sums);
        dh = sums[0];
    }
    if (works && sub == 0 && a.dfirst_hidden) a.dfirst_hidden[state] = dh;
    if (works && sub == 0 && a.dfirst_cell) a.dfirst_cell[state] = dc;
}

// Kernels for W, R, U, the number of vectors in registers and C, as in `Held` of lstm/gpu.rs: the more sums a
// thread has, the fewer registers are left for weights.
#define LSTM_FORWARD(name, W, R, U, HELD, C) \
    KERNEL __launch_bounds__(4 * W / C / U, 1) name(LstmForward a) { if (!a.settled) begin(); lstm_forward_held<W, R, U, HELD, C>(a); }
#define LSTM_BACKWARD(name, W, R, U, HELD, C) \
    KERNEL __launch_bounds__(4 * W / C / U, 1) name(LstmBackward a) { if (!a.settled) begin(); lstm_backward_held<W, R, U, HELD, C>(a); }
LSTM_FORWARD(lstm_forward_held_64_1, 64, 1, 1, 16, 1)
LSTM_FORWARD(lstm_forward_held_64_2, 64, 2, 1, 16, 1)
LSTM_FORWARD(lstm_forward_held_64_4, 64, 4, 1, 16, 1)
LSTM_FORWARD(lstm_forward_pair_128_1, 128, 1, 1, 32, 2)
LSTM_FORWARD(lstm_forward_held_128_1, 128, 1, 2, 50, 1)
LSTM_FORWARD(lstm_forward_held_128_2, 128, 2, 2, 45, 1)
LSTM_BACKWARD(lstm_backward_held_64_1, 64, 1, 1, 16, 1)
LSTM_BACKWARD(lstm_backward_held_64_2, 64, 2, 1, 16, 1)
LSTM_BACKWARD(lstm_backward_held_64_4, 64, 4, 1, 16, 1)
LSTM_BACKWARD(lstm_backward_pair_128_1, 128, 1, 1, 32, 2)
LSTM_BACKWARD(lstm_backward_held_128_1, 128, 1, 2, 50, 1)
LSTM_BACKWARD(lstm_backward_held_128_2, 128, 2, 2, 45, 1)
