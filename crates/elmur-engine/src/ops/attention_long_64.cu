// Kernels for heads of width 64, to f32 accuracy where they end in exact.
ATTENTION_LONG(attention_long_64, attention_long, AttentionArgs, 128, 64, false)
ATTENTION_LONG(attention_long_64_exact, attention_long, AttentionArgs, 128, 64, true)
ATTENTION_LONG(attention_long_grad_64, attention_long_grad, AttentionGradArgs, 256, 64, false)
ATTENTION_LONG(attention_long_grad_64_exact, attention_long_grad, AttentionGradArgs, 256, 64, true)
ATTENTION_LONG(attention_long_grad_keys_64, attention_long_grad_keys, AttentionGradArgs, 256, 64, false)
ATTENTION_LONG(attention_long_grad_keys_64_exact, attention_long_grad_keys, AttentionGradArgs, 256, 64, true)
