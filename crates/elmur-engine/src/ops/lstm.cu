// An LSTM over a window; the formulas are in lstm.rs. A block walks through all steps with R rows of the
// batch: their states stay in shared memory, and the weight is read again at every step, from the
// second-level cache.

// Fields as in lstm/gpu.rs, [batch, steps, width] where nothing else is said. Outputs that nobody reads are null.
struct LstmForward {
    float* hidden;              // [batch, steps, width]
    float* last_hidden;         // [batch, width]
    float* last_cell;           // [batch, width]
    float* gates;               // [batch, steps, 4 width]
    float* cells;               // [batch, steps, width]
    float* before;              // [batch, steps, width]
    const float* x;             // [batch, steps, 4 width], possibly where the gates are
    const float* weight;        // [width, 4 width], transposed
    const float* bias;          // [4 width]
    const float* first_hidden;  // [batch, width], possibly where last_hidden is
    const float* first_cell;    // [batch, width], possibly where last_cell is
    i64 batch;
    i64 steps;
    i64 width;
    i64 lanes;                  // threads that divide columns among them; blocks of a cluster in *_shared_*
    i64 settled;                // whether the weight may be read before begin()
};

struct LstmBackward {
    float* dz;                  // [batch, steps, 4 width], possibly where the gates are
    float* dfirst_hidden;       // [batch, width]
    float* dfirst_cell;         // [batch, width]
    const float* gates;         // [batch, steps, 4 width]
    const float* cells;         // [batch, steps, width]
    const float* weight;        // [4 width, width]
    const float* first_cell;    // [batch, width]
    const float* dhidden;       // [batch, steps, width]; null where there is no such gradient, like the next two
    const float* dlast_hidden;  // [batch, width]
    const float* dlast_cell;    // [batch, width]
    i64 batch;
    i64 steps;
    i64 width;
    i64 lanes;
    i64 settled;
};

// parts[g, r, c] = sum of in[r, k] w[k, c] over the g-th part of the depth, for R rows. Each group of `lanes`
// threads takes one part of the depth and divides the columns among its threads. All threads of the block
// call this, after a barrier that makes `in` complete; the parts are complete when it returns. Returns the
// number of parts.
template <int R>
__device__ __forceinline__ int multiply_rows(float* parts, const float* in, const float* w, int depth, int columns, int lanes) {
    int groups = (int)blockDim.x / lanes;
    int group = (int)threadIdx.x / lanes;
    int each = (depth + groups - 1) / groups;
    int start = min(group * each, depth), end = min(start + each, depth);
    if (group < groups) {
        for (int c = (int)threadIdx.x % lanes; c < columns; c += lanes) {
            float sums[R];
#pragma unroll
            for (int r = 0; r < R; ++r) sums[r] = 0.0f;
#pragma unroll 16
            for (int k = start; k < end; ++k) {
                float x = __ldg(w + (i64)k * columns + c);
#pragma unroll
                for (int r = 0; r < R; ++r) sums[r] = fmaf(in[r * depth + k], x, sums[r]);
            }
#pragma unroll
            for (int r = 0; r < R; ++r) parts[(group * R + r) * columns + c] = sums[r];
        }
    }
    __syncthreads();
    return groups;
}

// Sum of the parts of one element.
template <int R> __device__ __forceinline__ float sum_parts(const float* parts, int groups, int r, int c, int columns) {
    float sum = 0.0f;
    for (int group = 0; group < groups; ++group) sum += parts[(group * R + r) * columns + c];
    return sum;
}

// Shared memory: h and c [R, width], parts [groups, R, 4 width].
template <int R> __device__ __forceinline__ void lstm_forward(const LstmForward& a) {
    extern __shared__ float shared[];
    int width = (int)a.width, columns = 4 * width;
    float* h = shared;
    float* c = h + R * width;
    float* parts = c + R * width;
    i64 first = (i64)blockIdx.x * R;
    int rows = (int)min((i64)R, a.batch - first);
    for (int i = threadIdx.x; i < R * width; i += blockDim.x) {
        bool inside = i < rows * width;
        h[i] = inside ? a.first_hidden[first * width + i] : 0.0f;
        c[i] = inside ? a.first_cell[first * width + i] : 0.0f;
    }
    __syncthreads();
    for (i64 t = 0; t < a.steps; ++t) {
        int groups = multiply_rows<R>(parts, h, a.weight, width, columns, (int)a.lanes);
        for (int i = threadIdx.x; i < rows * width; i += blockDim.x) {
            int r = i / width, j = i % width;
            i64 at = (first + r) * a.steps + t;
            float z[4];
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                int column = q * width + j;
                z[q] = a.x[at * columns + column] + a.bias[column] + sum_parts<R>(parts, groups, r, column, columns);
            }
            z[0] = sigmoid(z[0]);
            z[1] = sigmoid(z[1]);
            z[2] = tanhf(z[2]);
            z[3] = sigmoid(z[3]);
            float cell = fmaf(z[1], c[i], z[0] * z[2]);
            float shown = z[3] * tanhf(cell);
            if (a.before) a.before[at * width + j] = h[i];
            if (a.gates) {
#pragma unroll
                for (int q = 0; q < 4; ++q) a.gates[at * columns + q * width + j] = z[q];
            }
            if (a.cells) a.cells[at * width + j] = cell;
            if (a.hidden) a.hidden[at * width + j] = shown;
            c[i] = cell;
            h[i] = shown;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < rows * width; i += blockDim.x) {
        if (a.last_hidden) a.last_hidden[first * width + i] = h[i];
        if (a.last_cell) a.last_cell[first * width + i] = c[i];
    }
}

// Shared memory: dz [R, 4 width], dc [R, width], parts of dh [groups, R, width].
template <int R> __device__ __forceinline__ void lstm_backward(const LstmBackward& a) {
    extern __shared__ float shared[];
    int width = (int)a.width, columns = 4 * width;
    float* dz = shared;
    float* dc = dz + R * columns;
    float* parts = dc + R * width;
    i64 first = (i64)blockIdx.x * R;
    int rows = (int)min((i64)R, a.batch - first), groups = 0;
    for (int i = threadIdx.x; i < R * columns; i += blockDim.x) dz[i] = 0.0f;
    for (int i = threadIdx.x; i < R * width; i += blockDim.x) {
        bool inside = i < rows * width && a.dlast_cell;
        dc[i] = inside ? a.dlast_cell[first * width + i] : 0.0f;
    }
    __syncthreads();
    for (i64 t = a.steps - 1; t >= 0; --t) {
        for (int i = threadIdx.x; i < rows * width; i += blockDim.x) {
            int r = i / width, j = i % width;
            i64 at = (first + r) * a.steps + t;
            // From the step after this one, or from what follows the window.
            float dh = sum_parts<R>(parts, groups, r, j, width);
            if (t == a.steps - 1 && a.dlast_hidden) dh = a.dlast_hidden[first * width + i];
            if (a.dhidden) dh += a.dhidden[at * width + j];
            const float* gates = a.gates + at * columns + j;
            float in = gates[0], forget = gates[width], candidate = gates[2 * width], out = gates[3 * width];
            float before = t > 0 ? a.cells[(at - 1) * width + j] : a.first_cell[first * width + i];
            float shown = tanhf(a.cells[at * width + j]);
            float dcell = fmaf(dh * out, 1.0f - shown * shown, dc[i]);
            dc[i] = dcell * forget;
            float d[4];
            d[0] = dcell * candidate * (in * (1.0f - in));
            d[1] = dcell * before * (forget * (1.0f - forget));
            d[2] = dcell * in * (1.0f - candidate * candidate);
            d[3] = dh * shown * (out * (1.0f - out));
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                dz[r * columns + q * width + j] = d[q];
                a.dz[at * columns + q * width + j] = d[q];
            }
        }
        __syncthreads();
        if (t > 0 || a.dfirst_hidden) groups = multiply_rows<R>(parts, dz, a.weight, columns, width, (int)a.lanes);
    }
    for (int i = threadIdx.x; i < rows * width; i += blockDim.x) {
        if (a.dfirst_hidden) a.dfirst_hidden[first * width + i] = sum_parts<R>(parts, groups, i / width, i % width, width);
        if (a.dfirst_cell) a.dfirst_cell[first * width + i] = dc[i];
    }
}

// The same with clusters of C blocks, whose shared memories together hold the weight: block `rank` computes
// the W / C hidden units from rank * W / C on, for R rows, and sends what the others need of them. One barrier
// of the cluster per step.

// Writes x where block `rank` of the cluster has `own`.
__device__ __forceinline__ void send(float* own, int rank, float x) {
#if __CUDA_ARCH__ >= 900
    u32 address = (u32)__cvta_generic_to_shared(own);
    asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2;}" ::"r"(address), "r"(rank), "f"(x) : "memory");
#endif
}

__device__ __forceinline__ void cluster_barrier() {
    cluster_arrive();
    cluster_wait();
}

// parts[g, r, c] = sum of in[r, k] w[k, c] over the g-th part of the depth, for R rows; w in shared memory,
// depth a multiple of 4. Complete after a barrier of the block. Returns the number of parts.
template <int R> __device__ __forceinline__ int multiply_shared(float* parts, const float* in, const float* w, int depth, int columns) {
    int groups = (int)blockDim.x / columns, group = (int)threadIdx.x / columns, c = (int)threadIdx.x % columns;
    int each = (depth / 4 + groups - 1) / groups * 4;
    int start = min(group * each, depth), end = min(start + each, depth);
    if (group < groups) {
        float sums[R];
#pragma unroll
        for (int r = 0; r < R; ++r) sums[r] = 0.0f;
#pragma unroll 4
        for (int k = start; k < end; k += 4) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = w[(k + i) * columns + c];
#pragma unroll
            for (int r = 0; r < R; ++r) {
                float4 y = *(const float4*)(in + r * depth + k);
                sums[r] = fmaf(y.w, x[3], fmaf(y.z, x[2], fmaf(y.y, x[1], fmaf(y.x, x[0], sums[r]))));
            }
        }
#pragma unroll
        for (int r = 0; r < R; ++r) parts[(group * R + r) * columns + c] = sums[r];
    }
    return groups;
}

// Shared memory: h twice [2, R, W], weight [W, 4 U], parts [groups, R, 4 U], where U = W / C. weight is
// [4 width, width] here, and R U at most the number of threads.
template <int R> __device__ __forceinline__ void lstm_forward_shared(const LstmForward& a) {
    extern __shared__ float shared[];
    int width = (int)a.width, ranks = (int)a.lanes, units = width / ranks, columns = 4 * units, rank = cluster_rank();
    float* h = shared;
    float* w = h + 2 * R * width;
    float* parts = w + width * columns;
    i64 first = (i64)blockIdx.x * R;
    int rows = (int)min((i64)R, a.batch - first);
    for (int i = threadIdx.x; i < columns * width; i += blockDim.x) {
        int k = i % width, c = i / width;
        w[k * columns + c] = a.weight[(i64)(c / units * width + rank * units + c % units) * width + k];
    }
    for (int i = threadIdx.x; i < R * width; i += blockDim.x) h[i] = i < rows * width ? a.first_hidden[first * width + i] : 0.0f;
    // What this thread computes: unit j of row r.
    int r = (int)threadIdx.x / units, j = (int)threadIdx.x % units, unit = rank * units + j;
    bool works = r < rows;
    float cell = works ? a.first_cell[(first + r) * width + unit] : 0.0f, shown = 0.0f, bias[4] = {};
    if (works) {
#pragma unroll
        for (int q = 0; q < 4; ++q) bias[q] = a.bias[q * width + unit];
    }
    cluster_barrier();
    for (i64 t = 0; t < a.steps; ++t) {
        i64 at = (first + r) * a.steps + t;
        float z[4] = {};
        if (works) {
#pragma unroll
            for (int q = 0; q < 4; ++q) z[q] = a.x[at * 4 * width + q * width + unit] + bias[q];
        }
        const float* now = h + (t & 1) * R * width;
        int groups = multiply_shared<R>(parts, now, w, width, columns);
        __syncthreads();
        if (works) {
#pragma unroll
            for (int q = 0; q < 4; ++q) z[q] += sum_parts<R>(parts, groups, r, q * units + j, columns);
            z[0] = sigmoid(z[0]);
            z[1] = sigmoid(z[1]);
            z[2] = tanhf(z[2]);
            z[3] = sigmoid(z[3]);
            cell = fmaf(z[1], cell, z[0] * z[2]);
            shown = z[3] * tanhf(cell);
            float* next = h + ((t + 1) & 1) * R * width + r * width + unit;
            for (int to = 0; to < ranks; ++to) send(next, to, shown);
            if (a.before) a.before[at * width + unit] = now[r * width + unit];
            if (a.gates) {
#pragma unroll
                for (int q = 0; q < 4; ++q) a.gates[at * 4 * width + q * width + unit] = z[q];
            }
            if (a.cells) a.cells[at * width + unit] = cell;
            if (a.hidden) a.hidden[at * width + unit] = shown;
        }
        cluster_barrier();
    }
    if (works && a.last_hidden) a.last_hidden[(first + r) * width + unit] = shown;
    if (works && a.last_cell) a.last_cell[(first + r) * width + unit] = cell;
}

// Shared memory: dz [R, 4 U], what the blocks send of dh [2, C, R, U], weight [4 U, W], parts [groups, R, W].
template <int R> __device__ __forceinline__ void lstm_backward_shared(const LstmBackward& a) {
    extern __shared__ float shared[];
    int width = (int)a.width, ranks = (int)a.lanes, units = width / ranks, columns = 4 * units, rank = cluster_rank();
    float* dz = shared;
    float* sent = dz + R * columns;
    float* w = sent + 2 * ranks * R * units;
    float* parts = w + columns * width;
    i64 first = (i64)blockIdx.x * R;
    int rows = (int)min((i64)R, a.batch - first);
    for (int i = threadIdx.x; i < columns * width; i += blockDim.x) {
        int k = i % width, c = i / width;
        w[c * width + k] = a.weight[(i64)(c / units * width + rank * units + c % units) * width + k];
    }
    for (int i = threadIdx.x; i < R * columns; i += blockDim.x) dz[i] = 0.0f;
    int r = (int)threadIdx.x / units, j = (int)threadIdx.x % units, unit = rank * units + j;
    bool works = r < rows;
    float dc = works && a.dlast_cell ? a.dlast_cell[(first + r) * width + unit] : 0.0f;
    float dh = works && a.dlast_hidden ? a.dlast_hidden[(first + r) * width + unit] : 0.0f;
    cluster_barrier();
    for (i64 t = a.steps - 1; t >= 0; --t) {
        i64 at = (first + r) * a.steps + t;
        if (works) {
            if (a.dhidden) dh += a.dhidden[at * width + unit];
            const float* gates = a.gates + at * 4 * width + unit;
            float in = gates[0], forget = gates[width], candidate = gates[2 * width], out = gates[3 * width];
            float before = t > 0 ? a.cells[(at - 1) * width + unit] : a.first_cell[(first + r) * width + unit];
            float shown = tanhf(a.cells[at * width + unit]);
            float dcell = fmaf(dh * out, 1.0f - shown * shown, dc);
            dc = dcell * forget;
            float d[4];
            d[0] = dcell * candidate * (in * (1.0f - in));
            d[1] = dcell * before * (forget * (1.0f - forget));
            d[2] = dcell * in * (1.0f - candidate * candidate);
            d[3] = dh * shown * (out * (1.0f - out));
#pragma unroll
            for (int q = 0; q < 4; ++q) {
                dz[r * columns + q * units + j] = d[q];
                a.dz[at * 4 * width + q * width + unit] = d[q];
            }
        }
        __syncthreads();
        if (t == 0 && !a.dfirst_hidden) break;
        int groups = multiply_shared<R>(parts, dz, w, columns, width);
        __syncthreads();
        float* now = sent + (t & 1) * ranks * R * units;
        for (int i = threadIdx.x; i < R * width; i += blockDim.x) {
            int row = i / width, k = i % width;
            send(now + (rank * R + row) * units + k % units, k / units, sum_parts<R>(parts, groups, row, k, width));
        }
        cluster_barrier();
        dh = 0.0f;
        if (works) {
            for (int from = 0; from < ranks; ++from) dh += now[(from * R + r) * units + j];
        }
    }
    if (works && a.dfirst_hidden) a.dfirst_hidden[(first + r) * width + unit] = dh;
    if (works && a.dfirst_cell) a.dfirst_cell[(first + r) * width + unit] = dc;
}

KERNEL lstm_forward_1(LstmForward a) { begin(); lstm_forward<1>(a); }
KERNEL lstm_forward_2(LstmForward a) { begin(); lstm_forward<2>(a); }
KERNEL lstm_forward_4(LstmForward a) { begin(); lstm_forward<4>(a); }
KERNEL lstm_backward_1(LstmBackward a) { begin(); lstm_backward<1>(a); }
KERNEL lstm_backward_2(LstmBackward a) { begin(); lstm_backward<2>(a); }
KERNEL lstm_backward_4(LstmBackward a) { begin(); lstm_backward<4>(a); }
KERNEL lstm_forward_shared_1(LstmForward a) { begin(); lstm_forward_shared<1>(a); }
KERNEL lstm_forward_shared_2(LstmForward a) { begin(); lstm_forward_shared<2>(a); }
KERNEL lstm_forward_shared_4(LstmForward a) { begin(); lstm_forward_shared<4>(a); }
KERNEL lstm_forward_shared_8(LstmForward a) { begin(); lstm_forward_shared<8>(a); }
KERNEL lstm_backward_shared_1(LstmBackward a) { begin(); lstm_backward_shared<1>(a); }
KERNEL lstm_backward_shared_2(LstmBackward a) { begin(); lstm_backward_shared<2>(a); }
KERNEL lstm_backward_shared_4(LstmBackward a) { begin(); lstm_backward_shared<4>(a); }
KERNEL lstm_backward_shared_8(LstmBackward a) { begin(); lstm_backward_shared<8>(a); }
