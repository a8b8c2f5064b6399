// Kernels for heads of width 16, to f32 accuracy where they end in exact.
ATTENTION_LONG(attention_long_16, attention_long, AttentionArgs, 128, 16, false)
ATTENTION_LONG(attention_long_16_exact, attention_long, AttentionArgs, 128, 16, true)
ATTENTION_LONG(attention_long_grad_16, attention_long_grad, AttentionGradArgs, 256, 16, false)
ATTENTION_LONG(attention_long_grad_16_exact, attention_long_grad, AttentionGradArgs, 256, 16, true)
ATTENTION_LONG(attention_long_grad_keys_16, attention_long_grad_keys, AttentionGradArgs, 256, 16, false)
ATTENTION_LONG(attention_long_grad_keys_16_exact, attention_long_grad_keys, AttentionGradArgs, 256, 16, true)
