// One thread per block of the generator: it serves four elements, sixteen apart.
KERNEL dropout(float* y, const float* x, DropArgs drop, i64 n) {
    begin();
    i64 block = thread_number(), first = block / 16 * 64 + block % 16;
    if (first >= n) return;
    // All are read before one is written: y may be x.
    float read[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) read[w] = first + 16 * w < n ? x[first + 16 * w] : 0.0f;
    Block4 draws = philox(Rng(drop.state), drop.stream, (u32)block);
#pragma unroll
    for (int w = 0; w < 4; ++w)
        if (first + 16 * w < n) y[first + 16 * w] = read[w] * (draws.w[w] < drop.below ? 0.0f : drop.keep);
}

// Four numbers from each block of the generator, by Box-Muller in f64.
KERNEL random_normal(float* y, const i64* rng, u32 stream, float std, i64 n) {
    begin();
    i64 block = thread_number();
    if (4 * block >= n) return;
    Block4 draws = philox(Rng(rng), stream, (u32)block);
    const double unit = 1.0 / 4294967296.0;
    for (int pair = 0; pair < 2; ++pair) {
        double radius = sqrt(-2.0 * log(((double)draws.w[2 * pair] + 1.0) * unit)), s, c;
        sincospi(2.0 * ((double)draws.w[2 * pair + 1] * unit), &s, &c);
        i64 i = 4 * block + 2 * pair;
        if (i < n) y[i] = (float)((double)std * (radius * c));
        if (i + 1 < n) y[i + 1] = (float)((double)std * (radius * s));
    }
}

// y[i] = the high half of draw i times limit.
KERNEL random_below(int* y, const i64* rng, u32 stream, u32 limit, i64 n) {
    begin();
    i64 i = thread_number();
    if (i >= n) return;
    u32 block = (u32)(16 * (i / 64) + i % 16);
    y[i] = (int)__umulhi(philox(Rng(rng), stream, block).w[i % 64 / 16], limit);
}
