// Images of h by w pixels, of which a row has so many; they move by at most `most`, and with a third draw of a row
// the channels of every three change places.
struct ShiftSize {
    i64 images;
    int h, w, most, draws;
};

// How far a draw in 0..1 moves.
__device__ __forceinline__ int shift_distance(float draw, int most) {
    int range = 2 * most + 1;
    return min((int)(draw * (float)range), range - 1) - most;
}

// Where pixel `at` of the moved images comes from.
__device__ __forceinline__ i64 shift_source(i64 at, const float* draws, const ShiftSize& s) {
    i64 rest = at;
    int j = rest % s.w; rest /= s.w;
    int i = rest % s.h; rest /= s.h;
    const float* draw = draws + rest / s.images * s.draws;
    int from_i = min(max(i + shift_distance(draw[0], s.most), 0), s.h - 1);
    int from_j = min(max(j + shift_distance(draw[1], s.most), 0), s.w - 1);
    if (s.draws == 3) {
        int order = min((int)(draw[2] * 6.0f), 5), own = rest % 3;
        rest += (order + (order < 3 ? own : 3 - own)) % 3 - own;
    }
    return (rest * s.h + from_i) * s.w + from_j;
}

KERNEL shift_bytes(unsigned char* y, const unsigned char* x, const float* draws, ShiftSize s, i64 n) {
    begin();
    i64 at = thread_number();
    if (at < n) y[at] = x[shift_source(at, draws, s)];
}

KERNEL shift_floats(float* y, const float* x, const float* draws, ShiftSize s, i64 n) {
    begin();
    i64 at = thread_number();
    if (at < n) y[at] = x[shift_source(at, draws, s)];
}
