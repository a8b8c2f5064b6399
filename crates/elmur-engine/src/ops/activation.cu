// Kinds: 0 identity, 1 relu, 2 gelu, 3 silu, 4 tanh, 5 sigmoid, 6 softplus, 7 exp, 8 mish, 9 ln.
__device__ __forceinline__ float normal_cdf(float x) { return 0.5f * (1.0f + erff(x * 0.70710678118654752f)); }

// t = tanh(softplus x) = n / (n + 2) with n = e^x (e^x + 2), which is 1 beyond 20.
struct MishParts {
    float e, t, rest;  // e^x, t, 1 - t
};
__device__ __forceinline__ MishParts mish_parts(float x) {
    float e = expf(x > 20.0f ? 20.0f : x), n = e * (e + 2.0f), share = 1.0f / (n + 2.0f);
    return {e, n * share, 2.0f * share};
}

__device__ __forceinline__ float activate(int kind, float x) {
    switch (kind) {
        case 1: return x < 0.0f ? 0.0f : x;
        case 2: return x * normal_cdf(x);
        case 3: return x * sigmoid(x);
        case 4: return tanhf(x);
        case 5: return sigmoid(x);
        case 6: return fmaxf(x, 0.0f) + logf(1.0f + expf(-fabsf(x)));
        case 7: return expf(x);
        case 8: return x * mish_parts(x).t;
        case 9: return logf(x);
        default: return x;
    }
}

// Derivative, from the function's argument (gelu, silu, softplus, mish, ln) or value (the others).
__device__ __forceinline__ float derivative(int kind, float x) {
    switch (kind) {
        case 1: return x > 0.0f ? 1.0f : 0.0f;
        case 2: return normal_cdf(x) + x * 0.3989422804014327f * expf(-0.5f * x * x);
        case 3: {
            float s = sigmoid(x);
            return s * (1.0f + x * (1.0f - s));
        }
        case 4: return 1.0f - x * x;
        case 5: return x * (1.0f - x);
        case 6: return sigmoid(x);
        case 7: return x;
        case 8: {
            MishParts m = mish_parts(x);
            return m.t + x * (m.e / (1.0f + m.e)) * m.rest * (1.0f + m.t);
        }
        case 9: return 1.0f / x;
        default: return 1.0f;
    }
}

KERNEL activation(int kind, float* y, const float* x, i64 n) {
    begin();
    i64 i = thread_number();
    if (i < n) y[i] = activate(kind, x[i]);
}

KERNEL activation_grad(int kind, float* dx, const float* dy, const float* seen, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    // Where relu is off the gradient is zero whatever dy is.
    dx[i] = kind == 1 ? (seen[i] > 0.0f ? dy[i] : 0.0f) : dy[i] * derivative(kind, seen[i]);
}

// z = x + bias by column, y = f(z). y, z and bias may be null.
struct BiasActivationArgs {
    float *y, *z;
    const float *x, *bias;
    i64 columns, n;
    int kind;
};
KERNEL bias_activation(BiasActivationArgs args) {
    begin();
    i64 i = thread_number();
    if (i >= args.n) return;
    float v = args.x[i] + (args.bias ? args.bias[i % args.columns] : 0.0f);
    if (args.z) args.z[i] = v;
    if (args.y) args.y[i] = activate(args.kind, v);
}
