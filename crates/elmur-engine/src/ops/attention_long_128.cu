// Kernels for heads of width 128, to f32 accuracy where they end in exact.
ATTENTION_LONG(attention_long_128, attention_long, AttentionArgs, 128, 128, false)
ATTENTION_LONG(attention_long_128_exact, attention_long, AttentionArgs, 128, 128, true)
ATTENTION_LONG(attention_long_grad_128, attention_long_grad, AttentionGradArgs, 256, 128, false)
ATTENTION_LONG(attention_long_grad_128_exact, attention_long_grad, AttentionGradArgs, 256, 128, true)
ATTENTION_LONG(attention_long_grad_keys_128, attention_long_grad_keys, AttentionGradArgs, 256, 128, false)
ATTENTION_LONG(attention_long_grad_keys_128_exact, attention_long_grad_keys, AttentionGradArgs, 256, 128, true)
