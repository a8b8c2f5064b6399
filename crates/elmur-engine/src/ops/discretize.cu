// y[i] = bin of x[i] among the rising thresholds of its dimension, in 0..ends - 2.
KERNEL discretize(int* y, const float* x, const float* thresholds, i64 n, i64 ends, i64 count) {
    begin();
    i64 i = thread_number();
    if (i >= count) return;
    const float* row = thresholds + i % n * ends;
    // The thresholds before `low` are reached, those from `high` on are not.
    i64 low = 0, high = ends;
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (row[middle] <= x[i]) low = middle + 1;
        else high = middle;
    }
    y[i] = (int)min(max(low - 1, (i64)0), ends - 2);
}
