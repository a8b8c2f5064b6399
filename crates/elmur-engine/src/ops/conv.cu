// Convolutions as products on tensor cores whose patches are read where they lie. A block of four warps computes
// ROWS x 128 of C, 32 of the depth at a time; each warp computes all rows of 32 columns.

constexpr int WARPS = 4, COLUMNS = 32 * WARPS, DEPTH = 32;
// Lines in shared memory are padded so that a warp's reads fall into different banks.
constexpr int ALONG = DEPTH + 4, ACROSS = COLUMNS + 8;

// Images [batch, c, h, w]; kernels [outputs, c, p, q]; patches [batch, outputs, i, j].
struct Geometry {
    int batch, c, h, w, outputs, p, q, i, j, stride, padding;
};

// What a position reads for one number of the depth: `at` numbers on from the position's own place, which is `down` rows
// and `right` columns away; tap `number` of its channel; the weight lies at `weight`.
struct Tap {
    int at, down, right, number, weight;
};

// Whether taps may lie outside of the source, where it is zero, and how that is found out: they never do; by a bit for
// each of up to 32 taps of a channel; or by comparing rows and columns with the source's borders.
enum Outside { NEVER, BITS, MOVES };

// The taps of a panel, or of a block's columns.
template <int COUNT, Outside outside> struct Taps {
    alignas(16) int at[COUNT];
    alignas(16) u32 bits[outside == BITS ? COUNT : 4];
    alignas(16) int2 moves[outside == MOVES ? COUNT : 1];
    __device__ __forceinline__ void set(int i, const Tap& tap) {
        at[i] = tap.at;
        if (outside == BITS) bits[i] = 1u << tap.number;
        if (outside == MOVES) moves[i] = {tap.down, tap.right};
    }
};

// A convolution as a product: C[row, position] = sum over channels and taps of weight x source, all extents for one
// of the grid's layers.
struct Gather {
    int rows, channels, taps_down, taps_right;       // depth = channels taps_down taps_right
    int h, w;                                        // of the source
    int positions_down, positions_right;             // of an image
    int step, down, right, sign;                     // place of position (u, v): (u step + down, v step + right)
    int image, first, apart_down, apart_right;       // of the result: numbers of an image's row, and where positions lie
    int weight_row, weight_channel, weight_down, weight_right, weight;

    __device__ __forceinline__ int depth() const { return channels * taps_down * taps_right; }
    __device__ __forceinline__ Tap tap(int k) const {
        int right = k % taps_right, rest = k / taps_right, down = rest % taps_down, channel = rest / taps_down;
        return {(channel * h + sign * down) * w + sign * right, sign * down, sign * right, down * taps_right + right,
                weight + channel * weight_channel + down * weight_down + right * weight_right};
    }
    // The taps of a channel that lie inside of the source, as bits, for a position whose place is (row, column).
    __device__ __forceinline__ u32 inside(int row, int column) const {
        u32 line = 0, all = 0;
        for (int i = 0; i < taps_right; ++i) line |= ((u32)(column + sign * i) < (u32)w ? 1u : 0u) << i;
        for (int i = 0; i < taps_down; ++i) all |= (u32)(row + sign * i) < (u32)h ? line << i * taps_right : 0u;
        return all;
    }
};

// y[o, (i, j)] = sum of w[o, c, p, q] x[c, i stride + p - padding, j stride + q - padding].
__device__ __forceinline__ Gather forward_of(const Geometry& g) {
    int kernel = g.p * g.q;
    return {g.outputs, g.c, g.p, g.q, g.h, g.w, g.i, g.j, g.stride, -g.padding, -g.padding, 1, g.i * g.j, 0, g.j, 1, g.c * kernel, kernel, g.q, 1, 0};
}

// dx[c, (y, x)] = sum of w[o, c, p, q] dy[o, (y + padding - p) / stride, (x + padding - q) / stride] where these are
// whole numbers: for pixels of one phase, (y, x) = (down, right) + stride (u, v), of every stride-th p and q.
__device__ __forceinline__ Gather input_grad_of(const Geometry& g, int phase) {
    int down = phase / g.stride, right = phase % g.stride, p = (down + g.padding) % g.stride, q = (right + g.padding) % g.stride, kernel = g.p * g.q;
    auto count = [&](int extent, int first) { return extent > first ? (extent - first + g.stride - 1) / g.stride : 0; };
    return {g.c, g.outputs, count(g.p, p), count(g.q, q), g.i, g.j, count(g.h, down), count(g.w, right), 1, (down + g.padding - p) / g.stride,
            (right + g.padding - q) / g.stride, -1, g.h * g.w, down * g.w + right, g.stride * g.w, g.stride, kernel, g.c * kernel, g.stride * g.q, g.stride,
            p * g.q + q};
}

// Copies `COUNT` numbers of a source to shared memory, `apart` bytes from each other, as taps from `first` on say.
// (row, column) is the place of the position, `own` its taps inside of the source.
template <int COUNT, Outside outside, int EACH>
__device__ __forceinline__ void copy_taps(u32 to, u32 apart, const float* source, const Taps<EACH, outside>& taps, int first, const Gather& g, int row, int column, u32 own) {
    // Many at a time: reads of shared memory between copies to it cost idle instructions.
    constexpr int PART = COUNT < 16 ? COUNT : 16;
#pragma unroll
    for (int k = 0; k < COUNT; k += PART) {
        int at[PART];
        u32 bits[PART];
#pragma unroll
        for (int i = 0; i < PART; i += 4) {
            int4 x = *(const int4*)(taps.at + first + k + i);
            at[i] = x.x, at[i + 1] = x.y, at[i + 2] = x.z, at[i + 3] = x.w;
            if constexpr (outside == BITS) {
                uint4 y = *(const uint4*)(taps.bits + first + k + i);
                bits[i] = y.x, bits[i + 1] = y.y, bits[i + 2] = y.z, bits[i + 3] = y.w;
            }
        }
#pragma unroll
        for (int i = 0; i < PART; ++i) {
            bool inside = true;
            if constexpr (outside == BITS) inside = (own & bits[i]) != 0;
            if constexpr (outside == MOVES) {
                int2 moves = taps.moves[first + k + i];
                inside = (u32)(row + moves.x) < (u32)g.h && (u32)(column + moves.y) < (u32)g.w;
            }
            copy_one_async(to + (k + i) * apart, moved(source, at[i]), inside);
        }
    }
}

// Sums of a warp: ROWS x 32.
template <int ROWS, bool exact> struct Sums {
    float sums[ROWS / 16][4][4] = {}, low[exact ? ROWS / 16 : 1][4][4] = {}, total[ROWS / 16][4][4] = {};

    // Adds the products of DEPTH numbers. a: where [ROWS, ALONG] lies in shared memory; b(y, k) reads the right
    // operand's numbers k + quad and k + 4 + quad of columns 8 j + group, for all j, to y[j].
    template <class B> __device__ __forceinline__ void add(u32 a, B b) {
        // Tiles of 8 x 4: upper and lower half, of the first four and then of the second four of the depth.
        a += 4 * (lane() % 16 * ALONG + lane() / 16 * 4);
#pragma unroll
        for (int k = 0; k < DEPTH; k += 8) {
            float x[ROWS / 16][4], y[4][2];
#pragma unroll
            for (int i = 0; i < ROWS / 16; ++i) load_tiles(x[i], a + 4 * (16 * i * ALONG + k));
            b(y, k);
            Split<exact> u[ROWS / 16][4];
#pragma unroll
            for (int i = 0; i < ROWS / 16; ++i)
#pragma unroll
                for (int part = 0; part < 4; ++part) u[i][part] = Split<exact>(x[i][part]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                Split<exact> v[2] = {Split<exact>(y[j][0]), Split<exact>(y[j][1])};
#pragma unroll
                for (int i = 0; i < ROWS / 16; ++i) {
                    if constexpr (exact) {
                        multiply_add(low[i][j], u[i][0].low, u[i][1].low, u[i][2].low, u[i][3].low, v[0].high, v[1].high);
                        multiply_add(low[i][j], u[i][0].high, u[i][1].high, u[i][2].high, u[i][3].high, v[0].low, v[1].low);
                    }
                    multiply_add(sums[i][j], u[i][0].high, u[i][1].high, u[i][2].high, u[i][3].high, v[0].high, v[1].high);
                }
            }
        }
    }

    // Tensor cores truncate sums: long ones are made of short ones.
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    total[i][j][e] += exact ? sums[i][j][e] + low[exact ? i : 0][j][e] : sums[i][j][e];
                    sums[i][j][e] = low[exact ? i : 0][j][e] = 0;
                }
    }

    // Calls f(row, column, sum) for all sums of this thread.
    template <class F> __device__ __forceinline__ void each(F f) const {
        int group = lane() / 4, quad = lane() % 4;
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) f(16 * i + e / 2 * 8 + group, 8 * j + 2 * quad + e % 2, total[i][j][e]);
    }
};

// to [batch, rows, ...] from source [batch, channels, h, w] and weights [rows, depth], whose rows begin `pitch`
// numbers apart (+ bias per row, which may be null).
template <int ROWS, bool exact, Outside outside>
__device__ __forceinline__ void gather_product(float* to, const float* source, const float* weights, int pitch, const float* bias, const Gather& g, int batch) {
    constexpr int STAGE = ROWS * ALONG + DEPTH * ACROSS, VECTORS = DEPTH / 4, LINES = COLUMNS / VECTORS;
    extern __shared__ __align__(16) float shared[];
    __shared__ Taps<DEPTH, outside> taps[2];
    __shared__ i64 places[COLUMNS];
    int thread = threadIdx.x, row = blockIdx.y * ROWS, depth = g.depth(), panels = (depth + DEPTH - 1) / DEPTH;
    i64 each = (i64)g.positions_down * g.positions_right, column = (i64)blockIdx.x * COLUMNS + thread, columns = batch * each;
    if ((i64)blockIdx.x * COLUMNS >= columns) return;
    // This thread's column: its place in the source, and in the result. What is beyond the last computes the first.
    bool is_there = column < columns;
    i64 image = is_there ? column / each : 0;
    int position = is_there ? (int)(column % each) : 0, u = position / g.positions_right, v = position % g.positions_right;
    int down = u * g.step + g.down, right = v * g.step + g.right;
    u32 own = outside == BITS ? g.inside(down, right) : 0;
    source += image * g.channels * g.h * g.w + down * g.w + right;
    places[thread] = is_there ? image * g.rows * g.image + g.first + u * g.apart_down + v * g.apart_right : -1;
    // Beyond the depth, where weights are zero, the first tap is read again.
    auto find_taps = [&](int panel) {
        int k = panel * DEPTH + thread;
        if (thread < DEPTH && panel < panels) taps[panel % 2].set(thread, g.tap(k < depth ? k : 0));
    };
    u32 stages = shared_address(shared);
    int line = thread / VECTORS, across = thread % VECTORS * 4;
    bool in_fours = pitch % 4 == 0 && (u64)weights % 16 == 0;
    auto load = [&](int panel) {
        u32 a = stages + panel % 2 * (4 * STAGE), b = a + 4 * (ROWS * ALONG + thread);
        int first = panel * DEPTH;
        if (in_fours) {
            const float* from = weights + (row + line) * pitch + first + across;
#pragma unroll
            for (int r = 0; r < ROWS; r += LINES)
                copy_async(a + 4 * (line * ALONG + across) + 4 * r * ALONG, moved(from, r * pitch), row + line + r < g.rows && first + across < depth);
        } else {
            int k = first + thread % DEPTH;
            for (int r = thread / DEPTH; r < ROWS; r += WARPS)
                copy_one_async(a + 4 * (r * ALONG + thread % DEPTH), weights + (row + r) * pitch + k, row + r < g.rows && k < depth);
        }
        copy_taps<DEPTH>(b, 4 * ACROSS, source, taps[panel % 2], 0, g, down, right, own);
        commit_copies();
    };
    find_taps(0), find_taps(1);
    __syncthreads();
    if (panels > 0) load(0);
    Sums<ROWS, exact> sums;
    for (int panel = 0; panel < panels; ++panel) {
        if (panel + 1 < panels) {
            load(panel + 1);
            copies_done_but_last();
        } else {
            copies_done();
        }
        __syncthreads();
        find_taps(panel + 2);
        const float* b = shared + panel % 2 * STAGE + ROWS * ALONG + thread / 32 * 32 + lane() % 4 * ACROSS + lane() / 4;
        sums.add(stages + panel % 2 * (4 * STAGE), [&](float (&y)[4][2], int k) {
#pragma unroll
            for (int j = 0; j < 4; ++j) y[j][0] = b[k * ACROSS + 8 * j], y[j][1] = b[(k + 4) * ACROSS + 8 * j];
        });
        if (exact) sums.settle();
        __syncthreads();
    }
    if (!exact) sums.settle();
    sums.each([&](int r, int c, float sum) {
        i64 place = places[thread / 32 * 32 + c];
        if (row + r < g.rows && place >= 0) to[place + (i64)(row + r) * g.image] = bias ? sum + bias[row + r] : sum;
    });
}

// Weights as the gradient of images takes them: to [phases, c, pitch], of every phase the weights of one row of C side
// by side, and zeros up to the pitch.
KERNEL conv2d_turn_weights(float* to, const float* weights, Geometry g, int pitch) {
    begin();
    Gather turned = input_grad_of(g, blockIdx.y);
    int e = (int)thread_number(), r = e / pitch, k = e % pitch;
    if (r < g.c) to[(i64)blockIdx.y * g.c * pitch + e] = k < turned.depth() ? weights[r * turned.weight_row + turned.tap(k).weight] : 0.0f;
}

// partial[split, outputs, depth]: sums over a share of all patches of dy x patch.
struct WeightGradArgs {
    float* partial;
    const float *dy, *images;
    i64 share;
    Geometry g;
};

template <int ROWS, bool exact, Outside outside> __device__ __forceinline__ void weight_grad(const WeightGradArgs& args) {
    constexpr int STAGE = (ROWS + COLUMNS) * ALONG;
    extern __shared__ __align__(16) float shared[];
    __shared__ Taps<COLUMNS, outside> taps;
    const Geometry& g = args.g;
    Gather forward = forward_of(g);
    int thread = threadIdx.x, warp = thread / 32, k = thread % DEPTH, row = blockIdx.y * ROWS, column = blockIdx.x * COLUMNS;
    int depth = forward.depth(), each = g.i * g.j;
    i64 begins = blockIdx.z * args.share, ends = begins + args.share, all = (i64)g.batch * each;
    if (ends > all) ends = all;
    int panels = begins < ends ? (int)((ends - begins + DEPTH - 1) / DEPTH) : 0;
    // Beyond the depth the first tap is read again, and the sum dropped.
    taps.set(thread, forward.tap(column + thread < depth ? column + thread : 0));
    // The patch of this thread in the next panel.
    i64 next = begins + k, image = next / each;
    int position = (int)(next % each);
    u32 stages = shared_address(shared);
    auto load = [&](int panel) {
        u32 a = stages + panel % 2 * (4 * STAGE) + 4 * (warp * ALONG + k), b = stages + panel % 2 * (4 * STAGE) + 4 * ((ROWS + 32 * warp) * ALONG + k);
        // Beyond the last patch dy is zero, and the first patch is read again.
        bool is_there = next < ends;
        i64 own = is_there ? image : 0;
        int place = is_there ? position : 0;
        int down = place / g.j * g.stride - g.padding, right = place % g.j * g.stride - g.padding;
        const float* dy = args.dy + (own * g.outputs + row + warp) * each + place;
        const float* source = args.images + own * g.c * g.h * g.w + down * g.w + right;
#pragma unroll
        for (int r = 0; r < ROWS; r += WARPS) copy_one_async(a + 4 * r * ALONG, moved(dy, r * each), is_there && row + warp + r < g.outputs);
        copy_taps<32>(b, 4 * ALONG, source, taps, 32 * warp, forward, down, right, outside == BITS ? forward.inside(down, right) : 0);
        commit_copies();
        next += DEPTH;
        for (position += DEPTH; position >= each; position -= each) ++image;
    };
    __syncthreads();
    if (panels > 0) load(0);
    Sums<ROWS, exact> sums;
    // Tiles of 8 x 4: the first four and the second four of the depth, of eight columns and then of the next eight.
    u32 tiles = 4 * ((ROWS + 32 * warp + lane() / 16 * 8 + lane() % 8) * ALONG + lane() / 8 % 2 * 4);
    for (int panel = 0; panel < panels; ++panel) {
        if (panel + 1 < panels) {
            load(panel + 1);
            copies_done_but_last();
        } else {
            copies_done();
        }
        __syncthreads();
        u32 a = stages + panel % 2 * (4 * STAGE), b = a + tiles;
        sums.add(a, [&](float (&y)[4][2], int k) {
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                float x[4];
                load_tiles(x, b + 4 * (8 * j * ALONG + k));
                y[j][0] = x[0], y[j][1] = x[1], y[j + 1][0] = x[2], y[j + 1][1] = x[3];
            }
        });
        if (exact) sums.settle();
        __syncthreads();
    }
    if (!exact) sums.settle();
    float* to = args.partial + (i64)blockIdx.z * g.outputs * depth;
    sums.each([&](int r, int c, float sum) {
        int o = row + r, d = column + 32 * warp + c;
        if (o < g.outputs && d < depth) to[(i64)o * depth + d] = sum;
    });
}

// Grid (tiles of positions, tiles of rows, phases); ROWS x ALONG and DEPTH x ACROSS floats twice in shared memory.
#define CONVOLUTION(name, ROWS, exact, outside)                                                                              \
    KERNEL __launch_bounds__(128, exact ? 2 : ROWS == 32 ? 5 : 4) name(float* y, const float* images, const float* weights, const float* bias, Geometry g) { \
        begin();                                                                                                             \
        Gather own = forward_of(g);                                                                                          \
        gather_product<ROWS, exact, outside>(y, images, weights, own.depth(), bias, own, g.batch);                           \
    }
#define CONVOLUTION_INPUT_GRAD(name, ROWS, exact, outside)                                                                   \
    KERNEL __launch_bounds__(128, exact ? 2 : ROWS == 32 ? 5 : 4) name(float* dx, const float* dy, const float* turned, Geometry g, int pitch) {             \
        begin();                                                                                                             \
        const float* weights = turned + (i64)blockIdx.z * g.c * pitch;                                                       \
        gather_product<ROWS, exact, outside>(dx, dy, weights, pitch, (const float*)nullptr, input_grad_of(g, blockIdx.z), g.batch);  \
    }
// Grid (tiles of depth, tiles of outputs, splits); (ROWS + 128) x ALONG floats twice in shared memory.
#define CONVOLUTION_WEIGHT_GRAD(name, ROWS, exact, outside)                                                                  \
    KERNEL __launch_bounds__(128, exact ? 2 : ROWS == 32 ? 5 : 4) name(WeightGradArgs args) {                                                                \
        begin();                                                                                                             \
        weight_grad<ROWS, exact, outside>(args);                                                                             \
    }

CONVOLUTION(conv2d_32, 32, false, NEVER)
CONVOLUTION(conv2d_64, 64, false, NEVER)
CONVOLUTION(conv2d_32_padded, 32, false, BITS)
CONVOLUTION(conv2d_64_padded, 64, false, BITS)
CONVOLUTION(conv2d_32_exact, 32, true, MOVES)
CONVOLUTION_INPUT_GRAD(conv2d_input_grad_32, 32, false, BITS)
CONVOLUTION_INPUT_GRAD(conv2d_input_grad_64, 64, false, BITS)
CONVOLUTION_INPUT_GRAD(conv2d_input_grad_32_exact, 32, true, MOVES)
CONVOLUTION_WEIGHT_GRAD(conv2d_weight_grad_32, 32, false, NEVER)
CONVOLUTION_WEIGHT_GRAD(conv2d_weight_grad_64, 64, false, NEVER)
CONVOLUTION_WEIGHT_GRAD(conv2d_weight_grad_32_padded, 32, false, BITS)
CONVOLUTION_WEIGHT_GRAD(conv2d_weight_grad_64_padded, 64, false, BITS)
CONVOLUTION_WEIGHT_GRAD(conv2d_weight_grad_32_exact, 32, true, MOVES)
