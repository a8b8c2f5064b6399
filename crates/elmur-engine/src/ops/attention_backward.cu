// Rows staged in shared memory, or read from global memory.
ATTENTION_GRAD(attention_grad, true)
ATTENTION_GRAD(attention_grad_in_place, false)

// Sums of attention_grad's partial [batch, 2 + distances, d] over the batch, into du [d], dw [d], dr
// [distances, d]; 32 columns by 8 rows.
struct AttentionTablesArgs {
    float *du, *dw, *dr;
    const float* partial;
    i64 batch, d, columns;
};
KERNEL attention_tables(AttentionTablesArgs args) {
    begin();
    float *du = args.du, *dw = args.dw, *dr = args.dr;
    const float* partial = args.partial;
    i64 batch = args.batch, d = args.d, columns = args.columns;
    __shared__ float sums[8][33];
    int tx = threadIdx.x & 31, ty = threadIdx.x >> 5;
    i64 c = (i64)blockIdx.x * 32 + tx;
    float total = 0;
    if (c < columns)
        for (i64 b = ty; b < batch; b += 8) total += partial[b * columns + c];
    sums[ty][tx] = total;
    __syncthreads();
    if (ty != 0 || c >= columns) return;
    float all = 0;
    for (int i = 0; i < 8; ++i) all += sums[i][tx];
    float* out = c < d ? du : c < 2 * d ? dw : dr;
    if (out) out[c < d ? c : c < 2 * d ? c - d : c - 2 * d] = all;
}
