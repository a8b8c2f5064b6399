// A block of 256 threads takes a chunk of up to 2048 elements. Entries of 4 words: old copy, source, new copy,
// elements.
KERNEL moving_average(const u64* table, const float* decay) {
    begin();
    const u64* entry = table + 4 * (i64)blockIdx.x;
    const float *copy = (const float*)entry[0], *source = (const float*)entry[1];
    float *to = (float*)entry[2], keep = *decay, rest = 1.0f - keep;
    int count = (int)entry[3];
    for (int i = threadIdx.x; i < count; i += 256) to[i] = fmaf(keep, copy[i], rest * source[i]);
}
