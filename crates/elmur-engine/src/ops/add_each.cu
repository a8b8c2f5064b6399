// A block of 256 threads takes a chunk of up to 2048 elements. Entries of 4 words: sum, elements, number of
// terms, place of the first term's address.
KERNEL add_each(const u64* entries, const u64* addresses) {
    begin();
    const u64* entry = entries + 4 * (i64)blockIdx.x;
    float* sum = (float*)entry[0];
    int count = (int)entry[1], terms = (int)entry[2];
    const u64* from = addresses + entry[3];
    for (int i = threadIdx.x; i < count; i += 256) {
        float x = ((const float*)from[0])[i];
        for (int t = 1; t < terms; ++t) x += ((const float*)from[t])[i];
        sum[i] = x;
    }
}
