// y = silu(g) u for h = [g, u]; four elements per thread where f is a multiple of four.
KERNEL swiglu(float* y, const float* h, i64 f, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    const float* row = h + i / f * 2 * f + i % f;
    float g = row[0];
    y[i] = g * sigmoid(g) * row[f];
}

KERNEL swiglu_4(float* y, const float* h, int f, int n) {
    begin();
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    const float* row = h + (i64)(i / f) * 2 * f + i % f;
    float4 g = *(const float4*)row, u = *(const float4*)(row + f);
    float4 x = {g.x * sigmoid(g.x) * u.x, g.y * sigmoid(g.y) * u.y, g.z * sigmoid(g.z) * u.z, g.w * sigmoid(g.w) * u.w};
    *(float4*)(y + i) = x;
}

// dh = [dy u silu'(g), dy silu(g)]; dh may be h.
__device__ __forceinline__ void swiglu_gradient(float g, float u, float d, float& dg, float& du) {
    float s = sigmoid(g), silu = g * s;
    dg = d * u * (s + silu * (1.0f - s));
    du = d * silu;
}

KERNEL swiglu_grad(float* dh, const float* h, const float* dy, i64 f, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    i64 at = i / f * 2 * f + i % f;
    float dg, du;
    swiglu_gradient(h[at], h[at + f], dy[i], dg, du);
    dh[at] = dg;
    dh[at + f] = du;
}

KERNEL swiglu_grad_4(float* dh, const float* h, const float* dy, int f, int n) {
    begin();
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    i64 at = (i64)(i / f) * 2 * f + i % f;
    float4 g = *(const float4*)(h + at), u = *(const float4*)(h + at + f), d = *(const float4*)(dy + i), dg, du;
    swiglu_gradient(g.x, u.x, d.x, dg.x, du.x);
    swiglu_gradient(g.y, u.y, d.y, dg.y, du.y);
    swiglu_gradient(g.z, u.z, d.z, dg.z, du.z);
    swiglu_gradient(g.w, u.w, d.w, dg.w, du.w);
    *(float4*)(dh + at) = dg;
    *(float4*)(dh + at + f) = du;
}
