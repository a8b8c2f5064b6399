// Kernels for heads of width 32, to f32 accuracy where they end in exact.
ATTENTION_LONG(attention_long_32, attention_long, AttentionArgs, 128, 32, false)
ATTENTION_LONG(attention_long_32_exact, attention_long, AttentionArgs, 128, 32, true)
ATTENTION_LONG(attention_long_grad_32, attention_long_grad, AttentionGradArgs, 256, 32, false)
ATTENTION_LONG(attention_long_grad_32_exact, attention_long_grad, AttentionGradArgs, 256, 32, true)
ATTENTION_LONG(attention_long_grad_keys_32, attention_long_grad_keys, AttentionGradArgs, 256, 32, false)
ATTENTION_LONG(attention_long_grad_keys_32_exact, attention_long_grad_keys, AttentionGradArgs, 256, 32, true)
