// Shared by all kernels. Floats are f32; sums are in a fixed order unless a comment says otherwise.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL extern "C" __global__ void
#define INF __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)

// The first line of every kernel, or the one after it has read settled inputs (`Launch::is_settled`): waits for
// all work that the kernel depends on, then lets the kernels that depend on it be launched beside it (see
// `enable_early_launch` in capture.rs).
__device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Number of this thread in the grid.
__device__ __forceinline__ i64 thread_number() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

// Number of this warp in the grid.
__device__ __forceinline__ i64 warp_number() { return thread_number() / 32; }

__device__ __forceinline__ int lane() { return threadIdx.x & 31; }

__device__ __forceinline__ float warp_sum(float x) {
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}

__device__ __forceinline__ double warp_sum(double x) {
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(0xffffffffu, x, o);
    return x;
}

// Sum over a block of at most 1024 threads, a multiple of 32, known to all of them.
__device__ __forceinline__ double block_sum(double x) {
    __shared__ double parts[32];
    x = warp_sum(x);
    __syncthreads();
    if (lane() == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(lane() < blockDim.x / 32 ? parts[lane()] : 0.0);
}

// True in all threads of the block that arrives last; `counter` is 0 before and after.
__device__ __forceinline__ bool last_block(u32* counter, u32 blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1) == blocks - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// Where something lies in shared memory, as instructions name it.
__device__ __forceinline__ u32 shared_address(const void* of) { return (u32)__cvta_generic_to_shared(of); }

// from + offset, where the compiler would add all offsets first, with twice as many instructions.
__device__ __forceinline__ const float* moved(const float* from, int offset) {
    const float* to;
    asm("mad.wide.s32 %0, %1, 4, %2;" : "=l"(to) : "r"(offset), "l"(from));
    return to;
}

// Copies 16 bytes to shared memory, or zeros; both addresses are multiples of 16. Complete after copies_done(), or
// copies_done_but_last() when others were committed since, and a barrier.
__device__ __forceinline__ void copy_async(u32 to, const float* from, bool inside) {
    int bytes = inside ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy_async(float* to, const float* from, bool inside) { copy_async(shared_address(to), from, inside); }

// Copies one number to shared memory, or zero.
__device__ __forceinline__ void copy_one_async(u32 to, const float* from, bool inside) {
    int bytes = inside ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy_one_async(float* to, const float* from, bool inside) { copy_one_async(shared_address(to), from, inside); }

__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Makes one group of the copies since the last call.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups of copies but the last.
__device__ __forceinline__ void copies_done_but_last() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// Number of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
    int rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

struct Block4 { u32 w[4]; };

// State of the generator; zeros for a null pointer.
struct Rng {
    u64 seed, step;
    __device__ __forceinline__ explicit Rng(const i64* state) : seed(state ? (u64)state[0] : 0), step(state ? (u64)state[1] : 0) {}
};

// Philox 4x32-10, as in elmur-rng.
__device__ __forceinline__ Block4 philox(const Rng& rng, u32 stream, u32 block) {
    u32 a = block, b = stream, c = (u32)rng.step, d = (u32)(rng.step >> 32);
    u32 k0 = (u32)rng.seed, k1 = (u32)(rng.seed >> 32);
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        u32 p_high = __umulhi(0xD2511F53u, a), p_low = 0xD2511F53u * a;
        u32 q_high = __umulhi(0xCD9E8D57u, c), q_low = 0xCD9E8D57u * c;
        a = q_high ^ b ^ k0;
        b = q_low;
        c = p_high ^ d ^ k1;
        d = p_low;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{a, b, c, d}};
}

// Dropout: elements whose draw of `stream` is below `below` become 0, the others are multiplied by `keep`.
// state: of the generator, null if nothing is dropped.
struct DropArgs {
    const i64* state;
    u32 stream, below;
    float keep;
};

// Factor of dropout for element `index`: 0 or `keep`.
__device__ __forceinline__ float drop_factor(const Rng& rng, u32 stream, u32 below, float keep, u64 index) {
    u32 block = (u32)(16 * (index / 64) + index % 16);
    return philox(rng, stream, block).w[index % 64 / 16] < below ? 0.0f : keep;
}

// Element i of an array of i32 or i64.
__device__ __forceinline__ i64 index_at(const void* data, int wide, i64 i) {
    return wide ? ((const i64*)data)[i] : ((const int*)data)[i];
}

// Steps of two operands that broadcast to a shape: 0 along repeated axes.
struct Steps {
    int rank, shape[6], a[6], b[6];
};

__device__ __forceinline__ void offsets(i64 i, const Steps& s, i64& a, i64& b) {
    a = b = 0;
    for (int axis = s.rank - 1; axis >= 0; --axis) {
        i64 r = i % s.shape[axis];
        i /= s.shape[axis];
        a += r * s.a[axis];
        b += r * s.b[axis];
    }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
